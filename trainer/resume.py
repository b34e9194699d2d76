"""Where a training stands, and how that is saved and found again: progress, random state, and the engine's tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import randomness, store
from trainer.checkpoint.store import CheckpointInfo, Extras
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.mesh import Mesh


@dataclass(frozen=True)
class Progress:
    """The counters that move with every step. `skipped` and `nan` count over the whole training."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    nan: int = 0

    def after_step(self, samples: int, sequence_length: int, loss: float, skipped: bool) -> Progress:
        """The counters after one step of `samples` samples; data is consumed even where the update was skipped."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + samples * sequence_length,
            skipped=self.skipped + int(skipped),
            nan=self.nan + int(not math.isfinite(loss)),
        )


def load_newest(config: TrainerConfig, mesh: Mesh, engine: Engine, say: Callable[[str], None]) -> Progress:
    """Resume from the newest complete checkpoint, or start at zero when the run has none. Collective.

    Raises CheckpointError when there are checkpoints and none can be used, or when the run must resume and cannot.
    """
    folder = config.paths.checkpoints
    step = store.find_resumable(folder, config.checkpoint.verify, config.run.expect_resume, say, mesh.cpu_group)
    if step is None:
        say(f"no checkpoint in {folder}: starting from random weights")
        return Progress()
    state = engine.sharded_state()
    loaded = store.load(folder, step, state, _info(config, mesh, "", ""), group=mesh.cpu_group)
    engine.finish_load(replace(state, optimizer_step=loaded.optimizer_step))
    for remark in loaded.remarks:
        say(remark)
    # The masks of dropout are drawn from (seed, step, place), so another topology needs no random state of its own.
    if loaded.rng is not None:
        randomness.restore(loaded.rng)
    progress = Progress(**{name: int(loaded.cursor[name]) for name in Progress.__dataclass_fields__})
    say(f"  successfully loaded checkpoint from {folder} at iteration {progress.iteration}")
    return progress


def save_progress(
    config: TrainerConfig,
    card_hash: str,
    mesh: Mesh,
    engine: Engine,
    progress: Progress,
    job_id: str,
    say: Callable[[str], None],
) -> None:
    """Write the checkpoint of this iteration. Collective. Raises CheckpointError on every rank when it cannot."""
    folder = config.paths.checkpoints
    say(f"saving checkpoint at iteration {progress.iteration:7d} to {folder}")
    extras = Extras(cursor=dict(vars(progress)), rng=randomness.capture())
    result = store.save(
        folder,
        progress.iteration,
        engine.sharded_state(),
        extras,
        _info(config, mesh, card_hash, job_id),
        group=mesh.cpu_group,
    )
    say(f"  successfully saved checkpoint at iteration {progress.iteration:7d} to {folder}")
    say(f"time (ms) | save-checkpoint: {result.seconds * 1000:.2f}")


def _info(config: TrainerConfig, mesh: Mesh, card_hash: str, job_id: str) -> CheckpointInfo:
    model, vocabulary = config.model, config.tokenizer.padded_vocabulary_size
    facts: dict[str, Any] = {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.attention_heads": model.attention_heads,
        "model.ffn_hidden_size": model.ffn,
        "model.position_embedding": model.position_embedding,
        "model.embedding_layernorm": model.embedding_layernorm,
        "tokenizer.padded_vocabulary_size": vocabulary,
        "precision.dtype": config.precision.dtype,
    }
    if model.position_embedding == "absolute":
        facts["model.max_position_embeddings"] = model.positions
    return CheckpointInfo(
        topology=mesh.degrees(),
        model=facts,
        run_card_hash=card_hash,
        versions={"torch": torch.__version__, "deepspeed": metadata.version("deepspeed")},
        job_id=job_id,
    )


def read_card_hash(card: Path) -> str:
    """The hash that the launcher wrote into the resolved card; empty for a card made by hand.

    Read it once, at the start: later the file may be gone, on one node and not on another.
    """
    if not card.is_file():
        return ""
    derived = json.loads(card.read_text(encoding="utf-8")).get("derived", {})
    return str(derived.get("card_hash", ""))
