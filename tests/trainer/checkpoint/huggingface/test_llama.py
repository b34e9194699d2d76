"""Llama and Qwen3 written for and read from `transformers`, within the bounds of BLOOM's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.cases import samples, tiny
from tests.trainer.checkpoint.huggingface.looks import (
    STEP,
    TOLERANCE,
    load_and_look,
    require_theirs,
    their_losses,
    train_and_save,
)
from tests.trainer.checkpoint.huggingface.models import EXTRAS
from tests.trainer.llama_cases import KINDS, tiny_llama
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.commands.import_ import open_for
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.huggingface.export import is_export, plan_export, write_export
from trainer.checkpoint.huggingface.llama import llama_config
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.publishing import CheckpointInfo, NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError

# As in Llama 3.1's own config.json.
LLAMA_31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def card(
    kind: str, pipeline: int = 1, tensor: int = 1, rows: int | None = None, **model: Any
) -> TrainerConfig:
    """Micro batches of one sample, so that a loss is one's. `rows`: of the vocabulary, padding
    included.
    """
    value = tiny_llama(pipeline, tensor, kind=kind, init_std=0.2, **model).model_dump(mode="json")
    value["batch"] |= {"micro_batch_size": 1}
    if rows is not None:
        value["tokenizer"] |= {"vocabulary_size": 64, "padded_vocabulary_size": rows}
    return TrainerConfig.model_validate(value)


def made_by_transformers(kind: str, **changes: Any) -> Any:
    torch.manual_seed(11)
    document = (
        llama_config(facts_of_card(card(kind)), "float32") | {"initializer_range": 0.2} | changes
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**document))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def imported(config: TrainerConfig, model: Path, folder: Path) -> Path:
    source = open_for(model, config)
    return write_checkpoint(
        NewCheckpoint(folder, 0, EXTRAS, CheckpointInfo(source.facts.topology, source.facts.model)),
        source,
    )


def transformers_model(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_exported_logits_and_losses_equal_ours(
    tmp_path: Path, kind: str, pipeline: int, tensor: int
) -> None:
    config = card(kind, pipeline, tensor)
    tokens = samples(config, 100, 4)
    ranks = run_ranks(train_and_save, pipeline * tensor, config, tmp_path, tokens)
    plan = plan_export(
        open_checkpoint(tmp_path / f"global_step{STEP}"),
        max_shard_bytes=20_000,
        extra={"seq_length": 16, "initializer_range": 0.2},
    )
    write_export(plan, tmp_path / "hf")
    assert plan.remarks == () and len(plan.shards) > 3 and is_export(tmp_path / "hf")
    model = transformers_model(tmp_path / "hf")
    assert type(model).__name__ == ("Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM")
    assert (model.config.max_position_embeddings, model.config.initializer_range) == (16, 0.2)
    with torch.no_grad():
        theirs = model(tokens[:, :-1]).logits
    assert theirs.abs().max() > 1.0
    for losses in ranks:
        torch.testing.assert_close(losses, their_losses(theirs, tokens), atol=TOLERANCE, rtol=0)
    [(losses, ours)] = run_ranks(load_and_look, 1, card(kind), tmp_path, STEP, tokens)
    torch.testing.assert_close(losses, their_losses(theirs, tokens), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (2, 2), (1, 2)])
def test_imported_logits_and_losses_equal_theirs(
    tmp_path: Path, kind: str, pipeline: int, tensor: int
) -> None:
    """Made by transformers, loaded with its masters on one to four ranks, trained for a step; and
    back, bit for bit.
    """
    config = card(kind, pipeline, tensor)
    model, tokens = made_by_transformers(kind), samples(config, 100, 4)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    place = imported(config, tmp_path / "hf", tmp_path)
    require_theirs(
        run_ranks(load_and_look, pipeline * tensor, config, tmp_path, 0, tokens), model, tokens
    )
    write_export(plan_export(open_checkpoint(place)), tmp_path / "back")
    after, before = load_file(tmp_path / "back" / "model.safetensors"), model.state_dict()
    assert set(before) - set(after) <= {"lm_head.weight"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_wherever_they_begin(tmp_path: Path, kind: str) -> None:
    """Of query, key and value in one, [groups, queries + 2, head size], and of gate and up, one
    behind the other.
    """
    made_by_transformers(kind).save_pretrained(tmp_path / "hf")
    source = open_for(tmp_path / "hf", card(kind))
    for name in ("blocks.1.attention.query_key_value.weight", "blocks.1.mlp.up.weight"):
        shape = source.tensors("weights")[name].shape
        whole = source.read("weights", name, (0,) * len(shape), shape)
        for first in range(0, shape[0], 7):
            for count in {1, min(30, shape[0] - first)}:
                begin, size = (
                    (first, *(1 for _ in shape[1:])),
                    (count, *(extent - 2 for extent in shape[1:])),
                )
                window = tuple(slice(at, at + many) for at, many in zip(begin, size, strict=True))
                assert torch.equal(source.read("weights", name, begin, size), whole[window])


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_vocabulary_is_the_same_model(tmp_path: Path, kind: str) -> None:
    """64 rows there, 96 here; and back. A table or a head with something behind the vocabulary is
    not cut.
    """
    model = made_by_transformers(kind)
    model.save_pretrained(tmp_path / "hf")
    place = imported(card(kind, rows=96), tmp_path / "hf", tmp_path)
    plan = plan_export(open_checkpoint(place), vocabulary_size=64)
    assert plan.remarks == ("32 empty rows behind the vocabulary are padding: left out",)
    write_export(plan, tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in after.items())
    assert plan_export(open_checkpoint(place)).config["vocab_size"] == 96
    larger = made_by_transformers(kind, vocab_size=96)
    with torch.no_grad():
        larger.model.embed_tokens.weight[70:] = 0
        if kind != "qwen3":
            larger.lm_head.weight[80:] = 0
    larger.save_pretrained(tmp_path / "larger")
    used = 70 if kind == "qwen3" else 80
    with pytest.raises(CheckpointError, match=rf"row {used - 1} of the vocabulary is not empty"):
        open_for(tmp_path / "larger", card(kind, rows=64))


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"model_type": "mistral"}, "only 'llama' or 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True: only False"),
        ({"mlp_bias": True}, "mlp_bias = True: only False"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 32.0}},
            "rope_parameters = 'yarn': only plain",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 32.0}},
            "original_max_position_embeddings = None: must",
        ),
        (
            {"rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": LLAMA_31},
            r"set model\.rotary_factor = 8\.0",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling = 'linear'",
        ),
        ({"rope_parameters": None, "rope_theta": 1e4}, r"set model\.rotary_base = 10000\.0"),
        ({"num_hidden_layers": 3}, r"has no tensor model\.layers\.2\."),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads = 3: must divide num_attention_heads = 4",
        ),
        (
            {"num_key_value_heads": 4},
            r"k_proj\.weight has shape \(16, 32\), config\.json says \(32, 32\)",
        ),
        (
            {"tie_word_embeddings": True},
            r"lm_head\.weight differs from model\.embed_tokens\.weight",
        ),
        ({"rms_norm_eps": 1e-6}, r"set model\.layernorm_epsilon = 1e-06"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be a number above 0"),
        ({"vocab_size": "64"}, "vocab_size = '64': must be a whole number"),
    ],
    ids=str,
)
def test_another_model_is_refused(tmp_path: Path, values: dict[str, Any], rule: str) -> None:
    made_by_transformers("llama").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError, match=rule) as caught:
        open_for(tmp_path / "hf", card("llama"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"position_embedding": "alibi"}, "model.position_embedding = 'alibi'"),
        ({"norm": "layernorm"}, "model.norm = 'layernorm'"),
        ({"activation": "gelu"}, "model.activation = 'gelu'"),
        ({"linear_biases": True, "activation": "gelu"}, "model.activation = 'gelu'"),
        ({"embedding_layernorm": True}, "model.embedding_layernorm = True"),
    ],
    ids=str,
)
def test_what_llama_cannot_express_is_refused(model: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        llama_config(facts_of_card(card("llama", **model)), "float32")
    assert str(caught.value).startswith(key) and "Llama" in str(caught.value)


def test_a_llama_is_no_bloom_and_the_other_way_round(tmp_path: Path) -> None:
    """The card and the folder must be of one kind; the line says which key differs."""
    made_by_transformers("qwen3").save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"set model\.qk_norm = True"):
        open_for(tmp_path / "hf", card("qwen3", qk_norm=False))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(CheckpointError, match="model_type = 'bloom': only 'llama' or 'qwen3'"):
        open_for(tmp_path / "hf", card("qwen3"))


@pytest.mark.parametrize(
    ("kind", "model", "key"),
    [
        ("llama", {}, r"model\.norm = 'rmsnorm'"),
        ("gpt", {"key_value_heads": 2}, r"model\.key_value_heads = 2"),
        ("gpt", {"activation": "swiglu", "linear_biases": False}, r"model\.linear_biases = False"),
        ("gpt", {"tied_embeddings": False}, r"model\.tied_embeddings = False"),
    ],
    ids=str,
)
def test_the_original_layout_has_no_place_for_it(
    tmp_path: Path, kind: str, model: dict[str, Any], key: str
) -> None:
    """Nor is anything left of the try."""
    config = card("llama", **model) if kind == "llama" else tiny(**model)
    run_ranks(train_and_save, 1, config, tmp_path / "ours", samples(config, 100, 4))
    source = open_checkpoint(tmp_path / "ours" / f"global_step{STEP}")
    with pytest.raises(
        CheckpointError, match=f"the DeepSpeed layout has no place for {key}; use the tr11 format"
    ):
        write_deepspeed_layout(
            NewCheckpoint(
                tmp_path / "theirs",
                STEP,
                EXTRAS,
                CheckpointInfo(source.facts.topology, source.facts.model),
            ),
            source,
        )
    assert not (tmp_path / "theirs").exists() or not list(
        (tmp_path / "theirs").glob("global_step*")
    )
