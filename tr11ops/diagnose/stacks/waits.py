"""What a worker waits in, told from its stack, its state and its system call. The rules are data:
waits.toml. Pure.
"""

from __future__ import annotations

import re
import tomllib
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tr11ops.diagnose.stacks.worker import GONE, STOPPED, UNINTERRUPTIBLE, Frame, WorkerStack
from trainer.contract.record import Record

RULES = Path(__file__).with_name("waits.toml")
FILE_CALLS = frozenset(
    {
        "open",
        "openat",
        "read",
        "readv",
        "pread64",
        "write",
        "writev",
        "pwrite64",
        "fsync",
        "fdatasync",
        "syncfs",
        "rename",
        "renameat",
        "unlink",
        "unlinkat",
        "mkdir",
        "fstat",
        "newfstatat",
        "statx",
        "getdents64",
        "flock",
        "ftruncate",
        "fallocate",
        "close",
    }
)
_KEYS = frozenset({"kind", "function", "file", "innermost", "what", "match", "no_match"})


class WaitKind(StrEnum):
    """What a worker is in, as programs read it."""

    COLLECTIVE = "collective"
    SEND_RECV = "send-recv"
    DATA_LOADER = "data-loader"
    FILE = "file"
    HOST_SYNC = "host-sync"
    COMPUTE = "compute"
    STARTING = "starting"
    STOPPED = "stopped"
    DEAD = "dead"
    OTHER = "other"
    UNREAD = "unread"

    @property
    def is_for_others(self) -> bool:
        """Whether a worker that is in it waits for other ranks."""
        return self in {WaitKind.COLLECTIVE, WaitKind.SEND_RECV}


class StackWait(Record):
    """`what` in words: an operation (`all-reduce`), a file, a place. `frame`: the call that it was
    told from.
    """

    kind: WaitKind
    what: str
    frame: Frame | None = None


class WaitRule(Record):
    """One entry of waits.toml. A pattern that is None fits everything."""

    kind: WaitKind
    function: re.Pattern[str] | None
    file: re.Pattern[str] | None
    innermost: bool
    what: str
    match: tuple[str, ...]
    no_match: tuple[str, ...]

    def fits(self, frame: Frame, is_innermost: bool) -> bool:
        return (
            (is_innermost or not self.innermost)
            and (self.function is None or self.function.fullmatch(frame.name) is not None)
            and (self.file is None or self.file.search(frame.file) is not None)
        )


@cache
def rules() -> tuple[WaitRule, ...]:
    """The rules of waits.toml, in their order. Raises ValueError that says which entry is wrong."""
    document = tomllib.loads(RULES.read_text(encoding="utf-8"))
    return tuple(read_rule(entry, number) for number, entry in enumerate(document["wait"], 1))


def read_rule(entry: dict[str, Any], number: int) -> WaitRule:
    """One entry. Raises ValueError."""
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise ValueError(f"waits.toml, entry {number}: unknown key {unknown[0]!r}")
    if not {"function", "file"} & set(entry):
        raise ValueError(
            f"waits.toml, entry {number}: needs function or file, else it fits every frame"
        )
    try:
        return WaitRule(
            kind=WaitKind(entry["kind"]),
            function=re.compile(entry["function"]) if "function" in entry else None,
            file=re.compile(entry["file"]) if "file" in entry else None,
            innermost=bool(entry.get("innermost", False)),
            what=str(entry.get("what", "")),
            match=tuple(entry["match"]),
            no_match=tuple(entry.get("no_match", ())),
        )
    except (KeyError, ValueError, re.error) as error:
        raise ValueError(f"waits.toml, entry {number}: {error}") from None


def wait_of(worker: WorkerStack) -> StackWait:
    """What this worker waits in.

    The kernel's word on a process that is gone or stopped comes first. A system call on a file
    counts before all but the waits for other ranks: what reads or writes it may be anything.
    """
    if worker.is_dead:
        return StackWait(
            WaitKind.DEAD,
            "its process is gone" if worker.state == GONE else "its process has ended",
        )
    found = _by_frames(worker.frames)
    if worker.is_stopped:
        how = "SIGSTOP" if worker.state == STOPPED else "a debugger"
        return StackWait(WaitKind.STOPPED, how, found.frame if found else None)
    if found is None or not found.kind.is_for_others:
        found = _by_call(worker) or found
    return found or _unknown(worker)


def _by_call(worker: WorkerStack) -> StackWait | None:
    """By the file that the kernel works on for it."""
    if worker.call not in FILE_CALLS or not (worker.path or worker.state == UNINTERRUPTIBLE):
        return None
    return StackWait(
        WaitKind.FILE,
        f"{worker.call} {worker.path}".strip(),
        worker.frames[0] if worker.frames else None,
    )


def _unknown(worker: WorkerStack) -> StackWait:
    """What no rule names."""
    first = None
    if worker.frames:
        first = worker.frames[0]
    if worker.state == UNINTERRUPTIBLE:
        return StackWait(
            WaitKind.FILE, "the kernel (state D: a disk or network file system)", first
        )
    if first is None:
        return StackWait(WaitKind.UNREAD, worker.trouble or "its stack could not be read")
    return StackWait(WaitKind.OTHER, str(first), first)


def _by_frames(frames: tuple[Frame, ...]) -> StackWait | None:
    for number, frame in enumerate(frames):
        rule = _rule_for(frame, number == 0)
        if rule is not None:
            return StackWait(rule.kind, rule.what or _operation(rule.kind, frame), frame)
    return None


@lru_cache(maxsize=65536)  # thousands of workers stand at a few places
def _rule_for(frame: Frame, is_innermost: bool) -> WaitRule | None:
    return next((rule for rule in rules() if rule.fits(frame, is_innermost)), None)


def _operation(kind: WaitKind, frame: Frame) -> str:
    """`all_reduce` -> all-reduce; of a file, the place that works on it."""
    if kind is WaitKind.FILE:
        return f"{frame.name}, {frame.file}:{frame.line}"
    return frame.name.strip("_").replace("_", "-")
