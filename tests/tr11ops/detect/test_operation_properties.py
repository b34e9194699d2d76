"""Properties of the operation's detectors: what holds for any queue, clock, copy and disk."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect.operation_table import (
    OPERATION,
    SUBMITTED,
    TABLE,
    UNKNOWN,
    clock,
    excluded,
    facts,
    job,
    operated,
    usage,
)
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    changed,
    checkpoints,
    idle,
    pending,
    running,
    snapshot,
    steps,
)
from tr11ops.detect import registry
from tr11ops.detect.copies import backup_overdue, copy_grace
from tr11ops.detect.watch import clock_skew, is_overdue, round_grace
from tr11ops.observe.observations import CopyStatus, LeastUsed
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir import cron_records as periodic


@given(ahead=st.lists(st.floats(-29.9, 29.9), min_size=1, max_size=8), age=st.floats(0, 3000))
def test_clocks_within_the_bound_are_never_told_of(ahead: list[float], age: float) -> None:
    readings = tuple(clock(f"n{number % 3}", skew, age) for number, skew in enumerate(ahead))
    assert list(clock_skew.detect(operated(clocks=readings))) == []


@given(
    interval=st.floats(60, 30 * DAY),
    late=st.floats(0, 1),
    way=st.sampled_from(["crontab", "daemon", "scrontab", "slurm"]),
)
def test_a_job_within_its_grace_is_not_overdue_beyond_it_always(
    interval: float, late: float, way: str
) -> None:
    within = job(
        interval_seconds=interval, way=way, next_due=NOW - late * round_grace(interval) * 0.999
    )
    beyond = replace(within, next_due=NOW - round_grace(interval) * (1.01 + late))
    assert not is_overdue(within, NOW)
    assert is_overdue(beyond, NOW)


@settings(deadline=None)
@given(
    latest=st.integers(0, 40_000),
    copied=st.integers(0, 40_000),
    interval=st.sampled_from([50, 300, 1000]),
)
def test_the_first_step_without_a_copy_says_how_late_it_is(
    latest: int, copied: int, interval: int
) -> None:
    """However quickly new steps become due: the oldest that is missing counts, and none that has a
    copy.
    """
    long_ago = replace(SUBMITTED, time=NOW - 100 * DAY)
    due = latest - latest % interval
    seen = operated(
        facts=facts(backup=BackupSection(store="/a", store_interval=interval, milestone_percent=0)),
        steps=steps(last=latest, age=0.0),
        submissions=(long_ago,),
        backup=CopyStatus(NOW - DAY, copied),
        checkpoints=checkpoints(
            steps=tuple(range(0, latest + 1, interval)), latest=due, examined=()
        ),
    )
    first_missing = copied - copied % interval + interval
    late = (latest - first_missing) * 105.0
    assert bool(list(backup_overdue.detect(seen))) == (
        due > 0 and copied < due and late > copy_grace(seen)
    )


EVERY_NEED = sorted(
    {part for detector in OPERATION for part in (*detector.needs, *detector.uses)}
    | {"steps", "exclusions", "nodes"}
)


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(EVERY_NEED)),
    later=st.floats(-DAY, 60 * DAY),
)
def test_what_cannot_be_seen_makes_none_of_them_speak(
    base: Snapshot, hidden: set[str], later: float
) -> None:
    seen = replace(base, time=base.time + later)
    blinded = changed(seen, **dict.fromkeys(hidden, UNKNOWN))  # type: ignore[arg-type]
    for detector in OPERATION:
        assert bool(list(detector.detect(blinded))) <= bool(list(detector.detect(seen))), (
            detector.name
        )
        assert detector.name in registry.unjudged_detectors(blinded) or not hidden & {
            *detector.needs,
            *detector.uses,
        }


@given(
    percent=st.floats(0, 60),
    wobble=st.floats(0, 0.5),
    skew=st.floats(-29, 29),
    late=st.floats(-0.99, 0.99),
    out=st.integers(0, 2),
    synced=st.floats(0, 3),
    untouched=st.floats(0, 22),
    waited=st.floats(0, 3600),
    trains=st.booleans(),
)
def test_a_clean_operation_of_any_kind_has_no_findings(
    percent: float, wobble: float, skew: float, late: float, out: int, synced: float, untouched: float,
    waited: float, trains: bool,
) -> None:  # fmt: skip
    """Disks that waver, clocks and rounds within their bounds, few exclusions, a job that runs or
    waits a little.
    """
    samples = tuple(usage(percent + wobble * (day % 2), age=(10 - day) * DAY) for day in range(11))
    due = NOW - late * round_grace(HOUR)
    waits = pending(reason="Resources", submit_time=NOW - waited)
    seen = operated(
        snapshot() if trains else idle(),
        jobs=(running(), pending()) if trains else (waits,),
        usage=samples,
        clocks=(clock(ahead=skew), clock("n02", -skew / 2)),
        periodic_jobs=(job(next_due=due), job("digest", interval_seconds=DAY, next_due=due)),
        chains=(
            periodic.ChainState("hourly", "77", NOW - HOUR, due),
            periodic.ChainState("daily", "78", NOW, due),
        ),
        exclusions=excluded(out),
        sync=CopyStatus(NOW - synced * HOUR),
        least_used=(LeastUsed("data", Path("/scratch/a.bin"), NOW - untouched * DAY),),
    )
    assert [finding for detector in OPERATION for finding in detector.detect(seen)] == []
