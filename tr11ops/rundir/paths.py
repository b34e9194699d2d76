"""The run directory as the operation sees it: the trainer's paths, and those that only the
operation writes.

    state/submissions/TAG/{train.sbatch,card.toml,card.json,versions.json,submission.json}
    state/attempts/JOBID/workers/NODE/rank-R.log
    state/exclusions.json    state/launch.lock    journal/WRITER.jsonl    kill-switch

Reading never creates anything. Every file is written whole or not at all, and stays writable for
the group.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from tr11ops.base.deadline import SILENCE_SECONDS, within
from tr11ops.base.errors import Late
from tr11ops.cluster.arrays import COMMENT_PREFIX, array_number
from tr11ops.cluster.base import Job
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.documents import document, read_record
from trainer.contract.errors import DamagedFile
from trainer.contract.files import (
    host_name,
    link_unless_taken,
    now,
    write_atomically,
    write_beside,
    write_json,
)
from trainer.contract.paths import RunPaths
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json, set_aside

SUBMISSION_SCHEMA = 1
DAMAGED = "damaged: "  # begins the note of a submission whose record cannot be read any more
_TAG = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_COMMENT = re.compile(re.escape(COMMENT_PREFIX) + rf"({_TAG.pattern})@([0-9a-f]{{12}})(?![0-9a-f])")


def new_tag(when: float | None = None) -> str:
    """A name for one submission that no other submission has: UTC time and 32 random bits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
    return f"{stamp}-{secrets.token_hex(4)}"


def is_tag(text: str) -> bool:
    """True for a text that `new_tag` could have made."""
    return _TAG.fullmatch(text) is not None


def parse_comment(comment: str) -> tuple[str, str] | None:
    """The tag and the directory's mark in a job's comment; None when tr11 did not submit the job."""
    match = _COMMENT.search(comment)
    if match:
        return (match.group(1), match.group(2))
    return None


FIRST_LAUNCH = "launch --array 1-10"  # as words of a command, where none was typed before


class Submission(Record):
    """What is known of one submission. `job_id` is None when the scheduler never said whether it
    took it.

    `chain` says how its next attempt is queued ("array", "afterany", "self", "" for none). With
    "self", `left` attempts are still to be submitted, each by the one before it.
    """

    tag: str
    job_id: str | None
    scheduler: str
    time: float
    user: str
    host: str
    run: str
    variant: str
    array: str | None
    nodes: int
    card_hash: str
    dependency: str | None = None
    excluded: tuple[str, ...] = ()
    note: str = ""
    chain: str = ""
    left: int = 0
    schema: int = SUBMISSION_SCHEMA

    @property
    def launch_words(self) -> str:
        """The launch that made it, as words of a command that makes another like it."""
        words = ["launch"]
        if self.array is not None:
            words += ["--array", self.array.partition("%")[0]]
        if self.scheduler == "local":  # else Slurm would be taken where there is one
            words += ["--scheduler", "local"]
        return " ".join(words)

    @classmethod
    def read(cls, path: Path) -> Submission | None:
        """The record in `path`, or None when absent. Raises ValueError when it is malformed."""
        return read_record(cls, path, "a record of a submission")

    @classmethod
    def damaged(cls, tag: str, why: str, card: JsonObject) -> Submission:
        """What is still known where the record is damaged: the tag says when, the resolved `card`
        beside it what.

        It is in doubt as one whose answer was lost: its job is found by its comment, or by an
        attempt's record.
        """
        run, slurm = card.get("run"), card.get("slurm")
        run, slurm = run if isinstance(run, dict) else {}, slurm if isinstance(slurm, dict) else {}
        moment = float(calendar.timegm(time.strptime(tag[:15], "%Y%m%d-%H%M%S")))
        return cls(
            tag=tag,
            job_id=None,
            scheduler="",
            time=moment,
            user="",
            host="",
            run=str(run.get("name", "")),
            variant=str(run.get("variant", "")),
            array=None,
            nodes=int(slurm.get("nodes") or 0),
            card_hash="",
            note=f"{DAMAGED}{why}",
        )


class SubmissionPaths(Record):
    """The files that one submission leaves behind, in a folder named by its tag."""

    folder: Path

    @property
    def tag(self) -> str:
        return self.folder.name

    @property
    def script(self) -> Path:
        """The batch script, byte for byte as the scheduler got it."""
        return self.folder / "train.sbatch"

    @property
    def card_toml(self) -> Path:
        """The run card as the person wrote it."""
        return self.folder / "card.toml"

    @property
    def card(self) -> Path:
        """The resolved card that the trainer reads."""
        return self.folder / "card.json"

    @property
    def versions(self) -> Path:
        return self.folder / "versions.json"

    @property
    def record(self) -> Path:
        return self.folder / "submission.json"


class RunDirectory(Record, dict=True):
    """Where everything of one run lives.

    `paths` are those that the trainer knows too; `kill_switch` is the stop file (outside if the
    card says so).
    """

    paths: RunPaths
    kill_switch: Path

    @property
    def root(self) -> Path:
        return self.paths.root

    @property
    def exists(self) -> bool:
        """False only where it is seen not to be there: what may not be looked at may be there."""
        try:
            return self.root.is_dir()
        except PermissionError:
            return True

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def exclusions(self) -> Path:
        return self.paths.state / "exclusions.json"

    @property
    def drill(self) -> Path:
        """The last restore that was tried, on record."""
        return self.paths.state / "backup" / "drill.json"

    @property
    def site(self) -> Path:
        """What the scheduler said of itself at the last launch, so that no one has to ask again."""
        return self.paths.state / "site.json"

    @property
    def launch_lock(self) -> Path:
        return self.paths.state / "launch.lock"

    @property
    def submissions(self) -> Path:
        return self.paths.state / "submissions"

    def submission(self, tag: str) -> SubmissionPaths:
        return SubmissionPaths(self.submissions / tag)

    @cached_property
    def mark(self) -> str:
        """Twelve hex digits that stand for this directory in a job's comment (the path itself may
        be long or odd).
        """
        try:
            place = within(SILENCE_SECONDS, partial(os.path.realpath, self.root))
        except Late:  # a link on the way is then not followed
            place = str(self.root.absolute())
        return hashlib.sha256(os.fsencode(place)).hexdigest()[:12]

    def comment(self, tag: str) -> str:
        """What a job of this run carries as its comment, so that it is found again whatever it is
        named.
        """
        return f"{COMMENT_PREFIX}{tag}@{self.mark}"

    def tags(self) -> list[str]:
        """Tags of all submissions from here, oldest first. Raises OSError when the folder cannot be
        read.
        """
        try:
            return sorted(entry.name for entry in self.submissions.iterdir() if is_tag(entry.name))
        except FileNotFoundError:
            return []

    def read_submissions(self) -> list[Submission]:
        """All records, oldest first; a submission that never got as far as its record is left out.

        Raises OSError when a record is there but cannot be seen: the state is then unknown.
        """
        records = (self.read_submission(tag) for tag in self.tags())
        found = [record for record in records if record is not None]
        # tags know whole seconds alone
        return sorted(found, key=lambda record: (record.time, record.tag))

    def read_submission(self, tag: str) -> Submission | None:
        """One submission's record, None when it has none; where it is damaged, what is still known
        of it.

        Raises OSError when it cannot be seen.
        """
        paths = self.submission(tag)
        try:
            return Submission.read(paths.record)
        except DamagedFile as error:
            why = str(error)
        try:
            card = read_json(paths.card) or {}
        except (OSError, DamagedFile):
            card = {}
        return Submission.damaged(tag, why, card)

    def recorded_scheduler(self) -> str | None:
        """The kind of scheduler that the newest submission went to; None when nothing readable
        says.
        """
        try:
            tags = self.tags()
        except OSError:
            return None
        for tag in reversed(tags):
            try:
                record = self.read_submission(tag)
            except OSError:
                continue
            if record is not None and record.scheduler:
                return record.scheduler
        return None

    def write_submission(self, record: Submission) -> None:
        """Write or replace one submission's record. Raises OSError as the file system does."""
        write_json(self.submission(record.tag).record, document(record))

    # ------------------------------------------------------------------ attempts and workers
    def worker_logs(self, job_id: str) -> Iterator[tuple[str, int, Path]]:
        """(node, rank, path) of every worker's own log of an attempt, by its global rank."""
        found = []
        for path in (self.paths.attempt(job_id) / "workers").glob("*/rank-*.log"):
            match = re.fullmatch(r"rank-(\d+)\.log", path.name)
            if match:
                found.append((path.parent.name, int(match.group(1)), path))
        yield from sorted(found, key=lambda entry: (entry[1], entry[0]))

    def attempt_ids(self) -> list[str]:
        """Job ids of all attempts, the one that was touched last at the end."""
        try:
            entries = [entry for entry in os.scandir(self.paths.attempts) if entry.is_dir()]
        except FileNotFoundError:
            return []
        return [
            entry.name
            for entry in sorted(entries, key=lambda entry: (entry.stat().st_mtime, entry.name))
        ]

    def checkpoint_steps(self) -> list[int]:
        """Steps of all checkpoint folders, complete or not, ascending."""
        return checkpoint_steps(self.paths.checkpoints)

    # ------------------------------------------------------------------ the kill switch
    def kill_switch_is_set(self) -> bool:
        """True when anything lies at the kill switch's path (a dangling link too, as the trainer
        sees it).
        """
        return os.path.lexists(self.kill_switch)


def remove_stop_file(path: Path) -> Path | None:
    """Take a kill switch or a pause away. A folder of that name, which stops the run too, is set
    aside: where it is.

    Raises OSError when it may not be moved.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        return set_aside(path)
    return None


def nearest_folder(path: Path) -> Path:
    """The folder itself, or its nearest parent that is one."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


# ---------------------------------------------------------------- which job a submission became

BEING_SUBMITTED = "being submitted"


SUPERSEDED = "superseded by "


def read_traces(directory: RunDirectory, submissions: Iterable[Submission]) -> Mapping[str, str]:
    """For submissions without a job: the job that has run under their tag, by the records of the
    attempts.
    """
    wanted = {entry.tag for entry in submissions if entry.job_id is None}
    found: dict[str, str] = {}
    if not wanted:
        return found
    for job_id in directory.attempt_ids():
        try:
            record = read_json(directory.paths.attempt(job_id) / "attempt.json") or {}
        except ValueError:
            continue  # it was being written: a living job, which the scheduler tells of
        if record.get("submission") in wanted:
            found.setdefault(str(record["submission"]), str(record.get("array_id") or job_id))
    return found


def is_in_doubt(record: Submission) -> bool:
    """Was it sent without any word whether the scheduler took it?"""
    return record.job_id is None and not is_superseded(record)


def is_superseded(record: Submission) -> bool:
    """Was it given up for another one? Its job, should it come after all, leaves at once."""
    return record.note.startswith(SUPERSEDED)


def job_of_tag(tag: str, jobs: Iterable[Job], traces: Mapping[str, str]) -> str | None:
    """The number of the submission's job: by the comment of one in the queue, else by the record of
    an attempt.
    """
    for job in jobs:
        mark = parse_comment(job.comment)
        if mark is not None and mark[0] == tag:
            return array_number(job)
    return traces.get(tag)


# Which run this is, whatever it is called and wherever its directory lies: an id made at the first
# launch.
#
#     state/run.json    {"schema": 1, "id": 32 hex digits, "run": its name, "created": seconds since the epoch,
#                        "adopted": whether it goes on as a run whose directory was lost}
#
# Two runs may have one name; archives tell them apart by this. It is made once and never replaced but
# by `adopt_run_id`.
#
#     state/meeting.json    the key by which nodes without a scheduler know that they share one run directory
#
# Node 0 writes it when it begins to wait for the others, and takes it away when all is over. Who can
# read it may join.


def meeting_file(paths: RunPaths) -> Path:
    return paths.state / "meeting.json"


def write_meeting_key(paths: RunPaths, master: str) -> bytes:
    """A new key, for the run's user and group alone. Raises OSError."""
    key = secrets.token_hex(32)
    value = {"key": key, "master": master, "host": host_name(), "pid": os.getpid()}
    write_atomically(meeting_file(paths), json.dumps(value), 0o660)
    return bytes.fromhex(key)


def read_meeting_key(paths: RunPaths) -> bytes | None:
    """The key of who waits now; None where there is none. Raises OSError, ValueError."""
    value = read_json(meeting_file(paths))
    if value is None:
        return None
    return bytes.fromhex(str(value.get("key", "")))


def remove_meeting_key(paths: RunPaths) -> None:
    """Take the key away. One that cannot be is replaced by the next meeting."""
    with suppress(OSError):
        meeting_file(paths).unlink(missing_ok=True)


SCHEMA = 1
_ID = re.compile(r"[0-9a-f]{32}")


def run_id(directory: RunDirectory) -> str:
    """The run's id; "" where none was made yet. Raises OSError, ValueError."""
    return id_in(directory.paths.run_record)


def begun(directory: RunDirectory) -> float:
    """When the run began whose directory this is now, in seconds since the epoch; 0 where that cannot be
    read, and for one that goes on where another directory of it was lost.
    """
    try:
        value = within(SILENCE_SECONDS, partial(read_json, directory.paths.run_record)) or {}
        return 0.0 if value.get("adopted") else float(value.get("created", 0.0))
    except (OSError, ValueError, TypeError, Late):
        return 0.0


def id_in(path: Path) -> str:
    """The id that a run's record holds; "" where there is no record. Raises OSError, ValueError."""
    value = read_json(path)
    if value is None:
        return ""
    found = value.get("id")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise DamagedFile(path, "holds no id of a run")
    return found


def require_run_id(directory: RunDirectory, name: str) -> str:
    """The run's id, made if there is none: of many who make one at once, one is right. Raises
    OSError, ValueError.
    """
    found = run_id(directory)
    if found:
        return found
    path = directory.paths.run_record
    draft = write_beside(path, _text(secrets.token_hex(16), name, False))
    try:
        link_unless_taken(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return run_id(directory)


def adopt_run_id(directory: RunDirectory, name: str, found: str) -> None:
    """Go on as the run of this id: a run directory that was lost and begun again. Raises OSError,
    ValueError.
    """
    if not _ID.fullmatch(found):
        raise ValueError(f"{found[:40]!r} is no id of a run")
    write_atomically(directory.paths.run_record, _text(found, name, True))


def short(found: str) -> str:
    """An id as it is shown."""
    return found[:8] or "unknown"


def _text(found: str, name: str, adopted: bool) -> str:
    value = {"schema": SCHEMA, "id": found, "run": name, "created": now(), "adopted": adopted}
    return json.dumps(value) + "\n"
