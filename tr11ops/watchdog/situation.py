"""How the run is doing, for the mails and the digest: made of what a look has seen. Costs are read
when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from msgspec.structs import replace

from tr11ops.alerts.service import AlertOutcome, process_some
from tr11ops.alerts.situation import Act, RunCondition, RunSituation, Spell
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import MINUTE, duration, timestamp
from tr11ops.detect.nodes_left import what_may_be_lost
from tr11ops.detect.storage import filesystem_filling, filesystem_full
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.timeline import Bucket
from tr11ops.observe import derived
from tr11ops.observe.files import PastProgress, progress_at
from tr11ops.observe.forecast import end_of
from tr11ops.observe.liveness import liveness_outside
from tr11ops.observe.look import facts_of, observe
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.rundir.action_log import LETS_IT_ACT, ActionHistory, Result
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.paths import RunDirectory
from tr11ops.watchdog.actions import Plan
from tr11ops.watchdog.verdict import TRAINING, Verdict, VerdictWord

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

NO_PROGRESS = PastProgress(0, 0, 0, None)


def situation_of(
    directory: RunDirectory,
    card: RunCard,
    snapshot: Snapshot,
    intended: Plan = Plan(),  # noqa: B008  frozen
    action_history: ActionHistory = ActionHistory(),  # noqa: B008  frozen
    may_act: bool = False,
    why_not: str = "",
    verdict: Verdict | None = None,
) -> RunSituation:
    """What people are told beside an alert. The past of the run is read when its account is asked
    for, and once.

    `why_not`: what keeps a watchdog that is allowed to act from it at this look; "" where it is not
    allowed.
    """

    @cache
    def spent() -> Goodput:
        return account(
            read_history(directory, snapshot.jobs, scheduler=snapshot.scheduler), snapshot.time
        )

    def since(moment: float, until: float | None = None) -> Spell | None:
        end = snapshot.time if until is None else min(until, snapshot.time)
        try:
            part = spent().between(moment, end)
            before, now = (
                progress_at(directory.paths.metrics, time) or NO_PROGRESS for time in (moment, end)
            )
        except Exception:  # whatever is wrong with the past, people must hear of the present
            return None
        total, useful = part.total, part.buckets[Bucket.USEFUL]
        return Spell(
            iterations=now.iteration - before.iteration,
            loss_before=before.loss,
            loss_now=now.loss,
            held_hours=total.held_hours,
            useful=part.useful_of_held,
            wanted_hours=total.node_hours,
            lost_hours=total.node_hours - useful.node_hours,
        )

    return RunSituation(
        progress=_progress(snapshot),
        eta=_eta(card, snapshot),
        trained=max(
            (step.time for step in known(snapshot.steps, ()) if step.time is not None), default=None
        ),
        may_act=may_act,
        why_not=why_not or f"it may not act ({LETS_IT_ACT})",
        done=tuple(
            Act(
                record.action,
                f"{record.action} {record.subject}",
                time=record.time,
                subject=record.subject,
            )
            for record in action_history.records
            if record.result is Result.DONE
        ),
        planned=tuple(
            Act(action.name, action.words(), subject=action.subject, by_hand=action.by_hand)
            for action in intended.actions
        ),
        withheld=intended.withheld,
        since=since,
        condition=None if verdict is None else condition_of(verdict, snapshot),
        steps=known(snapshot.steps, ()),
        labels={
            attempt.job_id: attempt.label or attempt.job_id
            for attempt in known(snapshot.attempts, ())
        },
        nodes=known(snapshot.nodes, ()),
        excluded=_excluded(snapshot),
        spares=what_may_be_lost(snapshot) if snapshot.active_jobs else "",
        left_out=tuple(
            entry for entry in known(snapshot.exclusions, ()) if entry.owner == AUTOMATIC_OWNER
        ),
    )


def _excluded(snapshot: Snapshot) -> dict[str, Exclusion] | None:
    if isinstance(snapshot.exclusions, Unknown):
        return None
    return {entry.node: entry for entry in snapshot.exclusions}


def condition_of(verdict: Verdict, snapshot: Snapshot) -> RunCondition:
    """What an all-clear may say of the run. One that starts has not shown yet that it trains."""
    is_finished = verdict.word is VerdictWord.FINISHED
    is_stopped = isinstance(derived.stop_of(snapshot), KillSwitch)
    waits_for_resume = is_stopped and not is_finished and not snapshot.run.is_watched
    return RunCondition(
        words=f"{verdict.word.value.upper()}: {verdict.why}",
        is_well=verdict.exit_code == 0 and verdict.word is not VerdictWord.STARTING,
        trains=verdict.word in TRAINING,
        is_finished=is_finished,
        is_stopped=verdict.word.is_stop,
        resume=derived.command(snapshot, "resume") if waits_for_resume else "",
    )


def _progress(snapshot: Snapshot) -> str:
    done, total = derived.iteration(snapshot), derived.total_iterations(snapshot)
    if done is None:
        return ""
    share = ""
    if total:
        share = f" of {total:,} ({math.floor(1000 * done / total) / 10:.1f} %)"
    steps = known(snapshot.steps, ())
    loss = ""
    told = derived.newest_loss(steps)
    if told is not None:
        loss = f", loss {told.record.lm_loss:.4f}"
    return f"iteration {done:,}{share}{loss}"


def _eta(card: RunCard, snapshot: Snapshot) -> str:
    """When the training will be done, where it moves; else how much of it is left."""
    end = end_of(snapshot)
    if end is None or end.earliest <= 0:
        return ""
    left = end.likely or end.earliest
    waits = "" if end.likely is not None else ", without waits and restarts"
    if not snapshot.active_jobs and liveness_outside(snapshot) is None:
        return f"{duration(left)} of training are left{waits}"
    return f"{timestamp(snapshot.time + left, ZoneInfo(card.alerts.time_zone), MINUTE)}, in {duration(left)}{waits}"


# ----------------------------------------------------------------------------- file systems
def alert(
    directory: RunDirectory, card: RunCard, samples: Sequence[Usage], now: float, typed: str
) -> AlertOutcome:
    """Tell the alerts what these samples show, right after they were measured, also where a full
    disk did not let them be kept. All else is left to the pulse.
    """
    from tr11ops.alerts.sending import Sender

    snapshot = observe(
        directory, facts_of(card, typed), Unknown("only the file systems were looked at"), now
    )
    earlier = (sample for sample in known(snapshot.operation.usage, ()) if sample.time < now)
    snapshot = replace(snapshot, operation=replace(snapshot.operation, usage=(*earlier, *samples)))
    findings = (*filesystem_full.detect(snapshot), *filesystem_filling.detect(snapshot))
    return process_some(Sender.of(directory, card, now, typed), findings)
