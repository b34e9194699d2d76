"""Which checkpoint is taken, when files are missing, garbled, swapped, or of another run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trainer.contract.checkpoint_names import AsideName, aside_name
from trainer.contract.checkpoints import find_resumable, read_checkpoint, verify_share
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.resumable import ResumeNeed


def make(folder: Path, *steps: int, latest: int | str | None = None) -> None:
    """Complete checkpoints of three files each; `latest` names the last one unless told otherwise
    ("" = no file).
    """
    for step in steps:
        place = folder / f"global_step{step}"
        for part in ("weights", "optimizer"):
            (place / part).mkdir(parents=True)
            (place / part / "__0_0.distcp").write_bytes(os.urandom(500))
        (place / "cursor.json").write_text(f'{{"step": {step}}}')
        describe(place, step)
    named = steps[-1] if latest is None else latest
    if named != "":
        (folder / "latest").write_text(f"global_step{named}" if isinstance(named, int) else named)


def describe(place: Path, step: int, *missing: str, **changes: Any) -> None:
    """Write the manifest of what is there, `missing` left out."""
    names = ("weights/__0_0.distcp", "optimizer/__0_0.distcp", "cursor.json")
    files = tuple(
        FileEntry(name, (place / name).stat().st_size, file_digest(place / name))
        for name in names
        if name not in missing
    )
    values = {
        "consumed_samples": 8 * step,
        "consumed_tokens": 64 * step,
        "topology": {},
        "model": {},
    }
    Manifest(
        **{"step": step, "files": files, "run_card_hash": "", "created": 0.0, **values, **changes}
    ).write(place)


def search(
    folder: Path, verify: str = "digests", expect_resume: bool = False
) -> tuple[int | None, list[str]]:
    said: list[str] = []
    return find_resumable(folder, verify, expect_resume, said.append), said  # type: ignore[arg-type]


def test_latest_is_taken_in_silence(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 100)
    assert search(tmp_path) == (100, [])


def test_a_first_start(tmp_path: Path) -> None:
    assert search(tmp_path / "nowhere") == (None, [])
    (tmp_path / ".global_step5.partial-abc").mkdir()
    assert search(tmp_path) == (None, [])
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint, and run\.expect_resume = true refuses random"
    ):
        search(tmp_path, expect_resume=True)


def test_latest_missing(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 100, latest="")
    step, said = search(tmp_path)
    assert step == 100
    assert said == [
        f"{tmp_path}/latest is missing",
        "resuming from global_step100, the newest resumable checkpoint",
    ]


@pytest.mark.parametrize("text", ["global_step", "100", "global_step-1", "../global_step9", "\n"])
def test_latest_garbled(tmp_path: Path, text: str) -> None:
    make(tmp_path, 9, 10, latest=text)
    step, said = search(tmp_path)
    assert step == 10
    assert "expected global_stepN" in said[0]


def test_latest_is_binary_or_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "a", 9, 10)
    (tmp_path / "a" / "latest").write_bytes(b"\xff\xfe\x00")
    make(tmp_path / "b", 9, 10, latest="")
    (tmp_path / "b" / "latest").mkdir()
    for name in "ab":
        step, said = search(tmp_path / name)
        assert step == 10
        assert len(said) == 2 and f"{tmp_path / name / 'latest'}" in said[0]


def test_latest_names_what_is_not_there(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, latest=11)
    step, said = search(tmp_path)
    assert step == 10
    assert said[0].endswith("latest names global_step11, which does not exist")


def test_a_person_rewound(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 100, latest=10)
    step, said = search(tmp_path)
    assert step == 10
    assert said == ["global_step100 is newer than global_step10, which latest names"]


def test_a_broken_one_does_not_give_way_to_what_a_rewind_left(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 100, latest=10)
    (tmp_path / "global_step10" / "cursor.json").unlink()
    assert search(tmp_path)[0] == 9
    (tmp_path / "global_step9" / "cursor.json").unlink()
    step, said = search(tmp_path)
    assert step == 100
    assert said[-1] == "resuming from global_step100, the newest resumable checkpoint"


def truncate(place: Path) -> None:
    os.truncate(place / "weights" / "__0_0.distcp", 499)


def flip(place: Path) -> None:
    path = place / "weights" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[250] ^= 1
    path.write_bytes(data)


def swap(place: Path) -> None:
    other = place.parent / "global_step9" / "weights" / "__0_0.distcp"
    (place / "weights" / "__0_0.distcp").write_bytes(other.read_bytes())


def lose(place: Path) -> None:
    (place / "weights" / "__0_0.distcp").unlink()


def unfinish(place: Path) -> None:
    (place / "manifest.json").unlink()


def garble(place: Path) -> None:
    os.truncate(place / "manifest.json", 40)


def impersonate(place: Path) -> None:
    place.rename(place.parent / "aside")
    (place.parent / "global_step9").rename(place)
    make(place.parent, 9, latest="global_step10")


FAULTS = [
    (truncate, "weights/__0_0.distcp: 499 bytes, the manifest says 500"),
    (flip, "weights/__0_0.distcp: its digest differs"),
    (swap, "weights/__0_0.distcp: its digest differs"),
    (lose, "weights/__0_0.distcp: No such file"),
    (unfinish, "has no manifest.json, so it is not complete"),
    (garble, "manifest.json is not JSON"),
    (impersonate, "holds the manifest of step 9"),
]


@pytest.mark.parametrize(
    ("damage", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage: object, fault: str) -> None:
    make(tmp_path, 9, 10)
    damage(tmp_path / "global_step10")  # type: ignore[operator]
    step, said = search(tmp_path)
    assert step == 9
    assert said[0].startswith("global_step10 is not usable: ")
    assert fault in said[0]
    assert said[1:] == ["resuming from global_step9, the newest resumable checkpoint"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("optimizer/__0_0.distcp", "it holds weights alone, from which no training resumes"),
        ("weights/__0_0.distcp", "it holds no weights, without which no training resumes"),
        ("cursor.json", "it holds no cursor, without which no training resumes"),
    ],
)
def test_a_checkpoint_with_parts_missing_gives_way_to_a_whole(
    tmp_path: Path, missing: str, said: str
) -> None:
    make(tmp_path, 9, 10)
    describe(tmp_path / "global_step10", 10, missing)
    assert search(tmp_path) == (
        9, [f"global_step10 is not usable: {said}", "resuming from global_step9, the newest resumable checkpoint"],
    )  # fmt: skip


NEWER = {"schema": 99}
OTHER_HASH = {"digest_algorithm": "blake3"}
OTHER_MODEL = {"model": {"model.layers": 70}}


@pytest.mark.parametrize(
    "change", [NEWER, OTHER_HASH, OTHER_MODEL], ids=["newer", "other-digests", "other-model"]
)
def test_one_that_is_not_ours_to_judge_is_not_trained_over(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    make(tmp_path, 9, 10)
    describe(tmp_path / "global_step10", 10, **change)
    need = ResumeNeed({"model.layers": 4})
    with pytest.raises(
        CheckpointError,
        match="global_step10 is newer than global_step9 and not for this run to judge",
    ):
        find_resumable(tmp_path, "digests", False, print, need=need)
    (tmp_path / "latest").write_text("global_step9")
    assert find_resumable(tmp_path, "digests", False, print, need=need) == 9


def test_damage_found_by_reading_counts_where_sizes_would_do(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "main"
    make(folder, 9, 10)
    manifest = (folder / "global_step10" / "manifest.json").read_bytes()
    record = {
        "identity": hashlib.sha256(manifest).hexdigest(),
        "bad": ["weights/__0_0.distcp: its digest differs"],
    }
    path = tmp_path / "run" / "state" / "checkpoints" / "main" / "digests" / "global_step10.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    assert search(folder, verify="sizes")[0] == 9
    assert search(folder, verify="digests")[0] == 10, "the bytes decide, where they are read"
    path.write_text(json.dumps({**record, "identity": "another"}))
    assert search(folder, verify="sizes")[0] == 10
    path.write_text("garbage")
    assert search(folder, verify="sizes")[0] == 10


def test_sizes_alone_do_not_read_the_bytes(tmp_path: Path) -> None:
    make(tmp_path, 9, 10)
    flip(tmp_path / "global_step10")
    assert search(tmp_path, verify="sizes") == (10, [])
    truncate(tmp_path / "global_step10")
    assert search(tmp_path, verify="sizes")[0] == 9


def test_none_resumable_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 9, 10)
    lose(tmp_path / "global_step9")
    unfinish(tmp_path / "global_step10")
    said = r"holds 2 checkpoint\(s\) \(global_step9, global_step10\) but none is resumable"
    with pytest.raises(CheckpointError, match=said):
        search(tmp_path)


def test_latest_without_any_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(
        CheckpointError, match=r"exists but .* holds no checkpoint; restore one, or remove latest"
    ):
        search(tmp_path)


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "main").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot be read"):
        search(tmp_path / "main")


def test_a_replacement_killed_half_way_is_undone_or_finished(tmp_path: Path) -> None:
    make(tmp_path, 9, 10)
    (tmp_path / "global_step10").rename(tmp_path / ".global_step10.replaced-abc")
    step, said = search(tmp_path)
    assert (step, len(said)) == (10, 1)
    assert "put global_step10 back" in said[0]
    (tmp_path / ".global_step10.replaced-def").mkdir()
    assert search(tmp_path)[0] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step10",
        "global_step9",
        "latest",
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=30), st.integers(1, 9))
def test_shares_cover_every_file_once_and_evenly(sizes: list[int], ranks: int) -> None:
    """Files that do not exist are all named: by one rank each."""
    files = tuple(FileEntry(f"f{number}", size, "") for number, size in enumerate(sizes))
    manifest = Manifest(1, 0, 0, files, {}, {}, "", 0.0)
    shares = [verify_share(Path("/nonexistent"), manifest, rank, ranks) for rank in range(ranks)]
    named = [line.split(":")[0] for share in shares for line in share]
    assert sorted(named) == sorted(entry.path for entry in files)
    weight = {entry.path: entry.bytes + 4096 for entry in files}
    loads = [sum(weight[line.split(":")[0]] for line in share) for share in shares]
    assert max(loads) - min(loads) <= max(weight.values(), default=0)


def test_a_missing_step_is_named(tmp_path: Path) -> None:
    make(tmp_path, 9)
    with pytest.raises(CheckpointError, match="global_step7 does not exist"):
        read_checkpoint(tmp_path, 7)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, trainer.contract.checkpoints; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global_step5.discarded", ("global_step5", 5, "discarded")),
        ("global_step5.discarded-2", ("global_step5", 5, "discarded")),
        ("global_step5.superseded", ("global_step5", 5, "superseded")),
        ("global_step5.set-aside-3", ("global_step5", 5, "set-aside")),
        (".global_step5.partial-ab", ("global_step5", 5, "partial")),
        (".global_step5.partial-ab-12.replaced-x", ("global_step5", 5, "partial")),
        (".global_step5.replaced-ab", ("global_step5", 5, "replaced")),
        (".global_step5.pruning-0123456789ab", ("global_step5", 5, "pruning")),
        (
            ".global_step5.superseded-2.pruned-0123456789ab",
            ("global_step5.superseded-2", 5, "pruned"),
        ),
        *(
            (name, None)
            for name in (
                "global_step5", "global_step5.discarded.old", "global_stepX.discarded", ".latest.x", "latest",
                ".global_step5.pruning-x", ".global_step5.set-aside.pruned-0123456789ab", ".out.partial-ab",
                ".global_step5.tar.partial-ab", "global_step5_universal.discarded", ".global_step5.partial-",
            )
        ),
    ],
)  # fmt: skip
def test_what_a_name_beside_the_checkpoints_says(
    name: str, said: tuple[str, int, str] | None
) -> None:
    assert aside_name(name) == (None if said is None else AsideName(*said))
