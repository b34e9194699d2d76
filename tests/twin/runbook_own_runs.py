"""Faults that befall a run of their own."""

from __future__ import annotations

import json
import time

from tests.excluding import exclude
from tests.twin.runbook_scene import (
    Scene,
    cure,
    mail_scenario,
    nodes_of,
    saved_now,
    scenario,
    set_node,
    submit,
)
from tr11ops.detect.registry import page_of
from tr11ops.twin.faults import inject
from tr11ops.watchdog.verdict import TRAINING
from trainer.contract.attempt import EndMarker
from trainer.contract.files import write_json


@scenario(
    "queued-too-long", "nodes-short", alone=True,
    card=("slurm.nodes=5", "parallel.pipeline=1", "batch.global_batch_size=20", "watch.longest_queue_minutes=0.01"),
)  # fmt: skip
def queued_too_long(scene: Scene) -> None:
    """Five of six nodes are needed: one is drained by the site, the run itself has excluded
    another.
    """
    ours, theirs, *_ = nodes_of(scene)
    other = submit(
        scene,
        "-N2",
        "--exclusive",
        "--job-name=other",
        "--wrap=sleep 600",
        f"--exclude={theirs}",
        ours=False,
    )
    scene.until(
        lambda: (job := scene.slurm.job(other)) is not None and bool(job.nodes),
        "the other job's nodes",
    )
    scene.launch("--array", "1-1")
    # what a person just did is left alone
    assert exclude(scene.directory, ours, why="a doubt", owner="tr11", days=14)
    scene.shell(f"tr11 nodes exclude {ours} --yes --reason 'a doubt'")  # in the queued job, too
    set_node(scene, theirs, "DRAIN")
    try:
        scene.slurm.cancel(other)
        scene.treat("queued-too-long", "nodes-short", NODE=ours)
        assert ours in scene.running().nodes
    finally:
        set_node(scene, theirs, "RESUME", (0, 1))


@scenario("zombie", "node-lost", card=("slurm.spare_nodes=1",), alone=True)
def without_its_host(scene: Scene) -> None:
    """A job that survives its nodes, and whose first node dies: first the scheduler hears nothing
    of it, then it is down.
    """
    scene.directory.root.mkdir()
    number = submit(scene, "--no-kill", "-N3", "--wrap=sleep 600")
    scene.until(lambda: any(job.nodes for job in scene.jobs()), "the job's nodes")
    nodes = list(scene.running().nodes)
    write_json(
        scene.paths.attempt(number) / "attempt.json",
        {"job_id": number, "start": time.time(), "nodes": nodes},
    )
    inject(scene.twin, "node-dead", node=nodes[0])
    try:
        set_node(scene, nodes[0], "NORESP")  # the scheduler would ask it within half a minute,
        scene.until(lambda: "node-lost" in scene.findings(), "node-lost")
        set_node(scene, nodes[0], "DOWN")  # and give it up when its time-out is over
        assert cure(page_of("node-lost")) == cure(page_of("zombie"))
        scene.treat("zombie")
        assert (
            number not in {job.raw_id for job in scene.jobs()} and "zombie" not in scene.findings()
        )
        for job in scene.jobs():  # the mail has the run launched again, as nothing else was queued
            scene.slurm.cancel(job.array_id or job.raw_id)
    finally:
        scene.heal()
        set_node(scene, nodes[0], "RESUME", (0, 1))
    scene.until(lambda: "node-lost" not in scene.findings(), "the node, which is well again")


@scenario("no-spare", card=("slurm.spare_nodes=1",), alone=True)
def no_spare(scene: Scene) -> None:
    """A node of three is lost, of which two train: the run goes on with the spare, and has none left."""
    job = scene.train()
    lost = job.nodes[-1]
    set_node(scene, lost, "DOWN")
    set_node(scene, lost, "DRAIN")  # else its next word to Slurm would bring it back
    try:
        scene.treat("no-spare")
        assert len(scene.train().nodes) == 3 and lost not in scene.running().nodes
    finally:
        set_node(scene, lost, "RESUME", (0, 1))


@scenario("switch-unseen", alone=True)
def switch_unseen(scene: Scene) -> None:
    """The file system of the switch goes away on this machine, and the page stops the run all the
    same.
    """
    far = scene.folder / "far"
    far.mkdir()
    scene.changes = (f"run.kill_switch={far / 'switch'}",)
    scene.write_card()
    scene.launch("--array", "1-3")
    job = scene.train()
    inject(scene.twin, "unmounted", path=str(far))
    scene.until(lambda: "switch-unseen" in scene.findings(), "the finding")
    for command in (
        "tr11 kill --yes",
        "tr11 resume --yes",
        "tr11 launch --after $(squeue -h -o %A | head -1)",
    ):
        scene.shell(command, expect=(3,))
    assert list(far.iterdir()) == [] and json.loads(scene.status("--json"))["verdict"] in TRAINING
    commands = (
        scene.page("switch-unseen").replace("JOB", job.raw_id).replace("REASON", "as the page says")
    )
    scene.shell(commands.replace("RUN", str(scene.paths.root)))
    scene.until(
        lambda: scene.jobs() and not any(one.state.is_active for one in scene.jobs()),
        "the end of the task",
    )
    marker = EndMarker.read(scene.paths.end_marker(job.raw_id))
    assert (
        marker is not None
        and marker.reason == "signal"
        and marker.checkpoint_step == marker.iteration
    )
    scene.until(lambda: all(one.reason.startswith("JobHeld") for one in scene.jobs()), "the hold")
    scene.heal()
    scene.until(lambda: "switch-unseen" not in scene.findings(), "the sight of the switch")
    scene.shell("tr11 kill --yes")
    assert (far / "switch").exists()
    scene.shell("tr11 resume --yes")
    scene.train()


@scenario("hung", alone=True)
def stopped_worker(scene: Scene) -> None:
    """One rank is stopped, and the others wait for it: nothing can be saved. Its node is named, and
    by mail left out.
    """
    job = scene.train()
    node = job.nodes[-1]
    inject(scene.twin, "worker-stop", node=node)
    scene.until_still()
    scene.age(900)
    scene.shell("tr11 pulse", (0, 1, 3))
    (told,) = [
        one
        for one in json.loads(scene.status("--json"))["findings"]
        if one["severity"] == "critical"
    ]
    assert told["detector"] == "hung" and node in told["title"], told
    scene.treat("hung")
    assert node not in scene.train().nodes or not scene.by_mail


@mail_scenario("unfinished-end")
def bad_sample(scene: Scene) -> None:
    """A rank dies of the data of one iteration on every node: the mail has them passed over, from a
    checkpoint.
    """
    scene.launch("--array", "1-9")
    dies_of_its_data(scene, saved_now(scene))


@mail_scenario("unfinished-end")
def bad_sample_before_the_first_save(scene: Scene) -> None:
    """The same where there is nothing to go back to: it begins again, without these data."""
    scene.launch("--array", "1-9")
    scene.train()
    dies_of_its_data(scene, 0)


def dies_of_its_data(scene: Scene, saved: int) -> None:
    inject(scene.twin, "bad-sample", path=str(scene.paths.root))
    scene.until(lambda: all(job.reason.startswith("JobHeld") for job in scene.jobs()), "the hold")
    scene.until(lambda: "unfinished-end" in scene.findings(above="info"), "the finding")
    ended = scene.steps()[-1]["iteration"]
    scene.treat("unfinished-end")
    scene.train()
    scene.until(lambda: scene.steps()[-1]["iteration"] > ended + 5, "steps beyond the bad data")
    assert saved <= ended and ended + 1 not in {step["iteration"] for step in scene.steps()}


@mail_scenario(
    "unfinished-end",
    card=("resilience.exclusion_cap_percent=10", "slurm.nodes=5", "parallel.pipeline=1", "batch.global_batch_size=20"),
)  # fmt: skip
def no_room_for_a_bad_node(scene: Scene) -> None:
    """One of six nodes is excluded, which is all that may be, and five are needed: another one is bad,
    and all that waits is held for it.
    """
    job = scene.train()
    (free,) = set(nodes_of(scene)) - set(job.nodes)
    assert exclude(scene.directory, free, why="a doubt", owner="tr11", days=14)
    bad = job.nodes[-1]
    inject(scene.twin, "black-hole", node=bad)
    scene.until(lambda: all(job.reason.startswith("JobHeld") for job in scene.jobs()), "the hold")
    scene.until(lambda: "unfinished-end" in scene.findings(above="info"), "the finding")
    scene.treat("unfinished-end")
    assert bad not in scene.train().nodes


@scenario("limit-changed", alone=True)
def limit_changed(scene: Scene) -> None:
    """Someone leaves the running job little of its time: it is told, and the attempt leaves with a
    save.

    It leaves as soon as it has heard of it, maybe before anyone types: then the command says that
    all is saved.
    """

    def lower() -> None:
        """The limit of the task that trains now."""
        scene.train()
        scene.heal()
        inject(scene.twin, "job-limit-lowered")

    scene.launch("--array", "1-9")
    job = scene.train()
    lower()
    scene.treat("limit-changed", expect=(0, 1), renew=lower)
    marker = EndMarker.read(scene.paths.end_marker(job.raw_id))
    assert marker is not None and marker.checkpoint_step == marker.iteration


@scenario("directory-unseen", alone=True)
def directory_unseen(scene: Scene) -> None:
    """The run directory goes away under a running attempt; no task is used up, and the page lets it
    go on again.
    """
    scene.launch("--array", "1-5")
    scene.train()
    inject(scene.twin, "unmounted", path=str(scene.paths.root))
    scene.until(lambda: "directory-unseen" in scene.findings(), "the finding")
    scene.until(
        lambda: not any(one.state.is_active for one in scene.jobs()), "the end of the attempt"
    )
    for command in ("tr11 resume --yes", "tr11 launch --array 1-3", "tr11 launch --replace --yes"):
        scene.shell(command, expect=(3,))
    scene.heal()
    scene.until(lambda: "directory-unseen" not in scene.findings(), "the sight of the directory")
    scene.shell(scene.page("directory-unseen"), expect=(0, 1))
    assert scene.train().task_id == 2


@scenario("down", "unfinished-end", card=("resilience.launches_per_attempt=1",), alone=True)
def down(scene: Scene) -> None:
    """A worker of the last task of the queue is killed; the next task must train, and end in order."""
    scene.launch("--array", "1-1")
    scene.train()
    inject(scene.twin, "worker-crash")
    scene.until(lambda: not scene.jobs(), "the end of the job")
    scene.until(lambda: {"down", "unfinished-end"} <= scene.findings(), "both findings")
    assert cure(page_of("unfinished-end")) == cure(page_of("down"))
    scene.treat("down")
    scene.train()
    scene.shell("tr11 kill --wait --yes")
    assert "unfinished-end" not in scene.findings()


LOOKS_AT_ONE = 30  # one in twenty named an innocent node once
SLOW = ("parallel.pipeline=1", "rehearsal.step_seconds=10", "rehearsal.log_scale=30")


@scenario("slow", alone=True, card=SLOW)
def slow(scene: Scene) -> None:
    """One node makes every step longer, and the site repairs it after the restart."""
    inject(scene.twin, "slow-steps", node=scene.train(steps=30).nodes[-1])
    scene.treat("slow")


@scenario("slow-node", alone=True, card=SLOW)
def slow_node(scene: Scene) -> None:
    """A node's workers are stopped for four fifths of the time: its ranks' own compute times name
    it, and not the node whose rank waits for it.
    """
    last = scene.train(steps=30).nodes[-1]
    scene.until(lambda: "slow-node" not in scene.findings(), "ten steps without the slow node")
    inject(scene.twin, "slow-node", node=last)
    scene.until(lambda: scene.subjects("slow-node") == [last], f"{last} alone as the slow node")
    named = {node for _ in range(LOOKS_AT_ONE) for node in scene.subjects("slow-node")}
    assert named <= {last}, "the node whose rank waits is innocent in every look"
    scene.treat("slow-node", NODE=last)
    assert last not in scene.train().nodes


@scenario(
    "start-failed",
    alone=True,
    card=("slurm.setup=['source ../setup.sh']", "slurm.setup_minutes=0.03"),
)
def start_failed(scene: Scene) -> None:
    """The script that the set-up sources fails, hangs, spoils Python: one task sees it, the next
    ones wait.
    """
    script = scene.folder / "setup.sh"
    script.write_text("echo fine\n")
    faults = (
        ("setup-fails", "slurm.setup[1] (source ../setup.sh) ended with exit status 1"),
        ("setup-hangs", "slurm.setup[1] (source ../setup.sh) did not end within 0.03 min"),
        ("setup-breaks-python", "slurm.setup is broken: after it the agent ended with"),
    )
    for number, (kind, words) in enumerate(faults, start=1):
        scene.heal()
        inject(scene.twin, kind, path=str(script))
        if number == 1:
            scene.launch("--array", "1-9")
        else:
            scene.shell("tr11 resume --yes")
        scene.until(lambda words=words: words in json.loads(scene.status("--json"))["why"], kind)  # type: ignore[misc]
        assert {"start-failed", "held"} <= scene.findings()
        assert len(list(scene.paths.attempts.iterdir())) == number, kind
    said = scene.shell("tr11 pulse --act", (0, 1))
    assert "resubmit" not in said and not any(job.state.is_active for job in scene.jobs())
    scene.heal()
    scene.treat("start-failed")
    scene.train()
