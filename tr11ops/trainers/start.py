"""What a foreign trainer is started with on one node: its words and its environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import WrongUsage
from tr11ops.dialects.image import TrainerImage, words_in
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.trainers.start_names import name_fault
from tr11ops.trainers.trainer import NodePlaces
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# by which Lightning takes itself for Slurm's own, and requeues the job when it hears USR1
SLURM_TASKS = "SLURM_NTASKS"
# what a site may have set: a default of torchrun's --max-restarts
TORCHRUN_RESTARTS = "PET_MAX_RESTARTS"
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_SHELL = ("bash", "-c")
# placeholders that are paths, which an image may have elsewhere
_PATHS = ("root", "folder", "attempt", "path", "save")


class TakenCheckpoint(Record):
    """The checkpoint that the trainer has to go on from. `step` is None where nothing says it."""

    step: int | None
    path: str
    name: str = ""

    def __str__(self) -> str:
        if self.step is None:
            return self.name
        return f"{self.name} of step {self.step}"


class LaunchWords(Record):
    """What a launch fills the placeholders of a card with, beside the places of its node. `node`: its
    name for Slurm; `has_directory`: whether it has the card's directory, else the image has it. `save`: the
    folder of this start's own, "" where it saves where all do.
    """

    paths: RunPaths
    attempt: Path
    launch: int
    taken: TakenCheckpoint | None = None
    exit_minutes: float | None = None
    node: str = ""
    has_directory: bool = True
    save: str = ""


class WorkerCommand(Record):
    """One process to start: its words, and what its environment has beside the keeper's own.

    `prefix` stands before each of its lines that has none; "" where its launcher sets them.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    prefix: str = ""
    rank: int | None = None


def refusal_of(settings: TrainerSettings) -> str:
    """Why a command must not be started: it would be started again by something else than tr11, or
    would not end with its job. "" where nothing is seen of that.
    """
    from tr11ops.dialects.supervisors import supervisors_in  # of no use to most commands

    words = settings.words
    if (
        settings.start == "srun"
        and settings.image is not None
        and settings.image.runtime == "pyxis"
    ):
        return 'start = "srun" would unpack the image once for each worker: torchrun starts them in one'
    if settings.start == "watch":
        return "this run is watched alone: tr11 does not start it"
    for supervisor in settings.dialect.supervisors:
        if any(_is_called(word, supervisor) for word in words):
            return f"{supervisor} starts a training again on its own, and so does tr11: leave it out of trainer.command"
    if settings.saves_apart and name_fault(settings):
        return name_fault(settings)
    found = next(supervisors_in(words, settings.environment), "")
    if found:
        return f"trainer.command: {found}"
    return ""


def interpreter_of(settings: TrainerSettings) -> str:
    """The Python that the trainer runs under on a node; "" where that is not known: it is in an image,
    or behind a script or a shell's line.
    """
    first = "".join(settings.words[:1])
    if settings.image is not None:
        return ""
    if settings.start == "torchrun" or first.endswith(".py") or first.startswith("-"):
        return settings.python
    if not isinstance(settings.command, str) and Path(first).name.startswith("python"):
        return first
    return ""


def unset_of(settings: TrainerSettings) -> tuple[str, ...]:
    """Variables that the trainer does not get: the card's, and those that would wake a supervisor of
    its own.
    """
    unset = dict.fromkeys((*settings.unset, TORCHRUN_RESTARTS))
    if any(one.startswith("SLURMEnvironment") for one in settings.dialect.supervisors):
        unset[SLURM_TASKS] = None
    return tuple(unset)


def commands_of(
    settings: TrainerSettings, places: NodePlaces, launch: LaunchWords
) -> tuple[WorkerCommand, ...]:
    """What is started on a node; nothing where another node starts it. Raises WrongUsage for a
    placeholder of which nothing is known.
    """
    known = _known(settings, places, launch)
    image = _image(settings, launch)
    if image is not None:
        known |= {name: image.inside(known[name] or "") or None for name in _PATHS}
    commands = _commands(_Filled(settings, known), places, launch)
    if image is None:
        return commands
    directory = image.inside(settings.directory)
    unset = unset_of(settings)
    return tuple(
        replace(one, words=words_in(image, one.words, directory, node=launch.node, unset=unset))
        for one in commands
    )


def _image(settings: TrainerSettings, launch: LaunchWords) -> TrainerImage | None:
    """The card's, with the folders that the training cannot do without."""
    if settings.image is None:
        return None
    needed = [str(launch.paths.root)]
    if settings.folder:
        needed.append(settings.folder)
    if launch.has_directory:
        needed.append(settings.directory)
    return settings.image.with_folders(needed)


def _commands(
    filled: _Filled, places: NodePlaces, launch: LaunchWords
) -> tuple[WorkerCommand, ...]:
    settings = filled.settings
    more = settings.first
    if launch.taken is not None:
        more = settings.resume
    environment = {name: filled.text(value) for name, value in settings.environment.items()}
    if settings.start == "torchrun":
        words = _torchrun(filled, places, more)
        return (WorkerCommand(words, environment),)
    if settings.start == "srun":
        return tuple(_workers(filled, places, more, environment))
    if settings.start == "command" and places.node_rank > 0:
        return ()
    return (WorkerCommand(filled.command(more), environment, prefix="[default0]:"),)


def environment_of(
    settings: TrainerSettings,
    command: WorkerCommand,
    inherited: Mapping[str, str],
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All of a process's environment. `more`: of the keeper's, which the card's own passes."""
    left_out = {*unset_of(settings), *_OF_RANKS}
    kept = {name: value for name, value in inherited.items() if name not in left_out}
    found = {**kept, "PYTHONUNBUFFERED": "1", **(more or {}), **command.environment}
    if command.environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        found.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it: they share the node's cores
    return found


class _Filled(Record):
    """The card's words, with the placeholders filled."""

    settings: TrainerSettings
    known: Mapping[str, str | None]

    def text(self, text: str) -> str:
        return _PLACEHOLDER.sub(self._value, text)

    def words(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(self.text, words))

    def command(self, more: tuple[str, ...]) -> tuple[str, ...]:
        """The command as it runs by itself; a script under the trainer's own interpreter."""
        given = self.settings.command
        if isinstance(given, str):
            return (*_SHELL, " ".join(self.words((given, *more))))
        words = self.words((*given, *more))
        if words and (words[0].endswith(".py") or words[0].startswith("-")):
            return (self.settings.python, *words)
        return words

    def _value(self, match: re.Match[str]) -> str:
        if match[1] not in self.known:  # braces of its own, as in JSON
            return match[0]
        value = self.known[match[1]]
        if value is None:
            raise WrongUsage(f"[trainer]: {match[0]} is not known of this launch: leave it out")
        return value


def _known(
    settings: TrainerSettings, places: NodePlaces, launch: LaunchWords
) -> dict[str, str | None]:
    paths, taken = launch.paths, launch.taken
    step = path = None
    save = launch.save or str(settings.checkpoint_folder or "")
    if taken is not None:
        step, path = taken.step, taken.path
    return {
        "root": str(paths.root),
        "folder": settings.folder or None,
        "name": paths.name,
        "variant": paths.variant,
        "attempt": str(launch.attempt),
        "launch": str(launch.launch),
        "nodes": str(places.nodes),
        "node_rank": str(places.node_rank),
        "workers_per_node": str(places.workers),
        "world_size": str(places.world_size),
        "master_address": places.address,
        "master_port": str(places.port),
        "step": _text(step),
        "path": path,
        "save": save or None,
        "exit_minutes": _text(launch.exit_minutes),
    }


def _text(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:.15g}"


def _torchrun(filled: _Filled, places: NodePlaces, more: tuple[str, ...]) -> tuple[str, ...]:
    given = filled.settings.command
    if isinstance(given, str):
        command: tuple[str, ...] = ("--no-python", *filled.command(more))
    else:
        command = filled.words((*given, *more))
    return (
        filled.settings.python,
        "-m",
        "torch.distributed.run",
        *places.options,
        "--max-restarts=0",
        "--tee=3",
        f"--log-dir={filled.known['attempt']}/torchrun/{places.node_rank}",
        *command,
    )


def _workers(
    filled: _Filled, places: NodePlaces, more: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[WorkerCommand]:
    """One process for each worker, with what torch asks of its environment."""
    words = filled.command(more)
    for local in range(places.workers):
        rank = places.first_rank + local
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(places.world_size),
            "LOCAL_WORLD_SIZE": str(places.workers),
            "GROUP_RANK": str(places.node_rank),
            "MASTER_ADDR": places.address,
            "MASTER_PORT": str(places.port),
        }
        yield WorkerCommand(words, {**environment, **own}, f"[default{local}]:", rank)


def _is_called(word: str, supervisor: str) -> bool:
    return supervisor in (word, word.rpartition("/")[2])
