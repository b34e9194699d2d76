"""`tr11 diagnose`: what ended a training, by any log of it: the first cause, its place, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.common import Refusal, in_time, kind_to_watch, looking, open_reader, open_scheduler
from tr11ops.cli.context import JSON, RunContext
from tr11ops.cli.logs_print import byte_progress
from tr11ops.cli.logs_sources import attempt_named
from tr11ops.rundir.attempts import read_attempt_label

if TYPE_CHECKING:
    from tr11ops.diagnose.diagnosis import Diagnosis
    from tr11ops.rundir.paths import RunDirectory
    from tr11ops.status.assessment import Assessment

UNOBSERVED = 3
NEEDS_PERSON = 1


def diagnose(
    context: Annotated[RunContext, JSON],
    *,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", show_default=False, help="Logs; .gz and rotated ones too.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", "--attempt", metavar="ID", help="This attempt of the run, e.g. 1234_7.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Judge every launch in the logs, not the last alone.")] = False,
) -> None:
    """Say what ended a training: the first cause apart from what followed from it, where it was, and what to do.

    Without FILE it reads the logs of the run that the card names, and asks the attempt's own records too who is to
    blame: the answer is the agent's. Of a run that trains and is well it says so; --all judges its earlier launches.
    Any training's logs will do: Megatron's, torchrun's, Slurm's, the kernel's; several files are judged together.

    Exit code 0 where nothing is to be done, 1 where something is, 3 where a log could not be read.

    Examples:
      tr11 diagnose
      tr11 diagnose --job 1234_7 --json
      tr11 diagnose slurm-4711.out
      tr11 diagnose main_log.txt.1.gz main_log.txt dmesg-node03.txt
    """
    if files and job is not None:
        raise Refusal("--job names an attempt of a run: give it, or files", exit_code=2)
    paths = _given(files) if files else _of_run(context, job)
    found = _judged(paths, every)
    if not files:
        living = None if every else _living(context, found[-1], job)
        found = [living] if living is not None else [_with_conclusion(context, one, job) for one in found]
    more = {"launches": [one.document() for one in found]} if every else {}
    context.emit({**found[-1].document(), **more}, _lines(found))
    if any(one.step.value != "none" for one in found[-1:]):
        raise typer.Exit(NEEDS_PERSON)


def _lines(found: list[Diagnosis]) -> Iterator[str]:
    from tr11ops.diagnose.screen import lines

    for number, one in enumerate(found):
        if number:
            yield ""
        yield from lines(one)


def _given(files: list[Path]) -> list[Path]:
    for path in files:
        if not path.exists():
            raise Refusal(f"{path}: does not exist", exit_code=2)
        if path.is_dir():
            raise Refusal(f"{path}: is a folder; give the logs in it", exit_code=2)
    return files


def _of_run(context: RunContext, job: str | None) -> list[Path]:
    """The main log of the run, or the logs of one attempt's workers: none where only its records are there."""
    from tr11ops.diagnose.attribution.conclusion import read_launch

    _, directory = context.seen()
    if job is not None:
        attempt = attempt_named(directory, job)
        logs = sorted({path for _, _, path in directory.worker_logs(attempt)})
        batch = directory.paths.attempt(attempt) / "batch.log"
        logs += [batch] if batch.is_file() else []
        if not logs and read_launch(directory.paths.attempt(attempt), None) is None:
            raise Refusal(f"--job {job}: neither a log nor a record of this attempt is there", exit_code=2)
        return logs
    main_log = directory.paths.main_log
    if not main_log.exists():
        raise Refusal(f"{main_log} does not exist yet: this run has not started")
    return [main_log]


def _living(context: RunContext, found: Diagnosis, job: str | None) -> Diagnosis | None:
    """The answer for an attempt that trains and is well now, where its log tells of no fault; None for any other."""
    from tr11ops.diagnose.signature import FaultClass, NextStep
    from tr11ops.observe.derived import identifiers
    from tr11ops.observe.look import facts_of
    from tr11ops.status.assessment import assess
    from tr11ops.status.extra_observations import ExtraObservations
    from tr11ops.watchdog.verdict import VerdictWord

    if found.fault is not FaultClass.UNKNOWN or found.root_cause is not None:
        return None
    card, directory = context.card, context.directory

    def look() -> Assessment:
        reader = open_reader(directory, context.scheduler)
        return assess(directory, facts_of(card, context.run or ""), reader, lambda _: ExtraObservations())

    seen = in_time(look)
    attempt = found.launch if job is None else attempt_named(directory, job)
    jobs = [one for one in seen.snapshot.active_jobs if attempt in identifiers(one)]
    if not jobs or seen.verdict.exit_code or seen.verdict.word not in {VerdictWord.HEALTHY, VerdictWord.STARTING}:
        return None
    why = f"{seen.verdict.why[:1].upper()}{seen.verdict.why[1:]}. Its log tells of no fault."
    return replace(
        found, fault=FaultClass.RUNNING, step=NextStep.NONE, confidence=1.0, launch=attempt, label=jobs[0].job_id,
        explanation=why,
    )  # fmt: skip


def _with_conclusion(context: RunContext, found: Diagnosis, job: str | None) -> Diagnosis:
    """The same with what the records of its attempt say of node and blame, where there are any."""
    from tr11ops.diagnose.attribution.conclusion import conclude
    from tr11ops.diagnose.attribution.joined import joined

    directory = context.directory
    attempt = attempt_named(directory, job) if job is not None else found.launch
    if not attempt:
        return found
    found = replace(found, label=read_attempt_label(directory.paths, attempt))
    number = found.number if job is None else None
    conclusion = conclude(
        directory.paths.attempt(attempt), number, found.log_evidence, lambda: _step_code(context, directory, attempt)
    )
    return found if conclusion is None else joined(found, conclusion)


def _step_code(context: RunContext, directory: RunDirectory, attempt: str) -> int | None:
    """The derived exit code by the scheduler's records; None where it has none, or does not answer."""
    from tr11ops.cluster.base import SchedulerError

    try:
        job = looking(open_scheduler(kind_to_watch(directory, context.scheduler))).job(attempt)
    except SchedulerError:
        return None
    return None if job is None else job.derived_exit_code


def _judged(paths: list[Path], every: bool) -> list[Diagnosis]:
    """Raises Refusal where a file cannot be read."""
    from tr11ops.diagnose.look import diagnose_files

    size = sum(path.stat().st_size for path in paths if path.is_file())
    try:
        with byte_progress(size) as advance:
            return diagnose_files(paths, every, advance)
    except (OSError, ValueError) as error:
        raise Refusal(f"{error}: nothing may be concluded", exit_code=UNOBSERVED) from None
