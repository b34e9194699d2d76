"""Faults on demand: break a twin in a given way, see what is broken, heal it. For a person and for
tests.

inject(twin, "node-dead", node="jean-zay-iam03", seconds=60)
heal(twin)
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_files import check_directory, check_script
from tr11ops.twin.fault_kinds import KINDS, FaultKind, find_kind
from tr11ops.twin.fault_store import InjectedFault, new_fault
from tr11ops.twin.machine import ACCOUNT
from tr11ops.twin.processes import NodeContents, end, scan, send
from tr11ops.twin.twin import Twin
from trainer.contract.record import Record

LONGEST_SECONDS = 7 * 86400.0


class Injection(Record):
    """What `inject` did. `was_there`: the target had this fault already, and nothing was done."""

    fault: InjectedFault
    was_there: bool = False


class Healing(Record):
    """What `heal` did about one fault. `error` is empty when it is healed; else its record stays."""

    fault: InjectedFault
    text: str = ""
    error: str = ""


def inject(
    twin: Twin,
    kind: str,
    *,
    node: str | None = None,
    path: str | None = None,
    seconds: float | None = None,
    reason: str | None = None,
) -> Injection:
    """Break the twin now; with `seconds` it heals by itself, also when this process has ended.

    `node`: where none is named, the last node with a job (or the batch host) is taken. `path`: of the faults of a
    directory. `reason`: of a drain. A target that has this fault already is left as it is.
    Raises TwinError for an unknown kind, node or directory, and when it cannot be done; nothing is then broken.
    """
    known = find_kind(kind)
    _check_options(known, node, path=path, seconds=seconds, reason=reason)
    with twin.faults.locked():
        target = _target(twin, known, node=node, path=path)
        fault = new_fault(kind, target, seconds)
        if reason:
            fault = replace(fault, details={"reason": reason})
        there = twin.faults.find(fault.key)
        if there is not None and there.is_complete and not there.is_lost:
            return Injection(there, was_there=True)
        # its doer, or the agent that kept it up, has crashed: settle that first
        if there is not None:
            _heal_one(twin, there)
        return Injection(_break(twin, known, fault))


def heal(
    twin: Twin,
    *,
    kind: str | None = None,
    target: str | None = None,
    wanted: Callable[[InjectedFault], bool] | None = None,
) -> tuple[Healing, ...]:
    """Undo what is broken: everything, or the faults of one kind, of one target, or those that are
    `wanted`.

    What cannot be undone is told in its `error`, and can be tried again. Raises TwinError for an
    unknown kind.
    """
    if kind is not None:
        find_kind(kind)
    with twin.faults.locked():
        chosen = [
            fault
            for fault in twin.faults.active()
            if kind in (None, fault.kind)
            and target in (None, fault.target)
            and (wanted is None or wanted(fault))
        ]
        # the controller first, or a drained node could not be resumed
        chosen.sort(key=lambda fault: (fault.target != "slurmctld", fault.started))
        return tuple(_heal_one(twin, fault) for fault in chosen)


def active(twin: Twin) -> tuple[InjectedFault, ...]:
    """What is broken now, oldest first."""
    return twin.faults.active()


# by --path
_NAMED = {"directory": "the run directory", "script": "the one that slurm.setup sources"}


def _check_options(
    kind: FaultKind, node: str | None, path: str | None, seconds: float | None, reason: str | None
) -> None:
    if seconds is not None and not 0 < seconds <= LONGEST_SECONDS:
        raise TwinError(
            f"--for {seconds:g}: give seconds, more than 0 and at most {LONGEST_SECONDS:.0f}"
        )
    if seconds is not None and kind.is_instant:
        raise TwinError(f"{kind.name} is over at once: leave --for out")
    if path is not None and kind.target not in _NAMED:
        raise TwinError(f"{kind.name} is of a {kind.target}: leave --path out")
    if path is None and kind.target in _NAMED:
        raise TwinError(
            f"{kind.name} is of a {kind.target}: name it with --path, such as {_NAMED[kind.target]}"
        )
    if node is not None and kind.target not in ("node", "busy node", "batch host"):
        raise TwinError(f"{kind.name} is of a {kind.target}: leave --node out")
    if reason is not None and not kind.has_reason:
        raise TwinError(f"{kind.name} has no reason: leave --reason out")
    if reason is not None and (
        not reason.isprintable() or not reason.strip() or len(reason) > 200 or '"' in reason
    ):
        raise TwinError("--reason: use one line of at most 200 characters, without double quotes")


def _target(twin: Twin, kind: FaultKind, node: str | None, path: str | None) -> str:
    fixed = {
        "controller": "slurmctld",
        "partition": twin.plan.partition,
        "reservation": "all",
        "account": ACCOUNT,
    }
    if kind.target in fixed:
        return fixed[kind.target]
    if path is not None:
        standing = [
            fault
            for fault in twin.faults.active()
            if fault.kind == kind.name and fault.target == str(Path(path))
        ]
        check = check_script if kind.target == "script" else check_directory
        if standing:
            return standing[0].target
        return str(check(path, twin.folders))
    names = twin.plan.node_names
    if node is not None and node not in names:
        near = difflib.get_close_matches(node, names, n=1, cutoff=0.6)
        hint = ""
        if near:
            hint = f"did you mean {near[0]}? "
        raise TwinError(
            f"--node {node!r} is not a node of this twin: {hint}nodes are {names[0]} to {names[-1]}"
        )
    if node is not None and kind.target == "node":
        return node
    contents = scan(twin.folders, names)
    standing_here = {fault.target for fault in twin.faults.active() if fault.kind == kind.name}
    if node is not None:
        if node not in standing_here:
            _check_busy(kind, node, contents[node])
        return node
    fitting = [name for name in names if _fits(kind, contents[name])]
    if not fitting:
        raise TwinError(f"{kind.name}: no job runs on the twin: name a --node, or start one")
    training = [name for name in fitting if contents[name].workers]
    return (training or fitting)[-1]


def _fits(kind: FaultKind, contents: NodeContents) -> bool:
    if kind.target == "batch host":
        return contents.is_batch_host
    return bool(contents.daemons)


def _check_busy(kind: FaultKind, node: str, contents: NodeContents) -> None:
    if _fits(kind, contents):
        return
    if kind.target == "batch host":
        what = "no job's batch script runs there"
    else:
        what = "no job runs there"
    raise TwinError(f"{kind.name} on {node}: {what}; leave --node out to have one chosen")


def _break(twin: Twin, kind: FaultKind, fault: InjectedFault) -> InjectedFault:
    fault = twin.faults.write(fault)
    try:
        if kind.repeat is not None or fault.until is not None:
            agent = twin.start_helper(
                f"fault-{kind.name}",
                [
                    sys.executable,
                    "-m",
                    "tr11ops.twin.fault_agent",
                    str(twin.folders.root),
                    fault.key,
                    fault.identity,
                ],
            )
            fault = twin.faults.write(replace(fault, agent=agent))
        kind.breaks(twin, fault)
        fault = twin.faults.complete(twin.faults.find(fault.key) or fault)
    except (TwinError, OSError) as error:
        broken = twin.faults.find(fault.key) or fault
        _heal_one(twin, broken)
        raise error if isinstance(error, TwinError) else TwinError(f"{fault}: {error}") from error
    if kind.is_instant:
        twin.faults.remove(fault)
    return fault


def _heal_one(twin: Twin, fault: InjectedFault) -> Healing:
    if fault.agent is not None and fault.agent.pid != os.getpid():
        send([fault.agent], signal.SIGCONT)
        end([fault.agent], 0.0)  # first, or it would break again what is repaired
    try:
        text = KINDS[fault.kind].undo(twin, fault)
    except (TwinError, OSError, KeyError) as error:
        return Healing(fault, error=" ".join(str(error).split()))
    twin.faults.remove(fault)
    return Healing(fault, text=text)
