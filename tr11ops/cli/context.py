"""One run as a command line means it, and the one way in which a command answers.

A command takes one `RunContext`; `with_run_options` gives it the options that name a run. They are
declared here alone: --run, --set and --scheduler always; --json, --yes, --dry-run and --reason
where the parameter asks for them.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tr11ops.base.deadline import watch_files
from tr11ops.base.invocation import INVOCATION_CARD
from tr11ops.cli.common import (
    DryRunOption,
    JsonOption,
    ReasonOption,
    RunOption,
    SchedulerOption,
    SetOption,
    YesOption,
    card_path,
    check_scheduler_word,
    directory_of,
    has_card,
    in_time,
    looking,
    not_mounted,
    nothing_there,
    open_reader,
    read_card,
)
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

# of the options that every command with a RunContext has
RUN_NAMES = frozenset({"run", "overrides", "scheduler"})
# Of the options that a command has besides: Annotated[RunContext, JSON, SCHEDULER].
JSON, SCHEDULER, YES, DRY_RUN, REASON = "as_json", "scheduler", "yes", "dry_run", "reason"


class RunContext(Record, dict=True):
    """The run that a command line means. Card and directory are read when they are first asked for,
    once.
    """

    run: str | None = None  # as it was typed
    overrides: tuple[str, ...] = ()
    scheduler: str = "auto"
    as_json: bool = False
    yes: bool = False
    dry_run: bool = False
    reason: str = ""

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
        from tr11ops.base.observed import Unknown
        from tr11ops.observe.ownership import look_for_directory

        reader = in_time(partial(open_reader, self.directory, self.scheduler))
        if not isinstance(reader, Unknown):
            reader = looking(reader)
        return in_time(partial(look_for_directory, self.directory, reader, time.time()))

    def emit(
        self, document: JsonObject | None, lines: Iterable[str] = (), indent: int | None = 1
    ) -> None:
        """The command's answer: the document with --json, if there is one, else the lines."""
        answer(self.as_json, document, lines, indent)


def answer(
    as_json: bool,
    document: JsonObject | None,
    lines: Iterable[str] = (),
    indent: int | None = 1,
) -> None:
    """A command's answer, for one without a RunContext."""
    if as_json and document is not None:
        emit(document, indent)
    elif not as_json:
        for line in lines:
            typer.echo(line)


def emit(document: JsonObject, indent: int | None = 1) -> None:
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
    "run": (RunOption, None),
    "scheduler": (SchedulerOption, "auto"),
    "as_json": (JsonOption, False),
    "overrides": (SetOption, None),
}


def with_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as the parser takes it: its RunContext is made of options of their own, which
    come last on its page.

    A command without a RunContext, or that has its options already, comes back as it is.
    """
    hints = get_type_hints(command, include_extras=True)
    parameter = next((name for name, hint in hints.items() if _flags(hint) is not None), None)
    if parameter is None or hasattr(command, "__wrapped__"):
        return command
    wanted = {*RUN_NAMES, *(_flags(hints[parameter]) or ())}
    options = {name: option for name, option in _OPTIONS.items() if name in wanted}
    if SCHEDULER not in (_flags(hints[parameter]) or ()):
        options["scheduler"] = (_UnusedScheduler, "auto")
    if SCHEDULER in hints:  # one of the command's own, which says more
        del options["scheduler"]

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        given = {name: values.pop(name) for name in options}
        given["overrides"] = tuple(given["overrides"] or ())
        INVOCATION_CARD.set(given["run"] or "")
        return command(**values, **{parameter: RunContext(**given)})

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
