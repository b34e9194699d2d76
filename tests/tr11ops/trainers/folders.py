"""Folders of checkpoints as trainers leave them, for the tests of dialects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.tr11ops.trainers.fake_trainer import ARCHIVE, write_file

WHOLE_ARCHIVE = ARCHIVE  # as text of a file: an archive, as torch.save writes one
LONG_AGO = 1_700_000_000.0
LATER = LONG_AGO + 3600.0  # by then nothing is being written any more


def lay(root: Path, files: Mapping[str, str]) -> Path:
    """Files with these texts below `root`, all of one moment long ago; see `write_file`."""
    for name, text in files.items():
        write_file(root / name, text)
    age(root)
    return root


def age(root: Path, moment: float = LONG_AGO) -> None:
    """Date everything below `root`."""
    age_to(root, round(moment * 1e9))


def age_to(root: Path, moment: int) -> None:
    """The same, to the nanosecond."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            os.utime(Path(folder) / name, ns=(moment, moment))
    os.utime(root, ns=(moment, moment))
