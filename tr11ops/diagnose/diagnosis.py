"""What `tr11 diagnose` concludes: the class of the fault, what to do, the line that says why. Pure
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.units import iso_time
from tr11ops.cluster.base import Job, Node
from tr11ops.diagnose.answers import (
    AGREED,
    CHANGES,
    Accused,
    EndFacts,
    Place,
    RestartAnswer,
    Signs,
    accused_by_log,
    accused_by_records,
    restart_of,
)
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.diagnose.attribution.evidence import Conclusion, Evidence

SCHEMA = 1


def followed(before: Sequence[Diagnosis], last: Diagnosis) -> list[Diagnosis]:
    """The diagnoses of launches, oldest first, each with what came after it."""
    found = []
    for one, after in zip(before, [*before, last][1:], strict=True):
        name = f"attempt {after.label or after.launch}"
        if after.launch == one.launch and after.number is not None:
            name = f"launch {after.number} of the same attempt"
        found.append(replace(one, now=RunNow(NowState.FOLLOWED, f"It went on in {name}.")))
    return found


class QuotedLine(Record):
    """A line of a log, and where it came from as far as that is known. `line_number` counts from 1.

    `is_guess`: the node is where the first failure was seen, and another may be the line's own: it
    accuses no one. `is_own`: the line itself names that node, or is of a rank that the launcher put there, or of a log
    that is the node's own.
    """

    file: str
    line_number: int
    text: str
    rank: int | None = None
    node: str | None = None
    gpu: str | None = None
    time: str | None = None
    meaning: str = ""
    is_guess: bool = False
    is_own: bool = False

    def document(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line_number": self.line_number,
            "text": self.text,
            "rank": self.rank,
            "node": self.node,
            "gpu": self.gpu,
            "time": self.time,
        }


class NowState(StrEnum):
    """What a run does now, as far as its end is asked about. STARTS: workers are up, or about to be, and
    have made no step. QUEUED: what is queued starts without a person. STANDS: someone has to type.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    TRAINS = "trains"
    STARTS = "starts"
    QUEUED = "queued"
    STANDS = "stands"
    FOLLOWED = "followed"  # another launch came after it, and its end is asked about
    UNKNOWN = "unknown"


_GOES_ON = frozenset({NowState.FOLLOWED, NowState.TRAINS, NowState.STARTS, NowState.QUEUED})
_DONE = frozenset({NowState.STOPPED, NowState.FINISHED})


class RunNow(Record):
    """What the run does at the moment of asking. `text`: sentences. `commands`: what is to be typed, in
    order. `job`, `since` (seconds since the epoch), `iteration`: in which job it runs, since when, and
    after which iteration it went on; as far as that is known. `to_exclude`: nodes that are proved to be
    at fault, and that are not excluded. `is_again`: it runs after an end, and not for the first time.
    """

    state: NowState
    text: str
    commands: tuple[str, ...] = ()
    job: str = ""
    since: float | None = None
    iteration: int | None = None
    to_exclude: tuple[str, ...] = ()
    is_again: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it trains, or will, without a person."""
        return self.state in _GOES_ON

    def document(self) -> Mapping[str, Any]:
        """For --json."""
        return {
            "state": self.state.value,
            "text": self.text,
            "commands": list(self.commands),
            "job": self.job or None,
            "since": self.since,
            "from_iteration": self.iteration,
        }


def _said_of(job: Job, nodes: Sequence[Node]) -> Mapping[str, Any]:
    asked = ("job_id", "state", "reason", "exit_code", "exit_signal", "derived_exit_code")
    said = {name: getattr(job, name) for name in asked}
    return {**said, "nodes": {one.name: one.words for one in nodes}}


class Diagnosis(Record):
    """`consequences` are examples; `consequence_count` counts all. `root_cause` is None where no
    line tells of one.

    `launch` and `number`: the attempt (the scheduler's own number) and its launch, where the log says; `label` is the
    attempt as people type it, where that is known. `log_evidence`: what the log says of the
    launch's nodes. `conclusion`: who is to blame by the attempt's records, where they were asked. `advice`: what can be
    typed now, by how the run stands; "" where the step says all. `signs`: what else speaks for who it was and whether a
    restart helps. `now`: what the run does now; None where there is only a log, or where that was not looked at.
    """

    fault: FaultClass
    step: NextStep
    confidence: float
    root_cause: QuotedLine | None
    explanation: str
    evidence: tuple[QuotedLine, ...] = ()
    consequences: tuple[QuotedLine, ...] = ()
    consequence_count: int = 0
    launch: str = ""
    label: str = ""
    number: int | None = None
    log_evidence: Evidence | None = None
    conclusion: Conclusion | None = None
    advice: str = ""
    signs: Signs = field(default_factory=Signs)
    now: RunNow | None = None
    # of the nodes of an attempt, seconds since the epoch: the last sign of each, None for none
    last_signs: Mapping[str, float | None] = field(default_factory=dict)
    # what the scheduler says of an attempt: its job, None where that is not known, and who is to blame
    job: Job | None = None
    nodes: tuple[Node, ...] = ()

    def without_cause(self) -> Diagnosis:
        """The same with the line of its cause as further evidence."""
        quoted = [one for one in (self.root_cause, *self.evidence) if one is not None]
        return replace(self, root_cause=None, evidence=tuple(quoted))

    @property
    def accused(self) -> Accused:
        """Who is to blame: by the attempt's records where they were asked, else by the log."""
        if self.conclusion is not None:
            judged = self.conclusion.found
            return accused_by_records(
                judged.confidence, judged.blamed, judged.named_suspects, judged.is_no_nodes
            )
        root = self.root_cause
        if root is None:
            place = Place()
        else:
            place = Place(None if root.is_guess else root.node, root.rank, root.gpu)
        return accused_by_log(EndFacts(self.fault, self.step, self.confidence, self.signs), place)

    @property
    def restart(self) -> RestartAnswer:
        """Whether a plain restart helps: the agent's own answer where it left one."""
        signs = self.signs
        if self.conclusion is not None:
            judged = self.conclusion.found
            if judged.restart is not None:
                return judged.restart
            signs = replace(signs, peer=", ".join(judged.named_suspects) or signs.peer)
            if judged.is_no_nodes:  # what a log said of one is overruled by the records
                signs = replace(signs, peer=None, lone_node=None)
        accused = self.accused
        proved = accused.nodes if accused.is_proved else ()
        return restart_of(
            EndFacts(self.fault, self.step, sure=self.confidence, signs=signs, proved=proved)
        )

    @property
    def action(self) -> NextStep:
        """The step to take: by whether a restart helps, and by what the run does now."""
        step = self.step_alone
        now = self.now
        if now is None or now.to_exclude:
            return step
        if now.state is NowState.STANDS and step is NextStep.NONE:
            return NextStep.RESUBMIT  # it ended as it should, and more is left to train
        if now.state in _DONE and step not in CHANGES:
            return NextStep.NONE
        if now.goes_on and not now.commands and not self.may_end_alike:
            return NextStep.NONE
        return step

    @property
    def may_end_alike(self) -> bool:
        """Whether what comes next by itself would end the same way, as far as the end tells."""
        if self.now is not None and self.now.state in {NowState.TRAINS, NowState.FOLLOWED}:
            return False
        return self.step_alone in CHANGES or self.restart.answer is Restart.CHANGE

    @property
    def step_alone(self) -> NextStep:
        """The step to take by the end alone, whatever the run does now."""
        step = AGREED.get((self.step, self.restart.answer), self.step)
        accused = self.accused
        if step is NextStep.EXCLUDE_AND_RESUBMIT and accused.nodes and not accused.is_proved:
            return NextStep.RESUBMIT  # one log's word makes a suspect, and no sentence
        return step

    def document(self) -> Mapping[str, Any]:
        """For --json."""
        now = None if self.now is None else self.now.document()
        return {
            "schema": SCHEMA,
            "verdict": self.fault.value,
            "action": self.action.value,
            "confidence": round(self.confidence, 2),
            "who": self.accused.document(),
            "restart": self.restart.document(),
            "root_cause": None if self.root_cause is None else self.root_cause.document(),
            "evidence": [{**line.document(), "meaning": line.meaning} for line in self.evidence],
            "consequences": [
                {**line.document(), "meaning": line.meaning} for line in self.consequences
            ],
            "consequence_count": self.consequence_count,
            "launch": self.launch,
            "attempt": self.label or self.launch,
            "launch_number": self.number,
            "attribution": None if self.conclusion is None else self.conclusion.document(),
            "explanation": self.explanation,
            "advice": self.advice,
            "now": now,
            "last_signs": {node: iso_time(when) for node, when in self.last_signs.items()},
            "scheduler": None if self.job is None else _said_of(self.job, self.nodes),
        }
