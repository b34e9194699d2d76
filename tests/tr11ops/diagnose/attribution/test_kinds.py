"""What kind of fault it was: on lines that a real Slurm 22.05 printed, and on the workers' own words."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.diagnose.attribution.launch_evidence import (
    LOST,
    NODES,
    ONE,
    OWN_WORD,
    THREE,
    TWO,
    WORKER_KILLED,
    evidence,
    failure,
    marker,
)
from tr11ops.base.redact import signature
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Failure, Kind, MissedWorker, NodeReport


# ----------------------------------------------------------------------------- other causes
def test_refusals_are_configuration():
    refused = attribute(
        evidence(WORKER_KILLED, marker=marker("refused", "data.prefixes: not there", False))
    )
    assert (refused.kind, refused.blamed) == (Kind.CONFIGURATION, ())
    assert (
        attribute(evidence(WORKER_KILLED, worker_statuses={0: 2, 2: 2})).kind is Kind.CONFIGURATION
    )
    mixed = attribute(evidence(WORKER_KILLED, worker_statuses={0: 2, 2: 1}))
    assert mixed.kind is not Kind.CONFIGURATION


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("OSError: [Errno 28] No space left on device: '/scratch/run/checkpoints'", Kind.STORAGE),
        ("OSError: [Errno 122] Disk quota exceeded", Kind.STORAGE),
        ("FloatingPointError: the loss is not finite", Kind.NUMERICS),
        ("ImportError: cannot import name 'x'", Kind.CONFIGURATION),
    ],
)
def test_errors_that_another_node_would_meet_too(error, kind):
    assert (
        attribute(evidence(failures=(failure(ONE, 0, error), failure(TWO, 2, error)))).kind is kind
    )


def test_a_full_disk_of_a_nodes_own_is_the_nodes():
    found = attribute(
        evidence(
            failures=(failure(TWO, 2, "OSError: [Errno 28] No space left on device: '/tmp/x'"),)
        )
    )
    # its health check can condemn it
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))


# ------------------------------------------------------- what was met, after how much, told by whom
PROGRAM = "KeyError: 'tokens'"
DATA = "DataError: data.prefixes[0]: /scratch/corpus.idx: is cut at byte 12"
DATA_WORKER = "LostWorkerError: data worker 0 (process 77) was killed (SIGKILL), most likely for want of memory: start"
SHARED_MEMORY = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's"
GPU_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
FULL = "CheckpointError: saving: rank 2 on jean-zay-iam02: No space left on device: /scratch/run/checkpoints"
NOT_FINITE = "NotFiniteError: the loss is not finite"

KINDS = {
    # error: (by one rank before a step, after 62; on all nodes before a step, after 62)
    PROGRAM: (Kind.UNKNOWN, Kind.UNKNOWN, Kind.CONFIGURATION, Kind.UNKNOWN),
    DATA: (Kind.UNKNOWN, Kind.UNKNOWN, Kind.CONFIGURATION, Kind.UNKNOWN),
    DATA_WORKER: (Kind.NODE, Kind.NODE, Kind.UNKNOWN, Kind.UNKNOWN),
    SHARED_MEMORY: (Kind.NODE, Kind.NODE, Kind.UNKNOWN, Kind.UNKNOWN),
    GPU_MEMORY: (Kind.NODE, Kind.NODE, Kind.CONFIGURATION, Kind.UNKNOWN),
    FULL: (Kind.STORAGE, Kind.STORAGE, Kind.STORAGE, Kind.STORAGE),
    NOT_FINITE: (Kind.NUMERICS, Kind.NUMERICS, Kind.NUMERICS, Kind.NUMERICS),
    OWN_WORD: (Kind.UNKNOWN, Kind.UNKNOWN, Kind.UNKNOWN, Kind.UNKNOWN),
}


@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize("reached", [None, 62])
@pytest.mark.parametrize("teller", ["one rank", "all nodes", "one node of one", "a witness too"])
def test_kind_by_error_steps_done_and_teller(error: str, reached: int | None, teller: str):
    one, all_of_them = KINDS[error][:2], KINDS[error][2:]
    accused = failure(TWO, 2, error, 2.0)
    if teller in {"one rank", "a witness too"}:
        witness = (failure(ONE, 0, LOST, 1.0),) if teller == "a witness too" else ()
        found = attribute(evidence(failures=(*witness, accused), reached=reached))
        expected = one[reached is not None]
        if error != OWN_WORD or witness:  # which may be of a peer, where no one says of whom
            assert error in found.summary  # the accused's own word, not the witness's
        if found.kind in {Kind.NODE, Kind.UNKNOWN} and found.summary.startswith("rank 2"):
            assert found.suspects == (TWO,) or error == OWN_WORD
    elif teller == "all nodes":
        alike = tuple(
            failure(node, 2 * place, error, 2.0 + place) for place, node in enumerate(NODES)
        )
        found = attribute(evidence(failures=alike, reached=reached))
        expected = all_of_them[reached is not None]
    else:
        found = attribute(evidence(nodes=(TWO,), failures=(accused,), reached=reached))
        expected = all_of_them[reached is not None]
    assert (found.kind, found.blamed) == (expected, ())
    if reached is not None:
        # it has trained with this card and this program
        assert found.kind is not Kind.CONFIGURATION


@pytest.mark.parametrize(
    ("reason", "message", "kind"),
    [
        ("refused", "data.prefixes: not there", Kind.CONFIGURATION),
        (
            "refused",
            "loading: rank 2 on jean-zay-iam02: [Errno 5] Input/output error: /scratch/x",
            Kind.STORAGE,
        ),
        (
            "error",
            "the last save failed, all steps after 10 are lost: No space left on device",
            Kind.STORAGE,
        ),
        ("error", "something else", Kind.UNKNOWN),
    ],
)
def test_the_trainers_own_word_by_what_it_tells(reason: str, message: str, kind: Kind):
    assert attribute(evidence(WORKER_KILLED, marker=marker(reason, message))).kind is kind


def test_a_node_that_alone_cannot_load_makes_a_suspect():
    """All ranks raise the same error together: it says on which node."""
    words = (
        f"CheckpointError: loading: rank 2 on {TWO}: Input/output error: /scratch/run/checkpoints/x"
    )
    alike = tuple(
        replace(failure(node, 2 * place, words, 1.0 + place), node=TWO)
        for place, node in enumerate(NODES)
    )
    found = attribute(evidence(failures=alike))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))
    everywhere = attribute(evidence(failures=tuple(replace(one, node="") for one in alike)))
    assert (everywhere.kind, everywhere.suspects) == (Kind.STORAGE, ())


def test_a_node_that_alone_cannot_save_is_the_trainers_word():
    words = f"{TWO} alone could not write the save of step 20 and 40, to which 2 other nodes wrote: Input/output error"
    found = attribute(evidence(WORKER_KILLED, marker=replace(marker("error", words), node=TWO)))
    assert (found.kind, found.blamed, found.summary) == (Kind.NODE, (TWO,), words)
    other = attribute(
        evidence(WORKER_KILLED, marker=replace(marker("error", words), node="elsewhere"))
    )
    assert (other.kind, other.blamed) == (Kind.STORAGE, ())  # no node of this launch


def test_an_exit_status_of_refusal_after_steps_is_no_refusal():
    statuses = {0: 2, 2: 2}
    assert attribute(evidence(worker_statuses=statuses)).kind is Kind.CONFIGURATION
    assert attribute(evidence(worker_statuses=statuses, reached=62)).kind is not Kind.CONFIGURATION


def test_a_killed_data_worker_is_told_with_what_is_known_of_the_memory():
    report = (NodeReport(TWO, memory="the kernel killed 1 process for want of memory"),)
    found = attribute(
        evidence(failures=(failure(TWO, 2, DATA_WORKER),), reports=report, reached=62)
    )
    assert found.evidence[1:] == (f"{TWO}: the kernel killed 1 process for want of memory",)
    other = attribute(evidence(failures=(failure(TWO, 2, PROGRAM),), reports=report, reached=62))
    assert len(other.evidence) == 1 and other.summary.endswith("(after iteration 62)")


def test_one_workers_own_error_makes_its_node_a_suspect_only():
    found = attribute(
        evidence(
            failures=(failure(TWO, 2, "IndexError: list index out of range"), failure(ONE, 0, LOST))
        )
    )
    assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))


def test_a_rank_that_the_others_lost_makes_its_node_a_suspect():
    words = "RankLost: step: no word within 30 s from rank 2 on jean-zay-iam02"
    found = attribute(
        evidence(
            failures=(
                failure(ONE, 0, words),
                failure(THREE, 4, "RankLost: connection closed by rank 0"),
            )
        )
    )
    assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3412",
        "DistBackendError: NCCL error: remote process exited: Call to recv from 10.0.0.2<41264> failed",
        "RankLost: no word within 30 s from rank 3",
    ],
)
def test_a_peers_address_or_rank_makes_its_node_a_suspect(error):
    reports = tuple(
        NodeReport(node, addresses=(f"10.0.0.{place}",)) for place, node in enumerate(NODES, 1)
    )
    found = attribute(evidence(failures=(failure(ONE, 0, error),), reports=reports, ranks={3: TWO}))
    assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))
    assert error in found.evidence[0]
    # one machine plays them all
    alike = tuple(NodeReport(node, addresses=("10.0.0.2",)) for node in NODES)
    assert attribute(evidence(failures=(failure(ONE, 0, error),), reports=alike)).suspects == ()


def test_the_steps_exit_code_tells_what_the_jobs_own_hides():
    found = attribute(evidence(derived_exit_code=134))
    assert (found.kind, found.summary) == (
        Kind.UNKNOWN,
        "a step of the job was ended by SIGABRT (DerivedExitCode 6)",
    )
    assert (found.blamed, found.suspects) == ((), ())
    assert attribute(evidence(nodes=(ONE,), derived_exit_code=137)).suspects == (ONE,)
    for told_to_go in (143, 130, 138, 1, 0, 250):
        assert "step of the job" not in attribute(evidence(derived_exit_code=told_to_go)).summary
    better = attribute(
        evidence(derived_exit_code=134, failures=(failure(TWO, 2, "the worker was ended", 1.0, 6),))
    )
    assert better.suspects == (TWO,)


def test_the_worker_that_was_gone_first_makes_a_suspect():
    def missed(two: float, three: float) -> tuple[NodeReport, ...]:
        return (
            NodeReport(TWO, first_missed=MissedWorker(2, two, "exit status 7")),
            NodeReport(THREE, first_missed=MissedWorker(4, three, "exit status 1")),
        )

    found = attribute(evidence(reports=missed(100.0, 130.0)))
    assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))
    assert found.evidence == ("rank 2 on jean-zay-iam02 was gone first: exit status 7",)
    # clocks differ by as much
    assert attribute(evidence(reports=missed(100.0, 101.0))).suspects == ()
    own = (failure(THREE, 4, "IndexError: list index out of range"),)
    assert attribute(evidence(reports=missed(100.0, 130.0), failures=own)).suspects == (THREE,)


def test_a_task_that_was_told_to_go_names_no_node():
    lines = "srun: error: jean-zay-iam02: tasks 2-3: Terminated\nsrun: error: jean-zay-iam01: task 0: User defined signal 1"
    found = attribute(evidence(lines))
    assert (found.kind, found.suspects) == (Kind.UNKNOWN, ())


def test_a_refused_credential_is_no_lost_node():
    line = "srun: error: Task launch for StepId=13.0 failed on node {}: Invalid job credential"
    one = attribute(evidence(line.format(TWO)))
    assert (one.blamed, one.suspects) == ((), (TWO,))  # its clock or its key
    both = attribute(evidence("\n".join(line.format(node) for node in (ONE, TWO))))
    # whoever made it: no node's own
    assert (both.kind, both.blamed, both.suspects) == (Kind.UNKNOWN, (), ())


def test_a_link_has_two_ends_and_condemns_neither():
    error = "NET/IB : Got completion from peer 10.0.0.9<41264> with status=12 opcode=0 len=0 vendor err 129"
    found = attribute(evidence(failures=(failure(TWO, 2, error),)))
    assert found.blamed == ()


def test_a_save_that_failed_at_the_end_is_storage():
    words = "the last save failed, all steps after 10 are lost: No space left on device (leaving: signal)"
    assert attribute(evidence(marker=marker("error", words))).kind is Kind.STORAGE


@pytest.mark.parametrize(
    "reason", ["finished", "exit-duration", "kill-switch", "pause", "superseded"]
)
def test_an_orderly_end_stands_whatever_launchers_did_later(reason):
    lines = WORKER_KILLED + "\nsrun: error: jean-zay-iam02: task 1: Killed"
    assert attribute(evidence(lines, marker=marker(reason), status=137)).kind is Kind.OPERATOR


def test_a_signal_that_no_one_sent_means_a_node_died_if_one_did():
    lines = "srun: error: Node failure on jean-zay-iam02"
    assert attribute(evidence(lines, marker=marker("signal"))).blamed == (TWO,)
    assert (
        attribute(evidence(lines, marker=marker("signal"), stopped_by="SIGUSR1")).kind
        is Kind.OPERATOR
    )
    assert attribute(evidence(WORKER_KILLED, marker=marker("signal"))).kind is Kind.OPERATOR
    killed = "srun: error: jean-zay-iam02: task 1: Killed"
    assert attribute(evidence(killed, marker=marker("signal"))).kind is Kind.NODE


def test_what_follows_an_end_at_once_is_nobodys_fault():
    killed = "srun: error: jean-zay-iam02: task 1: Killed"
    found = attribute(evidence(killed, ended_by="ana on n1"))
    assert (found.kind, found.blamed, found.summary) == (
        Kind.OPERATOR,
        (),
        "ended at once, as asked by ana on n1",
    )
    assert (
        attribute(evidence(killed, ended_by="ana", marker=marker("error"))).summary != found.summary
    )


def test_a_full_run_directory_blames_storage_a_dead_node_itself():
    first = "srun: error: jean-zay-iam02: task 1: Exited with exit code 1"
    full = "/run/state: Read-only file system"
    assert attribute(evidence(first)).kind is Kind.NODE
    found = attribute(evidence(first, unwritable=full))
    assert (found.kind, found.blamed, found.suspects) == (Kind.STORAGE, (), ())
    assert full in found.summary
    lost = "srun: error: Node failure on jean-zay-iam02"
    assert attribute(evidence(lost, unwritable=full)).blamed == (TWO,)
    assert (
        attribute(evidence(first, unwritable=full, marker=marker("exit-duration"))).kind
        is Kind.OPERATOR
    )


def test_nothing_at_all_is_unknown_and_says_so():
    found = attribute(evidence(status=0))
    assert (found.kind, found.summary) == (
        Kind.UNKNOWN,
        "the workers ended with status 0 and no word",
    )


def test_a_fault_has_one_name_wherever_and_whenever_it_strikes():
    first = "RuntimeError: CUDA error at 0x7f3a on device 3: /opt/a/b.cc:12"
    again = "RuntimeError: CUDA error at 0x1100 on device 5: /opt/c/d.cc:99"
    assert signature(first) == signature(again)


@given(
    st.lists(
        st.builds(
            Failure, st.sampled_from([*NODES, "stranger"]), st.none() | st.integers(0, 7), st.floats(0, 9),
            st.text(max_size=40), st.none() | st.integers(1, 200),
        ),
        max_size=4,
    ),
    st.lists(st.text(max_size=60) | st.sampled_from(WORKER_KILLED.splitlines()), max_size=4),
    st.none() | st.builds(marker, st.sampled_from(["signal", "error", "refused", "finished"])),
    st.booleans(),
)  # fmt: skip
def test_whatever_was_left_behind_there_is_one_conclusion(failures, lines, end, overdue):
    found = attribute(
        evidence("\n".join(lines), failures=tuple(failures), marker=end, overdue=overdue)
    )
    assert 0 <= found.confidence <= 1
    assert found.fault
    assert not found.blamed or (found.kind is Kind.NODE and not found.suspects)
    assert found.kind is not Kind.NODE or found.blamed or found.suspects
    if any(one.signal is not None for one in failures) and not overdue:
        assert not found.blamed  # a rank that a signal ended condemns no node


def test_who_waited_in_vain_is_not_the_suspect_though_all_saw_it_end():
    waited = failure(
        ONE, 0, f"RankLost: step timed out after 10 s: no word from rank 2 on {TWO}", 1.0
    )
    saw = [
        failure(node, rank, "RankLost: connection closed by rank 0", 1.1)
        for rank, node in ((2, TWO), (4, THREE))
    ]
    found = attribute(evidence(failures=(waited, *saw), ranks={0: ONE, 2: TWO, 4: THREE}))
    assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))
    assert "no word from rank 2" in found.summary
