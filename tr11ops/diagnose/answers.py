"""Who is to blame for an end, and whether a plain restart helps: two answers beside what happened.
Pure.

A plain restart is the same program with the same settings from the newest checkpoint. Both answers
have a confidence of their own: the weight of the rule that led to it, fitted on labelled logs
(`answers.toml`), less where what happened is itself not sure. `tr11 diagnose` and the agent ask the
same function whether it helps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tr11ops.diagnose.attribution.weights import read_weights
from tr11ops.diagnose.signature import FaultClass, NextStep, NodeBlame, Proof, Restart, Role
from trainer.contract.record import Record

FILE = Path(__file__).with_name("answers.toml")
AT_LEAST = 0.5  # of a rule's weight that is left where what happened is a guess
MOST = 0.97
REPEATED = 2  # launches in a row that one fault ended at one step

_ORDERS = frozenset({FaultClass.SLURM_TIME_LIMIT, FaultClass.SLURM_PREEMPTED})
_NO_ONES = frozenset(
    {
        FaultClass.SLURM_TIME_LIMIT,
        FaultClass.SLURM_PREEMPTED,
        FaultClass.SLURM_USER_CANCEL,
        FaultClass.SLURM_SUBMIT,
        FaultClass.CLEAN_EXIT,
        FaultClass.RUNNING,
        FaultClass.KILLED,
    }
)
_OF_ONE_NODE = frozenset({FaultClass.GPU_HARDWARE, FaultClass.NCCL_NETWORK, FaultClass.STORAGE})
CHANGES = frozenset({NextStep.FIX_CONFIG, NextStep.FIX_STORAGE, NextStep.ROLLBACK_AND_SKIP})


class Culprit(StrEnum):
    """What is to blame. NO_ONE: the program, its settings, an order, what all nodes share."""

    NODE = "node"
    GPU = "gpu"
    RANK = "rank"
    LINK = "link"
    NO_ONE = "no_one"
    UNKNOWN = "unknown"


class Signs(Record):
    """What a log or an attempt's records tell beside the class of the fault and the step to take.

    `signature`, `role`: of the line that tells of the first cause, "" and None where none does. `helps`: what the
    signature itself says of a restart. `peer`: whom several witnesses of a broken link name; `ends`: the two ends of a
    link of which neither is named by more. `silent_rank`: the one that did not come to a collective. `lone_node`: whose
    machine alone is not in order. `trained`: whether this launch made steps. `runs_on`: whether the log's last line is
    a whole step. `times`: launches in a row that this fault ended at this step.
    `missing`: what would tell whether it comes again, where the log does not. `proof`: why the line itself condemns the
    node that it names; None where that is only a suspect.
    """

    role: Role | None = None
    blame: NodeBlame = NodeBlame.UNKNOWN
    helps: Restart | None = None
    peer: str | None = None
    ends: tuple[str, ...] = ()
    silent_rank: int | None = None
    lone_node: str | None = None
    trained: bool = False
    runs_on: bool = False
    times: int = 1
    signature: str = ""
    missing: str = ""
    proof: Proof | None = None


class Accused(Record):
    """Who is to blame. `nodes`: those that a command can name. `is_proved`: more than suspected."""

    kind: Culprit
    confidence: float
    nodes: tuple[str, ...] = ()
    rank: int | None = None
    gpu: str | None = None
    is_proved: bool = False
    rule: str = ""

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "kind": self.kind.value,
            "nodes": list(self.nodes),
            "rank": self.rank,
            "gpu": self.gpu,
            "proved": self.is_proved,
            "confidence": round(self.confidence, 2),
        }


class RestartAnswer(Record):
    """Whether a plain restart helps, and why, in words."""

    answer: Restart
    confidence: float
    why: str
    rule: str = ""

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "answer": self.answer.value,
            "confidence": round(self.confidence, 2),
            "why": self.why,
        }


@cache
def weights() -> Mapping[str, float]:
    """Confidence by rule, 0 to 1."""
    return {name: float(entry["confidence"]) for name, entry in read_weights(FILE).items()}


def share_left(sure: float) -> float:
    """What is left of a rule's weight where what happened is only so sure."""
    return AT_LEAST + (1 - AT_LEAST) * sure


def _weighed(rule: str, sure: float) -> float:
    return min(MOST, weights()[rule] * share_left(sure))


# ----------------------------------------------------------------------------- whether a restart
# helps
class EndFacts(NamedTuple):
    """What both answers rest on. `sure`: how sure the class is. `proved`: nodes that are known to
    be at fault.
    """

    fault: FaultClass
    step: NextStep
    sure: float
    signs: Signs
    proved: tuple[str, ...] = ()


class _Because(NamedTuple):
    rule: str
    answer: Restart
    why: str


def restart_of(end: EndFacts) -> RestartAnswer:
    """Whether a plain restart helps: the first rule that says."""
    found = next(said for rule in _RULES if (said := rule(end)) is not None)
    return RestartAnswer(
        found.answer, _weighed(f"restart-{found.rule}", end.sure), found.why, found.rule
    )


def _where_nothing_failed(end: EndFacts) -> _Because | None:
    if end.step is not NextStep.NONE:
        return None
    if end.fault in {FaultClass.UNKNOWN, FaultClass.RUNNING} and end.signs.runs_on:
        return _Because(
            "runs-on", Restart.NONE, "it made steps to the last line, and may run still"
        )
    if end.fault is FaultClass.RUNNING:
        return _Because("runs-on", Restart.NONE, "nothing has ended")
    if end.fault is FaultClass.UNKNOWN:
        return _Because("nothing-told", Restart.UNKNOWN, "nothing says that it ended, or why")
    return _Because("ended", Restart.NONE, "it ended as it should, or someone wanted it")


def _of_a_node(end: EndFacts) -> _Because | None:
    if not end.proved:
        return None
    return _Because("node", Restart.ELSEWHERE, f"the fault is {', '.join(end.proved)}'s own")


def _again(end: EndFacts) -> _Because | None:
    """What comes again at the same step follows the training; hardware may fail twice."""
    is_other = end.fault in _ORDERS or end.step is NextStep.EXCLUDE_AND_RESUBMIT
    if end.signs.times < REPEATED or is_other:
        return None
    why = f"the same fault came {end.signs.times} times in a row at the same step"
    return _Because("again", Restart.CHANGE, why)


def _of_an_order(end: EndFacts) -> _Because | None:
    if end.fault is FaultClass.KILLED:
        return _Because("order", Restart.PLAIN, "a signal ended it, and nothing had failed")
    if end.fault not in _ORDERS or end.signs.helps is Restart.UNKNOWN:
        return None
    if end.fault is FaultClass.SLURM_TIME_LIMIT and not end.signs.trained:
        return _Because(
            "limit", Restart.PLAIN, "its time was up; no step was seen, so look whether it hung"
        )
    return _Because("order", Restart.PLAIN, "the scheduler ended it, and nothing failed")


def _by_its_signature(end: EndFacts) -> _Because | None:
    helps = end.signs.helps
    if helps is None:
        return None
    return _Because(f"own-{helps}", helps, _OWN[helps])


_OWN: Mapping[Restart, str] = {
    Restart.PLAIN: "this passes by itself",
    Restart.ELSEWHERE: "it is one node's, and others will do",
    Restart.CHANGE: "it fails again until that is repaired",
    Restart.UNKNOWN: "what this means cannot be told from here",
}


def _of_hardware(end: EndFacts) -> _Because | None:
    if end.step is not NextStep.EXCLUDE_AND_RESUBMIT:
        return None
    return _Because(
        "hardware", Restart.ELSEWHERE, "the hardware of a node failed, so far as this log tells"
    )


def _of_what_is_not_shown(end: EndFacts) -> _Because | None:
    signs = end.signs
    if end.step is not NextStep.RESUBMIT or signs.peer is not None or not signs.missing:
        return None
    return _Because(
        "not-shown", Restart.UNKNOWN, f"whether it comes again is not told: {signs.missing}"
    )


def _of_a_lone_node(end: EndFacts) -> _Because | None:
    if (
        end.step is not NextStep.RESUBMIT
        or end.signs.peer is not None
        or end.signs.lone_node is None
    ):
        return None
    return _lone(end.signs.lone_node)


def _of_what_passes(end: EndFacts) -> _Because | None:
    signs = end.signs
    if end.step is not NextStep.RESUBMIT:
        return None
    if signs.peer is not None:
        return _Because("peer", Restart.ELSEWHERE, f"{signs.peer} is suspected")
    if end.fault is FaultClass.UNKNOWN:
        return _Because(
            "death-untold",
            Restart.UNKNOWN,
            "something ended it, and no line says why: one try tells",
        )
    if signs.role is Role.DEATH and not signs.trained:
        return _Because(
            "death-at-start",
            Restart.UNKNOWN,
            "it failed before its first step, and no line says why",
        )
    is_hang = signs.role is Role.SYMPTOM and end.fault is FaultClass.NCCL_TIMEOUT
    if is_hang and signs.silent_rank is None:
        return _Because(
            "hang-untold",
            Restart.UNKNOWN,
            "ranks waited in vain for others, and no line says why: one try tells",
        )
    if signs.role is Role.SYMPTOM:
        return _Because(
            "lost-peer", Restart.PLAIN, "a peer was lost or late, and no line says why: it may pass"
        )
    return _Because("passes", Restart.PLAIN, "such a fault mostly passes")


def _of_what_must_change(end: EndFacts) -> _Because | None:
    if end.step is NextStep.ROLLBACK_AND_SKIP:
        return _Because("numbers", Restart.CHANGE, "the same data would break the numbers again")
    if end.step not in {NextStep.FIX_STORAGE, NextStep.FIX_CONFIG}:
        return None
    if end.signs.lone_node is not None:
        return _lone(end.signs.lone_node)
    if end.step is NextStep.FIX_STORAGE:
        return _Because("storage", Restart.CHANGE, "the storage has to be freed or repaired first")
    # what had trained for a while is not set up wrongly, yet may meet the same again
    if end.signs.trained:
        return _Because(
            "settings-after-steps",
            Restart.CHANGE,
            "the same program meets it again at the same place",
        )
    return _Because(
        "settings", Restart.CHANGE, "the same program with the same settings fails again"
    )


def _lone(node: str) -> _Because:
    return _Because("lone-node", Restart.ELSEWHERE, f"{node} alone is not in order")


def _of_what_a_person_must_see(end: EndFacts) -> _Because:
    if end.signs.lone_node is not None:
        return _lone(end.signs.lone_node)
    if end.fault is FaultClass.SLURM_AUTH:
        return _Because(
            "auth", Restart.CHANGE, "the daemons' keys or clocks have to be set right first"
        )
    if end.fault is FaultClass.UNKNOWN:
        return _Because("untold", Restart.UNKNOWN, "no line says why it ended")
    return _Because("person", Restart.UNKNOWN, "a person has to look first")


_RULES: tuple[Callable[[EndFacts], _Because | None], ...] = (
    _where_nothing_failed,
    _of_a_node,
    _again,
    _of_an_order,
    _by_its_signature,
    _of_hardware,
    _of_a_lone_node,
    _of_what_is_not_shown,
    _of_what_passes,
    _of_what_must_change,
    _of_what_a_person_must_see,
)


# the step to take, where the answer has another
AGREED: Mapping[tuple[NextStep, Restart], NextStep] = {
    (NextStep.RESUBMIT, Restart.CHANGE): NextStep.PAGE,  # the same again would end the same way
    (NextStep.FIX_CONFIG, Restart.PLAIN): NextStep.RESUBMIT,
    (NextStep.FIX_STORAGE, Restart.PLAIN): NextStep.RESUBMIT,
    (NextStep.FIX_CONFIG, Restart.UNKNOWN): NextStep.PAGE,
}


# ----------------------------------------------------------------------------- who is to blame
class Place(NamedTuple):
    """Where the line of the first cause came from, as far as that is known."""

    node: str | None = None
    rank: int | None = None
    gpu: str | None = None


def accused_by_log(end: EndFacts, place: Place) -> Accused:
    """Who is to blame by what a log says alone."""
    return _a_node(end, place) or _a_rank_or_link(end, place) or _no_one(end)


def _a_node(end: EndFacts, place: Place) -> Accused | None:
    nodes = () if place.node is None else (place.node,)
    if end.signs.peer is not None:
        return _accused(Culprit.NODE, "peer", end.sure, (end.signs.peer,))
    if end.signs.lone_node is not None:
        return _accused(Culprit.NODE, "suspect", end.sure, (end.signs.lone_node,))
    if end.step is NextStep.EXCLUDE_AND_RESUBMIT and nodes:
        is_gpus = end.fault is FaultClass.GPU_HARDWARE and place.gpu is not None
        rule = "suspect" if end.signs.proof is None else "hardware"
        return _accused(
            Culprit.GPU if is_gpus else Culprit.NODE, rule, sure=end.sure, nodes=nodes, place=place
        )
    if end.step is NextStep.EXCLUDE_AND_RESUBMIT:
        return _accused(Culprit.UNKNOWN, "unnamed", end.sure)
    is_one_nodes = end.fault in _OF_ONE_NODE and end.signs.helps is Restart.ELSEWHERE
    if nodes and (is_one_nodes or end.fault is FaultClass.SLURM_NODE_FAIL):
        is_gpus = end.fault is FaultClass.GPU_HARDWARE and place.gpu is not None
        return _accused(
            Culprit.GPU if is_gpus else Culprit.NODE, "suspect", end.sure, nodes, place=place
        )
    return None


def _a_rank_or_link(end: EndFacts, place: Place) -> Accused | None:
    if end.signs.ends:
        return _accused(Culprit.LINK, "link", end.sure)
    if end.signs.silent_rank is None:
        return None
    nodes = () if place.node is None else (place.node,)
    return _accused(
        Culprit.RANK,
        "silent-rank",
        sure=end.sure,
        nodes=nodes,
        place=Place(place.node, end.signs.silent_rank),
    )


def _no_one(end: EndFacts) -> Accused:
    if end.fault in _NO_ONES:
        return _accused(Culprit.NO_ONE, "order", end.sure)
    if end.step in CHANGES or end.signs.blame is NodeBlame.PROGRAM:
        return _accused(Culprit.NO_ONE, "program", end.sure)
    return _accused(Culprit.UNKNOWN, "untold", end.sure)


def accused_by_records(
    sure: float, blamed: tuple[str, ...], suspects: tuple[str, ...], is_no_nodes: bool
) -> Accused:
    """Who is to blame by an attempt's records, of which `sure` is how sure they are."""
    if blamed:
        return Accused(Culprit.NODE, sure, blamed, is_proved=True, rule="records")
    if suspects:
        return Accused(Culprit.NODE, sure, suspects, rule="records")
    return Accused(Culprit.NO_ONE if is_no_nodes else Culprit.UNKNOWN, sure, rule="records")


def _accused(
    kind: Culprit, rule: str, sure: float, nodes: tuple[str, ...] = (), place: Place | None = None
) -> Accused:
    place = place or Place()
    return Accused(
        kind,
        _weighed(f"who-{rule}", sure),
        nodes=nodes,
        rank=place.rank,
        gpu=place.gpu,
        is_proved=rule == "hardware",
        rule=rule,
    )
