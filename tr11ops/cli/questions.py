"""What `tr11 init` asks a person: each question with why it is asked, until its answer can be used."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import typer

from tr11ops.base.errors import WrongUsage
from tr11ops.cli.common import say
from tr11ops.dialects.dialect import dialect_named, names
from tr11ops.launch.presets import PRESETS
from tr11ops.launch.starter import NODES_PER_SPARE
from tr11ops.runcard.card import ForeignCard, OwnCard
from trainer.config.base import validate
from trainer.config.card import CardError
from trainer.contract.record import Record

Answer = TypeVar("Answer")
NONE = "none"
"""What a person answers to leave something out."""


class Question(Record):
    """`why` is a line above it, `choices` are listed there with what each one is.

    `key` is the key of the card that the answer goes to, or a word of its own without a dot. `rule`
    says what the card takes, where its schema says that by a pattern.
    """

    key: str
    text: str
    why: str
    choices: Mapping[str, str] = {}
    rule: str = ""


NAME = Question(
    "run.name",
    "Name of the run",
    "Its jobs, logs and mails are called so.",
    rule="use letters, digits and . _ - alone, the first a letter or a digit",
)
DIRECTORY = Question(
    "run.directory", "Run directory", "Checkpoints, logs and state go here: it needs the space."
)
TRAINER = Question(
    "trainer",
    "Trainer",
    "tr11 trains itself, or operates your trainer, unchanged:",
    {"tr11": "GPTs as BLOOM, Llama or Qwen3; BERT, T5"}
    | {name: dialect_named(name).title for name in names()}
    | {"command": "any other program"},
)
SIZE = Question(
    "preset",
    "Size of the model",
    "It decides the memory and the nodes; every number can be changed in the card.",
    {name: preset.parameters for name, preset in PRESETS.items()},
)
TOKENS = Question(
    "tokens", "Tokens to train on", "The training ends there, and the learning rate falls so far."
)
DATASET = Question(
    "data.prefixes",
    "Dataset",
    "Indexed data, without .bin or .idx; `tr11 doctor` says how to make it.",
)
VOCABULARY = Question(
    "tokenizer.vocabulary_file", "File of the vocabulary", "The one that the dataset is made with."
)
TOKENIZER = Question(
    "tokenizer.path", "Folder of the tokenizer", "The one that the dataset is made with."
)
WORDS = Question(
    "trainer.command",
    "Words behind torchrun",
    "How your trainer is started: its script and its options, as you type them.",
)
FOLDER = Question(
    "trainer.folder",
    "The trainer's own output folder",
    "Its checkpoints are looked for, checked and copied there.",
)
PARTITION = Question(
    "slurm.partition", "Partition", "Where its jobs queue; the first has most GPUs."
)
ACCOUNT = Question("slurm.account", "Account", "Who pays for the hours; you may use several.")
NODES = Question(
    "slurm.nodes",
    "Nodes of one attempt",
    f"Each attempt takes so many, and a spare for every {NODES_PER_SPARE} where there are more.",
)
MAIL = Question(
    "alerts.recipients",
    "Mail addresses, with commas",
    "Who is told when it stops or stalls: one mail for each incident.",
    rule="write addresses as ana@example.org, with commas; or none",
)
CHATS = Question(
    "alerts.urls_file",
    "File of chat URLs",
    "A private file with a URL a line, as ntfy://ntfy.sh/TOPIC or slack://A/B/C.",
)
ACT = Question(
    "watch.act",
    "May it act by itself",
    "The watchdog tells of trouble, and each of these then waits for a person. Where it may act, it "
    "does them at once, within the budgets of [watch].",
)


class Asker:
    """Answers from `--set` first, then from the person, then as proposed."""

    def __init__(self, given: Mapping[str, str], is_asked: bool) -> None:
        self._given = given
        self._is_asked = is_asked

    @property
    def known(self) -> frozenset[str]:
        """The keys that `--set` gives."""
        return frozenset(self._given)

    def given(self, key: str) -> str:
        """What `--set` gives for this key; "" where it gives nothing."""
        return self._given.get(key, "")

    def show(self, line: str) -> None:
        """A line where questions are asked."""
        if self._is_asked:
            say(line)

    def ask(
        self,
        question: Question,
        proposed: str,
        read: Callable[[str], Answer],
        details: Iterable[str] = (),
    ) -> Answer:
        """The answer, as `read` understands it: it raises WrongUsage for what is none. `details`
        are lines above the question.

        A person is told in one line why an answer cannot be used, and is asked again. Raises
        WrongUsage where `--set` gives such a one, and typer.Abort where the person goes.
        """
        if question.key in self._given:
            return read(self._given[question.key])
        if not self._is_asked:
            return read(proposed)
        self._introduce(question, details)
        while True:
            text = typer.prompt(question.text, default=proposed, err=True).strip() or proposed
            try:
                answer = read(text)
                _check(question, answer)
            except WrongUsage as error:
                say(f"  {error.sentence}")
                continue
            return answer

    def agree(self, question: Question, proposed: bool, details: Iterable[str]) -> bool:
        """A yes or a no, asked below `details`; only for keys that `--set` does not give."""
        if not self._is_asked:
            return proposed
        self._introduce(question, details)
        return typer.confirm(question.text, default=proposed, err=True)

    def _introduce(self, question: Question, details: Iterable[str]) -> None:
        say("")
        for line in details:
            say(line)
        say(question.why)
        width = 4 + max(map(len, question.choices), default=0)
        for name, meaning in question.choices.items():
            for line in textwrap.wrap(
                f"{f'  {name}':<{width}}{meaning}", 78, subsequent_indent=" " * width
            ):
                say(line)


def _check(question: Question, answer: Any) -> None:
    """Raises WrongUsage where the card does not take the answer."""
    section, dot, name = question.key.partition(".")
    if not dot:
        return
    kind = ForeignCard if section == "trainer" else OwnCard
    try:
        validate(kind, {section: {name: answer}}, "answer")
    except CardError as error:
        for problem in error.problems:
            if problem.key.startswith(question.key):
                raise WrongUsage(f"{question.key}: {question.rule or problem.rule}") from None
