"""A training's own word to tr11, in one line of its loop:

    from tr11_beat import asked, beat

    for step in range(first, total):
        loss = train_one(step)
        beat(step + 1, loss=loss, total=total)

Copy this file beside the script: it needs the standard library of Python 3.8 and nothing else
(`tr11 trainer beat > tr11_beat.py` prints it). Where tr11 has not started the training, both
functions do nothing. Neither ever raises, waits for a disk, or says anything.

`asked()` is "stop" once someone wants the training to save and leave, "save" once for each wish
that it saves and goes on, else "". Ranks see it at different steps, so one of them asks for all:

    wish = [asked() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(wish)
    if wish[0]:
        save(step + 1)
    if wish[0] == "stop":
        break
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "TR11_BEAT"  # the variable that names the folder; tr11 sets it
ASKED_FILE = "asked"  # in that folder: a number, and "save" or "stop"
INTERVAL = 1.0  # seconds between two words, and between two looks at what is asked
MOST_CHANGES = 10  # of the phase that are told at once, in such an interval
SLOW = (
    0.05  # seconds that a folder takes at most; a slower one is left alone a hundred times as long
)
PATIENCE = 100
LARGEST = 10**15  # no step and no count is larger
LONGEST = 32  # characters of a phase
_LONGEST_WISH = 64  # bytes


class _Beat:
    """What this process has told and heard. Without a lock: what two threads, or a process and its
    fork, write at the same time are two whole words, and one of them stays.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.due = 0.0
        self.rest = 0.0  # until then a slow folder is left alone
        self.phase: object = None
        self.changes = 0
        self.look_due = 0.0
        self.number = 0
        self.wish = ""

    def tell(
        self, step: object, loss: object, tokens: object, phase: object, total: object
    ) -> None:
        began = time.monotonic()
        if began < self.rest:
            return
        if began >= self.due:
            self.due, self.changes = began + INTERVAL, 0
        elif self.changes < MOST_CHANGES:
            self.changes += 1
        else:
            return
        self.phase = phase
        try:
            rank = _rank()
            word = {
                "rank": rank,
                "pid": os.getpid(),
                "time": time.time(),
                "step": _count(step),
                "loss": _number(loss),
                "tokens": _count(tokens),
                "phase": _text(phase),
                "total": _count(total),
                "heard": self.number,
            }
            _replace(self.folder / f"rank-{rank}.json", json.dumps(word).encode())
        finally:
            self.rest = _later(began)

    def hear(self) -> str:
        began = time.monotonic()
        if began < max(self.look_due, self.rest):
            return self._standing()
        self.look_due = began + INTERVAL
        try:
            number, wish = _wish(self.folder / ASKED_FILE)
        finally:
            self.rest = _later(began)
        self.wish = wish
        if number not in (0, self.number):
            self.number = number
            return wish
        return self._standing()

    def _standing(self) -> str:
        """A wish to save is told once, one to stop until it is taken back."""
        if self.wish == "stop":
            return "stop"
        return ""


_BEAT: _Beat | None = None
if os.environ.get(FOLDER):
    _BEAT = _Beat(os.environ[FOLDER])


def beat(
    step: object,
    loss: object = None,
    tokens: object = None,
    phase: str = "training",
    total: object = None,
) -> None:
    """Tell tr11 where this rank is: `step`, how many steps are done, None before the first.

    Call it as often as you like: a word is written once a second at most, and at once where the
    phase is another one. `loss`: a number; a tensor is fetched when a word is written. `tokens`:
    trained on so far. `phase`: starting, loading, compiling, training, data-wait, saving,
    evaluating or ending. `total`: the training's last step.
    """
    if _BEAT is None:
        return
    try:
        if phase == _BEAT.phase and time.monotonic() < _BEAT.due:
            return
        _BEAT.tell(step, loss, tokens=tokens, phase=phase, total=total)
    except Exception:  # whatever it is: the training goes on
        return


def asked() -> str:
    """What tr11 wishes: "", "save" (once for each wish) or "stop"."""
    if _BEAT is None:
        return ""
    try:
        return _BEAT.hear()
    except Exception:
        return ""


def _rank() -> int:
    """This process's rank: torchrun's variable, else what torch says, else srun's; 0 where it is alone."""
    text = os.environ.get("RANK", "")
    if text.isdigit():
        return int(text[:7])
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return int(torch.get_rank())
    text = os.environ.get("SLURM_PROCID", "")
    if text.isdigit():
        return int(text[:7])
    return 0


def _count(value: Any) -> int | None:
    """A whole number that tells something; None for anything else."""
    try:
        found = operator.index(value)
    except Exception:
        return None
    if isinstance(value, bool) or not 0 <= found <= LARGEST:
        return None
    return found


def _number(value: Any) -> float | str | None:
    """A number; one that is not finite as text, which JSON has no number for."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return None
    try:
        found = float(value)
    except Exception:
        return None
    if math.isfinite(found):
        return found
    return str(found)


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value[:LONGEST]
    return None


def _replace(path: Path, content: bytes) -> None:
    """Replace a small file in one step, without waiting for the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    try:
        try:
            is_whole = os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
        if is_whole:
            draft.replace(path)
            return
    except OSError:
        is_whole = False
    draft.unlink()


def _wish(path: Path) -> tuple[int, str]:
    """What lies there: its number, and "save" or "stop"; 0 and "" where that is nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return 0, ""
    try:
        number, _, wish = os.read(descriptor, _LONGEST_WISH).decode("ascii").strip().partition(" ")
    finally:
        os.close(descriptor)
    if number.isdigit() and wish in ("save", "stop"):
        return int(number), wish
    return 0, ""


def _later(began: float) -> float:
    """When a folder is used again that has taken since `began`."""
    ended = time.monotonic()
    if ended - began <= SLOW:
        return 0.0
    return ended + PATIENCE * (ended - began)
