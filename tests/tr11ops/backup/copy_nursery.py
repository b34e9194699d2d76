"""Copies to a folder in processes that are killed (-9) at a given call of the file system."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.tr11ops.backup.forked_deeds import ForkingProcess, die_at, serve

FILE_CALLS = tuple(
    (os, name)
    for name in ("open", "pwrite", "fsync", "replace", "rename", "link", "mkdir", "unlink")
)


class CopyNursery(ForkingProcess):
    """The process that forks one for each copy."""

    module = "tests.tr11ops.backup.copy_nursery"

    def killed(self, at: int, store: Path, checkpoint: Path, format: str, **settings: int) -> bool:
        """Copy a checkpoint in a process that is killed as it makes its `at`-th call that changes
        files, or right after it. False: it made fewer calls, and ended well.
        """
        code, _ = self.order(
            at=at, store=str(store), checkpoint=str(checkpoint), format=format, settings=settings
        )
        assert code in (0, -signal.SIGKILL), code
        return code != 0


def main() -> None:
    from tests.tr11ops.backup.copy_cases import copy, make_archive, quick

    def do(order: dict[str, Any]) -> int:
        made = die_at(order["at"], FILE_CALLS)
        archive, checkpoint = make_archive(Path(order["store"])), Path(order["checkpoint"])
        copy(archive, checkpoint, quick(**order["settings"]), format=order["format"])
        return made[0]

    serve(do)


if __name__ == "__main__":
    main()
