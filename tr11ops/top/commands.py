"""Commands that `tr11 top` types for a person, as they would be typed in a shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tr11ops import api
from tr11ops.base.errors import Refusal
from tr11ops.base.processes import LocalCommands
from tr11ops.cron.runner import child_environment, tr11_command
from tr11ops.runcard.card import find_card
from trainer.contract.record import Record

LOOK_SECONDS = 300.0
REASON = ("--reason", "typed in tr11 top")


class Planned(Record):
    """What a command would do, in its own words; `can_apply`: it would do something."""

    text: str
    can_apply: bool


def plan_of(run: api.Run, words: Sequence[str]) -> Planned:
    """The command's own preview. Raises Refusal, Unanswered and OSError as commands do."""
    code, text = said(run, [*words, "--dry-run"])
    return Planned(text, code == 0)


def said(run: api.Run, words: Sequence[str]) -> tuple[int, str]:
    """Type a command for this run; its exit code, and what it says. Raises Refusal where the folder is
    a copy of the run's and the words would change it, Unanswered where no answer comes, OSError.
    """
    if run.is_copy and words[0] != "diagnose":
        raise Refusal(f"{run.directory.root} is a copy: type this where {run.card.paths.root} is")
    card = find_card(run.typed or None, os.environ, Path.cwd()).absolute()
    line = tr11_command([*words, "--scheduler", run.scheduler], card, run.overrides)
    environment = child_environment({**os.environ, "COLUMNS": "78", "NO_COLOR": "1"})
    output = LocalCommands().command(line, LOOK_SECONDS, environment)
    return output.status, "\n".join(filter(None, (output.error.strip(), output.text.strip())))
