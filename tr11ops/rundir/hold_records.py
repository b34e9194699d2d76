"""What is known of a hold and of a release of queued work, wherever it is kept."""

from __future__ import annotations

from trainer.contract.record import Record


class HoldRecord(Record):
    """Queued work that tr11 holds: `job` is the number of a job or an array, or names tasks of one
    ("12_[4-10]").

    `is_for_fault`: it must not start before a person has looked; else it was held for a kill
    switch, a pause, or by a person's command. `time` is in seconds since the epoch.
    """

    job: str
    who: str = ""
    time: float | None = None
    why: str = ""
    is_for_fault: bool = False


class ReleaseRecord(Record):
    """Work that tr11 released: its name, and when (seconds since the epoch)."""

    job: str
    time: float
