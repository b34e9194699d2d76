"""The closed list of rules: each holds, is broken, or cannot be told; nothing in a checkpoint is run."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tests.tr11ops.trainers.folders import lay
from tr11ops.dialects.rules import CheckpointPlace, RuleBroken, RuleNotKnown, check_rule, parse_rule

FILES = {
    "step-8/.metadata": "x",
    "step-8/__0_0.distcp": "x",
    "step-8/deep/inner.txt": "x",
    "step-8/state.json": "{}",
    "step-8/cut.json": '{"a": ',
    "step-8/whole.pt": "ZIP",
    "step-8/cut.pt": "PK",
    "latest": "step-8",
    "empty": "",
    "number.txt": "8\n",
    "newer.txt": "16",
    "older.txt": "4",
    "step-9-unfinished": "",
}


def place(root: Path, world_size: int | None = None, step: int | None = 8) -> CheckpointPlace:
    return CheckpointPlace(root, "step-8", root / "step-8", step, world_size)


@pytest.mark.parametrize(
    "rule",
    [
        "has .metadata",
        "has deep/*.txt",
        "lacks *.tmp",
        "lacks inner.txt",
        "count *.distcp = 1",
        "count *.pt = {world_size}",
        "file latest names {step}",
        "file number.txt names {step}",
        "beside {name}-unfinished absent",
        "json state.json",
        "zip whole.pt",
        "newer .metadata *.distcp",
        "has nothing or has .metadata",
        "count * = {world_size} or has .metadata",
    ],
)
def test_a_rule_that_holds(tmp_path: Path, rule: str) -> None:
    check_rule(rule, place(lay(tmp_path, FILES), world_size=2))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("has *.bin", "no *.bin in it"),
        ("has *.txt", "no *.txt in it"),
        ("lacks *.distcp", "__0_0.distcp is in it"),
        ("count *.distcp = 2", "1 file *.distcp, where 2 belong to it"),
        ("file none.txt names {step}", "there is no none.txt"),
        ("file older.txt names {step}", "older.txt names 4, not this one"),
        ("beside step-9-unfinished absent", "step-9-unfinished lies beside it"),
        ("json cut.json", "cut.json is not whole JSON"),
        ("json none.json", "no none.json in it"),
        ("zip cut.pt", "cut.pt was cut"),
        ("zip *.ckpt", "no *.ckpt in it"),
        ("key optimizer", "was cut"),
        ("has a or has b", "no a in it"),
        ("has a or zip cut.pt", "cut.pt was cut"),
    ],
)
def test_a_rule_that_is_broken(tmp_path: Path, rule: str, said: str) -> None:
    with pytest.raises(RuleBroken, match=re.escape(said)):
        check_rule(rule, place(lay(tmp_path, FILES), world_size=2))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "count *.distcp = {world_size}",
            "the number of ranks that wrote it (--world-size) is not known",
        ),
        ("json meta_{step}.json", "its step is not known"),
        ("file empty names {step}", "empty is empty"),
        ("file newer.txt names {step}", "says nothing of older ones"),
        ("count *.pt = 1", "2 files *.pt for 1: is the world size right?"),
        ("has nothing or count * = {world_size}", "the number of ranks"),
    ],
)
def test_a_rule_that_cannot_be_told(tmp_path: Path, rule: str, said: str) -> None:
    step = 8 if "file" in rule else None
    with pytest.raises(RuleNotKnown, match=re.escape(said)):
        check_rule(rule, place(lay(tmp_path, FILES), step=step))


@pytest.mark.parametrize("rule", ["", "run x", "has", "has a b", "count a = many", "newer a", "or"])
def test_what_is_no_rule(rule: str) -> None:
    with pytest.raises(ValueError, match="rule"):
        parse_rule(rule)


def test_a_shard_that_is_younger_than_the_metadata_is_a_save_that_was_cut(tmp_path: Path) -> None:
    lay(tmp_path, FILES)
    os.utime(tmp_path / "step-8/__0_0.distcp")
    with pytest.raises(RuleBroken, match=r"written after \.metadata"):
        check_rule("newer .metadata *.distcp", place(tmp_path))


@pytest.mark.parametrize("kept", [1.0, 0.99, 0.5, 0.0])
def test_safetensors_are_as_long_as_their_header_says(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "step-8" / "model.safetensors"
    path.parent.mkdir()
    save_file({"a": numpy.zeros((64, 64), numpy.float32)}, path)
    os.truncate(path, int(path.stat().st_size * kept))
    if kept == 1.0:
        check_rule("safetensors model*.safetensors", place(tmp_path))
        return
    with pytest.raises(RuleBroken, match=r"model\.safetensors is not whole"):
        check_rule("safetensors model*.safetensors", place(tmp_path))


def test_a_file_of_safetensors_is_judged_as_its_library_does(tmp_path: Path) -> None:
    """Of every cut and of every changed byte of the header's length and places."""
    path = tmp_path / "step-8" / "model.safetensors"
    path.parent.mkdir()
    save_file({"a": numpy.zeros(3, numpy.float32), "b": numpy.zeros((2, 0), numpy.int8)}, path)
    whole = path.read_bytes()
    digits = [at for at in range(8, len(whole)) if whole[at : at + 1].isdigit()]
    cases = [whole, whole + b"x", *(whole[:size] for size in range(len(whole)))]
    cases += [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(8)]
    cases += [whole[:at] + b"7" + whole[at + 1 :] for at in digits if b"offsets" in whole[:at]]
    accepted = 0
    for content in cases:
        path.write_bytes(content)
        try:
            with safe_open(path, framework="numpy"):
                library = True
        except SafetensorError:
            library = False
        try:
            check_rule("safetensors model*.safetensors", place(tmp_path))
            ours = True
        except RuleBroken:
            ours = False
        accepted += ours
        assert ours or not library, content
        assert library or not ours or b"7" in content, content  # it counts the bytes of a shape too
    assert 1 <= accepted < len(cases) / 2


@pytest.mark.parametrize("kept", [1.0, 0.99, 0.5, 0.0])
def test_a_file_of_torch_is_whole_or_cut(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "step-8" / "model.pt"
    path.parent.mkdir()
    torch.save({"a": torch.zeros(64, 64)}, path)
    os.truncate(path, int(path.stat().st_size * kept))
    if kept == 1.0:
        check_rule("zip model.pt", place(tmp_path))
        return
    with pytest.raises(RuleBroken, match="cut"):
        check_rule("zip model.pt", place(tmp_path))


def test_an_index_of_shards(tmp_path: Path) -> None:
    folder = tmp_path / "step-8"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for part in ("a", "b"):
        save_file({part: numpy.zeros(8, numpy.float32)}, folder / f"model-{part}.safetensors")
    index.write_text('{"weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"}}')
    check_rule(f"index {index.name}", place(tmp_path))
    os.truncate(folder / "model-b.safetensors", 20)
    with pytest.raises(RuleBroken, match=r"model-b\.safetensors is not whole"):
        check_rule(f"index {index.name}", place(tmp_path))
    (folder / "model-b.safetensors").unlink()
    with pytest.raises(RuleBroken, match=r"no model-b\.safetensors in it"):
        check_rule(f"index {index.name}", place(tmp_path))
    index.write_text('{"weights": []}')
    with pytest.raises(RuleBroken, match="is no index of tensors"):
        check_rule(f"index {index.name}", place(tmp_path))


def test_what_cannot_be_looked_into_is_no_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder that may not be read nothing is missing: to root all may be read, so that the
    call fails by hand.
    """
    lay(tmp_path, FILES)

    def refused(*_: object) -> object:
        raise PermissionError(13, "Permission denied", "step-8")

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):
        check_rule("has .metadata", place(tmp_path))


def test_names_with_the_signs_of_patterns(tmp_path: Path) -> None:
    name = "run[1]-step=20.ckpt"
    lay(tmp_path, {name: "ZIP", f"{name}.tmp": "x"})
    check_rule("zip {name}", CheckpointPlace(tmp_path, name, tmp_path, 20))


class Evil:
    """What writes a file when a pickle of it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.target,)


def metadata(content: Mapping[str, object]) -> bytes:
    return pickle.dumps({"state_dict_metadata": dict(content)})


def test_names_in_metadata_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "evil"
    path = tmp_path / "step-8" / ".metadata"
    path.parent.mkdir()
    path.write_bytes(metadata({"optimizer.state.w": Evil(target), "model.w": 1}))
    check_rule("key optimizer", place(tmp_path))
    check_rule("key model.w", place(tmp_path))
    with pytest.raises(RuleBroken, match=r"holds no model\.wide"):
        check_rule("key model.wide", place(tmp_path))
    assert not target.exists()
    pickle.loads(path.read_bytes())
    assert target.exists()  # so it would have been run


def test_a_link_out_of_the_folder_and_a_pattern_with_signs_are_looked_at_as_they_are(
    tmp_path: Path,
) -> None:
    lay(tmp_path, {"step-8/a[1].pt": "x", "elsewhere/secret.pt": "x"})
    (tmp_path / "step-8/away").symlink_to(tmp_path / "elsewhere")
    assert place(tmp_path).found("*.pt") == ["a[1].pt"]
    assert place(tmp_path).found("away/*.pt") == []
