"""What a job on a group of nodes runs: one command on each of them at once, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tr11ops.nodes.search import GroupOutcome, GroupTest
from trainer.contract.documents import record_of
from trainer.contract.record import JsonObject, Record
from trainer.contract.units import shortened

PROBE = "{python} -m trainer.debug.group_probe"
LONGEST_WHY = 200


class GroupRequest(Record):
    """A command (of the shell) for every node of a group, and for how long it may run. Plain
    values, for JSON.
    """

    nodes: tuple[str, ...]
    command: str
    seconds: float
    on_slurm: bool = True


def run_group(request: Mapping[str, Any]) -> dict[str, str]:
    """Run a GroupRequest (as a mapping) inside the allocation; outcome and reason as plain values.

    A command that ends with another status than 0, or not at all, has failed. One that srun could
    not start at all (status 1 without a word of the command's, but srun's own) is unknown.
    """
    asked = record_of(GroupRequest, request)
    words = words_of(asked)
    if asked.on_slurm:
        environment = dict(os.environ)
    else:
        environment = {**os.environ, "SLURMD_NODENAME": asked.nodes[0]}
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=asked.seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _values(GroupOutcome.FAILED, f"did not end within {asked.seconds:g} s")
    except OSError as error:
        return _values(GroupOutcome.UNKNOWN, f"{words[0]}: {error.strerror}")
    return outcome_of(done.returncode, done.stdout)


def words_of(asked: GroupRequest, inside: str = "") -> list[str]:
    """The command line: on Slurm a step of the allocation around it, or of the running job
    `inside`, beside others.
    """
    words = ["sh", "-c", asked.command.replace("{python}", sys.executable)]
    if not asked.on_slurm:
        return words
    if inside:
        there = [f"--jobid={inside}", "--overlap", f"--nodelist={','.join(asked.nodes)}"]
    else:
        there = []
    count = len(asked.nodes)
    return [
        "srun",
        *there,
        f"--nodes={count}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--wait=30",
        *words,
    ]


def outcome_of(status: int, said: str) -> dict[str, str]:
    """What a step's exit status and all that it printed mean, as plain values."""
    if status == 0:
        return _values(GroupOutcome.PASSED, "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("srun: ")]
    refused = [
        line
        for line in lines
        if "Unable to create step" in line or "Unable to confirm allocation" in line
    ]
    if refused and not own:
        return _values(GroupOutcome.UNKNOWN, refused[0])
    last = [line for line in own if not line.endswith(": fine")][-1:]
    last = (
        last
        or [
            line.removeprefix("srun: error: ") for line in lines if line.startswith("srun: error: ")
        ][:1]
    )
    return _values(GroupOutcome.FAILED, ": ".join([f"exit status {status}", *last]))


def group_test(nodes: Sequence[str], values: JsonObject) -> GroupTest:
    """The outcome from `run_group`'s values. Raises ValueError, KeyError where they are something
    else.
    """
    return GroupTest(frozenset(nodes), GroupOutcome(values["outcome"]), str(values["why"]))


def unknown(nodes: Sequence[str], why: str) -> GroupTest:
    """A test that could not be made, and says nothing of its nodes."""
    return GroupTest(frozenset(nodes), GroupOutcome.UNKNOWN, why)


def _values(outcome: GroupOutcome, why: str) -> dict[str, str]:
    return {"outcome": str(outcome), "why": shortened(why, LONGEST_WHY)}
