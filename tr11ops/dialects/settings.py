"""How a run's foreign trainer is started and understood: the card's `[trainer]` section, with the
dialect that it names and the keys that it says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from tr11ops.base.errors import WrongUsage
from tr11ops.dialects.dialect import Dialect, dialect_content, dialect_of
from tr11ops.dialects.image import TrainerImage, image_of
from trainer.contract.documents import record_of
from trainer.contract.record import Count, JsonObject, Record
from trainer.contract.state_file import read_json

SAVE = "{save}"
NO_DIALECT = "none"
"""The dialect of a trainer of which nothing is known but how it is started."""

_UNKNOWN = Dialect(NO_DIALECT, "a trainer of which nothing is known")

Start = Literal["torchrun", "srun", "node", "command", "watch"]
# of `[trainer]`: tables that say otherwise than the dialect, key by key
_TABLES = ("marks", "checkpoints", "stop")


class TrainerSettings(Record):
    """The `[trainer]` section of a resolved card.

    `start`: what `command` is: `torchrun`, the words behind torchrun on each node; `srun`, a command
    for each worker; `node`, one for each node; `command`, one on the first node alone. `python`: the
    interpreter of torchrun and of scripts. `directory`: where it runs. `folder`: the trainer's own
    output folder. `first`, `resume`: words added where there is nothing to resume from, and where
    there is. `needs`: paths that must be there. `steps`: the last step, where the card says it.
    `checkpoint_interval` (steps), `checkpoint_minutes`: how often it saves; None where that is not
    known. `hold`: of a job that is only watched, whether its checkpoints are held. `image`: what the
    workers run in (`[slurm.container]`); None: as the node itself has it.
    """

    command: tuple[str, ...] | str
    dialect: Dialect = _UNKNOWN
    start: Start = "torchrun"
    python: str = "python"
    directory: str = "."
    folder: str = ""
    first: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    unset: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    steps: Count | None = None
    checkpoint_interval: Count | None = None
    checkpoint_minutes: float | None = None
    hold: bool = False
    image: TrainerImage | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command, for a look at them; of a shell's line, what stands between
        spaces.
        """
        if isinstance(self.command, str):
            return tuple(self.command.split())
        return self.command

    @property
    def saves_apart(self) -> bool:
        """Whether each start saves into a folder of its own: its command or its environment says `{save}`."""
        return any(SAVE in word for word in (*self.words, *self.environment.values()))

    @property
    def checkpoint_folder(self) -> Path | None:
        """Where its checkpoints lie, or the folders of its starts; None where the dialect does not say."""
        if self.dialect.checkpoints is None or not self.folder:
            return None
        return Path(self.folder) / self.dialect.checkpoints.folder

    @classmethod
    def read(cls, card: Path) -> TrainerSettings:
        """From a resolved card. Raises WrongUsage where it has no such section, or a wrong one;
        OSError.
        """
        whole = read_json(card) or {}
        table = whole.get("trainer")
        if not isinstance(table, dict):
            raise WrongUsage(f"{card} has no [trainer] section")
        return settings_of(table, str(card), image_of(whole.get("slurm") or {}))


# the section's own keys; the others say otherwise than the dialect
_PLAIN = frozenset(TrainerSettings.__struct_fields__) - {"dialect", "first", "resume", "image"}


def settings_of(
    table: JsonObject, where: str, image: TrainerImage | None = None
) -> TrainerSettings:
    """What a `[trainer]` table says; `where` it stands is for the message. Raises WrongUsage."""
    dialect = _dialect(table, where)
    plain = {name: value for name, value in table.items() if name in _PLAIN and value is not None}
    try:
        found = record_of(TrainerSettings, plain)
    except ValueError as error:
        raise WrongUsage(f"{where}: [trainer]: {error}") from None
    return replace(found, dialect=dialect, first=dialect.first, resume=dialect.resume, image=image)


def _dialect(table: Mapping[str, Any], where: str) -> Dialect:
    """The dialect that is named, with the tables that say otherwise laid over it."""
    name = str(table.get("dialect") or NO_DIALECT)
    content: JsonObject = {"name": _UNKNOWN.name, "title": _UNKNOWN.title}
    if name != NO_DIALECT:
        content = dialect_content(name)
    content = {**content, **(table.get("progress") or {})}
    for part in _TABLES:
        if table.get(part):
            content[part] = {**content.get(part, {}), **table[part]}
    said = table.get("ends") or {}
    if said:
        known = content.get("ends", {})
        content["ends"] = {
            "lines": [*said.get("lines", ()), *known.get("lines", ())],
            "exit": {**known.get("exit", {}), **said.get("exit", {})},
        }
    for key in ("first", "resume"):
        if table.get(key) is not None:
            content[key] = table[key]
    return dialect_of(content, f"{where}: [trainer] with the dialect {name}")
