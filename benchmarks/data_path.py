"""The way of the data, measured: corpus, tokenizer, preprocessing, index maps, mixtures,
micro-batches.

    python benchmarks/data_path.py [--min-bytes N] [--documents N] [--folder DIR]

Prints one figure a line. Where `megatron.core` can be imported (`pip install --no-deps
megatron-core==0.16.1` in a virtual environment of its own), the same work is given to it, the ratio
is printed, and the index maps of many random corpora are compared bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.data.blend import build_blend, normalised
from trainer.data.check import check_pairs
from trainer.data.corpus import build_corpus
from trainer.data.dataset import SampleSource, read_rows
from trainer.data.encode import PreprocessRequest
from trainer.data.groups import split_groups
from trainer.data.index import build_index_maps, build_sample_index
from trainer.data.indexed_write import IndexedWriter
from trainer.data.learn_tokenizer import train_tokenizer
from trainer.data.sources import ReadOptions, plan_groups
from trainer.data.stream import SampleReader, SampleStream
from trainer.data.tokenize import preprocess
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.data.workers import WorkerPool

MEGATRON_SHARE = 0.80  # its rule for the last epoch; everything else is the same


def say(name: str, value: str, peer: str = "") -> None:
    sys.stdout.write(f"{name:<52} {value:>22} {peer}\n")
    sys.stdout.flush()


def timed(
    work: Callable[[], Any], repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    """Least seconds of some repeats, and what the work returned."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = clock()
        result = work()
        best = min(best, clock() - started)
    return best, result


def cpu_timed(work: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """As `timed`, in seconds of this process's own work: for what one thread does, whatever else
    the machine does.
    """
    return timed(work, repeats, time.process_time)


def in_turn(
    ours: Callable[[], Any], theirs: Callable[[], Any] | None, repeats: int = 5
) -> tuple[float, str, Any, Any]:
    """Median seconds of this process's own work in `ours`, words on `theirs` and the median ratio,
    both last results.

    The two take turns, so that what else the machine does falls on both.
    """
    costs: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    for _ in range(repeats):
        for side, work in enumerate((ours, theirs)):
            if work is not None:
                seconds, results[side] = cpu_timed(work, repeats=1)
                costs[side].append(seconds)
    line = ""
    if theirs is not None:
        ratio = statistics.median(b / a for a, b in zip(*costs, strict=True))
        line = f"megatron-core {statistics.median(costs[1]):.3f}; ratio {ratio:.2f}"
    return statistics.median(costs[0]), line, results[0], results[1]


def megatron() -> types.SimpleNamespace | None:
    """The peer's parts, or None when it is not installed here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return types.SimpleNamespace(
                gpt=importlib.import_module("megatron.core.datasets.gpt_dataset"),
                helpers=importlib.import_module("megatron.core.datasets.helpers"),
                compiled=importlib.import_module("megatron.core.datasets.helpers_cpp"),
                indexed=importlib.import_module("megatron.core.datasets.indexed_dataset"),
            )
    except ImportError:
        return None


def megatron_maps(
    peer: types.SimpleNamespace,
    sizes: np.ndarray,
    documents: range,
    *,
    samples: int,
    length: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three maps, by the peer's own functions in the order in which its GPTDataset calls them."""
    tokens = int(sizes[documents.start : documents.stop].sum())
    config = types.SimpleNamespace(sequence_length=length, add_extra_token_to_sequence=1)
    asked = types.SimpleNamespace(num_samples=samples, config=config)
    epochs = peer.gpt.GPTDataset._get_num_epochs(asked, tokens)
    before = ((epochs - 1) * tokens - 1) // length
    apart = epochs > 1 and samples - before < int(MEGATRON_SHARE * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
    order = peer.gpt._build_document_index(numbers, epochs, random, apart)
    rows = peer.helpers.build_sample_idx(sizes, order, length, epochs, tokens, True, True)
    total = rows.shape[0] - 1
    return order, rows, peer.gpt._build_shuffle_index(before if apart else total, total, random)


_texts_of: list[Tokenizer] = []  # one in each process of the pool below


def _load(path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _texts_of.append(load_tokenizer(path))


def _encode(line: str) -> list[int]:
    return [*_texts_of[0].encode_batch([json.loads(line)["text"]])[0], _texts_of[0].eod_id]


def megatron_way(
    peer: types.SimpleNamespace, corpus: Path, tokenizer: Path, prefix: str, workers: int
) -> None:
    """What its preprocessing script does: lines through a pool in chunks of 25, one text at a time,
    its own builder.
    """
    import torch

    context = multiprocessing.get_context("spawn")
    builder = peer.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with (
        context.Pool(workers, _load, (str(tokenizer),)) as pool,
        corpus.open(encoding="utf-8") as lines,
    ):
        for ids in pool.imap(_encode, lines, 25):
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def measure_text(folder: Path, min_bytes: int, peer: types.SimpleNamespace | None) -> Path:
    """Corpus, tokenizer, preprocessing; returns the prefix of the pair."""
    corpus = folder / "corpus.jsonl"
    seconds, report = timed(lambda: build_corpus(corpus, min_bytes, force=True), repeats=1)
    say("corpus, MB of text", f"{report.text_bytes / 1e6:.1f}")
    say("corpus, MB/s", f"{report.text_bytes / 1e6 / seconds:.1f}")

    def texts() -> Iterator[str]:
        with corpus.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield json.loads(line)["text"]

    seconds, _ = timed(lambda: train_tokenizer(texts(), 4096, folder / "tokenizer"), repeats=1)
    say("tokenizer of 4,096 tokens, s", f"{seconds:.2f}")
    for workers in sorted({1, 2, os.cpu_count() or 1}):
        request = PreprocessRequest(
            corpus, folder / "tokenizer", str(folder / "bench"), workers=workers
        )
        theirs = str(folder / "megatron")
        seconds = peer_seconds = float("inf")
        for _ in range(3):  # in turn, so that both meet the same machine
            once, report = timed(lambda asked=request: preprocess(asked, force=True), repeats=1)
            seconds = min(seconds, once)
            if peer is not None:
                work = functools.partial(
                    megatron_way, peer, corpus, folder / "tokenizer", theirs, workers
                )
                peer_seconds = min(peer_seconds, timed(work, repeats=1)[0])
        line = ""
        if peer is not None:
            same = Path(f"{theirs}.bin").read_bytes() == Path(f"{request.prefix}.bin").read_bytes()
            rate = report.tokens / peer_seconds
            line = f"Megatron's way {rate:,.0f}; ratio {peer_seconds / seconds:.2f}; files equal {same}"
        say(f"preprocess, {workers} workers, tokens/s", f"{report.tokens / seconds:,.0f}", line)
    return Path(request.prefix)


def measure_writing(folder: Path, peer: types.SimpleNamespace | None) -> None:
    """Documents of 2,048 uint16 tokens into a pair, without tokenizing."""
    document = np.arange(2048, dtype=np.uint16)
    count = 4000

    def ours() -> None:
        with IndexedWriter(folder / "written", "uint16") as writer:
            for _ in range(count):
                writer.add_sequences(document, np.array([2048], dtype=np.int32))

    def theirs() -> None:
        import torch

        builder = peer.indexed.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.uint16)
        tensor = torch.from_numpy(document.astype(np.int64))
        for _ in range(count):
            builder.add_document(tensor, [2048])
        builder.finalize(str(folder / "theirs.idx"))

    seconds, _ = timed(ours)
    line = ""
    if peer is not None:
        peer_seconds, _ = timed(theirs)
        same = all(
            (folder / f"written.{end}").read_bytes() == (folder / f"theirs.{end}").read_bytes()
            for end in ("bin", "idx")
        )
        rate = count * 2048 / peer_seconds / 1e6
        line = f"megatron-core {rate:,.1f}; ratio {peer_seconds / seconds:.2f}; files equal {same}"
    say("write a pair, flushed to disk, M tokens/s", f"{count * 2048 / seconds / 1e6:,.1f}", line)


def measure_maps(documents: int, peer: types.SimpleNamespace | None) -> None:
    """All maps, and the sample index alone, for many documents of about 800 tokens over two epochs."""
    sizes = np.random.RandomState(1).randint(1, 1600, documents).astype(np.int32)
    order = np.random.RandomState(2).permutation(np.tile(np.arange(documents, dtype=np.int32), 2))
    tokens = int(sizes.sum())
    samples = (2 * tokens - 1) // 2048
    seconds, line, rows, theirs = in_turn(
        lambda: build_sample_index(sizes, order, 2048),
        peer and (lambda: peer.helpers.build_sample_idx(sizes, order, 2048, 2, tokens, True, True)),
    )
    if peer is not None:
        line += f"; bit-equal {rows.dtype == theirs.dtype and np.array_equal(rows, theirs)}"
    say(f"sample index, {2 * documents:,} documents, CPU s", f"{seconds:.3f}", line)
    asked = {"samples": samples, "seed": 1}
    seconds, line, maps, theirs = in_turn(
        lambda: build_index_maps(
            sizes, range(documents), sequence_length=2048, last_epoch_share=MEGATRON_SHARE, **asked
        ),
        peer and (lambda: megatron_maps(peer, sizes, range(documents), length=2048, **asked)),
    )
    if peer is not None:
        equal = all(
            np.array_equal(*pair)
            for pair in zip((maps.documents, maps.samples, maps.shuffle), theirs, strict=True)
        )
        line += f"; equal {equal}"
    say(f"all three maps, {samples:,} samples, CPU s", f"{seconds:.3f}", line)


def compare_maps(peer: types.SimpleNamespace, cases: int = 400) -> None:
    """Random corpora, some with empty documents: are all three maps equal in type, shape and every
    value?
    """
    random = np.random.RandomState(99)
    different = compared = 0
    while compared < cases:
        count = random.randint(1, 200)
        sizes = random.randint(compared % 3 != 0, random.choice([3, 30, 300]), count).astype(
            np.int32
        )
        first = random.randint(0, count)
        documents = range(first, random.randint(first, count) + 1)
        length, samples = int(random.choice([1, 2, 4, 7, 16, 64])), int(random.randint(1, 3000))
        seed = int(random.randint(0, 2**31))
        if sizes[documents.start : documents.stop].sum() < length + 1:
            continue
        compared += 1
        theirs = megatron_maps(peer, sizes, documents, samples=samples, length=length, seed=seed)
        ours = build_index_maps(
            sizes,
            documents,
            samples=samples,
            sequence_length=length,
            seed=seed,
            last_epoch_share=MEGATRON_SHARE,
        )
        pairs = zip((ours.documents, ours.samples, ours.shuffle), theirs, strict=True)
        different += not all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    say(f"random corpora compared with megatron-core: {compared}", f"different: {different}")


def measure_blends(samples: int, peer: types.SimpleNamespace | None) -> None:
    """Mixtures of few, as many as the 176B run's, and very uneven sets."""
    random = np.random.RandomState(3)
    for name, weights in (
        ("3 sets", [0.5, 0.3, 0.2]),
        ("8 sets", (random.pareto(1.0, 8) + 0.01).tolist()),
        ("28 sets", (random.pareto(1.0, 28) + 0.01).tolist()),
        ("28 sets, rare ones 1e-6", [*[1e-6] * 4, *(random.pareto(1.0, 24) + 0.1).tolist()]),
        ("100 sets", (random.pareto(1.0, 100) + 0.01).tolist()),
    ):
        shares = np.array(normalised(weights))
        shares /= np.sum(shares)

        def theirs(shares: np.ndarray = shares) -> tuple[np.ndarray, np.ndarray]:
            out = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
            peer.compiled.build_blending_indices(*out, shares, len(shares), samples, False)
            return out

        seconds, line, ours, found = in_turn(
            lambda given=weights: build_blend(given, samples), None if peer is None else theirs
        )
        if peer is not None:
            line += (
                f"; equal {all(np.array_equal(*pair) for pair in zip(ours, found, strict=True))}"
            )
        say(f"mixture of {samples:,}, {name}, CPU s", f"{seconds:.2f}", line)


class ThreadReader:
    """Reads ahead in one thread of this process: the way that is compared with worker processes,
    and not taken.
    """

    depth = 8

    def __init__(self, source: SampleSource) -> None:
        self._source, self.row = source, source.row
        self._pool = ThreadPoolExecutor(1)
        self._asked: dict[int, Future[np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def ask(self, numbers: np.ndarray) -> int:
        ticket = int(numbers[0])
        self._asked[ticket] = self._pool.submit(read_rows, self._source, numbers)
        return ticket

    def take(self, ticket: int) -> np.ndarray:
        return self._asked.pop(ticket).result()

    def drop(self, ticket: int) -> None:
        self._asked.pop(ticket)


def measure_stream(prefix: Path, folder: Path) -> None:
    """Micro-batches of 2 samples of 2,048 tokens: all at once, and as a training draws them, with
    work between.
    """
    import torch

    samples = 8000
    plan = plan_groups(
        split_groups([(1.0, prefix)], "1", {"train": samples}),
        ReadOptions(2048, 1, cache_folder=folder / "maps"),
    )["train"]
    source = plan.open()
    weights = torch.ones(512, 512)
    torch.set_num_threads(1)

    def step() -> None:
        torch.mm(weights, weights, out=out)

    out = torch.empty_like(weights)
    reference = [tokens.clone() for tokens, _ in SampleStream(source, 2)]
    for name, workers in (
        ("in the training's process", 0),
        ("1 thread", -1),
        ("1 worker", 1),
        ("2 workers", 2),
    ):
        with contextlib.ExitStack() as stack:
            reader: SampleReader | SampleSource = source
            if workers < 0:
                reader = ThreadReader(source)
                stack.callback(reader._pool.shutdown)
            elif workers:
                pool = stack.enter_context(contextlib.closing(WorkerPool({"train": plan}, workers)))
                reader = pool.reader("train")
            stream = SampleStream(reader, 2)
            next(stream)  # workers are up
            seconds, equal = timed(
                lambda stream=stream: all(
                    torch.equal(tokens, wanted)
                    for (tokens, _), wanted in zip(stream, reference[1:], strict=True)
                ),
                repeats=1,
            )
            stream.skip_to(0)
            next(stream)
            waits = []
            for _ in range(800):
                step()
                began = time.perf_counter()
                next(stream)
                waits.append(time.perf_counter() - began)
        stalls = f"{1e6 * float(np.median(waits)):,.0f} us a micro-batch, mean {1e6 * float(np.mean(waits)):,.0f}"
        say(
            f"samples of 2,048/s, {name}",
            f"{samples / seconds:,.0f}",
            f"training waits {stalls}; equal {equal}",
        )


def measure_check(folder: Path, documents: int = 30_000) -> None:
    """Checking documents of about 1,000 random tokens, digests of all of them included."""
    random = np.random.RandomState(5)
    lengths = random.randint(1, 2000, documents).astype(np.int32)
    with IndexedWriter(folder / "checked", "uint16") as writer:
        writer.add_sequences(
            random.randint(0, 60_000, int(lengths.sum())).astype(np.uint16), lengths
        )
    for workers in (1, 2):
        seconds, report = timed(
            lambda asked=workers: check_pairs([str(folder / "checked")], workers=asked), repeats=2
        )
        rate = report.symbols / seconds / 1e6
        say(
            f"check, {workers} workers, M tokens/s",
            f"{rate:.1f}",
            f"findings: {sum(report.counts.values())}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--min-bytes", type=int, default=20_000_000)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--blend-samples", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    peer = megatron()
    say(
        "machine",
        f"{os.cpu_count()} cores",
        f"Python {platform.python_version()}, numpy {np.__version__}",
    )
    say("megatron-core", "found" if peer else "not installed here")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        prefix = measure_text(folder, options.min_bytes, peer)
        measure_writing(folder, peer)
        measure_stream(prefix, folder)
        measure_check(folder)
    measure_maps(options.documents, peer)
    measure_blends(options.blend_samples, peer)
    if peer is not None:
        compare_maps(peer)


if __name__ == "__main__":
    main()
