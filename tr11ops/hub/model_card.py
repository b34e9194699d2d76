"""The card of a published model: from facts to the text of its README.md. Pure.

What is not known is written as "unknown". No path, user or node name is among the facts. Names may
hold anything: whatever they hold is shown as text, never as Markdown, HTML or YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC
from typing import TypeAlias

from tr11ops.base.units import DAY, timestamp
from trainer.contract.record import Record

Rows: TypeAlias = Sequence[tuple[str, str]]  # of a table: a name and a value each
UNKNOWN = "unknown"
_MARK = re.compile(r"^<!-- tr11-model ([0-9a-f]{16}) -->\r?$", re.MULTILINE)
# What may begin markup, a link or a mention; an underscore between letters may not, nor a dot but
# behind www
_MARKUP = re.compile(r"([\\`*{}\[\]#|~$:@/]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=[wW])\.)")
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]+"
)


class Dataset(Record):
    """One dataset of the mixture and its share of the samples (None: by the datasets' sizes)."""

    name: str
    share: float | None


class TrainingHistory(Record):
    """How the training went until the checkpoint. Times in seconds since the epoch; None is
    unknown.
    """

    begun: float | None = None
    saved: float | None = None
    goodput: float | None = None  # share of the held node-seconds that trained what was kept
    node_hours: float | None = None
    attempts: int | None = None
    faults: int | None = None


class ModelFacts(Record):
    """All that a card says."""

    name: str
    variant: str
    step: int
    total_steps: int | None
    consumed_samples: int
    consumed_tokens: int
    architecture: Rows
    datasets: tuple[Dataset, ...] | None
    hyperparameters: Rows
    hardware: Rows
    training_history: TrainingHistory
    train_loss: float | None
    validation_losses: tuple[tuple[str, int, float], ...]  # group, step, loss
    repository: str
    revision: str
    license: str | None
    languages: tuple[str, ...]
    identity: str  # of the run: 16 hexadecimal digits, which a later card of the same run has too
    card_hash: str
    version: str
    kind: str = "bloom"  # which architecture of transformers its export is, by its name on the hub


def model_card(facts: ModelFacts) -> str:
    """The text of README.md: a YAML header that the hub reads, and what people read."""
    if facts.variant != "main":
        title = f"{facts.name} {facts.variant}"
    else:
        title = facts.name
    if facts.total_steps is None:
        total = ""
    else:
        total = f" of {facts.total_steps:,}"
    told = (
        f"A language model after {facts.step:,}{total} steps of training: {facts.consumed_tokens:,} tokens in "
        f"{facts.consumed_samples:,} samples. These are weights from a training run, as they were; no one has tuned "
        "or judged what the model says."
    )
    origin = (
        f"Exported by tr11 {escape(facts.version)} from step {facts.step}; hash of the run card: "
        f"`{_code(facts.card_hash)}`."
    )
    lines = [
        *_header(facts, title),
        f"<!-- tr11-model {facts.identity} -->",
        "",
        f"# {escape(title)}, step {facts.step:,}",
        "",
        told,
        "",
        *_table("Architecture", facts.architecture),
        *_data(facts),
        *_table("Hyperparameters", facts.hyperparameters),
        *_table("Hardware", facts.hardware),
        *_table("Operation until this step", _past(facts.training_history)),
        *_table("Last losses", _losses(facts)),
        *_use(facts),
        "## Origin",
        "",
        origin,
        "",
    ]
    return "\n".join(lines)


def identity_in(text: str) -> str | None:
    """The identity of the run that wrote this README.md; None when tr11 did not write it."""
    found = _MARK.search(text)
    if found:
        return found[1]
    return None


def escape(text: str) -> str:
    """A text as Markdown shows it letter by letter, on one line."""
    line = _CONTROL.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", " ".join(line.split()))


def _code(text: str) -> str:
    return "".join(
        character
        for character in text
        if character.isascii() and (character.isalnum() or character in "/._-")
    )


def _header(facts: ModelFacts, title: str) -> list[str]:
    """JSON's strings and lists are YAML's too: no name can end one."""

    def quoted(value: object) -> str:
        return json.dumps(
            value if not isinstance(value, str) else " ".join(_CONTROL.sub(" ", value).split())
        )

    return [
        "---",
        *([f"license: {quoted(facts.license)}"] if facts.license is not None else []),
        *([f"language: {quoted(list(facts.languages))}"] if facts.languages else []),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: {quoted([facts.kind, 'tr11'])}",
        f"model_name: {quoted(title)}",
        "---",
    ]


def _table(title: str, rows: Rows) -> list[str]:
    return [
        f"## {title}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {escape(a)} | {escape(b)} |" for a, b in rows),
        "",
    ]


def _data(facts: ModelFacts) -> list[str]:
    title = ["## Training data", ""]
    if not facts.datasets:
        return [*title, f"Datasets: {UNKNOWN}.", ""]
    rows = [
        f"| {escape(one.name)} | {'by its size' if one.share is None else f'{100 * one.share:.2f} %'} |"
        for one in facts.datasets
    ]
    return [*title, "| dataset | share |", "|---|---|", *rows, ""]


def _past(training_history: TrainingHistory) -> Rows:
    if training_history.goodput is None:
        share = None
    else:
        share = f"{100 * training_history.goodput:.1f} % of the node-time trained what was kept"
    return (
        ("begun", _day(training_history.begun)),
        ("saved", _day(training_history.saved)),
        (
            "node-hours",
            UNKNOWN
            if training_history.node_hours is None
            else f"{training_history.node_hours:,.1f}",
        ),
        ("goodput", share or UNKNOWN),
        ("attempts", _count(training_history.attempts)),
        ("faults that ended one", _count(training_history.faults)),
    )


def _losses(facts: ModelFacts) -> Rows:
    if facts.train_loss is None:
        train = UNKNOWN
    else:
        train = f"{facts.train_loss:.4f}"
    validation = [
        (f"validation, {group}", f"{loss:.4f} at step {step:,}")
        for group, step, loss in facts.validation_losses
    ]
    return (("training", train), *(validation or [("validation", UNKNOWN)]))


def _use(facts: ModelFacts) -> list[str]:
    where = f'"{_code(facts.repository)}"'
    if facts.revision != "main":
        where += f', revision="{_code(facts.revision)}"'
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({where})",
        "```",
        "",
    ]


def _count(count: int | None) -> str:
    if count is None:
        return UNKNOWN
    return f"{count:,}"


def _day(moment: float | None) -> str:
    if moment is None:
        return UNKNOWN
    return timestamp(moment, UTC, DAY)
