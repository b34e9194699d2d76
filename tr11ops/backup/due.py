"""What a round copies where and reads again, what is copied already, and what is not copied and
why. Pure.

A copy counts when it is sound, and of the very checkpoint that is here: one that was trained again
has another identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.copies import CopiedFile, CopyRecord, Kind, Receipt
from tr11ops.rundir.copy_policy import WantedCopy, in_order, wanted_copies
from trainer.contract.record import Record

# Which files of the archives are read again in this round, so that rot is found while another copy
# still exists.
#
# Every byte is read again within `days`, as long as no two rounds lie more than two intervals apart
# (one may be missed). Each round takes a share by bytes, oldest first, so that no round has all the
# work; what would be too old before the next one is taken whatever the share. Pure: moments are
# arguments, in seconds since the epoch.

DAY_SECONDS = 86_400.0
# of the time within which all is read by shares alone; the rest is slack for a growing archive
PACE = 0.7
CLOCK_SECONDS = 600.0  # two machines' clocks may differ by so much


class StoredFile(Record):
    """One file of a copy. `read`: when it was last read back whole and found right; None: not
    known.
    """

    receipt: Receipt
    file: CopiedFile
    read: float | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Of its copy, and in it."""
        return self.receipt.location, self.file.path


def choose(
    files: Iterable[StoredFile],
    now: float,
    last_round: float | None,
    days: float,
    interval_seconds: float,
) -> tuple[StoredFile, ...]:
    """The files to read now, the most urgent first: those never read, then the oldest.

    `last_round` is when files were last read in turn (None: never), `interval_seconds` what lies
    between two rounds. A time in the future comes of a clock that was set back: nothing is
    concluded from it but that it is not known.
    """
    known = [_believed(file, now) for file in files]
    horizon, gap = days * DAY_SECONDS, interval_seconds
    if last_round is not None and 0 <= now - last_round < horizon:
        gap = now - last_round
    ahead = 2 * max(interval_seconds, min(gap, horizon / 4))
    # two rounds by hand in one hour do not read the same again
    spared = min(interval_seconds, horizon) / 2
    share = total_bytes(known) * min(1.0, gap / (PACE * horizon))
    chosen = []
    for file in sorted(
        known, key=lambda file: (file.read is not None, file.read or 0.0, file.place)
    ):
        if file.read is None:
            age = None
        else:
            age = now - file.read
        if age is not None and age < spared:
            break
        if share <= 0 and (age is None or age + ahead < horizon):
            if age is None:
                continue  # those of which a time is known may be due for all that
            break
        chosen.append(file)
        share -= max(1, file.file.bytes)
    return tuple(chosen)


def oldest(files: Iterable[StoredFile], now: float) -> float | None:
    """How long ago the byte that waits longest was read, in seconds; 0.0 for an archive of nothing,
    None: not known.
    """
    ages = [
        None if file.read is None else now - file.read
        for file in (_believed(file, now) for file in files)
    ]
    if any(age is None for age in ages):
        return None
    return max((age for age in ages if age is not None), default=0.0)


def _believed(file: StoredFile, now: float) -> StoredFile:
    if file.read is None or file.read <= now + CLOCK_SECONDS:
        return file
    return replace(file, read=None)


def total_bytes(files: Iterable[StoredFile]) -> int:
    """Bytes of files."""
    return sum(file.file.bytes for file in files)


class Due(WantedCopy):
    """One copy to make. `repairs`: it replaces what is wrong in a damaged copy."""

    identity: str
    repairs: bool = False


class CopyPlan(Record):
    """`left` are checkpoints that are not copied anywhere by this plan, each with its reason."""

    due: tuple[Due, ...]
    copied: tuple[CopyRecord, ...]
    left: tuple[tuple[int, str], ...]


class CopyRequest(Record):
    """What a person asked for instead of what the card wants. No steps: what the card wants, of one
    kind if given.
    """

    steps: tuple[int, ...] = ()
    kind: Kind | None = None


CARD_DECIDES = CopyRequest()


def plan_round(
    policy: BackupSection,
    rows: Sequence[SavedCheckpoint],
    copies: Iterable[CopyRecord],
    last_step: int,
    archives: Sequence[str],
    asked: CopyRequest = CARD_DECIDES,
) -> CopyPlan:
    """The copies that a round makes, in order. `archives`: where it goes; `rows`: what is here."""
    here = {row.step: row for row in rows if is_whole(row)}
    ours = [copy for copy in copies if copy.archive in archives and copy.kind != "data"]
    of_here = [
        copy for copy in ours if copy.step not in here or copy.identity == here[copy.step].identity
    ]
    if asked.steps:
        wanted: tuple[WantedCopy, ...] = tuple(_by_hand(asked, archives))
    else:
        steps = sorted(here.keys() | {copy.step for copy in of_here if copy.is_whole})
        wanted = wanted_copies(policy, steps, last_step)
        wanted = tuple(
            copy for copy in wanted if copy.archive in archives and asked.kind in (None, copy.kind)
        )
    due: list[Due] = []
    copied: list[CopyRecord] = []
    for copy in wanted:
        sound = next(
            (record for record in of_here if record.is_whole and _is_that(record, copy)), None
        )
        if sound is not None:
            copied.append(sound)
        elif copy.step in here and (asked.steps or not _spoilt(here[copy.step], copy.kind)):
            broken = any(not record.is_whole and _is_that(record, copy) for record in of_here)
            if broken:
                why = f"{copy.why}; the copy is damaged"
            else:
                why = copy.why
            due.append(
                Due(
                    copy.step,
                    copy.kind,
                    archive=copy.archive,
                    why=why,
                    identity=here[copy.step].identity,
                    repairs=broken,
                )
            )
    if not asked.steps:
        due += _damaged_beside(of_here, here, due, asked.kind)
    touched = {copy.step for copy in due} | {copy.step for copy in copied}
    if not asked.steps:
        left = tuple(_left(rows, touched, ours))
    else:
        left = ()
    return CopyPlan(in_order(due), tuple(copied), left)


def is_whole(row: SavedCheckpoint) -> bool:
    """Whether a checkpoint may be copied: whole by its manifest, or of the original's layout, which
    has none.
    """
    return not row.faults and bool(row.identity) and row.manifest in {"read", "foreign"}


def _spoilt(row: SavedCheckpoint, kind: Kind) -> tuple[str, ...]:
    """What is known to be NaN or infinite in a copy of this kind that would be restored from; what a
    spike is studied by may be.
    """
    numbers = known(row.numbers, None)
    if numbers is None or kind == "spike":
        return ()
    return numbers.of_copy(kind)


def _by_hand(asked: CopyRequest, archives: Sequence[str]) -> Iterator[WantedCopy]:
    for step in sorted(set(asked.steps)):
        for name in archives:
            yield WantedCopy(step, asked.kind or "full", name, "by hand")


def _is_that(record: CopyRecord, wanted: WantedCopy) -> bool:
    """Whether a record is of the wanted copy; a whole one holds all that the others do."""
    kinds = {wanted.kind, "full"}
    return (record.archive, record.step) == (wanted.archive, wanted.step) and record.kind in kinds


def _damaged_beside(
    copies: Iterable[CopyRecord],
    here: dict[int, SavedCheckpoint],
    due: Sequence[Due],
    kind: Kind | None,
) -> list[Due]:
    """Damaged copies that no rule asks for any more, but that can be repaired from what is here."""
    known = {(copy.step, copy.kind, copy.archive) for copy in due}
    return [
        Due(
            copy.step,
            copy.kind,
            archive=copy.archive,
            why="the copy is damaged",
            identity=copy.identity,
            repairs=True,
        )
        for copy in copies
        if not copy.is_whole
        and copy.step in here
        and kind in (None, copy.kind)
        and (copy.step, copy.kind, copy.archive) not in known
        and copy.identity == here[copy.step].identity
    ]


def _left(
    rows: Sequence[SavedCheckpoint], touched: set[int], copies: Sequence[CopyRecord]
) -> Iterator[tuple[int, str]]:
    for row in rows:
        if row.step in touched:
            continue
        if row.faults:
            yield row.step, f"not whole: {row.faults[0]}"
        elif not is_whole(row):
            yield row.step, "no checkpoint that tr11 knows"
        elif any(
            copy.step == row.step and copy.is_whole and copy.identity == row.identity
            for copy in copies
        ):
            yield row.step, "copied already, by hand"
        elif bad := _spoilt(row, "full"):
            again = f"`tr11 backup run {row.step}` copies it all the same"
            yield row.step, f"NaN or infinity in {bad[0]}: not copied; {again}"
        else:
            yield row.step, "no key of [backup] asks for it"
