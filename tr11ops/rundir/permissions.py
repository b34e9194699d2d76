"""Rights of a shared tree: every file of the group and writable for it, every folder with the
setgid bit besides.

A tree is walked by several threads, because a parallel file system answers many questions at once.
Symbolic links are neither followed nor changed, so nothing outside the tree is ever touched; every
change goes through an open handle to the very file that was looked at. Only what the caller owns is
changed: of the rest, the owners are told.
"""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainer.contract.record import Record

FOLDER_BITS = stat.S_IRWXG | stat.S_ISGID
FILE_BITS = stat.S_IRGRP | stat.S_IWGRP
THREADS = 16
EXAMPLES = 1000  # faults that are kept with their names; all are counted


class PermissionFault(Record):
    """One entry that is not as it should be. `error` says why it could not be repaired, "" where no
    one tried or it was.

    `path` may hold any bytes (surrogate escapes, line ends); `owner` is a user's number.
    """

    path: str
    owner: int
    what: tuple[str, ...]
    error: str = ""


@dataclass
class PermissionTally:
    """What a walk has found so far. `unreadable` folders could not be looked into; they are faults
    as well.
    """

    folders: int = 0
    folders_found: int = 1
    entries: int = 0
    wrong: int = 0
    repaired: int = 0
    failed: int = 0
    unreadable: int = 0
    # owner -> faults that are not the caller's to repair
    others: Counter[int] = field(default_factory=Counter)
    examples: list[PermissionFault] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all were looked at."""
        return self.folders == self.folders_found

    @property
    def left(self) -> int:
        """Faults that are still there."""
        return self.wrong - self.repaired


class PermissionWalk:
    """One walk over a tree. `run` is called once; `tally` may be read by others meanwhile.

    `repair`: change what is wrong and the caller's own. `group` is the group's number that
    everything should have.
    """

    def __init__(
        self, root: Path, group: int, repair: bool, threads: int = THREADS, user: int | None = None
    ) -> None:
        self.tally = PermissionTally()
        self._root = os.path.realpath(root)
        self._group = group
        self._repair = repair
        self._threads = threads
        if user is None:
            self._user = os.geteuid()
        else:
            self._user = user
        # deep first: few folders wait at a time
        self._waiting: queue.LifoQueue[str | None] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._unexpected: BaseException | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the walk soon, from `progress` or another thread: `run` then returns what was found
        so far.
        """
        self._stopped = True

    def run(
        self,
        progress: Callable[[PermissionTally], None] = lambda tally: None,
        every_seconds: float = 0.2,
    ) -> PermissionTally:
        """Walk the whole tree. Raises OSError when its root cannot be looked at."""
        with self._opened(self._root) as descriptor:
            self._judge(self._root, descriptor, os.fstat(descriptor))
        self._waiting.put(self._root)
        workers = [
            threading.Thread(target=self._work, name=f"perms-{n}", daemon=True)
            for n in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        done = threading.Thread(target=self._waiting.join, daemon=True)
        done.start()
        while done.is_alive():
            progress(self.tally)
            done.join(every_seconds)
        for _ in workers:
            self._waiting.put(None)
        for worker in workers:
            worker.join()
        if self._unexpected is not None:
            raise self._unexpected
        progress(self.tally)
        return self.tally

    def _work(self) -> None:
        while (folder := self._waiting.get()) is not None:
            try:
                if self._unexpected is None and not self._stopped:
                    self._look_into(folder)
            except BaseException as error:  # raised again by `run`: a thread's own would be lost
                self._unexpected = error
            finally:
                self._waiting.task_done()

    def _look_into(self, folder: str) -> None:
        try:
            with self._opened(folder) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    self._entry(folder, entry.name, descriptor)
        except OSError as error:
            self._unreadable(folder, error)
        with self._lock:
            self.tally.folders += 1

    def _entry(self, folder: str, name: str, parent: int) -> None:
        path = f"{folder}/{name}"
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except FileNotFoundError:
            return  # it was removed meanwhile, as temporary files are
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                self._judge(path, descriptor, status)
                with self._lock:
                    self.tally.folders_found += 1
                self._waiting.put(path)
            elif stat.S_ISREG(status.st_mode):
                self._judge(path, descriptor, status)
        finally:
            os.close(descriptor)

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """The folder itself, open for reading: none of its parents has become a link out of the
        tree meanwhile.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            where = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if where != self._root and not where.startswith(self._root.rstrip("/") + "/"):
                raise PermissionError(1, "leads out of the tree", folder)
            yield descriptor
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ one entry
    def _judge(self, path: str, descriptor: int, status: os.stat_result) -> None:
        wanted = FOLDER_BITS if stat.S_ISDIR(status.st_mode) else FILE_BITS
        what = faults_of(status, self._group, wanted)
        is_mine = status.st_uid == self._user
        error = ""
        if what and is_mine and self._repair:
            error = self._change(descriptor, status, wanted)
        tally = self.tally
        with self._lock:
            tally.entries += 1
            if not what:
                return
            tally.wrong += 1
            if not is_mine:
                tally.others[status.st_uid] += 1
            elif error:
                tally.failed += 1
            elif self._repair:
                tally.repaired += 1
                return
            if len(tally.examples) < EXAMPLES:
                tally.examples.append(PermissionFault(path, status.st_uid, what, error))

    def _change(self, descriptor: int, status: os.stat_result, wanted: int) -> str:
        """Group first, for that clears the setgid bit; the mode at once after it. Returns the
        error's words.
        """
        handle = Path(f"/proc/self/fd/{descriptor}")
        try:
            if status.st_gid != self._group:
                os.chown(handle, -1, self._group)
            handle.chmod(stat.S_IMODE(status.st_mode) | wanted)
        except OSError as error:
            return error.strerror or str(error)
        after = os.fstat(descriptor)
        # a file system may take a change and not make it
        return ", ".join(faults_of(after, self._group, wanted))

    def _unreadable(self, folder: str, error: OSError) -> None:
        try:
            owner = os.lstat(folder).st_uid
        except FileNotFoundError:
            return
        except OSError:
            owner = self._user
        with self._lock:
            self.tally.wrong += 1
            self.tally.unreadable += 1
            if owner == self._user:
                self.tally.failed += 1
            else:
                self.tally.others[owner] += 1
            if len(self.tally.examples) < EXAMPLES:
                self.tally.examples.append(
                    PermissionFault(
                        folder, owner, ("cannot be looked into",), error.strerror or str(error)
                    )
                )


def faults_of(status: os.stat_result, group: int, wanted: int) -> tuple[str, ...]:
    """What is wrong with an entry that should be of `group` and have the bits `wanted`."""
    what = []
    if status.st_gid != group:
        what.append("other group")
    missing = wanted & ~status.st_mode
    if missing & stat.S_IRWXG:
        names = ((stat.S_IRGRP, "r"), (stat.S_IWGRP, "w"), (stat.S_IXGRP, "x"))
        what.append("g-" + "".join(name for bit, name in names if missing & bit))
    if missing & stat.S_ISGID:
        what.append("no setgid")
    return tuple(what)
