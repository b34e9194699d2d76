"""A file of the run directory that cannot be read as what it should be."""

from __future__ import annotations

from trainer.contract.record import Record


class Damage(Record):
    """One damaged state file: where, what is wrong with it, and what is missing for it.

    `is_set_aside`: the next launch, or the watchdog when it acts, moves it out of the way.
    `is_newer`: nothing is wrong with it, but a newer tr11 wrote it, and this one may not understand
    all of it.
    """

    path: str
    what: str
    without: str
    is_set_aside: bool
    is_newer: bool = False
