"""Going back to an older checkpoint, undoing that, and moving `latest`: what would be renamed,
planned as a value, and then done; never under a living trainer.

The renames themselves, and how one that was cut off is finished, are `trainer.contract.recovery`'s,
which a starting training uses too. Order of the effects: the run's lease is taken, journal, record
with all that is to be renamed, `latest`, renames, record struck off, the lease let go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from tr11ops.base.errors import LatestRefused, NotPossible, SchedulerError, TrainerAlive
from tr11ops.base.observed import Unknown, observed
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.prune import CLAIM
from tr11ops.checkpoints.quarantine import names_of
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.local_records import start_mark
from tr11ops.observe.lease import ROLLBACK, LeaseHolder, foreground_trainings, read_holder
from tr11ops.queue.stop import StopView
from tr11ops.rundir.checkpoint_digests import DigestRecord
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.claims import ClaimFolder
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name, checkpoint_step
from trainer.contract.files import host_name, now, write_atomically
from trainer.contract.lease import LeaseClaim, LeaseFolder, clocks_of, trained_into
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import IterationRange, Record
from trainer.contract.recovery import (
    BY_HAND,
    Moves,
    PendingMoves,
    RecoveryEvent,
    RecoveryRecord,
    finish,
    moves_of,
    write_recovery,
)
from trainer.contract.resumable import ResumeNeed, judge, moves_back, size_faults
from trainer.schedule.path import Position, path_of

# Moving `latest`, which decides what a start takes: never under a living trainer, nor to what none
# resumes from.


def require_no_trainer(folder: Path, now: float) -> None:
    """Raises LatestRefused while a living trainer holds the lease of the run whose checkpoints lie
    in `folder`.

    `now`: seconds since the epoch. Raises OSError where that cannot be seen.
    """
    why = trained_into(folder, now)
    if why:
        raise LatestRefused(why)


def require_newest(folder: Path, step: int, need: ResumeNeed) -> None:
    """Raises LatestRefused where a training could go on from a newer one, which it would replace in
    time.
    """
    why = moves_back(folder, step, need)
    if why:
        raise LatestRefused(why)


def move_latest(folder: Path, step: int, need: ResumeNeed, now: float) -> None:
    """Have `latest` in `folder` name a step from which a training resumes. Raises LatestRefused,
    OSError.
    """
    require_no_trainer(folder, now)
    require_newest(folder, step, need)
    _, fault = judge(folder, step, need, size_faults)
    if fault is not None:
        raise LatestRefused(
            f"{folder / LATEST_FILE} is not moved: no training resumes from {checkpoint_name(step)}: {fault.text}"
        )
    write_atomically(folder / LATEST_FILE, checkpoint_name(step))


# Whether a trainer of the run is alive: by the scheduler's jobs, this machine's processes, and the
# run's lease.


class Living(Record):
    """`words`: the trainers that live; `unknown`: what could not be seen, where none was. `ended`:
    the job of a claim that is young, but whose trainer is known to be over; "" for none.
    """

    words: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ended: str = ""


def look_for_trainer(directory: RunDirectory, view: StopView, scheduler: Scheduler) -> Living:
    """Look at all three. `view` is what was seen of the jobs a moment ago."""
    clocks = clocks_of(directory.paths, time.time())
    holder = observed(read_holder, directory.paths, *clocks)
    here = observed(foreground_trainings, directory)
    words = [f"job {job.job_id} of {job.user} is {str(job.state).lower()}" for job in view.running]
    words += () if isinstance(here, Unknown) else here
    ended = ""
    if not words and isinstance(holder, LeaseHolder):
        if _is_over(holder, here, scheduler):
            ended = holder.job_id
        else:
            what = "a roll-back" if holder.job_id == ROLLBACK else "a trainer"
            words.append(f"{what} holds the run's lease: {holder.text}")
    if words:
        return Living(tuple(words))
    if view.read_error:
        unknown = [f"the scheduler does not answer: {view.read_error}"]
    else:
        unknown = []
    unknown += [view.unclear] if view.unclear else []
    unknown += [
        f"{what}: {found.why}"
        for what, found in (("the lease", holder), ("processes here", here))
        if isinstance(found, Unknown)
    ]
    return Living((), tuple(unknown), ended)


def _is_over(holder: LeaseHolder, here: tuple[str, ...] | Unknown, scheduler: Scheduler) -> bool:
    """Whether a claim's holder was killed a moment ago: its job has given its nodes back, or it was a process here
    that is gone.
    """
    if holder.job_id == ROLLBACK:  # on another machine, it is waited for until its claim is old
        return holder.host == host_name() and start_mark(holder.process) is None
    if holder.is_of(host_name()):
        return here == ()
    try:
        job = scheduler.job(holder.job_id)
    except SchedulerError:
        return False
    return job is not None and not job.state.may_run


CLAIM_SECONDS = 600.0
BEGUN, DONE = "rollback", "rollback-done"


class SkippedData(Record):
    """The iterations that are passed over, and what they would have trained on."""

    range: IterationRange
    samples: int
    tokens: int


class SkipFrom(Record):
    """That everything from an iteration on is passed over, as far as the training had come."""

    first: int


Skip = IterationRange | SkipFrom | int  # iterations to pass over, or how many after the step


class RollbackPlan(Record):
    """What is to be done. `record` is what the run's record of roll-backs becomes; its `pending`
    are the renames.

    `to_step`: what the next launch resumes from. `gone`: what an undo cannot put back, because it
    was removed.
    """

    action: Literal["roll-back", "undo"]
    to_step: int
    latest_before: int | None
    record: RecoveryRecord
    skip: SkippedData | None = None
    gone: tuple[str, ...] = ()

    @property
    def moves(self) -> Moves:
        if self.record.pending is not None:
            return self.record.pending.moves
        return ()

    @property
    def changes_nothing(self) -> bool:
        return (
            not self.moves
            and self.skip is None
            and self.latest_before == self.to_step
            and self.action != "undo"
        )


# ----------------------------------------------------------------------------- what would be done
def plan_rollback(
    catalogue: Catalogue,
    record: RecoveryRecord,
    config: TrainerConfig,
    step: int,
    skip: Skip | None,
    who: str,
    last: int,
) -> RollbackPlan:
    """Plan to go back to `step`. `skip`: iterations to pass over, or how many after it; `last`: the
    last one trained.

    Raises NotPossible.
    """
    target = _target(catalogue, record, config, step)
    if skip is None:
        first, end = (step + 1, step)
    else:
        first, end = _range(step, skip, last)
    if skip is None:
        data = None
    else:
        data = _skipped_data(config, target, first, end)
    moves = moves_of(catalogue.folder, step + 1)
    if catalogue.latest is None:
        before = ""
    else:
        before = checkpoint_name(catalogue.latest)
    event = RecoveryEvent(
        BY_HAND,
        math.nan,
        median=math.nan,
        iteration=last,
        first_sign=first,
        to_step=step,
        skip_first=first,
        skip_last=end,
        time=now(),
        moved=moves,
        latest=before,
        who=who,
    )
    note = {
        "kind": "roll-back",
        "to": step,
        "skip": str(event.skip) if data is not None else "nothing",
        "by": who,
    }
    changed = RecoveryRecord(
        (*record.events, event), PendingMoves(moves, checkpoint_name(step), note)
    )
    return RollbackPlan(
        "roll-back", step, latest_before=catalogue.latest, record=changed, skip=data
    )


def not_finite_left(
    records: Sequence[MeasuredStep], to_step: int, skip: IterationRange | None
) -> IterationRange | None:
    """The range to pass over so that no iteration whose loss was no number is trained again; None
    where none would be.

    `records`: the newest steps of the log, oldest first; those from before the training last went
    back do not count.
    """
    bad: list[int] = []
    newer = math.inf
    for record in reversed(records):
        if record.iteration >= newer:
            break
        newer = record.iteration
        is_passed = record.iteration <= to_step or (skip is not None and record.iteration in skip)
        if not is_passed and record.has_bad_loss:
            bad.append(record.iteration)
    if not bad:
        return None
    if skip is not None:
        ends = (*bad, skip.first, skip.last)
    else:
        ends = tuple(bad)
    return IterationRange(min(ends), max(ends))


def plan_undo(catalogue: Catalogue, record: RecoveryRecord, who: str) -> RollbackPlan:
    """Plan to put everything back as it was before the last roll-back by hand. Raises NotPossible.

    What was saved since is set aside in its turn: nothing is ever removed.
    """
    _refuse_unfinished_prune(catalogue)
    if not record.events:
        raise NotPossible("there is no roll-back to undo")
    event = record.events[-1]
    if event.kind != BY_HAND:
        raise NotPossible(
            f"the last roll-back was the trainer's own, from iteration {event.iteration} to step {event.to_step}; only "
            "one by hand can be undone"
        )
    back = tuple(
        (quarantined, home)
        for home, quarantined in event.moved
        if (catalogue.folder / quarantined).is_dir()
    )
    gone = tuple(
        quarantined for home, quarantined in event.moved if (quarantined, home) not in back
    )
    kept = [
        checkpoint_name(entry.step)
        for entry in catalogue.checkpoints
        if entry.step <= event.to_step
    ]
    restored = [home for _, home in back]
    newest = max(
        restored or kept,
        key=lambda name: checkpoint_step(name) or 0,
        default=checkpoint_name(event.to_step),
    )
    latest = event.latest if event.latest in (*restored, *kept) else newest
    to_step = checkpoint_step(latest)
    assert to_step is not None
    note = {"kind": "roll-back-undone", "to": to_step, "by": who}
    moves = (*moves_of(catalogue.folder, event.to_step + 1), *back)
    changed = RecoveryRecord(record.events[:-1], PendingMoves(moves, latest, note))
    return RollbackPlan("undo", to_step, catalogue.latest, changed, gone=gone)


def needs_reading(entry: SavedCheckpoint) -> bool:
    """Whether no reading of all its bytes is on record."""
    return not isinstance(entry.digests, DigestRecord)


def _target(
    catalogue: Catalogue, record: RecoveryRecord, config: TrainerConfig, step: int
) -> SavedCheckpoint:
    """The checkpoint to go back to. Raises NotPossible."""
    _refuse_unfinished_prune(catalogue)
    entry = catalogue.at(step)
    if entry is None:
        there = catalogue.checkpoints
        if not there:
            raise NotPossible(
                f"{catalogue.folder} holds no checkpoint: there is nothing to go back to; `tr11 checkpoint-now` "
                "saves one while it trains, `tr11 backup restore` brings a copy back"
            )
        newest = ", ".join(str(other.step) for other in there[-4:])
        raise NotPossible(
            f"{catalogue.folder / checkpoint_name(step)} does not exist; there are {len(there)}, the newest {newest}"
        )
    if not record.usable([step]):
        raise NotPossible(
            f"step {step} was discarded by an earlier roll-back; go back to another one"
        )
    _, fault = judge(catalogue.folder, step, ResumeNeed.of(config), size_faults)
    if fault is not None:
        raise NotPossible(
            f"no training resumes from step {step}: {fault.text} (tr11 checkpoints list)"
        )
    return entry


def _refuse_unfinished_prune(catalogue: Catalogue) -> None:
    hidden = names_of(catalogue.folder, "hidden by a prune")
    if hidden:
        raise NotPossible(
            f"a prune was cut off and still hides {hidden[0]}; finish it first (tr11 checkpoints prune)"
        )


def _range(step: int, skip: Skip, last: int) -> tuple[int, int]:
    if isinstance(skip, int):
        return step + 1, step + skip
    if skip.first <= step:
        raise NotPossible(
            f"--skip: iteration {skip.first} is part of step {step} already; begin at {step + 1}"
        )
    if isinstance(skip, IterationRange):
        return skip.first, skip.last
    if last < skip.first:
        raise NotPossible(
            f"--skip {skip.first}-: the last iteration trained is {last}; say which ones: FIRST-LAST"
        )
    return skip.first, last


def _skipped_data(
    config: TrainerConfig, target: SavedCheckpoint, first: int, last: int
) -> SkippedData:
    manifest = Position(target.step, target.consumed_samples or 0, target.consumed_tokens or 0)
    path = path_of(config, manifest)
    if last > path.total_iterations:
        raise NotPossible(
            f"--skip: iteration {last} is beyond the training's end at {path.total_iterations}"
        )
    before, after = path.after_iteration(first - 1), path.after_iteration(last)
    return SkippedData(
        IterationRange(first, last),
        after.consumed_samples - before.consumed_samples,
        after.consumed_tokens - before.consumed_tokens,
    )


# ----------------------------------------------------------------------------- doing it
def claimed(directory: RunDirectory) -> AbstractContextManager[None]:
    """Nothing else renames checkpoints meanwhile: prunes and roll-backs take turns. Raises
    ClaimTaken, OSError.
    """
    return ClaimFolder(directory, CLAIM).turn(time.time(), CLAIM_SECONDS)


def carry_out(
    directory: RunDirectory, plan: RollbackPlan, why: str, who: str, ended: str = ""
) -> None:
    """Do what was planned, under `claimed`. Raises OSError: then the next command or start finishes
    it.

    `ended`: the job of a young claim whose trainer is known to be over. Raises TrainerAlive, see
    `_leased`.
    """
    with _leased(directory, ended) as fence:
        Journal(directory.journal).write(BEGUN, why or _text(plan), _data(plan), who)
        fence()
        write_recovery(directory.paths, plan.record)
        _finish(directory, plan.record, who=who, why=why or _text(plan), fence=fence)


def finish_pending(
    directory: RunDirectory, record: RecoveryRecord, who: str, why: str, ended: str = ""
) -> RecoveryRecord:
    """Do what is left of a recorded roll-back, under `claimed`. Raises OSError, TrainerAlive."""
    with _leased(directory, ended) as fence:
        return _finish(directory, record, who=who, why=why, fence=fence)


def _finish(
    directory: RunDirectory, record: RecoveryRecord, who: str, why: str, fence: Callable[[], None]
) -> RecoveryRecord:
    done = finish(directory.paths, record, fence)
    with suppress(OSError):  # what was to be done is in the journal already
        Journal(directory.journal).write(DONE, why, {"events": len(done.events)}, who)
    return done


@contextmanager
def _leased(directory: RunDirectory, ended: str) -> Iterator[Callable[[], None]]:
    """Hold the run's lease, as a trainer does: one that starts meanwhile waits for its end, and
    reads the record then.

    Yields what asks whether it is still held. Raises TrainerAlive when a living trainer holds it:
    nothing was changed then; or when one has taken it over, which it does from who is silent for
    long: it finishes what is on record.
    """
    holder = _living_holder(directory, ended)
    if holder is not None:
        raise TrainerAlive(f"nothing was changed: a training has just started: {holder.text}")
    folder = LeaseFolder(directory.paths)
    epoch = folder.newest()[0] + 1
    if not folder.claim(epoch, replace(LeaseClaim.of_this_process(ROLLBACK, 0), epoch=epoch)):
        raise TrainerAlive("nothing was changed: a training starts at this moment")

    def fence() -> None:
        if not folder.is_newest(epoch):
            raise TrainerAlive("a training has just started, and finishes it")

    try:
        yield fence
    finally:
        with suppress(OSError):  # then the next trainer watches for some seconds
            folder.renew(epoch, 0, held=False)


def _living_holder(directory: RunDirectory, ended: str) -> LeaseHolder | None:
    """Who holds the lease and lives. Of roll-backs one is at it at a time (`claimed`), so another's
    claim is over.
    """
    holder = read_holder(directory.paths, *clocks_of(directory.paths, now()))
    if holder is not None and holder.job_id in (ended, ROLLBACK):
        return None
    return holder


def _text(plan: RollbackPlan) -> str:
    skip = ""
    if plan.skip is not None:
        skip = f", iterations {plan.skip.range} skipped"
    if plan.action == "roll-back":
        return f"back to step {plan.to_step}{skip}"
    return "the last roll-back is undone"


def _data(plan: RollbackPlan) -> Mapping[str, Any]:
    if plan.skip is None:
        skip = None
    else:
        skip = str(plan.skip.range)
    return {
        "action": plan.action,
        "to": plan.to_step,
        "skip": skip,
        "latest_before": plan.latest_before,
        "moves": [list(move) for move in plan.moves],
    }
