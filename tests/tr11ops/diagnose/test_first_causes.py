"""What came first, told apart from what others saw of it; and on which host a line was printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files, if_it_goes_on
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
    assert found.restart.answer is Restart.CHANGE


PEER = (
    "n1:1:2 [0] NCCL WARN NET/IB: Got completion from peer n3<4711> with status=12 opcode=0 len=0\n"
    "n2:1:2 [0] NCCL WARN NET/IB: Got completion from peer n3<4711> with status=12 opcode=0 len=0\n"
)
FALLEN = "{time} n3 kernel: NVRM: Xid (PCI:0000:4c:00): 79, pid=1, GPU has fallen off the bus.\n"


def of_files(folder: Path, **texts: str) -> Diagnosis:
    """The diagnosis of several logs, by their names without `.log`."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.log")
        paths[-1].write_text(text, encoding="utf-8")
    [found] = map(if_it_goes_on, diagnose_files(paths))
    return found


@pytest.mark.parametrize(
    ("time", "fault"),
    [
        ("Mar  4 10:06:59", FaultClass.GPU_HARDWARE),
        ("Mar  4 10:09:59", FaultClass.NCCL_NETWORK),
    ],
)
def test_a_line_without_a_time_is_of_the_time_above_it_so_that_a_lost_gpu_comes_before_its_witnesses(
    tmp_path: Path, time: str, fault: FaultClass
) -> None:
    found = of_files(tmp_path, main=STEPS + PEER, dmesg_n3=FALLEN.format(time=time))
    assert found.fault is fault


SLOW_STEPS = "".join(
    f" [2025-08-13 12:{minute:02}:00] iteration {300 + minute:8}/   40000 | elapsed time per iteration (ms): 4800.1 | "
    f"throughput per GPU (TFLOP/s/GPU): {400 if minute < 30 else 160}.{minute} | lm loss: 3.8E+00 |\n"
    for minute in range(50)
)
HOT = "2025-08-13T12:{minute}:00 ck-06 gpu5 WARN clocks_event_reasons.hw_thermal_slowdown=Active\n"


def test_a_slow_gpu_is_told_of_a_training_that_was_slow_to_its_end_though_that_was_in_order(
    tmp_path: Path,
) -> None:
    end, hot = "exiting program at iteration     350\n", HOT.format(minute=31)
    slow = of_files(tmp_path, main=SLOW_STEPS + end, health=hot)
    assert (slow.fault, slow.accused.nodes) == (FaultClass.GPU_HARDWARE, ("ck-06",))
    even = SLOW_STEPS.replace("160.", "400.") + end
    assert of_files(tmp_path, main=even, health=hot).fault is FaultClass.CLEAN_EXIT
    assert of_files(tmp_path, main=SLOW_STEPS + end).fault is FaultClass.CLEAN_EXIT


SKIPPED = "".join(
    f"  4%|x| {step}/387 [00:19<1:58:11, 19.13s/it]\n{{'loss': 0.0, 'learning_rate': 5e-05, 'epoch': 0.01}}\n"
    for step in range(1, 6)
)
GIVEN_UP = (
    "Traceback (most recent call last):\n"
    '  File "/x/deepspeed/runtime/fp16/loss_scaler.py", line 175, in update_scale\n'
    "    raise Exception(\n"
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"
)


def test_steps_that_an_overflow_skipped_say_less_than_the_end_of_the_loss_scale(
    tmp_path: Path,
) -> None:
    found = of_text(tmp_path, SKIPPED + GIVEN_UP)
    assert found.root_cause is not None and found.root_cause.text.startswith("Exception")
    alone = of_text(tmp_path, SKIPPED)
    assert alone.root_cause is not None and "'loss': 0.0" in alone.root_cause.text


def test_who_interrupts_a_training_whose_numbers_are_broken_is_not_its_fault(
    tmp_path: Path,
) -> None:
    stopped = "Traceback (most recent call last):\nKeyboardInterrupt\n"
    broken = "".join(f"step {step} loss nan\n" for step in range(10, 20))
    assert of_text(tmp_path, STEPS + broken + stopped).fault is FaultClass.NUMERICS
    assert of_text(tmp_path, STEPS + stopped).fault is FaultClass.SLURM_USER_CANCEL


def test_a_line_with_a_norm_and_no_loss_has_not_a_loss_of_zero(tmp_path: Path) -> None:
    steps = "".join(
        f"2025-01-30 20:0{step % 10}:10 gpu INFO [olmo_core.train] [step={step}/900,epoch=1]\n"
        f"    optim/total grad norm=0.3{step % 7}\n    train/CE loss=2.9{step % 5}\n"
        for step in range(1, 60)
    )
    died = "E0130 20:10:05 120 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -11) local_rank: 4\n"
    assert of_text(tmp_path, steps + died).fault is FaultClass.UNKNOWN


def test_an_exception_that_ended_it_says_more_than_a_line_after_which_it_went_on(
    tmp_path: Path,
) -> None:
    line = "Unable to plot the network: No module named 'hiddenlayer'\n"
    quiet = "".join(f"epoch 0 batch {number}\n" for number in range(9))
    raised = (
        "Traceback (most recent call last):\n"
        '  File "/x/npyio.py", line 453, in load\n    return format.open_memmap(file)\n'
        "ValueError: mmap length is greater than file size\n"
    )
    assert of_text(tmp_path, line + quiet + raised).fault is FaultClass.DATALOADER
    assert of_text(tmp_path, line + quiet).fault is FaultClass.USER_CODE


LIMIT = (
    "slurmstepd: error: *** JOB 650 ON n4 CANCELLED AT 2024-05-02T10:00:12 DUE TO TIME LIMIT ***\n"
)


def test_of_a_chain_of_jobs_the_later_one_tells_and_its_log_says_on_which_host(
    tmp_path: Path,
) -> None:
    steps = "".join(f"step {step} loss 2.{9 - step}\n" for step in range(8))
    chain = {
        "slurm-650": f"SLURMD_NODENAME=n4\n{steps}{LIMIT}",
        "slurm-651": f"SLURMD_NODENAME=n7\n{steps}Traceback (most recent call last):\n"
        f'  File "/x/train.py", line 88, in <module>\n    fit()\n{ECC}',
    }
    found = of_files(tmp_path, **chain)
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("n7",))
    other = of_files(tmp_path, eval=chain["slurm-650"], train=chain["slurm-651"])
    assert (
        other.fault is FaultClass.SLURM_TIME_LIMIT
    )  # nothing tells which of them is the later one


def test_a_full_bar_beside_steps_without_a_total_says_that_the_last_one_was_made(
    tmp_path: Path,
) -> None:
    steps = "".join(
        f"(TaskRunner pid=1) step:{step} - actor/pg_loss:-0.01 - critic/rewards/mean:0.3\n"
        for step in range(1, 8)
    )
    bar = "Training Progress: 100%|xxxx| {done}/{done} [07:22<00:00, 63.15s/it]\n"
    died = "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
    assert of_text(tmp_path, steps + bar.format(done=7) + died).fault is FaultClass.CLEAN_EXIT
    assert of_text(tmp_path, steps + bar.format(done=9) + died).fault is FaultClass.UNKNOWN


def test_the_summary_that_names_the_one_that_is_missing_says_more_than_who_waited(
    tmp_path: Path,
) -> None:
    waited = "".join(TIMED_OUT.format(rank=rank) for rank in (0, 1, 2, 5))
    summary = "rank 3 (host c3-n05, local 3) has not joined seq 7312: last enqueued 7311\n"
    found = of_files(tmp_path, main=STEPS + waited, fr_trace=summary)
    assert found.fault is FaultClass.NCCL_TIMEOUT and found.accused.nodes == ("c3-n05",)
    assert found.root_cause is not None and found.root_cause.text == summary.strip()


def test_a_list_of_attempts_that_are_over_is_no_new_one(tmp_path: Path) -> None:
    listed = "--- previous attempts ---\nattempt 1: rank 4 on n2, lost, iteration 681\nattempt 2: rank 11 on n3, iteration 655\n"
    assert of_text(tmp_path, STEPS + RAISED + listed).fault is FaultClass.USER_CODE


def test_what_a_training_that_runs_on_has_printed_before_is_no_cause(tmp_path: Path) -> None:
    steps = [f"2026-03-04 10:{minute:02}:00 step {minute} loss 2.1\n" for minute in range(14)]
    block = "".join(steps[:4]) + RAISED + "".join(steps[4:8]) + RAISED + "".join(steps[8:12])
    goes_on = if_it_goes_on(of_text(tmp_path, block + RAISED + "".join(steps[12:])))
    assert (goes_on.fault, goes_on.restart.answer) == (FaultClass.RUNNING, Restart.NONE)
    assert of_text(tmp_path, block + RAISED).fault is FaultClass.USER_CODE
    once = "".join(steps[:12]) + RAISED + "".join(steps[12:])
    assert of_text(tmp_path, once).fault is FaultClass.USER_CODE


def test_a_node_that_was_lost_before_the_training_came_back_is_not_why_it_runs(
    tmp_path: Path,
) -> None:
    events = "7m   Warning  NodeNotReady  node/ik-31  Node is not ready\n"
    lost = (
        "jax.errors.JaxRuntimeError: UNAVAILABLE: The following tasks are unhealthy (stopped"
        " sending heartbeats):\n/job:jax_worker/replica:0/task:12\n"
    )
    came_back = if_it_goes_on(of_files(tmp_path, main=STEPS + lost + STEPS, events=events))
    assert (came_back.fault, came_back.accused.nodes) == (FaultClass.RUNNING, ())
    for main in (STEPS + lost, STEPS + lost + STEPS + lost):
        found = of_files(tmp_path, main=main, events=events)
        assert (found.fault, found.accused.nodes) == (FaultClass.SLURM_NODE_FAIL, ("ik-31",))


def test_a_line_said_hours_after_the_last_step_leaves_open_whether_it_runs(tmp_path: Path) -> None:
    minutes_later = of_files(tmp_path, main=STEPS, sample="# sampled 2026-03-04T10:12:00Z\n")
    assert minutes_later.fault is FaultClass.RUNNING
    hours_later = of_files(tmp_path, main=STEPS, sample="# sampled 2026-03-04T13:17:00Z\n")
    assert hours_later.fault is FaultClass.UNKNOWN
    assert hours_later.restart.answer is Restart.UNKNOWN


def test_the_time_limit_of_a_job_that_was_stuck_at_its_start_is_not_its_cause(
    tmp_path: Path,
) -> None:
    refused = "algo-1:123:190 [3] NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error\n"
    heartbeat = "2023-01-06 18:{minute}:00,000 toolkit INFO heartbeat: training script running\n"
    limit = "2023-01-06 18:40:00,000 ERROR    StoppingCondition: MaxRuntimeExceeded; the job is stopped\n"
    stuck = refused + heartbeat.format(minute=38)
    assert of_files(tmp_path, one=stuck, two=limit).fault is FaultClass.NCCL_NETWORK
    assert of_files(tmp_path, one=refused, two=limit).fault is FaultClass.SLURM_TIME_LIMIT
    assert of_files(tmp_path, one=STEPS + stuck, two=limit).fault is FaultClass.SLURM_TIME_LIMIT


def test_a_training_that_was_complete_and_hung_in_what_came_after_it(tmp_path: Path) -> None:
    complete = STEPS + "2026-03-04 10:08:00 INFO: Training complete\n"
    failed = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    hung = of_text(tmp_path, complete + TIMED_OUT.format(rank=3) + failed)
    assert hung.fault is FaultClass.NCCL_TIMEOUT
    assert of_text(tmp_path, complete + TIMED_OUT.format(rank=3)).fault is FaultClass.CLEAN_EXIT


def test_the_node_whose_firewall_refused_what_a_rank_could_not_reach(tmp_path: Path) -> None:
    connect = (
        "n5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849>"
        " returned 113(No route to host) errno 115(Operation now in progress)\n"
    )
    refused = "n4$ sudo journalctl -k -n 1\nFeb 24 14:00:00 n4 kernel: FINAL_REJECT: IN=eth1 OUT= SRC=10.0.0.5 DST=10.0.0.4 PROTO=TCP DPT={port}\n"
    found = of_files(tmp_path, main=connect, firewall=refused.format(port=56849))
    assert found.fault is FaultClass.NCCL_NETWORK and found.accused.nodes == ("n4",)
    another = of_files(tmp_path, main=connect, firewall=refused.format(port=22))
    assert another.accused.nodes == ()


def test_the_clean_end_of_one_job_does_not_mend_the_gpu_that_another_lost(tmp_path: Path) -> None:
    lost = "RuntimeError: CUDA error: uncorrectable ECC error encountered\nsrun: error: n7: task 0: Exited with exit code 1\n"
    ended = "`Trainer.fit` stopped: `max_epochs=24` reached.\n"
    found = of_files(
        tmp_path, first="SLURM_NODELIST = n7\n" + lost, second="SLURM_NODELIST = n8\n" + ended
    )
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("n7",))


def test_ray_says_above_a_traceback_on_which_machine_a_gpu_failed(tmp_path: Path) -> None:
    task = "ray.exceptions.RayTaskError(RuntimeError): ray::WorkerDict.update_actor() (pid=31041, ip=10.21.8.104, actor_id=6f, repr=<W>)\n"
    raised = '  File "a.py", line 3, in update_actor\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n'
    found = of_text(tmp_path, f"{STEPS}Traceback (most recent call last):\n{task}{raised}")
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("10.21.8.104",))


def test_a_slow_reply_of_a_file_server_long_before_hides_no_lost_gpu(tmp_path: Path) -> None:
    slow = "[Thu Jun 11 09:29:20 2026] Lustre: 3120:0:(client.c:2295:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply\n"
    broken = "[Thu Jun 11 09:51:06 2026] amdgpu 0000:d5:00.0: amdgpu: socket: 4, die: 1, 1 new uncorrectable hardware errors detected in umc block\n"
    found = of_files(
        tmp_path,
        train=STEPS + "HW Exception by GPU node-6 (Agent handle: 0x55) reason :GPU Hang\n",
        **{"n7.dmesg": slow + broken},
    )
    assert found.fault is FaultClass.GPU_HARDWARE
    assert found.restart.answer is Restart.ELSEWHERE
