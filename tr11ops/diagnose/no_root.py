"""The diagnosis of a log in which no line says what went wrong: what its launcher, its warnings and its
last step leave. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.diagnose.answers import Signs
from tr11ops.diagnose.candidates import TOLD_TO_GO, Candidates
from tr11ops.diagnose.culprits import MILD, SHOWN
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.order import first_of
from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import (
    FaultClass,
    NextStep,
)

WHOLE = 0.65  # for a training that came to its last step and says nothing
SILENT = 3  # lines of the watchdog in a row that say that the job runs, and no step
TELLING = 0.3  # the least of a warning that may be all that is known
_OF_MACHINES = frozenset({FaultClass.GPU_HARDWARE, FaultClass.HOST_OOM, FaultClass.SLURM_NODE_FAIL})


def diagnosis_without_root(launch: LogLaunch, found: Candidates, places: LaunchPlaces) -> Diagnosis:
    """No line says what went wrong, or that anything did."""
    untold = [places.quoted(one, is_root=True) for one in found.causes[:1]]
    report = launch.first_report
    evidence = tuple(places.quoted(one) for one in [*found.warnings, *found.summaries][:SHOWN])
    if found.summaries or report is not None:
        if report is None or report.rank is None:
            who = ""
        else:
            who = f": rank {report.rank} on {report.host} was the first"
        why = f"The workers failed{who}, but no line says why. Look at that worker's own log."
        root = next(iter([*untold, *evidence]), None)
        if untold:
            why = "The workers failed; this line says so, and no line says why."
        elif report is not None:
            root = QuotedLine(
                launch.file,
                report.line_number,
                text=report.end_words,
                rank=report.rank,
                node=report.host,
                gpu=None,
                time=report.time,
            )
        elif found.summaries:
            told = [one for one in found.consequences if one.signature.id == TOLD_TO_GO]
            root = places.quoted(first_of([*told, found.summaries[0]]) or found.summaries[0])
        return _untold(root, why, evidence)
    return replace(_no_failure_told(launch, found, places, untold), evidence=evidence)


def _untold(line: QuotedLine | None, why: str, evidence: tuple[QuotedLine, ...] = ()) -> Diagnosis:
    """That it failed, and that no line says why."""
    return Diagnosis(
        FaultClass.UNKNOWN,
        NextStep.PAGE,
        confidence=MILD,
        root_cause=line,
        evidence=evidence,
        explanation=why,
    )


def _no_failure_told(
    launch: LogLaunch,
    found: Candidates,
    places: LaunchPlaces,
    untold: Sequence[QuotedLine],
) -> Diagnosis:
    """What is left where no launcher says that its workers failed."""
    done = ""
    if launch.progress is not None and launch.progress.iteration is not None:
        done = f" It ends after step {launch.progress.iteration}."
    hang = _hang(launch, found)
    if hang is not None:
        return Diagnosis(
            hang.signature.fault,
            NextStep.PAGE,
            confidence=hang.signature.confidence,
            root_cause=places.quoted(hang),
            explanation=hang.sentence + done,
        )
    if found.consequences:
        root = places.quoted(found.consequences[0])
        why = f"The processes were told to go, and no line says by whom.{done}"
        return Diagnosis(
            FaultClass.UNKNOWN,
            NextStep.RESUBMIT,
            confidence=0.5,
            root_cause=root,
            explanation=why,
        )
    warned = _last_warning(launch, found)
    if warned is not None and not untold:
        why = f"{warned.sentence} Nothing else says why it ended.{done}"
        return Diagnosis(
            warned.signature.fault,
            NextStep.PAGE,
            confidence=MILD,
            root_cause=places.quoted(warned),
            explanation=why,
            signs=Signs(
                warned.signature.role, warned.signature.blame, signature=warned.signature.id
            ),
        )
    whole = _by_last_step(launch, found, places)
    if whole is not None and whole.fault is FaultClass.CLEAN_EXIT:
        return whole
    if untold:
        why = f"This line says that something failed, and nothing that is known.{done}"
        return _untold(untold[0], why)
    return whole or Diagnosis(
        FaultClass.UNKNOWN,
        NextStep.NONE,
        confidence=0.6,
        root_cause=None,
        explanation=f"Nothing in this log says that anything went wrong.{done}",
    )


def _last_warning(launch: LogLaunch, found: Candidates) -> Sighting | None:
    """The first warning of a known kind that came after the last step of a launch that did not come
    to its last one.
    """
    last = launch.progress
    if last is not None and last.is_last:
        return None
    below = 0 if last is None else last.line_number
    return next(
        (
            one
            for one in found.warnings
            if one.signature.confidence >= TELLING
            and one.signature.fault in _OF_MACHINES
            and (one.file != launch.file or one.line_number > below)
            and not one.is_retried
        ),
        None,
    )


def _by_last_step(launch: LogLaunch, found: Candidates, places: LaunchPlaces) -> Diagnosis | None:
    """What the last step says of the end, where it names the training's last one too."""
    last = launch.progress
    if last is None or last.is_last is None:
        return None
    if found.short_ends and not last.is_last:
        line = places.quoted(found.short_ends[0])
        why = f"The loop of the training ended at step {last.iteration} of {last.total}, and no line says why."
        return _untold(line, why)
    if last.is_last:
        quoted = QuotedLine(launch.file, last.line_number, last.text.strip())
        why = f"It came to its last step, {last.iteration}, and nothing says that anything went wrong."
        return Diagnosis(
            FaultClass.CLEAN_EXIT,
            NextStep.NONE,
            confidence=WHOLE,
            root_cause=quoted,
            explanation=why,
        )
    return None


def _hang(launch: LogLaunch, found: Candidates) -> Sighting | None:
    """The first of several lines that say that the job runs, where no step came any more; what it
    hangs at, if told.
    """
    last = 0 if launch.progress is None else launch.progress.line_number
    below = [one for one in found.warnings if one.line_number > last]
    silent = [one for one in below if one.signature.id == "pulse-running"]
    places = [one for one in below if one.signature.id == "hang-place"]
    if places and silent:
        return places[-1]
    if len(silent) >= SILENT:
        return silent[0]
    return None
