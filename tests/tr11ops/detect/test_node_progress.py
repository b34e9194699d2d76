"""How far each node is, and which one computes for longer than the others."""

from __future__ import annotations

from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, beats, changed, idle, running, snapshot, wordless
from tr11ops.base.observed import Unknown
from tr11ops.detect.node_progress import node_progress
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.compute_record import ComputeTimes


def measured(given: Snapshot, seconds: dict[str, float]) -> Snapshot:
    """With one rank on each of these hosts, of one place, that take so long for a step."""
    times = tuple(
        ComputeTimes(
            rank,
            host,
            1,
            NOW,
            31210,
            10,
            {"forward": own},
            longest=own,
            stage=0,
            part=0,
            recent=(own,) * 20,
            windows=(own,) * 60,
        )
        for rank, (host, own) in enumerate(seconds.items())
    )
    return changed(given, compute_times=times)


def test_the_slow_node_is_told_with_its_rank_and_factor() -> None:
    nodes = running().nodes[:5]
    seconds = dict.fromkeys(nodes, 2.0) | {f"{nodes[3]}.cluster.example": 3.0}
    del seconds[nodes[3]]
    found = {one.node: one for one in node_progress(measured(snapshot(), seconds))}
    assert set(found) == set(running().nodes)
    slow = found[nodes[3]]
    assert slow.is_slow and slow.pace is not None
    assert (slow.pace.seconds, slow.pace.times_usual) == (3.0, 1.5)
    assert found[nodes[0]].pace is not None and not found[nodes[0]].is_slow
    assert found[nodes[0]].pace.times_usual == 1.0
    assert found[running().nodes[-1]].pace is None, "no rank of it has measured anything"


def test_of_a_node_it_is_the_rank_that_is_furthest_behind_and_the_most_silent_one() -> None:
    given = snapshot()
    first, second, *_ = beats()
    first = replace(first, iteration=31217, phase="data-wait", time=NOW - 9)
    second = replace(second, host=first.host, iteration=31219, time=NOW - 40)
    found = node_progress(replace(given, heartbeats=(first, second)))
    [own] = [one for one in found if one.node == first.host.partition(".")[0]]
    assert (own.ranks, own.iteration, own.phase, own.silent_seconds) == (2, 31217, "data-wait", 40)
    others = [one for one in found if one is not own]
    assert all(one.ranks == 0 and one.silent_seconds is None for one in others)


def test_a_node_that_the_launch_does_without_is_spare_as_long_as_no_rank_speaks_there() -> None:
    nodes = running().nodes
    attempt = wordless(running().raw_id)
    given = replace(snapshot(), attempts=(attempt,), heartbeats=())
    given = changed(given, launch_nodes=nodes[:-2])
    spare = [one.node for one in node_progress(given) if one.is_spare]
    assert spare == list(nodes[-2:])
    unknown = changed(given, launch_nodes=Unknown("unreadable"))
    assert not any(one.is_spare for one in node_progress(unknown))


def test_without_a_job_there_is_no_node() -> None:
    assert node_progress(idle()) == ()
    assert node_progress(snapshot(jobs=Unknown("no answer"))) == ()
