"""The records of the jobs as others read them, and the table of the jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tr11ops.cron.cards import CARD, card
from tr11ops.base.observed import Unknown
from tr11ops.base.shipped import shipped
from tr11ops.cron.jobs import (
    Daily,
    Every,
    chain_schedule,
    due,
    find_job,
    of_chain,
    table,
    unknown_skips,
    wanted,
)
from tr11ops.runcard.card import CardError, load_card
from tr11ops.rundir.cron_records import (
    ChainState,
    PeriodicJobState,
    chain_file,
    job_file,
    read_chains,
    read_jobs,
    write_chain,
    write_job,
)
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

ROUND = PeriodicJobState("pulse", "slurm", "n1", 10.0, 12.5, 1, "", 3600.0, 7, 0, 3600.0)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "small", "main"), tmp_path / "run" / "kill-switch"
    )


# ----------------------------------------------------------------------------- records
def test_records_come_back_as_they_were(directory: RunDirectory) -> None:
    assert read_jobs(directory) == ()
    assert read_chains(directory) == ()
    running = PeriodicJobState(
        "digest", "daemon", "n2", 1e9, None, None, "", 86400.0, 1, 0, 1e9 + 1
    )
    chain = ChainState("hourly", "123", 5.0, 3600.0)
    for state in (ROUND, running):
        write_job(directory, state)
    write_chain(directory, chain)
    assert read_jobs(directory) == (running, ROUND)
    assert read_chains(directory) == (chain,)
    assert running.is_running and not ROUND.is_running
    assert job_file(directory, "pulse").stat().st_mode & 0o060 == 0o060


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"name": "pulse"}',
        b"nul\0",
        b'{"name": "digest", "started": 1}',
        b"[" * 100_000,
    ],
)
def test_a_record_that_cannot_be_read_is_unknown_and_not_none(
    directory: RunDirectory, content: bytes
) -> None:
    write_job(directory, ROUND)
    job_file(directory, "pulse").write_bytes(content)
    chain_file(directory, "daily").write_bytes(content)
    assert isinstance(read_jobs(directory), Unknown)
    assert isinstance(read_chains(directory), Unknown)


@pytest.mark.parametrize(
    ("key", "value"),
    [("started", "yesterday"), ("runs", True), ("next_due", None), ("ended", float("nan"))],
)
def test_numbers_must_be_numbers(directory: RunDirectory, key: str, value: object) -> None:
    write_job(directory, ROUND)
    path = job_file(directory, "pulse")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    found = read_jobs(directory)
    assert isinstance(found, Unknown) and key in found.why


def test_other_files_in_the_folder_are_no_jobs(directory: RunDirectory) -> None:
    write_job(directory, ROUND)
    folder = job_file(directory, "pulse").parent
    for name in ("pulse.log", ".pulse.json.x1", "UPPER.json", "chain-hourly.json.bak", "-.json"):
        (folder / name).write_text("x")
    assert read_jobs(directory) == (ROUND,)
    with pytest.raises(ValueError, match="cannot name"):
        job_file(directory, "../x")


# ----------------------------------------------------------------------------- the table
def test_the_table_follows_the_card(tmp_path: Path) -> None:
    jobs = {job.name: job for job in table(card(tmp_path))}
    assert list(jobs) == ["pulse", "nodes-check", "digest", "sync", "filesystems", "backup"]
    assert jobs["pulse"].schedule == Every(300) and jobs["nodes-check"].schedule == Every(21_600)
    assert jobs["digest"].schedule == Daily("08:00", "UTC")
    assert jobs["filesystems"].unwanted == "no [[filesystems]]"
    assert jobs["sync"].unwanted == "no hub.repository"
    assert jobs["backup"].unwanted == "neither backup.store nor backup.url"
    changed = {
        job.name: job
        for job in table(
            card(
                tmp_path, "alerts.interval_minutes=10", "alerts.digest_time=", "alerts.time_zone=Europe/Paris",
                "cron.daily_time=05:15", 'cron.skip=["nodes-check", "backupp"]',
                "hub.repository=lab/logs", "hub.interval_minutes=30",
                more='\n[[filesystems]]\nname = "S"\nsource = "df"\npath = "."\n',
            )
        )
    }  # fmt: skip
    assert changed["pulse"].schedule == Every(600)
    assert changed["sync"].schedule == Every(1800)
    assert changed["digest"].unwanted and changed["nodes-check"].unwanted == "cron.skip"
    assert (
        changed["filesystems"].schedule == Daily("05:15", "Europe/Paris")
        and changed["filesystems"].chain == "daily"
    )
    assert [job.name for job in wanted(tuple(changed.values()))] == ["pulse", "sync", "filesystems"]


def test_copies_are_made_on_the_spot_or_as_a_job_of_their_own(tmp_path: Path) -> None:
    by_hand = find_job(
        table(card(tmp_path, "backup.store=archive", "backup.time_limit=03:00:00")), "backup"
    )
    assert (by_hand.words, by_hand.timeout_seconds, by_hand.chain) == (
        ("backup", "run"),
        10_800,
        "daily",
    )
    assert (
        by_hand.schedule == Daily("04:00", "UTC")
        and not by_hand.unwanted
        and by_hand.answers == {0}
    )
    as_job = find_job(
        table(card(tmp_path, "backup.url=gs://b/c", "backup.partition=archive")), "backup"
    )
    assert as_job.words == ("backup", "run", "--submit")
    often = find_job(
        table(card(tmp_path, "backup.store=archive", "backup.interval_hours=6")), "backup"
    )
    assert (often.schedule, often.chain) == (Every(21_600), "hourly")


def test_every_job_is_a_command_that_there_is() -> None:
    """The first words of each job name a command of tr11, and its options parse."""
    from tr11ops.cli.main import COMMANDS

    for job in table(load_card(CARD, (), {})):
        assert job.words[0] in COMMANDS, job.name


def test_what_is_due_comes_in_the_order_of_the_table(tmp_path: Path) -> None:
    jobs = table(card(tmp_path))
    assert [job.name for job in due(jobs, {}, 1e9)] == ["pulse", "nodes-check", "digest"]
    assert [job.name for job in due(jobs, {"pulse": 1e9, "digest": 1e9}, 1e9)] == ["nodes-check"]


def test_chains_begin_as_often_as_their_jobs_need(tmp_path: Path) -> None:
    hourly = card(tmp_path)
    assert chain_schedule(hourly, table(hourly), "hourly") == Every(300)
    assert chain_schedule(hourly, table(hourly), "daily") == Daily("04:00", "UTC")
    assert of_chain(table(hourly), "daily") == ()
    often = card(tmp_path, "alerts.interval_minutes=1")
    # a job of Slurm is not for every minute
    assert chain_schedule(often, table(often), "hourly") == Every(300)
    rare = card(tmp_path, "alerts.interval_minutes=1440")
    assert chain_schedule(rare, table(rare), "hourly") == Every(3600)
    none = card(tmp_path, 'cron.skip=["pulse", "nodes-check", "digest"]')
    assert chain_schedule(none, table(none), "hourly") == Every(3600)


def test_faults_of_the_card_are_said(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="Europe/Atlantis"):
        table(card(tmp_path, "alerts.time_zone=Europe/Atlantis"))
    odd = card(tmp_path, 'cron.skip=["pulze"]')
    assert unknown_skips(odd, table(odd)) == ("pulze",)
    with pytest.raises(ValueError, match="did you mean 'pulse'"):
        find_job(table(odd), "pulze")


def test_each_shipped_script_runs_a_job_of_the_table() -> None:
    names = {job.name for job in table(load_card(CARD, (), {}))}
    scripts = [
        *shipped("cron", "cron.hourly").glob("*.slurm"),
        *shipped("cron", "cron.daily").glob("*.slurm"),
    ]
    assert {path.stem.removeprefix("tr11-") for path in scripts} == names
    for path in scripts:
        assert f"tr11 cron run {path.stem.removeprefix('tr11-')} " in path.read_text()
        assert subprocess.run([shutil.which("bash") or "bash", "-n", path]).returncode == 0
