"""`tr11 fs-watchdog`: exit codes, what is kept and what is mailed, on disks that are full, closed
or not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tr11ops.cli.common import read_card
from tr11ops.cli.storage import seconds_of
from tr11ops.rundir.disk_usage import read_usage
from tr11ops.rundir.paths import RunDirectory


@pytest.fixture
def directory(bench: LocalBench) -> Iterator[RunDirectory]:
    """A run directory whose rights are well; the tree that is watched holds about 10 kB in 3
    inodes.
    """
    umask = os.umask(0o007)
    found = run_directory(bench)
    found.paths.state.mkdir(parents=True)
    for folder in (found.root, found.paths.state):
        folder.chmod(0o2770)
    tree = bench.folder / "tree"
    tree.mkdir()
    for name in ("a", "b"):
        (tree / name).write_bytes(b"x" * 3000)
    yield found
    os.umask(umask)


def watch(bench: LocalBench, *tables: str) -> None:
    """Add [[filesystems]] tables to the card; TREE stands for the watched tree."""
    text = bench.card.read_text()
    for table in tables:
        text += "\n[[filesystems]]\n" + table.replace("TREE", str(bench.folder / "tree")) + "\n"
    bench.card.write_text(text)


def look(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11("fs-watchdog", "--run", str(bench.card), *words)


ROOMY = 'name = "ROOMY"\nsource = "du"\npath = "TREE"\nbytes_limit = "1 GB"\ninodes_limit = 1000'
CROWDED = 'name = "CROWDED"\nsource = "du"\npath = "TREE"\nbytes_limit = "7000 B"'
AWAY = 'name = "AWAY"\nsource = "df"\npath = "TREE/not-there"'


def test_all_is_well(bench: LocalBench, directory: RunDirectory) -> None:
    watch(bench, ROOMY)
    answer = look(bench, "--no-email")
    assert (answer.code, answer.out, answer.err) == (
        0,
        "All file systems are in good standing\n",
        "",
    )
    samples = read_usage(directory)
    assert isinstance(samples, tuple) and [sample.name for sample in samples] == ["ROOMY"]
    assert (
        samples[0].inodes_used == 3
        and samples[0].bytes_used is not None
        and samples[0].bytes_used > 6000
    )
    assert "ROOMY (du" in look(bench, "--no-email", "-d").out


def test_one_is_full_and_one_is_away(bench: LocalBench, directory: RunDirectory) -> None:
    watch(bench, ROOMY, CROWDED, AWAY)
    answer = look(bench, "--no-email")
    head, crowded, away = answer.out.splitlines()
    assert answer.code == 1 and head == "[ALERT] small filesystem is getting close to being full"
    assert crowded.startswith("CROWDED is at ") and "% bytes usage (" in crowded
    assert away.startswith("AWAY is unknown: exit status 1: df:")
    assert not (directory.paths.state / "alerts").exists()
    document = look(bench, "--no-email", "--json").json
    assert document["exit_code"] == 1 and document["kept"] is True
    assert [bool(one.get("full")) for one in document["filesystems"]] == [False, True, False]


def test_nothing_observed_is_code_3(bench: LocalBench, directory: RunDirectory) -> None:
    watch(bench, AWAY)
    answer = look(bench, "--no-email")
    assert answer.code == 3 and answer.out.startswith("No file system could be observed")
    assert read_usage(directory) == ()


def test_what_is_full_becomes_an_alert(bench: LocalBench, directory: RunDirectory) -> None:
    watch(bench, CROWDED)
    assert look(bench).code == 1
    alert_state = json.loads((directory.paths.state / "alerts" / "book.json").read_text())
    assert "CROWDED" in json.dumps(alert_state)


def test_an_unwritable_directory_is_told_and_the_rest_looked_at(
    bench: LocalBench, directory: RunDirectory
) -> None:
    watch(bench, CROWDED)
    (directory.paths.state / "filesystems").write_text("in the way")
    answer = look(bench, "--no-email")
    assert answer.code == 1 and "CROWDED is at" in answer.out
    assert "could not be kept" in answer.err and answer.err.count("\n") == 1


def test_a_run_directory_that_is_away_is_not_made(bench: LocalBench, tmp_path: Path) -> None:
    (bench.folder / "tree").mkdir()
    watch(bench, ROOMY)
    answer = look(bench)
    assert answer.code == 0 and "is not there: this look is not kept" in answer.err
    assert not run_directory(bench).root.exists()


def test_a_dry_run_asks_nothing(bench: LocalBench, directory: RunDirectory) -> None:
    watch(bench, ROOMY, AWAY)
    answer = look(bench, "--dry-run")
    assert (
        answer.code == 0
        and "ROOMY: would run du -bs -- " in answer.out
        and "nothing was asked" in answer.out
    )
    assert look(bench, "--dry-run", "--json").json["commands"]["AWAY"][0].startswith("df -P -k")
    assert read_usage(directory) == ()


def test_files_that_the_group_cannot_use_are_counted(
    bench: LocalBench, directory: RunDirectory
) -> None:
    watch(bench, ROOMY)
    path = directory.root / "private"
    path.write_text("x")
    path.chmod(0o600)
    assert "1 file is not usable for the run's group, of 3" in look(bench, "--no-email").out


def test_what_a_tool_prints_obeys_no_terminal(
    bench: LocalBench, directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "idrquota").write_text(
        "#!/bin/sh\nprintf 'WORK \\033[2J (99.0%%)\\nWORK (1.0%%)\\n'\n"
    )
    (tools / "idrquota").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    watch(bench, 'name = "WORK"\nsource = "idrquota"')
    answer = look(bench, "--no-email")
    assert answer.code == 1 and "WORK is at 99.00% bytes usage\n    WORK  (99.0%)\n" in answer.out


def test_the_time_for_a_walk_follows_the_periodic_job(bench: LocalBench) -> None:
    card = read_card(str(bench.card))
    assert (seconds_of(card, None), seconds_of(card, 120.0)) == (5400.0, 120.0)
    assert seconds_of(read_card(str(bench.card), ["cron.filesystem_hours=6"]), None) == 1350.0


@pytest.mark.parametrize("words", [("--timeout", "0"), ("--timeout", "99999")])
def test_wrong_usage(bench: LocalBench, words: tuple[str, ...]) -> None:
    assert look(bench, *words).code == 2
