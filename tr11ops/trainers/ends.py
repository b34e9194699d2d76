"""What the end of a launch means, for a trainer whose exit code says little. Pure.

Four of five trainers leave with 0 whether they are finished, were stopped, or found no data; so what
was asked of it comes first, then the exit codes and lines that its dialect gives a meaning, then the
step it reached.
"""

from __future__ import annotations

from typing import Literal

from tr11ops.dialects.dialect import Dialect, Sequel
from tr11ops.trainers.log import LogReading
from trainer.contract.record import Record

Reason = Literal["finished", "stopped", "error", "unexplained", "not known"]


class EndMeaning(Record):
    """What an end means: `reason`, `why` in words, and what to do: `relaunch`, `hold` what is queued
    until a person has looked, `none` where there is nothing left to train.

    An unexplained end is relaunched once, and holds the array when it comes again.
    """

    reason: Reason
    why: str
    sequel: Literal["relaunch", "relaunch once", "hold", "none", "not known"]


_SEQUELS: dict[Sequel, EndMeaning] = {
    "relaunch": EndMeaning("stopped", "it asks to be started again", "relaunch"),
    "look": EndMeaning("error", "it asks to be looked at", "hold"),
    "hold": EndMeaning("error", "it asks not to be started again", "hold"),
}


def meaning_of_end(
    dialect: Dialect, log: LogReading, status: int | None, asked: str = ""
) -> EndMeaning:
    """What an end means. `status`: the exit code of its launcher, None where no one saw it.
    `asked`: who asked it to stop, and how; "" for no one.
    """
    if asked:
        return EndMeaning("stopped", f"it was asked to: {asked}", "relaunch")
    sequel = dialect.ends.exit.get(str(status))
    if sequel is not None:
        known = _SEQUELS[sequel]
        return EndMeaning(known.reason, f"{known.why} (status {status})", known.sequel)
    if log.ending == "stopped":
        return EndMeaning("stopped", f"it says so: {log.ending_line}", "relaunch")
    if status:
        return EndMeaning("error", f"its launcher left with status {status}", "relaunch")
    if log.ending == "finished":
        return EndMeaning("finished", f"it says so: {log.ending_line}", "none")
    if _reached_total(log):
        return EndMeaning("finished", f"it reached its last step, {log.total}", "none")
    if status is None:
        return EndMeaning("not known", "no one saw its exit code", "not known")
    return _unexplained(log)


def _unexplained(log: LogReading) -> EndMeaning:
    """It left with 0, and neither it nor its last step says why."""
    if log.last is None:
        why = "it left with status 0 and took no step"
        return EndMeaning("unexplained", why, "hold")
    if log.total is None:
        why = f"it left with status 0 at step {log.last}, and no one knows its last step"
        return EndMeaning("unexplained", why, "hold")
    why = f"it left with status 0 at step {log.last} of {log.total}"
    return EndMeaning("unexplained", why, "relaunch once")


def _reached_total(log: LogReading) -> bool:
    return log.last is not None and log.total is not None and log.last >= log.total
