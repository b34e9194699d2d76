"""Since when a verdict holds: by what one look sees, and by what the looks before it concluded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.status_cases import HOUR, NOW, ended, idle, pending, running, snapshot
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, process
from tr11ops.alerts.state import HeldVerdict
from tr11ops.base.observed import Unknown
from tr11ops.detect.registry import detect_all
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations, observe_extra
from tr11ops.watchdog.since import held_verdict, since_when
from tr11ops.watchdog.verdict import judge


def since(given: Snapshot, before: HeldVerdict | None = None) -> float | None:
    findings = detect_all(given)
    return since_when(given, findings, judge(given, findings), before)


def kept(given: Snapshot, before: HeldVerdict | None = None) -> HeldVerdict:
    findings = detect_all(given)
    return held_verdict(given, findings, judge(given, findings)).after(before)


STOPPED = idle(kill_switch=KillSwitch(Path("/run/kill-switch"), "ana", NOW - 3 * HOUR))


@pytest.mark.parametrize(
    ("given", "moment"),
    [
        (STOPPED, NOW - 3 * HOUR),
        (idle(attempts=(ended(),)), ended().end.time),
        (idle(attempts=(Attempt("1007", NOW - 60, None), ended())), NOW - 60),
        (snapshot(), running().start_time),
        (snapshot(jobs=Unknown("no answer")), running().start_time),
    ],
    ids=["stopped", "down", "down without a marker", "healthy", "scheduler silent"],
)
def test_one_look_tells_by_its_evidence(given: Snapshot, moment: float) -> None:
    found = since(given)
    if isinstance(given.jobs, Unknown):
        assert found is None, "no job's start is known"
    else:
        assert found == moment


def test_it_is_no_older_than_the_last_look_that_concluded_another() -> None:
    assert since(snapshot(), HeldVerdict("stalled", NOW - 9 * HOUR, NOW - 300)) == NOW - 300
    assert since(STOPPED, HeldVerdict("healthy", None, NOW - 9 * HOUR)) == NOW - 3 * HOUR


def test_the_same_verdict_holds_since_it_was_first_concluded() -> None:
    first = HeldVerdict("healthy", NOW - 2 * HOUR, NOW - 300)
    assert since(snapshot(), first) == NOW - 2 * HOUR, "a restart between two looks ends nothing"
    assert kept(snapshot(), first) == HeldVerdict("healthy", NOW - 2 * HOUR, NOW)


def test_a_trouble_that_began_after_the_last_look_is_another_one() -> None:
    first = HeldVerdict("slow", NOW - 2 * HOUR, NOW - 300)
    assert HeldVerdict("slow", NOW - 46, NOW).after(first).since == NOW - 46
    assert HeldVerdict("slow", NOW - 301, NOW).after(first).since == NOW - 2 * HOUR
    assert HeldVerdict("slow", None, NOW).after(first).since == NOW - 2 * HOUR
    well = HeldVerdict("healthy", NOW - 2 * HOUR, NOW - 300)
    assert HeldVerdict("healthy", NOW - 46, NOW).after(well).since == NOW - 2 * HOUR


def test_a_look_that_cannot_tell_takes_nothing_back() -> None:
    blind = snapshot(jobs=Unknown("no answer"), heartbeats=(), steps=())
    first = HeldVerdict("healthy", NOW - 2 * HOUR, NOW - 600)
    once = kept(blind, first)
    assert once == HeldVerdict("healthy", NOW - 2 * HOUR, NOW - 600, unseen=NOW)
    assert since(blind, once) == NOW
    assert since(blind) is None, "how long it has not been seen is not known"
    assert kept(snapshot(), once) == HeldVerdict("healthy", NOW - 2 * HOUR, NOW)


def test_queued_since_the_work_before_it_ended() -> None:
    waiting = pending(submit_time=NOW - 20 * HOUR)
    given = idle(jobs=(waiting,), attempts=(ended(),))
    assert since(given) == ended().end.time


def test_the_watchdogs_looks_are_kept_and_the_status_tells_them(tmp_path: Path) -> None:
    from tests.tr11ops.status.publishing import card_of, directory_of

    card = card_of(tmp_path)
    directory = directory_of(card)
    directory.paths.state.mkdir(parents=True)
    given = snapshot()
    for seen in (HeldVerdict("stalled", NOW - 9 * HOUR, NOW - 600), kept(given)):
        sight = AlertInput((), frozenset(), observed=True, verdict=seen)
        process(Sender.of(directory, card, seen.judged), sight, deliver=False)
    process(Sender.of(directory, card, NOW + 60), AlertInput((), frozenset(), True), deliver=False)
    extra = observe_extra(directory, card, given)
    assert extra.verdict == HeldVerdict("healthy", NOW - 600, NOW)
    findings = detect_all(given)
    told = status_of(given, findings, judge(given, findings), extra)
    assert told.verdict_since == NOW - 600
    assert told.document()["verdict_since"] == "2022-05-01T11:50:00+00:00"
    bare = status_of(given, findings, judge(given, findings), ExtraObservations())
    assert bare.verdict_since == running().start_time
