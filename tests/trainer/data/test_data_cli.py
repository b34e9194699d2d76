"""The commands, as people run them: the whole way from corpus to index maps, exit codes, one-line
refusals.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.data_helpers import ROOT, run_data, texts, write_lines, write_pair
from tr11ops.cli.main import load
from trainer.data.__main__ import build_parser


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
        (["index", "{}/a", "--seq-length", "0", "--train-samples", "5"], 2, "at least 1"),
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
        ([], 2, "COMMAND"),
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


def test_both_command_lines_offer_the_same() -> None:
    group: Any = load("data")
    commands = next(action.choices for action in build_parser()._actions if action.choices)
    assert set(group.commands) == set(commands)
    for name, command in group.commands.items():
        if (
            name == "text"
        ):  # its run is named differently: by a card here, by the resolved card there
            continue
        ours = {
            word
            for parameter in command.params
            for word in (*parameter.opts, *parameter.secondary_opts)
            if word[0] == "-"
        }
        theirs = {word for action in commands[name]._actions for word in action.option_strings}
        assert ours == theirs - {"-h", "--help"}, name
        defaults = {
            parameter.opts[0]: parameter.default
            for parameter in command.params
            if parameter.opts[0][0] == "-"
        }
        for action in commands[name]._actions:
            word = action.option_strings[0] if action.option_strings else ""
            if (
                word in defaults
                and word not in ("--workers", "--special-token")
                and not action.required
            ):
                assert defaults[word] == action.default, (name, word)


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
