"""What may stop or steer a running training: rank 0 looks, all ranks agree in one small collective
a step.

No torch here: who has ranks of another kind brings their collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from trainer.contract.attempt import DRILL_PHASES, DRILL_VARIABLE, ExitTime, tell
from trainer.contract.record import Record
from trainer.contract.requests import (
    BY_HAND,
    LARGEST_NUMBER,
    NO_RANK,
    Kind,
    Request,
    RequestAnswer,
    leave_answer,
    pause_of,
    read_request,
)
from trainer.control.lifecycle import (
    StopConditions,
    StopDecision,
    Worker,
    decide,
    look,
)

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
        """Called when a phase begins, and again with every step in it. A training has done a step
        when it is held.
        """
        if phase == "training" and self._first is None:
            self._first = iteration
        if phase != self.phase or (phase == "training" and iteration == self._first):
            return
        while not self._is_over():
            self.pause(LOOK_SECONDS)

    def keeps_data_away(self, iteration: int) -> bool:
        """Whether the data of the next step are to be waited for; after a first step, so that there
        is a state.
        """
        if self.phase != "data-wait" or self._first is None or iteration == self._first:
            return False
        return not self._is_over()

    def _is_over(self) -> bool:
        if self._until is None:
            self._until = self.clock() + LONGEST_SECONDS
        return self.stop_is_seen() or self.clock() > self._until


def hold_from(environment: Mapping[str, str], stop_is_seen: Callable[[], bool]) -> PhaseHold | None:
    """The hold that this job's environment asks for: the phase of its array task, counted from 1;
    None without one.
    """
    phases = [
        phase for phase in environment.get(DRILL_VARIABLE, "").split(",") if phase in DRILL_PHASES
    ]
    task = environment.get("SLURM_ARRAY_TASK_ID", "1")
    if not phases or not task.isdecimal() or not 1 <= int(task) <= len(phases):
        return None
    return PhaseHold(phases[int(task) - 1], stop_is_seen)


# Places in the vector that all ranks agree on; the first three are those of
# `trainer.control.lifecycle.look`.
KILL, SIGNAL, DURATION, SUPERSEDED, PAUSED, SAVE, WAITING, STOP_REQUEST, SAVE_REQUEST = range(9)
PROFILE, PROFILED_STEPS, PROFILED_RANK, CHECK, PLACES = range(9, 14)
WITHOUT_SAVING = 2  # a kill switch that asks for the end at once
EXIT_TIME_SECONDS = 2.0  # between two looks at when the attempt leaves by the clock


class Agreed(Record):
    """What all ranks do next. `save`: at the next chance; `waits`: some rank's data are not here
    yet.

    `check`: the number of a request to check the arithmetic, 0 for none.
    """

    decision: StopDecision | None
    save: bool
    waits: bool
    profile: Request | None = None
    check: int = BY_HAND


@dataclass
class ControlSignals:
    """Kill switch, pause, requests for checkpoints, signals, limits and lease of one attempt; the
    same on all ranks.

    `largest` is the collective: given this rank's values, it returns for each place the largest of
    all ranks.
    """

    worker: Worker
    limits: StopConditions
    largest: Callable[[list[int]], list[int]]

    def __post_init__(self) -> None:
        self.paths, self.is_first = self.worker.paths, self.worker.rank == 0
        self._honoured: set[int] = set()
        # requests for checkpoints, each with the iteration that answers it
        self._asked: list[tuple[int, int]] = []
        self._exit_time, self._exit_time_looked_at = self.limits.exit_time, float("-inf")
        if self.is_first:
            self._hold = hold_from(os.environ, self._stop_is_seen)
        else:
            self._hold = None

    # ------------------------------------------------------------------ agreeing
    def agree(
        self, iteration: int, trained: bool, save_is_due: bool = False, waits: bool = False
    ) -> Agreed:
        """One small collective: each rank's largest value counts for all. Rank 0's looks are files,
        no rank's waiting.

        `trained`: whether this attempt has done a step. `waits`: this rank's data are not here yet.
        """
        now = self.worker.clock()
        own = [0] * PLACES
        own[SIGNAL], own[WAITING] = (
            int(self.worker.flag.received or 0),
            int(waits or self._data_are_held(iteration)),
        )
        if self.is_first:
            self._look(own, trained, save_is_due, now)
        signals = self.largest(own)
        self.worker.heartbeat.acknowledge(signals[STOP_REQUEST])
        if signals[SAVE_REQUEST]:
            self.worker.heartbeat.acknowledge(signals[SAVE_REQUEST])
            self._asked.append((signals[SAVE_REQUEST], iteration))
        self.worker.heartbeat.acknowledge(signals[PROFILE])
        self.worker.heartbeat.acknowledge(signals[CHECK])
        decision = self._decide(signals, iteration, trained, now)
        ask = None
        if signals[PROFILE]:
            ask = Request(
                "profile",
                signals[PROFILE],
                steps=signals[PROFILED_STEPS],
                rank=signals[PROFILED_RANK],
            )
        saves = bool(signals[SAVE] or signals[SAVE_REQUEST])
        return Agreed(decision, saves, bool(signals[WAITING]), profile=ask, check=signals[CHECK])

    def _look(self, own: list[int], trained: bool, save_is_due: bool, now: float) -> None:
        self._look_at_exit_time(now)
        kill, asked, over = look(
            self.limits,
            self.worker.flag,
            self.worker.attempt.stop_request,
            exit_time=self._exit_time,
            now=now,
        )
        own[KILL], own[SIGNAL], own[DURATION] = kill, asked, over
        own[SAVE] = int(save_is_due)
        if kill:
            request = read_request(self.limits.kill_switch, "kill") or Request("kill")
            own[STOP_REQUEST] = request.id
            own[KILL] = WITHOUT_SAVING if request.kind == "kill-now" else 1
        if self.worker.lease is not None:
            own[SUPERSEDED] = int(self.worker.lease.lost)
        if trained:
            self._look_for_request(own)
            self._look_for_profile(own)
            check = self._take_request(self.paths.check_request, "compute-check")
            own[CHECK] = check.id if check is not None else BY_HAND
        else:  # a pause is for what begins: who has trained a step goes on
            pause = pause_of(self.paths, self.worker.attempt.job_id)
            own[PAUSED] = int(pause is not None)
            own[STOP_REQUEST] = own[STOP_REQUEST] or (pause.id if pause else BY_HAND)

    def _look_at_exit_time(self, now: float) -> None:
        """Follow the limit of the job as it is now, where someone watches it. What cannot be read
        changes nothing.
        """
        if 0 <= now - self._exit_time_looked_at < EXIT_TIME_SECONDS:
            return
        self._exit_time_looked_at = now
        with suppress(OSError, ValueError):
            told = ExitTime.read(self.paths.exit_time(self.worker.attempt.job_id))
            if told is not None:
                self._exit_time = told.time

    def _look_for_request(self, own: list[int]) -> None:
        path = self.paths.checkpoint_request
        if not os.path.lexists(path):
            return
        request = read_request(path, "checkpoint") or Request("checkpoint")
        if request.id in self._honoured:  # one that could not be removed
            return
        self._honoured.add(request.id)
        own[SAVE], own[SAVE_REQUEST] = 1, request.id
        tell(f"tr11: a checkpoint was asked for by {request}")
        with suppress(OSError):  # it is not honoured twice
            path.unlink()
            self._honoured.discard(BY_HAND)

    def _look_for_profile(self, own: list[int]) -> None:
        request = self._take_request(self.paths.profile_request, "profile")
        if request is not None:
            # The other ranks' zeros are larger than no rank; this many there never are, so the
            # profiler refuses it.
            rank = LARGEST_NUMBER if request.rank == NO_RANK else request.rank
            own[PROFILE], own[PROFILED_STEPS], own[PROFILED_RANK] = request.id, request.steps, rank

    def _take_request(self, path: Path, kind: Kind) -> Request | None:
        """A request that no one has honoured yet, removed; None where there is none, or only one by
        hand.
        """
        if not os.path.lexists(path):
            return None
        request = read_request(path, kind) or Request(kind)
        with suppress(OSError):
            path.unlink()
        if not request.id or request.id in self._honoured:
            return None
        self._honoured.add(request.id)
        tell(f"tr11: a {kind} was asked for by {request}")
        return request

    def _decide(
        self, signals: list[int], iteration: int, trained: bool, now: float
    ) -> StopDecision | None:
        if signals[SUPERSEDED]:
            if self.worker.lease is not None:
                words = self.worker.lease.words()
            else:
                words = "another trainer holds this run's lease"
            return StopDecision("superseded", False, f"tr11: {words}", save=False)
        if signals[PAUSED] and not signals[KILL]:
            return StopDecision(
                "pause", False, f"tr11: this run is paused ({self.paths.pause}): leaving untrained"
            )
        decision = decide(signals[: DURATION + 1], self.limits, iteration, trained=trained, now=now)
        if decision is not None and signals[KILL] == WITHOUT_SAVING:
            return replace(
                decision,
                save=False,
                line=decision.line.replace("Exiting]", "Exiting without saving]"),
            )
        return decision

    # ------------------------------------------------------------------ answering
    def settle(self, was_saved: Callable[[int], bool | None], is_last: bool = False) -> None:
        """Answer each request for a checkpoint whose save has ended. Costs nothing while there is
        none.

        `was_saved`: see `Saver.was_saved`. `is_last`: no save follows, so what was not saved has
        failed.
        """
        waiting = []
        for number, iteration in self._asked:
            fine = was_saved(iteration)
            if fine is None and not is_last:
                waiting.append((number, iteration))
            elif self.is_first and number != BY_HAND:
                if fine:
                    text = f"checkpoint of iteration {iteration}"
                else:
                    text = f"the save at iteration {iteration} failed"
                step = iteration if fine else None
                leave_answer(
                    self.paths,
                    RequestAnswer(
                        number,
                        step,
                        text,
                        time=self.worker.clock(),
                        job_id=self.worker.attempt.job_id,
                    ),
                )
        self._asked = waiting

    # ------------------------------------------------------------------ drills
    def enter(self, phase: str, iteration: int) -> None:
        """Report a phase, and wait in it where this is a drill of that phase."""
        # a drill waits for the very iteration
        self.worker.heartbeat.beat(phase, iteration, at_once=self._hold is not None)
        if self._hold is not None:
            self._hold.enter(phase, iteration)

    def _data_are_held(self, iteration: int) -> bool:
        return self._hold is not None and self._hold.keeps_data_away(iteration)

    def _stop_is_seen(self) -> bool:
        """Whether anything asks this attempt for something: what a drill's hold waits for."""
        places = (
            self.worker.attempt.stop_request,
            self.limits.kill_switch,
            self.paths.checkpoint_request,
            self.paths.pause,
        )
        return self.worker.flag.received is not None or any(
            os.path.lexists(place) for place in places
        )
