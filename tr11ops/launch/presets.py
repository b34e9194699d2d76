"""Sizes of model that `tr11 init` starts a card from, and how far a training goes. Pure, but for
reading a card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.launch.starter import example_tables
from trainer.contract.record import Record

_TOKENS = re.compile(r"(\d{1,15}(?:\.\d{1,6})?(?:e\d{1,2})?) ?([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST_TOKENS = 10**15
# sections that name people, archives and groups of a site
OF_ITS_SITE = ("hub", "backup", "alerts", "cron", "perms")
# at most this part of the training warms up, or has a smaller batch
WARMUP_SHARE = 100
RAMP_SHARE = 20


class Preset(Record):
    """A model of this size: the shipped card it starts from, and what is different."""

    example: str
    parameters: str
    tables: Mapping[str, Mapping[str, Any]] = {}


def _sized(
    layers: int, hidden: int, heads: int, pipeline: int, nodes: int, batch: int, rate: float
) -> dict[str, Any]:
    """The sections of a BLOOM of another size: 341 billion tokens in windows of 2048, as those of
    its family.
    """
    samples = 166_500_000
    return {
        "parallel": {"tensor": 1, "pipeline": pipeline},
        "model": {
            "layers": layers,
            "hidden_size": hidden,
            "attention_heads": heads,
            "sequence_length": 2048,
            "init_std": round(math.sqrt(1 / (3 * hidden)), 4),
        },
        "schedule": {
            "learning_rate": rate,
            "min_learning_rate": rate / 10,
            "decay_samples": samples * 9 // 10,
            "warmup_samples": 183_105,
        },
        **_of_any_family(nodes, batch, samples),
        "tokenizer": {"padded_vocabulary_size": 250_880},
    }


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    tied: bool,
    length: int,
    tensor: int,
    nodes: int,
    rate: float,
) -> dict[str, Any]:
    """The sections of a Llama 3 in its published shape, but for its length: a trillion tokens in
    batches of 4 million.

    The rate of the larger one and the floor, a hundredth of it, are those of its paper (arXiv
    2407.21783).
    """
    batch = 4_194_304 // length
    samples = 10**12 // length
    return {
        "parallel": {"tensor": tensor, "pipeline": 1},
        "model": {
            "layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "attention_heads": 32,
            "key_value_heads": 8,
            "sequence_length": length,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "linear_biases": False,
            "position_embedding": "rotary",
            "rotary_base": 500_000.0,
            "embedding_layernorm": False,
            "tied_embeddings": tied,
            "init_std": 0.02,
            "activation_checkpointing": False,
        },
        "schedule": {
            "learning_rate": rate,
            "min_learning_rate": rate / 100,
            "decay_samples": samples,
            "warmup_samples": 2000 * batch,
        },
        **_of_any_family(nodes, batch, samples),
        "tokenizer": {"padded_vocabulary_size": 128_256},
    }


def _of_any_family(nodes: int, batch: int, samples: int) -> dict[str, Any]:
    """What does not depend on the family: the job, the batch and its ramp, saves, evaluations."""
    return {
        "slurm": {
            "nodes": nodes,
            "workers_per_node": 8,
            "time_limit": "20:00:00",
            "environment": {},
        },
        "batch": {
            "micro_batch_size": 1,
            "global_batch_size": batch,
            "train_samples": samples,
            "ramp": {"start": batch // 4, "increment": batch // 4, "samples": samples // 100},
        },
        "checkpoint": {"interval": 500},
        "evaluation": {"interval": 1000, "iterations": 1},
    }


PRESETS: Mapping[str, Preset] = {
    "toy": Preset("demo", "0.9 million parameters, for a laptop"),
    "1b": Preset(
        "demo",
        "1.1 billion parameters",
        _sized(24, 1536, heads=16, pipeline=1, nodes=2, batch=256, rate=2.5e-4),
    ),
    "7b": Preset(
        "demo",
        "7.1 billion parameters",
        _sized(30, 4096, heads=32, pipeline=4, nodes=4, batch=512, rate=1.2e-4),
    ),
    "llama-1b": Preset(
        "demo",
        "1.2 billion parameters in the shape of Llama 3.2",
        _llama(16, 2048, ffn=8192, tied=True, length=4096, tensor=1, nodes=2, rate=4e-4),
    ),
    "llama-8b": Preset(
        "demo",
        "8.0 billion parameters in the shape of Llama 3",
        _llama(32, 4096, ffn=14_336, tied=False, length=8192, tensor=2, nodes=8, rate=3e-4),
    ),
    "176b": Preset("tr11-176B-ml", "176 billion parameters, as BLOOM was trained"),
}


def preset_tables(name: str, folder: Path) -> dict[str, Any]:
    """The tables to start from; `folder` has the shipped cards. Raises CardError, and KeyError for
    no preset.

    What belongs to the site where the example was trained is left out: its copies and mails must go
    nowhere else.
    """
    preset = PRESETS[name]
    tables = example_tables(folder / f"{preset.example}.toml")
    for section in OF_ITS_SITE:
        tables.pop(section, None)
    tables.get("resilience", {}).pop("support_address", None)
    slurm = tables["slurm"]
    slurm["environment"] = {
        key: value for key, value in slurm.get("environment", {}).items() if "$" not in value
    }
    tables = {section: table for section, table in tables.items() if table != {}}
    for section, values in preset.tables.items():
        tables[section] = {**tables.get(section, {}), **values}
    return tables


def token_count(text: str) -> int:
    """How many tokens `450B`, `5e9`, `1.5T` or `300_000_000` are. Raises ValueError."""
    match = _TOKENS.fullmatch(text.strip().replace("_", "").replace(",", ""))
    count = 0
    if match:
        count = round(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < count <= MOST_TOKENS:
        raise ValueError("is no number of tokens; write 300B, 5e9 or 1.5T")
    return count


def tokens_of(tables: Mapping[str, Any]) -> int:
    """How many tokens the training of these tables reads, whether they count samples or steps."""
    return _samples_of(tables["batch"]) * int(tables["model"]["sequence_length"])


def _samples_of(batch: Mapping[str, Any]) -> int:
    if "train_samples" in batch:
        return int(batch["train_samples"])
    return int(batch["train_iterations"]) * int(batch["global_batch_size"])


def with_tokens(tables: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The tables for a training that reads so many tokens: its decay and cooldown are the same part
    of the whole.

    They count as they did: samples, or steps of the full batch.
    """
    batch = dict(tables["batch"])
    schedule = dict(tables.get("schedule", {}))
    samples = -(-tokens // int(tables["model"]["sequence_length"]))
    unit = "samples"
    whole = samples
    if "train_samples" not in batch:
        unit = "iterations"
        whole = -(-samples // int(batch["global_batch_size"]))
    before = int(batch[f"train_{unit}"])
    batch[f"train_{unit}"] = whole
    for key in (f"decay_{unit}", f"cooldown_{unit}"):
        if key in schedule:
            schedule[key] = max(1, round(schedule[key] * whole / before))
    if f"warmup_{unit}" in schedule:
        schedule[f"warmup_{unit}"] = min(schedule[f"warmup_{unit}"], whole // WARMUP_SHARE)
    if "ramp" in batch:
        batch["ramp"] = {
            **batch["ramp"],
            "samples": max(1, min(batch["ramp"]["samples"], samples // RAMP_SHARE)),
        }
    return {**tables, "batch": batch, "schedule": schedule}
