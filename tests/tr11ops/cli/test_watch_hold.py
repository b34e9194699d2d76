"""`tr11 watch --hold`: the checkpoints of someone else's job are the run's own, and its training never
misses anything by it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.cli.watch_bench import WatchBench, watching
from tests.waiting import until
from tr11ops.runcard.card import load_card
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.trainers import guest
from tr11ops.trainers.guest import OwnersRoom, lacks_room
from trainer.contract.resumable import ResumeNeed

OURS = """
name = "ours"
title = "a script"
step_line = 'at (?P<step>\\d+) loss (?P<loss>\\S+)'
[checkpoints]
name = "step-{step}"
complete = ["count rank_*.pt = {world_size}"]
quiet = 0.2
"""
SAVE = "mkdir -p out/new && echo weights of $i > out/new/rank_0.pt && echo more > out/new/rank_1.pt && mv out/new out/step-$i"
LOOP = f"for i in 1 2; do echo at $i loss 2.5; {SAVE}; sleep 0.1; done"


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[WatchBench]:
    (tmp_path / "ours.toml").write_text(OURS)
    (tmp_path / "out").mkdir()
    with watching(tmp_path, monkeypatch, capsys) as one:
        yield one


def words(bench: WatchBench) -> list[str]:
    """Of a watch that holds."""
    return ["--dialect", str(bench.folder / "ours.toml"), "--folder", "out", "--hold",
            "--world-size", "2"]  # fmt: skip


def saved(bench: WatchBench, step: int) -> None:
    folder = bench.folder / f"out/step-{step}"
    until(lambda: folder.is_dir() and time.time() - folder.stat().st_mtime > 0.5, "it is saved")


def save(bench: WatchBench, step: int) -> None:
    """As its trainer saves one more."""
    folder = bench.folder / f"out/step-{step}"
    shutil.copytree(bench.folder / "out/step-2", folder)
    for path in (*folder.iterdir(), folder):
        os.utime(path)
    saved(bench, step)


def held(bench: WatchBench) -> list[int]:
    """The steps that are held and whole."""
    folder = load_card(Path(bench.card), (), {}).paths.checkpoints
    rows = list_rows(folder, None, ResumeNeed(trainer="foreign"))
    return [row.step for row in rows if row.is_sound]


def test_its_checkpoints_are_held_verified_copied_and_kept_for_it(bench: WatchBench) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    answer = bench.watch(*words(bench))
    assert answer.code == 0, answer.out + answer.err
    assert "level 1, copied: its checkpoints are held" in answer.out
    assert "held up to step 2" in answer.out
    assert held(bench) == [1, 2]
    moves = bench.folder / "out.set-aside/moves.jsonl"
    moves.parent.mkdir()
    moves.write_text('{"time": 1.0, "name": "step-9", "to": "step-9", "why": "cut"}\n')
    status = bench.tr11("status", "--run", bench.card, "--scheduler", "local")
    assert "level 1" in status.out, status.out
    # by the name that it has in its trainer's folder, and no other
    assert "checkpoint step-2, " in status.out and "global_step" not in status.out, status.out
    assert "set aside  step-9: cut, " in status.out, status.out
    theirs = bench.folder / "out/step-2/rank_0.pt"
    assert theirs.stat().st_nlink == 2
    shutil.rmtree(bench.folder / "out/step-1")  # its trainer keeps one
    assert bench.tr11("checkpoints", "verify", "1", "--run", bench.card).code == 0
    disks = bench.tr11("fs-watchdog", "--no-email", "--run", bench.card, "--scheduler", "local")
    assert "2 checkpoints of its trainer's held, " in disks.out, disks
    assert "are here alone, the rest are links; `tr11 checkpoints prune --dry-run`" in disks.out
    store = bench.folder / "store"
    store.mkdir()
    with Path(bench.card).open("a") as stream:
        stream.write(f'\n[backup]\nurl = "file://{store}"\n')
    copied = bench.tr11("backup", "run", "--run", bench.card, "--scheduler", "local")
    assert copied.code == 0, copied.out + copied.err
    back = str(bench.folder / "back")
    restored = bench.tr11("backup", "restore", "1", "--run", bench.card, "--output", back)
    assert restored.code == 0, restored.out + restored.err
    assert list(Path(back).rglob("foreign/step-1/rank_0.pt"))
    job = bench.scheduler.job(bench.job)
    assert job is not None and job.state == "RUNNING"
    assert sorted(path.name for path in theirs.parent.iterdir()) == ["rank_0.pt", "rank_1.pt"]


def test_the_last_one_of_a_job_that_has_ended_is_held_still(bench: WatchBench) -> None:
    bench.submit(LOOP, f"i=3; {SAVE}")
    bench.ended()
    assert bench.watch(*words(bench)).code in (0, 1)
    assert held(bench) == [1, 2, 3]
    # and by the card alone, as cron does it, whatever comes later
    save(bench, 4)
    again = bench.tr11("watch", "--run", bench.card, "--scheduler", "local", "--once")
    assert "held up to step 4" in again.out, again.out + again.err


def test_a_watcher_that_is_killed_is_followed_and_two_hold_once(bench: WatchBench) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    command = [str(Path(sys.executable).with_name("tr11")), "watch", bench.job, "--log", str(bench.log),
               "--scheduler", "local", "--every", "1", *words(bench)]  # fmt: skip
    log = bench.folder / "watch.log"
    with log.open("wb") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output, cwd=bench.folder)
    try:
        until(lambda: "held up to step 2" in log.read_text(), "it holds")
        second = bench.watch(*words(bench))
        assert f"process {first.pid} of " in second.out and "holds its checkpoints" in second.out
        os.kill(first.pid, signal.SIGSTOP)  # it hangs: what comes now it cannot hold
        save(bench, 3)
        assert held(bench) == [1, 2]
    finally:
        first.kill()
        first.wait()
    third = bench.watch(*words(bench))
    assert "held up to step 3" in third.out, third.out
    assert held(bench) == [1, 2, 3]
    assert not list(bench.root.glob("checkpoints/main/.*holding*"))


# a watcher whose claim runs out within seconds
HASTY = """
from tr11ops.trainers import guest
guest.RENEW_SECONDS, guest.CLAIM_SECONDS = 0.3, 3.0
from tr11ops.cli.main import run
run()
"""


def test_a_frozen_watcher_is_followed_within_its_claim_and_publishes_no_more(
    bench: WatchBench,
) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    command = [sys.executable, "-c", HASTY, "watch", bench.job, "--log", str(bench.log),
               "--scheduler", "local", "--every", "1", *words(bench)]  # fmt: skip
    log = bench.folder / "watch.log"
    with log.open("wb") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output, cwd=bench.folder)
    try:
        until(lambda: "held up to step 2" in log.read_text(), "it holds")
        os.kill(first.pid, signal.SIGSTOP)
        save(bench, 3)
        until(lambda: "held up to step 3" in bench.watch(*words(bench)).out, "another one holds")
        assert held(bench) == [1, 2, 3]
        size = log.stat().st_size
        os.kill(first.pid, signal.SIGCONT)
        until(lambda: log.stat().st_size > size, "it looks again")
        save(bench, 4)
        until(lambda: held(bench) == [1, 2, 3, 4], "one of them holds")
    finally:
        first.kill()
        first.wait()


def test_what_cannot_be_held_is_one_line_and_nothing_is_made(bench: WatchBench) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    without = bench.watch("--hold", "--dialect", "torchtitan")
    assert (without.code, without.err) == (
        2,
        "tr11: --hold needs --folder DIR: where its checkpoints lie\n",
    )
    mute = bench.folder / "mute.toml"
    mute.write_text("name = 'mute'\ntitle = 'x'\nstep_line = 'at (?P<step>\\d+)'\n")
    silent = bench.watch("--hold", "--folder", "out", "--dialect", str(mute))
    assert silent.code == 2 and "says nothing of checkpoints" in silent.err
    shutil.rmtree(bench.root)
    bench.watch("--dialect", str(bench.folder / "ours.toml"))
    late = bench.watch(*words(bench))
    assert late.code == 2 and "set trainer.hold = true there" in late.err
    assert len(late.err.splitlines()) == 1


def test_no_more_is_held_than_its_training_may_miss(
    bench: WatchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    monkeypatch.setattr(guest, "SPARE", 1 << 62)
    answer = bench.watch(*words(bench))
    assert "step-2 is not held: its training may need the room" in answer.out, answer.out
    assert held(bench) == []
    monkeypatch.setattr(guest, "SPARE", 0)
    assert "held up to step 2" in bench.watch(*words(bench)).out


@pytest.mark.parametrize(
    ("free", "linked", "is_held"), [(20, 0, True), (19, 0, False), (30, 10, True), (29, 10, False)]
)
def test_the_room_that_is_left(free: int, linked: int, is_held: bool) -> None:
    """As much as is held of what the training has, and two saves."""
    room = OwnersRoom(free + guest.SPARE, linked, save=10)
    assert (lacks_room(room) == "") is is_held


def test_a_file_of_another_user_that_cannot_be_linked_is_copied_and_an_unreadable_one_said(
    bench: WatchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source))

    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("tr11ops.trainers.held.os.link", no_links)
    answer = bench.watch(*words(bench))
    assert "held up to step 2" in answer.out, answer.out
    assert (bench.folder / "out/step-2/rank_0.pt").stat().st_nlink == 1


def test_the_rounds_of_cron_look_and_hold_before_the_pulse(bench: WatchBench) -> None:
    bench.submit(LOOP, "sleep 60")
    saved(bench, 2)
    bench.watch(*words(bench))
    save(bench, 3)
    with bench.log.open("a") as stream:
        stream.write("at 3 loss 2.25\n")
    ran = bench.tr11("cron", "run", "--once", "--run", bench.card, "--scheduler", "local", "--json")
    assert ran.code in (0, 1), ran.out + ran.err
    until(lambda: held(bench) == [1, 2, 3], "it is held")
    status = bench.tr11("status", "--run", bench.card, "--scheduler", "local", "--json").json
    assert status["iteration"] == 3
    jobs = [job["job"] for job in ran.json["rounds"]]
    assert jobs.index("watch") < jobs.index("pulse"), ran.out
    assert bench.log.read_text().endswith("\nat 3 loss 2.25\n")  # it is theirs alone
