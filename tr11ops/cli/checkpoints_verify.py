"""`tr11 checkpoints verify`: reads every byte, and puts on record what was found."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.units import counted, size
from tr11ops.checkpoints.verify import verify as read_checkpoint
from tr11ops.cli import completion
from tr11ops.cli.checkpoint_values import NOT_LOOKED_AT, ValuesFound, look_at_values
from tr11ops.cli.checkpoints_keep import find_checkpoint, open_catalogue
from tr11ops.cli.common import directory_of, say
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.cli.progress import ByteProgress
from tr11ops.rundir.checkpoint_damage import put_on_record
from tr11ops.rundir.checkpoint_digests import DigestRecord
from tr11ops.rundir.journal import user_name
from trainer.contract.documents import document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.checkpoints.catalogue import Catalogue, CatalogueEntry
    from tr11ops.checkpoints.verify import VerifyResult
    from tr11ops.rundir.paths import RunDirectory

SCHEMA = 1
DAY = 86400.0


def verify(
    context: Annotated[RunContext, JSON],
    steps: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STEP...]", help="Numbers of steps, or `latest`.", autocompletion=completion.steps),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint.")] = False,
    stale: Annotated[
        float | None,
        typer.Option("--stale", min=0.0, metavar="DAYS", help="Those that no one has read for so long, or ever."),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--workers", "--parallel", min=1, max=256, metavar="N", help="Files at once.")
    ] = 8,
    values: Annotated[
        bool, typer.Option("--values", help="Then look at every number: is one NaN or infinite?")
    ] = False,
) -> None:
    """Read every byte, compare with the manifest's digests, and put the result on record for everyone.

    Ctrl-C loses nothing that is finished: `--stale 1` then goes on with the rest. Whole bytes may be NaN: `--values`
    reads all once more and looks. Exit code 1: a file differs, or a number is not finite; 3: one could not be read,
    or it changed meanwhile.

    Examples:
      tr11 checkpoints verify latest
      tr11 checkpoints verify --stale 7 --workers 16
      tr11 checkpoints verify latest --values
    """
    if bool(steps) + everything + (stale is not None) != 1:
        raise Refusal("verify what? Give steps, or --all, or --stale DAYS", exit_code=2)
    card = context.card
    context.require_mounted()
    catalogue = open_catalogue(card)
    chosen = _chosen(catalogue, steps, stale)
    try:
        readings = read_them(directory_of(card), chosen, parallel, context.as_json)
    except KeyboardInterrupt:
        raise Refusal("interrupted; what was read whole is on record, and `verify --stale 1` goes on") from None
    numbers = _values(chosen, readings) if values else {}
    for step, found in numbers.items():
        say(f"step {step}: {'' if found.is_sound else 'BAD '}{found}")
    if context.as_json:
        shown = [
            {
                **document(reading),
                "bad": list(reading.bad),
                "values": numbers[reading.step].to_json() if reading.step in numbers else None,
            }
            for reading in readings
        ]
        emit({"schema": SCHEMA, "checkpoints": shown}, indent=None)
    elif chosen:
        print(_summary(readings))
        if not values and any(reading.result == "fine" for reading in readings):
            say(NOT_LOOKED_AT)
    else:
        print("nothing to read" + ("" if stale is None else f": all were read in the last {counted(stale, 'day')}"))
    is_sound = all(found.is_sound for found in numbers.values())
    raise typer.Exit(_verdict(readings, named=bool(steps)) if is_sound else 1)


def _values(chosen: Sequence[CatalogueEntry], readings: Sequence[VerifyResult]) -> dict[int, ValuesFound]:
    """What the numbers are of those whose bytes could be read, by step; damaged files are named already."""
    readable = {reading.step for reading in readings if reading.result in {"fine", "nothing to compare"}}
    places = {Path(entry.path): entry.step for entry in chosen if entry.step in readable}
    return {places[place]: found for place, found in look_at_values(list(places)).items()}


def _chosen(catalogue: Catalogue, steps: Sequence[str] | None, stale: float | None) -> list[CatalogueEntry]:
    if steps:
        return [find_checkpoint(catalogue, text) for text in dict.fromkeys(steps)]
    if stale is None:
        return list(catalogue.checkpoints)
    now = time.time()
    return [entry for entry in catalogue.checkpoints if entry.manifest == "read" and _is_stale(entry, now, stale * DAY)]


def _is_stale(entry: CatalogueEntry, now: float, seconds: float) -> bool:
    if not isinstance(entry.digests, DigestRecord):
        return True
    return not 0.0 <= now - entry.digests.time < seconds  # a record of the future was made by a wrong clock


def read_them(
    directory: RunDirectory, chosen: Sequence[CatalogueEntry], parallel: int, quiet: bool
) -> list[VerifyResult]:
    """Read every byte of these, show how far it is, say and record what was found. Raises KeyboardInterrupt."""
    stop = threading.Event()
    readings: list[VerifyResult] = []
    total = sum(entry.bytes for entry in chosen)
    with ByteProgress("reading", total, is_quiet=quiet) as progress:
        for entry in chosen:
            progress.describe(f"step {entry.step}")
            before = progress.done
            reading = read_checkpoint(entry, parallel, progress.advance, stop, user_name())
            progress.advance(entry.bytes - (progress.done - before))  # what was not read of it is not left either
            readings.append(reading)
            if reading.record is not None:
                _put_on_record(directory, reading.record, progress)
            if not quiet:
                for line in _lines(reading, entry):
                    progress.say(line)
    return readings


def _put_on_record(directory: RunDirectory, record: DigestRecord, progress: ByteProgress) -> None:
    """Keep a result; a journal or a state folder that cannot be written is said, and the reading goes on."""
    try:
        put_on_record(directory, record)
    except OSError as error:
        progress.say(f"tr11: step {record.step}: the result cannot be recorded: {error.strerror or error}")


def _lines(reading: VerifyResult, entry: CatalogueEntry) -> list[str]:
    """What to say of one reading: one line for each bad file, else one."""
    head = f"step {reading.step}:"
    more = [f"{head} {reading.why}"] if reading.bad and reading.why else []
    if reading.bad:
        return [*(f"{head} BAD {line}" for line in reading.bad), *more]
    if reading.result == "fine":
        return [f"{head} fine, {counted(entry.files, 'file')}, {size(entry.bytes)}"]
    words = {"gone": "not judged", "changed": "not judged", "unread": "could not be read"}
    return [f"{head} {words.get(reading.result, reading.result)}: {reading.why}"]


def _summary(readings: Sequence[VerifyResult]) -> str:
    bad = [str(reading.step) for reading in readings if reading.result == "bad"]
    fine = sum(reading.result == "fine" for reading in readings)
    rest = len(readings) - fine - len(bad)
    parts = (
        f"{fine} fine",
        f"{len(bad)} damaged (step {', '.join(bad)})" if bad else "",
        f"{rest} not judged" * bool(rest),
    )
    return f"{len(readings)} read: " + ", ".join(filter(None, parts))


def _verdict(readings: Sequence[VerifyResult], named: bool) -> int:
    """The exit code. Of all checkpoints, those that cannot be judged at all are no fault; of named ones they are."""
    results = {reading.result for reading in readings}
    if "bad" in results:
        return 1
    missing = {"unread", "changed", *(("gone", "nothing to compare") if named else ())}
    return 3 if results & missing else 0
