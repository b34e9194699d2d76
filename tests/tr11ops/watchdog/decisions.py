"""Runs in trouble, and what the policy decides about them."""

from __future__ import annotations

from typing import Any

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    idle,
    snapshot,
    steps,
    with_facts,
)
from tr11ops.cluster.base import Node
from tr11ops.detect.registry import detect_all
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.runcard.watching import WatchSection
from tr11ops.rundir.action_log import ActionHistory, ActionRecord, ProgressRecord, Result
from tr11ops.rundir.paths import Submission
from tr11ops.watchdog.actions import (
    Action,
    Blame,
    Plan,
    PolicyContext,
)
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.rules import progress
from tr11ops.watchdog.verdict import judge

SENT = Submission(
    "20220420-000000-00000000",
    "1000",
    "slurm",
    NOW - 10 * DAY,
    "ana",
    "h",
    "tr11-176B-ml",
    "main",
    "1-10%1",
    48,
    "x",
)
SCENE = PolicyContext(user="ana", holder=None)
WATCH = WatchSection(act=True)
SPARE = tuple(Node(f"n{number:02d}", frozenset({"allocated"})) for number in range(1, 61))
SWITCH = KillSwitch("/scratch/tr11/kill-switch", "ana", NOW, "")  # type: ignore[arg-type]
BLAME = Blame(
    "n07", 0.95, "rank 3 on n07: CUDA error", "1006", NOW - HOUR, ("n07: task 3: Aborted",)
)


def down(**changes: Any) -> Snapshot:
    return idle(**{"submissions": (SENT,), "nodes": SPARE, **changes})


def zombie(**changes: Any) -> Snapshot:
    """The batch host n01 is lost, no one shows life."""
    values: dict[str, Any] = {
        "nodes": (Node("n01", frozenset({"down"})), *SPARE[1:]),
        "attempts": (Attempt("1007", NOW - HOUR, None, nodes=("n01", "n02")),),
        "heartbeats": beats(age=HOUR),
        "steps": steps(age=HOUR),
        "submissions": (SENT,),
        **changes,
    }
    return snapshot(**values)


def decide(
    seen: Snapshot,
    history: ActionHistory | None = None,
    scene: PolicyContext = SCENE,
    watch: WatchSection = WATCH,
) -> Plan:
    seen = with_facts(seen, watch=watch)
    findings = detect_all(seen)
    return plan(seen, findings, judge(seen, findings), history or ActionHistory(), scene)


def words(found: Plan) -> list[tuple[str, str]]:
    return [(action.name, action.subject) for action in found.actions]


def planned(seen: Snapshot, *what: Any, **more: Any) -> list[tuple[str, str]]:
    """The actions of `decide`, in words."""
    return words(decide(seen, *what, **more))


def record(
    action: Action,
    result: Result = Result.DONE,
    age: float = HOUR,
    reached: ProgressRecord | None = None,
) -> ActionRecord:
    stood = progress(down()) if reached is None else reached
    return ActionRecord(
        "1", action.name, action.subject, action.incident, NOW - age, "", stood, result=result
    )
