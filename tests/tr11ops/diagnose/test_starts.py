"""Ends that another line explains: a start that came to nothing, memory that others hold, a
launcher told to go.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import HEAD, SHORT_STEPS, of_text
from tr11ops.diagnose.gpu_memory import is_absurd, is_held_by_others
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

LIMIT = (
    "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2024-04-03T22:14:51 DUE TO TIME LIMIT ***\n"
)
MEMBER = "Initializing distributed: GLOBAL_RANK: %d, MEMBER: %d/%d\n"
TOKENS = (
    "Running tokenizer on dataset:  87%|####| 379000/433643 [29:40<03:28, 2630.11 examples/s]\n"
)
TIMED_OUT = (
    "torch.distributed.DistBackendError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
    "c10d key-value store by key '0', but store->get('0') got error: Socket Timeout\n"
)


def members(started: int, expected: int) -> str:
    return "".join(MEMBER % (rank, rank + 1, expected) for rank in range(started))


@pytest.mark.parametrize(("started", "expected"), [(2, 4), (1, 2), (8, 16), (12, 16)])
def test_fewer_processes_than_expected_wait_for_ever(
    tmp_path: Path, started: int, expected: int
) -> None:
    found = of_text(tmp_path, members(started, expected) + LIMIT)
    assert (found.fault, found.step) == (FaultClass.RENDEZVOUS, NextStep.FIX_CONFIG)
    assert found.root_cause is not None and "MEMBER" in found.root_cause.text


@pytest.mark.parametrize(
    "head",
    [
        "SLURM_NTASKS=16 SLURM_NNODES=4\nWORLD_SIZE=32 MASTER_ADDR=n1\n",
        "WARNING: WORLD_SIZE (32) does not match SLURM_NTASKS (16)\n",
        "+ srun --nodes=4 --ntasks=16 python train.py\ninit_process_group(world_size=32)\n",
    ],
)
def test_a_launch_that_waits_for_more_ranks_than_tasks_is_changed_first(
    tmp_path: Path, head: str
) -> None:
    for end in (LIMIT, HEAD + CLIENTS.format(16, 32)):
        found = of_text(tmp_path, head + end)
        assert (found.fault, found.step) == (FaultClass.RENDEZVOUS, NextStep.FIX_CONFIG)
        assert found.restart.answer is Restart.CHANGE


@pytest.mark.parametrize(
    "head",
    [
        "SLURM_NTASKS=32\nWORLD_SIZE=32\n",
        "SLURM_NTASKS=4\n+ srun torchrun --nproc-per-node 8 train.py\nWORLD_SIZE=32\n",
        "WORLD_SIZE=32\n",
    ],
)
def test_as_many_tasks_as_ranks_or_launchers_that_start_more_are_no_mistake(
    tmp_path: Path, head: str
) -> None:
    assert of_text(tmp_path, head + LIMIT).fault is FaultClass.SLURM_TIME_LIMIT


def test_all_processes_came_or_trained_and_the_time_was_up(tmp_path: Path) -> None:
    for text in (members(4, 4), members(32, 32), members(2, 4) + SHORT_STEPS):
        assert of_text(tmp_path, text + LIMIT).fault is FaultClass.SLURM_TIME_LIMIT


def test_ranks_that_wait_for_one_that_prepares_the_data_need_another_setting(
    tmp_path: Path,
) -> None:
    turn = (
        HEAD
        + '  File "/x/training_args.py", line 2035, in main_process_first\n    dist.barrier()\n'
    )
    for text in (TOKENS + HEAD + TIMED_OUT, turn + TIMED_OUT):
        found = of_text(tmp_path, text)
        assert (found.fault, found.step) == (FaultClass.NCCL_TIMEOUT, NextStep.FIX_CONFIG)
    done = TOKENS.replace(" 87%", "100%")
    for text in (
        HEAD + TIMED_OUT,
        TOKENS + done + HEAD + TIMED_OUT,
        TOKENS + SHORT_STEPS + HEAD + TIMED_OUT,
    ):
        assert of_text(tmp_path, text).step is NextStep.RESUBMIT


HELD = [
    ("GPU 1 has a total capacity of 79.11 GiB of which 1.02 GiB is free. Process 22058 has 77.03 GiB memory in use. "
     "Including non-PyTorch memory, this process has 1.05 GiB memory in use.", True),
    ("Process 81713 has 19.33 GiB memory in use. Process 90112 has 900.00 MiB memory in use. Of the allocated memory "
     "600.10 MiB is allocated by PyTorch, and 1.10 MiB is reserved by PyTorch but unallocated.", True),
    ("Process 411 has 77.58 GiB memory in use. Of the allocated memory 74.02 GiB is allocated by PyTorch.", False),
    ("Including non-PyTorch memory, this process has 77.58 GiB memory in use. Of the allocated memory 74.02 GiB.", False),
    ("Process 12 has 520.00 MiB memory in use. Process 13 has 520.00 MiB memory in use. Including non-PyTorch memory, "
     "this process has 76.10 GiB memory in use.", False),
]  # fmt: skip


@pytest.mark.parametrize(("said", "is_held"), HELD)
def test_who_holds_the_memory_is_told_by_its_numbers(said: str, is_held: bool) -> None:
    assert is_held_by_others(f"CUDA out of memory. Tried to allocate 2.32 GiB. {said}") is is_held


def test_a_size_that_no_tensor_has() -> None:
    for size in ("14629365.00 GiB", "16.00 PiB", "more than 1EB memory."):
        assert is_absurd(
            f"CUDA out of memory. Tried to allocate {size} (GPU 0; 79.15 GiB total capacity)"
        )
    for size in ("290.00 MiB", "1024.00 GiB", "2.50 TiB"):
        assert not is_absurd(
            f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.10 GiB"
        )


def test_an_absurd_size_after_a_watchdog_is_no_lack_of_memory(tmp_path: Path) -> None:
    watchdog = (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, "
        "Timeout(ms)=600000) ran for 600123 milliseconds before timing out.\n"
    )
    absurd = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14629365.00 GiB. GPU 3 has a total capacity "
    absurd += "of 79.10 GiB of which 60.00 GiB is free.\n"
    found = of_text(tmp_path, SHORT_STEPS + watchdog + HEAD + absurd)
    assert found.fault is FaultClass.NCCL_TIMEOUT
    assert of_text(tmp_path, SHORT_STEPS + HEAD + absurd).fault is FaultClass.USER_CODE


def test_a_closed_rendezvous_follows_from_the_order_to_go(tmp_path: Path) -> None:
    told = "[node-1] W0409 07:28:49.5 1359 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal\n"
    closed = "[node-0] " + HEAD.replace("\n", "\n[node-0] ")
    closed += "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
    found = of_text(tmp_path, SHORT_STEPS + told + closed)
    assert found.root_cause is not None and "death signal" in found.root_cause.text
    assert of_text(tmp_path, closed).fault is FaultClass.RENDEZVOUS


def test_a_container_that_does_not_start_on_one_node_of_many_is_that_nodes(tmp_path: Path) -> None:
    failed = "%d: slurmstepd: error: pyxis: container start failed with error code: 1\n"
    exits = "srun: error: n%d: task %d: Exited with exit code 1\n"
    one = of_text(tmp_path, failed % 22 + exits % (6, 22))
    assert (one.fault, one.step) == (FaultClass.SLURM_NODE_FAIL, NextStep.PAGE)
    many = of_text(
        tmp_path,
        "".join(failed % task for task in range(4)) + "".join(exits % (n, n) for n in range(4)),
    )
    assert many.step is NextStep.FIX_CONFIG


LOST = "NVRM: Xid (PCI:0000:48:00): 79, pid=22884, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "said",
    ["CUDA error: invalid device ordinal", "CUDA error: an illegal memory access was encountered",
     "CUDA error: unspecified launch failure"],
)  # fmt: skip
def test_what_a_lost_gpu_does_to_a_program_is_the_gpus(tmp_path: Path, said: str) -> None:
    found = of_text(
        tmp_path, f"{SHORT_STEPS}{HEAD}RuntimeError: {said}\nNov 23 05:25:41 n7 kernel: {LOST}\n"
    )
    assert found.fault is FaultClass.GPU_HARDWARE
    assert found.root_cause is not None and (
        found.root_cause.node,
        "Xid" in found.root_cause.text,
    ) == ("n7", True)
    alone = of_text(tmp_path, f"{SHORT_STEPS}{HEAD}RuntimeError: {said}\n")
    assert alone.step is not NextStep.EXCLUDE_AND_RESUBMIT or "launch failure" in said


def test_refused_credentials_explain_what_slurm_does_not_start(tmp_path: Path) -> None:
    start = "srun: error: Task launch for StepId=4711.0 failed on node n7: Communication connection failure\n"
    munge = "slurmd: error: Munge decode failed: Expired credential\n"
    for text in (start + munge, munge + start):
        assert of_text(tmp_path, text).fault is FaultClass.SLURM_AUTH
    assert of_text(tmp_path, start).fault is FaultClass.SLURM_NODE_FAIL


STEP_AT = "[2024-04-03 %02d:%02d:00] step %d/1000 | loss=2.31\n"


@pytest.mark.parametrize(
    ("hour", "minute", "is_odd"), [(3, 10, True), (21, 40, True), (22, 13, False), (20, 14, False)]
)
def test_a_long_silence_before_the_time_limit_is_said(
    tmp_path: Path, hour: int, minute: int, is_odd: bool
) -> None:
    steps = "".join(STEP_AT % (hour, minute - 4 + number, number) for number in range(5))
    found = of_text(tmp_path, steps + LIMIT)
    assert found.fault is FaultClass.SLURM_TIME_LIMIT
    assert (("no step came" in found.explanation), found.confidence < 0.9) == (is_odd, is_odd)


DATA = "2023-10-24,11:%02d:10 | INFO | Train Epoch: 0 [ %d/400000 (0%%)] Data (t): %.3f Batch (t): %.3f, 1.1/s, Loss: 8.9\n"
CANCELLED = "slurmstepd: error: *** JOB 551220 ON n4 CANCELLED AT 2023-10-24T11:50:02 ***\n"


def test_data_that_come_late_are_why_someone_ended_it(tmp_path: Path) -> None:
    well = [DATA % (number, number * 1000, 0.02, 0.61) for number in range(4)]
    late = [DATA % (number, number * 1000, 5.1, 5.7) for number in range(4, 8)]
    for end in (CANCELLED, ""):
        found = of_text(tmp_path, "".join(well + late) + end)
        assert (found.fault, found.step) == (FaultClass.DATALOADER, NextStep.PAGE)
        assert found.root_cause is not None and found.root_cause.line_number == 5
    assert (
        of_text(tmp_path, "".join(well + late[:2] + well) + CANCELLED).fault
        is FaultClass.SLURM_USER_CANCEL
    )


PEER = "ip-10-0-1-7:1:2 [3] NCCL WARN NET/IB : Got completion from peer 10.0.3.4<47011> with error 12, opcode 0\n"
NO_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has 79.11 GiB\n"
)


def test_who_lost_a_peer_says_less_than_the_peer(tmp_path: Path) -> None:
    assert of_text(tmp_path, SHORT_STEPS + PEER + HEAD + NO_MEMORY).fault is FaultClass.CUDA_OOM
    assert (
        of_text(tmp_path, SHORT_STEPS + PEER + HEAD + "KeyError: 'x'\n").fault
        is FaultClass.NCCL_NETWORK
    )


def test_the_name_of_a_file_names_a_node_that_the_launch_knows(tmp_path: Path) -> None:
    main, kernel = tmp_path / "main_log.txt", tmp_path / "n7-of-today.dmesg.txt"
    main.write_text(SHORT_STEPS + "srun: error: n7: task 3: Exited with exit code 1\n")
    kernel.write_text(f"[Tue May 12 17:05:40 2026] {LOST}\n")
    [found] = diagnose_files([main, kernel])
    assert found.root_cause is not None and found.root_cause.node == "n7"
    main.write_text(SHORT_STEPS)
    [found] = diagnose_files([main, kernel])
    assert found.root_cause is not None and found.root_cause.node is None


def test_where_no_task_could_be_started_no_node_is_accused(tmp_path: Path) -> None:
    launch = "srun: error: Task launch for StepId=96.0 failed on node n%d: No such process\n"
    assert of_text(tmp_path, launch % 2 + launch % 3).step is NextStep.PAGE
    assert of_text(tmp_path, launch % 2).step is NextStep.EXCLUDE_AND_RESUBMIT


def test_who_holds_a_gpu_holds_it_on_one_node(tmp_path: Path) -> None:
    held = "RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.\n"
    left = "E1016 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 5)\n"
    found = of_text(tmp_path, HEAD + held + left)
    assert (found.step, found.restart.answer) == (NextStep.PAGE, Restart.ELSEWHERE)


def test_a_vague_line_that_a_step_followed_is_not_why_a_collective_hung(tmp_path: Path) -> None:
    vague = "licence cache: error: storage node 3 is unreachable\n"
    watchdog = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)\n"
    found = of_text(tmp_path, vague + SHORT_STEPS + watchdog)
    assert found.root_cause is not None and "Watchdog" in found.root_cause.text
    found = of_text(tmp_path, SHORT_STEPS + vague + watchdog)
    assert found.root_cause is not None and "licence" in found.root_cause.text


def test_a_gpu_that_has_to_be_reset_is_more_than_the_programs_fault_before_it(
    tmp_path: Path,
) -> None:
    xid = "Nov 23 05:25:41 n7 kernel: NVRM: Xid (PCI:0000:48:00): %s\n"
    fault = (
        xid % "31, pid=4121, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
    )
    reset = xid % "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    found = of_text(tmp_path, SHORT_STEPS + fault + reset)
    assert (found.fault, found.root_cause and found.root_cause.node) == (
        FaultClass.GPU_HARDWARE,
        "n7",
    )
    assert of_text(tmp_path, SHORT_STEPS + fault).fault is FaultClass.USER_CODE


REFUSED = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
EXPIRED = (
    "sbatch: error: Munge decode failed: Expired credential\n"
    "sbatch: error: Batch job submission failed: Protocol authentication error\n"
)


@pytest.mark.parametrize(
    ("refused", "fault"), [(REFUSED, FaultClass.SLURM_SUBMIT), (EXPIRED, FaultClass.SLURM_AUTH)]
)
@pytest.mark.parametrize(
    "before",
    [
        "9917        finetune        gpu      proj    TIMEOUT 2-00:00:00\n9918        finetune        gpu      proj  CANCELLED 0:10\n",
        "4711|train|PREEMPTED|01:00:02\n4712|train|NODE_FAIL|00:20:00\n",
        "submit.sh: part 3: job 91 ended PREEMPTED 03:11:09, queued again\n",
        "loop: job 12 State: NODE_FAIL, next one\n",
        "squeue: slurm_load_jobs error: Socket timed out on send/recv operation (polling again)\n",
    ],
)
def test_how_earlier_jobs_ended_is_not_why_the_next_one_was_refused(
    tmp_path: Path, before: str, refused: str, fault: FaultClass
) -> None:
    found = of_text(tmp_path, before + refused)
    assert (found.fault, found.restart.answer) == (fault, Restart.CHANGE)


def test_a_job_that_ran_ended_by_its_own_limit_whatever_was_refused_after_it(
    tmp_path: Path,
) -> None:
    assert of_text(tmp_path, SHORT_STEPS + LIMIT + REFUSED).fault is FaultClass.SLURM_TIME_LIMIT


@pytest.mark.parametrize(
    "order",
    [
        'audit: {"verb":"delete","user":"bob","objectRef":{"resource":"jobs","name":"ft"}}\n',
        'job.batch "ft" deleted\n',
        "Job 'raysubmit_9' was stopped\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "lost",
    [
        "[rank9]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes\n",
        "[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n",
        "n1:4:5 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n3<41109>\n",
    ],
)
def test_peers_that_are_lost_after_the_order_to_go_are_no_cause(
    tmp_path: Path, order: str, lost: str
) -> None:
    told = "W1003 15:22:40.1 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down\n"
    found = of_text(tmp_path, SHORT_STEPS + told + lost + order)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_USER_CANCEL, Restart.NONE)


CLIENTS = "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. {}/{} clients joined.\n"


@pytest.mark.parametrize(
    "said",
    [
        "n1: [INFO] [launch.py:163:main] dist_world_size={}\n",
        "launch: mpirun --hostfile h -np {} python t.py\n",
    ],
)
@pytest.mark.parametrize(("started", "answer"), [(31, Restart.CHANGE), (32, Restart.UNKNOWN)])
def test_a_launcher_that_starts_fewer_than_are_waited_for_does_so_again(
    tmp_path: Path, said: str, started: int, answer: Restart
) -> None:
    found = of_text(tmp_path, said.format(started) + HEAD + CLIENTS.format(31, 32))
    assert (found.fault, found.restart.answer) == (FaultClass.RENDEZVOUS, answer)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_a_path_that_none_of_many_nodes_finds_is_one_that_is_not_there(
    tmp_path: Path, nodes: int
) -> None:
    line = "hgx-0{0}:41922:42810 [2] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out\n"
    found = of_text(tmp_path, SHORT_STEPS + "".join(line.format(node) for node in range(nodes)))
    assert found.restart.answer is (Restart.CHANGE if nodes > 2 else Restart.PLAIN)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("huggingface_hub.errors.HfHubHTTPError: (Request ID: Root=1-69aa;0f)\n\n", "403 Forbidden: You don't have the rights to create a dataset.\n"),
        ("huggingface_hub.errors.HfHubHTTPError: \n", "Make sure your token has the correct permissions.\n"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage, NCCL version 2.19.3\nLast error:\n", "Duplicate GPU detected : rank 7 and rank 1 both on CUDA device 8000\n"),
    ],
)  # fmt: skip
def test_the_reason_of_an_exception_may_stand_in_the_next_lines(
    tmp_path: Path, first: str, reason: str
) -> None:
    for before in (SHORT_STEPS, "{'train_runtime': 15022.1, 'epoch': 3.0}\n"):
        found = of_text(tmp_path, before + HEAD + first + reason)
        assert found.root_cause is not None and found.root_cause.text == reason.strip()
        assert found.restart.answer is Restart.CHANGE


def test_a_divergence_began_where_the_loss_and_the_norm_left_what_was_usual(tmp_path: Path) -> None:
    line = '{{"step": {}, "loss": {}, "grad_norm": {}}}\n'
    steps = "".join(line.format(step, 1.84 + step % 3 / 100, 0.22) for step in range(30))
    rise = "".join(line.format(30 + step, 2.2 + step / 4, 4.0 + 9 * step) for step in range(8))
    for end in ("", "".join(line.format(40 + step, '"NaN"', '"NaN"') for step in range(4))):
        found = of_text(tmp_path, steps + rise + end)
        assert found.fault is FaultClass.NUMERICS
        assert found.root_cause is not None and found.root_cause.line_number == 31
