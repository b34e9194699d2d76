"""Several real gloo processes for a checkpoint test: run to their end, or left running to be
killed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.spawn import fork_server, run_ranks

DEADLINE = 600.0


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(rank, *arguments)` on `size` ranks; a single rank has no process group
    at all.
    """
    return run_ranks(_with_rank, size, function, arguments, timeout=DEADLINE, launch=size > 1)


def _with_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(dist.get_rank() if dist.is_initialized() else 0, *arguments)


def start(
    meeting: Path, size: int, function: Callable[..., Any], *arguments: Any
) -> list[BaseProcess]:
    """Start `size` ranks of `function(rank, *arguments)`, to be killed later; `meeting` is the path
    of a new file.
    """
    context = fork_server()
    processes = [
        context.Process(target=_main, args=(rank, size, meeting, function, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def stop(processes: list[BaseProcess]) -> None:
    """Kill what still runs, by its exact id, and reap all."""
    for process in processes:
        process.kill()
        process.join()


def _main(
    rank: int, size: int, meeting: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    method = f"file://{meeting}"
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE)
    )
    function(rank, *arguments)
