"""Faults that befall the shared run: of what is queued, of copies, of nodes and clocks, and of the training's numbers."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import psutil
from msgspec.structs import asdict, replace

from tests.excluding import exclude
from tests.plugins.faulty_hub import FaultyHub
from tests.twin.runbook_scene import DAY, Scene, nodes_of, saved_now, scenario, submit
from tr11ops.queue.held_jobs import hold
from tr11ops.rundir.exclusions import read_version
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.processes import scan
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import append_line, write_json
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.state_file import read_json


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
    scene.until(lambda: all_stand_still(scene, job.nodes), "the stop of every process of the job")
    scene.treat("suspended", JOB=job.raw_id)
    scene.train()


def all_stand_still(scene: Scene, nodes: Sequence[str]) -> bool:
    """Slurm answers first, and stops the processes of the nodes some seconds later: of a job that
    is resumed before that, those of a node can be stopped for ever.
    """
    return all(
        psutil.Process(task.record.pid).status() == psutil.STATUS_STOPPED
        for contents in scan(scene.twin.folders, nodes).values()
        for task in contents.tasks
    )


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


# ---------------------------------------------------------------------------
# Faults of checkpoints, copies, logs on the hub and file systems.


@scenario("checkpoint-unsound")
def checkpoint_unsound(scene: Scene) -> None:
    newest = saved_now(scene)
    parts = [
        path
        for path in scene.paths.checkpoint(newest).rglob("*")
        if path.is_file() and path.suffix != ".json"
    ]
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    scene.treat("checkpoint-unsound")


@scenario("checkpoint-overdue")
def checkpoint_overdue(scene: Scene) -> None:
    """It trains by one card, and the one on record as its own asks for saves much more often."""
    saved_now(scene)
    path = scene.paths.attempt(scene.train().raw_id) / "card.json"
    card = read_json(path) or {}
    write_json(path, {**card, "checkpoint": {**card["checkpoint"], "interval": 40}})
    scene.treat("checkpoint-overdue")


@scenario("backup-overdue")
def backup_overdue(scene: Scene) -> None:
    step = saved_now(scene)
    archive = archived(scene, step)
    for path in scene.directory.submissions.glob("*/submission.json"):
        write_json(path, {**(read_json(path) or {}), "time": time.time() - 30 * DAY})
    manifest = scene.paths.checkpoint(step) / "manifest.json"
    write_json(manifest, {**(read_json(manifest) or {}), "created": time.time() - 3 * DAY})
    scene.treat("backup-overdue")
    assert (archive / "checkpoints" / "main" / checkpoint_name(step) / "manifest.json").exists()


@scenario("copy-damaged")
def copy_damaged(scene: Scene) -> None:
    """One bit of one file in the archive is another one."""
    step = saved_now(scene)
    archive = archived(scene, step)
    scene.shell(f"tr11 backup run {step} --to store")
    files = (archive / "checkpoints" / "main" / checkpoint_name(step) / "weights").iterdir()
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    scene.shell(f"tr11 backup verify {step}", (1,))
    scene.treat("copy-damaged")
    assert largest.read_bytes() == content


def archived(scene: Scene, step: int) -> Path:
    """The card copies this step away from now on; returns the folder."""
    archive = scene.folder / "archive"
    archive.mkdir(exist_ok=True)
    scene.write_card(
        f"backup.store={archive}", f"backup.store_interval={step}", "backup.milestone_percent=0"
    )
    return archive


@scenario("sync-overdue")
def sync_overdue(scene: Scene) -> None:
    """The periodic job does not run; the hub is well."""
    scene.train()
    for path in scene.directory.submissions.glob("*/submission.json"):
        write_json(path, {**(read_json(path) or {}), "time": time.time() - 2 * DAY})
    with FaultyHub() as hub, patch.dict(os.environ, {"HF_TOKEN": hub.token}):
        scene.write_card("hub.repository=bot/small-logs", f"hub.endpoint={hub.url}")
        scene.treat("sync-overdue")
        sent = hub.files("bot/small-logs")
    assert (
        scene.paths.main_log.read_bytes().startswith(sent["logs/main/main_log.txt"])
        and b"iteration" in sent["logs/main/main_log.txt"]
    )


@scenario("secret-in-log")
def secret_in_log(scene: Scene) -> None:
    """The training printed a token, and the log was mirrored."""
    scene.train()
    with FaultyHub() as hub, patch.dict(os.environ, {"HF_TOKEN": hub.token}):
        scene.write_card("hub.repository=bot/small-logs", f"hub.endpoint={hub.url}")
        with scene.paths.main_log.open("a") as log:
            log.write(f"using {hub.token}\n")
        scene.shell("tr11 sync")
        scene.treat("secret-in-log")
        assert hub.token.encode() not in hub.files("bot/small-logs")["logs/main/main_log.txt"]


@scenario("purge-near", card=("watch.scratch_purge_days=2",))
def purge_near(scene: Scene) -> None:
    saved_now(scene)
    for path in scene.paths.checkpoints.rglob("*"):
        scene.touch(path, 1.9 * DAY)
    scene.treat("purge-near", PATH=str(scene.paths.checkpoints))


# ------------------------------------------------------------------- file systems and periodic jobs
@scenario("filesystem-full", "filesystem-filling")
def filesystem_full(scene: Scene) -> None:
    """Two quotas on the run's directory, and an old checkpoint that takes most of both."""
    newest = [saved_now(scene), saved_now(scene)][-1]
    old = scene.paths.checkpoint(1)
    shutil.copytree(scene.paths.checkpoint(newest), old)
    (old / "large").write_bytes(os.urandom(19_000_000))
    whole = Manifest.read(old)
    assert whole is not None
    large = FileEntry("large", 19_000_000, file_digest(old / "large"))
    replace(whole, step=1, files=(*whole.files, large)).write(old)
    scene.write_card(
        tables=watched("SCRATCH", scene.paths.root, 20) + watched("WORK", scene.paths.root, 40)
    )
    now, path = time.time(), scene.paths.state / "filesystems" / "usage.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    same = {"name": "WORK", "source": "du", "path": str(scene.paths.root), "bytes_limit": 40e6}
    samples = [
        {**same, "time": now - 6 * 3600 * back, "bytes_used": 19e6 - 0.4e6 * back}
        for back in range(12, 0, -1)
    ]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    scene.shell("tr11 fs-watchdog", (1,))
    scene.treat("filesystem-full", "filesystem-filling")
    assert not old.exists()


def watched(name: str, path: Path, megabytes: int) -> str:
    return f'\n[[filesystems]]\nname = "{name}"\nsource = "du"\npath = "{path}"\nbytes_limit = "{megabytes} MB"\n'


@scenario("periodic-job-failed")
def periodic_job_failed(scene: Scene) -> None:
    scene.train()
    periodic(scene, exit_code=2, failures_in_a_row=3, message="no card")
    scene.treat("periodic-job-failed", PERIODIC="pulse")


@scenario("cron-dead")
def cron_dead(scene: Scene) -> None:
    scene.train()
    scene.program(
        "crontab",
        'if [ "$1" = -l ]; then cat table 2>/dev/null || { echo "no crontab for me" >&2; exit 1; }\n'
        'else cat "${1:--}" > table; fi',
    )
    periodic(
        scene,
        started=time.time() - 3 * DAY,
        ended=time.time() - 3 * DAY,
        next_due=time.time() - 3 * DAY + 3600,
    )
    scene.treat("cron-dead")
    assert "tr11" in (scene.folder / "table").read_text()


def periodic(scene: Scene, **changes: object) -> None:
    """The record of a periodic job named pulse."""
    now = time.time()
    value = {
        "schema": 1, "name": "pulse", "way": "crontab", "host": "n1", "started": now - 60, "ended": now - 50,
        "exit_code": 0, "message": "", "interval_seconds": 3600.0, "runs": 9, "failures_in_a_row": 0,
        "next_due": now + 3000,
    }  # fmt: skip
    write_json(scene.paths.state / "cron" / "pulse.json", {**value, **changes})


# ---------------------------------------------------------------------------
# Faults of nodes and clocks, and of the training's numbers.


@scenario("exclusion-cap", card=("resilience.exclusion_cap_percent=20",))
def exclusion_cap(scene: Scene) -> None:
    node = free_node(scene)
    # what a person just did is left alone
    assert exclude(scene.directory, node, why="a doubt", owner="tr11", days=14)
    other = free_node(scene, but=node)
    if scene.by_mail:  # what one more may be is no mail
        assert exclude(scene.directory, other, why="a doubt", owner="tr11", days=14)
    scene.treat("exclusion-cap", NODE=node)
    if scene.by_mail:
        for each in (node, other):
            scene.shell(f"tr11 nodes include {each} --yes", (0, 1))


@scenario("exclusion-due")
def exclusion_due(scene: Scene) -> None:
    node = free_node(scene)
    with patch("tr11ops.rundir.exclusions.now", return_value=time.time() - 20 * DAY):
        assert exclude(scene.directory, node, why="a doubt", owner="tr11", days=14)
    scene.treat("exclusion-due")


def free_node(scene: Scene, but: str = "") -> str:
    job = scene.train()
    return next(node for node in nodes_of(scene) if node not in {*job.nodes, but})


@scenario("check-failing", alone=True, card=("resilience.check_scripts=['../fans.sh']",))
def check_failing(scene: Scene) -> None:
    """A script of the site's breaks, and is repaired."""
    script = scene.folder.parent / "fans.sh"
    script.write_text("#!/bin/sh\necho 'no answer from the fans'\nexit 1\n")
    script.chmod(0o755)
    scene.train()
    assert not read_version(scene.directory.exclusions).exclusions
    scene.until(lambda: "check-failing" in scene.findings(), "the finding")
    script.write_text("#!/bin/sh\nexit 0\n")
    scene.treat("check-failing")
    scene.train()


@scenario("log-not-growing")
def log_not_growing(scene: Scene) -> None:
    """The log was replaced under the run's controller, as by an editor: what it writes goes to a
    file without name.
    """
    scene.train()
    log = scene.paths.main_log
    text = log.read_bytes()
    log.unlink()
    log.write_bytes(text)
    scene.touch(log, 900)
    scene.treat("log-not-growing")


@scenario("clock-skew")
def clock_skew(scene: Scene) -> None:
    last = scene.train().nodes[-1]
    inject(scene.twin, "clock-ahead", node=last)
    scene.treat("clock-skew", NODE=last)
    assert last not in scene.train().nodes


@scenario("silent-corruption")
def silent_corruption(scene: Scene) -> None:
    """A check of the arithmetic has found a worker that differs from itself."""
    job = scene.train()
    last = job.nodes[-1]
    record = scene.paths.corruptions / f"{job.raw_id}-1-2.json"
    suspect = {"rank": 3, "host": last, "gpu": "GPU 3", "how": "repeat"}
    write_json(
        record,
        {
            "time": time.time(),
            "job_id": job.raw_id,
            "launch": 1,
            "iteration": 2,
            "suspects": [suspect],
        },
    )
    scene.treat("silent-corruption", NODE=last)
    assert last not in scene.train().nodes
    record.unlink()


# --------------------------------------------------------------------------- the training's numbers
@scenario("loss-not-finite", "loss-spike", "gradient-norm")
def wild_numbers(scene: Scene) -> None:
    """Some data are poison: the training stays wild on every launch that does not pass over them."""
    before = saved_now(scene)
    job = scene.train(steps=12)
    first = int(
        inject(scene.twin, "loss-spike", path=str(scene.paths.root)).fault.details["iteration"]
    )
    scene.train(steps=8)
    assert saved_now(scene) > before
    words = {"STEP": str(before), "FIRST": str(first)}
    scene.treat("loss-not-finite", "loss-spike", "gradient-norm", **words)

    def steps_after() -> list[int]:
        return [step["iteration"] for step in scene.steps() if step["job_id"] != job.raw_id]

    scene.until(steps_after, "steps of the next launch")
    assert steps_after()[0] <= first


@scenario("validation-loss-rises", card=("evaluation.iterations=1",))
def evaluations_rise(scene: Scene) -> None:
    """Each evaluation since the newest checkpoint was worse than the one before."""
    before = saved_now(scene)
    scene.train(steps=8)
    now = scene.steps()[-1]
    for place, iteration in enumerate(range(before + 1, before + 4)):
        line = {
            "kind": "validation",
            "name": "valid",
            "iteration": iteration,
            "lm_loss": 2.0 + place,
        }
        append_line(
            scene.paths.metrics, json.dumps({**line, "time": now["time"], "job_id": now["job_id"]})
        )
    scene.treat("validation-loss-rises", STEP=str(before), FIRST=str(before + 1))
    scene.train()
    assert "validation-loss-rises" not in scene.findings(), "what was rolled back does not count"


# a jump shows in fifty lines: with steps of two seconds no load lets them pass before the mail
@scenario("counters-jump", card=("rehearsal.step_seconds=200",))
def counters_jump(scene: Scene) -> None:
    """The run goes on with another learning rate."""
    scene.train(steps=3)
    scene.shell("tr11 kill --wait --yes")
    scene.stop()
    scene.shell("tr11 kill --release --yes")
    scene.launch(
        "--array", "1-2", "--set schedule.learning_rate=1e-3 --set schedule.on_resume=override"
    )
    scene.treat("counters-jump")
    scene.until(
        lambda: json.loads(scene.status("--json"))["verdict"] == "stopped", "the end of its job"
    )
