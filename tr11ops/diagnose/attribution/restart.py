"""Whether a plain restart helps after a launch, by what was concluded of it. Pure.

The agent and `tr11 diagnose` both ask the same rules (`tr11ops.diagnose.answers`). The agent acts
on the answer: where something has to be changed first, nothing more is started
(`tr11ops.agent.relaunch`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.diagnose.answers import EndFacts, RestartAnswer, Signs, restart_of
from tr11ops.diagnose.attribution.error_text import read_error, without_speaker
from tr11ops.diagnose.attribution.evidence import OUTSIDE, Attribution, Kind
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

CLASS: Mapping[Kind, FaultClass] = {
    Kind.NODE: FaultClass.SLURM_NODE_FAIL,
    Kind.CONFIGURATION: FaultClass.USER_CODE,
    Kind.SOFTWARE: FaultClass.USER_CODE,
    Kind.STORAGE: FaultClass.STORAGE,
    Kind.NUMERICS: FaultClass.NUMERICS,
    Kind.PORT: FaultClass.RENDEZVOUS,
    Kind.OPERATOR: FaultClass.CLEAN_EXIT,
}
STEP: Mapping[Kind, NextStep] = {
    Kind.CONFIGURATION: NextStep.FIX_CONFIG,
    Kind.SOFTWARE: NextStep.FIX_CONFIG,
    Kind.STORAGE: NextStep.FIX_STORAGE,
    Kind.NUMERICS: NextStep.ROLLBACK_AND_SKIP,
    Kind.PORT: NextStep.RESUBMIT,  # each launch takes another one
    Kind.OPERATOR: NextStep.NONE,
}
# launches in a row that a fault of unknown cause ends at one step; fewer may be chance
MOST_AT_ONE_STEP = 3


def restart_after(found: Attribution, trained: bool, times: int = 1) -> RestartAnswer:
    """Whether a plain restart helps after this launch. `trained`: whether it made steps. `times`:
    how many launches in a row this fault has ended at this step.
    """
    # how a log's lines are read: each agent loads this module, few of their launches fail
    from tr11ops.diagnose.waits import helps_where_ranks_parted, what_is_missing

    texts = [without_speaker(text) for text in found.evidence or (found.summary,)]
    known = read_error(texts[0]).best  # the signature of what the conclusion rests on
    fault, step = CLASS.get(found.kind, FaultClass.UNKNOWN), STEP.get(found.kind, NextStep.RESUBMIT)
    if found.fault == OUTSIDE:
        fault, step, known = FaultClass.KILLED, NextStep.RESUBMIT, None
        times = times if times >= MOST_AT_ONE_STEP else 1
    elif found.kind is Kind.UNKNOWN:
        fault = FaultClass.UNKNOWN if known is None else known.fault
        step = NextStep.PAGE if known is None else known.step
        times = times if times >= MOST_AT_ONE_STEP else 1
    if found.avoided:
        # on one node again and again, which is left out now: that is no sign against other nodes
        times = 1
    helps = None
    if known is not None and found.kind in {Kind.STORAGE, Kind.UNKNOWN}:
        helps = known.helps
    if fault is FaultClass.NCCL_TIMEOUT:
        helps = helps or helps_where_ranks_parted(texts)
    if found.kind is Kind.HEALTH_CHECK:  # the next launch leaves the check out
        helps = Restart.PLAIN
    signs = Signs(
        role=None if known is None else known.role,
        helps=helps,
        peer=", ".join(found.named_suspects) or None,
        trained=trained,
        times=times,
        missing=what_is_missing(fault, trained, texts),
    )
    return restart_of(
        EndFacts(fault, step, sure=found.confidence, signs=signs, proved=found.blamed)
    )
