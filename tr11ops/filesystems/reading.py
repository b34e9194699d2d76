"""What a source of quotas says, once its output is understood."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tr11ops.base.errors import SourceError
from tr11ops.runcard.watching import FilesystemSection
from trainer.contract.record import Record

KIBI = 1024


class CommandOutput(Record):
    """What one command printed, and its exit status."""

    text: str
    status: int = 0
    error: str = ""


class UsageReading(Record):
    """How full one file system is; None where the source does not say (see `disk_usage.Usage`).

    `report` is the source's own text, for sources whose figures are shares alone; `notes` are marks
    that people should see, e.g. a quota's time of grace.
    """

    bytes_used: float | None = None
    bytes_limit: float | None = None
    inodes_used: float | None = None
    inodes_limit: float | None = None
    bytes_free: float | None = None
    bytes_share: float | None = None
    inodes_share: float | None = None
    report: str = ""
    notes: tuple[str, ...] = ()


class UsageSource(Record):
    """One way to ask how full a file system is.

    `commands`: the command lines to run for a place, in order. `parse`: their outputs as a reading;
    raises SourceError. `is_slow`: it may take hours (it walks the tree), and gets the whole time
    that there is.
    """

    name: str
    commands: Callable[[FilesystemSection], tuple[tuple[str, ...], ...]]
    parse: Callable[[Sequence[CommandOutput]], UsageReading]
    is_slow: bool = False


def required_path(filesystem: FilesystemSection, source: str) -> str:
    """The place's path. Raises SourceError when the card gives none."""
    if not filesystem.path:
        raise SourceError(
            f'source {source} needs a path: add path = "/..." to its [[filesystems]] table'
        )
    return filesystem.path


def answered(output: CommandOutput) -> str:
    """The text of a command that must not fail. Raises SourceError when it failed or printed
    nothing.
    """
    if output.status != 0 or not output.text.strip():
        said = next(
            (line.strip() for line in reversed(output.error.splitlines()) if line.strip()), ""
        )
        raise SourceError(
            f"exit status {output.status}{f': {said[:200]}' if said else ', and nothing was printed'}"
        )
    return output.text
