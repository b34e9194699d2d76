"""What a failing attempt does about its nodes: an exclusion and its record are one act, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.agent.test_breaker import Queue, job
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent.attribution import Attribution, Kind
from tr11ops.agent.recurrence import NodeFault
from tr11ops.agent.remedy import Attempt, Remedy
from tr11ops.agent.step import LineTee
from tr11ops.agent.waiting import WaitingWork
from tr11ops.exclusions import INCLUDED, exclude, read_version
from tr11ops.journal import read_journal
from tr11ops.runcard import load_card
from tr11ops.rundir import RunDirectory

FOUND = Attribution(Kind.NODE, "rank 3 on x2: ended by SIGSEGV", 0.85, ("x2",), fault="died at 3")


class Scene:
    """An attempt whose array waits, in a folder."""

    def __init__(self, folder: Path) -> None:
        card = load_card(write_card(folder), ["slurm.exclude=['x8']"], {}, directory=folder)
        self.directory = RunDirectory(card.paths, card.kill_switch)
        self.queue = Queue(job("7", "7", excluded=("x8",)))
        waiting = WaitingWork(self.queue, self.directory, "7", lambda _: None, pause=lambda _: None)  # type: ignore[arg-type]
        self.log = card.paths.main_log
        attempt = Attempt(card, self.directory, "11", "", 2)
        self.remedy = Remedy(attempt, None, waiting, LineTee(self.log))

    @property
    def excluded(self) -> tuple[str, ...]:
        return self.queue.waiting["7"].excluded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield Scene(tmp_path)


def test_a_bad_node_is_on_the_list_and_in_the_queue(scene: Scene):
    scene.remedy.bar(FOUND)
    scene.remedy.wait()
    assert scene.excluded == ("x2", "x8") and not scene.remedy.refused


def test_without_a_record_the_queue_keeps_its_list(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "/run/state/exclusions.d")

    monkeypatch.setattr("tr11ops.exclusions._commit", refuse)
    scene.remedy.bar(FOUND)
    scene.remedy.wait()
    assert scene.excluded == ("x8",)
    [refused] = scene.remedy.refused
    assert refused.node == "x2" and "Read-only file system" in refused.why
    assert "x2 is not excluded, its record cannot be written" in scene.log.read_text()


def test_what_is_taken_back_leaves_list_and_queue_and_nothing_else_does(scene: Scene):
    for node in ("x2", "x8"):
        assert exclude(scene.directory, node, why=FOUND.summary, owner="tr11", days=3, job_id="11")
    assert exclude(scene.directory, "x5", why="Xid 79", owner="ana", days=3)
    scene.remedy.refresh()
    assert scene.excluded == ("x2", "x5", "x8")
    fault = NodeFault("11", 1, FOUND.fault, 7, ("x2", "x5", "x8"), FOUND.summary)
    scene.remedy.take_back((fault,), "it came back on x4")
    scene.remedy.wait()
    assert [entry.node for entry in read_version(scene.directory.exclusions).exclusions] == ["x5"]
    assert scene.excluded == ("x5", "x8")  # x8 is the card's own
    back = [entry for entry in read_journal(scene.directory.journal).entries if entry.kind == INCLUDED]
    assert [(entry.data["node"], entry.why, entry.who) for entry in back] == [
        ("x2", "it came back on x4", "tr11"), ("x8", "it came back on x4", "tr11"),
    ]  # fmt: skip
