"""What a failing attempt does about its nodes: an exclusion and its record are one act, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tr11ops.agent.queues import Queue, job
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent.mitigation import ActingAttempt, Mitigation
from tr11ops.agent.recurrence import NodeFault
from tr11ops.agent.step import LineTee
from tr11ops.cluster.base import SchedulerError
from tr11ops.cluster.pending import is_held
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.queue.pending import PendingJobs
from tr11ops.runcard.card import load_card
from tr11ops.rundir.exclusions import INCLUDED, exclude, read_version
from tr11ops.rundir.holds import held_by_tr11
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory

FOUND = Attribution(Kind.NODE, "rank 3 on x2: ended by SIGSEGV", 0.85, ("x2",), fault="died at 3")


class Scene:
    """An attempt whose array waits, in a folder."""

    def __init__(self, folder: Path) -> None:
        card = load_card(write_card(folder), ["slurm.exclude=['x[8-9]']"], {}, directory=folder)
        self.directory = RunDirectory(card.paths, card.kill_switch)
        self.queue = Queue(job("7", "7", excluded=("x8",)))
        waiting = PendingJobs(self.queue, self.directory, "7", lambda _: None, pause=lambda _: None)  # type: ignore[arg-type]
        self.log = card.paths.main_log
        attempt = ActingAttempt(card, self.directory, "11", "", 2)
        self.mitigation = Mitigation(attempt, None, waiting, LineTee(self.log))

    @property
    def excluded(self) -> tuple[str, ...]:
        return self.queue.waiting["7"].excluded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield Scene(tmp_path)


def test_a_bad_node_is_on_the_list_and_in_the_queue(scene: Scene):
    scene.mitigation.exclude_nodes(FOUND)
    scene.mitigation.wait()
    assert scene.excluded == ("x2", "x8") and not scene.mitigation.refused


def test_without_a_record_the_queue_keeps_its_list(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "/run/state/exclusions.d")

    monkeypatch.setattr("tr11ops.rundir.exclusions._commit", refuse)
    scene.mitigation.exclude_nodes(FOUND)
    scene.mitigation.wait()
    assert scene.excluded == ("x8",)
    [(node, why)] = scene.mitigation.refused
    assert node == "x2" and "Read-only file system" in why
    assert "x2 is not excluded: the run's list cannot be written" in scene.log.read_text()


def test_only_what_is_taken_back_leaves_list_and_queue(scene: Scene):
    for node in ("x2", "x8"):
        assert exclude(scene.directory, node, why=FOUND.summary, owner="tr11", days=3, job_id="11")
    assert exclude(scene.directory, "x5", why="Xid 79", owner="ana", days=3)
    scene.mitigation.refresh()
    assert scene.excluded == ("x2", "x5", "x8")
    fault = NodeFault("11", 1, FOUND.fault, 7, ("x2", "x5", "x8"), FOUND.summary)
    scene.mitigation.take_back((fault,), "it came back on x4")
    scene.mitigation.wait()
    assert [entry.node for entry in read_version(scene.directory.exclusions).exclusions] == ["x5"]
    assert scene.excluded == ("x5", "x8")  # x8 is the card's own
    back = [entry for entry in read_journal(scene.directory.journal).entries if entry.kind == INCLUDED]
    assert [(entry.data["node"], entry.why, entry.who) for entry in back] == [
        ("x2", "it came back on x4", "tr11"), ("x8", "it came back on x4", "tr11"),
    ]  # fmt: skip


def test_a_silent_scheduler_lets_a_node_be_excluded(scene: Scene):
    both = replace(FOUND, blamed=("x2", "x3"))
    scene.mitigation.exclude_nodes(both)
    scene.mitigation.wait()
    assert [node for node, _ in scene.mitigation.refused] == ["x3"] and "x3 --force" in scene.mitigation.refused[0][1]
    assert scene.excluded == ("x2", "x8")
    assert "tr11: queued job 7 will not use x2" in scene.log.read_text()


@pytest.mark.parametrize("is_refused", [True, False])
def test_what_could_not_be_released_stays_on_record(scene: Scene, monkeypatch: pytest.MonkeyPatch, is_refused: bool):
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
