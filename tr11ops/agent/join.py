"""A node other than 0 of a training on several machines without a scheduler: joins node 0 and runs
its part.

It starts the same node agent as an attempt under Slurm, as often as node 0 starts a launch, passes
its lines and the signals that come in to node 0, and ends when node 0 says so, with node 0's exit
status. When node 0 is gone it ends what runs here.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from tr11ops.agent.rendezvous import Channel, Rendezvous, greet
from tr11ops.agent.step import WorkerLaunch
from tr11ops.base.errors import ChannelBusy, ChannelLost, ChannelRefused
from tr11ops.base.processes import CONTROLLER_VARIABLE, adopt_orphans, end_descendants
from tr11ops.base.units import duration
from tr11ops.rundir.paths import meeting_file, read_meeting_key
from trainer.contract.attempt import EXIT_ERROR, EXIT_FINE, EXIT_REFUSED, STOP_SIGNALS
from trainer.contract.documents import record_of
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

RETRY_SECONDS = 1.0
LOOK_SECONDS = 0.1
END_SECONDS = 5.0  # between TERM and KILL, where node 0 is gone


class Joining(Record):
    """Where to join and as whom. `hello`: what node 0 compares; `environment`: of the agent and its
    workers.

    `until_finished`: exit status 1 where this node leaves before there was anything to do, as there
    still is.
    """

    rendezvous: Rendezvous
    paths: RunPaths
    hello: Mapping[str, Any]
    environment: Mapping[str, str]
    wait_seconds: float
    until_finished: bool = False


def join(joining: Joining, say: Callable[[str], None]) -> int:
    """Run this node's part to its end; returns the exit status of the whole attempt.

    2 where node 0 refuses this node, 1 where it cannot be reached or is gone, 0 after a signal that
    came before the start.
    """
    adopt_orphans()
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: received.append(got))
        for number in STOP_SIGNALS
    }
    try:
        found = _connect(joining, received, say)
        if isinstance(found, int):
            return found
        channel, name = found
        return _Part(joining, channel, name=name, received=received, say=say).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_refusal(joining: Joining) -> bool:
    """Tell node 0 why this node cannot start (`hello["unable"]`), so that it waits no more; was it
    heard?

    Tried for `joining.wait_seconds`: node 0 may not listen yet.
    """
    until = time.monotonic() + joining.wait_seconds
    while True:
        try:
            channel, _ = _try_once(joining)
            channel.close()
            return False  # one that takes such a node in is of another kind
        except ChannelRefused:
            return True
        except (OSError, ValueError):
            if time.monotonic() > until:
                return False
        time.sleep(RETRY_SECONDS)


def _connect(
    joining: Joining, received: list[int], say: Callable[[str], None]
) -> tuple[Channel, str] | int:
    """Node 0's connection and the name that this node has there, or the exit status."""
    rendezvous = joining.rendezvous
    said = ""
    until = time.monotonic() + joining.wait_seconds
    while True:
        try:
            return _try_once(joining)
        except ChannelRefused as error:
            say(f"tr11: {error}")
            return EXIT_REFUSED
        except (OSError, ValueError) as error:
            if isinstance(error, ChannelLost | ValueError):
                why = str(error)
            else:
                why = (error.strerror or str(error)).lower()
        if why != said:
            said = why
            say(
                f"tr11: node {rendezvous.rank} of {rendezvous.nodes} waits for node 0 at {rendezvous.master}: {why}"
            )
        if received:
            say(
                f"tr11: {signal.Signals(received[0]).name} received before the workers were started: leaving"
            )
            if joining.until_finished:
                return EXIT_ERROR
            return EXIT_FINE
        if time.monotonic() > until:
            limit = duration(joining.wait_seconds)
            say(f"tr11: node 0 was not met within {limit}: look at its screen, and type again")
            return EXIT_ERROR
        time.sleep(RETRY_SECONDS)


def _try_once(joining: Joining) -> tuple[Channel, str]:
    """Raises OSError (ChannelLost is one) or ValueError, in words."""
    key = read_meeting_key(joining.paths)
    if key is None:
        raise ValueError(f"no one waits there yet ({meeting_file(joining.paths)} is not there)")
    channel = Channel(
        socket.create_connection((joining.rendezvous.host, joining.rendezvous.port), timeout=10.0)
    )
    try:
        return channel, greet(channel, key, joining.hello)
    except ChannelLost as error:
        channel.close()
        if isinstance(error, ChannelBusy | ChannelRefused):
            raise
        raise ValueError(f"it does not answer as node 0 ({error})") from None


class _Part:
    """This node's part, from the greeting to the end."""

    def __init__(
        self,
        joining: Joining,
        channel: Channel,
        name: str,
        received: list[int],
        say: Callable[[str], None],
    ) -> None:
        self._joining = joining
        self._channel = channel
        self._name = name
        self._received = received
        self._say = say
        self._words: queue.SimpleQueue[dict[str, Any] | ChannelLost] = queue.SimpleQueue()
        self._child: subprocess.Popen[bytes] | None = None
        self._passed = 0

    def run(self) -> int:
        rendezvous = self._joining.rendezvous
        who = f"node {rendezvous.rank} of {rendezvous.nodes} ({self._name})"
        self._say(f"tr11: {who} has joined node 0 at {rendezvous.master}")
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while True:
                status = self._turn()
                if status is not None:
                    return status
        finally:
            if self._child is not None:
                end_descendants(END_SECONDS)
            self._channel.close()

    def _read(self) -> None:
        while True:
            try:
                self._words.put(self._channel.receive())
            except ChannelLost as error:
                self._words.put(error)
                return

    def _turn(self) -> int | None:
        """One look at all that may have happened; the exit status when all is over."""
        try:
            words = self._words.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            words = {}
        if isinstance(words, ChannelLost):
            line = f"tr11: node 0 ({self._joining.rendezvous.master}) is gone, {words}"
            if self._child is not None:
                line += ": ending the workers here"
            self._say(line)
            return EXIT_ERROR
        if "finish" in words:
            if words.get("why"):
                self._say(f"tr11: node 0 has ended: {words['why']}")
            return int(words["finish"])
        if "start" in words:
            self._start(words["start"], words.get("time"))
        elif "signal" in words and self._child is not None:
            self._child.send_signal(int(words["signal"]))
        elif "end" in words:
            end_descendants(float(words["end"]))
        if len(self._received) > self._passed:
            self._say(
                f"tr11: {signal.Signals(self._received[self._passed]).name} received: telling node 0"
            )
            with suppress(ChannelLost):  # the reader says so
                self._channel.send(signal=self._received[self._passed])
            self._passed += 1
        return None

    def _start(self, words: Mapping[str, Any], began: float | None) -> None:
        """Start the node agent of a launch; a thread sends its lines, and at last its exit code."""
        launch = record_of(WorkerLaunch, words)
        own = {
            CONTROLLER_VARIABLE: str(os.getpid()),
            "TR11_JOB_ID": launch.job_id,
            "TR11_NODE_RANK": str(self._joining.rendezvous.rank),
            "TR11_NODE_NAME": self._name,
        }
        child = subprocess.Popen(
            launch.command_at(began),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**self._joining.environment, **own},
            start_new_session=True,
        )
        assert child.stdout is not None
        self._child = child
        threading.Thread(target=self._attend, args=(child, child.stdout), daemon=True).start()

    def _attend(self, child: subprocess.Popen[bytes], stream: IO[bytes]) -> None:
        try:
            for line in stream:
                with suppress(OSError):
                    os.write(sys.stdout.fileno(), line)
                self._channel.send(line=line.decode("utf-8", "surrogateescape"))
            self._channel.send(exit=child.wait())
        except ChannelLost:
            stream.close()  # the agent must not wait for a reader
