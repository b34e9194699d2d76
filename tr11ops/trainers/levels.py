"""How much of a foreign training tr11 does: the levels, as screens say them.

    0  watched: someone else submitted it, and tr11 looks
    1  copied: its checkpoints are held and copied away too; alone it is `tr11 watch --hold`, and from
       the second level on it is included
    2  started, and started again, by tr11
    3  stopped in order: it can be asked to save and leave, as a drill has proved
    4  it speaks: its ranks tell tr11 of themselves

The fourth is seen on the nodes alone, where a trainer speaks or does not.
"""

from __future__ import annotations

from datetime import UTC

from msgspec.structs import replace

from tr11ops.base.units import timestamp
from tr11ops.dialects.dialect import CheckpointName
from tr11ops.dialects.settings import NO_DIALECT, TrainerSettings
from tr11ops.trainers.moved import MovedAside, read_moves
from tr11ops.trainers.proof import StopProof, read_proof, stop_digest
from tr11ops.trainers.start_names import current_folder
from tr11ops.trainers.stopping import NEXT_CHECKPOINT, lack_of_asking, way_of
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

WATCHED, COPIED, STARTED, STOPPED = 0, 1, 2, 3
BELIEF = (
    "which checkpoint it takes where the newest is broken: a kill in a save waits for a person. Say it: "
    "[trainer.checkpoints] believes = [] where it takes whatever bears the name, or the rules that it "
    'looks at, as in `complete` (["has DONE"])'
)
"""What is to be said of a trainer whose `checkpoints.believes` no one has said."""
REFUSED_WHERE_WATCHED = frozenset(
    {
        "checkpoint-now",
        "compute-check",
        "kill",
        "launch",
        "nodes exclude",
        "nodes include",
        "pause",
        "profile",
        "resume",
        "rollback",
        "stacks",
        "train",
        "upload",
    }
)
"""Commands of tr11 that refuse a run which is only watched."""
_DOES = {
    WATCHED: "watched: tr11 neither starts nor stops it",
    COPIED: "copied: its checkpoints are held, and tr11 neither starts nor stops it",
    STARTED: "started",
    STOPPED: "started, and stopped in order",
}


class TrainerStanding(Record):
    """What tr11 does for a run of a foreign trainer. `stop`: how it is stopped, in words;
    `saves_when_asked`: whether it saves then; None where no drill has told. `unknown`: what nothing tells of it.
    `saves_as`: how its dialect names a checkpoint. `set_aside`: broken ones that were moved out of its way.
    """

    dialect: str
    level: int
    stop: str
    saves_when_asked: bool | None
    unknown: tuple[str, ...] = ()
    saves_as: str = ""
    set_aside: tuple[MovedAside, ...] = ()

    def name_of(self, step: int) -> str:
        """A checkpoint by the name that it has in its trainer's folder, with its step."""
        return CheckpointName(self.saves_as).label(step)

    @property
    def is_watched(self) -> bool:
        """Whether someone else has submitted it, and tr11 only looks."""
        return self.level <= COPIED

    @property
    def holds_nothing(self) -> bool:
        """Whether what it saves is not seen: of its checkpoints nothing is known then."""
        return self.level == WATCHED

    def refuses(self, command: str) -> bool:
        """Whether a command, as a person would type it, is refused for this run, or is the owner's of
        the job to type: one of tr11's, or one that changes a job of Slurm's.
        """
        if not self.is_watched:
            return False
        words = command.split()
        if words[:1] == ["tr11"]:
            return bool({*words[1:2], " ".join(words[1:3])} & REFUSED_WHERE_WATCHED)
        return words[:1] == ["scancel"] or (words[:1] == ["scontrol"] and words[1:2] != ["show"])

    def __str__(self) -> str:
        name = "no dialect" if self.dialect == NO_DIALECT else self.dialect
        text = f"{name}, level {self.level}: {_DOES[self.level]}; {self.stop}"
        if self.unknown:
            return f"{text}; not known: {', '.join(self.unknown)}"
        return text


def standing_of(
    settings: TrainerSettings, ranks: int, proof: StopProof | None = None
) -> TrainerStanding:
    """What tr11 does by the card's `[trainer]`. `proof`: what the newest drill of its command found."""
    is_proved = proof is not None and proof.is_proved and not lack_of_asking(settings, ranks)
    if settings.start == "watch":
        level = COPIED if settings.hold else WATCHED
        stop = "who submitted it stops it"
    else:
        level = STOPPED if is_proved else STARTED
        stop = _stop_words(settings, ranks, proof)
    saves = True if is_proved else None
    if settings.start == "watch" or way_of(settings, ranks, proof) == NEXT_CHECKPOINT:
        saves = False
    unknown, rules = [], settings.dialect.checkpoints
    if level > COPIED and rules is not None and rules.lacks_belief:
        unknown.append("which checkpoint it takes where the newest is broken")
    if settings.checkpoint_folder is None:
        unknown.append("its checkpoints")
    if settings.checkpoint_interval is None and settings.checkpoint_minutes is None:
        unknown.append("how often it saves")
    return TrainerStanding(
        settings.dialect.name,
        level,
        stop,
        saves_when_asked=saves,
        unknown=tuple(unknown),
        saves_as="" if rules is None else rules.name,
    )


def standing_now(paths: RunPaths, settings: TrainerSettings, ranks: int) -> TrainerStanding:
    """The same with what is on record in the run directory now."""
    standing = standing_of(settings, ranks, read_proof(paths, stop_digest(settings, ranks)))
    folder = current_folder(settings)
    if folder is None:
        return standing
    return replace(standing, set_aside=read_moves(folder))


def _stop_words(settings: TrainerSettings, ranks: int, proof: StopProof | None) -> str:
    lack = lack_of_asking(settings, ranks)
    if not lack and proof is not None and proof.result == "failed":
        lack = f"it did not stop in order when a drill asked it ({proof.why})"
    if lack:
        return f"{lack}: a stop ends it after its next checkpoint"
    asks = f"a stop asks it to save and leave, by {way_of(settings, ranks, proof)}"
    if proof is not None and proof.is_proved:
        return f"{asks}, as a drill proved on {timestamp(proof.time, UTC, '%Y-%m-%d')}"
    return f"{asks}, which no drill has proved: `tr11 drill`"


class StopAsking:
    """How the trainer of one launch is asked to stop: by the command that it was started with, and what
    drills have found of that so far.
    """

    def __init__(self, settings: TrainerSettings, ranks: int, paths: RunPaths) -> None:
        self._settings, self._ranks, self._paths = settings, ranks, paths
        self._digest = stop_digest(settings, ranks)

    def way(self) -> str:
        """As `way_of` says, now."""
        return way_of(self._settings, self._ranks, read_proof(self._paths, self._digest))

    def is_sure(self) -> bool:
        """Whether a drill has proved that it saves when it is asked."""
        proof = read_proof(self._paths, self._digest)
        return standing_of(self._settings, self._ranks, proof).saves_when_asked is True
