"""A training that is saved in both layouts of a checkpoint, and goes on from each."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.cases import CPU, batches
from tests.trainer.resumes import SIZE
from trainer.checkpoint import randomness, store
from trainer.checkpoint.deepspeed.collective import load_deepspeed, save_deepspeed
from trainer.checkpoint.publishing import Extras, NewCheckpoint
from trainer.config.card import TrainerConfig
from trainer.contract.resumable import OPTIMIZER_SUMS
from trainer.control.resume import checkpoint_info
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.parallel.state import MASTERS, ShardedState


def steps(engine: Engine, config: TrainerConfig, mesh: Mesh, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        engine.set_learning_rate(1e-3 * (step + 1))
        losses.append(engine.train_step(batches(config, mesh, step, SIZE), SIZE, step).loss)
    return losses


def saved_and_loaded(config: TrainerConfig, folder: Path) -> list[list[float]]:
    """Losses of two steps after a save: straight on, and from each layout, loaded into the same
    engine later on.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    steps(engine, config, mesh, 0, 3)
    counted = {"iteration": 3, "consumed_samples": 48, "consumed_tokens": 768}
    extras = Extras(counted | {OPTIMIZER_SUMS: engine.optimizer_sums()}, randomness.capture())
    info = checkpoint_info(config, mesh, "", "")
    store.save(NewCheckpoint(folder / "ours", 3, extras, info), engine.sharded_state())
    save_deepspeed(
        NewCheckpoint(folder / "original", 3, extras, info), engine.sharded_state(), mesh
    )
    losses = [steps(engine, config, mesh, 3, 5)]
    for layout in ("ours", "original"):
        state = engine.sharded_state()
        if layout == "ours":
            loaded = store.load(folder / layout, 3, state, info)
        else:
            loaded = load_deepspeed(folder / layout / "global_step3", state, info)
        engine.finish_load(ShardedState(state.weights, state.fragments, loaded.optimizer_step))
        engine.restore_optimizer_sums(loaded.cursor[OPTIMIZER_SUMS])
        losses.append(steps(engine, config, mesh, 3, 5))
    state = engine.sharded_state()
    engine.masters_from_weights(state)
    engine.finish_load(ShardedState(state.weights, state.fragments, 0))
    parts = [part.tensors for part in engine.sharded_state().fragments]
    assert all(
        not tensor.any() for held in parts for kind, tensor in held.items() if kind != MASTERS
    )
    engine.close()
    return losses
