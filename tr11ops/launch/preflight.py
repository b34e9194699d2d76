"""Whether a launch may go ahead: pure checks over observed facts. Each says what, why, and how to mend it.

Nothing here reads a file, asks a scheduler or looks at a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tr11ops.cluster.base import Job, JobState, Partition
from tr11ops.launch.facts import LaunchFacts, LaunchRequest
from tr11ops.runcard import RunCard
from tr11ops.runcard_checks import card_warnings
from tr11ops.rundir import RunDirectory, parse_comment
from tr11ops.snapshot import Unknown, known
from trainer.contract import Manifest, checkpoint_name
from trainer.model.flops import checkpoint_bytes, count_parameters

CHECKPOINTS_OF_ROOM = 2


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One line of the preflight. `exit_code` counts where the level is refused (1 needs a person, 2 wrong usage)."""

    level: Level
    name: str
    text: str
    fix: str = ""
    exit_code: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(name: str, text: str) -> Check:
    return Check(Level.OK, name, text)


def warning(name: str, text: str, fix: str = "") -> Check:
    return Check(Level.WARNING, name, text, fix)


def refused(name: str, text: str, fix: str, exit_code: int = 1) -> Check:
    return Check(Level.REFUSED, name, text, fix, exit_code)


def unknown(name: str, text: str) -> Check:
    return Check(Level.UNKNOWN, name, text, "nothing was submitted; try again when it answers", 3)


def preflight(card: RunCard, directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts) -> tuple[Check, ...]:
    """All checks, in the order in which a person would make them."""
    return tuple(_checks(card, directory, request, facts))


def verdict(checks: Iterable[Check]) -> int:
    """The exit code that the checks add up to: 0, else unknown (3) before wrong usage (2) before a refusal (1)."""
    checks = list(checks)
    if any(check.level is Level.UNKNOWN for check in checks):
        return 3
    return max((check.exit_code for check in checks if check.level is Level.REFUSED), default=0)


def _checks(card: RunCard, directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts) -> Iterator[Check]:
    workers = f"{card.slurm.nodes} x {card.slurm.workers} workers"
    shape = f"tensor {card.parallel.tensor} x pipeline {card.parallel.pipeline} x data {card.data_parallel_degree}"
    yield ok("card", f"{card.run.name}/{card.run.variant}: {workers} = {shape}")
    for problem in card_warnings(card):
        yield warning("card", str(problem))
    if request.on_scheduler:
        yield from _partition_checks(card, request, facts)
    yield from _place_checks(card, directory, facts)
    yield from _kill_switch_checks(directory, facts)
    yield from _queue_checks(card, directory, request, facts)
    yield from _data_checks(facts)
    yield from _tokenizer_checks(card, facts)
    yield from _checkpoint_checks(card, directory, facts)


# ----------------------------------------------------------------------------- the cluster
def chosen_partition(card: RunCard, partitions: Iterable[Partition]) -> Partition | None:
    """The card's partition, or the cluster's default one; None when there is no such partition."""
    listed = list(partitions)
    if card.slurm.partition is not None:
        return next((entry for entry in listed if entry.name == card.slurm.partition), None)
    defaults = [entry for entry in listed if entry.is_default] or (listed if len(listed) == 1 else [])
    return defaults[0] if defaults else None


def excluded_nodes(request: LaunchRequest, facts: LaunchFacts) -> tuple[str, ...]:
    """Nodes that must not be used: asked for, in the card, and on the run's own list while they last."""
    listed = (entry.node for entry in known(facts.exclusions, ()) if entry.until is None or entry.until > facts.time)
    return tuple(dict.fromkeys((*request.exclude, *listed)))


def _partition_checks(card: RunCard, request: LaunchRequest, facts: LaunchFacts) -> Iterator[Check]:
    if isinstance(facts.partitions, Unknown):
        yield unknown("scheduler", f"its partitions could not be read ({facts.partitions.why})")
        return
    partition = chosen_partition(card, facts.partitions)
    if partition is None:
        there = ", ".join(entry.name for entry in facts.partitions) or "none"
        if card.slurm.partition is None:
            yield refused("slurm.partition", "the cluster has no default partition", f"set it to one of: {there}", 2)
        else:
            yield refused("slurm.partition", f"{card.slurm.partition!r} is not a partition here", f"use one of: {there}", 2)
        return
    limit = partition.max_time_seconds
    if not partition.is_up:
        yield warning("partition", f"{partition.name} is down: the job will wait")
    if limit is not None and card.time_limit_seconds > limit:
        rule = f"{card.slurm.time_limit} is above the limit of partition {partition.name} ({_hours(limit)})"
        yield refused("slurm.time_limit", rule, f"use {_hours(limit)} and lower run.exit_duration_minutes with it", 2)
    else:
        yield ok("partition", f"{partition.name}, {card.slurm.time_limit} of {_hours(limit) if limit else 'unlimited'}")
    yield from _node_checks(card, partition, request, facts)


def _node_checks(card: RunCard, partition: Partition, request: LaunchRequest, facts: LaunchFacts) -> Iterator[Check]:
    if isinstance(facts.nodes, Unknown):
        yield unknown("nodes", f"they could not be read ({facts.nodes.why})")
        return
    if isinstance(facts.exclusions, Unknown):
        yield unknown("exclusions", f"the run's list could not be read ({facts.exclusions.why})")
    nodes = {node.name: node for node in facts.nodes}
    excluded = excluded_nodes(request, facts)
    strangers = [name for name in request.exclude if name not in nodes]
    if strangers:
        rule = f"{strangers[0]!r} is not a node of this cluster" + (f" (and {len(strangers) - 1} more)" if strangers[1:] else "")
        yield refused("exclude", rule, f"the nodes are {_short(sorted(nodes))}", 2)
    wanted = card.slurm.nodes
    open_to_us = [nodes[name] for name in partition.node_names if name in nodes and name not in excluded]
    usable = [node for node in open_to_us if node.is_usable]
    counted = f"{len(open_to_us)} of partition {partition.name} after {len(excluded)} excluded"
    if len(open_to_us) < wanted:
        yield refused("nodes", f"{wanted} are needed, there are {counted}", "ask for fewer with --nodes, or exclude fewer")
    elif len(usable) < wanted:
        gone = _short(sorted(node.name for node in open_to_us if not node.is_usable))
        yield warning("nodes", f"{wanted} are needed, {len(usable)} can be used now ({gone} cannot): the job will wait")
    else:
        spare = len(usable) - wanted
        yield ok("nodes", f"{wanted} of {len(usable)} usable ({spare} spare, {len(excluded)} excluded)")
    small = [node.name for node in open_to_us if node.gpus < card.slurm.gpus_per_node]
    if card.slurm.gpus_per_node and len(open_to_us) - len(small) < wanted <= len(open_to_us):
        rule = f"{card.slurm.gpus_per_node} GPUs a node are needed, {_short(small)} have fewer"
        yield refused("slurm.gpus_per_node", rule, "lower it, or choose another partition", 2)


# ----------------------------------------------------------------------------- the file system
def _place_checks(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> Iterator[Check]:
    if facts.place.fault:
        yield refused("run.directory", facts.place.fault, "choose another run.directory, or ask its owner for write access")
        return
    parameters = count_parameters(card.model, card.tokenizer.padded_vocabulary_size).total
    each = checkpoint_bytes(parameters, card.precision)
    needed, free = CHECKPOINTS_OF_ROOM * each, facts.place.free_bytes
    if isinstance(free, Unknown):
        yield warning("space", f"the free space below {directory.root} could not be read ({free.why})")
    elif free < needed:
        rule = f"{_bytes(free)} free below {directory.root}, two checkpoints need {_bytes(needed)}"
        yield refused("space", rule, "remove old checkpoints, or choose another run.directory")
    else:
        yield ok("directory", f"{directory.root}: {_bytes(free)} free, a checkpoint takes {_bytes(each)}")


def _kill_switch_checks(directory: RunDirectory, facts: LaunchFacts) -> Iterator[Check]:
    switch = facts.kill_switch
    if switch.other_run:
        rule = f"{directory.kill_switch} belongs to another run, {switch.other_run}"
        yield refused("run.kill_switch", rule, "leave run.kill_switch out, or name a file of this run's own", 2)
    if switch.is_set:
        by = f" by {switch.who}" if switch.who else ""
        why = f" ({switch.why})" if switch.why else ""
        yield refused("kill switch", f"{directory.kill_switch} is set{by}{why}", "release it with `tr11 kill --release`")
    elif not switch.other_run:
        yield ok("kill switch", "not set")


def _data_checks(facts: LaunchFacts) -> Iterator[Check]:
    tokens = documents = 0
    for dataset in facts.datasets:
        if dataset.unreadable:
            yield refused("data.prefixes", dataset.unreadable, "make it readable for the run's user")
        elif dataset.fault:
            yield refused("data.prefixes", dataset.fault, "correct the path, or make the dataset again (`tr11 data preprocess`)")
        tokens += dataset.tokens
        documents += dataset.documents
    if not any(dataset.fault or dataset.unreadable for dataset in facts.datasets):
        yield ok("data", f"{len(facts.datasets)} indexed dataset(s), {documents:,} documents, {tokens:,} tokens")


def _tokenizer_checks(card: RunCard, facts: LaunchFacts) -> Iterator[Check]:
    tokenizer, rows = facts.tokenizer, card.tokenizer.padded_vocabulary_size
    if tokenizer.fault:
        yield refused("tokenizer.path", tokenizer.fault, "correct the path, or make one (`tr11 data tokenizer`)")
    elif tokenizer.size is not None and tokenizer.size > rows:
        rule = f"{rows} is below the tokenizer's {tokenizer.size} tokens"
        yield refused("tokenizer.padded_vocabulary_size", rule, f"use {tokenizer.size} or more", 2)
    elif tokenizer.size is not None:
        yield ok("tokenizer", f"{tokenizer.size:,} tokens in {rows:,} rows")


# ----------------------------------------------------------------------------- what runs or waits already
def own_jobs(name: str, directory: RunDirectory, jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
    """Jobs of this run that are not over, and living jobs of the same name that belong to another directory.

    A job is of this run by its comment, or by its name where it carries no comment of tr11 (submitted by hand). Numbers
    do not count: a scheduler that is set up anew begins again at 1.
    """
    ours: list[Job] = []
    namesakes: list[Job] = []
    for job in jobs:
        if job.state.is_final:
            continue
        mark = parse_comment(job.comment)
        if mark is not None:
            if mark[1] == directory.mark:
                ours.append(job)
            elif job.name == name:
                namesakes.append(job)
        elif job.name == name:
            ours.append(job)
    return ours, namesakes


def array_number(job: Job) -> str:
    """The number that stands for a job's whole submission."""
    return job.array_id or job.raw_id


def _queue_checks(card: RunCard, directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts) -> Iterator[Check]:
    if isinstance(facts.jobs, Unknown):
        yield unknown("queue", f"the scheduler did not say what is queued ({facts.jobs.why})")
        return
    if isinstance(facts.submissions, Unknown):
        yield unknown("queue", f"earlier submissions could not be read ({facts.submissions.why})")
        return
    for place in (*facts.foreground, *facts.elsewhere):
        yield refused("queue", f"this run is already running: {place}", "stop it first (`tr11 kill`)")
    ours, namesakes = own_jobs(card.run.name, directory, facts.jobs)
    for job in namesakes:
        yield warning("queue", f"job {job.job_id} of {job.user} has the same name, in another run directory")
    lost = [entry for entry in facts.submissions if entry.job_id is None]
    if lost and not ours:
        yield warning("queue", f"the scheduler has no trace of submission {lost[-1].tag}, whose answer was lost")
    doubtful = [job for job in ours if job.state is JobState.UNKNOWN]
    if doubtful:
        yield unknown("queue", f"the state of job {doubtful[0].job_id} of this run is unknown")
    elif request.after is None:
        yield from _first_in_line(ours, facts.user)
    else:
        yield from _behind(request.after, ours, facts)


def _first_in_line(ours: list[Job], user: str) -> Iterator[Check]:
    if not ours:
        yield ok("queue", "nothing of this run is queued or running")
        return
    job = max(ours, key=lambda entry: (entry.state.is_active, array_number(entry)))
    whose = "" if job.user in {"", user} else f" of {job.user}"
    state = "running" if job.state.is_active else "queued"
    more = f" (and {len(ours) - 1} more)" if len(ours) > 1 else ""
    last = max((array_number(entry) for entry in ours), key=_as_number)
    rule = f"this run is already {state}: job {job.job_id}{whose}{more}"
    yield refused("queue", rule, f"queue behind it with `--after {last}`, or stop it with `tr11 kill`")


def _behind(after: str, ours: list[Job], facts: LaunchFacts) -> Iterator[Check]:
    """With `--after`, everything of this run must be over when the new job starts: it is the target, or before it."""
    if isinstance(facts.after, Unknown):
        yield unknown("--after", f"the scheduler did not say whether job {after} exists ({facts.after.why})")
        return
    if facts.after is None:
        listed = ", ".join(sorted({array_number(job) for job in ours})) or "none"
        yield refused("--after", f"the scheduler knows no job {after}", f"jobs of this run: {listed}", 2)
        return
    if facts.after.job_id not in {job.job_id for job in ours} and array_number(facts.after) not in {array_number(job) for job in ours}:
        if facts.after.state.is_final:
            yield warning("--after", f"job {after} is over: the new one may start at once")
        else:
            yield warning("--after", f"job {after} ({facts.after.name}) is not of this run")
    whole_array = "_" not in after
    before = _all_before(array_number(facts.after), ours) if whole_array else set()
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
        waited_for = {
            number for job in ours if array_number(job) in fresh for number in re.findall(r"\d+", re.sub(r"_\S*", "", job.dependency))
        }
        fresh = waited_for - before
        before |= fresh
    return before


def _as_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (0, text)


# ----------------------------------------------------------------------------- what it would resume from
def _checkpoint_checks(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> Iterator[Check]:
    if isinstance(facts.checkpoints, Unknown):
        yield unknown("checkpoints", f"they could not be read ({facts.checkpoints.why})")
        return
    found, folder = facts.checkpoints, directory.paths.checkpoints
    if not found.steps:
        if not isinstance(found.latest, Unknown) and found.latest is None and not card.run.expect_resume:
            yield ok("checkpoints", "none: the training starts from random weights")
        elif card.run.expect_resume:
            yield refused("run.expect_resume", f"{folder} holds no checkpoint", "restore one, or correct run.directory or run.variant")
        else:
            yield refused("checkpoints", f"{directory.paths.latest} is there, but no checkpoint", "restore one, or remove that file to start anew")
        return
    if found.manifest is None:
        step, fault = found.rejected[0]
        rule = f"none of the {len(found.steps)} in {folder} is whole: {checkpoint_name(step)}: {fault}"
        yield refused("checkpoints", rule, "restore one from a backup, or move them away to start from random weights")
        return
    yield from _resume_checks(card, directory, found.manifest, found.steps, found.latest, found.rejected)


def _resume_checks(
    card: RunCard,
    directory: RunDirectory,
    manifest: Manifest,
    steps: tuple[int, ...],
    latest: int | None | Unknown,
    rejected: tuple[tuple[int, str], ...],
) -> Iterator[Check]:
    name = checkpoint_name(manifest.step)
    if isinstance(latest, Unknown):
        yield warning("checkpoints", f"latest cannot be used ({latest.why}): {name} will be resumed")
    elif latest is None:
        yield warning("checkpoints", f"{directory.paths.latest} is missing: {name}, the newest whole one, will be resumed")
    elif latest not in steps:
        yield warning("checkpoints", f"latest names {checkpoint_name(latest)}, which is not there: {name} will be resumed")
    for step, fault in rejected[:3]:
        yield warning("checkpoints", f"{checkpoint_name(step)} is passed over: {fault}")
    newer = [step for step in steps if step > manifest.step and step not in dict(rejected)]
    if newer:
        yield warning("checkpoints", f"{checkpoint_name(newer[-1])} is newer than {name}, which latest names")
    differences = model_differences(card, manifest)
    for key, (saved, wanted) in differences.items():
        rule = f"{wanted!r} in the card, {saved!r} in {name}: a checkpoint of another model"
        yield refused(key, rule, f"set it to {saved!r}, or use another run.variant for the new model", 2)
    if not differences:
        yield ok("checkpoints", f"resumes at step {manifest.step + 1} from {name}{_topology(card, manifest)}")


def _topology(card: RunCard, manifest: Manifest) -> str:
    own = {"tensor": card.parallel.tensor, "pipeline": card.parallel.pipeline, "data": card.data_parallel_degree}
    saved = {key: manifest.topology.get(key, value) for key, value in own.items()}
    if saved == own:
        return ""
    return " (saved on " + " x ".join(f"{key} {degree}" for key, degree in saved.items()) + ")"


def model_facts(card: RunCard) -> dict[str, object]:
    """What decides whether a checkpoint fits, under the card's keys, as the trainer writes it into a manifest."""
    model = card.model
    facts: dict[str, object] = {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.attention_heads": model.attention_heads,
        "model.ffn_hidden_size": model.ffn,
        "model.position_embedding": model.position_embedding,
        "model.embedding_layernorm": model.embedding_layernorm,
        "tokenizer.padded_vocabulary_size": card.tokenizer.padded_vocabulary_size,
        "precision.dtype": card.precision.dtype,
    }
    if model.position_embedding == "absolute":
        facts["model.max_position_embeddings"] = model.positions
    return facts


def model_differences(card: RunCard, manifest: Manifest) -> dict[str, tuple[object, object]]:
    """Keys on which card and checkpoint disagree: (saved, wanted). Keys that only one side knows are passed over."""
    return {
        key: (manifest.model[key], wanted)
        for key, wanted in model_facts(card).items()
        if key in manifest.model and manifest.model[key] != wanted
    }


# ----------------------------------------------------------------------------- words
def _hours(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def _bytes(count: int) -> str:
    """Decimal units, as disks and quotas are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def _short(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
