"""A diagnosis for people, in 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import PurePath

from tr11ops.diagnose.answers import Accused, Culprit
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.places import worker_of
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart

WIDTH = 80
LABEL = 12
SHOWN = 4

_WITH_COMMAND = frozenset({NextStep.EXCLUDE_AND_RESUBMIT, NextStep.ROLLBACK_AND_SKIP})
WORDS = {
    FaultClass.GPU_HARDWARE: "broken GPU",
    FaultClass.NCCL_NETWORK: "network between the nodes",
    FaultClass.NCCL_TIMEOUT: "hang in a collective",
    FaultClass.CUDA_OOM: "out of GPU memory",
    FaultClass.HOST_OOM: "out of memory on a node",
    FaultClass.DATALOADER: "data loader",
    FaultClass.STORAGE: "storage",
    FaultClass.CHECKPOINT_MISMATCH: "checkpoint does not fit or is damaged",
    FaultClass.NUMERICS: "numbers not finite, or diverging",
    FaultClass.SLURM_TIME_LIMIT: "time limit",
    FaultClass.SLURM_PREEMPTED: "preempted",
    FaultClass.SLURM_NODE_FAIL: "node lost",
    FaultClass.SLURM_USER_CANCEL: "cancelled by a person",
    FaultClass.SLURM_SUBMIT: "not accepted by Slurm",
    FaultClass.SLURM_AUTH: "Slurm's authentication",
    FaultClass.RENDEZVOUS: "workers did not find each other",
    FaultClass.USER_CODE: "the program",
    FaultClass.HUB_AUTH: "access to the hub",
    FaultClass.GCS: "object store",
    FaultClass.CLEAN_EXIT: "clean end",
    FaultClass.UNKNOWN: "cannot tell",
    FaultClass.RUNNING: "nothing has ended, it runs and is well",
}
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
    yield from _row(
        "verdict", f"{found.fault}: {WORDS[found.fault]} (confidence {found.confidence:.2f})"
    )
    root = found.root_cause
    if root is not None and root.node and not root.is_guess:
        node = root.node
    else:
        node = _blamed(found)
    yield from _row("to blame", _blame(found))
    helps = found.restart
    yield from _row(
        "restart", f"{RESTARTS[helps.answer]} (confidence {helps.confidence:.2f}): {helps.why}"
    )
    yield from _row("what to do", _what_to_do(found, node), most=8)
    if found.label or found.launch:
        yield from _row("attempt", found.label or found.launch)
    if root is not None:
        yield from _row("root cause", f"{root.file}:{root.line_number}")
        yield from _row("", root.text)
        where = _place(root)
        if where:
            yield from _row("where", where)
    yield from _row("why", found.explanation, most=8)
    yield from _quoted("evidence", found.evidence)
    if found.consequence_count:
        yield from _quoted("then", found.consequences[:2], found.consequence_count)


def _what_to_do(found: Diagnosis, node: str) -> str:
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
    general = STEPS[action]
    if action in _WITH_COMMAND:  # the advice has the command that holds
        general = f"{general.partition(': tr11 ')[0]}."
    return f"{general} {found.advice}"


def _blamed(found: Diagnosis) -> str:
    """The nodes that the records blame, as a command takes them; "" where they blame none."""
    blamed = () if found.conclusion is None else found.conclusion.found.blamed
    return ",".join(blamed)


def _blame(found: Diagnosis) -> str:
    """Who is to blame, and how sure that is."""
    accused = found.accused
    who = _who(accused)
    if accused.nodes and not accused.is_proved:
        who += ", only suspected"
    if found.conclusion is None:
        kind = ""
    else:
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
    wide = WIDTH - LABEL - 2
    parts = textwrap.wrap(
        text, wide, break_on_hyphens=False, max_lines=most, placeholder=" ..."
    ) or [""]
    for number, part in enumerate(parts):
        yield f"{label if number == 0 else '':>{LABEL}}  {part}".rstrip()
