"""Small real inputs for launches: indexed datasets, tokenizers, checkpoints and cards, written byte
by byte.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import write_atomically
from trainer.contract.manifest import FileEntry, Manifest, file_digest


def write_dataset(
    prefix: Path, lengths: tuple[int, ...] = (500, 700, 300), code: int = 8, item: int = 2
) -> None:
    """An indexed dataset of one document per sequence, in the format of the original."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    offsets = [sum(lengths[:index]) * item for index in range(len(lengths))]
    documents = list(range(len(lengths) + 1))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    Path(f"{prefix}.idx").write_bytes(head + body + struct.pack(f"<{len(documents)}q", *documents))
    Path(f"{prefix}.bin").write_bytes(bytes(sum(lengths) * item))


def write_tokenizer(folder: Path, size: int = 100) -> None:
    """A tokenizer file with `size` words, the last of which ends a document."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"w{number}": number for number in range(size - 1)} | {"</s>": size - 1}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []})
    )


def write_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Any] | None = None,
    latest: bool = True,
    size: int = 64,
) -> Path:
    """A complete checkpoint of one file of `size` bytes and the small ones that a resume needs, as
    its manifest sees it.
    """
    place = folder / checkpoint_name(step)
    (place / "weights").mkdir(parents=True)
    data = place / "weights" / "part.bin"
    data.write_bytes(os.urandom(size))
    entries = [FileEntry("weights/part.bin", size, file_digest(data))]
    (place / "optimizer").mkdir()
    (place / "optimizer/part.bin").touch()
    counters = {"iteration": step, "consumed_samples": step, "consumed_tokens": step * 16}
    (place / "cursor.json").write_text(json.dumps(counters))
    for name in ("optimizer/part.bin", "cursor.json"):
        entries.append(FileEntry(name, (place / name).stat().st_size, file_digest(place / name)))
    facts = {"model.layers": 2, "model.hidden_size": 32} if model is None else model
    topology = {"tensor": 1, "pipeline": 1, "data": 1}
    Manifest(step, step, step * 16, tuple(entries), topology, facts, "hash", 1.0).write(place)
    if latest:
        write_atomically(folder / "latest", checkpoint_name(step))
    return place


CARD = """\
[run]
name = "{name}"
directory = "{directory}"
exit_duration_minutes = 1

[slurm]
nodes = 2
workers_per_node = 1
time_limit = "00:10:00"
signal_seconds_before_limit = 60

[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 16

[batch]
micro_batch_size = 2
global_batch_size = 8
train_samples = 64

[schedule]
learning_rate = 1e-3

[checkpoint]
interval = 10

[data]
prefixes = ["{data}/corpus"]

[tokenizer]
path = "{data}/tokenizer"
padded_vocabulary_size = 128
"""


def write_card(
    folder: Path, name: str = "small", directory: Path | None = None, extra: str = ""
) -> Path:
    """A valid card with whole inputs below `folder`; returns its path."""
    data = folder / "data"
    write_dataset(data / "corpus")
    write_tokenizer(data / "tokenizer")
    path = folder / f"{name}.toml"
    path.write_text(
        CARD.format(name=name, directory=directory or folder / "run", data=data) + extra
    )
    return path
