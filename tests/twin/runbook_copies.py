"""Faults of checkpoints, copies, logs on the hub and file systems."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace

from tests.plugins.faulty_hub import FaultyHub
from tests.twin.runbook_scene import DAY, Scene, saved_now, scenario
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import write_json
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.state_file import read_json


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
