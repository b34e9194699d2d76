"""The diagnosis that one line gives, its root: class, step and confidence, with what else the log
says of it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace

from tr11ops.base.units import counted
from tr11ops.diagnose.answers import Signs
from tr11ops.diagnose.candidates import KERNELS, Candidates
from tr11ops.diagnose.culprits import (
    ABSENT,
    MILD,
    NEAR_LINES,
    SET_UP,
    SHOWN,
    absent_rank,
    ends_of_link,
    flaps_everywhere,
    is_of_another_node,
    is_of_many,
    is_of_one_of_many,
    is_told_by_scheduler,
    placed_by,
    proof_of,
    said_of_ends,
    step_of_network,
    tasks_of_ray,
    unknown_host,
)
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.file_servers import BACK, helps_where_dropped
from tr11ops.diagnose.order import OF_PEERS, STRONG, first_of, is_before
from tr11ops.diagnose.peers import DRIVERS, lone_node, most_named_peer, refusing_peer
from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.roots import REPLAYED_ELSEWHERE
from tr11ops.diagnose.sighting import LogLaunch, Sighting, WorkerFailure
from tr11ops.diagnose.signature import (
    FaultClass,
    FaultSignature,
    NextStep,
    NodeBlame,
    Restart,
    Role,
)
from tr11ops.diagnose.topics import FAMILY as TOPICS
from tr11ops.diagnose.waits import (
    helps_where_a_device_stands,
    helps_where_one_works,
    helps_where_ranks_parted,
    rank_behind,
    rank_waited_for,
    what_is_missing,
)

HIGHEST = 0.97
CAUTIOUS = 0.9  # the most where a signature alone does not prove its class
# the most for what fails once the training has come to its end, or may be of two classes
AFTER_THE_END = 0.85
_LOADER = "dataloader-worker"
_SUBMITS = re.compile(r"\b(?:sbatch|salloc): ")
_RECOVERY = "xid-recovery"
_CONTAINER = "container-start"
_REPLAY_SUSPECT = "replay-suspect"
# the most for a node of which nothing else is known than that its container alone did not start
ONE_OF_MANY = 0.7
_OF_THE_MACHINE = frozenset(
    {FaultClass.STORAGE, FaultClass.HOST_OOM, FaultClass.GCS, FaultClass.CUDA_OOM}
)
_SERVICES = frozenset({FaultClass.GCS, FaultClass.HUB_AUTH})
_IS_BUSY = re.compile(r"\b50[0234]\b|\b429\b|backendError|UNAVAILABLE\b|SlowDown|Too Many Requests")
_IS_REFUSED = re.compile(r"\b40[134]\b|[Dd]enied|[Ff]orbidden|[Uu]nauthori[sz]ed|[Nn]ot [Ff]ound")
_CHAIN_LINES = 200  # of what a data loader's worker raised, below the line that says that it did


def diagnosis_of_root(
    root: Sighting, launch: LogLaunch, found: Candidates, places: LaunchPlaces
) -> Diagnosis:
    signature = root.signature
    cited = unknown_host(root, launch) or _original(root, found)
    if (
        cited.signature.fault in _OF_THE_MACHINE and cited.signature.family != TOPICS
    ):  # it is not the loader's own
        signature = cited.signature
    quoted = places.quoted(cited, is_root=signature.role not in {Role.END, Role.STOP})
    if cited is root and is_of_another_node(root):
        quoted = replace(quoted, rank=None, node=None, gpu=None, is_guess=False)
    silent_rank = None
    if signature.fault is not FaultClass.STORAGE:  # which all share: one rank meets it first
        silent_rank = absent_rank([root, *found.symptoms])
        if silent_rank is None:
            said = [one.text for one in launch.sightings]
            silent_rank = rank_behind(said)
            if silent_rank is None:
                silent_rank = rank_waited_for(said)
    if silent_rank is not None and signature.fault is FaultClass.NCCL_TIMEOUT:
        quoted = places.of_absent_rank(quoted, silent_rank)
    elif signature.fault is FaultClass.NCCL_TIMEOUT:
        witnesses = [one for one in found.symptoms if one.signature.id == signature.id]
        silent_rank = places.silent_rank(witnesses)
        quoted = places.without_witness(quoted, witnesses)
    if is_told_by_scheduler(signature):
        told = [one for one in [root, *found.all] if is_told_by_scheduler(one.signature)]
        quoted = replace(quoted, node=places.lost_node(told), rank=None, gpu=None, is_guess=False)
    alike = [
        one
        for one in found.all
        if one is not root and one is not cited and one.signature.id == signature.id
    ]
    backing = [
        one
        for one in found.all
        if one is not root
        and one is not cited
        and one not in alike
        and one.signature.fault is signature.fault
        and one.may_prove
    ]
    is_a_nodes = (
        signature.step is NextStep.EXCLUDE_AND_RESUBMIT or signature.helps is Restart.ELSEWHERE
    )
    if quoted.node is None and is_a_nodes:
        by_ray = placed_by(tasks_of_ray(cited, found), quoted, places)
        quoted = placed_by([*alike, *backing], by_ray, places)
    roots = [report for report in launch.reports if report.is_root and report.exit_code != -15]
    confidence = _confidence(root, found, launch=launch, alike=len(alike), roots=roots)
    step = signature.step
    peer = None
    if signature.fault is FaultClass.NCCL_NETWORK and signature.blame is not NodeBlame.NODE:
        peer = most_named_peer([root, *found.all], places)
        peer = refusing_peer(root, launch.sightings, places) or peer
    if peer is None or SET_UP not in root.text:  # the peer, and not the path, is not there
        step = step_of_network(root, alike, launch=launch, places=places, usual=step)
    if peer is not None:
        quoted = replace(quoted, rank=None, node=peer, gpu=None, is_guess=False)
    elif step is NextStep.EXCLUDE_AND_RESUBMIT and (
        is_of_many([root, *alike], places, signature) or flaps_everywhere(root, launch, places)
    ):
        step = NextStep.PAGE
        quoted = replace(quoted, node=None)
    if signature.id == _CONTAINER and is_of_one_of_many(root, alike, launch, places):
        signature = replace(signature, fault=FaultClass.SLURM_NODE_FAIL, helps=Restart.ELSEWHERE)
        step = NextStep.PAGE
        confidence = min(confidence, ONE_OF_MANY)
    # a warning, and no line says more
    if root.is_mild and signature.role in {Role.CAUSE, Role.SYMPTOM}:
        confidence = min(confidence, MILD)
        step = NextStep.PAGE if step is NextStep.EXCLUDE_AND_RESUBMIT else step
    after = [
        one
        for one in found.all
        if one is not root
        and one not in backing
        and one not in alike
        and one.signature.role is not Role.WARNING
    ]
    waits = [one.text for one in [root, *found.symptoms]]
    helps = _helps(root, signature, told=[cited, *alike, *backing], waits=waits, launch=launch)
    lone = None
    has_passed = helps is Restart.PLAIN and any(
        one.signature.id == BACK for one in launch.sightings
    )
    if not has_passed:  # what has is no node's own
        lone = lone_node(cited, alike, places, launch.sightings)
    signature = _of_lone_driver(signature, lone)
    return Diagnosis(
        signature.fault,
        step,
        confidence=confidence,
        root_cause=quoted,
        evidence=tuple(places.quoted(one) for one in [*backing, *alike][:SHOWN]),
        consequences=tuple(places.quoted(one) for one in after[:SHOWN]),
        consequence_count=len(after) + (0 if signature.role is Role.END else len(alike)),
        explanation=_explanation(root, quoted, launch, len(after))
        + said_of_ends(root, quoted, peer, places, sightings=launch.sightings),
        signs=Signs(
            signature.role,
            signature.blame,
            helps=helps,
            peer=peer,
            ends=ends_of_link(root, quoted, peer, places),
            silent_rank=silent_rank,
            lone_node=lone,
            signature=root.signature.id,
            proof=proof_of(root, signature, quoted, places),
            missing=what_is_missing(root.signature.fault, root.progress is not None, waits),
        ),
    )


def _of_lone_driver(signature: FaultSignature, lone: str | None) -> FaultSignature:
    """What a driver that does not fit is, where one node alone has it: the node's, and not the
    program's.
    """
    if lone is None or signature.id not in DRIVERS:
        return signature
    return replace(signature, fault=FaultClass.GPU_HARDWARE)


def _helps(
    root: Sighting,
    signature: FaultSignature,
    told: Sequence[Sighting],
    waits: Sequence[str],
    launch: LogLaunch,
) -> Restart | None:
    """What a line says of a restart; of a file system's error what its client says, of a time-out
    what ranks say.
    """
    if signature.fault is FaultClass.STORAGE:
        return helps_where_dropped(told, launch.sightings) or signature.helps
    if signature.helps is not None:
        return signature.helps
    if signature.fault is FaultClass.SLURM_AUTH and _SUBMITS.search(root.text):
        return Restart.CHANGE  # no other node helps the host where one submits
    if signature.fault is FaultClass.NCCL_TIMEOUT:
        return (
            helps_where_ranks_parted(waits)
            or helps_where_one_works(root, launch)
            or helps_where_a_device_stands(launch.sightings)
        )
    if (
        signature.fault in _SERVICES
        and _IS_BUSY.search(root.text)
        and not _IS_REFUSED.search(root.text)
    ):
        return Restart.PLAIN
    return None


def _original(root: Sighting, found: Candidates) -> Sighting:
    """The exception that a data loader's worker raised, in place of the line that says that it
    raised one.
    """
    if root.signature.id == _RECOVERY:  # which says what is to be done about another Xid
        others = [
            one for one in (*found.causes, *found.warnings) if one.signature.family == KERNELS
        ]
        others = [one for one in others if one.file == root.file]
        before = [one for one in others if 0 < root.line_number - one.line_number <= NEAR_LINES]
        return min(before, key=attrgetter("line_number"), default=root)
    if root.signature.fault is FaultClass.NCCL_TIMEOUT and root.signature.role is Role.SYMPTOM:
        absent = [one for one in found.symptoms if one.signature.id == ABSENT]
        if absent_rank(absent) is not None:  # who says for whom all others waited
            return next((one for one in absent if "node" in one.named), absent[-1])
    if root.signature.id == REPLAYED_ELSEWHERE:  # the GPU on which the step failed first
        suspects = [one for one in found.causes if one.signature.id == _REPLAY_SUSPECT]
        return first_of(suspects) or root
    if root.signature.id != _LOADER or root.raised is None or "Caught" not in root.text:
        return root
    inner = [
        one
        for one in found.causes
        if one.raised is not None
        and one.raised.follows
        and one.file == root.file
        and one.origin.writer == root.origin.writer
        and 0 < one.line_number - root.line_number < _CHAIN_LINES
    ]
    if inner:
        return inner[0]
    return root


def _confidence(
    root: Sighting, found: Candidates, launch: LogLaunch, alike: int, roots: Sequence[WorkerFailure]
) -> float:
    signature = root.signature
    value = signature.confidence
    if signature.role is Role.CAUSE:
        others = {
            one.signature.fault
            for one in found.causes
            if one.signature.fault is not signature.fault and one.signature.confidence >= STRONG
        }
        value -= 0.12 * min(2, len(others))
        if root.raised is not None and signature.blame is NodeBlame.PROGRAM:
            value += 0.08
        if alike and signature.blame is NodeBlame.PROGRAM:
            value += 0.04
    if any(one.signature.fault is signature.fault for one in found.warnings):
        value += 0.05
    if root.origin.rank is not None and roots:
        value += 0.02 if any(report.rank == root.origin.rank for report in roots) else -0.05
    most = HIGHEST if signature.confidence > CAUTIOUS else CAUTIOUS
    if launch.is_cut or _has_rival(root, found):
        most = CAUTIOUS
    # the data, or the program that reads them
    if root.signature.id == _LOADER and "Caught" in root.text:
        most = AFTER_THE_END
    if signature.role is Role.CAUSE and any(is_before(end, root) for end in found.ends):
        most = AFTER_THE_END
    return max(0.05, min(most, value))


def _has_rival(root: Sighting, found: Candidates) -> bool:
    """Whether another line may be the cause as well: of another class, as good as sure of it, and
    no word of peers.
    """
    rivals = [one for one in (*found.causes, *found.stops) if one is not root and not one.is_mild]
    return any(
        one.signature.fault not in {root.signature.fault, FaultClass.UNKNOWN, *OF_PEERS}
        and one.signature.confidence >= STRONG
        and (one.raised is None or not one.raised.follows)
        for one in rivals
    )


def _explanation(root: Sighting, quoted: QuotedLine, launch: LogLaunch, after: int) -> str:
    signature = root.signature
    said = root.sentence
    done = root.progress.iteration if root.progress is not None else None
    if done is not None and signature.role is not Role.START:
        said += f" The last step before it was {done}."
    elif (
        launch.progress is None
        and launch.trainer is not None
        and signature.role not in {Role.END, Role.STOP}
    ):
        said += " No step came before it."
    if signature.role is Role.SYMPTOM:
        said += " No line says why; this is the earliest sign."
    if (
        signature.blame is NodeBlame.PROGRAM
        and signature.role in {Role.CAUSE, Role.DEATH}
        and quoted.node
    ):
        said += f" Nothing here accuses {quoted.node} itself."
    if after and signature.role is not Role.END:
        said += f" {counted(after, 'later line follows', 'later lines follow')} from it."
    return said
