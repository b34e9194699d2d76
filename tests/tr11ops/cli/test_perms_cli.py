"""`tr11 perms`: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.tr11ops.cli.local_bench import LocalBench


def run_folder(bench: LocalBench) -> Path:
    root = bench.folder / "run"
    (root / "state").mkdir(parents=True)
    (root / "state" / "a\nb").write_text("x")
    (root / "state" / "a\nb").chmod(0o600)
    return root


def test_check_finds_fix_repairs_and_check_is_content(bench: LocalBench) -> None:
    root = run_folder(bench)
    card = ("--run", str(bench.card))
    found = bench.tr11("perms", "check", *card)
    assert (
        found.code == 1
        and f"{root}: 3 files and folders, group " in found.out
        and "3 wrong" in found.out
    )
    assert "state/a\\nb: g-rw" in found.out and "`tr11 perms fix` repairs 3 of yours" in found.out
    assert bench.tr11("perms", "fix", "--dry-run", *card).code == 1
    assert (root / "state" / "a\nb").stat().st_mode & 0o777 == 0o600
    done = bench.tr11("perms", "fix", *card, "--json")
    assert done.code == 0 and (done.json["left"], done.json["trees"][0]["mended"]) == (0, 3)
    assert (root / "state" / "a\nb").stat().st_mode & 0o777 == 0o660
    well = bench.tr11("perms", "check", *card)
    assert well.code == 0 and "3 files and folders" in well.out and ": 0 wrong" in well.out


def test_wrong_words_are_one_line(bench: LocalBench) -> None:
    assert "is not a folder" in bench.tr11("perms", "check", str(bench.folder / "nowhere")).err
    answer = bench.tr11("perms", "fix", str(bench.folder), "--group", "no-such-group")
    assert answer.code == 2 and "there is no such group here" in answer.err
    assert bench.tr11("perms", "check", "--run", str(bench.card)).code == 2  # no run directory yet


def test_the_cards_group_and_folders(bench: LocalBench) -> None:
    root = run_folder(bench)
    code = bench.folder / "code"
    code.mkdir()
    group = next(
        (number for number in os.getgroups() if number != root.stat().st_gid),
        root.stat().st_gid + 1,
    )
    card = (
        "--run",
        str(bench.card),
        "--set",
        f"perms.group='{group}'",
        "--set",
        f"perms.folders=['{code}']",
    )
    found = bench.tr11("perms", "check", *card, "--json")
    assert found.code == 1 and [tree["root"] for tree in found.json["trees"]] == [
        str(root),
        str(code),
    ]
    assert all("other group" in tree["examples"][0]["what"] for tree in found.json["trees"])
    own = ("--group", str(root.stat().st_gid))
    # the command line goes before the card
    other = bench.tr11("perms", "check", str(code), *own, *card, "--json")
    assert [tree["root"] for tree in other.json["trees"]] == [str(code)]
    assert "other group" not in other.json["trees"][0]["examples"][0]["what"]
    unknown = bench.tr11(
        "perms", "fix", "--run", str(bench.card), "--set", "perms.group=no-such-group"
    )
    assert (
        unknown.code == 2
        and "perms.group no-such-group: there is no such group here" in unknown.err
    )
