"""A prune that is killed anywhere, two at once, and a training that goes on meanwhile."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.forks import exit_code, forked, killed_at
from tests.tr11ops.checkpoints.shelf import NOW, Shelf
from tr11ops.checkpoints import prune as pruning
from tr11ops.checkpoints.prune import BEGUN, REMOVED
from tr11ops.checkpoints.quarantine import list_quarantined
from tr11ops.rundir.checkpoint_pins import pin
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from tr11ops.rundir.journal import read_journal
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import find_resumable, partial_path
from trainer.contract.files import write_atomically

BUSY = 7  # how a prune leaves that found another at work


def scene(folder: Path) -> tuple[Shelf, dict[str, str]]:
    """Three to go, three to stay: pinned, last but one, last; the digests of those that stay."""
    folder.mkdir()
    shelf = Shelf(folder)
    shelf.save(100, 1000, 9_800, 9_850, 9_900, 10_000, size=16)
    shelf.copy(1000)
    pin(shelf.directory, 9_800, "ana", "", NOW)
    return shelf, shelf.prints([9_800, 9_900, 10_000])


def test_killed_before_each_effect_the_next_one_finishes(memory: Path) -> None:
    left = Counter[str]()
    for number in itertools.count(1):
        shelf, kept = scene(memory / str(number))
        if not killed_at(number, shelf.pruner().run):
            break
        shelf.assert_whole()
        assert shelf.prints([9_800, 9_900, 10_000]) == kept, number
        assert find_resumable(shelf.folder, "digests", True, print) == 10_000
        left.update(quarantined.kind for quarantined in list_quarantined(shelf.folder))
        if shelf.steps() != [100, 1000, 9_800, 9_850, 9_900, 10_000]:  # nothing goes unrecorded
            assert [entry.kind for entry in read_journal(shelf.directory.journal).entries].count(
                BEGUN
            ) == 1
        result = shelf.pruner().run()
        assert not result.failed and shelf.steps() == [9_800, 9_900, 10_000], (number, result)
        assert not list_quarantined(shelf.folder) and shelf.prints([9_800, 9_900, 10_000]) == kept
        ledger = read_journal(shelf.directory.journal)
        assert ledger.is_sound
        named = {
            victim["name"]
            for entry in ledger.entries
            if entry.kind == BEGUN
            for victim in entry.data["victims"]
        }
        assert named == {"global_step100", "global_step1000", "global_step9850"}
    assert number > 51 and shelf.steps() == [9_800, 9_900, 10_000]
    # the kills fell where it matters
    assert left["being removed"] > 5 and left["hidden by a prune"] > 0


def prune(shelf: Shelf) -> None:
    try:
        shelf.pruner().run()
    except ClaimTaken:
        os._exit(BUSY)


@pytest.mark.parametrize("is_claimed", [True, False])
def test_two_prunes_and_a_living_copy_at_once(
    memory: Path, is_claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the claim of one is taken for dead, as after a jump of a clock: then the renames
    decide.
    """
    if not is_claimed:
        monkeypatch.setattr(pruning, "CLAIM_SECONDS", -1.0)
    for trial in range(8):
        shelf, kept = scene(memory / str(trial))
        copying = ClaimFolder(shelf.directory, "copy-store")
        assert copying.take(Claim.of_this_process(time.time(), 60, step=100), None)
        source = shelf.prints([100])
        codes = [
            exit_code(child)
            for child in [forked(lambda shelf=shelf: prune(shelf)) for _ in range(2)]
        ]
        assert set(codes) <= {0, BUSY} and 0 in codes
        # where one gave way to the other's folder, a third has the rest
        assert shelf.pruner().run().failed is False
        assert shelf.steps() == [100, 9_800, 9_900, 10_000] and not list_quarantined(shelf.folder)
        assert shelf.prints([100]) == source and shelf.prints([9_800, 9_900, 10_000]) == kept
        ledger = read_journal(shelf.directory.journal)
        removed = Counter(entry.data["name"] for entry in ledger.entries if entry.kind == REMOVED)
        assert ledger.is_sound and set(removed) <= {"global_step1000", "global_step9850"}
        assert max(removed.values(), default=1) == 1


def test_a_training_that_saves_and_rolls_back_meanwhile(shelf: Shelf, tmp_path: Path) -> None:
    shelf.save(*range(100, 1000, 100), size=16)
    staging = Shelf(tmp_path / "staging")
    ended, faults = threading.Event(), []

    def train() -> None:
        """Publishes as the trainer does, by renames, and now and then discards what it has just
        saved.
        """
        for step in range(1000, 3000, 100):
            staging.save(step, size=16)
            partial = partial_path(shelf.folder, step, "nonce")
            (staging.folder / checkpoint_name(step)).rename(partial)
            partial.rename(shelf.folder / checkpoint_name(step))
            write_atomically(shelf.folder / "latest", checkpoint_name(step))
            if step % 500 == 0:
                write_atomically(shelf.folder / "latest", checkpoint_name(step - 100))
                shelf.discard(step)
        ended.set()

    def look() -> None:
        while not ended.is_set():
            try:
                found = find_resumable(shelf.folder, "sizes", True, lambda line: None)
            except ValueError as error:
                faults.append(str(error))
            else:
                if found is None or found < 900:
                    faults.append(f"a restart would take {found}")

    threads = [threading.Thread(target=work) for work in (train, look)]
    for thread in threads:
        thread.start()
    rounds = 0
    while not ended.is_set() or rounds < 3:
        shelf.pruner().run()
        rounds += 1
    for thread in threads:
        thread.join()
    shelf.pruner().run()
    assert not faults
    shelf.assert_whole()
    assert (
        shelf.steps() == [2800, 2900] and sum(".discarded" in name for name in shelf.names()) == 4
    )
