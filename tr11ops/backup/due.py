"""What a round copies where, what is copied already, and what is not copied and why. Pure.

A copy counts when it is sound, and of the very checkpoint that is here: one that was trained again
has another identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tr11ops.rundir.checkpoint_scan import CheckpointRow
from tr11ops.rundir.copies import CopyRecord, Kind
from tr11ops.rundir.copy_policy import CopyPolicy, WantedCopy, in_order, wanted_copies
from trainer.contract.record import Record


class Due(WantedCopy):
    """One copy to make. `repairs`: it replaces what is wrong in a damaged copy."""

    identity: str
    repairs: bool = False


class CopyPlan(Record):
    """`left` are checkpoints that are not copied anywhere by this plan, each with its reason."""

    due: tuple[Due, ...]
    copied: tuple[CopyRecord, ...]
    left: tuple[tuple[int, str], ...]


class Asked(Record):
    """What a person asked for instead of what the card wants. No steps: what the card wants, of one
    kind if given.
    """

    steps: tuple[int, ...] = ()
    kind: Kind | None = None


CARD_DECIDES = Asked()


def plan_round(
    policy: CopyPolicy,
    rows: Sequence[CheckpointRow],
    copies: Iterable[CopyRecord],
    last_step: int,
    archives: Sequence[str],
    asked: Asked = CARD_DECIDES,
) -> CopyPlan:
    """The copies that a round makes, in order. `archives`: where it goes; `rows`: what is here."""
    here = {row.step: row for row in rows if is_whole(row)}
    known = [copy for copy in copies if copy.archive in archives and copy.kind != "data"]
    of_here = [
        copy for copy in known if copy.step not in here or copy.identity == here[copy.step].identity
    ]
    if asked.steps:
        wanted: tuple[WantedCopy, ...] = tuple(_by_hand(asked, archives))
    else:
        steps = sorted(here.keys() | {copy.step for copy in of_here if copy.is_sound})
        wanted = wanted_copies(policy, steps, last_step)
        wanted = tuple(
            copy for copy in wanted if copy.archive in archives and asked.kind in (None, copy.kind)
        )
    due: list[Due] = []
    copied: list[CopyRecord] = []
    for copy in wanted:
        sound = next(
            (record for record in of_here if record.is_sound and _is_that(record, copy)), None
        )
        if sound is not None:
            copied.append(sound)
        elif copy.step in here:
            broken = any(not record.is_sound and _is_that(record, copy) for record in of_here)
            if broken:
                why = f"{copy.why}; the copy is damaged"
            else:
                why = copy.why
            due.append(
                Due(copy.step, copy.kind, copy.archive, why, here[copy.step].identity, broken)
            )
    if not asked.steps:
        due += _damaged_beside(of_here, here, due, asked.kind)
    touched = {copy.step for copy in due} | {copy.step for copy in copied}
    if not asked.steps:
        left = tuple(_left(rows, touched, known))
    else:
        left = ()
    return CopyPlan(in_order(due), tuple(copied), left)


def is_whole(row: CheckpointRow) -> bool:
    """Whether a checkpoint may be copied: whole by its manifest, or of the original's layout, which
    has none.
    """
    return not row.faults and bool(row.identity) and row.manifest in {"read", "foreign"}


def _by_hand(asked: Asked, archives: Sequence[str]) -> Iterator[WantedCopy]:
    for step in sorted(set(asked.steps)):
        for name in archives:
            yield WantedCopy(step, asked.kind or "full", name, "by hand")


def _is_that(record: CopyRecord, wanted: WantedCopy) -> bool:
    """Whether a record is of the wanted copy; a whole one holds all that the others do."""
    kinds = {wanted.kind, "full"}
    return (record.archive, record.step) == (wanted.archive, wanted.step) and record.kind in kinds


def _damaged_beside(
    copies: Iterable[CopyRecord],
    here: dict[int, CheckpointRow],
    due: Sequence[Due],
    kind: Kind | None,
) -> list[Due]:
    """Damaged copies that no rule asks for any more, but that can be repaired from what is here."""
    known = {(copy.step, copy.kind, copy.archive) for copy in due}
    return [
        Due(copy.step, copy.kind, copy.archive, "the copy is damaged", copy.identity, repairs=True)
        for copy in copies
        if not copy.is_sound
        and copy.step in here
        and kind in (None, copy.kind)
        and (copy.step, copy.kind, copy.archive) not in known
        and copy.identity == here[copy.step].identity
    ]


def _left(
    rows: Sequence[CheckpointRow], touched: set[int], copies: Sequence[CopyRecord]
) -> Iterator[tuple[int, str]]:
    for row in rows:
        if row.step in touched:
            continue
        if row.faults:
            yield row.step, f"not whole: {row.faults[0]}"
        elif not is_whole(row):
            yield row.step, "no checkpoint that tr11 knows"
        elif any(
            copy.step == row.step and copy.is_sound and copy.identity == row.identity
            for copy in copies
        ):
            yield row.step, "copied already, by hand"
        else:
            yield row.step, "no key of [backup] asks for it"
