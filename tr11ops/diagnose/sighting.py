"""What a scan of a log finds: sightings of known texts, launchers' reports, steps; gathered by
launch. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tr11ops.base.units import capitalized
from tr11ops.diagnose.hosts import LogHead
from tr11ops.diagnose.lines import LineOrigin
from tr11ops.diagnose.signature import FaultSignature, Role
from tr11ops.diagnose.tracebacks import RaisedException
from tr11ops.dialects.reading import StepNumbers
from trainer.contract.record import Record
from trainer.contract.units import end_of_process


class TrainingStep(Record):
    """What a line of a log says of a step, and where it stands."""

    numbers: StepNumbers
    line_number: int
    text: str

    @property
    def iteration(self) -> int | None:
        return self.numbers.iteration


class ProgressMark(Record):
    """The last line of a step before some place: its line, its iteration, and the training's last
    one where it says.
    """

    line_number: int
    iteration: int | None
    text: str
    total: int | None = None

    @property
    def is_last(self) -> bool | None:
        """Whether it is the training's last step; None where that is not known."""
        if self.iteration is None or self.total is None:
            return None
        return self.iteration >= self.total


class Sighting(Record):
    """One line that a signature matches. `named`: the groups of its pattern. `progress`: the last
    step before it.

    `is_retried`: the line says that it will be tried again; `is_mild`: it calls itself a warning,
    or less. `since`: the last time above a line that has none itself.
    """

    file: str
    line_number: int
    text: str
    signature: FaultSignature
    origin: LineOrigin
    named: Mapping[str, str]
    progress: ProgressMark | None = None
    raised: RaisedException | None = None
    is_retried: bool = False
    is_mild: bool = False
    since: str | None = None

    @property
    def time(self) -> str | None:
        """When it was said, or after when, as the lines above it have it."""
        return self.origin.time or self.since

    @property
    def sentence(self) -> str:
        """What its signature means, as a sentence."""
        return f"{capitalized(self.signature.meaning)}."

    @property
    def may_prove(self) -> bool:
        """Whether it tells of a fault, and not of what came of one."""
        return self.signature.role in {Role.CAUSE, Role.WARNING, Role.STOP, Role.DEATH}


class WorkerFailure(Record):
    """One entry of torchrun's report on its workers."""

    line_number: int
    is_root: bool
    host: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    exit_code: int | None = None
    time: str | None = None
    said: str = ""

    @property
    def end_words(self) -> str:
        """How it left."""
        if self.exit_code is None:
            return "the worker left, and its exit code is not known"
        return f"the worker {end_of_process(self.exit_code)}"


STEPS_AFTER = 3  # a training that goes on for so many steps has overcome what was before
# and has outlived an order to end: until it is killed it makes some more
STEPS_AFTER_ORDER = 12
LINES_AFTER_ORDER = 20
LINES_AFTER = 40  # the same where steps have no numbers


@dataclass(slots=True)
class LogLaunch:
    """One launch as a log tells of it: from its first line to that of the next one.

    `sightings` holds the first few of each signature and writer; `counts` has them all.
    """

    file: str
    first_line: int = 1
    label: str = ""  # the attempt, by the scheduler's own number
    task: str = ""  # the attempt as people type it, ARRAY_TASK, where the log says that too
    number: int | None = None  # of the attempt's launches
    nodes: tuple[str, ...] = ()
    sightings: list[Sighting] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    reports: list[WorkerFailure] = field(default_factory=list)
    progress: ProgressMark | None = None
    steps: tuple[TrainingStep, ...] = ()
    last_line: int = 0
    last_time: str | None = None  # of the last line that has one, as those of origins
    last_timed_line: int = 0  # which that is
    world_size: int | None = None
    is_sure: bool = True  # whether a line says that it began here
    said_hosts: set[str] = field(default_factory=set)  # on which it says that it runs
    # of several files together: what each of them says
    hosts_of_file: dict[str, set[str]] = field(default_factory=dict)
    is_cut: bool = False  # whether its last line has no end
    # whether what stands below the last step stands between steps too
    is_usual_below: bool = False
    heads: tuple[LogHead, ...] = ()  # what it said first, of each file
    trainer: str | None = None  # the dialect of its steps, or of the trainer that the log names

    @property
    def runs_on(self) -> bool:
        """Whether nothing stands below the last step, and that is whole."""
        if self.progress is None or not self.steps:
            return False
        below = self.last_line - self.progress.line_number
        is_last = below <= (0 if self.is_cut else 1) or self.is_usual_below
        return is_last and self.steps[-1].numbers.is_whole

    @property
    def first_report(self) -> WorkerFailure | None:
        """The failure that torchrun's reports hold for the first, by their times."""
        roots = [
            report
            for report in self.reports
            if report.is_root and report.exit_code not in {-15, None}
        ]
        return min(roots, key=lambda report: report.time or "~", default=None)

    def has_overcome(self, one: Sighting) -> bool:
        """Whether the training went on after this line."""
        last = self.progress
        if one.signature.lasting or last is None or last.line_number <= one.line_number:
            return False
        before = one.progress
        is_counted = (
            last.iteration is not None and before is not None and before.iteration is not None
        )
        after = {
            step.iteration or step.text for step in self.steps if step.line_number > one.line_number
        }
        if is_counted and len(after) != 1:  # a bar is drawn once more when a training ends
            assert (
                last.iteration is not None and before is not None and before.iteration is not None
            )
            ahead = last.iteration - before.iteration
            if one.signature.ordered:
                is_long = last.line_number - one.line_number > LINES_AFTER_ORDER
                return ahead < 0 or (is_long and len(after) > STEPS_AFTER_ORDER)
            if ahead >= STEPS_AFTER or ahead < 0:
                return True
        if not self.steps:
            return not is_counted and last.line_number - one.line_number > LINES_AFTER
        return len(after) >= STEPS_AFTER
