"""Whether this machine is fit to launch from: Python, packages, Slurm's commands, locks, umask,
memory and disk, and set-up lines that run cleanly.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tr11ops.base.installed import TRAINING, trainer_line
from tr11ops.base.redact import one_line
from tr11ops.base.shipped import shipped_root
from tr11ops.base.units import duration, size
from tr11ops.cluster.sbatch_options import code_root
from tr11ops.health.host import exported_folder
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.datasets import look_at_tokenizer, workers_environment
from tr11ops.rundir.paths import nearest_folder
from trainer.contract.record import JsonObject, Record
from trainer.contract.units import signal_of_status

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
OLDEST_PYTHON = (3, 11)
OLDEST_SLURM = (20, 11)  # before, srun took a job's nodes without being told to share them
SHARED_MEMORY_BYTES = 1 << 30
TEMPORARY_BYTES = 1 << 30


def environment_checks(
    uses_slurm: bool, run_root: Path | None, controller_version: str = ""
) -> Iterator[PreflightCheck]:
    """All checks of this machine. `run_root`: where the run will be, None where no card is known."""
    yield from _python_checks()
    if uses_slurm:
        yield from _command_checks(controller_version)
    yield from _umask_checks()
    if run_root is not None:
        yield from _lock_checks(nearest_folder(run_root))
    yield from _memory_checks()


def _python_checks() -> Iterator[PreflightCheck]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield refused(
            "python", f"{version} is too old", f"use {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        )
    else:
        yield ok("python", f"{version} ({sys.executable})")
    yield ok("packages", trainer_line())  # whether the card needs them is the launch's to say


def _command_checks(controller_version: str) -> Iterator[PreflightCheck]:
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        yield refused(
            "slurm commands",
            f"{', '.join(absent)} not found",
            "load the site's Slurm, or use a login node",
        )
        return
    try:
        said = subprocess.run(
            ["sbatch", "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield unknown("slurm commands", f"sbatch --version did not answer ({error})")
        return
    client = _version(said)
    if client is None:
        yield warning(
            "slurm commands",
            f"sbatch --version says {said.strip()!r}, which is no version",
            f"see that `sbatch` is Slurm's own; tr11 needs {_text(OLDEST_SLURM)} or newer",
        )
    elif client < OLDEST_SLURM:
        yield refused(
            "slurm commands",
            f"Slurm {_text(client)} is too old",
            f"load {_text(OLDEST_SLURM)} or newer",
        )
    else:
        yield ok("slurm commands", said.strip())
    controller = _version(controller_version)
    if client and controller and client != controller:
        rule = f"they are of {_text(client)}, the controller is of {_text(controller)}"
        yield warning(
            "slurm commands", rule, "ask the site; commands newer than the controller may not work"
        )


def _version(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d+)\.(\d+)", text)
    if match:
        return (int(match[1]), int(match[2]))
    return None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02d}"


def _umask_checks() -> Iterator[PreflightCheck]:
    mask = os.umask(0)
    os.umask(mask)
    if mask & 0o070:
        rule = f"{mask:04o} keeps the group out of what you make by hand; tr11's own files are shared all the same"
        yield warning("umask", rule, "put `umask 0002` (or 0007) into your shell's start file")
    else:
        yield ok("umask", f"{mask:04o}")


def _lock_checks(folder: Path) -> Iterator[PreflightCheck]:
    """Two handles of one nameless file must not both get its lock."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        text = f"could not be tried in {folder} ({error.strerror})"
        yield warning("locks", text, "launch from one place at a time")
        return
    try:
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                yield ok("locks", f"they hold in {folder}")
            else:
                yield warning(
                    "locks",
                    f"none can be had in {folder} ({error.strerror})",
                    "launch from one place at a time",
                )
        else:
            yield warning(
                "locks",
                f"{folder} gives one lock to two holders",
                "launch from one place at a time",
            )
        finally:
            os.close(other)
    finally:
        os.close(descriptor)


def _memory_checks() -> Iterator[PreflightCheck]:
    for name, place, needed, why in (
        (
            "/dev/shm",
            Path("/dev/shm"),
            SHARED_MEMORY_BYTES,
            "workers on one node exchange data through it",
        ),
        (
            "temporary files",
            exported_folder(os.environ),
            TEMPORARY_BYTES,
            "$TMPDIR names another place",
        ),
    ):
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            yield warning(name, f"{place} could not be looked at ({error.strerror})")
            continue
        if free < needed:
            yield warning(name, f"{size(free)} free in {place}, {size(needed)} are advised: {why}")
        else:
            yield ok(name, f"{size(free)} free in {place}")


# Whether the card's set-up lines run cleanly on this machine, and leave what the workers need.

LONGEST_SECONDS = 120.0
# variables by which a set-up may keep Python or srun from being found
_WATCHED = ("PYTHONHOME", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH")
# Bash tells at its end, in $TR11_PLACES, where it was at last (`at`) and where it was when each
# variable changed: line, script, line of the text below. A handler of EXIT has commands of its own,
# so that the place before the last one counts; and each further line of a handler is one more.
_WITNESS = """
declare -A TR11_OLD TR11_SET
TR11_AT="" TR11_LAST="" TR11_ENDS=""
for TR11_V in {watched}; do TR11_OLD[$TR11_V]="${{!TR11_V-}}"; done
trap 'TR11_ENDS=1
{{
  echo "at|$TR11_LAST"
  for TR11_V in "${{!TR11_SET[@]}}"; do echo "$TR11_V|${{TR11_SET[$TR11_V]}}"; done
}} >"$TR11_PLACES" || :' EXIT
set -T
trap 'TR11_LINE="$LINENO"; [ -n "$TR11_ENDS" ] || {{
  for TR11_V in {watched}; do
    if [ "${{!TR11_V-}}" != "${{TR11_OLD[$TR11_V]-}}" ]; then
      TR11_OLD[$TR11_V]="${{!TR11_V-}}"
      TR11_SET[$TR11_V]="$TR11_AT"
    fi
  done
  TR11_LAST="$TR11_AT"
  TR11_AT="$TR11_LINE|${{BASH_SOURCE[0]:-}}|${{BASH_LINENO[*]: -1}}"
}}' DEBUG
"""
# What the batch script does before and after the lines; the probe stands where the agent would.
_BEFORE = "set -eo pipefail\numask 0002\n" + _WITNESS.format(watched=" ".join(_WATCHED))
_AFTER = '\nset -u\n"$TR11_PROBE_PYTHON" -c "$TR11_PROBE" "$TR11_PROBE_OUTPUT"\n'
_ERROR = re.compile(r"error|not found|no such|cannot|denied|failed|unbound", re.IGNORECASE)
_NO_FILE = "environment"  # bash's word for where a function is from that is of no file
_OF_BASH = re.compile(r"^bash: line \d+: ")  # of a text that no one has seen
_PROBE = """
import importlib.util, json, os, shutil, sys
missing = [name for name in {needed!r} if importlib.util.find_spec(name) is None]
value = {{"missing": missing, "srun": shutil.which("srun"), "environment": dict(os.environ)}}
open(sys.argv[1], "w").write(json.dumps(value))
"""


def setup_checks(
    card: RunCard, uses_slurm: bool, environment: Mapping[str, str]
) -> Iterator[PreflightCheck]:
    """Run `slurm.setup` in a shell of its own, as the batch script would, and look at what it
    leaves. Runs programs.
    """
    lines = card.slurm.setup
    if not lines:
        return
    name = "slurm.setup"
    if len(lines) == 1:
        shown = "its line"
    else:
        shown = f"its {len(lines)} lines"
    ends = f"{shown} {'ends' if len(lines) == 1 else 'end'}"
    began = time.monotonic()
    try:
        status, said, left, places = _run(
            lines,
            workers_environment(card, environment),
            TRAINING if card.uses_own_trainer else (),
        )
    except subprocess.TimeoutExpired:
        yield warning(
            "slurm.setup",
            f"{shown} did not end within {duration(LONGEST_SECONDS)} here",
            "run them by hand",
        )
        return
    except OSError as error:
        yield warning("slurm.setup", f"{shown} could not be tried here ({error.strerror or error})")
        return
    at = places.get("at")
    if left is None and at is not None and at.number is None:
        rule = f"after it Python does not start ({exit_words(status)} on this machine), and so would it"
        yield refused(name, f"{rule} be in each attempt: {said}{_set_by(places)}", _NO_PATHS)
    elif left is None:
        which = f"its line {at}, ends" if at else ends
        rule = f"{which} with {exit_words(status)} on this machine, and so would each attempt"
        fix = "correct the line or the script that it sources"
        yield refused(name, f"{rule}: {said or 'no word on stderr'}", fix)
    elif left["missing"]:
        rule = f"after it, {sys.executable} finds no {', '.join(left['missing'])}"
        yield refused(name, f"{rule}{_set_by(places)}", _NO_PATHS)
    elif uses_slurm and left["srun"] is None:
        path = places.get("PATH")
        where = f", which {path} changed" if path else ""
        fix = "add to PATH in the set-up, do not replace it"
        yield refused(name, f"after it, srun is not found in PATH{where}", fix)
    else:
        took = duration(max(1.0, time.monotonic() - began))
        yield ok("slurm.setup", f"{shown} ended cleanly on this machine, in {took}")
    if left is None:
        return
    if not isinstance(card, OwnCard):
        return
    tokenizer = look_at_tokenizer(card, left["environment"])
    if (
        tokenizer.fault
        and not look_at_tokenizer(card, workers_environment(card, environment)).fault
    ):
        yield refused(
            "tokenizer.path", f"with the variables of slurm.setup, {tokenizer.fault}", tokenizer.fix
        )


_NO_PATHS = "a set-up must not change where Python looks (PYTHONPATH, PYTHONHOME)"


class SetupPlace(Record):
    """A place of a set-up: the entry of `slurm.setup` (`number`, from 1; None behind the last one),
    and the line of the script that it sources, where it is in one.
    """

    number: int | None
    entry: str = ""
    script: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"[{self.number}] ({one_line(self.entry, limit=80)})"
        if not self.script:
            return where
        return f"{where}, {self.script} line {self.line}"


def setup_entry(setup: Sequence[str], line: int | None) -> int | None:
    """Which entry of a set-up, from 1, holds this line of its text; None where that is not known,
    or none.
    """
    first = 1
    for number, entry in enumerate(setup, start=1):
        after = first + entry.count("\n") + 1
        if line is not None and first <= line < after:
            return number
        first = after
    return None


def decisive_line(said: Sequence[str]) -> str:
    """The last line that speaks of an error, else the last one; "" where nothing was said."""
    return next((line for line in reversed(said) if _ERROR.search(line)), "".join(said[-1:]))


def exit_words(status: int) -> str:
    """An exit status as a shell has it: with the signal's name where a signal ended it."""
    return signal_of_status(status) or f"exit status {status}"


def _set_by(places: Mapping[str, SetupPlace]) -> str:
    """Which place of the set-up changed where Python looks, of the variables that may spoil it; ""
    where none is known.
    """
    for name in _WATCHED:
        if name != "PATH" and name in places:
            return f"; {name} was changed by {places[name]}"
    return ""


def _places(text: str, setup: Sequence[str]) -> dict[str, SetupPlace]:
    """The places that bash told; what it could not tell is left out."""
    found = {}
    for record in text.splitlines():
        name, *rest = record.split("|")
        if len(rest) != 3 or not rest[0].isdecimal():
            continue
        line, script, outer = rest
        # of a function, such as the `module` that a site exports, LINENO counts its own lines
        is_called = bool(script) and outer.isdecimal()
        top = int(outer if is_called else line) - _BEFORE.count("\n")
        number = setup_entry(setup, top)
        entry = ""
        if number is not None:
            entry = setup[number - 1]
        found[name] = SetupPlace(number, entry)
        if is_called and script != _NO_FILE:
            found[name] = SetupPlace(number, entry, script, int(line))
    return found


def _run(
    lines: list[str], environment: Mapping[str, str], needed: Sequence[str]
) -> tuple[int, str, JsonObject | None, dict[str, SetupPlace]]:
    """Run a set-up, and then the probe: exit status, decisive line, what the probe saw (None where
    it was not reached or did not start), and places by what happened there. Raises OSError and
    TimeoutExpired.
    """
    root = code_root()
    path = os.pathsep.join(
        filter(None, [str(root) if root else "", environment.get("PYTHONPATH", "")])
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "left.json"
        places = Path(folder) / "places"
        variables = {
            **environment,
            **({"PYTHONPATH": path} if path else {}),
            "TR11_SHIPPED": str(shipped_root()),
            "TR11_PROBE_PYTHON": sys.executable,
            "TR11_PROBE": _PROBE.format(needed=needed),
            "TR11_PROBE_OUTPUT": str(output),
            "TR11_PLACES": str(places),
        }
        with subprocess.Popen(
            ["bash", "-c", "".join((_BEFORE, "\n".join(lines), _AFTER))],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as shell:
            try:
                said = shell.communicate(timeout=LONGEST_SECONDS)[1]
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                raise
        printed = [_OF_BASH.sub("", line.strip()) for line in said.splitlines() if line.strip()]
        left = None
        told = ""
        if output.is_file():
            left = json.loads(output.read_text(encoding="utf-8"))
        if places.is_file():
            told = places.read_text(encoding="utf-8", errors="replace")
        return shell.returncode, one_line(decisive_line(printed)), left, _places(told, lines)
