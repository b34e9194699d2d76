"""Which node is named, and what kind of fault: on lines that a real Slurm 22.05 printed, and on the
workers' own words.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tr11ops.base.redact import signature
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import Evidence, Failure, Kind, MissedWorker, NodeReport
from tr11ops.diagnose.attribution.srun import parse_lines
from trainer.contract.attempt import EndMarker

NODES = ("jean-zay-iam01", "jean-zay-iam02", "jean-zay-iam03")
ONE, TWO, THREE = NODES

# Recorded: a worker of node 02 was killed (SIGKILL); the agent of node 01, whose workers lost it,
# was the first to end.
WORKER_KILLED = """\
srun: error: jean-zay-iam01: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=4.0
srun: error: jean-zay-iam03: task 2: Exited with exit code 1
srun: error: jean-zay-iam02: task 1: Exited with exit code 143"""

# Recorded: slurmd, step daemon and tasks of node 02 died at one moment; srun was ended before Slurm
# noticed.
NODE_DEAD = """\
srun: error: jean-zay-iam01: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=8.0
srun: error: jean-zay-iam03: task 2: Exited with exit code 1
srun: forcing job termination
srun: Job step aborted: Waiting up to 7 seconds for job step to finish."""


def evidence(lines: str = "", **changes: object) -> Evidence:
    values = {"nodes": NODES, "status": 1, "srun": parse_lines(lines.splitlines()), **changes}
    return Evidence(**values)  # type: ignore[arg-type]


def failure(
    host: str, rank: int | None, error: str, time: float = 1.0, signal: int | None = None
) -> Failure:
    return Failure(host, rank, time, error, signal)


LOST = "RankLost: connection closed by rank 2 on jean-zay-iam02"


def marker(reason: str, message: str = "words", restart: bool = True) -> EndMarker:
    return EndMarker(reason, 12, 10, restart, message, 1.0, ONE, "7", 1)


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


OWN_WORD = "TimeoutError: reading /scratch/data/corpus.bin timed out"


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
