"""What the reader finds in a batch script."""

from __future__ import annotations

from dataclasses import dataclass, field

from tr11ops.importer.expansion import Variables
from tr11ops.importer.traced import Traced
from trainer.contract.record import Record

SOURCING = frozenset({"source", "."})


class Assignment(Record):
    """`NAME=value`. `applied` is false where it stands in a condition and the name already had a
    value.

    `added` is what `+=` adds, and `value` the whole then.
    """

    name: str
    value: Traced
    line: int
    exported: bool
    conditional: bool
    applied: bool = True
    added: Traced | None = None


class ShellCommand(Record):
    """One simple command, expanded. `outer` are the words of the command whose `bash -c` text this
    one stands in.
    """

    words: tuple[Traced, ...]
    line: int
    conditional: bool
    piped_into: tuple[str, ...] = ()
    outer: tuple[Traced, ...] = ()
    used: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The command's own name, without a path."""
        if self.words:
            return self.words[0].text.rpartition("/")[2]
        return ""


class WrittenFile(Record):
    """A file that the script writes itself: `cat <<EOT > FILE`, `echo ... > FILE`."""

    path: Traced
    content: Traced
    line: int


@dataclass
class Script:
    """Everything the reader found."""

    variables: Variables = field(default_factory=Variables)
    assignments: list[Assignment] = field(default_factory=list)
    commands: list[ShellCommand] = field(default_factory=list)
    files: list[WrittenFile] = field(default_factory=list)
    shell_options: set[str] = field(default_factory=set)
    # a `#` inside the text of a launched shell
    lost_comments: list[Traced] = field(default_factory=list)
    # used by a launched shell, and not given to it
    not_exported: dict[str, int] = field(default_factory=dict)
    # functions that nothing calls
    uncalled: dict[str, int] = field(default_factory=dict)
    # sourced files that are not at hand: (file, line)
    not_read: list[tuple[str, int]] = field(default_factory=list)
    # the text of `sbatch <<END`, on its own lines
    submitted: str = ""
