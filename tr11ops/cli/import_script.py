"""`tr11 import`: an old batch script made into a run card, with what it could not place and what is
wrong with it.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import Refusal, ScriptError
from tr11ops.base.units import counted
from tr11ops.cli.common import JsonOption, SetOption, say
from tr11ops.cli.context import emit
from tr11ops.importer.importing import import_script as read
from tr11ops.importer.importing import write_import
from tr11ops.importer.results import DefectSeverity, LeftReason

if TYPE_CHECKING:
    from tr11ops.importer.results import Defect, Imported

WIDTH = 100


def import_script(
    script: Annotated[
        Path,
        typer.Argument(metavar="OLD.slurm", help="Batch script of a Megatron-DeepSpeed training."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="CARD.toml", help="Where the card goes; else to stdout."
        ),
    ] = None,
    overrides: SetOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a card that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn an old batch script into a run card. The script is read, never run.

    What is not in the card, what was changed and what is wrong with the script is told with its
    line.

    Exit code 0: the card is complete; 1: it is written, and a person must decide; 2: the script
    cannot be read.

    Examples:
      tr11 import old.slurm -o tr11.toml
      tr11 import old.slurm --set tokenizer.vocabulary_size=50257 --json
    """
    if output is not None and output.exists() and not force:
        raise Refusal(f"{output}: is already there; --force writes over it", exit_code=2)
    try:
        imported = read(script, overrides or [])
    except ScriptError as error:
        raise Refusal(f"{script}: {error}", exit_code=2) from None
    if output is not None:
        try:
            write_import(imported, output, force)
        except FileExistsError:
            raise Refusal(
                f"{output}: is already there; --force writes over it", exit_code=2
            ) from None
        except OSError as error:
            raise Refusal(f"{output}: {error.strerror or error}", exit_code=2) from None
    if as_json:
        emit(imported.to_json(str(output) if output else None))
    else:
        lines = list(report(imported, output))
        if output is None:
            print(imported.text, end="")
            say("\n".join(lines))
        else:
            print("\n".join(lines))
    if imported.exit_code:
        raise typer.Exit(imported.exit_code)


def report(imported: Imported, output: Path | None) -> Iterator[str]:
    """What a person should read, most urgent last so that it stands above the prompt."""
    quiet = [item for item in imported.unplaced if item.reason is not LeftReason.DECISION]
    if quiet:
        yield "Not in the card"
        for item in quiet:
            yield from _lines(
                item.line, f"{item.option} {item.value}".strip(), f"{item.reason}: {item.why}"
            )
        yield ""
    for severity, title in (
        (DefectSeverity.NOTE, "Notes"),
        (DefectSeverity.WARNING, "Warnings"),
        (DefectSeverity.ERROR, "Errors"),
    ):
        found = [defect for defect in imported.defects if defect.severity is severity]
        if found:
            yield title
            for defect in found:
                yield from _lines(defect.line, defect.what, *_remedy(defect, imported))
            yield ""
    if imported.changed:
        yield "Changed"
        for change in imported.changed:
            yield from _lines(
                change.line,
                f"{change.key} = {change.card_value}",
                f"the script's {change.script_value} {change.why}",
            )
        yield ""
    if imported.decisions:
        yield "To decide"
        for item in imported.decisions:
            yield from _lines(item.line, f"{item.option} {item.value}".strip(), item.why)
        yield ""
    told = {defect.key for defect in imported.defects}
    problems = [problem for problem in imported.problems if problem.key not in told]
    if problems:
        yield "The card is refused as it is"
        for problem in problems:
            yield from _lines(problem.line, problem.text)
        yield ""
    yield _verdict(imported, output)


def _remedy(defect: Defect, imported: Imported) -> tuple[str, ...]:
    if defect.key and defect.key in imported.overridden:
        return (f"decided with --set {defect.key}",)
    return (f"cost: {defect.cost}", f"fix: {defect.fix}")


def _lines(line: int, first: str, *more: str) -> Iterator[str]:
    if line:
        place = f"{line:5d}  "
    else:
        place = " " * 7
    for index, text in enumerate((first, *more)):
        if index == 0:
            lead = place
        else:
            lead = " " * 9
        yield textwrap.fill(
            _printable(text),
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * 9,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _verdict(imported: Imported, output: Path | None) -> str:
    count = f"{counted(len(imported.placed), 'key')} placed"
    place = ""
    if output:
        place = f" in {os.fspath(output)}"
    open_questions = len(imported.decisions) + len(imported.errors) + len(imported.problems)
    if not open_questions:
        return f"{count}{place}; nothing is left to decide"
    parts = [
        f"{number} {one if number == 1 else many}"
        for number, one, many in (
            (len(imported.errors), "error", "errors"),
            (len(imported.decisions), "decision", "decisions"),
            (len(imported.problems), "refusal of the card", "refusals of the card"),
        )
        if number
    ]
    return f"{count}{place}; a person must look at {', '.join(parts)} (--set SECTION.KEY=VALUE)"
