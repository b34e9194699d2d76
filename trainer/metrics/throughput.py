"""What a step's time was worth: TFLOPs by the original's formula, model FLOPs, and their share of
the device's peak.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import asdict

from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.metrics.writer import Interval
from trainer.parallel.mesh import Mesh
from trainer.schedule.devices import peak_tflops
from trainer.schedule.flops import hardware_flops, mixed_peak, model_flops, tflops_per_gpu


class Utilization(Record):
    """Operations per second of each worker, in TFLOPs, and their share of the device's dense peak.

    `mfu` counts what the model needs, `hfu` also what is recomputed; None where the device's peak
    is not known.
    """

    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None


def utilization(
    card: TrainerConfig,
    samples: int,
    seconds: float,
    world_size: int,
    peak_tflops: float | None,
    sequence_length: int | None = None,
) -> Utilization:
    """How well `world_size` workers used their devices when `samples` samples took `seconds`.

    `peak_tflops` of one device in the training's dtype: `trainer.schedule.devices.peak_tflops`.
    """
    scale = seconds * world_size * 1e12
    needed, done = (
        count(card, samples, sequence_length) / scale for count in (model_flops, hardware_flops)
    )
    if peak_tflops is None:
        return Utilization(needed, done, None, None)
    return Utilization(needed, done, needed / peak_tflops, done / peak_tflops)


class ThroughputMeter:
    """Turns the sums of a log interval into rates. One for each training."""

    def __init__(self, config: TrainerConfig, mesh: Mesh):
        self._config = config
        self._world_size = mesh.world_size
        name = None
        if mesh.device.type == "cuda":
            name = torch.cuda.get_device_name(mesh.device)
        self.device = name or "cpu"
        if name is None:
            self._peak = None
        else:
            self._peak = peak_tflops(name, config.precision.dtype)
        if config.precision.float8 and name is not None:
            self._peak = mixed_peak(config, self._peak, peak_tflops(name, "float8"))

    def tflops(self, interval: Interval) -> float:
        """TFLOPs of each worker by the original's formula, recomputation counted."""
        return tflops_per_gpu(
            self._config,
            interval.samples / interval.steps,
            seconds=interval.seconds / interval.steps,
            world_size=self._world_size,
            sequence_length=interval.length,
        )

    def numbers(self, interval: Interval) -> dict[str, Any]:
        """For the machine-readable record: operations per second and utilisation, None where the
        peak is unknown.
        """
        found = utilization(
            self._config,
            interval.samples,
            seconds=interval.seconds,
            world_size=self._world_size,
            peak_tflops=self._peak,
            sequence_length=interval.length,
        )
        return {**asdict(found), "device": self.device}
