"""Whether a run is free to start in its directory: room, rights, clocks, stop switches, no one else
in it, and the folders for its copies. What is looked up, and the checks of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.backup.archives import folder_fault, folder_of, is_folder, overlap, same_device
from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.base.units import duration, size
from tr11ops.observe.files import read_heartbeats
from tr11ops.observe.jobs import ENDED_SECONDS, ways_to_see
from tr11ops.runcard.card import OwnCard, PathBase, RunCard
from tr11ops.runcard.check import Level, PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.state_files import Damage
from trainer.contract.files import file_system_time, user_of
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.schedule.flops import checkpoint_bytes, count_parameters, deepspeed_checkpoint_files

if TYPE_CHECKING:
    from tr11ops.launch.facts import LaunchFacts


CHECKPOINTS_OF_ROOM = 2
RECENT_BEATS_SECONDS = 7 * 86400.0
CLOCK_SECONDS = 5.0  # beyond this, times in logs and records of two nodes cannot be put in order


# ----------------------------------------------------------------------------- what is there
class DirectoryFacts(Record):
    """Whether the run directory can be written to. `fault` is empty when it can, or could be made.

    `free_inodes` is None where the file system does not count them. `missing_parents`: folders
    above the run directory that are not there, the highest first; a launch makes them.
    """

    fault: str
    free_bytes: Observed[int]
    free_inodes: Observed[int | None] = None
    missing_parents: tuple[Path, ...] = ()


def look_at_directory(directory: RunDirectory) -> DirectoryFacts:
    """Look at the folders that the run writes to, or at the nearest existing parent of those that
    are missing.
    """
    paths = directory.paths
    fault = ""
    for wanted in (directory.root, paths.state, paths.checkpoints, paths.logs, directory.journal):
        folder = _nearest(wanted)
        if not folder.is_dir():
            fault = f"{folder} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} cannot be written to"
        if fault:
            break
    nearest = _nearest(paths.checkpoints)
    free = observed(lambda: shutil.disk_usage(nearest).free)
    missing = tuple(
        parent for parent in reversed(directory.root.parents) if not os.path.lexists(parent)
    )
    return DirectoryFacts(fault, free, observed(_free_inodes, nearest), missing)


def _free_inodes(path: Path) -> int | None:
    counted = os.statvfs(path)
    if counted.f_files:
        return counted.f_favail
    return None


def _nearest(path: Path) -> Path:
    """The path itself if something is there, else its nearest parent that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


# What is compared, how many seconds it is ahead (below zero: behind), and against what.
ClockDifference = tuple[str, float, str]
# One folder or file of the run that the group cannot work with, its fault, and whose it is.
AccessFault = tuple[Path, str, str]


def compared_clocks(directory: RunDirectory, moment: float) -> tuple[ClockDifference, ...]:
    """Clocks that can be compared; on a run directory that is still to be made, or read-only, there
    is none of here.
    """
    found = list(read_clocks(directory.paths, moment))
    try:
        found.append(clock_of_file_system(directory.paths.state))
    except OSError:
        # no files without names on this file system: the nodes' heartbeats remain
        return tuple(found)
    return tuple(found)


def read_clocks(paths: RunPaths, now: float) -> tuple[ClockDifference, ...]:
    """Each node's clock at its newest heartbeat, against the file system's, which stamped the same
    file.

    Heartbeats of more than a week ago are left out: clocks change. One entry a host.
    """
    beats, _ = read_heartbeats(paths)
    newest: dict[str, ClockDifference] = {}
    for beat in sorted(known(beats, ()), key=lambda beat: beat.time):
        if now - beat.time > RECENT_BEATS_SECONDS:
            continue
        try:
            stamp = paths.heartbeat(beat.rank).stat().st_mtime
        except FileNotFoundError:
            continue
        newest[beat.host] = (f"node {beat.host}", beat.time - stamp, "the file system")
    return tuple(newest[host] for host in sorted(newest))


def clock_of_file_system(folder: Path) -> ClockDifference:
    """This machine's clock against the file system's. Raises OSError where nothing can be written."""
    here, stamped = file_system_time(folder)
    return "this machine", here - stamped, "the file system"


def read_access(directory: RunDirectory) -> tuple[AccessFault, ...]:
    """The folders of the run in which the group cannot write, or whose new files would get another
    group.
    """
    paths = directory.paths
    wanted = (
        directory.root,
        paths.state,
        paths.attempts,
        directory.submissions,
        paths.checkpoints,
        paths.logs,
    )
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
            found.append((folder, ", ".join(faults), user_of(status.st_uid)))
    return tuple(found)


# ----------------------------------------------------------------------------- room, rights, clocks
def base_checks(base: PathBase, directory: RunDirectory) -> Iterator[PreflightCheck]:
    """A warning where the run goes on from the folder that its paths were once taken from, and not
    from its card's.
    """
    if base.reason == "recorded":
        rule = f"this run was launched from {base.folder}: relative paths begin there, not in the card's folder"
        yield warning(
            "paths",
            rule,
            f'write directory = "{directory.root}" and the other paths in full into the card',
        )


def not_mounted(directory: RunDirectory, why: str) -> PreflightCheck:
    """The run directory that is seen is not the run's: what it has, and from what it would start,
    is unknown.
    """
    fix = (
        f"mount it, then launch again ({ways_to_see(directory)}); if you removed it yourself, cancel what is queued and"
        f" wait {duration(ENDED_SECONDS)}, or choose another run.directory"
    )
    return PreflightCheck(Level.UNKNOWN, "run.directory", text=why, fix=fix, exit_code=3)


def directory_checks(
    card: RunCard, directory: RunDirectory, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    """The folder's name, rights, and room for the next checkpoints. Nothing else is looked at in
    one that is faulty.
    """
    odd = next((character for character in "\\%" if character in str(directory.root)), None)
    if odd is not None:
        rule = f"{directory.root} holds a {odd!r}, which Slurm reads as a pattern in the names of its output files"
        yield refused("run.directory", rule, "choose a path without it", 2)
    if facts.directory.fault:
        yield refused(
            "run.directory",
            facts.directory.fault,
            "choose another run.directory, or ask its owner for write access",
        )
        return
    yield from _space_checks(card, directory, facts)
    yield from _inode_checks(card, directory, facts)
    yield from _access_checks(directory, facts)
    yield from _clock_checks(facts)


def bytes_of_a_save(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> int | None:
    """Bytes that one checkpoint takes: as many as the run's newest; else what a stand-in is told to
    write, or what the card's model has to. None where nothing says it.
    """
    seen = known(facts.checkpoints, None)
    if (
        seen is not None
        and seen.found.manifest is not None
        and seen.source.folder == directory.paths.checkpoints
    ):
        return seen.found.manifest.total_bytes
    if not isinstance(card, OwnCard):
        return None
    if card.rehearsal is not None:
        return card.rehearsal.bytes_per_rank * card.world_size
    return checkpoint_bytes(card, count_parameters(card).total)


def _space_checks(
    card: RunCard, directory: RunDirectory, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    each = bytes_of_a_save(card, directory, facts)
    free = facts.directory.free_bytes
    if isinstance(free, Unknown):
        yield warning(
            "space", f"the free space below {directory.root} could not be read ({free.why})"
        )
        return
    if each is None:
        text = f"{size(free)} free; what a checkpoint takes is seen with the first one"
        yield ok("directory", f"{directory.root}: {text}")
        return
    needed = CHECKPOINTS_OF_ROOM * each
    if free < needed:
        rule = f"{size(free)} free below {directory.root}, two checkpoints need {size(needed)}"
        yield refused("space", rule, "remove old checkpoints, or choose another run.directory")
    else:
        yield ok(
            "directory", f"{directory.root}: {size(free)} free, a checkpoint takes {size(each)}"
        )


def files_of_checkpoint(card: OwnCard) -> int:
    """Files of one checkpoint at most, in either layout: each worker writes its own, besides a few
    of the whole.
    """
    layout = deepspeed_checkpoint_files(
        card.model.layers, card.parallel.tensor, card.parallel.pipeline, card.data_parallel_degree
    )
    return layout.total + 2 * card.world_size + 16


def _inode_checks(
    card: RunCard, directory: RunDirectory, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    if not isinstance(card, OwnCard):
        return
    free = facts.directory.free_inodes
    needed = CHECKPOINTS_OF_ROOM * files_of_checkpoint(card)
    if isinstance(free, Unknown):
        yield warning(
            "inodes", f"the free inodes below {directory.root} could not be read ({free.why})"
        )
    elif free is not None and free < needed:
        rule = f"{free:,} inodes are free below {directory.root}, two checkpoints need up to {needed:,}"
        yield refused(
            "inodes", rule, "remove old checkpoints or other files, or choose another run.directory"
        )


def _access_checks(directory: RunDirectory, facts: LaunchFacts) -> Iterator[PreflightCheck]:
    access = facts.access
    if isinstance(access, Unknown):
        yield warning("permissions", f"they could not be read ({access.why})")
        return
    for path, fault, owner in access[:1]:
        more = ""
        if len(access) > 1:
            more = f" (and {len(access) - 1} more)"
        rule = f"{path} is {fault}{more}: others of the group cannot keep the run going"
        fix = "repair it with `tr11 perms fix`"
        yield warning(
            "permissions",
            rule,
            fix if owner == facts.user else f"{fix}, typed by {owner}",
        )


def _clock_checks(facts: LaunchFacts) -> Iterator[PreflightCheck]:
    compared = list(known(facts.clocks, ()))
    site = known(facts.site, None)
    if site is not None and site.clock is not None:
        compared.append(("this machine", facts.time - site.clock, "the scheduler"))
    wrong = [entry for entry in compared if abs(entry[1]) > CLOCK_SECONDS]
    for what, ahead, against in wrong[:3]:
        side = "ahead of" if ahead > 0 else "behind"
        rule = f"the clock of {what} is {abs(ahead):.0f} s {side} that of {against}"
        yield warning(
            "clocks",
            rule,
            "ask the site to synchronise it; times in the records cannot be compared",
        )
    if compared and not wrong:
        yield ok("clocks", f"{len(compared)} compared, all within {CLOCK_SECONDS:g} s")


# ----------------------------------------------------------------------------- stop switches and
# other trainers
def switch_checks(directory: RunDirectory, facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """Nothing stops the run, and no other trainer is in its directory."""
    switch = facts.kill_switch
    location = facts.switch_location
    if isinstance(location, Unknown):
        yield unknown("kill switch", f"its place cannot be seen ({location.why})")
    elif location.other_run:
        rule = f"{directory.kill_switch} belongs to another run, {location.other_run}"
        yield refused(
            "run.kill_switch",
            rule,
            "leave run.kill_switch out, or name a file of this run's own",
            2,
        )
    elif location.fault and facts.switch_was_marked:
        yield unknown("kill switch", f"{directory.kill_switch}: {location.fault}")
    elif location.fault:
        fix = f"mount it, or make it: mkdir -p {shlex.quote(str(directory.kill_switch.parent))}"
        yield refused("kill switch", f"{directory.kill_switch}: {location.fault}", fix)
    is_ours = not isinstance(location, Unknown) and not (location.other_run or location.fault)
    if isinstance(switch, Unknown):
        if is_ours and not facts.directory.fault:
            yield unknown("kill switch", f"{directory.kill_switch} cannot be seen ({switch.why})")
    elif switch is not None:
        by = ""
        if switch.who:
            by = f" by {switch.who}"
        why = ""
        if switch.why:
            why = f" ({switch.why})"
        yield refused(
            "kill switch",
            f"{directory.kill_switch} is set{by}{why}",
            "release it with `tr11 resume`",
        )
    elif is_ours:
        yield ok("kill switch", "not set")
    if facts.pause is not None:
        yield refused(
            "pause", f"the run is paused by {facts.pause}", "let it go on with `tr11 resume`"
        )


def damage_checks(damaged: Iterable[Damage]) -> Iterator[PreflightCheck]:
    """Damaged state files stop no launch: those that it moves out of the way are named, and those
    that it leaves.
    """
    for entry in damaged:
        rule = f"{entry.path} {entry.what}: {entry.without}"
        fix = "the launch sets it aside" if entry.is_set_aside else "runbooks/damaged-state.md"
        yield warning("state file", rule, fix)


def holder_checks(
    card: RunCard, directory: RunDirectory, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    """No trainer that the scheduler does not know of is at work in the run directory."""
    holder = known(facts.holder, None)
    # the queue checks judge these
    told = {number for job in known(facts.jobs, ()) for number in (job.raw_id, job.job_id)}
    if holder is not None and holder.job_id not in told and not holder.is_of(facts.host):
        rule = f"a trainer holds this run's lease and lives: {holder.text}"
        yield refused(
            "lease",
            rule,
            "stop it first (`tr11 kill`); where its machine is gone, wait some seconds",
        )
    last = max(known(facts.submissions, ()), key=lambda entry: entry.tag, default=None)
    if last is not None and last.run not in {"", card.run.name}:
        rule = f"{directory.root} was last used by run {last.run}, launched by {last.user}"
        yield warning("run.directory", rule, "give each run a directory of its own")


# ----------------------------------------------------------------------------- folders for copies
def archive_checks(card: RunCard) -> Iterator[PreflightCheck]:
    """Refuses an archive that is the run directory by whatever name, warns of one on the same file
    system, and of one that no round could use now. What lies behind a network is not asked.
    """
    for key in ("store", "url"):
        address = getattr(card.backup, key)
        if address is None or not is_folder(address):
            continue
        folder = folder_of(address)
        shared = overlap(folder, card.paths)
        if shared:
            rule = f"{folder}: {shared}, so a copy there is no copy"
            yield refused(f"backup.{key}", rule, "name a folder of another file system", 2)
        elif fault := folder_fault(key, card):
            yield warning(f"backup.{key}", f"nothing can be copied there: {fault}")
        elif same_device(folder, card.paths):
            rule = f"{folder} lies on the file system of the run directory: one fault takes both"
            yield warning(f"backup.{key}", rule, "name a folder of another file system")
