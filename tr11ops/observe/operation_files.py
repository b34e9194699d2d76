"""Reads what surrounds a run into observed values: copies, clocks, holds, purges, ended jobs,
periodic jobs, disks.

A failed read is `Unknown` with its reason, never an exception. Nothing walks a tree: what is looked
at is a handful of files, whatever the run holds.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown, known, observed, observing
from tr11ops.base.units import number_in, plain
from tr11ops.cluster.base import Job
from tr11ops.observe.files import number_of
from tr11ops.observe.observations import (
    ClockReading,
    Copied,
    CopyStatus,
    FolderRoom,
    LeastUsed,
    OperationObservations,
    UnwritableDirectory,
    found_secrets,
)
from tr11ops.observe.snapshot import Attempt, RunFacts
from tr11ops.rundir import cron_records as periodic
from tr11ops.rundir.disk_usage import read_usage
from tr11ops.rundir.hold_store import holds_changed, read_by_attempts, read_commanded, read_marked
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import Heartbeat
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_step, checkpoint_steps
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import open_for_reading, read_json, tail_lines
from trainer.contract.units import shortened

RANKS_PER_HOST = 2  # whose heartbeats tell a host's clock; one alone may have been written slowly
FILES_PER_FOLDER = 64  # of a checkpoint, enough to tell when it was last used
LONGEST_TEXT = 300
MOST_DAMAGED = 100  # lines that are read of a backup's status
COMPLETION_BYTES = 1 << 20  # the last two thousand ended jobs, or more


def see_operation(
    directory: RunDirectory,
    facts: RunFacts,
    heartbeats: Observed[tuple[Heartbeat, ...]],
    attempts: Observed[tuple[Attempt, ...]],
    attempts_of_holds: Iterable[str] | None = None,
    queued: Iterable[Job] = (),
) -> OperationObservations:
    """Look at everything around the run. `heartbeats` and `attempts` are those just
    read.

    `attempts_of_holds`: the attempts whose verdicts may hold something; None for `attempts` alone.
    `queued`: the run's queued jobs, for what their comments say of a hold.
    """
    state = directory.paths.state
    commanded = observed(read_commanded, directory.paths)
    kept = [attempt.job_id for attempt in known(attempts, ())]
    changed = observed(holds_changed, directory.paths)
    return OperationObservations(
        ended_jobs=read_ended_jobs(directory.site, facts.name),
        holds=commanded
        if isinstance(commanded, Unknown)
        else (
            *commanded,
            *read_by_attempts(
                directory.paths, kept if attempts_of_holds is None else attempts_of_holds
            ),
            *read_marked(directory.paths, queued),
        ),
        holds_changed=known(changed, None),
        backup=read_copy(state / "backup" / "status.json"),
        sync=read_copy(state / "sync" / "status.json"),
        periodic_jobs=periodic.read_jobs(directory),
        chains=periodic.read_chains(directory),
        usage=read_usage(directory) if facts.filesystems else (),
        clocks=read_clocks(directory.paths, known(heartbeats, ()), known(attempts, ())),
        least_used=read_least_used(directory.paths, facts.used_files)
        if facts.watch.scratch_purge_days is not None
        else (),
        shut_folders=read_unwritable_directories(directory.paths),
        save_room=read_save_room(directory.paths),
    )


# ----------------------------------------------------------------------------- folders that no one
# can write to
@observing
def read_unwritable_directories(paths: RunPaths) -> tuple[UnwritableDirectory, ...]:
    """The run's own folders on a full or read-only file system; the first of each. Nothing is
    written to find out.

    A quota that is used up does not show here: `tr11 fs-watchdog` asks for it.
    """
    return tuple(_unwritable_directories(_own_folders(paths)))


@observing
def read_save_room(paths: RunPaths) -> FolderRoom | None:
    """What is free where checkpoints are written, by the file system, and what is large there where
    that is little; a quota does not show here either.
    """
    try:
        device, room = paths.checkpoints.stat().st_dev, os.statvfs(paths.checkpoints)
    except FileNotFoundError:  # not made yet
        return None
    first = next(
        folder
        for folder in _own_folders(paths)
        if folder.exists() and folder.stat().st_dev == device
    )
    found = FolderRoom(str(first), room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize)
    if not found.is_short:
        return found
    largest, is_all_seen = largest_below(first)
    return replace(found, largest=largest, is_all_seen=is_all_seen)


def _own_folders(paths: RunPaths) -> tuple[Path, ...]:
    """The folders that the run writes, what may be mounted by itself before what lies in it."""
    folders = [paths.root, paths.state, paths.checkpoints, paths.main_log.parent]
    if paths.checkpoints.parent.is_relative_to(paths.root):  # of all variants, and of core dumps
        folders.insert(2, paths.checkpoints.parent)
    return tuple(folders)


def _unwritable_directories(folders: Iterable[Path]) -> Iterator[UnwritableDirectory]:
    known_devices = set()
    for folder in folders:
        try:
            device, room = folder.stat().st_dev, os.statvfs(folder)
        except FileNotFoundError:  # not made yet
            continue
        if device in known_devices:
            continue
        known_devices.add(device)
        if room.f_flag & os.ST_RDONLY:
            yield UnwritableDirectory(str(folder), "read-only", is_full=False)
        elif room.f_blocks and not room.f_bavail:
            yield UnwritableDirectory(str(folder), "no byte is left", is_full=True)
        elif room.f_files and not room.f_favail:
            yield UnwritableDirectory(str(folder), "no inode is left", is_full=True)


# ----------------------------------------------------------------------------- copies and holds
@observing
def read_copy(path: Path) -> CopyStatus | None:
    """The last success of a backup or a synchronisation; None when there never was one."""
    value = read_json(path)
    if value is None:
        return None
    step = value.get("step")
    return CopyStatus(
        time=number_of(path, value["time"]),
        step=None if step is None else int(number_of(path, step)),
        message=_line(value.get("message")),
        copied=_copied(path, value.get("copied")),
        damaged=_lines(path, value, "damaged"),
        not_finite=_lines(path, value, "not_finite"),
        secrets=found_secrets(value.get("secrets", [])),
    )


def _lines(path: Path, value: dict[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_line(text) for text in _list(path, value.get(key, []))[:MOST_DAMAGED])


def _copied(path: Path, value: Any) -> tuple[Copied, ...] | None:
    """All sound copies: {archive: {kind: [step, ...]}}; None where an older tr11 wrote the file."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(kinds, dict) for kinds in value.values()):
        raise ValueError(f"{path} holds {str(value)[:40]!r} where copies belong")
    return tuple(
        Copied(_line(archive), _line(kind), int(number_of(path, step)))
        for archive, kinds in value.items()
        for kind, steps in kinds.items()
        for step in _list(path, steps)
    )


def _list(path: Path, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{path} holds {str(value)[:40]!r} where a list belongs")
    return value


def _line(value: Any) -> str:
    """What a file says, as one line that is fit to be shown."""
    return shortened(" ".join(plain(str(value or ""), unicode=True).split()), LONGEST_TEXT)


# ----------------------------------------------------------------------------- jobs that the
# scheduler has forgotten
@observing
def read_ended_jobs(site: Path, name: str) -> tuple[Job, ...]:
    """Ended jobs called `name` in the scheduler's own log, where `site` says that it keeps one. No
    call is made.

    Empty where the site keeps none, or where it cannot be read from here: it often lies on the
    controller alone.
    """
    told = known(observed(read_json, site), None) or {}
    log = told.get("job_completions")
    if not isinstance(log, str) or not log:
        return ()
    try:
        lines, _ = tail_lines(Path(log), COMPLETION_BYTES)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    from tr11ops.cluster.slurm_text import ended_jobs

    return ended_jobs(lines, name)


# ----------------------------------------------------------------------------- clocks
def read_clocks(
    paths: RunPaths, beats: Iterable[Heartbeat], attempts: Iterable[Attempt]
) -> Observed[tuple[ClockReading, ...]]:
    """Times that hosts wrote into heartbeats and end markers, each beside the file system's own
    time of that file.

    A few ranks of each host are read again, since content and time must be of the same version of
    the file. A file that has gone meanwhile is left out.
    """
    chosen: dict[str, int] = {}
    found: list[ClockReading] = []

    def read() -> tuple[ClockReading, ...]:
        for beat in beats:
            if chosen.setdefault(beat.host, 0) < RANKS_PER_HOST:
                chosen[beat.host] += 1
                found.extend(_reading(paths.heartbeat(beat.rank), f"heartbeat of rank {beat.rank}"))
        for attempt in attempts:
            found.extend(
                _reading(paths.end_marker(attempt.job_id), f"end of attempt {attempt.label}")
            )
        return tuple(found)

    return observed(read)


def _reading(path: Path, what: str) -> Iterator[ClockReading]:
    try:
        with open_for_reading(path) as stream:
            stamped = os.fstat(stream.fileno()).st_mtime
            value: object = observed(lambda: json.loads(stream.read(1 << 16)))
    except FileNotFoundError:
        return
    if isinstance(value, dict):
        host, written = str(value.get("host") or ""), number_in(value.get("time"))
        if host and written is not None:
            yield ClockReading(host, written, stamped, what)


# ----------------------------------------------------------------------------- what a purge would
# take
@observing
def read_least_used(paths: RunPaths, used: Iterable[Path]) -> tuple[LeastUsed, ...]:
    """Of the newest checkpoint and of the data, the file that was read or changed longest ago.

    The time is the later of access and change. Sites go by the same, unless their file system keeps
    no access times.
    """
    steps = checkpoint_steps(paths.checkpoints)
    found = []
    if steps:
        name = checkpoint_name(steps[-1])
        found.append(_least(f"checkpoint {name}", _files_of(paths.checkpoint(steps[-1]))))
    found.append(_least("data", used))
    return tuple(entry for entry in found if entry is not None)


def _files_of(checkpoint: Path) -> Iterator[Path]:
    for folder in ("weights", "optimizer"):
        try:
            entries = os.scandir(checkpoint / folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            yield from (
                Path(entry.path) for entry in islice(entries, FILES_PER_FOLDER) if entry.is_file()
            )


def _least(what: str, files: Iterable[Path]) -> LeastUsed | None:
    times = []
    for path in files:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        times.append((max(status.st_atime, status.st_mtime), path))
    if not times:
        return None
    moment, path = min(times)
    return LeastUsed(what, path, moment)


MOST_ENTRIES = 10_000
MOST_SECONDS = 0.5
DEPTH = 3  # names of a path below the directory; what is deeper counts for its folder there
SHOWN = 3


def largest_below(root: Path) -> tuple[dict[str, int], bool]:
    """The largest things below a directory, on its own file system, with their bytes on disk, the
    largest first; and whether all of it was seen. Checkpoints are left out: their manifests say how
    large they are.
    """
    sizes: Counter[str] = Counter()
    folders, seen, until = deque([root]), 0, time.monotonic() + MOST_SECONDS
    device = root.stat().st_dev
    while folders and seen < MOST_ENTRIES and time.monotonic() < until:
        folder = folders.popleft()
        with suppress(OSError), os.scandir(folder) as entries:  # what cannot be read is not counted
            for entry in entries:
                seen += 1
                if seen > MOST_ENTRIES:
                    break
                status = entry.stat(follow_symlinks=False)
                if status.st_dev != device or checkpoint_step(entry.name) is not None:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    parts = Path(entry.path).relative_to(root).parts[:DEPTH]
                    sizes[str(root.joinpath(*parts))] += status.st_blocks * 512
    return dict(sizes.most_common(SHOWN)), not folders and seen <= MOST_ENTRIES
