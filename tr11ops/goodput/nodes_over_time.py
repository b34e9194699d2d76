"""How many of an attempt's nodes worked, were spare, or were lost, from moment to moment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tr11ops.goodput.history_values import AttemptHistory, Period, edges, micro
from tr11ops.goodput.timeline import launches_of
from tr11ops.rundir.attempts import LaunchRecord


class NodeUsage(NamedTuple):
    """From `start` to `end` (microseconds): nodes in use, or about to be; nodes held in reserve; nodes lost."""

    start: int
    end: int
    working: int
    spare: int
    lost: int


def node_usage_of(attempt: AttemptHistory, exclusions: Sequence[Period], begin: int, end: int) -> list[NodeUsage]:
    """The attempt's nodes from `begin` to `end`, without a gap; the numbers always add up to all nodes.

    Between two launches the nodes of the next one count as working. Lost is a node that a launch's end was blamed on,
    or that was excluded, unless a later launch uses it.
    """
    nodes = frozenset(attempt.nodes)
    launches = launches_of(attempt)
    near = [period for period in exclusions if period.what in nodes and micro(period.start) < end]
    moments = {begin, end} | edges(launches) | edges(near)
    crews: list[NodeUsage] = []
    for start, until in pairwise(sorted(moment for moment in moments if begin <= moment <= end)):
        working, lost = _at(start, nodes, launches, near)
        counts = (len(working), len(nodes) - len(working) - len(lost), len(lost))
        if crews and crews[-1][2:] == counts:
            crews[-1] = crews[-1]._replace(end=until)
        else:
            crews.append(NodeUsage(start, until, *counts))
    return crews


def _at(
    moment: int, nodes: frozenset[str], launches: Sequence[LaunchRecord], exclusions: Sequence[Period]
) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes that worked and those that were lost at one moment."""
    active = chosen = None
    blamed: set[str] = set()
    for launch in launches:
        begun = micro(launch.start) <= moment
        over = launch.end is not None and micro(launch.end) <= moment
        if begun and not over:
            active = launch
        if begun or chosen is None or micro(chosen.start) <= moment:
            chosen = launch  # the one that runs, else the next, else the last
        if begun and over:
            blamed.update(launch.blamed or (launch.suspects if launch.cause == "node" else ()))
    if active is not None:
        chosen = active
    used = frozenset(active.nodes) & nodes if active is not None else frozenset[str]()
    excluded = {period.what for period in exclusions if period.holds_at(moment)}
    lost = (nodes & (blamed | excluded)) - used
    meant = frozenset(chosen.nodes) & nodes if chosen is not None else nodes
    return meant - lost, lost
