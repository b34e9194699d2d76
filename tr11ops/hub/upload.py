"""Publishing a checkpoint as a model: an export in a work folder, then one commit that holds all of
it.

    state/upload/global_stepN-IDENTITY-DTYPE/model/        what the export wrote
    state/upload/global_stepN-IDENTITY-DTYPE/export.json   its files with their digests; written when it is whole

The large files reach the hub first and the commit comes last, so the model appears whole or not at
all. After a kill at any point the same call goes on: a finished export is used again when its
digests hold, and the hub is not sent what it has.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from tr11ops.base.errors import HubConflict, HubMissing, UploadRefused
from tr11ops.base.units import size
from tr11ops.hub.base import Add, Delete, HubFile, Operation, Progress, Repository
from tr11ops.hub.client import Hub
from tr11ops.hub.model_card import identity_in
from trainer.contract.documents import record_of
from trainer.contract.files import write_json
from trainer.contract.manifest import FileEntry, file_digest
from trainer.contract.record import Record
from trainer.contract.sharing import make_shared

CARD = "README.md"
CONFIG = "config.json"
EXPORT_FILE = "export.json"
MODEL_FOLDER = "model"
# What an earlier export may have left at the hub and this one does not write: a reader would mix
# the two.
OURS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
)
FOREIGN = ("*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.gguf", CONFIG)
LARGEST_CARD_BYTES = 1 << 20
CONFLICTS = 5  # commits of others that are waited out
ROOM = 1.02  # of an export, over its tensors: configuration, tokenizer, headers
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Work(Record):
    """The folder of one upload. `options` names what else than the checkpoint the export is made
    from.
    """

    folder: Path
    options: str = ""

    @property
    def model(self) -> Path:
        return self.folder / MODEL_FOLDER

    @property
    def record(self) -> Path:
        return self.folder / EXPORT_FILE

    def finished(self, advance: Callable[[int], None]) -> tuple[FileEntry, ...] | None:
        """The files of a finished export, every byte of which was read again; None when it has to
        be made again.

        `advance` is told bytes as they are read. Raises OSError as the file system does.
        """
        entries = self.recorded()
        if entries is None:
            return None
        for entry in entries:
            path = self.model / entry.path
            try:
                if path.stat().st_size != entry.bytes or file_digest(path) != entry.digest:
                    return None
            except FileNotFoundError:
                return None
            advance(entry.bytes)
        return entries

    def recorded(self) -> tuple[FileEntry, ...] | None:
        """The files as the record has them, unread; None when there is no record, or one of other
        options.
        """
        try:
            value = json.loads(self.record.read_text(encoding="utf-8"))
            if value["options"] == self.options:
                return files_of(value)
            return None
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def record_export(self, result: Mapping[str, Any]) -> tuple[FileEntry, ...]:
        """Note that the export is whole. Raises UploadRefused when its result names no files, and
        OSError.
        """
        try:
            entries = files_of(result)
        except ValueError as error:
            raise UploadRefused(f"the export's result cannot be used: {error}") from None
        write_json(
            self.record, {"options": self.options, "files": [asdict(entry) for entry in entries]}
        )
        return entries

    def make(self, needed: int) -> None:
        """Make the folder, where `needed` bytes must be free. Raises UploadRefused and OSError."""
        make_shared(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UploadRefused(
                f"{self.folder}: {size(free)} are free and the export takes {size(needed)}; --work names another folder"
            )

    def remove(self) -> None:
        """Remove what an upload makes, and the folder if nothing else is in it."""
        self.record.unlink(missing_ok=True)
        # and what killed exports left
        for path in (self.model, *self.folder.glob(f".{MODEL_FOLDER}.*")):
            shutil.rmtree(path, ignore_errors=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST}:
                raise


def files_of(value: Mapping[str, Any]) -> tuple[FileEntry, ...]:
    """The files that an export's result names. Raises ValueError when it is none."""
    try:
        found = record_of(tuple[FileEntry, ...], value["files"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"it names no files ({type(error).__name__})") from None
    names = {entry.path for entry in found}
    if not found or not all(_SAFE.fullmatch(name) for name in names) or CONFIG not in names:
        raise ValueError("it names files that are not a model's")
    return found


def overwritten(hub: Hub, repository: Repository, identity: str) -> tuple[str | None, str]:
    """The destination's newest commit (None: it will be made), and what is there that is not of
    this run ("": nothing).

    Raises HubUnavailable and HubPermanentError.
    """
    try:
        head = hub.head(repository)
    except HubMissing:
        return None, ""
    tree = hub.list_tree(repository, head)
    card = tree.get(CARD)
    if card is not None:
        text = hub.read(repository, CARD, 0, LARGEST_CARD_BYTES, head).decode("utf-8", "replace")
        owner = identity_in(text)
        if owner == identity:
            return head, ""
        return (
            head,
            "a model of another run"
            if owner is not None
            else "a README.md that tr11 did not write",
        )
    foreign = sorted(
        path for path in tree if any(fnmatchcase(path, pattern) for pattern in FOREIGN)
    )
    return head, f"another model ({foreign[0]})" if foreign else ""


def stale(tree: Mapping[str, HubFile], files: Iterable[str]) -> tuple[str, ...]:
    """What an earlier export left in the repository and this one does not replace."""
    kept = set(files)
    return tuple(
        sorted(
            path
            for path in tree
            if path not in kept and any(fnmatchcase(path, pattern) for pattern in OURS)
        )
    )


def publish(
    hub: Hub,
    repository: Repository,
    work: Work,
    files: tuple[FileEntry, ...],
    card: str,
    message: str,
    progress: Progress | None = None,
) -> str:
    """Commit the model and its card as one, on a repository that is there; returns the commit's id.

    Raises HubUnavailable, HubPermanentError, FileChanged and OSError.
    """
    additions = [
        Add(entry.path, work.model / entry.path, entry.bytes, entry.digest) for entry in files
    ]
    for left in reversed(range(CONFLICTS)):
        head = hub.head(repository)
        tree = hub.list_tree(repository, head)
        gone = [Delete(path) for path in stale(tree, (CARD, *(entry.path for entry in files)))]
        operations: list[Operation] = [*additions, Add(CARD, card.encode("utf-8")), *gone]
        try:
            return hub.commit(repository, operations, message, parent=head, progress=progress)
        except HubConflict:
            if not left:
                raise
    raise AssertionError("unreachable")
