"""A BERT's checkpoint as transformers' Megatron-BERT: the same loss, whatever shape wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BlenderbotForConditionalGeneration, MegatronBertForPreTraining

from tests.trainer.bert_cases import bert_batches, bert_samples, tiny_bert
from tests.trainer.checkpoint.huggingface.models import train_and_save
from tests.trainer.spawn import run_ranks
from tests.trainer.t5_cases import t5_batches, t5_samples, tiny_t5
from trainer.checkpoint.commands.import_ import open_for
from trainer.checkpoint.huggingface.export import is_export, plan_export, write_export
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.reader import open_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerConfig, Path, float]:
    config = tiny_bert(1, 2, batch={"micro_batch_size": 4}, model={"activation": "gelu"})
    folder = tmp_path_factory.mktemp("bert")
    return (
        config,
        folder / "global_step3",
        run_ranks(train_and_save, 2, config, folder, bert_batches)[0],
    )


def test_an_export_has_the_same_loss(
    saved: tuple[TrainerConfig, Path, float], tmp_path: Path
) -> None:
    config, place, ours = saved
    plan = plan_export(
        open_checkpoint(place), card_facts=facts_of_card(config), max_shard_bytes=20_000
    )
    write_export(plan, tmp_path / "hf")
    assert is_export(tmp_path / "hf") and len(plan.shards) > 1
    model, told = MegatronBertForPreTraining.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
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


def test_another_dtype_and_the_config(
    saved: tuple[TrainerConfig, Path, float], tmp_path: Path
) -> None:
    _, place, _ = saved
    write_export(
        plan_export(open_checkpoint(place), dtype="bf16", extra={"seq_length": 16}), tmp_path / "hf"
    )
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["dtype"], written["hidden_act"], written["vocab_size"]) == (
        "bfloat16",
        "gelu",
        64,
    )
    assert "seq_length" not in written


def test_what_it_cannot_say_is_refused(saved: tuple[TrainerConfig, Path, float]) -> None:
    config, place, _ = saved
    source = open_checkpoint(place)
    facts = {"model.kv_channels": 12}
    with pytest.raises(CheckpointError, match=r"model\.kv_channels"):
        plan_export(source, card_facts=facts_of_card(config) | facts)
    source.facts.model["model.kv_channels"] = 12  # type: ignore[index]
    with pytest.raises(
        CheckpointError, match="Megatron-BERT architecture of Hugging Face has only 8"
    ):
        plan_export(source)
    source.facts.model.update({"model.kv_channels": 8, "model.ffn_hidden_size": 7})  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"mlp\.up\.weight has shape .* in the checkpoint, a"):
        plan_export(source)


# ----------------------------------------------------------------------------- import
@pytest.fixture(scope="module")
def exported_once(
    saved: tuple[TrainerConfig, Path, float], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    config, place, _ = saved
    folder = tmp_path_factory.mktemp("export") / "hf"
    write_export(
        plan_export(
            open_checkpoint(place), card_facts=facts_of_card(config), max_shard_bytes=20_000
        ),
        folder,
    )
    return folder


@pytest.fixture
def exported(exported_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_once, tmp_path / "hf"))


def whole(source: Any, key: str, part: Any = "weights") -> torch.Tensor:
    shape = source.tensors(part)[key].shape
    found: torch.Tensor = source.read(part, key, (0,) * len(shape), shape)
    return found


def test_an_import_is_the_inverse_of_an_export(
    saved: tuple[TrainerConfig, Path, float], exported: Path
) -> None:
    config, place, _ = saved
    ours, theirs = open_checkpoint(place), open_for(exported, config)
    assert theirs.tensors("weights") == ours.tensors("weights") and theirs.padding_rows == 0
    for key in ours.tensors("weights"):
        assert torch.equal(whole(theirs, key), whole(ours, key)), key
        assert torch.equal(whole(theirs, f"{key}/fp32", "optimizer"), whole(ours, key))
    fused = "blocks.1.attention.query_key_value.weight"  # any rows of it
    for first, count in ((0, 1), (5, 40), (23, 2)):
        some = whole(ours, fused)[first : first + count, 3:10]
        assert torch.equal(theirs.read("weights", fused, (first, 3), (count, 7)), some)
    write_export(plan_export(theirs, card_facts=facts_of_card(config)), exported.parent / "again")
    again = open_for(exported.parent / "again", config)
    assert all(torch.equal(whole(again, key), whole(ours, key)) for key in ours.tensors("weights"))


def test_padding_is_of_zeros_and_only_zeros_are_cut(
    saved: tuple[TrainerConfig, Path, float], exported: Path
) -> None:
    config, _, _ = saved

    def with_rows(padded: int, tokens: int) -> TrainerConfig:
        value = config.model_dump(mode="json")
        value["tokenizer"] |= {"padded_vocabulary_size": padded, "vocabulary_size": tokens}
        return TrainerConfig.model_validate(value)

    more, exact = open_for(exported, with_rows(80, 60)), open_for(exported, config)
    assert more.padding_rows == 16
    for key in ("embedding.word.weight", "heads.word_bias"):
        assert (
            torch.equal(whole(more, key)[:64], whole(exact, key))
            and not whole(more, key)[64:].any()
        )
    with pytest.raises(CheckpointError, match=r"row 63 of the vocabulary is not empty"):
        open_for(exported, with_rows(48, 40))


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"model_type": "bert"}, "only 'megatron-bert' can be imported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': only gelu"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ({"num_hidden_layers": 3}, r"has no tensor bert\.encoder\.layer\.2\."),
        ({"num_hidden_layers": 1}, "is no part of a Megatron-BERT for pre-training"),
        ({"vocab_size": "64"}, "vocab_size = '64': must be a whole number"),
        ({"num_attention_heads": 5}, "must divide hidden_size"),
        ({"layer_norm_eps": 1e-12}, r"set model\.layernorm_epsilon = 1e-12"),
        ({"max_position_embeddings": 20}, r"position_embeddings\.weight has shape \(16, 32\)"),
    ],
    ids=str,
)
def test_another_bert_is_refused(
    saved: tuple[TrainerConfig, Path, float], exported: Path, values: dict[str, Any], rule: str
) -> None:
    path = exported / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError, match=rule):
        open_for(exported, saved[0])


def test_a_model_that_transformers_saved_is_read(
    saved: tuple[TrainerConfig, Path, float], exported: Path
) -> None:
    """It repeats the tied tensors in torch's own format; a copy that differs is refused."""
    config, _, _ = saved
    state = MegatronBertForPreTraining.from_pretrained(exported).state_dict()
    state["bert.embeddings.position_ids"] = torch.arange(16.0).unsqueeze(0)
    for path in exported.glob("*.safetensors*"):
        path.unlink()
    torch.save(state, exported / "pytorch_model.bin")
    assert torch.equal(
        whole(open_for(exported, config), "heads.word_bias"), state["cls.predictions.bias"]
    )
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"] + 1
    torch.save(state, exported / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"decoder\.bias differs from cls\.predictions\.bias"):
        open_for(exported, config)


# ----------------------------------------------------------------------------- blenderbot
# A T5's checkpoint as transformers' Blenderbot: the same loss, whatever shape wrote it.


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
