"""The screens of `tr11 backup`: status, the plan of a round, what a round did. Lines of at most 80
columns, and the same as JSON values. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.backup.due import CopyPlan, Due
from tr11ops.backup.ledger import ArchiveState, damage_line, standing
from tr11ops.backup.source import read_source
from tr11ops.base.errors import CopyError
from tr11ops.base.units import MINUTE, counted, duration, first_few, size, timestamp
from tr11ops.rundir.copies import CopyRecord, DrillRecord, Receipt
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    from tr11ops.backup.data_sets import DataState
    from tr11ops.backup.restorable import Candidate
    from tr11ops.backup.round_values import ArchiveTally, RoundPruning, RoundResult
    from tr11ops.rundir.claims import Claim


# What one round of backup did, in lines and as JSON values.

ROUND_SCHEMA = 1
FAULTS_SHOWN = 10


def round_lines(done: RoundResult, pruned: RoundPruning | None) -> Iterator[str]:
    """One line for what each archive got, then what is wrong."""
    for tally in done.tallies:
        if tally.busy:
            yield f"{tally.archive}: {tally.busy}; nothing was done here"
            continue
        yield f"{tally.archive}: {'; '.join(_done(tally))}"
        for copy in tally.damaged:
            more = ""
            if len(copy.damaged) > 1:
                more = f" and {len(copy.damaged) - 1} more"
            yield f"{tally.archive}: DAMAGED: {copy.what}: {copy.damaged[0]}{more}"
        for fault in tally.faults[:FAULTS_SHOWN]:
            yield f"{tally.archive}: FAILED: {fault}"
        if len(tally.faults) > FAULTS_SHOWN:
            yield f"{tally.archive}: and {counted(len(tally.faults) - FAULTS_SHOWN, 'more fault')}"
        if tally.is_stopped:
            yield f"{tally.archive}: stopped before it was done; the next round goes on from there"
    if pruned is not None:
        early = ""
        if pruned.ended_early:
            early = f"; {pruned.ended_early}"
        yield f"pruned: {counted(len(pruned.steps), 'checkpoint')}, {size(pruned.bytes)}{early}"


def _done(tally: ArchiveTally) -> Iterator[str]:
    if tally.copied:
        rate = ""
        if tally.copy_seconds > 0:
            rate = f", {size(tally.copied_bytes / tally.copy_seconds)}/s"
        word = "copy" if len(tally.copied) == 1 else "copies"
        yield f"{len(tally.copied)} {word} made and read back ({size(tally.copied_bytes)}{rate})"
    if tally.logs:
        yield counted(tally.logs, "log file")
    if tally.reread_files:
        files = counted(tally.reread_files, "file")
        yield f"{files} read again ({size(tally.reread_bytes)})"
    if not (tally.copied or tally.logs or tally.reread_files):
        yield "nothing was done" if tally.faults or tally.is_stopped else "nothing was due"


def round_value(done: RoundResult, pruned: RoundPruning | None, code: int) -> JsonObject:
    """The round as JSON values."""
    return {
        "schema": ROUND_SCHEMA,
        "exit_code": code,
        "archives": [
            {
                "archive": tally.archive,
                "address": tally.address or None,
                "copied": [
                    {
                        "step": copy.step,
                        "kind": copy.kind,
                        "location": copy.location,
                        "bytes": copy.bytes,
                    }
                    for copy in tally.copied
                ],
                "log_files": tally.logs,
                "reread_files": tally.reread_files,
                "reread_bytes": tally.reread_bytes,
                "damaged": [
                    {
                        "step": copy.step,
                        "kind": copy.kind,
                        "location": copy.location,
                        "files": list(copy.damaged),
                    }
                    for copy in tally.damaged
                ],
                "faults": tally.faults,
                "busy": tally.busy or None,
                "away": tally.is_away,
                "stopped": tally.is_stopped,
            }
            for tally in done.tallies
        ],
        "pruned": None if pruned is None else list(pruned.steps),
    }


# The plan of a round of backup, in lines and as JSON values.

PLAN_SCHEMA = 1
STEPS_NAMED = 8  # in one line


class Weighed(Record):
    """A plan with the bytes of each due copy; `fault`: why one cannot be made, "" when it can."""

    plan: CopyPlan
    due: tuple[tuple[Due, int, str], ...]

    def bytes_to(self, archive: str) -> int:
        return sum(
            count for copy, count, fault in self.due if copy.archive == archive and not fault
        )


def weigh(plan: CopyPlan, checkpoints: Path) -> Weighed:
    """Look up what each due copy holds, from its manifest."""
    found = []
    for copy in plan.due:
        try:
            count, fault = (
                read_source(checkpoints / checkpoint_name(copy.step), copy.step, copy.kind).bytes,
                "",
            )
        except CopyError as error:
            count, fault = 0, str(error)
        found.append((copy, count, fault))
    return Weighed(plan, tuple(found))


def plan_lines(
    run: str, variant: str, weighed: Weighed, rates: Mapping[str, float], faults: Mapping[str, str]
) -> Iterator[str]:
    """What is due, what is copied, and what is not; within 80 columns but for names and faults.

    `faults`: why an archive cannot be used as things are.
    """
    good = [entry for entry in weighed.due if not entry[2]]
    total = sum(count for _, count, _ in good)
    yield f"{run} {variant}: {_count(len(good))} due" + (f", {size(total)}" if good else "")
    if weighed.due:
        yield f"  {'STEP':>7}  {'COPY':<8}{'TO':<8}{'SIZE':>10}  WHY"
    for copy, count, fault in weighed.due:
        name = copy.archive[:7]
        yield f"  {copy.step:>7}  {copy.kind:<8}{name:<8}{'-' if fault else size(count):>10}  {copy.why}"
        if fault:
            yield f"           CANNOT BE COPIED: {fault}"
    for archive in sorted({copy.archive for copy, _, _ in good}):
        rate = rates.get(archive)
        if rate:
            took = f"about {duration(weighed.bytes_to(archive) / rate)} at {size(rate)}/s, the last rate"
        else:
            took = "no rate was measured yet"
        yield f"{archive}: {size(weighed.bytes_to(archive))}, {took}"
    for archive, fault in faults.items():
        yield f"{archive}: CANNOT BE USED: {fault}"
    if weighed.plan.copied:
        by_archive: dict[str, list[int]] = {}
        for record in weighed.plan.copied:
            by_archive.setdefault(record.archive, []).append(record.step)
        for archive, steps in sorted(by_archive.items()):
            yield f"copied already to {archive}: {_steps(steps)}"
    for why, steps in _by_reason(weighed.plan).items():
        yield f"not copied, {why}: {_steps(steps)}"


def _by_reason(plan: CopyPlan) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for step, why in plan.left:
        found.setdefault(why, []).append(step)
    return found


def _count(count: int) -> str:
    return {0: "no copy is", 1: "one copy is"}.get(count, f"{count} copies are")


def _steps(steps: list[int]) -> str:
    names = [str(step) for step in sorted(set(steps))]
    if len(names) <= STEPS_NAMED:
        return ", ".join(names)
    return f"{len(names)} steps, {names[0]} ... {', '.join(names[-3:])}"


def plan_value(
    run: str, variant: str, weighed: Weighed, rates: Mapping[str, float], faults: Mapping[str, str]
) -> JsonObject:
    """The plan as JSON values."""
    return {
        "schema": PLAN_SCHEMA,
        "run": run,
        "variant": variant,
        "due": [
            {**document(copy), "bytes": None if fault else count, "fault": fault or None}
            for copy, count, fault in weighed.due
        ],
        "copied": [
            {"step": copy.step, "kind": copy.kind, "archive": copy.archive, "bytes": copy.bytes}
            for copy in weighed.plan.copied
        ],
        "faults": dict(faults),
        "left": [{"step": step, "why": why} for step, why in weighed.plan.left],
        "seconds": {
            archive: weighed.bytes_to(archive) / rate
            for archive, rate in rates.items()
            if weighed.bytes_to(archive)
        },
    }


# How the run's data sets and tokenizer stand at each archive, in lines and as JSON values. Pure.

NAMED = 6


def data_lines(found: Mapping[str, Sequence[DataState]]) -> Iterator[str]:
    """A line for each archive, then one for each of its faults; none where the card asks for no
    copies of data.
    """
    for archive, states in found.items():
        if states:
            yield f"{archive}: data: {data_summary(states)}"
        yield from (
            f"{archive}: data: {state.unit.name}: CANNOT BE COPIED: {state.why}"
            for state in states
            if state.state == "fault"
        )


def data_summary(states: Sequence[DataState]) -> str:
    """How many are copied, and which are not."""
    copied = [state for state in states if state.state == "copied"]
    text = f"{len(copied)} of {len(states)} copied ({size(sum(state.bytes for state in copied))})"
    for word in ("due", "damaged"):
        those = [state for state in states if state.state == word]
        if those:
            names = first_few((state.unit.name for state in those), NAMED)
            text += f"; {word}: {names} ({size(sum(state.bytes for state in those))})"
    return text


def data_value(found: Mapping[str, Sequence[DataState]]) -> dict[str, list[JsonObject]]:
    """The same as JSON values, by archive."""
    return {
        archive: [
            {
                "name": state.unit.name,
                "state": state.state,
                "bytes": state.bytes,
                "why": state.why or None,
            }
            for state in states
        ]
        for archive, states in found.items()
    }


STATUS_SCHEMA = 1
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


def status_lines(screen: BackupStatus) -> Iterator[str]:
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
    spoilt = [copy for copy in view.copies if copy.not_finite]
    for copy in spoilt[:DAMAGED_SHOWN]:
        yield "NOT SOUND", f"{copy.what}: NaN or infinity in {copy.not_finite[0]}"
    if len(spoilt) > DAMAGED_SHOWN:
        yield "", f"and {len(spoilt) - DAMAGED_SHOWN} more that hold NaN or infinity"
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


def status_value(screen: BackupStatus) -> JsonObject:
    """The screen as JSON values; times in seconds since the epoch."""
    return {
        "schema": STATUS_SCHEMA,
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
                        "not_finite": list(copy.not_finite),
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


# The copies of one step, of any run, by `backup restore --list`; and those of an archive that is adopted.


def candidate_lines(found: Sequence[tuple[str, Candidate]]) -> Iterator[str]:
    """A table of copies, each behind the archive that it is in."""
    yield f"{'IDENTITY':<10}{'COPY':<9}{'IN':<9}{'SIZE':>10}  {'COPIED (UTC)':<18}RUN"
    for archive, one in sorted(found, key=_by_identity):
        receipt, whose = one.receipt, "this run"
        if not one.is_ours:
            whose = f"another: {one.run_id[:8] or receipt.run}"
        yield (
            f"{receipt.identity[:8]:<10}{receipt.kind:<9}{archive[:8]:<9}{size(receipt.bytes):>10}  "
            f"{_day(receipt.copied):<18}{whose}"
        )


def _by_identity(entry: tuple[str, Candidate]) -> tuple[str, str]:
    return entry[1].receipt.identity, entry[0]


def candidate_value(archive: str, one: Candidate) -> JsonObject:
    """One of them for a machine."""
    receipt = one.receipt
    return {
        "archive": archive,
        "identity": receipt.identity,
        "kind": receipt.kind,
        "copied": receipt.copied,
        "bytes": receipt.bytes,
        "location": receipt.location,
        "run": receipt.run,
        "run_id": one.run_id or None,
        "ours": one.is_ours,
    }


def receipt_line(receipt: Receipt) -> str:
    """A copy in an archive."""
    return f"  step {receipt.step:>7}  {receipt.kind:<8} {receipt.identity[:8]}  copied {_day(receipt.copied)}"


def _day(moment: float) -> str:
    return timestamp(moment, UTC, MINUTE)
