"""The checkpoints of a run as rows, from their manifests alone. Reads; concludes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.contract import LATEST_FILE, MANIFEST_FILE, Manifest, checkpoint_name, checkpoint_steps, manifest_faults

Layout = Literal["tr11", "deepspeed", "unknown"]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint. `faults`: why it is not whole, by sizes; `created`: seconds since the epoch.

    What only a manifest says is None where there is none (a copy of another trainer, a save that was killed).
    """

    step: int
    path: str
    layout: Layout
    bytes: int
    faults: tuple[str, ...]
    is_latest: bool
    created: float
    topology: Mapping[str, int] | None = None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    run_card_hash: str | None = None

    @property
    def state(self) -> str:
        if self.faults:
            return "NOT WHOLE"
        return "whole" if self.topology is not None else "no manifest"

    @property
    def shape(self) -> str:
        """Tensor x pipeline x data, or a question mark."""
        if self.topology is None:
            return "?"
        return " x ".join(str(self.topology.get(axis, "?")) for axis in ("tensor", "pipeline", "data"))

    def document(self) -> dict[str, Any]:
        """The row as JSON values; `complete` is null where no manifest says what there should be."""
        complete = False if self.faults else (True if self.topology is not None else None)
        return {**asdict(self), "complete": complete}


def list_rows(folder: Path, latest: int | None) -> list[CheckpointRow]:
    """Rows of all checkpoints below `folder` (checkpoints/VARIANT), oldest first. Raises OSError when unreadable."""
    return [_row(folder / checkpoint_name(step), step, step == latest) for step in checkpoint_steps(folder)]


def standing_fault(folder: Path, rows: Sequence[CheckpointRow], latest: int | None) -> str | None:
    """What is wrong with what a restart would take, `latest` being what the file of that name says; None if nothing."""
    if latest is None:
        return f"{folder / LATEST_FILE} is missing: a restart takes the newest whole checkpoint" if rows else None
    named = next((row for row in rows if row.is_latest), None)
    if named is None:
        return f"{folder / LATEST_FILE} names {checkpoint_name(latest)}, which does not exist"
    if named.faults:
        return f"{LATEST_FILE} names {checkpoint_name(latest)}, which is not whole: {named.faults[0]}"
    return None


def _row(place: Path, step: int, is_latest: bool) -> CheckpointRow:
    layout: Layout = "unknown"
    if any(place.glob("mp_rank_*_model_states.pt")):
        layout = "deepspeed"
    elif (place / "weights").is_dir():
        layout = "tr11"
    try:
        manifest = Manifest.read(place)
    except ValueError as error:
        return _bare(place, step, is_latest, layout, (str(error),))
    if manifest is None:
        # The original's layout has none; in ours it is written last.
        absent: tuple[str, ...] = () if layout == "deepspeed" else (f"has no {MANIFEST_FILE}: its save did not end",)
        return _bare(place, step, is_latest, layout, absent)
    faults = tuple(manifest_faults(place, manifest, read_digests=False))
    if manifest.step != step:
        faults = (f"holds the manifest of step {manifest.step}: it was renamed", *faults)
    return CheckpointRow(
        step=step,
        path=str(place),
        layout=layout,
        bytes=manifest.total_bytes,
        faults=faults,
        is_latest=is_latest,
        created=manifest.created,
        topology=dict(manifest.topology),
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        run_card_hash=manifest.run_card_hash,
    )


def _bare(place: Path, step: int, is_latest: bool, layout: Layout, faults: tuple[str, ...]) -> CheckpointRow:
    """A checkpoint of which only the files are known."""
    files = [Path(root) / name for root, _, names in os.walk(place) for name in names]
    size = sum(path.lstat().st_size for path in files)
    return CheckpointRow(step, str(place), layout, size, faults, is_latest, place.stat().st_mtime)
