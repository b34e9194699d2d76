"""Nodes that the site has drained: what needs them is queued with a warning; what could never start
is refused.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import enter, recorded_comment
from tests.waiting import until
from tr11ops.cli import pulse as pulse_command
from tr11ops.cli.main import execute
from tr11ops.cli.runner import RunContext
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.pending_reasons import Wait, reason_of_job
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.runcard.card import load_card
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, INCLUDED, Version, read_version, revise
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.pulse import WatchedRun, take_pulse
from tr11ops.watchdog.repairs import RESTS

CARD = """
[alerts]
recipients = ["oncall@example.org"]

[resilience]
support_address = "support@site.example"

[watch]
act = true
"""
DRAINED = ("jean-zay-iam01", "jean-zay-iam02")
# of 6 nodes, of which 2 are drained
FIVE = ("--set", "slurm.nodes=5", "--set", "batch.global_batch_size=10")


def scontrol(*words: str) -> None:
    subprocess.run(
        ["scontrol", *words], check=True, capture_output=True, text=True, env=dict(os.environ)
    )


@pytest.fixture
def run(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunDirectory]:
    """A card in the current folder, on a twin of which two nodes are drained."""
    enter(twin, tmp_path, monkeypatch)
    path = write_card(tmp_path, extra=CARD)
    card = load_card(path, [], {}, directory=tmp_path)
    scontrol("update", f"nodename={','.join(DRAINED)}", "state=drain", "reason=memory")
    yield RunDirectory(card.paths, card.kill_switch)
    for job in slurm.jobs():
        if not job.state.is_final:
            slurm.cancel(job.array_id or job.raw_id)
    for name in set(DRAINED) - usable(slurm):
        scontrol("update", f"nodename={name}", "state=resume")
    until(
        lambda: all(node.states == {"idle"} for node in slurm.nodes()),
        "an idle twin",
        context=slurm.nodes,
    )


@pytest.fixture
def type_it(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Type a command for the card; returns its exit status and all that it said."""

    def typed(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = execute([*words, "--run", "small.toml"])
        return code, "".join(capsys.readouterr())

    return typed


def queued(slurm: SlurmScheduler) -> Job:
    [job] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    assert job.state is JobState.PENDING
    return job


def test_what_needs_drained_nodes_is_queued_and_the_site_is_asked(
    run: RunDirectory, slurm: SlurmScheduler, type_it: Callable[..., tuple[int, str]]
) -> None:
    code, said = type_it("launch", "--scheduler", "slurm", "--array", "1-3", *FIVE)
    assert code == 0, said
    assert (
        "5 are needed, 4 can be used now (jean-zay-iam01, jean-zay-iam02 cannot): the job will wait"
        in said
    )
    assert "warning  scheduler: slurm cannot place it at this moment" in said
    assert "told oncall@example.org, support@site.example" in said
    first = queued(slurm)
    assert first.pending_tasks == (1, 2, 3) and reason_of_job(first).wait is Wait.PASSES

    code, said = type_it("launch", "--scheduler", "slurm", "--replace", "--yes", *FIVE)
    assert code == 0, said
    until(
        lambda: first.raw_id not in {job.raw_id for job in slurm.jobs() if not job.state.is_final},
        "the new array alone",
        context=slurm.jobs,
    )
    assert queued(slurm).pending_tasks == (1, 2, 3)


def test_a_dead_job_is_repaired_while_nodes_are_drained(
    run: RunDirectory, slurm: SlurmScheduler, type_it: Callable[..., tuple[int, str]]
) -> None:
    """By a person, and by the watchdog that may act."""
    for act in (False, True):
        made = subprocess.run(
            ["sbatch", "--parsable", "--job-name=small", f"--comment={recorded_comment(run)}", "--hold", "--wrap=true"],
            capture_output=True, text=True, check=True, cwd=run.root.parent,
        )  # fmt: skip
        number = made.stdout.strip()
        slurm.run_after(number, "1")
        dead = subprocess.run(
            ["sbatch", "--parsable", "--job-name=gone", "--hold", "--wrap=true"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        scontrol("update", f"jobid={number}", f"dependency=afterok:{dead}")
        slurm.cancel(dead)
        slurm.release(number)
        until(
            lambda number=number: "NeverSatisfied" in slurm.job(number).reason,
            "a dead job",
            context=slurm.jobs,
        )
        if act:
            found = watch(run)
            assert not any("NOT done" in line for line in found), found
        else:
            code, said = type_it("launch", "--scheduler", "slurm", "--repair", "--yes", *FIVE)
            assert code == 0 and "told oncall@example.org, support@site.example" in said, said
        until(
            lambda number=number: slurm.job(number).state is JobState.CANCELLED,
            "the dead job's end",
        )
        slurm.cancel(queued(slurm).raw_id)
        until(
            lambda: (
                not [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
            ),
            "an end",
        )


def test_excluded_nodes_return_once_they_are_repaired_or_have_rested(
    run: RunDirectory, slurm: SlurmScheduler, type_it: Callable[..., tuple[int, str]]
) -> None:
    """The site resumes what it had drained; and what an attempt waits for has been out for an hour."""
    repaired, rested = DRAINED[0], "jean-zay-iam03"
    assert type_it("launch", "--scheduler", "slurm", "--array", "1-3", *FIVE)[0] == 0
    for name in (repaired, rested):
        assert exclude(run, name, why="a launch was lost", owner=AUTOMATIC_OWNER, days=14)
    watch(run)
    assert standing(run) == {repaired: NodeStanding.EXCLUDE, rested: NodeStanding.EXCLUDE}
    listed = read_version(run.exclusions).exclusions
    assert {one.node for one in listed if one.out is not None} == {repaired}

    scontrol("update", f"nodename={repaired}", "state=resume")
    until(lambda: repaired in usable(slurm), f"{repaired} is in service", context=slurm.nodes)
    watch(run)
    assert standing(run) == {repaired: NodeStanding.RETURNED, rested: NodeStanding.EXCLUDE}

    def an_hour_ago(version: Version) -> Version:
        entries = (
            replace(one, since=(one.since or 0.0) - RESTS[0]) if one.node == rested else one
            for one in version.exclusions
        )
        return replace(version, exclusions=tuple(entries))

    assert revise(run, an_hour_ago)

    def both_are_back() -> bool:
        """Slurm may still be at it to give the waiting job its new list of nodes."""
        watch(run)
        return set(standing(run).values()) == {NodeStanding.RETURNED}

    until(both_are_back, f"{rested} is used again", context=slurm.jobs)
    kinds = [(one.kind, one.data.get("node")) for one in read_journal(run.journal).entries]
    assert [node for kind, node in kinds if kind == INCLUDED] == [repaired, rested]


def standing(directory: RunDirectory) -> dict[str, NodeStanding]:
    version = read_version(directory.exclusions)
    found = (*version.exclusions, *version.suspects)
    return {one.node: NodeStanding(one.state) for one in found}


def usable(slurm: SlurmScheduler) -> set[str]:
    return {node.name for node in slurm.nodes() if node.is_usable}


def watch(directory: RunDirectory) -> tuple[str, ...]:
    """One pass of the watchdog, which may act; its lines."""
    context = RunContext("small.toml", (FIVE[1], FIVE[3]))
    reader, hand = pulse_command._edges("slurm")
    assert hand is not None
    actuator = pulse_command._actuator(context, hand)
    card = context.card
    return take_pulse(
        WatchedRun(card, directory, reader, "root", "small.toml"), actuator, email=True
    ).lines


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (("slurm.gpus_per_node=16",), 2, "slurm.gpus_per_node: 16 GPUs a node are needed"),
        (
            ("slurm.nodes=7", "batch.global_batch_size=14"),
            1,
            "nodes: 7 are needed, there are 6 of partition gpu_p5",
        ),
        (("slurm.cpus_per_task=999",), 2, "slurm.cpus_per_task: 999 cores a node are needed"),
    ],
    ids=["gpus", "nodes", "cores"],
)
def test_what_could_never_start_is_refused(
    run: RunDirectory,
    type_it: Callable[..., tuple[int, str]],
    changes: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    more = [word for change in changes for word in ("--set", change)]
    found, said = type_it("launch", "--scheduler", "slurm", *FIVE, *more)
    assert (found, words in said) == (code, True), said
    assert not run.root.exists()
