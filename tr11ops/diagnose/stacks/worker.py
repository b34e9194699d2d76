"""What one worker does at one moment, as its node tells it, and the form in which that travels.
Pure.

A node's answer is cut into short lines, so that those of many nodes may arrive mixed on one stream:

    tr11-stacks NODE NUMBER COUNT PIECE        PIECE: base64 of a part of zlib-packed JSON
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.contract.documents import document
from trainer.contract.record import Record

MOST_FRAMES = 60  # of one stack: the innermost; a runaway recursion has thousands
MARK = "tr11-stacks"
PIECE_CHARACTERS = 800  # Slurm passes lines of up to 1024 bytes on whole
LARGEST_ANSWER = 64 * 2**20  # bytes of JSON, of one node
STOPPED, TRACED, UNINTERRUPTIBLE, GONE = "T", "t", "D", "gone"
DEAD_STATES = frozenset({"Z", "X", "x", GONE})
_LINE = re.compile(rf"{MARK} (\S+) (\d+) (\d+) (\S*)")


class Frame(Record):
    """One call of a Python stack; `file` is short, from its package on.

    `function` comes with its class from Python 3.11 on: `Queue.get`; `name` is always without.
    """

    function: str
    file: str
    line: int = 0

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class WorkerStack(Record):
    """One rank's process and its main thread. `frames`: the innermost first; none where they could
    not be read.

    `state` is the kernel's letter ("gone": no such process). `call`, `path`: the system call that
    it is in, and the file of that call where it has one. `trouble` says why there are no frames;
    `threads` has then the kernel's words.
    """

    rank: int
    node: str
    pid: int
    state: str = ""
    frames: tuple[Frame, ...] = ()
    call: str = ""
    path: str = ""
    trouble: str = ""
    threads: tuple[str, ...] = ()

    @property
    def is_dead(self) -> bool:
        return self.state in DEAD_STATES

    @property
    def is_stopped(self) -> bool:
        return self.state in {STOPPED, TRACED}


class NodeStacks(Record):
    """What one node told: its workers by rank. A spare node has none."""

    node: str
    workers: tuple[WorkerStack, ...] = ()

    def lines(self) -> Iterator[str]:
        """The answer as short lines, without their ends."""
        workers = json.dumps([document(worker) for worker in self.workers], separators=(",", ":"))
        text = base64.b64encode(zlib.compress(workers.encode())).decode()
        pieces = [
            text[start : start + PIECE_CHARACTERS]
            for start in range(0, len(text), PIECE_CHARACTERS)
        ]
        for number, piece in enumerate(pieces):
            yield f"{MARK} {self.node} {number} {len(pieces)} {piece}"


class CollectedStacks(Record):
    """What the nodes told. `silent`: those that did not. `trouble`: what srun said of it, "" for
    nothing.
    """

    answers: tuple[NodeStacks, ...]
    silent: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def workers(self) -> tuple[WorkerStack, ...]:
        return tuple(
            sorted(
                (one for answer in self.answers for one in answer.workers), key=lambda one: one.rank
            )
        )


@dataclass
class AnswerReader:
    """Puts the lines of many nodes together, in whatever order they come. What is no such line is
    left alone.
    """

    answers: dict[str, NodeStacks] = field(default_factory=dict)
    garbled: set[str] = field(default_factory=set)
    _pieces: dict[str, dict[int, str]] = field(default_factory=dict)

    def feed(self, line: str) -> NodeStacks | None:
        """The answer that this line completes, if it does."""
        match = _LINE.search(line)
        if match is None:
            return None
        node, number, count = match[1], int(match[2]), int(match[3])
        pieces = self._pieces.setdefault(node, {})
        pieces[number] = match[4]
        if set(pieces) != set(range(count)):
            return None
        try:
            answer = NodeStacks(
                node, _unpacked("".join(pieces[index] for index in range(count)), node)
            )
        except (ValueError, TypeError, KeyError, zlib.error, binascii.Error):
            self.garbled.add(node)
            return None
        self.answers[node] = answer
        return answer


def _unpacked(text: str, node: str) -> tuple[WorkerStack, ...]:
    unpacker = zlib.decompressobj()
    workers = json.loads(unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_ANSWER))
    return tuple(
        WorkerStack(
            rank=int(one["rank"]),
            node=node,
            pid=int(one["pid"]),
            state=str(one["state"]),
            frames=tuple(
                Frame(str(f["function"]), str(f["file"]), int(f["line"])) for f in one["frames"]
            ),
            call=str(one["call"]),
            path=str(one["path"]),
            trouble=str(one["trouble"]),
            threads=tuple(map(str, one["threads"])),
        )
        for one in workers
    )


def main_thread(dump: str, pid: int) -> tuple[Frame, ...]:
    """The main thread's frames of what `py-spy dump --json` printed. Raises ValueError where there
    are none.
    """
    try:
        threads: list[Mapping[str, Any]] = json.loads(dump)
        mine = [
            one
            for one in threads
            if one.get("os_thread_id") == pid or one.get("thread_name") == "MainThread"
        ]
        found = (mine or threads)[0]["frames"]
        frames = tuple(
            Frame(
                str(one["name"]),
                str(one.get("short_filename") or one["filename"]),
                int(one.get("line") or 0),
            )
            for one in found[:MOST_FRAMES]
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"py-spy printed no stack ({type(error).__name__})") from None
    if not frames:
        raise ValueError("its main thread runs no Python yet, or no more")
    return frames
