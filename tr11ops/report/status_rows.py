"""The status screen's rows about the training itself: progress, jobs, attempts, checkpoints, who said stop. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.hostlist import compress
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.runbooks import page_of
from tr11ops.detect.unfinished_end import how_it_ended, is_bad
from tr11ops.report.glyphs import bar, sparkline
from tr11ops.report.status_care import Row, care_rows, nodes
from tr11ops.report.status_forecast import End, end_of, next_checkpoint, throughput_of
from tr11ops.report.status_surroundings import Surroundings
from tr11ops.snapshot import Attempt, Snapshot, Unknown, known
from tr11ops.units import duration, quantity, size
from tr11ops.verdict import Verdict, Word
from trainer.contract import EndMarker, checkpoint_name

LABEL_WIDTH = 10
JOBS_SHOWN = 6
ATTEMPTS_SHOWN = 3
HOSTLIST_SHOWN = 60
SPARK_WIDTH = 40
SLOW_PERCENT = 95.0  # of the best; less is coloured

SEVERITY_STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}


@dataclass(frozen=True)
class Screen:
    """How the screen is drawn: width and height in characters, whether Unicode may be used, the zone of its times.

    Without a height it may be as long as it likes; with one, what is wrong comes before what is not.
    """

    width: int
    unicode: bool
    zone: tzinfo | None = None
    height: int | None = None

    @property
    def content_width(self) -> int:
        return max(20, self.width - LABEL_WIDTH - 1)


def detail_rows(snapshot: Snapshot, surroundings: Surroundings, verdict: Verdict, screen: Screen) -> Iterator[Row]:
    """The state of everything, as (label, text, style)."""
    yield from _progress(snapshot, surroundings, verdict.word in {Word.HEALTHY, Word.STARTING}, screen)
    yield "", "", ""
    yield from _jobs(snapshot, surroundings)
    yield from nodes(snapshot, surroundings)
    yield from _relaunch(snapshot)
    yield from _attempts(snapshot)
    yield from _checkpoint(snapshot)
    yield from _next_save(snapshot)
    yield from care_rows(snapshot, surroundings)
    yield from _switch(snapshot, screen)


def finding_rows(finding: Finding, with_evidence: bool = True) -> list[Row]:
    """What is wrong, the evidence, what to type, and the page that explains it."""
    rows: list[Row] = [(finding.severity.name, finding.title, SEVERITY_STYLES[finding.severity])]
    if with_evidence:
        rows += [("", line, "") for line in finding.evidence]
    if finding.fix:
        rows.append(("  type", finding.fix, "bold"))
    return [*rows, ("  read", f"runbooks/{page_of(finding.detector)}", "")]


def unknown_rows(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Row]:
    """What could not be observed, after an empty line."""
    for index, line in enumerate((*snapshot.unknowns(), *surroundings.unknowns())):
        if index == 0:
            yield "", "", ""
        yield "unknown" if index == 0 else "", line, "magenta"


# ----------------------------------------------------------------------------- the training
def _progress(snapshot: Snapshot, surroundings: Surroundings, moving: bool, screen: Screen) -> Iterator[Row]:
    done, total = signs.iteration(snapshot), signs.total_iterations(snapshot)
    steps = snapshot.steps
    if done is not None and total:
        share = done / total
        counts = f" {done:,} / {total:,}  {math.floor(share * 1000) / 10:.1f} %"
        yield "progress", bar(share, max(10, screen.content_width - len(counts)), screen.unicode) + counts, "green"
    elif isinstance(steps, Unknown):
        yield "progress", "unknown", "magenta"
    else:
        yield "progress", "no iteration yet" + (f", of {total:,}" if total else ""), ""
    if isinstance(steps, Unknown) or not steps:
        return
    end = end_of(snapshot, surroundings.course)
    if end is not None and end.earliest > 0:
        yield "ETA", _end(snapshot, end, moving, screen), ""
    last = steps[-1].record
    losses = [step.record.lm_loss for step in steps]
    spark_width = min(SPARK_WIDTH, screen.content_width - 24)
    yield "loss", f"{last.lm_loss:<8.4f} {sparkline(losses, spark_width, screen.unicode)} last {len(losses)}", ""
    yield from _speed(snapshot, surroundings)
    tokens = f", {quantity(last.consumed_tokens)} tokens" if last.consumed_tokens else ""
    yield "consumed", f"{quantity(last.consumed_samples)} samples{tokens}, batch {last.global_batch_size}", ""


def _speed(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Row]:
    pace = signs.seconds_per_iteration(snapshot)
    rate = throughput_of(snapshot, known(surroundings.best, None))
    parts = [] if pace is None else [f"{pace:.2f} s/iteration"]
    style = ""
    if rate is not None:
        against = ""
        if rate.percent is not None and rate.best is not None:
            against = f", {rate.percent:.0f} % of its best ({_rate(rate.best)})"
            style = "yellow" if rate.percent < SLOW_PERCENT else ""
        parts.append(f"{_rate(rate.current)} {rate.unit}{against}")
    if parts:
        yield "speed", "; ".join(parts), style


def _rate(value: float) -> str:
    return f"{value:.{1 if value >= 10 else 3}f}"


def _end(snapshot: Snapshot, end: End, moving: bool, screen: Screen) -> str:
    """The range of the end. What is not moving has no date: somebody must start it first."""
    if end.likely is None or end.window is None or end.share is None:
        when = f"{clock(snapshot.time + end.earliest, screen)}: " if moving else ""
        return f"{when}{duration(end.earliest)} of training, without waits and restarts"
    basis = f"last {_span(end.window)}: {100 * end.share:.0f} % useful"
    if not moving:
        waits = f", {duration(end.likely)} with waits" if end.likely > 1.01 * end.earliest else ""
        return f"{duration(end.earliest)} of training{waits} ({basis})"
    far = end.earliest > 2 * signs.DAY
    first, last = (_moment(snapshot.time + seconds, screen, far) for seconds in (end.earliest, end.likely))
    when = first if first == last else f"{first} to {last}"
    days = f", in {_range(end.earliest / signs.DAY, end.likely / signs.DAY)} d" if far else ""
    return f"{when}{days} ({basis})"


def _range(first: float, last: float) -> str:
    low, high = f"{first:.0f}", f"{last:.0f}"
    return low if low == high else f"{low} to {high}"


def _span(seconds: float) -> str:
    return f"{seconds / signs.DAY:.0f} d" if seconds >= 2 * signs.DAY else f"{seconds / signs.HOUR:.0f} h"


def _moment(time: float, screen: Screen, far: bool) -> str:
    """A day, or for what is near the minute too; "never" for a time that no calendar holds."""
    try:
        return datetime.fromtimestamp(time, tz=screen.zone).strftime("%Y-%m-%d" if far else "%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "never"


# ----------------------------------------------------------------------------- the cluster
def _jobs(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Row]:
    if isinstance(snapshot.jobs, Unknown):
        yield "jobs", f"unknown: {snapshot.jobs.why}", "magenta"
        return
    shown = (*signs.active_jobs(snapshot), *signs.pending_jobs(snapshot))
    if not shown:
        yield "jobs", "none running, none queued", ""
        return
    for index, job in enumerate(shown[:JOBS_SHOWN]):
        yield "jobs" if index == 0 else "", _job_line(snapshot, job), ""
    if len(shown) > JOBS_SHOWN:
        yield "", f"and {len(shown) - JOBS_SHOWN} more", ""
    covered, end = signs.queue_coverage_seconds(snapshot), end_of(snapshot, surroundings.course)
    remaining = None if end is None else end.earliest
    if covered is not None and snapshot.kill_switch is None:
        against = "" if remaining is None else f" of the {duration(remaining)} left"
        enough = "all" if remaining is not None and covered >= remaining else duration(covered)
        yield "queue", f"covers {enough}{against}", ""


def _job_line(snapshot: Snapshot, job: Job) -> str:
    count = len(job.nodes) or job.node_count
    parts = [job.job_id, job.state.value, f"{count} node" if count == 1 else f"{count} nodes"]
    if job.state is JobState.PENDING:
        if len(job.pending_tasks) > 1:
            parts.append(f"{len(job.pending_tasks)} tasks")
        if job.reason:
            parts.append(f"({job.reason})")
        if job.start_time is not None and job.start_time > snapshot.time:
            parts.append(f"expected in {duration(job.start_time - snapshot.time)}")
    elif job.start_time is not None:
        limit = f" of {duration(job.time_limit_seconds)}" if job.time_limit_seconds is not None else ""
        parts.append(f"{duration(snapshot.time - job.start_time)}{limit}")
    if job.nodes:
        named = compress(job.nodes)
        parts.append(
            f"on {named if len(named) <= HOSTLIST_SHOWN else named[:HOSTLIST_SHOWN].rsplit(',', 1)[0] + ',...'}"
        )
    return "  ".join(parts)


def _relaunch(snapshot: Snapshot) -> Iterator[Row]:
    """Where the running attempt has started its workers again: which launch it is, and why the one before ended."""
    for job in signs.active_jobs(snapshot):
        ends = [end for end in known(snapshot.launch_ends, ()) if end.job_id in signs.identifiers(job)]
        if not ends or signs.marker_of(snapshot, signs.identifiers(job)) is not None:
            continue
        last = ends[-1]
        why = "; ".join(filter(None, (last.why, last.decision)))
        ago = duration(max(0.0, snapshot.time - last.time))
        words = f"{job.job_id}  launch {last.launch + 1}; launch {last.launch} ended {ago} ago"
        yield "relaunch", f"{words}: {why}" if why else words, "yellow"


def _attempts(snapshot: Snapshot) -> Iterator[Row]:
    if isinstance(snapshot.attempts, Unknown):
        yield "attempts", "unknown", "magenta"
        return
    wanted = {attempt.job_id for attempt in snapshot.attempts}
    jobs = {name: job for job in known(snapshot.jobs, ()) for name in (job.job_id, job.raw_id) if name in wanted}
    outside = signs.life_outside(snapshot)
    living = {outside.job_id} if outside is not None else set()
    ended = [
        attempt for attempt in snapshot.attempts
        if attempt.end is not None or (attempt.job_id not in living and _is_over(snapshot, jobs.get(attempt.job_id)))
    ]  # fmt: skip
    if not ended:  # one that died without a marker is seen by its job alone
        seen = not isinstance(snapshot.jobs, Unknown) or not snapshot.attempts
        yield "attempts", "none has ended yet" if seen else "none is known to have ended", ""
    # of those that ended well the newest is enough
    shown = [attempt for index, attempt in enumerate(ended[:ATTEMPTS_SHOWN]) if index == 0 or is_bad(attempt)]
    for index, attempt in enumerate(shown):
        style = "red" if is_bad(attempt) else ""
        yield "attempts" if index == 0 else "", _attempt_line(snapshot, attempt, jobs.get(attempt.job_id)), style
    yield from _changed(snapshot.attempts)


def _changed(attempts: Sequence[Attempt]) -> Iterator[Row]:
    """What the attempt that began last has otherwise than the one before it."""
    last = max(attempts, key=lambda attempt: attempt.start or 0.0, default=None)
    if last is not None and last.changes:
        more = f" (and {len(last.changes) - 1} more)" if len(last.changes) > 1 else ""
        yield "changed", f"{last.label or last.job_id} {last.changes[0]}{more}", ""


def _is_over(snapshot: Snapshot, job: Job | None) -> bool:
    if isinstance(snapshot.jobs, Unknown):
        return False
    return job is None or job.state.is_final


def _attempt_line(snapshot: Snapshot, attempt: Attempt, job: Job | None) -> str:
    label = attempt.label or attempt.job_id
    ago = f"{duration(max(0.0, snapshot.time - attempt.changed))} ago"
    how = how_it_ended(attempt, job)
    if isinstance(attempt.end, EndMarker):
        step = attempt.end.checkpoint_step
        saved = "not saved" if step is None else "saved" if step == attempt.end.iteration else f"saved {step}"
        return f"{label}  {how} at iteration {attempt.end.iteration} ({saved}), {ago}"
    return f"{label}  {how}, {ago}"


# ----------------------------------------------------------------------------- what was kept, and who said stop
_REASONS = {"minutes": "next full step", "end of the task": "end of this task"}


def _checkpoint(snapshot: Snapshot) -> Iterator[Row]:
    checkpoints = snapshot.checkpoints
    if isinstance(checkpoints, Unknown):
        yield "checkpoint", "unknown", "magenta"
        return
    sound = checkpoints.newest_sound
    if sound is None:
        found = "none yet" if not checkpoints.steps else f"none that is whole among {len(checkpoints.steps)}"
        yield "checkpoint", found, "" if not checkpoints.steps else "red"
        return
    age = "" if sound.created is None else f", {duration(max(0.0, snapshot.time - sound.created))} ago"
    bytes_ = "" if sound.bytes is None else f", {size(sound.bytes)}"
    checked = f"{sound.verified} verified; {len(checkpoints.steps)} kept"
    yield "checkpoint", f"{checkpoint_name(sound.step)}{age}{bytes_}, {checked}", ""


def _next_save(snapshot: Snapshot) -> Iterator[Row]:
    following = next_checkpoint(snapshot)
    if following is not None:
        due = "now" if following.seconds < 1 else f"in {duration(following.seconds)}"
        name = checkpoint_name(following.step) if following.step is not None else f"at the {_REASONS[following.why]}"
        yield "next save", f"{name}, due {due}", ""


def _switch(snapshot: Snapshot, screen: Screen) -> Iterator[Row]:
    switch = snapshot.kill_switch
    if isinstance(switch, Unknown):
        yield "killswitch", "unknown", "magenta"
    elif switch is None:
        yield "killswitch", "not set", ""
    else:
        when = "" if switch.time is None else f" at {clock(switch.time, screen)}"
        why = f": {switch.why}" if switch.why else ", no reason given"
        yield "killswitch", f"SET by {switch.who or 'someone'}{when}{why}", "yellow"
    yield from _pause(snapshot, screen)


def _pause(snapshot: Snapshot, screen: Screen) -> Iterator[Row]:
    """Only where there is one, or none could be told."""
    pause = snapshot.pause
    if isinstance(pause, Unknown):
        yield "paused", "unknown", "magenta"
    elif pause is not None:
        when = "" if pause.time is None else f" at {clock(pause.time, screen)}"
        yield "paused", f"by {pause.who or 'someone'}{when}" + (f": {pause.why}" if pause.why else ""), "yellow"


def clock(time: float, screen: Screen) -> str:
    """A moment to the minute, with its zone; "never" for a time that no calendar holds."""
    try:
        moment = datetime.fromtimestamp(time, tz=screen.zone).astimezone(screen.zone)
    except (ValueError, OverflowError, OSError):
        return "never"
    return moment.strftime("%Y-%m-%d %H:%M %Z").rstrip()
