"""What of a finding's advice can be followed: of a job that is only watched, nothing that starts, stops
or repairs it. Pure.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from tr11ops.detect.detector import Finding
from tr11ops.observe.snapshot import Snapshot
from tr11ops.trainers.levels import TrainerStanding

_QUOTED = re.compile(r"`([^`]+)`")
OWNERS = "the job is only watched: who submitted it stops, repairs and starts it, and decides what is done"


def as_possible(finding: Finding, snapshot: Snapshot) -> Finding:
    """The finding without commands that are refused for this run; where one was left out, with whose
    decision it is.
    """
    standing = snapshot.run.standing
    if standing is None or not standing.is_watched:
        return finding
    fix, then = finding.fix, finding.then
    if standing.refuses(fix) or any(map(standing.refuses, then)):
        # what comes after a look is the owner's as well
        then = ()
        if standing.refuses(fix):
            fix = ""
    evidence = tuple(line for line in finding.evidence if not _names_refused(line, standing))
    if (fix, then, evidence) != (finding.fix, finding.then, finding.evidence):
        evidence = (*evidence, OWNERS)
    return replace(finding, fix=fix, then=then, evidence=evidence, by_itself="")


def _names_refused(line: str, standing: TrainerStanding) -> bool:
    return any(standing.refuses(command) for command in _QUOTED.findall(line))
