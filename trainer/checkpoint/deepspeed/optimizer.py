"""The optimizer's files of the original layout: flat fp32 partitions, cut into the parameters'
masters and moments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.deepspeed.file_names import optimizer_file, rank_file
from trainer.checkpoint.deepspeed.inspect import AGAIN, Roles, WeightLayout
from trainer.checkpoint.deepspeed.partition import fragments_of
from trainer.checkpoint.deepspeed.states import (
    FlatRun,
    OpenFiles,
    Slice,
    StoredTensor,
    attributes,
    missing_elements,
)
from trainer.checkpoint.source import TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.parallel.state import MOMENT_KINDS

Keys = tuple[str | int, ...]
# data rank -> group -> parameter -> (start, elements)
_Mappings = list[list[dict[str, tuple[int, int]]]]
_STATE, _PARTITIONS, _BASE = (
    "optimizer_state_dict",
    "single_partition_of_fp32_groups",
    "base_optimizer_state",
)
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")
_POSITIONED = re.compile(r"(\d+)\.(.+)")


class OptimizerLayout(Record):
    """Where the optimizer's tensors lie (keys NAME/KIND), updates done, and the options of its
    parameter groups.
    """

    tensors: Mapping[str, StoredTensor] = {}
    steps: int = 0
    options: tuple[Mapping[str, Any], ...] = ()


class _Share(Record):
    """What one optimizer file holds: (parameter, kind -> keys of its flat tensor, start in that,
    elements).
    """

    fragments: tuple[tuple[str, Mapping[str, Keys], int, int], ...]
    steps: set[int]
    options: tuple[Mapping[str, Any], ...]


def inspect_optimizer(files: OpenFiles, layout: WeightLayout) -> OptimizerLayout:
    """Check all optimizer files of a folder, and say where each master weight and moment lies;
    empty without files.

    Raises CheckpointError, naming the file, for what is truncated, foreign, or in another's place.
    """
    fallback = int(layout.client.get("global_steps") or 0) - int(
        layout.client.get("skipped_steps") or 0
    )
    if not layout.names.optimizers:
        return OptimizerLayout(steps=fallback)
    _check_settings(files, layout)
    runs: dict[tuple[str, int], dict[str, list[FlatRun]]] = {}
    steps: dict[int, str] = {}
    options: tuple[Mapping[str, Any], ...] = ()
    for model_rank in range(layout.pipeline * layout.tensor):
        stage, tensor_rank = divmod(model_rank, layout.tensor)
        expected = _expected_mappings(files, layout.data, model_rank)
        # Ranks in numerical order: each parameter's fragments follow one another over the data
        # ranks.
        for data_rank in range(layout.data):
            name = optimizer_file(data_rank, model_rank, layout.names.bf16)
            share = _share(files, name, layout.data, expected=expected, data_rank=data_rank)
            steps.update(dict.fromkeys(share.steps, name))
            options = options or share.options
            for inner, keys, start, numel in share.fragments:
                ours = _our_name(files, name, inner, roles=layout.roles, stage=stage)
                if ours is None:
                    continue
                kinds = runs.setdefault((ours, tensor_rank), {})
                for kind, path in keys.items():
                    held = kinds.setdefault(kind, [])
                    first = 0
                    if held:
                        first = held[-1].first + held[-1].numel
                    held.append(FlatRun(name, path, first, numel=numel, start=start))
    if len(steps) > 1:
        (one, early), (two, late) = sorted(steps.items())[:2]
        raise CheckpointError(
            f"{files.folder / early} is of update {one} and {late} of update {two}: checkpoints were mixed; {AGAIN}"
        )
    tensors = _assembled(files, layout, runs)
    _check_pairs(files, layout.weights, tensors)
    return OptimizerLayout(tensors, next(iter(steps), fallback), options)


def _check_settings(files: OpenFiles, layout: WeightLayout) -> None:
    zero = attributes(attributes(layout.client.get("ds_config")).get("zero_optimization"))
    if zero.get("round_robin_gradients") and layout.data > 1:
        raise CheckpointError(
            f"{files.folder / rank_file(0)} says round_robin_gradients: the order of its partitions is not written "
            "down, so the optimizer cannot be read; take the bf16_zero*/zero* files away to use the weights alone"
        )


def _share(
    files: OpenFiles, name: str, data: int, expected: _Mappings | None, data_rank: int
) -> _Share:
    states = files.states(name).get(_STATE)
    if not isinstance(states, dict) or not isinstance(states.get(_PARTITIONS), list):
        raise CheckpointError(
            f"{files.folder / name} holds no state of ZeRO stage 1 or 2: it is foreign; {AGAIN}"
        )
    counts = states.get("partition_count", data)
    if any(count != data for count in (counts if isinstance(counts, list) else [counts])):
        raise CheckpointError(
            f"{files.folder / name} is one of {counts} partitions, and the files are of {data}: files are missing, "
            f"or it is of another checkpoint; {AGAIN}"
        )
    mappings = _mappings(files.folder / name, states, expected, data_rank)
    fragments = []
    steps = set()
    options = []
    for group, (mapping, partition) in enumerate(zip(mappings, states[_PARTITIONS], strict=True)):
        where, moments, option = _group_state(states.get(_BASE, {}), group)
        options.append(
            {"clip_grad": states["clip_grad"], **option} if "clip_grad" in states else option
        )
        step = moments.get("step", option.get("step"))
        if step is not None:
            steps.add(int(step))
        flat: dict[str, Tensor] = {"fp32": partition}
        flat |= {
            kind: moments[kind] for kind in MOMENT_KINDS if isinstance(moments.get(kind), Tensor)
        }
        keys: dict[str, Keys] = {
            kind: (_STATE, _PARTITIONS, group) if kind == "fp32" else (_STATE, _BASE, *where, kind)
            for kind in flat
        }
        for inner, (start, numel) in mapping.items():
            for kind, tensor in flat.items():
                if start < 0 or start + numel > tensor.numel():
                    raise CheckpointError(
                        f"{files.folder / name}: {kind} of {inner} should be elements {start} to {start + numel} of a "
                        f"partition that has {tensor.numel()}: it is damaged; {AGAIN}"
                    )
            fragments.append((inner, keys, start, numel))
    return _Share(tuple(fragments), steps, tuple(options))


def _group_state(base: Any, group: int) -> tuple[Keys, Mapping[str, Any], Mapping[str, Any]]:
    """Keys to a group's moments, the moments, and the group's options; in DeepSpeed's plain or
    elastic form.
    """
    if isinstance(base, list):
        return (group,), base[group], {}
    listed = base.get("param_groups", [])
    if group < len(listed):
        option = dict(listed[group])
    else:
        option = {}
    number = next(iter(option.pop("params", [])), group)
    return ("state", number), base.get("state", {}).get(number, {}), option


def _expected_mappings(files: OpenFiles, data: int, model_rank: int) -> _Mappings | None:
    """What each data rank's partitions hold, by the shapes that the rank file lists in order; None
    without a list.
    """
    shapes = files.states(rank_file(model_rank)).get("param_shapes")
    if not isinstance(shapes, list):
        return None
    groups = [[(str(name), math.prod(shape)) for name, shape in group.items()] for group in shapes]
    return [
        [
            {part.name: (part.start, part.numel) for part in fragments_of(group, data, rank)}
            for group in groups
        ]
        for rank in range(data)
    ]


def _mappings(
    path: Path, states: Mapping[str, Any], expected: _Mappings | None, data_rank: int
) -> list[dict[str, tuple[int, int]]]:
    """A file's fragments, group by group: as it says, or, from older DeepSpeed that did not, by the
    shapes.

    A file that says what another data rank's or another stage's should is in another's place. One
    that agrees with none has gaps between its parameters (DeepSpeed's parameter_alignment), which
    is believed.
    """
    stored = states.get("param_slice_mappings")
    if stored is None:
        if expected is None:
            raise CheckpointError(
                f"{path} has no param_slice_mappings, and its rank file no list of param_shapes: its partitions "
                "cannot be cut; take the optimizer files away to use the weights alone"
            )
        return expected[data_rank]
    found = []
    for group in stored:
        addresses = {str(name): attributes(address) for name, address in group.items()}
        found.append(
            {name: (int(item["start"]), int(item["numel"])) for name, item in addresses.items()}
        )
    if expected is not None and found != expected[data_rank]:
        known = {name for rank in expected for group in rank for name in group}
        if found in expected or any(name not in known for group in found for name in group):
            raise CheckpointError(
                f"{path} holds the partitions of another rank: it is in another file's place; {AGAIN}"
            )
    return found


def _our_name(files: OpenFiles, name: str, inner: str, roles: Roles, stage: int) -> str | None:
    """Our name of a parameter of the original's pipeline module; None for the tied module's copy on
    a later stage.

    That copy is of the embedding's whole module. Only its word embedding trains there, in step with
    the first stage's; its LayerNorm and positions stay what they were at the start.
    """
    if match := _TIED.fullmatch(inner):
        if stage > 0:
            return None
        found = roles.names.get((roles.embedding, match[1]))
    else:
        match = _POSITIONED.fullmatch(inner)
        found = None
        if match:
            found = roles.names.get((int(match[1]), match[2]))
    if found is None:
        raise CheckpointError(
            f"{files.folder / name} holds {inner}, and no layer file does: that layer's file is missing, or this one "
            f"is of another model; {AGAIN}"
        )
    return found


def _assembled(
    files: OpenFiles,
    layout: WeightLayout,
    runs: Mapping[tuple[str, int], Mapping[str, list[FlatRun]]],
) -> dict[str, StoredTensor]:
    """Join the fragments into logical tensors; each slice must be complete."""
    found = {}
    for ours, weight in layout.weights.items():
        for kind in runs.get((ours, 0), {"fp32": []}):
            slices = []
            for rank, part in enumerate(weight.slices):
                held = runs.get((ours, rank), {}).get(kind, [])
                slices.append(Slice(part.offsets, part.shape, tuple(held)))
                missing = missing_elements(slices[-1])
                if missing:
                    total = math.prod(part.shape)
                    if held:
                        where = held[0].path
                    else:
                        where = f"the optimizer files of tensor rank {rank}"
                    raise CheckpointError(
                        f"{files.folder / where}, with those of its other data ranks, holds {total - missing} of "
                        f"{total} elements of {ours}/{kind}: one of them is in another's place; {AGAIN}"
                    )
            run = slices[0].runs[0]
            dtype = files.tensor(run.path, run.keys).dtype
            found[f"{ours}/{kind}"] = StoredTensor(
                TensorFacts(weight.facts.shape, dtype), tuple(slices), weight.replicated
            )
    return found


_LARGEST = 2
_SAMPLES = 4


def _check_pairs(
    files: OpenFiles, weights: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]
) -> None:
    """Compare a few masters of each optimizer file with the weights: of files in each other's place
    they differ.

    The weights are the masters, rounded. Looked at are the largest matrices, because LayerNorms are
    much alike, and the fragments that are cut, because only they tell the data ranks apart.
    """
    by_file: dict[str, list[tuple[FlatRun, FlatRun]]] = {}
    matrices = {
        run
        for name, weight in weights.items()
        for run in _runs(weight)
        if len(weight.facts.shape) > 1
    }
    for name, weight in weights.items():
        for part, low in zip(tensors[f"{name}/fp32"].slices, _runs(weight), strict=True):
            for run in part.runs:
                by_file.setdefault(run.path, []).append((run, low))
    for name, pairs in by_file.items():
        pairs.sort(key=lambda pair: (pair[1] in matrices, pair[0].numel), reverse=True)
        cut = [pair for pair in pairs[_LARGEST:] if pair[0].numel < pair[1].numel]
        for master, low in pairs[:_LARGEST] + cut:
            places = [index * (master.numel - 1) // (_SAMPLES - 1) for index in range(_SAMPLES)]
            if sum(_agrees(files, master, low, place) for place in places) * 2 < _SAMPLES:
                raise CheckpointError(
                    f"{files.folder / name} does not belong to {low.path}: its masters are not those weights; one of "
                    f"the two is in another's place; {AGAIN}"
                )


def _runs(weight: StoredTensor) -> list[FlatRun]:
    """The one run of each slice of a weight."""
    return [part.runs[0] for part in weight.slices]


def _agrees(files: OpenFiles, master: FlatRun, weight: FlatRun, place: int) -> bool:
    """Whether element `place` of the fragment is the weight in higher precision; a NaN is a NaN."""
    low = files.tensor(weight.path, weight.keys).flatten()[master.first + place]
    high = files.tensor(master.path, master.keys)[master.start + place].to(low.dtype)
    return bool(high == low) or bool(high.isnan() and low.isnan())
