"""Whether a launch may go ahead: pure checks over observed facts. Each says what, why, and how to
repair it.

Nothing here reads a file, asks a scheduler or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tr11ops.base.installed import EXTRA
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, first_few, format_time_limit
from tr11ops.cluster.base import Node, Partition
from tr11ops.cluster.pending_reasons import Lack, NodeNeed, lacking
from tr11ops.cluster.rehearsal import REHEARSAL_FIX
from tr11ops.cluster.sbatch_options import memory_megabytes, options_of, shown
from tr11ops.cluster.site import Reservation, SiteRules
from tr11ops.launch.container import container_checks
from tr11ops.launch.data_checks import data_checks, map_checks, tokenizer_checks
from tr11ops.launch.directory_checks import (
    damage_checks,
    directory_checks,
    holder_checks,
    not_mounted,
    switch_checks,
)
from tr11ops.launch.facts import LaunchFacts, LaunchRequest
from tr11ops.launch.foreign import foreign_checks
from tr11ops.launch.margins import grant_checks, is_measured, margin_checks
from tr11ops.launch.queue_checks import (
    chain_checks,
    coverage_checks,
    coverage_of,
    queue_checks,
    site_checks,
)
from tr11ops.launch.resume import checkpoint_checks, saving_checks
from tr11ops.nodes.queue_exclusions import given_to_scheduler
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.runcard.exit_duration import ExitPlan, exit_plan
from tr11ops.runcard.gpu_memory import attention_checks, memory_checks
from tr11ops.runcard.rules import card_warnings
from tr11ops.runcard.speed import RunHistory, with_gpus_of
from tr11ops.rundir.exclusions import due_for_recheck
from tr11ops.rundir.paths import RunDirectory
from trainer.config.first_loss import first_loss
from trainer.config.kernel_choice import INSTALL_IT


def preflight(
    card: RunCard, directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts
) -> tuple[PreflightCheck, ...]:
    """All checks, in the order in which a person would make them."""
    return tuple(_checks(card, directory, request, facts))


def _checks(
    card: RunCard, directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    workers = f"{card.slurm.nodes} x {counted(card.slurm.workers, 'worker')}"
    yield ok("card", f"{card.run.name}/{card.run.variant}: {workers} = {_shape(card)}")
    if facts.unmounted:  # nothing that would be read there is the run's
        yield not_mounted(directory, facts.unmounted)
        return
    history = known(facts.history, RunHistory())
    if request.on_scheduler:
        leaves = exit_plan(card, history)
    else:
        leaves = ExitPlan(None)
    card = leaves.applied(card)
    for problem in card_warnings(card):
        if problem.key != "run.exit_duration_minutes" or not (leaves.why or is_measured(history)):
            yield warning("card", str(problem))
    if facts.unset:
        rule = f"what is not set here cannot be read in the job: {', '.join(facts.unset)}"
        yield warning("slurm.environment", rule, "export it before the launch, or in slurm.setup")
    if facts.rehearsal_refusal:
        yield refused("[rehearsal]", facts.rehearsal_refusal, REHEARSAL_FIX, 2)
    if request.on_scheduler:
        yield from _leave_checks(leaves)
        yield from _save_checks(facts)
        yield from margin_checks(card, history)
        yield from _option_checks(card, facts.scheduler)
        yield from _partition_checks(card, request, facts)
        if isinstance(facts.site, SiteRules):
            yield from site_checks(facts.site)
        yield from grant_checks(
            card,
            request.tasks,
            grants=facts.grants,
            nodes=_partition_nodes(card, facts),
            now=facts.time,
        )
        if request.chain is not None:
            yield from chain_checks(request.chain)
    yield from directory_checks(card, directory, facts)
    yield from switch_checks(directory, facts)
    yield from damage_checks(known(facts.damaged, ()))
    yield from known(facts.archives, ())
    if request.on_scheduler:
        yield from container_checks(card, directory, facts.container, facts.scheduler)
    yield from _package_checks(card, facts.missing_packages)
    yield from foreign_checks(card, known(facts.foreign, None))
    for question in request.open_questions[:1]:
        count = counted(len(request.open_questions), "question")
        fix = "answer in the card and delete the line, or give it to adopt again by --set"
        yield refused("card", f"{count} of adopt open: {question}", fix, 2)
    if isinstance(card, OwnCard) and not card.trains_nothing:
        completed = with_gpus_of(card, _partition_nodes(card, facts))
        yield from attention_checks(completed)
        yield from memory_checks(completed)
        yield from _first_loss(card)
        yield from _compiler_checks(facts)
        yield from data_checks(card, facts)
        yield from map_checks(card, facts)
        yield from tokenizer_checks(card, facts)
    if not facts.directory.fault:  # what cannot be a run directory has no state to be read
        yield from queue_checks(directory, request, facts)
        yield from holder_checks(card, directory, facts)
        yield from checkpoint_checks(card, facts, request.on_scheduler)
        yield from saving_checks(card)
        if request.array is not None or (request.chain is not None and request.chain.tasks > 1):
            yield from coverage_checks(
                coverage_of(card, request.tasks, history, _resumed_step(facts))
            )


def _shape(card: RunCard) -> str:
    """How the workers share the training, as far as the card says it."""
    if not isinstance(card, OwnCard):
        return f"{counted(card.world_size, 'rank')} of another trainer"
    parallel = card.parallel
    return f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {card.data_parallel_degree}"


def _leave_checks(leaves: ExitPlan) -> Iterator[PreflightCheck]:
    """When the trainer leaves, where the card does not say it."""
    if leaves.is_derived:
        yield ok("last save", f"the trainer leaves after {leaves.minutes:g} min, {leaves.why}")
    elif leaves.why:
        rule = f"cannot be derived, so each attempt ends without a last checkpoint: {leaves.why}"
        yield warning(
            "run.exit_duration_minutes", rule, "raise slurm.time_limit, or say when to leave"
        )


def _save_checks(facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """What each launch decides about its saves, as the next one would now."""
    saves = facts.saves
    if isinstance(saves, Unknown):
        yield warning("saves", f"how often the launch saves is not known: {saves.why}")
    elif saves is not None:
        yield ok("saves", f"{saves}; each launch decides anew, [checkpoint] at the latest")


def _option_checks(card: RunCard, scheduler: str) -> Iterator[PreflightCheck]:
    """What the embedded scheduler makes of options that are Slurm's."""
    options = options_of(card.slurm.options)
    if options and scheduler == "local":
        rule = f"{shown(options)}: for sbatch alone, the embedded scheduler does nothing with them"
        yield warning("slurm.options", rule)


def _package_checks(card: RunCard, missing: Sequence[str]) -> Iterator[PreflightCheck]:
    """What tr11's own trainer lacks here, where the workers will look for it too."""
    if not missing:
        return
    rule = f"tr11's own needs {', '.join(missing)}, not installed here"
    if card.slurm.setup or "PYTHONPATH" in card.slurm.environment:
        yield warning(
            "trainer", rule, "slurm.setup or slurm.environment must bring it to the workers"
        )
    else:
        yield refused("trainer", rule, f"{EXTRA}, or call tr11 from the environment that has it")


def _resumed_step(facts: LaunchFacts) -> int:
    found = facts.checkpoints
    if isinstance(found, Unknown):
        return 0
    return found.start.iteration


def _compiler_checks(facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """A compiler for the card's blocks. Where the workers run on this machine, what it lacks they
    lack.
    """
    if facts.compiler_obstacle is None:
        return
    if facts.scheduler == "slurm":
        rule = f"here {facts.compiler_obstacle}; a node that lacks it too ends the run before its first step"
        yield warning("model.compile_blocks", rule, INSTALL_IT)
    else:
        yield refused("model.compile_blocks", facts.compiler_obstacle, INSTALL_IT, 2)


# ----------------------------------------------------------------------------- the cluster
def chosen_partition(card: RunCard, partitions: Iterable[Partition]) -> Partition | None:
    """The card's partition, or the cluster's default one; None when there is no such partition."""
    listed = list(partitions)
    if card.slurm.partition is not None:
        return next((entry for entry in listed if entry.name == card.slurm.partition), None)
    defaults = [entry for entry in listed if entry.is_default] or (
        listed if len(listed) == 1 else []
    )
    if defaults:
        return defaults[0]
    return None


def _partition_nodes(card: RunCard, facts: LaunchFacts) -> tuple[Node, ...]:
    partition = chosen_partition(card, known(facts.partitions, ()))
    names = partition.node_names if partition is not None else ()
    return tuple(node for node in known(facts.nodes, ()) if node.name in names)


def excluded_nodes(
    request: LaunchRequest, facts: LaunchFacts
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that must not be used: asked for, in the card, and on the run's own list, as far as the
    cluster has them; and those that it has not.

    An exclusion whose time has passed holds until a check of the node has passed.
    """
    listed = (entry.node for entry in known(facts.exclusions, ()))
    return given_to_scheduler(
        (*request.exclude, *listed), [node.name for node in known(facts.nodes, ())]
    )


def _partition_checks(
    card: RunCard, request: LaunchRequest, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    if isinstance(facts.partitions, Unknown):
        yield unknown("scheduler", f"its partitions could not be read ({facts.partitions.why})")
        return
    partition = chosen_partition(card, facts.partitions)
    if partition is None:
        there = ", ".join(entry.name for entry in facts.partitions) or "none"
        if card.slurm.partition is None:
            yield refused(
                "slurm.partition",
                "the cluster has no default partition",
                f"set it to one of: {there}",
                2,
            )
        else:
            yield refused(
                "slurm.partition",
                f"{card.slurm.partition!r} is not a partition here",
                f"use one of: {there}",
                2,
            )
        return
    limit = partition.max_time_seconds
    if partition.is_closed:
        others = (
            ", ".join(entry.name for entry in facts.partitions if not entry.is_closed) or "none"
        )
        rule = (
            f"{partition.name} is closed by the site and takes no job: "
            "what is queued in it waits and keeps its place"
        )
        yield refused(
            "partition", rule, f"wait for the site, or set slurm.partition (open: {others})"
        )
    elif not partition.is_up:
        yield warning("partition", f"{partition.name} is down: the job will wait for the site")
    if limit is not None and card.time_limit_seconds > limit:
        rule = f"{card.slurm.time_limit} is above the limit of partition {partition.name} ({format_time_limit(limit)})"
        yield refused(
            "slurm.time_limit",
            rule,
            f"use {format_time_limit(limit)} and lower run.exit_duration_minutes with it",
            2,
        )
    else:
        if limit is not None:
            most = f"of at most {format_time_limit(limit)}"
        else:
            most = "(no maximum)"
        yield ok("partition", f"{partition.name}, {card.slurm.time_limit} {most}")
    yield from _node_checks(card, partition, request, facts)


def _node_checks(
    card: RunCard, partition: Partition, request: LaunchRequest, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    site = known(facts.site, None)
    if isinstance(facts.nodes, Unknown) and site is not None and "nodes" in site.hidden:
        yield warning(
            "nodes",
            "the site shows its nodes to administrators alone (PrivateData=nodes): which can be used is not known",
            "sbatch's own word below counts; what is excluded is given to it unseen",
        )
        return
    if isinstance(facts.nodes, Unknown):
        yield unknown("nodes", f"they could not be read ({facts.nodes.why})")
        return
    if isinstance(facts.exclusions, Unknown) and not facts.directory.fault:
        yield unknown("exclusions", f"the run's list could not be read ({facts.exclusions.why})")
    due = [entry.node for entry in due_for_recheck(known(facts.exclusions, ()), facts.time)]
    if due:
        rule = (
            f"{first_few(due)}: the time of the exclusion is over, a check may give the node back"
        )
        yield warning("exclusions", rule, "type `tr11 nodes check --due`")
    for found in known(facts.slow_nodes, ()):
        if found.subject not in request.exclude:
            yield warning(
                "nodes", f"{found.title} ({found.evidence[0]})", f"type `{found.fix}` first"
            )
    nodes = {node.name: node for node in facts.nodes}
    excluded, left_out = excluded_nodes(request, facts)
    yield from _gone_checks(card, left_out, facts)
    strangers = [
        name
        for name in left_out
        if name in request.exclude and name not in card.slurm.excluded_nodes
    ]
    if strangers:
        rule = f"{strangers[0]!r} is not a node of this cluster" + (
            f" (and {len(strangers) - 1} more)" if strangers[1:] else ""
        )
        yield refused("exclude", rule, f"name one of: {first_few(sorted(nodes))}", 2)
    wanted = card.slurm.least_nodes
    reservation = _reservation(facts)
    if reservation is None:
        of_reservation = ""
    else:
        of_reservation = f"reservation {reservation.name} in "
    open_to_us = [
        nodes[name]
        for name in partition.node_names
        if name in nodes
        and name not in excluded
        and (reservation is None or name in reservation.nodes)
    ]
    usable = [node for node in open_to_us if node.is_usable]
    counted = f"{len(open_to_us)} of {of_reservation}partition {partition.name} after {len(excluded)} excluded"
    if len(open_to_us) < wanted:
        fix = "ask for fewer with --nodes, or exclude fewer"
        if card.slurm.nodes <= len(open_to_us):
            fix = f"set slurm.spare_nodes to {len(open_to_us) - card.slurm.nodes}, or exclude fewer"
        if facts.scheduler == "local" and not excluded:
            fix = f"ask for fewer with --nodes, or have this machine play them: TR11_LOCAL_NODES={wanted}"
        yield refused("nodes", f"{_wanted_nodes(card)} are needed, there are {counted}", fix)
    elif len(usable) < wanted:
        gone = first_few(sorted(node.name for node in open_to_us if not node.is_usable))
        now = f"{len(usable)} can be used now ({gone} cannot)"
        fewer = ""
        if card.slurm.nodes <= len(usable):
            spares = len(usable) - card.slurm.nodes
            fewer = f"; `--set slurm.spare_nodes={spares}` needs no more than there are"
        yield warning("nodes", f"{_wanted_nodes(card)} are needed, {now}: the job will wait{fewer}")
    else:
        spare = len(usable) - wanted
        yield ok(
            "nodes",
            f"{_wanted_nodes(card)} of {len(usable)} usable ({spare} to spare, {len(excluded)} excluded)",
        )
    yield from _capacity_checks(card, open_to_us, facts.scheduler)
    if facts.scheduler == "local":
        yield from _unused_gpus(card, open_to_us)


def _first_loss(card: OwnCard) -> Iterator[PreflightCheck]:
    """Where the loss begins far above an even guess: it looks as if something were broken."""
    expected = first_loss(card)
    if expected is not None:
        yield ok("first loss", str(expected))


def _unused_gpus(card: RunCard, nodes: list[Node]) -> Iterator[PreflightCheck]:
    """The embedded scheduler's jobs see the GPUs that they ask for and no others: without any they
    are slow.
    """
    most = max((node.gpus for node in nodes), default=0)
    if card.slurm.gpus_per_node == 0 and most:
        rule = f"a node has {most}, the card asks for none: it trains on the processor"
        yield warning("slurm.gpus_per_node", rule, f"set it to {most}, or less")


def _reservation(facts: LaunchFacts) -> Reservation | None:
    """The card's reservation, where its jobs get no other nodes than its own."""
    grants = known(facts.grants, None)
    found = None if grants is None else grants.reservation
    if found is not None and found.nodes:
        return found
    return None


def _capacity_checks(card: RunCard, nodes: list[Node], scheduler: str) -> Iterator[PreflightCheck]:
    """Nodes of which too few could serve the card even if all were well: it would never start."""
    wanted = card.slurm.least_nodes
    # the embedded one gives as many as there are
    cores = card.slurm.cpus_per_task if scheduler == "slurm" else 1
    memory = 0
    if scheduler == "slurm":
        memory = memory_megabytes(options_of(card.slurm.options))
    need = NodeNeed(card.slurm.gpus_per_node, cores, memory, card.slurm.constraint)
    lacks = lacking(need, nodes)
    if not len(nodes) - len(lacks) < wanted <= len(nodes):
        return
    for lack in dict.fromkeys(lacks.values()):
        names = first_few([name for name, found in lacks.items() if found is lack])
        if lack is Lack.FEATURES:
            of_kind = counted(
                wanted, f"node with {need.constraint} is", f"nodes with {need.constraint} are"
            )
            rule = f"{of_kind} needed, {names} have not got it"
            yield refused("slurm.constraint", rule, "change it, or choose another partition", 2)
        elif lack is Lack.MEMORY:
            rule = f"{need.memory_megabytes} MB of memory a node are needed, {names} have less"
            yield refused("slurm.options.mem", rule, "lower it, or choose another partition", 2)
        elif lack is Lack.CORES:
            rule = f"{counted(need.cpus, 'core a node is', 'cores a node are')} needed, {names} have fewer"
            yield refused("slurm.cpus_per_task", rule, "lower it, or choose another partition", 2)
        else:
            rule = f"{counted(need.gpus, 'GPU a node is', 'GPUs a node are')} needed, {names} have fewer"
            yield refused("slurm.gpus_per_node", rule, "lower it, or choose another partition", 2)


def _gone_checks(
    card: RunCard, left_out: tuple[str, ...], facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    """What is excluded and no node of the cluster any more: told, and left out, for one such name
    spoils a list.
    """
    listed = [entry.node for entry in known(facts.exclusions, ()) if entry.node in left_out]
    if listed:
        rule = (
            f"{first_few(listed)} on the run's list: no node of this cluster (any more), left out"
        )
        yield warning(
            "exclusions",
            rule,
            f"`tr11 nodes include {','.join(listed)} --force` takes it off the list",
        )
    in_card = [name for name in card.slurm.excluded_nodes if name in left_out]
    if in_card:
        rule = f"{first_few(in_card)}: no node of this cluster (any more), left out"
        yield warning("slurm.exclude", rule, "take it out of the card")


def _wanted_nodes(card: RunCard) -> str:
    if card.slurm.spare_nodes:
        return f"{card.slurm.nodes} + {card.slurm.spares_asked} spare"
    return str(card.slurm.nodes)
