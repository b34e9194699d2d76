"""The ledger of excluded nodes: nothing is lost when two change it at once, when there are no
locks, or on a kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.excluding import exclude
from tr11ops.base.errors import ExclusionError
from tr11ops.base.observed import Unknown
from tr11ops.observe.files import read_exclusions
from tr11ops.rundir import exclusions
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit, NodeStanding
from tr11ops.rundir.exclusions import due_for_recheck, history, include, read_version, record_check
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.paths import RunPaths

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "tr11", "main"), tmp_path / "run" / "kill-switch"
    )


def names(directory: RunDirectory) -> list[str]:
    found = read_exclusions(directory.exclusions)
    assert not isinstance(found, Unknown), found
    return [entry.node for entry in found]


def test_what_is_written_is_read(directory: RunDirectory) -> None:
    before = time.time()
    assert exclude(
        directory, "x02", why="Xid 79", owner="tr11", evidence=("a  line",), days=14, job_id="105"
    )
    [entry] = read_exclusions(directory.exclusions)
    assert (entry.node, entry.why, entry.owner, entry.evidence, entry.job_id) == (
        "x02",
        "Xid 79",
        "tr11",
        ("a line",),
        "105",
    )
    assert before <= entry.since <= time.time() and entry.until == entry.since + 14 * 86400
    published = json.loads(directory.exclusions.read_text())
    assert [one["node"] for one in published["exclusions"]] == ["x02"]
    assert directory.exclusions.stat().st_mode & 0o060 == 0o060
    assert include(directory, "x02", why="mended", owner="anna")
    assert not include(directory, "x02", why="mended", owner="anna")
    assert names(directory) == []
    kinds = [
        (entry.kind, entry.who, entry.data["node"])
        for entry in read_journal(directory.journal).entries
    ]
    assert kinds == [("node-excluded", "tr11", "x02"), ("node-included", "anna", "x02")]


def test_a_node_that_is_on_it_stays_and_the_evidence_grows(directory: RunDirectory) -> None:
    exclude(directory, "x02", why="Xid 79", owner="anna", evidence=("first",), days=14)
    exclude(
        directory, "x02", why="died again", owner="tr11", evidence=("second",), days=1, job_id="9"
    )
    [entry] = read_exclusions(directory.exclusions)
    assert (entry.owner, entry.why, entry.job_id) == ("anna", "Xid 79", "9")
    assert entry.evidence == ("first", "died again", "second")
    assert entry.until > time.time() + 13 * 86400  # the later expiry holds
    exclude(directory, "x02", why="for good", owner="tr11", days=None)
    assert read_exclusions(directory.exclusions)[0].until is None


def test_what_one_attempt_says_twice_of_a_node_is_one_exclusion(directory: RunDirectory) -> None:
    """At the end of a launch and by who follows its job, at once or one after the other."""

    def said(words: str, job_id: str = "105", owner: str = "tr11", **more: Any) -> bool:
        given = {"evidence": (words,), "days": 14, "job_id": job_id, "owner": owner, **more}
        return exclude(directory, "x02", why=words, **given)

    def journaled() -> list[str]:
        entries = read_journal(directory.journal).entries
        return [entry.why for entry in entries if entry.kind == exclusions.EXCLUDED]

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(said, ["srun: node failure", "it is down"]))
    [first] = journaled()
    [entry] = read_exclusions(directory.exclusions)
    assert {"srun: node failure", "it is down"} <= set(entry.evidence)
    assert said("it failed again", job_id="106") and said("I know it", owner="anna")
    assert journaled() == [first, "it failed again", "I know it"]


def test_a_suspicion_that_becomes_more_is_told_again(directory: RunDirectory) -> None:
    for state in (NodeStanding.AVOID, NodeStanding.EXCLUDE, NodeStanding.AVOID):
        exclude(directory, "x02", why=state, owner="tr11", days=14, job_id="105", state=state)
    entries = read_journal(directory.journal).entries
    assert [entry.why for entry in entries] == [NodeStanding.AVOID, NodeStanding.EXCLUDE]


def test_the_cap_refuses_new_nodes_only(directory: RunDirectory) -> None:
    assert exclude(directory, "x01", why="", owner="tr11", days=1, limit=ExclusionLimit(2))
    assert exclude(directory, "x02", why="", owner="tr11", days=1, limit=ExclusionLimit(2))
    assert not exclude(directory, "x03", why="", owner="tr11", days=1, limit=ExclusionLimit(2))
    assert exclude(directory, "x01", why="again", owner="tr11", days=1, limit=ExclusionLimit(2))
    assert not exclude(directory, "x04", why="", owner="tr11", days=1, limit=ExclusionLimit(0))
    assert names(directory) == ["x01", "x02"]


@pytest.mark.parametrize(
    "name", ["", "-x", "x 1", "x;reboot", "x[1-2]", "a,b", "../x", "x\n", "$(id)", "é", "x" * 300]
)
def test_hostile_names_are_refused(directory: RunDirectory, name: str) -> None:
    with pytest.raises(ExclusionError):
        exclude(directory, name, why="", owner="tr11", days=1)
    assert not directory.root.exists()


@pytest.mark.parametrize("days", [0, -1, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(directory: RunDirectory, days: float) -> None:
    with pytest.raises(ExclusionError):
        exclude(directory, "x01", why="", owner="tr11", days=days)


def test_evidence_stays_small_and_on_one_line(directory: RunDirectory) -> None:
    exclude(
        directory,
        "x01",
        why="",
        owner="tr11",
        days=1,
        evidence=tuple(f"{n}\n{'y' * 4000}" for n in range(100)),
    )
    [entry] = read_exclusions(directory.exclusions)
    assert len(entry.evidence) == exclusions.MOST_EVIDENCE
    assert all(len(line) <= 500 and "\n" not in line for line in entry.evidence)


def test_a_list_made_by_hand_is_read_and_continued(directory: RunDirectory) -> None:
    directory.exclusions.parent.mkdir(parents=True)
    directory.exclusions.write_text('{"exclusions": [{"node": "x09", "why": "hand"}]}')
    assert names(directory) == ["x09"]
    exclude(directory, "x01", why="", owner="tr11", days=1)
    assert names(directory) == ["x01", "x09"]


def test_a_damaged_newest_version_falls_back_to_the_copy(directory: RunDirectory) -> None:
    for name in ("x01", "x02"):
        exclude(directory, name, why="", owner="tr11", days=1)
    newest = sorted(directory.exclusions.with_suffix(".d").iterdir())[-1]
    newest.write_bytes(b"")  # a power cut
    assert names(directory) == ["x01", "x02"]
    assert exclude(directory, "x03", why="", owner="tr11", days=1)
    assert names(directory) == ["x01", "x02", "x03"]


def test_nothing_readable_is_unknown_and_never_empty(directory: RunDirectory) -> None:
    directory.exclusions.parent.mkdir(parents=True)
    for content in ("{", "[]", '{"exclusions": 3}', '{"exclusions": [{}]}'):
        directory.exclusions.write_text(content)
        assert isinstance(read_exclusions(directory.exclusions), Unknown)
        with pytest.raises(ValueError):
            exclude(directory, "x01", why="", owner="tr11", days=1)


def test_old_versions_are_tidied_away(directory: RunDirectory) -> None:
    for number in range(exclusions.VERSIONS_KEPT + 20):
        exclude(directory, f"x{number:03d}", why="", owner="tr11", days=1)
    assert len(list(directory.exclusions.with_suffix(".d").iterdir())) == exclusions.VERSIONS_KEPT
    assert len(names(directory)) == exclusions.VERSIONS_KEPT + 20


def test_a_writer_that_slept_long_does_not_bring_the_past_back(directory: RunDirectory) -> None:
    """It put its version where a tidied one had been: the number is free, but the ledger is far
    ahead.
    """
    for number in range(exclusions.VERSIONS_KEPT + 5):
        exclude(directory, f"x{number:03d}", why="", owner="tr11", days=1)
    assert not VersionedFile(directory.exclusions, exclusions.VERSIONS_KEPT).put(
        3, '{"exclusions": []}'
    )
    assert len(names(directory)) == exclusions.VERSIONS_KEPT + 5


def test_a_full_disk_leaves_the_old_ledger(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    exclude(directory, "x01", why="", owner="tr11", days=1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        exclude(directory, "x02", why="", owner="tr11", days=1)
    assert names(directory) == ["x01"]


def test_a_journal_that_cannot_be_written_stops_nothing(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.root.mkdir()
    directory.journal.write_text("a file where a folder belongs")
    assert exclude(directory, "x01", why="Xid 79", owner="tr11", days=1)
    assert names(directory) == ["x01"] and "journal could not be written" in capsys.readouterr().err
    directory.journal.unlink()
    [event] = history(
        read_journal(directory.journal), read_version(directory.exclusions).exclusions
    )
    # the ledger itself remembers
    assert (event["node"], event["why"], event["who"]) == ("x01", "Xid 79", "tr11")


# ------------------------------------------------------------------ at once
CHANGER = textwrap.dedent("""
    import fcntl, sys
    from pathlib import Path
    def none(*_): raise OSError(37, "No locks available")
    fcntl.flock = fcntl.lockf = none
    from tests.excluding import exclude
    from tr11ops.rundir.exclusions import include
    from tr11ops.rundir.paths import RunDirectory
    from trainer.contract.paths import RunPaths
    root, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    directory = RunDirectory(RunPaths(root, "tr11", "main"), root / "kill-switch")
    print("up", flush=True)
    sys.stdin.readline()
    for number in range(count):
        assert exclude(directory, f"{who}-{number}", why="w", owner=who, days=1)
        if number % 2:
            assert include(directory, f"{who}-{number}", why="w", owner=who)
        print(number, flush=True)
""")


def changer(directory: RunDirectory, who: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHANGER, str(directory.root), who, str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdout.readline() == "up\n"
    child.stdin.write("\n")
    child.stdin.flush()


def test_two_writers_at_once_lose_nothing_without_any_lock(directory: RunDirectory) -> None:
    children = [changer(directory, who, 12) for who in ("a", "b", "c")]
    for child in children:
        go(child)
    for child in children:
        child.communicate(timeout=300)
        assert child.returncode == 0
    expected = sorted(f"{who}-{number}" for who in "abc" for number in range(0, 12, 2))
    assert names(directory) == expected
    assert [
        one["node"] for one in json.loads(directory.exclusions.read_text())["exclusions"]
    ] == expected
    ledger = read_journal(directory.journal)
    assert ledger.is_sound and len(ledger.entries) == 3 * (12 + 6)


def test_a_kill_at_any_moment_leaves_a_whole_ledger(directory: RunDirectory) -> None:
    """Killed again and again beside another writer: what was confirmed is there, and the ledger can
    be changed.
    """
    steady = changer(directory, "s", 30)
    go(steady)
    confirmed: list[str] = []
    for round_number in range(4):
        victim = changer(directory, f"v{round_number}", 1000)
        go(victim)
        for _ in range(round_number * 2 + 1):
            victim.stdout.readline()
        time.sleep(0.003 * round_number)
        os.kill(victim.pid, signal.SIGKILL)
        out, _ = victim.communicate(timeout=300)
        assert victim.returncode == -signal.SIGKILL
        done = max([round_number * 2, *(int(line) for line in out.split())])
        confirmed += [f"v{round_number}-{number}" for number in range(0, done + 1, 2)]
    steady.communicate(timeout=300)
    assert steady.returncode == 0
    found = names(directory)
    assert set(confirmed) <= set(found)
    assert {f"s-{number}" for number in range(0, 30, 2)} <= set(found)
    assert exclude(directory, "after", why="", owner="tr11", days=1)
    assert "after" in [
        one["node"] for one in json.loads(directory.exclusions.read_text())["exclusions"]
    ]


def test_a_change_is_read_before_its_copy_is_published(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    exclude(directory, "x01", why="", owner="tr11", days=1)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VersionedFile, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        exclude(directory, "x02", why="", owner="tr11", days=1)
    assert names(directory) == ["x01", "x02"]


# ------------------------------------------------------------------ pure
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("abcde"), st.one_of(st.none(), st.integers(0, 4))),
        max_size=12,
    )
)
def test_any_course_of_changes_is_that_of_a_dictionary(
    course: list[tuple[bool, str, int | None]],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = RunDirectory(RunPaths(Path(place), "tr11", "main"), Path(place) / "kill-switch")
        model: set[str] = set()
        for is_exclude, node, most in course:
            if is_exclude:
                allowed = node in model or most is None or len(model) < most
                assert (
                    exclude(
                        directory,
                        node,
                        why="w",
                        owner="tr11",
                        days=1,
                        limit=None if most is None else ExclusionLimit(most),
                    )
                    == allowed
                )
                model |= {node} if allowed else set()
            else:
                assert include(directory, node, why="w", owner="me") == (node in model)
                model -= {node}
            assert names(directory) == sorted(model)
        assert read_journal(directory.journal).is_sound


def test_due_are_those_whose_time_is_over() -> None:
    entries = [
        Exclusion("a", until=50.0),
        Exclusion("b", until=None),
        Exclusion("c", until=10.0),
        Exclusion("d", until=51.0),
    ]
    assert [entry.node for entry in due_for_recheck(entries, 50.0)] == ["c", "a"]


def test_history_of_one_node(directory: RunDirectory) -> None:
    exclude(directory, "x01", why="one", owner="tr11", days=1)
    record_check(
        directory, "x01", result="bad", why="memory", owner="anna", checks=[{"name": "memory"}]
    )
    exclude(directory, "x02", why="two", owner="tr11", days=1)
    ledger, entries = read_journal(directory.journal), read_version(directory.exclusions).exclusions
    assert [(one["kind"], one.get("result")) for one in history(ledger, entries, "x01")] == [
        ("node-excluded", None), ("node-checked", "bad"),
    ]  # fmt: skip
    assert len(history(ledger, entries)) == 3


def test_a_copy_that_cannot_be_written_undoes_no_change(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions are what counts; the copy is for people."""

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("tr11ops.rundir.versioned.write_atomically", full)
    assert exclude(directory, "x01", why="", owner="tr11", days=1)
    assert names(directory) == ["x01"] and not directory.exclusions.exists()


@pytest.mark.parametrize(
    "entries", [[{"node": "n2"}], {"in": "another way"}], ids=["read", "not understood"]
)
def test_a_list_of_a_newer_tr11_is_read_and_never_replaced(
    directory: RunDirectory, entries: object
) -> None:
    """It may hold what this one would leave out."""
    exclude(directory, "n1", why="Xid 79", owner="ana", days=None)
    newer = {"schema": 2, "version": 7, "exclusions": entries, "more": "of tomorrow"}
    place = directory.exclusions.with_suffix(".d") / "00000007.json"
    place.write_text(json.dumps(newer))
    before = {path.name for path in place.parent.iterdir()}
    copy = directory.exclusions.read_bytes()
    for change in (
        lambda: exclude(directory, "n3", why="Xid 48", owner="ana", days=None),
        lambda: include(directory, "n1", owner="ana", why="repaired"),
    ):
        with pytest.raises(
            ExclusionError,
            match=r"00000007.json was written by a newer tr11 \(schema 2, .* only read",
        ):
            change()
    assert {
        path.name for path in place.parent.iterdir()
    } == before and directory.exclusions.read_bytes() == copy
    assert json.loads(place.read_text()) == newer
    assert [entry.node for entry in read_version(directory.exclusions).exclusions] == (
        ["n2"] if isinstance(entries, list) else ["n1"]
    )
