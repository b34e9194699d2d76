"""One import from beginning to end: file, shell, options, defects, card, check. Nothing of the
script is ever run."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import ConversionProblem, ScriptError
from tr11ops.base.units import duration
from tr11ops.importer.complete import complete, correct
from tr11ops.importer.defects import Case, find_defects, in_order
from tr11ops.importer.defects_table import defect
from tr11ops.importer.expansion import Script
from tr11ops.importer.launch import (
    ParsedLaunch,
    find_deepspeed,
    find_launch,
    place_deepspeed,
    refuse_settings,
)
from tr11ops.importer.options import (
    Builder,
    CardProblem,
    Defect,
    Imported,
    LeftReason,
    integer,
)
from tr11ops.importer.place_training import place_training
from tr11ops.importer.preparation import names_of, place_conditions, place_preparation
from tr11ops.importer.reader import read_shell
from tr11ops.importer.sbatch import Directive, job_variables, place_slurm, read_directives
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES, Traced
from tr11ops.runcard.card import OwnCard, RunCard, load_card
from tr11ops.runcard.load import apply_overrides, dotted, overridden_keys
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError, Problem
from trainer.contract.record import Record
from trainer.schedule import flops


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
        raise ScriptError(
            0, f"it is larger than {LARGEST_SCRIPT_BYTES} bytes", "this is not a batch script"
        )
    if b"\0" in content:
        raise ScriptError(
            content[: content.index(b"\0")].count(b"\n") + 1,
            "it is not text",
            "name a batch script",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScriptError(line, "it is not UTF-8 text", "name a batch script") from None


def import_script(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """The script in `path` as a run card, with all that there is to say about it.

    `overrides` are `section.key=value`, put over what the script says. Raises ScriptError when the
    script cannot be read, CardError when an override is none.
    """
    return import_text(read_script(path), str(path), overrides, folder=path.parent)


# what `dirname` of the script itself is written as
_OWN_FOLDER = re.compile(r"\$\(.*\bdirname\b.*(?:\$0|BASH_SOURCE).*\)", re.DOTALL)


def text_beside(folder: Path, name: Traced) -> str | None:
    """The text of a file that a script in `folder` sources; None where it is not at hand: not there,
    no text, or named by what only a shell could tell. An absolute path is another machine's.
    """
    path = name.text
    if name.unknowns and _OWN_FOLDER.fullmatch(name.unknowns[0]):
        own = len(name.unknowns[0])
        name = name.cut(own)
        path = path[own:].lstrip("/")
    if not name.is_known or not path or path.startswith(("/", "~")):
        return None
    try:
        return read_script(folder / path).replace("\r\n", "\n")
    except ScriptError:
        return None


def text_at(folder: Path, path: str) -> str | None:
    """The text of a file of settings that a command in `folder` names, wherever it lies; None where
    it is not at hand. Raises ConversionProblem where it cannot be read.
    """
    try:
        found = folder / Path(path).expanduser()
        is_there = found.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, no home folder
        return None
    if not is_there:
        return None
    if not found.is_file():
        raise ConversionProblem("is no file")
    try:
        return read_script(found)
    except ScriptError as error:
        what = str(error).partition(";")[0].removeprefix("it ")
        raise ConversionProblem(what) from None


class BatchScript(Record):
    """A batch script as it was read. `raw`: its own text."""

    raw: str
    directives: list[Directive]
    script: Script


def read_batch(raw: str, name: str, folder: Path | None, follows: bool = False) -> BatchScript:
    """The `#SBATCH` lines and commands of a script; of one that submits a text, those of the text.
    `follows`: shell scripts that it starts are read too. Raises ScriptError.
    """
    text = raw.replace("\r\n", "\n")
    refuse_settings(name, text)
    directives = read_directives(text)
    file_at = None
    if folder is not None:
        file_at = partial(text_beside, folder)
    script = read_shell(text, job_variables(directives), file_at, follows)
    if script.submitted:
        directives = read_directives(script.submitted)
        script = read_shell(text, job_variables(directives), file_at, follows)
    return BatchScript(raw, directives, script)


def import_text(
    raw: str, name: str, overrides: Sequence[str] = (), folder: Path | None = None
) -> Imported:
    """As `import_script`, of a script's text; `name` is what it is called, and `folder` where the
    files that it sources may be.
    """
    batch = read_batch(raw, name, folder)
    directives = batch.directives
    script = batch.script
    launch = find_launch(script)
    file = find_deepspeed(script, launch)
    builder = Builder()
    place_slurm(builder, directives, launch.starts_workers)
    _launcher(builder, script, launch)
    place_preparation(builder, script, launch.command, names_of(script, launch.command))
    place_training(builder, launch)
    if file is not None:
        place_deepspeed(builder, file)
    place_conditions(builder, script, launch.command)
    complete(builder)
    uses = {use.option: use for use in launch.options}
    case = Case(
        raw,
        directives,
        script=script,
        launch=launch,
        uses=uses,
        deepspeed=file,
        card=copy.deepcopy(builder),
    )
    defects = find_defects(case)
    correct(builder)
    tables, problems = apply_overrides(builder.tables(), overrides, OwnCard)
    if problems:
        raise CardError("command line", problems)
    head = (
        f"Made from {name.rpartition('/')[2]} by `tr11 import`. Each remark names the line of the script.",
        "Check it: tr11 estimate --run THIS-FILE",
    )
    imported = unfinished(name, builder, tables, defects=defects, overrides=overrides)
    imported, card = finished(imported, builder, head)
    if isinstance(card, OwnCard):
        found = save_interval(card, builder.line("checkpoint.interval"))
        imported = replace(imported, defects=tuple(in_order([*defects, *found])))
    return imported


def unfinished(
    name: str,
    builder: Builder,
    tables: dict[str, Any],
    defects: Sequence[Defect],
    overrides: Sequence[str],
) -> Imported:
    """What was made of a script, without the card's text."""
    given = frozenset(map(dotted, overridden_keys(overrides)))
    unplaced = tuple(sorted(builder.unplaced, key=lambda item: item.line))
    return Imported(
        name,
        "",
        tables=tables,
        placed=tuple(builder.placed.values()),
        unplaced=unplaced,
        changed=tuple(builder.changed),
        defects=tuple(defects),
        problems=(),
        overridden=given,
    )


def finished(
    imported: Imported, builder: Builder, head: Sequence[str]
) -> tuple[Imported, RunCard | None]:
    """With the card's text, and what the card's rules say against it; the card where it is sound."""
    remarks = {key: item.comment for key, item in builder.placed.items()}
    remarks |= dict.fromkeys(imported.overridden, "--set")
    text = write_card(imported.tables, remarks, [*head, *_decisions(imported)])
    card, problems = _checked(text)
    found = tuple(CardProblem(item.key, _line_of(item, builder), str(item)) for item in problems)
    return replace(imported, text=text, problems=found), card


def _decisions(imported: Imported) -> list[str]:
    lines = []
    for item in imported.decisions:
        shown = ""
        if item.value and item.reason is LeftReason.DECISION:
            shown = f" {item.value}"
        lines.append(f"DECIDE, line {item.line}: {item.option}{shown}: {item.why}")
    lines += [f"DECIDE, line {item.line}: {item.what}; {item.fix}" for item in imported.errors]
    return lines


def _checked(text: str) -> tuple[RunCard | None, Sequence[Problem]]:
    """The card as `load_card` sees it, with variables of the environment left as they are; or what
    it refuses.
    """
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
    """Write the card whole or not at all. Raises FileExistsError unless `force`, OSError when it
    cannot be written.
    """
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


# The one defect that needs the whole card: saves too far apart for the time that an attempt has.

# TFLOPs that large trainings reached on each kind of GPU, by the word in the constraint or
# partition.
_REACHED = (("h100", 400.0), ("h200", 400.0), ("a100", 149.0), ("v100", 45.0))
_UNKNOWN = 149.0
_LARGEST_SHARE = 0.25  # of an attempt, between two saves


def save_interval(card: OwnCard, line: int) -> Iterator[Defect]:
    """A crash costs up to one save interval; nothing is known of the speed but what such GPUs
    reach.
    """
    interval = card.checkpoint.interval
    if interval is None or not card.slurm.gpus_per_node:
        return
    words = f"{card.slurm.constraint} {card.slurm.partition} {card.slurm.account}".lower()
    tflops = next((value for word, value in _REACHED if word in words), _UNKNOWN)
    a_step = (
        flops.tflops_per_gpu(
            card,
            global_batch_size=card.batch.global_batch_size,
            seconds=1.0,
            world_size=card.world_size,
        )
        / tflops
    )
    seconds = a_step * interval
    limit = card.time_limit_seconds
    if seconds <= _LARGEST_SHARE * limit:
        return
    advised = max(1, int(_LARGEST_SHARE * limit / 2 / a_step))
    if seconds >= limit:
        code = "save-interval-beyond-limit"
    else:
        code = "save-interval-wide"
    span = duration(seconds)
    basis = f"at {tflops:g} TFLOPs a GPU, an assumption"
    yield defect(
        code,
        line,
        interval=interval,
        span=span,
        basis=basis,
        nodes=card.slurm.nodes,
        advised=advised,
    )


def _launcher(builder: Builder, script: Script, launch: ParsedLaunch) -> None:
    for name in ("nproc_per_node", "num_gpus"):
        if name in launch.launcher:
            option = launch.spelled[name]
            value = (launch.launcher[name],)
            builder.take(
                "slurm.workers_per_node", value, integer, source=option.text, line=option.line
            )
    spelled, nodes = launch.nodes
    if nodes is not None and nodes.text and "slurm.nodes" not in builder.placed:
        if ":" in nodes.text:
            least = nodes.cut(0, nodes.text.find(":"))
        else:
            least = nodes
        option = launch.spelled[spelled]
        builder.take("slurm.nodes", (least,), integer, source=option.text, line=option.line)
    endpoint = launch.launcher.get("rdzv_endpoint")
    port = launch.launcher.get("master_port")
    if endpoint is not None and ":" in endpoint.text:
        port = endpoint.cut(endpoint.text.rindex(":") + 1)
    port = port or script.variables.text("MASTER_PORT")
    if port is not None and port.text and port.is_known:
        builder.take(
            "slurm.master_port", (port,), integer, source="the launcher's port", line=port.line
        )
