"""What a trainer of the contract suite lives through, once for all tests: a short training to its end, and a long
one that is stopped, resumed, killed and superseded. All trainers live at once, as most of it is waiting.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from tests.leases import read_lease
from tests.tr11ops.trainers.contract_runs import FOREVER, Course, TrainerRun, subjects
from trainer.contract.attempt import Heartbeat, request_stop
from trainer.contract.checkpoint_names import LATEST_FILE, read_latest
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import MANIFEST_FILE
from trainer.contract.requests import Request, new_request

Condition = Callable[[], object]
STUCK_SECONDS = 200.0  # far more than any launch takes
SHORT, LONG = Course(12, 6), Course(FOREVER, 20)


class Life:
    """What was seen of one trainer; the rest lies in its two run directories."""

    def __init__(self, name: str, folder: Path) -> None:
        make = subjects()[name]
        self.name, self.folder = name, folder
        for place in ("short", "long"):
            (folder / place).mkdir(parents=True)
        self.short, self.long = make(folder / "short", SHORT), make(folder / "long", LONG)
        self.claims: list[LeaseClaim | None] = []
        self.beats: dict[str, Heartbeat | None] = {}
        self.kill: Request | None = None
        self.stuck = ""
        self.newer: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})

    def steps(self) -> Iterator[Condition]:
        """What happens, in its order; each condition is waited for."""
        whole = self.short.start("1")
        yield whole.has_ended
        self.beats["whole"] = self.short.beat()
        yield from self._stopped()
        yield from self._resumed_and_killed()
        yield from self._left_behind()
        yield from self._superseded()

    def _stopped(self) -> Iterator[Condition]:
        run = self.long
        first = run.start("stopped")
        yield lambda: run.at("stopped", 3)
        self.claims.append(read_lease(run.paths))
        second = run.start("second")
        yield second.has_ended
        request_stop(run.paths.stop_request("stopped"), "a test")
        yield first.has_ended
        self.claims.append(read_lease(run.paths))

    def _resumed_and_killed(self) -> Iterator[Condition]:
        run = self.long
        end = run.end("stopped")
        if end is not None and end.checkpoint_step is not None:
            run.lay_broken(end.checkpoint_step)
        launch = run.start("resumed")
        yield lambda: run.at("resumed", 3)
        self.kill = new_request("kill", "a test", "", run.paths.root)
        self.kill.write(run.kill_switch)
        yield launch.has_ended
        self.beats["killed"] = run.beat()
        yield run.start("kept from training").has_ended
        run.kill_switch.unlink()

    def _left_behind(self) -> Iterator[Condition]:
        run = self.long
        if not run.ends_itself:
            run.leave_after(3)
            yield run.start("left").has_ended
        launch = run.start("lost")
        yield lambda: run.at("lost", 2)
        if not launch.has_ended():
            os.kill(run.worker_of(launch), signal.SIGKILL)
        yield launch.has_ended

    def _superseded(self) -> Iterator[Condition]:
        run = self.long
        latest = read_latest(run.paths.checkpoints)
        home = _newer_checkpoint(run)
        before = _content(run.paths.checkpoints)
        launch = run.start("older")
        yield lambda: run.at("older", 3)
        launch.end()
        yield launch.has_ended
        self.newer = (before, _content(run.paths.checkpoints))
        for path in home.iterdir():
            path.unlink()
        home.rmdir()
        if latest is not None:
            run.name_latest(latest)
        launch = run.start("superseded")
        yield lambda: run.at("superseded", 2)
        folder = LeaseFolder(run.paths)
        epoch = folder.newest()[0] + 1
        folder.claim(epoch, replace(LeaseClaim.of_this_process("another", 1), epoch=epoch))
        yield launch.has_ended

    def close(self) -> None:
        for run in (self.short, self.long):
            for launch in run.launches.values():
                launch.end()


def _newer_checkpoint(run: TrainerRun) -> Path:
    """A checkpoint that a newer tr11 has written, the newest of all."""
    step = 10 * FOREVER
    home = run.paths.checkpoint(step)
    home.mkdir(parents=True)
    (home / MANIFEST_FILE).write_text(json.dumps({"schema": 99, "step": step}), encoding="utf-8")
    run.name_latest(step)
    return home


def _content(folder: Path) -> dict[str, bytes]:
    """What names the newest, and each manifest."""
    paths = [folder / LATEST_FILE, *folder.glob(f"global_step*/{MANIFEST_FILE}")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def live(lives: Mapping[str, Life]) -> None:
    """Let all of them live to their ends; `stuck` says of one that did not in which launch it was."""
    courses = {name: life.steps() for name, life in lives.items()}
    waits = {name: (next(course), time.monotonic()) for name, course in courses.items()}
    while waits:
        for name, (condition, since) in list(waits.items()):
            life = lives[name]
            if not condition():
                if time.monotonic() - since > STUCK_SECONDS:
                    life.stuck = f"launch {list(life.long.launches)[-1:]} did not come to its end"
                    life.close()
                    del waits[name]
                continue
            following = next(courses[name], None)
            if following is None:
                del waits[name]
            else:
                waits[name] = (following, time.monotonic())
        time.sleep(0.1)
