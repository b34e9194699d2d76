"""Chains on a real Slurm, of jobs that queue each other: of the training, dead ones and allocations without
their batch script too; and of the watchdog.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.command_server import tr11_command
from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.rehearsal_inputs import SMALL, ends_of, rehearsal_card, steps_of
from tests.twin.small_run import begin_again, enter, recorded_comment
from tests.waiting import Found, end_of_file, until
from tr11ops.base.shipped import shipped
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cron.chain import Link, links_of
from tr11ops.rundir.cron_records import PeriodicJobState, read_chains, read_job
from tr11ops.rundir.paths import RunDirectory, new_tag
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths


@dataclass
class Scene:
    """A rehearsal in miniature on a twin, in a folder of its own."""

    folder: Path
    slurm: SlurmScheduler
    changes: tuple[str, ...]
    capture: pytest.CaptureFixture[str]

    @property
    def directory(self) -> RunDirectory:
        card = rehearsal_card(self.folder, self.changes)
        return RunDirectory(card.paths, card.kill_switch)

    def tr11(self, *words: str) -> tuple[int, str, str]:
        self.capture.readouterr()
        options = [word for change in (*SMALL, *self.changes) for word in ("--set", change)]
        code = execute(
            [words[0], "--run", "rehearsal", "--scheduler", "slurm", *words[1:], *options]
        )
        out, err = self.capture.readouterr()
        return code, out, err

    def jobs(self) -> list[Job]:
        return [job for job in self.slurm.jobs() if self.directory.mark in job.comment]

    def wait(self, condition: Callable[[], Any]) -> Any:
        return until(
            condition,
            pause=0.2,
            context=lambda: [*self.jobs(), end_of_file(self.directory.paths.main_log)],
        )

    def log(self) -> str:
        main_log = self.directory.paths.main_log
        return main_log.read_text(errors="replace") if main_log.exists() else ""


def scene_in(
    twin: Twin,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capture: pytest.CaptureFixture[str],
    *changes: str,
) -> Scene:
    enter(twin, folder, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return Scene(folder, SlurmScheduler(twin.environment), changes, capture)


@pytest.fixture
def scene(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Scene:  # fmt: skip
    """On the shared twin; the `slurm` fixture cancels what is left."""
    return scene_in(twin, tmp_path, monkeypatch, capsys, "run.exit_interval=4", "batch.train_samples=80",
                 "schedule.decay_samples=80")  # fmt: skip


def test_each_job_queues_the_next_one_until_the_run_has_ended(scene: Scene) -> None:
    """Three attempts of four steps; never more than one job that runs and one that waits."""
    code, out, err = scene.tr11("launch", "--array", "1-3", "--set", "slurm.chain=self", "--json")
    assert code == 0 and json.loads(out)["chain"] == "self", out + err
    most = 0

    def is_over() -> bool:
        nonlocal most
        jobs = scene.jobs()
        most = max(most, sum(not job.state.is_final for job in jobs))
        return len(jobs) == 3 and all(job.state.is_final for job in jobs)

    scene.wait(is_over)
    records = scene.directory.read_submissions()
    assert most <= 2 and [record.left for record in records] == [2, 1, 0]
    assert [record.dependency for record in records] == [
        None,
        *(f"afterany:{one.job_id}" for one in records[:2]),
    ]
    assert [job.state for job in scene.jobs()] == [JobState.COMPLETED] * 3
    assert [step["iteration"] for step in steps_of(scene.directory.paths)] == list(range(1, 11))
    assert [end.reason for end in ends_of(scene.directory.paths)] == [
        "exit-interval",
        "exit-interval",
        "finished",
    ]


def test_a_dead_chain_is_launched_again(scene: Scene) -> None:
    """`afterok` behind a job that failed waits for ever; `--repair` puts an attempt in its place."""
    directory = scene.directory
    failed = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 1"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    scene.wait(lambda: (job := scene.slurm.job(failed)) is not None and job.state.is_final)
    dead = subprocess.run(
        ["sbatch", "--parsable", f"--dependency=afterok:{failed}", f"--comment={recorded_comment(directory)}",
         "--job-name=rehearsal", "--output=/dev/null", "--wrap=true"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    scene.wait(lambda: any("NeverSatisfied" in job.reason for job in scene.jobs()))
    status = json.loads(scene.tr11("status", "--json")[1])
    assert any(finding["detector"] == "dead-chain" for finding in status["findings"])
    code, out, err = scene.tr11("launch", "--repair", "--dry-run", "--json")
    assert code == 0 and [step["job"] for step in json.loads(out)["steps"]] == [dead], err
    code, out, err = scene.tr11("launch", "--repair", "--yes", "--json")
    assert code == 0, err
    [number] = json.loads(out)["submitted"]
    states = {job.raw_id: job.state for job in scene.jobs()}
    assert states[dead] is JobState.CANCELLED and not states[number].is_final


def test_a_queued_array_gets_the_new_card_behind_the_live_task(scene: Scene) -> None:
    """Slurm's own words for half an array: its waiting tasks go, the one that runs stays, the new
    ones wait for it.
    """
    old = subprocess.run(
        ["sbatch", "--parsable", "--array=1-4%1", f"--comment={recorded_comment(scene.directory)}",
         "--job-name=rehearsal", "--output=/dev/null", "--wrap=sleep 600"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    scene.wait(lambda: any(job.state is JobState.RUNNING for job in scene.jobs()))
    code, out, err = scene.tr11("launch", "--replace", "--yes", "--json")
    assert code == 0, out + err
    change = json.loads(out)
    assert [step["job"] for step in change["steps"]] == [f"{old}_[2-4%1]"]
    [new] = change["submitted"]
    queue = [job for job in scene.jobs() if not job.state.is_final]
    assert [(job.array_id, job.state) for job in queue if job.array_id == old] == [
        (old, JobState.RUNNING)
    ]
    [queued] = [job for job in queue if job.array_id == new]
    assert queued.pending_tasks == (1, 2, 3) and old in queued.dependency
    scene.slurm.cancel(old)
    scene.wait(
        lambda: any(job.array_id == new and job.state is JobState.RUNNING for job in scene.jobs())
    )


def test_a_namesake_in_another_directory_is_refused(scene: Scene) -> None:
    comment = RunDirectory(
        RunPaths(scene.folder / "other", "rehearsal", "main"), scene.folder / "k"
    ).comment(new_tag())
    subprocess.run(
        ["sbatch", "--parsable", f"--chdir={scene.folder}", f"--comment={comment}", "--job-name=rehearsal",
         "--output=/dev/null", "--wrap=sleep 600"], check=True, capture_output=True,
    )  # fmt: skip
    code, out, _ = scene.tr11("launch", "--dry-run")
    assert code == 1 and f"in {scene.folder}; if that is the run you mean" in out
    assert scene.tr11("launch", "--dry-run", "--allow-namesake")[0] == 0


@pytest.fixture
def mortal(twin_home: Path) -> Iterator[Twin]:
    """A twin whose nodes may die: Slurm notices after five seconds."""
    require_slurm()
    with Twin.up(
        TwinPlan(name="mortal", nodes=3, cpu_nodes=0, slurmd_timeout_seconds=5), twin_home
    ) as running:
        yield running


@pytest.mark.soak
def test_an_allocation_without_its_batch_script_is_ended(
    mortal: Twin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batch host dies in a job that survives its nodes: it would run on for ever."""
    scene = scene_in(mortal, tmp_path, monkeypatch, capsys, "slurm.spare_nodes=1")
    tag = new_tag()
    number = subprocess.run(
        ["sbatch", "--parsable", "--no-kill", "-N3", f"--comment={scene.directory.comment(tag)}",
         "--job-name=rehearsal", "--output=/dev/null", "--wrap=sleep 600"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    [job] = scene.wait(lambda: [job for job in scene.jobs() if job.state is JobState.RUNNING])
    write_json(
        scene.directory.paths.attempt(number) / "attempt.json",
        {"nodes": job.nodes, "submission": tag},
    )
    assert scene.tr11("launch", "--repair", "--json", "--yes")[1].count('"cancel"') == 0
    inject(mortal, "node-dead", node=job.nodes[0])
    status: dict[str, Any] = scene.wait(lambda: zombies(scene))
    assert status["fix"].startswith("tr11 launch") and status["fix"].endswith("--repair")
    assert [entry.state for entry in scene.jobs()] == [JobState.RUNNING]
    code, out, err = scene.tr11("launch", "--repair", "--yes", "--json")
    assert code == 0 and [step["job"] for step in json.loads(out)["steps"]] == [number], out + err
    scene.wait(lambda: all(entry.state is not JobState.RUNNING for entry in scene.jobs()))


def zombies(scene: Scene) -> dict[str, Any] | None:
    findings = json.loads(scene.tr11("status", "--json")[1])["findings"]
    return next((finding for finding in findings if finding["detector"] == "zombie"), None)


# ---------------------------------------------------------------------------
# The self-resubmitting chain on a real Slurm: on the grid, one of it, noticed when it dies,
# repaired once.


ROOT = Path(__file__).parents[2]
EVERY = 6  # seconds from link to link: a link's work is done in less, also beside other work
SETTINGS = ("cron.partition=compil", 'cron.skip=["pulse", "digest"]')


class Place:
    """A folder with a card whose periodic jobs run on the twin."""

    def __init__(self, folder: Path, twin: Twin, slurm: SlurmScheduler):
        self.folder, self.slurm = folder, slurm
        self.card = write_card(folder)
        self.environment = {
            **os.environ,
            **twin.environment,
            "PYTHONPATH": str(ROOT),
            "TR11_RUN": str(self.card),
        }
        self.directory = RunDirectory(
            RunPaths(folder / "run", "small", "main"), folder / "run" / "kill-switch"
        )
        self.directory.root.mkdir()

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [*tr11_command(), "cron", *words]
        for change in SETTINGS:
            command += ["--set", change]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def cron(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in out + err
        return process.returncode, out + err

    def waiting(self) -> tuple[Link, ...]:
        return links_of(self.slurm.jobs(), self.directory.mark, "hourly")

    def dues(self) -> list[int]:
        """Due times of all links that there ever were."""
        found = [
            job.comment.split(":")
            for job in self.slurm.jobs()
            if job.comment.startswith("tr11-cron:hourly:")
        ]
        return sorted(
            int(parts[3].partition("@")[0])
            for parts in found
            if parts[3].endswith(self.directory.mark)
        )

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        def outputs() -> str:
            return "\n".join(path.read_text() for path in self.folder.rglob("*.out"))

        return until(condition, what, pause=0.2, context=outputs)


@pytest.fixture
def place(tmp_path: Path, twin: Twin, slurm: SlurmScheduler) -> Iterator[Place]:
    made = Place(tmp_path, twin, slurm)
    yield made
    made.cron("remove", "--way", "slurm", "--yes")
    made.until(lambda: not made.waiting(), "the links are over")


def test_the_chain_does_not_drift_dies_aloud_and_is_repaired(place: Place) -> None:
    installs = [
        place.start("install", "--way", "slurm", "--yes", "--json", "--round-seconds", str(EVERY))
        for _ in (1, 2)
    ]
    answers = [process.communicate(timeout=300) for process in installs]
    assert sorted(json.loads(out)["action"] for out, _ in answers) == ["installed", "unchanged"], (
        answers
    )

    def exact() -> bool:
        """Three links in a row, each the interval after the one before (a slow machine may miss a
        point).
        """
        steps = [later - earlier for earlier, later in itertools.pairwise(place.dues()[1:])]
        return any(steps[index : index + 2] == [EVERY, EVERY] for index in range(len(steps)))

    place.until(exact, "three rounds")
    assert all(due % EVERY == 0 for due in place.dues()[1:])
    assert len(set(place.dues())) == len(place.dues())  # no point twice
    state = read_job(place.directory, "nodes-check")
    assert isinstance(state, PeriodicJobState) and (state.way, state.exit_code, state.runs) == (
        "slurm",
        0,
        1,
    )
    chains = read_chains(place.directory)
    assert isinstance(chains, tuple) and [chain.name for chain in chains] == ["hourly"]

    for link in place.waiting():
        place.slurm.cancel(link.job.raw_id)
    place.until(lambda: not place.waiting(), "the chain is cancelled")
    code, said = place.cron("status")
    assert code == 1 and "the hourly chain is dead" in said
    assert re.search(r"tr11 cron install --run \S+ --way slurm", said), said

    assert place.cron("install", "--yes", "--round-seconds", "3600")[0] == 0
    place.until(lambda: [link.job.state.value for link in place.waiting()] == ["PENDING"] and place.waiting()[0].due % 3600 == 0, "repaired")  # fmt: skip
    assert (
        place.cron("install", "--yes", "--round-seconds", "3600", "--json")[1].count('"unchanged"')
        == 1
    )
    code, said = place.cron("status")
    assert code == 0, said
    assert len(place.waiting()) == 1


def test_a_shipped_script_runs_its_job(place: Place) -> None:
    script = shipped("cron", "cron.hourly", "tr11-nodes-check.slurm")
    path = f"{Path(sys.executable).parent}:{place.environment['PATH']}"
    done = subprocess.run(
        ["sbatch", "--partition=compil", str(script)],
        cwd=place.folder, env={**place.environment, "PATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def has_ended() -> bool:
        state = read_job(place.directory, "nodes-check")
        return isinstance(state, PeriodicJobState) and not state.is_running

    place.until(has_ended, "the job's round")
    state = read_job(place.directory, "nodes-check")
    assert isinstance(state, PeriodicJobState) and (state.way, state.exit_code) == ("slurm", 0)


@pytest.mark.parametrize("lost", ["run", "all"])
def test_a_chain_outlives_what_is_not_mounted(place: Place, lost: str) -> None:
    """Without the run directory the next link is queued all the same; without the card's folder the
    link itself is.
    """
    code, said = place.cron("install", "--way", "slurm", "--yes", "--round-seconds", "3600")
    assert code == 0, said

    def rests() -> list[Link]:
        """The one link that waits for its time, while none runs."""
        links = place.waiting()
        return list(links) if [link.job.reason for link in links] == ["BeginTime"] else []

    def begin() -> Link:
        (link,) = place.until(rests, "a link that waits for its time")
        begin_again(link.job.raw_id, place.environment)
        return link

    place.until(rests, "the first link is over")
    gone = place.directory.root if lost == "run" else place.folder
    hidden = gone.rename(gone.with_name(f"{gone.name}-hidden"))
    try:
        if lost == "run":
            gone.mkdir()  # the mount point
        first = begin()

        def has_looked() -> list[Link]:
            """The link that waits after the one that began again has run."""
            return [one for one in rests() if one.number != first.number or restarts(place, first)]

        (second,) = place.until(has_looked, "it has looked")
        assert (second.number == first.number) is (lost == "all")
        assert second.token == first.token
        if lost == "run":
            assert not list(gone.iterdir()), "nothing is made in its place"
            gone.rmdir()
    finally:
        hidden.rename(gone)
    begin()

    def goes_on() -> list[Link]:
        return [one for one in rests() if one.number > second.number]

    (third,) = place.until(goes_on, "the chain goes on")
    assert third.token == first.token


def restarts(place: Place, link: Link) -> int:
    command = ["scontrol", "show", "job", link.job.raw_id]
    shown = subprocess.run(command, env=place.environment, capture_output=True, text=True).stdout
    return int(shown.partition("Restarts=")[2].split()[0]) if "Restarts=" in shown else 0
