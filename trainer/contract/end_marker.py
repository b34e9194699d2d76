"""The end marker: the trainer's own record of how it ended, and the exit codes that go with it."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.documents import read_record
from trainer.contract.paths import END_MARKER_FILE
from trainer.contract.record import Finite, Record


class EndMarker(Record):
    """The trainer's own word on how it ended. Its absence after a job ended means: it did not end
    by itself.

    `reason` is one of END_REASONS; `restart` says whether the next array task should go on
    training. `node`: the one at fault for an error, where all ranks know that it is one's alone.
    """

    reason: str
    iteration: int
    checkpoint_step: int | None
    restart: bool
    message: str
    time: Finite
    host: str
    job_id: str
    launch: int = 1  # 0: the attempt left before its first
    node: str = ""

    @classmethod
    def read(cls, path: Path) -> EndMarker | None:
        """The marker in `path`, or None when absent. Raises ValueError when it is malformed."""
        return read_record(cls, path, "an end marker")

    @classmethod
    def of_launch(cls, attempt: Path, launch: int) -> EndMarker | None:
        """The marker in the attempt's folder, if it is this launch's. Raises OSError or ValueError
        when it cannot be read.
        """
        marker = cls.read(attempt / END_MARKER_FILE)
        if marker is not None and marker.launch == launch:
            return marker
        return None

    @property
    def has_trained(self) -> bool:
        """Whether the attempt may have taken a step. Where it has not, `iteration` and
        `checkpoint_step` are what the run had before it.
        """
        return self.launch > 0 and self.reason != "refused"

    @property
    def place(self) -> str:
        """Where the attempt ended, in words that follow its reason."""
        if self.has_trained:
            return f"at iteration {self.iteration}"
        return "before it trained"


END_REASONS = {
    "finished": "all samples were trained",
    "exit-duration": "the attempt's own time was up",
    "exit-interval": "the exit interval was reached",
    "signal": "the scheduler or a person sent a signal",
    "kill-switch": "the kill switch was found",
    "pause": "the run is paused",
    "superseded": "another trainer has taken the run's lease over",
    "refused": "bad input: nothing was trained, and another try would end the same way",
    "error": "the trainer failed",
}
BAD_REASONS = frozenset({"error", "refused"})  # after these something must be repaired


# What the trainer's process returns, and the batch script. After 2 and 3 no other task may start
# before a person has looked: 2, the input is bad; 3 (of the batch script alone), the fault would
# come again, and queued jobs are held.
EXIT_FINE = 0


EXIT_ERROR = 1


EXIT_REFUSED = 2


EXIT_HELD = 3


def exit_code(reason: str) -> int:
    """The process exit status for an end reason."""
    return {"error": EXIT_ERROR, "refused": EXIT_REFUSED, "superseded": EXIT_REFUSED}.get(reason, 0)
