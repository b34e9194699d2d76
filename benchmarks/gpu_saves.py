"""What a save in the background costs the training, and a trace of two steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gpu_courses import join, small, step, trained
from gpu_rows import Row
from gpu_training import WARM_UP
from models import Shape, card

from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished
from trainer.checkpoint.writer import AsyncSaver
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.paths import RunPaths
from trainer.contract.requests import Request, RequestAnswer
from trainer.debug.profile import StepProfiler
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

SAVED_STEPS = 12  # before the first save, and at most beside each


def saves(device: torch.device) -> Iterator[Row]:
    """What two saves in the background cost the training: the checks and the time in `start`, and
    of the steps until they have ended.

    As in a training: memory is got ahead, and the copies are waited for by the update alone.
    """
    shape = (
        Shape(24, 1024, 16, 50304, 2048, 4, 2, "bf16") if device.type == "cuda" else small("bf16")
    )
    config, draw = card(shape), torch.Generator().manual_seed(1)
    join(device)
    engine = Engine.build(config, Mesh.create(config.parallel, device))
    info = CheckpointInfo({"pipeline": 1, "data": 1, "tensor": 1}, {})
    with tempfile.TemporaryDirectory() as folder:
        saver = AsyncSaver(Path(folder), print, group=engine.mesh.cpu_group, is_held=True)
        engine.before_update(saver.hold)
        saver.reserve(engine.sharded_state())

        def one_step() -> float:
            windows = shape.windows(draw)
            began = time.perf_counter()
            batches = (
                (window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows
            )
            engine.train_step(batches, config.batch.global_batch_size)
            return time.perf_counter() - began

        alone = statistics.median([one_step() for _ in range(SAVED_STEPS)][WARM_UP:])
        for number, which in enumerate(("first", "second"), start=1):
            began = time.perf_counter()
            engine.disagreeing_parameters()
            state = engine.sharded_state()
            engine.not_finite(state)
            saver.start(
                number,
                state,
                Extras({"consumed_samples": number, "consumed_tokens": number}),
                info,
            )
            stall, outcome = time.perf_counter() - began, None
            beside: list[float] = []
            while len(beside) < BEHIND or (outcome is None and len(beside) < SAVED_STEPS):
                beside.append(one_step())
                outcome = outcome or saver.poll()
            outcome = outcome or saver.wait()[0]
            if not isinstance(outcome, Finished):
                yield Row(f"{which} save in the background", str(outcome.fault), False)
                break
            yield of_save(which, outcome, stall, beside, alone)
        saver.close()
    engine.close()


# The host leaves a step when the norm of its gradients has come. What the GPU then waits for before
# the update, the copies, it sees in the next one.
BEHIND = 2


def of_save(
    which: str, saved: Finished, stall: float, beside: Sequence[float], alone: float
) -> Row:
    """A save as a line. `alone`: seconds of a step without one."""
    slower = statistics.median(beside) / alone - 1.0
    later = sum(beside[:BEHIND]) - BEHIND * alone
    text = (
        f"{saved.bytes / 2**30:.2f} GiB: the training stood still for {stall:.3f} s (goal: 0.2 s), the {BEHIND} steps"
        f" behind it took {1000 * later:+.1f} ms more; steps while it was written, {len(beside)} of them,"
        f" {100 * slower:+.1f} % (goal: 3 %); {1000 * alone:.1f} ms a step alone"
    )
    figures = {
        "bytes": saved.bytes,
        "stall": stall,
        "steps_beside": list(beside),
        "step_alone": alone,
    }
    return Row(f"{which} save in the background", text, figures=figures)


def profiled(device: torch.device) -> Iterator[Row]:
    """A trace of two steps, as `tr11 profile` asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder), "gpu", "main", "")
        profiler = StepProfiler(
            paths, AttemptIdentity("1", 1, paths.stop_request("1")), (0, 1), device
        )
        engine, _ = trained(card(small()), device, 1)
        profiler.start(Request("profile", id=1, steps=2, rank=0), 1)
        for number in (2, 3):
            step(engine, number)
            profiler.after_step(number)
        engine.close()
        answer = RequestAnswer.read(paths.answer(1))
        files = (
            sorted(paths.profiles("1").iterdir())
            if answer is not None and answer.step is not None
            else []
        )
        text = ", ".join(
            f"{file.suffixes[-2]}{file.suffixes[-1]} {file.stat().st_size / 1e6:.2f} MB"
            for file in files
        )
        yield Row(
            "profile of two steps", text or (answer.message if answer else "no answer"), bool(files)
        )
