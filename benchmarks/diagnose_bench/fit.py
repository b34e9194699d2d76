"""How sure the answers about blame and restart may be, by labelled logs.

    python benchmarks/diagnose_bench/fit.py [--set FOLDER ...] [--write] [--held-out]

Each rule's weight is the mean of a beta distribution: the figure that it was given by hand, worth
STRENGTH logs, and how often its answers were right: on each log, and on each log without the one
signature of its root cause, as no list of signatures knows all. What was given no more than
CAUTIOUS by hand gets no more, nor what was ever wrong. `--held-out` asks each set with the weights
that all the others give, which tells how they hold on logs that they are not fitted on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from labels import Incident, read_set
from msgspec.structs import replace
from programs import OWN_SETS, of_diagnosis
from scores import brier_score, judge, who_is_right

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
from trainer.contract.record import Record

STRENGTH = 10.0
RULES_OF = frozenset(
    one.id for rule in rules() for one in (rule.signature, *rule.codes.values()) if one is not None
)
# it cannot do without them
NAMED_BY_THE_SCAN = frozenset({"python-exception", "memory-held", "memory-absurd"})
CAUTIOUS = 0.9
HEAD = "# How sure each rule about blame and restart is; benchmarks/diagnose_bench/fit.py --write makes this file.\n"


class Case(Record):
    """An answer that a label judges: its rule, whether it was right, what was left of its weight,
    and whether it was asked without the signature of the root cause.
    """

    rule: str
    is_right: bool
    left: float
    is_hobbled: bool


def read_cases(incidents: Sequence[Incident]) -> Iterator[Case]:
    for incident in incidents:
        [found] = diagnose_files(incident.files)
        yield from _cases(incident, found, is_hobbled=False)
        if found.signs.signature in RULES_OF and found.signs.signature not in NAMED_BY_THE_SCAN:
            without = _diagnosed_without(found.signs.signature, incident)
            yield from _cases(incident, without, is_hobbled=True)


def _cases(incident: Incident, found: Diagnosis, is_hobbled: bool) -> Iterator[Case]:
    judged = judge(incident, of_diagnosis(found, 0.0))
    left = share_left(found.confidence)
    if judged.restart is not None:
        yield Case(f"restart-{found.restart.rule}", judged.restart, left, is_hobbled)
    is_right = who_is_right(judged)
    if is_right is not None:
        yield Case(f"who-{found.accused.rule}", is_right, left, is_hobbled)


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


class Weight(Record):
    """How sure a rule is, and of how many answers that is known."""

    cases: int
    right: int
    fitted: float


def weights_of(cases: Sequence[Case]) -> Mapping[str, Weight]:
    """The weight of each rule by these answers."""
    found = {}
    for rule, entry in read_weights(FILE).items():
        of_rule = [case for case in cases if case.rule == rule]
        right = sum(case.is_right for case in of_rule)
        fitted = (STRENGTH * entry["prior"] + right) / (
            STRENGTH + sum(case.left for case in of_rule)
        )
        is_certain = entry["prior"] > CAUTIOUS and right == len(of_rule)
        found[rule] = Weight(len(of_rule), right, min(fitted, MOST if is_certain else CAUTIOUS))
    return found


def print_held_out(cases: Mapping[str, Sequence[Case]]) -> None:
    """How sure the answers on each set are by the weights of all others, and how right."""
    for name, own in cases.items():
        weights = weights_of([one for other in cases if other != name for one in cases[other]])
        for kind in ("who", "restart"):
            said = [
                (min(MOST, weights[one.rule].fitted * one.left), one.is_right)
                for one in own
                if one.rule.startswith(kind) and not one.is_hobbled
            ]
            if not said:
                continue
            wrong = sum(sure > CAUTIOUS and not is_right for sure, is_right in said)
            print(
                f"{name}: {kind} of {len(said)}, Brier score {brier_score(said):.3f},"
                f" wrong above 0.9: {wrong}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--set", type=Path, action="append", metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="replace the file of weights")
    parser.add_argument(
        "--held-out", action="store_true", help="ask each set with the weights of the others"
    )
    options = parser.parse_args()
    cases = {folder.name: list(read_cases(read_set(folder))) for folder in options.set or OWN_SETS}
    weights = weights_of([one for of_set in cases.values() for one in of_set])
    text = HEAD
    for rule, entry in read_weights(FILE).items():
        weight = weights[rule]
        print(
            f"{rule:30} by hand {entry['prior']:.2f}, right {weight.right} of {weight.cases},"
            f" fitted {weight.fitted:.3f}"
        )
        text += f"\n[{rule}]\nprior = {entry['prior']}\ncases = {weight.cases}\n"
        text += f"right = {weight.right}\nconfidence = {weight.fitted:.3f}\n"
    if options.held_out:
        print_held_out(cases)
    if options.write:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
