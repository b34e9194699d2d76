"""Who needs a checkpoint now, and what of it cannot be told."""

from __future__ import annotations

import os
import time

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.checkpoints.shelf import Shelf
from tr11ops.checkpoints.catalogue import LEASE_SECONDS, Uses, read_uses, restart_uses
from tr11ops.cluster.local_records import mark
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.clocks import Clocks, read_clocks
from trainer.contract.checkpoints import find_resumable
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.phases import PhaseWriter
from trainer.contract.recovery import RecoveryEvent, RecoveryRecord, write_recovery

HOUR = 3600.0


def uses(shelf: Shelf, clocks: Clocks | None = None, load: str | None = None) -> Uses:
    return read_uses(shelf.directory, clocks or Clocks(time.time(), time.time()), load)


# ----------------------------------------------------------------------------- a restart
@pytest.mark.parametrize("latest", [None, 100, 200, 300, 400, 250, 900])
@pytest.mark.parametrize("broken", [(), (200,), (300,), (100, 400)])
def test_a_restart_takes_what_the_trainer_itself_would_take(
    shelf: Shelf, latest: int | None, broken: tuple[int, ...]
) -> None:
    steps = (100, 200, 300, 400)
    shelf.save(*steps)
    for step in broken:
        (shelf.folder / f"global_step{step}" / "cursor.json").unlink()
    (shelf.folder / "latest").unlink()
    if latest is not None:
        (shelf.folder / "latest").write_text(f"global_step{latest}")
    found = restart_uses([step for step in steps if step not in broken], latest)
    first = find_resumable(shelf.folder, "sizes", True, lambda line: None)
    assert first in found
    (shelf.folder / f"global_step{first}" / "cursor.json").unlink()  # it fails the digests, say
    assert find_resumable(shelf.folder, "sizes", True, lambda line: None) in found
    assert latest is None or latest in found


# ----------------------------------------------------------------------------- a living attempt
def attempt(shelf: Shelf, *phases: tuple[str, int], held: bool = True, age: float = 0.0) -> None:
    """An attempt that holds the lease and went through these phases."""
    folder = LeaseFolder(shelf.directory.paths)
    epoch = folder.newest()[0] + 1
    assert folder.claim(epoch, LeaseClaim("1007", 2, "n01", 1, "ana", 1.0, "token"))
    folder.renew(epoch, 3, held)
    moment = time.time() - age
    os.utime(folder.path / f"{epoch}.json", (moment, moment))
    for launch, (phase, iteration) in enumerate(phases):
        PhaseWriter(shelf.directory.paths.phases("1007"), 1 + launch // 3, print).enter(
            phase, iteration, 1.0
        )


def test_what_an_attempt_resumed_from_is_in_use(shelf: Shelf) -> None:
    attempt(
        shelf,
        ("starting", 0),
        ("loading", 0),
        ("training", 300),
        ("saving", 400),
        ("training", 400),
    )
    found = uses(shelf)
    assert found.by_step == {300: ("attempt 1007 resumed from it",)} and not found.loading
    attempt(shelf, ("loading", 400), ("data-wait", 200), ("training", 200))  # a roll-back
    assert uses(shelf).by_step == {200: ("attempt 1007 resumed from it",)}


def test_an_attempt_that_loads_may_read_any(shelf: Shelf) -> None:
    attempt(shelf)
    assert uses(shelf).loading == "attempt 1007, which does not say what it does"
    attempt(shelf, ("starting", 0))
    assert uses(shelf).loading == "attempt 1007"
    attempt(shelf, ("loading", 0))
    with shelf.directory.paths.phases("1007").open("ab") as stream:
        stream.write(b'{"time": 1.0, "phase": "trai')  # a line that is being written
    assert uses(shelf).loading == "attempt 1007"
    attempt(shelf, ("loading", 0), held=False)
    assert uses(shelf) == Uses()
    attempt(shelf, ("loading", 0), age=LEASE_SECONDS + 60)
    assert not uses(shelf).loading


def test_one_clock_alone_does_not_end_an_attempt(shelf: Shelf) -> None:
    attempt(shelf, ("loading", 0))
    now = time.time()
    for clocks in (
        Clocks(now + 1e6, now),
        Clocks(now, now + 1e6),
        Clocks(now - 1e6, now - 1e6),
        Clocks(now),
    ):
        assert uses(shelf, clocks).loading
    assert not uses(shelf, Clocks(now + 1e6, now + 1e6)).loading


def test_a_lease_that_cannot_be_read_names_no_one_and_counts(shelf: Shelf) -> None:
    attempt(shelf, ("training", 300))
    (LeaseFolder(shelf.directory.paths).path / "7.json").write_text("{")
    assert uses(shelf).loading == "an attempt whose lease cannot be read"


# -------------------------------------------------------------------------- roll-backs and the card
def test_the_step_that_the_last_roll_back_went_to(shelf: Shelf) -> None:
    event = RecoveryEvent("loss", 9.0, 2.0, 410, 390, 300, 391, 420, 1.0)
    record = RecoveryRecord((replace(event, to_step=100), event))
    write_recovery(shelf.directory.paths, record)
    found = uses(shelf)
    assert (
        found.by_step == {300: ("the last roll-back went back to it",)} and found.recovery == record
    )
    (shelf.directory.paths.state / "recovery.json").write_text(
        '{"schema": 1, "variants": {"main": [{}]}}'
    )
    with pytest.raises(ValueError, match="is damaged"):
        uses(shelf)


def test_the_step_that_the_card_loads(shelf: Shelf) -> None:
    shelf.save(100, 200)
    assert uses(shelf, load=f"{shelf.folder}/global_step100").by_step == {
        100: ("checkpoint.load of the card names it",)
    }
    (shelf.directory.root / "link").symlink_to(shelf.folder)
    assert 100 in uses(shelf, load=f"{shelf.directory.root}/link/global_step100/").by_step
    for other in (str(shelf.folder), "/elsewhere/global_step100", "global_step100"):
        assert uses(shelf, load=other) == Uses()


# ----------------------------------------------------------------------------- copies
def claim(shelf: Shelf, mine: Claim, thing: str = "copy-url") -> None:
    folder = ClaimFolder(shelf.directory, thing)
    assert folder.take(mine, folder.newest())


def test_a_step_that_is_being_copied(shelf: Shelf) -> None:
    mine = Claim.of_this_process(time.time(), 60, step=200)
    claim(shelf, mine)
    assert uses(shelf).by_step == {200: (f"it is being copied by {mine}",)}
    now = time.time()
    # it lives, whatever the clocks say
    assert 200 in uses(shelf, Clocks(now + 1e9, now + 1e9)).by_step
    claim(shelf, Claim.of_this_process(now, 60))  # between two steps
    claim(shelf, replace(mine, data={"step": 5}), "pulse")  # no copy
    assert uses(shelf) == Uses()


def test_a_copier_that_died_and_one_of_another_host(shelf: Shelf) -> None:
    mine = Claim.of_this_process(time.time(), HOUR, step=200)
    gone = replace(mine.process, pid=1 << 22)
    claim(shelf, replace(mine, process=gone))
    assert uses(shelf) == Uses()
    claim(shelf, replace(mine, process=gone, child=mark(os.getpid())))
    assert 200 in uses(shelf).by_step
    far = replace(mine, host="elsewhere", time=1.0, expires=1.0 + HOUR)
    claim(shelf, far)
    now = time.time()
    assert 200 in uses(shelf, Clocks(now, now)).by_step
    assert (
        200 in uses(shelf, Clocks(now + 1e6, now)).by_step
        and 200 in uses(shelf, Clocks(now, now + 1e6)).by_step
    )
    assert uses(shelf, Clocks(now + 1e6, now + 1e6)) == Uses()
    claim(shelf, replace(far, held=False))
    assert uses(shelf) == Uses()


def test_a_claim_that_cannot_be_read_is_not_known(shelf: Shelf) -> None:
    folder = ClaimFolder(shelf.directory, "copy-store").path
    folder.mkdir(parents=True)
    (folder / "1.json").write_text("{")
    with pytest.raises(ValueError, match="the claim of copy-store cannot be read"):
        uses(shelf)
    write_json(
        folder / "2.json", {**to_builtins(Claim.of_this_process(time.time(), 60)), "held": False}
    )
    assert uses(shelf) == Uses()


# ----------------------------------------------------------------------------- clocks
def test_both_clocks_are_asked_and_nothing_is_left(shelf: Shelf) -> None:
    folder = shelf.directory.paths.state / "checkpoints"
    clocks = read_clocks(folder)
    assert (
        clocks.server is not None
        and abs(clocks.here - clocks.server) < HOUR
        and not list(folder.iterdir())
    )
