"""The commands, as people run them: the whole way from corpus to index maps, exit codes, one-line refusals;
and the samples that a training read, by number and by iteration.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.data_helpers import ROOT, run_data, texts, write_lines, write_pair
from tests.trainer.data.sample_cases import card, opened
from tr11ops.cli.main import load
from trainer.contract.errors import DataError, UsageError
from trainer.data import commands_look, commands_make
from trainer.data.indexed import IndexedDataset
from trainer.data.progress import inclusive_range
from trainer.data.text import read_samples, samples_of_iterations
from trainer.data.tokenizer import load_tokenizer


def run_tr11(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`tr11 data WORDS`."""
    return subprocess.run(
        [sys.executable, "-c", "from tr11ops.cli.main import run; run()", "data", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_from_corpus_to_index_maps(tmp_path: Path) -> None:
    corpus, folder, prefix = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "demo"
    done = run_tr11("corpus", "--out", corpus, "--min-bytes", "600000", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text_bytes"] >= 600000 and "━" not in done.stderr, (
        "no bar where no person looks"
    )
    for kept in (False, True):
        done = run_data(
            "tokenizer", "--corpus", corpus, "--vocab-size", "512", "--out", folder, "--json"
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["vocabulary_size"] == 512
        assert json.loads(done.stdout)["already_complete"] is kept
    done = run_tr11(
        "preprocess",
        "--input",
        corpus,
        "--tokenizer",
        folder,
        "--output-prefix",
        prefix,
        "--workers",
        "2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["tokens"] > 100000
    pair = f"{prefix}_text_document"
    done = run_tr11(
        "index",
        pair,
        "--seq-length",
        "64",
        "--train-samples",
        "500",
        "--vocab-size",
        "512",
        "--json",
    )
    assert json.loads(done.stdout)["samples"] == {"train": 500}
    done = run_data("inspect", pair, "--json", "--tokenizer", folder)
    facts = json.loads(done.stdout)
    assert (
        facts["tokens"] == summary["tokens"]
        and facts["dtype"] == "uint16"
        and facts["largest_token"] < 512
    )
    first = json.loads(corpus.read_text(encoding="utf-8").split("\n")[0])["text"]
    assert first.startswith(facts["peeks"][0]["text"][:40])
    small = write_pair(tmp_path / "foreign", [[3, 4], [5, 1 << 14, 6]])
    done = run_data("inspect", small, "--tokenizer", folder)
    words = f"{small}.bin: document 1 holds token {1 << 14} at its place 1; the vocabulary of "
    assert done.returncode == 1 and words in done.stderr
    done = run_data("inspect", pair)
    assert f"{summary['tokens']:,}" in done.stdout
    done = run_data("merge", pair, pair, "--output-prefix", tmp_path / "twice", "--json")
    assert json.loads(done.stdout)["tokens"] == 2 * summary["tokens"]
    done = run_tr11("merge", pair, pair, "--output-prefix", tmp_path / "twice")
    assert f"{2 * summary['tokens']:,} tokens of 2 pairs" in done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_lines(folder / "in.jsonl", texts(50))
    done = run_data(
        "preprocess",
        "--input",
        folder / "in.jsonl",
        "--tokenizer",
        tokenizer_folder,
        "--output-prefix",
        folder / "p",
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspect", "{}/nothing"], 1, "nothing.idx is missing"),
        (
            ["tokenizer", "--corpus", "{}/none.jsonl", "--out", "{}/t"],
            1,
            "none.jsonl: there is no such file",
        ),
        (
            ["tokenizer", "--corpus", "{}/in.jsonl", "--out", "{}/t", "--vocab-size", "20"],
            2,
            "at least 258",
        ),
        (
            ["tokenizer", "--corpus", "{}/in.jsonl", "--out", "{}/t", "--json-key", "k"],
            1,
            "line 1: no key 'k'",
        ),
        (
            ["index", "{}/p_text_document", "--seq-length", "99999", "--train-samples", "5"],
            1,
            "one sample needs",
        ),
        (
            ["index", "1", "{}/a", "2", "--seq-length", "9", "--train-samples", "5"],
            2,
            "pairs WEIGHT PREFIX",
        ),
        (
            ["index", "x", "{}/a", "--seq-length", "9", "--train-samples", "5"],
            2,
            "weight of .*not a number",
        ),
        (
            ["index", "{}/a", "--seq-length", "9", "--train-samples", "5", "--split", "x"],
            2,
            "split 'x'",
        ),
        (
            ["index", "{}/a", "--seq-length", "0", "--train-samples", "5"],
            2,
            "greater than or equal to 1",
        ),
        (["inspect"], 2, "PREFIX"),
        (
            ["preprocess", "--input", "{}/in.jsonl", "--output-prefix", "{}/z"],
            2,
            "give --tokenizer",
        ),
        (
            ["check", "{}/a", "--tokenizer-type", "gpt2_bpe", "--vocab-file", "x"],
            2,
            "gpt2_bpe needs --vocab-file and --merge-file",
        ),
        (["check", "{}/a", "--vocab-file", "x"], 2, "need --tokenizer-type"),
        (["text", "--card", "{}/none.json", "--samples", "1-2"], 1, "cannot be read"),
        (["text", "--card", "{}/none.json"], 2, "one of --samples and --iterations"),
        (["probabilities", "--alpha", "nan", "{}/p_text_document"], 1, "alpha nan"),
        (
            [
                "preprocess",
                "--input",
                "{}/in.jsonl",
                "--tokenizer",
                "{}",
                "--output-prefix",
                "{}/z",
            ],
            1,
            "does not exist",
        ),
        (
            ["merge", "{}/p_text_document", "--output-prefix", "{}/p_text_document"],
            1,
            "both an input and the output",
        ),
    ],
)
def test_refusals(made: Path, words: list[str], code: int, message: str) -> None:
    before = sorted(path.name for path in made.iterdir())
    done = run_data(*(word.format(made) for word in words))
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(message, done.stderr.strip().splitlines()[-1]), done.stderr
    assert sorted(path.name for path in made.iterdir()) == before


def test_exit_codes_pass_through(made: Path) -> None:
    assert run_tr11("inspect", made / "nothing").returncode == 1
    assert run_tr11("index", "x", "y", "--seq-length", "3", "--train-samples", "4").returncode == 2
    assert run_tr11("preprocess", "--workers", "0").returncode == 2


def test_each_command_has_its_work_in_the_trainer() -> None:
    group: Any = load("data")
    assert set(group.commands) == {*commands_make.COMMANDS, *commands_look.COMMANDS}


def test_what_a_person_types_instead_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.data", "corpus", "--output", "x"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "type `tr11 data`" in done.stderr and len(done.stderr.splitlines()) == 1


def test_tr11_stays_free_of_the_heavy_libraries() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'trainer.data', 'transformers'}"
    code = f"import sys, tr11ops.cli.data; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_preparing_data_needs_no_torch() -> None:
    code = "import sys, trainer.data.__main__; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


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


def test_refusals_of_text(folder: Path) -> None:
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
