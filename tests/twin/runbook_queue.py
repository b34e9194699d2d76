"""Faults of the queue, and of jobs that do not train."""

from __future__ import annotations

import json
import time

from msgspec.structs import asdict

from tests.twin.runbook_scenarios import DAY, nodes_of, scenario, submit
from tests.twin.runbook_scene import Scene
from tr11ops.queue.held_jobs import hold
from tr11ops.twin.faults import heal, inject
from trainer.contract.end_marker import EndMarker
from trainer.contract.files import write_json


@scenario("namesake")
def namesake(scene: Scene) -> None:
    scene.train()
    scene.treat("namesake", JOB=submit(scene, "--wrap=sleep 600", ours=False))


@scenario("chain-end")
def chain_end(scene: Scene) -> None:
    job = scene.train()
    scene.shell(f"scancel --state=PENDING {job.array_id}")
    scene.treat("chain-end", JOB=str(job.array_id))


@scenario("dead-chain")
def dead_chain(scene: Scene) -> None:
    scene.train()
    failed = submit(scene, "--wrap=exit 1", ours=False)
    scene.until(
        lambda: (job := scene.slurm.job(failed)) is not None and job.state.is_final, "the failure"
    )
    submit(scene, f"--dependency=afterok:{failed}", "--wrap=true")
    scene.treat("dead-chain")


@scenario("limit-reached")
def limit_reached(scene: Scene) -> None:
    """The site lowers the partition's time limit below what is queued; then the card asks for less."""
    leave_queued(scene)
    inject(scene.twin, "time-limit-lowered")
    heal(scene.twin, kind="partition-down")
    scene.until(lambda: "limit-reached" in scene.findings(), "the limit")
    before = [job.job_id for job in scene.jobs()]
    for dry_run in (
        "--dry-run",
        "",
    ):  # of the same card nothing is launched, so nothing is cancelled
        said = scene.shell(f"tr11 launch --replace --yes {dry_run}", (2,))
        assert (
            "is above the limit of partition" in said
            and [job.job_id for job in scene.jobs()] == before
        )
    scene.write_card("slurm.time_limit=00:05:00", "run.exit_duration_minutes=2")
    scene.treat("limit-reached")


@scenario("reservation-ended")
def reservation_ended(scene: Scene) -> None:
    """The run's reservation is over while its tasks are queued in it; the card names no other."""
    leave_queued(scene)
    nodes = ",".join(nodes_of(scene)[:2])
    scene.shell(
        f"scontrol create reservation ReservationName=ours StartTime=now Duration=60 Nodes={nodes} Users=$(id -un)"
    )
    for job in scene.jobs():
        scene.shell(f"scontrol update JobId={job.array_id} ReservationName=ours")
    inject(scene.twin, "reservation-ended")
    heal(scene.twin, kind="partition-down")
    assert (
        "waits for a person (Reservation ours was deleted"
        in json.loads(scene.status("--json"))["why"]
    )
    scene.treat("reservation-ended")
    scene.train()


@scenario("waits-for-site")
def waits_for_site(scene: Scene) -> None:
    """The partition is closed, then its nodes are in maintenance: the queue stays as it is, and
    goes on by itself.
    """
    leave_queued(scene)
    before = [job.job_id for job in scene.jobs()]
    scene.until(lambda: "PartitionDown" in scene.status(), "the partition that is down")
    inject(scene.twin, "partition-closed")
    scene.until(lambda: "waits-for-site" in scene.findings(), "the closed partition")
    document = json.loads(scene.status("--json"))
    assert (document["verdict"], document["may_sleep"]) == ("queued", False)
    assert "waits for the site" in scene.shell("tr11 launch --repair --yes")
    said = scene.shell("tr11 launch --replace --yes --dry-run", (1,))
    assert "is closed by the site" in said and [job.job_id for job in scene.jobs()] == before
    inject(scene.twin, "maintenance")
    heal(scene.twin, kind="partition-closed")
    scene.treat("waits-for-site", after=lambda: heal(scene.twin, kind="maintenance"))
    scene.train()


def leave_queued(scene: Scene) -> None:
    """The run's tasks are queued, and the partition is down before one of them starts."""
    scene.stop()
    inject(scene.twin, "partition-down")
    scene.launch("--array", "1-3")


@scenario("two-attempts")
def two_attempts(scene: Scene) -> None:
    scene.train()
    scene.treat("two-attempts", JOB=submit(scene, "--wrap=sleep 600"))
    scene.train()


@scenario("suspended")
def suspended(scene: Scene) -> None:
    job = scene.train()
    scene.shell(f"scontrol suspend {job.raw_id}")
    scene.treat("suspended", JOB=job.raw_id)
    scene.train()


@scenario("held")
def held(scene: Scene) -> None:
    """What tr11 held after a fault."""
    scene.train()
    waiting = sorted(
        {job.array_id or job.raw_id for job in scene.jobs() if not job.state.is_active}
    )
    hold(scene.directory, waiting, scene.slurm, "tr11", "a fault that would come again")
    scene.treat("held")


@scenario("damaged-state")
def damaged_state(scene: Scene) -> None:
    """What a full disk or a crash of the file server leaves: half a record of the submission that
    trains.
    """
    scene.train()
    path = sorted(scene.paths.state.glob("submissions/*/submission.json"))[-1]
    inject(scene.twin, "torn-state", path=str(scene.paths.root))
    scene.treat("damaged-state")
    assert list(path.parent.glob("submission.json.damaged-*"))


@scenario("kill-switch-left-on")
def kill_switch_left_on(scene: Scene) -> None:
    scene.train()
    scene.directory.kill_switch.touch()
    scene.until(lambda: not any(job.state.is_active for job in scene.jobs()), "the end of the task")
    scene.touch(scene.directory.kill_switch, 2 * DAY)
    scene.treat("kill-switch-left-on")


# --------------------------------------------------------------------------- jobs that do not train
@scenario("hung")
def hung(scene: Scene) -> None:
    job = scene.train()
    inject(scene.twin, "step-hang", node=job.nodes[-1])
    scene.until_still()
    scene.age(900)
    scene.treat("hung")


@scenario("stalled")
def stalled(scene: Scene) -> None:
    job = scene.train()
    inject(scene.twin, "data-wait", node=job.nodes[-1])
    scene.until_still()
    scene.age(900, heartbeats=False)
    scene.treat("stalled")


@scenario("lingering")
def lingering(scene: Scene) -> None:
    """A worker does not go after the trainer's last word."""
    job = scene.train()
    inject(scene.twin, "step-hang", node=job.nodes[-1])
    scene.until_still()
    scene.age(2000)
    marker = EndMarker("exit-duration", 8, 5, True, "", time.time() - 1900, "n1", job.raw_id, 1)
    write_json(scene.paths.end_marker(job.raw_id), asdict(marker))
    scene.touch(scene.paths.end_marker(job.raw_id), 1900)
    scene.treat("lingering")
