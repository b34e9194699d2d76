"""Node 0's side of a training on several machines without a scheduler: it gathers the others and
runs their agents.

What srun does under Slurm: each launch starts a node agent on every machine, its lines come back
here, a stop is passed on, and a machine that is gone is named. The other side is `join.py`.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from tr11ops.agent.exit_records import HostFailure
from tr11ops.agent.rendezvous import Channel, Greeting, Rendezvous
from tr11ops.agent.step import StopFlag, WorkerLaunch
from tr11ops.base.errors import ChannelLost
from tr11ops.base.redact import one_line
from tr11ops.base.units import counted, duration, first_few
from tr11ops.runcard.card import differences
from trainer.contract.documents import document, record_of
from trainer.contract.record import Record

EXIT_LOST = 255  # of an agent whose machine is gone
LOOK_SECONDS = 0.1
ANSWER_SECONDS = 10.0  # beyond its grace, for a node that was told to end its workers


class Newcomer(Record):
    """What a node says of itself. `card`: as it read it, resolved."""

    nodes: int
    rank: int
    host: str
    version: str
    card: Mapping[str, Any]


def objection(ours: Newcomer, other: Newcomer) -> str:
    """Why the two cannot train together, for both to read; "" when they can. Pure."""
    name = f"node {other.rank} ({other.host})"
    if other.nodes != ours.nodes:
        text = f"{name} was started for {counted(other.nodes, 'node')}, node 0 for {ours.nodes}"
        return f"{text}: give the same --nodes (or NNODES) on all"
    if not 0 < other.rank < ours.nodes:
        return f"{name}: with {counted(ours.nodes, 'node')} its rank must be 1 to {ours.nodes - 1}: correct --node-rank"
    if other.version != ours.version:
        return (
            f"{name} has tr11 {other.version}, node 0 has {ours.version}: install the same on all"
        )
    keys = [key for key, *_ in differences(_compared(ours.card), _compared(other.card))]
    if keys:
        text = f"{name} has another card than node 0, in {first_few(keys)}"
        return f"{text}: give the same card, --set and variables on all"
    return ""


def inability(newcomer: Newcomer, why: object) -> str:
    """That a node says of itself why it cannot start, for node 0 to read; "" where it says nothing.
    Pure.
    """
    if why:
        return f"node {newcomer.rank} ({newcomer.host}) cannot start: {one_line(str(why))}"
    return ""


def _compared(card: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in card.items() if name != "derived"}


class RemoteAgent:
    """The node agent of one launch on another machine, with the face of a child process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        reading, writing = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(reading, "rb")
        self._lines: IO[bytes] | None = os.fdopen(writing, "wb", buffering=0)
        self._status: int | None = None
        self._over = threading.Event()
        self._end_by: float | None = None

    def poll(self) -> int | None:
        """Its exit code, None while it runs; EXIT_LOST too where it was told to end and does not
        answer.
        """
        if self._status is None and self._end_by is not None and time.monotonic() > self._end_by:
            self._channel.close()
            self.end_with(EXIT_LOST)
        return self._status

    def wait(self) -> int:
        self._over.wait()
        if self._status is None:
            return EXIT_LOST
        return self._status

    def send_signal(self, number: int) -> None:
        with suppress(ChannelLost):  # its reader sees it too
            self._channel.send(signal=number)

    def end(self, grace_seconds: float) -> None:
        """Tell the machine to end all of it: TERM, then KILL after the grace."""
        if self._status is None and self._end_by is None:
            self._end_by = time.monotonic() + grace_seconds + ANSWER_SECONDS
            with suppress(ChannelLost):
                self._channel.send(end=grace_seconds)

    def feed(self, line: bytes) -> None:
        """One line of its output; only from the thread that calls `end_with` too, or after that in
        vain.
        """
        if self._lines is not None:
            with suppress(OSError, ValueError):
                self._lines.write(line)

    def end_with(self, status: int) -> None:
        if self._status is None:
            self._status = status
            if self._lines is not None:
                with suppress(OSError):
                    self._lines.close()
                self._lines = None
            self._over.set()


@dataclass
class RemoteNode:
    """A machine that has joined. `lost`: why it is gone, "" while it is there."""

    rank: int
    name: str
    channel: Channel
    lost: str = ""
    agent: RemoteAgent | None = None
    launch: WorkerLaunch | None = None


class Peers:
    """The other machines of one attempt, by node rank. `stop` hears the signals of all; `say` gets
    a line for each that comes or goes.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        ours: Newcomer,
        key: bytes,
        stop: StopFlag,
        say: Callable[[str], None],
    ) -> None:
        self.rendezvous = rendezvous
        self.stop = stop
        self._ours = ours
        self._key = key
        self._say = say
        self._lock = threading.Lock()
        self._nodes: dict[int, RemoteNode] = {}
        self._refusal = ""
        self._complete = False
        self._server = _listen(rendezvous)
        threading.Thread(target=self._accept, daemon=True).start()

    # ------------------------------------------------------------------ coming together
    def gather(self, seconds: float, leaves: Callable[[], bool]) -> str:
        """Wait until all are here; returns why they are not, "" when they are. `leaves` ends the
        waiting, without why.

        Everyone here is told why when it comes to nothing.
        """
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                missing = [
                    rank for rank in range(1, self.rendezvous.nodes) if rank not in self._nodes
                ]
                self._complete = not missing and not self._refusal
                if self._complete or self._refusal:
                    return self._refusal
            if leaves():
                return ""
            if time.monotonic() > until:
                who = first_few(missing, 8)
                text = (
                    f"node{'s' * (len(missing) > 1)} {who} of {self.rendezvous.nodes} did not come"
                )
                within = f"to {self.rendezvous.master} within {duration(seconds)}"
                return f"{text} {within}: start them, or look whether they reach it"
            time.sleep(LOOK_SECONDS)

    @property
    def is_refused(self) -> bool:
        return bool(self._refusal)

    @property
    def is_complete(self) -> bool:
        return self._complete

    @property
    def names(self) -> tuple[str, ...]:
        """Of all nodes, this one first."""
        return (self._ours.host, *(node.name for _, node in sorted(self._nodes.items())))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed: all is over
            threading.Thread(target=self._greet, args=(Channel(connection),), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        node = None
        with suppress(ChannelLost):  # it tries again, or was none of ours
            node = self._take_in(channel, Greeting(channel, self._key))
        if node is None:
            channel.close()
        else:
            self._attend(node)

    def _take_in(self, channel: Channel, greeting: Greeting) -> RemoteNode | None:
        try:
            newcomer = record_of(Newcomer, greeting.hello)
            against = inability(newcomer, greeting.hello.get("unable")) or objection(
                self._ours, newcomer
            )
        except ValueError as error:
            newcomer = None
            against = f"it does not say what it is ({error})"
        with self._lock:
            if self._complete:
                greeting.put_off("the training is under way with all its nodes")
                return None
            if newcomer is None or against:
                self._refusal = self._refusal or against
                greeting.refuse(against)
                return None
            held = self._nodes.get(newcomer.rank)
            if held is not None:
                greeting.put_off(
                    f"node rank {newcomer.rank} is taken by {held.name}: give each node its own rank"
                )
                return None
            names = {self._ours.host, *(node.name for node in self._nodes.values())}
            if newcomer.host not in names:
                name = newcomer.host
            else:
                name = f"{newcomer.host}-{newcomer.rank}"
            greeting.welcome(name)
            node = self._nodes[newcomer.rank] = RemoteNode(newcomer.rank, name, channel)
            count = len(self._nodes) + 1
        self._say(f"tr11: node {node.rank} ({name}) is here: {count} of {self.rendezvous.nodes}")
        return node

    # ------------------------------------------------------------------ what a node says
    def _attend(self, node: RemoteNode) -> None:
        """Read what a node sends until it is gone."""
        signals = 0
        try:
            while True:
                words = node.channel.receive()
                if "line" in words and node.agent is not None:
                    node.agent.feed(str(words["line"]).encode("utf-8", "surrogateescape"))
                elif "exit" in words and node.agent is not None:
                    node.agent.end_with(int(words["exit"]))
                elif (
                    "signal" in words
                ):  # as if it had come to this node; two Ctrl-C on one node end all at once
                    signals += 1
                    number = int(words["signal"])
                    if not self.stop.received or (signals > 1 and number == signal.SIGINT):
                        self.stop.received.append(number)
        except (ChannelLost, ValueError, TypeError) as error:
            self._lose(node, str(error))

    def _lose(self, node: RemoteNode, why: str) -> None:
        node.channel.close()
        with self._lock:
            if not self._complete:
                self._nodes.pop(node.rank, None)
            else:
                node.lost = why
        if not node.lost:
            self._say(f"tr11: node {node.rank} ({node.name}) has left before the start: {why}")
            return
        agent = node.agent
        launch = node.launch
        if agent is not None and launch is not None and agent.poll() is None:
            self._say(f"tr11: node {node.rank} ({node.name}) is lost: {why}")
            text = f"the connection to the agent of node {node.rank} was lost: {why}"
            with suppress(OSError):
                HostFailure(text, launch.number).write(launch.attempt, "lost", node.name)
            agent.end_with(EXIT_LOST)

    def lost(self) -> dict[str, str]:
        """Machines that are gone -> why."""
        with self._lock:
            return {node.name: node.lost for node in self._nodes.values() if node.lost}

    # ------------------------------------------------------------------ a launch
    def start(self, launch: WorkerLaunch) -> list[RemoteAgent]:
        """Start this launch's agent on every other machine, in the order of their ranks."""
        words = document(launch)
        started = []
        for _, node in sorted(self._nodes.items()):
            node.agent = RemoteAgent(node.channel)
            node.launch = launch
            started.append(node.agent)
            try:
                if node.lost:
                    raise ChannelLost(node.lost)
                node.channel.send(start=words, time=time.time())
            except ChannelLost:
                node.agent.end_with(EXIT_LOST)
        return started

    def end(self, grace_seconds: float) -> None:
        """End the agents of the last launch on all machines."""
        for node in self._nodes.values():
            if node.agent is not None:
                node.agent.end(grace_seconds)

    def finish(self, status: int, why: str) -> None:
        """Send all home with this exit status, and stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            self._complete = True  # who goes now is not lost
            nodes = list(self._nodes.values())
        for node in nodes:
            with suppress(ChannelLost):
                node.channel.send(finish=status, why=why)
        until = time.monotonic() + ANSWER_SECONDS
        while any(not node.lost for node in nodes) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)  # each goes when it has read it: then no word of it is cut off


def _listen(rendezvous: Rendezvous) -> socket.socket:
    """Raises OSError when the port is taken."""
    address = rendezvous.host if _is_loopback(rendezvous.host) else ""
    port = rendezvous.port
    if address == "" and socket.has_dualstack_ipv6():
        return socket.create_server(
            (address, rendezvous.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=512)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
