"""How a foreign launch ended, as its end marker says it: the reason, and whether the next task goes on.
Pure.
"""

from __future__ import annotations

import re
import signal

from msgspec.structs import replace

from tr11ops.dialects.dialect import Dialect
from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.ends import EndMeaning, meaning_of_end
from tr11ops.trainers.log import LogReading
from tr11ops.trainers.never_began import sentence
from tr11ops.trainers.stopping import StopOrder
from trainer.contract.record import Record

_OF_SIGNAL = re.compile(r"\bSIG[A-Z]{3,}|\bsignal\b")
_BY_TERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


class LastWord(Record):
    """The end marker's reason, restart and message. None of it where a launch failed: that is judged
    by what its workers left behind.
    """

    reason: str
    restart: bool
    message: str


def last_word(
    dialect: Dialect,
    course: TrainingCourse,
    status: int,
    order: StopOrder | None = None,
    wrong: str = "",
    came_again: bool = False,
    failure: int = 0,
    not_taken: str = "",
    nothing_left: str = "",
) -> LastWord | None:
    """What the end marker says of a launch whose launcher has left with `status`.

    `order`: to stop, where there was one; `wrong`: why it was ended by the guard of the start;
    `came_again`: whether the attempt before ended unexplained too; `failure`: how the first worker that
    failed ended, 0 where none did; `not_taken`: the line in which it, or its launcher, said that it never
    began, which the next launch would meet again; `nothing_left`: why it had no step to take, "" where it had.
    """
    if wrong:
        return LastWord("refused", False, wrong)
    if order is not None and not course.is_finished:
        return LastWord(order.reason, order.restart, order.line)
    if not_taken and status and not course.has_stepped:
        return LastWord("refused", False, _why_not_taken(dialect, not_taken))
    log = course.log()
    if failure not in (0, *_BY_TERM):
        # the others were ended because of it: that they were is no explanation
        log = replace(log, ending=None, ending_line="")
    meaning = meaning_of_end(dialect, log, status)
    if meaning.reason == "finished":
        return LastWord("finished", False, f"after training is done: {meaning.why}")
    if order is not None:
        return LastWord(order.reason, order.restart, order.line)
    if meaning.reason == "stopped":
        return _stopped(meaning, log)
    if meaning.reason == "unexplained":
        return _unexplained(meaning, came_again, nothing_left)
    if meaning.sequel == "hold":
        return LastWord("refused", False, meaning.why)
    return None


def _stopped(meaning: EndMeaning, log: LogReading) -> LastWord:
    """It left in order before its last step: by itself, or as a signal wanted it that no one on record had
    sent.
    """
    if _OF_SIGNAL.search(log.ending_line):
        return LastWord(
            "signal", True, f"no one on record had asked it to leave, and {meaning.why}"
        )
    return LastWord("exit-interval", True, f"it left before its last step: {meaning.why}")


def _why_not_taken(dialect: Dialect, line: str) -> str:
    """In one line, with the fix."""
    fix = ""
    if any(word.startswith("--") and word.partition("=")[0] in line for word in dialect.resume):
        fix = "a resume adds that: set trainer.resume = [] where the script finds its checkpoint itself"
    return sentence(line, fix)


def _unexplained(meaning: EndMeaning, came_again: bool, nothing_left: str) -> LastWord:
    """One more try where it may have been an accident; none where it came again, or nothing was left."""
    if nothing_left:
        return LastWord("finished", False, f"after training is done: {nothing_left}")
    again = meaning.sequel == "relaunch once" and not came_again
    return LastWord("unexplained", again, meaning.why)
