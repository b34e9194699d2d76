"""Whether this machine is fit to launch from: Python, packages, Slurm's commands, locks, umask,
memory and disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tr11ops.base.units import size
from tr11ops.health.local_disk import exported_folder
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.paths import nearest_folder

NEEDED = ("torch", "deepspeed", "numpy", "tokenizers")
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
OLDEST_PYTHON = (3, 11)
OLDEST_SLURM = (20, 11)  # before, srun took a job's nodes without being told to share them
SHARED_MEMORY_BYTES = 1 << 30
TEMPORARY_BYTES = 1 << 30


def environment_checks(
    uses_slurm: bool, run_root: Path | None, controller_version: str = ""
) -> Iterator[PreflightCheck]:
    """All checks of this machine. `run_root`: where the run will be, None where no card is known."""
    yield from _python_checks()
    if uses_slurm:
        yield from _command_checks(controller_version)
    yield from _umask_checks()
    if run_root is not None:
        yield from _lock_checks(nearest_folder(run_root))
    yield from _memory_checks()


def _python_checks() -> Iterator[PreflightCheck]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield refused(
            "python", f"{version} is too old", f"use {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        )
    else:
        yield ok("python", f"{version} ({sys.executable})")
    found, missing = [], []
    for name in NEEDED:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        rule = f"{', '.join(missing)} not installed for {sys.executable}"
        yield refused(
            "packages",
            rule,
            "install them into this environment, or call tr11 from the one that has them",
        )
    else:
        yield ok("packages", ", ".join(found))


def _command_checks(controller_version: str) -> Iterator[PreflightCheck]:
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        yield refused(
            "slurm commands",
            f"{', '.join(absent)} not found",
            "load the site's Slurm, or use a login node",
        )
        return
    try:
        said = subprocess.run(
            ["sbatch", "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield unknown("slurm commands", f"sbatch --version did not answer ({error})")
        return
    client = _version(said)
    if client is None:
        yield warning(
            "slurm commands", f"sbatch --version says {said.strip()!r}, which is no version"
        )
    elif client < OLDEST_SLURM:
        yield refused(
            "slurm commands",
            f"Slurm {_text(client)} is too old",
            f"{_text(OLDEST_SLURM)} is the oldest",
        )
    else:
        yield ok("slurm commands", said.strip())
    controller = _version(controller_version)
    if client and controller and client != controller:
        rule = f"they are of {_text(client)}, the controller is of {_text(controller)}"
        yield warning(
            "slurm commands", rule, "ask the site; commands newer than the controller may not work"
        )


def _version(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d+)\.(\d+)", text)
    if match:
        return (int(match[1]), int(match[2]))
    return None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02d}"


def _umask_checks() -> Iterator[PreflightCheck]:
    mask = os.umask(0)
    os.umask(mask)
    if mask & 0o070:
        rule = f"{mask:04o} keeps the group out of what you make by hand; tr11's own files are shared all the same"
        yield warning("umask", rule, "put `umask 0002` (or 0007) into your shell's start file")
    else:
        yield ok("umask", f"{mask:04o}")


def _lock_checks(folder: Path) -> Iterator[PreflightCheck]:
    """Two handles of one nameless file must not both get its lock."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        text = f"could not be tried in {folder} ({error.strerror})"
        yield warning(
            "locks", text, "launches at the same moment are then told apart by the lease alone"
        )
        return
    try:
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                yield ok("locks", f"they hold in {folder}")
            else:
                yield warning(
                    "locks",
                    f"{folder} has none ({error.strerror})",
                    "launch from one place at a time",
                )
        else:
            yield warning(
                "locks",
                f"{folder} gives one lock to two holders",
                "launch from one place at a time",
            )
        finally:
            os.close(other)
    finally:
        os.close(descriptor)


def _memory_checks() -> Iterator[PreflightCheck]:
    for name, place, needed, why in (
        (
            "/dev/shm",
            Path("/dev/shm"),
            SHARED_MEMORY_BYTES,
            "workers on one node exchange data through it",
        ),
        (
            "temporary files",
            exported_folder(os.environ),
            TEMPORARY_BYTES,
            "$TMPDIR names another place",
        ),
    ):
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            yield warning(name, f"{place} could not be looked at ({error.strerror})")
            continue
        if free < needed:
            yield warning(name, f"{size(free)} free in {place}, {size(needed)} are advised: {why}")
        else:
            yield ok(name, f"{size(free)} free in {place}")
