"""What is on record of the periodic jobs and of the chains that run them: the types, the readers
and the writers.

state/cron/NAME.json            the last round of one periodic job
state/cron/NAME.log             what its last rounds wrote
state/cron/chain-hourly.json    the next link of the chain of Slurm jobs that runs the hourly ones
state/cron/chain-daily.json     the same for the daily ones

While the run directory cannot be written, rounds of what watches are in this machine's fallback
directory, under the same names: of two records of one job the later round counts.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tr11ops.base.errors import NewerFileError
from tr11ops.base.observed import known, observed, observing, replace_json
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, read_record
from trainer.contract.errors import DamagedFile
from trainer.contract.record import Finite, Record

STATE_SCHEMA = 1
CHAINS = ("hourly", "daily")
_CHAIN = "chain-"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")


class PeriodicJobState(Record):
    """The last round of one periodic job. Times are seconds since the epoch.

    `ended` and `exit_code` are None while it runs, and for ever if what ran it was killed. An exit code below 0 is the
    signal that ended the job, 127 says that it could not be started. `message` says why the last round failed, "" when
    it did not: 1 (a person is needed) is an answer of the job, not a failure of it. `failures_in_a_row` counts the
    rounds since the last that did not fail.
    `way` is what runs it: daemon, crontab, scrontab or slurm; hand or once where nothing else ever did. A round by hand
    in between does not change it.
    """

    name: str
    way: str
    host: str
    started: Finite
    ended: Finite | None
    exit_code: int | None
    message: str
    interval_seconds: Finite
    runs: int
    failures_in_a_row: int
    next_due: Finite

    @property
    def is_running(self) -> bool:
        """True from its start until its end is on record: it runs, or what ran it was killed."""
        return self.ended is None


class ChainState(Record):
    """The next link of a chain: `job_id` begins at `next_due` and queues the one after it first.
    `time`: of the record.

    A chain whose `next_due` is long over, or whose job is not in the queue any more, is dead.
    """

    name: str
    job_id: str
    time: Finite
    next_due: Finite


T = TypeVar("T", PeriodicJobState, ChainState)


def cron_folder(directory: RunDirectory) -> Path:
    """Where everything of the periodic jobs is kept."""
    return directory.paths.state / "cron"


def job_file(directory: RunDirectory, name: str) -> Path:
    """The record of one job. Raises ValueError for a name that no job can have."""
    if not _NAME.fullmatch(name) or name.startswith(_CHAIN):
        raise ValueError(f"{name!r} cannot name a periodic job")
    return cron_folder(directory) / f"{name}.json"


def chain_file(directory: RunDirectory, name: str) -> Path:
    """The record of one chain."""
    return cron_folder(directory) / f"{_CHAIN}{name}.json"


# ----------------------------------------------------------------------------- reading
@observing
def read_job(directory: RunDirectory, name: str) -> PeriodicJobState | None:
    """One job's last round; None when it never ran."""
    return _last_round(directory, name)


@observing
def read_jobs(directory: RunDirectory) -> tuple[PeriodicJobState, ...]:
    """Every job that ever ran, by name; empty when none did. Unknown as soon as one record cannot
    be read.
    """
    local = existing_fallback(directory)
    names = {*_job_names(directory), *(_job_names(local) if local is not None else ())}
    found = (_last_round(directory, name) for name in sorted(names))
    return tuple(state for state in found if state is not None)


@observing
def read_chains(directory: RunDirectory) -> tuple[ChainState, ...]:
    """The chains that are installed; empty when there is none. Unknown as soon as one record cannot
    be read.
    """
    found = (_read(ChainState, chain_file(directory, name), name) for name in CHAINS)
    return tuple(state for state in found if state is not None)


def fallback_round(directory: RunDirectory, name: str) -> PeriodicJobState | None:
    """One job's last round in this machine's fallback directory. Raises OSError; ValueError for
    what is no record.
    """
    local = existing_fallback(directory)
    if local is None:
        return None
    return _read(PeriodicJobState, job_file(local, name), name)


def _last_round(directory: RunDirectory, name: str) -> PeriodicJobState | None:
    return later(
        _read(PeriodicJobState, job_file(directory, name), name), fallback_round(directory, name)
    )


def later(one: PeriodicJobState | None, other: PeriodicJobState | None) -> PeriodicJobState | None:
    """Of two records of one job, that of the later round; its end counts as later than its start."""
    found = [state for state in (one, other) if state is not None]
    return max(found, key=lambda state: (state.started, state.ended is not None), default=None)


def _job_names(directory: RunDirectory) -> list[str]:
    try:
        names = [
            path.name.removesuffix(".json")
            for path in cron_folder(directory).iterdir()
            if path.suffix == ".json"
        ]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name) and not name.startswith(_CHAIN))


def read_state(path: Path) -> PeriodicJobState | ChainState | None:
    """What one file of the folder holds, by its name. Raises ValueError, OSError."""
    if path.name.startswith(_CHAIN):
        return _read(ChainState, path, path.stem.removeprefix(_CHAIN))
    return _read(PeriodicJobState, path, path.stem)


def _read(kind: type[T], path: Path, name: str) -> T | None:
    """The record in `path`; None when absent. Raises ValueError when it is not one, OSError when it
    cannot be read.
    """
    found = read_record(kind, path, f"the record of {name}")
    if found is not None and found.name != name:
        raise DamagedFile(path, f"is the record of {found.name}, not of {name}")
    return found


# ----------------------------------------------------------------------------- writing
def write_job(directory: RunDirectory, state: PeriodicJobState) -> None:
    """Replace one job's record. Raises OSError as the file system does."""
    _write(job_file(directory, state.name), state)


def write_chain(directory: RunDirectory, state: ChainState) -> None:
    """Replace one chain's record. Raises OSError as the file system does."""
    _write(chain_file(directory, state.name), state)


def take_in_rounds(directory: RunDirectory, other: RunDirectory) -> None:
    """Move another directory's records of rounds into this one, each unless this one has a later.
    Raises OSError.
    """
    for name in _job_names(other):
        path = job_file(other, name)
        theirs = known(observed(_read, PeriodicJobState, path, name), None)
        ours = known(observed(_read, PeriodicJobState, job_file(directory, name), name), None)
        newest = later(ours, theirs)
        if newest is not None and newest is not ours:
            # a newer tr11 runs these jobs now, and keeps its own records
            with suppress(NewerFileError):
                write_job(directory, newest)
        path.unlink()


def _write(path: Path, state: PeriodicJobState | ChainState) -> None:
    replace_json(path, {"schema": STATE_SCHEMA, **document(state)}, STATE_SCHEMA)
