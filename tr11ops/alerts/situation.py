"""How the run is doing at a look, as mails say it: its progress, what the watchdog does, what a
time has cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from msgspec import field

from tr11ops.alerts.state import Alert
from tr11ops.base.units import capitalized
from tr11ops.cluster.base import Node
from tr11ops.detect.detector import STANDS_STILL, Severity
from tr11ops.observe.snapshot import Step
from tr11ops.rundir.action_log import LETS_IT_ACT
from tr11ops.rundir.exclusion import Exclusion, kept_off
from trainer.contract.record import Record

# By which of its acts the watchdog ends the faults that a detector finds.
_ACTS = {
    "down": ("resubmit",),
    "two-attempts": ("cancel",),
    "hung": ("cancel", "stacks"),
    "zombie": ("cancel", "resubmit"),
    "dead-chain": ("cancel", "resubmit"),
    "held": ("release",),
    "node-lost": ("exclude", "cancel"),
    "unfinished-end": ("exclude", "hold", "resubmit"),
}
# The words of commands that do the same as an act.
_SAME = {
    "resubmit": ("launch",),
    "release": ("release", "resume"),
    "cancel": ("scancel", "kill", "--repair"),
}
# faults after which the next attempt begins, or the site goes on, also where they are critical
_GOES_ON = frozenset({"unfinished-end", "waits-for-site"})
_NOTHING = "tr11 does nothing about it by itself."
# Faults of a training's speed: while nothing trains no one sees them, and they are not over.
_OF_SPEED = frozenset({"slow", "slow-node"})
# Faults that only a training shows: a run that a person has stopped has them as before, until it
# trains without them.
_OF_TRAINING = _OF_SPEED | {
    "down",
    "hung",
    "stalled",
    "log-not-growing",
    "unfinished-end",
    "start-failed",
    "loss-spike",
    "loss-not-finite",
    "gradient-norm",
    "validation-loss-rises",
    "silent-corruption",
    "counters-jump",
}


# Steps of one launch after which its speed is known, and a slow node of it is named: the ranks write
# their compute times every ten.
SPEED_STEPS = 30

# a pause between two iterations of a job that is longer than so many is an interruption, no save
INTERRUPTION_STEPS = 10.0


class Act(Record):
    """One act of the watchdog: its kind as in the journal (`resubmit`, ...), in words, and when it
    was done. `subject`: to what; `by_hand`: the command with which a person does it, "" for none.
    """

    name: str
    words: str
    time: float = 0.0
    subject: str = ""
    by_hand: str = ""


class Spell(Record):
    """What became of a time: iterations trained, the loss before and now, node-hours held, and
    their useful share.

    `wanted_hours` also counts the nodes that the run waited for; `lost_hours` of them trained
    nothing that was kept.
    """

    iterations: int
    loss_before: float | None
    loss_now: float | None
    held_hours: float
    useful: float | None
    wanted_hours: float = 0.0
    lost_hours: float = 0.0


class RunCondition(Record):
    """The verdict of a look, as all-clears need it: its `words`, and whether no one needs to get up
    (`is_well`).

    `trains`: a job trains, or is said to; `is_finished`: all is trained; `is_stopped`: a person has
    stopped the run. `resume` is the command without which it does not train on; "" where none is
    needed.
    """

    words: str
    is_well: bool
    trains: bool = False
    is_finished: bool = False
    is_stopped: bool = False
    resume: str = ""


class RunSituation(Record):
    """The run at one look. `progress` and `eta` are "" where they are not known.

    `trained` is when the last iteration ended, None where that is not known. `may_act`: the
    watchdog acts at this look on its `planned` acts; else `why_not` says what keeps it. `withheld`
    says what it does not do, and why. `since` gives the account from a moment (seconds since the
    epoch) to the look, or to another moment; None where it cannot be told. `condition` is None where the look was not
    judged. `knows_acts`: what the watchdog does could be told. `left_out`: the nodes that tr11
    itself has excluded. `steps` are the last ones of the training that are still seen, the oldest
    first, `labels` the attempts' numbers as people type them. `nodes` are the cluster's, `excluded`
    those of them that the run does not use, None where that is not known; `spares` says how many
    nodes an attempt can lose.
    """

    progress: str = ""
    eta: str = ""
    trained: float | None = None
    may_act: bool = False
    why_not: str = f"it may not act ({LETS_IT_ACT})"
    done: tuple[Act, ...] = ()
    planned: tuple[Act, ...] = ()
    withheld: tuple[str, ...] = ()
    since: Callable[..., Spell | None] = lambda *_: None
    condition: RunCondition | None = None
    knows_acts: bool = True
    left_out: tuple[Exclusion, ...] = ()
    steps: tuple[Step, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    excluded: Mapping[str, Exclusion] | None = None
    spares: str = ""

    def went_on(self, alert: Alert) -> Step | None:
        """The first step with which the training went on after a fault that it stood still for: in
        another job than before, if it needed one. Another fault that came later has its own. None
        where it did not stand still, or that cannot be told.
        """
        if (
            self.condition is None
            or not self.condition.trains
            or not set(alert.detectors) & STANDS_STILL
        ):
            return None
        end = alert.end
        pairs = self._pairs_of_steps()
        longest = _longest_gap(pairs)
        resumed: Step | None = None
        for before, after in pairs:
            last = before.time or 0.0
            first = after.time or 0.0
            if first <= alert.start or (end is not None and last > end):
                continue  # the one before it began, or a later interruption
            if after.job_id != before.job_id:
                return after
            if first - last > longest:
                longest = first - last
                resumed = after
        return resumed

    def _pairs_of_steps(self) -> list[tuple[Step, Step]]:
        """Each of the last steps with the one before it, of those whose time and job are known."""
        known_steps = [step for step in self.steps if step.time is not None and step.job_id]
        return list(pairwise(known_steps))

    def proves_end_of(self, alert: Alert) -> bool:
        """Whether the run is well, by evidence that is newer than the fault: an iteration, where a
        job trains.

        That a look does not see a fault is no such evidence: the job may be gone, or stand still
        unnoticed as yet.
        """
        condition = self.condition
        if condition is None:
            return True
        if not condition.is_well:
            return False
        if condition.trains:
            has_trained = self.trained is not None and self.trained > alert.last_seen
            return has_trained and not (alert.detector in _OF_SPEED and self._is_unmeasured(alert))
        if condition.is_finished:
            return True
        if condition.is_stopped:
            return alert.detector not in _OF_TRAINING
        return alert.detector not in _OF_SPEED | {"start-failed"}

    def _is_unmeasured(self, alert: Alert) -> bool:
        """Whether the training was started again since a fault was last seen, and has too few steps
        for its speed to be known.
        """
        pairs = self._pairs_of_steps()
        longest = _longest_gap(pairs)
        for count, (before, first) in enumerate(reversed(pairs), start=1):
            if before.job_id != first.job_id or _gap(before, first) > longest:
                return count < SPEED_STEPS and (first.time or 0.0) > alert.last_seen
        return False

    def cost_until_over(self, alert: Alert) -> tuple[float, Spell] | None:
        """Until when a fault that is over has cost something, and what: to the step with which the
        training went on. What came after it is another's.
        """
        step = self.went_on(alert)
        end = alert.end
        if step is not None and step.time is not None:
            end = step.time
        if end is None or end <= alert.start:
            return None
        spell = self.since(alert.start, end)
        if spell is None:
            return None
        return (end, spell)

    def cost_of(self, began: float) -> tuple[float, Spell] | None:
        """From when an incident has cost something, and what: a fault that stops the training
        begins unseen.
        """
        moment = began if self.trained is None else min(began, self.trained)
        spell = self.since(moment)
        if spell is None:
            return None
        return (moment, spell)


def _gap(before: Step, after: Step) -> float:
    """Seconds between the ends of two steps."""
    return (after.time or 0.0) - (before.time or 0.0)


def _longest_gap(pairs: Sequence[tuple[Step, Step]]) -> float:
    """The most seconds between two steps of a job that are no interruption; 0 where there are none."""
    if not pairs:
        return 0.0
    return INTERRUPTION_STEPS * median(_gap(before, after) for before, after in pairs)


UNKNOWN_SITUATION = RunSituation(knows_acts=False)  # nothing is known of how the run is doing


def what_tr11_does(alert: Alert, situation: RunSituation) -> str:
    """A sentence: what the watchdog did about an alert, or will do, or why not; what the run does
    by itself where no watchdog acts; "" where it is not known.
    """
    if not situation.knows_acts:
        return ""
    is_told = alert.severity is not Severity.CRITICAL or alert.detector in _GOES_ON
    by_itself = alert.by_itself if is_told else ""
    if by_itself and not situation.may_act:
        return by_itself
    return watchdog_says(alert, situation) or by_itself or _NOTHING


MOST_NODES = 3  # of which an all-clear says how they are


def _nodes_of(alert: Alert, situation: RunSituation) -> list[Node]:
    """The nodes that an alert was about."""
    words = {
        word.strip(".-")
        for text in (alert.title, *(alert.identity or ()))
        for word in re.findall(r"[\w.-]+", text)
    }
    return [node for node in situation.nodes if node.name in words][:MOST_NODES]


def what_is_over(alert: Alert, situation: RunSituation) -> str:
    """Of a lost node that is down still not its fault, but that the run waits for it."""
    is_well = situation.condition is not None and situation.condition.is_well
    if is_well and alert.detector == "node-lost":
        down = [node.name for node in _nodes_of(alert, situation) if node.is_gone or node.is_silent]
        if down:
            return f"nothing waits for {' and '.join(down)} any more"
    return "over"


def nodes_now(alert: Alert, situation: RunSituation) -> Iterator[str]:
    """How the nodes are that an alert was about, a sentence each, and how many more may be lost."""
    found = _nodes_of(alert, situation)
    for node in found:
        yield f"{node.name} is {'+'.join(sorted(node.states))}{_kept_off(node.name, situation)}."
    if found and situation.spares:
        yield f"{capitalized(situation.spares)}."


def _kept_off(node: str, situation: RunSituation) -> str:
    """Whether the run uses a node, behind its state; "" where that is not known."""
    if situation.excluded is None:
        return ""
    entry = situation.excluded.get(node)
    if entry is None:
        return ", and not excluded"
    return f", and {kept_off(entry.state)} by {entry.owner or 'the queue'}"


def is_cured(alert: Alert, situation: RunSituation) -> bool:
    """Whether the watchdog did what the alert says to type, or is about to: a person who does it
    too does it twice.
    """
    typed = {word for command in (alert.fix, *alert.commands_after) for word in command.split()}
    names = [name for name in _acts(alert) if set(_SAME.get(name, ())) & typed]
    did = any(act.name in names and act.time >= alert.began for act in situation.done)
    did = did and not _against(tuple(names), situation)
    return did or (situation.may_act and any(act.name in names for act in situation.planned))


def _acts(alert: Alert) -> tuple[str, ...]:
    """The acts of the watchdog that end a fault, or what follows from it."""
    return tuple(
        dict.fromkeys(act for detector in alert.detectors for act in _ACTS.get(detector, ()))
    )


def watchdog_says(alert: Alert, situation: RunSituation) -> str:
    """What the watchdog does not do about an alert, and why; else what it will do, or did; "" where
    its plan says nothing of such a fault. What it did before is no help where it does not do it
    again.
    """
    names = _acts(alert)
    against = [text for text in _against(names, situation) if _is_about(_withheld_act(text), alert)]
    acts = [act for act in situation.done if act.name in names and act.time >= alert.began]
    done = [act for act in acts if _is_about(act, alert)]
    planned = [act for act in situation.planned if act.name in names and _is_about(act, alert)]
    if planned and situation.may_act:
        return f"tr11 will now {_acts_in_words(planned, alert)}."
    if against:
        text = next(
            (text for text in against if alert.subject and alert.subject in text), against[0]
        )
        return _withheld(text, alert)
    if done:
        return f"tr11 did: {done[-1].words}."
    if planned:
        would = f"tr11 would {_acts_in_words(planned, alert)}, but {situation.why_not}"
        return f"{would}{_by_hand(planned, alert)}."
    return ""


def _is_about(act: Act, alert: Alert) -> bool:
    """Whether an act is about what an alert is: the exclusion of a node is where that names it."""
    if act.name != "exclude" or not act.subject:
        return True
    titles = (one.title for one in alert.consequences)
    text = " ".join((alert.title, *(alert.identity or ()), *alert.evidence, *titles))
    return re.search(rf"(?<![\w.-]){re.escape(act.subject)}(?![\w-])", text) is not None


def _acts_in_words(acts: list[Act], alert: Alert) -> str:
    """One act and why, less the alert's own title, which the mail has said already; several without
    why.
    """
    if len(acts) == 1:
        return acts[0].words.removesuffix(f": {alert.title}")
    short = dict.fromkeys(act.words.partition(": ")[0] for act in acts)
    *first, last = short
    if first:
        return f"{', '.join(first)} and {last}"
    return last


def _by_hand(acts: list[Act], alert: Alert) -> str:
    """With which command a person does what the watchdog may not; whether it is the one that the
    mail says to type.
    """
    commands = dict.fromkeys(act.by_hand for act in acts if act.by_hand)
    others = [line for line in commands if line not in {alert.fix, *alert.commands_after}]
    if others:
        return f"; by hand: {', '.join(f'`{line}`' for line in others)}"
    if len(commands) == 1:
        return f": `{next(iter(commands))}` does it"
    return ""


def _against(names: tuple[str, ...], situation: RunSituation) -> list[str]:
    """What the plan withholds of acts of these names, or that it withholds all."""
    if not names:
        return []
    return [text for text in situation.withheld if text.partition(" ")[0] in {*names, "nothing"}]


def _withheld_act(text: str) -> Act:
    """The act that a line of what is left out begins with: `exclude n07: WHY; not done: AGAINST`."""
    name, _, rest = text.partition(" ")
    return Act(name, text, subject=rest.partition(":")[0])


def _withheld(text: str, alert: Alert) -> str:
    """A sentence of what the watchdog's plan leaves out, and why: `ACT: WHY; not done: AGAINST` as
    the plan has it.
    """
    act, divider, against = text.partition("; not done: ")
    what, colon, why = act.partition(": ")
    if not divider or not colon or act.startswith("nothing "):
        return f"tr11 did not act: {text}."
    reason = "" if why == alert.title else f" ({why})"
    return f"tr11 did not {what}{reason}: {against}."
