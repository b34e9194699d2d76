"""`tr11 backup plan`, `run` and `verify`: which copies are due; they are made and read back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops.backup.archive_round import plan_of, rows_of
from tr11ops.backup.archives import archive_key, folder_fault
from tr11ops.backup.base import Archive
from tr11ops.backup.data_sets import data_states
from tr11ops.backup.due import CopyPlan, CopyRequest
from tr11ops.backup.ledger import ArchiveState, read_archive_state
from tr11ops.backup.round_values import (
    CARDS_ARCHIVES,
    BackupContext,
    RoundPruning,
    RoundRequest,
    RoundResult,
    card_archives,
)
from tr11ops.backup.screen import (
    data_lines,
    data_value,
    plan_lines,
    plan_value,
    round_lines,
    round_value,
    weigh,
)
from tr11ops.backup.service import note_damage, run_round
from tr11ops.backup.submit import SubmitContext, submit
from tr11ops.base.errors import CopyDamaged, Refusal, Unobserved, WrongUsage
from tr11ops.base.stop_signals import STOP_SIGNALS, StopEvent, obeying
from tr11ops.checkpoints.prune import Pruner, PruneResult
from tr11ops.cli.common import directory_of, in_time, require_directory, say
from tr11ops.cli.progress import ByteProgress
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    REASON,
    SCHEDULER,
    Change,
    Outcome,
    RunContext,
    unasked,
)
from tr11ops.cron.table_programs import Invocation
from tr11ops.observe.readers import kind_to_watch, open_scheduler
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.claims import ClaimTaken
from tr11ops.rundir.copies import CopyRecord, Receipt, read_copies
from tr11ops.rundir.journal import Journal, user_name

SCHEMA = 1
KINDS = ("full", "weights", "spike", "data")


# ----------------------------------------------------------------------------- errors
def recorded(backup: BackupContext, archive: Archive, receipt: Receipt, error: CopyDamaged) -> str:
    """Put damage of a copy on record, so that the next round repairs it; returns what to say of
    that.
    """
    if not backup.directory.exists:
        return ""
    try:
        faults = {error.path: error.fault}
        is_noted = note_damage(
            backup.directory,
            backup.journal,
            archive=archive,
            receipt=receipt,
            faults=faults,
            why="found by a restore",
        )
    except (OSError, ValueError) as failure:
        return f"; it could not be put on record: {failure}"
    if is_noted:
        return (
            "; the damage is on record, and tr11 backup run repairs it while the checkpoint is here"
        )
    return ""


@contextmanager
def archive_errors() -> Iterator[None]:
    """Errors of archives and copies as one line, each with its exit code."""
    try:
        yield
    except ValueError as error:
        raise Refusal(f"{error}; restore from another copy") from None


# ----------------------------------------------------------------------------- plan
def planned_copies(card: RunCard, asked: CopyRequest, archives: Sequence[str]) -> Outcome:
    """The plan of a round. Raises Refusal where the records or the checkpoints cannot be
    read.
    """
    directory = directory_of(card)
    names = tuple(name if name in CARDS_ARCHIVES else archive_key(name, card) for name in archives)

    def look() -> tuple[
        list[SavedCheckpoint], tuple[CopyRecord, ...], CopyPlan, dict[str, ArchiveState | None]
    ]:
        rows = rows_of(directory)
        copies = read_copies(directory)
        made = plan_of(card, rows, copies, RoundRequest(names, asked))
        return rows, copies, made, {name: read_archive_state(directory, name) for name in names}

    try:
        rows, copies, made, states = in_time(look)
    except (OSError, ValueError) as error:
        raise Unobserved(f"what is copied is not known: {error}") from None
    weighed = weigh(made, directory.paths.checkpoints)
    rates = {name: state.rate for name, state in states.items() if state is not None and state.rate}
    if asked.steps:
        _require_here(asked.steps, rows, made)
    looks = {key: folder_fault(name, card) for key, name in zip(names, archives, strict=True)}
    faults = {key: fault for key, fault in looks.items() if fault}
    if asked.steps:
        data = {}
    else:
        data = {name: data_states(card, copies, name) for name in names}
    shown = (card.run.name, card.run.variant, weighed, rates, faults)
    return Outcome(
        {**plan_value(*shown), "data": data_value(data)},
        chain(plan_lines(*shown), data_lines(data)),
        exit_code=1 if faults else 0,
    )


def _require_here(steps: Sequence[int], rows: Sequence[SavedCheckpoint], made: CopyPlan) -> None:
    known = {copy.step for copy in made.due} | {copy.step for copy in made.copied}
    missing = sorted(set(steps) - known)
    if missing:
        faults = {row.step: row.faults[0] for row in rows if row.faults}
        why = faults.get(missing[0], "there is no such checkpoint here")
        raise Refusal(f"step {missing[0]} cannot be copied: {why}; see tr11 checkpoints list")


# ----------------------------------------------------------------------------- the commands
StepsArgument = Annotated[
    list[int] | None,
    typer.Argument(metavar="[STEP...]", help="These checkpoints, whatever the card wants.", min=0),
]
ArchiveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="store|url|ADDRESS",
        help="Only there; an address needs STEP. May be repeated.",
    ),
]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--kind", metavar="full|weights|spike|data", help="Only these; with STEP: what to copy."
    ),
]


def run_copies(
    context: Annotated[RunContext, SCHEDULER, JSON, DRY_RUN, REASON],
    steps: StepsArgument = None,
    to: ArchiveOption = None,
    kind: KindOption = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit", metavar="MB/S", help="Default: backup.megabytes_per_second.", min=0.001
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "--parallel",
            metavar="N",
            help="Files at once. Default: backup.parallel.",
            min=1,
        ),
    ] = None,
    no_logs: Annotated[
        bool, typer.Option("--no-logs", help="Leave logs and TensorBoard events out.")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="As a job, unless one is queued.")
    ] = False,
) -> Change:
    """One round: due copies, each read back; logs; the share of re-reading; then prune, where the
    card wants that.

    It may be stopped or killed at any moment: the next round goes on from there, in the middle of a
    file too. Several at once are safe: to each archive one of them copies, the others say who it
    is.

    Exit code 0: all is copied; 1: a person is needed, or it was stopped; 3: an archive does not
    answer.

    Examples:
      tr11 backup run --dry-run
      tr11 backup run
      tr11 backup run --submit
      tr11 backup run 31200 31259 --to url --kind spike
    """
    card, directory = context.seen(missing=None)
    card = _changed(card, limit, parallel)
    asked = asked_of(steps, kind)
    archives = require_archives(card, to, steps)
    context.require_mounted()
    require_directory(directory)

    def apply() -> Outcome:
        if submit:
            options = _options(
                to, kind, limit=limit, parallel=parallel, no_logs=no_logs, why=context.reason
            )
            return _submit(card, context, ["backup", "run", *map(str, steps or ()), *options])
        reading: Any = "share"
        if asked.steps:
            reading = "none"
        request = RoundRequest(
            archives,
            asked,
            logs=not no_logs and not asked.steps,
            reading=reading,
            why=context.reason,
        )
        with open_backup(card, context.as_json) as backup:
            done = run_round(backup, request)
            pruned = None
            if card.backup.prune and not asked.steps and not backup.stop.is_set():
                pruned = _prune(card, backup)
        return _came_of_it(done, pruned, if_busy=1 if asked.steps else 0)

    return unasked(apply, partial(planned_copies, card, asked, archives))


def read_back(
    context: Annotated[RunContext, JSON],
    steps: StepsArgument = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="store|url|ADDRESS", help="Only this archive."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every byte of every copy; the default.")
    ] = False,
    due: Annotated[
        bool, typer.Option("--due", help="This round's share of the rotation alone; for cron.")
    ] = False,
) -> Outcome:
    """Read copies back from their archives, every byte, and compare them with their receipts.

    Damage goes on record: status and alerts tell of it, and the next `tr11 backup run` repairs it
    from the run directory. A long reading may be stopped: what was read is on record.

    Exit code 0: all is as it was copied; 1: something is not, or it was stopped; 3: an archive does
    not answer.

    Examples:
      tr11 backup verify
      tr11 backup verify 3000 --from store
    """
    if sum([bool(steps), everything, due]) > 1:
        raise WrongUsage("STEP, --all and --due: give one of them")
    card, directory = context.seen(missing=None)
    archives = require_archives(card, source, (1,), "--from")
    context.require_mounted()
    require_directory(directory)
    reading: Any = "all"
    if due:
        reading = "share"
    request = RoundRequest(
        archives, asked_of(steps, None), copies=False, logs=False, reading=reading
    )
    with open_backup(card, context.as_json) as backup:
        done = run_round(backup, request)
    damaged = {copy.step for tally in done.tallies for copy in tally.damaged}
    unread = sorted(
        set(steps or ()) - damaged - {step for tally in done.tallies for step in tally.read_steps}
    )
    if unread and not any(tally.faults or tally.busy or tally.is_stopped for tally in done.tallies):
        raise Refusal(
            f"step {unread[0]}: there is no copy of it in {' or '.join(archives)}; see tr11 backup status"
        )
    return _came_of_it(done, None, if_busy=3)


# ----------------------------------------------------------------------------- what was asked
def asked_of(steps: Sequence[int] | None, kind: str | None) -> CopyRequest:
    """What a person asked for. Raises Refusal for an unknown kind."""
    if kind is not None and kind not in KINDS:
        raise WrongUsage(f"--kind {kind!r}: must be one of {', '.join(KINDS)}")
    if kind == "data" and steps:
        raise WrongUsage("--kind data: data sets have no steps; leave STEP out")
    return CopyRequest(tuple(steps or ()), kind)  # type: ignore[arg-type]


def require_archives(
    card: RunCard,
    named: Sequence[str] | None,
    steps: Sequence[int] | None,
    option: str | None = "--to",
) -> tuple[str, ...]:
    """The archives that are meant: those named, else the card's. Raises Refusal.

    `option` names others than the card's, for the STEPs given; None where the command has no such
    option.
    """
    ours = card_archives(card)
    if not named and not ours:
        other = ""
        if option:
            other = f", or give {option} with a STEP"
        raise WrongUsage(f"the run card names no archive: set backup.store or backup.url{other}")
    for name in named or ():
        if "@" in name or "?" in name:  # before any message repeats it
            raise WrongUsage(
                f"{option}: an address with credentials would be seen by everyone here; use a file",
            )
        if name in CARDS_ARCHIVES and name not in ours:
            raise WrongUsage(f"{option} {name}: backup.{name} is not set in the run card")
        if name not in CARDS_ARCHIVES and not steps:
            raise WrongUsage(
                f"{option} {name}: is not of the card, so name the STEPs to copy there"
            )
    if named:
        return tuple(dict.fromkeys(named))
    return ours


def _changed(card: RunCard, limit: float | None, parallel: int | None) -> RunCard:
    changes: dict[str, Any] = {}
    if limit is not None:
        changes["megabytes_per_second"] = limit
    if parallel is not None:
        changes["parallel"] = parallel
    if changes:
        return card.model_copy(update={"backup": card.backup.model_copy(update=changes)})
    return card


def _options(
    to: Sequence[str] | None,
    kind: str | None,
    limit: float | None,
    parallel: int | None,
    no_logs: bool,
    why: str,
) -> Iterator[str]:
    for name in to or ():
        yield from ("--to", name)
    for option, given in (
        ("--kind", kind),
        ("--limit", limit),
        ("--workers", parallel),
        ("--reason", why),
    ):
        if given:
            yield from (option, f"{given}")
    if no_logs:
        yield "--no-logs"


# ----------------------------------------------------------------------------- where it happens
@contextmanager
def open_backup(card: RunCard, is_quiet: bool) -> Iterator[BackupContext]:
    """Where rounds happen, with progress on stderr; TERM, Ctrl-C and USR1 end the round soon and in
    order.
    """
    directory = directory_of(card)
    with stopping() as stop:
        yield BackupContext(
            card,
            directory,
            journal=Journal(directory.journal),
            say=say,
            watch=partial(ByteProgress, is_quiet=is_quiet),
            stop=stop,
        )


@contextmanager
def stopping() -> Iterator[StopEvent]:
    """An event that a signal to end sets; a second one of Ctrl-C ends at once."""
    stop = StopEvent()

    def obey(number: int) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        with suppress(RuntimeError):  # the signal came in the middle of another line
            say("stopping: what was sent is kept, the next round goes on from there")

    with obeying(obey, (*STOP_SIGNALS, signal.SIGUSR1)):
        yield stop


def _prune(card: RunCard, backup: BackupContext) -> PruneResult | None:
    """Remove what the policy does not keep. Says why it did not come about."""
    try:
        return Pruner.of(card, user_name(), "backup.prune, after a round", stop=backup.stop).run()
    except ClaimTaken as taken:
        say(f"prune: a prune is running already: {taken}")
    except OSError as error:
        why = f"{error.filename or card.paths.root}: {error.strerror or error}"
        return PruneResult(ended_early=f"nothing is removed that cannot be recorded: {why}")
    return None


def _submit(card: RunCard, context: RunContext, words: list[str]) -> Outcome:
    directory = directory_of(card)
    folder = Path.cwd()
    invocation = Invocation(
        card,
        (folder / context.card_path).absolute(),
        overrides=context.overrides,
        folder=folder,
        environment=dict(os.environ),
    )
    scheduler = open_scheduler(kind_to_watch(directory, context.scheduler))
    submit_context = SubmitContext(invocation, directory, scheduler, tuple(words))
    try:
        queued = submit(submit_context)
    except ValueError as error:
        raise Refusal(str(error)) from None
    text = f"job {queued.job_id} is there already ({queued.state}): nothing was submitted"
    if queued.is_new:
        Journal(directory.journal).write(
            "backup-submitted", "", {"job": queued.job_id, "words": words}
        )
        outputs = directory.paths.state / "backup" / "slurm"
        text = f"job {queued.job_id} makes the round; its output: {outputs}"
    values = {
        "schema": SCHEMA,
        "job_id": queued.job_id,
        "new": queued.is_new,
        "state": queued.state or None,
    }
    return Outcome(values, remarks=(text,))


# ----------------------------------------------------------------------------- what is on record
def records_of(card: RunCard) -> tuple[CopyRecord, ...]:
    """Every copy that is on record. Raises Refusal where that cannot be read."""
    try:
        return read_copies(directory_of(card))
    except (OSError, ValueError) as error:
        raise Unobserved(
            f"the records of copies cannot be read: {error}; name the archive: --from"
        ) from None


# ----------------------------------------------------------------------------- what came of it
def _came_of_it(done: RoundResult, pruned: PruneResult | None, if_busy: int) -> Outcome:
    """What is answered. `if_busy`: the exit code where another process is at it, and all else is
    fine.
    """
    busy = if_busy if any(tally.busy for tally in done.tallies) else 0
    code = max(done.exit_code, 1 if pruned is not None and pruned.failed else 0) or busy
    shown = None
    if pruned is not None:
        steps = tuple(outcome.step for outcome in pruned.outcomes if outcome.result == "removed")
        shown = RoundPruning(steps, pruned.freed, pruned.ended_early)
    return Outcome(round_value(done, shown, code), round_lines(done, shown), exit_code=code)
