"""`tr11 nodes`: which nodes a run may use. It never drains or resumes a node: that is the site's own business."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    agree,
    directory_of,
    read_card,
    say,
)
from tr11ops.cli.nodes_view import (
    SCHEMA,
    Desk,
    apply_to_queue,
    exclusion_values,
    expiry,
    moment,
    open_desk,
    plain_text,
    require_run,
    show,
    table,
    write_note,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.nodes.check import NodeCheck
    from tr11ops.nodes.view import NodeRow, QueueChange

app = typer.Typer(
    name="nodes",
    help="Which nodes the run may use: list, check, exclude, include, history. Nodes are never drained or resumed.",
    no_args_is_help=True,
)

Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="Names or host lists: jean-zay-iam[01-03].")]
SomeNodes = Annotated[
    list[str] | None, typer.Argument(metavar="[NODE...]", help="Names or host lists; default: all of the partition.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the list and in the journal.")]
ReportOption = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE", help="Write a note to the site's support about them; - prints it."),
]


# ----------------------------------------------------------------------------- list
@app.command("list")
def list_nodes(
    nodes: SomeNodes = None,
    run: RunOption = None,
    excluded: Annotated[bool, typer.Option("--excluded", help="Only the excluded ones.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also nodes of other partitions.")] = False,
    report: ReportOption = None,
    as_json: JsonOption = False,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Nodes with their state, this run's exclusions, and the jobs that hold them.

    [bold]Examples[/bold]

      tr11 nodes list --excluded

      tr11 nodes list jean-zay-iam07 --report -
    """
    from tr11ops.nodes.view import rows

    desk = open_desk(run, overrides, scheduler)
    wanted = set(desk.resolve(nodes or ()))
    if report is not None:
        write_note(desk, sorted(wanted), report)
        return
    chosen = desk.nodes if everything or wanted else desk.partition_nodes
    now = time.time()
    found = [
        row
        for row in rows(chosen, desk.exclusions, desk.jobs, now)
        if (not wanted or row.name in wanted) and (row.exclusion is not None or not excluded)
    ]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "nodes": [_row_values(row, now) for row in found]}, indent=1))
        return
    made = table("NODE", "STATE", "JOBS", "EXCLUDED BY", "EXPIRY", "WHY")
    for row in found:
        made.add_row(*map(plain_text, _row_words(row, now)))
    show(made)
    count = sum(1 for row in found if row.exclusion)
    say(f"{len(found)} nodes, {count} excluded" if found else "no such node")


def _row_words(row: NodeRow, now: float) -> tuple[str, ...]:
    from tr11ops.nodes.note import short_reason

    state = row.state or "not known to the scheduler"
    jobs = ",".join(row.jobs)
    if row.exclusion is None:
        return row.name, state, jobs, "", "", row.reason and f"(site) {row.reason}"
    why = "; ".join(filter(None, (short_reason(row.exclusion), row.reason and f"(site) {row.reason}")))
    return row.name, state, jobs, row.exclusion.owner or "?", expiry(row.exclusion, now), why


def _row_values(row: NodeRow, now: float) -> dict[str, Any]:
    return {
        "node": row.name,
        "state": row.state,
        "site_reason": row.reason,
        "jobs": list(row.jobs),
        "exclusion": None if row.exclusion is None else exclusion_values(row.exclusion, now),
    }


# ----------------------------------------------------------------------------- check
@app.command()
def check(
    nodes: SomeNodes = None,
    run: RunOption = None,
    due: Annotated[
        bool,
        typer.Option("--due", help="The excluded nodes whose time is over: those that pass may be used again."),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="A node that has not answered is unknown.")
    ] = 120,
    as_json: JsonOption = False,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Run the health checks on nodes, each in a small job of its own, or beside our running job.

    Exit code 0: all well; 1: a node is bad; 3: some could not be checked.

    [bold]Examples[/bold]

      tr11 nodes check jean-zay-iam[07,12]

      tr11 nodes check --due
    """
    from tr11ops.agent.health.base import Outcome
    from tr11ops.cli.nodes_check import check_them, result_values
    from tr11ops.exclusions import due_for_recheck, exclude

    desk = open_desk(run, overrides, scheduler)
    names = desk.resolve(nodes or ())
    if due:
        waiting = {entry.node for entry in due_for_recheck(desk.exclusions, time.time())}
        names = tuple(name for name in (names or sorted(waiting)) if name in waiting)
        if not names:
            say("no exclusion is due for a check")
    elif not names:
        names = tuple(node.name for node in desk.partition_nodes)
    results = check_them(desk, names, timeout) if names else ()
    readmitted, prolonged = [], []
    for entry in results if due else ():
        if entry.result in {Outcome.FINE, Outcome.WARNING}:
            readmitted.append(entry.node)
        elif entry.result is Outcome.BAD:
            days = desk.card.resilience.exclusion_days
            exclude(desk.directory, entry.node, why=f"health check: {entry.why}", owner=desk.user, days=days)
            prolonged.append(entry.node)
    failed = _readmit(desk, readmitted, "its time was over, and it passed the health checks") if readmitted else []
    if as_json:
        values = [result_values(entry) for entry in results]
        found = {"schema": SCHEMA, "nodes": values, "readmitted": readmitted, "prolonged": prolonged, "failed": failed}
        print(json.dumps(found, indent=1))
    else:
        _show_checks(results)
        for name in readmitted:
            print(f"{name}: may be used again")
        for name in prolonged:
            print(f"{name}: stays excluded for another {desk.card.resilience.exclusion_days:g} days")
        for line in failed:
            print(line)
    outcomes = {entry.result for entry in results}
    bad = Outcome.BAD in outcomes or bool(failed)
    raise typer.Exit(1 if bad else 3 if Outcome.UNKNOWN in outcomes else 0)


def _show_checks(results: Sequence[NodeCheck]) -> None:
    made = table("NODE", "RESULT", "WHY")
    for entry in results:
        made.add_row(*map(plain_text, (entry.node, entry.result.upper(), entry.why)))
    if results:
        show(made)


# ----------------------------------------------------------------------------- exclude
@app.command()
def exclude(
    nodes: Nodes,
    run: RunOption = None,
    why: ReasonOption = "",
    days: Annotated[
        float | None,
        typer.Option(
            "--days", metavar="N", help="Due for a check after this long; default: resilience.exclusion_days."
        ),
    ] = None,
    evidence: Annotated[
        list[str] | None, typer.Option("--evidence", metavar="LINE", help="What was seen; may be repeated.")
    ] = None,
    report: ReportOption = None,
    dry_run: DryOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Keep the run off these nodes: from now on, and in the work that is queued already, which keeps its place.

    A running job is not touched. Never so many that the run has too few nodes left (resilience.exclusion_cap_percent).

    [bold]Examples[/bold]

      tr11 nodes exclude jean-zay-iam07 --reason "Xid 79" --days 7

      tr11 nodes exclude jean-zay-iam07 --report note.txt --yes
    """
    from tr11ops.exclusions import exclude as put_on

    desk = open_desk(run, overrides, scheduler)
    require_run(desk)
    names = desk.resolve(nodes)
    lasting = desk.card.resilience.exclusion_days if days is None else days
    if not 0 < lasting <= 36500:
        raise Refusal(f"--days {lasting:g}: must be above 0 and at most 36500", exit_code=2)
    most = _most(desk)
    _refuse_too_many(desk, names, most)
    changes = desk.queue_preview(add=names)
    lines = [f"exclude {name} for {lasting:g} days{_already(desk, name)}" for name in names]
    lines += [*_queue_lines(changes), *_running_lines(desk, names)]
    for line in lines:
        say(line)
    failed: list[str] = []
    if not dry_run:
        agree(f"Exclude {len(names)} nodes?" if len(names) > 1 else f"Exclude {names[0]}?", yes)
        for name in names:
            done = put_on(
                desk.directory, name, why=why, owner=desk.user, evidence=tuple(evidence or ()), days=lasting, most=most
            )
            if not done:
                failed.append(f"{name}: somebody else has excluded nodes meanwhile, and {most} are the most allowed")
        failed += apply_to_queue(desk)
        if report is not None:
            write_note(desk, names, report)
    _finish("would-exclude" if dry_run else "excluded", names, changes, failed, as_json)


def _most(desk: Desk) -> int:
    from tr11ops.exclusions import most_exclusions

    percent = desk.card.resilience.exclusion_cap_percent
    return most_exclusions(len(desk.partition_nodes), desk.card.slurm.nodes, percent)


def _refuse_too_many(desk: Desk, names: Sequence[str], most: int) -> None:
    ours = {entry.node for entry in desk.exclusions}
    total = len(ours | set(names))
    if total > max(most, len(ours)):
        percent = desk.card.resilience.exclusion_cap_percent
        raise Refusal(
            f"{total} nodes would be excluded, {most} are the most allowed: {percent:g} % of the partition's "
            f"{len(desk.partition_nodes)} nodes, and never into the {desk.card.slurm.nodes} that the run needs; "
            "include others first, or raise resilience.exclusion_cap_percent"
        )


def _already(desk: Desk, name: str) -> str:
    entry = desk.find(name)
    return "" if entry is None else f" (it is already, by {entry.owner or '?'}: {entry.why or 'no reason'})"


def _queue_lines(changes: Sequence[QueueChange]) -> list[str]:
    return [
        f"queued job {change.job_id}: excluded nodes {','.join(change.before) or 'none'} -> "
        f"{','.join(change.after) or 'none'} (it keeps its place)"
        for change in changes
    ]


def _running_lines(desk: Desk, names: Sequence[str]) -> list[str]:
    return [
        f"job {job.job_id} runs on {name} now: it is not touched"
        for job in desk.own_jobs
        if job.state.is_active
        for name in names
        if name in job.nodes
    ]


def _finish(
    action: str, names: Sequence[str], changes: Sequence[QueueChange], failed: Sequence[str], as_json: bool
) -> None:
    """Say what was done and leave: exit code 1 when a part of it could not be done."""
    for line in failed:
        say(f"tr11: {line}")
    if as_json:
        queue = [
            {"job_id": change.job_id, "before": list(change.before), "after": list(change.after)} for change in changes
        ]
        found = {"schema": SCHEMA, "action": action, "nodes": list(names), "queue": queue, "failed": list(failed)}
        print(json.dumps(found, indent=1))
    else:
        say(f"{action}: {','.join(names) or 'nothing'}")
    raise typer.Exit(1 if failed else 0)


# ----------------------------------------------------------------------------- include
@app.command()
def include(
    nodes: Nodes,
    run: RunOption = None,
    why: ReasonOption = "",
    force: Annotated[bool, typer.Option("--force", help="Without a passed health check.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="A node that has not answered has not passed.")
    ] = 120,
    dry_run: DryOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Let the run use excluded nodes again, once they have passed the health checks.

    What the site has drained stays drained: tr11 resumes no node.

    [bold]Examples[/bold]

      tr11 nodes include jean-zay-iam07 --reason "GPU replaced"

      tr11 nodes include jean-zay-iam07 --force --yes
    """
    from tr11ops.agent.health.base import Outcome
    from tr11ops.cli.nodes_check import check_them

    desk = open_desk(run, overrides, scheduler)
    names = desk.resolve(nodes)
    absent = [name for name in names if desk.find(name) is None]
    for name in absent:
        say(f"{name} is not excluded by this run")
    names = tuple(name for name in names if name not in absent)
    for node in desk.nodes:
        if node.name in names and not node.is_usable:
            reason = f" ({plain_text(node.reason)})" if node.reason else ""
            say(f"{node.name} is {'+'.join(sorted(node.states))}{reason} by the site's hand, and stays so")
    if not names:
        _finish("included", (), (), (), as_json)
    changes = desk.queue_preview(remove=names)
    for line in (*(f"include {name}{_already(desk, name)}" for name in names), *_queue_lines(changes)):
        say(line)
    if dry_run:
        _finish("would-include", names, changes, (), as_json)
    agree(f"Include {len(names)} nodes?" if len(names) > 1 else f"Include {names[0]}?", yes)
    if not force:
        refused = [
            f"{entry.node}: {entry.result}: {entry.why}"
            for entry in check_them(desk, names, timeout)
            if entry.result in {Outcome.BAD, Outcome.UNKNOWN}
        ]
        if refused:
            raise Refusal("a node has not passed the health checks, nothing was changed:\n" + "\n".join(refused))
    failed = _readmit(desk, names, why)
    _finish("included", names, changes, failed, as_json)


def _readmit(desk: Desk, names: Sequence[str], why: str) -> list[str]:
    """Take nodes off the ledger and off the queued work's lists; returns what could not be done."""
    from tr11ops.exclusions import include as take_off

    for name in names:
        take_off(desk.directory, name, why=why, owner=desk.user)
    return apply_to_queue(desk, remove=names)


# ----------------------------------------------------------------------------- history
@app.command()
def history(
    nodes: SomeNodes = None,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """What happened to nodes in this run: excluded, checked, included; by whom and why. Asks no scheduler.

    [bold]Examples[/bold]

      tr11 nodes history

      tr11 nodes history jean-zay-iam07 --json
    """
    from tr11ops.cluster.hostlist import expand
    from tr11ops.exclusions import history as events_of
    from tr11ops.exclusions import read_version
    from tr11ops.journal import read_journal

    directory = directory_of(read_card(run, overrides))
    try:
        wanted = {name for text in nodes or () for name in expand(text)}
    except ValueError as error:
        raise Refusal(f"NODE: {error}", exit_code=2) from None
    ledger = read_journal(directory.journal)
    try:
        entries = read_version(directory.exclusions).exclusions
    except (OSError, ValueError) as error:
        raise Refusal(f"the list of excluded nodes cannot be read: {error}", exit_code=3) from None
    events = [event for event in events_of(ledger, entries) if not wanted or event["node"] in wanted]
    for fault in ledger.faults:
        say(f"tr11: {fault}")
    if as_json:
        print(json.dumps({"schema": SCHEMA, "events": events}, indent=1))
        return
    made = table("WHEN", "NODE", "WHAT", "WHO", "WHY")
    for event in events:
        what = event["kind"].removeprefix("node-") + (f": {event['result']}" if event.get("result") else "")
        node, why = str(event["node"]), str(event["why"])
        words = (moment(event["time"]), node, what, str(event["who"]), why.removeprefix(f"{node}: "))
        made.add_row(*map(plain_text, words))
    show(made)
    if not events:
        say("nothing is recorded of nodes")
