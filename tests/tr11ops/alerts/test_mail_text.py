"""What a mail says, in which order, and how many mails one look makes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    CRITICAL,
    HOUR,
    LIST,
    MINUTE,
    NOON,
    WARNING,
    Mailbox,
    Office,
    at,
    finding,
)  # fmt: skip
from tests.tr11ops.detect.detector_table import TABLE
from tests.tr11ops.detect.operation_table import TABLE as OPERATION
from tests.tr11ops.detect.pages import PAGES
from tr11ops.alerts.incidents import look
from tr11ops.alerts.mail_route import compose
from tr11ops.alerts.mail_text.alert import MOST_TITLES
from tr11ops.alerts.mail_text.shared import LONGEST_SUBJECT
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import (
    UNKNOWN_SITUATION,
    Act,
    RunCondition,
    RunSituation,
    Spell,
    what_tr11_does,
)
from tr11ops.alerts.state import AlertState
from tr11ops.base.shipped import page_lines
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.registry import detect_all
from tr11ops.detect.saved import FALLS_BACK

Make = Callable[..., Office]
POLICY = Policy(
    run="small", directory="/runs/small", typed="tr11.toml", folder="/home/ana", recipients=(ANA,)
)
HANG = finding(
    "hung",
    title="job 1007 hangs: no sign of life for 31 min",
    fix="tr11 logs --run tr11.toml --rank 17",
)
SPELL = Spell(0, 2.4, 2.3, 48.0, 0.75, 64.0, 16.0)
CANCEL = Act("cancel", "cancel 1007: job 1007 hangs", NOON + MINUTE)


def lost(number: int, severity: Severity = WARNING) -> Finding:
    return finding(
        "node-lost",
        severity,
        "1007",
        title=f"job 1007 has lost n{number:02d}",
        identity=(f"n{number:02d}",),
    )


# ----------------------------------------------------------------------------- how many
def test_fifty_one_findings_of_one_look_are_one_mail(office: Make, mailbox: Mailbox) -> None:
    desk = office(f'recipients=["{ANA}","{BEN}"]', "resolve_after=1")
    found = [lost(number) for number in range(51)]
    desk.look(NOON, *found)
    assert mailbox.told() == [(ANA, BEN)]
    assert mailbox.subjects == ["[WARNING] small: job 1007 has lost n00 (and 50 more)"]
    text = mailbox.mails[0][1].get_content()
    assert all(f"has lost n{number:02d}" in text for number in range(51))
    assert max(map(len, text.splitlines())) <= 78 + len(str(desk.folder))
    desk.look(NOON + MINUTE, *found)
    assert len(mailbox.mails) == 1
    desk.look(NOON + 2 * MINUTE)
    assert mailbox.subjects[1:] == ["[OK] small: over: job 1007 has lost n00 (and 50 more)"]
    assert mailbox.mails[1][1]["In-Reply-To"] == mailbox.mails[0][1]["Message-ID"]
    assert len(desk.journal("alert-opened")) == len(desk.journal("alert-resolved")) == 51
    assert len(desk.journal("alert-sent")[0].data["alerts"]) == 51


def test_a_day_on_which_something_ended_is_no_quiet_one(office: Make, mailbox: Mailbox) -> None:
    desk = office(f'recipients=["{ANA}"]', 'digest_time="13:00"', "resolve_after=1")
    desk.look(NOON, lost(7, CRITICAL))
    desk.look(NOON + MINUTE)
    desk.look(NOON + 61 * MINUTE)
    assert mailbox.subjects[-1] == "[DIGEST] small: nothing open, 1 alert over"


def test_critical_has_a_mail_for_each_kind_of_fault(office: Make, mailbox: Mailbox) -> None:
    desk = office(f'recipients=["{ANA}"]')
    desk.look(
        NOON,
        *(lost(n) for n in range(5)),
        lost(7, CRITICAL),
        lost(8, CRITICAL),
        finding("down", title="down"),
    )
    assert sorted(mailbox.subjects) == [
        "[CRITICAL] small: down",
        "[CRITICAL] small: job 1007 has lost n07 (and 1 more)",
        "[WARNING] small: job 1007 has lost n00 (and 4 more)",
    ]


def test_no_one_hears_twice_where_people_hear_different_things(
    office: Make, mailbox: Mailbox
) -> None:
    """Ana knew of the first; Ben is on duty when it ends, and another begins."""
    desk = office(f'rota=["{ANA}","{BEN}"]', 'rota_start="2022-05-02"', "resolve_after=1")
    turn = at("2022-05-09 00:00")
    desk.look(turn - 1, lost(1))
    desk.look(turn, lost(2), lost(3))
    assert mailbox.told() == [(ANA,), (BEN,), (ANA,)] or mailbox.told() == [(ANA,), (ANA,), (BEN,)]
    desk.look(turn + MINUTE, lost(2), lost(3))
    assert len(mailbox.mails) == 3


def test_delivery_urls_get_each_part_once() -> None:
    policy = Policy(run="small", directory="/r", rota=(ANA, BEN), has_urls=True)
    alert_state, first = tell(
        look(AlertState(), [lost(1)], frozenset(), policy, NOON), policy, NOON
    )
    assert [message.urls for message in first] == [True]
    later = NOON + 7 * 86400
    alert_state, second = tell(
        look(alert_state, [lost(1), lost(2)], frozenset(), policy, later), policy, later
    )
    assert sorted(len(message.alerts) for message in second if message.urls) == [2]
    assert {address for message in second for address in message.to} >= {BEN}


def test_thousands_of_findings_make_a_mail_that_can_be_read() -> None:
    found = [
        finding("slow-node", WARNING, f"node{number}", title="x" * 150) for number in range(3000)
    ]
    _, (message,) = tell(look(AlertState(), found, frozenset(), POLICY, NOON), POLICY, NOON)
    assert f"and {3000 - MOST_TITLES} more: tr11 alerts list" in message.body
    assert len(message.body) < 40_000


# ----------------------------------------------------------------------------- what
def message_of(
    found: Finding, situation: RunSituation = UNKNOWN_SITUATION, policy: Policy = POLICY
) -> str:
    _, (message,) = tell(
        look(AlertState(), [found], frozenset(), policy, NOON),
        policy,
        NOON + 5 * MINUTE,
        situation=situation,
    )
    return message.body + message.appendix


def test_the_first_lines_say_all_that_a_telephone_shows() -> None:
    situation = RunSituation(
        "iteration 12,000 of 95,367 (12.5 %), loss 2.3120",
        planned=(CANCEL,),
        may_act=True,
        since=lambda _: SPELL,
    )
    text = message_of(HANG, situation)
    assert (
        " ".join(text.splitlines()[:6]).split()
        == (
            "Job 1007 hangs: no sign of life for 31 min. This began at 2022-05-02 12:00 UTC, 5 min ago."
            " tr11 will now cancel 1007: job 1007 hangs. Type: cd /home/ana tr11 logs --run tr11.toml --rank 17"
        ).split()
    )
    assert "Progress: iteration 12,000 of 95,367 (12.5 %), loss 2.3120\n" in text
    assert "Cost:     16.0 of 64.0 node-hours lost since 2022-05-02 12:00 UTC\n" in text
    assert "---- tr11 runbook hung ---" in text and "    tr11 kill --now --wait --yes" in text
    assert "export TR11_RUN=tr11.toml" in text
    assert max(map(len, text.splitlines())) <= 78


def test_a_person_is_not_told_to_do_what_tr11_does_now() -> None:
    """A second launch beside the watchdog's would be refused at best."""
    gone = finding("down", title="r is neither running nor queued", fix="tr11 launch --array 1-3")
    again = Act("resubmit", "resubmit 1-3: nothing runs", 0.0)
    acting = message_of(gone, RunSituation(planned=(again,), may_act=True))
    assert "Type nothing now. Only if that fails:" in acting and "\nType:" not in acting
    assert "\nType:" in message_of(gone, RunSituation(planned=(again,), may_act=False))
    did = Act("resubmit", "resubmit 1-3: nothing runs", NOON)
    spent = RunSituation(done=(did,), withheld=("resubmit 1-3: x; not done: y",), may_act=True)
    assert "\nType:" in message_of(gone, spent), "it did so once, and does not do it again"


@pytest.mark.parametrize(
    ("situation", "words"),
    [
        (UNKNOWN_SITUATION, ""),
        (RunSituation(), "tr11 does nothing about it by itself."),
        (RunSituation(done=(CANCEL,)), "tr11 did: cancel 1007: job 1007 hangs."),
        (
            RunSituation(planned=(CANCEL,)),
            "tr11 would cancel 1007: job 1007 hangs, but it may not act",
        ),
        (
            RunSituation(withheld=("cancel 1007: x; not done: y",)),
            "tr11 did not cancel 1007 (x): y.",
        ),
        (
            RunSituation(withheld=("nothing is done, because jobs are unknown",)),
            "tr11 did not act: nothing is done",
        ),
        (
            RunSituation(withheld=("resubmit 1-3: x; not done: y",)),
            "tr11 does nothing about it by itself.",
        ),
        (
            RunSituation(done=(CANCEL,), withheld=("cancel 1007: x; not done: y",)),
            "tr11 did not cancel 1007 (x): y.",
        ),
        (
            RunSituation(withheld=("cancel 1: x; not done: y", "cancel 1007: x; not done: z")),
            "tr11 did not cancel 1007 (x): z.",
        ),
        (
            RunSituation(withheld=("nothing is done: job 5 trains elsewhere",)),
            "tr11 did not act: nothing is done: job 5",
        ),
    ],
)
def test_what_tr11_does_is_said(situation: RunSituation, words: str) -> None:
    (alert,) = look(AlertState(), [HANG], frozenset(), POLICY, NOON).alerts
    said = what_tr11_does(alert, situation)
    assert said.startswith(words) and bool(said) == bool(words)


def test_what_the_run_does_by_itself_is_said_where_no_watchdog_acts() -> None:
    goes_on = "Job 1007 goes on without it."
    (alert,) = look(
        AlertState(), [replace(lost(1), by_itself=goes_on)], frozenset(), POLICY, NOON
    ).alerts
    out = Act("exclude", "exclude n01: it is lost", subject="n01")
    assert what_tr11_does(alert, RunSituation()) == goes_on
    assert what_tr11_does(alert, RunSituation(planned=(out,))) == goes_on
    acting = RunSituation(planned=(out,), may_act=True)
    assert what_tr11_does(alert, acting) == "tr11 will now exclude n01: it is lost."
    (worse,) = look(
        AlertState(), [replace(lost(1, CRITICAL), by_itself=goes_on)], frozenset(), POLICY, NOON
    ).alerts
    assert goes_on not in what_tr11_does(worse, RunSituation()), "it does not calm critical"


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ("tr11 launch --repair", ": `tr11 launch --repair` does it."),
        ("tr11 logs", "; by hand: `tr11 launch --repair`."),
    ],
)
def test_what_tr11_would_do_is_said_with_the_command_that_does_it(fix: str, words: str) -> None:
    """The mail promised an exclusion, and no command that it named made it."""
    repair = "tr11 launch --repair"
    planned = (
        Act("exclude", "exclude n01: lost as the batch host", subject="n01", by_hand=repair),
        Act("cancel", "cancel 1007: its batch host is lost", subject="1007", by_hand=repair),
        Act("exclude", "exclude n05: Xid 79", subject="n05", by_hand="tr11 nodes exclude n05"),
    )
    found = replace(lost(1, CRITICAL), fix=fix)
    (alert,) = look(AlertState(), [found], frozenset(), POLICY, NOON).alerts
    said = what_tr11_does(alert, RunSituation(planned=planned))
    would = (
        "tr11 would exclude n01 and cancel 1007, but it may not act (`watch.act`, `pulse --act`)"
    )
    assert said == would + words, "another node's exclusion belongs to another mail"


@pytest.mark.parametrize(
    "situation",
    [
        RunSituation(done=(Act("exclude", "exclude n05", NOON, "n05"),), may_act=True),
        RunSituation(withheld=("exclude n05: Xid 79; not done: none may be excluded",)),
    ],
)
def test_what_was_or_was_not_done_to_another_node_belongs_to_another_mail(
    situation: RunSituation,
) -> None:
    (alert,) = look(AlertState(), [lost(1, CRITICAL)], frozenset(), POLICY, NOON).alerts
    assert what_tr11_does(alert, situation) == "tr11 does nothing about it by itself."
    (its_own,) = look(AlertState(), [lost(5, CRITICAL)], frozenset(), POLICY, NOON).alerts
    assert "exclude n05" in what_tr11_does(its_own, situation)


@pytest.mark.parametrize(
    ("fix", "after"),
    [
        ("findmnt -T /runs/small", "When it is repaired, type:"),
        ("tr11 diagnose --job 57_1", "When it is repaired, type:"),
        ("tr11 nodes list", "When it is repaired, type:"),
        ("tr11 checkpoints prune --keep 2", "Then:"),
        ("", "When it is repaired, type:"),
    ],
)
def test_what_only_looks_is_not_said_to_help(fix: str, after: str) -> None:
    said = message_of(
        finding("unfinished-end", title="attempt 57_1 failed", fix=fix, then=("tr11 resume",))
    )
    assert next(line for line in said.splitlines() if line.startswith(("When ", "Then"))) == after


def test_a_subject_is_short_and_keeps_its_end() -> None:
    why = "n09 cannot be excluded: of the partition's 44 nodes at most 0 may be excluded, for an attempt needs 2"
    found = finding(
        "unfinished-end",
        CRITICAL,
        title=f"attempt 57_1 failed: {why} (resilience.exclusion_cap_percent)",
    )
    _, (message,) = tell(look(AlertState(), [found], frozenset(), POLICY, NOON), POLICY, NOON)
    assert message.subject == (
        "[CRITICAL] small: attempt 57_1 failed: n09 cannot be excluded ... for an attempt needs 2"
    )
    assert found.title in " ".join(message.body.split()).replace("Attempt", "attempt")


@pytest.mark.parametrize("error", ["the worker was ended by SIGSEGV", f"ValueError: {'x ' * 40}"])
def test_a_subject_says_whose_fault_it_is_before_the_rank_that_showed_it(error: str) -> None:
    why = "software or data, not the nodes: the same fault came back after iteration 271 on n02 and n01"
    title = f"attempt 57_1 failed: {why}: rank 1 on jean-zay-iam01: {error}"
    found = finding("unfinished-end", CRITICAL, title=title)
    _, (message,) = tell(look(AlertState(), [found], frozenset(), POLICY, NOON), POLICY, NOON)
    said = "[CRITICAL] small: attempt 57_1 failed: software or data, not the nodes ... "
    assert message.subject.startswith(said)


def test_a_long_sentence_is_whole_in_the_body_wherever_it_stands() -> None:
    """As the cause, as what follows from it, and as what is still open behind an all-clear."""
    why = f"software or data, not the nodes: the same fault came back after iteration 31219 on {'n1, ' * 30}SIGSEGV"
    cause = finding("start-failed", CRITICAL, title=f"attempt 57_1 could not start: {why}")
    lesser = finding("unfinished-end", CRITICAL, title=f"attempt 57_1 failed: {why}")
    _, (message,) = tell(
        look(AlertState(), [cause, lesser], frozenset(), POLICY, NOON), POLICY, NOON
    )
    body = " ".join(message.body.split())
    assert body.count(why) == 2 and "..." not in body


def test_a_long_path_leaves_room_for_what_is_wrong_with_it() -> None:
    path = "/gpfsssd/worksf/projects/rech/six/commun/checkpoints/tr11-176B-ml/checkpoints/run"
    found = finding(
        "filesystem-full", CRITICAL, title=f"{path} cannot be written to: no byte is left"
    )
    _, (message,) = tell(look(AlertState(), [found], frozenset(), POLICY, NOON), POLICY, NOON)
    assert message.subject.endswith(".../checkpoints/run cannot be written to: no byte is left")
    assert path in message.body.replace("\n", "")


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 alert and 1 over"), (2, "2 alerts and 1 over")]
)
def test_one_alert_is_one(office: Make, mailbox: Mailbox, count: int, words: str) -> None:
    desk = office(f'recipients=["{ANA}"]', "resolve_after=1")
    desk.look(NOON, lost(0))
    desk.look(NOON + MINUTE, *(lost(number) for number in range(1, count + 1)))
    assert f"All in this mail: {words}." in mailbox.mails[-1][1].get_content()


def test_no_mail_says_that_nothing_is_done_while_the_next_attempt_starts() -> None:
    goes_on = "The next attempt, 1000_8, is queued, and starts by itself."
    found = finding("unfinished-end", CRITICAL, "1007", by_itself=goes_on)
    (alert,) = look(AlertState(), [found], frozenset(), POLICY, NOON).alerts
    assert what_tr11_does(alert, RunSituation()) == goes_on


def test_what_the_run_does_by_itself_does_not_calm_critical() -> None:
    for severity, words in (
        (WARNING, "A resume takes the newest"),
        (CRITICAL, "tr11 does nothing about it by itself."),
    ):
        found = finding("checkpoint-unsound", severity, "1200", by_itself=FALLS_BACK)
        (alert,) = look(AlertState(), [found], frozenset(), POLICY, NOON).alerts
        assert what_tr11_does(alert, RunSituation()).startswith(words)


def test_a_fault_costs_from_the_last_iteration_on() -> None:
    asked: list[float] = []

    def since(moment: float) -> Spell:
        asked.append(moment)
        return SPELL

    assert "lost since 2022-05-02 11:30 UTC" in message_of(
        HANG, RunSituation(trained=NOON - HOUR / 2, since=since)
    )
    assert "lost since 2022-05-02 12:00 UTC" in message_of(
        HANG, RunSituation(trained=NOON + MINUTE, since=since)
    )
    assert asked == [NOON - HOUR / 2, NOON]


def test_only_what_works_is_offered_as_acknowledgement() -> None:
    text = message_of(HANG)
    assert re.search(
        r"^  tr11 alerts ack --run tr11.toml [0-9a-f]{12}-[0-9a-f]+$", text, re.MULTILINE
    )
    assert (
        "Replies to this mail are not read" in text and "/runs/small/state/alerts/replies/" in text
    )


def test_no_word_of_another_team_is_left() -> None:
    for name in ("down", "hung", "node-lost"):
        text = message_of(finding(name, title="it is"))
        assert "Eng WG" not in text and "engineering chat" not in text and "***" not in text


def test_an_all_clear_needs_no_page_and_no_command(office: Make, mailbox: Mailbox) -> None:
    desk = office(f'recipients=["{LIST}"]', "resolve_after=1")
    desk.look(NOON, finding())
    desk.look(NOON + HOUR)
    text = mailbox.mails[1][1].get_content()
    first = (
        "Over: stalled it is. It lasted 1 h 00 min, from 2022-05-02 12:00 UTC to 2022-05-02 13:00 UTC"
        " (not seen in 1 look). Nothing to type."
    )
    assert " ".join(text.split()).startswith(first)
    assert "----" not in text and "tr11 alerts" not in text


def test_hostile_names_forge_no_header_and_no_line() -> None:
    evil = "n01\r\nBcc: eve@example.org\r\n\r\nhf_abcdefghijkl Größe"
    found = finding(
        "slow-node",
        WARNING,
        evil,
        title=f"{evil} is slow",
        evidence=(evil,),
        fix=f"tr11 nodes check {evil}",
    )
    _, (message,) = tell(look(AlertState(), [found], frozenset(), POLICY, NOON), POLICY, NOON)
    mail = compose(message, "bot@example.org", NOON)
    assert (
        mail["Bcc"] is None and "\n" not in str(mail["Subject"]) and "Größe" in str(mail["Subject"])
    )
    assert b"\r\nBcc:" not in mail.as_bytes() and "hf_abcdefghijkl" not in mail.get_content()
    assert not [line for line in mail.get_content().splitlines() if line.startswith("Bcc")]


def test_urls_do_not_get_the_runbook() -> None:
    _, (message,) = tell(look(AlertState(), [HANG], frozenset(), POLICY, NOON), POLICY, NOON)
    assert "----" not in message.body and "---- tr11 runbook hung" in message.appendix


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_is_plain_text_with_all_its_commands(page: object) -> None:
    from pathlib import Path

    assert isinstance(page, Path)
    lines = page_lines(page.name, 78)
    text = "\n".join(lines)
    assert "```" not in text and "**" not in text and "](" not in text
    assert not any("|" in line for line in lines if not line.startswith("    "))
    assert max(len(line) for line in lines if not line.startswith("    ")) <= 78
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        assert all(f"    {line}".rstrip() in lines for line in block.splitlines())


def test_each_row_of_a_table_is_an_item_of_a_list() -> None:
    lines = page_lines("array-held.md", 78)
    assert "- `storage`: disk full, quota, read-only file system -> make room, or have it" in lines
    start = lines.index("- why: what it was -> what to do")
    assert lines[start + 1] == "" and lines[start + 2].startswith("- `refused`, `configuration`: ")


def test_another_page_is_named_by_its_command() -> None:
    """A mail has no folder of pages: the file of one is of no use in it."""
    for page in PAGES:
        lines = page_lines(page.name, 78)
        assert not any(
            re.search(r"(?<![/\w-])[a-z-]+\.md\b", line)
            for line in lines
            if not line.startswith("    ")
        ), page.name
    text = " ".join(page_lines("README.md", 10_000))
    assert "nothing runs, nothing is queued: `tr11 runbook down`" in text


FAULTS = [found for _, seen, *_ in (*TABLE, *OPERATION) for found in detect_all(seen)]


def test_a_subject_has_two_colons_at_most_and_a_sentence_begins_with_a_capital() -> None:
    """Of every fault that the detectors' tables make."""
    messages = [
        message
        for fault in FAULTS
        for message in tell(look(AlertState(), [fault], frozenset(), POLICY, NOON), POLICY, NOON)[1]
    ]
    assert len(messages) > 60
    for message in messages:
        assert message.subject.count(": ") <= 2, message.subject
        first = message.body.split(" ")[0]
        assert not first.isalpha() or first[0].isupper() or first == "latest", (
            message.body.splitlines()[0]
        )


def test_what_stands_in_place_of_a_fault_makes_no_row_of_colons() -> None:
    policy = Policy(run="small", directory="/r", recipients=(ANA,), resolve_after=1)
    state, _ = tell(look(AlertState(), [HANG], frozenset(), policy, NOON), policy, NOON)
    down = RunCondition("DOWN: nothing runs: nothing is queued: the end", is_well=False)
    later, subjects = NOON, []
    for minutes in (1, 2, 70):
        later = NOON + minutes * MINUTE
        situation = RunSituation(condition=down)
        state, told = tell(
            look(state, [], frozenset(), policy, later), policy, later, situation=situation
        )
        subjects += [message.subject for message in told]
    assert subjects == [
        "[NOT OK] small: DOWN: nothing runs, nothing is queued, the end (over: hung)"
    ]


@pytest.mark.parametrize("length", [20, 60, 100])
def test_a_long_name_of_a_run_leaves_room_in_the_subject(length: int) -> None:
    policy = Policy(run="r" * length, directory="/r", recipients=(ANA,), resolve_after=1)
    state, opened = tell(look(AlertState(), [HANG], frozenset(), policy, NOON), policy, NOON)
    down = RunSituation(condition=RunCondition("DOWN: nothing runs", is_well=False))
    subjects = [message.subject for message in opened]
    for minutes in (1, 2, 70):
        later = NOON + minutes * MINUTE
        state, told = tell(
            look(state, [], frozenset(), policy, later), policy, later, situation=down
        )
        subjects += [message.subject for message in told]
    assert len(subjects) == 2 and max(map(len, subjects)) <= LONGEST_SUBJECT
    assert HANG.title in subjects[0] and "DOWN: nothing runs (over: " in subjects[1]


def test_each_command_of_a_mail_means_the_run_in_any_folder() -> None:
    """Also those of the lesser alerts in it, and of what still stands beside an all-clear."""
    slow = finding("slow", WARNING, title="the training is slower", fix="tr11 nodes check n1")
    full = finding("filesystem-full", WARNING, title="SCRATCH is full", fix="tr11 fs-watchdog")
    state = look(AlertState(), [slow, full, HANG], frozenset(), POLICY, NOON)
    state, messages = tell(state, POLICY, NOON)
    text = next(message.body for message in messages if len(message.alerts) == 2)
    assert (
        f"   Type: cd /home/ana && {slow.fix}\n" in text
        and f"   Type: cd /home/ana && {full.fix}\n" in text
    )
    policy = replace(POLICY, resolve_after=1)
    later = NOON + HOUR
    _, (over,) = tell(look(state, [slow, full], frozenset(), policy, later), policy, later)
    assert over.subject.startswith("[OK] small: over: ")
    for other in (slow, full):
        told = over.body[over.body.index(f"Still open, WARNING: {other.title}") :]
        assert re.match(rf"Still.*\nType:\n  cd /home/ana\n  {other.fix}\n", told), told


def test_the_run_is_named_at_one_place_in_every_command() -> None:
    text = message_of(HANG).partition("What follows is the runbook")[0]
    commands = [line.strip() for line in text.splitlines() if line.startswith("  tr11 ")]
    assert len(commands) >= 2
    assert all(
        re.match(r"tr11 (alerts )?[a-z]+ --run tr11.toml ", command) for command in commands
    ), commands


def test_a_cost_of_seconds_is_no_cost() -> None:
    cheap = replace(SPELL, lost_hours=0.0003, wanted_hours=0.002)
    assert "Cost:" in message_of(HANG, RunSituation(since=lambda _: SPELL))
    assert "Cost:" not in message_of(HANG, RunSituation(since=lambda _: cheap))


def test_a_page_that_is_not_there_is_left_out() -> None:
    assert page_lines("no-such-page.md", 78) == ()
