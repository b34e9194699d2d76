"""Copies to a bucket, and restores, in processes that are killed (-9) at a given moment.

A moment is a request's beginning, its answer, or a change of a file here.
"""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

from httpcore2._sync.http11 import HTTP11Connection

from tests.tr11ops.backup.forked_deeds import ForkingProcess, die_at, serve

MOMENTS = (
    *(
        (HTTP11Connection, f"_{name}")
        for name in ("send_request_headers", "send_event", "receive_response_headers")
    ),
    *((os, name) for name in ("replace", "rename", "unlink", "pwrite", "fsync", "mkdir")),
)


class RemoteNursery(ForkingProcess):
    """The process that forks one for each action."""

    module = "tests.tr11ops.backup.remote_nursery"

    def copy(self, at: int, **what: Any) -> int:
        """Copy a checkpoint and die at the `at`-th moment (0: never); returns how many there were,
        -1 when killed.
        """
        return self._do("copy", at, what)

    def restore(self, at: int, **what: Any) -> int:
        """Restore one, and the same."""
        return self._do("restore", at, what)

    def _do(self, deed: str, at: int, what: dict[str, Any]) -> int:
        code, moments = self.order(deed=deed, at=at, **what)
        assert code in (0, -signal.SIGKILL), code
        return moments if code == 0 else -1


def _copy(what: dict[str, Any]) -> int:
    from tests.tr11ops.backup.copy_cases import copy, quick
    from tr11ops.backup.folder import Owner
    from tr11ops.backup.remote import open_remote

    moments = die_at(what["at"], MOMENTS)
    archive = open_remote(
        what["url"],
        what["options"],
        owner=Owner("tr11-test"),
        environment={"XDG_STATE_HOME": what["state"]},
    )
    copy(archive, Path(what["folder"]), quick(parallel=what["parallel"]), format=what["format"])
    return moments[0]


def _restore(what: dict[str, Any]) -> int:
    from tests.tr11ops.backup.copy_cases import make_archive, quick
    from tr11ops.backup.restore import restore_checkpoint
    from tr11ops.backup.survey import read_receipt

    archive = make_archive(Path(what["store"]))
    receipt = read_receipt(archive, what["location"])
    assert receipt is not None
    moments = die_at(what["at"], MOMENTS)
    restore_checkpoint(archive, receipt, Path(what["into"]), quick(parallel=2))
    return moments[0]


def main() -> None:
    for module in (
        "gcsfs.core",
        "tests.tr11ops.backup.copy_cases",
        "tr11ops.backup.remote",
        "tr11ops.backup.restore",
    ):
        importlib.import_module(module)
    serve(lambda what: _copy(what) if what["deed"] == "copy" else _restore(what))


if __name__ == "__main__":
    main()
