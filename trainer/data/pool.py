"""Work on pieces of data in several processes: results in the order of the pieces, few bytes of
them in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from trainer.contract.errors import DataError

PIECES_IN_FLIGHT = 3  # for each worker

State = TypeVar("State")
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def map_in_order(
    work: Callable[[State, Piece], Result],
    pieces: Iterator[Piece],
    *,
    set_up: Callable[..., State],
    arguments: tuple[Any, ...],
    workers: int,
    doing: str,
    size_of: Callable[[Piece], int] = lambda piece: 0,
    most_bytes: int = 0,
) -> Generator[Result, None, None]:
    """`work(state, piece)` for every piece, where each process has a state of its own,
    `set_up(*arguments)`.

    Pieces are given out while fewer than PIECES_IN_FLIGHT for each worker are under way, and their sizes together are
    at most `most_bytes`; a larger one is under way alone. One worker is this process itself. `work` and `set_up` are
    functions at the top of a module. Close what this returns (contextlib.closing): otherwise an error where the
    results are used leaves the processes until it is collected.
    Raises what `work` raises, and DataError, which names what was being done, when a worker is killed.
    """
    if workers == 1:
        state = set_up(*arguments)
        for piece in pieces:
            yield work(state, piece)
        return
    executor = ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(set_up, arguments),
    )
    flying: deque[tuple[int, Future[Result]]] = deque()
    flying_bytes = 0
    try:
        for piece in pieces:
            size = size_of(piece)
            while flying and (
                len(flying) >= workers * PIECES_IN_FLIGHT or flying_bytes + size > most_bytes
            ):
                flying_bytes -= flying[0][0]
                yield flying.popleft()[1].result()
            flying.append((size, executor.submit(_work, work, piece)))
            flying_bytes += size
        while flying:
            yield flying.popleft()[1].result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker that was {doing} was killed, most likely for want of memory; nothing was written: run it again,"
            " with fewer --workers if memory is short"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_states: list[Any] = []  # filled once in each worker process, which has no other place to keep it


def _start(set_up: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # the parent hears the keyboard too, and ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Workers of a killed parent would wait for work for ever.
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _states.append(set_up(*arguments))


def _leave_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(work: Callable[[Any, Any], Any], piece: Any) -> Any:
    return work(_states[0], piece)
