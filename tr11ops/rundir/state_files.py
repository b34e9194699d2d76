"""Every small file that a run keeps, what becomes of one that is damaged, and how it is moved out
of the way.

A damaged file is empty, torn, binary, a folder, a pipe, a link in a circle, far too large, or of
another format. It is named with its path wherever it is met (`trainer.contract.state_file` reads
them all), it stops nothing for good, and what is moved is renamed, never removed. What the file
system does not let anyone see (no rights, no answer) is not damage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tr11ops.base.observed import known, observed, why_only_read
from tr11ops.rundir import journal
from tr11ops.rundir.attempts import AttemptVerdict, KeptStacks, LaunchRecord, TrainerLife
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission, id_in
from trainer.contract.attempt import EndMarker, ExitTime, Heartbeat
from trainer.contract.documents import read_record
from trainer.contract.errors import DamagedFile
from trainer.contract.origin import BranchOrigin
from trainer.contract.record import Record
from trainer.contract.state_file import (
    LARGEST_BYTES,
    is_damage,
    open_for_reading,
    read_json,
    set_aside,
)


class Damage(Record):
    """One damaged state file: where, what is wrong with it, and what is missing for it.

    `is_set_aside`: the next launch, or the watchdog when it acts, moves it out of the way.
    `is_newer`: nothing is wrong with it, but a newer tr11 wrote it, and this one may not understand
    all of it.
    """

    path: str
    what: str
    without: str
    is_set_aside: bool
    is_newer: bool = False


Rule = Literal["aside", "written again", "a person"]
MOST_ATTEMPTS = 3  # the newest: what older ones say is history
MOST_LISTED = 4096  # entries of one folder that are looked at
KNOWN_SCHEMA = 1  # of each of these files, today
SET_ASIDE = "state-file-set-aside"


class StateFile(Record):
    """One kind of file, as a pattern below the run directory ({variant} and {logs} stand for the
    run's).

    `rule`: a damaged one is set "aside" by the next launch, or by the watchdog when it acts; or its
    writer replaces it ("written again"), and readers take an older version or do without; or "a
    person" must look. `without` says what is missing until then. `read` raises ValueError for what
    has not its format, as those do who need the file; `read_json`: any JSON object will do, since
    its readers do without what they miss in it, or are of a room above. None: lines, of which bad
    ones are passed over, so that only something else than a file is damage.
    """

    pattern: str
    rule: Rule
    without: str
    read: Callable[[Path], Any] | None = read_json
    largest: int | None = None  # of lines, where more than that is not read


# Readers that few runs need when someone looks: of files that are not there.
def _exclusions(path: Path) -> None:
    from tr11ops.rundir.exclusions import version_in

    version_in(path)


def _cron_record(path: Path) -> None:
    from tr11ops.rundir.cron_records import read_state

    read_state(path)


def _copy(path: Path) -> None:
    """Status looks at hundreds of sound ones, and needs nothing else of their module."""
    if not isinstance((read_json(path) or {}).get("location"), str):
        from tr11ops.rundir.copies import read_copy

        read_copy(path)


def _drill(path: Path) -> None:
    from tr11ops.rundir.copies import DrillRecord

    read_record(DrillRecord, path, "the record of a drill")


def _pins(path: Path) -> None:
    pins = (read_json(path) or {}).get("pins")
    if not isinstance(pins, list) or not all(isinstance(pin, dict) for pin in pins):
        raise DamagedFile(path, "is not a list of pins: restore it")


def _digests(path: Path) -> None:
    from tr11ops.rundir.checkpoint_digests import DigestRecord

    read_record(DigestRecord, path, "a record of digests")


def _numbers(path: Path) -> None:
    from tr11ops.rundir.checkpoint_digests import NotFiniteRecord

    read_record(NotFiniteRecord, path, "a record of numbers")


def _roll_backs(path: Path) -> None:
    from trainer.contract.recovery import tables_in

    read_json(path)
    tables_in(path)


STATE_FILES: tuple[StateFile, ...] = (
    StateFile(
        "state/submissions/*/submission.json",
        "aside",
        "its job is found by its comment",
        Submission.read,
    ),
    StateFile("state/submissions/*/card.json", "aside", "tasks of that launch cannot start"),
    StateFile(
        "state/submissions/*/versions.json", "aside", "the versions of that launch are not known"
    ),
    StateFile(
        "state/attempts/*/attempt.json", "aside", "that attempt's nodes and start are not known"
    ),
    StateFile(
        "state/attempts/*/card.json", "aside", "what changed since that attempt is not known"
    ),
    StateFile(
        "state/attempts/*/end.json",
        "aside",
        "how that attempt ended is taken from its verdict",
        EndMarker.read,
    ),
    StateFile(
        "state/attempts/*/verdict.json",
        "aside",
        "why that attempt ended is not known",
        partial(read_record, AttemptVerdict, what="a verdict"),
    ),
    StateFile(
        "state/attempts/*/launches/*.json",
        "aside",
        "whom that launch blamed is not known",
        partial(read_record, LaunchRecord, what="a launch"),
    ),
    StateFile(
        "state/attempts/*/nodes/*.json", "aside", "what the checks of that node found is not known"
    ),
    StateFile(
        "state/attempts/*/failures/*.json", "aside", "what that worker said of its end is not known"
    ),
    StateFile(
        "state/attempts/*/stacks/verdict.json",
        "written again",
        "who held that hang up is not known",
        partial(read_record, KeptStacks, what="a record of who held a hang up"),
    ),
    StateFile(
        "state/attempts/*/life/*.json",
        "written again",
        "whether that node's trainer lives is not known, and it is not ended for a hang",
        partial(read_record, TrainerLife, what="what a keeper sees of its trainer"),
    ),
    StateFile(
        "state/attempts/*/exit-time.json",
        "written again",
        "the trainer leaves by the time that it knew",
        ExitTime.read,
    ),
    StateFile(
        "state/attempts/*/trainer-start.json",
        "written again",
        "the nodes of a launch that begins wait for the next one",
    ),
    StateFile(
        "state/attempts/*/trainer-stop.json",
        "written again",
        "the nodes of a launch go on until they are ended",
    ),
    StateFile(
        "state/attempts/*/phases.jsonl", "aside", "that attempt's phases are not known", None
    ),
    StateFile(
        "state/watched.json",
        "a person",
        "nothing more is heard of a job that is only watched",
    ),
    StateFile(
        "state/run.json", "a person", "archives are not written to until it is restored", id_in
    ),
    StateFile(
        "state/kill-switch.json", "aside", "a kill switch that is not mounted is not noticed"
    ),
    StateFile("state/site.json", "aside", "jobs that Slurm has forgotten are not looked up"),
    StateFile(
        "state/exclusions.json",
        "written again",
        "the newest version in exclusions.d counts",
        _exclusions,
    ),
    StateFile(
        "state/exclusions.d/*.json",
        "written again",
        "the newest one counts, else exclusions.json",
        _exclusions,
    ),
    StateFile("state/heartbeat/*.json", "written again", "that rank shows no life", Heartbeat.read),
    StateFile(
        "state/lease/*.json",
        "written again",
        "its holder has no name: it counts while it is young",
    ),
    StateFile(
        "state/journal-heads.json", "written again", "a journal that was emptied is not noticed"
    ),
    StateFile(
        "state/acting/*.json",
        "written again",
        "its holder has no name: it counts for a while",
    ),
    StateFile(
        "state/requests/holds.json",
        "aside",
        "the newest version in holds.d counts, else attempts' verdicts",
    ),
    StateFile(
        "state/requests/holds.d/*.json", "written again", "the newest one counts, else holds.json"
    ),
    StateFile("state/requests/answer-*.json", "aside", "that request has no answer"),
    StateFile("state/alerts/book.json", "written again", "the versions in book.d count"),
    StateFile("state/alerts/book.d/*.json", "written again", "the version before counts"),
    StateFile("state/alerts/outbox/*.json", "aside", "that message is not sent"),
    StateFile(
        "state/cron/*.json", "aside", "that job's last round is not known: it is due", _cron_record
    ),
    StateFile(
        "state/cron/claims/*/*.json",
        "written again",
        "its owner has no name: it counts for ten minutes",
    ),
    StateFile(
        "state/drills/*.json",
        "aside",
        "what that drill proved is not known: a stop in order counts as not proved",
    ),
    StateFile("state/sync/state.json", "aside", "what the hub has is asked of it again"),
    StateFile("state/sync/status.json", "aside", "the last success is not known"),
    StateFile(
        "state/sync/public.json", "aside", "a person is asked again whether the logs may be public"
    ),
    StateFile("state/backup/status.json", "aside", "the last success is not known"),
    StateFile("state/backup/archives/*.json", "written again", "the last round there is not known"),
    StateFile("state/backup/drill.json", "aside", "whether a restore works is not known", _drill),
    StateFile(
        "state/backup/copies/*/*.json",
        "aside",
        "that copy is not on record: its receipt makes it again",
        _copy,
    ),
    StateFile("state/backup/logs/*.json", "aside", "the logs are compared with their copies again"),
    StateFile(
        "state/checkpoints/{variant}/digests/*.json",
        "aside",
        "that checkpoint's bytes were not read",
        _digests,
    ),
    StateFile(
        "state/checkpoints/{variant}/seals/*.json",
        "written again",
        "all bytes of what is held are read before it is put back",
    ),
    StateFile(
        "state/checkpoints/{variant}/starts/*.json",
        "a person",
        "what of an earlier start counts is not known, and no start is begun; look at its folder",
    ),
    StateFile(
        "state/checkpoints/{variant}/not-finite/*.json",
        "aside",
        "that checkpoint's numbers were not looked at",
        _numbers,
    ),
    StateFile(
        "state/checkpoints/{variant}/pins.json",
        "written again",
        "the newest version in pins.d counts",
        _pins,
    ),
    StateFile(
        "state/checkpoints/{variant}/pins.d/*.json",
        "a person",
        "nothing is removed: which checkpoints are pinned is not known",
        _pins,
    ),
    StateFile(
        "state/checkpoints/{variant}/origin.json",
        "aside",
        "what the training had begun with is not known",
        BranchOrigin.of_file,
    ),
    StateFile(
        "state/filesystems/usage.jsonl",
        "aside",
        without="how full the file systems were is not known",
        read=None,
        largest=LARGEST_BYTES,
    ),
    StateFile(
        "state/corruption/*.json",
        "aside",
        "whom that check of the arithmetic suspected is not known",
    ),
    StateFile(
        "state/recovery.json",
        "a person",
        "nothing is resumed: which data to skip is not known",
        _roll_backs,
    ),
    StateFile(
        "journal/*.jsonl",
        "aside",
        without="what it said is not known; writers go on in another file",
        read=None,
        largest=journal.LARGEST_BYTES,
    ),
    StateFile("{logs}/metrics.jsonl", "aside", "steps are taken from main_log.txt", None),
    StateFile("{logs}/main_log.txt", "aside", "the log begins again", None),
)


def find_damage(directory: RunDirectory) -> tuple[Damage, ...]:
    """The damaged state files of a run, in the order of the table. What cannot be seen is left out."""
    return tuple(
        damage
        for entry in STATE_FILES
        for path in _places(directory, entry.pattern)
        if (damage := _judged(path, entry)) is not None
    )


def _judged(path: Path, entry: StateFile) -> Damage | None:
    """What is wrong with a file; None for nothing. One of a newer tr11 stays where it is, whatever
    it holds.
    """
    what = _damage(path, entry)
    if entry.read is not None:
        words = why_only_read(known(observed(read_json, path), None), KNOWN_SCHEMA)
        if words:
            return Damage(
                str(path), words, "use that tr11 to change it", is_set_aside=False, is_newer=True
            )
    if what:
        return Damage(str(path), what, entry.without, is_set_aside=entry.rule == "aside")
    return None


def set_damage_aside(directory: RunDirectory, who: str) -> tuple[str, ...]:
    """Move damaged files whose rule says so out of the way, each with an entry in the journal; a
    line for each.

    The caller has the launch lock or the watchdog's turn. What cannot be moved stays, and is said.
    """
    lines = []
    for damage in find_damage(directory):
        if not damage.is_set_aside:
            continue
        try:
            target = set_aside(Path(damage.path))
        except OSError as error:
            lines.append(
                f"{damage.path} {damage.what}, and cannot be set aside: {error.strerror or error}"
            )
            continue
        lines.append(f"{damage.path} {damage.what}: set aside as {target.name}; {damage.without}")
        with suppress(OSError):  # the new name says it too
            data = {"path": damage.path, "now": str(target)}
            Journal(directory.journal).write(SET_ASIDE, damage.what, data, who)
    return tuple(lines)


def _damage(path: Path, entry: StateFile) -> str:
    """What is wrong with a file; "" for nothing, and where it cannot be seen."""
    try:
        (entry.read or _lines_within(entry.largest))(path)
    except DamagedFile as error:
        return error.what
    except OSError as error:
        if path.is_symlink():
            loop = "is a link that leads back to itself"
        else:
            loop = str(error.strerror)
        if is_damage(error):
            return loop
        return ""
    except (ValueError, TypeError, KeyError) as error:
        return f"is not what belongs there: {' '.join(str(error).split())}"
    return ""


def _lines_within(largest: int | None) -> Callable[[Path], None]:
    def look(path: Path) -> None:
        with open_for_reading(path) as stream:
            size = os.fstat(stream.fileno()).st_size
        if largest is not None and size > largest:
            raise DamagedFile(path, f"has {size:,} bytes, more than any such file has")

    return look


def _places(directory: RunDirectory, pattern: str) -> Iterator[Path]:
    paths = directory.paths
    logs = paths.logs.relative_to(paths.root).as_posix()
    parts = pattern.format(variant=paths.variant, logs=logs).split("/")
    newest: tuple[str, ...] | None = None
    if parts[:2] == ["state", "attempts"]:
        try:
            newest = tuple(directory.attempt_ids()[-MOST_ATTEMPTS:])
        except OSError:
            return
    yield from _matching(paths.root, parts, newest)


def _matching(folder: Path, parts: list[str], newest: tuple[str, ...] | None) -> Iterator[Path]:
    head, rest = parts[0], parts[1:]
    if "*" not in head:
        if os.path.lexists(folder / head):
            names = [head]
        else:
            names = []
    elif head == "*" and newest is not None and folder.name == "attempts":
        names = list(newest)
    else:
        begin, end = head.split("*")
        try:
            names = sorted(
                name
                for name in os.listdir(folder)[:MOST_LISTED]  # noqa: PTH208  a name is enough
                if name.startswith(begin) and name.endswith(end) and not name.startswith(".")
            )
        except OSError:
            return
    for name in names:
        if rest:
            yield from _matching(folder / name, rest, newest)
        else:
            yield folder / name
