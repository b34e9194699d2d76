"""The first cause apart from its consequences: what the sightings of a log add up to. Pure.

A line is a candidate where the training did not go on after it. Of the candidates, a stated cause
counts more than a death without words, and a death more than what other ranks say of a lost peer;
among equals the first one counts. An order of the scheduler or of a person is the cause unless
something had failed before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tr11ops.base.units import counted
from tr11ops.diagnose.answers import Signs
from tr11ops.diagnose.attribution.log_evidence import evidence_of
from tr11ops.diagnose.attribution.names import can_be_excluded, is_device
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.file_servers import BACK, helps_where_dropped
from tr11ops.diagnose.harmless import without_habits
from tr11ops.diagnose.hosts import OddHost, odd_host
from tr11ops.diagnose.numbers import Unhealthy, judge_data, judge_steps
from tr11ops.diagnose.peers import DRIVERS, SETTINGS, lone_node, most_named_peer, refusing_peer
from tr11ops.diagnose.places import SCHEDULERS, LaunchPlaces
from tr11ops.diagnose.roots import (
    CLEAR,
    KERNELS,
    REPLAYED_ELSEWHERE,
    STRONG,
    TOLD_TO_GO,
    Candidates,
    candidates_of,
    first_of,
    is_before,
    root_of,
)
from tr11ops.diagnose.sighting import LogLaunch, Sighting, WorkerFailure
from tr11ops.diagnose.signature import (
    FaultClass,
    FaultSignature,
    NextStep,
    NodeBlame,
    Proof,
    Restart,
    Role,
)
from tr11ops.diagnose.silence import has_gone_silent, with_silence
from tr11ops.diagnose.starts import NO_OTHERS_ADDRESS, explained
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
AFTER_STEPS = 0.55  # for what the training seems to have overcome
WHOLE = 0.65  # for a training that came to its last step and says nothing
SHOWN = 8
LOOKED_BACK = 4  # earlier launches, of which the newest are asked whether they ended alike
NEAR = 1  # steps: the one in which it fails is logged, or just not
SILENT = 3  # lines of the watchdog in a row that say that the job runs, and no step
CAUTIOUS = 0.9  # the most where a signature alone does not prove its class
MANY_NODES = 3
TELLING = 0.3  # the least of a warning that may be all that is known
_OF_MACHINES = frozenset({FaultClass.GPU_HARDWARE, FaultClass.HOST_OOM, FaultClass.SLURM_NODE_FAIL})
MILD = 0.5  # the most for a line that calls itself a warning
# the most for what fails once the training has come to its end, or may be of two classes
AFTER_THE_END = 0.85
_LOADER = "dataloader-worker"
_NO_SUCH_HOST = "c10d-no-such-host"
_SET_UP = "ibv_modify_qp"  # by which two cards are connected, before any data
_FORBIDDEN = re.compile(  # or sought where no other node is: at a loopback, at Docker's own bridge
    r"No route to host|Function not implemented|Operation not (?:permitted|supported)|Permission denied"
    r"|Protocol not (?:supported|available)|Address family not supported"
    r"|Cannot assign requested address|No such interface"
    rf"|[Cc]onnect(?:ing|ion)? to (?:\S+\()?{NO_OTHERS_ADDRESS}"
)
_CLOSED_BEFORE = re.compile(r"Rendezvous for run_id=\S+ was closed")
_TOLD_ITSELF = re.compile(r"SignalException: Process \d+ got signal")
_SUBMITS = re.compile(r"\b(?:sbatch|salloc): ")
_RECOVERY = "xid-recovery"
_TASK_FAILED = "ray-task-error"
NEAR_LINES = 100  # of a kernel's log, in which one fault is told
_CONTAINER = "container-start"
_NOT_STARTED = "slurm-launch"
_ABSENT = "flight-recorder-missing"
_REPLAY_SUSPECT = "replay-suspect"
_CHECKS = "checks"
_OF_A_PROGRAM = frozenset({FaultClass.USER_CODE, FaultClass.UNKNOWN})
_OF_PEERS = frozenset({FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS})
_OF_AN_ODD_HOST = _OF_PEERS | {
    FaultClass.STORAGE,
    FaultClass.DATALOADER,
    FaultClass.GPU_HARDWARE,
    FaultClass.SLURM_AUTH,
}
ALONE = 0.75  # the most where only one host's words, and no error, tell of what kind it is
# the most for a node of which nothing else is known than that its container alone did not start
ONE_OF_MANY = 0.7
_OF_THE_MACHINE = frozenset(
    {FaultClass.STORAGE, FaultClass.HOST_OOM, FaultClass.GCS, FaultClass.CUDA_OOM}
)
_NEARLY_FULL = "memory-nearly-full"
KILLED_FOR_MEMORY = 0.75
_SIGKILL = re.compile(
    r"SIGKILL|[Ss]ignal:? ?9\b|\bexit ?code:? -9\b|= -9\b|: Killed\b|\b137\b|\(exitcode: -9\)"
)
_SMALL_SHM = "shm-small"
_SIGBUS = re.compile(
    r"\bexit ?code:? -7\b|\bcode -7\b|\bcode 135\b|\bSIGBUS\b|\b[Bb]us error\b|[Ss]ignal 7\b"
)
_SERVICES = frozenset({FaultClass.GCS, FaultClass.HUB_AUTH})
_IS_BUSY = re.compile(r"\b50[0234]\b|\b429\b|backendError|UNAVAILABLE\b|SlowDown|Too Many Requests")
_IS_REFUSED = re.compile(r"\b40[134]\b|[Dd]enied|[Ff]orbidden|[Uu]nauthori[sz]ed|[Nn]ot [Ff]ound")
_CHAIN_LINES = 200  # of what a data loader's worker raised, below the line that says that it did


def judge(launches: Sequence[LogLaunch], earlier: Sequence[LogLaunch] = ()) -> Diagnosis:
    """The diagnosis of the newest launches, one of each file. `earlier`: those before them in the
    same files.
    """
    launches = without_habits(launches, earlier)
    merged = merged_launch(launches)
    places = LaunchPlaces(merged, merged.reports)
    found = _judge(merged, candidates_of(launches), places)
    if (
        found.fault is FaultClass.UNKNOWN
        and found.root_cause is not None
        and found.confidence < STRONG
    ):
        found = _printed_early(merged, places) or found
    odd = odd_host(merged.heads)
    if odd is not None:
        found = _with_odd_host(found, odd, merged)
    found = _on_machines(_at_lone_node(found), places.machines)
    helps = found.signs.helps
    if helps is None and _has_too_little_shared_memory(found, merged):
        helps = Restart.CHANGE
    signs = replace(
        found.signs,
        helps=helps,
        trained=merged.progress is not None,
        runs_on=merged.runs_on and not has_gone_silent(launches),
        times=_times(merged, earlier),
    )
    return replace(
        found,
        launch=merged.label,
        label=merged.task,
        number=merged.number,
        log_evidence=evidence_of(merged, places),
        signs=signs,
    )


def _at_lone_node(found: Diagnosis) -> Diagnosis:
    """The diagnosis with the node that alone is not in order as a guess where its line names none."""
    root, lone = found.root_cause, found.signs.lone_node
    if root is None or root.node is not None or lone is None:
        return found
    return replace(found, root_cause=replace(root, node=lone, is_guess=True))


def _on_machines(found: Diagnosis, machines: Mapping[str, str]) -> Diagnosis:
    """The diagnosis with the names of machines in place of their addresses and of the pods that ran
    on them.
    """
    if not machines:
        return found
    root, signs = found.root_cause, found.signs
    peer, lone = signs.peer or "", signs.lone_node or ""
    signs = replace(
        signs, peer=machines.get(peer, signs.peer), lone_node=machines.get(lone, signs.lone_node)
    )
    if root is not None:
        root = replace(root, node=machines.get(root.node or "", root.node))
    return replace(found, root_cause=root, signs=signs)


def _with_odd_host(found: Diagnosis, odd: OddHost, launch: LogLaunch) -> Diagnosis:
    """The diagnosis in the light of the one host that alone said, before the first step, that
    something is missing.
    """
    line = QuotedLine(
        odd.file, odd.line_number, odd.text, node=odd.host, meaning="this host alone says so"
    )
    root, signs = found.root_cause, found.signs
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
    fault, step = found.fault, found.step
    is_told_by_gpu = odd.fault is FaultClass.GPU_HARDWARE and root.node == odd.host
    if (fault in _OF_A_PROGRAM and odd.fault is not FaultClass.UNKNOWN) or (
        fault in _OF_PEERS and is_told_by_gpu
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
    signs, root = found.signs, found.root_cause
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
    return (
        is_its or is_a_links or (root.node is None and (is_same_kind or found.fault in _OF_PEERS))
    )


def _has_too_little_shared_memory(found: Diagnosis, launch: LogLaunch) -> bool:
    """Whether a bus error ended it, and a line says that its container has next to no shared
    memory.
    """
    if found.root_cause is None or not any(
        one.signature.id == _SMALL_SHM for one in launch.sightings
    ):
        return False
    said = [found.root_cause.text, *(one.text for one in (*found.evidence, *found.consequences))]
    return any(_SIGBUS.search(text) for text in said)


def _times(last: LogLaunch, earlier: Sequence[LogLaunch]) -> int:
    """How many launches in a row one fault has ended at one step, as far as these logs tell."""
    if not earlier:
        return 1
    root = root_of(candidates_of([last]))
    times = 1
    for launch in reversed(earlier[-LOOKED_BACK:]):
        before = root_of(candidates_of([launch]))
        if root is None or before is None or before.signature.id != root.signature.id:
            break
        if not _is_same_step(before, root):
            break
        times += 1
    return times


def _is_same_step(before: Sighting, root: Sighting) -> bool:
    """Whether two faults came at the same step, or both before any."""
    if before.progress is None or root.progress is None:
        return before.progress is root.progress
    steps = before.progress.iteration, root.progress.iteration
    return steps[0] is not None and steps[1] is not None and abs(steps[0] - steps[1]) <= NEAR


def _judge(merged: LogLaunch, candidates: Candidates, places: LaunchPlaces) -> Diagnosis:
    root = with_silence(explained(root_of(candidates), merged), merged)
    root = root and _killed_for_memory(root, merged)
    if (
        root is not None
        and root.signature.role is Role.SYMPTOM
        and (
            _left_quietly(root, candidates, merged)
            or _is_after_last_step(root, candidates, merged)
            or _was_told_to_go_before(root, candidates)
        )
    ):
        root = None
    if root is None:
        unhealthy = judge_steps(merged)
        if unhealthy:
            return _from_steps(merged, unhealthy, places)
        return _nothing(merged, candidates, places)
    late = None
    if root.signature.fault is FaultClass.SLURM_USER_CANCEL:
        late = judge_data(merged) or _broken_numbers(merged)
    elif _may_follow_numbers(root):
        late = _broken_numbers(merged)
    if late is not None:  # that is why it ended, or someone ended it
        return _from_steps(merged, late, places, root)
    if root.signature.role is Role.END and judge_steps(merged) is not None:
        root = _slow_gpu(candidates) or root
    return _of_root(root, merged, candidates, places)


def _broken_numbers(launch: LogLaunch) -> Unhealthy | None:
    """The steps up to the end whose numbers are broken for good; None where they are well."""
    unhealthy = judge_steps(launch)
    if unhealthy is not None and unhealthy.is_grave:
        return unhealthy
    return None


def _slow_gpu(found: Candidates) -> Sighting | None:
    """The GPU that is said to be slow, for a training that was slower up to its end: it ended because of
    that, or will be as slow the next time.
    """
    return first_of(
        [
            one
            for one in found.causes
            if one.signature.lasting and one.signature.fault is FaultClass.GPU_HARDWARE
        ]
    )


def _killed_for_memory(root: Sighting, launch: LogLaunch) -> Sighting:
    """A death by SIGKILL as what it was where the last word of the host's memory is that it is nearly
    used up: the kernel has no other way to get some. Any other cause as it is.
    """
    signature = root.signature
    if signature.role is not Role.DEATH or signature.fault is not FaultClass.UNKNOWN:
        return root
    is_full = any(
        one.signature.id == _NEARLY_FULL and not launch.has_overcome(one)
        for one in launch.sightings
    )
    if not is_full or _SIGKILL.search(root.text) is None:
        return root
    for_memory = replace(
        signature,
        fault=FaultClass.HOST_OOM,
        step=NextStep.FIX_CONFIG,
        blame=NodeBlame.PROGRAM,
        confidence=KILLED_FOR_MEMORY,
        meaning="a process was killed when the memory of its host was nearly used up",
    )
    return replace(root, signature=for_memory)


def _printed_early(launch: LogLaunch, places: LaunchPlaces) -> Diagnosis | None:
    """What a program raised before steps that came late out of a buffer, where a worker left with
    an exit code of 1.
    """
    left = [
        report.line_number for report in launch.reports if report.is_root and report.exit_code == 1
    ]
    left += [one.line_number for one in launch.sightings if "failed (exitcode: 1)" in one.text]
    raised = [
        one
        for one in launch.sightings
        if one.signature.role is Role.CAUSE and one.raised is not None
    ]
    if not left or not raised or launch.progress is None or max(left) < launch.progress.line_number:
        return None
    root = raised[-1]
    why = (
        f"{_sentence(root)} Steps were printed after it, and a worker left with an exit code of 1."
    )
    fault, step = root.signature.fault, root.signature.step
    line = places.quoted(root, is_root=True)
    return Diagnosis(
        fault,
        step,
        confidence=AFTER_STEPS,
        root_cause=line,
        explanation=why,
    )


def judge_after(logs: Sequence[Sequence[LogLaunch]]) -> Diagnosis:
    """The diagnosis of each log's last launch, where those before them explain it.

    A GPU that failed once, and a launch right after it that found no GPU memory before its first
    step, are one fault.
    """
    launches = [log[-1] for log in logs]
    before = [log[-2] for log in logs if len(log) > 1]
    found = judge(launches, [one for log in logs for one in log[:-1]])
    is_short = found.fault is FaultClass.CUDA_OOM and all(
        launch.progress is None for launch in launches
    )
    if not before or not is_short or found.root_cause is None:
        return found
    earlier = judge(before)
    if earlier.fault is not FaultClass.GPU_HARDWARE:
        return found
    why = f"{earlier.explanation} The next launch found no memory on a GPU before its first step: the same fault."
    return replace(earlier, evidence=(*earlier.evidence, found.root_cause), explanation=why)


def merged_launch(launches: Sequence[LogLaunch]) -> LogLaunch:
    """What several files say of one launch, together."""
    if len(launches) == 1:
        return launches[0]
    main = max(launches, key=lambda launch: (launch.progress is not None, len(launch.sightings)))
    together = LogLaunch(main.file, main.first_line, main.label, task=main.task, number=main.number)
    together.nodes = next((launch.nodes for launch in launches if launch.nodes), ())
    together.world_size = next(
        (launch.world_size for launch in launches if launch.world_size), None
    )
    together.sightings = [one for launch in launches for one in launch.sightings]
    together.said_hosts = {host for launch in launches for host in launch.said_hosts}
    together.hosts_of_file = {launch.file: launch.said_hosts for launch in launches}
    together.reports = [report for launch in launches for report in launch.reports]
    together.heads = tuple(head for launch in launches for head in launch.heads)
    together.progress, together.steps = main.progress, main.steps
    together.last_line, together.is_cut = main.last_line, main.is_cut
    together.is_usual_below = main.is_usual_below
    for launch in launches:
        for name, count in launch.counts.items():
            together.counts[name] = together.counts.get(name, 0) + count
    together.trainer = next((launch.trainer for launch in launches if launch.trainer), None)
    return together


def _left_quietly(root: Sighting, found: Candidates, launch: LogLaunch) -> bool:
    """Whether the first worker to leave said nothing at all, and the symptom is what another one
    had of it.
    """
    if root.signature.confidence >= CLEAR:
        return False
    speakers = {one.origin.rank for one in found.symptoms}
    report = _first_report(launch)
    return report is not None and report.rank is not None and report.rank not in speakers


def _is_after_last_step(root: Sighting, found: Candidates, launch: LogLaunch) -> bool:
    """Whether it is the noise of processes that leave after the last step of all, one before the
    other.
    """
    last = launch.progress
    if (
        last is None
        or not last.is_last
        or root.file != launch.file
        or root.line_number <= last.line_number
    ):
        return False
    return root.signature.confidence < CLEAR and not found.summaries and not launch.reports


def _was_told_to_go_before(root: Sighting, found: Candidates) -> bool:
    """Whether a launcher that was itself told to go, which it says at its end, was so before a rank
    lost another.
    """
    told = [one for one in found.consequences if one.file == root.file]
    if not any(_TOLD_ITSELF.search(one.text) for one in told) or root.signature.confidence >= CLEAR:
        return False
    return any(is_before(one, root) for one in told) and not found.summaries


def _first_report(launch: LogLaunch) -> WorkerFailure | None:
    """The failure that torchrun's reports hold for the first, by their times."""
    roots = [
        report
        for report in launch.reports
        if report.is_root and report.exit_code not in {-15, None}
    ]
    return min(roots, key=lambda report: report.time or "~", default=None)


def _may_follow_numbers(root: Sighting) -> bool:
    """Whether an end may be what broken numbers lead to; a training may also run on with them to a
    clean end. Where the program itself says that it ended for its numbers, that says more.
    """
    if root.signature.fault is FaultClass.NUMERICS and root.raised is not None:
        return False
    return root.signature.fault in {
        FaultClass.USER_CODE,
        FaultClass.UNKNOWN,
        FaultClass.NUMERICS,
        FaultClass.CLEAN_EXIT,
    }


# ----------------------------------------------------------------------------- answers
def _of_root(
    root: Sighting, launch: LogLaunch, found: Candidates, places: LaunchPlaces
) -> Diagnosis:
    signature = root.signature
    cited = _unknown_host(root, launch) or _original(root, found)
    if (
        cited.signature.fault in _OF_THE_MACHINE and cited.signature.family != TOPICS
    ):  # it is not the loader's own
        signature = cited.signature
    quoted = places.quoted(cited, is_root=signature.role not in {Role.END, Role.STOP})
    if cited is root and _is_of_another_node(root):
        quoted = replace(quoted, rank=None, node=None, gpu=None, is_guess=False)
    silent_rank = None
    if signature.fault is not FaultClass.STORAGE:  # which all share: one rank meets it first
        silent_rank = _absent_rank([root, *found.symptoms])
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
    if _is_told_by_scheduler(signature):
        told = [one for one in [root, *_all(found)] if _is_told_by_scheduler(one.signature)]
        quoted = replace(quoted, node=places.lost_node(told), rank=None, gpu=None, is_guess=False)
    alike = [
        one
        for one in _all(found)
        if one is not root and one is not cited and one.signature.id == signature.id
    ]
    backing = [
        one
        for one in _all(found)
        if one is not root
        and one is not cited
        and one not in alike
        and one.signature.fault is signature.fault
        and _is_proof(one)
    ]
    is_a_nodes = (
        signature.step is NextStep.EXCLUDE_AND_RESUBMIT or signature.helps is Restart.ELSEWHERE
    )
    if quoted.node is None and is_a_nodes:
        by_ray = _placed_by(_tasks_of_ray(cited, found), quoted, places)
        quoted = _placed_by([*alike, *backing], by_ray, places)
    roots = [report for report in launch.reports if report.is_root and report.exit_code != -15]
    confidence = _confidence(root, found, launch=launch, alike=len(alike), roots=roots)
    step = signature.step
    peer = None
    if signature.fault is FaultClass.NCCL_NETWORK and signature.blame is not NodeBlame.NODE:
        peer = most_named_peer([root, *_all(found)], places)
        peer = refusing_peer(root, launch.sightings, places) or peer
    if peer is None or _SET_UP not in root.text:  # the peer, and not the path, is not there
        step = _step_of_network(root, alike, launch=launch, places=places, usual=step)
    if peer is not None:
        quoted = replace(quoted, rank=None, node=peer, gpu=None, is_guess=False)
    elif step is NextStep.EXCLUDE_AND_RESUBMIT and (
        _is_of_many([root, *alike], places, signature) or _flaps_everywhere(root, launch, places)
    ):
        step, quoted = NextStep.PAGE, replace(quoted, node=None)
    if signature.id == _CONTAINER and _is_of_one_of_many(root, alike, launch, places):
        signature = replace(signature, fault=FaultClass.SLURM_NODE_FAIL, helps=Restart.ELSEWHERE)
        step = NextStep.PAGE
        confidence = min(confidence, ONE_OF_MANY)
    # a warning, and no line says more
    if root.is_mild and signature.role in {Role.CAUSE, Role.SYMPTOM}:
        confidence = min(confidence, MILD)
        step = NextStep.PAGE if step is NextStep.EXCLUDE_AND_RESUBMIT else step
    after = [
        one
        for one in _all(found)
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
        + _who(root, quoted, peer, places, sightings=launch.sightings),
        signs=Signs(
            signature.role,
            signature.blame,
            helps=helps,
            peer=peer,
            ends=_ends(root, quoted, peer, places),
            silent_rank=silent_rank,
            lone_node=lone,
            signature=root.signature.id,
            proof=_proof(root, signature, quoted, places),
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


def _proof(
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


def _step_of_network(
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
        _SET_UP in root.text
        and usual is NextStep.RESUBMIT
        and _is_of_many([root, *alike], places, signature)
    ):
        return NextStep.FIX_CONFIG  # a path that none of many nodes finds is one that is not there
    is_at_start = signature.fault is FaultClass.RENDEZVOUS and launch.progress is None
    if is_at_start and _CLOSED_BEFORE.search(root.text) is not None:
        return NextStep.FIX_CONFIG  # its name is used up: an earlier launch closed it
    if _unknown_host(root, launch) is not None:
        return NextStep.FIX_CONFIG  # a name that no one knows is not known the next time either
    return usual


def _placed_by(others: Sequence[Sighting], quoted: QuotedLine, places: LaunchPlaces) -> QuotedLine:
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


def _tasks_of_ray(one: Sighting, found: Candidates) -> list[Sighting]:
    """The line of Ray that says whose task raised an exception, above that."""
    return [
        task
        for task in found.deaths
        if task.signature.id == _TASK_FAILED
        and task.file == one.file
        and 0 < one.line_number - task.line_number <= NEAR_LINES
    ][-1:]


def _absent_rank(sightings: Sequence[Sighting]) -> int | None:
    """The one rank that lines about a hang name as the one that did not come; None where they name
    none, or several.
    """
    named = {
        int(one.named["rank"])
        for one in sightings
        if one.signature.id == _ABSENT and "rank" in one.named
    }
    if len(named) == 1:
        return named.pop()
    return None


def _is_told_by_scheduler(signature: FaultSignature) -> bool:
    """Whether it is the scheduler's word that a node was lost, or a guess that it is: only who is
    named is lost.
    """
    return signature.fault is FaultClass.SLURM_NODE_FAIL and signature.family in (
        *SCHEDULERS,
        TOPICS,
    )


def _is_of_many(alike: Sequence[Sighting], places: LaunchPlaces, signature: FaultSignature) -> bool:
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


def _flaps_everywhere(root: Sighting, launch: LogLaunch, places: LaunchPlaces) -> bool:
    """Whether links of many nodes failed in turn, if most came back: then what is between them fails."""
    if root.signature.fault is not FaultClass.NCCL_NETWORK:
        return False
    flaps = [one for one in launch.sightings if one.signature.id == root.signature.id]
    return len({places.quoted(one).node for one in flaps} - {None}) >= MANY_NODES


def _is_of_one_of_many(
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


def _who(
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
    ends = _ends(root, quoted, peer, places)
    if not ends:
        return ""
    return f" A link has two ends, {ends[0]} and {ends[1]}: neither is accused by this alone."


def _ends(
    root: Sighting, quoted: QuotedLine, peer: str | None, places: LaunchPlaces
) -> tuple[str, ...]:
    """The two ends of the link that a line tells of, where neither is named by more; empty for any
    other line.
    """
    other = places.peer_of(root)
    if peer is not None or other is None or other == quoted.node:
        return ()
    return (quoted.node or "who says so", other)


def _is_of_another_node(root: Sighting) -> bool:
    """Whether who prints a line, or is named in it, is surely not the one at fault: the GPU that did
    a step well; who tells of another's check by a number.
    """
    if root.signature.id == REPLAYED_ELSEWHERE:
        return True
    return root.signature.family == _CHECKS and "node" not in root.named


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
        return min(before, key=_line_number, default=root)
    if root.signature.fault is FaultClass.NCCL_TIMEOUT and root.signature.role is Role.SYMPTOM:
        absent = [one for one in found.symptoms if one.signature.id == _ABSENT]
        if _absent_rank(absent) is not None:  # who says for whom all others waited
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


def _line_number(one: Sighting) -> int:
    return one.line_number


def _unknown_host(root: Sighting, launch: LogLaunch) -> Sighting | None:
    """The first line that says that no one knows the host of a rendezvous; None where none does."""
    if root.signature.fault is not FaultClass.RENDEZVOUS:
        return None
    return next((one for one in launch.sightings if one.signature.id == _NO_SUCH_HOST), None)


def _all(found: Candidates) -> list[Sighting]:
    return [
        *found.causes,
        *found.deaths,
        *found.stops,
        *found.symptoms,
        *found.summaries,
        *found.warnings,
        *found.ends,
    ]


def _is_proof(one: Sighting) -> bool:
    return one.signature.role in {Role.CAUSE, Role.WARNING, Role.STOP, Role.DEATH}


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
        one.signature.fault not in {root.signature.fault, FaultClass.UNKNOWN, *_OF_PEERS}
        and one.signature.confidence >= STRONG
        and (one.raised is None or not one.raised.follows)
        for one in rivals
    )


def _explanation(root: Sighting, quoted: QuotedLine, launch: LogLaunch, after: int) -> str:
    signature = root.signature
    said = _sentence(root)
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


def _sentence(one: Sighting) -> str:
    return f"{one.signature.meaning[:1].upper()}{one.signature.meaning[1:]}."


def _from_steps(
    launch: LogLaunch, unhealthy: Unhealthy, places: LaunchPlaces, root: Sighting | None = None
) -> Diagnosis:
    line = QuotedLine(launch.file, unhealthy.at.line_number, unhealthy.at.text.strip())
    evidence = () if root is None else (places.quoted(root),)
    return Diagnosis(
        unhealthy.fault,
        unhealthy.step,
        confidence=unhealthy.confidence,
        root_cause=line,
        evidence=evidence,
        explanation=unhealthy.why,
    )


def _nothing(launch: LogLaunch, found: Candidates, places: LaunchPlaces) -> Diagnosis:
    """No line says what went wrong, or that anything did."""
    untold = [places.quoted(one, is_root=True) for one in found.causes[:1]]
    report = _first_report(launch)
    evidence = tuple(places.quoted(one) for one in [*found.warnings, *found.summaries][:SHOWN])
    if found.summaries or report is not None:
        if report is None or report.rank is None:
            who = ""
        else:
            who = f": rank {report.rank} on {report.host} was the first"
        why = f"The workers failed{who}, but no line says why. Look at that worker's own log."
        root = next(iter([*untold, *evidence]), None)
        if untold:
            why = "The workers failed; this line says so, and no line says why."
        elif report is not None:
            said = f"exit code {report.exit_code}"
            root = QuotedLine(
                launch.file,
                report.line_number,
                text=said,
                rank=report.rank,
                node=report.host,
                gpu=None,
                time=report.time,
            )
        elif found.summaries:
            told = [one for one in found.consequences if one.signature.id == TOLD_TO_GO]
            root = places.quoted(first_of([*told, found.summaries[0]]) or found.summaries[0])
        return _untold(root, why, evidence)
    return replace(_no_failure_told(launch, found, places, untold), evidence=evidence)


def _untold(line: QuotedLine | None, why: str, evidence: tuple[QuotedLine, ...] = ()) -> Diagnosis:
    """That it failed, and that no line says why."""
    return Diagnosis(
        FaultClass.UNKNOWN,
        NextStep.PAGE,
        confidence=MILD,
        root_cause=line,
        evidence=evidence,
        explanation=why,
    )


def _no_failure_told(
    launch: LogLaunch,
    found: Candidates,
    places: LaunchPlaces,
    untold: Sequence[QuotedLine],
) -> Diagnosis:
    """What is left where no launcher says that its workers failed."""
    done = ""
    if launch.progress is not None and launch.progress.iteration is not None:
        done = f" It ends after step {launch.progress.iteration}."
    hang = _hang(launch, found)
    if hang is not None:
        return Diagnosis(
            hang.signature.fault,
            NextStep.PAGE,
            confidence=hang.signature.confidence,
            root_cause=places.quoted(hang),
            explanation=_sentence(hang) + done,
        )
    if found.consequences:
        root = places.quoted(found.consequences[0])
        why = f"The processes were told to go, and no line says by whom.{done}"
        return Diagnosis(
            FaultClass.UNKNOWN,
            NextStep.RESUBMIT,
            confidence=0.5,
            root_cause=root,
            explanation=why,
        )
    warned = _last_warning(launch, found)
    if warned is not None and not untold:
        why = f"{_sentence(warned)} Nothing else says why it ended.{done}"
        return Diagnosis(
            warned.signature.fault,
            NextStep.PAGE,
            confidence=MILD,
            root_cause=places.quoted(warned),
            explanation=why,
            signs=Signs(
                warned.signature.role, warned.signature.blame, signature=warned.signature.id
            ),
        )
    whole = _by_last_step(launch, found, places)
    if whole is not None and whole.fault is FaultClass.CLEAN_EXIT:
        return whole
    if untold:
        why = f"This line says that something failed, and nothing that is known.{done}"
        return _untold(untold[0], why)
    return whole or Diagnosis(
        FaultClass.UNKNOWN,
        NextStep.NONE,
        confidence=0.6,
        root_cause=None,
        explanation=f"Nothing in this log says that anything went wrong.{done}",
    )


def _last_warning(launch: LogLaunch, found: Candidates) -> Sighting | None:
    """The first warning of a known kind that came after the last step of a launch that did not come
    to its last one.
    """
    last = launch.progress
    if last is not None and last.is_last:
        return None
    below = 0 if last is None else last.line_number
    return next(
        (
            one
            for one in found.warnings
            if one.signature.confidence >= TELLING
            and one.signature.fault in _OF_MACHINES
            and (one.file != launch.file or one.line_number > below)
            and not one.is_retried
        ),
        None,
    )


def _by_last_step(launch: LogLaunch, found: Candidates, places: LaunchPlaces) -> Diagnosis | None:
    """What the last step says of the end, where it names the training's last one too."""
    last = launch.progress
    if last is None or last.is_last is None:
        return None
    if found.short_ends and not last.is_last:
        line = places.quoted(found.short_ends[0])
        why = f"The loop of the training ended at step {last.iteration} of {last.total}, and no line says why."
        return _untold(line, why)
    if last.is_last:
        quoted = QuotedLine(launch.file, last.line_number, last.text.strip())
        why = f"It came to its last step, {last.iteration}, and nothing says that anything went wrong."
        return Diagnosis(
            FaultClass.CLEAN_EXIT,
            NextStep.NONE,
            confidence=WHOLE,
            root_cause=quoted,
            explanation=why,
        )
    return None


def _hang(launch: LogLaunch, found: Candidates) -> Sighting | None:
    """The first of several lines that say that the job runs, where no step came any more; what it
    hangs at, if told.
    """
    last = 0 if launch.progress is None else launch.progress.line_number
    below = [one for one in found.warnings if one.line_number > last]
    silent = [one for one in below if one.signature.id == "pulse-running"]
    places = [one for one in below if one.signature.id == "hang-place"]
    if places and silent:
        return places[-1]
    if len(silent) >= SILENT:
        return silent[0]
    return None
