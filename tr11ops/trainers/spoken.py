"""What a trainer itself tells: by `tr11_beat.py`, a file for each rank, and by Hugging Face's Trainer,
which posts its progress to a server that its environment names.

The reporter that transformers brings for Kubeflow (`KubeflowCallback`) needs no change of a script:
rank 0 posts every five seconds. Its last word says 100 % whenever `train()` returned, so that it is
no end of the training.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tr11ops.trainers.tr11_beat import ASKED_FILE, FOLDER, LARGEST
from trainer.contract.attempt import PHASES
from trainer.contract.documents import record_of
from trainer.contract.files import write_atomically
from trainer.contract.record import Amount, Count, Record
from trainer.contract.state_file import read_json

Wish = Literal["save", "stop"]
TOKEN_FILE = "token"
# what transformers' reporter reads
_URL, _TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
_NAME = re.compile(r"rank-(\d{1,7})\.json")
_LARGEST_WORD = 4096  # bytes of a rank's file
_LARGEST_POST = 64 << 10  # bytes of a body
_MOST_POSTS = 16  # that are heard at once
_MOST_METRICS = 200
_SECONDS = 2.0  # that a reporter may pause in the middle of a word
_AHEAD = 60.0  # seconds that a word may be of the future, as where a clock was set back
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class TrainerWord(Record):
    """What one rank says of itself. `step`: how many steps are done, `total`: the training's last
    one; None where it does not say. `loss`: NaN where it is no finite number. `phase`: one of those
    of a heartbeat, None for any other. `time`: seconds since the epoch. `heard`: the number of the
    wish that it has read last; 0: none.
    """

    rank: int
    step: int | None
    loss: float | None
    phase: str | None
    total: int | None
    time: float
    tokens: int | None = None
    heard: int = 0


class _Written(Record):
    """What `tr11_beat.py` writes."""

    rank: Count
    time: Amount
    step: Count | None
    total: Count | None
    tokens: Count | None
    loss: float | str | None
    phase: str | None
    heard: Count


def read_words(folder: Path, now: float) -> tuple[TrainerWord, ...]:
    """The newest word of each rank, by rank; none where there is no folder. `now`: seconds since the
    epoch.

    A file that is none of `tr11_beat.py`'s, or is damaged, or of another rank than its name says, or
    of the future, is no word. Raises OSError where the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208  a name is enough
    except FileNotFoundError:
        return ()
    ranks = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
    words = (_read_word(folder / f"rank-{rank}.json", rank, now) for rank in ranks)
    return tuple(word for word in words if word is not None)


def _read_word(path: Path, rank: int, now: float) -> TrainerWord | None:
    try:
        value = read_json(path, _LARGEST_WORD)
        if value is None:
            return None
        said = record_of(_Written, value)
    except (OSError, ValueError):
        return None
    if said.rank != rank or said.time > now + _AHEAD:
        return None
    loss = said.loss
    if isinstance(loss, str):
        loss = math.nan
    return TrainerWord(
        rank=rank,
        step=said.step,
        loss=loss,
        phase=_phase(said.phase),
        total=said.total,
        time=said.time,
        tokens=said.tokens,
        heard=said.heard,
    )


def _phase(said: str | None) -> str | None:
    if said in PHASES:
        return said
    return None


def leave_request(folder: Path, wish: Wish) -> int:
    """Say a wish to the training; returns its number, which `TrainerWord.heard` is once it was read.
    Raises OSError.
    """
    number = time.time_ns()
    write_atomically(folder / ASKED_FILE, f"{number} {wish}\n")
    return number


def environment_for(
    folder: Path, listener: Listener | None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that let a training speak: into `folder`, which is best on a disk of the node
    itself, and to `listener`.

    `environment`: what it would have without them; this process's, if not given. A job that reports
    to Kubeflow goes on doing that.
    """
    known = environment
    if known is None:
        known = os.environ
    found = {FOLDER: str(folder)}
    if listener is None or _URL in known:
        return found
    found[_URL] = listener.url
    found[_TOKEN] = str(listener.token_file)
    if any(known.get(name) for name in _PROXIES):
        outside = known.get("no_proxy") or known.get("NO_PROXY") or ""
        found["no_proxy"] = ",".join(filter(None, (outside, Listener.ADDRESS)))
    return found


# ----------------------------------------------------------------------------- the listener
class Listener:
    """Hears what Hugging Face's Trainer posts, on the loopback address at a free port.

    `folder`: where its token is written, for this user alone. `word`: the newest; None before the
    first. `close` it, or use it as a context: then its port and its threads are gone. Raises
    OSError where it cannot listen.
    """

    ADDRESS = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self._token = secrets.token_urlsafe(24)
        self.token_file = folder / TOKEN_FILE
        write_atomically(self.token_file, self._token, mode=0o600)
        self.word: TrainerWord | None = None
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="trainer-listener", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.ADDRESS}:{self._server.server_address[1]}/trainer"

    def close(self) -> None:
        """Hear no more. A reporter in the middle of a word is cut off: it goes on without."""
        self._server.shutdown()
        self._server.cut_off()
        self._server.server_close()
        self._thread.join()
        self.token_file.unlink(missing_ok=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lets_in(self, authorization: str) -> bool:
        """Whether a caller has the token."""
        expected = f"Bearer {self._token}".encode()
        return hmac.compare_digest(authorization.encode("utf-8", "replace"), expected)

    def hear(self, body: bytes) -> bool:
        """Take a word; whether it is one."""
        word = posted_word(body, time.time(), self.word)
        if word is None:
            return False
        self.word = word
        return True


def posted_word(body: bytes, now: float, before: TrainerWord | None) -> TrainerWord | None:
    """What a post of transformers' reporter says, at `now`; None where it is none.

    Its first post has no step, its last one neither, so that those of the one `before` stand.
    """
    try:
        status = json.loads(body)["trainerStatus"]
        told = _metrics(status.get("metrics") or [])
        is_done = status.get("progressPercentage") == 100
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    step, total, loss = _whole(told, "current_step"), _whole(told, "total_steps"), _loss(told)
    if before is not None and step is None:
        step, total = before.step, total or before.total
        loss = before.loss
    phase = "training"
    if is_done:
        phase = "ending"
    return TrainerWord(rank=0, step=step, loss=loss, phase=phase, total=total, time=now)


def _metrics(listed: Any) -> dict[str, str]:
    """Names and texts of what is measured. Raises ValueError, KeyError, TypeError for another list."""
    if not isinstance(listed, list) or len(listed) > _MOST_METRICS:
        raise ValueError("no list of metrics")
    return {str(one["name"]): str(one["value"]) for one in listed}


def _whole(told: Mapping[str, str], name: str) -> int | None:
    text = told.get(name, "")
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) > LARGEST:
        return None
    return int(text)


def _loss(told: Mapping[str, str]) -> float | None:
    """NaN where it is no finite number; None where there is none."""
    try:
        found = float(told["loss"])
    except (KeyError, ValueError):
        return None
    if math.isfinite(found):
        return found
    return math.nan


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Takes so many calls at once, and no more: a reporter that is not heard goes on all the same.

    Not `HTTPServer`, which asks for the name of its own address first, as long as that takes.
    """

    daemon_threads = False  # so that closing waits for them
    request_queue_size = 4 * _MOST_POSTS  # a full queue would leave a reporter waiting for seconds

    def __init__(self, owner: Listener) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((Listener.ADDRESS, 0), _Post)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._open) >= _MOST_POSTS:
                return False
            self._open.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def cut_off(self) -> None:
        """End the calls that are under way."""
        with self._lock:
            for request in self._open:
                with suppress(OSError):  # it has gone by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no news."""


class _Post(BaseHTTPRequestHandler):
    """One call."""

    timeout = _SECONDS
    server: _Server

    def do_POST(self) -> None:
        owner = self.server.owner
        length = self.headers.get("Content-Length", "")
        if not owner.lets_in(self.headers.get("Authorization", "")):
            self._answer(403)
        elif not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > _LARGEST_POST:
            self._answer(413)
        elif owner.hear(self.rfile.read(int(length))):
            self._answer(200)
        else:
            self._answer(400)

    def _answer(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """No line: the training's log is not this one."""
