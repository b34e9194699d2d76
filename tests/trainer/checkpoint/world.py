"""Several real gloo processes for a test: started from a fork server, joined or killed by their exact ids."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

DEADLINE = 180.0


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "trainer.checkpoint.store"])
    return context


def start(size: int, function: Callable[..., Any], *arguments: Any) -> tuple[list[BaseProcess], list[Connection]]:
    """Start `size` ranks of `function(rank, *arguments)`; returns the processes and where their results arrive."""
    context = _context()
    meeting = tempfile.mkdtemp(prefix="tr11-world-") + "/store"
    processes, receivers = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(rank, size, meeting, sender, function, arguments))
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)
    return processes, receivers


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(rank, *arguments)` on `size` ranks; a rank's error fails the test with its traceback."""
    processes, receivers = start(size, function, *arguments)
    try:
        results = []
        for rank, receiver in enumerate(receivers):
            assert receiver.poll(DEADLINE), f"rank {rank} of {size} did not answer"
            fine, value = receiver.recv()
            assert fine, f"rank {rank} of {size} failed:\n{value}"
            results.append(value)
        return results
    finally:
        stop(processes)


def stop(processes: list[BaseProcess], grace: float = 20.0) -> None:
    """Wait for the processes, then kill what is left of them."""
    for process in processes:
        process.join(grace)
        if process.is_alive():
            process.kill()
            process.join()


def _main(
    rank: int, size: int, meeting: str, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE)
            )
        sender.send((True, function(rank, *arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
