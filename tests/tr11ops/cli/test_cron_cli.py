"""`tr11 cron` as a person types it: on the embedded scheduler, and with a crontab program of the
test's own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cron.queues import Queue
from tr11ops.base.observed import Observed, Unknown
from tr11ops.cli import cron_install
from tr11ops.cli.common import directory_of
from tr11ops.cluster.base import Job, JobState as SlurmState
from tr11ops.cron.chain import Link
from tr11ops.cron.jobs import Every, PeriodicJob
from tr11ops.cron.runner import KEPT_CARD
from tr11ops.cron.status import CronView, view
from tr11ops.runcard.card import load_card
from tr11ops.rundir.cron_records import (
    ChainState,
    PeriodicJobState,
    read_job,
    write_chain,
    write_job,
)
from tr11ops.rundir.journal import read_journal

CRONTAB = """\
#!/bin/sh
# as cron's own: -l shows the table, a file replaces it
if [ -e "$TABLE.broken" ]; then echo "crontab: your account may not" >&2; exit 1; fi
if [ "$1" = -l ]; then
  [ -e "$TABLE" ] && exec cat "$TABLE"
  echo "no crontab for ana" >&2; exit 1
fi
cp "$1" "$TABLE"
"""
THEIRS = b'# mine, \xff\xfe not UTF-8\nMAILTO=""\n5 4 * * * true 100\\%\t\n'


@pytest.fixture
def table(bench: LocalBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The crontab of a run that has a directory; cron's program stands on PATH."""
    run_directory(bench).root.mkdir()
    programs = tmp_path / "bin 100%"
    programs.mkdir()
    for name in ("crontab", "scrontab"):
        (programs / name).write_text(CRONTAB)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TABLE", str(tmp_path / "table"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "conf %d's"))
    return tmp_path / "table"


def cron(bench: LocalBench, *words: str):
    return bench.tr11("cron", *words, "--run", str(bench.card))


# ----------------------------------------------------------------------------- list, refusals
def test_list_shows_every_job_and_says_what_is_wrong(bench: LocalBench) -> None:
    found = cron(bench, "list", "--json").json
    assert found["schema"] == 1
    assert [job["name"] for job in found["jobs"]] == [
        "pulse",
        "nodes-check",
        "digest",
        "sync",
        "filesystems",
        "backup",
    ]
    shown = cron(bench, "list", "--set", 'cron.skip=["pulze"]')
    assert "every 5 min" in shown.out and "'pulze' is no periodic job" in shown.err
    assert cron(bench, "list", "--set", "alerts.time_zone=Mars/Base").code == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "pulze"), 2, "did you mean 'pulse'"),
        (("run", "pulse", "--once"), 2, "leave one out"),
        (("install", "--way", "daemon"), 2, "tr11 cron run"),
        (("install", "--way", "at"), 2, "use slurm, crontab, scrontab"),
        (("remove",), 2, "add --way"),
        (("install", "--way", "crontab"), 2, "add --yes"),
        (("link", "hourly", "--token", "x", "--due", "1"), 2, "only the batch script"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    bench: LocalBench, table: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    found = cron(bench, *words)
    assert (found.code, said in found.err) == (code, True), found.err
    assert not table.exists()


def test_a_run_without_a_directory_has_no_periodic_jobs(bench: LocalBench) -> None:
    for words in (("run", "--once"), ("run",), ("install", "--way", "crontab", "--yes")):
        found = cron(bench, *words)
        assert found.code == 1 and "does not exist" in found.err
    assert cron(bench, "status").code == 1
    assert not run_directory(bench).root.exists()


# ----------------------------------------------------------------------------- run
def test_one_job_by_hand(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    found = cron(bench, "run", "nodes-check", "--json")
    assert found.code == 0, found.err
    assert found.json["rounds"] == [
        {"job": "nodes-check", "result": "ran", "why": "", "exit_code": 0}
    ]
    state = read_job(run_directory(bench), "nodes-check")
    assert isinstance(state, PeriodicJobState) and state.way == "hand"
    status = cron(bench, "status", "--json")
    row = {job["name"]: job for job in status.json["jobs"]}["nodes-check"]
    assert row["result"] == "fine" and row["last"]["runs"] == 1


def test_once_runs_what_is_due_and_no_more(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    only = ("--set", 'cron.skip=["pulse", "digest"]')
    assert [
        done["job"] for done in cron(bench, "run", "--once", "--json", *only).json["rounds"]
    ] == ["nodes-check"]
    again = cron(bench, "run", "--once", *only)
    assert again.code == 0 and "nothing is due" in again.err
    quiet = cron(bench, "run", "--once", "--quiet", *only)
    assert quiet.out == quiet.err == ""


def test_the_daemon_runs_and_ends_on_a_signal(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    words = ["cron", "run", "--run", str(bench.card), "--set", 'cron.skip=["pulse", "digest"]']
    command = [sys.executable, "-c", "from tr11ops.cli.main import run; run()", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        said = [process.stderr.readline(), process.stderr.readline()]
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=300)[1]
    finally:
        process.kill()
        process.wait()
    assert said[0].startswith("running nodes-check of") and said[1].endswith("nodes-check: ran\n")
    assert process.returncode == 0 and rest == "ended\n"


# ----------------------------------------------------------------------------- cells of a study
CELLS = [f"small-sweep/{name}" for name in ("batch8", "batch16", "batch32")]


@pytest.fixture
def study(bench: LocalBench) -> Path:
    """A study of three queued cells, of a card whose own run was never launched; its folder."""
    bench.block()
    grid = ("--grid", "batch.global_batch_size=8,16,32")
    rarely = ("--set", "alerts.interval_minutes=1440")  # no round becomes due while the test runs
    sent = bench.tr11("sweep", "--run", str(bench.card), "--scheduler", "local", *grid, *rarely)
    assert sent.code == 0, sent.out + sent.err
    root = run_directory(bench).root
    return root.with_name(f"{root.name}-sweep")


def cell_round(study: Path, cell: str) -> PeriodicJobState | None:
    folder = study / cell.rpartition("/")[2]
    found = read_job(directory_of(load_card(folder / "tr11.toml", (), {})), "pulse")
    assert not isinstance(found, Unknown)
    return found


@pytest.mark.parametrize(("length", "is_kept"), [(10, True), (200_000, False)])
def test_a_round_of_a_card_too_long_for_a_variable_can_be_started(
    bench: LocalBench, table: Path, monkeypatch: pytest.MonkeyPatch, length: int, is_kept: bool
) -> None:
    """A mixture of a thousand sets: no process starts with a variable of 128 KiB."""
    monkeypatch.setattr(cron_install, "resolved", lambda card: {"data": "x" * length})
    context = cron_install.cron_context_of(load_card(bench.card, ()), bench.card, (), "crontab")
    done = subprocess.run(["true"], env=dict(context.environment), check=False)
    assert done.returncode == 0
    assert (KEPT_CARD in context.environment) is is_kept


def test_the_cells_of_a_study_are_watched_too(bench: LocalBench, study: Path) -> None:
    """A folder with a card and its study: the base run alone was watched, or, where it never ran,
    nothing.
    """
    found = cron(bench, "run", "--once", "--json")
    assert found.code == 0, found.err
    assert [(done["job"], done["cell"], done["result"]) for done in found.json["rounds"]] == [
        ("pulse", cell, "ran") for cell in CELLS
    ]
    for cell in CELLS:
        state = cell_round(study, cell)
        assert state is not None and state.way == "once"
        log = (
            study
            / cell.rpartition("/")[2]
            / "small-sweep-logs"
            / "logs"
            / cell.rpartition("/")[2]
            / "main_log.txt"
        )
        assert "PULSE: small-sweep is " in log.read_text()
    assert "nothing is due" in cron(bench, "run", "--once").err
    by_hand = cron(bench, "run", "pulse", "--json")
    assert [done["cell"] for done in by_hand.json["rounds"]] == CELLS
    run_directory(bench).root.mkdir()
    beside = cron(bench, "run", "pulse", "--json").json["rounds"]
    assert [done.get("cell") for done in beside] == [None, *CELLS], "the run itself comes first"
    (study / "batch16" / "tr11.toml").write_text("no card")
    left = cron(bench, "run", "pulse", "--json")
    assert [done.get("cell") for done in left.json["rounds"]] == [None, CELLS[0], CELLS[2]]


def test_the_daemon_watches_cells_and_ends_on_a_signal(bench: LocalBench, study: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "cron",
        "run",
        "--run",
        str(bench.card),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert said[0] == f"watching 3 cells too: {', '.join(CELLS)}\n"
    assert [line.split()[-3:] for line in said if "pulse: ran" in line] == [
        [f"{cell}:", "pulse:", "ran"] for cell in CELLS
    ]
    assert process.returncode == 0


# ----------------------------------------------------------------------------- crontab
@pytest.mark.parametrize("before", [None, THEIRS, THEIRS.rstrip(b"\n")])
def test_install_and_remove_leave_others_lines(
    bench: LocalBench, table: Path, before: bytes | None
) -> None:
    if before is not None:
        table.write_bytes(before)
    dry = cron(bench, "install", "--way", "crontab", "--dry-run")
    assert dry.code == 0 and "+# tr11 cron" in dry.out and "nothing was changed" in dry.err
    assert (table.read_bytes() if table.exists() else None) == before
    assert (
        cron(bench, "install", "--way", "crontab", "--yes", "--json").json["action"] == "installed"
    )
    assert table.read_bytes().startswith(before or b"") and table.read_bytes().endswith(b"end\n")
    once = table.read_bytes()
    assert (
        cron(bench, "install", "--yes", "--way", "crontab", "--json").json["action"] == "unchanged"
    )
    assert table.read_bytes() == once
    assert "wait for their first round" in cron(bench, "status").out
    assert cron(bench, "remove", "--way", "crontab", "--yes").code == 0
    assert table.read_bytes() in {before or b"", (before or b"") + b"\n"}
    assert not list(table.parent.glob("conf*/tr11/cron/*.sh"))
    kinds = [entry.kind for entry in read_journal(run_directory(bench).journal).entries]
    assert kinds == ["cron-installed", "cron-removed"]


def test_the_line_does_what_it_says(bench: LocalBench, table: Path) -> None:
    """What stands in the crontab is given to a shell as cron does it: with next to no environment."""
    settings = ("--set", 'cron.skip=["pulse", "digest"]')
    assert cron(bench, "install", "--way", "crontab", "--yes", *settings).code == 0
    line = table.read_text().splitlines()[1]
    assert line.startswith("0 * * * * ")
    command = line.removeprefix("0 * * * * ").replace(r"\%", "%")
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"HOME": "/", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    state = read_job(run_directory(bench), "nodes-check")
    assert isinstance(state, PeriodicJobState) and state.way == "crontab" and state.exit_code == 0
    script = next(table.parent.glob("conf*/tr11/cron/*.sh"))
    assert script.stat().st_mode & 0o777 == 0o700  # what it holds is run in its owner's name


def test_a_crontab_that_cannot_be_read_is_not_overwritten(bench: LocalBench, table: Path) -> None:
    table.write_bytes(THEIRS)
    Path(f"{table}.broken").touch()
    found = cron(bench, "install", "--way", "crontab", "--yes")
    assert found.code == 1 and "your account may not" in found.err
    assert table.read_bytes() == THEIRS


def test_scrontab_has_the_options_of_its_jobs(bench: LocalBench, table: Path) -> None:
    settings = (
        "--set",
        "cron.partition=compil",
        "--set",
        "cron.account=six@cpu",
        "--set",
        "slurm.options.wckey=bloom",
    )
    assert cron(bench, "install", "--way", "scrontab", "--yes", *settings).code == 0
    lines = table.read_text().splitlines()
    assert "#SCRON --partition=compil" in lines and "#SCRON --account=six@cpu" in lines
    assert "#SCRON --wckey=bloom" in lines
    assert "#SCRON --time=00:30:00" in lines and lines[-2].endswith("--way scrontab --chain hourly")


def test_without_any_way_the_daemon_is_named(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_directory(bench).root.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = cron(bench, "install", "--yes")
    assert found.code == 1 and "tr11 cron run" in found.err
    assert shutil.which("crontab") is None


# ----------------------------------------------------------------------------- the chain
@pytest.fixture
def queue(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue of the test's own instead of Slurm, for a run that has a directory."""
    run_directory(bench).root.mkdir()
    made = Queue()
    for module in ("observe.readers", "cli.cron", "cli.cron_install"):
        monkeypatch.setattr(f"tr11ops.{module}.open_scheduler", lambda kind: made)
    return made


def follow(bench: LocalBench, queue: Queue, number: str, monkeypatch: pytest.MonkeyPatch):
    """Run a link as its batch script does: with the words that it has, in the folder that it names."""
    queue.run(number)
    monkeypatch.setenv("SLURM_JOB_ID", number)
    command = shlex.split(queue.requests[int(number) - 1].script.rstrip().splitlines()[-1])
    assert command[0] == "exec" and "cron" in command
    return bench.tr11(*command[command.index("cron") :])


ONLY_NODES = ("--set", 'cron.skip=["pulse", "digest"]')


def test_a_chain_is_installed_followed_seen_and_removed(
    bench: LocalBench, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = cron(bench, "install", "--way", "slurm", "--dry-run", *ONLY_NODES)
    assert dry.code == 0 and "runs nodes-check" in dry.err and not queue.requests
    made = cron(bench, "install", "--way", "slurm", "--yes", "--json", *ONLY_NODES).json
    # no daily job is wanted, so there is no daily chain
    assert (made["action"], made["jobs"]) == ("installed", ["1"])
    assert cron(bench, "install", "--yes", "--json", *ONLY_NODES).json["action"] == "unchanged"
    done = follow(bench, queue, "1", monkeypatch)
    assert (
        done.code == 0 and "the next link is job 2" in done.err and "nodes-check: ran" in done.err
    )
    queue.finish("1")
    assert cron(bench, "status", *ONLY_NODES).code == 0
    assert cron(bench, "remove", "--dry-run").code == 0 and queue.waiting() == ["2"]
    assert cron(bench, "remove", "--yes", "--json").json["jobs"] == ["2"]
    assert follow(bench, queue, "2", monkeypatch).err == "leaving: this chain was removed\n"


def test_a_card_broken_by_an_edit_does_not_end_the_chain(
    bench: LocalBench, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    cron(bench, "install", "--way", "slurm", "--yes", *ONLY_NODES)
    good = bench.card.read_text()
    bench.card.write_text(good + "garbage = [")
    done = follow(bench, queue, "1", monkeypatch)
    assert queue.waiting() == ["2"], done.err
    assert "is not TOML" in done.err and "the chain goes on" in done.err
    state = read_job(run_directory(bench), "nodes-check")
    # and it is a finding
    assert (
        isinstance(state, PeriodicJobState)
        and state.exit_code == 2
        and "is not TOML" in state.message
    )
    queue.finish("1")
    bench.card.unlink()
    follow(bench, queue, "2", monkeypatch)
    assert queue.waiting() == ["3"]
    queue.finish("2")
    bench.card.write_text(good)
    assert "the chain goes on" not in follow(bench, queue, "3", monkeypatch).err


def test_a_silent_scheduler_is_no_verdict(bench: LocalBench, queue: Queue) -> None:
    cron(bench, "install", "--way", "slurm", "--yes", *ONLY_NODES)
    queue.silent = 1
    found = cron(bench, "status", *ONLY_NODES)
    assert found.code == 3 and "UNKNOWN: whether the hourly chain lives" in found.out
    queue.silent = 1
    assert cron(bench, "install", "--way", "slurm", "--yes", *ONLY_NODES).code == 3
    assert queue.waiting() == ["1"]


# ----------------------------------------------------------------------------- the verdict
NOW = 1_795_289_822.0
PULSE = PeriodicJob("pulse", ("pulse",), Every(3600), 900, "")
DIGEST = PeriodicJob("digest", ("alerts",), Every(86_400), 900, "")


def state(name: str = "pulse", ago: float = 60, **changes: object) -> PeriodicJobState:
    values: dict[str, object] = {
        "name": name, "way": "slurm", "host": "n1", "started": NOW - ago, "ended": NOW - ago + 2, "exit_code": 0,
        "message": "", "interval_seconds": 3600.0, "runs": 9, "failures_in_a_row": 0, "next_due": 0.0,
    }  # fmt: skip
    return PeriodicJobState(**{**values, **changes})  # type: ignore[arg-type]


def seen(
    states: Observed[tuple[PeriodicJobState, ...]],
    chains: Observed[tuple[ChainState, ...]] = (),
    links: Observed[tuple[Link, ...]] | None = None,
    living: bool = False,
    is_installed: bool = False,
) -> CronView:
    schedules = {"hourly": Every(3600), "daily": Every(86_400)}
    queue = {} if links is None else {"hourly": links}
    return view(
        (PULSE, DIGEST), states, chains, queue, schedules, {"pulse": living}, NOW, is_installed
    )  # type: ignore[arg-type]


def link(due: float = NOW + 600, reason: str = "BeginTime") -> Link:
    return Link(
        "0badc0de",
        int(due),
        Job("7", "7", None, None, "cron-hourly", "ana", SlurmState.PENDING, reason=reason),
    )


CHAIN = ChainState("hourly", "7", NOW - 60, NOW + 600)
BOTH = (state(), state("digest"))


@pytest.mark.parametrize(
    ("found", "code", "words", "fix"),
    [
        (seen(BOTH), 0, "FINE", ""),
        # the run's trouble is pulse's to tell
        (seen((state(exit_code=1), state("digest"))), 0, "FINE", ""),
        (seen(()), 1, "no periodic job ever ran", "tr11 cron install"),
        (seen((), is_installed=True), 0, "wait for their first round", ""),
        (seen((), (CHAIN,), (link(),)), 0, "wait for their first round", ""),
        (seen((state(ago=10, runs=1),)), 0, "FINE", ""),  # the first rounds come one after another
        (seen((state(ago=400, runs=1),)), 1, "digest never ran", "tr11 cron run digest"),
        (seen((state(ago=4 * 3600), state("digest"))), 1, "overdue: nothing starts it", "tr11 cron install --way slurm"),
        (seen((state(ago=4 * 3600, way="daemon"), state("digest"))), 1, "overdue", "tr11 cron run"),
        (seen((state(message="exit code 2: x", failures_in_a_row=3), state("digest"))), 1, "3 times in a row", "tr11 cron run pulse"),
        (seen((state(ended=None, exit_code=None), state("digest")), living=True), 0, "FINE", ""),
        (seen((state(ended=None, exit_code=None), state("digest"))), 1, "what ran it was killed", "tr11 cron run pulse"),
        (seen(BOTH, (CHAIN,), (link(),)), 0, "FINE", ""),
        (seen(BOTH, (CHAIN,), ()), 1, "the hourly chain is dead: job 7", "tr11 cron install --way slurm"),
        (seen(BOTH, (CHAIN,), (link(reason="JobHeldUser"),)), 1, "is held", "scontrol release 7"),
        (seen(BOTH, (CHAIN,), (link(reason="BadConstraints"),)), 1, "cannot go on", "tr11 cron install --way slurm"),
        (seen(BOTH, (CHAIN,), (link(reason="AssocGrpWallLimit"),)), 1, "cannot go on", "tr11 cron install --way slurm"),
        # the site's maintenance passes
        (seen(BOTH, (CHAIN,), (link(reason="PartitionDown"),)), 0, "FINE", ""),
        (seen(BOTH, (CHAIN,), (link(NOW + 50_000),)), 1, "clock was set back", "tr11 cron install --way slurm"),
        (seen(BOTH, (CHAIN,), Unknown("squeue does not answer")), 3, "squeue does not answer", ""),
        (seen(Unknown("Input/output error")), 3, "Input/output error", ""),
        (seen(BOTH, Unknown("Input/output error")), 3, "Input/output error", ""),
    ],
)  # fmt: skip
def test_the_verdict(found: CronView, code: int, words: str, fix: str) -> None:
    assert (found.exit_code, words in found.verdict) == (code, True), found.verdict
    assert [fix for _, fix in found.problems] == ([fix] if fix else [])


def test_status_fits_eighty_columns_and_any_encoding(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    now = time.time()
    for name in ("pulse", "nodes-check", "digest"):
        write_job(
            run_directory(bench),
            state(
                name,
                started=now - 90_000,
                ended=now - 89_000,
                host="jean-zay-pp01",
                message="x" * 200,
            ),
        )
    write_chain(run_directory(bench), ChainState("hourly", "1234567", now, now + 60))
    found = cron(bench, "status")
    assert found.code == 1
    assert all(
        len(line.rstrip()) <= 80
        for line in found.out.splitlines()
        if line.startswith(("JOB", "pulse", "nodes", "digest", "hourly"))
    )
    assert found.out.isascii()
    json.loads(cron(bench, "status", "--json").out)
