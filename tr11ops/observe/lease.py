"""Who holds the run's lease, and whether that trainer shows life."""

from __future__ import annotations

from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

ROLLBACK = "rollback"  # under which name a roll-back holds the run's lease


class LeaseHolder(Record):
    """Who holds the run's lease, and renewed it a moment ago. `job_id` is its scheduler's number,
    ROLLBACK of none.

    `process` is its number on its host, 0 where that is not known.
    """

    job_id: str
    host: str
    text: str
    process: int = 0

    def is_of(self, host: str) -> bool:
        """Is it a foreground training of this machine? Those are known by their processes."""
        return self.job_id.startswith("foreground") and self.host == host


def read_holder(paths: RunPaths, *clocks: float) -> LeaseHolder | None:
    """The living holder of the run's lease: its claim was renewed a moment ago, by any of `clocks`.
    Raises OSError.

    A claim that cannot be read is someone's as long as it is that young.
    """
    from trainer.contract.lease import living_claim

    claim = living_claim(paths, *clocks)
    if claim is None:
        return None
    if not claim.token:
        path = paths.state / "lease" / f"{claim.epoch}.json"
        return LeaseHolder("unknown", "", f"the trainer that made {path}, which cannot be read")
    return LeaseHolder(claim.job_id, claim.host, str(claim), claim.pid)
