"""What PyTorch's words for a lack of GPU memory tell beside it: who holds it, and whether the size
is a real one.

The words are those of `CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

import re

_UNITS = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10, "PiB": 2.0**20}
_SIZE = r"(\d[\d.]*) (bytes|KiB|MiB|GiB|TiB|PiB)"
_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capac(?:i)?ty of {_SIZE}|{_SIZE} total capacity")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"[Oo]f the allocated memory {_SIZE} is allocated by PyTorch")
_CACHED = re.compile(rf"and {_SIZE} is reserved by PyTorch")
_SHARES = re.compile(
    r"\((?:v?LLM|VLLM|SGLang|WorkerDict|Rollout|Actor|Policy|Critic|RefModel)\w* pid=\d+"
)
CONTEXT_GIB = 4.0  # what CUDA and its libraries take beside PyTorch's own, at most
ABSURD = 64  # times the memory of the GPU: no tensor has such a size


def is_held_by_others(said: str) -> bool:
    """Whether other processes hold more of the GPU than this one, by its own words; those that a
    program itself places beside an engine of rollouts are no others.
    """
    if _SHARES.search(said) is not None:
        return False
    others = [_gib(*found.groups()) for found in _PROCESS.finditer(said)]
    if not others:
        return False
    own = _OWN.search(said)
    if own is not None:
        return sum(others) > _gib(*own.groups())
    allocated = _ALLOCATED.search(said)
    if allocated is None:  # the one process may be this one, as a container calls it
        return len(others) > 1
    cached = _CACHED.search(said)
    mine = (
        _gib(*allocated.groups())
        + (0.0 if cached is None else _gib(*cached.groups()))
        + CONTEXT_GIB
    )
    return max(others) > 2 * mine


def is_absurd(said: str) -> bool:
    """Whether what was asked for is no size of a tensor: a number out of broken memory or a broken
    message.
    """
    wanted = _WANTED.search(said)
    capacity = _CAPACITY.search(said)
    if "more than 1EB memory" in said:
        return True
    if wanted is None:
        return False
    room = 80.0
    if capacity is not None:
        room = _gib(*(group for group in capacity.groups() if group))
    return _gib(*wanted.groups()) > ABSURD * room


def _gib(number: str, unit: str) -> float:
    return float(number.rstrip(".")) * _UNITS[unit]
