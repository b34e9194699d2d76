"""One node that a run must not use: who excluded it, since when, why."""

from __future__ import annotations

from trainer.contract.record import Record


class Exclusion(Record):
    """One node that must not be used: by the run's own list, or by a queued job's exclude list.

    `until` is when it is due for a check (None: never); `evidence` quotes what was seen, `job_id` the attempt in which.
    """

    node: str
    why: str = ""
    owner: str = ""
    until: float | None = None
    evidence: tuple[str, ...] = ()
    since: float | None = None
    job_id: str = ""
