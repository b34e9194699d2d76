"""What a detector is: a pure function from a snapshot to findings, and what it must see for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.record import Record

Judge: TypeAlias = Callable[[Snapshot], Iterator[Finding]]


class Detector(Record):
    """One fault, judged by `judge` from a snapshot alone; `name` is the function's, with hyphens.

    `needs` are the observations without which it cannot judge, as attributes of the Snapshot,
    dotted where a part of one is meant (`checkpoints.latest`): where one of them is Unknown, it is
    not run. Without one of those that it `uses` it says what the others show. Where any of both is
    Unknown, its silence means nothing. `bound` and `severities` are for people: from when on it is
    a finding, and how grave. `page` is the file in `runbooks/` that treats it.
    """

    name: str
    judge: Judge
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    bound: str
    severities: str
    page: str

    @property
    def purpose(self) -> str:
        """What it finds: the first paragraph of the function's docstring."""
        return " ".join((self.judge.__doc__ or "").partition("\n\n")[0].split())

    def detect(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        """The findings; none where the fault is not there, or where what is needed is Unknown."""
        if any(is_hidden(snapshot, need) for need in self.needs):
            return ()
        return tuple(self.judge(snapshot))

    def is_blind(self, snapshot: Snapshot) -> bool:
        """Whether it could not judge, so that no fault of its is over because it is silent."""
        return any(is_hidden(snapshot, part) for part in (*self.needs, *self.uses))


REGISTERED: dict[str, Detector] = {}  # by name, as their files are loaded


def detector(
    name: str,
    *,
    bound: str,
    severities: str,
    needs: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    runbook: str = "",
) -> Callable[[Judge], Detector]:
    """Make a function of a snapshot a detector; see `Detector`.

    `runbook`: the page that treats it, where that is not one of its own name. Raises ValueError where the
    name is taken.
    """

    def register(judge: Judge) -> Detector:
        if name in REGISTERED:
            raise ValueError(f"two detectors are named {name}")
        made = Detector(
            name=name,
            judge=judge,
            needs=needs,
            uses=uses,
            bound=bound,
            severities=severities,
            page=runbook or f"{name}.md",
        )
        REGISTERED[name] = made
        return made

    return register


def is_hidden(snapshot: Snapshot, part: str) -> bool:
    """Whether an observation, or what holds it, is Unknown. Raises AttributeError for one that
    there is not.
    """
    value: object = snapshot
    for name in part.split("."):
        value = getattr(value, name)
        if isinstance(value, Unknown):
            return True
    return False
