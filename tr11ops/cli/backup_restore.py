"""`tr11 backup restore`: a copy becomes a checkpoint again, or data; which copies there are."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.backup.base import Archive
from tr11ops.backup.data_sets import newest_copies
from tr11ops.backup.drill import why_unread
from tr11ops.backup.ownership import owner_of
from tr11ops.backup.restorable import Candidate, candidates, cautions, restorable
from tr11ops.backup.restore import (
    is_ours,
    note_restored,
    note_what_is_here,
    restore_checkpoint,
    restore_file,
)
from tr11ops.backup.round_values import BackupContext
from tr11ops.backup.screen import candidate_lines, candidate_value
from tr11ops.base.errors import (
    AlreadyThere,
    ArchiveError,
    CopyDamaged,
    LatestRefused,
    Refusal,
    Unobserved,
    WrongUsage,
)
from tr11ops.base.installed import READING_CHECKPOINTS, require
from tr11ops.base.units import iso_time, size
from tr11ops.checkpoints.rollback import move_latest, require_newest, require_no_trainer
from tr11ops.checkpoints.verify import ValuesFound
from tr11ops.cli import completion
from tr11ops.cli.backup_run import (
    KindOption,
    archive_errors,
    asked_of,
    open_backup,
    recorded,
    records_of,
    require_archives,
)
from tr11ops.cli.checkpoints import (
    NOT_LOOKED_AT,
    look_at_values,
    put_numbers_on_record,
)
from tr11ops.cli.common import directory_of, say
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    REASON,
    Outcome,
    RunContext,
    carry_out,
    unasked,
)
from tr11ops.logs.lines import plain
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.copies import Kind, Receipt
from tr11ops.rundir.paths import adopt_run_id, run_id
from trainer.contract.manifest import Manifest
from trainer.contract.resumable import ResumeNeed

ALL = "all"
SCHEMA = 1


# ----------------------------------------------------------------------------- data
def list_data(card: RunCard, source: str | None, as_json: bool) -> Outcome:
    """The newest copy of each data set in the archives that are meant."""
    found: dict[str, Mapping[str, Receipt]] = {}
    with archive_errors(), open_backup(card, as_json) as backup:
        for name in _archives(card, source):
            with closing(backup.opened(name)) as archive:
                found[name] = newest_copies(archive, card.run.variant)
    value, lines = {}, []
    for archive_name, units in found.items():
        copies = sorted(units.items())
        value[archive_name] = [
            {"name": unit, "bytes": made.bytes, "copied": made.copied} for unit, made in copies
        ]
        shown = [
            f"{unit}: {size(made.bytes)}, copied {iso_time(made.copied)}" for unit, made in copies
        ]
        lines += [f"{archive_name}: {text}" for text in shown or ["no data set"]]
    return Outcome({"schema": SCHEMA, "data": value}, lines)


def restore_data(context: RunContext, name: str, into: Path, source: str | None) -> Outcome:
    """Bring a data set back, or "all", from the first archive that has it: every digest is
    compared, nothing replaced.

    The tokenizer becomes a folder of that name in `into`. Raises Refusal.
    """
    card = context.card
    archives = _archives(card, source)
    would = "would come" if context.dry_run else "is restored"
    with archive_errors(), open_backup(card, context.as_json) as backup:
        there: set[str] = set()
        done: list[str] = []
        lines = []
        for key in archives:
            with closing(backup.opened(key)) as archive:
                found = newest_copies(archive, card.run.variant)
                there |= found.keys()
                if name == ALL:
                    wanted = sorted(found.keys() - set(done))
                elif name in found:
                    wanted = [name]
                else:
                    wanted = []
                for unit in wanted:
                    if unit == "tokenizer":
                        target = into / unit
                    else:
                        target = into
                    receipt = found[unit]
                    if not context.dry_run:
                        _restore(backup, archive, unit, receipt, target=target, why=context.reason)
                    lines.append(
                        f"{unit} ({size(receipt.bytes)}) {would} from the {archive.name} into {target}"
                    )
                    done.append(unit)
            if done and name != ALL:
                break
        if not done:
            raise Refusal(
                f"no copy of data {name!r} in {' or '.join(archives)}; there is {', '.join(sorted(there)) or 'none'}"
            )
    document = {
        "schema": SCHEMA,
        "dry_run": context.dry_run,
        "into": str(into),
        "data": done,
    }
    return Outcome(document, lines)


def _restore(
    backup: BackupContext, archive: Archive, unit: str, receipt: Receipt, target: Path, why: str
) -> None:
    with backup.watch(f"restore {unit}", receipt.bytes) as progress:
        for file in receipt.files:
            try:
                restore_file(
                    archive,
                    receipt,
                    path=file.path,
                    into=target,
                    transfer=backup.transfer(progress),
                )
            except CopyDamaged as error:
                raise Refusal(f"{error}{recorded(backup, archive, receipt, error)}") from None
    if backup.directory.exists:
        said = {
            "archive": archive.name,
            "data": unit,
            "location": receipt.location,
            "into": str(target),
        }
        backup.journal.write("restored", why, said)


def _archives(card: RunCard, source: str | None) -> Sequence[str]:
    return require_archives(card, [source] if source else None, [0], "--from")


# ----------------------------------------------------------------------------- restore --list
def list_candidates(card: RunCard, step: int, source: str | None, as_json: bool) -> Outcome:
    """Every copy of a step, of any run, in the archives that are meant. Raises Refusal where
    none answers.
    """
    names = require_archives(card, [source] if source else None, [step], "--from")
    found: list[tuple[str, Candidate]] = []
    faults = []
    with open_backup(card, as_json) as backup:
        for name in names:
            try:
                with closing(backup.opened(name)) as archive:
                    ours = run_id(backup.directory)
                    listed = candidates(
                        archive,
                        owner_of(archive),
                        run=card.run.name,
                        run_id=ours,
                        variant=card.run.variant,
                    )
                    found += [(archive.name, one) for one in listed if one.receipt.step == step]
            except (ArchiveError, OSError, ValueError) as error:
                faults.append(f"{name}: {error}")
    document = {
        "schema": SCHEMA,
        "step": step,
        "copies": [candidate_value(*entry) for entry in found],
    }
    code, lines = 0, list(candidate_lines(found))
    if not found:
        code, lines = 1, [f"no copy of step {step} with a receipt in {' or '.join(names)}"]
    if faults:
        code = 3
    return Outcome(document, lines, tuple(faults), exit_code=code)


# ----------------------------------------------------------------------------- the commands
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="store|url|ADDRESS",
        help="Default: a sound copy on record, whole ones first.",
    ),
]


def restore(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", min=0, autocompletion=completion.steps)
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", "--into", metavar="DIR", help="It becomes DIR/global_stepN."
        ),
    ] = None,
    source: FromOption = None,
    kind: KindOption = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="PATH", help="Only this file of the copy, put into DIR."),
    ] = None,
    only_list: Annotated[
        bool,
        typer.Option(
            "--list", help="Show every copy of STEP there is, with its identity; restore nothing."
        ),
    ] = False,
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity", metavar="DIGITS", help="Which, where several are there: see --list."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="NAME|all", help="In place of STEP: a data set, or the tokenizer."
        ),
    ] = None,
    latest: Annotated[
        bool,
        typer.Option("--latest", help="Have DIR/latest name it: a restart from DIR then takes it."),
    ] = False,
    values: Annotated[
        bool | None,
        typer.Option(
            "--values/--no-values",
            help="Look at every number: is one NaN or infinite? Exit code 1 if so. Default: where they can be read.",
        ),
    ] = None,
) -> Outcome:
    """Bring a checkpoint back: every digest is compared, only what is whole gets its name. Repeat
    it when cut off.

    A digest says that the bytes are those that were saved, not that the numbers are good: then each
    is looked at, which takes about a second a GiB (`--no-values` leaves it out). Where one is NaN
    or infinite, the exit code is 1, `--latest` moves nothing, and neither the checkpoint nor its
    copies count as sound any more. With `--values` it is 1 too where numbers cannot be read.

    Nothing that is there is replaced: a checkpoint of that step in DIR stays as it is.

    Examples:
      tr11 backup restore 12000 --output /scratch/again
      tr11 backup restore 12000 --from url --kind weights --output /scratch/eval
      tr11 backup restore 12000 --list
      tr11 backup restore --data all --output /scratch/data
      tr11 backup restore 12000 --from store --file manifest.json --output .
    """
    if (step is None) == (data is None):
        raise WrongUsage("restore what? Give a STEP, or --data NAME")
    if data is not None:
        if only_list:
            return list_data(context.card, source, context.as_json)
        return restore_data(context, data, _given(into), source)
    assert step is not None
    if only_list:
        return list_candidates(context.card, step, source, context.as_json)
    into = _given(into)
    card = context.card
    if Path(os.path.realpath(into)).is_relative_to(os.path.realpath(context.directory.root)):
        context.require_mounted()  # else it would lie below what is mounted later
    asked = asked_of([step], kind)
    if file is not None and (latest or values):
        other = "--latest" if latest else "--values"
        raise WrongUsage(f"--file and {other}: a single file is no checkpoint; leave one out")
    if values:
        require(READING_CHECKPOINTS, "--values")
    name = source or _best(card, step, kind, identity)
    require_archives(card, [name], [step], "--from")
    with (
        archive_errors(),
        open_backup(card, context.as_json) as backup,
        closing(backup.opened(name)) as archive,
    ):
        found = _candidate(backup, archive, step=step, kind=asked.kind, identity=identity)
        receipt = found.receipt
        _require_use(backup, found, into=into, file=file, latest=latest)
        if latest:
            _require_movable(backup, into, step)
        _warn(card, archive, receipt)

        def outcome(made: Path, would: str, numbers: ValuesFound | None = None) -> Outcome:
            what = f"({receipt.kind}, {size(receipt.bytes)})"
            if file is not None:
                what = f"({receipt.kind}): {file}"
            document = {
                "schema": SCHEMA,
                "dry_run": context.dry_run,
                "path": str(made),
                "step": step,
                "kind": receipt.kind,
                "values": None if numbers is None else numbers.to_json(),
                "from": receipt.location,
                "bytes": receipt.bytes,
            }
            line = f"{archive.address}/{receipt.location} {what} {would} {made}"
            return Outcome(document, (line,))

        def preview() -> Outcome:
            name = f"global_step{step}" if file is None else Path(file).name
            return outcome(into / name, "would become")

        def apply() -> Outcome:
            made = _restored(backup, archive, found=found, into=into, file=file, why=context.reason)
            if file is not None:
                return outcome(made, "is now")
            numbers = _numbers_of(made, values)
            shown = outcome(made, "is now", numbers)
            is_refused, notes = False, [NOT_LOOKED_AT]
            if numbers is not None:
                is_refused = _is_refused(numbers, values)
                notes = [f"step {step}: {'BAD ' if is_refused else ''}{numbers}"]
                if found.is_ours and backup.directory.exists:
                    put_numbers_on_record(
                        backup.directory,
                        step,
                        receipt.identity,
                        numbers,
                        why="found by a restore",
                        kind=receipt.kind,
                    )
            if latest and is_refused:
                notes.append("latest is left as it is")
            elif latest:
                _move_latest(backup, into, step, made)
            return replace(shown, notes=notes, exit_code=1 if is_refused else 0)

        return carry_out(context, unasked(apply, preview))


def _numbers_of(made: Path, asked: bool | None) -> ValuesFound | None:
    """What the numbers are of what was restored, unless that is not wanted. Raises Refusal where it
    was asked for.
    """
    if asked is False:
        return None
    if not asked:
        why = why_unread(Manifest.read(made))
        if why:
            return ValuesFound(0, fault=why)
    try:
        return look_at_values([made]).get(made)
    except Refusal as error:
        if asked:
            raise
        return ValuesFound(0, fault=str(error))


def _is_refused(numbers: ValuesFound, asked: bool | None) -> bool:
    """Bad numbers are refused; numbers that no one could look at, where someone asked for it."""
    return bool(numbers.not_finite) or (bool(asked) and not numbers.is_sound)


def _require_use(
    backup: BackupContext, found: Candidate, into: Path, file: str | None, latest: bool
) -> None:
    """Raise Refusal for a copy that does not belong there, or that no training goes on from."""
    receipt = found.receipt
    if not found.is_ours and (latest or is_ours(backup, into)):
        raise Refusal(
            f"{found}: it is not this run's, so it is not restored into its checkpoints or with --latest"
        )
    if latest and receipt.kind != "full":
        raise Refusal(
            "--latest: this copy holds the weights alone, and no training goes on from those"
        )
    if (
        file is None
        and receipt.kind != "full"
        and into.resolve() == backup.card.paths.checkpoints.resolve()
    ):
        raise Refusal(
            f"--output {into}: this copy holds the weights alone, from which this run does not resume; restore "
            "it into another folder"
        )


def _given(into: Path | None) -> Path:
    if into is None:
        raise WrongUsage("restore where to? Give --output DIR (or --list to see what there is)")
    return into


def _keep_id(backup: BackupContext, found: Candidate, into: Path) -> None:
    """A run directory without an id into which a checkpoint is restored goes on as the run that
    made it.
    """
    if not (found.run_id and is_ours(backup, into)):
        return
    try:
        if not run_id(backup.directory):
            adopt_run_id(backup.directory, backup.card.run.name, found.run_id)
            backup.journal.write(
                "run-id-adopted", "a checkpoint of that run was restored", {"id": found.run_id}
            )
    except (OSError, ValueError) as error:
        say(f"the id of the run could not be kept: {error}")


def _restored(
    backup: BackupContext,
    archive: Archive,
    found: Candidate,
    into: Path,
    file: str | None,
    why: str,
) -> Path:
    """Do it, and put it in the journal of a run that is here."""
    receipt = found.receipt
    if file is None:
        total = receipt.bytes
    else:
        total = sum(entry.bytes for entry in receipt.files if entry.path == file)
    try:
        with backup.watch(f"restore {receipt.step}", total) as progress:
            transfer = backup.transfer(progress)
            if file is not None:
                made = restore_file(archive, receipt, path=file, into=into, transfer=transfer)
            else:
                made = restore_checkpoint(
                    archive,
                    receipt,
                    into=into,
                    transfer=transfer,
                    on_whole=lambda: _keep_id(backup, found, into),
                )
    except CopyDamaged as error:
        raise Refusal(f"{error}{recorded(backup, archive, receipt, error)}") from None
    except AlreadyThere as error:
        note_what_is_here(backup, receipt.step, into, error.path)
        raise
    if file is None:
        note_restored(backup, receipt, made)
    if backup.directory.exists:
        said = {
            "archive": archive.name,
            "step": receipt.step,
            "location": receipt.location,
            "into": str(made),
        }
        backup.journal.write("restored", why, said)
    return made


def _need(backup: BackupContext, into: Path) -> ResumeNeed:
    """What a training that starts from a folder needs: of the run's own, its model."""
    if is_ours(backup, into):
        return backup.card.resume_need
    return ResumeNeed()


def _require_movable(backup: BackupContext, into: Path, step: int) -> None:
    try:
        require_no_trainer(into, time.time())
        require_newest(into, step, _need(backup, into))
    except LatestRefused as error:
        raise Refusal(f"--latest: {error}; nothing was restored") from None


def _move_latest(backup: BackupContext, into: Path, step: int, made: Path) -> None:
    """Have `latest` name what was restored, by what it is: also a whole copy may be one of weights
    alone.
    """
    try:
        move_latest(into, step, _need(backup, into), time.time())
    except LatestRefused as error:
        raise Refusal(f"{made} was restored, but {error}") from None


# ----------------------------------------------------------------------------- finding a copy
def _best(card: RunCard, step: int, kind: str | None, identity: str | None) -> str:
    found = [
        copy
        for copy in records_of(card)
        if copy.kind != "data"
        and copy.step == step
        and kind in (None, copy.kind)
        and copy.archive in ("store", "url")
        and copy.identity.startswith((identity or "").lower())
    ]
    sound = [copy for copy in found if copy.is_sound]
    if not sound:
        why = ""
        if found:
            why = f" (the {found[0].archive}'s is {plain(found[0].fault)})"
        raise Refusal(
            f"no sound copy of step {step} is on record{why}; name the archive: --from store, url or an address"
        )
    best = max(sound, key=lambda copy: (copy.kind == "full", copy.archive == "store"))
    say(f"from the {best.archive}: {best.address}")
    return best.archive


def _candidate(
    backup: BackupContext, archive: Archive, step: int, kind: Kind | None, identity: str | None
) -> Candidate:
    try:
        ours = run_id(backup.directory)
    except OSError as error:
        raise Unobserved(f"which run this is cannot be read: {error}") from None
    run = backup.card.run
    return restorable(
        archive, run.variant, step, kind, run=run.name, run_id=ours, identity=identity
    )


def _warn(card: RunCard, archive: Archive, receipt: Receipt) -> None:
    """Say what speaks against a copy; what is read is compared all the same."""
    for caution in cautions(receipt):
        say(caution)
    if not directory_of(card).exists:
        return
    for copy in records_of(card):
        if (copy.archive, copy.location) == (archive.name, receipt.location) and copy.fault:
            say(
                f"this copy is on record as {plain(copy.fault)}: what is read is compared all the same"
            )
