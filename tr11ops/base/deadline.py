"""One deadline for a whole effect: time-outs of single reads do not end a conversation that drips."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

from tr11ops.base.errors import Late

T = TypeVar("T")

# The limits of docs/deadlines.md. Time-outs of single reads do not bound a whole look; these do.
SCHEDULER_SECONDS = (
    # of one question of a look, or of a stop: a controller that is silent for longer is unreachable
    12.0
)
# of one question that only betters an answer; after one silence no other is asked
ADVICE_SECONDS = 5.0
LOOK_SECONDS = 60.0  # of one look, its files and the scheduler together
PASS_SECONDS = 600.0  # of one pass of the watchdog, which may launch and deliver mails
# of each step of a stop in the run directory: reading what is there, setting the switch
STOP_SECONDS = 15.0


def within(seconds: float, work: Callable[[], T], abandon: Callable[[], None] = lambda: None) -> T:
    """What `work()` returns or raises, in a thread of its own. Raises Late after `seconds`, and
    calls `abandon`.

    `abandon` is to cut what the work waits for, such as a socket; what it waits for still does not
    keep the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again where the work was asked for
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(do,), name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abandon()
        raise Late(f"not done within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
