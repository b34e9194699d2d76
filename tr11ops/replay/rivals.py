"""Other ways to run a training, in the same world: what people do without tr11, and an oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tr11ops.replay.parameters import IN_BACKGROUND, Layout
from tr11ops.replay.traces import FaultSign, Window
from tr11ops.replay.world import PlayedLaunch, Score, World

ARRAY = 10  # tasks that are queued at once
DAY = 86_400.0


class Chain:
    """An array of batch jobs, one after another, without exclusion: each takes the nodes that it
    gets, and ends with its first fault. When the array is used up, someone submits another.
    """

    name = "sbatch array"
    next_wake = math.inf
    most = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = ARRAY
        self.needed = world.layout.nodes

    def is_ready(self) -> bool:
        """Also submits the next array, once someone has come."""
        if self._left == 0:
            self._world.account.acts += 1
            self._world.wait_until(self._world.now + self._world.parameters.person)
            self._left = ARRAY
        return True

    def excluded(self) -> frozenset[str]:
        return frozenset()

    def wake(self) -> None:
        """It never looks."""

    def run_task(self, nodes: tuple[str, ...]) -> None:
        self._left -= 1
        self._after(self._world.launch(nodes, self.leaves))

    def _after(self, end: PlayedLaunch) -> None:
        """What is done about the end of a launch."""

    @property
    def leaves(self) -> float:
        """When the trainer of a task leaves, before its limit."""
        times = self._world.parameters
        return self._world.started + times.time_limit - times.leaves_before


class ExcludeFirst(Chain):
    """The same, and someone's script excludes a node for 14 days when it is named by its own error or
    by the scheduler; where only others lost it, the node that the last of them was waiting for.
    """

    name = "exclude at first failure"
    days = 14.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._until: dict[str, float] = {}

    def excluded(self) -> frozenset[str]:
        """Never so many that too few are left: then the oldest go back."""
        now = self._world.now
        held = [node for node, until in sorted(self._until.items(), key=_second) if until > now]
        most = len(self._world.window.nodes) - self.needed
        return frozenset(held[max(0, len(held) - most) :])

    def _after(self, end: PlayedLaunch) -> None:
        if end.fault is None:
            return
        node = end.fault.node
        if node not in self.excluded():
            self._world.account.excluded += 1
            self._world.account.innocent += self._world.is_innocent(node, self._world.now)
        self._until[node] = self._world.now + self.days * DAY


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


class RetryBudget(Chain):
    """Restarts inside the job with spares, by a budget, as NVRx's launcher does it.

    Three restarts without progress are its default (`max_no_progress_restarts`). Ten restarts of a
    job are assumed, twice the 5 that NVIDIA's guide of the launcher shows. A node that fails the
    health check at a rendezvous is left out for a spare; what no health check finds is used again.
    """

    name = "NVRx's retry budget"
    restarts = 10
    without_progress = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.needed = world.layout.allocated

    def run_task(self, nodes: tuple[str, ...]) -> None:
        self._left -= 1
        world = self._world
        left_out: set[str] = set()
        fruitless = 0
        for _ in range(self.restarts + 1):
            usable = [node for node in nodes if node not in left_out]
            if len(usable) < world.layout.nodes:
                return
            end = world.launch(tuple(usable[: world.layout.nodes]), self.leaves)
            if end.fault is None:
                return
            if end.fault.kind in {FaultSign.HARDWARE, FaultSign.LOSS}:
                left_out.add(end.fault.node)
            fruitless = 0 if end.saved > end.before else fruitless + 1
            if fruitless >= self.without_progress:
                return
            world.wait_until(world.now + world.parameters.relaunch)


class Oracle(Chain):
    """It knows all that will happen: it chooses the nodes that stay well longest, has just saved when
    a fault comes, and swaps at once. Where fewer nodes are well than train, one who keeps those with
    a slow fault longer may do better.
    """

    name = "oracle"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.needed = 0

    def run_task(self, nodes: tuple[str, ...]) -> None:
        world = self._world
        while world.now < self.leaves:
            best = self._best()
            if len(best) < world.layout.nodes:
                return
            world.allocation = best
            end = self._launch(best)
            if end.fault is None:
                return

    def _launch(self, nodes: tuple[str, ...]) -> PlayedLaunch:
        return self._world.launch(nodes, self.leaves, foresees=True)

    def is_ready(self) -> bool:
        return len(self._best()) == self._world.layout.nodes

    def _best(self) -> tuple[str, ...]:
        """The nodes to train on now: of those that are well, the best."""
        world = self._world
        well = [node for node in world.window.nodes if world.fault_now(node) is None]
        offered = [node for node in well if world.is_offered(node)]
        offered.sort(key=self._merit, reverse=True)
        return tuple(offered[: world.layout.nodes])

    def _merit(self, node: str) -> float:
        """Until when it stays well."""
        now = self._world.now
        coming = (
            fault.start
            for fault in self._world.faults_of(node)
            if fault.start > now and fault.kind is not FaultSign.DEGRADED
        )
        return min(coming, default=math.inf)


class NoForesight(Oracle):
    """It knows at once what is well now, takes the nodes whose last fault is longest over, and swaps
    at once, but knows nothing of what comes. It saves at one interval, in seconds, which can be
    chosen when all is over: about the best that a policy without foresight can reach.
    """

    name = "no foresight"
    tried = (300.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0, math.inf)

    def __init__(self, world: World, save_seconds: float) -> None:
        super().__init__(world)
        self._save_seconds = save_seconds

    def _launch(self, nodes: tuple[str, ...]) -> PlayedLaunch:
        return self._world.launch(nodes, self.leaves, save_seconds=self._save_seconds)

    def _merit(self, node: str) -> float:
        """For how long its last fault is over."""
        now = self._world.now
        over = (fault.end for fault in self._world.faults_of(node) if fault.end <= now)
        return now - max(over, default=-math.inf)


RIVALS: Mapping[str, type[Chain]] = {
    one.name: one for one in (Chain, ExcludeFirst, RetryBudget, Oracle)
}


def rival_scores(part: Window, layout: Layout) -> Iterator[Score]:
    """What each of them makes of a window, and the best of one interval in hindsight."""
    for name, rival in RIVALS.items():
        world = World(part, layout, IN_BACKGROUND)
        world.run(rival(world))
        yield Score.of(world, name)
    yield max((_with_interval(part, layout, one) for one in NoForesight.tried), key=_effective)


def _with_interval(part: Window, layout: Layout, save_seconds: float) -> Score:
    world = World(part, layout, IN_BACKGROUND)
    world.run(NoForesight(world, save_seconds))
    return Score.of(world, NoForesight.name)


def _effective(score: Score) -> float:
    return score.effective
