"""What is large below a run's directory: looked for within a bound of entries and time, never a
whole file system.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from trainer.contract.checkpoint_names import checkpoint_step

MOST_ENTRIES = 10_000
MOST_SECONDS = 0.5
DEPTH = 3  # names of a path below the directory; what is deeper counts for its folder there
SHOWN = 3


def largest_below(root: Path) -> tuple[dict[str, int], bool]:
    """The largest things below a directory, on its own file system, with their bytes on disk, the
    largest first; and whether all of it was seen. Checkpoints are left out: their manifests say how
    large they are.
    """
    sizes: Counter[str] = Counter()
    folders, seen, until = deque([root]), 0, time.monotonic() + MOST_SECONDS
    device = root.stat().st_dev
    while folders and seen < MOST_ENTRIES and time.monotonic() < until:
        folder = folders.popleft()
        with suppress(OSError), os.scandir(folder) as entries:  # what cannot be read is not counted
            for entry in entries:
                seen += 1
                if seen > MOST_ENTRIES:
                    break
                status = entry.stat(follow_symlinks=False)
                if status.st_dev != device or checkpoint_step(entry.name) is not None:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    parts = Path(entry.path).relative_to(root).parts[:DEPTH]
                    sizes[str(root.joinpath(*parts))] += status.st_blocks * 512
    return dict(sizes.most_common(SHOWN)), not folders and seen <= MOST_ENTRIES
