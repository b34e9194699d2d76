"""`tr11 handover`: what of a shift is told, what is open, what comes, how it reads, and when it
counts as made.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.cli.status_place import TR11, Place
from tests.tr11ops.status.care_cases import HEALTHY, REMARK, alert, asked_for, look
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    ended,
    pending,
    record,
    running,
    snapshot,
    steps,
    with_facts,
)
from tr11ops.alerts.state import Incident, OnCall
from tr11ops.base.errors import Refusal
from tr11ops.base.observed import Unknown
from tr11ops.base.units import WIDTH
from tr11ops.cli.handover import begin_of
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all
from tr11ops.goodput.account import Goodput
from tr11ops.goodput.causes import Interruption
from tr11ops.goodput.history_values import AttemptHistory, CheckpointMark, History
from tr11ops.handover.coming import coming_events
from tr11ops.handover.shift import Handover, HandoverMaterial, Happened, hand_over, last_handover
from tr11ops.handover.text import document, markdown
from tr11ops.observe.files import PastProgress, progress_at
from tr11ops.observe.observations import CopyStatus
from tr11ops.observe.snapshot import KillSwitch, Snapshot, course_of
from tr11ops.runcard.card import difference_lines, differences, load_card, shipped_folder
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.attempts import CodeIdentity, LaunchRecord
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.rundir.journal import Journal, JournalEntry, read_journal
from tr11ops.rundir.journal_lines import lines_of
from tr11ops.rundir.paths import Submission
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.verdict import judge

SINCE = NOW - 12 * HOUR


def entry(
    kind: str, age: float = HOUR, who: str = "ana", why: str = "", **data: Any
) -> JournalEntry:
    return JournalEntry(NOW - age, "w", 0, kind, who, why, data)


def submission(tag: str, age: float, card_hash: str) -> Submission:
    return Submission(
        tag,
        f"10{tag}",
        "slurm",
        NOW - age,
        "ana",
        "h",
        "tr11-176B-ml",
        "main",
        "1-3",
        48,
        card_hash,
    )


def material(**changes: Any) -> HandoverMaterial:
    seen: Snapshot = changes.pop("snapshot", snapshot())
    findings = detect_all(seen)
    launch = LaunchRecord(
        2, ("n01", "n17"), NOW - 5 * HOUR, NOW - 3 * HOUR, NOW - 3 * HOUR, 1, "nccl-timeout", "NCCL timed out on n17",
        blamed=("n17",), decision="starting again without n17",
    )  # fmt: skip
    attempt = AttemptHistory(
        "1007", "1000_7", "slurm", "tag", NOW - 13 * HOUR, None, True, NOW, ("n01",), (launch,)
    )
    faults = (
        Interruption(NOW - 3 * HOUR, "nccl-timeout", "1007", 2, NOW - 3 * HOUR + 380),
        Interruption(NOW - 20 * HOUR, "node", "1006", 1, NOW - 19 * HOUR),
        Interruption(NOW - 60, "node", "1007", 3, None),
    )
    values: dict[str, Any] = {
        "snapshot": seen,
        "findings": findings,
        "verdict": judge(seen, findings),
        "extra": ExtraObservations(),
        "history": History(
            "tr11-176B-ml",
            "main",
            (submission("1", 20 * HOUR, "a"), submission("2", 6 * HOUR, "b")),
            (attempt,),
            (),
            tuple(
                CheckpointMark(step, NOW - age * HOUR)
                for step, age in ((30800, 13), (31000, 7), (31200, 1))
            ),
        ),
        "goodput": Goodput(NOW - 2 * DAY, NOW, (), faults),
        "incidents": (),
        "journal": (),
        "begun": PastProgress(30800, 2048 * 30800, 2048 * 2048 * 30800, 2.4),
        "ended": PastProgress(31219, 2048 * 31219, 2048 * 2048 * 31219, 2.3),
        "cards": {
            "1": {"checkpoint": {"interval": 100}, "x": 1},
            "2": {"checkpoint": {"interval": 150}, "x": 1},
        },
    }
    return HandoverMaterial(**{**values, **changes})


def made(coming: tuple[Happened, ...] = (), **changes: Any) -> Handover:
    return hand_over(material(**changes), SINCE, NOW, "the last 12h", coming)


# ----------------------------------------------------------------------------- what happened
def test_progress_checkpoints_and_restarts_of_the_shift_alone() -> None:
    found = made()
    assert found.progress is not None
    assert (found.progress.iterations, found.progress.tokens) == (419, 419 * 2048 * 2048)
    assert found.checkpoints == (31000, 31200)
    assert [(restart.cause, restart.blamed, restart.down) for restart in found.restarts] == [
        ("NCCL timed out on n17", ("n17",), 380.0),
        ("node", (), None),
    ]
    text = markdown(found, UTC)
    assert "419 iterations (30,800 to 31,219), 1.8 B tokens; loss 2.4000 -> 2.3000" in text
    assert (
        "09:00  1000_7 failed: NCCL timed out on n17 (n17); starting again without n17;"
        in " ".join(text.split("\n  "))
    )
    assert "trained on after 6 min 20 s" in " ".join(text.split())
    assert "it has not trained since" in " ".join(text.split())


def test_the_code_of_the_newest_attempt_is_told() -> None:
    newest = replace(
        ended("1007", HOUR), code=CodeIdentity("/c", "ab" * 20, "work"), versions={"torch": "2"}
    )
    found = made(snapshot=snapshot(attempts=(newest, ended("1006"))))
    assert found.software == "1000_7: work ababababab; torch 2"
    assert (
        "Code of 1000_7: work ababababab; torch 2." in markdown(found, UTC)
        and made().software == ""
    )


def test_an_attempt_that_left_before_it_trained_has_saved_nothing() -> None:
    found = made(snapshot=snapshot(attempts=(ended("1007", HOUR, "pause", launch=0),)))
    assert "1000_7 ended: pause before it trained\n" in markdown(found, UTC)


def test_nothing_seen_is_not_no_progress() -> None:
    found = made(ended=None, begun=None)
    assert found.progress is None
    assert "No iteration is on record." in markdown(found, UTC)
    back = made(ended=PastProgress(30700, 0, 0, None))
    assert "No progress: iteration 30,700 after 30,800." in markdown(back, UTC)


def test_incidents_are_those_that_stood_in_the_shift() -> None:
    def incident(
        name: str, began: float, resolved: float | None, severity: Severity = Severity.CRITICAL
    ) -> Incident:
        over = None if resolved is None else NOW - resolved * HOUR
        return Incident(
            name,
            name,
            "",
            severity,
            f"title {name}",
            NOW - began * HOUR,
            NOW - began * HOUR + 90,
            "ben",
            over,
        )

    seen = (
        incident("before", 20, 14),
        incident("across", 20, 11),
        incident("inside", 5, 3),
        incident("open", 2, None),
        incident("small", 4, 2, Severity.INFO),
    )
    found = made(incidents=seen).incidents
    assert [(one.title, one.told, one.lasted) for one in found] == [
        ("title across", 90.0, 9 * HOUR),
        ("title inside", 90.0, 2 * HOUR),
        ("title open", 90.0, None),
    ]
    text = " ".join(markdown(made(incidents=seen), UTC).split())
    assert (
        "CRITICAL: title inside, told after 1 min 30 s, ben took it; over after 2 h 00 min" in text
    )
    assert made(
        incidents=Unknown("unreadable"), read_errors=("incidents: unreadable",)
    ).read_errors == ("incidents: unreadable",)


def test_people_and_tr11_are_told_apart() -> None:
    entries = (
        entry("kill-switch-set", why="new data"),
        entry("submitted", job_id="77", age=2 * HOUR, who="eva"),
        entry("node-excluded", who="tr11", node="n17", why="Xid 79"),
        entry("node-included", who="ben", node="n18"),
        entry("array-held", who="tr11", jobs=["1000"], why="two faults"),
        entry("act-intent", action="resubmit", subject="1-3"),
        entry("act-outcome", action="resubmit", subject="1-3", result="done"),
        entry("alert-opened", who="tr11", title="no"),
        entry("alert-acknowledged", who="ben", title="it stands still", event="x-1"),
        entry("alert-acknowledged", who="ben", title="it stands still", event="x-1"),
        entry("brand-new-kind", who="ana"),
        entry("checkpoint-now", age=13 * HOUR),
    )
    found = made(journal=entries)
    assert [(event.who, event.text, event.why) for event in found.people] == [
        ("ana", "set the kill switch", "new data"),
        ("eva", "submitted job 77", ""),
        ("ben", "acknowledged: it stands still", ""),
        ("ana", "brand new kind", ""),
    ]
    assert [event.text for event in found.automatic] == [
        "held the queued jobs: job 1000",
        "resubmit 1-3: done",
    ]
    assert [(event.who, event.text) for event in found.nodes] == [
        ("tr11", "n17 excluded"),
        ("ben", "n18 may be used again"),
    ]


def test_what_is_done_again_and_again_is_one_line() -> None:
    (deed,) = lines_of(tuple(entry("checkpoint-now", age=10 - number) for number in range(3)))
    assert (deed.text, deed.count, deed.time) == ("asked for a checkpoint (3 times)", 3, NOW - 10)


def test_copies_are_told_without_the_hourly_noise() -> None:
    about = {"archive": "store", "step": 3000}
    records = lines_of((
        entry("backup-began", **about), entry("backup-copied", why="store_interval 1000", **about),
        entry("backup-copied", why="store_interval 1000", archive="store", step=4000), entry("sync"), entry("reread"),
        entry("backup-damaged", why="digest", **about), entry("backup-drill", passed=False, **about),
        entry("restored", **about), entry("checkpoints-prune", why="2 to remove"), entry("checkpoint-removed"),
        entry("checkpoint-pinned", step=3000),
    ))  # fmt: skip
    assert [deed.text for deed in records] == [
        "copies made and read back in the store (2 times)",
        "the copy of step 3000 in the store was found damaged",
        "restore drill of step 3000 FAILED",
        "restored step 3000 from the store",
        "pruned checkpoints",
        "pinned checkpoint 3000",
    ]
    assert made().copies == "" and "Copies:" not in markdown(made(), UTC)
    seen = asked_for(
        snapshot(backup=CopyStatus(NOW - HOUR, 31000)),
        backup=BackupSection(store="/a", milestone_percent=0),
    )
    assert "- Copies: backup of step 31000 1 h 00 min ago." in markdown(made(snapshot=seen), UTC)


def test_changes_of_the_card_are_named() -> None:
    (change,) = made().changes
    assert (change.text, change.who) == ("job 102: checkpoint.interval: 100 -> 150", "ana")
    (unread,) = made(cards={}).changes
    assert "cannot be read" in unread.text


CARDS = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b"]), CARDS),
    st.dictionaries(st.sampled_from(["a", "b"]), CARDS),
)
def test_cards_differ_exactly_where_something_is_said(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> None:
    assert list(differences(first, first)) == []
    # a key that says nothing, and a table in which none says anything, is like none at all
    assert bool(list(differences(first, second))) == (_bare(first) != _bare(second))


def _bare(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    bare = {key: _bare(item) for key, item in value.items()}
    return {key: item for key, item in bare.items() if item not in (None, {})}


def test_a_table_that_is_set_or_unset_differs_in_each_of_its_keys() -> None:
    """The launch said so, and the job that starts another thing: the whole table against none."""
    table = {"slurm": {"container": {"image": "/a.sif", "mounts": ["/work"]}, "nodes": 2}}
    for unset in ({"slurm": {"nodes": 2}}, {"slurm": {"container": None, "nodes": 2}}):
        assert list(differences(table, unset)) == [
            ("slurm.container.image", "/a.sif", None),
            ("slurm.container.mounts", ["/work"], None),
        ]
        assert list(difference_lines(unset, table)) == [
            "slurm.container.image: none -> /a.sif",
            "slurm.container.mounts: none -> ['/work']",
        ]


# ------------------------------------------------------------------------- what is open, what comes
def test_what_is_open_has_its_owner_and_its_command() -> None:
    seen = snapshot(
        jobs=(running(), pending(reason="JobHeldUser")),
        holds=(
            HoldRecord("1000", "ben", NOW - HOUR, "new data"),
            HoldRecord("900", "tr11", NOW - DAY, "released by hand since"),
        ),
        kill_switch=KillSwitch(Path("/k"), "ben", NOW - HOUR, "new data"),
        exclusions=(
            Exclusion("n17", "Xid 79", "tr11", NOW - 5, since=NOW - DAY),
            Exclusion("n18", "slow", "ana", NOW + DAY),
        ),
    )
    given_alerts = (
        alert(owner="eva", snoozed_until=NOW + HOUR),
        alert("disk", severity=Severity.WARNING),
    )
    extra = ExtraObservations(given_alerts).seen_with(seen, (REMARK,), HEALTHY)
    found = made(snapshot=seen, extra=extra, findings=(REMARK,))
    closes = "no longer found; the watchdog closes it in about 1 h 50 min"
    assert [event.text for event in found.open] == [
        f"CRITICAL alert: job 1000_7 stands still; {closes}; eva has it, runbook stalled.md",
        f"WARNING alert: job 1000_7 stands still; {closes}, runbook stalled.md",
        "WARNING: one task is left; no alert was opened yet",
        "job 1000 is held (`tr11 resume` releases it)",
        "the kill switch is set",
        "n17 is excluded, due for a check",
        "n18 is excluded, for another 1 d 0 h",
    ]


def test_what_was_released_is_not_held_any_more() -> None:
    """A controller's record of what it held stays when a person lets it go on: the queue says what
    is held.
    """
    record = (HoldRecord("1000", "tr11", NOW - HOUR, "two faults"),)
    for jobs, expected in (
        ((pending(reason="JobHeldUser"),), ["job 1000 is held (`tr11 resume` releases it)"]),
        ((pending(reason="Resources"),), []),
        ((running(),), []),
        ((), []),
        (
            Unknown("no answer"),
            [
                "job 1000 was held, and whether it still is cannot be seen (`tr11 resume` releases it)"
            ],
        ),
    ):
        seen = snapshot(jobs=jobs, holds=record)
        assert [event.text for event in made(snapshot=seen, findings=()).open] == expected
        assert [
            hold["job"] for hold in status_of(seen, (), judge(seen, ())).document()["holds"]
        ] == ["1000"] * len(expected)


def test_the_coming_shift() -> None:
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    course = course_of(card)
    first = course[0]
    step = record(
        first.iterations - 40,
        total_iterations=card.total_iterations,
        global_batch_size=first.batch_size,
    )
    seen = snapshot(
        steps=(replace(steps(count=1)[0], record=step),),
        jobs=(running(start_time=NOW - 359_400 + 8 * HOUR),),
        exclusions=(Exclusion("n17", "Xid 79", "tr11", NOW + HOUR),),
        usage=tuple(look("SCRATCH", 99.8 - day, age=600.0 + day * DAY) for day in range(10)),
    )
    seen = with_facts(seen, course=course)
    taken = OnCall(("ben@example.org",), NOW + 3 * HOUR, taken=NOW)
    extra = ExtraObservations((alert(snoozed_until=NOW + 2 * HOUR),), on_call=taken)
    found = sorted(coming_events(seen, extra, card, 12 * HOUR), key=lambda event: event.time)
    texts = [re.sub(r"[\d,.]+ to", "N to", event.text) for event in found]
    assert any(text.startswith("the batch grows from N to") for text in texts), texts
    assert "n17 is due for a check (`tr11 nodes check --due`)" in texts
    assert "the snooze ends: job 1000_7 stands still" in texts
    assert "the shift that ben@example.org took ends: the rota counts again" in texts
    assert "file system SCRATCH is full, at its trend" in texts
    assert any(text.startswith("1000_7 saves and leaves") for text in texts)
    assert any("the last queued task ends" in text for text in texts)
    shut = replace(seen, jobs=(*seen.active_jobs, pending(reason="PartitionDown")))
    texts = [event.text for event in coming_events(shut, extra, card, 12 * HOUR)]
    assert any(
        text.startswith("what else is queued cannot start as things are: job 1000")
        for text in texts
    ), texts
    assert not any("tr11 launch" in text for text in texts)
    grows = next(event for event in found if "batch grows" in event.text)
    assert grows.time == pytest.approx(NOW + 41 * 105.0)
    assert all(NOW <= event.time <= NOW + 12 * HOUR for event in found)
    # a card that tells of another course has no say
    other = replace(step, global_batch_size=999)
    strange = replace(seen, steps=(replace(steps(count=1)[0], record=other),))
    assert not [
        event for event in coming_events(strange, extra, card, 12 * HOUR) if "batch" in event.text
    ]


def test_a_run_that_stands_reaches_no_milestone() -> None:
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    stopped = KillSwitch(Path("/k"), "ben", NOW, "")
    for switch in (None, stopped):
        seen = snapshot(jobs=(), heartbeats=(), kill_switch=switch, steps=steps(age=DAY))
        assert list(coming_events(seen, ExtraObservations(), card, DAY)) == []


# --------------------------------------------------------------------------- where the training was
def test_the_step_before_a_moment_is_found_in_any_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert progress_at(path, NOW) is None
    rows = []
    for number in range(1, 4001):
        rows.append(
            {"kind": "step", **to_builtins(record(number)), "time": 1000.0 + number, "job_id": "1"}
        )
        if number % 100 == 0:
            rows.append({"kind": "validation", "time": 1000.0 + number, "loss": 1.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    for moment, expected in (
        (1000.5, None),
        (1002.0, 1),
        (1100.5, 100),
        (3456.7, 2456),
        (9999.0, 4000),
    ):
        found = progress_at(path, moment)
        assert (None if found is None else found.iteration) == expected, moment
    exact = progress_at(path, 1501.0)
    assert exact == PastProgress(500, 2048 * 500, 2048 * 2048 * 500, 2.3)


# ----------------------------------------------------------------------------- how it reads
def test_the_page_reads_well_at_80_columns_and_hides_nothing() -> None:
    nasty = "\x1b[2J<script>alert(1)</script>\r\n# not a title " + "word " * 60
    found = made(
        journal=(entry("kill-switch-set", why=nasty), entry("launch-refused", who=nasty)),
        coming=(Happened(NOW + 60, nasty),),
        read_errors=(nasty,),
    )
    for unicode in (True, False):
        text = markdown(found, UTC, unicode)
        assert "\x1b" not in text and "\r" not in text
        assert "<script>" not in text.replace("\\<script>", "")
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            "# Hand-over: tr11-176B-ml / main",
            "## What happened",
            "## What is open",
            "## What comes next",
            "## What could not be read",
        ]
        assert max(map(len, text.splitlines())) <= WIDTH
        assert unicode or text.isascii()


def test_a_command_stays_on_one_line() -> None:
    holds = tuple(HoldRecord(f"{10**n}", "w" * n, NOW - 60, "new data") for n in range(1, 40))
    jobs = tuple(
        pending(raw_id=hold.job, array_id=hold.job, reason="JobHeldUser") for hold in holds
    )
    seen = snapshot(holds=holds, jobs=jobs)
    text = markdown(made(snapshot=seen, findings=()), UTC)
    assert text.count("`tr11 resume`") == 39


def test_the_document_is_plain_json_and_described() -> None:
    found = document(made(coming=(Happened(NOW + 60, "the next checkpoint is due"),), incidents=(
        Incident("f", "stalled", "", Severity.CRITICAL, "t", NOW - HOUR, NOW - HOUR, "", None),
    )))  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["schema"], found["since"], found["until"]) == (
        1,
        "2022-05-01T00:00:00+00:00",
        "2022-05-01T12:00:00+00:00",
    )
    assert found["coming"][0]["time"] == "2022-05-01T12:01:00+00:00"
    assert found["incidents"][0]["severity"] == "critical"
    described = (Path(__file__).parents[3] / "docs" / "how-to" / "handover.md").read_text(
        encoding="utf-8"
    )
    assert {key for key in found if f"`{key}`" in described} == set(found)


# ----------------------------------------------------------------------------- as typed
class Shift(Place):
    """A run directory in which `tr11 handover --run demo` is typed."""

    def handover(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.typed([*TR11, "handover", "--run", "demo", "--scheduler", "local", *arguments])


@pytest.fixture
def shift(tmp_path: Path) -> Shift:
    made_ = Shift(tmp_path)
    made_.directory.root.mkdir()
    return made_


def test_it_records_itself_and_the_next_one_goes_on_from_there(shift: Shift) -> None:
    journal = shift.directory.journal
    refused = shift.handover("--since", "last")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no hand-over is on record yet" in refused.stderr
    Journal(journal).write("kill-switch-set", "new data", {}, "ben")
    looked = shift.handover("--dry-run")
    assert looked.returncode == 0
    assert "ben: set the kill switch (new data)" in looked.stdout
    assert last_handover(read_journal(journal).entries) is None
    assert shift.handover("-o", "page.md").returncode == 0
    assert (shift.folder / "page.md").read_text().startswith("# Hand-over: demo / main\n")
    first = last_handover(read_journal(journal).entries)
    assert first is not None
    again = shift.handover("--since", "last", "--json")
    assert json.loads(again.stdout)["people"] == [], "that was told by the first"
    assert "s ago; --since 12h shows more" in again.stderr
    newest = last_handover(read_journal(journal).entries)
    assert newest is not None
    assert newest.data["since"] == first.time


def test_where_a_shift_begins() -> None:
    begun = {
        text: begin_of(text, NOW, ())[0]
        for text in ("12h", "90 min", "1.5d", "2w", "2022-05-01T08:00+00:00")
    }
    assert begun == {
        "12h": NOW - 12 * HOUR,
        "90 min": NOW - 1.5 * HOUR,
        "1.5d": NOW - 1.5 * DAY,
        "2w": NOW - 14 * DAY,
        "2022-05-01T08:00+00:00": NOW - 4 * HOUR,
    }
    for text in ("08:00", "23:59", "0:00"):
        moment, basis = begin_of(text, NOW, ())
        assert NOW - DAY <= moment < NOW
        assert time.strftime("%H:%M", time.localtime(moment)) == text.zfill(5)
        assert basis == f"since {text}"
    last = JournalEntry(NOW - 3 * HOUR, "w", 0, "handover", "ben", "")
    assert begin_of("last", NOW, (last, entry("handover", age=DAY))) == (
        NOW - 3 * HOUR,
        "since the hand-over by ben",
    )


@pytest.mark.parametrize(
    ("since", "part", "code"),
    [
        ("yesterday", "write 12h", 2),
        ("5", "write 12h", 2),
        ("", "write 12h", 2),
        ("25:00", "write 12h", 2),
        ("2999-01-01", "in the future", 2),
        ("last", "no hand-over is on record", 1),
    ],
)
def test_a_shift_that_is_none_is_refused(since: str, part: str, code: int) -> None:
    with pytest.raises(Refusal, match=part) as refusal:
        begin_of(since, NOW, ())
    assert refusal.value.exit_code == code


def test_a_clock_that_was_set_back_is_noticed() -> None:
    with pytest.raises(Refusal, match="set back"):
        begin_of("last", NOW, (entry("handover", age=-DAY),))


def test_an_absent_run_and_an_unwritable_file(shift: Shift) -> None:
    for place in ("no/where.md", "/dev/null"):
        assert re.search("there is no folder|is not a file", shift.handover("-o", place).stderr)
    assert Path("/dev/null").is_char_device()
    shift.directory.root.rmdir()
    done = shift.handover()
    assert (done.returncode, done.stdout) == (3, "")
    assert "does not exist" in done.stderr


# ----------------------------------------------------------------------------- the start of a shift
def test_the_start_of_a_shift_tells_what_the_last_one_left_and_records_nothing(
    shift: Shift,
) -> None:
    journal = shift.directory.journal
    first = shift.handover("--start")
    assert first.returncode == 0 and "the last 12h" in " ".join(first.stdout.split()), first.stderr
    assert first.stdout.startswith("# Start of shift: demo / main\n")
    assert "- `tr11 status --run demo`: may you sleep" in first.stdout
    assert "- none is running or queued" in first.stdout
    assert max(map(len, first.stdout.splitlines())) <= 80
    assert last_handover(read_journal(journal).entries) is None
    assert "start" not in json.loads(shift.handover("--json").stdout), "this one is recorded"
    begun = json.loads(shift.handover("--start", "--json").stdout)
    assert begun["basis"].startswith("since the hand-over by ")
    assert begun["start"]["jobs"] == [] and len(begun["start"]["commands"]) == 5
    both = shift.handover("--start", "--chronicle")
    assert both.returncode == 2 and "give one" in both.stderr
