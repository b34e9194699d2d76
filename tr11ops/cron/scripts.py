"""The scripts by which cron, scrontab and Slurm run the periodic jobs: `cron/scheduler/*.j2` filled
in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tr11ops.base.shipped import read_shipped
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import script_engine, script_options
from tr11ops.cron.runner import child_environment, tr11_command
from tr11ops.runcard.card import RunCard
from trainer.contract.record import Record
from trainer.contract.secret_shapes import is_secret

ROUND = ("cron", "scheduler", "round.sh.j2")
LINK = ("cron", "scheduler", "chain.slurm.j2")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
# what cron does not give and Python, Slurm's commands or the card's defaults need
_KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "SLURM_CONF",
    "SLURM_CLUSTERS",
    "SBATCH_ACCOUNT",
    "SBATCH_QOS",
    "SBATCH_PARTITION",
    "SBATCH_RESERVATION",
    "SBATCH_CONSTRAINT",
    "TR11_SCHEDULER",
    "TR11_LOCAL_SCHEDULER",
)


class Invocation(Record):
    """A command line as a person typed it once, so that it can be typed again without them.

    `card_path` is absolute; `folder` is where it was typed, from which relative paths of the
    overrides are taken, and those of a card that ships with tr11.
    """

    card: RunCard
    card_path: Path
    overrides: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]

    def command(self, words: Iterable[str]) -> list[str]:
        """The command line of `tr11 WORDS` for this card."""
        return tr11_command(words, self.card_path, self.overrides)

    def needed_environment(self) -> dict[str, str]:
        """The variables that the card names and that a job needs, with their values of now; never a
        secret's.
        """
        try:
            text = self.card_path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # a link of a chain, whose card is gone: Slurm hands its own variables on
            text = ""
        text = "\n".join([text, *self.overrides])
        named = {first or second for first, second in _VARIABLE.findall(text)}
        base = child_environment(self.environment)
        kept = {name: base[name] for name in sorted({*_KEPT, *named}) if base.get(name)}
        return {name: value for name, value in kept.items() if not is_secret(name, value)}


def round_script(invocation: Invocation) -> str:
    """What cron and scrontab call, who add `--way WAY`. Raises ValueError for what no script can
    hold.
    """
    command = invocation.command(("cron", "run", "--once", "--quiet"))
    return _rendered(ROUND, invocation, command)


def link_script(
    invocation: Invocation, chain: str, request: BatchRequest, command: Sequence[str], folder: Path
) -> str:
    """One link of a chain, whose output goes to `folder` if that can be written."""
    return _rendered(
        LINK, invocation, command, chain=chain, output=f"{folder}/", options=script_options(request)
    )


def script_of(
    template: tuple[str, ...],
    invocation: Invocation,
    request: BatchRequest,
    command: Sequence[str],
    folder: Path,
) -> str:
    """The batch script of a job, whose output goes to `folder` if that can be written. Raises
    ValueError for what none can hold.
    """
    return _rendered(
        template, invocation, command, output=f"{folder}/", options=script_options(request)
    )


def _rendered(
    template: tuple[str, ...],
    invocation: Invocation,
    command: Sequence[str],
    options: Sequence[str] = (),
    **more: object,
) -> str:
    engine = script_engine()
    environment = sorted(invocation.needed_environment().items())
    values = {
        "run": invocation.card.run.name,
        "environment": environment,
        "folder": str(invocation.folder),
        **more,
    }
    if any(
        character in text for text in (invocation.card.run.name, *options) for character in "\n\r"
    ):
        raise ValueError(
            f"{invocation.folder}: a path with line ends cannot stand in a batch script; choose another"
        )
    text = str(
        engine.from_string(read_shipped(*template)).render(
            **values, command=list(command), options=list(options)
        )
    )
    if "\0" in text:
        raise ValueError("a value holds a NUL character, which no script can; remove it")
    return text
