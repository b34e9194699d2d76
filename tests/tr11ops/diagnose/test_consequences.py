"""What follows from something else is not the first cause: a job put back, a terminal closed, a file
server that had come back, an error of the program that waits for a rank.
"""

from __future__ import annotations

from pathlib import Path

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files, if_it_goes_on
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(
    f"2026-05-19 09:{step:02d}:00 step {step} | loss 2.4{step % 10} | lr 3e-4\n"
    for step in range(26)
)
REQUEUED = (
    "slurmstepd: error: *** JOB 77 ON a1 CANCELLED AT 2026-05-19T09:26:07 DUE TO JOB REQUEUE ***\n"
)


def of_files(folder: Path, texts: dict[str, str]) -> Diagnosis:
    """The diagnosis of several files of one incident, by their names."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    [found] = diagnose_files([folder / name for name in texts])
    return found


def test_a_job_is_put_back_for_a_lost_node_or_else_for_another_job(tmp_path: Path) -> None:
    assert of_text(tmp_path, STEPS + REQUEUED).fault is FaultClass.SLURM_PREEMPTED
    controller = (
        "[2026-05-19T09:26:07.551] error: Nodes a2 not responding, setting DOWN\n"
        "[2026-05-19T09:26:07.552] requeue job JobId=77 due to failure of node a2\n"
    )
    found = of_files(tmp_path, {"job.log": STEPS + REQUEUED, "slurmctld.log": controller})
    assert found.fault is FaultClass.SLURM_NODE_FAIL
    assert found.root_cause is not None and found.root_cause.node == "a2"


def test_a_terminal_closes_when_its_machine_is_taken_back(tmp_path: Path) -> None:
    closed = STEPS + "client_loop: send disconnect: Broken pipe\n"
    assert of_text(tmp_path, closed).fault is FaultClass.SLURM_USER_CANCEL
    found = of_files(
        tmp_path, {"worker.log": closed, "gcloud.log": "health: HEALTHY\nstate: PREEMPTED\n"}
    )
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_PREEMPTED, Restart.PLAIN)


def test_a_file_server_that_came_back_is_not_what_failed_later(tmp_path: Path) -> None:
    kernel = (
        "Apr  8 15:16:50 s2 kernel: nfs: server filer-b not responding, still trying\n"
        "Apr  8 15:17:40 s2 kernel: nfs: server filer-b OK\n"
        "Apr  8 15:17:41 s2 kernel: NFS: server filer-b error: fileid changed\n"
    )
    program = STEPS + "OSError: [Errno 116] Stale file handle: '/nfs/feats-14.lca'\n"
    found = of_files(tmp_path, {"train.log": program, "s2.messages": kernel})
    assert found.fault is FaultClass.STORAGE
    assert found.root_cause is not None
    assert "still trying" not in found.root_cause.text


def test_several_npus_name_the_rank_whose_word_did_not_come(tmp_path: Path) -> None:
    waits = "".join(
        f"(Worker pid={pid}, ip=10.4.3.{host}) EI0002: [PID: {pid}] The wait execution of the Notify register times out. "
        f"Reason: The Notify register has not received the Notify record from remote rank: [24].\n"
        for pid, host in ((11, 19), (12, 18), (13, 17))
    )
    died = "RuntimeError: ACL stream synchronize failed, error code:507048\n"
    found = of_text(tmp_path, STEPS + waits + died)
    assert (found.fault, found.signs.silent_rank) == (FaultClass.NCCL_TIMEOUT, 24)
    assert found.root_cause is not None and "EI0002" in found.root_cause.text


def test_a_tpu_session_names_its_worker(tmp_path: Path) -> None:
    told = (
        "E0511 18:18:50 915 session_master.cc:505] Session master detected TPU session error from worker "
        "lm-tpu-38.headless-svc:8471. The reporting TPU chip locations are:tpu31:pe4:3\n"
        "jax.errors.JaxRuntimeError: INTERNAL: Core halted unexpectedly: session terminated\n"
    )
    found = of_text(tmp_path, STEPS + told)
    assert (found.fault, found.restart.answer) == (FaultClass.GPU_HARDWARE, Restart.ELSEWHERE)
    assert found.root_cause is not None and found.root_cause.node == "lm-tpu-38"


def test_a_store_that_was_asked_for_half_an_hour_tells_no_more(tmp_path: Path) -> None:
    asked = "RuntimeError: store->get('0') got error: Timeout waiting for key: default_pg/0/0 after {} ms\n"
    answers = [of_text(tmp_path, asked.format(wait)).restart.answer for wait in (30_000, 1_800_000)]
    assert answers == [Restart.PLAIN, Restart.UNKNOWN]


def test_a_variable_with_the_exit_code_is_an_end(tmp_path: Path) -> None:
    assert of_text(tmp_path, f"{STEPS}EXIT_CODE=0\n").fault is FaultClass.CLEAN_EXIT
    assert of_text(tmp_path, f"{STEPS}MAX_STEPS=0\n").fault is FaultClass.UNKNOWN


def test_timm_runs_on(tmp_path: Path) -> None:
    steps = "".join(
        f"Train: 73 [{step:4d}/1251 ( 10%)]  Loss: 3.2{step % 10} (3.161)  Time: 0.331s, 6187.31/s\n"
        for step in range(0, 500, 50)
    )
    assert if_it_goes_on(of_text(tmp_path, steps)).fault is FaultClass.RUNNING


def test_an_option_of_dmesg_in_a_files_name_is_no_part_of_the_node(tmp_path: Path) -> None:
    broken = "[Tue Aug 19 11:27:38 2025] mlx5_core 0000:9a:00.0: Port module event[error]: module 0, Cable error, Bus stuck\n"
    for name in ("dmesg-T-w0112.log", "dmesg-w0112.log"):
        found = of_files(tmp_path, {name: broken})
        assert found.root_cause is not None and found.root_cause.node == "w0112"


def test_a_hang_that_nothing_explains_may_come_again_and_one_rank_that_lagged_may_not(
    tmp_path: Path,
) -> None:
    waits = "".join(
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600013 milliseconds\n"
        for rank in range(4)
    )
    assert of_text(tmp_path, STEPS + waits).restart.answer is Restart.UNKNOWN
    lagged = "Rank 3 never entered collective 71\n"
    assert of_text(tmp_path, STEPS + waits + lagged).restart.answer is Restart.PLAIN


def test_credentials_that_one_node_refuses_are_that_nodes(tmp_path: Path) -> None:
    refused = (
        "Job 9 started on q6, nodes q6 q7\n"
        "srun: error: Task launch for StepId=9.0 failed on node q7: Invalid authentication credential\n"
    )
    found = of_text(tmp_path, refused)
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_AUTH, Restart.ELSEWHERE)
    assert found.root_cause is not None and found.root_cause.node == "q7"


def test_what_a_library_of_connections_raised_is_its_clients(tmp_path: Path) -> None:
    chain = (
        "Traceback (most recent call last):\n"
        '  File "/env/lib/python3.10/site-packages/urllib3/connection.py", line 198, in _new_conn\n'
        "    sock = connection.create_connection(\n"
        "OSError: [Errno 101] Network is unreachable\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/work/train.py", line 74, in train\n'
        "    tokenizer = load()\n"
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
    )
    assert of_text(tmp_path, chain).fault is FaultClass.HUB_AUTH


def test_a_folder_that_slurm_went_without_is_no_cause(tmp_path: Path) -> None:
    gone = "slurmstepd: error: couldn't chdir to `/home/llo/run': No such file or directory"
    limit = "slurmstepd: error: *** JOB 9 ON gn31 CANCELLED AT 2025-12-06T04:00:12 DUE TO TIME LIMIT ***\n"
    found = of_text(tmp_path, f"{gone}: going to /tmp instead\n{STEPS}{limit}")
    assert found.fault is FaultClass.SLURM_TIME_LIMIT


def test_timm_says_its_best_metric_at_its_end(tmp_path: Path) -> None:
    assert (
        of_text(tmp_path, f"{STEPS}*** Best metric: 81.914 (epoch 297)\n").fault
        is FaultClass.CLEAN_EXIT
    )
