"""An attempt: how many of its nodes a launch takes, what the scheduler says of its own job (the last answer
counts, and none is no answer), and what it has otherwise than the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.agent.queues import job
from tr11ops.agent.allocation import Allocation, SchedulerKind
from tr11ops.agent.attempt_context import (
    LOOK_SECONDS,
    NEAR_LOOK_SECONDS,
    AttemptContext,
    AttemptObservations,
    JobWatch,
    seconds_to_next_look,
)
from tr11ops.agent.batch import MOST_LINES, changes_since_last
from tr11ops.agent.job_follower import of_ended_job
from tr11ops.agent.relaunch import first_nodes
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.rundir.attempts import CodeIdentity
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import Version, include, ledger_text, revise
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

NODES = tuple(f"n{number}" for number in range(1, 6))


@pytest.mark.parametrize("kind", ["slurm", "local", "foreground"])
@pytest.mark.parametrize(("held", "needed"), [(5, 4), (4, 4)])
def test_spare_nodes_do_not_train(
    tmp_path: Path, kind: SchedulerKind, held: int, needed: int
) -> None:
    card = load_card(
        shipped_folder() / "demo.toml", [f"run.directory={tmp_path}", "slurm.spare_nodes=1"], {}
    )
    place = AttemptContext(card, Allocation(kind, "7", None, None, NODES[:held]), {}, "t")
    assert AttemptObservations(place, LineTee(tmp_path / "log.txt")).situation().needed == needed


class States:
    """A scheduler that tells these states of the nodes."""

    def __init__(self, **words: set[str]) -> None:
        self._nodes = tuple(Node(name, frozenset(found)) for name, found in words.items())

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes


@pytest.mark.parametrize(
    ("words", "usable", "reluctant"),
    [
        ({"mixed"}, True, False),
        ({"mixed", "drain"}, True, True),
        ({"mixed", "fail"}, True, True),
        ({"mixed", "reboot_requested", "drain"}, True, True),
        ({"mixed", "inval"}, True, True),
        ({"unknown"}, True, False),
        ({"mixed", "not_responding"}, False, False),  # no step starts there
        ({"down"}, False, False),
        ({"idle", "powered_down"}, False, False),
    ],
)
def test_what_a_nodes_state_means_for_the_next_launch(
    tmp_path: Path, words: set[str], usable: bool, reluctant: bool
) -> None:
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={tmp_path}"], {})
    states: Any = States(n1={"mixed"}, n2=words)
    seen = AttemptObservations(
        AttemptContext(
            card, Allocation("slurm", "7", None, None, NODES[:3]), {}, "t", states=states
        ),
        LineTee(tmp_path / "log.txt"),
    )
    seen.look()
    found = seen.situation()
    assert ("n2" in found.usable, "n2" in found.reluctant) == (usable, reluctant)
    assert {"n1", "n3"} <= set(found.usable) - found.reluctant  # of n3 nothing was told


def test_what_is_on_record_is_used_after_the_others(tmp_path: Path) -> None:
    """A suspect, a node that came back and one that another run suspects train only where there are
    no others: they are the spares. A list of another run that cannot be read says nothing, and is
    told of once.
    """
    site = tmp_path / "site"
    site.mkdir()
    changes = [f"run.directory={tmp_path / 'run'}", f"resilience.shared_exclusions={site}"]
    card = load_card(shipped_folder() / "demo.toml", changes, {})
    directory = RunDirectory(card.paths, card.kill_switch)
    other = Version(1, (Exclusion("n3", "Xid 79", "tr11"),))
    (site / f"{'1' * 32}.json").write_text(ledger_text(other.number, other))
    (site / f"{'2' * 32}.json").write_text("{")
    exclude(directory, "n1", why="it died", owner="tr11", days=14)
    exclude(directory, "n2", why="Xid 79", owner="tr11", days=14)
    include(directory, "n2", why="repaired", owner="ana", then=NodeStanding.RETURNED)
    log = tmp_path / "log.txt"
    seen = AttemptObservations(
        AttemptContext(card, Allocation("slurm", "7", None, None, NODES), {}, "t"), LineTee(log)
    )
    for _ in range(2):
        found = seen.situation()
        assert (found.usable, found.reluctant, found.suspected) == (
            NODES[1:],
            {"n2", "n3"},
            ("n3",),
        )
    assert first_nodes(replace(found, needed=2)) == ("n4", "n5")
    assert first_nodes(replace(found, needed=3)) == ("n2", "n4", "n5")
    # the suspect comes last
    assert first_nodes(replace(found, usable=("n3", "n2", "n4"), needed=2)) == ("n2", "n4")
    for node, since in (("n4", 5.0), ("n5", 4.0)):
        new = Exclusion(node, "hung", "tr11", None, since=since, state=NodeStanding.SUSPECT.value)
        revise(
            directory, lambda version, new=new: replace(version, suspects=(*version.suspects, new))
        )
    found = seen.situation()
    assert found.suspected == ("n3", "n5", "n4")  # as they were suspected
    assert first_nodes(replace(found, needed=3)) == ("n2", "n3", "n5")
    assert log.read_text().count(f"what another run knows of nodes is unknown: {site}") == 1


class Steps:
    """A scheduler that tells these exit codes, one after another."""

    def __init__(self, *codes: int | SchedulerError | None) -> None:
        self.codes = list(codes)

    def step_code(self, job_id: str) -> int | None:
        code = self.codes.pop(0)
        if isinstance(code, SchedulerError):
            raise code
        return code


def test_a_steps_exit_code_counts_for_the_launch_that_left_it(tmp_path: Path) -> None:
    """Slurm keeps the highest of all steps of the job: what an earlier launch left says nothing of
    a later one.
    """
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={tmp_path}"], {})
    codes = Steps(134, 134, SchedulerError("silent"), 139, None)
    place = AttemptContext(card, Allocation("slurm", "7", None, None, NODES), {}, "t", states=codes)
    seen = AttemptObservations(place, LineTee(tmp_path / "log.txt"))
    assert [seen.step_code() for _ in range(4)] == [134, None, None, 139]
    assert "does not tell how the steps ended: silent" in (tmp_path / "log.txt").read_text()


JOB_NODES = ("n1", "n2", "n3")
RUNNING = replace(
    job("7", "6"), state=JobState.RUNNING, start_time=1000.0, end_time=1600.0, nodes=JOB_NODES
)


class Answers:
    """A scheduler that gives these answers, one after another."""

    def __init__(self, *answers: Job | SchedulerError | None) -> None:
        self.answers: Iterator[Job | SchedulerError | None] = iter(answers)

    def job(self, job_id: str) -> Job | None:
        answer = next(self.answers)
        if isinstance(answer, SchedulerError):
            raise answer
        return answer


def observations(
    folder: Path, *answers: Job | SchedulerError | None
) -> tuple[JobWatch, AttemptObservations]:
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={folder}"], {})
    watch = JobWatch(Answers(*answers), "7")
    context = AttemptContext(
        card, Allocation("slurm", "7", "6", 1, JOB_NODES), {}, "t", watch=watch
    )
    return watch, AttemptObservations(context, LineTee(folder / "log.txt"))


def test_it_is_asked_more_often_towards_the_end() -> None:
    assert seconds_to_next_look(None, 1000.0) == LOOK_SECONDS
    assert seconds_to_next_look(5000.0, 1000.0) == LOOK_SECONDS
    assert seconds_to_next_look(1100.0, 1000.0) == NEAR_LOOK_SECONDS
    assert seconds_to_next_look(900.0, 1000.0) == LOOK_SECONDS


def test_no_answer_keeps_the_last_one(tmp_path: Path) -> None:
    later = replace(RUNNING, end_time=2600.0)
    watch, seen = observations(tmp_path, RUNNING, SchedulerUnreachable("silent"), None, later)
    watch.look()
    first = seen.job_time()
    assert first is not None and (first.start, first.end) == (1000.0, 1600.0)
    assert watch.look() is None and watch.look() is None and seen.job_time() == first
    watch.look()
    assert seen.job_time() != first and seen.job_time() is not None


def test_before_the_first_answer_the_cards_limit_counts(tmp_path: Path) -> None:
    watch, seen = observations(tmp_path, SchedulerUnreachable("silent"))
    assert watch.look() is None
    assumed = seen.job_time()
    assert assumed is not None and assumed.end is not None and assumed.end > time.time()
    assert seen.lost_nodes() == () and seen.too_short() == ""


@pytest.mark.parametrize(
    ("told", "is_over"),
    [
        (RUNNING, False),
        (None, False),
        (SchedulerUnreachable("silent"), False),
        (replace(RUNNING, state=JobState.UNKNOWN), False),
        (replace(RUNNING, nodes=("n1", "n2")), False),
        (replace(RUNNING, nodes=("n2", "n3")), True),
        (replace(RUNNING, state=JobState.TIMEOUT), True),
        (replace(RUNNING, state=JobState.COMPLETING), True),
        (replace(RUNNING, state=JobState.PENDING, nodes=()), True),
    ],
)
def test_a_job_is_over_only_when_the_scheduler_says_so(
    tmp_path: Path, told: Job | SchedulerError | None, is_over: bool
) -> None:
    _, seen = observations(tmp_path, told)
    assert (seen.why_over() is not None) is is_over


def test_who_is_to_blame_for_the_end_of_a_job(tmp_path: Path) -> None:
    """A batch host that is lost; no other node, whatever its workers said as they were ended."""
    _, seen = observations(
        tmp_path, replace(RUNNING, nodes=("n2", "n3")), replace(RUNNING, state=JobState.CANCELLED)
    )
    lost, cancelled = seen.why_over(), seen.why_over()
    assert lost is not None and cancelled is not None
    assert of_ended_job(lost, JOB_NODES).blamed == ("n1",)
    found = of_ended_job(cancelled, JOB_NODES)
    assert (found.blamed, found.suspects, found.fault) == ((), (), "its job was ended: CANCELLED")


def test_a_node_that_has_left_the_job_is_not_used_again(tmp_path: Path) -> None:
    watch, seen = observations(tmp_path, replace(RUNNING, nodes=("n1", "n3")))
    assert seen.situation().usable == JOB_NODES
    watch.look()
    assert seen.lost_nodes() == ("n2",) and seen.situation().usable == ("n1", "n3")


CARD: dict[str, Any] = {
    "run": {"seed": 1},
    "data": {"split": "949,50,1"},
    "derived": {"card_hash": "a"},
}


def begun(paths: RunPaths, job: str, start: float, card: dict[str, Any], **record: Any) -> None:
    whole = {
        "start": start,
        "nodes": ["n1", "n2"],
        "python": "3.11.2",
        "versions": {"torch": "2.1"},
        **record,
    }
    write_json(paths.attempt(job) / "attempt.json", whole)
    write_json(paths.attempt(job) / "card.json", card)


def test_card_and_nodes_are_compared_with_the_newest_attempt(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    now = {"start": 30.0, "nodes": ["n1", "n3"], "python": "3.11.2", "versions": {"torch": "2.2"}}
    card = {**CARD, "data": {"split": "80,20,0"}, "derived": {"card_hash": "b"}}
    assert changes_since_last(paths, "30", now, card) == []
    begun(paths, "9", 10.0, {"run": {"seed": 99}})
    begun(paths, "20", 20.0, CARD)
    (paths.attempts / "torn").mkdir()
    (paths.attempts / "torn" / "attempt.json").write_text("{")
    assert changes_since_last(paths, "30", now, card) == [
        "since attempt 20: nodes: with n3, without n2",
        "since attempt 20: version of torch: 2.1 -> 2.2",
        "since attempt 20: card data.split: 949,50,1 -> 80,20,0",
    ]
    begun(paths, "30", card=card, **now)
    assert (
        changes_since_last(paths, "30", now, card)[0]
        == "since attempt 20: nodes: with n3, without n2"
    )
    assert changes_since_last(paths, "40", {**now, "start": 40.0}, card) == []


def test_another_commit_and_other_changes_to_it_are_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    first = CodeIdentity("/code", "a" * 40, "work")
    edited = CodeIdentity("/code", "a" * 40, "work", ("x.py",), 1, "f" * 64, "code.diff")
    now = {
        "start": 30.0,
        "nodes": ["n1", "n2"],
        "python": "3.11.2",
        "versions": {"torch": "2.1", "driver": "550"},
    }
    begun(paths, "9", 10.0, CARD)
    # the last one recorded less
    assert changes_since_last(paths, "30", {**now, "code": document(first)}, CARD) == []
    begun(paths, "20", 20.0, CARD, code=document(first), versions={"torch": "2.1", "driver": "535"})
    assert changes_since_last(paths, "30", {**now, "code": document(edited)}, CARD) == [
        "since attempt 20: version of driver: 535 -> 550",
        "since attempt 20: code: work aaaaaaaaaa -> work aaaaaaaaaa with 1 changed file (ffffffff); see code.diff",
    ]
    unknown = document(CodeIdentity(why="git is not installed on this machine"))
    assert changes_since_last(paths, "30", {**now, "code": unknown}, CARD)[1].endswith(
        "-> not known: git is not installed on this machine"
    )


def test_very_many_are_counted(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    begun(paths, "1", 1.0, {"run": {str(number): number for number in range(50)}})
    record = {"start": 2.0, "nodes": ["n1", "n2"], "python": "3.11.2", "versions": {"torch": "2.1"}}
    found = changes_since_last(paths, "2", record, {"run": {}})
    assert (
        len(found) == MOST_LINES and found[-1] == f"since attempt 1: and {50 - MOST_LINES + 1} more"
    )
