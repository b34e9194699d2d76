"""A card's data as streams: groups and splits, workers and none, ranks that read nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.data_helpers import numbered_documents, write_pair
from tests.trainer.data.sample_cases import card, opened
from trainer.config.data_rules import data_problems
from trainer.contract.errors import DataError
from trainer.data.samples import Samples, missing_test_share, wanted_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples")
    write_pair(path / "a", numbered_documents(300))
    write_pair(path / "b", numbered_documents(200, seed=1))
    return path


def groups(folder: Path) -> dict[str, Any]:
    return {
        "train_group": f"train: 2 0:0.9 {folder}/a, 1 0:0.9 {folder}/b",
        "valid_groups": [
            f"valid: 2 0.9:1 {folder}/a, 1 0.9:1 {folder}/b",
            f"valid_b: 1 0.9:0.95 {folder}/b",
        ],
        "test_groups": [f"test_b: 1 0.95:1 {folder}/b"],
    }


def test_groups_of_a_card(folder: Path) -> None:
    with contextlib.closing(
        opened(card(folder, groups(folder) | {"workers": 2, "valid_workers": 1}))
    ) as samples:
        assert samples.valid_groups() == ("valid", "valid_b") and samples.test_groups() == ()
        assert sum(1 for _ in samples.train(0)) == 200
        for name in samples.valid_groups():
            first, again = (
                [tokens.tolist() for tokens, _ in samples.valid(name)] for _ in range(2)
            )
            assert len(first) == 4 and first == again
        assert {int(t.max()) for t, _ in samples.valid("valid_b")} <= set(
            range(numbered_documents(200, seed=1)[190][-1])
        )
        with pytest.raises(DataError, match="no data named 'valid_c'"):
            samples.valid("valid_c")
        with pytest.raises(DataError, match="no data named 'x'; there are train, valid, valid_b"):
            samples.source("x")


def test_workers_change_nothing(folder: Path) -> None:
    found = []
    for workers in (0, 2):
        config = card(folder, groups(folder) | {"workers": workers, "valid_workers": workers})
        with contextlib.closing(opened(config, replica=1, replicas=2)) as samples:
            train = [tokens.tolist() for tokens, _ in samples.train(40)]
            found.append((train, [tokens.tolist() for tokens, _ in samples.valid("valid")]))
    assert found[0] == found[1]


def test_groups_from_files_are_the_same_as_in_the_card(folder: Path, tmp_path: Path) -> None:
    written = groups(folder)
    (tmp_path / "train.txt").write_text(f'"{written["train_group"]}"\n')
    (tmp_path / "valid.txt").write_text(
        " ".join(f'"{text}"' for text in written["valid_groups"]) + "\n"
    )
    files = {
        "train_groups_file": str(tmp_path / "train.txt"),
        "valid_groups_file": str(tmp_path / "valid.txt"),
    }
    written.pop("test_groups")
    assert wanted_data(card(folder, files)) == wanted_data(card(folder, written))
    (tmp_path / "train.txt").write_text(f'"{written["train_group"]}" "other: 1 0:1 {folder}/a"\n')
    with pytest.raises(
        DataError, match=r"train.txt holds 2 groups, and the training reads exactly one"
    ):
        wanted_data(card(folder, files))


def test_test_data_on_demand(folder: Path) -> None:
    with contextlib.closing(opened(card(folder, groups(folder)), test=True, workers=0)) as samples:
        assert samples.test_groups() == ("test_b",) and sum(1 for _ in samples.test("test_b")) == 4
    prefixes = {"prefixes": [f"{folder}/a"], "split": "80,10,10"}
    with contextlib.closing(opened(card(folder, prefixes), test=True, workers=0)) as samples:
        assert sum(1 for _ in samples.test()) == 4
        assert (samples.valid_groups(), samples.test_groups()) == (("valid",), ("test",))


def test_prefixes_without_weights_are_mixed_by_size(folder: Path) -> None:
    config = card(folder, {"prefixes": [f"{folder}/a", f"{folder}/b"]})
    tokens = [
        sum(map(len, numbered_documents(300))),
        sum(map(len, numbered_documents(200, seed=1))),
    ]
    train = next(group for group in wanted_data(config).groups if group.name == "train")
    assert [member.weight for member in train.members] == tokens
    with contextlib.closing(opened(config, workers=0)) as samples:
        assert len(samples.source("train")) == 400 and sum(1 for _ in samples.valid()) == 4
    assert (
        opened(card(folder, {"prefixes": [f"{folder}/a"]}, evaluations=0), workers=0).valid_groups()
        == ()
    )


def test_one_name_for_two_purposes_is_refused(folder: Path) -> None:
    twice = groups(folder) | {"valid_groups": [f"train: 1 0.9:1 {folder}/a"]}
    with pytest.raises(DataError, match="group train is used for two purposes"):
        wanted_data(card(folder, twice))


def test_a_rank_that_reads_nothing_starts_nothing(folder: Path) -> None:
    wanted = wanted_data(card(folder, groups(folder)))
    samples = Samples({}, wanted.roles, 2, 0, 1, workers=2, valid_workers=2)
    assert samples.valid_groups() == ("valid", "valid_b")
    stream = samples.train(8)
    assert list(stream) == [] and stream.state() == 8 and list(samples.valid("valid_b")) == []
    samples.close()


def test_cyclic_is_for_training_alone(folder: Path) -> None:
    config = card(folder, groups(folder) | {"order": "cyclic"}, train_samples=40)
    with contextlib.closing(opened(config, workers=0)) as samples:
        stream = samples.train(0)
        epochs = [[row for _ in range(20) for row in next(stream)[0].tolist()] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
        stream.skip_to(4000)
        next(stream)
        assert sum(1 for _ in samples.valid("valid")) == 4


def test_each_data_set_is_validated_apart_when_the_card_says_so(tmp_path: Path) -> None:
    for name, count in (("fr", 300), ("en", 200)):
        write_pair(tmp_path / name / "text", numbered_documents(count, seed=count))
    prefixes = [str(tmp_path / name / "text") for name in ("fr", "en")]
    data = {
        "prefixes": prefixes,
        "weights": [0.7, 0.3],
        "split": "80,10,10",
        "validate_each": True,
        "workers": 0,
    }
    each, plain = card(tmp_path, data), card(tmp_path, data | {"validate_each": False})
    with (
        contextlib.closing(opened(each, test=True)) as found,
        contextlib.closing(opened(plain, test=True)) as usual,
    ):
        assert found.valid_groups() == (
            "valid",
            "valid_fr",
            "valid_en",
        ) and found.test_groups() == ("test",)
        assert [t.tolist() for t, _ in found.train(0)] == [t.tolist() for t, _ in usual.train(0)]
        assert [t.tolist() for t, _ in found.valid()] == [t.tolist() for t, _ in usual.valid()]
        assert [t.tolist() for t, _ in found.test()] == [t.tolist() for t, _ in usual.test()]
        english = numbered_documents(200, seed=200)
        own = {token for document in english[160:180] for token in document}
        assert {
            int(token) for tokens, _ in found.valid("valid_en") for token in tokens.flatten()
        } <= own
    assert missing_test_share(each) == "" and "test" in missing_test_share(
        card(tmp_path, data | {"split": "90,9.9,0.1"})
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"prefixes": ["/d/fr/a", "/d/fr/b"]},
            "two are in folders called 'fr'; keep each data set in a folder",
        ),
        ({"prefixes": ["/a"]}, "one of them has no such name"),
        (
            {"train_group": "t: 1 0:1 /d/fr/a", "valid_groups": ["v: 1 0:1 /d/fr/a"]},
            "belongs to data.prefixes",
        ),
    ],
)
def test_validation_sets_are_named_after_their_folders(
    tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    (problem,) = data_problems(card(tmp_path, data | {"validate_each": True}))
    assert problem.key == "data.validate_each" and words in str(problem)
