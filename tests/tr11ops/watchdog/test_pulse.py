"""One pass of the watchdog as a whole: what it writes, tells and leaves alone, how it bears a broken world,
and the stacks that it keeps of a hanging job: what some nodes told is enough, none is no evidence.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import NODES, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.disk_scheduler import DiskScheduler
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.watchdog.counting import slurm_commands
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.service import AlertInput, AlertOutcome
from tr11ops.alerts.store import read_alert_state
from tr11ops.base import deadline
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.diagnose.stacks.worker import CollectedStacks, Frame, NodeStacks, WorkerStack
from tr11ops.observe.look import facts_of, observe
from tr11ops.runcard.card import load_card
from tr11ops.rundir.action_log import replay
from tr11ops.rundir.attempts import read_kept_stacks, stacks_folder
from tr11ops.rundir.journal import Journal, read_journal
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.watchdog import pulse as pulse_module
from tr11ops.watchdog.pulse import (
    Actuator,
    Pulse,
    WatchdogLock,
    WatchedRun,
    acquire_lock,
    take_pulse,
)
from tr11ops.watchdog.stacks import keep_stacks
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.attempt import Heartbeat, write_heartbeat
from trainer.contract.paths import RunPaths


class Scene:
    """A run with one healthy job on a scheduler that is a folder; alerts are caught, not sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.card = load_card(write_card(folder), (), {})
        self.directory = RunDirectory(self.card.paths, self.card.kill_switch)
        self.scheduler = DiskScheduler(folder / "queue")
        self.alerts: list[tuple[list[str], frozenset[str], bool, bool]] = []
        self.situations: list[Any] = []
        self.titles: list[list[str]] = []
        tag = new_tag()
        self.directory.write_submission(
            Submission(
                tag, "100", "local", time.time() - 60, "root", "h", "small", "main", None, 2, "hash"
            )
        )
        self.job = Job(
            "100", "100", None, None, "small", "root", JobState.RUNNING, partition="p", nodes=("n1", "n2"),
            start_time=time.time() - 600, submit_time=time.time(), comment=self.directory.comment(tag),
        )  # fmt: skip
        self.scheduler.put(self.job)
        write_heartbeat(
            self.card.paths.heartbeat(0), Heartbeat(0, "n1", 1, "training", 7, time.time(), "100")
        )
        monkeypatch.setattr("tr11ops.watchdog.pulse.process", self.process)

    def process(
        self, sender: object, sight: AlertInput, deliver: bool, unmounted: str
    ) -> AlertOutcome:
        detectors = [finding.detector for finding in sight.found]
        self.alerts.append((detectors, sight.blind, sight.observed, deliver))
        self.situations.append(sight.situation)
        self.titles.append([finding.title for finding in sight.found])
        return AlertOutcome(notes=("the mail server is unreachable",))

    def pulse(self, reader: Any = None, actuator: Actuator | None = None, **options: Any) -> Pulse:
        run = WatchedRun(self.card, self.directory, reader or self.scheduler, "root")
        return take_pulse(run, actuator, **options)

    def log(self) -> list[str]:
        path = self.card.paths.main_log
        return path.read_text().splitlines() if path.exists() else []

    def files(self) -> set[str]:
        return {str(path) for path in self.directory.root.rglob("*")}


def no_launch(array: str, after: str | None) -> Any:
    raise AssertionError(f"launched {array} behind {after}")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_healthy_run_gets_one_line_and_leaves_nothing_else(scene: Scene) -> None:
    before = scene.files()
    first = scene.pulse()
    assert (first.verdict.word, first.state, first.verdict.exit_code) == (
        VerdictWord.HEALTHY,
        "running",
        0,
    )
    assert scene.log() == list(first.lines) and len(first.lines) == 1
    assert scene.files() - before == {
        str(scene.card.paths.main_log),
        str(scene.card.paths.logs),
    } | {
        str(parent)
        for parent in scene.card.paths.logs.parents
        if scene.directory.root in parent.parents
    }
    scene.pulse()
    assert len(scene.log()) == 2
    assert first.notes == ("the mail server is unreachable",) and scene.alerts[0][2:] == (
        True,
        True,
    )


def test_the_alert_is_logged_once_for_each_time_that_it_begins(scene: Scene) -> None:
    """A line every 20 s buried the cause of the end in the log."""
    gone = replace(scene.job, state=JobState.CANCELLED)
    for job in (gone, gone, scene.job, gone):
        scene.scheduler.put(job)
        scene.pulse()
    assert str(scene.log()).count("***ALERT") == 2


def test_the_alerts_hear_of_hidden_findings_and_of_no_email(scene: Scene) -> None:
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    assert scene.pulse(email=False).verdict.word is VerdictWord.DOWN
    assert scene.pulse(reader=Unknown("squeue did not answer")).observed
    (seen, _, _, sent), (hidden, blind, observed, _) = scene.alerts
    assert "down" in seen and not sent
    assert "down" not in hidden and "down" in blind and observed
    for beat in scene.card.paths.heartbeats.iterdir():
        beat.unlink()
    assert scene.pulse(reader=Unknown("squeue did not answer")).verdict.exit_code == 3
    assert scene.alerts[-1][2] is False


def test_the_mails_say_what_would_be_done(scene: Scene) -> None:
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    scene.pulse()
    (said,) = scene.situations
    assert [act.words for act in said.planned] == [
        "resubmit 1-3: nothing runs and nothing is queued"
    ]
    assert not said.may_act and said.why_not == "it may not act (`watch.act`, `pulse --act`)"


def test_a_mail_says_who_acts_where_another_watchdog_does(scene: Scene) -> None:
    """It said that tr11 may not act, while another watchdog of the run did."""
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    assert isinstance(acquire_lock(scene.card.paths), WatchdogLock)
    scene.pulse(actuator=Actuator(scene.scheduler, no_launch))
    (said,) = scene.situations
    assert not said.may_act and said.why_not.startswith("another watchdog is at work: ")


def test_a_fault_of_the_plan_keeps_no_one_uninformed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("tr11ops.watchdog.pulse.plan", broken)
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    with pytest.raises(KeyError):
        scene.pulse()
    assert "down" in scene.alerts[0][0] and not scene.situations[0].knows_acts


# ----------------------------------------------------------------------------- a hang
LATER = 4 * 3600.0  # no silence is normal for so long


def stopped(rank: int, node: str) -> CollectedStacks:
    """Rank `rank`, on that node, is stopped, and the other one waits for it."""
    waits = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2810),)
    workers = [
        WorkerStack(one, f"n{one + 1}", 100 + one, "T" if one == rank else "S", waits)
        for one in (0, 1)
    ]
    assert workers[rank].node == node
    return CollectedStacks(tuple(NodeStacks(worker.node, (worker,)) for worker in workers))


def test_a_hang_is_told_with_the_rank_that_the_stacks_name(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def collect(attempt: Any, *_: object, **__: object) -> CollectedStacks:
        asked.append(attempt.nodes)
        return stopped(1, "n2")

    monkeypatch.setattr("tr11ops.watchdog.stacks.collect", collect)
    dry = scene.pulse(now=lambda: time.time() + LATER, dry_run=True)
    assert asked == [] and "hangs: no sign of life" in dry.findings[0].title, (
        "a dry run leaves nothing behind"
    )
    for _ in range(2):
        scene.pulse(now=lambda: time.time() + LATER)
    assert asked == [("n1", "n2")], "one look at a hang is enough"
    assert [titles[0] for titles in scene.titles] == [
        "job 100 hangs: rank 1 on node n2 is stopped (SIGSTOP)"
    ] * 2


def test_a_hang_that_cannot_be_looked_at_is_told_in_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Event()

    def collect(*_: object, **__: object) -> CollectedStacks:
        over.wait()
        return CollectedStacks(())

    monkeypatch.setattr("tr11ops.watchdog.stacks.collect", collect)
    monkeypatch.setattr("tr11ops.watchdog.stacks.BEFORE_MAIL_SECONDS", 0.05)
    monkeypatch.setattr("tr11ops.watchdog.stacks.FILES_SECONDS", 0.05)
    try:
        seen = scene.pulse(now=lambda: time.time() + LATER)
        assert "hangs: no sign of life" in scene.titles[0][0]
        assert "the stacks of job 100 could not be taken: not done within 0.1 s" in seen.notes
        assert (
            seen.findings[0].fix.startswith("tr11 stacks --job 100 ")
            or seen.findings[0].fix == "tr11 stacks --job 100"
        )
    finally:
        over.set()


def test_a_dry_run_tells_no_one_and_writes_nothing(scene: Scene) -> None:
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    before = scene.files()
    found = scene.pulse(dry_run=True)
    assert scene.files() == before and scene.alerts == []
    assert any("***ALERT" in line for line in found.lines) and any(
        "would resubmit 1-3" in line for line in found.lines
    )


def test_a_run_never_launched_is_looked_at_and_not_created(tmp_path: Path) -> None:
    card = load_card(write_card(tmp_path), (), {})
    found = take_pulse(
        WatchedRun(
            card,
            RunDirectory(card.paths, card.kill_switch),
            DiskScheduler(tmp_path / "queue"),
            "root",
        ),
        None,
    )
    assert found.verdict.exit_code != 0 and not card.paths.root.exists()


@pytest.mark.parametrize("fault", ["full", "read-only", "folder"])
def test_an_unwritable_log_is_said_and_changes_no_verdict(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "folder":
        scene.card.paths.main_log.mkdir(parents=True)
    else:
        number = errno.ENOSPC if fault == "full" else errno.EROFS

        def refuse(path: Path, text: str) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(pulse_module, "append_line", refuse)
    found = scene.pulse()
    assert found.verdict.exit_code == 0 and "the run's log could not be written" in found.notes[0]
    assert len(scene.alerts) == 1


def test_a_tampered_journal_is_told_and_nothing_is_done(scene: Scene) -> None:
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    scene.directory.journal.mkdir(exist_ok=True)
    (scene.directory.journal / "evil-1.jsonl").write_text('{"time": 1}\n')
    found = scene.pulse()
    assert (
        found.plan.actions == ()
        and "something is not known: journal evil-1.jsonl" in found.lines[-1]
    )


# ----------------------------------------------------------------------------- the command
@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[LocalBench]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", str(NODES))
    monkeypatch.delenv("TR11_RUN", raising=False)
    under_test = LocalBench(tmp_path, capsys)
    try:
        yield under_test
    finally:
        under_test.clear()


def test_the_command_launches_what_is_gone_once_and_says_so(bench: LocalBench) -> None:
    """On the embedded scheduler whose nodes are taken: what is launched waits."""
    bench.block()
    words = ("--run", str(bench.card), "--no-email")
    assert bench.launch("--array", "1-2").code == 0
    (job,) = [job for job in bench.living() if job.name == "small"]
    waiting = bench.tr11("pulse", *words)
    assert waiting.code == 0 and "PULSE: small is waiting to be scheduled (" in waiting.out
    bench.scheduler.cancel(job.array_id or job.raw_id)
    bench.wait(lambda jobs: not any(one.name == "small" and not one.state.is_final for one in jobs))

    reported = bench.tr11("pulse", *words)
    assert (
        reported.code == 1
        and "***ALERT: small is not RUNNING or SCHEDULED! Alert someone at Eng WG***"
        in reported.out
    )
    assert "small: would resubmit 1-3: nothing runs and nothing is queued" in reported.out
    shown = bench.tr11("pulse", *words, "--act", "--dry-run", "--json")
    assert shown.json["dry_run"] and shown.json["actions"][0]["result"] is None
    assert not [job for job in bench.living() if job.name == "small"]

    done = bench.tr11("pulse", *words, "--act", "--json")
    value = done.json
    assert (value["schema"], value["verdict"], value["state"], value["exit_code"], done.code) == (
        1,
        "down",
        "down",
        1,
        1,
    )
    assert [(one["action"], one["result"]) for one in value["actions"]] == [("resubmit", "done")]
    (again,) = [job for job in bench.living() if job.name == "small"]
    assert again.raw_id in value["actions"][0]["message"] and len(again.pending_tasks) == 3
    quiet = bench.tr11("pulse", *words, "--act")
    assert quiet.code == 0 and "resubmit" not in quiet.out
    # not counted where it only looks
    assert [_resubmitted(bench, act) for act in ("true", "false")] == [1, 0]

    bench.scheduler.cancel(again.array_id or again.raw_id)
    bench.wait(lambda jobs: not any(one.name == "small" and not one.state.is_final for one in jobs))
    assert "resubmit 1-3" in bench.tr11("pulse", *words, "--act").out
    assert not [job for job in bench.living() if job.name == "small"], "twice without progress"
    log = (bench.folder / "run" / "small-logs" / "logs" / "main" / "main_log.txt").read_text()
    assert log.count("***ALERT") == 2 and log.count("submitted as job") == 1


def _resubmitted(bench: LocalBench, act: str) -> object:
    """What status sees of the day's budget."""
    card = load_card(bench.card, (f"watch.act={act}",), {})
    seen = observe(
        RunDirectory(card.paths, card.kill_switch), facts_of(card), bench.scheduler, time.time()
    )
    return seen.resubmitted


def test_a_launch_beside_a_namesake_is_repeated_beside_it(bench: LocalBench) -> None:
    bench.block()
    assert bench.launch("--array", "1-2").code == 0
    bench.card = write_card(bench.folder / "elsewhere")
    assert bench.launch("--array", "1-2").code == 1
    assert bench.launch("--array", "1-2", "--allow-namesake").code == 0
    mine = max(
        (job for job in bench.living() if job.name == "small"),
        key=lambda job: int(job.array_id or job.raw_id),
    )
    bench.scheduler.cancel(mine.array_id or mine.raw_id)
    bench.wait(lambda jobs: all(one.raw_id != mine.raw_id or one.state.is_final for one in jobs))
    done = bench.tr11("pulse", "--run", str(bench.card), "--no-email", "--act", "--json").json
    assert [(one["action"], one["result"]) for one in done["actions"]] == [("resubmit", "done")], (
        done["actions"]
    )


def test_a_launch_that_would_be_refused_is_told_in_the_alert_that_it_belongs_to(
    bench: LocalBench,
) -> None:
    """It stood in the watchdog's log alone, while the mail said that tr11 will launch now, and to
    type nothing.
    """
    bench.block()
    assert bench.launch("--array", "1-2").code == 0
    (job,) = [job for job in bench.living() if job.name == "small"]
    bench.scheduler.cancel(job.array_id or job.raw_id)
    bench.wait(lambda jobs: not any(one.name == "small" and not one.state.is_final for one in jobs))
    gone = bench.folder / "data" / "corpus.idx"
    gone.rename(bench.folder / "elsewhere.idx")
    mails = ("--set", 'alerts.recipients=["oncall@example.org"]', "--set", "alerts.smtp_port=9")
    bench.tr11("pulse", "--run", str(bench.card), "--act", *mails)
    directory = run_directory(bench)
    (alert,) = [
        one for one in read_alert_state(directory).alert_state.open_alerts if one.detector == "down"
    ]
    why = f"tr11 did not resubmit 1-3 (nothing runs and nothing is queued): data.prefixes: {gone}"
    assert alert.watchdog.startswith(why)
    body = " ".join(waiting_entries(directory)[0].message.body.split())
    assert why in body and "Type nothing now" not in body
    shown = bench.tr11("status", "--run", str(bench.card))
    assert "tr11 did not resubmit 1-3" in shown.out
    (document,) = bench.tr11("status", "--run", str(bench.card), "--json").json["alerts"]
    assert document["watchdog"] == alert.watchdog


def test_an_array_that_is_none_is_said_in_one_line(bench: LocalBench) -> None:
    bench.block()
    assert bench.launch("--array", "1-2").code == 0
    (job,) = [job for job in bench.living() if job.name == "small"]
    bench.scheduler.cancel(job.array_id or job.raw_id)
    bench.wait(lambda jobs: not any(one.name == "small" and not one.state.is_final for one in jobs))
    found = bench.tr11(
        "pulse",
        "--run",
        str(bench.card),
        "--no-email",
        "--act",
        "--json",
        "--set",
        "watch.resubmit_array=3-1",
    )
    (action,) = found.json["actions"]
    assert (action["result"], "3-1" in action["message"], found.code) == ("refused", True, 1)
    assert replay(read_journal(bench.folder / "run" / "journal")).unfinished == ()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--scheduler", "slurmm"), 2, "--scheduler 'slurmm'"),
        (("--run", "nowhere.toml"), 2, "nowhere.toml"),
    ],
)
def test_wrong_usage_is_one_line(
    bench: LocalBench, words: tuple[str, ...], code: int, said: str
) -> None:
    found = bench.tr11("pulse", *words)
    assert found.code == code and said in found.err


# ---------------------------------------------------------------------------- what it asks of Slurm


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def test_a_pass_asks_slurm_twice_at_most_and_once_if_silent(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as text, no jobs are no lines
    empty = 'case "$*" in *--json*) echo \'{"jobs": [], "errors": []}\';; esac'
    for name, value in slurm_commands(bench.folder, empty, "echo").items():
        monkeypatch.setenv(name, value)
    words = ("pulse", "--run", str(bench.card), "--no-email", "--scheduler", "slurm")
    assert bench.tr11(*words).code != 0
    assert calls(bench.folder) == ["squeue", "sinfo"]

    (bench.folder / "calls").unlink()
    monkeypatch.setattr(deadline, "SCHEDULER_SECONDS", 0.3)
    (bench.folder / "tools" / "squeue").write_text(
        f'#!/bin/sh\necho "squeue" >> {bench.folder}/calls\nexec sleep 60\n'
    )
    silent = bench.tr11(*words, "--act", "--json")
    assert (silent.code, silent.json["verdict"], silent.json["state"]) == (
        3,
        "unknown",
        "controller away",
    )
    assert (
        calls(bench.folder) == ["squeue"]
        and silent.json["actions"] == []
        and not silent.json["observed"]
    )
    assert not any("ALERT" in line for line in silent.json["lines"])


# ----------------------------------------------------------------------------- an emptied journal
def test_an_emptied_journal_spends_the_budgets_of_a_day(scene: Scene) -> None:
    """All that was done was counted in it: an empty one looked like a day on which nothing was
    done.
    """
    scene.scheduler.put(replace(scene.job, state=JobState.CANCELLED))
    journal = Journal(scene.directory.journal)
    journal.write("submitted")
    assert [action.name for action in scene.pulse().plan.actions] == ["resubmit"]
    journal.path.write_bytes(b"")
    journal.write("submitted")  # the next writer begins a chain that is sound
    for _ in range(2):
        seen = scene.pulse()
        assert seen.plan.actions == ()
        assert any("it was emptied or cut" in note for note in seen.notes)
        assert any("it was emptied or cut" in text for text in seen.plan.withheld)
    later = scene.pulse(now=lambda: time.time() + 86_500.0)
    assert [action.name for action in later.plan.actions] == ["resubmit"], (
        "its budgets are those of another day"
    )
    assert not any("emptied" in note for note in later.notes)


def test_a_journal_that_only_grows_is_never_taken_for_an_emptied_one(scene: Scene) -> None:
    writers = [Journal(scene.directory.journal, name) for name in ("a-1-0", "b-1-0")]
    for _ in range(3):
        for writer in writers:
            writer.write("submitted")
        assert not any("journal" in note for note in scene.pulse().notes)
    writers[0].path.unlink()
    assert any("journal/a-1-0.jsonl lacks what it held" in note for note in scene.pulse().notes)


JOB = "1234567"
STACK_NODES = ("n0", "n1", "n2")
WAITS = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2810),)


class Srun:
    """Answers for some nodes; rank 1, on n1, is stopped."""

    def __init__(self, *nodes: str, unreachable: bool = False):
        self.nodes, self.unreachable, self.asked = nodes, unreachable, list[list[str]]()

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        on_line: Callable[[str], object],
    ) -> CommandResult:
        self.asked.append(list(arguments))
        if self.unreachable:
            raise SchedulerUnreachable("srun cannot be started")
        for node in self.nodes:
            rank = int(node[1:])
            worker = WorkerStack(rank, node, 100 + rank, "T" if rank == 1 else "S", WAITS)
            for line in NodeStacks(node, (worker,)).lines():
                on_line(line)
        return CommandResult(1, "", "srun: error: n3: task 2: Exited with exit code 1\n")


def test_what_some_nodes_told_is_enough(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    assert read_kept_stacks(paths, JOB) is None
    srun = Srun("n0", "n1")
    reported = keep_stacks(paths, JOB, STACK_NODES, 3, {}, 5.0, follow=srun)
    assert (
        reported.startswith("the stacks of 2 nodes are in ")
        and "rank 1 on node n1 is stopped" in reported
    )
    assert read_kept_stacks(paths, JOB) is not None and {
        "--overlap",
        f"--jobid={JOB}",
        "--nodes=3",
    } <= set(srun.asked[0])
    kept = {path.name: path.read_text() for path in stacks_folder(paths, JOB).iterdir()}
    assert set(kept) == {"n0.txt", "n1.txt", "verdict.txt", "verdict.json"}
    assert kept["n0.txt"].startswith("rank 0, process 100, state S\n    all_reduce (torch/")
    assert kept["verdict.txt"].startswith(
        "rank 1 on node n1 is stopped (SIGSTOP); 1 rank waits for it in all-reduce"
    )


def test_no_word_from_any_node_is_an_error_and_no_evidence(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    with pytest.raises(
        SchedulerError, match="no node told the stacks of its workers: srun: error: n3"
    ):
        keep_stacks(paths, JOB, STACK_NODES, 3, {}, 5.0, follow=Srun())
    with pytest.raises(SchedulerUnreachable):
        keep_stacks(paths, JOB, STACK_NODES, 3, {}, 5.0, follow=Srun(unreachable=True))
    assert read_kept_stacks(paths, JOB) is None and stacks_folder(paths, JOB).is_dir()
