"""What DeepSpeed's own engine writes is read truly, and what we write its engine loads and trains
on from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.deepspeed import model
from tests.trainer.checkpoint.memory_source import extras_of, info_of
from tests.trainer.checkpoint.synthetic import Shape
from trainer.checkpoint.deepspeed.content import OptimizerSettings
from trainer.checkpoint.deepspeed.layout import DeepSpeedSource, open_deepspeed_layout
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import NewCheckpoint
from trainer.checkpoint.source import Part

SAVED = 2
Held = dict[str, dict[str, Tensor]]


def train_and_save(rank: int, folder: Path, shape: Shape, bf16: bool) -> tuple[Held, float]:
    """Two steps, a save by the engine, and the loss of the step that follows."""
    engine = model.build(shape, bf16)
    for step in range(SAVED):
        model.train(engine, shape, step)
    model.save(engine, folder, SAVED)
    held = model.held(engine)
    following = model.train(engine, shape, SAVED)
    engine.destroy()
    return held, following


def load_and_train(
    rank: int, folder: Path, shape: Shape, bf16: bool
) -> tuple[Held, float, int, dict[str, Any]]:
    engine = model.build(shape, bf16, weight_decay=0.9)  # to be replaced by the checkpoint's
    client = model.load(engine, folder)
    held, steps = model.held(engine), engine.global_steps
    following = model.train(engine, shape, SAVED)
    engine.destroy()
    kept = {key: client[key] for key in ("iteration", "tokens", "checkpoint_version")}
    return held, following, steps, kept | {"samples": client["args"].consumed_train_samples}


def read_all(source: DeepSpeedSource) -> dict[str, Tensor]:
    parts: dict[Part, str] = {"weights": "/weight", "optimizer": ""}
    return {
        key + suffix: source.read(part, key, (0,) * len(facts.shape), facts.shape)
        for part, suffix in parts.items()
        for key, facts in source.tensors(part).items()
    }


@pytest.mark.parametrize(
    ("saved", "loaded", "bf16"),
    [
        (Shape(pipeline=2, data=2), Shape(tensor=2, pipeline=2), True),
        (Shape(tensor=2, data=2), Shape(pipeline=2, data=2), False),
    ],
    ids=["bf16", "fp32"],
)
def test_the_engines_checkpoint_is_read_and_it_loads_ours(
    tmp_path: Path, saved: Shape, loaded: Shape, bf16: bool
) -> None:
    ranks = world.run(saved.world, train_and_save, tmp_path / "theirs", saved, bf16)
    truth = model.whole([held for held, _ in ranks], saved)
    assert truth["embedding.norm.weight/exp_avg"].abs().sum() > 0, (
        "the idle copy must not stand for the trained one"
    )

    said: list[str] = []
    source = open_deepspeed_layout(tmp_path / "theirs" / f"global_step{SAVED}", said.append)
    read = read_all(source)
    assert read.keys() == truth.keys()
    assert [key for key in truth if not torch.equal(read[key], truth[key])] == []
    assert said == source.remarks == []
    assert source.facts.topology == saved.topology
    assert source.facts.optimizer_step == SAVED
    assert source.facts.cursor == {
        "iteration": SAVED,
        "consumed_samples": SAVED * model.SAMPLES,
        "consumed_tokens": SAVED * model.SAMPLES * model.LENGTH,
        "skipped": 0,
        "nan": 0,
    }
    assert source.facts.model["model.attention_heads"] == model.HEADS
    assert source.facts.model["model.position_embedding"] == "alibi"
    assert source.facts.model["precision.dtype"] == ("bf16" if bf16 else "fp32")

    settings = OptimizerSettings.of(source.group_options)
    assert (settings.learning_rate, settings.weight_decay, settings.beta2) == (1e-2, 0.1, 0.999)
    info = info_of(source, loaded.topology)
    write_deepspeed_layout(
        NewCheckpoint(tmp_path / "ours", SAVED, extras_of(source), info), source, settings=settings
    )
    answers = world.run(loaded.world, load_and_train, tmp_path / "ours", loaded, bf16)
    again = model.whole([held for held, *_ in answers], loaded)
    assert [key for key in truth if not torch.equal(again[key], truth[key])] == []
    for _, following, steps, client in answers:
        assert following == pytest.approx(ranks[0][1], abs=4e-3 if bf16 else 2e-6)
        assert steps == SAVED
        assert client == {
            "iteration": SAVED,
            "tokens": SAVED * model.SAMPLES * model.LENGTH,
            "checkpoint_version": 3.0,
            "samples": SAVED * model.SAMPLES,
        }
