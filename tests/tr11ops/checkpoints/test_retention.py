"""What stays and why: each rule by itself, and the rules that no input whatever may break; pins, changed by many at
once.
"""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.checkpoints.shelf import DAY, NOW, STORE, URL, Shelf, policy
from tr11ops.base.observed import Unknown
from tr11ops.checkpoints.catalogue import Catalogue, Clocks, Uses
from tr11ops.checkpoints.retention import RetentionPolicy, counts, decide, decide_quarantined
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_digests import DigestRecord
from tr11ops.rundir.checkpoint_pins import Pin, pin, read_pins, state_folder, unpin
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.copies import CopyRecord
from tr11ops.rundir.copy_policy import wanted_copies
from trainer.contract.recovery import RecoveryEvent, RecoveryRecord
from trainer.contract.resumable import ResumeNeed

CLOCKS = Clocks(NOW, NOW)


def rules(shelf: Shelf, clocks: Clocks = CLOCKS, **changes: Any) -> dict[int, str]:
    return {
        decision.step: decision.rule
        for decision in decide(shelf.catalogue(), policy(**changes), clocks)
    }


def words(shelf: Shelf, step: int, **changes: Any) -> str:
    found = decide(shelf.catalogue(), policy(**changes), CLOCKS)
    return next(decision.why for decision in found if decision.step == step)


# ----------------------------------------------------------------------------- each rule
def test_steps_count_as_numbers(shelf: Shelf) -> None:
    shelf.save(10_000, 9_900, 9_800, 9_700)  # by name, 9900 would be the newest
    (shelf.folder / "latest").write_text("global_step10000")
    assert rules(shelf) == {9_700: "goes", 9_800: "goes", 9_900: "in use", 10_000: "in use"}
    assert rules(shelf, keep_latest=3)[9_800] == "newest"


def test_saves_between_those_of_the_card_push_none_of_these_out(shelf: Shelf) -> None:
    shelf.save(1100, 1200, 1210, 1220, 1300, 1310, 1320)
    (shelf.folder / "latest").write_text("global_step1320")
    assert rules(shelf, keep_latest=3)[1200] == "goes"
    found = rules(shelf, keep_latest=3, interval=100)
    assert {step for step, rule in found.items() if rule == "goes"} == {1210, 1220}
    assert words(shelf, 1100, keep_latest=3, interval=100).endswith("of each 100 iterations")


def test_what_the_schedule_wants_stays_until_its_copy_was_read(shelf: Shelf) -> None:
    shelf.save(1000, 2000, 3000, 3100)
    assert words(shelf, 1000) == "no whole copy in the store (store_interval 1000)"
    shelf.copy(1000)
    assert rules(shelf)[1000] == "goes"
    assert words(shelf, 1000) == "older than the newest 2; copied to store (whole)"
    for changes, why in (
        ({"damaged": ("a.bin",)}, "the whole copy in the store (store_interval 1000) is damaged"),
        ({"verified": 0.0}, "lies in another archive, or was not verified"),
        ({"address": "/elsewhere"}, "lies in another archive, or was not verified"),
        ({"identity": "ff"}, "was made of another checkpoint of this step"),
        ({"kind": "weights"}, "no whole copy in the store"),
    ):
        shelf.copy(1000, **changes)
        assert rules(shelf)[1000] == "not backed up" and why in words(shelf, 1000)


def test_a_whole_copy_serves_as_weights_but_not_the_reverse(shelf: Shelf) -> None:
    shelf.save(3000, 10_000, 11_000, 11_100)
    wanted = BackupSection(url="gs://b", milestone_percent=0)
    shelf.copy(3000, "full", "url")
    shelf.copy(10_000, "weights", "url")
    assert rules(shelf, copies=wanted) == {
        3000: "goes",
        10_000: "not backed up",
        11_000: "in use",
        11_100: "in use",
    }
    assert "no whole copy in the url" in words(shelf, 10_000, copies=wanted)


def test_one_of_each_tenth_stays_unless_a_whole_copy_exists(shelf: Shelf) -> None:
    shelf.save(900, 1000, 1100, 2100, 2200, 2900, 3900, 3950)
    mine = {"copies": BackupSection(), "milestone_percent": 10.0, "last_step": 10_000}
    assert rules(shelf, **mine) == {
        900: "goes", 1000: "milestone", 1100: "goes", 2100: "milestone", 2200: "goes", 2900: "goes",
        3900: "in use", 3950: "in use",
    }  # fmt: skip
    assert words(shelf, 1000, **mine) == "first at 10 % of the training, and no verified whole copy"
    shelf.copy(1100)  # the copy of any checkpoint of that tenth will do
    assert rules(shelf, **mine)[1000] == "goes"
    shelf.copy(1100, damaged=("x",))
    assert rules(shelf, **mine)[1000] == "milestone"


def test_pins_doubts_and_a_loading_attempt_keep(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    seen = shelf.catalogue()
    assert [decision.rule for decision in decide(seen, policy(), CLOCKS)] == [
        "goes",
        "in use",
        "in use",
    ]
    pinned = replace(seen.checkpoints[0], pin=Pin(100, "ana", NOW, "for the paper"))
    (first, *_) = decide(
        replace(seen, checkpoints=(pinned, *seen.checkpoints[1:])), policy(), CLOCKS
    )
    assert (first.rule, first.why) == ("pinned", "pinned by ana: for the paper")
    for changes, rule in (
        ({"read_errors": ("pins: Permission denied",)}, "unknown"),
        ({"uses": Uses(loading="attempt 7")}, "in use"),
    ):
        found = decide(replace(seen, **changes), policy(), CLOCKS)
        assert not any(decision.goes for decision in found) and found[0].rule == rule


def test_damage_does_not_count_as_one_of_the_last_two(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    (shelf.folder / "global_step300" / "weights" / "a.bin").write_bytes(b"")
    assert rules(shelf) == {100: "goes", 200: "in use", 300: "last two", 400: "in use"}
    seen = shelf.catalogue()
    bad = DigestRecord(200, "", NOW, 4, 256, ("a.bin: its digest differs",))
    for digests in (bad, Unknown("it cannot be read")):
        known = tuple(
            replace(entry, digests=digests, used_by=()) if entry.step == 200 else entry
            for entry in seen.checkpoints
        )
        assert not any(
            decision.goes for decision in decide(replace(seen, checkpoints=known), policy(), CLOCKS)
        )


def test_no_whole_checkpoint_goes_because_of_weights_alone(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400, 500)
    for step in (300, 400, 500):
        shelf.without_optimizer(step)
    verdicts = {decision.step: decision for decision in decide(shelf.catalogue(), policy(), CLOCKS)}
    assert not any(decision.goes for decision in verdicts.values())
    assert (verdicts[100].rule, verdicts[200].rule) == ("in use", "in use")


def test_another_models_checkpoint_is_left_to_a_person(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    shelf.write_manifest(100, model={"model.layers": 70})
    catalogue = shelf.catalogue(need=ResumeNeed({"model.layers": 4}))
    (first, *_) = decide(catalogue, policy(), CLOCKS)
    assert (first.goes, first.rule) == (False, "unclear") and "another model" in first.why


def test_what_cannot_be_seen_is_not_taken_for_damaged(shelf: Shelf) -> None:
    shelf.save(1100, 2100, 3100, 3200)
    mine = {"copies": BackupSection(), "milestone_percent": 10.0, "last_step": 10_000}
    seen = shelf.catalogue()
    blind = replace(seen.checkpoints[0], faults=("weights/a.bin: Stale file handle",), changed=None)
    (first, *_) = decide(
        replace(seen, checkpoints=(blind, *seen.checkpoints[1:])), policy(**mine), CLOCKS
    )
    assert (first.rule, first.why) == ("unclear", "weights/a.bin: Stale file handle")
    (
        shelf.folder / "global_step2100" / "cursor.json"
    ).unlink()  # nothing better is left of that tenth
    assert rules(shelf, **mine)[2100] == "milestone"
    shelf.save(2500)
    (shelf.folder / "latest").write_text("global_step3200")
    assert (rules(shelf, **mine)[2100], rules(shelf, **mine)[2500]) == ("goes", "milestone")


@pytest.mark.parametrize(
    ("clocks", "goes"),
    [
        (Clocks(NOW, NOW), True),
        (Clocks(NOW + 1e6, NOW - 1.5 * DAY), False),  # ours jumped forward
        (Clocks(NOW - 1.5 * DAY, NOW + 1e6), False),  # the file server's did
        (Clocks(NOW - 1e6, NOW - 1e6), False),  # both went back: it lies in the future
        (Clocks(NOW), False),  # the file server was not asked
    ],
)
def test_a_save_that_did_not_end_goes_when_both_clocks_say_so(
    shelf: Shelf, clocks: Clocks, goes: bool
) -> None:
    shelf.half(50)
    shelf.half(400)  # newer than the newest complete one
    shelf.half(60, age=0.9 * DAY)
    shelf.save(100, 200, 300)
    found = rules(shelf, clocks)
    assert (found[50], found[60], found[400]) == (
        "goes" if goes else "incomplete",
        "incomplete",
        "incomplete",
    )


def test_what_is_unclear_stays(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400, 500)
    (shelf.folder / "global_step100" / "manifest.json").write_text("{")
    (shelf.folder / "global_step200").rename(shelf.folder / "away")
    (shelf.folder / "global_step200").symlink_to("away")
    shelf.write_manifest(300, step=30)
    foreign = shelf.folder / "global_step50"
    foreign.mkdir()
    (foreign / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert set(rules(shelf).values()) == {"unclear", "in use"}


def test_what_a_roll_back_passes_over_is_none_of_the_last_two(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400, 500)
    event = RecoveryEvent("loss", 9.0, 2.0, 410, 390, 300, 391, 520, NOW)
    uses = Uses({300: ("the last roll-back went back to it",)}, recovery=RecoveryRecord((event,)))
    seen = replace(shelf.catalogue(), uses=uses)
    known = tuple(
        replace(entry, is_discarded=entry.step >= 400, used_by=()) for entry in seen.checkpoints
    )
    found = {
        entry.step: entry.rule
        for entry in decide(replace(seen, checkpoints=known), policy(), CLOCKS)
    }
    assert found == {100: "goes", 200: "last two", 300: "last two", 400: "unclear", 500: "unclear"}


def test_what_was_set_aside_goes_only_when_asked_for(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400)
    shelf.discard(400)
    shelf.discard(300)
    (shelf.folder / "latest").write_text("global_step200")
    seen, spikes = shelf.catalogue(), BackupSection(url="gs://b", spike_steps=[400])
    asked = {entry.step: entry for entry in decide_quarantined(seen, policy(copies=spikes), True)}
    assert (asked[300].rule, asked[400].rule) == ("goes", "not backed up")
    kept = decide_quarantined(seen, policy(), False)
    assert [entry.rule for entry in kept] == ["set aside", "set aside"] and "--set-aside" in kept[
        0
    ].why
    pinned = replace(seen, pins=(Pin(300, "ana", NOW, ""),))
    assert {
        entry.rule for entry in decide_quarantined(pinned, policy(), True) if entry.step == 300
    } == {"pinned"}
    for changes in (
        {"read_errors": ("pins: x",)},
        {"uses": Uses({300: ("x",), 400: ("y",)})},
        {"uses": Uses(loading="x")},
    ):
        assert not any(
            entry.goes for entry in decide_quarantined(replace(seen, **changes), policy(), True)
        )


def test_counts_name_the_commonest_rule_first(shelf: Shelf) -> None:
    shelf.save(100, 200, 300, 400, 500)
    assert counts(decide(shelf.catalogue(), policy(keep_latest=4), CLOCKS)) == (
        ("in use", 2),
        ("newest", 2),
    )


# ----------------------------------------------------------------------------- whatever the input
def identity(step: int) -> str:
    return f"{step:064x}"


def copy_of(dice: random.Random, step: int) -> CopyRecord:
    archive = dice.choice(["store", "url"])
    address = {"store": STORE, "url": URL}[archive]
    return CopyRecord(
        archive, dice.choice([address] * 5 + ["/elsewhere"]), step, dice.choice(["full", "full", "weights", "spike"]),
        identity(step + (1000 if dice.random() < 0.2 else 0)), f"{archive}/{step}/{dice.random()}", "files", 4, 256,
        NOW, 0.0 if dice.random() < 0.1 else NOW, damaged=("x",) if dice.random() < 0.1 else (),
    )  # fmt: skip


def checkpoint_of(dice: random.Random, step: int) -> SavedCheckpoint:
    manifest: Any = dice.choice(["read"] * 12 + ["none", "none", "foreign", "unreadable"])
    bad = DigestRecord(step, identity(step), NOW, 4, 256, ("x",))
    return SavedCheckpoint(
        step, f"/c/global_step{step}", "tr11", 256,
        ("fault",) if manifest != "read" or dice.random() < 0.1 else (), False, NOW,
        {"tensor": 1} if manifest == "read" else None, identity="" if manifest == "unreadable" else identity(step),
        files=4, manifest=manifest, is_link=dice.random() < 0.05,
        changed=dice.choice([None, NOW, *[NOW - 2 * DAY] * 8, NOW + 9 * DAY]),
        digests=dice.choice([None] * 9 + [replace(bad, bad=()), bad, Unknown("?")]),
        pin=Pin(step, "ana", NOW, "") if dice.random() < 0.1 else None,
        used_by=("somebody",) if dice.random() < 0.1 else (), is_discarded=dice.random() < 0.1,
    )  # fmt: skip


Situation = tuple[Catalogue, RetentionPolicy, Clocks]


def situation_of(seed: int) -> Situation:
    """A catalogue, a policy and two clocks: everything that can be odd is odd now and then."""
    dice = random.Random(seed)
    steps = dice.sample(range(61), dice.randint(0, 14))
    found = [checkpoint_of(dice, step) for step in steps]
    made = [
        copy_of(dice, step)
        for step in (*steps, *dice.sample(range(61), 4))
        for _ in range(dice.randint(0, 3))
    ]
    events = tuple(
        RecoveryEvent("loss", 1, 1, entry.step, entry.step, 0, entry.step, entry.step, NOW)
        for entry in found if entry.is_discarded
    )  # fmt: skip
    rare = dice.randint(0, 19)
    uses = Uses(loading="attempt 7" if rare == 1 else "", recovery=RecoveryRecord(events))
    pins = tuple(entry.pin for entry in found if entry.pin)
    seen = Catalogue(
        Path("/c"), None, None, tuple(found), (), (), pins, uses, ("pins: x",) if rare == 0 else ()
    )
    percent = dice.choice([0.0, 10.0, 25.0, 33.3, 100.0])
    wanted = BackupSection(
        store=dice.choice([None, "/archive"]),
        url=dice.choice([None, "gs://bucket"]),
        store_interval=dice.choice([0, 5, 10]),
        full_interval=dice.choice([0, 20]),
        full_steps=dice.sample(range(1, 60), 2),
        weights_interval=dice.choice([0, 6]),
        spike_steps=dice.sample(range(1, 60), 2),
        milestone_percent=percent,
    )
    rules = RetentionPolicy(
        dice.randint(2, 6),
        percent,
        dice.choice([50, 60, 1000]),
        wanted,
        {"store": STORE, "url": URL},
    )
    moments = [NOW, NOW, NOW + 1e9, NOW - 1e9]
    return (
        with_copies(seen, made),
        rules,
        Clocks(dice.choice(moments), dice.choice([*moments, None])),
    )


def with_copies(seen: Catalogue, made: list[CopyRecord]) -> Catalogue:
    listed = tuple(
        replace(
            entry,
            copies=tuple(
                copy for copy in made if (copy.step, copy.identity) == (entry.step, entry.identity)
            ),
        )
        for entry in seen.checkpoints
    )
    return replace(seen, checkpoints=listed, copies=tuple(made))


situations = st.integers(0, 2**40).map(situation_of)
EVERYTHING = settings(max_examples=300, deadline=None)


def going(seen: Catalogue, rules: RetentionPolicy, clocks: Clocks) -> set[int]:
    return {decision.step for decision in decide(seen, rules, clocks) if decision.goes}


@EVERYTHING
@given(situations)
def test_what_is_never_removed(situation: Situation) -> None:
    seen, rules, clocks = situation
    gone = going(seen, rules, clocks)
    sound = sorted(entry.step for entry in seen.checkpoints if entry.is_sound)
    assert not gone & set(sound[-rules.keep_latest :]) and not gone & set(sound[-2:])
    if seen.read_errors or seen.uses.loading:
        assert not gone
    for entry in seen.checkpoints:
        if entry.step not in gone:
            continue
        assert (
            not (entry.used_by or entry.pin or entry.is_link or entry.is_discarded)
            and entry.identity
        )
        assert entry.manifest in {"read", "none"}
        if entry.manifest == "none":
            assert (
                sound
                and sound[-1] > entry.step
                and clocks.server is not None
                and entry.changed is not None
            )
            assert clocks.here - entry.changed >= DAY and clocks.server - entry.changed >= DAY
            continue
        for want in wanted_copies(rules.copies, [entry.step], rules.last_step):
            kinds = {want.kind, "full"} if want.kind == "weights" else {want.kind}
            if want.why.startswith("milestone"):
                continue  # of one step alone; the milestones are looked at below
            assert any(
                copy.archive == want.archive and copy.kind in kinds and copy.identity == entry.identity
                and not copy.damaged and copy.verified and copy.address == {"store": STORE, "url": URL}[want.archive]
                for copy in seen.copies
            ), want  # fmt: skip
    if rules.milestone_percent:
        for mark in range(1, int(100 / rules.milestone_percent) + 1):
            begin = rules.last_step * rules.milestone_percent * mark / 100
            is_last = rules.milestone_percent * (mark + 1) > 100
            end = 10**9 if is_last else rules.last_step * rules.milestone_percent * (mark + 1) / 100
            usable = {
                entry.step
                for entry in seen.checkpoints
                if entry.manifest == "read" and not entry.is_discarded
            }
            copied = any(
                copy.kind == "full" and begin <= copy.step < end and rules.has(copy)
                for copy in seen.copies
            )
            for steps in (sound, sorted(usable)):  # of sound ones a sound one stays, of others any
                here = {step for step in steps if begin <= step < end}
                assert not here or copied or here - gone


def test_the_situations_are_worth_looking_at() -> None:
    found = [going(*situation_of(seed)) for seed in range(200)]
    assert sum(bool(gone) for gone in found) > 60 and sum(len(gone) > 2 for gone in found) > 10


@EVERYTHING
@given(situations, st.randoms(use_true_random=False))
def test_the_order_of_what_was_seen_does_not_count(
    situation: Situation, dice: random.Random
) -> None:
    seen, rules, clocks = situation
    mixed = list(seen.checkpoints)
    dice.shuffle(mixed)
    moved = list(seen.copies)
    dice.shuffle(moved)
    again = replace(seen, checkpoints=tuple(mixed), copies=tuple(moved))
    assert decide(seen, rules, clocks) == decide(again, rules, clocks)


@EVERYTHING
@given(
    situations,
    st.randoms(use_true_random=False),
    st.sampled_from(["lost", "damaged", "not verified"]),
)
def test_losing_copies_lets_nothing_go(
    situation: Situation, dice: random.Random, what: str
) -> None:
    seen, rules, clocks = situation
    change = {"lost": None, "damaged": {"damaged": ("x",)}, "not verified": {"verified": 0.0}}[what]
    hit = [dice.random() < 0.5 for _ in seen.copies]
    left = [
        copy if not chosen else replace(copy, **change)
        for copy, chosen in zip(seen.copies, hit, strict=True)
        if not chosen or change is not None
    ]
    assert going(with_copies(seen, left), rules, clocks) <= going(seen, rules, clocks)


def test_a_lost_copy_lets_nothing_go_that_no_training_resumes_from() -> None:
    """In this one a checkpoint that is passed over at a resume was wanted because it had been
    copied once.
    """
    seen, rules, clocks = situation_of(1634)
    gone = going(seen, rules, clocks)
    for lost in seen.copies:
        left = [copy for copy in seen.copies if copy is not lost]
        assert going(with_copies(seen, left), rules, clocks) <= gone


@EVERYTHING
@given(situations, st.integers(0, 60), st.integers(1, 5))
def test_more_reasons_to_keep_let_nothing_go(situation: Situation, step: int, more: int) -> None:
    seen, rules, clocks = situation
    gone = going(seen, rules, clocks)
    for changes in ({"pin": Pin(step, "ana", NOW, "")}, {"used_by": ("a copy",)}):
        listed = tuple(
            replace(entry, **changes) if entry.step == step else entry for entry in seen.checkpoints
        )
        assert going(replace(seen, checkpoints=listed), rules, clocks) == gone - {step}
    assert going(seen, replace(rules, keep_latest=rules.keep_latest + more), clocks) <= gone


@EVERYTHING
@given(situations, st.floats(-1e10, 1e10))
def test_a_jump_of_one_clock_lets_nothing_go(situation: Situation, jump: float) -> None:
    seen, rules, _ = situation
    right = going(seen, rules, Clocks(NOW, NOW))
    assert going(seen, rules, Clocks(NOW + jump, NOW)) <= right
    assert going(seen, rules, Clocks(NOW, NOW + jump)) <= right


def test_a_pin_says_who_when_and_why(shelf: Shelf) -> None:
    assert read_pins(shelf.directory) == ()
    assert pin(shelf.directory, 10_000, "ana", "for\n the paper ", NOW) and pin(
        shelf.directory, 9_900, "bob", "", NOW
    )
    assert read_pins(shelf.directory) == (
        Pin(9_900, "bob", NOW, ""),
        Pin(10_000, "ana", NOW, "for the paper"),
    )
    assert not pin(shelf.directory, 9_900, "cyd", "", NOW + 1)  # it says the same already
    assert pin(shelf.directory, 9_900, "cyd", "now I know why", NOW + 1)
    assert read_pins(shelf.directory)[0] == Pin(9_900, "cyd", NOW + 1, "now I know why")
    assert unpin(shelf.directory, 9_900) and not unpin(shelf.directory, 9_900)
    assert [entry.step for entry in read_pins(shelf.directory)] == [10_000]
    copy = json.loads((state_folder(shelf.directory) / "pins.json").read_text())
    assert [entry["step"] for entry in copy["pins"]] == [10_000]


def test_many_at_once_lose_nothing(shelf: Shelf) -> None:
    threads = [
        threading.Thread(target=pin, args=(shelf.directory, step, "ana", "", NOW))
        for step in range(100, 1300, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.step for entry in read_pins(shelf.directory)] == list(range(100, 1300, 100))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "pins": [{}]}',
        "[" * 9999,
        '{"schema": 9, "pins": []}',
    ],
)
def test_a_damaged_list_is_not_known(shelf: Shelf, text: str) -> None:
    pin(shelf.directory, 100, "ana", "", NOW)
    pin(shelf.directory, 200, "ana", "", NOW)
    (state_folder(shelf.directory) / "pins.d" / "00000002.json").write_text(text)
    with pytest.raises(ValueError, match="pins"):
        read_pins(shelf.directory)
    assert shelf.catalogue().read_errors[0].startswith("pins: ")
    with pytest.raises(ValueError, match="pins"):
        pin(shelf.directory, 300, "ana", "", NOW)  # what is not known is not replaced


def test_a_pipe_in_its_place_holds_no_one_up(shelf: Shelf) -> None:
    pin(shelf.directory, 100, "ana", "", NOW)
    version = state_folder(shelf.directory) / "pins.d" / "00000001.json"
    version.unlink()
    os.mkfifo(version)
    with pytest.raises(ValueError, match="is not a list of pins"):
        read_pins(shelf.directory)


def test_versions_that_went_are_missed(shelf: Shelf) -> None:
    pin(shelf.directory, 100, "ana", "", NOW)
    (state_folder(shelf.directory) / "pins.d" / "00000001.json").unlink()
    with pytest.raises(ValueError, match="restore them"):
        read_pins(shelf.directory)
