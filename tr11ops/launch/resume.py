"""What a launch would resume from, and whether the card fits it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.launch.check import Check, ok, refused, unknown, warning
from tr11ops.launch.facts import CheckpointFacts, LaunchFacts
from tr11ops.runcard import RunCard
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Unknown
from trainer.contract import Manifest, checkpoint_name


def checkpoint_checks(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> Iterator[Check]:
    """Checks of the checkpoint that a resume would load; a first start without any is fine unless the card says not."""
    if isinstance(facts.checkpoints, Unknown):
        yield unknown("checkpoints", f"they could not be read ({facts.checkpoints.why})")
        return
    found, folder = facts.checkpoints, directory.paths.checkpoints
    if not found.steps:
        if card.run.expect_resume:
            fix = "restore one, or correct run.directory or run.variant"
            yield refused("run.expect_resume", f"{folder} holds no checkpoint", fix)
        elif found.latest is not None:
            fix = "restore one, or remove that file to start anew"
            yield refused("checkpoints", f"{directory.paths.latest} is there, but no checkpoint", fix)
        else:
            yield ok("checkpoints", "none: the training starts from random weights")
        return
    if found.manifest is None:
        step, fault = found.rejected[0]
        rule = f"none of the {len(found.steps)} in {folder} is whole: {checkpoint_name(step)}: {fault}"
        yield refused("checkpoints", rule, "restore one from a backup, or move them away to start from random weights")
        return
    yield from _resume_checks(card, directory, found, found.manifest)


def _resume_checks(
    card: RunCard, directory: RunDirectory, found: CheckpointFacts, manifest: Manifest
) -> Iterator[Check]:
    steps, latest, rejected = found.steps, found.latest, found.rejected
    name = checkpoint_name(manifest.step)
    if isinstance(latest, Unknown):
        yield warning("checkpoints", f"latest cannot be used ({latest.why}): {name} will be resumed")
    elif latest is None:
        text = f"{directory.paths.latest} is missing: {name}, the newest whole one, will be resumed"
        yield warning("checkpoints", text)
    elif latest not in steps:
        text = f"latest names {checkpoint_name(latest)}, which is not there: {name} will be resumed"
        yield warning("checkpoints", text)
    for step, fault in rejected[:3]:
        yield warning("checkpoints", f"{checkpoint_name(step)} is passed over: {fault}")
    newer = [step for step in steps if step > manifest.step and step not in dict(rejected)]
    if newer:
        yield warning("checkpoints", f"{checkpoint_name(newer[-1])} is newer than {name}, which latest names")
    differences = model_differences(card, manifest)
    for key, (saved, wanted) in differences.items():
        rule = f"{wanted!r} in the card, {saved!r} in {name}: a checkpoint of another model"
        yield refused(key, rule, f"set it to {saved!r}, or use another run.variant for the new model", 2)
    if manifest.consumed_samples >= card.batch.train_samples:
        rule = f"{name} has consumed {manifest.consumed_samples:,} samples of {card.batch.train_samples:,}"
        yield warning("batch.train_samples", f"{rule}: nothing is left to train", "raise it to go on")
    if not differences:
        yield ok(
            "checkpoints",
            f"resumes at step {manifest.step + 1} from {name}{_topology(card, manifest)}; {found.verified} verified",
        )


def _topology(card: RunCard, manifest: Manifest) -> str:
    own = {"tensor": card.parallel.tensor, "pipeline": card.parallel.pipeline, "data": card.data_parallel_degree}
    saved = {key: manifest.topology.get(key, value) for key, value in own.items()}
    if saved == own:
        return ""
    return " (saved on " + " x ".join(f"{key} {degree}" for key, degree in saved.items()) + ")"


def model_facts(card: RunCard) -> dict[str, object]:
    """What decides whether a checkpoint fits, under the card's keys, as the trainer writes it into a manifest."""
    model = card.model
    facts: dict[str, object] = {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.attention_heads": model.attention_heads,
        "model.ffn_hidden_size": model.ffn,
        "model.position_embedding": model.position_embedding,
        "model.embedding_layernorm": model.embedding_layernorm,
        "tokenizer.padded_vocabulary_size": card.tokenizer.padded_vocabulary_size,
        "precision.dtype": card.precision.dtype,
    }
    if model.position_embedding == "absolute":
        facts["model.max_position_embeddings"] = model.positions
    return facts


def model_differences(card: RunCard, manifest: Manifest) -> dict[str, tuple[object, object]]:
    """Keys on which card and checkpoint disagree: (saved, wanted). Keys that only one side knows are passed over."""
    return {
        key: (manifest.model[key], wanted)
        for key, wanted in model_facts(card).items()
        if key in manifest.model and manifest.model[key] != wanted
    }
