"""Python's tracebacks among the lines of many writers: which line names the exception. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from trainer.contract.record import Record

HEAD: Final = "Traceback (most recent call last):"
_ORIGINAL = "Original Traceback"
_CHAINED = ("The above exception", "During handling of the above exception")
_IGNORED = re.compile(r"^Exception ignored in|^Exception in thread|^--- Logging error ---")
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::(?: |$)(?P<said>.*)|$)", re.DOTALL)
_NOT_ONE = re.compile(r"^(?:INFO|WARNING|WARN|ERROR|DEBUG|srun|slurmstepd|Epoch|iteration|step)\b")
_KNOWN = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Expired|Empty|Full|Fail\w*|Iteration|Timeout)\d*$"
)
LINES_AT_MOST = 400  # of one traceback, its own and those of others between them
OTHERS_AT_MOST = 60
LEAD_AT_MOST = 80  # characters
FRAMES = 60  # the innermost ones


class RaisedException(Record):
    """The line that names an exception.

    `follows`: raised while another one was handled. `is_ignored`: Python printed it and went on.
    `where`: the innermost frame, as printed; `source`: its line of code. `frames`: all of them, the
    outermost first.
    """

    name: str
    said: str
    where: str
    follows: bool
    is_ignored: bool
    source: str = ""
    frames: tuple[str, ...] = ()


@dataclass(slots=True)
class _Open:
    where: str = ""
    source: str = ""
    frames: list[str] = field(default_factory=list)
    lines: int = 0
    others: int = 0
    indent: int = 0  # of the whole traceback
    lead: str = ""  # what stands before each of its lines: a collector's words, whatever they are


def _opened(body: str) -> _Open:
    """A traceback that begins with this line."""
    lead = body[: body.index(HEAD)]
    if not lead.strip():
        return _Open(indent=len(lead))
    return _Open(lead="" if _ORIGINAL in body or len(lead) > LEAD_AT_MOST else lead)


class TracebackReader:
    """Takes the bodies of one writer's lines in order, and says which ones name an exception."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._follows = False
        self._ignored = False
        self._quiet = 0  # lines since the last traceback ended

    def is_source(self, body: str) -> bool:
        """Whether the line is a frame of the open traceback, or the code that it quotes."""
        if self._open is None or not body.startswith(self._open.lead):
            return False
        return body[len(self._open.lead) :][:1].isspace()

    @property
    def is_idle(self) -> bool:
        """Nothing is open, and what comes next is no part of a chain."""
        return self._open is None and self._quiet > 3

    def feed(self, body: str) -> RaisedException | None:
        """The exception that this line names, if it ends a traceback."""
        if HEAD in body:
            self._follows = self._follows or _ORIGINAL in body
            self._open = _opened(body)
            return None
        if self._open is None:
            self._between(body)
            return None
        self._open.lines += 1
        if self._open.lead:
            if body.startswith(self._open.lead):
                body = body[len(self._open.lead) :]
            elif self._open.lines == 1:  # it was of that line alone
                self._open.lead = ""
            else:
                self._pass_over()
                return None
        if body[: self._open.indent].isspace():
            body = body[self._open.indent :]
        # some collectors cut the indentation
        if not body.strip() or body[:1].isspace() or body.startswith('File "'):
            if body.lstrip().startswith('File "'):
                self._open.where, self._open.source = body.strip(), ""
                self._open.frames.append(self._open.where)
            elif not self._open.source:
                self._open.source = body.strip()
            return None
        match = _EXCEPTION.match(body)
        if match and self._is_name(match["name"], body):
            return self._closed(match)
        self._pass_over()
        return None

    def _pass_over(self) -> None:
        """A line that is no part of the traceback."""
        assert self._open is not None
        self._open.others += 1
        if self._open.others > OTHERS_AT_MOST or self._open.lines > LINES_AT_MOST:
            self._open = None

    def _between(self, body: str) -> None:
        self._quiet += 1 if body.strip() else 0
        if body.startswith(_CHAINED):
            self._follows = True
            self._quiet = 0
        elif _IGNORED.match(body):
            self._ignored, self._quiet = body.startswith(("Exception ignored", "--- Logging")), 0
        elif self._quiet > 3:
            self._follows = self._ignored = False

    def _is_name(self, name: str, body: str) -> bool:
        if _NOT_ONE.match(body) or not self._open or not self._open.where:
            return False
        last = name.rsplit(".", 1)[-1]
        return _KNOWN.search(last) is not None or "." in name or last[:1].isupper()

    def _closed(self, match: re.Match[str]) -> RaisedException:
        assert self._open is not None
        said = match["said"] or ""
        opened = self._open
        found = RaisedException(
            match["name"],
            said,
            where=opened.where,
            follows=self._follows,
            is_ignored=self._ignored,
            source=opened.source,
            frames=tuple(opened.frames[-FRAMES:]),
        )
        self._open = None
        self._follows = False
        self._ignored = False
        self._quiet = 0
        return found
