"""The hub's HTTP API: from a request to an answer, on the state alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode

from msgspec.structs import replace

from tr11ops.twin.hub.state import Commit, HubAccount, HubProblem, HubState, Repo
from trainer.contract.record import JsonObject, Record

JSON = {"Content-Type": "application/json"}
_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_NAME = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/(?P<kinds>models|datasets|spaces)/{_NAME}"
_PREFIX = r"/(?:(?P<kinds>datasets|spaces)/)?"
ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate-yaml"),
    ("GET", _API + r"(?:/revision/(?P<revision>[^/]+))?", "info"),
    ("GET", _API + r"/refs", "refs"),
    ("POST", _API + r"/branch/(?P<branch>[^/]+)", "branch"),
    ("POST", _API + r"/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", _API + r"/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", _API + r"/commits/(?P<revision>[^/]+)", "commits"),
    ("GET", _API + r"/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", "tree"),
    ("POST", _API + r"/paths-info/(?P<revision>[^/]+)", "paths-info"),
    ("GET", _API + r"/xet-write-token/(?P<revision>[^/]+)", "chunks-token"),
    ("POST", _PREFIX + rf"{_NAME}\.git/info/lfs/objects/batch", "lfs-batch"),
    ("POST", _PREFIX + rf"{_NAME}\.git/info/lfs/objects/verify", "lfs-verify"),
    ("GET", _PREFIX + rf"{_NAME}/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("HEAD", _PREFIX + rf"{_NAME}/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
)
_COMPILED = tuple((method, re.compile(pattern), kind) for method, pattern, kind in ROUTES)


class HubRequest(Record):
    method: str
    path: str  # still quoted, without the query
    query: dict[str, list[str]]
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    parts: Mapping[str, str] = {}  # of the path, by the names of its pattern

    def json(self) -> JsonObject:
        try:
            value: JsonObject = json.loads(self.body or b"{}")
            return value
        except ValueError:
            raise HubProblem(400, "not JSON") from None


class HubResponse(Record):
    """`body`, or a file of which a range may be asked."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    file: Path | None = None
    is_ranged: bool = False

    @classmethod
    def of(cls, value: object, status: int = 200, **headers: str) -> HubResponse:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, json.dumps(value).encode(), {**JSON, **named})


TREE_PAGE, COMMITS_PAGE = 1000, 50  # entries of an answer


@dataclass
class Api:
    """The hub's half that speaks JSON. `hub_url` and `storage_url` are where it and its storage are
    reached.
    """

    hub: HubState
    signature: str
    tree_page: int = TREE_PAGE
    commits_page: int = COMMITS_PAGE

    def __post_init__(self) -> None:
        self.hub_url = self.storage_url = ""

    def _address(self, kind: str, name: str) -> str:
        """Where a repository is reached."""
        if kind == "model":
            return f"{self.hub_url}/{name}"
        return f"{self.hub_url}/{kind}s/{name}"

    @staticmethod
    def kind_of(method: str, path: str) -> tuple[str, dict[str, str]]:
        """The kind of a request and the parts of its path; "other" for one that this hub does not
        know.
        """
        for known, pattern, kind in _COMPILED:
            match = pattern.fullmatch(path)
            if known == method and match:
                return kind, {
                    key: unquote(text)
                    for key, text in match.groupdict().items()
                    if text is not None
                }
        return "other", {}

    def account(self, request: HubRequest) -> HubAccount | None:
        text = request.headers.get("authorization")
        if text is None:
            return None
        account = self.hub.accounts.get(text.removeprefix("Bearer "))
        if account is None:
            raise HubProblem(401, "Invalid credentials in Authorization header")
        return account

    def answer(self, kind: str, request: HubRequest) -> HubResponse:
        if kind == "other":
            raise HubProblem(404, f"Not Found: {request.method} {request.path}")
        account = self.account(request)
        if kind == "whoami":
            return self._whoami(account)
        if kind == "create":
            return self._create(request, account)
        if kind == "validate-yaml":
            return self._validate(request)
        repo = self.hub.repo(
            _KINDS.get(request.parts.get("kinds", "models"), "model"),
            request.parts["name"],
            account,
        )
        if kind in {"branch", "preupload", "commit", "lfs-batch", "lfs-verify", "chunks-token"}:
            self._require_write(repo, account)
        handler: Callable[..., HubResponse] = getattr(self, "_" + kind.replace("-", "_"))
        return handler(repo, request)

    @staticmethod
    def _require_write(repo: Repo, account: HubAccount | None) -> None:
        if account is None:
            raise HubProblem(401, "Invalid username or password.")
        if not account.may_write:
            raise HubProblem(
                403, "Forbidden: you must use a write token to upload to a repository."
            )
        if not account.is_in(repo.name.split("/")[0]):
            raise HubProblem(403, f"Forbidden: you don't have the rights to write to {repo.name}")

    # ------------------------------------------------------------------------- account and
    # repository
    @staticmethod
    def _whoami(account: HubAccount | None) -> HubResponse:
        if account is None:
            raise HubProblem(401, "Invalid username or password.")
        role = "write" if account.may_write else "read"
        return HubResponse.of(
            {
                "type": "user",
                "name": account.name,
                "orgs": [{"type": "org", "name": name} for name in account.organizations],
                "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": role}},
            }
        )

    def _create(self, request: HubRequest, account: HubAccount | None) -> HubResponse:
        value = request.json()
        if account is None:
            raise HubProblem(401, "Invalid username or password.")
        owner = value.get("organization") or account.name
        name = f"{owner}/{value['name']}"
        kind = value.get("type") or "model"
        if not account.may_write or not account.is_in(owner):
            raise HubProblem(
                403, f"You don't have the rights to create a {kind} under the namespace {owner!r}"
            )
        facts = {"url": self._address(kind, name), "name": name, "id": name}
        try:
            self.hub.create(kind, name, value.get("visibility") == "private", account.name)
        except HubProblem as problem:
            raise HubProblem(problem.status, problem.text, problem.code, **facts) from None
        return HubResponse.of(facts)

    @staticmethod
    def _validate(request: HubRequest) -> HubResponse:
        import yaml

        text = request.json().get("content", "")
        match = re.match(r"\s*---\n(.*?)\n---", text, re.DOTALL)
        try:
            if match:
                value = yaml.safe_load(match[1])
            else:
                value = {}
        except yaml.YAMLError as error:
            return HubResponse.of({"errors": [{"message": f"YAML: {error}"}], "warnings": []}, 400)
        if isinstance(value, dict) or value is None:
            errors = []
        else:
            errors = [{"message": "metadata must be a mapping"}]
        return HubResponse.of({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _info(self, repo: Repo, request: HubRequest) -> HubResponse:
        commit = repo.resolve(request.parts.get("revision", "main"))
        files = [{"rfilename": path} for path in sorted(commit.files)]
        facts = {
            "_id": "0",
            "id": repo.name,
            "sha": commit.id,
            "private": repo.private,
            "siblings": files,
        }
        newest = {
            "lastModified": commit.date,
            "createdAt": commit.date,
            "disabled": False,
            "gated": False,
        }
        return HubResponse.of(
            {
                **facts,
                **newest,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "author": repo.name.split("/")[0],
            }
        )

    def _refs(self, repo: Repo, request: HubRequest) -> HubResponse:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repo.branches.items()
        ]
        return HubResponse.of({"branches": branches, "converts": [], "tags": []})

    def _branch(self, repo: Repo, request: HubRequest) -> HubResponse:
        with self.hub.lock:
            if request.parts["branch"] in repo.branches:
                raise HubProblem(409, f"Reference already exists: {request.parts['branch']}")
            repo.branches[request.parts["branch"]] = repo.resolve(
                request.json().get("startingPoint", "main")
            ).id
        return HubResponse.of({})

    # ------------------------------------------------------------------------- reading
    def _entry(self, commit: Commit, path: str) -> dict[str, object]:
        blob = commit.files[path]
        entry: dict[str, object] = {
            "type": "file",
            "oid": blob.oid,
            "size": blob.size,
            "path": path,
        }
        if blob.sha256 is not None:
            entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}
        return entry

    @staticmethod
    def _folder(commit: Commit, path: str) -> dict[str, object]:
        inside = sorted(
            (name, blob.oid) for name, blob in commit.files.items() if name.startswith(path + "/")
        )
        return {
            "type": "directory",
            "oid": hashlib.sha1(repr(inside).encode()).hexdigest(),
            "size": 0,
            "path": path,
        }

    def _tree(self, repo: Repo, request: HubRequest) -> HubResponse:
        commit = repo.resolve(request.parts["revision"])
        folder = request.parts.get("path", "").strip("/")
        start = ""
        if folder:
            start = f"{folder}/"
        names = [name for name in sorted(commit.files) if name.startswith(start)]
        if folder and not names:
            raise HubProblem(
                404, f"{folder} does not exist on {request.parts['revision']}", "EntryNotFound"
            )
        folders = {
            start + "/".join(rest[:depth])
            for name in names
            for rest in [name[len(start) :].split("/")]
            for depth in range(1, len(rest))
        }
        is_recursive = request.query.get("recursive", ["false"])[0].lower() in {"true", "1"}
        items = [
            *(self._folder(commit, name) for name in sorted(folders)),
            *(self._entry(commit, name) for name in names),
        ]
        if not is_recursive:
            items = [item for item in items if "/" not in str(item["path"])[len(start) :]]
        return self._page(items, request, self.tree_page, "cursor")

    def _page(
        self, items: Sequence[Mapping[str, object]], request: HubRequest, size: int, name: str
    ) -> HubResponse:
        size = min(size, int(request.query.get("limit", [str(size)])[0]))
        begin = int(request.query.get(name, ["0"])[0])
        headers = {}
        if begin + size < len(items):
            query = {key: values[0] for key, values in request.query.items()} | {
                name: str(begin + size)
            }
            headers["Link"] = f'<{self.hub_url}{request.path}?{urlencode(query)}>; rel="next"'
        return replace(HubResponse.of(items[begin : begin + size]), headers=JSON | headers)

    def _commits(self, repo: Repo, request: HubRequest) -> HubResponse:
        items = [
            {
                "id": one.id,
                "title": one.title,
                "message": one.message,
                "authors": [{"user": one.author}],
                "date": one.date,
            }
            for one in repo.lineage(request.parts["revision"])
        ]
        return self._page(items, request, self.commits_page, "p")

    def _paths_info(self, repo: Repo, request: HubRequest) -> HubResponse:
        commit = repo.resolve(request.parts["revision"])
        if request.headers.get("content-type", "").startswith("application/json"):
            paths = request.json()["paths"]
        else:
            paths = parse_qs(request.body.decode()).get("paths", [])
        if len(paths) > 1000:
            raise HubProblem(413, "too many parameters")
        found = [self._entry(commit, path) for path in paths if path in commit.files]
        folders = [
            path.rstrip("/")
            for path in paths
            if any(name.startswith(path.rstrip("/") + "/") for name in commit.files)
        ]
        return HubResponse.of([*found, *(self._folder(commit, path) for path in folders)])

    def _resolve(self, repo: Repo, request: HubRequest) -> HubResponse:
        commit = repo.resolve(request.parts["revision"])
        blob = commit.files.get(request.parts["path"])
        if blob is None:
            raise HubProblem(404, "Entry not found", "EntryNotFound")
        headers = {
            "X-Repo-Commit": commit.id,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if blob.sha256 is None:
            return HubResponse(
                200, self.hub.small[blob.oid], {**headers, "ETag": f'"{blob.oid}"'}, is_ranged=True
            )
        linked = {
            "X-Linked-Size": str(blob.size),
            "X-Linked-ETag": f'"{blob.sha256}"',
            "ETag": f'"{blob.sha256}"',
        }
        place = f"{self.storage_url}/objects/{blob.sha256}?X-Amz-Signature={self.signature}"
        return HubResponse(302, b"", {**headers, **linked, "Location": place})

    # ------------------------------------------------------------------------- writing
    def _preupload(self, repo: Repo, request: HubRequest) -> HubResponse:
        commit = repo.resolve(request.parts["revision"])
        told = []
        for file in request.json()["files"]:
            path = file["path"]
            size = file["size"]
            is_large = self.hub.uses_large(
                commit, path, size, base64.b64decode(file.get("sample", ""))
            )
            known = commit.files.get(path)
            if known is None:
                oid = None
            else:
                oid = known.sha256 or known.oid
            told.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if is_large else "regular",
                    "shouldIgnore": False,
                    "oid": oid,
                }
            )
        return HubResponse.of({"files": told, "commitOid": commit.id})

    def _commit(self, repo: Repo, request: HubRequest) -> HubResponse:
        account = self.account(request)
        assert account is not None
        lines = [line for line in request.body.split(b"\n") if line.strip()]
        commit = self.hub.commit(repo, request.parts["revision"], lines, account.name)
        address = f"{self._address(repo.kind, repo.name)}/commit/{commit.id}"
        return HubResponse.of(
            {"success": True, "commitOid": commit.id, "commitUrl": address, "hookOutput": ""}
        )

    def _chunks_token(self, repo: Repo, request: HubRequest) -> HubResponse:
        """Access to the chunked storage: here a folder, which the library's own storage engine
        writes to.
        """
        if self.hub.chunks is None:
            raise HubProblem(404, "Not Found")
        told = {
            "accessToken": self.signature,
            "exp": int(time.time()) + 3600,
            "casUrl": f"local://{self.hub.chunks}",
        }
        return HubResponse.of(told)

    def _lfs_batch(self, repo: Repo, request: HubRequest) -> HubResponse:
        told = []
        for wanted in request.json()["objects"]:
            oid = wanted["oid"]
            size = wanted["size"]
            entry: dict[str, object] = {"oid": oid, "size": size, "authenticated": True}
            if oid not in repo.objects:
                entry["actions"] = self._actions(repo, oid, size)
            told.append(entry)
        return HubResponse.of({"transfer": "basic", "objects": told})

    def _actions(self, repo: Repo, oid: str, size: int) -> dict[str, object]:
        query = urlencode(
            {"repo": f"{repo.kind}:{repo.name}", "size": size, "X-Amz-Signature": self.signature}
        )
        place = f"{self.storage_url}/objects/{oid}"
        verify = {
            "href": f"{self._address(repo.kind, repo.name)}.git/info/lfs/objects/verify",
            "header": {},
        }
        return {"upload": {"href": f"{place}?{query}", "header": {}}, "verify": verify}

    def _lfs_verify(self, repo: Repo, request: HubRequest) -> HubResponse:
        value = request.json()
        if (
            value["oid"] not in repo.objects
            or self.hub.object_path(value["oid"]).stat().st_size != value["size"]
        ):
            raise HubProblem(404, "Object does not exist")
        return HubResponse.of({})

    # ------------------------------------------------------------------------- storage
    def check_signature(self, request: HubRequest) -> None:
        if request.query.get("X-Amz-Signature") != [self.signature]:
            raise HubProblem(403, "SignatureDoesNotMatch")

    def keep(self, draft: Path, oid: str, request: HubRequest) -> None:
        """Make a large object visible if it is what its name says."""
        with draft.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != oid or draft.stat().st_size != int(request.query["size"][0]):
            draft.unlink()
            raise HubProblem(400, "BadDigest")
        draft.replace(self.hub.object_path(oid))
        kind, name = request.query["repo"][0].split(":", 1)
        with self.hub.lock:
            self.hub.repos[kind, name].objects.add(oid)

    def storage(self, request: HubRequest, draft: Path) -> HubResponse:
        """The other host: PUT of an object (its bytes are in `draft`), and GET of one."""
        self.check_signature(request)
        oid = request.path.rpartition("/")[2]
        if request.method in {"GET", "HEAD"}:
            place = self.hub.object_path(oid)
            if not re.fullmatch(r"[0-9a-f]{64}", oid) or not place.is_file():
                raise HubProblem(404, "NoSuchKey")
            headers = {
                "ETag": f'"{oid}"',
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            return HubResponse(200, b"", headers, file=place, is_ranged=True)
        self.keep(draft, oid, request)
        return HubResponse(200, b"")
