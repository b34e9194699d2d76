"""Dumps of every parameter around a step: the hook that the training loop calls.

Full form: one text of `name=tensor` lines per rank and moment, with the tensors themselves beside
it. Fingerprint form: a table of least, largest, mean and norm. Both have a JSON companion, which
`tr11 checkpoints diff` reads: texts differ when a printer changes its mind about an exponent,
numbers do not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from trainer.checkpoint import randomness
from trainer.checkpoint.fingerprint import TABLE_HEAD, fingerprint, state_digest, table_row
from trainer.checkpoint.source import dtype_name, precision_name
from trainer.config.card import DebugSection
from trainer.contract.files import host_name, make_shared, now, write_atomically
from trainer.debug.record import (
    DumpRecord,
    Moment,
    ParameterRecord,
    RankCoordinates,
    StepFacts,
    fingerprint_stem,
    full_stem,
    moment_completed,
)
from trainer.model.family import Family
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import sharding_of

Named = Iterable[tuple[str, nn.Parameter]]
_MODULUS = 1 << 64


class DebugDumps:
    """Writes this rank's dumps into `folder`. Nothing is collective; when switched off every method
    returns at once.

    `iteration` counts from 1 as the log does. Before and after a step pass that step; on a save and
    a load pass the steps done. A save or a load is dumped when the step before or after it is
    wanted. Methods raise OSError.
    """

    def __init__(self, settings: DebugSection, mesh: Mesh, folder: Path, family: Family):
        self._family = family
        self._full = settings.dump == "full"
        self._ranges = [_range(text) for text in settings.iterations]
        self._mesh = mesh
        self._place = RankCoordinates(
            mesh.rank, mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank
        )
        self._folder = folder
        self._samples = 0
        self.enabled = settings.dump != "off"

    def wants(self, iteration: int) -> bool:
        """Whether this step is dumped. Facts that are dear to find need not be found when it is
        not.
        """
        return self.enabled and (
            not self._ranges or any(first <= iteration <= last for first, last in self._ranges)
        )

    def before_step(self, iteration: int, named: Named, facts: StepFacts) -> None:
        """Dump as "before-iteration", and begin to digest the step's samples."""
        self._samples = 0
        if self.wants(iteration):
            self._write("before-iteration", iteration, named, facts)

    def after_step(self, iteration: int, named: Named, facts: StepFacts) -> None:
        """Dump as "after-iteration"."""
        if self.wants(iteration):
            read = None
            if self._mesh.is_first_stage or self._mesh.is_last_stage:
                read = self._samples
            self._write("after-iteration", iteration, named, replace(facts, samples_digest=read))

    def on_save(self, iteration: int, named: Named, facts: StepFacts) -> None:
        """Dump as "on-save": what is saved, just before it is written."""
        if self.wants(iteration) or self.wants(iteration + 1):
            self._write("on-save", iteration, named, facts)

    def on_load(self, iteration: int, named: Named, facts: StepFacts) -> None:
        """Dump as "on-load": what the model holds once a checkpoint was loaded and made current."""
        if self.wants(iteration) or self.wants(iteration + 1):
            self._write("on-load", iteration, named, facts)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same micro batches; digests the samples as they pass, so that two runs' data can be
        compared.
        """
        if self.enabled:
            return self._digesting(batches)
        return batches

    def _digesting(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._samples = (self._samples + samples_digest(self._family.tokens(batch))) % _MODULUS
            yield batch

    def _write(self, moment: Moment, iteration: int, named: Named, facts: StepFacts) -> None:
        make_shared(self._folder)
        parameters = list(named)
        records = tuple(self._record(name, parameter) for name, parameter in parameters)
        pid, tensors = os.getpid(), None
        if self._full:
            stem = full_stem(iteration, self._place, moment, pid)
            tensors = f"{stem}.pt"
            _save_tensors(self._folder / tensors, parameters)
            lines = [f"{name}={parameter.detach()}" for name, parameter in parameters]
        else:
            if parameters:
                dtype = precision_name(parameters[0][1].dtype)
            else:
                dtype = "other"
            stem = fingerprint_stem(iteration, self._place, moment, dtype)
            lines = [
                TABLE_HEAD,
                *(table_row(record.name, record.numbers, record.shape) for record in records),
            ]
        write_atomically(self._folder / f"{stem}.txt", "\n".join(lines) + "\n")
        DumpRecord(
            iteration=iteration,
            moment=moment,
            completed=moment_completed(moment, iteration),
            place=self._place,
            topology=self._mesh.degrees(),
            facts=facts,
            random_state=random_digests(),
            parameters=records,
            created=now(),
            tensors=tensors,
            host=host_name(),
            pid=pid,
        ).write(self._folder / f"{stem}.json")

    def _record(self, name: str, parameter: nn.Parameter) -> ParameterRecord:
        sharding, local = sharding_of(parameter), tuple(parameter.shape)
        whole, offsets = (
            sharding.global_shape(local),
            sharding.offsets(local, self._mesh.tensor_rank),
        )
        return ParameterRecord(
            name=name,
            shape=local,
            global_shape=whole,
            offsets=offsets,
            dtype=dtype_name(parameter.dtype),
            sharding_dim=sharding.dim,
            replicated=sharding.dim is None and self._mesh.tensor > 1,
            tied=name == self._family.tied_name and self._mesh.pipeline > 1,
            numbers=fingerprint(parameter, whole, offsets),
        )


def samples_digest(tokens: Tensor) -> int:
    """A number for the samples [samples, tokens] of a batch that does not depend on their order: a
    sum of hashes.
    """
    rows = tokens.detach().to("cpu", torch.int64).contiguous().numpy()
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return sum(int.from_bytes(found, "big") for found in hashes) % _MODULUS


def random_digests() -> dict[str, str]:
    """A digest of the state of each random-number generator of this process."""
    return {name: state_digest(state) for name, state in randomness.capture().items()}


def _save_tensors(path: Path, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    temporary = path.with_name(f".{path.name}")
    torch.save(
        {name: parameter.detach().cpu().clone() for name, parameter in parameters}, temporary
    )
    temporary.chmod(0o664)
    temporary.replace(path)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)
