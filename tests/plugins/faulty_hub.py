"""The twin's hub as tests need it: what goes wrong at it on demand, what it was asked, limits, objects in parts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from tr11ops.twin.hub.routes import Api, HubRequest, HubResponse
from tr11ops.twin.hub.server import Broken, HubHandler, HubServer, problem_answer
from tr11ops.twin.hub.state import Commit, HubProblem, Repo
from trainer.contract.record import Record

# What goes wrong at the hub on demand, and how often one may ask it.


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


@dataclass
class Window:
    """At most `limit` in any `seconds`, by the clock that is given."""

    limit: int
    seconds: float
    name: str

    def __post_init__(self) -> None:
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


class Seen(Record):
    """One request, as it came. `host` is "hub" or "storage"; `status` 0: it got no answer."""

    kind: str
    method: str
    host: str
    url: str
    authorization: str | None
    agent: str
    bytes_in: int
    status: int
    range: str | None = None


class PartsApi(Api):
    """A hub that has large objects sent in parts from a size on."""

    multipart_from = 1 << 40
    part_bytes = 16 << 20

    @staticmethod
    def kind_of(method: str, path: str) -> tuple[str, dict[str, str]]:
        if (method, path) == ("POST", "/api/complete_multipart"):
            return "lfs-complete", {}
        return Api.kind_of(method, path)

    def answer(self, kind: str, request: HubRequest) -> HubResponse:
        if kind == "lfs-complete":  # its address is signed, it comes without a token
            return self._complete(request)
        return super().answer(kind, request)

    def _actions(self, repo: Repo, oid: str, size: int) -> dict[str, object]:
        actions = super()._actions(repo, oid, size)
        if size < self.multipart_from:
            return actions
        upload: dict[str, str] = actions["upload"]  # type: ignore[assignment]
        place = upload["href"]
        count = math.ceil(size / self.part_bytes)
        header = {str(number): f"{place}&part={number}" for number in range(1, count + 1)}
        complete = f"{self.hub_url}/api/complete_multipart?{place.partition('?')[2]}&oid={oid}"
        told = {"href": complete, "header": {"chunk_size": str(self.part_bytes), **header}}
        return {**actions, "upload": told}

    def _complete(self, request: HubRequest) -> HubResponse:
        """Put the parts together. The object is there when all of it has the digest that it is
        named by.
        """
        self.check_signature(request)
        oid = request.query["oid"][0]
        names = [f"{oid}.part{part['partNumber']}" for part in request.json()["parts"]]
        draft = self.hub.folder / f"{oid}.whole"
        with draft.open("wb") as whole:
            for name, part in zip(names, request.json()["parts"], strict=True):
                content = (self.hub.folder / name).read_bytes()
                if part["etag"].strip('"') != hashlib.md5(content).hexdigest():
                    raise HubProblem(400, "InvalidPart")
                whole.write(content)
        self.keep(draft, oid, request)
        return HubResponse.of({})

    def storage(self, request: HubRequest, draft: Path) -> HubResponse:
        if "part" not in request.query or request.method != "PUT":
            return super().storage(request, draft)
        self.check_signature(request)
        oid = request.path.rpartition("/")[2]
        with draft.open("rb") as stream:
            etag = hashlib.file_digest(stream, "md5").hexdigest()
        draft.replace(self.hub.folder / f"{oid}.part{int(request.query['part'][0])}")
        return HubResponse(200, b"", {"ETag": f'"{etag}"'})


class FaultyHub(HubServer):
    """A hub of which a test has the say; see `tests/plugins/hub_fixture.py`."""

    api: PartsApi

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.faults: list[Fault] = []
        self.is_down = False  # every connection is broken at once
        self.commit_limit: Window | None = Window(128, 3600, "commits")
        self.request_limit: Window | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        super().__init__(api=PartsApi, handler=FaultyHandler)

    def stop(self) -> None:
        """End all, and release what hangs."""
        self._stopping.set()
        for fault in self.faults:
            fault.release()
        super().stop()

    # ------------------------------------------------------------------------- what tests set
    def configure(self, **settings: int) -> None:
        """Change tree_page, commits_page, multipart_from, part_bytes."""
        for name, value in settings.items():
            assert hasattr(self.api, name)
            setattr(self.api, name, value)

    def put(
        self,
        name: str,
        path: str,
        content: bytes,
        title: str = "by hand",
        kind: str = "model",
    ) -> Commit:
        """A commit by someone else, as through the hub's web page."""
        header = {"key": "header", "value": {"summary": title, "description": ""}}
        file = {
            "key": "file",
            "value": {
                "path": path,
                "content": base64.b64encode(content).decode(),
                "encoding": "base64",
            },
        }
        return self.hub.commit(
            self.hub.repos[kind, name],
            "main",
            [json.dumps(line).encode() for line in (header, file)],
            "somebody",
        )

    def fail(
        self,
        kind: str,
        status: int = 503,
        *,
        times: int = 1,
        after: int = 0,
        headers: Mapping[str, str] | None = None,
        text: str = "the hub is not well",
    ) -> Fault:
        return self._add(
            Fault(
                kind,
                "status",
                times=times,
                after=after,
                status=status,
                headers=dict(headers or {}),
                text=text,
            )
        )

    def break_off(self, how: str, kind: str, *, times: int = 1, after: int = 0) -> Fault:
        """A fault without an answer of its own: "reset", "lose", "hang", "lag" or "truncate"."""
        return self._add(Fault(kind, how, times, after))

    def garble(
        self,
        kind: str,
        *,
        times: int = 1,
        headers: Mapping[str, str] | None = None,
        body: str = "<html>log in to the network first</html>",
    ) -> Fault:
        return self._add(Fault(kind, "garble", times, headers=dict(headers or {}), text=body))

    def on(self, kind: str, call: Callable[[], None], *, times: int = 1) -> Fault:
        """Run `call` in the server's thread when such a request has come and before it is handled."""
        return self._add(Fault(kind, "call", times, call=call))

    def heal(self) -> None:
        """Forget all faults, and come up again."""
        with self._lock:
            for fault in self.faults:
                fault.release()
            self.faults = []
            self.is_down = False

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    # ------------------------------------------------------------------------- what tests look at
    def count(self, kind: str | None = None) -> int:
        return sum(1 for seen in list(self.requests) if kind in {None, seen.kind})

    def counts(self) -> Counter[str]:
        return Counter(seen.kind for seen in list(self.requests))

    def bytes_sent(self) -> int:
        """Bytes of large objects that were put, again and again counted."""
        return sum(
            seen.bytes_in for seen in list(self.requests) if seen.kind in {"lfs-put", "lfs-part"}
        )

    def forget_requests(self) -> None:
        self.requests = []

    def repo(self, name: str, kind: str = "model") -> Repo:
        return self.hub.repos[kind, name]

    def history(self, name: str, kind: str = "model", branch: str = "main") -> list[Commit]:
        """All commits of a branch, oldest first; the first is the hub's own."""
        return self.repo(name, kind).lineage(branch)[::-1]

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a commit with its content."""
        commit = self.repo(name).resolve(revision)
        return {path: self.hub.content(blob) for path, blob in commit.files.items()}

    def authorizations_at_storage(self) -> list[str]:
        return [
            seen.authorization
            for seen in list(self.requests)
            if seen.host == "storage" and seen.authorization
        ]

    def secrets(self) -> list[str]:
        """What may be in no output of the operation."""
        return [self.token, self.read_token, self.signature]

    # ------------------------------------------------------------------------- one request
    def fault_for(self, kind: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.meets(kind)), None)

    def see(self, seen: Seen) -> None:
        with self._lock:
            self.requests.append(seen)

    def limited(self, kind: str) -> tuple[float, dict[str, str]]:
        with self._lock:
            told: dict[str, str] = {}
            for window in (self.request_limit, self.commit_limit if kind == "commit" else None):
                if window is not None:
                    wait, told = window.take(self.now())
                    if wait > 0:
                        return wait, told
            return 0.0, told

    def wait_for(self, fault: Fault) -> None:
        while not fault.released.wait(0.05) and not self._stopping.is_set():
            pass


class FaultyHandler(HubHandler):
    """Remembers each request, and lets it meet its fault."""

    fault: Fault | None = None

    def serve(self, kind: str, request: HubRequest, draft: Path) -> None:
        owner = self._owner
        if self.server.host == "hub":
            kind = PartsApi.kind_of(self.command, request.path)[0]
        elif self.command == "PUT":
            kind = "lfs-part" if "part" in request.query else "lfs-put"
        else:
            kind = "storage-get"
        self.kind, self.status, self.fault = kind, 0, None
        try:
            if owner.is_down:
                raise Broken
            self.fault = fault = owner.fault_for(kind)
            if fault is not None and fault.how == "hang":
                owner.wait_for(fault)
            if fault is not None and fault.how in {"reset", "hang"}:
                raise Broken
            if fault is not None and fault.call is not None:
                fault.call()
            super().serve(kind, request, draft)
        except (Broken, ConnectionError, TimeoutError):
            if self.status == 0:
                self._remember()
            raise

    @property
    def _owner(self) -> FaultyHub:
        assert isinstance(self.server.owner, FaultyHub)
        return self.server.owner

    def answer(self, kind: str, request: HubRequest, draft: Path) -> HubResponse:
        fault = self.fault
        if fault is not None and fault.how == "status":
            answer = problem_answer(HubProblem(fault.status, fault.text))
            return replace(answer, headers={**fault.headers, **answer.headers})
        if self.server.host == "storage":
            return super().answer(kind, request, draft)
        wait, told = self._owner.limited(kind)
        if wait > 0:
            text = "Too many requests"
            if kind == "commit":
                text = "You have exceeded the rate limit for repository commits (128 per hour)."
            return HubResponse.of({"error": text}, 429, **told)
        answer = super().answer(kind, request, draft)
        return replace(answer, headers={**told, **answer.headers})

    def send_answer(self, answer: HubResponse) -> None:
        fault = self.fault
        if fault is not None and fault.how == "lose":
            raise Broken
        if fault is not None and fault.how == "lag":
            self._owner.wait_for(fault)
        if fault is not None and fault.how == "garble":
            headers = {"Content-Type": "text/html", **fault.headers}
            answer = HubResponse(200, fault.text.encode(), headers)
        self.status = answer.status
        self._remember()  # before the answer: who has it finds the request counted
        super().send_answer(answer)

    def send_content(self, answer: HubResponse, begin: int, left: int) -> None:
        is_cut = self.fault is not None and self.fault.how == "truncate"
        super().send_content(answer, begin, left // 2 if is_cut else left)
        if is_cut:
            self.wfile.flush()
            raise Broken

    def _remember(self) -> None:
        seen = Seen(
            self.kind,
            self.command,
            host=self.server.host,
            url=self.path,
            authorization=self.headers.get("Authorization"),
            agent=self.headers.get("User-Agent", ""),
            bytes_in=int(self.headers.get("Content-Length") or 0),
            status=self.status,
            range=self.headers.get("Range"),
        )
        self._owner.see(seen)
