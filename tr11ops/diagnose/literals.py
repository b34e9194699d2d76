"""Which plain words every match of a regular expression holds: what a log is searched for before
the expression runs.

CPython's own parser of expressions does the reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import (  # type: ignore[attr-defined]
    _constants as codes,
    _parser as parser,
)
from typing import Any

SHORTEST = 4  # characters; a shorter word is in too many lines
# What healthy trainings print by the million: a word in it would lead to every line.
_ORDINARY = (
    " iteration    31219/  115311 | consumed samples:     47887360 | elapsed time per iteration (s): 104.92 | learning "
    "rate: 5.704E-05 | global batch size:  2048 | lm loss: 2.204112E+00 | loss scale: 1.0 | grad norm: 0.171 | num "
    "zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 19.520 | "
    "time (ms) | forward-compute: 1.0 | optimizer: 1.0 validation loss at iteration checkpoint saving successfully "
    "saved loading loaded tensors model rank batch epoch step error failed memory INFO WARNING "
    "node07:41230:41544 [3] NCCL INFO Channel 01/02 via P2P/IPC [default7]:[rank7]: "
    "2026-03-04 10:00:00,123 - data.dataloader - INFO - worker 3 loaded shard part-00123.parquet from /data/train "
    "2026-03-04T20:00:00.000Z E0304 10:00:00.123 12 dataloader.cc:12] torch.utils.data.dataloader: prefetch queue is "
    "empty, data loader waits: GET https://x/part-1 took 0.3 s "
    "/usr/lib/python3.12/site-packages/x.py:12: UserWarning: x is deprecated and will be removed python python3 -u "
)

Words = frozenset[str]


def required_words(pattern: re.Pattern[str]) -> Words:
    """Words of which every match holds at least one. Raises ValueError for a pattern that has none
    long enough.
    """
    found = _best(parser.parse(pattern.pattern, pattern.flags))
    if found is None or _rarity(found) < SHORTEST:
        raise ValueError(
            f"{pattern.pattern!r}: no rare word of {SHORTEST} characters is in every match"
        )
    return found


def _best(items: Iterable[Any]) -> Words | None:
    """The choice of words with the longest shortest one; None where nothing is required."""
    choices: list[Words] = []
    run = ""
    for operator, argument in items:
        if operator is codes.LITERAL:
            run += chr(argument)
            continue
        if operator is codes.AT:
            continue
        if run:
            choices.append(frozenset({run}))
            heads = _heads(operator, argument)
            if heads is not None:
                choices.append(frozenset(run + head for head in heads))
            run = ""
        inner = _inner(operator, argument)
        if inner is not None:
            choices.append(inner)
    if run:
        choices.append(frozenset({run}))
    return max(choices, key=lambda words: (_rarity(words), -len(words)), default=None)


def _heads(operator: Any, argument: Any) -> list[str] | None:
    """The plain text that each branch of a choice begins with; None for anything else."""
    if operator is codes.SUBPATTERN:
        items = list(argument[-1])
        if len(items) == 1:
            return _heads(*items[0])
        return None
    if operator is not codes.BRANCH:
        return None
    return [_head(branch) for branch in argument[1]]


def _head(items: Iterable[Any]) -> str:
    head = ""
    for operator, argument in items:
        if operator is not codes.LITERAL:
            break
        head += chr(argument)
    return head


def _rarity(words: Words) -> int:
    """Characters of the shortest word that ordinary lines do not hold; 0 where they hold one."""
    if any(word in _ORDINARY for word in words):
        return 0
    return min(map(len, words))


def _inner(operator: Any, argument: Any) -> Words | None:
    if operator is codes.SUBPATTERN:
        return _best(argument[-1])
    if operator in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        if argument[0] > 0:
            return _best(argument[2])
        return None
    if operator is codes.ATOMIC_GROUP:
        return _best(argument)
    if operator is codes.BRANCH:
        branches = [_best(branch) for branch in argument[1]]
        if None in branches:
            return None
        return frozenset().union(*(words for words in branches if words is not None))
    return None
