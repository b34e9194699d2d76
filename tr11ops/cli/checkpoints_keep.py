"""`tr11 checkpoints list`, `pin`, `unpin`: what is there, and what stays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from tr11ops.base.errors import Refusal
from tr11ops.base.observed import known
from tr11ops.checkpoints.catalogue import read_catalogue
from tr11ops.checkpoints.pins import pin as put_pin
from tr11ops.checkpoints.pins import unpin as take_pin
from tr11ops.checkpoints.screen import table
from tr11ops.cli import completion
from tr11ops.cli.common import directory_of, in_time_for_all, say
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.rundir.clocks import Clocks
from tr11ops.rundir.journal import Journal, user_name
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name, checkpoint_step
from trainer.contract.resumable import ResumeNeed

if TYPE_CHECKING:
    from tr11ops.checkpoints.catalogue import Catalogue, CatalogueEntry
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

SCHEMA = 1
Step = Annotated[
    str, typer.Argument(metavar="STEP", help="A step's number, or `latest`.", autocompletion=completion.steps)
]


# ----------------------------------------------------------------------------- list
def list_checkpoints(
    context: Annotated[RunContext, JSON],
) -> None:
    """What the run has saved: whether it is whole, was read, is copied, is pinned, and what uses it.

    Sizes of files are compared with the manifest; tr11 checkpoints verify reads every byte. Exit code 1 when `latest`
    names nothing, or a checkpoint from which no training resumes; 3 when something could not be read.

    Examples:
      tr11 checkpoints list --run demo
    """
    card, _ = context.seen(missing=None)
    context.require_mounted()
    catalogue = in_time_for_all(lambda: open_catalogue(card))
    if context.as_json:
        emit(_document(catalogue), indent=None)
    elif catalogue.checkpoints or catalogue.quarantined:
        print(table(catalogue, time.time()))
    else:
        print(f"no checkpoint in {catalogue.folder}")
    if catalogue.fault:
        say(f"tr11: {catalogue.fault}")
    unread = [read_error for read_error in catalogue.read_errors if not read_error.startswith("latest: ")]
    for read_error in unread:
        say(f"tr11: not known, so nothing may be removed: {read_error}")
    raise typer.Exit(1 if catalogue.fault else 3 if unread else 0)


def open_catalogue(card: RunCard) -> Catalogue:
    """Everything that is known of a run's checkpoints. Raises Refusal when they cannot be listed."""
    directory = directory_of(card)
    try:
        return read_catalogue(directory, Clocks(time.time()), card.checkpoint.load, need=ResumeNeed.of(card))
    except OSError as error:
        folder = directory.paths.checkpoints
        raise Refusal(f"{folder} cannot be read: {error.strerror or error}; nothing may be concluded", 3) from None


def _document(catalogue: Catalogue) -> dict[str, Any]:
    origin = known(catalogue.origin, None)
    return {
        "schema": SCHEMA,
        "folder": str(catalogue.folder),
        "latest": catalogue.latest,
        "fault": catalogue.fault,
        "checkpoints": [entry.document() for entry in catalogue.checkpoints],
        "aside": [to_builtins(quarantined) for quarantined in catalogue.quarantined],
        "loading": catalogue.uses.loading,
        "doubts": list(catalogue.read_errors),
        "origin": None if origin is None else to_builtins(origin),
    }


# ----------------------------------------------------------------------------- finding one
def find_checkpoint(catalogue: Catalogue, text: str) -> CatalogueEntry:
    """The checkpoint that a person means. Raises Refusal when it is not there."""
    step = step_number(text, catalogue)
    entry = catalogue.at(step)
    if entry is None:
        known = [entry.step for entry in catalogue.checkpoints]
        newest = ", ".join(map(str, known[-4:]))
        which = f"there are {len(known)}, the newest {newest}" if known else "there is none yet"
        raise Refusal(f"{catalogue.folder / checkpoint_name(step)} does not exist; {which} (tr11 checkpoints list)")
    return entry


def find_folder(catalogue: Catalogue, text: str) -> str:
    """The name of the folder that a person means: a step's, or one beside them by its whole name. Raises Refusal."""
    quarantined = next((quarantined for quarantined in catalogue.quarantined if quarantined.name == text), None)
    if quarantined is None:
        return find_checkpoint(catalogue, text).name
    if quarantined.kind not in {"discarded", "superseded"}:
        raise Refusal(
            f"{catalogue.folder / text} is {quarantined.kind}, and not of this training to remove: do that by hand"
        )
    return text


def step_number(text: str, catalogue: Catalogue) -> int:
    """The step that a person means, whether it is there or not. Raises Refusal."""
    if text == LATEST_FILE:
        if catalogue.latest is None:
            raise Refusal(f"{catalogue.folder / LATEST_FILE} names no step; give the step's number instead")
        return catalogue.latest
    step = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else checkpoint_step(text)
    if step is None:
        raise Refusal(f"STEP = {text[:40]!r}: is not a step; use a number or {LATEST_FILE}", exit_code=2)
    return step


# ----------------------------------------------------------------------------- pin
def pin(
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; others read it.")] = "",
) -> None:
    """Keep a checkpoint here, whatever the policy says, until someone unpins it.

    Examples:
      tr11 checkpoints pin 31200 --reason "before the April spike"
    """
    card, directory = context.seen(missing=None)
    context.require_mounted()
    catalogue = in_time_for_all(lambda: open_catalogue(card))
    entry = find_checkpoint(catalogue, step)
    who = user_name()
    try:
        is_new = put_pin(directory, entry.step, who, reason, time.time())
    except (OSError, ValueError) as error:
        raise _unwritten(error) from None
    if is_new:
        _note(
            directory, "checkpoint-pinned", f"{checkpoint_name(entry.step)}: {reason or 'no reason given'}", entry.step
        )
    if entry.no_resume:
        say(f"tr11: no training resumes from step {entry.step}: {entry.no_resume}")
    _tell(context, entry.step, "pinned" if is_new else "pinned already")


def unpin(
    context: Annotated[RunContext, JSON],
    step: Step,
) -> None:
    """Leave a checkpoint to the policy again; also one that is here no more.

    Examples:
      tr11 checkpoints unpin 31200
    """
    card, directory = context.seen(missing=None)
    context.require_mounted()
    catalogue = in_time_for_all(lambda: open_catalogue(card))
    number = step_number(step, catalogue)
    try:
        was_pinned = take_pin(directory, number)
    except (OSError, ValueError) as error:
        raise _unwritten(error) from None
    if not was_pinned:
        pinned = ", ".join(str(entry.step) for entry in catalogue.pins) or "nothing"
        raise Refusal(f"step {number} is not pinned; pinned is {pinned}")
    _note(directory, "checkpoint-unpinned", checkpoint_name(number), number)
    _tell(context, number, "unpinned")


def _unwritten(error: OSError | ValueError) -> Refusal:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return Refusal(f"the pins were not changed: {why}")


def _note(directory: RunDirectory, kind: str, why: str, step: int) -> None:
    """The list of pins is what counts: a journal that cannot be written is said, and stops nothing."""
    try:
        Journal(directory.journal).write(kind, why, {"step": step})
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")


def _tell(context: RunContext, step: int, what: str) -> None:
    context.emit({"schema": SCHEMA, "step": step, "result": what}, [f"step {step}: {what}"], indent=None)
