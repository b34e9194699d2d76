"""What `tr11 diagnose` concludes: the class of the fault, what to do, the line that says why. Pure
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import field
from msgspec.structs import replace

from tr11ops.diagnose.answers import (
    AGREED,
    Accused,
    EndFacts,
    Place,
    RestartAnswer,
    Signs,
    accused_by_log,
    accused_by_records,
    restart_of,
)
from tr11ops.diagnose.signature import FaultClass, NextStep
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.diagnose.attribution.evidence import Conclusion, Evidence

SCHEMA = 1


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


class Diagnosis(Record):
    """`consequences` are examples; `consequence_count` counts all. `root_cause` is None where no
    line tells of one.

    `launch` and `number`: the attempt (the scheduler's own number) and its launch, where the log says; `label` is the
    attempt as people type it, where that is known. `log_evidence`: what the log says of the
    launch's nodes. `conclusion`: who is to blame by the attempt's records, where they were asked. `advice`: what can be
    typed now, by how the run stands; "" where the step says all. `signs`: what else speaks for who it was and whether a
    restart helps.
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
        """The step to take, as whether a restart helps has it."""
        step = AGREED.get((self.step, self.restart.answer), self.step)
        accused = self.accused
        if step is NextStep.EXCLUDE_AND_RESUBMIT and accused.nodes and not accused.is_proved:
            return NextStep.RESUBMIT  # one log's word makes a suspect, and no sentence
        return step

    def document(self) -> Mapping[str, Any]:
        """For --json."""
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
        }
