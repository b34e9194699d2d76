"""The tables of the pages on diagnosis are those of the code: classes with their actions and answers,
proofs, NVLink's sub-codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tr11ops.diagnose.answers import EndFacts, Signs, restart_of
from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.nvlink import nvlink_kinds, nvlink_rules
from tr11ops.diagnose.screen import RESTARTS
from tr11ops.diagnose.signature import USUAL_STEP, FaultClass, Proof, Role

DOCS = Path(__file__).parents[3] / "docs"
PROOFS = {
    Proof.XID: "the driver reports a fault after which the GPU has to be reset",
    Proof.MEMORY: "an uncorrectable memory error",
    Proof.BUS: "a GPU fell off the bus",
    Proof.SCHEDULER: "the scheduler says that it lost the node",
    Proof.HEALTH_CHECK: "a check of the hardware, or the driver's, failed on it alone",
}


def classes() -> Iterator[str]:
    yield "| verdict | what it is | usual action | a restart helps, unless the line says more |"
    yield "|---|---|---|---|"
    for fault, step in USUAL_STEP.items():
        answer = restart_of(EndFacts(fault, step, 0.9, Signs(role=Role.CAUSE, trained=True))).answer
        yield f"| `{fault}` | {fault.words} | `{step}` | {RESTARTS[answer] or 'nothing is to be started'} |"


def proofs() -> Iterator[str]:
    yield "| proof | what it is | signatures |"
    yield "|---|---|---|"
    of_proof: dict[Proof, set[str]] = {}
    for rule in rules():
        for signature in (rule.signature, *rule.codes.values()):
            if signature is not None and signature.proof is not None:
                name = f"{signature.family}.toml" if signature.family == "xid" else signature.id
                of_proof.setdefault(signature.proof, set()).add(name)
    for proof, words in PROOFS.items():
        names = ", ".join(f"`{name}`" for name in sorted(of_proof[proof]))
        yield f"| `{proof}` | {words} | {names} |"


def sub_codes() -> Iterator[str]:
    yield "| who | what it says | proof | units, with sub-codes or statuses |"
    yield "|---|---|---|---|"
    for who, kind in nvlink_kinds().items():
        told = []
        for rule in nvlink_rules():
            if rule.who != who:
                continue
            numbers = ", ".join(str(number) for number in sorted(rule.subcodes))
            numbers = numbers or ", ".join(f"{number:#x}" for number in sorted(rule.statuses))
            told.append(f"{' '.join(sorted(rule.units))} {numbers}".strip())
        yield f"| `{who}` | {kind['says']} | {'yes' if 'proof' in kind else 'no'} | {'; '.join(told)} |"


@pytest.mark.parametrize(
    ("table", "page"),
    [
        (classes, "how-to/diagnose.md"),
        (proofs, "explanation/suspects.md"),
        (sub_codes, "explanation/suspects.md"),
    ],
)
def test_the_documentation_has_the_tables_of_the_code(
    table: Callable[[], Iterator[str]], page: str
) -> None:
    lines = "\n".join(table())
    assert lines in (DOCS / page).read_text(encoding="utf-8"), f"docs/{page} lacks:\n{lines}"


def test_each_class_and_each_proof_has_its_row() -> None:
    assert set(USUAL_STEP) | {FaultClass.RUNNING} == set(FaultClass)
    assert set(PROOFS) == set(Proof)
