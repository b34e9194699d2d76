"""A folder in the original layout, checked file by file before a tensor is read: its degrees,
layers and weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.deepspeed.file_names import (
    EMBEDDING_POSITION,
    FIRST_BLOCK,
    OPTIONAL_IN_EMBEDDING,
    Names,
    block_names,
    cut_dimension,
    embedding_names,
    final_names,
    layer_file,
    optimizer_file,
    rank_file,
    sort_names,
)
from trainer.checkpoint.deepspeed.states import FlatRun, OpenFiles, Slice, StoredTensor, attributes
from trainer.checkpoint.source import TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.record import Record
from trainer.parallel.shard import Sharding

AGAIN = "copy the checkpoint again, or use another step"
_FIRST_VERSION_BY_HEADS = 2.0
_LEFT_OUT = ("module", "optimizer")  # of a rank file's contents; random states are left out too


class Roles(Record):
    """Which position of the layer list is what: (position, the original's name inside it) -> our
    name.
    """

    layers: int
    names: Mapping[tuple[int, str], str]

    @property
    def embedding(self) -> int:
        """Position of the embedding, the first layer with weights."""
        return min(position for position, _ in self.names)


class WeightLayout(Record):
    """A checked folder. `client`: what its first rank file says, without tensors. `weights`: by our
    names.
    """

    names: Names
    tensor: int
    pipeline: int
    data: int
    client: Mapping[str, Any]
    roles: Roles
    weights: Mapping[str, StoredTensor] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The training's arguments; empty when another client than Megatron or tr11 wrote the
        checkpoint.
        """
        return attributes(self.client.get("args"))


def inspect_layout(files: OpenFiles) -> WeightLayout:
    """Check a folder's rank and layer files, and say where each weight lies.

    Raises CheckpointError, naming the file, for what is missing, truncated, foreign, or in
    another's place.
    """
    folder = files.folder
    try:
        names = sort_names([path.name for path in folder.iterdir()])
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror or error}); repair that first"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{folder} mixes two checkpoints: {error}; {AGAIN}") from None
    if not names.layers:
        raise CheckpointError(
            f"{folder} is not in the DeepSpeed layout: it holds no layer_*-model_*-model_states.pt"
        )
    check_manifest(folder)
    tensor, pipeline, data = _degrees(folder, names)
    client = client_of(files)
    _check_rank_files(files, names, tensor * pipeline, data=data, first=client)
    roles = _roles(files, names, attributes(client.get("args")).get("num_layers"))
    return WeightLayout(
        names,
        tensor,
        pipeline,
        data=data,
        client=client,
        roles=roles,
        weights=_weights(files, roles, tensor),
    )


def check_manifest(folder: Path) -> None:
    """Compare the files' sizes with the manifest, where tr11 has left one. Raises CheckpointError."""
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        raise CheckpointError(" ".join(str(error).split())) from None
    if manifest:
        faults = manifest_faults(folder, manifest, read_digests=False)
    else:
        faults = []
    if faults:
        raise CheckpointError(f"{folder} is damaged: {faults[0]}; {AGAIN}")


def _degrees(folder: Path, names: Names) -> tuple[int, int, int]:
    """Tensor, pipeline and data degree by the files there are; every file that they call for must
    be there.
    """
    tensor = 1 + max(rank for _, rank in names.layers)
    model_ranks = [*names.ranks, *(rank for _, rank in names.optimizers)]
    model = -(-(1 + max(model_ranks, default=0)) // tensor) * tensor
    data = 1 + max((rank for rank, _ in names.optimizers), default=0)
    positions = sorted({position for position, _ in names.layers})
    wanted = [layer_file(position, rank) for position in positions for rank in range(tensor)]
    wanted += [rank_file(rank) for rank in range(model)]
    if names.optimizers:
        wanted += [
            optimizer_file(rank, part, names.bf16) for part in range(model) for rank in range(data)
        ]
    missing = [name for name in wanted if name not in names.all]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} is missing ({len(missing)} of the {len(wanted)} files of tensor {tensor} x "
            f"pipeline {model // tensor} x data {data} are); {AGAIN}"
        )
    return tensor, model // tensor, data


def _check_rank_files(
    files: OpenFiles, names: Names, model: int, data: int, first: Mapping[str, Any]
) -> None:
    """All rank files must be of one state of the training, and agree with the number of files."""
    said: dict[str, Any] = {"mp_world_size": model}
    if names.optimizers:
        said["dp_world_size"] = data
    said |= {
        key: first.get(key) for key in ("iteration", "global_steps", "skipped_steps", "ds_version")
    }
    for rank in range(model):
        states = files.states(rank_file(rank))
        for key, value in said.items():
            if key in states and states[key] != value:
                raise CheckpointError(
                    f"{files.folder / rank_file(rank)} has {key} {states[key]!r}, and the other files make it "
                    f"{value!r}: files are missing, or it is of another checkpoint; {AGAIN}"
                )
    version = first.get("checkpoint_version")
    if isinstance(version, int | float) and version < _FIRST_VERSION_BY_HEADS:
        raise CheckpointError(
            f"{files.folder / rank_file(0)} has checkpoint_version {version}, whose query, key and value rows are "
            "not in the order of heads; bring it to version 3.0 with Megatron's own tool first"
        )


def _roles(files: OpenFiles, names: Names, said_layers: object) -> Roles:
    """Tell embedding, blocks and last LayerNorm by what their files hold, and check that none is
    missing.
    """
    kinds = {
        position: _kind(files, position)
        for position in sorted({position for position, _ in names.layers})
    }
    by_kind = {
        kind: [one for one in kinds if kinds[one] == kind]
        for kind in ("embedding", "block", "final")
    }
    for kind, found in by_kind.items():
        if not found:
            raise CheckpointError(
                f"{files.folder} holds no file of the model's {_SHOWN[kind]}; {AGAIN}"
            )
    # A tied embedding may be written once more, by the stage of the head.
    embedding = by_kind["embedding"][0]
    blocks = by_kind["block"]
    final = by_kind["final"][0]
    if embedding != min(kinds):
        raise CheckpointError(
            f"{files.folder / layer_file(min(kinds), 0)} does not hold the word embedding; {AGAIN}"
        )
    if isinstance(said_layers, int):
        count = said_layers
    else:
        count = len(blocks)
    first = embedding - EMBEDDING_POSITION + FIRST_BLOCK
    wanted = range(first, first + count)
    misplaced = [
        one for one in blocks if one not in wanted or not embedding < one < final
    ] + by_kind["final"][1:]
    misplaced += [one for one in wanted if kinds.get(one, "block") != "block"]
    for position in wanted:
        if position not in kinds:
            raise CheckpointError(f"{files.folder / layer_file(position, 0)} is missing; {AGAIN}")
    if misplaced:
        position = misplaced[0]
        raise CheckpointError(
            f"{files.folder / layer_file(position, 0)} holds the model's {_SHOWN[kinds[position]]}, which does not "
            f"belong there: it is in another file's place; {AGAIN}"
        )
    return role_table(embedding, blocks, final)


def role_table(embedding: int, blocks: Sequence[int], final: int) -> Roles:
    """The roles of layers at these positions, blocks in their order."""
    table = {(embedding, theirs): ours for theirs, ours in embedding_names().items()}
    table |= {(final, theirs): ours for theirs, ours in final_names().items()}
    for number, position in enumerate(blocks):
        table |= {(position, theirs): ours for theirs, ours in block_names(number).items()}
    return Roles(len(blocks), table)


def client_of(files: OpenFiles) -> dict[str, Any]:
    """What the first rank file says, without tensors. Raises CheckpointError when there is none."""
    states = files.states(rank_file(0))
    return {
        key: value
        for key, value in states.items()
        if key not in _LEFT_OUT and "rng" not in str(key)
    }


_SHOWN = {"embedding": "word embedding", "block": "transformer blocks", "final": "last LayerNorm"}


def _kind(files: OpenFiles, position: int) -> str:
    name = layer_file(position, 0)
    held = {str(key) for key, value in files.states(name).items() if isinstance(value, Tensor)}
    if "word_embeddings.weight" in held:
        return "embedding"
    if "input_layernorm.weight" in held:
        return "block"
    if held == {"weight", "bias"}:
        return "final"
    shown = ", ".join(sorted(held)[:3]) or "no tensor"
    raise CheckpointError(
        f"{files.folder / name} is not a layer of a GPT (it holds {shown}); take it away"
    )


def _weights(files: OpenFiles, roles: Roles, tensor: int) -> dict[str, StoredTensor]:
    """The weights: every tensor rank's file of a layer must hold the same, and every block the
    first one's shapes.
    """
    known: dict[int, dict[str, str]] = {}
    for (position, theirs), ours in roles.names.items():
        known.setdefault(position, {})[theirs] = ours
    shapes: dict[str, tuple[int, ...]] = {}
    found = {}
    for position, names in sorted(known.items()):
        path = files.folder / layer_file(position, 0)
        held = files.states(layer_file(position, 0))
        foreign = sorted(set(map(str, held)) - set(names))
        lacking = sorted(set(names) - set(held) - OPTIONAL_IN_EMBEDDING)
        if foreign or lacking:
            if foreign:
                what = f"holds {foreign[0]}, which tr11's GPT has not"
            else:
                what = f"lacks {lacking[0]}"
            raise CheckpointError(f"{path} {what}: it is of another model")
        for theirs in held:
            whole = _weight(files, position, theirs, ours=names[theirs], tensor=tensor)
            if shapes.setdefault(theirs, whole.facts.shape) != whole.facts.shape:
                raise CheckpointError(
                    f"{path} holds {theirs} of shape {whole.facts.shape}, the first block {shapes[theirs]}: "
                    f"it is of another model; {AGAIN}"
                )
            found[names[theirs]] = whole
    return found


def _weight(files: OpenFiles, position: int, theirs: str, ours: str, tensor: int) -> StoredTensor:
    cut = cut_dimension(ours)
    sharding = Sharding(cut, 1 if cut is None else tensor)
    first = files.tensor(layer_file(position, 0), (theirs,))
    local = tuple(first.shape)
    slices = []
    for rank in range(tensor):
        name = layer_file(position, rank)
        value = files.tensor(name, (theirs,))
        if (tuple(value.shape), value.dtype) != (local, first.dtype):
            raise CheckpointError(
                f"{files.folder / name} holds {theirs} as {tuple(value.shape)} {value.dtype}, "
                f"{layer_file(position, 0)} as {local} {first.dtype}: one of them is of another checkpoint; {AGAIN}"
            )
        run = FlatRun(name, (theirs,), 0, numel=math.prod(local), start=0)
        slices.append(Slice(sharding.offsets(local, rank), local, (run,)))
    return StoredTensor(
        TensorFacts(sharding.global_shape(local), first.dtype), tuple(slices), cut is None
    )
