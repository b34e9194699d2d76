"""The node agent around its workers: checks before they start, its record, memory, and nothing left
behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import is_gone, until
from tr11ops.agent.exit_records import NodeSettings, launch_has_failed
from tr11ops.agent.memory_watch import MemoryWatch, WorkerWatch, descendants
from tr11ops.diagnose.attribution.records import read_reports
from tr11ops.health.base import EXIT_BAD_NODE

ROOT = Path(__file__).parents[3]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def agent(folder: Path, worker: str, prelude: str = "", **resilience: Any) -> subprocess.Popen[str]:
    """A real node agent around a stand-in for torchrun (a Python program)."""
    card = {"slurm": {"gpus_per_node": 0}, "resilience": {"check_seconds": 20, **resilience}}
    (folder / "card.json").write_text(json.dumps(card))
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tr11ops.agent import node
        {prelude}
        node.NodeTask.command = property(lambda self: [sys.executable, "-u", "-c", {worker!r}])
        folder = Path({str(folder)!r})
        sys.exit(node.run(node.NodeTask(folder, folder / "card.json", "7", 3, node.NodePlaces(2, 1, 4, "127.0.0.1", 1))))
    """)
    environment = {**os.environ, "TR11_NODE_NAME": "x02"}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "nodes" / "x02.json").read_text())


def script(folder: Path, body: str) -> str:
    path = folder / "own.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_node_that_is_well_starts_without_what_a_bad_one_needs() -> None:
    program = (
        "import sys, tr11ops.agent.node\n"
        "heavy = ('pydantic', 'importlib.metadata', 'email', 'tr11ops.diagnose', 'torch', 'ssl')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_the_checks_look_at_the_exported_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "job7"))
    assert agent(tmp_path, "print('trained')").wait(timeout=60) == 0
    [told] = [check for check in record(tmp_path)["checks"] if check["name"] == "local-disk"]
    assert told["result"] == "warning" and told["why"].startswith(
        f"{tmp_path}/job7 (TMPDIR) is not there"
    )


def test_a_bad_node_starts_no_worker_and_says_why(tmp_path: Path) -> None:
    own = script(tmp_path, "echo 'GPU 3 is gone'; exit 1")
    child = agent(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')", check_scripts=[own])
    shown, _ = child.communicate(timeout=300)
    assert child.returncode == EXIT_BAD_NODE
    assert "x02: health check script:own.sh: bad: GPU 3 is gone" in shown
    assert not (tmp_path / "started").exists()
    found = record(tmp_path)
    assert (found["node"], found["node_rank"], found["launch"], found["exit_status"]) == (
        "x02",
        1,
        3,
        EXIT_BAD_NODE,
    )
    assert {"name": "script:own.sh", "result": "bad", "why": "GPU 3 is gone"} in found["checks"]
    assert found["end"] >= found["start"] and found["ended_processes"] == []


@pytest.mark.parametrize("body", ["exit 3", "sleep 60", "exit 9"])
def test_unknown_is_not_bad(tmp_path: Path, body: str) -> None:
    own = script(tmp_path, body)
    child = agent(tmp_path, "print('trained')", check_scripts=[own], check_seconds=0.7)
    assert "trained" in child.communicate(timeout=300)[0]
    assert child.returncode == 0
    assert [
        one["result"] for one in record(tmp_path)["checks"] if one["name"] == "script:own.sh"
    ] == ["unknown"]


def test_a_check_can_be_skipped_by_name(tmp_path: Path) -> None:
    own = script(tmp_path, "exit 1")
    child = agent(
        tmp_path, "print('trained')", check_scripts=[own], skip_checks=["script:own.sh", "memory"]
    )
    child.communicate(timeout=300)
    assert child.returncode == 0
    assert not {"script:own.sh", "memory"} & {one["name"] for one in record(tmp_path)["checks"]}


def test_the_record_is_there_while_the_workers_run(tmp_path: Path) -> None:
    child = agent(tmp_path, SLEEP)
    while child.stdout.readline() != "up\n":
        assert child.poll() is None
    found = record(tmp_path)
    assert found["end"] is None and found["exit_status"] is None and found["checks"]
    child.send_signal(signal.SIGUSR1)
    until((tmp_path / "stop-request.json").exists)
    child.kill()
    child.communicate()


def test_the_end_of_a_failed_step_asks_for_nothing(tmp_path: Path) -> None:
    """srun ends the other nodes' agents when one node was bad: the next launch must not find a stop
    request.
    """
    child = agent(tmp_path, SLEEP)
    while child.stdout.readline() != "up\n":
        assert child.poll() is None
    (tmp_path / "nodes" / "x01.json").write_text(
        json.dumps({"node": "x01", "launch": 3, "exit_status": 75})
    )
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=300)
    assert child.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "stop-request.json").exists()
    assert (
        record(tmp_path)["exit_status"] == 128 + signal.SIGTERM
        and record(tmp_path)["ended_processes"]
    )


def test_workers_that_stay_after_a_failed_one_are_ended(tmp_path: Path) -> None:
    stubborn = (  # whole lines in one write each, and the sign of failure when both are ready
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); read, ready = os.pipe(); child = os.fork();"
        "os.write(1, b'%d\\n' % os.getpid());"
        "os.read(read, 1) and os.write(1, b'W Sending process 77 closing signal SIGTERM\\n') if child else os.write(ready, b'x');"
        "time.sleep(600)"
    )
    child = agent(tmp_path, stubborn, end_within_seconds=1.0)
    shown, _ = child.communicate(timeout=300)
    assert child.returncode == 1 and "a worker failed, but the others stay" in shown
    pids = [int(line) for line in shown.splitlines() if line.isdigit()]
    assert len(pids) == 2 and set(record(tmp_path)["ended_processes"]) == set(pids)
    until(lambda: all(map(is_gone, pids)), "the end of both")


def test_a_failed_worker_is_kept_with_the_moment_of_its_end(tmp_path: Path) -> None:
    line = "tr11: worker 5 (process 77) failed: exit status 3"
    child = agent(
        tmp_path, f"print({line!r}); print('[default0]:' + {line!r}); raise SystemExit(1)"
    )
    child.communicate(timeout=300)
    assert child.returncode == 1
    [failure] = record(tmp_path)["failed_workers"]  # what a worker prints itself does not count
    assert (failure["rank"], failure["pid"], failure["how"]) == (5, 77, "exit status 3")


def test_a_workers_end_is_not_when_the_launcher_reports_it() -> None:
    watch = WorkerWatch()
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline()"], stdin=subprocess.PIPE
    )
    watch.look(os.getpid())
    worker.communicate()
    watch.look(os.getpid())
    missed = time.time()
    watch.told(0, worker.pid, "exit status 3")
    watch.told(1, 1, "exit status 1")  # never seen alive: the word itself is all there is
    assert watch.failures[0]["time"] <= missed <= watch.failures[1]["time"]


def test_settings_come_from_the_resolved_card_or_the_defaults(tmp_path: Path) -> None:
    card = tmp_path / "card.json"
    card.write_text(
        '{"slurm": {"gpus_per_node": 8}, "resilience": {"check_scripts": ["/a"], "check_seconds": 2}}'
    )
    assert NodeSettings.read(card) == NodeSettings(gpus=8, check_scripts=("/a",), check_seconds=2.0)
    for text in ("", "[]", "{}", '{"slurm": 3}'):
        card.write_text(text)
        found = NodeSettings.read(card)
        assert found.fault and found.gpus == 0
    assert NodeSettings.read(tmp_path / "none").fault


def test_only_this_launchs_failures_count(tmp_path: Path) -> None:
    for folder in ("failures", "nodes"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nodes" / "a.json").write_text('{"launch": 2, "exit_status": null}')
    (tmp_path / "nodes" / "b.json").write_text('{"launch": 2, "exit_status": 0}')
    (tmp_path / "nodes" / "c.json").write_text('{"launch": 1, "exit_status": 75}')
    (tmp_path / "failures" / "d.json").write_text('{"launch": 2, "ra')
    assert not launch_has_failed(tmp_path, 2) and launch_has_failed(tmp_path, 1)
    (tmp_path / "failures" / "rank-0.json").write_text('{"launch": 2, "rank": 0, "error": "x"}')
    assert launch_has_failed(tmp_path, 2)


# ------------------------------------------------------------------ memory
def meminfo(folder: Path, available: int, total: int = 100_000_000) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: {total} kB\nMemAvailable: {available} kB\n")
    return path


def test_exhausted_memory_is_said_once_until_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tr11ops.agent.memory_watch._control_group", lambda: None)
    said: list[str] = []
    watch = MemoryWatch("x02", said.append, meminfo(tmp_path, 50_000_000), shared_memory=tmp_path)

    def sample(available: int) -> bool:
        meminfo(tmp_path, available)
        watch._next_sample = 0.0
        return watch.sample(os.getpid())

    assert not sample(50_000_000)
    assert sample(2_000_000) and not sample(1_000_000) and not sample(7_000_000)
    assert not sample(60_000_000) and sample(900_000)
    assert len(said) == 2 and said[0].startswith(
        "tr11: x02: memory runs out: 1.9 GiB of 95.4 GiB left"
    )
    found = watch.record()
    assert found["lowest_available_bytes"] == 900_000 * 1024 and len(found["warnings"]) == 2


def test_what_the_kernel_killed_for_want_of_memory_is_counted(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    watch = MemoryWatch("x02", print, vmstat=vmstat)
    vmstat.write_text("pgfault 9\noom_kill 5\n")
    assert watch.record()["oom_kills"] == 2  # those before the workers are others'
    assert MemoryWatch("x02", print, vmstat=tmp_path / "none").record()["oom_kills"] is None


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"oom_kills": 2, "warnings": ["x02: memory runs out"]}, "the kernel killed 2 processes for want of memory"),
        ({"oom_kills": 0, "warnings": ["x02: memory runs out"]}, "x02: memory runs out"),
        ({"oom_kills": 0, "warnings": [], "lowest_available_bytes": 1 << 30, "total_bytes": 4 << 30},
         "no want of memory was seen: at the least 1.0 GiB of 4.0 GiB were left"),
        ({"oom_kills": None, "warnings": [], "lowest_available_bytes": 1 << 30, "total_bytes": 4 << 30}, ""),
        ({}, ""), (None, ""),
    ],
)  # fmt: skip
def test_a_report_tells_what_is_known_of_the_memory(
    tmp_path: Path, memory: object, said: str
) -> None:
    (tmp_path / "nodes").mkdir()
    record = {"node": "x02", "launch": 1, "exit_status": 1, "memory": memory}
    (tmp_path / "nodes" / "x02.json").write_text(json.dumps(record))
    assert read_reports(tmp_path, 1)[0].memory == said


def test_the_largest_worker_is_named_and_its_peak_kept(tmp_path: Path) -> None:
    said: list[str] = []
    code = "import os, sys; block = bytearray(80 << 20); print(os.getpid(), flush=True); sys.stdin.readline()"
    # a tree of its own, without other tests' servers
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, code]
    agent = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        worker = int(agent.stdout.readline())
        assert worker in descendants(agent.pid)
        watch = MemoryWatch("x02", said.append, meminfo(tmp_path, 1), shared_memory=tmp_path)
        assert watch.sample(agent.pid)
        assert f"the largest worker process is {worker}" in said[0]
        assert watch.record()["peak_worker_bytes"] > 80 << 20
    finally:
        agent.communicate()


def test_shared_memory_of_killed_workers_is_removed_by_name(tmp_path: Path) -> None:
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close();"
        "print('up', flush=True); sys.stdin.readline()"
    )
    ours, other = (
        Path("/dev/shm") / f"tr11-test-{os.getpid()}-{name}" for name in ("ours", "other")
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(ours)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        other.write_text("not mapped by anyone")
        assert child.stdout.readline() == b"up\n"
        watch = MemoryWatch("x02", print)
        watch.look_at_tree(os.getpid())
        assert watch.sweep() == () and ours.exists()  # it is in use
        child.kill()
        child.communicate()
        assert watch.sweep() == (ours.name,)
        assert other.exists() and not ours.exists()
        ours.write_text("a new file under the old name, someone else's")
        assert watch.sweep() == () and ours.exists()
    finally:
        child.kill()
        child.communicate()
        ours.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
