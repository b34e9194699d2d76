"""The original layout saved and loaded by all ranks of a training together.

At a save every rank writes what the original's rank wrote: the optimizer file of its partition,
and, on data rank 0, the rank file and the layer files of its stage. At a load every rank reads what
it holds, whatever topology wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import sharded_files
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
    layer_file,
    module_name,
    optimizer_file,
    place_of,
    rank_file,
)
from trainer.checkpoint.deepspeed.layout import DeepSpeedSource, open_deepspeed_layout
from trainer.checkpoint.deepspeed.partition import fragments_of
from trainer.checkpoint.deepspeed.write import UNKNOWN_SETTINGS, write_file
from trainer.checkpoint.publishing import (
    CheckpointInfo,
    Extras,
    Finished,
    NewCheckpoint,
    make_manifest,
    save_together,
    write_named,
)
from trainer.checkpoint.sharded_files import check_complete, check_model, check_pieces
from trainer.checkpoint.source import Part, TensorSource
from trainer.checkpoint.store import Loaded
from trainer.contract.checkpoint_formats import RNG
from trainer.contract.manifest import FileEntry, Manifest
from trainer.parallel.agreement import RankGroup
from trainer.parallel.mesh import Mesh
from trainer.parallel.state import LocalTensor, ShardedState


def fill(part: Part, pieces: Iterable[LocalTensor], source: TensorSource) -> None:
    """Fill this rank's live pieces of a part from any source, whatever topology wrote it.

    Check names, shapes and dtypes first (`check_pieces`). Raises CheckpointError, naming the file,
    when the source is damaged; the pieces then hold a mixture.
    """
    for piece in pieces:
        piece.tensor.copy_(source.read(part, piece.name, piece.offsets, tuple(piece.tensor.shape)))


def load_deepspeed(
    place: Path,
    state: ShardedState,
    info: CheckpointInfo,
    *,
    group: dist.ProcessGroup | None = None,
    weights_only: bool = False,
) -> Loaded:
    """Fill the tensors of `state` from the folder `place` of the original layout, whatever topology
    wrote it.

    Collective, as `store.load` is: all files are checked by rank 0, names, shapes and dtypes by
    every rank, before the first tensor is touched; all ranks succeed or all raise CheckpointError.
    The folder may be one that tr11 wrote (its random states are then restored on the same topology)
    or one of the original's, which has no manifest.
    """
    ranks = RankGroup(group)
    started = time.perf_counter()
    what = f"{place} was not loaded"
    source = ranks.on_first(what, open_deepspeed_layout, place)
    facts = source.facts
    wanted = {
        key: fact
        for key, fact in info.model.items()
        if not (weights_only and key == "precision.dtype")
    }
    ranks.each(what, check_model, facts.model, wanted)
    parts: dict[Part, list[LocalTensor]] = {
        "weights": ranks.each(what, sharded_files.weight_pieces, state.weights)
    }
    if not weights_only:
        parts["optimizer"] = ranks.each(what, sharded_files.fragment_pieces, state.fragments)
    for part, pieces in parts.items():
        held = source.tensors(part)
        ranks.each(what, check_pieces, part, held, pieces=pieces, widening=weights_only)
        known = set().union(*ranks.gather({piece.name for piece in pieces}))
        ranks.each(what, check_complete, part, held, wanted=known)
    for part, pieces in parts.items():
        ranks.each(what, fill, part, pieces, source=source)
    same = Degrees.of(facts.topology) == Degrees.of(info.topology)
    rng = ranks.each(what, lambda: _random_state(place, ranks.rank) if same else None)
    remarks = tuple(dict.fromkeys(chain.from_iterable(ranks.gather(source.remarks))))
    if not same and not weights_only:  # nothing random follows from weights alone
        shapes = [_shown(facts.topology), _shown(info.topology)]
        remarks += (
            f"saved on {shapes[0]}, loaded on {shapes[1]}: random-number streams are derived again",
        )
    manifest = ranks.on_first(what, lambda: Manifest.read(place) or _manifest_of(source))
    return Loaded(
        manifest,
        facts.cursor,
        facts.optimizer_step,
        rng=rng,
        remarks=remarks,
        seconds=time.perf_counter() - started,
    )


def _shown(topology: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in topology.items())


def _random_state(place: Path, rank: int) -> dict[str, Tensor] | None:
    path = place / RNG / f"rank_{rank}.pt"
    if path.exists():
        return torch.load(path, map_location="cpu", weights_only=True)
    return None


def _manifest_of(source: DeepSpeedSource) -> Manifest:
    """What the manifest of the original's folder would say, but for its files."""
    facts = source.facts
    cursor = {"consumed_samples": 0, "consumed_tokens": 0, **facts.cursor}
    return make_manifest(
        facts.step, Extras(cursor), CheckpointInfo(facts.topology, facts.model), ()
    )


def save_deepspeed(
    new: NewCheckpoint,
    state: ShardedState,
    mesh: Mesh,
    *,
    settings: OptimizerSettings = UNKNOWN_SETTINGS,
    save_optimizer: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Finished:
    """Write a checkpoint in the original layout, and make `latest` name it. Collective.

    As complete or invisible as `store.save`'s: hidden folder, manifest, rename, then `latest`. Each rank needs its
    own partition in memory once more while it writes. The last stage's partitions hold this engine's tied weight,
    after its other matrices, and no idle copies of the embedding's LayerNorm; `write_deepspeed_layout` makes a folder
    that the original's own classes load. `settings` is what the parameter groups say; without `save_optimizer` there
    are no optimizer files. Raises CheckpointError on every rank, and the older checkpoints are as
    before.
    """
    ranks = RankGroup(group)
    # a rank may hold nothing but padding
    with_optimizer = save_optimizer and any(ranks.gather(bool(state.fragments)))
    share = ranks.each(
        new.not_saved,
        _Share,
        state,
        mesh,
        layers=int(new.info.model["model.layers"]),
        with_optimizer=with_optimizer,
    )

    def write(partial: Path) -> list[FileEntry]:
        entries = [
            write_file(partial, name, contents) for name, contents in _files(share, new, settings)
        ]
        return entries + write_named(partial, new.extra_files(ranks.rank))

    return save_together(ranks, new, (), write)


class _Share:
    """One rank's part of a checkpoint, in the original's terms.

    Raises ValueError when the engine's partitions are not those of ZeRO-1 over the two parameter
    groups.
    """

    def __init__(self, state: ShardedState, mesh: Mesh, layers: int, with_optimizer: bool):
        self.state, self.mesh, self.with_optimizer = state, mesh, with_optimizer
        self.degrees = Degrees(mesh.tensor, mesh.pipeline, mesh.data)
        self.places = {item.name: place_of(item.name, layers) for item in state.weights}
        self.groups = flat_groups(
            StageParameter(item.name, module_name(self.places[item.name]), tuple(item.tensor.shape))
            for item in state.weights
        )
        self.model_rank = mesh.pipeline_rank * mesh.tensor + mesh.tensor_rank
        self.bf16 = state.weights[0].tensor.dtype == torch.bfloat16
        self._expected = [
            fragments_of([(item.name, item.numel) for item in group], mesh.data, mesh.data_rank)
            for group in self.groups
        ]
        held = {item.name: (item.start, item.numel) for item in state.fragments}
        wanted = {item.name: (item.first, item.numel) for group in self._expected for item in group}
        if with_optimizer and held != wanted:
            name = min(name for name in {*held, *wanted} if held.get(name) != wanted.get(name))
            raise ValueError(
                f"{name}: this rank holds (start, elements) {held.get(name)}, ZeRO-1 would give it {wanted.get(name)}; "
                'the DeepSpeed layout cannot say so: set checkpoint.format = "tr11"'
            )

    def layer_files(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The weights of this stage's layers, each in a file; a tied copy belongs to the first
        stage's.
        """
        layers: dict[int, dict[str, Tensor]] = {}
        for item in self.state.weights:
            if item.is_owner:
                place = self.places[item.name]
                layers.setdefault(place.position, {})[place.inner] = _own_copy(item.tensor)
        for position, contents in sorted(layers.items()):
            yield layer_file(position, self.mesh.tensor_rank), contents

    def partitions(self) -> list[FlatGroup]:
        """This rank's flat partitions, made of its fragments."""
        tensors = {item.name: item.tensors for item in self.state.fragments}
        made = []
        for group, fragments in zip(self.groups, self._expected, strict=True):
            total = sum(item.numel for item in group)
            flat = FlatGroup(
                fragments, empty_kinds(total, self.degrees.data, self.state.kinds), total
            )
            for fragment in fragments:
                for kind, partition in flat.kinds.items():
                    partition[fragment.start : fragment.start + fragment.numel].copy_(
                        tensors[fragment.name][kind]
                    )
            made.append(flat)
        return made


def _own_copy(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in a storage no larger than itself: `torch.save` writes whole storages."""
    plain = tensor.detach().cpu()
    own = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    if own and plain.is_contiguous():
        return plain
    return plain.clone(memory_format=torch.contiguous_format)


def _files(
    share: _Share, new: NewCheckpoint, settings: OptimizerSettings
) -> Iterator[tuple[str, Any]]:
    """Names and contents of this rank's files, made one at a time."""
    mesh = share.mesh
    steps = share.state.optimizer_step
    if mesh.data_rank == 0:
        yield from share.layer_files()
        yield (
            rank_file(share.model_rank),
            rank_contents(share.groups, share.degrees, new, steps),
        )
    if share.with_optimizer:
        names = {item.name: item.module_name for group in share.groups for item in group}
        contents = optimizer_contents(
            share.partitions(),
            names,
            share.degrees,
            data_rank=mesh.data_rank,
            bf16=share.bf16,
            optimizer_step=steps,
            settings=settings,
        )
        yield optimizer_file(mesh.data_rank, share.model_rank, share.bf16), contents
