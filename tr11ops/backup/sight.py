"""Whether copies on record are still where they were made: asked before anything is removed on
their strength.

A folder is looked at now: receipt and sizes of each copy. What lies behind a network counts while a
round has listed it within `backup.confirm_hours`. A copy that could not be looked at does not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from tr11ops.backup.archives import is_folder, open_archive
from tr11ops.backup.base import Archive
from tr11ops.backup.ledger import ArchiveState, last_state
from tr11ops.backup.receipts import read_receipt
from tr11ops.backup.survey import Survey
from tr11ops.base.errors import ArchiveError
from tr11ops.base.units import duration
from tr11ops.rundir.clocks import Clocks
from tr11ops.rundir.copies import CopyRecord, Receipt

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

CopyKey: TypeAlias = tuple[str, str]  # a copy's archive and its location there
Sight: TypeAlias = Callable[[Iterable[CopyRecord], Clocks], Mapping[CopyKey, str]]
THREADS = 8  # each look is some round trips on a shared file system
CLOCK_SECONDS = 600.0  # two machines' clocks may differ by so much


def look_at_copies(
    card: RunCard, directory: RunDirectory, copies: Iterable[CopyRecord], clocks: Clocks
) -> Mapping[CopyKey, str]:
    """Why copies of the card's archives do not count as things are; those that are well are left
    out.

    Raises OSError when the record of an archive cannot be read.
    """
    by_address: dict[tuple[str, str], list[CopyRecord]] = {}
    for copy in copies:
        by_address.setdefault((copy.archive, copy.address), []).append(copy)
    found: dict[CopyKey, str] = {}
    for (name, address), ours in by_address.items():
        if is_folder(address):
            whys = _look(name, card, ours)
        else:
            state = last_state(directory, name)
            whys = [too_old(copy, state, clocks, card.backup.confirm_hours * 3600) for copy in ours]
        found.update(
            {(name, copy.location): why for copy, why in zip(ours, whys, strict=True) if why}
        )
    return found


def _look(name: str, card: RunCard, copies: list[CopyRecord]) -> list[str]:
    try:
        archive = open_archive(name, card)
    except ArchiveError as error:
        return [str(error)] * len(copies)
    try:
        with ThreadPoolExecutor(min(THREADS, len(copies)), thread_name_prefix="look") as threads:
            return list(threads.map(lambda copy: missing(archive, copy), copies))
    finally:
        archive.close()


def missing(archive: Archive, copy: CopyRecord) -> str:
    """What of a copy is not at its archive now, by its receipt and the sizes of its files; "" when
    all is.
    """
    try:
        receipt = read_receipt(archive, copy.location)
        if receipt is None:
            return f"{archive.address}/{copy.location} has no receipt any more"
        if (receipt.identity, receipt.kind, receipt.step) != (copy.identity, copy.kind, copy.step):
            return f"{archive.address}/{copy.location} is a copy of another checkpoint now"
        faults = Survey({}, {}, _sizes(archive, receipt)).faults(receipt)
    except (ArchiveError, ValueError) as error:
        return str(error)
    first = next(iter(faults.items()), None)
    if first is None:
        return ""
    return f"{archive.address}/{copy.location}/{first[0]}: {first[1]}"


def _sizes(archive: Archive, receipt: Receipt) -> dict[str, int]:
    if receipt.format == "tar":
        found = archive.look(receipt.location)
        if found is None:
            return {}
        return {found.path: found.bytes}
    return {file.path: file.bytes for file in archive.list(receipt.location)}


def too_old(copy: CopyRecord, state: ArchiveState | None, clocks: Clocks, seconds: float) -> str:
    """Why the last sight of a copy behind a network is too long ago; "" when it is not. Pure.

    A sight in the future comes of a clock that was set wrong: it says nothing.
    """
    moments = [copy.verified, copy.reread or 0.0]
    if state is not None and state.address == copy.address and copy.location not in state.unseen:
        moments.append(state.listed or 0.0)
    past = [max(ages) for moment in moments if min(ages := clocks.ages(moment)) >= -CLOCK_SECONDS]
    if not past:
        return f"when the {copy.archive} was last listed is not known: a clock is wrong"
    if min(past) > seconds:
        return (
            f"it was last seen in the {copy.archive} {duration(min(past))} ago, and {duration(seconds)} are allowed "
            "(backup.confirm_hours): tr11 backup run looks again"
        )
    return ""
