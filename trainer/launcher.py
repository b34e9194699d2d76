"""`python -m trainer.launcher ...`: torchrun with one line for each failed worker in place of its own traceback."""

from __future__ import annotations

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments: list[str]) -> int:
    """Run torchrun with its own command line; returns 0, 1 when a worker failed, 128 + n after signal n."""
    try:
        main(arguments)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            code = failure.exitcode
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            print(f"tr11: worker {rank} (process {failure.pid}) failed: {how}", file=sys.stderr, flush=True)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
