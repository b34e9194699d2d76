"""How sure the answers about blame and restart may be, by labelled logs.

    python benchmarks/diagnose_bench/fit.py [--set FOLDER ...] [--write]

Each rule's weight is the mean of a beta distribution: the figure that it was given by hand, worth STRENGTH logs, and
how often its answers were right. What was given no more than CAUTIOUS by hand gets no more, nor what was ever wrong:
the signatures were made on some of these logs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from labels import Incident, read_set
from programs import OWN_SETS, of_diagnosis
from scores import judge, who_is_right

from tr11ops.diagnose.answers import FILE, MOST, share_left
from tr11ops.diagnose.attribution.weights import read_weights
from tr11ops.diagnose.look import diagnose_files

STRENGTH = 10.0
CAUTIOUS = 0.9
HEAD = "# How sure each rule about blame and restart is; benchmarks/diagnose_bench/fit.py --write makes this file.\n"


def read_cases(incidents: Sequence[Incident]) -> Iterator[tuple[str, bool, float]]:
    """(rule, whether it was right, what was left of its weight) of each answer that a label judges."""
    for incident in incidents:
        [found] = diagnose_files(incident.files)
        judged = judge(incident, of_diagnosis(found, 0.0))
        left = share_left(found.confidence)
        if judged.restart is not None:
            yield f"restart-{found.restart.rule}", judged.restart, left
        is_right = who_is_right(judged)
        if is_right is not None:
            yield f"who-{found.accused.rule}", is_right, left


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--set", type=Path, action="append", metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="replace the file of weights")
    options = parser.parse_args()
    cases = defaultdict(list)
    for folder in options.set or OWN_SETS:
        for rule, is_right, left in read_cases(read_set(folder)):
            cases[rule].append((is_right, left))
    text = HEAD
    for rule, entry in read_weights(FILE).items():
        right = sum(is_right for is_right, _ in cases[rule])
        weight = (STRENGTH * entry["prior"] + right) / (STRENGTH + sum(left for _, left in cases[rule]))
        is_certain = entry["prior"] > CAUTIOUS and right == len(cases[rule])
        weight = min(weight, MOST if is_certain else CAUTIOUS)
        print(f"{rule:30} by hand {entry['prior']:.2f}, right {right} of {len(cases[rule])}, fitted {weight:.3f}")
        text += f"\n[{rule}]\nprior = {entry['prior']}\ncases = {len(cases[rule])}\nright = {right}\n"
        text += f"confidence = {weight:.3f}\n"
    if options.write:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
