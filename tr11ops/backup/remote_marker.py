"""Whose archive a bucket is: `tr11-archive.json` at its root names the run, as in a folder. Read before writing."""

from __future__ import annotations

import threading

from tr11ops.backup.base import Archive, ArchivePermanentError
from tr11ops.backup.folder import MARKER_FILE, marker_text
from tr11ops.backup.ownership import read_marker


class RunMarker:
    """The marker of one archive; `run` "" writes without one."""

    def __init__(self, archive: Archive, run: str, run_id: str = "") -> None:
        self._archive = archive
        self._run, self._run_id = run, run_id
        self._lock = threading.RLock()  # `put` may come back here
        self._is_ours = not run

    def require(self) -> None:
        """Mark the archive as the run's, once. Raises ArchivePermanentError when it is another run's."""
        with self._lock:
            if self._is_ours:
                return
            found = read_marker(self._archive, MARKER_FILE)
            if found is None:
                self._is_ours = True
                try:
                    self._archive.put(MARKER_FILE, marker_text(self._run, self._run_id).encode("utf-8"))
                except BaseException:
                    self._is_ours = False
                    raise
                return
            if found.get("run") != self._run:
                raise ArchivePermanentError(
                    f"{self._archive.address} is the archive of {found.get('run')!r}, not of {self._run!r}; "
                    "name another path in backup.url"
                )
            self._is_ours = True
