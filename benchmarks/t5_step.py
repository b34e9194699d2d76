"""Tokens per second of one process on the CPU: our T5 beside transformers' Blenderbot and T5 of the
same sizes.

    python benchmarks/t5_step.py [--dtype fp32|bf16] [--steps 5] [--threads N]

A step is forward, backward, clipping and AdamW. Blenderbot is the same network as ours (but for the
tied embedding's gradient path). `transformers`' T5 is not: it has relative positions,
root-mean-square norms and no biases, which is a little less to compute. Samples are full: no token
is padding, and every token of the decoder counts. All take turns step by step; medians of wall time
are compared, and the best steps by the processor time that they took.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from models import DECODER, Shape, Step, card, engine_step, loop
from msgspec.structs import replace
from torch import Tensor
from training_turns import take_turns
from transformers import (
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tr11ops.agent.allocation import free_port
from trainer.checkpoint.huggingface.blenderbot import t5_config
from trainer.config.card import TrainerConfig
from trainer.contract.resumable import model_facts
from trainer.pipeline.library import init_distributed

SHAPE = Shape(
    layers=4, hidden=256, heads=8, vocabulary=8192, length=256, micro=4, accumulated=2, family="t5"
)


def ours(config: TrainerConfig, device: torch.device) -> Step:
    """One step of our engine on windows that hold both sides."""
    step = engine_step(config, device)

    def fields(window: Tensor) -> dict[str, Tensor]:
        text, answer, labels = parts_of(window, config.model.sequence_length)
        sides = {
            "text_enc": text,
            "text_dec": answer,
            "labels": labels,
            "loss_mask": torch.ones_like(labels),
        }
        return sides | {"enc_mask": torch.ones_like(text), "dec_mask": torch.ones_like(answer)}

    return lambda windows: step([fields(window) for window in windows])


def parts_of(window: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the encoder, of the decoder, and labels, of a window that holds them in this order."""
    return (
        window[:, :length],
        window[:, length:-1].contiguous(),
        window[:, length + 1 :].contiguous(),
    )


def loss_of(model: Any, length: int) -> Callable[[Tensor], Tensor]:
    """Their loss of a window. A mask is given, as a training has one."""

    def loss(window: Tensor) -> Tensor:
        text, answer, labels = parts_of(window, length)
        mask = torch.ones_like(text)
        found = model(
            input_ids=text,
            attention_mask=mask,
            decoder_input_ids=answer,
            labels=labels,
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    return loss


def blenderbot_step(shape: Shape, device: torch.device) -> Step:
    """One step of transformers' Blenderbot: the same network as ours."""
    like = BlenderbotForConditionalGeneration(
        BlenderbotConfig(**t5_config(model_facts(card(shape)), "float32"))
    )
    return loop(like, shape, device, loss_of(like, shape.length))


def relative(shape: Shape) -> T5ForConditionalGeneration:
    """transformers' T5 of the same sizes."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=shape.vocabulary,
            d_model=shape.hidden,
            d_kv=shape.hidden // shape.heads,
            d_ff=4 * shape.hidden,
            num_layers=shape.layers,
            num_heads=shape.heads,
            dropout_rate=0.0,
            feed_forward_proj="gelu_new",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    device = torch.device("cpu")
    init_distributed(device)
    shape = replace(SHAPE, dtype=options.dtype)
    config = card(shape)
    other = relative(shape)
    steps = {
        "tr11": ours(config, device),
        "Blenderbot": blenderbot_step(shape, device),
        "T5": loop(other, shape, device, loss_of(other, shape.length)),
    }
    generator = torch.Generator().manual_seed(1)
    what = f"{options.dtype}, {options.threads} threads"
    tokens = replace(shape, length=shape.length + DECODER).tokens
    take_turns(steps, lambda: shape.batches(generator), options.steps, what, tokens)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
