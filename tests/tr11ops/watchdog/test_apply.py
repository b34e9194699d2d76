"""Effects through the journal: killed at every point and run again, nothing is lost and nothing is
done twice.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.forks import exit_code, forked, killed_at
from tests.tr11ops.disk_scheduler import EFFECT, DiskScheduler
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.base.errors import NotDone, SchedulerUnreachable, Uncertain
from tr11ops.base.observed import Unknown
from tr11ops.cli.launch import prepare
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.launch import submit as submit_module
from tr11ops.observe.files import read_exclusions
from tr11ops.observe.look import facts_of, observe
from tr11ops.runcard.card import load_card
from tr11ops.rundir.action_log import ActionRecord, ProgressRecord, Result, replay
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.hold_store import held_by_tr11
from tr11ops.rundir.journal import Journal, read_journal
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag, parse_comment
from tr11ops.watchdog import pulse as pulse_module
from tr11ops.watchdog.actions import (
    Action,
    Cancel,
    Hold,
    Include,
    Release,
    Resubmit,
    Stacks,
)
from tr11ops.watchdog.apply import Done, carry_out, settle
from tr11ops.watchdog.pulse import (
    STALE_SECONDS,
    Actuator,
    Pulse,
    WatchdogLock,
    WatchedRun,
    acquire_lock,
    take_pulse,
)
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.symlink", "os.truncate", EFFECT}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class World:
    """A run with one job whose batch host is lost, nothing queued behind it, and a watchdog that
    may act.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("USER", "root")
        self.card_path = write_card(folder)
        extra = "\n[resilience]\nexclusion_cap_percent = 50\n"
        self.card_path.write_text(self.card_path.read_text() + extra)
        self.card = load_card(self.card_path, (), {})
        self.directory = RunDirectory(self.card.paths, self.card.kill_switch)
        self.scheduler = DiskScheduler(folder / "queue")
        self.tag = new_tag(time.time() - 7200)
        paths = self.card.paths
        record = Submission(
            self.tag,
            "100",
            "local",
            time.time() - 7200,
            "root",
            "h",
            "small",
            "main",
            None,
            2,
            "hash",
        )
        self.directory.write_submission(record)
        write_json(
            paths.attempt("100") / "attempt.json",
            {"nodes": ["n1", "n2"], "start": time.time() - 7000},
        )
        self.scheduler.put(
            Job(
                "100", "100", None, None, "small", "root", JobState.RUNNING, partition="p", nodes=("n1", "n2"),
                start_time=time.time() - 7000, submit_time=time.time() - 7200, comment=self.directory.comment(self.tag),
            )
        )  # fmt: skip
        self.scheduler.mark_down("n1")

    def actuator(self) -> Actuator:
        def launch(array: str, after: str | None) -> Any:
            job = prepare(str(self.card_path), [], "local", array=array, after=after)
            return replace(
                job, scheduler=self.scheduler, other_scheduler=lambda kind: self.scheduler
            )

        return Actuator(self.scheduler, launch)

    def pulse(self, act: bool = True) -> Pulse:
        run = WatchedRun(self.card, self.directory, self.scheduler, "root", str(self.card_path))
        return take_pulse(run, self.actuator() if act else None, email=False)

    def forget_turn(self) -> None:
        """As if the stated time had passed since a killed watchdog took its turn."""
        for path in (self.card.paths.state / "acting").glob("*.json"):
            os.utime(path, (time.time() - 3600, time.time() - 3600))

    def living(self) -> list[Job]:
        return [job for job in self.scheduler.jobs() if not job.state.is_final]

    def check_all_is_done_once(self) -> None:
        """The lost job is gone, its host excluded, and one launch waits, however many passes it
        took.
        """
        assert [job.state for job in self.scheduler.jobs() if job.job_id == "100"] == [
            JobState.CANCELLED
        ]
        submitted = [job for job in self.scheduler.jobs() if job.job_id != "100"]
        assert len(submitted) == 1 and submitted[0].state is JobState.PENDING, submitted
        listed = read_exclusions(self.directory.exclusions)
        assert not isinstance(listed, Unknown) and [entry.node for entry in listed] == ["n1"]
        assert submitted[0].excluded == ("n1",)
        records = {record.tag: record for record in self.directory.read_submissions()}
        mark = parse_comment(submitted[0].comment)
        assert mark is not None and records[mark[0]].job_id == submitted[0].job_id
        ledger = read_journal(self.directory.journal)
        assert ledger.is_sound and replay(ledger).unfinished == ()


@pytest.fixture
def world(memory: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (memory / "world").mkdir()
    return World(memory / "world", monkeypatch)


def test_a_zombie_is_excluded_cancelled_and_replaced_at_once(world: World) -> None:
    reported = world.pulse(act=False)
    assert [action.name for action in reported.plan.actions] == [
        "exclude",
        "cancel",
        "resubmit",
    ] and not reported.done
    assert any("would cancel 100: its batch host n1 is lost" in line for line in reported.lines)
    assert [job.job_id for job in world.living()] == ["100"] and not replay(
        read_journal(world.directory.journal)
    ).records
    done = world.pulse()
    assert [one.result for one in done.done] == [Result.DONE] * 3, done.done
    world.check_all_is_done_once()
    assert world.living()[0].dependency == "afterany:100"
    again = world.pulse()
    assert again.plan.is_empty and again.verdict.exit_code == 0
    world.check_all_is_done_once()


# --------------------------------------------------------------------------- kill -9 at every point
def test_killed_at_every_effect_nothing_is_lost_or_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it keeps its own books, with tests of their own
    monkeypatch.setattr(pulse_module, "_told", lambda run, pulse, **_: pulse)
    monkeypatch.setattr(submit_module, "LOOKUP_PAUSE_SECONDS", 0.0)
    before = shutil.copytree(world.folder, world.folder.with_name("before"))

    def is_effect(event: str, arguments: tuple[Any, ...]) -> bool:
        name = str(arguments[0]) if arguments else ""
        opened = event == "open" and bool(arguments[2] & WRITING) and str(world.folder) in name
        return (
            opened or event in CHANGES
        ) and "/.probe-" not in name  # a probe comes and goes, and means nothing

    def after(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            sys.audit(EFFECT, "after")
            return result

        return call

    def pulse() -> None:
        os.write, os.replace = after(os.write), after(os.replace)  # type: ignore[assignment]
        world.pulse()

    for point in itertools.count(1):
        for name in ("run", "queue"):
            shutil.rmtree(world.folder / name)
            shutil.copytree(before / name, world.folder / name)
        if not killed_at(point, pulse, is_effect):
            break
        world.forget_turn()
        again = world.pulse()
        try:
            world.check_all_is_done_once()
        except AssertionError as error:
            raise AssertionError(f"killed at point {point}: {again.lines}") from error
    world.check_all_is_done_once()
    assert point > 61
    assert world.pulse().plan.is_empty


# ---------------------------------------------------------------------------- two watchdogs at once
def test_of_two_at_once_one_acts_and_the_other_only_tells(world: World) -> None:
    watchdog_lock = acquire_lock(world.card.paths)
    assert isinstance(watchdog_lock, WatchdogLock)
    second = world.pulse()
    assert not second.acts and not second.done and len(second.plan.actions) == 3
    assert "nothing is done: another watchdog is at work" in second.notes[0] and [
        job.job_id for job in world.living()
    ] == ["100"]
    watchdog_lock.release()
    assert world.pulse().acts
    world.check_all_is_done_once()


@pytest.mark.parametrize(
    ("wrong_by", "said"), [(3630, "1 h 00 min ahead of"), (-3630, "1 h 00 min behind"), (5, "")]
)
def test_who_does_not_know_the_time_does_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, wrong_by: float, said: str
) -> None:
    real = time.time
    monkeypatch.setattr("trainer.contract.lease.time.time", lambda: real() + wrong_by)
    seen = world.pulse()
    assert seen.acts is not bool(said) and bool(seen.done) is not bool(said)
    assert (
        not said
        or f"nothing is done: this machine's clock is {said} the file system's" in seen.notes[0]
    )
    monkeypatch.undo()
    world.pulse()
    world.check_all_is_done_once()


def test_many_at_once_do_it_once(world: World) -> None:
    for child in [forked(world.pulse) for _ in range(4)]:
        assert exit_code(child) == 0
    world.pulse()
    world.check_all_is_done_once()


def test_who_slept_through_its_turn_does_nothing_more(world: World) -> None:
    """It wakes after another one has taken over, between two effects."""
    late: list[Pulse] = []

    class Sleeper(DiskScheduler):
        def cancel(self, job_id: str) -> None:
            world.forget_turn()
            late.append(world.pulse())
            super().cancel(job_id)

    sleeper = Sleeper(world.folder / "queue")
    run = WatchedRun(world.card, world.directory, sleeper, "root")
    slept = take_pulse(run, replace(world.actuator(), scheduler=sleeper), email=False)
    assert late[0].acts and [one.result for one in late[0].done] == [Result.DONE, Result.DONE]
    assert [one.result for one in slept.done] == [Result.DONE, Result.DONE, Result.REFUSED]
    assert "another watchdog has taken over" in slept.done[-1].message
    world.check_all_is_done_once()


def test_a_switch_set_between_look_and_effect_stops_the_rest(world: World) -> None:
    class Person(DiskScheduler):
        def cancel(self, job_id: str) -> None:
            super().cancel(job_id)
            world.directory.kill_switch.touch()

    person = Person(world.folder / "queue")
    run = WatchedRun(world.card, world.directory, person, "root")
    seen = take_pulse(run, replace(world.actuator(), scheduler=person), email=False)
    assert [one.result for one in seen.done] == [Result.DONE, Result.DONE, Result.REFUSED]
    assert seen.done[-1].message == "kill-switch was set meanwhile" and not world.living()


def test_a_turn_is_taken_over_by_the_file_servers_clock(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    first = acquire_lock(paths)
    assert isinstance(first, WatchdogLock) and first.is_ours()
    assert "another watchdog is at work: root on" in str(acquire_lock(paths))
    (claim,) = (tmp_path / "state" / "acting").glob("[0-9]*.json")
    os.utime(claim, (time.time() - STALE_SECONDS - 5,) * 2)
    second = acquire_lock(paths)
    assert isinstance(second, WatchdogLock) and second.is_ours() and not first.is_ours()
    first.release()  # it must not end the turn of the other
    assert isinstance(acquire_lock(paths), str)
    second.release()
    assert isinstance(acquire_lock(paths), WatchdogLock)
    claim.write_text("{")
    assert isinstance(acquire_lock(paths), str)


# ------------------------------------------------------------------------ what the world may answer
class Answers:
    """Effects that fail in a given way."""

    def __init__(self, error: Exception | None = None):
        self.error, self.asked = error, list[str]()

    def carry_out(self, action: Action, tag: str) -> str:
        self.asked.append(action.name)
        if self.error is not None:
            raise self.error
        return "fine"


def act(
    journal: Journal, effects: Answers, *actions: Action, stopped: str = ""
) -> tuple[Done, ...]:
    return carry_out(
        actions,
        effects.carry_out,
        journal,
        stopped=lambda: stopped,
        progress=ProgressRecord(7, 5),
        now=time.time(),
    )


CANCEL, HOLD = Cancel("7", "why", "cancel:7", owes=2), Hold("8", "why", "hold:8")


@pytest.mark.parametrize(
    ("error", "result"),
    [(None, "done"), (NotDone("no"), "refused"), (Uncertain("lost"), "unknown")],
)
def test_every_outcome_is_in_the_journal(
    tmp_path: Path, error: Exception | None, result: str
) -> None:
    done = act(Journal(tmp_path), Answers(error), CANCEL, HOLD)
    history = replay(read_journal(tmp_path))
    assert (
        [one.result for one in done]
        == [result] * 2
        == [action_record.result for action_record in history.records]
    )
    assert next(
        (action_record.action, action_record.owes, action_record.progress)
        for action_record in history.records
    ) == ("cancel", 2, ProgressRecord(7, 5))
    assert all(one.words().startswith(f"{one.action.name} ") for one in done)


def test_without_a_journal_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the folder belongs")
    effects = Answers()
    done = act(Journal(tmp_path / "journal"), effects, CANCEL, HOLD)
    assert effects.asked == [] and [one.result for one in done] == [Result.REFUSED]
    assert "the run directory cannot be written" in done[0].message


def test_what_comes_after_an_action_does_not_come_without_it(tmp_path: Path) -> None:
    stacks = Stacks("7", "why", "stacks:7")
    after = replace(CANCEL, only_after="stacks:7")
    failing = Answers(NotDone("no node answered"))
    assert [one.result for one in act(Journal(tmp_path), failing, stacks, after)] == [
        Result.REFUSED
    ] * 2
    assert failing.asked == ["stacks"]
    assert [one.result for one in act(Journal(tmp_path), Answers(), stacks, after)] == [
        Result.DONE
    ] * 2


def test_whose_turn_is_over_does_nothing(tmp_path: Path) -> None:
    effects = Answers()
    assert [one.result for one in act(Journal(tmp_path), effects, CANCEL, stopped="not now")] == [
        Result.REFUSED
    ]
    assert effects.asked == [] and read_journal(tmp_path).entries == ()


def test_a_lost_answer_is_unknown_and_settled_by_looking(world: World) -> None:
    class Silent(DiskScheduler):
        def cancel(self, job_id: str) -> None:
            super().cancel(job_id)
            raise SchedulerUnreachable("no answer")

    silent = Silent(world.folder / "queue")
    run = WatchedRun(world.card, world.directory, silent, "root")
    lost = take_pulse(run, replace(world.actuator(), scheduler=silent), email=False)
    assert [one.result for one in lost.done] == [Result.DONE, Result.UNKNOWN, Result.DONE]
    found = world.pulse()
    assert [(action_record.action, action_record.result) for action_record in found.settled] == [
        ("cancel", Result.DONE)
    ]
    assert any(
        "an earlier pass began to cancel 100: seen later: it is gone" in line
        for line in found.lines
    )
    world.check_all_is_done_once()


@pytest.mark.parametrize(
    ("action_record", "state", "expected"),
    [
        (("cancel", "100"), JobState.RUNNING, Result.REFUSED),
        (("cancel", "100"), JobState.CANCELLED, Result.DONE),
        (("cancel", "999"), JobState.RUNNING, Result.DONE),
        (("hold", "100"), JobState.PENDING, Result.REFUSED),
        (("release", "100"), JobState.PENDING, Result.DONE),
        (("exclude", "n5"), JobState.RUNNING, Result.REFUSED),
        (("resubmit", "1-3"), JobState.RUNNING, Result.REFUSED),
        (("paint", "100"), JobState.RUNNING, Result.REFUSED),
    ],
)
def test_what_became_of_a_action_is_found_by_looking(
    world: World, action_record: tuple[str, str], state: JobState, expected: Result
) -> None:
    (job,) = world.scheduler.jobs()
    world.scheduler.put(replace(job, state=state))
    seen = observe(world.directory, facts_of(world.card), world.scheduler, time.time())
    begun = ActionRecord(
        "1",
        action_record[0],
        action_record[1],
        "x",
        time.time() - 60,
        tag="20220501-000000-00000000",
    )
    journal = Journal(world.directory.journal)
    (settled,) = settle((begun,), seen, world.directory, journal)
    assert settled.result == expected and settled.message
    assert settle((begun,), replace(seen, jobs=Unknown("away")), world.directory, journal) == ()


def test_holds_and_releases_go_through_the_record_of_holds(world: World) -> None:
    number = world.scheduler.submit(replace_request(world))
    effects = pulse_module._effects(
        WatchedRun(world.card, world.directory, world.scheduler, "root"),
        world.actuator(),
        observe(world.directory, facts_of(world.card), world.scheduler, time.time()),
    )
    assert effects.carry_out(Hold(number, "why", "hold"), "") == "held"
    held = world.scheduler.job(number)
    assert (
        held is not None
        and held.reason == "JobHeldUser"
        and number in held_by_tr11(world.directory)
    )
    assert effects.carry_out(Release(number, "why", "release"), "") == "released"
    assert number not in held_by_tr11(world.directory)
    with pytest.raises(NotDone, match="there is no job"):
        effects.carry_out(Hold("12345", "why", "hold"), "")
    with pytest.raises(NotDone, match="already running"):
        effects.carry_out(Resubmit("1-3", "why", "resubmit"), new_tag())


def test_a_node_let_in_again_stays_out_of_queued_jobs_where_the_card_excludes_it(
    world: World,
) -> None:
    text = world.card_path.read_text()
    world.card_path.write_text(text.replace("[slurm]", '[slurm]\nexclude = ["n[4-5]"]'))
    number = world.scheduler.submit(replace(replace_request(world), exclude=("n3", "n4", "n5")))
    for node in ("n3", "n4"):
        exclude(world.directory, node, why="", owner="tr11", days=1, state=NodeStanding.AVOID)
    effects = pulse_module._effects(
        WatchedRun(load_card(world.card_path, (), {}), world.directory, world.scheduler, "root"),
        world.actuator(),
        observe(world.directory, facts_of(world.card), world.scheduler, time.time()),
    )
    for node in ("n3", "n4"):
        assert effects.carry_out(Include(node, "why", "include"), "") == "may be used again"
    assert read_exclusions(world.directory.exclusions) == ()
    queued = world.scheduler.job(number)
    assert queued is not None and queued.excluded == ("n4", "n5")


def test_queued_jobs_are_not_cancelled_for_a_refused_launch(world: World) -> None:
    """The queue is not emptied first: the card no longer fits the cluster, so the old work keeps
    its place.
    """
    number = world.scheduler.submit(replace_request(world))
    seen = observe(world.directory, facts_of(world.card), world.scheduler, time.time())
    effects = pulse_module._effects(
        WatchedRun(world.card, world.directory, world.scheduler, "root"), world.actuator(), seen
    )
    text = world.card_path.read_text()
    world.card_path.write_text(text.replace("[slurm]", '[slurm]\npartition = "closed"'))
    relaunch = Resubmit("1-1", "why", "resubmit", after="100", replaces=(number,))
    cancel = Cancel(number, "why", "cancel", owes=1, relaunch=relaunch)
    with pytest.raises(
        NotDone,
        match=r"the launch that would take its place is refused: .*'closed' is not a partition",
    ):
        effects.carry_out(cancel, "")
    assert number in {job.raw_id for job in world.living()}
    world.card_path.write_text(text)
    assert effects.carry_out(cancel, "") == "cancelled"


def replace_request(world: World) -> BatchRequest:
    return BatchRequest(
        "true", "small", 2, 60, "out", world.folder, comment=world.directory.comment(new_tag())
    )
