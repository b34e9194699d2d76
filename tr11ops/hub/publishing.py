"""Looks at the run and makes the status.json that it publishes (see `tr11ops.hub.published`)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tr11ops.hub.published import GoodputSummary, published_status

if TYPE_CHECKING:
    from tr11ops.cluster.base import Overview
    from tr11ops.runcard import RunCard
    from tr11ops.rundir import RunDirectory
    from tr11ops.snapshot import Snapshot, Unknown


def document(
    card: RunCard, directory: RunDirectory, scheduler: Overview | Unknown | None = None, now: float | None = None
) -> bytes | None:
    """Look at the run once, and give the file that is published; None where the card wants none (hub.publish_status).

    At most two calls to the scheduler; without one given, the one that the run was submitted to is asked. What could
    not be seen is null, and named in `unknown`.
    """
    if not card.hub.publish_status:
        return None
    from tr11ops.detect.registry import DETECTORS, detect_all
    from tr11ops.observe import facts_of, observe
    from tr11ops.report.status_json import status_document
    from tr11ops.report.status_surroundings import see_surroundings
    from tr11ops.verdict import judge

    moment = time.time() if now is None else now
    eye = _usual_scheduler(directory) if scheduler is None else scheduler
    snapshot = observe(directory, facts_of(card, ""), eye, moment)
    findings = detect_all(snapshot)
    full = status_document(snapshot, findings, judge(snapshot, findings), see_surroundings(directory, card, snapshot))
    names = (detector.NAME for detector in DETECTORS)
    public = published_status(full, names, _goodput(directory, snapshot, moment), 60.0 * card.hub.interval_minutes)
    return (json.dumps(public, indent=1, allow_nan=False) + "\n").encode()


def _usual_scheduler(directory: RunDirectory) -> Overview | Unknown:
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.cluster.select import choose_scheduler
    from tr11ops.snapshot import Unknown

    recorded = directory.recorded_scheduler()
    try:
        return choose_scheduler("slurm" if recorded == "slurm" else "local" if recorded == "local" else "auto")
    except (SchedulerError, OSError) as error:
        return Unknown(f"no scheduler here: {error}")


def _goodput(directory: RunDirectory, snapshot: Snapshot, now: float) -> GoodputSummary | None:
    """None where the run's past cannot be read, or where there is none yet."""
    from tr11ops.evidence import observed
    from tr11ops.report.goodput import account
    from tr11ops.report.history import read_history
    from tr11ops.snapshot import Unknown

    if not directory.exists:
        return None
    history = observed(lambda: read_history(directory, snapshot.jobs))
    if isinstance(history, Unknown) or isinstance(history.attempts, Unknown):
        return None
    seen = account(history, now)
    return GoodputSummary(
        seen.useful_of_held, seen.effective_time_ratio, seen.total.held_micros / 3.6e9, len(seen.faults)
    )
