"""Load torch and DeepSpeed without garbage collections: nothing of what they make as they load is
garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """No collection inside; what is there at the end stays out of every later one, each of which
    would walk it all.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
