"""The recorded run, unpacked where a test wants it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
ARCHIVE = HERE / "run.tar.xz"
EXPECTED = HERE / "expected.json"
ROOT_WORD = b"@FOLDER@"  # stands for the folder in which the run was recorded


def unpacked(folder: Path) -> Path:
    """The folder with `tr11.toml`, `run/`, `archive/`, `data/` and `scheduler/`, as they were left."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        if path.is_file() and not {"checkpoints", "journal"} & set(path.parts[len(folder.parts) :]):
            content = path.read_bytes()
            if ROOT_WORD in content:
                times = path.stat()
                path.write_bytes(content.replace(ROOT_WORD, str(folder).encode()))
                os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
    (folder / "urls").chmod(0o600)
    return folder
