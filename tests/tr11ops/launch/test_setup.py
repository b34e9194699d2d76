"""The set-up lines of a card, tried: those that fail, those that spoil what the workers need, and
the shipped script.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tr11ops.launch.preflight_bench import Bench
from tests.tr11ops.launch.run_inputs import write_card, write_tokenizer
from tr11ops.base.shipped import shipped
from tr11ops.launch import environment as tried
from tr11ops.launch.environment import setup_checks
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.check import Level, PreflightCheck
from tr11ops.rundir.datasets import look_at_tokenizer, workers_environment
from trainer.config.end_token import end_token_of
from trainer.contract.errors import DataError

SCRIPT = 'source "$TR11_SHIPPED/slurm/start-tr11-176B-ml"'


def card_with(folder: Path, *lines: str, more: tuple[str, ...] = ()) -> RunCard:
    written = "[" + ", ".join(f"'''{line}'''" for line in lines) + "]"
    return load_card(write_card(folder), [f"slurm.setup={written}", *more], {}, directory=folder)


def checks(card: RunCard, **variables: str) -> list[PreflightCheck]:
    return list(setup_checks(card, False, {**os.environ, **variables}))


def test_lines_that_run_cleanly(tmp_path: Path) -> None:
    (check,) = checks(card_with(tmp_path, 'echo "$NOT_SET"', "cd /"))
    assert check.level is Level.OK and "its 2 lines ended cleanly on this machine" in check.text
    assert checks(card_with(tmp_path)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "source /no/such/script",
            "its line [1] (source /no/such/script), ends with exit status 1 on this machine, and so would each attempt:"
            " /no/such/script: No such file or directory",
        ),
        ("echo spoiled >&2; false", "status 1 on this machine, and so would each attempt: spoiled"),
        ("exit 3", "status 3 on this machine, and so would each attempt: no word on stderr"),
        ("trap : EXIT; exit 3", "its line ends with exit status 3 on this machine"),
    ],
)
def test_lines_that_fail(tmp_path: Path, line: str, words: str) -> None:
    (check,) = checks(card_with(tmp_path, line))
    assert (check.level, check.name) == (Level.REFUSED, "slurm.setup") and words in check.text


def test_lines_that_hide_the_packages_or_srun(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    hiding = card_with(tmp_path, "export PYTHONNOUSERSITE=1 PYTHONHOME=/nowhere")
    assert checks(hiding)[0].level is Level.REFUSED
    (check,) = setup_checks(card_with(tmp_path, "export PATH=/nowhere"), True, os.environ)
    assert check.text == (
        "after it, srun is not found in PATH, which [1] (export PATH=/nowhere) changed"
    )


def test_the_line_of_the_script_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "env.sh"
    script.write_text('load() {\n  echo "cuda/12 is unknown" >&2\n  return 1\n}\nload\necho done\n')
    (check,) = checks(card_with(tmp_path, "true\ntrue", f"source {script}", "true"))
    assert (
        f"its line [2] (source {script}), {script} line 3, ends with exit status 1" in check.text
        and check.text.endswith("cuda/12 is unknown")
    )


def test_a_set_up_after_which_python_does_not_start_is_named_with_what_it_set(
    tmp_path: Path,
) -> None:
    """Its last line is `<no Python frame>`, which says nothing."""
    script = tmp_path / "env.sh"
    script.write_text("# the site's Python\nexport PYTHONHOME=/nowhere\n")
    (check,) = checks(card_with(tmp_path, "true", f"source {script}"))
    assert check.level is Level.REFUSED
    assert check.text.startswith("after it Python does not start (exit status 1 on this machine)")
    assert "ModuleNotFoundError: No module named 'encodings'" in check.text
    assert check.text.endswith(f"PYTHONHOME was changed by [2] (source {script}), {script} line 2")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("false", "its line [2] (module load cuda), ends with exit status 1 on this machine"),
        ("export PYTHONHOME=/nowhere", "PYTHONHOME was changed by [2] (module load cuda)"),
    ],
)
def test_the_line_that_calls_a_function_of_the_site_is_named(
    tmp_path: Path, body: str, words: str
) -> None:
    """Its own lines are no lines of the set-up: it was said that Python does not start."""
    exported = {"BASH_FUNC_module%%": f"() {{  echo 'no such module' >&2\n {body}\n}}"}
    (check,) = checks(card_with(tmp_path, "true", "module load cuda", "true"), **exported)
    assert check.level is Level.REFUSED and words in check.text


def test_lines_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "LONGEST_SECONDS", 0.2)
    (check,) = checks(card_with(tmp_path, "sleep 600 & wait"))
    assert check.level is Level.WARNING and "did not end within" in check.text


# ------------------------------------------------------------- the tokenizer that workers will find
def cached(cache: Path) -> None:
    """A tokenizer as the hub's client keeps it."""
    folder = cache / "models--big--science"
    write_tokenizer(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")


def test_a_hub_id_is_looked_for_in_the_workers_cache(tmp_path: Path) -> None:
    cached(tmp_path / "cache")
    more = ("tokenizer.path=big/science", f"slurm.environment.HF_HUB_CACHE={tmp_path}/cache")
    card = card_with(tmp_path, "export HF_HUB_CACHE=/other", more=more)
    assert card.tokenizer.path == "big/science"
    assert look_at_tokenizer(card, workers_environment(card, {})).size == 100
    clean, spoiled = checks(card)
    assert clean.level is Level.OK and spoiled.name == "tokenizer.path"
    assert spoiled.text.startswith(
        "with the variables of slurm.setup, big/science is neither a folder nor in the hub's"
    )
    assert spoiled.fix.endswith(
        "HF_HUB_CACHE=/other hf download big/science tokenizer.json tokenizer_config.json"
    )
    gone = look_at_tokenizer(card, {"HF_HUB_CACHE": str(tmp_path / "empty")})
    assert (
        gone.size is None
        and "neither a folder nor in the hub's cache that the workers use" in gone.fault
    )


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "big" / "science")
    card = card_with(tmp_path, more=("tokenizer.path=big/science",))
    assert card.tokenizer.path == str(tmp_path / "big/science")


def test_an_end_of_document_that_the_tokenizer_lacks_is_told_in_the_trainer_s_words(
    bench: Bench,
) -> None:
    folder = bench.folder / "data" / "tokenizer"
    assert look_at_tokenizer(bench.card, {}).end_fault == ""
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    said = look_at_tokenizer(bench.card, {}).end_fault
    assert (
        "names '<|im_end|>' as eos_token, which tokenizer.json does not have, it has </s>; name the"
        in said
    )
    with pytest.raises(DataError) as refused:
        end_token_of(folder / "tokenizer.json", {"</s>": 99}.get)
    assert str(refused.value) == said
    (check,) = [check for check in bench.checks() if check.name == "tokenizer"]
    assert check.level is Level.WARNING and check.text == said and "checkpoints export" in check.fix


# ----------------------------------------------------------------------------- the shipped script
CONDA = """#!/bin/bash
echo 'conda() { [ "$1" = activate ] && export CONDA_DEFAULT_ENV="$2"; }'
"""
SHOW = 'echo "$HF_HUB_CACHE $TRANSFORMERS_CACHE $HF_DATASETS_CACHE $HF_MODULES_CACHE $HF_METRICS_CACHE"; echo "$CONDA_DEFAULT_ENV $CONDA_ENVS_PATH"; echo "$TORCH_CUDA_ARCH_LIST"; echo "$LOADED"'


def source(folder: Path, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    conda = folder / "conda"
    conda.write_text(CONDA)
    conda.chmod(0o755)
    script = shipped("slurm", "start-tr11-176B-ml")
    lines = "\n".join(["set -eo pipefail", *before, f"source {script}", SHOW])
    environment = {"PATH": os.environ["PATH"], "TR11_CONDA": str(conda), **variables}
    return subprocess.run(
        ["bash", "-c", lines], env=environment, capture_output=True, text=True, check=False
    )


def test_the_shipped_script_sets_what_the_original_did(tmp_path: Path) -> None:
    modules = 'LOADED=""; module() { [ "$1" = purge ] || { shift; LOADED="$*"; }; }'
    done = source(tmp_path, modules, six_ALL_CCFRWORK="/w")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "/w/models /w/models /w/datasets /w/modules /w/metrics",
        "tr11-176B-ml /w/conda",
        "7.0 8.0",
        "cuda/11.4.3 nvtop git git-lfs github-cli mc",
    ]
    assert (
        source(
            tmp_path, modules, six_ALL_CCFRWORK="/w", TR11_MODULES="cuda/12"
        ).stdout.splitlines()[-1]
        == "cuda/12"
    )


def test_the_shipped_script_says_what_it_lacks(tmp_path: Path) -> None:
    done = source(tmp_path)
    assert done.returncode == 1 and "$six_ALL_CCFRWORK is not set" in done.stderr
    done = source(tmp_path, six_ALL_CCFRWORK="/w", TR11_CONDA="/no/conda")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(
        "/no/conda is no conda: set TR11_CONDA"
    )


def test_doctors_check_of_the_shipped_script(tmp_path: Path) -> None:
    conda = tmp_path / "conda"
    conda.write_text(CONDA)
    conda.chmod(0o755)
    (check,) = checks(card_with(tmp_path, SCRIPT), six_ALL_CCFRWORK="/w", TR11_CONDA=str(conda))
    assert check.level is Level.OK
    (check,) = checks(card_with(tmp_path, SCRIPT), six_ALL_CCFRWORK="")
    assert check.level is Level.REFUSED and "$six_ALL_CCFRWORK is not set" in check.text
