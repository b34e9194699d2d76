"""Who is at fault in what a line says: its node, another, one of two ends, or what all share. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.diagnose.attribution.names import is_device
from tr11ops.diagnose.candidates import KERNELS, Candidates
from tr11ops.diagnose.diagnosis import QuotedLine
from tr11ops.diagnose.peers import SETTINGS, refusing_peer
from tr11ops.diagnose.places import SCHEDULERS, LaunchPlaces
from tr11ops.diagnose.roots import REPLAYED_ELSEWHERE
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import (
    FaultClass,
    FaultSignature,
    NextStep,
    NodeBlame,
    Proof,
)
from tr11ops.diagnose.starts import NO_OTHERS_ADDRESS
from tr11ops.diagnose.topics import FAMILY as TOPICS

SHOWN = 8
MANY_NODES = 3
MILD = 0.5  # the most for a line that calls itself a warning
_NO_SUCH_HOST = "c10d-no-such-host"
SET_UP = "ibv_modify_qp"  # by which two cards are connected, before any data
_FORBIDDEN = re.compile(  # or sought where no other node is: at a loopback, at Docker's own bridge
    r"No route to host|Function not implemented|Operation not (?:permitted|supported)|Permission denied"
    r"|Protocol not (?:supported|available)|Address family not supported"
    r"|Cannot assign requested address|No such interface"
    rf"|[Cc]onnect(?:ing|ion)? to (?:\S+\()?{NO_OTHERS_ADDRESS}"
)
_CLOSED_BEFORE = re.compile(r"Rendezvous for run_id=\S+ was closed")
_TASK_FAILED = "ray-task-error"
NEAR_LINES = 100  # of a kernel's log, in which one fault is told
_NOT_STARTED = "slurm-launch"
ABSENT = "flight-recorder-missing"
_CHECKS = "checks"


def proof_of(
    root: Sighting, signature: FaultSignature, quoted: QuotedLine, places: LaunchPlaces
) -> Proof | None:
    """Why the line condemns its node; a link has two ends, and what is told mildly is no proof.

    Whom it condemns has to be a machine beyond doubt, and the line that machine's own; only the
    scheduler speaks of others.
    """
    if root.is_mild or signature.fault is FaultClass.NCCL_NETWORK or quoted.node is None:
        return None
    if signature.proof is Proof.SCHEDULER and not is_device(quoted.node):
        return signature.proof
    node = places.machines.get(quoted.node, quoted.node)
    if not quoted.is_own or not places.is_surely_host(node):
        return None
    return signature.proof


def step_of_network(
    root: Sighting,
    alike: Sequence[Sighting],
    launch: LogLaunch,
    places: LaunchPlaces,
    usual: NextStep,
) -> NextStep:
    """What to do about a network or a rendezvous, where more than the line tells it."""
    signature = root.signature
    if signature.id == SETTINGS and root.progress is not None:
        return NextStep.RESUBMIT  # what settings forbid, they forbid from the first step on
    is_refused = (
        signature.fault is FaultClass.NCCL_NETWORK and _FORBIDDEN.search(root.text) is not None
    )
    if is_refused and root.progress is None and usual is NextStep.RESUBMIT:
        # a refusal at the start is no weather: nothing was on its way yet
        return NextStep.FIX_CONFIG
    if (
        SET_UP in root.text
        and usual is NextStep.RESUBMIT
        and is_of_many([root, *alike], places, signature)
    ):
        return NextStep.FIX_CONFIG  # a path that none of many nodes finds is one that is not there
    is_at_start = signature.fault is FaultClass.RENDEZVOUS and launch.progress is None
    if is_at_start and _CLOSED_BEFORE.search(root.text) is not None:
        return NextStep.FIX_CONFIG  # its name is used up: an earlier launch closed it
    if unknown_host(root, launch) is not None:
        return NextStep.FIX_CONFIG  # a name that no one knows is not known the next time either
    return usual


def placed_by(others: Sequence[Sighting], quoted: QuotedLine, places: LaunchPlaces) -> QuotedLine:
    """The line with the place that others give which tell of the same fault, and of their own node;
    if they agree.
    """
    told = [
        places.quoted(one)
        for one in others
        if not one.is_mild and (one.signature.blame is NodeBlame.NODE or "node" in one.named)
    ]
    nodes = {one.node for one in told} - {None}
    if len(nodes) != 1:
        return quoted
    ranks = {one.rank for one in told} - {None}
    if quoted.rank is None and len(ranks) == 1:
        rank = next(iter(ranks))
    else:
        rank = quoted.rank
    is_own = any(one.is_own for one in told if one.node is not None)
    return replace(quoted, node=next(iter(nodes)), rank=rank, is_guess=False, is_own=is_own)


def tasks_of_ray(one: Sighting, found: Candidates) -> list[Sighting]:
    """The line of Ray that says whose task raised an exception, above that."""
    return [
        task
        for task in found.deaths
        if task.signature.id == _TASK_FAILED
        and task.file == one.file
        and 0 < one.line_number - task.line_number <= NEAR_LINES
    ][-1:]


def absent_rank(sightings: Sequence[Sighting]) -> int | None:
    """The one rank that lines about a hang name as the one that did not come; None where they name
    none, or several.
    """
    named = {
        int(one.named["rank"])
        for one in sightings
        if one.signature.id == ABSENT and "rank" in one.named
    }
    if len(named) == 1:
        return named.pop()
    return None


def is_told_by_scheduler(signature: FaultSignature) -> bool:
    """Whether it is the scheduler's word that a node was lost, or a guess that it is: only who is
    named is lost.
    """
    return signature.fault is FaultClass.SLURM_NODE_FAIL and signature.family in (
        *SCHEDULERS,
        TOPICS,
    )


def is_of_many(alike: Sequence[Sighting], places: LaunchPlaces, signature: FaultSignature) -> bool:
    """Whether so many nodes say the same that it is none's own fault: what they share is.

    Two are as many where it is the program that says so, where tasks could not be started and where
    links broke: it may be the program's own, Slurm's, or what is between them. What kernels say of
    GPUs is each node's own.
    """
    nodes = {places.quoted(one).node for one in alike} - {None}
    may_be_shared = signature.fault in {FaultClass.GPU_HARDWARE, FaultClass.NCCL_NETWORK}
    may_be_shared = (
        may_be_shared and signature.blame is NodeBlame.NODE and signature.family != KERNELS
    )
    may_be_shared = may_be_shared or signature.id == _NOT_STARTED
    return len(nodes) >= (2 if may_be_shared else MANY_NODES)


def flaps_everywhere(root: Sighting, launch: LogLaunch, places: LaunchPlaces) -> bool:
    """Whether links of many nodes failed in turn, if most came back: then what is between them fails."""
    if root.signature.fault is not FaultClass.NCCL_NETWORK:
        return False
    flaps = [one for one in launch.sightings if one.signature.id == root.signature.id]
    return len({places.quoted(one).node for one in flaps} - {None}) >= MANY_NODES


def is_of_one_of_many(
    root: Sighting, alike: Sequence[Sighting], launch: LogLaunch, places: LaunchPlaces
) -> bool:
    """Whether one task alone says it, and it is not the only one: what all tasks share is not
    broken then.
    """
    writers = {one.origin.task for one in [root, *alike]}
    nodes = {places.quoted(one).node for one in [root, *alike]} - {None}
    task = root.origin.task
    return (
        len(writers) == 1
        and task is not None
        and len(nodes) <= 1
        and (task > 0 or len(launch.nodes) > 1)
    )


def said_of_ends(
    root: Sighting,
    quoted: QuotedLine,
    peer: str | None,
    places: LaunchPlaces,
    sightings: Sequence[Sighting],
) -> str:
    """What a line about a link says of its two ends."""
    if peer is not None:
        if refusing_peer(root, sightings, places) == peer:
            return f" The firewall of {peer} says itself that it refused that."
        return f" Several name {peer}: it is the suspect, and they are witnesses."
    ends = ends_of_link(root, quoted, peer, places)
    if not ends:
        return ""
    return f" A link has two ends, {ends[0]} and {ends[1]}: neither is accused by this alone."


def ends_of_link(
    root: Sighting, quoted: QuotedLine, peer: str | None, places: LaunchPlaces
) -> tuple[str, ...]:
    """The two ends of the link that a line tells of, where neither is named by more; empty for any
    other line.
    """
    other = places.peer_of(root)
    if peer is not None or other is None or other == quoted.node:
        return ()
    return (quoted.node or "who says so", other)


def is_of_another_node(root: Sighting) -> bool:
    """Whether who prints a line, or is named in it, is surely not the one at fault: the GPU that did
    a step well; who tells of another's check by a number.
    """
    if root.signature.id == REPLAYED_ELSEWHERE:
        return True
    return root.signature.family == _CHECKS and "node" not in root.named


def unknown_host(root: Sighting, launch: LogLaunch) -> Sighting | None:
    """The first line that says that no one knows the host of a rendezvous; None where none does."""
    if root.signature.fault is not FaultClass.RENDEZVOUS:
        return None
    return next((one for one in launch.sightings if one.signature.id == _NO_SUCH_HOST), None)
