"""Variables that every worker gets unless the card or the node sets them: NCCL in trouble, and
compilers' caches.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# ----------------------------------------------------------------------------- compilers' caches
# The folder of this node in which compilers keep what they made, for the user's next launch.
#
# Its keys are the compilers' own: version, GPU and flags are in them, so that ranks, runs and
# versions share it.

MOST_BYTES = 4 << 30
UNUSED_SECONDS = 86400.0  # what was used since then may be in use


def caches_folder(temporary: Path) -> Path:
    """Where it is, below a folder of temporary files."""
    return temporary / f"tr11-caches-{os.geteuid()}"


def prepare_caches(temporary: Path) -> bool:
    """Make the folder, for its owner alone, and take the oldest files away where it has grown
    beyond its bound.

    False where it cannot be had, or is another user's: code is loaded from it.
    """
    folder = caches_folder(temporary)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_mode & 0o022:
            folder.chmod(0o700)
        _bound(folder)
    except OSError:
        return False
    return True


def _bound(folder: Path) -> None:
    files = []
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another launch's, on its way
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                total += found.st_size
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    for used, size, path in sorted(files):
        if total <= MOST_BYTES or used > time.time() - UNUSED_SECONDS:
            return
        with suppress(OSError):
            path.unlink()
            total -= size


FLIGHT_RECORDS = "flight-recorder"  # as trainer.contract.paths.RunPaths.flight_records
RENAMED = (2, 9)  # torch's version with TORCH_FR_ names of the flight recorder's variables
KEPT_OPERATIONS = 1000  # of each rank: some hundred kilobytes


def worker_defaults(
    environment: Mapping[str, str],
    attempt: Path,
    launch: int,
    temporary: Path,
    *,
    gpus: int,
    tensor: int,
    torch: str = "",
) -> dict[str, str]:
    """What is missing in `environment`. `temporary`: on a disk of this node. `tensor`:
    tensor-parallel degree. `torch`: its version; the flight recorder's variables were renamed, and
    each use of an old name costs a warning.

    Compilers' caches are small files that each rank reads at its start: on a shared file system
    hundreds of ranks would wait for them. They are kept for the user's next attempt on the node.
    """
    caches = caches_folder(temporary)
    records = attempt / FLIGHT_RECORDS / f"launch-{launch}-rank-"
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(KEPT_OPERATIONS),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    if gpus:
        wanted |= {
            # A hung operation ends the process, without waiting for communicators that may never
            # answer.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": str(records),  # the rank's number is put behind it
        }
    if gpus and not _knows_new_names(torch):
        wanted |= {
            "TORCH_NCCL_TRACE_BUFFER_SIZE": str(KEPT_OPERATIONS),
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(records),
        }
    if gpus and tensor > 1:
        # kernels start in the order in which they were launched
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}


def torch_version() -> str:
    """Of the installed torch, read without importing it; "" where none is."""
    from importlib.metadata import PackageNotFoundError, version  # 13 ms, for GPUs alone

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _knows_new_names(torch: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= RENAMED
