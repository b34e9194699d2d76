"""Whether the run directory is fit for the run: room, rights, clocks, and no one else in it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration, size
from tr11ops.launch.facts import LaunchFacts
from tr11ops.observe.mounted import ENDED_SECONDS, ways_to_see
from tr11ops.runcard.card import PathBase, RunCard
from tr11ops.runcard.check import Level, PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.damage import Damage
from tr11ops.rundir.paths import RunDirectory
from trainer.schedule.flops import checkpoint_bytes, count_parameters, deepspeed_checkpoint_files

CHECKPOINTS_OF_ROOM = 2
CLOCK_SECONDS = 5.0  # beyond this, times in logs and records of two nodes cannot be put in order


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
    return PreflightCheck(Level.UNKNOWN, "run.directory", why, fix, 3)


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


def bytes_of_a_save(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> int:
    """Bytes that one checkpoint takes: as many as the run's newest; else what a stand-in is told to
    write, or what the card's model has to.
    """
    seen = known(facts.checkpoints, None)
    if (
        seen is not None
        and seen.found.manifest is not None
        and seen.source.folder == directory.paths.checkpoints
    ):
        return seen.found.manifest.total_bytes
    if card.rehearsal is not None:
        return card.rehearsal.bytes_per_rank * card.world_size
    count = count_parameters(card.model, card.tokenizer.padded_vocabulary_size)
    return checkpoint_bytes(count.total, card.precision, card.optimizer)


def _space_checks(
    card: RunCard, directory: RunDirectory, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    each, free = bytes_of_a_save(card, directory, facts), facts.directory.free_bytes
    needed = CHECKPOINTS_OF_ROOM * each
    if isinstance(free, Unknown):
        yield warning(
            "space", f"the free space below {directory.root} could not be read ({free.why})"
        )
    elif free < needed:
        rule = f"{size(free)} free below {directory.root}, two checkpoints need {size(needed)}"
        yield refused("space", rule, "remove old checkpoints, or choose another run.directory")
    else:
        yield ok(
            "directory", f"{directory.root}: {size(free)} free, a checkpoint takes {size(each)}"
        )


def files_of_checkpoint(card: RunCard) -> int:
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
    free, needed = facts.directory.free_inodes, CHECKPOINTS_OF_ROOM * files_of_checkpoint(card)
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
    for entry in access[:1]:
        more = ""
        if len(access) > 1:
            more = f" (and {len(access) - 1} more)"
        rule = f"{entry.path} is {entry.fault}{more}: others of the group cannot keep the run going"
        fix = "repair it with `tr11 perms fix`"
        yield warning(
            "permissions",
            rule,
            fix if entry.owner == facts.user else f"{fix}, typed by {entry.owner}",
        )


def _clock_checks(facts: LaunchFacts) -> Iterator[PreflightCheck]:
    clocks = known(facts.clocks, ())
    compared = [(clock.what, clock.ahead, clock.against) for clock in clocks]
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
    location = switch.location
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
    elif location.fault and switch.was_marked:
        yield unknown("kill switch", f"{directory.kill_switch}: {location.fault}")
    elif location.fault:
        fix = f"mount it, or make it: mkdir -p {shlex.quote(str(directory.kill_switch.parent))}"
        yield refused("kill switch", f"{directory.kill_switch}: {location.fault}", fix)
    is_ours = not isinstance(location, Unknown) and not (location.other_run or location.fault)
    if switch.is_set:
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
    told = {
        number for job in known(facts.jobs, ()) for number in (job.raw_id, job.job_id)
    }  # the queue checks judge these
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


def short(names: Iterable[str], most: int = 4) -> str:
    """A few names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (
        f" and {len(listed) - most} more" if len(listed) > most else ""
    )
