"""Cards of masked families: what they read, what is refused, what a resume compares; and a BERT
trained on text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.bert_cases import tiny_bert
from tests.trainer.cases import CPU
from tests.trainer.data.data_helpers import WORDS
from tests.trainer.data.sample_cases import opened
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.config.data_rules import data_problems
from trainer.contract.errors import DataError, DataMismatch
from trainer.data.indexed_write import IndexedWriter
from trainer.data.samples import match_data, open_samples, plan_data, record_of, wanted_data
from trainer.data.text import read_samples
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def card(folder: Path, **sections: dict[str, Any]) -> TrainerConfig:
    """Sentences of words each of which is followed by the next one of the list."""
    vocabulary = folder / "vocab.txt"
    if not vocabulary.exists():
        vocabulary.write_text("\n".join([*SPECIAL, *WORDS]) + "\n", encoding="utf-8")
        random = np.random.RandomState(1)
        with IndexedWriter(folder / "text_sentence", "uint16") as writer:
            for _ in range(200):
                starts, lengths = random.randint(0, len(WORDS), 6), random.randint(2, 7, 6)
                words = [
                    5 + (start + np.arange(length)) % len(WORDS)
                    for start, length in zip(starts, lengths, strict=True)
                ]
                writer.add_sequences(
                    np.concatenate(words).astype(np.uint16), lengths.astype(np.int32), np.array([6])
                )
    data = {
        "prefixes": [str(folder / "text_sentence")],
        "split": "8,1,1",
        "cache": str(folder / "maps"),
        "workers": 0,
    }
    tokenizer = {
        "type": "bert_wordpiece",
        "vocabulary_file": str(vocabulary),
        "padded_vocabulary_size": 32,
    }
    own = {
        "data": data | sections.pop("data", {}),
        "tokenizer": tokenizer | sections.pop("tokenizer", {}),
    }
    return tiny_bert(**own, run={"directory": str(folder), "seed": 5}, **sections)


def losses(config: TrainerConfig) -> list[float]:
    """A training from what the card names; to be run by `run_ranks`."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    engine.set_learning_rate(1e-2)
    stream = open_samples(config, mesh, engine.needs_data).train(0)
    found = [engine.train_step(stream, 16).loss for _ in range(30)]
    engine.close()
    return found


def test_a_card_opens_the_samples_of_its_family(tmp_path: Path) -> None:
    samples = opened(card(tmp_path))
    batch = next(samples.train(0))
    assert (
        isinstance(batch, dict)
        and batch["text"].shape == (2, 16)
        and set(batch["types"].flatten().tolist()) == {0, 1}
    )
    alone = next(opened(card(tmp_path, data={"binary_head": False})).train(0))
    assert isinstance(alone, dict) and alone["types"].sum() == 0 and alone["is_random"].sum() == 0


def test_a_resume_with_another_masking_is_refused(tmp_path: Path) -> None:
    config = card(tmp_path)
    saved = {"data": record_of(config, opened(config)).document()}
    assert match_data(config, opened(config), saved, "step", True) == []
    other = card(tmp_path, data={"mask_probability": 0.3})
    with pytest.raises(
        DataMismatch, match=r"data.mask_probability was 0.15, is 0.3; 16 of 16 samples"
    ):
        match_data(other, opened(other), saved, "step", True)


def test_a_t5s_samples_are_shown_with_their_sentinels_and_compared_by_both_lengths(
    tmp_path: Path,
) -> None:
    config = card(
        tmp_path, model={"family": "t5", "decoder_sequence_length": 8}, data={"extra_ids": 5}
    )
    source = plan_data(config, wanted_data(config))["train"].open()
    [shown] = read_samples(
        config,
        source,
        0,
        0,
        tokenizer=load_tokenizer(
            TokenizerSpec("bert_wordpiece", None, str(tmp_path / "vocab.txt"))
        ),
    )
    assert shown.text is not None and shown.text.split().count("<extra_id_0>") == 1
    saved = {"data": record_of(config, opened(config)).document()}
    other = card(
        tmp_path, model={"family": "t5", "decoder_sequence_length": 5}, data={"extra_ids": 5}
    )
    with pytest.raises(DataMismatch, match=r"model.decoder_sequence_length was 8, is 5"):
        match_data(other, opened(other), saved, "step", True)


def test_what_masking_cannot_do_is_refused(tmp_path: Path) -> None:
    assert data_problems(card(tmp_path)) == []
    keys = {
        "model.sequence_length": {"model": {"sequence_length": 4}},
        "tokenizer.type": {"tokenizer": {"vocabulary_file": None}},
        "data.reset_position_ids": {"data": {"reset_position_ids": True, "end_of_document_id": 3}},
    }
    for key, sections in keys.items():
        [problem] = data_problems(card(tmp_path, **sections))
        assert problem.key == key and problem.rule and problem.fix
    with pytest.raises(
        DataError, match=r"has 20 ids .*padded_vocabulary_size is 16: set it to 20 or more"
    ):
        opened(card(tmp_path, tokenizer={"padded_vocabulary_size": 16}))


def test_a_bert_learns_from_a_card_alone(tmp_path: Path) -> None:
    [curve] = run_ranks(losses, 1, card(tmp_path))
    assert np.mean(curve[:3]) - np.mean(curve[-3:]) > 0.3 and all(np.isfinite(curve))
