"""`tr11 doctor`: the checks of a launch and of this machine, with nothing launched and nothing
left.
"""

from __future__ import annotations

import os

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.cli.common import hanging
from tr11ops.launch.environment import environment_checks

SCHEDULER = ("--scheduler", "local")


def names(answer: dict[str, list[dict[str, str]]], level: str) -> set[str]:
    return {check["name"] for check in answer["checks"] if check["level"] == level}


def test_a_sound_card_is_all_well_and_leaves_no_trace(bench: LocalBench) -> None:
    before = sorted(bench.folder.iterdir())
    answer = bench.tr11(
        "doctor", "--run", str(bench.card), *SCHEDULER, "--array", "1-3", "--verify", "--json"
    )
    assert answer.code == 0 and answer.json["card"] == "small"
    assert {"python", "packages", "locks", "card", "nodes", "chain", "data", "scheduler"} <= names(
        answer.json, "ok"
    )
    assert names(answer.json, "refused") == set() and sorted(bench.folder.iterdir()) == before


def test_a_fault_of_the_card_decides_the_exit_code(bench: LocalBench) -> None:
    (bench.folder / "data" / "corpus.bin").unlink()
    answer = bench.tr11("doctor", "--run", str(bench.card), *SCHEDULER)
    assert (
        answer.code == 1 and "refused  data.prefixes:" in answer.out and "1 refused" in answer.out
    )
    assert (
        bench.tr11(
            "doctor", "--run", str(bench.card), *SCHEDULER, "--set", "slurm.partition=no"
        ).code
        == 2
    )
    assert bench.tr11("doctor", "--run", "missing.toml", *SCHEDULER).code == 2


def test_data_that_was_never_made_comes_with_its_commands(bench: LocalBench) -> None:
    text = bench.card.read_text().replace("data/corpus", "data/never_text_document")
    bench.card.write_text(text)
    out = bench.tr11("doctor", "--run", str(bench.card), *SCHEDULER).out
    assert (
        "tr11 data corpus --output" in out
        and "tr11 data preprocess --input" in out
        and "dataset again" not in out
    )
    assert (
        "tr11 data corpus"
        not in bench.tr11("doctor", "--run", str(bench.card), *SCHEDULER, "--json").out
    )


def test_a_run_under_way_is_no_fault(bench: LocalBench) -> None:
    bench.block()
    bench.launch("--array", "1-2")
    answer = bench.tr11("doctor", "--run", str(bench.card), *SCHEDULER, "--json")
    assert answer.code == 0 and "queue" in names(answer.json, "warning")


def test_a_long_check_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    long = (
        "data.prefixes: "
        + "/scratch/some/long/folder/of/the/corpus_text_document.bin is not there " * 3
    )
    assert hanging(long, 10) == long, "into a pipe a line is one line"
    piped = hanging(long, 10, piped=80)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert hanging(long, 10) == piped
    first, *others = hanging(long, 10).splitlines()
    assert (
        len(first) <= 70
        and others
        and all(line.startswith(" " * 10) and len(line) <= 80 for line in others)
    )
    assert " ".join([first, *(line.strip() for line in others)]) == long.strip()


def test_without_a_card_machine_and_scheduler_are_looked_at(bench: LocalBench) -> None:
    answer = bench.tr11("doctor", *SCHEDULER)
    assert (
        answer.code == 0
        and "local: 1 partition, 2 of 2 nodes usable" in answer.out
        and "  card: " not in answer.out
    )


def test_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    before = os.umask(0o077)
    try:
        found = {check.name: check for check in environment_checks(True, None)}
        assert os.umask(0o077) == 0o077  # looked at, and left as it was
    finally:
        os.umask(before)
    assert found["packages"].level == "ok" and "torch " in found["packages"].text
    assert "sbatch, squeue, scontrol, scancel, srun not found" in found["slurm commands"].text
    assert found["umask"].level == "warning" and found["umask"].text.startswith(
        "0077 keeps the group out"
    )
