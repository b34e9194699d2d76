"""The one way in which a command changes something: it shows its plan, asks, does it, and answers.

A command makes a `Change` of what was typed and of what it sees, and hands it to `carry_out`, which
alone obeys --dry-run, --yes and --json and ends with the exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import agree, require_answer, say
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    from tr11ops.cli.context import RunContext

UNCHANGED = "nothing was changed (--dry-run)"


class Outcome(Record):
    """What a command answers: with --json the document, if there is one, else the lines; then the
    notes, on stderr.

    `indent` is the document's, None for one line. `fault`: what is missing all the same, "" for
    nothing; it is the last line on stderr. `exit_code` is the command's.
    """

    document: JsonObject | None = None
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exit_code: int = 0
    fault: str = ""
    indent: int | None = 1


class Change(Record):
    """What a command would change. `lines` are the plan, for a person, on stderr; `preview` is
    --dry-run's answer, behind the line `unchanged`, "" where the preview says so itself.

    `question`: asked before it is applied, "" where no one has to be asked. `refusal`: why the
    plan, which is shown all the same, cannot be carried out. `nothing`: the answer where there is
    nothing to do. `prove`: what has to hold and takes long to find out, before the question; raises
    Refusal. `apply` does it, and raises Refusal where nothing came of it.

    `is_answer`: the plan is a part of the answer, so that a person can pipe it: on stdout, but with
    --json.
    """

    lines: Iterable[str]
    question: str
    apply: Callable[[], Outcome]
    preview: Outcome = Outcome()
    refusal: Refusal | None = None
    nothing: Outcome | None = None
    prove: Callable[[], None] | None = None
    unchanged: str = UNCHANGED
    is_answer: bool = False


def carry_out(context: RunContext, change: Change) -> None:
    """Show the change, ask, apply it and answer; with --dry-run only show it. Raises Refusal and
    typer.Exit.
    """
    tell = typer.echo if change.is_answer and not context.as_json else say
    for line in change.lines:
        tell(line)
    if change.refusal is not None:
        raise change.refusal
    if context.dry_run:
        if change.unchanged:
            say(change.unchanged)
        finish(context, change.preview)
        return
    if change.nothing is not None:
        finish(context, change.nothing)
        return
    if change.prove is not None:
        require_answer(context.yes)
        change.prove()
    if change.question:
        agree(change.question, context.yes)
    finish(context, change.apply())


def finish(context: RunContext, outcome: Outcome) -> None:
    """Print a command's answer and end with its exit code. Raises Refusal and typer.Exit."""
    context.emit(outcome.document, outcome.lines, outcome.indent)
    for note in outcome.notes:
        say(note)
    if outcome.fault and not (context.as_json and outcome.document):
        raise Refusal(outcome.fault, outcome.exit_code)
    if outcome.fault:  # the document is the whole of what is printed with --json
        say(f"tr11: {outcome.fault}")
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
