"""Cards for the schedule's tests: the tr11 sections, with whatever a test changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config import TrainerConfig

TR11: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "tr11", "directory": "/nowhere"},
    "model": {"layers": 2, "hidden_size": 32, "attention_heads": 4, "sequence_length": 2048},
    "batch": {
        "micro_batch_size": 1,
        "global_batch_size": 2048,
        "train_samples": 220_000_000,
        "ramp": {"start": 192, "increment": 16, "samples": 9_765_625},
    },
    "schedule": {
        "learning_rate": 6e-5,
        "min_learning_rate": 6e-6,
        "decay_samples": 200_000_000,
        "warmup_samples": 183_105,
    },
    "checkpoint": {"interval": 100},
    "data": {"prefixes": ["unused"]},
    "tokenizer": {"padded_vocabulary_size": 64},
}


def card(**sections: Mapping[str, Any] | None) -> TrainerConfig:
    """TR11 with sections replaced key by key; a key of value None is removed."""
    tables: dict[str, Any] = {name: dict(table) for name, table in TR11.items()}
    for name, changes in sections.items():
        tables[name] = {key: value for key, value in {**tables.get(name, {}), **(changes or {})}.items()
                        if value is not None}  # fmt: skip
    return TrainerConfig.model_validate(tables)


def ramped(start: int, increment: int, samples: int, full: int, train: int, **sections: Any) -> TrainerConfig:
    """A card with this batch ramp."""
    ramp = {"start": start, "increment": increment, "samples": samples}
    return card(batch={"global_batch_size": full, "train_samples": train, "ramp": ramp}, **sections)


def constant(size: int, train: int, **sections: Any) -> TrainerConfig:
    """A card without a ramp, whose warm-up and decay do not matter."""
    return card(
        batch={"global_batch_size": size, "train_samples": train, "ramp": None},
        schedule={"warmup_samples": None, "decay_samples": None},
        **sections,
    )
