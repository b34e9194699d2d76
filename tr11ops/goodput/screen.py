"""The account of a run's node-seconds as text of a terminal's width, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, tzinfo
from itertools import pairwise

from msgspec import to_builtins
from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.base.units import DAY, LEAST_NODE_HOURS, MINUTE, counted, duration, plain, timestamp
from tr11ops.goodput.account import NO_ATTEMPT, AccountSpan, Amount, Goodput
from tr11ops.goodput.history_values import History
from tr11ops.goodput.timeline import Bucket
from trainer.contract.record import JsonObject, Record

SCHEMA = 1
LABEL = 16
PERIOD_DAYS = {"day": 1, "week": 7}
MOST_ROWS = 400
LONGEST_BAR = 40


class Paper(Record):
    """What the account is written on. `price`: of one node-hour, None where no one asked for the
    cost.
    """

    width: int
    unicode: bool
    zone: tzinfo | None = None
    price: float | None = None
    hours: bool = True  # node-hours; node-seconds where these would all be zero

    @property
    def unit(self) -> str:
        if self.hours:
            return "node-hours"
        return "node-seconds"

    def amount(self, micros: int) -> str:
        """Node-microseconds in that unit."""
        count = micros / (3.6e9 if self.hours else 1e6)
        if count < 100:
            return f"{count:,.2f}"
        return f"{count:,.1f}"

    def clock(self, seconds: float) -> str:
        return timestamp(seconds, self.zone, MINUTE)

    def fit(self, text: str) -> str:
        """One line that does not run over."""
        line = plain(text, self.unicode).rstrip()
        if len(line) <= self.width:
            return line
        return line[: self.width - 3] + "..."


def screen(goodput: Goodput, history: History, by: str | None, paper: Paper) -> Iterator[str]:
    """All lines: the verdict, the buckets, faults, and what `by` asks for (attempt, cause, day,
    week).
    """
    total = goodput.total
    paper = replace(paper, hours=total.node_hours >= LEAST_NODE_HOURS)
    yield paper.fit(
        f"{history.name} / {history.variant}   {paper.clock(goodput.begin)} to {paper.clock(goodput.end)}"
    )
    if not total.node_micros:
        yield "nothing was submitted and nothing ran in this time: there is nothing to account for"
        return
    yield from _verdict(goodput, paper)
    yield ""
    yield from _bucket_rows(goodput, paper)
    yield ""
    yield from _fault_rows(goodput, paper)
    if by == "attempt":
        yield ""
        yield from _attempt_rows(goodput, history, paper)
    elif by == "cause":
        yield ""
        yield from _cause_rows(goodput, paper)
    elif by in PERIOD_DAYS:
        yield ""
        yield from _period_rows(goodput, by, paper)
    for read_error in goodput.read_errors:
        yield paper.fit(f"unknown: {read_error}")


def _verdict(goodput: Goodput, paper: Paper) -> Iterator[str]:
    total = goodput.total
    useful = goodput.useful_of_held
    ratio = goodput.effective_time_ratio
    held = f"{paper.amount(total.held_micros)} {paper.unit} held"
    cost = ""
    if paper.price is not None:
        cost = f", {_money(total.held_micros, paper)}"
    share = "nothing was held yet"
    if useful is not None:
        share = f"{_percent(useful)} of it {goodput.useful_did}"
    yield paper.fit(f"{held}{cost}: {share}")
    if ratio is not None:
        did = "did" if goodput.kept_is_known else "trained"
        yield paper.fit(
            f"ETTR {_percent(ratio)}: the share of all this time, waits included, that {did}"
        )


def _bucket_rows(goodput: Goodput, paper: Paper) -> Iterator[str]:
    total = goodput.total
    buckets = goodput.buckets
    cost = ""
    if paper.price is not None:
        cost = f"{'cost':>13}"
    head = f"{'':{LABEL}}{paper.unit:>12} {'share':>7} {'spare':>10}{cost}"
    yield head
    largest = max(amount.node_micros for amount in buckets.values())
    for bucket in Bucket:
        amount = buckets[bucket]
        spent = ""
        if paper.price is not None:
            spent = f"{_money(amount.held_micros, paper):>13}"
        drawn = _drawn(amount.node_micros / largest, paper.width - len(head) - 2, paper.unicode)
        yield paper.fit(
            f"{bucket:{LABEL}}{_figures(amount, amount.node_micros / total.node_micros, paper)}{spent}  {drawn}"
        )
    spent = ""
    if paper.price is not None:
        spent = f"{_money(total.held_micros, paper):>13}"
    yield paper.fit(f"{'total':{LABEL}}{_figures(total, 1.0, paper)}{spent}")


def _drawn(share: float, width: int, unicode: bool) -> str:
    """A bar without a ground, so that short ones can be compared; a trace where there is something
    at all.
    """
    count = round(share * min(width, LONGEST_BAR))
    trace = ""
    if share and not count:
        trace = "."
    return ("█" if unicode else "#") * count or trace


def _figures(amount: Amount, share: float, paper: Paper) -> str:
    spare = ""
    if amount.spare_micros:
        spare = paper.amount(amount.spare_micros)
    return f"{paper.amount(amount.node_micros):>12} {_percent(share):>7} {spare:>10}"


def _fault_rows(goodput: Goodput, paper: Paper) -> Iterator[str]:
    between = goodput.seconds_between_faults
    recover = goodput.seconds_to_recover
    if between is None:
        yield paper.fit(f"no fault in {duration(goodput.held_wall_seconds)} with nodes held")
        return
    count = len(goodput.faults)
    each = f"{paper.amount(goodput.total.held_micros // count)} {paper.unit}"
    yield paper.fit(
        f"{counted(count, 'fault')}: one in {duration(between)} with nodes held ({each})"
    )
    if recover is not None:
        yield paper.fit(
            f"training went on {duration(recover)} after the first sign of a fault, in the mean"
        )


def _attempt_rows(goodput: Goodput, history: History, paper: Paper) -> Iterator[str]:
    yield f"{'attempt':{LABEL}}{paper.unit:>12} {'useful':>7} {'lost':>10}  began, most lost to"
    groups = goodput.grouped(lambda span: span.job_id)
    for attempt in known(history.attempts, ()):
        spans = groups.get(attempt.job_id, ())
        if not spans:
            continue
        yield paper.fit(
            f"{_spending(attempt.label, spans, paper)}  {_said(paper.clock(attempt.start), _worst(spans))}"
        )
        for launch in attempt.launches if len(attempt.launches) > 1 else ():
            own = [span for span in spans if span.launch == launch.launch]
            if own:
                words = _said(launch.cause, _worst(own))
                yield paper.fit(f"{_spending(f'  launch {launch.launch}', own, paper)}  {words}")
    around = groups.get(NO_ATTEMPT, ())
    if around:
        yield paper.fit(f"{_spending('no attempt', around, paper)}  {_worst(around)}")


def _said(*words: str) -> str:
    return ", ".join(filter(None, words))


def _spending(label: str, spans: Sequence[AccountSpan], paper: Paper) -> str:
    total = sum(span.node_micros for span in spans)
    useful = sum(span.node_micros for span in spans if span.bucket is Bucket.USEFUL)
    return (
        f"{label[:LABEL]:{LABEL}}{paper.amount(total):>12} {_percent(useful / total if total else 0.0):>7}"
        f" {paper.amount(total - useful):>10}"
    )


def _worst(spans: Sequence[AccountSpan]) -> str:
    """The bucket in which most was lost; "" for none."""
    sums = _sums([span for span in spans if span.bucket is not Bucket.USEFUL])
    return max(sums, key=lambda bucket: sums[bucket], default="")


def _cause_rows(goodput: Goodput, paper: Paper) -> Iterator[str]:
    """What was lost, by what caused it; saves and evaluations are the price of the training, and
    have none.
    """
    yield f"{'lost to':{LABEL}}{paper.unit:>12} {'share':>7} {'faults':>10}  most of it"
    total = goodput.total.node_micros
    causes = goodput.by(lambda span: span.cause)
    for cause in sorted(
        (cause for cause in causes if cause), key=lambda cause: -causes[cause].node_micros
    ):
        amount = causes[cause]
        count = sum(fault.cause == cause for fault in goodput.faults)
        worst = _worst([span for span in goodput.spans if span.cause == cause])
        figures = f"{paper.amount(amount.node_micros):>12} {_percent(amount.node_micros / total):>7} {count or '':>10}"
        yield paper.fit(f"{cause[:LABEL]:{LABEL}}{figures}  {worst}")


def _period_rows(goodput: Goodput, by: str, paper: Paper) -> Iterator[str]:
    yield f"{by:{LABEL}}{paper.unit:>12} {'useful':>7} {'lost':>10}  most lost to"
    rows = list(periods(goodput, PERIOD_DAYS[by], paper.zone))
    for part in rows[-MOST_ROWS:]:
        if part.spans:
            day = timestamp(part.begin, paper.zone, DAY)
            yield paper.fit(f"{_spending(day, part.spans, paper)}  {_worst(part.spans)}")


def periods(goodput: Goodput, days: int, zone: tzinfo | None) -> Iterator[Goodput]:
    """The account cut at midnights, every `days` days; weeks begin on Monday."""
    first = datetime.fromtimestamp(goodput.begin, tz=zone).astimezone(zone)
    midnight = datetime(first.year, first.month, first.day, tzinfo=zone)
    if days == PERIOD_DAYS["week"]:
        midnight -= timedelta(days=midnight.weekday())
    edges = [midnight]
    while edges[-1].timestamp() < goodput.end:
        edges.append(edges[-1] + timedelta(days=days))
    for begin, end in pairwise(edges):
        yield goodput.between(begin.timestamp(), end.timestamp())


# ----------------------------------------------------------------------------- JSON
def document(
    goodput: Goodput, history: History, zone: tzinfo | None, price: float | None = None
) -> JsonObject:
    """Everything as one JSON object. Node-microseconds are whole numbers, and add up exactly."""
    causes = goodput.by(lambda span: span.cause)
    return {
        "schema": SCHEMA,
        "run": history.name,
        "variant": history.variant,
        "begin": goodput.begin,
        "end": goodput.end,
        "total": _amount(goodput.total, price),
        "buckets": {
            str(bucket): _amount(amount, price) for bucket, amount in goodput.buckets.items()
        },
        "useful_of_held": goodput.useful_of_held,
        "effective_training_time_ratio": goodput.effective_time_ratio,
        "mtbf_seconds": goodput.seconds_between_faults,
        "mtbf_node_hours": goodput.node_hours_between_faults,
        "mean_seconds_to_recover": goodput.seconds_to_recover,
        "faults": [to_builtins(fault) for fault in goodput.faults],
        "causes": {cause: _amount(found, price) for cause, found in causes.items() if cause},
        "attempts": list(_attempts(goodput, history)),
        "days": [
            {"begin": part.begin, "end": part.end, "buckets": _sums(part.spans)}
            for part in periods(goodput, 1, zone)
            if part.spans
        ],
        "kept_is_known": goodput.kept_is_known,
        "unknown": list(goodput.read_errors),
    }


def _attempts(goodput: Goodput, history: History) -> Iterator[JsonObject]:
    groups = goodput.grouped(lambda span: span.job_id)
    for attempt in known(history.attempts, ()):
        spans = groups.get(attempt.job_id, [])
        yield {
            "job_id": attempt.job_id,
            "label": attempt.label,
            "start": attempt.start,
            "end": attempt.ended,
            "nodes": len(set(attempt.nodes)),
            "buckets": _sums(spans),
            "launches": [
                {
                    "launch": launch.launch,
                    "cause": launch.cause,
                    "buckets": _sums([span for span in spans if span.launch == launch.launch]),
                }
                for launch in attempt.launches
            ],
        }


def _amount(amount: Amount, price: float | None) -> JsonObject:
    value: JsonObject = {
        "node_microseconds": amount.node_micros,
        "spare_microseconds": amount.spare_micros,
        "held_microseconds": amount.held_micros,
        "wall_microseconds": amount.wall_micros,
        "node_hours": amount.node_hours,
    }
    if price is None:
        return value
    return {**value, "cost": amount.held_hours * price}


def _sums(spans: Sequence[AccountSpan]) -> dict[str, int]:
    """Node-microseconds by bucket."""
    sums: dict[str, int] = {}
    for span in spans:
        sums[str(span.bucket)] = sums.get(str(span.bucket), 0) + span.node_micros
    return sums


# ----------------------------------------------------------------------------- words
def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _money(micros: int, paper: Paper) -> str:
    return f"{micros / 3.6e9 * (paper.price or 0.0):,.2f}"
