"""Which checkpoints shall have which copies, from the card and the steps alone. Pure.

The store gets every multiple of its interval whole. The url gets whole copies at wide intervals and
at steps named by hand, and the weights alone of many more. If that leaves a share of the training
without any whole copy, the first checkpoint of that share is copied whole; the end of the training
counts as the beginning of a last share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from tr11ops.runcard.watching import BackupSection
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.rundir.copies import Kind

ArchiveName: TypeAlias = Literal["store", "url"]


class WantedCopy(Record):
    """One copy that shall exist, and which key of the card asks for it. `archive` is its name on
    record.
    """

    step: int
    kind: Kind
    archive: str
    why: str


def wanted_copies(
    policy: BackupSection, steps: Sequence[int], last_step: int
) -> tuple[WantedCopy, ...]:
    """All copies that shall exist, by step; archives the card lacks get none.

    `steps`: those of complete checkpoints that are here or were copied already (else a step that
    was copied and then deleted here would have another one copied in its stead). `last_step`: of
    the whole training.
    """
    known = sorted(set(steps))
    whole = [*_to_store(policy, known), *_whole_to_url(policy, known)]
    whole += _milestones(policy, known, last_step, {copy.step for copy in whole})
    whole_at_url = {copy.step for copy in whole if copy.archive == "url"}
    rest = _weights(policy, [step for step in known if step not in whole_at_url])
    rest += _spikes(policy, known)
    return tuple(sorted([*whole, *rest], key=lambda copy: (copy.step, copy.archive, copy.kind)))


P = TypeVar("P", bound=WantedCopy)


def in_order(copies: Iterable[P]) -> tuple[P, ...]:
    """The order in which copies are made, by what would be lost if the file system of the training
    went now.

    The newest whole copy in each archive comes first: it alone saves the training up to there; the
    store's before the url's, as it is sooner done. Then whole copies and those of spikes and
    weights, the oldest first: those are the next that a purge takes.
    """
    listed = list(copies)
    newest = {
        name: max(copy.step for copy in listed if (copy.archive, copy.kind) == (name, "full"))
        for name in {copy.archive for copy in listed if copy.kind == "full"}
    }

    def urgency(copy: P) -> tuple[bool, bool, bool, int, str]:
        is_whole = copy.kind == "full"
        is_newest = is_whole and copy.step == newest[copy.archive]
        return not is_newest, not is_whole, copy.archive != "store", copy.step, copy.kind

    return tuple(sorted(listed, key=urgency))


def _to_store(policy: BackupSection, steps: Iterable[int]) -> list[WantedCopy]:
    interval = policy.store_interval
    if not policy.has_store or not interval:
        return []
    return [
        WantedCopy(step, "full", "store", f"store_interval {interval}")
        for step in steps
        if step and not step % interval
    ]


def _whole_to_url(policy: BackupSection, steps: Iterable[int]) -> list[WantedCopy]:
    if not policy.has_url:
        return []
    interval, named = policy.full_interval, set(policy.full_steps)
    found = []
    for step in steps:
        if interval and step and not step % interval:
            found.append(WantedCopy(step, "full", "url", f"full_interval {interval}"))
        elif step in named:
            found.append(WantedCopy(step, "full", "url", "full_steps"))
    return found


def _weights(policy: BackupSection, steps: Iterable[int]) -> list[WantedCopy]:
    interval = policy.weights_interval
    if not policy.has_url or not interval:
        return []
    why = f"weights_interval {interval}"
    return [
        WantedCopy(step, "weights", "url", why) for step in steps if step and not step % interval
    ]


def _spikes(policy: BackupSection, steps: Iterable[int]) -> list[WantedCopy]:
    if not policy.has_url:
        return []
    named = set(policy.spike_steps)
    return [WantedCopy(step, "spike", "url", "spike_steps") for step in steps if step in named]


def _milestones(
    policy: BackupSection, steps: Sequence[int], last_step: int, whole: set[int]
) -> list[WantedCopy]:
    """Whole copies for the shares of the training in which the intervals leave none, where there is
    an archive.
    """
    if not policy.milestone_percent or not (policy.has_store or policy.has_url) or not steps:
        return []
    archive: ArchiveName = "store"
    if policy.has_url:
        archive = "url"
    found = []
    taken = set(whole)
    for percent, begin, end in _shares(policy.milestone_percent, last_step):
        if any(begin <= step < end for step in taken) or _is_coming(policy, steps[-1], begin, end):
            continue
        first = next((step for step in steps if step >= begin), None)
        if first is not None and first not in taken:
            taken.add(first)
            found.append(WantedCopy(first, "full", archive, f"milestone at {percent:g} %"))
    return found


def _shares(percent: float, last_step: int) -> list[tuple[float, int, int]]:
    """(percent, first step, first step of the next share) of each share but the first, whose begin
    is no training.
    """
    marks = [
        percent * number for number in range(1, math.ceil(100 / percent)) if percent * number < 100
    ]
    begins = [*(math.ceil(last_step * mark / 100) for mark in marks), last_step]
    ends = [*begins[1:], last_step + 1]
    return list(zip([*marks, 100.0], begins, ends, strict=True))


def _is_coming(policy: BackupSection, newest: int, begin: int, end: int) -> bool:
    """Whether a share that the training is still in has a whole copy ahead by the intervals or by
    name.
    """
    after = max(newest + 1, begin)
    if policy.has_store:
        intervals = [policy.store_interval]
    else:
        intervals = []
    intervals += [policy.full_interval] if policy.has_url else []
    by_interval = any(
        interval and math.ceil(after / interval) * interval < end for interval in intervals
    )
    return by_interval or (
        policy.has_url and any(after <= step < end for step in policy.full_steps)
    )
