"""The ranks of a stand-in training, joined by sockets: every step they meet, and none goes on
without the others.

As in a collective of a real training, a rank that dies ends the others at once, since its
connections close, and one that hangs makes them wait until a time-out. All ranks but the first talk
to the first one.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.contract.errors import Tr11Error
from trainer.contract.files import host_name

Reduce = Callable[[Sequence[Any]], Any]
FOLLOWERS_EXTRA_SECONDS = 5.0  # the first rank knows who is missing, so it speaks first
CONNECT_PAUSE_SECONDS = 0.05


class RankLost(Tr11Error, RuntimeError):
    """A rank of the crew died, or did not come in time."""


@dataclass
class StandInGroup:
    """This rank's place among `size` ranks. All ranks call `join`, then `meet` in the same order.

    `timeout_seconds`: how long a meeting waits for all.
    """

    rank: int
    size: int
    address: str
    port: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def join(self) -> None:
        """Find the others. Raises RankLost when not all are there in time."""
        if self.size == 1:
            return
        until = time.monotonic() + self.timeout_seconds
        if self.rank == 0:
            self._gather_links(until)
        else:
            self._links[0] = _Link(self._connect(until + FOLLOWERS_EXTRA_SECONDS), "rank 0")
            self._links[0].send({"rank": self.rank, "host": host_name()})

    def meet(self, what: str, value: Any, reduce: Reduce) -> Any:
        """Give `value` and return what `reduce` makes of the values of all ranks, in their order,
        on rank 0.

        Values are JSON. Raises RankLost when a rank is gone, or has not come to `what` within the
        time-out.
        """
        if self.size == 1:
            return reduce([value])
        until = time.monotonic() + self.timeout_seconds
        if self.rank:
            self._links[0].send(value)
            return self._links[0].receive(what, until + FOLLOWERS_EXTRA_SECONDS)
        values = {0: value, **self._receive_all(what, until)}
        answer = reduce([values[rank] for rank in range(self.size)])
        for link in self._links.values():
            link.send(answer)
        return answer

    def close(self) -> None:
        """Leave. The others notice."""
        for link in self._links.values():
            link.close()

    def _gather_links(self, until: float) -> None:
        with socket.create_server((self.address, self.port), backlog=self.size) as server:
            server.settimeout(0.5)
            while len(self._links) < self.size - 1:
                if time.monotonic() > until:
                    missing = [rank for rank in range(1, self.size) if rank not in self._links]
                    raise RankLost(_missing("start", missing, {}, self.timeout_seconds))
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    link = _Link(connection, "a rank")
                    hello = link.receive("start", until)
                    link.name = f"rank {hello['rank']} on {hello['host']}"
                    self._links[int(hello["rank"])] = link

    def _connect(self, until: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.address, self.port), timeout=5.0)
            except OSError as error:
                if time.monotonic() > until:
                    raise RankLost(
                        f"rank 0 does not answer on {self.address}:{self.port} ({error})"
                    ) from None
            time.sleep(CONNECT_PAUSE_SECONDS)

    def _receive_all(self, what: str, until: float) -> dict[int, Any]:
        values: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                here, value = link.take()
                if here:
                    values[rank] = value
                else:
                    selector.register(link.connection, selectors.EVENT_READ, rank)
            while len(values) < self.size - 1:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    names = {rank: link.name for rank, link in self._links.items()}
                    raise RankLost(
                        _missing(
                            what,
                            [rank for rank in names if rank not in values],
                            names,
                            self.timeout_seconds,
                        )
                    )
                for key, _ in ready:
                    done, value = self._links[key.data].read()
                    if done:
                        values[key.data] = value
                        selector.unregister(key.fileobj)
        return values


def _missing(what: str, ranks: Sequence[int], names: dict[int, str], seconds: float) -> str:
    first = min(ranks)
    more = ""
    if len(ranks) > 1:
        more = f" and {len(ranks) - 1} more"
    return f"{what} timed out after {seconds:g} s: no word from {names.get(first, f'rank {first}')}{more}"


class _Link:
    """One connection that carries JSON values, a line each."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self.connection = connection
        self.name = name
        self._buffer = b""

    def send(self, value: Any) -> None:
        try:
            self.connection.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise RankLost(f"connection closed by {self.name} ({error.strerror})") from None

    def take(self) -> tuple[bool, Any]:
        """(True, value) when a whole value has been read already; a quick sender's comes with the
        one before it.
        """
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            return False, None
        self._buffer = rest
        return True, json.loads(line)

    def read(self) -> tuple[bool, Any]:
        """Take what has come; (True, value) when that completes one. Blocks when nothing has come."""
        try:
            piece = self.connection.recv(65536)
        except TimeoutError:
            raise
        except OSError as error:
            raise RankLost(f"connection closed by {self.name} ({error.strerror})") from None
        if not piece:
            raise RankLost(f"connection closed by {self.name}")
        self._buffer += piece
        return self.take()

    def receive(self, what: str, until: float) -> Any:
        done, value = self.take()
        while not done:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                done, value = self.read()
            except TimeoutError:
                raise RankLost(f"{what} timed out: no word from {self.name}") from None
            finally:
                self.connection.settimeout(None)
        return value

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
