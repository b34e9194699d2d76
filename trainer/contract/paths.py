"""Where everything lies in a run directory that the trainer writes and the operations toolkit
reads.

Standard library only. All of it is part of the run-directory contract: a changed literal changes
the contract.
"""

from __future__ import annotations

from pathlib import Path

from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name, read_latest
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json

END_MARKER_FILE = "end.json"
STOP_REQUEST_FILE = "stop-request.json"
PHASES_FILE = "phases.jsonl"
EXIT_TIME_FILE = "exit-time.json"
ATTEMPT_FILE = "attempt.json"


# ----------------------------------------------------------------------------- where things live
class RunPaths(Record):
    """Every path below a run's root that the trainer touches.

    `root` is the run directory, `name` the run's name, `variant` the experiment inside it (usually
    `main`). `logs_folder` is the name of the folder of logs; "" means NAME-logs.
    """

    root: Path
    name: str
    variant: str
    logs_folder: str = ""

    @classmethod
    def of_checkpoints(cls, folder: Path) -> RunPaths | None:
        """The run whose checkpoints lie in `folder` (its name is not known), if it is a run's; by
        its place alone.
        """
        paths = cls(folder.parent.parent, "", folder.name)
        if paths.checkpoints == folder:
            return paths
        return None

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints" / self.variant

    @property
    def latest(self) -> Path:
        return self.checkpoints / LATEST_FILE

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    @property
    def published(self) -> Path:
        """The folder that is mirrored to the hub: logs and TensorBoard events."""
        return self.root / (self.logs_folder or f"{self.name}-logs")

    @property
    def logs(self) -> Path:
        return self.published / "logs" / self.variant

    @property
    def main_log(self) -> Path:
        return self.logs / "main_log.txt"

    @property
    def metrics(self) -> Path:
        return self.logs / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.published / "tensorboard" / self.variant

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def requests(self) -> Path:
        """What people ask of the running training, and the answers."""
        return self.state / "requests"

    @property
    def checkpoint_request(self) -> Path:
        """A file whose existence asks for a checkpoint at the next step."""
        return self.requests / "checkpoint-now.json"

    @property
    def pause(self) -> Path:
        """A file whose existence keeps every attempt but the one that it names from training."""
        return self.requests / "pause.json"

    @property
    def profile_request(self) -> Path:
        """A file whose existence asks for a trace of the next steps."""
        return self.requests / "profile.json"

    @property
    def check_request(self) -> Path:
        """A file whose existence asks for one check of the arithmetic after the next step."""
        return self.requests / "compute-check.json"

    @property
    def operations_request(self) -> Path:
        """A file whose existence asks every rank for its last operations with the others."""
        return self.requests / "operations.json"

    def answer(self, request: int) -> Path:
        """What became of a request for a checkpoint or a profile."""
        return self.requests / f"answer-{request}.json"

    def digest_record(self, name: str) -> Path:
        """What was found when all bytes of the checkpoint of that name were last read."""
        return self.state / "checkpoints" / self.variant / "digests" / f"{name}.json"

    def seal_record(self, name: str) -> Path:
        """How the files of the checkpoint of that name, another trainer's, lay when its digests were
        read.
        """
        return self.state / "checkpoints" / self.variant / "seals" / f"{name}.json"

    def start_record(self, number: int) -> Path:
        """What of an earlier start of another trainer counts, where each saves into a folder of its own."""
        return self.state / "checkpoints" / self.variant / "starts" / f"{number}.json"

    def not_finite_record(self, name: str, identity: str) -> Path:
        """Which numbers of the checkpoint of that name and identity were found NaN or infinite."""
        folder = self.state / "checkpoints" / self.variant / "not-finite"
        return folder / f"{name}.{identity[:8]}.json"

    @property
    def origin(self) -> Path:
        """The checkpoint of another run that this variant began with: see
        `trainer.contract.origin`.
        """
        return self.state / "checkpoints" / self.variant / "origin.json"

    @property
    def run_record(self) -> Path:
        """Which run this is: its id and its name."""
        return self.state / "run.json"

    @property
    def heartbeats(self) -> Path:
        return self.state / "heartbeat"

    def heartbeat(self, rank: int) -> Path:
        return self.heartbeats / f"{rank}.json"

    @property
    def attempts(self) -> Path:
        return self.state / "attempts"

    def attempt(self, job_id: str) -> Path:
        return self.attempts / job_id

    def end_marker(self, job_id: str) -> Path:
        return self.attempt(job_id) / END_MARKER_FILE

    def flight_records(self, job_id: str) -> Path:
        """The last operations between the ranks, at a time-out or on request: see
        `trainer.debug.flight_recorder`.
        """
        return self.attempt(job_id) / "flight-recorder"

    def profiles(self, job_id: str) -> Path:
        """What the profiler saw: traces and memory snapshots that were asked for."""
        return self.attempt(job_id) / "profile"

    def compute(self, job_id: str, rank: int) -> Path:
        """A rank's own seconds in forward, backward and optimizer: see
        `trainer.contract.compute_record`.
        """
        return self.attempt(job_id) / "compute" / f"rank-{rank}.json"

    @property
    def corruptions(self) -> Path:
        """One file for each check in which workers' results differed: see
        `trainer.contract.corruption`.
        """
        return self.state / "corruption"

    def stop_request(self, job_id: str) -> Path:
        """A file whose existence asks this attempt, and no other, to save and leave."""
        return self.attempt(job_id) / STOP_REQUEST_FILE

    def exit_time(self, job_id: str) -> Path:
        """When this attempt leaves by the clock, as its job's limit is now: see
        `trainer.contract.attempt`.
        """
        return self.attempt(job_id) / EXIT_TIME_FILE

    def phases(self, job_id: str) -> Path:
        """Each change of phase of an attempt's trainer, one line each (see
        `trainer.contract.attempt`).
        """
        return self.attempt(job_id) / PHASES_FILE


def newest_step(paths: RunPaths) -> int | None:
    """The checkpoint that `latest` names; None when there is none, or it cannot be told."""
    try:
        return read_latest(paths.checkpoints)
    except (OSError, ValueError):
        return None


# ----------------------------------------------------------------------------- an attempt's name
def attempt_label(record: JsonObject, job_id: str) -> str:
    """An attempt's number as people see and type it: ARRAY_TASK, or the scheduler's own where it is
    of no array.

    `record` is what attempt.json holds. Folders and records go by `job_id`, the scheduler's own
    number.
    """
    array, task = record.get("array_id"), record.get("task_id")
    if array in (None, "") or task in (None, ""):
        return job_id
    return f"{array}_{task}"


def read_attempt_label(paths: RunPaths, job_id: str) -> str:
    """The same, from the attempt's folder; the scheduler's own number where its record is not there
    or unreadable.
    """
    return label_in(paths.attempt(job_id))


def label_in(folder: Path) -> str:
    """The same of the attempt whose folder this is."""
    try:
        record = read_json(folder / ATTEMPT_FILE)
    except (OSError, ValueError):
        return folder.name
    if isinstance(record, dict):
        return attempt_label(record, folder.name)
    return folder.name
