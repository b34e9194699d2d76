"""A diagnosis in the light of the one host that alone said that something is missing. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tr11ops.diagnose.attribution.names import can_be_excluded
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.hosts import OddHost
from tr11ops.diagnose.order import OF_PEERS
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.diagnose.signature import (
    FaultClass,
    NextStep,
    NodeBlame,
)

_OF_A_PROGRAM = frozenset({FaultClass.USER_CODE, FaultClass.UNKNOWN})
_OF_AN_ODD_HOST = OF_PEERS | {
    FaultClass.STORAGE,
    FaultClass.DATALOADER,
    FaultClass.GPU_HARDWARE,
    FaultClass.SLURM_AUTH,
}
ALONE = 0.75  # the most where only one host's words, and no error, tell of what kind it is


def with_odd_host(found: Diagnosis, odd: OddHost, launch: LogLaunch) -> Diagnosis:
    """The diagnosis in the light of the one host that alone said, before the first step, that
    something is missing.
    """
    line = QuotedLine(
        odd.file, odd.line_number, odd.text, node=odd.host, meaning="this host alone says so"
    )
    root = found.root_cause
    signs = found.signs
    if root is None and found.fault is FaultClass.UNKNOWN and launch.progress is None:
        why = f"Only {odd.host} says so, of all hosts that print such a line, and nothing was trained."
        alone = replace(signs, lone_node=odd.host)
        return replace(
            found,
            fault=odd.fault,
            step=NextStep.PAGE,
            confidence=ALONE,
            root_cause=line,
            explanation=why,
            signs=alone,
        )
    if root is None or not _may_be_of_odd_host(found, odd, launch):
        return found
    fault = found.fault
    step = found.step
    is_told_by_gpu = odd.fault is FaultClass.GPU_HARDWARE and root.node == odd.host
    if (fault in _OF_A_PROGRAM and odd.fault is not FaultClass.UNKNOWN) or (
        fault in OF_PEERS and is_told_by_gpu
    ):
        fault = odd.fault
    if step in {NextStep.FIX_CONFIG, NextStep.FIX_STORAGE}:
        step = NextStep.PAGE
    alone = replace(signs, lone_node=odd.host, peer=None, helps=None)
    if fault is found.fault:
        confidence = found.confidence
    else:
        confidence = min(found.confidence, ALONE)
    return replace(
        found,
        fault=fault,
        step=step,
        confidence=confidence,
        signs=alone,
        evidence=(line, *found.evidence),
    )


def _may_be_of_odd_host(found: Diagnosis, odd: OddHost, launch: LogLaunch) -> bool:
    """Whether what ended it may come of what that host lacks: it is of that host, or of none, and
    of such a kind.
    """
    signs = found.signs
    root = found.root_cause
    if (
        root is None
        or (signs.peer is not None and can_be_excluded(signs.peer))
        or signs.lone_node is not None
        or found.step is NextStep.NONE
    ):
        return False
    is_placed = found.step is NextStep.EXCLUDE_AND_RESUBMIT and root.node is not None
    if is_placed or found.fault not in _OF_A_PROGRAM | _OF_AN_ODD_HOST:
        return False
    is_its = (root.node == odd.host and not root.is_guess) or odd.text == root.text
    is_its = is_its or re.match(rf"[^A-Za-z]*{re.escape(odd.host)}\b", root.text) is not None
    is_same_kind = found.fault is odd.fault
    if launch.progress is not None:
        return is_its and is_same_kind
    # who prints a line about a link is a witness of it
    is_a_links = is_same_kind and found.fault is FaultClass.NCCL_NETWORK
    is_a_links = is_a_links and signs.blame is not NodeBlame.NODE
    return is_its or is_a_links or (root.node is None and (is_same_kind or found.fault in OF_PEERS))
