"""The `tr11` command itself: a quick help, errors in one line, exit codes, and never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.plugins.command_server import tr11_command
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops import __version__
from tr11ops.base.errors import Refusal, SchedulerError, SchedulerUnreachable
from tr11ops.cli import main
from trainer.config.card import CardError, Problem
from trainer.contract.errors import USAGE

ROOT = Path(__file__).parents[3]
HEAVY = {
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "tokenizers",
    "pydantic",
    "jinja2",
    "gcsfs",
    "psutil",
}
HEAVY_FOR_A_PAGE = {
    *HEAVY - {"pydantic", "psutil"}, "apprise", "apscheduler", "asyncio", "fsspec", "httpx", "huggingface_hub",
    "multiprocessing", "plotly", "prometheus_client", "requests", "rich.markdown", "submitit", "tenacity", "tensorboard",
}  # fmt: skip


def fresh(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


TYPED = "from tr11ops.cli.main import run; run()"


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_the_front_page_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from tr11ops.cli.main import execute
execute({words!r})
print(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)
"""
    done = fresh(code)
    assert set(done.stderr.splitlines()[-1].split()) & HEAVY == set()
    assert set(done.stderr.splitlines()[-1].split()) >= {"typer"}


def test_a_commands_page_imports_nothing_heavy() -> None:
    """Of any command: what only its work needs is imported by what does the work."""
    code = f"""
import sys
from tr11ops.cli.main import COMMANDS, load
for name in COMMANDS:
    load(name)
    print(name, *({HEAVY_FOR_A_PAGE!r} & set(sys.modules)), file=sys.stderr)
"""
    assert fresh(code).stderr.split() == list(main.COMMANDS)


def test_the_front_page_names_every_command_in_80_columns() -> None:
    done = fresh(TYPED, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in main.COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert fresh(TYPED).stdout == done.stdout
    first, second = fresh(TYPED, "--version").stdout.splitlines()
    assert first == f"tr11 {__version__}" and second.startswith("torch ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            CardError("card.toml", [Problem("a.b", 3, "is wrong", "repair it")]),
            2,
            "card.toml: a.b = 3: is wrong; repair it",
        ),
        (SchedulerUnreachable("timed out"), 3, "the scheduler did not answer: timed out"),
        (SchedulerError("no such partition"), 1, "the scheduler refused: no such partition"),
        (Refusal("not this way", 2), 2, "not this way"),
        (OSError(28, "No space left on device", "/run/x"), 1, "/run/x: No space left on device"),
        (KeyboardInterrupt(), 1, "interrupted; nothing more was done"),
        (
            RuntimeError("a\nb"),
            1,
            "an error of tr11 itself: RuntimeError: a b (TR11_DEBUG=1 shows where)",
        ),
    ],
)
def test_every_error_is_one_line_and_a_documented_code(
    error: BaseException, code: int, words: str
) -> None:
    found, text = main.explain(error, "launch")
    assert found == code and text.startswith(words) and "\n" not in text


def test_a_misspelt_command_is_told_the_nearest() -> None:
    done = fresh(TYPED, "luanch")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "tr11: No such command 'luanch'. Did you mean 'launch'? (see tr11 --help)\n"
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stop", "kill"),
        ("cancel", "kill"),
        ("queue", "status"),
        ("restart", "resume"),
        ("ckpt", "checkpoints list"),
        ("resart", "resume"),
        ("cancle", "kill"),
        ("delete", "checkpoints remove"),
        ("history", "handover --chronicle"),
    ],
)
def test_what_people_type_first_is_told_the_command(typed: str, meant: str) -> None:
    done = fresh(TYPED, typed, "--yes")
    line = f"tr11: No such command '{typed}': type `tr11 {meant}`. {main.COMMANDS[meant.split(maxsplit=1)[0]].help} (see tr11 --help)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_every_meaning_is_a_command() -> None:
    for word, line in main.MEANT.items():
        assert word not in main.COMMANDS, f"{word} is a command itself"
        if line.startswith("--"):
            continue
        name, *rest = line.split()
        command = main.load(name)
        context = command.make_context(name, [], resilient_parsing=True)
        if hasattr(command, "commands") and rest:
            name, *rest = rest
            command = command.commands[name]
        command.make_context(name, [*rest], parent=context, resilient_parsing=True)


def test_debug_shows_where(tmp_path: Path) -> None:
    plain = fresh(TYPED, "launch", "--run", str(tmp_path))
    debug = fresh(TYPED, "launch", "--run", str(tmp_path), TR11_DEBUG="1")
    assert plain.returncode == debug.returncode == 2
    assert "Traceback" not in plain.stderr and "Traceback" in debug.stderr


def test_control_characters_do_not_reach_the_terminal() -> None:
    done = fresh(TYPED, "launch", "--run", "a\x1b[2Jb\nc")
    assert done.returncode == 2 and "\x1b" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error() -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1); " + TYPED, "--help"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert first.stdout is not None and first.stderr is not None
    first.stdout.close()
    assert (first.wait(timeout=300), first.stderr.read()) == (0, b"")
    first.stderr.close()


@pytest.mark.parametrize("errors_too", [False, True])
def test_a_reader_that_leaves_before_a_refusal_changes_no_exit_code(errors_too: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*tr11_command(), "status", "--run", "missing.toml", "--json"]
    errors = writing if errors_too else subprocess.PIPE
    done = subprocess.run(command, stdout=writing, stderr=errors, text=True, check=False)
    os.close(writing)
    assert done.returncode == USAGE
    if not errors_too:
        assert done.stderr.startswith("tr11: ") and len(done.stderr.splitlines()) == 1


def test_a_command_searches_for_no_plug_in_and_leaves_its_environment_to_jobs_as_it_was(
    tmp_path: Path,
) -> None:
    found = tmp_path / "spy-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Name: spy\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[pydantic]\nspy = spy:plugin\n")
    (tmp_path / "spy.py").write_text("print('a plug-in'); plugin = None\n")
    search = f"import os, sys; sys.path.insert(0, {str(tmp_path)!r}); "
    typed = "before = dict(os.environ)\ntry: run()\nfinally: print(dict(os.environ) == before)\n"
    lines = fresh(f"{search}{TYPED.removesuffix('run()')}\n{typed}", "estimate", "--run", "demo")
    assert lines.stdout.splitlines()[-1] == "True" and "a plug-in" not in lines.stdout
    theirs = "import pydantic; pydantic.create_model('Theirs', a=(int, 1))"
    assert fresh(search + theirs).stdout == "a plug-in\n"


def test_a_group_without_a_command_shows_its_help_alone() -> None:
    done = fresh(TYPED, "data")
    assert done.returncode == USAGE and "preprocess" in done.stdout + done.stderr
    assert "tr11: " not in done.stderr
    assert "(see tr11 data inspect --help)" in fresh(TYPED, "data", "inspect").stderr


def test_a_closed_output_is_no_error() -> None:
    done = fresh("import sys; sys.stdout = None; from tr11ops.cli.main import run; run(['--help'])")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------------------- anything may be typed
TYPED_WORDS = """
--run --array --set --exclude --nodes --after --json --dry-run --yes --release --wait --lines -n --rank --node --job
--scheduler local small.toml demo 1-3 1-3%1 0 -1 model.hidden_size=7 run.directory= run.kill_switch=. slurm.nodes=0 x=y
--timeout --reason
"""
WORDS = st.one_of(
    st.sampled_from(TYPED_WORDS.split()),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)


@pytest.fixture(scope="module")
def playground() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TR11_LOCAL_SCHEDULER", f"{name}/scheduler")
        patch.setenv("TR11_LOCAL_NODES", "8")
        patch.setenv("PATH", "/nonexistent")  # no Slurm of this machine is ever asked
        patch.delenv("TR11_RUN", raising=False)
        write_card(Path(name))
        os.chdir(name)
        yield Path(name)
        os.chdir(before)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(["launch", "kill", "logs"]), st.lists(WORDS, max_size=5))
@example("launch", ["--run", "demo"])
@example("launch", ["--run", "demo", "--json"])
def test_whatever_is_typed_no_traceback_and_a_documented_code(
    playground: Path, command: str, words: list[str]
) -> None:
    out, err = io.StringIO(), io.StringIO()
    safe = ["--dry-run"] if command == "launch" else []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.execute(
            [command, *safe, *(word for word in words if word not in {"-f", "--follow"})]
        )
    text = out.getvalue() + err.getvalue()
    assert code in {0, 1, 2, 3}, (command, words, code)
    assert "Traceback" not in text and "an error of tr11 itself" not in text, (command, words, text)
    # a launch that its checks refuse says so among them, which are its answer
    refused = command == "launch" and code == 1 and "refused" in out.getvalue()
    assert code == 0 or refused or err.getvalue().strip(), (command, words)
    if "--json" in words and code and out.getvalue().strip() and "--help" not in words:
        json.loads(out.getvalue())
    assert not (playground / "run" / "state").exists()
