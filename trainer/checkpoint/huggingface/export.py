"""A checkpoint's weights as a Hugging Face model: config, sharded safetensors, tokenizer.

A GPT is written as a BLOOM, a Llama or a Qwen3, a BERT as a Megatron-BERT, a T5 as a Blenderbot.

Tensors are streamed from the checkpoint into the shards a few rows at a time, so the memory needed
does not grow with the model. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from trainer.checkpoint.files import digesting
from trainer.checkpoint.huggingface.blenderbot import T5
from trainer.checkpoint.huggingface.bloom import BLOOM
from trainer.checkpoint.huggingface.llama import LLAMA, is_llama
from trainer.checkpoint.huggingface.mapped import (
    BLOCK_BYTES,
    ROWS_KEY,
    VOCABULARY,
    Architecture,
    MappedTensor,
    needed_fact,
    shape_of,
)
from trainer.checkpoint.huggingface.megatron_bert import BERT
from trainer.checkpoint.rewrite import row_blocks, tensor_bytes
from trainer.checkpoint.sharded_files import check_model
from trainer.checkpoint.source import (
    DTYPES,
    TensorFacts,
    TensorSource,
    dtype_name,
    precision_name,
    read_finite,
)
from trainer.checkpoint.whole_folder import check_target, whole_folder
from trainer.config.end_token import CONFIG_FILE
from trainer.contract.checkpoint_formats import HF_CONFIG, HF_INDEX, HF_SINGLE
from trainer.contract.errors import CheckpointError, DataError
from trainer.contract.manifest import FileEntry
from trainer.contract.record import JsonObject, Record
from trainer.contract.resumable import with_unnamed
from trainer.contract.units import size
from trainer.data.tokenizer import TOKENIZER_FILE, load_tokenizer

DEFAULT_SHARD_BYTES = 5 * 10**9

_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


ARCHITECTURES = (BLOOM, LLAMA, BERT, T5)


def architecture_of(facts: Mapping[str, Any]) -> Architecture:
    """Which of theirs a model is written as."""
    family = facts["model.family"]
    if family == "gpt":
        if is_llama(facts):
            return LLAMA
        return BLOOM
    return {"bert": BERT, "t5": T5}[family]


class _Item(Record):
    """A tensor on its way: their full name, how it is made of ours, its shape and target dtype."""

    name: str
    made: MappedTensor
    facts: TensorFacts

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.facts)


class ExportPlan(Record):
    """An export that has been checked and can begin. `bytes`: of all tensors. `remarks`: what had
    to be assumed.
    """

    source: TensorSource
    shards: tuple[tuple[_Item, ...], ...]
    groups: int  # heads of keys and values
    config: Mapping[str, Any]
    tokenizer: TokenizerFiles | None
    remarks: tuple[str, ...]

    @property
    def items(self) -> tuple[_Item, ...]:
        return tuple(item for shard in self.shards for item in shard)

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def parameters(self) -> int:
        return sum(math.prod(item.facts.shape) for item in self.items)


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB` (10^9), `500MiB` (2^20) or `1000`. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"{text!r} is not a size; write it like 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def plan_export(
    source: TensorSource,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: TokenizerFiles | None = None,
    card_facts: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    vocabulary_size: int | None = None,
) -> ExportPlan:
    """Check that a checkpoint can be one of theirs, and deal its tensors to shards.

    `dtype`: bf16, fp32 or fp16; None keeps that of the checkpoint's weights. `max_shard_bytes`: of one file's tensors;
    a larger tensor has a file of its own. `card_facts`: the run card's facts of the model, for what the checkpoint does
    not say. `extra`: more keys of config.json. `vocabulary_size`: tokens, where no `tokenizer` says how many; rows
    behind them that are all zero are padding, and are left out.
    Raises CheckpointError naming the key or tensor that does not fit.
    """
    saved = source.facts.model
    check_model(saved, card_facts or {})
    known = with_unnamed({**(card_facts or {}), **saved})
    theirs = architecture_of(known)
    facts = {**theirs.assumed, **known}
    remarks = [
        f"{key} is not in the checkpoint: {value!r} assumed (--run CARD tells)"
        for key, value in theirs.assumed.items()
        if key not in known
    ]
    stored = source.tensors("weights")
    chosen = DTYPES[dtype or _kept_dtype(stored)]
    config = theirs.config(facts, dtype_name(chosen))
    wanted = theirs.tensors(facts)
    _check_tensors(
        theirs, {item.key: shape_of(item.key, facts) for item in wanted.values()}, stored
    )
    rows = needed_fact(facts, ROWS_KEY)
    tables = [key for key in VOCABULARY if key in stored]
    tokens = tokenizer.vocabulary_size if tokenizer is not None else vocabulary_size
    if theirs.cuts_padding and tokens is not None:
        used = max(used_rows(source, tokens, key) for key in tables)
        if used < rows:
            remarks.append(f"{rows - used} empty rows behind the vocabulary are padding: left out")
        rows = used
    _check_tokenizer(tokenizer, rows)
    items = []
    for name, item in wanted.items():
        shape = item.shape(stored[item.key].shape)
        if item.key in tables:
            shape = (rows, *shape[1:])
        items.append(_Item(name, item, TensorFacts(shape, chosen)))
    given = extra or {}
    more = {theirs.std: "initializer_range", theirs.length: "seq_length"}
    return ExportPlan(
        source,
        _shards(items, max_shard_bytes),
        facts.get("model.key_value_heads", 0),
        config={
            **config,
            "vocab_size": rows,
            **{key: given[ours] for key, ours in more.items() if key and ours in given},
            **(tokenizer.ids if tokenizer else {}),
        },
        tokenizer=tokenizer,
        remarks=(*theirs.remarks, *remarks),
    )


def _kept_dtype(stored: Mapping[str, TensorFacts]) -> str:
    """That of the weights. Raises CheckpointError for one that is not written."""
    kept = next(iter(stored.values())).dtype
    name = precision_name(kept)
    if name not in DTYPES:
        raise CheckpointError(
            f"the weights are {kept}; choose one with --dtype: {', '.join(DTYPES)}"
        )
    return name


def _check_tokenizer(tokenizer: TokenizerFiles | None, rows: int) -> None:
    if tokenizer is not None and tokenizer.vocabulary_size > rows:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocabulary_size} tokens and the model {rows} rows; "
            "give the tokenizer that the model was trained with"
        )


def write_export(
    plan: ExportPlan,
    target: Path,
    *,
    force: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[FileEntry, ...]:
    """Write the folder `target`; returns its files with sizes and SHA-256.

    `force` replaces an earlier export. `on_bytes` is told of each block of tensors written
    (`plan.bytes` in all). Raises CheckpointError when the target is taken, the disk too small, the
    checkpoint damaged or a weight not finite; then nothing is left.
    """
    check_target(target.resolve(), force, is_export)
    _check_space(target.resolve(), plan.bytes)
    with whole_folder(target, force, is_export) as folder:
        entries = []
        places = {}
        count = len(plan.shards)
        for number, shard in enumerate(plan.shards, 1):
            if count == 1:
                name = HF_SINGLE
            else:
                name = f"model-{number:05d}-of-{count:05d}.safetensors"
            entries.append(_write_shard(folder, name, shard, plan, on_bytes=on_bytes))
            places.update({item.name: name for item in shard})
        if count > 1:
            totals = {"total_parameters": plan.parameters, "total_size": plan.bytes}
            entries.append(
                _write_json(folder, HF_INDEX, {"metadata": totals, "weight_map": places})
            )
        for name, content in (plan.tokenizer.files if plan.tokenizer else {}).items():
            entries.append(_write(folder, name, content))
        entries.append(_write_json(folder, HF_CONFIG, plan.config))
    return tuple(entries)


def is_export(folder: Path) -> bool:
    """True for a folder that holds a model as `write_export` leaves it, and nothing below it."""
    try:
        config = json.loads((folder / HF_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_weights = (folder / HF_SINGLE).is_file() or (folder / HF_INDEX).is_file()
    is_ours = isinstance(config, dict) and any(
        config.get("model_type") in theirs.model_types for theirs in ARCHITECTURES
    )
    return is_ours and has_weights and not any(path.is_dir() for path in folder.iterdir())


def used_rows(source: TensorSource, tokens: int, key: str) -> int:
    """Rows of the vocabulary up to the last that belongs to one of the `tokens`, or is not all zero
    in `key`.
    """
    facts = source.tensors("weights")[key]
    begin = used = min(tokens, facts.shape[0])
    if begin == facts.shape[0]:
        return used
    behind = TensorFacts((facts.shape[0] - begin, *facts.shape[1:]), facts.dtype)
    for offsets, sizes in row_blocks(behind, BLOCK_BYTES):
        block = source.read("weights", key, (begin + offsets[0], *offsets[1:]), sizes)
        filled = block.ne(0).view(len(block), -1).any(dim=1).nonzero()
        if len(filled):
            used = begin + offsets[0] + int(filled[-1]) + 1
    return used


def _check_tensors(
    theirs: Architecture,
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, TensorFacts],
) -> None:
    odd = sorted(wanted.keys() ^ stored.keys())
    if odd:
        raise CheckpointError(
            f"the checkpoint and a {theirs.kind} of its layers differ in {odd[0]} (and {len(odd) - 1} more)"
        )
    for key, shape in wanted.items():
        if stored[key].shape != shape:
            raise CheckpointError(
                f"{key} has shape {stored[key].shape} in the checkpoint, a {theirs.kind}'s has {shape}"
            )


def _check_space(target: Path, needed: int) -> None:
    parent = next(path for path in target.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has {size(free)} free and the export needs {size(needed)}; free some, or write elsewhere"
        )


def _shards(items: list[_Item], most_bytes: int) -> tuple[tuple[_Item, ...], ...]:
    """Deal tensors to files in order, none above `most_bytes` but for a single tensor that is."""
    shards: list[list[_Item]] = []
    held = 0
    for item in items:
        if not shards or held + item.bytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += item.bytes
    return tuple(map(tuple, shards))


def _write_shard(
    folder: Path,
    name: str,
    items: tuple[_Item, ...],
    plan: ExportPlan,
    on_bytes: Callable[[int], None],
) -> FileEntry:
    """One safetensors file: the header's length (8 bytes, little-endian), a JSON header, the
    tensors end to end.
    """
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    begin = 0
    for item in items:
        header[item.name] = {
            "dtype": _SAFETENSORS_NAMES[item.facts.dtype],
            "shape": [*[1] * item.made.leading, *item.facts.shape],
            "data_offsets": [begin, begin + item.bytes],
        }
        begin += item.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with digesting(folder / name) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            key = item.made.key
            for offsets, sizes in item.made.blocks(item.facts, plan.groups):
                block = read_finite(plan.source, "weights", key, offsets=offsets, sizes=sizes)
                narrow = convert(key, block, item.facts.dtype).contiguous()
                stream.write(narrow.flatten().view(torch.uint8).numpy().data)
                on_bytes(narrow.numel() * narrow.element_size())
    return stream.entry(name)


def convert(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype. Raises CheckpointError when a number is too large for it."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and converted.isinf().sum() != tensor.isinf().sum():
        raise CheckpointError(f"{key} holds numbers too large for fp16; choose bf16 or fp32")
    return converted


def _write_json(folder: Path, name: str, value: Mapping[str, Any]) -> FileEntry:
    return _write(
        folder, name, (json.dumps(value, indent=2, sort_keys=name == HF_CONFIG) + "\n").encode()
    )


def _write(folder: Path, name: str, content: bytes) -> FileEntry:
    with digesting(folder / name) as stream:
        stream.write(content)
    return stream.entry(name)


_COMPANIONS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_ROLES = ("bos", "eos", "pad")


class TokenizerFiles(Record):
    """`files`: name -> content. `ids`: `bos_token_id`, `eos_token_id`, `pad_token_id` as far as
    they are known.
    """

    files: dict[str, bytes]
    ids: dict[str, int]
    vocabulary_size: int


def tokenizer_files(path: Path) -> TokenizerFiles:
    """What a Hugging Face folder needs of the tokenizer in a folder with tokenizer.json (or in that
    file).

    A tokenizer_config.json is made where there is none. Raises CheckpointError when it is not a
    tokenizer.
    """
    try:
        tokenizer = load_tokenizer(path)
    except DataError as error:
        raise CheckpointError(f"tokenizer: {error}") from None
    home = tokenizer.path.parent
    files = {TOKENIZER_FILE: tokenizer.path.read_bytes()}
    files |= {name: (home / name).read_bytes() for name in _COMPANIONS if (home / name).is_file()}
    config: JsonObject = {}
    if (home / CONFIG_FILE).is_file():
        try:
            config = json.loads((home / CONFIG_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{home / CONFIG_FILE} is not JSON ({error}); repair it"
            ) from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_token,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    files[CONFIG_FILE] = (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode()
    engine = Engine.from_file(str(tokenizer.path))
    ids = {f"{role}_token_id": _id(engine, config.get(f"{role}_token")) for role in _ROLES}
    known = {key: number for key, number in ids.items() if number is not None}
    return TokenizerFiles(files, known, tokenizer.vocabulary_size)


def _id(engine: Engine, token: Any) -> int | None:
    """The id of a special token, which a config spells as text or as an object with `content`."""
    if isinstance(token, dict):
        text = token.get("content")
    else:
        text = token
    if isinstance(text, str):
        return engine.token_to_id(text)
    return None
