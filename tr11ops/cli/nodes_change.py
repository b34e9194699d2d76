"""`tr11 nodes exclude` and `include`: which nodes this run may use, changed by a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.cli import completion
from tr11ops.cli.common import plain_text, require_directory, say, timeout_option
from tr11ops.cli.nodes_check import (
    SCHEMA,
    NodesContext,
    ReportOption,
    check_them,
    never_checked,
    open_nodes_context,
    tell_other_runs,
    write_note,
)
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, SCHEDULER, YES, Change, Outcome, RunContext
from tr11ops.health.base import CheckOutcome
from tr11ops.nodes.check import NodeCheck, let_in_without, never_made, read_outcomes
from tr11ops.nodes.queue_exclusions import (
    ExclusionResult,
    QueueChange,
    exclude_nodes,
    include_nodes,
)
from tr11ops.runcard.kinds import refuse_watched
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit, NodeStanding, way_past

if TYPE_CHECKING:
    from collections.abc import Sequence


NODES_HELP = "Names or host lists: jean-zay-iam[01-03]."
Nodes = Annotated[
    list[str], typer.Argument(metavar="NODE...", help=NODES_HELP, autocompletion=completion.nodes)
]
ExcludedNodes = Annotated[
    list[str],
    typer.Argument(metavar="NODE...", help=NODES_HELP, autocompletion=completion.excluded_nodes),
]


def exclude(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON],
    nodes: Nodes,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            metavar="N",
            help="Due for a check after this long; default: resilience.exclusion_days.",
        ),
    ] = None,
    evidence: Annotated[
        list[str] | None,
        typer.Option("--evidence", metavar="LINE", help="What was seen; may be repeated."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also beyond resilience.exclusion_cap_percent; --reason is kept."
        ),
    ] = False,
    report: ReportOption = None,
) -> Change:
    """Keep the run off these nodes: from now on, and in the work that is queued already, which
    keeps its place.

    A running job is not touched. Never so many that the run has too few nodes left
    (resilience.exclusion_cap_percent), unless a person forces it with a reason.

    Examples:
      tr11 nodes exclude jean-zay-iam07 --reason "Xid 79" --days 7
      tr11 nodes exclude jean-zay-iam07 --report note.txt --yes
    """
    nodes_context = open_nodes_context(context)
    refuse_watched(nodes_context.card)
    nodes_context.require_mounted()
    # a list would be made for a run that no one launched
    require_directory(nodes_context.directory)
    names = nodes_context.resolve(nodes)
    if days is None:
        lasting = nodes_context.card.resilience.exclusion_days
    else:
        lasting = days
    if not 0 < lasting <= 36500:
        raise WrongUsage(f"--days {lasting:g}: must be above 0 and at most 36500")
    limit = nodes_context.limit
    if force and not context.reason.strip():
        raise WrongUsage("--force: say why with --reason, it is kept in the journal")
    if not force:
        _refuse_too_many(nodes_context, names, limit)
    left = limit.left({*names, *(entry.node for entry in nodes_context.exclusions)})
    changes = nodes_context.queue_preview(add=names)
    lines = [
        f"exclude {name} for {counted(lasting, 'day')}{_already(nodes_context, name)}"
        for name in names
    ]
    lines += [
        *_queue_lines(changes),
        *_running_lines(nodes_context, names),
        *(_left_lines(nodes_context, names, limit) if force else ()),
        _more_line(limit, left),
    ]

    def apply() -> Outcome:
        asked = Exclusion("", context.reason, owner=context.who, evidence=tuple(evidence or ()))
        done = exclude_nodes(
            nodes_context.directory,
            [replace(asked, node=name) for name in names],
            nodes_context.queue,
            days=lasting,
            limit=limit,
            forced=force,
        )
        tell_other_runs(nodes_context)
        if report is not None:
            write_note(nodes_context, names, report)
        return _outcome(
            "excluded",
            names=done.nodes,
            changes=done.changes,
            failed=done.failures,
            may_exclude=left,
        )

    preview = _outcome("would-exclude", names, changes, may_exclude=left)
    return Change(lines, f"Exclude {_shown(names)}?", apply, preview)


def _refuse_too_many(
    nodes_context: NodesContext, names: Sequence[str], limit: ExclusionLimit
) -> None:
    """Raises Refusal where the new ones are too many; those that are excluded already may stay."""
    ours = {entry.node for entry in nodes_context.exclusions}
    if nodes_context.forbids(names):
        total, fresh = (
            limit.counted(ours.union(names)),
            [name for name in names if name not in ours],
        )
        past = way_past(",".join(fresh))
        raise Refusal(
            f"{counted(total, 'node')} would be excluded: {limit}; include others first, or `{past}`"
        )


def _left_lines(
    nodes_context: NodesContext, names: Sequence[str], limit: ExclusionLimit
) -> list[str]:
    """What is left for the run where a person excludes more than the limit."""
    usable = {node.name for node in nodes_context.partition_nodes if node.is_usable}
    excluded = {entry.node for entry in nodes_context.exclusions}
    left = len(usable - excluded.union(names, nodes_context.card.slurm.excluded_nodes))
    short = ""
    if left < limit.needed:
        short = f", too few for an attempt, which needs {limit.needed}: it waits"
    return [f"--force: {limit}; {counted(left, 'usable node is', 'usable nodes are')} left{short}"]


def _shown(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return counted(len(names), "node")


def _more_line(limit: ExclusionLimit, left: int) -> str:
    """How many more nodes may be excluded, and what it means that none may."""
    if left:
        return f"after this {counted(left, 'more node')} may be excluded: {limit}"
    return f"after this no more may be excluded: {limit}; tr11 excludes no bad node by itself"


def _already(nodes_context: NodesContext, name: str) -> str:
    entry = nodes_context.find(name)
    if entry is None:
        return ""
    return f" (excluded already, by {entry.owner or '?'}: {entry.why or 'no reason'})"


def _queue_lines(changes: Sequence[QueueChange]) -> list[str]:
    return [
        f"queued job {change.job_id}: excluded nodes {','.join(change.before) or 'none'} -> "
        f"{','.join(change.after) or 'none'} (it keeps its place)"
        for change in changes
    ]


def _running_lines(nodes_context: NodesContext, names: Sequence[str]) -> list[str]:
    return [
        f"job {job.job_id} runs on {name} now: it is not touched"
        for job in nodes_context.own_jobs
        if job.state.is_active
        for name in names
        if name in job.nodes
    ]


def _outcome(
    action: str,
    names: Sequence[str],
    changes: Sequence[QueueChange] = (),
    failed: Sequence[str] = (),
    may_exclude: int | None = None,
) -> Outcome:
    """What was done; exit code 1 when a part of it could not be done. What would be done the plan says.

    `may_exclude`: how many more nodes may be excluded then.
    """
    value: dict[str, Any] = {
        "schema": SCHEMA,
        "action": action,
        "nodes": list(names),
        "queue": [
            {"job_id": change.job_id, "before": list(change.before), "after": list(change.after)}
            for change in changes
        ],
        "failed": list(failed),
    }
    if may_exclude is not None:
        value["may_exclude"] = may_exclude
    done = []
    if not action.startswith("would"):
        done = [f"{action}: {','.join(names) or 'nothing'}"]
    return Outcome(
        value,
        notes=[f"tr11: {line}" for line in failed],
        remarks=done,
        exit_code=1 if failed else 0,
    )


# ----------------------------------------------------------------------------- include
def include(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON],
    nodes: ExcludedNodes,
    force: Annotated[bool, typer.Option("--force", help="Without a passed health check.")] = False,
    timeout: Annotated[float, timeout_option("A node that has not answered has not passed.")] = 120,
) -> Change | Outcome:
    """Let the run use excluded or avoided nodes again, once they have passed the health checks.

    Each is used as a spare first, until it has trained well for a day. A check that no node of the
    last attempt could make is held against none. What the site has drained stays drained: tr11
    resumes no node.

    Examples:
      tr11 nodes include jean-zay-iam07 --reason "GPU replaced"
      tr11 nodes include jean-zay-iam07 --force --yes
    """
    nodes_context = open_nodes_context(context)
    refuse_watched(nodes_context.card)
    nodes_context.require_mounted()
    names = nodes_context.resolve(nodes)
    absent = [name for name in names if nodes_context.find(name) is None]
    for name in absent:
        say(f"{name} is not excluded by this run")
    names = tuple(name for name in names if name not in absent)
    for node in nodes_context.nodes:
        if node.name in names and not node.is_usable:
            reason = ""
            if node.reason:
                reason = f" ({plain_text(node.reason)})"
            say(
                f"{node.name} is {'+'.join(sorted(node.states))}{reason} by the site's hand, and stays so"
            )
    if not names:
        return _outcome("included", ())
    if not force:
        _refuse_unfit(nodes_context, never_checked(nodes_context, names))
    changes = nodes_context.queue_preview(remove=names)

    def prove() -> None:
        results = check_them(nodes_context, names, timeout)
        may_come = let_in(nodes_context, results)
        _refuse_unfit(nodes_context, [entry for entry in results if entry.node not in may_come])

    def apply() -> Outcome:
        done = readmit(nodes_context, names, context.reason, owner=context.who)
        tell_other_runs(nodes_context)
        return _outcome("included", names=done.nodes, changes=done.changes, failed=done.failures)

    return Change(
        [
            *(f"include {name}{_already(nodes_context, name)}" for name in names),
            *_queue_lines(changes),
        ],
        f"Include {_shown(names)}?",
        apply,
        _outcome("would-include", names, changes),
        prove=None if force else prove,
    )


def _refuse_unfit(nodes_context: NodesContext, results: Sequence[NodeCheck]) -> None:
    """Raises Refusal where a node has not passed; where it could not be checked, with the two ways
    past.
    """
    unfit = [entry for entry in results if entry.result in {CheckOutcome.BAD, CheckOutcome.UNKNOWN}]
    if not unfit:
        return
    lines = ["a node has not passed the health checks, nothing was changed:"]
    lines += [f"{entry.node}: {entry.result}: {entry.why}" for entry in unfit]
    unknown = [entry for entry in unfit if entry.result is CheckOutcome.UNKNOWN]
    unmade = sorted(
        {
            one.name
            for entry in unknown
            for one in entry.checks
            if one.result is CheckOutcome.UNKNOWN
        }
    )
    if unmade:
        lines.append(
            f"what this site can never check belongs into resilience.skip_checks: {', '.join(unmade)}"
        )
    lost = {node.name for node in nodes_context.nodes if node.is_gone or node.is_silent}
    there = [entry.node for entry in unknown if entry.node not in lost]
    if len(there) < len(unknown):
        lines.append(
            "what is lost to the scheduler stays excluded: no attempt could use it before the site repairs it"
        )
    if there:
        lines.append(
            f"to use it without a check: `tr11 nodes include {','.join(there)} --force --reason REASON`"
        )
    raise Refusal("\n".join(lines))


def let_in(nodes_context: NodesContext, results: Sequence[NodeCheck]) -> frozenset[str]:
    """The nodes that may be used again though checks of them could not be made, as on all others;
    says which ones.
    """
    if all(entry.result is not CheckOutcome.UNKNOWN for entry in results):
        return frozenset()
    try:
        outcomes = read_outcomes(nodes_context.directory)
    except (OSError, ValueError) as error:
        say(f"which checks can be made elsewhere is not known: {cause(error)}")
        return frozenset()
    found = []
    for entry in results:
        nowhere = never_made(outcomes, entry.node)
        without = let_in_without(entry, nowhere, nodes_context.find(entry.node))
        if entry.result is CheckOutcome.UNKNOWN and without:
            say(
                f"{entry.node}: not checked, as on no other node of the last attempt: {', '.join(without)}"
            )
            found.append(entry.node)
    return frozenset(found)


def readmit(
    nodes_context: NodesContext, names: Sequence[str], why: str, owner: str
) -> ExclusionResult:
    """Take nodes off the ledger and off the queued work's lists."""
    return include_nodes(
        nodes_context.directory,
        names,
        nodes_context.queue,
        why=why,
        owner=owner,
        then=NodeStanding.RETURNED,
    )
