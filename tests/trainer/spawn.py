"""Run a function on N ranks, quickly and cleanly.

    from spawn import run_ranks

    def job(factor: int) -> int:                 # at module level, so that workers can import it
        return factor * torch.distributed.get_rank()

    def test_ranks() -> None:
        assert run_ranks(job, 4, 10) == [0, 10, 20, 30]

`run_ranks(function, world_size, *arguments)` returns what `function(*arguments)` returned on each
rank, in the order of ranks. Arguments and results travel by pickle; tensors are copied. Workers
come from one fork server that has imported torch and DeepSpeed already, so eight of them start in a
few seconds. Before the function is called the gloo process group is up
(`trainer.pipeline.library.init_distributed`) and afterwards it is always destroyed. When a rank raises, the
others are killed and RanksFailed carries that rank's traceback; when the deadline passes, every
stuck rank's stack. Workers are killed by their exact process ids, and whatever they left in
/dev/shm is removed.

`launch=False` sets the environment of `torchrun` but leaves the process group to the function.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tr11ops.twin.machine import claimed_ports

# What nearly every rank loads at some time, also what DeepSpeed and torch load at their first use:
# paid once, not by each.
PRELOADED = [
    "torch._dynamo",
    "trainer.pipeline.library",
    "torch.distributed.checkpoint",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "encodings.ascii",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "torch._inductor.compile_fx",
    "deepspeed.utils.pin_memory",
    "trainer.__main__",
    "tests.trainer.checkpoint.lives",
    "tests.trainer.courses",
    "tests.trainer.frozen",
]
GRACE_SECONDS = 3.0
EXIT_SECONDS = 300.0  # of a rank that has answered: a machine with other work is slow


class _Job(NamedTuple):
    """What one worker is told: the pickled (function, arguments), its place, where its stacks go."""

    call: bytes
    rank: int
    world_size: int
    port: int
    stacks: Path
    launch: bool


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the text holds each rank's traceback or stack."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 900.0,
    launch: bool = True,
) -> list[Any]:
    """Call `function(*arguments)` on `world_size` ranks; see the module's text. Raises RanksFailed."""
    context = fork_server()
    # Not a port that the system deals out: another test would have it before rank 0 listens.
    with (
        claimed_ports(1, beside_twins=True) as port,
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
    ):
        ends: list[Connection] = []
        workers = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            call = pickle.dumps((function, arguments))
            job = _Job(call, rank, world_size, port, Path(folder) / f"stacks-{rank}", launch)
            worker = context.Process(target=_work, args=(job, theirs), daemon=True)
            worker.start()
            theirs.close()
            ends.append(ours)
            workers.append(worker)
        try:
            return _collect(ends, workers, time.monotonic() + timeout, Path(folder))
        finally:
            for worker in workers:
                if worker.is_alive() and worker.pid is not None:
                    os.kill(worker.pid, signal.SIGKILL)
                worker.join()
            for end in ends:
                end.close()
            _sweep([worker.pid for worker in workers if worker.pid is not None])


def _collect(
    ends: list[Connection], workers: list[Any], deadline: float, folder: Path
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            rank = waiting.pop(end)  # type: ignore[index]
            try:
                good, value = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                workers[rank].join(GRACE_SECONDS)
                good, value = False, f"died without a word, exit code {workers[rank].exitcode}"
            (results if good else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if waiting:
        failures.update(_stacks([(rank, workers[rank]) for rank in waiting.values()], folder))
    if failures:
        raise RanksFailed(
            "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
        )
    for worker in workers:
        worker.join(EXIT_SECONDS)
    bad = {rank: worker.exitcode for rank, worker in enumerate(workers) if worker.exitcode != 0}
    if bad:
        raise RanksFailed(f"ranks did not exit cleanly (rank: exit code): {bad}")
    return [results[rank] for rank in range(len(workers))]


def _stacks(stuck: list[tuple[int, Any]], folder: Path) -> dict[int, str]:
    for _, worker in stuck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(0.5)
    texts = {}
    for rank, _ in stuck:
        path = folder / f"stacks-{rank}"
        texts[rank] = "did not finish in time\n" + (
            path.read_text() if path.exists() else "(no stack)"
        )
    return texts


def _work(job: _Job, end: Connection) -> None:
    """Body of one worker."""
    with job.stacks.open("w") as stream:
        faulthandler.register(signal.SIGUSR1, file=stream)
        os.environ.update(
            RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size),
            LOCAL_WORLD_SIZE=str(job.world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port),
        )  # fmt: skip
        import torch
        import torch.distributed

        from trainer.pipeline.library import init_distributed

        torch.set_num_threads(1)
        try:
            function, arguments = pickle.loads(job.call)
            if job.launch:
                init_distributed(torch.device("cpu"), timedelta(minutes=10))
            try:
                answer = (True, function(*arguments))
            finally:
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
            text = pickle.dumps(answer)
        except BaseException:
            text = pickle.dumps((False, traceback.format_exc()))
        end.send_bytes(text)
        end.close()
        faulthandler.unregister(signal.SIGUSR1)


def fork_server() -> Any:
    """The fork server. One thread per worker, because the tests share few cores; bf16 without AMX
    tiles, which round otherwise than the processors for which the tests' bounds were measured; and
    ranks meet when a group is made, else one without an operation is gone while another still
    connects to it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        from multiprocessing import forkserver

        forkserver.ensure_running()
    return context


def _sweep(pids: list[int]) -> None:
    """Remove shared-memory files named after our workers' process ids."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"*_{pid}_*"):
            path.unlink(missing_ok=True)
