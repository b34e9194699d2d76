"""What came first, told apart from what others saw of it; and on which host a line was printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tr11ops.diagnose.look import if_it_goes_on
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(
    f"2026-03-04 10:0{minute}:00 step {minute} loss 2.{9 - minute}\n" for minute in range(8)
)
LOST = (
    "[rank3]: ncclRemoteError: A call failed possibly due to a network error\n"
    "[rank9]: Last error: NET/IB: Got completion from peer 10.5.0.3<40120> with status=5 opcode=0\n"
)
RAISED = (
    "rk0: Traceback (most recent call last):\n"
    'rk0:   File "/proj/evals/retrieval.py", line 64, in recall_at_k\n'
    "rk0:     top = sims.topk(kmax, dim=-1).indices\n"
    "rk0: NameError: name 'kmax' is not defined\n"
)
KILLED_LOADER = (
    "[rank5]: Traceback (most recent call last):\n"
    '[rank5]:   File "/opt/torch/utils/data/_utils/signal_handling.py", line 73, in handler\n'
    "[rank5]:     _error_if_any_worker_fails()\n"
    "[rank5]: RuntimeError: DataLoader worker (pid 402277) is killed by signal: Killed.\n"
)
TIMED_OUT = (
    "[rank{rank}]:[E519 06:20:00.09 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=7312, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 ms\n"
)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


def test_an_ordinary_exception_comes_before_the_words_of_who_lost_its_rank(tmp_path: Path) -> None:
    assert of_text(tmp_path, STEPS + RAISED + LOST).fault is FaultClass.USER_CODE
    assert of_text(tmp_path, STEPS + LOST).fault is FaultClass.NCCL_NETWORK


def test_a_worker_of_the_data_loader_that_the_kernel_killed_is_a_lack_of_memory(
    tmp_path: Path,
) -> None:
    oom = "slurmstepd: error: Detected 3 oom_kill events in StepId=77.0.\n"
    assert of_text(tmp_path, STEPS + KILLED_LOADER + oom).fault is FaultClass.HOST_OOM
    assert of_text(tmp_path, STEPS + KILLED_LOADER).fault is FaultClass.DATALOADER


def test_who_could_not_take_a_pickle_only_echoes_who_could_not_make_it(tmp_path: Path) -> None:
    echo = "EOFError: Ran out of input\n"
    made = "AttributeError: Can't pickle local object 'make.<locals>.<lambda>'\n"
    assert of_text(tmp_path, made + echo).fault is FaultClass.USER_CODE
    assert of_text(tmp_path, echo).fault is FaultClass.CHECKPOINT_MISMATCH


def test_an_event_with_an_age_is_not_overcome_by_what_stands_below_it(tmp_path: Path) -> None:
    event = "8m40s   Normal   NodeNotReady   node/ik-31   Node ik-31 status is now: NodeNotReady\n"
    found = of_text(tmp_path, event + STEPS + LOST)
    assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_NODE_FAIL, ("ik-31",))
    assert of_text(tmp_path, event + STEPS).fault is not FaultClass.SLURM_NODE_FAIL
    assert of_text(tmp_path, event[8:] + STEPS + LOST).fault is FaultClass.NCCL_NETWORK


def test_the_log_of_the_job_before_that_a_submission_quotes_is_not_its_own(tmp_path: Path) -> None:
    quoted = "  slurmstepd: error: *** JOB 40881 ON q-7 CANCELLED AT 2025-12-24T00:49:00 DUE TO TIME LIMIT ***\n"
    refused = "sbatch: error: Batch job submission failed: Protocol authentication error\n"
    assert of_text(tmp_path, STEPS + quoted + refused).fault is FaultClass.SLURM_AUTH
    assert of_text(tmp_path, STEPS + quoted).fault is FaultClass.SLURM_TIME_LIMIT


def test_a_line_that_only_assigns_a_variable_tells_of_no_error(tmp_path: Path) -> None:
    exited = "srun: error: nid12: task 13: Exited with exit code 1\n"
    for line in ("NCCL_ASYNC_ERROR_HANDLING=1\n", "TORCH_NCCL_DUMP_ON_TIMEOUT=1\n"):
        assert of_text(tmp_path, line + exited).fault is FaultClass.UNKNOWN


def test_a_guess_that_a_node_is_lost_silences_no_witness(tmp_path: Path) -> None:
    guess = "event: Warning node/w-18: plugin failed, node is not ready, network lost\n"
    refused = "".join(
        f"w-{n}:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.7.18<33044> failed : No route to host\n"
        for n in (1, 2, 3)
    )
    wrapper = "ray.train.base_trainer.TrainingFailedError: The Ray Train run failed.\n"
    assert of_text(tmp_path, STEPS + refused + guess + wrapper).fault is FaultClass.NCCL_NETWORK


def test_sigkill_with_the_hosts_memory_used_up_is_a_lack_of_memory(tmp_path: Path) -> None:
    killed = "failed (exitcode: -9) local_rank: 0 (pid: 438) of binary: /opt/conda/bin/python\n"
    used = "CPU Virtual Memory:  used = {} GB, percent = {}%\n"
    full = of_text(tmp_path, used.format(355.0, 98.1) + killed)
    assert (full.fault, full.restart.answer) == (FaultClass.HOST_OOM, Restart.CHANGE)
    assert of_text(tmp_path, used.format(155.0, 48.1) + killed).fault is FaultClass.UNKNOWN


def test_ranks_that_wait_for_one_that_still_writes_wait_as_long_the_next_time(
    tmp_path: Path,
) -> None:
    waits = TIMED_OUT.format(rank=1) + TIMED_OUT.format(rank=9)
    writes = "[2025-05-19 06:19:58] rank0: wrote {} GB), 117 MB/s\n"
    late = of_text(tmp_path, STEPS + writes.format("59% (83.2") + waits)
    assert (late.fault, late.restart.answer) == (FaultClass.NCCL_TIMEOUT, Restart.CHANGE)
    done = of_text(tmp_path, STEPS + writes.format("100% (141") + waits)
    assert done.restart.answer is not Restart.CHANGE


def test_a_thread_that_only_reports_ends_no_training(tmp_path: Path) -> None:
    raised = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/threading.py", line 932, in _bootstrap_inner\n'
        "    self.run()\n"
        '  File "/opt/{}/internal/file_stream.py", line 299, in _send\n'
        "    raise response\n"
        "requests.exceptions.HTTPError: 409 Client Error: Conflict for url: https://api.example.org/stream\n"
    )
    after = "validation: 16/16 batches\n"
    assert of_text(tmp_path, STEPS + raised.format("wandb") + after).fault is FaultClass.UNKNOWN
    assert of_text(tmp_path, STEPS + raised.format("feed") + after).fault is FaultClass.USER_CODE


@pytest.mark.parametrize("last", ["", "[timer] samples/s=42.1\n"])
def test_a_log_that_goes_on_and_tells_of_no_fault_is_of_a_training_that_runs(
    tmp_path: Path, last: str
) -> None:
    steps = "".join(f"{line}\n{last}" for line in STEPS.splitlines())
    found = if_it_goes_on(of_text(tmp_path, steps))
    assert (found.fault, found.restart.answer) == (FaultClass.RUNNING, Restart.NONE)
    saves = if_it_goes_on(of_text(tmp_path, f"{steps}saving a checkpoint\n"))
    assert saves.fault is FaultClass.UNKNOWN


@pytest.mark.parametrize(
    ("above", "node"),
    [
        ("--- job 632651 on dgk713 ---\n", "dgk713"),
        ("JOB 1 on dgk701 : exit 0\nJOB 632651 on dgk713 : starting python fit.py\n", "dgk713"),
        ("$ kubectl get pods -o wide\ndiff-0  1/1  Running  wn-a01\ndiff-2  0/1  Error  wn-a05\n[pod/diff-2] ", "wn-a05"),
        ("[pod/diff-2] + python -m train (node wn-a05)\n[pod/diff-2/main] ", "wn-a05"),
    ],
)  # fmt: skip
def test_the_host_of_a_line_by_the_heading_above_it_or_by_its_pod(
    tmp_path: Path, above: str, node: str
) -> None:
    assert of_text(tmp_path, above + ECC).accused.nodes == (node,)


@pytest.mark.parametrize(
    "above",
    ["job 632651 on dgk713\nSLURM_JOB_NODELIST=dgk[711-718]\n", "job 632651 on dgk713\n[rank9]: "],
)
def test_the_host_of_a_script_is_not_accused_of_what_another_node_may_have_said(
    tmp_path: Path, above: str
) -> None:
    assert of_text(tmp_path, above + ECC).accused.nodes == ()


def test_a_machine_that_a_cloud_names_by_its_address(tmp_path: Path) -> None:
    refused = "".join(
        f"(W pid=1, ip=10.0.7.{n}) misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.7.18<33044> failed : No route to host\n"
        for n in (14, 15, 17)
    )
    event = "event: Warning NetworkNotReady node/ip-10-0-7-18.ec2.internal interface eth1 gone\n"
    assert of_text(tmp_path, STEPS + refused + event).accused.nodes == (
        "ip-10-0-7-18.ec2.internal",
    )


def test_a_login_host_whose_munge_is_gone_is_named(tmp_path: Path) -> None:
    refused = 'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file\n'
    found = of_text(tmp_path, "05:30:01 cron on login006: checking\n" + refused)
    assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_AUTH, ("login006",))
    assert found.restart.answer is Restart.ELSEWHERE
