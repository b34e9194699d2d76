"""Taking one folder away: hide it, decide, unlink. A kill between any two system calls leaves it whole or hidden."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tr11ops.base.errors import RemovalStopped
from tr11ops.checkpoints.quarantine import doomed_name, hidden_name, home_of, next_name
from tr11ops.rundir.links import sync_folder
from trainer.contract.paths import MANIFEST_FILE

THREADS = 8  # unlinking is a round trip each on a shared file system
FAULTS_KEPT = 3


def hide(folder: Path, name: str) -> str:
    """Rename a checkpoint out of everyone's sight; returns its new name. Raises OSError: then nothing has happened."""
    hidden = hidden_name(name)
    (folder / name).rename(folder / hidden)
    return hidden


def put_back(folder: Path, hidden: str) -> str:
    """Give a hidden folder its name back, or that of a superseded one when another bears it by now; returns the name.

    Its hidden name where that was taken in this moment, "" where it has gone. Raises OSError as the file system does.
    """
    home = home_of(hidden)
    if os.path.lexists(folder / home):  # an empty folder there would be replaced by the rename
        home = next_name(folder, home)
    try:
        (folder / hidden).rename(folder / home)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            return hidden
        raise
    return home


def doom(folder: Path, hidden: str) -> str:
    """Decide that a hidden folder goes, for good: the decision is on disk before anything is unlinked.

    Raises OSError; FileNotFoundError when someone else has put it back.
    """
    doomed = doomed_name(hidden)
    (folder / hidden).rename(folder / doomed)
    sync_folder(folder)
    return doomed


def remove(place: Path, progress: Callable[[int], None], stop: threading.Event) -> list[str]:
    """Unlink a doomed folder; returns one line for each thing that would not go, at most a few.

    Links are unlinked, not followed. `progress` hears the bytes of each file. What another prune removes meanwhile is
    fine. Raises Stopped.
    """
    if place.is_symlink():
        return [f"{place}: it is a link; remove it by hand"]
    faults: list[str] = []
    unlinked = _unlinked(place / MANIFEST_FILE, progress)  # first: whatever happens, no one takes the rest for whole
    faults += [unlinked] if unlinked else []
    folders = [place]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prune") as workers:
        for folder in folders:  # grows while it is walked
            inner, files, fault = _listed(folder)
            faults += [fault] if fault else []
            folders += inner
            for line in workers.map(lambda path: None if stop.is_set() else _unlinked(path, progress), files):
                faults += [line] if line else []
            if stop.is_set():
                raise RemovalStopped
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if not faults:
                faults.append(f"{folder}: {error.strerror}")
    return _few(faults)


def _listed(folder: Path) -> tuple[list[Path], list[Path], str]:
    try:
        with os.scandir(folder) as entries:
            found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return [], [], ""
    except OSError as error:
        return [], [], f"{folder}: {error.strerror}"
    return [path for path, is_dir in found if is_dir], [path for path, is_dir in found if not is_dir], ""


def _unlinked(path: Path, progress: Callable[[int], None]) -> str:
    try:
        facts = path.lstat()
        path.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISREG(facts.st_mode):
        progress(facts.st_size)
    return ""


def _few(faults: list[str]) -> list[str]:
    more = len(faults) - FAULTS_KEPT
    return faults if more <= 1 else [*faults[:FAULTS_KEPT], f"and {more} more"]
