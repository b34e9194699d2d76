"""This node, as the health checks see it: commands, small files, processes, shared memory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tr11ops.base.processes import LocalCommands
from tr11ops.health.base import SharedMemoryFile, Space, TrainerProcess
from trainer.contract.files import host_name
from trainer.contract.paths import attempt_label

SHARED_MEMORY = Path("/dev/shm")
_PROBE = b"tr11 health probe\n" * 256
_MAKER = re.compile(r"(?:torch_|__KMP_REGISTERED_LIB_|pymp-)(\d+)(?!\d)")
_MAPPED = re.compile(r" /dev/shm/(.+?)(?: \(deleted\))?$", re.MULTILINE)
_KEEPERS = ("slurmstepd", "tr11ops.agent.node", "tr11ops.agent.batch", "tr11ops.cluster.local_")


class System(LocalCommands):
    """The node as the checks see it, by Linux' own files and commands. File system calls raise
    OSError, as the file system does.
    """

    def read(self, path: str) -> str:
        """The text of a small file."""
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def names(self, folder: str) -> tuple[str, ...]:
        """Names in a folder, sorted; none when there is no such folder."""
        try:
            return tuple(sorted(entry.name for entry in os.scandir(folder)))
        except FileNotFoundError:
            return ()

    def space(self, folder: str) -> Space:
        """The space of the file system that holds a folder."""
        usage = shutil.disk_usage(folder)
        return Space(usage.total, usage.free)

    def write_probe(self, folder: str) -> float:
        """Write, flush to disk, read and remove a small file; the seconds that took."""
        began = time.monotonic()
        descriptor, name = tempfile.mkstemp(prefix=".tr11-probe-", dir=folder)
        try:
            with os.fdopen(descriptor, "w+b") as stream:
                stream.write(_PROBE)
                stream.flush()
                os.fsync(stream.fileno())
                stream.seek(0)
                if stream.read() != _PROBE:
                    raise OSError(5, "what was read is not what was written", name)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()
        return time.monotonic() - began

    def now(self) -> float:
        """Seconds since the epoch, by this node's clock."""
        return time.time()

    def trainer_processes(self) -> tuple[TrainerProcess, ...]:
        """This user's processes that belong to trainings, this agent's own left out."""
        return tuple(_trainer_processes())

    def end(self, pids: Iterable[int]) -> tuple[int, ...]:
        """End processes by their ids; returns those that are still there.

        TERM, then KILL after two seconds; three more to go.
        """
        processes = []
        for pid in pids:
            with suppress(psutil.Error):
                processes.append(psutil.Process(pid))
        for ask, patience in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 3.0)):
            for process in processes:
                with suppress(psutil.Error):
                    ask(process)
            _, processes = psutil.wait_procs(processes, timeout=patience)
        return tuple(process.pid for process in processes)

    def segments(self, names: re.Pattern[str]) -> tuple[SharedMemoryFile, ...]:
        """This user's files in /dev/shm of such names that no living process uses."""
        now = time.time()
        own = os.geteuid()
        found = []
        for entry in os.scandir(SHARED_MEMORY):
            if not names.fullmatch(entry.name) or _maker_lives(entry.name):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == own and entry.is_file(follow_symlinks=False):
                    found.append(
                        SharedMemoryFile(entry.name, status.st_size, now - status.st_mtime)
                    )
        if found:
            used = mapped(own_pids())
        else:
            used = frozenset()
        return tuple(segment for segment in found if segment.name not in used)

    def remove_segment(self, name: str) -> None:
        """Remove one file of /dev/shm."""
        (SHARED_MEMORY / name).unlink()


def mapped(pids: Iterable[int]) -> frozenset[str]:
    """Names of the files in /dev/shm that these processes have mapped or open."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            names.update(
                _MAPPED.findall(
                    Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                )
            )
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = str(Path(entry.path).readlink())
                    if target.startswith("/dev/shm/"):
                        names.add(target.removeprefix("/dev/shm/"))
    return frozenset(names)


def _maker_lives(name: str) -> bool:
    match = _MAKER.match(name)
    return match is not None and psutil.pid_exists(int(match[1]))


def own_pids() -> Iterator[int]:
    """Process ids of this user."""
    own = os.geteuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == own:
                    yield int(entry.name)


def _trainer_processes() -> Iterator[TrainerProcess]:
    me = os.getpid()
    for pid in own_pids():
        with suppress(OSError, psutil.Error, IndexError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-m" not in words or pid == me:
                continue
            environment = _environment(pid)
            if "TR11_LAUNCH" not in environment or not _is_same_cluster(environment):
                continue
            ancestors = psutil.Process(pid).parents()
            if any(process.pid == me for process in ancestors):
                continue
            yield TrainerProcess(
                pid=pid,
                name=words[words.index(b"-m") + 1].decode("utf-8", "replace"),
                job_id=environment.get("TR11_JOB_ID", ""),
                launch=environment["TR11_LAUNCH"],
                node=environment.get("TR11_NODE_NAME")
                or environment.get("SLURMD_NODENAME")
                or host_name(),
                state=Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8")
                .rpartition(")")[2]
                .split()[0],
                is_kept=any(_keeps(process) for process in ancestors),
                label=_label(environment),
            )


def _label(environment: Mapping[str, str]) -> str:
    """What people call the attempt of the process that has this environment."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return attempt_label({"array_id": array, "task_id": task}, environment.get("TR11_JOB_ID", ""))


def _environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)


def _is_same_cluster(environment: Mapping[str, str]) -> bool:
    """Two clusters that play their nodes on one machine may use the same names."""
    return all(
        environment.get(name) == os.environ.get(name)
        for name in ("SLURM_CLUSTER_NAME", "SLURM_CONF")
    )


def _keeps(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.name().startswith(_KEEPERS[0]) or any(word in command for word in _KEEPERS)
    except psutil.Error:
        return False
