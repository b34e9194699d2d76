"""A merge that was interrupted, at any point and by anything, goes on and ends with the same bytes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.data_helpers import ROOT, run_data
from tests.trainer.data.lives import run_lives
from trainer.contract.errors import DataError
from trainer.data import commands_make as merging
from trainer.data.commands_make import merge
from trainer.data.indexed import bin_path, idx_path
from trainer.data.indexed_write import IndexedWriter

BLOCK = 6000  # bytes copied at a time


def write_sources(folder: Path) -> list[Path]:
    """Three pairs of several blocks, with sentences, with an empty sequence and with empty
    documents at both ends.
    """
    random = np.random.default_rng(3)
    prefixes = []
    for number in range(3):
        lengths = random.integers(0, 200, 40).astype(np.int32)
        ends = np.sort(random.integers(0, 40, 12))
        with IndexedWriter(folder / f"in{number}", "uint16") as writer:
            writer.add_sequences(
                random.integers(0, 4000, int(lengths.sum())).astype(np.uint16),
                lengths,
                np.array([0, *ends, 40, 40]),
            )
        prefixes.append(folder / f"in{number}")
    return prefixes


def pair_of(prefix: Path) -> tuple[bytes, bytes]:
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def joined(prefixes: list[Path]) -> bytes:
    return b"".join(bin_path(prefix).read_bytes() for prefix in prefixes)


def test_a_merge_killed_at_every_step(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    merge(prefixes, tmp_path / "whole")
    assert pair_of(tmp_path / "whole")[0] == joined(prefixes)
    steps = 90  # more than one life has
    stories = [*([step] for step in range(steps)), [14] * 9, [30, 3, 4, 25, 0, 9]]
    lives = run_lives(
        tmp_path,
        stories,
        f"from trainer.data import commands_make as room\nroom.COPY_BYTES = {BLOCK}",
        "room.merge([root / f'in{n}' for n in range(3)], output, point, tell=tell, save_seconds=0.0)",
    )
    assert 40 < lives.longest < steps, "each step of a life was a moment of death"
    for step in range(20, lives.longest):  # the first block is on record by then
        count, told = lives.last[step]
        went_on = bool(told) and told[0].startswith("goes on behind ")
        assert went_on or (told == [] and count < 12), "what was left to do was to publish, at most"
    for number in range(len(stories)):
        folder = tmp_path / f"story{number}"
        assert pair_of(folder / "out") == pair_of(tmp_path / "whole"), stories[number]
        left = {
            path.name for path in folder.iterdir() if not path.name.startswith(".out.report.json.")
        }
        assert left == {"out.bin", "out.idx", "out.report.json"}, stories[number]


def test_a_full_disk_keeps_what_was_merged(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    code = (
        "import sys; from trainer.data import commands_make as room; from trainer.contract.errors import *\n"
        f"room.COPY_BYTES = {BLOCK}\n"
        "try: room.merge(sys.argv[2:], sys.argv[1], tell=print, save_seconds=0.0)\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "all"), *map(str, prefixes)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)),
    )  # fmt: skip
    kept, failed = done.stdout.splitlines()
    assert (
        kept.startswith("kept: ")
        and "tokens; the same command goes on" in kept
        and "writing" in failed
    ), done.stderr
    assert not bin_path(tmp_path / "all").exists()
    told: list[str] = []
    heard: list[int] = []
    merge(prefixes, tmp_path / "all", heard.append, tell=told.append)
    assert told[0].startswith("goes on behind ") and sum(heard) == len(joined(prefixes))
    assert pair_of(tmp_path / "all")[0] == joined(prefixes)

    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "other"), *map(str, prefixes)],
        cwd=ROOT, capture_output=True, check=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)),
    )  # fmt: skip
    os.utime(bin_path(prefixes[0]), (1, 1))
    told.clear()
    merge(prefixes, tmp_path / "other", tell=told.append)
    assert told == [
        "what an interrupted run left cannot be gone on with (since then input modified changed): starting from the"
        " beginning"
    ]
    assert pair_of(tmp_path / "other") == pair_of(tmp_path / "all")


def test_a_source_that_shrinks_or_changes_type_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = write_sources(tmp_path)
    with IndexedWriter(tmp_path / "wide", "int32") as writer:
        writer.add_documents(np.arange(3, dtype=np.int32), np.array([3], dtype=np.int32))
    with pytest.raises(DataError, match="only pairs of one type"):
        merge([*prefixes, tmp_path / "wide"], tmp_path / "all")
    monkeypatch.setattr(merging, "COPY_BYTES", BLOCK)
    sizes = iter([bin_path(prefixes[1]).stat().st_size])

    def shrink(_: int) -> None:
        for size in sizes:
            os.truncate(bin_path(prefixes[1]), size - 100)

    with pytest.raises(DataError, match="became shorter while it was read"):
        merge(prefixes, tmp_path / "all", shrink, save_seconds=0.0)
    assert not bin_path(tmp_path / "all").exists()


def test_the_command_says_what_is_kept_and_goes_on(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    stopped_at_the_second_block = f"""
import os, signal, sys
from trainer.data import __main__ as command, commands_make as room
room.COPY_BYTES = {BLOCK}
def interrupted(prefixes, output, on_bytes, *rest, **more):
    blocks = []
    def count(size):
        on_bytes(size)
        blocks.append(size)
        if len(blocks) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    return whole(prefixes, output, count, *rest, **more)
whole, room.merge = room.merge, interrupted
sys.exit(command.main())
"""
    words = ["merge", *prefixes, "--output-prefix", tmp_path / "all"]
    done = subprocess.run(
        [sys.executable, "-c", stopped_at_the_second_block, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    kept, stopped = done.stderr.splitlines()
    assert kept.startswith("kept: ") and stopped == "stopped; no output is half-written"
    again = run_data(*words)
    assert again.returncode == 0 and again.stderr.startswith("goes on behind ")
    assert pair_of(tmp_path / "all")[0] == joined(prefixes)
    record = json.loads((tmp_path / "all.report.json").read_text())
    assert record["report"]["tokens"] * 2 == len(joined(prefixes))
