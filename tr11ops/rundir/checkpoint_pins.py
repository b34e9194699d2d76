"""Checkpoints that a person wants kept, whatever the policy says: who, when and why.

    state/checkpoints/VARIANT/pins.json    state/checkpoints/VARIANT/pins.d/NNNNNNNN.json    (see
    `tr11ops.rundir.versioned`)

A damaged list is unknown, not empty: an older version is never read in its stead, because it may
lack a pin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.documents import document, record_of, refuse_newer
from trainer.contract.errors import DamagedFile, NewerFormat
from trainer.contract.record import Finite, Record
from trainer.contract.state_file import content_of
from trainer.contract.units import shortened

SCHEMA = 1
VERSIONS_KEPT = 20
LONGEST_REASON = 300


class Pin(Record):
    """One step that is kept. `time`: when it was pinned, seconds since the epoch."""

    step: int
    who: str
    time: Finite
    why: str


def state_folder(directory: RunDirectory) -> Path:
    """Where what tr11 knows of a variant's checkpoints lies, besides the checkpoints."""
    return directory.paths.state / "checkpoints" / directory.paths.variant


def read_pins(directory: RunDirectory) -> tuple[Pin, ...]:
    """All pins by step. Raises OSError, or ValueError when the list is damaged or of a newer tr11."""
    return _read(_versions(directory))[1]


def pin(directory: RunDirectory, step: int, who: str, why: str, when: float) -> bool:
    """Pin a step, or give its pin another reason; False when it says the same already. Raises as
    `read_pins`.
    """
    made = Pin(step, who, when, shortened(" ".join(why.split()), LONGEST_REASON))

    def change(pins: tuple[Pin, ...]) -> tuple[Pin, ...] | None:
        old = next((entry for entry in pins if entry.step == step), None)
        if old is not None and old.why == made.why:
            return None
        return (*(entry for entry in pins if entry.step != step), made)

    return _commit(directory, change)


def unpin(directory: RunDirectory, step: int) -> bool:
    """Take a pin away; False when the step was not pinned. Raises as `read_pins`."""

    def change(pins: tuple[Pin, ...]) -> tuple[Pin, ...] | None:
        left = tuple(entry for entry in pins if entry.step != step)
        if len(left) == len(pins):
            return None
        return left

    return _commit(directory, change)


# ----------------------------------------------------------------------------- how
def _versions(directory: RunDirectory) -> VersionedFile:
    return VersionedFile(state_folder(directory) / "pins.json", VERSIONS_KEPT)


def _commit(
    directory: RunDirectory, change: Callable[[tuple[Pin, ...]], tuple[Pin, ...] | None]
) -> bool:
    """Put what `change` makes of the newest list in place; it may run several times, and None
    leaves all as it is.
    """
    versions = _versions(directory)
    return versions.commit(partial(_read, versions), change, _text) is not None


def _read(versions: VersionedFile) -> tuple[int, tuple[Pin, ...]]:
    while True:
        numbers = versions.numbers()
        if not numbers:
            if not versions.copy.exists():
                return 0, ()
            if not versions.numbers():  # else the first was made between the two looks
                raise ValueError(
                    f"{versions.copy} is there, the versions in {versions.folder} are not: restore them"
                )
            continue
        path = versions.file(numbers[-1])
        try:
            return numbers[-1], _parse(path, content_of(path))
        except FileNotFoundError:
            # else newer ones came, and this one was tidied away
            if versions.numbers()[-1:] == numbers[-1:]:
                raise


def _parse(path: Path, content: bytes) -> tuple[Pin, ...]:
    try:
        value = json.loads(content)
        refuse_newer(path, value, SCHEMA)
        return record_of(tuple[Pin, ...], value["pins"])
    except NewerFormat:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(
            path, f"is not a list of pins ({type(error).__name__}): restore it"
        ) from None


def _text(number: int, pins: Iterable[Pin]) -> str:
    listed = [document(entry) for entry in sorted(pins, key=lambda entry: entry.step)]
    return json.dumps({"schema": SCHEMA, "version": number, "pins": listed}, indent=1) + "\n"
