"""The judge is no friend: with each of these faults put into prune or into the rounds, a short walk
is found wrong.

Nor does it find fault with what is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tr11ops.walk.machine import Walk, walk_of
from tests.tr11ops.walk.nursery import WalkNursery
from tests.tr11ops.walk.world import harmed
from tr11ops.backup import archive_round
from tr11ops.backup.survey import Survey
from tr11ops.checkpoints.prune import Pruner

CUT_A_FILE = (0, 1, "cut")  # of the oldest copy, behind its receipt


@pytest.fixture
def walk(nursery: WalkNursery) -> Iterator[Walk]:
    """Five steps of one run, each copied; prune keeps two."""
    walk = walk_of("folder", None, nursery)()
    walk.change_retention(0, 2, 100)
    walk.begin()
    walk.train(0, 1, True)
    walk.round(0, "none")
    yield walk
    walk.teardown()


def test_the_walk_itself_is_right(walk: Walk) -> None:
    walk.prune_beside_harm(0, *CUT_A_FILE)
    walk.prune(0)


def test_a_copy_that_is_completed_by_what_lies_there_is_right(nursery: WalkNursery) -> None:
    """The tar is whole, its receipt is not, and the checkpoint here is damaged where only a reading
    finds it.
    """
    walk = walk_of("tar", None, nursery)()
    walk.begin()
    walk.harm_here(0, 0, 5, "flip")
    walk.harm_copy(0, 0, "cut")
    walk.round(0, "none")
    (saved,) = (saved for saved in walk.world.runs[0].saved if saved.step == 100)
    assert walk.judge.seen.has(saved) and not walk.judge.at(
        walk.judge.seen, walk.world.runs[0], 100
    )
    assert (
        walk.judge.seen.copies[walk.world.addresses[0]]["checkpoints/main/global_step100"].identity
        == saved.identity
    )
    walk.teardown()


@pytest.mark.parametrize("name", ["weights/0.distcp", "manifest.json"])
def test_harm_upon_harm_undoes_none(name: str) -> None:
    content = first = b'{"a": 1}'
    for _ in range(20):
        changed = harmed(name, content, "flip")
        assert changed is not None and changed != first
        content = changed


def test_receipts_that_are_trusted_without_sizes_are_found(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Survey, "faults", lambda self, receipt: {})
    walk.harm_copy(*CUT_A_FILE)
    with pytest.raises(AssertionError, match="no copy can be reached"):
        walk.prune(0)


def test_a_prune_that_does_not_look_twice_is_found(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Pruner._looked_again

    def in_vain(self: Pruner, plan: Any, *rest: Any) -> Any:
        look(self, plan, *rest)
        return plan.policy

    monkeypatch.setattr(Pruner, "_looked_again", in_vain)
    with pytest.raises(AssertionError, match="no copy can be reached"):
        walk.prune_beside_harm(0, *CUT_A_FILE)


def test_an_archive_that_takes_any_run_is_found(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_round, "stranger_fault", lambda *words: "")
    walk.train(1, 1, True)
    with pytest.raises(AssertionError, match="written into the archive of another run"):
        walk.round(1, "none")
