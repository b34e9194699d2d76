"""Pins: who, when, why; changed by many at once; damaged is not empty."""

from __future__ import annotations

import json
import os
import threading

import pytest

from tests.tr11ops.checkpoints.shelf import NOW, Shelf
from tr11ops.rundir.checkpoint_pins import Pin, pin, read_pins, state_folder, unpin


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
