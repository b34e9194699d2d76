"""What is on record of an attempt: what the batch controller wrote down of each launch and of the
end, and which software it ran with.

state/attempts/JOB/launches/N.json    a launch: nodes, start, end, cause, blamed nodes, evidence, progress
state/attempts/JOB/verdict.json       how the attempt ended, and whether the next task should go on
state/attempts/JOB/stacks/NODE.txt       every worker of a hanging job on the node, as the watchdog keeps them
state/attempts/JOB/stacks/verdict.txt    who stood out, for people
state/attempts/JOB/stacks/verdict.json   the same, for tr11
state/attempts/JOB/life/N.json           of another trainer: what the keeper of node N sees of its processes
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.observed import observed, replace_json
from tr11ops.base.units import counted, duration
from trainer.contract.attempt import EXIT_ERROR, EXIT_HELD, EndMarker, exit_code
from trainer.contract.documents import document, read_record, record_of
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.record import Count, Finite, Record

# ---------------------------------------------------------------- software, in attempt.json

PATCH_FILE = "code.diff"  # in the attempt's folder
DECISIVE = ("tr11", "torch", "deepspeed", "cuda", "nccl", "driver")
SHORT = 10  # digits of a commit that are shown


class CodeIdentity(Record):
    """The checkout that the trainer's code lay in. `commit` is "" where it is not known, and `why`
    says why.

    `branch` is "" where none is checked out. `changed`: the first of `changed_count` files that
    were not as in the commit; `digest`: SHA-256 of all that differs, as far as it was read;
    `patch`: the file beside the record that holds it, "" where nothing differs, without secrets;
    `is_cut`: it holds not all of it.
    """

    folder: str = ""
    commit: str = ""
    branch: str = ""
    changed: tuple[str, ...] = ()
    changed_count: int = 0
    digest: str = ""
    patch: str = ""
    is_cut: bool = False
    why: str = ""

    def __str__(self) -> str:
        """In one line; two codes have the same one where nothing is known to differ."""
        if not self.commit:
            return f"not known: {self.why}"
        text = " ".join(filter(None, (self.branch, self.commit[:SHORT])))
        if not self.changed_count:
            return text
        return f"{text} with {counted(self.changed_count, 'changed file')} ({self.digest[:8]})"


def code_of(record: Mapping[str, Any]) -> CodeIdentity | None:
    """What an attempt's record says of its code; None where an older tr11 wrote it, or where that
    is not readable.
    """
    value = record.get("code")
    if not isinstance(value, Mapping):
        return None
    try:
        return record_of(CodeIdentity, value)
    except ValueError:
        return None


def version_words(versions: Mapping[str, str]) -> str:
    """The versions that decide what a training computes, in one line; what is not there is left
    out.
    """
    return ", ".join(
        f"{name} {versions[name]}" for name in DECISIVE if versions.get(name, "none") != "none"
    )


def versions_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The versions of what an attempt ran with, by name, Python's too; what was not recorded is
    left out.
    """
    found = record.get("versions")
    if isinstance(found, Mapping):
        versions = {str(name): str(version) for name, version in found.items()}
    else:
        versions = {}
    python = record.get("python")
    if python is not None:
        return {**versions, "python": str(python)}
    return versions


# When an attempt ended: the one answer for status, alerts, accounts and reports.
# Someone's word of it comes first: the scheduler's, and that of the attempt's own batch script. Where
# no one has said it, the attempt is dated by its last sign of life, and whoever shows that says so.

_WRITTEN_TO_THE_LAST = ("workers", "failures", "nodes", "launches")  # folders of an attempt


class AttemptEnd(Record):
    """When it ended. `is_told`: someone has said so; else it is the last moment at which it is
    known to have lived.
    """

    time: float
    is_told: bool = True

    def ago(self, now: float) -> str:
        """How long ago, in words."""
        past = f"{duration(max(0.0, now - self.time))} ago"
        if self.is_told:
            return past
        return f"last word {past}"


def told_end(scheduler: float | None, verdict: float | None) -> float | None:
    """When an attempt gave its nodes back, by the scheduler and its batch script; None where
    neither says it.
    """
    told = [moment for moment in (scheduler, verdict) if moment]
    return max(told, default=None)


def last_sign_in(attempt: Path) -> float:
    """The newest time of what the attempt itself wrote in its folder; 0 where nothing tells.

    Its workers write to their logs to the last. The folder's own time says little: others leave
    things there too.
    """
    return max(_signs_in(attempt), default=0.0)


def _signs_in(attempt: Path) -> Iterator[float]:
    for name in _WRITTEN_TO_THE_LAST:
        for place, _, files in os.walk(attempt / name):
            for file in files:
                yield _changed(Path(place, file))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


VERDICT_FILE = "verdict.json"
ATTEMPTS_LOOKED_AT = 30
SUPERSEDED = "superseded"  # the end of an attempt that found another one of its run training


def launch_line(job_id: str, label: str, launch: int, nodes: str) -> str:
    """How a launch begins in the main log and in each worker's own, which later launches of the
    attempt write on.

    `label` is what people call the attempt; `nodes`: how many, and where it is said, which.
    """
    task = ""
    if label != job_id:
        task = f" ({label})"
    return f"tr11: attempt {job_id} launch {launch} on {nodes}{task}"


WAITED = "lost: "  # how a fault begins that is a rank which others waited for in vain, or lost


# how the line begins that says what follows a launch
STARTS_AGAIN, ENDS_TASK, STOPS = "starting again", "ending this task", "stopping"


class LaunchRecord(Record):
    """One launch. Times are seconds since the epoch, None where there is none (yet).

    `first_sign`: when the first failed process was seen. `decision`: what followed, in one line. `is_last`: whether
    no other launch follows by that; None where nothing is decided yet, and where an older tr11 wrote it
    (`ends_attempt` reads both).
    `iteration_*` and `checkpoint_*`: the highest logged iteration and the newest checkpoint before the launch and at
    its end.
    `reached`: the last iteration that this very launch logged, None where it logged none. `checked`: whether nodes told
    how their health checks ended; `failed_checks`, `passed_checks`: nodes by check, for each that failed anywhere;
    `left_out_checks`: those that were not run, because they fail everywhere; `failing_checks`: those,
    and what this launch has shown to fail everywhere; `failing_because`: by what each was shown
    to, in words. `older_checkpoint`: the step of an older checkpoint from which the training then was to go on, because
    this fault came at one step again. `restart`: whether a plain restart helps
    (plain, elsewhere, change, unknown, none), how sure that is, and why; "" where an older tr11 wrote it.
    `avoided`: those of the suspects that are not used any more while enough others are free.
    `save_minutes`: between two of its saves, where they were to come more often than the card says.
    """

    launch: int
    nodes: tuple[str, ...]
    start: Finite
    end: Finite | None = None
    first_sign: Finite | None = None
    exit_status: int | None = None
    cause: str = ""
    summary: str = ""
    confidence: Finite | None = None
    blamed: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    fault: str = ""
    srun_lines: tuple[str, ...] = ()
    decision: str = ""
    is_last: bool | None = None
    iteration_before: int | None = None
    checkpoint_before: int | None = None
    iteration_after: int | None = None
    checkpoint_after: int | None = None
    reached: int | None = None
    checked: bool = False
    failed_checks: dict[str, list[str]] = field(default_factory=dict)
    passed_checks: dict[str, list[str]] = field(default_factory=dict)
    left_out_checks: tuple[str, ...] = ()
    failing_checks: tuple[str, ...] = ()
    failing_because: dict[str, str] = field(default_factory=dict)
    older_checkpoint: int | None = None
    restart: str = ""
    restart_confidence: Finite | None = None
    restart_why: str = ""
    avoided: tuple[str, ...] = ()
    save_minutes: Finite | None = None

    @property
    def waited_for(self) -> tuple[str, ...]:
        """The one node that the others waited for in vain; none where several are named, or none."""
        if len(self.suspects) != 1 or len(self.nodes) < 2 or not self.fault.startswith(WAITED):
            return ()
        return self.suspects

    @property
    def ends_attempt(self) -> bool:
        """Whether it was decided that no other launch follows in this attempt."""
        if self.is_last is None:  # an older tr11 said it in the line alone
            return self.decision.startswith((ENDS_TASK, STOPS))
        return self.is_last

    @property
    def has_progress(self) -> bool:
        """Whether it added an iteration or a checkpoint."""
        return (self.iteration_after or 0) > (self.iteration_before or 0) or (
            self.checkpoint_after or 0
        ) > (self.checkpoint_before or 0)

    @staticmethod
    def path(attempt: Path, launch: int) -> Path:
        return attempt / "launches" / f"{launch}.json"

    @classmethod
    def newest(cls, attempt: Path) -> LaunchRecord | None:
        """The attempt's newest launch, None where none has begun. Raises OSError; ValueError where it
        is no record.
        """
        try:
            names = [
                path.stem for path in (attempt / "launches").iterdir() if path.suffix == ".json"
            ]
        except FileNotFoundError:
            return None
        numbers = [int(name) for name in names if name.isdecimal()]
        if not numbers:
            return None
        return read_record(cls, cls.path(attempt, max(numbers)), "a launch")

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> LaunchRecord:
        """The record that a file holds; what another tr11 wrote beside is left out. Raises
        ValueError.
        """
        return record_of(cls, value)

    def write(self, attempt: Path) -> None:
        """Raises OSError as the file system does."""
        write_json(self.path(attempt, self.launch), document(self))


class AttemptVerdict(Record):
    """How an attempt ended; written when its last launch has ended.

    `restart`: should the next task train on? `held`: the waiting jobs that were held because it
    should not; `hold_failed`: not all could be; `held_for`: the kill switch or pause for which
    alone they were held. `progress`: did any launch add an iteration or a checkpoint? `fault` names
    the fault free of what changes from one time to the next, or the nodes that are left out for it;
    `launch_fault` is what the last launch ended by, where `fault` names such nodes. `blamed` are the
    nodes found bad.
    `held_because`: why the rest was to be held, which is more than how the attempt ended; "" where
    an older tr11 wrote it. `evidence`: what the job printed last, of an attempt that could not
    start.
    """

    reason: str
    iteration: int | None
    checkpoint_step: int | None
    exit_status: int
    message: str
    restart: bool = True
    cause: str = ""
    fault: str = ""
    launch_fault: str = ""
    blamed: tuple[str, ...] = ()
    progress: bool = False
    launches: int = 0
    held: tuple[str, ...] = ()
    hold_failed: bool = False
    held_for: str = ""
    job_id: str = ""
    submission: str = ""
    time: Finite = 0.0
    held_because: str = ""
    evidence: tuple[str, ...] = ()

    def write(self, attempt: Path) -> None:
        """Raises OSError as the file system does."""
        write_json(attempt / VERDICT_FILE, document(self))

    @classmethod
    def read(cls, attempt: Path) -> AttemptVerdict | None:
        """The verdict in an attempt's folder, None when absent. Raises OSError or ValueError when
        it is not one.
        """
        return read_record(cls, attempt / VERDICT_FILE, "a verdict")


def why_held(because: str, ended: str) -> str:
    """Why an attempt let nothing follow, and how it ended: one sentence where one of them holds the
    other.
    """
    said = (because, ended)
    if because:
        both = f"{because}: {ended}"
    else:
        both = ended
    return next((one for one in said if all(other in one for other in said)), both)


def of_marker(marker: EndMarker) -> AttemptVerdict:
    """The verdict that is the trainer's own word: a failing launcher after a clean end changes
    nothing.
    """
    return AttemptVerdict(
        marker.reason,
        marker.iteration,
        checkpoint_step=marker.checkpoint_step,
        exit_status=exit_code(marker.reason),
        message=marker.message,
        restart=marker.restart,
    )


def of_failure(message: str, iteration: int | None, checkpoint: int | None) -> AttemptVerdict:
    """The verdict of an attempt whose last launch failed, after which the next task may try."""
    return AttemptVerdict(
        "error", iteration, checkpoint_step=checkpoint, exit_status=EXIT_ERROR, message=message
    )


def without_restart(verdict: AttemptVerdict) -> AttemptVerdict:
    """The same end, but nothing may start before a person has looked; the exit status says so."""
    return replace(verdict, restart=False, exit_status=EXIT_HELD)


# The stacks of a hanging job's workers, as the watchdog keeps them, and who stood out.

SCHEMA = 1
LOOKS_APART_SECONDS = 60.0  # between two looks that count as two: a rank may be on its way in one


class KeptStacks(Record, rename={"is_certain": "certain"}):
    """The last of the looks at the workers of an attempt, at `time` (seconds since the epoch, by the
    run's clock).

    `sentence` is for people. `ranks` and `nodes` hold the others up; none where no one stood out.
    `named`: since when each look has named these; None in what older versions wrote. `is_certain`: one
    look is enough to say so. A node that did not answer is among `nodes` without ranks. `waits`: what the
    ranks are in, each kind once. `mark`: of all their stacks together, and `unmoved`: since when it is
    the same; "" and None where not all could be read.
    """

    job_id: str
    time: Finite
    sentence: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    is_certain: bool = False
    waits: tuple[str, ...] = ()
    mark: str = ""
    unmoved: Finite | None = None
    named: Finite | None = None

    def after(self, before: KeptStacks | None) -> KeptStacks:
        """With what has not changed since the look before it."""
        kept = replace(self, named=self.time, unmoved=self.time if self.mark else None)
        if before is None:
            return kept
        if before.named is not None and (before.ranks, before.nodes) == (self.ranks, self.nodes):
            kept = replace(kept, named=before.named)
        if self.mark and before.unmoved is not None and before.mark == self.mark:
            kept = replace(kept, unmoved=before.unmoved)
        return kept

    def is_confirmed(self, since: float) -> bool:
        """Whether who is named has been the same in two looks at the hang that began at `since`, or
        one look is enough.
        """
        if self.is_certain:
            return True
        return self.named is not None and since <= self.named <= self.time - LOOKS_APART_SECONDS


def stacks_folder(paths: RunPaths, job_id: str) -> Path:
    """Where the stacks of an attempt are kept."""
    return paths.attempt(job_id) / "stacks"


def add_kept_stacks(paths: RunPaths, look: KeptStacks) -> None:
    """Keep a look in the place of the one before it. Raises OSError."""
    before = observed(read_kept_stacks, paths, look.job_id)
    kept = look.after(before if isinstance(before, KeptStacks) else None)
    value = {"schema": SCHEMA, **document(kept)}
    replace_json(stacks_folder(paths, kept.job_id) / "verdict.json", value, SCHEMA)


def read_kept_stacks(paths: RunPaths, job_id: str) -> KeptStacks | None:
    """What was kept last of an attempt; None where nothing was. Raises OSError and ValueError."""
    path = stacks_folder(paths, job_id) / "verdict.json"
    return read_record(KeptStacks, path, "a record of who held a hang up")


# ---------------------------------------------------------------- whether another trainer's processes live

StageKind = Literal["step", "save", "load", "evaluation"]


class LearnedStage(Record):
    """How long the stages of one kind took in this run: the longest, in seconds, and how many."""

    longest: Finite
    count: Count


class TrainerLife(Record):
    """What the keeper of one node sees of a trainer that knows nothing of tr11. Moments are seconds
    since the epoch, by the clock of its node.

    `time`: of the look. `watched`: since when it has looked without a break, which a pause of the
    job makes. `sign`: the last sign of life: a line, a beat, bytes of a checkpoint. `moved`: when
    one of its processes last used its processor, read or wrote; None where none was found.
    `stopped`, `on_disk`: how many are stopped by a signal, or wait for a file system. `kind`: the
    stage that it is in, which ends with a step or a mark; `learned`: how long those of each kind
    took in this run.
    """

    job_id: str
    launch: Count
    node_rank: Count
    nodes: Count
    time: Finite
    watched: Finite
    sign: Finite
    kind: StageKind
    moved: Finite | None = None
    stopped: Count = 0
    on_disk: Count = 0
    learned: Mapping[str, LearnedStage] = {}


def life_file(paths: RunPaths, job_id: str, node_rank: int) -> Path:
    """Where the keeper of a node tells of its trainer's processes."""
    return paths.attempt(job_id) / "life" / f"{node_rank}.json"


def read_lives(paths: RunPaths, job_id: str) -> tuple[TrainerLife, ...]:
    """Of all nodes of an attempt's newest launch, in order; none for tr11's own trainer. Raises
    OSError, ValueError.
    """
    found = []
    for path in (paths.attempt(job_id) / "life").glob("*.json"):
        life = read_record(TrainerLife, path, "what a keeper sees of its trainer")
        if life is not None:
            found.append(life)
    newest = max((life.launch for life in found), default=0)
    return tuple(
        sorted((life for life in found if life.launch == newest), key=lambda life: life.node_rank)
    )


def attempts_before(
    paths: RunPaths, job_id: str | None
) -> Iterator[tuple[Path, AttemptVerdict | None]]:
    """Folders of the attempts other than `job_id` (None: of all), newest first; the verdict is None
    where there is none to be read.
    """
    try:
        entries = [
            entry for entry in os.scandir(paths.attempts) if entry.is_dir() and entry.name != job_id
        ]
    except FileNotFoundError:
        return
    times = [(_last_written(Path(entry.path)), Path(entry.path)) for entry in entries]
    for _, folder in sorted(times, reverse=True)[:ATTEMPTS_LOOKED_AT]:
        try:
            yield folder, AttemptVerdict.read(folder)
        except (OSError, ValueError):
            yield folder, None


def attempts_without_verdict(paths: RunPaths, job_id: str) -> Iterator[Path]:
    """Of these, the ones that have not said how they ended: they were killed, wait to be started
    again, or run. One that began before them may have ended after they began.
    """
    return (folder for folder, verdict in attempts_before(paths, job_id) if verdict is None)


def _last_written(folder: Path) -> float:
    for path in (folder / VERDICT_FILE, folder / "attempt.json", folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
