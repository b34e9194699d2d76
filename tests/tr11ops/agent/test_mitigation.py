"""What a failing attempt does about its nodes: an exclusion and its record are one act, in both
directions.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.agent.queues import Queue, job
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.status_cases import NOW, running, snapshot
from tr11ops.agent import controller as controller_module, mitigation
from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.controller import Controller
from tr11ops.agent.mitigation import ConcurrentAttempt, Mitigation, concurrent_attempt
from tr11ops.agent.recurrence import NodeFault
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node, is_loss_alone, lost_words
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.observe.jobs import held_jobs
from tr11ops.observe.liveness import gone_host
from tr11ops.observe.snapshot import Attempt
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.runcard.card import load_card
from tr11ops.rundir.attempts import of_failure
from tr11ops.rundir.exclusion import GOOD_SECONDS, Exclusion
from tr11ops.rundir.exclusions import (
    AUTOMATIC_OWNER,
    EXCLUDED,
    INCLUDED,
    include,
    read_version,
    revise,
)
from tr11ops.rundir.hold_store import forget_holds, held_by_tr11, read_holds
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, parse_comment
from trainer.contract.paths import ATTEMPT_FILE

FOUND = Attribution(Kind.NODE, "rank 3 on x2: ended by SIGSEGV", 0.85, ("x2",), fault="died at 3")


class Scene:
    """An attempt whose array waits, in a folder."""

    def __init__(self, folder: Path) -> None:
        card = load_card(write_card(folder), ["slurm.exclude=['x[8-9]']"], {}, directory=folder)
        self.directory = RunDirectory(card.paths, card.kill_switch)
        self.queue = Queue(job("7", "7", excluded=("x8",)))
        waiting = PendingJobs(self.queue, self.directory, "7", lambda _: None, pause=lambda _: None)  # type: ignore[arg-type]
        self.log = card.paths.main_log
        allocation = Allocation("slurm", "11", "7", 4, ())
        queue: Any = self.queue
        self.context = AttemptContext(card, allocation, {}, "", ordering=queue)
        self.mitigation = Mitigation(self.context, waiting, LineTee(self.log))
        self.exclusions = self.mitigation.exclusions

    @property
    def excluded(self) -> tuple[str, ...]:
        return self.queue.waiting["7"].excluded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield Scene(tmp_path)


def test_a_bad_node_is_on_the_list_and_in_the_queue(scene: Scene):
    scene.exclusions.exclude_nodes(FOUND)
    scene.mitigation.wait()
    assert scene.excluded == ("x2", "x8") and not scene.exclusions.refused


SUSPECTED = replace(FOUND, blamed=(), suspects=("x2",))


def test_a_suspect_is_on_record_and_used_on_until_it_is_avoided(scene: Scene):
    scene.exclusions.exclude_nodes(SUSPECTED)
    scene.mitigation.wait()
    version = read_version(scene.directory.exclusions)
    assert (version.exclusions, scene.excluded) == ((), ("x8",))
    [entry] = version.suspects
    assert (entry.node, entry.state, entry.fault, entry.why) == (
        "x2",
        "suspect",
        "died",
        FOUND.summary,
    )
    scene.exclusions.exclude_nodes(replace(SUSPECTED, avoided=("x2",)))
    scene.mitigation.wait()
    version = read_version(scene.directory.exclusions)
    assert [(one.node, one.state) for one in version.exclusions] == [
        ("x2", "avoid")
    ] and not version.suspects
    assert scene.excluded == ("x2", "x8")


def test_the_newest_suspicion_of_a_node_is_on_record(scene: Scene):
    """Also of one that came back. The count of good training begins again with it."""
    known = [
        Exclusion(
            node, "before", "tr11", None, since=1.0, state=state, fault="hung", good_seconds=60.0
        )
        for node, state in (("x2", "suspect"), ("x4", "returned"), ("x5", "returned"))
    ]
    revise(scene.directory, lambda version: replace(version, suspects=tuple(known)))
    scene.exclusions.exclude_nodes(replace(SUSPECTED, suspects=("x2", "x4")))
    scene.mitigation.wait()
    new, back, other = read_version(scene.directory.exclusions).suspects
    for entry in (new, back):
        assert (entry.state, entry.fault, entry.why) == ("suspect", "died", FOUND.summary)
        assert entry.good_seconds == 0.0 and (entry.since or 0.0) > 1.0
    assert other == known[2]


def test_a_node_that_is_surely_bad_takes_the_place_of_one_that_is_avoided(scene: Scene):
    """Where it is not known how many nodes there are, one may be excluded."""
    scene.exclusions.exclude_nodes(replace(SUSPECTED, suspects=("x1",), avoided=("x1",)))
    scene.exclusions.exclude_nodes(FOUND)
    scene.mitigation.wait()
    version = read_version(scene.directory.exclusions)
    assert [(one.node, one.state) for one in version.exclusions] == [("x2", "exclude")]
    assert [(one.node, one.state) for one in version.suspects] == [("x1", "suspect")]
    assert scene.excluded == ("x2", "x8") and not scene.exclusions.refused
    scene.exclusions.exclude_nodes(replace(FOUND, blamed=("x3",)))
    scene.mitigation.wait()
    # an exclusion gives way to none
    assert scene.excluded == ("x2", "x8") and scene.exclusions.refused


def test_good_training_gives_an_avoided_node_back_and_clears_a_suspect(scene: Scene):
    scene.exclusions.exclude_nodes(replace(SUSPECTED, avoided=("x2",)))
    for seconds, states, excluded in (
        (GOOD_SECONDS / 2, ["avoid"], ("x2", "x8")), (GOOD_SECONDS / 2, ["suspect"], ("x8",)),
        (GOOD_SECONDS - 1, ["suspect"], ("x8",)), (1.0, [], ("x8",)),
    ):  # fmt: skip
        scene.exclusions.note_good_use(["x1", "x2"], seconds)
        scene.mitigation.wait()
        version = read_version(scene.directory.exclusions)
        assert [one.state for one in (*version.exclusions, *version.suspects)] == states
        assert scene.excluded == excluded
    scene.exclusions.exclude_nodes(FOUND)
    scene.exclusions.note_good_use(["x2"], 10 * GOOD_SECONDS)
    scene.mitigation.wait()
    assert scene.excluded == ("x2", "x8")  # an exclusion ends by a check


def test_the_task_without_the_suspects_tells(scene: Scene):
    """It trains: they are avoided. It fails the same way: nothing is left against them. The queue
    follows.
    """
    found = []
    scene.exclusions.prepare()
    for trains in (True, False):
        assert scene.exclusions.try_without(("x2",), "died at 3", "2 tasks")
        assert [(entry.node, entry.fault) for entry in scene.exclusions.trial()] == [("x2", "died")]
        assert scene.excluded == ("x2", "x8")
        if trains:
            scene.exclusions.step_up(scene.exclusions.trial())
        else:
            scene.exclusions.end_trial("it failed", ["x2"])
        scene.mitigation.wait()
        version = read_version(scene.directory.exclusions)
        found.append(
            (
                [(one.node, one.state) for one in version.exclusions],
                version.suspects,
                scene.excluded,
            )
        )
        include(scene.directory, "x2", why="for the next try", owner="ana")
    assert found == [([("x2", "avoid")], (), ("x2", "x8")), ([], (), ("x8",))]


def test_where_the_queue_cannot_be_kept_off_them_no_task_is_tried(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise SchedulerError("no")

    monkeypatch.setattr(scene.queue, "exclude", refuse)
    assert not scene.exclusions.try_without(("x2",), "died at 3", "2 tasks")
    assert not scene.exclusions.trial()


def test_an_exclusion_waits_for_no_hold(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """Slurm may refuse for minutes to have the queued jobs held, or put in order."""
    may_answer = threading.Event()
    monkeypatch.setattr(scene.queue, "run_after", lambda *_: may_answer.wait(300))
    scene.mitigation.queue_behind("11")
    try:
        scene.exclusions.exclude_nodes(FOUND)
        deadline = time.monotonic() + 300
        while scene.excluded != ("x2", "x8"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        may_answer.set()
    scene.mitigation.wait()


def test_without_a_record_the_queue_keeps_its_list(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "/run/state/exclusions.d")

    monkeypatch.setattr("tr11ops.rundir.exclusions._commit", refuse)
    scene.exclusions.exclude_nodes(FOUND)
    scene.mitigation.wait()
    assert scene.excluded == ("x8",)
    [(node, why)] = scene.exclusions.refused
    assert node == "x2" and "Read-only file system" in why
    assert "x2 is not excluded: the run's list cannot be written" in scene.log.read_text()


def test_only_what_is_taken_back_leaves_list_and_queue(scene: Scene):
    for node in ("x2", "x8"):
        assert exclude(scene.directory, node, why=FOUND.summary, owner="tr11", days=3, job_id="11")
    assert exclude(scene.directory, "x5", why="Xid 79", owner="ana", days=3)
    scene.exclusions.refresh()
    assert scene.excluded == ("x2", "x5", "x8")
    fault = NodeFault("11", 1, FOUND.fault, 7, ("x2", "x5", "x8"), FOUND.summary)
    scene.exclusions.take_back((fault,), "it came back on x4")
    scene.mitigation.wait()
    assert [entry.node for entry in read_version(scene.directory.exclusions).exclusions] == ["x5"]
    assert scene.excluded == ("x5", "x8")  # x8 is the card's own
    back = [
        entry for entry in read_journal(scene.directory.journal).entries if entry.kind == INCLUDED
    ]
    assert [(entry.data["node"], entry.why, entry.who) for entry in back] == [
        ("x2", "it came back on x4", "tr11"), ("x8", "it came back on x4", "tr11"),
    ]  # fmt: skip


def test_a_silent_scheduler_lets_a_node_be_excluded(scene: Scene):
    both = replace(FOUND, blamed=("x2", "x3"))
    scene.exclusions.exclude_nodes(both)
    scene.mitigation.wait()
    assert [node for node, _ in scene.exclusions.refused] == [
        "x3"
    ] and scene.exclusions.why_left_in_use().startswith("x3 cannot be excluded: ")
    assert "exclude x3 all the same: `tr11 nodes exclude x3 --force " in scene.log.read_text()
    assert scene.excluded == ("x2", "x8")
    assert "tr11: queued job 7 will not use x2" in scene.log.read_text()


def test_a_node_that_a_person_excluded_since_is_not_left_in_use(scene: Scene):
    """An attempt outlives a first bad node on a spare, and stops at the next: it is held for that
    one alone.
    """
    for node in ("x2", "x3", "x4"):
        scene.exclusions.exclude_nodes(replace(FOUND, blamed=(node,)))
    scene.mitigation.wait()
    both = scene.exclusions.why_left_in_use()
    assert both.startswith("x[3-4] cannot be excluded: ")
    assert exclude(scene.directory, "x3", why="lost", owner="ana", days=3)
    one = scene.exclusions.why_left_in_use()
    assert one.startswith("x4 cannot be excluded: ")
    assert "`" not in both + one, "what is typed then is one advice, by the nodes of that moment"
    assert exclude(scene.directory, "x4", why="lost", owner="ana", days=3)
    assert scene.exclusions.why_left_in_use() == ""


def test_where_the_list_cannot_be_read_a_bad_node_counts_as_left_in_use(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    scene.exclusions.exclude_nodes(replace(FOUND, blamed=("x2", "x3")))
    scene.mitigation.wait()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tr11ops.agent.node_exclusions.read_version", fail)
    assert scene.exclusions.why_left_in_use().startswith("x3 cannot be excluded: ")


@pytest.mark.parametrize("is_refused", [True, False])
def test_what_could_not_be_released_stays_on_record(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_refused: bool
):
    """Else `tr11 resume` would not know it for tr11's, and it would wait for ever."""

    def refuse(job_id: str) -> None:
        raise SchedulerError(f"{job_id} refused")

    if is_refused:
        monkeypatch.setattr(scene.queue, "release", refuse)
    scene.mitigation.hold("pause")
    scene.mitigation.release()
    scene.mitigation.wait()
    assert held_by_tr11(scene.directory) == ({"7"} if is_refused else set())
    assert is_held(scene.queue.waiting["7"]) is is_refused


@pytest.mark.parametrize("switch", ["", "pause"])
@pytest.mark.parametrize("is_away", [True, False])
def test_a_hold_while_the_run_directory_is_away_has_a_name(
    scene: Scene, is_away: bool, switch: str
):
    """The held job's comment says who holds it and why; its mark of the run stays, and a release
    ends it.
    """
    job, directory = scene.queue.waiting["7"], scene.directory
    scene.queue.waiting["7"] = replace(job, comment=directory.comment("20260101-000000-00000000"))
    if not is_away:
        directory.paths.attempt("11").mkdir(parents=True)
        (directory.paths.attempt("11") / "attempt.json").write_text("{}")
    scene.mitigation.finish(
        of_failure("the lease is not in state/lease", 5, 5), hold="superseded", switch=switch
    )
    held = scene.queue.waiting["7"]
    assert is_held(held) and parse_comment(held.comment) == (
        "20260101-000000-00000000",
        directory.mark,
    )
    assert ("held-by-tr11@" in held.comment) is is_away
    assert ("is in the comment of job 7" in scene.log.read_text()) is is_away
    assert "tr11: attempt 7_4 ended: " in scene.log.read_text(), "as people type it"
    # the file system is back, with nothing of what was written meanwhile
    shutil.rmtree(directory.root)
    directory.paths.state.mkdir(parents=True)
    records = read_holds(directory, [held])
    if not is_away:
        assert records == ()
        return
    [record] = records
    assert (record.job, record.who, record.why) == ("7", AUTOMATIC_OWNER, "superseded")
    assert record.is_for_fault is (not switch)
    assert held_jobs([held], [record.job]).ours == (held,)
    forget_holds(directory, ["7"])
    assert read_holds(directory, [held]) == ()


def test_a_job_without_its_batch_host_is_ended_alone(scene: Scene, tmp_path: Path):
    """The last task of an array to begin has the array's own number, which would end all others."""
    folder = scene.directory.paths.attempt("7")
    folder.mkdir(parents=True)
    (folder / ATTEMPT_FILE).write_text(json.dumps({"array_id": "7", "task_id": 4}))
    ended: list[str] = []
    scheduler: Any = SimpleNamespace(cancel=ended.append)
    context = replace(scene.context, scheduler=scheduler)
    mitigation = Mitigation(context, None, LineTee(scene.log))
    mitigation.cancel("7")
    mitigation.wait()
    assert ended == ["7_4"]


@pytest.mark.parametrize("is_seen_before", [False, True])
def test_a_batch_host_that_is_gone_is_left_out_by_the_task_that_ends_its_job(
    scene: Scene, is_seen_before: bool
):
    """Its own controller died with it. One that Slurm does not call gone stays. Where the watchdog has
    excluded it, that is not journaled again.
    """
    folder = scene.directory.paths.attempt("9")
    folder.mkdir(parents=True)
    (folder / ATTEMPT_FILE).write_text(json.dumps({"array_id": "1", "task_id": 9}))
    controller: Any = SimpleNamespace(_context=scene.context, _exclusions=scene.exclusions)
    Controller._leave_out_dead_host(controller, ConcurrentAttempt("9", True, 0.0))
    scene.mitigation.wait()
    assert not read_version(scene.directory.exclusions).exclusions
    if is_seen_before:
        exclude(scene.directory, "x2", why=lost_words(["x2"]), owner="tr11", days=14, job_id="9")
    Controller._leave_out_dead_host(controller, ConcurrentAttempt("9", True, 0.0, "x2"))
    scene.mitigation.wait()
    journaled = read_journal(scene.directory.journal).entries
    assert [one.data["job_id"] for one in journaled if one.kind == EXCLUDED] == ["9"], "once"
    (entry,) = read_version(scene.directory.exclusions).exclusions
    assert (entry.node, entry.evidence) == (
        "x2",
        ("x2 is down, and ran the batch script of job 1_9",),
    )
    assert is_loss_alone(entry.why), "it comes back as any node that was lost once"


@pytest.mark.parametrize(
    ("states", "gone"),
    [({"down"}, "n01"), ({"allocated", "not_responding"}, ""), ({"allocated"}, ""), (None, "")],
)
def test_a_batch_host_is_gone_only_where_the_scheduler_says_so_now(
    states: set[str] | None, gone: str
):
    nodes = Unknown("no answer") if states is None else (Node("n01", frozenset(states)),)
    attempts = (Attempt("1007", NOW, None, "1000_7", nodes=("n01", "n02")),)
    job = running(nodes=("n02",))
    assert gone_host(snapshot(jobs=(job,), nodes=nodes, attempts=attempts), job) == gone


@pytest.mark.parametrize("submission_of_older", ["", "another"])
def test_an_attempt_that_trains_is_seen_though_an_older_one_ended_after_its_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, submission_of_older: str
):
    """The older one had lost its batch host: the newer one waited for it to save and leave."""
    paths = scene.directory.paths
    for name, submission in (("5", submission_of_older), ("6", "")):
        paths.attempt(name).mkdir(parents=True)
        (paths.attempt(name) / ATTEMPT_FILE).write_text(json.dumps({"submission": submission}))
    os.utime(paths.attempt("6") / ATTEMPT_FILE, (1.0, 1.0))
    of_failure("its batch host was lost", 5, 5).write(paths.attempt("5"))
    training = running(raw_id="6")
    monkeypatch.setattr(mitigation, "observe", lambda *_: snapshot(jobs=(training,), attempts=()))
    scheduler: Any = SimpleNamespace(job={"6": training}.get)
    other = concurrent_attempt(scene.context, scheduler)
    assert other is not None and (other.job_id, other.is_zombie) == ("6", False)
    of_failure("the time limit", 6, 6).write(paths.attempt("6"))
    assert concurrent_attempt(scene.context, scheduler) is None


def test_a_silent_scheduler_does_not_say_that_no_other_attempt_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    """It began to train beside another one, and took trainers that it had asked to leave for gone."""
    silent = SchedulerError("slurmctld does not answer")
    other = ConcurrentAttempt("9", True, 60.0)
    answers: list[Any] = []

    def look(*_: object) -> ConcurrentAttempt | None:
        answer = answers.pop(0)
        if isinstance(answer, SchedulerError):
            raise answer
        return answer

    said: list[str] = []
    monkeypatch.setattr(controller_module, "concurrent_attempt", look)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    controller: Any = SimpleNamespace(
        _context=scene.context,
        _stop=SimpleNamespace(received=False),
        _say=said.append,
        _paths=scene.directory.paths,
    )
    scheduler: Any = None
    answers[:] = [silent, silent, other]
    assert Controller._attempt_beside(controller, scheduler) is other
    answers[:] = [silent, replace(other, seconds_to_wait=0.0)]
    left = Controller._wait_for_trainers(controller, other, scheduler)
    assert left is not None and not left.seconds_to_wait and not answers
    controller._stop.received = True
    answers[:] = [silent]
    assert Controller._attempt_beside(controller, scheduler) is None
    assert said[-1] == "whether another attempt runs is not known: slurmctld does not answer"
