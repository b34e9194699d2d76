"""Srun's own lines: which task ended how, and which node was lost. They are there when all else is
silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tr11ops.cluster.slurm_text import node_names
from trainer.contract.record import Record

PREFIXES = (b"srun: ", b"slurmstepd: ")

_TASK = re.compile(r"^srun: error: (?P<nodes>\S+): tasks? [\d,-]+: (?P<what>.+)$")
_LOST = re.compile(
    r"^srun: error: (?:Node failure on (?P<one>\S+?)\.?$|(?P<two>\S+): .*(?:unable to contact|node is down|"
    r"not responding|communication (?:connection )?failure))|"
    r"^srun: error: (?:Task launch for \S+ failed on node|.*launch failed on node) (?P<three>[^\s:,]+)|"
    r"^slurmstepd: error: \*\*\* .* ON \S+ CANCELLED AT .* DUE TO NODE (?P<four>[^\s,]+) FAILURE",
    re.IGNORECASE,
)
_ENDING = re.compile(
    r"terminating (StepId|job step)|force terminated|CANCELLED AT|step_signal", re.IGNORECASE
)
_EXIT = re.compile(r"^Exited with exit code (\d+)$")


class SrunLine(Record):
    """One line. `is_own`: it came before srun began to end the rest, so the task ended by itself.

    `what` is how the task ended ("Killed", "Exited with exit code 1"); empty where the line is of a
    lost node.
    """

    text: str
    nodes: tuple[str, ...]
    what: str = ""
    lost_node: bool = False
    is_own: bool = True

    @property
    def by_signal(self) -> bool:
        """Did a signal end the task, other than those by which tasks are told to go?"""
        is_refused = "credential" in self.what.lower()
        return (
            bool(self.what)
            and not _EXIT.match(self.what)
            and not self.told_to_go
            and not is_refused
        )

    @property
    def told_to_go(self) -> bool:
        """Was the task ended by a signal that asks for it, at the end of a job's time or by a
        person?
        """
        return self.what.startswith(("Terminated", "User defined"))

    @property
    def exit_code(self) -> int | None:
        match = _EXIT.match(self.what)
        if match:
            return int(match[1])
        return None


def parse_lines(lines: Iterable[str]) -> tuple[SrunLine, ...]:
    """The lines that tell of a task or a node, in their order; all others are left out."""
    found: list[SrunLine] = []
    ending = False
    for text in lines:
        lost = _LOST.match(text)
        task = _TASK.match(text)
        # clocks or munge keys differ, on either side: no node is lost
        if lost and "credential" in text.lower():
            what = text.rpartition(": ")[2]
            named = node_names(next(group for group in lost.groups() if group))
            found.append(SrunLine(text, named, what=what, is_own=not ending))
        elif lost:
            names = next(group for group in lost.groups() if group)
            found.append(SrunLine(text, node_names(names), lost_node=True))
        elif task:
            found.append(
                SrunLine(text, node_names(task["nodes"]), what=task["what"], is_own=not ending)
            )
        if _ENDING.search(text):
            ending = True
    return tuple(found)
