"""What the watchdog should do about what it sees: findings become a plan of typed actions, each
with its reason.

Pure: no clock, no files, no scheduler. What is not known forbids every action that would rest on
it, and what a person has decided (kill switch, pause, a hold, a finished run) is never undone. The
chain of rules reads from the top of `plan` downwards; each action costs one of a day's budget, and
no incident is treated twice without progress between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import covers, names_of
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.cluster.pending_reasons import is_held, reason_of
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.nodes_left import (
    blame_stands,
    exclude_command,
    excluded_nodes,
    exclusion_limit,
    needed_next,
    nodes_of_partition,
    partition_of,
)
from tr11ops.detect.progress import stacks_since
from tr11ops.detect.unfinished_end import ended_at, is_unbegun
from tr11ops.nodes.queue_exclusions import card_exclusions
from tr11ops.observe import derived
from tr11ops.observe.lost_host import (
    batch_host,
    has_lost_its_host,
    is_zombie,
    seconds_to_wait,
    silent_host,
)
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import plan_repair
from tr11ops.rundir.action_log import LETS_IT_ACT, ActionHistory, ProgressRecord
from tr11ops.rundir.exclusion import ExclusionLimit, NodeStanding
from tr11ops.watchdog.actions import (
    BUDGETS,
    Action,
    Blame,
    Cancel,
    Exclude,
    Hold,
    Include,
    Plan,
    PolicyContext,
    Power,
    Release,
    ReplacementLaunch,
    Resubmit,
    Stacks,
)
from tr11ops.watchdog.verdict import Verdict, VerdictWord
from trainer.contract.record import Record

SURE = 0.8  # from this confidence on, a blamed node is taken for the fault itself
# what was blamed longer ago is history: the node may have been repaired since
BLAME_SECONDS = 86400.0
# reasons for never starting that a new launch does not have
CURABLE = ("DependencyNeverSatisfied",)
# a job is given up after this many times the silence that is normal in its phase
HUNG_PATIENCES = 3.0


def progress(snapshot: Snapshot) -> ProgressRecord:
    """How far the training has come, as far as it is known."""
    newest, iteration = snapshot.newest_sound, derived.iteration(snapshot)
    return ProgressRecord(
        -1 if iteration is None else iteration, -1 if newest is None else newest.step
    )


# ----------------------------------------------------------------------------- the plan
@dataclass
class _Draft:
    """The plan in the making: every proposal passes the budgets and the circuit breaker here."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    history: ActionHistory
    policy_context: PolicyContext
    actions: list[Action] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)

    def propose(self, action: Action, job: Job | None = None) -> bool:
        """Take an action into the plan, unless something speaks against it; says whether it is in."""
        if any(one.incident == action.incident for one in self.actions):
            return False
        against = self._against(action, job)
        if against:
            self.withheld.append(f"{action.words()}; not done: {against}")
            return False
        self.actions.append(action)
        return True

    def _against(self, action: Action, job: Job | None) -> str:
        now = self.snapshot.time
        if job is not None and not self.policy_context.can_modify(job):
            return f"the job belongs to {job.user}, who must do it"
        last = self.history.last(action.incident)
        if last is not None and not progress(self.snapshot).is_beyond(last.progress):
            return f"it was done {duration(now - last.time)} ago and nothing has come of it: a person must look"
        budget = self._budget(action)
        spent = self.history.spent(action.name, now) + sum(
            one.name == action.name for one in self.actions
        )
        if budget is not None and spent >= budget:
            return f"{spent} of {budget} in 24 hours are spent: raise watch.{BUDGETS[action.name]}, or do it by hand"
        return ""

    def _budget(self, action: Action) -> int | None:
        """How often in 24 hours the card allows it; None for what costs nothing."""
        watch = self.snapshot.run.watch
        match action.name:
            case "resubmit":
                return watch.resubmissions_per_day
            case "exclude":
                return watch.exclusions_per_day
            case "cancel":
                return watch.cancellations_per_day
            case _:
                return None


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
    hidden = _hidden(snapshot, history, policy_context)
    if hidden:
        urgent = (
            any(finding.severity is Severity.CRITICAL for finding in findings) or verdict.exit_code
        )
        return Plan(
            withheld=(f"nothing is done, because something is not known: {hidden}",)
            if urgent
            else ()
        )
    if snapshot.kill_switch is not None or policy_context.pause:
        return Plan()  # a person has stopped it: whatever is wrong may stay so
    foreign = _foreign(snapshot, policy_context)
    if foreign:
        return Plan(withheld=(f"nothing is done: {foreign}",) if verdict.exit_code else ())
    draft = _Draft(
        snapshot, findings, verdict=verdict, history=history, policy_context=policy_context
    )
    for rule in RULES:
        rule.apply(draft)
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
        return f"nothing is done: job {job_id} trains variant {variant} of this run, whose own watchdog sees to it"
    outside = derived.liveness_outside(snapshot)
    if outside is not None:
        return f"nothing is done: it is trained outside the scheduler, as {outside.job_id}"
    holder = known(policy_context.holder, None)
    ours = {name for job in known(snapshot.jobs, ()) for name in derived.identifiers(job)}
    if holder is not None and holder.job_id not in ours:
        return f"nothing is done: a trainer that the scheduler does not know holds the run's lease: {holder.text}"
    return ""


# ----------------------------------------------------------------------------- rules
def _repair_queue(draft: _Draft) -> None:
    """Zombie allocations end; what can never start is launched again; what was held for a switch
    now gone goes on.
    """
    repair = plan_repair(draft.snapshot, draft.policy_context.releasable, is_automatic=True)
    for name, reason in repair.taken_over:
        why = f"release {name}: it was held for a kill switch or pause that is gone"
        by = reason_of(reason).held_by or "someone else"
        draft.withheld.append(f"{why}; not done: the scheduler says that {by} holds it ({reason})")
    cancelled: list[Job] = []
    by_hand = derived.command(draft.snapshot, "launch --repair")  # makes the same steps
    for step in repair.steps:
        job = next((one for one in step.jobs if one.job_id == step.job), step.jobs[0])
        if step.action == "release":
            why = "it was held for a kill switch or pause that is gone"
            undo = f"scontrol hold {step.job}"
            release = Release(
                step.job,
                why,
                incident=f"release:{step.job}",
                evidence=_evidence(job),
                undo=undo,
                by_hand=by_hand,
            )
            draft.propose(release, job)
            continue
        if step.action == "exclude":
            time = draft.snapshot.time
            blame = Blame(
                step.node, 1.0, why=step.why, job_id=job.raw_id, time=time, evidence=_evidence(job)
            )
            _exclude(draft, blame, by_hand)
            continue
        dead = tuple(one for one in step.jobs if one.state is JobState.PENDING)
        undo = "nothing brings it back; `tr11 launch` starts the next"
        cancel = Cancel(
            step.job,
            step.why,
            incident=f"cancel:{step.job}",
            evidence=_evidence(job),
            undo=undo,
            by_hand=by_hand,
            owes=derived.queued_tasks(dead),
        )
        if dead and not job.reason.startswith(CURABLE):
            draft.withheld.append(f"{cancel.words()}; not done: another launch would meet the same")
        elif draft.propose(cancel, job):
            cancelled += step.jobs
    _launch_again(draft, cancelled, repair.after)
    _await_zombies(draft)


def _await_zombies(draft: _Draft) -> None:
    """Jobs that have lost their batch host while trainers were alive, or may have: what becomes of
    them, and when.
    """
    snapshot = draft.snapshot
    for job in snapshot.active_jobs:
        silent = silent_host(snapshot, job)
        if silent and not has_lost_its_host(snapshot, job):
            why = f"cancel {job.job_id}: its batch host {silent} does not answer the scheduler"
            when = "when the scheduler has lost its host and no trainer shows life"
            unknown = "whether it is lost is not known yet, and nothing is to be typed before it is"
            draft.withheld.append(f"{why}; not done: {unknown}; {_given_up(draft, when)}")
        if has_lost_its_host(snapshot, job) and not is_zombie(snapshot, job):
            wait = f"no trainer shows life for {duration(seconds_to_wait(snapshot, job))} more"
            why = f"cancel {job.job_id}: its batch host {batch_host(snapshot, job)} is lost, nothing ends it"
            draft.withheld.append(f"{why}; not done: {_given_up(draft, f'when {wait}')}")


def _launch_again(draft: _Draft, cancelled: list[Job], after: str | None) -> None:
    """Launch again what is cancelled now, or was by a pass that came no further; or all, where
    nothing is left.
    """
    snapshot, gone = draft.snapshot, {job.job_id for job in cancelled}
    every = (*snapshot.active_jobs, *snapshot.pending_jobs)
    launched = max((entry.time for entry in known(snapshot.submissions, ())), default=0.0)
    owed = draft.history.owed(launched) + sum(
        action.owes for action in draft.actions if isinstance(action, Cancel)
    )
    if owed:
        gone_names = tuple(action.subject for action in draft.actions if isinstance(action, Cancel))
        relaunch = ReplacementLaunch(f"1-{owed}", after, gone_names)
        draft.actions = [
            replace(action, relaunch=relaunch)
            if isinstance(action, Cancel) and action.owes
            else action
            for action in draft.actions
        ]
        _resubmit(draft, f"1-{owed}", "what could never start was cancelled", after)
    elif cancelled and all(job.job_id in gone for job in every):
        _resubmit(
            draft,
            draft.snapshot.run.watch.resubmit_array,
            "nothing is queued behind the lost job",
            after,
        )


def _end_duplicates(draft: _Draft) -> None:
    """Of two jobs that run at once, the one that holds the lease stays."""
    if not any(finding.detector == "two-attempts" for finding in draft.findings):
        return
    running = [job for job in draft.snapshot.active_jobs if job.state is JobState.RUNNING]
    planned = {action.subject for action in draft.actions}
    running = [job for job in running if job.job_id not in planned]
    holder = known(draft.policy_context.holder, None)
    keeps = [
        job for job in running if holder is not None and holder.job_id in derived.identifiers(job)
    ]
    if len(running) > 1 and not keeps:
        draft.withheld.append(
            "two jobs run at once and neither holds the lease: a person must choose"
        )
        return
    for job in running:
        if job not in keeps and len(running) > 1:
            why = f"job {keeps[0].job_id} holds the run's lease: two trainers must not write one run's checkpoints"
            cancel = Cancel(
                job.job_id,
                why,
                incident=f"cancel:{job.raw_id}",
                evidence=_evidence(job),
                undo="`tr11 launch --after` queues it",
            )
            draft.propose(cancel, job)


def _end_hung(draft: _Draft) -> None:
    """A hung job ends after three times the silence that is normal, and not before its workers'
    stacks were kept.
    """
    snapshot = draft.snapshot
    planned = {action.subject for action in draft.actions}
    for finding in draft.findings:
        job = next((one for one in snapshot.active_jobs if one.job_id == finding.subject), None)
        if finding.detector != "hung" or finding.severity is not Severity.CRITICAL or job is None:
            continue
        liveness = derived.liveness_of(snapshot, job)
        if job.job_id in planned or liveness is None:
            continue
        bound = HUNG_PATIENCES * liveness.patience
        cancel = Cancel(
            job.job_id,
            finding.title,
            incident=f"cancel:{job.raw_id}",
            evidence=finding.evidence,
            undo="the next task of the array goes on",
        )
        if liveness.silent_for(snapshot.time) <= bound:
            draft.withheld.append(
                f"{cancel.words()}; not done: {_given_up(draft, f'after {duration(bound)} of silence')}"
            )
        elif stacks_since(snapshot, job, finding.since) is None:
            _end_after_stacks(draft, job, cancel)
        else:
            draft.propose(cancel, job)


def _given_up(draft: _Draft, when: str) -> str:
    """When a job is given up by the watchdog; where that may not act, no one but a person does it."""
    if draft.policy_context.may_act:
        return f"it is given up {when}"
    return f"tr11 may not act ({LETS_IT_ACT}), else it would be given up {when}"


def _end_after_stacks(draft: _Draft, job: Job, cancel: Cancel) -> None:
    count = len(job.nodes) or job.node_count
    incident = f"stacks:{job.raw_id}"
    undo = "nothing is changed by it"
    stacks = Stacks(
        job.job_id,
        cancel.why,
        incident=incident,
        evidence=cancel.evidence,
        undo=undo,
        attempt=job.raw_id,
        nodes=job.nodes,
        node_count=count,
    )
    if draft.propose(stacks, job):
        draft.propose(replace(cancel, only_after=incident), job)


def _exclude_blamed(draft: _Draft) -> None:
    """Nodes that a launch was surely lost by, and that its controller could not exclude any more."""
    for blame in known(draft.policy_context.blames, ()):
        recent = draft.snapshot.time - blame.time < BLAME_SECONDS
        stands = blame_stands(draft.snapshot, blame.node, blame.time, blame.why)
        if recent and stands and blame.confidence >= SURE:
            by_hand = exclude_command(draft.snapshot, blame.node, blame.why)
            _exclude(draft, blame, by_hand)


def _use_avoided(draft: _Draft) -> None:
    """Nodes that are only avoided are used again where an attempt would wait for them."""
    snapshot = draft.snapshot
    if snapshot.active_jobs or not derived.startable_jobs(snapshot):
        return
    needed = needed_next(snapshot)
    free = {
        node.name for node in nodes_of_partition(snapshot, partition_of(snapshot)) if _is_free(node)
    }
    if snapshot.run.source is not None:
        free -= set(card_exclusions(snapshot.run.source))
    listed = {entry.node: entry for entry in known(snapshot.exclusions, ())}
    avoided = [
        entry
        for entry in listed.values()
        if entry.state == NodeStanding.AVOID and entry.node in free
    ]
    missing = (needed or 0) - len(free - set(listed))
    if not 0 < missing <= len(avoided):
        return
    for entry in sorted(avoided, key=lambda entry: (entry.since or 0.0, entry.node))[:missing]:
        why = f"only {counted(len(free - set(listed)), 'other is', 'others are')} free, an attempt needs {needed}"
        incident = f"include:{entry.node}:{entry.job_id}"
        draft.propose(
            Include(
                entry.node,
                why,
                incident=incident,
                evidence=entry.evidence,
                undo=f"`tr11 nodes exclude {entry.node}`",
            )
        )


def _is_free(node: Node) -> bool:
    return node.is_usable and "idle" in node.states


def _exclude(draft: _Draft, blame: Blame, by_hand: str) -> None:
    listed = excluded_nodes(draft.snapshot)
    planned = {action.subject for action in draft.actions if isinstance(action, Exclude)}
    if blame.node in listed | planned:
        return
    limit = exclusion_limit(draft.snapshot) or ExclusionLimit(0)
    action = Exclude(
        blame.node,
        blame.why,
        incident=f"exclude:{blame.node}:{blame.job_id}",
        evidence=blame.evidence,
        undo=f"`tr11 nodes include {blame.node}`",
        by_hand=by_hand,
        job_id=blame.job_id,
        limit=limit,
    )
    if limit.forbids([blame.node], listed | planned):
        draft.withheld.append(f"{action.words()}; not done: {limit}")
    else:
        draft.propose(action)


def _hold_doomed(draft: _Draft) -> None:
    """The last attempt said that nothing may start before a person has looked, and could not hold
    queued jobs.
    """
    last = next(iter(known(draft.policy_context.endings, ())), None)
    if last is None or not last.hold_failed or draft.snapshot.active_jobs:
        return
    label = derived.label_of(draft.snapshot, last.job_id)
    why = f"attempt {label} ended without hope for the next one: {last.message}"
    _hold_submitted_before(draft, last.time, why)


def _hold_submitted_before(draft: _Draft, moment: float, why: str) -> None:
    """Hold what would start, and was submitted before a fault that it would meet again."""
    startable = derived.startable_jobs(draft.snapshot)
    doomed = [job for job in startable if (job.submit_time or 0.0) < moment]
    for name in names_of(doomed, filter(is_held, draft.snapshot.pending_jobs)):
        job = next(job for job in doomed if covers(name, job))
        draft.propose(
            Hold(name, why, incident=f"hold:{name}", evidence=_evidence(job), undo="`tr11 resume`"),
            job,
        )


def _hold_unbegun(draft: _Draft) -> None:
    """Tasks ended one after another before anything of tr11 ran in them, which would have counted
    them itself.
    """
    snapshot = draft.snapshot
    if snapshot.active_jobs:
        return
    began = max((attempt.changed for attempt in known(snapshot.attempts, ())), default=0.0)
    ended = [
        job
        for job in known(snapshot.jobs, ())
        if is_unbegun(snapshot, job) and ended_at(job) > began
    ]
    # which left in order, with nothing to do
    unbegun = [job for job in ended if job.state is not JobState.COMPLETED]
    if len(unbegun) < draft.snapshot.run.resilience.most_tasks_per_fault:
        return
    reasons = sorted({f"{job.state.value} {job.reason}".strip() for job in unbegun})
    why = f"{len(unbegun)} tasks ended before they began to work ({', '.join(reasons)}), and it would meet the same"
    _hold_submitted_before(draft, max(map(ended_at, unbegun)), why)


def _start_again(draft: _Draft) -> None:
    """Nothing runs and nothing waits: the launch of the card's [watch], unless the last attempt
    forbids it.
    """
    snapshot = draft.snapshot
    if draft.verdict.word is not VerdictWord.DOWN or snapshot.active_jobs or snapshot.pending_jobs:
        return
    starts = any(isinstance(action, Resubmit) for action in draft.actions)
    if starts or not any(finding.detector == "down" for finding in draft.findings):
        return
    why = "nothing runs and nothing is queued"
    against = next(_forbidding(draft), "")
    if against:
        draft.withheld.append(
            f"resubmit {draft.snapshot.run.watch.resubmit_array}: {why}; not done: {against}"
        )
    else:
        _resubmit(draft, draft.snapshot.run.watch.resubmit_array, why, None)


def _forbidding(draft: _Draft) -> Iterator[str]:
    if not known(draft.snapshot.submissions, ()):
        yield "it was never launched: the first launch is a person's (`tr11 launch`)"
    marker = derived.last_marker(draft.snapshot)
    newest = derived.last_attempt(draft.snapshot)
    if newest is not None and isinstance(newest.end, Unknown):
        yield f"the end of the last attempt cannot be read: {newest.end.why}"
    if marker is not None and newest is not None and newest.end == marker:
        if marker.reason == "refused":
            yield f"the last attempt refused to start, and the next one would again: {marker.message}"
        elif not marker.restart:
            yield f"the last attempt ended by {marker.reason} and is not to go on"
    last = next(iter(known(draft.policy_context.endings, ())), None)
    if (
        last is not None
        and newest is not None
        and last.job_id == newest.job_id
        and not last.restart
    ):
        yield f"the last attempt asked for a person: {last.message}"
    if any(
        finding.detector == "unfinished-end" and finding.severity is Severity.CRITICAL
        for finding in draft.findings
    ):
        yield "two attempts in a row did not end by themselves, without progress"


def _resubmit(draft: _Draft, array: str, why: str, after: str | None) -> None:
    marker = derived.last_marker(draft.snapshot)
    evidence = (
        () if marker is None else (f"the last exit record says {marker.reason} {marker.place}",)
    )
    undo = "`scancel` of the job it names, or `tr11 kill`"
    draft.propose(
        Resubmit(array, why, incident="resubmit", evidence=evidence, undo=undo, after=after)
    )


def _evidence(job: Job) -> tuple[str, ...]:
    reason = ""
    if job.reason:
        reason = f", {job.reason}"
    nodes = len(job.nodes) or job.node_count
    return (f"job {job.job_id} of {job.user}: {job.state.value}{reason}, {counted(nodes, 'node')}",)


# ----------------------------------------------------------------------------- the rules, in their
# order
class _Rule(Record):
    """One rule of the chain, and what people are told of it: `tr11 init` and docs/pulse.md show the
    same words.
    """

    apply: Callable[[_Draft], None]
    powers: tuple[Power, ...]


RULES = (
    _Rule(
        _repair_queue,
        (
            Power(
                "a job's batch host is lost and no trainer shows life",
                "excludes that host, cancels the job, launches again if nothing waits behind it",
                "tr11 nodes include NODE",
                (Exclude, Cancel, Resubmit),
            ),
            Power(
                "queued jobs wait for a condition that can never be met",
                "cancels them and launches as many attempts behind what lives",
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
    ),
    _Rule(
        _end_duplicates,
        (
            Power(
                "two jobs of the run train at once",
                "cancels the one that does not hold the run's lease",
                "tr11 launch --after JOB",
                (Cancel,),
            ),
        ),
    ),
    _Rule(
        _end_hung,
        (
            Power(
                f"a job hangs for {HUNG_PATIENCES:g} times the silence that is normal",
                "keeps its workers' stacks and who stood out, and cancels it",
                "the next task goes on",
                (Stacks, Cancel),
            ),
        ),
    ),
    _Rule(
        _exclude_blamed,
        (
            Power(
                "a node that a launch was surely lost by is not excluded",
                "excludes it, within the cap",
                "tr11 nodes include NODE",
                (Exclude,),
            ),
        ),
    ),
    _Rule(
        _use_avoided,
        (
            Power(
                "queued jobs wait for nodes while some are free that are only avoided",
                "lets the run use as many of these again as are missing",
                "tr11 nodes exclude NODE",
                (Include,),
            ),
        ),
    ),
    _Rule(
        _hold_doomed,
        (
            Power(
                "the next attempts would fail as the last one did, and are not held",
                "holds them for a person",
                "tr11 resume",
                (Hold,),
            ),
        ),
    ),
    _Rule(
        _hold_unbegun,
        (
            Power(
                "tasks end one after another before anything of tr11 runs in them",
                "holds the others for a person, after resilience.most_tasks_per_fault",
                "tr11 resume",
                (Hold,),
            ),
        ),
    ),
    _Rule(
        _start_again,
        (
            Power(
                "nothing runs and nothing is queued",
                "launches watch.resubmit_array, unless the last attempt asked for a person",
                "tr11 kill",
                (Resubmit,),
            ),
        ),
    ),
)
POWERS = tuple(power for rule in RULES for power in rule.powers)
