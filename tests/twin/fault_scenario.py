"""A scenario: a course of faults on a twin, as a file that can be written by hand, drawn by a seed, and
played again.

    name = "two-nodes"
    time_scale = 100                # seconds of the training in one of the twin

    [[events]]
    fault = "node-dead"             # as `tr11 twin fault` names it
    target = "node"
    before_save = 2                 # two iterations before a save
    expect = { cause = "node", ends_launch = true, is_out = true, most_redone = 10 }

`docs/how-to/twin.md` describes each key.
"""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import fields

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_kinds import find_kind
from trainer.contract.documents import document, record_of
from trainer.contract.record import Amount, Count, Record

# The site's health script fails on every node, and a worker's crash has the nodes checked.
CHECK_FAILS = "check-fails"
SAVE_ERROR = "save-error"
LIMIT_LOWERED = "job-limit-lowered"
SLOW_STEPS = "slow-steps"
SHARED_MEMORY_FULL = "shm-full"
# What people do, the newest checkpoint cut short, what befalls a run beside its nodes, and what a twin
# cannot show.
TYPED, CHECKPOINT_CUT, NOT_PLAYED = "typed", "checkpoint-cut", "not-played"
HUB_REFUSES, PURGE, CHAIN_DEAD = "hub-refuses", "purge", "chain-dead"
OF_SITE = frozenset({HUB_REFUSES, PURGE, CHAIN_DEAD})
BEYOND_TWIN = OF_SITE | {CHECK_FAILS, TYPED, CHECKPOINT_CUT, NOT_PLAYED}

Target = Literal[
    "node", "batch host", "spare", "elsewhere", "controller", "partition", "run", "check"
]


class Expectation(Record, forbid_unknown_fields=True):
    """What must come of an event.

    - `cause`: the verdict on the launch that it ends; None: not judged.
    - `ends_launch`: whether one ends.
    - `is_out`: the node must not be in the launch that trains afterwards.
    - `may_hold`: a person may be asked, who lets go what is held.
    - `most_redone`: iterations that are trained a second time, at most; None: not judged.
    """

    cause: str | None = None
    ends_launch: bool = True
    is_out: bool = False
    may_hold: bool = False
    most_redone: Count | None = None


class FaultEvent(Record, forbid_unknown_fields=True):
    """One fault of a scenario.

    - `fault`: a kind of `tr11 twin fault`, or one of `check-fails`, `checkpoint-cut`, `hub-refuses`,
      `purge`, `chain-dead`, `typed` and `not-played`.
    - `target`: which node or thing: "node" (one that trains), "batch host", "spare" (an idle one of
      the job), "elsewhere" (not of the job), "controller", "partition", "run" (its directory) or
      "check" (the site's health script).
    - `pick`: which of those that it could be, from 0 for the first to just below 1 for the last.
    - `after`: iterations beyond the last one before.
    - `before_save`, `before_evaluation`: then so many iterations before the next one; None: at once.
    - `also`: a second fault at the same moment, of the batch host.
    - `lasts`: seconds of the twin until it is healed; None: until the training goes on.
    - `typed`: what people type, without `tr11`, once the fault has lasted that long; `set KEY=VALUE`
      changes the run card from then on, `{step}` is the newest checkpoint from before the fault,
      `{first}` the iteration of the fault. `exits`: the exit codes that each may have.
    - `title`, `date`, `then`: what it stands for, when that was, and what it was like; `lost_then`:
      the hours that it cost, None where no one wrote them down; `why`: a word on how it is played, or
      why it is not.
    - `unseen`: seconds until it is noticed with the time-outs of a real site.
    """

    fault: str
    target: Target = "node"
    pick: float = 0.0
    after: Count = 1
    before_save: Count | None = None
    before_evaluation: Count | None = None
    also: str = ""
    lasts: Amount | None = None
    typed: tuple[str, ...] = ()
    exits: tuple[int, ...] = (0,)
    title: str = ""
    date: str = ""
    then: str = ""
    why: str = ""
    lost_then: Amount | None = None
    unseen: Amount = 0.0
    expect: Expectation = Expectation()


class FaultScenario(Record, forbid_unknown_fields=True):
    """A course of events, one after another: each waits until the training has recovered from the
    one before. `seed`: that of the draw, where it was drawn.
    """

    name: str
    events: tuple[FaultEvent, ...]
    time_scale: float = 100.0
    seed: int | None = None
    nodes: int = 4
    spares: int = 2
    tasks: int | None = None  # of the array that is submitted; None: enough
    changes: tuple[str, ...] = ()  # of the run card, as `--set` takes them

    def toml(self) -> str:
        """As a file that `read_scenario` reads."""
        lines = _settings(self)
        for event in self.events:
            lines += ["", "[[events]]", *_settings(event)]
        return "\n".join(lines) + "\n"


def _settings(record: Record) -> list[str]:
    """A line of TOML for each field that is not as by default; the events have tables of their own."""
    values = [(one.name, getattr(record, one.name), one.default) for one in fields(record)]
    return [
        f"{name} = {_toml(value)}"
        for name, value, default in values
        if name != "events" and value != default
    ]


def _toml(value: Any) -> str:
    if isinstance(value, Record):
        return "{ " + ", ".join(_settings(value)) + " }"
    return json.dumps(value)


def read_scenario(path: Path) -> FaultScenario:
    """The scenario in a file. Raises TwinError, which names what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        scenario = record_of(FaultScenario, tomllib.loads(text))
    except (OSError, ValueError) as error:
        raise TwinError(f"scenario {path}: {error}") from error
    for number, event in enumerate(scenario.events, 1):
        named = [name for name in (event.fault, event.also) if name and name not in BEYOND_TWIN]
        for name in named:
            try:
                find_kind(name)
            except TwinError as error:
                raise TwinError(f"scenario {path}, event {number}: {error}") from error
        if not 0 <= event.pick < 1:
            raise TwinError(
                f"scenario {path}, event {number}: pick = {event.pick:g}: give 0 to below 1"
            )
    return scenario


# ---------------------------------------------------------------------------
# What is drawn: each kind of fault with the number of times that it lies in the bag.

RUNS_ON = Expectation(ends_launch=False)
OUT = Expectation(is_out=True)
OUT_LATER = Expectation(ends_launch=False, is_out=True)
RELAUNCHED = Expectation()
MAY_HOLD = Expectation(may_hold=True)
MAY_HOLD_ONLY = Expectation(ends_launch=False, may_hold=True)

BAG: tuple[tuple[int, FaultEvent], ...] = (
    (3, FaultEvent("black-hole", expect=OUT)),
    (3, FaultEvent("node-dead", expect=OUT)),
    (2, FaultEvent("node-dead", "spare", expect=OUT_LATER)),
    (2, FaultEvent("half-dead", expect=OUT)),
    (2, FaultEvent("half-dead", "batch host", expect=OUT)),
    (2, FaultEvent("step-hang", expect=OUT)),
    (1, FaultEvent(SLOW_STEPS, expect=OUT_LATER)),
    (2, FaultEvent(SAVE_ERROR, expect=OUT)),
    (3, FaultEvent("worker-crash", expect=RELAUNCHED)),
    (2, FaultEvent("worker-stop", expect=RELAUNCHED)),
    (2, FaultEvent("bad-sample", "run", expect=MAY_HOLD)),
    (2, FaultEvent("data-wait", lasts=2.0, expect=RUNS_ON)),
    (2, FaultEvent("loss-spike", "run", expect=RUNS_ON)),
    (1, FaultEvent("clock-ahead", expect=RUNS_ON)),
    (2, FaultEvent("drain", expect=RUNS_ON)),
    (2, FaultEvent("node-failing", expect=RUNS_ON)),
    (2, FaultEvent(LIMIT_LOWERED, "batch host", expect=RELAUNCHED)),
    (2, FaultEvent(CHECK_FAILS, "check", expect=MAY_HOLD)),
    (1, FaultEvent("slurmd-killed", "elsewhere", lasts=12.0, expect=RUNS_ON)),
    (2, FaultEvent("controller-frozen", "controller", lasts=12.0, expect=RUNS_ON)),
    (2, FaultEvent("controller-restarted", "controller", expect=RUNS_ON)),
    (1, FaultEvent("disk-full", "run", lasts=4.0, expect=MAY_HOLD_ONLY)),
    (1, FaultEvent("read-only", "run", lasts=4.0, expect=MAY_HOLD_ONLY)),
    (1, FaultEvent("unmounted", "run", lasts=4.0, expect=MAY_HOLD_ONLY)),
)


def drawn_scenario(seed: int, count: int) -> FaultScenario:
    """So many faults by a seed: a bag of all kinds is emptied before it is filled again."""
    draw = random.Random(seed)
    bag: list[FaultEvent] = []
    events = []
    for _ in range(count):
        if not bag:
            bag = [event for weight, event in BAG for _ in range(weight)]
            draw.shuffle(bag)
        drawn = document(bag.pop())
        place = {"pick": round(draw.uniform(0.0, 0.999), 3), "after": draw.randint(1, 6)}
        events.append(record_of(FaultEvent, {**drawn, **place}))
    return FaultScenario(f"chaos-{seed}", tuple(events), seed=seed)
