"""Words of services, launchers and nodes' own logs that are read: what they mean and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.look import if_it_goes_on
from tr11ops.diagnose.places import node_of_daemons_log
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(
    f"2026-03-04 10:0{minute}:00 step {minute} loss 2.{9 - minute}\n" for minute in range(8)
)
TIMED_OUT = (
    "[rank5]:[E519 06:20:00.09 ProcessGroupNCCL.cpp:616] [Rank 5] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=7312, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 ms\n"
)


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("journal q4-12 kernel: mlx5_core 0000:31:00.0 ens3f0: Link down", "q4-12"),
        ("prolog[q412] job 77 dcgmi diag -r 2: Memory Fail", "q412"),
        ("[syslog 10.7.0.9] mlx5_core 0000:a1:00.0: health compromised", "10.7.0.9"),
        ("[10.7.0.9] ERROR RuntimeError: CUDA error: uncorrectable ECC error", "10.7.0.9"),
        (
            '{"src":"k8s-event","involvedObject":{"kind":"Node","name":"gp-4.lan"},"msg":"NVRM: Xid (PCI:0000:3b:00): 79"}',
            "gp-4.lan",
        ),
    ],
)
def test_the_node_that_a_collector_puts_before_a_line(line: str, node: str) -> None:
    assert split_prefixes(line)[0].node == node


def test_a_daemons_word_in_a_files_name_is_no_part_of_the_node() -> None:
    assert node_of_daemons_log("12-flap-dmesg.dmesg-q4-c3.txt", ()) == "q4-c3"


@pytest.mark.parametrize(
    ("text", "fault", "restart"),
    [
        (
            "slurmstepd: error: *** JOB 9 ON q1 CANCELLED AT 2026-03-04T10:09:00 by UID 0 (root) ***\n"
            "q2: [rank9]: NCCL error: remote process exited\n",
            FaultClass.SLURM_USER_CANCEL,
            Restart.NONE,
        ),
        (
            "EarlyStopping: Training stopped early as no improvement observed in last 50 epochs.\n",
            FaultClass.CLEAN_EXIT,
            Restart.NONE,
        ),
        (
            "RuntimeError: One of the subprocesses has abruptly died during map operation.\n",
            FaultClass.DATALOADER,
            Restart.CHANGE,
        ),
        (
            "PermissionError: [Errno 13] Permission denied: '/000003_locals'\n",
            FaultClass.DATALOADER,
            Restart.CHANGE,
        ),
        (
            "q1:7:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : local access violation work queue error\n"
            "[rank0]: torch.distributed.DistBackendError: NCCL error: unhandled system error\n",
            FaultClass.NCCL_NETWORK,
            Restart.CHANGE,
        ),
        (
            "EI0002: [PID: 9] The wait execution of the Notify register times out. remote rank: [3].\n"
            "RuntimeError: The Inner error is reported as above. The process exits for this inner error, "
            "and the current working operator name is HcclAllGather.\n",
            FaultClass.NCCL_TIMEOUT,
            Restart.UNKNOWN,
        ),
        (
            "divergence: loss above rolling mean by >3 sigma for 75 steps; stopping run\n",
            FaultClass.NUMERICS,
            Restart.CHANGE,
        ),
    ],
)
def test_what_a_line_of_another_program_means(
    tmp_path: Path, text: str, fault: FaultClass, restart: Restart
) -> None:
    found = of_text(tmp_path, STEPS + text)
    assert (found.fault, found.restart.answer) == (fault, restart)


def test_a_permission_of_a_file_is_still_the_storages(tmp_path: Path) -> None:
    text = "PermissionError: [Errno 13] Permission denied: '/gpfs/run/latest'\n"
    assert of_text(tmp_path, STEPS + text).fault is FaultClass.STORAGE


@pytest.mark.parametrize(
    "busy", ["[rank0] eval 400/2000 (6 it/s)", "[rank0 @q1] writing /f 40% (5 GiB)"]
)
def test_who_still_evaluates_or_writes_takes_as_long_the_next_time(
    tmp_path: Path, busy: str
) -> None:
    assert of_text(tmp_path, f"{STEPS}{busy}\n{TIMED_OUT}").restart.answer is Restart.CHANGE
    assert of_text(tmp_path, STEPS + TIMED_OUT).restart.answer is Restart.UNKNOWN


def test_a_slow_gpu_by_its_clocks_makes_its_node_a_suspect_alone(tmp_path: Path) -> None:
    slow = (
        "WARNING straggler: DETECTED STRAGGLER GPUs: rank 21 node=q3-7 local 5 score 0.31\n"
        "[q3-7] nvidia-smi -q -i 5 : Clocks Event Reasons: HW Power Brake Slowdown Active\n"
        "[q3-6] nvidia-smi -q -i 5 : Clocks Event Reasons: none\n"
    )
    found = of_text(tmp_path, STEPS + slow)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q3-7",))
    assert not found.accused.is_proved


def test_a_loss_scale_beside_the_loss_hides_no_step(tmp_path: Path) -> None:
    steps = "".join(
        f"train - Step {step} - CTC Loss: {5 - step / 50:.3f} | Gradient Norm: 1.7 | fp16 Loss Scale: 8192 | wps: 4\n"
        for step in range(10, 100, 10)
    )
    assert if_it_goes_on(of_text(tmp_path, steps)).fault is FaultClass.RUNNING


@pytest.mark.parametrize(
    ("text", "fault", "restart"),
    [
        (
            "botocore.exceptions.ResponseStreamingError: An error occurred while reading from response stream: x",
            FaultClass.GCS,
            Restart.PLAIN,
        ),
        (
            "OSError: AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, Timeout was reached",
            FaultClass.GCS,
            Restart.PLAIN,
        ),
        ("fsspec.exceptions.FSTimeoutError", FaultClass.GCS, Restart.PLAIN),
        (
            "OSError: AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
            FaultClass.GCS,
            Restart.CHANGE,
        ),
        (
            "I 09-12 22:49:49 controller.py:545] Cluster is preempted or failed. Recovering...",
            FaultClass.SLURM_PREEMPTED,
            Restart.PLAIN,
        ),
        (
            "ray.exceptions.ObjectStoreFullError: Failed to put object in object store because it is full.",
            FaultClass.HOST_OOM,
            Restart.CHANGE,
        ),
        (
            "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: Socket closed",
            FaultClass.NCCL_NETWORK,
            Restart.PLAIN,
        ),
        (
            "Monitored metric val_loss = nan is not finite. Previous best value was 0.4. Signaling Trainer to stop.",
            FaultClass.NUMERICS,
            Restart.CHANGE,
        ),
        (
            "Time limit reached. Elapsed time is 1 day, 0:00:03. Signaling Trainer to stop.",
            FaultClass.CLEAN_EXIT,
            Restart.NONE,
        ),
    ],
)
def test_what_services_and_frameworks_say_when_they_fail(
    tmp_path: Path, text: str, fault: FaultClass, restart: Restart
) -> None:
    found = of_text(tmp_path, f"{STEPS}{text}\n")
    assert (found.fault, found.restart.answer) == (fault, restart)


def test_what_hardware_corrected_by_itself_is_no_fault(tmp_path: Path) -> None:
    noise = "[77.1] mlx5_core 0000:31:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)\n"
    assert of_text(tmp_path, noise + STEPS).fault is FaultClass.UNKNOWN
    assert of_text(tmp_path, STEPS + noise).fault is FaultClass.UNKNOWN
