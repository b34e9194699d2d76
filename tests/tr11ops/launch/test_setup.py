"""What an attempt runs: its code and versions, known or not, and the set-up lines of a card, tried."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tr11ops.foreign_card import FOREIGN
from tests.tr11ops.launch.preflight_bench import Bench
from tests.tr11ops.launch.run_inputs import write_card, write_tokenizer
from tr11ops.base.shipped import shipped
from tr11ops.launch import environment as tried, software
from tr11ops.launch.environment import setup_checks
from tr11ops.launch.software import (
    identify_code,
    look_at_code,
    software_of,
    software_versions,
)
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.check import Level, PreflightCheck
from tr11ops.rundir.attempts import PATCH_FILE, CodeIdentity, code_of, version_words, versions_of
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
    found = look_at_tokenizer(bench.card, {})
    rule = "names '<|im_end|>' as eos_token, which tokenizer.json does not have, it has </s>"
    assert found.end_fault.endswith(rule)
    assert found.end_fix == "name the token that ends a document there"
    with pytest.raises(DataError) as refused:
        end_token_of(folder / "tokenizer.json", {"</s>": 99}.get)
    assert str(refused.value) == f"{found.end_fault}; {found.end_fix}"
    (check,) = [check for check in bench.checks() if check.name == "tokenizer"]
    assert (check.level, check.fix) == (Level.WARNING, found.end_fix)
    assert check.text.startswith(found.end_fault) and "checkpoints export" in check.text


def test_a_semicolon_in_what_is_quoted_parts_no_rule_from_its_fix(bench: Bench) -> None:
    config = bench.folder / "data" / "tokenizer" / "tokenizer_config.json"
    config.write_text('{"eos_token": {"content": "<end; of text>"}}')
    (check,) = [check for check in bench.checks() if check.name == "tokenizer"]
    assert "names '<end; of text>' as eos_token" in check.text
    assert check.fix == "name the token that ends a document there"


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


TOKEN = "hf_" + "aB3" * 12


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package `trainer` in a checkout with one commit on branch `work`."""
    top = tmp_path / "code"
    folder = top / "trainer"
    folder.mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "work", str(top))
    (folder / "__init__.py").write_text("")
    (folder / "loop.py").write_text("rate = 1\n")
    (top / ".gitignore").write_text("*.log\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "first")
    return folder


def test_a_clean_checkout_is_its_commit(package: Path) -> None:
    (package / "big.log").write_text("ignored")
    found, changes = look_at_code(package)
    commit = git(package, "rev-parse", "HEAD")
    assert found == CodeIdentity(str(package.parent), commit, "work") and changes == b""
    assert str(found) == f"work {commit[:10]}"
    git(package, "checkout", "-q", "--detach")
    assert str(look_at_code(package)[0]) == commit[:10]


def test_what_is_not_committed_is_kept_and_can_be_applied(package: Path, tmp_path: Path) -> None:
    (package / "loop.py").write_text("rate = 2\n")
    (package / "new.py").write_text("x = 1\nlast = 2")
    (package / "data.bin").write_bytes(bytes(100))
    found, changes = look_at_code(package)
    assert (found.changed_count, found.patch, found.is_cut) == (3, PATCH_FILE, False)
    assert set(found.changed) == {"trainer/loop.py", "trainer/new.py", "trainer/data.bin"}
    assert (
        b"+rate = 2" in changes and b"(not kept: 100 bytes)" in changes and bytes(10) not in changes
    )
    git(tmp_path, "clone", "-q", str(package.parent), str(tmp_path / "again"))
    whole = changes.replace(
        b"diff --git a/trainer/data.bin b/trainer/data.bin\nnew file mode 100644\n", b""
    )
    (tmp_path / "patch").write_bytes(whole.replace(b"(not kept: 100 bytes)\n", b""))
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again/trainer/loop.py").read_text() == "rate = 2\n"
    assert (tmp_path / "again/trainer/new.py").read_text() == "x = 1\nlast = 2"
    (package / "loop.py").write_text("rate = 3\n")
    other, _ = look_at_code(package)
    assert (
        other.commit == found.commit and other.digest != found.digest and str(other) != str(found)
    )


def test_secrets_do_not_reach_the_run_directory_and_the_size_is_limited(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "Q" * 60 + "\n-----END PRIVATE KEY-----\n"
    (package / "loop.py").write_text(f'token = "{TOKEN}"\nrate = 2\n{key}')
    _, changes = look_at_code(package)
    assert TOKEN.encode() not in changes and b"+rate = 2" in changes and b"QQQQ" not in changes
    monkeypatch.setattr(software, "PATCH_BYTES", 1000)
    (package / "loop.py").write_text("".join(f"line = {number}\n" for number in range(1000)))
    found, changes = look_at_code(package)
    assert found.is_cut and 900 < len(changes) <= 1000 and changes.endswith(b"\n")
    monkeypatch.setattr(software, "READ_BYTES", 2000)
    found, changes = look_at_code(package)
    assert found.is_cut and len(changes) <= 1000


def test_a_package_that_no_checkout_tracks_has_no_commit(package: Path, tmp_path: Path) -> None:
    """Also in an environment that lies inside of another project's checkout, where it is ignored."""
    (package.parent / ".gitignore").write_text("venv\n")
    for folder in (
        package.parent / "venv/site-packages/trainer",
        tmp_path / "elsewhere" / "trainer",
    ):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        found, changes = look_at_code(folder)
        assert (found.commit, changes) == (
            "",
            b"",
        ) or found.why == ""  # installed from a commit, here
        assert found.folder == str(folder) and "work" not in str(found)


def test_what_cannot_be_asked_is_not_known(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "code_folder", lambda: package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        str(identify_code(tmp_path / "attempt"))
        == "not known: git is not installed on this machine"
    )
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(software, "GIT_SECONDS", 0.2)
    assert str(identify_code(tmp_path / "attempt")) == "not known: git did not answer within 0.2 s"
    assert not (tmp_path / "attempt").exists()


def test_an_attempt_keeps_the_changes_beside_its_record(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "code_folder", lambda: package)
    (package / "loop.py").write_text("rate = 2\n")
    assert identify_code(tmp_path / "attempt").patch == PATCH_FILE
    assert "+rate = 2" in (tmp_path / "attempt" / PATCH_FILE).read_text()
    git(package, "checkout", "-q", ".")
    assert identify_code(tmp_path / "attempt").changed_count == 0  # requeued under the same number
    assert not (tmp_path / "attempt" / PATCH_FILE).exists()


def test_nothing_is_invented_of_cuda_nccl_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "DRIVER_FILES", (tmp_path / "none", tmp_path / "version"))
    for text, cuda, nccl in (("cuda: Optional[str] = None", "none", "none"), ("cuda = '77.1'", "77.1", "unknown"),
                             ("nothing = 1", "unknown", "unknown")):  # fmt: skip
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch/__init__.py").write_text("raise ImportError('it is not to be imported')")
        (tmp_path / "torch/version.py").write_text(f"__version__ = '1'\n{text}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        found = software_versions()
        assert (found["cuda"], found["nccl"], found["driver"]) == (cuda, nccl, "none")
    (tmp_path / "version").write_text("550.54.15\n")
    assert software_versions()["driver"] == "550.54.15"


def test_records_are_read_whoever_wrote_them() -> None:
    assert code_of({}) is None and code_of({"code": {"commit": 5}}) is None
    assert code_of({"code": {"commit": "a" * 40, "changed": ["x"], "more": 1}}) == CodeIdentity(
        "", "a" * 40, "", ("x",)
    )
    assert versions_of({"python": "3.11", "versions": {"torch": "2"}}) == {
        "torch": "2",
        "python": "3.11",
    }
    assert versions_of({"versions": []}) == {}
    assert version_words({"torch": "2", "cuda": "none", "driver": "550"}) == "torch 2, driver 550"


def test_an_image_without_git_knows_the_commit_that_it_was_installed_from(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "tr11-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tr11\nVersion: 1\n")
    told = {
        "url": "https://x/tr11",
        "vcs_info": {"vcs": "git", "commit_id": "c" * 40, "requested_revision": "v1"},
    }
    (folder / "direct_url.json").write_text(json.dumps(told))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(software, "code_folder", lambda: package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(identify_code(tmp_path / "attempt")) == "v1 cccccccccc"


def foreign(folder: Path, *changes: str) -> RunCard:
    (folder / "tr11.toml").write_text(FOREIGN)
    return load_card(folder / "tr11.toml", changes, {}, directory=folder)


def test_another_trainers_attempt_has_its_own_interpreters_versions_and_its_own_commit(
    package: Path, tmp_path: Path
) -> None:
    """Not tr11's torch, which trains nothing there."""
    site = tmp_path / "its-site"
    for name, version in (("torch", "1.13.1"), ("lightning", "2.6.6")):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    (site / "torch" / "version.py").write_text("cuda = '11.7'\n")
    python = tmp_path / "its-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    words = (f'trainer.python="{python}"', f'trainer.directory="{package.parent}"')
    card = foreign(tmp_path, *words)
    record = software_of(card, tmp_path / "attempt")
    versions = versions_of(record)
    assert (versions["torch"], versions["lightning"], versions["cuda"]) == (
        "1.13.1",
        "2.6.6",
        "11.7",
    )
    assert "deepspeed" not in versions and versions["python"] == platform.python_version()
    code = code_of(record)
    assert code is not None and (code.folder, code.branch) == (str(package.parent), "work")
    (package / "loop.py").write_text("rate = 2\n")
    code = code_of(software_of(card, tmp_path / "attempt"))
    assert code is not None and code.changed == ("trainer/loop.py",)


@pytest.mark.parametrize(
    "changes",
    [
        ('trainer.python="/no/such/python"',),
        ('trainer.start="command"', 'trainer.command=["./train.sh"]'),
        ('trainer.start="command"', 'trainer.command="source env && python train.py"'),
    ],
)
def test_of_an_interpreter_that_is_not_known_no_version_is_shown(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    record = software_of(foreign(tmp_path, *changes), tmp_path / "attempt")
    assert set(versions_of(record)) == {"tr11", "driver"}
    assert str(code_of(record)) == "not known: no git repository tracks its folder"
