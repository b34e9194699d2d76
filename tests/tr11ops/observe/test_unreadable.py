"""A run directory that this user may not read: everything is unknown, and nothing is concluded from
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import pending, running
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all
from tr11ops.observe.look import look_now, observe
from tr11ops.observe.snapshot import RunFacts
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.answer import answer
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.paths import RunPaths

STRANGER = 65534
LOOKS_AT_JOBS = {
    "status",
    "handover",
    "pulse",
    "launch",
    "kill",
    "pause",
    "resume",
    "checkpoint-now",
}


@pytest.fixture(params=["the folder itself", "the folder above it"])
def directory(request: pytest.FixtureRequest, outside: Path) -> Iterator[RunDirectory]:
    """A run directory behind a closed door, seen by a user who is not root."""
    above = outside / "scratch"
    root = above / "run"
    (root / "state" / "submissions").mkdir(parents=True)
    closed = root if request.param == "the folder itself" else above
    made = RunDirectory(RunPaths(root, "tr11-176B-ml", "main"), root / "kill-switch")
    made.mark  # noqa: B018  worked out while it can be read
    closed.chmod(0o000)
    before = os.geteuid()
    if before == 0:
        os.seteuid(STRANGER)
    try:
        yield made
    finally:
        os.seteuid(before)
        closed.chmod(0o755)


def held(directory: RunDirectory) -> Job:
    mark = directory.comment("20220501-120000-00000000")
    return pending(reason="JobHeldUser", comment=mark)


@pytest.mark.parametrize("what", ["held", "waits", "nothing", "leaves", "runs"])
def test_it_is_unknown_whatever_the_queue_shows(directory: RunDirectory, what: str) -> None:
    job = held(directory)
    jobs = {
        "held": (job,),
        "waits": (pending(comment=job.comment),),
        "nothing": (),
        "leaves": (running(state=JobState.COMPLETING, comment=job.comment),),
        "runs": (running(comment=job.comment),),
    }[what]
    facts = RunFacts("tr11-176B-ml", "main", directory.root, directory.kill_switch, nodes=48)
    queue = Queue(*jobs)
    seen = observe(directory, facts, queue, look_now(directory, facts, queue))
    findings = detect_all(seen)
    verdict = judge(seen, findings)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.UNKNOWN, 3), verdict
    assert all(finding.severity < Severity.CRITICAL for finding in findings), findings
    assert answer(seen, findings, verdict).may_sleep is None


@pytest.mark.parametrize(
    "words",
    [("status",), ("handover", "--dry-run"), ("pulse", "--no-email"), ("pulse", "--act"), ("advise",), ("goodput",),
     ("nodes", "list"), ("checkpoints", "list"), ("alerts", "list"), ("launch", "--dry-run"), ("cron", "status"),
     ("kill", "--yes"), ("kill", "--now", "--yes"), ("pause", "--yes"), ("resume", "--yes"), ("checkpoint-now", "--yes"),
     ("profile", "--yes"), ("compute-check", "--yes")],
    ids=" ".join,
)  # fmt: skip
def test_every_command_says_so(
    words: tuple[str, ...],
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one or two lines, with the exit code for what could not be observed."""
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(directory.root.parent.parent / "scheduler"))
    monkeypatch.setenv("COLUMNS", "80")
    overrides = ("--set", f"run.directory={directory.root}")
    where = ("--scheduler", "local") if words[0] in LOOKS_AT_JOBS else ()
    me = os.geteuid()
    os.seteuid(0 if os.getuid() == 0 else me)
    (spare := directory.root.parents[1] / "spare").mkdir()
    (directory.root.parents[1] / "scheduler").mkdir(mode=0o777)
    # imports, which a stranger may not
    execute([*words, "--run", "demo", "--set", f"run.directory={spare}", *where])
    capsys.readouterr()
    for path in (directory.root.parents[1] / "scheduler").rglob("*"):
        path.chmod(0o777)
    os.seteuid(me)
    code = execute([*words, "--run", "demo", *overrides, *where])
    out, err = capsys.readouterr()
    assert (code, "Traceback" in out + err) == (3, False), out + err
    assert "ermission denied" in out + err, out + err
    assert not any(
        word in err for word in ("nothing of this run is", "nothing stands", "nothing is queued")
    ), err
