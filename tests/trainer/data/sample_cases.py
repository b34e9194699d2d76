"""Cards whose data are small pairs, and the samples that they open."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.card import TrainerConfig
from trainer.data.samples import Samples, plan_data, wanted_data

LENGTH = 16


def card(
    folder: Path, data: Mapping[str, Any], evaluations: int = 1, train_samples: int = 400
) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "run": {"name": "tiny", "directory": str(folder), "seed": 5},
            "model": {
                "layers": 1,
                "hidden_size": 8,
                "attention_heads": 1,
                "sequence_length": LENGTH,
            },
            "batch": {
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "train_samples": train_samples,
            },
            "schedule": {"learning_rate": 1e-3},
            "checkpoint": {"interval": 10},
            "evaluation": {"iterations": evaluations},
            "data": {"cache": str(folder / "cache"), **data},
            "tokenizer": {"padded_vocabulary_size": 8192},
        }
    )


def opened(config: TrainerConfig, test: bool = False, **changes: Any) -> Samples:
    wanted = wanted_data(config, test)
    plans = plan_data(config, wanted)
    values = {
        "micro_batch_size": config.batch.micro_batch_size,
        "replica": 0,
        "replicas": 1,
        "order": config.data.order,
        "workers": config.data.workers,
        "valid_workers": config.data.valid_workers,
    }
    return Samples(plans, wanted.roles, **{**values, **changes})
