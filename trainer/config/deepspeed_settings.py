"""What DeepSpeed is told: its configuration, as it follows from the run card. Each setting that
matters says why.
"""

from __future__ import annotations

from typing import Any

from trainer.config.card import TrainerConfig

BUCKET_ELEMENTS = 1 << 26


def deepspeed_settings(
    config: TrainerConfig, local_elements: int, for_training: bool
) -> dict[str, Any]:
    """DeepSpeed's own configuration for a card. `local_elements`: of this worker's parameters.

    ZeRO-1 always: without it fp32 pipelines count the tied weight twice when clipping. Not
    `for_training`: there is nothing to shard.
    """
    batch = config.batch
    first = batch.ramp.start if batch.ramp else batch.global_batch_size
    settings: dict[str, Any] = {
        "train_batch_size": first,
        "train_micro_batch_size_per_gpu": batch.micro_batch_at(first),
        "gradient_clipping": config.optimizer.clip_grad,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": min(local_elements, BUCKET_ELEMENTS),
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        # by default the sums over replicas are rounded to the weights' dtype
        "communication_data_type": "fp32",
    }
    precision = config.precision
    if precision.dtype == "bf16":
        # else a second copy in bf16 stays alive
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if not for_training:
        settings["zero_optimization"] = {"stage": 0}
        settings.pop("data_types", None)
    if precision.dtype == "fp16":
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale or 0,  # 0 is the library's word for dynamic
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return settings
