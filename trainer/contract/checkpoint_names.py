"""What a checkpoint is called: its folder, `global_stepN`, and the file `latest`, which holds the
name of one.

The names of the files inside it: `trainer.contract.checkpoint_formats`. Standard library and the
contract only.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainer.contract import state_file
from trainer.contract.checkpoint_formats import OWN
from trainer.contract.state_file import read_bytes

LATEST_FILE = "latest"
LARGEST_LATEST = 4096  # bytes; it is one name


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of one global step, e.g. `global_step12659`."""
    return OWN.folder_name(step)


def checkpoint_step(name: str) -> int | None:
    """The step that a checkpoint folder's name says, or None if it is not such a name."""
    return OWN.step_of(name)


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
