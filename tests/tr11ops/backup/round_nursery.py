"""Rounds of backup in processes that are killed (-9) at a given call of the file system."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from tests.tr11ops.backup.copy_nursery import FILE_CALLS
from tests.tr11ops.backup.forked_deeds import ForkingProcess, die_at, serve

GONE = 7


class RoundNursery(ForkingProcess):
    """The process that forks one for each round."""

    module = "tests.tr11ops.backup.round_nursery"

    def killed(self, folder: Path, at: int) -> bool:
        """A round at the store of the run in `folder`, which reads everything again; False: it
        ended well before.
        """
        code, _ = self.order(folder=str(folder), at=at)
        assert code in (0, -signal.SIGKILL), code
        return code != 0

    def dies_in_its_turn(self, folder: Path) -> None:
        """A process that begins to copy step 100 to the store, and is gone."""
        code, _ = self.order(folder=str(folder), at=0)
        assert code == GONE


def main() -> None:
    from tests.tr11ops.backup.round_cases import Rounds
    from tr11ops.rundir.claims import CopyLock

    def do(order: dict[str, Any]) -> int:
        rounds = Rounds(Path(order["folder"]), "backup.parallel=2")
        if not order["at"]:
            CopyLock(rounds.directory, "store", threading.Event()).__enter__().copying(100)
            os._exit(GONE)
        made = die_at(order["at"], FILE_CALLS)
        rounds.run("store", reading="all")
        return made[0]

    serve(do)


if __name__ == "__main__":
    main()
