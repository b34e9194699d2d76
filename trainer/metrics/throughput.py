"""What a step's time was worth: TFLOPs by the original's formula, model FLOPs, and their share of
the device's peak.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.card import TrainerConfig
from trainer.metrics.writer import Interval, StepContext
from trainer.parallel.mesh import Mesh
from trainer.schedule.devices import peak_tflops
from trainer.schedule.flops import counted_gigaflops, mixed_peak, tflops_per_gpu
from trainer.schedule.progress import Progress
from trainer.schedule.utilization import Utilization, utilization


class ThroughputMeter:
    """Turns the sums of a log interval into rates. One for each training."""

    def __init__(self, config: TrainerConfig, mesh: Mesh):
        self._config = config
        self._world_size, self._replicas = mesh.world_size, mesh.data
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
        length = interval.tokens // max(1, interval.samples)
        return tflops_per_gpu(
            self._config,
            interval.samples / interval.steps,
            seconds=interval.seconds / interval.steps,
            world_size=self._world_size,
            sequence_length=length,
        )

    def numbers(self, interval: Interval) -> dict[str, Any]:
        """For the machine-readable record: operations per second and utilisation, None where the
        peak is unknown.
        """
        found = self._utilization(interval)
        return {
            "model_tflops": found.model_tflops,
            "hardware_tflops": found.hardware_tflops,
            "mfu": found.mfu,
            "hfu": found.hfu,
            "device": self.device,
        }

    def context(self, interval: Interval, progress: Progress) -> StepContext:
        """What TensorBoard shows beside the record."""
        return StepContext(
            self._replicas,
            self._config.model.sequence_length,
            self.gigaflops(progress.consumed_samples),
            utilisation=self._utilization(interval).mfu,
            timers={name: seconds / interval.steps for name, seconds in interval.timers.items()},
        )

    def gigaflops(self, samples: int) -> float:
        """The original's axis of work done."""
        return counted_gigaflops(self._config, samples)

    def _utilization(self, interval: Interval) -> Utilization:
        length = interval.tokens // max(1, interval.samples)
        return utilization(
            self._config,
            interval.samples,
            seconds=interval.seconds,
            world_size=self._world_size,
            peak_tflops=self._peak,
            sequence_length=length,
        )
