"""What a run holds and costs, and whose it is: what a list of several runs says beside each one's
status.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.base.units import counted
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.goodput.history_values import AttemptHistory
    from tr11ops.observe.snapshot import Snapshot
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

    # when it was read, the jobs that ran, the attempts, the energy
    Kept: TypeAlias = tuple[float, list[str], Observed[tuple[AttemptHistory, ...]], Observed[float]]

JOULES_IN_KWH = 3.6e6
MICROS_IN_HOUR = 3.6e9
KEPT_SECONDS = 600.0  # what has ended changes seldom, and takes time to read


class RunUse(Record):
    """`team`: "" where the card names none. `node_hours`: held so far, as `tr11 goodput` counts them;
    `gpu_hours` by the card's GPUs of a node; `cost` of these by its price, in `currency`;
    `energy_kwh` by the site's accounting. None where that is not known.
    """

    team: str = ""
    node_hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    currency: str = ""
    energy_kwh: float | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What it has cost, as far as that is known."""
        cost = {} if self.cost is None else {self.currency: self.cost}
        return amounts(self.node_hours, self.gpu_hours, cost, self.energy_kwh)


class UseTotal(Record):
    """What several runs hold together: `nodes` now, the rest so far. A sum is of what is known: the
    `unknown` runs are in none of it. `cost` by currency.
    """

    runs: int
    nodes: int
    node_hours: float | None
    gpu_hours: float | None
    cost: dict[str, float]
    energy_kwh: float | None
    unknown: int

    @property
    def words(self) -> tuple[str, ...]:
        """All of it but the number of runs."""
        sums = amounts(self.node_hours, self.gpu_hours, self.cost, self.energy_kwh)
        found = (f"{counted(self.nodes, 'node')} held now", *sums)
        if self.unknown:
            return (*found, f"without {counted(self.unknown, 'run')}, of which that is not known")
        return found


def amounts(
    node_hours: float | None,
    gpu_hours: float | None,
    cost: Mapping[str, float],
    energy_kwh: float | None,
) -> tuple[str, ...]:
    """What is known of them, in words."""
    found = []
    if node_hours is not None:
        found.append(f"{node_hours:,.1f} node-hours")
    if gpu_hours is not None:
        found.append(f"{gpu_hours:,.1f} GPU-hours")
    found += [f"{amount:,.2f} {currency}" for currency, amount in sorted(cost.items())]
    if energy_kwh is not None:
        found.append(f"{energy_kwh:,.1f} kWh")
    return tuple(found)


def use_of(card: RunCard, node_hours: float | None, joules: Observed[float]) -> RunUse:
    """By the card's rules. Pure."""
    rules = card.operation
    gpu_hours = cost = None
    if node_hours is not None and card.slurm.gpus_per_node:
        gpu_hours = node_hours * card.slurm.gpus_per_node
        if rules.gpu_hour_price is not None:
            cost = gpu_hours * rules.gpu_hour_price
    energy = known(joules, None)
    return RunUse(
        team=rules.team or card.slurm.account or "",
        node_hours=node_hours,
        gpu_hours=gpu_hours,
        cost=cost,
        currency=rules.currency if cost is not None else "",
        energy_kwh=None if energy is None else energy / JOULES_IN_KWH,
    )


def total_use(uses: Sequence[RunUse], runs: int, nodes: int) -> UseTotal:
    """The sums of several runs. Pure."""
    cost: dict[str, float] = {}
    for use in uses:
        if use.cost is not None:
            cost[use.currency] = cost.get(use.currency, 0.0) + use.cost
    return UseTotal(
        runs=runs,
        nodes=nodes,
        node_hours=_sum([use.node_hours for use in uses]),
        gpu_hours=_sum([use.gpu_hours for use in uses]),
        cost=cost,
        energy_kwh=_sum([use.energy_kwh for use in uses]),
        unknown=runs - sum(use.node_hours is not None for use in uses),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None


class UseReader:
    """Reads what runs have used. The attempts of a run are kept for some minutes, as long as the same
    jobs run: what they have held is counted at the moment of each look.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def read(self, card: RunCard, directory: RunDirectory, snapshot: Snapshot) -> RunUse:
        """Of one run, which was looked at just now. Never raises for what cannot be read."""
        from tr11ops.goodput.account import held_micros
        from tr11ops.goodput.history import read_attempts_alone

        if snapshot.unmounted or not directory.exists:
            return use_of(card, None, Unknown("the run directory is not there"))
        key = str(directory.root)
        running = [job.job_id for job in snapshot.active_jobs]
        kept = self._kept.get(key)
        if kept is None or kept[1] != running or time.monotonic() - kept[0] > KEPT_SECONDS:
            attempts = observed(read_attempts_alone, directory, snapshot.jobs)
            kept = (time.monotonic(), running, attempts, energy_of(directory, snapshot))
            self._kept[key] = kept
        _, _, attempts, joules = kept
        if isinstance(attempts, Unknown):
            return use_of(card, None, joules)
        return use_of(card, held_micros(attempts, snapshot.time) / MICROS_IN_HOUR, joules)


def energy_of(directory: RunDirectory, snapshot: Snapshot) -> Observed[float]:
    """Joules of all its jobs, where Slurm accounts them."""
    from tr11ops.cluster.energy import consumed_joules

    if snapshot.scheduler != "slurm":
        return Unknown(f"{snapshot.scheduler or 'no scheduler'}: no accounting of energy")
    jobs = observed(directory.attempt_ids)
    if isinstance(jobs, Unknown):
        return jobs
    return consumed_joules([job for job in jobs if job.isascii() and job.isdigit()])
