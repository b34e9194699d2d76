"""`python -m trainer.control.launcher ...`: torchrun with one line for each failed worker, and
without tracebacks.

The line comes before torchrun ends the others: that takes half a minute where one of them hears no
signal, and the node agent, which does not wait so long, would never learn who failed. A torchrun
that fails itself has a line too: a taken port shows in its own rendezvous, before there is any
worker.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.contract.attempt import EXIT_ERROR
from trainer.contract.files import host_name, share_folder
from trainer.contract.units import signal_name
from trainer.control.lifecycle import exit_process, without_collections

with without_collections():
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.multiprocessing.api import (
        DefaultLogsSpecs,
        PContext,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

_told: set[int] = set()
_close = PContext.close
_reify = DefaultLogsSpecs.reify


def _tell(rank: int, pid: int, code: int) -> None:
    if pid not in _told:
        _told.add(pid)
        if code < 0:
            how = f"ended by {signal_name(-code)}"
        else:
            how = f"exit status {code}"
        print(f"tr11: worker {rank} (process {pid}) failed: {how}", file=sys.stderr, flush=True)


def _tell_and_close(context: PContext, *arguments: Any, **options: Any) -> None:
    """Takes the place of torchrun's way to end all workers."""
    for local_rank, handler in getattr(context, "subprocess_handlers", {}).items():
        code = handler.proc.poll()
        if code:
            _tell(int(context.envs[local_rank]["RANK"]), handler.proc.pid, code)
    _close(context, *arguments, **options)


def _reify_shared(specs: DefaultLogsSpecs, envs: dict[int, dict[str, str]]) -> Any:
    """Takes the place of torchrun's way to make the folders of the workers' output: it keeps the
    group out of them.
    """
    destination = _reify(specs, envs)
    for file in destination.error_files.values() if specs.root_log_dir != os.devnull else ():
        with suppress(OSError):  # their lines are in the run's own logs too
            # of the rank, of torchrun's attempt, of the launch
            for folder in list(Path(file).parents)[:3]:
                share_folder(folder)
    return destination


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Workers have ended: their agent waits for the others at the store of node 0, whose agent may
    have gone first.
    """
    return not str(record.msg).startswith("Error waiting on exit barrier")


def run(arguments: list[str]) -> int:
    """Run torchrun with its own command line; returns 0, 1 when a worker failed, 128 + n after
    signal n.
    """
    setattr(PContext, "close", _tell_and_close)  # noqa: B010  a method of torchrun's own, for this process
    setattr(DefaultLogsSpecs, "reify", _reify_shared)  # noqa: B010
    api.logger.addFilter(_is_worth_telling)
    try:
        main(arguments)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            _tell(rank, failure.pid, failure.exitcode)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:  # torchrun's own: there may be no worker yet, and none to tell of it
        if not isinstance(error, DistError | OSError):
            traceback.print_exc()
        said = " ".join(str(error).split())
        line = f"tr11: the launcher on {host_name()} failed: {type(error).__name__}: {said}"
        print(line, file=sys.stderr, flush=True)
        return EXIT_ERROR
    return 0


if __name__ == "__main__":
    # to take torch apart would cost an eighth of what its start did
    exit_process(run(sys.argv[1:]), close=logging.shutdown)
