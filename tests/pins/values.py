"""The values of documents: what the commands' `--json` say of the recorded run, and what a reader
of them would miss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from tests.pins.commands import DOCUMENTS
from tests.pins.screens import LOCAL, Screen, screens_in
from tests.pins.states import STATES

STATUS = ("status", "--json", *LOCAL)
# Of the documents whose shape is pinned, those whose values a machine has no part in.
VALUED = [
    words
    for words in DOCUMENTS
    if "--json" in words and not {"missing.toml", "doctor"} & set(words)
]
OWN = ("card_hash", "seconds")  # of the folder's path, and how long the command took
VALUES: tuple[Screen, ...] = (
    *screens_in(
        "stopped",
        *VALUED,
        ("diagnose", "--json"),
        ("config", "show", "--json"),
        ("list", "--json", *LOCAL),
    ),
    *(screen for state in STATES if state != "stopped" for screen in screens_in(state, STATUS)),
    *(
        screen
        for state in ("healthy", "stalled", "down")
        for screen in screens_in(state, ("diagnose", "--json", *LOCAL))
    ),
    *screens_in(
        "healthy",
        ("kill", "--json", "--dry-run", *LOCAL),
        ("launch", "--replace", "--json", "--dry-run", *LOCAL),
    ),
    *screens_in(
        "damaged",
        ("checkpoints", "list", "--json"),
        ("nodes", "list", "--json", *LOCAL),
        ("goodput", "--json"),
    ),
)


def documents(screen: str) -> list[Any]:
    """The JSON objects that a screen's text has on its standard output."""
    body = screen.split("\n", 1)[1].partition("\n--- ")[0]
    try:
        found = [json.loads(body)]
    except ValueError:
        found = [json.loads(line) for line in body.splitlines() if line]
    for document in found:
        for key in OWN:
            if key in document:
                document[key] = "another each time"
    return found


def missed(pinned: Any, now: Any, path: str = "") -> Iterator[str]:
    """Where the document is not what was pinned. Objects may have gained keys; all else is as it
    was.
    """
    if isinstance(pinned, dict) and isinstance(now, dict):
        for key, value in pinned.items():
            if key in now:
                yield from missed(value, now[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is gone"
    elif isinstance(pinned, list) and isinstance(now, list) and len(pinned) == len(now):
        for number, (value, other) in enumerate(zip(pinned, now, strict=True)):
            yield from missed(value, other, f"{path}[{number}]")
    elif not _same(pinned, now):
        yield f"{path} is {now!r}, was {pinned!r}"


def _same(pinned: Any, now: Any) -> bool:
    if isinstance(pinned, float) and isinstance(now, float):
        return math.isclose(pinned, now, rel_tol=1e-9)
    return type(pinned) is type(now) and bool(pinned == now)
