"""The rules of the watchdog's policy: what each proposes about the trouble that it knows.

Pure, as `policy.py`, which says whether anything may be done at all, and in which order the rules
apply. Every proposal passes the day's budgets here, and no incident is treated twice without
progress between.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tr11ops.detect.progress import holds_up, stacks_since
from tr11ops.detect.unfinished_end import ended_at, is_unbegun
from tr11ops.nodes.queue_exclusions import why_not_leave_out
from tr11ops.observe import derived
from tr11ops.observe.liveness import (
    batch_host,
    has_lost_its_host,
    is_zombie,
    liveness_of,
    lives_of,
    seconds_to_wait,
    silent_host,
)
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import plan_repair
from tr11ops.rundir.action_log import LETS_IT_ACT, ActionHistory, ProgressRecord
from tr11ops.rundir.exclusion import HANG, ExclusionLimit, NodeStanding, after_attribution
from tr11ops.watchdog.actions import (
    BUDGETS,
    Action,
    Blame,
    Cancel,
    Exclude,
    Hold,
    Include,
    PolicyContext,
    Release,
    Resubmit,
    Stacks,
)
from tr11ops.watchdog.hangs import hang_case
from tr11ops.watchdog.repairs import after_need, in_reserve, put_back
from tr11ops.watchdog.verdict import Verdict, VerdictWord

SURE = 0.8  # from this confidence on, a blamed node is taken for the fault itself
# what was blamed longer ago is history: the node may have been repaired since
BLAME_SECONDS = 86400.0
# reasons for never starting that a new launch does not have
CURABLE = ("DependencyNeverSatisfied",)
# a job is given up after this many times the silence that is normal in its phase
HUNG_PATIENCES = 3.0


def progress(snapshot: Snapshot) -> ProgressRecord:
    """How far the training has come, as far as it is known."""
    reached = ProgressRecord()
    iteration = derived.iteration(snapshot)
    if iteration is not None:
        reached = replace(reached, iteration=iteration)
    newest = snapshot.newest_sound
    if newest is not None:
        reached = replace(reached, checkpoint=newest.step)
    return reached


@dataclass
class Draft:
    """The plan in the making: every proposal passes the budgets and the circuit breaker here."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    history: ActionHistory
    policy_context: PolicyContext
    actions: list[Action] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)

    def withhold(self, what: str, against: str) -> None:
        """Note what is wrong and not done, and what speaks against it."""
        self.withheld.append(f"{what}; not done: {against}")

    def propose(self, action: Action, job: Job | None = None) -> bool:
        """Take an action into the plan, unless something speaks against it; says whether it is in."""
        if any(one.incident == action.incident for one in self.actions):
            return False
        against = self._against(action, job)
        if against:
            self.withhold(action.words(), against)
            return False
        self.actions.append(action)
        return True

    def planned(self, *kinds: type[Action]) -> set[str]:
        """The subjects of the actions that are in the plan: of these kinds, or of all."""
        return {action.subject for action in self.actions if isinstance(action, kinds or Action)}

    def _against(self, action: Action, job: Job | None) -> str:
        now = self.snapshot.time
        if job is not None and not self.policy_context.can_modify(job):
            return f"the job belongs to {job.user}, who must do it"
        last = self.history.last(action.incident)
        if last is not None and not progress(self.snapshot).is_beyond(last.progress):
            return f"it was done {duration(now - last.time)} ago and nothing has come of it: a person must look"
        if action.name not in BUDGETS:  # it costs nothing
            return ""
        key = BUDGETS[action.name]
        budget = getattr(self.snapshot.run.watch, key)
        here = [one for one in self.actions if one.name == action.name]
        spent = self.history.spent(action.name, now) + len(here)
        if spent >= budget:
            return f"{spent} of {budget} in 24 hours are spent: raise watch.{key}, or do it by hand"
        return ""


def repair_queue(draft: Draft) -> None:
    """Zombie allocations end; what can never start is launched again; what was held for a switch
    now gone goes on.
    """
    repair = plan_repair(draft.snapshot, draft.policy_context.releasable, is_automatic=True)
    for name, reason in repair.taken_over:
        why = f"release {name}: it was held for a kill switch or pause that is gone"
        by = reason_of(reason).held_by or "someone else"
        draft.withhold(why, f"the scheduler says that {by} holds it ({reason})")
    cancelled: list[Job] = []
    by_hand = derived.command(draft.snapshot, "launch --repair")  # makes the same steps
    for step in repair.steps:
        job = next((one for one in step.jobs if one.job_id == step.job), step.jobs[0])
        if step.action == "release":
            release = Release(
                step.job,
                "it was held for a kill switch or pause that is gone",
                incident=f"release:{step.job}",
                evidence=_evidence(job),
                undo=f"scontrol hold {step.job}",
                by_hand=by_hand,
            )
            draft.propose(release, job)
            continue
        if step.action == "exclude":
            blame = Blame(
                step.node,
                1.0,
                why=step.why,
                job_id=job.raw_id,
                time=draft.snapshot.time,
                evidence=_evidence(job),
            )
            _exclude(draft, blame, by_hand)
            continue
        dead = tuple(one for one in step.jobs if one.state is JobState.PENDING)
        cancel = Cancel(
            step.job,
            step.why,
            incident=f"cancel:{step.job}",
            evidence=_evidence(job),
            undo="nothing brings it back; `tr11 launch` starts the next",
            by_hand=by_hand,
            owes=derived.queued_tasks(dead),
        )
        if dead and not job.reason.startswith(CURABLE):
            draft.withhold(cancel.words(), "another launch would meet the same")
        elif draft.propose(cancel, job):
            cancelled += step.jobs
    _launch_again(draft, cancelled, repair.after)
    _await_zombies(draft)


def _await_zombies(draft: Draft) -> None:
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
            draft.withhold(why, f"{unknown}; {_given_up(draft, when)}")
        if has_lost_its_host(snapshot, job) and not is_zombie(snapshot, job):
            wait = f"no trainer shows life for {duration(seconds_to_wait(snapshot, job))} more"
            why = f"cancel {job.job_id}: its batch host {batch_host(snapshot, job)} is lost, nothing ends it"
            draft.withhold(why, _given_up(draft, f"when {wait}"))


def _launch_again(draft: Draft, cancelled: list[Job], after: str | None) -> None:
    """Launch again what is cancelled now, or was by a pass that came no further; or all, where
    nothing is left.
    """
    snapshot = draft.snapshot
    gone = {job.job_id for job in cancelled}
    every = (*snapshot.active_jobs, *snapshot.pending_jobs)
    launched = max((entry.time for entry in known(snapshot.submissions, ())), default=0.0)
    cancels = [action for action in draft.actions if isinstance(action, Cancel)]
    owed = draft.history.owed(launched) + sum(action.owes for action in cancels)
    if owed:
        why = "what could never start was cancelled"
        relaunch = _resubmission(draft, f"1-{owed}", why, after)
        replaced = tuple(action.subject for action in cancels)
        relaunch = replace(relaunch, replaces=replaced)
        draft.actions = [
            replace(action, relaunch=relaunch)
            if isinstance(action, Cancel) and action.owes
            else action
            for action in draft.actions
        ]
        draft.propose(relaunch)
    elif cancelled and all(job.job_id in gone for job in every):
        why = "nothing is queued behind the lost job"
        draft.propose(_resubmission(draft, snapshot.run.watch.resubmit_array, why, after))


def end_duplicates(draft: Draft) -> None:
    """Of two jobs that run at once, the one that holds the lease stays."""
    if not any(finding.detector == "two-attempts" for finding in draft.findings):
        return
    planned = draft.planned()
    running = [
        job
        for job in draft.snapshot.active_jobs
        if job.state is JobState.RUNNING and job.job_id not in planned
    ]
    if len(running) < 2:
        return
    holder = known(draft.policy_context.holder, None)
    keeps = [
        job for job in running if holder is not None and holder.job_id in derived.identifiers(job)
    ]
    if not keeps:
        draft.withheld.append(
            "two jobs run at once and neither holds the lease: a person must choose"
        )
        return
    why = f"job {keeps[0].job_id} holds the run's lease: two trainers must not write one run's checkpoints"
    for job in running:
        if job not in keeps:
            cancel = Cancel(
                job.job_id,
                why,
                incident=f"cancel:{job.raw_id}",
                evidence=_evidence(job),
                undo="`tr11 launch --after` queues it",
            )
            draft.propose(cancel, job)


def end_hung(draft: Draft) -> None:
    """A hung job ends after three times the silence that is normal, and not before its workers'
    stacks were kept.
    """
    snapshot = draft.snapshot
    planned = draft.planned()
    for finding in draft.findings:
        job = next((one for one in snapshot.active_jobs if one.job_id == finding.subject), None)
        if finding.detector != "hung" or finding.severity is not Severity.CRITICAL or job is None:
            continue
        liveness = liveness_of(snapshot, job)
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
            draft.withhold(cancel.words(), _given_up(draft, f"after {duration(bound)} of silence"))
        elif snapshot.run.standing is not None:
            _end_other_trainer(draft, job, cancel, since=finding.since, bound=bound)
        elif stacks_since(snapshot, job, finding.since) is None:
            _end_after_stacks(draft, job, cancel)
        else:
            _start_without_suspect(draft, job, finding.since)
            draft.propose(cancel, job)


def _start_without_suspect(draft: Draft, job: Job, since: float | None) -> None:
    """The one node that holds a job up is left out of the next start, where enough others are free: a
    second hang costs as much as the first. It is a suspect, avoided after the second hang of a week,
    and excluded after the third.
    """
    snapshot = draft.snapshot
    kept = stacks_since(snapshot, job, since)
    node = holds_up(kept, since)
    out = excluded_nodes(snapshot) | draft.planned(Exclude)
    if snapshot.scheduler != "slurm" or kept is None or not node or node in out:
        return  # other schedulers' nodes are one machine's
    records = known(draft.policy_context.suspects, ())
    own = next((entry for entry in records if entry.node == node), None)
    before: list[str] = []
    if own is not None and own.state == NodeStanding.SUSPECT:
        # it may be a suspect again because it was needed, which takes no hang back
        hangs = draft.history.count(f"hang:{node}:")
        before = [own.fault] * max(1, hangs)
    limit = exclusion_limit(snapshot) or ExclusionLimit(0)
    action = Exclude(
        node,
        f"job {job.job_id} hung: {kept.sentence}",
        incident=f"hang:{node}:{job.raw_id}",
        evidence=(kept.sentence,),
        undo=f"`tr11 nodes include {node}`",
        job_id=job.raw_id,
        limit=limit,
        state=after_attribution(HANG, before, own=own, others=()),
        fault=HANG,
    )
    states = {one.name: one.states for one in known(snapshot.nodes, ())}
    against = why_not_leave_out((node,), out, limit=limit, states=states, own=job.nodes)
    if against:
        draft.withhold(
            action.words(), f"{against}: a spare of the job's own takes its place, if it has one"
        )
    else:
        draft.propose(action)


def _given_up(draft: Draft, when: str) -> str:
    """When a job is given up by the watchdog; where that may not act, no one but a person does it."""
    if draft.policy_context.may_act:
        return f"it is given up {when}"
    return f"tr11 may not act ({LETS_IT_ACT}), else it would be given up {when}"


def _end_other_trainer(
    draft: Draft, job: Job, cancel: Cancel, since: float | None, bound: float
) -> None:
    """A trainer that knows nothing of tr11 ends in a later pass than the one that told people of its
    hang, and only where its processes prove it. That no stack could be taken hinders nothing.
    """
    snapshot = draft.snapshot
    kept = stacks_since(snapshot, job, since)
    looked = draft.history.last(f"stacks:{job.raw_id}") is not None
    if kept is None and not looked:
        draft.propose(_keep_stacks(job, cancel, "stacks"), job)
        draft.withhold(cancel.words(), "its workers' stacks are kept first")
        return
    if kept is not None and kept.time >= snapshot.time:
        draft.withhold(cancel.words(), "people are told first; the next pass acts")
        return
    lives = lives_of(snapshot, derived.identifiers(job))
    case = hang_case(lives, kept, snapshot.time, bound)
    if case.is_proved:
        _start_without_suspect(draft, job, since)
        draft.propose(replace(cancel, evidence=(*case.evidence, *cancel.evidence)), job)
        return
    if case.wants_look and kept is not None:
        again = _keep_stacks(job, cancel, "stacks-again")
        # each look leads to one more, not the hang to one in all
        draft.propose(replace(again, incident=f"{again.incident}:{int(kept.time)}"), job)
    draft.withhold(cancel.words(), case.why)


def _end_after_stacks(draft: Draft, job: Job, cancel: Cancel) -> None:
    stacks = _keep_stacks(job, cancel, "stacks")
    if draft.propose(stacks, job):
        draft.propose(replace(cancel, only_after=stacks.incident), job)


def _keep_stacks(job: Job, cancel: Cancel, incident: str) -> Stacks:
    return Stacks(
        job.job_id,
        cancel.why,
        incident=f"{incident}:{job.raw_id}",
        evidence=cancel.evidence,
        undo="nothing is changed by it",
        attempt=job.raw_id,
        nodes=job.nodes,
        node_count=len(job.nodes) or job.node_count,
    )


def exclude_blamed(draft: Draft) -> None:
    """Nodes that a launch was surely lost by, and that its controller could not exclude any more."""
    for blame in known(draft.policy_context.blames, ()):
        recent = draft.snapshot.time - blame.time < BLAME_SECONDS
        stands = blame_stands(draft.snapshot, blame.node, blame.time, blame.why)
        if recent and stands and blame.confidence >= SURE:
            by_hand = exclude_command(draft.snapshot, blame.node, blame.why)
            _exclude(draft, blame, by_hand)


def use_avoided(draft: Draft) -> None:
    """Nodes that are only avoided, or were excluded a while ago, are used again where an attempt would
    wait for them: those last of which more is known. The checks before a launch look at them.
    """
    snapshot = draft.snapshot
    if snapshot.active_jobs or not derived.startable_jobs(snapshot):
        return
    free = {
        node.name for node in nodes_of_partition(snapshot, partition_of(snapshot)) if _is_free(node)
    }
    free -= snapshot.run.excluded_nodes
    listed = known(snapshot.exclusions, ())
    to_use = [entry for entry in in_reserve(listed, snapshot.time) if entry.node in free]
    others = len(free - {entry.node for entry in listed})
    needed = needed_next(snapshot)
    missing = (needed or 0) - others
    if not 0 < missing <= len(to_use):
        return
    why = f"only {counted(others, 'other is', 'others are')} free, an attempt needs {needed}"
    for entry in to_use[:missing]:
        include = Include(
            entry.node,
            why,
            incident=f"include:{entry.node}:{entry.job_id}",
            evidence=entry.evidence,
            undo=f"`tr11 nodes exclude {entry.node}`",
            then=after_need(entry),
        )
        draft.propose(include)


def use_repaired(draft: Draft) -> None:
    """Nodes that the site has taken out of service since they were excluded, and put back, are used
    again, after the others; the checks before a launch look at them.
    """
    for entry in put_back(draft.snapshot):
        since = duration(draft.snapshot.time - (entry.out or draft.snapshot.time))
        include = Include(
            entry.node,
            f"the site had it out of service, since {since} ago, and has put it back",
            incident=f"repaired:{entry.node}:{entry.since}",
            evidence=entry.evidence,
            undo=f"`tr11 nodes exclude {entry.node}`",
            then=NodeStanding.RETURNED,
        )
        draft.propose(include)


def _is_free(node: Node) -> bool:
    return node.is_usable and "idle" in node.states


def _exclude(draft: Draft, blame: Blame, by_hand: str) -> None:
    left_out = excluded_nodes(draft.snapshot) | draft.planned(Exclude)
    if blame.node in left_out:
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
    if limit.forbids([blame.node], left_out):
        draft.withhold(action.words(), str(limit))
    else:
        draft.propose(action)


def hold_doomed(draft: Draft) -> None:
    """The last attempt said that nothing may start before a person has looked, and could not hold
    queued jobs.
    """
    last = next(iter(known(draft.policy_context.endings, ())), None)
    if last is None or not last.hold_failed or draft.snapshot.active_jobs:
        return
    label = derived.label_of(draft.snapshot, last.job_id)
    why = f"attempt {label} ended without hope for the next one: {last.message}"
    _hold_submitted_before(draft, last.time, why)


def _hold_submitted_before(draft: Draft, moment: float, why: str) -> None:
    """Hold what would start, and was submitted before a fault that it would meet again."""
    startable = derived.startable_jobs(draft.snapshot)
    doomed = [job for job in startable if (job.submit_time or 0.0) < moment]
    for name in names_of(doomed, filter(is_held, draft.snapshot.pending_jobs)):
        job = next(job for job in doomed if covers(name, job))
        draft.propose(
            Hold(name, why, incident=f"hold:{name}", evidence=_evidence(job), undo="`tr11 resume`"),
            job,
        )


def hold_unbegun(draft: Draft) -> None:
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


def start_again(draft: Draft) -> None:
    """Nothing runs and nothing waits: the launch of the card's [watch], unless the last attempt
    forbids it.
    """
    snapshot = draft.snapshot
    if draft.verdict.word is not VerdictWord.DOWN or snapshot.active_jobs or snapshot.pending_jobs:
        return
    is_down = any(finding.detector == "down" for finding in draft.findings)
    if draft.planned(Resubmit) or not is_down:
        return
    why = "nothing runs and nothing is queued"
    array = snapshot.run.watch.resubmit_array
    against = next(_forbidding(draft), "")
    if against:
        draft.withhold(f"resubmit {array}: {why}", against)
    else:
        draft.propose(_resubmission(draft, array, why, None))


def _forbidding(draft: Draft) -> Iterator[str]:
    if not known(draft.snapshot.submissions, ()):
        yield "it was never launched: the first launch is a person's (`tr11 launch`)"
    marker = derived.last_marker(draft.snapshot)
    newest = derived.last_attempt(draft.snapshot)
    if newest is not None and isinstance(newest.end, Unknown):
        yield f"the end of the last attempt cannot be read: {newest.end.why}"
    if marker is not None and newest is not None and newest.end == marker:
        if marker.reason == "refused":
            yield f"the last attempt refused to start, and the next one would again: {marker.message}"
        elif marker.reason == "unexplained" and not marker.restart:
            yield f"nothing explains how the last attempt ended: {marker.message}"
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


def _resubmission(draft: Draft, array: str, why: str, after: str | None) -> Resubmit:
    marker = derived.last_marker(draft.snapshot)
    evidence: tuple[str, ...] = ()
    if marker is not None:
        evidence = (f"the last exit record says {marker.reason} {marker.place}",)
    undo = "`scancel` of the job it names, or `tr11 kill`"
    return Resubmit(array, why, incident="resubmit", evidence=evidence, undo=undo, after=after)


def _evidence(job: Job) -> tuple[str, ...]:
    reason = ""
    if job.reason:
        reason = f", {job.reason}"
    nodes = len(job.nodes) or job.node_count
    return (f"job {job.job_id} of {job.user}: {job.state.value}{reason}, {counted(nodes, 'node')}",)
