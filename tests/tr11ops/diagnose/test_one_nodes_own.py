"""One node's or one GPU's own trouble behind an error of all; ends that are clean; what has passed
since.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

STEPS = "".join(
    f"2026-03-04 10:0{minute}:00 step {10 * minute} loss 2.{9 - minute}\n" for minute in range(9)
)
OLD_DRIVER = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).\n"
NO_ADDRESS = "NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1, local GID ::\n"
GONE = "NCCL WARN socketProgress: Connection closed by remote peer m2.cl<4100>\n"
BEHIND = (
    "[rank{0}]:[E1 ProcessGroupNCCL.cpp:9] [PG ID 0 PG GUID 0(default_pg) Rank {0}] failure detected by watchdog at work "
    "sequence id: {1} PG status: last enqueued work: {1}, last completed work: 70\n"
)


def of(folder: Path, text: str, **others: str) -> Diagnosis:
    paths = [folder / "train.log", *(folder / f"{name}.log" for name in others)]
    for path, said in zip(paths, (text, *others.values()), strict=True):
        path.write_text(said, encoding="utf-8")
    [found] = diagnose_files(paths)
    return found


def drivers(**versions: str) -> str:
    return "".join(
        f"[check] {node} driver {version} gpus 8\n" for node, version in versions.items()
    )


# ----------------------------------------------------------------------------- nodes compared
@pytest.mark.parametrize(
    ("text", "node"),
    [
        (
            drivers(m1="570.86.15", m2="470.57.02", m3="570.86.15") + f"m2: [rank8]: {OLD_DRIVER}",
            "m2",
        ),
        (f"m2:5:9 [0] {NO_ADDRESS}m1:5:9 [0] {GONE}m3:5:9 [0] {GONE}", "m2"),
        (
            "m1: NCCL INFO Using network IB\nm2: NCCL INFO Using network Socket\nm3: NCCL INFO Using network IB\n"
            "m1:5:9 [0] NCCL WARN NET/IB : Got completion with error 12, vendor err 129\n",
            "m2",
        ),
    ],
)
def test_what_one_node_alone_has_is_that_nodes(tmp_path: Path, text: str, node: str) -> None:
    found = of(tmp_path, text)
    assert found.accused.nodes == (node,) and not found.accused.is_proved
    assert found.restart.answer is Restart.ELSEWHERE
    assert found.action is not NextStep.EXCLUDE_AND_RESUBMIT  # one log excludes no one


@pytest.mark.parametrize(
    "text",
    [
        drivers(m1="470.57.02", m2="470.57.02", m3="470.57.02") + f"m2: [rank8]: {OLD_DRIVER}",
        drivers(m1="570.86.15", m2="470.57.02", m3="550.54.15") + f"m2: [rank8]: {OLD_DRIVER}",
        f"m2:5:9 [0] {NO_ADDRESS}m1:5:9 [0] {NO_ADDRESS}m3:5:9 [0] {GONE}",
    ],
)
def test_what_several_have_is_no_nodes_own(tmp_path: Path, text: str) -> None:
    found = of(tmp_path, text)
    assert found.accused.nodes == () and found.restart.answer is Restart.CHANGE


@pytest.mark.parametrize(
    "line",
    [
        "10:04:30 probe: c7 GPU 3 at 210 MHz, reasons HW_POWER_BRAKE_SLOWDOWN\n",
        "10:04:30 weights checksum step 40: rank 27 on c7 differs\n",
    ],
)
def test_a_gpu_that_is_slow_or_computes_wrongly_is_the_cause_of_a_time_out(
    tmp_path: Path, line: str
) -> None:
    late = "[rank1]:[E1] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
    lines = STEPS.splitlines(keepends=True)
    found = of(tmp_path, "".join([*lines[:5], line, *lines[5:], late]))
    assert found.fault is FaultClass.GPU_HARDWARE and found.accused.nodes == ("c7",)
    assert (
        found.restart.answer is Restart.ELSEWHERE
        and found.action is not NextStep.EXCLUDE_AND_RESUBMIT
    )


def test_numbers_that_are_not_finite_on_a_gpu_with_broken_memory_are_that_gpus(
    tmp_path: Path,
) -> None:
    check = "[rank5]: /torch/csrc/NanCheck.cu:9: checkForNaN: block: [0,0,0] Assertion `!isnan(x)` failed.\n"
    paths = [tmp_path / "train.log", tmp_path / "dmesg-q5.txt"]
    paths[0].write_text(check)
    paths[1].write_text(
        "[77.1] NVRM: Xid (PCI:0000:1b:00): 48, pid=1, name=python, DBE (double bit error)\n"
    )
    [found] = diagnose_files(paths)
    assert found.fault is FaultClass.GPU_HARDWARE and found.accused.nodes == ("q5",)
    assert of(tmp_path, check).fault is FaultClass.NUMERICS


@pytest.mark.parametrize(
    ("numbers", "rank"), [((71, 71, 70, 71), 2), ((71, 71, 71, 71), None), ((71, 70, 70, 71), None)]
)
def test_the_rank_that_is_behind_all_others(
    tmp_path: Path, numbers: tuple[int, ...], rank: int | None
) -> None:
    found = of(
        tmp_path,
        STEPS + "".join(BEHIND.format(place, number) for place, number in enumerate(numbers)),
    )
    assert found.fault is FaultClass.NCCL_TIMEOUT and found.signs.silent_rank == rank


def test_no_route_at_the_start_is_a_firewall_or_a_route_and_later_it_may_pass(
    tmp_path: Path,
) -> None:
    line = "a1:5:9 [0] include/socket.h:409 NCCL WARN Net : Connect to 10.0.0.2<5426> failed : No route to host\n"
    assert of(tmp_path, line).restart.answer is Restart.CHANGE
    assert of(tmp_path, STEPS + line).restart.answer is not Restart.CHANGE


# ----------------------------------------------------------------------------- clean ends
@pytest.mark.parametrize(
    "end",
    [
        "trainer: Training completes after 900 s\n[rank1]: NCCL WARN Connection closed by remote peer m1<9>\n",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error.\ntrain rc=0\n",
        "[guard] budget exhausted: 90 of 90 GPU hours, terminating run 7\nERROR: a worker got signal 15\n",
    ],
)
def test_what_is_said_after_an_end_on_purpose_is_no_fault(tmp_path: Path, end: str) -> None:
    found = of(tmp_path, STEPS + end)
    assert found.fault in {FaultClass.CLEAN_EXIT, FaultClass.SLURM_USER_CANCEL}
    assert found.restart.answer is Restart.NONE


def test_a_log_that_is_cut_in_a_line_does_not_end_on_a_step(tmp_path: Path) -> None:
    assert of(tmp_path, STEPS).restart.answer is Restart.NONE
    assert of(tmp_path, STEPS + "2026-03-04 10:09").restart.answer is Restart.UNKNOWN


# ---------------------------------------------------------------- what has passed, and what has not
FULL = "[rank3] OSError: [Errno 28] No space left on device: '/lustre/ck/r3.pt'\n"
BUSY = (
    'ERROR tensorstore: Error writing "gs://b/ck/0": HTTP response code: {0}; retries exhausted\n'
)


@pytest.mark.parametrize(
    ("text", "restart"),
    [
        (STEPS + FULL, Restart.CHANGE),
        (STEPS + FULL + "purge of /lustre done, 90 TB freed\n", Restart.PLAIN),
        (STEPS + BUSY.format("503: backendError"), Restart.PLAIN),
        (STEPS + BUSY.format("403: Forbidden"), Restart.CHANGE),
        (
            "tmpfs   64M  0  64M  0% /dev/shm\nERROR: rank 2 crashed with exit code -7\n",
            Restart.CHANGE,
        ),
        (
            "tmpfs   64G  0  64G  0% /dev/shm\nERROR: rank 2 crashed with exit code -7\n",
            Restart.UNKNOWN,
        ),
    ],
)
def test_whether_a_restart_helps(tmp_path: Path, text: str, restart: Restart) -> None:
    assert of(tmp_path, text).restart.answer is restart


def test_a_save_that_the_time_limit_cut_is_what_the_next_job_fails_on(tmp_path: Path) -> None:
    cut = (
        STEPS
        + "2026-03-04 10:09:00 saving step 90\nslurmstepd: error: *** JOB 6 ON n1 CANCELLED AT 2026-03-04T10:09:20 DUE TO TIME LIMIT ***\n"
    )
    after = (
        "2026-03-04 10:11:00 loading /ck/step-90\nTraceback (most recent call last):\n"
        '  File "/x/load.py", line 1, in read\n    open(path)\n'
        "FileNotFoundError: [Errno 2] No such file or directory: '/ck/step-90/.metadata'\n"
    )
    found = of(tmp_path, cut, next=after)
    assert found.fault is FaultClass.CHECKPOINT_MISMATCH and found.restart.answer is Restart.CHANGE
    assert of(tmp_path, cut).fault is FaultClass.SLURM_TIME_LIMIT


def test_what_is_told_of_an_earlier_job_is_no_fault_of_this_one(tmp_path: Path) -> None:
    told = "launcher: previous job 8 failed on b2 with Xid 79, board replaced since\n"
    found = of(
        tmp_path, told + "hydra.errors.ConfigCompositionException: Could not load 'model/9b'\n"
    )
    assert found.fault is FaultClass.USER_CODE and found.accused.nodes == ()


@pytest.mark.parametrize(
    "told",
    [
        '{"protoPayload":{"methodName":"compute.instances.preempted","resourceName":"zones/b/instances/p-2"}}\n',
        '{"severity":"WARNING","instance":"p-2","msg":"metadata: instance/preempted = TRUE; shutdown in 30 s"}\n',
    ],
)
def test_a_machine_that_its_cloud_took_accuses_no_one_however_many_miss_it(
    tmp_path: Path, told: str
) -> None:
    lost = "p-{0}: [rank{0}]: ncclRemoteError: socketProgress: Connection closed by remote peer p-2<43318>\n"
    found = of(tmp_path, STEPS + told + lost.format(0) + lost.format(1))
    assert found.fault is FaultClass.SLURM_PREEMPTED and found.accused.nodes == ()
    assert found.restart.answer is Restart.PLAIN


def test_a_rendezvous_that_an_earlier_launch_closed_stays_closed(tmp_path: Path) -> None:
    line = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError: Rendezvous for run_id=sweep was closed\n"
    assert of(tmp_path, line).restart.answer is Restart.CHANGE
    assert of(tmp_path, STEPS + line).restart.answer is not Restart.CHANGE


def test_whether_a_store_that_no_one_reached_is_there_the_next_time_is_not_told(
    tmp_path: Path,
) -> None:
    line = (
        "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 10.0.0.1:1234.\n"
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.\n"
    )
    found = of(tmp_path, line)
    assert found.fault is FaultClass.RENDEZVOUS and found.restart.answer is Restart.UNKNOWN


def test_a_file_server_that_came_back_before_a_gpu_broke_is_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "dmesg-q5.txt"
    slow = "[70.1] Lustre: 41:0:(client.c:2310:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply\n"
    back = "[71.1] Lustre: s2-OST11-osc-ffff: Connection restored to 10.0.0.9@o2ib (at 10.0.0.9@o2ib)\n"
    gsp = "[77.1] NVRM: Xid (PCI:0000:1b:00): 119, pid=1, Timeout after 45s of waiting for RPC response from GPU2 GSP!\n"
    path.write_text(slow + back + gsp, encoding="utf-8")
    [found] = diagnose_files([path])
    assert found.fault is FaultClass.GPU_HARDWARE and found.accused.nodes == ("q5",)
    path.write_text(slow + back, encoding="utf-8")
    [found] = diagnose_files([path])
    assert found.fault is FaultClass.STORAGE


def test_who_is_said_to_compute_wrongly_is_not_who_says_so(tmp_path: Path) -> None:
    where = "rank 0 (host q1, gpu 0)\nrank 53 (host q7, gpu 5)\n"
    said = "[rank0] ERROR silent data corruption suspected on q7 gpu 5 (rank 53); stopping\n"
    assert of(tmp_path, where + STEPS + said).accused.nodes == ("q7",)


def test_all_nodes_that_left_with_0_are_a_clean_end_whatever_they_said_of_each_other(
    tmp_path: Path,
) -> None:
    noise = "q1:5:9 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer 203.0.113.5<46494>\n"
    found = of(tmp_path, STEPS + noise + "exit status: 0 on all 8 nodes\n")
    assert found.fault is FaultClass.CLEAN_EXIT and found.restart.answer is Restart.NONE
    assert of(tmp_path, STEPS + noise).fault is not FaultClass.CLEAN_EXIT


# ----------------------------------------------------------------------------- Ray
def test_a_node_without_heartbeats_is_lost_and_too_few_gpus_follow_from_it(tmp_path: Path) -> None:
    lost = (
        "2026-03-04 10:10:00,1 WARNING worker.py:9 -- The node with node id: 5e and ip: 10.0.0.9 has been marked dead "
        "because the detector has missed too many heartbeats from it.\n"
    )
    few = "(scheduler +9m) Error: No available node types can fulfill resource request {'GPU': 1.0}.\n"
    found = of(tmp_path, STEPS + lost + few)
    assert found.fault is FaultClass.SLURM_NODE_FAIL and found.accused.nodes == ("10.0.0.9",)
    assert of(tmp_path, few).fault is FaultClass.SLURM_SUBMIT


def test_workers_that_ray_could_not_place_need_more_room(tmp_path: Path) -> None:
    wait = "(autoscaler +2m) Warning: The following resource request cannot be scheduled right now: {'GPU': 1.0}.\n"
    late = "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 4/5 clients joined.\n"
    assert of(tmp_path, wait * 3 + late).restart.answer is Restart.CHANGE
    assert of(tmp_path, late).restart.answer is not Restart.CHANGE


# ---------------------------------------------------------------------------- who says it, and when
def test_a_kernels_line_that_no_signature_knows_is_no_cause_beside_what_is_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "dmesg-q5.txt"
    noise = "[11.1] cgroup: fork rejected by pids controller in /system.slice/crond.service\n[12.1] audit: error: denied\n"
    path.write_text(
        f"{noise}[77.1] NVRM: Xid (PCI:0000:1b:00): 119, pid=1, Timeout after 6s of waiting for RPC response from GPU5 GSP!\n"
    )
    [found] = diagnose_files([path])
    assert found.fault is FaultClass.GPU_HARDWARE and found.root_cause is not None
    assert (found.root_cause.line_number, found.accused.nodes) == (3, ("q5",))


def test_noise_after_the_last_step_of_all_is_no_fault(tmp_path: Path) -> None:
    steps = "".join(
        f"step {number}/90 loss 2.{9 - number // 10}\n" for number in range(10, 100, 10)
    )
    noise = "ERROR:root:telemetry: could not reach the collector\nBrokenPipeError: [Errno 32] Broken pipe\n"
    assert of(tmp_path, steps + noise).fault is FaultClass.CLEAN_EXIT
    cut = steps.replace("step 90/90 loss 2.0\n", "")
    assert of(tmp_path, cut + noise).fault is not FaultClass.CLEAN_EXIT


def test_a_launcher_that_was_told_to_go_does_not_know_why_its_rank_lost_another(
    tmp_path: Path,
) -> None:
    closing = "W1 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 100 closing signal SIGTERM\n"
    lost = "[rank17]: ncclRemoteError, remote process exited or there was a network error\n"
    told = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 88 got signal: 15\n"
    )
    assert of(tmp_path, STEPS + closing + lost + told).fault is FaultClass.UNKNOWN
    assert of(tmp_path, STEPS + lost + closing + told).fault is FaultClass.NCCL_NETWORK


def test_the_host_that_lists_fewer_gpus_lacks_one(tmp_path: Path) -> None:
    lists = "".join(
        f"s-{host} GPU {number}: NVIDIA A100\n" for host in (1, 2) for number in range(9 - host)
    )
    error = "s-2: [rank15]: RuntimeError: CUDA error: invalid device ordinal\n"
    found = of(tmp_path, lists + error)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("s-2",))
    same = "".join(
        f"s-{host} GPU {number}: NVIDIA A100\n" for host in (1, 2) for number in range(8)
    )
    assert of(tmp_path, same + error).fault is FaultClass.USER_CODE


def test_a_gpu_that_is_found_to_compute_wrongly_is_named_by_any_line_that_names_it(
    tmp_path: Path,
) -> None:
    text = (
        "[sdc] it 40: replica dp=3 differs (hash 0x1 vs 0x2 of 23 others)\n"
        "[sdc] suspect: c4-n3 cuda:3 computes wrong values; no Xid logged\n"
        "ERROR: stopping on silent data corruption, checkpoint 30 is clean\n"
    )
    found = of(tmp_path, STEPS + text)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("c4-n3",))
    assert (
        found.restart.answer is Restart.ELSEWHERE
        and found.action is not NextStep.EXCLUDE_AND_RESUBMIT
    )


def test_what_the_driver_recommends_is_quoted_by_the_fault_that_it_is_about(tmp_path: Path) -> None:
    paths = [tmp_path / "train.log", tmp_path / "dmesg-q5.txt"]
    paths[0].write_text("SLURM_NODELIST=q[4-6]\n")
    paths[1].write_text(
        "NVRM: Xid (PCI:0000:66:00): 145, RLW_SRC_TRACK Nonfatal XC0 i0 Link 11 (0x00000014 0x00000000)\n"
        "NVRM: Xid (PCI:0000:66:00): 45, pid=1, name=python3, Ch 00000000 caused by previous Xid 145\n"
        "NVRM: Xid (PCI:0000:66:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)\n"
    )
    [found] = diagnose_files(paths)
    assert found.root_cause is not None and found.root_cause.line_number == 1
    assert found.accused.nodes == ("q5",) and found.accused.is_proved


def test_the_directory_of_a_run_is_no_nodes_own_wherever_it_lies(tmp_path: Path) -> None:
    lost = "tr11: this trainer's lease on the run is not in /tmp/run/state/lease any more (unmounted, or removed by hand); nothing more is published here"
    found = of(tmp_path, STEPS + f"n10: [default0]:{lost}\n")
    assert (found.fault, found.accused.nodes) == (FaultClass.STORAGE, ())
    assert found.restart.answer is Restart.CHANGE and "n10" not in found.restart.why


@pytest.mark.parametrize(
    "said",
    [
        "heartbeat cannot be written: [Errno 28] No space left on device: '/tmp/run/state/beat-10.json'",
        "tr11: a log cannot be written: [Errno 5] Input/output error: '/var/run7/logs/attempt-1'",
    ],
)
def test_what_tr11_itself_cannot_write_lies_where_all_nodes_write(
    tmp_path: Path, said: str
) -> None:
    found = of(tmp_path, STEPS + f"n10: [default0]:{said}\n")
    assert (found.fault, found.accused.nodes) == (FaultClass.STORAGE, ())
