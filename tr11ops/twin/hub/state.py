"""What a hub knows: accounts, repositories, every commit with all its files, the large objects in a
folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainer.contract.record import JsonObject, Record

LARGEST_REGULAR = 10 << 20  # bytes; a larger file must be a large object
_LARGE = """
    *.7z *.arrow *.bin *.bz2 *.ckpt *.ftz *.gz *.h5 *.joblib *.lfs.* *.mlmodel *.model *.msgpack *.npy
    *.npz *.onnx *.ot *.parquet *.pb *.pickle *.pkl *.pt *.pth *.rar *.safetensors saved_model/**/*
    *.tar.* *.tar *.tflite *.tgz *.wasm *.xz *.zip *.zst *tfevents*
"""
DEFAULT_ATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in _LARGE.split()
)


class HubProblem(Exception):
    """An answer that is an error: HTTP status, text, and the hub's error code."""

    def __init__(self, status: int, text: str, code: str = "", **more: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code
        self.more = more


class HubAccount(Record):
    name: str
    may_write: bool = True
    organizations: tuple[str, ...] = ()

    def is_in(self, owner: str) -> bool:
        return owner == self.name or owner in self.organizations


class Blob(Record):
    """A file of a commit. `oid` is git's; `sha256` is set for a large object."""

    oid: str
    size: int
    sha256: str | None = None
    pointer_size: int = 0


class Commit(Record):
    id: str
    parent: str | None
    title: str
    message: str
    author: str
    time: float
    files: dict[str, Blob]

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@dataclass
class Repo:
    name: str
    kind: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)  # oldest first
    branches: dict[str, str] = field(default_factory=dict)
    # sha256 of the large objects that were sent to it
    objects: set[str] = field(default_factory=set)

    def resolve(self, revision: str) -> Commit:
        found = self.commits.get(self.branches.get(revision, revision))
        if found is None:
            raise HubProblem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def lineage(self, revision: str) -> list[Commit]:
        """The commits of a revision, newest first."""
        found = []
        current = self.resolve(revision)
        while True:
            found.append(current)
            if current.parent is None:
                return found
            current = self.commits[current.parent]


class HubState:
    """The state; every method that changes it holds the lock."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.clock = clock
        self.lock = threading.RLock()
        self.accounts: dict[str, HubAccount] = {}  # by token
        self.repos: dict[tuple[str, str], Repo] = {}
        self.small: dict[str, bytes] = {}  # content of regular files by oid
        # the chunked storage, where there is one; its files are not looked into
        self.chunks: Path | None = None

    def repo(self, kind: str, name: str, account: HubAccount | None) -> Repo:
        """A repository that this account may see."""
        found = self.repos.get((kind, name))
        if found is None or (
            found.private and (account is None or not account.is_in(name.split("/", maxsplit=1)[0]))
        ):
            raise HubProblem(
                401 if account is None else 404, "Repository not found", "RepoNotFound"
            )
        return found

    def create(self, kind: str, name: str, private: bool, author: str) -> Repo:
        with self.lock:
            if (kind, name) in self.repos:
                raise HubProblem(409, f"You already created this {kind} repo: {name}")
            repo = self.repos[kind, name] = Repo(name, kind, private)
            self._add(
                repo,
                "main",
                parent=None,
                files={".gitattributes": self.put_small(DEFAULT_ATTRIBUTES.encode())},
                title="initial commit",
                message="",
                author=author,
            )
            return repo

    def put_small(self, content: bytes) -> Blob:
        oid = git_blob(content)
        self.small[oid] = content
        return Blob(oid, len(content))

    def object_path(self, sha256: str) -> Path:
        return self.folder / sha256

    def large(self, sha256: str, size: int) -> Blob:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return Blob(git_blob(pointer), size, sha256, len(pointer))

    def content(self, blob: Blob) -> bytes:
        if blob.sha256:
            return self.object_path(blob.sha256).read_bytes()
        return self.small[blob.oid]

    def uses_large(self, commit: Commit, path: str, size: int, sample: bytes) -> bool:
        """Whether a file is to be sent as a large object."""
        rules = commit.files.get(".gitattributes")
        by_rule = is_large_by_rule(self.content(rules).decode() if rules else "", path)
        return by_rule or size > LARGEST_REGULAR or b"\0" in sample

    def commit(self, repo: Repo, branch: str, lines: Iterable[bytes], author: str) -> Commit:
        """A commit as the client sends it: one JSON object a line."""
        with self.lock:
            if branch not in repo.branches:
                raise HubProblem(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            head = repo.resolve(branch)
            files = dict(head.files)
            title = ""
            message = ""
            for line in lines:
                entry = json.loads(line)
                key = entry["key"]
                value = entry["value"]
                if key == "header":
                    title = value["summary"]
                    message = value.get("description", "")
                    if value.get("parentCommit") not in {None, head.id}:
                        raise HubProblem(
                            412, "A commit has happened since. Please refresh and try again."
                        )
                else:
                    self._change(repo, files, key, value)
            if not title:
                raise HubProblem(400, "the commit has no summary")
            return self._add(
                repo,
                branch,
                parent=head.id,
                files=files,
                title=title,
                message=message,
                author=author,
            )

    def _change(self, repo: Repo, files: dict[str, Blob], key: str, value: JsonObject) -> None:
        path = value["path"]
        if path.startswith("/") or any(
            part in {"", ".", "..", ".git"} for part in path.rstrip("/").split("/")
        ):
            raise HubProblem(400, f"Invalid path: {path}")
        if key == "file":
            if value.get("encoding") == "base64":
                content = base64.b64decode(value["content"])
            else:
                content = value["content"].encode()
            if len(content) > LARGEST_REGULAR:
                raise HubProblem(
                    400,
                    "Your push was rejected because it contains files larger than 10 MiB. Please use "
                    f"https://git-lfs.github.com/ to store larger files. Offending files: - {path}",
                )
            files[path] = self.put_small(content)
        elif key == "lfsFile":
            if value["oid"] in repo.objects:
                files[path] = self.large(
                    value["oid"], self.object_path(value["oid"]).stat().st_size
                )
            elif self.chunks is not None:
                files[path] = self.large(value["oid"], value["size"])
            else:
                raise HubProblem(
                    400,
                    "Your push was rejected because an LFS pointer pointed to a file that does not exist. "
                    f"Offending file: - {path}",
                )
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise HubProblem(
                    404, f"A file with this name doesn't exist: {path}", "EntryNotFound"
                )
        elif key == "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
        else:
            raise HubProblem(400, f"unknown operation {key}")

    def _add(
        self,
        repo: Repo,
        branch: str,
        parent: str | None,
        files: dict[str, Blob],
        title: str,
        message: str,
        author: str,
    ) -> Commit:
        now = self.clock()
        listing = sorted((path, blob.oid) for path, blob in files.items())
        name = hashlib.sha1(
            json.dumps([repo.name, parent, title, message, now, listing]).encode()
        ).hexdigest()
        commit = Commit(
            name, parent, title=title, message=message, author=author, time=now, files=files
        )
        repo.commits[name] = commit
        repo.branches[branch] = name
        return commit


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large_by_rule(attributes: str, path: str) -> bool:
    """Whether .gitattributes makes the file a large object; the last rule that fits holds."""
    answer = False
    for line in attributes.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, *words = line.split()[:1] + line.split()[1:]
        else:
            pattern, *words = [""]
        if pattern and re.fullmatch(_as_regex(pattern), path):
            for word in words:
                if word == "filter=lfs":
                    answer = True
                elif word in {"-filter", "!filter"} or word.startswith("filter="):
                    answer = False
    return answer


def _as_regex(pattern: str) -> str:
    anchored = "/" in pattern.rstrip("/")
    parts = re.split(r"(/\*\*/|^\*\*/|/\*\*$|\*|\?)", pattern.lstrip("/"))
    table = {"/**/": "/(?:.*/)?", "**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
    body = "".join(table.get(part) or re.escape(part) for part in parts)
    if anchored:
        return body
    return f"(?:.*/)?{body}"
