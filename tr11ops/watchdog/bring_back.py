"""What was recorded on this machine while the run directory could not be written is brought into
it.

Each file is whole in the run directory before it leaves the fallback directory, under a name that
does not change: a kill at any point repeats and loses nothing. Another machine's records are
brought back by that machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from tr11ops.alerts.changes import replies_folder
from tr11ops.alerts.outbox import take_in
from tr11ops.alerts.state import AlertState, merged
from tr11ops.alerts.store import commit, read_alert_state
from tr11ops.base.observed import cause
from tr11ops.rundir.cron_records import cron_folder, take_in_rounds
from tr11ops.rundir.fallback import abandoned_fallback, require_room
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared, open_shared, write_atomically


def bring_back(directory: RunDirectory) -> tuple[str, ...]:
    """Bring it back if the run directory can be written now, and no one else is at it. Returns
    notes, one line each.
    """
    if not directory.exists:
        return ()
    try:
        with abandoned_fallback(directory) as local:
            if local is None or not any(path.is_file() for path in local.root.rglob("*")):
                return ()
            try:
                require_room(directory.paths.state)
            except OSError:
                return ()  # as before: anyone who must write says so
            _alerts(local, directory)
            take_in_rounds(directory, local)
            _replies(replies_folder(local), replies_folder(directory))
            _rounds_output(cron_folder(local), cron_folder(directory))
            _journal(local.journal, directory.journal)
            return (
                f"what was recorded on this machine meanwhile is in the run directory again: {local.root}",
            )
    except (OSError, ValueError) as error:
        return (f"what was recorded on this machine cannot be brought back yet: {cause(error)}",)


def _alerts(local: RunDirectory, directory: RunDirectory) -> None:
    """The alert state, and what was sent or waits. Raises OSError, ValueError."""
    alert_state = read_alert_state(local).alert_state
    if alert_state != AlertState():
        commit(directory, lambda home: (merged(home, alert_state), None))
    take_in(directory, local)
    versions = local.paths.state / "alerts"
    for path in (*versions.glob("book.d/*"), versions / "book.json"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        for path in versions.glob("claims/*"):
            path.unlink()


def _replies(local: Path, home: Path) -> None:
    """People's answers by file, those that wait and those that were obeyed."""
    for path in local.rglob("*"):
        if path.is_file():
            target = home / path.relative_to(local)
            make_shared(target.parent)
            shutil.move(path, target)


def _rounds_output(local: Path, home: Path) -> None:
    """What the rounds wrote goes behind what those before them wrote; their claims are over."""
    for path in sorted(local.glob("*.log")):
        make_shared(home)
        with os.fdopen(open_shared(home / path.name, os.O_WRONLY | os.O_APPEND), "ab") as stream:
            stream.write(path.read_bytes())
        path.unlink()
    for path in local.glob("claims/*/*.json"):
        path.unlink()


def _journal(local: Path, home: Path) -> None:
    """Each file becomes a writer of its own: its chain begins at its first line."""
    for path in sorted(local.glob("*.jsonl")):
        content = path.read_bytes()
        make_shared(home)
        name = f"{path.stem}-{hashlib.sha256(content).hexdigest()[:8]}.jsonl"
        write_atomically(home / name, content.decode("utf-8"))
        path.unlink()
