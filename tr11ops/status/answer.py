"""May a person sleep? The plain answer to a verdict, with what is missing for it, and who is at it
already. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.detect.detector import Finding, Severity, by_cause
from tr11ops.detect.watch import ALONE, is_wanted, watchdog_fault
from tr11ops.observe import derived
from tr11ops.observe.forecast import end_of, no_cover, queue_coverage_seconds
from tr11ops.observe.liveness import liveness_outside, may_start_again
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.verdict import Verdict, VerdictWord
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.alerts.state import Alert

NIGHT_SECONDS = 12 * derived.HOUR  # a queue that lasts so long needs no one before the morning
UNKNOWN = "It cannot be told whether you may sleep"
PERSON = "Do not sleep: a person is needed"  # beside exit code 1, and nowhere else
FIRST = "Before you sleep"  # nothing is wrong now, and the night is not safe
DONE = "Nothing is left to train"
NO_WATCHDOG, NO_RECIPIENTS, SHORT_QUEUE, STOPPED, SITE = (
    "watchdog",
    "recipients",
    "queue",
    "resume",
    "site",
)
NO_MAIL, NO_ANSWER, SLOW_NODE = "mail", "scheduler", "node"
ASK_THE_SITE = "ask the site when"
# a message that waits longer reaches no one: each look tries it again
MAIL_SECONDS = 15 * derived.MINUTE
NEEDS = {  # each kind of need, in words that name no one: what is published says them too
    NO_WATCHDOG: ALONE,
    NO_RECIPIENTS: "no one would be told",
    SHORT_QUEUE: "the queue does not last the night",
    STOPPED: "nothing trains until it is resumed",
    SITE: "nothing trains until the site lets it",
    NO_MAIL: "alerts are not delivered",
    SLOW_NODE: "a node that was found slow is not excluded",
    NO_ANSWER: "the scheduler does not answer",
}


class Need(Record):
    """What is missing before a person may sleep. `kind` is a key of NEEDS; `fix` is a command, or
    what to set.
    """

    kind: str
    text: str
    fix: str


class SleepAnswer(Record):
    """`may_sleep` is None where it cannot be told. `text` is a sentence without a full stop."""

    may_sleep: bool | None
    text: str
    needs: tuple[Need, ...] = ()


def answer(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    extra: ExtraObservations = ExtraObservations(),  # noqa: B008  frozen
) -> SleepAnswer:
    """Whether no one is needed before the morning: nothing is wrong, the training goes on, and a
    fault would be told.

    A verdict that needs a person, or a critical finding, says no. So does the lack of a living watchdog, of someone
    whom it tells, and of a queue that lasts NIGHT_SECONDS or to the end. What is lesser waits for the morning.
    A fault that someone has acknowledged or owns is still a fault, but someone is up.
    """
    if verdict.word is VerdictWord.UNKNOWN:
        return SleepAnswer(None, UNKNOWN, tuple(_unseen(snapshot)))
    trouble = _trouble(findings, verdict, extra)
    if trouble:
        return SleepAnswer(False, trouble)
    # their agent starts the workers again, if it lives
    is_between = any(may_start_again(snapshot, job) for job in snapshot.active_jobs)
    if verdict.word is VerdictWord.STARTING and is_between:
        return SleepAnswer(None, UNKNOWN)
    warnings = sum(finding.severity is Severity.WARNING for finding in by_cause(findings))
    lesser = ""
    if warnings:
        lesser = f"; {warnings} warning{'s' * (warnings > 1)} can wait for the morning"
        if verdict.word is VerdictWord.SLOW:
            lesser += ", and the training is slow until then"
    if verdict.word is VerdictWord.FINISHED:
        return SleepAnswer(True, f"{DONE}{lesser}")
    if verdict.word.is_stop:
        needs = tuple(needs_to_go_on(snapshot, findings, NEEDS[STOPPED]))
        said = "It goes on once it is resumed"
        slow = "; ".join(need.text for need in needs if need.kind == SLOW_NODE)
        if slow:
            said += f"; besides, {slow}"
        return SleepAnswer(False, said, needs)
    return _going_on(snapshot, extra, lesser)


def _trouble(findings: tuple[Finding, ...], verdict: Verdict, extra: ExtraObservations) -> str:
    """What a person must get up for, and who has it; "" where nothing is critical."""
    alerts = known(extra.alerts, ())
    critical = [finding for finding in findings if finding.severity is Severity.CRITICAL]
    if verdict.exit_code or critical:
        owner = _owner(critical, alerts)
        if owner:
            return f"{owner} has it; if that is you, stay up"
        return PERSON
    # one that is no longer found closes by itself
    open_ones = [one for one in alerts if one.severity is Severity.CRITICAL and not one.clear_looks]
    if open_ones and not all(alert.holder for alert in open_ones):
        return f"{FIRST}: a critical alert is open, and no one has taken it"
    return ""


def _going_on(snapshot: Snapshot, extra: ExtraObservations, lesser: str) -> SleepAnswer:
    """The answer where nothing is wrong now: will it go on, and would a fault be told?"""
    # a stop that is not seen stops all the same
    needed = (snapshot.jobs, snapshot.operation.periodic_jobs, derived.stop_of(snapshot))
    hidden = next((value.why for value in needed if isinstance(value, Unknown)), None)
    if hidden is not None:
        return SleepAnswer(None, f"{UNKNOWN} ({hidden})", tuple(_unseen(snapshot)))
    needs = tuple(_needs(snapshot, extra))
    if needs:
        return SleepAnswer(False, f"{FIRST}: {'; '.join(need.text for need in needs)}", needs)
    blind = " (alerts are unknown)" if isinstance(extra.alerts, Unknown) else ""
    return SleepAnswer(True, f"You may sleep{lesser}{blind}")


def published_answer(may_sleep: bool | None, word: VerdictWord, kinds: Iterable[str]) -> str:
    """The answer as it may be published: a sentence without a full stop that names no node, person
    or folder.
    """
    words = "; ".join(NEEDS[kind] for kind in kinds)
    if may_sleep is None:
        return UNKNOWN
    if may_sleep:
        if word is VerdictWord.FINISHED:
            return DONE
        return "You may sleep"
    if words:
        return f"{FIRST}: {words}"
    return PERSON


# ----------------------------------------------------------------------------- what is missing
def _unseen(snapshot: Snapshot) -> Iterable[Need]:
    if isinstance(snapshot.jobs, Unknown):
        yield Need(
            NO_ANSWER,
            f"{NEEDS[NO_ANSWER]} ({snapshot.jobs.why})",
            derived.command(snapshot, "doctor"),
        )


def _needs(snapshot: Snapshot, extra: ExtraObservations) -> Iterable[Need]:
    fault = watchdog_missing(snapshot, extra)
    if fault:
        yield Need(NO_WATCHDOG, fault, derived.command(snapshot, snapshot.run.start_of_watchdog))
    closed = derived.closed_by_site(snapshot)
    if closed is not None:
        yield Need(SITE, f"{NEEDS[SITE]} ({closed.meaning})", ASK_THE_SITE)
    if not snapshot.run.alerts.has_recipients:
        yield Need(NO_RECIPIENTS, NEEDS[NO_RECIPIENTS], "set alerts.recipients in the card")
    stuck = _stuck_mail(snapshot, extra)
    if stuck:
        yield Need(NO_MAIL, stuck, derived.command(snapshot, "alerts test"))
    if isinstance(snapshot.pause, KillSwitch):
        yield from resume_needs(snapshot, "the run is paused, so nothing trains after this task")
    elif snapshot.run.is_watched:
        return  # what comes after it is someone else's to say
    elif fault or not resubmits(snapshot) or _is_blocked(snapshot):
        # else the site's need has said it
        short = ""
        if closed is None:
            short = _short_queue(snapshot, extra)
        if short:
            why, command = _beyond_the_queue(snapshot, is_watched=not fault)
            yield Need(SHORT_QUEUE, short + why, command)


def needs_to_go_on(snapshot: Snapshot, findings: tuple[Finding, ...], words: str) -> Iterable[Need]:
    """What lets a stopped run go on; before that, what keeps it off a node that was found slow."""
    for finding in findings:
        if finding.subject and finding.costs_time:
            yield Need(SLOW_NODE, finding.title, finding.fix)
    yield from resume_needs(snapshot, words)


def resume_needs(snapshot: Snapshot, words: str) -> Iterable[Need]:
    """What lets a stopped run go on; where nothing is queued, that is a launch too."""
    if snapshot.run.is_watched:
        yield Need(STOPPED, words, "who submitted it decides")
        return
    resume, *launch = derived.go_on(snapshot, behind=True)
    yield Need(STOPPED, words, resume)
    for line in launch:
        yield Need(SHORT_QUEUE, "nothing is queued", line)


def _beyond_the_queue(snapshot: Snapshot, is_watched: bool) -> tuple[str, str]:
    """Why nothing lengthens a queue that is short, and the command that does."""
    idle_work = no_cover(snapshot)
    more = derived.launch_more(snapshot)
    first = ""
    if idle_work:
        first = f" ({idle_work[0]})"
    if derived.some_wait_for_site(snapshot):
        return f", and more starts when the site is done{first}", ASK_THE_SITE
    if derived.some_wait_for_nodes(snapshot):
        return f", and more starts when its nodes can be used{first}", derived.command(
            snapshot, "nodes list"
        )
    if _is_blocked(snapshot):
        return f", and what else is queued does not start by itself{first}", more
    if idle_work:
        return f", and what else is queued covers none of it{first}", more
    if is_watched and snapshot.run.watch.resubmissions > 0:
        return ", and the watchdog may not resubmit again today", more
    return "", more


def _stuck_mail(snapshot: Snapshot, extra: ExtraObservations) -> str:
    """Why an alert would reach no one; "" where no message waits for long. A server that refuses is
    one reason.
    """
    waiting = extra.waiting
    if isinstance(waiting, Unknown):
        return f"whether alerts are delivered cannot be seen ({waiting.why})"
    if waiting is None or not waiting.count or waiting.since is None:
        return ""
    waits = max(0.0, snapshot.time - waiting.since)
    if not waiting.trouble and waits < MAIL_SECONDS:
        return ""
    count = counted(waiting.count, "message has", "messages have")
    why = ""
    if waiting.trouble:
        why = f": {waiting.trouble}"
    return f"{NEEDS[NO_MAIL]}, {count} waited for {duration(waits)}{why}"


def _is_blocked(snapshot: Snapshot) -> bool:
    """Whether something queued waits for the site or a person: what the watchdog submits would meet
    the same.
    """
    return len(derived.sure_jobs(snapshot)) < len(snapshot.pending_jobs)


def resubmits(snapshot: Snapshot) -> bool:
    """Whether the watchdog may submit again when nothing is queued: the card lets it, and its
    budget is not spent.
    """
    budget, spent = snapshot.run.watch.resubmissions, snapshot.resubmitted
    return not isinstance(spent, Unknown) and spent < budget


def watchdog_missing(snapshot: Snapshot, extra: ExtraObservations) -> str:
    """Why nothing looks at the run regularly, as far as tr11 knows, with the last look that someone
    had made; "" where a watchdog lives.
    """
    jobs = (job for job in known(snapshot.operation.periodic_jobs, ()) if is_wanted(snapshot, job))
    fault = watchdog_fault(jobs, snapshot.time)
    if fault != ALONE or extra.looked is None:
        return fault
    ago = duration(abs(snapshot.time - extra.looked))
    return (
        "no watchdog is installed; looks made by hand or by a script can stop at any time: "
        f"the last was {ago} ago, by {extra.looked_by or 'someone'}"
    )


def _short_queue(snapshot: Snapshot, extra: ExtraObservations) -> str:
    """Why the training stops before the morning; "" where the queue lasts the night, or to the end
    of the training.
    """
    if liveness_outside(snapshot) is not None and not snapshot.active_jobs:
        return "it trains outside the scheduler, so nothing starts it again"
    covered, end = queue_coverage_seconds(snapshot, only_sure=True), end_of(snapshot)
    if covered is None:  # a task without a limit
        return ""
    if covered >= NIGHT_SECONDS or (end is not None and covered >= end.earliest):
        return ""
    if end is None:
        left = ""
    else:
        left = f" of the {duration(end.earliest)} left"
    return f"the queue covers {duration(covered)}{left}"


# ----------------------------------------------------------------------------- who has it
def _owner(critical: list[Finding], alerts: tuple[Alert, ...]) -> str:
    """Who has all that is critical; "" where some of it is no one's."""
    if not critical:
        return ""

    owners = {name: alert.holder for alert in alerts for name in alert.names}
    people = [owners.get(finding.fingerprint, "") for finding in critical]
    if all(people):
        return " and ".join(dict.fromkeys(people))
    return ""
