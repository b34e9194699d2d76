"""The status screen: `may I sleep?` answered in its first line. Pure: what was seen and found in, renderable out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.hostlist import compress
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.unfinished_end import how_it_ended, is_bad
from tr11ops.report.glyphs import bar, plain, sparkline
from tr11ops.snapshot import Attempt, Snapshot, Unknown, known
from tr11ops.units import duration, quantity, size
from tr11ops.verdict import Verdict, Word
from trainer.contract import EndMarker, checkpoint_name

if TYPE_CHECKING:
    from rich.console import RenderableType

LABEL_WIDTH = 10
JOBS_SHOWN = 6
ATTEMPTS_SHOWN = 3
NODES_SHOWN = 6
HOSTLIST_SHOWN = 60
SPARK_WIDTH = 40

STYLES = {
    Word.HEALTHY: "bold green", Word.FINISHED: "bold green", Word.STARTING: "bold cyan", Word.QUEUED: "bold cyan",
    Word.STOPPED: "bold yellow", Word.STALLED: "bold white on red", Word.DOWN: "bold white on red",
    Word.UNKNOWN: "bold magenta",
}  # fmt: skip
SEVERITY_STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}

Row = tuple[str, str, str]  # label, text, style


@dataclass(frozen=True)
class Screen:
    """How the screen is drawn: its width in characters, whether Unicode may be used, and the zone of its times."""

    width: int
    unicode: bool
    zone: tzinfo | None = None

    @property
    def content_width(self) -> int:
        return max(20, self.width - LABEL_WIDTH - 1)


def render(snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(plain(words, screen.unicode), style=style, overflow="fold")

    head = Table.grid(expand=True)
    head.add_column(overflow="fold")
    head.add_column(justify="right", no_wrap=True)
    title = text("")
    title.append(f" {verdict.word.upper()} ", STYLES[verdict.word])
    title.append(plain(f" {snapshot.run.name} / {snapshot.run.variant}", screen.unicode), "bold")
    head.add_row(title, text(_clock(snapshot.time, screen), "dim"))
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(text(verdict.why[:1].upper() + verdict.why[1:] + "."))
    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for label, words, style in rows(snapshot, findings, verdict, screen):
        body.add_row(text(label, "dim"), text(words, style))
    return Group(head, why, text(""), body)


def rows(snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict, screen: Screen) -> Iterator[Row]:
    """The lines below the verdict, as (label, text, style)."""
    yield from _progress(snapshot, verdict.word in {Word.HEALTHY, Word.STARTING}, screen)
    yield "", "", ""
    yield from _jobs(snapshot)
    yield from _attempts(snapshot)
    yield from _checkpoint(snapshot)
    yield from _switch(snapshot, screen)
    yield from _exclusions(snapshot)
    for finding in findings:
        yield "", "", ""
        yield finding.severity.name, finding.title, SEVERITY_STYLES[finding.severity]
        for line in finding.evidence:
            yield "", line, ""
        if finding.fix:
            yield "  type", finding.fix, "bold"
    unknowns = snapshot.unknowns()
    if unknowns:
        yield "", "", ""
        for index, line in enumerate(unknowns):
            yield "unknown" if index == 0 else "", line, "magenta"


# ----------------------------------------------------------------------------- the training
def _progress(snapshot: Snapshot, moving: bool, screen: Screen) -> Iterator[Row]:
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
    last = steps[-1].record
    losses = [step.record.lm_loss for step in steps]
    spark_width = min(SPARK_WIDTH, screen.content_width - 24)
    yield "loss", f"{last.lm_loss:<8.4f} {sparkline(losses, spark_width, screen.unicode)} last {len(losses)}", ""
    pace = signs.seconds_per_iteration(snapshot)
    if pace is not None:
        tflops = (
            f", {last.tflops:.{1 if last.tflops >= 10 else 3}f} TFLOPs"
            if math.isfinite(last.tflops) and last.tflops > 0
            else ""
        )
        yield "speed", f"{pace:.2f} s/iteration (last {last.seconds_per_iteration:.2f}){tflops}", ""
    tokens = f", {quantity(last.consumed_tokens)} tokens" if last.consumed_tokens else ""
    yield "consumed", f"{quantity(last.consumed_samples)} samples{tokens}, batch {last.global_batch_size}", ""
    remaining = signs.remaining_seconds(snapshot)
    if remaining:
        when = f" (about {_clock(snapshot.time + remaining, screen)})" if moving else " of training"
        yield "ETA", f"{duration(remaining)}{when}, without waits and restarts", ""


# ----------------------------------------------------------------------------- the cluster
def _jobs(snapshot: Snapshot) -> Iterator[Row]:
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
    covered, remaining = signs.queue_coverage_seconds(snapshot), signs.remaining_seconds(snapshot)
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


def _attempts(snapshot: Snapshot) -> Iterator[Row]:
    if isinstance(snapshot.attempts, Unknown):
        yield "attempts", "unknown", "magenta"
        return
    jobs = {name: job for job in known(snapshot.jobs, ()) for name in signs.identifiers(job)}
    outside = signs.life_outside(snapshot)
    living = {outside.job_id} if outside is not None else set()
    ended = [
        attempt for attempt in snapshot.attempts
        if attempt.end is not None or (attempt.job_id not in living and _is_over(snapshot, jobs.get(attempt.job_id)))
    ]  # fmt: skip
    if not ended:
        yield "attempts", "none has ended yet", ""
    for index, attempt in enumerate(ended[:ATTEMPTS_SHOWN]):
        style = "red" if is_bad(attempt) else ""
        yield "attempts" if index == 0 else "", _attempt_line(snapshot, attempt, jobs.get(attempt.job_id)), style


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


def _switch(snapshot: Snapshot, screen: Screen) -> Iterator[Row]:
    switch = snapshot.kill_switch
    if isinstance(switch, Unknown):
        yield "killswitch", "unknown", "magenta"
    elif switch is None:
        yield "killswitch", "not set", ""
    else:
        when = "" if switch.time is None else f" at {_clock(switch.time, screen)}"
        why = f": {switch.why}" if switch.why else ", no reason given"
        yield "killswitch", f"SET by {switch.who or 'someone'}{when}{why}", "yellow"


def _exclusions(snapshot: Snapshot) -> Iterator[Row]:
    excluded = snapshot.exclusions
    if isinstance(excluded, Unknown):
        yield "excluded", "unknown", "magenta"
    elif not excluded:
        yield "excluded", "no node", ""
    else:
        named = ", ".join(entry.node + (f" ({entry.why})" if entry.why else "") for entry in excluded[:NODES_SHOWN])
        more = f" and {len(excluded) - NODES_SHOWN} more" if len(excluded) > NODES_SHOWN else ""
        yield "excluded", f"{len(excluded)}: {named}{more}", ""


def _clock(time: float, screen: Screen) -> str:
    return datetime.fromtimestamp(time, tz=screen.zone).astimezone(screen.zone).strftime("%Y-%m-%d %H:%M %Z").rstrip()
