"""Who is to blame, and whether a plain restart helps: apart from what happened, each with its own
confidence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tr11ops.cli.main import execute
from tr11ops.diagnose import answers
from tr11ops.diagnose.answers import (
    FILE,
    Culprit,
    EndFacts,
    Place,
    Signs,
    accused_by_log,
    restart_of,
    weights,
)
from tr11ops.diagnose.attribution.weights import read_weights
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

STEPS = "".join(f"step={number} loss={3 - number / 100}\n" for number in range(10, 16))


def diagnosed(tmp_path: Path, text: str) -> Diagnosis:
    log = tmp_path / "train.log"
    log.write_text(text)
    return diagnose_files([log])[0]


def judged(tmp_path: Path, *parts: str) -> Diagnosis:
    return diagnosed(tmp_path, STEPS + "\n".join(parts) + "\n")


# ----------------------------------------------------------------------------- who
@pytest.mark.parametrize(
    "lines",
    [
        ("slurmstepd: error: *** STEP 4410.0 ON n31 CANCELLED AT 2025-05-08T00:00:31 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
         "srun: error: n31: tasks 0-3: Terminated"),
        ("srun: error: n31: tasks 0-7: Killed", "JobId=1888 JobState=NODE_FAIL Reason=NodeDown Dependency=(null) BatchHost=n31"),
        ("31822         NODE_FAIL         0:0  n[31-34]",),
    ],
)  # fmt: skip
def test_who_tells_of_a_lost_node_is_not_the_lost_one(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    found = judged(tmp_path, *lines)
    assert found.fault is FaultClass.SLURM_NODE_FAIL
    assert (
        found.accused.nodes == () and found.root_cause is not None and found.root_cause.node is None
    )
    assert found.restart.answer is Restart.ELSEWHERE


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Node failure on n32",
        "slurmctld: requeue job JobId=1888 due to failure of node n32",
    ],
)
def test_the_lost_node_is_the_one_that_is_named(tmp_path: Path, line: str) -> None:
    told = "slurmstepd: error: *** JOB 119 ON n31 CANCELLED AT 2024-09-17T23:11:02 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***"
    found = judged(tmp_path, told, line, "srun: error: n31: tasks 0-7: Killed")
    assert found.accused.nodes == ("n32",) and found.accused.is_proved
    assert found.restart.answer is Restart.ELSEWHERE and "n32" in found.restart.why


def test_a_node_is_called_by_its_own_name_not_by_that_of_an_interface(tmp_path: Path) -> None:
    report = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "============================================================\n"
        "train.py FAILED\n------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2024-01-16_03:02:58\n  host      : n37-ib0\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : 1 (pid: 901226)\n  error_file: <N/A>\n"
        "============================================================"
    )
    error = "[default3]:RuntimeError: CUDA error: uncorrectable ECC error encountered"
    found = judged(tmp_path, error, report)
    assert found.accused.nodes == ("n37",)


def test_a_program_accuses_no_one_and_a_link_neither_end(tmp_path: Path) -> None:
    assert (
        judged(tmp_path, "Traceback (most recent call last):", "KeyError: 'a'").accused.kind
        is Culprit.NO_ONE
    )
    end = EndFacts(FaultClass.NCCL_NETWORK, NextStep.RESUBMIT, 0.85, Signs(ends=("n1", "n2")))
    link = accused_by_log(end, Place(node="n1"))
    assert link.kind is Culprit.LINK and link.nodes == ()


# ----------------------------------------------------------------------------- restart
@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2022-03-21T13:34:11 DUE TO TIME LIMIT ***",
            Restart.PLAIN,
        ),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2022-03-21T13:34:11 DUE TO PREEMPTION ***",
            Restart.PLAIN,
        ),
        ("OSError: [Errno 28] No space left on device: '/scratch/a'", Restart.CHANGE),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            Restart.CHANGE,
        ),
        (
            "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
            Restart.ELSEWHERE,
        ),
        ("scancel: Terminating job 4711", Restart.NONE),
    ],
)
def test_what_follows_from_the_cause(tmp_path: Path, line: str, answer: Restart) -> None:
    assert judged(tmp_path, line).restart.answer is answer


def test_a_death_without_words_says_nothing_of_the_next_time(tmp_path: Path) -> None:
    killed = "srun: error: n1: task 3: Killed\n"
    for log in (STEPS + killed, f"starting\n{killed}"):
        found = diagnosed(tmp_path, log)
        assert (found.fault, found.restart.answer) == (FaultClass.UNKNOWN, Restart.UNKNOWN)


def test_what_comes_again_at_the_same_step_needs_a_change(tmp_path: Path) -> None:
    def launch(number: int, last: int) -> str:
        steps = "".join(f"step={step} loss=2.{step}\n" for step in range(10, last + 1))
        return f"tr11: attempt 77 launch {number} on 2 nodes\n{steps}NCCL WARN Call to connect returned Connection timed out\n"

    once = diagnosed(tmp_path, launch(1, 15))
    assert once.restart.answer is Restart.PLAIN
    again = diagnosed(tmp_path, launch(1, 15) + launch(2, 15))
    assert again.restart.answer is Restart.CHANGE and "2 times" in again.restart.why
    elsewhere = diagnosed(tmp_path, launch(1, 15) + launch(2, 40))
    assert elsewhere.restart.answer is Restart.PLAIN


def test_a_name_that_no_one_knows_is_not_known_the_next_time(tmp_path: Path) -> None:
    timed_out = "[E socket.cpp:860] [c10d] The client socket has timed out after 900s while trying to connect to (n07x, 6000).\n"
    unknown = "[W socket.cpp:601] [c10d] The {} network addresses of (n07x, 6000) cannot be retrieved (gai error: -2 - Name or service not known).\n"
    late = diagnosed(tmp_path, unknown.format("IPv6") + timed_out)
    assert (late.step, late.restart.answer) == (NextStep.RESUBMIT, Restart.UNKNOWN)
    found = diagnosed(tmp_path, unknown.format("IPv6") + unknown.format("IPv4") + timed_out)
    assert (found.fault, found.step, found.restart.answer) == (
        FaultClass.RENDEZVOUS,
        NextStep.FIX_CONFIG,
        Restart.CHANGE,
    )


def test_a_log_that_ends_with_a_step_may_be_of_a_run_that_goes_on(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, STEPS).restart.answer is Restart.NONE
    assert diagnosed(tmp_path, STEPS + "saving a checkpoint\nEpo").restart.answer is Restart.UNKNOWN


def test_a_node_that_is_not_named_is_not_to_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"{STEPS}31822         NODE_FAIL         0:0  n[31-34]\n")
    assert execute(["diagnose", str(log)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "which this log does not name" in shown and "exclude" not in shown


def test_a_signature_may_tell_what_its_step_does_not() -> None:
    end = EndFacts(FaultClass.STORAGE, NextStep.FIX_STORAGE, 0.9, Signs(helps=Restart.PLAIN))
    assert restart_of(end).answer is Restart.PLAIN
    assert restart_of(end._replace(signs=Signs())).answer is Restart.CHANGE


# ----------------------------------------------------------- what settings, waits and machines tell
def begun(tmp_path: Path, *lines: str) -> Diagnosis:
    """Of a log without steps."""
    return diagnosed(tmp_path, "starting\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "[rank2]: ncclSocketInit: connecting to address  with family 28416 is neither AF_INET(2) nor AF_INET6(10)",
        "a1:9:11 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out, on dev rocep1:1, "
        "local GID index 0, local GID fe80::5e25, remote GID fe80::5e26",
        "libfabric:611:176::cxi:core:cxip_gen_auth_key():402<warn> cxip_gen_auth_key failed: -95",
        "srun: error: switch/hpe_slingshot: job 71: no VNIs for this step",
        "a1:9:11 [0] NCCL WARN NET/OFI Couldn't open a fabric access domain. RC: -1, ERROR: Operation not permitted",
    ],
)
def test_a_network_that_is_set_up_wrongly_is_so_the_next_time(tmp_path: Path, line: str) -> None:
    found = begun(
        tmp_path,
        "RuntimeError: NCCL error: internal error",
        "ncclInternalError: Internal check failed.",
        line,
    )
    assert (found.fault, found.step) == (FaultClass.NCCL_NETWORK, NextStep.FIX_CONFIG)
    assert found.restart.answer is Restart.CHANGE and found.accused.nodes == ()


def stuck(
    rank: int, number: int, operation: str, group: str = "[PG ID 0 PG GUID 0(default_pg) "
) -> str:
    head = f"[rank{rank}]:[E1203 06:40:00.1 ProcessGroupNCCL.cpp:616] {group}Rank {rank}] Watchdog caught collective operation"
    return f"{head} timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=64, Timeout(ms)=600000) ran for 600080 milliseconds"


@pytest.mark.parametrize(
    ("lines", "answer", "why"),
    [
        ((stuck(0, 71, "BROADCAST"), stuck(1, 71, "ALLREDUCE")), Restart.CHANGE, "repaired"),
        ((stuck(0, 71, "BROADCAST"), stuck(1, 74, "ALLREDUCE")), Restart.UNKNOWN, "stacks"),
        ((stuck(0, 71, "BROADCAST", "["), stuck(1, 71, "ALLREDUCE", "[")), Restart.UNKNOWN, "stacks"),
        ((stuck(0, 71, "ALLREDUCE"), stuck(1, 71, "ALLREDUCE")), Restart.UNKNOWN, "one try tells"),
        ((stuck(0, 71, "ALLREDUCE", "[PG ID 4 PG GUID 9 "), stuck(1, 71, "ALLGATHER", "[PG ID 4 PG GUID 12 ")), Restart.UNKNOWN, "one try tells"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_do_the_same(
    tmp_path: Path, lines: tuple[str, ...], answer: Restart, why: str
) -> None:
    found = judged(tmp_path, *lines)
    assert (found.fault, found.restart.answer) == (FaultClass.NCCL_TIMEOUT, answer)
    assert why in found.restart.why


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 5/8 clients joined.", Restart.UNKNOWN),
        ("[E socket.cpp:1011] [c10d] The client socket has timed out after 2400s while trying to connect to (n7, 6000).", Restart.UNKNOWN),
        ("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 5/8 clients joined.", Restart.PLAIN),
        ("[E socket.cpp:1011] [c10d] The client socket has timed out after 300000ms while trying to connect to (n7, 6000).", Restart.UNKNOWN),
        ("jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: PjRT_Client_Connect. Timed out task names:", Restart.UNKNOWN),
    ],
)  # fmt: skip
def test_who_was_never_reached_or_not_for_so_long_may_not_only_be_late(
    tmp_path: Path, line: str, answer: Restart
) -> None:
    found = begun(tmp_path, line)
    assert (found.fault, found.restart.answer) == (FaultClass.RENDEZVOUS, answer)
    assert ("missing" in found.restart.why) == (answer is Restart.UNKNOWN)


@pytest.mark.parametrize(
    "end", ["wrapper: train.py exited with status 0", "epilog: sacct -j 88: COMPLETED 0:0"]
)
def test_what_a_process_says_after_it_returned_nothing_is_no_failure(
    tmp_path: Path, end: str
) -> None:
    late = (
        "terminate called without an active exception",
        "BrokenPipeError: [Errno 32] Broken pipe",
    )
    found = judged(tmp_path, end, *late)
    assert (found.fault, found.restart.answer) == (FaultClass.CLEAN_EXIT, Restart.NONE)
    failed = judged(tmp_path, "KeyError: 'a'", *late)
    assert failed.restart.answer is Restart.CHANGE


def test_a_limit_on_locked_memory_of_one_node_is_that_nodes(tmp_path: Path) -> None:
    failed = "k3:31:64 [2] misc/ibvwrap.cc:192 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
    alone = begun(tmp_path, "k1: memlock=unlimited", "k2: memlock=unlimited", failed)
    assert (alone.accused.nodes, alone.accused.is_proved) == (("k3",), False)
    assert (alone.step, alone.restart.answer) == (NextStep.FIX_CONFIG, Restart.ELSEWHERE)
    shared = begun(tmp_path, failed, failed.replace("k3", "k2"))
    assert (shared.accused.nodes, shared.restart.answer) == ((), Restart.CHANGE)


def test_a_node_that_alone_takes_no_credentials_is_named(tmp_path: Path) -> None:
    line = (
        "srun: error: Task launch for StepId=88.0 failed on node {}: Protocol authentication error"
    )
    found = begun(tmp_path, line.format("k3"))
    assert (found.fault, found.accused.nodes, found.restart.answer) == (
        FaultClass.SLURM_AUTH,
        ("k3",),
        Restart.ELSEWHERE,
    )
    both = begun(tmp_path, line.format("k3"), line.format("k4"))
    assert (both.accused.nodes, both.restart.answer) == ((), Restart.CHANGE)


def test_who_reports_that_a_rank_is_missing_is_not_on_its_node(tmp_path: Path) -> None:
    late = [f"k{number} {stuck(8 * number, 71, 'ALLREDUCE')}" for number in range(3)]
    told = "k0 flight-recorder: seq 71 ALLREDUCE: 31 ranks scheduled, missing rank [29]; rank 29 last seq 70 completed"
    found = judged(tmp_path, *late, told)
    assert (found.accused.rank, found.accused.nodes) == (29, ())


def test_a_client_that_its_file_server_dropped_is_let_in_again_where_a_line_says_so(
    tmp_path: Path,
) -> None:
    broken = "3: OSError: [Errno 5] Input/output error: '/lus/tok/part_7.bin'"
    dropped = "n3 kernel: LustreError: 167-0: lus-OST0002-osc-ff: This client was evicted by lus-OST0002; in progress operations using this service will fail."
    refused = "3: OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lus/tok/part_8.bin'"
    back = "n3 kernel: Lustre: lus-OST0002-osc-ff: Connection restored to 10.0.0.3@o2ib (at 10.0.0.3@o2ib)"
    servers = "n3 kernel: LustreError: 11-0: lus-OST0002-osc-ff: operation ost_read to node 10.0.0.3@o2ib failed: rc = -5"
    assert judged(tmp_path, broken).restart.answer is Restart.UNKNOWN
    assert judged(tmp_path, broken, refused).restart.answer is Restart.PLAIN
    assert judged(tmp_path, dropped, broken).restart.answer is Restart.UNKNOWN
    assert judged(tmp_path, dropped, back, broken).restart.answer is Restart.PLAIN
    assert judged(tmp_path, back, dropped, broken).restart.answer is Restart.UNKNOWN
    assert judged(tmp_path, broken, servers).restart.answer is Restart.CHANGE


def test_a_pod_that_found_no_place_at_first_has_found_one_where_it_trained(tmp_path: Path) -> None:
    no_place = "40m Warning FailedScheduling pod/train-0 0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    evicted = "9s Warning Evicted pod/train-0 Pod ephemeral local storage usage exceeds the total limit of containers 5Gi."
    (tmp_path / "events.txt").write_text(f"{no_place}\n{evicted}\n")
    (tmp_path / "steps.log").write_text(STEPS)
    found = diagnose_files([tmp_path / "steps.log", tmp_path / "events.txt"])[0]
    assert (found.fault, found.restart.answer) == (FaultClass.STORAGE, Restart.CHANGE)
    waits = begun(tmp_path, no_place)
    assert (waits.fault, waits.restart.answer) == (FaultClass.SLURM_SUBMIT, Restart.UNKNOWN)


def test_the_line_that_says_that_no_one_knows_the_host_is_quoted(tmp_path: Path) -> None:
    unknown = "[W socket.cpp:663] [c10d] The IPv4 network addresses of (m-0, 23456) cannot be retrieved (gai error: -2 - Name or service not known)."
    late = "torch.distributed.DistNetworkError: The client socket has timed out after 900s while trying to connect to (m-0, 23456)."
    found = begun(tmp_path, unknown, late)
    assert found.root_cause is not None and found.root_cause.line_number == 2
    assert (found.step, found.restart.answer) == (NextStep.FIX_CONFIG, Restart.CHANGE)


def test_a_name_that_one_process_asked_for_again_and_never_found_is_a_setting(
    tmp_path: Path,
) -> None:
    lookup = "[w-%d] [W socket.cpp:697] [c10d] The IPv6 network addresses of (m-0, 23456) cannot be retrieved (gai error: -2 - Name or service not known)."
    late = "[w-1] torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (m-0, 23456)."
    tried = "[w-1] [W socket.cpp:752] [c10d] The client socket has failed to connect to [m-0]:23456 (errno: 110 - Connection timed out)."
    again = begun(tmp_path, lookup % 1, lookup % 1, late)
    assert (again.step, again.restart.answer) == (NextStep.FIX_CONFIG, Restart.CHANGE)
    once = begun(tmp_path, lookup % 1, lookup % 2, late)
    assert once.restart.answer is Restart.UNKNOWN
    found = begun(tmp_path, lookup % 1, lookup % 1, tried, late)
    assert found.restart.answer is Restart.UNKNOWN


def test_who_gives_up_after_many_tries_tells_the_cause(tmp_path: Path) -> None:
    tries = [
        f"n4:83:84 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying ({one}/34) after sleep"
        for one in range(34)
    ]
    given_up = "n4:83:84 [0] misc/socket.cc:495 NCCL WARN socketPollConnect: connect to 10.8.8.20<42117> returned No route to host, exceeded error retry count (35)"
    lost = "[rank4]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, remote process exited or there was a network error"
    found = begun(tmp_path, *tries, given_up, lost)
    assert found.root_cause is not None and "exceeded" in found.root_cause.text
    assert (found.fault, found.restart.answer) == (FaultClass.NCCL_NETWORK, Restart.CHANGE)


def test_a_node_that_the_cloud_took_back_is_innocent(tmp_path: Path) -> None:
    event = "2m58s  Warning  {}  node/{}  {}"
    gone = event.format("NodeNotReady", "spot-7", "Node spot-7 status is now: NodeNotReady")
    other = event.format("NodeNotReady", "spot-9", "Node spot-9 status is now: NodeNotReady")
    taken = event.format("Preempted", "spot-7", "Instance was preempted")
    found = judged(tmp_path, gone, taken)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_PREEMPTED, Restart.PLAIN)
    assert not found.accused.nodes
    assert judged(tmp_path, other, taken).fault is FaultClass.SLURM_NODE_FAIL


def test_a_job_that_was_refused_each_time_was_not_accepted(tmp_path: Path) -> None:
    line = "06/26/25 16:17:42 EDT :: WARNING: job submission failed: sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    found = begun(tmp_path, line, line)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_SUBMIT, Restart.CHANGE)


# -------------------------------------------------------------------- how sure, and how it is shown
def test_every_rule_has_a_weight_and_no_other() -> None:
    source = Path(answers.__file__).read_text(encoding="utf-8")
    named = {f"restart-{rule}" for rule in re.findall(r'_Because\(\s*"([a-z-]+)"', source)}
    named |= {
        f"restart-own-{helps}"
        for helps in (Restart.PLAIN, Restart.ELSEWHERE, Restart.CHANGE, Restart.UNKNOWN)
    }
    named |= {
        f"who-{rule}"
        for rule in re.findall(r'_accused\(\s*Culprit\.[A-Z_]+,\s*"([a-z-]+)"', source)
    }
    assert named | {"who-hardware", "who-suspect"} == set(weights())


def test_no_guess_is_surer_than_nine_tenths() -> None:
    certain = {
        name
        for name, entry in read_weights(FILE).items()
        if entry["prior"] > 0.9 and entry["right"] == entry["cases"]
    }
    assert {name for name, weight in weights().items() if weight > 0.9} <= certain


def test_a_guess_about_what_happened_leaves_less() -> None:
    end = EndFacts(FaultClass.STORAGE, NextStep.FIX_STORAGE, 0.9, Signs())
    assert restart_of(end._replace(sure=0.4)).confidence < restart_of(end).confidence


def test_three_answers_on_the_screen_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        "launcher: nodes n[16-18]\n"
        + STEPS
        + "Nov 20 03:12:44 n17 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, GPU has fallen off the bus.\n"
    )
    assert execute(["diagnose", "--json", str(log)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (
        said["verdict"] == "gpu_hardware"
        and said["who"]["kind"] == "gpu"
        and said["who"]["nodes"] == ["n17"]
    )
    assert said["who"]["proved"] and said["restart"]["answer"] == "elsewhere"
    assert 0 < said["who"]["confidence"] <= 1 and 0 < said["restart"]["confidence"] <= 1
    assert execute(["diagnose", str(log)]) == 1
    shown = capsys.readouterr().out
    assert "to blame  GPU 0000:4e:00 of n17 (confidence" in shown
    assert "restart  yes, on other nodes (confidence" in shown
    assert max(map(len, shown.replace(f"{tmp_path}/", "").splitlines())) <= 80


def test_what_to_do_agrees_with_whether_a_restart_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Submit again` stood below `no, change something first`, where the same death came at one
    step again.
    """
    death = "tr11: worker 1 (process 4711) failed: ended by SIGSEGV\n"
    again = [
        f"tr11: attempt 9 launch {number} on 2 nodes: n[1-2] (8_1)\n{STEPS}{death}"
        for number in (1, 2, 3)
    ]
    log = tmp_path / "a.log"
    log.write_text("".join(again))
    execute(["diagnose", "--all", str(log)])
    *_, last = capsys.readouterr().out.split("verdict")
    assert "restart  no, change something first" in last
    assert "Submit again" not in last and "A person has to look first" in last
    execute(["diagnose", "--json", str(log)])
    said = json.loads(capsys.readouterr().out)
    assert (said["restart"]["answer"], said["action"]) == ("change", "page")


def test_the_action_follows_the_answer(tmp_path: Path) -> None:
    """`Make room, or repair the file system` stood beside `yes`, where the server had taken its
    client back.
    """
    dropped = (
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lus/tok/part_8.bin'"
    )
    found = judged(tmp_path, dropped)
    assert (found.step, found.restart.answer, found.action) == (
        NextStep.FIX_STORAGE,
        Restart.PLAIN,
        NextStep.RESUBMIT,
    )
    assert found.document()["action"] == "resubmit"
