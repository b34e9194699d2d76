"""The reading part of a round: copies that are asked for, or the share of the rotation, read back and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

from msgspec.structs import replace

from tr11ops.backup.base import Archive
from tr11ops.backup.ledger import ArchiveState, last_state
from tr11ops.backup.reread import ReadHistory, RereadFile, pieces_of, read_pieces, total_bytes
from tr11ops.backup.rotation import choose, oldest
from tr11ops.backup.round_values import ArchiveTally, BackupContext, RoundRequest
from tr11ops.rundir.copies import CopyRecord, Kind, Receipt


class RoundReading:
    """Reads copies of one archive back. `journal` and `journal_damage` are those of the round."""

    def __init__(
        self,
        context: BackupContext,
        request: RoundRequest,
        archive: Archive,
        tally: ArchiveTally,
        journal: Callable[[str, str, Mapping[str, object]], None],
        journal_damage: Callable[[CopyRecord, Mapping[str, str]], None],
    ) -> None:
        self._context, self._request, self._archive, self._tally = context, request, archive, tally
        self._journal, self._journal_damage = journal, journal_damage
        self._read_round: float | None = None
        self._unread: float | None = None

    def noted(self, state: ArchiveState) -> ArchiveState:
        """An archive's state with what this reading has found out."""
        if self._read_round is not None:
            state = replace(state, reread_round=self._read_round)
        return state if self._unread is None else replace(state, unread=self._unread)

    def run(self, records: MutableMapping[str, CopyRecord], receipts: Mapping[str, Receipt]) -> None:
        """Read what is asked for; `records` and `receipts` by the place of their copies.

        Raises ArchiveError, CopyStopped, OSError.
        """
        now = self._context.clock()
        history = ReadHistory(self._context.directory, self._archive.name, self._context.clock)
        pieces = self._chosen(history, records, receipts, now)
        if pieces:
            try:
                self._read(history, records, receipts, pieces)
            finally:
                self._keep_read(history, records, receipts)
        if not self._request.asked.steps:
            self._read_round = now
        waits = oldest(
            (file for place, receipt in receipts.items() for file in history.stored(records[place], receipt)), now
        )
        self._unread = None if waits is None else now - waits
        if pieces:
            said = {"archive": self._archive.name, "files": len(pieces), "bytes": total_bytes(pieces)}
            faulty = any(records[piece.receipt.location].damaged for piece in pieces)
            self._journal("reread", "some are damaged" if faulty else "all as they were copied", said)

    def _keep_read(
        self, history: ReadHistory, records: MutableMapping[str, CopyRecord], receipts: Mapping[str, Receipt]
    ) -> None:
        for record, faults in history.keep(records, receipts):
            self._journal_damage(record, faults)

    def _read(
        self,
        history: ReadHistory,
        records: MutableMapping[str, CopyRecord],
        receipts: Mapping[str, Receipt],
        pieces: Sequence[RereadFile],
    ) -> None:
        with self._context.watch(f"{self._archive.name} re-read", total_bytes(pieces)) as progress:

            def tell(piece: RereadFile, fault: str) -> None:
                history.note(piece, fault)
                if history.is_old():  # a kill in the middle of terabytes loses little
                    self._keep_read(history, records, receipts)
                self._tally.reread_files += 1
                self._tally.read_steps.add(piece.receipt.step)
                self._tally.reread_bytes += piece.file.bytes
                if fault:
                    progress.say(f"{self._archive.name}: {piece.receipt.location} {piece.file.path}: {fault}")

            read_pieces(self._archive, pieces, self._context.transfer(progress), tell)

    def _chosen(
        self, history: ReadHistory, records: Mapping[str, CopyRecord], receipts: Mapping[str, Receipt], now: float
    ) -> list[RereadFile]:
        steps = set(self._request.asked.steps)
        kind: Kind | None = self._request.asked.kind
        chosen = {
            place: receipt for place, receipt in receipts.items()
            if (not steps or receipt.step in steps) and kind in (None, receipt.kind)
        }  # fmt: skip
        if self._request.reading == "all":
            return [piece for receipt in chosen.values() for piece in pieces_of(receipt)]
        by_name = {(place, file.path): file for place, receipt in chosen.items() for file in receipt.files}
        # what was found damaged is looked at in each round: it may have been repaired by hand
        doubted = {(place, path) for place in chosen for path in records[place].damaged if (place, path) in by_name}
        state = last_state(self._context.directory, self._archive.name)
        stored = [file for place, receipt in chosen.items() for file in history.stored(records[place], receipt)]
        backup = self._context.card.backup
        turn = choose(
            [file for file in stored if (file.location, file.path) not in doubted], now,
            None if state is None else state.reread_round, backup.reread_days, backup.interval_hours * 3600,
        )  # fmt: skip
        names = [*sorted(doubted), *((file.location, file.path) for file in turn)]
        return [RereadFile(chosen[place], by_name[place, path]) for place, path in names]
