"""Commands that `tr11 top` types for a person, as they would be typed in a shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tr11ops import api
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import PLAN_MARK
from tr11ops.base.processes import LocalCommands
from tr11ops.cron.runner import child_environment, tr11_command
from tr11ops.runcard.card import find_card
from trainer.contract.record import Record

LOOK_SECONDS = 300.0
REASON = ("--reason", "typed in tr11 top")


class Planned(Record):
    """What a command would do, in its own words. `mark` stands for exactly that, "" where it cannot
    be carried out.
    """

    text: str
    mark: str

    @property
    def keys(self) -> str:
        """What a person types to carry it out. Who has not read the plan cannot know it: keys that
        were typed while a slow line had not shown it yet confirm nothing.
        """
        return f"y{int(self.mark, 16) % 90 + 10}"


def plan_of(run: api.Run, words: Sequence[str]) -> Planned:
    """The command's own preview. Raises Refusal, Unanswered and OSError as commands do."""
    code, text = said(run, [*words, "--dry-run", "--as-shown", "?"])
    lines = text.splitlines()
    mark = next((line for line in lines if line.startswith(PLAN_MARK)), "")
    shown = "\n".join(line for line in lines if line != mark)
    return Planned(shown, mark.removeprefix(PLAN_MARK) if code == 0 else "")


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
