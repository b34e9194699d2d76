"""Whether a run's checkpoints are lost: its records tell of some that were saved, and none is there.

A training that began with random weights then would train again what was paid for, without a word. What
tells of a checkpoint: the record of a copy, of a look at its digests, or of how an attempt ended. A training
that was never saved has none, and begins anew as it should.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from tr11ops.base.observed import known
from tr11ops.observe.files import read_details, read_steps
from tr11ops.runcard.card import ForeignCard, RunCard
from tr11ops.rundir.copies import CHECKPOINT_KINDS, CopyRecord, read_copies
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import survey
from tr11ops.trainers.start_names import current_folder
from trainer.contract.checkpoint_names import (
    aside_name,
    checkpoint_step,
    checkpoint_steps,
)
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.resumable import NEW_VARIANT, foreign_step

LOST = "its checkpoints are lost"
# what a person, or a save that was cut off, has put out of the way: it is there to be looked at
_KEPT_WORDS = frozenset({"discarded", "superseded", "set-aside", "replaced"})
_OF_ATTEMPT = ("verdict.json", "end.json", "launches/*.json")
_STEP_KEYS = ("checkpoint_step", "checkpoint_before", "checkpoint_after")


class LostCheckpoints(Record):
    """The newest checkpoint that is on record as saved, by its name, the newest sound copy, and the last
    iteration that was logged; None where there is none.
    """

    folder: Path
    saved: str
    copy: CopyRecord | None = None
    iteration: int | None = None

    @property
    def rule(self) -> str:
        """What is wrong, with what tells it."""
        trained = ""
        if self.iteration is not None:
            trained = f", iteration {self.iteration} was trained"
        text = f"{self.folder} holds no checkpoint, but {self.saved} was saved{trained}"
        if self.copy is None:
            return f"{text}, and no sound copy is on record"
        return (
            f"{text}, and a verified copy of step {self.copy.step} is in backup.{self.copy.archive}"
        )

    @property
    def fix(self) -> str:
        """What a person does about it."""
        if self.copy is None:
            return f"put them back where they were; {NEW_VARIANT}"
        words = ["tr11", "backup", "restore", str(self.copy.step), "--output", str(self.folder)]
        return f"restore it: `{shlex.join([*words, '--latest'])}`; {NEW_VARIANT}"

    def __str__(self) -> str:
        return f"{self.rule}; {self.fix}"


def find_lost(card: RunCard) -> LostCheckpoints | None:
    """None where a checkpoint is there, or nothing tells of one. Raises OSError, and ValueError where a
    record cannot be read: nothing follows then.
    """
    paths = card.paths
    if _is_any_there(card):
        return None
    copies = [
        copy
        for copy in read_copies(RunDirectory(paths, card.kill_switch))
        if copy.kind in CHECKPOINT_KINDS
    ]
    steps = {*(copy.step for copy in copies), *_looked_at(paths), *_of_attempts(paths)} - {0}
    if not steps:
        return None
    whole = [copy for copy in copies if copy.kind == "full" and copy.is_sound]
    newest = max(whole, key=attrgetter("step", "verified"), default=None)
    saved = card.checkpoint_label(max(steps))
    return LostCheckpoints(paths.checkpoints, saved, newest, last_iteration(paths))


def last_iteration(paths: RunPaths) -> int | None:
    """The last iteration that was logged; None where none was, or that cannot be read."""
    steps = known(read_steps(paths), ())
    if steps:
        return steps[-1].record.iteration
    return None


def _is_any_there(card: RunCard) -> bool:
    folder = card.paths.checkpoints
    if checkpoint_steps(folder) or foreign_step(folder) is not None:
        return True
    if folder.is_dir():
        names = [aside_name(path.name) for path in folder.iterdir()]
        if any(name is not None and name.word in _KEPT_WORDS for name in names):
            return True
    # where no one knows where to look, none can be missed
    return isinstance(card, ForeignCard) and in_own_folder(card) is not False


def in_own_folder(card: ForeignCard) -> bool | None:
    """Whether a foreign trainer's own folder holds any; None where no one knows where to look. Raises
    OSError.
    """
    place, rules = current_folder(card.settings), card.settings.dialect.checkpoints
    if place is None or rules is None:
        return None
    if not place.is_dir():
        return False
    return bool(survey(rules, place, card.world_size, time.time()).found)


def _looked_at(paths: RunPaths) -> Iterator[int]:
    """The steps whose digests were read."""
    for path in paths.digest_record("*").parent.glob("*.json"):
        step = checkpoint_step(path.stem)
        if step is not None:
            yield step


def _of_attempts(paths: RunPaths) -> Iterator[int]:
    """The steps that the records of this variant's attempts name."""
    for attempt in paths.attempts.glob("*"):
        run = read_details(attempt / "card.json").get("run")
        if not isinstance(run, dict) or run.get("variant", "main") != paths.variant:
            continue
        for pattern in _OF_ATTEMPT:
            for path in attempt.glob(pattern):
                found = read_details(path)
                yield from (found[key] for key in _STEP_KEYS if isinstance(found.get(key), int))
