"""One import from beginning to end: file, shell, options, defects, card, check. Nothing of the script is ever run."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import ScriptError
from tr11ops.importer.builder import Builder
from tr11ops.importer.case import Case
from tr11ops.importer.complete import complete, correct
from tr11ops.importer.deepspeed import find_deepspeed
from tr11ops.importer.defects import find_defects, in_order
from tr11ops.importer.defects_time import save_interval
from tr11ops.importer.launch import find_launch
from tr11ops.importer.place_deepspeed import place_deepspeed
from tr11ops.importer.place_shell import place_conditions, place_shell
from tr11ops.importer.place_slurm import job_variables, place_slurm
from tr11ops.importer.place_training import place_training
from tr11ops.importer.reader import read_shell
from tr11ops.importer.results import CardProblem, Defect, Imported, LeftReason
from tr11ops.importer.sbatch import read_directives
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.load import apply_overrides, dotted, overridden_keys
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError, Problem


def read_script(path: Path) -> str:
    """The text of a batch script. Raises ScriptError: not there, not a file, too large, not text."""
    try:
        if path.is_dir():
            raise ScriptError(0, "it is a folder", "name the script inside it")
        if path.exists() and not path.is_file():
            raise ScriptError(0, "it is not a regular file", "name a batch script")
        with path.open("rb") as stream:
            content = stream.read(LARGEST_SCRIPT_BYTES + 1)
    except FileNotFoundError:
        raise ScriptError(0, "it does not exist", "name a batch script") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScriptError(0, f"it cannot be read ({reason})", "check its path and rights") from None
    if len(content) > LARGEST_SCRIPT_BYTES:
        raise ScriptError(0, f"it is larger than {LARGEST_SCRIPT_BYTES} bytes", "this is not a batch script")
    if b"\0" in content:
        raise ScriptError(content[: content.index(b"\0")].count(b"\n") + 1, "it is not text", "name a batch script")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScriptError(line, "it is not UTF-8 text", "name a batch script") from None


def import_script(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """The script in `path` as a run card, with all that there is to say about it.

    `overrides` are `section.key=value`, put over what the script says. Raises ScriptError when the script cannot be
    read, CardError when an override is none.
    """
    return import_text(read_script(path), str(path), overrides)


def import_text(raw: str, name: str, overrides: Sequence[str] = ()) -> Imported:
    """As `import_script`, of a script's text; `name` is what it is called."""
    text = raw.replace("\r\n", "\n")
    directives = read_directives(text)
    script = read_shell(text, job_variables(directives))
    launch = find_launch(script)
    file = find_deepspeed(script, launch)
    builder = Builder()
    place_slurm(builder, directives, launch.starts_workers)
    place_shell(builder, script, launch)
    place_training(builder, launch)
    if file is not None:
        place_deepspeed(builder, file)
    place_conditions(builder, script, launch)
    complete(builder)
    uses = {use.option: use for use in launch.options}
    case = Case(raw, directives, script, launch, uses, file, copy.deepcopy(builder))
    defects = find_defects(case)
    correct(builder)
    tables, problems = apply_overrides(builder.tables(), overrides, RunCard)
    if problems:
        raise CardError("command line", problems)
    return _finished(name, builder, tables, defects, overrides)


def _finished(
    name: str, builder: Builder, tables: dict[str, Any], defects: list[Defect], overrides: Sequence[str]
) -> Imported:
    given = frozenset(map(dotted, overridden_keys(overrides)))
    remarks = {key: item.comment for key, item in builder.placed.items()} | dict.fromkeys(given, "--set")
    unplaced = tuple(sorted(builder.unplaced, key=lambda item: item.line))
    imported = Imported(
        name, "", tables, tuple(builder.placed.values()), unplaced, tuple(builder.changed), tuple(defects), (), given
    )
    text = write_card(tables, remarks, _head(imported))
    card, problems = _checked(text)
    if card is not None:
        defects = in_order([*defects, *save_interval(card, builder.line("checkpoint.interval"))])
    found = tuple(CardProblem(item.key, _line_of(item, builder), str(item)) for item in problems)
    return replace(imported, text=text, defects=tuple(defects), problems=found)


def _head(imported: Imported) -> list[str]:
    script = imported.script.rpartition("/")[2]
    lines = [
        f"Made from {script} by `tr11 import`. Each remark names the line of the script.",
        "Check it: tr11 estimate --run THIS-FILE",
    ]
    for item in imported.decisions:
        shown = f" {item.value}" if item.value and item.reason is LeftReason.DECISION else ""
        lines.append(f"DECIDE, line {item.line}: {item.option}{shown}: {item.why}")
    lines += [f"DECIDE, line {item.line}: {item.what}; {item.fix}" for item in imported.errors]
    return lines


def _checked(text: str) -> tuple[RunCard | None, Sequence[Problem]]:
    """The card as `load_card` sees it, with variables of the environment left as they are; or what it refuses."""
    with tempfile.TemporaryDirectory(prefix="tr11-import-") as folder:
        path = Path(folder) / "card.toml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_card(path, (), os.environ, keep_undefined=True), ()
        except CardError as error:
            return None, error.problems


def _line_of(problem: Problem, builder: Builder) -> int:
    """The line of the key that a problem is about, or of the longest key above it."""
    parts = problem.key.split(".")
    for length in range(len(parts), 0, -1):
        line = builder.line(".".join(parts[:length]))
        if line:
            return line
    return 0


def write_import(imported: Imported, target: Path, force: bool) -> None:
    """Write the card whole or not at all. Raises FileExistsError unless `force`, OSError when it cannot be written."""
    if force:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(imported.text)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return
    with target.open("x", encoding="utf-8") as stream:
        stream.write(imported.text)
