"""What is known, and what is not, of an end of another trainer that nothing explains. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tr11ops.base.units import first_few
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Attempt, Snapshot
from trainer.contract.attempt import EndMarker

if TYPE_CHECKING:
    from tr11ops.trainers.levels import TrainerStanding


def is_without_word(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Whether an attempt of another trainer than tr11's own ended badly, and nothing explains it."""
    return snapshot.run.standing is not None and (
        attempt.cause == "unknown" or _is_unexplained(attempt)
    )


def facts_and_gaps(snapshot: Snapshot, row: Sequence[Attempt]) -> Iterator[str]:
    """Lines for who has to find out: what these attempts, newest first, are known to have done, what is
    not known, and what to say in the card where its last step is not known.
    """
    standing, reached = snapshot.run.standing, _reached(snapshot, row)
    if standing is None:
        return
    yield f"known: {'; '.join(_known(snapshot, standing, reached))}"
    yield f"not known: {_not_known(standing, row[0])}"
    if reached and _is_unexplained(row[0]) and derived.total_iterations(snapshot) is None:
        yield f"if it was done at iteration {reached[-1]}: `trainer.steps = {reached[-1]}` in the card says so"


def look_at(snapshot: Snapshot, attempt: Attempt) -> str:
    """The command that shows what it said last."""
    return derived.command(snapshot, f"logs --attempt {attempt.label or attempt.job_id}")


def _is_unexplained(attempt: Attempt) -> bool:
    return isinstance(attempt.end, EndMarker) and attempt.end.reason == "unexplained"


def _reached(snapshot: Snapshot, row: Sequence[Attempt]) -> list[int]:
    """The iteration after which each launch of these attempts ended, oldest first; without those that
    finished none.
    """
    ends = derived.launch_ends(snapshot, {attempt.job_id for attempt in row})
    if ends:
        return [one.reached for one in ends if one.reached is not None]
    markers = [attempt.end for attempt in reversed(row) if isinstance(attempt.end, EndMarker)]
    return [marker.iteration for marker in markers if marker.iteration]


def _known(snapshot: Snapshot, standing: TrainerStanding, reached: list[int]) -> Iterator[str]:
    if not reached:
        yield "it finished no iteration"
    elif len(reached) == 1:
        yield f"it ended after iteration {reached[0]}"
    else:
        yield f"{len(reached)} launches ended so, after iterations {first_few(reached)}"
    saved = snapshot.newest_sound
    if saved is not None:
        yield f"the newest whole checkpoint is {standing.name_of(saved.step)}"


def _not_known(standing: TrainerStanding, newest: Attempt) -> str:
    if _is_unexplained(newest):
        return "why it left, unasked and without an error; what it said last may tell"
    if standing.is_watched:
        return "why: neither its log nor the scheduler tells"
    return "why: neither its log, nor how its workers ended, nor the nodes, nor the scheduler tell"
