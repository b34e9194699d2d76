"""Any sequence of findings, looks and people's answers keeps the promises of the table. No disk, no server: pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from datetime import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tr11ops.alerts.office import ANA, BEN, CLEO, CRITICAL, HOUR, INFO, LIST, MINUTE, NOON, WARNING, finding
from tr11ops.alerts.book import Book, Message, event_of
from tr11ops.alerts.changes import acknowledge, assign, resolve, snooze
from tr11ops.alerts.fingerprint import fingerprint
from tr11ops.alerts.incidents import OPENED
from tr11ops.alerts.policy import FLAP_SECONDS, Policy
from tr11ops.alerts.telling import advance

DETECTORS = ("down", "stalled", "slow-node")
SEVERITIES = st.sampled_from([INFO, WARNING, CRITICAL])
LOOK = st.fixed_dictionaries(
    {
        "pause": st.sampled_from([1.0, 5 * MINUTE, HOUR, 5 * HOUR, 26 * HOUR]),
        "seen": st.dictionaries(st.sampled_from(DETECTORS), SEVERITIES, max_size=3),
        "blind": st.sets(st.sampled_from(DETECTORS), max_size=1),
        "person": st.sampled_from(["", "", "", "ack", "snooze", "assign", "resolve"]),
    }
)
POLICY = Policy(
    run="small", directory="/runs/small", recipients=(LIST,), rota=(ANA, BEN, CLEO), quiet_hours=(time(22), time(7)),
    digest_time=time(8),
)  # fmt: skip


def person(book: Book, action: str, now: float) -> Book:
    """The first open alert gets what a person does to it."""
    if not action or not book.open_alerts:
        return book
    made = {
        "ack": acknowledge("ana"), "snooze": snooze("ana", 2 * HOUR), "assign": assign(BEN),
        "resolve": resolve("ana", "false alarm"),
    }  # fmt: skip
    return book.with_alert(made[action][0](book.open_alerts[0], now))


@given(looks=st.lists(LOOK, min_size=1, max_size=15), quiet=st.booleans(), resolve_after=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_promises_of_the_table(looks: list[dict[str, object]], quiet: bool, resolve_after: int) -> None:
    policy = dataclasses.replace(POLICY, resolve_after=resolve_after)
    policy = policy if quiet else dataclasses.replace(policy, quiet_hours=None)
    book, now = Book(), NOON
    said: dict[str, list[Message]] = defaultdict(list)
    digests: list[float] = []
    identities: set[str] = set()

    def look(seen: dict[str, object], blind: frozenset[str], pause: float) -> None:
        nonlocal book, now
        now += pause
        before = {alert.fingerprint: alert for alert in book.alerts}
        found = [finding(name, severity, "n01") for name, severity in seen.items() if name not in blind]  # type: ignore[arg-type]
        book, messages = advance(book, found, blind, policy, now)
        for message in messages:
            assert message.id not in identities
            assert message.to
            identities.add(message.id)
            if message.kind == "digest":
                digests.append(now)
                continue
            said[message.alert].append(message)
            if message.severity < CRITICAL:
                assert not policy.is_quiet(now)
            assert message.severity >= WARNING
        for alert in book.alerts:
            old = before.get(alert.fingerprint)
            if alert.severity is CRITICAL and old is None:
                assert [m.kind for m in messages if m.alert == alert.fingerprint] == ["opened"]
            if old is not None and old.is_open and not alert.is_open:
                assert alert.detector not in blind
                assert seen.get(alert.detector) in {None, INFO}  # gone, or no more than a remark
        assert len({event.id for event in book.events}) == len(book.events)

    for entry in looks:
        look(entry["seen"], frozenset(entry["blind"]), entry["pause"])  # type: ignore[arg-type]
        book = person(book, entry["person"], now)  # type: ignore[arg-type]
    for _ in range(resolve_after + 1):  # at last all is well, in the day time: every incident ends
        look({}, frozenset(), 26 * HOUR if policy.is_quiet(now + 5 * HOUR) else 5 * HOUR)
    while policy.is_quiet(now):
        look({}, frozenset(), HOUR)
    assert book.open_alerts == ()

    for messages in said.values():
        believed: list[str] | None = None  # who thinks that it stands
        last = None
        for message in messages:
            if message.kind == "cleared":
                assert believed is not None, "an all-clear to people who were never told, or a second one"
                assert set(message.to) == set(believed), "an all-clear to others than those who were told"
                believed = None
            else:
                if last is not None and last.kind == "cleared" and message.kind in {"opened", "reopened"}:
                    assert message.time - last.time >= FLAP_SECONDS
                believed = [*(believed or last_told(messages, message)), *message.to]
            last = message
        assert believed is None, "no all-clear"
    days = [policy.digest_moment(moment) for moment in digests]
    assert len(set(days)) == len(days), "two digests for one day"


def last_told(messages: list[Message], reopened: Message) -> list[str]:
    """Those who knew of the incident before it was thought to be over: they hear of its end again."""
    if not reopened.thread:
        return []
    earlier = [m for m in messages if m.time <= reopened.time and reopened.thread in (m.thread, m.message_id)]
    return [address for m in earlier for address in m.to]


def test_fingerprints_outlive_restarts_and_tell_nodes_apart() -> None:
    same = {
        "1007",
        "1000_7",
        "1000_[3-9%1]",
        "1000_[7]",
        "",
        "job 1008",
        "1007, 1008",
        "1008.0",
        "rank 17",
        "ranks 3-5",
    }
    assert len({fingerprint("stalled", subject) for subject in same}) == 1
    other = ["n01", "n02", "jean-zay-iam07", "SCRATCH", "cron-hourly"]
    assert len({fingerprint("stalled", subject) for subject in [*other, ""]}) == len(other) + 1
    assert fingerprint("stalled", "n01 rank 3") == fingerprint("stalled", "n01, rank 12")
    assert fingerprint("stalled", "") != fingerprint("down", "")
    assert fingerprint("checkpoint-unsound", "1200") != fingerprint("checkpoint-unsound", "1500")
    assert fingerprint("x", "\udcff") == fingerprint("x", "\udcff")


def test_findings_of_one_fingerprint_are_one_alert() -> None:
    two = [finding("held", WARNING, "7", title="job 7 is held"), finding("held", CRITICAL, "8", title="job 8 is held")]
    book, messages = advance(Book(), two, frozenset(), POLICY, NOON)
    alert = book.open_alerts[0]
    assert (alert.severity, alert.title) == (CRITICAL, "job 8 is held (and 1 more)")
    assert "job 7 is held" in alert.evidence
    assert len(messages) == 1


def test_a_clock_that_ran_ahead_silences_nothing() -> None:
    """A look with a clock two years ahead, then looks with the right one."""
    ahead = NOON + 730 * 86400
    policy = dataclasses.replace(POLICY, resolve_after=1)
    book, _ = advance(Book(), [finding()], frozenset(), policy, ahead)
    book, _ = advance(book, [], frozenset(), policy, ahead + 1)
    book, messages = advance(book, [finding()], frozenset(), policy, NOON)
    assert [message.kind for message in messages] == ["opened"]
    digests = 0
    for hour in range(72):
        book, messages = advance(book, [finding()], frozenset(), policy, NOON + hour * HOUR)
        digests += sum(message.kind == "digest" for message in messages)
    assert digests == 3


def test_evidence_is_bounded_and_carries_no_secret() -> None:
    lines = ("https://bot:hunter2@host/x", "token=abc123 and password: tr0ub4", "a\x1b[2J\nb", *("x" * 9999,) * 50)
    book, messages = advance(Book(), [finding(evidence=lines, title="t\n" * 900)], frozenset(), POLICY, NOON)
    text = messages[0].subject + messages[0].body
    for secret in ("hunter2", "abc123", "tr0ub4", "\x1b"):
        assert secret not in text
    assert "https://***@host/x" in text
    assert len(text) < 8000
    assert "39 lines more" not in text or len(book.open_alerts[0].evidence) == 12
    assert len(messages[0].subject) <= 160
    assert "\n" not in messages[0].subject


def test_consumed_tokens_are_no_secret() -> None:
    line = "iteration 5 | consumed tokens: 12345 | key: value"
    book, _ = advance(Book(), [finding(evidence=(line,))], frozenset(), POLICY, NOON)
    assert book.open_alerts[0].evidence == (line,)


def test_the_events_of_an_alert_say_what_it_is() -> None:
    book, _ = advance(Book(), [finding(subject="1007")], frozenset(), POLICY, NOON)
    event = event_of(book.open_alerts[0], OPENED, "ana", "why", NOON)
    assert dict(event.data) == {
        "fingerprint": fingerprint("stalled", ""), "detector": "stalled", "subject": "1007", "severity": "CRITICAL",
        "title": "stalled it is",
    }  # fmt: skip
