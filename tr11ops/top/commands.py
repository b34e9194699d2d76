"""Commands that `tr11 top` types for a person, as they would be typed in a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tr11ops import api
from tr11ops.detect.detector import Severity, by_cause
from tr11ops.status.run_now import commands_now

if TYPE_CHECKING:
    from tr11ops.status.assessment import Assessment

REASON = "typed in tr11 top"  # where none was asked


def keys_of(mark: str) -> str:
    """What a person types to carry out the plan of this mark. Who has not read the plan cannot know it:
    keys that were typed while a slow line had not shown it yet confirm nothing.
    """
    return f"y{int(mark, 16) % 90 + 10}"


def words_of(line: str) -> list[str]:
    """The words behind `tr11` of a command that a screen tells a person to type, without its card; []
    of another program's.
    """
    words = []
    if line.startswith("tr11 "):
        words = shlex.split(line)[1:]
    if "--run" in words:
        place = words.index("--run")
        del words[place : place + 2]
    return words


def told_next(run: api.Run) -> tuple[str, ...]:
    """What `tr11 status` says to type now, by a look with the scheduler's answers of this moment."""
    return commands_now(api.open_run(run.typed or None, run.overrides, run.scheduler).look())


def reason_now(look: Assessment) -> str:
    """Why a person would act on the run now: the gravest thing that the look has found, else how it is."""
    for cause in by_cause(look.findings):
        if cause.severity is not Severity.INFO:
            return cause.title
    return look.status.why


def exclusion(look: Assessment, node: str = "") -> tuple[list[str], str]:
    """The command that excludes a node, and why, as the look says to type it. `node`: "" for the one that
    it accuses, else that may be slow; no command where there is none.
    """
    for line in commands_now(look):
        words = words_of(line)
        if words[:2] == ["nodes", "exclude"] and node in {"", words[2]}:
            return words[:-2], words[-1]
    slow = look.status.slow_nodes
    if not node and slow is not None:
        node = next(iter(slow.nodes), "")
    return ["nodes", "exclude", node] if node else [], ""
