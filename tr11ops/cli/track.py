"""`tr11 track`: a run's curves in the tracker that people use already, after the fact or live."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.base.units import counted
from tr11ops.cli.common import say
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.runcard.card import RunCard, differences, resolved
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trackers.cursor import Cursor, read_cursor, write_cursor
from tr11ops.trackers.destination import ONLINE, TRACKERS, Destination, TrackedRun, Tracker
from tr11ops.trackers.sending import agreed, send_new
from trainer.contract.errors import Tr11Error

SCHEMA = 1
FOLLOW_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 300.0  # after a tracker that does not answer
TURN_SECONDS = 900.0
SETTINGS = ("parallel", "model", "batch", "optimizer", "schedule", "curriculum", "precision")


def track(
    context: Annotated[RunContext, JSON],
    tracker: Annotated[
        str,
        typer.Argument(metavar="TRACKER", help="tensorboard, mlflow, wandb or trackio."),
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="A folder (else one in the run directory); mlflow: an address too; wandb: online.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the training does, until Ctrl-C.")
    ] = False,
) -> Outcome:
    """Put a run's curves into TensorBoard, MLflow, Weights & Biases or Trackio.

    Reads metrics.jsonl alone, so the training never waits. Type it again to send what is new:
    state/trackers/TRACKER.json says how far it is. Nothing leaves the machine without --to.

    What a training does again after a resume or a roll-back makes no second curve: TensorBoard
    replaces it; the others keep what was sent first.

    Examples:
      tr11 track tensorboard
      tr11 track mlflow --to http://mlflow.example.org:5000 --follow
      tr11 track wandb
    """
    chosen = TRACKERS.get(tracker)
    if chosen is None:
        raise WrongUsage(f"TRACKER {tracker}: give one of {', '.join(TRACKERS)}")
    if follow and context.as_json:
        raise WrongUsage("--json says how a sending ended, and --follow does not end: give one")
    card, directory = context.seen()
    chosen.require()
    path = directory.paths.metrics
    if not follow and not path.exists():
        raise Refusal(f"{path} is not there: the run has trained no step, or writes no metrics")
    claims = ClaimFolder(directory, f"track-{tracker}")
    try:
        claim = claims.acquire(time.time(), TURN_SECONDS)
    except ClaimTaken as error:
        raise Refusal(f"tr11 track {tracker}: {error} is at it already") from None
    session = Session(chosen, directory, card, to)
    try:
        if follow:
            session.follow(claims, claim)
        else:
            session.once()
    finally:
        session.close()
        claims.release(claim)
    return session.outcome(follow)


class Session:
    """One process's work on one tracker of one run."""

    def __init__(
        self, tracker: Tracker, directory: RunDirectory, card: RunCard, to: str | None
    ) -> None:
        self._tracker, self._directory = tracker, directory
        self._cursor = self._begin(to)
        paths = directory.paths
        self._run = TrackedRun(
            paths.name,
            paths.variant,
            key=self._cursor.key,
            place=self._cursor.place,
            known_as=self._cursor.known_as,
            settings=settings_of(card),
        )
        self._before = self._cursor.points
        self._opened: Destination | None = None
        self._look = ""

    def once(self) -> None:
        """Send what is new. Raises Refusal where the tracker does not take it."""
        try:
            self._send()
        except (Tr11Error, OSError):
            raise
        except Exception as error:  # each library has its own
            raise Refusal(f"{self._where} took not all: {_words(error)}; type it again") from None

    def follow(self, claims: ClaimFolder, claim: Claim) -> None:
        """Send what is new again and again, until a signal. A tracker that fails is tried again."""
        over = StopEvent()
        with obeying(over.obey):
            say(f"following into {self._where}; Ctrl-C ends")
            wait, told = FOLLOW_SECONDS, ""
            while True:
                try:
                    self._send()
                    wait, told = FOLLOW_SECONDS, ""
                except FileNotFoundError:
                    pass  # no step yet
                except Exception as error:  # the training's curves are no reason to end
                    self._abandon()
                    words = _words(error)
                    if words != told:
                        say(f"tr11: {self._where} took not all: {words}; it is tried again")
                    wait, told = min(LONGEST_WAIT_SECONDS, 2 * wait), words
                if over.wait(wait):
                    return
                claim = renewed(claims, claim)

    def close(self) -> None:
        """Let go of the tracker."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def outcome(self, followed: bool) -> Outcome:
        """What was sent, and how to look at it."""
        sent = self._cursor.points - self._before
        newest = ""
        if self._cursor.iteration >= 0:
            newest = f", up to iteration {self._cursor.iteration}"
        line = f"{counted(sent, 'point')} sent to {self._where}{newest}"
        document = {
            "schema": SCHEMA,
            "tracker": self._tracker.name,
            "place": self._cursor.place,
            "run": self._cursor.known_as,
            "points": sent,
            "iteration": self._cursor.iteration,
            "again": self._tracker.again,
        }
        lines = [line]
        if self._look:
            lines.append(f"look: {self._look}")
        return Outcome(document, lines)

    @property
    def _where(self) -> str:
        return f"{self._tracker.title} ({self._cursor.place})"

    def _begin(self, to: str | None) -> Cursor:
        cursor = read_cursor(self._directory, self._tracker.name)
        paths = self._directory.paths
        place = to
        if place is None and cursor is not None:
            place = cursor.place
        if place is None:
            place = str(paths.root / "trackers" / self._tracker.name)
        elif "://" not in place and place != ONLINE:
            place = str(Path(place).absolute())
        self._tracker.check_place(place)
        if cursor is not None and cursor.place == place:
            return cursor
        return Cursor(self._tracker.name, place, key=key_of(self._directory))

    def _send(self) -> None:
        opened = self._opened
        if opened is None:
            opened = self._opened = self._tracker.open(self._run)
            self._look = opened.look
            self._cursor = replace(
                agreed(self._cursor, opened, self._tracker.again), known_as=opened.known_as
            )
        send_new(
            self._directory.paths.metrics,
            opened,
            self._tracker.again,
            cursor=self._cursor,
            save=self._save,
            now=time.time,
        )

    def _save(self, cursor: Cursor) -> None:
        write_cursor(self._directory, cursor)
        self._cursor = cursor

    def _abandon(self) -> None:
        """After a fault: the tracker is opened again, and says how far it is."""
        try:
            self.close()
        except Exception:  # it has failed already
            self._opened = None


def settings_of(card: RunCard) -> dict[str, object]:
    """What the training is, by the card's keys: no path, and nothing of the operation."""
    sections = resolved(card)
    shown = {name: sections[name] for name in SETTINGS if name in sections}
    return {key: value for key, _, value in differences({}, shown)}


def key_of(directory: RunDirectory) -> str:
    """The same name for each session of a run directory, and of no other one's: letters, digits, `-`."""
    paths = directory.paths
    mark = hashlib.sha256(str(paths.root.resolve()).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{paths.name}-{paths.variant}-{mark}")


def renewed(claims: ClaimFolder, claim: Claim) -> Claim:
    """The claim of this process, for longer, where it is half over."""
    now = time.time()
    if claim.expires - now > TURN_SECONDS / 2:
        return claim
    longer = replace(claim, expires=now + TURN_SECONDS)
    claims.write(longer)
    return longer


def _words(error: Exception) -> str:
    """An error of a library as one short line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words[:200]
