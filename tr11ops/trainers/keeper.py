"""`python -m tr11ops.trainers.keeper CARD.json`: keeps the run directory's contract in the name of a
trainer that does not know it. One on each node, in the launcher's place.

It starts the trainer, hears its lines, and writes heartbeats, phases, the records of steps, the lease
and the end marker for it. What was asked of the trainer through the run directory it does in the
trainer's own way: by a signal to its ranks, by a file, or after its next checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.processes import adopt_orphans, leave
from tr11ops.base.units import counted
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.trainers.course import TrainingCourse, nothing_left, older_start, wrong_start
from tr11ops.trainers.ending import LastWord, last_word
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.kept_files import KeptFiles, KeptRun, StartOrder
from tr11ops.trainers.levels import StopAsking
from tr11ops.trainers.life import LifeWatch
from tr11ops.trainers.never_began import counts
from tr11ops.trainers.saves import Saves, changed_at, complete_of, steps_of, whole_of
from tr11ops.trainers.speech import Speech, after_words, step_of_word
from tr11ops.trainers.start import (
    LaunchWords,
    TakenCheckpoint,
    commands_of,
    refusal_of,
    unset_of,
)
from tr11ops.trainers.start_folders import refuse_beginning, with_own_folder
from tr11ops.trainers.stopping import (
    END,
    GRACE_SECONDS,
    NEXT_CHECKPOINT,
    Asked,
    StopCourse,
    StopOrder,
    StopSigns,
    asked_of,
    ending,
    is_last_that_fits,
)
from tr11ops.trainers.trainer import NodePlaces
from tr11ops.trainers.words import Piece, StepRecords, StepSeen, TrainerWords
from tr11ops.trainers.workers import WorkerProcesses, mark_of, node_name
from trainer.contract.attempt import (
    EXIT_ERROR,
    EXIT_REFUSED,
    AttemptIdentity,
    exit_code,
    tell,
)
from trainer.contract.errors import Tr11Error
from trainer.contract.lease import Lease, refusal as kept_out
from trainer.contract.paths import newest_step
from trainer.contract.record import JsonObject
from trainer.contract.requests import read_request

TURN_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks at files
START_SECONDS = 900.0  # a node waits so long for node 0's word
FENCE_SECONDS = 60.0  # a node whose run directory cannot be read ends its workers after this
SPEAKER_SECONDS = 10.0  # for the last word of the node that tells of the steps
FINISH_SECONDS = 60.0  # for what was saved last to be seen whole
FENCED = "superseded"
CANNOT = "this trainer cannot be asked for it: it is not one of tr11's own"


class Keeper:
    """One node's part in one launch of a foreign trainer."""

    def __init__(self, settings: TrainerSettings, files: KeptFiles) -> None:
        self.settings, self.files, self.places = settings, files, files.places
        self.workers = WorkerProcesses(self.places.first_rank, mark_of(settings, files.attempt))
        self.words = TrainerWords(settings.dialect)
        self.records = StepRecords()
        self.began = time.time()
        self.course = TrainingCourse(sign=self.began, total=settings.steps)
        self.life = LifeWatch(files, self.began)
        self.saves = Saves(None, self._check_lease, tell)
        self.speech = Speech(self.is_first and settings.dialect.steps == "bar", tell)
        self.asking = StopAsking(settings, self.places.world_size, files.run.paths)
        self.lease: Lease | None = None
        self.taken: TakenCheckpoint | None = None
        self.whole_before: tuple[int, ...] = ()
        self.epoch, self.save = 0, ""
        self.stop = StopCourse()
        self.order: StopOrder | None = None
        self.wrong = ""
        self.receipt = 0
        self.received: list[int] = []
        self._is_done = False  # what the order says
        self._saved: frozenset[tuple[str, float]] = frozenset()
        self._saved_at: tuple[float, ...] = ()
        self._looked = self._seen_folder = time.monotonic()
        self._warned = False
        self._tells_steps = False
        self._asked_to_save: tuple[int, frozenset[tuple[str, float]]] | None = None

    @property
    def is_first(self) -> bool:
        return self.places.node_rank == 0

    @property
    def speaker(self) -> int:
        """The node whose workers print the steps."""
        if self.settings.dialect.printed_by == "last":
            return self.places.nodes - 1
        return 0

    # ------------------------------------------------------------------ the launch
    def run(self) -> int:
        """The whole launch on this node; its exit status."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._receive)
        self.files.beat(self.course, "starting")
        self.workers.end_earlier()
        try:
            left = self._begin()
            if left is None:
                left = self._start()
        except Tr11Error as error:
            left = self._refuse(str(error))
        if left is None:
            left = self._end(self._wait())
        self.files.beat(self.course, "ended", self.receipt)
        self.files.end_ranks()
        self.speech.close()
        if self.lease is not None:
            self.lease.release()
        return left

    def _receive(self, number: int, _frame: object) -> None:
        self.received.append(number)

    def _begin(self) -> int | None:
        """All that comes before a worker is started; an exit status where none is. Raises Tr11Error."""
        if not self.is_first:
            return self._await_start()
        refused = refusal_of(self.settings)
        if refused:
            return self._refuse(refused)
        asked = asked_of(self._signs(time.time()))
        if asked is not None:
            return self._leave_before(asked)
        try:
            self.files.forget()
            paths, attempt = self.files.run.paths, self.files.attempt
            self.lease = Lease.begin(paths, attempt.job_id, attempt.launch)
            holder = self.lease.take()
            if holder is not None:
                return self._refuse(kept_out(holder, paths))
            self.epoch = self.lease.me.epoch
            self._prepare()
        except OSError as error:
            tell(f"tr11: stopped: the launch cannot be begun: {error}", sys.stderr)
            return EXIT_ERROR
        return None

    def _prepare(self) -> None:
        """Make the checkpoints ready, and let all nodes start. Raises Tr11Error, OSError."""
        attempt = self.files.attempt
        place = HoldPlace.of(
            self.settings,
            self.files.run.paths,
            self.places.world_size,
            card_hash=self.files.run.card_hash,
            job_id=attempt.job_id,
        )
        if place is not None:
            place = with_own_folder(
                place, self.settings, self.epoch, self._check_lease, report=tell
            )
        self.saves = Saves(place, self._check_lease, tell)
        self.taken = self.saves.prepare()
        if place is not None and self.settings.saves_apart:
            self.save = str(place.folder)
            if self.taken is None:
                refuse_beginning(place)
        self.whole_before = steps_of(self.saves.before)
        self._saved = whole_of(self.saves.before)
        self.saves.start()
        self.files.order_start(StartOrder(attempt.launch, self.epoch, self.taken, self.save))

    def _check_lease(self) -> None:
        """Raises LeaseLost where another launch has taken the run over, OSError."""
        if self.lease is not None:
            self.lease.check()

    def _await_start(self) -> int | None:
        """Wait for node 0's word; an exit status where it does not come."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            order = self.files.start_order()
            if order is not None:
                self.epoch, self.taken, self.save = order.epoch, order.taken, order.save
                return None
            if signal.SIGTERM in self.received or signal.SIGINT in self.received:
                return 128 + signal.SIGTERM
            if self.files.has_ended():
                return 0
            time.sleep(TURN_SECONDS)
        tell("tr11: stopped: node 0 did not say that the workers may start", sys.stderr)
        return EXIT_ERROR

    def _start(self) -> int | None:
        """Start the workers. Raises WrongUsage."""
        run, attempt = self.files.run, self.files.attempt
        launch = LaunchWords(
            run.paths,
            self.files.folder,
            attempt.launch,
            taken=self.taken,
            exit_minutes=run.exit_minutes,
            node=node_name(),
            has_directory=Path(self.settings.directory).is_dir(),
            save=self.save,
        )
        if self.taken is not None and self.taken.step is not None:
            self.words.resumed_at = self.taken.step
            self.course = TrainingCourse(
                sign=time.time(), total=self.course.total, iteration=self.taken.step
            )
        commands = commands_of(self.settings, self.places, launch)
        if self.is_first:
            self._say_start()
        try:
            self.workers.start(commands, self.settings, os.environ, self.speech.environment())
        except OSError as error:
            return self._refuse(f"{' '.join(commands[0].words[:3])} cannot be started: {error}")
        return None

    def _say_start(self) -> None:
        taken = "a start from the beginning: there is no checkpoint to go on from"
        if self.taken is not None:
            taken = f"to go on from {self.taken} ({self.taken.path})"
        tell(f"tr11: {self.settings.dialect.title}: {taken}")
        for name in unset_of(self.settings):
            if name in os.environ:
                tell(f"tr11: the trainer does not get {name}")
        if self.asking.way() == NEXT_CHECKPOINT:
            tell("tr11: it is not asked to save: a stop ends it after its next checkpoint")

    # ------------------------------------------------------------------ while it runs
    def _wait(self) -> int:
        """Keep the launch to its end; the exit status of what was started."""
        while True:
            self._hear()
            self.life.look(self.course)
            now = time.monotonic()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look()
            self._follow()
            self.files.beat(self.course, self._phase(), self.receipt)
            status = self._status()
            if status is not None:
                return status
            if signal.SIGTERM in self.received or signal.SIGINT in self.received:
                self._end_workers("")
            self._pause()

    def _pause(self) -> None:
        """Until the next turn, which comes at the moment of an order, as it does on all nodes."""
        seconds = TURN_SECONDS
        if self.order is not None and not self._is_done:
            seconds = min(seconds, max(0.0, self.order.moment - time.time()))
        time.sleep(seconds)

    def _status(self) -> int | None:
        """The launcher's exit status, once all has ended. A node that starts nothing waits for node 0."""
        if self.settings.start == "command" and not self.is_first:
            if self.files.has_ended() or self._is_done:
                return 0
            return None
        return self.workers.status()

    def _phase(self) -> str:
        if self.order is not None or self._is_done:
            return "ending"
        return self.course.phase

    def _hear(self) -> None:
        for piece in self.workers.heard():
            if self._counts(piece):
                self._hear_piece(piece)
            self.course = self.course.seen_at(piece.time)
        self._record(self.records.due(time.time()))
        if self.is_first and not self.wrong:
            self._guard()

    def _counts(self, piece: Piece) -> bool:
        """Whether a line is of the rank that speaks; where all print, one of them speaks for all."""
        if self.settings.dialect.printed_by == "all":
            return piece.local_rank in (None, 0)
        return True

    def _hear_piece(self, piece: Piece) -> None:
        speaks = self.places.node_rank == self.speaker
        for heard in self.words.hear(piece.text):
            phase = self.course.phase
            self.course = self.course.after(heard, piece.time)
            if self.course.phase != phase:
                self.files.beat(self.course, self._phase(), self.receipt)
            if speaks and isinstance(heard, StepSeen):
                self._tells_steps = True
                self._record(self.records.add(heard, piece.time))

    def _guard(self) -> None:
        self.wrong = wrong_start(self.course, self.taken, self.whole_before)
        if self.wrong:
            self._order(self._ending(Asked("refused", False, self.wrong, time=time.time())))
        elif not self._warned:
            older = older_start(self.course, self.taken)
            if older:
                self._warned = True
                tell(f"tr11: WARNING: {older}")

    def _look(self) -> None:
        """Look at files: the other nodes', the lease, what is asked, the checkpoints."""
        if self.places.node_rank != self.speaker:
            self._look_at_speaker()
        self._look_at_words()
        self._look_at_lease()
        if self.is_first:
            self.course = self.course.seen_at(min(changed_at(self.saves.seen), time.time()))
            self._look_at_saves()
            self._decide()
            self._look_at_requests()
        elif self.order is None:
            self.order = self.files.stop_order()
        self._look_for_end_at_once()

    def _look_at_saves(self) -> None:
        self.course = self.course.having_saved(self.saves.complete, self.saves.made)

    def _look_at_words(self) -> None:
        """What the ranks say themselves: each has a heartbeat of its own then, and where no line told
        a step, their words do.
        """
        words = self.speech.words()
        if not words:
            return
        if not self._tells_steps and self.places.node_rank == self.speaker:
            told = step_of_word(words[0])
            if told is not None and words[0].time > self.course.sign:
                self._record(self.records.add(told, words[0].time))
        self.course = after_words(self.course, words)
        for word in words:
            if word.rank != self.places.first_rank:
                self.files.beat_rank(word, self._phase(), self.receipt)

    def _record(self, step: JsonObject | None) -> None:
        if step is not None:
            self.files.record(step)

    def _look_at_speaker(self) -> bool:
        """Take over what the node tells whose workers print the steps; whether it has ended."""
        beat = self.files.beat_of(self.speaker)
        if beat is None or beat.time < self.began:
            return False
        if beat.iteration != self.course.iteration or self.course.has_stepped:
            total = None
            if self.is_first:
                told = self.files.last_step()
                total = None if told is None else told.integer("total_iterations")
            self.course = self.course.at_step(beat.iteration, beat.time, total)
        return beat.phase == "ended"

    def _look_at_lease(self) -> None:
        """End the workers when another launch has taken the run over, or this node has not seen its
        folder for long: who cannot read the lease can hardly know.
        """
        now = time.monotonic()
        with suppress(OSError):
            newest = self.files.newest_epoch()
            if newest > self.epoch:
                self.workers.kill()
                self._end_workers("tr11: another launch has taken the run over: ending the workers")
                self._fence(f"another trainer holds this run's lease (epoch {newest})")
                return
            if newest == self.epoch:
                self._seen_folder = now
        if now - self._seen_folder > FENCE_SECONDS:
            self.workers.kill()
            self._fence("the run's lease was not seen for a minute")
            self._end_workers("tr11: the run's lease was not seen for a minute: ending the workers")

    def _fence(self, why: str) -> None:
        self.order = self._ending(Asked(FENCED, False, f"tr11: {why}", time=time.time()))

    def _ending(self, asked: Asked) -> StopOrder:
        return ending(asked, self.files.attempt.launch)

    def _decide(self) -> None:
        now = time.time()
        asked = asked_of(self._signs(now))
        whole = whole_of(self.saves.seen)
        is_new = bool(whole - self._saved)
        if asked is not None and self.stop.asked is None:
            # one that was complete before the wish is not the next one
            self._saved = complete_of(self.saves.seen)
            is_new = False
            tell(asked.line)
        elif self.stop.asked is None and is_new:
            self._saved = whole
            self._saved_at = (*self._saved_at, now)
            asked = self._last_that_fits(now)
        before = self.stop
        launch = self.files.attempt.launch
        way = NEXT_CHECKPOINT if asked is None else self.asking.way()
        self.stop = self.stop.after(asked, way, launch, saved_since=is_new, now=now)
        if asked is not None and before.asked is None and self.stop.waits:
            tell("tr11: it is ended once its next checkpoint is whole")
            self.speech.wish("stop")  # and may leave by itself before
        if self.stop.order is not None and self.stop.order is not before.order:
            self._order(self.stop.order)

    def _order(self, order: StopOrder) -> None:
        """Node 0's word to all nodes."""
        self.order, self._is_done = order, False
        self.files.order_stop(order)

    def _look_at_requests(self) -> None:
        """What people ask for beside a stop: a checkpoint of a trainer that speaks, and nothing else."""
        whole = whole_of(self.saves.seen)
        if self._asked_to_save is not None and whole - self._asked_to_save[1]:
            self.files.answer(
                self._asked_to_save[0], self.saves.newest, "a checkpoint was saved since"
            )
            self._asked_to_save = None
        for kind, request in self.files.take_requests():
            if kind == "checkpoint" and self.speech.can_be_asked():
                tell(f"tr11: a checkpoint was asked for by {request}")
                self.speech.wish("save")
                self._asked_to_save = (request.id, complete_of(self.saves.seen))
                self.receipt = request.id
            else:
                self.files.answer(request.id, None, CANNOT)

    def _last_that_fits(self, now: float) -> Asked | None:
        """The wish to leave after a checkpoint: no other fits, and it is not proved to save when asked."""
        exit_time = self.files.exit_time(self.began)
        if self.asking.is_sure() or not is_last_that_fits(exit_time, self._saved_at, now):
            return None
        line = "tr11: leaving after this checkpoint: no other fits before the time is up"
        return Asked("exit-duration", True, line, at_once=True, time=now)

    def _signs(self, now: float) -> StopSigns:
        return self.files.stop_signs(self.course, self.began, now)

    def _look_for_end_at_once(self) -> None:
        """Each node looks for itself: it may be the run directory of node 0 that hangs."""
        request = read_request(self.files.run.kill_switch, "kill")
        is_done = self.order is not None and self.order.how == END
        if request is None or request.kind != "kill-now" or is_done:
            return
        line = f"tr11: ended at once, without saving, as asked by {request}"
        now = time.time()
        self.order = self._ending(Asked("kill-switch", False, line, request=request.id, time=now))
        self._is_done = False

    # ------------------------------------------------------------------ stopping
    def _follow(self) -> None:
        """Do what the order says, at its moment."""
        order = self.order
        if order is None or self._is_done or time.time() < order.moment:
            return
        self.receipt = order.request
        if order.how == END:
            self._end_workers(order.line)
            return
        self._is_done = True
        if order.signal:
            count = self.workers.signal_ranks(order.signal)
            tell(f"tr11: {order.signal} to {counted(count, 'rank')} of this node")
        elif self.is_first:
            self._write_file(order.file)

    def _write_file(self, name: str) -> None:
        path = Path(self.settings.directory, self.settings.folder, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            tell(f"tr11: WARNING: {path} cannot be written, the trainer is not asked: {error}")
        else:
            tell(f"tr11: wrote {path}, which asks the trainer to save and leave")

    def _end_workers(self, line: str) -> None:
        """TERM, and KILL after a grace."""
        if line:
            tell(line if line.startswith(("tr11:", "[")) else f"tr11: {line}")
        self._is_done = True
        self.files.beat(self.course, "ending", self.receipt)
        self.workers.end(GRACE_SECONDS)

    # ------------------------------------------------------------------ the end
    def _end(self, status: int) -> int:
        """What is left behind of a launch whose workers have gone; the exit status."""
        self.workers.finish_hearing(5.0)
        self._hear()
        self._record(self.records.last())
        if self.is_first and self.speaker != self.places.node_rank:
            self._await_speaker()
        if self.is_first:
            self.saves.look()
            self._look_at_saves()
        not_taken = counts(self.words.not_taken, self.files.has_trained())
        if self.received and self.order is None and not self.wrong and not not_taken:
            return 128 + signal.SIGTERM  # by its agent: another node has failed, or the step ends
        word = last_word(
            self.settings.dialect,
            self.course,
            status,
            order=self._order_or_wish(status),
            wrong=self.wrong,
            came_again=self.files.ended_unexplained_before(),
            failure=self.workers.first_failure,
            not_taken=not_taken,
            nothing_left=nothing_left(self.course, self.taken, self.files.last_total()),
        )
        if word is None:
            self.workers.tell_signal()
            return status
        if not self.is_first:
            return exit_code(word.reason)
        return self._leave(word)

    def _await_speaker(self) -> None:
        """Its workers have ended with these, and its last word is on its way."""
        until = time.monotonic() + SPEAKER_SECONDS
        while not self._look_at_speaker() and time.monotonic() < until and not self.received:
            time.sleep(TURN_SECONDS)

    def _order_or_wish(self, status: int) -> StopOrder | None:
        """The order to stop; where one was still to come, a trainer that left in order has heard of
        the wish by itself.
        """
        if self.order is None and self.stop.waits and self.stop.asked is not None and status == 0:
            return self._ending(self.stop.asked)
        return self.order

    def _leave(self, word: LastWord) -> int:
        is_hurried = word.reason in (FENCED, "refused") or self.stop.is_at_once
        if not is_hurried:
            self.files.beat(self.course, "saving", self.receipt)
        self.saves.finish(0.0 if is_hurried else FINISH_SECONDS)
        self._look_at_saves()
        step = self.saves.newest
        if step is None:
            step = newest_step(self.files.run.paths)
        tell(f"tr11: {word.reason}: {word.message}")
        is_written = self.lease is None or not self.lease.lost_to_own_job()
        if is_written and not self.files.mark_end(word, self.course.iteration, step):
            return EXIT_ERROR
        return exit_code(word.reason)

    def _leave_before(self, asked: Asked) -> int:
        """Leave without starting anything."""
        tell(asked.line)
        step = newest_step(self.files.run.paths)
        word = LastWord(asked.reason, asked.restart, asked.line)
        self.receipt = asked.request
        if not self.files.mark_end(word, step or 0, step):
            return EXIT_ERROR
        return exit_code(asked.reason)

    def _refuse(self, why: str) -> int:
        """The input is bad: nothing is started, and the next try would end the same way."""
        tell(f"tr11: refused: {why}", sys.stderr)
        if self.is_first:
            step = newest_step(self.files.run.paths)
            self.files.mark_end(LastWord("refused", False, why), step or 0, step)
        return EXIT_REFUSED


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tr11ops.trainers.keeper", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("card", type=Path, help="resolved card (JSON)")
    NodePlaces.add_options(parser)
    options = parser.parse_args(arguments)
    places = NodePlaces.of(options)
    try:
        run = KeptRun.read(options.card)
    except (OSError, ValueError) as error:
        tell(f"tr11: refused: {error}", sys.stderr)
        return EXIT_REFUSED
    attempt = AttemptIdentity.from_environment(environment, run.paths)
    files = KeptFiles(run, attempt, places)
    try:
        settings = TrainerSettings.read(options.card)
    except (OSError, Refusal, WrongUsage) as error:
        tell(f"tr11: refused: {error}", sys.stderr)
        if places.node_rank == 0:
            files.mark_end(LastWord("refused", False, str(error)), 0, None)
        return EXIT_REFUSED
    return Keeper(settings, files).run()


if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
