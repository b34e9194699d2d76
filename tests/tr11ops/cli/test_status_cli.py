"""`tr11 status` as typed: exit codes, terminals, the embedded scheduler, watching and leaving it. The live
view stays alive while a look takes its time or fails, and is drawn within the window it has.
"""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins
from rich.console import Console

from tests.tr11ops.cli.status_place import COMMAND, Place
from tests.tr11ops.status_cases import HOUR, beats, record, save_checkpoint, snapshot, steps
from tests.waiting import until
from tr11ops.cli.common import drawing_console
from tr11ops.cli.progress import ViewWatcher, watch_lines
from tr11ops.cli.status import StatusResult
from tr11ops.cluster.base import JobState
from tr11ops.cluster.local import LocalScheduler, LocalSettings
from tr11ops.cluster.local_records import simulated_nodes
from tr11ops.detect.registry import detect_all
from tr11ops.observe.snapshot import Snapshot
from tr11ops.status.assessment import Assessment
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.verdict import judge
from trainer.contract.attempt import Heartbeat, write_heartbeat


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def scheduler(place: Place) -> Iterator[LocalScheduler]:
    found = LocalScheduler(place.folder / "scheduler", LocalSettings(nodes=simulated_nodes(8)))
    yield found
    for job in found.jobs():
        if not job.state.is_final:
            found.cancel(job.array_id or job.raw_id)
    until_all_ended(found)


def until_all_ended(scheduler: LocalScheduler) -> None:
    until(lambda: all(job.state.is_final for job in scheduler.jobs()), "the end of all jobs")


def train(place: Place, job_id: str) -> None:
    """What a trainer in its 25th step leaves in the run directory."""
    paths = place.directory.paths
    now = time.time()
    paths.logs.mkdir(parents=True)
    rows = [
        {
            "kind": "step",
            **to_builtins(record(n, total_iterations=421, seconds_per_iteration=0.4)),
            "time": now - 30 + n,
            "job_id": job_id,
        }
        for n in range(1, 26)
    ]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank in range(8):
        write_heartbeat(
            paths.heartbeat(rank), Heartbeat(rank, "here", os.getpid(), "training", 25, now, job_id)
        )
    save_checkpoint(paths, 25, now)


def wait_for_start(scheduler: LocalScheduler) -> str:
    def running() -> str | None:
        return next((job.raw_id for job in scheduler.jobs() if job.state is JobState.RUNNING), None)

    found = until(running, "the start of a task")
    assert found is not None
    return found


def test_a_run_directory_that_is_not_there_is_not_down(place: Place) -> None:
    done = place.status("--json", "--scheduler", "local")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert (document["verdict"], document["iteration"], document["jobs"]) == ("unknown", None, [])
    assert document["run"]["name"] == "demo"
    assert "not mounted" in document["why"]


def test_nothing_launched_needs_a_person_and_names_the_command(place: Place) -> None:
    place.directory.root.mkdir()
    done = place.status("--scheduler", "local")
    assert done.returncode == 1
    assert done.stdout.startswith(" DOWN ")
    assert "tr11 launch --run demo --array 1-10" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["5"], "goes with --watch: tr11 status --watch 5"),
        (["--watch", "0.1"], "between 1 and 86400"),
        (["--watch", "often"], "SECONDS"),
        (["--scheduler", "pbs"], "must be one of slurm, local, auto"),
        (["--set", "model.layerz=3"], "did you mean 'model.layers'"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    place: Place, arguments: list[str], part: str
) -> None:
    done = place.status(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_scheduler_that_is_not_there_could_not_be_observed(place: Place) -> None:
    place.directory.root.mkdir()
    (place.folder / "empty").mkdir()
    done = place.status("--scheduler", "slurm", PATH=str(place.folder / "empty"))
    assert done.returncode == 3
    assert done.stdout.startswith(" UNKNOWN ")
    assert "scheduler unreachable: squeue" in " ".join(done.stdout.lower().split())


def test_one_look_asks_slurm_twice(place: Place) -> None:
    place.directory.root.mkdir()
    programs, notes = place.folder / "programs", place.folder / "calls"
    programs.mkdir()
    for name in ("squeue", "scontrol", "sinfo", "sacct"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} >>"{notes}"\n')
        (programs / name).chmod(0o755)
    done = place.status("--scheduler", "slurm", "--json", PATH=f"{programs}:{os.environ['PATH']}")
    assert (done.returncode, json.loads(done.stdout)["jobs"]) == (1, [])
    assert sorted(notes.read_text().split()) == ["sinfo", "squeue"]


def test_a_running_array_on_the_embedded_scheduler(place: Place, scheduler: LocalScheduler) -> None:
    place.directory.root.mkdir()
    job_id = place.submit(scheduler)
    raw_id = wait_for_start(scheduler)
    done = place.status()  # the scheduler is the one that the submission went to
    assert (done.returncode, done.stdout.split()[0]) == (0, "STARTING"), done.stdout
    train(place, raw_id)
    done = place.status("--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["scheduler"]) == (
        0,
        "healthy",
        "local",
    ), document
    assert (
        document["iteration"],
        document["total_iterations"],
        document["seconds_per_iteration"],
    ) == (25, 421, 0.4)
    states = {(job["id"], job["state"]) for job in document["jobs"]}
    assert states == {(f"{job_id}_1", "RUNNING"), (f"{job_id}_[2-3%1]", "PENDING")}
    assert document["last_checkpoint"]["step"] == 25
    assert document["unknown"] == []
    screen = place.status().stdout
    assert "█" in screen
    assert "\x1b" not in screen, "no colour into a pipe"
    assert max(map(len, screen.splitlines())) <= 80
    for plainly in ({"TERM": "dumb"}, {"LANG": "C"}):
        assert place.status(**plainly).stdout.isascii()
    assert max(map(len, place.status(COLUMNS="60").stdout.splitlines())) <= 60
    scheduler.cancel(job_id)
    until_all_ended(scheduler)
    done = place.status()
    assert (done.returncode, done.stdout.split()[0]) == (1, "DOWN"), done.stdout
    assert f"the last submission was job {job_id}, array 1-3%1" in done.stdout


def test_it_starts_without_the_heavy_libraries(place: Place) -> None:
    place.directory.root.mkdir()
    program = (
        "import sys; from tr11ops.cli.main import execute; execute(sys.argv[1:]);"
        "heavy = 'torch numpy transformers deepspeed rich.markdown typer.rich_utils apscheduler asyncio fsspec httpx "
        "huggingface_hub jinja2 markdown_it multiprocessing plotly prometheus_client pygments rich.live rich.progress "
        "smtplib ssl submitit tarfile tr11ops.alerts.notify tr11ops.launch.session tr11ops.watchdog.pulse'.split();"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr);"
        "own = [module for name, module in sys.modules.items() if name.startswith(('tr11ops.', 'trainer.'))];"
        "sources = {module.__name__: open(module.__file__).read() for module in own if module.__file__};"
        "print([name for name, text in sources.items() if '@dataclass(frozen=True)\\n' in text], file=sys.stderr)"
    )
    done = place.typed(
        [sys.executable, "-c", program, "status", "--run", "demo", "--scheduler", "local"]
    )
    heavy, eager = done.stderr.splitlines()
    assert heavy == "[]", heavy
    assert eager == "[]", f"make these a trainer.contract.record.Record: {eager}"


# ----------------------------------------------------------------------------- watching
def test_watching_in_a_terminal_refreshes_and_ends_cleanly(place: Place) -> None:
    place.directory.root.mkdir()
    screen_end, terminal = pty.openpty()
    environment = {**place.environment, "COLUMNS": "80", "LINES": "30"}
    child = subprocess.Popen(
        [*COMMAND, "--scheduler", "local", "--watch", "1"],
        cwd=place.folder,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        shown = read_until(screen_end, lambda text: text.count("nothing was ever submitted") >= 2)
        child.send_signal(signal.SIGINT)
        shown += read_until(screen_end, lambda text: False)
        assert child.wait(timeout=300) == 1, "the last verdict was `down`"
    finally:
        child.kill()
        child.wait()
        os.close(screen_end)
    assert "Traceback" not in shown
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1, (
        "the alternate screen is left again"
    )
    assert shown.count("\x1b[?25h") >= 1, "the cursor is shown again"
    assert "DOWN" in shown.rpartition("\x1b[?1049l")[2], "the last screen stays"


def read_until(descriptor: int, enough) -> str:  # type: ignore[no-untyped-def]
    """Read a terminal until `enough(text)`, or until its other side is closed."""
    text, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline and not enough(text):
        ready, _, _ = select.select([descriptor], [], [], 0.2)
        if not ready:
            continue
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # how a terminal says that its other side is closed
            return text
        if not piece:
            return text
        text += piece.decode("utf-8", errors="replace")
    return text


def test_watching_into_a_pipe_gives_one_object_a_line(place: Place) -> None:
    place.directory.root.mkdir()
    child = subprocess.Popen(
        [*COMMAND, "--scheduler", "local", "--json", "--watch", "1"],
        cwd=place.folder,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline() for _ in range(2)]
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert [json.loads(line)["verdict"] for line in lines] == ["down", "down"]
    assert (child.returncode, errors) == (1, "")


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("7", 40), ("40", 40), ("100", 100)])
def test_every_width_shows_a_screen(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert drawing_console().width == width


def test_a_terminal_of_no_width_still_shows_the_screen(place: Place) -> None:
    shown = place.status(COLUMNS="0")
    assert shown.stdout.lstrip().startswith(("DOWN", "UNKNOWN")) and "progress" in shown.stdout


def look_at(seen: Snapshot) -> StatusResult:
    findings = detect_all(seen)
    return StatusResult(Assessment(seen, findings, judge(seen, findings), ExtraObservations()))


def until_looks(watcher: ViewWatcher, count: int) -> None:
    until(lambda: watcher.poll(time.monotonic()) >= count, f"look {count}", pause=0.01)


def test_a_look_that_fails_is_said_and_the_next_one_is_tried() -> None:
    looks = iter([look_at(snapshot()), None, look_at(snapshot())])

    def look() -> StatusResult:
        found = next(looks)
        if found is None:
            raise OSError(28, "No space left on device", "/scratch\n/x")
        return found

    watcher = ViewWatcher(look, 0.0)
    until_looks(watcher, 1)
    first = watcher.last
    watcher.seconds = 1000.0  # what fails now is not tried again at once
    until_looks(watcher, 2)
    hint = watcher.hint(time.monotonic())
    assert "the last look failed (OSError: [Errno 28] No space left on device" in hint
    assert "\n" not in hint
    assert watcher.last is first, "what was seen stays on the screen"
    assert "seen" in hint
    watcher._due = 0.0
    until_looks(watcher, 3)
    assert "failed" not in watcher.hint(time.monotonic())


def test_a_silent_scheduler_stops_no_clock_and_is_asked_once() -> None:
    gate, calls = threading.Event(), []

    def look() -> StatusResult:
        calls.append(threading.current_thread())
        gate.wait(30)
        return look_at(snapshot())

    watcher = ViewWatcher(look, 1.0)
    for moment in (10.0, 11.0, 15.0):
        assert watcher.poll(moment) == 0
    assert len(calls) == 1
    assert calls[0].daemon, "Ctrl-C does not wait for it"
    assert watcher.hint(15.0) == "looking since 5 s; every 1 s; Ctrl-C ends"
    gate.set()
    calls[0].join(30)
    assert watcher.poll(10.0) == 1
    assert watcher.last is not None


def test_a_slow_look_makes_longer_pauses() -> None:
    watcher = ViewWatcher(lambda: look_at(snapshot()), 1.0)
    began = time.monotonic() - 20.0  # as if it had been asked then
    watcher.poll(began)
    until(lambda: watcher.began is None, "the end of the look", pause=0.01)
    assert watcher.poll(time.monotonic() + 30.0) == 1
    assert watcher.began is None, "twice twenty seconds have not passed"
    watcher.poll(time.monotonic() + 45.0)
    assert watcher.began is not None or watcher.count == 2


@pytest.mark.parametrize("height", [1, 5, 24, 100])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_frame_never_exceeds_the_window(width: int, height: int) -> None:
    from tr11ops.cli.progress import _frame

    watcher = ViewWatcher(
        lambda: look_at(snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR))), 10.0
    )
    until_looks(watcher, 1)
    target = io.StringIO()
    console = Console(
        file=target, width=width, height=height, color_system=None, legacy_windows=False
    )
    console.print(_frame(watcher, console, time.monotonic()))
    lines = target.getvalue().splitlines()
    assert len(lines) <= max(3, height)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(" STALLED ")
    assert lines[-1].startswith("seen 0 s ago") or width < 60


def test_lines_go_on_until_they_are_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter(
        [
            look_at(snapshot()),
            OSError(5, "Input/output error"),
            look_at(snapshot(jobs=(), heartbeats=())),
        ]
    )

    def look() -> StatusResult:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, OSError):
            raise found
        return found

    assert watch_lines(look, 0.0, True, Console(file=io.StringIO())) == 1
    shown = capsys.readouterr()
    assert [line[:14] for line in shown.out.splitlines()] == ['{"schema": 1, '] * 2
    assert (
        shown.err == "tr11: the look failed (OSError: [Errno 5] Input/output error); trying again\n"
    )
