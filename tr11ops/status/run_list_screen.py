"""The screen of `tr11 list`: what needs a person first, then what all runs hold together. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.alerts.state import alerts_words
from tr11ops.base.invocation import command_for
from tr11ops.base.units import counted, duration, wrapped
from tr11ops.cluster.arrays import compress
from tr11ops.status.published import seconds_of
from tr11ops.status.run_list import ListedRun, RunList, total, unwatched
from tr11ops.watchdog.verdict import MOVING, VerdictWord

TITLES = f"{'verdict':<10} {'for':>11} {'iteration':>15} {'loss':>8} {'left':>11}  run"


def list_lines(shown: RunList, now: float) -> Iterator[str]:
    """All of it, in lines of at most 80 characters but for long paths."""
    if not shown.runs:
        return
    if len(shown.runs) > 1:
        yield from wrapped(shown.sentence)
    for run in shown.runs:
        # one of another trainer may be only watched
        if run.word in MOVING and run.told.get("trainer") is None:
            yield f"to stop one: {command_for(str(run.directory), 'kill --wait')}"
            break
    yield TITLES
    for run in shown.runs:
        yield from _run_lines(run, now)
    yield ""
    for words in sum_lines(shown):
        yield from wrapped(words, further="  ")


def _run_lines(run: ListedRun, now: float) -> Iterator[str]:
    if run.status is None:
        yield f"{'unknown':<10} {run.directory}: {run.why}"
        return
    seen = run.document()
    again = seen["done_again"]  # while it starts, the log still ends with what was lost
    lost = ""
    done = seen["iteration"]
    if again is not None:
        done = again["from_step"]
        lost = f"  ({counted(again['iterations'], 'iteration')} again)"
    step = _step(done, seen["total_iterations"])
    since = seconds_of(seen["verdict_since"])
    length = loss = left = "-"
    if seen["loss"] is not None:
        loss = f"{seen['loss']:.4f}"
    if since is not None:
        length = duration(now - since)
    if seen["remaining_seconds"] is not None and run.word in MOVING:
        left = duration(seen["remaining_seconds"])
    yield f"{seen['verdict']:<10} {length:>11} {step:>15} {loss:>8} {left:>11}  {run.directory}{lost}"
    said = [unwatched(run.word, seen["watchdog_fault"]), "; ".join(_facts(run, now))]
    if run.exit_code or run.word is VerdictWord.SLOW or run.word.is_stop:
        said.insert(0, seen["why"])
    if run.exit_code == 1:
        said.append(f"next: `{command_for(str(run.directory), 'status')}`")
    for words in filter(None, said):
        yield from wrapped(words, "  ", "  ")


def _step(done: int | None, planned: int | None) -> str:
    if done is None:
        return "-"
    if planned is None:
        return str(done)
    return f"{done}/{planned}"


def _facts(run: ListedRun, now: float) -> Iterator[str]:
    """Who has its alerts, who is on call, whose it is, on which nodes, and what it has cost."""
    said = alerts_words(run.cares, run.on_call, now)
    if said:
        yield f"alerts: {said}"
    if run.on_call is None:
        yield "on call: unknown"
    elif run.on_call.who and (run.on_call.taken is not None or " on call" not in said):
        yield f"on call: {run.on_call.words(now)}"
    if run.use is not None and run.use.team:
        yield run.use.team
    if run.nodes:
        yield f"on {compress(run.nodes)}"
    if run.use is not None:
        yield from run.use.words


def sum_lines(shown: RunList) -> Iterator[str]:
    """What each team's runs hold and cost where there are several teams, what all do, and the nodes
    that several runs have in common.
    """
    teams = shown.teams
    if len(teams) > 1:
        for team, runs in teams.items():
            words = (counted(len(runs), "run"), *total(runs).words)
            yield f"{team or 'no team'}: {', '.join(words)}"
    yield f"All runs: {', '.join(total(shown.runs).words)}"
    for word, nodes in (("held", shown.shared_nodes), ("excluded", shown.shared_exclusions)):
        groups: dict[tuple[str, ...], list[str]] = {}
        for node, who in nodes.items():
            groups.setdefault(who, []).append(node)
        for who, names in groups.items():
            yield f"{compress(names)}: {word} by {', '.join(who)}"
