"""`python -m tr11ops.twin.fault_agent ROOT KEY IDENTITY`: keeps one fault up, and heals it when its
time is over.

It lives on when the command that started it has ended, and ends with its fault, or with its twin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_kinds import find_kind
from tr11ops.twin.fault_store import FaultStore, InjectedFault
from tr11ops.twin.faults import heal
from tr11ops.twin.processes import StepWatch
from tr11ops.twin.twin import Twin

LOOK_SECONDS = 0.25  # between two looks at the fault's record
RETRY_SECONDS = 2.0


def run(root: Path, key: str, identity: str) -> int:
    """Keep the fault up until it is healed; returns 0, or 1 when the twin is gone."""
    twin = Twin.find(root.name, root.parent)
    fault = _mine(twin.faults, key, identity)
    if fault is None:
        return 0
    act = _repeated(twin, fault)
    looked = time.monotonic()
    while True:
        time.sleep(act())
        if time.monotonic() - looked < LOOK_SECONDS:
            continue
        looked = time.monotonic()
        fault = _mine(twin.faults, key, identity)
        if fault is None:
            return 0
        if fault.until is not None and time.time() >= fault.until:
            healed = heal(twin, wanted=lambda other: other.identity == identity)
            errors = [healing.error for healing in healed if healing.error]
            if not errors:
                return 0
            print(f"{fault}: {errors[0]}; trying again", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)


def _repeated(twin: Twin, fault: InjectedFault) -> Callable[[], float]:
    """What is done again and again while the fault lasts; it returns the seconds until the next
    time.
    """
    repeat = find_kind(fault.kind).repeat
    if repeat is not None:
        return partial(repeat, StepWatch(twin.folders, fault.target))
    return lambda: LOOK_SECONDS


def _mine(store: FaultStore, key: str, identity: str) -> InjectedFault | None:
    """The fault as its record says now; None when it is healed, or another one has taken its place."""
    if not store.folders.record.exists():
        return None
    fault = store.find(key)
    if fault is not None and fault.identity == identity:
        return fault
    return None


def main(arguments: list[str]) -> int:
    root, key, identity = arguments
    try:
        return run(Path(root), key, identity)
    except TwinError as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
