"""Which excluded nodes a scheduler is given: those that it knows. Pure.

A site removes and renames nodes. Slurm refuses a whole list for one name that it does not know, a
new submission's as well as a change of queued work, and keeps such names in the list of work that
was queued before. So what the scheduler does not know is left out of what it is given, and stays on
the run's list: under its name it may come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Scheduler
from trainer.contract.record import Record


class Given(Record):
    """`nodes` are what the scheduler is given, `left_out` what it does not know; each once, in the
    order asked.
    """

    nodes: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def given_to_scheduler(names: Iterable[str], known: Collection[str] | None) -> Given:
    """`known` are the names of all nodes of the cluster; None or empty where they could not be
    read: all are given.
    """
    every = tuple(dict.fromkeys(names))
    if not known:
        return Given(every)
    there = frozenset(known)
    return Given(tuple(n for n in every if n in there), tuple(n for n in every if n not in there))


def known_names(scheduler: Scheduler) -> frozenset[str] | None:
    """The names of the cluster's nodes; None where the scheduler does not tell them."""
    try:
        return frozenset(node.name for node in scheduler.nodes())
    except SchedulerError:
        return None
