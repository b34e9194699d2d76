"""The processes of a foreign trainer on one node: started, heard, signalled, ended."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from tr11ops.base.processes import begin_launcher, end_descendants, exit_status
from tr11ops.base.units import counted
from tr11ops.cluster.sbatch_options import code_root
from tr11ops.dialects.image import MARK
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.trainers.outside import failure_words, signal_of_code, signal_said
from tr11ops.trainers.start import WorkerCommand, environment_of
from tr11ops.trainers.words import Piece, piece_of
from trainer.contract.attempt import AttemptIdentity, tell
from trainer.contract.files import host_name
from trainer.contract.units import signal_name

PEERS_SECONDS = 30.0  # from the first failure to the end of the others, as torchrun has it
BAR_SECONDS = 10.0  # between two lines of one bar that are passed on
_STILL_SECONDS = 0.5  # a bar that is drawn has no end of its line until it is drawn again
_LONGEST = 64 << 10
_BREAK = re.compile(rb"\r\n|\n|\r")
_BAR = re.compile(rb"\d%\|.*(?:it/s|s/it)")
_FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})


def without_own_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """Where Python finds no modules of tr11 before the trainer's, which may have their names."""
    searched = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = [place for place in searched if place != str(code_root())]
    return {**environment, "PYTHONPATH": os.pathsep.join(others)}


class WorkerProcesses:
    """All that this node has started. Its lines are passed on to this process's output as they come;
    `heard` gives those that came since the last call. `mark`: what its processes bear in their
    environment where they are no children of this one, JOB/NODE/LAUNCH; else "".

    `first_failure`: how the first worker that failed ended, as `Popen.returncode`; 0 while none has.
    """

    def __init__(self, first_rank: int, mark: str = "") -> None:
        self._first_rank = first_rank
        self._mark = mark
        self._children: list[tuple[WorkerCommand, subprocess.Popen[bytes]]] = []
        self._pumps: list[threading.Thread] = []
        self._lines: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._gate = _LineGate()
        self._failed = 0  # the status of the first that failed
        self._failed_at: float | None = None
        self._told: set[int] = set()
        self.first_failure = 0
        self._signal_said = ""

    def start(
        self,
        commands: Sequence[WorkerCommand],
        settings: TrainerSettings,
        inherited: Mapping[str, str],
        more: Mapping[str, str],
    ) -> None:
        """Start them; from the main thread, with which they end. `more` is as in `environment_of`.
        Raises OSError.
        """
        inherited = without_own_modules(inherited)
        place = settings.directory
        if settings.image is not None and not Path(place).is_dir():
            place = "/"  # the image has it
        if self._mark:
            more = {**more, MARK: self._mark}
        for command in commands:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=place,
                env=environment_of(settings, command, inherited, more),
                preexec_fn=begin_launcher,  # noqa: PLW1509  the threads of this process hold no lock of it
            )
            assert process.stdout is not None
            self._children.append((command, process))
            pump = threading.Thread(
                target=self._pump, args=(process.stdout, command.prefix.encode()), daemon=True
            )
            pump.start()
            self._pumps.append(pump)

    def end_earlier(self) -> None:
        """End what an earlier launch of the job has left on this node, whose keeper was killed."""
        if not self._mark:
            return
        place, _, number = self._mark.rpartition("/")
        left = [
            process
            for before in range(1, int(number))
            for process in marked_processes(f"{place}/{before}")
        ]
        if left:
            shown = counted(len(left), "process", "processes")
            tell(f"tr11: {shown} of an earlier launch still ran here: ended")
            _end_marked(left, 0.0)

    # ------------------------------------------------------------------ hearing
    def heard(self) -> list[Piece]:
        """The lines since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._lines.get_nowait())
        return found

    def finish_hearing(self, seconds: float) -> None:
        """Wait for the last lines of processes that have ended."""
        until = time.monotonic() + seconds
        for pump in self._pumps:
            pump.join(max(0.0, until - time.monotonic()))
        self._gate.close()

    def _pump(self, stream: IO[bytes], prefix: bytes) -> None:
        rest, hinted = b"", b""
        while True:
            readable, _, _ = select.select([stream], [], [], _STILL_SECONDS)
            if not readable:
                if rest != hinted and _BAR.search(rest):
                    hinted = rest
                    self._lines.put(piece_of(_with_prefix(rest, prefix), time.time()))
                continue
            chunk = os.read(stream.fileno(), 65536)
            if not chunk:
                break
            *whole, rest = _BREAK.split(rest + chunk)
            if len(rest) > _LONGEST:
                whole, rest = [*whole, rest], b""
            for line in whole:
                self._take(line, prefix)
        if rest:
            self._take(rest, prefix)
        stream.close()

    def _take(self, line: bytes, prefix: bytes) -> None:
        text = _with_prefix(line, prefix)
        if not piece_of(text, 0.0).text.strip():  # a bar that is wiped away
            return
        self._gate.pass_on(text)
        self._lines.put(piece_of(text, time.time()))
        self._signal_said = self._signal_said or signal_said(text, self._launchers())
        failed = _FAILED.search(text)
        if failed is not None:
            rank = self._first_rank + int(failed[2])
            self._tell_failure(rank, int(failed[3]), code=int(failed[1]))

    def _launchers(self) -> frozenset[int]:
        return frozenset(process.pid for command, process in self._children if command.rank is None)

    # ------------------------------------------------------------------ ending
    def tell_signal(self) -> None:
        """Say that a signal from outside has ended the launcher, where one has and no worker had failed:
        the node agent keeps it.
        """
        codes = [process.poll() for command, process in self._children if command.rank is None]
        ended = next((name for code in codes if code and (name := signal_of_code(code))), "")
        name = self._signal_said or ended
        if name and self.first_failure in (0, -signal.SIGTERM):
            tell(f"tr11: the launcher on {node_name()} failed: {failure_words(name)}")

    def status(self) -> int | None:
        """The exit status of what was started, once all has ended: that of the first that failed,
        else 0. None while one runs. Where one of several failed, the others are ended.
        """
        codes = [(command, process, process.poll()) for command, process in self._children]
        for command, process, code in codes:
            if code and command.rank is not None:
                self._tell_failure(command.rank, process.pid, code)
        failed = [code for _, _, code in codes if code]
        living = [process for _, process, code in codes if code is None]
        if failed and not self._failed:
            self._failed = failed[0]
        if failed and living:
            self._end_peers(living)
        if living:
            return None
        return exit_status(self._failed)

    def _end_peers(self, living: Sequence[subprocess.Popen[bytes]]) -> None:
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            for process in living:
                process.send_signal(signal.SIGTERM)
        elif now - self._failed_at > PEERS_SECONDS:
            for process in living:
                process.kill()

    def signal_ranks(self, name: str) -> int:
        """Send a signal to each rank's own process; returns to how many."""
        number = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
        count = 0
        for process in rank_processes(self._mark):
            with suppress(psutil.Error):
                process.send_signal(number)
                count += 1
        return count

    def end(self, grace_seconds: float) -> None:
        """End all that was started, and what it left behind: TERM, then KILL after the grace."""
        end_descendants(grace_seconds)
        if self._mark:
            _end_marked(marked_processes(self._mark), grace_seconds)

    def kill(self) -> None:
        """End all that was started at once, without a word: a rank that saves on TERM would write into
        its successor's folder.
        """
        with suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
        end_descendants(0.0)

    def _tell_failure(self, rank: int, pid: int, code: int) -> None:
        """As tr11's own launcher tells it: the node agent knows a failed worker by this line."""
        if pid in self._told:
            return
        self._told.add(pid)
        self.first_failure = self.first_failure or code
        how = f"exit status {code}"
        if code < 0:
            how = f"ended by {signal_name(-code)}"
        self._gate.pass_on(f"tr11: worker {rank} (process {pid}) failed: {how}".encode())


def node_name() -> str:
    """This node's, as Slurm knows it."""
    return os.environ.get("SLURMD_NODENAME") or host_name()


def mark_of(settings: TrainerSettings, attempt: AttemptIdentity) -> str:
    """What the workers of a launch bear where they are no children of their keeper."""
    if settings.image is None or settings.image.runtime != "pyxis":
        return ""
    return f"{attempt.job_id}/{node_name()}/{attempt.launch}"


def rank_processes(mark: str = "") -> list[psutil.Process]:
    """The processes of this node's ranks: each the first one that has a rank in its environment; below
    a shell, what the shell runs. With a `mark`, those that bear it, whoever started them.
    """
    with suppress(psutil.Error):
        started = psutil.Process().children()
        if mark:
            marked = marked_processes(mark)
            inner = {process.pid for process in marked}
            started = [process for process in marked if process.ppid() not in inner]
        return [found for child in started for found in _ranks_below(child)]
    return []


def marked_processes(mark: str) -> list[psutil.Process]:
    """All of this node that bear this mark, but for this process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _end_marked(processes: Sequence[psutil.Process], grace_seconds: float) -> None:
    """TERM, then KILL after the grace."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, living = psutil.wait_procs(processes, timeout=grace_seconds)
    for process in living:
        with suppress(psutil.Error):
            process.kill()


def _ranks_below(process: psutil.Process) -> list[psutil.Process]:
    try:
        children = process.children()
        has_rank = "RANK" in process.environ()
        if has_rank and not (process.name() in _SHELLS and children):
            return [process]
    except psutil.Error:
        return []
    return [found for child in children for found in _ranks_below(child)]


class _LineGate:
    """Passes lines on to this process's output: of a bar that is drawn again and again only one now
    and then. What cannot be written ends nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar_at = 0.0
        self._held_back = b""

    def pass_on(self, line: bytes) -> None:
        with self._lock:
            if _BAR.search(line):
                now = time.monotonic()
                if now - self._bar_at < BAR_SECONDS:
                    self._held_back = line
                    return
                self._bar_at, self._held_back = now, b""
            _print(line)

    def close(self) -> None:
        """Pass on the bar as it stood at the end."""
        with self._lock:
            if self._held_back:
                _print(self._held_back)
                self._held_back = b""


def _print(line: bytes) -> None:
    data = line + b"\n"
    with suppress(OSError):  # no one reads any more, and the node agent ends what runs here
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]


def _with_prefix(line: bytes, prefix: bytes) -> bytes:
    if piece_of(line, 0.0).local_rank is None:
        return prefix + line
    return line
