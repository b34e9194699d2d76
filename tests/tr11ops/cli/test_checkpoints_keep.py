"""`tr11 checkpoints list`, `verify`, `pin`, `unpin` and `prune`, as a person types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tr11ops.backup.copy_cases import copy
from tests.tr11ops.checkpoints.shelf import NOW, Shelf
from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.backup.folder import FolderArchive, Owner
from tr11ops.backup.transfer import Transfer
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.quarantine import list_quarantined
from tr11ops.checkpoints.screen import MARKS, table
from tr11ops.rundir.checkpoint_digests import DigestRecord
from tr11ops.rundir.checkpoint_pins import Pin, state_folder
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.copies import CopyRecord, write_copy
from tr11ops.rundir.journal import read_journal, user_name
from trainer.contract.manifest import FileEntry

ROOT = Path(__file__).parents[3]
BACKUP = "\n[backup]\nkeep_latest = 2\nmilestone_percent = 0\nstore_interval = 1000\n"


@pytest.fixture
def shelf(bench: LocalBench) -> Shelf:
    """The checkpoints of the bench's run, whose card keeps two, and each 1000th until the store has
    it.
    """
    bench.card.write_text(bench.card.read_text() + BACKUP + f'store = "{bench.folder}/archive"\n')
    return Shelf(bench.folder)


# ----------------------------------------------------------------------------- list
def test_list_shows_what_is_known_of_each(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(900, 1000, 9_900, 10_000)
    shelf.copy(1000, archive="url", kind="weights", damaged=("weights/a.bin: its digest differs",))
    shelf.copy(1000)
    shelf.discard(900)
    run = ("--run", str(bench.card))
    assert (
        bench.tr11("checkpoints", "pin", "1000", "--reason", "for the paper", *run).out
        == "step 1000: pinned\n"
    )
    assert bench.tr11("checkpoints", "verify", "1000", *run).code == 0
    answer = bench.tr11("checkpoints", "list", *run)
    assert answer.code == 0 and max(map(len, answer.out.splitlines())) <= 80
    lines = answer.out.splitlines()
    assert lines[0].split() == ["step", "size", "tokens", "age", "state", "read", "copies", "kept"]
    assert "s ago" in lines[1] and lines[1].split()[-3:] == ["store", "url:w:BAD", "pin"]
    assert lines[3].split()[0] == "10000" and lines[3].endswith("latest") and "never" in lines[3]
    assert f"step 1000: pinned by {user_name()}: for the paper" in lines
    assert "step 9900: a restart takes it if the other fails" in lines
    assert any(
        "its copy url:checkpoints-weights/main/global_step1000 is damaged" in line for line in lines
    )
    assert any(
        line.startswith("global_step900.discarded") and line.endswith("discarded") for line in lines
    )
    said = " ".join(" ".join(lines[-8:]).split())
    assert said.endswith(
        "state: whole = every file has its size"
        " read: never = its bytes were not compared yet, ago = all bytes agreed then"
        " copies: :w = weights alone, :BAD = damaged, or NaN or infinity in it"
        " kept: latest = a restart takes it, use = needed now, pin = kept by hand"
    ), "the marks that occur, and no others"
    page = " ".join(bench.tr11("checkpoints", "list", "--help").out.split())
    words = [(mark, meaning) for marks in MARKS.values() for mark, meaning in marks.items()]
    assert [mark for mark, _ in words if mark not in page] == []
    value = bench.tr11("checkpoints", "list", *run, "--json").json
    one = value["checkpoints"][0]
    assert (
        one["pin"]["why"] == "for the paper"
        and one["digests"]["bad"] == []
        and len(one["copies"]) == 2
    )
    assert (
        value["aside"][0]["name"] == "global_step900.discarded"
        and value["doubts"] == []
        and value["schema"] == 1
    )


def test_list_says_what_it_does_not_know(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100)
    (shelf.directory.paths.state).mkdir()
    (shelf.directory.paths.state / "recovery.json").write_text("{")
    answer = bench.tr11("checkpoints", "list", "--run", str(bench.card))
    assert answer.code == 3 and "100" in answer.out
    assert answer.err.startswith("tr11: not known, so nothing may be removed: who uses what: ")


def test_the_large_run_fits_in_80_columns() -> None:
    now = time.time()
    made = SavedCheckpoint(
        115_000, "/c", "tr11", 2_463_000_000_000, (), True, now - 86400 * 41, {"tensor": 4, "pipeline": 12, "data": 8},
        235_520_000, 482_344_960_000, pin=Pin(115_000, "somebody", NOW, "a reason that is long " * 9),
        digests=DigestRecord(115_000, "", now - 86400 * 30, 720, 1), used_by=("latest names it", "attempt 12345 resumed from it"),
    )  # fmt: skip
    text = table(Catalogue(Path("/c"), 115_000, None, (made,)), now)
    assert max(map(len, text.splitlines())) <= 80 and "4 x 12 x 8" in text and "482.3 B" in text
    hostile = SavedCheckpoint(5, "/c", "tr11", 5, ("weights/\x1b[2J\n.bin: gone",), False, now)
    assert "\x1b" not in table(Catalogue(Path("/c"), None, None, (hostile,)), now)


# ----------------------------------------------------------------------------- verify
def test_verify_says_each_bad_file_in_a_line(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200)
    (shelf.folder / "global_step100" / "weights" / "a.bin").write_bytes(b"x" * 64)
    run = ("--run", str(bench.card))
    answer = bench.tr11("checkpoints", "verify", "--all", *run)
    assert answer.code == 1 and answer.out == "2 read: 1 fine, 1 damaged (step 100)\n"
    assert answer.err.splitlines() == [
        "step 100: BAD weights/a.bin: its digest differs from the manifest's", "step 200: fine, 4 files, 256 B",
        "bytes were compared, numbers were not looked at: --values finds NaN and infinity",
    ]  # fmt: skip
    assert "1 BAD" in bench.tr11("checkpoints", "list", *run).out
    (entry,) = [
        one
        for one in read_journal(shelf.directory.journal).entries
        if one.kind == "checkpoint-damaged"
    ]
    assert entry.data["bad"] == ["weights/a.bin: its digest differs from the manifest's"]
    value = bench.tr11("checkpoints", "verify", "latest", *run, "--json")
    assert value.code == 0 and value.err == "" and value.json["checkpoints"][0]["result"] == "fine"


def test_what_was_read_lately_is_not_read_again(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    run = ("--run", str(bench.card))
    assert bench.tr11("checkpoints", "verify", "100", "100", *run).out == "1 read: 1 fine\n"
    assert bench.tr11("checkpoints", "verify", "--stale", "1", *run).out == "2 read: 2 fine\n"
    again = bench.tr11("checkpoints", "verify", "--stale", "1", *run)
    assert (again.code, again.out) == (0, "nothing to read: all were read in the last 1 day\n")
    path = state_folder(shelf.directory) / "digests" / "global_step200.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "time": time.time() + 1e7}))  # by a clock that was wrong
    assert bench.tr11("checkpoints", "verify", "--stale", "1", *run).out == "1 read: 1 fine\n"
    assert bench.tr11("checkpoints", "verify", "--stale", "0", *run).out == "3 read: 3 fine\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["100", "--all"], 2, "verify what? Give steps, or --all, or --stale DAYS"),
        (["7"], 1, "global_step7 does not exist; there are 1, the newest 100"),
        (["x"], 2, "STEP = 'x': is not a step"),
        (["--all", "--parallel", "0"], 2, "--parallel"),
    ],
)
def test_verify_refuses(
    bench: LocalBench, shelf: Shelf, words: list[str], code: int, message: str
) -> None:
    shelf.save(100)
    answer = bench.tr11("checkpoints", "verify", *words, "--run", str(bench.card))
    assert (answer.code, answer.out) == (code, "") and message in answer.err


def test_verify_reads_the_newest_where_no_step_is_given(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100)
    shelf.save(200)
    answer = bench.tr11("checkpoints", "verify", "--run", str(bench.card))
    assert answer.code == 0 and answer.out.endswith("1 read: 1 fine\n"), answer
    assert not (state_folder(shelf.directory) / "digests" / "global_step100.json").exists()
    assert (state_folder(shelf.directory) / "digests" / "global_step200.json").exists()


def test_verify_where_nothing_can_be_compared(bench: LocalBench, shelf: Shelf) -> None:
    shelf.half(50)
    shelf.save(100)
    run = ("--run", str(bench.card))
    named = bench.tr11("checkpoints", "verify", "50", *run)
    assert named.code == 3 and named.err == "step 50: nothing to compare: it has no manifest\n"
    assert bench.tr11("checkpoints", "verify", "--all", *run).code == 0


def test_an_interrupt_loses_nothing_that_is_finished(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100)
    shelf.save(200)
    os.truncate(shelf.folder / "global_step200" / "cursor.json", 64 << 30)  # takes minutes to read
    shelf.write_manifest(200, files=(FileEntry("cursor.json", 64 << 30, ""),))
    command = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from tr11ops.cli.main import run; run()"
    )
    words = [
        sys.executable,
        "-c",
        command,
        str(ROOT),
        "checkpoints",
        "verify",
        "--all",
        "--run",
        str(bench.card),
    ]
    child = subprocess.Popen(words, cwd=bench.folder, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert child.stderr.readline() == "step 100: fine, 4 files, 256 B\n"
    os.kill(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 1 and err == (
        "tr11: interrupted; what was read whole is on record, and `verify --stale 1` goes on\n"
    )
    seen = {entry.step: entry.digests for entry in shelf.catalogue().checkpoints}
    assert isinstance(seen[100], DigestRecord) and seen[200] is None


# ----------------------------------------------------------------------------- pin
def test_pins_are_refused_for_the_absent_and_stay_for_the_gone(
    bench: LocalBench, shelf: Shelf
) -> None:
    shelf.save(100, 200)
    run = ("--run", str(bench.card))
    answer = bench.tr11("checkpoints", "pin", "150", *run)
    assert answer.code == 1 and "global_step150 does not exist" in answer.err
    assert bench.tr11("checkpoints", "pin", "latest", *run).out == "step 200: pinned\n"
    assert (
        bench.tr11("checkpoints", "pin", "global_step200", *run).out == "step 200: pinned already\n"
    )
    (shelf.folder / "global_step200").rename(shelf.folder / "away")
    (shelf.folder / "latest").write_text("global_step100")
    assert bench.tr11("checkpoints", "unpin", "200", *run, "--json").json["result"] == "unpinned"
    answer = bench.tr11("checkpoints", "unpin", "200", *run)
    assert answer.code == 1 and answer.err == "tr11: step 200 is not pinned; pinned is nothing\n"
    kinds = [entry.kind for entry in read_journal(shelf.directory.journal).entries]
    assert kinds == ["checkpoint-pinned", "checkpoint-unpinned"]


def test_a_damaged_list_of_pins_is_one_line(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100)
    run = ("--run", str(bench.card))
    bench.tr11("checkpoints", "pin", "100", *run)
    (state_folder(shelf.directory) / "pins.d" / "00000001.json").write_text("{")
    answer = bench.tr11("checkpoints", "pin", "100", "--reason", "x", *run)
    assert (
        answer.code == 1
        and answer.err.startswith("tr11: the pins were not changed: ")
        and answer.err.count("\n") == 1
    )


# ----------------------------------------------------------------------------- prune
def test_a_dry_run_shows_each_victim_and_changes_nothing(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 1000, 9_900, 10_000)
    shelf.discard(100)
    shelf.save(200)
    (shelf.folder / "latest").write_text("global_step10000")
    run = ("--run", str(bench.card))
    answer = bench.tr11("checkpoints", "prune", "--dry-run", *run)
    assert answer.code == 0 and answer.err == "" and max(map(len, answer.out.splitlines())) <= 80
    assert answer.out.splitlines() == [
        "remove  200      256 B  older than the newest 2; no copy of it is wanted",
        "1 to remove, 256 B", "kept: 2 in use, 1 not backed up, 1 set aside",
    ]  # fmt: skip
    shown = bench.tr11("checkpoints", "prune", "--dry-run", "--all", *run).out
    assert re.search(r"^keep +1000 +256 B  no whole copy in the store", shown, re.MULTILINE)
    assert shelf.steps() == [200, 1000, 9_900, 10_000] and not shelf.directory.journal.exists()
    value = bench.tr11("checkpoints", "prune", "--dry-run", "--json", *run).json
    assert [victim["name"] for victim in value["victims"]] == ["global_step200"] and value["kept"][
        "set aside"
    ] == 1


def test_a_superseded_one_is_listed_and_removed_by_its_name(
    bench: LocalBench, shelf: Shelf
) -> None:
    shelf.save(1000, 9_900, 10_000)
    shelf.supersede(1000)
    (shelf.folder / "latest").write_text("global_step10000")
    (shelf.folder / "global_step9900.set-aside").mkdir()
    run, name = ("--run", str(bench.card)), "global_step1000.superseded"
    listed = bench.tr11("checkpoints", "list", *run).out.splitlines()
    assert any(line.startswith(name) and line.endswith("superseded") for line in listed)
    assert any(line.startswith("3 of them, 768 B, ") and "beside them" in line for line in listed)
    left = bench.tr11("checkpoints", "prune", "--dry-run", *run).out
    assert (
        "superseded: 1 (256 B) without a copy" in left
        and name in left
        and max(map(len, left.splitlines())) <= 80
    )
    assert (
        "superseded; no whole copy in the store"
        in bench.tr11("checkpoints", "prune", "--all", *run).out
    )
    shown = bench.tr11("checkpoints", "remove", name, "--dry-run", *run)
    assert shown.code == 0 and shown.out.startswith(
        "remove  1000.superseded      256 B  superseded; older than the"
    )
    assert max(map(len, shown.out.splitlines())) <= 80
    assert bench.tr11("checkpoints", "remove", name, "--yes", "--reason", "seen", *run).code == 0
    assert shelf.steps() == [1000, 9_900, 10_000] and name not in shelf.names()
    assert any(
        "seen" in entry.why and name in entry.why
        for entry in read_journal(shelf.directory.journal).entries
    )
    refused = bench.tr11("checkpoints", "remove", "global_step9900.set-aside", "--yes", *run)
    assert refused.code == 1 and "not of this training" in refused.err


def test_it_asks_and_without_a_terminal_it_refuses(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    answer = bench.tr11("checkpoints", "prune", "--run", str(bench.card))
    assert answer.code == 2 and "add --yes" in answer.err and shelf.steps() == [100, 200, 300]


def test_prune_removes_and_says_so(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 1000, 9_900, 10_000)
    (bench.folder / "archive").mkdir()
    archive = FolderArchive(bench.folder / "archive", "store", Owner("small"))
    source = shelf.folder / "global_step1000"
    receipt = copy(archive, source, Transfer(), run="small")
    write_copy(shelf.directory, CopyRecord.of(receipt, "store", archive.address))
    run = ("--run", str(bench.card))
    answer = bench.tr11("checkpoints", "prune", "--yes", "--reason", "SCRATCH is full", *run)
    assert answer.code == 0 and answer.out.splitlines()[-1] == "2 removed, 512 B freed"
    assert answer.err.splitlines() == ["global_step100: removed", "global_step1000: removed"]
    assert shelf.steps() == [9_900, 10_000] and not list_quarantined(shelf.folder)
    assert (
        read_journal(shelf.directory.journal)
        .entries[0]
        .why.startswith("SCRATCH is full; 2 to remove")
    )
    again = bench.tr11("checkpoints", "prune", "--yes", *run)
    assert (again.code, again.out) == (0, "0 to remove, 0 B\nkept: 2 in use\n")


def test_keep_overrides_the_card_but_not_below_two(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    run = ("--run", str(bench.card))
    assert bench.tr11("checkpoints", "prune", "--keep", "1", "--yes", *run).code == 2
    value = bench.tr11("checkpoints", "prune", "--keep", "3", "--yes", "--json", *run).json
    assert value["freed"] == 256 and [outcome["result"] for outcome in value["outcomes"]] == [
        "removed"
    ]
    assert shelf.steps() == [200, 300, 400]


def test_nothing_goes_while_something_is_not_known(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    (shelf.folder / "latest").write_text("what")
    answer = bench.tr11("checkpoints", "prune", "--yes", "--run", str(bench.card))
    assert (
        answer.code == 3
        and "0 to remove" in answer.out
        and "nothing may be removed while" in answer.err
    )
    assert shelf.steps() == [100, 200, 300]


def test_another_prune_is_named(bench: LocalBench, shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    mine = ClaimFolder(shelf.directory, "prune").take(Claim.of_this_process(time.time(), 60), None)
    answer = bench.tr11("checkpoints", "prune", "--yes", "--run", str(bench.card))
    assert (
        answer.code == 1
        and answer.err == f"tr11: nothing was removed: a prune is running already: {mine}\n"
    )


def test_a_folder_that_is_not_one(bench: LocalBench) -> None:
    place = bench.folder / "run" / "checkpoints"
    place.mkdir(parents=True)
    (place / "main").write_text("in the way")
    for words in (["prune", "--yes"], ["verify", "--all"], ["pin", "5"], ["list"]):
        answer = bench.tr11("checkpoints", *words, "--run", str(bench.card))
        assert (
            answer.code == 3 and "cannot be read" in answer.err and answer.err.count("\n") == 1
        ), words


def test_a_run_that_is_not_there_yet(bench: LocalBench) -> None:
    run = ("--run", str(bench.card))
    assert (
        bench.tr11("checkpoints", "prune", "--dry-run", *run).out
        == "0 to remove, 0 B\nkept: none\n"
    )
    assert bench.tr11("checkpoints", "verify", "--all", *run).out == "nothing to read\n"
    assert not (bench.folder / "run").exists()
