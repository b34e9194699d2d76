"""A run that is looked at once a minute, its faults and how it may be doing: looks in, mails out, without a disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.alerts.office import ANA, CRITICAL, MINUTE, NOON, WARNING, finding
from tr11ops.alerts.changes import AlertChange
from tr11ops.alerts.incidents import look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import RunCondition, RunSituation
from tr11ops.alerts.state import AlertState, Message
from tr11ops.detect.detector import Finding
from tr11ops.observe.snapshot import Step

POLICY = Policy(
    run="small", directory="/runs/small", typed="tr11.toml", folder="/home/ana", recipients=(ANA,)
)
HANG = finding("hung", title="job 1007 hangs", fix="tr11 stacks")
DOWN = finding(
    "down", subject="", title="small is neither running nor queued", fix="tr11 launch --array 1-10"
)
SLOW = finding(
    "slow-node", WARNING, "iam05", title="iam05 holds the others back", fix="tr11 nodes check iam05"
)
LESS = finding(
    "slow",
    WARNING,
    "",
    title="the training is 62.5 % slower than it was",
    fix="tr11 nodes check n01",
)
CLOSED = finding(
    "waits-for-site", WARNING, "7", title="nothing starts after job 7_1: the site has closed gpu"
)
DISK = finding(
    "filesystem-filling", WARNING, "/scratch", title="/scratch is full in 3 days", fix="tr11 disk"
)
BAD = finding(
    "unfinished-end", CRITICAL, "67_1", title="attempt 67_1 failed", identity=("software",)
)
TRAINS = RunCondition(
    "HEALTHY: job 1008 on 4 nodes: training at iteration 266", is_well=True, trains=True
)
STARTS = RunCondition("STARTING: job 1008 on 4 nodes has started", is_well=False)
QUEUED = RunCondition("QUEUED: nothing runs now; job 1008 waits: Resources", is_well=True)
FINISHED = RunCondition("FINISHED: all 100 iterations are trained", is_well=True, is_finished=True)
STOPPED = RunCondition(
    "STOPPED: the kill switch was set by ana (slow); what is queued is held", is_well=True, is_stopped=True,
    resume="tr11 resume",
)  # fmt: skip
WELL: dict[str, Any] = {"condition": TRAINS, "trained": 1.0}
PAUSED = replace(TRAINS, resume="tr11 resume")
ENDED = RunCondition("DOWN: nothing runs and nothing is queued", is_well=False)
UNSEEN = RunCondition("UNKNOWN: scheduler unreachable", is_well=False)


class Looks:
    """One look a minute."""

    def __init__(self) -> None:
        self.state, self.now = AlertState(), NOON
        self.news: list[Message] = []  # that all is trained

    def see(
        self,
        *found: Finding,
        condition: RunCondition | None = None,
        trained: float | None = None,
        after: float = MINUTE,
        steps: tuple[Step, ...] = (),
        **facts: Any,
    ) -> list[Message]:
        """`trained`: seconds before this look that the last iteration ended."""
        self.now += after
        ended = None if trained is None else self.now - trained
        self.state = look(self.state, found, frozenset(), POLICY, self.now, ended)
        situation = RunSituation(condition=condition, trained=ended, steps=steps, **facts)
        self.state, messages = tell(self.state, POLICY, self.now, situation=situation)
        self.news += [message for message in messages if message.kind == "finished"]
        return [message for message in messages if message.kind != "finished"]

    def person(self, change: AlertChange) -> None:
        """Someone changes the alert that leads."""
        alert = change.of(self.state.open_alerts[0], self.now)
        self.state = self.state.with_alert(alert)

    def see_again(self, times: int, *found: Finding, **facts: Any) -> list[Message]:
        """The messages of so many looks that see the same."""
        return [message for _ in range(times) for message in self.see(*found, **facts)]


def subjects(messages: Iterable[Message]) -> list[str]:
    return [message.subject for message in messages]


def at(fault: Finding, seconds: float) -> Finding:
    """The fault as its evidence has it begin so long after noon."""
    return replace(fault, since=NOON + seconds)


def flat(message: Message) -> str:
    """The body on one line: where lines break is nothing to this test."""
    return " ".join(message.body.split())
