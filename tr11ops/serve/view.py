"""What a page shows of a run, in words: from its document alone, of which nothing is taken on trust.
Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from tr11ops.alerts.changes import is_same_person
from tr11ops.alerts.state import OnCall, alerts_words
from tr11ops.base.invocation import for_card
from tr11ops.base.units import counted, duration, quantity, timestamp
from tr11ops.report.page import Tile
from tr11ops.serve.poller import News
from tr11ops.status.answer import FIRST, NEEDS
from tr11ops.status.document import NOT_MOVING, ShownFinding
from tr11ops.status.published import (
    MOST_ROWS,
    among,
    care_of,
    cares_of,
    list_of,
    number,
    rows,
    seconds_of,
    table,
    text,
)
from tr11ops.status.rows import ShownIncident, incidents_of
from tr11ops.status.run_list import ListedRun, RunList, unwatched
from tr11ops.status.run_list_screen import sum_lines
from tr11ops.watchdog.verdict import MOVING, VerdictWord
from trainer.contract.record import Record
from trainer.contract.units import printable

# a sign and a tone for each verdict: colour is never the only sign
LOOKS: Mapping[VerdictWord, tuple[str, str]] = {
    VerdictWord.DOWN: ("✖", "bad"),
    VerdictWord.STALLED: ("✖", "bad"),
    VerdictWord.AT_RISK: ("!", "warn"),
    VerdictWord.SLOW: ("◐", "warn"),
    VerdictWord.UNKNOWN: ("?", "warn"),
    VerdictWord.STARTING: ("▲", "calm"),
    VerdictWord.QUEUED: ("…", "calm"),
    VerdictWord.STOPPING: ("■", "calm"),
    VerdictWord.STOPPED: ("■", "calm"),
    VerdictWord.HEALTHY: ("●", "good"),
    VerdictWord.FINISHED: ("✓", "good"),
}
OLD_LOOKS = 2  # looks that were missed: what was seen then says nothing of now
NOTHING_TO_STOP = frozenset({VerdictWord.DOWN, VerdictWord.FINISHED})
LOOKING = "Looking again"  # where what was seen no longer counts
# what stays true of a look that began before the newest act was over
OUTLASTS_ACTS = {
    "run",
    "time",
    "iteration",
    "total_iterations",
    "loss",
    "grad_norm",
    "last_step_time",
    "throughput",
    "trainer",
    "seconds_per_iteration",
    "consumed_tokens",
    "global_batch_size",
    "last_checkpoint",
    "goodput",
}
MOST_NODES = 5000  # that are compared; MOST_ROWS of them are shown
EXCLUSION_WORDS = {"suspect": "suspected", "avoid": "avoided", "exclude": "excluded"}


class ShownAlert(Record):
    """An open alert and who has it. `incident` is its name among all of its fingerprint."""

    fingerprint: str
    incident: str
    severity: str
    title: str
    since: str
    who: str
    runbook: str
    watchdog: str
    ack_command: str
    holder: str

    def is_held_by_another(self, name: str) -> bool:
        """Whether someone has it who is not the person of this name."""
        return bool(self.holder) and not is_same_person(self.holder, name)


class ShownNode(Record):
    """A node that the run uses or must not use. `times_usual`: how many times as long its slowest
    rank computes for a step as is usual; None where that is not measured.
    """

    name: str
    state: str
    why: str = ""
    iteration: str = "-"
    phase: str = ""
    silent: str = "-"
    seconds: str = "-"
    times_usual: float | None = None

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
    news: News
    name: str
    variant: str
    folder: str
    word: VerdictWord
    sign: str
    tone: str
    why: str
    main_fault: str
    answer: str
    since: str
    iteration: str
    percent: float | None
    loss: str
    eta: str
    on_call: str
    is_taken: bool
    looked: str
    age: float | None
    old_after: float
    listed: ListedRun
    can_act: bool
    is_stopped: bool
    watch: str = ""
    tiles: tuple[Tile, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    faults: tuple[ShownIncident, ...] = ()
    alerts: tuple[ShownAlert, ...] = ()
    nodes: tuple[ShownNode, ...] = ()
    nodes_line: str = ""
    alerts_line: str = ""
    ended_line: str = ""
    stop_command: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def can_stop(self) -> bool:
        """Whether something is left to stop."""
        return not self.is_stopped and self.word not in NOTHING_TO_STOP

    @property
    def brief(self) -> str:
        """Why, in a clause where the look names a fault. Who has stopped a run, and why, is said whole."""
        if self.word.is_stop:
            return self.why
        return self.main_fault or self.why

    @property
    def accused(self) -> str:
        """The nodes that are slow or suspected, as a list of hosts."""
        return ",".join(one.name for one in self.nodes if one.state in {"slow", "suspect"})

    @property
    def outcome(self) -> str:
        """The verdict's sentence; of a stop without who has asked for it, and in brackets why."""
        if self.word.is_stop:
            return self.why.rpartition("); ")[2]
        return self.why

    def says(self, title: str) -> bool:
        """Whether the verdict's sentence says it already."""
        return title.lower() in self.why.lower()

    @property
    def is_old(self) -> bool:
        """Whether the look is too old to say how it is now."""
        return self.age is not None and self.age > self.old_after

    @property
    def title(self) -> str:
        return self.listed.title


def view_of(news: News, now: float) -> RunView:
    """What is shown of a run at the moment `now`."""
    told = _standing(news)
    run = table(told.get("run"))
    name = text(run.get("name"), 80) or printable(news.folder.name)
    variant = text(run.get("variant"), 40)
    title = name
    if variant not in {"", "main"}:
        title = f"{name} / {variant}"
    listed = ListedRun(news.folder, told, use=news.use, title=title)
    word = listed.word
    sign, tone = LOOKS[word]
    done = number(told.get("iteration"))
    total = number(told.get("total_iterations"))
    age = _age_of_look(news, now)
    nodes = tuple(sorted(_nodes(told), key=_trouble_first))
    on_call = listed.on_call
    alerts = tuple(_alert(entry, news, on_call, now) for entry in rows(told.get("alerts")))
    needs = tuple(_needs(told.get("sleep_needs"), news))
    return RunView(
        key=news.key,
        news=news,
        name=name,
        variant=variant,
        folder=printable(str(news.folder)),
        word=word,
        sign=sign,
        tone=tone,
        why=text(told.get("why") or _why(news)),
        main_fault=text(told.get("main_fault")),
        answer=_answer(told, needs),
        since=_since(told, now),
        iteration=_iteration(done, total),
        percent=_percent(done, total),
        loss=_number(told, "loss", ".4f"),
        eta=_eta(told, word),
        on_call="unknown" if on_call is None else on_call.words(now),
        is_taken=on_call is not None and on_call.taken is not None,
        looked="not yet" if age is None else f"{duration(age)} ago",
        age=age,
        old_after=OLD_LOOKS * news.every,
        listed=listed,
        can_act=news.can_act and news.document is not None,
        is_stopped=any(
            table(told.get(name)).get("set") is True for name in ("kill_switch", "pause")
        ),
        watch=unwatched(word, told.get("watchdog_fault")),
        tiles=tuple(_tiles(told, now)),
        needs=needs,
        faults=incidents_of(tuple(_finding(entry, news) for entry in rows(told.get("findings")))),
        alerts=alerts,
        nodes=nodes[:MOST_ROWS],
        nodes_line=_nodes_line(told, word),
        alerts_line=_alerts_line(news, told, on_call, now),
        ended_line=_ended_line(told),
        stop_command=command("tr11 kill --wait", news),
        unknown=tuple(text(line, 200) for line in list_of(told.get("unknown"))[:MOST_ROWS]),
    )


def in_order(views: Sequence[RunView]) -> list[RunView]:
    """What needs a person first."""
    return sorted(views, key=attrgetter("listed.place"))


def sums_of(every: Sequence[News]) -> str:
    """What all runs hold together, and each team where there are several; "" where nothing is known
    of one.
    """
    runs = [
        ListedRun(news.folder, None if news.is_mirror else news.document, use=news.use)
        for news in every
    ]
    if not any(run.use for run in runs):
        return ""
    return " ".join(f"{line}." for line in sum_lines(RunList.of(runs)))


# ----------------------------------------------------------------------------- parts
def _standing(news: News) -> Mapping[str, Any]:
    """What of a look may be shown: no verdict, no fault and nothing to type from before an act."""
    told = table(news.document)
    if not news.is_before_act:
        return told
    return {name: told[name] for name in OUTLASTS_ACTS & told.keys()}


def _why(news: News) -> str:
    if not news.is_before_act:
        return news.why
    return f"{LOOKING} after what was done at {timestamp(news.acted, None, '%H:%M:%S')}"


def _age_of_look(news: News, now: float) -> float | None:
    """Seconds since the moment that a look shows: that of its snapshot, before it was put together.
    A mirrored copy says itself how old it is.
    """
    if not news.looked:
        return None
    moment = news.looked
    if not news.is_mirror:
        moment = seconds_of(table(news.document).get("time")) or moment
    return max(0.0, now - min(news.looked, moment))


def _since(told: Mapping[str, Any], now: float) -> str:
    """For how long the verdict has held; "" where no one knows."""
    moment = seconds_of(told.get("verdict_since"))
    if moment is None:
        return ""
    return f"for {duration(now - moment)}"


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
    if left is None and word in {VerdictWord.STARTING, VerdictWord.HEALTHY}:
        return "unknown"
    if left is None or word is VerdictWord.FINISHED:
        return "-"
    finish = table(told.get("finish"))
    likely, usual = number(finish.get("likely_seconds")), number(finish.get("usual_seconds"))
    shown = duration(left if likely is None else likely)
    if usual is None:
        return shown
    return f"{shown} at this speed, {duration(usual)} at its usual speed"


def _tiles(told: Mapping[str, Any], now: float) -> Iterator[Tile]:
    rate = table(told.get("throughput"))
    yield Tile(
        "loss",
        _number(told, "loss", ".4f"),
        f"grad norm {_number(told, 'grad_norm', '.3f')}",
    )
    percent = number(rate.get("percent"))
    best = ""
    if percent is not None and among(told.get("verdict"), MOVING):
        best = f"{percent:.0f} % of its best"
    yield Tile("seconds a step", _number(told, "seconds_per_iteration", ".2f"), best)
    trainer = table(told.get("trainer"))
    tokens = number(told.get("consumed_tokens"))
    if tokens is not None or not trainer:  # another trainer may not tell of them
        seen = "-" if tokens is None else quantity(tokens)
        yield Tile("tokens seen", seen, f"batch {_number(told, 'global_batch_size', ',.0f')}")
    if number(trainer.get("level")) == 0:
        yield Tile("checkpoint", "not known", "level 0: only watched")
    else:
        saved = table(told.get("last_checkpoint"))
        yield Tile("checkpoint", _number(saved, "step", ",.0f"), _age(saved))
    for name in ("backup", "sync"):
        copy = told.get(name)
        if isinstance(copy, Mapping):
            yield Tile(name, _number(copy, "step", ",.0f"), _age(copy))
    missing = number(told.get("copies_missing"))
    damaged = number(told.get("copies_damaged"))
    if missing or damaged:
        yield Tile("copies", f"{missing or 0:.0f} missing", f"{damaged or 0:.0f} damaged")
    use = told.get("node_use") or told.get("nodes")
    if isinstance(use, Mapping):
        spare = f"{_number(use, 'spare', '.0f')} spare, {_number(use, 'excluded', '.0f')} excluded"
        yield Tile("nodes", _number(use, "used", ".0f"), spare)
    queue = number(told.get("queue_coverage_seconds"))
    if queue is not None:
        none = "" if queue else "nothing starts by itself"
        yield Tile("of training queued", duration(queue), none)
    goodput = table(told.get("goodput"))
    useful = number(goodput.get("useful_share"))
    if useful is not None:
        yield Tile("goodput", f"{100 * useful:.1f} %", _fault_count(goodput))
    last = seconds_of(told.get("last_step_time"))
    if last is not None:
        yield Tile("last step", f"{duration(now - last)} ago")


def _age(entry: Mapping[str, Any]) -> str:
    age = number(entry.get("age_seconds"))
    return "" if age is None else f"{duration(age)} ago"


def _answer(told: Mapping[str, Any], needs: Sequence[tuple[str, str]]) -> str:
    """May a person sleep? What is missing for it is listed once, with what to type."""
    said = text(told.get("answer"))
    if needs and said.startswith(FIRST):
        return f"{FIRST}: {counted(len(needs), 'thing')} to do, below"
    return said


def _needs(value: object, news: News) -> Iterator[tuple[str, str]]:
    """What is missing before a person may sleep, and what to type."""
    for entry in list_of(value)[:MOST_ROWS]:
        if isinstance(entry, Mapping):
            yield text(entry.get("text")), command(entry.get("fix"), news)
        elif isinstance(entry, str) and entry in NEEDS:
            yield NEEDS[entry], ""


def _finding(entry: Mapping[str, Any], news: News) -> ShownFinding:
    """A finding of a document, nothing of which is taken on trust."""
    return ShownFinding(
        detector=text(entry.get("detector"), 60),
        severity=_severity(entry),
        title=text(entry.get("title")),
        subject="",
        evidence=tuple(text(line, 300) for line in list_of(entry.get("evidence"))[:12]),
        fix=command(entry.get("fix"), news),
        runbook=page_of(entry.get("runbook")),
        then=tuple(command(line, news) for line in list_of(entry.get("then"))[:12]),
        fingerprint=text(entry.get("fingerprint"), 40) or None,
        follows_from=text(entry.get("follows_from"), 40) or None,
    )


def _alert(entry: Mapping[str, Any], news: News, on_call: OnCall | None, now: float) -> ShownAlert:
    since = seconds_of(entry.get("since"))
    care = care_of(entry)
    fingerprint = text(entry.get("fingerprint"), 40)
    return ShownAlert(
        fingerprint=fingerprint,
        incident=text(entry.get("incident"), 60),
        severity=_severity(entry),
        title=text(entry.get("title")),
        since="" if since is None else f"{duration(now - since)}",
        who=care.words(on_call, now),
        runbook=page_of(entry.get("runbook")),
        watchdog=text(entry.get("watchdog")),
        ack_command=command(f"tr11 alerts ack {fingerprint}", news),
        holder=care.person,
    )


def _alerts_line(news: News, told: Mapping[str, Any], on_call: OnCall | None, now: float) -> str:
    """Who has the open alerts, in a sentence."""
    if news.is_before_act:
        return f"{LOOKING}."
    if not isinstance(told.get("alerts"), list):
        return "Not known."
    return f"{alerts_words(cares_of(told), on_call, now) or 'None is open'}."


def _ended_line(told: Mapping[str, Any]) -> str:
    """How the newest attempt ended, in a sentence; "" while it runs, where none is on record, and where the
    verdict or a finding says why already.
    """
    newest = next(iter(rows(told.get("last_attempts"))), {})
    how = text(newest.get("how"))
    cause = how.partition(": ")[2] or how
    evidence = (line for one in rows(told.get("findings")) for line in list_of(one.get("evidence")))
    said = "\n".join(map(text, (told.get("why"), *evidence)))
    if cause.replace("-", " ") in said.replace("-", " "):
        return ""
    return f"Attempt {text(newest.get('id'), 40)}: {how}."


def _severity(entry: Mapping[str, Any]) -> str:
    return among(entry.get("severity"), ("critical", "warning")) or "info"


def _nodes(told: Mapping[str, Any]) -> Iterator[ShownNode]:
    """Each node once: what is excluded, or leaves, and is used still is one that the run holds."""
    bad = {text(name, 80) for name in list_of(told.get("bad_nodes"))}
    progress = [_node(entry, bad) for entry in rows(told.get("node_progress"), MOST_NODES)]
    own = [text(name, 80) for name in list_of(told.get("nodes"))[:MOST_NODES]]
    listed = {node.name: node for node in _listed(told)}
    used = {*own, *(node.name for node in progress)}
    yield from (node for node in listed.values() if node.name not in used)
    for node in progress:
        apart = listed.get(node.name)
        if apart is None:
            yield node
            continue
        why = "; ".join(filter(None, (node.why, apart.why)))
        state = f"{node.state}, {apart.state}" if node.is_bad else apart.state
        yield replace(node, state=state, why=why)
    for name in own:
        if all(node.name != name for node in progress):
            plain = ShownNode(name, "suspect" if name in bad else "in use")
            yield listed.get(name, plain)


def _listed(told: Mapping[str, Any]) -> Iterator[ShownNode]:
    """What is excluded, and what leaves when its job ends."""
    for entry in rows(told.get("exclusions")):
        owner = text(entry.get("owner"), 60)
        why = f"{text(entry.get('why'), 160)}{f' ({owner})' if owner else ''}"
        state = EXCLUSION_WORDS.get(text(entry.get("state"), 20), "excluded")
        yield ShownNode(text(entry.get("node"), 80), state, why)
    for entry in rows(told.get("leaving_nodes")):
        yield ShownNode(text(entry.get("node"), 80), "leaving", text(entry.get("why"), 160))


def _node(entry: Mapping[str, Any], bad: Container[str]) -> ShownNode:
    name = text(entry.get("node"), 80)
    state = "in use"
    silent = number(entry.get("silent_seconds"))
    ranks = number(entry.get("ranks"))
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
        phase = "no word yet"
    return ShownNode(
        name=name,
        state=state,
        why=why,
        iteration=_number(entry, "iteration", ",.0f"),
        phase=phase,
        silent="-" if silent is None else duration(silent),
        seconds=_number(entry, "step_seconds", ".3g"),
        times_usual=number(entry.get("times_usual")),
    )


def _trouble_first(node: ShownNode) -> tuple[int, float, str]:
    """Slow nodes, then those with another trouble, then by how slow they are."""
    order = {"slow": 0, "in use": 2, "spare": 3}
    return order.get(node.state.partition(",")[0], 1), -(node.times_usual or 0.0), node.name


def _nodes_line(told: Mapping[str, Any], word: VerdictWord) -> str:
    """Which node is slow, in the sentence of the look; "" where nothing runs, and where the training
    stands and none was slow before: that is no news of what holds it up.
    """
    slow = table(told.get("slow_nodes"))
    if word in NOT_MOVING and slow.get("state") != "named":
        return ""
    return text(slow.get("text"), 400)


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


def _fault_count(goodput: Mapping[str, Any]) -> str:
    count = number(goodput.get("faults"))
    if count is None:
        return "-"
    return counted(int(count), "fault")


def _number(told: Mapping[str, Any], name: str, form: str) -> str:
    found = number(told.get(name))
    return "-" if found is None else format(found, form)
