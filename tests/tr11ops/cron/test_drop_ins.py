"""A script that someone drops into cron.hourly or cron.daily is a periodic job: run, claimed, ended
in time, on record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import NODES, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cron.cards import card
from tr11ops.base.observed import known
from tr11ops.base.shipped import shipped
from tr11ops.cron.jobs import Daily, Every, drop_ins, every_job, script_command, wanted
from tr11ops.rundir.cron_records import job_file, read_job
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths


def drop(folder: Path, name: str, text: str, mode: int = 0o644) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def test_scripts_become_jobs(tmp_path: Path) -> None:
    hourly, daily = tmp_path / "cron.hourly", tmp_path / "cron.daily"
    drop(hourly, "Disk Usage_2.slurm", "#!/bin/sh\n#SBATCH --time=00:05:00\ntrue\n")
    drop(daily, "10-locate.slurm", "#!/usr/bin/env -S python3 -I\n#SBATCH -t 90\n")
    drop(daily, "odd.slurm", "#SBATCH --time=soon\n")
    drop(hourly, "open.slurm", "true", 0o664)
    drop(hourly, "notes.txt", "no job")
    drop(hourly, ".hidden.slurm", "true")
    (hourly / "lost.slurm").symlink_to(tmp_path / "nowhere")
    # a job of the table
    (hourly / "tr11-pulse.slurm").symlink_to(shipped("cron", "cron.hourly", "tr11-pulse.slurm"))
    jobs = {
        job.name: job
        for job in drop_ins(card(tmp_path, 'cron.skip=["odd"]'), (tmp_path, tmp_path / "none"))
    }
    assert set(jobs) == {"disk-usage-2", "script-10-locate", "odd", "open", "lost"}
    usage, locate = jobs["disk-usage-2"], jobs["script-10-locate"]
    assert (usage.schedule, usage.timeout_seconds, usage.chain, usage.unwanted) == (
        Every(3600),
        300,
        "hourly",
        "",
    )
    assert (locate.schedule, locate.timeout_seconds, locate.chain) == (
        Daily("04:00", "UTC"),
        5400,
        "daily",
    )
    assert usage.script is not None and locate.script is not None
    assert script_command(usage.script) == ["/bin/sh", str(usage.script)]
    assert script_command(locate.script)[:3] == ["/usr/bin/env", "-S", "python3"]
    assert "chmod go-w" in jobs["open"].unwanted and "is a link" in jobs["lost"].unwanted
    assert jobs["odd"].unwanted.startswith("#SBATCH --time of")
    assert all(
        job_file(RunDirectory(RunPaths(tmp_path, "small", "main"), tmp_path), name) for name in jobs
    )


def test_another_users_script_is_not_run_in_this_ones_name(tmp_path: Path) -> None:
    path = drop(tmp_path / "cron.hourly", "theirs.slurm", "true")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        [job] = drop_ins(card(tmp_path), (tmp_path,))
        assert "belongs to another user" in job.unwanted


def test_links_to_private_files_and_open_folders_are_refused(tmp_path: Path) -> None:
    """A run directory is often a group's: who may put a name there must not choose what runs as
    someone else.
    """
    private = drop(tmp_path / "home", "notes.txt", "password", 0o600)
    hourly, daily, elsewhere = (
        tmp_path / "cron.hourly",
        tmp_path / "cron.daily",
        tmp_path / "elsewhere",
    )
    drop(hourly, "mine.slurm", "true")
    (hourly / "x.slurm").symlink_to(private)
    drop(elsewhere, "other.slurm", "true")
    daily.symlink_to(elsewhere)

    def faults() -> dict[str, str]:
        return {job.name: job.unwanted for job in drop_ins(card(tmp_path), (tmp_path,))}

    assert (
        faults()["mine"] == ""
        and "x.slurm is a link" in faults()["x"]
        and "cron.daily is a link" in faults()["other"]
    )
    with pytest.raises(ValueError, match="is a link"):
        script_command(hourly / "x.slurm")
    hourly.chmod(0o2775)
    assert faults()["mine"] == f"others may change the folder: chmod go-w {hourly}"
    with pytest.raises(
        ValueError, match="chmod go-w"
    ):  # as `tr11 cron run mine` asks for it by name
        script_command(hourly / "mine.slurm")
    hourly.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(hourly, 12345, 12345)
        assert "cron.hourly belongs to another user" in faults()["mine"]


def test_of_two_of_one_name_the_run_directorys_counts(tmp_path: Path) -> None:
    made = card(tmp_path)
    directory = RunDirectory(
        RunPaths(tmp_path / "run", "small", "main"), tmp_path / "run" / "kill-switch"
    )
    drop(tmp_path / "cron.hourly", "mine.slurm", "true")
    ours = drop(directory.root / "cron.hourly", "mine.slurm", "true")
    drop(directory.root / "cron.hourly", "pulse.slurm", "true")
    scripts = [job for job in every_job(made, directory, tmp_path) if job.script is not None]
    assert [job.script for job in scripts] == [ours]
    assert wanted(every_job(made, directory, tmp_path))[-1].name == "mine"
    assert replace(scripts[0], unwanted="x").command_words == str(ours)


# ----------------------------------------------------------------------------- as it is typed
@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[LocalBench]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", str(NODES))
    monkeypatch.delenv("TR11_RUN", raising=False)
    yield LocalBench(tmp_path, capsys)


def test_it_runs_with_the_others_and_is_seen_with_them(bench: LocalBench) -> None:
    directory = run_directory(bench)
    good = 'echo "looks after $TR11_RUN"; echo x >> counted\n'
    drop(directory.root / "cron.hourly", "look-after.slurm", f"#!/bin/bash\n{good}")
    drop(bench.card.parent / "cron.hourly", "breaks.slurm", "#!/bin/bash\necho no luck; exit 7\n")
    words = ("--run", str(bench.card), "--set", 'cron.skip=["pulse", "digest", "nodes-check"]')
    shown = bench.tr11("cron", "list", *words).out
    assert "look-after" in shown and "hourly" in shown
    assert bench.tr11("cron", "run", "--once", *words).code == 1  # one of them failed
    assert bench.tr11("cron", "run", "--once", *words).code == 0  # none is due
    assert (bench.folder / "counted").read_text() == "x\n"
    state = known(read_job(directory, "look-after"), None)
    assert state is not None and (state.exit_code, state.runs, state.interval_seconds) == (
        0,
        1,
        3600.0,
    )
    output = directory.paths.state / "cron" / "look-after.log"
    assert f"looks after {bench.card}" in output.read_text()
    seen = bench.tr11("cron", "status", *words)
    assert seen.code == 1 and "breaks failed: exit code 7: no luck" in seen.out
    assert re.search(r"tr11 cron run --run \S+ breaks", seen.out)
    assert "look-after" in seen.out
    (bench.card.parent / "cron.hourly" / "breaks.slurm").unlink()  # moved away, it is over
    assert bench.tr11("cron", "status", *words).code == 0
    drop(directory.root / "cron.hourly", "odd.slurm", "#!/bin/sh -c 'no end\n")
    assert bench.tr11("cron", "run", "odd", *words).code == 1
    odd = known(read_job(directory, "odd"), None)
    assert odd is not None and odd.exit_code == 127 and "No closing quotation" in odd.message
