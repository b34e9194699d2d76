"""What is ready for the day when the run directory cannot be written: a private folder on this
machine's own disk for records, and room that is set aside, for what frees room or stops the run.

    BASE/tr11-UID/MARK/         one run's, laid out as a run directory: journal/, state/alerts/, state/cron/
    BASE/tr11-UID/MARK.lock     shared by those who write there, exclusive for who brings it into the run directory
    state/reserve               4 MiB of nothing, given up by the first prune or stop that finds no room

BASE is $TR11_FALLBACK, else the first usable one of /var/tmp, /tmp and /dev/shm. What another user
could have made or could change is never used. What was recorded before the run at this path began is
of an earlier one, whose directory was removed: it is set aside as MARK-TIME. Two hosts have two
fallback directories: what may be done once only is not done from here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tr11ops.rundir.paths import RunDirectory, begun
from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths

# ---------------------------------------------------------------- room that is set aside

RESERVE_FILE = "reserve"
RESERVE_BYTES = 4 << 20
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def keep_reserve(directory: RunDirectory) -> None:
    """Set the room aside unless it is. A failure is left to the next who comes by: it is not worth
    an error.
    """
    place = directory.paths.state / RESERVE_FILE
    with suppress(OSError):
        if place.exists():
            return
        make_shared(place.parent)
        descriptor, name = tempfile.mkstemp(prefix=f".{RESERVE_FILE}.", dir=place.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                # a file system that compresses must not save it
                stream.write(os.urandom(RESERVE_BYTES))
                stream.flush()
                os.fsync(stream.fileno())
            draft.chmod(0o664)
            draft.replace(place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def with_reserve(directory: RunDirectory, act: Callable[[], T], place: Path | None = None) -> T:
    """What `act` returns, tried once more with the reserve's room where it found none. Raises
    OSError as `act` does.

    `place` is where it writes, if that may be on another file system, for which the reserve is no
    help.
    """
    try:
        return act()
    except OSError as error:
        is_here = place is None or place.parent.stat().st_dev == directory.paths.state.stat().st_dev
        if not (is_here and spend_reserve(directory, error)):
            raise
    return act()


def spend_reserve(directory: RunDirectory, error: OSError) -> bool:
    """Give the room up if it was lacking; True when it is worth trying again."""
    if error.errno not in NO_ROOM:
        return False
    try:
        (directory.paths.state / RESERVE_FILE).unlink()
    except OSError:
        return False
    return True


T = TypeVar("T")
VARIABLE = "TR11_FALLBACK"
ROOM_BYTES = 64 << 10
BASES = ("/var/tmp", "/tmp", "/dev/shm")


def existing_fallback(directory: RunDirectory) -> RunDirectory | None:
    """The run's fallback directory on this machine; None when there is none. Makes nothing, raises
    nothing.

    Where one was filled and another was made, it is the one that is written to.
    """
    places = _existing(directory)
    with_room = (place for place in places if len(places) > 1 and _has_room(place.parent))
    chosen = next(with_room, places[0] if places else None)
    if chosen is None:
        return None
    return _as_run(directory, chosen)


@contextmanager
def fallback_of(directory: RunDirectory) -> Iterator[RunDirectory]:
    """The run's fallback directory, made when missing; no one brings it back before the block is
    left.

    Raises OSError when this machine has no safe place for one.
    """
    place = _made(directory)
    with _locked(place, fcntl.LOCK_SH):
        place.mkdir(mode=0o700, exist_ok=True)
        yield _as_run(directory, place)


@contextmanager
def abandoned_fallback(directory: RunDirectory) -> Iterator[RunDirectory | None]:
    """The fallback directory where there is one that no one uses, for who brings it back; empty, it
    is removed.
    """
    found = existing_fallback(directory)
    if found is None:
        yield None
        return
    try:
        with _locked(found.root, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield found
            if not any(path.is_file() for path in found.root.rglob("*")):
                shutil.rmtree(found.root, ignore_errors=True)
    except BlockingIOError:
        yield None


def require_room(folder: Path) -> None:
    """Raises OSError unless a folder, made when missing, takes a few records now."""
    make_shared(folder)
    probe = folder / f".room-{secrets.token_hex(6)}"
    try:
        with probe.open("wb") as stream:
            stream.write(bytes(ROOM_BYTES))
            stream.flush()
            os.fsync(stream.fileno())  # over a network, or with a quota, only now is it known
    finally:
        probe.unlink(missing_ok=True)


def write_or_fall_back(
    directory: RunDirectory, write: Callable[[RunDirectory], T], unmounted: str = ""
) -> tuple[T, str]:
    """What `write` returns for the run directory, or else for its fallback; and where it went, ""
    for the former.

    `unmounted`: why the directory is not the run's own, in which what is written now would be
    hidden later. Raises OSError as the run directory does when neither can be written.
    """
    try:
        if unmounted:
            raise OSError(errno.ENODEV, unmounted)
        return write(directory), ""
    except OSError as error:
        try:
            with fallback_of(directory) as local:
                return write(local), str(local.root)
        except OSError:
            raise error from None


# ----------------------------------------------------------------------------- how
def _bases() -> tuple[Path, ...]:
    named = os.environ.get(VARIABLE)
    if named:
        return (Path(named),)
    return tuple(map(Path, BASES))


def _private_name(base: Path) -> Path:
    return base / f"tr11-{os.geteuid()}"


def _as_run(directory: RunDirectory, place: Path) -> RunDirectory:
    paths = directory.paths
    return RunDirectory(RunPaths(place, paths.name, paths.variant), directory.kill_switch)


def _existing(directory: RunDirectory) -> list[Path]:
    """The places where the run has a fallback directory, in the order of the bases."""
    found = []
    for base in _bases():
        place = _private_name(base) / directory.mark
        with suppress(OSError):
            _check(base, place.parent)
            last = _last_change(place)
            if last < begun(directory):
                place.rename(f"{place}-{last:.0f}")
            else:
                found.append(place)
    return found


def _last_change(folder: Path) -> float:
    """Of what is in it, in seconds since the epoch. Raises OSError where it is none."""
    last = folder.stat().st_mtime
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process is at work in it
            last = max(last, path.stat().st_mtime)
    return last


def _has_room(folder: Path) -> bool:
    try:
        require_room(folder)
    except OSError:
        return False
    return True


def _made(directory: RunDirectory) -> Path:
    """Where records go: a place that is there already and takes some, else the first that can be
    made.
    """
    there = next((place for place in _existing(directory) if _has_room(place.parent)), None)
    if there is not None:
        return there
    faults = []
    for base in _bases():
        private = _private_name(base)
        try:
            with suppress(FileExistsError):
                private.mkdir(mode=0o700)
            _check(base, private)
            require_room(private)
        except OSError as error:
            faults.append(error)
            continue
        return private / directory.mark
    raise faults[0]


def _check(base: Path, private: Path) -> None:
    """Raises OSError unless no one but this user, and root, can have made or can change what is
    there.
    """
    above, ours = base.stat(), private.lstat()
    is_safe_base = above.st_uid in {0, os.geteuid()} and (
        not above.st_mode & 0o022
        or above.st_mode & stat.S_ISVTX  # others may write there, but not rename ours
    )
    is_ours = (
        stat.S_ISDIR(ours.st_mode) and ours.st_uid == os.geteuid() and not ours.st_mode & 0o077
    )
    if not (is_safe_base and is_ours):
        raise PermissionError(errno.EPERM, "is not a private folder of this user", str(private))


@contextmanager
def _locked(place: Path, kind: int) -> Iterator[None]:
    """Hold the run's lock. Raises BlockingIOError where it must not wait and others have it."""
    descriptor = os.open(
        place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
