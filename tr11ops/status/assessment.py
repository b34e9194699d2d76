"""One look at a run, with all that follows from it: screen, report, hand-over and published status
are made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding
from tr11ops.detect.registry import detect_all
from tr11ops.observe.clock import Moment
from tr11ops.observe.look import look_now, observe, unseen
from tr11ops.observe.snapshot import RunFacts, Snapshot
from tr11ops.status.answer import SleepAnswer, answer
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.verdict import Verdict, judge
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.cluster.base import Overview
    from tr11ops.rundir.paths import RunDirectory
    from tr11ops.status.document import Status


class Assessment(Record, dict=True):
    """A Snapshot, what the detectors found in it, the verdict, and what was observed beside it."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    extra: ExtraObservations

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    @property
    def answer(self) -> SleepAnswer:
        """May a person sleep?"""
        return answer(self.snapshot, self.findings, self.verdict, self.extra)

    @cached_property
    def status(self) -> Status:
        """All of it as one document: what the screens are drawn from."""
        from tr11ops.status.build import status_of

        return status_of(self.snapshot, self.findings, self.verdict, self.extra)

    def document(self) -> dict[str, Any]:
        """What `tr11 status --json` prints, and the published status and the metrics are made of."""
        return self.status.document()


def assess(
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Overview | Unknown,
    look_beside: Callable[[Snapshot], ExtraObservations],
    now: float | None = None,
    read_digests: bool = False,
) -> Assessment:
    """Look at the run once. `now`: the moment by the run's clock, which is asked for it where none
    is given.

    `look_beside` observes what belongs to no snapshot.
    """
    if now is None:
        moment = look_now(directory, facts, scheduler)
    else:
        moment = Moment(now)
    snapshot = observe(directory, facts, scheduler=scheduler, now=moment, read_digests=read_digests)
    findings = detect_all(snapshot)
    return Assessment(snapshot, findings, judge(snapshot, findings), look_beside(snapshot))


def nothing_seen(facts: RunFacts, now: float, why: Unknown) -> Assessment:
    """An assessment of a look that saw nothing, for one reason."""
    snapshot = unseen(facts, Moment(now), why)
    return Assessment(snapshot, (), judge(snapshot, ()), ExtraObservations(alerts=why))
