"""An archive that is the run directory is none, by whatever path it is reached; what a card may say
of one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath

import pytest

from tests.tr11ops.backup.lose_it import Case, copied
from tests.tr11ops.backup.round_cases import CARD
from tr11ops.backup import archives as overlapping
from tr11ops.backup.archives import parse_mounts, place_of
from tr11ops.launch.directory_checks import archive_checks, look_at_archives
from tr11ops.runcard.card import load_card
from tr11ops.runcard.check import Level
from trainer.config.base import CardError


# ------------------------------------------------------------- an archive that is the run directory
@pytest.mark.parametrize(
    "where", ["root", "inside", "link", "file-url", "local-url", "checkpoints", "around"]
)
def test_an_archive_that_is_the_run_directory_is_refused(memory: Path, where: str) -> None:
    case = Case(memory, "folder", None)
    copied(case, 100, 200, 300, 400)
    root = case.directory.root
    (memory / "link").symlink_to(root)
    (root / "deep" / "er").mkdir(parents=True)
    address = {
        "root": f"{root}", "inside": f"{root}/deep/er", "link": f"{memory}/link", "file-url": f"file://{root}",
        "local-url": f"local://{root}", "checkpoints": f"{case.checkpoints.parent}", "around": f"{root.parent}",
    }[where]  # fmt: skip
    key = "url" if "://" in address else "store"
    case.card = case.card.model_copy(
        update={"backup": case.card.backup.model_copy(update={key: address})}
    )
    (check,) = [
        check
        for check in archive_checks(look_at_archives(case.card))
        if check.name == f"backup.{key}"
    ]
    assert (
        check.level is Level.REFUSED
        and check.exit_code == 2
        and "a copy there is no copy" in check.text
    )
    done = case.run(key)
    assert done.exit_code == 1 and "a copy there is no copy" in done.tallies[0].faults[0]
    before = set(case.checkpoints.parent.rglob("*"))
    if key == "store":
        assert case.prune().outcomes == ()
    assert set(case.checkpoints.parent.rglob("*")) == before and not list(root.rglob("*.copy.json"))


def test_a_bind_mount_of_the_run_directory_is_it() -> None:
    """As the table of mounts shows it: part of one file system, at another place."""
    mounts = parse_mounts(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /scratch rw - lustre a:/s rw\n"
        "31 22 0:40 /team/run\\040one/checkpoints /archive/copies rw - lustre a:/s rw\n"
    )
    run = place_of("/scratch/team/run one", mounts)
    inside = place_of("/archive/copies/main", mounts)
    assert run == ("0:40", PurePosixPath("/team/run one")) and inside[0] == run[0]
    assert inside[1].is_relative_to(run[1]) and place_of("/archive", mounts) == (
        "8:1",
        PurePosixPath("/archive"),
    )


def test_a_run_mounted_into_the_archive_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(memory, "folder", None)
    (case.store / "checkpoints").mkdir()
    table = memory / "mounts"
    monkeypatch.setattr(overlapping, "MOUNTS", table)
    table.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert overlapping.overlap(case.store, case.card.paths) == ""
    table.write_text(
        table.read_text()
        + f"23 22 8:1 {case.checkpoints.parent} {case.store}/checkpoints rw - x y rw\n"
    )
    assert overlapping.overlap(case.store, case.card.paths).startswith(
        "its folder checkpoints lies in the run dir"
    )


@pytest.mark.parametrize("where", ["root", "inside", "checkpoints", "variant", "elsewhere"])
def test_the_run_directory_mounted_twice_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither path, table of mounts nor numbers tell: a file that is made here shows there."""
    case = Case(memory, "folder", None)
    (case.directory.root / "deep").mkdir()
    (memory / "alias").symlink_to(case.directory.root)
    (memory / "mounted").symlink_to(case.checkpoints.parent)
    target = {
        "root": "alias",
        "inside": "alias/deep",
        "checkpoints": "mounted",
        "elsewhere": "store",
    }
    folder = memory / target.get(where, "other")
    if where == "variant":
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "main").symlink_to(case.checkpoints)
    monkeypatch.setattr(overlapping, "_relation", lambda *_: "")
    before = set(case.directory.root.rglob("*"))
    words = {"root": "is the run", "inside": "lies in the run", "checkpoints": "is the checkpoint folder",
             "variant": "its folder checkpoints/main is the checkpoint folder", "elsewhere": ""}  # fmt: skip
    found = overlapping.overlap(folder, case.card.paths)
    assert found.startswith(words[where]) and bool(found) == (where != "elsewhere"), found
    assert set(case.directory.root.rglob("*")) == before


def test_a_copy_that_goes_with_its_checkpoint_was_none(memory: Path) -> None:
    """The copy is the original by a way that no table shows: it is looked at again when the
    original is hidden.
    """
    case = Case(memory, "folder", None)
    copied(case, 100, 200, 300, 400)
    for step in (100, 200):
        shutil.rmtree(case.far(step, ""))
        case.far(step, "").symlink_to(case.checkpoints / f"global_step{step}")
    assert [outcome.result for outcome in case.prune().outcomes] in ([], ["kept", "kept"])
    assert case.here() == [100, 200, 300, 400]


# ----------------------------------------------------------------------------- what a card may hold
@pytest.mark.parametrize(
    "value",
    [
        "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=c2VjcmV0c2VjcmV0",
        "Authorization: Bearer abcdef123456",
        "SharedAccessSignature=sv123",
    ],
)
def test_a_secret_in_an_option_is_refused_and_not_repeated(tmp_path: Path, value: str) -> None:
    with pytest.raises(CardError) as refusal:
        load_card(CARD, (f"backup.options.connection={json.dumps(value)}",), {}, directory=tmp_path)
    assert "is shared with others" in str(refusal.value) and value not in str(refusal.value)
    assert load_card(
        CARD, ('backup.options.endpoint_url="http://host:4443"',), {}, directory=tmp_path
    ).backup.options
