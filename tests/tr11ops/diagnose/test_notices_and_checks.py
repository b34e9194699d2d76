"""Orders, notices and checks of nodes in the words of those who give them: who is to blame, and who only waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import HEAD, of_text
from tr11ops.diagnose.answers import Culprit
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.places import node_of_daemons_log
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(
    f"2026-03-04 10:0{minute}:00 step {minute} loss 2.{9 - minute}\n" for minute in range(8)
)
LIMIT = (
    "slurmstepd: error: *** JOB 77 ON q3 CANCELLED AT 2026-03-04T12:00:00 DUE TO TIME LIMIT ***\n"
)
OSERROR = HEAD + "OSError: [Errno 9] Bad file descriptor\n"
PORT_ERROR = "NCCL WARN NET/IB : Got async event : port error\n"


def of_files(folder: Path, texts: dict[str, str]) -> Diagnosis:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    [found] = diagnose_files([folder / name for name in texts])
    return found


# ----------------------------------------------------------------------------- who waited
def waiting(*lines: str) -> str:
    started = "".join(f"q-{number} | launcher 2.1 on\n" for number in range(3))
    return started + "".join(f"{line}\n" for line in lines)


def test_who_waited_for_others_in_vain_is_a_witness(tmp_path: Path) -> None:
    text = waiting(
        "q-0 | waiting for 4 workers, have 3",
        "q-0 | torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
        "q-1 | [c10d] recvValue failed on SocketImpl(fd=4, remote=[q-0.lab]:29400): failed to recv, got 0 bytes",
    )
    found = of_text(tmp_path, text)
    assert (found.fault, found.accused.nodes) == (FaultClass.RENDEZVOUS, ())


@pytest.mark.parametrize("odd", ["??", "OK"])
def test_a_node_that_counts_fewer_gpus_than_the_others_is_the_suspect(
    tmp_path: Path, odd: str
) -> None:
    text = (
        "09:00:02 preflight q-1 ok gpus=8 ib=4/4\n"
        "09:00:02 preflight q-2 ok gpus=8 ib=4/4\n"
        f"09:00:03 preflight q-3 {odd} gpus=7 ib=4/4\n"
        f"09:01:00 q-3 [local_rank 7] {HEAD.splitlines()[0]}\n"
        '09:01:00 q-3 [local_rank 7]   File "/code/train.py", line 9, in setup\n'
        "09:01:00 q-3 [local_rank 7] RuntimeError: CUDA error: invalid device ordinal\n"
    )
    found = of_text(tmp_path, text)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q-3",))
    assert not found.accused.is_proved
    even = text.replace("gpus=7", "gpus=8").replace(odd, "ok", 1)
    assert of_text(tmp_path, even).accused.nodes == ()


# ----------------------------------------------------------------------------- orders and notices
@pytest.mark.parametrize(
    "interrupted",
    [
        f"^CProcess Process-2:\n{OSERROR}",
        f"^C{OSERROR}KeyboardInterrupt\n",
        f"[rank3]: RuntimeError: DataLoader worker (pid 81) is killed by signal: Interrupt.\n{OSERROR}",
    ],
)
def test_what_is_raised_after_ctrl_c_comes_of_it(tmp_path: Path, interrupted: str) -> None:
    found = of_text(tmp_path, STEPS + interrupted)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_USER_CANCEL, Restart.NONE)


@pytest.mark.parametrize(
    "notice", ["Handling auto-requeue signal: 10\n", "[rank: 0] Received SIGUSR1: saving\n"]
)
def test_what_the_handler_of_the_limits_notice_raises_is_no_cause(
    tmp_path: Path, notice: str
) -> None:
    found = of_text(tmp_path, STEPS + notice + OSERROR + LIMIT)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_TIME_LIMIT, Restart.PLAIN)
    before = of_text(tmp_path, STEPS + OSERROR + notice + LIMIT)
    assert before.fault is not FaultClass.SLURM_TIME_LIMIT


@pytest.mark.parametrize(
    ("text", "fault", "restart"),
    [
        (
            "GCP Metadata Service says termination is imminent\nError: Aborted (signal 15)",
            FaultClass.SLURM_PREEMPTED,
            Restart.PLAIN,
        ),
        (
            "torchft.lighthouse INFO start: No quorum, only have 3 participants, need 4\n"
            'TimeoutError: status: DeadlineExceeded, message: "timeout waiting for quorum"',
            FaultClass.RENDEZVOUS,
            Restart.UNKNOWN,
        ),
        (
            "RuntimeError: grad_scale is too small, exiting: 5.9e-08",
            FaultClass.NUMERICS,
            Restart.CHANGE,
        ),
        (
            "[1] transport/p2p.cc:275 NCCL WARN Cuda failure 101 'invalid device ordinal'",
            FaultClass.USER_CODE,
            Restart.CHANGE,
        ),
    ],
)
def test_what_notices_mean(tmp_path: Path, text: str, fault: FaultClass, restart: Restart) -> None:
    found = of_text(tmp_path, f"{STEPS}{text}\n")
    assert (found.fault, found.restart.answer) == (fault, restart)


@pytest.mark.parametrize(
    ("user", "fault"),
    [
        ("ann@corp", FaultClass.SLURM_USER_CANCEL),
        ("system:serviceaccount:kube-system:job-controller", FaultClass.RENDEZVOUS),
    ],
)
def test_a_pod_that_a_person_deleted(tmp_path: Path, user: str, fault: FaultClass) -> None:
    lost = (
        f"2026-03-04T10:08:30Z audit  delete  pod/ft-worker-1  verb=delete user={user} userAgent=k\n"
        "2026-03-04 10:09:00 torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
    )
    assert of_text(tmp_path, STEPS + lost).fault is fault


def test_an_optional_plugin_of_slurm_that_is_not_there_refuses_nothing(tmp_path: Path) -> None:
    text = (
        "sbatch: error: spank: lua.so: Plugin file not found\n"
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"
    )
    found = of_text(tmp_path, text)
    assert found.fault is FaultClass.SLURM_SUBMIT
    assert found.root_cause is not None and found.root_cause.line_number == 2


def test_what_python_prints_while_it_tidies_up_undoes_no_clean_end(tmp_path: Path) -> None:
    tidied = (
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/multiprocessing/util.py", line 300, in _run_finalizers\n'
        "    finalizer()\n"
        "OSError: [Errno 16] Device or resource busy: '.nfs0000c3'\n"
    )
    ended = of_text(tmp_path, f"{STEPS}done.\n{tidied}job exit status 0\n")
    assert (ended.fault, ended.restart.answer) == (FaultClass.CLEAN_EXIT, Restart.NONE)


# ----------------------------------------------------------------------------- checks of nodes
def test_the_node_that_a_launchers_check_found_faulty(tmp_path: Path) -> None:
    text = (
        "[2026-01-27 08:46:38,098] [INFO] [rdzv_manager.py:376] Round 0: The node status are {5: False, 6: False}.\n"
        "[2026-01-27 08:51:58,300] [WARNING] [rdzv_manager.py:402] fault nodes after 2 rounds: [6]\n"
        "[2026-01-27 08:51:58,459] [INFO] [reporter.py:68] [warn][ft-worker-6][status_update][Running to Failed]"
        '[{"to_state": "Failed", "node": "ft-worker-6", "exit reason": "CHECK_FAIL"}]\n'
        "[2026-01-27 08:52:00,100] [INFO] [training.py:833] ft-worker-5: job is stopping\n"
    )
    found = of_text(tmp_path, text)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("ft-worker-6",))
    assert found.restart.answer is Restart.ELSEWHERE
    assert not found.accused.is_proved
    by_number = "".join(f"master-1: {line}\n" for line in text.splitlines()[:2])
    assert of_text(tmp_path, by_number).accused.nodes == ()


FIRST = (
    "7: ERROR:megatron.core.rerun_state_machine:Unexpected result nan (message='found NaN in local grad norm')\n"
    "7: WARNING:megatron.core.rerun_state_machine:Rank 7, node q-1, device 2, iteration #88: Unexpected result nan\n"
    "srun: error: q-1: tasks 4-7: Exited with exit code 16\n"
)
ELSEWHERE = (
    "7: ERROR:megatron.core.rerun_state_machine:Rank 7, node q-2, device 2, iteration #88: Possible persistent error!\n"
    "srun: error: q-2: tasks 4-7: Exited with exit code 17\n"
)


def test_the_node_of_the_good_rerun_is_not_the_one_that_computes_wrongly(tmp_path: Path) -> None:
    both = of_files(tmp_path, {"run1.log": STEPS + FIRST, "run2.log": ELSEWHERE})
    assert (both.fault, both.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q-1",))
    second = of_text(tmp_path, ELSEWHERE)
    assert second.accused.nodes == ()
    assert of_text(tmp_path, STEPS + FIRST).fault is FaultClass.NUMERICS


def test_a_gpu_whose_sums_differ_from_its_replicas(tmp_path: Path) -> None:
    text = (
        "step 8 weight-checksum MISMATCH: replica 3=0x9a1, all others 0x9a0 (rank 13 of 16)\n"
        "consistency: rank 13 (host q-7, gpu 5): matmul digest differs from reference in 2 of 100 runs\n"
        "consistency: rank 14 (host q-8, gpu 6): 100 of 100 runs equal to reference\n"
    )
    found = of_text(tmp_path, STEPS + text)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q-7",))
    assert found.restart.answer is Restart.ELSEWHERE


def test_the_words_of_an_error_beside_a_records_message_are_read(tmp_path: Path) -> None:
    record = '{"ts": "2026-02-11T04:41:30Z", "host": "q-7", "msg": "kernel", "line": "NVRM: Xid (PCI:0000:3b:00): 79"}'
    origin, text = split_prefixes(record)
    assert (origin.node, text) == ("q-7", "kernel: NVRM: Xid (PCI:0000:3b:00): 79")
    other = (
        '{"ts": "2026-02-11T04:41:33Z", "host": "q-8", "msg": "trainer exception", '
        '"exc": "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 9."}'
    )
    found = of_text(tmp_path, f"{STEPS}{record}\n{other}\n")
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q-7",))


def test_the_rank_that_did_not_join(tmp_path: Path) -> None:
    text = (
        "[rank2]:[E ProcessGroupNCCL.cpp:683] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=80, OpType=ALLGATHER, Timeout(ms)=600000) ran for 600051 milliseconds\n"
        "Collective sequence number: 80 pg dp: not all ranks joined, missing: {13}\n"
        "rank 13 host q-7 last stack: optimizer.step\n"
    )
    accused = of_text(tmp_path, STEPS + text).accused
    assert (accused.kind, accused.rank, accused.nodes) == (Culprit.RANK, 13, ("q-7",))


# ----------------------------------------------------------------------------- a machine of its own
def test_the_host_whose_munge_does_not_run_is_that_of_the_shell(tmp_path: Path) -> None:
    refused = (
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory\n'
        "sbatch: error: Batch job submission failed: Protocol authentication error\n"
    )
    found = of_text(tmp_path, f"[ann@login4 run]$ sbatch train.sh\n{refused}")
    assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_AUTH, ("login4",))
    assert of_text(tmp_path, f"$ sbatch train.sh\n{refused}").accused.nodes == ()
    stopped = "Apr 08 09:41:10 login4 systemd[1]: Stopped MUNGE authentication service.\n"
    in_order = of_text(tmp_path, f"{stopped}[ann@login4 run]$ sbatch train.sh\n{refused}")
    assert in_order.accused.nodes == ()


SKEWED = "botocore.exceptions.ClientError: An error occurred (RequestTimeTooSkewed) when calling the UploadPart operation"


def test_a_clock_that_is_wrong_is_of_the_one_host_whose_requests_are_refused(
    tmp_path: Path,
) -> None:
    hosts = "".join(f"host=q-{number} uploaded 8/8 parts\n" for number in (1, 2))
    one = of_text(tmp_path, f"{STEPS}{hosts}host=q-3 {SKEWED}\n")
    assert (one.fault, one.accused.nodes) == (FaultClass.GCS, ("q-3",))
    two = of_text(tmp_path, f"{STEPS}{hosts}host=q-3 {SKEWED}\nhost=q-4 {SKEWED}\n")
    assert two.accused.nodes == ()


@pytest.mark.parametrize(
    ("file", "node"),
    [
        ("12-sxid.fabricmanager-q-b.log", "q-b"),
        ("nv-fabricmanager.q-b12.log", "q-b12"),
        ("fabricmanager-sxid.log", None),
    ],
)
def test_whose_fabric_manager_wrote_a_log(file: str, node: str | None) -> None:
    assert node_of_daemons_log(file, ()) == node


def test_ports_that_flap_on_many_nodes_condemn_none(tmp_path: Path) -> None:
    flaps = "".join(f"09:0{n}:00 q-{n}:9:9 [0] net_ib.cc:93 {PORT_ERROR}" for n in range(1, 5))
    found = of_text(tmp_path, STEPS + flaps)
    assert (found.fault, found.accused.nodes) == (FaultClass.NCCL_NETWORK, ())
    assert found.restart.answer is not Restart.ELSEWHERE


def test_a_time_without_a_day_hides_no_node() -> None:
    assert split_prefixes("[09:00:01] q-1:77:78 [3] NCCL WARN x")[0].node == "q-1"


# ----------------------------------------------------------------------------- words of monitors
@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (
            "health-agent: node=w-14 gpu=3 check=nvlink status=FAIL detail=link",
            FaultClass.GPU_HARDWARE,
        ),
        ("burn-in: w-14 FAILED gemm check: max abs diff 32 on GPU 3", FaultClass.GPU_HARDWARE),
        ("I0803 02:20:11 detector w-14 condition GPUHealth=False", FaultClass.GPU_HARDWARE),
        (
            "straggler report: rank 27 (w-14 gpu 3) relative performance 0.41",
            FaultClass.GPU_HARDWARE,
        ),
        ("SDC: checksum of layer 12 differs on rank 27 (w-14) from all", FaultClass.GPU_HARDWARE),
        ("w-14 opensm-watch: port mlx5_4/1 state DOWN (was ACTIVE)", FaultClass.NCCL_NETWORK),
        ("w-14 ipmi: Processor CPU_0 | IERR | Asserted", FaultClass.SLURM_NODE_FAIL),
    ],
)
def test_what_a_monitor_says_of_a_node_accuses_it(
    tmp_path: Path, said: str, fault: FaultClass
) -> None:
    found = of_text(
        tmp_path, f"{STEPS}{said}\nsrun: error: w-14: task 27: Exited with exit code 1\n"
    )
    assert (found.fault, found.accused.nodes) == (fault, ("w-14",))
    assert found.restart.answer is Restart.ELSEWHERE
    assert not found.accused.is_proved


@pytest.mark.parametrize(
    "said",
    [
        "health-agent: node=w-14 gpu=3 check=nvlink status=PASS",
        "detector w-14 condition GPUHealth=True",
        "straggler report: rank 27 (w-14 gpu 3) relative performance 0.97",
        "w-14 opensm-watch: port mlx5_4/1 state ACTIVE (was DOWN)",
    ],
)
def test_what_a_monitor_finds_well_accuses_no_one(tmp_path: Path, said: str) -> None:
    assert of_text(tmp_path, f"{STEPS}{said}\n").accused.nodes == ()


# ----------------------------------------------------------------------------- words of clients
@pytest.mark.parametrize(
    ("raised", "fault"),
    [
        ("azure.core.exceptions.ServiceResponseError: Connection reset by peer", FaultClass.GCS),
        ("oss2.exceptions.ServerError: {'status': 503, 'Code': 'Busy'}", FaultClass.GCS),
        ("OSError: [Errno 52] Invalid exchange: '/mnt/pfs/x.bin'", FaultClass.STORAGE),
        (
            "subprocess.CalledProcessError: Command '['git', 'log']' returned non-zero exit status 128.",
            FaultClass.USER_CODE,
        ),
    ],
)
def test_an_exception_is_of_what_raised_it(tmp_path: Path, raised: str, fault: FaultClass) -> None:
    assert of_text(tmp_path, f"{STEPS}{HEAD}{raised}\n").fault is fault


def test_a_notice_of_a_spot_machines_end_is_a_preemption(tmp_path: Path) -> None:
    said = "[WARN] AWS spot interruption notice received: instance i-0ab action=terminate\nTerminated\n"
    assert of_text(tmp_path, STEPS + said).fault is FaultClass.SLURM_PREEMPTED


@pytest.mark.parametrize(
    "said",
    [
        "w-14 kernel: EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2",
        "w-14 kernel: nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
        "w-14 kernel: blk_update_request: critical medium error, dev nvme1n1, sector 88123",
    ],
)
def test_a_nodes_own_disk_is_that_nodes(tmp_path: Path, said: str) -> None:
    found = of_text(
        tmp_path, f"{STEPS}{said}\n[rank27] w-14: OSError: [Errno 30] Read-only file system: '/x'\n"
    )
    assert (found.fault, found.accused.nodes) == (FaultClass.STORAGE, ("w-14",))
    assert found.restart.answer is Restart.ELSEWHERE and not found.accused.is_proved
