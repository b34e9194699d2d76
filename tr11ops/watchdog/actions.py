"""The words of the watchdog's policy: actions and plans, and what a plan rests on beside the
snapshot. Values only.
"""

from __future__ import annotations

from tr11ops.base.observed import Observed
from tr11ops.cluster.base import Job
from tr11ops.observe.lease import LeaseHolder
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit, NodeStanding
from trainer.contract.record import Record


class Action(Record):
    """One thing to do. `subject`: to what it is done; `incident`: the trouble that it ends; `undo`:
    how to go back; `by_hand`: the command with which a person does the same, "" for none.
    """

    subject: str
    why: str
    incident: str
    evidence: tuple[str, ...] = ()
    undo: str = ""
    by_hand: str = ""

    @property
    def name(self) -> str:
        """As in the journal and in budgets: resubmit, exclude, include, cancel, hold, release."""
        return type(self).__name__.lower()

    def words(self) -> str:
        """What is done, to what, and why, in one line."""
        return f"{self.name} {self.subject}: {self.why.removeprefix(f'{self.subject}: ')}"


class Resubmit(Action):
    """Launch these attempts; `subject` is the array, `after` the job behind which they queue (None:
    at once), `replaces` are the cancelled jobs whose place they take.
    """

    after: str | None = None
    replaces: tuple[str, ...] = ()

    def words(self) -> str:
        behind = ""
        if self.after:
            behind = f" behind job {self.after}"
        return f"resubmit {self.subject}{behind}: {self.why}"


class Exclude(Action):
    """Keep a node out of this run, in its list and in queued jobs; `job_id` is the attempt that it
    failed in. `state`: how sure it is; a suspect is kept out of one start. `fault`: of which family.
    """

    job_id: str = ""
    limit: ExclusionLimit = ExclusionLimit(0)
    state: NodeStanding = NodeStanding.EXCLUDE
    fault: str = ""

    def words(self) -> str:
        does = {NodeStanding.SUSPECT: "start once without", NodeStanding.AVOID: "avoid"}
        return f"{does.get(self.state, self.name)} {self.subject}: {self.why.removeprefix(f'{self.subject}: ')}"


class Include(Action):
    """Use a node again: one that was only avoided, since not enough others are free, or one that the
    site has repaired. `then`: as what it stays on record.
    """

    then: NodeStanding = NodeStanding.SUSPECT


class Stacks(Action):
    """Keep what the workers of a hanging job do now, in the folder of `attempt` (the scheduler's
    own number).

    `nodes` are the job's, `node_count` is how many it has.
    """

    attempt: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 1

    def words(self) -> str:
        return f"keep the stacks of job {self.subject}: {self.why}"


class Cancel(Action):
    """End a job that holds nodes for nothing, or that can never start; `owes` are the waiting
    attempts lost with it.

    `only_after` is the incident of an action that must have been done before, in the same pass.
    `relaunch` is what will take the place of queued jobs: where it would be refused, nothing is
    cancelled.
    """

    owes: int = 0
    only_after: str = ""
    relaunch: Resubmit | None = None


class Hold(Action):
    """Keep queued jobs from starting: they would fail as the last attempt did."""


class Release(Action):
    """Let queued jobs go on whose hold has lost its reason."""


class Power(Record):
    """What the watchdog does about a trouble where it may act, in words; the way back; the actions
    that it takes.
    """

    trouble: str
    does: str
    way_back: str
    actions: tuple[type[Action], ...]


class Plan(Record):
    """What to do, in this order; and what is wrong but not done, with the reason: for a person."""

    actions: tuple[Action, ...] = ()
    withheld: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.actions and not self.withheld


# ----------------------------------------------------------------------------- what a plan rests on
BUDGETS = {
    "resubmit": "resubmissions_per_day",
    "exclude": "exclusions_per_day",
    "cancel": "cancellations_per_day",
}


class Blame(Record):
    """A node that a launch was lost by, as its controller concluded from evidence."""

    node: str
    confidence: float
    why: str
    job_id: str
    time: float
    evidence: tuple[str, ...] = ()


class PolicyContext(Record):
    """What else must be known before anything is done. `user` is who would act, `is_root` whether
    he may steer all.

    `endings` and `blames` are newest first. `suspects`: what the run has on record of nodes that are
    used after the others. `releasable` names what was held for a switch that is
    gone. `may_act`: someone's watchdog does what is planned; else every word about what will be
    done says that no one does.
    """

    user: str
    is_root: bool = False
    may_act: bool = True
    pause: Observed[str] = ""
    holder: Observed[LeaseHolder | None] = None
    endings: Observed[tuple[AttemptVerdict, ...]] = ()
    blames: Observed[tuple[Blame, ...]] = ()
    suspects: Observed[tuple[Exclusion, ...]] = ()
    releasable: frozenset[str] = frozenset()

    def can_modify(self, job: Job) -> bool:
        return self.is_root or job.user in {"", self.user}
