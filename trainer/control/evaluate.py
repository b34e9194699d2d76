"""`python -m trainer.control.evaluate CARD.json ...`: the loss of a checkpoint on given data, on
any topology.

Started with torchrun (`tr11 eval` does that). Holds weights alone: no gradients, masters or
moments.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trainer.config.card import CardError, TrainerConfig, load_trainer_config
from trainer.contract.documents import document
from trainer.contract.errors import CheckpointError, DataError
from trainer.contract.files import write_json
from trainer.contract.metrics_record import perplexity_of
from trainer.contract.record import Record
from trainer.control.resume import load_weights
from trainer.data.dataset import MicroBatch, NextTokenRow, SampleSource
from trainer.data.samples import open_samples
from trainer.engine import Engine
from trainer.metrics.writer import LM
from trainer.parallel.mesh import Mesh, worker_device
from trainer.pipeline.library import init_distributed
from trainer.pipeline.partial_losses import Measured
from trainer.schedule.rules import cross_problems

REFUSALS = (CardError, CheckpointError, DataError)
WINDOWS_BETWEEN_REPORTS = 16  # of each replica


class TokenWindows(Record):
    """Windows from an integer array [n, sequence_length + 1]."""

    tokens: np.ndarray

    @property
    def row(self) -> NextTokenRow:
        """Tokens that follow each other."""
        return NextTokenRow(self.tokens.shape[1] - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, index: int, out: np.ndarray) -> None:
        out[:] = self.tokens[index]


class Evaluation(Record):
    """What an evaluation found. `loss`: mean over the windows, in nats per token; `losses`: one per
    window.

    `parts`: means of the losses of which it is the sum, and of scores, for a family that has them;
    `perplexity` is then that of the predicted words alone.
    """

    checkpoint: str
    step: int
    source: str
    windows: int
    tokens: int
    loss: float
    perplexity: float
    topology: dict[str, int]
    seconds: float
    losses: list[float]
    parts: Mapping[str, float]


def read_windows(path: Path, sequence_length: int, rows: int) -> TokenWindows:
    """Windows from an .npy file. Raises DataError: not integers [n, sequence_length + 1] below
    `rows`.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read as an .npy array ({error}); save it with numpy.save"
        ) from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or len(tokens) == 0:
        raise DataError(
            f"{path}: holds {tokens.dtype} {tokens.shape}; give integers [windows, {sequence_length + 1}]"
        )
    if tokens.shape[1] != sequence_length + 1:
        raise DataError(
            f"{path}: windows have {tokens.shape[1]} tokens, and model.sequence_length + 1 is {sequence_length + 1}; "
            f"cut them, or use --set model.sequence_length={tokens.shape[1] - 1}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= rows:
        window, place = np.argwhere((tokens < 0) | (tokens >= rows))[0].tolist()
        raise DataError(
            f"{path}: window {window} holds token {tokens[window, place]} at its place {place}; the embedding has rows"
            f" 0 to {rows - 1}: make the windows with the tokenizer of this run"
        )
    return TokenWindows(tokens)


def evaluate(
    engine: Engine, windows: SampleSource, count: int, report: Callable[[int], None]
) -> list[Measured]:
    """Each of the first `count` windows, the same list on every rank. Collective.

    `engine` must have a micro batch of one. `report` hears how many windows are done.
    """
    mesh = engine.mesh
    measured = [Measured(math.nan)] * count
    rounds = -(-count // mesh.data)
    for first in range(0, rounds, WINDOWS_BETWEEN_REPORTS):
        size = min(WINDOWS_BETWEEN_REPORTS, rounds - first)
        mine = [(first + turn) * mesh.data + mesh.data_rank for turn in range(size)]
        found = engine.measure_each(_batches(windows, mine, count), size)
        everywhere: list[list[Measured]] = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everywhere, found, group=mesh.cpu_group)
        for replica in range(mesh.data):
            for turn, one in enumerate(everywhere[mesh.rank_at(0, replica, 0)]):
                index = (first + turn) * mesh.data + replica
                if index < count:  # the last round is filled up with copies of the last window
                    measured[index] = one
        report(min(count, (first + size) * mesh.data))
    return measured


def _batches(windows: SampleSource, indices: list[int], count: int) -> Iterator[MicroBatch]:
    for index in indices:
        rows = np.empty((1, windows.row.length), dtype=np.int64)
        windows.read(min(index, count - 1), rows[0])
        yield windows.row.micro_batch(torch.from_numpy(rows))


def run(options: argparse.Namespace) -> None:
    """The whole evaluation on this rank; rank 0 writes the result."""
    began = time.perf_counter()
    config = load_trainer_config(options.card)
    device = worker_device()
    init_distributed(device, timedelta(minutes=config.parallel.start_timeout_minutes))
    world_size = dist.get_world_size()
    config = _for_evaluation(config, options, world_size)
    problems = cross_problems(config, world_size)
    if problems:
        raise CardError(str(options.card), problems)
    mesh = Mesh.create(config.parallel, device)
    rank = dist.get_rank()

    def say(line: str) -> None:
        if rank == 0:
            print(line, file=sys.stderr, flush=True)

    engine = Engine.build(config, mesh, for_training=False)
    windows, count, source = _windows(config, options, mesh, engine)
    step = load_weights(engine, options.checkpoint, say)
    length = config.model.sequence_length
    measured = evaluate(
        engine, windows, count, lambda done: say(f"evaluated {done} of {count} windows")
    )
    mean = Measured.mean(measured)
    if rank == 0:
        perplexity = perplexity_of(mean.parts.get(LM, mean.loss))
        found = Evaluation(
            str(options.checkpoint),
            step,
            source,
            windows=count,
            tokens=count * length,
            loss=mean.loss,
            perplexity=perplexity,
            topology=mesh.degrees(),
            seconds=time.perf_counter() - began,
            losses=[one.loss for one in measured],
            parts=mean.parts,
        )
        write_json(options.output, document(found))
    engine.close()


def _for_evaluation(
    config: TrainerConfig, options: argparse.Namespace, world_size: int
) -> TrainerConfig:
    """The card with a micro batch of one, whole pipeline stages, and enough validation samples.

    No more than the training's own number where that suffices: the maps, and so the samples, are
    then the training's. One micro batch at a time gains nothing by stages of several parts.
    """
    data_parallel = max(1, config.data_parallel(world_size))
    value = config.model_dump(mode="json")
    own = config.evaluation.iterations * config.batch.global_batch_size
    wanted = max(own, options.samples or 0)
    value["batch"].update(
        micro_batch_size=1, micro_batch_ramp=[], ramp=None, global_batch_size=data_parallel
    )
    value["parallel"]["virtual_stages"] = 1
    if options.split:
        value["evaluation"]["iterations"] = -(-wanted // data_parallel)
    else:
        value["evaluation"]["iterations"] = 0
    value["curriculum"] = None
    # The batch is another one, so what is counted in steps is another length; no step is made here.
    value["batch"]["train_iterations"] = None
    value["schedule"].update(decay_iterations=None, warmup_iterations=None)
    return TrainerConfig.model_validate(value)


def _windows(
    config: TrainerConfig, options: argparse.Namespace, mesh: Mesh, engine: Engine
) -> tuple[SampleSource, int, str]:
    """What is evaluated, how many windows of it, and its name. Collective. Raises DataError."""
    if options.tokens is not None:
        if config.model.family != "gpt":
            raise DataError(
                f"{options.tokens}: windows of tokens are a GPT's samples, not a {config.model.family}'s"
            )
        windows = read_windows(
            options.tokens, config.model.sequence_length, config.tokenizer.padded_vocabulary_size
        )
        count = min(options.samples or len(windows), len(windows))
        return windows, count, str(options.tokens)
    samples = open_samples(
        config, mesh, engine.needs_data, test=options.split not in {"train", "valid"}
    )
    names = [*samples.roles["train"], *samples.valid_groups(), *samples.test_groups()]
    if options.split == "train":
        name = samples.roles["train"][0]
    else:
        name = options.split
    if name not in names:
        raise DataError(
            f"--split {options.split}: there is no such data; this card has {', '.join(names)}"
        )
    if not engine.needs_data:
        nothing = TokenWindows(np.empty((0, config.model.sequence_length + 1), np.int64))
        return nothing, options.samples or _default_count(config), name
    source = samples.source(name)
    count = min(options.samples or _default_count(config), len(source))
    return source, count, name


def _default_count(config: TrainerConfig) -> int:
    return config.evaluation.iterations * config.batch.global_batch_size


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.control.evaluate", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("card", type=Path, help="a resolved run card (JSON)")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a global_stepN folder")
    parser.add_argument("--split", help="train, valid, test, or the name of a group")
    parser.add_argument(
        "--samples",
        type=int,
        help="windows to evaluate; default: all, of a split the card's number",
    )
    parser.add_argument(
        "--tokens", type=Path, help=".npy with integers [windows, sequence_length + 1]"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    options = parser.parse_args(arguments)
    if (options.split is None) == (options.tokens is None):
        parser.error("give one of --split and --tokens")
    if options.samples is not None and options.samples < 1:
        parser.error("--samples must be positive")
    return options


def main(arguments: list[str]) -> int:
    """Exit status 0 also when the input was refused: the output file then says why, under
    "refused".

    Every rank meets the same refusal and leaves by itself; a failing exit would make the launcher
    speak of deaths.
    """
    options = parse(arguments)
    try:
        run(options)
    except REFUSALS as error:
        write_json(options.output, {"refused": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
