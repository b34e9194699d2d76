"""The pieces of the agent that need no scheduler: evidence, command lines, process trees, the log tee."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tr11ops.agent.allocation import Allocation, free_port, master_address, read_allocation
from tr11ops.agent.batch import read_resolved
from tr11ops.agent.node import NodeTask
from tr11ops.agent.step import Launch, LineTee, srun_command
from tr11ops.agent.verdict import conclude, first_failure
from trainer.config import CardError
from trainer.contract import EndMarker

ROOT = Path(__file__).parents[3]


def marker(reason: str) -> EndMarker:
    return EndMarker(reason, 12, 10, False, "words", 1.0, "node", "7")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("finished", 0), ("exit-duration", 0), ("kill-switch", 0), ("signal", 0), ("refused", 2), ("error", 1)],
)
def test_the_trainers_own_word_decides(reason, status):
    assert conclude(marker(reason), 1, None, ()).exit_status == status


def test_status_zero_without_a_word_is_a_failure():
    verdict = conclude(None, 0, None, ())
    assert (verdict.reason, verdict.exit_status, verdict.iteration) == ("error", 1, None)


def test_the_first_cause_is_quoted_before_the_launchers_words(tmp_path):
    folder = tmp_path / "failures"
    folder.mkdir()
    for rank, moment, error in ((3, 20.0, "RuntimeError: peer closed"), (5, 10.0, "MemoryError: no memory")):
        (folder / f"rank-{rank}.json").write_text(
            json.dumps({"rank": rank, "host": "x02", "time": moment, "error": error})
        )
    (folder / "rank-6.json").write_text('{"rank": 6')  # half a record
    assert first_failure(tmp_path) == "rank 5 on x02: MemoryError: no memory"
    assert conclude(None, 1, first_failure(tmp_path), ("srun: error: x02: task 1: Aborted",)).message.startswith(
        "rank 5"
    )
    assert (
        conclude(None, 134, None, ("srun: error: x02: task 1: Aborted",)).message == "srun: error: x02: task 1: Aborted"
    )


def test_allocation_of_an_array_task():
    environment = {
        "SLURM_JOB_ID": "105", "SLURM_ARRAY_JOB_ID": "103", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "x[1-2],y7",
    }  # fmt: skip
    assert read_allocation(environment, None) == Allocation("slurm", "105", "103", 2, ("x1", "x2", "y7"))
    assert read_allocation({**environment, "TR11_SCHEDULER": "local"}, None).kind == "local"
    alone = read_allocation({}, 3)
    assert (alone.kind, len(alone.nodes), len(set(alone.nodes))) == ("foreground", 3, 3)
    with pytest.raises(RuntimeError, match="inside a job"):
        read_allocation({}, None)
    assert master_address(alone) == "127.0.0.1"
    assert 1024 <= free_port() <= 65535


def test_srun_ends_the_whole_step_and_never_hides_a_dead_node():
    launch = Launch(1, Path("/run/state/attempts/7"), Path("/run/card.json"), "7", ("x1", "x2"), 8, "10.0.0.1", 6000)
    command = srun_command(launch)
    assert {"--wait=60", "--kill-on-bad-exit=1", "--ntasks-per-node=1"} <= set(command)
    assert "--no-kill" not in command
    assert command[command.index("--nodelist") + 1] == "x1,x2"


def test_torchrun_gets_a_static_rendezvous_and_no_restarts():
    task = NodeTask(Path("/a"), Path("/c.json"), "7", 1, 1, 2, 8, "10.0.0.1", 6000)
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=8", "--max-restarts=0", "--tee=3"} <= set(task.command)
    assert task.command[-3:] == ["-m", "trainer", "/c.json"]
    assert (task.environment["TR11_JOB_ID"], task.environment["TR11_LAUNCH"]) == ("7", "1")


@pytest.mark.parametrize("text", [None, "", "[]", '{"run": 1}', "\x00"])
def test_an_unreadable_card_is_one_clear_refusal(tmp_path, text):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CardError):
        read_resolved(path)


def test_descendants_that_daemonise_and_ignore_signals_are_ended():
    # The child makes a grandchild in a session of its own, which ignores TERM, then dies: the usual way to escape.
    script = textwrap.dedent("""
        import json, subprocess, sys, time
        from tr11ops.agent.processes import adopt_orphans, end_descendants
        adopt_orphans()
        stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
        parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True); print(p.pid, flush=True)"
        child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
        pid = int(child.stdout.readline()); assert child.stdout.readline() == "up\\n"
        child.wait()
        print(json.dumps([pid, end_descendants(0.5)]))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    pid, ended = json.loads(done.stdout)
    assert ended == [pid]
    assert not psutil.pid_exists(pid)


def test_tee_keeps_lines_whole_and_survives_a_full_disk(tmp_path, capfd):
    tee = LineTee(tmp_path / "logs" / "main_log.txt")
    seen = []
    tee.copy(io.BytesIO(b"one\n\xff two\nno end"), seen.append)
    assert (tmp_path / "logs" / "main_log.txt").read_bytes() == b"one\n\xff two\nno end\n"
    assert len(seen) == 3
    full = LineTee(Path("/dev/full"))
    full.line("first")
    full.line("second")
    shown = capfd.readouterr()
    assert "first\nsecond\n" in shown.out
    assert shown.err.count("cannot be written") == 1


def test_the_batch_controller_outside_a_job_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tr11ops.agent.batch", "--card", str(tmp_path / "none.json")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SLURM_JOB_ID": ""}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_signal_reaches_the_agent_as_a_request(tmp_path):
    # A stand-in for torchrun on PATH would prove nothing of torchrun: the whole chain is proved by the end-to-end tests.
    # Here only: the agent's own handler turns USR1 into the file that the trainer polls.
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tr11ops.agent import node
        node.NodeTask.command = property(lambda self: [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3)"])
        task = node.NodeTask(Path({str(tmp_path)!r}), Path("c"), "7", 1, 0, 1, 1, "127.0.0.1", 1)
        sys.exit(node.run(task))
    """)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout.readline() == "up\n"
    os.kill(child.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while not (tmp_path / "stop-request.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert "signal" in json.loads((tmp_path / "stop-request.json").read_text())["by"]
