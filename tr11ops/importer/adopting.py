"""A script that someone runs today as a card that operates the same training, whoever wrote its
trainer. The script is read, never run; what it does not say is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import ScriptError
from tr11ops.importer.expansion import Script
from tr11ops.importer.family import (
    SeenLog,
    family_of,
    look_at_log,
)
from tr11ops.importer.importing import (
    finished,
    read_batch,
    read_script,
    unfinished,
)
from tr11ops.importer.options import (
    Builder,
    Imported,
    LeftReason,
)
from tr11ops.importer.place_trainer import TrainerPlacer
from tr11ops.importer.preparation import names_of, place_conditions, place_preparation
from tr11ops.importer.sbatch import RUN_NAME, Directive, place_slurm
from tr11ops.importer.training_command import TrainingCommand, training_commands
from tr11ops.runcard.card import ForeignCard
from tr11ops.runcard.load import apply_overrides
from trainer.config.card import CardError


def adopt_script(
    path: Path, overrides: Sequence[str] = (), log: Path | None = None, line: int | None = None
) -> Imported:
    """The script in `path` as a card of the training that it starts.

    `overrides` are `section.key=value`; `log` is a log of that training; `line`: that of the command
    that trains, where there are several. Raises ScriptError where the script cannot be read or starts
    no training that could be told, CardError for a wrong override, OSError for a log.
    """
    batch = read_batch(read_script(path), str(path), path.parent, follows=True)
    _require_one_group(batch.directives)
    training = _chosen(batch.script, line)
    builder = Builder()
    directives = [_with_usual_signal(item, builder) for item in batch.directives]
    starts_workers = training.launcher not in {"", "mpirun"}
    place_slurm(builder, directives, starts_workers)
    seen = _log_of(path, directives, log)
    placer = TrainerPlacer(
        builder, batch.script, training, folder=path.parent, directives=directives, log=seen
    )
    placer.place()
    reached = names_of(batch.script, training.command) - placer.kept_names()
    reached |= placer.told_names()
    place_preparation(
        builder, batch.script, training.command, reached, environment="trainer.environment"
    )
    place_conditions(builder, batch.script, training.command)
    _place_run(builder, path)
    tables, problems = apply_overrides(builder.tables(), overrides, ForeignCard)
    if problems:
        raise CardError("command line", problems)
    head = (
        f"Made from {path.name} by `tr11 adopt`. Each remark names the line of the script.",
        "Next: tr11 trainer check --log OLD.log; tr11 launch --dry-run (--run THIS-FILE)",
    )
    imported = unfinished(str(path), builder, tables, defects=(), overrides=overrides)
    return finished(imported, builder, head)[0]


def _require_one_group(directives: Sequence[Directive]) -> None:
    """Raises ScriptError for a job of several groups of nodes, which a card has no words for."""
    for item in directives:
        if not item.name and item.value in {"hetjob", "packjob"}:
            what = "it asks for several groups of nodes (hetjob), of which a card has one"
            raise ScriptError(item.line, what, "adopt a script with one group")


# ----------------------------------------------------------------------------- which command
def _chosen(script: Script, line: int | None) -> TrainingCommand:
    """The command that trains. Raises ScriptError where none does, or more than one may."""
    found = training_commands(script)
    if line is not None:
        there = [one for one in found if one.line == line]
        if not there:
            lines = ", ".join(str(one.line) for one in found) or "none"
            raise ScriptError(line, "starts no training", f"lines that may: {lines}")
        return there[-1]
    if not found:
        raise ScriptError(0, _why_none(script), "give the script that starts the training")
    for one in found:
        if one.under_srun and any(word.text == ":" for word in one.program):
            what = "srun starts several programs at once (`:`), of which a card has one"
            raise ScriptError(one.line, what, "adopt a script that starts one")
    best = max(map(_likeliness, found))
    likely = [one for one in found if _likeliness(one) == best]
    if len({one.text for one in likely}) > 1:
        lines = " and ".join(str(one.line) for one in likely[:4])
        raise ScriptError(
            likely[0].line,
            f"{len(likely)} commands may be the training (lines {lines})",
            f"say which one: --line {likely[0].line}",
        )
    return likely[0]


def _likeliness(one: TrainingCommand) -> tuple[bool, bool, bool]:
    return bool(one.launcher), bool(family_of(one.text).names), one.under_srun


def _why_none(script: Script) -> str:
    for path, line in reversed(script.not_read):
        return f"no command in it starts a training; line {line} names {path[:80]}, which is not at hand"
    for command in reversed(script.commands):
        if command.name in {"srun", "sbatch", "mpirun"}:
            shown = " ".join(word.text for word in command.words)
            return f"line {command.line} starts {shown[:80]}, in which no training is seen"
    for name, line in script.uncalled.items():
        return f"no command in it starts a training; nothing calls {name[:80]} of line {line}"
    return "no command in it starts a training: no srun, torchrun, accelerate, deepspeed or python"


# ----------------------------------------------------------------------------- its log
def _log_of(path: Path, directives: Sequence[Directive], log: Path | None) -> SeenLog | None:
    """The log that is named, else the newest that the script has left beside itself."""
    if log is not None:
        return look_at_log(log)
    output = next((item.value for item in directives if item.name == "output" and item.read), "")
    names = {item.name: item.value for item in directives if item.read}
    pattern = re.sub(r"%\d*[A-Za-z]", "*", output.replace("%x", names.get("job-name", "*")))
    if not pattern or pattern.startswith("/") or ".." in pattern:
        pattern = "slurm-*.out"
    try:
        found = [one for one in path.parent.glob(pattern) if one.is_file()]
        newest = max(found, key=lambda one: one.stat().st_mtime, default=None)
        if newest is None or newest == path:
            return None
        return look_at_log(newest)
    except (OSError, ValueError):
        return None


def _with_usual_signal(item: Directive, builder: Builder) -> Directive:
    """Whatever signal the script asked for: tr11's own, at the same moment."""
    match = re.fullmatch(r"(?:[RB]+:)?(?:SIG)?([A-Z0-9]+)(@[0-9]+)?", item.value)
    if item.name != "signal" or match is None or match[1] in {"USR1", "10"}:
        return item
    why = f"tr11 asks the trainer itself to stop, at the same moment before the limit; {match[1]} is not sent"
    builder.leave(
        "#SBATCH --signal", item.value, line=item.line, reason=LeftReason.DROPPED, why=why
    )
    return replace(item, value=f"USR1{match[2] or ''}")


def _place_run(builder: Builder, path: Path) -> None:
    """The run's name and its directory, which is tr11's own: the trainer's folder stays what it is."""
    if "run.name" not in builder.placed:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100]
        if not RUN_NAME.fullmatch(name):
            name = "run"
        builder.put("run.name", name, "the script's name", 0, note="no job name is given")
    name = str(builder.value("run.name"))
    note = "tr11's own folder, for state and held checkpoints; the trainer's stays where it is"
    builder.put("run.directory", f"{name.removesuffix('-run')}-run", "", 0, note=note)
    if "slurm.time_limit" not in builder.placed:
        why = "no time limit is asked for: give --set slurm.time_limit=20:00:00"
        builder.ask("no #SBATCH --time", "", line=0, why=why, key="slurm.time_limit")
