"""What the site does to a run, as faults of a twin (partitions, reservations, limits, nodes), by Slurm's commands."""

from __future__ import annotations

import getpass
import subprocess
import time
from collections.abc import Callable

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_effects import Break, Undo
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.processes import end
from tr11ops.twin.services import ACCOUNT
from tr11ops.twin.twin import Twin

# Slurm's own commands on a twin, as a site's administrator types them.

CLIENT_SECONDS = 30.0
# a controller that has just come back refuses much until the nodes have spoken
RETRY_SECONDS = 10.0


def ask_client(twin: Twin, command: str, *words: str) -> str:
    """What a command answers; `words` are further ones, which may hold blanks. Raises TwinError with its last words
    where it fails.
    """
    typed = [*command.split(), *words]
    try:
        done = subprocess.run(
            typed,
            env=twin.client_environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise TwinError(
            "the controller does not answer: heal that first (tr11 twin heal)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise TwinError(
            f"{typed[0]} {typed[1]}: {said[-1] if said else f'exit status {done.returncode}'}"
        )
    return done.stdout


def retried(action: Callable[[], object]) -> None:
    """Do it again while it is refused, for a while. Raises the last TwinError."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            action()
        except TwinError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            return


MAINTENANCE = "tr11-maintenance"  # the name of the reservation
MAINTENANCE_MINUTES = 600
LOWERED_MINUTES = 5
LEFT_MINUTES = 2  # of a lowered job, counted from the whole minutes that it has run
END_SECONDS = 90.0  # the controller looks at its reservations now and then
FOREIGN_REASON = "memory errors on DIMM B2, ticket 20917 (site staff)"


# ----------------------------------------------------------------------------- the partition
def change_partition(setting: str) -> Break:
    """A break that changes the GPU partition."""

    def change(twin: Twin, fault: InjectedFault) -> None:
        ask_client(twin, f"scontrol update PartitionName={fault.target} {setting}")

    return change


def open_partition(twin: Twin, fault: InjectedFault) -> str:
    change_partition("State=UP")(twin, fault)
    return f"partition {fault.target} is up"


def restore_time_limit(twin: Twin, fault: InjectedFault) -> str:
    change_partition(f"MaxTime={twin.plan.max_time_minutes}")(twin, fault)
    return f"partition {fault.target} allows {twin.plan.max_time_minutes} minutes"


def begin_maintenance(twin: Twin, _fault: InjectedFault) -> None:
    ask_client(
        twin,
        f"scontrol create reservation ReservationName={MAINTENANCE} StartTime=now Duration={MAINTENANCE_MINUTES} "
        f"Nodes={','.join(twin.plan.gpu_node_names)} Users={getpass.getuser()} Flags=MAINT,IGNORE_JOBS",
    )


def end_maintenance(twin: Twin, fault: InjectedFault) -> str:
    if MAINTENANCE in _reservations(twin):
        ask_client(twin, f"scontrol delete ReservationName={MAINTENANCE}")
    return f"the maintenance of {fault.target} is over"


# ----------------------------------------------------------------------------- one job
def lower_job_limit(twin: Twin, fault: InjectedFault) -> None:
    """Of the job whose batch script runs on the node. Slurm counts limits in whole minutes."""
    running = ask_client(
        twin, f"squeue --noheader --states=RUNNING --nodelist={fault.target}", "--format=%A %B %S"
    )
    for line in running.splitlines():
        job, batch_host, start = line.split()
        if batch_host != fault.target:
            continue
        ran = time.time() - time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
        limit = int(ran // 60) + LEFT_MINUTES
        ask_client(twin, f"scontrol update JobId={job} TimeLimit={limit}")
        twin.faults.write(replace(fault, details={"job": job}))
        return
    raise TwinError(f"job-limit-lowered: no job's batch script runs on {fault.target}")


# ----------------------------------------------------------------------------- reservations and
# limits
def end_reservations(twin: Twin, _fault: InjectedFault) -> None:
    """End all of them, and wait until the controller has taken them away. Raises TwinError where
    there is none.
    """
    names = [name for name in _reservations(twin) if name != MAINTENANCE]
    if not names:
        raise TwinError(
            "reservation-ended: the twin has no reservation; `scontrol create reservation` makes one"
        )
    for name in names:
        soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
        ask_client(twin, f"scontrol update ReservationName={name} EndTime={soon}")
    deadline = time.monotonic() + END_SECONDS
    while set(names) & set(_reservations(twin)):
        if time.monotonic() > deadline:
            raise TwinError(
                f"reservation-ended: {names[0]} is still there after {END_SECONDS:.0f} s"
            )
        time.sleep(0.2)


def _reservations(twin: Twin) -> list[str]:
    words = ask_client(twin, "scontrol --oneliner show reservation").split()
    return [word.partition("=")[2] for word in words if word.startswith("ReservationName=")]


def exhaust_limit(twin: Twin, _fault: InjectedFault) -> None:
    if not twin.plan.accounting:
        raise TwinError(
            "limit-exhausted: the twin has no accounting: make one with `tr11 twin up --accounting`"
        )
    _grant(twin, 0)


def lift_limit(twin: Twin, fault: InjectedFault) -> str:
    if twin.plan.accounting:
        _grant(twin, -1)
    return f"account {fault.target} has no limit"


def _grant(twin: Twin, minutes: int) -> None:
    """CPU minutes of the twin's account in all; -1: without a limit."""
    ask_client(twin, f"sacctmgr --immediate modify account {ACCOUNT} set GrpTRESMins=cpu={minutes}")


# ----------------------------------------------------------------------------- nodes
def set_aside(state: str) -> Break:
    """A break that puts the node into a state of an administrator's, DRAIN or FAIL, in another
    person's name.
    """

    def change(twin: Twin, fault: InjectedFault) -> None:
        now, reason = _node_facts(twin, fault.target)
        wanted = fault.details.get("reason") or FOREIGN_REASON
        if state in now and reason != wanted:
            raise TwinError(
                f"{fault.kind}: {fault.target} is {now} already ({reason or 'no reason given'}); that is left as it is"
            )
        twin.faults.write(replace(fault, details={"reason": wanted}))
        ask_client(
            twin, f"scontrol update NodeName={fault.target} State={state}", f"Reason={wanted}"
        )

    return change


def resume_from(state: str) -> Undo:
    """Take the node out of that state, unless someone else has put it there meanwhile."""

    def undo(twin: Twin, fault: InjectedFault) -> str:
        now, reason = _node_facts(twin, fault.target)
        if state not in now:
            return f"{fault.target} is not in {state} any more"
        if reason != fault.details.get("reason"):
            return f"{fault.target} stays in {state}: the reason is another one now ({reason})"
        retried(lambda: ask_client(twin, f"scontrol update NodeName={fault.target} State=RESUME"))
        return f"{fault.target} is resumed"

    return undo


def _node_facts(twin: Twin, node: str) -> tuple[str, str]:
    """State and reason of a node, as the controller says."""
    state = reason = ""
    for line in ask_client(twin, f"scontrol show node {node}").splitlines():
        words = line.strip()
        if words.startswith("State="):
            state = words.removeprefix("State=").split()[0]
        if words.startswith("Reason="):
            reason = words.removeprefix("Reason=").rsplit(" [", 1)[0]
    return state, reason


def remove_node(twin: Twin, fault: InjectedFault) -> None:
    """Refused where jobs run on it: Slurm would lose them, which is another fault (node-dead)."""
    if fault.target not in twin.plan.gpu_node_names:
        raise TwinError(f"node-removed: {fault.target} is no node of the GPU partition")
    removed = _removed(twin, fault) | {fault.target}
    if len(removed) >= twin.plan.nodes:
        raise TwinError("node-removed: it is the last node of its partition")
    slurmd = twin.process(fault.target)
    twin.faults.write(replace(fault, processes=(slurmd,)))
    _configure(twin, removed)
    end([slurmd], 5.0)


def put_node_back(twin: Twin, fault: InjectedFault) -> str:
    _configure(twin, _removed(twin, fault))
    if not twin.process(fault.target).is_alive:
        twin.start_daemon(fault.target)
    return f"{fault.target} is in the configuration again"


def _removed(twin: Twin, but: InjectedFault) -> frozenset[str]:
    """The nodes that other faults have removed."""
    others = (
        fault
        for fault in twin.faults.active()
        if fault.kind == but.kind and fault.identity != but.identity
    )
    return frozenset(fault.target for fault in others)


def _configure(twin: Twin, without: frozenset[str]) -> None:
    """The controller with a configuration that lacks these nodes; it answers when this returns."""
    twin.configure(without)
    end([twin.process("slurmctld")], 20.0)
    twin.start_daemon("slurmctld")
    retried(lambda: ask_client(twin, "scontrol show partitions"))
