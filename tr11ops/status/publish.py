"""Looks at the run and makes the status.json that it publishes (see `tr11ops.status.published`)."""

from __future__ import annotations

import json
from functools import partial

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, observed
from tr11ops.cluster.base import Overview
from tr11ops.detect.registry import DETECTORS
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.observe.look import facts_of
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import observe_extra
from tr11ops.status.published import GoodputSummary, published_status


def document(
    card: RunCard,
    directory: RunDirectory,
    scheduler: Overview | Unknown | None = None,
    now: float | None = None,
) -> bytes | None:
    """Look at the run once, and give the file that is published; None where the card wants none
    (hub.publish_status).

    At most two calls to the scheduler; without one given, the one that the run was submitted to is
    asked. What could not be seen is null, and named in `unknown`.
    """
    if not card.hub.publish_status:
        return None

    if scheduler is None:
        reader = _usual_scheduler(directory)
    else:
        reader = scheduler
    seen = assess(
        directory,
        facts_of(card, ""),
        scheduler=reader,
        look_beside=partial(observe_extra, directory, card),
        now=now,
    )
    names = (detector.name for detector in DETECTORS)
    public = published_status(
        seen.document(), names, _goodput(directory, seen.snapshot), 60.0 * card.hub.interval_minutes
    )
    return (json.dumps(public, indent=1, allow_nan=False) + "\n").encode()


def _usual_scheduler(directory: RunDirectory) -> Overview | Unknown:

    from tr11ops.cluster.select import choose_scheduler

    recorded = directory.recorded_scheduler()
    try:
        if recorded == "slurm":
            return choose_scheduler("slurm")
        if recorded == "local":
            return choose_scheduler("local")
        return choose_scheduler("auto")
    except (SchedulerError, OSError) as error:
        return Unknown(f"no scheduler here: {error}")


def _goodput(directory: RunDirectory, snapshot: Snapshot) -> GoodputSummary | None:
    """None where the run's past cannot be read, or where there is none yet."""
    if snapshot.unmounted or not directory.exists:
        return None
    history = observed(lambda: read_history(directory, snapshot.jobs, scheduler=snapshot.scheduler))
    if isinstance(history, Unknown) or isinstance(history.attempts, Unknown):
        return None
    seen = account(history, snapshot.time)
    return GoodputSummary(
        seen.useful_of_held, seen.effective_time_ratio, seen.total.held_hours, len(seen.faults)
    )
