"""What goes wrong at the hub on demand, and how often one may ask it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What happens to the next requests of one kind ("*": of any): `times` of them, after the first
    `after` passed.

    how: "status" (answered so, nothing is done), "reset" (connection broken, nothing is done),
    "lose" (done, and the connection broken before the answer), "hang" (silence until the server is
    stopped or `release`d, nothing is done), "truncate" (done, half of the answer's body is sent),
    "garble" (done, a web page is sent as the answer), "call" (`call` is run, then the request is
    handled as ever), "lag" (done, answered when `release`d).
    """

    kind: str
    how: str
    times: int = 1
    after: int = 0
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = "the hub is not well"
    call: Callable[[], None] | None = None
    met: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def meets(self, kind: str) -> bool:
        """Count a request; whether it is one that fails."""
        if self.kind not in {kind, "*"} or self.times <= 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        self.met += 1
        return True

    def release(self) -> None:
        self.released.set()


class Window:
    """At most `limit` in any `seconds`, by the clock that is given."""

    def __init__(self, limit: int, seconds: float, name: str) -> None:
        self.limit, self.seconds, self.name = limit, seconds, name
        self._times: deque[float] = deque()

    def take(self, now: float) -> tuple[float, dict[str, str]]:
        """Seconds to wait (0: it is taken), and the headers that say so."""
        while self._times and self._times[0] <= now - self.seconds:
            self._times.popleft()
        wait = 0.0
        if len(self._times) >= self.limit:
            wait = self._times[0] + self.seconds - now
        else:
            self._times.append(now)
        reset = int(max(wait, (self._times[0] + self.seconds - now) if self._times else 0)) + 1
        left = self.limit - len(self._times)
        return wait, {
            "RateLimit": f'"{self.name}";r={left};t={reset}',
            "RateLimit-Policy": f'"fixed window";"{self.name}";q={self.limit};w={int(self.seconds)}',
            **({"Retry-After": str(int(wait) + 1)} if wait else {}),
        }
