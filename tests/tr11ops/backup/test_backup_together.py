"""Rounds that are killed, that meet each other, and that meet a prune: nothing is lost, nothing is
done twice.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.backup.copy_cases import contents
from tests.tr11ops.backup.round_cases import NOW, Rounds, receipts_below
from tests.tr11ops.backup.round_nursery import RoundNursery
from tr11ops.backup.round_values import (
    CLAIM_SECONDS,
    ArchiveLock,
    claims_of,
    owner_of,
)
from tr11ops.checkpoints.prune import Pruner
from tr11ops.rundir.claims import Claim, ClaimTaken
from trainer.contract.checkpoint_names import checkpoint_steps

KILLS = 50


@pytest.fixture
def rounds(memory: Path) -> Rounds:
    return Rounds(memory, "backup.parallel=2")


@pytest.fixture(scope="module")
def killer() -> Iterator[RoundNursery]:
    with RoundNursery() as made:
        yield made


# ----------------------------------------------------------------------------- killed
def test_killed_at_any_call_the_next_round_finishes(rounds: Rounds, killer: RoundNursery) -> None:
    """Copies, logs, records, re-reading: whatever was being done, the next round ends where an
    unbroken one does.
    """
    rounds.save(100, 300)
    (log := rounds.directory.paths.main_log).parent.mkdir(parents=True)
    log.write_text("iteration 1\n" * 50)
    chance, kills, trial = random.Random(5), 0, 0
    state = rounds.directory.paths.state
    while kills < KILLS:
        trial += 1
        shutil.rmtree(rounds.store)
        rounds.store.mkdir()
        shutil.rmtree(state, ignore_errors=True)
        for _ in range(3):
            kills += killer.killed(rounds.folder, chance.randrange(1, 150))
            for path in receipts_below(rounds.store):
                folder = rounds.store / path.removesuffix(".copy.json")
                assert (folder / "manifest.json").is_file(), "a receipt without its copy"
        done = rounds.run("store", reading="all")
        assert done.exit_code == 0, done
        assert rounds.copied("store") == [(100, "full"), (300, "full")]
        for step in (100, 300):
            assert contents(rounds.far(step, ".")) == contents(
                rounds.checkpoints / f"global_step{step}"
            )
        assert (rounds.store / "small-logs/logs/main/main_log.txt").read_bytes() == log.read_bytes()
        assert len(receipts_below(rounds.store)) == 2, "nothing is there twice"
        assert (
            rounds.status()["copied"]["store"] == {"full": [100, 300]}
            and rounds.status()["damaged"] == []
        )
    assert trial >= KILLS / 3


# ----------------------------------------------------------------------------- two at once
def test_a_second_round_says_who_is_at_it_and_leaves(rounds: Rounds) -> None:
    rounds.save(100)
    with ArchiveLock(rounds.directory, "store", threading.Event()) as turn:
        turn.copying(100)
        done = rounds.run()
    assert done.exit_code == 0
    store, url = done.tallies
    assert (
        f"process {os.getpid()} of" in store.busy
        and "(step 100)" in store.busy
        and not store.copied
    )
    assert [copy.step for copy in url.copied] == [100], "the other archive is free"
    assert rounds.run("store").tallies[0].copied


def test_two_backups_and_a_prune_at_once(tmp_path: Path) -> None:
    """New checkpoints come all the time. In the end all that was wanted is copied, once, and
    nothing else is lost.
    """
    rounds = Rounds(
        tmp_path, "backup.keep_latest=2", "backup.store_interval=200", "backup.weights_interval=0"
    )
    rounds.save(100, 200)
    saved = {100, 200}
    over = threading.Event()
    errors: list[BaseException] = []

    def repeat(action: object) -> None:
        while not over.is_set():
            try:
                action()  # type: ignore[operator]
            except ClaimTaken:
                continue
            except BaseException as error:
                errors.append(error)
                raise

    pruner = Pruner.of(rounds.card, "ana", "a test")
    threads = [
        threading.Thread(target=repeat, args=(action,))
        for action in (rounds.run, rounds.run, pruner.run)
    ]
    for thread in threads:
        thread.start()
    try:
        for step in range(300, 1900, 100):
            rounds.save(step)
            saved.add(step)
            over.wait(0.05)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors
    rounds.run()
    wanted = sorted(step for step in saved if step % 200 == 0)
    assert [step for step, _ in rounds.copied("store")] == wanted
    assert (
        len(receipts_below(rounds.store))
        == len(wanted)
        == len([entry for entry in rounds.journal("backup-copied") if entry["archive"] == "store"])
    )
    here = set(checkpoint_steps(rounds.checkpoints))
    assert {1700, 1800} <= here < saved, "the newest two, and some were pruned"
    assert not [path for path in rounds.checkpoints.iterdir() if path.name.startswith(".")]


# ----------------------------------------------------------------------------- turns
def test_a_turn_is_renewed_and_names_the_step(rounds: Rounds) -> None:
    now = [NOW]
    with ArchiveLock(
        rounds.directory, "store", threading.Event(), lambda: now[0], renew_seconds=0.005
    ) as turn:
        turn.copying(300)
        now[0] += 1000
        renewed = threading.Event()
        for _ in range(400):
            owner = owner_of(rounds.directory, "store", now[0])
            if owner is not None and owner.expires == now[0] + CLAIM_SECONDS:
                break
            renewed.wait(0.005)
        assert (
            owner is not None
            and owner.expires == now[0] + CLAIM_SECONDS
            and owner.data == {"step": 300}
        )
        turn.copying(None)
        assert owner_of(rounds.directory, "store", now[0]).data == {}  # type: ignore[union-attr]
    assert owner_of(rounds.directory, "store", now[0]) is None


def test_a_turn_that_was_lost_stops_the_work(rounds: Rounds) -> None:
    stop = threading.Event()
    with ArchiveLock(rounds.directory, "store", stop) as turn:
        folder = claims_of(rounds.directory, "store")
        theirs = folder.take(Claim.of_this_process(NOW, 10.0, "theirs"), folder.newest())
        assert theirs is not None
        with pytest.raises(ClaimTaken):
            turn.copying(100)
        assert stop.is_set() and turn.lost
    newest = folder.newest()
    assert newest is not None and (newest.token, newest.held) == ("theirs", True), (
        "theirs is left alone"
    )


def test_the_turn_of_the_dead_is_taken_over(rounds: Rounds, killer: RoundNursery) -> None:
    rounds.save(100)
    killer.dies_in_its_turn(rounds.folder)
    newest = claims_of(rounds.directory, "store").newest()
    assert newest is not None and newest.held and newest.data == {"step": 100}
    assert owner_of(rounds.directory, "store", NOW) is None
    assert rounds.run("store").exit_code == 0 and rounds.copied("store") == [(100, "full")]
