"""All detectors together: the registry, what tells two incidents of one apart, and their pages in runbooks/."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect import detector_table, operation_table
from tests.tr11ops.detect.detector_table import TABLE
from tests.tr11ops.detect.operation_table import clock, operated
from tests.tr11ops.detect.pages import FOLDER, PAGES
from tests.tr11ops.status_cases import changed, running, snapshot
from tr11ops.base.observed import Unknown, known
from tr11ops.cli import main
from tr11ops.cluster.base import Node
from tr11ops.detect import registry
from tr11ops.detect.detector import (
    REGISTERED,
    Detector,
    Finding,
    Severity,
    detector as as_detector,
    fingerprint,
)
from tr11ops.detect.nodes import node_lost
from tr11ops.detect.registry import DETECTORS, WORDS, detect_all, page_of
from tr11ops.detect.watch import clock_skew
from tr11ops.observe.observations import OperationObservations, TrainingObservations
from tr11ops.observe.snapshot import Snapshot

ROOT = Path(__file__).parents[3]
AWAY = Unknown("the disk is unreachable")
NAMES = [detector.name for detector in DETECTORS]
BASES = [row[1] for row in TABLE]


@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_a_detector_says_its_name_its_needs_and_its_purpose(detector: Detector) -> None:
    assert inspect.isfunction(detector.judge)
    assert detector.judge.__name__.replace("_", "-") == detector.name
    purpose, _, how = (detector.judge.__doc__ or "").partition("\n\n")
    assert purpose.strip() and how.strip()
    assert detector.needs or detector.uses
    assert not set(detector.needs) & set(detector.uses)
    assert not detector.is_blind(snapshot())


def test_names_are_different_and_no_file_is_left_out() -> None:
    folder = Path(registry.__file__).parent
    with_detectors = {
        path.stem for path in folder.glob("*.py") if "\n@detector(" in path.read_text()
    }
    assert {family.__name__.rpartition(".")[2] for family in registry.FAMILIES} == with_detectors
    assert set(NAMES) == set(REGISTERED) and len(set(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match="two detectors are named down"):
        as_detector("down", bound="at once", severities="INFO")(DETECTORS[0].judge)


def test_what_it_needs_keeps_a_detector_from_running_and_what_it_uses_does_not() -> None:
    ran = []

    def judge(_: Snapshot) -> Iterator[Finding]:
        ran.append(True)
        yield Finding("of-a-test", Severity.INFO, "it ran")

    made = Detector(
        name="of-a-test",
        judge=judge,
        needs=("training.events", "checkpoints.latest"),
        uses=("steps",),
        bound="at once",
        severities="INFO",
        page="of-a-test.md",
    )
    assert made.detect(snapshot()) and not made.is_blind(snapshot())
    without_steps = changed(snapshot(), steps=AWAY)
    assert made.detect(without_steps) and made.is_blind(without_steps)
    latest = replace(snapshot().checkpoints, latest=AWAY)
    ran.clear()
    for hidden in ({"events": AWAY}, {"checkpoints": AWAY}, {"checkpoints": latest}):
        blind = changed(snapshot(), **hidden)
        assert made.detect(blind) == () and made.is_blind(blind)
    assert not ran
    unknown_part = replace(made, needs=("weather",))
    with pytest.raises(AttributeError):
        unknown_part.detect(snapshot())


@pytest.mark.parametrize("name", NAMES)
def test_every_detector_has_a_page(name: str) -> None:
    assert (ROOT / "runbooks" / page_of(name)).is_file()


def test_everything_blinds_no_detector_and_nothing_blinds_all() -> None:
    assert registry.unjudged_detectors(snapshot()) == frozenset()
    assert registry.unjudged_detectors(hide(snapshot(), *fields_needed())) == frozenset(NAMES)


@pytest.mark.parametrize(
    ("hidden", "some", "others"),
    [
        ({"jobs": AWAY}, {"down", "hung", "held"}, {"loss-not-finite"}),
        ({"heartbeats": AWAY}, {"hung", "stalled"}, {"held", "chain-end"}),
        (
            {"checkpoints": replace(snapshot().checkpoints, latest=AWAY)},
            {"checkpoint-unsound"},
            {"checkpoint-overdue"},
        ),
        (
            {"attempts": (replace(snapshot().attempts[0], end=AWAY),)},
            {"down"},
            {"lingering"},
        ),
    ],
)
def test_who_is_blind(hidden: dict[str, Any], some: set[str], others: set[str]) -> None:
    found = registry.unjudged_detectors(changed(snapshot(), **hidden))
    assert some <= found
    assert not others & found


def fields_needed() -> set[str]:
    parts = {
        *Snapshot.__struct_fields__,
        *TrainingObservations.__struct_fields__,
        *OperationObservations.__struct_fields__,
    }
    needs = {
        need.removeprefix("training.").removeprefix("operation.")
        for one in DETECTORS
        for need in (*one.needs, *one.uses)
    }
    return {need.split(".")[0] for need in needs if need.split(".")[0] in parts} | {"attempts"}


def hide(given_snapshot: Snapshot, *names: str) -> Snapshot:
    changes: dict[str, Any] = dict.fromkeys(names, AWAY)
    return changed(given_snapshot, **changes)


@given(
    base=st.sampled_from(BASES),
    hidden=st.sets(st.sampled_from(sorted(fields_needed()))),
    later=st.floats(0, 1e6),
)
def test_what_cannot_be_seen_makes_no_detector_speak(
    base: Snapshot, hidden: set[str], later: float
) -> None:
    """Hiding anything can only silence a detector: a fault is never concluded from not seeing."""
    seen = replace(base, time=base.time + later)
    spoken = {finding.detector for finding in registry.detect_all(seen)}
    assert {finding.detector for finding in registry.detect_all(hide(seen, *hidden))} <= spoken


@pytest.mark.parametrize("phase", ["training", "starting", "ended"])
def test_workers_between_two_launches_are_no_hang_where_the_ends_of_launches_are_hidden(
    phase: str,
) -> None:
    """The end of the last launch is a sign of life: without it the silence of its workers tells
    nothing.
    """
    [base] = [row[1] for row in TABLE if row[0] == "a check fails everywhere"]
    beats = tuple(replace(beat, phase=phase) for beat in known(base.heartbeats, ()))
    [end, *_] = known(base.training.launch_ends, ())
    late = replace(base, heartbeats=beats, time=end.time + 60)
    for later in (0.0, 30.0, 100.0, 300.0, 600.0, 1200.0, 6000.0):
        seen = replace(late, time=late.time + later)
        spoken = {finding.detector for finding in registry.detect_all(seen)}
        assert {
            finding.detector for finding in registry.detect_all(hide(seen, "launch_ends"))
        } <= spoken
    assert {"hung", "stalled", "lingering", "unfinished-end"} <= registry.unjudged_detectors(
        hide(base, "launch_ends")
    )


# ----------------------------------------------------------------------------- the documentation
@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_the_documentation_names_the_severities_and_a_bound(detector: Detector) -> None:
    assert detector.bound
    text = inspect.getsource(sys.modules[detector.judge.__module__])
    own = text.partition(f'@detector(\n    "{detector.name}",')[2].partition("@detector(")[0]
    used = {severity.name for severity in Severity if f"Severity.{severity.name}" in own}
    assert used == {severity.name for severity in Severity if severity.name in detector.severities}


# ---------------------------------------------------------------------------
# What makes two findings of a detector two incidents: a table of all detectors, and names that
# look like numbers.


# a run has at most one such incident at a time; the ids of jobs, which a restart changes, are not
# in it
ONE = ""
IDENTITY = {  # what of a finding is its identity
    "down": ONE,
    "two-attempts": ONE,
    "hung": ONE,
    "stalled": ONE,
    "suspended": ONE,
    "lingering": ONE,
    "zombie": "node",
    "node-lost": "node",
    "no-spare": ONE,
    "dead-chain": ONE,
    "start-failed": "its error",
    "held": ONE,
    "limit-reached": ONE,
    "reservation-ended": ONE,
    "waits-for-site": ONE,
    "nodes-short": ONE,
    "queued-too-long": ONE,
    "chain-end": ONE,
    "kill-switch-left-on": "nothing for queued jobs, `still runs` for a job that does not heed it",
    "directory-unseen": ONE,
    "limit-changed": ONE,
    "switch-unseen": ONE,
    "unfinished-end": "its fault, with the class of a proven one",
    "loss-not-finite": ONE,
    "loss-spike": ONE,
    "gradient-norm": ONE,
    "validation-loss-rises": "set of texts",
    "counters-jump": "iteration",
    "silent-corruption": "node",
    "slow": ONE,
    "slow-node": "node",
    "check-failing": "the checks",
    "log-not-growing": ONE,
    "checkpoint-unsound": "step",
    "checkpoint-overdue": ONE,
    "backup-overdue": "archive",
    "copy-damaged": ONE,
    "sync-overdue": ONE,
    "secret-in-log": "file, and kind of secret",
    "filesystem-full": "file system, or folder",
    "filesystem-filling": "file system",
    "purge-near": "kind of files",
    "exclusion-cap": "nothing for the cap, the node for a bad one that it leaves in use",
    "exclusion-due": ONE,
    "periodic-job-failed": "periodic job",
    "cron-dead": "chain, or the way that jobs are run",
    "damaged-state": ONE,
    "clock-skew": "host, or this machine",
    "namesake": ONE,
}
CASES: list[Snapshot] = [row[1] for row in (*detector_table.TABLE, *operation_table.TABLE)]


def identities(given: Snapshot) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in detect_all(given):
        found.setdefault(finding.detector, set()).add(finding.fingerprint)
    return found


def test_every_detector_says_what_its_identity_is() -> None:
    assert set(IDENTITY) == {detector.name for detector in DETECTORS}
    named: dict[str, set[bool]] = {}
    for finding in (finding for case in CASES for finding in detect_all(case)):
        named.setdefault(finding.detector, set()).add(bool(finding.identity))
        assert "" not in finding.identity
    for both in ("kill-switch-left-on", "exclusion-cap"):
        assert named.pop(both) == {False, True}
    assert named == {name: {IDENTITY[name] != ONE} for name in named}


def renumbered(given: Snapshot) -> Snapshot:
    """The same faults in the jobs of the next submission."""
    jobs = tuple(
        replace(
            job,
            job_id=job.job_id.replace("100", "200"),
            raw_id=job.raw_id.replace("100", "200"),
            array_id=job.array_id.replace("100", "200") if job.array_id else job.array_id,
        )
        for job in known(given.jobs, ())
    )
    beats, steps = known(given.heartbeats, ()), known(given.steps, ())
    attempts = known(given.attempts, ())
    return replace(
        given,
        jobs=jobs,
        heartbeats=tuple(replace(beat, job_id=beat.job_id.replace("100", "200")) for beat in beats),
        steps=tuple(replace(step, job_id=step.job_id.replace("100", "200")) for step in steps),
        attempts=tuple(
            replace(
                one, job_id=one.job_id.replace("100", "200"), label=one.label.replace("100", "200")
            )
            for one in attempts
        ),
    )


def test_a_restart_changes_no_identity() -> None:
    seen = 0
    for case in CASES:
        before, after = identities(case), identities(renumbered(case))
        seen += len(before)
        assert all(after[name] == before[name] for name in before.keys() & after.keys())
    assert seen > 100


@pytest.mark.parametrize(
    "names", [("1", "2"), ("n12", "n13"), ("rank3", "rank4"), ("rank-3", "rank-4"), ("7_1", "7")]
)
def test_each_lost_node_is_an_incident_of_its_own(names: tuple[str, str]) -> None:
    host = "n01"
    nodes = tuple(Node(name, frozenset({"down"})) for name in names)
    given = snapshot(jobs=(running(nodes=(host, *names)),), nodes=nodes)
    lost = [finding for finding in detect_all(given) if finding.detector == node_lost.name]
    assert len({finding.fingerprint for finding in lost}) == len(lost) == 2
    both = replace(given, nodes=(*nodes, Node(host, frozenset({"down"}))))
    found = [finding for finding in detect_all(both) if finding.detector == node_lost.name]
    assert [finding.severity for finding in found] == [
        Severity.CRITICAL,
        Severity.WARNING,
        Severity.WARNING,
    ]
    assert [finding.title for finding in found] == [
        f"job 1000_7 has lost {host}, which ran its batch script",
        *(f"job 1000_7 has lost {name}" for name in names),
    ]


def test_each_wrong_clock_is_an_incident_of_its_own() -> None:
    found = list(
        clock_skew.detect(operated(clocks=(clock("1", 60), clock("2", 90), clock("here", -80))))
    )
    assert [finding.identity for finding in found] == [("2",), ("here",), ("1",)]


def test_an_unreadable_name_does_not_join_all_incidents() -> None:
    unnamed = Finding("slow-node", Severity.WARNING, "a node is slow", identity=("",))
    assert fingerprint("slow-node", unnamed.identity) != fingerprint("slow-node", ())


# ---------------------------------------------------------------------------
# The pages of runbooks/: each detector has one, each has a cure to paste, and each command in
# them exists.


README = (FOLDER / "README.md").read_text()
PARTS = ("**What it means.**", "**How to see it", "**What to type", "**How to know it is over.**")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(tr11 [^`\n]+)`")
PLACEHOLDERS = frozenset(
    re.findall(r"`([A-Z]+)`", README.partition("| word |")[2].partition("\n\n")[0])
)
VALUES = {"RANK": "3", "STEP": "800", "JOB": "1234", "JOB1": "1", "JOB2": "2", "N": "7"}


def cure(page: Path) -> str:
    """The first block of commands after "What to type"."""
    found = BLOCK.search(page.read_text().partition("**What to type")[2])
    return found[1] if found else ""


def commands(page: Path) -> Iterator[str]:
    text = page.read_text()
    for block in BLOCK.findall(text):
        parts = (part.strip() for line in block.splitlines() for part in line.split("&&"))
        yield from (part for part in parts if part.startswith("tr11 "))
    yield from INLINE.findall(text)


load = functools.cache(main.load)  # the same few commands, hundreds of times


def parse(line: str) -> None:
    """Parse as the program would, without doing anything. Raises as the parser does where it would
    refuse.
    """
    words = [
        re.sub(r"\b[A-Z][A-Z0-9]*\b", lambda match: VALUES.get(match[0], match[0]), word)
        for word in split(line)
    ]
    name, rest = words[1], words[2:]
    command = load(name)
    parent = None
    while hasattr(command, "commands") and rest:
        parent = command.make_context(name, [], parent=parent, resilient_parsing=True)
        name = rest[0]
        assert name in command.commands, f"{line}: no command {name}"
        command, rest = command.commands[name], rest[1:]
    if not hasattr(command, "commands") and "--help" not in rest:
        command.make_context(name, list(rest), parent=parent)


def split(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_four_parts_and_its_commands_exist(page: Path) -> None:
    text = page.read_text()
    places = [text.find(part) for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)
    assert len(text.splitlines()) <= 75
    for line in commands(page):
        assert split(line)[1] in main.COMMANDS, line
        parse(line)


@pytest.mark.parametrize("name", [detector.name for detector in DETECTORS])
def test_a_detector_has_a_page_with_a_cure_and_a_table_row(name: str) -> None:
    page = FOLDER / page_of(name)
    assert "**What to type.**" in page.read_text()
    assert cure(page).strip()
    rows = [line for line in README.splitlines() if f"({page.name})" in line]
    assert rows
    assert any(f"`{name}`" in row for row in rows)


@pytest.mark.parametrize("name", [detector.name for detector in DETECTORS])
def test_a_cure_asks_no_questions_and_explains_its_capitals(name: str) -> None:
    text = cure(FOLDER / page_of(name))
    for line in text.splitlines():
        words = split(line)
        if words[0] == "tr11" and words[1] in {"kill", "resume", "pause", "checkpoint-now"}:
            assert "--yes" in words, line
        if words[:2] == ["tr11", "nodes"] and words[2] in {"exclude", "include"}:
            assert "--yes" in words, line
    capitals = set(re.findall(r"\b[A-Z]{2,}\b", text)) | set(
        re.findall(r"global_step([A-Z]+)", text)
    )
    assert capitals <= PLACEHOLDERS


def test_every_page_is_in_the_table() -> None:
    assert {page.name for page in PAGES} == set(re.findall(r"\]\(([a-z-]+\.md)\)", README))


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere_and_lines_fit(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (FOLDER / target).exists(), target
    assert max(len(line) for line in text.splitlines()) <= 160
    assert text.isascii()


def findings() -> list[Finding]:
    tables = (detector_table.TABLE, operation_table.TABLE)
    return [finding for table in tables for row in table for finding in registry.detect_all(row[1])]


def test_every_command_that_a_finding_shows_exists() -> None:
    shown = {finding.fix for finding in findings() if finding.fix}
    assert len(shown) > 10
    for fix in shown:
        words = split(fix)
        if words[0] == "tr11":
            parse(fix)
        else:
            assert words[0] in {"df", "du", "find", "findmnt", "scancel", "scontrol", "touch"}, fix


def test_every_word_that_people_use_finds_a_page_and_hides_none() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")}
    for word, page in WORDS.items():
        assert page.removesuffix(".md") in pages, word
        assert word not in pages and word == word.lower(), word
