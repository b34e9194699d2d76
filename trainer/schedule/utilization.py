"""How well workers use their devices: the operations of `trainer.schedule.flops` over time and
peak. Free of torch.
"""

from __future__ import annotations

from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.schedule.flops import hardware_flops, model_flops


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
