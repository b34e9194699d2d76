"""The rehearsal of a run: the same card on two nodes for half an hour, in a place of its own. Pure.

Everything that decides how a job starts (partition, set-up lines, environment, data, tokenizer)
stays; what makes it large and what would touch the run itself is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd
from typing import Any

from tr11ops.runcard.card import OwnCard, RunCard, escaped_variables
from tr11ops.runcard.toml_writer import write_card
from trainer.config.rules import batch_problems

SUFFIX = "rehearsal"
NODES = 2
MINUTES = 20
LIMIT = "00:30:00"
EXIT_INTERVAL = 10
LARGEST_HIDDEN = 1024
LAYERS = 2
SIGNAL_SECONDS = 300
REMOVED = ("run.kill_switch", "checkpoint.load", "hub.repository", "backup.store", "backup.url")


def is_rehearsal_card(card: RunCard) -> bool:
    """Is it made to be a rehearsal already, such as the shipped setup-test-n2?"""
    return card.slurm.nodes <= NODES and (
        card.run.variant.endswith("test-setup") or card.run.name.endswith(f"-{SUFFIX}")
    )


def rehearsal_overrides(card: OwnCard) -> dict[str, Any]:
    """What is set in the card's place, by key; None removes a key."""
    if is_rehearsal_card(card):
        return {"run.exit_interval": EXIT_INTERVAL, "run.expect_resume": False}
    early = card.slurm.signal_seconds_before_limit
    nodes = min(NODES, card.slurm.nodes)
    return {
        **dict.fromkeys(REMOVED),
        "run.name": f"{card.run.name}-{SUFFIX}",
        "run.directory": f"{card.paths.root}-{SUFFIX}",
        "run.exit_duration_minutes": min(MINUTES, card.run.exit_duration_minutes or MINUTES),
        "run.exit_interval": EXIT_INTERVAL,
        "run.expect_resume": False,
        "slurm.nodes": nodes,
        "slurm.spare_nodes": 0,
        "slurm.least_spare_nodes": None,
        "slurm.time_limit": LIMIT if card.time_limit_seconds > 1800 else card.slurm.time_limit,
        "slurm.signal_seconds_before_limit": None if early is None else min(early, SIGNAL_SECONDS),
        "slurm.master_port": None if card.slurm.master_port is None else card.slurm.master_port + 1,
        "slurm.comment": SUFFIX,
        **_shape(card, nodes * card.slurm.workers),
    }


def _shape(card: OwnCard, workers: int) -> dict[str, Any]:
    """Topology, model and batch that fit so many workers: as parallel as the card's, in as many
    ways.
    """
    tensor = gcd(card.parallel.tensor, workers)
    if card.parallel.pipeline > 1 and workers // tensor % 2 == 0:
        pipeline = 2
    else:
        pipeline = 1
    hidden = card.model.hidden_size
    heads = card.model.attention_heads
    shape: dict[str, Any] = {
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.virtual_stages": 1,
        "model.layers": min(LAYERS, card.model.layers),
    }
    if hidden > LARGEST_HIDDEN:
        per_head = hidden // heads
        fits = LARGEST_HIDDEN % per_head == 0 and LARGEST_HIDDEN // per_head % tensor == 0
        if fits:
            fewer = LARGEST_HIDDEN // per_head
        else:
            fewer = 8 * tensor
        shape |= {
            "model.hidden_size": LARGEST_HIDDEN,
            "model.attention_heads": fewer,
            "model.ffn_hidden_size": None,
        }
        if card.model.key_value_heads is not None:
            groups = fewer // (heads // card.model.groups)
            is_even = groups > 0 and fewer % groups == groups % tensor == 0
            shape["model.key_value_heads"] = groups if is_even else tensor
    replicas = workers // (tensor * pipeline)
    if batch_problems(card.batch, replicas):
        chunk = card.batch.micro_batch_size * replicas
        batch = max(1, card.batch.global_batch_size // chunk) * chunk
        shape |= {
            "batch.ramp": None,
            "batch.micro_batch_ramp": [],
            "batch.global_batch_size": batch,
        }
    return shape


def as_options(overrides: Mapping[str, Any]) -> list[str]:
    """The same as `--set` takes it. A dollar sign is doubled: these values are not to be expanded
    once more.
    """
    return [f"{key}={_option(value)}" for key, value in overrides.items()]


def _option(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return json.dumps(value.replace("$", "$$"))
    return json.dumps(value)


def card_text(card: RunCard, head: str) -> str:
    """The card as a file of its own, for `tr11 status --run FILE` and all other commands; `head` is
    its first line.
    """
    tables = card.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return write_card(escaped_variables(tables, ()), {}, [head])
