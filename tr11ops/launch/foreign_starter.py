"""A starter card for another trainer than tr11's own: short, with what each key is for, and what follows
where it is left out. Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from tr11ops.cluster.site import SiteRules
from tr11ops.dialects.dialect import dialect_named, names
from tr11ops.launch.starter import Answers, described_keys, starter_slurm, told_keys
from tr11ops.runcard.card import ForeignCard
from tr11ops.runcard.toml_writer import write_card
from tr11ops.trainers.levels import BELIEF

COMMAND = "command"
"""The family of which nothing is known."""

BASE: Mapping[str, Any] = {"nodes": 1, "workers_per_node": 1}
"""The size that is proposed where nothing is known of a training: one node, a worker for each GPU."""

_OUTPUT = "output"
_WIDTH = 110  # of a remark at the head
_EXAMPLE = ("train.py",)
# what a key is for, and what follows where it is left out
_REMARKS = {
    "slurm.spare_nodes": "held for a launch without a bad node; left out: none",
    "slurm.workers_per_node": "processes that train on a node; left out: one for each GPU",
    "slurm.signal_seconds_before_limit": "asked to stop this long before the limit; left out: when a save takes it",
    "trainer.dialect": "what its lines, checkpoints and end mean; left out: nothing of them is known",
    "trainer.start": "torchrun, srun, node or command (docs/how-to/trainers.md); left out: torchrun",
    "trainer.command": "the words behind torchrun; {folder}, {world_size} and other places are filled in",
    "trainer.folder": "its own output folder; left out: its checkpoints are not seen, copied or put back",
    "trainer.resume": "words added where there is something to resume from; left out: the dialect's",
    "alerts.recipients": "mail addresses; left out: no one is told",
    "watch.act": "the watchdog acts by itself; left out: it only tells",
}


SHORT_NAMES = {"hf": "huggingface"}  # of families, as `--trainer` takes them too


def trainer_choices() -> tuple[str, ...]:
    """What `--trainer` takes: the shipped families, and a command of which nothing is known."""
    return (*names(), COMMAND)


def example_of(family: str) -> tuple[str, ...]:
    """The words behind torchrun that such a training is proposed to be started with."""
    if family == COMMAND:
        return _EXAMPLE
    return dialect_named(family).command.example or _EXAMPLE


def output_of(family: str) -> str:
    """The output folder that is proposed for such a training; "" where it is not asked for."""
    if family == COMMAND:
        return ""
    return dialect_named(family).command.output or _OUTPUT


def foreign_tables(
    family: str, answers: Answers, command: list[str], folder: str
) -> dict[str, dict[str, Any]]:
    """The card's tables; `folder` is its output folder."""
    trainer: dict[str, Any] = {"start": "torchrun", "command": command}
    if family == COMMAND:
        trainer["resume"] = []
    else:
        trainer["dialect"] = family
        trainer["folder"] = folder
    return {
        "run": {"name": answers.name, "directory": answers.directory},
        "slurm": starter_slurm(BASE, answers),
        "trainer": trainer,
    }


def foreign_text(
    family: str, tables: Mapping[str, Any], answers: Answers, site: SiteRules | None
) -> str:
    """The card with a remark on each key."""
    remarks = described_keys(ForeignCard, tables) | told_keys(tables, answers, site)
    remarks |= _REMARKS
    head = [
        "A starter card for another trainer, made by `tr11 init --trainer`. Any key: tr11 config explain KEY",
        *_known(family, tables),
        "Next: tr11 trainer check --log OLD.log; tr11 launch --dry-run (--run FILE where it is not ./tr11.toml)",
    ]
    return write_card(tables, remarks, head)


def _known(family: str, tables: Mapping[str, Any]) -> list[str]:
    """What of this trainer is known, and what stays unknown."""
    if family == COMMAND:
        return [
            "Nothing is known of this trainer: no step, no checkpoint, no end but its exit code, and no stop with",
            "a save. Say more with [trainer.progress], [trainer.checkpoints] and [trainer.stop], or with a dialect:",
            "tr11 trainer list.",
            *textwrap.wrap(f"Not known is also {BELIEF}.", _WIDTH),
        ]
    dialect = dialect_named(family)
    lines = [f"{dialect.title}: what is known of it: tr11 trainer show {family}"]
    given = tables["trainer"]
    for key, what in (
        ("steps", "trainer.steps: the last step; left out: by its log, where that tells it"),
        (
            "checkpoint_interval",
            "trainer.checkpoint_interval: left out, no checkpoint is ever overdue",
        ),
    ):
        if key not in given:
            lines.append(f"Not said here: {what}")
    if not dialect.resume and not dialect.command.resumes_if and "resume" not in given:
        lines.append(
            "Not said here: trainer.resume: words by which it goes on; left out: it must do so by itself"
        )
    return lines
