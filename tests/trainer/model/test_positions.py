"""Rotary positions, free head sizes and the exact GELU, against transformers' GPT-NeoX."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from tests.trainer.cases import CPU, Logical, fill, samples, tiny
from tests.trainer.inductor import QUICK
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.model.attention import BlockSetup, SelfAttention
from trainer.model.kernels import CausalKernel
from trainer.model.positions import Rotary, plain_frequencies, rotated, stretched
from trainer.parallel.mesh import Mesh

ALONE = Mesh.single(CPU)
NAMES = {
    "gpt_neox.embed_in.": "embedding.word.",
    "gpt_neox.final_layer_norm.": "final_norm.",
    "gpt_neox.layers.": "blocks.",
    ".input_layernorm.": ".input_norm.",
    ".post_attention_layernorm.": ".post_attention_norm.",
    ".dense_h_to_4h.": ".up.",
    ".dense_4h_to_h.": ".down.",
}


def neox(activation: str) -> Any:
    """Sequential residuals, all of each head rotated, tied embedding: what our model is."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(4)
    shape = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        hidden_act={"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[activation], rotary_pct=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        max_position_embeddings=32, use_parallel_residual=False, tie_word_embeddings=True,
        attention_dropout=0.0, hidden_dropout=0.0, initializer_range=0.3, layer_norm_eps=1e-5,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logical(model: Any) -> Logical:
    tensors: Logical = {}
    for theirs, parameter in model.named_parameters():
        name = theirs
        for old, new in NAMES.items():
            name = name.replace(old, new)
        value, zeros = parameter.detach().clone(), torch.zeros_like(parameter)
        tensors[name] = {"weight": value, "fp32": value, "exp_avg": zeros, "exp_avg_sq": zeros}
    return tensors


def losses_of_samples(config: TrainerConfig, tensors: Logical) -> list[float]:
    engine = Engine.build(config, Mesh.create(config.parallel, CPU))
    fill(engine, tensors, 0)
    tokens = samples(config, 0, 4)
    values = [engine.measure(iter([(row[None, :-1], row[None, 1:])]), 1).loss for row in tokens]
    engine.close()
    return values


@pytest.mark.parametrize(("tensor", "activation"), [(1, "gelu"), (1, "gelu_tanh"), (2, "gelu")])
def test_losses_equal_transformers_gpt_neox(tensor: int, activation: str) -> None:
    config = tiny(
        1,
        tensor,
        position_embedding="rotary",
        rotary_base=500.0,
        activation=activation,
        embedding_layernorm=False,
    )
    model = neox(activation)
    with torch.no_grad():
        logits = model(samples(config, 0, 4)[:, :-1]).logits
    labels = samples(config, 0, 4)[:, 1:]
    expected = [
        nn.functional.cross_entropy(rows, wanted).item()
        for rows, wanted in zip(logits, labels, strict=True)
    ]
    assert max(expected) - min(expected) > 0.1
    for ours in run_ranks(losses_of_samples, tensor, config, logical(model)):
        torch.testing.assert_close(ours, expected, atol=5e-6, rtol=0)


def test_rotation_equals_transformers() -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    theirs = GPTNeoXRotaryEmbedding(
        GPTNeoXConfig(hidden_size=48, num_attention_heads=3, rope_parameters=parameters)
    )
    query, key = torch.randn(2, 2, 3, 300, 16, generator=torch.Generator().manual_seed(0))
    cosine, sine = theirs(query, torch.arange(300)[None])
    expected = apply_rotary_pos_emb(query, key, cosine, sine)
    rotary = Rotary(plain_frequencies(16, 10_000.0, CPU), False)
    both = rotary.rotate(query.transpose(1, 2), key.transpose(1, 2), *rotary.angles(300, None))
    for ours, found, wanted in zip((query, key), both, expected, strict=True):
        turned = found.transpose(1, 2)
        torch.testing.assert_close(turned, wanted, atol=2e-5, rtol=0)
        torch.testing.assert_close(turned.norm(dim=-1), ours.norm(dim=-1))  # a rotation


@pytest.mark.parametrize(
    ("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (4.0, 2.0, 3.0)]
)
def test_stretched_frequencies_equal_transformers(factor: float, low: float, high: float) -> None:
    """Llama 3.1's: of 64 waves some stay, some are stretched, some lie between."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=128, rope_parameters=parameters, max_position_embeddings=131_072)
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = plain_frequencies(128, 500_000.0, CPU)
    ours = stretched(plain, factor, 8192, low, high)
    torch.testing.assert_close(ours, expected, atol=0, rtol=2e-6)
    assert scale == 1.0
    is_kept, is_stretched = ours == plain, (ours * factor - plain).abs() < 1e-6 * plain
    assert is_kept.any() and is_stretched.any() and not (is_kept | is_stretched).all()


def test_scores_depend_on_distances_alone() -> None:
    """Also across documents: with positions reset, the second document is rotated like the first."""
    rotary = Rotary(plain_frequencies(8, 100.0, CPU), True)
    tensor = torch.randn(1, 6, 2, 8).repeat(1, 2, 1, 1)
    documents = torch.tensor([[0] * 6 + [1] * 6], dtype=torch.int32)
    reset, _ = rotary.rotate(tensor, tensor, *rotary.angles(12, documents))
    plain, _ = rotary.rotate(tensor, tensor, *rotary.angles(12, None))
    assert rotary.angles(12, documents) is rotary.angles(12, documents), (
        "once for all blocks of a micro batch"
    )
    assert torch.equal(reset[:, 6:], reset[:, :6]) and torch.equal(reset[:, :6], plain[:, :6])
    assert not torch.allclose(plain[:, 6:], plain[:, :6], atol=1e-2)
    scores = torch.einsum("bqhd,bkhd->bhqk", plain, plain)
    torch.testing.assert_close(scores[..., 6:, 6:], scores[..., :6, :6], atol=1e-4, rtol=1e-4)


def test_compiled_the_rotation_is_one_pass_each_way() -> None:
    """Over queries and keys together, where they lie side by side; with the same numbers."""
    torch._dynamo.reset()
    rotary = Rotary(plain_frequencies(16, 10_000.0, CPU), False, compiled=True)
    fused = torch.randn(2, 24, 3, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    grain = torch.randn(2, 24, 3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []

    def both(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        source = fused.clone().requires_grad_()
        query, key, _ = source.unbind(3)
        turned = torch.cat(rotate(query, key, *rotary.angles(24, None)), dim=-1)
        found.append((turned.detach(), source))
        return (turned * grain).sum()

    with torch._inductor.config.patch(QUICK):
        _, codes = run_fw_bw_and_get_code(lambda: both(rotary.rotate))
    both(rotated).backward()
    assert [
        len(re.findall(r"cpp_fused\w*\(", code.rpartition("def call(")[2])) for code in codes
    ] == [1, 1]
    (turned, source), (wanted, plain) = found
    assert torch.equal(turned, wanted)
    torch.testing.assert_close(source.grad, plain.grad, rtol=2.0**-7, atol=1e-6)
    torch._dynamo.reset()


def test_odd_heads_cannot_be_rotated() -> None:
    with pytest.raises(ValueError, match="rotary positions need an even head size, not 5"):
        plain_frequencies(5, 100.0, CPU)


def plain_attention(hidden: Tensor, layer: SelfAttention, heads: int, size: int) -> Tensor:
    """Head by head, row by row."""
    answer = torch.zeros_like(hidden)
    weight, bias = layer.query_key_value.weight, layer.query_key_value.bias
    for head in range(heads):
        rows = [slice((3 * head + part) * size, (3 * head + part + 1) * size) for part in range(3)]
        query, key, value = (hidden @ weight[part].t() + bias[part] for part in rows)
        for place in range(hidden.shape[1]):
            scores = (query[:, place : place + 1] * key[:, : place + 1]).sum(-1) / size**0.5
            mixed = (scores.softmax(-1)[..., None] * value[:, : place + 1]).sum(1)
            answer[:, place] += mixed @ layer.dense.weight[:, head * size : (head + 1) * size].t()
    return answer + layer.dense.bias


def test_heads_of_any_width() -> None:
    model = tiny(
        kv_channels=12, hidden_size=20, attention_heads=3, position_embedding="absolute"
    ).model
    layer = SelfAttention(BlockSetup(model, ALONE, CausalKernel()))
    assert layer.query_key_value.weight.shape == (108, 20) and layer.dense.weight.shape == (20, 36)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, 5, 20)
    torch.testing.assert_close(
        layer(hidden), plain_attention(hidden, layer, 3, 12), atol=1e-5, rtol=1e-5
    )
