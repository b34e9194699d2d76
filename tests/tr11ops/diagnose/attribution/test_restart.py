"""Whether a plain restart helps, by what was concluded of a launch: one answer for the agent and
for diagnose.
"""

from __future__ import annotations

import pytest

from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.diagnose.attribution.restart import restart_after
from tr11ops.diagnose.signature import Restart

EVICTED = (
    "rank 3 on n2: OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'"
)
FULL = "rank 3 on n2: OSError: [Errno 28] No space left on device: '/lustre/x'"
OUT_OF_MEMORY = (
    "rank 3 on n2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
)


def concluded(kind: Kind, said: str = "no words", **more: tuple[str, ...]) -> Attribution:
    return Attribution(kind, said, 0.9, evidence=(said,), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (concluded(Kind.NODE, blamed=("n2",)), Restart.ELSEWHERE),
        (concluded(Kind.NODE, suspects=("n2",)), Restart.ELSEWHERE),
        (concluded(Kind.CONFIGURATION), Restart.CHANGE),
        (concluded(Kind.SOFTWARE, suspects=("n2",)), Restart.CHANGE),
        (concluded(Kind.STORAGE, FULL), Restart.CHANGE),
        (concluded(Kind.STORAGE, EVICTED), Restart.PLAIN),
        (concluded(Kind.NUMERICS), Restart.CHANGE),
        (concluded(Kind.PORT), Restart.PLAIN),
        (concluded(Kind.HEALTH_CHECK), Restart.PLAIN),
        (concluded(Kind.OPERATOR), Restart.NONE),
        (concluded(Kind.UNKNOWN), Restart.UNKNOWN),
        (concluded(Kind.UNKNOWN, OUT_OF_MEMORY), Restart.CHANGE),
    ],
)  # fmt: skip
def test_each_kind(found: Attribution, answer: Restart) -> None:
    assert restart_after(found, trained=True).answer is answer


def test_what_passes_and_comes_again_at_the_same_step_does_not_pass() -> None:
    evicted = concluded(Kind.STORAGE, EVICTED)
    assert restart_after(evicted, trained=True, times=2).answer is Restart.CHANGE


def test_a_fault_of_unknown_cause_may_come_twice_by_chance() -> None:
    unknown = concluded(Kind.UNKNOWN)
    assert restart_after(unknown, trained=True, times=2).answer is Restart.UNKNOWN
    third = restart_after(unknown, trained=True, times=3)
    assert third.answer is Restart.CHANGE and "3 times" in third.why


def test_a_node_that_fails_twice_at_one_step_is_still_the_nodes() -> None:
    assert (
        restart_after(concluded(Kind.NODE, blamed=("n2",)), trained=True, times=2).answer
        is Restart.ELSEWHERE
    )


def stuck(rank: int, number: int, operation: str) -> str:
    return (
        f"rank {rank} on n{rank}: [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=64, Timeout(ms)=600000) ran for 600080 milliseconds"
    )


@pytest.mark.parametrize(
    ("evidence", "answer", "why"),
    [
        ((stuck(0, 71, "BROADCAST"), stuck(1, 71, "ALLREDUCE")), Restart.CHANGE, "repaired"),
        ((stuck(0, 71, "BROADCAST"), stuck(1, 74, "ALLREDUCE")), Restart.UNKNOWN, "stacks"),
        ((stuck(0, 71, "ALLREDUCE"), stuck(1, 71, "ALLREDUCE")), Restart.UNKNOWN, "one try tells"),
        (("rank 0 on n1: DistStoreError: Timed out after 1801 seconds waiting for clients. 8/16 clients joined.",), Restart.UNKNOWN, "missing"),
        (("rank 0 on n1: DistStoreError: Timed out after 301 seconds waiting for clients. 8/16 clients joined.",), Restart.PLAIN, "passes"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_as_by_diagnose(
    evidence: tuple[str, ...], answer: Restart, why: str
) -> None:
    found = restart_after(
        Attribution(Kind.UNKNOWN, evidence[0], 0.9, evidence=evidence), trained=False
    )
    assert found.answer is answer and why in found.why
