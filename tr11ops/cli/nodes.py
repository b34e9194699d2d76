"""`tr11 nodes`: which nodes a run may use. It never drains or resumes a node: that is the site's
own business.
"""

from __future__ import annotations

import textwrap
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.api import run_of
from tr11ops.base.errors import Unobserved, WrongUsage
from tr11ops.base.units import counted
from tr11ops.cli import completion
from tr11ops.cli.common import local_time, plain_text, say, show, table, timeout_option
from tr11ops.cli.nodes_bench import bench_nodes, search_nodes
from tr11ops.cli.nodes_change import exclude, include, let_in, readmit
from tr11ops.cli.nodes_check import (
    SCHEMA,
    NodesContext,
    ReportOption,
    check_them,
    exclusion_values,
    expiry,
    open_nodes_context,
    result_values,
    show_checks,
    tell_other_runs,
    write_note,
)
from tr11ops.cli.nodes_job import JobQuestion, Printed, check_job
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.arrays import compress, expand
from tr11ops.cluster.base import Node
from tr11ops.health.base import CheckOutcome
from tr11ops.nodes.view import NOT_EXCLUDED, NodeRow, is_shut, rows, short_reason, words_of
from tr11ops.observe.readers import looking
from tr11ops.rundir.exclusion import Exclusion, NodeStanding, kept_off, what_comes_next
from tr11ops.rundir.exclusions import EXCLUDED, due_for_recheck, history as events_of, read_version
from tr11ops.rundir.journal import read_journal

if TYPE_CHECKING:
    from collections.abc import Sequence


app = typer.Typer(
    name="nodes",
    help="""Which nodes the run may use: list, check, bench, search, exclude, include, history.

    Nodes are never drained or resumed.

    Examples:
      tr11 nodes list
      tr11 nodes exclude jean-zay-iam37 --reason "Xid 79"
    """,
    no_args_is_help=True,
)

SKIP = "resilience.skip_checks"
SHUT_SHOWN = 8
SomeNodes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NODE...]",
        help="Names or host lists; default: all of the partition, or of the job.",
        autocompletion=completion.nodes,
    ),
]


# ----------------------------------------------------------------------------- list
@app.command("list")
def list_nodes(
    context: Annotated[RunContext, SCHEDULER, JSON],
    nodes: SomeNodes = None,
    excluded: Annotated[bool, typer.Option("--excluded", help="Only the excluded ones.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also nodes of other partitions.")
    ] = False,
    report: ReportOption = None,
) -> Outcome | None:
    """Nodes with their state, this run's exclusions and suspicions, the jobs that hold them, and
    which node is slow.

    Examples:
      tr11 nodes list --excluded
      tr11 nodes list jean-zay-iam07 --report -
    """
    nodes_context = open_nodes_context(context)
    wanted = set(nodes_context.resolve(nodes or ()))
    if report is not None:
        write_note(nodes_context, sorted(wanted), report)
        return None
    if everything or wanted:
        chosen = nodes_context.nodes
    else:
        chosen = nodes_context.partition_nodes
    now = time.time()
    found = [
        row
        for row in rows(
            chosen,
            nodes_context.exclusions,
            jobs=nodes_context.jobs,
            suspects=nodes_context.suspects,
            elsewhere=nodes_context.shared.entries,
        )
        if (not wanted or row.name in wanted) and (row.exclusion is not None or not excluded)
    ]
    seen = run_of(
        nodes_context.card, context.run or "", reader=looking(nodes_context.scheduler)
    ).look()
    shut = []
    if excluded or wanted:
        shut = _shut_lines(
            [node for node in chosen if node.name in wanted or not wanted], nodes_context
        )
    return Outcome(
        {
            "schema": SCHEMA,
            "nodes": [_row_values(row, now) for row in found],
            "slow_nodes": seen.document()["slow_nodes"],
        },
        remarks=(_count(found),),
        screen=partial(_show_rows, found, now, (*seen.slow_node_lines, *shut)),
    )


def _show_rows(found: Sequence[NodeRow], now: float, more: Sequence[str]) -> None:
    made = table("NODE", "STATE", "JOBS", "EXCLUDED BY", "EXPIRY", "WHY")
    for row in found:
        made.add_row(*map(plain_text, _row_words(row, now)))
    show(made)
    for line in (*(line for row in found for line in _standing_lines(row)), *more):
        if line.startswith("  tr11 "):  # to be copied as it is
            print(line)
        else:
            print(textwrap.fill(plain_text(line), 80, subsequent_indent="  "))


def _count(found: Sequence[NodeRow]) -> str:
    if not found:
        return "no such node"
    listed = [row.exclusion.state for row in found if row.exclusion is not None]
    parts = [counted(len(found), "node"), f"{listed.count(NodeStanding.EXCLUDE)} excluded"]
    watched = sum(row.suspicion is not None for row in found)
    avoided = len(listed) - listed.count(NodeStanding.EXCLUDE)
    parts += [f"{avoided} avoided"] if avoided else []
    parts += [f"{watched} watched"] if watched else []
    return ", ".join(parts)


def _shut_lines(nodes: Sequence[Node], nodes_context: NodesContext) -> list[str]:
    """What is known of nodes that the scheduler does not use and the run does not exclude, and what
    to type.
    """
    shut = [node for node in nodes if is_shut(node) and nodes_context.find(node.name) is None]
    if not shut:
        return []
    lines = [f"{node.name}: {NOT_EXCLUDED}; {words_of(node)}" for node in shut[:SHUT_SHOWN]]
    more = len(shut) - len(lines)
    lines += [f"and {counted(more, 'more node')}: `tr11 nodes list`"] if more else []
    names = [node.name for node in shut]
    past = []
    if nodes_context.forbids(names):
        past = [f"To exclude as many takes --force: {nodes_context.limit}."]
    return [
        *lines,
        "No job is placed there before the site changes that. To ask it, and to keep this run off afterwards, too:",
        f"  tr11 nodes list {compress(names)} --report -",
        f"  {nodes_context.exclude_command(names)}",
        *past,
    ]


def _standing_lines(row: NodeRow) -> list[str]:
    """How a node stands that is suspected or avoided, here or in another run: what was seen, what
    comes next.
    """
    entry = row.suspicion or row.exclusion
    lines = []
    if entry is not None and entry.state != NodeStanding.EXCLUDE:
        lines += [f"{row.name}: {entry.state}: {entry.why}", f"  {what_comes_next(entry)}"]
    lines += [f"{row.name}: another run has it as {one.state}: {one.why}" for one in row.elsewhere]
    return lines


def _row_words(row: NodeRow, now: float) -> tuple[str, ...]:
    state = row.state or "not known to the scheduler"
    jobs = ",".join(row.jobs)
    if row.exclusion is None:
        standing = row.suspicion.state if row.suspicion is not None else ""
        return row.name, state, jobs, "", standing, row.reason and f"(site) {row.reason}"
    why = "; ".join(
        filter(None, (short_reason(row.exclusion), row.reason and f"(site) {row.reason}"))
    )
    return row.name, state, jobs, row.exclusion.owner or "?", expiry(row.exclusion, now), why


def _row_values(row: NodeRow, now: float) -> dict[str, Any]:
    return {
        "node": row.name,
        "state": row.state,
        "site_reason": row.reason,
        "site_reason_since": None if row.node is None else row.node.reason_time,
        "site_reason_by": "" if row.node is None else row.node.reason_user,
        "jobs": list(row.jobs),
        "exclusion": None if row.exclusion is None else exclusion_values(row.exclusion, now),
        "suspicion": None if row.suspicion is None else exclusion_values(row.suspicion, now),
        "elsewhere": [exclusion_values(entry, now) for entry in row.elsewhere],
    }


# ----------------------------------------------------------------------------- check
@app.command()
def check(
    context: Annotated[RunContext, SCHEDULER, JSON],
    nodes: SomeNodes = None,
    due: Annotated[
        bool,
        typer.Option(
            "--due",
            help="The excluded nodes whose time is over: those that pass may be used again.",
        ),
    ] = False,
    timeout: Annotated[float, timeout_option("A node that has not answered is unknown.")] = 120,
    of_job: Annotated[
        bool,
        typer.Option("--job", help="The nodes of the job around this command; no card is read."),
    ] = False,
    printed: Annotated[
        Printed | None,
        typer.Option("--print", help="Of a job: print only the host list of these."),
    ] = None,
    need: Annotated[
        int | None,
        typer.Option("--need", metavar="N", min=1, help="Of a job: so many good nodes are enough."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=0,
            help="Of a job: GPUs on each node; else as Slurm says.",
        ),
    ] = None,
    scripts: Annotated[
        list[str] | None,
        typer.Option(
            "--script",
            metavar="FILE",
            help="Of a job: a check of your own (0 fine, 1 bad).",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="CHECK", help="Of a job: do not make this check."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Of a job: each node must be able to write there.",
        ),
    ] = None,
) -> Outcome:
    """Run the health checks on nodes, each in a small job of its own, or beside our running job.

    Without a card, in any job: on the nodes of that job, in steps of it, as before a launch. Nothing
    is excluded by that; --print good gives a list for `srun --nodes N --nodelist LIST`.

    Exit code 0: all well, or as many as --need; 1: a node is bad; 3: a node, or a part of its checks,
    could not be checked.

    Examples:
      tr11 nodes check jean-zay-iam[07,12]
      tr11 nodes check --due
      tr11 nodes check --job || exit
      GOOD=$(tr11 nodes check --job --need 4 --print good) || exit
    """
    question = JobQuestion(
        nodes=tuple(nodes or ()),
        gpus=gpus,
        folder=folder,
        scripts=tuple(scripts or ()),
        skip=tuple(skip or ()),
        need=need,
        printed=printed,
        timeout=timeout,
    )
    if of_job or not context.has_card:
        if due:
            raise WrongUsage("--due is of a run's exclusions: give --run CARD, and no --job")
        if printed is not None and context.as_json:
            raise WrongUsage("--print and --json: the document has all lists; give one of the two")
        return check_job(question)
    if question.words:
        raise WrongUsage(f"{question.words[0]} is of a job's nodes: give --job too")
    from tr11ops.rundir.exclusions import exclude

    nodes_context = open_nodes_context(context)
    names = nodes_context.resolve(nodes or ())
    if due:
        waiting = {entry.node for entry in due_for_recheck(nodes_context.exclusions, time.time())}
        names = tuple(name for name in (names or sorted(waiting)) if name in waiting)
        if not names:
            say("no exclusion is due for a check")
    elif not names:
        names = tuple(node.name for node in nodes_context.partition_nodes)
    results = check_them(nodes_context, names, timeout) if names else ()
    may_come = let_in(nodes_context, results) if due else frozenset()
    readmitted, prolonged = [], []
    for entry in results if due else ():
        is_fit = entry.is_judged and entry.result is not CheckOutcome.BAD
        if is_fit or entry.node in may_come:
            readmitted.append(entry.node)
        elif entry.result is CheckOutcome.BAD:
            days = nodes_context.card.resilience.exclusion_days
            why = f"health check: {entry.why}"
            asked = Exclusion(entry.node, why, owner=nodes_context.user)
            exclude(nodes_context.directory, asked, days=days)
            prolonged.append(entry.node)
    failed: tuple[str, ...] = ()
    if readmitted:
        done = readmit(
            nodes_context,
            readmitted,
            "its time was over, and it passed the health checks",
            owner=nodes_context.user,
        )
        readmitted, failed = list(done.nodes), done.failures
    tell_other_runs(nodes_context)
    more = counted(nodes_context.card.resilience.exclusion_days, "more day")
    lines = [
        *(f"{name}: may be used again" for name in readmitted),
        *(f"{name}: stays excluded for {more}" for name in prolonged),
        *failed,
    ]
    code, notes = 0, list[str]()
    unjudged = sum(not entry.is_judged and entry.node not in may_come for entry in results)
    if unjudged:
        doubtful = counted(unjudged, "node is", "nodes are")
        text = (
            f"{doubtful} not known to be fine, of {len(results)}; what a site cannot check: {SKIP}"
        )
        code, notes = 3, [text]
    if failed or any(entry.result is CheckOutcome.BAD for entry in results):
        code = 1
    found = {
        "schema": SCHEMA,
        "nodes": [result_values(entry) for entry in results],
        "readmitted": readmitted,
        "prolonged": prolonged,
        "failed": failed,
    }
    shown = partial(show_checks, results, lines)
    return Outcome(found, notes=notes, exit_code=code, screen=shown)


# ----------------------------------------------------------------------------- exclude
app.command("bench")(bench_nodes)
app.command("search")(search_nodes)
app.command()(exclude)
app.command()(include)


@app.command()
def history(
    context: Annotated[RunContext, JSON],
    nodes: SomeNodes = None,
) -> Outcome:
    """What happened to nodes in this run: excluded, checked, included; by whom and why. Asks no
    scheduler.

    Examples:
      tr11 nodes history
      tr11 nodes history jean-zay-iam07 --json
    """
    _, directory = context.seen(missing=None)
    try:
        wanted = {name for text in nodes or () for name in expand(text)}
    except ValueError as error:
        raise WrongUsage(f"NODE: {error}") from None
    ledger = read_journal(directory.journal)
    try:
        entries = read_version(directory.exclusions).exclusions
    except (OSError, ValueError) as error:
        raise Unobserved(f"the list of excluded nodes cannot be read: {error}") from None
    events = [
        event for event in events_of(ledger, entries) if not wanted or event["node"] in wanted
    ]
    made = table("WHEN", "NODE", "WHAT", "WHO", "WHY")
    for event in events:
        if event["kind"] == EXCLUDED:
            kind = kept_off(event.get("state"))
        else:
            kind = event["kind"].removeprefix("node-")
        what = kind + (f": {event['result']}" if event.get("result") else "")
        node, why = str(event["node"]), str(event["why"])
        words = (
            local_time(event["time"]),
            node,
            what,
            str(event["who"]),
            why.removeprefix(f"{node}: "),
        )
        made.add_row(*map(plain_text, words))
    return Outcome(
        {"schema": SCHEMA, "events": events},
        notes=[f"tr11: {fault}" for fault in ledger.faults],
        remarks=() if events else ("nothing is recorded of nodes",),
        screen=partial(show, made),
    )
