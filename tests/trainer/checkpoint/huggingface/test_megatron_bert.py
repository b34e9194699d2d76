"""A BERT's checkpoint as transformers' Megatron-BERT: the same loss, whatever shape wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import MegatronBertForPreTraining

from tests.trainer.bert_cases import bert_batches, bert_samples, tiny_bert
from tests.trainer.checkpoint.huggingface.models import train_and_save
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.huggingface.export import is_export, plan_export, write_export
from trainer.checkpoint.huggingface.names import facts_of_card
from trainer.checkpoint.reader import open_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerConfig, Path, float]:
    config = tiny_bert(1, 2, batch={"micro_batch_size": 4}, model={"activation": "gelu"})
    folder = tmp_path_factory.mktemp("bert")
    return config, folder / "global_step3", run_ranks(train_and_save, 2, config, folder, bert_batches)[0]


def test_an_export_has_the_same_loss(saved: tuple[TrainerConfig, Path, float], tmp_path: Path) -> None:
    config, place, ours = saved
    plan = plan_export(open_checkpoint(place), card_facts=facts_of_card(config), max_shard_bytes=20_000)
    write_export(plan, tmp_path / "hf")
    assert is_export(tmp_path / "hf") and len(plan.shards) > 1
    model, told = MegatronBertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    drawn = bert_samples(config, 9, 4)
    with torch.no_grad():
        found = model.eval()(
            drawn["text"],
            attention_mask=drawn["padding_mask"],
            token_type_ids=drawn["types"],
            labels=drawn["labels"].masked_fill(drawn["labels"] < 0, -100),
            next_sentence_label=drawn["is_random"],
        )
    assert abs(float(found.loss) - ours) <= 2e-6


def test_another_dtype_and_the_config(saved: tuple[TrainerConfig, Path, float], tmp_path: Path) -> None:
    _, place, _ = saved
    write_export(plan_export(open_checkpoint(place), dtype="bf16", extra={"seq_length": 16}), tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["dtype"], written["hidden_act"], written["vocab_size"]) == ("bfloat16", "gelu", 64)
    assert "seq_length" not in written


def test_what_it_cannot_say_is_refused(saved: tuple[TrainerConfig, Path, float]) -> None:
    config, place, _ = saved
    source = open_checkpoint(place)
    facts = {"model.kv_channels": 12}
    with pytest.raises(CheckpointError, match=r"model\.kv_channels"):
        plan_export(source, card_facts=facts_of_card(config) | facts)
    source.facts.model["model.kv_channels"] = 12  # type: ignore[index]
    with pytest.raises(CheckpointError, match="Megatron-BERT architecture of Hugging Face has only 8"):
        plan_export(source)
