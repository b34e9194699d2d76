"""What else a launch looks at in the run directory: clocks, the group's access, pause, lease, index maps, lost jobs."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tr11ops.evidence import read_heartbeats
from tr11ops.launch.datasets import prefixes_of
from tr11ops.runcard import RunCard
from tr11ops.rundir import RunDirectory, Submission
from tr11ops.snapshot import known
from trainer.contract import RunPaths, read_json

RECENT_BEATS_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class ClockFacts:
    """How far one clock is ahead of another, in seconds (below zero: behind)."""

    what: str
    ahead: float
    against: str


@dataclass(frozen=True)
class AccessFault:
    """One folder or file of the run that the group cannot work with, and whose it is."""

    path: Path
    fault: str
    owner: str


# ----------------------------------------------------------------------------- clocks
def read_clocks(paths: RunPaths, now: float) -> tuple[ClockFacts, ...]:
    """Each node's clock at its newest heartbeat, against the file system's, which stamped the same file.

    Heartbeats of more than a week ago are left out: clocks change. One entry a host.
    """
    beats, _ = read_heartbeats(paths)
    newest: dict[str, ClockFacts] = {}
    for beat in sorted(known(beats, ()), key=lambda beat: beat.time):
        if now - beat.time > RECENT_BEATS_SECONDS:
            continue
        try:
            stamp = paths.heartbeat(beat.rank).stat().st_mtime
        except FileNotFoundError:
            continue
        newest[beat.host] = ClockFacts(f"node {beat.host}", beat.time - stamp, "the file system")
    return tuple(newest[host] for host in sorted(newest))


def clock_of_file_system(folder: Path) -> ClockFacts:
    """This machine's clock against the file system's. Raises OSError where nothing can be written."""
    from trainer.lease import file_system_time

    here, stamped = file_system_time(folder)
    return ClockFacts("this machine", here - stamped, "the file system")


# ----------------------------------------------------------------------------- access
def read_access(directory: RunDirectory) -> tuple[AccessFault, ...]:
    """The folders of the run in which the group cannot write, or whose new files would get another group."""
    paths = directory.paths
    wanted = (directory.root, paths.state, paths.attempts, directory.submissions, paths.checkpoints, paths.logs)
    found = []
    group = directory.root.stat().st_gid if directory.exists else None
    for folder in (*wanted, directory.journal):
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue
        faults = []
        if status.st_mode & 0o070 != 0o070:
            faults.append("not writable for its group")
        if not status.st_mode & stat.S_ISGID:
            faults.append("without the setgid bit")
        if status.st_gid != group:
            faults.append("of another group than the run directory")
        if faults:
            found.append(AccessFault(folder, ", ".join(faults), user_of(status.st_uid)))
    return tuple(found)


def user_of(number: int) -> str:
    """The name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


# ----------------------------------------------------------------------------- who else is here
def read_pause(directory: RunDirectory) -> str | None:
    """Who paused the run and why, in words; None when it is not paused. A file that cannot be read counts."""
    path = directory.paths.pause
    if not os.path.lexists(path):
        return None
    try:
        value = read_json(path) or {}
    except (OSError, ValueError):
        value = {}
    who, why = str(value.get("who") or "somebody"), str(value.get("why") or "")
    return f"{who} ({why})" if why else who


@dataclass(frozen=True)
class Holder:
    """The trainer that holds the run's lease and lives. `job_id` is its scheduler's number."""

    job_id: str
    host: str
    text: str

    def is_of(self, host: str) -> bool:
        """Is it a foreground training of this machine? Those are known by their processes."""
        return self.job_id.startswith("foreground") and self.host == host


def read_holder(paths: RunPaths, *clocks: float) -> Holder | None:
    """The living holder of the run's lease: its claim was renewed a moment ago, by any of `clocks`. Raises OSError.

    A claim that cannot be read is somebody's as long as it is that young.
    """
    from trainer.lease import living_claim

    claim = living_claim(paths, *clocks)
    if claim is None:
        return None
    if not claim.token:
        path = paths.state / "lease" / f"{claim.epoch}.json"
        return Holder("unknown", "", f"the trainer that made {path}, which cannot be read")
    return Holder(claim.job_id, claim.host, str(claim))


def read_traces(directory: RunDirectory, submissions: Iterable[Submission]) -> Mapping[str, str]:
    """For submissions without a job: the job that has run under their tag, by the records of the attempts."""
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


# ----------------------------------------------------------------------------- index maps
def prefixes_without_maps(card: RunCard) -> tuple[str, ...]:
    """The prefixes for which no index map of this card's sequence length and seed is there; they are built at start."""
    length, seed = card.model.sequence_length, card.run.seed
    missing = []
    for prefix in prefixes_of(card.data):
        path = Path(prefix)
        folder = path.parent if card.data.cache is None else Path(card.data.cache)
        start, middle = f"{path.name}_", f"ns_{length}sl_{seed}s_"
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            names = []
        if not any(name.startswith(start) and middle in name and name.endswith(".json") for name in names):
            missing.append(prefix)
    return tuple(missing)
