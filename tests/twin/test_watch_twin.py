"""`tr11 watch` on a real Slurm: jobs that someone else has submitted, from the queue to their end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import Answer
from tests.tr11ops.cli.watch_bench import BASH_STEP
from tests.waiting import until
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.observe.look import facts_of
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.trainers.watched import WatchedJob
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.twin import Twin
from trainer.contract.attempt import EndMarker

STEPS = f'for i in 1 2 3; do echo "{BASH_STEP}"; done'
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GATE = "until [ -e go ]; do sleep 0.1; done"
NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
# root that may read no more than its own files let it
NO_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search",
               "--inh-caps=-dac_override,-dac_read_search")  # fmt: skip
OURS = """
name = "ours"
title = "a script"
step_line = 'step: +(?P<step>\\d+) +loss: +(?P<loss>\\S+)'
[checkpoints]
name = "checkpoint-{step}"
complete = ["has model.pt"]
quiet = 0.2
"""
NO_ONE_ANSWERS = (
    '\n[alerts]\nrecipients = ["oncall@example.org"]\nsmtp_host = "127.0.0.1"\nsmtp_port = 9\n'
)


class Foreign:
    """Jobs in a folder of their own, and `tr11` typed beside them."""

    def __init__(
        self, folder: Path, slurm: SlurmScheduler, capture: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.slurm, self.capture = folder, slurm, capture

    def submit(self, *lines: str, array: str = "", hold: bool = False) -> str:
        """Without a word of tr11's; their log is NAME.out, of a task NAME_TASK.out."""
        output = "%A_%a.out" if array else "%j.out"
        request = BatchRequest(
            script="\n".join(("#!/bin/bash", *lines)) + "\n", name="words", nodes=1, hold=hold,
            time_limit_seconds=600, output=str(self.folder / output), working_directory=self.folder,
        )  # fmt: skip
        if array:
            request = replace(request, array=array)
        return self.slurm.submit(request)

    def tr11(self, *words: str) -> Answer:
        self.capture.readouterr()
        code = execute([*words, "--scheduler", "slurm"])
        out, err = self.capture.readouterr()
        assert "Traceback" not in out + err
        return Answer(code, out, err)

    def watch(self, job: str, *words: str) -> Answer:
        return self.tr11("watch", job, "--log", str(self.log(job)), "--once", *words)

    def log(self, job: str) -> Path:
        return self.folder / f"{job}.out"

    def card(self, job: str) -> Path:
        return self.folder / f"tr11-watch-{job}/tr11.toml"

    def status(self, job: str) -> Answer:
        return self.tr11("status", "--run", str(self.card(job)), "--json")

    def until_logged(self, job: str, text: str = "step: 3") -> None:
        log = self.log(job)
        until(lambda: log.is_file() and text in log.read_text(), f"{text} in {log}")

    def until_ended(self, job: str) -> None:
        def is_over() -> bool:
            found = self.slurm.job(job)
            return found is not None and found.state.is_final

        until(is_over, f"job {job} ends")

    def until_queued(self, job: str) -> None:
        """Put back after the loss of its node: Slurm starts it on another one two minutes later."""

        def waits() -> bool:
            found = self.slurm.job(job)
            return found is not None and found.state is JobState.PENDING

        until(waits, f"job {job} waits")

    def update(self, *words: str) -> None:
        """`scontrol update`, as root types it."""
        subprocess.run(("scontrol", "update", *words), check=True, timeout=300)

    def node_of(self, job: str) -> str:
        return next(one for one in self.slurm.jobs() if one.raw_id == job).nodes[0]

    def marker(self, job: str) -> EndMarker | None:
        return EndMarker.read(self.card(job).parent / f"state/attempts/{job}/end.json")

    def mail(self, job: str) -> str:
        """What a look of the watchdog writes now."""
        with self.card(job).open("a") as stream:
            stream.write(NO_ONE_ANSWERS)
        self.tr11("pulse", "--run", str(self.card(job)))
        card = load_card(self.card(job), (), {})
        entries = waiting_entries(RunDirectory(card.paths, card.kill_switch))
        return "\n".join(f"{one.message.subject}\n{one.message.body}" for one in entries)


@pytest.fixture
def foreign(
    twin: Twin,
    slurm: SlurmScheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Foreign]:
    monkeypatch.chdir(tmp_path)
    for name, value in twin.environment.items():
        monkeypatch.setenv(name, value)
    yield Foreign(tmp_path, slurm, capsys)


def test_a_job_from_the_queue_to_a_fault(foreign: Foreign) -> None:
    """Queued, running, failed: the mail names what it died of, and nothing that is refused."""
    job = foreign.submit(STEPS, GATE, f"echo '{MEMORY}'", "exit 1", hold=True)
    queued = foreign.watch(job, "--dialect", "torchtitan")
    assert queued.code == 3, queued.out
    assert f"job {job} is PENDING (JobHeldUser): it has not begun" in queued.out, queued.out
    foreign.slurm.release(job)
    foreign.until_logged(job)
    running = foreign.watch(job)
    assert running.code == 0 and "training at iteration 3" in running.out, running.out
    listed = foreign.tr11("list")
    assert "to stop one" not in listed.out, "it is only watched"
    [row] = [line.split() for line in listed.out.splitlines() if line.startswith("healthy")]
    assert row[-4:] == ["3", "9.5000", "-", f"tr11-watch-{job}"]
    (foreign.folder / "go").touch()
    foreign.until_ended(job)
    assert foreign.watch(job).code == 1
    marker = foreign.marker(job)
    assert marker is not None and marker.reason == "error"
    assert (
        marker.message
        == f"out of GPU memory: {MEMORY}; the scheduler says FAILED, its script ended with exit code 1"
    )
    mail = foreign.mail(job)
    assert MEMORY.removesuffix(".") in mail.replace("\n", " "), mail
    assert "tr11 launch" not in mail and "tr11 resume" not in mail and "scancel" not in mail
    assert "tr11 diagnose" in mail


def test_one_task_of_an_array_is_watched_and_the_array_itself_refused(foreign: Foreign) -> None:
    array = foreign.submit(STEPS, GATE, "echo done", array="1-2%1")
    first = f"{array}_1"
    foreign.until_logged(first)
    refused = foreign.tr11("watch", array, "--log", str(foreign.log(first)))
    assert refused.code == 2
    assert refused.err == f"tr11: job {array} is an array: watch one task of it: {first} (RUNNING), {array}_2 (PENDING)\n"  # fmt: skip
    assert foreign.watch(first, "--steps", "3").code == 0
    shown = foreign.status(first).json
    assert [one["id"] for one in shown["jobs"]] == [first], shown["jobs"]
    assert not shown["findings"], shown["findings"]  # the other task is no namesake
    (foreign.folder / "go").touch()
    foreign.until_ended(first)
    ended = foreign.watch(first)
    assert ended.code == 0 and "Nothing is left to train" in ended.out, ended.out


def test_a_log_that_cannot_be_read_any_more_is_no_silence(foreign: Foreign) -> None:
    job = foreign.submit(STEPS, "sleep 600")
    foreign.until_logged(job)
    foreign.watch(job)
    foreign.log(job).chmod(0)
    program = [sys.executable, "-c", "from tr11ops.cli.main import run; run()"]
    if os.geteuid() == 0:
        program = [*NO_OVERRIDE, *program]
    words = ("watch", "--run", str(foreign.card(job)), "--once")
    seen = subprocess.run(
        [*program, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert seen.returncode == 3, seen
    assert "cannot be read: Permission denied" in " ".join(seen.stdout.split()), seen
    card = load_card(foreign.card(job), (), {})
    watched = WatchedJob.read(card.paths)
    assert watched is not None and "Permission denied" in watched.unread
    directory, facts = RunDirectory(card.paths, card.kill_switch), facts_of(card)
    later = assess(directory, facts, foreign.slurm, _nothing_else, now=time.time() + 3600)
    assert later.verdict.word == "unknown" and "Permission denied" in later.verdict.why
    assert "hung" not in {one.detector for one in later.findings}


def _nothing_else(_: object) -> ExtraObservations:
    return ExtraObservations()


def test_another_users_job_is_watched_and_what_it_saves_held(twin: Twin, foreign: Foreign) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can act as a second user, with setpriv")
    out = foreign.folder / "out"
    out.mkdir()
    out.chmod(0o777)
    for folder in (foreign.folder, *foreign.folder.parents[:2]):
        folder.chmod(0o755)
    script = out / "train.sh"
    save = 'mkdir out/new; echo weights > out/new/model.pt; mv out/new "out/checkpoint-3"'
    script.write_text("\n".join(("#!/bin/bash", STEPS, save, "sleep 600")))
    script.chmod(0o755)
    words = ("sbatch", "--parsable", "--time=10", "--output=out/%j.out", str(script))
    made = subprocess.run(
        [*NOBODY, *words], capture_output=True, text=True, timeout=300, check=True
    )
    job = made.stdout.strip()
    log = out / f"{job}.out"
    saved = out / "checkpoint-3"
    until(lambda: saved.is_dir() and time.time() - saved.stat().st_mtime > 0.5, "it saves")
    (foreign.folder / "ours.toml").write_text(OURS)
    answer = foreign.tr11("watch", job, "--log", str(log), "--dialect", "ours.toml",
                          "--folder", "out", "--hold", "--once")  # fmt: skip
    assert answer.code == 0 and "held up to step 3" in answer.out, answer.out
    shown = foreign.status(job).json
    assert [(one["id"], one["user"]) for one in shown["jobs"]] == [(job, "nobody")]
    assert foreign.tr11("checkpoints", "verify", "3", "--run", str(foreign.card(job))).code == 0


def test_a_job_that_its_owner_cancels_needs_no_one(foreign: Foreign) -> None:
    job = foreign.submit(STEPS, "sleep 600")
    foreign.until_logged(job)
    foreign.watch(job)
    foreign.slurm.cancel(job)
    foreign.until_ended(job)
    answer = foreign.watch(job)
    said = " ".join(answer.out.split())
    assert answer.code == 0 and f"Job {job} was cancelled at iteration 3" in said, said
    assert "STOPPED" in said and "who submitted it decides" in said, said


def test_a_lost_node_and_a_time_limit_are_told_as_what_they_are(
    twin: Twin, foreign: Foreign
) -> None:
    """Neither leaves a word of the trainer; a job that Slurm queues again needs no one."""
    lost, again = foreign.submit(STEPS, "sleep 600"), foreign.submit(STEPS, "sleep 600")
    for job in (lost, again):
        foreign.until_logged(job)
        foreign.watch(job)
    node = foreign.node_of(lost)
    assert foreign.node_of(again) == node
    foreign.update(f"JobId={again}", "Requeue=1")
    try:
        inject(twin, "node-dead", node=node)
        foreign.update(f"NodeName={node}", "State=DOWN", "Reason=dead")
        foreign.until_queued(again)
        waits = foreign.watch(again)
        assert "QUEUED" in waits.out and f"job {again} waits" in waits.out, waits.out
        limited = foreign.submit(STEPS, "sleep 600")
        foreign.until_logged(limited)
        foreign.watch(limited)
        foreign.update(f"JobId={limited}", "TimeLimit=1")  # the shortest that Slurm knows
        foreign.until_ended(lost)
        seen = foreign.watch(lost)
        assert seen.code == 1 and foreign.marker(lost) is None, seen.out
        mail = " ".join(foreign.mail(lost).split())
        assert f"Job {lost} has lost {node}, which ran its batch script, and has ended" in mail
    finally:
        heal(twin)
    foreign.until_ended(limited)
    seen = foreign.watch(limited)
    assert seen.code == 1 and foreign.marker(limited) is None, seen.out
    mail = " ".join(foreign.mail(limited).split())
    assert f"attempt {limited} ended at its time limit, without the trainer's end marker" in mail
    assert "the scheduler says TIMEOUT" in mail and "tr11 launch" not in mail, mail
