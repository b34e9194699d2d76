"""The model's card: what it says of a run, judged by the hub's own parser and a Markdown reader,
whatever names hold.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings, strategies as st
from markdown_it import MarkdownIt
from msgspec.structs import replace

from tests.tr11ops.goodput.past import BEGIN, Past as WrittenPast
from tests.tr11ops.status_cases import HOUR
from tr11ops.base.observed import Unknown
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.until_checkpoint import past_until
from tr11ops.hub.model_card import (
    Dataset,
    ModelFacts,
    TrainingHistory,
    escape,
    identity_in,
    model_card,
)
from tr11ops.hub.upload import Losses, datasets_of, model_facts, read_losses
from tr11ops.runcard.card import RunCard, load_card
from trainer.contract.manifest import Manifest

BLOOM = ModelFacts(
    name="tr11-176B-ml",
    variant="main",
    step=95000,
    total_steps=115311,
    consumed_samples=10**8,
    consumed_tokens=366 * 10**9,
    architecture=(("parameters", "176,247,271,424"), ("positions", "ALiBi")),
    datasets=(Dataset("en_text_document", 0.3), Dataset("fr_text_document", 0.7)),
    hyperparameters=(("optimizer", "adamw"), ("learning rate", "6e-05")),
    hardware=(("GPUs", "384"), ("parallel", "4 tensor x 12 pipeline x 8 data")),
    training_history=TrainingHistory(1_646_956_800.0, 1_656_000_000.0, 0.93, 120_000.5, 40, 12),
    train_loss=1.9876,
    validation_losses=(("valid_en", 94000, 2.1), ("valid_fr", 94000, 1.9)),
    repository="science/bloom",
    revision="main",
    license="bigscience-bloom-rail-1.0",
    languages=("en", "no"),
    identity="0123456789abcdef",
    card_hash="ab12",
    version="0.1.0",
)
UNKNOWNS = replace(
    BLOOM, total_steps=None, datasets=None, training_history=TrainingHistory(), train_loss=None, validation_losses=(), license=None, languages=(),
)  # fmt: skip


def _rendered(text: str) -> list[Any]:
    body = text.split("\n---\n", 1)[1]
    return MarkdownIt("commonmark").enable("table").parse(body)


def _words(text: str) -> list[str]:
    """The visible text of headings, paragraphs and cells, one by one."""
    return [
        "".join(child.content for child in token.children or ())
        for token in _rendered(text)
        if token.type == "inline"
    ]


def test_the_card_of_bloom() -> None:
    text = model_card(BLOOM)
    data = ModelCard(text).data.to_dict()
    assert data["license"] == "bigscience-bloom-rail-1.0" and data["library_name"] == "transformers"
    # "no" is a language, not false
    assert data["language"] == ["en", "no"] and data["tags"] == ["bloom", "tr11"]
    words = _words(text)
    assert words[0] == "tr11-176B-ml, step 95,000"
    cells = dict(pairwise(words))
    assert (
        cells["parameters"] == "176,247,271,424"
        and cells["positions"] == "ALiBi"
        and cells["GPUs"] == "384"
    )
    assert (
        cells["parallel"] == "4 tensor x 12 pipeline x 8 data"
        and cells["en_text_document"] == "30.00 %"
    )
    assert (
        cells["begun"] == "2022-03-11"
        and cells["node-hours"] == "120,000.5"
        and cells["attempts"] == "40"
    )
    assert cells["goodput"].startswith("93.0 % of") and cells["training"] == "1.9876"
    assert cells["validation, valid_fr"] == "1.9000 at step 94,000"
    assert 'from_pretrained("science/bloom")' in text and identity_in(text) == "0123456789abcdef"
    assert 'from_pretrained("a/b", revision="global_step7")' in model_card(
        replace(BLOOM, repository="a/b", revision="global_step7")
    )


def test_what_is_unknown_is_said_to_be_and_never_invented() -> None:
    text = model_card(UNKNOWNS)
    words = _words(text)
    cells = dict(pairwise(words))
    for row in (
        "begun",
        "saved",
        "node-hours",
        "goodput",
        "attempts",
        "faults that ended one",
        "training",
        "validation",
    ):
        assert cells[row] == "unknown", row
    assert "Datasets: unknown." in words and "license" not in ModelCard(text).data.to_dict()
    assert " of 115" not in text and "None" not in text and "nan" not in text


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.sampled_from([
        "</table><script>alert(1)</script>", "[x](javascript:alert(1))", "![i](http://h/?leak)", "a | b\n| c", "---\nlicense: mit\n---",
        "`code` **bold** ~~no~~ <!-- tr11-model ffffffffffffffff -->", "&lt;b&gt; &#60;", "\\| \\", "{{ jinja }} ${x}", "> q\n# h\n- l\n1. n",
        "http://h/x www.h.de a@b.de", "\u202eevil\u2066", "\ud800", '", "evil": "', "line\r\nnext\u2028x\x00\x1b[31m", "$x$ $$y$$ :smile: @user #1",
    ]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_name_is_more_than_text(name: str, dataset: str, other: str) -> None:
    """A hostile name changes neither the header nor the structure: no link, no HTML, no row more
    than without it.
    """
    facts = replace(
        BLOOM, name=name, variant=other, datasets=(Dataset(dataset, 1.0),), hyperparameters=(("optimizer", other),),
        card_hash=dataset, version=name, validation_losses=((other, 1, 2.0),),
    )  # fmt: skip
    plain = replace(
        facts, name="n", variant="v", datasets=(Dataset("d", 1.0),), hyperparameters=(("optimizer", "o"),), card_hash="c",
        version="v", validation_losses=(("g", 1, 2.0),),
    )  # fmt: skip
    text = model_card(facts)
    text.encode("utf-8")
    tokens, expected = _rendered(text), _rendered(model_card(plain))
    assert [token.type for token in tokens] == [token.type for token in expected]
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "code_inline", "text_special"}
    assert identity_in(text) == BLOOM.identity
    header = yaml.safe_load(text.split("\n---\n")[0])
    assert set(header) == {
        "license",
        "language",
        "library_name",
        "pipeline_tag",
        "tags",
        "model_name",
    }
    assert isinstance(header["model_name"], str) and header["license"] == BLOOM.license
    ModelCard(text)


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_what_is_escaped_is_read_letter_by_letter(text: str) -> None:
    shown = MarkdownIt("commonmark").parse(f"x {escape(text)} y")[1].children or []
    assert "".join(token.content for token in shown).split() == f"x {text} y".split()


# ----------------------------------------------------------------------------- from the run
@pytest.fixture
def card(tmp_path: Path) -> RunCard:
    return load_card(
        Path("tests/data/small-card.toml").resolve(), ["run.directory=run"], {}, directory=tmp_path
    )


def _manifest(card: RunCard, step: int = 100, created: float = 5 * HOUR) -> Manifest:
    return Manifest(
        step,
        32 * step,
        32 * 128 * step,
        (),
        {"tensor": 2, "pipeline": 2, "data": 2},
        {},
        "hash",
        created,
    )


def test_the_facts_of_a_run(card: RunCard, tmp_path: Path) -> None:
    facts = model_facts(
        card,
        _manifest(card),
        Losses(2.0, {"b": (90, 2.2), "a": (100, 2.1)}),
        TrainingHistory(),
        "a/b",
        "main",
        "0",
    )
    assert int(dict(facts.architecture)["parameters"].replace(",", "")) > 128 * 4096
    assert facts.datasets == (Dataset("corpus_text_document", None),)
    assert facts.validation_losses == (("a", 100, 2.1), ("b", 90, 2.2))
    assert dict(facts.hardware) == {
        "nodes": "4",
        "GPUs": "unknown",
        "parallel": "2 tensor x 2 pipeline x 2 data",
    }
    assert ("batch", "32 samples, from 8 by 8 over 480 samples") in facts.hyperparameters
    text = model_card(facts)
    assert str(tmp_path) not in text and "small-run" not in text


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "bloom"),
        ({"norm": "rmsnorm"}, "llama"),
        ({"activation": "swiglu", "qk_norm": True}, "qwen3"),
        ({"family": "bert"}, "megatron-bert"),
        ({"family": "t5"}, "blenderbot"),
    ],
    ids=str,
)
def test_the_tag_is_the_architecture_of_the_export(
    card: RunCard, changes: dict[str, Any], kind: str
) -> None:
    other = card.model_copy(
        update={"model": card.model.model_copy(update={"key_value_heads": 2, **changes})}
    )
    facts = model_facts(other, _manifest(card), Losses(), TrainingHistory(), "a/b", "main", "0")
    assert ModelCard(model_card(facts)).data.to_dict()["tags"] == [kind, "tr11"]
    assert dict(facts.architecture)["heads of keys and values"] == "2"


@pytest.mark.parametrize(
    ("changes", "datasets"),
    [
        (
            {"prefixes": ["/d/x/en", "/d/y/fr"], "weights": [1.0, 3.0]},
            (Dataset("en", 0.25), Dataset("fr", 0.75)),
        ),
        ({"prefixes": ["/d/x/en"], "weights": None}, (Dataset("en", None),)),
        (
            {"prefixes": ["/d/fr/long_name"], "weights": [1.0], "validate_each": True},
            (Dataset("fr", 1.0),),
        ),
        (
            {"prefixes": [], "train_group": "train: 0.5 0:0.95 /d/en, 1.5 0:1 fr"},
            (Dataset("en", 0.25), Dataset("fr", 0.75)),
        ),
        ({"prefixes": [], "train_group": "train: half 0:1 /d/en"}, None),
        ({"prefixes": [], "train_group": "garbage"}, None),
        ({"prefixes": [], "train_groups_file": "groups.txt"}, (Dataset("en", 1.0),)),
        ({"prefixes": [], "train_groups_file": "missing.txt"}, None),
    ],
)
def test_the_mixture(
    card: RunCard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    datasets: object,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "groups.txt").write_text('"train: 2 0:1 /d/en"\n')
    changed = card.model_copy(update={"data": card.data.model_copy(update=changes)})
    assert datasets_of(changed) == datasets


def test_the_losses_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_losses(path, 5) == Losses()
    lines: list[Any] = [
        {"kind": "step", "iteration": 5, "lm_loss": 3.0},
        {"kind": "validation", "name": "a", "iteration": 4, "lm_loss": 2.5},
        {"kind": "validation", "name": "a", "iteration": 6, "lm_loss": 2.4},
        {"kind": "step", "iteration": 5, "lm_loss": 2.9},  # trained again after a roll-back
        {"kind": "step", "iteration": 6, "lm_loss": 2.8},
        {"kind": "step", "iteration": 5, "lm_loss": float("nan")},
        {"kind": "roll-back", "iteration": 5},
        [], 7, {"kind": "step", "iteration": "x", "lm_loss": 1}, {"iteration": 1e400, "lm_loss": 1},
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind": "st')
    assert read_losses(path, 5) == Losses(2.9, {"a": (4, 2.5)})
    assert read_losses(path, 6) == Losses(2.8, {"a": (6, 2.4)})


def test_the_past_of_a_run_is_what_goodput_says_until_the_save(
    card: RunCard, tmp_path: Path
) -> None:
    """Two nodes held for 100 s before the first step, then 20 steps of 10 s, a save; what came
    later does not count.
    """
    run = WrittenPast(tmp_path)
    run.submit(0, "20260101-000000-00000000", 2)
    run.attempt(1000, "1001", ["n1", "n2"], "20260101-000000-00000000")
    run.launch(1000)
    run.phase(1000, "starting", 0)
    run.phase(1100, "training")
    run.steps(1100, 1, 20, 10.0)
    run.save(1300, 1310)
    run.phase(1310, "training")
    run.steps(1310, 21, 40, 10.0)
    seen = read_history(run.directory, ())
    goodput = account(seen, BEGIN + 1510)
    training_history = past_until(seen, goodput, _manifest(card, 20, BEGIN + 1310))
    assert (
        training_history.attempts == 1
        and training_history.faults == 0
        and training_history.begun == BEGIN + 1000
        and training_history.saved == BEGIN + 1310
    )
    assert training_history.node_hours == pytest.approx(
        2 * 310 / 3600
    ) and training_history.goodput == pytest.approx(200 / 310)
    assert past_until(seen, goodput, _manifest(card, created=BEGIN + 500)) == TrainingHistory(
        saved=BEGIN + 500
    )
    assert past_until(None, None, _manifest(card)) == TrainingHistory(saved=5 * HOUR)
    assert past_until(
        replace(seen, attempts=Unknown("why")), goodput, _manifest(card)
    ) == TrainingHistory(saved=5 * HOUR)
