"""What the end-to-end tests share: a tiny corpus prepared by `tr11 data`, a card, and the reading
of a run's files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.twin.rehearsal_inputs import steps_of
from tests.waiting import end_of_file, until
from trainer.contract.attempt import EndMarker
from trainer.contract.manifest import Manifest
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

TR11 = Path(sys.executable).parent / "tr11"

CARD = """
[run]
name = "small"
directory = "run"
seed = 7

[slurm]
nodes = {nodes}
workers_per_node = {workers}
time_limit = "00:20:00"
signal_seconds_before_limit = 45
output = "%x-%A_%a.out"

[parallel]
tensor = {tensor}
pipeline = 2

[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 32
embedding_layernorm = true
attention_dropout = 0.0
hidden_dropout = 0.0
activation_checkpointing = true

[batch]
micro_batch_size = 2
global_batch_size = 16
train_samples = 100_000
ramp = {{ start = 8, increment = 8, samples = 48 }}

[schedule]
learning_rate = 1e-2
warmup_samples = 32

[precision]
dtype = "{dtype}"

[checkpoint]
interval = 5

[evaluation]
interval = 5
iterations = 1

[data]
prefixes = ["data/corpus_text_document"]
workers = 0

[tokenizer]
path = "data/tokenizer"
padded_vocabulary_size = 512
"""


class Playground(Record):
    """A folder with data and a card, in which `tr11` is typed."""

    folder: Path
    environment: Mapping[str, str]

    def card(
        self, name: str, nodes: int, workers: int, dtype: str = "fp32", tensor: int = 2
    ) -> str:
        (self.folder / name).write_text(
            CARD.format(nodes=nodes, workers=workers, dtype=dtype, tensor=tensor)
        )
        return name

    def tr11(
        self, *arguments: str, expect: int | None = 0, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Type a command; `expect` is the exit status it must have (None: any). No traceback may
        ever be shown.
        """
        done = subprocess.run(
            [str(TR11), *arguments], cwd=self.folder, env=dict(self.environment), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        shown = f"tr11 {' '.join(arguments)} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, shown
        assert expect is None or done.returncode == expect, shown
        return done

    def prepare(self) -> None:
        """A few hundred short documents, tokenised with a vocabulary of 512."""
        data = self.folder / "data"
        data.mkdir(parents=True)
        words = "the model reads a token and writes the next one while the cluster hums and a node waits".split()
        with (data / "corpus.jsonl").open("w") as stream:
            for number in range(600):
                text = " ".join(words[(number * k + k) % len(words)] for k in range(1, 60))
                stream.write(json.dumps({"text": f"{number} {text}"}) + "\n")
        self.tr11(
            "data",
            "tokenizer",
            "--corpus",
            "data/corpus.jsonl",
            "--vocab-size",
            "512",
            "--out",
            "data/tokenizer",
        )
        self.tr11(
            "data", "preprocess", "--input", "data/corpus.jsonl", "--tokenizer", "data/tokenizer",
            "--output-prefix", "data/corpus", "--workers", "2",
        )  # fmt: skip

    def paths(self, directory: str = "run") -> RunPaths:
        return RunPaths(self.folder / directory, "small", "main")

    def steps(self, directory: str = "run") -> list[dict[str, Any]]:
        return steps_of(self.paths(directory))

    def ends(self, directory: str = "run") -> list[EndMarker]:
        found = [EndMarker.read(path) for path in self.paths(directory).attempts.glob("*/end.json")]
        return sorted((end for end in found if end is not None), key=lambda end: end.time)

    def manifest(self, step: int, directory: str = "run") -> Manifest | None:
        return Manifest.read(self.paths(directory).checkpoint(step))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait for a condition; fails with the end of the log, so that a failure can be understood
        from the report.
        """
        until(condition, what, seconds=seconds, context=lambda: end_of_file(self.paths().main_log))
