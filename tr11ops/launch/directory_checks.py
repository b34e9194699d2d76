"""Whether a run is free to start in its directory: room, rights, clocks, no one else in it, and no
job of it that runs or waits elsewhere. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration, size
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, JobState
from tr11ops.launch.facts import LaunchFacts, LaunchRequest
from tr11ops.observe.ownership import ENDED_SECONDS, own_jobs, ways_to_see, without_unclear
from tr11ops.runcard.card import PathBase, RunCard
from tr11ops.runcard.check import Level, PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.paths import (
    BEING_SUBMITTED,
    DAMAGED,
    RunDirectory,
    Submission,
    is_in_doubt,
    job_of_tag,
)
from tr11ops.rundir.state_files import Damage
from trainer.schedule.flops import checkpoint_bytes, count_parameters, deepspeed_checkpoint_files

# Whether a run is free to start: what of it runs or waits already, here and elsewhere. Pure.


def queue_checks(
    directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    """Checks that nothing of this run could train beside what is launched now."""
    if isinstance(facts.jobs, Unknown):
        yield unknown("queue", f"the scheduler did not say what is queued ({facts.jobs.why})")
        return
    if isinstance(facts.submissions, Unknown):
        yield unknown("queue", f"earlier submissions could not be read ({facts.submissions.why})")
        return
    if isinstance(facts.foreground, Unknown):
        yield unknown("queue", f"earlier attempts could not be read ({facts.foreground.why})")
        return
    for place in facts.foreground:
        yield refused(
            "queue", f"this run is already running: {place}", "stop it first (`tr11 kill`)"
        )
    for place in facts.elsewhere:
        yield refused(
            "queue",
            f"this run is already queued or running: {place}",
            "stop it first (`tr11 kill`)",
        )
    found, namesakes = own_jobs(directory, facts.jobs, facts.submissions, facts.scheduler)
    names = set(request.replaces)
    replaced = [job for job in found if {job.job_id, job.raw_id, array_number(job)} & names]
    ours = [job for job in found if job not in replaced]
    namesakes, unclear = without_unclear(namesakes, tuple(facts.submissions))
    if unclear and not request.beside_namesakes:
        yield unknown("queue", unclear)
    yield from _namesake_checks(namesakes, request, facts.user)
    yield from _lost_checks(facts, facts.jobs)
    doubtful = [job for job in ours if job.state is JobState.UNKNOWN]
    if doubtful:
        yield unknown("queue", f"the state of job {doubtful[0].job_id} of this run is unknown")
    elif request.after is None:
        yield from _first_in_line(ours, replaced, facts.user)
    else:
        yield from _behind(request.after, ours, facts)


def _namesake_checks(
    namesakes: Iterable[Job], request: LaunchRequest, user: str
) -> Iterator[PreflightCheck]:
    """A user's own job of the same name is most likely this very run, launched from another folder
    or another card.
    """
    for job in namesakes:
        if job.user != user or request.beside_namesakes:
            yield warning(
                "queue", f"job {job.job_id} of {job.user} has the same name, but is not of this run"
            )
            continue
        state = "running" if job.state.is_active else "queued"
        where = job.working_directory or "another run directory"
        yield refused(
            "namesake",
            f"your job {job.job_id} has this run's name and is {state} in {where}",
            "if that is the run you mean, give its card or its folder; a second training of that name takes"
            " --allow-namesake, or a run.name of its own",
        )


# ----------------------------------------------------------------------------- submissions whose
# answer was lost
SUBMITTING_SECONDS = 150.0  # a client that still submits has been at it for less


def without_trace(facts: LaunchFacts, jobs: Iterable[Job]) -> list[Submission]:
    """The submissions in doubt of which neither the queue nor the run directory knows a job."""
    listed, traces = tuple(jobs), known(facts.traces, {})
    doubtful = (entry for entry in known(facts.submissions, ()) if is_in_doubt(entry))
    return [entry for entry in doubtful if job_of_tag(entry.tag, listed, traces) is None]


def _lost_checks(facts: LaunchFacts, jobs: Iterable[Job]) -> Iterator[PreflightCheck]:
    if isinstance(facts.traces, Unknown):
        yield unknown(
            "queue", f"the records of the attempts could not be read ({facts.traces.why})"
        )
        return
    for entry in without_trace(facts, jobs):
        age = facts.time - entry.time
        if (
            entry.note == BEING_SUBMITTED
            and entry.host != facts.host
            and 0 <= age < SUBMITTING_SECONDS
        ):
            rule = f"{entry.user} has begun to launch this run on {entry.host} {duration(age)} ago"
            yield refused("queue", rule, f"look again in {duration(SUBMITTING_SECONDS - age)}")
        else:
            if entry.note.startswith(DAMAGED):
                lost = f"whose record is {entry.note}"
            else:
                lost = "whose answer was lost"
            rule = f"the scheduler has no trace of submission {entry.tag}, {lost}"
            yield warning("queue", rule, "if its job should come after all, it leaves at once")


# ----------------------------------------------------------------------------- the line
def _first_in_line(ours: list[Job], replaced: list[Job], user: str) -> Iterator[PreflightCheck]:
    if not ours:
        nothing, but = "nothing of this run is queued or running", ""
        if replaced:
            but = f" but {', '.join(job.job_id for job in replaced)}, in whose place this comes"
        yield ok("queue", f"{nothing}{but}")
        return
    job = max(ours, key=lambda entry: (entry.state.is_active, array_number(entry)))
    if job.user in {"", user}:
        whose = ""
    else:
        whose = f" of {job.user}"
    state = "running" if job.state.is_active else "queued"
    more = ""
    if len(ours) > 1:
        more = f" (and {len(ours) - 1} more)"
    last = max((array_number(entry) for entry in ours), key=_as_number)
    rule = f"this run is already {state}: job {job.job_id}{whose}{more}"
    yield refused(
        "queue", rule, f"queue behind it with `--after {last}`, or stop it with `tr11 kill`"
    )


def _behind(after: str, ours: list[Job], facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """With `--after`, everything of this run must be over when the new job starts: it is the
    target, or before it.
    """
    if isinstance(facts.after, Unknown):
        yield unknown(
            "--after", f"the scheduler did not say whether job {after} exists ({facts.after.why})"
        )
        return
    if facts.after is None:
        listed = ", ".join(sorted({array_number(job) for job in ours})) or "none"
        yield refused(
            "--after", f"the scheduler knows no job {after}", f"jobs of this run: {listed}", 2
        )
        return
    if array_number(facts.after) not in {array_number(job) for job in ours}:
        if facts.after.state.is_final:
            yield warning("--after", f"job {after} is over: the new one may start at once")
        else:
            yield warning("--after", f"job {after} ({facts.after.name}) is not of this run")
    whole_array = "_" not in after
    if whole_array:
        before = _all_before(array_number(facts.after), ours)
    else:
        before = set()
    beside = [job for job in ours if array_number(job) not in before]
    if beside:
        last = max((array_number(job) for job in ours), key=_as_number)
        rule = f"job {beside[0].job_id} of this run could run at the same time"
        yield refused("--after", rule, f"use `--after {last}`")
    else:
        yield ok("queue", f"starts after job {after}")


def _all_before(target: str, ours: list[Job]) -> set[str]:
    """The target and every submission that it waits for, however far back."""
    before, fresh = {target}, {target}
    while fresh:
        awaited = [
            re.sub(r"_\S*", "", job.dependency) for job in ours if array_number(job) in fresh
        ]
        fresh = {number for text in awaited for number in re.findall(r"\d+", text)} - before
        before |= fresh
    return before


def _as_number(text: str) -> tuple[int, str]:
    if text.isdecimal():
        return (int(text), "")
    return (0, text)


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
    switch, location = facts.kill_switch, facts.switch_location
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


def short(names: Iterable[str], most: int = 4) -> str:
    """A few names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (
        f" and {len(listed) - most} more" if len(listed) > most else ""
    )
