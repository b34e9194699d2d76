"""Reads what the trainer left beside its steps: phases, events, logs' sizes, nodes' warnings.

Only tails of large files are read. A failed read is `Unknown` with its reason, never an exception.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tr11ops.base.observed import Observed, Unknown, observed, observing
from tr11ops.observe.derived import ROLL_BACK, ROLL_BACK_EVENTS
from tr11ops.observe.files import LONGEST_TAIL_BYTES, TAIL_BYTES
from tr11ops.observe.observations import (
    Corruption,
    LaunchEnd,
    LogFile,
    NodeWarning,
    Phase,
    TrainingEvent,
    TrainingObservations,
    Validation,
)
from tr11ops.observe.snapshot import Attempt, newest_attempt
from tr11ops.rundir.attempts import KeptStacks, LaunchRecord, read_kept_stacks, read_lives
from trainer.contract.attempt import PhaseRecord, parse_phase
from trainer.contract.compute_record import ComputeTimes
from trainer.contract.documents import read_record
from trainer.contract.metrics_record import STEP, VALIDATION, MetricsRecord, parse_record
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import open_for_reading, read_json, tail_lines

PHASES_HEAD_BYTES = 16 << 10  # start-up and load of the first launches
PHASES_TAIL_BYTES = 48 << 10  # some 600 changes of phase
EVENTS_KEPT = 100
EVALUATED_OR_BACK = (b'"kind": "validation"', b'"kind": "roll-back')
OTHER_RESULTS = ("warning", "bad")
LAUNCHES_OF_ATTEMPTS = 3  # the newest ones whose launches are looked into


def see_training(
    paths: RunPaths, attempts: Observed[tuple[Attempt, ...]], evaluates: bool = True
) -> TrainingObservations:
    """Everything here, of the attempts that were seen. `evaluates`: whether the card asks for
    validation.
    """
    validations = read_validations(paths) if evaluates else ()
    if isinstance(attempts, Unknown):
        return TrainingObservations(
            phases=attempts,
            events=read_events(paths),
            validations=validations,
            logs=read_logs(paths),
            node_warnings=attempts,
            launch_ends=attempts,
            launch_nodes=attempts,
            corruptions=read_corruptions(paths),
            compute_times=attempts,
            compute_before=attempts,
            stacks=attempts,
            lives=attempts,
        )
    newest = newest_attempt(attempts)
    return TrainingObservations(
        phases=read_phases(paths, [attempt.job_id for attempt in attempts]),
        events=read_events(paths),
        validations=validations,
        logs=read_logs(paths),
        node_warnings=() if newest is None else read_node_warnings(paths, newest.job_id),
        launch_ends=_recent_launch_ends(paths, attempts[:LAUNCHES_OF_ATTEMPTS]),
        launch_nodes=None
        if newest is None or newest.end is not None
        else read_launch_nodes(paths, newest.job_id),
        corruptions=read_corruptions(paths),
        compute_times=()
        if newest is None or newest.end is not None
        else read_compute_times(paths, newest.job_id),
        compute_before=last_measured(
            paths, [one for one in attempts if one is not newest or one.end is not None]
        ),
        stacks=read_stacks(paths, [attempt.job_id for attempt in attempts[:LAUNCHES_OF_ATTEMPTS]]),
        lives=()
        if newest is None or newest.end is not None
        else observed(read_lives, paths, newest.job_id),
    )


@observing
def read_stacks(paths: RunPaths, job_ids: Iterable[str]) -> tuple[KeptStacks, ...]:
    """What was kept of these attempts' hangs."""
    found = (read_kept_stacks(paths, job_id) for job_id in job_ids)
    return tuple(kept for kept in found if kept is not None)


@observing
def read_phases(paths: RunPaths, job_ids: Iterable[str]) -> tuple[Phase, ...]:
    """The phases of these attempts, oldest first in each; of a long file, those of its begin and
    its end.
    """
    return tuple(phase for job_id in job_ids for phase in _phases_of(paths, job_id))


def _phases_of(paths: RunPaths, job_id: str) -> Iterator[Phase]:
    path = paths.phases(job_id)
    try:
        tail, complete = tail_lines(path, PHASES_TAIL_BYTES)
        if not complete:
            yield from _spans(job_id, _head_lines(path, PHASES_HEAD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from _spans(job_id, tail)


def _head_lines(path: Path, size: int) -> list[str]:
    with open_for_reading(path) as stream:
        data = stream.read(size)
    return data[: data.rfind(b"\n") + 1].decode("utf-8", errors="replace").split("\n")[:-1]


def _spans(job_id: str, lines: list[str]) -> Iterator[Phase]:
    records = [record for line in lines if (record := parse_phase(line)) is not None]
    following: list[PhaseRecord | None] = [*records[1:], None]
    for record, after in zip(records, following, strict=False):
        same_launch = after is not None and after.launch == record.launch
        ended = None
        if same_launch and after is not None:
            ended = after.time
        yield Phase(
            job_id,
            record.launch,
            phase=record.phase,
            iteration=record.iteration,
            began=record.time,
            ended=ended,
        )


@observing
def read_events(paths: RunPaths) -> tuple[TrainingEvent, ...]:
    """The newest records of metrics.jsonl that are no steps, oldest first; none where there is no
    such file.
    """
    try:
        lines, _ = tail_lines(paths.metrics, TAIL_BYTES)
    except FileNotFoundError:
        return ()
    found = [
        event
        for line in lines
        if '"kind": "step"' not in line and (event := _event(line)) is not None
    ]
    return tuple(found[-EVENTS_KEPT:])


def _event(line: str) -> TrainingEvent | None:
    record = parse_record(line)
    if record is None or record.kind == STEP or record.time is None:
        return None
    rest = {
        name: item for name, item in record.values.items() if name not in {"kind", "time", "job_id"}
    }
    return TrainingEvent(record.kind, record.time, record.job_id, rest)


@observing
def read_validations(paths: RunPaths) -> tuple[Validation, ...]:
    """The evaluations in the last 8 MiB of metrics.jsonl, some 13,000 steps, as they were written;
    none where there is no such file. What was no number, or was rolled back, is left out.
    """
    try:
        lines, _ = tail_lines(paths.metrics, LONGEST_TAIL_BYTES, holding=EVALUATED_OR_BACK)
    except FileNotFoundError:
        return ()
    found: list[Validation] = []
    before_roll_back: list[list[Validation]] = []
    for record in filter(None, map(parse_record, lines)):
        to, one = record.integer("to"), _validation(record)
        if one is not None:
            found.append(one)
        elif record.kind == ROLL_BACK and to is not None:
            before_roll_back.append(found)
            found = [one for one in found if one.iteration <= to]
        elif record.kind in ROLL_BACK_EVENTS and before_roll_back:
            found = before_roll_back.pop()  # an undo takes back the last one
    return tuple(found)


def _validation(record: MetricsRecord) -> Validation | None:
    loss = record.number("lm_loss")
    if record.kind != VALIDATION or not math.isfinite(loss):
        return None
    if record.iteration is None or record.time is None:
        return None
    return Validation(str(record.values.get("name", "")), record.iteration, loss, record.time)


@observing
def read_logs(paths: RunPaths) -> tuple[LogFile, ...]:
    """Size and age of those of main_log.txt and metrics.jsonl that are there."""
    found = []
    for path in (paths.main_log, paths.metrics):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append(LogFile(path.name, status.st_size, status.st_mtime))
    return tuple(found)


@observing
def read_node_warnings(paths: RunPaths, job_id: str) -> tuple[NodeWarning, ...]:
    """What the health checks of an attempt's nodes had to say, by node; what passed is left out."""
    found: list[NodeWarning] = []
    for path in sorted((paths.attempt(job_id) / "nodes").glob("*.json")):
        value = read_json(path) or {}
        for check in value.get("checks", ()):
            if check["result"] in OTHER_RESULTS:
                found.append(
                    NodeWarning(
                        path.stem, str(check["name"]), str(check["result"]), str(check["why"])
                    )
                )
    return tuple(found)


@observing
def read_corruptions(paths: RunPaths) -> tuple[Corruption, ...]:
    """The suspects of every check of the arithmetic that found some, oldest first."""
    found: list[Corruption] = []
    for path in paths.corruptions.glob("*.json"):
        from trainer.contract.corruption import Suspect  # few runs have any

        value = read_json(path) or {}
        for entry in value.get("suspects", ()):
            suspect = Suspect(
                int(entry["rank"]), str(entry["host"]), str(entry["gpu"]), entry["how"]
            )
            found.append(
                Corruption(
                    suspect.host,
                    suspect.rank,
                    time=float(value["time"]),
                    iteration=int(value["iteration"]),
                    certain=suspect.how != "undecided",
                    why=str(suspect),
                )
            )
    return tuple(sorted(found, key=lambda one: (one.time, one.rank)))


@observing
def read_compute_times(paths: RunPaths, job_id: str) -> tuple[ComputeTimes, ...]:
    """Each rank's own compute time in the newest launch of an attempt, by rank; none where no rank
    has written any.

    What cannot be read of some ranks is left out: the others are still compared.
    """
    folder = paths.compute(job_id, 0).parent
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return ()

    seen = [observed(ComputeTimes.read, folder / name) for name in names if _is_record(name)]
    found = [times for times in seen if isinstance(times, ComputeTimes)]
    unread = [times for times in seen if isinstance(times, Unknown)]
    if unread and not found:
        raise ValueError(f"no rank's compute time is readable ({unread[0].why})")
    newest = max((times.launch for times in found), default=0)
    return tuple(
        sorted((times for times in found if times.launch == newest), key=lambda times: times.rank)
    )


def last_measured(
    paths: RunPaths, attempts: Iterable[Attempt]
) -> Observed[tuple[ComputeTimes, ...]]:
    """What the ranks of the last of these attempts measured that measured enough steps."""
    for attempt in islice(attempts, LAUNCHES_OF_ATTEMPTS):
        found = read_compute_times(paths, attempt.job_id)
        if isinstance(found, Unknown) or any(times.can_be_judged for times in found):
            return found
    return ()


def _is_record(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".json") and name[5:-5].isdigit()


def _recent_launch_ends(
    paths: RunPaths, attempts: Iterable[Attempt]
) -> Observed[tuple[LaunchEnd, ...]]:
    found: list[LaunchEnd] = []
    for attempt in attempts:
        ends = read_launch_ends(paths, attempt.job_id)
        if isinstance(ends, Unknown):
            return ends
        found += ends
    return tuple(found)


@observing
def read_launch_nodes(paths: RunPaths, job_id: str) -> tuple[str, ...] | None:
    """The nodes of an attempt's newest launch; None where none has begun."""
    launch = LaunchRecord.newest(paths.attempt(job_id))
    if launch is None:
        return None
    return launch.nodes


@observing
def read_launch_ends(paths: RunPaths, job_id: str) -> tuple[LaunchEnd, ...]:
    """How an attempt's launches ended, by their number; one that goes on has no end yet."""
    return tuple(sorted(_ends_of(paths, job_id), key=lambda end: end.launch))


def _ends_of(paths: RunPaths, job_id: str) -> Iterator[LaunchEnd]:
    for path in (paths.attempt(job_id) / "launches").glob("*.json"):
        record = read_record(LaunchRecord, path, "a launch")
        if record is not None and record.end is not None:
            yield LaunchEnd(
                job_id,
                record.launch,
                time=record.end,
                why=record.summary or record.cause,
                decision=record.decision,
                blamed=record.blamed,
                reached=record.reached,
                began_at=record.checkpoint_before,
                older_checkpoint=record.older_checkpoint,
                failing_checks=record.failing_because
                or dict.fromkeys(record.failing_checks, record.summary),
                suspects=record.suspects,
                fault=record.fault,
                is_last=record.ends_attempt,
            )
