"""What makes two findings of a detector two incidents: a table of all detectors, and names that
look like numbers.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect import detector_table, operation_table
from tests.tr11ops.detect.operation_cases import clock, operated
from tests.tr11ops.status_cases import running, snapshot
from tr11ops.alerts.state import fingerprint
from tr11ops.base.observed import known
from tr11ops.cluster.base import Node
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes import node_lost
from tr11ops.detect.registry import DETECTORS, detect_all
from tr11ops.detect.watch import clock_skew
from tr11ops.observe.snapshot import Snapshot

# a run has at most one such incident at a time; the ids of jobs, which a restart changes, are not
# in it
ONE = ""
IDENTITY = {  # what of a finding is its identity
    "down": ONE,
    "two-attempts": ONE,
    "hung": ONE,
    "stalled": ONE,
    "suspended": ONE,
    "lingering": ONE,
    "zombie": "node",
    "node-lost": "node",
    "no-spare": ONE,
    "dead-chain": ONE,
    "start-failed": "its error",
    "held": ONE,
    "limit-reached": ONE,
    "reservation-ended": ONE,
    "waits-for-site": ONE,
    "nodes-short": ONE,
    "queued-too-long": ONE,
    "chain-end": ONE,
    "kill-switch-left-on": "nothing for queued jobs, `still runs` for a job that does not heed it",
    "directory-unseen": ONE,
    "limit-changed": ONE,
    "switch-unseen": ONE,
    "unfinished-end": "its fault, with the class of a proven one",
    "loss-not-finite": ONE,
    "loss-spike": ONE,
    "gradient-norm": ONE,
    "validation-loss-rises": "set of texts",
    "counters-jump": "iteration",
    "silent-corruption": "node",
    "slow": ONE,
    "slow-node": "node",
    "check-failing": "the checks",
    "log-not-growing": ONE,
    "checkpoint-unsound": "step",
    "checkpoint-overdue": ONE,
    "backup-overdue": "archive",
    "copy-damaged": ONE,
    "sync-overdue": ONE,
    "secret-in-log": "file, and kind of secret",
    "filesystem-full": "file system, or folder",
    "filesystem-filling": "file system",
    "purge-near": "kind of files",
    "exclusion-cap": "nothing for the cap, the node for a bad one that it leaves in use",
    "exclusion-due": ONE,
    "periodic-job-failed": "periodic job",
    "cron-dead": "chain, or the way that jobs are run",
    "damaged-state": ONE,
    "clock-skew": "host, or this machine",
    "namesake": ONE,
}
CASES: list[Snapshot] = [row[1] for row in (*detector_table.TABLE, *operation_table.TABLE)]


def identities(given: Snapshot) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in detect_all(given):
        found.setdefault(finding.detector, set()).add(
            fingerprint(finding.detector, finding.identity)
        )
    return found


def test_every_detector_says_what_its_identity_is() -> None:
    assert set(IDENTITY) == {detector.name for detector in DETECTORS}
    named: dict[str, set[bool]] = {}
    for finding in (finding for case in CASES for finding in detect_all(case)):
        named.setdefault(finding.detector, set()).add(bool(finding.identity))
        assert "" not in finding.identity
    for both in ("kill-switch-left-on", "exclusion-cap"):
        assert named.pop(both) == {False, True}
    assert named == {name: {IDENTITY[name] != ONE} for name in named}


def renumbered(given: Snapshot) -> Snapshot:
    """The same faults in the jobs of the next submission."""
    jobs = tuple(
        replace(
            job,
            job_id=job.job_id.replace("100", "200"),
            raw_id=job.raw_id.replace("100", "200"),
            array_id=job.array_id.replace("100", "200") if job.array_id else job.array_id,
        )
        for job in known(given.jobs, ())
    )
    beats, steps = known(given.heartbeats, ()), known(given.steps, ())
    attempts = known(given.attempts, ())
    return replace(
        given,
        jobs=jobs,
        heartbeats=tuple(replace(beat, job_id=beat.job_id.replace("100", "200")) for beat in beats),
        steps=tuple(replace(step, job_id=step.job_id.replace("100", "200")) for step in steps),
        attempts=tuple(
            replace(
                one, job_id=one.job_id.replace("100", "200"), label=one.label.replace("100", "200")
            )
            for one in attempts
        ),
    )


def test_a_restart_changes_no_identity() -> None:
    seen = 0
    for case in CASES:
        before, after = identities(case), identities(renumbered(case))
        seen += len(before)
        assert all(after[name] == before[name] for name in before.keys() & after.keys())
    assert seen > 100


@pytest.mark.parametrize(
    "names", [("1", "2"), ("n12", "n13"), ("rank3", "rank4"), ("rank-3", "rank-4"), ("7_1", "7")]
)
def test_each_lost_node_is_an_incident_of_its_own(names: tuple[str, str]) -> None:
    host = "n01"
    nodes = tuple(Node(name, frozenset({"down"})) for name in names)
    given = snapshot(jobs=(running(nodes=(host, *names)),), nodes=nodes)
    lost = [finding for finding in detect_all(given) if finding.detector == node_lost.name]
    assert (
        len({fingerprint(finding.detector, finding.identity) for finding in lost}) == len(lost) == 2
    )
    both = replace(given, nodes=(*nodes, Node(host, frozenset({"down"}))))
    found = [finding for finding in detect_all(both) if finding.detector == node_lost.name]
    assert [finding.severity for finding in found] == [
        Severity.CRITICAL,
        Severity.WARNING,
        Severity.WARNING,
    ]
    assert [finding.title for finding in found] == [
        f"job 1000_7 has lost {host}, which ran its batch script",
        *(f"job 1000_7 has lost {name}" for name in names),
    ]


def test_each_wrong_clock_is_an_incident_of_its_own() -> None:
    found = list(
        clock_skew.detect(operated(clocks=(clock("1", 60), clock("2", 90), clock("here", -80))))
    )
    assert [finding.identity for finding in found] == [("2",), ("here",), ("1",)]


def test_an_unreadable_name_does_not_join_all_incidents() -> None:
    unnamed = Finding("slow-node", Severity.WARNING, "a node is slow", identity=("",))
    assert fingerprint("slow-node", unnamed.identity) != fingerprint("slow-node", ())
