"""Small real trainings with one fault each: some steps, a save, a restart, a step, with dumps all
along.

Every fault goes into the engine, the load or the loop where the historical one was, never into the
dumps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from tests.trainer.cases import CPU, batches, tiny
from trainer import engine as engine_module
from trainer.checkpoint import randomness, store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.config.card import DebugSection, TrainerConfig
from trainer.contract.record import Record
from trainer.debug.dump import DebugDumps
from trainer.debug.record import StepFacts
from trainer.engine import Engine
from trainer.model import gpt
from trainer.model.family import TIED_NAME
from trainer.model.layers import LayerNorm, VocabularyParallelEmbedding
from trainer.parallel.mesh import Mesh
from trainer.parallel.state import ShardedState

SIZE = 8
SAVED = 4
LAST = 5
NORM = "embedding.word.norm"
DUPLICATE = "blocks.0.input_norm.weight"


class Fault(Record):
    """What is wrong: how engines are built, how they load, and what the restarted loop believes."""

    around: Callable[[], Any] = nullcontext
    engine: type[Engine] = Engine
    optimizer_step: int | None = None
    reseed: int | None = None
    shift: int = 0
    rate: float = 1.0


# -------------------------------- an embedding's LayerNorm that the last stage has and does not use
class NormedEmbedding(VocabularyParallelEmbedding):
    """The tied module holds the embedding's LayerNorm too; the head on the last stage never calls
    it.
    """

    def __init__(self, vocabulary_size: int, size: int, std: float, mesh: Mesh, *more: Any):
        super().__init__(vocabulary_size, size, std, mesh, *more)
        self.norm = LayerNorm(size, 1e-5, mesh)

    def forward(self, tokens: Any) -> Any:
        return self.norm(super().forward(tokens))


def everything_decays(named: Any, weight_decay: float) -> list[dict[str, Any]]:
    """The group test that knew only the fused LayerNorm: the embedding's fell among the decayed
    parameters.
    """
    pairs = list(named)
    decayed = [item for name, item in pairs if item.dim() > 1 or name.startswith(NORM)]
    kept = [item for name, item in pairs if item.dim() == 1 and not name.startswith(NORM)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def leave_out(engine: Engine, parameters: set[int]) -> None:
    """Keep the gradients of these parameters from being summed over stages and tensor ranks."""
    module = engine._pipeline.module
    every, replicated = module.get_tied_weights_and_groups, module.replicated
    module.replicated = lambda: [item for item in replicated() if id(item) not in parameters]
    module.get_tied_weights_and_groups = lambda: [
        pair for pair in every() if id(pair[0]) not in parameters
    ]


@contextmanager
def unused_norm() -> Iterator[None]:
    kept = gpt.VocabularyParallelEmbedding, engine_module.parameter_groups
    gpt.VocabularyParallelEmbedding = NormedEmbedding  # type: ignore[misc, assignment]
    engine_module.parameter_groups = everything_decays
    try:
        yield
    finally:
        gpt.VocabularyParallelEmbedding, engine_module.parameter_groups = kept  # type: ignore[misc]


class FirstStageSaves(Engine):
    """Only the first stage writes the tied module's LayerNorm, and only there it is read back."""

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh, for_training: bool = True) -> Engine:
        engine = super().build(config, mesh, for_training)
        if (
            not mesh.is_first_stage
        ):  # it never gets a gradient there, so there is nothing to sum over tensor ranks
            unused = {id(item) for name, item in engine.named_parameters() if name.startswith(NORM)}
            leave_out(engine, unused)
        return engine

    def sharded_state(self) -> ShardedState:
        state = super().sharded_state()
        if self.mesh.is_first_stage:
            return state
        return ShardedState(
            [item for item in state.weights if not item.name.startswith(NORM)],
            [item for item in state.fragments if not item.name.startswith(NORM)],
            state.optimizer_step,
        )


# ----------------------------------- the last stage's tied weight gets no reduction of its gradient
class UnreducedHead(Engine):
    """Each stage updates its copy of the embedding with its own share of the gradient."""

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh, for_training: bool = True) -> Engine:
        engine = super().build(config, mesh, for_training)
        leave_out(
            engine, {id(item) for name, item in engine.named_parameters() if name == TIED_NAME}
        )
        return engine


# ------------------------------------- a LayerNorm whose gradient is not clipped on one tensor rank
class UnclippedDuplicate(Engine):
    """Tensor ranks other than the first make a larger update of one LayerNorm, as without clipping."""

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        masters = [
            item.tensors["fp32"]
            for item in self.sharded_state().fragments
            if item.name == DUPLICATE
        ]
        before = [master.clone() for master in masters]
        result = super().train_step(*arguments, **options)
        if self.mesh.tensor_rank > 0:
            for master, kept in zip(masters, before, strict=True):
                master.add_(master - kept, alpha=3.0)
            self._pipeline.optimizer.update_lp_params()
        return result


FAULTS = {
    "none": Fault(),
    "unused-norm": Fault(unused_norm, FirstStageSaves),
    "unreduced-head": Fault(engine=UnreducedHead),
    "unclipped-duplicate": Fault(engine=UnclippedDuplicate),
    "adam-from-zero": Fault(optimizer_step=0),
    "wrong-generator": Fault(reseed=99),
    "shifted-cursor": Fault(shift=1),
    "doubled-rate": Fault(rate=2.0),
}
IN_THE_ENGINE = ("none", "unused-norm", "unreduced-head", "unclipped-duplicate")


def rate(step: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / 3)


@dataclass
class Run:
    """One attempt: an engine with its dumps. `extra`: samples by which its cursor is wrong, in
    steps.
    """

    engine: Engine
    config: TrainerConfig
    mesh: Mesh
    dumps: DebugDumps
    fault: Fault

    def facts(self, step: int) -> StepFacts:
        samples = (step + self.fault.shift) * SIZE
        length = self.config.model.sequence_length
        return StepFacts(
            self.engine.optimizer_step(), rate(step) * self.fault.rate, samples, samples * length
        )

    def step(self, step: int) -> None:
        """Train step number `step`, counted from 1."""
        named = self.engine.named_parameters()
        self.engine.set_learning_rate(rate(step - 1) * self.fault.rate)
        self.dumps.before_step(step, named, self.facts(step - 1))
        stream = self.dumps.watch(
            batches(self.config, self.mesh, step - 1 + self.fault.shift, SIZE)
        )
        self.engine.train_step(stream, SIZE, step - 1)  # type: ignore[arg-type]
        self.dumps.after_step(step, named, self.facts(step))


def card(pipeline: int, tensor: int, dtype: str, form: str) -> TrainerConfig:
    config = tiny(pipeline, tensor, dtype)
    debug = DebugSection.model_validate({"dump": form, "iterations": [f"{SAVED}-{LAST}"]})
    optimizer = config.optimizer.model_copy(update={"weight_decay": 1.0})
    return config.model_copy(update={"debug": debug, "optimizer": optimizer})


def restarted(config: TrainerConfig, folder: Path, name: str) -> None:
    """Train, save at SAVED, go on to LAST (dumps in FOLDER/NAME/a); load, train LAST again (dumps
    in FOLDER/NAME/b).
    """
    mesh, fault, place = Mesh.create(config.parallel, CPU), FAULTS[name], folder / name
    with fault.around():
        engine = fault.engine.build(config, mesh)
    run = Run(
        engine,
        config,
        mesh,
        DebugDumps(config.debug, mesh, place / "a", engine.family),
        replace(fault, shift=0, rate=1.0),
    )
    for step in range(1, SAVED + 1):
        run.step(step)
    state = engine.sharded_state()
    run.dumps.on_save(SAVED, engine.named_parameters(), run.facts(SAVED))
    length = config.model.sequence_length
    cursor = {
        "iteration": SAVED,
        "consumed_samples": SAVED * SIZE,
        "consumed_tokens": SAVED * SIZE * length,
    }
    store.save(
        NewCheckpoint(
            place, SAVED, Extras(cursor, randomness.capture()), CheckpointInfo(mesh.degrees(), {})
        ),
        state,
    )
    run.step(LAST)
    second_attempt(config, mesh, place, place / "b", fault)


def resumed(config: TrainerConfig, place: Path, dumps: Path) -> None:
    """Load the sound checkpoint in `place` on this rank's grid and train step LAST, dumping into
    `dumps`.
    """
    second_attempt(config, Mesh.create(config.parallel, CPU), place, dumps, FAULTS["none"])


def second_attempt(
    config: TrainerConfig, mesh: Mesh, place: Path, dumps: Path, fault: Fault
) -> None:
    with fault.around():
        engine = fault.engine.build(config, mesh)
    run = Run(engine, config, mesh, DebugDumps(config.debug, mesh, dumps, engine.family), fault)
    state = engine.sharded_state()
    loaded = store.load(place, SAVED, state, CheckpointInfo(mesh.degrees(), {}))
    step = loaded.optimizer_step if fault.optimizer_step is None else fault.optimizer_step
    engine.finish_load(replace(state, optimizer_step=step))
    if fault.reseed is not None:
        torch.manual_seed(fault.reseed)
    elif loaded.rng is not None:
        randomness.restore(loaded.rng)
    run.dumps.on_load(SAVED, engine.named_parameters(), run.facts(SAVED))
    run.step(LAST)


def all_faults(config: TrainerConfig, folder: Path, names: list[str]) -> None:
    """Seed them one after another on this rank's grid, each in a folder of its name.

    Where the fault is in the load or after it, the first attempt is that of "none", which must come
    first.
    """
    # DeepSpeed collects garbage several times as it builds; nothing of what was imported is garbage
    gc.freeze()
    for name in names:
        if name in IN_THE_ENGINE:
            restarted(config, folder, name)
        else:
            mesh = Mesh.create(config.parallel, CPU)
            second_attempt(config, mesh, folder / "none", folder / name / "b", FAULTS[name])
