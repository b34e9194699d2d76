"""What a launch looks at and says of a trainer that is not tr11's own: whether it can be started here,
how it can be stopped, and what it would go on from.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.base.units import first_few
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.runcard.card import ForeignCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.trainers.checkpoints import CheckpointSurvey, survey
from tr11ops.trainers.levels import BELIEF, TrainerStanding, standing_now
from tr11ops.trainers.resuming import Knows, added, knows_words
from tr11ops.trainers.start import refusal_of
from tr11ops.trainers.start_names import current_folder
from trainer.contract.record import Record

MOST_NAMED = 5
QUESTION = "# DECIDE, "
_NAMED_KEY = re.compile(r"--set ([\w.]+)=")


class SeenTrainer(Record):
    """A foreign trainer as it can be seen from here. `missing`: of what it needs; `interpreter`: why
    it cannot be found, "" where it can. `found`: its checkpoints, None where it has none to look at
    yet. `is_apart`: its folder is on another file system than the run directory. `knows`: whether its
    script takes the words that a resume adds.
    """

    settings: TrainerSettings
    standing: TrainerStanding
    missing: tuple[str, ...] = ()
    interpreter: str = ""
    found: Observed[CheckpointSurvey | None] = None
    is_apart: bool = False
    knows: Knows = "not known"


def look_at_trainer(card: RunCard) -> SeenTrainer | None:
    """None where the trainer is tr11's own."""
    if not isinstance(card, ForeignCard):
        return None
    settings = card.settings
    wanted = [Path(settings.directory), *map(Path, settings.needs)]
    if settings.image is not None:  # the directory and the script may be the image's
        wanted = [path for path in wanted[1:] if not settings.image.holds(str(path))]
    elif settings.start == "torchrun" and settings.words[0].endswith(".py"):
        wanted.append(Path(settings.directory) / settings.words[0])
    return SeenTrainer(
        settings,
        standing_now(card.paths, settings, card.world_size),
        missing=tuple(str(path) for path in wanted if not path.exists()),
        interpreter=_interpreter_fault(settings),
        found=observed(_survey, settings, card.world_size),
        is_apart=_is_apart(card, settings),
        knows=knows_words(_script_text(settings), settings.resume),
    )


def foreign_checks(card: RunCard, facts: SeenTrainer | None) -> Iterator[PreflightCheck]:
    """What stands against a start of it, and what a person should know before. Pure."""
    if facts is None:
        return
    settings = facts.settings
    fault = refusal_of(settings)
    if fault:
        yield refused("trainer.command", fault, "tr11 starts it again itself", 2)
    if facts.missing:
        named = first_few(facts.missing, MOST_NAMED)
        yield refused("trainer.needs", f"not there: {named}", "make it, or correct the card")
    if facts.interpreter and card.slurm.setup:
        yield warning("trainer.python", f"{facts.interpreter}; slurm.setup must bring it")
    elif facts.interpreter:
        yield refused("trainer.python", facts.interpreter, "give the path of the trainer's own")
    yield ok("trainer", str(facts.standing))
    yield from _resume_check(facts)
    yield from _checkpoint_checks(facts)


def _resume_check(facts: SeenTrainer) -> Iterator[PreflightCheck]:
    """What a launch adds to the command where there is something to go on from."""
    settings = facts.settings
    if settings.start == "watch" or settings.checkpoint_folder is None:
        return
    said = added(settings.resume)
    if facts.knows in ("no", "by itself"):
        text = f"{said}, which {_script(settings)} seems not to know: a relaunch would end at once"
        fix = "trainer.resume = [] where it finds its newest checkpoint itself"
        yield warning("trainer.resume", text, fix)
    else:
        yield ok("trainer.resume", said)


def _script(settings: TrainerSettings) -> str:
    """The script that trains; "" where the command names none."""
    return next((word for word in settings.words if word.endswith(".py")), "")


def _script_text(settings: TrainerSettings) -> str | None:
    """None where it cannot be read, or is no text."""
    name = _script(settings)
    if not name:
        return None
    text = observed((Path(settings.directory) / name).read_text, encoding="utf-8")
    return known(text, None)


def _checkpoint_checks(facts: SeenTrainer) -> Iterator[PreflightCheck]:
    folder = current_folder(facts.settings)
    if folder is None:
        text = "where its checkpoints lie is not known: none is held, copied or looked at"
        yield warning("trainer.folder", text, "set trainer.folder, and a dialect that knows them")
        return
    rules = facts.settings.dialect.checkpoints
    if rules is not None and rules.lacks_belief:
        yield warning("trainer.checkpoints", f"it is not known {BELIEF}")
    if facts.is_apart:
        text = f"{folder} is on another file system than the run directory: each checkpoint is copied, not linked"
        yield warning("trainer.folder", text)
    if isinstance(facts.found, Unknown):
        yield warning("trainer.folder", f"its checkpoints cannot be read: {facts.found.why}")
    elif facts.found is not None and facts.found.unsure:
        yield warning("trainer.checkpoints", f"it is not known {facts.found.unsure}")
    elif facts.found is not None and facts.found.is_fresh:
        text = f"{facts.found.conflict}: whether it is whole is seen right before the start"
        yield ok("trainer.checkpoints", text)
    elif facts.found is not None and facts.found.conflict:
        text = f"{facts.found.conflict}: that is set right before the start"
        yield warning("trainer.checkpoints", text)


def open_questions(path: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """The lines of a card in which `tr11 adopt` asks a person; not those that an override answers."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ()
    given = {one.partition("=")[0] for one in overrides}
    asked = (line.removeprefix(QUESTION) for line in lines if line.startswith(QUESTION))
    return tuple(one for one in asked if not given.intersection(_NAMED_KEY.findall(one)))


def _survey(settings: TrainerSettings, world_size: int) -> CheckpointSurvey | None:
    folder = current_folder(settings)
    if folder is None or settings.dialect.checkpoints is None or not folder.is_dir():
        return None
    return survey(settings.dialect.checkpoints, folder, world_size, time.time())


def _interpreter_fault(settings: TrainerSettings) -> str:
    if settings.image is not None:  # the image has its own
        return ""
    if settings.start != "torchrun" and settings.words[:1] != (settings.python,):
        return ""
    if shutil.which(settings.python) is None:
        return f"{settings.python} is no program on this machine"
    return ""


def _is_apart(card: RunCard, settings: TrainerSettings) -> bool:
    """By the folders that exist: of one that is still to be made, its nearest parent tells."""
    if not settings.folder:
        return False
    return _device(Path(settings.folder)) != _device(card.paths.root)


def _device(path: Path) -> int:
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except OSError:
            continue
    return 0
