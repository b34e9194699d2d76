"""The screen of `tr11 backup status`, within 80 columns, and the same as JSON values. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tr11ops.backup.due import Due
from tr11ops.backup.ledger import ArchiveState, DrillRecord, damage_line, standing
from tr11ops.backup.screen_data import data_summary
from tr11ops.base.units import counted, duration, first_few, size
from tr11ops.rundir.copies import CopyRecord
from trainer.contract.documents import document
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.backup.data_sets import DataState
    from tr11ops.rundir.claims import Claim

SCHEMA = 1
DUE_NAMED = 6
DAMAGED_SHOWN = 5
DAY_SECONDS = 86_400.0


class ArchiveView(Record):
    """One archive as it is on record: `copies` of its present address alone, `owner` who copies to
    it right now.

    `fault`: why it cannot be used as things are, if it is a folder; "" otherwise. `data`: the
    card's data sets, if it asks for their copies.
    """

    name: str
    address: str
    state: ArchiveState | None
    copies: tuple[CopyRecord, ...]
    due: tuple[Due, ...]
    owner: Claim | None
    fault: str = ""
    data: tuple[DataState, ...] = ()

    @property
    def sound(self) -> tuple[CopyRecord, ...]:
        return tuple(copy for copy in self.copies if copy.is_sound)

    @property
    def damaged(self) -> tuple[CopyRecord, ...]:
        """Damaged copies in whose place there is no other."""
        return tuple(copy for copy in standing(self.copies) if copy.damaged)

    @property
    def newest_whole(self) -> int | None:
        return max((copy.step for copy in self.sound if copy.kind == "full"), default=None)


class BackupStatus(Record):
    """Everything that is shown. `now` in seconds since the epoch."""

    run: str
    variant: str
    now: float
    archives: tuple[ArchiveView, ...]
    drill: DrillRecord | None
    reread_days: float

    @property
    def needs_person(self) -> bool:
        faulty = any(
            view.fault or view.damaged or (view.state is not None and view.state.fault)
            for view in self.archives
        )
        return faulty or (self.drill is not None and not self.drill.passed)


def lines(screen: BackupStatus) -> Iterator[str]:
    """The screen, line by line."""
    yield f"copies of {screen.run} {screen.variant}"
    for view in screen.archives:
        yield ""
        yield f"{view.name}  {view.address}"
        for label, text in _rows(view, screen):
            yield f"  {label:<12}{text}"
    yield ""
    yield f"{'drill':<14}{_drill(screen)}"


def _rows(view: ArchiveView, screen: BackupStatus) -> Iterator[tuple[str, str]]:
    kinds = [
        (kind, [copy for copy in view.sound if copy.kind == kind])
        for kind in ("full", "weights", "spike")
    ]
    parts = [
        f"{len(found)} {kind} ({size(sum(copy.bytes for copy in found))})"
        for kind, found in kinds
        if found
    ]
    yield "copies", ", ".join(parts) or "none yet"
    newest = view.newest_whole
    yield "newest", "no whole copy yet" if newest is None else f"step {newest}, whole and read back"
    yield "last round", _last(view.state, screen.now)
    if view.state is not None and view.state.fault:
        yield "", f"FAILED: {view.state.fault}"
    if view.fault and (view.state is None or view.fault not in view.state.fault):
        yield "now", f"CANNOT BE USED: {view.fault}"
    yield "read again", _reread(view, screen)
    for copy in view.damaged[:DAMAGED_SHOWN]:
        others = [other for archive in screen.archives for other in archive.copies]
        yield "DAMAGED", damage_line(copy, others, any(due.step == copy.step for due in view.due))
    if len(view.damaged) > DAMAGED_SHOWN:
        yield "", f"and {len(view.damaged) - DAMAGED_SHOWN} damaged copies more"
    yield "due", _due(view.due)
    if view.data:
        yield "data", data_summary(view.data)
        yield from (
            ("", f"{one.unit.name}: CANNOT BE COPIED: {one.why}")
            for one in view.data
            if one.state == "fault"
        )
    if view.owner is not None:
        step = view.owner.data.get("step")
        yield "at work", f"{view.owner}" + (f", step {step}" if step is not None else "")


def _last(state: ArchiveState | None, now: float) -> str:
    if state is None:
        return "none yet"
    ago = f"{duration(now - state.time)} ago"
    if not state.fault:
        rate = ""
        if state.rate:
            rate = f"; {size(state.rate)}/s, read back"
        return f"{ago}, all done{rate}"
    if state.success is None:
        success = "none ever succeeded"
    else:
        success = f"last success {duration(now - state.success)} ago"
    return f"{ago}; {success}"


def _reread(view: ArchiveView, screen: BackupStatus) -> str:
    if not view.sound:
        return "nothing to read"
    if view.state is None or view.state.unread is None:
        return "not known yet"
    age = max(0.0, screen.now - view.state.unread)
    late = " - LATE" if age > screen.reread_days * DAY_SECONDS else ""
    return f"oldest byte {duration(age)} ago, within {counted(screen.reread_days, 'day')} is wanted{late}"


def _due(due: tuple[Due, ...]) -> str:
    return first_few((f"{copy.step} ({copy.kind})" for copy in due), DUE_NAMED) or "nothing"


def _drill(screen: BackupStatus) -> str:
    drill = screen.drill
    if drill is None:
        return "a restore was never tried: tr11 backup drill"
    ago = f"{duration(screen.now - drill.time)} ago, step {drill.step} from the {drill.archive}"
    if drill.passed:
        return f"{ago}: passed"
    return f"{ago}: FAILED: {drill.message}"


def value(screen: BackupStatus) -> dict[str, Any]:
    """The screen as JSON values; times in seconds since the epoch."""
    return {
        "schema": SCHEMA,
        "run": screen.run,
        "variant": screen.variant,
        "time": screen.now,
        "needs_person": screen.needs_person,
        "archives": [
            {
                "archive": view.name,
                "address": view.address,
                "copies": [
                    {
                        "step": copy.step,
                        "kind": copy.kind,
                        "location": copy.location,
                        "bytes": copy.bytes,
                        "verified": copy.verified,
                        "reread": copy.reread,
                        "damaged": list(copy.damaged),
                    }
                    for copy in view.copies
                ],
                "fault": view.fault or None,
                "newest_whole": view.newest_whole,
                "last_round": None if view.state is None else document(view.state),
                "due": [document(copy) for copy in view.due],
                "owner": None
                if view.owner is None
                else {
                    "who": str(view.owner),
                    "since": view.owner.time,
                    "step": view.owner.data.get("step"),
                },
            }
            for view in screen.archives
        ],
        "drill": None if screen.drill is None else document(screen.drill),
    }
