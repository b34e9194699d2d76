"""Who is to blame: a node with evidence of its own fault, not the one on which a failure was seen
first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import HEAD, STEP
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.screen import lines as screen_of
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

STEPS = STEP % 1 + STEP % 2
DEAD = "torch.AcceleratorError: CUDA error: unspecified launch failure\n"
ENDS = "srun: error: b12: task 27: Aborted\nsrun: error: b11: task 21: Aborted (core dumped)\n"
XID = (
    "NVRM: Xid (PCI:0000:bb:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
)
PEER = "{0}:4123:4567 [3] NCCL WARN NET/IB : Got completion from peer {1}<47011> with status=12 opcode 0 vendor err 129\n"


def of_files(folder: Path, **texts: str) -> Diagnosis:
    """The diagnosis of files by name, with `__` for what no name of Python may hold."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text, encoding="utf-8")
    [found] = diagnose_files(paths)
    return found


# -------------------------------------------------------------------------- where a line comes from
@pytest.mark.parametrize(
    "name",
    ["dmesg-b11.txt", "run.dmesg-b11.txt", "b11.syslog.1", "kern.log-b11", "journalctl_b11.log"],
)
def test_a_kernels_file_is_its_hosts(tmp_path: Path, name: str) -> None:
    paths = [tmp_path / "main.log", tmp_path / name]
    paths[0].write_text(f"{STEPS}2: b11 [rank21]: {DEAD}{ENDS}")
    paths[1].write_text(f"[1822911.098110] {XID}")
    [found] = diagnose_files(paths)
    assert found.fault is FaultClass.GPU_HARDWARE
    assert (
        found.accused.nodes == ("b11",)
        and found.root_cause
        and found.root_cause.file.endswith(name)
    )


def test_the_kernels_word_counts_before_the_programs(tmp_path: Path) -> None:
    lost = "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution\n"
    ends = "srun: error: q7: task 3: Exited with exit code 1\nsrun: error: q2: task 2: Exited with exit code 1\n"
    fatal = "kernel: NVRM: Xid (PCI:0000:b9:00): 74, pid=51230, name=python, NVLink: fatal error detected on link 12(0x0)\n"
    found = of_files(
        tmp_path,
        train__log=f"{STEPS}[default6]:[rank22]: {lost}{ends}",
        q2__syslog=f"Jul 21 14:27:51 q2 {fatal}",
    )
    assert found.accused.nodes == ("q2",)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution\n",
        "NVRM: Xid (PCI:0000:bb:00): 79, pid=1, GPU has fallen off the bus.\n",
        "rocm: HSA_STATUS_ERROR_OUT_OF_RESOURCES: HW Exception by GPU node-3 (Agent handle: 0x55) reason :GPU Hang\n",
    ],
)
@pytest.mark.parametrize(
    "ends",
    [ENDS, "srun: error: b12: task 3: Exited with exit code 1\nsrun: error: b11: task 2: Killed\n"],
)
def test_the_first_task_that_ended_is_no_culprit(tmp_path: Path, error: str, ends: str) -> None:
    found = of_files(tmp_path, train__log=f"{STEPS}[default6]:{error}{ends}")
    assert found.accused.nodes == ()
    assert "exclude b1" not in "\n".join(screen_of(found))


def test_srun_tells_on_which_node_a_task_was(tmp_path: Path) -> None:
    error = "21: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert of_files(tmp_path, train__log=f"{STEPS}{error}{ENDS}").accused.nodes == ("b11",)


@pytest.mark.parametrize(
    "head",
    [
        "2: b11 [rank21]: ",
        "2026-05-19T03:14:10Z b11 [rank21]:",
        "<21> b11 ",
        "b11[21]: ",
        "2026-05-19 03:14:10 b11[21] ERROR ",
        "epilog b11: [181.2] ",
        "kernel: [b11] ",
    ],
)
def test_a_column_of_hosts_names_the_node(tmp_path: Path, head: str) -> None:
    found = of_files(
        tmp_path,
        train__log=f"{STEPS}{head}RuntimeError: CUDA error: uncorrectable ECC error encountered\n{ENDS}",
    )
    assert found.accused.nodes == ("b11",)


def test_a_host_among_the_words_of_a_line_is_not_its_own(tmp_path: Path) -> None:
    line = (
        "[rank21]: RuntimeError: lost b12 after CUDA error: uncorrectable ECC error encountered\n"
    )
    assert of_files(tmp_path, train__log=f"{STEPS}{line}{ENDS}").accused.nodes == ("b11",)


def test_the_node_of_a_silent_rank_is_known_by_its_neighbours(tmp_path: Path) -> None:
    hung = "h{1} [rank{0}]:[E519 ProcessGroupNCCL.cpp:685] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=66210)\n"
    waiting = "".join(hung.format(rank, 29 + rank // 8) for rank in (0, 4, 8, 15, 16, 22, 24, 31))
    missing = "h29 fr_trace: missing ranks {23} (expected {0, 1}), sequence 66210\n"
    found = of_files(tmp_path, train__log=STEPS + waiting + missing)
    assert (found.accused.rank, found.accused.nodes) == (23, ("h31",))


# --------------------------------------------------------------------- what explains what peers say
@pytest.mark.parametrize(
    ("told", "fault", "nodes"),
    [
        ("srun: error: Node failure on n2\n", FaultClass.SLURM_NODE_FAIL, ("n2",)),
        ("slurmctld: error: Nodes n2 not responding, setting DOWN\n", FaultClass.SLURM_NODE_FAIL, ("n2",)),
        ("event: Node n2 status is now: NodeNotReady\n", FaultClass.SLURM_NODE_FAIL, ("n2",)),
        ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2022-03-21T13:34:11 DUE TO PREEMPTION ***\n", FaultClass.SLURM_PREEMPTED, ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "seen",
    [
        PEER.format("n1", "n3") + PEER.format("n3", "n1"),
        "n1:4:5 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n3<41109>\n",
        "[rank3]: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1234, OpType=ALLREDUCE)\n",
    ],
)
def test_peers_see_a_lost_node_before_the_scheduler_does(
    tmp_path: Path, told: str, fault: FaultClass, nodes: tuple[str, ...], seen: str
) -> None:
    found = of_files(tmp_path, train__log=STEPS + seen + told)
    assert (found.fault, found.accused.nodes) == (fault, nodes)


def test_a_node_that_is_drained_because_a_job_hung_did_not_make_it_hang(tmp_path: Path) -> None:
    hung = "[rank3]: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1234, OpType=ALLREDUCE)\n"
    drained = "slurmctld: error: node n2 reason set to: Kill task failed\n"
    found = of_files(tmp_path, train__log=STEPS + hung + drained)
    assert (found.fault, found.accused.nodes) == (FaultClass.NCCL_TIMEOUT, ())


# ----------------------------------------------------------------------------- links
@pytest.mark.parametrize(
    "own",
    [
        "n4:4410:4502 [4] transport/net_ib.cc:240 NCCL WARN NET/IB : mlx5_4:1 Got async error event: port error\n",
        "<8> n4:4410:4502 [4] transport/net_ib.cc:240 NCCL WARN NET/IB : mlx5_4:1 Got async fatal event: local QP operation error\n",
        "n4: kernel: cxi_core 0000:d9:00.0: cxi2[hsn2] link down (remote fault), retrying\n",
        "Jun  3 10:00:00 n4 kernel: bnxt_en 0000:21:00.0 ens2f0np0: NIC Link is Down\n",
        "n4: kernel: hfi1 0000:3b:00.0: hfi1_0: Link went offline\n",
    ],
)
def test_who_tells_of_its_own_link_is_the_suspect(tmp_path: Path, own: str) -> None:
    found = of_files(
        tmp_path,
        train__log=STEPS + PEER.format("n1", "10.0.0.4") + PEER.format("n3", "10.0.0.4") + own,
    )
    assert (found.fault, found.accused.nodes) == (FaultClass.NCCL_NETWORK, ("n4",))
    assert found.restart.answer is Restart.ELSEWHERE


def test_a_link_that_came_back_before_is_no_suspect(tmp_path: Path) -> None:
    kernel = (
        "[10.1] mlx5_core 0000:9c:00.0 ib0: Link down\n[12.5] mlx5_core 0000:9c:00.0 ib0: Link up\n"
    )
    found = of_files(tmp_path, train__log=STEPS + PEER.format("n1", "n3"), dmesg__n4__txt=kernel)
    assert found.accused.nodes == ()


# ----------------------------------------------------------------------------- one machine alone
@pytest.mark.parametrize(
    "line",
    [
        "[n7:4] OSError: [Errno 28] No space left on device: '/tmp/torchinductor_mk/tmpq0x_77'\n",
        "n7[18] ERROR OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data/shard.01190.mds'\n",
        "n7: OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x.tar'\n",
        "n7 [rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.94 GiB. GPU 3 has a total capacity of 63.43 GiB "
        "of which 3.80 GiB is free. Process 2210412 has 59.56 GiB memory in use. Including non-PyTorch memory, this process has 60.00 MiB memory in use.\n",
        "srun: error: Task launch for 36.0 failed on node n7: Job credential expired\n",
        "n7:713:803 [3] transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152\n",
    ],
)
def test_the_machine_that_alone_is_not_in_order_is_the_suspect(tmp_path: Path, line: str) -> None:
    other = "srun: error: n8: tasks 0-3: Terminated\n"
    assert of_files(tmp_path, train__log=line + other).accused.nodes == ("n7",)


@pytest.mark.parametrize(
    "line",
    [
        "{0}: OSError: [Errno 28] No space left on device: '/gpfs/scratch/run/ckpt.pt'\n",
        "{0}: OSError: [Errno 116] Stale file handle: '/nfs/data/a.bin'\n",
        "{0}: OSError: [Errno 28] No space left on device: '/tmp/cache/x'\n{1}: OSError: [Errno 28] No space left on device: '/tmp/y'\n",
        "{0}: OSError: [Errno 107] Transport endpoint is not connected: '/mnt/a'\n"
        "{1}: OSError: [Errno 107] Transport endpoint is not connected: '/mnt/b'\n",
        "{0} [rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.94 GiB. GPU 3 has a total capacity of 63.43 GiB.\n",
        "{0}: KeyError: 'input_ids'\n",
    ],
)
def test_what_nodes_share_and_what_the_program_does_is_no_nodes_fault(
    tmp_path: Path, line: str
) -> None:
    found = of_files(tmp_path, train__log=STEPS + line.format("n7", "n8"))
    assert found.accused.nodes == ()


def test_the_clocks_of_slurms_daemons_are_named_by_their_own_log(tmp_path: Path) -> None:
    refused = (
        "srun: error: Task launch for StepId=5120077.0 failed on node n14: Invalid job credential\n"
    )
    daemon = "2026-09-01T07:12:44.902 slurmd: error: Munge decode failed: Rewound credential\n"
    found = of_files(tmp_path, **{"train__log": refused, "slurmd-n14__log": daemon})
    assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_AUTH, ("n14",))


@pytest.mark.parametrize(
    "head",
    [
        "Job 632652 running on g713\n",
        "[setup] host: g713  image: torch\n",
        "SLURM_JOB_NODELIST=g713\n",
    ],
)
def test_the_only_machine_of_a_log(tmp_path: Path, head: str) -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert of_files(tmp_path, train__log=head + STEPS + error).accused.nodes == ("g713",)
    # of a second machine, at least
    far = of_files(tmp_path, train__log=f"{head}{STEPS}[rank17]: {error}")
    assert far.accused.nodes == ()
    two = of_files(tmp_path, train__log=head + head.replace("713", "714") + STEPS + error)
    assert two.accused.nodes == ()


# ----------------------------------------------------------------------------- who says so
@pytest.mark.parametrize(
    "line",
    [
        "(gcs_server) [2026-04-14 22:31:07,220 W 101 120] gcs_health_check_manager.cc:145: Node 5be0d1 (10.1.0.23) is dead because the "
        "health check failed, failure count exceeded: Deadline Exceeded\n",
        "(raylet) The node with node id: 5be0d1 and address: 10.1.0.23 and node name: 10.1.0.23 has been marked dead because the "
        "detector has missed too many heartbeats from it.\n",
        "The actor is dead because its owner has died. Owner Ip address: 10.1.0.23 Owner worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Owner's node has crashed.\n",
    ],
)
def test_a_node_that_ray_lost(tmp_path: Path, line: str) -> None:
    seen = "(Trainer pid=411, ip=10.1.0.20) ray.exceptions.ActorUnavailableError: The actor 9ad1 is unavailable\n"
    found = of_files(tmp_path, train__log=STEPS + line + seen)
    assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_NODE_FAIL, ("10.1.0.23",))


def test_a_replay_on_another_gpu_names_the_one_that_computes_wrongly(tmp_path: Path) -> None:
    line = (
        "WARNING:megatron.core.rerun_state_machine:Possible persistent error! Problem on rank 37, node p5, device 5 (GPU-77f0) : "
        "results differ\nsrun: error: p1: task 0: Exited with exit code 17\nsrun: error: p5: task 37: Exited with exit code 17\n"
    )
    found = of_files(tmp_path, train__log=STEPS + line)
    assert (found.accused.nodes, found.accused.rank, found.accused.gpu) == (("p5",), 37, "5")
    assert found.restart.answer is Restart.ELSEWHERE


# -------------------------------------------------------------------- orders, and counts of nothing
@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ("slurmstepd: error: *** STEP 5.0 ON m1 CANCELLED AT 2025-01-10T15:27:25 DUE TO TIME LIMIT ***\n", FaultClass.SLURM_TIME_LIMIT),
        ('imds: {"action": "terminate", "time": "2026-08-08T19:42:00Z"} spot instance-action received\n', FaultClass.SLURM_PREEMPTED),
    ],
)  # fmt: skip
def test_steps_until_it_is_killed_do_not_outlive_an_order(
    tmp_path: Path, order: str, fault: FaultClass
) -> None:
    more = "".join(STEP % number for number in range(3, 9))
    assert (
        of_files(
            tmp_path, train__log=STEPS + order + more + "srun: error: m1: task 0: Killed\n"
        ).fault
        is fault
    )
    long = "".join(STEP % number for number in range(3, 30))
    assert of_files(tmp_path, train__log=f"{STEPS}{order}{long}KeyError: 'x'\n").fault is not fault


@pytest.mark.parametrize(
    "killed",
    [
        "0 Workers (tasks / actors) killed due to memory pressure (OOM), 8 Workers crashed due to other reasons\n"
    ],
)
def test_no_worker_that_was_killed_is_no_cause(tmp_path: Path, killed: str) -> None:
    raised = 'Traceback (most recent call last):\n  File "/code/reward.py", line 48, in score\n    gold = info["a"]\nKeyError: \'a\'\n'
    assert of_files(tmp_path, train__log=STEPS + raised + killed).fault is FaultClass.USER_CODE
    memory = of_files(tmp_path, train__log=STEPS + killed.replace("0 W", "3 W"))
    assert memory.fault is FaultClass.HOST_OOM


@pytest.mark.parametrize(
    "said",
    [
        'audit user=dev@corp verb=delete resource=pytorchjobs/sft reason="wrong rate"\n',
        "event: MPIJob sft was deleted by user ops@corp\n",
    ],
)
def test_a_job_that_was_deleted_was_cancelled(tmp_path: Path, said: str) -> None:
    after = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15\n"
    )
    assert of_files(tmp_path, train__log=STEPS + said + after).fault is FaultClass.SLURM_USER_CANCEL


# ---------------------------------------------------------------- what a line says of its own place
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    "line",
    [
        f"n7:11| {ECC}",
        f"n7| {ECC}",
        f"[rank11]: {ECC.strip()}, host=n7\n",
        f"[rank11]: {ECC}[check] ERROR: rank 11 (host n7, local 3) stopped\n",
        f"[rank11]: {ECC}launcher ERROR: rank 11 on n7 failed first\n",
    ],
)
def test_the_place_that_a_line_gives_itself(tmp_path: Path, line: str) -> None:
    assert of_files(tmp_path, train__log=STEPS + line).accused.nodes == ("n7",)


@pytest.mark.parametrize(
    "words", ["lost connection to host=n3", "reset by peer host=n3", "timeout from host=n3"]
)
def test_the_host_that_a_line_has_lost_is_not_its_own(tmp_path: Path, words: str) -> None:
    assert (
        of_files(tmp_path, train__log=f"{STEPS}[rank11]: {ECC.strip()}; {words}\n").accused.nodes
        == ()
    )


def test_the_rank_that_a_reader_of_dumps_misses_is_on_the_host_that_it_names(
    tmp_path: Path,
) -> None:
    hung = "[rank{0}]:[E604 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91)\n"
    missing = "fr: seq 91 (reduce_scatter): 63 ranks started, 1 rank missing: [37]; rank 37 (host d6, local 5) enqueued 90\n"
    found = of_files(
        tmp_path, train__log=STEPS + "".join(hung.format(rank) for rank in (0, 5, 12)) + missing
    )
    assert (found.accused.rank, found.accused.nodes) == (37, ("d6",))


@pytest.mark.parametrize("fails", ["k9", "k8"])
def test_other_lines_of_the_same_fault_name_the_node(tmp_path: Path, fails: str) -> None:
    nameless = "EZ9999: [PID: 40112] 2025-07-21-05:11:09.120.001 Inner Error, HBM multi bit ECC error, device_id=6\n"
    named = f"RuntimeError: [rank22] UCE ERROR. rtStreamSynchronize execute failed, host={fails}\n"
    assert of_files(tmp_path, train__log=STEPS + nameless + named).accused.nodes == (fails,)
    others = named.replace(fails, "k1").replace("rank22", "rank3")
    assert of_files(tmp_path, train__log=STEPS + nameless + named + others).accused.nodes == ()


@pytest.mark.parametrize(
    "lead", ["n3 rank17 | ", "[lab-b] ", "trainer(3) >> ", "worker/host-x/17: "]
)
def test_what_stands_before_each_line_of_a_traceback_is_no_part_of_it(
    tmp_path: Path, lead: str
) -> None:
    raised = f"{HEAD}AttributeError: 'list' object has no attribute 'lower'\n"
    found = of_files(
        tmp_path, train__log=STEPS + "".join(f"{lead}{line}\n" for line in raised.splitlines())
    )
    assert (
        found.fault is FaultClass.USER_CODE
        and found.root_cause
        and "'lower'" in found.root_cause.text
    )


def test_a_gpu_that_had_an_error_weeks_ago_did_not_end_what_fails_today(tmp_path: Path) -> None:
    old = f"[Tue Sep  2 03:14:22 2025] {XID}"
    today = "[Thu Sep 18 08:00:07 2025] perf: interrupt took too long, lowering the sample rate\n"
    raised = f"{HEAD}AttributeError: 'list' object has no attribute 'lower'\n"
    found = of_files(tmp_path, train__log=STEPS + raised, dmesg_b11__txt=old + today)
    assert (found.fault, found.accused.nodes) == (FaultClass.USER_CODE, ())
    alone = of_files(tmp_path, train__log=STEPS, dmesg_b11__txt=old + today)
    fresh = of_files(
        tmp_path, train__log=STEPS + raised, dmesg_b11__txt=today + old.replace("Sep  2", "Sep 18")
    )
    assert alone.fault is fresh.fault is FaultClass.GPU_HARDWARE


@pytest.mark.parametrize(
    "line",
    [
        "[rank21]: ERROR:megatron.core.rerun_state_machine:Rank 21, node w42, device 5, iteration 4410: Possible transient error!\n",
        "[rank21]: rerun: rank 21, node w42, device 5: unexpected result is not reproducible within the tolerance (7.2 in place of nan)\n",
    ],
)
def test_a_gpu_whose_result_differs_when_it_is_made_again_is_suspected(
    tmp_path: Path, line: str
) -> None:
    found = of_files(
        tmp_path, train__log=STEPS + line + "srun: error: w1: task 0: Exited with exit code 16\n"
    )
    assert (found.fault, found.accused.nodes, found.accused.is_proved) == (
        FaultClass.GPU_HARDWARE,
        ("w42",),
        False,
    )


# ----------------------------------------------------------------------------- innocent
@pytest.mark.parametrize(
    "line",
    [
        "{0}: RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\n",
        "{0}: RuntimeError: CUDA error: no CUDA-capable device is detected\n",
        "{0}:1:2 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n",
    ],
)
def test_what_two_nodes_say_alike_is_neithers_own_fault(tmp_path: Path, line: str) -> None:
    found = of_files(tmp_path, train__log=STEPS + line.format("n1") + line.format("n2"))
    assert found.accused.nodes == () and found.step is not NextStep.EXCLUDE_AND_RESUBMIT


def test_the_first_report_of_a_launcher_need_not_be_the_writers(tmp_path: Path) -> None:
    report = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-23_04:42:20\n  host      : n2\n"
        "  rank      : 12 (local_rank: 4)\n  exitcode  : -6 (pid: 8787)\n  error_file: <N/A>\n"
    )
    error, other = (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
        "srun: error: n1: task 0: Terminated\n",
    )
    assert of_files(tmp_path, train__log=STEPS + error + report + other).accused.nodes == ()


@pytest.mark.parametrize(
    "raised",
    [
        "ValueError: bad shape\n",
        "KeyError: 'x'\n",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
    ],
)
def test_a_broken_link_that_no_rank_misses_is_no_cause(tmp_path: Path, raised: str) -> None:
    trace = 'n3 [rank5]: Traceback (most recent call last):\nn3 [rank5]:   File "/c/t.py", line 3, in f\nn3 [rank5]: '
    kernel = "[10.1] mlx5_core 0000:9c:00.0 ib0: Link down\n"
    found = of_files(tmp_path, **{"train__log": STEPS + trace + raised, "dmesg-n9__txt": kernel})
    assert found.fault in {FaultClass.USER_CODE, FaultClass.CUDA_OOM} and found.accused.nodes == ()
