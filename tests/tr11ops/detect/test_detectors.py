"""What holds for every detector: when it speaks and how loudly, and that it survives whatever cannot be seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    SWITCH,
    TABLE,
    UNKNOWN,
    found,
    severities,
)
from tests.tr11ops.detect.operation_cases import OPERATION
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import JobState
from tr11ops.detect import registry
from tr11ops.detect.finding import Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.end_marker import EndMarker


def test_a_healthy_run_has_no_findings() -> None:
    assert registry.detect_all(with_facts(snapshot(), total_iterations=32_000)) == ()


@pytest.mark.parametrize(
    ("given_snapshot", "detector", "expected"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(given_snapshot: Snapshot, detector: str, expected: list[str]) -> None:
    assert severities(given_snapshot, detector) == expected


# those of test_training_numbers.py, which need a course of steps, and of
# test_operation_detectors.py
ELSEWHERE = {
    "slow", "slow-node", "loss-spike", "gradient-norm", "counters-jump", "log-not-growing",
    *(detector.name for detector in OPERATION),
}  # fmt: skip


def test_every_detector_speaks_somewhere_in_the_table() -> None:
    spoken = {finding.detector for row in TABLE for finding in registry.detect_all(row[1])}
    assert spoken >= {detector.name for detector in registry.DETECTORS} - ELSEWHERE


def test_the_slowest_ranks_are_named() -> None:
    ranks = (*beats(age=3 * HOUR, ranks=4), *beats(age=4 * HOUR, iteration=31200, ranks=1))
    (finding,) = found(snapshot(heartbeats=ranks, steps=steps(age=3 * HOUR)), "hung")
    assert finding.evidence[1] == "rank 0 on n01: training, iteration 31200, 4 h 00 min ago"


def test_the_first_cause_is_quoted() -> None:
    dead = running(state=JobState.FAILED, exit_code=143, derived_exit_code=134, end_time=NOW - 60)
    (finding,) = found(
        idle(
            jobs=(dead,), attempts=(wordless("1007", failure="rank 12 on n02: RuntimeError: NCCL"),)
        ),
        "unfinished-end",
    )
    assert finding.evidence == (
        "1000_7: no end marker: the scheduler says FAILED, a step of it ended with exit code 134"
        " (SIGABRT); rank 12 on n02: RuntimeError: NCCL",
    )


@pytest.mark.parametrize(
    ("scheduler", "card", "expected"),
    [
        ("slurm", "", ["scancel 1000_7", "tr11 resume"]),
        ("local", "my card.toml", ["", "tr11 resume --run 'my card.toml'"]),
    ],
)
def test_fixes_are_commands_for_this_run(scheduler: str, card: str, expected: list[str]) -> None:
    given = with_facts(
        snapshot(
            scheduler=scheduler,
            jobs=(running(job_id="1000_6", start_time=NOW - DAY), running(), pending()),
            kill_switch=SWITCH,
        ),
        card=card,
    )
    assert [
        found(given, name)[0].fix for name in ("two-attempts", "kill-switch-left-on")
    ] == expected


def test_a_command_of_two_words_takes_the_card_after_both() -> None:
    given_snapshot = with_facts(snapshot(), card="my.toml")
    assert (
        derived.command(given_snapshot, "nodes check n07") == "tr11 nodes check --run my.toml n07"
    )
    assert derived.command(given_snapshot, "logs --rank 3") == "tr11 logs --run my.toml --rank 3"


FIELDS = [
    "jobs", "nodes", "steps", "heartbeats", "attempts", "checkpoints", "kill_switch", "exclusions", "submissions", "phases",
    "events", "logs", "node_warnings", "periodic_jobs",
]  # fmt: skip


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(FIELDS)),
    later=st.floats(-DAY, 30 * DAY),
)
def test_detectors_survive_any_blindness(base: Snapshot, hidden: set[str], later: float) -> None:
    """Whatever is unknown, nothing is raised; and what is unknown is never reported as absent."""
    changes: dict[str, Any] = dict.fromkeys(hidden, UNKNOWN)
    seen = changed(base, time=base.time + later, **changes)
    findings = registry.detect_all(seen)
    assert [finding.severity for finding in findings] == sorted(
        (f.severity for f in findings), reverse=True
    )
    if hidden & {"jobs", "kill_switch", "attempts"}:
        assert not [finding for finding in findings if finding.detector == "down"]
    if len(hidden) == len(FIELDS):
        assert {finding.detector for finding in findings} <= {"namesake"}


@given(st.integers(1, 200), st.floats(0.01, 1e4))
def test_the_pace_is_a_median(count: int, pace: float) -> None:
    given = list(steps(count, pace=pace))
    given[0] = Step(
        replace(given[0].record, seconds_per_iteration=pace * 1000 if count > 2 else pace)
    )
    assert derived.seconds_per_iteration(snapshot(steps=tuple(given))) == pytest.approx(pace)


def test_severities_are_ordered() -> None:
    assert Severity.INFO < Severity.WARNING < Severity.CRITICAL


def test_a_fault_begins_where_its_evidence_has_it_begin() -> None:
    first, second = wordless("1006", age=20 * 60), wordless("1007", age=9 * 60)
    (finding,) = found(idle(attempts=(first, second)), "unfinished-end")
    assert finding.since == NOW - 20 * 60, (
        "the end of the first of them: each has its own in the evidence"
    )
    assert [line.partition(":")[0] for line in finding.evidence] == [
        "1000_7, 9 min ago",
        "1000_6, 20 min ago",
    ]
    gone = running(state=JobState.CANCELLED, end_time=NOW - 60)
    (down,) = found(idle(jobs=(gone,), attempts=(first, second)), "down")
    assert down.since == NOW - 60, "the last of the queue was cancelled then"
    stopped = EndMarker("kill-switch", 5, 5, True, "", NOW - 9 * 60, "n01", "1007", 1)
    (after_stop,) = found(idle(attempts=(replace(second, end=stopped),)), "down")
    assert after_stop.since is None, "it was stopped until someone removed the switch"


# what a mail says that the run does by itself about what a detector finds, in the table's own cases
BY_ITSELF = {
    "waits-for-site": "What is queued starts by itself when the site is done.",
    "limit-changed": "The attempt saves and leaves in time by itself, unless the limit is too short for a save.",
    "checkpoint-unsound": "A resume takes the newest checkpoint that is whole.",
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_the_run_does_by_itself_is_said_by_its_finding_alone(name: str) -> None:
    """A second table of the mails' own said it by the detector's name."""
    told = [one for row in TABLE for one in found(row[1], name) if one.severity > Severity.INFO]
    assert told and {one.by_itself for one in told} == {BY_ITSELF[name]}
