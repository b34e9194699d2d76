"""Slurm's commands at their worst: they hang, their wrappers' children hold the pipes, the queue is
full.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cluster.slurm_command import CommandResult, follow_command, run_command

HANGS = "sleep 600 & wait"  # as a site's wrapper around the real command does


def scheduler(folder: Path, command: str, script: str, seconds: float) -> SlurmScheduler:
    """Slurm whose `command` is a script."""
    path = folder / command
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return SlurmScheduler({"PATH": f"{folder}:/usr/bin:/bin"}, timeout_seconds=seconds)


def request(folder: Path, lines: int = 1) -> BatchRequest:
    return BatchRequest("#!/bin/bash\n" + "# a line\n" * lines, "r", 1, 60, "out", folder)


def submit(folder: Path, script: str, seconds: float = 30.0, lines: int = 1) -> str:
    edge = scheduler(folder, "sbatch", script, seconds)
    return edge.submit(request(folder, lines))


@pytest.mark.parametrize("until", [None, "never said"])
def test_a_wrapper_that_hangs_ends_with_its_children(tmp_path: Path, until: str | None) -> None:
    began = time.monotonic()
    with pytest.raises(SchedulerUnreachable, match=r"did not answer within 0\.3 s"):
        run_command(
            ["bash", "-c", HANGS], standard_input="", environment={"PATH": "/usr/bin:/bin"}, timeout_seconds=0.3,
            until=until,
        )  # fmt: skip
    assert time.monotonic() - began < 60.0, "and not the 600 s of what it started"


@pytest.mark.parametrize(
    "lines", [1, 50_000], ids=["a short script", "a script beyond a pipe's room"]
)
def test_an_sbatch_that_hangs_or_reads_nothing(tmp_path: Path, lines: int) -> None:
    with pytest.raises(SchedulerUnreachable, match=r"sbatch did not answer within 0\.5 s"):
        submit(tmp_path, HANGS, 0.5, lines)


def test_a_full_queue_is_told_at_once_and_is_an_answer(tmp_path: Path) -> None:
    """sbatch would try again for minutes, and then have been silent."""
    said = "echo 'sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.' >&2; sleep 600"
    with pytest.raises(SchedulerError) as full:
        submit(tmp_path, said)
    assert not isinstance(full.value, SchedulerUnreachable)
    assert "the cluster's queue is full (MaxJobCount)" in str(full.value)


@pytest.mark.parametrize(
    ("said", "kind", "meaning"),
    [
        (
            "Job violates accounting/QOS policy (job submit limit)",
            SchedulerError,
            "a limit of your account or QoS",
        ),
        (
            "Socket timed out on send/recv operation",
            SchedulerUnreachable,
            "too busy to answer in time; a job may have",
        ),
        (
            "Unable to contact slurm controller (connect failure)",
            SchedulerUnreachable,
            "Unable to contact",
        ),
    ],
)
def test_words_are_told_apart(
    tmp_path: Path, said: str, kind: type[SchedulerError], meaning: str
) -> None:
    with pytest.raises(SchedulerError) as found:
        submit(
            tmp_path,
            f"cat > /dev/null; echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1",
        )
    assert type(found.value) is kind and meaning in str(found.value)


def test_what_was_submitted_is_read_whole(tmp_path: Path) -> None:
    script = f"wc -l > {tmp_path}/lines; echo 4711"
    assert submit(tmp_path, script, lines=50_000) == "4711"
    assert (tmp_path / "lines").read_text().strip() == "50001"


def test_a_machine_without_a_cluster_does_not_answer(tmp_path: Path) -> None:
    said = (
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: fatal: Could not establish a configuration source"
    )
    with pytest.raises(SchedulerUnreachable, match="Could not establish a configuration source"):
        scheduler(tmp_path, "sinfo", f"echo '{said}' >&2; exit 1", 30.0).nodes()


def followed(script: str, seconds: float) -> tuple[CommandResult, list[str]]:
    lines: list[str] = []
    result = follow_command(
        ["bash", "-c", script],
        environment={"PATH": "/usr/bin:/bin"},
        timeout_seconds=seconds,
        on_line=lines.append,
    )
    return result, lines


def test_lines_are_handed_on_and_errors_kept() -> None:
    result, lines = followed("echo one; echo two; echo wrong >&2; exit 3", 300.0)
    assert (result, lines) == (CommandResult(3, "", "wrong\n"), ["one\n", "two\n"])


def test_what_was_said_before_the_time_was_over_counts() -> None:
    began = time.monotonic()
    result, lines = followed(f"echo one; {HANGS}", 5.0)
    assert (result.returncode, lines) == (None, ["one\n"])
    assert time.monotonic() - began < 300.0, "and not the 600 s of what it started"


def test_a_command_that_is_not_there_cannot_be_followed() -> None:
    with pytest.raises(SchedulerUnreachable, match="is this a machine with Slurm's commands"):
        follow_command(
            ["srun-that-is-not-there"], environment={}, timeout_seconds=1.0, on_line=print
        )
