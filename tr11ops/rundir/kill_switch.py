"""Whether the kill switch that is seen from here is the run's: the same one that its trainers look
at.

    .NAME.run               beside a switch outside the run directory: the run that it belongs to, and the run's id
    state/kill-switch.json  in the run directory: that this mark was made, and where

A switch inside the run directory is where the run directory is. One outside may lie on a file
system that is not mounted here: its folder is then missing, or an empty mount point in which a
switch would stop no one. A launch and the start of an attempt leave the mark. Where the run
directory says that it was left and it is not seen, the place is not proven: no one is told that the
run is stopped, and no folder is made. A pause is a file in the run directory, always the run's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import NewerFileError
from tr11ops.base.observed import cause, replace_json
from tr11ops.rundir.paths import RunDirectory, run_id, short
from trainer.contract.documents import read_record, write_record
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import Record
from trainer.contract.state_file import read_json


def read_pause(directory: RunDirectory) -> str | None:
    """Who paused the run and why, in words; None when it is not paused. A file that cannot be read
    counts.
    """
    from trainer.contract.requests import read_request

    pause = read_request(directory.paths.pause, "pause")
    if pause is None:
        return None
    who = pause.who or "someone"
    if pause.why:
        return f"{who} ({pause.why})"
    return who


MARKED_FILE = "kill-switch.json"
MARKED_SCHEMA = 1
NEVER_MARKED = "its place was never marked as this run's; the next launch or attempt does that"


class SwitchLocation(Record):
    """What is known of a switch's place. `fault`: why it is not proven to be the run's, "" when
    nothing speaks against it; `note`: why it is believed without a mark; `other_run`: the directory
    of the run that it belongs to.
    """

    fault: str = ""
    note: str = ""
    other_run: str = ""


class SwitchMark(Record):
    """What lies beside a switch outside the run directory. `id`: the run's; "" where it had none
    then.
    """

    directory: str = ""
    run: str = ""
    variant: str = ""
    id: str = ""


def is_inside(directory: RunDirectory) -> bool:
    """Whether the switch lies in the run directory, by the real paths."""
    return (
        Path(os.path.realpath(directory.root))
        in Path(os.path.realpath(directory.kill_switch)).parents
    )


def look_at_switch(directory: RunDirectory) -> SwitchLocation:
    """Look at the place of the kill switch; nothing is made. Raises OSError or ValueError where it
    cannot be seen.
    """
    other = _surrounding_run(directory)
    if is_inside(directory) or other:
        return SwitchLocation(other_run=other)
    folder = directory.kill_switch.parent
    if not folder.is_dir():
        missing = f"{_missing(folder)} is not there: its file system is not mounted here, or it was never made"
        return SwitchLocation(
            f"{folder} is not a folder: no switch can lie there" if folder.exists() else missing
        )
    try:
        mark = read_record(SwitchMark, mark_of(directory.kill_switch), "the mark of a kill switch")
    except ValueError as error:
        return _judge_unmarked(directory, f"the mark beside it cannot be read: {error}")
    if mark is None:
        return _judge_unmarked(
            directory, f"no mark of this run lies beside it ({mark_of(directory.kill_switch)})"
        )
    return _judge_mark(directory, mark)


def _judge_mark(directory: RunDirectory, mark: SwitchMark) -> SwitchLocation:
    """By the id, which a moved run directory keeps; by the directory where one of the two has no
    id.
    """
    is_here = mark.directory == os.path.realpath(directory.root)
    if mark.directory and not is_here and Path(mark.directory).is_dir():
        return SwitchLocation(other_run=mark.directory)
    try:
        own = run_id(directory)
    except ValueError:
        own = ""
    if mark.id and own:
        is_here = mark.id == own
    if is_here:
        return SwitchLocation()
    return _judge_unmarked(directory, f"the mark beside it is of another run (id {short(mark.id)})")


def _judge_unmarked(directory: RunDirectory, why: str) -> SwitchLocation:
    """A run that was never marked goes by what is there, as it always did; one that was must find
    its mark.
    """
    try:
        record = read_json(directory.paths.state / MARKED_FILE) or {}
    except ValueError:
        return SwitchLocation(why)
    if record.get("kill_switch") == str(directory.kill_switch):
        return SwitchLocation(f"{why}: its file system is not mounted here")
    return SwitchLocation(note=NEVER_MARKED)


def place_fault(directory: RunDirectory) -> str:
    """Why the switch that is seen here is not known to be the run's, in one line; "" when it is."""
    try:
        location = look_at_switch(directory)
    except (OSError, ValueError) as error:
        return f"{directory.kill_switch}: {cause(error)}"
    if location.other_run:
        return f"{directory.kill_switch} belongs to another run, {location.other_run}"
    if location.fault:
        return f"{directory.kill_switch}: {location.fault}"
    return ""


def mark_switch(directory: RunDirectory, name: str) -> None:
    """Mark the place of the switch as this run's, and put that on record. Raises OSError,
    ValueError.

    The folder of the switch must be there: to make it would hide that its file system is not.
    """
    if is_inside(directory):
        return
    folder = directory.kill_switch.parent
    if not folder.is_dir():
        raise FileNotFoundError(2, "is not there: the kill switch cannot lie in it", str(folder))
    mark = SwitchMark(
        os.path.realpath(directory.root), name, directory.paths.variant, run_id(directory)
    )
    write_record(mark_of(directory.kill_switch), mark)
    marked = {"schema": MARKED_SCHEMA, "kill_switch": str(directory.kill_switch)}
    with suppress(NewerFileError):  # it says where the switch lies, too
        replace_json(directory.paths.state / MARKED_FILE, marked, MARKED_SCHEMA)


def mark_of(kill_switch: Path) -> Path:
    """The mark beside a kill switch outside the run directory: which run it belongs to."""
    return kill_switch.with_name(f".{kill_switch.name}.run")


def _surrounding_run(directory: RunDirectory) -> str:
    """The other run in whose directory the switch lies; "" when there is none."""
    root = Path(os.path.realpath(directory.root))
    for parent in Path(os.path.realpath(directory.kill_switch.parent) + "/x").parents:
        if parent == root:
            return ""
        if (parent / "state" / "submissions").is_dir():
            return str(parent)
    return ""


def _missing(folder: Path) -> Path:
    """The highest folder that is missing on the way to `folder`."""
    while not folder.parent.exists():
        folder = folder.parent
    return folder


def other_ways(
    directory: RunDirectory, job_ids: tuple[str, ...], command: str, is_slurm: bool
) -> tuple[str, ...]:
    """What stops the run without its switch, as commands to type. `command` is `tr11 pause` as it
    is typed here.
    """
    lines = [f"{command}   # nothing starts after this task"]
    for number in job_ids:
        # a task's own number may be the array's, by which Slurm would end every task
        label = read_attempt_label(directory.paths, number)
        lines.append(
            f"touch {directory.paths.stop_request(number)}   # job {label} saves and leaves"
        )
        if is_slurm:
            lines.append(f"scancel --signal=USR1 --batch {label}   # the same, through Slurm")
            lines.append(f"scancel {label}   # ends it at once, unsaved")
    return tuple(lines)
