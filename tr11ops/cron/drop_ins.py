"""Scripts that a person has put into `cron.hourly` or `cron.daily`: periodic jobs as any other.

    RUN DIRECTORY/cron.hourly/*.slurm     CARD'S FOLDER/cron.hourly/*.slurm     and cron.daily in both

Of two of one name the run directory's counts. A script runs in the name of the user who has the
rounds run, so it must be theirs alone to change, and so must its folder: run directories are often
a group's. Those that tr11 ships (`tr11-pulse.slurm`) name jobs of the table, and are left out here.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

from tr11ops.cron.jobs import ChainName, PeriodicJob, daily, table, unless_skipped
from tr11ops.cron.schedule import Every
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.slurm_syntax import parse_time_limit
from tr11ops.rundir.paths import RunDirectory

FOLDERS: tuple[tuple[str, ChainName], ...] = (("cron.hourly", "hourly"), ("cron.daily", "daily"))
SUFFIX = ".slurm"
SHIPPED = "tr11-"
HEAD_BYTES = 8192
_TIME = re.compile(r"^#SBATCH\s+(?:--time[= ]|-t\s*)(\S+)", re.MULTILINE)


def every_job(card: RunCard, directory: RunDirectory, card_folder: Path) -> tuple[PeriodicJob, ...]:
    """The jobs of the table, then the scripts. Raises CardError as `table` does."""
    jobs = table(card)
    taken = {job.name for job in jobs}
    found = {
        job.name: job
        for job in drop_ins(card, (card_folder, directory.root))
        if job.name not in taken
    }
    return (*jobs, *found.values())


def drop_ins(card: RunCard, roots: Iterable[Path]) -> tuple[PeriodicJob, ...]:
    """The scripts below these folders, in order; of a folder that cannot be listed there are none."""
    found = []
    for root in roots:
        for folder, chain in FOLDERS:
            fault = _folder_fault(root / folder)
            for path in _scripts(root / folder):
                found.append(_job(card, path, chain, fault or _fault(path)))
    return tuple(found)


def script_command(script: Path) -> list[str]:
    """How sbatch would run it: by the interpreter that its first line names, else by bash.

    Raises ValueError for a script that must not be run, though it was asked for by name, and for an
    odd first line.
    """
    fault = _folder_fault(script.parent) or _fault(script)
    if fault:
        raise ValueError(fault)
    first = _head(script).partition("\n")[0]
    try:
        if first.startswith("#!"):
            words = shlex.split(first[2:])
        else:
            words = []
    except ValueError as error:
        raise ValueError(f"the first line of {script} is no command: {error}") from None
    return [*(words or ["/bin/bash"]), str(script)]


def _scripts(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  a name is enough
    except OSError:
        return []
    return [
        folder / name
        for name in names
        if name.endswith(SUFFIX) and not name.startswith((".", SHIPPED))
    ]


def _job(card: RunCard, path: Path, chain: ChainName, unwanted: str) -> PeriodicJob:
    limit = card.cron.hourly_time_limit if chain == "hourly" else card.cron.daily_time_limit
    seconds = parse_time_limit(limit)
    if unwanted:
        asked = None
    else:
        asked = _TIME.search(_head(path))
    if asked:
        try:
            seconds = parse_time_limit(asked[1])
        except ValueError:
            unwanted = f"#SBATCH --time of {path} is no time limit"
    schedule = Every(3600) if chain == "hourly" else daily(card, card.cron.daily_time)
    job = PeriodicJob(
        _name(path),
        (),
        schedule,
        seconds,
        f"your script {path}",
        answers=frozenset({0}),
        chain=chain,
        unwanted=unwanted,
        script=path,
    )
    return unless_skipped(job, card.cron.skip)


def _name(path: Path) -> str:
    """A name that a record can have: `My Job_2.slurm` is my-job-2."""
    text = re.sub(r"[^a-z0-9]+", "-", path.name.removesuffix(SUFFIX).lower()).strip("-") or "script"
    return (text if text[0].isalpha() and not text.startswith("chain-") else f"script-{text}")[
        :64
    ].rstrip("-")


def _folder_fault(folder: Path) -> str:
    """Why no script of a folder is run, and what to type; "" when its scripts may be.

    Who can change a folder decides which script lies in it, and may put another user's private file
    there by a link.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{folder} is a link: make a folder of your own there (mkdir -m 755)"
    return _fault_of_rights(folder, status, "its scripts", "the folder")


def _fault(path: Path) -> str:
    """Why a script is not run, and what to type; "" when it may be. A link is not followed."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link: put the script itself there"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a file"
    return _fault_of_rights(path, status, "it", "it")


def _fault_of_rights(path: Path, status: os.stat_result, runs: str, changed: str) -> str:
    """Why what lies at `path` is not one's own alone; "" when it is, or root's."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to another user: only their own rounds run {runs}"
    if status.st_mode & 0o022:
        return f"others may change {changed}: chmod go-w {shlex.quote(str(path))}"
    return ""


def _head(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
