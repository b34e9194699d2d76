"""`tr11 checkpoints reshape`: a checkpoint of either layout, rewritten in the layout and for the
topology asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from trainer.checkpoint.commands.inspect import manifest_of
from trainer.checkpoint.deepspeed.content import OptimizerSettings
from trainer.checkpoint.deepspeed.layout import DeepSpeedSource
from trainer.checkpoint.deepspeed.write import layout_bytes, write_deepspeed_layout
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import source_bytes, write_checkpoint
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts, TensorSource
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.errors import CheckpointError, LatestStays, UsageError
from trainer.contract.lease import trained_into
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.record import JsonObject
from trainer.contract.resumable import ResumeFault, ResumeNeed, model_fault, moves_back, read_whole
from trainer.contract.units import size
from trainer.data.progress import progress_bar, say

DEGREES = ("tensor", "pipeline", "data")


def run(options: SimpleNamespace) -> JsonObject:
    """Rewrite one checkpoint. Raises CheckpointError for a damaged source and for a target that
    exists.
    """
    asked = {
        degree: getattr(options, degree)
        for degree in DEGREES
        if getattr(options, degree) is not None
    }
    _check_degrees(asked, options.layout)
    place = Path(options.place).resolve()
    output = Path(options.output).absolute()
    original = open_checkpoint(place)
    facts = original.facts
    target = output / checkpoint_name(facts.step)
    if target.exists():
        raise CheckpointError(f"{target} exists already and is not replaced; name another folder")
    _check_same_model(output, facts.model)
    pointer = _Pointer(output, facts.step, options.latest)
    if output.resolve().is_relative_to(place):
        raise UsageError(f"-o {output}: lies inside the checkpoint; name another folder")
    source: TensorSource
    if options.weights_only:
        source = WeightsOnly(original)
    else:
        source = original
    manifest = manifest_of(place)
    topology = {degree: asked.get(degree, facts.topology.get(degree, 1)) for degree in DEGREES}
    info = CheckpointInfo(topology, facts.model)
    if manifest is not None:
        info = CheckpointInfo(
            topology,
            facts.model,
            manifest.run_card_hash,
            versions=manifest.versions,
            job_id=manifest.job_id,
        )
    new = NewCheckpoint(
        output,
        facts.step,
        Extras({"consumed_samples": 0, "consumed_tokens": 0, **facts.cursor}),
        info,
        latest=pointer.moves,
        fence=pointer.look_again,
    )
    with progress_bar() as bar:
        if options.verify and manifest is not None:
            task = bar.add_task("verifying", total=manifest.total_bytes)
            _verify(place, manifest, partial(bar.advance, task))
        write: Callable[..., Path]
        if options.layout == "deepspeed":
            settings = OptimizerSettings.of(getattr(original, "group_options", ()))
            write = partial(write_deepspeed_layout, settings=settings)
            total = layout_bytes(source, topology)
        else:
            write = write_checkpoint
            total = source_bytes(source)
        writing = bar.add_task("writing", total=total)
        write(new, source, on_bytes=partial(bar.advance, writing))
        bar.update(writing, completed=total)
    if pointer.back and options.latest:
        raise CheckpointError(f"{target} is written, but {pointer.back}")
    if isinstance(original, DeepSpeedSource):
        remarks = list(original.remarks)
    else:
        remarks = []
    if pointer.back or not pointer.moves:
        remarks.append(
            pointer.back or f"{output / LATEST_FILE} is as it was; --latest has it name the new one"
        )
    elif options.weights_only and read_latest(output) != facts.step:
        remarks.append(
            f"{output / LATEST_FILE} is as it was: from weights alone no training resumes"
        )
    for remark in remarks:
        say(f"tr11: {remark}")
    written = manifest_of(target)
    assert written is not None
    return {
        "checkpoint": str(place),
        "step": facts.step,
        "layout": facts.layout,
        "topology": dict(facts.topology),
        "folder": str(target),
        "new_layout": options.layout,
        "new_topology": topology,
        "optimizer": bool(source.tensors("optimizer")),
        "verified": options.verify and manifest is not None,
        "files": len(written.files),
        "bytes": written.total_bytes,
        "remarks": remarks,
    }


class _Pointer:
    """Whether `latest` in the folder comes to name the new one. `back`: why it must not, for a
    newer one that is there.

    Raises CheckpointError where it shall, and may not.
    """

    def __init__(self, folder: Path, step: int, is_asked: bool):
        self._folder, self._step = folder, step
        self.back = moves_back(folder, step, ResumeNeed())
        self.moves = is_asked or not (self.back or os.path.lexists(folder / LATEST_FILE))
        if self.moves and (why := trained_into(folder, time.time()) or self.back):
            raise CheckpointError(why)

    def look_again(self) -> None:
        """Asked when all is written, which may take hours: a training may have started since, or a
        newer one come.

        Raises CheckpointError for the first, LatestStays for the second.
        """
        if not self.moves:
            return
        if why := trained_into(self._folder, time.time()):
            raise CheckpointError(why)
        self.back = moves_back(self._folder, self._step, ResumeNeed())
        if self.back:
            raise LatestStays


def describe(result: JsonObject) -> str:
    shape = " x ".join(f"{degree} {result['new_topology'][degree]}" for degree in DEGREES)
    if result["new_layout"] == "deepspeed":
        layout = f"DeepSpeed layout for {shape}"
    else:
        layout = "tr11 layout, for any topology"
    parts = "" if result["optimizer"] else ", weights only"
    return (
        f"{result['folder']}: step {result['step']}, {layout}{parts}, {size(result['bytes'])} "
        f"in {result['files']} files"
    )


def _check_same_model(output: Path, model: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the folder holds checkpoints of another model: its run would meet
    this one.
    """
    for step in reversed(checkpoint_steps(output)):
        manifest = read_whole(output, step)
        if isinstance(manifest, ResumeFault):
            fault = None
        else:
            fault = model_fault(manifest.model, model)
        if fault is not None:
            raise CheckpointError(
                f"{output} holds checkpoints of another model ({checkpoint_name(step)} differs in {fault.key}); name "
                "another folder"
            )


def _check_degrees(asked: Mapping[str, int], layout: str) -> None:
    if asked and layout == "tr11":
        raise UsageError(
            f"--{next(iter(asked))}: only --format deepspeed has a topology; every topology loads the tr11 layout"
        )


def _verify(place: Path, manifest: Manifest, on_bytes: Callable[[int], None]) -> None:
    for entry in manifest.files:
        faults = manifest_faults(place, replace(manifest, files=(entry,)), read_digests=True)
        if faults:
            raise CheckpointError(
                f"{place / faults[0]}; restore it from a backup, or use another step"
            )
        on_bytes(entry.bytes)


class WeightsOnly:
    """A source without its optimizer."""

    def __init__(self, source: TensorSource):
        self._source = source

    @property
    def facts(self) -> CheckpointFacts:
        return self._source.facts

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        if part == "weights":
            return self._source.tensors(part)
        return {}

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self._source.read(part, key, offsets, sizes)
