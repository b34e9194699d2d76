"""The rows around the training: what is not used has no row, what is unknown is said."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.status.care_cases import FAULT, HEALTHY, alert, asked_for, look
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    changed,
    cron_job,
    idle,
    running,
    snapshot,
    with_facts,
    wordless,
)
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, process
from tr11ops.alerts.state import OnCall, alerts_words
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.node_progress import NodePace, NodeProgress, SlowNodes
from tr11ops.detect.nodes_left import spare_nodes
from tr11ops.observe.observations import Copied, CopyStatus, LaunchEnd
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.watching import (
    BackupSection,
    FilesystemSection,
    HubSection,
    WatchSection,
)
from tr11ops.rundir.claims import Claim, ClaimFolder, CopyLock
from tr11ops.rundir.copies import DrillRecord, write_drill
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.journal import who_looks
from tr11ops.status.assessment import status_of
from tr11ops.status.document import Status
from tr11ops.status.extra_observations import (
    ExtraObservations,
    NodeUse,
    RunningCopy,
    node_use,
    observe_extra,
)
from tr11ops.status.published import care_of, cares_of
from tr11ops.status.screen import (
    LONGEST,
    alert_rows,
    copy_rows,
    filesystem_rows,
    node_rows,
    periodic_rows,
)
from tr11ops.watchdog.verdict import Verdict, VerdictWord


def shown(seen: Snapshot, around: ExtraObservations = ExtraObservations()) -> Status:  # noqa: B008  frozen
    return status_of(seen, (), HEALTHY, around)


# ----------------------------------------------------------------------------- nodes
def test_spares_are_what_is_held_and_not_launched_on() -> None:
    named = tuple(f"n{number:02d}" for number in range(1, 53))
    given = snapshot(
        jobs=(running(nodes=named, node_count=52),),
        exclusions=(Exclusion("n03", "Xid 79", since=NOW - HOUR),),
    )
    launched = tuple(name for name in named if name not in {"n03", "n50", "n51", "n52"})
    trains = changed(given, launch_nodes=launched)
    unread = changed(given, launch_nodes=Unknown("unreadable"))
    for seen in (trains, given, unread):
        assert node_use(seen) == NodeUse(48, 3, 1), "an excluded node is no spare, launch or not"
    ((label, text, _),) = node_rows(shown(trains))
    assert (label, text) == ("nodes", "48 used, 3 spare; 1 excluded: n03 (Xid 79); slow: not known")
    assert node_use(snapshot(jobs=Unknown("away"))) is None
    ((_, text, _),) = node_rows(shown(idle(exclusions=Unknown("unreadable"))))
    assert text == "none held; excluded: unknown"


@pytest.mark.parametrize(
    ("state", "verdict", "said"),
    [
        ("none", VerdictWord.HEALTHY, "none slow (2 compared, iteration 1,690)"),
        ("none", VerdictWord.STALLED, ""),  # it says nothing of what holds it up
        ("unknown", VerdictWord.STALLED, "slow: not known"),
        ("unmeasured", VerdictWord.HEALTHY, "slow: not known"),
        ("named", VerdictWord.STALLED, "slow: n02"),
    ],
)
def test_which_node_is_slow_is_said_also_where_none_is(
    state: str, verdict: VerdictWord, said: str
) -> None:
    pace = NodePace(0, 1.5, 1.0, iteration=1690, is_slow=False)
    alone = replace(pace, times_usual=None)
    compared = [
        NodeProgress(f"n{place}", "1", pace=one) for place, one in enumerate([pace, pace, alone])
    ]
    found = SlowNodes(state, ("n02",) if state == "named" else (), "")
    given = replace(
        shown(snapshot()), verdict=verdict, slow_nodes=found, node_progress=tuple(compared)
    )
    assert "; ".join(given.slow_words) == said
    ((_, text, _),) = node_rows(given)
    assert text.endswith(said)


def test_the_screen_and_the_cap_count_the_same_spares() -> None:
    """A spare that is gone, silent, or found bad by this attempt is none; one that trains and is lost
    takes another's place.
    """
    named = tuple(f"n{number:02d}" for number in range(1, 53))
    fine = tuple(Node(name, frozenset({"allocated"})) for name in named)
    given = snapshot(
        jobs=(running(nodes=named, node_count=52),), nodes=fine, launch_nodes=named[:48]
    )
    blamed = LaunchEnd("1007", 1, NOW - 60, "Xid 79", blamed=("n51",))

    def without(name: str, state: str) -> tuple[Node, ...]:
        states = frozenset({"allocated", state})
        return tuple(replace(one, states=states) if one.name == name else one for one in fine)

    for seen, spares in (
        (given, 4),
        (changed(given, nodes=without("n52", "down")), 3),
        (changed(given, nodes=without("n50", "not_responding")), 3),
        (changed(given, launch_ends=(blamed,)), 3),
        (changed(given, nodes=without("n05", "down")), 3),
        (changed(given, launch_nodes=named[:40]), 12),
    ):
        assert spare_nodes(seen) == (spares, True)
        use = node_use(seen)
        assert use is not None and use.spare == spares


def test_what_another_job_of_the_run_holds_is_no_spare_of_the_attempt() -> None:
    """A task that has its nodes beside one that has lost its batch host, or beside one that leaves."""
    own = tuple(f"n{number:02d}" for number in range(1, 51))
    others = tuple(f"m{number:02d}" for number in range(1, 51))
    trains = running(nodes=own, node_count=50)
    beside = running(job_id="1000_8", raw_id="1008", task_id=8, nodes=others, node_count=50)
    for both in ((trains, beside), (beside, trains)):
        seen = snapshot(jobs=both, attempts=(wordless("1007"),), launch_nodes=own[:48])
        assert spare_nodes(seen) == (2, True)
        assert node_use(seen) == NodeUse(48, 2, 0)
    leaving = replace(trains, state=JobState.COMPLETING)
    seen = snapshot(jobs=(leaving, beside), attempts=(wordless("1007"),))
    assert spare_nodes(seen) == (2, True)


def test_nodes_that_the_site_takes_away_when_the_job_ends_are_shown() -> None:
    seen = (
        Node("n01", frozenset({"allocated", "drain"}), "memory"),
        Node("n02", frozenset({"mixed", "reboot_requested"}), "kernel"),
        Node("n03", frozenset({"allocated"})),
        Node("n04", frozenset({"down"}), "gone: node-lost tells it"),
        Node("n99", frozenset({"idle", "drain"}), "not ours"),
    )
    rows = list(node_rows(shown(snapshot(nodes=seen))))
    assert [text for _, text, _ in rows[1:]] == [
        "n01 leaves when its job ends: allocated+drain (memory)",
        "n02 leaves when its job ends: mixed+reboot_requested (kernel)",
    ]
    assert len(list(node_rows(shown(snapshot(nodes=Unknown("away")))))) == 1


# ----------------------------------------------------------------------------- copies
WANTED = BackupSection(store="/a", store_interval=50_000, milestone_percent=0)


def test_copies_have_a_row_only_where_the_card_asks_for_them() -> None:
    done = snapshot(backup=CopyStatus(NOW - HOUR, 31000), sync=CopyStatus(NOW - 60))
    assert list(copy_rows(shown(done))) == []
    ((label, text, style),) = copy_rows(
        shown(asked_for(done, backup=WANTED, hub=HubSection(repository="bigscience/logs")))
    )
    assert (label, text, style) == (
        "copies",
        "backup of step 31000 1 h 00 min ago; sync 1 min ago",
        "",
    )
    ((_, text, style),) = copy_rows(shown(asked_for(snapshot(), backup=WANTED)))
    assert (text, style) == ("backup never yet", "yellow")
    ((_, text, style),) = copy_rows(
        shown(asked_for(snapshot(backup=Unknown("unreadable")), backup=WANTED))
    )
    assert (text, style) == ("backup unknown", "magenta")


def test_what_is_missing_damaged_and_tried_is_told() -> None:
    policy = BackupSection(store="/a", store_interval=100, milestone_percent=0)
    seen = CopyStatus(
        NOW - HOUR,
        31000,
        "store: no room",
        (Copied("store", "full", 31000),),
        ("store: step 31000",),
    )
    given = asked_for(snapshot(backup=seen), backup=policy)
    assert (shown(given).copies_missing, shown(given).copies_damaged) == (2, 1)  # 31,100 and 31,200
    around = ExtraObservations(
        copying=(
            RunningCopy("store", "ana", "login1", NOW - 60, 31100),
            RunningCopy("sync", "ben", "login2", NOW - 5),
        ),
        drill=DrillRecord(NOW - DAY, "store", 30000, passed=False),
    )
    (_, text, style), *at_work = copy_rows(shown(given, around))
    assert text == (
        "backup of step 31000 1 h 00 min ago, but now: store: no room; 2 not copied yet; 1 DAMAGED; "
        "restore drill of step 30000 FAILED 1 d 0 h ago"
    )
    assert style == "red"
    assert [words for _, words, _ in at_work] == [
        "ana on login1 copies to the store (step 31100), for 1 min",
        "ben on login2 mirrors the logs to the hub, for 5 s",
    ]
    hidden = asked_for(snapshot(backup=Unknown("x")), backup=policy)
    assert (shown(hidden).copies_missing, shown(hidden).copies_damaged) == (None, None)


def test_who_copies_is_read_from_the_claims(tmp_path: Path) -> None:
    """The names of the claims are those under which the copying commands make them."""
    from tests.tr11ops.status.publishing import card_of, directory_of
    from tr11ops.hub.sync import CLAIM

    card = card_of(tmp_path)
    given = card.model_copy(
        update={
            "backup": card.backup.model_copy(update={"store": str(tmp_path / "store")}),
            "hub": card.hub.model_copy(update={"repository": "bot/logs"}),
        }
    )
    directory = directory_of(card)
    directory.paths.state.mkdir(parents=True)
    assert observe_extra(directory, given, snapshot()).copying == ()
    with CopyLock(directory, "store", threading.Event()) as turn:
        turn.copying(31000)
        ClaimFolder(directory, CLAIM).take(Claim.of_this_process(time.time(), HOUR), None)
        ClaimFolder(directory, "copy-url").take(Claim.of_this_process(time.time(), HOUR), None)
        seen = observe_extra(directory, given, replace(snapshot(), time=time.time()))
        assert [(work.to, work.step) for work in known(seen.copying, ())] == [
            ("store", 31000),
            ("sync", None),
        ]
        write_drill(directory, DrillRecord(NOW, "store", 30000, passed=True))
    after = observe_extra(directory, given, replace(snapshot(), time=time.time()))
    assert [work.to for work in known(after.copying, ())] == ["sync"]
    assert after.drill == DrillRecord(NOW, "store", 30000, passed=True)
    assert observe_extra(directory, card, snapshot()).drill is None


# ----------------------------------------------------------------------------- file systems


def test_the_fullest_file_system_and_when_it_is_full() -> None:
    grows = [look("SCRATCH", 80.0 - day, age=600.0 + day * DAY) for day in range(10)]
    given = snapshot(usage=(*grows, look("STORE", 50.0, inodes=95.0, age=DAY)))
    ((label, text, style),) = filesystem_rows(shown(given))
    assert (label, text, style) == (
        "disks",
        "STORE 95 % of inodes (fullest of 2); 1 d 0 h ago",
        "yellow",
    )
    ((_, text, style),) = filesystem_rows(shown(snapshot(usage=tuple(grows))))
    assert text.startswith("SCRATCH 80 % of bytes, full in 19 d 23 h")
    assert style == ""
    rule = FilesystemSection(name="SCRATCH", source="df", bytes_percent=75.0)
    ((_, _, style),) = filesystem_rows(
        shown(asked_for(snapshot(usage=tuple(grows)), filesystems=(rule,)))
    )
    assert style == "yellow"


def test_file_systems_that_no_one_asked_for_have_no_row() -> None:
    assert list(filesystem_rows(shown(snapshot()))) == []
    assert list(filesystem_rows(shown(snapshot(usage=Unknown("unreadable"))))) == []
    wanted = asked_for(snapshot(), filesystems=(FilesystemSection(name="SCRATCH", source="df"),))
    assert [text for _, text, _ in filesystem_rows(shown(wanted))] == [
        "not looked at yet (tr11 fs-watchdog)"
    ]
    hidden = changed(wanted, usage=Unknown("unreadable"))
    assert [text for _, text, _ in filesystem_rows(shown(hidden))] == ["unknown"]


# ----------------------------------------------------------------------------- periodic jobs
def test_periodic_jobs_are_alive_late_or_failing() -> None:
    assert list(periodic_rows(shown(snapshot(periodic_jobs=())))) == []
    ((label, text, style),) = periodic_rows(
        shown(snapshot(periodic_jobs=(cron_job(), cron_job("digest", next_due=NOW + 9000))))
    )
    assert (label, text, style) == (
        "periodic",
        "2 jobs alive, last pulse 10 min ago; next pulse in 50 min",
        "",
    )
    late = cron_job(next_due=NOW - 5 * HOUR, started=NOW - 6 * HOUR)
    failing = cron_job("filesystems", failures_in_a_row=3, message="df: no such path")
    ((_, text, style),) = periodic_rows(
        shown(snapshot(periodic_jobs=(cron_job("digest"), late, failing)))
    )
    assert text == "pulse late by 5 h 00 min; filesystems failed 3 times: df: no such path"
    assert style == "red"
    assert (
        list(
            periodic_rows(
                shown(asked_for(snapshot(periodic_jobs=(late,)), periodic_jobs=("digest",)))
            )
        )
        == []
    )


def test_a_watchdog_that_only_tells_is_said_to() -> None:
    seen = snapshot(periodic_jobs=(cron_job(),))
    (_, (label, text, _)) = list(periodic_rows(shown(with_facts(seen, watch=WatchSection()))))
    assert (label, text) == (
        "",
        "the watchdog only tells (watch.act = false): what it would do waits for you",
    )
    assert len(list(periodic_rows(shown(seen)))) == 1
    late = snapshot(periodic_jobs=(cron_job(next_due=NOW - 5 * HOUR, started=NOW - 6 * HOUR),))
    assert len(list(periodic_rows(shown(with_facts(late, watch=WatchSection()))))) == 1, (
        "there is none"
    )


# ----------------------------------------------------------------------------- alerts
def test_every_open_alert_says_who_has_it() -> None:
    ana = OnCall(("ana@example.org",), NOW + HOUR)
    seen = (
        alert(),
        alert("disk", owner="eva"),
        alert("slow", severity=Severity.WARNING, acknowledged_by="ben"),
        alert("spike", owner="eva", acknowledged_by="ben", snoozed_until=NOW + HOUR),
    )
    told = [
        text for _, text, _ in alert_rows(shown(snapshot(), ExtraObservations(seen, on_call=ana)))
    ]
    command = f"`tr11 alerts ack {seen[0].fingerprint}`"
    untaken = "(1 h 00 min); no one has taken it; ana@example.org is on call: "
    assert told[0].endswith(untaken + command)
    assert [text.rpartition("; ")[2] for text in told[1:4]] == [
        "eva has it",
        "ben has it",
        "eva has it, acknowledged by ben, snoozed for 1 h 00 min",
    ]
    many = tuple(alert(f"d{number}") for number in range(9))
    assert [text for _, text, _ in alert_rows(shown(snapshot(), ExtraObservations(many)))][
        -1
    ] == "and 4 more (tr11 alerts list)"


def test_a_long_title_leaves_who_has_it_whole() -> None:
    title = "; ".join(
        f"rank {rank} on jean-zay-iam{rank} was ended by SIGSEGV" for rank in range(9)
    )
    seen = ExtraObservations((alert(title=title),))
    ((_, text, _),) = alert_rows(shown(snapshot(), seen))
    assert "; no one has taken it: `tr11 alerts ack " in text and len(text) <= LONGEST


def test_who_has_an_alert_is_said_alike_of_an_alert_and_of_a_document() -> None:
    two = OnCall(("ana@example.org", "bo@example.org"))
    told = alert(told=("ana@example.org", "bo@example.org"), snoozed_until=NOW + HOUR)
    for on_call, words in (
        (two, "; ana@example.org, bo@example.org are on call and were told"),
        (OnCall(("cy@example.org",)), "; cy@example.org is on call"),
        (OnCall(), ""),
        (None, ""),
    ):
        said = f"no one has taken it, snoozed for 1 h 00 min{words}"
        assert told.care.words(on_call, NOW) == said
        extra = ExtraObservations((told,), on_call=on_call)
        [kept] = shown(snapshot(), extra).document()["alerts"]
        assert care_of(kept).words(on_call, NOW) == said


def test_an_alert_whose_fault_is_gone_says_when_it_closes() -> None:
    """Beside a run that is well it stood as if someone had to take it."""
    seen = snapshot(periodic_jobs=(cron_job(),))
    gone = alert("slow-node", severity=Severity.WARNING)
    closes = "no longer found; the watchdog closes it in about "
    unwatched = "no longer found"
    for given, look_at, words in (
        (gone, seen, f"{closes}1 h 50 min"),
        (replace(gone, clear_looks=1), seen, f"{closes}50 min"),
        (replace(gone, owner="eva"), seen, f"{closes}1 h 50 min; eva has it"),
        (alert("down"), snapshot(jobs=(), periodic_jobs=(cron_job(),)), f"{closes}1 h 50 min"),
        (gone, snapshot(periodic_jobs=()), unwatched),
        (gone, snapshot(heartbeats=Unknown("unreadable")), "no one has taken it"),
        (replace(gone, clear_looks=1), snapshot(jobs=Unknown("away"), periodic_jobs=()), unwatched),
    ):
        extra = ExtraObservations((given,)).seen_with(look_at, (), HEALTHY)
        [now] = known(extra.alerts, ())
        assert now.care.words(None, NOW) == words
        assert now.is_open, "a reader closes nothing"
        [kept] = shown(look_at, extra).document()["alerts"]
        assert care_of(kept).words(None, NOW) == words
        [(_, text, _)] = alert_rows(shown(look_at, extra))
        assert ("tr11 alerts ack" in text) == (words == "no one has taken it")
    remark = Finding("slow-node", Severity.INFO, "n01 holds the others back a little")
    for found, verdict in (((remark,), HEALTHY), ((), Verdict(VerdictWord.UNKNOWN, "?"))):
        extra = ExtraObservations((gone,)).seen_with(seen, found, verdict)
        assert known(extra.alerts, ())[0].care.is_found


def test_what_no_one_was_told_of_says_when_the_watchdog_tells_and_names_its_subject() -> None:
    """Beside a run that was down stood "none open"; and that of another node people had been told."""
    ana = OnCall(("ana@example.org",))
    old = alert("slow-node", "n01", severity=Severity.WARNING, told=ana.who)
    gone = "1 (slow-node n01) is no longer found; the watchdog closes it in about 1 h 50 min"
    slow = Finding(
        "slow-node", Severity.WARNING, "n02 holds the others back", "n02", identity=("n02",)
    )
    watched = snapshot(periodic_jobs=(cron_job(),))
    tells = "is not told yet: the watchdog looks within 50 min and then tells ana@example.org"
    silent = "is not told yet: no watchdog looks, so no one will be told"
    for seen, found, is_quiet, words in (
        (watched, FAULT, True, f"1 (stalled 1000_7) {tells}; {gone}"),
        (watched, slow, False, f"1 (slow-node n02) {tells}; {gone}"),
        (watched, slow, True, gone.replace(" (slow-node n01)", "")),
        (
            snapshot(periodic_jobs=()),
            FAULT,
            False,
            f"1 (stalled 1000_7) {silent}; 1 (slow-node n01) is no longer found",
        ),
    ):
        extra = ExtraObservations((old,), on_call=ana, is_quiet=is_quiet)
        status = shown(seen, extra.seen_with(seen, (found,), HEALTHY))
        assert alerts_words(status.cares, ana, NOW) == words
        assert alerts_words(cares_of(status.document()), ana, NOW) == words
        told = replace(alert(fingerprint=found.fingerprint), told=ana.who)
        after = ExtraObservations((told,)).seen_with(seen, (found,), HEALTHY)
        assert after.untold == ()


def test_an_open_alert_is_told_in_the_words_of_this_look() -> None:
    """The watchdog's last look was before the next task began, and its words were told for five minutes."""
    before = alert("chain-end", severity=Severity.WARNING, title="one more task is queued")
    now = Finding("chain-end", Severity.WARNING, "the last task of the queue is running", "1000")
    extra = ExtraObservations((before,)).seen_with(snapshot(), (now,), HEALTHY)
    [seen] = known(extra.alerts, ())
    assert seen.title == now.title and seen.care.is_found and seen.start == before.start


def test_who_is_on_call_has_a_row_where_the_card_names_someone() -> None:
    taken = OnCall(("ben@example.org",), NOW + HOUR, taken=NOW)
    for on_call, words in (
        (taken, ["none open", "ben@example.org (took the shift, 1 h 00 min left)"]),
        (OnCall(("ana@example.org",), NOW + HOUR), ["none open", "ana@example.org"]),
        (OnCall(), ["none open"]),
        (None, ["none open"]),
    ):
        seen = shown(snapshot(periodic_jobs=(cron_job(),)), ExtraObservations((), on_call=on_call))
        assert [text for _, text, _ in alert_rows(seen)] == words


def test_no_alert_means_something_only_where_someone_looks() -> None:
    alone = snapshot(periodic_jobs=())
    assert [text for _, text, _ in alert_rows(shown(alone, ExtraObservations(())))] == [
        "none open; no watchdog looks at the run"
    ]
    assert [
        text
        for _, text, _ in alert_rows(
            shown(snapshot(periodic_jobs=(cron_job(),)), ExtraObservations(()))
        )
    ] == ["none open"]
    assert [
        text
        for _, text, _ in alert_rows(
            shown(snapshot(periodic_jobs=Unknown("away")), ExtraObservations(()))
        )
    ] == ["none open"]
    assert [
        text
        for _, text, _ in alert_rows(shown(snapshot(), ExtraObservations(Unknown("unreadable"))))
    ] == ["unknown: unreadable"]


def test_a_pulse_leaves_who_looked_and_when(tmp_path: Path) -> None:
    from tests.tr11ops.status.publishing import card_of, directory_of

    card = card_of(tmp_path)
    directory = directory_of(card)
    directory.paths.state.mkdir(parents=True)
    assert observe_extra(directory, card, snapshot()).looked is None
    sight = AlertInput((), frozenset(), observed=True)
    process(Sender.of(directory, card, NOW), sight, deliver=False)
    seen = observe_extra(directory, card, snapshot())
    assert (seen.looked, seen.looked_by) == (NOW, who_looks())
