"""Excluding, including and checking nodes on a real Slurm, and a bad node that ends its step at
once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import is_older_slurm
from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import enter, recorded_comment
from tests.waiting import until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.health.base import EXIT_BAD_NODE
from tr11ops.nodes.queue_exclusions import RunQueue, known_names, sync_queue_exclusions
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.twin import Twin
from trainer.contract.paths import RunPaths

ROOT = Path(__file__).parents[2]
TR11 = Path(sys.executable).parent / "tr11"
CHANGES_NOTHING = (24, 11)  # of a job whose list has a name that is no node any more
CAP = ("--set", "resilience.exclusion_cap_percent=60")


@dataclass
class Place:
    """A folder with a card of two nodes, in which `tr11 nodes` reaches the twin."""

    folder: Path
    twin: Twin
    slurm: SlurmScheduler
    capture: pytest.CaptureFixture[str]

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(
            RunPaths(self.folder / "run", "small", "main"), self.folder / "run" / "kill-switch"
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.twin.plan.gpu_node_names

    def type_in(self, *words: str) -> tuple[int, str, str]:
        self.capture.readouterr()
        code = execute(["nodes", *words, "--run", "small.toml", "--scheduler", "slurm"])
        out, err = self.capture.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    def submit(
        self, script: str, name: str, nodes: int, *, ours: bool = False, array: str | None = None
    ) -> str:
        comment = recorded_comment(self.directory) if ours else ""
        return self.slurm.submit(
            BatchRequest(
                f"#!/bin/bash\n{script}\n", name, nodes, 900, str(self.folder / f"{name}-%j.out"), self.folder,
                array=array, gpus_per_node=8, comment=comment, partition=self.twin.plan.partition,
            )
        )  # fmt: skip

    def block(self, nodes: int) -> Job:
        """A job of ours, but not of the run, that holds nodes."""
        number = self.submit("sleep 900", "block", nodes)
        until(lambda: (job := self.slurm.job(number)) is not None and job.state.is_active)
        job = self.slurm.job(number)
        assert job is not None
        return job

    def control(self, *words: str) -> str:
        """Run scontrol; what an administrator would type."""
        done = subprocess.run(
            ["scontrol", *words],
            capture_output=True,
            text=True,
            env={**os.environ, **self.twin.environment},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def resume(self, *names: str) -> None:
        """Give the nodes back. One that came back by itself is refused, and is well: a slurmd that
        registers again ends a DOWN (ReturnToService=2).
        """
        for name in names:
            subprocess.run(
                ["scontrol", "update", f"NodeName={name}", "State=RESUME"],
                capture_output=True,
                env={**os.environ, **self.twin.environment},
                timeout=300,
                check=False,
            )
        until(
            lambda: all(node.is_usable for node in self.slurm.nodes() if node.name in names),
            f"{', '.join(names)} whole",
        )


@pytest.fixture
def place(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Place:  # fmt: skip
    enter(twin, tmp_path, monkeypatch)
    write_card(tmp_path)
    (tmp_path / "run").mkdir()
    return Place(tmp_path, twin, slurm, capsys)


def script(folder: Path, body: str) -> tuple[str, str]:
    """A check script of the site's, as an override of the card."""
    path = folder / "own.sh"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return "--set", f'resilience.check_scripts=["{path}"]'


def test_a_node_that_is_merely_down_is_said_and_reported(place: Place) -> None:
    """It is not excluded: state, reason, since when and by whom are the scheduler's, and what to
    type is shown.
    """
    dead, drained, bad = place.nodes[:3]
    begun = time.time()
    assert place.type_in("list", "--report", "-")[0] == 1  # nothing to report
    place.control("update", f"NodeName={dead}", "State=DOWN", "Reason=PSU 2 has failed")
    place.control("update", f"NodeName={drained}", "State=DRAIN", "Reason=fan 3, by hand")
    try:
        for words in (("--excluded",), (dead,), (dead, "--excluded")):
            code, out, err = place.type_in("list", *words)
            said = " ".join(out.split())
            assert code == 0 and f"{dead}: not excluded by this run; down since 20" in said, (
                words,
                out,
                err,
            )
            assert (
                f", by {user_name()}: PSU 2 has failed" in said
                and max(map(len, out.splitlines())) <= 80
            )
            assert f"\n  tr11 nodes list {dead} --report -\n" in out or words == ("--excluded",)
            assert "--report -" in said and "--reason REASON" in said
            assert ("fan 3" in said) is (words == ("--excluded",))
        [row] = json.loads(place.type_in("list", dead, "--json")[1])["nodes"]
        assert (
            row["site_reason_by"] == user_name()
            and begun - 2 <= row["site_reason_since"] <= time.time() + 2
        )
        note = place.type_in("list", "--excluded", "--report", "-")[1]
        assert (
            f"Subject: Out of service: {dead}\n" in note
            and "the training small has not excluded it" in " ".join(note.split())
        )
        assert (
            f"\n{dead}: not excluded by this run; down since 20" in note
            and "PSU 2 has failed" in note
            and "fan 3" not in note
        )
        assert "fan 3, by hand" in place.type_in("list", drained, "--report", "-")[1], (
            "where it is named"
        )
        assert place.type_in("exclude", bad, dead, "--reason", "Xid 79", "--yes", *CAP)[0] == 0
        both = place.type_in("list", "--excluded", "--report", "-")[1]
        assert (
            f"{dead}: Xid 79 (excluded since" in both
            and "the scheduler says: down since 20" in both
            and f"{bad}: Xid" in both
        )
    finally:
        place.resume(dead, drained)
        until(lambda: all(node.is_usable for node in place.slurm.nodes()), "whole nodes")


def test_an_exclusion_reaches_queued_jobs_and_touches_no_drain(place: Place) -> None:
    first, second, third = place.nodes[:3]
    place.block(6)
    array = place.submit("true", "small", 2, ours=True, array="1-5%1")
    later = place.submit("true", "later", 2)
    drained = place.nodes[5]
    place.control("update", f"NodeName={drained}", "State=DRAIN", "Reason=fan 3, by hand")
    try:
        before = {
            job.raw_id: place.control("-o", "show", "job", job.raw_id) for job in place.slurm.jobs()
        }
        code, out, err = place.type_in(
            "exclude", f"{first},{second}", "--reason", "Xid 79", "--yes", "--json", *CAP
        )
        assert code == 0, err
        [queued] = [job for job in place.slurm.jobs() if job.array_id == array]
        assert queued.excluded == (first, second) and queued.pending_tasks == (1, 2, 3, 4, 5)
        assert json.loads(out)["queue"][0]["after"] == [first, second]
        after = place.control("-o", "show", "job", queued.raw_id)
        for word in ("Priority=", "SubmitTime=", "EligibleTime="):
            value = before[queued.raw_id].split(word)[1].split()[0]
            assert f"{word}{value} " in after  # it keeps its place
        assert "ExcNodeList=(null)" in place.control("-o", "show", "job", later)

        assert place.type_in("include", first, "--force", "--yes")[0] == 0
        [queued] = [job for job in place.slurm.jobs() if job.array_id == array]
        assert queued.excluded == (second,)
        assert place.type_in("exclude", drained, "--yes", *CAP)[0] == 0
        included = place.type_in("include", drained, "--yes")  # it passes, checked beside our job
        assert included[0] == 0 and "by the site's hand, and stays so" in included[2]
        shown = place.control("show", "node", drained)
        assert "DRAIN" in shown and "Reason=fan 3, by hand" in shown
        listed = json.loads(place.type_in("list", drained, "--json")[1])["nodes"][0]
        assert listed["site_reason"].startswith("fan 3, by hand") and listed["exclusion"] is None
    finally:
        place.resume(drained)
    ten = ("--set", "resilience.exclusion_cap_percent=10")
    # one is the cap of six nodes, and one is excluded
    assert place.type_in("exclude", third, "--yes", *ten)[0] == 1


def test_a_node_that_the_site_removes_stops_no_launch(place: Place) -> None:
    """Slurm refuses a whole list for one unknown name, and keeps it in the list of what was queued
    before.
    """
    first, second, gone = place.nodes[0], place.nodes[1], place.nodes[5]
    usable = {node.name for node in place.slurm.nodes() if node.is_usable}
    # what is queued stays so
    place.control("update", f"PartitionName={place.twin.plan.partition}", "State=DOWN")
    array = place.submit("true", "small", 2, ours=True, array="1-5%1")
    assert place.type_in("exclude", f"{first},{gone}", "--yes", *CAP)[0] == 0
    try:
        inject(place.twin, "node-removed", node=gone)
        # the others, and the one without GPUs
        until(lambda: len(place.slurm.nodes()) == len(place.nodes))
        refused = place.slurm.test(
            BatchRequest("#!/bin/bash\n", "x", 1, 60, "/dev/null", place.folder, exclude=(gone,))
        )
        assert not refused.accepted and "Invalid node name" in refused.message
        code, _, said = place.type_in("exclude", second, "--reason", "fan", "--yes", *CAP)
        if not is_older_slurm(CHANGES_NOTHING):
            assert code == 1 and "scancel --state=PENDING" in said
            return
        assert code == 0
        [queued] = [job for job in place.slurm.jobs() if job.array_id == array]
        assert queued.excluded == (first, second)
        waiting = PendingJobs(place.slurm, place.directory, array, print)
        done = sync_queue_exclusions(
            place.directory,
            RunQueue(
                place.slurm,
                waiting.look,
                lambda: known_names(place.slurm),
                kept=(),
                retry=waiting.retry,
            ),
        )
        assert (done.left_out, done.failures, done.changes) == ((gone,), (), ())
        assert {entry.node for entry in read_version(place.directory.exclusions).exclusions} == {
            first,
            second,
            gone,
        }
        place.slurm.cancel(array)
        place.capture.readouterr()
        execute(["launch", "--dry-run", "--json", "--run", "small.toml", "--scheduler", "slurm"])
        checks = json.loads(place.capture.readouterr().out)["checks"]
        assert not [one for one in checks if "Invalid node name" in one["text"]]
        [told] = [one for one in checks if "left out" in one["text"]]
        assert (
            told["level"] == "warning" and gone in told["text"] and f"{gone} --force" in told["fix"]
        )
        assert place.type_in("include", gone, "--force", "--yes")[0] == 0
    finally:
        heal(place.twin)
        place.control("update", f"PartitionName={place.twin.plan.partition}", "State=UP")
        # the controller was restarted: each node is unknown until it has registered, the one that
        # was gone first
        until(lambda: {node.name for node in place.slurm.nodes() if node.is_usable} >= usable)


def test_the_health_job_runs_on_the_named_node_and_tells(place: Place) -> None:
    good, bad = place.nodes[1], place.nodes[3]
    own = script(
        place.folder,
        f'echo "$SLURMD_NODENAME" >> {place.folder}/seen; [ "$SLURMD_NODENAME" != {bad} ] || {{ echo "fan 3"; exit 1; }}',
    )
    code, out, _ = place.type_in("check", good, bad, "--json", *own)
    found = {row["node"]: (row["result"], row["why"]) for row in json.loads(out)["nodes"]}
    assert found[bad] == ("bad", "script:own.sh: fan 3") and found[good][0] in {"fine", "warning"}
    assert code == 1
    assert sorted((place.folder / "seen").read_text().split()) == sorted([good, bad])
    assert place.type_in("exclude", bad, "--yes")[0] == 0
    refused = place.type_in("include", bad, "--yes", *own)
    assert refused[0] == 1 and "fan 3" in refused[2]
    # repaired: the card has no such script any more
    assert place.type_in("include", bad, "--yes")[0] == 0
    assert read_version(place.directory.exclusions).exclusions == ()
    until(
        lambda: all(job.state.is_final for job in place.slurm.jobs() if job.name == "tr11-health")
    )


def test_a_silent_node_is_refused_before_anything_is_previewed(place: Place) -> None:
    silent = place.nodes[4]
    assert place.type_in("exclude", silent, "--yes", *CAP)[0] == 0
    inject(place.twin, "node-dead", node=silent)
    try:
        until(
            lambda: not next(node for node in place.slurm.nodes() if node.name == silent).is_usable
        )
        code, _, said = place.type_in("include", silent, "--yes")
        assert (
            code == 1
            and f"include {silent}" not in said
            and "the scheduler gives it to no one" in said
        ), said
        assert [entry.node for entry in read_version(place.directory.exclusions).exclusions] == [
            silent
        ]
    finally:
        heal(place.twin)
        until(lambda: next(node for node in place.slurm.nodes() if node.name == silent).is_usable)


def test_busy_nodes_are_checked_and_drained_ones_are_unknown(place: Place) -> None:
    job = place.block(2)
    idle = next(name for name in place.nodes if name not in job.nodes)
    drained = next(name for name in reversed(place.nodes) if name not in (*job.nodes, idle))
    place.control("update", f"NodeName={drained}", "State=DRAIN", "Reason=by hand")
    try:
        own = script(place.folder, f'echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> {place.folder}/seen')
        code, out, _ = place.type_in("check", *job.nodes, idle, drained, "--json", *own)
    finally:
        place.resume(drained)
    found = {row["node"]: row for row in json.loads(out)["nodes"]}
    assert code == 3 and "drain" in found[drained]["why"] and "by hand" in found[drained]["why"]
    assert all(found[name]["result"] in {"fine", "warning"} for name in (*job.nodes, idle)), found
    seen = dict(reversed(line.split()) for line in (place.folder / "seen").read_text().splitlines())
    assert {name: seen[name] == job.raw_id for name in (*job.nodes, idle)} == {
        **dict.fromkeys(job.nodes, True), idle: False,
    }  # fmt: skip
    current = place.slurm.job(job.raw_id)
    assert current is not None and current.state.is_active  # it was not disturbed


def test_the_search_names_the_bad_one_of_four(place: Place) -> None:
    """Through real jobs: what fails on one node is told apart from its partners, and the command is
    printed.
    """
    four, bad = place.nodes[:4], place.nodes[2]
    failing = f'test "$SLURMD_NODENAME" != {bad}'
    code, out, err = place.type_in("search", *four, "--command", failing, "--json")
    assert code == 1, out + err
    document = json.loads(out)
    assert (document["bad"], document["kind"], document["nodes"]) == ([bad], "node", list(four))
    assert all(test["outcome"] != "unknown" for one in document["rounds"] for test in one)


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_search_takes_spares_and_leaves_what_trains(place: Place, is_taken: bool) -> None:
    """Short steps inside the job that holds them. Once a launch needs a node, its step is gone and
    says nothing.
    """
    number = place.submit("sleep 900", "small", 6, ours=True)
    until(lambda: (found := place.slurm.job(number)) is not None and found.state.is_active)
    job = place.slurm.job(number)
    assert job is not None
    training, spares = job.nodes[:2], job.nodes[2:]
    attempt, seen = place.directory.paths.attempt(job.raw_id), place.folder / "seen"
    LaunchRecord(1, training, 1.0).write(attempt)
    command = f'echo $SLURMD_NODENAME >> {seen}; test "$SLURMD_NODENAME" != {spares[1]}'
    if is_taken:
        command = f"echo $SLURMD_NODENAME >> {seen}; exec sleep 700"

        def take() -> None:
            until(seen.exists)
            LaunchRecord(2, (*training, *spares), 2.0).write(attempt)

        threading.Thread(target=take, daemon=True).start()
    code, out, err = place.type_in("search", "--command", command, "--json")
    document = json.loads(out)
    assert set(document["nodes"]) == set(spares) and set(seen.read_text().split()) <= set(spares), (
        err
    )
    assert (code, document["bad"]) == ((3, []) if is_taken else (1, [spares[1]])), out
    if is_taken:
        assert all(f"job {job.raw_id} trains on" in test["why"] for test in document["rounds"][0])
        shown = ["squeue", "--steps", "--noheader", f"--jobs={job.raw_id}", "--format=%j"]
        until(
            lambda: "sh" not in subprocess.run(shown, capture_output=True, text=True).stdout.split()
        )


def test_nodes_are_measured_in_one_job_and_talk(place: Place) -> None:
    """All nodes of a twin are one machine: that every node answers is shown here, and not how fast
    it is.
    """
    three = place.nodes[:3]
    code, out, _ = place.type_in("bench", *three, "--dry-run")
    assert (
        code == 0
        and "#SBATCH --exclusive" in out
        and f"#SBATCH --nodelist={','.join(three)}" in out
    )
    assert not list(place.folder.rglob("*health-*"))
    code, out, err = place.type_in(
        "bench", *three, "--json", "--repeats", "1", "--sample", "0.001", "--timeout", "20m"
    )  # fmt: skip
    document = json.loads(out)
    assert [(entry["node"], entry["why"]) for entry in document["nodes"]] == [
        (name, "") for name in three
    ], err
    for entry in document["nodes"]:
        assert set(entry["measurements"]) == {"cpu-fp32", "cpu-bf16", "cpu-copy", "all-reduce"}
        assert len(entry["measurements"]["all-reduce"]["samples"]) == 2, "with both others"
        assert entry["measurements"]["all-reduce"]["usual"] > 0
    expected = 0
    if document["slow"]:
        expected = 1
    elif any(
        entry["result"] == "unknown" for entry in document["nodes"]
    ):  # one sample of each, on a machine that does much besides
        expected = 3
    assert code == expected


def test_a_slow_node_and_a_silent_one_are_told_apart(place: Place) -> None:
    *four, slow, silent = place.nodes[:6]
    command = f"""case $SLURMD_NODENAME in
        {slow}) echo tokens 80 /s;;
        {silent}) echo the fan is off; exit 3;;
        *) echo tokens 100 /s;;
    esac"""
    code, out, _ = place.type_in(
        "bench", *four, slow, silent, "--command", command, "--repeats", "2", "--timeout", "20m"
    )
    assert code == 1, out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[1:]}
    assert [rows[name] for name in (*four, slow, silent)] == [
        *[["100%", "fine"]] * 4, ["80%!", "SLOW"], ["-", "no", "answer"],
    ]  # fmt: skip
    assert f"{silent}: exit status 3: the fan is off" in out
    assert f'to exclude: tr11 nodes exclude {slow} --reason "nodes bench, tokens 80%"' in out
    assert not place.directory.exists or not read_version(place.directory.exclusions).exclusions


def test_two_people_at_once_lose_nothing(place: Place) -> None:
    place.block(6)
    array = place.submit("true", "small", 2, ours=True, array="1-3%1")
    mine = place.nodes[:3]
    people = [
        subprocess.Popen(
            [TR11, "nodes", "exclude", name, "--yes", "--run", "small.toml", "--scheduler", "slurm", *CAP],
            cwd=place.folder, env={**os.environ, **place.twin.environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for name in mine
    ]  # fmt: skip
    for person in people:
        shown, _ = person.communicate(timeout=300)
        assert person.returncode == 0, shown
    assert [entry.node for entry in read_version(place.directory.exclusions).exclusions] == list(
        mine
    )
    [queued] = [job for job in place.slurm.jobs() if job.array_id == array]
    assert queued.excluded == mine


AGENT = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tr11ops.agent import node
node.NodeTask.command = property(lambda self: [sys.executable, "-u", "-c", "import time; time.sleep(600)"])
folder = Path({folder!r})
sys.exit(node.run(node.NodeTask(
    folder / "attempt", folder / "card.json", os.environ["SLURM_JOB_ID"], 1,
    node.NodePlaces(3, int(os.environ["SLURM_NODEID"]), 1, "127.0.0.1", 1), float(os.environ["ASKED"]))))
"""


def test_a_bad_node_ends_the_step_before_the_others_wait_for_it(place: Place) -> None:
    script(place.folder, '[ "$SLURM_NODEID" != 1 ] || { echo "GPU 3 is gone"; exit 1; }')
    card = {
        "slurm": {"gpus_per_node": 0},
        "resilience": {"check_scripts": [str(place.folder / "own.sh")]},
    }
    (place.folder / "card.json").write_text(json.dumps(card))
    (place.folder / "agent.py").write_text(AGENT.format(root=str(ROOT), folder=str(place.folder)))
    number = place.submit(
        f"export ASKED=$(date +%s.%N)\nsrun --kill-on-bad-exit=1 --wait=60 --ntasks-per-node=1 {sys.executable} agent.py\n"
        "echo status $?", "agents", 3,
    )  # fmt: skip
    out = place.folder / f"agents-{number}.out"
    until(lambda: out.exists() and "status " in out.read_text())
    text = out.read_text()
    assert "health check script:own.sh: bad: GPU 3 is gone" in text
    assert f"task 1: Exited with exit code {EXIT_BAD_NODE}" in text and "status 0" not in text
    records = [
        json.loads(path.read_text()) for path in (place.folder / "attempt" / "nodes").glob("*.json")
    ]
    [bad] = [one for one in records if one["exit_status"] == EXIT_BAD_NODE]
    assert bad["node_rank"] == 1 and [
        one["why"] for one in bad["checks"] if one["result"] == "bad"
    ] == ["GPU 3 is gone"]
    assert "clock" in {one["name"] for one in bad["checks"]}
    assert not (
        place.folder / "attempt" / "stop-request.json"
    ).exists()  # the next launch must not see one
