"""What eight ranks (pipeline 2 x data 2 x tensor 2) do in one start, to be run by `run_ranks`:
starting them is dear.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from tests.trainer.cases import CPU, batches, tiny
from tests.trainer.courses import worker_of
from tests.trainer.gradients import Seen, steps
from tests.trainer.recorder import Entry, recorded
from tests.trainer.sums import in_any_order, one_ulp
from trainer.config.card import RecoverySection, TrainerConfig
from trainer.contract.record import Record
from trainer.control.resume import load_newest
from trainer.control.saving import Saver
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import get_accelerator
from trainer.spikes.recovery import SpikeDetector, SpikeWatch

SIZE, STEPS, SAVED = 16, 5, 3
SHAPE = (2, 2)  # pipeline, tensor


class Course(Record):
    """A short training on one rank: losses and norms as the loop is told them. `clipped_by`: the
    norm that this rank's own optimizer used. `spikes`: seen here.
    """

    losses: list[float]
    norms: list[float | None]
    clipped_by: list[float]
    disagreements: list[str]
    spikes: list[str]


class Observed(Record):
    """All that one rank saw."""

    entries: list[Entry]
    gradients: list[Seen]
    plain: Course
    courses: dict[str, Course]
    resumed: Course
    told: list[str]


def observe(folder: str) -> Observed:
    """The whole session of one rank; checkpoints go below `folder`."""
    entries = one_recorded_step()
    gradients = steps(tiny(*SHAPE, "bf16", clip=0.0), (1, 3))
    plain = course(card("fp32", folder), "plain")
    told: list[str] = []
    courses = {}
    for dtype in ("fp32", "bf16", "fp16"):
        with in_any_order(one_ulp(replica=1, data=2, tensor=2)):
            courses[dtype] = course(card(dtype, folder), "save", told)
    with in_any_order(one_ulp(replica=1, data=2, tensor=2)):
        resumed = course(card("bf16", folder), "resume", told)
    return Observed(entries, gradients, plain, courses, resumed, told)


def card(dtype: str, folder: str) -> TrainerConfig:
    value = tiny(*SHAPE, dtype).model_dump(mode="json")
    value["run"]["directory"] = f"{folder}/{dtype}"
    return TrainerConfig.model_validate(value)


def one_recorded_step() -> list[Entry]:
    config = tiny(*SHAPE, "bf16")
    # a group of its own, as on GPUs
    mesh = replace(Mesh.create(config.parallel, CPU), cpu_group=dist.new_group())
    engine = Engine.build(config, mesh)
    with recorded(mesh) as entries:
        engine.train_step(batches(config, mesh, 0, 8), 8)
    engine._pipeline.destroy()
    return entries


def course(config: TrainerConfig, kind: str, told: list[str] | None = None) -> Course:
    """Five steps, with a checkpoint after the third; or the last two of them, from that checkpoint.

    Rank 5 has a loss of its own, one unit in the last place above the others'; the watch for spikes
    is set so that this unit alone would make one, and that rank alone would wait for the others.
    """
    mesh = Mesh.create(config.parallel, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
        engine = Engine.build(config, mesh)
    if kind != "plain":
        _raise_the_loss(engine, mesh.rank == 5)
    say = (told if told is not None else []).append
    found = load_newest(engine, say)
    progress, plan = found.progress, found.plan
    worker = worker_of(config)
    worker.say = say  # type: ignore[method-assign]
    saver = Saver(worker, engine, found.own_step, "")
    watch = SpikeWatch(config, mesh.cpu_group)
    losses, norms, clipped_by, spikes = [], [], [], []
    for step in range(progress.iteration, STEPS):
        engine.set_learning_rate(3e-3)
        result = engine.train_step(batches(config, mesh, step, SIZE), SIZE, step)
        progress = progress.after_step(
            SIZE, config.model.sequence_length, result.loss, result.skipped
        )
        assert not result.skipped
        losses.append(result.loss)
        norms.append(result.grad_norm)
        clipped_by.append(float(engine._pipeline.optimizer._global_grad_norm))
        watch._detector = SpikeDetector(
            RecoverySection(), losses=(result.loss / 2,) * 20, norms=(1.0,) * 20
        )
        if watch.observe(step + 1, result.loss, result.grad_norm, result.skipped) is not None:
            spikes.append(f"step {step + 1}")
        if kind == "save" and step + 1 == SAVED:
            saver.save(progress, plan, 0.0)
            assert saver.wait() is None
    answer = Course(losses, norms, clipped_by, engine.disagreeing_parameters(), spikes)
    saver.close()
    engine._pipeline.destroy()
    return answer


def _raise_the_loss(engine: Engine, here: bool) -> None:
    pipeline: Any = engine._pipeline
    plain = pipeline._aggregate_total_loss

    def aggregate() -> Any:
        loss = plain()
        return torch.nextafter(loss, loss + 1) if here else loss

    pipeline._aggregate_total_loss = aggregate
