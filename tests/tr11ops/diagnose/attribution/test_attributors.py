"""Which node is named: on lines that a real Slurm 22.05 printed, and on the workers' own words."""

from __future__ import annotations

import pytest

from tests.tr11ops.diagnose.attribution.launch_evidence import (
    LOST,
    NODE_DEAD,
    NODES,
    ONE,
    OWN_WORD,
    THREE,
    TWO,
    WORKER_KILLED,
    evidence,
    failure,
)
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import Awaited, Failure, Kind, NodeReport
from tr11ops.diagnose.attribution.srun import parse_lines


# ----------------------------------------------------------------------------- srun's lines
def test_what_srun_ended_itself_is_no_first_sign():
    first, *later = parse_lines(WORKER_KILLED.splitlines())
    assert (first.nodes, first.exit_code, first.is_own) == ((ONE,), 1, True)
    assert [line.is_own for line in later] == [False, False]
    many = parse_lines(["srun: error: x[01-02,07]: tasks 0-1,6: Killed"])
    assert (many[0].nodes, many[0].by_signal) == (("x01", "x02", "x07"), True)
    assert parse_lines(["srun: Job 3 step creation temporarily disabled", "[default0]: loss"]) == ()


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Node failure on jean-zay-iam02",
        "slurmstepd: error: *** STEP 12.0 ON jean-zay-iam01 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE jean-zay-iam02 FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "srun: error: Task launch for StepId=12.0 failed on node jean-zay-iam02: Communication connection failure",
    ],
)
def test_a_lost_node_is_named_whatever_else_is_said(line):
    found = attribute(evidence(f"{NODE_DEAD}\n{line}"))
    assert (found.kind, found.blamed) == (Kind.NODE, (TWO,))
    assert line in found.evidence and found.confidence >= 0.9


# ----------------------------------------------------------------------------- nodes
def test_a_killed_worker_is_named_before_nodes_that_ended_first():
    failures = (
        failure(ONE, 0, LOST, 1.0), failure(THREE, 4, LOST, 1.0),
        failure(TWO, 2, "the worker was ended by SIGKILL", 1.2, 9),
    )  # fmt: skip
    found = attribute(evidence(WORKER_KILLED, failures=failures))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))
    assert found.summary == "rank 2 on jean-zay-iam02: the worker was ended by SIGKILL"


def test_a_dead_node_is_named_by_its_state_and_by_silence():
    states = {
        ONE: frozenset({"mixed"}),
        TWO: frozenset({"mixed", "not_responding"}),
        THREE: frozenset({"mixed"}),
    }
    victims = (failure(ONE, 0, LOST), failure(THREE, 4, LOST))
    found = attribute(evidence(NODE_DEAD, failures=victims, states=states))
    assert (found.kind, found.blamed) == (Kind.NODE, (TWO,)) and found.confidence > 0.9
    silent = attribute(evidence(NODE_DEAD, failures=victims, overdue=True))
    assert (silent.kind, silent.blamed) == (Kind.NODE, (TWO,))
    # without the wait it is no sign
    assert attribute(evidence(NODE_DEAD, failures=victims)).kind is Kind.UNKNOWN


@pytest.mark.parametrize("flag", ["fail", "drain", "maintenance"])
def test_a_node_that_is_taken_out_of_service_is_not_lost(flag):
    """Its jobs run on: it is not to blame for what killed a worker elsewhere."""
    states = {
        ONE: frozenset({"mixed", flag}),
        TWO: frozenset({"mixed"}),
        THREE: frozenset({"mixed"}),
    }
    killed = failure(TWO, 2, "the worker was ended by SIGKILL", 1.2, 9)
    found = attribute(evidence(WORKER_KILLED, failures=(killed,), states=states))
    assert (found.blamed, found.suspects) == ((), (TWO,))


def test_a_silent_node_whose_workers_left_word_is_not_lost():
    """Its slurmd does not answer the controller; the machine does."""
    states = dict.fromkeys((ONE, THREE), frozenset({"mixed"})) | {
        TWO: frozenset({"mixed", "not_responding"})
    }
    failures = (failure(TWO, 2, LOST), failure(THREE, 4, "the worker was ended by SIGKILL", 1.2, 9))
    found = attribute(evidence(NODE_DEAD, failures=failures, states=states))
    assert (found.blamed, found.suspects) == ((), (THREE,))


def test_a_controller_that_has_just_started_blames_no_node():
    """It says "unknown" of every node until that has spoken to it."""
    states = dict.fromkeys((ONE, TWO, THREE), frozenset({"unknown"}))
    killed = failure(TWO, 2, "the worker was ended by SIGKILL", 1.2, 9)
    found = attribute(evidence(WORKER_KILLED, failures=(killed,), states=states))
    assert (found.blamed, found.suspects) == ((), (TWO,))


def test_a_black_hole_leaves_only_sruns_line():
    lines = "srun: error: jean-zay-iam02: task 1: Aborted\nsrun: launch/slurm: _step_signal: Terminating StepId=9.0\n"
    found = attribute(evidence(lines + "srun: error: jean-zay-iam[01,03]: tasks 0,2: Killed"))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))
    exited = lines.replace("Aborted", "Exited with exit code 127")
    assert attribute(evidence(exited)).suspects == (TWO,)


def test_a_condemned_node_is_named_by_its_own_check():
    reports = (
        NodeReport(ONE, passed_checks=("gpu-count",)),
        NodeReport(TWO, 4, ("gpu-count: 7 of 8",)),
    )
    found = attribute(evidence(WORKER_KILLED, reports=reports))
    assert (found.blamed, found.evidence) == (
        (TWO,),
        ("jean-zay-iam02: health check gpu-count: 7 of 8",),
    )


@pytest.mark.parametrize(
    "others",
    [(), (NodeReport(ONE),), (NodeReport(ONE, passed_checks=("memory",)), NodeReport(THREE))],
)
def test_a_check_that_no_other_node_has_answered_makes_a_suspect(
    others: tuple[NodeReport, ...],
) -> None:
    """It may fail everywhere: the launch was over before the others could say."""
    found = attribute(
        evidence(WORKER_KILLED, reports=(*others, NodeReport(TWO, 4, ("script:fans.sh: slow",))))
    )
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))
    assert found.evidence == ("jean-zay-iam02: health check script:fans.sh: slow",)
    alone = attribute(evidence(nodes=(TWO,), reports=(NodeReport(TWO, 4, ("gpu-count: 7 of 8",)),)))
    assert alone.blamed == (TWO,), "a launch of one node has no others"


def test_a_cuda_error_blames_its_node_and_not_the_peers():
    failures = (
        failure(ONE, 1, "RuntimeError: Connection closed by peer [10.0.0.2]:3412", 0.9),
        failure(TWO, 3, "RuntimeError: CUDA error: uncorrectable ECC error encountered", 1.0),
        failure(THREE, 5, "DistBackendError: NCCL error: unhandled system error", 1.1),
    )
    found = attribute(evidence(failures=failures))
    assert (found.kind, found.blamed) == (Kind.NODE, (TWO,))


def test_death_on_most_nodes_at_once_is_no_nodes_fault():
    failures = tuple(
        failure(node, rank, "the worker was ended by SIGSEGV", 1.0, 11)
        for rank, node in enumerate(NODES)
    )
    found = attribute(evidence(failures=failures))
    assert (found.kind, found.blamed) == (Kind.UNKNOWN, ())


def test_nodes_that_end_alike_without_a_word_name_no_one():
    lines = "srun: error: jean-zay-iam01: task 0: Exited with exit code 1\nsrun: error: jean-zay-iam02: task 1: Exited with exit code 1"
    assert attribute(evidence(lines)).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: jean-zay-iam02: task 1: Killed",
        "srun: error: jean-zay-iam02: task 1: Segmentation fault (core dumped)",
        "srun: error: jean-zay-iam02: task 1: Bus error",
        "srun: error: jean-zay-iam02: task 1: Out Of Memory",
        "srun: error: jean-zay-iam02: task 1: Exited with exit code 1",
    ],
)
def test_a_task_that_died_alone_makes_a_suspect_only(line):
    ending = "srun: launch/slurm: _step_signal: Terminating StepId=4.0"
    found = attribute(
        evidence(f"{line}\n{ending}\nsrun: error: jean-zay-iam01: task 0: Terminated")
    )
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))


@pytest.mark.parametrize("number", [9, 11, 7, 6])
def test_a_rank_that_a_signal_ended_makes_a_suspect_only(number):
    died = failure(TWO, 2, f"the worker was ended by {number}", 1.0, number)
    found = attribute(evidence(WORKER_KILLED, failures=(died, failure(ONE, 0, LOST, 1.1))))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))


INNOCENT = (
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 79.15 GiB total capacity)",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
    "are out of shared memory.",
    "RuntimeError: DataLoader worker (pid(s) 1234) exited unexpectedly",
    "OSError: [Errno 12] Cannot allocate memory",
)
GUILTY = (
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "RuntimeError: No CUDA GPUs are available",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
)


@pytest.mark.parametrize("error", INNOCENT)
def test_what_a_program_may_cause_condemns_no_node(error):
    found = attribute(evidence(failures=(failure(TWO, 2, error), failure(ONE, 0, LOST, 1.2))))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (), (TWO,))
    everywhere = attribute(evidence(failures=(failure(TWO, 2, error), failure(ONE, 0, error))))
    assert (everywhere.blamed, everywhere.suspects) == ((), ())


@pytest.mark.parametrize("error", GUILTY)
def test_texts_of_broken_hardware_condemn_a_node_at_once(error):
    found = attribute(evidence(failures=(failure(TWO, 2, error), failure(ONE, 0, LOST, 1.2))))
    assert (found.kind, found.blamed, found.suspects) == (Kind.NODE, (TWO,), ())
    seen = f"{error}; watchdog: RankLost"  # told together with a lost peer it is no proof
    assert attribute(evidence(failures=(failure(TWO, 2, seen),))).blamed == ()


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1",
        "DistBackendError: NCCL error: unhandled system error", "ncclRemoteError: remote process exiting prematurely",
        "TimeoutError: the collective timed out", "BrokenPipeError: [Errno 32] Broken pipe", LOST,
        "CheckpointError: the ranks lost each other during a checkpoint operation: timed out",
        "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ],
)  # fmt: skip
def test_an_error_about_a_peer_says_nothing_of_its_own_node(error):
    assert read_error(error).is_consequence
    found = attribute(evidence(failures=(failure(ONE, 0, error),)))
    assert ONE not in (*found.blamed, *found.suspects)


# --------------------------------------------------------------- the accused first, witnesses after
IN_USE = (
    "OSError: [Errno 98] Address already in use",
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, "
    "code: -98, name: EADDRINUSE, message: address already in use",
)
DOES_NOT_ANSWER = (
    "RankLost: rank 0 does not answer on 10.0.0.1:29500 ([Errno 111] Connection refused)"
)


@pytest.mark.parametrize("error", IN_USE)
@pytest.mark.parametrize("rank", [0, None])  # the worker's own word, or its launcher's
def test_a_taken_port_is_told_by_rank_0_whatever_the_others_say(error, rank):
    witnesses = (
        failure(TWO, 2, DOES_NOT_ANSWER, 0.5),
        failure(THREE, 4, "RankLost: connection closed by rank 0", 0.6),
    )
    found = attribute(
        evidence(WORKER_KILLED, failures=(*witnesses, failure(ONE, rank, error, 1.0)))
    )
    assert (found.kind, found.blamed, found.suspects, found.fault) == (
        Kind.PORT,
        (),
        (),
        "port taken",
    )
    assert error in found.summary
    holder = (NodeReport(ONE, port_holder="process 77 (nc) of ana"),)
    fixed = attribute(
        evidence(failures=(*witnesses, failure(ONE, rank, error)), reports=holder, fixed_port=29500)
    )
    assert (fixed.kind, fixed.blamed, fixed.suspects, fixed.fault) == (
        Kind.PORT,
        (),
        (ONE,),
        "port 29500 taken",
    )
    assert (
        "port 29500 of jean-zay-iam01 is held by process 77 (nc) of ana: end that process, or remove slurm.master_port"
        in (fixed.summary)
    )
    unseen = attribute(evidence(failures=(failure(ONE, rank, error),), fixed_port=29500)).summary
    assert "port 29500 of jean-zay-iam01 is taken, by whom is not known: end that process" in unseen
    assert error not in unseen and any(error in line for line in fixed.evidence)


def test_a_port_of_another_rank_is_that_ranks_own_error():
    found = attribute(evidence(failures=(failure(TWO, 2, IN_USE[0]), failure(ONE, 0, LOST, 0.5))))
    assert (found.kind, found.suspects) == (Kind.UNKNOWN, (TWO,)) and IN_USE[0] in found.summary


def test_the_accused_ranks_own_word_is_quoted_before_what_is_said_of_it():
    found = attribute(
        evidence(failures=(failure(ONE, 0, LOST, 1.0), failure(TWO, 2, OWN_WORD, 2.0)))
    )
    assert (found.suspects, found.summary) == ((TWO,), f"rank 2 on {TWO}: {OWN_WORD}")
    assert found.evidence == (f"rank 2 on {TWO}: {OWN_WORD}", f"rank 0 on {ONE}: {LOST}")
    mute = attribute(
        evidence(
            failures=(
                failure(ONE, 0, LOST),
                failure(TWO, 2, "RuntimeError: Connection reset by peer", 2.0),
            )
        )
    )
    # a victim's words, of no one
    assert (mute.suspects, mute.summary) == ((TWO,), f"rank 0 on {ONE}: {LOST}")


def test_who_accuses_whom_is_followed_to_the_last():
    by_three = f"RankLost: connection closed by rank 4 on {THREE}"
    chain = (failure(ONE, 0, LOST, 1.0), failure(TWO, 2, by_three, 2.0))
    found = attribute(evidence(failures=chain))
    assert (found.suspects, found.summary) == ((THREE,), f"rank 2 on {TWO}: {by_three}")
    by_one = f"RankLost: connection closed by rank 0 on {ONE}"
    mutual = attribute(
        evidence(failures=(failure(ONE, 0, LOST, 1.0), failure(TWO, 2, by_one, 2.0)))
    )
    # the two ends of one link
    assert (mutual.suspects, mutual.summary) == ((), f"rank 0 on {ONE}: {LOST}")


def test_the_peer_that_most_nodes_name_is_the_suspect_and_no_witness():
    def lost(host: str, rank: int, peer: str, time: float) -> Failure:
        return failure(
            host,
            rank,
            f"NCCL WARN NET/IB : Got completion from peer {peer}<41> with error 12, vendor err 129",
            time,
        )

    nodes = tuple(f"n{place}" for place in range(1, 6))
    reports = tuple(
        NodeReport(node, addresses=(f"10.0.0.{place}",)) for place, node in enumerate(nodes, 1)
    )
    ring = (
        lost("n3", 2, "10.0.0.4", 1.0),
        lost("n1", 0, "10.0.0.2", 2.0),
        lost("n2", 1, "10.0.0.3", 3.0),
        lost("n4", 3, "10.0.0.3", 4.0),
    )
    found = attribute(evidence(nodes=nodes, failures=ring, reports=reports))
    assert (found.blamed, found.suspects) == ((), ("n3",))
    third = (
        lost("n1", 0, "10.0.0.2", 1.0),
        lost("n2", 1, "10.0.0.1", 2.0),
        lost("n5", 4, "10.0.0.2", 3.0),
    )
    assert attribute(evidence(nodes=nodes, failures=third, reports=reports)).suspects == ("n2",)
    ends = attribute(evidence(nodes=nodes, failures=third[:2], reports=reports))
    assert (ends.blamed, ends.suspects) == ((), ())


@pytest.mark.parametrize(
    "error",
    [
        "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable",
        "NCCL WARN Bootstrap : no socket interface found",
    ],
)
def test_a_network_that_is_not_set_up_is_configuration(error):
    found = attribute(evidence(failures=(failure(ONE, 0, error), failure(TWO, 2, error))))
    assert (found.kind, found.blamed, found.suspects) == (Kind.CONFIGURATION, (), ())
    late = attribute(
        evidence(failures=(failure(ONE, 0, error), failure(TWO, 2, error)), reached=20)
    )
    assert (late.kind, late.blamed) == (Kind.UNKNOWN, ())  # it has worked with these settings


# ----------------------------------------------------------------------------- a hang
TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
LATE = Awaited(
    (TWO,), "ranks 2-3 did not enter all-reduce 7 of group dp; ranks 0-1, 4-5 wait in it"
)
STOPPED = Awaited((TWO,), f"rank 2 on node {TWO} is stopped (SIGSTOP)")


def test_who_was_waited_for_is_suspected_and_not_who_aborts_at_a_time_out():
    aborted = (
        failure(ONE, 0, "the worker was ended by SIGABRT", 1.0, 6),
        failure(THREE, 4, "the worker was ended by SIGABRT", 9.0, 6),
    )
    waiting = (failure(ONE, 0, TIMED_OUT), failure(THREE, 4, TIMED_OUT))
    for failures in (aborted, aborted[:1], waiting, ()):
        for awaited in ((LATE,), (STOPPED,), (STOPPED, LATE)):
            found = attribute(evidence(failures=failures, awaited=awaited))
            assert (found.kind, found.blamed, found.suspects) == (Kind.UNKNOWN, (), (TWO,))
            assert found.evidence == tuple(word.said for word in awaited)
            assert found.fault.startswith("lost: ") and TWO not in found.fault


def test_no_one_is_suspected_of_a_hang_where_the_signs_name_several():
    for awaited in (
        (LATE, Awaited((THREE,), "rank 4 waits for a file")),
        (Awaited((TWO, THREE), "ranks 2-5 wait for their data"),),
    ):
        found = attribute(evidence(failures=(failure(ONE, 0, TIMED_OUT),), awaited=awaited))
        assert (found.kind, found.suspects) == (Kind.UNKNOWN, ())
        assert found.summary.startswith("whom the others waited for is not known: ")
    lost = (
        failure(ONE, 0, LOST),
        failure(TWO, 2, LOST.replace("rank 2 on jean-zay-iam02", f"rank 4 on {THREE}")),
    )
    found = attribute(evidence(failures=lost, awaited=(LATE,)))
    assert found.suspects == ()


def test_a_death_or_an_error_of_its_own_says_more_than_a_hang():
    for first in (
        failure(ONE, 0, "the worker was ended by SIGKILL", 1.0, 9),
        failure(ONE, 0, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ):
        found = attribute(evidence(failures=(first,), awaited=(LATE,)))
        assert found.rule != "awaited" and TWO not in found.suspects
