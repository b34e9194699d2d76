"""Who attends to whom, and from where: rotary positions, free head sizes and the exact GELU against
GPT-NeoX of transformers; several documents in a sample against naive loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from tests.trainer.cases import CPU, Logical, batches, fill, samples, tiny
from tests.trainer.inductor import QUICK
from tests.trainer.spawn import run_ranks
from trainer.config.card import CardError, TrainerConfig
from trainer.engine import Engine
from trainer.model.attention import BlockSetup, SelfAttention
from trainer.model.documents import (
    IGNORED,
    DocumentRules,
    document_numbers,
    labels_without_ends,
    positions_in_documents,
)
from trainer.model.kernels import (
    CausalKernel,
    DenseKernel,
    FlexKernel,
    Kernel,
    build_kernel,
)
from trainer.model.positions import (
    Rotary,
    alibi_slopes,
    local_alibi_slopes,
    plain_frequencies,
    rotated,
    stretched,
)
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


END, SIZE = 3, 8
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without")


# ---------------------------------------------------------------------------- where documents begin
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=3))
def test_numbers_positions_and_labels(rows: list[list[int]]) -> None:
    tokens = torch.tensor(rows)
    documents = document_numbers(tokens, END)
    positions, labels = (
        positions_in_documents(documents),
        labels_without_ends(tokens, tokens + 1, END),
    )
    assert documents.dtype == torch.int32
    for sample, row in enumerate(rows):
        number = position = 0
        for place, token in enumerate(row):
            assert documents[sample, place] == number and positions[sample, place] == position
            assert labels[sample, place] == (IGNORED if token == END else token + 1)
            number, position = (number + 1, 0) if token == END else (number, position + 1)


# ----------------------------------------------------------------------------- kernels
def heads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 3, 24, 16, generator=generator, dtype=dtype) for _ in range(3)]


def numbers() -> Tensor:
    tokens = torch.randint(6, (2, 24), generator=torch.Generator().manual_seed(9))
    return document_numbers(tokens, END)


def naive(
    query: Tensor, key: Tensor, value: Tensor, slopes: list[float], documents: Tensor | None
) -> Tensor:
    answer = torch.zeros_like(query)
    for sample in range(query.shape[0]):
        for head in range(query.shape[1]):
            for place in range(query.shape[2]):
                seen = [
                    other
                    for other in range(place + 1)
                    if documents is None or documents[sample, other] == documents[sample, place]
                ]
                scores = (
                    key[sample, head, seen] @ query[sample, head, place] / query.shape[3] ** 0.5
                )
                scores += slopes[head] * (torch.tensor(seen) - place)
                answer[sample, head, place] = scores.softmax(0) @ value[sample, head, seen]
    return answer


def attend(kernel: Kernel, documents: Tensor | None) -> Tensor:
    query, key, value = heads()
    return kernel(query, key, value, kernel.mask(query, query.shape[2], documents), None)


@UNFUSED
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_kernels_equal_a_naive_loop(alibi: bool, inside: bool) -> None:
    documents = numbers() if inside else None
    slopes = local_alibi_slopes(3, ALONE) if alibi else None
    expected = naive(*heads(), alibi_slopes(3) if alibi else [0.0] * 3, documents)
    dense, flex = DenseKernel(slopes, inside, CPU), FlexKernel(slopes, inside, compiled=False)
    for _ in range(2):  # the second time from what was kept
        torch.testing.assert_close(attend(dense, documents), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(attend(flex, documents), expected, atol=2e-6, rtol=1e-5)
    if not alibi and not inside:
        torch.testing.assert_close(attend(CausalKernel(), None), expected, atol=2e-6, rtol=1e-5)


@UNFUSED
def test_kernels_notice_new_documents() -> None:
    slopes, other = local_alibi_slopes(3, ALONE), numbers().flip(0).contiguous()
    expected = naive(*heads(), alibi_slopes(3), other)
    for kernel in (DenseKernel(slopes, True, CPU), FlexKernel(slopes, True, compiled=False)):
        before = attend(kernel, numbers())
        assert not torch.allclose(before, expected, atol=1e-3)
        torch.testing.assert_close(attend(kernel, other), expected, atol=2e-6, rtol=1e-5)


def test_flex_passes_over_tiles_of_other_documents() -> None:
    """Four documents of 128 tokens: of 16 tiles of 128 x 128 only the diagonal is computed."""
    documents = torch.arange(4, dtype=torch.int32).repeat_interleave(128)[None]
    tiles = FlexKernel(None, True, compiled=False).mask(torch.empty(0, device=CPU), 512, documents)
    assert isinstance(tiles, BlockMask) and tiles.sparsity() == 75.0


def test_kernels_on_this_machine() -> None:
    rules = DocumentRules(END, True, True)
    positions_only = DocumentRules(END, True, False)
    assert isinstance(build_kernel(tiny().model, ALONE, None, "fp32"), DenseKernel)
    absolute = tiny(position_embedding="absolute", require_fused_attention=True).model
    assert isinstance(build_kernel(absolute, ALONE, positions_only, "fp32"), CausalKernel)
    assert isinstance(build_kernel(absolute, ALONE, rules, "fp32"), DenseKernel)
    dropping = tiny(require_fused_attention=True, attention_dropout=0.1).model
    with pytest.raises(
        CardError, match=r"model.require_fused_attention.*no kernel serves.*on CPUs no fused kernel"
    ):
        build_kernel(dropping, ALONE, None, "fp32")


def test_one_bias_serves_all_lengths() -> None:
    """Under a curriculum one of each length would take gigabytes."""
    kernel = DenseKernel(local_alibi_slopes(3, ALONE), False, CPU)
    for length in range(8, 65, 8):
        bias = kernel.bias(length, torch.float32)
        fresh = DenseKernel(local_alibi_slopes(3, ALONE), False, CPU).bias(length, torch.float32)
        assert torch.equal(bias, fresh) and bias.shape == (1, 3, length, length)
    assert torch.equal(
        kernel.bias(16, torch.float32), kernel.bias(64, torch.float32)[..., :16, :16]
    )
    assert [made.numel() for made in kernel._made.values()] == [3 * 64 * 64]


# ----------------------------------------------------------------------------- the whole model
def marked(
    pipeline: int, tensor: int, sequence_parallel: bool = False, **settings: Any
) -> TrainerConfig:
    """The tiny card with documents that end with token END."""
    data = {key: settings.pop(key) for key in list(settings) if key.startswith(("reset_", "mask_"))}
    card = tiny(pipeline, tensor, **settings)
    return card.model_copy(
        update={
            "data": card.data.model_copy(update={"end_of_document_id": END} | data),
            "parallel": card.parallel.model_copy(update={"sequence_parallel": sequence_parallel}),
        }
    )


def with_ends(config: TrainerConfig, step: int) -> Tensor:
    """Samples in which every row has a document end at its 6th and 11th token, and one at its very
    last input.
    """
    tokens = samples(config, step, SIZE)
    tokens[tokens == END] = END + 1
    tokens[:, [5, 10, 15]] = END
    return tokens


def train(config: TrainerConfig, steps: int) -> tuple[list[float], list[str]]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses = []
    for step in range(steps):
        rows = with_ends(config, step).split(config.batch.micro_batch_size)
        losses.append(
            engine.train_step(iter([(row[:, :-1], row[:, 1:]) for row in rows]), SIZE, step).loss
        )
    differing = engine.disagreeing_parameters()
    engine.close()
    return losses, differing


ALL = {"reset_position_ids": True, "reset_attention_mask": True, "mask_end_of_document_loss": True}


@pytest.mark.parametrize("positions", ["alibi", "absolute", "rotary"])
def test_every_cut_of_the_model_gives_the_same_losses(positions: str) -> None:
    """Of the first step, and of the second, which has seen gradients."""
    ((reference, _),) = run_ranks(train, 1, marked(1, 1, position_embedding=positions, **ALL), 2)
    ((unmarked, _),) = run_ranks(train, 1, marked(1, 1, position_embedding=positions), 2)
    assert abs(reference[0] - unmarked[0]) > 1e-4  # the keys do something
    recomputed = {"activation_checkpointing": True, "position_embedding": positions}
    cards = [
        marked(2, 2, True, **recomputed, **ALL),
        marked(2, 2, partition_activations=True, **recomputed, **ALL),
    ]
    for card in cards:
        for losses, differing in run_ranks(train, 4, card, 2):
            torch.testing.assert_close(losses, reference, atol=2e-6, rtol=0)
            assert differing == []


def apart(config: TrainerConfig, whole: bool) -> float:
    """The loss of one sample of three documents: as it is, or as the mean over its documents, each
    trained alone.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    row = with_ends(config, 0)[:1]
    module = engine._pipeline.module.eval()
    parts = [slice(0, 16)] if whole else [slice(0, 6), slice(6, 11), slice(11, 16)]
    total = 0.0
    with torch.no_grad():
        for part in parts:
            inputs = row[:, :-1][:, part]
            logits = module(inputs)[0] @ module.tied_modules["embedding"].weight.t()
            losses = functional.cross_entropy(logits, row[0, 1:][part], reduction="none")
            total += losses[inputs[0] != END].sum().item() / 13  # 16 tokens, 3 of them ends
    if whole:
        pair = row[:, :-1], row[:, 1:]
        total = engine.measure(iter([pair]), 1).loss
    engine.close()
    return total


@pytest.mark.parametrize("positions", ["alibi", "absolute", "rotary"])
def test_documents_in_one_sample_are_as_good_as_alone(positions: str) -> None:
    options = {"position_embedding": positions, "init_std": 0.3}
    (together,) = run_ranks(apart, 1, marked(1, 1, **options, **ALL), True)
    (separate,) = run_ranks(apart, 1, marked(1, 1, **options), False)
    (unmarked,) = run_ranks(apart, 1, marked(1, 1, **options, mask_end_of_document_loss=True), True)
    assert together == pytest.approx(separate, abs=2e-6)
    assert abs(unmarked - together) > 1e-3


def nothing_counts(config: TrainerConfig) -> list[tuple[float, float | None]]:
    """A step in which one micro batch, then every one, has no label that counts."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    answers = []
    for empty in (1, SIZE // 2):
        pairs = list(batches(config, mesh, 0, SIZE))
        pairs = [
            (tokens, labels * 0 + IGNORED) if i < empty else (tokens, labels)
            for i, (tokens, labels) in enumerate(pairs)
        ]
        result = engine.train_step(iter(pairs), SIZE)
        answers.append((result.loss, result.grad_norm))
    engine.close()
    return answers


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_micro_batch_without_labels_counts_nothing(tensor: int) -> None:
    for (some, some_norm), (none, none_norm) in run_ranks(nothing_counts, tensor, tiny(1, tensor)):
        # 3 of 4 micro batches
        assert 0.7 * 4.1 < some < 0.78 * 4.3 and some_norm is not None and some_norm > 0.01
        assert none == 0.0 and none_norm == 0.0
