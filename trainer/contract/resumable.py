"""Whether a training can resume from a checkpoint: one rule, for the trainer and for every tool
beside it.

A checkpoint is resumable when its save has ended (a manifest of this step, in a format that this
tr11 reads), its files are there in their sizes (with their digests, where these are read or a
reading is on record), it holds weights, optimizer and cursor, and it is of this run's model.
Standard library and the contract only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.contract.checkpoint_formats import MANIFEST_FILE, OWN, Part, format_at, part_prefixes
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.errors import NewerFormat
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.paths import RunPaths
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_bytes, read_json

# where no checkpoint is left
NEW_VARIANT = "to begin from scratch, give run.variant a name of its own"

if TYPE_CHECKING:
    from trainer.config.card import TrainerConfig

Kind = Literal[
    "missing",
    "incomplete",
    "unreadable",
    "newer format",
    "other step",
    "other model",
    "partial",
    "damaged",
]
FaultsOf = Callable[[Path, Manifest], list[str]]

OPTIMIZER_SUMS = "optimizer_sums"  # of a cursor: what some optimizers keep of each whole tensor
UNNAMED = {
    "model.family": "gpt",
    "model.norm": "layernorm",
    "model.linear_biases": True,
    "model.qk_norm": False,
    "model.tied_embeddings": True,
    "model.rotary_factor": 1.0,
}
WEIGHTS_ALONE = "it holds weights alone, from which no training resumes"


class ResumeNeed(Record):
    """What a training needs of the checkpoint that it starts from.

    `model`: facts under the card's keys; those that both sides know must agree. `optimizer`: False
    where the weights are enough (`checkpoint.load` without `checkpoint.load_optimizer`, or with
    `checkpoint.finetune`). `trainer`: who is to load it: ours, a foreign one, or not known.
    """

    model: Mapping[str, Any] = {}
    optimizer: bool = True
    trainer: Literal["tr11", "foreign", "unknown"] = "unknown"

    @classmethod
    def of(cls, config: TrainerConfig) -> ResumeNeed:
        """What a resume of the card's own run needs."""
        return cls(model_facts(config), trainer="tr11")

    def for_weights(self) -> ResumeNeed:
        """What a start from the weights alone needs: they may be saved in another precision."""
        return ResumeNeed(
            {key: fact for key, fact in self.model.items() if key != "precision.dtype"},
            optimizer=False,
            trainer=self.trainer,
        )


class ResumeFault(Record):
    """Why a training does not resume from a checkpoint, and what kind of reason that is. `fix`: what to do
    about it, "" where nothing of its own is.

    `key`: the card's key that differs, where it is of another model.
    """

    kind: Kind
    rule: str
    fix: str = ""
    key: str = ""

    @property
    def text(self) -> str:
        """Both, in one line."""
        return "; ".join(filter(None, (self.rule, self.fix)))

    @property
    def is_foreign(self) -> bool:
        """Whether it may be sound, for another tr11 or another model: not this run's to judge, nor
        to replace.
        """
        return self.kind in {"newer format", "other model"}


class ResumeSearch(Record):
    """What a search for a resumable checkpoint came to. `passed`: those tried before the one that
    was found.
    """

    step: int | None
    manifest: Manifest | None
    passed: tuple[tuple[int, ResumeFault], ...] = ()

    @property
    def barrier(self) -> tuple[int, ResumeFault] | None:
        """A newer checkpoint that is not this run's to judge: training on below it would reach and
        replace it.
        """
        if self.step is None:
            return None
        return next(
            ((step, fault) for step, fault in self.passed if fault.is_foreign and step > self.step),
            None,
        )


def model_facts(config: TrainerConfig) -> JsonObject:
    """What decides whether a checkpoint is of the card's model, under the card's keys; every
    checkpoint holds it.
    """
    model = config.model
    facts: JsonObject = {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.attention_heads": model.attention_heads,
        "model.ffn_hidden_size": model.ffn,
        "model.kv_channels": model.head_size,
        "model.activation": model.activation,
        "model.position_embedding": model.position_embedding,
        "model.embedding_layernorm": model.embedding_layernorm,
        "model.layernorm_epsilon": model.layernorm_epsilon,
        "model.family": model.family,
        "model.norm": model.norm,
        "model.linear_biases": model.linear_biases,
        "model.qk_norm": model.qk_norm,
        "model.tied_embeddings": model.tied_embeddings,
        "model.key_value_heads": model.groups,
        "tokenizer.padded_vocabulary_size": config.tokenizer.padded_vocabulary_size,
        "precision.dtype": config.precision.dtype,
    }
    if model.position_embedding == "absolute":
        facts["model.max_position_embeddings"] = model.positions
    if model.position_embedding == "rotary":
        facts["model.rotary_base"] = model.rotary_base
        facts["model.rotary_factor"] = model.rotary_factor
        if model.rotary_factor > 1.0:
            facts["model.rotary_original_length"] = model.rotary_original_length
            facts["model.rotary_low_factor"] = model.rotary_low_factor
            facts["model.rotary_high_factor"] = model.rotary_high_factor
    return facts


def model_differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Keys on which both sides have a value and disagree: (saved, wanted). What no checkpoint named
    once is known.
    """
    known = with_unnamed(saved)
    return {
        key: (known[key], value)
        for key, value in wanted.items()
        if key in known and known[key] != value
    }


def with_unnamed(facts: Mapping[str, Any]) -> JsonObject:
    """A model's facts with those that checkpoints did not name while every model had them."""
    found = {**UNNAMED, **facts}
    if "model.attention_heads" in found:
        found.setdefault("model.key_value_heads", found["model.attention_heads"])
    return found


def lack_of(manifest: Manifest, need: ResumeNeed) -> ResumeFault | None:
    """Why no training resumes from what a manifest describes, all its files being there; None if
    one does.
    """
    if need.trainer != "unknown" and (manifest.foreign is None) != (need.trainer == "tr11"):
        return _other_trainer(manifest)
    needed: list[Part] = ["weights", "cursor"]
    if need.optimizer and not manifest.is_rehearsed:  # a stand-in trains nothing
        needed.append("optimizer")
    lacking = [
        part
        for part in needed
        if not any(entry.path.startswith(part_prefixes(part)) for entry in manifest.files)
    ]
    if lacking == ["optimizer"]:
        return ResumeFault("partial", WEIGHTS_ALONE)
    if lacking:
        return ResumeFault(
            "partial", f"it holds no {lacking[0]}, without which no training resumes"
        )
    return model_fault(manifest.model, need.model)


def _other_trainer(manifest: Manifest) -> ResumeFault:
    if manifest.foreign is None:
        rule, fix = "it is of tr11's own trainer", "use another run.variant for another trainer"
    else:
        rule = f"it is {manifest.foreign.name} of another trainer ({manifest.foreign.dialect}), which alone loads it"
        fix = "use that trainer's run card, or another run.variant"
    return ResumeFault("other model", rule, fix)


def model_fault(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> ResumeFault | None:
    """The first key on which checkpoint and card disagree, with the fix; None when they do not."""
    for key, (there, here) in model_differences(saved, wanted).items():
        rule = f"it is of another model: {key} is {there!r} in the checkpoint and {here!r} in the run card"
        fix = f"set {key} = {there!r}, or use another run.variant for the new model"
        return ResumeFault("other model", rule, fix, key)
    return None


def foreign_step(folder: Path) -> int | None:
    """The step that `latest` in `folder` names (else the newest), when no checkpoint there has a
    manifest and one is of another format than ours: another tool wrote them. Raises OSError as the file
    system does.
    """
    steps = checkpoint_steps(folder)
    if any((folder / checkpoint_name(step) / MANIFEST_FILE).exists() for step in steps):
        return None
    usable = [step for step in steps if format_at(folder / checkpoint_name(step)) != OWN]
    if not usable:
        return None
    try:
        named = read_latest(folder)
    except ValueError:
        named = None
    if named in usable:
        return named
    return max(usable)


def read_whole(folder: Path, step: int) -> Manifest | ResumeFault:
    """The manifest of one step's checkpoint below `folder` (checkpoints/VARIANT), or why it is not
    to be used.
    """
    place = folder / checkpoint_name(step)
    try:
        manifest = Manifest.read(place)
    except NewerFormat as error:
        return ResumeFault("newer format", one_line(error))
    except ValueError as error:
        return ResumeFault("unreadable", one_line(error))
    if manifest is None:
        if not place.is_dir():
            return ResumeFault("missing", f"{place} does not exist", "use another step")
        rule = f"{place} has no {MANIFEST_FILE}, so it is not complete"
        return ResumeFault("incomplete", rule, "use another step")
    if manifest.step != step:
        rule = f"{place} holds the manifest of step {manifest.step}: it was renamed"
        return ResumeFault("other step", rule, "give its name back")
    return manifest


def judge(
    folder: Path, step: int, need: ResumeNeed, faults_of: FaultsOf
) -> tuple[Manifest | None, ResumeFault | None]:
    """The manifest of one checkpoint, and why no training resumes from it; no fault where one does.

    `faults_of` compares the files with the manifest (`size_faults`, or all digests); it is asked
    last.
    """
    found = read_whole(folder, step)
    if isinstance(found, ResumeFault):
        return None, found
    lack = lack_of(found, need)
    if lack is not None:
        return found, lack
    try:
        faults = faults_of(folder / checkpoint_name(step), found)
    except (OSError, ValueError) as error:  # ValueError: a manifest whose names no file can have
        faults = [one_line(error)]
    if not faults:
        return found, None
    more = ""
    if len(faults) > 1:
        more = f" (and {len(faults) - 1} more)"
    return found, ResumeFault("damaged", f"{faults[0]}{more}")


def search(
    folder: Path,
    steps: Iterable[int],
    latest: int | None,
    need: ResumeNeed,
    faults_of: FaultsOf,
    report: Callable[[int, ResumeFault], None] = lambda step, fault: None,
) -> ResumeSearch:
    """Try `steps` in the order of `resume_order`, down to the first resumable one. `report` hears
    of each fault.
    """
    passed: list[tuple[int, ResumeFault]] = []
    for step in resume_order(steps, latest):
        manifest, fault = judge(folder, step, need, faults_of)
        if fault is None:
            return ResumeSearch(step, manifest, tuple(passed))
        report(step, fault)
        passed.append((step, fault))
    return ResumeSearch(None, None, tuple(passed))


def moves_back(folder: Path, step: int, need: ResumeNeed) -> str:
    """Why `latest` in `folder` must not come to name `step`: a training could go on from a newer
    one; "" if none could.

    From an older one it would replace the newer in time. Going back is `tr11 rollback`'s, which
    sets the newer aside.
    """
    newer = search(
        folder,
        [other for other in checkpoint_steps(folder) if other > step],
        latest=None,
        need=need,
        faults_of=size_faults,
    ).step
    if newer is None:
        return ""
    return (
        f"{folder / LATEST_FILE} is not moved back to step {step}: a training resumes from step {newer}, and would "
        f"replace it in time; to go back to step {step}, leave {LATEST_FILE} as it is, then: tr11 rollback {step}"
    )


def has_resumable(folder: Path) -> bool:
    """Whether a training of any model could resume from a checkpoint below `folder`, by the sizes
    of its files.
    """
    return (
        search(
            folder, checkpoint_steps(folder), latest=None, need=ResumeNeed(), faults_of=size_faults
        ).step
        is not None
    )


def resume_order(steps: Iterable[int], latest: int | None) -> list[int]:
    """Steps in the order in which they are tried: what `latest` names, then older ones, newest
    first, then newer ones.

    So a person may point `latest` to an older step. Without it: the newest first.
    """
    return sorted(steps, key=lambda step: (latest is not None and step > latest, -step))


# ----------------------------------------------------------------------------- the files
def size_faults(place: Path, manifest: Manifest) -> list[str]:
    """What sizes show, and what the last reading of all bytes found, if it found damage in this
    very checkpoint.
    """
    faults = manifest_faults(place, manifest, read_digests=False)
    if faults:
        return faults
    bad = recorded_damage(place)
    if bad:
        return [f"{bad[0]} (as tr11 checkpoints verify found)", *bad[1:]]
    broken = recorded_not_finite(place)
    if broken:
        return [f"NaN or infinity in {broken[0]} (as a look at its numbers found)", *broken[1:]]
    return []


def unnamed_files(manifest: Manifest, there: Iterable[str]) -> list[str]:
    """Of the files that are there, those that no manifest names; not what a network file system
    keeps for itself.
    """
    named = {entry.path for entry in manifest.files} | {MANIFEST_FILE}
    return sorted(
        path
        for path in there
        if path not in named and not path.rpartition("/")[2].startswith(".nfs")
    )


def recorded_damage(place: Path) -> tuple[str, ...]:
    """What a reading of all bytes of the checkpoint at `place` (its own folder) found wrong; empty
    when nothing.

    The record counts for the checkpoint that was read alone, not for a later one of the same step.
    One that cannot be read says nothing: the bytes decide, wherever they are read.
    """
    paths = RunPaths.of_checkpoints(place.parent)
    if paths is None:
        return ()
    return _lines_of(place, paths.digest_record(place.name), "bad")


def recorded_not_finite(place: Path) -> tuple[str, ...]:
    """Tensors of the checkpoint at `place` that a look at every number found NaN or infinite; empty
    when none. As `recorded_damage`.
    """
    paths = RunPaths.of_checkpoints(place.parent)
    if paths is None:
        return ()
    records = paths.not_finite_record(place.name, "").parent
    if not records.is_dir():  # as in most runs: then no manifest is read for it
        return ()
    try:
        identity = _identity_of(place)
    except (OSError, ValueError):
        return ()
    return _lines_of(place, paths.not_finite_record(place.name, identity), "not_finite")


def _lines_of(place: Path, path: Path, key: str) -> tuple[str, ...]:
    """What a record has under a key, if it is of the very checkpoint at `place`."""
    try:
        record = read_json(path)
        if record is None or not record.get(key):
            return ()
        identity = _identity_of(place)
    except (OSError, ValueError):
        return ()
    lines = record[key]
    if isinstance(lines, list) and record.get("identity") == identity:
        return tuple(map(str, lines))
    return ()


def _identity_of(place: Path) -> str:
    """Raises OSError, ValueError."""
    return hashlib.sha256(read_bytes(place / MANIFEST_FILE)).hexdigest()


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
