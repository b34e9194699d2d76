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

from tr11ops.diagnose.attribution.log_evidence import evidence_of
from tr11ops.diagnose.candidates import Candidates, candidates_of
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.from_root import diagnosis_of_root
from tr11ops.diagnose.harmless import without_habits
from tr11ops.diagnose.hosts import odd_host
from tr11ops.diagnose.no_root import diagnosis_without_root
from tr11ops.diagnose.numbers import Unhealthy, judge_data, judge_steps
from tr11ops.diagnose.odd_hosts import with_odd_host
from tr11ops.diagnose.order import STRONG, first_of, is_before
from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.roots import CLEAR, root_of
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import (
    FaultClass,
    NextStep,
    NodeBlame,
    Restart,
    Role,
)
from tr11ops.diagnose.silence import has_gone_silent, with_silence
from tr11ops.diagnose.starts import explained

AFTER_STEPS = 0.55  # for what the training seems to have overcome
LOOKED_BACK = 4  # earlier launches, of which the newest are asked whether they ended alike
NEAR = 1  # steps: the one in which it fails is logged, or just not
_TOLD_ITSELF = re.compile(r"SignalException: Process \d+ got signal")
_NEARLY_FULL = "memory-nearly-full"
KILLED_FOR_MEMORY = 0.75
_SIGKILL = re.compile(
    r"SIGKILL|[Ss]ignal:? ?9\b|\bexit ?code:? -9\b|= -9\b|: Killed\b|\b137\b|\(exitcode: -9\)"
)
_SMALL_SHM = "shm-small"
_SIGBUS = re.compile(
    r"\bexit ?code:? -7\b|\bcode -7\b|\bcode 135\b|\bSIGBUS\b|\b[Bb]us error\b|[Ss]ignal 7\b"
)


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
        found = with_odd_host(found, odd, merged)
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
    root = found.root_cause
    lone = found.signs.lone_node
    if root is None or root.node is not None or lone is None:
        return found
    return replace(found, root_cause=replace(root, node=lone, is_guess=True))


def _on_machines(found: Diagnosis, machines: Mapping[str, str]) -> Diagnosis:
    """The diagnosis with the names of machines in place of their addresses and of the pods that ran
    on them.
    """
    if not machines:
        return found
    root = found.root_cause
    signs = found.signs
    peer = signs.peer or ""
    lone = signs.lone_node or ""
    signs = replace(
        signs, peer=machines.get(peer, signs.peer), lone_node=machines.get(lone, signs.lone_node)
    )
    if root is not None:
        root = replace(root, node=machines.get(root.node or "", root.node))
    return replace(found, root_cause=root, signs=signs)


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
        return diagnosis_without_root(merged, candidates, places)
    late = None
    if root.signature.fault is FaultClass.SLURM_USER_CANCEL:
        late = judge_data(merged) or _broken_numbers(merged)
    elif _may_follow_numbers(root):
        late = _broken_numbers(merged)
    if late is not None:  # that is why it ended, or someone ended it
        return _from_steps(merged, late, places, root)
    if root.signature.role is Role.END and judge_steps(merged) is not None:
        root = _slow_gpu(candidates) or root
    return diagnosis_of_root(root, merged, candidates, places)


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
    why = f"{root.sentence} Steps were printed after it, and a worker left with an exit code of 1."
    fault = root.signature.fault
    step = root.signature.step
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
    together.progress = main.progress
    together.steps = main.steps
    together.last_line = main.last_line
    together.is_cut = main.is_cut
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
    report = launch.first_report
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
