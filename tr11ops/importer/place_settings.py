"""What the files of settings of a training say beside its command, and whether they are for the number
of ranks that is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from tr11ops.base.errors import ConversionProblem
from tr11ops.base.units import counted
from tr11ops.dialects.dialect import Dialect
from tr11ops.importer.family import WordUse, last_use, settings_in
from tr11ops.importer.importing import text_at
from tr11ops.importer.options import Builder, LeftReason, card_text
from tr11ops.importer.place_cluster import NODES, WORKERS, number_of
from tr11ops.importer.settings_files import SettingsFile, settings_file, whole_number
from tr11ops.importer.traced import Traced
from tr11ops.importer.training_command import TrainingCommand

_DEEPSPEED_CONFIG = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "deepspeed")

# what a launch fills in, where the script asks Slurm or its own rendezvous
_PLACES = {
    "${SLURM_NNODES}": "{nodes}",
    "${SLURM_JOB_NUM_NODES}": "{nodes}",
    "${SLURM_NODEID}": "{node_rank}",
    "${MASTER_ADDR}": "{master_address}",
    "${MASTER_PORT}": "{master_port}",
    "${WORLD_SIZE}": "{world_size}",
}
_BY_RANK = re.compile(r"SLURM_(?:PROCID|LOCALID)")


def card_word(word: Traced) -> str:
    """A word for the card: what the job knows is filled in by each launch. Raises
    ConversionProblem for what only this job knew.
    """
    for unknown in word.unknowns:
        if _BY_RANK.search(unknown):
            raise ConversionProblem(f"{unknown[:60]} is another one for each task")
    if word.is_known:
        return word.for_card()
    if word.text in _PLACES:
        return _PLACES[word.text]
    return card_text(word)


class CommandSettings:
    """A training's words and the files of settings that they name. `words` may change, as words go
    into keys of the card; `folders`: where a file is looked for.
    """

    def __init__(
        self,
        builder: Builder,
        training: TrainingCommand,
        folders: Sequence[Path],
        dialect: Dialect,
    ) -> None:
        self.builder = builder
        self.training = training
        self.folders = folders
        self.dialect = dialect
        self.words: list[Traced] = list(training.program)
        self.own = settings_in(self.words, dialect.command.config, self.text_at)
        self.tell_unread(self.own)
        self.launchers = self.launcher_settings()

    def said(self, options: Sequence[str]) -> WordUse | None:
        """The use of one of these options that counts: the command's own goes before that of its file
        of settings.
        """
        return last_use(self.words, options) or last_use(self.own_words, options)

    @property
    def own_words(self) -> tuple[Traced, ...]:
        """What the trainer's own file of settings says, as words of the command."""
        if self.own is None:
            return ()
        return self.own.words

    @property
    def text(self) -> str:
        """All that is said, for a look at it."""
        return " ".join([*(word.text for word in self.own_words), self.training.text])

    def text_at(self, path: str) -> str | None:
        """The text of a file that the command names; None where it is not at hand. Raises
        ConversionProblem where it cannot be read.
        """
        found = (text_at(folder, path) for folder in dict.fromkeys(self.folders))
        return next((text for text in found if text is not None), None)

    def launcher_settings(self) -> SettingsFile | None:
        """accelerate's own file."""
        option = self.training.option("config_file")
        if self.training.launcher != "accelerate" or option is None or option.value is None:
            return None
        found = settings_file(option.value, self.text_at)
        self.tell_unread(found)
        return found

    def tell_unread(self, settings: SettingsFile | None) -> None:
        """A file of settings that says nothing, and why."""
        if settings is not None and settings.problem:
            name = settings.name
            line = settings.line
            self.builder.leave(name, "", line=line, reason=LeftReason.UNKNOWN, why=settings.problem)

    # ------------------------------------------------------------------ for how many ranks they are
    def compare(self) -> None:
        """Ask where they are for another number of ranks than the one that is started."""
        size = self.builder.integer(NODES) * self.builder.integer(WORKERS)
        if size:
            self.compare_ranks(size)
            self.compare_batches(size)

    def compare_ranks(self, size: int) -> None:
        """Options whose product is the number of ranks."""
        told = [self.said([option]) for option in self.dialect.command.world]
        numbers = [number_of(use.value) for use in told if use is not None]
        known = [number for number in numbers if number is not None]
        if known and len(known) == len(numbers) and prod(known) != size:
            why = f"is for {counted(prod(known), 'rank')}, and {size} are started"
            self.ask(self.own, why)

    def compare_batches(self, size: int) -> None:
        """DeepSpeed refuses batch sizes that are for another number of ranks."""
        found = self.deepspeed_settings()
        if found is None:
            return
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, micro, steps = (whole_number(found.content.get(key)) for key in keys)
        if total is None or micro is None or steps is None:
            return
        replicas = total / (micro * steps)
        if not replicas.is_integer() or size % replicas:
            why = f"{total} = {micro} x {steps} x {replicas:g} replicas: no fit for {counted(size, 'rank')}"
            self.ask(found, why)

    def deepspeed_settings(self) -> SettingsFile | None:
        use = self.said(_DEEPSPEED_CONFIG)
        name = None
        if use is not None:
            name = use.value
        if self.launchers:
            inner = self.launchers.content.get("deepspeed_config")
        else:
            inner = None
        if self.launchers is not None and isinstance(inner, Mapping):
            name = Traced.of(str(inner.get("deepspeed_config_file")), self.launchers.line)
        if name is None or not name.text.endswith(".json") or not name.is_known:
            return None
        found = settings_file(name, self.text_at)
        self.tell_unread(found)
        return found

    def ask(self, settings: SettingsFile | None, why: str) -> None:
        if settings is not None:
            name = settings.name
            line = settings.line
            why = f"{why}: correct it, or give --set {WORKERS}=..."
            self.builder.ask(name, "", line=line, why=why, key=WORKERS)
