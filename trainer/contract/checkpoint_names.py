"""What a checkpoint is called: its folder, `global_stepN`; the file `latest`, which holds the name of
one; and what folders beside it are called that are none, or none any more.

The names of the files inside it: `trainer.contract.checkpoint_formats`. Standard library and the
contract only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.contract import state_file
from trainer.contract.checkpoint_formats import OWN
from trainer.contract.record import Record
from trainer.contract.state_file import read_bytes

LATEST_FILE = "latest"
LARGEST_LATEST = 4096  # bytes; it is one name

# What each is for: `tr11ops.checkpoints.quarantine`.
DISCARDED_SUFFIX, SUPERSEDED_SUFFIX, SET_ASIDE_SUFFIX = ".discarded", ".superseded", ".set-aside"
_ASIDE_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<home>.+?)\.(?P<word>discarded|superseded|set-aside)(?:-[0-9]+)?",
        r"\.(?P<home>.+?)\.(?P<word>partial|holding|replaced)-.+",
        r"\.(?P<home>.+?)\.(?P<word>pruning|pruned)-[0-9a-f]{12}",
    )
)


class AsideName(Record):
    """What the name of such a folder says: of which `home` it is, and why it does not bear that name."""

    home: str
    step: int
    word: str


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of one global step, e.g. `global_step12659`."""
    return OWN.folder_name(step)


def checkpoint_step(name: str) -> int | None:
    """The step that a checkpoint folder's name says, or None if it is not such a name."""
    return OWN.step_of(name)


def hidden_name(name: str, word: str, nonce: str) -> str:
    """What a folder is called while it is none of that name; `word`: why."""
    return f".{name}.{word}-{nonce}"


def aside_name(name: str) -> AsideName | None:
    """What a folder's name says that is made of a checkpoint's; None for any other, a checkpoint's
    own too.
    """
    match = next((found for pattern in _ASIDE_NAMES if (found := pattern.fullmatch(name))), None)
    if match is None:
        return None
    home, word = match["home"], match["word"]
    step = checkpoint_step(home)
    if step is None and word in {"pruning", "pruned"}:
        kept = aside_name(home)  # of those that a person sees, a prune takes two kinds
        if kept is not None and kept.word in {"discarded", "superseded"}:
            step = kept.step
    if step is None:
        return None
    return AsideName(home, step, word)


def set_apart(folder: Path, word: str) -> list[tuple[Path, AsideName]]:
    """What bears such a name in `folder`, be it a folder or not; nothing where that is not there.
    Raises OSError when it is unreadable.
    """
    if not folder.is_dir():
        return []
    named = [(path, aside_name(path.name)) for path in sorted(folder.iterdir())]
    return [(path, name) for path, name in named if name is not None and name.word == word]


def folder_names(folder: Path) -> list[str]:
    """The names of the folders in `folder`; none where it is not there. Raises OSError when it is
    unreadable.
    """
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of all checkpoint folders below `folder` (complete or not), ascending by number."""
    steps = map(checkpoint_step, folder_names(folder))
    return sorted(step for step in steps if step is not None)


def read_latest(folder: Path) -> int | None:
    """The step that `latest` names, or None when there is no such file. Raises ValueError when it
    is garbled.
    """
    try:
        text = (
            read_bytes(folder / LATEST_FILE, LARGEST_LATEST)
            .decode("utf-8", errors="replace")
            .strip()
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        if not state_file.is_damage(error):
            raise
        raise ValueError(f"{folder / LATEST_FILE}: {error.strerror}") from None
    step = checkpoint_step(text)
    if step is None:
        raise ValueError(f"{folder / LATEST_FILE} says {text[:40]!r}, expected global_stepN")
    return step
