"""The record of phases: one line a change, none lost to a torn line, and never in the training's
way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract.paths import RunPaths
from trainer.contract.phases import PHASES, PhaseRecord, PhaseWriter, read_phases
from trainer.control.lifecycle import HeartbeatWriter


def never(line: str) -> None:
    raise AssertionError(f"nothing is wrong, but it said: {line}")


def test_rank_zero_records_each_change_once_and_no_other_does(tmp_path):
    paths, now = RunPaths(tmp_path, "run", "main"), [100.0]
    for rank in (0, 1):
        beats = HeartbeatWriter(paths, rank, f"job-{rank}", clock=lambda: now[0], launch=3)
        for phase, iteration in (
            ("starting", 0),
            ("training", 7),
            ("training", 8),
            ("saving", 8),
            ("training", 8),
        ):
            now[0] += 2.0  # beyond the second within which a heartbeat is not repeated
            beats.beat(phase, iteration)
        beats.end_now(0)
    assert read_phases(paths.phases("job-0")) == (
        PhaseRecord(102.0, "starting", 0, 3),
        PhaseRecord(104.0, "training", 7, 3),
        PhaseRecord(108.0, "saving", 8, 3),
        PhaseRecord(110.0, "training", 8, 3),
        PhaseRecord(110.0, "ended", 8, 3),
    )
    assert not paths.phases("job-1").exists()


def test_a_line_that_a_killed_launch_left_costs_that_line_alone(tmp_path):
    path = tmp_path / "phases.jsonl"
    first = PhaseWriter(path, 1, never)
    first.enter("starting", 0, 1.0)
    first.enter("training", 0, 2.0)
    path.write_bytes(path.read_bytes()[:-9])
    second = PhaseWriter(path, 2, never)
    second.enter("starting", 0, 3.0)
    second.enter("loading", 0, 4.0)
    assert [(entry.launch, entry.phase) for entry in read_phases(path)] == [
        (1, "starting"), (2, "starting"), (2, "loading"),
    ]  # fmt: skip


def test_a_refusing_file_system_is_told_once_and_tried_again(tmp_path):
    path, said = tmp_path / "folder" / "phases.jsonl", list[str]()
    path.mkdir(parents=True)  # a folder in its place: refused for every user
    writer = PhaseWriter(path, 1, said.append)
    writer.enter("starting", 0, 1.0)
    writer.enter("loading", 0, 2.0)
    assert len(said) == 1
    path.rmdir()
    writer.enter("training", 5, 3.0)
    assert read_phases(path) == (PhaseRecord(3.0, "training", 5, 1),)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_does_not_stop_a_training(tmp_path):
    (tmp_path / "phases.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    PhaseWriter(tmp_path / "phases.jsonl", 1, said.append).enter("starting", 0, 1.0)
    assert len(said) == 1 and "No space left" in said[0]


def test_the_file_can_be_written_by_the_group(tmp_path):
    before = os.umask(0o002)
    try:
        PhaseWriter(tmp_path / "phases.jsonl", 1, never).enter("starting", 0, 1.0)
    finally:
        os.umask(before)
    assert (tmp_path / "phases.jsonl").stat().st_mode & 0o777 == 0o664


def test_no_file_is_no_phase_and_a_folder_is_an_error(tmp_path):
    assert read_phases(tmp_path / "none.jsonl") == ()
    with pytest.raises(OSError):
        read_phases(tmp_path)


@settings(max_examples=40, deadline=None)
@given(garbage=st.lists(st.binary(max_size=40)))
def test_garbage_between_records_is_left_out(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("phases") / "phases.jsonl"
    kept = [PhaseRecord(float(index), PHASES[index], index, 1) for index in range(3)]
    writer = PhaseWriter(path, 1, never)
    for index, record in enumerate(kept):
        writer.enter(record.phase, record.iteration, record.time)
        with path.open("ab") as stream:
            for piece in garbage[index::3]:
                stream.write(piece.replace(b"{", b"") + b"\n")
    assert read_phases(path) == tuple(kept)
