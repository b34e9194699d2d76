"""When the loss on texts that are not trained on is told to rise."""

from __future__ import annotations

import pytest

from tests.tr11ops.status_cases import NOW, changed, idle, snapshot, steps
from tr11ops.base.observed import Unknown
from tr11ops.detect.numbers import validation_loss_rises
from tr11ops.observe.observations import Validation
from tr11ops.observe.snapshot import Snapshot

EVERY = 1000


def evaluated(*losses: float, name: str = "valid", first: int = EVERY) -> tuple[Validation, ...]:
    """Evaluations every thousand iterations, an hour apart, before the steps that are seen."""
    return tuple(
        Validation(name, first + EVERY * place, loss, NOW - 3600.0 * (100 - place))
        for place, loss in enumerate(losses)
    )


def seen(*validations: Validation) -> Snapshot:
    return changed(snapshot(), validations=validations)


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [
        ((), False),
        ((3.0,), False),
        ((2.0, 3.0), False),
        ((3.0, 2.5, 2.4, 2.3), False),
        ((2.4, 2.3, 2.36, 2.41), True),
        ((2.3, 2.5, 2.5), True),
        # noise, a rise once, one that comes back
        ((2.3, 2.33, 2.34), False),
        ((2.4, 2.3, 2.5), False),
        ((2.3, 2.6, 2.5), False),
        ((2.3, 2.6, 2.6, 2.2), False),
    ],
)
def test_two_evaluations_in_a_row_far_above_the_lowest_are_told(
    losses: tuple[float, ...], is_told: bool
) -> None:
    assert bool(validation_loss_rises.detect(seen(*evaluated(*losses)))) is is_told


def test_each_set_of_texts_is_told_for_itself() -> None:
    sets = {"code": (2.0, 2.2, 2.4), "prose": (3.0, 2.9, 2.8), "talk": (4.0, 5.0, 6.0)}
    mixed = [one for name, losses in sets.items() for one in evaluated(*losses, name=name)]
    code, talk = validation_loss_rises.detect(seen(*mixed))
    assert (code.identity, talk.identity) == (("code",), ("talk",))
    assert code.title == "the loss on code has risen by 20.0% since iteration 1000"
    assert code.evidence == (
        "iteration 1000: loss 2", "iteration 2000: loss 2.2", "iteration 3000: loss 2.4",
    )  # fmt: skip
    assert code.since == mixed[0].time and code.fix == "tr11 report"


def test_what_the_training_has_gone_back_behind_does_not_count() -> None:
    risen = evaluated(2.0, 2.2, 2.4)
    assert validation_loss_rises.detect(seen(*risen))
    again = (*risen, *evaluated(2.0, first=2 * EVERY))
    assert not validation_loss_rises.detect(seen(*again)), "evaluated again at the second one"
    back = changed(seen(*risen), steps=steps(last=2 * EVERY - 1))
    assert not validation_loss_rises.detect(back), "it has not come to the second one again"


def test_nothing_is_told_where_nothing_trains_or_what_tells_is_hidden() -> None:
    risen = evaluated(2.0, 2.2, 2.4)
    assert not validation_loss_rises.detect(changed(idle(), validations=risen))
    for hidden in ("jobs", "steps", "validations"):
        blind = changed(seen(*risen), **{hidden: Unknown("the disk is away")})
        assert not validation_loss_rises.detect(blind) and validation_loss_rises.is_blind(blind)
