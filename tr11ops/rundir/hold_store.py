"""What tr11 holds in the queue, on record: by commands, in state/requests/holds.json; by attempts,
in their verdicts; and in the held job's own comment, for where the run directory is away.

state/requests/holds.json    state/requests/holds.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)

An attempt's verdict stays as it was written; what was released since has a record of its own in
holds.json.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tr11ops.base.errors import NewerFileError
from tr11ops.base.now import now
from tr11ops.base.observed import known, observed, why_only_read
from tr11ops.base.redact import one_line
from tr11ops.base.units import number_in
from tr11ops.cluster.arrays import LONGEST_COMMENT, names_of, not_repeated, without
from tr11ops.cluster.base import Job, JobState
from tr11ops.rundir.attempts import AttemptVerdict, why_held
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.fallback import with_reserve
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.attempt import BAD_REASONS
from trainer.contract.documents import document
from trainer.contract.errors import HIDDEN_LEASE
from trainer.contract.files import json_text
from trainer.contract.paths import RunPaths
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json


class HoldRecord(Record):
    """Queued work that tr11 holds: `job` is the number of a job or an array, or names tasks of one
    ("12_[4-10]").

    `is_for_fault`: it must not start before a person has looked; else it was held for a kill
    switch, a pause, or by a person's command. `time` is in seconds since the epoch.
    """

    job: str
    who: str = ""
    time: float | None = None
    why: str = ""
    is_for_fault: bool = False


class ReleaseRecord(Record):
    """Work that tr11 released: its name, and when (seconds since the epoch)."""

    job: str
    time: float


# A hold in the held job's own comment:
#
#     tr11:TAG@MARK [the card's comment] held-by-tr11@1795465040/fault:WHY
#
# It is read beside the records, and is over once one of them says that
# tr11 released the job.

# with these words an attempt says that it has lost the run directory, which may be seen again now
_LOST_DIRECTORY = (HIDDEN_LEASE, "is not mounted, or is not what this job was queued from")


def tells_of_lost_directory(why: str) -> bool:
    """Whether an attempt ended, or held what is queued, since it did not see the run directory."""
    return any(words in why for words in _LOST_DIRECTORY)


_MARK = re.compile(r" ?held-by-tr11@(\d{1,12})/(fault|switch):(.*)", re.DOTALL)
LONGEST_WHY = 200


def with_mark(comment: str, why: str, is_for_fault: bool, now: float) -> str:
    """A job's comment with the mark of a hold in place of the last one's. `now`: seconds since the
    epoch.
    """
    kind = "fault" if is_for_fault else "switch"
    mark = f"held-by-tr11@{int(now)}/{kind}:{one_line(why, limit=LONGEST_WHY)}"
    return f"{_MARK.sub('', comment)[: LONGEST_COMMENT - len(mark) - 1]} {mark}".strip()


def unmarked(comment: str) -> str:
    """A job's comment without a mark, as far as the longest mark fits behind it."""
    room = LONGEST_COMMENT - LONGEST_WHY - len(" held-by-tr11@123456789012/switch:")
    return _MARK.sub("", comment)[:room]


def marked_holds(jobs: Iterable[Job], releases: Iterable[ReleaseRecord]) -> Iterator[HoldRecord]:
    """What these jobs say of themselves that tr11 holds, less what it has released since."""
    gone = tuple(releases)
    for job in jobs:
        found = None
        if job.state is JobState.PENDING:
            found = _MARK.search(job.comment)
        if found is None:
            continue
        since = float(found[1])
        names = without(names_of([job], [job]), [one.job for one in gone if one.time > since])
        for name in names:
            yield HoldRecord(
                name, AUTOMATIC_OWNER, time=since, why=found[3], is_for_fault=found[2] == "fault"
            )


HOLDS_SCHEMA = 1
VERSIONS_KEPT = 20
MOST_RELEASES_KEPT = 100  # an older one matters only to a verdict that is older still
# ends of attempts that hold what is queued until `tr11 resume`
SWITCHES = frozenset({"kill-switch", "pause"})
# after these only a switch holds anything
ENDS_IN_ORDER = frozenset({"exit-duration", "exit-interval", "signal"})


# ----------------------------------------------------------------------------- what is read
def holds_path(paths: RunPaths) -> Path:
    return paths.requests / "holds.json"


def holds_changed(paths: RunPaths) -> float:
    """When a hold or a release was last put on record, seconds since the epoch. Raises OSError
    where none ever was.
    """
    return max(place.stat().st_mtime for place in _places(paths))


def read_commanded(paths: RunPaths) -> tuple[HoldRecord, ...]:
    """What commands and the run's controllers have put in holds.json. Raises OSError, ValueError."""
    value = _newest(paths)
    return tuple(
        HoldRecord(
            _name(entry["job"]),
            _text(entry.get("who")),
            time=number_in(entry.get("time")),
            why=_text(entry.get("why")),
            is_for_fault=entry.get("who") == AUTOMATIC_OWNER
            and entry.get("switch") not in SWITCHES,
        )
        for entry in _entries(value)
    )


def read_by_attempts(paths: RunPaths, attempts: Iterable[str]) -> tuple[HoldRecord, ...]:
    """What these attempts held at their ends, less what tr11 has released since. A damaged verdict
    holds nothing.
    """
    return tuple(_by_attempts(paths, attempts, _releases(paths)))


def read_marked(paths: RunPaths, queued: Iterable[Job]) -> tuple[HoldRecord, ...]:
    """What queued jobs of the run say in their own comments that tr11 holds: the run directory was
    away then.
    """
    return tuple(marked_holds(queued, _releases(paths)))


def read_holds(directory: RunDirectory, queued: Iterable[Job] = ()) -> tuple[HoldRecord, ...]:
    """Everything that tr11 holds, the commands' records first. What cannot be read is not known to
    be tr11's.

    `queued`: the run's queued jobs, for what only their comments tell.
    """
    paths = directory.paths
    attempts = reversed(known(observed(directory.attempt_ids), []))
    commanded = known(observed(read_commanded, paths), ())
    return (*commanded, *read_by_attempts(paths, attempts), *read_marked(paths, queued))


def held_by_tr11(directory: RunDirectory, queued: Iterable[Job] = ()) -> frozenset[str]:
    """Names of jobs, arrays and tasks that tr11 has held: by a command, or by the run's own
    controller.
    """
    return frozenset(record.job for record in read_holds(directory, queued))


def releasable(records: Iterable[HoldRecord]) -> frozenset[str]:
    """Names of what is held for a kill switch, a pause or by a person alone, and for no fault."""
    every = tuple(records)
    faults = [record.job for record in every if record.is_for_fault]
    return frozenset(without((record.job for record in every if not record.is_for_fault), faults))


def releases_in(value: JsonObject) -> tuple[ReleaseRecord, ...]:
    """The releases in what holds.json holds; what is no release there is left out."""
    entries = value.get("released")
    return tuple(
        ReleaseRecord(entry["job"], float(entry["time"]))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("job"), str)
        and isinstance(entry.get("time"), int | float)
    )


def _by_attempts(
    paths: RunPaths, attempts: Iterable[str], releases: tuple[ReleaseRecord, ...]
) -> Iterator[HoldRecord]:
    for job_id in attempts:
        verdict = known(observed(AttemptVerdict.read, paths.attempt(job_id)), None)
        if not isinstance(verdict, AttemptVerdict):
            continue
        if verdict.reason in BAD_REASONS:
            ended = verdict.message
        else:
            ended = verdict.reason
        why = why_held(verdict.held_because, ended)
        # after an end in order nothing but a switch holds: verdicts that are older than `held_for`
        # say it by that
        is_for_switch = verdict.held_for in SWITCHES or verdict.reason in SWITCHES | ENDS_IN_ORDER
        for name in _still_held(verdict, releases):
            yield HoldRecord(
                _name(name),
                AUTOMATIC_OWNER,
                time=number_in(verdict.time),
                why=_text(why),
                is_for_fault=not is_for_switch,
            )


def _still_held(verdict: AttemptVerdict, releases: Iterable[ReleaseRecord]) -> tuple[str, ...]:
    """The names of what an attempt held at its end and tr11 has not released since."""
    try:
        gone = [one.job for one in releases if one.time > verdict.time]
    except TypeError:  # a damaged verdict, with another thing for its time
        gone = []
    return without(map(str, verdict.held), gone)


def _versions(paths: RunPaths) -> VersionedFile:
    return VersionedFile(holds_path(paths), VERSIONS_KEPT, is_signed=True)


def _places(paths: RunPaths) -> list[Path]:
    """The newest version and its copy."""
    versions = _versions(paths)
    return [*(versions.file(number) for number in versions.numbers()[-1:]), versions.copy]


def _newest(paths: RunPaths) -> JsonObject:
    """What the newest version holds, where that is damaged its copy. Raises OSError; ValueError
    where both are.
    """
    found: list[JsonObject] = []
    damage: ValueError | None = None
    for place in _places(paths):
        try:
            value = read_json(place)
        except ValueError as error:
            damage = error
            continue
        if value is not None:
            found.append(value)
    if damage is not None and not found:
        raise damage
    return max(found, key=_number, default={})


def _releases(paths: RunPaths) -> tuple[ReleaseRecord, ...]:
    return releases_in(known(observed(_newest, paths), {}))


def _number(value: JsonObject) -> int:
    number = value.get("version")
    if isinstance(number, int):
        return number
    return 0


def _refuse_newer(paths: RunPaths) -> None:
    """Raises NewerFileError where a newer tr11 has written the newest version, or its copy."""
    for place in _places(paths):
        try:
            why = why_only_read(read_json(place), HOLDS_SCHEMA)
        except ValueError:
            continue
        if why:
            raise NewerFileError(place, why)


# ----------------------------------------------------------------------------- what is written
def record_holds(
    directory: RunDirectory, numbers: Iterable[str], who: str, why: str, switch: str = ""
) -> None:
    """Put holds on record; `switch`: the kill switch or pause that a controller held them for.
    Raises OSError.

    A whole array that is on record stays so when some tasks of it are held again: a command and an
    attempt's controller may hold at once, and what only the first has named would be no one's.
    """
    wanted = tuple(numbers)
    if switch:
        more = {"switch": switch}
    else:
        more = {}
    fresh = [{"job": number, "who": who, "time": now(), "why": why, **more} for number in wanted]

    def change(value: JsonObject) -> JsonObject:
        kept = [
            {**entry, "job": name}
            for entry in _entries(value)
            for name in not_repeated((str(entry["job"]),), wanted)
        ]
        return _value([*kept, *fresh], releases_in(value))

    _commit(directory, change)


def forget_holds(directory: RunDirectory, numbers: Iterable[str]) -> None:
    """Take what was released off the record, and put on it when that was. Raises OSError."""
    gone = tuple(numbers)
    if not gone:
        return
    fresh = [ReleaseRecord(name, now()) for name in gone]

    def change(value: JsonObject) -> JsonObject:
        kept = [one for one in releases_in(value) if one.job not in gone]
        return _value(_less(_entries(value), gone), (*kept, *fresh))

    _commit(directory, change)


def _less(entries: list[JsonObject], gone: tuple[str, ...]) -> list[JsonObject]:
    """The entries of what is held, less what these names cover."""
    return [
        {**entry, "job": name} for entry in entries for name in without((str(entry["job"]),), gone)
    ]


def _value(entries: list[JsonObject], releases: Iterable[ReleaseRecord]) -> JsonObject:
    released = [document(one) for one in releases][-MOST_RELEASES_KEPT:]
    return {"holds": entries, **({"released": released} if released else {})}


def _commit(directory: RunDirectory, change: Callable[[JsonObject], JsonObject]) -> None:
    """Put in place what `change` makes of the newest version; again, where another machine was
    faster.

    Raises OSError; NewerFileError where a newer tr11 has written it.
    """
    paths = directory.paths

    def read() -> tuple[int, JsonObject]:
        _refuse_newer(paths)
        try:
            value = _newest(paths)
        except ValueError:
            # what is damaged is replaced; what cannot be read now may hold others' holds
            value = {}
        return _number(value), value

    with_reserve(directory, partial(_versions(paths).commit, read, change, _text_of))


def _text_of(number: int, value: JsonObject) -> str:
    """One version's text; `by` tells it from one of the same content that another machine writes."""
    whole = {"by": secrets.token_hex(4), **value, "schema": HOLDS_SCHEMA, "version": number}
    return json_text(whole)


def _entries(value: JsonObject) -> list[JsonObject]:
    found = value.get("holds", [])
    return [entry for entry in found if isinstance(entry, dict) and "job" in entry]


def _name(value: Any) -> str:
    """A name of jobs, whole: that of many single tasks is long."""
    return "".join(character for character in str(value) if character.isprintable())


def _text(value: Any) -> str:
    return one_line(str(value or ""))
