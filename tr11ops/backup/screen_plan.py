"""The plan of a round of backup, in lines and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.backup.source import read_source
from tr11ops.base.errors import CopyError
from tr11ops.base.units import duration, size
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.backup.due import CopyPlan, Due

SCHEMA = 1
STEPS_NAMED = 8  # in one line


class Weighed(Record):
    """A plan with the bytes of each due copy; `fault`: why one cannot be made, "" when it can."""

    plan: CopyPlan
    due: tuple[tuple[Due, int, str], ...]

    def bytes_to(self, archive: str) -> int:
        return sum(
            count for copy, count, fault in self.due if copy.archive == archive and not fault
        )


def weigh(plan: CopyPlan, checkpoints: Path) -> Weighed:
    """Look up what each due copy holds, from its manifest."""
    found = []
    for copy in plan.due:
        try:
            count, fault = (
                read_source(checkpoints / checkpoint_name(copy.step), copy.step, copy.kind).bytes,
                "",
            )
        except CopyError as error:
            count, fault = 0, str(error)
        found.append((copy, count, fault))
    return Weighed(plan, tuple(found))


def lines(
    run: str, variant: str, weighed: Weighed, rates: Mapping[str, float], faults: Mapping[str, str]
) -> Iterator[str]:
    """What is due, what is copied, and what is not; within 80 columns but for names and faults.

    `faults`: why an archive cannot be used as things are.
    """
    good = [entry for entry in weighed.due if not entry[2]]
    total = sum(count for _, count, _ in good)
    yield f"{run} {variant}: {_count(len(good))} due" + (f", {size(total)}" if good else "")
    if weighed.due:
        yield f"  {'STEP':>7}  {'COPY':<8}{'TO':<8}{'SIZE':>10}  WHY"
    for copy, count, fault in weighed.due:
        name = copy.archive[:7]
        yield f"  {copy.step:>7}  {copy.kind:<8}{name:<8}{'-' if fault else size(count):>10}  {copy.why}"
        if fault:
            yield f"           CANNOT BE COPIED: {fault}"
    for archive in sorted({copy.archive for copy, _, _ in good}):
        rate = rates.get(archive)
        if rate:
            took = f"about {duration(weighed.bytes_to(archive) / rate)} at {size(rate)}/s, the last rate"
        else:
            took = "no rate was measured yet"
        yield f"{archive}: {size(weighed.bytes_to(archive))}, {took}"
    for archive, fault in faults.items():
        yield f"{archive}: CANNOT BE USED: {fault}"
    if weighed.plan.copied:
        by_archive: dict[str, list[int]] = {}
        for record in weighed.plan.copied:
            by_archive.setdefault(record.archive, []).append(record.step)
        for archive, steps in sorted(by_archive.items()):
            yield f"copied already to {archive}: {_steps(steps)}"
    for why, steps in _by_reason(weighed.plan).items():
        yield f"not copied, {why}: {_steps(steps)}"


def _by_reason(plan: CopyPlan) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for step, why in plan.left:
        found.setdefault(why, []).append(step)
    return found


def _count(count: int) -> str:
    return {0: "no copy is", 1: "one copy is"}.get(count, f"{count} copies are")


def _steps(steps: list[int]) -> str:
    names = [str(step) for step in sorted(set(steps))]
    if len(names) <= STEPS_NAMED:
        return ", ".join(names)
    return f"{len(names)} steps, {names[0]} ... {', '.join(names[-3:])}"


def value(
    run: str, variant: str, weighed: Weighed, rates: Mapping[str, float], faults: Mapping[str, str]
) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "schema": SCHEMA,
        "run": run,
        "variant": variant,
        "due": [
            {**document(copy), "bytes": None if fault else count, "fault": fault or None}
            for copy, count, fault in weighed.due
        ],
        "copied": [
            {"step": copy.step, "kind": copy.kind, "archive": copy.archive, "bytes": copy.bytes}
            for copy in weighed.plan.copied
        ],
        "faults": dict(faults),
        "left": [{"step": step, "why": why} for step, why in weighed.plan.left],
        "seconds": {
            archive: weighed.bytes_to(archive) / rate
            for archive, rate in rates.items()
            if weighed.bytes_to(archive)
        },
    }
