"""Faults of a directory: a full disk and a read-only one, both really so, by mounts over the directory.

Root is needed (the right to mount). What already has a file open goes on with what lies below.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from tr11ops.twin.fault_store import Fault
from tr11ops.twin.plan import TwinError, TwinFolders

_FULL_KIBIBYTES = 64


def check_directory(text: str, folders: TwinFolders) -> Path:
    """The directory that a fault may break. Raises TwinError for one that more than a run depends on."""
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise TwinError(f"--path {text!r}: give a directory's whole path, such as the run directory")
    try:
        real = path.resolve(strict=True)
    except OSError as error:
        raise TwinError(f"--path {text}: {error.strerror}") from error
    if not real.is_dir():
        raise TwinError(f"--path {text}: is not a directory")
    if len(real.parts) < 3 or real == Path.home():
        raise TwinError(f"--path {text}: the whole machine depends on it; name a run's own directory")
    root = folders.root.resolve()
    if real in (root, *root.parents) or root in real.parents:
        raise TwinError(f"--path {text}: the twin itself lies there; name a run's own directory")
    if re.search(r"[,:\\]", str(real)):
        raise TwinError(f"--path {text}: a mount cannot name it (it holds a comma, colon or backslash)")
    if _mounts_at(real):
        raise TwinError(f"--path {text}: something is mounted there already; name a directory below it")
    return real


def fill(fault: Fault, folders: TwinFolders) -> None:
    """Lay a full disk of 64 KiB over the directory; what lies there can still be read (an overlay).

    Raises TwinError where this user may not mount.
    """
    disk = _disk(fault, folders)
    disk.mkdir(parents=True, exist_ok=True)
    _mount(["-t", "tmpfs", "-o", f"size={_FULL_KIBIBYTES}k,mode=0755", "tmpfs", str(disk)], fault)
    for name in ("upper", "work"):
        (disk / name).mkdir()
    seen = Path(fault.target).stat()
    os.chown(disk / "upper", seen.st_uid, seen.st_gid)
    (disk / "upper").chmod(seen.st_mode & 0o7777)
    layers = f"lowerdir={fault.target},upperdir={disk / 'upper'},workdir={disk / 'work'}"
    _mount(["-t", "overlay", "-o", layers, "overlay", fault.target], fault)
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass  # until the disk says that it is full


def make_read_only(fault: Fault) -> None:
    """Mount the directory over itself, read-only. Raises TwinError where this user may not mount."""
    _mount(["--bind", fault.target, fault.target], fault)
    _mount(["-o", "remount,ro,bind", fault.target], fault)


def uncover(fault: Fault, folders: TwinFolders) -> None:
    """Take away what was laid over the directory; does nothing when nothing is. Raises TwinError when it stays."""
    disk = _disk(fault, folders)
    for place in (Path(fault.target), disk):
        for _ in range(_layers(place, disk, fault)):
            done = _run(["umount", str(place)])
            if done.returncode != 0:
                done = _run(["umount", "--lazy", str(place)])  # somebody works in it; it goes when they leave
            if done.returncode != 0:
                raise TwinError(f"{place} cannot be uncovered: {done.stderr.strip()}; try again")
    if disk.is_dir() and not os.path.ismount(disk):
        with suppress(OSError):
            disk.rmdir()


def _disk(fault: Fault, folders: TwinFolders) -> Path:
    return folders.root / "faults" / f"disk-{fault.identity}"


def _layers(place: Path, disk: Path, fault: Fault) -> int:
    """How many mounts of this fault lie on `place`: only ours are taken away."""
    ours = place == disk or fault.kind == "read-only"  # `check_directory` saw that nothing else was mounted there
    return sum(ours or f"upperdir={disk}/upper" in line for line in _mounts_at(place))


def _mounts_at(place: Path) -> list[str]:
    """The kernel's lines for what is mounted exactly there."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].replace("\\040", " ") == str(place)]


def _mount(arguments: list[str], fault: Fault) -> None:
    done = _run(["mount", *arguments])
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise TwinError(
            f"{fault.kind} needs the right to mount (root with CAP_SYS_ADMIN, and overlay for a full disk): "
            f"{said[-1] if said else 'mount failed'}"
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not end within a minute")
