"""What a stand-in's worker reads of the twin's faults: those of its node, its job and its run,
while they last.
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.twin.rehearsal_inputs import rehearsal_card
from tr11ops.twin.fault_store import FaultStore, InjectedFault, new_fault
from tr11ops.twin.plan import TwinFolders
from tr11ops.twin.stand_in import ailments
from tr11ops.twin.stand_in.ailments import Ailments


@pytest.fixture
def store(tmp_path: Path) -> FaultStore:
    folders = TwinFolders(tmp_path / "twin")
    folders.logs.mkdir(parents=True)
    return FaultStore(folders)


@pytest.fixture
def worker(store: FaultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ailments:
    """A worker of job 12 on node n1, which looks at every question."""
    monkeypatch.setattr(ailments, "LOOK_SECONDS", 0.0)
    environment = {
        "SLURM_CONF": str(store.folders.slurm_conf),
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_ID": "12",
    }
    return Ailments(rehearsal_card(tmp_path), environment)


def broken(store: FaultStore, kind: str, target: str, **details: str) -> InjectedFault:
    return store.complete(replace(new_fault(kind, target, None), details=details))


def test_a_hang_is_of_one_job_on_one_node(store: FaultStore, worker: Ailments) -> None:
    broken(store, "step-hang", "n2", job="12")
    other = broken(store, "step-hang", "n1", job="11")
    assert not worker.step_hangs()
    store.remove(other)
    mine = replace(new_fault("step-hang", "n1", None), details={"job": "12"})
    store.write(mine)
    assert not worker.step_hangs(), "it is not yet done"
    store.complete(mine)
    assert worker.step_hangs()
    store.remove(mine)
    assert not worker.step_hangs()


def test_a_job_waits_for_data_on_every_node(store: FaultStore, worker: Ailments) -> None:
    broken(store, "data-wait", "n2", job="11")
    assert not worker.data_are_missing()
    broken(store, "data-wait", "n3", job="12")
    assert worker.data_are_missing()


def test_only_the_slow_node_is_slow(store: FaultStore, worker: Ailments) -> None:
    broken(store, "slow-steps", "n2", factor="8")
    assert worker.slowness() == 1.0
    broken(store, "slow-steps", "n1", factor="8")
    assert worker.slowness() == 8.0


def test_only_the_weights_of_the_node_drift(store: FaultStore, worker: Ailments) -> None:
    broken(store, "weights-drift", "n2")
    assert not worker.weights_drift()
    broken(store, "weights-drift", "n1")
    assert worker.weights_drift()


def test_the_clock_is_wrong_as_long_as_the_fault_lasts(
    store: FaultStore, worker: Ailments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    worker.mistake_the_time()
    assert time.time() == 1000.0
    fault = broken(store, "clock-ahead", "n1", seconds="300")
    assert time.time() == 1300.0
    store.remove(fault)
    assert time.time() == 1000.0


def test_wild_numbers_end_where_data_are_skipped(
    store: FaultStore, worker: Ailments, tmp_path: Path
) -> None:
    card = rehearsal_card(tmp_path)
    broken(store, "loss-spike", str(card.paths.root.resolve()), iteration="40")
    assert worker.numbers(39, 2.5, 1.0) == (2.5, 1.0)
    seen = [worker.numbers(iteration, 2.5, 1.0) for iteration in range(40, 60)]
    assert sum(math.isnan(loss) for loss, _ in seen) == 17 and {norm for _, norm in seen} == {
        1.0,
        500.0,
    }
    environment = {"SLURM_CONF": str(store.folders.slurm_conf)}
    skips = rehearsal_card(tmp_path, ['data.skip_ranges=["40-50"]'])
    assert Ailments(skips, environment).numbers(40, 2.5, 1.0) == (2.5, 1.0)


def test_bad_data_end_one_rank_of_the_run_that_trains_them(
    store: FaultStore, worker: Ailments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(ailments.os, "kill", lambda _pid, number: ended.append(number))
    fault = broken(store, "bad-sample", str(tmp_path / "another"), iteration="7")
    worker.die_of_bad_sample(8, rank=1, world=4)
    assert not ended, "another run's data are bad"
    store.remove(fault)
    broken(store, "bad-sample", str(rehearsal_card(tmp_path).paths.root.resolve()), iteration="7")
    for iteration, rank in ((7, 1), (9, 1), (8, 0), (8, 2)):
        worker.die_of_bad_sample(iteration, rank, world=4)
    assert not ended
    worker.die_of_bad_sample(8, rank=1, world=4)
    worker.die_of_bad_sample(8, rank=0, world=1)
    assert ended == [signal.SIGSEGV] * 2


def test_records_that_cannot_be_read_change_nothing(store: FaultStore, worker: Ailments) -> None:
    broken(store, "slow-steps", "n1", factor="8")
    assert worker.slowness() == 8.0
    (store.folder / "other.json").write_text("half a rec")
    assert worker.slowness() == 8.0


def test_without_a_scheduler_nothing_is_wrong(tmp_path: Path) -> None:
    worker = Ailments(rehearsal_card(tmp_path), {})
    assert (worker.step_hangs(), worker.data_are_missing(), worker.slowness()) == (
        False,
        False,
        1.0,
    )


def test_only_the_workers_of_the_node_cannot_save(
    store: FaultStore, worker: Ailments, tmp_path: Path
) -> None:
    broken(store, "save-error", "n2")
    worker.refuse_save(tmp_path)
    broken(store, "save-error", "n1")
    with pytest.raises(OSError, match="Input/output error"):
        worker.refuse_save(tmp_path)
