"""Commands as a person types them: for which run, wherever they are shown."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from contextvars import ContextVar

# The card that this invocation of tr11 was given as --run or $TR11_RUN; "" for the folder's own.
INVOCATION_CARD: ContextVar[str] = ContextVar("invocation_card", default="")
# Commands of two words each, and those that are about no run.
GROUPS = frozenset(
    {
        "alerts",
        "backup",
        "checkpoints",
        "config",
        "cron",
        "data",
        "nodes",
        "perms",
        "sweep",
        "trainer",
        "twin",
    }
)
WITHOUT_RUN = frozenset(
    {
        "adopt",
        "compare",
        "data",
        "import",
        "init",
        "list",
        "replay",
        "requeue",
        "runbook",
        "serve",
        "sweep",
        "top",
        "trainer",
        "twin",
    }
)
# Commands that change nothing and repair nothing: what they show says what to repair.
_LOOKS = (
    "tr11 diagnose",
    "tr11 doctor",
    "tr11 logs",
    "tr11 status",
    "tr11 nodes list",
    "tr11 nodes history",
    "findmnt",
    "df",
    "ls",
)
# What a dry run that is asked for its mark says before it.
PLAN_MARK = "plan as shown: "
PLAN_CHANGED = "nothing was changed: the plan is another one now than was shown"
# of a plan: what passes by itself while a person reads it; of a launch also its tag, and the room on the disk
_PASSING = re.compile(
    r"^(?:iteration|checkpoint):\D*\d+|(?: ?\b\d+ (?:d|h|min|s)\b)+"
    r"|\b\d{8}-\d{6}-[0-9a-f]{8}\b|[\d.]+ [KMGTP]?i?B free\b",
    re.M,
)
# in backquotes within a sentence, or the whole text; a hint such as `tr11 COMMAND --help` is no
# command
_QUOTED = re.compile(r"`tr11 ([a-z][^`\n]*)`")


def command_for(card: str, words: str) -> str:
    """`tr11 WORDS` for the card that a person named: `tr11 launch --run CARD --array 1-10`; "" is
    the folder's own.
    """
    parts = words.split(" ")
    name = 2 if parts[0] in GROUPS else 1
    is_whole = not card or parts[0] in WITHOUT_RUN or "--run" in parts or "--help" in parts
    if is_whole:
        option = []
    else:
        option = ["--run", shlex.quote(card)]
    return " ".join(["tr11", *parts[:name], *option, *parts[name:]])


def only_looks(command: str) -> bool:
    """Whether a command only shows something, and so cannot have helped by itself."""
    return any(command == look or command.startswith(f"{look} ") for look in _LOOKS)


def for_card(card: str, text: str) -> str:
    """The text with `--run CARD` in each command that it tells a person to type."""
    if not card or "tr11 " not in text:
        return text
    if re.match(r"tr11 [a-z]", text) and "`" not in text and ":" not in text:
        return command_for(card, text.removeprefix("tr11 "))
    return _QUOTED.sub(lambda match: f"`{command_for(card, match[1])}`", text)


def for_this_card(text: str) -> str:
    """The text with `--run CARD` in the commands it names, where this invocation named a card."""
    return for_card(INVOCATION_CARD.get(), text)


def mark_of_plan(lines: Iterable[str]) -> str:
    """Twelve hex digits that stand for a plan: for the same thing done to the same jobs, nodes and
    alerts, however long it took a person to read it.
    """
    text = _PASSING.sub("", "\n".join(lines))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
