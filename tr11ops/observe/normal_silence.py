"""How long a silence is normal: learned from the run's own last attempts, by phase. Pure.

Before anything was learned, the bounds are those that suit the largest run.
"""

from __future__ import annotations

from tr11ops.base.observed import known
from tr11ops.observe.observations import TRAINING_PHASES, Phase
from tr11ops.observe.snapshot import Snapshot

# shorter silences say nothing: files on shared file systems are seen late
STALL_FLOOR_SECONDS = 120.0
UNLEARNED_SECONDS = 3600.0  # start-up, evaluation and saving of the largest run stay well below it
PHASE_FLOOR_SECONDS = 600.0  # a file system that is busy makes a save of seconds one of minutes
PHASE_FACTOR = 5.0  # times the longest of the last attempts


def phase_patience(snapshot: Snapshot, phase: str) -> float:
    """Seconds for which a phase that trains nothing may show no sign of life."""
    return _patience(_durations(snapshot, phase))


def longest(snapshot: Snapshot, phase: str) -> float | None:
    """Seconds that the longest seen phase of this name took; None where none was seen to end."""
    return max(_durations(snapshot, phase), default=None)


def first_step_patience(snapshot: Snapshot) -> float:
    """The same for the first step of a launch, which compiles, connects and allocates."""
    return _patience(first_steps(snapshot))


def training_patience(snapshot: Snapshot, pace: float, iterations_a_line: int = 1) -> float:
    """Seconds without a new iteration that are normal at a pace; without a new line where lines are
    rarer.
    """
    iterations = snapshot.run.watch.stall_iterations + iterations_a_line - 1
    return max(STALL_FLOOR_SECONDS, iterations * pace)


def first_steps(snapshot: Snapshot) -> list[float]:
    """How long the first steps of launches took whose first line of the log is still seen."""
    found = []
    steps = known(snapshot.steps, ())
    for launch in _launches(snapshot):
        begun = next((span for span in launch if span.phase in TRAINING_PHASES), None)
        if begun is None:
            continue
        later = (step for step in steps if step.time is not None and step.job_id == begun.job_id)
        first = next(
            (step for step in later if step.time is not None and step.time > begun.began), None
        )
        last_expected = begun.iteration + snapshot.run.log_interval
        if first is not None and first.time is not None and first.record.iteration <= last_expected:
            found.append(first.time - begun.began)
    return found


def launch_began(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """When the newest launch of an attempt began; None where its phases do not tell."""
    spans = [span for span in known(snapshot.training.phases, ()) if span.job_id in names]
    newest = max((span.launch for span in spans), default=None)
    return next((span.began for span in spans if span.launch == newest), None)


def launch_trained_since(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """When the newest launch of an attempt began to train; None where its phases do not tell."""
    began = launch_began(snapshot, names)
    spans = [
        span
        for span in known(snapshot.training.phases, ())
        if span.job_id in names and span.phase in TRAINING_PHASES
    ]
    return next((span.began for span in spans if began is not None and span.began >= began), None)


def trains_since(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """Since when an attempt has done nothing but train; None where that is not known, or it does
    something else.
    """
    began = None
    for span in known(snapshot.training.phases, ()):
        if span.job_id in names:
            if span.phase not in TRAINING_PHASES:
                began = None
            elif began is None:
                began = span.began
    return began


def _patience(durations: list[float]) -> float:
    if durations:
        return max(PHASE_FLOOR_SECONDS, PHASE_FACTOR * max(durations))
    return UNLEARNED_SECONDS


def _durations(snapshot: Snapshot, phase: str) -> list[float]:
    spans = [span for span in known(snapshot.training.phases, ()) if span.phase == phase]
    return [max(0.0, span.ended - span.began) for span in spans if span.ended is not None]


def _launches(snapshot: Snapshot) -> list[list[Phase]]:
    grouped: dict[tuple[str, int], list[Phase]] = {}
    for span in known(snapshot.training.phases, ()):
        grouped.setdefault((span.job_id, span.launch), []).append(span)
    return list(grouped.values())
