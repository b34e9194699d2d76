"""A drill's part in the trainer: wait in a phase until the stop signal has come, so that it comes in that very phase.

Only a job that `tr11 drill` started has the variable. Nothing else is different: the wait is a wait in the real phase,
on rank 0, on which all others then wait too; how the signal travels and what follows it is what is drilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.contract.drill import PHASES, VARIABLE

LONGEST_SECONDS = 300.0  # a drill whose signal never comes goes on after this
LOOK_SECONDS = 0.05


@dataclass
class PhaseHold:
    """Holds rank 0 in one phase. `stop_is_seen`: whether the signal has come."""

    phase: str
    stop_is_seen: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _first: int | None = None
    _until: float | None = None

    def enter(self, phase: str, iteration: int) -> None:
        """Called when a phase begins, and again with every step in it. A training has done a step when it is held."""
        if phase == "training" and self._first is None:
            self._first = iteration
        if phase != self.phase or (phase == "training" and iteration == self._first):
            return
        while not self._is_over():
            self.pause(LOOK_SECONDS)

    def keeps_data_away(self, iteration: int) -> bool:
        """Whether the data of the next step are to be waited for; after a first step, so that there is a state."""
        if self.phase != "data-wait" or self._first is None or iteration == self._first:
            return False
        return not self._is_over()

    def _is_over(self) -> bool:
        if self._until is None:
            self._until = self.clock() + LONGEST_SECONDS
        return self.stop_is_seen() or self.clock() > self._until


def hold_from(environment: Mapping[str, str], stop_is_seen: Callable[[], bool]) -> PhaseHold | None:
    """The hold that this job's environment asks for: the phase of its array task, counted from 1; None without one."""
    phases = [phase for phase in environment.get(VARIABLE, "").split(",") if phase in PHASES]
    task = environment.get("SLURM_ARRAY_TASK_ID", "1")
    if not phases or not task.isdecimal() or not 1 <= int(task) <= len(phases):
        return None
    return PhaseHold(phases[int(task) - 1], stop_is_seen)
