"""`tr11 checkpoints list`, `pin`, `unpin`, `prune`, `remove`: what is there, what stays, what goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, Unobserved, WrongUsage
from tr11ops.base.observed import known
from tr11ops.base.units import counted, size
from tr11ops.checkpoints.catalogue import Catalogue, read_catalogue
from tr11ops.checkpoints.prune import PrunePlan, Pruner, PruneResult, RemovalOutcome
from tr11ops.checkpoints.retention import LEAST_KEPT, counts
from tr11ops.checkpoints.screen import decisions_summary, decisions_table, table
from tr11ops.cli import completion
from tr11ops.cli.common import directory_of, in_time_for_all, say
from tr11ops.cli.progress import ByteProgress
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, YES, Change, Outcome, RunContext
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.kinds import ForeignCard, is_watched
from tr11ops.rundir.checkpoint_pins import pin as put_pin, unpin as take_pin
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.claims import ClaimTaken, Clocks
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.documents import document
from trainer.contract.record import JsonObject

SCHEMA = 1


# ----------------------------------------------------------------------------- prune
def prune(
    context: Annotated[RunContext, JSON, YES, DRY_RUN, REASON],
    *,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=2,
            metavar="N",
            help="Newest that stay; else the card's backup.keep_latest.",
        ),
    ] = None,
    set_aside: Annotated[
        bool,
        typer.Option(
            "--set-aside", help="Also what roll-backs set aside (global_stepN.discarded)."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show each one that is kept, too.")
    ] = False,
) -> Change:
    """Remove checkpoints that the card's backup section does not keep, after showing each and why.

    Never the last two complete, nor one that is pinned, in use, or lacks a copy that the card wants
    and that was read back. A removal that was cut off is finished by the next prune. Exit code 1:
    something would not go.

    Examples:
      tr11 checkpoints prune --dry-run --all
      tr11 checkpoints prune --keep 5 --yes --reason "SCRATCH is full"
    """
    card = context.card
    context.require_mounted()
    pruner = Pruner.of(card, user_name(), context.reason, keep, set_aside=set_aside)
    return _change(context, pruner, _planned(pruner), everything)


def remove(
    context: Annotated[RunContext, JSON, YES, DRY_RUN, REASON],
    steps: Annotated[
        list[str],
        typer.Argument(
            metavar="STEP...",
            help="Steps, or names of folders beside them.",
            autocompletion=completion.steps,
        ),
    ],
) -> Change | Outcome:
    """Remove these checkpoints by the rules of prune: never one that is in use, pinned, or lacks a
    wanted copy.

    Of those rules only backup.keep_latest is set aside: the last two complete ones stay. A
    superseded or discarded folder (see `tr11 checkpoints list`) goes by its whole name, and lacks
    no copy then. Exit code 1: one stays, and why is said.

    Examples:
      tr11 checkpoints remove 31200 --reason "its weights rotted, restored elsewhere"
      tr11 checkpoints remove global_step31300.superseded --dry-run
    """
    context.require_mounted()
    pruner = Pruner.of(
        context.card, user_name(), context.reason or "checkpoints remove", LEAST_KEPT
    )
    catalogue = _planned(pruner).catalogue
    pruner = replace(pruner, only=frozenset(find_folder(catalogue, text) for text in steps))
    plan = _planned(pruner)
    if not plan.victims:
        lines = tuple(_lines(plan, True))
        code = 3 if plan.catalogue.read_errors else 1
        return Outcome(_plan_document(plan, True), lines, exit_code=code, indent=None)
    stays = len(plan.victims) < len(plan.decisions)
    return _change(context, pruner, plan, True, code=1 if stays else 0)


def _planned(pruner: Pruner) -> PrunePlan:
    try:
        return pruner.plan()
    except OSError as error:
        why = error.strerror or error
        raise Unobserved(f"{pruner.folder} cannot be read: {why}; nothing was removed") from None


def _change(
    context: RunContext, pruner: Pruner, plan: PrunePlan, everything: bool, code: int = 0
) -> Change:
    """What would go; `code` is the exit code when all went well."""
    read_errors = plan.catalogue.read_errors
    code = 3 if read_errors else code
    not_known = "tr11: nothing may be removed while this is not known:"
    preview = Outcome(
        _plan_document(plan, everything),
        notes=[f"{not_known} {read_error}" for read_error in read_errors],
        exit_code=code,
        indent=None,
    )

    def apply() -> Outcome:
        result = _remove(pruner, plan, context.as_json)
        return Outcome(
            _result_document(plan, result, everything),
            tuple(_conclusion(result)),
            remarks=(f"tr11: {result.ended_early}",) if result.ended_early else (),
            exit_code=1 if result.failed else code,
            indent=None,
        )

    return Change(
        () if context.as_json else _lines(plan, everything),
        _question(plan),
        apply,
        preview,
        nothing=None if plan.victims or plan.leftovers else preview,
        unchanged="",
        is_answer=True,
    )


def _lines(plan: PrunePlan, everything: bool) -> Iterator[str]:
    shown = plan.decisions if everything else plan.victims
    if shown:
        yield decisions_table(shown)
    yield decisions_summary(plan.decisions)
    if plan.leftovers:
        yield f"an earlier prune did not end: {', '.join(plan.leftovers)}"


def _question(plan: PrunePlan) -> str:
    if not plan.victims:
        return "Finish what the earlier prune began?"
    count = len(plan.victims)
    return f"Remove {counted(count, 'checkpoint')} ({size(plan.bytes)}) for good?"


def _remove(pruner: Pruner, plan: PrunePlan, quiet: bool) -> PruneResult:
    agreed = {(victim.name, victim.identity) for victim in plan.victims}
    with ByteProgress("removing", plan.bytes, is_quiet=quiet) as progress:

        def tell(outcome: RemovalOutcome) -> None:
            if not quiet or outcome.result == "failed":
                progress.say(_line(outcome))

        try:
            return replace(pruner, progress=progress.advance, tell=tell).run(agreed)
        except KeyboardInterrupt:
            raise Refusal("interrupted; what was begun is finished by the next prune") from None
        except ClaimTaken as taken:
            raise Refusal(f"nothing was removed: a prune is running already: {taken}") from None
        except OSError as error:
            where = ""
            if error.filename:
                where = f"{error.filename}: "
            raise Refusal(
                f"nothing was removed, because it cannot be recorded: {where}{error.strerror or error}"
            ) from None


def _line(outcome: RemovalOutcome) -> str:
    words = {"removed": "removed", "kept": "kept after all", "failed": "NOT REMOVED"}
    return f"{outcome.name}: {words[outcome.result]}" + (
        f": {outcome.text}" if outcome.result != "removed" else ""
    )


def _conclusion(result: PruneResult) -> Iterator[str]:
    removed = sum(outcome.result == "removed" for outcome in result.outcomes)
    yield f"{removed} removed, {size(result.freed)} freed"
    if result.finished:
        yield f"finished what an earlier prune began: {', '.join(result.finished)}"


def _plan_document(plan: PrunePlan, everything: bool) -> JsonObject:
    shown = plan.decisions if everything else plan.victims
    return {
        "schema": SCHEMA,
        "victims": [document(decision) for decision in plan.victims],
        "bytes": plan.bytes,
        "kept": dict(counts(plan.decisions)),
        "decisions": [document(decision) for decision in shown],
        "unfinished": list(plan.leftovers),
        "doubts": list(plan.catalogue.read_errors),
    }


def _result_document(plan: PrunePlan, result: PruneResult, everything: bool) -> JsonObject:
    return {
        **_plan_document(plan, everything),
        "outcomes": [document(outcome) for outcome in result.outcomes],
        "freed": result.freed,
        "finished": list(result.finished),
        "ended_early": result.ended_early,
    }


# ----------------------------------------------------------------------------- the commands
Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step's number, or `latest`.", autocompletion=completion.steps
    ),
]


# ----------------------------------------------------------------------------- list
def list_checkpoints(
    context: Annotated[RunContext, JSON],
) -> Outcome:
    """What the run has saved: whether it is whole, was read, is copied, is pinned, and what uses
    it.

    Sizes of files are compared with the manifest; tr11 checkpoints verify reads every byte. Exit
    code 1 when `latest` names nothing, or a checkpoint from which no training resumes; 3 when
    something could not be read.

    Marks, explained below the table where they occur:
      state   whole: every file has its size; NOT WHOLE; no resume; no manifest
      read    2 d ago: all bytes agreed then; never; 2 BAD: so many files differ;
              NaN: a number is NaN or infinite; ?: not known
      copies  archives with a copy; :w weights alone, :s weights around a spike,
              :BAD damaged, or NaN or infinity in it; - none
      kept    latest: a restart takes it; use: needed now; pin: kept by hand

    Examples:
      tr11 checkpoints list --run demo
    """
    card, _ = context.seen(missing=None)
    context.require_mounted()
    catalogue = in_time_for_all(lambda: open_catalogue(card))
    line = f"no checkpoint in {catalogue.folder}"
    if catalogue.checkpoints or catalogue.quarantined:
        line = table(catalogue, time.time())
    elif isinstance(card, ForeignCard) and is_watched(card) and not card.trainer.hold:
        line = "not known: the job is only watched (level 0); `tr11 watch --hold --folder DIR` holds them"
    code = 0
    notes = [
        f"tr11: not known, so nothing may be removed: {read_error}"
        for read_error in catalogue.read_errors
        if not read_error.startswith("latest: ")
    ]
    if notes:
        code = 3
    if catalogue.fault:
        code, notes = 1, [f"tr11: {catalogue.fault}", *notes]
    return Outcome(_document(catalogue), (line,), notes, exit_code=code, indent=None)


def open_catalogue(card: RunCard) -> Catalogue:
    """Everything that is known of a run's checkpoints. Raises Refusal when they cannot be listed."""
    directory = directory_of(card)
    try:
        return read_catalogue(
            directory, Clocks(time.time()), card.load_folder, need=card.resume_need
        )
    except OSError as error:
        folder = directory.paths.checkpoints
        raise Unobserved(
            f"{folder} cannot be read: {error.strerror or error}; nothing may be concluded"
        ) from None


def _document(catalogue: Catalogue) -> JsonObject:
    origin = known(catalogue.origin, None)
    return {
        "schema": SCHEMA,
        "folder": str(catalogue.folder),
        "latest": catalogue.latest,
        "fault": catalogue.fault,
        "checkpoints": [entry.document() for entry in catalogue.checkpoints],
        "aside": [document(quarantined) for quarantined in catalogue.quarantined],
        "loading": catalogue.uses.loading,
        "doubts": list(catalogue.read_errors),
        "origin": None if origin is None else document(origin),
    }


# ----------------------------------------------------------------------------- finding one
def find_checkpoint(catalogue: Catalogue, text: str) -> SavedCheckpoint:
    """The checkpoint that a person means. Raises Refusal when it is not there."""
    step = step_number(text, catalogue)
    entry = catalogue.at(step)
    if entry is None:
        known = [entry.step for entry in catalogue.checkpoints]
        newest = ", ".join(map(str, known[-4:]))
        which = "there is none yet"
        if known:
            which = f"there are {len(known)}, the newest {newest}"
        raise Refusal(
            f"{catalogue.folder / checkpoint_name(step)} does not exist; {which} (tr11 checkpoints list)"
        )
    return entry


def find_folder(catalogue: Catalogue, text: str) -> str:
    """The name of the folder that a person means: a step's, or one beside them by its whole name.
    Raises Refusal.
    """
    quarantined = next(
        (quarantined for quarantined in catalogue.quarantined if quarantined.name == text), None
    )
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
            raise Refusal(
                f"{catalogue.folder / LATEST_FILE} names no step; give the step's number instead"
            )
        return catalogue.latest
    return _number(text, f"a number or {LATEST_FILE}")


def resolve_step(card: RunCard, text: str) -> Path:
    """The folder that STEP means in the card's run: a number, `latest`, or a path. Raises Refusal
    when it is not there.

    Only that the folder exists is looked at, not what is in it.
    """
    named = existing_path(text)
    if named is not None:
        return named
    folder = directory_of(card).paths.checkpoints
    if text == LATEST_FILE:
        step = _latest(folder)
    else:
        step = _number(text)
    place = folder / checkpoint_name(step)
    if not place.is_dir():
        known = checkpoint_steps(folder)
        which = "there is none yet"
        if known:
            which = f"there are {_abridged(known)}"
        raise Refusal(f"{place} does not exist; {which} (tr11 checkpoints list)")
    return place.resolve()


def existing_path(text: str) -> Path | None:
    """The folder that `text` names by itself, without a card; None when it must be a step of the
    run.

    Raises Refusal when it is a path and nothing is there.
    """
    path = Path(text).expanduser()
    if "/" in text or text in {".", ".."}:
        if not path.is_dir():
            raise Refusal(
                f"{path} is not a folder; give a step, {LATEST_FILE}, or the path of a global_stepN folder"
            )
        return path.resolve()
    is_step = not text or text == LATEST_FILE or (text.isascii() and text.isdecimal())
    if not is_step and path.is_dir():
        return path.resolve()
    return None


def _number(text: str, ways: str = f"a number, {LATEST_FILE}, or a folder's path") -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) < 12
    step = int(text) if is_number else checkpoint_step(text)
    if step is None:
        raise WrongUsage(f"STEP = {text[:40]!r}: is not a step; use {ways}")
    return step


def _latest(folder: Path) -> int:
    try:
        step = read_latest(folder)
    except ValueError as error:
        raise Refusal(f"{error}; give the step's number instead") from None
    if step is None:
        raise Refusal(
            f"{folder / LATEST_FILE} does not exist: nothing was saved there yet, or it was lost"
        )
    return step


def _abridged(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-4:]))
    if len(steps) <= 4:
        return shown
    return f"{len(steps)} of them, the newest {shown}"


# ----------------------------------------------------------------------------- pin
def pin(
    context: Annotated[RunContext, JSON, REASON],
    step: Step,
) -> Outcome:
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
        is_new = put_pin(directory, entry.step, who=who, why=context.reason, when=time.time())
    except (OSError, ValueError) as error:
        raise _unwritten(error) from None
    if is_new:
        _note(
            directory,
            "checkpoint-pinned",
            f"{checkpoint_name(entry.step)}: {context.reason or 'no reason given'}",
            entry.step,
        )
    if entry.no_resume:
        say(f"tr11: no training resumes from step {entry.step}: {entry.no_resume}")
    return _told(entry.step, "pinned" if is_new else "pinned already")


def unpin(
    context: Annotated[RunContext, JSON],
    step: Step,
) -> Outcome:
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
    return _told(number, "unpinned")


def _unwritten(error: OSError | ValueError) -> Refusal:
    if isinstance(error, OSError):
        why = error.strerror or str(error)
    else:
        why = str(error)
    return Refusal(f"the pins were not changed: {why}")


def _note(directory: RunDirectory, kind: str, why: str, step: int) -> None:
    """The list of pins is what counts: a journal that cannot be written is said, and stops nothing."""
    try:
        Journal(directory.journal).write(kind, why, {"step": step})
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")


def _told(step: int, what: str) -> Outcome:
    value = {"schema": SCHEMA, "step": step, "result": what}
    return Outcome(value, (f"step {step}: {what}",), indent=None)
