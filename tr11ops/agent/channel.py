"""The connection between node 0 and another node where no scheduler stands between them: lines of
JSON over TCP.

Both sides prove that they read the same key in the run directory; neither says it. Each shows life
every few seconds, so that a node that fell silent is noticed without a word from it. After the
greeting the lines are neither signed nor encrypted: like the workers' own connections, this one
belongs on a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tr11ops.base.errors import ChannelBusy, ChannelLost, ChannelRefused

PROTOCOL = 1
GREETING_SECONDS = 20.0
ALIVE_SECONDS = 3.0  # between two signs of life
SILENCE_SECONDS = 30.0  # after so long without a word the other side is lost
LARGEST_GREETING = 4 << 20  # bytes: it holds a card
LARGEST_LINE = 64 << 20


class Channel:
    """One connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(GREETING_SECONDS)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def send(self, **words: Any) -> None:
        """Send one message. Raises ChannelLost."""
        data = json.dumps(words).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except (OSError, ValueError) as error:
            raise ChannelLost(_why(error)) from None

    def receive(self, most: int = LARGEST_LINE) -> dict[str, Any]:
        """The next message that is more than a sign of life. Raises ChannelLost."""
        while True:
            try:
                line = self._stream.readline(most)
                value = None
                if line.endswith(b"\n"):
                    value = json.loads(line)
            except TimeoutError:
                raise ChannelLost(
                    f"nothing was heard for {self._socket.gettimeout() or 0:.0f} s"
                ) from None
            except (OSError, ValueError) as error:
                raise ChannelLost(_why(error)) from None
            if not isinstance(value, dict):
                raise ChannelLost("the connection ended")
            if value:
                return value

    def keep_alive(self) -> None:
        """Show life from now on, and expect it of the other side."""
        self._socket.settimeout(SILENCE_SECONDS)
        threading.Thread(target=self._show_life, daemon=True).start()

    def _show_life(self) -> None:
        with suppress(ChannelLost):
            while not self._closed.wait(ALIVE_SECONDS):
                self.send()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.close()


def greet(channel: Channel, key: bytes, hello: Mapping[str, Any]) -> str:
    """A newcomer's part of the greeting; returns the name that this node is given.

    Raises ChannelBusy where it may try again, ChannelRefused where that is in vain, ChannelLost for
    all else.
    """
    challenge = channel.receive(LARGEST_GREETING)
    if challenge.get("tr11") != PROTOCOL:
        raise ChannelRefused(f"who listens there is no tr11 of this version (protocol {PROTOCOL})")
    nonce = secrets.token_hex(16)
    channel.send(
        hello=dict(hello),
        nonce=nonce,
        proof=proof(key, "hello", str(challenge.get("nonce")), hello),
    )
    answer = channel.receive(LARGEST_GREETING)
    if "later" in answer:
        raise ChannelBusy(str(answer["later"]))
    words: dict[str, Any] = {
        name: answer[name] for name in ("welcome", "refused") if name in answer
    }
    if not hmac.compare_digest(str(answer.get("proof")), proof(key, "answer", nonce, words)):
        raise ChannelBusy(
            "it does not know the key in this run directory: is that shared between the nodes?"
        )
    if "refused" in words:
        raise ChannelRefused(str(words["refused"]))
    channel.keep_alive()
    return str(words["welcome"])


class Greeting:
    """Node 0's part of the greeting: `hello` is what the newcomer says, and one answer follows."""

    def __init__(self, channel: Channel, key: bytes) -> None:
        """Raises ChannelLost where the newcomer is none of ours; it is told so."""
        challenge = secrets.token_hex(16)
        channel.send(tr11=PROTOCOL, nonce=challenge)
        said = channel.receive(LARGEST_GREETING)
        hello = said.get("hello")
        self.hello: dict[str, Any] = {}
        if isinstance(hello, dict):
            self.hello = hello
        self._channel = channel
        self._key = key
        self._nonce = str(said.get("nonce"))
        if not hmac.compare_digest(
            str(said.get("proof")), proof(key, "hello", challenge, self.hello)
        ):
            self.put_off(
                "its key differs from that in node 0's run directory: is that shared between the nodes?"
            )
            raise ChannelLost("a newcomer without the key")

    def put_off(self, why: str) -> None:
        """Not now. Raises ChannelLost."""
        self._channel.send(later=why)

    def refuse(self, why: str) -> None:
        """Never as it is. Raises ChannelLost."""
        self._channel.send(
            refused=why, proof=proof(self._key, "answer", self._nonce, {"refused": why})
        )

    def welcome(self, name: str) -> None:
        """Take it in under this name. Raises ChannelLost."""
        self._channel.send(
            welcome=name, proof=proof(self._key, "answer", self._nonce, {"welcome": name})
        )
        self._channel.keep_alive()


def proof(key: bytes, role: str, nonce: str, words: Mapping[str, Any]) -> str:
    """That who says `words` knows `key`: HMAC-SHA256 over the other side's nonce and them."""
    text = json.dumps([role, nonce, words], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).lower()
