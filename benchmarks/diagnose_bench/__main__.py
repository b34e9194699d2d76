"""Diagnosis by several programs on labelled sets of logs of broken trainings, beside each other.

    python benchmarks/diagnose_bench [--set FOLDER ...] [--only PROGRAM,...] [--mistakes] [--json]

Each set is a folder with logs and labels (README.md beside this file). Printed are, for each set
and program: class (right, or accepted by the label), line, guilty node (right, innocent ones that
it would exclude, innocent ones that it names), the line's node, restart (of five words; and go on
or stop), mistakes of which it was more than 0.9 sure, and the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from labels import Incident, LabelError, read_set
from programs import OWN_SETS, PROGRAMS, TITLES, Unmeasured
from scores import Judged, Scores, judge, total

HEAD = (
    "program",
    "class",
    "line",
    "node",
    "place",
    "restart",
    "go/stop",
    "excl",
    "named",
    ">0.9",
    "ms/log",
)
WIDE = (16, 13, 13, 10, 10, 13, 13, 5, 6, 5, 7)


def main() -> int:
    options = _options()
    programs = options.only.split(",") if options.only else list(PROGRAMS)
    unknown = [name for name in programs if name not in PROGRAMS]
    if unknown:
        print(f"--only {unknown[0]}: there are {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    found = {}
    for folder in options.set or OWN_SETS:
        try:
            incidents = read_set(folder)
        except (LabelError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        found[str(folder)] = measured(incidents, programs)
        if not options.json:
            print(
                "\n".join(screen(folder, incidents, found[str(folder)], options.mistakes)),
                flush=True,
            )
    if options.json:
        print(
            json.dumps({folder: _documents(judged) for folder, judged in found.items()}, indent=1)
        )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="diagnose_bench", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "--set",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="logs with labels; several times",
    )
    parser.add_argument("--only", metavar="PROGRAM,...", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--mistakes", action="store_true", help="list what each program has wrong")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measured(incidents: Sequence[Incident], programs: Sequence[str]) -> dict[str, list[Judged]]:
    """The judged answers of each program; none of one that cannot be asked here."""
    found = {}
    for name in programs:
        try:
            answers = PROGRAMS[name](incidents)
        except Unmeasured as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        found[name] = [judge(incident, answers[incident.name]) for incident in incidents]
    return found


def screen(
    folder: Path,
    incidents: Sequence[Incident],
    judged: dict[str, list[Judged]],
    with_mistakes: bool,
) -> Iterator[str]:
    """One set's table, line by line."""
    told = sum(incident.tells_restart for incident in incidents)
    yield f"== {folder}: {len(incidents)} incidents; restart is told by {told} labels, else it follows from the action"
    yield _row(HEAD)
    scores = {name: total(answers) for name, answers in judged.items()}
    for name, score in scores.items():
        yield _row((TITLES[name], *_cells(score)))
    for name, score in scores.items():
        for part, rows in score.reliability.items():
            yield f"{TITLES[name]}, how sure of {part} (Brier score {score.brier[part]:.3f}):"
            for where, count, said, right in rows:
                yield f"  {where} | {count:4} | said {said:.2f} | right {right:.2f}"
    if with_mistakes:
        for name, answers in judged.items():
            for one in answers:
                for mistake in one.mistakes:
                    yield f"{name}: {one.name}: {mistake}"


def _cells(score: Scores) -> tuple[str, ...]:
    milliseconds = 1000 * score.seconds / max(score.incidents, 1)
    return (
        str(score.fault), str(score.line), str(score.node), str(score.place), str(score.restart), str(score.goes_on),
        str(score.excluded_innocent), str(score.named_innocent), str(score.confident_mistakes), f"{milliseconds:.1f}",
    )  # fmt: skip


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:<{wide}}" for cell, wide in zip(cells, WIDE, strict=True)).rstrip()


def _documents(judged: dict[str, list[Judged]]) -> dict[str, object]:
    return {
        name: {
            **total(answers).document(),
            "mistakes": {one.name: one.mistakes for one in answers if one.mistakes},
        }
        for name, answers in judged.items()
    }


if __name__ == "__main__":
    sys.exit(main())
