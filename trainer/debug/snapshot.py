"""One state of a training as the diff sees it, whether it comes from a checkpoint or from dumps of
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from msgspec.structs import asdict
from torch import Tensor

from trainer.checkpoint.fingerprint import Fingerprint, state_digest
from trainer.checkpoint.source import PARTS, TensorSource, dtype_name
from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.contract.units import shortened
from trainer.debug.record import MOMENTS, DumpRecord, Moment, RankCoordinates, companions

Kind = Literal["weight", "fp32", "exp_avg", "exp_avg_sq", "exp_noise_sq"]
KINDS: tuple[Kind, ...] = ("weight", "fp32", "exp_avg", "exp_avg_sq", "exp_noise_sq")
Reader = Callable[[Sequence[int], Sequence[int]], Tensor]


class TensorCopy(Record):
    """A rectangle of a logical tensor as someone holds it.

    `place`: who; None for a checkpoint, which holds one copy of the whole. `numbers`: known without
    reading, else None. `read(offsets, sizes)`: a rectangle of the copy, offsets counted in the
    copy; None where only numbers were dumped.
    """

    kind: Kind
    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    replicated: bool = False
    place: RankCoordinates | None = None
    numbers: Fingerprint | None = None
    read: Reader | None = None


class StateSnapshot(Record):
    """A state after `completed` steps. `moment`: that of the dumps; a checkpoint is what was there
    "on-save".

    `facts`: per rank (one entry, under -1, for a checkpoint): `optimizer_step`, `learning_rate`,
    `consumed_samples`, ... as far as they are known. `random_state`: digests of generators, per
    rank. `missing`: ranks without a dump. `source`: where a checkpoint's tensors are read from.
    """

    label: str
    completed: int
    moment: Moment
    topology: Mapping[str, int]
    facts: Mapping[int, Mapping[str, Any]]
    random_state: Mapping[int, Mapping[str, str]]
    copies: tuple[TensorCopy, ...]
    model: Mapping[str, Any]
    is_checkpoint: bool
    missing: tuple[int, ...] = ()
    source: TensorSource | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What reading the tensors of a checkpoint showed: tensor ranks' copies in the original
        layout that differ.
        """
        return tuple(getattr(self.source, "remarks", ()))

    @property
    def title(self) -> str:
        """How people call it."""
        if self.is_checkpoint:
            return f"{self.label} (checkpoint of step {self.completed})"
        return f"{self.label} ({self.moment} {self.iteration})"

    @property
    def iteration(self) -> int:
        if self.moment == "before-iteration":
            return self.completed + 1
        return self.completed

    @property
    def order(self) -> tuple[int, int]:
        """By time."""
        return self.completed, MOMENTS.index(self.moment)


def owners(copies: Iterable[TensorCopy]) -> dict[tuple[Kind, str], list[TensorCopy]]:
    """The copies that make up each logical tensor once: first stage that holds it, first replica."""
    found: dict[tuple[Kind, str], list[TensorCopy]] = {}
    for copy in copies:
        found.setdefault((copy.kind, copy.name), []).append(copy)
    return {key: _once(group) for key, group in found.items()}


def _once(group: list[TensorCopy]) -> list[TensorCopy]:
    placed = [copy.place for copy in group if copy.place is not None]
    if len(placed) < len(group):
        return group
    stage, data = min(place.stage for place in placed), min(place.data for place in placed)
    held = [
        copy
        for copy, place in zip(group, placed, strict=True)
        if (place.stage, place.data) == (stage, data)
    ]
    if held and held[0].replicated:
        return held[:1]
    return held


# ----------------------------------------------------------------------------- from a checkpoint
def checkpoint_snapshot(source: TensorSource, place: Path, label: str) -> StateSnapshot:
    """A checkpoint opened by `trainer.checkpoint.reader.open_checkpoint`; tensors are read when
    they are compared.
    """
    facts = source.facts
    copies = []
    for part in PARTS:
        for key, tensor in source.tensors(part).items():
            if part == "optimizer":
                name, _, kind = key.rpartition("/")
            else:
                name, _, kind = (key, "", "weight")
            if kind not in KINDS:
                raise CheckpointError(
                    f"{place}: {key} is of no known kind; use the tr11 that wrote it"
                )
            shape = tuple(tensor.shape)
            copies.append(
                TensorCopy(
                    kind=kind,
                    name=name,
                    global_shape=shape,
                    offsets=(0,) * len(shape),
                    shape=shape,
                    dtype=dtype_name(tensor.dtype),
                    read=partial(source.read, part, key),
                )
            )
    return StateSnapshot(
        label=label,
        completed=facts.step,
        moment="on-save",
        topology=dict(facts.topology),
        facts={-1: {"optimizer_step": facts.optimizer_step, **facts.cursor}},
        random_state=_saved_random_state(place),
        copies=tuple(copies),
        model=dict(facts.model),
        is_checkpoint=True,
        source=source,
    )


def _saved_random_state(place: Path) -> dict[int, dict[str, str]]:
    found = {}
    for path in sorted((place / "rng").glob("rank_*.pt")):
        states = torch.load(path, map_location="cpu", weights_only=True)
        found[int(path.stem.removeprefix("rank_"))] = {
            name: state_digest(state) for name, state in states.items()
        }
    return found


# ----------------------------------------------------------------------------- from dumps
def dump_snapshots(folder: Path, label: str) -> list[StateSnapshot]:
    """All states that the dumps in `folder` (and below) show, by time. Raises CheckpointError,
    OSError.

    Where a rank dumped one moment twice, in two processes, the newer one counts.
    """
    newest: dict[tuple[int, Moment], dict[int, DumpRecord]] = {}
    for path in companions(folder):
        record = DumpRecord.read(path)
        ranks = newest.setdefault((record.completed, record.moment), {})
        known = ranks.get(record.place.rank)
        if known is None or known.created <= record.created:
            ranks[record.place.rank] = record
    snapshots = [
        _snapshot([ranks[rank] for rank in sorted(ranks)], label) for ranks in newest.values()
    ]
    return sorted(snapshots, key=lambda snapshot: snapshot.order)


def _snapshot(records: list[DumpRecord], label: str) -> StateSnapshot:
    first = records[0]
    other = next((record for record in records if record.topology != first.topology), None)
    if other is not None:
        raise CheckpointError(
            f"{other.folder} holds dumps of {first.moment} {first.iteration} on two shapes, "
            f"{dict(first.topology)} and {dict(other.topology)}; keep each run's dumps in a folder of its own"
        )
    held = {record.place.rank for record in records}
    return StateSnapshot(
        label=label,
        completed=first.completed,
        moment=first.moment,
        topology=first.topology,
        facts={
            record.place.rank: {
                name: value for name, value in asdict(record.facts).items() if value is not None
            }
            for record in records
        },
        random_state={record.place.rank: record.random_state for record in records},
        copies=tuple(copy for record in records for copy in _copies(record)),
        model={},
        is_checkpoint=False,
        missing=tuple(
            rank for rank in range(math.prod(first.topology.values())) if rank not in held
        ),
    )


def _copies(record: DumpRecord) -> Iterator[TensorCopy]:
    if record.tensors is None:
        tensors = None
    else:
        tensors = _TensorFile(record.folder / record.tensors)
    for parameter in record.parameters:
        yield TensorCopy(
            kind="weight",
            name=parameter.name,
            global_shape=parameter.global_shape,
            offsets=parameter.offsets,
            shape=parameter.shape,
            dtype=parameter.dtype,
            replicated=parameter.replicated,
            place=record.place,
            numbers=parameter.numbers,
            read=None if tensors is None else partial(tensors.read, parameter.name),
        )


class _TensorFile:
    """The tensors of one rank's full dump, mapped into memory when the first is asked for."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        try:
            return cast(
                dict[str, Tensor],
                torch.load(self.path, map_location="cpu", mmap=True, weights_only=True),
            )
        except OSError:
            raise
        except Exception as error:
            said = shortened(" ".join(str(error).split()), 200)
            raise CheckpointError(
                f"{self.path} cannot be read ({said}); use a dump of fingerprints"
            ) from None

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A rectangle of one tensor. Raises CheckpointError when the file is not what it should be."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.path} lacks {name}, which its companion names; dump again"
            )
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor
