"""Running one of Slurm's commands: with a time-out, and with an environment that does not bend its
answers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from tr11ops.base.errors import SchedulerUnreachable
from trainer.contract.record import Record

POLITE_SECONDS = 2.0  # from TERM to KILL, and for the last lines of one that has ended
COMMAND_SECONDS = 60.0  # for one command, where its caller does not say
# a person's defaults for the site, which a submission may take from the environment
_SITE_DEFAULTS = {
    "SBATCH_ACCOUNT",
    "SBATCH_QOS",
    "SBATCH_PARTITION",
    "SBATCH_RESERVATION",
    "SBATCH_CONSTRAINT",
}
_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"} | _SITE_DEFAULTS
_SLURM = re.compile(r"(SLURM|SLURMD|SBATCH|SQUEUE|SINFO|SCANCEL|SCONTROL|SRUN|SALLOC)_")


class CommandResult(Record):
    """What a command left behind; `returncode` is None when it was stopped at the awaited words."""

    returncode: int | None
    stdout: str
    stderr: str


class CommandRunner(Protocol):
    """Runs one command to its end. Raises SchedulerUnreachable when it cannot start or takes too
    long.
    """

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        standard_input: str,
        environment: Mapping[str, str],
        timeout_seconds: float,
        directory: Path | None = None,
        until: str | None = None,
    ) -> CommandResult:
        """Run `arguments` with exactly this environment, in `directory`; stop it when its stderr
        says `until`.
        """


def run_command(
    arguments: Sequence[str],
    *,
    standard_input: str,
    environment: Mapping[str, str],
    timeout_seconds: float,
    directory: Path | None = None,
    until: str | None = None,
) -> CommandResult:
    """The real runner: a child process, killed when its time is over."""
    with _start(arguments, subprocess.PIPE, environment, directory) as process:
        if until is not None:
            return _run_until(process, standard_input, until, timeout_seconds)
        try:
            stdout, stderr = process.communicate(standard_input, timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise _too_slow(arguments[0], timeout_seconds) from error
        return CommandResult(process.returncode, stdout, stderr)


class PatientOnce:
    """A runner for what only betters an answer: `seconds` for one command, and after one silence no
    other is asked.

    `silence`: what was not answered; "" while all was.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.silence = ""

    def __call__(
        self, arguments: Sequence[str], *, timeout_seconds: float, **settings: Any
    ) -> CommandResult:
        """As `CommandRunner` says."""
        if self.silence:
            raise SchedulerUnreachable(self.silence)
        seconds = min(timeout_seconds, self._seconds)
        try:
            return run_command(arguments, timeout_seconds=seconds, **settings)
        except SchedulerUnreachable as error:
            self.silence = str(error)
            raise


def ask_about_site(
    arguments: Sequence[str],
    timeout_seconds: float = COMMAND_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """One question, with `environment` over this process's own; times come as seconds since the
    epoch.
    """
    variables = client_environment({**os.environ, **(environment or {})}) | {
        "SLURM_TIME_FORMAT": "%s"
    }
    return run_command(
        arguments, standard_input="", environment=variables, timeout_seconds=timeout_seconds
    )


def _start(
    arguments: Sequence[str],
    standard_input: int,
    environment: Mapping[str, str],
    directory: Path | None,
) -> subprocess.Popen[str]:
    """The started command, whose output comes through pipes. Raises SchedulerUnreachable."""
    try:
        return subprocess.Popen(
            list(arguments),
            stdin=standard_input,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=directory,
            text=True,
            errors="replace",
            process_group=0,  # a wrapper script's own children end with it
        )
    except OSError as error:
        raise SchedulerUnreachable(
            f"{arguments[0]} cannot be started ({error.strerror}): is this a machine with Slurm's commands?"
        ) from error


def _run_until(
    process: subprocess.Popen[str], standard_input: str, words: str, timeout_seconds: float
) -> CommandResult:
    """Read stderr line by line; for commands whose stdout is small."""
    assert process.stdin is not None and process.stderr is not None and process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _end(process)

    timer = threading.Timer(timeout_seconds, expire)
    timer.start()
    said = ""
    try:
        # one that ends early reads nothing
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(standard_input)
        for line in process.stderr:
            said += line
            if words in line:
                _end(process)
                return CommandResult(None, "", said)
        stdout = process.stdout.read()
        process.wait()
    finally:
        timer.cancel()
    if expired.is_set():
        raise _too_slow(str(process.args[0]), timeout_seconds)  # type: ignore[index]
    return CommandResult(process.returncode, stdout, said)


def follow_command(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    on_line: Callable[[str], object],
    directory: Path | None = None,
) -> CommandResult:
    """Run a command whose output counts as it comes: each line of its stdout goes to `on_line`.

    It is ended when its time is over, politely at first: srun then ends what it started on the
    nodes. `returncode` is then None; `stdout` is always empty. Raises SchedulerUnreachable when it
    cannot start.
    """
    process = _start(arguments, subprocess.DEVNULL, environment, directory)
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    streams = {process.stdout: on_line, process.stderr: said.append}
    readers = {
        stream: threading.Thread(target=_each_line, args=(stream, use), daemon=True)
        for stream, use in streams.items()
    }
    for reader in readers.values():
        reader.start()
    returncode = _wait(process, timeout_seconds)
    if returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _wait(process, POLITE_SECONDS)
        _end(process)
        _wait(process, POLITE_SECONDS)
    for stream, reader in readers.items():
        reader.join(timeout=POLITE_SECONDS)
        if not reader.is_alive():  # what holds the pipe open beyond its group would keep us waiting
            stream.close()
    return CommandResult(returncode, "", "".join(said))


def _wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """The exit status; None when it has not ended by then."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=seconds)
    return None


def _each_line(stream: IO[str], use: Callable[[str], object]) -> None:
    for line in stream:
        use(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it with all that it started: what holds its pipes open would keep us waiting."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _too_slow(command: str, seconds: float) -> SchedulerUnreachable:
    return SchedulerUnreachable(f"{command} did not answer within {seconds:g} s")


def client_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without what would bend Slurm's answers: the variables of a surrounding job and of a
    person's habits.

    SQUEUE_STATES would hide jobs, SCANCEL_INTERACTIVE would wait for an answer, SLURM_NTASKS of a
    surrounding job would reach the submitted one.
    """
    return {key: value for key, value in base.items() if not _SLURM.match(key) or key in _KEPT}
