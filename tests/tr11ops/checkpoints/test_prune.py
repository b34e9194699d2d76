"""Removing: what goes and what is recorded of it, what is seen between two looks, and what will not
go.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.checkpoints.shelf import NOW, Shelf, policy
from tr11ops.checkpoints import prune as pruning
from tr11ops.checkpoints.prune import BEGUN, FAILED, LEFT, REMOVED, hide
from tr11ops.checkpoints.quarantine import doomed_name, list_quarantined, name_to_hide
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_pins import pin, state_folder
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken, Clocks, read_clocks
from tr11ops.rundir.fallback import RESERVE_BYTES, RESERVE_FILE, keep_reserve, spend_reserve
from tr11ops.rundir.journal import JournalEntry, read_journal
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import find_resumable
from trainer.contract.files import write_atomically


def journal(shelf: Shelf, *kinds: str) -> list[JournalEntry]:
    ledger = read_journal(shelf.directory.journal)
    assert ledger.is_sound
    return [entry for entry in ledger.entries if entry.kind in kinds]


# ----------------------------------------------------------------------------- the ordinary way
def test_what_goes_is_recorded_before_and_after(shelf: Shelf) -> None:
    shelf.save(1000, 1100, 9_900, 10_000)
    shelf.copy(1000)
    kept = shelf.prints([9_900, 10_000])
    seen: list[int] = []
    result = shelf.pruner(why="full", progress=seen.append).run()
    assert [(outcome.name, outcome.result) for outcome in result.outcomes] == [
        ("global_step1000", "removed"), ("global_step1100", "removed"),
    ]  # fmt: skip
    assert (result.freed, result.failed) == (512, False) and sum(seen) > 512
    assert (
        shelf.names() == {"global_step9900", "global_step10000", "latest"}
        and shelf.prints([9_900, 10_000]) == kept
    )
    (begun,) = journal(shelf, BEGUN)
    assert begun.who == "ana" and begun.why.startswith(
        "full; 2 to remove: global_step1000, global_step1100"
    )
    assert [victim["name"] for victim in begun.data["victims"]] == [
        "global_step1000",
        "global_step1100",
    ]
    after = journal(shelf, REMOVED)
    assert [entry.data["name"] for entry in after] == ["global_step1000", "global_step1100"]
    assert after[0].why == "global_step1000: older than the newest 2; copied to store (whole)"
    # nothing to do is no event
    assert shelf.pruner().run().outcomes == () and len(journal(shelf, BEGUN)) == 1


def test_only_what_a_person_agreed_to_goes(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    plan = shelf.pruner().plan()
    (first, second) = plan.victims
    result = shelf.pruner().run({(first.name, first.identity), (second.name, "another")})
    assert [outcome.name for outcome in result.outcomes] == [
        "global_step100"
    ] and shelf.steps() == [200, 300, 400]


def test_set_aside_folders_go_when_asked_for(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    shelf.discard(300)
    write_atomically(shelf.folder / "latest", "global_step200")
    assert shelf.pruner().run().outcomes == ()
    (outcome,) = shelf.pruner(set_aside=True).run().outcomes
    assert (outcome.name, outcome.result) == ("global_step300.discarded", "removed")
    assert shelf.names() == {"global_step100", "global_step200", "latest"}


def test_a_superseded_one_goes_by_the_usual_rules(shelf: Shelf) -> None:
    shelf.save(900, 1000, 1100, 9_900, 10_000)
    shelf.copy(1000)
    for step in (900, 1000, 1100, 10_000):
        shelf.supersede(step)
    shelf.supersede(1000)  # of which there is no copy
    shelf.pin(1100)
    write_atomically(shelf.folder / "latest", "global_step10000")
    rules = {
        entry.name: entry.rule for entry in shelf.pruner().plan().decisions if "." in entry.name
    }
    assert rules == {
        "global_step900.superseded": "goes", "global_step1000.superseded": "goes",
        "global_step1000.superseded-2": "not backed up", "global_step1100.superseded": "pinned",
        "global_step10000.superseded": "last two",
    }  # fmt: skip
    shelf.pruner().run()
    left = {
        "global_step1000.superseded-2",
        "global_step1100.superseded",
        "global_step10000.superseded",
    }
    assert {name for name in shelf.names() if "superseded" in name} == left
    (outcome,) = shelf.pruner(only=frozenset({"global_step1000.superseded-2"})).run().outcomes
    assert outcome.result == "removed" and "superseded" in journal(shelf, REMOVED)[-1].why
    for name in ("global_step1100.superseded", "global_step10000.superseded"):
        assert not shelf.pruner(only=frozenset({name})).run().outcomes, (
            "pinned, or one of the last two"
        )


def test_a_copy_of_another_content_lets_no_superseded_one_go(shelf: Shelf) -> None:
    shelf.save(1000, 9_900, 10_000)
    shelf.supersede(1000)
    write_atomically(shelf.folder / "latest", "global_step10000")
    shelf.copy(1000)
    assert [outcome.name for outcome in shelf.pruner().run().outcomes] == ["global_step1000"]
    assert "global_step1000.superseded" in shelf.names() and not shelf.pruner().run().outcomes


def test_a_superseded_one_is_looked_at_again_when_it_is_hidden(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200, 300)
    shelf.supersede(100)
    write_atomically(shelf.folder / "latest", "global_step300")
    after_hiding(monkeypatch, lambda: shelf.pin(100))
    (outcome,) = shelf.pruner(only=frozenset({"global_step100.superseded"})).run().outcomes
    assert (outcome.result, "pinned" in outcome.text) == ("kept", True) and not shelf.hidden()


def test_a_hidden_one_whose_name_was_taken_is_superseded(shelf: Shelf) -> None:
    """The prune was killed before its second look, then a training saved that step again."""
    shelf.save(1000, 9_900, 10_000)
    before = shelf.prints([1000])
    hide(shelf.folder, "global_step1000")
    shelf.save(1000)
    write_atomically(shelf.folder / "latest", "global_step10000")
    shelf.pruner().run()
    assert {name for name in shelf.names() if "1000." in name} == {"global_step1000.superseded"}
    place = shelf.folder / "global_step1000.superseded"
    found = {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    assert {
        f"global_step1000/{name}": hashlib.sha256(data).hexdigest() for name, data in found.items()
    } == before


def test_planning_writes_nothing_into_a_run_that_is_not_there(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shutil.rmtree(shelf.directory.root)
    assert (
        shelf.pruner(look_at_clocks=pruning.read_clocks).plan().decisions == ()
        and not shelf.directory.exists
    )


# ---------------------------------------------------------------------------- between the two looks
def after_hiding(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something in the moment in which the checkpoint is hidden and not yet doomed."""

    def hide_and_act(folder: Path, name: str) -> str:
        hidden = hide(folder, name)
        act()
        return hidden

    monkeypatch.setattr(pruning, "hide", hide_and_act)


def copying(shelf: Shelf, step: int) -> None:
    folder = ClaimFolder(shelf.directory, "copy-store")
    assert folder.take(Claim.of_this_process(time.time(), 60, step=step), folder.newest())


def test_a_copy_that_begins_meanwhile_has_its_source_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200, 300)
    before = shelf.prints([100, 200, 300])
    after_hiding(monkeypatch, lambda: copying(shelf, 100))
    (outcome,) = shelf.pruner().run().outcomes
    assert outcome.result == "kept" and "is being copied by process" in outcome.text
    assert shelf.prints([100, 200, 300]) == before and not list_quarantined(shelf.folder)
    assert [entry.data["name"] for entry in journal(shelf, LEFT)] == [
        "global_step100"
    ] and not journal(shelf, REMOVED)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda shelf: pin(shelf.directory, 100, "bob", "wait", NOW), "pinned by bob: wait"),
        (
            lambda shelf: write_atomically(shelf.folder / "latest", "global_step100"),
            "latest names it",
        ),
        (
            lambda shelf: write_atomically(shelf.folder / "latest", "nonsense"),
            "nothing may go while this is not known",
        ),
        (
            lambda shelf: shutil.rmtree(shelf.folder / "global_step200"),
            "a restart takes it if the other fails",
        ),
        (
            lambda shelf: (shelf.directory.paths.state / "recovery.json").write_text("{"),
            "not known: who uses what",
        ),
    ],
)
def test_what_changes_meanwhile_keeps_it(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, act: Callable[[Shelf], object], why: str
) -> None:
    shelf.save(100, 200, 300)
    before = shelf.prints([100])
    after_hiding(monkeypatch, lambda: act(shelf))
    (outcome,) = shelf.pruner().run().outcomes
    assert outcome.result == "kept" and why in outcome.text and shelf.prints([100]) == before
    assert not list_quarantined(shelf.folder)


def test_a_step_saved_again_meanwhile_is_not_touched(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200, 300)

    def save_anew() -> None:
        shelf.save(100)
        copying(shelf, 100)

    after_hiding(monkeypatch, save_anew)
    (outcome,) = shelf.pruner().run().outcomes
    assert outcome.result == "kept" and "its name was taken meanwhile" in outcome.text
    anew = shelf.prints([100])
    ClaimFolder(shelf.directory, "copy-store").write(
        replace(ClaimFolder(shelf.directory, "copy-store").newest(), held=False)  # type: ignore[union-attr]
    )
    monkeypatch.undo()
    write_atomically(shelf.folder / "latest", "global_step100")
    assert shelf.pruner().run().failed is False  # the older one goes, the newer one stays
    assert shelf.prints([100]) == anew and not list_quarantined(shelf.folder)


def test_one_that_is_renamed_meanwhile_is_left_alone(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200, 300, 400)
    plan = shelf.pruner().plan
    monkeypatch.setattr(
        pruning.Pruner,
        "_plan",
        lambda self, clocks: (monkeypatch.undo(), plan(), shelf.discard(100))[1],
    )
    first, second = shelf.pruner().run().outcomes
    assert (first.result, second.result) == ("kept", "removed") and "another name" in first.text
    assert shelf.names() == {
        "global_step100.discarded",
        "global_step300",
        "global_step400",
        "latest",
    }


def test_an_interrupt_between_the_looks_puts_it_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200, 300)
    real, calls = pruning.Pruner._why_not, iter((False, True))

    def interrupted(self: Any, *words: Any) -> str:
        if next(calls):
            raise KeyboardInterrupt
        return real(self, *words)

    monkeypatch.setattr(pruning.Pruner, "_why_not", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shelf.pruner().run()
    assert (
        shelf.steps() == [100, 200, 300] and not ClaimFolder(shelf.directory, "prune").newest().held
    )  # type: ignore[union-attr]


def test_stopping_ends_after_what_is_begun(shelf: Shelf) -> None:
    shelf.save(*range(100, 600, 100))
    stop = threading.Event()
    result = shelf.pruner(stop=stop, tell=lambda outcome: stop.set()).run()
    assert (
        len(result.outcomes) == 1
        and "the next prune goes on" in result.ended_early
        and shelf.steps() == [200, 300, 400, 500]
    )


# ------------------------------------------------------------------------- what earlier prunes left
def test_hidden_ones_are_put_back_and_doomed_ones_finished(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    hidden = hide(shelf.folder, "global_step300")
    half = shelf.folder / doomed_name(name_to_hide("global_step100"))
    (shelf.folder / "global_step100").rename(half)
    (half / "manifest.json").unlink()
    assert {quarantined.kind for quarantined in list_quarantined(shelf.folder)} == {
        "hidden by a prune",
        "being removed",
    }
    assert find_resumable(shelf.folder, "sizes", True, print) == 400
    result = shelf.pruner().run()
    assert result.finished == (half.name,) and [outcome.name for outcome in result.outcomes] == [
        "global_step200"
    ]
    assert shelf.steps() == [300, 400] and not list_quarantined(shelf.folder), hidden


def test_one_prune_at_a_time(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    claims = ClaimFolder(shelf.directory, "prune")
    mine = claims.take(Claim.of_this_process(time.time(), 60), None)
    assert mine is not None
    with pytest.raises(ClaimTaken, match=f"process {os.getpid()}"):
        shelf.pruner().run()
    claims.write(replace(mine, held=False))
    assert shelf.pruner().run().freed == 256


# ----------------------------------------------------------------------------- what will not go
@pytest.fixture
def open_shelf(outside: Path) -> Iterator[Shelf]:
    """A shelf that another user may reach, whose eyes a test takes: root would not be stopped by
    anything.
    """
    try:
        yield Shelf(outside)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_file_that_may_not_go_is_one_line_and_others_go_on(open_shelf: Shelf) -> None:
    shelf = open_shelf
    shelf.save(100, 200, 300, 400)
    for path in (shelf.directory.root, *shelf.directory.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    # as with the sticky bit and another's files
    (shelf.folder / "global_step100" / "weights").chmod(0o555)
    become_nobody()
    first, second = shelf.pruner().run().outcomes
    assert (first.result, second.result) == ("failed", "removed")
    assert (
        "what is left of it is in .global_step100.pruned-" in first.text
        and "Permission denied" in first.text
    )
    assert shelf.steps() == [300, 400] and [
        entry.data["name"] for entry in journal(shelf, FAILED)
    ] == ["global_step100"]
    again = shelf.pruner().run()
    assert again.failed and len(again.outcomes) == 1
    if os.geteuid() != os.getuid():
        os.seteuid(0)
    (shelf.folder / again.outcomes[0].name / "weights").chmod(0o755)
    assert shelf.pruner().run().finished == (again.outcomes[0].name,) and not list_quarantined(
        shelf.folder
    )


def test_a_folder_that_is_read_only_loses_nothing(open_shelf: Shelf) -> None:
    shelf = open_shelf
    shelf.save(100, 200, 300, 400)
    for path in (shelf.directory.root, *shelf.directory.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    shelf.folder.chmod(0o555)
    become_nobody()
    result = shelf.pruner().run()
    assert [outcome.result for outcome in result.outcomes] == ["failed", "failed"] and result.failed
    assert all("Permission denied" in outcome.text for outcome in result.outcomes)
    shelf.assert_whole()
    assert shelf.steps() == [100, 200, 300, 400]


def test_what_may_not_be_looked_into_is_not_taken_for_damaged(open_shelf: Shelf) -> None:
    shelf = open_shelf
    shelf.save(100, 200, 300, 400)
    for path in (shelf.directory.root, *shelf.directory.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (shelf.folder / "global_step100" / "weights").chmod(0o700)
    (shelf.folder / "global_step200").chmod(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    become_nobody()
    first, second, *_ = shelf.pruner().plan().decisions
    assert (first.rule, first.why) == ("unclear", "weights/a.bin: Permission denied")
    assert second.rule == "unclear" and "Permission denied" in second.why
    assert shelf.pruner().run().outcomes == ()


def test_what_a_link_points_to_is_never_unlinked(shelf: Shelf, tmp_path: Path) -> None:
    shelf.save(100, 200, 300)
    outside = tmp_path / "outside"
    outside.mkdir()
    named = shelf.folder / "global_step100" / "weights" / "a.bin"
    named.rename(outside / "precious")
    named.symlink_to(outside / "precious")
    (shelf.folder / name_to_hide("global_step50")).symlink_to(outside)
    (shelf.folder / doomed_name(name_to_hide("global_step60"))).symlink_to(outside)
    result = shelf.pruner().run()
    assert (outside / "precious").stat().st_size == 64 and 100 not in shelf.steps()
    assert [outcome.text for outcome in result.outcomes if outcome.result == "failed"] == [
        f"{shelf.folder / result.outcomes[0].name}: it is a link; remove it by hand"
    ]


# ----------------------------------------------------------------------------- a full disk
@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 2 MB, or as the test says, for the journal and the state alone."""
    place = tmp_path / "disk"
    place.mkdir()
    size = f"size={getattr(request, 'param', 2)}m"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tr11-test", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    with (
        pytest.raises(OSError, match="No space left"),
        (place / "filler").open("ab", buffering=0) as stream,
    ):
        while stream.write(bytes(512)):
            pass


def test_what_cannot_be_recorded_is_not_removed(shelf: Shelf, small_disk: Path) -> None:
    everything = list(range(100, 4100, 100))
    shelf.save(*everything, size=8)
    shelf.directory.journal.symlink_to(small_disk)
    (small_disk / "filler").write_bytes(bytes((2 << 20) - 4096))
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        shelf.pruner().run()
    assert shelf.steps() == everything
    (small_disk / "filler").unlink()
    # It fills up in the middle: what was begun is done and was named before; nothing more is.
    result = shelf.pruner(
        policy=policy(copies=BackupSection()), tell=lambda outcome: fill(small_disk)
    ).run()
    assert "cannot be recorded" in result.ended_early and result.failed
    gone = [checkpoint_name(step) for step in everything if step not in shelf.steps()]
    assert gone == [outcome.name for outcome in result.outcomes] and 0 < len(gone) < 30
    (begun,) = journal(shelf, BEGUN)
    assert set(gone) <= {victim["name"] for victim in begun.data["victims"]}
    # that of the last did not fit
    assert [entry.data["name"] for entry in journal(shelf, REMOVED)] == gone[:-1]


def test_a_state_folder_that_is_full_stops_it_before_the_first(
    shelf: Shelf, small_disk: Path
) -> None:
    shelf.save(100, 200, 300)
    shelf.directory.paths.state.symlink_to(small_disk)
    (small_disk / "filler").write_bytes(bytes((2 << 20) - 4096))
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        shelf.pruner().run()
    assert shelf.steps() == [100, 200, 300] and not state_folder(shelf.directory).exists()


@pytest.mark.parametrize("small_disk", [8], indirect=True)
def test_what_was_set_aside_makes_room_for_a_prunes_records(shelf: Shelf, small_disk: Path) -> None:
    shelf.save(*range(100, 1100, 100))
    shelf.directory.paths.state.symlink_to(small_disk)
    (small_disk / "journal").mkdir()
    shelf.directory.journal.symlink_to(small_disk / "journal")
    keep_reserve(shelf.directory)
    reserve = shelf.directory.paths.state / RESERVE_FILE
    assert reserve.stat().st_size == RESERVE_BYTES
    fill(small_disk)
    result = shelf.pruner().run()
    assert not result.failed and shelf.steps() == [900, 1000]
    assert len(journal(shelf, REMOVED)) == 8
    assert not reserve.exists()  # what was freed lies on another disk here
    (small_disk / "filler").unlink()
    shelf.pruner().run()
    assert reserve.stat().st_size == RESERVE_BYTES


@pytest.mark.parametrize("small_disk", [8], indirect=True)
def test_room_that_ends_between_claim_and_journal_is_made_too(
    shelf: Shelf, small_disk: Path
) -> None:
    """The claim was taken, and cannot be let go of on the full disk: it is this very prune's."""
    shelf.save(100, 200, 300)
    shelf.directory.paths.state.symlink_to(small_disk)
    (small_disk / "journal").mkdir()
    shelf.directory.journal.symlink_to(small_disk / "journal")
    keep_reserve(shelf.directory)

    def fills_up(folder: Path) -> Clocks:
        if not (small_disk / "filler").exists():
            fill(small_disk)
        return read_clocks(folder)

    assert not shelf.pruner(look_at_clocks=fills_up).run().failed
    assert shelf.steps() == [200, 300]


def test_another_failure_does_not_cost_the_reserve(shelf: Shelf) -> None:
    keep_reserve(shelf.directory)
    assert not spend_reserve(shelf.directory, PermissionError(errno.EACCES, "no"))
    assert (shelf.directory.paths.state / RESERVE_FILE).exists()
    assert spend_reserve(shelf.directory, OSError(errno.EDQUOT, "quota"))
    assert not spend_reserve(shelf.directory, OSError(errno.EDQUOT, "quota"))  # there is none left
