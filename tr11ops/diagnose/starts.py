"""A launch that came to no step: what its start says of the end. Pure.

Processes that wait for others that were never started hang until the time is up, and would the next
time. Ranks that wait for one that still prepares the data time out, however well the network is.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import FaultClass, NextStep, NodeBlame, Role
from tr11ops.diagnose.waits import UNREACHED

_JOINED: Final = "members-joined"
_STARTED: Final = "members-started"
_NOT_PLACED: Final = "ray-not-placed"
_MEMBERS: Final = re.compile(r"\b(?P<joined>\d+) ?(?:/|of) ?(?P<members>\d+) (?:\w+ )?joined")
_TOO_FEW: Final = (
    "all processes that the launcher starts had come: it starts fewer than the program waits for"
)
_NO_ROOM: Final = (
    "Ray found no room for all that the program asks for: fewer GPUs are free than it needs"
)
_AGAIN: Final = 2  # times that it says so: at first it may only be about to place them
_PREPARES: Final = "data-preparation"
_PREPARED: Final = "data-prepared"
_NEAR_END = 30  # lines in which a log ends that tells of a wait and of nothing else
_ORDERS = frozenset({FaultClass.SLURM_TIME_LIMIT, FaultClass.SLURM_USER_CANCEL})
_WAITS = frozenset({FaultClass.NCCL_TIMEOUT, FaultClass.NCCL_NETWORK})
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|[Tt]imeout|TIMEOUT")
_TURNS = re.compile(r"in \w*(?:process_first|zero_first|rank_first|main_process_first)\w*$")
_STORE_LOST: Final = "rendezvous-store-lost"
_STORE = re.compile(r"\bstore\b|[Rr]endezvous|\brdzv\b")
_NO_STORE = "the store through which workers find each other was lost before the first step"
# what a launch script and its tasks print of how many there are, and of how many are waited for
_TASKS = re.compile(
    r"\bSLURM_NTASKS\b\W{0,3}(\d+)|\bsrun\b.{0,120}?(?:--ntasks[= ]|\s-n ?)(\d+)\b|\bsrun started (\d+) tasks"
)
_WORLD = re.compile(r"\b(?:WORLD_SIZE|world_size)\b\W{0,3}(\d+)\b")
# of whose tasks each starts more than one rank
_STARTS_MORE = re.compile(
    r"torchrun|torch\.distributed\.(?:run|launch)|nproc|accelerate|deepspeed|elastic|LOCAL_WORLD_SIZE"
)
# one who finds no address of one family; there may be one of the other
_ASKER = re.compile(r"(?m)^(.+?)\[W.{0,200}cannot be retrieved \(gai error: -2")
_NO_ADDRESS = re.compile(r"cannot be retrieved \(gai error: -2\b")
_TRIED = re.compile(r"client socket (?:has failed|cannot be initialized) to connect to \[")
_NO_HOST: Final = "no one knows the name of the host that workers connect to"
# loopback and link addresses, the bridges of Docker, and blocks that are given to no host (RFC 6890)
NO_OTHERS_ADDRESS: Final = (
    r"(?:localhost\b|\[?::1\b|(?:127|169\.254|192\.0\.[02])(?:\.\d+)+"
    r"|172\.(?:1[7-9]|2\d|3[01])\.0\.1\b)"
)
_TRIED_AT = re.compile(
    r"(?:client socket (?:has failed|cannot be initialized) to connect to \[|Connecting to JAX distributed service on )"
    r"(?P<address>[\w.:-]+)"
)
_AT_NO_OTHERS_ADDRESS = re.compile(NO_OTHERS_ADDRESS)
_GIVEN = re.compile(r"trying to connect to \(?(?P<address>[\w.:-]+)")
_AT_NO_OTHERS: Final = "workers look for each other at an address that no other host can have"
_REFUSED = re.compile(r"[Cc]onnection refused|ECONNREFUSED|errno: 111\b")
_REFUSED_LONG: Final = 5  # times: who only starts later is refused once or twice
_NO_LISTENER: Final = (
    "the host at which workers look for each other is up, and none of them listens there"
)
_ALONE = re.compile(
    r"\b1(?:/| of )(?P<members>\d+) (?:\w+ )?(?:have |has )?(?:joined|registered|connected|checked in|arrived|ready)\b"
)
_NO_ONE_CAME: Final = (
    "none of the others came: they were not started, or look for the one that waited elsewhere"
)
_SEVERAL: Final = 3  # members, of which one may be late or lost, and hardly all others
FEWER: Final = 0.8
STILL_PREPARES: Final = 0.7
SAID_BELOW: Final = 0.7


def explained(root: Sighting | None, launch: LogLaunch) -> Sighting | None:
    """The root cause, or what the start of the launch says in its place where no step came."""
    if launch.progress is not None:
        return root
    if root is None or (root.signature.role is Role.STOP and root.signature.fault in _ORDERS):
        return _fewer_than_expected(launch, root) or _too_few_tasks(launch, root) or root
    why = ""
    if root.signature.fault is FaultClass.RENDEZVOUS:
        why = _never_came(launch) or _cannot_meet(root, launch)
    if why:
        return replace(
            root, signature=replace(root.signature, step=NextStep.FIX_CONFIG, meaning=why)
        )
    is_symptom = root.signature.role is Role.SYMPTOM
    is_wait = root.signature.fault is FaultClass.RENDEZVOUS or (
        is_symptom and root.signature.fault in _WAITS
    )
    if is_wait and not root.signature.own and _waits_for_data(root, launch):
        meaning = "the ranks waited for one that still prepared the data: prepare it once before, or wait longer"
        return _of_settings(root, FaultClass.NCCL_TIMEOUT, STILL_PREPARES, meaning)
    is_lost_peer = is_symptom and root.signature.fault is FaultClass.NCCL_NETWORK
    lost = [one.signature for one in launch.sightings if one.signature.id == _STORE_LOST]
    if is_lost_peer and lost:  # who lost it says so of the store, below its own error
        return replace(
            root, signature=replace(lost[0], confidence=SAID_BELOW, id=root.signature.id)
        )
    if is_lost_peer and _STORE.search(root.text) is not None:
        return replace(
            root, signature=replace(root.signature, fault=FaultClass.RENDEZVOUS, meaning=_NO_STORE)
        )
    return root


def _of_settings(root: Sighting, fault: FaultClass, confidence: float, meaning: str) -> Sighting:
    """The sighting as one of settings that have to be changed, for which no node is to blame."""
    signature = replace(
        root.signature,
        fault=fault,
        step=NextStep.FIX_CONFIG,
        blame=NodeBlame.PROGRAM,
        confidence=confidence,
        meaning=meaning,
    )
    return replace(root, signature=signature)


def _fewer_than_expected(launch: LogLaunch, root: Sighting | None) -> Sighting | None:
    """The last process that said how many are expected, where fewer came."""
    said = [one for one in launch.sightings if one.signature.id == _JOINED]
    if not said or (root is None and launch.last_line - said[-1].line_number > _NEAR_END):
        return None
    expected = max(int(one.named["members"]) for one in said)
    came = max(int(one.named["joined"]) for one in said)
    came = max(
        came, launch.counts.get(_JOINED, 0) if len(said) < launch.counts.get(_JOINED, 0) else came
    )
    if came >= expected:
        return None
    meaning = f"only {came} of {expected} processes came to the start: fewer are started than expected, or one is lost"
    signature = replace(said[-1].signature, role=Role.CAUSE, confidence=FEWER, meaning=meaning)
    return replace(said[-1], signature=signature, is_mild=False)


def _never_came(launch: LogLaunch) -> str:
    """Why not all came that the program waits for, where the log says that they cannot come; ""
    where it does not.
    """
    if launch.counts.get(_NOT_PLACED, 0) >= _AGAIN:
        return _NO_ROOM
    if _never_started(launch) or _has_fewer_tasks(launch):
        return _TOO_FEW
    if _finds_no_address(launch):
        return _NO_HOST
    return ""


def _cannot_meet(root: Sighting, launch: LogLaunch) -> str:
    """Why workers did not meet, where that is no passing fault; "" where it may be one.

    Between processes of one host there is no network that fails for a while, and a late or lost node is
    one of several.
    """
    alone = _ALONE.search(root.text)
    if alone is not None and int(alone["members"]) >= _SEVERAL:
        return _NO_ONE_CAME
    if UNREACHED.search(root.text) is None:
        return ""
    heads = "\n".join(head.text for head in launch.heads if head.file == root.file)
    tried = _TRIED_AT.findall(heads) or _GIVEN.findall(root.text)
    if tried and all(_AT_NO_OTHERS_ADDRESS.match(address) for address in tried):
        return _AT_NO_OTHERS
    if tried and len(_refusals(heads, tried[0])) >= _REFUSED_LONG:
        return _NO_LISTENER
    return ""


def _refusals(heads: str, address: str) -> list[str]:
    """The lines that say that the host of this address answered, and nothing of it listened."""
    return [
        line for line in heads.splitlines() if address in line and _REFUSED.search(line) is not None
    ]


def _finds_no_address(launch: LogLaunch) -> bool:
    """Whether a process looked a name up again and again, or each of several did, and none ever had an
    address to try.
    """
    head = "\n".join(head.text for head in launch.heads)
    askers = _ASKER.findall(head)
    asked_in = {one.file for one in launch.heads if _NO_ADDRESS.search(one.text) is not None}
    is_lasting = len(set(askers)) < len(askers) or len(asked_in) >= _AGAIN
    return is_lasting and _TRIED.search(head) is None


def _too_few_tasks(launch: LogLaunch, root: Sighting | None) -> Sighting | None:
    """The end of a launch that waited for more ranks than Slurm started tasks, as one of settings."""
    if root is None or not _has_fewer_tasks(launch):
        return None
    cause = replace(root, signature=replace(root.signature, role=Role.CAUSE))
    return _of_settings(cause, FaultClass.RENDEZVOUS, FEWER, _TOO_FEW)


def _has_fewer_tasks(launch: LogLaunch) -> bool:
    """Whether the head of the log tells one number of tasks, and a larger one of ranks; each task is
    one rank.
    """
    head = "\n".join(head.text for head in launch.heads)
    if _STARTS_MORE.search(head) is not None:
        return False
    tasks = {int(found[found.lastindex or 0]) for found in _TASKS.finditer(head)}
    ranks = {int(found[1]) for found in _WORLD.finditer(head)}
    return len(tasks) == 1 and len(ranks) == 1 and max(tasks) < max(ranks)


def _never_started(launch: LogLaunch) -> bool:
    """Whether all came that the launcher says it starts, and they wait for more."""
    started = {
        int(one.named["started"]) for one in launch.sightings if one.signature.id == _STARTED
    }
    joined = [
        _MEMBERS.search(one.text)
        for one in launch.sightings
        if one.signature.fault is FaultClass.RENDEZVOUS
    ]
    newest = [one for one in launch.sightings if one.signature.id == _JOINED][-1:]
    joined += [re.search(r"\b(?P<joined>\d+) ?/ ?(?P<members>\d+)\b", one.text) for one in newest]
    return any(
        found is not None
        and int(found["joined"]) in started
        and int(found["joined"]) < int(found["members"])
        for found in joined
    )


def _waits_for_data(root: Sighting, launch: LogLaunch) -> bool:
    if _TIMED_OUT.search(root.text) is None:
        return False
    frames = () if root.raised is None else root.raised.frames
    if any(_TURNS.search(frame) for frame in frames):
        return True
    seen = {one.signature.id for one in launch.sightings}
    return _PREPARES in seen and _PREPARED not in seen
