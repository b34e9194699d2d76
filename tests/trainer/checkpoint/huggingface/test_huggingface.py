"""Export to and import from Hugging Face, judged by `transformers` and `safetensors`: numbers,
files, tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.nn import functional

from tests.trainer.cases import samples, tiny
from tests.trainer.checkpoint.huggingface.looks import (
    STEP,
    TOLERANCE,
    load_and_look,
    require_theirs,
    their_losses,
    train_and_save,
)
from tests.trainer.checkpoint.huggingface.models import (
    EXTRAS,
    card,
    made_by_transformers,
    make_checkpoint,
)
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.commands.import_ import open_for
from trainer.checkpoint.huggingface.bloom import BLOOM, bloom_config
from trainer.checkpoint.huggingface.export import plan_export, tokenizer_files, write_export
from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.publishing import CheckpointInfo, NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError
from trainer.data.learn_tokenizer import train_tokenizer


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import BloomForCausalLM

    model, report = BloomForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


# ----------------------------------------------------------------------------- export
@pytest.mark.parametrize("heads", [6, 12])
def test_exported_logits_and_losses_equal_ours(tmp_path: Path, heads: int) -> None:
    """Trained and saved on tensor 2 x pipeline 2; judged by transformers against four ranks and
    against one.
    """
    config = card(heads, 2, 2)
    tokens = samples(config, 100, 4)
    ranks = run_ranks(train_and_save, 4, config, tmp_path, tokens)
    plan = plan_export(open_checkpoint(tmp_path / f"global_step{STEP}"), max_shard_bytes=50_000)
    write_export(plan, tmp_path / "hf")
    assert plan.remarks == ()
    assert len(plan.shards) > 3
    model = transformers_model(tmp_path / "hf")
    with torch.no_grad():
        theirs = model(tokens[:, :-1]).logits
        inner = model(tokens[:, :-1], labels=tokens[:, :-1]).loss
    assert theirs.abs().max() > 1.0
    for losses in ranks:
        torch.testing.assert_close(losses, their_losses(theirs, tokens), atol=TOLERANCE, rtol=0)
    [(losses, ours)] = run_ranks(load_and_look, 1, card(heads), tmp_path, STEP, tokens)
    torch.testing.assert_close(losses, their_losses(theirs, tokens), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    shifted = functional.cross_entropy(ours[:, :-1].flatten(0, 1), tokens[:, 1:-1].flatten())
    assert inner.item() == pytest.approx(shifted.item(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fp32 of a model that transformers made; not to be changed."""
    folder = tmp_path_factory.mktemp("imported")
    made_by_transformers().save_pretrained(folder / "hf")
    return make_checkpoint(folder / "hf", folder, "fp32")


def test_the_files_are_those_of_the_format(imported: Path, tmp_path: Path) -> None:
    told: list[int] = []
    plan = plan_export(open_checkpoint(imported), max_shard_bytes=60_000)
    entries = write_export(plan, tmp_path / "hf", on_bytes=told.append)
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {entry.path for entry in entries}
    assert sum(told) == plan.bytes
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    shards = {
        name: load_file(tmp_path / "hf" / name)
        for name in sorted(set(index["weight_map"].values()))
    }
    assert sorted(shards) == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    assert {tensor: name for name, held in shards.items() for tensor in held} == index["weight_map"]
    sizes = [[tensor.nbytes for tensor in held.values()] for held in shards.values()]
    assert all(sum(held) <= 60_000 or len(held) == 1 for held in sizes)
    assert index["metadata"] == {
        "total_size": sum(map(sum, sizes)),
        "total_parameters": plan.parameters,
    }
    assert sum(map(sum, sizes)) == 4 * plan.parameters == plan.bytes


def test_one_shard_needs_no_index(imported: Path, tmp_path: Path) -> None:
    write_export(plan_export(open_checkpoint(imported)), tmp_path / "new" / "hf")
    assert {path.name for path in (tmp_path / "new" / "hf").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_another_dtype(
    imported: Path, tmp_path: Path, dtype: str, torch_dtype: torch.dtype
) -> None:
    from transformers import AutoConfig

    write_export(plan_export(open_checkpoint(imported), dtype=dtype), tmp_path / "hf")
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch_dtype
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = made_by_transformers().state_dict()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(torch_dtype)), name


def test_the_config_says_the_whole_model(imported: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_export(plan_export(open_checkpoint(imported), extra={"seq_length": 24}), tmp_path / "hf")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert type(config).__name__ == "BloomConfig"
    assert (config.n_layer, config.n_head, config.hidden_size, config.vocab_size) == (2, 6, 48, 64)
    assert (config.layer_norm_epsilon, config.seq_length) == (1e-5, 24)
    assert not config.apply_residual_connection_post_layernorm and config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


# ----------------------------------------------------------------------------- import
def save_bin(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_sharded_bin(model: Any, folder: Path) -> None:
    """As the hub's BLOOM: names without a root, no head."""
    model.config.save_pretrained(folder)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    names = sorted(tensors)
    places = {
        name: f"pytorch_model_0000{1 + index % 2}-of-00002.bin" for index, name in enumerate(names)
    }
    for file in set(places.values()):
        torch.save(
            {name: tensors[name].clone() for name in names if places[name] == file}, folder / file
        )
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


WRITERS = {
    "safetensors": lambda model, folder: model.save_pretrained(folder),
    "sharded safetensors": lambda model, folder: model.save_pretrained(
        folder, max_shard_size="60KB"
    ),
    "bin": save_bin,
    "sharded bin": save_sharded_bin,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_is_read(tmp_path: Path, kind: str) -> None:
    model = made_by_transformers()
    (tmp_path / "hf").mkdir()
    WRITERS[kind](model, tmp_path / "hf")
    source = HuggingFaceFolder(tmp_path / "hf", BLOOM, "fp32")
    assert len(source.tensors("weights")) == len(dict(model.named_parameters()))
    value = model.transformer.h[1].mlp.dense_4h_to_h.weight.detach()
    found = source.read("weights", "blocks.1.mlp.down.weight", (3, 17), (40, 100))
    assert torch.equal(found, value[3:43, 17:117]) and found.is_contiguous()
    assert torch.equal(
        source.read("optimizer", "final_norm.bias/fp32", (0,), (48,)),
        model.transformer.ln_f.bias.detach(),
    )
    moments = source.read("optimizer", "final_norm.bias/exp_avg_sq", (1,), (47,))
    assert moments.shape == (47,) and not moments.any()


@pytest.mark.parametrize(("heads", "pipeline", "tensor"), [(6, 1, 1), (6, 2, 2), (12, 1, 2)])
def test_imported_logits_and_losses_equal_theirs(
    tmp_path: Path, heads: int, pipeline: int, tensor: int
) -> None:
    """Made by transformers, loaded with its masters on one to four ranks, and then trained for a
    step.
    """
    config = card(heads, pipeline, tensor)
    model, tokens = made_by_transformers(heads), samples(config, 100, 4)
    model.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    make_checkpoint(tmp_path / "hf", tmp_path, "fp32")
    require_theirs(
        run_ranks(load_and_look, pipeline * tensor, config, tmp_path, 0, tokens), model, tokens
    )


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_export_of_import_is_the_same(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    model = made_by_transformers().to(torch_dtype)
    model.save_pretrained(tmp_path / "one")
    place = make_checkpoint(tmp_path / "one", tmp_path, dtype)
    write_export(plan_export(open_checkpoint(place)), tmp_path / "two")
    before = load_file(tmp_path / "one" / "model.safetensors")
    after = load_file(tmp_path / "two" / "model.safetensors")
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch_dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    again = transformers_model(tmp_path / "two", torch_dtype).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_masters_keep_what_the_precision_of_the_weights_loses(tmp_path: Path) -> None:
    model = made_by_transformers()
    model.save_pretrained(tmp_path / "hf")
    source = HuggingFaceFolder(tmp_path / "hf", BLOOM, "bf16")
    value = model.transformer.word_embeddings.weight.detach()
    weights = source.read("weights", "embedding.word.weight", (0, 0), (64, 48))
    masters = source.read("optimizer", "embedding.word.weight/fp32", (0, 0), (64, 48))
    assert torch.equal(weights, value.bfloat16()) and not torch.equal(weights.float(), value)
    assert torch.equal(masters, value)


# ----------------------------------------------------------------------------- a padded vocabulary
def card_of_300(tensor: int, padded: int = 384) -> TrainerConfig:
    config = card(6, 1, tensor)
    tokenizer = config.tokenizer.model_copy(
        update={"vocabulary_size": 300, "padded_vocabulary_size": padded}
    )
    return config.model_copy(update={"tokenizer": tokenizer})


def imported_for(config: TrainerConfig, model: Path, folder: Path) -> Path:
    source = open_for(model, config)
    return write_checkpoint(
        NewCheckpoint(folder, 0, EXTRAS, CheckpointInfo(source.facts.topology, source.facts.model)),
        source,
    )


def test_a_padded_vocabulary_is_the_same_model(tmp_path: Path) -> None:
    """300 rows there, 384 here: as transformers itself pads with zeros; and back, byte for byte."""
    config = card_of_300(tensor=2)
    model = made_by_transformers(vocabulary=300)
    model.save_pretrained(tmp_path / "hf")
    place = imported_for(config, tmp_path / "hf", tmp_path)
    tokens = samples(config, 100, 4) % 300
    with torch.no_grad():
        alone = model(tokens[:, :-1]).logits
    padded = torch.cat([alone, torch.zeros(*alone.shape[:2], 84)], dim=2)
    for losses, _ in run_ranks(load_and_look, 2, config, tmp_path, 0, tokens):
        torch.testing.assert_close(losses, their_losses(padded, tokens), atol=TOLERANCE, rtol=0)
    [(_, ours)] = run_ranks(load_and_look, 1, card_of_300(tensor=1), tmp_path, 0, tokens)
    assert ours is not None
    torch.testing.assert_close(ours[..., :300], alone, atol=TOLERANCE, rtol=0)
    assert not ours[..., 300:].any()
    masters = open_checkpoint(place).read(
        "optimizer", "embedding.word.weight/fp32", (290, 0), (94, 48)
    )
    assert torch.equal(masters[:10], model.transformer.word_embeddings.weight[290:].detach())
    assert not masters[10:].any()

    plan = plan_export(open_checkpoint(place), vocabulary_size=300)
    assert plan.remarks == ("84 empty rows behind the vocabulary are padding: left out",)
    write_export(plan, tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()) and sorted(
        before
    ) == sorted(after)
    with torch.no_grad():
        again = transformers_model(tmp_path / "back")(tokens[:, :-1]).logits
    torch.testing.assert_close(again, alone, atol=0, rtol=0)
    whole = plan_export(open_checkpoint(place))  # nothing says how many tokens there are
    assert whole.config["vocab_size"] == 384 and whole.remarks == ()


def test_only_empty_rows_are_padding(tmp_path: Path) -> None:
    model = made_by_transformers(vocabulary=384)
    model.save_pretrained(tmp_path / "used")
    with pytest.raises(
        CheckpointError, match=r"row 383 of the vocabulary is not empty, .*_size = 384"
    ):
        open_for(tmp_path / "used", card_of_300(1, padded=320))
    with torch.no_grad():
        model.transformer.word_embeddings.weight[310:] = 0
    model.save_pretrained(tmp_path / "empty")
    source = open_for(tmp_path / "empty", card_of_300(1, padded=320))
    assert source.padding_rows == -64 and source.tensors("weights")[
        "embedding.word.weight"
    ].shape == (320, 48)
    assert plan_export(source, vocabulary_size=300).config["vocab_size"] == 310, "row 309 is in use"
    with pytest.raises(
        CheckpointError,
        match=r"has 200 rows of the vocabulary, and tokenizer\.vocabulary_size is 300",
    ):
        made_by_transformers(vocabulary=200).save_pretrained(tmp_path / "small")
        open_for(tmp_path / "small", card_of_300(1))


# ----------------------------------------------------------------------------- tokenizer
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["the model and the tokenizer, the token and the text"] * 50), 270, folder)
    return folder


def test_the_tokenizer_comes_along(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    made_by_transformers(vocabulary=384).save_pretrained(tmp_path / "hf")
    source = HuggingFaceFolder(tmp_path / "hf", BLOOM, "fp32")
    write_export(plan_export(source, tokenizer=tokenizer_files(tokenizer)), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the tokens of the text\n  are Ünïcode <|endoftext|>"
    from trainer.data.tokenizer import load_tokenizer

    assert theirs(text)["input_ids"] == load_tokenizer(tokenizer).encode_batch([text])[0]
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token_id) == ("<|endoftext|>", 0, 1)


def test_a_lone_tokenizer_file_gets_a_config(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "lone").mkdir()
    (tmp_path / "lone" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    made_by_transformers(vocabulary=384).save_pretrained(tmp_path / "hf")
    files = tokenizer_files(tmp_path / "lone" / "tokenizer.json")
    assert files.ids == {"eos_token_id": 0}
    write_export(
        plan_export(HuggingFaceFolder(tmp_path / "hf", BLOOM, "fp32"), tokenizer=files),
        tmp_path / "out",
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"


def test_a_tokenizer_of_another_vocabulary(imported: Path, tokenizer: Path) -> None:
    with pytest.raises(CheckpointError, match="has 270 tokens and the model 64 rows"):
        plan_export(open_checkpoint(imported), tokenizer=tokenizer_files(tokenizer))


def test_not_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer: .*does not exist"):
        tokenizer_files(tmp_path)


# ----------------------------------------------------------------- models that BLOOM cannot express
@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"position_embedding": "absolute"}, "model.position_embedding = 'absolute'"),
        ({"position_embedding": "rotary"}, "model.position_embedding = 'rotary'"),
        ({"embedding_layernorm": False}, "model.embedding_layernorm = False"),
        ({"ffn_hidden_size": 100}, "model.ffn_hidden_size = 100"),
        ({"kv_channels": 16}, "model.kv_channels = 16"),
        ({"activation": "gelu"}, "model.activation = 'gelu'"),
    ],
)
def test_what_bloom_cannot_express_is_refused(model: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bloom_config(facts_of_card(tiny(1, 1, "fp32", **model)), "float32")
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)


def test_an_unknown_number_of_heads_needs_the_card(imported: Path) -> None:
    source = open_checkpoint(imported)
    facts = dict(source.facts.model)
    del facts["model.attention_heads"], facts["model.layernorm_epsilon"]
    source._facts = replace(source.facts, model=facts)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"model\.attention_heads is not known .* --run"):
        plan_export(source)
    plan = plan_export(source, card_facts={"model.attention_heads": 6})
    assert [remark.split()[0] for remark in plan.remarks] == ["model.layernorm_epsilon"]
    assert plan_export(source, card_facts=facts_of_card(card(6))).remarks == ()


def test_the_card_of_another_model(imported: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"model\.attention_heads is 6 in the checkpoint and 12 in the run card",
    ):
        plan_export(open_checkpoint(imported), card_facts=facts_of_card(card(12)))
