"""How long this thread has waited for other ranks, in whatever collective, by whatever library.

Every operation of torch.distributed that blocks does so in `Work.wait`, on this thread.
"""

from __future__ import annotations

import threading
import time
from functools import wraps
from typing import Any

from torch.distributed import Work

_own = threading.local()
_uncounted = Work.wait


def waited_seconds() -> float:
    """Seconds that this thread has waited since `count_waits`."""
    return getattr(_own, "seconds", 0.0)


@wraps(_uncounted)
def _counted(*arguments: Any, **options: Any) -> Any:
    began = time.perf_counter()
    try:
        return _uncounted(*arguments, **options)
    finally:
        _own.seconds = waited_seconds() + time.perf_counter() - began


def count_waits() -> None:
    """From now on every wait of this process is counted, once."""
    Work.wait = _counted  # type: ignore[method-assign]
