"""Logs in an archive: as long as they ever were, whatever becomes of them here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.backup.round_cases import Rounds
from tr11ops.backup.log_copies import log_files


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    made = Rounds(tmp_path)
    made.directory.paths.main_log.parent.mkdir(parents=True)
    return made


def logs(rounds: Rounds) -> dict[str, bytes]:
    root = rounds.store / "small-logs"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_what_grew_takes_the_place_of_its_copy(rounds: Rounds) -> None:
    log = rounds.directory.paths.main_log
    log.write_bytes(b"1\n")
    assert rounds.run("store").tallies[0].logs == 1
    assert rounds.run("store").tallies[0].logs == 0
    log.write_bytes(b"1\n2\n")
    assert rounds.run("store").tallies[0].logs == 1
    assert logs(rounds) == {"logs/main/main_log.txt": b"1\n2\n"}


def test_what_was_cut_or_replaced_lies_beside(rounds: Rounds) -> None:
    log = rounds.directory.paths.main_log
    log.write_bytes(b"1\n2\n3\n")
    rounds.run("store")
    log.write_bytes(b"1\n")
    rounds.run("store")
    log.write_bytes(b"another beginning\n")
    rounds.run("store")
    rounds.run("store")
    found = logs(rounds)
    assert found.pop("logs/main/main_log.txt") == b"1\n2\n3\n"
    assert sorted(found.values()) == [b"1\n", b"another beginning\n"]
    log.unlink()
    assert rounds.run("store").exit_code == 0 and len(logs(rounds)) == 3, "nothing is removed"


def test_git_and_hidden_files_stay_here(rounds: Rounds) -> None:
    folder = rounds.directory.paths.published
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("url = https://somebody:password@host")
    (folder / "tensorboard" / "main").mkdir(parents=True)
    (folder / "tensorboard" / "main" / "events.out.tfevents.1").write_bytes(b"\0\1")
    (folder / "link").symlink_to("/etc/passwd")
    assert [file.path for file in log_files(folder)] == ["tensorboard/main/events.out.tfevents.1"]
    rounds.run("store")
    assert set(logs(rounds)) == {"tensorboard/main/events.out.tfevents.1"}


def test_a_log_that_grows_while_copied_is_a_whole_beginning(rounds: Rounds) -> None:
    log = rounds.directory.paths.main_log
    log.write_bytes(b"a" * 5000)

    def on(call: str, path: str, position: int) -> None:
        if call == "upload":
            with log.open("ab") as stream:
                stream.write(b"b" * 700)

    rounds.odd["store"] = {"on": on}
    assert rounds.run("store").exit_code == 0
    assert logs(rounds) == {"logs/main/main_log.txt": b"a" * 5000}
    rounds.odd.clear()
    rounds.run("store")
    assert logs(rounds) == {"logs/main/main_log.txt": b"a" * 5000 + b"b" * 700}


def test_an_archive_that_spoils_what_it_stores_is_told(rounds: Rounds) -> None:
    rounds.directory.paths.main_log.write_bytes(b"abc")
    rounds.odd["store"] = {
        "spoil": lambda path, content: bytes(len(content)) if path.endswith("txt") else content
    }
    done = rounds.run("store")
    assert done.exit_code == 1 and "other bytes than were sent" in done.tallies[0].faults[0]
