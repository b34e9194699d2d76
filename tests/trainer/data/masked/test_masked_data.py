"""From text to micro batches of a card of a masked family: the way of the data, its cache, its
workers and errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.bert_cases import tiny_bert
from tests.trainer.cases import CPU
from tests.trainer.data.data_helpers import WORDS, run_data, write_lines
from tests.trainer.data.sample_cases import opened
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.errors import DataError, DataMismatch
from trainer.data.dataset import SampleSource
from trainer.data.groups import split_groups
from trainer.data.indexed import IndexedDataset
from trainer.data.indexed_write import IndexedWriter
from trainer.data.masked.of_card import BertTask, MaskedTask, T5Task
from trainer.data.masked.rules import BertRules, T5Rules
from trainer.data.masked.vocabulary import masking_vocabulary
from trainer.data.samples import match_data, open_samples, plan_data, record_of, wanted_data
from trainer.data.sources import PlannedSource, ReadOptions, plan_groups
from trainer.data.stream import SampleStream
from trainer.data.text import read_samples
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer
from trainer.data.workers import WorkerPool
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.schedule.rules import data_problems

LENGTH = 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary_file(folder: Path, extra: list[str] | None = None) -> Path:
    pieces = [word[:2] for word in WORDS] + [f"##{word[2:]}" for word in WORDS]
    path = folder / "vocab.txt"
    path.write_text(
        "\n".join(dict.fromkeys([*SPECIAL, *(extra or []), *pieces, "."])) + "\n", encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of sentences, by the command that people type."""
    folder = tmp_path_factory.mktemp("sentences")
    random = np.random.RandomState(4)
    texts = []
    for _ in range(60):
        lengths = random.randint(2, 9, random.randint(1, 12))
        texts.append(
            " ".join(
                " ".join(random.choice(WORDS, length)).capitalize() + "." for length in lengths
            )
        )
    write_lines(folder / "in.jsonl", texts)
    words = [
        "--tokenizer-type",
        "bert_wordpiece_lower",
        "--vocab-file",
        vocabulary_file(folder),
        "--workers",
        "1",
    ]
    done = run_data("preprocess", "--input", folder / "in.jsonl", *words, "--split-sentences", "--no-append-eod",
                    "--output-prefix", folder / "p")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "p_text_sentence"


def task(prefix: Path, family: str) -> MaskedTask:
    spec = TokenizerSpec(
        "bert_wordpiece_lower", vocabulary_file=str(vocabulary_file(prefix.parent))
    )
    tokenizer = load_tokenizer(spec)
    common: dict[str, Any] = {"seed": 9, "short_probability": 0.1}
    if family == "t5":
        return T5Task(
            vocabulary=masking_vocabulary(tokenizer, 20), rules=T5Rules(LENGTH, 16, 0.15), **common
        )
    return BertTask(
        vocabulary=masking_vocabulary(tokenizer), rules=BertRules(LENGTH, 0.15, True), **common
    )


def plan(
    prefix: Path, folder: Path, family: str = "bert", **changes: Any
) -> dict[str, PlannedSource]:
    reading = ReadOptions(LENGTH, 9, 512, folder, other_task=task(prefix, family))
    return plan_groups(
        split_groups([(1.0, prefix)], "8,1,1", {"train": 200, "valid": 20}), reading, **changes
    )


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_micro_batches_have_the_fields_of_the_family(
    prefix: Path, tmp_path: Path, family: str
) -> None:
    source = plan(prefix, tmp_path, family)["train"].open()
    batch = next(SampleStream(source, 3))
    assert isinstance(batch, dict)
    sides = {
        "text_enc": LENGTH,
        "enc_mask": LENGTH,
        "text_dec": 16,
        "labels": 16,
        "loss_mask": 16,
        "dec_mask": 16,
    }
    if family == "bert":
        sides = dict.fromkeys(("text", "types", "labels", "loss_mask", "padding_mask"), LENGTH)
    shapes = {name: (3, side) for name, side in sides.items()} | (
        {"is_random": (3,)} if family == "bert" else {}
    )
    assert {name: tuple(field.shape) for name, field in batch.items()} == shapes
    weights = {name for name, field in batch.items() if field.dtype == torch.float32}
    assert weights == {"loss_mask"} and all(
        field.dtype == torch.int64 for name, field in batch.items() if name not in weights
    )
    assert batch["loss_mask"].sum() > 0


def rows_of(source: SampleSource, numbers: range) -> list[list[int]]:
    out = np.empty(source.row.length, dtype=np.int64)
    found = []
    for number in numbers:
        source.read(number, out)
        found.append(out.tolist())
    return found


def test_samples_are_of_their_documents_and_splits_apart(prefix: Path, tmp_path: Path) -> None:
    data, plans = IndexedDataset(prefix), plan(prefix, tmp_path)
    seen = {}
    for name, source in ((name, plan.open()) for name, plan in plans.items()):
        held: set[int] = set()
        for number, row in enumerate(rows_of(source, range(len(source)))):
            [document] = source.documents_of(number)  # type: ignore[attr-defined]
            held.add(document)
            first, end = data.documents[document : document + 2]
            words = np.concatenate(
                [data.get(sentence) for sentence in range(int(first), int(end))]
            ).tolist()
            labels = np.array(row[2 * LENGTH : 3 * LENGTH])
            text = np.where(labels >= 0, labels, row[:LENGTH])
            inside = [
                token
                for token in text[: sum(row[4 * LENGTH : 5 * LENGTH])].tolist()
                if token not in (2, 3)
            ]
            assert set(inside) <= set(words)
        seen[name] = held
    assert (
        seen["train"] <= set(range(48))
        and seen["valid"] <= set(range(48, 54))
        and len(seen["train"]) > 30
    )


def test_maps_are_built_once_and_found_again(prefix: Path, tmp_path: Path) -> None:
    first = rows_of(plan(prefix, tmp_path)["train"].open(), range(50))
    [made] = tmp_path.glob(
        "p_text_sentence_train_samplemap_200ns_29msl_0.10ssp_9s_*_samples_idx.npy"
    )
    stamp = made.stat().st_mtime_ns
    assert (
        rows_of(plan(prefix, tmp_path)["train"].open(), range(50)) == first
        and made.stat().st_mtime_ns == stamp
    )
    made.write_bytes(made.read_bytes()[:-8])
    assert rows_of(plan(prefix, tmp_path)["train"].open(), range(50)) == first
    other = ReadOptions(LENGTH, 9, 512, tmp_path, other_task=task(prefix, "t5"))
    plan_groups(split_groups([(1.0, prefix)], "8,1,1", {"train": 200}), other)
    assert len(list(tmp_path.glob("*_train_samplemap_*.npy"))) == 2


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_worker_processes_read_the_same(prefix: Path, tmp_path: Path, family: str) -> None:
    plans = plan(prefix, tmp_path, family)
    pool = WorkerPool(plans, 2)
    try:
        for rank in range(2):
            here = SampleStream(
                plans["train"].open(), 4, dp_rank=rank, dp_size=2, consumed_samples=40
            )
            there = SampleStream(
                pool.reader("train"), 4, dp_rank=rank, dp_size=2, consumed_samples=40
            )
            for one, other in zip(here, there, strict=True):
                assert isinstance(one, dict) and isinstance(other, dict)
                assert all(torch.equal(one[name], other[name]) for name in one)
    finally:
        pool.close()


def test_a_mixture_takes_of_both(prefix: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "other", "uint16") as writer:
        for _ in range(20):
            writer.add_sequences(
                np.full(20, 7, dtype=np.uint16), np.full(4, 5, dtype=np.int32), np.array([4])
            )
    reading = ReadOptions(LENGTH, 9, 512, tmp_path, other_task=task(prefix, "bert"))
    source = plan_groups(
        split_groups([(1.0, prefix), (1.0, tmp_path / "other")], "1", {"train": 100}), reading
    )["train"].open()
    rows = rows_of(source, range(100))
    sevens = [max(set(row[1:10]), key=row[1:10].count) == 7 for row in rows]
    assert 40 <= sum(sevens) <= 60 and len(rows[0]) == source.row.length


def test_the_vocabulary_that_masking_needs(prefix: Path, tmp_path: Path) -> None:
    spec = TokenizerSpec("bert_wordpiece_lower", vocabulary_file=str(prefix.parent / "vocab.txt"))
    tokenizer = load_tokenizer(spec)
    found = masking_vocabulary(tokenizer, 3)
    assert (found.pad, found.cls, found.sep, found.mask) == (0, 2, 3, 4)
    size = tokenizer.vocabulary_size
    assert (found.begin, found.end, found.sentinels, found.size) == (
        size,
        size + 1,
        (size + 2, size + 3, size + 4),
        size + 5,
    )
    known = tokenizer.vocabulary()
    assert [token for token, number in known.items() if found.continues[number]] == [
        t for t in known if t.startswith("##")
    ]
    own = vocabulary_file(tmp_path, ["[BOS]", "<extra_id_0>"])
    found = masking_vocabulary(
        load_tokenizer(TokenizerSpec("bert_wordpiece", vocabulary_file=str(own))), 2
    )
    assert (found.begin, found.sentinels[0], found.end, found.sentinels[1]) == (
        5,
        6,
        found.size - 2,
        found.size - 1,
    )
    own.write_text("[UNK]\n[SEP]\nalpha\n")
    with pytest.raises(
        DataError, match=r"vocab.txt has no \[CLS\], \[MASK\], \[PAD\]: masked training needs"
    ):
        masking_vocabulary(
            load_tokenizer(TokenizerSpec("bert_wordpiece", vocabulary_file=str(own)))
        )


def test_documents_without_sentences_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "flat", "uint16") as writer:
        writer.add_sequences(np.full(400, 7, dtype=np.uint16), np.full(20, 20, dtype=np.int32))
    with pytest.raises(
        DataError, match=r"train data of .*flat: none of the 16 documents has 2 or more sentences"
    ):
        plan(tmp_path / "flat", tmp_path / "cache")


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(
    prefix: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.data.sources.check_token_numbers", lambda data, vocabulary_size: None
    )
    reading = ReadOptions(LENGTH, 9, 20, tmp_path, other_task=task(prefix, family))
    source = plan_groups(split_groups([(1.0, prefix)], "1", {"train": 200}), reading)[
        "train"
    ].open()
    with pytest.raises(
        DataError,
        match=r"p_text_sentence.bin: document \d+ holds token \d+ .*the vocabulary has 20",
    ):
        rows_of(source, range(200))


# ----------------------------------------------------------------------------- masked card
# Cards of masked families: what they read, what is refused, what a resume compares; and a BERT
# trained on text.


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
