"""A health check that fails everywhere (see `health.everywhere`), judged over the launches of a
run. Pure.

Its nodes are innocent, those that were excluded before as well, and the launch goes without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import field

from tr11ops.cluster.hostlist import compress
from tr11ops.diagnose.attribution.evidence import NodeReport
from tr11ops.health.everywhere import fails_everywhere
from tr11ops.rundir.exclusion import Exclusion
from trainer.contract.record import Record

_CONDEMNED = re.compile(r"\S+: health check (?P<check>.+?): ")


class LaunchChecks(Record):
    """What the health checks said of the nodes of one launch. `start`: of the launch, seconds since
    the epoch.

    `failed` and `passed` are nodes by check, for each check that failed anywhere. `left_out`:
    checks that were not run, because they fail everywhere. `is_known` is False where no node told
    how its checks ended.
    """

    start: float
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    passed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    is_known: bool = True


class FailingCheck(Record):
    """A check that fails everywhere: on these nodes, since (seconds since the epoch). `passed` it
    have few or none.
    """

    name: str
    nodes: tuple[str, ...]
    passed: tuple[str, ...]
    since: float

    def __str__(self) -> str:
        if self.passed:
            others = f", {compress(self.passed)} alone passed it"
        else:
            others = ", and none passed it"
        return f"health check {self.name} failed on {compress(self.nodes)}{others}"


def of_reports(
    reports: Iterable[NodeReport], start: float, left_out: Iterable[str] = ()
) -> LaunchChecks:
    """What the node agents' records say of one launch."""
    told = [report for report in reports if report.bad_checks or report.passed_checks]
    failed: dict[str, list[str]] = {}
    for report in told:
        for name in report.names_of_bad_checks:
            failed.setdefault(name, []).append(report.node)
    passed = {
        name: [report.node for report in told if name in report.passed_checks] for name in failed
    }
    return LaunchChecks(start, failed, passed, tuple(left_out), is_known=bool(told))


def failing_everywhere(
    last: LaunchChecks, before: Sequence[LaunchChecks]
) -> tuple[FailingCheck, ...]:
    """The checks of `last` that fail everywhere, with what earlier launches (`before`, newest
    first) saw of them.

    Of a node its newest answer counts. What was before a launch that passed the check says nothing:
    it was sound then.
    """
    judged = (_gathered(name, last, before) for name in last.failed)
    return tuple(one for one in judged if fails_everywhere(one.nodes, one.passed))


def _gathered(name: str, last: LaunchChecks, before: Sequence[LaunchChecks]) -> FailingCheck:
    failed, passed = set(last.failed[name]), set(last.passed.get(name, ()))
    since = last.start
    for one in before:
        if not one.is_known or name in one.left_out:
            continue
        if name not in one.failed:
            break
        failed |= set(one.failed[name]) - passed
        passed |= set(one.passed.get(name, ())) - failed
        since = one.start
    return FailingCheck(name, tuple(sorted(failed)), tuple(sorted(passed)), since)


def all_failing_everywhere(launches: Sequence[LaunchChecks]) -> tuple[FailingCheck, ...]:
    """The checks that failed everywhere at the time of any of these launches (newest first)."""
    return tuple(
        found
        for place, last in enumerate(launches)
        for found in failing_everywhere(last, launches[place + 1 :])
    )


def acquitted(
    entries: Iterable[Exclusion], owner: str, checks: Sequence[FailingCheck]
) -> tuple[Exclusion, ...]:
    """The automatic exclusions that rest on these checks alone, made since they fail everywhere."""
    return tuple(
        entry
        for entry in entries
        if entry.owner == owner and rests_on(checks, entry.evidence, entry.since or 0.0)
    )


def rests_on(checks: Sequence[FailingCheck], evidence: Sequence[str], when: float) -> bool:
    """Whether all of this evidence against nodes, of that moment, is what checks said that failed
    everywhere then.
    """
    matches = [_CONDEMNED.match(line) for line in evidence]
    names = {match["check"] for match in matches if match is not None}
    failing = {check.name for check in checks if check.since <= when}
    return all(matches) and bool(names) and names <= failing
