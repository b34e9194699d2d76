"""One node that a run must not use, or that is under suspicion: who said so, since when, why."""

from __future__ import annotations

from enum import StrEnum

from trainer.contract.record import Finite, Record


class NodeStanding(StrEnum):
    """How far a node has gone from suspicion to exclusion (see `tr11ops.rundir.node_standing`)."""

    RETURNED = "returned"  # taken off the list: trusted again once it has trained well
    SUSPECT = "suspect"  # after one attribution
    AVOID = "avoid"  # after two independent ones: not used while enough others are free
    EXCLUDE = "exclude"  # after a third of the same family, by proof, or by a person


class Exclusion(Record):
    """One node that must not be used: by the run's own list, or by a queued job's exclude list.

    `until` is when it is due for a check (None: never); `evidence` quotes what was seen, `job_id`
    the attempt in which. `state`: a NodeStanding. A suspect on the list is left out for one try.
    `fault`: the family of faults that it was suspected for, "" where it is of another kind.
    `good_seconds`: how long it has trained well since.
    """

    node: str
    why: str = ""
    owner: str = ""
    until: Finite | None = None
    evidence: tuple[str, ...] = ()
    since: Finite | None = None
    job_id: str = ""
    state: str = NodeStanding.EXCLUDE.value
    fault: str = ""
    good_seconds: Finite = 0.0
