"""Which node of a training this machine is, where no scheduler says so: by options, else by the
environment; and the connection between node 0 and another one.

Containers and cloud launchers set MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK; a PyTorchJob sets
RANK and WORLD_SIZE (of nodes), an indexed Kubernetes Job JOB_COMPLETION_INDEX.
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

from tr11ops.base.errors import ChannelBusy, ChannelLost, ChannelRefused, RendezvousError
from tr11ops.base.units import counted
from trainer.contract.record import Record

# one of these alone means the whole environment
MEANT = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
COUNTS = ("NNODES", "WORLD_SIZE")
RANKS = ("NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
LARGEST_COUNT = 100_000


class Rendezvous(Record):
    """Node `rank` of `nodes`; node 0 listens at `host`:`port`."""

    nodes: int
    rank: int
    host: str
    port: int

    @property
    def master(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


def read_rendezvous(
    nodes: int | None,
    rank: int | None,
    master: str | None,
    environment: Mapping[str, str],
    of_card: int,
) -> tuple[Rendezvous | None, tuple[str, ...]]:
    """This machine's place, None where nothing speaks of several machines; and what is to be said
    of the choice.

    Options win over the environment. `of_card`: slurm.nodes, the number of nodes where nothing else
    says it. Raises PlaceError.
    """
    is_meant = rank is not None or master is not None
    variables = {name: value for name, value in environment.items() if value.strip()}
    if not is_meant and not any(name in variables for name in MEANT):
        return None, ()
    if "LOCAL_RANK" in variables:
        text = f"LOCAL_RANK={variables['LOCAL_RANK']}: tr11 train starts all workers of its node"
        raise RendezvousError(
            f"{text}; start it once on each node, not once for each worker, and without torchrun"
        )
    said: list[str] = []
    count = _chosen("--nodes", nodes, names=COUNTS, variables=variables, least=1, said=said)
    number = _chosen("--node-rank", rank, names=RANKS, variables=variables, least=0, said=said)
    total = count if count is not None else of_card
    host, port = _master(master, variables, said)
    if total == 1 and not is_meant and not number:
        return None, tuple(said)  # a launcher of one container
    if number is None:
        raise _missing("--node-rank", "NODE_RANK", "which node this is", variables)
    if host is None or port is None:
        raise _missing(
            "--master HOST:PORT", "MASTER_ADDR and MASTER_PORT", "where node 0 is", variables
        )
    if number >= total:
        if nodes is not None:
            where = f"--nodes {total}"
        else:
            where = counted(total, "node")
        raise RendezvousError(
            f"node rank {number}: with {where} it must be 0 to {total - 1}; give each node its own"
        )
    return Rendezvous(total, number, host, port), tuple(said)


def _missing(option: str, names: str, what: str, variables: Mapping[str, str]) -> RendezvousError:
    there = ", ".join(name for name in MEANT if name in variables)
    if there:
        so_far = f"{there} set, but n"
    else:
        so_far = "n"
    return RendezvousError(
        f"{so_far}othing says {what}: give {option}, or set {names}"
        + (f", or unset {there}" * bool(there))
    )


def _chosen(
    option: str,
    given: int | None,
    names: tuple[str, ...],
    variables: Mapping[str, str],
    least: int,
    said: list[str],
) -> int | None:
    """The option's number, else that of the first variable that is set."""
    name = next((name for name in names if name in variables), None)
    if name is None:
        value = None
    else:
        value = _number(name, variables[name], least, LARGEST_COUNT)
    if given is not None and value is not None and value != given:
        said.append(f"{option} {given} is used, not {name}={value} of the environment")
    if given is not None:
        return given
    return value


def _number(name: str, text: str, least: int, most: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise RendezvousError(
            f"{name}={text!r}: must be a whole number from {least} to {most}; correct it, or unset it"
        )
    return int(text)


def _master(
    master: str | None, variables: Mapping[str, str], said: list[str]
) -> tuple[str | None, int | None]:
    address = variables.get("MASTER_ADDR")
    port = variables.get("MASTER_PORT")
    if master is None:
        if (address is None) != (port is None):
            if port is None:
                there = "MASTER_ADDR"
                absent = "MASTER_PORT"
            else:
                there = "MASTER_PORT"
                absent = "MASTER_ADDR"
            raise RendezvousError(
                f"{there} is set and {absent} is not: set both, or give --master HOST:PORT, or unset it"
            )
        if address is None or port is None:
            return (None, None)
        return (address.strip(), _port("MASTER_PORT", port))
    host, colon, number = master.rpartition(":")
    if not colon or not host.strip("[]"):
        raise RendezvousError(f"--master {master!r}: must be HOST:PORT, such as node1:29500")
    chosen = (host.strip("[]"), _port("--master", number))
    if address is not None and chosen != (
        address.strip(),
        _port("MASTER_PORT", port) if port else chosen[1],
    ):
        said.append(f"--master {master} is used, not MASTER_ADDR={address} of the environment")
    return chosen


def _port(name: str, text: str) -> int:
    return _number(f"{name}: port", text, 1, 65535)


# ----------------------------------------------------------------------------- the connection
# The connection between node 0 and another node where no scheduler stands between them: lines of
# JSON over TCP. Both sides prove that they read the same key in the run directory; neither says
# it. Each shows life every few seconds, so that a node that fell silent is noticed without a
# word from it. After the greeting the lines are neither signed nor encrypted: like the workers'
# own connections, this one belongs on a private network.
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
