"""Reads the run directory into observed values. A failed read is `Unknown` with its reason, never
an exception.

Only the tails of logs are read, so a log of gigabytes costs what a small one costs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tr11ops.base.observed import Observed, Unknown, cause, known, observed, observing
from tr11ops.base.units import number_in
from tr11ops.observe.snapshot import (
    SOUND_LOSSES,
    Attempt,
    Checkpoint,
    Checkpoints,
    KillSwitch,
    Step,
)
from tr11ops.rundir.attempts import SUPERSEDED, code_of, told_end, versions_of
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.attempt import BAD_REASONS, EndMarker, Heartbeat
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.manifest import manifest_faults
from trainer.contract.metrics_record import MetricsRecord, parse_record
from trainer.contract.paths import RunPaths, attempt_label
from trainer.contract.record import JsonObject, Record
from trainer.contract.resumable import ResumeNeed, judge, size_faults
from trainer.contract.state_file import descriptor_of, read_json, tail_lines

# How far the training was at a moment is found in metrics.jsonl by halving: that of weeks is long.


class PastProgress(Record):
    """How far the training was: the last step before a moment. `loss` is None where it was not a
    number, a count where it is not told.
    """

    iteration: int
    consumed_samples: int | None
    consumed_tokens: int | None
    loss: float | None


WINDOW_BYTES = 64 << 10  # holds many records, and validation records between them


def progress_at(path: Path, moment: float) -> PastProgress | None:
    """The last step that was logged before `moment` (seconds since the epoch); None where there is
    none.

    Records are in the order of their times. Raises OSError as the file system does; no file is no
    step.
    """
    try:
        descriptor = descriptor_of(path)
    except FileNotFoundError:
        return None
    try:
        low, high = 0, os.fstat(descriptor).st_size
        while high - low > WINDOW_BYTES:
            middle = (low + high) // 2
            first = next(iter(_steps(descriptor, middle, high)), None)
            if first is not None and _time(first) < moment:
                low = middle
            else:
                high = middle
        # a window's first line may be cut, so it begins a window early
        found = _steps(descriptor, max(0, low - WINDOW_BYTES), high + WINDOW_BYTES)
    finally:
        os.close(descriptor)
    before = [step for step in found if _time(step) < moment]
    if before:
        return _standing(before[-1])
    return None


def _steps(descriptor: int, start: int, end: int) -> list[MetricsRecord]:
    """The whole step records of a stretch of the file that say when they were written."""
    size = min(end - start, 4 * WINDOW_BYTES)
    lines = os.pread(descriptor, size, start).split(b"\n")[0 if start == 0 else 1 : -1]
    found = [record for line in lines if (record := parse_record(line)) is not None]
    return [record for record in found if record.is_step and record.time is not None]


def _time(step: MetricsRecord) -> float:
    return step.time or 0.0


def _standing(step: MetricsRecord) -> PastProgress:
    loss = step.number("lm_loss")
    return PastProgress(
        iteration=step.iteration or 0,
        consumed_samples=step.integer("consumed_samples"),
        consumed_tokens=step.integer("consumed_tokens"),
        loss=None if math.isnan(loss) else loss,
    )


TAIL_BYTES = 256 << 10  # about 400 records of metrics.jsonl
# beyond the stack traces that a crash of 384 ranks leaves behind the last step
LONGEST_TAIL_BYTES = 8 << 20
STEPS_KEPT = 400
ATTEMPTS_KEPT = 8
READ_ERRORS_SHOWN = 3
ANY_MODEL = ResumeNeed()  # where the card is not known


# ----------------------------------------------------------------------------- logs


def read_steps(paths: RunPaths) -> Observed[tuple[Step, ...]]:
    """The last step records, oldest first: from metrics.jsonl, or from main_log.txt where that
    gives none.

    Where the last losses are no numbers, they reach back to before that began, as far as
    LONGEST_TAIL_BYTES do: which checkpoint is from before, depends on it. An empty tuple means that
    both were read in full, or are not there, and hold no step.
    """
    first = _steps_of(paths.metrics, _metrics_step)
    if isinstance(first, tuple) and first:
        return first
    second = _steps_of(paths.main_log, _log_step)
    if isinstance(second, tuple) and second:
        return second
    failures = [result.why for result in (first, second) if isinstance(result, Unknown)]
    if failures:
        return Unknown("; ".join(failures))
    return ()


def _steps_of(path: Path, parse: Callable[[str], Step | None]) -> Observed[tuple[Step, ...]]:
    for size in (TAIL_BYTES, LONGEST_TAIL_BYTES):
        try:
            lines, complete = tail_lines(path, size)
        except FileNotFoundError:
            return ()
        except OSError as error:
            return Unknown(cause(error))
        steps, is_enough = _newest(map(parse, reversed(lines)))
        if is_enough or complete:
            return steps[::-1]
    if steps:
        return steps[::-1]
    return Unknown(f"{path}: no step in its last {LONGEST_TAIL_BYTES >> 20} MiB")


def _newest(found: Iterator[Step | None]) -> tuple[tuple[Step, ...], bool]:
    """The newest STEPS_KEPT of the steps, and more where only older ones are sound; whether sound
    ones are among them.

    `found` comes newest first, and is read no further than that.
    """
    steps: list[Step] = []
    sound, is_enough = 0, False
    for step in found:
        if step is None:
            continue
        steps.append(step)
        sound += 1
        if step.record.has_bad_loss:
            sound = 0
        is_enough = is_enough or sound >= SOUND_LOSSES
        if is_enough and len(steps) >= STEPS_KEPT:
            break
    return tuple(steps), is_enough or (bool(steps) and sound == len(steps))


def _metrics_step(line: str) -> Step | None:
    read = parse_record(line)
    if read is None:
        record = None
    else:
        record = read.step()
    if read is None or record is None:
        return None
    return Step(record, read.time, read.job_id)


def _log_step(line: str) -> Step | None:
    if "iteration" not in line:
        return None
    from tr11ops.dialects.reading import step_record

    record = step_record(line)
    if record is None:
        return None
    return Step(record)


# ----------------------------------------------------------------------------- heartbeats and
# attempts
def read_heartbeats(paths: RunPaths) -> tuple[Observed[tuple[Heartbeat, ...]], tuple[str, ...]]:
    """All ranks' heartbeats by rank, and what is wrong with those that could not be read."""
    beats: list[Heartbeat] = []
    read_errors: list[str] = []
    try:
        names = [
            name
            for name in _names(paths.heartbeats)
            if name.endswith(".json") and name[:-5].isdigit()
        ]
    except OSError as error:
        return Unknown(cause(error)), ()
    for name in names:
        beat = observed(_checked_heartbeat, paths.heartbeats / name)
        if isinstance(beat, Unknown):
            read_errors.append(f"heartbeat {name}: {beat.why}")
        elif beat is not None:
            beats.append(beat)
    if read_errors and not beats:
        return Unknown(f"no heartbeat is readable ({read_errors[0]})"), ()
    return tuple(sorted(beats, key=lambda beat: beat.rank)), _shortened(read_errors)


def _checked_heartbeat(path: Path) -> Heartbeat | None:
    beat = Heartbeat.read(path)
    if beat is not None:
        for value in (beat.time, beat.iteration, beat.rank):
            number_of(path, value)
    return beat


def number_of(path: Path, value: object) -> float:
    """A number that a file holds. Raises ValueError, which names the file, for anything else."""
    number = number_in(value)
    if number is None:
        raise ValueError(f"{path} holds {str(value)[:40]!r} where a number belongs")
    return number


def _shortened(read_errors: list[str]) -> tuple[str, ...]:
    if len(read_errors) <= READ_ERRORS_SHOWN:
        return tuple(read_errors)
    return (
        *read_errors[:READ_ERRORS_SHOWN],
        f"... and {len(read_errors) - READ_ERRORS_SHOWN} more of this kind",
    )


@observing
def read_attempts(paths: RunPaths) -> tuple[Attempt, ...]:
    """The newest attempts, newest first."""
    try:
        entries = [
            (entry.stat().st_mtime, entry.name)
            for entry in os.scandir(paths.attempts)
            if entry.is_dir()
        ]
    except FileNotFoundError:
        return ()
    newest = sorted(entries, reverse=True)[:ATTEMPTS_KEPT]
    attempts = [_attempt(paths, name, changed) for changed, name in newest]
    return tuple(sorted(attempts, key=lambda attempt: attempt.changed, reverse=True))


def _attempt(paths: RunPaths, job_id: str, changed: float) -> Attempt:
    path = paths.end_marker(job_id)

    def read() -> EndMarker | None:
        marker = EndMarker.read(path)
        if marker is not None:
            number_of(path, marker.time)
            number_of(path, marker.iteration)
        return marker

    end = observed(read)
    record = read_details(path.with_name("attempt.json"))
    is_bad = end is None or (isinstance(end, EndMarker) and end.reason in BAD_REASONS)
    if is_bad:
        verdict = read_details(path.with_name("verdict.json"))
    else:
        verdict = {}
    told = end.time if isinstance(end, EndMarker) else told_end(None, _number(verdict, "time"))
    failure = ""
    if end is None:
        if verdict:
            failure = _text(verdict, "message")
        else:
            failure = _why_without_verdict(path.parent)
    return Attempt(
        job_id=job_id,
        changed=told if told is not None else changed,
        is_told=told is not None,
        end=end,
        label=attempt_label(record, job_id),
        start=_number(record, "start"),
        nodes=_texts(record, "nodes"),
        failure=failure,
        changes=_texts(record, "changes"),
        code=code_of(record),
        versions=versions_of(record),
        cause=_text(verdict, "cause"),
        fault=_text(verdict, "launch_fault") or _text(verdict, "fault"),
        blamed=_texts(verdict, "blamed"),
        held_because="" if verdict.get("held_for") else _text(verdict, "held_because"),
        gave_way=verdict.get("reason") == SUPERSEDED and verdict.get("launches") == 0,
        evidence=_texts(verdict, "evidence"),
    )


def _texts(record: JsonObject, name: str) -> tuple[str, ...]:
    """The texts of a list; none where it is not one."""
    value = record.get(name)
    if isinstance(value, list):
        return tuple(map(str, value))
    return ()


def _why_without_verdict(attempt: Path) -> str:
    """What ended an attempt whose agent was ended too: what the agent would have said."""
    # signatures: most looks need none
    from tr11ops.diagnose.attribution.conclusion import why_it_ended

    return known(observed(why_it_ended, attempt), "")


def read_details(path: Path) -> JsonObject:
    """Details worth showing, on which no conclusion rests: what cannot be read is left out."""
    value = observed(read_json, path)
    if isinstance(value, dict):
        return value
    return {}


# ----------------------------------------------------------------------------- checkpoints
LOOKS_AT_LATEST = 3  # as many saves or roll-backs may come between the list and `latest`


def read_steps_and_latest(folder: Path) -> tuple[tuple[int, ...], Observed[int | None]]:
    """The steps that have a folder (ascending) and the step that `latest` names, of one moment.

    A save, a prune or a roll-back may come between the two: they are read again then, so that
    "latest names what is not there" is said only where it stays so. Raises OSError when the folder
    cannot be listed.
    """
    for _ in range(LOOKS_AT_LATEST):
        latest = observed(read_latest, folder)
        steps = tuple(checkpoint_steps(folder))
        if not isinstance(latest, int) or latest in steps:
            break
    return steps, latest


@observing
def read_checkpoints(
    folder: Path, digests: bool = False, need: ResumeNeed = ANY_MODEL
) -> Checkpoints:
    """The checkpoints, of which the newest are looked into, down to the first resumable one, as a
    restart does.

    They are judged as the trainer does it, for what the run `need`s. File sizes are compared with
    the manifest, and what the last reading of all bytes found counts; digests are read if asked,
    which reads every byte.
    """
    steps, latest = read_steps_and_latest(folder)
    examined: list[Checkpoint] = []
    for step in reversed(steps):
        examined.append(_checkpoint(folder, step, digests, need))
        if examined[-1].is_sound:
            break
    return Checkpoints(steps, latest, tuple(examined))


def _checkpoint(folder: Path, step: int, digests: bool, need: ResumeNeed) -> Checkpoint:
    faults_of = partial(manifest_faults, read_digests=True) if digests else size_faults
    manifest, fault = judge(folder, step, need, faults_of)
    if manifest is None:
        is_complete = fault is not None and fault.kind not in {"missing", "incomplete"}
        return Checkpoint(
            step, is_complete, faults=(fault.text,) if fault is not None and is_complete else ()
        )
    return Checkpoint(
        step,
        complete=True,
        created=manifest.created,
        bytes=manifest.total_bytes,
        verified="digests" if digests else "sizes",
        faults=() if fault is None else (fault.text,),
    )


# ----------------------------------------------------------------------------- what people and
# other tools wrote
@observing
def read_kill_switch(path: Path) -> KillSwitch | None:
    """The kill switch if it is set, whatever the path is: the trainer asks only whether it exists."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    switch = KillSwitch(path, time=status.st_mtime)
    try:
        value = read_json(path) or {}
    except (OSError, ValueError):
        return switch  # set by a plain `touch`: who and why are not written, but it is set
    when = _number(value, "time", "when") or switch.time
    return KillSwitch(path, _text(value, "who", "user"), when, _text(value, "why", "reason"))


@observing
def read_exclusions(path: Path) -> tuple[Exclusion, ...]:
    """The run's own list of excluded nodes; empty when there is no list."""
    return read_version(path).exclusions


def read_submissions(
    directory: RunDirectory,
) -> tuple[Observed[tuple[Submission, ...]], tuple[str, ...]]:
    """Every recorded submission, newest first, and what is wrong with those that could not be read."""
    found: list[Submission] = []
    read_errors: list[str] = []
    tags = observed(directory.tags)
    if isinstance(tags, Unknown):
        return tags, ()
    for tag in reversed(tags):
        entry = observed(directory.read_submission, tag)
        if isinstance(entry, Unknown):
            read_errors.append(f"submission {tag}: {entry.why}")
        elif entry is not None:
            found.append(entry)
    return tuple(found), _shortened(read_errors)


def _names(folder: Path) -> Iterator[str]:
    try:
        yield from sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return


def _text(value: JsonObject, *keys: str) -> str:
    return next((str(value[key]) for key in keys if value.get(key) is not None), "")


def _number(value: JsonObject, *keys: str) -> float | None:
    return next((number for key in keys if (number := number_in(value.get(key))) is not None), None)
