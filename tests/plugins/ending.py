"""An order to end (SIGTERM, as `timeout` and schedulers give) is taken as Ctrl-C: what fixtures
have started, such as the daemons of a twin, is ended with the tests. A kill -9 leaves them.
"""

from __future__ import annotations

import os
import signal

_ORDER = {signal.SIGTERM}


def _wait() -> None:
    """Let no order come between a fork and the child's own way with it: it would be lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ORDER)


def _go_on() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDER)


def _as_any_process() -> None:
    """What a test forks ends by the signal itself."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _go_on()


signal.signal(signal.SIGTERM, signal.default_int_handler)
os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_as_any_process)
