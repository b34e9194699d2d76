"""On the node: real processes are found by heartbeat and environment, and read while they hang,
stopped or dead.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tr11ops.diagnose.stacks.processes import SLEEPS, require_stacks, started
from tests.waiting import until
from tr11ops.diagnose.stacks import node
from tr11ops.diagnose.stacks.groups import grouped
from tr11ops.diagnose.stacks.node import FoundWorker, answers_here, read_worker, workers_here
from tr11ops.diagnose.stacks.verdict import judge
from tr11ops.diagnose.stacks.waits import WaitKind, wait_of
from tr11ops.diagnose.stacks.worker import GONE, AnswerReader, WorkerStack
from trainer.contract.attempt import Heartbeat, write_heartbeat

JOB = "1234567"
ROOT = str(Path(__file__).parents[4])
LOADER = """
from torch.utils.data import DataLoader, Dataset
import time

class Never(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(3000)

batches = iter(DataLoader(Never(), num_workers=1))
print(flush=True)
next(batches)
"""
READER = """
import os, sys
from pathlib import Path
from trainer.contract.state_file import read_bytes
path = Path(os.environ["PIPE"])
held = os.open(path, os.O_RDWR)  # so that opening it does not wait
os.set_blocking(held, True)
print(flush=True)
stream = path.open("rb", buffering=0)
def read_index(): return stream.read(4096)
read_index()
"""


def environment(name: str, rank: str, job: str = JOB) -> dict[str, str]:
    return {"TR11_JOB_ID": job, "SLURMD_NODENAME": name, "RANK": rank, "PYTHONPATH": ROOT}


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks 8 and 9 on node a, rank 16 on node b, two whose environment names no rank, rank 8 of
    another job.
    """
    places = (("a", "9"), ("a", "8"), ("b", "16"), ("a", ""), ("a", ""))
    programs = [(SLEEPS, environment(*place)) for place in places]
    with started(*programs, (SLEEPS, environment("a", "8", "7"))) as found:
        yield found


def beat(
    folder: Path, rank: int, pid: int, host: str = "a", phase: str = "training", job: str = JOB
) -> None:
    write_heartbeat(folder / f"{rank}.json", Heartbeat(rank, host, pid, phase, 5, time.time(), job))


def test_workers_of_the_node_are_found(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    beat(tmp_path, 7, workers[4].pid)
    (tmp_path / "8.json").write_text("{")
    found = workers_here(tmp_path, JOB, "a")
    assert [(one.rank, one.pid) for one in found] == [
        (7, workers[4].pid), (8, workers[1].pid), (9, workers[0].pid),
    ]  # fmt: skip
    assert [one.rank for one in workers_here(tmp_path, JOB, None)] == [7, 8, 9, 16]
    assert [one.node for one in workers_here(tmp_path, JOB, None)] == ["a", "a", "a", "b"]
    assert workers_here(tmp_path, JOB, "c") == [] and workers_here(tmp_path, "999", "a") == []


def test_another_run_whose_job_has_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """As on one machine with two embedded schedulers, each of which counts its jobs from 1."""
    own, other = tmp_path / "own" / "state", tmp_path / "other" / "state"
    programs = [
        (SLEEPS, {**environment("a", "8"), "TR11_ATTEMPT": str(state / "attempts" / JOB)})
        for state in (own, other)
    ]
    with started(*programs) as found:
        for state, process in zip((own, other), found, strict=True):
            assert [one.pid for one in workers_here(state / "heartbeat", JOB, "a")] == [process.pid]


def test_who_writes_for_the_ranks_of_a_node_is_none_of_them(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Neither while it lives, nor as a rank that has died when it is gone."""
    for pid in (workers[4].pid, 2**22 + 7):
        word = Heartbeat(8, "a", pid, "training", 5, time.time(), JOB, ranks=2)
        write_heartbeat(tmp_path / "8.json", word)
        found = workers_here(tmp_path, JOB, "a")
        assert [(one.rank, one.pid) for one in found] == [
            (8, workers[1].pid), (9, workers[0].pid),
        ]  # fmt: skip
        assert not any(one.has_ended for one in found)


def test_a_child_that_inherits_the_rank_is_no_worker(tmp_path: Path) -> None:
    code = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); child.wait()"
    with started((code, environment("a", "3"))) as [parent]:
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        assert [one.pid for one in workers_here(tmp_path, JOB, "a")] == [parent.pid]
        beat(tmp_path, 3, children[0].pid)
        assert [one.pid for one in workers_here(tmp_path, JOB, "a")] == [children[0].pid], (
            "its own word"
        )


def test_a_wrapper_that_passes_the_rank_on_is_no_worker(tmp_path: Path) -> None:
    wrapped = f"import os, sys; os.execvp('sh', ['sh', '-c', '\"$0\" -c \"$1\"; true', sys.executable, {SLEEPS!r}])"
    with started((wrapped, environment("a", "3"))) as [shell]:
        [child] = psutil.Process(shell.pid).children()
        assert [one.pid for one in workers_here(tmp_path, JOB, "a")] == [child.pid]


def test_a_rank_whose_process_is_gone_is_dead_unless_it_left(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    beat(tmp_path, 0, gone.pid)
    beat(tmp_path, 1, gone.pid, phase="ended")
    beat(tmp_path, 2, gone.pid, job="7")
    # another process has the number by now: it started after the beat
    beat(tmp_path, 3, os.getpid())
    write_heartbeat(tmp_path / "3.json", Heartbeat(3, "a", os.getpid(), "training", 5, 1.0, JOB))
    answer = answers_here(tmp_path, JOB, "a", 300.0)[0]
    assert [(one.rank, one.state) for one in answer.workers] == [(0, GONE), (3, GONE)]
    assert judge(grouped(answer.workers)).sentence == "ranks 0,3 on node a have ended"


def until_it_waits(worker: FoundWorker, kind: WaitKind, function: str) -> WorkerStack:
    """What it does, once it is there, in that function."""

    def waits() -> WorkerStack | None:
        found = read_worker(worker)
        return (
            found
            if wait_of(found).kind is kind and function in {frame.name for frame in found.frames}
            else None
        )

    found = until(waits, f"{kind} in {function}", context=lambda: read_worker(worker))
    assert found is not None
    return found


def test_a_hung_loader_a_hung_file_and_a_stopped_rank_are_told_apart(tmp_path: Path) -> None:
    require_stacks()
    pipe = tmp_path / "corpus.bin"
    os.mkfifo(pipe)
    programs = (
        (LOADER, environment("a", "0")),
        (READER, {**environment("a", "1"), "PIPE": str(pipe)}),
        (SLEEPS, environment("a", "2")),
    )
    with started(*programs) as [loader, reader, sleeper]:
        sleeper.send_signal(signal.SIGSTOP)
        until_it_waits(FoundWorker(0, "a", loader.pid), WaitKind.DATA_LOADER, "_try_get_data")
        if Path(f"/proc/{os.getpid()}/syscall").exists():
            read = until_it_waits(FoundWorker(1, "a", reader.pid), WaitKind.FILE, "read_index")
            assert (read.call, read.path) == ("read", str(pipe))
        # its stack is read all the same
        until_it_waits(FoundWorker(2, "a", sleeper.pid), WaitKind.STOPPED, "<module>")
        [answer] = answers_here(tmp_path, JOB, "a", 300.0)
        assert [one.rank for one in answer.workers] == [0, 1, 2], (
            "the loader's own process is no worker"
        )


def test_looking_changes_nothing(tmp_path: Path) -> None:
    require_stacks()
    counts = "import sys, time\nprint(flush=True)\nwhile True:\n    sys.stdout.write('x\\n'); sys.stdout.flush(); time.sleep(0.01)"
    with started((counts, environment("a", "0"))) as [process]:
        assert read_worker(FoundWorker(0, "a", process.pid)).trouble == ""
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == b"x\n"
        assert process.poll() is None


def test_a_worker_that_py_spy_cannot_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    monkeypatch.setattr(
        node.shutil, "which", lambda name, path=None: str(spy) if name == "py-spy" else None
    )
    spy.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with sudo' >&2; exit 1\n"
    )
    spy.chmod(0o755)
    with started((SLEEPS, environment("a", "0"))) as [process]:
        found = read_worker(FoundWorker(0, "a", process.pid))
        assert (
            found.trouble.startswith(f"no right to read process {process.pid} of ")
            and "or root" in found.trouble
        )
        # Which state it is depends on the moment: it has only just printed its line.
        assert re.match(rf"thread {process.pid}: state [RSD]\b", found.threads[0]), (
            "the kernel's words are kept"
        )
        assert wait_of(found).kind is WaitKind.UNREAD
        spy.write_text("#!/bin/sh\nexec sleep 3000\n")
        monkeypatch.setattr(node, "SPY_SECONDS", 0.5)
        assert "did not end within 0.5 s" in read_worker(FoundWorker(0, "a", process.pid)).trouble
    monkeypatch.setattr(node.shutil, "which", lambda name, path=None: None)
    with started((SLEEPS, environment("a", "0"))) as [process]:
        assert "py-spy is not installed" in read_worker(FoundWorker(0, "a", process.pid)).trouble


def test_the_probe_prints_an_answer(workers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tr11ops.diagnose.stacks.node", str(tmp_path), JOB, "300"]
    own = {**os.environ, "SLURMD_NODENAME": "b", "PYTHONPATH": ROOT}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    reader = AnswerReader()
    for line in done.stdout.splitlines():
        reader.feed(line)
    assert [one.pid for one in reader.answers["b"].workers] == [workers[2].pid]
