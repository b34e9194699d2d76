"""What a launch would resume from, whether the card fits it, and whether the trainer would refuse
what is queued. What is looked up, and the checks of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job
from tr11ops.observe.derived import finish_time, newest_marker
from tr11ops.observe.files import read_attempts, read_steps, read_steps_and_latest
from tr11ops.observe.lost_checkpoints import (
    LostCheckpoints,
    find_lost,
    in_own_folder,
    last_iteration,
)
from tr11ops.observe.training_files import read_events
from tr11ops.runcard.card import ForeignCard, OwnCard, RunCard
from tr11ops.runcard.check import Level, PreflightCheck, ok, refused, unknown, warning
from tr11ops.runcard.exit_duration import card_as_written
from tr11ops.rundir.paths import RunDirectory, Submission, parse_comment
from trainer.config.data_match import DataRecord, data_facts, decisive_differences, fact_differences
from trainer.contract.checkpoint_formats import CURSOR_FILE
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.checkpoints import refusal
from trainer.contract.errors import ScheduleMismatch
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.origin import BranchOrigin
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.resumable import ResumeSearch, foreign_step, search, size_faults
from trainer.contract.state_file import read_json
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.path import START, Position, Progress, path_of
from trainer.schedule.start import (
    NAMES,
    StartSource,
    agreed_settings,
    loaded_source,
    no_start,
    own_source,
    schedule_differences,
)

if TYPE_CHECKING:
    from tr11ops.launch.facts import LaunchFacts


class LaunchCheckpoints(Record):
    """The checkpoints that the training would start from, judged and tried as the trainer does it
    (see `trainer.contract.resumable`): the run's own, and where it has none, those that
    `checkpoint.load` names.

    `steps`: all that have a folder, ascending. `latest`: what that file names, None when it is
    missing. `refusal`: why the trainer would resume from none of them, and the fix; empty when it would. `foreign`:
    the step that it would take of those that another tool wrote, without manifests. `cursor`: of
    the one that was found; None where its layout keeps it among tensors, which nothing here reads.
    `origin`: what the run itself had begun with. `lost`: what the run had saved, where it has none any
    more; `iteration`: the last one that was logged. `in_own_folder`: a foreign trainer has some that are
    not held.
    """

    source: StartSource
    steps: tuple[int, ...]
    latest: Observed[int | None]
    found: ResumeSearch
    refusal: tuple[str, ...] = ()
    verified: str = "sizes"
    foreign: int | None = None
    cursor: Observed[Mapping[str, Any] | None] = None
    # whether the attempt that saved it had sequence parallelism; None: not recorded
    cut_sequences: bool | None = None
    origin: Observed[BranchOrigin | None] = None
    lost: Observed[LostCheckpoints | None] = None
    iteration: int | None = None
    in_own_folder: Observed[bool | None] = None

    @property
    def start(self) -> Position:
        """Where the training goes on, as far as is known without reading tensors; the beginning
        where it is fresh.
        """
        if self.source.is_fresh:
            return START
        if isinstance(self.cursor, Mapping):
            return Progress.from_cursor(self.cursor).position
        manifest = self.found.manifest
        if manifest is not None:
            return Position(manifest.step, manifest.consumed_samples, manifest.consumed_tokens)
        return START


def look_at_checkpoints(card: RunCard, read_digests: bool = False) -> LaunchCheckpoints:
    """Look where the trainer would look, in its order. Raises OSError as the file system does."""
    # no screen needs it

    found = _look_in(_own_source(card), read_digests)
    other = loaded_source(card) if isinstance(card, OwnCard) else None
    if other is not None and not found.steps and found.latest is None:
        found = _look_in(other, read_digests)
    return replace(
        found,
        origin=observed(BranchOrigin.read, card.paths),
        lost=observed(find_lost, card),
        iteration=last_iteration(card.paths),
        in_own_folder=observed(in_own_folder, card) if isinstance(card, ForeignCard) else None,
    )


def _own_source(card: RunCard) -> StartSource:
    if isinstance(card, OwnCard):
        return own_source(card)
    return StartSource(card.paths.checkpoints, True, card.run.expect_resume, card.resume_need)


def _look_in(source: StartSource, read_digests: bool) -> LaunchCheckpoints:
    folder = source.folder
    steps, latest = read_steps_and_latest(folder)
    foreign = foreign_step(folder)
    if foreign is not None:
        return LaunchCheckpoints(source, steps, latest, ResumeSearch(None, None), foreign=foreign)
    faults_of = partial(manifest_faults, read_digests=True) if read_digests else size_faults
    found = search(
        folder,
        steps,
        latest=latest if isinstance(latest, int) else None,
        need=source.need,
        faults_of=faults_of,
    )
    problem: tuple[str, ...] = ()
    if steps:
        problem = refusal(folder, steps, found)
    cursor: Observed[Mapping[str, Any] | None] = None
    if found.step is not None:
        place = folder / checkpoint_name(found.step)
        cursor = observed(read_json, place / CURSOR_FILE)
    if found.manifest is None:
        was_cut = None
    else:
        was_cut = _sequences_were_cut(folder, found.manifest.job_id)
    verified = "digests" if read_digests else "sizes"
    return LaunchCheckpoints(
        source,
        steps,
        latest=latest,
        found=found,
        refusal=problem,
        verified=verified,
        foreign=None,
        cursor=cursor,
        cut_sequences=was_cut,
    )


def _sequences_were_cut(folder: Path, job_id: str) -> bool | None:
    """By the resolved card of the attempt that saved into `folder`, which says it whether or not
    the card did.
    """
    paths = RunPaths.of_checkpoints(folder)
    if paths is None:
        value = None
    else:
        value = observed(read_json, paths.attempt(job_id) / "card.json")
    parallel = None
    if isinstance(value, dict):
        parallel = value.get("parallel")
    said = None
    if isinstance(parallel, dict):
        said = parallel.get("sequence_parallel")
    if isinstance(said, bool):
        return said
    return None


def read_finished(directory: RunDirectory) -> float | None:
    steps = known(read_steps(directory.paths), ())
    iteration = steps[-1].record.iteration if steps else None
    marker = newest_marker(known(read_attempts(directory.paths), ()))
    return finish_time(marker, iteration, known(read_events(directory.paths), ()))


def checkpoint_checks(
    card: RunCard, facts: LaunchFacts, on_scheduler: bool = True
) -> Iterator[PreflightCheck]:
    """Checks of the checkpoint that a start would load; a first start without any is fine unless
    the card says not.

    `on_scheduler`: it would take an allocation, which a training that is finished does not need.
    """
    found = facts.checkpoints
    if isinstance(found, Unknown):
        yield unknown("checkpoints", f"they could not be read ({found.why})")
        return
    yield from start_checks(card, found)
    yield from _finished_checks(
        card, found, known(facts.finished, None) is not None and on_scheduler
    )


def start_checks(card: RunCard, found: LaunchCheckpoints) -> Iterator[PreflightCheck]:
    """Whether the trainer would start from what there is, with this card."""
    lost = known(found.lost, None)
    if lost is not None:
        yield refused("checkpoints", lost.rule, lost.fix)
    elif found.refusal:
        step, fault = found.found.barrier or found.found.passed[0]
        if fault.key:
            yield refused(fault.key, f"{card.checkpoint_label(step)}: {fault.rule}", fault.fix, 2)
        else:
            rule, fix = found.refusal
            yield refused("checkpoints", rule, fix)
    elif found.foreign is not None:
        place = found.source.folder / checkpoint_name(found.foreign)
        text = f"starts from {place} of another tool: model, schedule and data are compared by the trainer alone"
        yield ok("checkpoints", text)
    elif found.found.manifest is not None and (
        found.found.manifest.is_rehearsed != card.trains_nothing
    ):
        place = found.source.folder / checkpoint_name(found.found.manifest.step)
        if card.trains_nothing:
            rule = f"{place} is a training's, and this card has a [rehearsal] section: it trains nothing"
            fix = "give the rehearsal a run.directory of its own, or take the section out"
        else:
            rule = f"{place} is a rehearsal's: it holds no weights, and no training goes on from it"
            fix = "give the training a run.directory of its own"
        yield refused("checkpoints", rule, fix)
    elif found.found.manifest is not None:
        yield from _resume_checks(card, found, found.found.manifest)
    else:
        yield from _empty_checks(card, found)


def _empty_checks(card: RunCard, found: LaunchCheckpoints) -> Iterator[PreflightCheck]:
    """No checkpoint is there: a first start, or a folder that is not what the card means."""
    folder = found.source.folder
    if not found.source.is_own:
        rule, fix = no_start(found.source)
        yield refused("checkpoint.load", rule, fix, 2)
    elif found.source.must:
        fix = "restore one, or correct run.directory or run.variant"
        yield refused("run.expect_resume", f"{folder} holds no checkpoint", fix)
    elif found.latest is not None:
        fix = "restore one, or remove that file to start again"
        yield refused("checkpoints", f"{folder / LATEST_FILE} is there, but no checkpoint", fix)
    elif found.in_own_folder is True:
        yield ok("checkpoints", "none is held: the trainer goes on from those in its own folder")
    elif isinstance(found.lost, Unknown):
        text = f"whether any were lost is not known ({found.lost.why}): the training starts from random weights"
        yield warning("checkpoints", text)
    elif found.iteration:
        text = f"none, though iteration {found.iteration} was trained: the training starts from random weights"
        yield warning("checkpoints", text)
    else:
        yield ok("checkpoints", "none: the training starts from random weights")


def _resume_checks(
    card: RunCard, found: LaunchCheckpoints, manifest: Manifest
) -> Iterator[PreflightCheck]:
    steps = found.steps
    latest = found.latest
    passed = found.found.passed
    source = found.source
    name = card.checkpoint_label(manifest.step)
    will = "will be resumed" if source.is_own else "is the start"
    if isinstance(latest, Unknown):
        yield warning("checkpoints", f"latest cannot be used ({latest.why}): {name} {will}")
    elif latest is None:
        text = f"{source.folder / LATEST_FILE} is missing: {name}, the newest resumable one, {will}"
        yield warning("checkpoints", text)
    elif latest not in steps:
        text = f"latest names {card.checkpoint_label(latest)}, which is not there: {name} {will}"
        yield warning("checkpoints", text)
    for step, fault in passed[:3]:
        yield warning("checkpoints", f"{card.checkpoint_label(step)} is skipped: {fault.text}")
    newer = [step for step in steps if step > manifest.step and step not in dict(passed)]
    if newer:
        yield warning(
            "checkpoints",
            f"{card.checkpoint_label(newer[-1])} is newer than {name}, which latest names",
        )
    saved_on = ""
    if isinstance(card, OwnCard):
        yield from _settings_checks(card, found, name)
        if manifest.topology.get("tensor", 1) > 1:
            yield from _sequence_checks(card, found, name)
        saved_on = _topology(card, manifest)
    verified = f"{found.verified} verified"
    if source.is_own:
        began = known(found.origin, None)
        lineage = ""
        if began is not None:
            lineage = f"; the run began with {began}"
        text = f"resumes at step {manifest.step + 1} from {name}{saved_on}; {verified}{lineage}"
    else:
        taken = "weights alone" if source.takes_weights else "weights and optimizer"
        if source.is_fresh:
            counters = ", all counters from zero"
        else:
            counters = f", at step {manifest.step + 1}"
        text = f"starts from {source.folder / name}{saved_on}: {taken}{counters}; {verified}"
    yield ok("checkpoints", text)


def key_of_end(card: RunCard) -> str:
    """The key of the card that says when its training is finished."""
    if not isinstance(card, OwnCard):
        return "trainer.steps"
    if card.batch.train_tokens is None:
        return "batch.train_samples"
    return "batch.train_tokens"


def to_train_on(card: RunCard, launch: str) -> str:
    """What to do where the training is finished and shall not be; `launch`: the command, as it is
    typed.
    """
    return f"to train on, raise {key_of_end(card)} in the card, then type `{launch}`"


def _finished_checks(
    card: RunCard, found: LaunchCheckpoints, is_finished: bool
) -> Iterator[PreflightCheck]:
    """Whether the card leaves anything to train from where the training goes on."""
    manifest = found.found.manifest
    if found.refusal or manifest is None:
        return
    name = card.checkpoint_label(manifest.step)
    if not isinstance(card, OwnCard):
        total = card.total_iterations
        if total is not None and manifest.step >= total:
            text = f"nothing is left to train: {name} is of the last step, {total}"
            yield refused("trainer.steps", text, "raise it to train on")
        return
    if path_of(card, found.start).segments:
        return
    end = f"{card.batch.train_samples:,} samples"
    if card.batch.train_tokens is not None:
        end = f"{end} or {card.batch.train_tokens:,} tokens"
    key = key_of_end(card)
    rule = f"nothing is left to train: {name} has consumed {manifest.consumed_samples:,} of {end}"
    if is_finished:
        yield refused(key, f"the training is finished, {rule}", "raise it to train on")
    else:
        yield warning(key, rule, "raise it to go on")


def _settings_checks(
    card: OwnCard, found: LaunchCheckpoints, name: str
) -> Iterator[PreflightCheck]:
    """Schedule, optimizer and data of the checkpoint against the card's, by the trainer's own
    rules.
    """
    cursor = found.cursor
    if isinstance(cursor, Unknown):
        yield unknown(
            "checkpoints",
            f"{name}: what it says of schedule and data could not be read ({cursor.why})",
        )
    elif cursor is None:
        text = f"{name} keeps schedule, optimizer settings and data among its tensors: the trainer alone compares them"
        yield warning("schedule.on_resume", text)
    else:
        yield from _schedule_checks(card, found.source, cursor, name)
        yield from _data_checks(card, found.source, DataRecord.of(cursor), name)


def _schedule_checks(
    card: OwnCard, source: StartSource, cursor: Mapping[str, Any], name: str
) -> Iterator[PreflightCheck]:
    try:
        agreed = agreed_settings(card, source, cursor, name)
    except ScheduleMismatch as error:
        for rule, fix in error.faults:
            yield refused("schedule.on_resume", rule, fix, 2)
        return
    if source.is_fresh:
        return
    differing = schedule_differences(cursor.get("schedule", {}), plan_of(card))
    if card.schedule.on_resume == "override" and agreed.remarks:
        told = "; ".join(remark.removeprefix(" > ") for remark in agreed.remarks)
        yield warning("schedule.on_resume", f"the card counts from {name} on: {told}")
    elif card.schedule.on_resume == "checkpoint" and differing:
        listed = ", ".join(NAMES[key] for key in differing)
        yield warning("schedule.on_resume", f"{name} counts, not what the card says of: {listed}")


def _data_checks(
    card: OwnCard, source: StartSource, record: DataRecord | None, name: str
) -> Iterator[PreflightCheck]:
    """What the card says otherwise of the data; what the files hold, the trainer compares."""
    if record is None or source.is_fresh:
        return
    saved = record.facts
    now = data_facts(card)
    decisive = decisive_differences(saved, now)
    others = [text for text in fact_differences(saved, now).values() if text not in decisive]
    if decisive and card.data.on_resume == "match" and source.is_own:
        fix = 'put it back, or set data.on_resume = "switch" to go on with the new data from there'
        yield refused(
            "data.on_resume", f"{name} was trained on other data: {'; '.join(decisive)}", fix
        )
    elif decisive:
        yield warning(
            "data.on_resume",
            f"the data is switched after {name}: {'; '.join((*decisive, *others))}",
        )
    elif others:
        yield warning(
            "data", f"{'; '.join(others)}: the trainer compares what it holds with {name}"
        )


def _sequence_checks(
    card: OwnCard, found: LaunchCheckpoints, name: str
) -> Iterator[PreflightCheck]:
    """A card that cuts sequences otherwise than before, maybe by default alone."""
    before = found.cut_sequences
    now = bool(card.parallel.sequence_parallel)
    if before is None or before == now or card.parallel.tensor == 1:
        return
    here = str(now).lower()
    there = str(before).lower()
    rule = f"is {here}, and {name} was trained with {there}: sums round otherwise from there"
    yield warning("parallel.sequence_parallel", rule, f"say {there} in the card to go on as before")


def saving_checks(card: RunCard) -> Iterator[PreflightCheck]:
    """What the card says of saving that a person may not have meant."""
    if not isinstance(card, OwnCard) or card.trains_nothing:
        return
    if not card.checkpoint.save_optimizer:
        rule = "false: what this run saves holds weights alone, and no attempt after the first can resume from it"
        yield warning(
            "checkpoint.save_optimizer", rule, "set it to true unless one attempt trains it all"
        )


def _topology(card: OwnCard, manifest: Manifest) -> str:
    own = {
        "tensor": card.parallel.tensor,
        "pipeline": card.parallel.pipeline,
        "data": card.data_parallel_degree,
    }
    saved = {key: manifest.topology.get(key, value) for key, value in own.items()}
    if saved == own:
        return ""
    return " (saved on " + " x ".join(f"{key} {degree}" for key, degree in saved.items()) + ")"


# Whether the trainer would refuse what is queued: each job trains with the card that it was
# submitted with.


def refused_starts(directory: RunDirectory, jobs: Iterable[Job]) -> Mapping[str, PreflightCheck]:
    """The jobs that the trainer would refuse, by `job_id`, with the first reason.

    A job whose card or whose checkpoints cannot be read is not among them: nothing is concluded
    from that.
    """
    by_number = {
        entry.job_id: entry for entry in directory.read_submissions() if entry.job_id is not None
    }
    by_tag: dict[str, PreflightCheck | None] = {}
    found: dict[str, PreflightCheck] = {}
    for job in jobs:
        tag = _tag_of(job, by_number)
        if tag and tag not in by_tag:
            by_tag[tag] = _refusal(directory, tag)
        refusal = by_tag.get(tag)
        if refusal is not None:
            found[job.job_id] = refusal
    return found


def _tag_of(job: Job, by_number: Mapping[str, Submission]) -> str:
    mark = parse_comment(job.comment)
    if mark is not None:
        return mark[0]
    entry = by_number.get(array_number(job))
    if entry is not None:
        return entry.tag
    return ""


def _refusal(directory: RunDirectory, tag: str) -> PreflightCheck | None:
    path = directory.submission(tag).card
    try:
        card = card_as_written(read_json(path) or {}, str(path))
        checks = start_checks(card, look_at_checkpoints(card))
        return next((check for check in checks if check.level is Level.REFUSED), None)
    except (OSError, ValueError):
        return None
