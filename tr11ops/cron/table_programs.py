"""The user's tables of cron and scrontab: read, shown, replaced; and the script that their lines
call.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Literal, TypeAlias

from tr11ops.base.errors import TableError
from tr11ops.base.shipped import read_shipped
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import (
    FLAG,
    argument_of,
    of_any_job,
    options_of,
    quoted_argument,
    script_engine,
    script_options,
)
from tr11ops.cluster.slurm_command import client_environment
from tr11ops.cron.jobs import Daily, PeriodicJob, Schedule, of_chain, wanted
from tr11ops.cron.runner import child_environment, tr11_command
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.cron_records import CHAINS, cron_folder
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared, write_atomically
from trainer.contract.record import Record
from trainer.contract.secret_shapes import is_secret
from trainer.contract.units import printable, shortened

# ----------------------------------------------------------------------------- scripts
# What cron, scrontab and Slurm run: `cron/scheduler/*.j2` filled in.

ROUND = ("cron", "scheduler", "round.sh.j2")
LINK = ("cron", "scheduler", "chain.slurm.j2")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
# what cron does not give and Python, Slurm's commands or the card's defaults need
_KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "SLURM_CONF",
    "SLURM_CLUSTERS",
    "SBATCH_ACCOUNT",
    "SBATCH_QOS",
    "SBATCH_PARTITION",
    "SBATCH_RESERVATION",
    "SBATCH_CONSTRAINT",
    "TR11_SCHEDULER",
    "TR11_LOCAL_SCHEDULER",
)


class Invocation(Record):
    """A command line as a person typed it once, so that it can be typed again without them.

    `card_path` is absolute; `folder` is where it was typed, from which relative paths of the
    overrides are taken, and those of a card that ships with tr11.
    """

    card: RunCard
    card_path: Path
    overrides: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]

    def command(self, words: Iterable[str]) -> list[str]:
        """The command line of `tr11 WORDS` for this card."""
        return tr11_command(words, self.card_path, self.overrides)

    def needed_environment(self) -> dict[str, str]:
        """The variables that the card names and that a job needs, with their values of now; never a
        secret's.
        """
        try:
            text = self.card_path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # a link of a chain, whose card is gone: Slurm hands its own variables on
            text = ""
        text = "\n".join([text, *self.overrides])
        named = {first or second for first, second in _VARIABLE.findall(text)}
        base = child_environment(self.environment)
        kept = {name: base[name] for name in sorted({*_KEPT, *named}) if base.get(name)}
        return {name: value for name, value in kept.items() if not is_secret(name, value)}


def round_script(invocation: Invocation) -> str:
    """What cron and scrontab call, who add `--way WAY`. Raises ValueError for what no script can
    hold.
    """
    command = invocation.command(("cron", "run", "--once", "--quiet"))
    return _rendered(ROUND, invocation, command)


def link_script(
    invocation: Invocation, chain: str, request: BatchRequest, command: Sequence[str], folder: Path
) -> str:
    """One link of a chain, whose output goes to `folder` if that can be written."""
    return _rendered(
        LINK, invocation, command, chain=chain, output=f"{folder}/", options=script_options(request)
    )


def script_of(
    template: tuple[str, ...],
    invocation: Invocation,
    request: BatchRequest,
    command: Sequence[str],
    folder: Path,
) -> str:
    """The batch script of a job, whose output goes to `folder` if that can be written. Raises
    ValueError for what none can hold.
    """
    return _rendered(
        template, invocation, command, output=f"{folder}/", options=script_options(request)
    )


def _rendered(
    template: tuple[str, ...],
    invocation: Invocation,
    command: Sequence[str],
    options: Sequence[str] = (),
    **more: object,
) -> str:
    engine = script_engine()
    environment = sorted(invocation.needed_environment().items())
    values = {
        "run": invocation.card.run.name,
        "environment": environment,
        "folder": str(invocation.folder),
        **more,
    }
    if any(
        character in text for text in (invocation.card.run.name, *options) for character in "\n\r"
    ):
        raise ValueError(
            f"{invocation.folder}: a path with line ends cannot stand in a batch script; choose another"
        )
    text = str(
        engine.from_string(read_shipped(*template)).render(
            **values, command=list(command), options=list(options)
        )
    )
    if "\0" in text:
        raise ValueError("a value holds a NUL character, which no script can; remove it")
    return text


# A run's lines in a table of cron (or of scrontab), between two marks; all other lines stay as they
# are. Pure.


def marks(mark: str, run: str) -> tuple[bytes, bytes]:
    """The first and the last line of a run's block, without line ends; `mark` tells runs apart."""
    return (
        f"# tr11 cron {mark} begin: {printable(run)}".encode(),
        f"# tr11 cron {mark} end".encode(),
    )


def replaced(table: bytes, mark: str, run: str, lines: Sequence[str]) -> bytes:
    """The table with these lines as the run's block; with no lines, without the block.

    Raises TableError when the marks in the table are not one block: a person has edited it.
    """
    first, last = marks(mark, run)
    begin_word = first.partition(b": ")[0]
    end_word = last
    rows = table.splitlines(keepends=True)
    begins = [index for index, row in enumerate(rows) if row.startswith(begin_word)]
    ends = [index for index, row in enumerate(rows) if row.rstrip(b"\r\n") == end_word]
    if (len(begins), len(ends)) not in {(0, 0), (1, 1)} or (begins and begins[0] > ends[0]):
        raise TableError(
            f"the lines {first.decode()!r} and {last.decode()!r} are not one block any more: "
            "edit the table by hand, remove what is left of them, and try again"
        )
    if lines:
        block = [first, *(line.encode("utf-8", "surrogateescape") for line in lines), last]
    else:
        block = []
    new = [row + b"\n" for row in block]
    if begins:
        return b"".join([*rows[: begins[0]], *new, *rows[ends[0] + 1 :]])
    if new and table and not table.endswith(b"\n"):
        gap = [b"\n"]
    else:
        gap = []
    return b"".join([*rows, *gap, *new])


def difference(before: bytes, after: bytes) -> str:
    """What changes, as `diff -u` shows it; "" when nothing does."""
    old, new = (text.decode("utf-8", "backslashreplace").splitlines() for text in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "as it is", "as it will be", lineterm="", n=1))


def cron_command(words: Sequence[str]) -> str:
    """A command for a line of cron: quoted for the shell, and for cron, which takes a bare % as a
    line end.

    Raises TableError for what cannot stand on a line.
    """
    text = " ".join(shlex.quote(word) for word in words)
    if any(character in text for character in "\n\r\0"):
        raise TableError(f"{text!r} cannot stand in a table of cron: use a path without line ends")
    return text.replace("%", r"\%")


def minutes_field(schedules: Sequence[Schedule], now: float, offset_minutes: int) -> str:
    """The minutes of an hour at which every point of these schedules is met, as cron writes them.

    `offset_minutes` is what this machine's clock is ahead of UTC. Points between whole minutes are
    met a minute late.
    """
    steps = [60]
    for schedule in schedules:
        minutes = schedule.period_seconds / 60
        if isinstance(schedule, Daily):
            steps.append(60)
        elif minutes.is_integer():
            steps.append(max(1, int(minutes)))
        else:
            steps.append(1)
        steps.append((int(schedule.after(now) // 60) + offset_minutes) % 60)
    step = reduce(math.gcd, steps)
    if step == 60:
        return "0"
    if step == 1:
        return "*"
    return f"*/{step}"


def cron_lines(
    command: Sequence[str], jobs: Sequence[PeriodicJob], now: float, offset_minutes: int
) -> list[str]:
    """The run's line: what is due is decided by the command, so the line is only often enough."""
    minutes = minutes_field([job.schedule for job in jobs], now, offset_minutes)
    return [f"{minutes} * * * * {cron_command(command)}"]


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
        home = environment.get("XDG_CONFIG_HOME") or str(
            Path(environment.get("HOME") or Path.home()) / ".config"
        )
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
    after = replaced(
        before, crontab.directory.mark, crontab.invocation.card.run.name, _lines(crontab, now)
    )
    return TableChange(before, after, round_script(crontab.invocation))


def plan_removal(crontab: RunCrontab) -> TableChange:
    """What a removal would change. Raises TableError."""
    before = read_table(crontab)
    return TableChange(
        before, replaced(before, crontab.directory.mark, crontab.invocation.card.run.name, ()), None
    )


def apply(crontab: RunCrontab, change: TableChange) -> None:
    """Carry it out: the script first, so that no line calls what is not there. Raises TableError,
    OSError.
    """
    if change.script is not None:
        crontab.script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(crontab.script, change.script, 0o700)
    if change.difference:
        if read_table(crontab) != change.before:
            raise TableError(
                f"the {crontab.program} was changed by someone else at this moment; try again"
            )
        _write(crontab, change.after)
        if read_table(crontab) != change.after:
            raise TableError(
                f"{crontab.program} did not keep what it was given; look with `{crontab.program} -l`"
            )
    if change.script is None:
        crontab.script.unlink(missing_ok=True)


def read_table(crontab: RunCrontab) -> bytes:
    """The user's table; empty when there is none. Raises TableError when it cannot be read: it is
    never overwritten.
    """
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
        raise TableError(
            f"{crontab.program} refused the new table, the old one stands: {_words(done)}"
        )


def _run(crontab: RunCrontab, argument: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [crontab.program, argument],
            # its messages are read
            env={**client_environment(crontab.invocation.environment), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise TableError(
            f"there is no {crontab.program} on this machine; see `tr11 cron install --help`"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TableError(f"{crontab.program} does not answer: {error}") from None


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode("utf-8", "replace")
    return shortened(" ".join(text.split()), 300) or f"exit code {done.returncode}"
