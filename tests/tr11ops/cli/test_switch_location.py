"""A kill switch outside the run directory: it counts only where it is proven to be the one that the
trainers look at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.agent.batch import look_after_switch
from tr11ops.cli.common import directory_of
from tr11ops.runcard.card import load_card
from tr11ops.rundir.kill_switch import (
    NEVER_MARKED,
    SwitchLocation,
    look_at_switch,
    mark_of,
    mark_switch,
    place_fault,
)
from tr11ops.rundir.paths import RunDirectory, adopt_run_id, require_run_id
from trainer.contract.paths import RunPaths


def run_with(switch: Path, root: Path) -> RunDirectory:
    (root / "state").mkdir(parents=True, exist_ok=True)
    return RunDirectory(RunPaths(root, "run", "main"), switch)


def test_a_mark_proves_the_place_and_its_absence_disproves_it(tmp_path: Path) -> None:
    far = tmp_path / "far"
    run = run_with(far / "switch", tmp_path / "run")
    assert "is not there" in look_at_switch(run).fault and not far.exists()
    with pytest.raises(FileNotFoundError):
        mark_switch(run, "run")
    far.mkdir()
    # a run of an older tr11 goes on as it did
    assert look_at_switch(run) == SwitchLocation(note=NEVER_MARKED)
    require_run_id(run, "run")
    mark_switch(run, "run")
    assert look_at_switch(run) == SwitchLocation()
    far.rename(tmp_path / "unmounted")
    far.mkdir()  # the empty mount point
    assert "no mark of this run lies beside it" in look_at_switch(run).fault
    (far / "switch").touch()
    assert "not mounted here" in place_fault(run)
    shutil.rmtree(far)
    assert "is not there" in place_fault(run)
    far.touch()
    assert "is not a folder" in place_fault(run)


def test_a_mark_goes_by_the_runs_id_and_not_if_torn(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    run = run_with(tmp_path / "far" / "switch", tmp_path / "run")
    require_run_id(run, "run")
    mark_switch(run, "run")
    moved = run_with(run.kill_switch, tmp_path / "moved")
    shutil.copytree(run.root / "state", moved.root / "state", dirs_exist_ok=True)
    assert look_at_switch(moved).other_run == str(run.root)  # as long as the other one is there
    shutil.rmtree(run.root)
    assert look_at_switch(moved) == SwitchLocation()
    adopt_run_id(moved, "run", "0" * 32)
    assert "of another run" in look_at_switch(moved).fault
    mark_of(moved.kill_switch).write_text("{")
    assert "cannot be read" in look_at_switch(moved).fault


def test_a_switch_in_the_run_directory_needs_no_mark(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run" / "kill-switch", tmp_path / "run")
    mark_switch(run, "run")
    assert place_fault(run) == "" and sorted(run.root.rglob("*")) == [run.root / "state"]


def test_an_attempt_marks_the_place_or_says_where_it_is_blind(tmp_path: Path) -> None:
    far, lines = tmp_path / "far", list[str]()
    far.mkdir()
    run = run_with(far / "switch", tmp_path / "run")
    assert look_after_switch(run, "run", lines.append) == "" and lines == []
    assert look_at_switch(run) == SwitchLocation()
    shutil.rmtree(far)
    assert look_after_switch(run, "run", lines.append) and "ALERT" in lines[0] and not far.exists()


# ----------------------------------------------------------------------------- commands
@pytest.fixture
def far(bench: LocalBench) -> Path:
    """The bench's card, with its kill switch on what plays another file system."""
    far = bench.folder / "far"
    far.mkdir()
    text = bench.card.read_text().replace("[run]\n", f'[run]\nkill_switch = "{far}/switch"\n', 1)
    bench.card.write_text(text)
    return far


def files_below(folder: Path) -> list[Path]:
    """All but what the scheduler, which is at work, is just writing."""
    return sorted(path for path in folder.rglob("*") if not path.name.startswith(".state.json."))


def unmount(far: Path) -> None:
    far.rename(far.with_name("unmounted"))


@pytest.mark.parametrize("leaves_mount_point", [True, False])
def test_nothing_is_set_without_the_switch_and_other_ways_work(
    bench: LocalBench, far: Path, leaves_mount_point: bool
) -> None:
    directory = directory_of(load_card(bench.card, (), {}))
    bench.block()
    bench.launch("--array", "1-3")
    unmount(far)
    if leaves_mount_point:
        far.mkdir()
    before = files_below(bench.folder)
    killed = bench.kill("--yes")
    assert killed.code == 3 and "the kill switch cannot be set from here" in killed.err
    assert files_below(bench.folder) == before
    status = bench.tr11("status", "--run", str(bench.card))
    assert "STOPPED" not in status.out and "switch-unseen" in status.out + status.err
    resumed = bench.tr11("resume", "--run", str(bench.card), "--yes")
    assert resumed.code == 3 and "cannot be seen from here" in resumed.err
    again = bench.launch("--array", "1-3", "--after", "2")
    assert again.code == 3 and "not set" not in again.out + again.err
    [way] = [line.strip() for line in killed.err.splitlines() if "tr11 pause" in line]
    words = way.partition("#")[0].split()[1:]
    assert bench.tr11(*words, "--yes").code == 0 and directory.paths.pause.exists()
    assert all(job.reason.startswith("JobHeld") for job in bench.living() if job.comment)


def test_a_first_launch_does_not_make_the_folder_of_its_switch(
    bench: LocalBench, far: Path
) -> None:
    far.rmdir()
    launched = bench.launch()
    assert (
        launched.code == 1 and f"mkdir -p {far}" in launched.out + launched.err and not far.exists()
    )
    subprocess.run(["mkdir", "-p", str(far)], check=True)
    assert bench.launch("--dry-run").code == 0


def test_a_switch_set_before_the_first_launch_is_released(bench: LocalBench, far: Path) -> None:
    (far / "switch").touch()
    launched = bench.launch()
    assert launched.code == 1 and "release it with `tr11 resume" in launched.out + launched.err
    resumed = bench.tr11("resume", "--run", str(bench.card), "--scheduler", "local", "--yes")
    assert resumed.code == 0 and not (far / "switch").exists(), resumed.err
    assert bench.launch("--dry-run").code == 0


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "loop", "binary", "empty"])
def test_whatever_lies_at_the_switchs_path_stops_the_run(
    bench: LocalBench, far: Path, kind: str
) -> None:
    switch = far / "switch"
    bench.block()
    bench.launch("--array", "1-3")
    make = {
        "folder": lambda: (switch / "in").mkdir(parents=True), "pipe": lambda: os.mkfifo(switch),
        "dangling link": lambda: switch.symlink_to("nowhere"), "loop": lambda: switch.symlink_to(switch),
        "binary": lambda: switch.write_bytes(b"\xff\x00"), "empty": switch.touch,
    }  # fmt: skip
    make[kind]()
    shown = bench.tr11("status", "--run", str(bench.card))
    assert "STOPPED" in shown.out
    assert bench.kill("--yes").code == 0
    resumed = bench.tr11("resume", "--run", str(bench.card), "--yes")
    assert resumed.code == 0 and not os.path.lexists(switch), resumed.err
