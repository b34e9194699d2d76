"""What a page shows of a run, in words: from its document alone, of which nothing is taken on trust.
Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from tr11ops.base.invocation import for_card
from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import compress
from tr11ops.report.page import Tile
from tr11ops.serve.poller import News
from tr11ops.status.answer import NEEDS
from tr11ops.status.published import (
    MOST_ROWS,
    holders_of,
    list_of,
    number,
    rows,
    stamp,
    table,
    text,
    word_of,
)
from tr11ops.status.run_list import ListedRun, RunList, total, urgency
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.record import Record
from trainer.contract.units import printable

# a sign and a tone for each verdict: colour is never the only sign
LOOKS: Mapping[VerdictWord, tuple[str, str]] = {
    VerdictWord.DOWN: ("✖", "bad"),
    VerdictWord.STALLED: ("✖", "bad"),
    VerdictWord.AT_RISK: ("!", "warn"),
    VerdictWord.UNKNOWN: ("?", "warn"),
    VerdictWord.STARTING: ("▲", "calm"),
    VerdictWord.QUEUED: ("…", "calm"),
    VerdictWord.STOPPED: ("■", "calm"),
    VerdictWord.HEALTHY: ("●", "good"),
    VerdictWord.FINISHED: ("✓", "good"),
}
OLD_LOOKS = 2  # looks that were missed: what was seen then says nothing of now
MOST_NODES = 5000  # that are compared; MOST_ROWS of them are shown
EXCLUSION_WORDS = {"suspect": "suspected", "avoid": "avoided", "exclude": "excluded"}


class ShownAlert(Record):
    """An open alert and who has it."""

    fingerprint: str
    severity: str
    title: str
    since: str
    who: str
    runbook: str
    watchdog: str
    is_taken: bool


class ShownFault(Record):
    """A fault of the last look: what was seen, and what to type."""

    severity: str
    title: str
    evidence: tuple[str, ...]
    fix: str
    runbook: str


class ShownNode(Record):
    """A node that the run uses or must not use. `times_usual`: how many times as long its slowest
    rank computes for a step as is usual; None where that is not measured. `measured_at`: the
    iteration of that.
    """

    name: str
    state: str
    why: str = ""
    iteration: str = "-"
    phase: str = ""
    silent: str = "-"
    seconds: str = "-"
    times_usual: float | None = None
    measured_at: float | None = None

    @property
    def times(self) -> str:
        """The factor in words."""
        return "-" if self.times_usual is None else f"{self.times_usual:.2f}"

    @property
    def is_bad(self) -> bool:
        return self.state not in {"in use", "spare"}


class RunView(Record):
    """A run as the pages show it. `age`: seconds since the look that it is of, None before the first;
    after `old_after` seconds no answer of that look holds for now.
    """

    key: str
    name: str
    variant: str
    folder: str
    word: str
    sign: str
    tone: str
    urgency: tuple[int, int]
    why: str
    answer: str
    since: str
    iteration: str
    percent: float | None
    loss: str
    eta: str
    on_call: str
    shift: str
    owners: str
    team: str
    used: str
    looked: str
    age: float | None
    old_after: float
    exit_code: int
    can_act: bool
    is_stopped: bool
    is_mirror: bool
    tiles: tuple[Tile, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    faults: tuple[ShownFault, ...] = ()
    alerts: tuple[ShownAlert, ...] = ()
    nodes: tuple[ShownNode, ...] = ()
    nodes_line: str = ""
    alerts_line: str = ""
    ended_line: str = ""
    stop_command: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def needs_person(self) -> bool:
        return self.exit_code == 1

    @property
    def is_old(self) -> bool:
        """Whether the look is too old to say how it is now."""
        return self.age is not None and self.age > self.old_after

    @property
    def title(self) -> str:
        if self.variant in {"", "main"}:
            return self.name
        return f"{self.name} / {self.variant}"


def view_of(news: News, now: float) -> RunView:
    """What is shown of a run at the moment `now`."""
    told = table(news.document)
    run, word = table(told.get("run")), word_of(told.get("verdict"))
    sign, tone = LOOKS[word]
    code = told.get("exit_code") if news.document is not None else 3
    exit_code = code if isinstance(code, int) and code in {0, 1} else 3
    done, total = number(told.get("iteration")), number(told.get("total_iterations"))
    age = _age_of_look(news, now)
    nodes = tuple(sorted(_nodes(told), key=_trouble_first))
    alerts = tuple(_alert(entry, now) for entry in rows(told.get("alerts")))
    return RunView(
        key=news.key,
        name=text(run.get("name"), 80) or printable(news.folder.name),
        variant=text(run.get("variant"), 40),
        folder=printable(str(news.folder)),
        word=word.value,
        sign=sign,
        tone=tone,
        urgency=urgency(word, exit_code),
        why=text(told.get("why") or news.why),
        answer=text(told.get("answer")),
        since=_since(told, now),
        iteration=_iteration(done, total),
        percent=_percent(done, total),
        loss=_number(told.get("loss"), ".4f"),
        eta=_eta(told, word),
        on_call=", ".join(news.on_call) or "no one named",
        shift=news.shift,
        owners=", ".join(holders_of(told.get("alerts"))),
        team="" if news.use is None else news.use.team,
        used="" if news.use is None else ", ".join(news.use.words),
        looked="not yet" if age is None else f"{duration(age)} ago",
        age=age,
        old_after=OLD_LOOKS * news.every,
        exit_code=exit_code,
        can_act=news.can_act and news.document is not None,
        is_stopped=any(
            table(told.get(name)).get("set") is True for name in ("kill_switch", "pause")
        ),
        is_mirror=news.is_mirror,
        tiles=tuple(_tiles(told, now)),
        needs=tuple(_needs(told.get("sleep_needs"), news)),
        faults=tuple(_fault(entry, news) for entry in rows(told.get("findings"))),
        alerts=alerts,
        nodes=nodes[:MOST_ROWS],
        nodes_line=_nodes_line(nodes),
        alerts_line=_alerts_line(alerts),
        ended_line=_ended_line(told),
        stop_command=command("tr11 kill --wait", news),
        unknown=tuple(text(line, 200) for line in list_of(told.get("unknown"))[:MOST_ROWS]),
    )


def in_order(views: Sequence[RunView]) -> list[RunView]:
    """What needs a person first."""
    return sorted(views, key=_place)


def sums_of(every: Sequence[News]) -> str:
    """What all runs hold together, and each team where there are several; "" where nothing is known
    of one.
    """
    runs = [ListedRun(news.folder, _whole(news), use=news.use) for news in every]
    if not any(run.use for run in runs):
        return ""
    found = RunList.of(runs)
    shown = [f"All: {', '.join(total(found.runs).words)}."]
    if len(found.teams) > 1:
        for team, of_team in found.teams.items():
            shown.append(f"{team or 'No team'}: {', '.join(total(of_team).words)}.")
    for words, nodes in (
        ("Held by several runs", found.shared_nodes),
        ("Excluded by several runs", found.shared_exclusions),
    ):
        if nodes:
            shown.append(f"{words}: {compress(nodes)}.")
    return " ".join(shown)


def _whole(news: News) -> dict[str, Any] | None:
    """The document of a look; a published one has less."""
    if news.document is None or news.is_mirror:
        return None
    return dict(news.document)


def _place(view: RunView) -> tuple[tuple[int, int], str]:
    return view.urgency, view.name


# ----------------------------------------------------------------------------- parts
def _age_of_look(news: News, now: float) -> float | None:
    """Seconds since the moment that a look shows: that of its snapshot, before it was put together.
    A mirrored copy says itself how old it is.
    """
    if not news.looked:
        return None
    moment = None if news.is_mirror else seconds_of(table(news.document).get("time"))
    return max(0.0, now - min(news.looked, news.looked if moment is None else moment))


def _since(told: Mapping[str, Any], now: float) -> str:
    """For how long the verdict has held; "" where no one knows."""
    moment = seconds_of(told.get("verdict_since"))
    if moment is None:
        return ""
    return f"for {duration(max(0.0, now - moment))}"


def _iteration(done: float | None, total: float | None) -> str:
    if done is None:
        return "none yet"
    if total is None:
        return f"{done:,.0f}"
    return f"{done:,.0f} / {total:,.0f}"


def _percent(done: float | None, total: float | None) -> float | None:
    if done is None or not total or total < 0:
        return None
    return min(100.0, max(0.0, 100.0 * done / total))


def _eta(told: Mapping[str, Any], word: VerdictWord) -> str:
    left = number(told.get("remaining_seconds"))
    if left is None or word is VerdictWord.FINISHED:
        return "-"
    likely = number(table(told.get("finish")).get("likely_seconds"))
    return duration(left if likely is None else likely)


def _tiles(told: Mapping[str, Any], now: float) -> Iterator[Tile]:
    rate = table(told.get("throughput"))
    yield Tile(
        "loss",
        _number(told.get("loss"), ".4f"),
        f"grad norm {_number(told.get('grad_norm'), '.3f')}",
    )
    percent = number(rate.get("percent"))
    best = "" if percent is None else f"{percent:.0f} % of its best"
    yield Tile("seconds a step", _number(told.get("seconds_per_iteration"), ".2f"), best)
    trainer = table(told.get("trainer"))
    tokens = number(told.get("consumed_tokens"))
    if tokens is not None or not trainer:  # another trainer may not tell of them
        batch = _number(told.get("global_batch_size"), ",.0f")
        yield Tile("tokens seen", "-" if tokens is None else short(tokens), f"batch {batch}")
    if number(trainer.get("level")) == 0:
        yield Tile("checkpoint", "not known", "level 0: only watched")
    else:
        saved = table(told.get("last_checkpoint"))
        yield Tile("checkpoint", _number(saved.get("step"), ",.0f"), _age(saved))
    for name in ("backup", "sync"):
        copy = told.get(name)
        if isinstance(copy, Mapping):
            yield Tile(name, _number(copy.get("step"), ",.0f"), _age(copy))
    missing, damaged = number(told.get("copies_missing")), number(told.get("copies_damaged"))
    if missing or damaged:
        yield Tile("copies", f"{missing or 0:.0f} missing", f"{damaged or 0:.0f} damaged")
    use = told.get("node_use") or told.get("nodes")
    if isinstance(use, Mapping):
        spare = f"{_number(use.get('spare'), '.0f')} spare, {_number(use.get('excluded'), '.0f')} excluded"
        yield Tile("nodes", _number(use.get("used"), ".0f"), spare)
    queue = number(told.get("queue_coverage_seconds"))
    if queue is not None:
        yield Tile("queued for", duration(queue), "without a gap")
    goodput = table(told.get("goodput"))
    useful = number(goodput.get("useful_share"))
    if useful is not None:
        yield Tile("goodput", f"{100 * useful:.1f} %", _faults(goodput))
    last = seconds_of(told.get("last_step_time"))
    if last is not None:
        yield Tile("last step", f"{duration(max(0.0, now - last))} ago")


def _age(entry: Mapping[str, Any]) -> str:
    age = number(entry.get("age_seconds"))
    return "" if age is None else f"{duration(age)} ago"


def _needs(value: object, news: News) -> Iterator[tuple[str, str]]:
    """What is missing before a person may sleep, and what to type."""
    for entry in list_of(value)[:MOST_ROWS]:
        if isinstance(entry, Mapping):
            yield text(entry.get("text")), command(entry.get("fix"), news)
        elif isinstance(entry, str) and entry in NEEDS:
            yield NEEDS[entry], ""


def _fault(entry: Mapping[str, Any], news: News) -> ShownFault:
    evidence = tuple(text(line, 300) for line in list_of(entry.get("evidence"))[:12])
    return ShownFault(
        severity=_severity(entry),
        title=text(entry.get("title")),
        evidence=evidence,
        fix=command(entry.get("fix"), news),
        runbook=page_of(entry.get("runbook")),
    )


def _alert(entry: Mapping[str, Any], now: float) -> ShownAlert:
    since, who = seconds_of(entry.get("since")), []
    if entry.get("owner"):
        who.append(text(entry.get("owner"), 60))
    if entry.get("acknowledged_by"):
        who.append(f"acknowledged by {text(entry.get('acknowledged_by'), 60)}")
    until = seconds_of(entry.get("snoozed_until"))
    if until is not None and until > now:
        who.append(f"snoozed for {duration(until - now)}")
    return ShownAlert(
        fingerprint=text(entry.get("fingerprint"), 40),
        severity=_severity(entry),
        title=text(entry.get("title")),
        since="" if since is None else f"{duration(max(0.0, now - since))}",
        who=", ".join(who) or "no one",
        runbook=page_of(entry.get("runbook")),
        watchdog=text(entry.get("watchdog")),
        is_taken=bool(who),
    )


def _alerts_line(alerts: Sequence[ShownAlert]) -> str:
    """Who has the open alerts, in a sentence."""
    if not alerts:
        return "None is open."
    untaken = sum(not alert.is_taken for alert in alerts)
    if untaken == len(alerts):
        return f"{counted(len(alerts), 'is', 'are')} open, and no one has {'it' if untaken == 1 else 'them'}."
    if untaken:
        return f"{counted(len(alerts), 'is', 'are')} open, and no one has {untaken} of them."
    names = ", ".join(dict.fromkeys(alert.who for alert in alerts))
    return f"{counted(len(alerts), 'is', 'are')} open: {names}."


def _ended_line(told: Mapping[str, Any]) -> str:
    """How the newest attempt ended, in a sentence; "" while it runs, or where none is on record."""
    newest = next(iter(rows(told.get("last_attempts"))), {})
    how = text(newest.get("how"))
    if not how:
        return ""
    return f"Attempt {text(newest.get('id'), 40)}: {how}."


def _severity(entry: Mapping[str, Any]) -> str:
    word = entry.get("severity")
    return word if isinstance(word, str) and word in {"critical", "warning"} else "info"


def _nodes(told: Mapping[str, Any]) -> Iterator[ShownNode]:
    bad = {text(name, 80) for name in list_of(told.get("bad_nodes"))}
    for entry in rows(told.get("exclusions")):
        owner = text(entry.get("owner"), 60)
        why = f"{text(entry.get('why'), 160)}{f' ({owner})' if owner else ''}"
        state = EXCLUSION_WORDS.get(text(entry.get("state"), 20), "excluded")
        yield ShownNode(text(entry.get("node"), 80), state, why)
    for entry in rows(told.get("leaving_nodes")):
        yield ShownNode(text(entry.get("node"), 80), "leaving", text(entry.get("why"), 160))
    seen = set()
    for entry in rows(told.get("node_progress"), MOST_NODES):
        node = _node(entry, bad)
        seen.add(node.name)
        yield node
    for name in list_of(told.get("nodes"))[:MOST_NODES]:
        shown = text(name, 80)
        if shown not in seen:
            yield ShownNode(shown, "suspect" if shown in bad else "in use")


def _node(entry: Mapping[str, Any], bad: Container[str]) -> ShownNode:
    name, state = text(entry.get("node"), 80), "in use"
    silent, ranks = number(entry.get("silent_seconds")), number(entry.get("ranks"))
    if name in bad:
        state = "suspect"
    if entry.get("is_slow") is True:
        state = "slow"
    if state == "in use" and entry.get("is_spare") is True:
        state = "spare"
    why = ""
    rank = number(entry.get("slowest_rank"))
    if state == "slow" and rank is not None:
        why = f"its rank {rank:.0f} computes longest"
    phase = text(entry.get("phase"), 20)
    if not phase and not ranks and state != "spare":
        phase = "no rank has spoken"
    return ShownNode(
        name=name,
        state=state,
        why=why,
        iteration=_number(entry.get("iteration"), ",.0f"),
        phase=phase,
        silent="-" if silent is None else duration(silent),
        seconds=_number(entry.get("step_seconds"), ".3g"),
        times_usual=number(entry.get("times_usual")),
        measured_at=number(entry.get("measured_at")),
    )


def _trouble_first(node: ShownNode) -> tuple[int, float, str]:
    """Slow nodes, then those with another trouble, then by how slow they are."""
    order = {"slow": 0, "in use": 2, "spare": 3}
    return order.get(node.state, 1), -(node.times_usual or 0.0), node.name


def _nodes_line(nodes: Sequence[ShownNode]) -> str:
    """Which node is slow, in a sentence; "" where nothing runs."""
    used = [node for node in nodes if node.state in {"in use", "slow", "suspect"}]
    measured = [node for node in used if node.times_usual is not None]
    slow = [node.name for node in used if node.state == "slow"]
    if not used:
        return ""
    moment = _measured_at(measured)
    if slow:
        return f"Slow{moment}: {', '.join(slow[:5])}."
    if not measured:
        return "Which node is slow is not known: no rank has measured its steps beside others yet."
    slowest = measured[0]
    return f"None is slow{moment}; the slowest, {slowest.name}, takes {slowest.times} times as long as usual."


def _measured_at(nodes: Sequence[ShownNode]) -> str:
    """The newest step that the nodes' paces are of; "" where none is told."""
    steps = [node.measured_at for node in nodes if node.measured_at is not None]
    if not steps:
        return ""
    return f" as of step {max(steps):,.0f}"


# ----------------------------------------------------------------------------- values
def command(value: object, news: News) -> str:
    """What to type, for this run."""
    shown = text(value)
    if news.run is None:
        return shown
    return printable(for_card(news.run.typed, shown))


def page_of(value: object) -> str:
    """The name of a runbook page; "" for none."""
    return text(value, 60).removesuffix(".md").rpartition("/")[2]


def _faults(goodput: Mapping[str, Any]) -> str:
    count = number(goodput.get("faults"))
    if count is None:
        return "-"
    return counted(int(count), "fault")


def _number(value: object, form: str) -> str:
    found = number(value)
    return "-" if found is None else format(found, form)


def short(value: float) -> str:
    """A count in three digits: 17.9 k, 3.2 G."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def seconds_of(value: object) -> float | None:
    """A moment of a document in seconds since the epoch; None for anything else."""
    shown = stamp(value)
    try:
        return None if shown is None else datetime.fromisoformat(shown).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
