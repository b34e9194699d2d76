"""Cards for the schedule's tests: the tr11 sections, with whatever a test changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from trainer.config.card import ModelSection, TokenizerSection, TrainerConfig

CURRICULA = st.one_of(
    st.none(),
    st.builds(
        lambda start, total, kind: {
            "kind": kind,
            "start_length": start * 4,
            "step": 4,
            "total_steps": total,
        },
        st.integers(1, 8),
        st.integers(1, 120),
        st.sampled_from(["linear", "root"]),
    ),
    st.builds(
        lambda first, second: {
            "kind": "discrete",
            "lengths": [8, 20, 32],
            "until_steps": [first, first + second],
        },
        st.integers(1, 60),
        st.integers(1, 60),
    ),
)


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


def ramped(
    start: int, increment: int, samples: int, full: int, train: int, **sections: Any
) -> TrainerConfig:
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


@st.composite
def small_cards(draw: st.DrawFn) -> TrainerConfig:
    increment = draw(st.integers(1, 9))
    start = draw(st.integers(1, 20))
    full = start + increment * draw(st.integers(1, 15))
    sections: dict[str, Any] = {"model": {"sequence_length": 32}}
    curriculum = draw(CURRICULA)
    if curriculum is not None:
        sections["curriculum"] = curriculum
    config = ramped(
        start,
        increment,
        draw(st.integers(0, 3000)),
        full,
        draw(st.integers(start, 6000)),
        **sections,
    )
    tokens = draw(st.one_of(st.none(), st.integers(1, 6000 * 32)))
    return config.model_copy(
        update={"batch": config.batch.model_copy(update={"train_tokens": tokens})}
    )


def card_of(model: ModelSection, vocabulary: int = 64, **sections: Any) -> TrainerConfig:
    """TR11 with another model, words and sections."""
    words = TokenizerSection.model_construct(padded_vocabulary_size=vocabulary)
    return card().model_copy(update={"model": model, "tokenizer": words, **sections})
