"""Commands that `tr11 top` types for a person, as they would be typed in a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

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


def next_commands(look: Assessment) -> tuple[str, ...]:
    """What `tr11 status` says to type now."""
    from tr11ops.status.run_now import commands_now

    return commands_now(look)


def exclusion(look: Assessment, node: str = "") -> tuple[list[str], str]:
    """The command that excludes a node, and why, as the look says to type it. `node`: "" for the one that
    it accuses, else that may be slow; no command where there is none.
    """
    for line in next_commands(look):
        words = words_of(line)
        if words[:2] == ["nodes", "exclude"] and node in {"", words[2]}:
            return words[:-2], words[-1]
    slow = look.status.slow_nodes
    if not node and slow is not None:
        node = next(iter(slow.nodes), "")
    return ["nodes", "exclude", node] if node else [], ""
