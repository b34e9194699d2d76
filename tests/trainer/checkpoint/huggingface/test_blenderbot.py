"""A T5's checkpoint as transformers' Blenderbot: the same loss, whatever shape wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BlenderbotForConditionalGeneration

from tests.trainer.checkpoint.huggingface.models import train_and_save
from tests.trainer.spawn import run_ranks
from tests.trainer.t5_cases import t5_batches, t5_samples, tiny_t5
from trainer.checkpoint.huggingface.export import is_export, plan_export, write_export
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.reader import open_checkpoint
from trainer.contract.errors import CheckpointError


def test_an_export_has_the_same_loss_and_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    config = tiny_t5(2, batch={"micro_batch_size": 4}, model={"activation": "gelu"})
    ours = run_ranks(train_and_save, 2, config, tmp_path, t5_batches)[0]
    source = open_checkpoint(tmp_path / "global_step3")
    plan = plan_export(
        source,
        card_facts=facts_of_card(config),
        max_shard_bytes=40_000,
        extra={"initializer_range": 0.05},
    )
    write_export(plan, tmp_path / "hf")
    assert is_export(tmp_path / "hf") and len(plan.shards) > 1
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["init_std"] == 0.05
    model, told = BlenderbotForConditionalGeneration.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.final_logits_bias.abs().max() > 0
    drawn = t5_samples(config, 9, 4)
    with torch.no_grad():
        found = model.eval()(
            input_ids=drawn["text_enc"],
            attention_mask=drawn["enc_mask"],
            decoder_input_ids=drawn["text_dec"],
            labels=drawn["labels"].masked_fill(drawn["labels"] < 0, -100),
        )
    assert abs(float(found.loss) - ours) <= 2e-6
    source.facts.model["model.layernorm_epsilon"] = 1e-6  # type: ignore[index]
    with pytest.raises(
        CheckpointError, match="Blenderbot architecture of Hugging Face has only 1e-05"
    ):
        plan_export(source)
