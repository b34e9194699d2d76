"""Rounds of backup in processes that are killed (-9) at a given call of the file system; see copy_nursery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tr11ops.backup import copy_nursery


class RoundNursery:
    """The process that forks one process for each round."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tr11ops.backup.round_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self, folder: Path, at: int) -> bool:
        """A round at the store of the run in `folder`, which reads everything again; False: it ended well before."""
        return self._order(folder, at) == -signal.SIGKILL

    def dies_in_its_turn(self, folder: Path) -> None:
        """A process that begins to copy step 100 to the store, and is gone."""
        assert self._order(folder, 0) == 7

    def _order(self, folder: Path, at: int) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "at": at}) + "\n")
        self._process.stdin.flush()
        status: int = json.loads(self._process.stdout.readline())
        assert status in (0, 7, -signal.SIGKILL), status
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def round_nursery() -> Iterator[RoundNursery]:
    made = RoundNursery()
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    from tests.tr11ops.backup.round_cases import Rounds
    from tr11ops.backup.turn import Turn

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                rounds = Rounds(Path(order["folder"]), "backup.parallel=2")
                if not order["at"]:
                    Turn(rounds.directory, "store", threading.Event()).__enter__().copying(100)
                    os._exit(7)
                copy_nursery._arm(order["at"])
                rounds.run("store", reading="all")
                os._exit(0)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
