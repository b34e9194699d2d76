"""Text that knows where it came from: every character carries its line in the script, and whether
it is known.

A character is *unknown* when it stands for something only a running shell could tell: `${HOME}`,
`$(date)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainer.contract.record import Record

# What a person should have filled in: `<PATH TO VOCAB>`, `<path>/vocab.json`. A shell would read
# from PATH.
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[\w .,:/-]*[\w.])?>(?!/dev/)(?=[\s'\"/_.:,}-]|$)", re.ASCII)
_DESCRIPTOR_AT_END = re.compile(r"\s[0-9]>\Z")  # `<in -k 2> out` is two redirections
LARGEST_SCRIPT_BYTES = 256 * 1024
LARGEST_VALUE = 64 * 1024
DEEPEST_NESTING = 32


def placeholder_at(text: str, position: int) -> int:
    """Where a placeholder that begins at `position` ends; `position` itself when none does."""
    match = _PLACEHOLDER.match(text, position)
    if match is None or _DESCRIPTOR_AT_END.search(match.group()):
        return position
    return match.end()


def is_placeholder(unknown: str) -> bool:
    """Whether a run of unknown text is a placeholder, which no shell could fill in either."""
    return unknown.startswith("<")


class Traced(Record):
    """`text` with one mark a character: twice its line, plus one when the character is unknown."""

    text: str = ""
    marks: tuple[int, ...] = ()

    @staticmethod
    def of(text: str, line: int, unknown: bool = False) -> Traced:
        """The same line for all of `text`."""
        return Traced(text, (2 * line + unknown,) * len(text))

    @staticmethod
    def script(text: str) -> Traced:
        """A whole file: lines counted from 1."""
        marks: list[int] = []
        for number, line in enumerate(text.split("\n"), start=1):
            marks += [2 * number] * (len(line) + 1)
        return Traced(text, tuple(marks[: len(text)]))

    @staticmethod
    def join(parts: Iterable[Traced], separator: str = "") -> Traced:
        """All parts one after another; a separator takes the line of the part before it."""
        texts: list[str] = []
        marks: list[int] = []
        for index, part in enumerate(parts):
            if index and separator:
                texts.append(separator)
                marks += [marks[-1] & ~1 if marks else 0] * len(separator)
            texts.append(part.text)
            marks += part.marks
        return Traced("".join(texts), tuple(marks))

    def __len__(self) -> int:
        return len(self.text)

    @property
    def option_key(self) -> str:
        """`nproc_per_node` of `--nproc-per-node=8`."""
        return self.text.partition("=")[0].lstrip("-").replace("-", "_")

    def cut(self, start: int, end: int | None = None) -> Traced:
        """Characters `start` to `end`."""
        return Traced(self.text[start:end], self.marks[start:end])

    @property
    def line(self) -> int:
        """Line of the first character; 0 for nothing."""
        if self.marks:
            return self.marks[0] >> 1
        return 0

    @property
    def last_line(self) -> int:
        """The greatest line of any character: where a value made of others was put together; 0 for
        nothing.
        """
        return max(self.marks, default=0) >> 1

    def line_at(self, index: int) -> int:
        """Line of one character; of the last one beyond the end."""
        if self.marks:
            return self.marks[min(index, len(self.marks) - 1)] >> 1
        return 0

    def unknown_at(self, index: int) -> bool:
        """Whether a character stands for something that only a shell could tell."""
        return bool(self.marks[index] & 1)

    @property
    def unknowns(self) -> tuple[str, ...]:
        """The runs of unknown text: `${NAME}` and `$(...)`, one string each."""
        return tuple(piece for piece, unknown in self._runs() if unknown)

    @property
    def is_known(self) -> bool:
        """No character is unknown."""
        return not any(mark & 1 for mark in self.marks)

    def _runs(self) -> Sequence[tuple[str, bool]]:
        runs: list[tuple[str, bool]] = []
        start = 0
        for index in range(1, len(self.text) + 1):
            if index == len(self.text) or (self.marks[index] ^ self.marks[start]) & 1:
                runs.append((self.text[start:index], self.unknown_at(start)))
                start = index
        return runs

    def for_card(self) -> str:
        """As a string of the run card, whose `$NAME` is the environment's and whose `$$` is a
        dollar sign.
        """
        text = "".join(
            piece if unknown else piece.replace("$", "$$") for piece, unknown in self._runs()
        )
        return _without_braces(text)

    def for_shell(self) -> str:
        """As shell text between double quotes or bare: unknown parts stay what the shell must find
        out.
        """
        return _without_braces(self.text)


def _without_braces(text: str) -> str:
    """`${NAME}` as `$NAME` wherever nothing follows that would lengthen the name."""
    return re.sub(r"(?<!\$)\$\{([A-Za-z_]\w*)\}(?!\w)", r"$\1", text, flags=re.ASCII)
