"""The pipeline's bubble by schedule: share of a step in which a stage waits, and what it must hold
meanwhile.

    python benchmarks/pipeline_bubble.py [--ranks 2 4] [--micro-batches 4 8 24] [--steps 3] [--pause 0.02]

The blocks are stand-ins that wait instead of computing: `--pause` seconds forward, as long for the
gradient of the input and as long for that of the weights. Waiting needs no core, so a few cores
show the schedule of many ranks. The rest is real: embedding, tied head, loss, optimizer, gloo.
Every rank has two blocks; schedules that cut a rank's part in two take one for each. `engine` is
this project's; the others drive the same layers. A `!` marks losses that are not those of the first
line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import Shape, card
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules as torchs
from torch.nn import functional

from tr11ops.agent.allocation import free_port
from trainer.config.card import TrainerConfig
from trainer.config.deepspeed_settings import deepspeed_settings
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model.block import TransformerBlock
from trainer.model.family import TIED_KEY, TIED_NAME, Layer, initialise_stage, logical_parameters
from trainer.model.gpt import GPTFamily
from trainer.model.initial import ZEROS, Initial
from trainer.model.layers import new_parameter
from trainer.model.loss import LanguageModelHead
from trainer.optim.build import build_optimizer, parameter_groups
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import (
    PipeModelDataParallelTopology,
    deepspeed,
    init_distributed,
    quiet,
)
from trainer.pipeline.stages import layer_spec
from trainer.schedule.flops import bubble_share

from deepspeed.runtime.pipe.dualpipev import DualPipeVModule  # isort: skip

CPU = torch.device("cpu")
BLOCKS = 2  # of each rank
MICRO, RATE, PATIENCE = 2, 3e-3, 600.0
SAME_LOSS = 2e-6  # fp32, added in another order
Step = Callable[[list[tuple[Tensor, Tensor]]], float]


class Held:
    """Blocks whose input is kept for a backward pass, on this rank: now and at most."""

    now = most = 0

    @classmethod
    def change(cls, by: int) -> None:
        cls.now += by
        cls.most = max(cls.most, cls.now)


class _Wait(torch.autograd.Function):
    """The same tensor; its gradient takes `pause` seconds. `change`: of what is held, once that is
    done.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pause: float, change: int) -> Tensor:
        ctx.pause, ctx.change = pause, change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.pause)
        Held.change(ctx.change)
        return gradients[0], None, None


class TransformerStandIn(nn.Module):
    """A block that waits. [batch, sequence, hidden] -> the same."""

    def __init__(self, hidden: int, pause: float, mesh: Mesh) -> None:
        super().__init__()
        self.pause = pause
        self.weight = new_parameter((hidden, hidden), mesh, None, Initial(0.0, 0.05))
        self.bias = new_parameter((hidden,), mesh, None, ZEROS)

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self.pause)
        Held.change(1)
        weight = _Wait.apply(self.weight, self.pause, -1)
        return hidden + functional.linear(_Wait.apply(hidden, self.pause, 0), weight, self.bias)


def waiting(pause: float) -> Callable[..., list[Layer]]:
    """`GPTFamily.layers`, its blocks replaced by stand-ins."""
    of_family = GPTFamily.layers

    def layers(family: GPTFamily, config: TrainerConfig, mesh: Mesh, *others: Any) -> list[Layer]:
        made = of_family(family, config, mesh, *others)
        width = config.model.hidden_size
        stand_in = {"kind": TransformerStandIn, "arguments": (width, pause, mesh)}
        return [
            replace(layer, **stand_in) if layer.kind is TransformerBlock else layer
            for layer in made
        ]

    return layers


def by_engine(config: TrainerConfig, mesh: Mesh, pause: float) -> Step:
    """The engine as it is, with whole stages."""
    return _of_engine(config, mesh, pause, 1)


def by_engine_in_parts(config: TrainerConfig, mesh: Mesh, pause: float) -> Step:
    """The engine with stages of two parts."""
    return _of_engine(config, mesh, pause, 2)


def _of_engine(config: TrainerConfig, mesh: Mesh, pause: float, parts: int) -> Step:
    parallel = config.parallel.model_copy(update={"virtual_stages": parts})
    config = config.model_copy(update={"parallel": parallel})
    with mock.patch.object(GPTFamily, "layers", waiting(pause)):
        engine = Engine.build(config, mesh)
    engine.set_learning_rate(RATE)
    return lambda pairs: engine.train_step(iter(pairs), MICRO * len(pairs)).loss


def by_dualpipev(config: TrainerConfig, mesh: Mesh, pause: float) -> Step:
    """DeepSpeed's DualPipeV under the engine's settings; backward passes are not taken apart."""
    head = LanguageModelHead(mesh)
    layers = waiting(pause)(GPTFamily(), config, mesh, head, None)
    with quiet():
        module = DualPipeVModule(
            layers=[layer_spec(layer) for layer in layers],
            topology=PipeModelDataParallelTopology(num_pp=mesh.pipeline, num_mp=1, num_dp=1),
            partition_method=config.parallel.partition,
        )
        named = [
            (
                layer.prefix,
                function if isinstance(function, nn.Module) else module.tied_modules[TIED_KEY],
            )
            for (begin, end), functions in zip(module.phase_bounds, module.phase_funcs, strict=True)
            for layer, function in zip(layers[begin:end], functions, strict=True)
        ]
        initialise_stage(named, config.run.seed, mesh)
        module.loss_fn = head.loss if mesh.is_first_stage else None
        groups = parameter_groups(logical_parameters(named), config.optimizer.weight_decay)
        optimizer = build_optimizer(groups, config.optimizer, RATE, {TIED_NAME})
        local = sum(parameter.numel() for parameter in module.parameters())
        settings = deepspeed_settings(config, local, True)
        pipeline, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def step(pairs: list[tuple[Tensor, Tensor]]) -> float:
        if len(pairs) != pipeline.gradient_accumulation_steps():
            pipeline.set_train_batch_size(MICRO * len(pairs))
        return float(pipeline.train_batch(iter(pairs)))

    return step


class Chunk(nn.Module):
    """Some of the layers, in order."""

    def __init__(self, layers: list[Layer], seed: int, mesh: Mesh) -> None:
        super().__init__()
        self.layers = layers
        self.built = nn.ModuleList(layer.kind(*layer.arguments) for layer in layers)
        self.named = [
            (layer.prefix, module) for layer, module in zip(layers, self.built, strict=True)
        ]
        initialise_stage(self.named, seed, mesh)

    def forward(self, stream: Tensor) -> Tensor:
        for layer, module in zip(self.layers, self.built, strict=True):
            stream = (
                module(stream)
                if layer.forward is None
                else functional.linear(stream, module.weight)
            )
        return stream


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Of one micro batch. The engine's own makes both gradients at once, which no schedule can take
    apart.
    """
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut(layers: list[Layer], parts: int) -> list[list[Layer]]:
    """As many blocks in each part; what comes before the first and after the last goes with them."""
    places = [place for place, layer in enumerate(layers) if layer.kind is TransformerStandIn]
    each = len(places) // parts
    borders = [0, *(places[number * each] for number in range(1, parts)), len(layers)]
    return [layers[begin:end] for begin, end in pairwise(borders)]


def by_torch(schedule: Any, order: str) -> Callable[[TrainerConfig, Mesh, float], Step]:
    """torch's own pipeline. `order`: which parts a rank has: `one`, `loop` (r, r + p) or `vee` (r,
    2p - 1 - r).
    """

    def build(config: TrainerConfig, mesh: Mesh, pause: float) -> Step:
        rank, size = mesh.pipeline_rank, mesh.pipeline
        parts = {"one": [rank], "loop": [rank, rank + size], "vee": [rank, 2 * size - 1 - rank]}[
            order
        ]
        layers = waiting(pause)(GPTFamily(), config, mesh, LanguageModelHead(mesh), None)
        pieces = cut(layers, size * len(parts))
        chunks = [Chunk(pieces[part], config.run.seed, mesh) for part in parts]
        stages = [
            PipelineStage(chunk, part, len(pieces), CPU, group=mesh.pipeline_group)
            for chunk, part in zip(chunks, parts, strict=True)
        ]
        named = [pair for chunk in chunks for pair in chunk.named]
        if order == "vee" and rank == 0:  # it has both ends, and so one tied weight
            chunks[1].built[-1].weight = chunks[0].built[0].weight
        optimizer = torch.optim.AdamW(
            parameter_groups(logical_parameters(named), config.optimizer.weight_decay),
            lr=RATE, betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.epsilon,
        )  # fmt: skip
        own = dict(logical_parameters(named))
        has_last, made = len(pieces) - 1 in parts, {}

        def step(pairs: list[tuple[Tensor, Tensor]]) -> float:
            count = len(pairs)
            if count not in made:
                made[count] = schedule(
                    stages[0] if order == "one" else stages, count, plain_loss, scale_grads=False
                )
            tokens, labels = (torch.cat(side) for side in zip(*pairs, strict=True))
            losses: list[Tensor] = []
            inputs = (tokens,) if 0 in parts else ()
            made[count].step(*inputs, **({"target": labels, "losses": losses} if has_last else {}))
            table = torch.zeros(config.tokenizer.padded_vocabulary_size, config.model.hidden_size)
            if TIED_NAME in own:
                table += own[TIED_NAME].grad
            dist.all_reduce(table)
            for name, parameter in own.items():
                parameter.grad = (table if name == TIED_NAME else parameter.grad) / count
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
            dist.broadcast(loss, 0 if order == "vee" else size - 1)
            return float(loss)

        return step

    return build


class Schedule(Record):
    """`chunks`: of each rank. `formula`: of its bubble, as 1F1B's with `chunks` times the micro
    batches. `least`: how many micro batches it needs, in pipelines.
    """

    build: Callable[[TrainerConfig, Mesh, float], Step]
    chunks: int = 1
    formula: bool = True
    least: int = 0


SCHEDULES = {
    "engine: 1F1B": Schedule(by_engine),
    "engine: interleaved 1F1B": Schedule(by_engine_in_parts, 2),
    "torch: 1F1B": Schedule(by_torch(torchs.Schedule1F1B, "one")),
    "torch: interleaved 1F1B": Schedule(by_torch(torchs.ScheduleInterleaved1F1B, "loop"), 2),
    "torch: interleaved zero bubble": Schedule(
        by_torch(torchs.ScheduleInterleavedZeroBubble, "loop"), 2, False
    ),
    "torch: zero bubble, V": Schedule(by_torch(torchs.ScheduleZBVZeroBubble, "vee"), 2, False),
    "torch: DualPipeV": Schedule(by_torch(torchs.ScheduleDualPipeV, "vee"), 2, False, 2),
    "DeepSpeed: DualPipeV": Schedule(by_dualpipev, 2, False, 2),
}


def measure(
    name: str, ranks: int, micro_batches: list[int], pause: float, steps: int
) -> dict[int, dict[str, Any]]:
    """Of one schedule on this rank: seconds of a step (median), most blocks held, losses, for each
    count it can do.
    """
    possible = [count for count in micro_batches if count >= SCHEDULES[name].least * ranks]
    if not possible:
        return {}
    shape = Shape(BLOCKS * ranks, 32, 4, 64, 16, MICRO, possible[0])
    config = card(shape, pipeline=ranks)
    # as many blocks for each rank
    parallel = config.parallel.model_copy(update={"partition": "type:transformer"})
    config = config.model_copy(update={"parallel": parallel})
    mesh = Mesh.create(config.parallel, CPU)
    found = {}
    for count in possible:
        step = SCHEDULES[name].build(config, mesh, pause)
        generator = torch.Generator().manual_seed(count)
        seconds, losses = [], []
        for turn in range(steps + 1):  # the first one warms up and is not counted
            windows = replace(shape, accumulated=count).windows(generator)
            pairs = [
                (window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows
            ]
            Held.now = Held.most = 0
            dist.barrier()
            began = time.perf_counter()
            losses.append(step(pairs))
            dist.barrier()
            if turn:
                seconds.append(time.perf_counter() - began)
        found[count] = {
            "seconds": statistics.median(seconds),
            "held": Held.most / BLOCKS,
            "losses": losses,
        }
    return found


def work(rank: int, ranks: int, port: int, orders: Connection) -> None:
    """One process: answers each (schedule, counts, pause, steps) with what it measured, or why it
    could not.
    """
    torch.set_num_threads(1)
    with suppress(PermissionError):  # anyone who waits must wake up in time, whatever else runs
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    init_distributed(CPU)
    while order := orders.recv():
        name, micro_batches, pause, steps = order
        orders.send(measure(name, ranks, micro_batches, pause, steps))
    dist.destroy_process_group()


def table(
    ranks: int, micro_batches: list[int], pause: float, steps: int, names: list[str]
) -> Iterator[str]:
    """The lines of one pipeline."""
    context = multiprocessing.get_context("forkserver")  # it imports once
    context.set_forkserver_preload(["torch._dynamo", "trainer.engine", "models"])
    port, ends, workers = free_port(), [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        worker = context.Process(target=work, args=(rank, ranks, port, theirs), daemon=True)
        worker.start()
        theirs.close()
        ends.append(ours)
        workers.append(worker)
    try:
        losses: dict[int, list[float]] = {}  # of the first schedule
        yield f"{'micro batches':32}" + "".join(f"{count:>24}" for count in micro_batches)
        yield f"{'':32}" + f"{'idle formula   s   held':>24}" * len(micro_batches)
        for name in names:
            for end in ends:
                end.send((name, micro_batches, pause, steps))
            answers: list[dict[int, dict[str, Any]]] = []
            for end in ends:
                if not end.poll(PATIENCE):
                    raise SystemExit(f"{name}: no answer in {PATIENCE:.0f} s")
                answers.append(end.recv())
            line = f"{name:32}"
            for count in micro_batches:
                if count not in answers[0]:
                    line += f"{'-':>24}"
                    continue
                found = answers[0][count]
                reference = losses.setdefault(count, found["losses"])
                apart = max(
                    abs(one - other) for one, other in zip(found["losses"], reference, strict=True)
                )
                idle = 1 - count * BLOCKS * 3 * pause / found["seconds"]
                schedule = SCHEDULES[name]
                formula = (
                    f"{bubble_share(count * schedule.chunks, ranks):.1%}"
                    if schedule.formula
                    else ""
                )
                held = max(answer[count]["held"] for answer in answers)
                mark = "" if apart <= SAME_LOSS else "!"
                line += f"{idle:>7.1%} {formula:>6} {found['seconds']:4.2f} {held:4.1f}{mark}"
            yield line
        for end in ends:
            end.send(None)
        for worker in workers:
            worker.join(60)
    finally:
        for worker in workers:
            worker.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 24])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    options = parser.parse_args()
    for ranks in options.ranks:
        print(
            f"pipeline of {ranks}, gloo, {BLOCKS} blocks a rank, {options.pause * 1000:g} ms a part of a block"
        )
        for line in table(
            ranks, options.micro_batches, options.pause, options.steps, options.schedules
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
