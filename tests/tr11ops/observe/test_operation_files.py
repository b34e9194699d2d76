"""What is read of the operation around a run: from files that are there, absent, garbled, or not to
be read; and what is large below the run's directory: by name, within a bound.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins
from msgspec.structs import asdict

from tests.tr11ops.status_cases import NOW, beats, save_checkpoint, save_marker
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import JobState
from tr11ops.cluster.site import SiteRules, keep_site
from tr11ops.observe import operation_files as largest, operation_files as reading
from tr11ops.observe.files import read_attempts
from tr11ops.observe.look import facts_of, observe
from tr11ops.observe.observations import Copied, CopyStatus, FolderRoom
from tr11ops.observe.operation_files import largest_below
from tr11ops.observe.snapshot import Attempt, RunFacts
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.runcard.watching import WatchSection
from tr11ops.rundir import cron_records as periodic
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EndMarker, Heartbeat
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

JOBCOMP = Path(__file__).parents[2] / "data" / "slurm" / "22.05" / "jobcomp.txt"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "demo", "main"), tmp_path / "run" / "kill-switch"
    )


def card(name: str, *overrides: str) -> Any:
    return load_card(shipped_folder() / f"{name}.toml", overrides, os.environ, keep_undefined=True)


def watched(directory: RunDirectory, **facts: Any) -> RunFacts:
    return RunFacts("demo", "main", directory.root, directory.kill_switch, **facts)


# ----------------------------------------------------------------------------- the card
def test_the_facts_of_the_large_run() -> None:
    facts = facts_of(card("tr11-176B-ml"))
    assert (facts.partition, facts.allocated_nodes) == ("gpu_p5", 50)
    assert (
        facts.copies is not None and facts.copies.copies_checkpoints and facts.sync_seconds == 3600
    )
    assert len(facts.used_files) == 2 * 28  # its tokenizer is a hub id, in no cache here
    rules = {rule.name: rule for rule in facts.filesystems}
    assert rules["SCRATCH"].most_bytes == 400 * 2**40
    assert (rules["SCRATCH"].bytes_percent, rules["WORKSF"].inodes_limit) == (75, 3_000_000)
    assert rules["SCRATCH-shared"].least_free_bytes == 100 * 2**40
    assert facts.periodic_jobs is not None
    assert "pulse" in facts.periodic_jobs


def test_a_card_that_asks_for_nothing() -> None:
    facts = facts_of(card("rehearsal", 'cron.skip=["pulse"]'))
    assert (facts.copies, facts.sync_seconds) == (None, None)
    assert (facts.filesystems, facts.used_files) == ((), ())
    assert facts.periodic_jobs is not None
    assert "pulse" not in facts.periodic_jobs


def test_where_copies_go_says_which_steps_must_be_copied() -> None:
    weights = ("backup.url=gs://bucket/x", "backup.full_interval=0")
    for interval, copied in ((300, True), (0, False)):
        only_url = card("rehearsal", *weights, f"backup.weights_interval={interval}")
        copies = facts_of(only_url).copies
        assert copies is not None and copies.copies_checkpoints is copied


def test_what_costs_of_a_card_is_worked_out_once_and_when_it_is_asked_for(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def every_job(*_: object) -> list[object]:
        asked.append("periodic jobs")
        return []

    def exit_plan(_: object) -> ExitPlan:
        asked.append("exit plan")
        return ExitPlan(90.0, "a step", limit=7200.0)

    monkeypatch.setattr("tr11ops.cron.jobs.every_job", every_job)
    monkeypatch.setattr("tr11ops.runcard.exit_duration.exit_plan", exit_plan)
    directory.root.mkdir()
    facts = facts_of(card("rehearsal", "slurm.time_limit=02:00:00"))
    assert observe(directory, facts, Unknown("not asked"), NOW).run is facts
    assert asked == []
    for _ in range(2):
        plan = facts.exit_plan
        assert plan is not None and facts.periodic_jobs == ()
        assert [plan.seconds_within(limit) for limit in (None, 7200, 3600)] == [5400, 5400, 1800]
    assert asked == ["exit plan", "periodic jobs"]


# ----------------------------------------------------------------------------- everything at once
def test_an_empty_run_directory_is_seen_and_holds_nothing(directory: RunDirectory) -> None:
    directory.root.mkdir()
    seen = reading.see_operation(
        directory, watched(directory, watch=WatchSection(scratch_purge_days=30)), (), ()
    )
    assert asdict(seen) == {
        "ended_jobs": (),
        "holds": (),
        "holds_changed": None,
        "backup": None,
        "sync": None,
        "periodic_jobs": (),
        "chains": (),
        "usage": (),
        "clocks": (),
        "least_used": (),
        "shut_folders": (),
        "save_room": None,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, []),
        ({"f_bavail": 0}, ["no byte is left"]),
        ({"f_favail": 0}, ["no inode is left"]),
        ({"f_flag": os.ST_RDONLY, "f_bavail": 0}, ["read-only"]),
        ({"f_files": 0, "f_favail": 0}, []),  # it counts no inodes
    ],
)
def test_folders_that_no_one_can_write_to(
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    why: list[str],
) -> None:
    directory.paths.state.mkdir(parents=True)
    room = SimpleNamespace(
        **{"f_flag": 0, "f_blocks": 9, "f_bavail": 9, "f_files": 9, "f_favail": 9, **changes}
    )
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    found = reading.read_unwritable_directories(directory.paths)
    assert not isinstance(found, Unknown)
    assert [(folder.path, folder.why) for folder in found] == [
        (str(directory.root), text) for text in why
    ]


def test_the_room_for_the_next_save_is_that_of_the_checkpoints_folder(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reading.read_save_room(directory.paths) is None
    directory.paths.checkpoints.mkdir(parents=True)
    room = SimpleNamespace(f_bavail=7, f_blocks=64, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    assert reading.read_save_room(directory.paths) == FolderRoom(
        str(directory.root), 7 * 4096, 64 * 4096
    )


def test_a_mount_of_all_checkpoints_is_looked_at_whole(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core dump beside the variant's folder filled it, and was not looked for."""
    mount = directory.paths.checkpoints.parent
    directory.paths.checkpoints.mkdir(parents=True)
    core = mount / "core-dumps" / "core.python.4711"
    core.parent.mkdir()
    core.write_bytes(b"x" * 2**20)
    real = os.stat
    other = real(directory.root).st_dev + 1

    def stat(path: object, **options: Any) -> Any:
        found = real(path, **options)  # type: ignore[call-overload]
        if Path(str(path)).is_relative_to(mount):
            return os.stat_result((*found[:2], other, *found[3:]))
        return found

    monkeypatch.setattr(os, "stat", stat)
    room = SimpleNamespace(f_bavail=0, f_blocks=64, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(reading, "largest_below", lambda root: ({str(root): 1}, True))
    assert reading.read_save_room(directory.paths) == FolderRoom(
        str(mount), 0, 64 * 4096, {str(mount): 1}, True
    )


GARBAGE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"time": "yesterday"}',
    b"\xff\xfe\x00",
    b'{"time": true}',
    b'{"time": NaN}',
    b'{"time": 1' + b"0" * 400 + b"}",
]


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_is_unknown_and_never_none(directory: RunDirectory, content: bytes) -> None:
    state = directory.paths.state
    for path in (
        state / "backup/status.json",
        state / "sync/status.json",
        state / "cron/pulse.json",
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    seen = reading.see_operation(directory, watched(directory), (), ())
    for value in (seen.backup, seen.sync, seen.periodic_jobs):
        assert isinstance(value, Unknown)
        assert value.why


def test_a_folder_where_a_file_belongs_is_unknown(directory: RunDirectory) -> None:
    (directory.paths.state / "backup" / "status.json").mkdir(parents=True)
    (directory.paths.requests / "holds.json").mkdir(parents=True)
    seen = reading.see_operation(directory, watched(directory), (), ())
    assert isinstance(seen.backup, Unknown)
    assert isinstance(seen.holds, Unknown)


# --------------------------------------------------------------------- copies, holds, periodic jobs
def test_copies_as_the_contract_writes_them(directory: RunDirectory) -> None:
    state = directory.paths.state
    write_json(
        state / "backup/status.json", {"schema": 1, "time": NOW, "step": 31000, "message": ""}
    )
    write_json(
        state / "sync/status.json", {"schema": 1, "time": NOW, "step": None, "message": "3 files"}
    )
    seen = reading.see_operation(directory, watched(directory), (), ())
    assert seen.backup == CopyStatus(NOW, 31000, "")
    assert seen.sync == CopyStatus(NOW, None, "3 files")


def test_a_backup_says_all_its_copies_and_what_is_damaged(directory: RunDirectory) -> None:
    status = {
        "schema": 1,
        "time": NOW,
        "step": 3000,
        "message": "",
        "damaged": ["store: step 9\n[31m (full): a"],
    }
    write_json(
        directory.paths.state / "backup/status.json",
        {**status, "copied": {"url": {"weights": [3000, 6000]}}},
    )
    seen = reading.see_operation(directory, watched(directory), (), ()).backup
    copied = (Copied("url", "weights", 3000), Copied("url", "weights", 6000))
    assert seen == CopyStatus(NOW, 3000, "", copied, ("store: step 9 [31m (full): a",))


@pytest.mark.parametrize(
    "odd",
    [
        {"copied": []},
        {"copied": {"url": [1]}},
        {"copied": {"url": {"full": ["x"]}}},
        {"damaged": {}},
    ],
)
def test_copies_that_cannot_be_understood_are_unknown(
    directory: RunDirectory, odd: dict[str, Any]
) -> None:
    write_json(
        directory.paths.state / "backup/status.json",
        {"schema": 1, "time": NOW, "step": 1, "message": "", **odd},
    )
    assert isinstance(reading.see_operation(directory, watched(directory), (), ()).backup, Unknown)


def test_holds_and_when_they_last_changed(directory: RunDirectory) -> None:
    path = directory.paths.requests / "holds.json"
    write_json(
        path,
        {
            "schema": 1,
            "holds": [{"job": "12", "who": "ben", "time": NOW, "why": "x"}, {"who": "?"}, 3],
        },
    )
    os.utime(path, (NOW, NOW + 5))
    seen = reading.see_operation(directory, watched(directory), (), ())
    assert (seen.holds, seen.holds_changed) == ((HoldRecord("12", "ben", NOW, "x"),), NOW + 5)


def test_a_pipe_in_a_files_place_holds_up_no_one(directory: RunDirectory) -> None:
    for name in ("backup/status.json", "requests/holds.json", "cron/pulse.json"):
        (directory.paths.state / name).parent.mkdir(parents=True)
        os.mkfifo(directory.paths.state / name)
    seen = reading.see_operation(directory, watched(directory), (), ())
    assert all(
        isinstance(value, Unknown) for value in (seen.backup, seen.holds, seen.periodic_jobs)
    )


def test_what_an_attempt_held_at_its_end_is_a_hold_too(directory: RunDirectory) -> None:
    write_json(
        directory.paths.requests / "holds.json",
        {"schema": 1, "holds": [{"job": "12", "who": "ben"}]},
    )
    verdict = AttemptVerdict(
        "kill-switch", 604, 604, 0, "[Detected ...]", held=("12", "101"), time=NOW
    )
    verdict.write(directory.paths.attempt("7"))
    write_json(directory.paths.attempt("8") / "verdict.json", {"held": 5})
    attempts = (Attempt("8", NOW, None), Attempt("7", NOW, None))
    seen = reading.see_operation(directory, watched(directory), (), attempts)
    by_attempt = tuple(HoldRecord(name, "tr11", NOW, "kill-switch") for name in ("12", "101"))
    assert seen.holds == (HoldRecord("12", "ben"), *by_attempt)


@pytest.mark.parametrize(
    ("because", "message", "why"),
    [
        ("n3 cannot be excluded: 2 of 8", "n3 failed", "n3 cannot be excluded: 2 of 8: n3 failed"),
        ("came back: n3 failed", "n3 failed", "came back: n3 failed"),
        ("", "n3 failed", "n3 failed"),
    ],
)
def test_a_hold_says_why_and_not_only_how_the_attempt_ended(
    directory: RunDirectory, because: str, message: str, why: str
) -> None:
    verdict = AttemptVerdict(
        "error", 6, 4, 1, message, held=("101",), time=NOW, held_because=because
    )
    verdict.write(directory.paths.attempt("7"))
    seen = reading.see_operation(directory, watched(directory), (), (Attempt("7", NOW, None),))
    assert seen.holds == (HoldRecord("101", "tr11", NOW, why, is_for_fault=True),)


def test_periodic_jobs_are_those_that_the_jobs_themselves_write(directory: RunDirectory) -> None:
    state = periodic.PeriodicJobState(
        "pulse", "crontab", "login1", NOW, NOW + 1, 2, "boom", 3600.0, 7, 3, NOW + 3600
    )
    periodic.write_job(directory, state)
    chain = periodic.ChainState("hourly", "77", NOW, NOW + 3600)
    periodic.write_chain(directory, chain)
    seen = reading.see_operation(directory, watched(directory), (), ())
    assert (seen.periodic_jobs, seen.chains) == ((state,), (chain,))


# ------------------------------------------------------------ jobs that the scheduler has forgotten
def test_forgotten_jobs_are_read_from_the_log_the_site_named(
    directory: RunDirectory, tmp_path: Path
) -> None:
    log = tmp_path / "jobcomp.txt"
    log.write_bytes(JOBCOMP.read_bytes())
    keep_site(directory.site, SiteRules(version="22.05.8", job_completions=str(log)))
    found = reading.read_ended_jobs(directory.site, "arr")
    assert not isinstance(found, Unknown)
    assert [(job.job_id, job.raw_id, job.state, job.exit_code) for job in found] == [
        ("1_1", "4", JobState.FAILED, 3),
        ("1_2", "1", JobState.FAILED, 3),
    ]
    assert reading.read_ended_jobs(directory.site, "another") == ()


@pytest.mark.parametrize("site", [None, {}, {"job_completions": ""}, {"job_completions": 3}])
def test_a_site_without_such_a_log_has_no_forgotten_jobs(
    directory: RunDirectory, site: dict[str, Any] | None
) -> None:
    if site is not None:
        write_json(directory.site, site)
    assert reading.read_ended_jobs(directory.site, "arr") == ()


def test_a_log_that_only_the_controller_sees_is_none(directory: RunDirectory) -> None:
    keep_site(directory.site, SiteRules(job_completions="/no/such/place/jobcomp.txt"))
    assert reading.read_ended_jobs(directory.site, "arr") == ()


# ----------------------------------------------------------------------------- clocks
def beat(paths: RunPaths, rank: int, host: str, written: float, stamped: float) -> Heartbeat:
    entry = Heartbeat(rank, host, 100 + rank, "training", 7, written, "12")
    write_json(paths.heartbeat(rank), to_builtins(entry))
    os.utime(paths.heartbeat(rank), (stamped, stamped))
    return entry


def test_a_few_ranks_of_each_host_tell_its_clock(directory: RunDirectory) -> None:
    given_beats = tuple(
        beat(directory.paths, rank, f"n{rank // 8}", NOW + rank, NOW) for rank in range(24)
    )  # fmt: skip
    marker = EndMarker("exit-duration", 7, 7, True, "", NOW + 90, "n9", "11")
    save_marker(directory.paths, marker)
    os.utime(directory.paths.end_marker("11"), (NOW, NOW))
    attempts = read_attempts(directory.paths)
    assert not isinstance(attempts, Unknown)
    found = reading.read_clocks(directory.paths, given_beats, attempts)
    assert not isinstance(found, Unknown)
    assert [(entry.host, entry.written - entry.stamped) for entry in found] == [
        ("n0", 0.0), ("n0", 1.0), ("n1", 8.0), ("n1", 9.0), ("n2", 16.0), ("n2", 17.0), ("n9", 90.0),
    ]  # fmt: skip


def test_heartbeats_that_vanish_or_are_garbled_are_left_out(directory: RunDirectory) -> None:
    gone, garbled = beats(ranks=2)
    directory.paths.heartbeats.mkdir(parents=True)
    directory.paths.heartbeat(garbled.rank).write_bytes(b'{"host": "n02", "time": "late"}')
    assert reading.read_clocks(directory.paths, (gone, garbled), ()) == ()


# ----------------------------------------------------------------------------- purge
def test_the_file_that_was_untouched_longest(directory: RunDirectory, tmp_path: Path) -> None:
    folder = save_checkpoint(directory.paths, 800, NOW)
    save_checkpoint(directory.paths, 700, NOW)
    weights = folder / "weights" / "part.bin"
    os.utime(weights, (NOW - 100, NOW - 900))  # read after it was written
    data = [tmp_path / name for name in ("a.bin", "a.idx", "absent.bin")]
    for path, age in zip(data[:2], (5000, 7000), strict=True):
        path.write_bytes(b"x")
        os.utime(path, (NOW - age, NOW - 9000))
    found = reading.read_least_used(directory.paths, data)
    assert not isinstance(found, Unknown)
    assert [(entry.what, entry.path, entry.time) for entry in found] == [
        ("checkpoint global_step800", weights, NOW - 100),
        ("data", data[1], NOW - 7000),
    ]


def test_only_so_many_files_of_a_checkpoint_are_looked_at(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(directory.paths, 800, NOW)
    for number in range(300):
        (folder / "weights" / f"{number}.bin").write_bytes(b"")
    looked: list[Path] = []
    least = reading._least

    def counting(what: str, files: Iterator[Path]) -> Any:
        entries = list(files)
        looked.extend(entries)
        return least(what, entries)

    monkeypatch.setattr(reading, "_least", counting)
    reading.read_least_used(directory.paths, ())
    assert 0 < len(looked) <= 2 * reading.FILES_PER_FOLDER


# ----------------------------------------------------------------------------- any content
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["time", "step", "holds", "job", "host", "message"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(value=anything)
def test_no_content_raises(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    root = tmp_path_factory.mktemp("any") / "run"
    directory = RunDirectory(RunPaths(root, "demo", "main"), root / "kill-switch")
    state = directory.paths.state
    for name in ("backup/status.json", "requests/holds.json", "site.json", "heartbeat/0.json"):
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    reading.see_operation(directory, watched(directory), beats(ranks=1), ())


MEGABYTE = 2**20


def write(path: Path, megabytes: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * int(megabytes * MEGABYTE))


def test_the_largest_things_by_name(tmp_path: Path) -> None:
    write(tmp_path / "core-dumps" / "core.python.4711", 3)
    write(tmp_path / "small-logs" / "logs" / "main" / "main_log.txt", 1)
    write(tmp_path / "small-logs" / "logs" / "main" / "deep" / "more.txt", 1)
    write(tmp_path / "checkpoints" / "main" / "global_step5" / "weights" / "0.bin", 9)
    write(tmp_path / "note", 0.1)
    (tmp_path / "elsewhere").symlink_to("/")
    found, is_all_seen = largest_below(tmp_path)
    names = [str(Path(path).relative_to(tmp_path)) for path in found]
    assert names == ["core-dumps/core.python.4711", "small-logs/logs/main", "note"] and is_all_seen
    assert list(found.values())[:2] == [3 * MEGABYTE, 2 * MEGABYTE]


@pytest.mark.parametrize(("bound", "value"), [("MOST_ENTRIES", 10), ("MOST_SECONDS", 0.0)])
def test_what_the_bound_leaves_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    for number in range(30):
        write(tmp_path / "folder" / str(number), 0.01)
    write(tmp_path / "large", 2)
    monkeypatch.setattr(largest, bound, value)
    found, is_all_seen = largest_below(tmp_path)
    assert not is_all_seen and set(found) <= {
        str(tmp_path / "large"),
        *(str(path) for path in tmp_path.glob("folder/*")),
    }


def test_what_cannot_be_read_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "large", 1)
    (tmp_path / "shut").mkdir()
    shut = str(tmp_path / "shut")
    scan = largest.os.scandir

    def refuse(path: Path) -> object:
        if str(path) == shut:
            raise PermissionError(13, "no", shut)
        return scan(path)

    monkeypatch.setattr(largest.os, "scandir", refuse)
    assert list(largest_below(tmp_path)[0]) == [str(tmp_path / "large")]
