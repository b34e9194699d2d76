"""What status, hand-over and report read of the alerts. Reading changes nothing; what cannot be read is Unknown."""

from __future__ import annotations

from dataclasses import dataclass

from tr11ops.alerts.book import Alert, Incident
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.store import read_book
from tr11ops.alerts.wording import Backlog
from tr11ops.evidence import observed
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Observed, Unknown

__all__ = ["Alert", "Incident", "Waiting", "backlog", "incidents", "open_alerts", "waiting"]


@dataclass(frozen=True)
class Waiting:
    """Messages that no server has taken yet: how many, when the oldest was written, and the last thing that failed."""

    count: int = 0
    since: float | None = None
    trouble: str = ""


def open_alerts(directory: RunDirectory) -> Observed[tuple[Alert, ...]]:
    """The open alerts, the most severe first; empty where no look was ever made."""
    return observed(lambda: read_book(directory).book.open_alerts)


def incidents(directory: RunDirectory) -> Observed[tuple[Incident, ...]]:
    """Every incident, also those that are over, oldest first."""
    return observed(lambda: read_book(directory).book.incidents())  # noqa: PLW0108  the book is read inside


def waiting(directory: RunDirectory) -> Observed[Waiting]:
    """What waits to be sent."""

    def read() -> Waiting:
        entries = waiting_entries(directory)
        trouble = next((entry.trouble for entry in entries if entry.trouble), "")
        return Waiting(len(entries), min((entry.message.time for entry in entries), default=None), trouble)

    return observed(read)


def backlog(directory: RunDirectory) -> Backlog | None:
    """What waits, as the digest says it; None where it is unknown."""
    left = waiting(directory)
    return None if isinstance(left, Unknown) else Backlog(left.count, left.since)
