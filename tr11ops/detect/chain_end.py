"""The array's end is in sight: the queued tasks do not cover the training that is left."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.held import holds_as_it_leaves
from tr11ops.observe import derived
from tr11ops.observe.forecast import end_of, no_cover, queue_coverage_seconds, trains_on
from tr11ops.observe.snapshot import Snapshot

BOUND = "`watch.tasks_left` (2)"
SEVERITIES = "WARNING"
SHOWN = 3  # of what is no cover
NAME = "chain-end"
NEEDS = ("jobs", "kill_switch", "pause", "steps", "submissions", "attempts", "nodes")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING when fewer than watch.tasks_left tasks wait behind the one that trains now, or that
    trains next.

    Silent when those that are left cover the rest of the training, and where some of them start
    when the site is done. Tasks for which too few nodes can be used cover nothing; nodes-short
    tells of them. Nor is it told while an attempt leaves that has held what is queued for its
    fault: its end says why, and what helps.
    """
    active, waiting = trains_on(snapshot), derived.sure_jobs(snapshot)
    if (not active and not waiting) or derived.stop_of(snapshot) is not None:
        return
    unseen = (snapshot.steps, snapshot.submissions, snapshot.attempts, snapshot.nodes)
    if any(isinstance(seen, Unknown) for seen in unseen):
        # what is left to train, or to queue, how long that takes, or whether the site lets it,
        # cannot be told
        return
    if not snapshot.steps and derived.total_iterations(snapshot) is not None:
        return  # the first step tells how long all takes
    if (
        derived.some_wait_for_site(snapshot)
        or derived.some_wait_for_nodes(snapshot)
        or holds_as_it_leaves(snapshot)
    ):
        return  # another launch would meet the same
    tasks = derived.queued_tasks(waiting) + len(active) + derived.tasks_to_come(snapshot)
    end, covered = end_of(snapshot), queue_coverage_seconds(snapshot, only_sure=True)
    remaining = None if end is None else end.earliest
    behind = tasks - 1
    if behind >= snapshot.run.watch.tasks_left:
        return
    if remaining is not None and covered is not None and remaining <= covered:
        return
    last = "the last task of the queue " + ("is running" if active else "is waiting")
    if behind == 1:
        more = "one more task is"
    else:
        more = f"{behind} more tasks are"
    if behind < 1:
        title = last
    else:
        title = f"{more} queued after " + ("this one" if active else "the next one")
    evidence = []
    if remaining is not None:
        if covered is None:
            held = ""
        else:
            held = f", the queue holds {duration(covered)}"
        evidence.append(f"{duration(remaining)} of training are left{held}")
    evidence += [f"no cover is {one}" for one in no_cover(snapshot)[:SHOWN]]
    yield Finding(
        NAME,
        Severity.WARNING,
        title,
        subject=derived.last_of_queue(snapshot),
        evidence=tuple(evidence),
        fix=derived.launch_more(snapshot),
    )
