"""Everything that a look for defects may need: the script as it was read, and the keys as they were
placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.builder import Builder
from tr11ops.importer.deepspeed import DeepSpeedFile
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import OptionUse, number
from tr11ops.importer.reader import Script
from tr11ops.importer.sbatch import Directive
from trainer.contract.record import Record


class Case(Record):
    """One script under examination; `card` holds the script's own values, before any was changed."""

    text: str
    directives: Sequence[Directive]
    script: Script
    launch: ParsedLaunch
    uses: Mapping[str, OptionUse]
    deepspeed: DeepSpeedFile | None
    card: Builder

    def has(self, option: str) -> bool:
        """Whether the option is given to the trainer."""
        return option in self.uses

    def line(self, option: str) -> int:
        """The line of an option; the launch's when it is not given."""
        use = self.uses.get(option)
        if use:
            return use.line
        return self.launch.line

    def number(self, option: str) -> float | None:
        """The option's value, when it is a known number."""
        use = self.uses.get(option)
        if use is None:
            return None
        try:
            return number(use.values)
        except ConversionProblem:
            return None

    def directive(self, name: str) -> Directive | None:
        """The last `#SBATCH` option of that name that Slurm reads."""
        return next(
            (item for item in reversed(self.directives) if item.name == name and item.read), None
        )
