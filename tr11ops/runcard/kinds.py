"""The kinds of run card: what every run says, a run of tr11's own trainer, and one of another trainer.

Pydantic models, frozen; `tr11ops.runcard.card` reads them from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tr11ops.base.errors import Refusal
from tr11ops.runcard.sections import (
    KubernetesSection,
    PermsSection,
    RehearsalSection,
    ResilienceSection,
    SlurmSection,
    parse_time_limit,
)
from tr11ops.runcard.watching import (
    AlertsSection,
    BackupSection,
    CronSection,
    FilesystemSection,
    HubSection,
    OperationSection,
    WatchSection,
)
from trainer.config.base import Iterations, Positive, Section, left_out
from trainer.config.card import RunSection, TrainerConfig
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.resumable import ResumeNeed
from trainer.schedule.path import batch_size_at, path_of

if TYPE_CHECKING:
    from tr11ops.dialects.settings import TrainerSettings


class SaveTimes(Record):
    """How often a training saves: in steps, in minutes, or both; None where that is not known."""

    steps: int | None = None
    minutes: float | None = None


class RunCard(Section):
    """A whole run: the operation's sections, and what it asks of a training, whose trainer is another
    matter.
    """

    run: RunSection
    slurm: SlurmSection
    resilience: ResilienceSection = left_out(ResilienceSection)
    hub: HubSection = left_out(HubSection)
    backup: BackupSection = left_out(BackupSection)
    alerts: AlertsSection = left_out(AlertsSection)
    operation: OperationSection = left_out(OperationSection)
    watch: WatchSection = left_out(WatchSection)
    cron: CronSection = left_out(CronSection)
    perms: PermsSection = left_out(PermsSection)
    filesystems: list[FilesystemSection] = Field(default=[])
    kubernetes: KubernetesSection | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run.directory), self.run.name, self.run.variant, self.log_folder)

    @property
    def log_folder(self) -> str:
        """The name of the folder of logs; "" for the usual one."""
        return ""

    @property
    def kill_switch(self) -> Path:
        """The stop file of this run; unique to it unless the card names one."""
        return self.run.stop_file

    @property
    def world_size(self) -> int:
        """Trainer processes in all: nodes x workers per node."""
        return self.slurm.nodes * self.slurm.workers

    @property
    def total_iterations(self) -> int | None:
        """Steps of the whole training; None where the card does not say."""
        raise NotImplementedError

    @property
    def saves_every(self) -> SaveTimes:
        """How often the training saves."""
        raise NotImplementedError

    @property
    def log_interval(self) -> int:
        """Steps for a line of the log."""
        return 1

    @property
    def resume_need(self) -> ResumeNeed:
        """What a checkpoint must be for the training to go on from it."""
        return ResumeNeed()

    def checkpoint_label(self, step: int) -> str:
        """A checkpoint of the run as screens name it: by the name that its trainer gives it."""
        return checkpoint_name(step)

    @property
    def uses_own_trainer(self) -> bool:
        """Whether tr11's own trainer, which needs torch, is what is started."""
        return False

    @property
    def trains_nothing(self) -> bool:
        """Whether it is a rehearsal, in which the twin's stand-in takes the trainer's place."""
        return False

    @property
    def load_folder(self) -> str | None:
        """The folder of checkpoints that it starts from while it has none of its own."""
        return None

    @property
    def time_limit_seconds(self) -> int:
        """The limit of one attempt, in seconds."""
        return parse_time_limit(self.slurm.time_limit)

    @property
    def digest(self) -> str:
        """A stable hash of every setting (blake2b-128, hexadecimal): equal exactly when two cards
        say the same.
        """
        value = self.model_dump(mode="json")
        for table, key in ((value, "kubernetes"), (value["slurm"], "container")):
            # cards without them keep the hash that they had before there were such sections
            if table[key] is None:
                del table[key]
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


class OwnCard(RunCard, TrainerConfig):
    """A run of tr11's own trainer: the training's sections and the operation's."""

    rehearsal: RehearsalSection | None = None

    @property
    def log_folder(self) -> str:
        return self.logging.folder or ""

    @property
    def data_parallel_degree(self) -> int:
        """World size over tensor x pipeline."""
        return self.data_parallel(self.world_size)

    def gradient_accumulation_steps(self, consumed_samples: int) -> int:
        """Micro batches of each replica in the step that starts at `consumed_samples`."""
        batch = batch_size_at(consumed_samples, self.batch)
        return self.batch.micro_batches(batch, self.data_parallel_degree)

    @property
    def total_iterations(self) -> int:
        return path_of(self).total_iterations

    @property
    def saves_every(self) -> SaveTimes:
        return SaveTimes(self.checkpoint.interval, self.checkpoint.interval_minutes)

    @property
    def log_interval(self) -> int:
        return self.logging.interval

    @property
    def resume_need(self) -> ResumeNeed:
        return ResumeNeed.of(self)

    @property
    def uses_own_trainer(self) -> bool:
        return self.rehearsal is None

    @property
    def trains_nothing(self) -> bool:
        return self.rehearsal is not None

    @property
    def load_folder(self) -> str | None:
        return self.checkpoint.load


class TrainerSection(Section):
    """[trainer]: another trainer than tr11's own, unchanged; takes the place of the sections that
    describe a training of tr11's ([model], [data] and so on).
    """

    dialect: str | None = None
    """family of trainers: what its lines, checkpoints and end mean (`tr11 trainer list`), or the path
    of a .toml of your own; default: nothing is known of them
    """

    start: Literal["torchrun", "srun", "node", "command", "watch"] = "torchrun"
    """what command is: torchrun, the words behind torchrun on each node; srun, a command for each
    worker, with RANK, WORLD_SIZE, MASTER_ADDR; node, one for each node; command, one on the first;
    watch, nothing: someone else has submitted it (`tr11 watch`)
    """

    command: list[str] | str = Field(min_length=1)
    """what is started: words, of which no shell takes notice, or one line for `bash -c`; {folder},
    {save} (a folder of its own for each start), {world_size} and other places are filled in
    """

    python: str = Field(default="python", min_length=1)
    """interpreter of torchrun and of scripts: the trainer's, not tr11's own"""

    directory: str = Field(default=".", min_length=1)
    """where it is started; default: the card's folder"""

    folder: str | None = None
    """the trainer's own output folder, below which its checkpoints lie; default: they are not known"""

    first: list[str] | None = None
    """words added where there is nothing to resume from; default: the dialect's"""

    resume: list[str] | None = None
    """words added where there is; {path} and {step} of what it resumes from; default: the dialect's"""

    environment: dict[str, str] = Field(default={})
    """variables of the trainer alone"""

    unset: list[str] = Field(default=[])
    """variables that it shall not see, such as SLURM_NTASKS"""

    needs: list[str] = Field(default=[])
    """files and folders that must be there before a launch"""

    steps: Iterations | None = None
    """the training's last step; default: what its log says"""

    checkpoint_interval: Iterations | None = None
    """steps between two checkpoints of it; with neither this nor minutes, none is ever overdue"""

    checkpoint_minutes: Positive | None = None
    """or minutes between them"""

    hold: bool = False
    """of a job that is only watched: each whole checkpoint in trainer.folder is held in the run directory,
    as those of a training that tr11 starts always are
    """

    progress: dict[str, Any] = Field(default={})
    """otherwise than the dialect: step_line, offset, steps, printed_by"""

    marks: dict[str, str] = Field(default={})
    """otherwise than the dialect: patterns of lines: loading, resumed, scratch, saving, saved,
    evaluating
    """

    checkpoints: dict[str, Any] = Field(default={})
    """otherwise than the dialect: name, folder, complete, resumable, newest and so on"""

    stop: dict[str, Any] = Field(default={})
    """otherwise than the dialect: how ("signal TERM", "file PATH", "next checkpoint"), needs, agrees"""

    ends: dict[str, Any] = Field(default={})
    """besides the dialect: exit = { CODE = "relaunch" | "look" | "hold" }, and lines"""


class ForeignCard(RunCard):
    """A run of another trainer, which knows nothing of tr11."""

    trainer: TrainerSection

    @property
    def settings(self) -> TrainerSettings:
        """The section with its dialect. Raises WrongUsage where they do not fit together."""
        # of no use to most commands
        from tr11ops.dialects.image import image_of
        from tr11ops.dialects.settings import settings_of

        image = image_of(self.slurm.model_dump(include={"container", "gpus_per_node"}))
        return settings_of(self.trainer.model_dump(), "the card", image)

    @property
    def total_iterations(self) -> int | None:
        return self.trainer.steps

    @property
    def saves_every(self) -> SaveTimes:
        return SaveTimes(self.trainer.checkpoint_interval, self.trainer.checkpoint_minutes)

    @property
    def resume_need(self) -> ResumeNeed:
        return ResumeNeed(trainer="foreign")

    def checkpoint_label(self, step: int) -> str:
        from tr11ops.dialects.dialect import CheckpointName

        rules = self.settings.dialect.checkpoints
        return CheckpointName("" if rules is None else rules.name).label(step)


OWN_SECTIONS = tuple(name for name in OwnCard.model_fields if name not in RunCard.model_fields)
"""The sections that [trainer] takes the place of."""


ALL_SECTIONS = {**OwnCard.model_fields, **ForeignCard.model_fields}
"""Of both kinds of card, in the order in which they are described."""


def own_card(card: RunCard, what: str) -> OwnCard:
    """The card where it is of tr11's own trainer. Raises Refusal for another's: `what` is only for
    ours.
    """
    if isinstance(card, OwnCard):
        return card
    raise Refusal(f"{what} is only for tr11's own trainer: this run's card has a [trainer] section")


def is_watched(card: RunCard) -> bool:
    """Whether it is of a job that someone else submitted, and that is watched alone."""
    return isinstance(card, ForeignCard) and card.trainer.start == "watch"


def refuse_watched(card: RunCard) -> None:
    """Raises Refusal for a card that `is_watched`."""
    if isinstance(card, ForeignCard) and is_watched(card):
        whose = card.trainer.command
        if isinstance(whose, list):
            whose = " ".join(whose)
        raise Refusal(f"{card.run.name} is only watched: tr11 neither starts nor stops {whose}")


def card_kind(tables: Mapping[str, Any]) -> type[RunCard]:
    """The schema of a card, by whether it names another trainer."""
    if "trainer" in tables and tables["trainer"] is not None:
        return ForeignCard
    return OwnCard
