"""Answers of a server before they are believed: JSON of the form that was asked for, and listings
that come to an end.

A portal that asks for a login, a proxy, a server of another kind: each answers with status 200. Of
such an answer nothing follows, not even that there is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, TypeVar

from tr11ops.base.errors import ForeignAnswer
from trainer.contract.documents import record_of

T = TypeVar("T")


def json_object(body: bytes | str) -> dict[str, Any]:
    """The JSON object that an answer is. Raises ForeignAnswer."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: nested deeper than any answer
        raise ForeignAnswer("no JSON") from None
    if not isinstance(value, dict):
        raise ForeignAnswer("no JSON object")
    return value


def record_in(kind: type[T], value: dict[str, Any]) -> T:
    """The record of class `kind` that an answer holds. Raises ForeignAnswer."""
    try:
        return record_of(kind, value)
    except ValueError as error:
        raise ForeignAnswer(str(error)) from None


class PageTrail:
    """The pages of one listing that were followed. One that is named again would have the listing
    go round for ever.
    """

    def __init__(self) -> None:
        self._followed: set[Hashable] = set()

    def follow(self, page: Hashable) -> None:
        """Go on to the page of this token or address. Raises ForeignAnswer where it was followed
        before.
        """
        if page in self._followed:
            raise ForeignAnswer("its pages go round")
        self._followed.add(page)
