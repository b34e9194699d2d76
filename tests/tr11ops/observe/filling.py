"""A run directory with something of everything in it, for tests."""

from __future__ import annotations

import json

from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, record, save_checkpoint, save_marker
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from trainer.contract.attempt import EndMarker, Heartbeat, write_heartbeat
from trainer.contract.files import write_json


def submission(
    directory: RunDirectory, job_id: str | None = "1000", **changes: object
) -> Submission:
    record = Submission(
        new_tag(NOW - 100),
        job_id,
        "slurm",
        NOW - 100,
        "ana",
        "h",
        "tr11-176B-ml",
        "main",
        "1-10",
        48,
        "hash",
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    directory.write_submission(record)
    return record


def fill(directory: RunDirectory) -> Submission:
    """A run in its second attempt, as the trainer and the launcher leave it."""
    paths = directory.paths
    paths.logs.mkdir(parents=True)
    rows = [
        {"kind": "step", **to_builtins(record(n)), "time": NOW - 400 + n, "job_id": "1002"}
        for n in range(310, 320)
    ]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank in range(4):
        write_heartbeat(
            paths.heartbeat(rank),
            Heartbeat(rank, "n01", 5, "training", 319, NOW - 40 - rank, "1002"),
        )
    marker = EndMarker("exit-duration", 300, 300, True, "", NOW - 4000, "n01", "1001")
    save_marker(paths, marker)
    write_json(
        paths.attempt("1002") / "attempt.json",
        {"array_id": "1000", "task_id": 2, "start": NOW - 3000, "nodes": ["n01"]},
    )
    for step in (100, 200, 300):
        save_checkpoint(paths, step, NOW - 4000)
    write_json(
        directory.exclusions,
        {"exclusions": [{"node": "n07", "why": "Xid 79", "owner": "ana", "until": NOW + 9}]},
    )
    return submission(directory)
