"""One process writes the original layout, for any degrees, from any source of tensors.

The unmodified DeepSpeed engine loads the folder into a pipeline of the original's layers, with two
parameter groups (matrices that decay; then LayerNorms and biases) in the order of its
`named_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from trainer.checkpoint.deepspeed.content import (
    Degrees,
    FlatGroup,
    OptimizerSettings,
    StageParameter,
    empty_kinds,
    flat_groups,
    optimizer_contents,
    rank_contents,
)
from trainer.checkpoint.deepspeed.file_names import (
    EMBEDDING_POSITION,
    block_suffixes,
    cut_dimension,
    embedding_names,
    final_names,
    layer_file,
    module_name,
    optimizer_file,
    place_of,
    rank_file,
)
from trainer.checkpoint.deepspeed.partition import FlatFragment, fragments_of, stage_bounds
from trainer.checkpoint.files import digesting
from trainer.checkpoint.publishing import NewCheckpoint, save_alone
from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import PARTS, TensorFacts, TensorSource, read_finite, state_kinds
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry
from trainer.contract.resumable import UNNAMED, with_unnamed
from trainer.model.family import TIED_NAME
from trainer.parallel.shard import Sharding
from trainer.parallel.state import MASTERS, rectangles

UNKNOWN_SETTINGS = OptimizerSettings()
_READ_BYTES = 4 << 20  # at once: pieces of one size leave no holes in memory
OnBytes = Callable[[int], None]


def write_deepspeed_layout(
    new: NewCheckpoint,
    source: TensorSource,
    *,
    settings: OptimizerSettings = UNKNOWN_SETTINGS,
    on_bytes: OnBytes = lambda count: None,
) -> Path:
    """Write all tensors of `source` as a checkpoint in the original layout, cut as its topology
    says.

    Returns its place. Holds one file in memory at a time: what one rank of that topology would hold. A source without
    an optimizer gives layer and rank files only. `latest` is written last, so DeepSpeed finds either the old checkpoint
    or the whole new one. `on_bytes` is told of what is written (`layout_bytes` in all). Megatron's random states are
    not in it (its `--no-load-rng`).
    Raises CheckpointError when the step exists, when the degrees do not divide the model, when the source is damaged,
    or when the disk refuses; nothing of the new checkpoint is then left.
    """
    plan = _Plan(source, Degrees.of(new.info.topology))

    def write(partial: Path) -> list[FileEntry]:
        return [
            write_file(partial, name, contents, on_bytes)
            for name, contents in _files(plan, source, new, settings)
        ]

    return save_alone(new, write)


def layout_bytes(source: TensorSource, topology: Mapping[str, int]) -> int:
    """About how many bytes `write_deepspeed_layout` writes: replicated weights once per tensor
    rank.
    """
    tensor = topology.get("tensor", 1)
    return sum(
        math.prod(facts.shape)
        * facts.dtype.itemsize
        * (1 if cut_dimension(key.split("/")[0]) is not None else tensor)
        for part in PARTS
        for key, facts in source.tensors(part).items()
    )


def write_file(
    partial: Path, name: str, contents: Any, on_bytes: OnBytes = lambda count: None
) -> FileEntry:
    """Write one file of `torch.save` into a folder, flushed to disk; returns its entry for the
    manifest.
    """
    with digesting(partial / name) as stream:
        torch.save(contents, cast(IO[bytes], stream))
    entry = stream.entry(name)
    on_bytes(entry.bytes)
    return entry


class _Plan:
    """What each rank of the target topology holds. Raises CheckpointError when the model cannot be
    cut so.
    """

    def __init__(self, source: TensorSource, degrees: Degrees):
        for key, usual in {
            **UNNAMED,
            "model.key_value_heads": source.facts.model.get("model.attention_heads"),
        }.items():
            if with_unnamed(source.facts.model).get(key, usual) != usual:
                raise CheckpointError(
                    f"the DeepSpeed layout has no place for {key} = {source.facts.model[key]!r}; use the tr11 format"
                )
        self.degrees = degrees
        self.shapes = {name: facts.shape for name, facts in source.tensors("weights").items()}
        self.bf16 = source.tensors("weights")["embedding.word.weight"].dtype == torch.bfloat16
        self.layers = 1 + max(
            int(name.split(".")[1]) for name in self.shapes if name.startswith("blocks.")
        )
        try:
            self.positions = {name: place_of(name, self.layers) for name in self.shapes}
            self._bounds = stage_bounds(self.layers, degrees.pipeline)
            for name in self.shapes:
                self.local_shape(name)
            heads = source.facts.model.get("model.attention_heads")
            if isinstance(heads, int) and heads % degrees.tensor:
                raise ValueError(
                    f"{heads} attention heads cannot be cut into {degrees.tensor} equal parts"
                )
        except KeyError as error:
            raise CheckpointError(
                f"the DeepSpeed layout has no place for {error}; use the tr11 format"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint cannot be cut so: {error}; choose other degrees"
            ) from None

    def local_shape(self, name: str) -> tuple[int, ...]:
        return self._sharding(name).local_shape(self.shapes[name])

    def offsets(self, name: str, tensor_rank: int) -> tuple[int, ...]:
        return self._sharding(name).offsets(self.local_shape(name), tensor_rank)

    def _sharding(self, name: str) -> Sharding:
        cut = cut_dimension(name)
        return Sharding(cut, 1 if cut is None else self.degrees.tensor)

    def layer(self, position: int) -> list[str]:
        """Names of the parameters of the layer at a position, in the original's order."""
        ordered = [*embedding_names().values()]
        ordered += [
            f"blocks.{block}.{suffix}"
            for block in range(self.layers)
            for suffix in block_suffixes()
        ]
        ordered += [*final_names().values()]
        return [
            name
            for name in ordered
            if name in self.positions and self.positions[name].position == position
        ]

    def stage(self, number: int) -> list[StageParameter]:
        """The parameters of a stage in the order of the original's `named_parameters`: tied modules
        come first.
        """
        first = self._bounds[number]
        end = self._bounds[number + 1]
        names = [name for position in range(first, end) for name in self.layer(position)]
        found = [
            StageParameter(name, module_name(self.positions[name]), self.local_shape(name))
            for name in names
        ]
        if number == self.degrees.pipeline - 1 and number > 0:
            copies = [
                StageParameter(
                    name,
                    module_name(self.positions[name]),
                    self.local_shape(name),
                    idle=name != TIED_NAME,
                )
                for name in self.layer(EMBEDDING_POSITION)
            ]
            found = copies + found
        return found


def _files(
    plan: _Plan,
    source: TensorSource,
    new: NewCheckpoint,
    settings: OptimizerSettings,
) -> Iterator[tuple[str, Any]]:
    """Names and contents of all files, made one at a time."""
    degrees = plan.degrees
    steps = source.facts.optimizer_step
    for position in sorted({place.position for place in plan.positions.values()}):
        for tensor_rank in range(degrees.tensor):
            yield (
                layer_file(position, tensor_rank),
                _layer_contents(plan, source, position, tensor_rank),
            )
    for stage in range(degrees.pipeline):
        groups = flat_groups(plan.stage(stage))
        # The same memory for all files of a stage: fresh memory for each is slow to come back from
        # the allocator.
        held = state_kinds(source.tensors("optimizer"))
        kinds = [
            empty_kinds(sum(item.numel for item in group), degrees.data, held) for group in groups
        ]
        for tensor_rank in range(degrees.tensor):
            model_rank = stage * degrees.tensor + tensor_rank
            yield (
                rank_file(model_rank),
                rank_contents(groups, degrees, new, steps),
            )
            if not source.tensors("optimizer"):
                continue
            for data_rank in range(degrees.data):
                filled = [
                    _filled(
                        plan,
                        source,
                        group,
                        tensor_rank=tensor_rank,
                        data_rank=data_rank,
                        kinds=memory,
                    )
                    for group, memory in zip(groups, kinds, strict=True)
                ]
                names = {item.name: item.module_name for group in groups for item in group}
                contents = optimizer_contents(
                    filled,
                    names,
                    degrees,
                    data_rank=data_rank,
                    bf16=plan.bf16,
                    optimizer_step=steps,
                    settings=settings,
                )
                yield optimizer_file(data_rank, model_rank, plan.bf16), contents


def _layer_contents(
    plan: _Plan, source: TensorSource, position: int, tensor_rank: int
) -> dict[str, Tensor]:
    return {
        plan.positions[name].inner: read_finite(
            source,
            "weights",
            name,
            offsets=plan.offsets(name, tensor_rank),
            sizes=plan.local_shape(name),
        ).contiguous()
        for name in plan.layer(position)
    }


def _filled(
    plan: _Plan,
    source: TensorSource,
    group: list[StageParameter],
    tensor_rank: int,
    data_rank: int,
    kinds: Mapping[str, Tensor],
) -> FlatGroup:
    """A data rank's partition of a group, read from the source into `kinds`."""
    sizes = [(item.name, item.numel) for item in group]
    fragments = fragments_of(sizes, plan.degrees.data, data_rank)
    idle = {item.name for item in group if item.idle}
    for flat in kinds.values():
        flat.zero_()
    for fragment in fragments:
        for kind, flat in kinds.items():
            # an idle copy has no gradient, so no moments
            if kind == MASTERS or fragment.name not in idle:
                _read_run(plan, source, fragment, kind=kind, tensor_rank=tensor_rank, flat=flat)
    return FlatGroup(fragments, kinds, sum(numel for _, numel in sizes))


def _read_run(
    plan: _Plan,
    source: TensorSource,
    fragment: FlatFragment,
    kind: str,
    tensor_rank: int,
    flat: Tensor,
) -> None:
    base = plan.offsets(fragment.name, tensor_rank)
    facts = source.tensors("optimizer")[f"{fragment.name}/{kind}"]
    for block in rectangles(plan.local_shape(fragment.name), fragment.first, fragment.numel):
        begin = fragment.start + block.start
        for piece, sizes in row_blocks(TensorFacts(block.sizes, facts.dtype), _READ_BYTES):
            offsets = tuple(map(sum, zip(base, block.offsets, piece, strict=True)))
            value = read_finite(
                source, "optimizer", f"{fragment.name}/{kind}", offsets=offsets, sizes=sizes
            )
            flat[begin : begin + value.numel()].copy_(value.flatten())
            begin += value.numel()
