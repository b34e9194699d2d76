"""The self-resubmitting chain on a real Slurm: on the grid, one of it, noticed when it dies,
repaired once.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plugins.command_server import tr11_command
from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import begin_again
from tests.waiting import Found, until
from tr11ops.base.shipped import shipped
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cron.chain import Link, links_of
from tr11ops.rundir.cron_records import PeriodicJobState, read_chains, read_job
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.twin import Twin
from trainer.contract.paths import RunPaths

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
    assert (
        code == 1 and "the hourly chain is dead" in said and "tr11 cron install --way slurm" in said
    )

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
