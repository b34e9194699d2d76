"""`trainer.control.evaluate`: the loss of every window, the same on every topology, and equal to
the loss written plainly.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.cases import CPU, VOCABULARY, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.errors import DataError
from trainer.control.evaluate import _for_evaluation, evaluate, read_windows
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.schedule.rules import cross_problems


def losses_of(config: TrainerConfig, file: Path) -> tuple[list[float], list[int]]:
    """Of every window, with the initial weights, and what was reported on the way."""
    one = config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro_batch_size": 1})}
    )
    mesh = Mesh.create(one.parallel, CPU)
    engine = Engine.build(one, mesh, for_training=False)
    windows = read_windows(file, one.model.sequence_length, VOCABULARY)
    heard: list[int] = []
    found = [one.loss for one in evaluate(engine, windows, len(windows), heard.append)]
    engine.close()
    return found, heard


@pytest.mark.parametrize("windows", [1, 37])
def test_every_window_on_every_topology(tmp_path: Path, windows: int) -> None:
    tokens = np.random.default_rng(windows).integers(0, VOCABULARY, (windows, 17))
    np.save(tmp_path / "windows.npy", tokens)
    ((reference, heard),) = run_ranks(losses_of, 1, tiny(), tmp_path / "windows.npy")
    assert heard[-1] == windows
    assert len(set(reference)) == windows
    assert all(np.isfinite(reference))
    for shape in ((2, 2, 1), (1, 2, 2), (2, 1, 2)):
        pipeline, tensor, data = shape
        ranks = run_ranks(
            losses_of, pipeline * tensor * data, tiny(pipeline, tensor), tmp_path / "windows.npy"
        )
        for found, _ in ranks:
            assert found == ranks[0][0]
            assert torch.allclose(torch.tensor(found), torch.tensor(reference), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (np.zeros((3, 16), np.int64), "windows have 16 tokens"),
        (np.zeros((3, 17)), "give integers"),
        (np.zeros((0, 17), np.int64), "give integers"),
        (np.full((3, 17), VOCABULARY), f"window 0 holds token {VOCABULARY} at its place 0"),
        (np.array([[1] * 17, [1] * 16 + [-1]]), "window 1 holds token -1 at its place 16"),
        (np.zeros(17, np.int64), "give integers"),
    ],
)
def test_windows_that_cannot_be_meant(tmp_path: Path, value: np.ndarray, word: str) -> None:
    np.save(tmp_path / "windows.npy", value)
    with pytest.raises(DataError, match=word):
        read_windows(tmp_path / "windows.npy", 16, VOCABULARY)


def test_a_file_that_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "windows.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match=r"cannot be read as an \.npy array"):
        read_windows(tmp_path / "windows.npy", 16, VOCABULARY)


def test_a_card_that_counts_in_steps_is_evaluated() -> None:
    """Its batch is another one then: what it says in steps must not be held against it."""
    value = tiny().model_dump(mode="json")
    value["batch"] |= {"train_iterations": 10, "train_samples": 160}
    value["schedule"] |= {"decay_iterations": 9, "warmup_iterations": 2}
    config = TrainerConfig.model_validate(value)
    assert cross_problems(config, 1) == []
    changed = _for_evaluation(config, Namespace(split="valid", samples=5), 1)
    assert cross_problems(changed, 1) == []
    assert (changed.batch.train_samples, changed.evaluation.iterations) == (160, 5)
