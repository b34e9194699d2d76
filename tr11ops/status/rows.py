"""The rows about the training itself: progress, jobs, attempts, checkpoints, who said stop. Pure.

Made of the status document alone, for the terminal of the cluster and for the laptop that sees what
was published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import tzinfo

from msgspec.structs import replace

from tr11ops.base.units import (
    DAY,
    NEAR,
    bar,
    counted,
    duration,
    quantity,
    rough_duration,
    size,
    sparkline,
    timestamp,
)
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Severity, lead, once_fixed
from tr11ops.observe.snapshot import Attempt, KillSwitch
from tr11ops.rundir.attempts import version_words
from tr11ops.status.document import Finish, ShownAttempt, ShownFinding, Status, losses_of, tasks_of
from tr11ops.watchdog.verdict import MOVING, VerdictWord
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.record import Record

LABEL_WIDTH = 10
JOBS_SHOWN = 6
ATTEMPTS_SHOWN = 3
HOSTLIST_SHOWN = 60
SPARK_WIDTH = 40
NO_TOTAL = "unknown, the card does not say the last step"
NO_SPEED = "unknown until new steps show the speed on these nodes"
UNDER_WAY = frozenset({VerdictWord.STARTING, VerdictWord.HEALTHY})
DAY_SECONDS = 86400.0
FAR_SECONDS = 2 * DAY_SECONDS  # an end farther away than this is told by its day

SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "critical": "bold red"}

Row = tuple[str, str, str]  # label, text, style


class Screen(Record):
    """How the screen is drawn: width and height in characters, whether Unicode may be used, the
    zone of its times.

    Without a height it may be as long as it likes; with one, what is wrong comes before what is
    not.
    """

    width: int
    unicode: bool
    zone: tzinfo | None = None
    height: int | None = None

    @property
    def content_width(self) -> int:
        return max(20, self.width - LABEL_WIDTH - 1)


class ShownIncident(Record):
    """A finding that follows from no other, and those that follow from it."""

    cause: ShownFinding
    following: tuple[ShownFinding, ...] = ()

    @property
    def findings(self) -> tuple[ShownFinding, ...]:
        return self.cause, *self.following

    @property
    def names(self) -> frozenset[str | None]:
        """The fingerprints of its findings."""
        return frozenset(one.fingerprint for one in self.findings)

    @property
    def severity(self) -> str:
        """That of the worst of its findings."""
        return max((one.severity for one in self.findings), key=list(SEVERITY_STYLES).index)

    @property
    def commands_after(self) -> tuple[str, ...]:
        """What is still to be typed when the cause's `fix` has helped."""
        return once_fixed(self.cause.fix, *(one.then for one in self.findings))


def incidents_of(findings: tuple[ShownFinding, ...]) -> tuple[ShownIncident, ...]:
    """The findings by their causes, in the order in which they are told everywhere (`detector.lead`)."""
    names = {finding.fingerprint for finding in findings if finding.follows_from is None}
    following: dict[str, list[ShownFinding]] = {}
    causes = []
    for finding in findings:
        if finding.follows_from is None or finding.follows_from not in names:
            causes.append(finding)
        else:
            following.setdefault(finding.follows_from, []).append(finding)
    found = [
        ShownIncident(cause, tuple(following.pop(cause.fingerprint or "", ()))) for cause in causes
    ]
    return tuple(
        sorted(found, key=lambda one: lead(one.cause.detector, Severity[one.severity.upper()]))
    )


def referring(finding: ShownFinding, said: str) -> ShownFinding:
    """The finding; one whose title has been said above refers to that."""
    head, colon, _ = finding.title.partition(": ")
    if colon and finding.title.lower() in said.lower():
        return replace(finding, title=f"{head}: see above")
    return finding


def incident_rows(incident: ShownIncident, with_evidence: bool = True) -> list[Row]:
    """What is wrong, the evidence, what to type, what follows from it, and the page that explains
    it.
    """
    finding, severity = incident.cause, incident.severity
    rows: list[Row] = [(severity.upper(), finding.title, SEVERITY_STYLES[severity])]
    if with_evidence:
        rows += [("", line, "") for line in finding.evidence]
    if finding.fix:
        rows.append(("  type", finding.fix, "bold"))
    rows += [
        ("  then" if index == 0 else "", line, "bold")
        for index, line in enumerate(incident.commands_after)
    ]
    rows += [
        ("", f"consequence: {one.title}", SEVERITY_STYLES[one.severity])
        for one in incident.following
    ]
    if finding.runbook:
        rows.append(("  read", f"tr11 runbook {finding.runbook.removesuffix('.md')}", ""))
    return rows


def unknown_rows(status: Status) -> Iterator[Row]:
    """What could not be observed, after an empty line."""
    for index, line in enumerate(status.unknown):
        if index == 0:
            yield "", "", ""
        yield "unknown" if index == 0 else "", line, "magenta"


# ----------------------------------------------------------------------------- the training
def training(status: Status, screen: Screen) -> Iterator[Row]:
    """How far it is, when it will be done, and its last steps."""
    yield from _progress(status, screen)
    if status.finish is not None and status.finish.earliest_seconds > 0:
        yield "ETA", _eta(status.finish, status.verdict, screen), ""
    elif status.iteration is not None and status.total_iterations is None:
        yield "ETA", NO_TOTAL, "magenta"
    elif status.finish is None and status.total_iterations and status.verdict in UNDER_WAY:
        yield "ETA", NO_SPEED, ""
    if status.loss is not None or status.loss_is_finite is not None:
        value = "nan or inf"
        if status.loss is not None:
            value = f"{status.loss:<8.4f}"
        course = losses_of(status.loss_course)
        spark = sparkline(course, min(SPARK_WIDTH, screen.content_width - 30), screen.unicode)
        last = ""
        if status.loss_course is not None:
            last = f" {spark} last {counted(status.loss_course.steps, 'step')}"
        yield "loss", f"{value}{last}".rstrip(), "" if status.loss is not None else "bold red"
    yield from _speed(status)
    consumed = ", ".join(_consumed(status))
    if consumed:
        yield "consumed", consumed, ""
    if status.origin is not None:
        yield "began with", status.origin.lineage, ""
    if status.done_again is not None:
        again = counted(status.done_again.iterations, "iteration")
        yield "", f"resumes from {_name_of(status, status.done_again.from_step)}: {again} again", ""


def _consumed(status: Status) -> Iterator[str]:
    """As far as the trainer counts it."""
    if status.consumed_samples is not None:
        yield f"{quantity(status.consumed_samples)} samples"
    if status.consumed_tokens:
        yield f"{quantity(status.consumed_tokens)} tokens"
    if status.global_batch_size is not None:
        yield f"batch {status.global_batch_size}"


def _progress(status: Status, screen: Screen) -> Iterator[Row]:
    done, total = status.iteration, status.total_iterations
    if done is not None and total:
        share = min(1.0, done / total)
        counts = f" {done:,} / {total:,}  {math.floor(share * 1000) / 10:.1f} %"
        yield (
            "progress",
            bar(share, max(10, screen.content_width - len(counts)), screen.unicode) + counts,
            "green",
        )
    elif done is not None:
        yield "progress", f"iteration {done:,}", "green"
    elif status.reason_unknown("steps") is not None:
        yield "progress", "unknown", "magenta"
    else:
        yield "progress", "no iteration yet" + (f", of {total:,}" if total else ""), ""


def _speed(status: Status) -> Iterator[Row]:
    rate = status.throughput
    parts = []
    if status.seconds_per_iteration is not None:
        parts = [f"{status.seconds_per_iteration:.2f} s/iteration"]
    style = ""
    if rate is not None:
        against = ""
        if rate.percent is not None and rate.best is not None:
            against = f", {rate.percent:.0f} % of its best ({_digits(rate.best)})"
            style = "yellow" if rate.is_slow else ""
        parts.append(f"{_digits(rate.current)} {rate.unit}{against}")
    if parts:
        yield "speed", "; ".join(parts), style


def _digits(value: float) -> str:
    """Three or more digits of a figure whose unit follows."""
    return f"{value:.{1 if value >= 10 else 3}f}"


def _eta(end: Finish, verdict: VerdictWord, screen: Screen) -> str:
    """The range of the end, and which speed it is of where that is not the usual one."""
    if end.usual_seconds is None:
        return _end(end, verdict, screen)
    usual = duration(end.usual_seconds)
    return f"at this speed {_end(end, verdict, screen)}; {usual} at its usual speed"


def _end(end: Finish, verdict: VerdictWord, screen: Screen) -> str:
    """The range of the end. What is not moving has no date: someone must start it first."""
    moving = verdict in MOVING and end.earliest is not None
    if (
        end.likely_seconds is None
        or end.window_seconds is None
        or end.useful_share is None
        or end.likely is None
    ):
        when = ""
        if moving and end.earliest is not None:
            when = f"{timestamp(end.earliest, screen.zone)}: "
        return f"{when}{duration(end.earliest_seconds)} of training, without waits and restarts"
    basis = f"last {rough_duration(end.window_seconds)}: {100 * end.useful_share:.0f} % useful"
    if not moving or end.earliest is None:
        waits = ""
        if end.likely_seconds > 1.01 * end.earliest_seconds:
            waits = f", {duration(end.likely_seconds)} with waits"
        return f"{duration(end.earliest_seconds)} of training{waits} ({basis})"
    far = end.earliest_seconds > FAR_SECONDS
    first, last = (
        timestamp(moment, screen.zone, DAY if far else NEAR)
        for moment in (end.earliest, end.likely)
    )
    when = f"{first} to {last}"
    if first == last:
        when = first
    days = ""
    if far:
        days = (
            f", in {_range(end.earliest_seconds / DAY_SECONDS, end.likely_seconds / DAY_SECONDS)} d"
        )
    return f"{when}{days} ({basis})"


def _range(first: float, last: float) -> str:
    low, high = f"{first:.0f}", f"{last:.0f}"
    if low == high:
        return low
    return f"{low} to {high}"


# ----------------------------------------------------------------------------- the cluster
def jobs(status: Status) -> Iterator[Row]:
    """What runs and is queued, and for how much of what is left that is enough."""
    if status.jobs is None:
        yield "jobs", f"unknown: {status.reason_unknown('jobs')}", "magenta"
        return
    active = [job for job in status.jobs if job.state.is_active]
    shown = [*active, *(job for job in status.jobs if job.state is JobState.PENDING)]
    if not shown:
        yield "jobs", "none running, none queued", ""
        return
    for index, job in enumerate(shown[:JOBS_SHOWN]):
        yield "jobs" if index == 0 else "", _job_line(job, status.time), ""
    if len(shown) > JOBS_SHOWN:
        yield "", f"and {len(shown) - JOBS_SHOWN} more", ""
    if status.verdict is VerdictWord.FINISHED:
        return
    if _is_only_watched(status):
        return  # what comes after it is its owner's to say
    if status.kill_switch is not None and not status.kill_switch.is_set:
        yield from _queue(status)


def _is_only_watched(status: Status) -> bool:
    return status.trainer is not None and status.trainer.is_watched


def _saves_unseen(status: Status) -> bool:
    """Whether its checkpoints are not looked at, so that none is no news."""
    return status.trainer is not None and status.trainer.holds_nothing


def _queue(status: Status) -> Iterator[Row]:
    """For how much of what is left the tasks that go on by themselves are enough; what else there
    is, and why not.
    """
    covered, sure = status.queue_coverage_seconds, status.queue_sure_seconds
    sure = covered if sure is None else sure  # a document of before it was told apart
    label = "queue"
    if sure is not None:
        yield label, *_cover(status, sure)
        label = ""
    for lack in status.no_cover[:JOBS_SHOWN]:
        held = ""
        if lack.seconds is not None:
            held = f", {duration(lack.seconds)}"
        yield label, f"no cover{held}: {lack}", "yellow"
        label = ""


def _cover(status: Status, sure: float) -> tuple[str, str]:
    remaining = None if status.finish is None else status.finish.earliest_seconds
    against = ""
    if remaining is not None:
        against = f" of the {duration(remaining)} left"
    if sure == 0 and status.no_cover:
        return f"covers nothing{against}", "yellow"
    enough = duration(sure)
    if remaining is not None and sure >= remaining:
        enough = "all"
    return f"covers {enough}{against}", ""


def _job_line(job: Job, now: float) -> str:
    who = job.job_id
    if job.user:
        who += f" of {job.user}"
    parts = [who, job.state.value, counted(len(job.nodes) or job.node_count, "node")]
    if job.state is JobState.PENDING:
        if tasks_of(job) > 1:
            parts.append(f"{tasks_of(job)} tasks")
        if job.reason:
            parts.append(f"({job.reason})")
        if job.start_time is not None and job.start_time > now:
            parts.append(f"expected in {duration(job.start_time - now)}")
    elif job.start_time is not None:
        limit = ""
        if job.time_limit_seconds is not None:
            limit = f" of {duration(job.time_limit_seconds)}"
        parts.append(f"{duration(now - job.start_time)}{limit}")
    if job.nodes:
        nodes = compress(job.nodes)
        if len(nodes) > HOSTLIST_SHOWN:
            nodes = nodes[:HOSTLIST_SHOWN].rsplit(",", 1)[0] + ",..."
        parts.append(f"on {nodes}")
    return "  ".join(parts)


def relaunch(status: Status) -> Iterator[Row]:
    """Where the running attempt has started its workers again, and why the launch before ended."""
    for end in status.relaunches:
        words = f"{end.job_id}  launch {end.launch + 1}; launch {end.launch} ended {duration(status.age(end.time))} ago"
        why = "; ".join(filter(None, (end.why, end.decision)))
        yield "relaunch", f"{words}: {why}" if why else words, "yellow"


def attempts(status: Status) -> Iterator[Row]:
    """How the last attempt ended; the ones before only where they ended badly. And what the newest
    has otherwise.
    """
    if status.last_attempts is None:
        yield "attempts", "unknown", "magenta"
        return
    ended = [attempt for attempt in status.last_attempts if attempt.how is not None]
    if not ended:  # one that died without a marker is seen by its job alone
        seen = status.jobs is not None or not status.last_attempts
        yield "attempts", "none has ended yet" if seen else "none is known to have ended", ""
    # of those that ended well the newest is enough
    shown = [
        _without_cause(attempt, status)
        for index, attempt in enumerate(ended[:ATTEMPTS_SHOWN])
        if index == 0 or attempt.is_bad
    ]
    for index, attempt in enumerate(shown):
        yield (
            "attempts" if index == 0 else "",
            _attempt_line(attempt, status.time, _saves_unseen(status)),
            "red" if attempt.is_bad else "",
        )
    if not status.last_attempts:
        return
    newest = max((shown.attempt for shown in status.last_attempts), key=_start)
    if newest.code is not None:
        yield (
            "code",
            "; ".join(filter(None, (str(newest.code), version_words(newest.versions)))),
            "",
        )
    if newest.changes:
        more = ""
        if len(newest.changes) > 1:
            more = f" (and {len(newest.changes) - 1} more)"
        yield "changed", f"{newest.label or newest.job_id} {newest.changes[0]}{more}", ""


def _without_cause(attempt: ShownAttempt, status: Status) -> ShownAttempt:
    """The same where a finding tells why it ended, which is said once."""
    told = [one.subject for one in status.findings if one.detector == "unfinished-end"]
    if attempt.how is None or attempt.label not in told:
        return attempt
    return replace(attempt, how=attempt.how.partition(": ")[0])


def _start(attempt: Attempt) -> float:
    return attempt.start or 0.0


def _attempt_line(attempt: ShownAttempt, now: float, saves_unseen: bool) -> str:
    ago, end = attempt.attempt.ended.ago(now), attempt.end
    if end is None:
        return f"{attempt.label}  {attempt.how}, {ago}"
    if not end.has_trained:  # what is saved is of the attempts before
        return f"{attempt.label}  {attempt.how} {end.place}, {ago}"
    if end.checkpoint_step is None and saves_unseen:
        return f"{attempt.label}  {attempt.how} {end.place}, {ago}"
    if end.checkpoint_step is None:
        saved = "not saved"
    elif end.checkpoint_step == end.iteration:
        saved = "saved"
    else:
        saved = f"saved {end.checkpoint_step}"
    return f"{attempt.label}  {attempt.how} {end.place} ({saved}), {ago}"


# ----------------------------------------------------------------------------- what was kept, and
# who said stop
_REASONS = {"minutes": "next full step", "end of the task": "end of this task"}


def checkpoint(status: Status) -> Iterator[Row]:
    """The newest whole checkpoint."""
    newest, folders = status.last_checkpoint, status.checkpoint_folders
    if newest is not None:
        words = _name_of(status, newest.step)
        if newest.age_seconds is not None:
            words += f", {duration(newest.age_seconds)} ago"
        if newest.bytes is not None:
            words += f", {size(newest.bytes)}"
        if newest.verified:
            words += f", {newest.verified} verified"
        if newest.count is not None:
            words += f"; {newest.count} kept"
        yield "checkpoint", words, ""
    elif _saves_unseen(status):
        yield "checkpoint", "not known: `tr11 watch --hold --folder DIR` holds them", ""
    elif folders is None:
        yield "checkpoint", "unknown", "magenta"
    else:
        found = "none yet"
        if folders:
            found = f"none that is whole among {folders}"
        yield "checkpoint", found, "red" if folders else ""


def set_aside(status: Status) -> Iterator[Row]:
    """Broken checkpoints that were moved out of a foreign trainer's way."""
    if status.trainer is None:
        return
    label = "set aside"
    for moved in status.trainer.set_aside:
        why = f": {moved.why}" if moved.why else ""
        yield label, f"{moved.name}{why}, {duration(status.time - moved.time)} ago", "yellow"
        label = ""


def _name_of(status: Status, step: int) -> str:
    """A checkpoint: of another trainer by its own name, else as the run's folder."""
    if status.trainer is None:
        return checkpoint_name(step)
    return status.trainer.name_of(step)


def next_save(status: Status) -> Iterator[Row]:
    """When the next checkpoint is due."""
    following = status.next_checkpoint
    if following is not None:
        if following.step is not None:
            name = _name_of(status, following.step)
        else:
            name = f"at the {_REASONS[following.why]}"
        if following.seconds is None:
            due = f"{counted(following.iterations or 0, 'iteration')} away"
        elif following.seconds < 1:
            due = "due now"
        else:
            due = f"due in {duration(following.seconds)}"
        yield "next save", f"{name}, {due}", ""


def stops(status: Status, screen: Screen) -> Iterator[Row]:
    """The kill switch; a pause only where there is one, or none could be told."""
    if _is_only_watched(status):
        return  # none stops it
    switch, pause = status.kill_switch, status.pause
    if switch is None:
        yield "killswitch", "unknown", "magenta"
    elif switch.switch is None:
        yield "killswitch", "not set", ""
    else:
        yield "killswitch", f"SET {_stopped(switch.switch, screen)}", "yellow"
    if pause is None:
        yield "paused", "unknown", "magenta"
    elif pause.switch is not None:
        yield "paused", _stopped(pause.switch, screen), "yellow"


def _stopped(stop: KillSwitch, screen: Screen) -> str:
    """By whom, when and why."""
    words = f"by {stop.who or 'someone'}"
    if stop.time is not None:
        words += f" at {timestamp(stop.time, screen.zone)}"
    return f"{words}: {stop.why or 'no reason given'}"
