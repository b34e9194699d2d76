"""The simulated cluster and training: nodes that fail as a trace says, and a training that makes
iterations, saves, and loses what it had not saved. Time passes in jumps from event to event.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict  # noqa: TID251
from typing import Protocol

from msgspec.structs import replace

from tr11ops.replay.account import Account, IdleReason, LaunchCourse
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.traces import Fault, FaultSign, Window
from trainer.contract.record import Record

BEGIN = 1_646_956_800.0  # of every replay, in seconds since the epoch: 11 March 2022
CHECK_SECONDS = 15.0  # until the health checks before a launch have condemned a node


class WindowOver(Exception):
    """The last moment of the replay has come."""


class PlayedLaunch(Record):
    """How a launch ended. `fault`: what ended it, None where it left as it should; `sign`: when that
    was first seen. `before` and `after` are iterations; `reached`: the last one that it did itself,
    None where it did none. `from_start`: the fault was there when it began. `is_ordered`: someone ended
    its job. `kept`: its last
    two checkpoints, the older first. Moments are in seconds since the epoch.
    """

    nodes: tuple[str, ...]
    start: float
    end: float
    sign: float | None
    fault: Fault | None
    before: int
    after: int
    saved: int
    reached: int | None
    from_start: bool = False
    is_ordered: bool = False
    kept: tuple[int, ...] = ()


def _multiple_after(iteration: int, interval: int) -> int:
    return (iteration // interval + 1) * interval


class Operation(Protocol):
    """Who runs the training: a policy, with all that it remembers."""

    name: str
    needed: int  # nodes without which a task does not start
    most: int  # it takes so many where they are free

    @property
    def next_wake(self) -> float:
        """When it wants to look at the world; never: infinity."""

    def is_ready(self) -> bool:
        """Whether a task is queued that may start."""

    def excluded(self) -> frozenset[str]:
        """The nodes that the queued task may not get."""

    def run_task(self, nodes: tuple[str, ...]) -> None:
        """Use an allocation until it ends."""

    def wake(self) -> None:
        """Look at the world, and set `next_wake` later."""


class World:
    """One replay while it goes on. `now` is in seconds since the epoch. `passed` hears how many
    seconds of it are over.
    """

    def __init__(
        self,
        window: Window,
        layout: Layout,
        parameters: Parameters,
        passed: Callable[[float], None] | None = None,
    ) -> None:
        self._passed = passed
        self.window = window
        self.layout = layout
        self.parameters = parameters
        self.now = BEGIN
        self.end = BEGIN + window.seconds
        self.account = Account()
        self.iteration = 0  # done, and not lost
        self.saved = 0
        self.allocation: tuple[str, ...] = ()
        self.started = BEGIN  # the task that runs, or the last one
        self.launch_began: float | None = None  # while one runs
        self._trains_from = math.inf
        self.trains_on: tuple[str, ...] = ()  # the last launch
        self.trains_until = math.inf  # the launch that runs, because of a fault
        self._is_ordered = False
        self._save_seconds: float | None = None  # of the launch that runs
        self._idle = IdleReason.STARTS
        self._operation: Operation | None = None
        self._faults: dict[str, list[Fault]] = {node: [] for node in window.nodes}
        self._shared: list[Fault] = []
        self._spoilt: dict[Fault, int] = {}  # the last iteration before the data of each fault
        for fault in window.faults:
            moved = replace(fault, start=BEGIN + fault.start, end=BEGIN + fault.end)
            if fault.kind in {FaultSign.SHARED, FaultSign.DATA}:
                self._shared.append(moved)
            else:
                self._faults[fault.node].append(moved)
        self._changes = sorted(self._moments())

    def _moments(self) -> Iterable[float]:
        """When a node comes or goes for the scheduler."""
        for fault in (one for faults in self._faults.values() for one in faults):
            yield fault.start + self._out_after(fault)
            yield fault.end

    def _out_after(self, fault: Fault) -> float:
        """How long the scheduler still offers a node that has this fault."""
        if fault.kind is FaultSign.LOSS:
            return self.parameters.lost_after
        return self.parameters.drained_after

    # ------------------------------------------------------------------ nodes
    def faults_of(self, node: str) -> Sequence[Fault]:
        """All of a node's faults, in order."""
        return self._faults[node]

    def fault_now(self, node: str, moment: float | None = None) -> Fault | None:
        """What ends each launch on a node at a moment; None where nothing does."""
        at = self.now if moment is None else moment
        return next((one for one in self._ending(node) if one.start <= at < one.end), None)

    def hanging(self, nodes: Iterable[str], moment: float) -> tuple[str, ...]:
        """Those of these nodes a worker of which goes no further at a moment."""
        faults = ((node, self.fault_now(node, moment)) for node in nodes)
        return tuple(node for node, one in faults if one is not None and one.kind is FaultSign.HANG)

    def _ending(self, node: str) -> Iterable[Fault]:
        return (one for one in self._faults[node] if one.kind is not FaultSign.DEGRADED)

    def is_offered(self, node: str) -> bool:
        """Whether the scheduler gives this node to a task."""
        return not any(
            fault.start + self._out_after(fault) <= self.now < fault.end
            for fault in self._faults[node]
        )

    def is_down(self, node: str) -> bool:
        """Whether the scheduler holds the node for lost."""
        return any(
            fault.kind is FaultSign.LOSS
            and fault.start + self._out_after(fault) <= self.now < fault.end
            for fault in self._faults[node]
        )

    def is_innocent(self, node: str, moment: float) -> bool:
        """Whether nothing was wrong with a node at a moment, nor for a day before."""
        day = 86_400.0
        return not any(one.start <= moment < one.end + day for one in self._faults[node])

    # ------------------------------------------------------------------ time
    def run(self, operation: Operation) -> None:
        """Let an operation train until the window is over."""
        self._operation = operation
        try:
            while True:
                nodes = self._nodes_for_task(operation)
                before = self.saved
                self.allocation = nodes
                self.started = self.now
                self.account.tasks += 1
                operation.run_task(nodes)
                self.allocation = ()
                self.account.burned += self.saved <= before
                self._idle = IdleReason.STARTS
                self.wait_until(self.now + self.parameters.next_task)
        except WindowOver:
            return

    def _nodes_for_task(self, operation: Operation) -> tuple[str, ...]:
        """Wait until a task may start; its nodes, those first that come first by name."""
        while True:
            self._idle = IdleReason.HELD
            is_ready = operation.is_ready()
            well = [node for node in self.window.nodes if self.is_offered(node)]
            if is_ready:
                barred = operation.excluded()
                free = [node for node in well if node not in barred]
                if len(free) >= operation.needed:
                    return tuple(free[: max(operation.needed, operation.most)])
                self._idle = IdleReason.KEPT_OUT
            if len(well) < self.layout.nodes:
                self._idle = IdleReason.BROKEN
            self.wait_until(min(self._next_change(), operation.next_wake))

    def _next_change(self) -> float:
        place = bisect_right(self._changes, self.now)
        if place < len(self._changes):
            return self._changes[place]
        return math.inf

    def wait_until(self, moment: float) -> None:
        """Let time pass; the operation looks at the world meanwhile. Raises WindowOver."""
        operation = self._operation
        while operation is not None and operation.next_wake <= min(moment, self.end):
            self._move(operation.next_wake)
            operation.wake()
            if self._is_ordered:
                return
        self._move(min(moment, self.end))
        if moment > self.end:
            raise WindowOver

    def _move(self, moment: float) -> None:
        seconds = max(0.0, moment - self.now)
        if self.allocation:
            self.account.held += seconds * len(self.allocation)
        else:
            self.account.waited += seconds
        if self.launch_began is None:
            reason = IdleReason.STARTS if self.allocation else self._idle
            self.account.lost.add_idle(reason, seconds)
        self.now = max(self.now, moment)
        if self._passed is not None:
            self._passed(self.now - BEGIN)

    # ------------------------------------------------------------------ a launch
    def end_launch(self) -> None:
        """End the launch that runs, and its job with it: nothing is saved."""
        self._is_ordered = self.launch_began is not None

    def launch(
        self,
        nodes: tuple[str, ...],
        leaves: float | None = None,
        *,
        save_seconds: float | None = None,
        foresees: bool = False,
    ) -> PlayedLaunch:
        """One start of the workers, to its end. `leaves`: when the trainer saves and leaves by itself.
        `save_seconds`: between two saves, beside those of the interval. `foresees`: it has just saved
        when a fault comes, as no one can. Raises WindowOver.
        """
        self.account.launches += 1
        times = self.parameters
        leaves = math.inf if leaves is None else leaves
        self.iteration = self.saved
        before = self.iteration
        start = self.now
        ready = start + times.start_up + times.load
        fault, comes = self._first_fault(nodes, start, save_seconds)
        from_start = fault is not None and comes <= start
        stops = min(comes, leaves)
        if from_start and fault is not None and fault.kind is FaultSign.HARDWARE:
            stops = start + CHECK_SECONDS
        elif fault is not None and comes < ready:
            stops = min(max(comes, start + times.start_up), leaves)
        self.trains_on = nodes
        self._trains_from = ready
        self.launch_began = start
        self._save_seconds = save_seconds
        sign = stops
        end = stops
        if fault is not None and comes <= leaves:
            sign = stops + self._unseen(fault, from_start)
            end = sign + times.ends_within
        else:
            fault = None
            end = max(stops, start) + times.last_save
        if fault is not None:
            self.trains_until = stops
        self._is_ordered = False
        is_ordered = False
        try:
            self.wait_until(end)
        finally:
            self.launch_began = None
            self.trains_until = math.inf
            is_ordered = self._is_ordered
            self._is_ordered = False
            if is_ordered:
                fault = None
                end = self.now
                stops = min(stops, end)
            is_fine = fault is None and not is_ordered
            trained = min(stops, self.end) - ready
            course = self.course(before, trained, save_seconds)
            self.iteration = course.done
            self.saved = course.saved
            if fault is not None and fault.kind is FaultSign.DATA:
                self._spoilt.setdefault(fault, course.done)
            if is_fine or foresees:
                self.saved = self.iteration
            kept = (*(one for one in course.saves if one < self.saved), self.saved)
            self._note_lost(
                course, start, ready, stops=stops, end=end, begun=before, is_fine=is_fine
            )
        return PlayedLaunch(
            nodes,
            start,
            end,
            sign=None if fault is None else sign,
            fault=fault,
            before=before,
            after=self.iteration,
            saved=self.saved,
            reached=self.iteration if self.iteration > before else None,
            from_start=from_start,
            is_ordered=is_ordered,
            kept=kept[-2:],
        )

    def _note_lost(
        self,
        course: LaunchCourse,
        start: float,
        ready: float,
        *,
        stops: float,
        end: float,
        begun: int,
        is_fine: bool,
    ) -> None:
        """Where the time of a launch went that is over: it trained from `ready` to `stops`."""
        lost = self.account.lost
        stops = max(start, min(stops, self.end))
        end = min(end, self.end)
        trains = min(max(start, ready), stops)
        lost.starts += trains - start
        kept = self.saved
        if self.now >= self.end:
            kept = self.iteration  # what was reached counts then
        lost.add_training(self.parameters, stops - trains, course, begun=begun, kept=kept)
        if is_fine:
            lost.saves += end - stops
        else:
            lost.unseen += end - stops

    def _first_fault(
        self, nodes: Iterable[str], start: float, save_seconds: float | None
    ) -> tuple[Fault | None, float]:
        """What ends a launch that begins now, and when that comes."""
        found: Fault | None = None
        comes = math.inf
        of_nodes = (fault for node in nodes for fault in self._ending(node))
        for fault in (*of_nodes, *self._shared):
            moment = max(fault.start, start, self._comes_to_data(fault, start, save_seconds))
            if fault.end > start and moment < comes:
                found = fault
                comes = moment
        return found, comes

    def _comes_to_data(self, fault: Fault, start: float, save_seconds: float | None) -> float:
        """When a launch that begins now comes to the data that have ended another one; never, where these
        are good by then.
        """
        last = self._spoilt.get(fault)
        if last is None:
            return start
        times = self.parameters
        seconds = 0.0
        while (done := self.course(self.iteration, seconds, save_seconds).done) < last:
            seconds += max((last - done - 1) * times.step, times.step / 4)
        # within the step: at its edge a rounding would end the launch a step earlier
        moment = start + times.start_up + times.load + seconds + times.step / 2
        if moment >= fault.end:
            return math.inf
        return moment

    def _unseen(self, fault: Fault, from_start: bool) -> float:
        """From a fault to its first sign."""
        if fault.unseen is not None and not from_start:
            return fault.unseen
        if fault.kind in {FaultSign.NETWORK, FaultSign.HANG}:
            return self.parameters.silent_for
        if fault.kind is FaultSign.LOSS and not from_start:
            return self.parameters.lost_after
        return 0.0

    def course(
        self, iteration: int, seconds: float, save_seconds: float | None = None
    ) -> LaunchCourse:
        """What comes of so many seconds of training from `iteration` on, which was saved. It saves
        each `interval` iterations, and so long after the last save has begun, where that is said.
        """
        times = self.parameters
        every = math.inf if save_seconds is None else save_seconds
        done = iteration
        saved = iteration
        spent = 0.0
        began = 0.0
        saves: list[int] = []
        evaluations: list[int] = []
        while spent < seconds:
            following = min(
                _multiple_after(done, times.interval),
                _multiple_after(done, times.evaluation_interval),
            )
            if began + every < spent + (following - done) * times.step:
                late = max(1, math.ceil((began + every - spent) / times.step))
                following = min(following, done + late)
            need = (following - done) * times.step
            if spent + need > seconds:
                done += int((seconds - spent) / times.step)
                break
            done = following
            spent = spent + need
            if done % times.interval == 0 or spent >= began + every:
                began = spent
                spent += times.save
                saves.append(done)
                if began + times.last_save <= seconds:
                    saved = done
            if done % times.evaluation_interval == 0:
                spent += times.evaluation
                evaluations.append(done)
        return LaunchCourse(done, saved, saves, evaluations)

    @property
    def seen(self) -> tuple[int, int]:
        """The iterations done and saved, as someone sees it who looks now."""
        if self.launch_began is None or self.now < self._trains_from:
            return self.iteration, self.saved
        trained = min(self.now, self.trains_until) - self._trains_from
        course = self.course(self.iteration, trained, self._save_seconds)
        return course.done, course.saved

    @property
    def is_training(self) -> bool:
        """Whether the launch that runs has done with its start."""
        return self.launch_began is not None and self.now >= self._trains_from


WEEK = 7 * 86_400.0
HOUR = 3600.0


class Score(Record):
    """One operation's result over one window.

    `effective`: the share of all time in which iterations were trained that were kept. `wasted`:
    node-hours held beyond what these iterations took. `acts` are people's, `mails` to them, a week.
    `innocent`: of the nodes that were `excluded`, those with nothing wrong for a day. `burned`: of
    the `tasks`, those that added no checkpoint. `lost_percent`: of all time, by the fields of
    `LostTime`.
    """

    operation: str
    window: str
    effective: float
    wasted: float
    acts: int
    mails: float
    innocent: int
    excluded: int
    burned: int
    tasks: int
    launches: int
    iterations: int
    waited_hours: float
    faults: int
    lost_percent: Mapping[str, float]

    @property
    def percent(self) -> float:
        """`effective`, of a hundred."""
        return 100 * self.effective

    @classmethod
    def of(cls, world: World, operation: str) -> Score:
        """Of a replay that is over."""
        account = world.account
        done = world.iteration
        useful = done * world.parameters.step
        return cls(
            operation,
            world.window.label,
            effective=useful / world.window.seconds,
            wasted=(account.held - useful * world.layout.nodes) / HOUR,
            acts=account.acts,
            mails=account.mails * WEEK / world.window.seconds,
            innocent=account.innocent,
            excluded=account.excluded,
            burned=account.burned,
            tasks=account.tasks,
            launches=account.launches,
            iterations=done,
            waited_hours=account.waited / HOUR,
            faults=len(world.window.faults),
            lost_percent={
                name: 100 * seconds / world.window.seconds
                for name, seconds in asdict(account.lost).items()
            },
        )
