"""Which copies of a step can be restored, and which one is meant: by identity, never by name alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import Owner
from tr11ops.backup.receipts import list_receipts
from tr11ops.base.errors import RestoreError
from tr11ops.base.units import iso_time
from tr11ops.rundir.copies import CHECKPOINT_KINDS, Kind, Receipt
from tr11ops.rundir.identity import short
from trainer.contract.record import Record

LEAST_PREFIX = 4


class Candidate(Record):
    """One copy of a step. `run_id`: of the run that made it, "" where no one says; `is_ours`: of
    this run.
    """

    receipt: Receipt
    run_id: str
    is_ours: bool

    def __str__(self) -> str:
        receipt = self.receipt
        if self.is_ours:
            whose = ""
        else:
            whose = f", of another run (id {short(self.run_id)})"
        return f"{receipt.identity[:8]} ({receipt.kind}, copied {iso_time(receipt.copied)}{whose})"


def candidates(
    archive: Archive, owner: Owner | None, run: str, run_id: str, variant: str
) -> tuple[Candidate, ...]:
    """All copies with a receipt, by step. `owner`: whose archive it is; `run_id`: "" where this run
    has none yet.

    Raises ArchiveError.
    """
    found = []
    for receipt in list_receipts(archive, variant, CHECKPOINT_KINDS):
        maker = receipt.run_id or (
            owner.id if owner is not None and owner.run == receipt.run else ""
        )
        is_other = bool(run_id and maker and maker != run_id)
        found.append(Candidate(receipt, maker, run in ("", receipt.run) and not is_other))
    return tuple(found)


def chosen(
    found: Iterable[Candidate], step: int, kind: Kind | None, identity: str | None
) -> Candidate | None:
    """The copy of a step that is meant: whole before weights, the newest of those. None where there
    is none. Pure.

    Raises RestoreError, which lists them, where several checkpoints of the step are there and none
    is named, where the only ones are of another run, and where `identity` (its first digits) fits
    none or several.
    """
    there = [one for one in found if one.receipt.step == step and kind in (None, one.receipt.kind)]
    if identity is not None:
        fitting = [one for one in there if one.receipt.identity.startswith(identity.lower())]
        if len(identity) < LEAST_PREFIX or len({one.receipt.identity for one in fitting}) != 1:
            what = "several checkpoints" if fitting else "no copy"
            raise RestoreError(
                f"--identity {identity}: names {what} of step {step}; there is {_listed(there)}"
            )
        return _best(fitting)
    ours = [one for one in there if one.is_ours]
    if not ours and there:
        raise RestoreError(
            f"step {step} is there of another run alone: {_listed(there)}; to have it all the same: --identity"
        )
    if len({one.receipt.identity for one in ours}) > 1:
        raise RestoreError(
            f"there are several checkpoints of step {step}: {_listed(ours)}; name one: --identity"
        )
    if ours:
        return _best(ours)
    return None


def _best(fitting: Sequence[Candidate]) -> Candidate:
    return max(fitting, key=lambda one: (one.receipt.kind == "full", one.receipt.copied))


def _listed(found: Sequence[Candidate]) -> str:
    return ", ".join(map(str, found)) or "none"
