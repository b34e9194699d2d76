"""What may stop or steer a running training: rank 0 looks, all ranks agree in one small collective a step.

No torch here: who has ranks of another kind brings their collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from trainer.contract import RunPaths, write_json
from trainer.drill import hold_from
from trainer.lease import Lease
from trainer.lifecycle import Attempt, Decision, HeartbeatWriter, Limits, SignalFlag, decide, look, tell
from trainer.requests import BY_HAND, LARGEST_NUMBER, NO_RANK, Answer, ProfileAsk, Request, pause_of, read_request

# Places in the vector that all ranks agree on; the first three are those of `trainer.lifecycle.look`.
KILL, SIGNAL, DURATION, SUPERSEDED, PAUSED, SAVE, WAITING, STOP_REQUEST, SAVE_REQUEST = range(9)
PROFILE, PROFILED_STEPS, PROFILED_RANK, PLACES = range(9, 13)
WITHOUT_SAVING = 2  # a kill switch that asks for the end at once


@dataclass(frozen=True)
class Agreed:
    """What all ranks do next. `save`: at the next chance; `waits`: some rank's data are not here yet."""

    decision: Decision | None
    save: bool
    waits: bool
    profile: ProfileAsk | None = None


class Switches:
    """Kill switch, pause, requests for checkpoints, signals, limits and lease of one attempt; the same on all ranks.

    `lease` is rank 0's; None elsewhere, and then it is never asked. `largest` is the collective: given this rank's
    values, it returns for each place the largest of all ranks.
    """

    def __init__(
        self,
        paths: RunPaths,
        limits: Limits,
        attempt: Attempt,
        flag: SignalFlag,
        heartbeat: HeartbeatWriter,
        lease: Lease | None,
        largest: Callable[[list[int]], list[int]],
        is_first: bool,
        clock: Callable[[], float] = time.time,
    ):
        self._paths, self._limits, self._attempt, self._flag = paths, limits, attempt, flag
        self._heartbeat, self.lease, self._clock = heartbeat, lease, clock
        self._largest, self._is_first = largest, is_first
        self._honoured: set[int] = set()
        self._asked: tuple[int, int] | None = None  # a request for a checkpoint, and the iteration that answers it
        self._hold = hold_from(os.environ, self._stop_is_seen) if self._is_first else None

    # ------------------------------------------------------------------ agreeing
    def agree(self, iteration: int, trained: bool, save_is_due: bool = False, waits: bool = False) -> Agreed:
        """One small collective: each rank's largest value counts for all. Rank 0's looks are files, no rank's waiting.

        `trained`: whether this attempt has done a step. `waits`: this rank's data are not here yet.
        """
        now, own = self._clock(), [0] * PLACES
        own[SIGNAL], own[WAITING] = int(self._flag.received or 0), int(waits or self._data_are_held(iteration))
        if self._is_first:
            self._look(own, trained, save_is_due, now)
        signs = self._largest(own)
        self._heartbeat.acknowledge(signs[STOP_REQUEST])
        if signs[SAVE_REQUEST]:
            self._heartbeat.acknowledge(signs[SAVE_REQUEST])
            self._asked = (signs[SAVE_REQUEST], iteration)
        self._heartbeat.acknowledge(signs[PROFILE])
        decision = self._decide(signs, iteration, trained, now)
        ask = ProfileAsk(signs[PROFILE], signs[PROFILED_STEPS], signs[PROFILED_RANK]) if signs[PROFILE] else None
        return Agreed(decision, bool(signs[SAVE] or signs[SAVE_REQUEST]), bool(signs[WAITING]), ask)

    def _look(self, own: list[int], trained: bool, save_is_due: bool, now: float) -> None:
        kill, asked, over = look(self._limits, self._flag, self._attempt.stop_request, now)
        own[KILL], own[SIGNAL], own[DURATION] = kill, asked, over
        own[SAVE] = int(save_is_due)
        if kill:
            request = read_request(self._limits.kill_switch, "kill") or Request("kill")
            own[STOP_REQUEST] = request.id
            own[KILL] = WITHOUT_SAVING if request.kind == "kill-now" else 1
        if self.lease is not None:
            own[SUPERSEDED] = int(self.lease.lost)
        if trained:
            self._look_for_request(own)
            self._look_for_profile(own)
        else:  # a pause is for what begins: who has trained a step goes on
            pause = pause_of(self._paths, self._attempt.job_id)
            own[PAUSED] = int(pause is not None)
            own[STOP_REQUEST] = own[STOP_REQUEST] or (pause.id if pause else BY_HAND)

    def _look_for_request(self, own: list[int]) -> None:
        path = self._paths.checkpoint_request
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
        path = self._paths.profile_request
        if not os.path.lexists(path):
            return
        request = read_request(path, "profile") or Request("profile")
        with suppress(OSError):
            path.unlink()
        if request.id and request.id not in self._honoured:
            self._honoured.add(request.id)
            # The other ranks' zeros are larger than no rank; this many there never are, so the profiler refuses it.
            rank = LARGEST_NUMBER if request.rank == NO_RANK else request.rank
            own[PROFILE], own[PROFILED_STEPS], own[PROFILED_RANK] = request.id, request.steps, rank
            tell(f"tr11: a profile was asked for by {request}")

    def _decide(self, signs: list[int], iteration: int, trained: bool, now: float) -> Decision | None:
        if signs[SUPERSEDED]:
            words = self.lease.words() if self.lease is not None else "another trainer holds this run's lease"
            return Decision("superseded", False, f"tr11: {words}", save=False)
        if signs[PAUSED] and not signs[KILL]:
            return Decision("pause", False, f"tr11: this run is paused ({self._paths.pause}): leaving untrained")
        decision = decide(signs[: DURATION + 1], self._limits, iteration, trained, now)
        if decision is not None and signs[KILL] == WITHOUT_SAVING:
            return replace(decision, save=False, line=decision.line.replace("Exiting]", "Exiting without saving]"))
        return decision

    # ------------------------------------------------------------------ answering
    def settle(self, saved_step: int | None, in_flight: int | None) -> None:
        """Answer a request for a checkpoint once its save has ended. Costs nothing while there is none."""
        if self._asked is None or in_flight == self._asked[1]:
            return
        (number, iteration), self._asked = self._asked, None
        if not self._is_first or number == BY_HAND:
            return
        fine = saved_step == iteration
        text = f"checkpoint of iteration {iteration}" if fine else f"the save at iteration {iteration} failed"
        answer = Answer(number, iteration if fine else None, text, self._clock(), self._attempt.job_id)
        try:
            write_json(self._paths.answer(number), asdict(answer))
        except OSError as error:
            tell(f"tr11: the answer to a request could not be written: {error}")

    # ------------------------------------------------------------------ drills
    def enter(self, phase: str, iteration: int) -> None:
        """Report a phase, and wait in it where this is a drill of that phase."""
        self._heartbeat.beat(phase, iteration, at_once=self._hold is not None)  # a drill waits for the very iteration
        if self._hold is not None:
            self._hold.enter(phase, iteration)

    def _data_are_held(self, iteration: int) -> bool:
        return self._hold is not None and self._hold.keeps_data_away(iteration)

    def _stop_is_seen(self) -> bool:
        """Whether anything asks this attempt for something: what a drill's hold waits for."""
        places = (
            self._attempt.stop_request,
            self._limits.kill_switch,
            self._paths.checkpoint_request,
            self._paths.pause,
        )
        return self._flag.received is not None or any(os.path.lexists(place) for place in places)
