"""Whatever in a script would start its training again beside tr11: left out, or asked for."""

from __future__ import annotations

import re

from tr11ops.dialects.dialect import Dialect
from tr11ops.dialects.supervisors import supervisors_in
from tr11ops.importer.expansion import Script, ShellCommand
from tr11ops.importer.options import Builder, LeftReason
from tr11ops.importer.training_command import TrainingCommand

_REQUEUE = re.compile(r"\bscontrol\b.*\brequeue|\bsbatch\b")
_KEY = "trainer.command"


def tell_supervisors(
    builder: Builder, script: Script, training: TrainingCommand, dialect: Dialect
) -> None:
    """Tell of each of them with its line."""
    for command in script.commands:
        why = _why_left(command)
        if why:
            shown = " ".join(word.text for word in command.words[1:])
            builder.leave(
                command.name, shown, line=command.line, reason=LeftReason.DROPPED, why=why
            )
    line = training.line
    if training.command.looped and not training.is_each_node:
        why = "stands in a loop: tr11 itself starts it again after an end; is it one training?"
        why = f"{why} If so: give --set trainer.start=..."
        builder.ask("the training", "", line=line, why=why, key="trainer.start")
    program = [word.text for word in (*training.kept_options(), *training.program)]
    named = [one for one in dialect.supervisors if one in program]
    for what in (
        *(f"{one} is a second supervisor: leave it out" for one in named),
        *supervisors_in(program, {}),
    ):
        builder.ask("second supervisor", "", line=line, why=what, key=_KEY)


def _why_left(command: ShellCommand) -> str:
    """Why a command beside the training is not in the card; "" where it is no supervisor."""
    words = [word.text for word in command.words]
    is_requeue = command.name == "scontrol" and "requeue" in words
    if command.name == "sbatch" or is_requeue:
        return "a second supervisor: it would queue the job again, and tr11 does that (--array)"
    if command.name == "trap" and _REQUEUE.search(" ".join(words)):
        return (
            "a second supervisor: it would queue the job again, and tr11 does that (--array); tr11 "
            "hears the signal itself"
        )
    if command.name == "trap":
        return "tr11 hears the signal itself, and asks the trainer in its own way (trainer.stop)"
    return ""
