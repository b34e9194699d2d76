"""The batch-size study as one picture: the long run beside the validation loss of every optimizer
and batch.

    python benchmarks/batch_size_plot.py FOLDER OUTPUT.svg

FOLDER is that of `batch_size_study.py`. Prints the table of the right panel too.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.batch_size_study import LONG, RATE, STUDIES, masked_floor, tr11
from tr11ops.report.charts.scale import Scale
from trainer.contract.metrics_record import VALIDATION, records

COLOURS = ("#2563ab", "#7b8794", "#c2571a", "#2f8f4e", "#7c4fc4")
LEFT, TOP, WIDTH, HEIGHT, GAP = 46, 40, 350, 230, 70  # of a panel, in pixels
MEAN = 25  # steps in a mean of the training loss
Points = Sequence[tuple[float, float]]


def table(folder: Path) -> dict[str, dict[int, float]]:
    """Validation loss by optimizer (and rate, where it had several) and batch, of the cells that
    are done.
    """
    found: dict[str, dict[int, float]] = {}
    for name in STUDIES:
        if not (folder / name / "sweep.json").exists():
            continue
        cells = json.loads((folder / name / "sweep.json").read_text(encoding="utf-8"))["cells"]
        settings = {one["name"]: one["settings"] for one in cells}
        for cell in json.loads(tr11("sweep", "compare", str(folder / name), "--json"))["cells"]:
            if cell["validation_loss"] is not None:
                rate = settings[cell["name"]].get(RATE)
                row = f"{name}, {rate}" if rate else name
                found.setdefault(row, {})[cell["global_batch_size"]] = cell["validation_loss"]
    return found


def course(folder: Path) -> tuple[Points, Points]:
    """The long run: mean training losses and validation losses by samples."""
    [metrics] = (folder / LONG).glob("*/*/logs/*/metrics.jsonl")
    steps, valid = [], []
    for record in records(metrics):
        if record.kind == VALIDATION and record.values["name"] == "valid":
            valid.append((steps[-1][0], record.number("lm_loss")))
        elif record.kind == "step":
            steps.append((record.number("consumed_samples"), record.number("lm_loss")))
    means = [
        (steps[begin + MEAN - 1][0], fmean(loss for _, loss in steps[begin : begin + MEAN]))
        for begin in range(0, len(steps) - MEAN + 1, MEAN)
    ]
    return means, valid


def panel(
    left: float,
    title: str,
    lines: Sequence[tuple[str, str, Points]],
    floor: float,
    across: Scale,
    ticks: Sequence[tuple[float, str]],
    below: str,
) -> Iterator[str]:
    """One drawing: its frame, its curves, the unigram floor as a dashed line, and a legend."""
    up = Scale.over([floor, *(loss for _, _, points in lines for _, loss in points)])

    def x(value: float) -> float:
        return left + WIDTH * (across.at(value) or 0.0)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - (up.at(value) or 0.0))

    yield f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{title}</text>'
    for value in up.ticks():
        yield f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value, text in ticks:
        yield f'<text x="{x(value):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{text}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{below}</text>'
    yield f'<path d="M{left} {y(floor):.1f}h{WIDTH}" stroke="#000" stroke-dasharray="5 4"/>'
    yield f'<text x="{left + 4}" y="{y(floor) - 5:.1f}">unigram floor {floor:.2f}</text>'
    for index, (name, colour, points) in enumerate(lines):
        path = "L".join(f"{x(place):.1f} {y(loss):.1f}" for place, loss in points)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        if len(points) <= 32:
            yield from (
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6" fill="{colour}"/>'
                for a, b in points
            )
        place = TOP + 12 + 16 * index
        yield f'<text x="{left + WIDTH - 8}" y="{place}" text-anchor="end" fill="{colour}">{name}</text>'


def picture(
    folder: Path, rows: Mapping[str, Mapping[int, float]], long_floor: float, floor: float
) -> str:
    """The whole SVG: the long run over `long_floor`, and `rows` (see `table`) over `floor`."""
    train, valid = course(folder)
    blue, orange = COLOURS[0], COLOURS[2]
    samples = Scale.over([0, train[-1][0]])
    ticks = [(value, f"{value / 1000:.0f} k") for value in samples.ticks(5)]
    long = [(f"training, means of {MEAN} steps", blue, train), ("validation", orange, valid)]
    parts = [
        *panel(
            LEFT,
            "AdamW, batch 64: masked-LM loss (nats)",
            long,
            masked_floor(folder / LONG),
            samples,
            ticks,
            "samples",
        )
    ]
    batches = sorted({batch for row in rows.values() for batch in row})
    across = Scale.over(map(float, batches), log=True)
    lines = [
        (name, colour, sorted(row.items()))
        for colour, (name, row) in zip(COLOURS, rows.items(), strict=False)
    ]
    right = LEFT + WIDTH + GAP
    marks = [(float(batch), f"{batch:,}") for batch in batches]
    parts += panel(right, "Validation loss at equal samples", lines, floor, across, marks, "batch")
    size = f'width="{right + WIDTH + 20}" height="{TOP + HEIGHT + 50}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def main() -> None:
    folder, output = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    os.environ["TR11_LOCAL_SCHEDULER"] = str(folder / "scheduler")
    rows = table(folder)
    long_floor, floor = (masked_floor(folder / name) for name in (LONG, next(iter(STUDIES))))
    output.write_text(picture(folder, rows, long_floor, floor), encoding="utf-8")
    batches = sorted({batch for row in rows.values() for batch in row})
    print("| optimizer |", " | ".join(f"{batch:,}" for batch in batches), "|")
    for name, row in rows.items():
        print(
            f"| {name} |", " | ".join(f"{row.get(batch, math.nan):.3f}" for batch in batches), "|"
        )
    print(f"unigram floors: {long_floor:.3f} (long), {floor:.3f}")


if __name__ == "__main__":
    main()
