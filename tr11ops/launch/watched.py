"""The run directory of a job that someone else submitted: a card, a submission and an attempt on
record, so that every command that looks at a run looks at it.

Nothing is submitted. `[trainer] start = "watch"` says so, and keeps every command from starting or
stopping it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tr11ops.base.redact import one_line
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, JobState
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass
from tr11ops.observe.files import read_details
from tr11ops.runcard.card import load_card
from tr11ops.runcard.find import CARD_FILE
from tr11ops.runcard.toml_writer import write_card
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.trainers.watched import WatchedJob
from trainer.contract.files import host_name, make_shared, write_atomically, write_json
from trainer.contract.paths import ATTEMPT_FILE, RunPaths

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100
_LONGEST_LINE = 200  # characters of a log's line that say what it died of


def card_of(job: Job, watched: WatchedJob, root: Path) -> str:
    """The card of a watched job, as TOML."""
    trainer: dict[str, Any] = {
        "dialect": watched.dialect,
        "start": "watch",
        "command": [f"job {job.job_id} of {job.user or 'someone'}"],
    }
    if watched.folder:
        trainer["folder"] = watched.folder
    if watched.hold:
        trainer["hold"] = True
    if watched.steps:
        trainer["steps"] = watched.steps
    tables: Mapping[str, Any] = {
        "run": {"name": run_name(job), "directory": str(root)},
        "slurm": {
            "nodes": max(1, job.node_count),
            "workers_per_node": 1,
            "time_limit": _limit(job),
        },
        "trainer": trainer,
    }
    head = (
        f"Job {job.job_id}, submitted by someone else and only watched.",
        f"Made by `tr11 watch`. Its log: {watched.log}",
        "Add [alerts] here for mails; tr11 neither starts nor stops it.",
    )
    return write_card(tables, {}, head)


def _limit(job: Job) -> str:
    """The job's own, as a card says it; a day where it has none."""
    minutes = max(1, round((job.time_limit_seconds or 86_400) / 60))
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def run_name(job: Job) -> str:
    """A name that a run can bear."""
    name = _NO_NAME.sub("-", job.name).strip("-._")
    return name[:_LONGEST_NAME] or f"job-{job.raw_id}"


def make_run_directory(job: Job, watched: WatchedJob, root: Path) -> Path:
    """Make it where it is not there yet; returns its card. Raises OSError, CardError."""
    make_shared(root)
    card = root / CARD_FILE
    if not card.exists():
        write_atomically(card, card_of(job, watched, root))
    loaded = load_card(card, (), {})
    directory = RunDirectory(loaded.paths, loaded.kill_switch)
    if not directory.tags():
        _submit(job, watched, directory, loaded.digest)
    keep_attempt(job, watched, loaded.paths)
    make_shared(loaded.paths.logs)
    with suppress(FileExistsError):  # it is read there by all commands, and written to by none
        loaded.paths.main_log.symlink_to(watched.log)
    return card


def _submit(job: Job, watched: WatchedJob, directory: RunDirectory, digest: str) -> None:
    """Put on record when it was submitted, and by whom: no job is found by its number otherwise."""
    submitted = job.submit_time or time.time()
    record = Submission(
        tag=new_tag(submitted),
        job_id=array_number(job),
        scheduler=watched.scheduler,
        time=submitted,
        user=job.user,
        host=host_name(),
        run=job.name,
        variant=directory.paths.variant,
        array=None,
        nodes=max(1, job.node_count),
        card_hash=digest,
        note="submitted by someone else, and only watched",
    )
    make_shared(directory.submission(record.tag).folder)
    directory.write_submission(record)


def fault_in(log: Path) -> str:
    """What a job's log says that it died of, in one line; "" where it does not tell, or cannot be
    read.
    """
    try:
        [found] = diagnose_files([log])
    except (OSError, ValueError):
        return ""
    root = found.root_cause
    if root is None or found.fault in {FaultClass.UNKNOWN, FaultClass.CLEAN_EXIT}:
        return ""
    return f"{found.fault.words}: {one_line(root.text, limit=_LONGEST_LINE)}"


def is_watched_attempt(folder: Path) -> bool:
    """Whether the attempt of this folder is a job that is watched alone."""
    return read_details(folder / ATTEMPT_FILE).get("watched") is True


def keep_attempt(job: Job, watched: WatchedJob, paths: RunPaths) -> None:
    """Keep what is known of the job as its attempt; written again where a job that was put back into
    the queue runs once more, on other nodes. Raises OSError.
    """
    folder = paths.attempt(job.raw_id)
    kept = read_details(folder / ATTEMPT_FILE)
    runs_again = job.state is JobState.RUNNING and kept.get("start") != job.start_time
    if kept and not runs_again:
        return
    make_shared(folder)
    write_json(folder / ATTEMPT_FILE, attempt_of(job, watched))


def attempt_of(job: Job, watched: WatchedJob) -> dict[str, Any]:
    """What is kept of the job as its attempt."""
    return {
        "kind": watched.scheduler,
        "job_id": job.raw_id,
        "array_id": job.array_id,
        "task_id": job.task_id,
        "nodes": list(job.nodes),
        "start": job.start_time,
        "watched": True,
    }
