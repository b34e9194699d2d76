"""A diagnosis for people, in 80 columns but for long paths. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from tr11ops.base.units import first_few, timestamp, wrapped
from tr11ops.diagnose.answers import Accused, Culprit
from tr11ops.diagnose.diagnosis import Diagnosis, NowState, QuotedLine, RunNow
from tr11ops.diagnose.places import worker_of
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

WIDTH = 79  # a screen of 80 columns may have a scroll bar
LABEL = 12
SHOWN = 4
SECONDS = "%Y-%m-%d %H:%M:%S %Z"  # who went silent first is told by seconds

_WAS_STARTED = frozenset({NowState.TRAINS, NowState.STARTS, NowState.FOLLOWED})
STEPS = {
    NextStep.EXCLUDE_AND_RESUBMIT: "Keep the node out, and submit again: tr11 nodes exclude {node}",
    NextStep.RESUBMIT: "Submit again.",
    NextStep.FIX_CONFIG: "Correct the program, the data or the run card first; it will fail again.",
    NextStep.FIX_STORAGE: "Make room, or repair the file system, before it starts again.",
    NextStep.ROLLBACK_AND_SKIP: "Go back to a checkpoint before it, and skip the data: tr11 rollback",
    NextStep.PAGE: "A person has to look at this.",
    NextStep.NONE: "Nothing.",
}
UNNAMED = "Submit again without the node that failed, which this log does not name: sinfo -R, sacct or its own log may."
SUSPECTED = "Submit again, without {node} while enough others are free: one log makes a suspect, and proves nothing."
SEEN_TO_TRAIN = "It goes on if `tr11 status` shows new iterations."
SEEN_TO_START = "It has recovered when `tr11 status` shows new iterations."
KEPT_BACK = "It would end the same way: `tr11 pause` keeps it from starting before."
MORE_TO_TRAIN = "It ended as it should, and more is left to train."
IN_VAIN = "A person has to look first: the same again would end the same way."
RESTARTS = {
    Restart.PLAIN: "yes",
    Restart.ELSEWHERE: "yes, on other nodes",
    Restart.CHANGE: "no, change something first",
    Restart.UNKNOWN: "cannot say",
    Restart.NONE: "nothing to restart",
}


def lines(found: Diagnosis) -> Iterator[str]:
    """The screen, line by line."""
    yield from _row("verdict", f"{found.fault}: {_head(found)} (confidence {found.confidence:.2f})")
    root = found.root_cause
    node = _blamed(found)
    if root is not None and root.node and not root.is_guess:
        node = root.node
    yield from _row("to blame", _blame(found))
    yield from _row("restart", _restart(found), most=6)
    yield from _row("what to do", _what_to_do(found, node), most=8)
    if found.label or found.launch:
        yield from _row("attempt", found.label or found.launch)
    if root is not None:
        yield from _row("root cause", f"{root.file}:{root.line_number}")
        yield from _row("", root.text)
        where = _place(root)
        if where:
            is_blamed = found.accused.kind is not Culprit.NO_ONE
            yield from _row("where" if is_blamed else "seen on", where)
    yield from _row("why", found.explanation, most=8)
    yield from _quoted("evidence", found.evidence)
    if found.last_signs:
        yield from _row("last signs", _last_signs(found))
        yield from _row("scheduler", _of_scheduler(found))
    if found.consequence_count:
        yield from _quoted("then", found.consequences[:2], found.consequence_count)


def _last_signs(found: Diagnosis) -> str:
    """When each node was last heard of: those of which nothing is known, then who went silent first."""
    ordered = sorted(found.last_signs.items(), key=lambda entry: (entry[1] or 0.0, entry[0]))
    said = [
        f"{node} {'unknown' if when is None else timestamp(when, None, SECONDS)}"
        for node, when in ordered
    ]
    return first_few(said, SHOWN)


def _of_scheduler(found: Diagnosis) -> str:
    """What the scheduler says of the job, and of the nodes that are to blame."""
    job = found.job
    if job is None:
        return "unknown"
    reason = ""
    if job.reason:
        reason = f" ({job.reason})"
    said = f"job {job.job_id}: {job.end_words}{reason}"
    return "; ".join((said, *(node.words for node in found.nodes)))


def _head(found: Diagnosis) -> str:
    """The class in words; where the cause is not known, how it ended."""
    if found.fault is not FaultClass.UNKNOWN or found.conclusion is None:
        return found.fault.words
    return f"nothing says why: {found.conclusion.found.summary}"


def _restart(found: Diagnosis) -> str:
    """Whether a plain restart helps; where it was made already, since when, in which job and from where."""
    now = found.now
    helps = found.restart
    if now is not None and now.state in _WAS_STARTED:
        return now.text
    answer = f"{RESTARTS[helps.answer]} (confidence {helps.confidence:.2f}): {helps.why}"
    if now is None or now.state in {NowState.UNKNOWN, NowState.FINISHED}:
        return answer
    if now.state is NowState.STOPPED:
        return f"{now.text} It starts when that is taken back."
    if helps.answer is Restart.NONE:
        return now.text
    return answer


def _what_to_do(found: Diagnosis, node: str) -> str:
    now = found.now
    if now is None or now.state is NowState.UNKNOWN:
        return _in_general(found, node)
    return f"{_by_now(found, now, node)} {found.advice}".strip()


def _by_now(found: Diagnosis, now: RunNow, node: str) -> str:
    """What to do by how the run stands now."""
    if now.to_exclude:
        return _keeping_out(found, now)
    if now.state is NowState.FINISHED:
        return f"Nothing. {now.text}"
    if now.state is NowState.STOPPED:
        return _stopped(found, now, node)
    if now.goes_on:
        return _going_on(found, now)
    return _standing(found, now)


def _going_on(found: Diagnosis, now: RunNow) -> str:
    """What to do where it trains, or will, without a person; and how one sees that it does."""
    if now.commands:
        return f"It goes on, and a fault stands: type {_typed(now.commands)}"
    if now.state is NowState.TRAINS and now.is_again:
        return f"Nothing. {SEEN_TO_TRAIN}"
    if now.state in {NowState.TRAINS, NowState.FOLLOWED}:
        return "Nothing."
    if found.may_end_alike:
        return f"{_without_command(STEPS[found.step_alone])} {now.text} {KEPT_BACK}"
    if now.state is NowState.QUEUED:
        return f"Nothing now. {now.text} {SEEN_TO_START}"
    return f"Nothing now. {SEEN_TO_START}"


def _stopped(found: Diagnosis, now: RunNow, node: str) -> str:
    general = ""
    if found.action is not NextStep.NONE:
        general = f"{STEPS[found.action].format(node=node)} "
    if not now.commands:
        return f"{general}Whether it goes on is for who submitted it to say."
    return f"{general}Nothing trains until it is resumed: {_typed(now.commands)}"


def _standing(found: Diagnosis, now: RunNow) -> str:
    """What is to be typed where nothing goes on by itself."""
    general = _first(found)
    if not now.commands:
        return f"{general} {now.text}".strip()
    if not general:
        return f"Type {_typed(now.commands)}"
    return f"{general} Then type {_typed(now.commands)}"


def _first(found: Diagnosis) -> str:
    """What comes before the commands that start it again; "" where nothing does."""
    step = found.step_alone
    if step is NextStep.RESUBMIT or found.fault is FaultClass.STALLED:
        return ""
    if step is NextStep.NONE:
        if found.fault is FaultClass.CLEAN_EXIT:
            return MORE_TO_TRAIN
        return ""
    if step is NextStep.EXCLUDE_AND_RESUBMIT:
        if found.accused.nodes:
            return ""
        return UNNAMED
    if found.step is NextStep.RESUBMIT and step is NextStep.PAGE:
        return IN_VAIN
    return _without_command(STEPS[step])


def _keeping_out(found: Diagnosis, now: RunNow) -> str:
    """A node that is proved to be at fault, and may be used still, whatever the run does."""
    more = f"{now.text} {SEEN_TO_START}"
    if now.commands:
        more = f"Then type {_typed(now.commands)}"
    if found.advice:  # it has the command that the limit lets pass
        return more
    return f"Keep the node out: `tr11 nodes exclude {','.join(now.to_exclude)}`. {more}"


def _typed(commands: Sequence[str]) -> str:
    """The commands in order, as a sentence ends."""
    return ", then ".join(f"`{line}`" for line in commands) + "."


def _without_command(general: str) -> str:
    return f"{general.partition(': tr11 ')[0].rstrip('.')}."


def _in_general(found: Diagnosis, node: str) -> str:
    """What to do where only the end is known."""
    action = found.action
    if action is NextStep.EXCLUDE_AND_RESUBMIT and not node:
        return UNNAMED
    if found.step is NextStep.EXCLUDE_AND_RESUBMIT and action is NextStep.RESUBMIT:
        return f"{SUSPECTED.format(node=node)} {found.advice}".strip()
    if found.step is NextStep.RESUBMIT and action is NextStep.PAGE:
        return f"{IN_VAIN} {found.advice}".strip()
    if not found.advice:
        return STEPS[action].format(node=node)
    if action is NextStep.NONE:  # by the log alone
        return found.advice
    return f"{_without_command(STEPS[action])} {found.advice}"  # which has the command that holds


def _blamed(found: Diagnosis) -> str:
    """The nodes that the records blame, as a command takes them; "" where they blame none."""
    blamed = () if found.conclusion is None else found.conclusion.found.blamed
    return ",".join(blamed)


def _blame(found: Diagnosis) -> str:
    """Who is to blame, and how sure that is."""
    accused = found.accused
    who = _who(accused)
    if accused.nodes and found.fault is FaultClass.SLOW:
        who += ", slow"
    elif accused.nodes and not accused.is_proved:
        who += ", only suspected"
    kind = ""
    if found.conclusion is not None:
        kind = f"{found.conclusion.found.kind}, "
    return f"{who} ({kind}confidence {accused.confidence:.2f})"


def _who(accused: Accused) -> str:
    nodes = ", ".join(accused.nodes)
    match accused.kind:
        case Culprit.NODE:
            return nodes
        case Culprit.GPU:
            return f"GPU {accused.gpu} of {nodes}"
        case Culprit.RANK:
            if nodes:
                return f"rank {accused.rank} on {nodes}"
            return f"rank {accused.rank}"
        case Culprit.LINK:
            return "a link, and neither of its ends alone"
        case Culprit.NO_ONE:
            return "no node"
    return "cannot tell"


def _place(line: QuotedLine) -> str:
    words = [
        "" if line.rank is None else f"rank {line.rank}",
        "" if line.node is None else f"node {line.node}",
        "" if line.gpu is None else f"GPU {line.gpu}",
        "" if line.time is None else f"at {line.time}",
    ]
    return ", ".join(word for word in words if word)


def _quoted(label: str, quoted: tuple[QuotedLine, ...], count: int = 0) -> Iterator[str]:
    for number, line in enumerate(quoted[:SHOWN]):
        text = f"{_file(line.file)}:{line.line_number}: {line.text}"
        yield from _row(label if number == 0 else "", text, most=2)
    left = (count or len(quoted)) - len(quoted[:SHOWN])
    if left > 0:
        yield from _row("", f"and {left:,} more")


def _file(path: str) -> str:
    """A log's name; of a worker's log its node too, as they are all called alike."""
    parts = PurePath(path).parts
    if worker_of(path) is not None:
        return "/".join(parts[-2:])
    return parts[-1]


def _row(label: str, text: str, most: int = 4) -> Iterator[str]:
    """A label and its text, folded."""
    for number, part in enumerate(wrapped(text, width=WIDTH - LABEL - 2, most=most)):
        yield f"{label if number == 0 else '':>{LABEL}}  {part}".rstrip()
