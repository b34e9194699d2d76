"""The trainer's own engine saves in the original layout and resumes from it, on the same shape and
on another.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.trainer.cases import CPU, Piece, assemble, batches, copy_state, tiny
from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.memory_source import (
    Sizes,
    differences,
    extras_of,
    info_of,
    memory_source,
)
from tests.trainer.checkpoint.synthetic import Shape
from trainer.checkpoint import randomness, store
from trainer.checkpoint.deepspeed.collective import load_deepspeed, save_deepspeed
from trainer.checkpoint.deepspeed.layout import open_deepspeed_layout
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

SIZE, STEP = 16, 3
SAVED, OTHER = Shape(tensor=2, pipeline=2), Shape(pipeline=2, data=2)


def info(mesh: Mesh, **facts: Any) -> CheckpointInfo:
    return CheckpointInfo(
        mesh.degrees(), {"model.layers": 2, "model.hidden_size": 32} | facts, "hash"
    )


def built(shape: Shape, dtype: str) -> tuple[Engine, Mesh]:
    config = tiny(shape.pipeline, shape.tensor, dtype)
    mesh = Mesh.create(config.parallel, CPU)
    return Engine.build(config, mesh), mesh


def step(engine: Engine, mesh: Mesh, number: int) -> float:
    engine.set_learning_rate(1e-3 * (number + 1))
    return engine.train_step(batches(engine.config, mesh, number, SIZE), SIZE, number).loss


def save(rank: int, folder: Path, shape: Shape, dtype: str) -> tuple[list[Piece], float, list[str]]:
    """Three steps, then saves in both layouts, and the loss of the fourth."""
    engine, mesh = built(shape, dtype)
    for number in range(STEP):
        step(engine, mesh, number)
    torch.manual_seed(100 + rank)
    extras = Extras(
        {"iteration": STEP, "consumed_samples": 48, "consumed_tokens": 768}, randomness.capture()
    )
    state = engine.sharded_state()
    save_deepspeed(NewCheckpoint(folder / "theirs", STEP, extras, info(mesh)), state, mesh)
    store.save(NewCheckpoint(folder / "ours", STEP, extras, info(mesh)), state)
    kept = sorted(path.name for path in (folder / "theirs").iterdir())
    with contextlib.suppress(
        CheckpointError
    ):  # a fragment that ZeRO-1 would not give: refused by all, nothing left
        odd = replace(state.fragments[0], start=state.fragments[0].start + 1)
        broken = replace(state, fragments=[odd, *state.fragments[1:]]) if rank == 1 else state
        save_deepspeed(NewCheckpoint(folder / "theirs", STEP + 1, extras, info(mesh)), broken, mesh)
        raise AssertionError("it was saved")
    save_deepspeed(
        NewCheckpoint(folder / "weights", STEP, extras, info(mesh)),
        state,
        mesh,
        save_optimizer=False,
    )
    pieces, following = copy_state(engine), step(engine, mesh, STEP)
    engine.close()
    return pieces, following, kept


def resume(
    rank: int, folder: Path, shape: Shape, dtype: str
) -> tuple[list[Piece], float, bool, tuple[str, ...]]:
    engine, mesh = built(shape, dtype)
    state = engine.sharded_state()
    with contextlib.suppress(
        CheckpointError
    ):  # another model: refused by all, and nothing is touched
        load_deepspeed(folder, state, info(mesh, **({"model.layers": 3} if rank == 0 else {})))
        raise AssertionError("it was loaded")
    assert engine.sharded_state().optimizer_step == 0
    loaded = load_deepspeed(folder, state, info(mesh))
    assert (loaded.optimizer_step, loaded.cursor["iteration"], loaded.manifest.step) == (
        STEP,
        STEP,
        STEP,
    )
    engine.finish_load(replace(state, optimizer_step=loaded.optimizer_step))
    restored = loaded.rng is not None
    if loaded.rng is not None:
        randomness.restore(loaded.rng)
        drawn = torch.rand(2)
        torch.manual_seed(100 + rank)
        assert torch.equal(drawn, torch.rand(2))
    pieces, following = copy_state(engine), step(engine, mesh, STEP)
    engine.close()
    return pieces, following, restored, loaded.remarks


@pytest.mark.parametrize(
    ("dtype", "shapes"), [("bf16", [SAVED, OTHER]), ("fp32", [OTHER])], ids=["bf16", "fp32"]
)
def test_save_and_resume_on_this_shape_and_on_another(
    memory: Path, dtype: str, shapes: list[Shape]
) -> None:
    ranks = world.run(4, save, memory, SAVED, dtype)
    truth, place = (
        assemble([pieces for pieces, *_ in ranks]),
        memory / "theirs" / f"global_step{STEP}",
    )
    assert ranks[0][2] == [f"global_step{STEP}", "latest"]
    assert sorted(path.name for path in (memory / "theirs").iterdir()) == ranks[0][2]
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []
    assert {entry.path for entry in manifest.files} | {"manifest.json"} == {
        str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()
    }
    assert (read_latest(memory / "theirs"), manifest.run_card_hash) == (STEP, "hash")
    found = open_deepspeed_layout(place)
    assert differences(found, open_checkpoint(memory / "ours" / f"global_step{STEP}")) == []
    assert found.facts.optimizer_step == STEP
    alone = open_deepspeed_layout(memory / "weights" / f"global_step{STEP}")
    assert alone.tensors("optimizer") == {} and alone.tensors("weights") == found.tensors("weights")

    # Without a manifest it is what the original left, and rank 0 alone makes one up.
    (place / "manifest.json").unlink()
    for shape in shapes:
        answers = world.run(4, resume, place, shape, dtype)
        again = assemble([pieces for pieces, *_ in answers])
        assert [
            name
            for name in truth
            for kind in truth[name]
            if not torch.equal(again[name][kind], truth[name][kind])
        ] == []
        for _, following, restored, remarks in answers:
            assert restored == (shape == SAVED) and bool(remarks) == (shape != SAVED)
            if shape == SAVED:
                assert following == ranks[0][1]
            assert following == pytest.approx(ranks[0][1], abs=2e-3 if dtype == "bf16" else 2e-6)


REFUSED = {
    "damaged": (
        Sizes(2, 32, 4, 64),
        torch.bfloat16,
        r"layer_03-model_00-model_states\.pt is damaged or not a checkpoint",
    ),
    "narrower": (
        Sizes(2, 16, 4, 64),
        torch.bfloat16,
        r"has shape .* in the checkpoint and .* in this run",
    ),
    "deeper": (
        Sizes(3, 32, 4, 64),
        torch.bfloat16,
        r"hold blocks\.2\.\S+ \(and \d+ more\), which this run's model lacks",
    ),
    "fp32": (Sizes(2, 32, 4, 64), torch.float32, "is fp32 in the checkpoint and bf16 in this run"),
}


def refused(rank: int, folder: Path) -> list[str]:
    engine, mesh = built(Shape(data=2), "bf16")
    state, messages = engine.sharded_state(), []
    before = [item.tensor.clone() for item in state.weights]
    for name in REFUSED:
        with pytest.raises(CheckpointError) as caught:
            load_deepspeed(
                folder / name / "global_step5", state, CheckpointInfo(mesh.degrees(), {})
            )
        messages.append(str(caught.value))
        assert all(
            torch.equal(old, item.tensor) for old, item in zip(before, state.weights, strict=True)
        )
    engine.close()
    return messages


def test_one_refusal_for_all_ranks_before_anything_is_loaded(memory: Path) -> None:
    for name, (sizes, dtype, _) in REFUSED.items():
        source = memory_source(sizes, dtype=dtype)
        write_deepspeed_layout(
            NewCheckpoint(memory / name, 5, extras_of(source), info_of(source, {"data": 3})), source
        )
    damaged = memory / "damaged" / "global_step5"
    (damaged / "manifest.json").unlink()
    (damaged / "layer_03-model_00-model_states.pt").write_bytes(b"PK" + bytes(300))
    first, second = world.run(2, refused, memory)
    assert first == second
    for message, (_, _, said) in zip(first, REFUSED.values(), strict=True):
        assert re.search(said, message), message
