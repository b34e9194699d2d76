"""What each state of a node means: may new work start there, and does what runs there run on?"""

from __future__ import annotations

import itertools

import pytest

from tr11ops.cluster.base import (
    NODE_STATES,
    Node,
    StateAnswer,
    is_gone,
    is_silent,
    may_start,
    runs_on,
    state_words,
)

YES, NO, UNKNOWN = StateAnswer.YES, StateAnswer.NO, StateAnswer.UNKNOWN

# What `node_state_string` of Slurm's sinfo prints, long and compact, and the flags of scontrol
# (22.05 to 25.11).
STATES = (
    "ALLOCATED COMPLETING DOWN DRAINED DRAINING FAIL FAILING FUTURE IDLE INVAL MAINT MIXED PERFCTRS PLANNED BLOCKED "
    "POWER_DOWN POWERED_DOWN POWERING_DOWN POWER_UP POWERING_UP REBOOT REBOOT_ISSUED REBOOT_REQUESTED CANCEL_REBOOT "
    "RESERVED UNKNOWN ERROR"
).split()
COMPACT = (
    "ALLOC COMP DRAIN DRNG FAILG FUTR MIX NPC PLND BLOCK POW_DN POW_UP BOOT CANC_R RESV UNK".split()
)
FLAGS = (
    "BLOCKED CLOUD COMPLETING DRAIN DYNAMIC_FUTURE DYNAMIC_NORM EXTERNAL FAIL INVALID_REG MAINTENANCE NOT_RESPONDING "
    "PERFCTRS PLANNED POWER_DOWN POWER_DRAIN POWER_UP POWERED_DOWN POWERING_DOWN POWERING_UP REBOOT_CANCELED "
    "REBOOT_ISSUED REBOOT_REQUESTED RESERVED RESUME UNDRAIN"
).split()
# as `--json` of some versions has them
JSON = "INVALID NO_RESPOND MAINT REBOOT_CANCEL INVALID_REG".split()
SUFFIXES = "*~#!%$@^-"


@pytest.mark.parametrize(
    ("text", "words", "starts", "on"),
    [
        ("IDLE", {"idle"}, YES, YES),
        ("alloc", {"allocated"}, YES, YES),
        ("ALLOCATED+", {"allocated"}, YES, YES),  # others of its jobs are about to leave
        ("MIXED+COMPLETING", {"mixed", "completing"}, YES, YES),
        ("MIXED+PLANNED", {"mixed", "planned"}, YES, YES),
        ("mix-", {"mixed", "planned"}, YES, YES),
        ("MIXED+CLOUD+DYNAMIC_NORM", {"mixed", "cloud", "dynamic_norm"}, YES, YES),
        ("IDLE+BLOCKED", {"idle", "blocked"}, YES, YES),
        ("IDLE+RESERVED", {"idle", "reserved"}, YES, YES),
        ("ALLOCATED+REBOOT_REQUESTED", {"allocated", "reboot_requested"}, YES, YES),
        ("mixed!", {"mixed", "power_down"}, YES, YES),
        # no new work, and what runs there runs on
        ("IDLE+DRAIN", {"idle", "drain"}, NO, YES),
        ("MIXED+DRAIN", {"mixed", "drain"}, NO, YES),
        ("drng", {"drain"}, NO, YES),
        ("drained", {"drain"}, NO, YES),
        ("ALLOCATED+FAIL", {"allocated", "fail"}, NO, YES),
        ("failing", {"fail"}, NO, YES),
        ("failg", {"fail"}, NO, YES),
        ("fail", {"fail"}, NO, YES),
        ("ALLOCATED+MAINT", {"allocated", "maintenance"}, NO, YES),
        ("alloc$", {"allocated", "maintenance"}, NO, YES),
        ("ALLOCATED+DRAIN+POWER_DRAIN", {"allocated", "drain", "power_drain"}, NO, YES),
        (
            "ALLOCATED+DRAIN+REBOOT_REQUESTED",
            {"allocated", "drain", "reboot_requested"},
            NO,
            YES,
        ),  # reboot ASAP
        # no new work, and no one can say whether what runs there runs on
        ("ALLOCATED+NOT_RESPONDING", {"allocated", "not_responding"}, NO, UNKNOWN),
        ("failing*", {"fail", "not_responding"}, NO, UNKNOWN),
        ("IDLE+INVALID_REG", {"idle", "inval"}, NO, UNKNOWN),
        ("inval", {"inval"}, NO, UNKNOWN),
        ("reboot^", {"reboot_requested", "reboot_issued"}, NO, UNKNOWN),
        ("unk*", {"unknown", "not_responding"}, NO, UNKNOWN),
        ("IDLE+EXTERNAL", {"idle", "external"}, NO, UNKNOWN),
        ("UNKNOWN", {"unknown"}, UNKNOWN, UNKNOWN),
        ("", set(), UNKNOWN, UNKNOWN),
        # gone
        ("DOWN*", {"down", "not_responding"}, NO, NO),
        ("down*+drain", {"down", "drain", "not_responding"}, NO, NO),
        ("DOWN+NOT_RESPONDING", {"down", "not_responding"}, NO, NO),
        ("DOWN+CLOUD+POWERED_DOWN", {"down", "cloud", "powered_down"}, NO, NO),
        ("FUTURE", {"future"}, NO, NO),
        ("IDLE~", {"idle", "powered_down"}, YES, NO),  # it is woken for the next job
        ("idle%", {"idle", "powering_down"}, YES, NO),
        # a word of a newer Slurm says nothing, beside others or alone
        ("MIXED+NEWEST", {"mixed", "newest"}, YES, YES),
        ("DOWN+NEWEST", {"down", "newest"}, NO, NO),
        ("NEWEST", {"newest"}, UNKNOWN, UNKNOWN),
    ],
)
def test_states_as_slurm_prints_them(
    text: str, words: set[str], starts: StateAnswer, on: StateAnswer
) -> None:
    assert state_words(text) == words
    assert (may_start(words), runs_on(words)) == (starts, on)
    node = Node("n01", frozenset(words))
    assert (node.is_usable, node.is_unknown) == (starts is YES, starts is UNKNOWN)
    assert (node.is_gone, node.is_silent) == (on is NO, "not_responding" in words)


def test_every_word_and_character_of_slurm_is_in_the_table() -> None:
    names = {state.name for state in NODE_STATES}
    for word in (*STATES, *COMPACT, *FLAGS, *JSON):
        assert state_words(word) <= names, word
        assert state_words(word.lower()) == state_words(word)
    for suffix in SUFFIXES:
        assert len(state_words(f"idle{suffix}")) == 2 and state_words(f"idle{suffix}") <= names


def test_no_word_stands_for_two_states() -> None:
    spellings = [name for state in NODE_STATES for name in (state.name, *state.spellings)]
    suffixes = [state.suffix for state in NODE_STATES if state.suffix]
    assert len(spellings) == len(set(spellings)) and len(suffixes) == len(set(suffixes)) == len(
        SUFFIXES
    )


def test_of_several_words_the_worst_counts() -> None:
    order = [NO, UNKNOWN, YES]
    for one, other in itertools.combinations(NODE_STATES, 2):
        both = {one.name, other.name}
        assert may_start(both) is min(one.starts, other.starts, key=order.index)
        assert runs_on(both) is min(one.runs_on, other.runs_on, key=order.index)


def test_what_a_person_takes_out_of_service_is_never_gone() -> None:
    for taken, held in itertools.product(
        ("drain", "fail", "maintenance", "power_drain"), ("allocated", "mixed", "completing")
    ):
        assert not is_gone({taken, held}) and not is_silent({taken, held})
