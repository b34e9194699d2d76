"""A pipeline with the original trainer's list of layers and names, trained by DeepSpeed's own
engine.

Positions: 0 cast, 1 embedding (tied), 2 transpose, 3 .. L+2 blocks, L+3 transpose, L+4 final
LayerNorm, L+5 tied head, L+6 cast. The arithmetic of a block is simple; what counts is its
parameters, how they are cut, and that they train.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.trainer.checkpoint.synthetic import Shape
from trainer.parallel.comm import copy_to_tensor_region, reduce_from_tensor_region

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH = 4, 8, 4, 24, 6
SAMPLES = 8


class Part:
    """This rank's place among the tensor ranks."""

    def __init__(self, shape: Shape):
        rank = dist.get_rank()
        self.size, self.rank = shape.tensor, rank % shape.tensor
        self.group = None
        for first in range(0, shape.world, shape.tensor):
            made = (
                dist.new_group(list(range(first, first + shape.tensor)))
                if shape.tensor > 1
                else None
            )
            if first <= rank < first + shape.tensor:
                self.group = made

    def weight(self, rows: int, columns: int, cut: int, seed: int) -> nn.Parameter:
        whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.2
        parameter = nn.Parameter(whole.chunk(self.size, cut)[self.rank].contiguous().clone())
        parameter.model_parallel = True  # type: ignore[attr-defined]
        return parameter


class Column(nn.Module):
    def __init__(self, outputs: int, inputs: int, part: Part, seed: int):
        super().__init__()
        self.part = part
        self.weight = part.weight(outputs, inputs, 0, seed)
        self.bias = nn.Parameter(torch.zeros(outputs // part.size))
        self.bias.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(
            copy_to_tensor_region(hidden, self.part.group), self.weight, self.bias
        )


class Row(nn.Module):
    def __init__(self, outputs: int, inputs: int, part: Part, seed: int):
        super().__init__()
        self.part = part
        self.weight = part.weight(outputs, inputs, 1, seed)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return (
            reduce_from_tensor_region(functional.linear(hidden, self.weight), self.part.group)
            + self.bias
        )


class Words(nn.Module):
    """The word embedding, with the LayerNorm that BLOOM has behind it."""

    def __init__(self, part: Part):
        super().__init__()
        self.part = part
        self.weight = part.weight(VOCABULARY, HIDDEN, 0, 1)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.part.rank * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.norm(reduce_from_tensor_region(rows, self.part.group))


class EmbeddingPipe(nn.Module):
    def __init__(self, part: Part):
        super().__init__()
        self.word_embeddings = Words(part)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class Attention(nn.Module):
    def __init__(self, part: Part, seed: int):
        super().__init__()
        self.query_key_value = Column(3 * HIDDEN, HIDDEN, part, seed)
        self.dense = Row(HIDDEN, HIDDEN, part, seed + 1)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (-1, 3, HIDDEN // HEADS))
        query, key, value = heads.unbind(-2)
        return self.dense((query * torch.sigmoid(key) + value).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, part: Part, seed: int):
        super().__init__()
        self.dense_h_to_4h = Column(4 * HIDDEN, HIDDEN, part, seed)
        self.dense_4h_to_h = Row(HIDDEN, 4 * HIDDEN, part, seed + 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(hidden)))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, part: Part, number: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention(part, 100 * number + 10)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp(part, 100 * number + 20)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def transpose(hidden: Tensor) -> Tensor:
    return hidden.transpose(0, 1).contiguous()


def head(module: EmbeddingPipe, hidden: Tensor) -> Tensor:
    """Logits of this tensor rank's rows, joined by a sum: each rank fills its own columns."""
    part = module.word_embeddings.part
    local = functional.linear(
        copy_to_tensor_region(hidden, part.group), module.word_embeddings.weight
    )
    before = part.rank * local.shape[-1]
    wide = functional.pad(local, (before, VOCABULARY - before - local.shape[-1]))
    return reduce_from_tensor_region(wide, part.group)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build(shape: Shape, bf16: bool, weight_decay: float = 0.1) -> Any:
    """DeepSpeed's engine over the pipeline; ZeRO stage 1, AdamW, two groups in the order of
    `named_parameters`.
    """
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    part = Part(shape)
    tied = {"key": "embed", "typename": EmbeddingPipe, "tied_weight_attr": "word_embeddings_weight"}
    layers = [
        lambda tokens: tokens,
        TiedLayerSpec(
            tied["key"], tied["typename"], part, tied_weight_attr=tied["tied_weight_attr"]
        ),
        transpose,
        *(LayerSpec(ParallelTransformerLayerPipe, part, number) for number in range(LAYERS)),
        transpose,
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec(
            tied["key"],
            tied["typename"],
            part,
            forward_fn=head,
            tied_weight_attr=tied["tied_weight_attr"],
        ),
        lambda logits: logits.float(),
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(
            layers=layers,
            topology=PipeModelDataParallelTopology(
                num_pp=shape.pipeline, num_mp=shape.tensor, num_dp=shape.data
            ),
            loss_fn=loss,
            partition_method="type:transformer|embedding",
        )
        groups = [
            {
                "params": [item for item in module.parameters() if item.dim() > 1],
                "weight_decay": weight_decay,
            },
            {
                "params": [item for item in module.parameters() if item.dim() == 1],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        config: dict[str, Any] = {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        }
        if bf16:
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    return engine


def batches(shape: Shape, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's micro batches of a step: the same samples whatever the shape."""
    data_rank = dist.get_rank() // shape.tensor % shape.data
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    for index in range(data_rank, SAMPLES // 2, shape.data):
        piece = tokens[2 * index : 2 * index + 2]
        yield piece[:, :-1], piece[:, 1:]


def train(engine: Any, shape: Shape, step: int) -> float:
    return float(engine.train_batch(data_iter=batches(shape, step)))


def held(engine: Any) -> dict[str, dict[str, Tensor]]:
    """What the engine has in memory: module's name -> kind -> tensor of this tensor rank's shape.

    The fp32 masters and moments are those of the optimizer itself, summed over data ranks, each of
    which has a run.
    """
    optimizer = engine.optimizer.optimizer
    found = {}
    for name, parameter in engine.module.named_parameters():
        kinds = {"weight": parameter.detach().clone()}
        mapping = parameter._hp_mapping
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            whole = torch.zeros(parameter.numel())
            if mapping is not None:
                partition = optimizer.param_groups[mapping.param_group_index]["params"][0]
                flat = partition.detach() if kind == "fp32" else optimizer.state[partition][kind]
                where, address = mapping.hp_fragment_address, mapping.lp_fragment_address
                whole.narrow(0, address.start, address.numel).copy_(
                    flat.narrow(0, where.start, where.numel)
                )
            dist.all_reduce(whole, group=parameter._dp_group)
            kinds[kind] = whole.view_as(parameter)
        found[name] = kinds
    return found


def client_state(iteration: int) -> dict[str, Any]:
    """What Megatron adds to a rank file, as far as it matters here."""
    arguments = argparse.Namespace(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        position_embedding_type="alibi",
        consumed_train_samples=SAMPLES * iteration,
        params_dtype=torch.bfloat16,
        data_path=["0.3", "a", "0.7", "b"],
    )
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "tokens": SAMPLES * LENGTH * iteration,
        "checkpoint_info": {"padded_vocab_size": VOCABULARY, "original_vocab_size": VOCABULARY},
        "torch_rng_state": torch.get_rng_state(),
        "random_rng_state": (3, (1, 2, 3), None),
    }


def save(engine: Any, folder: Path, step: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        engine.save_checkpoint(
            str(folder), tag=f"global_step{step}", client_state=client_state(step)
        )


def load(engine: Any, folder: Path) -> dict[str, Any]:
    """Load what `latest` names; returns the client's state."""
    with contextlib.redirect_stdout(io.StringIO()):
        path, client = engine.load_checkpoint(str(folder))
    assert path is not None
    return dict(client)


_BLOCK = {
    "input_layernorm": "input_norm",
    "self_attention.query_key_value": "attention.query_key_value",
    "self_attention.dense": "attention.dense",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
_WHOLE = ("layernorm", "norm.", "self_attention.dense.bias", "mlp.dense_4h_to_h.bias")


def logical_name(module_name: str) -> str:
    """Our name for a parameter of this pipeline module."""
    if module_name.startswith("tied_modules.embed."):
        inner = module_name.removeprefix("tied_modules.embed.word_embeddings.")
        return "embedding.word.weight" if inner == "weight" else f"embedding.{inner}"
    position, _, inner = module_name.partition(".")
    if int(position) == LAYERS + 4:
        return f"final_norm.{inner}"
    stem, _, kind = inner.rpartition(".")
    return f"blocks.{int(position) - 3}.{_BLOCK[stem]}.{kind}"


def join(module_name: str, parts: list[Tensor]) -> Tensor:
    """The whole tensor of the tensor ranks' parts, by the original converters' rule."""
    if module_name.endswith(_COLUMNS):
        return torch.cat(parts, dim=1)
    if any(word in module_name for word in _WHOLE) or module_name.startswith(f"{LAYERS + 4}."):
        return parts[0]
    return torch.cat(parts, dim=0)


def whole(ranks: list[dict[str, dict[str, Tensor]]], shape: Shape) -> dict[str, Tensor]:
    """All ranks' `held` as whole tensors: our NAME/KIND -> tensor. Copies on later stages must
    train in step.
    """
    found: dict[str, Tensor] = {}
    for stage in range(shape.pipeline):
        first = stage * shape.data * shape.tensor
        for name in ranks[first]:
            for kind in ranks[first][name]:
                value = join(
                    name, [ranks[first + part][name][kind] for part in range(shape.tensor)]
                )
                key = f"{logical_name(name)}/{kind}"
                if key in found and key.startswith("embedding.word.weight"):
                    assert torch.equal(found[key], value), key
                found.setdefault(key, value)
    return found
