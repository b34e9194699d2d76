"""The universal form of the original layout: `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`, each parameter whole, in fp32.

Beside them lie the rank files of the checkpoint that was converted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.deepspeed.file_names import EMBEDDING_POSITION, OPTIONAL_IN_EMBEDDING, Names
from trainer.checkpoint.deepspeed.index import FlatRun, Slice, StoredTensor
from trainer.checkpoint.deepspeed.inspect import AGAIN, Layout, Roles, check_manifest, client_of, role_table
from trainer.checkpoint.deepspeed.optimizer import OptimizerLayout
from trainer.checkpoint.deepspeed.states import OpenFiles, attributes
from trainer.checkpoint.source import TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.parallel.state import EXTRA_KINDS, FRAGMENT_KINDS

_PARAMETER, _PADDING = "param", "vocab_divisibility_padding_tensor"
_NAME = re.compile(r"(?:tied_modules\.[^.]+|(\d+))\.(.+)")


class Universal(Record):
    """A checked folder. Its weights are the masters, to be read in the precision that the training had."""

    layout: Layout
    optimizer: OptimizerLayout


def inspect_universal(files: OpenFiles) -> Universal:
    """Check a folder of the universal form, and say where each tensor lies.

    Raises CheckpointError, naming the file, for what is missing, truncated or foreign.
    """
    check_manifest(files.folder)
    client = client_of(files)
    folders = sorted(path.name for path in (files.folder / "zero").iterdir() if path.is_dir())
    places = {name: _place(files, name) for name in folders}
    roles = _roles(files, places, attributes(client.get("args")).get("num_layers"))
    tensors: dict[str, StoredTensor] = {}
    for name, place in places.items():
        ours = roles.names.get(place)
        if ours is None:
            raise CheckpointError(
                f"{files.folder / 'zero' / name} is no parameter of tr11's GPT: it is of another model"
            )
        shape, path = None, files.folder / "zero" / name
        for kind in (*FRAGMENT_KINDS, *(kind for kind in EXTRA_KINDS if (path / f"{kind}.pt").exists())):
            stored = _stored(files, f"zero/{name}/{kind}.pt")
            if shape is not None and stored.facts.shape != shape:
                raise CheckpointError(f"{path}: {kind}.pt has shape {stored.facts.shape}, fp32.pt {shape}; {AGAIN}")
            shape = stored.facts.shape
            tensors[f"{ours}/{kind}"] = stored
    for (_, theirs), ours in roles.names.items():
        if f"{ours}/fp32" not in tensors and theirs not in OPTIONAL_IN_EMBEDDING:
            raise CheckpointError(f"{files.folder / 'zero'} holds no folder for {theirs} ({ours}); {AGAIN}")
    dtype = _dtype(client)
    weights = {
        key.removesuffix("/fp32"): StoredTensor(TensorFacts(stored.facts.shape, dtype), stored.slices, False)
        for key, stored in tensors.items()
        if key.endswith("/fp32")
    }
    done = int(client.get("global_steps") or 0) - int(client.get("skipped_steps") or 0)
    dims = attributes(client.get("checkpoint_parallel_dimensions"))
    tensor = int(dims.get("tp_degree", attributes(client.get("args")).get("tensor_model_parallel_size", 1)))
    model, data = int(client.get("mp_world_size", tensor)), int(client.get("dp_world_size", 1))
    names = Names({}, {}, {}, dtype == torch.bfloat16)
    layout = Layout(names, tensor, model // tensor, data=data, client=client, roles=roles, weights=weights)
    return Universal(layout, OptimizerLayout(tensors, done))


def _place(files: OpenFiles, name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{files.folder / 'zero' / name} is not a parameter of a pipeline; take it away")
    return (int(match[1]) if match[1] else EMBEDDING_POSITION), match[2]


def _roles(files: OpenFiles, places: Mapping[str, tuple[int, str]], said_layers: object) -> Roles:
    blocks = sorted(position for position, inner in places.values() if inner == "input_layernorm.weight")
    finals = [position for position, inner in places.values() if inner == "weight"]
    if not blocks or len(finals) != 1 or (EMBEDDING_POSITION, "word_embeddings.weight") not in places.values():
        raise CheckpointError(
            f"{files.folder / 'zero'} does not hold an embedding, blocks and a last LayerNorm; {AGAIN}"
        )
    count = said_layers if isinstance(said_layers, int) else len(blocks)
    wanted = list(range(blocks[0], blocks[0] + count))
    if blocks != wanted:
        lost = min(set(wanted) ^ set(blocks))
        raise CheckpointError(f"{files.folder / 'zero'} holds {len(blocks)} of {count} blocks: see {lost}.*; {AGAIN}")
    return role_table(EMBEDDING_POSITION, blocks, finals[0])


def _stored(files: OpenFiles, name: str) -> StoredTensor:
    """One parameter's tensor; older converters keep the rows that pad the vocabulary apart."""
    value = files.tensor(name, (_PARAMETER,))
    parts = [(value, _PARAMETER)]
    padding = files.states(name).get(_PADDING)
    if isinstance(padding, Tensor) and padding.numel():
        parts.append((padding.view(-1, *value.shape[1:]), _PADDING))
    shape = (sum(part.shape[0] for part, _ in parts), *value.shape[1:])
    runs, first = [], 0
    for part, key in parts:
        runs.append(FlatRun(name, (key,), first, numel=part.numel(), start=0))
        first += part.numel()
    assert first == math.prod(shape)
    return StoredTensor(TensorFacts(shape, value.dtype), (Slice((0,) * len(shape), shape, tuple(runs)),), False)


def _dtype(client: Mapping[str, Any]) -> torch.dtype:
    """The precision of the training's weights, as its arguments say; fp32 where they do not."""
    arguments = attributes(client.get("args"))
    stored = arguments.get("params_dtype")
    if isinstance(stored, torch.dtype):
        return stored
    return torch.bfloat16 if arguments.get("bf16") else torch.float16 if arguments.get("fp16") else torch.float32
