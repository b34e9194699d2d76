"""Health checks that a site cannot make: what no node that trained could be asked is held against
none of them.

A check that could not be made tells nothing. Where the other nodes of the newest attempt could not
be asked either (no nvidia-smi on any of them, say), the run uses them all the same, and an excluded
one may come back likewise. Where they could, this node differs from them, and stays excluded until
it is asked, or a person forces it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tr11ops.health.base import CheckOutcome
from tr11ops.nodes.check import NodeCheck
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.state_file import read_json

Outcomes = Mapping[str, str]  # of one node: the check and what it said


def read_outcomes(directory: RunDirectory) -> dict[str, Outcomes]:
    """What each node of the newest attempt that has any on record said at its start, by node.

    Raises OSError or ValueError.
    """
    for job_id in reversed(directory.attempt_ids()):
        found: dict[str, Outcomes] = {}
        for path in sorted((directory.paths.attempt(job_id) / "nodes").glob("*.json")):
            checks = (read_json(path) or {}).get("checks") or ()
            found[path.stem] = {str(check["name"]): str(check["result"]) for check in checks}
        if found:
            return found
    return {}


def never_made(outcomes: Mapping[str, Outcomes], but: str) -> frozenset[str]:
    """The checks that no other node than `but` could make, where there is one that was asked."""
    others = [checks for node, checks in outcomes.items() if node != but and checks]
    made = {
        name
        for checks in others
        for name, result in checks.items()
        if result != CheckOutcome.UNKNOWN
    }
    return frozenset({name for checks in others for name in checks} - made)


def let_in_without(
    entry: NodeCheck, nowhere: Collection[str], exclusion: Exclusion | None
) -> tuple[str, ...] | None:
    """Without which checks a node may be used again: none of them was made `nowhere` else, all
    others were passed.

    None where it may not: it failed, nothing could be asked there, or what it was excluded for is
    among them.
    """
    unmade = [one.name for one in entry.checks if one.result is CheckOutcome.UNKNOWN]
    if entry.result is CheckOutcome.BAD or len(unmade) == len(entry.checks):
        return None
    if exclusion is None:
        told = ""
    else:
        told = "\n".join((exclusion.why, *exclusion.evidence))
    if any(name not in nowhere or name in told for name in unmade):
        return None
    return tuple(unmade)
