"""What a node's state means: a table of all states and flags of Slurm, and the one judgement of
them. Pure.

The words are those of Slurm 22.05 to 25.11: of `scontrol` ("MIXED+DRAIN"), and of `sinfo` in its
long and its compact form, with the characters that follow a state ("down*", "idle~"). A node has
several at once; the worst word counts. A word that is not in the table is a newer Slurm's: it says
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from trainer.contract.record import Record


class StateAnswer(StrEnum):
    """The answer to one question about a node."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class NodeState(Record):
    """One row. `name` is tr11's word for the state, `spellings` are Slurm's other ones, `suffix` is
    its character.

    `starts`: may Slurm start new work there, now or when what holds the node has ended? `runs_on`:
    does what runs there go on? NO means that nothing can run there: such a node is gone for the job
    that had it.
    """

    name: str
    starts: StateAnswer
    runs_on: StateAnswer
    spellings: tuple[str, ...] = ()
    suffix: str = ""


_YES, _NO, _UNKNOWN = StateAnswer.YES, StateAnswer.NO, StateAnswer.UNKNOWN

NODE_STATES = (
    #         name                starts    runs_on   other spellings
    # what holds the node: nothing, or jobs
    NodeState("idle", _YES, _YES),
    NodeState("allocated", _YES, _YES, ("alloc",)),
    NodeState("mixed", _YES, _YES, ("mix",)),
    NodeState("completing", _YES, _YES, ("comp",)),
    # of the backfill scheduler, for another job
    NodeState("planned", _YES, runs_on=_YES, spellings=("plnd",), suffix="-"),
    NodeState("reserved", _YES, _YES, ("resv",)),  # for whom, the reservation says
    # by a job that has its part of the network alone
    NodeState("blocked", _YES, _YES, ("block",)),
    NodeState("perfctrs", _NO, _YES, ("npc", "net")),  # its counters are in use
    # what kind of node it is
    NodeState("cloud", _YES, _YES),
    NodeState("dynamic_norm", _YES, _YES),
    NodeState("dynamic_future", _YES, _YES),
    # without slurmd, so that no batch script starts there
    NodeState("external", _NO, _UNKNOWN),
    # taken out of service by a person, or by the site's own checks: what runs there runs on
    NodeState("drain", _NO, _YES, ("draining", "drained", "drng")),
    # "expected to fail soon"
    NodeState("fail", _NO, _YES, ("failing", "failg")),
    NodeState("maintenance", _NO, runs_on=_YES, spellings=("maint",), suffix="$"),
    NodeState("power_drain", _NO, _YES),  # drained, to be powered down
    # on its way to a reboot or to sleep; a node that sleeps is woken for the next job
    NodeState(
        "reboot_requested", _YES, runs_on=_YES, spellings=("reboot", "boot"), suffix="@"
    ),  # once it is idle
    NodeState("reboot_issued", _NO, runs_on=_UNKNOWN, spellings=(), suffix="^"),
    NodeState("reboot_canceled", _YES, _YES, ("reboot_cancel", "cancel_reboot", "canc_r")),
    NodeState(
        "power_down", _YES, runs_on=_YES, spellings=("pow_dn",), suffix="!"
    ),  # once it is idle
    NodeState("powering_down", _YES, runs_on=_NO, spellings=(), suffix="%"),
    NodeState("powered_down", _YES, runs_on=_NO, spellings=("power",), suffix="~"),
    NodeState("power_up", _YES, _UNKNOWN, ("pow_up",)),
    NodeState("powering_up", _YES, runs_on=_UNKNOWN, spellings=(), suffix="#"),
    NodeState("resume", _YES, _YES, ("resm",)),
    NodeState("undrain", _YES, _YES),
    # what is wrong with it
    NodeState("down", _NO, _NO),
    NodeState("future", _NO, _NO, ("futr",)),  # it does not exist yet
    # only its slurmd may be gone
    NodeState(
        "not_responding", _NO, runs_on=_UNKNOWN, spellings=("no_respond", "noresp"), suffix="*"
    ),
    # fewer resources than configured
    NodeState("inval", _NO, _UNKNOWN, ("invalid_reg", "invalid")),
    NodeState("error", _NO, _UNKNOWN),
    # of every node, when the controller has just begun
    NodeState("unknown", _UNKNOWN, _UNKNOWN, ("unk",)),
)

_BY_NAME = {name: state for state in NODE_STATES for name in (state.name, *state.spellings)}
_BY_SUFFIX = {state.suffix: state for state in NODE_STATES if state.suffix}


def state_words(text: str) -> frozenset[str]:
    """tr11's words for a state as Slurm prints it: "IDLE+DRAIN", "down*", "drng", "ALLOCATED+"."""
    words = set()
    for part in text.split("+"):
        name = part.strip()
        while name and name[-1] in _BY_SUFFIX:
            words.add(_BY_SUFFIX[name[-1]].name)
            name = name[:-1]
        if name:
            state = _BY_NAME.get(name.lower())
            words.add(name.lower() if state is None else state.name)
    return frozenset(words)


def may_start(words: Iterable[str]) -> StateAnswer:
    """May the scheduler start new work on a node with these words, now or when what holds it has
    ended?
    """
    return _worst(state.starts for state in _rows(words))


def runs_on(words: Iterable[str]) -> StateAnswer:
    """Does work go on that runs on a node with these words? NO: the node is gone."""
    return _worst(state.runs_on for state in _rows(words))


def is_gone(words: Iterable[str]) -> bool:
    """Can nothing run there? Not where the scheduler cannot say: silence is not absence."""
    return runs_on(words) is StateAnswer.NO


def is_silent(words: Iterable[str]) -> bool:
    """Does the node not answer the scheduler? No further step of a job can be started there; what
    runs may run on.
    """
    return "not_responding" in set(words)


def _rows(words: Iterable[str]) -> list[NodeState]:
    return [_BY_NAME[word] for word in words if word in _BY_NAME] or [_BY_NAME["unknown"]]


def _worst(answers: Iterable[StateAnswer]) -> StateAnswer:
    found = set(answers)
    for answer in (StateAnswer.NO, StateAnswer.UNKNOWN):
        if answer in found:
            return answer
    return StateAnswer.YES


LOST = "lost to the scheduler"


def lost_words(nodes: Iterable[str]) -> str:
    """What records say of nodes that were gone, or silent, when a launch ended."""
    return f"{', '.join(nodes)}: {LOST}"


def is_loss_alone(words: str) -> bool:
    """Whether a record has nothing against a node but that it was lost once; a fault that came back
    says more.
    """
    return words.partition(": ")[2] == LOST
