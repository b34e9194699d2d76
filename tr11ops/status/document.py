"""The status of a run as one typed, frozen document: `--json` prints it, and every screen is drawn from it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

from tr11ops.base.invocation import command_for
from tr11ops.base.units import finite, iso_time
from tr11ops.observe.forecast import NoCover
from tr11ops.status import parts
from tr11ops.status.parts import Instant
from tr11ops.watchdog.verdict import VerdictWord

SCHEMA = 1


class Status(NamedTuple):
    """One look at a run, with what follows from it, under the keys of docs/status-json.md.

    None means unknown, or that there is none; every unknown has a line in `unknown`.
    """

    time: Instant
    run: parts.RunName
    verdict: VerdictWord
    why: str
    exit_code: int
    schema: int = SCHEMA
    may_sleep: bool | None = None
    answer: str = ""
    sleep_needs: tuple[parts.Need, ...] = ()
    scheduler: str | None = None
    jobs: tuple[parts.ShownJob, ...] | None = None
    nodes: tuple[str, ...] | None = None
    node_use: parts.NodeUse | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    loss: float | None = None
    loss_is_finite: bool | None = None
    grad_norm: float | None = None
    last_step_time: Instant | None = None
    seconds_per_iteration: float | None = None
    tflops: float | None = None
    throughput: parts.ShownSpeed | None = None
    learning_rate: float | None = None
    global_batch_size: int | None = None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    remaining_seconds: float | None = None
    eta: Instant | None = None
    finish: parts.Finish | None = None
    queue_coverage_seconds: float | None = None
    queue_sure_seconds: float | None = None
    no_cover: tuple[NoCover, ...] = ()
    last_attempts: tuple[parts.ShownAttempt, ...] | None = None
    last_checkpoint: parts.ShownCheckpoint | None = None
    next_checkpoint: parts.NextSave | None = None
    backup: parts.LastCopy | None = None
    sync: parts.LastCopy | None = None
    copies_missing: int | None = None
    copies_damaged: int | None = None
    copying: tuple[parts.Copying, ...] | None = None
    restore_drill: parts.ShownDrill | None = None
    kill_switch: parts.StopFile | None = None
    pause: parts.StopFile | None = None
    holds: tuple[parts.ShownHold, ...] | None = None
    exclusions: tuple[parts.ShownExclusion, ...] | None = None
    findings: tuple[parts.ShownFinding, ...] = ()
    alerts: tuple[parts.ShownAlert, ...] | None = None
    periodic_jobs: tuple[parts.ShownPeriodicJob, ...] | None = None
    chains: tuple[parts.ShownChain, ...] | None = None
    filesystems: tuple[parts.ShownFilesystem, ...] | None = None
    card: parts.CardWishes = parts.CardWishes()
    loss_course: parts.LossCourse | None = None
    done_again: parts.DoneAgain | None = None
    relaunches: tuple[parts.ShownRelaunch, ...] = ()
    bad_nodes: tuple[str, ...] = ()
    leaving_nodes: tuple[parts.LeavingNode, ...] = ()
    checkpoint_folders: int | None = None
    watchdog_fault: str | None = None
    watchdog_acts: bool | None = None
    origin: parts.ShownOrigin | None = None
    unknown: tuple[str, ...] = ()

    def reason_unknown(self, name: str) -> str | None:
        """Why it could not be observed, by its name in the lines of `unknown`; None for what was."""
        return next((line.partition(": ")[2] for line in self.unknown if name in unknown_names(line)), None)

    def command(self, words: str) -> str:
        """A command of tr11 for this very run, as a person would type it."""
        return command_for(self.card.name, words)

    def document(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        first = {"schema": self.schema}
        return first | {key: value for key, value in _plain(self).items() if key != "schema"}


def unknown_names(line: str) -> list[str]:
    """What a line of `unknown` is about: "jobs, nodes: why" is about two observations."""
    return line.partition(": ")[0].split(", ")


def losses_of(course: parts.LossCourse | None) -> tuple[float, ...]:
    """The means as numbers to draw; what was none is NaN."""
    return () if course is None else tuple(math.nan if mean is None else mean for mean in course.means)


def _plain(value: Any) -> Any:
    match value:
        case Instant():
            return iso_time(value)
        case Enum():
            return value.value
        case float():
            return finite(value)
        case tuple():
            names: Iterable[str] | None = getattr(value, "_fields", None)
            if names is None:
                return [_plain(entry) for entry in value]
            return {name.removesuffix("_"): _plain(entry) for name, entry in zip(names, value, strict=True)}
    return value
