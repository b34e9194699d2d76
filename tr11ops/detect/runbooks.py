"""Which page of `runbooks/` treats a detector's findings."""

from __future__ import annotations

# Where a page of another name says what to do, because it treats more than one sign of the same trouble.
_PAGES = {
    "held": "array-held.md",
    "nodes-short": "queued-too-long.md",
    "two-attempts": "two-trainers.md",
    "checkpoint-overdue": "save-failed.md",
    "loss-not-finite": "spike.md",
    "loss-spike": "spike.md",
    "gradient-norm": "spike.md",
    "filesystem-filling": "filesystem-full.md",
    "counters-jump": "loss-differs-after-restart.md",
}


def page_of(detector: str) -> str:
    """The file name of a detector's page in `runbooks/`: the detector's own name, unless another page treats it."""
    return _PAGES.get(detector, f"{detector}.md")
