"""Files of the hub: found in its cache without its client, asked for where they are not, and never
when offline.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.hub_files import cache_folder, cached_file, hub_file
from trainer.config.model import is_hub_id
from trainer.contract.errors import DataError, HubFileError
from trainer.data.learn_tokenizer import train_tokenizer
from trainer.data.tokenizer import load_tokenizer

ID = "bigscience/bloom"


def in_cache(cache: Path, commit: str = "abc") -> Path:
    """A snapshot as the hub's client lays it out."""
    folder = cache / "models--bigscience--bloom"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    place = folder / "snapshots" / commit
    place.mkdir(parents=True)
    return place


@pytest.mark.parametrize(
    ("text", "answer"),
    [(ID, True), ("data/tokenizer", False), ("./bigscience/bloom", False), ("/bigscience/bloom", False),
     ("bloom", False), ("a/b/c", False), ("~/bloom", False), ("a/b c", False)],
)  # fmt: skip
def test_an_owner_and_a_name_that_is_no_folder_here(
    tmp_path: Path, text: str, answer: bool
) -> None:
    (tmp_path / "data").mkdir()
    assert is_hub_id(text, tmp_path) is answer


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"), ({"HF_HOME": "/h"}, "/h/hub"),
     ({"HOME": "/me"}, "/me/.cache/huggingface/hub"), ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub")],
)  # fmt: skip
def test_the_cache_is_where_the_client_puts_it(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder)


def test_a_tokenizer_by_its_id_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer(iter(["some text, and some more text"] * 20), 262, in_cache(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(ID).vocabulary_size == 262
    assert load_tokenizer(ID).path == cached_file(
        ID, "tokenizer.json", {"HF_HUB_CACHE": str(tmp_path / "cache")}
    )


def test_offline_and_not_in_the_cache_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_tokenizer(ID)
    assert "told to be offline" in str(caught.value)
    assert (
        f"`HF_HUB_CACHE={tmp_path} hf download {ID} tokenizer.json tokenizer_config.json`"
        in str(caught.value)
    )


def test_else_the_client_is_asked_and_its_refusal_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Path]] = []

    def download(hub_id: str, name: str, cache_dir: Path) -> str:
        asked.append((hub_id, name, cache_dir))
        if len(asked) > 2:
            raise ConnectionError("no\nroute")
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert hub_file(ID, ("a.json", "b.json"), environment) == tmp_path / "a.json"
    assert asked == [(ID, "a.json", tmp_path), (ID, "b.json", tmp_path)]
    with pytest.raises(HubFileError, match=r"the hub gave none \(no route\)"):
        hub_file(ID, ("a.json",), environment)
