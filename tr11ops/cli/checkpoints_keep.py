"""`tr11 checkpoints list`, `verify`, `pin`, `unpin`: what is there, whether it is sound, and what stays."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SetOption,
    directory_of,
    read_card,
    say,
)
from trainer.contract import LATEST_FILE, checkpoint_name, checkpoint_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.checkpoints.catalogue import Catalogue, Checkpoint
    from tr11ops.checkpoints.digests import DigestRecord
    from tr11ops.checkpoints.verify import Reading
    from tr11ops.cli.progress import ByteProgress
    from tr11ops.rundir import RunDirectory

SCHEMA = 1
DAY = 86400.0
Step = Annotated[str, typer.Argument(metavar="STEP", help="A step's number, or `latest`.")]


# ----------------------------------------------------------------------------- list
def list_checkpoints(
    *,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """What the run has saved: whether it is whole, was read, is copied, is pinned, and what uses it.

    Sizes of files are compared with the manifest; tr11 checkpoints verify reads every byte. Exit code 1 when `latest`
    names nothing, or a checkpoint that is not whole; 3 when something could not be read.

    Example: tr11 checkpoints list --run demo
    """
    from tr11ops.report.checkpoints import table

    catalogue = _catalogue(run, overrides)
    if as_json:
        print(dumps(_document(catalogue)))
    elif catalogue.checkpoints or catalogue.aside:
        print(table(catalogue, time.time()))
    else:
        print(f"no checkpoint in {catalogue.folder}")
    if catalogue.fault:
        say(f"tr11: {catalogue.fault}")
    unread = [doubt for doubt in catalogue.doubts if not doubt.startswith("latest: ")]
    for doubt in unread:
        say(f"tr11: not known, so nothing may be removed: {doubt}")
    raise typer.Exit(1 if catalogue.fault else 3 if unread else 0)


def _catalogue(run: str | None, overrides: list[str] | None) -> Catalogue:
    """Everything that is known. Raises Refusal when the checkpoints cannot be listed."""
    from tr11ops.checkpoints.catalogue import read_catalogue
    from tr11ops.checkpoints.use import Clocks

    card = read_card(run, overrides)
    directory = directory_of(card)
    try:
        return read_catalogue(directory, Clocks(time.time()), card.checkpoint.load)
    except OSError as error:
        raise _unreadable(directory, error) from None


def _unreadable(directory: RunDirectory, error: OSError) -> Refusal:
    folder = directory.paths.checkpoints
    return Refusal(f"{folder} cannot be read: {error.strerror or error}; nothing may be concluded", 3)


def _document(catalogue: Catalogue) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "folder": str(catalogue.folder),
        "latest": catalogue.latest,
        "fault": catalogue.fault,
        "checkpoints": [entry.document() for entry in catalogue.checkpoints],
        "aside": [asdict(aside) for aside in catalogue.aside],
        "loading": catalogue.uses.loading,
        "doubts": list(catalogue.doubts),
    }


# ----------------------------------------------------------------------------- verify
def verify(
    steps: Annotated[
        list[str] | None, typer.Argument(metavar="[STEP...]", help="Numbers of steps, or `latest`.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint.")] = False,
    stale: Annotated[
        float | None,
        typer.Option("--stale", min=0.0, metavar="DAYS", help="Those that nobody has read for so long, or ever."),
    ] = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, max=256, metavar="N", help="Files at once.")] = 8,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Read every byte, compare with the manifest's digests, and put the result on record for everybody.

    Ctrl-C loses nothing that is finished: `--stale 1` then goes on with the rest. Exit code 1: a file differs; 3: one
    could not be read, or it changed meanwhile.

    Example: tr11 checkpoints verify latest

    Example: tr11 checkpoints verify --stale 7 --parallel 16
    """
    if bool(steps) + everything + (stale is not None) != 1:
        raise Refusal("verify what? Give steps, or --all, or --stale DAYS", exit_code=2)
    card = read_card(run, overrides)
    catalogue = _catalogue(run, overrides)
    chosen = _chosen(catalogue, steps, stale)
    try:
        readings = _read_them(directory_of(card), chosen, parallel, as_json)
    except KeyboardInterrupt:
        raise Refusal("interrupted; what was read whole is on record, and `verify --stale 1` goes on") from None
    if as_json:
        shown = [{**asdict(reading), "bad": list(reading.bad)} for reading in readings]
        print(dumps({"schema": SCHEMA, "checkpoints": shown}))
    elif chosen:
        print(_summary(readings))
    else:
        print("nothing to read" + ("" if stale is None else f": all were read in the last {stale:g} days"))
    raise typer.Exit(_verdict(readings, named=bool(steps)))


def _chosen(catalogue: Catalogue, steps: Sequence[str] | None, stale: float | None) -> list[Checkpoint]:
    if steps:
        return [_found(catalogue, text) for text in dict.fromkeys(steps)]
    if stale is None:
        return list(catalogue.checkpoints)
    now = time.time()
    return [entry for entry in catalogue.checkpoints if entry.manifest == "read" and _is_stale(entry, now, stale * DAY)]


def _is_stale(entry: Checkpoint, now: float, seconds: float) -> bool:
    from tr11ops.checkpoints.digests import DigestRecord

    if not isinstance(entry.digests, DigestRecord):
        return True
    return not 0.0 <= now - entry.digests.time < seconds  # a record of the future was made by a wrong clock


def _found(catalogue: Catalogue, text: str) -> Checkpoint:
    """The checkpoint that a person means. Raises Refusal when it is not there."""
    step = _number(text, catalogue)
    entry = catalogue.at(step)
    if entry is None:
        known = [entry.step for entry in catalogue.checkpoints]
        newest = ", ".join(map(str, known[-4:]))
        which = f"there are {len(known)}, the newest {newest}" if known else "there is none yet"
        raise Refusal(f"{catalogue.folder / checkpoint_name(step)} does not exist; {which} (tr11 checkpoints list)")
    return entry


def _number(text: str, catalogue: Catalogue) -> int:
    if text == LATEST_FILE:
        if catalogue.latest is None:
            raise Refusal(f"{catalogue.folder / LATEST_FILE} names no step; give the step's number instead")
        return catalogue.latest
    step = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else checkpoint_step(text)
    if step is None:
        raise Refusal(f"STEP = {text[:40]!r}: is not a step; use a number or {LATEST_FILE}", exit_code=2)
    return step


def _read_them(directory: RunDirectory, chosen: Sequence[Checkpoint], parallel: int, quiet: bool) -> list[Reading]:
    from tr11ops.checkpoints.verify import verify as read_checkpoint
    from tr11ops.cli.progress import ByteProgress
    from tr11ops.journal import user_name

    stop = threading.Event()
    readings: list[Reading] = []
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
    from tr11ops.checkpoints.digests import write_digest
    from tr11ops.journal import Journal

    try:
        write_digest(directory, record)
        if record.bad:
            text = f"{checkpoint_name(record.step)}: {len(record.bad)} files differ: {record.bad[0]}"
            Journal(directory.journal).write(
                "checkpoint-damaged", text, {"step": record.step, "identity": record.identity, "bad": record.bad[:20]}
            )
    except OSError as error:
        progress.say(f"tr11: step {record.step}: the result cannot be recorded: {error.strerror or error}")


def _lines(reading: Reading, entry: Checkpoint) -> list[str]:
    """What to say of one reading: one line for each bad file, else one."""
    head = f"step {reading.step}:"
    more = [f"{head} {reading.why}"] if reading.bad and reading.why else []
    if reading.bad:
        return [*(f"{head} BAD {line}" for line in reading.bad), *more]
    if reading.result == "fine":
        from tr11ops.units import size

        return [f"{head} fine, {entry.files} file{'s' * (entry.files != 1)}, {size(entry.bytes)}"]
    words = {"gone": "not judged", "changed": "not judged", "unread": "could not be read"}
    return [f"{head} {words.get(reading.result, reading.result)}: {reading.why}"]


def _summary(readings: Sequence[Reading]) -> str:
    bad = [str(reading.step) for reading in readings if reading.result == "bad"]
    fine = sum(reading.result == "fine" for reading in readings)
    rest = len(readings) - fine - len(bad)
    parts = (
        f"{fine} fine",
        f"{len(bad)} damaged (step {', '.join(bad)})" if bad else "",
        f"{rest} not judged" * bool(rest),
    )
    return f"{len(readings)} read: " + ", ".join(filter(None, parts))


def _verdict(readings: Sequence[Reading], named: bool) -> int:
    """The exit code. Of all checkpoints, those that cannot be judged at all are no fault; of named ones they are."""
    results = {reading.result for reading in readings}
    if "bad" in results:
        return 1
    missing = {"unread", "changed", *(("gone", "nothing to compare") if named else ())}
    return 3 if results & missing else 0


# ----------------------------------------------------------------------------- pin
def pin(
    step: Step,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; others read it.")] = "",
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Keep a checkpoint here, whatever the policy says, until somebody unpins it.

    Example: tr11 checkpoints pin 31200 --reason "before the April spike"
    """
    from tr11ops.checkpoints.pins import pin as put_pin
    from tr11ops.journal import user_name

    catalogue = _catalogue(run, overrides)
    entry = _found(catalogue, step)
    directory = directory_of(read_card(run, overrides))
    who = user_name()
    try:
        is_new = put_pin(directory, entry.step, who, reason, time.time())
    except (OSError, ValueError) as error:
        raise _unwritten(error) from None
    if is_new:
        _note(
            directory, "checkpoint-pinned", f"{checkpoint_name(entry.step)}: {reason or 'no reason given'}", entry.step
        )
    if entry.complete is False:
        say(f"tr11: step {entry.step} is not whole: {entry.faults[0]}")
    _tell(as_json, entry.step, "pinned" if is_new else "pinned already")


def unpin(
    step: Step,
    *,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Leave a checkpoint to the policy again; also one that is here no more.

    Example: tr11 checkpoints unpin 31200
    """
    from tr11ops.checkpoints.pins import unpin as take_pin

    catalogue = _catalogue(run, overrides)
    number = _number(step, catalogue)
    directory = directory_of(read_card(run, overrides))
    try:
        was_pinned = take_pin(directory, number)
    except (OSError, ValueError) as error:
        raise _unwritten(error) from None
    if not was_pinned:
        pinned = ", ".join(str(entry.step) for entry in catalogue.pins) or "nothing"
        raise Refusal(f"step {number} is not pinned; pinned is {pinned}")
    _note(directory, "checkpoint-unpinned", checkpoint_name(number), number)
    _tell(as_json, number, "unpinned")


def _unwritten(error: OSError | ValueError) -> Refusal:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return Refusal(f"the pins were not changed: {why}")


def _note(directory: RunDirectory, kind: str, why: str, step: int) -> None:
    """The list of pins is what counts: a journal that cannot be written is said, and stops nothing."""
    from tr11ops.journal import Journal

    try:
        Journal(directory.journal).write(kind, why, {"step": step})
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")


def _tell(as_json: bool, step: int, what: str) -> None:
    if as_json:
        print(dumps({"schema": SCHEMA, "step": step, "result": what}))
    else:
        print(f"step {step}: {what}")
