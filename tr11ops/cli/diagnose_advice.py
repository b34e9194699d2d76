"""What can be typed now about an ended launch, in place of a step's general words: by how the run
stands. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.detect import loss_not_finite
from tr11ops.detect.nodes_left import exclusion_limit
from tr11ops.detect.unfinished_end import if_the_data_are_at_fault
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.signature import FaultClass, NextStep
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion_limit import way_past


def advice(snapshot: Snapshot, found: Diagnosis) -> str:
    """The command that holds for this run at this moment, with its reason; "" where the step's own
    words do.
    """
    if found.conclusion is None:
        return ""
    judged = found.conclusion.found
    if judged.blamed:
        return _past_the_limit(snapshot, judged.blamed)
    if judged.kind is Kind.OPERATOR:
        return _while_not_finite(snapshot, found.launch)
    attempts = [one for one in known(snapshot.attempts, ()) if one.job_id == found.launch]
    lines = [line for one in attempts for line in if_the_data_are_at_fault(snapshot, one)]
    return _sentences(lines)


def with_advice(found: Diagnosis, said: str) -> Diagnosis:
    """The diagnosis with that advice: a run that a person stopped while its losses were no numbers
    had no clean end.
    """
    conclusion = found.conclusion
    if said and conclusion is not None and conclusion.found.kind is Kind.OPERATOR:
        # it knew of no fault
        conclusion = replace(conclusion, found=replace(conclusion.found, restart=None))
        found = replace(
            found, fault=FaultClass.NUMERICS, step=NextStep.ROLLBACK_AND_SKIP, conclusion=conclusion
        )
    return replace(found, advice=said)


def _past_the_limit(snapshot: Snapshot, blamed: tuple[str, ...]) -> str:
    limit = exclusion_limit(snapshot)
    if limit is None or isinstance(snapshot.exclusions, Unknown):
        return ""
    excluded = {entry.node for entry in snapshot.exclusions}
    if set(blamed) <= excluded:
        return f"{', '.join(blamed)} is excluded already: `tr11 resume` releases what is held."
    if not limit.forbids(blamed, excluded):
        return ""
    left = [node for node in blamed if node not in excluded]
    return f"The limit forbids it ({limit}); all the same: `{way_past(','.join(left))}`"


def _while_not_finite(snapshot: Snapshot, attempt: str) -> str:
    """Why a person may have stopped it: its last losses were no numbers."""
    steps = known(snapshot.steps, ())
    if not steps or steps[-1].job_id != attempt:
        return ""
    for finding in loss_not_finite.detect(snapshot):
        return _sentences([f"{finding.title} when it was stopped", finding.evidence[-1]])
    return ""


def _sentences(lines: Sequence[str]) -> str:
    return " ".join(f"{line[:1].upper()}{line[1:]}." for line in lines)
