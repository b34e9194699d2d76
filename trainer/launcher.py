"""`python -m trainer.launcher ...`: torchrun with one line for each failed worker in place of its own traceback.

The line comes before torchrun ends the others: that takes half a minute where one of them hears no signal, and the node
agent, which does not wait so long, would never learn who failed.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

_told: set[int] = set()
_close = PContext.close


def _tell(rank: int, pid: int, code: int) -> None:
    if pid not in _told:
        _told.add(pid)
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        print(f"tr11: worker {rank} (process {pid}) failed: {how}", file=sys.stderr, flush=True)


def _tell_and_close(context: PContext, *arguments: Any, **options: Any) -> None:
    """Takes the place of torchrun's way to end all workers."""
    for local_rank, handler in getattr(context, "subprocess_handlers", {}).items():
        code = handler.proc.poll()
        if code:
            _tell(int(context.envs[local_rank]["RANK"]), handler.proc.pid, code)
    _close(context, *arguments, **options)


def run(arguments: list[str]) -> int:
    """Run torchrun with its own command line; returns 0, 1 when a worker failed, 128 + n after signal n."""
    setattr(PContext, "close", _tell_and_close)  # noqa: B010  a method of torchrun's own, for this process
    try:
        main(arguments)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            _tell(rank, failure.pid, failure.exitcode)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
