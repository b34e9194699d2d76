"""A step that is saved again: what is deleted, what is kept as superseded, and a kill at any point
between.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.checkpoint.publishing import CheckpointInfo, Extras, make_manifest, publish
from trainer.contract.checkpoints import find_resumable, partial_path
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.replacing import settle_replaced

PARTS = ("weights/a", "optimizer/a", "cursor.json")


def written(folder: Path, content: str) -> tuple[Path, Manifest]:
    """A folder of step 5 that may be published, and its manifest."""
    partial = partial_path(folder, 5, content)
    for name in PARTS:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(content)
    entries = tuple(FileEntry(name, len(content), file_digest(partial / name)) for name in PARTS)
    return partial, make_manifest(
        5, Extras({"consumed_samples": 0, "consumed_tokens": 0}), CheckpointInfo({}, {}), entries
    )


def save(folder: Path, content: str) -> list[str]:
    """Save step 5; what was reported."""
    said: list[str] = []
    publish(folder, *written(folder, content), report=said.append)
    return said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path, name: str) -> str:
    return (folder / name / "weights" / "a").read_text()


def test_another_content_of_the_same_training_is_kept_and_said(tmp_path: Path) -> None:
    assert save(tmp_path, "first") == []
    (line,) = save(tmp_path, "other")
    save(tmp_path, "third")
    assert "global_step5.superseded" in line and "saved before with another content" in line
    assert names(tmp_path) == [
        "global_step5",
        "global_step5.superseded",
        "global_step5.superseded-2",
        "latest",
    ]
    found = [content(tmp_path, name) for name in names(tmp_path)[:3]]
    assert (
        found == ["third", "first", "other"]
        and find_resumable(tmp_path, "digests", True, print) == 5
    )


def test_the_same_content_is_there_once(tmp_path: Path) -> None:
    save(tmp_path, "same")
    assert save(tmp_path, "same") == [] and names(tmp_path) == ["global_step5", "latest"]


def cut(place: Path) -> None:
    (place / "weights" / "a").write_text("fi")


def lose(place: Path) -> None:
    (place / "optimizer" / "a").unlink()


@pytest.mark.parametrize("harm", [cut, lose])
def test_one_that_is_not_whole_makes_room(tmp_path: Path, harm: type[None]) -> None:
    save(tmp_path, "first")
    harm(tmp_path / "global_step5")
    assert save(tmp_path, "other") == [] and names(tmp_path) == ["global_step5", "latest"]


@pytest.mark.parametrize("text", ["first", "other"])
def test_what_a_person_put_into_it_stays(tmp_path: Path, text: str) -> None:
    save(tmp_path, "first")
    (tmp_path / "global_step5" / "notes.txt").write_text("before the spike")
    save(tmp_path, text)
    assert (tmp_path / "global_step5.superseded" / "notes.txt").exists()


def test_one_whose_folder_a_person_moved_to_another_disk_stays(tmp_path: Path) -> None:
    """It is whole: its files are found through the link."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    save(run, "first")
    (run / "global_step5" / "weights").rename(disk)
    (run / "global_step5" / "weights").symlink_to(disk)
    assert find_resumable(run, "digests", True, print) == 5
    save(run, "other")
    assert names(run) == ["global_step5", "global_step5.superseded", "latest"]
    assert content(run, "global_step5.superseded") == "first"


def test_one_that_cannot_be_read_at_the_moment_stays(tmp_path: Path) -> None:
    save(tmp_path, "first")
    weights = tmp_path / "global_step5" / "weights" / "a"
    weights.unlink()
    weights.symlink_to(weights.name)  # in a circle: an error, but not that it is missing
    save(tmp_path, "other")
    assert names(tmp_path) == ["global_step5", "global_step5.superseded", "latest"]


def test_a_deletion_that_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    save(tmp_path, "same")
    half = tmp_path / ".global_step5.replaced-x"
    (half / "weights").mkdir(parents=True)
    (half / "weights" / "a").write_text("same")
    settle_replaced(tmp_path)
    assert names(tmp_path) == ["global_step5", "latest"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 5))
def test_killed_before_any_rename_the_older_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The renames: the old one aside, the new one in, `latest`, then the old one's last name."""
    save(tmp_path, "first")
    rename, replace, left = Path.rename, os.replace, [at]

    def count(path: Path) -> None:
        left[0] -= path.parent == tmp_path
        if left[0] <= 0:
            raise Killed

    partial, manifest = written(tmp_path, "other")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: (count(path), rename(path, target))[1])
        patch.setattr(Path, "replace", lambda path, target: (count(path), replace(path, target))[1])
        with pytest.raises(Killed):
            publish(tmp_path, partial, manifest)
    settle_replaced(tmp_path)
    assert find_resumable(tmp_path, "digests", True, print) == 5
    found = {content(tmp_path, name) for name in names(tmp_path) if name.startswith("global_step5")}
    assert found == ({"first"} if at < 3 else {"first", "other"})
