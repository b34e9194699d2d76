"""One archive's part of a round: its records brought in line, its due copies, the logs, its share
of re-reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from tr11ops.backup.base import Archive
from tr11ops.backup.copying import Format, copy_source, work_bytes
from tr11ops.backup.data_sets import data_states, read_unit
from tr11ops.backup.due import (
    CopyPlan,
    Due,
    StoredFile,
    choose,
    is_whole,
    oldest,
    plan_round,
    total_bytes,
)
from tr11ops.backup.folder import NO_ONE, Owner
from tr11ops.backup.ledger import (
    after_round,
    keep_summary,
    last_state,
    standing,
    write_archive_state,
)
from tr11ops.backup.log_copies import copy_logs
from tr11ops.backup.ownership import give_id, is_proven, owner_of, stranger_fault, unproven_fault
from tr11ops.backup.reread import ReadHistory, read_files
from tr11ops.backup.round_values import CARDS_ARCHIVES, ArchiveTally, BackupContext, RoundRequest
from tr11ops.backup.source import CopySource, read_source
from tr11ops.backup.survey import Survey, bring_in_line, is_well, receipt_path, records_of, survey
from tr11ops.base.errors import (
    ArchiveError,
    ArchivePermanentError,
    CopyError,
    CopyStopped,
    SourceDamaged,
)
from tr11ops.base.observed import cause, observed
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.checkpoint_digests import note_damage, read_not_finite
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint, list_rows
from tr11ops.rundir.claims import CopyLock
from tr11ops.rundir.copies import CopyRecord, Kind, location_of, write_copy
from tr11ops.rundir.paths import RunDirectory, run_id
from trainer.contract.checkpoint_names import read_latest

UNFINISHED_SECONDS = 30 * 86_400.0  # an upload that no one went on with for so long is removed


def rows_of(directory: RunDirectory) -> list[SavedCheckpoint]:
    """The checkpoints that are here. Raises OSError."""
    try:
        latest = read_latest(directory.paths.checkpoints)
    except ValueError:  # which one is the latest does not matter here
        latest = None
    return [
        replace(row, numbers=observed(read_not_finite, directory, row.step, row.identity))
        for row in list_rows(directory.paths.checkpoints, latest)
    ]


def summarise(directory: RunDirectory) -> None:
    """Write the summary of all copies, for who reads no more than that. Raises OSError, ValueError."""
    here = {row.step: row.identity for row in rows_of(directory) if is_whole(row)}
    keep_summary(directory, CARDS_ARCHIVES, here)


def plan_of(
    card: RunCard,
    rows: Sequence[SavedCheckpoint],
    copies: Iterable[CopyRecord],
    request: RoundRequest,
) -> CopyPlan:
    """What a round would copy, by what is on record. `request.archives` are names on record here."""
    return plan_round(
        card.backup,
        rows,
        copies=copies,
        last_step=card.total_iterations or 0,
        archives=request.archives,
        asked=request.asked,
    )


@dataclass
class ArchiveRound:
    """One archive's part of one round, while it is this process's turn."""

    context: BackupContext
    request: RoundRequest
    archive: Archive
    lock: CopyLock
    tally: ArchiveTally

    def __post_init__(self) -> None:
        self._directory, self._card = self.context.directory, self.context.card
        self._owner = NO_ONE
        self._read_round: float | None = None
        self._unread: float | None = None
        self._listed: tuple[float, tuple[str, ...]] | None = None

    def run(self) -> None:
        """All that is asked for. Raises ArchiveError, CopyError, ClaimTaken, OSError,
        ValueError.
        """
        moment = self.context.clock()
        run = self._card.run
        self._owner = Owner(run.name, run_id(self._directory))
        owner = owner_of(self.archive)
        fault = stranger_fault(self.archive.address, owner, self._owner)
        if fault:
            raise ArchivePermanentError(fault)
        seen = survey(self.archive, run.name, run.variant, self._owner.id)
        if owner is not None and not owner.id:
            self._adopt(seen)
        self.tally.faults.extend(f"could not be looked at: {why}" for why in seen.unread.values())
        unseen = (
            place
            for place, copy in records_of(self._directory, self.archive, every_variant=True).items()
            if copy.variant != run.variant or seen.why_unread(place)
        )
        self._listed = moment, tuple(sorted(unseen))
        for record, faults in bring_in_line(self._directory, self.archive, seen):
            if faults:
                self._journal_damage(record, faults)
        if self.request.copies:
            self._sweep()
            self._copy_all(seen)
            if not self.request.asked.steps and self.request.asked.kind in (None, "data"):
                self._copy_data()
        if self.request.logs and self._card.backup.logs:
            self._copy_logs()
        if self.request.reading != "none":
            self._reread(seen)

    def _adopt(self, seen: Survey) -> None:
        """Give an archive that is older than ids this run's, once something in it proves to be this
        run's.
        """
        here = {row.identity for row in rows_of(self._directory)}
        known = here | {
            copy.identity for copy in records_of(self._directory, self.archive).values()
        }
        if not is_proven(seen.receipts.values(), known):
            raise ArchivePermanentError(
                unproven_fault(self.archive.address, tuple(seen.receipts.values()))
            )
        give_id(self.archive, self._owner.run, self._owner.id)
        self._journal(
            "archive-adopted",
            "it had no run id",
            {"archive": self.archive.name, "id": self._owner.id},
        )

    def keep(self) -> None:
        """Put this part of the round on record. Raises OSError, ValueError."""
        records = records_of(self._directory, self.archive)
        self.tally.damaged = [copy for copy in standing(records.values()) if copy.damaged]
        before = last_state(self._directory, self.archive.name)
        fault = "; ".join(self.tally.faults[:3])
        if self.tally.is_stopped and not fault:
            fault = "stopped before it was done; the next round goes on from there"
        after = after_round(
            before,
            self.archive.name,
            address=self.archive.address,
            now=self.context.clock(),
            copies=records.values(),
            fault=fault,
        )
        if self.tally.copied and self.tally.copy_seconds > 0:
            after = replace(after, rate=self.tally.copied_bytes / self.tally.copy_seconds)
        if self._read_round is not None:
            after = replace(after, reread_round=self._read_round)
        if self._unread is not None:
            after = replace(after, unread=self._unread)
        if self._listed is not None:
            after = replace(after, listed=self._listed[0], unseen=self._listed[1])
        write_archive_state(self._directory, after)
        summarise(self._directory)

    # ------------------------------------------------------------------ copies
    @property
    def _format(self) -> Format:
        """Where inodes are scarce is the store; a bucket has none."""
        if self.archive.name == "store":
            return self._card.backup.store_format
        return "files"

    def _sweep(self) -> None:
        """Housekeeping: what cannot be removed keeps no copy from being made."""
        try:
            self.archive.sweep(self.context.clock() - UNFINISHED_SECONDS)
        except ArchivePermanentError as error:
            self.tally.faults.append(f"what old uploads left cannot be removed: {error}")

    def _copy_all(self, seen: Survey) -> None:
        rows = rows_of(self._directory)
        request = replace(self.request, archives=(self.archive.name,))
        records = tuple(records_of(self._directory, self.archive).values())
        plan = plan_of(self._card, rows, records, request)
        missing = sorted(
            set(self.request.asked.steps) - {row.step for row in rows if is_whole(row)}
        )
        missing = [step for step in missing if not any(copy.step == step for copy in plan.copied)]
        for step in missing:
            self.tally.faults.append(f"step {step} is not copied: it is not here, or not whole")
        spoilt = {row.step for row in rows if row.numbers is not None}
        for step, why in plan.left:
            if step in spoilt:
                self.context.say(f"{self.archive.name}: step {step}: {why}")
        for due in plan.due:
            self.context.check_stop()
            self._copy(due, seen)

    def _copy(self, due: Due, seen: Survey) -> None:
        """One copy of a checkpoint."""
        self.lock.copying(due.step)
        try:
            self._make(
                partial(self._source, due, seen),
                due.kind,
                location_of(due.kind, self._card.run.variant, due.step),
                what=f"step {due.step} ({due.kind})",
                why=due.why,
                about={"step": due.step},
                begun={"identity": due.identity, "mends": due.repairs},
                repair=due.repairs,
                format=self._format,
            )
        finally:
            self.lock.copying(None)

    def _source(self, due: Due, seen: Survey) -> CopySource:
        self._set_aside(due, seen)
        return read_source(self._directory.paths.checkpoint(due.step), due.step, due.kind)

    def _copy_data(self) -> None:
        """The card's data sets and tokenizer, where it asks for them."""
        records = tuple(records_of(self._directory, self.archive).values())
        variant = self._card.run.variant
        for found in data_states(self._card, records, self.archive.name):
            self.context.check_stop()
            unit = found.unit
            if found.state == "fault":
                self.tally.faults.append(f"data {unit.name}: {found.why}")
            elif found.state != "copied":
                self._make(
                    partial(read_unit, unit),
                    "data",
                    unit.base(variant),
                    what=f"data {unit.name}",
                    why="data",
                    about={"data": unit.name},
                    repair=found.state == "damaged",
                )

    def _make(
        self,
        read: Callable[[], CopySource],
        kind: Kind,
        base: str,
        *,
        what: str,
        why: str,
        about: Mapping[str, object],
        begun: Mapping[str, object] = {},
        repair: bool,
        format: Format = "files",
    ) -> None:
        """Make one copy and put it on record. What is wrong with its source is no reason not to
        make the others. `about` says in the journal what it is a copy of, `begun` more as it begins.
        """
        run = self._card.run
        about = {
            "archive": self.archive.name,
            "address": self.archive.address,
            "kind": kind,
            **about,
        }
        source: CopySource | None = None
        try:
            began = time.monotonic()
            source = read()
            self._journal("backup-began", why, {**about, **begun})
            total = work_bytes(source, format)
            shown = about.get("data", f"{source.step} {kind}")
            with self.context.watch(f"{self.archive.name} {shown}", total) as progress:
                receipt = copy_source(
                    self.archive,
                    source,
                    kind,
                    base,
                    run=run.name,
                    variant=run.variant,
                    run_id=self._owner.id,
                    clock=self.context.clock,
                    transfer=self.context.transfer(progress),
                    repair=repair,
                    format=format,
                )
            self.tally.copy_seconds += time.monotonic() - began
        except CopyStopped:
            raise
        except CopyError as error:
            if isinstance(error, SourceDamaged) and source is not None and kind != "data":
                self._note_damage(source, error)
            self._journal("backup-failed", str(error), about)
            self.tally.faults.append(f"{what}: {cause(error)}")
            return
        except (ArchiveError, OSError, ValueError) as error:
            self._journal("backup-failed", cause(error), about)
            is_its_own = isinstance(error, ArchivePermanentError | OSError | ValueError)
            if not (is_its_own and is_well(self.archive)):
                raise
            self.tally.faults.append(f"{what}: {cause(error)}")
            return
        record = CopyRecord.of(receipt, self.archive.name, self.archive.address)
        write_copy(self._directory, record)
        self.tally.copied.append(record)
        said = {
            **about,
            "location": receipt.location,
            "bytes": receipt.bytes,
            "files": len(receipt.files),
        }
        self._journal("backup-copied", why, said)
        self.context.say(
            f"{self.archive.name}: {what} {'repaired' if repair else 'copied'}, read back"
        )

    def _note_damage(self, source: CopySource, error: SourceDamaged) -> None:
        """Of a file that was read; sizes and names say of themselves what is wrong."""
        if error.path:
            note_damage(
                self._directory,
                source.step,
                identity=source.identity,
                path=error.path,
                why="found as it was copied",
            )

    def _set_aside(self, due: Due, seen: Survey) -> None:
        """Give a receipt that cannot be read another name, so that the copy can get one again;
        nothing is removed.
        """
        for identity in ("", due.identity):
            path = receipt_path(location_of(due.kind, self._card.run.variant, due.step, identity))
            if path in seen.unreadable:
                aside = f"{path}.damaged-{int(self.context.clock())}"
                self.archive.move(path, aside)
                self._journal(
                    "backup-damaged",
                    seen.unreadable[path],
                    {"archive": self.archive.name, "moved": aside},
                )

    def _copy_logs(self) -> None:
        with self.context.watch(f"{self.archive.name} logs", 0) as progress:
            sent, faults = copy_logs(self._directory, self.archive, self.context.transfer(progress))
        self.tally.logs = sent
        self.tally.faults.extend(faults)

    # ------------------------------------------------------------------ reading back
    def _reread(self, seen: Survey) -> None:
        """Read the copies that are asked for, or the share of the rotation, and put that on record."""
        records = records_of(self._directory, self.archive)
        receipts = {at: receipt for at, receipt in seen.receipts.items() if at in records}
        history = ReadHistory(self._directory, self.archive.name, self.context.clock)
        now = self.context.clock()

        def stored() -> Iterator[StoredFile]:
            for location, receipt in receipts.items():
                yield from history.stored(records[location], receipt)

        def keep() -> None:
            for record, faults in history.keep(records, receipts):
                self._journal_damage(record, faults)

        chosen = self._chosen(stored(), records, now)
        if chosen:
            try:
                self._read(chosen, history, keep)
            finally:
                keep()
        if not self.request.asked.steps:
            self._read_round = now
        waits = oldest(stored(), now)
        if waits is not None:
            self._unread = now - waits
        if chosen:
            said = {
                "archive": self.archive.name,
                "files": len(chosen),
                "bytes": total_bytes(chosen),
            }
            faulty = any(records[file.receipt.location].damaged for file in chosen)
            self._journal(
                "reread", "some are damaged" if faulty else "all as they were copied", said
            )

    def _read(
        self, chosen: Sequence[StoredFile], history: ReadHistory, keep: Callable[[], None]
    ) -> None:
        with self.context.watch(f"{self.archive.name} re-read", total_bytes(chosen)) as progress:

            def tell(stored: StoredFile, fault: str) -> None:
                history.note(stored, fault)
                if history.is_old():  # a kill in the middle of terabytes loses little
                    keep()
                self.tally.reread_files += 1
                self.tally.read_steps.add(stored.receipt.step)
                self.tally.reread_bytes += stored.file.bytes
                if fault:
                    progress.say(f"{self.archive.name}: {' '.join(stored.place)}: {fault}")

            read_files(self.archive, chosen, self.context.transfer(progress), tell)

    def _chosen(
        self, stored: Iterable[StoredFile], records: Mapping[str, CopyRecord], now: float
    ) -> list[StoredFile]:
        asked, backup = self.request.asked, self._card.backup
        wanted = [
            file
            for file in stored
            if (not asked.steps or file.receipt.step in asked.steps)
            and asked.kind in (None, file.receipt.kind)
        ]
        if self.request.reading == "all":
            return wanted
        # what was found damaged is looked at in each round: it may have been repaired by hand
        doubted = {
            file.place: file
            for file in wanted
            if file.file.path in records[file.receipt.location].damaged
        }
        state = last_state(self._directory, self.archive.name)
        turn = choose(
            [file for file in wanted if file.place not in doubted],
            now,
            last_round=None if state is None else state.reread_round,
            days=backup.reread_days,
            interval_seconds=backup.interval_hours * 3600,
        )
        return [*doubted.values(), *turn]

    # ------------------------------------------------------------------ the journal
    def _journal(self, kind: str, why: str, data: Mapping[str, object]) -> None:
        if self.request.why:
            asked = {"asked": self.request.why}
        else:
            asked = {}
        self.context.journal.write(kind, why, {**data, **asked}, when=self.context.clock())

    def _journal_damage(self, record: CopyRecord, faults: Mapping[str, str]) -> None:
        about = {
            "archive": record.archive,
            "step": record.step,
            "kind": record.kind,
            "location": record.location,
        }
        if faults:
            self._journal(
                "backup-damaged", next(iter(faults.values())), {**about, "files": dict(faults)}
            )
        elif record.is_whole:
            self._journal("backup-sound", "what was damaged is as it was copied", about)
