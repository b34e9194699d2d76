"""The lease of a run, as tests look at it."""

from __future__ import annotations

from trainer.contract.lease import LeaseClaim, LeaseFolder, parse_claim
from trainer.contract.paths import RunPaths


def read_lease(paths: RunPaths) -> LeaseClaim | None:
    """The newest claim on a run, living or not; None when there is none or it cannot be read as one."""
    epoch, content = LeaseFolder(paths).newest()
    if epoch:
        return parse_claim(epoch, content)
    return None
