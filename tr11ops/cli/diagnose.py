"""`tr11 diagnose`: what ended a training, by any log of it; `tr11 runbook`: what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, SchedulerError
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.base.shipped import page_lines, page_names, page_title, pages_about
from tr11ops.base.units import capitalized, duration
from tr11ops.cli.common import AttemptOption, in_time, say
from tr11ops.cli.logs import attempt_named, byte_progress
from tr11ops.cli.runner import JSON, NO_RUN, Outcome, RunContext
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.slurm_command import PatientOnce
from tr11ops.detect.attempts import is_without_word, look_at
from tr11ops.detect.nodes_left import exclusion_limit, without_bad_nodes
from tr11ops.detect.numbers import loss_not_finite
from tr11ops.detect.registry import page_of, page_of_word
from tr11ops.detect.unfinished_end import if_the_data_are_at_fault, is_bad, known_ends
from tr11ops.diagnose.attribution.conclusion import JobWord, conclude, has_clean_end, read_launch
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.diagnosis import Diagnosis, NowState, followed
from tr11ops.diagnose.look import (
    LaunchNumber,
    diagnose_files,
    diagnose_launch,
    if_it_goes_on,
    nothing_known,
)
from tr11ops.diagnose.signature import FaultClass, NextStep
from tr11ops.observe.files import read_attempts, read_details, read_heartbeats
from tr11ops.observe.readers import open_reader
from tr11ops.observe.snapshot import Snapshot, newest_attempt
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import Assessment, assess
from tr11ops.status.extra_observations import ExtraObservations
from trainer.contract.errors import NEEDS_PERSON, UNOBSERVED
from trainer.contract.paths import read_attempt_label

# ------------------------------------------------------------------------ advice on an ended launch


def advice(snapshot: Snapshot, found: Diagnosis, said: Container[str] = ()) -> str:
    """The command that holds for this run at this moment, with its reason; "" where the step's own
    words do. `said`: the commands that are told beside it.
    """
    if found.conclusion is None:
        return ""
    judged = found.conclusion.found
    if judged.blamed:
        return _past_the_limit(snapshot, judged.blamed)
    if judged.kind is Kind.OPERATOR:
        return _while_not_finite(snapshot, found.launch)
    attempts = [one for one in known(snapshot.attempts, ()) if one.job_id == found.launch]
    lines = [line for one in attempts for line in if_the_data_are_at_fault(snapshot, one, said)]
    for one in attempts:
        if is_without_word(snapshot, one):
            lines.append(f"what it said last: `{look_at(snapshot, one)}`")
    return _sentences(lines)


def with_advice(found: Diagnosis, said: str) -> Diagnosis:
    """The diagnosis with that advice: a run that a person stopped while its losses were no numbers
    had no clean end.
    """
    conclusion = found.conclusion
    if said and conclusion is not None and conclusion.found.kind is Kind.OPERATOR:
        # it knew of no fault
        conclusion = replace(conclusion, found=replace(conclusion.found, restart=None))
        found = replace(
            found, fault=FaultClass.NUMERICS, step=NextStep.ROLLBACK_AND_SKIP, conclusion=conclusion
        )
    return replace(found, advice=said)


def _past_the_limit(snapshot: Snapshot, blamed: tuple[str, ...]) -> str:
    limit = exclusion_limit(snapshot)
    if limit is None or isinstance(snapshot.exclusions, Unknown):
        return ""
    excluded = {entry.node for entry in snapshot.exclusions}
    if set(blamed) <= excluded:
        return f"{', '.join(blamed)} is excluded already."
    if not limit.forbids(blamed, excluded):
        return ""
    left = [node for node in blamed if node not in excluded]
    commands = ", then ".join(f"`{line}`" for line in without_bad_nodes(snapshot, left))
    return f"The limit forbids it ({limit}); what helps now: {commands}"


def _while_not_finite(snapshot: Snapshot, attempt: str) -> str:
    """Why a person may have stopped it: its last losses were no numbers."""
    steps = known(snapshot.steps, ())
    if not steps or steps[-1].job_id != attempt:
        return ""
    for finding in loss_not_finite.detect(snapshot):
        return _sentences([f"{finding.title} when it was stopped", finding.evidence[-1]])
    return ""


def _sentences(lines: Sequence[str]) -> str:
    return " ".join(f"{capitalized(line)}." for line in lines)


# ----------------------------------------------------------------------------- runbook
SCHEMA = 1
WIDTH = 78
MOST_SHOWN = 4


def runbook(
    context: Annotated[RunContext, NO_RUN, JSON],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A page, an alert's detector, or what people call the trouble: nan.",
            autocompletion=page_names,
        ),
    ] = None,
) -> Outcome:
    """Print the page that says what to do about an alert; without NAME, list the pages.

    `tr11 status` and each alert's mail name the page.

    Examples:
      tr11 runbook
      tr11 runbook hung
      tr11 runbook nan
    """
    pages = page_names()
    if name is None:
        listed = [{"name": page, "title": page_title(page)} for page in pages]
        shown = ("Read one with `tr11 runbook NAME`:", *(f"  {page}" for page in pages))
        return Outcome({"schema": SCHEMA, "pages": listed}, shown)
    page = name.removeprefix("runbooks/").removesuffix(".md")
    if page not in pages:
        page = (page_of_word(page) or page_of(page)).removesuffix(".md")
    if page not in pages:
        raise Refusal(f"NAME {name!r}: there is no such page; {_hint(page, pages)}", exit_code=2)
    title = page_title(page)
    lines = list(page_lines(f"{page}.md", WIDTH))
    document = {"schema": SCHEMA, "name": page, "title": title, "lines": lines}
    return Outcome(document, (title, *lines))


def _hint(word: str, pages: tuple[str, ...]) -> str:
    """What may have been meant: a name like it, or pages that speak of it."""
    near = get_close_matches(word, pages, 1) or [one for one in pages if one.startswith(word)]
    if near:
        return f"did you mean {near[0]}?"
    about = pages_about(word)
    if about:
        return f"these speak of it: {', '.join(about[:MOST_SHOWN])}"
    return "`tr11 runbook` lists them"


T = TypeVar("T")
SILENT_SECONDS = 1800.0  # longer than a step, an evaluation or a save takes


def diagnose(
    context: Annotated[RunContext, JSON],
    *,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Logs; .gz and rotated ones too."),
    ] = None,
    job: AttemptOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Judge every launch in the logs, not the last alone.")
    ] = False,
) -> Outcome:
    """Say what ended a training, who is to blame, whether a restart helps, each with its
    confidence, and what to do.

    The first cause is told apart from what followed from it, with the line that says so.

    Without FILE it judges the last launch of the run's newest attempt, with --job that of another. What the attempt's
    agent concluded leads; of the logs only the lines of this launch count. Of a run that trains and is well it says so;
    --all judges every launch in the run's log; what to type now follows the last. A scheduler that is silent for 5 s
    is not asked again, and what to do is said in general.
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

    sight = _Sight(context)
    if files:
        found = _judged(_given(files), every)
        found[-1] = _as_old_as(found[-1], files)
    elif every:
        *before, last = (_with_conclusion(sight, one) for one in _every_launch(context, job))
        found = [*followed(before, last), _with_evidence(sight, _as_it_stands(sight, last))]
    else:
        found = [_with_evidence(sight, _last_launch(sight, job))]
    if sight.silence:
        say(
            f"tr11: {sight.silence}: how the run stands now is not known, and what to do is said in general"
        )
    document = found[-1].document()
    if every:
        document = {**document, "launches": [one.document() for one in found]}
    code = 0 if found[-1].action is NextStep.NONE else NEEDS_PERSON
    return Outcome(document, _lines(found), exit_code=code)


class _Sight:
    """How the run stands now, looked at once, and only where that is asked for. A silent scheduler
    costs seconds.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.silence = ""  # why it could not be seen; "" where it was, or was not asked for

    @cached_property
    def scheduler(self) -> Scheduler | Unknown:
        """The scheduler, which is not asked again after one silence."""
        from tr11ops.base.deadline import ADVICE_SECONDS
        from tr11ops.cluster.slurm import SlurmScheduler

        found = open_reader(self.context.directory, self.context.scheduler)
        if isinstance(found, SlurmScheduler):
            return SlurmScheduler(runner=PatientOnce(ADVICE_SECONDS))
        return found

    @cached_property
    def assessment(self) -> Assessment | None:
        """None where the run directory, or the scheduler, does not answer."""
        from tr11ops.observe.look import facts_of

        card = self.context.card
        directory = self.context.directory
        facts = facts_of(card, self.context.run or "")
        try:
            seen = in_time(
                lambda: assess(directory, facts, self.scheduler, lambda _: ExtraObservations())
            )
        except Refusal as error:
            self.silence = str(error)
            return None
        if isinstance(seen.snapshot.jobs, Unknown):
            self.silence = seen.snapshot.jobs.why
        return seen

    def job(self, number: str) -> Job | None:
        """The job by the scheduler's records, or by its log of ended jobs, which remembers longer; None
        where neither has it.
        """
        found = None
        if not isinstance(self.scheduler, Unknown):
            try:
                found = self.scheduler.job(number)
            except SchedulerError as error:
                self.silence = cause(error)
        if found is None and self.assessment is not None:
            return known_ends(self.assessment.snapshot).get(number)
        return found


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


def _as_old_as(found: Diagnosis, files: list[Path]) -> Diagnosis:
    """The diagnosis of a log that ends on a whole step: it says that nothing is to be done only
    while it is written.
    """
    if not found.signs.runs_on:
        return found
    silent = time.time() - max(path.stat().st_mtime for path in files)
    if silent < SILENT_SECONDS:
        return if_it_goes_on(found)
    why = f"{found.explanation} No line came for {duration(silent)}: whether it still runs cannot be told from here."
    return replace(found, signs=replace(found.signs, runs_on=False), explanation=why)


def _every_launch(context: RunContext, job: str | None) -> list[Diagnosis]:
    """Each launch in the main log, of one attempt where that is named."""
    _, directory = context.seen()
    found = _judged([_main_log(directory)], every=True)
    if job is None:
        return found
    attempt = attempt_named(directory, job)
    found = [one for one in found if one.launch == attempt]
    if not found:
        raise Refusal(
            f"--job {job}: {directory.paths.main_log} tells of none of its launches", exit_code=2
        )
    return found


def _last_launch(sight: _Sight, job: str | None) -> Diagnosis:
    """The last launch of an attempt: of the one that is named, else of the run's newest."""
    _, directory = sight.context.seen()
    attempt = attempt_named(directory, job) if job is not None else _newest_attempt(directory)
    if attempt is None:  # a log without any attempt's folder
        [found] = _judged([_main_log(directory)], every=False)
        return found
    found = _by_logs(directory, attempt, is_named=job is not None)
    found = _as_it_stands(sight, _with_conclusion(sight, found))
    return _what_it_recovers_from(sight, found) or found


def _what_it_recovers_from(sight: _Sight, found: Diagnosis) -> Diagnosis | None:
    """The diagnosis of the end after which a launch, that has made no step yet, was started; None for any
    other: then it is that launch that is asked about.
    """
    seen = sight.assessment
    now = found.now
    directory = sight.context.directory
    if seen is None or now is None or found.fault is not FaultClass.RUNNING:
        return None
    if now.state is not NowState.STARTS:
        return None
    if found.number is not None and found.number > 1:
        before = _by_logs(directory, found.launch, is_named=False, number=found.number - 1)
    else:
        attempts = known(seen.snapshot.attempts, ())
        last = newest_attempt(one for one in attempts if one.job_id != found.launch)
        if last is None or not is_bad(last):
            return None
        before = _by_logs(directory, last.job_id, is_named=False)
    told = _as_it_stands(sight, _with_conclusion(sight, before))
    if told.fault is FaultClass.RUNNING:
        return None
    return told


def _newest_attempt(directory: RunDirectory) -> str | None:
    newest = newest_attempt(known(read_attempts(directory.paths), ()))
    if newest is None:
        return None
    return newest.job_id


def _by_logs(
    directory: RunDirectory, attempt: str, is_named: bool, number: int | None = None
) -> Diagnosis:
    """What the logs say of an attempt's last launch, or of that with a number: the main log and the
    workers' own, whoever asks.
    """
    from tr11ops.launch.watched import is_watched_attempt

    folder = directory.paths.attempt(attempt)
    record = read_launch(folder, number)
    workers = sorted({path for _, _, path in directory.worker_logs(attempt)})
    main = []
    if directory.paths.main_log.is_file():
        main = [directory.paths.main_log]
    if record is None:
        if not workers and is_watched_attempt(folder):  # all of its log is of the one job
            workers = main
        if workers:
            [found] = _judged(workers, every=False)
            return replace(found, launch=attempt)
        if not is_named or known(observed(AttemptVerdict.read, folder), None) is not None:
            return nothing_known(attempt)
        raise Refusal(
            f"--job {attempt}: neither a log nor a record of this attempt is there", exit_code=2
        )
    which = LaunchNumber(attempt, record.launch, record.start)
    logs = [*main, *workers]
    told = _read(logs, partial(diagnose_launch, logs, which))
    return told or nothing_known(attempt, record.launch)


def _main_log(directory: RunDirectory) -> Path:
    main_log: Path = directory.paths.main_log
    if not main_log.exists():
        raise Refusal(f"{main_log} does not exist yet: this run has not started")
    return main_log


def _as_it_stands(sight: _Sight, found: Diagnosis) -> Diagnosis:
    """The same with what the run does now, and with what that and its findings say of a launch whose logs
    and records tell of nothing.
    """
    from tr11ops.status.run_now import commands_now, led_by_findings, run_now, running_on

    seen = sight.assessment
    if seen is None:  # how the run stands is not known now: its end is, and that was asked for
        return found
    before = ""
    if found.number is not None and found.number > 1:
        before = _end_before(sight, found)
    found = running_on(seen, found, before) or led_by_findings(seen, found)
    if found.conclusion is not None:
        found = with_advice(found, advice(seen.snapshot, found, commands_now(seen)))
    return replace(found, now=run_now(seen, found))


def _end_before(sight: _Sight, found: Diagnosis) -> str:
    """How the launch before this one ended, in a sentence; "" where no record tells."""
    folder = sight.context.directory.paths.attempt(found.launch)
    before = read_launch(folder, (found.number or 1) - 1)
    if before is None or not before.summary:
        return ""
    return f"Launch {before.launch}, the one before, ended: {before.summary}."


def _with_conclusion(sight: _Sight, found: Diagnosis) -> Diagnosis:
    """The same with what the records of its attempt say of cause, node and blame, where there are
    any.
    """
    from tr11ops.diagnose.attribution.joined import joined, without_clean_end

    directory = sight.context.directory
    attempt = found.launch
    if not attempt:
        return found
    found = replace(found, label=read_attempt_label(directory.paths, attempt))
    conclusion = conclude(
        directory.paths.attempt(attempt),
        found.number,
        log_evidence=found.log_evidence,
        step_code=lambda: _step_code(sight, attempt),
        job_word=lambda: _job_word(sight, directory, attempt),
    )
    if conclusion is not None:
        return joined(found, conclusion)
    folder = directory.paths.attempt(attempt)
    if found.fault is FaultClass.CLEAN_EXIT and folder.is_dir() and not has_clean_end(folder):
        return without_clean_end(found)
    return found


def _with_evidence(sight: _Sight, found: Diagnosis) -> Diagnosis:
    """The same with when each node of its attempt was last heard of, and what the scheduler says of the
    job and of the nodes that are to blame.
    """
    if not found.launch:
        return found
    seen = sight.assessment
    accused = found.accused.nodes
    nodes = known(seen.snapshot.nodes, ()) if seen is not None else ()
    return replace(
        found,
        last_signs=_last_signs(sight.context.directory, found.launch),
        job=sight.job(found.launch),
        nodes=tuple(node for node in nodes if node.name in accused),
    )


def _last_signs(directory: RunDirectory, attempt: str) -> dict[str, float | None]:
    """When each node of an attempt was last heard of, by its ranks' heartbeats and its workers' logs;
    None for a node that left neither.
    """
    paths = directory.paths
    signs = [(node, path.stat().st_mtime) for node, _, path in directory.worker_logs(attempt)]
    beats = known(read_heartbeats(paths)[0], ())
    signs += [(beat.host, beat.time) for beat in beats if beat.job_id == attempt]
    nodes = read_details(paths.attempt(attempt) / "attempt.json").get("nodes") or ()
    found: dict[str, float | None] = dict.fromkeys(nodes)
    for node, when in signs:
        found[node] = max(found.get(node) or 0.0, when)
    return found


def _step_code(sight: _Sight, attempt: str) -> int | None:
    job = sight.job(attempt)
    if job is None:
        return None
    return job.derived_exit_code


def _job_word(sight: _Sight, directory: RunDirectory, attempt: str) -> JobWord:
    """What the scheduler, or an alert, says of an attempt's job: is it over, had it lost its batch
    script's node?
    """
    from tr11ops.goodput.history import lost_hosts

    job = sight.job(attempt)
    label = read_attempt_label(directory.paths, attempt)
    is_over = job is not None and not job.state.is_active
    nodes = read_details(directory.paths.attempt(attempt) / "attempt.json").get("nodes") or [""]
    if job is not None and job.state is JobState.NODE_FAIL:
        return JobWord(
            is_over, f"the scheduler ended job {job.job_id} for a node's failure ({job.state})"
        )
    if job is not None and job.nodes and nodes[0] and nodes[0] not in job.nodes:
        return JobWord(
            is_over,
            f"the scheduler has taken {nodes[0]}, its batch script's node, from job {job.job_id}",
        )
    if lost_hosts(read_journal(directory.journal)) & {attempt, label}:
        return JobWord(is_over, f"an alert told that job {label} had lost its batch script's node")
    return JobWord(is_over)


def _read(paths: list[Path], read: Callable[[Callable[[int], None]], T]) -> T:
    """What is read of logs, with a bar of the bytes. Raises Refusal where a file cannot be read."""
    size = sum(path.stat().st_size for path in paths if path.is_file())
    try:
        with byte_progress(size) as advance:
            return read(advance)
    except (OSError, ValueError) as error:
        raise Refusal(f"{error}: nothing may be concluded", exit_code=UNOBSERVED) from None


def _judged(paths: list[Path], every: bool) -> list[Diagnosis]:
    """Raises Refusal where a file cannot be read."""
    return _read(paths, partial(diagnose_files, paths, every))
