"""A launcher that was ended from outside: the signal that did it, by how it left or by its own words. Pure.

torchrun, accelerate and deepspeed leave with a status of their own after a signal, and say which it was;
mpirun, srun and a plain python leave with it. What they started says nothing then, or saves and leaves as
if it had been asked.
"""

from __future__ import annotations

import re
import signal

from trainer.contract.units import signal_name, signal_of_status

# what people, sites and the kernel end a process with; a crash has others
_FROM_OUTSIDE = frozenset(
    signal_name(number)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
)
_SAID = re.compile(
    rb"SignalException: Process (?P<process>\d+) got signal: (?P<number>\d+)"
    rb"|Main process received (?P<name>SIG[A-Z]+), exiting"
)
_FAILURE = re.compile(r"^the launcher was ended by SIG[A-Z]+, and no one on record had sent that")
_FOR_MEMORY = " (the kernel does so for want of memory, too)"


def signal_said(line: bytes, launchers: frozenset[int]) -> str:
    """The signal that a launcher, of these processes, says it was ended by; "" where it says none."""
    said = _SAID.search(line)
    if said is None:
        return ""
    if said["name"]:
        return said["name"].decode()
    if int(said["process"]) not in launchers:
        return ""
    return signal_name(int(said["number"]))


def signal_of_code(code: int) -> str:
    """The signal from outside of which an exit code tells, as `Popen.returncode` or as a shell has it; ""
    where it tells of none.
    """
    name = signal_name(-code) if code < 0 else signal_of_status(code)
    if name in _FROM_OUTSIDE:
        return name
    return ""


def failure_words(name: str) -> str:
    """What is recorded of a launcher that this signal ended."""
    more = _FOR_MEMORY if name == "SIGKILL" else ""
    return f"the launcher was ended by {name}, and no one on record had sent that{more}"


def ended_from_outside(error: str) -> bool:
    """Whether a recorded failure is that of a launcher which was ended from outside."""
    return _FAILURE.match(error) is not None
