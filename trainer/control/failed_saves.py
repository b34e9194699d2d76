"""Saves that fail on one node alone: the first is told, after the second in a row the node is left.
Pure.
"""

from __future__ import annotations

from trainer.contract.errors import CheckpointError, NodeFilesError
from trainer.contract.record import JsonObject, Record

# saves in a row: one may be a hiccup, and two are facts that do not depend on each other
ENOUGH = 2


class FailedSaves(Record):
    """The saves in a row that one node alone could not write; others wrote to the same folder at
    the same time.

    `node` is "" where the last save did not fail, or not on one node alone. `why`: the last fault.
    """

    node: str = ""
    steps: tuple[int, ...] = ()
    others: int = 0
    why: str = ""

    def after(self, step: int, fault: CheckpointError) -> FailedSaves:
        """With one more failed save."""
        if not isinstance(fault, NodeFilesError) or len(fault.failed) != 1:
            return FailedSaves()
        [node] = fault.failed
        before = self.steps if node == self.node else ()
        return FailedSaves(node, (*before, step), len(fault.served), str(fault))

    @property
    def unable(self) -> str:
        """The node with which no save comes about; "" as long as that is not certain."""
        if len(self.steps) >= ENOUGH:
            return self.node
        return ""

    def event(self, step: int, fault: CheckpointError) -> JsonObject:
        """What `metrics.jsonl` keeps of the save of `step`, which failed. `node`: where alone; ""
        where not on one.
        """
        return {
            "step": step,
            "why": str(fault),
            "node": self.node,
            "said": str(self) if self.node else "",
        }

    def line(self, saved_step: int | None) -> str:
        """Why the training ends, in one line."""
        if saved_step is None:
            lost = "nothing was saved"
        else:
            lost = f"all steps after {saved_step} are lost"
        return f"{self}, so {lost}: {self.why}"

    def __str__(self) -> str:
        steps = " and ".join(map(str, self.steps))
        if self.others == 1:
            wrote = "1 other node"
        else:
            wrote = f"{self.others} other nodes"
        return f"{self.node} alone could not write the save of step {steps}, to which {wrote} wrote"
