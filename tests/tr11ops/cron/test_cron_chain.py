"""The chain of Slurm jobs: one of them whatever happens, without drift, never broken by a lost answer, and in
a partition in which it does not wait behind the training, unasked."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.plugins.disk_fixture import Disk
from tests.tr11ops.cron.cards import card
from tests.tr11ops.cron.queues import Queue
from tests.tr11ops.cron.rounds import run_directory
from tr11ops.base.errors import NoPartition, SchedulerError
from tr11ops.cluster.base import Job, JobState, Node, Partition
from tr11ops.cluster.local_machine import GpuList, local_nodes
from tr11ops.cluster.local_records import LocalSettings
from tr11ops.cluster.local_rules import request_fault
from tr11ops.cluster.sbatch_options import sbatch_options
from tr11ops.cron import chain as module
from tr11ops.cron.chain import (
    Begun,
    ChainContext,
    begin_link,
    choose_placement,
    due_after,
    install,
    links_of,
    must_leave,
    queue_link,
    remove,
)
from tr11ops.cron.jobs import Daily, Every
from tr11ops.cron.table_programs import Invocation, link_script
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.cron_records import ChainState, read_chains
from tr11ops.rundir.paths import parse_comment

NOW = 1_795_289_822.0  # 19:37:02 UTC
HOUR = 3600


class Scene:
    """A chain in a folder, its queue and its clock."""

    def __init__(self, folder: Path):
        self.directory = run_directory(folder)
        self.directory.root.mkdir(parents=True, exist_ok=True)
        self.queue, self.now, self.said = Queue(), NOW, list[str]()
        source = folder / "card.toml"
        options = ("slurm.options.wckey=bloom", "slurm.options.switches=1")
        loaded = card(folder, "cron.partition=compil", "cron.account=six@cpu", *options)
        self.invocation = Invocation(
            loaded,
            source,
            ("cron.partition=compil",),
            folder,
            {"PATH": "/bin", "HOME": str(folder)},
        )
        self.place = ChainContext(
            "hourly", Every(HOUR), self.invocation, self.directory, self.queue,  # type: ignore[arg-type]
            self.said.append, clock=lambda: self.now, pause=lambda seconds: None,
        )  # fmt: skip

    def link(self, number: str) -> tuple[str, int]:
        """Token and due time of a job."""
        found = links_of(
            [replace(self.queue.known[number], state=JobState.PENDING)],
            self.directory.mark,
            "hourly",
        )
        return found[0].token, found[0].due

    def begin(self, number: str) -> Begun:
        self.queue.run(number)
        return begin_link(self.place, *self.link(number), number)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# -------------------------------------------------------------------------- one round after another
def test_links_follow_each_other_without_drift(scene: Scene) -> None:
    first = install(scene.place)
    assert first.is_new and scene.queue.requests[0].begin is None  # the first round is at once
    number, points = first.job_id, []
    for late in (3.0, 250.0, 0.0, 1799.0, 61.5):  # each begins late by another delay
        begun = scene.begin(number)
        assert not begun.leave and begun.next_due is not None
        scene.queue.finish(number)
        request = scene.queue.requests[-1]
        assert request.begin == begun.next_due
        points.append(begun.next_due)
        assert read_chains(scene.directory) == (
            ChainState("hourly", begun.successor, scene.now, begun.next_due),
        )
        number, scene.now = begun.successor, begun.next_due + late
    assert points[0] == 1_795_291_200  # 20:00:00
    assert [later - earlier for earlier, later in itertools.pairwise(points)] == [HOUR] * 4


def test_a_link_that_waited_for_hours_takes_the_next_hour(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    scene.now = NOW + 5 * HOUR
    begun = scene.begin("2")
    assert begun.next_due is not None and NOW + 5 * HOUR < begun.next_due <= NOW + 6 * HOUR


@settings(deadline=None)
@given(st.integers(0, 10**9), st.floats(-1e8, 1e8))
def test_the_next_point_is_never_far(ago: int, ahead: float) -> None:
    """Whatever the clock did: at most a period, and what two clocks may differ, from now."""
    now = NOW + ahead
    point = due_after(Every(HOUR), int(NOW) - ago, now)
    assert now < point <= now + HOUR + 30 + module.TOLERANCE_SECONDS and point % HOUR == 0


def test_a_link_is_not_its_own_successor_when_a_clock_goes_back(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    begun = scene.begin("2")  # it is for 20:00, and here it is 19:37
    assert begun.successor == "3" and begun.next_due == 1_795_291_200
    scene.queue.finish("2")
    scene.now = begun.next_due
    assert scene.begin("3").next_due == begun.next_due + HOUR


def test_a_daily_chain_keeps_its_hour_over_a_clock_change() -> None:
    schedule, due = Daily("04:00", "Europe/Paris"), 1_774_578_000  # 2026-03-27 03:20 there
    points = [due := due_after(schedule, due, due) for _ in range(4)]
    assert [later - earlier for earlier, later in itertools.pairwise(points)] == [
        86_400,
        82_800,
        86_400,
    ]


# ----------------------------------------------------------------------------- one chain
def test_installing_again_changes_nothing(scene: Scene) -> None:
    first = install(scene.place)
    again = install(scene.place)
    assert (again.job_id, again.is_new) == (first.job_id, False)
    assert scene.queue.waiting() == [first.job_id]


def test_many_installs_at_once_are_one_chain(scene: Scene) -> None:
    results: list[object] = []
    gate = threading.Barrier(6)

    def run() -> None:
        gate.wait()
        try:
            results.append(install(scene.place))
        except SchedulerError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    living = [number for number in scene.queue.waiting() if not scene.begin(number).leave]
    assert len(living) == 1 and len(results) == 6


def test_a_cancelled_chain_is_repaired_and_its_rest_leaves(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    scene.queue.cancel("2")
    scene.queue.finish("1")
    repaired = install(scene.place)
    assert repaired.is_new and scene.queue.waiting() == [repaired.job_id]
    # a link of the first chain that comes after all, from a controller that was frozen
    token = scene.link("2")[0]
    assert "another chain" in begin_link(scene.place, token, 1_795_291_200, "2").leave
    assert scene.queue.waiting() == [repaired.job_id]


def test_a_chain_that_waits_for_another_clock_is_replaced(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    scene.queue.finish("1")
    scene.now = NOW - 30 * 86_400
    repaired = install(scene.place)
    assert repaired.is_new and scene.queue.waiting() == [repaired.job_id]


def test_an_install_that_was_killed_is_taken_over(scene: Scene) -> None:
    """kill -9 after the claim, and after sbatch: in both cases there is one chain in the end."""
    gone = subprocess.Popen(["true"])
    dead = Claim.of_this_process(NOW, 300.0, "0badc0de")
    dead = replace(dead, process=replace(dead.process, pid=gone.pid))
    gone.wait()
    assert ClaimFolder(scene.directory, "chain-hourly").take(dead, None)
    queue_link(scene.place, "0badc0de", int(NOW), None)
    found = install(scene.place)
    assert not found.is_new and scene.queue.waiting() == [found.job_id]
    scene.queue.cancel(found.job_id)
    assert install(scene.place).is_new and len(scene.queue.waiting()) == 1


def test_a_living_install_elsewhere_is_waited_for(scene: Scene) -> None:
    claim = Claim.of_this_process(NOW, 300.0)
    claim = replace(claim, host="elsewhere", process=replace(claim.process, boot="other", pid=1))
    ClaimFolder(scene.directory, "chain-hourly").take(claim, None)
    with pytest.raises(SchedulerError, match="elsewhere"):
        install(scene.place)
    scene.now = NOW + 301
    assert install(scene.place).is_new


def test_removal_ends_it_and_a_link_that_runs_leaves(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    scene.begin("2")
    assert remove(scene.place) == ("3",)
    assert read_chains(scene.directory) == () and scene.queue.waiting() == []
    assert begin_link(scene.place, *scene.link("2"), "2").leave == "this chain was removed"
    assert remove(scene.place) == ()
    assert install(scene.place).is_new


def test_a_removal_during_the_submission_of_the_next_link_wins(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = install(scene.place).job_id

    def submit_and_remove(place: ChainContext, *rest: Any, **named: Any) -> str:
        made = queue_link(place, *rest, **named)
        remove(place)
        return made

    monkeypatch.setattr(module, "queue_link", submit_and_remove)
    assert scene.begin(number).leave == "this chain was removed"
    assert scene.queue.waiting() == [] and read_chains(scene.directory) == ()


# ----------------------------------------------------------------------------- lost answers
def test_a_lost_answer_makes_no_second_link(scene: Scene) -> None:
    scene.queue.answers = ["lost"]
    assert install(scene.place).is_new
    scene.queue.answers = ["lost"]
    begun = scene.begin("1")
    assert begun.successor == "2" and scene.queue.waiting() == ["2"]


def test_a_refusal_is_owed_and_tried_again(scene: Scene) -> None:
    number = install(scene.place).job_id
    for trouble in ("refuse", "nothing came"):
        scene.queue.answers = [trouble]
        assert scene.begin(number).owed
    scene.queue.silent = 1
    assert scene.begin(number).owed
    begun = scene.begin(number)
    assert begun.successor and scene.queue.waiting() == [begun.successor]
    assert any("not queued yet" in line for line in scene.said)


def test_of_two_jobs_for_one_point_the_first_goes_on(scene: Scene) -> None:
    """An answer was lost, the look-ups found nothing, and the job came after the second try."""
    token = scene.link(install(scene.place).job_id)[0]
    due = 1_795_291_200
    request = module._request(scene.place, token, due, due)
    scene.queue.finish("1")
    scene.queue.submit(request)
    scene.queue.submit(request)
    scene.now = due
    assert "job 2 is the same link" in scene.begin("3").leave
    begun = scene.begin("2")
    assert not begun.leave
    scene.queue.finish("2")
    # the first is over and has queued the next: no other
    assert scene.begin("3").successor == begun.successor


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True))
def test_exactly_one_of_several_stays(numbers: list[int]) -> None:
    jobs = [
        Job(str(number), str(number), None, None, "cron-hourly", "ana", JobState.RUNNING, comment=f"tr11-cron:hourly:0badc0de:60@{'a' * 12}")
        for number in numbers
    ]  # fmt: skip
    links = links_of(jobs, "a" * 12, "hourly")
    assert [number for number in numbers if must_leave(links, "0badc0de", 60, number) is None] == [
        min(numbers)
    ]


def test_an_install_that_was_refused_leaves_nothing(scene: Scene) -> None:
    scene.queue.answers = ["refuse"]
    with pytest.raises(SchedulerError, match="Invalid account"):
        install(scene.place)
    assert read_chains(scene.directory) == ()
    assert install(scene.place).is_new


def test_claims_that_cannot_be_read_do_not_end_a_chain(scene: Scene) -> None:
    number = install(scene.place).job_id
    for path in ClaimFolder(scene.directory, "chain-hourly").path.iterdir():
        path.write_text("{")
    assert scene.begin(number).successor == "2"


@pytest.mark.parametrize("is_mount_point", [True, False])
def test_a_chain_outlives_a_run_directory_that_is_not_mounted(
    scene: Scene, is_mount_point: bool
) -> None:
    """It ended, as if someone had removed it; nothing is made in the directory's place."""
    number = install(scene.place).job_id
    token, due = scene.link(number)
    root = scene.directory.root
    hidden = root.rename(root.with_name("hidden"))
    if is_mount_point:
        root.mkdir()
    scene.queue.run(number)
    begun = begin_link(scene.place, token, due, number)
    assert not begun.leave and scene.queue.waiting() == [begun.successor]
    assert (
        str(root) in begun.unseen
        and "not mounted here" in begun.unseen
        and "tr11 cron remove" in begun.unseen
    )
    assert not list(root.glob("*"))
    if is_mount_point:
        root.rmdir()
    hidden.rename(root)
    again = scene.begin(begun.successor)
    assert not again.leave and not again.unseen and again.successor


def test_a_chain_without_its_directory_can_be_removed(scene: Scene) -> None:
    number = install(scene.place).job_id
    scene.directory.root.rename(scene.directory.root.with_name("hidden"))
    assert remove(scene.place) == (number,) and scene.queue.waiting() == []


# ----------------------------------------------------------------------------- what is submitted
def test_a_link_is_the_cards_and_no_job_of_the_training(scene: Scene) -> None:
    scene.begin(install(scene.place).job_id)
    request = scene.queue.requests[-1]
    arguments = sbatch_options(request)
    assert "--begin=uts1795291200" in arguments and "--partition=compil" in arguments
    assert (
        "--account=six@cpu" in arguments
        and "--time=00:30:00" in arguments
        and request.name == "cron-hourly-small"
    )
    assert "--wckey=bloom" in arguments and not any("switches" in word for word in arguments)
    assert request.output == "/dev/null"  # it opens its own: see the next test
    assert f"{scene.directory.paths.state / 'cron' / 'slurm'}/" in request.script
    # the training's own jobs are found by their comment
    assert parse_comment(request.comment) is None
    assert "#SBATCH --requeue" in request.script and "--no-requeue" not in request.script
    assert subprocess.run(["bash", "-n"], input=request.script.encode()).returncode == 0


@pytest.mark.parametrize("fault", ["", "full", "read-only"])
def test_a_link_whose_output_cannot_be_opened_runs_all_the_same(
    disk: Disk, tmp_path: Path, fault: str
) -> None:
    invocation = replace(Scene(tmp_path).place.invocation, folder=tmp_path)
    request = module._request(
        replace(Scene(tmp_path).place, invocation=invocation), "0badc0de", 60, None
    )
    request = replace(request, memory_megabytes=2048)
    script = link_script(
        invocation,
        "hourly",
        request,
        ["sh", "-c", f"echo it runs; touch {tmp_path}/ran"],
        disk.place,
    )
    assert "#SBATCH --mem=2048M" in script and script.count("--output=") == 1
    if fault:
        disk.break_as(fault)
    environment = {**os.environ, "SLURM_JOB_NAME": "cron-hourly-small", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "-s"], input=script.encode(), env=environment).returncode == 0
    assert (tmp_path / "ran").exists()
    output = disk.place / "cron-hourly-small-7.out"
    assert fault == "read-only" or output.read_text() == ("" if fault else "it runs\n")


def test_the_local_scheduler_refuses_a_begin_time(scene: Scene) -> None:
    request = replace(module._request(scene.place, "0badc0de", 60, 60.0), partition=None)
    nodes = local_nodes(LocalSettings(), GpuList())
    assert "no begin times" in (request_fault(request, LocalSettings(), nodes) or "")
    assert request_fault(replace(request, begin=None), LocalSettings(), nodes) is None


def test_other_runs_and_ended_jobs_are_no_links(scene: Scene) -> None:
    install(scene.place)
    jobs = scene.queue.jobs()
    assert len(links_of(jobs, scene.directory.mark, "hourly")) == 1
    assert links_of(jobs, scene.directory.mark, "daily") == () == links_of(jobs, "f" * 12, "hourly")
    scene.queue.finish("1")
    assert links_of(scene.queue.jobs(), scene.directory.mark, "hourly") == ()


GPU = Partition("gpu_p5", None, ("g1",), is_default=True)
FREE, SHORT = Partition("prepost", None, ("c1",)), Partition("a_short", 600, ("c1",))
DOWN = Partition("a_down", None, ("c1",), is_up=False)
SHARED = Partition("cpu_all", None, ("c1", "c2"))
IDLE = frozenset({"idle"})
NODES = (
    Node("g1", IDLE, gpus=8),
    Node("c1", IDLE, memory_megabytes=4096),
    Node("c2", IDLE, memory_megabytes=1),
)


@pytest.mark.parametrize(
    ("changes", "partitions", "expected"),
    [
        ((), (GPU, SHORT, DOWN, FREE), ("prepost", 2048, False)),
        ((), (GPU, SHARED), ("cpu_all", None, False)),  # a node whose memory no one configured
        (("slurm.partition=prepost",), (GPU, FREE, SHARED), ("cpu_all", None, True)),
        (("cron.partition=gpu_p5",), (GPU, FREE), ("gpu_p5", None, False)),
        ((), (replace(FREE, is_default=True),), ("prepost", 2048, True)),
    ],
)
def test_a_chain_runs_beside_the_training(
    tmp_path: Path,
    changes: tuple[str, ...],
    partitions: tuple[Partition, ...],
    expected: tuple[str, int | None, bool],
) -> None:
    found = choose_placement(card(tmp_path, *changes), partitions, NODES, 7200)
    assert (found.partition, found.memory_megabytes, bool(found.note)) == expected


def test_where_only_gpus_are_a_person_is_asked(tmp_path: Path) -> None:
    with pytest.raises(NoPartition, match=r"a_short, gpu_p5\).*--way crontab.*cron.partition=NAME"):
        choose_placement(card(tmp_path), (GPU, SHORT), NODES, 7200)
