"""Who needs a checkpoint now: a restart, a living attempt, a roll-back, a copy that is being made. Reads only.

The trainer takes the lease first, then says `loading`, then looks for a checkpoint; a copier makes its claim first,
then looks for its source. So anyone who hides a checkpoint and only then looks here sees everyone who may have found
it.

Life is judged so that one wrong clock cannot end it: a process of this host is asked for, the claim of another host is
over when this host's clock and the file server's say so both.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import field

from tr11ops.cluster.process_marks import is_alive
from tr11ops.rundir.attempts import read_attempt_label
from tr11ops.rundir.claims import TOLERANCE_SECONDS, Claim, ClaimFolder
from tr11ops.rundir.clocks import Clocks
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_step
from trainer.contract.lease import LeaseFolder, read_lease
from trainer.contract.paths import RunPaths
from trainer.contract.phases import PhaseRecord, parse_phase
from trainer.contract.record import Record
from trainer.contract.recovery import RecoveryRecord, read_recovery
from trainer.contract.resumable import resume_order

COPY_CLAIMS = "copy-"  # claims of such a name hold {"step": N} while step N is being copied
LEASE_SECONDS = 600.0  # a holder shows life every second; one that was silent for so long loads nothing any more
LOADING = frozenset({"starting", "loading"})


class Uses(Record):
    """Who uses which step, in words; `loading` names an attempt that may be reading any of them, "" for none."""

    by_step: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    loading: str = ""
    recovery: RecoveryRecord = field(default_factory=RecoveryRecord)


def read_uses(directory: RunDirectory, clocks: Clocks, load: str | None = None) -> Uses:
    """Everyone but a restart (see `restart_uses`). `load`: the card's checkpoint.load.

    Raises OSError or ValueError where one of the records cannot be read: then nothing may be concluded.
    """
    found: dict[int, list[str]] = {}
    recovery = read_recovery(directory.paths)
    if recovery.events:
        found.setdefault(recovery.events[-1].to_step, []).append("the last roll-back went back to it")
    named = _named_by_load(directory.paths, load)
    if named is not None:
        found.setdefault(named, []).append("checkpoint.load of the card names it")
    loading = _living_attempt(directory.paths, clocks, found)
    for thing, claim in _living_copies(directory, clocks):
        if not claim.token:
            raise ValueError(f"the claim of {thing} cannot be read: which step it copies is not known")
        step = claim.data.get("step")
        if isinstance(step, int):
            found.setdefault(step, []).append(f"it is being copied by {claim}")
    return Uses({step: tuple(whys) for step, whys in found.items()}, loading, recovery)


def restart_uses(resumable: Iterable[int], latest: int | None) -> dict[int, str]:
    """What the next start would take of the resumable checkpoints, and what it would fall back to; pure.

    The order is the trainer's.
    """
    order = resume_order(resumable, latest)
    words = ("a restart takes it", "a restart takes it if the other fails")
    found = dict(zip(order, words, strict=False))
    if latest is not None:
        found[latest] = "latest names it"
    return found


# ----------------------------------------------------------------------------- the card
def _named_by_load(paths: RunPaths, load: str | None) -> int | None:
    """The step of this very folder that checkpoint.load names, if it names one by itself."""
    if load is None:
        return None
    place = os.path.realpath(load)
    inside = os.path.dirname(place) == os.path.realpath(paths.checkpoints)  # noqa: PTH120  of text
    return checkpoint_step(Path(place).name) if inside else None


# ----------------------------------------------------------------------------- the living attempt
def _living_attempt(paths: RunPaths, clocks: Clocks, found: dict[int, list[str]]) -> str:
    """Note what the holder of the lease resumed from; returns who may be loading now, "" for no one."""
    folder = LeaseFolder(paths)
    epoch, _ = folder.newest()
    if not epoch:
        return ""
    claim = read_lease(paths)
    try:
        renewed = (folder.path / f"{epoch}.json").stat().st_mtime
    except FileNotFoundError:
        return "an attempt that has just taken the lease"
    if (claim is not None and not claim.held) or all(age > LEASE_SECONDS for age in clocks.ages(renewed)):
        return ""
    if claim is None:
        return "an attempt whose lease cannot be read"
    last, resumed = _phases(paths.phases(claim.job_id))
    attempt = f"attempt {read_attempt_label(paths, claim.job_id)}"
    if resumed is not None:
        found.setdefault(resumed, []).append(f"{attempt} resumed from it")
    if last is None:
        return f"{attempt}, which does not say what it does"
    return attempt if last.phase in LOADING else ""


def _phases(path: Path) -> tuple[PhaseRecord | None, int | None]:
    """The last phase, and the step that was loaded last: where the first phase after a loading stood.

    Of a long file, only the lines around a loading are parsed.
    """
    tail: deque[bytes] = deque(maxlen=4)  # the last line may be cut
    resumed, was_loading = None, False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            for line in stream:
                tail.append(line)
                if not was_loading and b'"loading"' not in line:
                    continue
                record = parse_phase(line)
                if record is None:
                    continue
                if was_loading and record.phase not in LOADING:
                    resumed = record.iteration
                was_loading = record.phase == "loading"
    except FileNotFoundError:
        return None, None
    return next((record for line in reversed(tail) if (record := parse_phase(line)) is not None), None), resumed


# ----------------------------------------------------------------------------- copies that are being made
def _living_copies(directory: RunDirectory, clocks: Clocks) -> Iterator[tuple[str, Claim]]:
    claims = ClaimFolder(directory, COPY_CLAIMS).path.parent
    try:
        names = sorted(entry.name for entry in os.scandir(claims) if entry.name.startswith(COPY_CLAIMS))
    except FileNotFoundError:
        return
    for name in names:
        folder = ClaimFolder(directory, name)
        claim = folder.newest()
        if claim is not None and _is_living(claim, folder, clocks):
            yield name, claim


def _is_living(claim: Claim, folder: ClaimFolder, clocks: Clocks) -> bool:
    if not claim.held:
        return False
    if claim.token and claim.is_of_this_host:
        return is_alive(claim.process) or is_alive(claim.child)
    try:
        written = (folder.path / f"{claim.epoch}.json").stat().st_mtime
    except FileNotFoundError:
        return True  # it has just been followed by another
    lasting = max(0.0, claim.expires - claim.time) + TOLERANCE_SECONDS
    return any(age <= lasting for age in clocks.ages(written))
