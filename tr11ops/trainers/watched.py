"""A training that someone else started: heard by its log alone, from outside, and put on record in the
run directory's words. Nothing of it is started, signalled or written to.

    state/watched.json    which job, which log, and how far it was read; replaced at each look

What a log says has no time of its own: a step is dated by when the log was written to, and those that
came between two looks are spread evenly over the time between them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.observed import replace_json
from tr11ops.base.units import duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.dialects.dialect import Dialect
from tr11ops.trainers.checkpoints import CheckpointSurvey, survey
from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.ending import LastWord, last_word
from tr11ops.trainers.kept_files import KeptFiles
from tr11ops.trainers.never_began import sentence
from tr11ops.trainers.words import StepRecords, StepSeen, TrainerWords, piece_of
from trainer.contract.documents import document, read_record
from trainer.contract.paths import RunPaths
from trainer.contract.record import Count, Finite, Record
from trainer.contract.state_file import descriptor_of

WATCHED_FILE = "watched.json"
SCHEMA = 1
MOST_READ = 16 << 20  # bytes of a log in one piece
MOST_AT_ONCE = (
    64 << 20
)  # of a log that is read for the first time; in a longer one the middle is left out
_BREAK = re.compile(rb"[\r\n]+")
_BAR_SECONDS = 5.0  # a bar without its end that is so old will not be drawn on now


class LogPlace(Record):
    """How far a log was read. `changed`: when it was last written to by then, seconds since the epoch."""

    inode: Count = 0
    offset: Count = 0
    changed: Finite = 0.0


class WatchedJob(Record):
    """What is watched. `folder`: the trainer's output folder; "" where none was given. `since`: when
    the watching began. `ended`: what the scheduler said of its end has been put on record. `hold`:
    its checkpoints are held. `world_size`: how many ranks train, `steps`: after how many it is
    finished; None where that is not known. `looked`: when the log was last looked at; `unread`: why
    it could not be read then, "" where it could. `never_began`: the line in which its launcher says so.
    """

    job_id: str
    log: str
    dialect: str = ""
    scheduler: str = ""
    folder: str = ""
    since: Finite = 0.0
    place: LogPlace = LogPlace()
    course: TrainingCourse | None = None
    ended: bool = False
    hold: bool = False
    world_size: Count | None = None
    steps: Count | None = None
    looked: Finite = 0.0
    unread: str = ""
    never_began: str = ""
    schema: int = SCHEMA

    @classmethod
    def read(cls, paths: RunPaths) -> WatchedJob | None:
        """None where no job is watched from here. Raises ValueError where the file is damaged,
        OSError.
        """
        return read_record(cls, watched_file(paths), "what is watched", SCHEMA)

    def write(self, paths: RunPaths) -> None:
        """Raises OSError, and NewerFileError where a newer tr11 watches."""
        replace_json(watched_file(paths), document(self), SCHEMA)


def watched_file(paths: RunPaths) -> Path:
    return paths.state / WATCHED_FILE


def why_unheard(watched: WatchedJob, round_seconds: float, now: float) -> str:
    """Why the records of a watched job say nothing of it now: its log could not be read at the last
    look, or two rounds have passed since. Then its silence is the watcher's. "" where it is heard.
    """
    if watched.ended:
        return ""
    if watched.unread:
        return watched.unread
    silent = now - watched.looked
    if watched.looked and silent > 2 * round_seconds:
        return f"no one has looked at its log for {duration(silent)}: `tr11 watch --run CARD --once` looks"
    return ""


class NewLines(Record):
    """What a log holds since the last look. `is_late`: lines that were written before the watching
    began, whose time no one knows.
    """

    lines: tuple[bytes, ...]
    place: LogPlace
    is_late: bool


def new_lines(log: Path, place: LogPlace, now: float, is_over: bool) -> Iterator[NewLines]:
    """The lines since `place`, in pieces. A carriage return ends one too. A log that is another file
    now, or shorter than it was read, is read from its begin. `is_over`: no one writes to it any more,
    so that what has no end is a line as well.

    Raises OSError: also where there is no log.
    """
    descriptor = descriptor_of(log)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        is_first = place == LogPlace()
        if status.st_ino != place.inode or status.st_size < place.offset:
            place = LogPlace(status.st_ino, 0, place.changed)
        stream.seek(place.offset)
        changed = min(status.st_mtime, now)
        is_over = is_over or now - changed > _BAR_SECONDS
        has_jumped = False
        while True:
            block = stream.read(MOST_READ)
            if not block:
                return
            is_last = len(block) < MOST_READ
            used = _used(block, is_last, is_over)
            if not used:
                return
            place = LogPlace(status.st_ino, place.offset + used, changed)
            lines = tuple(line for line in _BREAK.split(block[:used]) if line)
            yield NewLines(lines[has_jumped:], place, is_late=is_first)
            left = status.st_size - place.offset
            has_jumped = is_first and left > MOST_AT_ONCE
            if has_jumped:  # into the middle of a line
                place = replace(place, offset=status.st_size - MOST_READ)
            stream.seek(place.offset)


def _used(block: bytes, is_last: bool, is_over: bool) -> int:
    """How many bytes of a block are whole lines. What is written in pieces has no end yet; but a bar
    has none before it is drawn again.
    """
    used = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    rest = block[used:]
    is_bar = used > 0 and block[used - 1 : used] == b"\r"
    if rest and ((is_last and is_over and is_bar) or not used):
        if not used and is_last and not is_over:
            return 0
        return len(block)
    return used


Explain = Callable[[Path], str]


class Watcher:
    """Looks at one watched job, again and again, and keeps its run directory. `files` are written in
    the trainer's name. `explain` says what a log tells of the fault that ended it, "" for nothing.
    `seen`: what its folder held at the last look.
    """

    def __init__(
        self, watched: WatchedJob, dialect: Dialect, files: KeptFiles, explain: Explain
    ) -> None:
        self.watched, self.dialect, self.files = watched, dialect, files
        self._explain = explain
        self.words = TrainerWords(dialect)
        self.records = StepRecords()
        self.fault = ""
        self.lines = 0
        self.seen: CheckpointSurvey | None = None

    @property
    def course(self) -> TrainingCourse:
        known = self.watched.course or TrainingCourse(sign=self.watched.since)
        if known.total is None:
            return replace(known, total=self.watched.steps)
        return known

    def look(self, job: Job | None, now: float) -> None:
        """Read what is new, and put it on record. `job`: as the scheduler shows it, None where it
        does not. Raises OSError where the run directory cannot be written to.
        """
        paths = self.files.run.paths
        if self.watched.ended:
            return
        is_over = job is not None and job.state.is_final
        self._read(now, is_over)
        self._look_at_folder(now)
        last = self.records.last()
        if last is not None:
            self.files.record(last)
        phase = self.course.phase
        if is_over:
            phase = "ended"
        if self.course.has_stepped or self.lines or is_over:
            self.files.beat(self.course, phase)
        if job is not None and is_over:
            self._end(job)
        said = self.watched.never_began or self.words.not_taken
        self.watched = replace(self.watched, looked=now, unread=self.fault, never_began=said)
        self.watched.write(paths)

    def _read(self, now: float, is_over: bool) -> None:
        self.fault = ""
        place = self.watched.place
        try:
            for piece in new_lines(Path(self.watched.log), place, now, is_over):
                self.lines += len(piece.lines)
                self._hear(piece, before=place.changed)
                place = piece.place
                self.watched = replace(self.watched, place=place)
        except FileNotFoundError:
            self.fault = f"{self.watched.log} is not there yet"
        except OSError as error:
            self.fault = f"{self.watched.log} cannot be read: {error.strerror or error}"

    def _hear(self, piece: NewLines, before: float) -> None:
        """What the lines of one look say, each at its time."""
        heard = [word for line in piece.lines for word in self.words.hear(piece_of(line, 0.0).text)]
        began, ended = before or piece.place.changed, piece.place.changed
        for number, word in enumerate(heard, 1):
            moment = ended
            if not piece.is_late:
                moment = began + (ended - began) * number / len(heard)
            self.watched = replace(self.watched, course=self.course.after(word, moment))
            if isinstance(word, StepSeen):
                self._step(word, moment, piece.is_late)

    def _step(self, step: StepSeen, moment: float, is_late: bool) -> None:
        """A step of before the watching began is no record, but the last one is."""
        due = self.records.add(step, moment)
        if due is not None and not is_late:
            self.files.record(due)

    def _look_at_folder(self, now: float) -> None:
        """Look at the checkpoints, where a folder was given: a save is a sign of life too."""
        rules = self.dialect.checkpoints
        if rules is None or not self.watched.folder:
            return
        try:
            self.seen = survey(
                rules, Path(self.watched.folder) / rules.folder, self.watched.world_size, now
            )
        except OSError as error:
            self.fault = self.fault or f"{self.watched.folder} cannot be read: {error.strerror}"
            return
        changed = max((one.changed for one in self.seen.found), default=0.0)
        self.watched = replace(self.watched, course=self.course.seen_at(min(changed, now)))

    def _end(self, job: Job) -> None:
        """Put the end on record, as far as it is known: the trainer's own word and the scheduler's."""
        said = self.watched.never_began or self.words.not_taken
        word = end_of(self.dialect, self.course, job, said)
        if word is not None and word.reason == "error":
            why = self._explain(Path(self.watched.log))
            word = replace(word, message="; ".join(filter(None, (why, word.message))))
        step = None
        if self.seen is not None and self.seen.wanted is not None:
            step = self.seen.wanted.step
        is_written = word is None or self.files.mark_end(word, self.course.iteration, step)
        self.watched = replace(self.watched, ended=is_written)


# what ends a job from outside: its training has left no word of its own
_OUTSIDE = frozenset(
    {
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
    }
)


def end_of(
    dialect: Dialect, course: TrainingCourse, job: Job, not_taken: str = ""
) -> LastWord | None:
    """How a watched training ended, by its own lines; None where they do not say, and what the scheduler says stands.
    `not_taken`: the line in which its launcher says that it never began.

    No one relaunches it from here, so that none of them asks for that.
    """
    if job.state is JobState.CANCELLED and not course.is_finished:
        return LastWord("signal", False, "the scheduler says CANCELLED")
    if job.state in _OUTSIDE and not course.is_finished:
        return None
    status = job.exit_code or 0
    if job.state is not JobState.COMPLETED:
        status = status or 1
    if not_taken and status and not course.has_stepped:
        return LastWord("refused", False, sentence(not_taken, "who submitted it corrects it"))
    word = last_word(dialect, course, status, came_again=True)
    if word is None or word.reason == "signal":  # which the scheduler knows nothing of
        return LastWord("error", False, f"the scheduler says {job.end_words}")
    return replace(word, restart=False)


def unknown_of(dialect: Dialect, course: TrainingCourse, folder: str) -> Sequence[str]:
    """What no one can tell of a training that is only watched."""
    found = ["each rank: one log is one voice, so that no node is blamed for a hang"]
    if course.total is None:
        found.append("its last step: the log does not tell when it is finished; give --steps N")
    if dialect.checkpoints is None or not folder:
        found.append("its checkpoints: give --folder DIR")
    return found
