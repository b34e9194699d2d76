"""Small real data for the tests of the data rooms, and slow, independent walks to compare with."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.exceptions import TyperException

from tests.trainer.child_requests import request_of
from trainer.data.__main__ import main
from trainer.data.indexed_write import IndexedWriter

ROOT = Path(__file__).parents[3]
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 60 words, each beginning with its number, so that order can be seen."""
    random = np.random.RandomState(seed)
    return [f"{n}: " + " ".join(random.choice(WORDS, random.randint(1, 60))) for n in range(count)]


def write_lines(path: Path, items: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in items), encoding="utf-8")
    return path


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_sequences(
                np.array(document, dtype=dtype), np.array([len(document)], dtype=np.int32)
            )
    return prefix


def numbered_documents(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Documents of random lengths whose tokens, put in order, count up from 0: every token says
    where it is from.
    """
    lengths = np.random.RandomState(seed).randint(1, longest + 1, count)
    ends = np.cumsum(lengths)
    return [
        list(range(end - length, end))
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]


def run_data(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`tr11 data WORDS`, the work of its child in this process: another Python would load for a
    second or two.
    """
    said, heard = io.StringIO(), io.StringIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(heard),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        try:
            code = main([request_of("data", words)])
        except TyperException as error:
            code = 2
            print(f"tr11 data: {error.format_message()}", file=sys.stderr)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(list(words), code, said.getvalue(), heard.getvalue())


def run_data_process(*words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`tr11 data WORDS`, the work of its child in a Python of its own."""
    return subprocess.run(
        [sys.executable, "-m", "trainer.data", request_of("data", words)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def slow_sample_index(
    sizes: Sequence[int], order: Sequence[int], length: int
) -> list[tuple[int, int]]:
    """The walk from sample to sample, one document at a time, as the definition has it."""
    rows = [(0, 0)]
    position, offset = 0, 0
    for _ in range((sum(sizes[document] for document in order) - 1) // length):
        needed = length + 1
        while needed:
            here = sizes[order[position]] - offset
            if needed <= here:
                offset += needed - 1
                needed = 0
            else:
                needed -= here
                position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


def slow_maps(
    sizes: Sequence[int], documents: range, *, samples: int, length: int, seed: int, share: float
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """All three maps by loops alone."""
    per_epoch = sum(sizes[document] for document in documents)
    epochs, tokens = 1, per_epoch
    while (tokens - 1) // length < samples:
        epochs, tokens = epochs + 1, tokens + per_epoch
    before = ((epochs - 1) * per_epoch - 1) // length
    apart = epochs > 1 and samples - before < int(share * ((per_epoch - 1) // length))
    random = np.random.RandomState(seed)
    order: list[int] = []
    for part in (epochs - 1, 1) if apart else (epochs,):
        drawn = np.array(list(documents) * part)
        random.shuffle(drawn)
        order += drawn.tolist()
    rows = slow_sample_index(sizes, order, length)
    shuffle: list[int] = []
    total = len(rows) - 1
    for first, end in ((0, before), (before, total)) if apart else ((0, total),):
        drawn = np.arange(first, end)
        random.shuffle(drawn)
        shuffle += drawn.tolist()
    return order, rows, shuffle
