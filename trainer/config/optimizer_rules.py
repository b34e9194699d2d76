"""Rules of the card's optimizer: which keys belong to which."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.base import Problem
from trainer.config.model import OptimizerSection

_LAMB_KEYS = ("lamb_variant", "lamb_norms", "embedding_alpha")


def optimizer_problems(section: OptimizerSection) -> Iterator[Problem]:
    """Keys of LAMB without LAMB, and what a variant needs."""
    defaults = {key: OptimizerSection.model_fields[key].default for key in _LAMB_KEYS}
    changed = [key for key, default in defaults.items() if getattr(section, key) != default]
    if section.type != "lamb":
        for key in changed:
            rule, fix = 'belongs to optimizer.type = "lamb"', "leave it out, or use that optimizer"
            yield Problem(f"optimizer.{key}", getattr(section, key), rule, fix)
    elif "embedding_alpha" in changed and section.lamb_variant != "embedding-lr":
        rule = 'belongs to optimizer.lamb_variant = "embedding-lr"'
        yield Problem("optimizer.embedding_alpha", section.embedding_alpha, rule, "leave it out, or use that variant")
    if section.type == "lamb" and section.lamb_variant == "nvlamb" and not section.clip_grad:
        rule = "must be above 0 for nvlamb, which adapts to clipped gradients"
        yield Problem("optimizer.clip_grad", section.clip_grad, rule, 'use 1.0, or lamb_variant = "paper"')
