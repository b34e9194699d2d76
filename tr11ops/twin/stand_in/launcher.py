"""Forks a node's stand-in workers, passes their lines on, and ends all when one fails: a torchrun
without torch.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tr11ops.base.processes import die_with_parent, show_as
from tr11ops.runcard.sections import RehearsalSection
from tr11ops.trainers.trainer import NodePlaces
from tr11ops.twin.stand_in.worker import Seat, run
from trainer.config.card import TrainerConfig, load_trainer_config, validate
from trainer.contract.attempt import STOP_SIGNALS
from trainer.contract.state_file import read_json
from trainer.contract.units import signal_name
from trainer.control.lifecycle import SignalFlag

GRACE_SECONDS = 30.0  # from TERM to KILL, as torchrun has it
POLL_SECONDS = 0.1


@dataclass
class _Worker:
    local_rank: int
    rank: int
    pid: int
    pipe: int
    rest: bytes = b""
    status: int | None = None


def launch(card: Path, places: NodePlaces) -> int:
    """Run this node's workers to their end; returns 0, 1 when one failed, 128 + n after signal n.

    Raises CardError when the card cannot be read.
    """
    config = load_trainer_config(card)
    value = read_json(card) or {}
    pace = validate(RehearsalSection, value.get("rehearsal") or {}, f"{card} [rehearsal]")
    card_hash = str(value.get("derived", {}).get("card_hash", ""))
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: received.append(got))
    workers = [
        _fork(config, pace, card_hash=card_hash, places=places, local_rank=local)
        for local in range(places.workers)
    ]
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        failed = _watch(workers, selector, received)
        _drain(selector)
    if failed is not None:
        return 1
    if received:
        return 128 + received[0]
    return 0


def _fork(
    config: TrainerConfig,
    pace: RehearsalSection,
    card_hash: str,
    places: NodePlaces,
    local_rank: int,
) -> _Worker:
    seat = Seat(places.first_rank + local_rank, places.world_size, places.address, places.port)
    reading, writing = os.pipe()
    parent = os.getpid()
    # none is lost before the worker's own handler is there
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _become_worker(seat, writing, parent)
        flag = SignalFlag()
        flag.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        run(config, pace, card_hash=card_hash, seat=seat, flag=flag)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.close(writing)
    os.set_blocking(reading, False)
    return _Worker(local_rank, seat.rank, pid, reading)


def _become_worker(seat: Seat, output: int, parent: int) -> None:
    """In the child: its output, the name by which faults find it, and an end with its launcher."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    show_as(f"rank-{seat.rank}")
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(
    workers: list[_Worker], selector: selectors.BaseSelector, received: list[int]
) -> _Worker | None:
    """Pass lines on until all workers have ended; returns the one that failed first. A failure is
    told at once, and ends the others.
    """
    failed: _Worker | None = None
    end_by: float | None = None
    passed_on = 0
    while True:
        _pass_lines(selector, POLL_SECONDS)
        for worker in [each for each in workers if each.status is None]:
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                worker.status = os.waitstatus_to_exitcode(status)
                if worker.status and failed is None and not received:
                    failed = worker
                    _drain(selector)
                    _tell_failure(failed)
        living = [worker for worker in workers if worker.status is None]
        if not living:
            return failed
        if (failed is not None and end_by is None) or len(received) > passed_on:
            passed_on = len(received)
            end_by = end_by or time.monotonic() + GRACE_SECONDS
            _send(living, signal.SIGTERM)
        if end_by is not None and time.monotonic() > end_by:
            _send(living, signal.SIGKILL)


def _send(workers: list[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


def _pass_lines(selector: selectors.BaseSelector, seconds: float) -> int:
    """Pass on what the workers have printed, whole lines, each with its worker's prefix; returns
    the bytes read.
    """
    if not selector.get_map():
        time.sleep(seconds)
        return 0
    count = 0
    for key, _ in selector.select(seconds):
        worker: _Worker = key.data
        try:
            piece = os.read(worker.pipe, 65536)
        except BlockingIOError:
            continue
        count += len(piece)
        if not piece:
            selector.unregister(worker.pipe)
            os.close(worker.pipe)
            piece = b"\n" if worker.rest else b""
        *lines, worker.rest = (worker.rest + piece).split(b"\n")
        prefix = f"[default{worker.local_rank}]:".encode()
        _print(b"".join(prefix + line + b"\n" for line in lines))
    return count


def _drain(selector: selectors.BaseSelector) -> None:
    """What workers have said so far, such as the last words of one that has ended; those that live
    are not waited for.
    """
    while selector.get_map() and _pass_lines(selector, 0.0):
        pass


def _tell_failure(worker: _Worker) -> None:
    """As torchrun tells it: the node agent knows a killed worker by this line."""
    status = worker.status or 0
    if status < 0:
        how = f"ended by {signal_name(-status)}"
    else:
        how = f"exit status {status}"
    _print(
        f"stand-in: failed (exitcode: {status}) local_rank: {worker.local_rank} (pid: {worker.pid})\n"
        f"tr11: worker {worker.rank} (process {worker.pid}) failed: {how}\n".encode()
    )


def _print(data: bytes) -> None:
    with suppress(OSError):  # no one reads any more, and the node agent ends what runs here
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
