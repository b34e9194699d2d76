"""Whose archive a bucket is: `tr11-archive.json` at its root names the run, as in a folder. Read before writing."""

from __future__ import annotations

import json
import threading

from tr11ops.backup.base import Archive, ArchiveRefused
from tr11ops.backup.folder import MARKER_FILE, marker_text

LARGEST_BYTES = 64 << 10


class RunMarker:
    """The marker of one archive; `run` "" writes without one."""

    def __init__(self, archive: Archive, run: str, run_id: str = "") -> None:
        self._archive = archive
        self._run, self._run_id = run, run_id
        self._lock = threading.RLock()  # `put` may come back here
        self._is_ours = not run

    def require(self) -> None:
        """Mark the archive as the run's, once. Raises ArchiveRefused when it is another run's."""
        with self._lock:
            if self._is_ours:
                return
            found = self._archive.look(MARKER_FILE)
            if found is None:
                self._is_ours = True
                try:
                    self._archive.put(MARKER_FILE, marker_text(self._run, self._run_id).encode("utf-8"))
                except BaseException:
                    self._is_ours = False
                    raise
                return
            owner = self._owner(found.bytes)
            if owner != self._run:
                raise ArchiveRefused(
                    f"{self._archive.address} is the archive of {owner!r}, not of {self._run!r}; "
                    "name another path in backup.url"
                )
            self._is_ours = True

    def _owner(self, size: int) -> str:
        try:
            if size > LARGEST_BYTES:
                raise ValueError
            return str(json.loads(b"".join(self._archive.read(MARKER_FILE)))["run"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ArchiveRefused(
                f"{self._archive.address}/{MARKER_FILE} cannot be read; it names the run that the archive belongs to"
            ) from None
