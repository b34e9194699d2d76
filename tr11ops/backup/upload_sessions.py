"""Where this user's unfinished uploads are remembered, so that one that was killed goes on in
mid-file.

    ~/.local/state/tr11/uploads/KEY.json       ($XDG_STATE_HOME/tr11/uploads where that is set)

Anyone who knows the address of an upload session can write to it: it is a secret, readable by its
user alone, and never in a run directory. Losing one costs sending that file again, no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.private_file import private_text
from trainer.contract.documents import document, record_of_text
from trainer.contract.files import write_atomically
from trainer.contract.record import Finite, Record


class UploadSession(Record):
    """One upload that was begun: `target` is the session's path and query at the server. Times
    since the epoch.
    """

    server: str
    bucket: str
    name: str
    size: int
    identity: str
    target: str
    begun: Finite

    @property
    def key(self) -> str:
        return session_key(
            self.server, self.bucket, name=self.name, size=self.size, identity=self.identity
        )


def session_key(server: str, bucket: str, name: str, size: int, identity: str) -> str:
    """What an upload is found again by."""
    return hashlib.sha256(
        "\0".join((server, bucket, name, str(size), identity)).encode("utf-8")
    ).hexdigest()[:40]


def sessions_folder(environment: Mapping[str, str]) -> Path:
    """Where a user's sessions are kept."""
    state = environment.get("XDG_STATE_HOME") or str(
        Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    )
    return Path(state) / "tr11" / "uploads"


class UploadSessions:
    """The sessions in a folder. Nothing here fails: where the folder cannot be used, uploads begin
    again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> UploadSession | None:
        """A session that was kept; None when there is none, or none that this user alone could
        write.
        """
        return _read(self._path(key))

    def keep(self, session: UploadSession) -> None:
        """Keep a session, replacing an older one of the same upload."""
        # a home that is full or read-only costs the resumption, not the upload
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._path(session.key), json.dumps(document(session)), 0o600)

    def forget(self, key: str) -> None:
        """Forget a session: it has ended."""
        with suppress(OSError):
            self._path(key).unlink()

    def __iter__(self) -> Iterator[UploadSession]:
        with suppress(OSError):
            for path in sorted(self._folder.glob("*.json")):
                session = _read(path)
                if session is not None:
                    yield session

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _read(path: Path) -> UploadSession | None:
    try:
        session = record_of_text(UploadSession, private_text(path))
    except ValueError:
        return None
    if session.target.startswith("/") and session.key == path.stem:
        return session
    return None
