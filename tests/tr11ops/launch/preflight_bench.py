"""A card with whole inputs, and the facts that a launch of it would see: what the preflight tests
change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, JobState, Node, Partition, Scheduler
from tr11ops.launch.facts import LaunchFacts, LaunchRequest, observe_launch
from tr11ops.launch.preflight import preflight
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.check import Level, PreflightCheck, verdict
from tr11ops.rundir.paths import RunDirectory, new_tag

MODEL = {
    "model.layers": 2, "model.hidden_size": 32, "model.attention_heads": 4, "model.ffn_hidden_size": 128,
    "model.position_embedding": "alibi", "model.embedding_layernorm": False,
    "tokenizer.padded_vocabulary_size": 128, "precision.dtype": "bf16",
}  # fmt: skip


NODES = tuple(
    Node(f"n{number}", frozenset({"idle"}), gpus=8, partitions=("p",)) for number in range(1, 5)
)


PARTITION = Partition("p", 3600, ("n1", "n2", "n3", "n4"), is_default=True)


def no_scheduler(kind: str) -> Scheduler:
    raise SchedulerError(f"no {kind} here")


class Bench:
    """A card with whole inputs, and the facts that a launch of it would see on a small idle
    cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = write_card(folder)
        self.request = LaunchRequest("1-3%1", 3)
        self.overrides: list[str] = []
        self.changes: dict[str, Any] = {}

    @property
    def card(self) -> RunCard:
        return load_card(self.path, self.overrides, {}, directory=self.folder)

    @property
    def directory(self) -> RunDirectory:
        card = self.card
        return RunDirectory(card.paths, card.kill_switch)

    def facts(self) -> LaunchFacts:
        seen = observe_launch(
            self.card,
            self.directory,
            self.request,
            scheduler=None,
            other_scheduler=no_scheduler,
            user="me",
        )
        return replace(
            seen, **{"nodes": NODES, "partitions": (PARTITION,), "access": (), **self.changes}
        )

    def checks(self) -> tuple[PreflightCheck, ...]:
        return preflight(self.card, self.directory, self.request, self.facts())

    def faults(self) -> list[str]:
        return [f"{check.level}: {check}" for check in self.checks() if check.level is not Level.OK]

    def text(self) -> str:
        """Every line, whatever its level."""
        return "\n".join(map(str, self.checks()))

    def code(self) -> int:
        return verdict(self.checks())

    def job(self, number: str, state: JobState = JobState.PENDING, **changes: Any) -> Job:
        values = {
            "name": "small",
            "user": "me",
            "comment": self.directory.comment(new_tag()),
            "array_id": number,
        }
        return Job(f"{number}_1", number, task_id=1, state=state, **{**values, **changes})


def cut(path: Path) -> None:
    """Take the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])
