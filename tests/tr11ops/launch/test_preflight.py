"""Every refusal and warning of a launch: its words, its fix and its exit code, from facts alone and from real files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint, write_dataset
from tr11ops.backup.records import identity_of
from tr11ops.checkpoints.digests import DigestRecord, write_digest
from tr11ops.cluster.base import Job, JobState, Node, Partition, Scheduler, SchedulerError
from tr11ops.cluster.site import SiteRules
from tr11ops.launch.check import Check, Level, verdict
from tr11ops.launch.facts import LaunchFacts, LaunchRequest, look_at_place, observe_launch
from tr11ops.launch.history import RunHistory
from tr11ops.launch.place import files_of_checkpoint
from tr11ops.launch.preflight import excluded_nodes, preflight
from tr11ops.launch.queue import BEING_SUBMITTED, SUPERSEDED
from tr11ops.launch.surroundings import AccessFault, ClockFacts, Holder, read_access
from tr11ops.nodes.given import Given
from tr11ops.runcard import RunCard, load_card
from tr11ops.rundir import RunDirectory, Submission, make_shared, new_tag
from tr11ops.snapshot import Exclusion, Unknown, known
from tr11ops.switch_place import mark_of
from trainer.contract import Heartbeat, checkpoint_name, file_digest, write_heartbeat, write_json
from trainer.data_match import DataRecord, data_facts
from trainer.lease import Claim, Lease

MODEL = {
    "model.layers": 2, "model.hidden_size": 32, "model.attention_heads": 4, "model.ffn_hidden_size": 128,
    "model.position_embedding": "alibi", "model.embedding_layernorm": False,
    "tokenizer.padded_vocabulary_size": 128, "precision.dtype": "bf16",
}  # fmt: skip
NODES = tuple(Node(f"n{number}", frozenset({"idle"}), gpus=8, partitions=("p",)) for number in range(1, 5))
PARTITION = Partition("p", 3600, ("n1", "n2", "n3", "n4"), is_default=True)


def no_scheduler(kind: str) -> Scheduler:
    raise SchedulerError(f"no {kind} here")


class Bench:
    """A card with whole inputs, and the facts that a launch of it would see on a small idle cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = write_card(folder)
        self.request = LaunchRequest("1-3%1", 3)
        self.overrides: list[str] = []
        self.changes: dict[str, Any] = {}

    @property
    def card(self) -> RunCard:
        return load_card(self.path, self.overrides, {}, directory=self.folder)

    @property
    def directory(self) -> RunDirectory:
        card = self.card
        return RunDirectory(card.paths, card.kill_switch)

    def facts(self) -> LaunchFacts:
        seen = observe_launch(
            self.card, self.directory, self.request, scheduler=None, other_scheduler=no_scheduler, user="me"
        )
        return replace(seen, **{"nodes": NODES, "partitions": (PARTITION,), "access": (), **self.changes})

    def checks(self) -> tuple[Check, ...]:
        return preflight(self.card, self.directory, self.request, self.facts())

    def faults(self) -> list[str]:
        return [f"{check.level}: {check}" for check in self.checks() if check.level is not Level.OK]

    def text(self) -> str:
        """Every line, whatever its level."""
        return "\n".join(map(str, self.checks()))

    def code(self) -> int:
        return verdict(self.checks())

    def job(self, number: str, state: JobState = JobState.PENDING, **changes: Any) -> Job:
        values = {"name": "small", "user": "me", "comment": self.directory.comment(new_tag()), "array_id": number}
        return Job(f"{number}_1", number, task_id=1, state=state, **{**values, **changes})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_sound_launch_is_all_ok_and_leaves_no_trace(bench: Bench) -> None:
    assert bench.faults() == [] and bench.code() == 0
    assert not (bench.folder / "run").exists()


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
    ({"partitions": (replace(PARTITION, is_up=False),)}, [], 0, "warning: partition: p is down: the job will wait"),
    ({"nodes": tuple(node(f"n{k}", "idle", gpus=4) for k in range(1, 5))}, ["slurm.gpus_per_node=8"], 2,
     "slurm.gpus_per_node: 8 GPUs a node are needed, n1, n2, n3, n4 have fewer"),
    ({"foreground": Unknown("stale handle")}, [], 3, "queue: earlier attempts could not be read (stale handle)"),
    ({"foreground": ("tr11 train, process 7 on here",)}, [], 1, "already running: tr11 train, process 7 on here"),
    ({"elsewhere": ("job 9 (slurm, PENDING)",)}, [], 1, "already queued or running: job 9 (slurm, PENDING); stop"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "overrides", "code", "words"), CLUSTER, ids=[words[:40] for *_, words in CLUSTER])
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
    assert excluded_nodes(bench.request, bench.facts()) == Given(("n1", "n3", "n4"))
    assert any("exclusions: n4: the time of the exclusion is over" in fault for fault in bench.faults())
    bench.changes = {"exclusions": listed[:1]}
    assert excluded_nodes(bench.request, bench.facts()) == Given(("n1", "n3"))
    assert bench.code() == 0
    bench.request = replace(bench.request, exclude=("n1", "n2"))
    assert "refused: nodes: 2 are needed, there are 1 of partition p after 3 excluded" in bench.faults()[0]
    bench.request = replace(bench.request, exclude=("m1",))
    assert "exclude: 'm1' is not a node of this cluster; the nodes are n1, n2, n3, n4" in bench.faults()[0]
    assert bench.code() == 2


def test_an_excluded_node_that_the_site_has_removed_is_left_out_and_told(bench: Bench) -> None:
    bench.changes = {"exclusions": (Exclusion("n3", until=1e18), Exclusion("gone7", until=1e18))}
    assert excluded_nodes(bench.request, bench.facts()) == Given(("n3",), ("gone7",))
    assert bench.code() == 0
    [told] = [fault for fault in bench.faults() if "left out" in fault]
    assert "exclusions: gone7 on the run's list: no node of this cluster (any more), left out" in told
    assert "`tr11 nodes include gone7 --force` takes it off the list" in told


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


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


@pytest.mark.parametrize(("damage", "code", "words"), FILES, ids=[words[:30] for *_, words in FILES])
def test_what_the_files_say(bench: Bench, damage: Callable[[Bench], object], code: int, words: str) -> None:
    damage(bench)
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_folder_without_write_access_is_refused(bench: Bench) -> None:
    closed = bench.folder / "closed"
    closed.mkdir(mode=0o555)
    bench.overrides = [f"run.directory={closed}/run"]
    directory = bench.directory
    child = os.fork()
    if child == 0:  # root may write everywhere, so another user looks
        status = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            status = 0 if look_at_place(directory).fault.endswith(" cannot be written to") else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bench.changes = {"place": replace(bench.facts().place, fault=f"{closed} cannot be written to")}
    fix = "choose another run.directory, or ask its owner for write access"
    assert bench.faults() == [f"refused: run.directory: {closed} cannot be written to; {fix}"]


def test_too_little_space(bench: Bench) -> None:
    bench.changes = {"place": replace(bench.facts().place, free_bytes=999)}
    assert "refused: space: 999 B free below" in bench.faults()[0] and bench.code() == 1
    bench.changes = {"place": replace(bench.facts().place, free_bytes=Unknown("no such device"))}
    assert "warning: space" in bench.faults()[0] and bench.code() == 0


PLACE: list[tuple[dict[str, Any], str, int]] = [
    ({"pause": "ana (new data)"}, "refused: pause: the run is paused by ana (new data); let it go on with `tr11 resume`", 1),
    ({"access": (AccessFault(Path("/r/state"), "without the setgid bit", "ana"),)},
     "warning: permissions: /r/state is without the setgid bit: others of the group cannot keep the run going; "
     "mend it with `tr11 perms fix`, typed by ana", 0),
    ({"access": Unknown("stale handle")}, "warning: permissions: they could not be read (stale handle)", 0),
    ({"clocks": (ClockFacts("node n1", -9.2, "the file system"), ClockFacts("node n2", 1.0, "the file system"))},
     "warning: clocks: the clock of node n1 is 9 s behind that of the file system", 0),
    ({"site": SiteRules(clock=1.0), "time": 31.0}, "the clock of this machine is 30 s ahead of that of the scheduler", 0),
    ({"holder": Holder("99", "far", "job 99 (launch 1) of ana on far, process 7")},
     "refused: lease: a trainer holds this run's lease and lives: job 99 (launch 1) of ana on far, process 7", 1),
    ({"rehearsal_refusal": "not a twin"}, "refused: rehearsal: not a twin", 2),
    ({"submissions": (Submission(new_tag(), "1", "slurm", 1.0, "ana", "h", "other", "main", None, 2, "hash"),)},
     "was last used by run other, launched by ana", 0),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words", "code"), PLACE, ids=[words[:40] for _, words, _ in PLACE])
def test_what_is_wrong_with_the_place(bench: Bench, changes: dict[str, Any], words: str, code: int) -> None:
    bench.changes = changes
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_holder_that_the_scheduler_or_this_machine_knows_is_judged_elsewhere(bench: Bench) -> None:
    ended = bench.job("99", JobState.COMPLETED, array_id=None)
    bench.changes = {"holder": Holder("99", "far", "it"), "jobs": (ended,)}
    assert bench.faults() == []
    bench.changes = {"holder": Holder("foreground-1", bench.facts().host, "it")}
    assert bench.faults() == []


def test_too_few_inodes_for_two_checkpoints(bench: Bench) -> None:
    needed = 2 * files_of_checkpoint(bench.card)
    bench.changes = {"place": replace(bench.facts().place, free_inodes=needed - 1)}
    assert f"refused: inodes: {needed - 1:,} inodes are free" in bench.faults()[0] and bench.code() == 1
    for free in (needed, None):
        bench.changes = {"place": replace(bench.facts().place, free_inodes=free)}
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


def test_measured_times_take_the_place_of_the_rule_of_thumb(bench: Bench) -> None:
    bench.overrides = ["run.exit_duration_minutes=9.9"]
    assert bench.faults()[0].startswith("warning: card: run.exit_duration_minutes = 9.9: leaves 0.1 minutes")
    bench.changes = {"history": RunHistory(step=0.5, save=3.0)}
    assert bench.faults() == [] and "margin: 6 s are left" in bench.text()
    bench.changes = {"history": RunHistory(step=0.5, save=30.0)}
    assert "the last checkpoint of each attempt would be lost: 6 s are left" in bench.faults()[0] and bench.code() == 2


def test_what_is_seen_of_a_real_run_directory(bench: Bench) -> None:
    directory = bench.directory
    make_shared(directory.paths.state)
    beat = Heartbeat(0, "n1", 1, "training", 3, time.time(), "7")
    write_heartbeat(directory.paths.heartbeat(0), beat)
    os.utime(directory.paths.heartbeat(0), (beat.time + 60, beat.time + 60))
    clock, here = known(bench.facts().clocks, ())
    assert clock.what == "node n1" and clock.ahead == pytest.approx(-60, abs=1) and abs(here.ahead) < 5
    assert read_access(directory) == ()
    directory.paths.state.chmod(0o755)
    [fault] = read_access(directory)
    assert (fault.path, fault.fault) == (directory.paths.state, "not writable for its group, without the setgid bit")
    write_json(directory.paths.pause, {"who": "ana", "why": "new data"})
    assert bench.facts().pause == "ana (new data)"
    lease = Lease(directory.paths, Claim.of_this_process("99", 1))
    assert lease.take() is None
    holder = known(bench.facts().holder, None)
    lease.release()
    assert holder is not None and holder.job_id == "99" and "job 99" in holder.text
    left = sorted(path.name for path in directory.paths.state.iterdir())
    assert left == ["heartbeat", "lease", "lease.json", "requests"]  # nothing of ours is left behind


def test_digests_are_compared_where_asked(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    data = place / "weights" / "part.bin"
    data.write_bytes(bytes(64))
    assert bench.code() == 0 and "global_step10 (saved on" in bench.text()
    bench.request = replace(bench.request, read_digests=True)
    assert bench.code() == 1 and "none is resumable" in bench.faults()[0]


def test_index_maps_that_are_there_are_not_announced(bench: Bench) -> None:
    assert "index maps: 1 of 1 data sets have none yet: built at the start, in about 1 s" in bench.text()
    (bench.folder / "data" / "corpus_train_indexmap_64ns_16sl_1234s_0123.json").write_text("{}")
    assert "index maps: there for every data set" in bench.text()


# ----------------------------------------------------------------------------- the queue
def test_a_second_launch_is_refused_and_told_how_to_queue(bench: Bench) -> None:
    bench.changes = {"jobs": (bench.job("7", JobState.RUNNING), bench.job("9"), bench.job("3", JobState.COMPLETED))}
    fix = "queue behind it with `--after 9`, or stop it with `tr11 kill`"
    assert bench.faults() == [f"refused: queue: this run is already running: job 7_1 (and 1 more); {fix}"]
    assert bench.code() == 1


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        ({"comment": "", "user": "me"}, "refused: namesake: your job 7_1 has this run's name and is queued", 1),
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
        ({"state": JobState.UNKNOWN}, "unknown: queue: the state of job 7_1 of this run is unknown", 3),
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
    assert bench.faults() == ["warning: queue: job 7_1 of me has the same name, but is not of this run"]
    assert bench.code() == 0


def after(bench: Bench, target: Job | None, jobs: tuple[Job, ...], number: str = "9") -> list[str]:
    bench.request = replace(bench.request, after=number)
    bench.changes = {"jobs": jobs, "after": target}
    return bench.faults()


def test_after_must_be_the_last_in_line(bench: Bench) -> None:
    first, second = bench.job("7", JobState.RUNNING), bench.job("9", dependency="afterany:7_*(unfulfilled)")
    assert after(bench, second, (first, second)) == [] and bench.code() == 0
    assert (
        "job 9_1 of this run could run at the same time; use `--after 9`"
        in after(bench, first, (first, second), "7")[0]
    )
    apart = bench.job("9")
    assert "job 7_1 of this run could run at the same time" in after(bench, apart, (first, apart))[0]
    assert "could run at the same time" in after(bench, second, (first, second), "9_1")[0]
    assert bench.code() == 1


def test_after_a_stranger_or_nothing(bench: Bench) -> None:
    ours = bench.job("7")
    assert "--after: the scheduler knows no job 9; jobs of this run: 7" in after(bench, None, (ours,))[0]
    assert bench.code() == 2
    over = bench.job("9", JobState.FAILED)
    assert after(bench, over, ()) == ["warning: --after: job 9 is over: the new one may start at once"]
    stranger = bench.job("9", JobState.RUNNING, name="x", comment="")
    assert after(bench, stranger, (stranger,)) == ["warning: --after: job 9 (x) is not of this run"]
    bench.changes = {"after": Unknown("timed out")}
    assert "whether job 9 exists (timed out)" in bench.faults()[0] and bench.code() == 3


def test_a_submission_whose_answer_was_lost_is_remembered(bench: Bench) -> None:
    tag = new_tag()
    lost = Submission(tag, None, "local", 1.0, "me", "here", "small", "main", None, 2, "hash")
    bench.changes = {"submissions": (lost,)}
    words = f"warning: queue: the scheduler has no trace of submission {tag}, whose answer was lost; "
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


def test_a_client_on_another_host_that_still_submits_is_waited_for(bench: Bench) -> None:
    facts = bench.facts()
    lost = Submission(
        new_tag(), None, "slurm", facts.time - 20, "ana", "far", "small", "main", None, 2, "hash", note=BEING_SUBMITTED
    )
    bench.changes = {"submissions": (lost,), "time": facts.time}
    assert (
        bench.faults() == ["refused: queue: ana has begun to launch this run on far 20 s ago; look again in 130 s"]
        and bench.code() == 1
    )
    bench.changes = {
        "submissions": (replace(lost, host=facts.host),),
        "time": facts.time,
    }  # its lock is ours: it is dead
    assert bench.code() == 0 and "no trace" in bench.faults()[0]


# ----------------------------------------------------------------------------- checkpoints
def checkpoints(bench: Bench) -> Path:
    return bench.directory.paths.checkpoints


def test_resume_from_what_latest_names(bench: Bench) -> None:
    for step in (10, 20):
        write_checkpoint(checkpoints(bench), step, MODEL)
    assert bench.faults() == []
    assert (
        "resumes at step 21 from global_step20 (saved on tensor 1 x pipeline 1 x data 1); sizes verified"
        in bench.text()
    )
    (checkpoints(bench) / "latest").write_text("global_step10")
    assert bench.faults() == ["warning: checkpoints: global_step20 is newer than global_step10, which latest names"]


@pytest.mark.parametrize("text", [None, "garbage", "global_step99"])
def test_a_missing_or_useless_latest_is_a_warning_that_says_what_is_resumed(bench: Bench, text: str | None) -> None:
    write_checkpoint(checkpoints(bench), 10, MODEL, latest=False)
    if text:
        (checkpoints(bench) / "latest").write_text(text)
    assert bench.code() == 0 and "latest" in bench.faults()[0] and "global_step10" in bench.faults()[0]
    assert "will be resumed" in bench.faults()[0]


def test_a_damaged_newest_one_is_passed_over(bench: Bench) -> None:
    for step in (10, 20):
        write_checkpoint(checkpoints(bench), step, MODEL)
    cut(checkpoints(bench) / "global_step20/weights/part.bin")
    assert "warning: checkpoints: global_step20 is passed over: weights/part.bin: 63 bytes" in bench.faults()[0]
    assert "resumes at step 11 from global_step10" in bench.text() and bench.code() == 0


def without_optimizer(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if not entry["path"].startswith("optimizer/")]
    (place / "manifest.json").write_text(json.dumps(manifest))


def test_weights_alone_are_passed_over_as_the_trainer_does_it(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    without_optimizer(place)
    assert "warning: checkpoints: global_step20 is passed over: it holds weights alone" in bench.faults()[0]
    assert "resumes at step 11 from global_step10" in bench.text() and bench.code() == 0


def test_what_a_reading_found_damaged_is_passed_over(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    bad = ("weights/part.bin: its digest differs from the manifest's",)
    write_digest(bench.directory, DigestRecord(20, identity_of(place), 1.0, 3, 64, bad))
    assert "global_step20 is passed over: weights/part.bin: its digest differs" in bench.faults()[0]
    assert "resumes at step 11 from global_step10" in bench.text()


def test_other_data_is_refused_before_anything_is_queued(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    record = DataRecord(data_facts(bench.card), ((0, "a"),))
    write_cursor(place, {"data": record.document()})
    assert bench.faults() == []
    bench.overrides = ["run.seed=7"]
    assert bench.faults()[0].startswith(
        "refused: data.on_resume: global_step10 was trained on other data: run.seed was 1"
    )
    assert bench.code() == 1
    bench.overrides = ["run.seed=7", "data.on_resume=switch"]
    assert "warning: data.on_resume: the data is switched after global_step10: run.seed" in bench.faults()[0]
    assert bench.code() == 0
    bench.overrides = ["batch.train_samples=100"]
    assert "batch.train_samples was 64, is 100: the trainer compares what it holds" in bench.faults()[0]
    assert bench.code() == 0


def write_cursor(place: Path, cursor: dict[str, Any]) -> None:
    path = place / "cursor.json"
    path.write_text(json.dumps(cursor))
    manifest = json.loads((place / "manifest.json").read_text())
    kept = [entry for entry in manifest["files"] if entry["path"] != "cursor.json"]
    entry = {"path": "cursor.json", "bytes": path.stat().st_size, "digest": file_digest(path)}
    (place / "manifest.json").write_text(json.dumps({**manifest, "files": [*kept, entry]}))


def test_a_newer_format_is_not_trained_over(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    assert "global_step20 is newer than global_step10 and not for this run to judge" in bench.faults()[0]
    assert bench.code() == 1
    (checkpoints(bench) / "latest").write_text("global_step10")
    assert bench.code() == 0, "told so, it goes on"


def test_saving_weights_alone_is_warned_of(bench: Bench) -> None:
    bench.overrides = ["checkpoint.save_optimizer=false"]
    assert any(fault.startswith("warning: checkpoint.save_optimizer: ") for fault in bench.faults())
    assert bench.code() == 0


def test_none_whole_is_refused(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    (place / "manifest.json").unlink()
    assert "none is resumable" in bench.faults()[0] and "has no manifest" in bench.faults()[0] and bench.code() == 1
    (place / "manifest.json").write_text("{")
    assert bench.code() == 1


def test_expected_but_absent_checkpoints_are_refused(bench: Bench) -> None:
    bench.overrides = ["run.expect_resume=true"]
    assert "run.expect_resume: " in bench.faults()[0] and bench.code() == 1
    bench.overrides = []
    checkpoints(bench).mkdir(parents=True)
    (checkpoints(bench) / "latest").write_text(checkpoint_name(3))
    assert "latest is there, but no checkpoint" in bench.faults()[0] and bench.code() == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.hidden_size", 64), ("precision.dtype", "fp32"), ("tokenizer.padded_vocabulary_size", 256)],
)
def test_a_checkpoint_of_another_model_names_the_key(bench: Bench, key: str, value: object) -> None:
    write_checkpoint(checkpoints(bench), 10, {**MODEL, key: value})
    assert bench.faults()[0].startswith(f"refused: {key}: ") and f"set {key} = {value!r}" in bench.faults()[0]
    assert bench.code() == 2


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["model.sequence_length=1500"], 2, "data/corpus has 1,500 tokens, one sample takes 1,501"),
        (["model.sequence_length=1490"], 0, "949,50,1 leaves training about 1,423 tokens of "),
        (["model.sequence_length=100", "evaluation.iterations=1"], 0, "949,50,1 leaves validation about 75 tokens of "),
    ],
)
def test_data_that_hold_less_than_one_sample(bench: Bench, overrides: list[str], code: int, words: str) -> None:
    bench.overrides = overrides
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_training_with_nothing_left_is_a_warning(bench: Bench) -> None:
    write_checkpoint(checkpoints(bench), 64, MODEL)
    assert bench.faults()[0].startswith("warning: batch.train_samples: global_step64 has consumed 64 samples of 64: ")
    assert bench.code() == 0


def test_several_faults_are_told_at_once(bench: Bench) -> None:
    write_dataset(bench.folder / "data/corpus", (3,))
    cut(bench.folder / "data/corpus.bin")
    set_switch(bench)
    bench.changes = {"jobs": (bench.job("7"),)}
    assert len(bench.faults()) == 3


def test_a_last_checkpoint_without_a_word_of_the_card(bench: Bench) -> None:
    """The trainer leaves in time by itself, and the launch says when; where there is no room for that, it says so."""
    unsaid = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]
    bench.overrides = unsaid
    assert bench.faults() == [] and "last save: the trainer leaves after 7.5 min, 2 min 30 s before" in bench.text()
    bench.changes = {"history": RunHistory(step=0.5, save=60.0)}
    assert bench.faults() == [] and "after 7.99 min" in bench.text() and "a save 1 min (measured)" in bench.text()
    bench.changes = {"history": RunHistory(step=0.5, save=400.0)}
    assert bench.faults()[0].startswith(
        "warning: run.exit_duration_minutes: cannot be derived, so each attempt ends without a last checkpoint: too "
    )
    bench.overrides = []
    assert "last save: " not in bench.text()  # what the card says goes on as before
