"""The words of a trainer that speaks itself, on one node: by `tr11_beat.py`, or by the reporter that
Hugging Face's Trainer brings. See `tr11ops.trainers.spoken`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tr11ops.base.units import finite
from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.spoken import (
    Listener,
    TrainerWord,
    Wish,
    environment_for,
    leave_request,
    read_words,
)
from tr11ops.trainers.words import StepSeen


class Speech:
    """Where the ranks of this node may speak: a folder on its own disk, and a listener where
    `has_reporter`. Without either, as where nothing can be written, no one is heard.
    """

    def __init__(self, has_reporter: bool, say: Callable[[str], None]) -> None:
        self._folder: Path | None = None
        self._listener: Listener | None = None
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tr11-beat-"))
            if has_reporter:
                self._listener = Listener(self._folder)
        except OSError as error:
            say(f"tr11: WARNING: the trainer's own words cannot be heard: {error}")

    def environment(self) -> dict[str, str]:
        """What the workers have in theirs to be heard."""
        if self._folder is None:
            return {}
        return environment_for(self._folder, self._listener)

    def words(self) -> tuple[TrainerWord, ...]:
        """The newest word of each rank that speaks; of the reporter's and a rank's own the rank's own."""
        found = self._own_words()
        if not found and self._listener is not None and self._listener.word is not None:
            return (self._listener.word,)
        return found

    def can_be_asked(self) -> bool:
        """Whether ranks speak by `tr11_beat.py`, which reads wishes as well; the reporter reads none."""
        return bool(self._own_words())

    def _own_words(self) -> tuple[TrainerWord, ...]:
        if self._folder is None:
            return ()
        try:
            return read_words(self._folder, time.time())
        except OSError:
            return ()

    def wish(self, wish: Wish) -> None:
        """Say a wish to the ranks of this node. A rank that never asks does not learn of it."""
        if self._folder is not None:
            with suppress(OSError):
                leave_request(self._folder, wish)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def step_of_word(word: TrainerWord) -> StepSeen | None:
    """What a word says of a step; None where it names none."""
    if word.step is None:
        return None
    values: dict[str, float | None] = {}
    if word.loss is not None:
        values["lm_loss"] = finite(word.loss)
    if word.tokens is not None:
        values["consumed_tokens"] = float(word.tokens)
    return StepSeen(word.step, word.total, values)


def after_words(course: TrainingCourse, words: tuple[TrainerWord, ...]) -> TrainingCourse:
    """The course with the words of a node's ranks: the newest counts."""
    for word in sorted(words, key=_moment):
        if word.time <= course.sign:
            continue
        course = course.spoken(step_of_word(word), word.phase, word.time)
    return course


def _moment(word: TrainerWord) -> float:
    return word.time
