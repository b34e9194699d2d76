"""A log's diagnosis and the conclusion about its launch, as one answer. Pure.

The log knows best what went wrong; who is to blame, and so whether a node goes, is the conclusion's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tr11ops.diagnose.attribution.evidence import Attribution, Conclusion, Kind
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.signature import FaultClass, NextStep

CAUTIOUS = 0.9  # the most where the class is the conclusion's and no line tells it
_CLASS: Mapping[Kind, FaultClass] = {
    Kind.NODE: FaultClass.SLURM_NODE_FAIL,
    Kind.CONFIGURATION: FaultClass.USER_CODE,
    Kind.SOFTWARE: FaultClass.USER_CODE,
    Kind.STORAGE: FaultClass.STORAGE,
    Kind.NUMERICS: FaultClass.NUMERICS,
    Kind.PORT: FaultClass.RENDEZVOUS,
    Kind.OPERATOR: FaultClass.CLEAN_EXIT,
}
_STEP: Mapping[Kind, NextStep] = {
    Kind.CONFIGURATION: NextStep.FIX_CONFIG,
    Kind.SOFTWARE: NextStep.FIX_CONFIG,
    Kind.STORAGE: NextStep.FIX_STORAGE,
    Kind.NUMERICS: NextStep.ROLLBACK_AND_SKIP,
    Kind.OPERATOR: NextStep.NONE,
}
_ORDERED = frozenset(
    {
        FaultClass.CLEAN_EXIT, FaultClass.SLURM_TIME_LIMIT, FaultClass.SLURM_PREEMPTED, FaultClass.SLURM_USER_CANCEL,
    }
)  # fmt: skip


def joined(found: Diagnosis, conclusion: Conclusion) -> Diagnosis:
    """The diagnosis with the conclusion's node and blame."""
    judged = conclusion.found
    fault, confidence = found.fault, found.confidence
    if _overrules(judged, found):
        fault, confidence = _CLASS[judged.kind], min(judged.confidence, CAUTIOUS)
    step = _step(judged, replace(found, fault=fault))
    named = judged.blamed or judged.suspects
    root = found.root_cause
    if root is not None and len(named) == 1 and root.node != named[0] and fault not in _ORDERED:
        # the line is another node's: that of a victim, or of no one in particular
        root = replace(root, node=named[0], rank=root.rank if root.node is None else None, gpu=None)
    who = "The agent" if conclusion.by_agent else "The attempt's records"
    said = f"{who}: {judged.summary}."
    if judged.kind is Kind.NODE and not judged.blamed:
        said += f" {', '.join(judged.suspects)} is only suspected: the first time it is swapped out, not excluded."
    return replace(
        found, fault=fault, step=step, confidence=confidence, root_cause=root, conclusion=conclusion,
        explanation=f"{found.explanation} {said}",
    )  # fmt: skip


def _overrules(judged: Attribution, found: Diagnosis) -> bool:
    """Whether the class is to be the conclusion's: the log told none, or took an ordered end for a fault."""
    if judged.kind is Kind.OPERATOR:
        return judged.confidence > CAUTIOUS and found.fault not in _ORDERED
    if judged.kind is Kind.NODE and not judged.blamed:
        return False
    return judged.kind in _CLASS and found.fault in {FaultClass.UNKNOWN, FaultClass.CLEAN_EXIT}


def _step(judged: Attribution, found: Diagnosis) -> NextStep:
    if judged.blamed:
        return NextStep.EXCLUDE_AND_RESUBMIT
    if found.step is NextStep.EXCLUDE_AND_RESUBMIT:  # whom it accuses is not condemned: a spare takes its place
        return _STEP.get(judged.kind, NextStep.RESUBMIT)
    if judged.kind is Kind.OPERATOR:
        return found.step if found.fault in _ORDERED - {FaultClass.CLEAN_EXIT} else NextStep.NONE
    if judged.kind in _STEP and found.step in {NextStep.RESUBMIT, NextStep.PAGE, NextStep.NONE}:
        return _STEP[judged.kind]
    if judged.kind is Kind.NODE and found.step in {NextStep.PAGE, NextStep.NONE}:
        return NextStep.RESUBMIT
    return found.step
