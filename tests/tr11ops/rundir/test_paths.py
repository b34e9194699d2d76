"""The run directory's own paths and files: whole or absent, writable for the group, found again by
tag and comment.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tr11ops.rundir.paths import (
    DAMAGED,
    RunDirectory,
    Submission,
    is_tag,
    new_tag,
    parse_comment,
    remove_stop_file,
)
from trainer.contract.files import make_shared, write_json
from trainer.contract.paths import RunPaths


def directory(root: Path) -> RunDirectory:
    return RunDirectory(RunPaths(root, "run", "main"), root / "kill-switch")


def record(tag: str, job_id: str | None = "7") -> Submission:
    return Submission(
        tag, job_id, "local", 1.0, "me", "here", "run", "main", "1-3%1", 2, "hash", None, ("x1",)
    )


def test_looking_creates_nothing(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    assert (run.tags(), run.read_submissions(), run.attempt_ids(), run.checkpoint_steps()) == (
        [],
        [],
        [],
        [],
    )
    assert list(run.worker_logs("7")) == []
    assert not run.kill_switch_is_set() and remove_stop_file(run.kill_switch) is None
    assert not run.exists and list(tmp_path.iterdir()) == []


def test_tags_are_unique_and_sorted_by_time() -> None:
    tags = [new_tag(when) for when in (0.0, 1.0, 86400.0 * 365)]
    assert tags == sorted(tags) and all(map(is_tag, tags))
    assert len({new_tag(0.0) for _ in range(50)}) == 50
    assert not is_tag("../etc") and not is_tag(tags[0] + "/x")


def test_a_comment_leads_back_to_the_directory_by_any_path(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    tag = new_tag()
    assert parse_comment(run.comment(tag) + " and words") == (
        tag,
        directory(tmp_path / "link").mark,
    )
    assert directory(tmp_path / "other").mark != run.mark
    for text in ("", "tr11:", "tr11:20260101-000000-00000000", f"tr11:{tag}@short"):
        assert parse_comment(text) is None


def test_submissions_come_back_as_written(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    first, second = record(new_tag(1.0)), record(new_tag(2.0), None)
    run.write_submission(second)
    run.write_submission(first)
    (run.submissions / "notes").mkdir()
    (run.submissions / new_tag(3.0)).mkdir()  # died before its record
    assert run.read_submissions() == [first, second]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tag": "x"}'])
def test_a_damaged_record_is_in_doubt_and_not_an_absent_one(tmp_path: Path, text: str) -> None:
    """Its job may live: it is looked for as that of a submission whose answer was lost."""
    run = directory(tmp_path / "run")
    tag = new_tag(86400.0)
    run.write_submission(record(tag))
    paths = run.submission(tag)
    write_json(paths.card, {"run": {"name": "run", "variant": "main"}, "slurm": {"nodes": 2}})
    paths.record.write_text(text)
    [found] = run.read_submissions()
    assert (found.tag, found.job_id, found.time, found.run, found.nodes) == (
        tag,
        None,
        86400.0,
        "run",
        2,
    )
    assert found.note.startswith(DAMAGED) and str(paths.record) in found.note
    paths.card.write_text("{")
    assert run.read_submissions()[0].run == ""


def test_files_and_folders_are_the_groups_whatever_the_umask(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    before = os.umask(0o077)
    try:
        run.write_submission(record(new_tag()))
        write_json(run.kill_switch, {"who": "me"})
    finally:
        os.umask(before)
    for path in (run.root, run.submissions, run.submission(run.tags()[0]).folder):
        assert stat.S_IMODE(path.stat().st_mode) & 0o070 == 0o070
    for path in (run.kill_switch, run.submission(run.tags()[0]).record):
        assert stat.S_IMODE(path.stat().st_mode) & 0o060 == 0o060


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o2750)
    make_shared(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2750


def test_kill_switch_is_anything_that_lies_there(tmp_path: Path) -> None:
    run = directory(tmp_path)
    run.kill_switch.symlink_to(tmp_path / "nowhere")
    assert run.kill_switch_is_set()
    assert remove_stop_file(run.kill_switch) is None and not run.kill_switch_is_set()
    run.kill_switch.mkdir()
    (run.kill_switch / "inside").touch()
    aside = remove_stop_file(run.kill_switch)
    assert aside is not None and (aside / "inside").exists() and not run.kill_switch_is_set()
    run.kill_switch.write_text("by hand")
    assert run.kill_switch_is_set()


def test_worker_logs_by_rank(tmp_path: Path) -> None:
    run = directory(tmp_path)
    for node, rank in (("b", 10), ("a", 2), ("a", 1)):
        path = run.paths.attempt("7") / "workers" / node / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (run.paths.attempt("7") / "workers" / "a" / "rank-x.log").touch()
    assert [(node, rank) for node, rank, _ in run.worker_logs("7")] == [
        ("a", 1),
        ("a", 2),
        ("b", 10),
    ]
