"""Every refusal and warning of a launch: its words, its fix and its exit code, from facts alone and from
real files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from tests.forks import exit_code, forked
from tests.tr11ops.launch.preflight_bench import PARTITION, Bench, cut
from tests.tr11ops.launch.run_inputs import write_checkpoint, write_dataset
from tests.tr11ops.status_cases import ended, save_slow_attempt
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.cluster.site import Grants, Reservation, SiteRules
from tr11ops.launch.directory_checks import (
    bytes_of_a_save,
    files_of_checkpoint,
    look_at_directory,
    read_access,
)
from tr11ops.launch.facts import read_slow_nodes
from tr11ops.launch.preflight import excluded_nodes
from tr11ops.observe.lease import LeaseHolder
from tr11ops.runcard.save_interval import SaveInterval
from tr11ops.runcard.sections import RehearsalSection
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.kill_switch import mark_of
from tr11ops.rundir.paths import BEING_SUBMITTED, SUPERSEDED, Submission, new_tag
from trainer.contract.attempt import EndMarker, Heartbeat, write_heartbeat
from trainer.contract.files import make_shared, write_json
from trainer.contract.lease import Lease, LeaseClaim


def test_a_sound_launch_is_all_ok_and_leaves_no_trace(bench: Bench) -> None:
    assert bench.faults() == [] and bench.code() == 0
    assert not (bench.folder / "run").exists()


def test_a_missing_compiler_is_found_before_the_nodes_find_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the workers run on this machine that refuses the launch; nodes of a cluster may have
    one.
    """
    bench.overrides = ["model.compile_blocks=true"]
    monkeypatch.setenv("CXX", "sh")
    assert bench.faults() == []
    monkeypatch.setenv("CXX", "/nowhere/c++")
    lacking = "no C++ compiler is on this node: g++, clang++, or $CXX"
    assert bench.code() == 2
    assert (
        f"model.compile_blocks: {lacking}; install it, or set model.compile_blocks = false"
        in bench.text()
    )
    bench.changes = {"scheduler": "slurm"}
    assert bench.code() == 0
    assert (
        f"here {lacking}; a node that lacks it too ends the run before its first step"
        in bench.text()
    )
    bench.overrides = []
    assert bench.faults() == []


def node(name: str, *states: str, gpus: int = 8) -> Node:
    return Node(name, frozenset(states), gpus=gpus, partitions=("p",))


CLUSTER: list[tuple[dict[str, Any], list[str], int, str]] = [
    ({"partitions": Unknown("timed out")}, [], 3, "scheduler: its partitions could not be read (timed out)"),
    ({"nodes": Unknown("timed out")}, [], 3, "nodes: they could not be read"),
    ({"jobs": Unknown("timed out")}, [], 3, "queue: the scheduler did not say what is queued"),
    ({"submissions": Unknown("damaged")}, [], 3, "queue: earlier submissions could not be read"),
    ({"exclusions": Unknown("damaged")}, [], 3, "exclusions: the run's list could not be read"),
    ({"checkpoints": Unknown("stale handle")}, [], 3, "checkpoints: they could not be read (stale handle)"),
    ({}, ["slurm.partition=gpu"], 2, "slurm.partition: 'gpu' is not a partition here; use one of: p"),
    ({"partitions": (replace(PARTITION, is_default=False), replace(PARTITION, name="q", is_default=False))}, [], 2,
     "slurm.partition: the cluster has no default partition; set it to one of: p, q"),
    ({"partitions": (replace(PARTITION, max_time_seconds=300),)}, [], 2,
     "slurm.time_limit: 00:10:00 is above the limit of partition p (00:05:00); use 00:05:00"),
    ({}, ["slurm.nodes=8", "batch.global_batch_size=16"], 1,
     "nodes: 8 are needed, there are 4 of partition p after 0 excluded; ask for fewer with --nodes"),
    ({"nodes": tuple(node(f"n{k}", "down" if k > 1 else "idle") for k in range(1, 5))}, [], 0,
     "warning: nodes: 2 are needed, 1 can be used now (n2, n3, n4 cannot): the job will wait"),
    ({"nodes": tuple(node(f"n{k}", "down" if k > 2 else "idle") for k in range(1, 5))}, ["slurm.spare_nodes=1"], 0,
     "2 can be used now (n3, n4 cannot): the job will wait; `--set slurm.spare_nodes=0` needs no more than there are"),
    ({"partitions": (replace(PARTITION, is_up=False),)}, [], 0, "warning: partition: p is down: the job will wait"),
    ({"nodes": tuple(node(f"n{k}", "idle", gpus=4) for k in range(1, 5))}, ["slurm.gpus_per_node=8"], 2,
     "slurm.gpus_per_node: 8 GPUs a node are needed, n1, n2, n3, n4 have fewer"),
    ({"scheduler": "local"}, ["slurm.options.exclusive=true", "slurm.options.wckey=bloom"], 0,
     "slurm.options: exclusive, wckey=bloom: for sbatch alone, the embedded scheduler does nothing with them"),
    ({"scheduler": "slurm", "nodes": tuple(replace(node(f"n{k}", "idle"), cpus=16) for k in range(1, 5))},
     ["slurm.cpus_per_task=32"], 2, "slurm.cpus_per_task: 32 cores a node are needed, n1, n2, n3, n4 have fewer"),
    ({"nodes": tuple(replace(node(f"n{k}", "down"), features=frozenset({"v100"} if k > 1 else {"a100"}))
                     for k in range(1, 5))}, ["slurm.constraint=a100"], 2,
     "slurm.constraint: 2 nodes with a100 are needed, n2, n3, n4 have not got it"),
    ({"grants": Grants(Reservation("r", None, None, ("n4", "m1")))}, ["slurm.reservation=r"], 1,
     "nodes: 2 are needed, there are 1 of reservation r in partition p after 0 excluded"),
    ({"foreground": Unknown("stale handle")}, [], 3, "queue: earlier attempts could not be read (stale handle)"),
    ({"foreground": ("tr11 train, process 7 on here",)}, [], 1, "already running: tr11 train, process 7 on here"),
    ({"elsewhere": ("job 9 (slurm, PENDING)",)}, [], 1, "already queued or running: job 9 (slurm, PENDING); stop"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "overrides", "code", "words"), CLUSTER, ids=[words[:40] for *_, words in CLUSTER]
)
def test_what_the_cluster_says(
    bench: Bench, changes: dict[str, Any], overrides: list[str], code: int, words: str
) -> None:
    bench.changes, bench.overrides = changes, overrides
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_excluded_nodes_come_from_everywhere_and_must_exist(bench: Bench) -> None:
    listed = (Exclusion("n3", until=1e18), Exclusion("n4", until=1.0))
    bench.changes = {"exclusions": listed}
    bench.request = replace(bench.request, exclude=("n1",))
    assert excluded_nodes(bench.request, bench.facts()) == (("n1", "n3", "n4"), ())
    assert any(
        "exclusions: n4: the time of the exclusion is over" in fault for fault in bench.faults()
    )
    bench.changes = {"exclusions": listed[:1]}
    assert excluded_nodes(bench.request, bench.facts()) == (("n1", "n3"), ())
    assert bench.code() == 0
    bench.request = replace(bench.request, exclude=("n1", "n2"))
    assert (
        "refused: nodes: 2 are needed, there are 1 of partition p after 3 excluded"
        in bench.faults()[0]
    )
    bench.request = replace(bench.request, exclude=("m1",))
    assert (
        "exclude: 'm1' is not a node of this cluster; name one of: n1, n2, n3, n4"
        in bench.faults()[0]
    )
    assert bench.code() == 2


def test_a_node_that_the_last_attempt_measured_as_slow_is_named(bench: Bench) -> None:
    marker = ended("7").end
    assert isinstance(marker, EndMarker)
    save_slow_attempt(bench.directory.paths, marker)
    with (
        patch("tr11ops.observe.files.read_checkpoints", side_effect=AssertionError),
        patch("tr11ops.observe.files.read_heartbeats", side_effect=AssertionError),
    ):
        found = read_slow_nodes(bench.card, bench.directory, "slurm")
    assert [one.subject for one in found] == ["n2"]
    assert read_slow_nodes(bench.card, bench.directory, "local") == ()
    bench.changes = {"slow_nodes": found}
    (told,) = [fault for fault in bench.faults() if "held the others back" in fault]
    assert told.startswith("warning: nodes: n2 held the others back in the last attempt")
    assert "3.00 times as long as its peers" in told
    assert "`tr11 nodes exclude n2 --reason 'it holds the others back'` first" in told
    bench.request = replace(bench.request, exclude=("n2",))
    assert not any("held the others back" in fault for fault in bench.faults())


def test_an_excluded_node_that_the_site_removed_is_left_out(bench: Bench) -> None:
    bench.changes = {"exclusions": (Exclusion("n3", until=1e18), Exclusion("gone7", until=1e18))}
    assert excluded_nodes(bench.request, bench.facts()) == (("n3",), ("gone7",))
    assert bench.code() == 0
    [told] = [fault for fault in bench.faults() if "left out" in fault]
    assert (
        "exclusions: gone7 on the run's list: no node of this cluster (any more), left out" in told
    )
    assert "`tr11 nodes include gone7 --force` takes it off the list" in told


@pytest.mark.parametrize("key", ["backup.store", "backup.url"])
def test_an_archive_that_is_not_there_is_said(bench: Bench, key: str) -> None:
    folder = bench.folder / "archive"
    bench.overrides = [f"{key}={'file://' if key == 'backup.url' else ''}{folder}"]
    assert bench.code() == 0
    said = f"{key}: nothing can be copied there: {folder} is not there: is its file system mounted?"
    assert any(said in fault for fault in bench.faults()), bench.faults()
    folder.mkdir()
    assert not any("nothing can be copied there" in fault for fault in bench.faults())


def set_switch(bench: Bench) -> None:
    write_json(bench.directory.kill_switch, {"who": "someone", "why": "new data"})


def foreign_switch(bench: Bench) -> None:
    (bench.folder / "other" / "state" / "submissions").mkdir(parents=True)
    bench.overrides = [f"run.kill_switch={bench.folder}/other/kill-switch"]


def claimed_switch(bench: Bench) -> None:
    (bench.folder / "other").mkdir()
    write_json(mark_of(bench.folder / "shared-switch"), {"directory": str(bench.folder / "other")})
    bench.overrides = [f"run.kill_switch={bench.folder}/shared-switch"]


def file_for_directory(bench: Bench) -> None:
    (bench.folder / "run").write_text("in the way")


FILES: list[tuple[Callable[[Bench], object], int, str]] = [
    (lambda bench: (bench.folder / "data/corpus.idx").unlink(), 1, "data/corpus.idx does not exist; correct the path"),
    (lambda bench: cut(bench.folder / "data/corpus.idx"), 1, "its header needs 102 (it was cut off)"),
    (lambda bench: cut(bench.folder / "data/corpus.bin"), 1, "its index needs 3000 (it was cut off)"),
    (lambda bench: (bench.folder / "data/tokenizer/tokenizer.json").unlink(), 1, "tokenizer.path: "),
    (lambda bench: (bench.folder / "data/tokenizer/tokenizer.json").write_text("{}"), 1, "is not a tokenizer"),
    (lambda bench: setattr(bench, "overrides", ["tokenizer.padded_vocabulary_size=64"]), 2,
     "tokenizer.padded_vocabulary_size: 64 is below the tokenizer's 100 tokens; use 100 or more"),
    (set_switch, 1, "kill-switch is set by someone (new data); release it with `tr11 resume`"),
    (foreign_switch, 2, "run.kill_switch: "),
    (claimed_switch, 2, "shared-switch belongs to another run, "),
    (file_for_directory, 1, "run.directory: "),
    (lambda bench: setattr(bench, "overrides", ["run.directory=100%j"]), 2, "holds a '%', which Slurm reads"),
    (lambda bench: setattr(bench, "overrides", ["run.directory=a\\\\b"]), 2, "holds a '\\\\', which Slurm reads"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "code", "words"), FILES, ids=[words[:30] for *_, words in FILES]
)
def test_what_the_files_say(
    bench: Bench, damage: Callable[[Bench], object], code: int, words: str
) -> None:
    damage(bench)
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_folder_without_write_access_is_refused(bench: Bench) -> None:
    closed = bench.folder / "closed"
    closed.mkdir(mode=0o555)
    bench.overrides = [f"run.directory={closed}/run"]
    directory = bench.directory

    def look() -> None:  # root may write everywhere, so another user looks
        if os.geteuid() == 0:
            os.setuid(65534)
        assert look_at_directory(directory).fault.endswith(" cannot be written to")

    assert exit_code(forked(look)) == 0
    bench.changes = {
        "directory": replace(bench.facts().directory, fault=f"{closed} cannot be written to")
    }
    fix = "choose another run.directory, or ask its owner for write access"
    assert bench.faults() == [f"refused: run.directory: {closed} cannot be written to; {fix}"]


def test_too_little_space(bench: Bench) -> None:
    bench.changes = {"directory": replace(bench.facts().directory, free_bytes=999)}
    assert "refused: space: 999 B free below" in bench.faults()[0] and bench.code() == 1
    bench.changes = {
        "directory": replace(bench.facts().directory, free_bytes=Unknown("no such device"))
    }
    assert "warning: space" in bench.faults()[0] and bench.code() == 0


def test_the_room_is_measured_by_what_the_runs_own_saves_take(bench: Bench) -> None:
    """Not by what the card's model would write: a stand-in writes little, and was refused its
    resubmission.
    """
    bench.changes = {"directory": replace(bench.facts().directory, free_bytes=5000)}
    assert "refused: space: 4.9 KiB free" in bench.faults()[0]
    write_checkpoint(bench.directory.paths.checkpoints, 4, size=2000)
    assert (
        not any("space" in line for line in bench.faults())
        and "a checkpoint takes 2.0 KiB" in bench.text()
    )
    write_checkpoint(bench.directory.paths.checkpoints, 6, size=3000)
    assert "two checkpoints need 6.0 KiB" in bench.faults()[0]


def test_a_stand_in_that_has_saved_nothing_is_measured_by_what_it_is_told_to_write(
    bench: Bench,
) -> None:
    stand_in = bench.card.model_copy(update={"rehearsal": RehearsalSection(bytes_per_rank=300)})
    assert bytes_of_a_save(stand_in, bench.directory, bench.facts()) == 300 * bench.card.world_size
    assert bytes_of_a_save(bench.card, bench.directory, bench.facts()) > 100_000


PLACE: list[tuple[dict[str, Any], str, int]] = [
    ({"pause": "ana (new data)"}, "refused: pause: the run is paused by ana (new data); let it go on with `tr11 resume`", 1),
    ({"access": ((Path("/r/state"), "without the setgid bit", "ana"),)},
     "warning: permissions: /r/state is without the setgid bit: others of the group cannot keep the run going; "
     "repair it with `tr11 perms fix`, typed by ana", 0),
    ({"access": Unknown("stale handle")}, "warning: permissions: they could not be read (stale handle)", 0),
    ({"clocks": (("node n1", -9.2, "the file system"), ("node n2", 1.0, "the file system"))},
     "warning: clocks: the clock of node n1 is 9 s behind that of the file system", 0),
    ({"site": SiteRules(hidden=frozenset({"nodes"})), "nodes": Unknown("denied")},
     "warning: nodes: the site shows its nodes to administrators alone (PrivateData=nodes)", 0),
    ({"site": SiteRules(clock=1.0), "time": 31.0}, "the clock of this machine is 30 s ahead of that of the scheduler", 0),
    ({"holder": LeaseHolder("99", "far", "job 99 (launch 1) of ana on far, process 7")},
     "refused: lease: a trainer holds this run's lease and lives: job 99 (launch 1) of ana on far, process 7", 1),
    ({"rehearsal_refusal": "it; is no twin"}, "refused: [rehearsal]: it; is no twin; take the section out of the card", 2),
    ({"submissions": (Submission(new_tag(), "1", "slurm", 1.0, "ana", "h", "other", "main", None, 2, "hash"),)},
     "was last used by run other, launched by ana", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "code"), PLACE, ids=[words[:40] for _, words, _ in PLACE]
)
def test_what_is_wrong_with_the_place(
    bench: Bench, changes: dict[str, Any], words: str, code: int
) -> None:
    bench.changes = changes
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_holder_known_to_someone_is_judged_elsewhere(bench: Bench) -> None:
    ended = bench.job("99", JobState.COMPLETED, array_id=None)
    bench.changes = {"holder": LeaseHolder("99", "far", "it"), "jobs": (ended,)}
    assert bench.faults() == []
    bench.changes = {"holder": LeaseHolder("foreground-1", bench.facts().host, "it")}
    assert bench.faults() == []


def test_too_few_inodes_for_two_checkpoints(bench: Bench) -> None:
    needed = 2 * files_of_checkpoint(bench.card)
    bench.changes = {"directory": replace(bench.facts().directory, free_inodes=needed - 1)}
    assert (
        f"refused: inodes: {needed - 1:,} inodes are free" in bench.faults()[0]
        and bench.code() == 1
    )
    for free in (needed, None):
        bench.changes = {"directory": replace(bench.facts().directory, free_inodes=free)}
        assert bench.faults() == []


def test_spares_are_needed_too(bench: Bench) -> None:
    bench.overrides = ["slurm.spare_nodes=2"]
    assert "nodes: 2 + 2 spare of 4 usable (0 to spare, 0 excluded)" in bench.text()
    bench.overrides = ["slurm.spare_nodes=3"]
    assert (
        "2 + 3 spare are needed, there are 4 of partition p after 0 excluded; set slurm.spare_nodes to 2"
        in bench.faults()[0]
    )
    assert bench.code() == 1


def test_spares_that_need_not_be_there_are_not_waited_for(bench: Bench) -> None:
    bench.overrides = ["slurm.spare_nodes=3", "slurm.least_spare_nodes=0"]
    assert "nodes: 2 + 0 to 3 spare of 4 usable (2 to spare, 0 excluded)" in bench.text()
    assert bench.faults() == []


def test_measured_times_take_the_place_of_the_rule_of_thumb(bench: Bench) -> None:
    bench.overrides = ["run.exit_duration_minutes=9.9"]
    assert bench.faults()[0].startswith(
        "warning: card: run.exit_duration_minutes = 9.9: leaves 0.1 minutes"
    )
    bench.changes = {"history": RunHistory(step=0.5, save=3.0)}
    assert bench.faults() == [] and "margin: 6 s are left" in bench.text()
    bench.changes = {"history": RunHistory(step=0.5, save=30.0)}
    assert (
        "the last checkpoint of each attempt would be lost: 6 s are left" in bench.faults()[0]
        and bench.code() == 2
    )


def test_what_is_seen_of_a_real_run_directory(bench: Bench) -> None:
    directory = bench.directory
    make_shared(directory.paths.state)
    beat = Heartbeat(0, "n1", 1, "training", 3, time.time(), "7")
    write_heartbeat(directory.paths.heartbeat(0), beat)
    os.utime(directory.paths.heartbeat(0), (beat.time + 60, beat.time + 60))
    (clock, ahead, _), (_, here, _) = known(bench.facts().clocks, ())
    assert (clock, ahead) == ("node n1", pytest.approx(-60, abs=1)) and abs(here) < 5
    assert read_access(directory) == ()
    directory.paths.state.chmod(0o755)
    [(path, fault, _)] = read_access(directory)
    assert (path, fault) == (
        directory.paths.state,
        "not writable for its group, without the setgid bit",
    )
    write_json(directory.paths.pause, {"who": "ana", "why": "new data"})
    assert bench.facts().pause == "ana (new data)"
    lease = Lease(directory.paths, LeaseClaim.of_this_process("99", 1))
    assert lease.take() is None
    holder = known(bench.facts().holder, None)
    lease.release()
    assert holder is not None and holder.job_id == "99" and "job 99" in holder.text
    left = sorted(path.name for path in directory.paths.state.iterdir())
    # nothing of ours is left behind
    assert left == ["heartbeat", "lease", "lease.json", "requests"]


def test_index_maps_that_are_there_are_not_announced(bench: Bench) -> None:
    assert (
        "index maps: 1 of 1 data sets have none yet: built at the start, in about 1 s"
        in bench.text()
    )
    (bench.folder / "data" / "corpus_train_indexmap_64ns_16sl_1234s_0123.json").write_text("{}")
    assert "index maps: there for every data set" in bench.text()


def test_several_faults_are_told_at_once(bench: Bench) -> None:
    write_dataset(bench.folder / "data/corpus", (3,))
    cut(bench.folder / "data/corpus.bin")
    set_switch(bench)
    bench.changes = {"jobs": (bench.job("7"),)}
    assert len(bench.faults()) == 3


def test_a_second_launch_is_refused_and_told_how_to_queue(bench: Bench) -> None:
    bench.changes = {
        "jobs": (
            bench.job("7", JobState.RUNNING),
            bench.job("9"),
            bench.job("3", JobState.COMPLETED),
        )
    }
    fix = "queue behind it with `--after 9`, or stop it with `tr11 kill`"
    assert bench.faults() == [
        f"refused: queue: this run is already running: job 7_1 (and 1 more); {fix}"
    ]
    assert bench.code() == 1


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        (
            {"comment": "", "user": "me"},
            "refused: namesake: your job 7_1 has this run's name and is queued",
            1,
        ),
        ({"comment": "", "user": "you"}, "warning: queue: job 7_1 of you has the same name", 0),
        (
            {"comment": f"tr11:{new_tag()}@000000000000", "working_directory": "/x/run"},
            "refused: namesake: your job 7_1 has this run's name and is queued in /x/run; if that is the run you mean",
            1,
        ),
        (
            {"comment": f"tr11:{new_tag()}@000000000000", "state": JobState.PENDING, "user": "you"},
            "warning: queue: job 7_1 of you has the same name",
            0,
        ),
        (
            {"state": JobState.UNKNOWN},
            "unknown: queue: the state of job 7_1 of this run is unknown",
            3,
        ),
        ({"name": "renamed"}, "refused: queue: this run is already queued", 1),
    ],
)
def test_whose_job_it_is(bench: Bench, changes: dict[str, Any], words: str, code: int) -> None:
    bench.changes = {"jobs": (bench.job("7", **changes),)}
    assert words in bench.faults()[0] and bench.code() == code


def test_a_namesake_of_ones_own_is_taken_when_told_so(bench: Bench) -> None:
    bench.changes = {"jobs": (bench.job("7", comment=f"tr11:{new_tag()}@000000000000"),)}
    assert bench.code() == 1
    bench.request = replace(bench.request, beside_namesakes=True)
    assert bench.faults() == [
        "warning: queue: job 7_1 of me has the same name, but is not of this run"
    ]
    assert bench.code() == 0


def after(bench: Bench, target: Job | None, jobs: tuple[Job, ...], number: str = "9") -> list[str]:
    bench.request = replace(bench.request, after=number)
    bench.changes = {"jobs": jobs, "after": target}
    return bench.faults()


def test_after_must_be_the_last_in_line(bench: Bench) -> None:
    first, second = (
        bench.job("7", JobState.RUNNING),
        bench.job("9", dependency="afterany:7_*(unfulfilled)"),
    )
    assert after(bench, second, (first, second)) == [] and bench.code() == 0
    assert (
        "job 9_1 of this run could run at the same time; use `--after 9`"
        in after(bench, first, (first, second), "7")[0]
    )
    apart = bench.job("9")
    assert (
        "job 7_1 of this run could run at the same time" in after(bench, apart, (first, apart))[0]
    )
    assert "could run at the same time" in after(bench, second, (first, second), "9_1")[0]
    assert bench.code() == 1


def test_after_a_stranger_or_nothing(bench: Bench) -> None:
    ours = bench.job("7")
    assert (
        "--after: the scheduler knows no job 9; jobs of this run: 7"
        in after(bench, None, (ours,))[0]
    )
    assert bench.code() == 2
    over = bench.job("9", JobState.FAILED)
    assert after(bench, over, ()) == [
        "warning: --after: job 9 is over: the new one may start at once"
    ]
    stranger = bench.job("9", JobState.RUNNING, name="x", comment="")
    assert after(bench, stranger, (stranger,)) == ["warning: --after: job 9 (x) is not of this run"]
    bench.changes = {"after": Unknown("timed out")}
    assert "whether job 9 exists (timed out)" in bench.faults()[0] and bench.code() == 3


def test_a_submission_whose_answer_was_lost_is_remembered(bench: Bench) -> None:
    tag = new_tag()
    lost = Submission(tag, None, "local", 1.0, "me", "here", "small", "main", None, 2, "hash")
    bench.changes = {"submissions": (lost,)}
    words = (
        f"warning: queue: the scheduler has no trace of submission {tag}, whose answer was lost; "
    )
    assert bench.faults() == [words + "if its job should come after all, it leaves at once"]
    bench.changes = {"submissions": (lost,), "traces": {tag: "12"}}
    assert bench.faults() == []
    bench.changes = {
        "submissions": (lost,),
        "jobs": (bench.job("7", JobState.FAILED, comment=bench.directory.comment(tag)),),
    }
    assert bench.faults() == []
    bench.changes = {"submissions": (replace(lost, note=f"{SUPERSEDED}{new_tag()}"),)}
    assert bench.faults() == []


def test_a_client_on_another_host_that_submits_is_waited_for(bench: Bench) -> None:
    facts = bench.facts()
    lost = Submission(
        new_tag(),
        None,
        "slurm",
        facts.time - 20,
        "ana",
        "far",
        "small",
        "main",
        None,
        2,
        "hash",
        note=BEING_SUBMITTED,
    )
    bench.changes = {"submissions": (lost,), "time": facts.time}
    assert (
        bench.faults()
        == [
            "refused: queue: ana has begun to launch this run on far 20 s ago; look again in 2 min 10 s"
        ]
        and bench.code() == 1
    )
    # its lock is ours: it is dead
    bench.changes = {"submissions": (replace(lost, host=facts.host),), "time": facts.time}
    assert bench.code() == 0 and "no trace" in bench.faults()[0]


def test_how_often_the_next_launch_saves_is_said_with_its_reason(bench: Bench) -> None:
    """By the one function that the launch itself asks; nothing where its card does not have it choose."""
    assert "the training saves" not in bench.text()
    bench.overrides = [
        "resilience.adapt_save_interval=true", "backup.prune=true", f"backup.store={bench.folder}",
        "checkpoint.interval=100",
    ]  # fmt: skip
    assert (
        "saves: the training saves as often as its card says: no step, or no room" in bench.text()
    )
    bench.changes = {
        "saves": SaveInterval(12.5, "one fault in 3 h, a save stops the steps for 2 s")
    }
    said = (
        "the training saves every 12.5 min: one fault in 3 h, a save stops the steps for 2 s; each"
    )
    assert said in bench.text()
    bench.changes = {"saves": Unknown("no answer")}
    assert "how often the launch saves is not known: no answer" in bench.text()
