"""Before an array is held for a fault that may be a node's, one task runs without the suspects:
real Slurm, seven nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.runbook_mails import MAILS
from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Message
from tr11ops.cli import pulse as command
from tr11ops.cli.main import execute
from tr11ops.cli.runner import RunContext
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import Version, ledger_text, read_version
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.pulse import WatchedRun, take_pulse

NODES = tuple(f"jean-zay-iam0{number}" for number in range(1, 8))
GIVEN_UP_SECONDS = 4 * 3600.0  # three times the patience, and more
FOUR = ("slurm.nodes=4", "slurm.spare_nodes=0", "batch.global_batch_size=16")


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    """Seven nodes of its own, of which a run of three leaves two in peace that may be bad."""
    require_slurm()
    with Twin.up(TwinPlan(name="suspects", nodes=7, gpus=0, cpu_nodes=0), twin_home) as made:
        yield made


def with_abort(stage: SmallRun, values: tuple[str, ...], variable: str = "SLURMD_NODENAME") -> str:
    """A change of the card: the workers where the variable has one of these values abort, all at
    one moment: none is ended by the death of another before it has died itself.
    """
    folder = stage.folder / "broken-library"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys, time\n"
        "def abort_together():\n"
        "    step = os.environ['SLURM_JOB_ID'] + '.' + os.environ['SLURM_STEP_ID']\n"
        f"    place = pathlib.Path({str(folder)!r}) / step\n"
        "    place.mkdir(exist_ok=True)\n"
        "    (place / (os.environ['SLURM_NODEID'] + '-' + str(os.getpid()))).touch()\n"
        "    until = time.monotonic() + 20\n"
        f"    while len(os.listdir(place)) < {2 * min(len(values), 4)} and time.monotonic() < until:\n"
        "        time.sleep(0.005)\n"
        "    os.abort()\n"
        f"if os.environ.get({variable!r}) in {values!r} and 'tr11ops.twin.stand_in' in sys.orig_argv:\n"
        "    os.register_at_fork(after_in_child=abort_together)\n"
    )
    return f'slurm.environment={{PYTHONPATH="{folder}"}}'


def test_two_nodes_that_abort_are_left_out_and_the_training_goes_on(stage: SmallRun) -> None:
    """Two of four die at one moment, so that nothing but a task without them tells whether they are
    at fault.
    """
    stage.launch(8, *FOUR, with_abort(stage, NODES[:2]))
    stage.wait(
        lambda: stage.iteration() > 5 or stage.queued().reason.startswith("JobHeld"),
        "steps, or a hold",
    )
    assert stage.iteration() > 5, stage.paths.main_log.read_text()
    trains = stage.attempts()[-1]
    assert len(stage.attempts()) == 3, "most_tasks_per_fault, and the one task that tells"
    assert not set(stage.launches(trains)[-1]["nodes"]) & set(NODES[:2])
    assert {entry.node for entry in read_version(stage.directory.exclusions).exclusions} == set(
        NODES[:2]
    )
    stage.wait_for_excluded(*NODES[:2])


def test_the_same_abort_on_all_nodes_is_the_softwares(stage: SmallRun) -> None:
    """Nothing helps: the array is held, and no node is left out or under suspicion."""
    stage.launch(8, *FOUR, with_abort(stage, NODES))
    stage.wait_for_hold()
    last = stage.attempts()[-1]
    stage.wait_for_verdict(last)
    assert len(stage.attempts()) <= 3 and stage.verdict(last)["blamed"] == []
    known = read_version(stage.directory.exclusions)
    assert (known.exclusions, known.suspects) == ((), ())
    assert stage.queued().excluded == ()


def test_an_abort_that_follows_to_other_nodes_clears_the_suspects(stage: SmallRun) -> None:
    """It is of the first two places of a launch, on whatever nodes: the task without the suspects
    fails the same way.
    """
    stage.launch(8, *FOUR, with_abort(stage, ("0", "1"), "SLURM_NODEID"))
    stage.wait_for_hold()
    last = stage.attempts()[-1]
    stage.wait_for_verdict(last)
    assert len(stage.attempts()) == 3 and not set(stage.launches(last)[0]["nodes"]) & set(NODES[:2])
    verdict = stage.verdict(last)
    assert (verdict["cause"], verdict["blamed"], verdict["held"]) == ("software", [], [stage.array])
    assert f"the same fault came back without {NODES[0]}, {NODES[1]}" in verdict["message"]
    known = read_version(stage.directory.exclusions)
    assert (known.exclusions, known.suspects) == ((), ()) and stage.queued().excluded == ()


def test_the_mails_accuse_no_node_of_what_is_the_softwares(stage: SmallRun) -> None:
    """One rank dies at one iteration, on whatever node. The first attempt's mail says what is
    known, and that the next one will tell; the second's goes on in its thread, and no node is left
    under suspicion.
    """
    stage.paths.root.mkdir()
    inject(stage.twin, "bad-sample", path=str(stage.paths.root))
    stage.launch(5, *FOUR, *MAILS, "rehearsal.step_seconds=40")
    mails: dict[str, Message] = {}

    def is_told(says: str) -> bool:
        execute(["pulse"])
        mails.update(
            {entry.message.id: entry.message for entry in waiting_entries(stage.directory)}
        )
        return any(says in " ".join(mail.body.split()) for mail in mails.values())

    stage.wait(lambda: is_told("software or data, not the nodes"), "the mail with the verdict")
    first, last = list(mails.values())
    assert (
        "jean-zay" not in first.subject
        and "whether it is a node's fault, the next attempt tells"
        in " ".join(first.body.partition("Type:")[0].split())
    )
    assert (last.kind, last.thread) == (
        "raised",
        first.message_id,
    ) and "the last 2 attempts failed" in last.subject
    struck = stage.launches(stage.attempts()[0])[0]["suspects"]
    assert f"suspected before, and cleared by it: {struck[0]}" in last.body
    known = read_version(stage.directory.exclusions)
    assert (known.exclusions, known.suspects) == ((), ())


def test_what_another_run_suspects_is_avoided_with_the_first_suspicion_here(
    stage: SmallRun, tmp_path: Path
) -> None:
    """The two runs share a folder of the site. Before that the node is used, after the others: here
    there is none.
    """
    site = tmp_path / "site"
    site.mkdir()
    known = Exclusion(
        NODES[1], "it died", "tr11", state="suspect", fault="died: the worker was ended by sigkill"
    )
    other = site / f"{'1' * 32}.json"
    other.write_text(ledger_text(1, Version(1, (), suspects=(known,))))
    stage.launch(3, *FOUR, f"resilience.shared_exclusions={site}")
    first = stage.train()
    inject(stage.twin, "worker-crash", node=NODES[1])
    second = stage.train(attempt=1)
    assert [launch["avoided"] for launch in stage.launches(first)] == [[NODES[1]]]
    assert NODES[1] not in stage.launches(second)[0]["nodes"]
    [entry] = read_version(stage.directory.exclusions).exclusions
    assert (entry.node, entry.state) == (NODES[1], "avoid")
    [ours] = [path for path in site.glob("*.json") if path != other]
    assert [entry.node for entry in read_version(ours).exclusions] == [NODES[1]]


def test_a_node_that_two_launches_wait_for_in_vain_is_used_last_by_the_next_task(
    stage: SmallRun,
) -> None:
    """Whether the one that was waited for or the one that waited is at fault is not known: nothing
    is left out.
    """
    stage.launch(3, *FOUR, "rehearsal.collective_seconds=10")
    first = stage.train()
    inject(stage.twin, "step-hang", node=NODES[1])
    stage.train(attempt=1)
    assert [launch["suspects"] for launch in stage.launches(first)] == [[NODES[1]], [NODES[1]]]
    known = read_version(stage.directory.exclusions)
    assert ([entry.node for entry in known.suspects], known.exclusions) == ([NODES[1]], ())
    assert stage.queued().excluded == ()


def test_after_a_hang_the_second_launch_runs_on_the_spare(stage: SmallRun) -> None:
    """The node hangs each time that it is used: the first hang is the only one."""
    spare = ("slurm.nodes=4", "slurm.spare_nodes=1", "batch.global_batch_size=16")
    stage.launch(2, *spare, "rehearsal.collective_seconds=10")
    first = stage.train()
    inject(stage.twin, "step-hang", node=NODES[1])
    reached = stage.iteration()
    stage.wait(lambda: len(stage.launches(first)) > 1, "the second launch")
    stage.wait(lambda: stage.iteration(first) > reached + 5, "steps of the second launch")
    hung, goes_on = stage.launches(first)
    assert hung["suspects"] == [NODES[1]] and hung["decision"].endswith(" takes its place")
    assert NODES[1] not in goes_on["nodes"] and len(stage.attempts()) == 1


@pytest.mark.parametrize("spares", [0, 3])
def test_the_start_after_a_hang_is_without_the_frozen_node(stage: SmallRun, spares: int) -> None:
    """The watchdog ends the job. Without spares the queue is kept off the node once, while others are
    free; an attempt that has all nodes puts a spare in its place.
    """
    stage.launch(3, *FOUR, f"slurm.spare_nodes={spares}")
    first = stage.train()
    inject(stage.twin, "worker-stop", node=NODES[1])

    def acted() -> list[str]:
        reader, hand = command._edges("slurm")
        assert hand is not None
        run = WatchedRun(stage.card, stage.directory, reader, "root")
        later = time.time() + GIVEN_UP_SECONDS
        actuator = command._actuator(RunContext(), hand)
        seen = take_pulse(run, actuator, email=False, now=lambda: later)
        return [action.name for action in seen.plan.actions]

    names = acted()
    assert names == (["cancel"] if spares else ["exclude", "cancel"])
    second = stage.train(attempt=1)
    [begun] = stage.launches(second)
    assert len(stage.launches(first)) == 1 and NODES[1] not in begun["nodes"]
    stage.wait_for_excluded()
    [entry] = read_version(stage.directory.exclusions).suspects
    assert (entry.node, entry.fault) == (NODES[1], "hang") and "is stopped (SIGSTOP)" in entry.why
    assert ("a spare takes its place" in stage.paths.main_log.read_text()) == bool(spares)
