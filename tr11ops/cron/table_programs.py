"""The user's tables of cron and scrontab: read, shown, replaced; and the script that their lines call."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal, TypeAlias

from tr11ops.base.errors import TableError
from tr11ops.cluster.passed_options import of_any_job, options_of
from tr11ops.cluster.sbatch_options import FLAG, argument_of, quoted_argument
from tr11ops.cluster.slurm_command import client_environment
from tr11ops.cron.jobs import PeriodicJob, of_chain, wanted
from tr11ops.cron.scripts import Invocation, round_script
from tr11ops.cron.table_file import cron_lines, difference, replaced
from tr11ops.rundir.cron_records import CHAINS, cron_folder
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import write_atomically
from trainer.contract.record import Record
from trainer.contract.sharing import make_shared

Program: TypeAlias = Literal["crontab", "scrontab"]
TIMEOUT_SECONDS = 60.0
_EMPTY = re.compile(rb"no s?crontab for|no crontab", re.IGNORECASE)


class RunCrontab(Record):
    """One run's lines in one user's table on this machine."""

    program: Program
    invocation: Invocation
    directory: RunDirectory
    jobs: tuple[PeriodicJob, ...]

    @property
    def script(self) -> Path:
        """What the lines call. It is the user's alone: what it holds is run in the user's name."""
        environment = self.invocation.environment
        home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME") or Path.home()) / ".config")
        return Path(home) / "tr11" / "cron" / f"{self.directory.mark}-{self.program}.sh"


class TableChange(Record):
    """What becomes of the table: before, after, and the script (None: it goes away)."""

    before: bytes
    after: bytes
    script: str | None

    @property
    def difference(self) -> str:
        """As `diff -u` shows it; "" when the table stays as it is."""
        return difference(self.before, self.after)


def plan_install(crontab: RunCrontab, now: float) -> TableChange:
    """What an install would change. Raises TableError, ValueError, OSError."""
    before = read_table(crontab)
    after = replaced(before, crontab.directory.mark, crontab.invocation.card.run.name, _lines(crontab, now))
    return TableChange(before, after, round_script(crontab.invocation))


def plan_removal(crontab: RunCrontab) -> TableChange:
    """What a removal would change. Raises TableError."""
    before = read_table(crontab)
    return TableChange(before, replaced(before, crontab.directory.mark, crontab.invocation.card.run.name, ()), None)


def apply(crontab: RunCrontab, change: TableChange) -> None:
    """Carry it out: the script first, so that no line calls what is not there. Raises TableError, OSError."""
    if change.script is not None:
        crontab.script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(crontab.script, change.script, 0o700)
    if change.difference:
        if read_table(crontab) != change.before:
            raise TableError(f"the {crontab.program} was changed by someone else at this moment; try again")
        _write(crontab, change.after)
        if read_table(crontab) != change.after:
            raise TableError(f"{crontab.program} did not keep what it was given; look with `{crontab.program} -l`")
    if change.script is None:
        crontab.script.unlink(missing_ok=True)


def read_table(crontab: RunCrontab) -> bytes:
    """The user's table; empty when there is none. Raises TableError when it cannot be read: it is never overwritten."""
    done = _run(crontab, "-l")
    if done.returncode == 0:
        return done.stdout
    if _EMPTY.search(done.stderr + done.stdout):
        return b""
    raise TableError(f"{crontab.program} -l failed: {_words(done)}")


def is_installed(crontab: RunCrontab) -> bool:
    """Whether the table has this run's lines. Raises TableError."""
    table = read_table(crontab)
    return replaced(table, crontab.directory.mark, crontab.invocation.card.run.name, ()) != table


# ----------------------------------------------------------------------------- the lines
def _lines(crontab: RunCrontab, now: float) -> list[str]:
    offset = (time.localtime(now).tm_gmtoff // 60) % 60
    script = str(crontab.script)
    if crontab.program == "crontab":
        return cron_lines((script, "--way", "crontab"), wanted(crontab.jobs), now, offset)
    lines = []
    for chain in CHAINS:
        jobs = of_chain(crontab.jobs, "hourly" if chain == "hourly" else "daily")
        if jobs:
            command = (script, "--way", "scrontab", "--chain", chain)
            lines += [f"#SCRON {option}" for option in _options(crontab, chain)]
            lines += cron_lines(command, jobs, now, offset)
    return lines


def _options(crontab: RunCrontab, chain: str) -> list[str]:
    section = crontab.invocation.card.cron
    folder = cron_folder(crontab.directory) / "slurm"
    passed = of_any_job(options_of(crontab.invocation.card.slurm.options))
    values: tuple[tuple[str, object], ...] = (
        ("partition", section.partition),
        ("account", section.account),
        ("constraint", section.constraint),
        ("qos", section.quality_of_service),
        ("nodes", "1"),
        ("time", section.hourly_time_limit if chain == "hourly" else section.daily_time_limit),
        ("job-name", f"cron-{chain}-{crontab.invocation.card.run.name}"),
        ("output", str(folder / "%x-%j.out")),
        ("open-mode", "append"),
        *((name, value or FLAG) for name, value in passed),
    )
    return [quoted_argument(argument_of(name, value)) for name, value in values if value]


# ----------------------------------------------------------------------------- the programs
def _write(crontab: RunCrontab, table: bytes) -> None:
    if crontab.program == "scrontab":
        make_shared(cron_folder(crontab.directory) / "slurm")
    with tempfile.NamedTemporaryFile(prefix="tr11-cron-") as stream:
        stream.write(table)
        stream.flush()
        done = _run(crontab, stream.name)
    if done.returncode != 0:
        raise TableError(f"{crontab.program} refused the new table, the old one stands: {_words(done)}")


def _run(crontab: RunCrontab, argument: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [crontab.program, argument],
            env={**client_environment(crontab.invocation.environment), "LC_ALL": "C"},  # its messages are read
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise TableError(f"there is no {crontab.program} on this machine; see `tr11 cron install --help`") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TableError(f"{crontab.program} does not answer: {error}") from None


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode("utf-8", "replace")
    return " ".join(text.split())[:300] or f"exit code {done.returncode}"
