"""tr11 against other operations on windows of a real failure trace: `tr11 replay` many times over.

    python benchmarks/replay.py FILE [--windows 20] [--first-seed 100] [--held 2] [--system N]

Prints a line for each window as it is done, then a table in Markdown: for each operation the median
and the worst effective training time over all windows, how far it is from the oracle, on how many
windows it is ahead of all others but the oracle, and what it took of people. The seeds from 100 on
are for scoring; parameters are chosen on those below.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median

from tr11ops.replay.parameters import Layout
from tr11ops.replay.production import production_score
from tr11ops.replay.rivals import NoForesight, Oracle, rival_scores
from tr11ops.replay.traces import DAY, Trace, read_trace, window
from tr11ops.replay.world import Score

DAYS = 117.0
HEADINGS = (
    "operation",
    "effective, median",
    "worst",
    "points behind the oracle, median and most",
    "ahead",
    "wasted node-hours",
    "acts",
    "mails a week",
    "innocent",
    "burned",
    "waited h",
)


def scores_of(trace: Trace, layout: Layout, seed: int) -> Mapping[str, Score]:
    """All operations on one window."""
    part = window(trace, layout.all, DAYS * DAY, seed)
    scores = (production_score(part, layout), *rival_scores(part, layout))
    return {score.operation: score for score in scores}


def is_ahead(name: str, scores: Mapping[str, Score]) -> bool:
    """Whether no other operation did better on a window; those with foresight are none."""
    foresees = {Oracle.name, NoForesight.name}
    others = [score for score in scores.values() if score.operation not in foresees]
    return all(scores[name].effective >= other.effective for other in others)


def row(name: str, windows: list[Mapping[str, Score]]) -> str:
    """One operation over all windows."""
    own = [scores[name] for scores in windows]
    behind = [scores[Oracle.name].percent - scores[name].percent for scores in windows]
    ahead = sum(is_ahead(name, scores) for scores in windows)
    cells = (
        name,
        f"{median(score.percent for score in own):.2f} %",
        f"{min(score.percent for score in own):.2f} %",
        f"{median(behind):.2f}, {max(behind):.2f}",
        f"{ahead} of {len(windows)}",
        f"{median(score.wasted for score in own):,.0f}",
        f"{mean(score.acts for score in own):.1f}",
        f"{mean(score.mails for score in own):.1f}",
        f"{sum(score.innocent for score in own)} of {sum(score.excluded for score in own)}",
        f"{sum(score.burned for score in own)} of {sum(score.tasks for score in own)}",
        f"{median(score.waited_hours for score in own):,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all windows, two at a time, and print what came of them."""
    parser = argparse.ArgumentParser(description="tr11 on windows of a real failure trace")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--held", type=int, default=2)
    parser.add_argument("--system", default="")
    options = parser.parse_args()
    trace = read_trace(options.trace, options.system)
    seeds = range(options.first_seed, options.first_seed + options.windows)
    windows = []
    with ProcessPoolExecutor(2) as pool:
        found = pool.map(partial(scores_of, trace, Layout(held=options.held)), seeds)
        for seed, scores in zip(seeds, found, strict=True):
            each = ", ".join(f"{name} {score.percent:.2f}" for name, score in scores.items())
            print(f"seed {seed}: {each}", flush=True)
            windows.append(scores)
    print(f"\n{trace.name}: {len(windows)} windows from seed {seeds[0]}, {options.held} held\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print(f"|{'---|' * len(HEADINGS)}")
    for name in windows[0]:
        print(row(name, windows))


if __name__ == "__main__":
    main()
