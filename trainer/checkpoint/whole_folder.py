"""A folder that appears whole or not at all, for results that people name themselves."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from trainer.checkpoint.files import make_folder
from trainer.contract.checkpoint_names import hidden_name
from trainer.contract.errors import CheckpointError
from trainer.contract.files import make_shared, sync_folder
from trainer.parallel.agreement import one_line


@contextmanager
def whole_folder(target: Path, force: bool, is_own: Callable[[Path], bool]) -> Generator[Path]:
    """A hidden folder beside `target`, to be filled; it takes the name at the end of the block, or
    vanishes.

    A folder with something in it is replaced only with `force`, and only if `is_own` says that it
    is an earlier result: `-o` with a wrong path must not cost anyone's files. What a killed
    predecessor left is removed first. Raises CheckpointError for a refusal and for what the file
    system refuses, inside the block too.
    """
    target = target.resolve()
    partial = target.with_name(hidden_name(target.name, "partial", uuid.uuid4().hex[:12]))
    lock = -1
    try:
        check_target(target, force, is_own)
        make_shared(target.parent)
        _settle(target)
        make_folder(partial)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        # a file system without locks: the folder is then never taken for a leftover
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
        sync_folder(partial)
        check_target(target, force, is_own)
        _take_name(partial, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} was not written: {one_line(error)}; nothing was left of it"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it has taken the name
        if lock >= 0:
            os.close(lock)


def check_target(target: Path, force: bool, is_own: Callable[[Path], bool]) -> None:
    """Raise CheckpointError unless `target` is free, empty, or an earlier result that `force`
    allows to replace.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise CheckpointError(
            f"{target} exists and is not empty; name another folder, or replace it with --force"
        )
    if not is_own(target):
        raise CheckpointError(
            f"{target} holds something else than an earlier result, and --force does not replace it"
        )


def _take_name(partial: Path, target: Path) -> None:
    aside = target.with_name(hidden_name(target.name, "replaced", uuid.uuid4().hex[:12]))
    replacing = target.exists() and any(target.iterdir())
    if replacing:
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if replacing:
            aside.rename(target)
        raise
    sync_folder(target.parent)
    if replacing:
        shutil.rmtree(aside, ignore_errors=True)


def _settle(target: Path) -> None:
    """Remove what killed predecessors left: half-written folders, and a replaced one, which may
    have to come back.
    """
    for aside in sorted(target.parent.glob(hidden_name(escape(target.name), "replaced", "*"))):
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    for left in target.parent.glob(hidden_name(escape(target.name), "partial", "*")):
        if _is_abandoned(left):
            shutil.rmtree(left)


def _is_abandoned(folder: Path) -> bool:
    """True when no one holds the folder's lock; false also where locks do not work."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
