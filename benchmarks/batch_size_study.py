"""A batch-size study on real text: a BERT of 4 layers, batches at equal samples, several
optimizers, by `tr11 sweep`.

    python benchmarks/batch_size_study.py FOLDER [--samples 12288] [--batches 64,256,1024,4096] [--studies long,lamb]

The text is what every Python installation carries, split in sentences; a vocabulary of 2,048 pieces
is learnt from it. AdamW is tried with two rates at every batch; each LAMB has a rate at the
smallest batch, and the square-root rule gives the others. `long` is one longer run of AdamW at the
smallest batch. The loss is that of the masked words alone: no head looks at the order of sentences.
Prints the unigram floor (the loss of who knows how often each piece is masked, and no more) and the
tables of `tr11 sweep compare`; leaves FOLDER/STUDY.html. What was begun in FOLDER is gone on with.
`batch_size_plot.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer.config.card import load_trainer_config
from trainer.data.samples import plan_data, wanted_data

TR11 = Path(sys.executable).parent / "tr11"
WORDS, LENGTH = 2048, 16
BATCH, RATE = "batch.global_batch_size", "schedule.learning_rate"
LAMB = 'type = "lamb"\nlamb_variant = "{}"'
# name: what [optimizer] holds, the rates at the smallest batch, the rule for the others
STUDIES = {
    "adamw": ('type = "adamw"', ("1e-3", "4e-3"), "none"),
    "lamb": (LAMB.format("floored"), ("1e-2",), "sqrt"),
    "lamb-layer-noise": (LAMB.format("layer-noise"), ("1e-2",), "sqrt"),
    "lamb-embedding-lr": (LAMB.format("embedding-lr"), ("1e-2",), "sqrt"),
}
LONG, LONG_RATE = "long", "1.5e-3"  # the one run that is to get past the plateau: AdamW
MASKED, LONG_MASKED = 0.16, 0.15  # two of 13 tokens, and one
VALID = 4096  # samples of one evaluation
CARD = """
[run]
name = "bert-study"
directory = "run"
seed = 43

[slurm]
nodes = 1
workers_per_node = 1
cpus_per_task = 1
time_limit = "10:00:00"
signal_seconds_before_limit = 120

[slurm.environment]
OMP_NUM_THREADS = "1"

[model]
family = "bert"
layers = 4
hidden_size = 128
attention_heads = 4
sequence_length = {length}
position_embedding = "absolute"
init_std = 0.08
attention_dropout = 0.0
hidden_dropout = 0.0

[batch]
micro_batch_size = {micro}
global_batch_size = {batch}
train_samples = {samples}

[optimizer]
{optimizer}
epsilon = 1e-6
beta2 = 0.98
weight_decay = 0.01

[schedule]
learning_rate = {rate}
min_learning_rate = 1e-5
decay_style = "linear"
warmup_fraction = 0.02

[precision]
dtype = "fp32"

[checkpoint]
interval_minutes = 30

[evaluation]
interval = {interval}
iterations = {valid}

[data]
prefixes = ["data/corpus_text_sentence"]
split = "949,50,1"
workers = 0
binary_head = false
mask_probability = {masked}

[tokenizer]
type = "bert_wordpiece_lower"
vocabulary_file = "data/vocabulary/vocab.txt"
padded_vocabulary_size = {rows}

[logging]
tensorboard = false
"""


def prepare(data: Path, megabytes: int) -> None:
    """Corpus, vocabulary and sentence data, as far as they are not there."""
    data.mkdir(parents=True, exist_ok=True)
    corpus, vocabulary = data / "corpus.jsonl", data / "vocabulary"
    kind = ("--tokenizer-type", "bert_wordpiece_lower")
    tr11("data", "corpus", "--output", str(corpus), "--min-bytes", str(megabytes * 10**6))
    tr11(
        "data",
        "tokenizer",
        "--corpus",
        str(corpus),
        *kind,
        "--vocab-size",
        str(WORDS),
        "--output",
        str(vocabulary),
    )
    tr11(
        "data", "preprocess", "--input", str(corpus), *kind, "--vocab-file", str(vocabulary / "vocab.txt"),
        "--split-sentences", "--no-append-eod", "--output-prefix", str(data / "corpus"),
    )  # fmt: skip


def masked_floor(study: Path) -> float:
    """The loss on the validation samples' masked words of who knows how often each is masked in
    training, in nats.
    """
    card = next(
        path
        for cell in sorted(study.iterdir())
        for path in sorted(cell.glob("state/attempts/*/card.json"))
    )
    config = load_trainer_config(card)
    counts = {}
    for role, most in (("train", 60_000), ("valid", VALID)):
        samples = plan_data(config, wanted_data(config))[role].open()
        counts[role] = np.zeros(config.tokenizer.padded_vocabulary_size)
        for number in range(min(most, len(samples))):
            fields = samples.fields(number)
            counts[role] += np.bincount(
                fields["labels"][fields["loss_mask"] > 0], minlength=len(counts[role])
            )
    known = np.log((counts["train"] + 1) / (counts["train"] + 1).sum())
    return float(-(counts["valid"] * known).sum() / counts["valid"].sum())


def tr11(*words: str, folder: Path | None = None) -> str:
    """Type a command; what it printed. Raises CalledProcessError."""
    return subprocess.run(
        [str(TR11), *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def study(folder: Path, name: str, batches: list[int], samples: int, at_once: int) -> None:
    """Run one optimizer's sweep, or the long run, to its end, and print how its cells compare."""
    optimizer, rates, rule = STUDIES["adamw"] if name == LONG else STUDIES[name]
    rates = (LONG_RATE,) if name == LONG else rates
    card, place = folder / f"{name}.toml", folder / name
    smallest = batches[0]
    steps = samples // smallest
    interval = max(1, steps // 16) if name == LONG else steps
    shape = {
        "batch": smallest,
        "micro": min(smallest, 64),
        "samples": samples,
        "length": LENGTH,
        "rows": WORDS + 128,
    }
    shape["masked"] = LONG_MASKED if name == LONG else MASKED
    card.write_text(
        CARD.format(
            optimizer=optimizer, rate=rates[0], interval=interval, valid=VALID // smallest, **shape
        )
    )
    if (place / "sweep.json").exists():
        tr11("sweep", "resume", str(place), "--scheduler", "local")
    else:
        grids = ["--grid", f"{BATCH}={','.join(map(str, batches))}"]
        grids = ["--grid", f"{RATE}={','.join(rates)}", *grids] if len(rates) > 1 else grids
        words = (
            "--run",
            str(card),
            *grids,
            "--rule",
            rule,
            "--equal-samples",
            "--directory",
            str(place),
        )
        tr11("sweep", *words, "--scheduler", "local", "--at-once", str(at_once), folder=folder)
    while any(cell["state"] in {"running", "queued"} for cell in states(place)):
        time.sleep(10)
    print(f"\n{name}: unigram floor of the masked words {masked_floor(place):.3f} nats", flush=True)
    print(
        f"{tr11('sweep', 'compare', str(place), '--output', str(folder / f'{name}.html'))}",
        flush=True,
    )


def states(place: Path) -> list[dict[str, object]]:
    done = subprocess.run(
        [str(TR11), "sweep", "status", str(place), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found: list[dict[str, object]] = json.loads(done.stdout)["cells"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=12_288, help="of every cell")
    parser.add_argument("--long-samples", type=int, default=96_000, help="of the long run")
    parser.add_argument("--batches", default="64,256,1024,4096")
    parser.add_argument("--studies", default=",".join((LONG, *STUDIES)))
    parser.add_argument("--megabytes", type=int, default=12, help="of text")
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    folder = options.folder.absolute()
    os.environ["TR11_LOCAL_SCHEDULER"] = str(folder / "scheduler")
    prepare(folder / "data", options.megabytes)
    for name in options.studies.split(","):
        if name == LONG:
            study(folder, name, [int(options.batches.split(",")[0])], options.long_samples, 1)
        else:
            study(
                folder,
                name,
                list(map(int, options.batches.split(","))),
                options.samples,
                options.at_once,
            )


if __name__ == "__main__":
    main()
