"""The status screen: `may I sleep?` answered in its first lines; and its rows about the operation
around the training: nodes, copies, periodic jobs, disks, alerts. Pure: the status document in, a
renderable out. What the card does not use has no row.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tr11ops.alerts.state import alerts_words
from tr11ops.base.units import (
    capitalized,
    command_lines,
    counted,
    duration,
    first_few,
    plain,
    timestamp,
    wrapped,
)
from tr11ops.detect.detector import Severity
from tr11ops.observe.observations import CopyStatus
from tr11ops.rundir.disk_usage import KINDS, Kind
from tr11ops.rundir.exclusion import Exclusion, NodeStanding, kept_off
from tr11ops.status import rows
from tr11ops.status.document import ShownFilesystem, ShownPeriodicJob, Status
from tr11ops.status.extra_observations import SYNC
from tr11ops.status.rows import (
    LABEL_WIDTH,
    SEVERITY_STYLES,
    Row,
    Screen,
    ShownIncident,
    incident_rows,
)
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.units import shortened

# What of the status screen is shown where the terminal is too low for all of it. Pure.
#
# The verdict and the answer stay on top; then what is wrong, the most urgent first; then as much of
# the rest as fits. What is left out is counted.

LEAST_DETAILS = 7  # lines of the state of things that are worth more than a third finding
# styles of the rows about something to act on, the worst first
URGENT = ("red", "bold red", "yellow")
# labels of the rows to keep, the first ones first
WORTH = ("unknown", "progress", "jobs", "relaunch", "paused", "nodes", "checkpoint", "alerts")
EMPTY: Row = ("", "", "")
# as long as the words of a row may be; all of them are in the JSON document
LONGEST = 240

Lines = Callable[[Row], int]  # how many lines a row takes


def fitted(
    incidents: tuple[ShownIncident, ...],
    unknown: Sequence[Row],
    details: Sequence[Row],
    room: int | None,
    lines: Lines,
) -> list[Row]:
    """The rows below the answer, at most `room` lines of them; all, in their usual order, where
    they fit.

    `incidents` are sorted, the most urgent first. Only the most urgent one's first lines may exceed
    the room.
    """
    wrong = [row for incident in incidents for row in (EMPTY, *incident_rows(incident))]
    everything = [EMPTY, *details, *wrong, *unknown]
    if room is None or _sum(everything, lines) <= room:
        return everything
    rest = _by_worth([row for row in (*unknown, *details) if row != EMPTY])
    # worth more than a finding's evidence
    action = 2 + _sum([row for row in rest if row[2] in URGENT], lines)
    kept_free = max(min(LEAST_DETAILS, room // 3), min(action, room // 2))
    shown = [*_incidents(incidents, max(1, room - kept_free), lines), EMPTY]
    left = room - _sum(shown, lines) - lines(_more(len(rest)))
    if left < 0:
        return shown
    kept = list(_first(rest, left, lines))
    if len(kept) == len(rest):
        return [*shown, *kept]
    return [*shown, *kept, _more(len(rest) - len(kept))]


def _incidents(incidents: tuple[ShownIncident, ...], room: int, lines: Lines) -> list[Row]:
    """The most urgent one whole if there is room, those after it without their evidence, the rest
    counted.
    """
    rows: list[Row] = []
    for index, incident in enumerate(incidents):
        last = index == len(incidents) - 1
        left = room - _sum(rows, lines) - (0 if last else 1)
        whole, short = incident_rows(incident), incident_rows(incident, with_evidence=False)
        later = 0
        if not last:
            later = _sum(incident_rows(incidents[index + 1], with_evidence=False), lines)
        chosen = whole if _sum(whole, lines) + later <= left else short
        if index and _sum(chosen, lines) > left:
            return [*rows, _counted(incidents[index:])]
        rows += chosen
    return rows


def _counted(incidents: Sequence[ShownIncident]) -> Row:
    counts: dict[str, int] = {}
    for incident in incidents:
        counts[incident.severity] = counts.get(incident.severity, 0) + 1
    words = ", ".join(f"{count} {severity.upper()}" for severity, count in counts.items())
    return "", f"and {len(incidents)} more: {words}", SEVERITY_STYLES[incidents[0].severity]


def _more(count: int) -> Row:
    return (
        "",
        f"{counted(count, 'more row')}: in a taller window, or by `tr11 status | less`",
        "dim",
    )


def _by_worth(rows: Sequence[Row]) -> list[Row]:
    """The rows that need action first, then those whose labels are in WORTH; what continues a row
    stays with it.
    """
    groups: list[list[Row]] = []
    for row in rows:
        if row[0] or not groups:
            groups.append([])
        groups[-1].append(row)
    groups.sort(key=_rank)
    return [row for group in groups for row in group]


def _rank(group: Sequence[Row]) -> tuple[bool, int]:
    label = group[0][0]
    is_quiet = not any(style in URGENT for _, _, style in group)
    return is_quiet, WORTH.index(label) if label in WORTH else len(WORTH)


def _first(rows: Sequence[Row], room: int, lines: Lines) -> Iterator[Row]:
    for row in rows:
        room -= lines(row)
        if room < 0:
            return
        yield row


def _sum(rows: Sequence[Row], lines: Lines) -> int:
    return sum(map(lines, rows))


STYLES = {
    VerdictWord.HEALTHY: "bold green",
    VerdictWord.FINISHED: "bold green",
    VerdictWord.SLOW: "bold yellow",
    VerdictWord.STARTING: "bold cyan",
    VerdictWord.QUEUED: "bold cyan",
    VerdictWord.AT_RISK: "bold white on red",
    VerdictWord.STOPPING: "bold yellow",
    VerdictWord.STOPPED: "bold yellow",
    VerdictWord.STALLED: "bold white on red",
    VerdictWord.DOWN: "bold white on red",
    VerdictWord.UNKNOWN: "bold magenta",
}
ANSWER_STYLES = {True: "bold green", False: "bold red", None: "bold magenta"}
# words that are good news where a person may sleep, and only there
GREEN = frozenset({VerdictWord.HEALTHY, VerdictWord.FINISHED})


def badge_style(word: VerdictWord, may_sleep: bool | None) -> str:
    """The style of a verdict's word. Nothing is green beside an answer that is not "you may sleep"."""
    if word in GREEN and may_sleep is not True:
        return "bold yellow"
    return STYLES[word]


def render(status: Status, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns, and of `screen.height` lines
    where it has one.
    """
    badge, name = (
        badge_style(status.verdict, status.may_sleep),
        f"{status.run.name} / {status.run.variant}",
    )
    head = heading(status.verdict.upper(), badge, name=name, time=status.time, screen=screen)
    words = line(f"{status.answer}.", screen, ANSWER_STYLES[status.may_sleep])
    said = shortened(f"{capitalized(status.why)}.", LONGEST)
    reason = line(said, screen, "not bold default")
    is_slow = status.verdict is VerdictWord.SLOW
    if is_slow:  # before what is only missing for the night
        words = reason.append(" ").append(words)
    else:
        words = words.append(" ").append(reason)
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(words)
    label = "  also" if is_slow else "  first"
    needs: list[Row] = [
        (label if index == 0 else "", need.fix, "bold")
        for index, need in enumerate(status.sleep_needs)
    ]
    top = _height(head, screen.width) + _height(words, screen.width)

    def lines(row: Row) -> int:
        return max(1, _height(_words_of(row, screen), screen.content_width))

    room = None
    if screen.height is not None:
        room = max(1, screen.height - top - sum(map(lines, needs)))
    incidents = rows.incidents_of(tuple(rows.referring(one, said) for one in status.findings))
    unknown = list(rows.unknown_rows(status))
    rest = fitted(
        incidents, unknown, details=list(_details(status, screen)), room=room, lines=lines
    )
    return Group(head, why, table_of((*needs, *rest), screen))


def _details(status: Status, screen: Screen) -> Iterator[Row]:
    """The state of everything, as (label, text, style); who has an open alert is asked first."""
    yield from alert_rows(status)
    yield from rows.training(status, screen)
    yield "", "", ""
    if status.trainer is not None:
        yield "trainer", str(status.trainer), ""
    yield from rows.jobs(status)
    yield from node_rows(status)
    yield from rows.relaunch(status)
    yield from rows.attempts(status)
    yield from rows.checkpoint(status)
    yield from rows.set_aside(status)
    yield from rows.next_save(status)
    yield from copy_rows(status)
    yield from filesystem_rows(status)
    yield from periodic_rows(status)
    yield from rows.stops(status, screen)


# ----------------------------------------------------------------------------- how, for both screens


def line(words: str, screen: Screen, style: str = "") -> Text:
    """Words that a terminal can be trusted with."""
    return Text(plain(words, screen.unicode), style=style, overflow="fold")


def table_of(given: Iterable[Row], screen: Screen) -> Table:
    """The rows, their labels in a column of their own."""
    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for row in given:
        body.add_row(line(row[0], screen, "dim"), _words_of(row, screen))
    return body


def _words_of(row: Row, screen: Screen) -> Text:
    """A row's words, of which a rank may have written hundreds; a command stays whole, and can be
    copied.
    """
    _, words, style = row
    if style != "bold":
        words = shortened(words, LONGEST)
    parts = wrapped(words, width=screen.content_width)
    if style == "bold" and words.startswith("tr11 "):
        parts = command_lines(words, screen.content_width)
    return Text("\n").join(line(part, screen, style) for part in parts)


def heading(word: str, style: str, name: str, time: float, screen: Screen) -> Text:
    """The first line: the word, the run, the time; the time below where one line does not hold all."""
    title = Text(overflow="fold")
    title.append(f" {word} ", style)
    title.append(plain(f" {name}", screen.unicode), "bold")
    moment = timestamp(time, screen.zone)
    gap = screen.width - len(title) - len(moment)
    title.append((" " * gap if gap > 1 else "\n ") + moment, "dim")
    return title


def _height(text: Text, width: int) -> int:
    """Lines that a text takes."""
    return len(text.wrap(Console(width=width, file=io.StringIO()), width, overflow="fold"))


NODES_SHOWN = 6
ALERTS_SHOWN = 5
JOBS_SHOWN = 4
FAR_SECONDS = 90 * 86400.0  # a file system that is full later than this is no news


# ----------------------------------------------------------------------------- nodes
def node_rows(status: Status) -> Iterator[Row]:
    """Nodes held and not to be used, and why not."""
    use, excluded = status.node_use, status.exclusions
    if use is None:
        parts = ["unknown"]
    elif use.used or use.spare:
        parts = [f"{use.used} used, {use.spare} spare"]
    else:
        parts = ["none held"]
    count = None if use is None else use.excluded
    if excluded is not None:
        count = len(excluded)
    if count is None:
        parts.append("excluded: unknown")
    elif not count:
        parts.append("none excluded")
    elif excluded:
        parts.append(f"{count} excluded: {first_few(map(_shown, excluded), NODES_SHOWN)}")
    else:
        parts.append(f"{count} excluded")
    style = ""
    slow = status.slow_nodes
    if not status.bad_nodes or (slow is not None and slow.nodes):
        parts += status.slow_words  # else what is to be acted on has the line for itself
    if status.bad_nodes:
        parts.append(f"bad but not excluded: {', '.join(status.bad_nodes)}")
        style = "yellow"
    if use is None or count is None:
        style = "magenta"
    yield "nodes", "; ".join(parts), style
    leaving = status.leaving_nodes
    for node in leaving[:NODES_SHOWN]:
        why = ""
        if node.reason:
            why = f" ({node.reason})"
        yield (
            "",
            f"{node.name} leaves when its job ends: {'+'.join(sorted(node.states))}{why}",
            "yellow",
        )
    if len(leaving) > NODES_SHOWN:
        yield "", f"and {len(leaving) - NODES_SHOWN} more", "yellow"


# ----------------------------------------------------------------------------- copies
def copy_rows(status: Status) -> Iterator[Row]:
    """The newest backup, what lacks a copy, who copies now, the last restore and the last sync, as
    the card asks.
    """
    wanted = status.card.copies
    if not wanted:
        return
    made = {"backup": status.backup, SYNC: status.sync}
    parts: list[str] = []
    if "backup" in wanted:
        parts += _backup(status)
    if SYNC in wanted:
        parts.append(f"sync {_copy(status, SYNC, status.sync)}")
    style = ""
    if status.copies_damaged:
        style = "red"
    elif any(status.reason_unknown(what) is not None for what in wanted):
        style = "magenta"
    elif any((copy := made[what]) is None or copy.message for what in wanted):
        style = "yellow"
    yield "copies", "; ".join(parts), style
    for work in status.copying or ():
        what = f"copies to the {work.to}"
        if work.to == SYNC:
            what = "mirrors the logs to the hub"
        step = ""
        if work.step is not None:
            step = f" (step {work.step})"
        yield (
            "",
            f"{work.who} on {work.host} {what}{step}, for {duration(status.age(work.since))}",
            "cyan",
        )


def _backup(status: Status) -> Iterator[str]:
    yield f"backup {_copy(status, 'backup', status.backup)}"
    if status.copies_missing:
        yield f"{status.copies_missing} not copied yet"
    if status.copies_damaged:
        yield f"{status.copies_damaged} DAMAGED"
    drill = status.restore_drill
    if drill is not None:
        how = "passed" if drill.passed else "FAILED"
        yield f"restore drill of step {drill.step} {how} {duration(status.age(drill.time))} ago"
    elif status.reason_unknown("restore drill") is not None:
        yield "restore drill unknown"


def _copy(status: Status, what: str, copy: CopyStatus | None) -> str:
    if copy is None:
        if status.reason_unknown(what) is None:
            return "never yet"
        return "unknown"
    step = ""
    if copy.step is not None:
        step = f"of step {copy.step} "
    fault = ""
    if copy.message:
        fault = f", but now: {copy.message}"
    return f"{step}{duration(status.age(copy.time))} ago{fault}"


# ----------------------------------------------------------------------------- file systems
def filesystem_rows(status: Status) -> Iterator[Row]:
    """The fullest of the watched file systems, and when it will be full."""
    fullest = _fullest(status.filesystems or ())
    if fullest is not None:
        shown, kind, percent = fullest
        when = ""
        if shown.full_at is not None and shown.full_at - status.time < FAR_SECONDS:
            when = f", full in {duration(shown.full_at - status.time)}"
        count = len(status.filesystems or ())
        of = ""
        if count > 1:
            of = f" (fullest of {count})"
        ago = duration(status.age(shown.usage.time))
        style = "yellow" if percent >= _bound(shown, kind) else ""
        yield "disks", f"{shown.usage.name} {percent:.0f} % of {kind}{of}{when}; {ago} ago", style
    elif status.card.filesystems and status.filesystems is None:
        yield "disks", "unknown", "magenta"
    elif status.card.filesystems:
        yield "disks", f"not looked at yet ({status.command('fs-watchdog')})", "yellow"


def _fullest(filesystems: Sequence[ShownFilesystem]) -> tuple[ShownFilesystem, Kind, float] | None:
    """The one with the largest share used, in bytes or in inodes, and that share in percent."""
    fullest: tuple[ShownFilesystem, Kind, float] | None = None
    for shown in filesystems:
        for kind in KINDS:
            percent = shown.usage.percent(kind)
            if percent is not None and (fullest is None or percent > fullest[2]):
                fullest = shown, kind, percent
    return fullest


def _bound(shown: ShownFilesystem, kind: Kind) -> float:
    if kind == "bytes":
        return shown.rule.bytes_percent
    return shown.rule.inodes_percent


# ----------------------------------------------------------------------------- periodic jobs
def periodic_rows(status: Status) -> Iterator[Row]:
    """Which periodic jobs are alive; the late and the failing first. No row where none was ever
    run.
    """
    if status.periodic_jobs is None:
        yield "periodic", "unknown", "magenta"
        return
    jobs = [shown for shown in status.periodic_jobs if shown.wanted]
    if not jobs:
        return
    yield from _alive_or_ill(jobs, status.time)
    if status.watchdog_acts is False and not status.watchdog_fault:
        yield "", "the watchdog only tells (watch.act = false): what it would do waits for you", ""


def _alive_or_ill(periodic: Sequence[ShownPeriodicJob], now: float) -> Iterator[Row]:
    ill = [shown for shown in periodic if shown.late or shown.job.failures_in_a_row]
    if ill:
        more = ""
        if len(ill) > JOBS_SHOWN:
            more = f"; and {len(ill) - JOBS_SHOWN} more"
        yield (
            "periodic",
            "; ".join(_illness(shown, now) for shown in ill[:JOBS_SHOWN]) + more,
            "red",
        )
        return
    jobs = [shown.job for shown in periodic]
    last, due = max(jobs, key=attrgetter("started")), min(jobs, key=attrgetter("next_due"))
    if due.next_due > now:
        ahead = f"next {due.name} in {duration(due.next_due - now)}"
    else:
        ahead = f"{due.name} is due"
    count = counted(len(jobs), "job alive", "jobs alive")
    yield (
        "periodic",
        f"{count}, last {last.name} {duration(max(0.0, now - last.started))} ago; {ahead}",
        "",
    )


def _illness(shown: ShownPeriodicJob, now: float) -> str:
    job, faults = shown.job, []
    if shown.late:
        faults.append(f"late by {duration(now - job.next_due)}")
    if job.failures_in_a_row:
        faults.append(f"failed {counted(job.failures_in_a_row, 'time')}: {job.message}")
    return f"{job.name} {', '.join(faults)}"


# ----------------------------------------------------------------------------- alerts
def alert_rows(status: Status) -> Iterator[Row]:
    """The open alerts, who has each, and who is called."""
    yield from _open_alerts(status)
    if status.on_call is not None and status.on_call.who:
        yield "on call", status.on_call.words(status.time), ""


def _open_alerts(status: Status) -> Iterator[Row]:
    seen = status.alerts
    if seen is None:
        yield "alerts", f"unknown: {status.reason_unknown('alerts')}", "magenta"
        return
    label = "alerts"
    if status.untold:
        yield label, alerts_words(status.untold, status.on_call, status.time), "red"
        label = ""
    elif not seen:
        fault = status.watchdog_fault
        yield label, f"none open; {fault}" if fault else "none open", "yellow" if fault else ""
    for alert in seen[:ALERTS_SHOWN]:
        who = alert.care.words(status.on_call, status.time)
        if not (alert.holder or alert.clear_looks):
            who += f": `{status.command(f'alerts ack {alert.fingerprint}')}`"
        style = "red" if alert.severity is Severity.CRITICAL else "yellow"
        told = f" ({duration(status.age(alert.start))}); {who}"
        # who has it is not what a long title leaves out
        title = "see above" if alert.title in status.why else alert.title
        title = shortened(f"{alert.severity.name} {title}", max(LONGEST // 3, LONGEST - len(told)))
        yield label, f"{title}{told}", style
        label = ""
        if alert.watchdog:
            yield "", alert.watchdog, ""
    if len(seen) > ALERTS_SHOWN:
        yield "", f"and {len(seen) - ALERTS_SHOWN} more ({status.command('alerts list')})", ""


def _shown(entry: Exclusion) -> str:
    """A node with why it is not used; what is less than an exclusion says so."""
    if entry.state == NodeStanding.EXCLUDE:
        words = ""
    else:
        words = kept_off(entry.state)
    why = ": ".join(filter(None, (words, entry.why)))
    if why:
        return f"{entry.node} ({why})"
    return entry.node
