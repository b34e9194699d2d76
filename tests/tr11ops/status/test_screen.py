"""The status screen and its JSON: golden screens, every width, terminals that show ASCII only,
hostile texts.
"""

from __future__ import annotations

import io
import json
import math
import re
from datetime import UTC
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.plugins.golden_fixture import Golden
from tests.tr11ops.status.care_cases import alert, look
from tests.tr11ops.status.screens import SCREENS, full, keys_below
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    checkpoints,
    cron_job,
    ended,
    facts_with,
    idle,
    pending,
    running,
    slowed,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tests.tr11ops.watchdog.verdict_table import TABLE
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import bar, plain, shows_unicode, sparkline
from tr11ops.cluster.base import Node
from tr11ops.detect.registry import detect_all, page_of
from tr11ops.observe.observations import CopyStatus, LaunchEnd
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.runcard.watching import BackupSection, FilesystemSection, HubSection
from tr11ops.rundir.attempts import CodeIdentity
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.rows import Screen, incidents_of, jobs
from tr11ops.status.screen import badge_style, render
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.origin import BranchOrigin

GOLDEN = Path(__file__).parents[2] / "data" / "status"


def drawn(
    given: Snapshot,
    width: int,
    unicode: bool,
    height: int | None = None,
    extra: ExtraObservations = ExtraObservations(),  # noqa: B008  frozen
) -> str:
    from rich.console import Console

    findings = detect_all(given)
    target = io.StringIO()
    console = Console(
        file=target, width=width, color_system=None, highlight=False, emoji=False, markup=False
    )
    screen = Screen(width, unicode, UTC, height)
    console.print(render(status_of(given, findings, judge(given, findings), extra), screen))
    return "".join(line.rstrip() + "\n" for line in target.getvalue().splitlines())


def test_what_makes_a_run_slow_is_said_before_what_is_missing_for_the_night() -> None:
    alone = drawn(slowed(periodic_jobs=()), 80, True)
    said = " ".join(alone.split())
    assert said.index("n02 holds the others back") < said.index("Before you sleep")
    assert "and the training is slow until then" in " ".join(drawn(slowed(), 80, True).split())


@pytest.mark.parametrize("name", SCREENS)
def test_golden(name: str, golden: Golden) -> None:
    """`tests/data/status/NAME.txt` is what a person agreed to see; a change of the screen is a
    change there.
    """
    golden(GOLDEN / f"{name}.txt", drawn(*SCREENS[name]))


@pytest.mark.parametrize("width", [40, 60, 80, 132])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("given_snapshot", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_no_screen_is_wider_than_its_terminal(
    given_snapshot: Snapshot, unicode: bool, width: int
) -> None:
    text = drawn(given_snapshot, width, unicode)
    findings = detect_all(given_snapshot)
    assert text.startswith(f" {judge(given_snapshot, findings).word.upper()} ")
    assert max(map(len, text.splitlines())) <= width
    assert unicode or text.isascii()
    for incident in incidents_of(
        status_of(given_snapshot, findings, judge(given_snapshot, findings)).findings
    ):
        for command in (incident.cause.fix or "", *incident.commands_after):
            copied = text.replace(" \\\n", "\n")  # as a shell reads it
            assert "".join(command.split()) in "".join(copied.split()), (
                "the command to type is on the screen"
            )


def test_hostile_texts_reach_no_terminal() -> None:
    nasty = "\x1b[2J[bold red]boo[/] ☠ \r\n:smile: " + "x" * 100
    switch = KillSwitch(Path("/k"), nasty, NOW, nasty)
    given = idle(jobs=(pending(reason=nasty),), kill_switch=switch, nodes=Unknown(nasty))
    for unicode in (True, False):
        text = drawn(given, 80, unicode)
        assert "\x1b" not in text
        assert "\r" not in text
        assert "[bold red]boo" in text
        assert ":smile:" in text
        assert max(map(len, text.splitlines())) <= 80
        assert unicode or text.isascii()


def test_the_code_that_runs_is_on_the_screen() -> None:
    code = CodeIdentity("/code", "ab" * 20, "work", ("x.py",), 1, "f" * 64, "code.diff")
    newest = replace(
        ended("1007"), code=code, versions={"torch": "2.13", "cuda": "12.8", "nccl": "none"}
    )
    text = drawn(snapshot(attempts=(newest, ended("1006"))), 80, False)
    assert (
        "code       work ababababab with 1 changed file (ffffffff); torch 2.13, cuda 12.8\n" in text
    )
    unknown = replace(
        newest, code=CodeIdentity(why="git is not installed on this machine"), versions={}
    )
    assert "code       not known: git is not installed on this machine\n" in drawn(
        snapshot(attempts=(unknown,)), 80, False
    )
    assert "code  " not in drawn(snapshot(attempts=(ended("1007"),)), 80, False)


def test_what_the_run_began_with_is_on_the_screen() -> None:
    origin = BranchOrigin("/big/checkpoints/main", 30, "big/main", False, False, NOW, "3")
    assert "began with big/main step 30 (weights and optimizer)\n" in drawn(
        snapshot(origin=origin), 80, False
    )
    assert "began with" not in drawn(snapshot(), 80, False)
    assert "origin: it is not there" in drawn(
        snapshot(origin=Unknown("it is not there")), 80, False
    )


# ----------------------------------------------------------------------------- JSON
KEYS = {
    "schema",
    "run",
    "verdict",
    "jobs",
    "nodes",
    "iteration",
    "total_iterations",
    "loss",
    "seconds_per_iteration",
    "tflops",
    "consumed_samples",
    "consumed_tokens",
    "eta",
    "last_checkpoint",
    "kill_switch",
    "pause",
    "exclusions",
    "unknown",
    "findings",
    "why",
    "exit_code",
}


def document(given: Snapshot) -> dict[str, object]:
    findings = detect_all(given)
    result = status_of(given, findings, judge(given, findings)).document()
    assert json.loads(json.dumps(result, allow_nan=False)) == result, "plain JSON values only"
    return result


@pytest.mark.parametrize("given_snapshot", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_document_is_plain_json_with_every_key(given_snapshot: Snapshot) -> None:
    result = document(given_snapshot)
    assert set(result) >= KEYS
    assert result["schema"] == 1


def test_the_document_of_a_healthy_run() -> None:
    result = document(snapshot())
    assert (result["verdict"], result["exit_code"], result["iteration"], result["unknown"]) == (
        "healthy",
        0,
        31219,
        [],
    )
    assert result["eta"] == "2022-08-11T16:41:00+00:00"
    assert result["last_checkpoint"] == {
        "step": 31200,
        "age_seconds": 2000.0,
        "verified": "sizes",
        "bytes": 2_463_000_000_000,
        "latest": 31200,
        "count": 3,
    }
    assert result["kill_switch"] == {
        "set": False,
        "path": "/scratch/tr11/kill-switch",
        "who": None,
        "time": None,
        "why": None,
    }
    assert [(job["id"], job["state"], job["tasks"]) for job in result["jobs"]] == [  # type: ignore[attr-defined]
        ("1000_7", "RUNNING", 1),
        ("1000_[8-10%1]", "PENDING", 3),
    ]


def test_unknown_is_null_with_a_reason_and_absent_is_not() -> None:
    blind = document(SCREENS["blind-60-ascii"][0])
    empty = document(SCREENS["nothing-launched-80"][0])
    for key in ("jobs", "nodes", "last_attempts", "kill_switch", "exclusions", "last_checkpoint"):
        assert blind[key] is None
    assert blind["unknown"] == [
        "jobs, nodes: no answer",
        "steps, heartbeats, attempts, checkpoints, kill switch, exclusions, submissions: /scratch/tr11 is not there",
    ]
    assert (empty["jobs"], empty["exclusions"], empty["unknown"]) == ([], [], [])


def test_a_loss_that_is_no_number_is_said_to_be_none() -> None:
    given = list(steps())
    given[-1] = replace(given[-1], record=replace(given[-1].record, lm_loss=math.nan))
    result = document(snapshot(steps=tuple(given)))
    assert (result["loss"], result["loss_is_finite"]) == (None, False)
    assert "nan" in drawn(snapshot(steps=tuple(given)), 80, True)


def test_the_described_keys_are_the_written_ones() -> None:
    """Each row of the two tables is a key (or two) of the document, and names all that is inside it;
    nothing else is there.
    """
    pages = sorted((Path(__file__).parents[3] / "docs" / "reference").glob("status-json*.md"))
    described = "".join(page.read_text(encoding="utf-8") for page in pages)
    rows = [line.split("|")[1:3] for line in described.splitlines() if line.startswith("| `")]
    written = full().document()
    found: list[str] = []
    for names, words in rows:
        keys = re.findall(r"`([a-z_]+)`", names)
        found += keys
        for key in keys:
            inside = keys_below(written[key])
            assert inside <= set(re.findall(r"`([a-z_]+)`", words)), (key, inside)
    assert sorted(found) == sorted(written)
    assert len(found) == len(set(found))


def test_the_document_of_everything() -> None:
    written = full().document()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert (written["may_sleep"], written["answer"]) == (False, "Do not sleep: a person is needed")
    assert written["node_use"] == {"used": 48, "spare": 0, "excluded": 1}
    assert written["throughput"] == {
        "current": 149.5,
        "best": 152.0,
        "percent": 100 * 149.5 / 152.0,
        "unit": "TFLOPs",
    }
    assert written["next_checkpoint"] == {
        "step": 31300,
        "seconds": 81 * 105.0 - 30,
        "due": "2022-05-01T14:21:15+00:00",
        "why": "interval",
        "iterations": None,
    }
    assert written["backup"] == {
        "time": "2022-05-01T11:00:00+00:00",
        "age_seconds": 3600.0,
        "step": 31000,
        "message": None,
    }
    assert written["finish"]["earliest"] == "2022-08-11T16:41:00+00:00"  # type: ignore[index]
    assert [entry["fingerprint"] for entry in written["alerts"]] == [alert().fingerprint]  # type: ignore[attr-defined]


def test_unknown_surroundings_are_null_with_a_reason() -> None:
    given = snapshot()
    blind = ExtraObservations(
        Unknown("no rights"), Unknown("gone"), Unknown("away"), Unknown("cut")
    )
    written = status_of(given, (), judge(given, ()), blind).document()
    assert (written["alerts"], written["throughput"]["best"]) == (None, None)
    assert (written["copying"], written["restore_drill"]) == (None, None)
    assert written["unknown"] == [
        "alerts: no rights", "best throughput: gone", "copying: away", "restore drill: cut",
    ]  # fmt: skip


def test_a_low_screen_shows_what_is_wrong_first() -> None:
    given = snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR))
    for height, first in ((24, True), (60, False)):
        text = drawn(given, 80, True, height)
        assert (text.index("CRITICAL") < text.index("progress")) is first


def test_the_healthy_screen_fits_24_lines_with_everything_on_it() -> None:
    given = with_facts(
        snapshot(
            backup=CopyStatus(NOW - HOUR, 31000),
            sync=CopyStatus(NOW - HOUR),
            periodic_jobs=(cron_job(),),
            usage=(look("SCRATCH", 80.0),),
        ),
        backup=BackupSection(store="/a", milestone_percent=0),
        hub=HubSection(repository="bigscience/logs"),
        filesystems=(FilesystemSection(name="SCRATCH", source="df"),),
    )
    extra = ExtraObservations((), (152.0, 20.0))
    text = drawn(given, 80, True, 24, extra)
    assert len(text.splitlines()) <= 23
    for label in ("copies", "disks", "periodic", "alerts", "next save", "nodes", "ETA"):
        assert f"\n{label} " in text, label
    assert "98 % of its best (152.0)" in text


# ----------------------------------------------------------------------------- small drawings
@given(st.floats(0, 1), st.integers(4, 100), st.booleans())
def test_bars_have_their_width_and_are_full_only_at_the_end(
    fraction: float, width: int, unicode: bool
) -> None:
    text = bar(fraction, width, unicode)
    assert len(text) == width
    empty = "░" if unicode else "-"
    assert (empty not in text) == (fraction == 1.0)


@given(st.lists(st.floats(), max_size=300), st.integers(0, 80), st.booleans())
def test_sparklines_survive_every_number(values: list[float], width: int, unicode: bool) -> None:
    text = sparkline(values, width, unicode)
    assert len(text) == min(width, len(values))
    assert unicode or text.isascii()


def test_sparklines_rise_and_fall() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8, unicode=True) == "▁▂▃▄▅▆▇█"
    assert sparkline([8, 1, math.nan], 3, unicode=False) == "#_x"
    assert sparkline([5.0, 5.0], 8, unicode=True) == "▁▁"


@given(st.text(), st.booleans())
def test_plain_text_is_printable(text: str, unicode: bool) -> None:
    result = plain(text, unicode)
    assert result.isprintable()
    assert unicode or result.isascii()


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({"LANG": "en_US.UTF-8", "TERM": "xterm"}, "utf-8", True),
        ({"LANG": "C.UTF-8"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8", "TERM": "dumb"}, "utf-8", False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C", "LANG": "fr_FR.UTF-8"}, "utf-8", False),
        ({"LC_CTYPE": "fr_FR.UTF-8", "LANG": "C"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "latin-1", False),
        ({}, "utf-8", False),
        ({"LANG": "en_US.UTF-8"}, None, False),
    ],
)
def test_the_locale_decides_about_unicode(
    environment: dict[str, str], encoding: str | None, expected: bool
) -> None:
    assert shows_unicode(environment, encoding) is expected


TWO = snapshot(
    jobs=(running(start_time=NOW - HOUR),),
    heartbeats=beats(age=HOUR),
    steps=steps(age=HOUR),
    nodes=(Node("n01", frozenset({"down", "not_responding"}), "no answer"),),
    attempts=(
        Attempt("1007", NOW - 12 * HOUR, None, "1000_7"),
        wordless(failure="rank 3 on n09: NCCL error"),
    ),
)


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("height", [16, 23, 30, 50, 200])
def test_a_low_screen_keeps_the_verdict_and_the_worst_fault(height: int, width: int) -> None:
    findings = detect_all(TWO)
    assert [finding.severity.name for finding in findings].count("CRITICAL") == 2 and len(
        findings
    ) > 2
    shown = drawn(TWO, width, True, height).splitlines()
    # the answer and the first fault alone take more there
    assert len(shown) <= height or width == 40
    assert shown[0].startswith(" STALLED") and "Do not sleep" in " ".join(shown[1:3])
    text = " ".join(" ".join(shown).split())
    assert findings[0].title in text and findings[0].fix in text
    assert f"tr11 runbook {page_of(findings[0].detector).removesuffix('.md')}" in text
    told = sum(" ".join(finding.title.split()) in text for finding in findings)
    counted = re.search(r"and (\d+) more: ([^|]+)", text)
    assert told + (int(counted[1]) if counted else 0) == len(findings)


def test_two_faults_and_the_progress_fit_the_usual_terminal() -> None:
    two = replace(
        TWO,
        attempts=(Attempt("1007", NOW - 12 * HOUR, None, "1000_7"), ended()),
        jobs=(running(), pending()),
    )
    assert len(detect_all(two)) == 2
    text = drawn(two, 80, True, 23)
    words = " ".join(text.split())
    for finding in detect_all(two):
        assert (
            finding.title in words
            and finding.fix in words
            and f"tr11 runbook {page_of(finding.detector).removesuffix('.md')}" in words
        )
    assert "\nprogress " in text and "\njobs " in text and " more rows: " in text


@pytest.mark.parametrize("height", range(15, 60))
def test_what_is_not_left_out_is_not_counted(height: int) -> None:
    text = drawn(TWO, 80, True, height)
    assert "0 more rows" not in re.sub(r"[1-9]0 more rows", "", text)


def test_what_is_queued_covers_nothing_of_a_training_that_is_finished() -> None:
    held = pending(reason="JobHeldAdmin", priority=0)
    done = ended("1007", 60.0, "finished", iteration=115311)
    text = drawn(idle(jobs=(held,), attempts=(done,)), 80, True)
    assert " FINISHED " in text and "JobHeldAdmin" in text
    assert "\nqueue " not in text and "no cover" not in text


def test_what_needs_action_is_not_cut() -> None:
    """A pause, a relaunch, a full disk and an alert come before what is well."""
    ends = (
        LaunchEnd("1007", 1, NOW - HOUR, "n17 is lost", "launch 2 starts without it", ("n17",)),
    )
    given = snapshot(
        launch_ends=ends,
        pause=KillSwitch(Path("/p"), "ben", NOW - 60, "new data"),
        periodic_jobs=(cron_job(failures_in_a_row=1, message="no such folder"),),
        usage=(look("SCRATCH", 99.0),),
    )
    text = drawn(given, 80, True, 23, ExtraObservations((alert(owner="eva"),)))
    assert len(text.splitlines()) <= 23
    for label in ("relaunch", "paused", "periodic", "disks", "alerts"):
        assert f"\n{label} " in text, label
    assert "\nnext save " not in text and " more rows: " in text


def test_green_is_only_what_lets_sleep() -> None:
    for word in VerdictWord:
        for may_sleep in (False, None):
            assert "green" not in badge_style(word, may_sleep), word
    assert "green" in badge_style(VerdictWord.HEALTHY, True)


def test_what_to_do_before_sleeping_stands_below_the_answer() -> None:
    text = drawn(snapshot(periodic_jobs=()), 80, True)
    assert "\nBefore you sleep: no watchdog looks at the run. Job 1000_7" in text
    assert "\n  first    tr11 cron install\n" in text
    seen = snapshot(periodic_jobs=())
    # neither crontab nor Slurm
    text = drawn(replace(seen, run=facts_with(seen.run, start_of_watchdog="cron run")), 80, True)
    assert "\n  first    tr11 cron run\n" in text


def test_a_start_says_which_iterations_are_done_again() -> None:
    starting = snapshot(heartbeats=beats(phase="loading"), checkpoints=checkpoints(31200))
    assert "\n           resumes from global_step31200: 19 iterations again\n" in drawn(
        starting, 80, True
    )
    assert "resumes from" not in drawn(snapshot(), 80, True)


def test_an_iteration_that_was_done_again_counts_once() -> None:
    seen = snapshot()
    twice = replace(seen, steps=(*known(seen.steps, ()), *known(seen.steps, ())[-9:]))
    [line] = [line for line in drawn(twice, 80, True).splitlines() if line.startswith("loss ")]
    assert line.endswith(f" last {len(known(seen.steps, ()))} steps")


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.17]:41123 "


@pytest.mark.parametrize("width", [40, 80, 132])
def test_an_error_text_of_a_rank_takes_no_more_than_its_row(width: int) -> None:
    """One of gloo, once a rank, filled the screen; --json has all of it."""
    why = f"rank 3 on n17 failed: {GLOO * 12}"
    seen = snapshot(launch_ends=(LaunchEnd("1007", 1, NOW - HOUR, why, "launch 2 starts"),))
    lines = drawn(seen, width, True).splitlines()
    (first,) = [index for index, line in enumerate(lines) if line.startswith("relaunch")]
    row = [lines[first], *takewhile(lambda line: line.startswith(" "), lines[first + 1 :])]
    text = " ".join(" ".join(row).split())
    assert len(text) <= 260 and "rank 3 on n17" in text and text.endswith("launch 2 starts")
    failed = replace(wordless("1007"), failure=why)
    told = drawn(idle(attempts=(failed,)), width, True)
    assert told.count("pair.cc") <= 6, "in why, the title, its evidence and the row of attempts"


def test_a_relaunch_inside_the_attempt_is_told() -> None:
    ends = (
        LaunchEnd("1007", 1, NOW - HOUR, "n17 is lost", "launch 2 starts without it", ("n17",)),
        LaunchEnd("1006", 1, NOW - DAY, "another attempt's"),
    )
    text = drawn(snapshot(launch_ends=ends), 80, True)
    (line,) = [line for line in text.splitlines() if line.startswith("relaunch")]
    assert line == "relaunch   1000_7  launch 2; launch 1 ended 1 h 00 min ago: n17 is lost; launch"
    assert "another attempt's" not in text
    assert "relaunch" not in drawn(snapshot(launch_ends=ends[1:]), 80, True)


def test_a_loss_course_is_drawn_from_its_means() -> None:
    written = document(snapshot())["loss_course"]
    assert isinstance(written, dict) and (written["steps"], len(written["means"])) == (60, 40)
    assert document(snapshot(steps=()))["loss_course"] is None
    worst = [replace(step, record=replace(step.record, lm_loss=math.inf)) for step in steps()]
    written = document(snapshot(steps=tuple(worst)))["loss_course"]
    assert isinstance(written, dict) and set(written["means"]) == {None}


def test_of_an_attempt_that_never_trained_nothing_is_said_that_others_did() -> None:
    """It left for the kill switch before its first launch: its marker says how far the run was."""
    left = ended("1007", HOUR, "kill-switch", restart=False, launch=0)
    text = drawn(idle(attempts=(left, ended("1006"))), 100, True)
    assert "1000_7  kill-switch before it trained, 1 h 00 min ago" in text
    assert "30800" not in text


def test_an_attempt_is_judged_in_the_document() -> None:
    attempts = (
        Attempt("1007", NOW, None, "1000_7"),
        wordless(failure="rank 3: NCCL error"),
        ended("1005"),
    )
    told = document(snapshot(attempts=attempts))["last_attempts"]
    assert isinstance(told, list)
    assert [(entry["how"], entry["is_bad"]) for entry in told] == [
        (None, False), ("ended without an end marker: rank 3: NCCL error", True), ("exit-duration", False),
    ]  # fmt: skip


def test_name_and_time_stay_apart_on_a_narrow_terminal() -> None:
    lines = drawn(snapshot(), 40, True).splitlines()
    assert lines[:2] == [" HEALTHY  tr11-176B-ml / main", " 2022-05-01 12:00 UTC"]


def test_a_job_says_whose_it_is() -> None:
    seen = snapshot(jobs=(running(user="bo"), pending(user="")))
    found = detect_all(seen)
    status = status_of(seen, found, judge(seen, found))
    assert [job["user"] for job in status.document()["jobs"]] == ["bo", ""]
    shown = [words for _, words, _ in jobs(status)]
    assert shown[0].startswith("1000_7 of bo  RUNNING") and shown[1].startswith(
        "1000_[8-10%1]  PENDING"
    )
