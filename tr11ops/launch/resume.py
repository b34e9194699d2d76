"""What a launch would resume from, and whether the card fits it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.launch.facts import LaunchCheckpoints, LaunchFacts
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.paths import RunDirectory
from trainer.config.data_match import data_facts, decisive_differences, fact_differences
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.manifest import Manifest


def checkpoint_checks(card: RunCard, directory: RunDirectory, facts: LaunchFacts) -> Iterator[PreflightCheck]:
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
            fix = "restore one, or remove that file to start again"
            yield refused("checkpoints", f"{directory.paths.latest} is there, but no checkpoint", fix)
        else:
            yield ok("checkpoints", "none: the training starts from random weights")
        return
    if found.refusal:
        step, fault = found.found.barrier or found.found.passed[0]
        text = f"{checkpoint_name(step)}: {fault.text}" if fault.key else found.refusal
        rule, _, fix = text.rpartition("; ")
        yield refused(fault.key or "checkpoints", rule, fix, 2 if fault.key else 1)
    elif found.found.manifest is not None:
        yield from _resume_checks(card, directory, found, found.found.manifest)


def _resume_checks(
    card: RunCard, directory: RunDirectory, found: LaunchCheckpoints, manifest: Manifest
) -> Iterator[PreflightCheck]:
    steps, latest, passed = found.steps, found.latest, found.found.passed
    name = checkpoint_name(manifest.step)
    if isinstance(latest, Unknown):
        yield warning("checkpoints", f"latest cannot be used ({latest.why}): {name} will be resumed")
    elif latest is None:
        text = f"{directory.paths.latest} is missing: {name}, the newest resumable one, will be resumed"
        yield warning("checkpoints", text)
    elif latest not in steps:
        text = f"latest names {checkpoint_name(latest)}, which is not there: {name} will be resumed"
        yield warning("checkpoints", text)
    for step, fault in passed[:3]:
        yield warning("checkpoints", f"{checkpoint_name(step)} is passed over: {fault.text}")
    newer = [step for step in steps if step > manifest.step and step not in dict(passed)]
    if newer:
        yield warning("checkpoints", f"{checkpoint_name(newer[-1])} is newer than {name}, which latest names")
    if manifest.consumed_samples >= card.batch.train_samples:
        rule = f"{name} has consumed {manifest.consumed_samples:,} samples of {card.batch.train_samples:,}"
        yield warning("batch.train_samples", f"{rule}: nothing is left to train", "raise it to go on")
    yield from _data_checks(card, found, name)
    if manifest.topology.get("tensor", 1) > 1:
        yield from _sequence_checks(card, found, name)
    text = f"resumes at step {manifest.step + 1} from {name}{_topology(card, manifest)}; {found.verified} verified"
    yield ok("checkpoints", text)


def _data_checks(card: RunCard, found: LaunchCheckpoints, name: str) -> Iterator[PreflightCheck]:
    """What the card says otherwise of the data; what the files hold, the trainer compares."""
    if found.data is None:
        return
    saved, now = found.data.facts, data_facts(card)
    decisive = decisive_differences(saved, now)
    others = [text for text in fact_differences(saved, now).values() if text not in decisive]
    if decisive and card.data.on_resume == "match":
        fix = 'put it back, or set data.on_resume = "switch" to go on with the new data from there'
        yield refused("data.on_resume", f"{name} was trained on other data: {'; '.join(decisive)}", fix)
    elif decisive:
        yield warning("data.on_resume", f"the data is switched after {name}: {'; '.join((*decisive, *others))}")
    elif others:
        yield warning("data", f"{'; '.join(others)}: the trainer compares what it holds with {name}")


def _sequence_checks(card: RunCard, found: LaunchCheckpoints, name: str) -> Iterator[PreflightCheck]:
    """A card that cuts sequences otherwise than before, maybe by default alone: it draws other dropout masks."""
    before, now = found.cut_sequences, bool(card.parallel.sequence_parallel)
    if before is None or before == now or card.parallel.tensor == 1:
        return
    here, there = str(now).lower(), str(before).lower()
    rule = f"is {here}, and {name} was trained with {there}: sums round otherwise from there"
    if card.model.hidden_dropout > 0.0 or card.model.attention_dropout > 0.0:
        rule += ", dropout masks are others"
    yield warning("parallel.sequence_parallel", rule, f"say {there} in the card to go on as before")


def saving_checks(card: RunCard) -> Iterator[PreflightCheck]:
    """What the card says of saving that a person may not have meant."""
    if not card.checkpoint.save_optimizer and card.rehearsal is None:
        rule = "false: what this run saves holds weights alone, and no attempt after the first can resume from it"
        yield warning("checkpoint.save_optimizer", rule, "set it to true unless one attempt trains it all")


def _topology(card: RunCard, manifest: Manifest) -> str:
    own = {"tensor": card.parallel.tensor, "pipeline": card.parallel.pipeline, "data": card.data_parallel_degree}
    saved = {key: manifest.topology.get(key, value) for key, value in own.items()}
    if saved == own:
        return ""
    return " (saved on " + " x ".join(f"{key} {degree}" for key, degree in saved.items()) + ")"
