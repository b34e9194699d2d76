"""Whether a training of another trainer that is silent may be ended for a hang. Pure.

It knows nothing of tr11 and may be silent for reasons of its own. So it is ended where what is usual was
learned from this very run, and two facts that do not depend on each other say the same: nothing was
said or saved for several times as long, and its processes do nothing, or stand where they stood.
"""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.base.units import counted, duration
from tr11ops.rundir.attempts import LOOKS_APART_SECONDS, KeptStacks, TrainerLife
from trainer.contract.record import Record

OLD_SECONDS = 60.0  # what a keeper told longer ago says nothing of now
PASSED_SECONDS = 240.0  # after which a wait that ends by itself may be over
LEAST_STEPS, LEAST_OTHERS = 20, 2  # of a kind, from which on it is learned how long it takes
# waits that end by themselves once a file system or another process answers, or with a person
_INNOCENT = {
    "file": "wait for a file",
    "data-loader": "wait for their data",
    "starting": "are still starting",
    "stopped": "are stopped by a signal",
}
_WAITING = frozenset({"collective", "send-recv", "host-sync", "other"})
_NAMES = {"step": "a step", "save": "a save", "load": "a start", "evaluation": "an evaluation"}


class HangCase(Record):
    """`is_proved`, and then `evidence`; else `why` nothing is done. `wants_look`: another look at the
    stacks would tell.
    """

    is_proved: bool = False
    why: str = ""
    evidence: tuple[str, ...] = ()
    wants_look: bool = False


def hang_case(
    lives: Sequence[TrainerLife], stacks: KeptStacks | None, now: float, bound: float
) -> HangCase:
    """What speaks for a hang, and what against it. `bound`: the silence, in seconds, beyond which it is
    given up; `lives`: of all nodes, the first of which has node 0's.
    """
    against = _not_known(lives, now, bound) or _not_learned(lives[0]) or _alive(lives, now, bound)
    if against:
        return HangCase(why=against)
    innocent: list[str] = []
    if stacks is not None:
        innocent = [_INNOCENT[kind] for kind in stacks.waits if kind in _INNOCENT]
    if stacks is not None and innocent:
        is_old = now - stacks.time >= PASSED_SECONDS
        return HangCase(why=f"ranks {' and '.join(innocent)}, by their stacks", wants_look=is_old)
    silence = f"nothing was said or saved for {duration(now - _sign(lives))}"
    moved = max(life.moved or now for life in lives)
    if now - moved > bound:
        idle = f"no process of its ranks has used its processor, read or written for {duration(now - moved)}"
        return HangCase(is_proved=True, evidence=(silence, idle))
    if stacks is None or not stacks.mark:
        return HangCase(why="its processes work, and where they stand could not be read")
    if not set(stacks.waits) <= _WAITING:
        return HangCase(why=f"its processes work ({', '.join(stacks.waits)})")
    unmoved = stacks.time - (stacks.unmoved or stacks.time)
    if unmoved < LOOKS_APART_SECONDS:
        return HangCase(why="its processes use their processors", wants_look=True)
    where = f"no rank has moved for {duration(unmoved)}, by their stacks: {stacks.sentence}"
    return HangCase(is_proved=True, evidence=(silence, where))


def _sign(lives: Sequence[TrainerLife]) -> float:
    return max(life.sign for life in lives)


def _not_known(lives: Sequence[TrainerLife], now: float, bound: float) -> str:
    if not lives:
        return "nothing is known of its processes"
    missing = lives[0].nodes - len(lives)
    if missing:
        return f"nothing is known of its processes on {counted(missing, 'node')}"
    for life in lives:
        if now - life.time > OLD_SECONDS:
            return f"node {life.node_rank} has told nothing of its processes for {duration(now - life.time)}"
        if life.moved is None:
            return f"node {life.node_rank} sees no process of its ranks"
        if now - life.watched <= bound:
            return f"node {life.node_rank} has looked at it without a break for {duration(now - life.watched)} only"
    return ""


def _not_learned(first: TrainerLife) -> str:
    least = LEAST_STEPS if first.kind == "step" else LEAST_OTHERS
    known = first.learned.get(first.kind)
    seen = 0 if known is None else known.count
    if seen < least:
        return f"how long {_NAMES[first.kind]} takes is not learned from this run yet: {seen} of {least} were seen"
    return ""


def _alive(lives: Sequence[TrainerLife], now: float, bound: float) -> str:
    stopped = sum(life.stopped for life in lives)
    if stopped:
        return f"{counted(stopped, 'process', 'processes')} of it stopped by a signal: someone may be looking at it"
    waiting = sum(life.on_disk for life in lives)
    if waiting:
        return f"{counted(waiting, 'process', 'processes')} of it wait for a file system"
    if now - _sign(lives) <= bound:
        return f"the last sign of life is {duration(now - _sign(lives))} old; it is given up after {duration(bound)}"
    return ""
