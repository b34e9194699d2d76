"""Whether a launched run is watched: someone is told of trouble, and something looks. Pure; it only warns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tr11ops.base.observed import Observed, Unknown
from tr11ops.detect.cron_dead import watchdog_fault
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, warning

if TYPE_CHECKING:
    from tr11ops.rundir.cron_records import PeriodicJobState


def watching_checks(
    card: RunCard, periodic_jobs: Observed[tuple[PeriodicJobState, ...]], now: float, start: str = "cron install"
) -> Iterator[PreflightCheck]:
    """Who would be told, and by what. `periodic_jobs` are those on record, `now` is in seconds since the epoch.

    `start`: the words of tr11 that start a watchdog on this machine.
    """
    alerts = card.alerts
    if alerts.has_recipients:
        people = len({*alerts.recipients, *alerts.rota})
        urls = ["delivery URLs"] if alerts.urls_file else []
        yield ok("alerts", "trouble is told to " + " and ".join([*([f"{people} by mail"] if people else []), *urls]))
    else:
        rule = "no one would be told of trouble"
        yield warning("alerts", rule, "set alerts.recipients, alerts.rota or alerts.urls_file in the card")
    if isinstance(periodic_jobs, Unknown):
        yield warning("watchdog", f"whether one runs cannot be seen ({periodic_jobs.why})")
        return
    fault = watchdog_fault(periodic_jobs, now)
    if fault:
        where = "" if start == "cron install" else ", in a terminal that stays open,"
        yield warning("watchdog", fault, f"`tr11 {start}`{where} has one look")
    else:
        yield ok("watchdog", "it looks at the run")
