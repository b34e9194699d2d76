"""Worker processes that read samples ahead, in exactly the order that is asked; none of them can
make a rank hang.

Workers are programs of their own (see `trainer.data.worker`), started without forking this
process's threads and locks. The rank and its workers talk through pipes alone, so there is no
shared memory to clean up. Whenever the rank waits it also takes what has arrived, so that no pipe
can stay full on both sides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError, LostWorkerError
from trainer.contract.units import signal_name
from trainer.data.sources import PlannedSource
from trainer.data.worker import LEFT_TO_THE_RANK, LENGTH, REPLY, REQUEST, ROWS

PACKAGE_ROOT = Path(__file__).parents[2]
# what a worker may read ahead before it waits for the rank, if the system allows so much
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 20
REQUESTS_AHEAD = 4  # for each worker
LOOK_SECONDS = 0.5  # between looks at whether a silent worker is alive
STALL_SECONDS = 600.0  # a worker that is alive and silent for so long is held up for good
LEAVE_SECONDS = 5.0
# A worker reads; libraries that start a thread for every core as they load would only cost memory.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerPool:
    """Some worker processes that serve all of some planned sources. Used by one thread. Close it,
    or end the process.

    Requests go to the workers in turn and each worker answers in order, so what is taken never
    depends on who is fast.
    """

    def __init__(
        self, plans: Mapping[str, PlannedSource], workers: int, stall_seconds: float = STALL_SECONDS
    ) -> None:
        if workers < 1:
            raise ValueError(f"{workers} data workers must be at least 1")
        self._plans = dict(plans)
        self._places = {name: place for place, name in enumerate(plans)}
        self._tickets = 0
        self._stall_seconds = stall_seconds
        sources = pickle.dumps(list(plans.values()))
        start = LENGTH.pack(len(sources)) + sources
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                self._workers.append(_Worker(number, start))
        except OSError as error:
            self.close()
            raise DataError(
                f"a data worker cannot be started: {error}; set data.workers to 0"
            ) from error

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in self._workers]

    def reader(self, name: str) -> PoolReader:
        """A reader of one of the planned sources, for a stream."""
        return PoolReader(self, self._plans[name])

    def ask(self, name: str, numbers: npt.NDArray[np.int64]) -> int:
        """Ask the next worker for samples of a source; returns the ticket."""
        ticket = self._tickets
        self._tickets += 1
        payload = numbers.astype("<i8").tobytes()
        self._worker_of(ticket).send(
            REQUEST.pack(ticket, self._places[name], len(numbers)) + payload
        )
        return ticket

    def has(self, ticket: int, seconds: float) -> bool:
        """Whether the answer to a ticket is here; waits for it at most so long. Raises DataError as
        `take` does.
        """
        worker = self._worker_of(ticket)
        until = time.monotonic() + seconds
        if ticket in worker.replies:
            return True
        worker.silent_since = worker.silent_since or time.monotonic()
        while ticket not in worker.replies:
            now = time.monotonic()
            if worker.exchange(min(LOOK_SECONDS, max(0.0, until - now))):
                worker.silent_since = time.monotonic()
            elif now - worker.silent_since > self._stall_seconds:
                raise LostWorkerError(
                    f"{worker} has not answered for {self._stall_seconds:g} s though it is alive: the file system of"
                    " the data hangs, or the worker was stopped; look at the node, then start the run again"
                )
            elif now >= until:
                return False
        worker.silent_since = None
        return True

    def take(self, ticket: int) -> bytearray:
        """The bytes of the samples of a ticket. Raises DataError: a fault of the data, or a worker
        that is gone.
        """
        worker = self._worker_of(ticket)
        while not self.has(ticket, LOOK_SECONDS):
            pass  # until it answers, or was silent for too long
        kind, payload = worker.replies.pop(ticket)
        if kind != ROWS:
            raise DataError(payload.decode())
        return payload

    def drop(self, ticket: int) -> None:
        """Throw the answer to a ticket away, now or when it comes."""
        worker = self._worker_of(ticket)
        if worker.replies.pop(ticket, None) is None:
            worker.unwanted.add(ticket)

    def close(self) -> None:
        """End all workers, and wait until they have ended. Idempotent."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()

    def _worker_of(self, ticket: int) -> _Worker:
        return self._workers[ticket % len(self._workers)]


class PoolReader:
    """Reads one source through a pool. See `trainer.data.stream.SampleReader`."""

    def __init__(self, pool: WorkerPool, plan: PlannedSource) -> None:
        self._pool = pool
        self._plan = plan
        self.row = plan.task.row
        self.depth = REQUESTS_AHEAD * len(pool.process_ids)

    def __len__(self) -> int:
        return self._plan.samples

    def ask(self, numbers: npt.NDArray[np.int64]) -> int:
        """Ask for samples; returns the ticket."""
        return self._pool.ask(self._plan.name, numbers)

    def take(self, ticket: int) -> npt.NDArray[np.int64]:
        """The samples of a ticket. Raises DataError."""
        rows: npt.NDArray[np.int64] = np.frombuffer(self._pool.take(ticket), dtype="<i8")
        return rows.reshape(-1, self.row.length)

    def has(self, ticket: int, seconds: float) -> bool:
        """Whether the samples of a ticket are here; waits for them at most so long. Raises
        DataError.
        """
        return self._pool.has(ticket, seconds)

    def drop(self, ticket: int) -> None:
        """The samples of a ticket are not wanted any more."""
        self._pool.drop(ticket)


class _Worker:
    """One process, what is still to be written to it, and what has come from it."""

    def __init__(self, number: int, start: bytes) -> None:
        self.number = number
        self.replies: dict[int, tuple[int, bytearray]] = {}
        self.unwanted: set[int] = set()
        self.silent_since: float | None = None  # while someone waits for it
        self._outgoing = bytearray(start)
        self._incoming = bytearray()
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # which the worker inherits
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.data.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin.fileno(), self.process.stdout.fileno()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the system may allow less
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._write()

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.process.pid})"

    def send(self, data: bytes) -> None:
        """Write what the pipe takes at once; the rest goes with the next `exchange`."""
        self._outgoing += data
        self._write()

    def exchange(self, seconds: float) -> bool:
        """Wait for the worker at most so long, and take what it wrote. False when it was silent.

        Raises DataError when it is gone.
        """
        self._write()
        wanted = select.POLLOUT if self._outgoing else 0
        self._poll.register(self._input, wanted)
        if self._poll.poll(1000 * seconds):
            self._write()
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._output, READ_BYTES)
                if not data:
                    raise self._gone()
                self._incoming += data
                self._cut_replies()
                return True
        if self.process.poll() is not None:
            raise self._gone()
        return False

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._input, self._outgoing)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise self._gone() from None

    def _cut_replies(self) -> None:
        at = 0
        while len(self._incoming) - at >= REPLY.size:
            ticket, kind, size = REPLY.unpack_from(self._incoming, at)
            end = at + REPLY.size + size
            if len(self._incoming) < end:
                break
            if ticket in self.unwanted:
                self.unwanted.remove(ticket)
            else:
                self.replies[ticket] = (kind, self._incoming[at + REPLY.size : end])
            at = end
        del self._incoming[:at]

    def _gone(self) -> LostWorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_SECONDS)
        code = self.process.returncode
        if code is not None and code < 0:
            how = f"was killed ({signal_name(-code)})"
            if -code == signal.SIGKILL:
                how += ", most likely for want of memory"
        else:
            how = f"ended by itself with exit code {code}; its error is above"
        return LostWorkerError(
            f"{self} {how}: start the run again, or set data.workers to 0 to read without workers"
        )

    def hang_up(self) -> None:
        """Close the pipes, on which the worker ends."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def end(self) -> None:
        """Wait for the worker; end it by force when it does not go."""
        try:
            self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
