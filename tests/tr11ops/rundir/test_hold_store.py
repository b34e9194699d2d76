"""What tr11 holds is on record by versions: several machines that hold and release at once lose
nothing of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import exit_code, forked
from tests.tr11ops.status.publishing import card_of, directory_of
from tr11ops.rundir import hold_store
from tr11ops.rundir.hold_store import (
    forget_holds,
    held_by_tr11,
    holds_path,
    read_commanded,
    record_holds,
    releases_in,
)
from tr11ops.rundir.paths import RunDirectory

WRITERS, ROUNDS = 6, 12


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = directory_of(card_of(tmp_path))
    return RunDirectory(made.paths, tmp_path / "kill")


def test_writers_at_once_lose_no_hold_and_bring_none_back(run: RunDirectory) -> None:
    """Each holds jobs of its own and releases every second one, all beside each other."""
    record_holds(run, ["1"], "ana", "held before")

    def work(writer: int) -> None:
        for number in range(ROUNDS):
            name = f"{writer}{number:03d}"
            record_holds(run, [name], "tr11", f"by {writer}")
            if number % 2:
                forget_holds(run, [name])

    writers = [forked(lambda writer=writer: work(writer)) for writer in range(2, 2 + WRITERS)]  # type: ignore[misc]
    assert [exit_code(one) for one in writers] == [0] * WRITERS
    names = {
        (writer, number): f"{writer}{number:03d}"
        for writer in range(2, 2 + WRITERS)
        for number in range(ROUNDS)
    }
    assert held_by_tr11(run) == {
        "1",
        *(name for (_, number), name in names.items() if number % 2 == 0),
    }
    value = json.loads(holds_path(run.paths).read_text())
    assert {one.job for one in releases_in(value)} == {
        name for (_, number), name in names.items() if number % 2
    }
    assert value["version"] == 1 + WRITERS * (ROUNDS + ROUNDS // 2) and value["schema"] == 1


def test_a_release_meanwhile_is_not_undone_by_a_hold(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine releases between one's look at the record and one's word on it."""
    record_holds(run, ["7", "8"], "ana", "a pause")
    look, others = hold_store._newest, [lambda: forget_holds(run, ["7"])]

    def looked(paths: object) -> dict[str, object]:
        found = look(paths)  # type: ignore[arg-type]
        while others:
            others.pop()()
        return found

    monkeypatch.setattr(hold_store, "_newest", looked)
    record_holds(run, ["9"], "tr11", "a fault")
    assert {record.job for record in read_commanded(run.paths)} == {"8", "9"}


def test_a_record_of_an_older_tr11_is_read_and_continued(run: RunDirectory) -> None:
    path = holds_path(run.paths)
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"schema": 1, "holds": [{"job": "12", "who": "ben", "time": 5.0, "why": "x"}]}'
    )
    record_holds(run, ["13"], "ana", "")
    assert held_by_tr11(run) == {"12", "13"}


def test_a_torn_version_falls_back_to_its_copy_and_is_written_over(run: RunDirectory) -> None:
    record_holds(run, ["12"], "ana", "")
    [version] = (holds_path(run.paths).with_suffix(".d")).iterdir()
    version.write_bytes(b"")  # a power cut
    assert held_by_tr11(run) == {"12"}
    record_holds(run, ["13"], "ana", "")
    assert held_by_tr11(run) == {"12", "13"}


def test_what_cannot_be_read_now_is_not_replaced(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_holds(run, ["12"], "ana", "")

    def fails(path: Path) -> dict[str, object]:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(hold_store, "read_json", fails)
        with pytest.raises(OSError, match="Input/output error"):
            record_holds(run, ["13"], "ana", "")
    assert held_by_tr11(run) == {"12"}


def test_a_file_system_without_hard_links_will_do(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    record_holds(run, ["12"], "ana", "")
    forget_holds(run, ["12"])
    record_holds(run, ["13"], "ana", "")
    assert held_by_tr11(run) == {"13"}
