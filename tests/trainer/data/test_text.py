"""What a training read, said afterwards: the stream's own samples, by number and by iteration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.data.data_helpers import ROOT, run_data, texts, write_lines
from tests.trainer.data.sample_cases import card, opened
from trainer.contract.errors import DataError, UsageError
from trainer.data.indexed import IndexedDataset
from trainer.data.progress import inclusive_range
from trainer.data.text import read_samples, samples_of_iterations
from trainer.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    made = tmp_path_factory.mktemp("text")
    for name, seed in (("a", 0), ("b", 1)):
        write_lines(made / f"{name}.jsonl", texts(200, seed))
        words = ["--tokenizer", tokenizer_folder, "--output-prefix", made / name, "--workers", "1"]
        assert run_data("preprocess", "--input", made / f"{name}.jsonl", *words).returncode == 0
    return made


def mixture(folder: Path) -> dict[str, object]:
    return {
        "train_group": f"train: 2 0:0.9 {folder}/a_text_document, 1 0:0.9 {folder}/b_text_document",
        "workers": 0,
    }


@pytest.mark.parametrize(
    ("order", "replicas"), [("single", 1), ("single", 2), ("cyclic", 1), ("cyclic", 2)]
)
def test_the_samples_are_those_of_the_streams(folder: Path, order: str, replicas: int) -> None:
    config = card(folder, mixture(folder) | {"order": order}, evaluations=0, train_samples=80)
    streams = [opened(config, replica=rank, replicas=replicas).train(0) for rank in range(replicas)]
    drawn = [
        row
        for _ in range(40 // replicas)
        for stream in streams
        for row in torch.cat(next(stream), 1).tolist()
    ]
    source = opened(config).source("train")
    found = list(read_samples(config, source, 0, 79, replicas=replicas))
    assert [sample.consumed for sample in found] == list(range(80))
    assert [list(sample.tokens[:-1]) + list(sample.tokens[1:]) for sample in found] == drawn
    middle = list(read_samples(config, source, 33, 41, replicas=replicas))
    assert middle == found[33:42]


def test_places_and_text(folder: Path, tokenizer_folder: Path) -> None:
    config = card(folder, mixture(folder), evaluations=0, train_samples=80)
    source = opened(config).source("train")
    for sample in read_samples(config, source, 0, 40, tokenizer=load_tokenizer(tokenizer_folder)):
        data = IndexedDataset(sample.data_set)
        joined = [int(token) for document in sample.documents for token in data.get(document)]
        starts = [
            at
            for at in range(len(joined))
            if tuple(joined[at : at + len(sample.tokens)]) == sample.tokens
        ]
        assert starts, "the tokens are not in the documents that are named"
        assert sample.text == load_tokenizer(tokenizer_folder).decode(sample.tokens)


def test_iterations_of_a_ramp(folder: Path) -> None:
    config = card(folder, mixture(folder), evaluations=0, train_samples=80)
    ramp = config.model_copy(
        update={
            "batch": config.batch.model_validate(
                {**config.batch.model_dump(), "ramp": {"start": 4, "increment": 4, "samples": 16}}
            )
        }
    )
    assert samples_of_iterations(config, 2, 3) == (8, 23)
    assert samples_of_iterations(ramp, 1, 2) == (0, 7) and samples_of_iterations(ramp, 1, 1) == (
        0,
        3,
    )
    with pytest.raises(DataError, match=r"which has 1-10"):
        samples_of_iterations(config, 10, 11)


def test_refusals(folder: Path) -> None:
    config = card(folder, mixture(folder), evaluations=0, train_samples=80)
    with pytest.raises(DataError, match="has 0-79"):
        list(read_samples(config, opened(config).source("train"), 79, 80))
    for wrong in ("5", "7-3", "a-b", "-1-2"):
        with pytest.raises(UsageError, match="write FIRST-LAST"):
            inclusive_range(wrong)
    cyclic = card(folder, mixture(folder) | {"order": "cyclic"}, evaluations=0, train_samples=80)
    with pytest.raises(DataError, match="number of replicas"):
        list(read_samples(cyclic, opened(cyclic).source("train"), 0, 1))


def test_the_command(folder: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tr11.toml").write_text(
        f"""
[run]
name = "tiny"
directory = "{tmp_path}"
[model]
layers = 1
hidden_size = 8
attention_heads = 1
sequence_length = 16
[batch]
micro_batch_size = 2
global_batch_size = 8
train_samples = 400
[schedule]
learning_rate = 1e-3
[checkpoint]
interval = 10
[data]
prefixes = ["{folder}/a_text_document"]
cache = "{tmp_path}/cache"
[tokenizer]
path = "{tokenizer_folder}"
padded_vocabulary_size = 320
[slurm]
nodes = 1
gpus_per_node = 1
time_limit = "1:00:00"
"""
    )
    code = "from tr11ops.cli.main import run; run()"
    environment = {name: value for name, value in os.environ.items() if name != "TR11_RUN"}

    def tr11(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-c",
            code,
            "data",
            "text",
            "--run",
            str(tmp_path / "tr11.toml"),
            *words,
        ]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = tr11("--iterations", "3-3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["first"], result["last"], len(result["samples"])) == (16, 23, 8)
    done = tr11("--samples", "16-16")
    assert done.stdout.startswith("=== sample 16, ") and result["samples"][0]["text"] in done.stdout
    done = tr11("--samples", "0-1", "--tokens")
    assert len(done.stdout.splitlines()) == 4
    assert tr11("--samples", "4-3").returncode == 2
