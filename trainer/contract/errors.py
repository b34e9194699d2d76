"""Every error that the trainer and the operation raise for a reason of theirs: one base, and the
trainer's own.

The exit code is 1 (needs a person), or the one that stands beside the name.

    any command
      UsageError  2
    run directory and checkpoints
      DamagedFile
      NewerFormat
      LeaseLost
      CheckpointError
        ScheduleMismatch
        NodeFilesError
      LatestStays
    data
      DataError
        LostWorkerError
        InputFault
      DataMismatch
      HubFileError
    the course of a training
      RangeError  2
      NotFiniteError
      LostRanksError
      ProbeFailure

`trainer.config.base.CardError` is one of them too; the operation's are in `tr11ops.base.errors`.
The text of each is one line: what, where, the rule, the fix. Standard library only.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NEEDS_PERSON = 1
USAGE = 2
UNOBSERVED = 3


class Tr11Error(Exception):
    """What went wrong, in words fit to be shown. `exit_code`: what a command that ends with it
    returns.
    """

    exit_code = NEEDS_PERSON

    @property
    def sentence(self) -> str:
        """The text, with who said it where that is not tr11."""
        return str(self)


class UsageError(Tr11Error):
    """Options that cannot be meant; the text is one line."""

    exit_code = USAGE


_NO_ACCESS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
    }
)


# ----------------------------------------------------------------------------- run directory and
# checkpoints
class DamagedFile(Tr11Error, ValueError):
    """A state file is there and is not what belongs there. One line: its path, and what is wrong
    with it.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.path = path
        self.what = what


class NewerFormat(Tr11Error, ValueError):
    """A file of a newer tr11: this one cannot judge it. One line."""


# so a LeaseLost begins that says that the run directory is not seen: the watchdog knows it by this
HIDDEN_LEASE = "this trainer's lease on the run is not in"


class LeaseLost(Tr11Error, ValueError):
    """This trainer does not hold the lease any more: it must not publish anything. One line."""


class CheckpointError(Tr11Error, ValueError):
    """A checkpoint that cannot be written, found or loaded: one line with what, where, the rule and
    the fix.
    """


class ScheduleMismatch(CheckpointError):
    """The card's schedule is not the checkpoint's, and no one said which one counts; one line for
    each value. `faults`: of each the rule and the fix.
    """

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(f"{rule}; {fix}" for rule, fix in self.faults)


class NodeFilesError(CheckpointError):
    """The file system refused some nodes what it gave others at the same moment, in the same
    folder.

    `failed` and `served`: the nodes' names. `codes`: the errors of the operating system.
    """

    def __init__(
        self, text: str, failed: Sequence[str], served: Sequence[str], codes: Sequence[int]
    ) -> None:
        super().__init__(text)
        self.failed = tuple(failed)
        self.served = tuple(served)
        self.codes = tuple(codes)

    @property
    def node_without_access(self) -> str:
        """The one node that does not reach the files; "" where there are several, or it is a file
        that is missing.
        """
        is_access = all(code in _NO_ACCESS for code in self.codes)
        if len(self.failed) == 1 and is_access:
            return self.failed[0]
        return ""


class LatestStays(Tr11Error):
    """Raised by a fence: what was written may have its name, and `latest` must not come to name it."""


# ----------------------------------------------------------------------------- data
class DataError(Tr11Error, ValueError):
    """Data, or a request about data, that cannot be used. The text is one line: what, where, rule,
    fix.

    `rule` and `fix`: its two parts, where who raises it gives them apart; else all is the rule.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(f"{rule}; {fix}" if fix else rule)
        self.rule, self.fix = rule, fix


class LostWorkerError(DataError):
    """A data worker that was killed, ended or does not answer: of this node now, and no fault of
    the data.
    """


class InputFault(DataError):
    """A DataError that lies in the input itself: the same command fails again until the input is
    another.
    """


class DataMismatch(Tr11Error, ValueError):
    """The data is not what the checkpoint was trained on, and no one said that it shall be. One
    line.
    """


class HubFileError(Tr11Error, ValueError):
    """A file of the hub that is neither in the cache nor to be had. The text says what to type."""


# ----------------------------------------------------------------------------- the course of a
# training
class RangeError(Tr11Error, ValueError):
    """A range of iterations that is not one; the text says which and why."""

    exit_code = USAGE


class NotFiniteError(Tr11Error, RuntimeError):
    """The training has diverged: going on, or saving, would be worth nothing. One line."""


class LostRanksError(Tr11Error, RuntimeError):
    """The ranks have lost each other where nothing but that can be meant. One line."""


def lost_a_rank(error: BaseException) -> bool:
    """Whether it says that the ranks have lost each other, so that there is nothing to go on with."""
    return isinstance(error.__cause__, RuntimeError)


class ProbeFailure(Tr11Error):
    """A number that should have come out did not. One line."""


@contextmanager
def explain_os_errors(doing: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that says what was being done, where, and
    the fix.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{doing} {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk or the quota is full; free space or choose another folder, then run the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            "no permission to do that there; choose another folder or ask its owner for the right"
        )
    if error.errno == errno.ENOENT:
        return "there is no such file or folder; check the path"
    return f"{error.strerror or error}"
