"""What is concluded of an attempt's launch: the agent's own conclusion, else the same attributors' on what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Attribution, Conclusion, Evidence, Kind
from tr11ops.diagnose.attribution.records import (
    all_failures,
    read_failures,
    read_fixed_port,
    read_marker,
    read_objects,
    read_ranks,
    read_reports,
)
from tr11ops.rundir.attempts import LaunchRecord
from trainer.contract.end_marker import EndMarker


def read_launch(attempt: Path, number: int | None) -> LaunchRecord | None:
    """The record of a launch, of the last one where `number` is None; None where none can be read."""
    found = []
    for value in read_objects(attempt / "launches"):
        try:
            found.append(LaunchRecord.of({**value, "launch": int(value["launch"])}))
        except (KeyError, TypeError, ValueError):
            continue
    wanted = [record for record in found if number is None or record.launch == number]
    return max(wanted, key=lambda record: record.launch, default=None)


def conclude(
    attempt: Path, number: int | None, log_evidence: Evidence | None, step_code: Callable[[], int | None] = lambda: None
) -> Conclusion | None:
    """Who is to blame for the end of a launch (of the last one where `number` is None).

    The agent's conclusion stands. Where the agent left none, the attributors are asked about the records in the
    attempt's folder and what a log told beside them; None where neither tells of an end. `step_code` gives the derived
    exit code of the job; it is asked only where it counts.
    """
    record = read_launch(attempt, number)
    if record is None:
        return None
    agents = of_record(record)
    if agents is not None:
        return Conclusion(agents, by_agent=True)
    left = evidence_left(attempt, record, log_evidence)
    if left.needs_step_code:
        left = replace(left, derived_exit_code=step_code())
        if left.derived_exit_code is None:
            return None
    return Conclusion(attribute(left), by_agent=False)


def why_it_ended(attempt: Path) -> str:
    """In one line, why the last launch of an attempt whose agent left no verdict ended; "" where no record tells.

    Where the agent came to no conclusion either, it is asked for only if a worker recorded its failure.
    """
    record = read_launch(attempt, None)
    if record is None or (of_record(record) is None and not read_failures(attempt, record.launch)):
        return ""
    found = conclude(attempt, record.launch, None)
    return "" if found is None else found.found.summary


def of_record(record: LaunchRecord) -> Attribution | None:
    """What the agent concluded of a launch; None where it came to nothing."""
    if not record.summary or record.cause not in set(Kind):
        return None
    return Attribution(
        Kind(record.cause),
        record.summary,
        record.confidence if record.confidence is not None else 0.5,
        record.blamed,
        record.suspects,
        record.evidence,
        record.fault,
    )


def evidence_left(attempt: Path, record: LaunchRecord, log_evidence: Evidence | None) -> Evidence:
    """What is left of a launch whose agent said nothing; a log speaks for the nodes that left no record."""
    failures = all_failures(attempt, record)
    heard = {one.host for one in failures}
    reports = read_reports(attempt, record.launch)
    # one clock for all times: a log's are of the same hours, or no times at all, so they come after the records'
    last = failures[-1].time if failures else 0.0
    more = () if log_evidence is None else tuple(one for one in log_evidence.failures if one.host not in heard)
    reached = record.reached
    if reached is None and log_evidence is not None:
        reached = log_evidence.reached
    return Evidence(
        record.nodes,
        record.exit_status if record.exit_status is not None else 1,
        marker=_marker(attempt, record.launch),
        srun=() if log_evidence is None else log_evidence.srun,
        failures=(*failures, *(replace(one, time=last + 1.0 + place) for place, one in enumerate(more))),
        reports=reports,
        ranks=read_ranks(attempt),
        fixed_port=read_fixed_port(attempt),
        reached=reached,
    )


def _marker(attempt: Path, launch: int) -> EndMarker | None:
    try:
        return read_marker(attempt, launch)
    except (OSError, ValueError):
        return None
