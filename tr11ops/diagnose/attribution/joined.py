"""A log's diagnosis and the conclusion about its launch, as one answer. Pure.

The agent's conclusion leads: it saw the scheduler, the nodes and all workers when the launch ended.
The log's line and its class stand where they tell of the same thing, for a line says best what went
wrong. Where the agent came to nothing, the class is the log's; who is to blame, and so whether a
node goes, is always the conclusion's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter

from msgspec.structs import replace

from tr11ops.diagnose.attribution.error_text import without_speaker
from tr11ops.diagnose.attribution.evidence import OUTSIDE, Attribution, Conclusion, Kind
from tr11ops.diagnose.attribution.restart import CLASS, STEP
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.signature import FaultClass, FaultSignature, NextStep, Role
from tr11ops.diagnose.topics import LINE
from trainer.contract.record import Record

CAUTIOUS = 0.9  # the most where the class is the conclusion's and no line tells it
UNBORNE = 0.5  # for an end that the log calls one, and no record
NO_RECORD = (
    "Its log ends as a training does that is done or was stopped, and no exit record says so."
)
_SPEAKER = re.compile(r"(?:^|: )rank \d+ on (?P<node>[\w.-]+): ")
FEWEST_LETTERS = 12  # of words that are the same: what is shorter may be anyone's
_ORDERED = frozenset(
    {
        FaultClass.CLEAN_EXIT,
        FaultClass.SLURM_TIME_LIMIT,
        FaultClass.SLURM_PREEMPTED,
        FaultClass.SLURM_USER_CANCEL,
    }
)
_OF_THE_PROGRAM = frozenset(
    {
        FaultClass.USER_CODE,
        FaultClass.DATALOADER,
        FaultClass.CUDA_OOM,
        FaultClass.HOST_OOM,
        FaultClass.NUMERICS,
        FaultClass.CHECKPOINT_MISMATCH,
        FaultClass.HUB_AUTH,
        FaultClass.GCS,
        FaultClass.STORAGE,
    }
)
# the classes that say the same as the kind, or more exactly
_FITS: Mapping[Kind, frozenset[FaultClass]] = {
    Kind.CONFIGURATION: _OF_THE_PROGRAM | {FaultClass.RENDEZVOUS, FaultClass.SLURM_SUBMIT},
    Kind.SOFTWARE: _OF_THE_PROGRAM,
    Kind.STORAGE: frozenset({FaultClass.STORAGE, FaultClass.GCS}),
    Kind.NUMERICS: frozenset({FaultClass.NUMERICS}),
    Kind.PORT: frozenset({FaultClass.RENDEZVOUS}),
    Kind.OPERATOR: _ORDERED,
}
_OF_PEERS = frozenset(  # what the others see of one that has died
    {FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS, FaultClass.CLEAN_EXIT}
)
# a GPU may take its node along
_LOST = frozenset({FaultClass.SLURM_NODE_FAIL, FaultClass.GPU_HARDWARE})
_SAYS_WHY = frozenset({Role.CAUSE, Role.DEATH, Role.SYMPTOM, Role.STOP})


class _Words(Record):
    """What the conclusion rests on, and what it means by the signatures: None where none knows it.

    A death of which nothing says why is of the class UNKNOWN.
    """

    text: str
    fault: FaultClass | None


def joined(found: Diagnosis, conclusion: Conclusion) -> Diagnosis:
    """The diagnosis with the conclusion's node and blame; where it is the agent's, with its cause
    too.
    """
    judged = conclusion.found
    leads = conclusion.by_agent or judged.confidence > CAUTIOUS
    if leads and not _agree(found, judged):
        found = _led(found, conclusion)
    fault, confidence = found.fault, found.confidence
    if judged.fault == OUTSIDE and fault in {FaultClass.CLEAN_EXIT, FaultClass.UNKNOWN}:
        fault, confidence = FaultClass.KILLED, min(judged.confidence, CAUTIOUS)
    elif _overrules(judged, found):
        fault, confidence = CLASS[judged.kind], min(judged.confidence, CAUTIOUS)
    elif fault is FaultClass.CLEAN_EXIT and judged.kind is not Kind.OPERATOR:
        found = without_clean_end(found)  # it failed, whatever its last lines say
        fault, confidence = found.fault, found.confidence
    if conclusion.by_agent and judged.kind is Kind.NODE and _is_agents_own(found):
        confidence = min(judged.confidence, CAUTIOUS)  # the log quotes it, and knows no more
    step = _step(judged, replace(found, fault=fault))
    named = judged.blamed or judged.suspects
    root = found.root_cause
    if root is not None and len(named) == 1 and root.node != named[0] and fault not in _ORDERED:
        # the line is another node's: that of a victim, or of no one in particular
        own = _speaker_of(root.text)
        rank = root.rank if root.node is None else None
        root = replace(root, node=own or named[0], rank=rank, gpu=None)
    who = "The agent" if conclusion.by_agent else "The attempt's records"
    rests_on = ""
    if judged.evidence and not conclusion.by_agent:
        rests_on = judged.evidence[0]
    said = f"{who}: {judged.summary}."
    if rests_on and rests_on not in judged.summary:
        said = f"{who}: {judged.summary}: {rests_on}."
    if judged.avoided:
        said += f" {', '.join(judged.avoided)} is suspected again: avoided while enough others are free, not excluded."
    elif judged.kind is Kind.NODE and judged.suspects and not judged.blamed:
        said += f" {', '.join(judged.suspects)} is only suspected: the first time it is swapped out, not excluded."
    return replace(
        found,
        fault=fault,
        step=step,
        confidence=confidence,
        root_cause=root,
        conclusion=conclusion,
        explanation=f"{found.explanation} {said}".strip(),
    )


def without_clean_end(found: Diagnosis) -> Diagnosis:
    """A log's clean end as what it is where no record bears it out: unknown."""
    return replace(
        found.without_cause(),
        fault=FaultClass.UNKNOWN,
        step=NextStep.PAGE,
        confidence=UNBORNE,
        explanation=NO_RECORD,
    )


# ----------------------------------------------------------------------------- the agent leads
def _agree(found: Diagnosis, judged: Attribution) -> bool:
    """Whether the log's cause is the agent's too, by its words or its class; or the agent knows of
    no cause.
    """
    root = found.root_cause
    if root is not None and any(
        _is_in(root.text, said) for said in (*judged.evidence, judged.summary)
    ):
        return True
    words = _words(judged)
    if judged.kind in {Kind.UNKNOWN, Kind.NODE} and words.fault is None:
        return True
    if words.fault is FaultClass.UNKNOWN and judged.kind in {Kind.UNKNOWN, Kind.NODE}:
        # a death that was seen is more than a line that may speak of anything
        return found.fault not in _OF_PEERS and found.confidence > LINE
    if judged.kind is Kind.NODE and words.fault in _LOST:
        return found.fault in _LOST
    return found.fault is words.fault or found.fault in _FITS.get(judged.kind, ())


def _is_agents_own(found: Diagnosis) -> bool:
    """Whether the line of the cause is the agent's own, that a node was lost: no worker says that."""
    root = found.root_cause
    return root is not None and any(
        one.id == "ours-node-lost" for one, _ in matcher().match_text(root.text)
    )


def _led(found: Diagnosis, conclusion: Conclusion) -> Diagnosis:
    """The diagnosis by the agent's words; what the log told instead is further evidence."""
    judged = conclusion.found
    words = _words(judged)
    line = next(
        (one for one in (*found.evidence, *found.consequences) if _is_in(one.text, words.text)),
        None,
    )
    if line is None and conclusion.by_agent:
        line = QuotedLine(conclusion.file, conclusion.line_number(words.text), words.text)
    rest = tuple(
        one for one in (found.root_cause, *found.evidence) if one is not None and one is not line
    )
    fault = words.fault
    if fault is None or (fault is FaultClass.UNKNOWN and judged.kind is not Kind.NODE):
        fault = CLASS.get(judged.kind, FaultClass.UNKNOWN)
    return replace(
        found,
        fault=fault,
        step=STEP.get(judged.kind, NextStep.RESUBMIT),
        confidence=min(judged.confidence, CAUTIOUS),
        root_cause=line,
        evidence=rest,
        explanation="",
    )


def _words(judged: Attribution) -> _Words:
    """The first of the agent's words that a signature knows, else the first ones."""
    quoted = (*judged.evidence, judged.summary)
    for text in quoted:
        hits = (*matcher().match_text(text), *matcher().match_text(without_speaker(text)))
        known = [one for one, _ in hits if _tells(one)]
        if known:
            return _Words(text, max(known, key=attrgetter("confidence")).fault)
    return _Words(quoted[0], None)


def _tells(signature: FaultSignature) -> bool:
    """Whether a line of this signature says what happened, be it only that a process died."""
    is_known = signature.fault is not FaultClass.UNKNOWN or signature.role is Role.DEATH
    return signature.role in _SAYS_WHY and is_known


def _is_in(line: str, said: str) -> bool:
    """Whether a line of a log is what the agent quotes."""
    words, line = without_speaker(said).strip(), line.strip()
    return len(words) >= FEWEST_LETTERS and (
        words in line or (len(line) >= FEWEST_LETTERS and line in said)
    )


def _speaker_of(said: str) -> str:
    """The node that a conclusion's words name as theirs, also those of an earlier launch; "" where
    they name none.
    """
    named = _SPEAKER.search(said)
    if named is None:
        return ""
    return named["node"]


# ----------------------------------------------------------------------------- class and step
def _overrules(judged: Attribution, found: Diagnosis) -> bool:
    """Whether the class is to be the conclusion's: the log told none, or took an ordered end for a
    fault.
    """
    if judged.kind is Kind.OPERATOR:
        return judged.confidence > CAUTIOUS and found.fault not in _ORDERED
    if judged.kind is Kind.NODE and not judged.blamed:
        return False
    return judged.kind in CLASS and found.fault in {FaultClass.UNKNOWN, FaultClass.CLEAN_EXIT}


def _step(judged: Attribution, found: Diagnosis) -> NextStep:
    if found.fault is FaultClass.KILLED:
        return NextStep.RESUBMIT
    if judged.blamed:
        return NextStep.EXCLUDE_AND_RESUBMIT
    if judged.kind is Kind.PORT or found.step is NextStep.EXCLUDE_AND_RESUBMIT:
        # another launch takes another port; whom the log accuses is not condemned: a spare takes
        # its place
        return STEP.get(judged.kind, NextStep.RESUBMIT)
    if judged.kind is Kind.OPERATOR:
        if found.fault in _ORDERED - {FaultClass.CLEAN_EXIT}:
            return found.step
        return NextStep.NONE
    if judged.kind in STEP and found.step in {NextStep.RESUBMIT, NextStep.PAGE, NextStep.NONE}:
        return STEP[judged.kind]
    if judged.kind is Kind.NODE and found.step in {NextStep.PAGE, NextStep.NONE}:
        return NextStep.RESUBMIT
    return found.step
