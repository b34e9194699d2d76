"""Sample maps and samples of BERT and T5, beside megatron-core's: its compiled map builder and its
sample classes.

    python benchmarks/masked_data.py [--sentences 50_000_000] [--samples 400]

The two take turns; processor seconds of this process, the median of the repeats. What they make is
compared: maps row for row, samples field by field.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.data_path import in_turn, say
from tests.trainer.data.masked.cases import made_sentences, vocabulary
from tests.trainer.data.masked.peer import sample_classes, their_map, their_samples
from trainer.data.masked.rules import T5_LONGEST, BertRules, Sample, T5Rules, bert_sample, t5_sample
from trainer.data.masked.sample_map import MapRules, build_sample_map

# the decoder has room for all spans, where theirs would stop otherwise
LENGTH, DECODER, SEED = (512, 256, 1234)


def measure_maps(sentences: int) -> None:
    """Documents of 20 sentences of 25 tokens on average."""
    random = np.random.RandomState(0)
    documents = np.cumsum([0, *random.geometric(1 / 20, sentences // 20)], dtype=np.int64)
    sizes = np.clip(random.gamma(2, 12.5, documents[-1]), 1, 500).astype(np.int32)
    for length in (512, 128):
        rules = MapRules(length - 3, 0.1, 2, SEED)
        ours = partial(build_sample_map, sizes, documents, samples=1, rules=rules)
        theirs = partial(their_map, sizes, documents, 1, rules)
        seconds, line, mine, found = in_turn(ours, theirs, repeats=3)
        name = f"sample map, {len(sizes) / 1e6:.0f} M sentences, {length} tokens"
        say(name, f"{seconds:.2f} s, {len(mine):,}", f"{line}; equal {np.array_equal(mine, found)}")


def measure_samples(count: int) -> None:
    """Samples of 512 tokens."""
    sentences, words = made_sentences(count * 25, 40, 1), vocabulary(100)
    rows = np.stack(
        [np.arange(count) * 25, np.arange(count) * 25 + 25, np.full(count, LENGTH - 3)], axis=1
    )
    bert_rules, t5_rules = BertRules(LENGTH, 0.15, True), T5Rules(LENGTH, DECODER, 0.15)
    common: dict[str, Any] = {"sequence_length": LENGTH, "masking_probability": 0.15}
    bert, t5 = sample_classes()
    kinds: dict[str, tuple[Callable[..., Sample], Any, Any]] = {
        "BERT": (bert_sample, bert_rules, their_samples(
            bert, sentences, rows, words, SEED, masking_max_ngram=3, masking_use_geometric_distribution=False,
            classification_head=True, **common)),
        "T5": (t5_sample, t5_rules, their_samples(
            t5, sentences, rows, words, SEED, masking_max_ngram=T5_LONGEST, masking_use_geometric_distribution=True,
            sequence_length_encoder=LENGTH, sequence_length_decoder=DECODER, **common)),
    }  # fmt: skip
    for name, (make, rules, peer) in kinds.items():

        def ours(make: Any = make, rules: Any = rules) -> list[Sample]:
            return [
                make(
                    sentences[first:end],
                    target,
                    rules,
                    words,
                    np.random.RandomState((SEED + number) % 2**32),
                )
                for number, (first, end, target) in enumerate(rows.tolist())
            ]

        seconds, line, mine, theirs = in_turn(
            ours, lambda peer=peer: [peer[number] for number in range(count)]
        )
        # theirs hides a drawn [PAD]
        fields = [field for field in mine[0] if field != "padding_mask"]
        same = all(
            np.array_equal(a[field], b[field])
            for a, b in zip(mine, theirs, strict=True)
            for field in fields
        )
        say(
            f"{count} samples of {name}, {LENGTH} tokens",
            f"{seconds / count * 1e3:.2f} ms each",
            f"{line}; equal {same}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=50_000_000)
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    measure_samples(options.samples)
    measure_maps(options.sentences)


if __name__ == "__main__":
    main()
