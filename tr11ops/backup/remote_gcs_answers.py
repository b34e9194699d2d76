"""What a bucket of Google's answers, as far as it is used here; all else in an answer is passed over. Pure."""

from __future__ import annotations

import re
from typing import Any, Literal

from tr11ops.base.answers import record_in
from tr11ops.base.errors import ForeignAnswer
from trainer.contract.record import Record

_COUNT = re.compile(r"[0-9]{1,18}")  # the JSON of Google's has 64-bit numbers as text
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


class ObjectFacts(Record):
    """A whole object. Raises ValueError where its size is none."""

    name: str
    size: str

    def __post_init__(self) -> None:
        if _COUNT.fullmatch(self.size) is None:
            raise ValueError("its size is no count of bytes")

    @property
    def bytes(self) -> int:
        return int(self.size)


class Listing(Record):
    """One page of names. Without its `kind` an empty object would be a bucket without a file."""

    kind: Literal["storage#objects"]
    items: tuple[dict[str, Any], ...] = ()
    nextPageToken: str = ""

    def objects(self, prefix: str) -> tuple[ObjectFacts, ...]:
        """What is listed, all of it below `prefix`. Raises ForeignAnswer."""
        found = tuple(record_in(ObjectFacts, item) for item in self.items)
        for one in found:
            if not one.name.startswith(prefix):
                raise ForeignAnswer("an object of elsewhere")
        return found


class RewriteState(Record):
    """How far the copying of an object inside the bucket is. Raises ValueError where nothing says how it goes on."""

    kind: Literal["storage#rewriteResponse"]
    done: bool
    rewriteToken: str = ""
    totalBytesRewritten: str = ""

    def __post_init__(self) -> None:
        if not self.done and not self.rewriteToken:
            raise ValueError("not done, and no token to go on with")


def is_part(told: str, body: int | None, offset: int, length: int | None) -> bool:
    """Whether a Content-Range is that of the bytes from `offset` on: `length` of them, or to the file's end.

    `body`: how many bytes the answer has; None where it does not say.
    """
    match = _PART.fullmatch(told)
    if match is None:
        return False
    first, last = int(match[1]), int(match[2])
    if first != offset or (body is not None and body != last - first + 1):
        return False
    ends = [] if length is None else [offset + length - 1]
    if match[3] != "*":
        ends.append(int(match[3]) - 1)
    return not ends or last == min(ends)
