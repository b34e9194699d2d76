"""Formats that the trainer writes and the operations toolkit reads. Standard library only (and two rooms
of its own that need no more: `trainer.logline`, `trainer.state_file`).

Everything here is part of the run-directory contract: a change of any literal is a change of the contract.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer import logline, state_file

# The line of a step is part of the contract too: it is written and read in a room of its own.
StepRecord = logline.StepRecord
format_step = logline.format_step
parse_step = logline.parse_step
format_validation = logline.format_validation
# And so is how its files are read.
DamagedFile = state_file.DamagedFile
read_bytes = state_file.read_bytes
read_json = state_file.read_json

MANIFEST_SCHEMA = 1
STAND_IN = "stand-in"  # in `Manifest.versions` of what a rehearsal saved
DIGEST_ALGORITHM = "sha256"
LATEST_FILE = "latest"
LARGEST_LATEST = 4096  # bytes; it is one name
MANIFEST_FILE = "manifest.json"
END_MARKER_FILE = "end.json"
STOP_REQUEST_FILE = "stop-request.json"
PHASES_FILE = "phases.jsonl"


# ----------------------------------------------------------------------------- where things live
@dataclass(frozen=True)
class RunPaths:
    """Every path below a run's root that the trainer touches.

    `root` is the run directory, `name` the run's name, `variant` the experiment inside it (usually `main`).
    `logs_folder` is the name of the folder of logs; "" means NAME-logs.
    """

    root: Path
    name: str
    variant: str
    logs_folder: str = ""

    @classmethod
    def of_checkpoints(cls, folder: Path) -> RunPaths | None:
        """The run whose checkpoints lie in `folder` (its name is not known), if it is a run's; by its place alone."""
        paths = cls(folder.parent.parent, "", folder.name)
        return paths if paths.checkpoints == folder else None

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
    def operations_request(self) -> Path:
        """A file whose existence asks every rank for its last operations with the others."""
        return self.requests / "operations.json"

    def answer(self, request: int) -> Path:
        """What became of a request for a checkpoint or a profile."""
        return self.requests / f"answer-{request}.json"

    def digest_record(self, name: str) -> Path:
        """What was found when all bytes of the checkpoint of that name were last read."""
        return self.state / "checkpoints" / self.variant / "digests" / f"{name}.json"

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
        """The last operations between the ranks, at a time-out or on request: see `trainer.flight_recorder`."""
        return self.attempt(job_id) / "flight-recorder"

    def profiles(self, job_id: str) -> Path:
        """What the profiler saw: traces and memory snapshots that were asked for."""
        return self.attempt(job_id) / "profile"

    def compute(self, job_id: str, rank: int) -> Path:
        """A rank's own seconds in forward, backward and optimizer: see `trainer.compute_record`."""
        return self.attempt(job_id) / "compute" / f"rank-{rank}.json"

    @property
    def corruptions(self) -> Path:
        """One file for each check in which workers' results differed: see `trainer.corruption`."""
        return self.state / "corruption"

    def stop_request(self, job_id: str) -> Path:
        """A file whose existence asks this attempt, and no other, to save and leave."""
        return self.attempt(job_id) / STOP_REQUEST_FILE

    def phases(self, job_id: str) -> Path:
        """Each change of phase of an attempt's trainer, one line each (see `trainer.phases`)."""
        return self.attempt(job_id) / PHASES_FILE


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of one global step, e.g. `global_step12659`."""
    return f"global_step{step}"


def checkpoint_step(name: str) -> int | None:
    """The step that a checkpoint folder's name says, or None if it is not such a name."""
    match = re.fullmatch(r"global_step(\d+)", name)
    return int(match.group(1)) if match else None


# ----------------------------------------------------------------------------- files, whole or not at all
def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: written beside it, flushed to disk, renamed, group-writable.

    Raises OSError as the file system does (disk full, read-only, missing rights); the old file is then intact.
    """
    temporary = write_beside(path, text)
    try:
        state_file.put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_beside(path: Path, text: str) -> Path:
    """Write what is to become `path` into a hidden file beside it, flushed and group-writable; returns that file.

    Raises OSError as the file system does; nothing is then left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o664)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object atomically (see `write_atomically`)."""
    write_atomically(path, json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")


# ----------------------------------------------------------------------------- heartbeat
@dataclass(frozen=True)
class Heartbeat:
    """Where one rank is: written at every change of phase and every step, replaced atomically.

    `request` is the number of the last request (see `trainer.requests`) that this rank has honoured; 0: none yet.
    """

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    time: float
    job_id: str
    request: int = 0

    @classmethod
    def read(cls, path: Path) -> Heartbeat | None:
        """The heartbeat in `path`, or None when absent. Raises ValueError when it is malformed."""
        return _read_record(cls, path)


def write_heartbeat(path: Path, heartbeat: Heartbeat) -> None:
    """Replace one rank's heartbeat. Not flushed to disk: it is worth nothing after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{heartbeat.pid}")
    temporary.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    state_file.put_in_place(temporary, path)


# ----------------------------------------------------------------------------- end marker
@dataclass(frozen=True)
class EndMarker:
    """The trainer's own word on how it ended. Its absence after a job ended means: it did not end by itself.

    `reason` is one of END_REASONS; `restart` says whether the next array task should go on training.
    """

    reason: str
    iteration: int
    checkpoint_step: int | None
    restart: bool
    message: str
    time: float
    host: str
    job_id: str
    launch: int = 0

    @classmethod
    def read(cls, path: Path) -> EndMarker | None:
        """The marker in `path`, or None when absent. Raises ValueError when it is malformed."""
        return _read_record(cls, path)


END_REASONS = {
    "finished": "all samples were trained",
    "exit-duration": "the attempt's own time was up",
    "exit-interval": "the exit interval was reached",
    "signal": "the scheduler or a person sent a signal",
    "kill-switch": "the kill switch was found",
    "pause": "the run is paused",
    "superseded": "another trainer has taken the run's lease over",
    "refused": "bad input: nothing was trained, and another try would end the same way",
    "error": "the trainer failed",
}

# What the trainer's process returns, and the batch script. After 2 and 3 no other task may start before a person has
# looked: 2, the input is bad; 3 (of the batch script alone), the fault would come again, and what waits is held.
EXIT_FINE = 0
EXIT_ERROR = 1
EXIT_REFUSED = 2
EXIT_HELD = 3


def _read_record(cls: Any, path: Path) -> Any:
    value = read_json(path)
    if value is None:
        return None
    names = {entry.name for entry in fields(cls)}
    try:
        return cls(**{key: item for key, item in value.items() if key in names})
    except TypeError as error:
        raise DamagedFile(path, f"is not a {cls.__name__}: {error}") from None


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def host_name() -> str:
    """This node's name; the scheduler's own name for it where one machine plays many nodes."""
    return os.environ.get("TR11_NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# ----------------------------------------------------------------------------- checkpoint manifest
class NewerFormat(ValueError):
    """A file of a newer tr11: this one cannot judge it. One line."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: path relative to the checkpoint's folder, bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself; written last, so its existence means completeness."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    files: tuple[FileEntry, ...]
    topology: Mapping[str, int]
    model: Mapping[str, Any]
    run_card_hash: str
    created: float
    versions: Mapping[str, str] = field(default_factory=dict)
    job_id: str = ""
    digest_algorithm: str = DIGEST_ALGORITHM
    schema: int = MANIFEST_SCHEMA

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    @property
    def is_rehearsed(self) -> bool:
        """Whether a stand-in of the trainer wrote it, in a rehearsal: it holds no tensors."""
        return STAND_IN in self.versions

    def write(self, folder: Path) -> None:
        """Write the manifest into the checkpoint's folder. Call it when every other file is on disk."""
        write_json(folder / MANIFEST_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint folder; None if it has none (then it is not complete).

        Raises ValueError when the manifest is damaged or of a newer schema.
        """
        try:
            value = read_json(folder / MANIFEST_FILE)
        except OSError as error:
            raise ValueError(f"{folder / MANIFEST_FILE} cannot be read: {error}") from None
        return None if value is None else cls.of(value, folder)

    @classmethod
    def of(cls, value: dict[str, Any], folder: Path) -> Manifest:
        """The manifest of `folder` from its JSON object. Raises ValueError (none), NewerFormat (of a newer tr11)."""
        schema = value.get("schema", 0)
        if not isinstance(schema, int):
            raise ValueError(f"{folder / MANIFEST_FILE} is not a manifest: its schema is {schema!r}")
        if schema > MANIFEST_SCHEMA:
            raise NewerFormat(f"{folder} was written by a newer tr11 (manifest schema {schema})")
        try:
            if value["digest_algorithm"] != DIGEST_ALGORITHM:
                raise NewerFormat(
                    f"{folder} has {value['digest_algorithm']!r} digests, this tr11 reads {DIGEST_ALGORITHM}"
                )
            entries = tuple(FileEntry(**entry) for entry in value.pop("files"))
            return cls(files=entries, **value)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST_FILE} is not a manifest: {error}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it; read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def manifest_faults(folder: Path, manifest: Manifest, read_digests: bool) -> list[str]:
    """What is wrong with a checkpoint's files, one line each; empty when all is well.

    Sizes are always compared; digests only when `read_digests` (that reads every byte).
    """
    faults = []
    for entry in manifest.files:
        path = folder / entry.path
        try:
            size = path.stat().st_size
        except OSError as error:
            faults.append(f"{entry.path}: {error.strerror or error}")
            continue
        if size != entry.bytes:
            faults.append(f"{entry.path}: {size} bytes, the manifest says {entry.bytes}")
        elif read_digests and file_digest(path) != entry.digest:
            faults.append(f"{entry.path}: its digest differs from the manifest's")
    return faults


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of all checkpoint folders below `folder` (complete or not), ascending by number."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(step for step in map(checkpoint_step, names) if step is not None)


def read_latest(folder: Path) -> int | None:
    """The step that `latest` names, or None when there is no such file. Raises ValueError when it is garbled."""
    try:
        text = read_bytes(folder / LATEST_FILE, LARGEST_LATEST).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        if not state_file.is_damage(error):
            raise
        raise ValueError(f"{folder / LATEST_FILE}: {error.strerror}") from None
    step = checkpoint_step(text)
    if step is None:
        raise ValueError(f"{folder / LATEST_FILE} says {text[:40]!r}, expected global_stepN")
    return step


def append_line(path: Path, text: str) -> None:
    """Append one whole line in a single write, so that writers never interleave inside a line on a local disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o664)  # a pipe fails at once
    try:
        os.write(descriptor, (text + "\n").encode("utf-8"))
    finally:
        os.close(descriptor)
