"""Faults of files: a full directory, a read-only one, one that is not mounted (all really so, by
mounts over it), and a script with another text.

Root is needed (the right to mount). What already has a file open goes on with what lies below.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.plan import TwinFolders
from trainer.contract.documents import document, record_of
from trainer.contract.files import write_atomically, write_json
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

# Faults of a script that the card's set-up sources: its text is another one until it is put back.

KEPT = ".before-fault"
TEXTS: Mapping[str, str] = {
    "setup-fails": 'echo "module: cuda/11.4 is not known to this site any more" >&2\nreturn 1\n',
    "setup-hangs": 'echo "waiting for the licence server"\nsleep 86400\n',
    "setup-breaks-python": "export PATH=/nowhere PYTHONHOME=/nowhere\n",
}


def check_script(text: str, folders: TwinFolders) -> Path:
    """The script that a fault may change. Raises TwinError for what is no file of a person's own."""
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise TwinError(
            f"--path {text!r}: give a script's whole path: the one that slurm.setup sources"
        )
    if not path.is_file() or path.is_symlink():
        raise TwinError(f"--path {text}: is not a plain file")
    if folders.root.resolve() in path.resolve().parents:
        raise TwinError(f"--path {text}: is the twin's own")
    return path


def spoil_script(fault: InjectedFault, _folders: TwinFolders) -> None:
    """Keep the script beside itself, and put another text in its place."""
    path = Path(fault.target)
    kept = path.with_name(path.name + KEPT)
    if kept.exists():
        raise TwinError(f"{kept} is there: an earlier fault of this script was not healed")
    write_atomically(kept, path.read_text(encoding="utf-8"))
    write_atomically(path, TEXTS[fault.kind])


def restore_script(fault: InjectedFault) -> bool:
    """Put the script back; False when it was there already."""
    path = Path(fault.target)
    kept = path.with_name(path.name + KEPT)
    if not kept.exists():
        return False
    kept.replace(path)
    return True


# what fills the disk: a file that no run needs, which `du` shows
CORE_DUMP = Path("core-dumps/core.python.4711")
_LEAST_DUMP_BYTES = 16 << 20
_MOST_DUMP_BYTES = 256 << 20
_MOST_BYTES = 1 << 30
_PAGE = 4096


def check_directory(text: str, folders: TwinFolders) -> Path:
    """The directory that a fault may break. Raises TwinError for one that more than a run depends
    on.
    """
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise TwinError(
            f"--path {text!r}: give a directory's whole path, such as the run directory"
        )
    try:
        real = path.resolve(strict=True)
    except OSError as error:
        raise TwinError(f"--path {text}: {error.strerror}") from error
    if not real.is_dir():
        raise TwinError(f"--path {text}: is not a directory")
    if len(real.parts) < 3 or real == Path.home():
        raise TwinError(
            f"--path {text}: the whole machine depends on it; name a run's own directory"
        )
    root = folders.root.resolve()
    if real in (root, *root.parents) or root in real.parents:
        raise TwinError(f"--path {text}: the twin itself lies there; name a run's own directory")
    if re.search(r"[,:\\]", str(real)):
        raise TwinError(
            f"--path {text}: a mount cannot name it (it holds a comma, colon or backslash)"
        )
    if _mounts_at(real):
        raise TwinError(
            f"--path {text}: something is mounted there already; name a directory below it"
        )
    return real


def fill(fault: InjectedFault, folders: TwinFolders) -> None:
    """Put the directory on a disk of its own that is full to the last byte: what is removed there
    is room again.

    A copy of it is laid over it, and CORE_DUMP in it takes the rest: as much as the directory
    holds, so that there is room for a save when it is gone. What is changed there comes back when
    the disk is taken away, but for CORE_DUMP. Raises TwinError where this user may not mount, or
    where the copy would not fit into memory.
    """
    disk = _disk(fault, folders)
    target = Path(fault.target)
    before = _listing(target)
    size = sum(-(-entry.bytes // _PAGE) * _PAGE for entry in before.values())
    if size > _MOST_BYTES:
        most = _MOST_BYTES >> 20
        raise TwinError(
            f"--path {target}: holds {size >> 20} MiB, and a copy is kept in memory: at most {most} MiB"
        )
    disk.mkdir(parents=True, exist_ok=True)
    dump = min(max(size, _LEAST_DUMP_BYTES), _MOST_DUMP_BYTES)
    kibibytes = (size + dump) >> 10
    _mount(["-t", "tmpfs", "-o", f"size={kibibytes}k,mode=0755", "tmpfs", str(disk)], fault)
    done = _run(["cp", "-a", "--", str(target), str(disk / "copy")])
    faults = [
        line for line in done.stderr.splitlines() if not line.endswith(os.strerror(errno.ENOENT))
    ]
    # a run that trains replaces its files
    if done.returncode != 0 and (faults or not (disk / "copy").is_dir()):
        raise TwinError(f"{target} cannot be copied: {done.stderr.strip()}")
    write_json(_list_file(disk), {name: document(entry) for name, entry in before.items()})
    _mount(["--bind", str(disk / "copy"), fault.target], fault)
    place = disk / "copy" / CORE_DUMP
    place.parent.mkdir(exist_ok=True)
    with suppress(OSError), place.open("wb", buffering=0) as ballast:
        while ballast.write(bytes(_PAGE)):
            pass  # until the disk says that it is full


def make_read_only(fault: InjectedFault, _folders: TwinFolders) -> None:
    """Mount the directory over itself, read-only. Raises TwinError where this user may not mount."""
    _mount(["--bind", fault.target, fault.target], fault)
    _mount(["-o", "remount,ro,bind", fault.target], fault)


def hide(fault: InjectedFault, _folders: TwinFolders) -> None:
    """Mount an empty file system over the directory. Raises TwinError where this user may not
    mount.
    """
    _mount(["-t", "tmpfs", "-o", "size=1m,mode=0755", "tmpfs", fault.target], fault)


def tear_state(fault: InjectedFault, _folders: TwinFolders) -> None:
    """Cut the newest record of a submission in half. Raises TwinError where the directory is no
    run's.
    """
    found = sorted(Path(fault.target).glob("state/submissions/*/submission.json"))
    if not found:
        raise TwinError(f"--path {fault.target}: nothing was launched there; name a run directory")
    os.truncate(found[-1], found[-1].stat().st_size // 2)


def uncover(fault: InjectedFault, folders: TwinFolders) -> None:
    """Take away what was laid over the directory; does nothing when nothing is. Raises TwinError
    when it stays.
    """
    disk = _disk(fault, folders)
    target = Path(fault.target)
    _unmount(target, _layers(target, disk, fault))
    if fault.kind == "disk-full" and _list_file(disk).exists():
        _take_changes(target, disk)
    _unmount(disk, len(_mounts_at(disk)))
    if disk.is_dir() and not os.path.ismount(disk):
        with suppress(OSError):
            disk.rmdir()


def _unmount(place: Path, layers: int) -> None:
    for _ in range(layers):
        done = _run(["umount", str(place)])
        if done.returncode != 0:
            # someone works in it; it goes when they leave
            done = _run(["umount", "--lazy", str(place)])
        if done.returncode != 0:
            raise TwinError(f"{place} cannot be uncovered: {done.stderr.strip()}; try again")


# ----------------------------------------------------------------------------- what was changed on
# the full disk
class _Seen(Record):
    """What tells whether a file, or a link, is another one now."""

    bytes: int
    changed: int  # nanoseconds


def _listing(folder: Path) -> dict[str, _Seen]:
    """All files and links below a folder, by their path below it."""
    found = {}
    for above, folders, files in _walk(folder):
        for path in (above / name for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # it went away at this moment
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    found[str(path.relative_to(folder))] = _Seen(status.st_size, status.st_mtime_ns)
    return found


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each folder from here on, with its folders and files; one that goes away at this moment is
    left out.
    """

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for above, folders, files in os.walk(folder, onerror=unless_gone):
        yield Path(above), folders, files


def _take_changes(target: Path, disk: Path) -> None:
    """Do below what was done on the copy, but for files that changed below too: what had them open
    went on there.
    """
    before = {
        name: record_of(_Seen, value) for name, value in (read_json(_list_file(disk)) or {}).items()
    }
    copy = _listing(disk / "copy")
    below = _listing(target)
    copy.pop(str(CORE_DUMP), None)
    for name, entry in before.items():
        if name not in copy and below.get(name) == entry:
            (target / name).unlink()
    for name, entry in copy.items():
        if before.get(name) != entry and below.get(name) == before.get(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            done = _run(
                [
                    "cp",
                    "-a",
                    "--remove-destination",
                    "--",
                    str(disk / "copy" / name),
                    str(target / name),
                ]
            )
            if done.returncode != 0:
                raise TwinError(f"{target / name} cannot be kept: {done.stderr.strip()}; try again")
    for folder in sorted((above for above, _, _ in _walk(target) if above != target), reverse=True):
        if not (disk / "copy" / folder.relative_to(target)).exists():
            with suppress(OSError):  # something came into it below
                folder.rmdir()
    _list_file(disk).unlink()


def _list_file(disk: Path) -> Path:
    return disk.with_name(f"{disk.name}.list")  # no .json: those are the records of faults


def _disk(fault: InjectedFault, folders: TwinFolders) -> Path:
    return folders.root / "faults" / f"disk-{fault.identity}"


def _layers(place: Path, disk: Path, fault: InjectedFault) -> int:
    """How many mounts of this fault lie on `place`: only ours are taken away."""
    # `check_directory` saw that nothing else was mounted there
    if fault.kind in {"read-only", "unmounted"}:
        return len(_mounts_at(place))
    devices = {line.split()[2] for line in _mounts_at(disk)}
    return sum(line.split()[2] in devices for line in _mounts_at(place))


def _mounts_at(place: Path) -> list[str]:
    """The kernel's lines for what is mounted exactly there."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].replace("\\040", " ") == str(place)]


def _mount(arguments: list[str], fault: InjectedFault) -> None:
    done = _run(["mount", *arguments])
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise TwinError(
            f"{fault.kind} needs the right to mount (root with CAP_SYS_ADMIN): {said[-1] if said else 'mount failed'}"
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        words = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=words
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 124, "", f"{command[0]} did not end within a minute"
        )
