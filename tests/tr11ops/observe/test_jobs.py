"""The run's jobs: which are its own, who of a group shares it; and whether a queued one can be placed
where it is queued: partitions that are shut, and those without its nodes.
"""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import NOW, pending, running, snapshot
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.watch import namesake
from tr11ops.handover.start import (
    StartOfShift,
    group_jobs,
    group_of_folder,
    job_lines,
    members_among,
    read_group_jobs,
)
from tr11ops.launch.facts import LaunchRequest, observe_launch
from tr11ops.launch.queue_checks import queue_checks
from tr11ops.observe import derived
from tr11ops.observe.derived import other_variants
from tr11ops.observe.jobs import (
    Ownership,
    is_shut,
    misplaced,
    own_jobs_now,
    too_few_usable,
    with_reasons_of_now,
)
from tr11ops.observe.lease import foreground_trainings
from tr11ops.observe.look import facts_of, observe
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.queue.repair import plan_repair, plan_replacement
from tr11ops.queue.stop import look
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.check import Level
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from trainer.contract.paths import RunPaths

NAME = "tr11-176B-ml"
SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"
TAG = new_tag(NOW - 100)


def record(**changes: object) -> Submission:
    entry = Submission(
        TAG, "1000", "slurm", NOW - 100, "ana", "h", NAME, "main", "1-10", 48, "hash"
    )
    return replace(entry, **changes)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    root = tmp_path / "run"
    root.mkdir()
    return RunDirectory(RunPaths(root, NAME, "main"), root / "kill-switch")


def by_hand(**changes: object) -> Job:
    return running(job_id="5", raw_id="5", array_id=None, task_id=None, comment="", **changes)


def cases(directory: RunDirectory, elsewhere: RunDirectory) -> list[tuple[str, Job, bool]]:
    root = str(directory.root)
    return [
        ("its mark", replace(by_hand(name="renamed"), comment=directory.comment(TAG)), True),
        (
            "the mark of another directory",
            replace(by_hand(working_directory=root), comment=elsewhere.comment(TAG)),
            False,
        ),
        ("by hand, in the run directory", by_hand(working_directory=root), True),
        ("by hand, in the run directory with a slash", by_hand(working_directory=root + "/"), True),
        (
            "by hand, in the run directory, another name",
            by_hand(working_directory=root, name="other"),
            False,
        ),
        ("by hand, of anyone who looks, elsewhere", by_hand(working_directory="/home/ana"), False),
        (
            "by hand, of another user, in the run directory",
            by_hand(working_directory=root, user="ben"),
            True,
        ),
        ("a recorded number", running(comment="", submit_time=NOW - 90), True),
        (
            "a recorded number of long before",
            running(comment="", submit_time=NOW - 9 * 86400),
            False,
        ),
        (
            "a recorded number, another name",
            running(comment="", submit_time=NOW - 90, name="other"),
            False,
        ),
        (
            "tr11's own copy",
            replace(by_hand(working_directory=root), comment="tr11-backup@0"),
            False,
        ),
    ]


def test_the_rule(directory: RunDirectory, tmp_path: Path) -> None:
    elsewhere = RunDirectory(RunPaths(tmp_path / "other", NAME, "main"), tmp_path / "k")
    ownership = Ownership(directory, [record()])
    wrong = [
        name
        for name, job, is_ours in cases(directory, elsewhere)
        if ownership.has(job) is not is_ours
    ]
    assert not wrong
    assert Ownership(directory, array_id="1000").has(running(comment="", name="renamed")), (
        "the controller's own array"
    )


def test_a_variant_counts_once_and_a_number_for_its_scheduler(directory: RunDirectory) -> None:
    job = running(comment=directory.comment(TAG))
    other = [record(variant="ablation")]
    assert Ownership(directory, other).has(job), "it shares the lease and the kill switch"
    assert not Ownership(directory, other, "main").has(job)
    numbered = running(comment="", submit_time=NOW - 90)
    assert Ownership(directory, [record()], scheduler="slurm").has(numbered)
    assert not Ownership(directory, [record()], scheduler="local").has(numbered)


def test_a_link_to_the_run_directory_is_the_run_directory(
    directory: RunDirectory, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory.root)
    linked = RunDirectory(RunPaths(link, NAME, "main"), link / "kill-switch")
    assert Ownership(linked).has(by_hand(working_directory=str(directory.root)))


# ----------------------------------------------------------------------------- everyone asks it
class NamedQueue(Queue):
    """A queue that answers for one name as Slurm does."""

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        return tuple(job for job in self._jobs if name in {None, job.name})


def answers(card: RunCard, directory: RunDirectory, job: Job) -> dict[str, bool | None]:
    """What each command holds of one job that waits; None where it says that it does not know."""
    queue = NamedQueue(job)
    seen = observe(directory, facts_of(card), queue, NOW)
    facts = observe_launch(
        card, directory, LaunchRequest(), scheduler=queue, other_scheduler=lambda _: queue, user=job.user,  # type: ignore[arg-type]
    )  # fmt: skip
    held: list[str] = []
    said: list[str] = []
    hand = type("Hand", (NamedQueue,), {"hold": lambda self, number: held.append(number)})(job)
    PendingJobs(hand, directory, None, said.append).hold()
    stop = look(card, directory, queue)  # type: ignore[arg-type]
    checks = tuple(queue_checks(directory, LaunchRequest(), facts))
    levels = {check.level for check in checks if check.name == "queue"}
    return {
        "status": None if seen.unknowns() and not seen.jobs else job in seen.jobs,  # type: ignore[operator]
        "kill": None if stop.unclear else job in stop.queued,
        "launch": None if Level.UNKNOWN in levels else Level.REFUSED in levels,
        "controller": None if said and not held else bool(held),
        "watchdog": job in own_jobs_now(directory, queue),  # type: ignore[arg-type]
    }


def launched(tmp_path: Path, **changes: object) -> tuple[RunCard, RunDirectory]:
    card = load_card(SMALL, ["run.directory=run"], {}, directory=tmp_path)
    directory = RunDirectory(card.paths, card.kill_switch)
    directory.root.mkdir()
    if changes:
        directory.write_submission(record(**changes))
    return card, directory


def waiting(name: str, **changes: object) -> Job:
    return pending(
        (), job_id="1000", raw_id="1000", array_id=None, name=name, comment="", **changes
    )


@pytest.mark.parametrize(
    ("place", "is_ours"), [("the run directory", True), ("another folder", False)]
)
def test_a_job_made_by_hand_is_the_same_to_everyone(
    tmp_path: Path, place: str, is_ours: bool
) -> None:
    card, directory = launched(tmp_path)
    where = directory.root if is_ours else tmp_path
    job = waiting(card.run.name, working_directory=str(where))
    assert job.state is JobState.PENDING and foreground_trainings(directory) == ()
    assert set(answers(card, directory, job).values()) == {is_ours}
    directory.write_submission(replace(record(), scheduler="local", job_id=None))
    elsewhere = observe_launch(
        card, directory, LaunchRequest(), scheduler=None, other_scheduler=lambda _: Queue(job), user=job.user,  # type: ignore[arg-type,return-value]
    ).elsewhere  # fmt: skip
    assert bool(elsewhere) is is_ours


def test_another_variant_of_the_run_is_of_the_run_to_everyone(tmp_path: Path) -> None:
    card, directory = launched(tmp_path, variant="ablation")
    job = replace(waiting(card.run.name), comment=directory.comment(TAG))
    assert set(answers(card, directory, job).values()) == {True}
    seen = observe(directory, facts_of(card), NamedQueue(job), NOW)
    assert other_variants(seen) == {"1000": "ablation"} and not seen.namesakes
    (remark,) = namesake.detect(seen)
    assert remark.title.startswith("job 1000 trains variant ablation of this run")
    repair = plan_repair(replace(seen, jobs=(replace(job, reason="DependencyNeverSatisfied"),)), ())
    assert repair.is_empty and repair.left_alone == (
        "job 1000 trains variant ablation of this run: repair it with that card",
    )
    assert plan_replacement(seen, "ana").refusals and not plan_replacement(seen, "ana").steps


def test_a_job_with_an_overwritten_mark_is_known_by_its_record(tmp_path: Path) -> None:
    card, directory = launched(tmp_path, run="small")
    job = waiting(card.run.name, submit_time=NOW - 90)
    assert set(answers(card, directory, job).values()) == {True}


def test_a_job_of_the_runs_former_name_is_known_by_its_mark(tmp_path: Path) -> None:
    card, directory = launched(tmp_path, run="former")
    job = replace(waiting("former"), comment=directory.comment(TAG))
    assert set(answers(card, directory, job).values()) == {True}


@pytest.mark.parametrize("what", ["record", "folder"])
def test_a_job_with_an_unreadable_record_is_unknown_to_everyone(tmp_path: Path, what: str) -> None:
    card, directory = launched(tmp_path, run="small")
    job = waiting(card.run.name, submit_time=NOW - 90)
    if what == "record":
        directory.submission(TAG).record.write_text("{")
    else:
        directory.submissions.rename(tmp_path / "away")
        directory.submissions.write_text("")
    found = answers(card, directory, job)
    assert found == {
        "status": None,
        "kill": None,
        "launch": None,
        "controller": None,
        "watchdog": False,
    }


def test_a_job_in_an_unknown_state_neither_runs_nor_is_queued(tmp_path: Path) -> None:
    card, directory = launched(tmp_path, run="small")
    job = replace(waiting(card.run.name), comment=directory.comment(TAG), state=JobState.UNKNOWN)
    stop = look(card, directory, NamedQueue(job))  # type: ignore[arg-type]
    assert (stop.running, stop.queued, stop.is_idle) == ((), (), False)
    assert stop.unclear == "the state of job 1000 is not known"
    found = answers(card, directory, job)
    assert found["kill"] is found["launch"] is None and found["controller"] is False


ME = pwd.getpwuid(os.getuid()).pw_name
MINE = grp.getgrgid(pwd.getpwuid(os.getuid()).pw_gid).gr_name
OURS = running(user="ana")
OTHER = replace(
    OURS,
    job_id="7",
    raw_id="7",
    array_id=None,
    task_id=None,
    name="other",
    user="bo",
    start_time=NOW - 60,
)
QUEUED = pending(user="bo", reason="Resources")
OVER = replace(OTHER, job_id="8", raw_id="8", state=JobState.COMPLETED)
STRANGE = replace(OTHER, job_id="9", raw_id="9", user="zoe")


def test_the_run_comes_first_then_what_runs_and_nothing_of_strangers() -> None:
    found = group_jobs((STRANGE, QUEUED, OVER, OTHER, OURS), {"bo"}, (OURS,), NOW)
    assert [(job.job, job.user, job.is_own) for job in found] == [
        (OURS.job_id, "ana", True), ("7", "bo", False), (QUEUED.job_id, "bo", False),
    ]  # fmt: skip
    lines = list(job_lines(StartOfShift((), "six", found)))
    assert lines[1] == "`7` of bo: other, RUNNING for 1 min, 48 nodes"
    assert lines[2].startswith(f"`{QUEUED.job_id}` of bo: ") and "PENDING (Resources)" in lines[2]


def test_a_member_is_one_of_the_list_or_has_it_as_the_first_group() -> None:
    assert members_among([ME, "no-such-user-of-this-machine"], MINE) == {ME}
    with pytest.raises(KeyError):
        members_among([ME], "no-such-group-of-this-machine")


class Edge:
    name = "slurm"

    def __init__(self, jobs: tuple[Job, ...] | None) -> None:
        self._jobs = jobs

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        if self._jobs is None:
            raise SchedulerUnreachable("squeue did not answer")
        return self._jobs

    def nodes(self) -> tuple[()]:
        return ()


def test_what_cannot_be_read_is_unknown_and_never_none() -> None:
    for edge, group, why in (
        (Unknown("there is no scheduler here"), MINE, "there is no scheduler here"),
        (Edge(None), MINE, "squeue did not answer"),
        (Edge(()), "no-such-group-of-this-machine", "there is no group no-such-group"),
    ):
        found = read_group_jobs(edge, group, (), NOW)
        assert isinstance(found, Unknown) and why in found.why
        assert next(job_lines(StartOfShift((), group, None, found.why))).startswith("unknown: ")
    assert read_group_jobs(Edge((replace(OTHER, user=ME),)), MINE, (), NOW) != ()


def test_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    assert group_of_folder(tmp_path) == grp.getgrgid(tmp_path.stat().st_gid).gr_name


GPU = tuple(Node(f"n{k}", frozenset({"idle"}), gpus=8, partitions=("gpu",)) for k in range(48))
CPU = (Node("c1", frozenset({"idle"}), partitions=("cpu",)),)
SHUT = tuple(replace(node, shut_partitions=("gpu",)) for node in GPU)


@pytest.mark.parametrize(
    ("nodes", "job", "shut", "words"),
    [
        (GPU, {"partition": "gpu", "gpus_per_node": 8}, False, ""),
        (SHUT, {"partition": "gpu", "gpus_per_node": 8}, True, ""),
        (SHUT + CPU, {"partition": "gpu,cpu"}, False, ""),  # the other one is open
        (CPU, {"partition": "cpu"}, False, "it asks for 48 nodes, partition cpu has 1"),
        (CPU, {"partition": "cpu", "node_count": 1, "gpus_per_node": 8}, False,
         "it asks for 1 node with 8 GPUs, partition cpu has 0"),
        (GPU + CPU, {"partition": "cpu,gpu"}, False, ""),
        (GPU, {"partition": "elsewhere"}, False, ""),  # of which nothing is known
        (GPU, {"partition": ""}, False, ""),
        (Unknown("away"), {"partition": "gpu"}, False, ""),
    ],
)  # fmt: skip
def test_what_the_nodes_say_of_a_queued_job(
    nodes: Any, job: dict[str, Any], shut: bool, words: str
) -> None:
    queued = pending(**job)
    seen = snapshot(jobs=(running(), queued), nodes=nodes)
    assert (is_shut(seen, queued), misplaced(seen, queued)) == (shut, words)
    assert bool(derived.startable_jobs(seen)) is (words == "")
    assert bool(derived.sure_jobs(seen)) is (words == "" and not shut)


@pytest.mark.parametrize(
    ("reason", "nodes", "partition", "now"),
    [
        ("PartitionInactive", GPU, "gpu", ""),
        ("PartitionDown", GPU, "gpu", ""),
        ("PartitionDown", SHUT + CPU, "gpu,cpu", ""),
        ("PartitionDown", SHUT, "gpu", "PartitionDown"),
        ("PartitionDown", (), "gpu", "PartitionDown"),  # nothing is known of it
        ("PartitionDown", CPU, "gpu", "PartitionDown"),
        ("PartitionDown", GPU, "", "PartitionDown"),
        ("JobHeldUser", GPU, "gpu", "JobHeldUser"),
    ],
)
def test_a_partition_that_is_open_again_keeps_no_job_waiting_for_the_site(
    reason: str, nodes: tuple[Node, ...], partition: str, now: str
) -> None:
    """Slurm says why its last attempt to start a job failed, until the next one."""
    (job,) = with_reasons_of_now((pending(reason=reason, partition=partition),), nodes)
    assert job.reason == now


def short(*states: str) -> tuple[Node, ...]:
    return (replace(GPU[0], states=frozenset(states)), *GPU[1:])


@pytest.mark.parametrize(
    ("nodes", "job", "words"),
    [
        (GPU, {}, ""),
        (short("down"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("idle", "not_responding"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("mixed", "drain"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("allocated"), {}, ""),  # free when its work ends
        (short("unknown"), {}, ""),  # the controller has just begun
        (short("down"), {"node_count": 47}, ""),
        (short("down"), {"partition": "gpu,all"}, ""),  # of the other one nothing is known
        (GPU, {"excluded": ("n3",)}, "47 of 48 nodes of gpu can be used, it asks for 48"),
    ],
)
def test_what_has_too_few_nodes_now_is_queued_and_covers_nothing(
    nodes: Any, job: dict[str, Any], words: str
) -> None:
    queued = pending(**{"partition": "gpu", "gpus_per_node": 8, **job})
    seen = snapshot(jobs=(running(), queued), nodes=nodes)
    assert too_few_usable(seen, queued) == words
    assert derived.startable_jobs(seen) == (queued,), "it starts when the nodes are back"
    assert bool(derived.sure_jobs(seen)) is (words == "")
    assert derived.some_wait_for_nodes(seen) is (words != "")
    assert not derived.some_wait_for_site(seen)


def test_what_the_run_excludes_cannot_be_used() -> None:
    queued = pending(partition="gpu")
    listed = snapshot(jobs=(queued,), nodes=GPU, exclusions=(Exclusion("n3", "Xid 79", "tr11"),))
    assert too_few_usable(listed, queued)


def test_what_waits_behind_a_misplaced_job_is_no_cover_either() -> None:
    first = pending(partition="cpu")
    behind = replace(
        first,
        job_id="2000",
        raw_id="2000",
        array_id=None,
        partition="gpu",
        dependency="afterany:1000",
    )
    seen = snapshot(jobs=(running(), first, behind), nodes=GPU + CPU)
    assert derived.startable_jobs(seen) == ()
