"""The drill: a stop signal in each phase of a real training, and what had been saved when the
scheduler would kill.

One array job, one task for each phase, in a directory of its own. Each task trains as the card
says, is held in its phase by the trainer (`trainer.control.control_signals`) until the signal has
come, and is then left alone. What is judged is what any training would leave behind: the end marker
and the checkpoint. All times are those at which the drill saw them, by its own clock: no other
node's clock is compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, known, observed
from tr11ops.cluster.base import Job, Scheduler
from tr11ops.observe.files import read_heartbeats
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import DRILL_PHASES, DRILL_VARIABLE, EndMarker, Heartbeat
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.documents import document
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.record import JsonObject, Record

DRILL_SCHEMA = 1
NAMES = {
    "starting": "start-up",
    "training": "training",
    "evaluating": "evaluation",
    "saving": "saving",
    "data-wait": "data wait",
}


class PhaseResult(Record):
    """What became of one phase. Times in seconds since the signal was sent; None: it never came to
    that.

    `iteration`: where the trainer left. `checkpoint`: the newest whole one after it. `fault`: empty
    when all is well.
    """

    phase: str
    job_id: str = ""
    sent_in: str = ""
    iteration: int | None = None
    checkpoint: int | None = None
    saved_after: float | None = None
    left_after: float | None = None
    margin: float = 0.0
    fault: str = ""
    skipped: str = ""

    @property
    def is_fine(self) -> bool:
        return not self.fault


class Sight(Record):
    """What the drill saw of one task: when the signal was sent, in which phase, and what was left
    at the end.

    `left` and `saved`: when the end marker, and the newest checkpoint, were first seen.
    """

    job_id: str
    sent: float | None
    sent_in: str
    marker: EndMarker | None
    left: float | None
    checkpoint: int | None
    saved: float | None
    faults: tuple[str, ...] = ()
    verdict: str = ""  # of the batch controller, where the trainer left no exit record


def judge(phase: str, sight: Sight, margin: float, resumed_from: int | None) -> PhaseResult:
    """Whether a task did what it must before `margin` seconds after the signal were over. Pure.

    `resumed_from`: the newest checkpoint before the task. In the start-up there is nothing to save.
    """
    sent = sight.sent
    marker = sight.marker
    if sent is None or sight.saved is None:
        saved = None
    else:
        saved = max(0.0, sight.saved - sent)
    if sent is None or sight.left is None:
        left = None
    else:
        left = sight.left - sent
    starting = phase == "starting"
    fault = _fault(phase, sight, resumed_from) or _lateness(left if starting else saved, margin)
    return PhaseResult(
        phase,
        sight.job_id,
        sent_in=sight.sent_in,
        iteration=marker.iteration if marker else None,
        checkpoint=sight.checkpoint,
        saved_after=None if starting else saved,
        left_after=left,
        margin=margin,
        fault=fault,
    )


def _fault(phase: str, sight: Sight, resumed_from: int | None) -> str:
    """What is wrong with how a task ended; empty when nothing is, but for its time."""
    marker = sight.marker
    if sight.sent is None:
        ended = ""
        if sight.verdict:
            ended = f", it ended: {sight.verdict}"
        fault = f"the phase was never reached (last seen: {sight.sent_in or 'nothing'}{ended})"
    elif marker is None:
        fault = f"the trainer left no exit record{': ' if sight.verdict else ''}{sight.verdict}"
    elif marker.reason != "signal":
        fault = f"it left for another reason: {marker.reason} ({marker.message})"
    elif sight.faults:
        fault = f"global_step{sight.checkpoint} is not whole: {sight.faults[0]}"
    elif phase == "starting":
        fault = "" if sight.checkpoint == resumed_from else "a checkpoint appeared from nowhere"
    else:
        saved = sight.checkpoint is not None and sight.checkpoint == marker.iteration
        if saved:
            fault = ""
        else:
            fault = f"iteration {marker.iteration} was not saved (newest: {sight.checkpoint})"
    return fault


def _lateness(seconds: float | None, margin: float) -> str:
    if seconds is not None and seconds <= margin:
        return ""
    if seconds is None:
        shown = "never"
    else:
        shown = f"{seconds:.1f} s after the signal"
    return f"too late: {shown}, and the scheduler kills {margin:g} s after it"


def _heartbeats_of(phase: str) -> frozenset[str]:
    if phase == "starting":
        return frozenset({"starting", "loading"})
    return frozenset({phase})


# ----------------------------------------------------------------------------- the rehearsal
def phases_of(card: OwnCard) -> tuple[tuple[str, ...], dict[str, str]]:
    """Phases that a card has, in order, and why others are left out."""
    left_out = {}
    if card.evaluation.iterations == 0:
        left_out["evaluating"] = "the card never evaluates (evaluation.iterations = 0)"
    if card.data.workers == 0:
        left_out["data-wait"] = "the ranks read for themselves (data.workers = 0), within a step"
    return tuple(phase for phase in DRILL_PHASES if phase not in left_out), left_out


def overrides_for(directory: Path, phases: tuple[str, ...], time_limit: str) -> list[str]:
    """What the rehearsal changes in the card: where it lives, how long it lasts, how often it saves
    and evaluates.
    """
    return [
        f"run.directory={directory}",
        f"run.kill_switch={directory / 'kill-switch'}",
        f"slurm.time_limit={time_limit}",
        "checkpoint.interval=3",
        "evaluation.interval=2",
        f'slurm.environment.{DRILL_VARIABLE}="{",".join(phases)}"',
    ]


# ----------------------------------------------------------------------------- signalling and
# watching
@dataclass
class Drill:
    """Watches the tasks of one submission, and signals each once in its phase. `say` gets a line at
    every change.
    """

    directory: RunDirectory
    scheduler: Scheduler
    submission: str
    phases: tuple[str, ...]
    margin: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    poll_seconds: float = 0.1

    def run(self, deadline: float) -> tuple[PhaseResult, ...]:
        """Drill every phase; what is not reached before `deadline` (of the clock) is a fault."""
        results = []
        for task, phase in enumerate(self.phases, start=1):
            before = max(self._complete(), default=None)
            sight = self._drill(task, phase, deadline)
            result = judge(phase, sight, self.margin, before)
            results.append(result)
            self.say(f"{NAMES[phase]}: {'ok' if result.is_fine else result.fault}")
            if sight.sent is None:
                results += [PhaseResult(rest, fault="not tried") for rest in self.phases[task:]]
                break
        return tuple(results)

    def _drill(self, task: int, phase: str, deadline: float) -> Sight:
        job_id = ""
        sent = None
        sent_in = ""
        said = ""
        begun_at = max(self._complete(), default=0)
        # a checkpoint's step, and when it was first there
        seen = dict.fromkeys(self._complete(), self.clock())
        marker = None
        left = None
        while self.clock() < deadline:
            job = self._job(task)
            if job is not None and (job.state.is_active or job.state.is_final):
                job_id = job.raw_id
            if sent is None and job_id:
                beat = self._beat(job_id)
                sent_in = beat.phase if beat else sent_in
                # A training has something to save once it has done a step.
                is_due = beat is not None and (phase != "training" or beat.iteration > begun_at)
                if job is not None and is_due and sent_in in _heartbeats_of(phase):
                    sent = self._signal(job)
            for step in self._complete():
                seen.setdefault(step, self.clock())
            if marker is None and (marker := self._marker(job_id)) is not None:
                left = self.clock()
            text = self._words(phase, job_id, sent_in, sent)
            if text != said:
                self.say(text)
                said = text
            if job_id and (job is None or job.state.is_final):
                break
            self.pause(self.poll_seconds)
        newest = max(seen, default=None)
        if newest is None:
            saved = None
        else:
            saved = seen[newest]
        verdict = known(observed(AttemptVerdict.read, self.directory.paths.attempt(job_id)), None)
        word = ""
        if verdict is not None and job_id:
            word = verdict.message
        return Sight(
            job_id,
            sent,
            sent_in=sent_in,
            marker=marker,
            left=left,
            checkpoint=newest,
            saved=saved,
            faults=self._faults(newest),
            verdict=word,
        )

    def _words(self, phase: str, job_id: str, sent_in: str, sent: float | None) -> str:
        if not job_id:
            return f"{NAMES[phase]}: queued"
        where = f"job {job_id}, {sent_in or 'starting its workers'}"
        return f"{NAMES[phase]}: {'signal sent' if sent else 'waiting for the phase'} ({where})"

    def _signal(self, job: Job) -> float | None:
        sent = self.clock()
        try:
            self.scheduler.signal(job.job_id, "USR1")
        except SchedulerError as error:
            self.say(f"the signal could not be sent yet: {error}")
            return None
        return sent

    def _job(self, task: int) -> Job | None:
        found = observed_job(self.scheduler, f"{self.submission}_{task}")
        if found is not None and found.task_id == task:
            return found
        return None

    def _beat(self, job_id: str) -> Heartbeat | None:
        """Rank 0's heartbeat of this task."""
        beats, _ = read_heartbeats(self.directory.paths)
        if isinstance(beats, Unknown):
            return None
        return next((beat for beat in beats if beat.job_id == job_id and beat.rank == 0), None)

    def _marker(self, job_id: str) -> EndMarker | None:
        if not job_id:
            return None
        return known(observed(EndMarker.read, self.directory.paths.end_marker(job_id)), None)

    def _complete(self) -> list[int]:
        """Steps whose checkpoint has its manifest."""
        steps = known(observed(self.directory.checkpoint_steps), [])
        return [
            step
            for step in steps
            if (self.directory.paths.checkpoint(step) / MANIFEST_FILE).exists()
        ]

    def _faults(self, step: int | None) -> tuple[str, ...]:
        """What is wrong with a checkpoint's files, every byte of them read."""
        if step is None:
            return ()
        folder = self.directory.paths.checkpoint(step)
        manifest = observed(Manifest.read, folder)
        if manifest is None or isinstance(manifest, Unknown):
            return ("it has no readable manifest",)
        faults = observed(manifest_faults, folder, manifest, read_digests=True)
        if isinstance(faults, Unknown):
            return (faults.why,)
        return tuple(faults)


def observed_job(scheduler: Scheduler, job_id: str) -> Job | None:
    """A job, or None when the scheduler does not know it or does not answer: both are asked again."""
    try:
        return scheduler.job(job_id)
    except SchedulerError:
        return None


def proof(card: RunCard, results: tuple[PhaseResult, ...], extra: JsonObject) -> JsonObject:
    """What is kept of a drill: `state/drills/TIME.json`."""
    return {
        "schema": DRILL_SCHEMA,
        "run": card.run.name,
        "nodes": card.slurm.nodes,
        "workers_per_node": card.slurm.workers,
        "signal_seconds_before_limit": card.slurm.signal_seconds_before_limit,
        "fine": all(result.is_fine for result in results),
        "phases": [{**document(result), "name": NAMES[result.phase]} for result in results],
        **extra,
    }
