"""Every error that the operation raises for a reason of its own, below `Tr11Error`.

The exit code is 1 (needs a person), or the one that stands beside the name.

    any room
      Refusal
        WrongUsage  2
        Unobserved  3
      Unavailable  3
      Late  3
      Unanswered  3
      NewerFileError
      PrivateFileError
    servers and the network
      NetworkError  3
      ForeignAnswer
      ChannelLost
        ChannelBusy
        ChannelRefused
      RendezvousError  2
    the scheduler
      SchedulerError
        SchedulerUnreachable  3 (Unavailable too)
          SubmissionUnknown  3
        LaunchBusy
      ArraySyntaxError  2
      HostlistError  2
      NoPartition  2
      TableError
    nodes and the watchdog
      NodeNameError  2
      ExclusionError
      NotDone
      Uncertain
    checkpoints
      LatestRefused
      NotPossible
      TrainerAlive
      StopAsked
    copies
      ArchiveError
        ArchivePermanentError
        ArchiveFull
        ArchiveUnavailable  3 (Unavailable too)
      CopyError
        SourceDamaged
        CheckpointChanged
        CopyStopped
        CopyDamaged
        AlreadyThere
    the hub
      HubError
        HubUnavailable  3 (Unavailable too)
        HubPermanentError
          HubMissing
          HubConflict
          PublicRepository
      FileChanged
    alerts and logs
      NoSuchAlert
      NoSuchAttempt
      SourceError
    cards, scripts, studies, twins
      ScriptError  2
      ArithmeticProblem
      ConversionProblem
      SweepError
      TwinError  2

One that carries a value of its room stays there: `rundir.claims.ClaimTaken`, where another process is at
it. The trainer's are in `trainer.contract.errors`. The text of each is one line: what, where, the rule,
the fix.
"""

from __future__ import annotations

import errno
from pathlib import Path

from trainer.contract.errors import UNOBSERVED, USAGE, Tr11Error


# ----------------------------------------------------------------------------- any room
class Refusal(Tr11Error):
    """A command will not go on. The text is shown as it is; `exit_code` is what the process
    returns.
    """

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(text)
        self.exit_code = exit_code


class WrongUsage(Refusal):
    """What was typed, or what the card says, does not go together."""

    exit_code = USAGE

    def __init__(self, text: str) -> None:
        super().__init__(text, USAGE)


class Unobserved(Refusal):
    """What the command needs to know could not be looked at."""

    exit_code = UNOBSERVED

    def __init__(self, text: str) -> None:
        super().__init__(text, UNOBSERVED)


class Unavailable(Tr11Error):
    """No answer, or one that may be another at the next try. The text is one line.

    `wait` is what the other side asked for, in seconds. `was_given_up`: it was tried as often as it
    pays already.
    """

    exit_code = UNOBSERVED

    wait = 0.0
    was_given_up = False

    def __init__(self, text: str = "", wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class Late(Tr11Error, TimeoutError):
    """The effect did not end in time; whether it came about is not known."""

    exit_code = UNOBSERVED


class Unanswered(Tr11Error):
    """What was asked could not be found out: nothing follows from it. The text is the reason, one
    line.
    """

    exit_code = UNOBSERVED


class NewerFileError(Tr11Error, OSError):
    """A newer tr11 has written this file, so that this one leaves it as it is. The text is one
    line.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


class PrivateFileError(Tr11Error, ValueError):
    """The file may not be used. The text names the file and the rule, never what the file holds."""


# ----------------------------------------------------------------------------- servers and the
# network
class NetworkError(Tr11Error):
    """No answer came, or not all of it: why, in few words without an address."""

    exit_code = UNOBSERVED


class ForeignAnswer(Tr11Error):
    """What came is not what was asked for."""


class ChannelLost(Tr11Error, ConnectionError):
    """The other side is gone, or is none of ours. The text says why."""


class ChannelBusy(ChannelLost):
    """The other side cannot take us now: it may later."""


class ChannelRefused(ChannelLost):
    """The other side has judged what we are, and would again."""


class RendezvousError(Tr11Error, ValueError):
    """The options or the environment do not name a node. One line: what, the rule, the fix."""

    exit_code = USAGE


# ----------------------------------------------------------------------------- the scheduler
class SchedulerError(Tr11Error):
    """The scheduler refused a request; the text is one line, fit to be shown. `sentence`: the same
    with who said it.
    """

    @property
    def sentence(self) -> str:
        return f"the scheduler refused: {self}"


class SchedulerUnreachable(SchedulerError, Unavailable):
    """The scheduler did not answer: the state is unknown, and nothing may be concluded from it."""

    @property
    def sentence(self) -> str:
        return f"the scheduler did not answer: {self}; nothing may be concluded, try again"


class SubmissionUnknown(SchedulerUnreachable):
    """The scheduler's answer was lost, so the job may exist. `tag` is what it is found by."""

    def __init__(self, tag: str, why: str):
        super().__init__(
            f"submission {tag} was sent, the answer was lost ({why}): the job may exist, look with `tr11 status`"
        )
        self.tag = tag


class LaunchBusy(SchedulerError):
    """Another launch of this run is under way at this moment: no word of the scheduler's."""

    @property
    def sentence(self) -> str:
        return str(self)


class ArraySyntaxError(Tr11Error, ValueError):
    """The text is no array. `rule` says what is wrong and `fix` what to write instead."""

    exit_code = USAGE

    def __init__(self, rule: str, fix: str = "use 1-10") -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule = rule
        self.fix = fix


class HostlistError(Tr11Error, ValueError):
    """A text is no host list; the message is one line."""

    exit_code = USAGE


class NoPartition(Tr11Error, ValueError):
    """None is fit, and the card names none. One line."""

    exit_code = USAGE


class TableError(Tr11Error, ValueError):
    """A table of cron cannot be changed safely. One line."""


# ----------------------------------------------------------------------------- nodes and the
# watchdog
class NodeNameError(Tr11Error, ValueError):
    """A name that cannot be meant; the text is one line: what, rule, fix."""

    exit_code = USAGE


class ExclusionError(Tr11Error, ValueError):
    """A request that the ledger refuses; the text is one line, fit to be shown."""


class NotDone(Tr11Error):
    """The effect was refused and nothing was changed; one line."""


class Uncertain(Tr11Error):
    """The answer was lost: the effect may have come, or may come yet; one line."""


# ----------------------------------------------------------------------------- checkpoints
class LatestRefused(Tr11Error):
    """`latest` must not be moved, and is as before. One line."""


class NotPossible(Tr11Error):
    """Why a roll-back cannot be made. One line."""


class TrainerAlive(Tr11Error):
    """A training started in the middle of a roll-back. One line: what stands now."""


class StopAsked(Tr11Error):
    """Someone asked to stop in the middle of a reading or a removal."""


# ----------------------------------------------------------------------------- copies
class ArchiveError(Tr11Error):
    """Something is wrong with the destination. The text is one line: what, where, and if known how
    to repair it.
    """


class ArchivePermanentError(ArchiveError):
    """Trying again will not help: wrong credentials, no such bucket, a read-only file system."""


class ArchiveFull(ArchiveError):
    """No room or no quota is left."""


class ArchiveUnavailable(ArchiveError, Unavailable):
    """No answer, or one that may be another at the next try; `wait` is what the destination asked
    for, in seconds.
    """


class CopyError(Tr11Error):
    """A copy, or a restore, did not come about. The text is one line: what, where, why, what to do."""


class SourceDamaged(CopyError):
    """A file of the checkpoint is not what its manifest says. Nothing was published.

    `path` and `fault`: of a file whose bytes were read, for the record of digests; "" where sizes
    and names say it.
    """

    def __init__(self, text: str, path: str = "", fault: str = "") -> None:
        super().__init__(text)
        self.path, self.fault = path, fault


class CheckpointChanged(CopyError):
    """The checkpoint was changed, moved or removed while it was copied. Nothing was published; this
    is no damage.
    """


class CopyStopped(CopyError):
    """Stopped on request. What was sent is kept at the destination, and the next copy goes on from
    there.
    """


class CopyDamaged(CopyError):
    """What an archive holds is not what its receipt says: `path` in the copy, and what is wrong
    with it (`fault`).
    """

    def __init__(self, text: str, path: str, fault: str) -> None:
        super().__init__(text)
        self.path, self.fault = path, fault


class AlreadyThere(CopyError):
    """Another checkpoint, or a damaged one, has the place: `path` is the first file that differs."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text)
        self.path = path


# ----------------------------------------------------------------------------- the hub
class HubError(Tr11Error):
    """Something is wrong with the hub or between it and us. The text is one line."""


class HubUnavailable(HubError, Unavailable):
    """No answer, or one that may be another at the next try; `wait` is what the hub asked for, in
    seconds.
    """


class HubPermanentError(HubError):
    """Trying again will not help. `status` is the HTTP status, 0 if there was none."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class HubMissing(HubPermanentError):
    """There is no such repository, branch or file, or not for us."""


class HubConflict(HubPermanentError):
    """Someone else has committed since the parent that was named."""


class PublicRepository(HubPermanentError):
    """The repository is public, and no person has said that this is wanted."""


class FileChanged(Tr11Error):
    """A file is not what it was when its sending began. The text is one line."""


# ----------------------------------------------------------------------------- alerts and logs
class NoSuchAlert(Tr11Error, ValueError):
    """A fingerprint that names no alert, or several. The text is for the person who typed it."""


class NoSuchAttempt(Tr11Error, LookupError):
    """The log tells nothing of an attempt. `launches`: of how many launches of others it tells."""

    def __init__(self, launches: int) -> None:
        super().__init__(launches)
        self.launches = launches


class SourceError(Tr11Error, ValueError):
    """A source's output that says nothing sure; the text is one line, fit to be shown."""


# ----------------------------------------------------------------------------- cards, scripts,
# studies, twins
class ScriptError(Tr11Error, ValueError):
    """A script that cannot be read. The text is one line: which line of the script, what, and what
    to do.
    """

    exit_code = USAGE

    def __init__(self, line: int, what: str, fix: str):
        self.line = line
        super().__init__(f"line {line}: {what}; {fix}" if line else f"{what}; {fix}")


class ArithmeticProblem(Tr11Error, ValueError):
    """An expression that is not integer arithmetic of constants, or that divides by zero."""


class ConversionProblem(Tr11Error, ValueError):
    """A value that cannot become the key's; the text says why."""


class SweepError(Tr11Error, ValueError):
    """A study that cannot be planned or taken up; the text is one line. `exit_code` is what the
    command returns.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class TwinError(Tr11Error, ValueError):
    """A twin cannot be made, found or ended; the text is one line: what, where, fix."""

    exit_code = USAGE
