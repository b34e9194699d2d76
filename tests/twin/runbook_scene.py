"""A small rehearsal on the shared twin, into which a fault is brought, and on which a runbook's
commands are typed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.plugins.command_server import tr11_command
from tests.twin.rehearsal_inputs import rehearsal_card, steps_of
from tests.twin.runbook_mails import ASKS, LOOKS, MAILS, mailed_commands, pairs, type_them
from tests.twin.small_run import recorded_comment
from tests.waiting import PATIENCE_SECONDS, Found, crowding, end_of_file, until
from tr11ops.base.shipped import read_shipped
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.detect.registry import page_of
from tr11ops.launch.rehearse import card_text
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.faults import heal
from tr11ops.twin.twin import Twin
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

STILL_SECONDS = 3.0  # the length of sixty steps on a quiet machine
STAYS_SECONDS = 0.3  # between two looks at a fault before it is treated
SHAPE = (
    "slurm.workers_per_node=1", "parallel.tensor=1", "batch.train_samples=4000000", "schedule.decay_samples=4000000",
    "rehearsal.step_seconds=5", "rehearsal.start_seconds=10", "rehearsal.save_seconds=5", "checkpoint.interval=30000",
    # ranks wait for one that hangs for as long as the real ones do: for ever
    "rehearsal.collective_seconds=60000",
    "rehearsal.log_scale=1",  # in whole tenths: other work on the machine makes no step look slow
    "resilience.end_within_seconds=2", "resilience.exclusion_cap_percent=50",
)  # fmt: skip
CAPITALS = re.compile(r"[A-Z]{4,}|\b(RUN|JOB)\b")


def cure(page: str) -> str:
    """The first block of commands below "What to type"."""
    text = read_shipped("runbooks", page)
    below = text.partition("**What to type.**")[2]
    found = re.search(r"^```sh\n(.*?)^```", below, re.DOTALL | re.MULTILINE)
    assert found, f"runbooks/{page} has no block of commands below **What to type.**"
    return found.group(1)


@dataclass
class Scene:
    """One run, in a folder of its own, with its card as tr11.toml there."""

    twin: Twin
    folder: Path
    changes: Sequence[str] = ()
    by_mail: bool = False  # a fault is treated by what its mail says, else by its page

    def __post_init__(self) -> None:
        self.slurm = SlurmScheduler(self.twin.environment)
        self.write_card()
        (self.folder / "bin").mkdir()
        self.pages: set[str] = set()  # the detectors whose pages' commands were typed
        self.program("tr11", f'exec {shlex.join(tr11_command())} "$@"')

    def write_card(self, *more: str, tables: str = "") -> None:
        """The card of the commands that are typed from now on; what runs goes on with its own."""
        card = rehearsal_card(self.folder, (*SHAPE, *MAILS, *self.changes, *more))
        (self.folder / "tr11.toml").write_text(card_text(card, "a test") + tables, encoding="utf-8")
        self.paths: RunPaths = card.paths
        self.directory = RunDirectory(card.paths, card.kill_switch)

    def program(self, name: str, script: str) -> None:
        """A program that stands in front of the others on PATH."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    # ------------------------------------------------------------------ commands
    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **self.twin.environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
        }

    def shell(self, commands: str, expect: Sequence[int] = (0,)) -> str:
        """Type commands in the run's folder; each must succeed, and no traceback may ever be shown."""
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        shown = f"{commands}\n-> {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, shown
        assert done.returncode in expect, shown
        return done.stdout

    def status(self, *words: str) -> str:
        """What `tr11 status` says now: the command itself, without the start of another Python."""
        said = io.StringIO()
        with (
            patch.dict(os.environ, self.environment),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(said),
        ):
            code = execute(["status", *words])
        assert code in {0, 1, 3}, said.getvalue()
        return said.getvalue()

    def findings(self, above: str = "") -> set[str]:
        """The detectors with a finding in `tr11 status --json`; those `above` "info" are told by
        mail.
        """
        found = json.loads(self.status("--json"))["findings"]
        return {finding["detector"] for finding in found if finding["severity"] != above}

    def subjects(self, detector: str) -> list[str]:
        """What a detector's findings in `tr11 status --json` are about."""
        found = json.loads(self.status("--json"))["findings"]
        return [finding["subject"] for finding in found if finding["detector"] == detector]

    def _look(self) -> tuple[set[str], list[str]]:
        """The detectors with a finding, and what could not be seen."""
        document = json.loads(self.status("--json"))
        return {finding["detector"] for finding in document["findings"]}, document["unknown"]

    def _is_without(self, detectors: set[str]) -> bool:
        """That all could be seen, and nothing was found."""
        found, unknown = self._look()
        return not unknown and not detectors & found

    def treat(
        self,
        *detectors: str,
        expect: Sequence[int] = (0,),
        after: Callable[[], object] = lambda: None,
        renew: Callable[[], object] = lambda: None,
        **words: str,
    ) -> None:
        """The fault shows, and stays; its page's commands are typed with `words` in place of its
        capitals; it is gone.

        Of several detectors, all must show at once, and all pages must have the same cure. `after`:
        what others do once the commands were typed. `renew`: brings about again what goes away by
        itself. `by_mail`: the commands are those of the mail; one that only says where to look says
        something, and the page is followed. Where mail and page say the same, both are.
        """
        wanted = set(detectors)

        def shows() -> bool:
            if wanted <= self.findings():
                return True
            renew()
            return False

        self.until(shows, f"{wanted}")
        time.sleep(STAYS_SECONDS)
        self.until(shows, f"{wanted} again")
        [commands] = {cure(page_of(detector)) for detector in detectors}
        for word, value in {"REASON": "as the page says", **words}.items():
            commands = re.sub(rf"(?<![A-Z]){word}(?![A-Z])", value, commands)
        left = CAPITALS.search(commands)
        assert left is None, f"nothing was given for {left and left[0]} in\n{commands}"
        mailed = self._mailed(wanted) if self.by_mail else []
        alike = pairs(mailed, commands, self.folder)
        if mailed and not alike:
            type_them(self, mailed)
            after()
            self.until(
                lambda: not wanted & self.findings(above="info"), f"the end of {wanted} by {mailed}"
            )
            return
        self.pages |= wanted
        if alike:
            self._type_both(alike, expect)
        else:
            self.shell(commands, expect)
        after()
        self.until(lambda: self._is_without(wanted), f"the end of {wanted}")

    def page(self, detector: str) -> str:
        """The commands of the page of this detector, which are to be typed now."""
        self.pages.add(detector)
        return cure(page_of(detector))

    def _mailed(self, wanted: set[str]) -> list[str]:
        """What the mails about a fault say to type; nothing where they say no cure.

        A look may find only a part of the fault, and its mails tell of no more: those that count
        tell of every detector whose findings have a cure and are worth a mail.
        """
        told = (wanted - set(LOOKS)) & self.findings(above="info")
        if told:
            return self.until(
                lambda: mailed_commands(self, told), f"mails that say what helps with {told}"
            )
        if wanted <= set(LOOKS):
            mailed = mailed_commands(self, wanted)
            assert type_them(self, mailed, (0, 1, 3)).strip() or not mailed
        return []

    def _type_both(self, alike: list[tuple[str, str]], expect: Sequence[int]) -> None:
        """Type what mail and page both say: a command of the mail's that asks is answered by the
        page's, which says yes.
        """
        for mailed, command in alike:
            if mailed != command:
                told = self.shell(f"{{ {mailed} ; }} 2>&1", (0, 1, 2))
                assert ASKS in told, f"{mailed} did not ask:\n{told}"
            self.shell(command, expect)

    # ------------------------------------------------------------------ the run
    def launch(self, *words: str) -> str:
        """Submit; returns the job's number."""
        return str(json.loads(self.shell(" ".join(("tr11 launch --json", *words))))["job_id"])

    def train(self, steps: int = 3) -> Job:
        """Until the run trains, launched or let go on where it does not; then so many steps more.
        Returns its job.
        """
        if self.directory.kill_switch.exists():
            self.shell("tr11 resume --yes")
        if not self.jobs():
            self.launch("--array", "1-10")
        began = time.time()

        def training() -> Job | None:
            jobs = self.jobs()
            assert jobs, f"nothing of the run is queued that could train\n{self._seen()}"
            for job in jobs:
                done = sum(
                    step["job_id"] == job.raw_id and step["time"] > began for step in self.steps()
                )
                if job.state is JobState.RUNNING and done >= steps:
                    return job
            return None

        found = self.until(training, f"{steps} steps more")
        assert found is not None
        return found

    def stop(self) -> None:
        """Cancel what this run has in the queue, and wait until its nodes are free."""
        while jobs := self.jobs():
            for job in jobs:
                self.slurm.cancel(job.array_id or job.raw_id)
            time.sleep(0.3)

    def steps(self) -> list[dict[str, Any]]:
        return steps_of(self.paths)

    def jobs(self) -> list[Job]:
        """This run's jobs that are not over."""
        return [
            job
            for job in self.slurm.jobs()
            if self.directory.mark in job.comment and not job.state.is_final
        ]

    def running(self) -> Job:
        """Its job; from one task of an array to the next there may be none, and it is waited for."""
        found = self.until(
            lambda: next((job for job in self.jobs() if job.state.is_active), None),
            "a job that runs",
        )
        assert found is not None
        return found

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        """Wait; what did not come in time is shown with what can be seen of the run."""
        return until(condition, what, pause=0.1, context=self._seen)

    def _seen(self) -> str:
        """What a report shows of the run."""
        return f"{self.status()}\n{end_of_file(self.paths.main_log)}"

    # ------------------------------------------------------------------ faults
    def until_still(self) -> None:
        """Until no steps come any more."""
        seen = -1
        while seen != len(self.steps()):
            seen = len(self.steps())
            time.sleep(STILL_SECONDS * min(crowding(), 2.0))

    def heal(self) -> None:
        """The twin and its training are well again."""
        heal(self.twin)

    def age(self, seconds: float, heartbeats: bool = True, logs: bool = True) -> None:
        """As if everything that was written so far had been written so much earlier."""
        if heartbeats:
            for path in self.paths.heartbeats.glob("[0-9]*.json"):
                beat = read_json(path)
                assert beat is not None
                self.heartbeat(path, time=beat["time"] - seconds)
        if logs:
            for path in [self.paths.metrics, *self.paths.attempts.glob("*/phases.jsonl")]:
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                path.write_text(
                    "".join(
                        json.dumps({**line, "time": line["time"] - seconds}) + "\n"
                        for line in lines
                    )
                )
                self.touch(path, seconds)
            self.touch(self.paths.main_log, seconds)

    def heartbeat(self, path: Path, **changes: Any) -> None:
        """Change one rank's heartbeat, and set its file's time to match."""
        value = {**(read_json(path) or {}), **changes}
        write_json(path, value)
        os.utime(path, (value["time"], value["time"]))

    @staticmethod
    def touch(path: Path, seconds: float) -> None:
        """Set a file's times to so long ago."""
        moment = time.time() - seconds
        os.utime(path, (moment, moment))


# ---------------------------------------------------------------------------
# The faults that runbooks treat: how one is registered, and what several of them need.


DAY = 86400.0


class Scenario(Record):
    """How one fault comes about. `is_alone`: in a run of its own; else in the run that most share,
    which goes on.
    """

    detectors: tuple[str, ...]
    play: Callable[[Scene], None]
    changes: tuple[str, ...]
    is_alone: bool


SCENARIOS: list[Scenario] = []
MAIL_SCENARIOS: list[
    Scenario
] = []  # of faults whose page says more than the one cure that their mail has


def scenario(
    *detectors: str, card: tuple[str, ...] = (), alone: bool = False
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers the fault that these detectors find; `card` are changes of the run card."""

    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        SCENARIOS.append(Scenario(detectors, play, card, alone))
        return play

    return register


def mail_scenario(
    *detectors: str, card: tuple[str, ...] = ()
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers a fault, in a run of its own, that is cured by its mail alone."""

    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        MAIL_SCENARIOS.append(Scenario(detectors, play, card, is_alone=True))
        return play

    return register


def submit(scene: Scene, *words: str, ours: bool = True) -> str:
    """A job with the run's name; `ours`: as if `tr11 launch` had queued it."""
    comment = [f"--comment={recorded_comment(scene.directory)}"] if ours else []
    common = [
        f"--job-name={scene.paths.name}",
        "--partition=gpu_p5",
        "--time=10",
        "--output=/dev/null",
    ]
    return subprocess.run(
        ["sbatch", "--parsable", *common, *comment, *words],
        capture_output=True, text=True, check=True, env=scene.environment, cwd=scene.folder,
    ).stdout.strip()  # fmt: skip


def nodes_of(scene: Scene) -> list[str]:
    return sorted(node.name for node in scene.slurm.nodes() if "gpu_p5" in node.partitions)


def set_node(scene: Scene, node: str, state: str, expect: tuple[int, ...] = (0,)) -> None:
    scene.shell(f"scontrol update NodeName={node} State={state} Reason='someone else'", expect)


def saved_now(scene: Scene) -> int:
    """The step of a checkpoint that is made now."""
    scene.train()
    scene.shell("tr11 checkpoint-now --wait --yes")
    newest = read_latest(scene.paths.checkpoints)
    assert newest is not None
    return newest
