"""What `tr11 diagnose` concludes: the class of the fault, what to do, the line that says why. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tr11ops.diagnose.signature import FaultClass, NextStep

SCHEMA = 1


@dataclass(frozen=True)
class QuotedLine:
    """A line of a log, and where it came from as far as that is known. `line_number` counts from 1."""

    file: str
    line_number: int
    text: str
    rank: int | None = None
    node: str | None = None
    gpu: str | None = None
    time: str | None = None
    meaning: str = ""

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


@dataclass(frozen=True)
class Diagnosis:
    """`consequences` are examples; `consequence_count` counts all. `root_cause` is None where no line tells of one."""

    fault: FaultClass
    step: NextStep
    confidence: float
    root_cause: QuotedLine | None
    evidence: tuple[QuotedLine, ...]
    consequences: tuple[QuotedLine, ...]
    consequence_count: int
    explanation: str
    launch: str = ""

    def document(self) -> Mapping[str, Any]:
        """For --json."""
        return {
            "schema": SCHEMA,
            "verdict": self.fault.value,
            "action": self.step.value,
            "confidence": round(self.confidence, 2),
            "root_cause": None if self.root_cause is None else self.root_cause.document(),
            "evidence": [{**line.document(), "meaning": line.meaning} for line in self.evidence],
            "consequences": [{**line.document(), "meaning": line.meaning} for line in self.consequences],
            "consequence_count": self.consequence_count,
            "launch": self.launch,
            "explanation": self.explanation,
        }
