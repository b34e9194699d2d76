"""Any sequence of findings, looks and people's answers keeps the promises of the table. No disk, no
server: pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import time

from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    CLEO,
    CRITICAL,
    HOUR,
    INFO,
    LIST,
    MINUTE,
    NOON,
    WARNING,
    finding,
)
from tr11ops.alerts import incidents
from tr11ops.alerts.changes import AlertChange
from tr11ops.alerts.incidents import OPENED
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import BACK_SECONDS, FLAP_SECONDS, Policy
from tr11ops.alerts.state import OVER, Alert, AlertState, Message, event_of
from tr11ops.detect.detector import Finding, Severity, fingerprint

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


def advance(
    alert_state: AlertState,
    found: Iterable[Finding],
    blind: frozenset[str],
    policy: Policy,
    now: float,
) -> tuple[AlertState, tuple[Message, ...]]:
    """One look and all that follows: the alert state after it, and the messages that must go out
    because of it.
    """
    return tell(incidents.look(alert_state, found, blind, policy, now), policy, now)


def person(alert_state: AlertState, action: str, now: float) -> AlertState:
    """The first open alert gets what a person does to it."""
    if not action or not alert_state.open_alerts:
        return alert_state
    made = {
        "ack": AlertChange(incidents.ACKNOWLEDGED, "ana"),
        "snooze": AlertChange(incidents.SNOOZED, "ana", seconds=2 * HOUR),
        "assign": AlertChange(incidents.ASSIGNED, owner=BEN),
        "resolve": AlertChange(incidents.RESOLVED, "ana", "false alarm"),
    }
    return alert_state.with_alert(made[action].of(alert_state.open_alerts[0], now))


@given(
    looks=st.lists(LOOK, min_size=1, max_size=15),
    quiet=st.booleans(),
    resolve_after=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_the_promises_of_the_table(
    looks: list[dict[str, object]], quiet: bool, resolve_after: int
) -> None:
    policy = replace(POLICY, resolve_after=resolve_after)
    policy = policy if quiet else replace(policy, quiet_hours=None)
    alert_state, now = AlertState(), NOON
    said: dict[str, list[Message]] = defaultdict(list)
    digests: list[float] = []
    identities: set[str] = set()

    def look(seen: dict[str, object], blind: frozenset[str], pause: float) -> None:
        nonlocal alert_state, now
        now += pause
        before = {alert.fingerprint: alert for alert in alert_state.alerts}
        found = [
            finding(name, severity, "n01") for name, severity in seen.items() if name not in blind
        ]  # type: ignore[arg-type]
        alert_state, messages = advance(alert_state, found, blind, policy, now)
        for message in messages:
            assert message.id not in identities
            assert message.to
            identities.add(message.id)
            if message.kind == "digest":
                digests.append(now)
                continue
            if message.severity < CRITICAL:
                assert not policy.is_quiet(now)
            assert message.severity >= WARNING
        for address in policy.everyone:
            lesser = [
                m
                for m in messages
                if m.kind != "digest" and m.severity < CRITICAL and address in m.to
            ]
            assert len(lesser) <= 1
        pieces = each_alert(messages, alert_state)
        for piece in pieces:
            said[piece.alert].append(piece)
        for alert in alert_state.alerts:
            old = before.get(alert.fingerprint)
            if alert.severity is CRITICAL and old is None:
                assert [m.kind for m in pieces if m.alert == alert.fingerprint] == ["opened"]
            was_heard = old is not None and old.heard is CRITICAL
            if (
                old is not None
                and alert.severity is CRITICAL
                and old.severity < CRITICAL
                and not was_heard
            ):
                assert [m.severity for m in pieces if m.alert == alert.fingerprint] == [CRITICAL]
            if old is not None and old.is_open and not alert.is_open:
                assert alert.detector not in blind
                assert seen.get(alert.detector) in {None, INFO}  # gone, or no more than a remark
        assert len({event.id for event in alert_state.events}) == len(alert_state.events)

    for entry in looks:
        look(entry["seen"], frozenset(entry["blind"]), entry["pause"])  # type: ignore[arg-type]
        alert_state = person(alert_state, entry["person"], now)  # type: ignore[arg-type]
    for _ in range(resolve_after + 1):  # at last all is well, in the day time: every incident ends
        look({}, frozenset(), 26 * HOUR if policy.is_quiet(now + 5 * HOUR) else 5 * HOUR)
    while policy.is_quiet(now):
        look({}, frozenset(), HOUR)
    assert alert_state.open_alerts == ()

    for messages in said.values():
        believed: list[str] | None = None  # who thinks that it stands
        last, back = None, -math.inf  # when it was last said to be back
        for message in messages:
            if message.kind in OVER:
                assert believed is not None, (
                    "an all-clear to people who were never told, or a second one"
                )
                assert set(message.to) == set(believed), (
                    "an all-clear to others than those who were told"
                )
                believed = None
            else:
                if (
                    last is not None
                    and last.kind in OVER
                    and message.kind in {"opened", "reopened"}
                ):
                    heard = max(
                        m.severity
                        for m in messages
                        if m.time <= last.time and m.thread == last.thread
                    )
                    pause = BACK_SECONDS if message.severity is CRITICAL else FLAP_SECONDS
                    assert message.severity > heard or message.time - back >= pause
                if message.kind == "reopened":
                    back = message.time
                believed = [*(believed or last_told(messages, message)), *message.to]
            last = message
        assert believed is None, "no all-clear"
    days = [policy.digest_moment(moment) for moment in digests]
    assert len(set(days)) == len(days), "two digests for one day"


def each_alert(messages: Iterable[Message], alert_state: AlertState) -> list[Message]:
    """What a look says, alert by alert, as if each were a message of its own to all who hear of it."""
    found: dict[str, Message] = {}
    for message in messages:
        for name, kind in zip(message.alerts, message.kinds, strict=True):
            alert = alert_state.find(name)
            assert alert is not None
            to = (*found[name].to, *message.to) if name in found else message.to
            found[name] = replace(
                message, alert=name, kind=kind, severity=alert.severity, to=to, thread=alert.thread,
                message_id=alert.thread,
            )  # fmt: skip
    return list(found.values())


def last_told(messages: list[Message], reopened: Message) -> list[str]:
    """Those who knew of the incident before it was thought to be over: they hear of its end again."""
    earlier = [m for m in messages if m.time <= reopened.time and reopened.thread == m.thread]
    return [address for m in earlier for address in m.to]


def test_fingerprints_tell_every_name_apart() -> None:
    names = [
        (),
        ("",),
        ("7",),
        ("1007",),
        ("n12",),
        ("rank-3",),
        ("rank3",),
        ("job",),
        ("a", "b"),
        ("ab",),
        ("a b",),
    ]
    assert len({fingerprint("slow-node", name) for name in names}) == len(names)
    assert fingerprint("stalled", ()) != fingerprint("down", ())
    assert fingerprint("x", ["\udcff"]) == fingerprint("x", ["\udcff"])
    assert fingerprint("slow-node", ["n07"]) == "c1a4a860b212"  # in the state of runs that go on
    assert fingerprint("stalled", ()) == "b6f116a46463"


def test_findings_of_one_fingerprint_are_one_alert() -> None:
    two = [
        finding("held", WARNING, "7", title="job 7 is held"),
        finding("held", CRITICAL, "8", title="job 8 is held"),
    ]
    alert_state, messages = advance(AlertState(), two, frozenset(), POLICY, NOON)
    alert = alert_state.open_alerts[0]
    assert (alert.severity, alert.title) == (CRITICAL, "job 8 is held (and 1 more)")
    assert "job 7 is held" in alert.evidence
    assert len(messages) == 1


def test_a_clock_that_ran_ahead_silences_nothing() -> None:
    """A look with a clock two years ahead, then looks with the right one."""
    ahead = NOON + 730 * 86400
    policy = replace(POLICY, resolve_after=1)
    alert_state, _ = advance(AlertState(), [finding()], frozenset(), policy, ahead)
    alert_state, _ = advance(alert_state, [], frozenset(), policy, ahead + 1)
    alert_state, messages = advance(alert_state, [finding()], frozenset(), policy, NOON)
    assert [message.kind for message in messages] == ["opened"]
    digests = 0
    for hour in range(72):
        alert_state, messages = advance(
            alert_state, [finding()], frozenset(), policy, NOON + hour * HOUR
        )
        digests += sum(message.kind == "digest" for message in messages)
    assert digests == 3


def test_evidence_is_bounded_and_carries_no_secret() -> None:
    lines = (
        "https://bot:hunter2@host/x",
        "token=abc123 and password: tr0ub4",
        "a\x1b[2J\nb",
        *("x" * 9999,) * 50,
    )
    alert_state, messages = advance(
        AlertState(), [finding(evidence=lines, title="t\n" * 900)], frozenset(), POLICY, NOON
    )
    text = messages[0].subject + messages[0].body
    for secret in ("hunter2", "abc123", "tr0ub4", "\x1b"):
        assert secret not in text
    assert "https://***@host/x" in text
    assert len(text) < 8000
    assert "39 lines more" not in text or len(alert_state.open_alerts[0].evidence) == 12
    assert len(messages[0].subject) <= 110
    assert "\n" not in messages[0].subject


def test_consumed_tokens_are_no_secret() -> None:
    line = "iteration 5 | consumed tokens: 12345 | learning rate: 6.0E-05"
    alert_state, _ = advance(AlertState(), [finding(evidence=(line,))], frozenset(), POLICY, NOON)
    assert alert_state.open_alerts[0].evidence == (line,)


def test_the_events_of_an_alert_say_what_it_is() -> None:
    alert_state, _ = advance(AlertState(), [finding(subject="1007")], frozenset(), POLICY, NOON)
    event = event_of(alert_state.open_alerts[0], OPENED, "why", NOON, who="ana")
    assert dict(event.data) == {
        "fingerprint": fingerprint("stalled", ()), "detector": "stalled", "subject": "1007", "severity": "CRITICAL",
        "title": "stalled it is",
    }  # fmt: skip


# ----------------------------------------------------------------------------- one incident, or two
def lost(node: str, severity: Severity = WARNING, job: str = "1000_7") -> Finding:
    return finding("node-lost", severity, job, title=f"job {job} has lost {node}", identity=(node,))


def test_a_second_lost_node_is_said_a_minute_after_the_first() -> None:
    alert_state, _ = advance(AlertState(), [lost("n07")], frozenset(), POLICY, NOON)
    alert_state, messages = advance(
        alert_state, [lost("n07"), lost("n01", CRITICAL)], frozenset(), POLICY, NOON + MINUTE
    )
    assert [(m.kind, m.severity, m.subject) for m in messages] == [
        ("opened", CRITICAL, "[CRITICAL] small: job 1000_7 has lost n01")
    ]
    assert len(alert_state.open_alerts) == 2


def test_worse_than_before_is_said_within_the_hour_of_all_clear() -> None:
    policy = replace(POLICY, resolve_after=1)
    alert_state, _ = advance(AlertState(), [finding(severity=WARNING)], frozenset(), policy, NOON)
    alert_state, over = advance(alert_state, [], frozenset(), policy, NOON + MINUTE)
    assert [m.kind for m in over] == ["cleared"]
    alert_state, again = advance(
        alert_state, [finding(severity=WARNING)], frozenset(), policy, NOON + 2 * MINUTE
    )
    assert [m.kind for m in again] == ["reopened"]
    alert_state, worse = advance(
        alert_state, [finding(severity=CRITICAL)], frozenset(), policy, NOON + 3 * MINUTE
    )
    assert [(m.kind, m.severity) for m in worse] == [("raised", CRITICAL)]


def old_alert(detector: str, fingerprint: str, subject: str, title: str, **more: object) -> Alert:
    """As a tr11 that took numbers for ids of jobs recorded it."""
    values = {
        "severity": CRITICAL, "evidence": (), "fix": "", "runbook": f"{detector}.md", "began": NOON - HOUR,
        "opened": NOON - HOUR, "last_seen": NOON - MINUTE, "said": CRITICAL, "told": (ANA,), "sends": 1,
        "last_sent": NOON - HOUR, "alarmed": NOON - HOUR, "thread": "<first@tr11.invalid>",
        "acknowledged_by": "ana", "acknowledged_at": NOON - HOUR,
    }  # fmt: skip
    return Alert(fingerprint, detector, subject, title=title, **{**values, **more})  # type: ignore[arg-type]


def test_an_alert_of_an_older_tr11_goes_on_under_todays_names() -> None:
    old = old_alert(
        "node-lost", "dfa58d4edf6b", "1000_7", "job 1000_7 has lost n01, n07, which ran its batch script",
        evidence=("n01: down", "n07: down"),
    )  # fmt: skip
    slow = old_alert(
        "slow-node",
        "c1a4a860b212",
        "n07",
        "n07 holds the others back",
        severity=WARNING,
        said=WARNING,
    )
    number = old_alert(
        "slow-node", "5a1d", "1007", "1007 holds the others back", severity=WARNING, said=WARNING
    )
    started = AlertState(alerts=(old, slow, number))
    seen = [
        lost("n01", CRITICAL),
        lost("n07"),
        finding("slow-node", WARNING, "1007", identity=("1007",)),
    ]
    alert_state, messages = advance(started, seen, frozenset(), POLICY, NOON)
    assert messages == ()
    assert {(alert.detector, alert.identity) for alert in alert_state.open_alerts} == {
        ("node-lost", ("n01",)), ("node-lost", ("n07",)), ("slow-node", None), ("slow-node", ("1007",)),
    }  # fmt: skip
    assert all(alert.acknowledged_by == "ana" for alert in alert_state.open_alerts)
    new = lost("n17")
    alert_state, messages = advance(alert_state, [*seen, new], frozenset(), POLICY, NOON + MINUTE)
    assert [m.subject for m in messages] == ["[WARNING] small: job 1000_7 has lost n17"]
    alert_state, messages = advance(alert_state, [], frozenset(), POLICY, NOON + 2 * MINUTE)
    assert messages == ()  # that n07 is no more slow is not said while a critical alert stands
    alert_state, messages = advance(alert_state, [], frozenset(), POLICY, NOON + 3 * MINUTE)
    assert alert_state.open_alerts == () and {m.kind for m in messages} == {"cleared"}
    # n07 goes by the name that it was told under, that of both
    assert [m.thread.split()[0] for m in messages if "n01" in m.body] == [
        "<first@tr11.invalid>"
    ] * 2


def test_an_alert_of_an_older_tr11_gets_its_all_clear() -> None:
    old = old_alert(
        "node-lost", "dfa58d4edf6b", "1000_7", "job 1000_7 has lost n01", evidence=("n01: down",)
    )
    alert_state, messages = advance(
        AlertState(alerts=(old,)), [lost("n09", job="1000_8")], frozenset(), POLICY, NOON
    )
    assert [m.kind for m in messages] == ["opened"]
    alert_state, messages = advance(
        alert_state, [lost("n09", job="1000_8")], frozenset(), POLICY, NOON + MINUTE
    )
    assert [(m.kind, m.alert) for m in messages] == [("cleared", "dfa58d4edf6b")]
