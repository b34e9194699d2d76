"""The files of the run directory that a keeper writes in its trainer's name, and those that keepers of
one launch tell each other by.

    state/attempts/JOB/trainer-start.json   node 0: the lease is held; what is to be resumed from
    state/attempts/JOB/trainer-stop.json    node 0: how all nodes stop their workers, and when
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.ending import LastWord
from tr11ops.trainers.spoken import TrainerWord
from tr11ops.trainers.start import TakenCheckpoint
from tr11ops.trainers.stopping import ORDER_FILE, StopOrder, StopSigns
from tr11ops.trainers.trainer import NodePlaces
from trainer.contract.attempt import (
    AttemptIdentity,
    EndMarker,
    ExitTime,
    Heartbeat,
    PhaseWriter,
    tell,
    write_heartbeat,
)
from trainer.contract.documents import document, read_record, write_record
from trainer.contract.files import append_line, host_name, make_shared, write_json
from trainer.contract.lease import LeaseFolder
from trainer.contract.metrics_record import MetricsRecord, parse_record
from trainer.contract.paths import END_MARKER_FILE, RunPaths
from trainer.contract.record import Count, JsonObject, Record
from trainer.contract.requests import (
    Kind,
    Request,
    RequestAnswer,
    leave_answer,
    pause_of,
    read_request,
)
from trainer.contract.state_file import open_for_reading, read_json

START_FILE = "trainer-start.json"
BEAT_SECONDS = 1.0
OLD_SIGN_SECONDS = 5.0
TAIL_BYTES = 64 << 10  # of the records of steps, in which the newest one is looked for
# of the epoch of a lease: below it the folder of claims was not found
NO_EPOCH = 0


class KeptRun(Record):
    """What a keeper needs of the resolved card beside `[trainer]`. `exit_minutes`: after which the
    attempt leaves by itself; None where it does not.
    """

    paths: RunPaths
    kill_switch: Path
    exit_minutes: float | None = None
    card_hash: str = ""

    @classmethod
    def read(cls, card: Path) -> KeptRun:
        """From plain JSON: building the card would take longer than all else. Raises OSError, and
        ValueError where it is no resolved card.
        """
        value = read_json(card) or {}
        try:
            run = value["run"]
            root = Path(run["directory"])
            logs = (value.get("logging") or {}).get("folder") or ""
            paths = RunPaths(root, run["name"], run.get("variant") or "main", logs)
            minutes = run.get("exit_duration_minutes")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{card} is no resolved card: {error}") from None
        switch = Path(run.get("kill_switch") or root / "kill-switch")
        given = None if minutes is None else float(minutes)
        card_hash = str((value.get("derived") or {}).get("card_hash", ""))
        return cls(paths, switch, given, card_hash)


class StartOrder(Record):
    """Node 0's word that the workers may start: under which lease, from what they go on, and where they
    save, "" where every start does.
    """

    launch: Count
    epoch: Count
    taken: TakenCheckpoint | None = None
    save: str = ""


def stop_order_of(attempt: Path, launch: int) -> StopOrder | None:
    """The order to stop in an attempt's folder, if it is this launch's; None also where it cannot be read."""
    try:
        found = read_record(StopOrder, attempt / ORDER_FILE, "an order")
    except (OSError, ValueError):
        return None
    if found is None or found.launch != launch:
        return None
    return found


class KeptFiles:
    """Writes the heartbeat of one node, and on the node that speaks the records of steps; on node 0
    phases and the end.

    `host`: whose signs these are, where another machine writes them. A file system that refuses must
    not end a training: each kind of fault is said once.
    """

    def __init__(
        self, run: KeptRun, attempt: AttemptIdentity, places: NodePlaces, host: str = ""
    ) -> None:
        self.host, self.is_told = host or host_name(), bool(host)
        self.run, self.attempt, self.places = run, attempt, places
        self.folder = run.paths.attempt(attempt.job_id)
        self._phases: PhaseWriter | None = None
        if places.node_rank == 0:
            self._phases = PhaseWriter(run.paths.phases(attempt.job_id), attempt.launch, tell)
        self._beat: Heartbeat | None = None
        self._beat_at = 0.0
        self._of_ranks: dict[int, Heartbeat] = {}
        self._complaints: set[str] = set()

    # ------------------------------------------------------------------ in the trainer's name
    def beat(self, course: TrainingCourse, phase: str, request: int = 0) -> None:
        """Write the heartbeat where something of it has changed: at once a phase or a receipt, else
        once a second. Its time is the last sign of the trainer's life.
        """
        beat = Heartbeat(
            self.places.first_rank,
            self.host,
            os.getpid(),
            phase=phase,
            iteration=course.iteration,
            time=course.sign,
            job_id=self.attempt.job_id,
            request=request,
            ranks=self.places.workers,
            saved=course.saved,
        )
        before, now = self._beat, time.monotonic()
        if before == beat:
            return
        is_urgent = before is None or (before.phase, before.request) != (phase, request)
        if not is_urgent and now - self._beat_at < BEAT_SECONDS:
            return
        self._beat, self._beat_at = beat, now
        try:
            path = self.run.paths.heartbeat(self.places.first_rank)
            write_heartbeat(path, beat)
            if self.is_told or time.time() - course.sign > OLD_SIGN_SECONDS:
                # else its age would be taken for a fault of the node's clock
                os.utime(path, (course.sign, course.sign))
        except OSError as error:
            self._complain(f"heartbeat cannot be written: {error}")
        if self._phases is not None:
            # a phase that no line told of is the keeper's own, and begins now
            moment = course.sign if phase == course.phase else time.time()
            self._phases.enter(phase, course.iteration, moment)

    def beat_rank(self, word: TrainerWord, phase: str, request: int) -> None:
        """The heartbeat of a rank that speaks for itself, as it says."""
        beat = Heartbeat(
            word.rank,
            host_name(),
            os.getpid(),
            phase=word.phase or phase,
            iteration=word.step or 0,
            time=word.time,
            job_id=self.attempt.job_id,
            request=request,
        )
        if self._of_ranks.get(word.rank) == beat:
            return
        self._of_ranks[word.rank] = beat
        try:
            write_heartbeat(self.run.paths.heartbeat(word.rank), beat)
        except OSError as error:
            self._complain(f"heartbeat cannot be written: {error}")

    def end_ranks(self) -> None:
        """The ranks that spoke for themselves have ended."""
        for rank, beat in self._of_ranks.items():
            with suppress(OSError):
                write_heartbeat(self.run.paths.heartbeat(rank), replace(beat, phase="ended"))

    def beat_of(self, node_rank: int) -> Heartbeat | None:
        """Another node's heartbeat of this attempt; None where it cannot be read."""
        rank = self.places.first_rank_of(node_rank)
        try:
            found = Heartbeat.read(self.run.paths.heartbeat(rank))
        except (OSError, ValueError):
            return None
        if found is None or found.job_id != self.attempt.job_id:
            return None
        return found

    def record(self, step: JsonObject) -> None:
        """A line of `metrics.jsonl`."""
        line = json.dumps({**step, "job_id": self.attempt.job_id})
        try:
            append_line(self.run.paths.metrics, line)
        except OSError as error:
            self._complain(f"metrics cannot be written, the training goes on: {error}")

    def last_step(self) -> MetricsRecord | None:
        """The newest record of a step of this attempt, which another node may have written; None where
        there is none, or it cannot be read.
        """
        job = self.attempt.job_id
        return next((one for one in self._newest_steps() if one.job_id == job), None)

    def last_total(self) -> int | None:
        """How many steps the training has, by the newest record of any attempt that says so; None where none
        does.
        """
        told = (one.integer("total_iterations") for one in self._newest_steps())
        return next((total for total in told if total), None)

    def _newest_steps(self) -> Iterator[MetricsRecord]:
        """The last records of steps of the run, the newest first; none where they cannot be read."""
        try:
            with open_for_reading(self.run.paths.metrics) as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = stream.read().split(b"\n")[:-1]
        except OSError:
            return
        for line in reversed(lines):
            found = parse_record(line)
            if found is not None and found.is_step:
                yield found

    def has_trained(self) -> bool:
        """Whether any launch of this run has taken a step; also where that cannot be seen."""
        try:
            return self.run.paths.metrics.stat().st_size > 0
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def mark_end(self, word: LastWord, iteration: int, checkpoint_step: int | None) -> bool:
        """Leave the end marker; False, said, where it cannot be written."""
        marker = EndMarker(
            reason=word.reason,
            iteration=iteration,
            checkpoint_step=checkpoint_step,
            restart=word.restart,
            message=word.message,
            time=time.time(),
            host=host_name(),
            job_id=self.attempt.job_id,
            launch=self.attempt.launch,
        )
        try:
            write_json(self.run.paths.end_marker(self.attempt.job_id), document(marker))
        except OSError as error:
            line = f"tr11: stopped: the end ({word.reason}) could not be recorded: {error}"
            tell(line, sys.stderr)
            return False
        return True

    def has_ended(self) -> bool:
        """Whether node 0 has left the end marker of this launch."""
        try:
            return EndMarker.of_launch(self.folder, self.attempt.launch) is not None
        except (OSError, ValueError):
            return False

    def ended_unexplained_before(self) -> bool:
        """Whether the newest end of another attempt of this run is one that nothing explained."""
        newest: EndMarker | None = None
        for path in self.run.paths.attempts.glob(f"*/{END_MARKER_FILE}"):
            with suppress(OSError, ValueError):
                found = EndMarker.read(path)
                if found is None or found.job_id == self.attempt.job_id:
                    continue
                if newest is None or found.time > newest.time:
                    newest = found
        return newest is not None and newest.reason == "unexplained"

    def _complain(self, line: str) -> None:
        kind = line.partition(":")[0]
        if kind not in self._complaints:
            self._complaints.add(kind)
            tell(f"tr11: WARNING: {line}")

    # ------------------------------------------------------------------ what is asked
    def stop_signs(self, course: TrainingCourse, began: float, now: float) -> StopSigns:
        """What there is that may stop the launch. `began`: when it did, seconds since the epoch."""
        run, attempt = self.run, self.attempt
        return StopSigns(
            now=now,
            kill=read_request(run.kill_switch, "kill"),
            stop_is_asked=os.path.lexists(attempt.stop_request),
            pause=pause_of(run.paths, attempt.job_id),
            exit_time=self.exit_time(began),
            start_time=began,
            iteration=course.iteration,
            has_stepped=course.has_stepped,
            kill_switch=str(run.kill_switch),
            pause_file=str(run.paths.pause),
        )

    def exit_time(self, began: float) -> float | None:
        """When the attempt leaves by the clock: as its job's limit is now, else as the card says."""
        with suppress(OSError, ValueError):
            told = ExitTime.read(self.run.paths.exit_time(self.attempt.job_id))
            if told is not None:
                return told.time
        if self.run.exit_minutes is None:
            return None
        return began + 60 * self.run.exit_minutes

    def take_requests(self) -> Iterator[tuple[Kind, Request]]:
        """What was asked of the training beside a stop, each once: the files are removed."""
        paths = self.run.paths
        kinds: tuple[tuple[Kind, Path], ...] = (
            ("checkpoint", paths.checkpoint_request),
            ("profile", paths.profile_request),
            ("compute-check", paths.check_request),
        )
        for kind, path in kinds:
            request = read_request(path, kind)
            if request is None:
                continue
            with suppress(OSError):
                path.unlink()
                yield kind, request

    def answer(self, request: int, step: int | None, message: str) -> None:
        """Say what became of a request; nothing for one without a number."""
        if request:
            moment = time.time()
            leave_answer(
                self.run.paths,
                RequestAnswer(request, step, message, time=moment, job_id=self.attempt.job_id),
            )

    # ------------------------------------------------------------------ between the nodes
    def order_start(self, order: StartOrder) -> None:
        """Let all nodes start. Raises OSError."""
        make_shared(self.folder)
        write_record(self.folder / START_FILE, order)

    def start_order(self) -> StartOrder | None:
        """Node 0's word for this launch; None where there is none yet, or it cannot be read."""
        try:
            found = read_record(StartOrder, self.folder / START_FILE, "a start")
        except (OSError, ValueError):
            return None
        if found is None or found.launch != self.attempt.launch:
            return None
        return found

    def order_stop(self, order: StopOrder) -> None:
        """Tell all nodes how to stop, and when. Where that cannot be written it is said: the agents
        end what stays.
        """
        try:
            write_record(self.folder / ORDER_FILE, order)
        except OSError as error:
            self._complain(f"no order to stop can be written: {error}")

    def stop_order(self) -> StopOrder | None:
        """Node 0's order for this launch; None where there is none, or it cannot be read."""
        return stop_order_of(self.folder, self.attempt.launch)

    def newest_epoch(self) -> int:
        """Of the run's lease; NO_EPOCH where none is seen. Raises OSError."""
        return max(LeaseFolder(self.run.paths).numbers(), default=NO_EPOCH)

    def forget(self) -> None:
        """Remove orders of an earlier life of this attempt."""
        for name in (START_FILE, ORDER_FILE):
            (self.folder / name).unlink(missing_ok=True)
