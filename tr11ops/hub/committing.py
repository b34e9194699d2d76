"""One commit to the hub, made once however often its answer is lost."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils import build_hf_headers, get_session, paginate
from huggingface_hub.utils._runtime import is_xet_available  # as the library asks itself

from tr11ops.base.errors import FileChanged, ForeignAnswer, HubConflict, HubUnavailable
from tr11ops.base.http import json_object
from tr11ops.hub.base import Delete, HubCopy, Operation, Progress, Repository
from tr11ops.hub.masking import Mask, Masks
from trainer.contract.record import JsonObject, Record

# What is sent to the hub: bytes, or the first so many bytes of a file that may grow meanwhile.


class FileView(io.BufferedIOBase):
    """The first `size` bytes of a file with `masks` over them, readable and seekable.

    Nothing is copied; the file is open until `close`. `told` is called with the position after each
    read. It has no file descriptor for others: they would ask it for the size of a file that has
    grown since. Raises FileChanged when the file became shorter, OSError as the file system.
    """

    def __init__(
        self,
        path: Path,
        size: int | None = None,
        told: Callable[[int], None] | None = None,
        masks: Sequence[Mask] = (),
    ) -> None:
        self._stream = path.open("rb")
        self._path = path
        self._told = told
        self._masks = Masks(masks)
        self._position = 0
        there = os.fstat(self._stream.fileno()).st_size
        self.size = there if size is None else size
        if there < self.size:
            self._stream.close()
            raise FileChanged(f"{path.name}: became shorter")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError("a position before the beginning")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.size - self._position)
        if size is None or size < 0:
            wanted = left
        else:
            wanted = min(size, left)
        self._stream.seek(self._position)
        piece = self._stream.read(wanted)
        if len(piece) < wanted:
            raise FileChanged(f"{self._path.name}: became shorter while it was sent")
        piece = self._masks.over(piece, self._position)
        self._position += len(piece)
        if self._told is not None:
            self._told(self._position)
        return piece

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


# Large files into the hub's chunked storage (Xet): of a log that only grew, no more than what is
# new is sent.
#
# The library can do this for whole files alone; a log grows while it is sent, so its first bytes
# are streamed here. Where a hub has no such storage, or a firewall lies before it, the caller sends
# the file whole, as a plain large object.

SMALLEST_BYTES = 16 << 20  # below it one plain request is cheaper than the questions of this way
PIECE_BYTES = 4 << 20
# of the storage engine: by itself it tries for many minutes, in which no one can stop it
SETTINGS = {
    "client.connect_timeout": "15s",
    "client.read_timeout": "60s",
    "client.retry_max_attempts": 3,
    "client.retry_base_delay": "1s",
    "client.retry_max_duration": "60s",
    "telemetry.enabled": False,
}


class Chunked(Record):
    """One file that is to be sent so: `sha256` of all of the view, in hexadecimal digits."""

    path: str
    view: FileView
    sha256: str


def send_chunked(api: HfApi, repository: Repository, files: Sequence[Chunked]) -> dict[str, str]:
    """Send the files; returns each path's name in that storage, or nothing where it could not be
    done.

    $HF_HUB_DISABLE_XET switches it off, as for the library. Raises FileChanged.
    """
    if not is_xet_available():
        return {}
    headers = build_hf_headers(token=api.token)
    branch = quote(repository.branch, safe="")
    address = f"{api.endpoint}/api/{repository.kind}s/{repository.name}/xet-write-token/{branch}"
    access = _access(address, headers)
    if access is None:
        return {}
    try:
        return _stream(address, headers, access, files)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # the library's own words for a network that fails, and refusals
        for file in files:
            file.view.seek(0)
        return {}


def _access(address: str, headers: dict[str, str]) -> JsonObject | None:
    """The short-lived token and where it is good for; None where there is no such storage."""
    answer = get_session().get(address, headers=headers)
    if answer.status_code != 200:
        return None
    try:
        told = json_object(answer.content)
        return {
            "endpoint": str(told["casUrl"]),
            "token": str(told["accessToken"]),
            "expiry": int(told["exp"]),
        }
    except (ForeignAnswer, ValueError, KeyError, TypeError, OverflowError):
        return None


def _stream(
    address: str, headers: dict[str, str], access: JsonObject, files: Sequence[Chunked]
) -> dict[str, str]:
    from hf_xet import XetConfig, XetSession
    from huggingface_hub.utils._xet import xet_headers_without_auth

    names = {}
    with XetSession(XetConfig().with_config(SETTINGS)).new_upload_commit(
        endpoint=access["endpoint"],
        token=access["token"],
        token_expiry_unix_secs=access["expiry"],
        token_refresh_url=address,
        token_refresh_headers=headers,
        custom_headers=xet_headers_without_auth(headers),
    ) as commit:
        for file in files:
            stream = commit.start_upload_stream(name=file.path, sha256=file.sha256)
            file.view.seek(0)
            while piece := file.view.read(PIECE_BYTES):
                stream.write(piece)
            names[file.path] = stream.finish().xet_info.hash
    return names


_Prepared: TypeAlias = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete
SENT_AT_ONCE = 4  # large files
SAMPLE_BYTES = 512  # by which the hub tells text from other files
MARK = "tr11-commit"  # before a commit's own word, in its description


@dataclass
class CommitAttempt:
    """One commit, tried until it is there. What was hashed and sent at one try is not at the next."""

    repository: Repository
    operations: tuple[Operation, ...]
    message: str
    parent: str | None
    progress: Progress | None
    opened: ExitStack

    def __post_init__(self) -> None:
        self._base: str | None = self.parent
        self._mark = f"{MARK} {secrets.token_hex(8)}"
        self._prepared: list[_Prepared] | None = None
        self._sources: list[io.BufferedIOBase] = []
        self._is_sent = False

    def __call__(self, api: HfApi) -> str:
        repository = self.repository
        if self._base is None:
            facts = api.repo_info(
                repository.name, repo_type=repository.kind, revision=repository.branch
            )
            self._base = commit_id(facts.sha)
        elif (
            self._is_sent
            and (found := with_mark(api, repository, self._mark, self._base)) is not None
        ):
            return found
        if self._prepared is None:
            self._prepared = [self._prepare(operation) for operation in self.operations]
        for source in self._sources:  # the library begins where an earlier try of it broke off
            source.seek(0)
        self._is_sent = True
        self._send_ahead(api, self._prepared)
        try:
            answer = api.create_commit(
                repository.name,
                self._prepared,
                commit_message=self.message,
                commit_description=self._mark,
                repo_type=repository.kind,
                revision=repository.branch,
                num_threads=SENT_AT_ONCE,
                parent_commit=self._base,
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            return self._moved(api, self._base)
        made = commit_id(answer.oid)
        additions = [
            operation for operation in self._prepared if isinstance(operation, CommitOperationAdd)
        ]
        is_made = not additions or additions[0]._is_committed
        if not is_made and self.parent is not None and made != self.parent:
            # the branch has all of it already, by someone else's commit, and perhaps more than that
            raise HubConflict(f"{repository.name}: someone else has committed meanwhile", 412)
        return made

    def _send_ahead(self, api: HfApi, prepared: list[_Prepared]) -> None:
        """Send what the library alone would send badly.

        Large views go in chunks, where the hub has those; and what several files have in common
        goes once: the library would send it for all of them at once, from one source.
        """
        additions = [
            operation for operation in prepared if isinstance(operation, CommitOperationAdd)
        ]
        firsts = {addition.upload_info.sha256: addition for addition in reversed(additions)}
        large = [
            Chunked(addition.path_in_repo, addition.path_or_fileobj, digest.hex())
            for digest, addition in firsts.items()
            if isinstance(addition.path_or_fileobj, FileView)
            and addition.upload_info.size >= SMALLEST_BYTES
            and not addition._is_uploaded
        ]
        if large:
            sent = send_chunked(api, self.repository, large)
            for addition in additions:
                if addition.path_in_repo in sent:
                    # private names: the library has no other way to be told that a file was sent,
                    # here and below
                    addition._is_uploaded, addition._upload_mode = True, "lfs"
        if len(firsts) < len(additions):
            api.preupload_lfs_files(
                self.repository.name,
                list(firsts.values()),
                repo_type=self.repository.kind,
                revision=self.repository.branch,
                num_threads=SENT_AT_ONCE,
                free_memory=False,
            )

    def _moved(self, api: HfApi, base: str) -> str:
        """The branch is not where it was: by our own commit whose answer was lost, or by someone
        else's.
        """
        found = with_mark(api, self.repository, self._mark, base)
        if found is not None:
            return found
        if self.parent is not None:
            raise HubConflict(f"{self.repository.name}: someone else has committed meanwhile", 412)
        self._base = self._prepared = None  # what changes is found again
        raise HubUnavailable(f"{self.repository.name}: someone else has committed meanwhile")

    def _prepare(self, operation: Operation) -> _Prepared:
        if isinstance(operation, Delete):
            return CommitOperationDelete(operation.path, is_folder=False)
        if isinstance(operation, HubCopy):
            return CommitOperationCopy(operation.source, operation.path)
        if isinstance(operation.content, bytes):
            # a view here too: the library sends plain bytes in a way of its own where it can,
            # without our time-outs
            source = io.BytesIO(operation.content)
            self._sources.append(source)
            return CommitOperationAdd(operation.path, source)
        path, progress = operation.path, self.progress
        is_hashed = False

        def told(position: int) -> None:
            if is_hashed and progress is not None:
                progress(path, position)

        view = self.opened.enter_context(
            FileView(operation.content, operation.size, told, operation.masks)
        )
        self._sources.append(view)
        if operation.sha256 is None:
            # reads all of it, for its digest
            prepared = CommitOperationAdd(path, cast(BinaryIO, view))
        else:
            sample = view.read(SAMPLE_BYTES)
            view.seek(0)
            prepared = CommitOperationAdd(path, b"")
            prepared.path_or_fileobj = cast(BinaryIO, view)
            prepared.upload_info = UploadInfo(view.size, sample, bytes.fromhex(operation.sha256))
        is_hashed = True
        return prepared


def with_mark(api: HfApi, repository: Repository, mark: str, until: str) -> str | None:
    """The id of the commit with this word in its description, of those that are newer than `until`."""
    address = f"{api.endpoint}/api/{repository.kind}s/{repository.name}/commits/{quote(repository.branch, safe='')}"
    for commit in paginate(address, params={}, headers=build_hf_headers(token=api.token)):
        name = commit_id(commit.get("id") if isinstance(commit, dict) else None)
        if name == until:
            return None
        if mark in str(commit.get("message", "")):
            return name
    return None


def commit_id(value: object) -> str:
    """The id of a commit in an answer. Raises JSONDecodeError when there is none: it was no hub's
    answer.
    """
    if not isinstance(value, str) or not value:
        raise json.JSONDecodeError("the answer names no commit", "", 0)
    return value
