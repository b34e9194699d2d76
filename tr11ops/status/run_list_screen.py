"""The screen of `tr11 list`: what needs a person first, then what all runs hold together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from tr11ops.alerts.state import AlertCare
from tr11ops.base.units import counted, duration, wrapped
from tr11ops.cluster.arrays import compress
from tr11ops.status.run_list import (
    ListedRun,
    RunList,
    alerts_words,
    total,
    unwatched,
    verdict_counts,
)
from tr11ops.status.run_use import RunUse
from tr11ops.watchdog.verdict import VerdictWord

TITLES = f"{'verdict':<10} {'iteration':>15} {'loss':>8} {'left':>11}  run"


def list_lines(shown: RunList, now: float) -> Iterator[str]:
    """All of it, in lines of at most 80 characters but for long paths."""
    if not shown.runs:
        return
    if len(shown.runs) > 1:
        yield from _wrapped(_summary(shown), "", "")
    yield TITLES
    for run in shown.runs:
        yield from _run_lines(run, now)
    teams = team_sums(shown)
    if teams:
        yield ""
    for words in teams:
        yield from _wrapped(words, "", "  ")
    yield from _shared_lines("held by", shown.shared_nodes)
    yield from _shared_lines("excluded by", shown.shared_exclusions)


def _wrapped(text: str, first: str, further: str) -> list[str]:
    if not text:
        return []
    return wrapped(text, first, further)


def _summary(shown: RunList) -> str:
    counts = verdict_counts((str(run.directory), run.word, run.exit_code) for run in shown.runs)
    return f"{counts}; {', '.join(total(shown.runs).words)}"


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
    loss = left = "-"
    if seen["loss"] is not None:
        loss = f"{seen['loss']:.4f}"
    if seen["remaining_seconds"] is not None:
        left = duration(seen["remaining_seconds"])
    yield f"{seen['verdict']:<10} {step:>15} {loss:>8} {left:>11}  {run.directory}{lost}"
    if run.exit_code or run.word is VerdictWord.SLOW:
        yield from _wrapped(seen["why"], "  ", "  ")
    yield from _wrapped(unwatched(run.word, seen["watchdog_fault"]), "  ", "  ")
    facts = "; ".join(_facts(run, run.use, now))
    yield from _wrapped(facts, "  ", "  ")


def _step(done: int | None, planned: int | None) -> str:
    if done is None:
        return "-"
    if planned is None:
        return str(done)
    return f"{done}/{planned}"


def _facts(run: ListedRun, use: RunUse | None, now: float) -> Iterator[str]:
    """Since when, who has it, whose it is, on which nodes, and what it has cost."""
    since = run.told.get("verdict_since")
    if since is not None:
        moment = datetime.fromisoformat(since).timestamp()
        yield f"for {duration(max(0.0, now - moment))}"
    yield from _care(run, now)
    if use is None:
        return
    if use.team:
        yield use.team
    if run.nodes:
        yield f"on {compress(run.nodes)}"
    yield from use.words


def _care(run: ListedRun, now: float) -> Iterator[str]:
    """Who has its alerts, and who is on call."""
    said = ""
    if run.cares:
        said = f"alerts: {alerts_words(run.cares, run.on_call, now)}"
    elif run.exit_code == 1:
        said = AlertCare().words(run.on_call, now)
    if said:
        yield said
    if run.on_call is None:
        yield "on call: unknown"
    elif run.on_call.who and (run.on_call.taken is not None or " on call" not in said):
        yield f"on call: {run.on_call.words(now)}"


def team_sums(shown: RunList) -> list[str]:
    """What each team's runs hold and cost, where there are several teams."""
    sums = {team: total(runs) for team, runs in shown.teams.items()}
    if len(sums) < 2:
        return []
    return [
        f"{team or 'no team'}: {counted(use.runs, 'run')}, {', '.join(use.words)}"
        for team, use in sums.items()
    ]


def _shared_lines(word: str, nodes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """A line for each group of runs that have nodes in common."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node, who in nodes.items():
        groups.setdefault(who, []).append(node)
    for who, names in groups.items():
        yield from _wrapped(f"{compress(names)}: {word} {', '.join(who)}", "", "  ")
