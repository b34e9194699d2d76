"""`tr11 backup restore --data`: data sets and the tokenizer back to a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tr11ops.backup.data_sets import newest_copies
from tr11ops.backup.restore import restore_file
from tr11ops.base.errors import CopyDamaged, Refusal
from tr11ops.base.units import iso_time, size
from tr11ops.cli.backup_errors import archive_errors, recorded
from tr11ops.cli.backup_run import open_backup, require_archives
from tr11ops.cli.context import answer, emit

if TYPE_CHECKING:
    from tr11ops.backup.base import Archive
    from tr11ops.backup.round_values import BackupContext
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.copies import Receipt

SCHEMA = 1
ALL = "all"


def list_data(card: RunCard, source: str | None, as_json: bool) -> None:
    """Print the newest copy of each data set in the archives that are meant."""
    found: dict[str, Mapping[str, Receipt]] = {}
    with archive_errors(), open_backup(card, as_json) as backup:
        for name in _archives(card, source):
            with closing(backup.opened(name)) as archive:
                found[name] = newest_copies(archive, card.run.variant)
    value, lines = {}, []
    for archive_name, units in found.items():
        copies = sorted(units.items())
        value[archive_name] = [{"name": unit, "bytes": made.bytes, "copied": made.copied} for unit, made in copies]
        shown = [f"{unit}: {size(made.bytes)}, copied {iso_time(made.copied)}" for unit, made in copies]
        lines += [f"{archive_name}: {text}" for text in shown or ["no data set"]]
    answer(as_json, {"schema": SCHEMA, "data": value}, lines)


def restore_data(
    card: RunCard, name: str, into: Path, source: str | None, dry_run: bool, why: str, as_json: bool
) -> None:
    """Bring a data set back, or "all", from the first archive that has it: every digest is compared, nothing replaced.

    The tokenizer becomes a folder of that name in `into`. Raises Refusal.
    """
    archives = _archives(card, source)
    with archive_errors(), open_backup(card, as_json) as backup:
        there: set[str] = set()
        done: list[str] = []
        for key in archives:
            with closing(backup.opened(key)) as archive:
                found = newest_copies(archive, card.run.variant)
                there |= found.keys()
                wanted = sorted(found.keys() - set(done)) if name == ALL else [name] if name in found else []
                for unit in wanted:
                    target = into / unit if unit == "tokenizer" else into
                    if not dry_run:
                        _restore(backup, archive, unit, found[unit], target, why)
                    if not as_json:
                        would = "would come" if dry_run else "is restored"
                        typer.echo(f"{unit} ({size(found[unit].bytes)}) {would} from the {archive.name} into {target}")
                    done.append(unit)
            if done and name != ALL:
                break
        if not done:
            raise Refusal(
                f"no copy of data {name!r} in {' or '.join(archives)}; there is {', '.join(sorted(there)) or 'none'}"
            )
    if as_json:
        emit({"schema": SCHEMA, "dry_run": dry_run, "into": str(into), "data": done})


def _restore(backup: BackupContext, archive: Archive, unit: str, receipt: Receipt, target: Path, why: str) -> None:
    with backup.watch(f"restore {unit}", receipt.bytes) as progress:
        for file in receipt.files:
            try:
                restore_file(archive, receipt, file.path, target, backup.transfer(progress))
            except CopyDamaged as error:
                raise Refusal(f"{error}{recorded(backup, archive, receipt, error)}") from None
    if backup.directory.exists:
        said = {"archive": archive.name, "data": unit, "location": receipt.location, "into": str(target)}
        backup.journal.write("restored", why, said)


def _archives(card: RunCard, source: str | None) -> Sequence[str]:
    return require_archives(card, [source] if source else None, [0], "--from")
