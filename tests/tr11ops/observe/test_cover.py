"""What is queued or runs and covers none of the training that is left: one answer, for all who say
how long it lasts.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    facts_with,
    pending,
    running,
    snapshot,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import Node
from tr11ops.detect.detector import Severity
from tr11ops.detect.queued_work import chain_end
from tr11ops.detect.site import nodes_short, waits_for_site
from tr11ops.handover.coming import coming_events
from tr11ops.observe.forecast import no_cover, queue_coverage_seconds
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import plan_repair
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.status.answer import answer
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.rows import jobs
from tr11ops.watchdog.verdict import judge

NODES = tuple(
    Node(f"n{number:02d}", frozenset({"mixed"}), partitions=("gpu",)) for number in range(1, 49)
)
HOST = replace(wordless("1007"), nodes=tuple(node.name for node in NODES))
SHORT = running(time_limit_seconds=2400, start_time=NOW - 1000)
QUEUED: dict[str, Any] = {"partition": "gpu", "time_limit_seconds": 2400}


def first(*words: str) -> tuple[Node, ...]:
    """The nodes, the first of them in this state."""
    return (replace(NODES[0], states=frozenset(words)), *NODES[1:])


def seen(nodes: tuple[Node, ...] = NODES, **changes: Any) -> Snapshot:
    queued = pending(**{**QUEUED, **changes})
    return with_facts(snapshot(jobs=(SHORT, queued), nodes=nodes, attempts=(HOST,)), exit_plan=None)


SILENT = "job 1000_7: n01, which runs its batch script, does not answer the scheduler"
FEW = "47 of 48 nodes of gpu can be used, it asks for 48"
CLOSED = tuple(replace(node, shut_partitions=("gpu",)) for node in NODES)
CASES = {
    "its partition is down": (seen(CLOSED), ["job 1000_[8-10%1] (3 tasks): the site has closed its partition"], 1400.0),
    "it says so": (
        seen(reason="PartitionDown"),
        ["job 1000_[8-10%1] (3 tasks): the site has closed its partition (PartitionDown)"],
        1400.0,
    ),
    "a node is drained": (seen(first("mixed", "drain")), [f"job 1000_[8-10%1] (3 tasks): {FEW}"], 1400.0),
    "the batch host is silent": (
        seen(first("mixed", "not_responding")), [SILENT, f"job 1000_[8-10%1] (3 tasks): {FEW}"], 0.0,
    ),
    "the batch host is down": (
        seen(first("down", "not_responding")),
        ["job 1000_7: it has lost n01, which ran its batch script", f"job 1000_[8-10%1] (3 tasks): {FEW}"],
        0.0,
    ),
    "it is held": (seen(reason="JobHeldUser"), ["job 1000_[8-10%1] (3 tasks): it is held (JobHeldUser)"], 1400.0),
    "it may not start for days": (
        seen(eligible_time=NOW + 3 * 24 * HOUR),
        ["job 1000_[8-10%1] (3 tasks): it may not start before 2022-05-04 12:00 UTC"],
        1400.0,
    ),
    "it may start when this one ends": (seen(eligible_time=NOW + 1000.0), [], 1400.0 + 3 * 2400.0),
    "all is well": (seen(), [], 1400.0 + 3 * 2400.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_go_on_covers_nothing_and_is_named_with_its_reason(case: str) -> None:
    given, words, seconds = CASES[case]
    assert [str(one) for one in no_cover(given)] == words
    assert queue_coverage_seconds(given, only_sure=True) == seconds
    verdict = judge(given, ())
    document = status_of(given, (), verdict).document()
    assert document["queue_sure_seconds"] == seconds
    assert [(one["job"], one["why"]) for one in document["no_cover"]] == [
        (line.split(" ")[1].rstrip(":"), line.split(": ", 1)[1]) for line in words
    ]
    rows = " / ".join(text for _, text, _ in jobs(status_of(given, (), verdict)))
    assert all(line in rows for line in words), rows
    assert ("covers nothing" in rows) is (seconds == 0)
    said = answer(given, (), verdict, ExtraObservations()).text
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    coming = " / ".join(
        event.text for event in coming_events(given, ExtraObservations(), card, 12 * HOUR)
    )
    if words:
        assert words[0] in said or verdict.exit_code == 1, said
        assert all(line in coming for line in words), coming
    else:
        assert "no cover" not in rows and "cannot start" not in coming


def test_a_task_whose_host_is_silent_is_not_counted_as_the_next_one() -> None:
    """One task is left behind it, where the night was thought to hold two."""
    one = pending((8,), **QUEUED, node_count=40)
    silent = with_facts(
        snapshot(jobs=(SHORT, one), nodes=first("mixed", "not_responding"), attempts=(HOST,))
    )
    (finding,) = chain_end.detect(silent)
    assert finding.title == "the last task of the queue is waiting"
    assert f"no cover is {SILENT}" in finding.evidence


def test_thousands_of_single_tasks_with_one_reason_are_one() -> None:
    queued = tuple(
        pending((task,), **QUEUED, reason="JobHeldUser", raw_id=str(5000 + task), task_id=task)
        for task in range(3000)
    )
    (one,) = no_cover(snapshot(jobs=queued, nodes=NODES))
    assert (one.job, one.tasks, one.why) == ("1000", 3000, "it is held (JobHeldUser)")


@pytest.mark.parametrize(
    ("nodes", "allocated", "fix"),
    [
        (first("down"), 47, ""),  # what is queued needs no more, whatever the card says now
        (
            first("down"),
            48,
            "tr11 launch --replace --set slurm.spare_nodes=3",
        ),  # 44 train, 47 are left
        (
            tuple(replace(node, states=frozenset({"down"})) for node in NODES[:5]) + NODES[5:],
            48,
            "tr11 nodes list",
        ),
    ],
)
def test_where_those_that_train_fit_the_cure_is_fewer_spares(
    nodes: tuple[Node, ...], allocated: int, fix: str
) -> None:
    """The site alone mends nodes; without its spares the run goes on now."""
    queued = pending(**QUEUED, node_count=allocated)
    given = with_facts(snapshot(jobs=(queued,), nodes=nodes), nodes=44)
    given = replace(
        given,
        run=facts_with(given.run, allocated_nodes=48),
    )
    assert [one.fix for one in nodes_short.detect(given)] == ([fix] if fix else [])


def test_a_repair_says_why_what_is_queued_cannot_start() -> None:
    given = snapshot(jobs=(pending(**QUEUED),), nodes=first("down"))
    assert plan_repair(given, ()).left_alone == (f"job 1000 cannot start as things are: {FEW}",)


@pytest.mark.parametrize("left", [400.0, 20 * HOUR])
def test_a_closed_partition_is_told_before_the_running_task_ends(left: float) -> None:
    now_ends = replace(SHORT, time_limit_seconds=int(1000 + left))
    given = with_facts(
        snapshot(jobs=(now_ends, pending(**QUEUED)), nodes=CLOSED, attempts=(HOST,)),
        exit_plan=None,
    )
    (finding,) = waits_for_site.detect(given)
    assert finding.severity is Severity.WARNING
    assert "only the site can change that" in finding.evidence[1]
