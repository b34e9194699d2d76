"""When a foreign trainer is stopped, how, and at which moment. Pure.

The keeper of node 0 decides and writes an order; the keepers of all nodes follow it at the moment that
it names, so that ranks which do not agree among themselves hear of it within the same step.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

from tr11ops.dialects.dialect import StopRule
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.trainers.proof import StopProof
from trainer.contract.record import Count, Finite, Record
from trainer.contract.requests import Request

LEAD_SECONDS = 2.0  # from an order to the moment it names: by then each node has read it
GRACE_SECONDS = 10.0  # from TERM to KILL
NEXT_CHECKPOINT = "next checkpoint"
END = "end"
ORDER_FILE = "trainer-stop.json"


class StopOrder(Record):
    """What all keepers of a launch do at one moment, seconds since the epoch. `how`: as a dialect's
    `stop.how`, or `end`: TERM, and KILL a little later. `request`: its number, for the receipt.
    """

    launch: Count
    how: str
    moment: Finite
    reason: str
    restart: bool
    line: str
    request: int = 0
    asked: Finite = 0.0

    @property
    def signal(self) -> str:
        """The name of the signal that asks; "" where none does."""
        word, _, name = self.how.partition(" ")
        if word == "signal":
            return name
        return ""

    @property
    def file(self) -> str:
        """The file that asks; "" where none does."""
        word, _, name = self.how.partition(" ")
        if word == "file":
            return name
        return ""


class StopSigns(Record):
    """What node 0 sees that may stop a launch. `exit_time`: when it has to leave, by the clock."""

    now: float
    kill: Request | None = None
    stop_is_asked: bool = False
    pause: Request | None = None
    exit_time: float | None = None
    start_time: float = 0.0
    iteration: int = 0
    has_stepped: bool = False
    kill_switch: str = ""
    pause_file: str = ""


class Asked(Record):
    """Why the launch is stopped. `at_once`: without saving."""

    reason: str
    restart: bool
    line: str
    at_once: bool = False
    request: int = 0
    time: float = 0.0


def asked_of(signs: StopSigns) -> Asked | None:
    """The one reason to stop that follows from what node 0 sees; None: go on. The strongest wins: a
    kill switch also keeps later tasks from training.
    """
    now = signs.now
    stamp = datetime.fromtimestamp(now).strftime("%Y-%m-%d %H:%M:%S")
    if signs.kill is not None:
        at_once = signs.kill.kind == "kill-now"
        how = "Exiting without saving" if at_once else "Exiting"
        line = f"[Detected kill switch at {signs.kill_switch}. {how}] datetime: {stamp}"
        return Asked("kill-switch", False, line, at_once, request=signs.kill.id, time=now)
    if signs.stop_is_asked:
        line = (
            f"[exiting program on a stop request at iteration {signs.iteration}] datetime: {stamp}"
        )
        return Asked("signal", True, line, time=now)
    # a pause is for what begins: what has trained a step goes on
    if signs.pause is not None and not signs.has_stepped:
        line = f"tr11: this run is paused ({signs.pause_file}): leaving untrained"
        return Asked("pause", False, line, at_once=True, request=signs.pause.id, time=now)
    if signs.exit_time is not None and now > signs.exit_time:
        minutes = (now - signs.start_time) / 60
        line = f"[exiting program after {minutes:.1f} minutes] datetime: {stamp}"
        return Asked("exit-duration", True, line, time=now)
    return None


def lack_of_asking(settings: TrainerSettings, ranks: int) -> str:
    """Why this trainer cannot be asked to save and leave; "" where its dialect has a way, and its command
    the word for it.
    """
    rule: StopRule | None = settings.dialect.stop
    if rule is None or rule.how == NEXT_CHECKPOINT:
        return "it cannot be asked to save"
    if rule.needs and not any(rule.needs in word for word in settings.words):
        return f"it cannot be asked to save without {rule.needs}"
    if rule.agrees is False and ranks > 1:
        return "its ranks do not agree on the step at which they save"
    return ""


def way_of(settings: TrainerSettings, ranks: int, proof: StopProof | None = None) -> str:
    """How this trainer is asked to save and leave. `proof`: what a drill found of it; where one failed, it
    is not asked again.
    """
    rule = settings.dialect.stop
    if rule is None or lack_of_asking(settings, ranks):
        return NEXT_CHECKPOINT
    if proof is not None and proof.result == "failed":
        return NEXT_CHECKPOINT
    return rule.how


class StopCourse(Record):
    """What has come of a wish to stop: nothing, a wait for the next checkpoint, or an order."""

    asked: Asked | None = None
    order: StopOrder | None = None
    said: str = ""

    def after(
        self, wish: Asked | None, way: str, launch: int, saved_since: bool, now: float
    ) -> StopCourse:
        """With what is wished now. `saved_since`: whether a checkpoint became whole since it was
        asked. A wish for an end at once passes an order to save; no other wish passes an older one.
        """
        if self.order is not None and (self.order.how == END or wish is None or not wish.at_once):
            return self
        asked = self.asked
        if asked is None or (wish is not None and wish.at_once):
            asked = wish
        if asked is None:
            return self
        if asked.at_once:
            return StopCourse(asked, _order(asked, END, launch, now))
        if way != NEXT_CHECKPOINT:
            return StopCourse(asked, _order(asked, way, launch, now + LEAD_SECONDS))
        if saved_since and self.asked is not None:
            return StopCourse(asked, _order(asked, END, launch, now + LEAD_SECONDS))
        return StopCourse(asked)

    @property
    def is_at_once(self) -> bool:
        """Whether no one waits for a checkpoint any more."""
        return self.asked is not None and self.asked.at_once

    @property
    def waits(self) -> bool:
        """Whether it ends after the next checkpoint."""
        return self.asked is not None and self.order is None


def ending(asked: Asked, launch: int) -> StopOrder:
    """The order to end all workers now."""
    return _order(asked, END, launch, asked.time)


def _order(asked: Asked, how: str, launch: int, moment: float) -> StopOrder:
    return StopOrder(
        launch,
        how,
        moment,
        reason=asked.reason,
        restart=asked.restart,
        line=asked.line,
        request=asked.request,
        asked=asked.time,
    )


def is_last_that_fits(exit_time: float | None, saved_at: tuple[float, ...], now: float) -> bool:
    """Whether no other checkpoint becomes whole before the time is up: by the longest time between
    those of this launch. False where that is not known.
    """
    if exit_time is None or len(saved_at) < 2 or now > exit_time:
        return False
    gaps = [later - earlier for earlier, later in pairwise(saved_at)]
    return now + max(gaps) > exit_time
