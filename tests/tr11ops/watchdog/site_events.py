"""Events of the site while a run is in each of its phases: what tr11 concludes, does and says. See
docs/reference/site-events.md.

An event changes what is seen of a phase. `trains` is the truth that the conclusions are held
against: whether the training goes on, or begins again, without a person and without the site doing
anything that it has not announced.

    python -m tests.tr11ops.watchdog.site_events > docs/reference/site-events.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    cron_job,
    ended,
    facts_with,
    pending,
    running,
    snapshot,
    steps,
    wordless,
)
from tests.tr11ops.watchdog.decisions import SENT
from tr11ops.alerts.incidents import look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import AlertState
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all, unjudged_detectors
from tr11ops.observe.observations import (
    ClockReading,
    UnwritableDirectory,
)
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.runcard.watching import FilesystemSection, WatchSection
from tr11ops.rundir.action_log import ActionHistory
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.status.answer import answer
from tr11ops.watchdog.actions import PolicyContext
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.verdict import Verdict, judge
from trainer.contract.record import Record

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "site-events.md"
PHASES = ("queued", "starting", "training", "saving", "last hour", "leaving", "idle")
RUNNING = ("starting", "training", "saving", "last hour")
ROOM = FilesystemSection(name="scratch", source="df")
FACTS: dict[str, Any] = {"partition": "gpu_p13", "filesystems": (ROOM,)}
NODES = tuple(
    Node(f"n{n:02d}", frozenset({"allocated"}), partitions=("gpu_p13",)) for n in range(1, 61)
)
IDLE_NODES = tuple(replace(node, states=frozenset({"idle"})) for node in NODES)
LAST = ended("1007", 300.0)


def phase(name: str) -> Snapshot:
    """A moment of a run to which nothing happens: watched, with recipients, ten tasks of four days
    in an array.
    """
    waits = pending(partition="gpu_p13")
    job = running(partition="gpu_p13")
    begun = Attempt("1007", NOW - 12 * HOUR, None, "1000_7")
    quiet = {
        "queued": snapshot(
            jobs=(pending(reason="Resources", submit_time=NOW - 1200.0, partition="gpu_p13"),),
            attempts=(LAST,), steps=steps(age=320.0), heartbeats=beats(320.0, "ended"), nodes=IDLE_NODES,
        ),
        "starting": snapshot(
            jobs=(running(start_time=NOW - 90.0, partition="gpu_p13"), waits),
            attempts=(replace(begun, changed=NOW - 80.0), ended()),
            steps=steps(job_id="1006", age=HOUR), heartbeats=beats(10.0, "loading"), nodes=NODES,
        ),
        "training": snapshot(jobs=(job, waits), nodes=NODES),
        "last hour": snapshot(jobs=(running(start_time=NOW - 99 * HOUR, partition="gpu_p13"), waits), nodes=NODES),
        "saving": snapshot(jobs=(job, waits), nodes=NODES, heartbeats=beats(60.0, "saving"), steps=steps(age=70.0)),
        "leaving": snapshot(
            jobs=(running(state=JobState.COMPLETING, partition="gpu_p13"), waits),
            attempts=(ended("1007", 20.0),), steps=steps(age=60.0), heartbeats=beats(20.0, "ended"), nodes=NODES,
        ),
        "idle": snapshot(
            jobs=(), attempts=(LAST,), steps=steps(age=320.0), heartbeats=beats(320.0, "ended"), nodes=IDLE_NODES
        ),
    }[name]  # fmt: skip
    return changed(
        quiet,
        submissions=(SENT,),
        run=facts_with(quiet.run, watch=WatchSection(act=True), **FACTS),
        usage=(usage(),),
    )


def usage(bytes_used: int = 50) -> Usage:
    return Usage(NOW - 600.0, "scratch", "quota", bytes_used=bytes_used, bytes_limit=100)


class Cell(Record):
    """One event in one phase: what is seen, what else is known, and whether the training goes on by
    itself.
    """

    seen: Snapshot
    scene: PolicyContext
    trains: bool


Change = Callable[[str, Snapshot], Snapshot | None]


class Event(Record):
    """Something that the site does. `change` gives what is then seen, None where it cannot befall
    that phase.

    `trains`: the phases in which the training goes on, or begins again, by itself. `endings`: how
    attempts ended.
    """

    name: str
    text: str
    change: Change
    trains: frozenset[str]
    endings: tuple[AttemptVerdict, ...] = ()

    def cell(self, name: str) -> Cell | None:
        """What is seen when it happens in a phase."""
        seen = self.change(name, phase(name))
        if seen is None:
            return None
        scene = PolicyContext(user="ana", holder=None, endings=self.endings)
        return Cell(seen, scene, name in self.trains)


def phases(*names: str) -> frozenset[str]:
    """Phases in which the training goes on; `idle` is never one: the watchdog's resubmission is an
    act.
    """
    return frozenset(names)


ALIVE = phases("queued", *RUNNING, "leaving")
# the present task goes on, and the next ones do not start
ONLY_NOW = phases("starting", "training", "saving")


# ---------------------------------------------------------------------------- what an event changes
def same(_: str, seen: Snapshot) -> Snapshot:
    return seen


def waits_for(reason: str) -> Change:
    """Every pending task gets this reason."""

    def change(name: str, seen: Snapshot) -> Snapshot | None:
        if name == "idle":
            return None
        jobs = tuple(_with_reason(job, reason) for job in known(seen.jobs, ()))
        return replace(seen, jobs=jobs)

    return change


def _with_reason(job: Job, reason: str) -> Job:
    return replace(job, reason=reason) if job.state is JobState.PENDING else job


def maintenance(name: str, seen: Snapshot) -> Snapshot | None:
    """The site has reserved all nodes: what waits waits for the end of it; what runs was let run."""
    changed = waits_for("ReqNodeNotAvail, Reserved for maintenance")(name, seen)
    if name in {*RUNNING, "leaving"} or changed is None:
        return changed
    return replace(
        changed, nodes=tuple(replace(n, states=frozenset({"idle", "maintenance"})) for n in NODES)
    )


def node_removed(name: str, seen: Snapshot) -> Snapshot | None:
    """n02, which the run uses or would use, is no longer in the cluster."""
    rest = tuple(node for node in known(seen.nodes, ()) if node.name != "n02")
    if name not in RUNNING:
        return replace(seen, nodes=rest)
    jobs = tuple(
        replace(job, state=JobState.NODE_FAIL, end_time=NOW - 30.0) if job.state.is_active else job
        for job in known(seen.jobs, ())
    )
    return replace(
        seen,
        nodes=rest,
        jobs=jobs,
        heartbeats=beats(60.0, "training"),
        attempts=(wordless("1007", 30.0), ended()),
    )


def scheduler_away(words: str) -> Change:
    def change(_: str, seen: Snapshot) -> Snapshot:
        why = Unknown(words)
        return replace(seen, jobs=why, nodes=why)

    return change


def directory_away(_: str, seen: Snapshot) -> Snapshot:
    """The run directory's file system is not mounted on the host that looks."""
    why = Unknown(
        f"{seen.run.directory} is not there: nothing launched from here, or its file system is not mounted"
    )
    hidden = (
        "steps", "heartbeats", "attempts", "checkpoints", "kill_switch", "pause", "exclusions", "submissions",
        "phases", "events", "logs", "node_warnings", "launch_ends", "holds", "backup", "sync", "periodic_jobs",
        "chains", "usage", "clocks", "least_used", "shut_folders", "resubmitted",
    )  # fmt: skip
    unmounted = why.why if seen.active_jobs or seen.pending_jobs else ""
    return changed(seen, unmounted=unmounted, **dict.fromkeys(hidden, why))


def directory_shut(why: str, is_full: bool) -> Change:
    def change(_: str, seen: Snapshot) -> Snapshot:
        return changed(
            seen, shut_folders=(UnwritableDirectory(str(seen.run.directory), why, is_full),)
        )

    return change


def switch_away(_: str, seen: Snapshot) -> Snapshot:
    """The kill switch lies on another file system, which is not mounted here."""
    return replace(seen, kill_switch=Unknown("/switches is not mounted here"))


def switch_set(_: str, seen: Snapshot) -> Snapshot:
    return replace(seen, kill_switch=KillSwitch(seen.run.kill_switch, "ben", NOW - 60.0, "spike"))


def own_clock(ahead: float) -> Change:
    def change(_: str, seen: Snapshot) -> Snapshot:
        return replace(seen, clock_ahead=ahead)

    return change


def node_clock(_: str, seen: Snapshot) -> Snapshot:
    reading = ClockReading("n02", NOW + HOUR - 20.0, NOW - 20.0, "heartbeat of rank 1")
    return changed(seen, clocks=(reading,))


def setup_fails(name: str, seen: Snapshot) -> Snapshot | None:
    """A line of slurm.setup ends with an error: the task is over before its trainer, queued jobs
    are held with a record.
    """
    if name in {"training", "saving", "last hour", "leaving", "idle"}:
        return None
    why = "line 2 of slurm.setup failed: module load cuda/99"
    held = pending(reason="JobHeldUser", partition="gpu_p13")
    over = running(state=JobState.FAILED, end_time=NOW - 5.0, start_time=NOW - 9.0, exit_code=1)
    return changed(
        seen, jobs=(over, held), attempts=(wordless("1007", 5.0, why), ended()), heartbeats=beats(DAY, "ended"),
        steps=steps(job_id="1006", age=HOUR), holds=(HoldRecord("1000", "tr11", NOW - 5.0, why),), nodes=IDLE_NODES,
    )  # fmt: skip


def quota(_: str, seen: Snapshot) -> Snapshot:
    return changed(seen, usage=(usage(99),))


def fails(job: str) -> Change:
    """A periodic job whose credentials have expired fails each time."""

    def change(_: str, seen: Snapshot) -> Snapshot:
        failed = cron_job(
            job, exit_code=1, failures_in_a_row=4, message="401: the token has expired"
        )
        return changed(seen, periodic_jobs=(*known(seen.operation.periodic_jobs, ()), failed))

    return change


def without_restart(
    job_id: str, time: float, message: str, held: tuple[str, ...] = (), hold_failed: bool = False
) -> AttemptVerdict:
    """An attempt after which nothing may start before a person has looked."""
    return AttemptVerdict(
        "error",
        None,
        None,
        1,
        message,
        restart=False,
        job_id=job_id,
        time=time,
        held=held,
        hold_failed=hold_failed,
    )


HELD = (without_restart("1007", NOW - 5.0, "line 2 of slurm.setup failed", held=("1000",)),)

EVENTS = (
    Event("nothing", "Nothing happens.", same, ALIVE),
    Event("maintenance", "The site has reserved all nodes for a maintenance.", maintenance, ALIVE),
    Event("reservation over", "The run's reservation has ended or was deleted.", waits_for("ReservationDeleted"), ONLY_NOW),
    Event("hours used up", "The account's hours are used up.", waits_for("AssocGrpCPUMinutesLimit"), ONLY_NOW),
    Event("limit per job", "A limit of time or nodes per job was lowered.",
          waits_for("AssocMaxWallDurationPerJobLimit"), ONLY_NOW),
    Event("partition down", "The partition is set down.", waits_for("PartitionDown"), ONLY_NOW),
    Event("partition inactive", "The partition is set inactive.", waits_for("PartitionInactive"), ONLY_NOW),
    Event("MaxTime lowered", "The partition's MaxTime is below the job's limit.",
          waits_for("PartitionTimeLimit"), ONLY_NOW),
    Event("node removed", "A node is taken out of the cluster.", node_removed, ALIVE),
    Event("scheduler frozen", "slurmctld is frozen or restarts.",
          scheduler_away("squeue did not answer within 12 s"), ALIVE),
    Event("munge expired", "The credentials of munge are refused.",
          scheduler_away("squeue: Munge decode failed: Expired credential"), ALIVE),
    Event("directory unmounted", "The run directory is not mounted where tr11 looks.", directory_away, ALIVE),
    Event("directory full", "The run directory's file system is full.",
          directory_shut("no byte is left", is_full=True), phases()),
    Event("directory read-only", "The run directory is read-only where tr11 looks.",
          directory_shut("read-only", is_full=False), ALIVE),
    Event("switch unmounted", "The kill switch's file system is not mounted where tr11 looks.", switch_away, ALIVE),
    Event("switch set", "Someone sets the kill switch.", switch_set, phases()),
    Event("clock ahead", "The watching host's clock is an hour ahead.", own_clock(HOUR), ALIVE),
    Event("clock behind", "The watching host's clock is an hour behind.", own_clock(-HOUR), ALIVE),
    Event("node's clock ahead", "The clock of a node is an hour ahead.", node_clock, ALIVE),
    Event("set-up line fails", "A line of slurm.setup fails.", setup_fails, phases(), HELD),
    Event("quota", "The quota of the watched file system is nearly used up.", quota, phases()),
    Event("hub token expired", "The hub refuses the token.", fails("sync"), ALIVE),
    Event("store key expired", "The object store refuses the key.", fails("backup"), ALIVE),
)  # fmt: skip


# ----------------------------------------------------------------------------- what is concluded
class Conclusion(Record):
    """Everything that tr11 makes of a cell: the word, the answer, the acts of the watchdog, and
    whom it tells.
    """

    verdict: Verdict
    may_sleep: bool | None
    acts: tuple[str, ...]
    withheld: tuple[str, ...]
    mails: tuple[str, ...]
    loudest: Severity | None

    def row(self) -> tuple[str, str, str, str]:
        """Verdict, sleep, act and mail as the document shows them."""
        sleep = {True: "yes", False: "no", None: "cannot tell"}[self.may_sleep]
        return (
            self.verdict.word.upper(),
            sleep,
            ", ".join(self.acts) or "-",
            ", ".join(self.mails) or "-",
        )


def conclude(cell: Cell) -> Conclusion:
    """Pure: detectors, verdict, answer, policy and alerts, as one look has them."""
    findings = detect_all(cell.seen)
    verdict = judge(cell.seen, findings)
    found = plan(cell.seen, findings, verdict, ActionHistory(), cell.scene)
    rules = Policy("tr11-176B-ml", "/scratch/tr11", recipients=("duty@site.example",))
    alert_state = look(AlertState(), findings, unjudged_detectors(cell.seen), rules, NOW)
    _, messages = tell(alert_state, rules, NOW)
    said = {name for message in messages for name in message.alerts}
    reported = {finding.detector for finding in findings if finding.fingerprint in said}
    return Conclusion(
        verdict=verdict,
        may_sleep=answer(cell.seen, findings, verdict).may_sleep,
        acts=tuple(f"{action.name} {action.subject}".strip() for action in found.actions),
        withheld=found.withheld,
        mails=tuple(sorted(reported)),
        loudest=max((finding.severity for finding in findings), default=None),
    )


# ----------------------------------------------------------------------------- the document
HEAD = """# Events of the site

What one look concludes when something happens at the site, in each phase of a run. In these tables the run has a live watchdog that
may act, recipients, and three more tasks in its queue; *last hour* is that of a task. A phase in which an event cannot happen has no row. *Sleep* is the answer of `tr11 status`;
*act* is what `tr11 pulse --act` does; *mail* names the findings that people are told of at once (a remark is in the daily summary).

The tables are made by the code that tests them: each row is one case of `tests/tr11ops/watchdog/test_site_events.py`. "You may sleep" is never
said if nothing trains by itself.
"""


def document() -> str:
    """docs/reference/site-events.md."""
    lines = [HEAD]
    for event in EVENTS:
        lines += [f"## {event.name[:1].upper()}{event.name[1:]}", "", event.text, ""]
        lines += ["| phase | verdict | sleep | act | mail |", "|---|---|---|---|---|"]
        for name in PHASES:
            cell = event.cell(name)
            if cell is not None:
                lines.append(f"| {name} | {' | '.join(conclude(cell).row())} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
