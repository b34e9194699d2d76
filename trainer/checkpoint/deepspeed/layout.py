"""The original (Megatron-DeepSpeed) layout as logical tensors, whatever topology wrote it.

Read where it lies: files are mapped, and a rectangle touches only the pages that hold it. Tensor
slices are joined (their query, key and value rows are in the order of heads, as ours), flat
partitions are cut into parameters, and the tied copy of the embedding on the last stage is passed
over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.deepspeed.file_names import EMBEDDING_POSITION, OPTIONAL_IN_EMBEDDING, Names
from trainer.checkpoint.deepspeed.inspect import (
    AGAIN,
    Roles,
    WeightLayout,
    check_manifest,
    client_of,
    inspect_layout,
    role_table,
)
from trainer.checkpoint.deepspeed.optimizer import OptimizerLayout, inspect_optimizer
from trainer.checkpoint.deepspeed.states import (
    FlatRun,
    OpenFiles,
    Slice,
    StoredTensor,
    attributes,
    read_stored,
)
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts, precision_name
from trainer.contract.checkpoint_formats import UNIVERSAL_WEIGHTS
from trainer.contract.errors import CheckpointError
from trainer.parallel.state import EXTRA_KINDS, FRAGMENT_KINDS

OWN_KEY = "tr11"  # where tr11 keeps, in the rank files, what the original has no field for
_POSITION_KINDS = {1: "rotary", 2: "absolute", 3: "alibi"}
_LEAST_OPEN_FILES = 32


class DeepSpeedSource:
    """A TensorSource (see `trainer.checkpoint.source`) over a checked folder in the original
    layout.

    It may be sent to other processes: then only where things lie travels, and they need not check
    again. `remarks`: what was found odd while reading. `group_options`: learning rate, betas ... of
    the parameter groups.
    """

    def __init__(
        self,
        files: OpenFiles,
        layout: WeightLayout,
        optimizer: OptimizerLayout,
        report: Callable[[str], None] | None,
    ):
        self.remarks: list[str] = []
        self.group_options = optimizer.options
        self._files = files
        self._report = report
        self._parts: dict[Part, Mapping[str, StoredTensor]] = {
            "weights": layout.weights,
            "optimizer": optimizer.tensors,
        }
        self._facts = _facts(files.folder, layout, optimizer.steps)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_report": None}

    @property
    def facts(self) -> CheckpointFacts:
        return self._facts

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        """All tensors of a part; "optimizer" is empty for a weights-only copy."""
        return {key: stored.facts for key, stored in self._parts[part].items()}

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The rectangle at `offsets` of `sizes`, in memory of its own. Raises CheckpointError
        naming the file.
        """
        value, spread = read_stored(self._files, self._parts[part][key], offsets, sizes)
        if spread is not None:
            self._remark(
                f"the tensor ranks' copies of {key} differ by up to {spread:.3g}; their mean is taken"
            )
        return value

    def _remark(self, line: str) -> None:
        if line not in self.remarks:
            self.remarks.append(line)
            if self._report is not None:
                self._report(line)


def open_deepspeed_layout(
    place: Path, report: Callable[[str], None] | None = None
) -> DeepSpeedSource:
    """Open a `global_stepN` folder of the original layout; all its files are checked, no tensor is
    read whole.

    The universal form (`global_stepN_universal`) is read too; its weights are the masters in the
    training's precision. `report` is told, one line at a time, what is odd and read all the same:
    replicated tensors whose copies differ. Raises CheckpointError, naming the file, when something
    is missing, truncated, foreign or in another's place.
    """
    files = OpenFiles(place, _LEAST_OPEN_FILES)
    if next(place.glob(UNIVERSAL_WEIGHTS), None) is not None:
        return DeepSpeedSource(files, *inspect_universal(files), report)
    layout = inspect_layout(files)
    files.most = max(_LEAST_OPEN_FILES, 2 * layout.tensor * layout.data)
    return DeepSpeedSource(files, layout, inspect_optimizer(files, layout), report)


def _facts(folder: Path, layout: WeightLayout, steps: int) -> CheckpointFacts:
    own = attributes(layout.client.get(OWN_KEY))
    cursor = _cursor(layout) | attributes(own.get("cursor"))
    return CheckpointFacts(
        step=int(cursor["iteration"]),
        layout="deepspeed",
        topology={"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data},
        model=_model(layout) | attributes(own.get("model")),
        cursor=cursor,
        optimizer_step=steps,
    )


def _cursor(layout: WeightLayout) -> dict[str, Any]:
    """The training's counters as the original keeps them; a count that no file holds is 0."""
    client = layout.client
    arguments = layout.arguments
    iteration = client.get("iteration", client.get("global_steps"))
    tokens = client.get("tokens", arguments.get("consumed_train_tokens"))
    return {
        "iteration": int(iteration or 0),
        "consumed_samples": int(
            arguments.get("consumed_train_samples") or client.get("global_samples") or 0
        ),
        "consumed_tokens": int(tokens or 0),
        "skipped": int(client.get("skipped_steps") or 0),
        "nan": 0,
    }


def _model(layout: WeightLayout) -> dict[str, Any]:
    """The model's facts under the card's keys: by the tensors, and by the arguments where there are
    any.
    """
    weights = layout.weights
    arguments = layout.arguments
    vocabulary, hidden = weights["embedding.word.weight"].facts.shape
    facts: dict[str, Any] = {
        "model.layers": layout.roles.layers,
        "model.hidden_size": hidden,
        "model.ffn_hidden_size": weights["blocks.0.mlp.up.weight"].facts.shape[0],
        "model.embedding_layernorm": "embedding.norm.weight" in weights,
        "tokenizer.padded_vocabulary_size": vocabulary,
        "precision.dtype": precision_name(weights["blocks.0.mlp.up.weight"].facts.dtype),
    }
    if "num_attention_heads" in arguments:
        facts["model.attention_heads"] = arguments["num_attention_heads"]
    if "embedding.position.weight" in weights:
        facts["model.position_embedding"] = "absolute"
        facts["model.max_position_embeddings"] = weights["embedding.position.weight"].facts.shape[0]
    elif "position_embedding_type" in arguments:
        stored = arguments["position_embedding_type"]  # an enumeration of Megatron's, by its number
        kind = next(iter(getattr(stored, "arguments", ())), stored)
        facts["model.position_embedding"] = _POSITION_KINDS.get(kind, str(kind))
    return facts


_PARAMETER = "param"
_PADDING = "vocab_divisibility_padding_tensor"
_NAME = re.compile(r"(?:tied_modules\.[^.]+|(\d+))\.(.+)")


def inspect_universal(files: OpenFiles) -> tuple[WeightLayout, OptimizerLayout]:
    """Check a folder of the universal form, and say where each tensor lies. Its weights are the
    masters, to be read in the precision that the training had.

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
        shape = None
        path = files.folder / "zero" / name
        for kind in (
            *FRAGMENT_KINDS,
            *(kind for kind in EXTRA_KINDS if (path / f"{kind}.pt").exists()),
        ):
            stored = _stored(files, f"zero/{name}/{kind}.pt")
            if shape is not None and stored.facts.shape != shape:
                raise CheckpointError(
                    f"{path}: {kind}.pt has shape {stored.facts.shape}, fp32.pt {shape}; {AGAIN}"
                )
            shape = stored.facts.shape
            tensors[f"{ours}/{kind}"] = stored
    for (_, theirs), ours in roles.names.items():
        if f"{ours}/fp32" not in tensors and theirs not in OPTIONAL_IN_EMBEDDING:
            raise CheckpointError(
                f"{files.folder / 'zero'} holds no folder for {theirs} ({ours}); {AGAIN}"
            )
    dtype = _dtype(client)
    weights = {
        key.removesuffix("/fp32"): StoredTensor(
            TensorFacts(stored.facts.shape, dtype), stored.slices, False
        )
        for key, stored in tensors.items()
        if key.endswith("/fp32")
    }
    done = int(client.get("global_steps") or 0) - int(client.get("skipped_steps") or 0)
    dims = attributes(client.get("checkpoint_parallel_dimensions"))
    tensor = int(
        dims.get("tp_degree", attributes(client.get("args")).get("tensor_model_parallel_size", 1))
    )
    model = int(client.get("mp_world_size", tensor))
    data = int(client.get("dp_world_size", 1))
    names = Names({}, {}, {}, dtype == torch.bfloat16)
    layout = WeightLayout(
        names, tensor, model // tensor, data=data, client=client, roles=roles, weights=weights
    )
    return layout, OptimizerLayout(tensors, done)


def _place(files: OpenFiles, name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{files.folder / 'zero' / name} is not a parameter of a pipeline; take it away"
        )
    return (int(match[1]) if match[1] else EMBEDDING_POSITION), match[2]


def _roles(files: OpenFiles, places: Mapping[str, tuple[int, str]], said_layers: object) -> Roles:
    blocks = sorted(
        position for position, inner in places.values() if inner == "input_layernorm.weight"
    )
    finals = [position for position, inner in places.values() if inner == "weight"]
    if (
        not blocks
        or len(finals) != 1
        or (EMBEDDING_POSITION, "word_embeddings.weight") not in places.values()
    ):
        raise CheckpointError(
            f"{files.folder / 'zero'} does not hold an embedding, blocks and a last LayerNorm; {AGAIN}"
        )
    if isinstance(said_layers, int):
        count = said_layers
    else:
        count = len(blocks)
    wanted = list(range(blocks[0], blocks[0] + count))
    if blocks != wanted:
        lost = min(set(wanted) ^ set(blocks))
        raise CheckpointError(
            f"{files.folder / 'zero'} holds {len(blocks)} of {count} blocks: see {lost}.*; {AGAIN}"
        )
    return role_table(EMBEDDING_POSITION, blocks, finals[0])


def _stored(files: OpenFiles, name: str) -> StoredTensor:
    """One parameter's tensor; older converters keep the rows that pad the vocabulary apart."""
    value = files.tensor(name, (_PARAMETER,))
    parts = [(value, _PARAMETER)]
    padding = files.states(name).get(_PADDING)
    if isinstance(padding, Tensor) and padding.numel():
        parts.append((padding.view(-1, *value.shape[1:]), _PADDING))
    shape = (sum(part.shape[0] for part, _ in parts), *value.shape[1:])
    runs = []
    first = 0
    for part, key in parts:
        runs.append(FlatRun(name, (key,), first, numel=part.numel(), start=0))
        first += part.numel()
    assert first == math.prod(shape)
    return StoredTensor(
        TensorFacts(shape, value.dtype), (Slice((0,) * len(shape), shape, tuple(runs)),), False
    )


def _dtype(client: Mapping[str, Any]) -> torch.dtype:
    """The precision of the training's weights, as its arguments say; fp32 where they do not."""
    arguments = attributes(client.get("args"))
    stored = arguments.get("params_dtype")
    if isinstance(stored, torch.dtype):
        return stored
    if arguments.get("bf16"):
        return torch.bfloat16
    if arguments.get("fp16"):
        return torch.float16
    return torch.float32
