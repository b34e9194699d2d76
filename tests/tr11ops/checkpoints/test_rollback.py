"""Going back by hand: what is planned and refused, the renames, a kill at each of them, the undo,
and a race.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.forks import killed_at
from tests.leases import read_lease
from tests.tr11ops.checkpoints.shelf import Shelf
from tests.trainer.schedule_cards import card
from tr11ops.base.errors import NotPossible, TrainerAlive
from tr11ops.checkpoints import rollback
from tr11ops.checkpoints.rollback import (
    BEGUN,
    DONE,
    RollbackPlan,
    carry_out,
    claimed,
    finish_pending,
    plan_rollback,
    plan_undo,
)
from tr11ops.rundir.claims import ClaimTaken
from tr11ops.rundir.journal import read_journal
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.checkpoints import find_resumable
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.record import IterationRange
from trainer.contract.recovery import (
    BY_HAND,
    RecoveryEvent,
    RecoveryRecord,
    read_recovery,
    settle,
    write_recovery,
)
from trainer.schedule.path import SkipPlan

CONFIG = card(batch={"train_samples": 100_000})


def plan(
    shelf: Shelf, step: int, skip: IterationRange | int | None = None, last: int = 450
) -> RollbackPlan:
    return plan_rollback(
        shelf.catalogue(), read_recovery(shelf.directory.paths), CONFIG, step, skip, "ana", last
    )


def go_back(shelf: Shelf, step: int, skip: IterationRange | int | None = None) -> None:
    with claimed(shelf.directory):
        carry_out(shelf.directory, plan(shelf, step, skip), "a spike", "ana")


def undo(shelf: Shelf) -> RollbackPlan:
    with claimed(shelf.directory):
        planned = plan_undo(shelf.catalogue(), read_recovery(shelf.directory.paths), "ana")
        carry_out(shelf.directory, planned, "", "ana")
    return planned


def skipped(shelf: Shelf) -> SkipPlan:
    return SkipPlan.of(CONFIG, read_recovery(shelf.directory.paths).ranges)


def resumes_from(shelf: Shelf) -> int | None:
    """What a training that starts now would load."""
    record = settle(shelf.directory.paths, read_recovery(shelf.directory.paths))
    assert record.pending is None
    return find_resumable(shelf.folder, "digests", True, print)


def test_newer_ones_are_set_aside_and_all_comes_back(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    before = shelf.prints(shelf.steps())
    go_back(shelf, 200, IterationRange(251, 260))
    assert shelf.steps() == [100, 200] and read_latest(shelf.folder) == 200
    assert {"global_step300.discarded", "global_step400.discarded"} <= shelf.names()
    assert skipped(shelf).ranges == (IterationRange(251, 260),)
    assert resumes_from(shelf) == 200
    event = read_recovery(shelf.directory.paths).events[0]
    assert (event.kind, event.to_step, event.who, event.latest) == (
        BY_HAND,
        200,
        "ana",
        "global_step400",
    )
    (note,) = shelf.directory.paths.metrics.read_text().splitlines()  # for those who read its steps
    assert json.loads(note)["kind"] == "roll-back" and json.loads(note)["to"] == 200
    assert undo(shelf).gone == ()
    assert shelf.prints(shelf.steps()) == before and read_latest(shelf.folder) == 400
    assert skipped(shelf).ranges == () and read_recovery(shelf.directory.paths) == RecoveryRecord()
    assert [entry.kind for entry in read_journal(shelf.directory.journal).entries] == [
        BEGUN,
        DONE,
    ] * 2


def test_without_a_skip_later_trainings_save_those_steps_again(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    go_back(shelf, 100)
    shelf.save(200, 300)  # trained again
    assert resumes_from(shelf) == 300 and shelf.catalogue().at(200).is_sound  # type: ignore[union-attr]
    assert skipped(shelf).ranges == ()


def test_what_is_saved_at_the_end_of_the_skip_is_resumed(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    go_back(shelf, 100, 100)  # 101 to 200 are passed over, and the old step 200 is set aside
    assert {"global_step200.discarded", "global_step300.discarded"} <= shelf.names()
    shelf.save(200)
    assert shelf.catalogue().at(200).is_sound  # type: ignore[union-attr]
    assert resumes_from(shelf) == 200 and shelf.steps() == [100, 200]


def test_an_undo_sets_aside_what_was_saved_since(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    before = shelf.prints([200, 300])
    go_back(shelf, 100)
    shelf.save(200)
    since = shelf.prints([200])
    planned = undo(shelf)
    assert planned.moves[0] == ("global_step200", "global_step200.discarded-2")
    assert shelf.prints([200, 300]) == before and read_latest(shelf.folder) == 300
    quarantined = shelf.folder / "global_step200.discarded-2"
    assert {path.name: path.read_bytes() for path in quarantined.rglob("*.bin")}
    assert len(since) == sum(1 for path in quarantined.rglob("*") if path.is_file())


def test_an_undo_says_what_is_gone(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    go_back(shelf, 100, 5)
    result = shelf.pruner(set_aside=True, policy=replace(shelf.pruner().policy, addresses={})).run()
    assert not result.failed and "global_step300.discarded" not in shelf.names()
    planned = undo(shelf)
    assert "global_step300.discarded" in planned.gone and planned.to_step == read_latest(
        shelf.folder
    )
    assert skipped(shelf).ranges == ()


def test_the_skip_is_counted_in_whole_batches(shelf: Shelf) -> None:
    shelf.save(100)
    found = plan(shelf, 100, 10)
    assert found.skip is not None and found.skip.range == IterationRange(101, 110)
    assert (found.skip.samples, found.skip.tokens) == (1920, 1920 * 2048)
    assert found.moves == () and not found.changes_nothing
    assert plan(shelf, 100).changes_nothing


def test_what_is_refused(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    (shelf.folder / "global_step300" / "weights" / "a.bin").unlink()
    shelf.half(350)
    shelf.save(250)
    shelf.without_optimizer(250)
    with pytest.raises(NotPossible, match="weights alone"):
        plan(shelf, 250)
    for step, why in (
        (150, "does not exist"),
        (300, "no training resumes from step 300"),
        (350, "it is not complete"),
    ):
        with pytest.raises(NotPossible, match=why):
            plan(shelf, step)
    with pytest.raises(NotPossible, match="is part of step 200 already"):
        plan(shelf, 200, IterationRange(190, 210))
    with pytest.raises(NotPossible, match="beyond the training's end"):
        plan(shelf, 200, 10**6)
    with pytest.raises(NotPossible, match="no roll-back to undo"):
        plan_undo(shelf.catalogue(), RecoveryRecord(), "ana")
    own = RecoveryEvent("loss", 9.0, 2.0, 410, 390, 300, 391, 420, 1.0)
    with pytest.raises(NotPossible, match="the trainer's own"):
        plan_undo(shelf.catalogue(), RecoveryRecord((own,)), "ana")
    write_recovery(shelf.directory.paths, RecoveryRecord((own,)))
    with pytest.raises(NotPossible, match="was discarded by an earlier roll-back"):
        plan(shelf, 400)
    (shelf.folder / "global_step100").rename(shelf.folder / ".global_step100.pruning-0123456789ab")
    with pytest.raises(NotPossible, match="a prune was cut off"):
        plan(shelf, 200)


def scene(folder: Path) -> tuple[Shelf, dict[str, str]]:
    folder.mkdir()
    shelf = Shelf(folder)
    shelf.save(100, 200, 300, 400, size=16)
    return shelf, shelf.prints(shelf.steps())


@pytest.mark.parametrize("finisher", ["launch", "command", "undo"])
def test_killed_before_each_effect_the_next_one_finishes(memory: Path, finisher: str) -> None:
    seen = Counter[str]()
    for number in itertools.count(1):
        shelf, before = scene(memory / str(number))
        if not killed_at(number, lambda shelf=shelf: go_back(shelf, 200, 10)):
            break
        paths = shelf.directory.paths
        record = read_recovery(paths)
        assert read_latest(shelf.folder) in shelf.steps()  # it never names what has gone
        if record.pending is not None:
            seen["cut off"] += 1
            assert not shelf.pruner().plan().victims  # nothing is removed meanwhile
        if shelf.steps() != [100, 200, 300, 400]:
            seen["renaming"] += 1
            assert record.events and read_journal(shelf.directory.journal).entries[0].kind == BEGUN
        if finisher == "launch":
            assert resumes_from(shelf) == (200 if record.events else 400)
        elif record.pending is not None:
            with claimed(shelf.directory):
                finish_pending(shelf.directory, record, "ana", "")
        if record.events:
            assert shelf.steps() == [100, 200] and read_latest(shelf.folder) == 200, number
            assert skipped(shelf).ranges == (IterationRange(201, 210),)
            if finisher == "undo":
                undo(shelf)
                assert shelf.prints(shelf.steps()) == before and read_latest(shelf.folder) == 400
    assert number > 11 and shelf.steps() == [100, 200]
    assert seen["cut off"] > 3 and seen["renaming"] > 2  # the kills fell where it matters


def test_an_undo_killed_before_each_effect_is_finished(memory: Path) -> None:
    def ready(folder: Path) -> tuple[Shelf, dict[str, str]]:
        shelf, before = scene(folder)
        go_back(shelf, 200, 10)
        shelf.save(300, size=16)  # and trained again since
        return shelf, before

    for number in itertools.count(1):
        shelf, before = ready(memory / str(number))
        if not killed_at(number, lambda shelf=shelf: undo(shelf)):
            break
        was_decided = not read_recovery(shelf.directory.paths).events
        assert resumes_from(shelf) == (400 if was_decided else 300), number
        if was_decided:
            assert shelf.prints([100, 200, 300, 400]) == before
            assert "global_step300.discarded-2" in shelf.names()
    assert number > 2


def test_a_training_that_starts_meanwhile(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lease: nothing is changed. It starts between two effects: it waits, or, where
    the roll-back was silent for long, takes over and finishes.
    """
    shelf.save(100, 200, 300, 400)
    paths = shelf.directory.paths
    leases = LeaseFolder(paths)
    trainer = LeaseClaim.of_this_process("7", 1)
    assert leases.claim(1, replace(trainer, epoch=1))
    # this host's clock alone ends no life
    monkeypatch.setattr(rollback, "now", lambda: time.time() + 7200)
    with pytest.raises(TrainerAlive, match=r"nothing was changed: .*job 7"):
        go_back(shelf, 200)
    assert read_recovery(paths) == RecoveryRecord() and shelf.steps() == [100, 200, 300, 400]
    leases.renew(1, 1, held=False)
    write = rollback.write_recovery

    def write_and_start(*given: Any) -> None:
        write(*given)
        holder = read_lease(paths)
        # a trainer that starts now watches this claim
        assert holder is not None and holder.held and holder.epoch == 2
        assert leases.claim(3, replace(trainer, epoch=3))

    monkeypatch.setattr(rollback, "write_recovery", write_and_start)
    with pytest.raises(TrainerAlive, match="finishes it"):
        go_back(shelf, 200)
    assert shelf.steps() == [100, 200, 300, 400] and read_recovery(paths).pending is not None
    assert resumes_from(shelf) == 200 and shelf.steps() == [100, 200]


def test_a_training_right_after_the_record_keeps_the_roll_back(shelf: Shelf) -> None:
    """It takes the lease in turn, reads the record and finishes it: no one withdraws what it has
    read.
    """
    shelf.save(100, 200, 300)
    go_back(shelf, 100, 50)
    lease = read_lease(shelf.directory.paths)
    assert lease is not None and not lease.held
    assert resumes_from(shelf) == 100 and skipped(shelf).ranges == (IterationRange(101, 150),)


def test_a_prune_and_a_roll_back_take_turns(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    with claimed(shelf.directory), pytest.raises(ClaimTaken):
        go_back(shelf, 100)
    assert shelf.steps() == [100, 200, 300]
    go_back(shelf, 100)


def test_roll_backs_by_hand_do_not_use_up_the_trainers_own() -> None:
    own = RecoveryEvent("loss", 9.0, 2.0, 410, 390, 300, 391, 420, 1.0)
    assert RecoveryRecord((own, replace(own, kind=BY_HAND))).automatic == 1
