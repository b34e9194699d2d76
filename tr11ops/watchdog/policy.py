"""What the watchdog should do about what it sees: findings become a plan of typed actions, each
with its reason.

Pure: no clock, no files, no scheduler. What is not known forbids every action that would rest on
it, and what a person has decided (kill switch, pause, a hold, a finished run) is never undone. The
chain of rules reads from the top of `plan` downwards; each action costs one of a day's budget, and
no incident is treated twice without progress between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from tr11ops.base.observed import Unknown, known
from tr11ops.detect.detector import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.liveness import liveness_outside
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.action_log import ActionHistory
from tr11ops.watchdog import rules
from tr11ops.watchdog.actions import (
    Cancel,
    Exclude,
    Hold,
    Include,
    Plan,
    PolicyContext,
    Power,
    Release,
    Resubmit,
    Stacks,
)
from tr11ops.watchdog.verdict import Verdict, VerdictWord


def plan(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    history: ActionHistory,
    policy_context: PolicyContext,
) -> Plan:
    """What the watchdog should do now. An empty plan: nothing is wrong that it knows a cure for."""
    if verdict.word is VerdictWord.FINISHED or derived.is_finished(snapshot):
        return Plan()
    if snapshot.run.is_watched:
        return Plan()  # whatever is wrong, it is someone else's to repair
    hidden = _hidden(snapshot, history, policy_context)
    if hidden:
        is_critical = any(finding.severity is Severity.CRITICAL for finding in findings)
        if is_critical or verdict.exit_code:
            return Plan(withheld=(f"nothing is done, because something is not known: {hidden}",))
        return Plan()
    if snapshot.kill_switch is not None or policy_context.pause:
        return Plan()  # a person has stopped it: whatever is wrong may stay so
    foreign = _foreign(snapshot, policy_context)
    if foreign:
        return Plan(withheld=(f"nothing is done: {foreign}",) if verdict.exit_code else ())
    draft = rules.Draft(
        snapshot, findings, verdict=verdict, history=history, policy_context=policy_context
    )
    for apply in RULES:
        apply(draft)
    return Plan(tuple(draft.actions), tuple(draft.withheld))


def _hidden(snapshot: Snapshot, history: ActionHistory, policy_context: PolicyContext) -> str:
    """What is not known and must be before anything is done; "" when all is."""
    if history.read_error:
        return history.read_error
    for name, value in (
        ("jobs", snapshot.jobs),
        ("nodes", snapshot.nodes),
        ("attempts", snapshot.attempts),
        ("kill switch", snapshot.kill_switch),
        ("exclusions", snapshot.exclusions),
        ("submissions", snapshot.submissions),
        ("steps", snapshot.steps),
        ("heartbeats", snapshot.heartbeats),
        ("checkpoints", snapshot.checkpoints),
        ("pause", policy_context.pause),
        ("lease", policy_context.holder),
        ("verdicts of attempts", policy_context.endings),
        ("causes of failures", policy_context.blames),
        ("nodes that were let in again", snapshot.readmissions),
    ):
        if isinstance(value, Unknown):
            return f"{name}: {value.why}"
    return next(
        (read_error for read_error in snapshot.read_errors if read_error.startswith("submission")),
        "",
    )


def _foreign(snapshot: Snapshot, policy_context: PolicyContext) -> str:
    """Why the run is someone else's at this moment: a living trainer that no job of ours stands
    for.
    """
    for job_id, variant in derived.other_variants(snapshot).items():
        return f"job {job_id} trains variant {variant} of this run, whose own watchdog sees to it"
    outside = liveness_outside(snapshot)
    if outside is not None:
        return f"it is trained outside the scheduler, as {outside.job_id}"
    holder = known(policy_context.holder, None)
    ours = derived.identifiers_of(known(snapshot.jobs, ()))
    if holder is not None and holder.job_id not in ours:
        return f"a trainer that the scheduler does not know holds the run's lease: {holder.text}"
    return ""


# --------------------------------------------------------------------- the rules, in their order
# Each with what people are told of it: `tr11 init` and docs/how-to/pulse.md show the same words.
RULES: Mapping[Callable[[rules.Draft], None], tuple[Power, ...]] = {
    rules.repair_queue: (
        Power(
            "a job's batch host is lost and no trainer shows life",
            "excludes that host, cancels the job, launches again if nothing is queued behind it",
            "tr11 nodes include NODE",
            (Exclude, Cancel, Resubmit),
        ),
        Power(
            "queued jobs wait for a condition that can never be met",
            "cancels them and launches as many attempts behind what runs",
            "tr11 launch",
            (Cancel, Resubmit),
        ),
        Power(
            "jobs are held for a kill switch or pause that is gone",
            "releases them",
            "scontrol hold JOB",
            (Release,),
        ),
    ),
    rules.end_duplicates: (
        Power(
            "two jobs of the run train at once",
            "cancels the one that does not hold the run's lease",
            "tr11 launch --after JOB",
            (Cancel,),
        ),
    ),
    rules.end_hung: (
        Power(
            f"a job hangs: {rules.HUNG_PATIENCES:g} times the normal silence",
            "keeps its workers' stacks, starts once without the one node that stood out (in two looks, unless "
            "it is dead or stopped), cancels it",
            "the next task goes on",
            (Stacks, Exclude, Cancel),
        ),
    ),
    rules.exclude_blamed: (
        Power(
            "a node that certainly ended a launch is not excluded",
            "excludes it, within the cap",
            "tr11 nodes include NODE",
            (Exclude,),
        ),
    ),
    rules.use_avoided: (
        Power(
            "queued jobs wait for nodes, and some are free that are only avoided, or that tr11 excluded an hour ago",
            "lets the run use as many of these again as are missing: the first time after an hour, then after a day",
            "tr11 nodes exclude NODE",
            (Include,),
        ),
    ),
    rules.use_repaired: (
        Power(
            "a node that tr11 has excluded was out of service, and the site has put it back",
            "lets the run use it again, after the others; once, until it has trained well for a day",
            "tr11 nodes exclude NODE",
            (Include,),
        ),
    ),
    rules.hold_doomed: (
        Power(
            "the next attempts would fail as the last one did, but are not held",
            "holds them for a person",
            "tr11 resume",
            (Hold,),
        ),
    ),
    rules.hold_unbegun: (
        Power(
            "tasks end one after another before anything of tr11 runs in them",
            "holds the others for a person, after resilience.most_tasks_per_fault",
            "tr11 resume",
            (Hold,),
        ),
    ),
    rules.start_again: (
        Power(
            "nothing runs and nothing is queued",
            "launches watch.resubmit_array, unless the last attempt asked for a person",
            "tr11 kill",
            (Resubmit,),
        ),
    ),
}
POWERS = tuple(chain.from_iterable(RULES.values()))
