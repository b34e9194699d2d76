"""Cards of scripts: `tr11 import` of one that starts an old Megatron-DeepSpeed, for tr11's own trainer;
`tr11 adopt` of one that someone runs today, whose trainer stays what it is.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tr11ops.base.errors import ScriptError, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.units import counted, plain
from tr11ops.cli.runner import DRY_RUN, JSON, NO_RUN, SET, Outcome, RunContext
from tr11ops.importer.adopting import adopt_script
from tr11ops.importer.importing import import_script as read, write_import
from tr11ops.importer.options import Defect, DefectSeverity, Imported, LeftReason, PlacedValue
from tr11ops.runcard.toml_writer import toml_value

WIDTH = 100


def import_script(
    context: Annotated[RunContext, NO_RUN, SET, JSON],
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
    force: Annotated[
        bool, typer.Option("--force", help="Write over a card that is there.")
    ] = False,
) -> Outcome:
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
        raise WrongUsage(f"{output}: is already there; --force writes over it")
    try:
        imported = read(script, list(context.overrides))
    except ScriptError as error:
        raise WrongUsage(f"{script}: {error}") from None
    if output is not None:
        _write_card(imported, output, force)
    document = imported.to_json(str(output) if output else None)
    lines, remarks = list(report(imported, output)), list[str]()
    if output is None:
        lines, remarks = [imported.text.removesuffix("\n")], ["\n".join(lines)]
    return Outcome(document, lines, remarks=remarks, exit_code=imported.exit_code)


def report(imported: Imported, output: Path | None) -> Iterator[str]:
    """What a person should read, most urgent last so that it stands above the prompt."""
    spoken = (LeftReason.DECISION, LeftReason.UNKNOWN)
    quiet = [item for item in imported.unplaced if item.reason not in spoken]
    if quiet:
        yield "Not in the card"
        for item in quiet:
            yield from _lines(
                item.line, f"{item.option} {item.value}".strip(), f"{item.reason}: {item.why}"
            )
        yield ""
    unknown = [item for item in imported.unplaced if item.reason is LeftReason.UNKNOWN]
    if unknown:
        yield "Not known"
        for item in unknown:
            yield from _lines(item.line, item.option, item.why)
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
            plain(text, unicode=True),
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * 9,
            break_long_words=False,
            break_on_hyphens=False,
        )


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


# ----------------------------------------------------------------------------- adopt
def adopt(
    context: Annotated[RunContext, NO_RUN, SET, JSON, DRY_RUN],
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT.slurm", help="A batch script that trains today.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="CARD.toml", help="Where the card goes.")
    ] = Path("tr11.toml"),
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="A log of this training; if not given, the newest that lies beside the script.",
        ),
    ] = None,
    line: Annotated[
        int | None,
        typer.Option(
            "--line",
            metavar="N",
            min=1,
            help="The line of the command that trains, where several may.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a card that is there.")
    ] = False,
) -> Outcome:
    """Make a card of a batch script that trains today, whatever trainer it starts.

    The script is read, never run: what Slurm is asked for, what is set up, how the training is
    started and on how many workers, and what its words say of folder, steps, saves and resuming.
    What it does not say stays unknown, and is told; so is what is left out. The trainer itself
    is not changed.

    Exit code 0: the card is complete; 1: it is written, and a person must decide; 2: the script
    cannot be read, starts no training that could be told, or the card is there.

    Examples:
      tr11 adopt train.slurm --dry-run
      tr11 adopt train.slurm -o tr11.toml --log slurm-4711.out
      tr11 adopt train.slurm --set 'alerts.recipients=["you@example.org"]'
    """
    is_written = not context.dry_run
    if is_written and output.exists() and not force:
        raise WrongUsage(f"{output}: is already there; --force writes over it")
    try:
        adopted = adopt_script(script, list(context.overrides), log, line)
    except ScriptError as error:
        raise WrongUsage(f"{script}: {error}") from None
    except OSError as error:
        raise WrongUsage(f"{log}: cannot be read: {error.strerror or error}") from None
    lines = [*_understood(adopted), *report(adopted, output if is_written else None)]
    lines += _untold(adopted)
    if not is_written:
        card = adopted.text.removesuffix("\n")
        return Outcome(
            adopted.to_json(None), [card], remarks=["\n".join(lines)], exit_code=adopted.exit_code
        )
    _write_card(adopted, output, force)
    lines += _next_commands(adopted, output)
    return Outcome(adopted.to_json(str(output)), lines, exit_code=adopted.exit_code)


def _write_card(made: Imported, output: Path, force: bool) -> None:
    """Raises WrongUsage where it cannot be written."""
    try:
        write_import(made, output, force)
    except FileExistsError:
        raise WrongUsage(f"{output}: is already there; --force writes over it") from None
    except OSError as error:
        raise WrongUsage(f"{output}: {error.strerror or error}") from None


def _untold(adopted: Imported) -> Iterator[str]:
    """That no one would hear of a fault, and how someone does."""
    alerts = adopted.tables.get("alerts", {})
    if not any(alerts.get(key) for key in ("recipients", "rota", "urls_file")):
        yield "No one is told of anything yet: --set 'alerts.recipients=[\"you@example.org\"]'"


def _understood(adopted: Imported) -> Iterator[str]:
    yield "Understood"
    for item in adopted.placed:
        if item.key not in adopted.overridden:
            yield from _lines(item.line, f"{item.key} = {_value(item)}", *_remark(item))
    yield ""


def _value(item: PlacedValue) -> str:
    if item.key == "trainer.command":
        return shlex.join(item.value)
    return toml_value(item.value)


def _remark(item: PlacedValue) -> tuple[str, ...]:
    """Where it comes from, where that is more than an option of `#SBATCH`."""
    if item.note:
        return (": ".join(part for part in (item.source, item.note) if part),)
    return ()


def _next_commands(adopted: Imported, output: Path) -> Iterator[str]:
    card = "" if output == Path("tr11.toml") else str(output)
    trainer = adopted.tables.get("trainer", {})
    if trainer.get("dialect") and trainer.get("folder"):
        words = f"trainer check --dialect {trainer['dialect']} --folder {trainer['folder']}"
        yield f"next: {command_for(card, words)}"
        if not Path(trainer["folder"]).expanduser().is_dir():
            yield "      (once that folder is there: the first run makes it)"
    else:
        yield "next: tr11 trainer check --log OLD.log"
    yield f"      {command_for(card, 'launch --dry-run')}"
