"""The walks of docs/explanation/tour.md are taken: each station is passed, and in this order."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.pins.screens import mails, taken
from tests.pins.states import Place, place_in
from tests.trainer.courses import attempt_of, card, trained
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.record import Record

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "tour.md"
MOST = 15
STATION = re.compile(r"\| (\d+) \| `([^`]+)` \| `([^`]+)` \| \S.* \|")
LOCAL = ("--scheduler", "local")


class Station(Record):
    """A function, by its file and its name in it, methods after their class."""

    file: str
    function: str


def passed_by(work: Callable[[], object]) -> list[Station]:
    """The functions of this repository that some work calls, in the order of their calls, by all
    threads.
    """
    stations = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/tr"):
            file = str(Path(code.co_filename).relative_to(ROOT))
            stations.append(Station(file, code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return stations


def walks() -> dict[str, list[Station]]:
    """The stations of each heading of the page; they are numbered from 1."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = STATION.findall(text)
        assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)), heading
        found[heading] = [Station(file, function) for _, file, function in rows]
    return found


def missed(walk: list[Station], passed: list[Station]) -> str:
    """The first station that is not passed after those before it; empty when all are."""
    calls = iter(passed)
    for number, station in enumerate(walk, 1):
        if station not in calls:  # which takes the calls up to it
            seldom = "out of its turn" if station in passed else "never"
            return f"station {number}, {station.file} {station.function}: passed {seldom}"
    return ""


def typed(state: str, *words: str) -> list[Station]:
    with place_in(state) as place:
        return passed_by(lambda: taken(place, words))


def launch(monkeypatch: pytest.MonkeyPatch) -> list[Station]:
    # The job is taken; that it starts is another test's matter.
    monkeypatch.setattr("tr11ops.cluster.local.launch_supervisor", lambda *job: None)
    return typed("down", "launch", "--array", "1-2", "--yes", *LOCAL)


def look() -> list[Station]:
    return typed("healthy", "status", *LOCAL)


def alert() -> list[Station]:
    with place_in("stalled") as place:
        return passed_by(lambda: mails(place))


def _train(config: TrainerConfig) -> list[Station]:
    from trainer.loop import Trainer

    attempt = attempt_of(Trainer, config, "7")
    return passed_by(lambda: trained(attempt))


def _forget_copies(place: Place) -> None:
    """The recorded run's checkpoints have no copy any more."""
    archive = place.folder / "archive"
    shutil.rmtree(archive)
    archive.mkdir()
    shutil.rmtree(place.state / "backup")


def save(folder: Path) -> list[Station]:
    config = card(
        folder, run={"exit_interval": 3}, parallel={"pipeline": 1}, checkpoint={"interval": 2}
    )
    [training] = run_ranks(_train, 1, config, launch=False)
    with place_in("stopped") as place:
        _forget_copies(place)
        return [*training, *passed_by(lambda: taken(place, ("backup", "run", *LOCAL)))]


def exclusion() -> list[Station]:
    words = ("nodes", "exclude", "local-node1", "--force", "--yes", "--reason", "its link flaps")
    return typed("healthy", *words, *LOCAL)


def test_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(walks()["A launch"], launch(monkeypatch)) == ""


def test_the_look() -> None:
    assert missed(walks()["A look"], look()) == ""


def test_the_alert() -> None:
    assert missed(walks()["An alert"], alert()) == ""


def test_the_save(tmp_path: Path) -> None:
    assert missed(walks()["A save"], save(tmp_path)) == ""


def test_the_exclusion() -> None:
    assert missed(walks()["An exclusion"], exclusion()) == ""


def test_each_walk_is_short_and_a_station_that_is_not_passed_is_named() -> None:
    page = walks()
    assert len(page) == 5
    for walk in page.values():
        assert 5 <= len(walk) <= MOST
        assert missed(walk, walk) == ""
        assert missed(walk, walk[1:]).startswith("station 1")
        assert "out of its turn" in missed(walk, walk[::-1])
        assert "never" in missed([*walk, Station("tr11ops/none.py", "none")], walk)
