"""How sure the answers about blame and restart may be, by labelled logs.

    python benchmarks/diagnose_bench/fit.py [--set FOLDER ...] [--write]

Each rule's weight is the mean of a beta distribution: the figure that it was given by hand, worth
STRENGTH logs, and how often its answers were right: on each log, and on each log without the one
signature of its root cause, as no list of signatures knows all. What was given no more than
CAUTIOUS by hand gets no more, nor what was ever wrong.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from labels import Incident, read_set
from msgspec.structs import replace
from programs import OWN_SETS, of_diagnosis
from scores import judge, who_is_right

from tr11ops.diagnose.answers import FILE, MOST, share_left
from tr11ops.diagnose.attribution.weights import read_weights
from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.causes import judge_after
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.matcher import Matcher
from tr11ops.diagnose.reading import blocks
from tr11ops.diagnose.scan import LogScan
from tr11ops.diagnose.topics import error_lines

STRENGTH = 10.0
RULES_OF = frozenset(
    one.id for rule in rules() for one in (rule.signature, *rule.codes.values()) if one is not None
)
# it cannot do without them
NAMED_BY_THE_SCAN = frozenset({"python-exception", "memory-held", "memory-absurd"})
CAUTIOUS = 0.9
HEAD = "# How sure each rule about blame and restart is; benchmarks/diagnose_bench/fit.py --write makes this file.\n"


def read_cases(incidents: Sequence[Incident]) -> Iterator[tuple[str, bool, float]]:
    """(rule, whether it was right, what was left of its weight) of each answer that a label judges."""
    for incident in incidents:
        [found] = diagnose_files(incident.files)
        yield from _cases(incident, found)
        if found.signs.signature in RULES_OF and found.signs.signature not in NAMED_BY_THE_SCAN:
            yield from _cases(incident, _diagnosed_without(found.signs.signature, incident))


def _cases(incident: Incident, found: Diagnosis) -> Iterator[tuple[str, bool, float]]:
    judged = judge(incident, of_diagnosis(found, 0.0))
    left = share_left(found.confidence)
    if judged.restart is not None:
        yield f"restart-{found.restart.rule}", judged.restart, left
    is_right = who_is_right(judged)
    if is_right is not None:
        yield f"who-{found.accused.rule}", is_right, left


@cache
def _matcher_without(signature: str) -> Matcher:
    known = []
    for rule in rules():
        codes = {code: one for code, one in rule.codes.items() if one.id != signature}
        other = (
            None
            if rule.signature is not None and rule.signature.id == signature
            else rule.signature
        )
        if other is not None or codes:
            known.append(replace(rule, signature=other, codes=codes))
    return Matcher((*known, *error_lines()))


def _diagnosed_without(signature: str, incident: Incident) -> Diagnosis:
    logs = []
    for path in incident.files:
        scan = LogScan(str(path), _matcher_without(signature))
        for block in blocks(path):
            scan.feed(block)
        logs.append(scan.launches())
    return judge_after(logs)


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
        weight = (STRENGTH * entry["prior"] + right) / (
            STRENGTH + sum(left for _, left in cases[rule])
        )
        is_certain = entry["prior"] > CAUTIOUS and right == len(cases[rule])
        weight = min(weight, MOST if is_certain else CAUTIOUS)
        print(
            f"{rule:30} by hand {entry['prior']:.2f}, right {right} of {len(cases[rule])}, fitted {weight:.3f}"
        )
        text += (
            f"\n[{rule}]\nprior = {entry['prior']}\ncases = {len(cases[rule])}\nright = {right}\n"
        )
        text += f"confidence = {weight:.3f}\n"
    if options.write:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
