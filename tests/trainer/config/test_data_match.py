"""A resume goes on with the data of its checkpoint, wherever that lies now, or says what is other
than it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.cases import VOCABULARY, tiny
from trainer.config.card import TrainerConfig
from trainer.config.data_match import DataRecord, DataSetIdentity, decide, probe_numbers
from trainer.contract.errors import DataMismatch
from trainer.data import samples
from trainer.data.indexed_write import IndexedWriter
from trainer.data.samples import Samples, match_data, plan_data, record_of, wanted_data


def write(prefix: Path, seed: int = 3, documents: int = 60) -> str:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, documents * 40).astype(np.uint16)
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_sequences(tokens, np.full(documents, 40, dtype=np.int32))
    return str(prefix)


def card(folder: Path, **changes: Any) -> TrainerConfig:
    """Fewer samples than one pass over the data holds: 2,280 training tokens in samples of 16."""
    value = tiny().model_dump(mode="json")
    value["run"]["directory"] = str(folder / "run")
    value["batch"]["train_samples"] = 100
    value["data"] |= {"prefixes": [str(folder / "tokens")], "split": "95,5,0", "workers": 0}
    for section, keys in changes.items():
        value[section] = (value[section] or {}) | keys
    return TrainerConfig.model_validate(value)


def opened(config: TrainerConfig) -> Samples:
    wanted = wanted_data(config)
    return Samples(plan_data(config, wanted), wanted.roles, 2, 0, 1, workers=0)


def differences(saved: dict[str, Any], config: TrainerConfig) -> str:
    """What is said when the data is switched on purpose."""
    switching = config.model_copy(
        update={"data": config.data.model_copy(update={"on_resume": "switch"})}
    )
    return "\n".join(match_data(switching, opened(config), saved, "step", True))


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    write(tmp_path / "tokens")
    write(tmp_path / "others", seed=4)
    config = card(tmp_path)
    return {"iteration": 1, "data": record_of(config, opened(config)).document()}


def test_the_same_data_says_nothing(tmp_path: Path, saved: dict[str, Any]) -> None:
    assert differences(saved, card(tmp_path)) == ""
    assert differences(saved, card(tmp_path, batch={"train_samples": 140})) == "", (
        "within the same pass"
    )


def test_data_that_was_moved_is_the_same(tmp_path: Path, saved: dict[str, Any]) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        shutil.copy(f"{tmp_path / 'tokens'}{end}", f"{tmp_path / 'elsewhere' / 'named-anew'}{end}")
    assert (
        differences(
            saved, card(tmp_path, data={"prefixes": [str(tmp_path / "elsewhere" / "named-anew")]})
        )
        == ""
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": {"seed": 7}}, "run.seed was 1234, is 7"),
        ({"model": {"sequence_length": 8}}, "model.sequence_length was 16, is 8"),
        ({"data": {"split": "80,20,0"}}, "data.split was 95,5,0, is 80,20,0"),
        ({"data": {"order": "cyclic"}}, "data.order was single, is cyclic"),
        ({"data": {"prefixes": ["tokens", "others"]}}, "data.prefixes was"),
        ({"data": {"prefixes": ["others"]}}, "samples that were compared hold other tokens"),
        ({"batch": {"train_samples": 400}}, "batch.train_samples was 100, is 400"),
    ],
    ids=["seed", "length", "split", "order", "mixture", "another-set", "more-passes"],
)
def test_other_data_is_refused_and_named(
    tmp_path: Path, saved: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    named = changes.get("data", {}).get("prefixes")
    if named:
        changes = {"data": {"prefixes": [str(tmp_path / name) for name in named]}}
    config = card(tmp_path, **changes)
    assert words in differences(saved, config)
    with pytest.raises(
        DataMismatch,
        match=r'was trained on other data: .*; restore it, or set data\.on_resume = "switch"',
    ):
        match_data(config, opened(config), saved, "step", True)
    assert match_data(config, opened(config), saved, "step", False), (
        "another run's checkpoint is only told of"
    )


def test_files_made_again_with_other_contents_are_other_data(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    for end in (".bin", ".idx"):
        shutil.copy(f"{tmp_path / 'others'}{end}", f"{tmp_path / 'tokens'}{end}")
    assert "samples that were compared hold other tokens" in differences(saved, card(tmp_path))


SETS = 28


def mixture(folder: Path) -> TrainerConfig:
    """Of many sets: fewer of its samples are compared than it has sets."""
    prefixes = [write(folder / f"set{number}", seed=number, documents=20) for number in range(SETS)]
    return card(folder, data={"prefixes": prefixes, "weights": [1.0] * SETS})


@pytest.mark.parametrize(
    ("seed", "documents", "words"),
    [(99, 20, "holds other tokens"), (5, 19, "had 800 tokens, has 760")],
    ids=["tokens", "count"],
)
def test_one_set_of_many_that_was_made_again_is_named(
    tmp_path: Path, seed: int, documents: int, words: str
) -> None:
    """Sixteen samples of the whole cannot tell of each of 28 sets."""
    config = mixture(tmp_path)
    saved = {"iteration": 1, "data": record_of(config, opened(config)).document()}
    assert differences(saved, config) == ""
    for number in range(SETS):
        write(tmp_path / f"set{number}", seed=seed, documents=documents)
        assert f"set{number} {words}" in differences(saved, config)
        write(tmp_path / f"set{number}", seed=number, documents=20)


def test_other_lengths_of_as_many_tokens_are_other_data(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 60 * 40).astype(np.uint16)
    with IndexedWriter(tmp_path / "tokens", "uint16") as writer:
        writer.add_sequences(tokens, np.array([20, 60] * 30, dtype=np.int32))
    assert "tokens has documents of other lengths" in differences(saved, card(tmp_path))


def test_of_a_large_set_parts_from_its_first_to_its_last_token_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "WHOLE_BYTES", 0)
    monkeypatch.setattr(samples, "PART_BYTES", 8)
    monkeypatch.setattr(samples, "PARTS", 4)
    write(tmp_path / "tokens")
    config = card(tmp_path)
    saved = {"iteration": 1, "data": record_of(config, opened(config)).document()}
    for place in (0, -1):
        tokens = np.memmap(tmp_path / "tokens.bin", dtype="<u2", mode="r+")
        tokens[place] ^= 1
        tokens.flush()
        assert "tokens holds other tokens" in differences(saved, config)
        tokens[place] ^= 1
        tokens.flush()
    assert differences(saved, config) == ""


def test_many_other_sets_are_counted(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    saved = {"iteration": 1, "data": record_of(config, opened(config)).document()}
    for number in range(9):
        write(tmp_path / f"set{number}", seed=50 + number, documents=20)
    assert "6 more of 28 data sets differ" in differences(saved, config)
    fewer = card(
        tmp_path, data={"prefixes": [str(tmp_path / f"set{number}") for number in range(27)]}
    )
    assert "the mixture had 28 data sets, has 27" in differences(saved, fewer)


def test_a_record_without_its_sets_is_compared_by_its_samples(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    del saved["data"]["sets"]
    assert differences(saved, card(tmp_path)) == ""
    write(tmp_path / "tokens", seed=9)
    assert "samples that were compared hold other tokens" in differences(saved, card(tmp_path))


def test_an_older_cursor_is_said_and_not_compared(tmp_path: Path, saved: dict[str, Any]) -> None:
    for cursor in ({}, {"data": None}, {"data": {"facts": 3}}, {"data": "what"}):
        lines = match_data(card(tmp_path), opened(card(tmp_path)), cursor, "global_step5", True)
        assert len(lines) == 1 and lines[0].startswith(
            "global_step5 does not say what data it was trained on"
        )


def test_a_record_survives_json_and_its_probes_cover_the_whole() -> None:
    record = DataRecord(
        {"run.seed": 1}, ((0, "a"), (5, "b")), (DataSetIdentity("x", 2, 3, "c", "d", "e"),)
    )
    assert DataRecord.of({"data": record.document()}) == record
    assert probe_numbers(0) == [] and probe_numbers(3) == [0, 1, 2]
    assert len(probe_numbers(10**6)) == 16 and probe_numbers(10**6)[-1] > 900_000
    assert decide([], "match", "step") == []
