"""The runner of commands: the run that a command line means, the options that several commands have,
and the one way in which a command answers, and in which it changes something.

A command takes one `RunContext`, and returns an `Outcome`, which is its answer, or a `Change`, which
`carry_out` makes one of: it shows its plan, asks, does it, and says what came of it.
`with_run_options` gives the command the options that name a run: --run, --set and --scheduler
always, but where the parameter says `NO_RUN`; --json, --yes, --dry-run and --reason where it asks
for them. They are declared and obeyed here alone, and here exit codes are made.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tr11ops.base.deadline import watch_files
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import INVOCATION_CARD, PLAN_CHANGED, PLAN_MARK, mark_of_plan
from tr11ops.base.observed import Unknown
from tr11ops.cli.common import (
    ActingForOption,
    AsShownOption,
    DryRunOption,
    JsonOption,
    ReasonOption,
    RunOption,
    SchedulerOption,
    SetOption,
    YesOption,
    agree,
    card_path,
    directory_of,
    has_card,
    in_time,
    named_card,
    not_mounted,
    nothing_there,
    read_card,
    require_answer,
    say,
)
from tr11ops.observe.readers import check_scheduler_word, looking, open_reader
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record
from trainer.contract.units import printable

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

# of the options that every command with a RunContext has
RUN_NAMES = frozenset({"run", "overrides", "scheduler"})
# Of the options that a command has besides: Annotated[RunContext, JSON, SCHEDULER].
JSON, SCHEDULER, YES, DRY_RUN, REASON = "as_json", "scheduler", "yes", "dry_run", "reason"
AS_SHOWN = "as_shown"  # goes with DRY_RUN
ACTING_FOR = "acting_for"  # goes with REASON
# Of a command that is not about one run: only the options that it asks for, --set among them.
NO_RUN, SET = "no run", "overrides"


class RunContext(Record, dict=True):
    """The run that a command line means. Card and directory are read when they are first asked for,
    once. `as_shown`: the mark of the plan that a person has agreed to; with `dry_run`, that it is
    asked for. `acting_for`: the person for whom a program types it, "" for the user of this process.
    """

    run: str | None = None  # as it was typed
    overrides: tuple[str, ...] = ()
    scheduler: str = "auto"
    as_json: bool = False
    yes: bool = False
    dry_run: bool = False
    reason: str = ""
    as_shown: str = ""
    acting_for: str = ""

    @property
    def who(self) -> str:
        """The person who asks for it, as the journal is to name them. What the user of this process
        may do is another question: `user_name`.
        """
        return printable(self.acting_for.strip()) or user_name()

    @property
    def card_path(self) -> Path:
        """Where the run card lies. Raises CardError when there is none."""
        return card_path(self.run)

    @property
    def has_card(self) -> bool:
        """Whether the command line means any card."""
        return has_card(self.run)

    @cached_property
    def card(self) -> RunCard:
        """Raises CardError; Refusal, with exit code 3, where its file system does not answer."""
        card = in_time(partial(read_card, self.run, self.overrides))
        watch_files(card.paths.root)
        return card

    @cached_property
    def directory(self) -> RunDirectory:
        """The run directory that the card names; it need not be there, but its file system has
        answered. Raises CardError; Refusal, with exit code 3, where it does not answer.
        """
        found = directory_of(self.card)
        in_time(lambda: found.exists)
        return found

    def card_with_undefined(self) -> RunCard:
        """The card, where a variable that it names need not be defined. Raises CardError."""
        return in_time(partial(read_card, self.run, self.overrides, keep_undefined=True))

    def seen(self, missing: int | None = 1) -> tuple[RunCard, RunDirectory]:
        """Card and run directory, both looked at within the deadline of a look.

        `missing`: the exit code where the run directory is not there; None where it need not be.
        Raises CardError; Refusal where it is not there, and with exit code 3 where the look is late.
        """

        def is_there() -> bool:
            return self.directory.exists

        if missing is not None and not in_time(is_there):
            self.require_mounted()
            raise nothing_there(self.directory, missing)
        return self.card, self.directory

    def require_mounted(self) -> None:
        """Raises Refusal, with exit code 3, where what is seen is not the directory that the run's
        jobs came from.

        There nothing is missing, nothing is new, and nothing may be removed. The scheduler is asked
        only where no launch is on record.
        """
        why = self.why_unmounted()
        if why:
            raise not_mounted(self.directory, why)

    def why_unmounted(self) -> str:
        """Why what is seen is not the directory that the run's jobs were queued from; "" where it
        is.
        """
        from tr11ops.observe.jobs import look_for_directory

        reader = in_time(partial(open_reader, self.directory, self.scheduler))
        if not isinstance(reader, Unknown):
            reader = looking(reader)
        return in_time(partial(look_for_directory, self.directory, reader, time.time()))


# ----------------------------------------------------------------------------- answer and change
UNCHANGED = "nothing was changed (--dry-run)"


class Outcome(Record):
    """What a command answers: with --json the document, if there is one, else what `screen` draws,
    or the lines; then, on stderr, the remarks, which are for a person alone, and the notes.

    `indent` is the document's, None for one line. `fault`: what is missing all the same, "" for
    nothing; it is the last line on stderr. `exit_code` is the command's.
    """

    document: Mapping[str, Any] | None = None
    lines: Iterable[str] = ()
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    exit_code: int = 0
    fault: str = ""
    indent: int | None = 1
    screen: Callable[[], None] | None = None


class Change(Record):
    """What a command would change. `lines` are the plan, for a person, on stderr; `preview` is
    --dry-run's answer, behind the line `unchanged`, "" where the preview says so itself.

    `question`: asked before it is applied, "" where no one has to be asked. `refusal`: why the
    plan, which is shown all the same, cannot be carried out. `nothing`: the answer where there is
    nothing to do. `prove`: what has to hold and takes long to find out, before the question; raises
    Refusal. `apply` does it, and raises Refusal where nothing came of it.

    `is_answer`: the plan is a part of the answer, so that a person can pipe it: on stdout, but with
    --json. `is_empty`: there is nothing to agree to, as applying it changes nothing.
    """

    lines: Iterable[str]
    question: str
    apply: Callable[[], Outcome]
    preview: Outcome | Callable[[], Outcome] = Outcome()
    refusal: Refusal | None = None
    nothing: Outcome | None = None
    prove: Callable[[], None] | None = None
    unchanged: str = UNCHANGED
    is_answer: bool = False
    is_empty: bool = False

    @property
    def can_be_agreed_to(self) -> bool:
        return not self.is_empty and self.nothing is None and self.refusal is None


def answer(context: RunContext, said: Change | Outcome | None) -> int:
    """Print what a command says, once its change is carried out; returns the exit code. Raises
    Refusal and typer.Abort.
    """
    if isinstance(said, Change):
        said = carry_out(context, said)
    if said is None:  # it has shown all there is while it went on
        return 0
    if context.as_json:
        if said.document is not None:
            emit(said.document, said.indent)
    elif said.screen is not None:
        said.screen()
    else:
        for line in said.lines:
            typer.echo(line)
    if not context.as_json:
        for remark in said.remarks:
            say(remark)
    for note in said.notes:
        say(note)
    if said.fault and not (context.as_json and said.document):
        raise Refusal(said.fault, said.exit_code)
    if said.fault:  # the document is the whole of what is printed with --json
        say(f"tr11: {said.fault}")
    return said.exit_code


def carry_out(context: RunContext, change: Change) -> Outcome:
    """Show the change, ask, and apply it; with --dry-run only show it. Raises Refusal, also
    where the person who has agreed was shown another one; who has agreed to this one has read it.
    """
    tell = typer.echo if change.is_answer and not context.as_json else say
    is_agreed = bool(context.as_shown) and not context.dry_run
    lines = []
    for line in change.lines:
        if not is_agreed:
            tell(line)
        lines.append(line)
    if context.as_shown:
        mark = mark_of_plan(lines or _preview(change).remarks)
        if is_agreed and mark != context.as_shown:
            raise Refusal(PLAN_CHANGED)
        if context.dry_run and change.can_be_agreed_to:
            say(f"{PLAN_MARK}{mark}")
    if change.refusal is not None:
        raise change.refusal
    if context.dry_run:
        if change.unchanged:
            say(change.unchanged)
        return _preview(change)
    if change.nothing is not None:
        return change.nothing
    if change.prove is not None:
        require_answer(context.yes)
        change.prove()
    if change.question:
        agree(change.question, context.yes)
    return change.apply()


def _preview(change: Change) -> Outcome:
    if isinstance(change.preview, Outcome):
        return change.preview
    return change.preview()


def unasked(apply: Callable[[], Outcome], preview: Callable[[], Outcome]) -> Change:
    """A change that no one is asked about, as it takes nothing away: --dry-run shows the preview in
    its place.
    """
    return Change((), "", apply, preview, unchanged="")


def emit(document: Mapping[str, Any], indent: int | None = 1) -> None:
    """One JSON document on standard output; `indent` None for one line of a stream. What JSON
    cannot say is null.
    """
    try:
        text = json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    print(text, flush=True)


def _finite(value: Any) -> Any:
    """The same with null for every number that is none, or is infinite."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ----------------------------------------------------------------------------- the options
# Every command about a run takes it, so that one line of options does for all; a page shows it where it counts.
_UnusedScheduler = Annotated[
    str, typer.Option("--scheduler", hidden=True, callback=check_scheduler_word)
]
_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "yes": (YesOption, False),
    "dry_run": (DryRunOption, False),
    "reason": (ReasonOption, ""),
    "as_shown": (AsShownOption, ""),
    "acting_for": (ActingForOption, ""),
    "run": (RunOption, None),
    "scheduler": (SchedulerOption, "auto"),
    "as_json": (JsonOption, False),
    "overrides": (SetOption, None),
}


def with_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as the parser takes it: its RunContext is made of options of their own, which
    come last on its page; what it returns is printed, and the exit code returned.

    A command without a RunContext, or that has its options already, comes back as it is.
    """
    hints = get_type_hints(command, include_extras=True)
    parameter = next((name for name, hint in hints.items() if _flags(hint) is not None), None)
    if parameter is None or hasattr(command, "__wrapped__"):
        return command
    flags = _flags(hints[parameter]) or ()
    wanted = set(flags) if NO_RUN in flags else {*RUN_NAMES, *flags}
    if DRY_RUN in wanted:
        wanted.add(AS_SHOWN)
    if REASON in wanted:
        wanted.add(ACTING_FOR)
    options = {name: option for name, option in _OPTIONS.items() if name in wanted}
    if SCHEDULER in options and SCHEDULER not in flags:
        options[SCHEDULER] = (_UnusedScheduler, "auto")
    if SCHEDULER in hints:  # one of the command's own, which says more
        del options[SCHEDULER]

    @functools.wraps(command)
    def with_options(**values: Any) -> int:
        given = {name: values.pop(name) for name in options}
        given["overrides"] = tuple(given.get("overrides") or ())
        INVOCATION_CARD.set(named_card(given.get("run")))
        context = RunContext(**given)
        return answer(context, command(**values, **{parameter: context}))

    own = [one for name, one in inspect.signature(command).parameters.items() if name != parameter]
    own = [
        one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in own
    ]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in options.items()
    ]
    with_options.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in (*own, *more)}
    return with_options


def _flags(hint: Any) -> tuple[str, ...] | None:
    """What a RunContext's annotation asks for besides --run and --set; None for another
    parameter's.
    """
    if hint is RunContext:
        return ()
    arguments = get_args(hint)
    if get_origin(hint) is Annotated and arguments[0] is RunContext:
        return arguments[1:]
    return None
