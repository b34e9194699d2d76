"""From innocent to excluded, and back; how many nodes may be; and what the runs of a site tell each other of nodes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.agent.queues import Queue
from tests.tr11ops.detect.operation_table import operated
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.status_cases import pending, running
from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.node_exclusions import NodeExclusions
from tr11ops.agent.step import LineTee
from tr11ops.cli.nodes_check import NodesContext
from tr11ops.cluster.base import Job, Node, Partition
from tr11ops.cluster.local import LocalScheduler
from tr11ops.detect.nodes_left import exclusion_limit
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.runcard.card import load_card
from tr11ops.rundir.exclusion import (
    GOOD_SECONDS,
    Exclusion,
    ExclusionLimit,
    NodeStanding,
    after_attribution,
    after_good_use,
    family,
    is_broad,
    most_exclusions,
    partition_nodes,
    percent_for,
    what_comes_next,
)
from tr11ops.rundir.exclusions import include, publish, read_shared, read_version, revise
from tr11ops.rundir.paths import RunDirectory, require_run_id, run_id
from trainer.contract.paths import RunPaths


@given(st.integers(0, 400), st.integers(0, 400), st.none() | st.floats(0, 100, allow_nan=False))
def test_the_limit_never_reaches_into_what_is_needed(
    partition: int, needed: int, percent: float | None
) -> None:
    most = most_exclusions(partition, needed, percent)
    assert most >= 0 and (most == 0 or partition - most >= needed)
    if percent is not None:
        assert most <= partition * percent / 100 + 1


@pytest.mark.parametrize(
    ("partition", "needed", "percent", "most"),
    [
        (52, 48, 10, 4), (500, 48, 10, 50), (6, 2, 10, 1), (48, 48, 10, 0), (5, 2, 10, 1), (8, 4, 0, 0),
        (8, 4, None, 2),  # two bad nodes do not stop a run of four
        (8, 7, None, 1), (8, 1, None, 1), (6, 2, None, 2), (5, 5, None, 0), (52, 48, None, 4), (500, 48, None, 50),
    ],
)  # fmt: skip
def test_the_limit(partition: int, needed: int, percent: float | None, most: int) -> None:
    assert most_exclusions(partition, needed, percent) == most


def test_what_is_outside_the_partition_does_not_count() -> None:
    limit = ExclusionLimit.of(("n1", "n2", "n3", "n4"), 2, 25)
    assert (limit.most, limit.counted({"n1", "gone", "cpu1"})) == (1, 1)
    assert (
        limit.forbids(["n2"], {"n1"})
        and not limit.forbids(["n2"], {"gone"})
        and not limit.forbids(["n1"], {"n1"})
    )
    assert not limit.forbids(["cpu1"], {"n1"}), "it takes nothing from the run"
    assert limit.forbids(["n1", "n2"], ()) and not limit.forbids(["n1", "cpu1"], ())
    assert not limit.forbids(["n1", "cpu1"], {"n1", "n2"}), (
        "what is beyond the limit already may stay"
    )
    assert ExclusionLimit(1).forbids(["n2"], {"anything"}), (
        "where the partition is not known, all count"
    )


CLUSTER = (
    *(Node(f"n{number}", frozenset({"idle"}), partitions=("gpu_p5",)) for number in range(1, 9)),
    *(Node(f"m{number}", frozenset({"idle"}), partitions=("gpu_p6",)) for number in range(1, 6)),
)


@pytest.mark.parametrize(
    ("of_card", "job", "most", "needed"),
    [
        ("gpu_p5", pending(partition="gpu_p5", node_count=4), 2, 4), ("gpu_p6", None, 1, 4),
        # a person has moved the job: it starts there
        ("gpu_p6", pending(partition="gpu_p5", node_count=4), 2, 4),
        # what follows it goes where the card says
        ("gpu_p6", running(partition="gpu_p5", node_count=4), 1, 4),
        # the cluster's default one is another
        ("", pending(partition="gpu_p6", node_count=4), 1, 4),
        ("", pending(partition="gpu_p5,gpu_p6", node_count=4), 4, 4),  # the job may go to either
        # it was queued as the card was before
        ("gpu_p5", pending(partition="gpu_p5", node_count=7), 1, 7),
        ("gpu_p5", pending(partition="gpu_p5", node_count=8), 0, 8),
        ("gpu_p5", pending(partition="gpu_p5", node_count=2, reason="JobHeldUser", priority=0), 2, 2),
        # what can never start there needs nothing
        ("gpu_p5", pending(partition="gpu_p6", node_count=6), 2, 4),
        ("gpu_p5", pending(partition="gpu_p5", node_count=8, reason="BadConstraints"), 2, 4),
        ("gpu_p5", running(partition="gpu_p5", node_count=7), 2, 4),  # it has its nodes
    ],
)  # fmt: skip
def test_everyone_who_asks_gets_the_same_answer(
    tmp_path: Path, of_card: str, job: Job | None, most: int, needed: int
) -> None:
    """What is queued counts, before the card, spares and one partition."""
    named = [f"slurm.partition={of_card}"] if of_card else []
    limit = answer(tmp_path, job, *named)
    assert (limit.most, limit.needed) == (most, needed)


@pytest.mark.parametrize(
    ("excluded", "most", "counting"),
    [("n[1-2]", 1, 6), ("n[1-4]", 0, 4), ("n1,m1", 2, 7), ("other", 2, 8)],
)
def test_what_the_card_excludes_is_not_there_for_an_attempt(
    tmp_path: Path, excluded: str, most: int, counting: int
) -> None:
    """Four are needed of eight: with two that the card excludes, two more would be too many."""
    limit = answer(tmp_path, None, "slurm.partition=gpu_p5", f'slurm.exclude=["{excluded}"]')
    assert (limit.most, len(limit.names or ())) == (most, counting)


def answer(tmp_path: Path, job: Job | None, *changes: str) -> ExclusionLimit:
    """What command, job, watchdog and detectors say, which is the same."""
    card = load_card(
        write_card(tmp_path), ["slurm.spare_nodes=2", *changes], {}, directory=tmp_path
    )
    of_card = card.slurm.partition
    directory = RunDirectory(card.paths, card.kill_switch)
    jobs = (
        ()
        if job is None
        else (replace(job, comment=directory.comment("20260101-000000-00000000")),)
    )
    of_slurm = {
        "partition": of_card or "",
        "allocated_nodes": card.slurm.allocated_nodes,
        "source": card,
    }
    seen = exclusion_limit(operated(facts=of_slurm, nodes=CLUSTER, jobs=jobs))

    names = tuple(node.name for node in CLUSTER if "gpu_p5" in node.partitions)
    default = Partition("gpu_p5", None, names, is_default=True)
    desk = NodesContext(card, directory, LocalScheduler(), "me", CLUSTER, default, jobs, ())
    assert desk.limit == seen

    scheduler = LocalScheduler()
    scheduler.nodes = lambda: CLUSTER  # type: ignore[method-assign]
    queue = PendingJobs(Queue(*jobs), directory, None, lambda _: None, pause=lambda _: None)  # type: ignore[arg-type]
    environment = {"SLURM_JOB_PARTITION": job.partition if job is not None else ""}
    allocation = Allocation("slurm", "11", None, None, ())
    context = AttemptContext(card, allocation, environment, "", scheduler)
    exclusions = NodeExclusions(context, queue, LineTee(tmp_path / "log"))
    exclusions.prepare()
    exclusions.wait()
    assert seen is not None and exclusions._limit == seen
    return seen


def test_the_default_partition_counts_where_none_is_named() -> None:
    assert len(partition_nodes(CLUSTER, "", None, "gpu_p6")) == 5
    assert len(partition_nodes(CLUSTER, "closed", "")) == 13, (
        "a partition that no node has says nothing"
    )


@pytest.mark.parametrize("partition", [1, 3, 7, 44, 433])
def test_the_percentage_that_lets_so_many_be_excluded_is_the_least_one(partition: int) -> None:
    for count in range(1, partition):
        percent = percent_for(partition, 1, count)
        assert percent is not None and most_exclusions(partition, 1, percent) >= count
        assert most_exclusions(partition, 1, percent - 1) < count
    assert percent_for(partition, 1, partition) is None  # an attempt needs one


SEGV, KILL = "died: the worker was ended by sigsegv", "died: the worker was ended by sigkill"
SUSPECT, AVOID, EXCLUDE, RETURNED = (
    NodeStanding.SUSPECT, NodeStanding.AVOID, NodeStanding.EXCLUDE, NodeStanding.RETURNED,
)  # fmt: skip


def known(state: NodeStanding, fault: str = SEGV) -> Exclusion:
    return Exclusion("x1", "it died", "tr11", state=state.value, fault=fault)


def test_one_two_three():
    assert after_attribution(f"{SEGV} at 3", [], None, ()) is SUSPECT
    assert after_attribution(f"{SEGV} at 3", [f"{SEGV} at 5"], known(SUSPECT), ()) is AVOID
    assert after_attribution(f"{SEGV} at 3", [f"{SEGV} at 5"] * 2, known(AVOID), ()) is EXCLUDE
    assert after_attribution(f"{SEGV} at 3", [], known(AVOID), ()) is EXCLUDE


def test_a_third_of_another_family_excludes_no_one():
    assert after_attribution(KILL, [SEGV, SEGV], known(AVOID), ()) is AVOID
    assert after_attribution(SEGV, [SEGV, KILL], None, ()) is AVOID


def test_a_broad_set_of_suspects_makes_suspects_alone():
    assert (
        after_attribution(SEGV, [SEGV, SEGV], known(AVOID), (known(AVOID),), of_broad_set=True)
        is SUSPECT
    )
    assert is_broad(2, 4) and not is_broad(1, 2) and not is_broad(2, 48) and is_broad(13, 48)


@pytest.mark.parametrize(
    ("elsewhere", "state"),
    [((SUSPECT,), AVOID), ((SUSPECT, SUSPECT), EXCLUDE), ((EXCLUDE,), EXCLUDE), ((), SUSPECT)],
)
def test_what_other_runs_suspect_counts(elsewhere: tuple[NodeStanding, ...], state: NodeStanding):
    assert after_attribution(SEGV, [], None, map(known, elsewhere)) is state


def test_a_node_that_came_back_is_avoided_at_once():
    assert after_attribution(SEGV, [], known(RETURNED), ()) is AVOID


def test_a_suspicion_of_our_own_counts_once():
    """It is in the launches' records and on the list; another node in between has begun the count
    again.
    """
    assert after_attribution(SEGV, [], known(SUSPECT), ()) is SUSPECT


def test_good_training_takes_a_node_one_step_back():
    assert after_good_use(known(SUSPECT), GOOD_SECONDS) is None
    assert after_good_use(known(RETURNED), GOOD_SECONDS) is None
    assert after_good_use(known(AVOID), GOOD_SECONDS) == replace(known(AVOID), state="suspect")
    assert after_good_use(known(EXCLUDE), 10 * GOOD_SECONDS) == known(EXCLUDE)
    half = after_good_use(known(SUSPECT), GOOD_SECONDS / 2)
    assert half is not None and half.good_seconds == GOOD_SECONDS / 2
    assert after_good_use(half, GOOD_SECONDS / 2) is None


@given(
    st.sampled_from([SEGV, KILL]),
    st.lists(st.sampled_from([SEGV, KILL]), max_size=4),
    st.none() | st.sampled_from(list(NodeStanding)).map(known),
    st.lists(st.sampled_from(list(NodeStanding)).map(known), max_size=3),
)
def test_who_is_excluded_has_three_attributions_of_one_family(
    fault: str, before: list[str], own: Exclusion | None, others: list[Exclusion]
):
    state = after_attribution(fault, before, own, others)
    if not before and not others and own is None:
        assert state is SUSPECT
    if state is EXCLUDE:
        assert set(before) <= {fault}
        assert len(before) + len(others) + (own is not None) >= 1
    assert after_attribution(fault, before, own, others, of_broad_set=True) is SUSPECT


def test_a_family_is_a_fault_without_its_rank():
    assert family(f"{SEGV} at 3") == family(f"{SEGV} at several") == family(SEGV) == SEGV
    assert family("runtimeerror: at several places") == "runtimeerror: at several places"


def test_each_standing_says_what_comes_next():
    for state in NodeStanding:
        assert what_comes_next(known(state)) and len(what_comes_next(known(state))) < 140


def run(folder: Path, name: str) -> RunDirectory:
    made = RunDirectory(RunPaths(folder / name, "tr11", "main"), folder / name / "kill-switch")
    made.paths.run_record.parent.mkdir(parents=True)
    require_run_id(made, name)
    return made


@pytest.fixture
def site(tmp_path: Path) -> str:
    (tmp_path / "site").mkdir()
    return str(tmp_path / "site")


def test_what_one_run_knows_the_other_reads(tmp_path: Path, site: str) -> None:
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    assert exclude(one, "x1", why="Xid 79", owner="tr11", days=14)
    assert exclude(
        one, "x2", why="it died", owner="tr11", days=14, state=NodeStanding.AVOID, fault="died"
    )
    assert exclude(one, "x3", why="mine", owner="ana", days=14)
    seen = Exclusion("x4", "it died", "tr11", state="suspect", fault="died")
    assert revise(one, lambda version: replace(version, suspects=(seen,)))
    assert publish(site, one) == publish(site, two) == ""
    found = read_shared(site, two)
    assert found.faults == ()
    assert {(entry.node, entry.state) for entry in found.entries} == {
        ("x1", "exclude"), ("x2", "avoid"), ("x4", "suspect"),
    }  # fmt: skip
    assert read_shared(site, one).entries == () == read_version(two.exclusions).exclusions
    assert include(one, "x1", why="repaired", owner="ana")
    assert publish(site, one) == ""
    assert found.of("x1") and not read_shared(site, two).of("x1")


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 2, "exclusions": []}',
        '{"exclusions": [{"node": "x1"}]}',
        "{",
        '{"schema": 1}',
        "[]",
        "",
    ],
)
def test_a_list_that_is_none_is_unknown_and_excludes_no_one(
    tmp_path: Path, site: str, text: str
) -> None:
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    exclude(one, "x5", why="Xid 79", owner="tr11", days=14)
    publish(site, one)
    wrong = Path(site) / f"{'0' * 32}.json"
    wrong.write_text(text)
    (Path(site) / "notes.json").write_text("not a run's list, and none of ours")
    found = read_shared(site, two)
    assert [entry.node for entry in found.entries] == ["x5"]
    [line] = found.faults
    assert str(wrong) in line and "unknown" in line and "\n" not in line


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    one = run(tmp_path, "one")
    away = str(tmp_path / "away")
    [line] = read_shared(away, one).faults
    assert away in line and "unknown" in line
    (tmp_path / "away").write_text("a file")
    assert away in publish(away, one)
    assert read_shared(None, one) == read_shared(None, one) and publish(None, one) == ""


def test_machines_of_one_run_that_write_at_once_lose_nothing(tmp_path: Path, site: str) -> None:
    one, other = run(tmp_path, "one"), run(tmp_path, "two")

    def change(number: int) -> str:
        exclude(one, f"x{number}", why="it died", owner="tr11", days=1)
        return publish(site, one)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(change, range(24))) == {""}
    assert {entry.node for entry in read_shared(site, other).entries} == {
        f"x{number}" for number in range(24)
    }
    newest = json.loads((Path(site) / f"{run_id(one)}.json").read_text())
    assert (
        len(newest["exclusions"]) == 24 and len([*Path(site, f"{run_id(one)}.d").iterdir()]) <= 17
    )
