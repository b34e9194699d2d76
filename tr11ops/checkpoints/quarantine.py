"""Folders beside the checkpoints that are none: discarded by a roll-back, half-written, replaced,
being removed.

    global_stepN.discarded, .discarded-2     set aside by a roll-back, for anyone who studies the spike
    global_stepN.superseded, .superseded-2   of this training and this step, and another was saved in its place since
    global_stepN.set-aside, .set-aside-2     bore the name of a step that was saved, and was not that training's
    .global_stepN.partial-X                  a save that is being written, or was killed
    .global_stepN.holding-X                  what is held of another trainer, while its digests are read
    .global_stepN.replaced-X                 an older checkpoint of a step that is saved again
    .NAME.pruning-X                          hidden by a prune that has not decided yet: whole, and put back if need be
    .NAME.pruned-X                           being removed: no longer whole, and never put back

Neither the trainer nor the list takes one of these names for a checkpoint.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

from tr11ops.rundir.checkpoint_scan import walk
from trainer.contract.checkpoint_names import (
    SUPERSEDED_SUFFIX,
    aside_name,
    checkpoint_step,
    folder_names,
    hidden_name,
)
from trainer.contract.record import Record
from trainer.contract.replacing import free_name

Kind = Literal[
    "discarded",
    "superseded",
    "set aside",
    "half-written",
    "being held",
    "replaced",
    "hidden by a prune",
    "being removed",
]

KINDS: dict[str, Kind] = {  # by the word in the folder's name
    "discarded": "discarded",
    "superseded": "superseded",
    "set-aside": "set aside",
    "partial": "half-written",
    "holding": "being held",
    "replaced": "replaced",
    "pruning": "hidden by a prune",
    "pruned": "being removed",
}


class QuarantinedCheckpoint(Record):
    """One such folder. `changed`: its last change, seconds since the epoch; None where not all of
    it can be seen.
    """

    name: str
    step: int
    kind: Kind
    bytes: int
    files: int
    changed: float | None
    is_link: bool = False

    @property
    def identity(self) -> str:
        """What tells it from another folder of that name, or from itself when it was changed."""
        return f"{self.files} files, {self.bytes} bytes, {self.changed}"


def list_quarantined(folder: Path) -> list[QuarantinedCheckpoint]:
    """All of them, by step. Raises OSError when `folder` cannot be read; one that goes meanwhile is
    left out.
    """
    found = (look_at(folder / name, name, kind, step) for name, kind, step in _named(folder))
    return [quarantined for quarantined in found if quarantined is not None]


def look_at(place: Path, name: str, kind: Kind, step: int) -> QuarantinedCheckpoint | None:
    """What lies at `place`, under whatever name it is to be shown; None when it has gone."""
    try:
        tree = walk(place)
    except FileNotFoundError:
        return None
    except OSError:
        return QuarantinedCheckpoint(
            name, step, kind=kind, bytes=0, files=0, changed=None, is_link=place.is_symlink()
        )
    changed = tree.changed if tree.is_whole else None
    return QuarantinedCheckpoint(
        name,
        step,
        kind=kind,
        bytes=sum(tree.sizes.values()),
        files=len(tree.sizes),
        changed=changed,
        is_link=place.is_symlink(),
    )


def name_to_hide(name: str) -> str:
    """A new name under which a folder waits for the decision."""
    return hidden_name(name, "pruning", secrets.token_hex(6))


def doomed_name(hidden: str) -> str:
    """What a folder under a hidden name is called once it is decided that it goes."""
    return hidden.replace(".pruning-", ".pruned-")


def names_of(folder: Path, kind: Kind) -> list[str]:
    """The folders of one kind, by step. Raises OSError."""
    return [name for name, found, _ in _named(folder) if found == kind]


def home_of(hidden: str) -> str:
    """The name that a folder had before a prune hid it."""
    aside = aside_name(hidden)
    if aside is None or aside.word != "pruning":
        raise ValueError(f"{hidden} is not the name of a hidden checkpoint")
    return aside.home


def next_name(folder: Path, home: str) -> str:
    """A free name for a folder that is no longer to be called `home`, because another one is: it is
    superseded.
    """
    aside = aside_name(home)
    if aside is not None and aside.word in {"discarded", "superseded"}:
        return free_name(folder, f"{aside.home}.{aside.word}").name
    if checkpoint_step(home) is None:
        raise ValueError(f"{home} is not the name of a checkpoint")
    return free_name(folder, f"{home}{SUPERSEDED_SUFFIX}").name


def superseded_names(folder: Path) -> list[tuple[str, int]]:
    """The superseded checkpoints and their steps, by step. Raises OSError."""
    return [(name, step) for name, found, step in _named(folder) if found == "superseded"]


def _named(folder: Path) -> list[tuple[str, Kind, int]]:
    named = [(name, aside_name(name)) for name in folder_names(folder)]
    found = [(name, KINDS[aside.word], aside.step) for name, aside in named if aside is not None]
    return sorted(found, key=lambda entry: (entry[2], entry[0]))
