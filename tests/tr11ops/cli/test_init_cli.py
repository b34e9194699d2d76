"""`tr11 init`: a card from what the scheduler says, which loads, passes the doctor, and never
overwrites.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.waiting import until
from tr11ops.cluster.base import Node, Partition
from tr11ops.cluster.site import SiteRules
from tr11ops.launch.presets import PRESETS, preset_tables, token_count, tokens_of, with_tokens
from tr11ops.launch.starter import (
    Answers,
    data_commands,
    example_tables,
    partition_choices,
    proposed_nodes,
    starter_tables,
    starter_text,
)
from tr11ops.runcard.card import load_card, shipped_cards, shipped_folder
from tr11ops.runcard.estimate import estimate
from tr11ops.rundir.datasets import look_at_tokenizer
from tr11ops.watchdog.policy import POWERS

GPU = Partition("gpu", 20 * 3600, tuple(f"g{number}" for number in range(1, 9)), is_default=True)
CPU = Partition("cpu", None, tuple(f"c{number}" for number in range(1, 31)))
DOWN = Partition("big", None, ("b1",), is_up=False)
NODES = (
    *(Node(name, frozenset({"idle"}), cpus=40, gpus=4) for name in GPU.node_names),
    *(Node(name, frozenset({"idle"}), cpus=20) for name in CPU.node_names),
    Node("b1", frozenset({"idle"}), cpus=1, gpus=99),
)


def test_a_card_is_written_loads_and_passes_the_doctor(bench: LocalBench) -> None:
    known = ("--set", f"data.prefixes=['{bench.folder}/data/corpus']",
             "--set", f"tokenizer.path={bench.folder}/data/tokenizer", "--set", "model.sequence_length=16")  # fmt: skip
    answer = bench.tr11("init", "--scheduler", "local", "--yes", *known)
    assert answer.code == 0 and "written: tr11.toml" in answer.err, answer.err
    text = (bench.folder / "tr11.toml").read_text()
    assert all(
        "#" in line for line in text.split("[slurm]")[1].splitlines() if line.startswith("nodes")
    )
    doctor = bench.tr11("doctor", "--scheduler", "local")
    assert doctor.code == 0, doctor.err
    again = bench.tr11("init", "--scheduler", "local", "--yes")
    assert again.code == 1 and "tr11.toml is there: nothing was written" in again.err
    assert (bench.folder / "tr11.toml").read_text() == text
    assert (
        bench.tr11(
            "init", "--scheduler", "local", "--yes", "--force", "--set", "run.name=other"
        ).code
        == 0
    )
    assert load_card(bench.folder / "tr11.toml").run.name == "other"


def test_what_a_rehearsal_leaves_behind_is_said(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--set", "model.sequence_length=16")
    answer = bench.tr11(*words, "--from", "rehearsal", "-o", "copy.toml")
    assert (
        answer.code == 0
        and "[rehearsal] of rehearsal.toml is left out: this card trains" in answer.err
    )
    assert "\n[rehearsal]" not in (bench.folder / "copy.toml").read_text()
    assert "[rehearsal]" not in bench.tr11(*words).err


def test_no_one_to_ask_and_wrong_answers(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local")
    assert "add --yes" in bench.tr11(*words).err
    assert bench.tr11(*words, "--yes", "--set", "slurm.partition=no").code == 2
    answer = bench.tr11(*words, "--yes", "--set", "model.hiden_size=3")
    assert answer.code == 2 and "did you mean" in answer.err
    # a card that would not load
    told = ("--set", "model.attention_heads=7", "--set", "run.exit_duration_minutes=9000")
    answer = bench.tr11(*words, "--yes", *told)
    assert answer.code == 2
    assert "tr11: tr11.toml: model.hidden_size" in answer.err
    assert "tr11: --set run.exit_duration_minutes = 9000" in answer.err
    assert not (bench.folder / "tr11.toml").exists()
    assert not [path for path in bench.folder.iterdir() if path.name.startswith(".tr11")]


@pytest.mark.parametrize(
    ("limit", "minutes", "signal"), [("02:00:00", 115, 300), ("00:10:00", 7, 150)]
)
def test_what_follows_from_the_time_limit_follows_from_the_one_that_was_given(
    bench: LocalBench, limit: str, minutes: float, signal: int
) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--set", "model.sequence_length=16")
    answer = bench.tr11(*words, "--set", f"slurm.time_limit={limit}")
    assert answer.code == 0, answer.err
    card = load_card(bench.folder / "tr11.toml")
    assert card.slurm.time_limit == limit
    assert card.run.exit_duration_minutes == minutes
    assert card.slurm.signal_seconds_before_limit == signal
    wrong = bench.tr11(*words, "--force", "--set", "slurm.time_limit=2 hours")
    assert wrong.code == 2 and "slurm.time_limit" in wrong.err


def test_the_partition_with_most_gpus_that_is_up_comes_first() -> None:
    found = partition_choices((CPU, DOWN, GPU), NODES)
    assert [choice.partition.name for choice in found] == ["gpu", "cpu"]
    assert (found[0].nodes, found[0].gpus, found[0].cpus) == (8, 4, 40)


@pytest.mark.parametrize("name", shipped_cards())
@pytest.mark.parametrize("partition", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_shipped_card_fits_another_cluster(
    name: str, partition: Partition, tmp_path: Path
) -> None:
    base = example_tables(shipped_folder() / f"{name}.toml")
    [choice] = partition_choices((partition,), NODES)
    answers = Answers("mine", "mine-run", choice, proposed_nodes(choice, base), "six@a100")
    site = SiteRules(accounts=("six@a100", "six@v100"), qualities=("normal",))
    path = tmp_path / "card.toml"
    path.write_text(starter_text(starter_tables(base, answers), answers, site, name))
    card = load_card(path, keep_undefined=True)
    assert (card.slurm.partition, card.slurm.gpus_per_node) == (partition.name, choice.gpus)
    assert card.slurm.allocated_nodes <= choice.nodes and card.slurm.account == "six@a100"
    assert (
        partition.max_time_seconds is None or card.time_limit_seconds <= partition.max_time_seconds
    )
    assert card.run.kill_switch is None and card.slurm.constraint is None
    assert "# who pays; yours: six@a100, six@v100" in path.read_text()


# ----------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_size_gives_a_card_that_fits_the_cluster(name: str, tmp_path: Path) -> None:
    base = with_tokens(preset_tables(name, shipped_folder()), 4_096_000_000)
    [choice] = partition_choices((GPU,), NODES)
    answers = Answers("mine", "mine-run", choice, proposed_nodes(choice, base))
    path = tmp_path / "card.toml"
    path.write_text(starter_text(starter_tables(base, answers), answers, None, name))
    card = load_card(path, keep_undefined=True)
    assert card.batch.train_samples == -(-4_096_000_000 // card.model.sequence_length)
    assert card.schedule.warmup_samples * 100 <= card.batch.train_samples
    billions = {"toy": 0.0, "1b": 1.1, "7b": 7.1, "llama-1b": 1.2, "llama-8b": 8.0, "176b": 176.2}
    assert round(estimate(card).to_json()["parameters"]["total"] / 1e9, 1) == billions[name]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_size_names_nothing_of_the_original_site(name: str, bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--preset", name, "-o", "sized.toml")
    assert bench.tr11(*words).code == 0
    text = (bench.folder / "sized.toml").read_text()
    # no variable of another site is needed
    card = load_card(bench.folder / "sized.toml", environment={})
    for theirs in ("bigscience", "idris", "six", "TR11_ALERT"):
        assert theirs not in text, theirs
    assert (card.backup.url, card.hub.repository) == (None, None) and not card.alerts.recipients


@pytest.mark.parametrize(
    ("text", "count"),
    [("300B", 300 * 10**9), ("5e9", 5 * 10**9), ("1.5T", 15 * 10**11), ("300_000", 300_000)],
)
def test_tokens_are_counted_as_people_write_them(text: str, count: int) -> None:
    assert token_count(text) == count
    for wrong in ("", "0", "B", "-3B", "300 GB"):
        with pytest.raises(ValueError, match="300B"):
            token_count(wrong)


def test_size_tokens_and_account_are_options(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "-o", "big.toml")
    answer = bench.tr11(*words, "--preset", "1b", "--tokens", "2B", "--account", "six@a100")
    assert answer.code == 0, answer.err
    card = load_card(bench.folder / "big.toml")
    assert (card.model.layers, card.model.hidden_size, card.slurm.account) == (24, 1536, "six@a100")
    assert card.batch.train_samples == -(-2 * 10**9 // 2048)
    for wrong, text in (
        (("--preset", "2b"), "must be one of toy, 1b, 7b, llama-1b, llama-8b, 176b"),
        (("--tokens", "many"), "is no number of tokens"),
        (("--preset", "1b", "--from", "demo"), "give one"),
    ):
        refused = bench.tr11(*words, "--force", *wrong)
        assert refused.code == 2 and text in refused.err


# ----------------------------------------------------------------------------- the dialogue
# The terminal becomes the command's own, so that Ctrl-C there is a signal.
AT_A_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "from tr11ops.cli.main import execute; sys.exit(execute(sys.argv[1:]))"
)


class Dialogue:
    """`tr11 init` at a terminal of 80 columns: what it asks is read, and answered by typing."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        self.folder = folder
        self.shown = ""
        self.child = subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, "init", "--scheduler", "local", *words],
            cwd=folder,
            env=os.environ | {"COLUMNS": "80"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)

    def until(self, text: str) -> str:
        """What is shown next, up to and with `text`."""
        return until(
            lambda: self._next(text), f"{text!r} on the screen", context=self._so_far, seconds=60
        )

    def _next(self, text: str) -> str:
        self._read()
        before, found, after = self.shown.partition(text)
        if found:
            self.shown = after
        return before + found if found else ""

    def _so_far(self) -> str:
        return self.shown

    def _read(self) -> None:
        if select.select([self._screen], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # its other side is closed
                self.shown += os.read(self._screen, 65536).decode().replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def answer(self, question: str, *answers: str) -> str:
        """What is shown until the question, which each of `answers` is typed to, one after another."""
        shown = ""
        for answer in answers:
            shown += self.until(f"{question} [")
            shown += self.until("]: ")
            self.type(f"{answer}\n")
        return shown

    def end(self) -> int:
        until(lambda: (self._read(), self.child.poll() is not None)[1], "its end")
        self._read()
        return self.child.returncode

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._screen)


@pytest.fixture
def dialogue(bench: LocalBench) -> Iterator[Callable[..., Dialogue]]:
    opened: list[Dialogue] = []

    def start(*words: str) -> Dialogue:
        opened.append(Dialogue(bench.folder, *words))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_it_asks_in_the_order_a_person_knows_and_again_after_a_wrong_answer(
    dialogue: Callable[..., Dialogue],
) -> None:
    asked = dialogue()
    shown = asked.answer("Name of the run", "my run", "mine")
    assert "run.name: use letters, digits" in shown
    asked.answer("Run directory", "")
    shown = asked.answer("Trainer", "nemo9", "tr11")
    assert "trainer 'nemo9': must be one of tr11, deepspeed" in shown
    shown += asked.answer("Size of the model", "9b", "7b")
    shown += asked.answer("Tokens to train on", "many", "10B")
    shown += asked.answer("Dataset", "")
    shown += asked.answer("Folder of the tokenizer", "")
    shown += asked.answer("Nodes of one attempt", "9", "1")
    shown += asked.answer(
        "Mail addresses, with commas", "nobody", "ana@example.org, bo@example.org"
    )
    shown += asked.answer("File of chat URLs", "")
    shown += asked.until("May it act by itself [y/N]: ")
    asked.type("y\n")
    assert asked.end() == 0, asked.shown
    for refused in (
        "  size '9b': must be one of toy, 1b",
        "  tokens 'many': is no number of tokens",
        "  slurm.nodes = '9': is not a number of nodes that local has; use 1 to 2",
        "  alerts.recipients: write addresses as ana@example.org",
    ):
        assert refused in shown
    assert max(map(len, shown.splitlines())) <= 80 and "Traceback" not in shown
    said = " ".join(shown.split())
    unsaid = [power for power in POWERS if f"- {power.trouble}: {power.does}" not in said]
    assert unsaid == []
    card = load_card(asked.folder / "tr11.toml")
    assert (card.run.name, card.run.directory) == ("mine", str(asked.folder / "mine-run"))
    assert (card.model.layers, card.batch.train_samples) == (30, -(-10 * 10**9 // 2048))
    assert card.data.prefixes == [str(asked.folder / "mine-run/data/corpus_text_document")]
    assert card.watch.act and card.alerts.recipients == ["ana@example.org", "bo@example.org"]
    assert card.alerts.urls_file is None and card.slurm.nodes == 1


def test_another_trainer_is_asked_for_its_command_and_folder(
    dialogue: Callable[..., Dialogue],
) -> None:
    asked = dialogue("--set", "run.name=mine", "--no-act")
    asked.answer("Run directory", "out")
    asked.answer("Trainer", "hf")
    shown = asked.answer("Words behind torchrun", "'train.py", "train.py --output_dir {folder}")
    assert 'trainer.command: "\'train.py": No closing quotation' in shown
    asked.answer("The trainer's own output folder", "")
    asked.answer("Nodes of one attempt", "")
    asked.answer("Mail addresses, with commas", "")
    asked.answer("File of chat URLs", "")
    assert asked.end() == 0, asked.shown
    trainer = tomllib.loads((asked.folder / "tr11.toml").read_text())["trainer"]
    assert trainer["command"] == ["train.py", "--output_dir", "{folder}"]
    assert trainer["dialect"] == "huggingface" and trainer["folder"]


@pytest.mark.parametrize(
    ("key", "questions"),
    [("\x03", ("Name of the run",)), ("\x04", ("Name of the run", "Run directory"))],
    ids=["Ctrl-C", "Ctrl-D"],
)
def test_a_dialogue_that_is_left_writes_nothing(
    dialogue: Callable[..., Dialogue], key: str, questions: tuple[str, ...]
) -> None:
    asked = dialogue("--trainer", "command")
    before = sorted(asked.folder.iterdir())
    for question in questions:
        asked.answer(question, "")
    asked.until("Words behind torchrun" if len(questions) > 1 else "Run directory")
    asked.until("]: ")
    asked.type(key)
    assert asked.end() == 1
    assert asked.shown.endswith("\ntr11: stopped; nothing was changed\n"), asked.shown
    assert sorted(asked.folder.iterdir()) == before


def test_partition_and_account_are_asked_where_there_are_several(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tr11ops.cli.init.is_terminal", lambda: True)
    site = SiteRules(accounts=("six@a100", "six@v100"))
    monkeypatch.setattr("tr11ops.cli.init._site", lambda edge: site)
    choices = partition_choices((GPU, CPU), NODES)
    monkeypatch.setattr("tr11ops.cli.init.partition_choices", lambda *_: choices)
    answers = {"Partition": ["none", "cpu"], "Account": ["six@v100"]}
    asked: list[str] = []

    def prompt(question: str, default: str, err: bool) -> str:
        asked.append(question)
        return answers[question].pop(0) if answers.get(question) else default

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("typer.confirm", lambda question, default, err: default)
    answer = bench.tr11("init", "--scheduler", "local")
    assert answer.code == 0, answer.err
    assert "slurm.partition = 'none': is not a partition here; use one of: gpu, cpu" in answer.err
    assert asked[2:] == [
        "Trainer", "Size of the model", "Tokens to train on", "Dataset", "Folder of the tokenizer",
        "Partition", "Partition", "Account", "Nodes of one attempt",
        "Mail addresses, with commas", "File of chat URLs",
    ]  # fmt: skip
    card = load_card(bench.folder / "tr11.toml")
    assert (card.slurm.partition, card.slurm.account) == ("cpu", "six@v100")
    assert not card.alerts.has_recipients and not card.watch.act


@pytest.mark.parametrize("name", [name for name in shipped_cards() if name != "rehearsal"])
def test_every_shipped_card_is_a_start(name: str, bench: LocalBench) -> None:
    """Also those that count steps, read sentences, or have a vocabulary of pieces."""
    answer = bench.tr11(
        "init", "--scheduler", "local", "--yes", "--example", name, "-o", "mine.toml"
    )
    assert answer.code == 0, answer.err
    doubled = bench.tr11(
        "init", "--scheduler", "local", "--yes", "--example", name, "-o", "b.toml", "--tokens", "1B"
    )
    assert doubled.code == 0, doubled.err
    tables = tomllib.loads((bench.folder / "b.toml").read_text())
    one_step = tables["batch"]["global_batch_size"] * tables["model"]["sequence_length"]
    assert 0 <= tokens_of(tables) - 1_000_000_000 < one_step


def test_a_berts_first_data_is_sentences_and_pieces(bench: LocalBench) -> None:
    words = (
        "--set",
        "tokenizer.vocabulary_size=300",
        "--set",
        "tokenizer.padded_vocabulary_size=384",
    )
    done = bench.tr11(
        "init", "--scheduler", "local", "--yes", "--example", "bert-4l", "-o", "b.toml", *words
    )
    assert done.code == 0, done.err
    card = load_card(bench.folder / "b.toml", environment={})
    [prefix], vocabulary = card.data.prefixes, Path(str(card.tokenizer.vocabulary_file))
    _, tokenizer, preprocess = data_commands(card, bench.folder)
    corpus = Path(prefix.removesuffix("_text_sentence") + ".jsonl")
    corpus.parent.mkdir(parents=True)
    text = "Some words. " + " ".join(f"Word{number} is another. " for number in range(60))
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(40)))
    for command in (tokenizer.replace("--vocab-size 300", "--vocab-size 100"), preprocess):
        answer = bench.tr11(*shlex.split(command)[1:])
        assert answer.code == 0, (command, answer.err)
    assert len(vocabulary.read_text().splitlines()) == 100 and Path(f"{prefix}.idx").is_file()
    assert look_at_tokenizer(card, {}).size == 100
    vocabulary.unlink()
    assert "No such file" in look_at_tokenizer(card, {}).fault
    assert len(data_commands(card, bench.folder)) == 0, "the dataset is there"


# ----------------------------------------------------------------------------- who watches it
def test_a_card_that_no_one_was_asked_for_only_tells_and_says_so(bench: LocalBench) -> None:
    assert bench.tr11("init", "--scheduler", "local", "--yes").code == 0
    card = load_card(bench.folder / "tr11.toml")
    assert not card.watch.act and not card.alerts.has_recipients
    assert "act = false" in (bench.folder / "tr11.toml").read_text()


def test_options_say_who_is_told_and_that_tr11_may_act(bench: LocalBench) -> None:
    words = (
        "--mail",
        "ana@example.org",
        "--mail",
        "bo@example.org",
        "--urls-file",
        "chats.txt",
        "--act",
    )
    answer = bench.tr11("init", "--scheduler", "local", "--yes", *words)
    assert answer.code == 0, answer.err
    card = load_card(bench.folder / "tr11.toml")
    assert card.watch.act and card.alerts.recipients == ["ana@example.org", "bo@example.org"]
    assert card.alerts.urls_file and card.alerts.urls_file.endswith("chats.txt")
    wrong = bench.tr11("init", "--scheduler", "local", "--yes", "--force", "--mail", "nobody")
    assert wrong.code == 2 and "alerts.recipients" in wrong.err and len(wrong.err.splitlines()) == 1
