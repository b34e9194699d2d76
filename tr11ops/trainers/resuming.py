"""What a launch adds to a trainer's command where there is something to go on from, and whether its
script knows those words. Pure: a script is read, never run, and what it shows is a hint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Knows = Literal["yes", "by itself", "no", "not known"]
"""`by itself`: it finds its newest checkpoint without them, and its own parser would refuse them."""

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_FILLS_ARGUMENTS = re.compile(r"\b(?:HfArgumentParser|TrlParser)\(")  # from TrainingArguments
_OF_ARGUMENTS = "resume_from_checkpoint"
_OWN_PARSER = re.compile(r"\bArgumentParser\((?![^)]*\bparents\b)")
_TAKES_ALL = re.compile(r"\bparse_known_args\(")
_FINDS = re.compile(
    r"\bget_last_checkpoint\(|\bresume_from_checkpoint\s*=\s*(?!=|None\b|False\b|[\w.]*\.resume)"
)


def knows_words(text: str | None, words: Sequence[str]) -> Knows:
    """What the text of a script shows of the words that a resume adds; `None`: it could not be read."""
    if text is None or not words or not words[0].startswith("--"):
        return "not known"
    text = _COMMENT.sub("", text)
    name = words[0].partition("=")[0].removeprefix("--")
    spelled = re.sub("[-_]", "[-_]", re.escape(name).replace(r"\-", "-"))
    if re.search(rf"""["']--{spelled}["']""", text):
        return "yes"
    if name == _OF_ARGUMENTS and _FILLS_ARGUMENTS.search(text):
        return "yes"
    is_passed = re.search(rf"\.{spelled}\b", text) is not None  # by a parser that is elsewhere
    if is_passed or not _OWN_PARSER.search(text) or _TAKES_ALL.search(text):
        return "not known"
    if _FINDS.search(text):
        return "by itself"
    return "no"


def added(words: Sequence[str]) -> str:
    """What a resume adds, as a person reads it."""
    if not words:
        return "a resume adds no words: the trainer finds its newest checkpoint itself"
    shown = " ".join(words).replace("{path}", "PATH").replace("{step}", "STEP")
    return f"a resume adds: {shown}"
