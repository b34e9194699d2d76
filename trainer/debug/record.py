"""The files of a dump: their names, and the JSON companion that programs read. Nothing here needs a
training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from trainer.checkpoint.fingerprint import Fingerprint
from trainer.contract.documents import document, record_of
from trainer.contract.errors import CheckpointError
from trainer.contract.files import write_json
from trainer.contract.record import Record

SCHEMA = 1
Moment = Literal["after-iteration", "on-save", "on-load", "before-iteration"]
# In the order in which they come for one count of completed steps: after step k, its save, its
# load, before step k+1.
MOMENTS: tuple[Moment, ...] = ("after-iteration", "on-save", "on-load", "before-iteration")
_COMPANION = re.compile(
    r"debug-.*-(?:before-iteration|after-iteration|on-save|on-load)(?:-\d+)?\.json"
)


class RankCoordinates(Record):
    """Who holds something: global rank, and its coordinates in the grid of workers."""

    rank: int
    stage: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, tensor rank {self.tensor}, data rank {self.data})"


class StepFacts(Record):
    """What the loop knows besides the parameters.

    `optimizer_step`: updates done. `learning_rate`: what the schedule gives at `consumed_samples`,
    so that of the next step; it is the same after a step and before the next. `samples_digest`: of
    the samples of the step that was just done, on ranks that read samples (see `DebugDumps.watch`).
    """

    optimizer_step: int
    learning_rate: float
    consumed_samples: int
    consumed_tokens: int
    samples_digest: int | None = None


class ParameterRecord(Record):
    """One parameter as one rank holds it: `shape` at `offsets` of the logical tensor of
    `global_shape`.
    """

    name: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
    sharding_dim: int | None
    replicated: bool
    tied: bool
    numbers: Fingerprint


class DumpRecord(Record):
    """One rank's dump at one moment. `completed`: steps done before it. `tensors`: file of the
    whole tensors, if any.

    `topology`: degrees under "pipeline", "data", "tensor". `random_state`: digest of each
    generator's state.
    """

    iteration: int
    moment: Moment
    completed: int
    place: RankCoordinates
    topology: Mapping[str, int]
    facts: StepFacts
    random_state: Mapping[str, str]
    parameters: tuple[ParameterRecord, ...]
    created: float
    tensors: str | None = None
    host: str = ""
    pid: int = 0
    folder: Path = Path()

    def write(self, path: Path) -> None:
        """Write the companion whole or not at all. Raises OSError."""
        value = document(self)
        del value["folder"]
        for shown, record in zip(value["parameters"], self.parameters, strict=True):
            shown["numbers"] = record.numbers.document()
        write_json(path, {"schema": SCHEMA, **value})

    @classmethod
    def read(cls, path: Path) -> DumpRecord:
        """The companion in `path`. Raises CheckpointError when it is damaged or of a newer schema,
        OSError else.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value.pop("schema") > SCHEMA:
                raise CheckpointError(f"{path} was written by a newer tr11; read it with that one")
            for item in value["parameters"]:
                item["numbers"] = Fingerprint.from_document(item["numbers"])
            return replace(record_of(cls, value), folder=path.parent)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a dump's companion: {type(error).__name__}: {error}"
            ) from None


def moment_completed(moment: Moment, iteration: int) -> int:
    """Steps done at this moment: `before-iteration` N comes before step N, all others after it."""
    if moment == "before-iteration":
        return iteration - 1
    return iteration


def full_stem(iteration: int, place: RankCoordinates, moment: Moment, pid: int) -> str:
    """Name, without ending, of a dump of whole tensors."""
    where = f"pp{place.stage}-tp{place.tensor}-dp{place.data}-global{place.rank}"
    return f"debug-{iteration}-{where}-{moment}-{pid}"


def fingerprint_stem(iteration: int, place: RankCoordinates, moment: Moment, dtype: str) -> str:
    """Name, without ending, of a dump of fingerprints."""
    return f"debug-{dtype}-{iteration}-pp{place.stage}-tp{place.tensor}-dp{place.data}-{moment}"


def companions(folder: Path) -> list[Path]:
    """The companions in a folder and the folders below it, by name."""
    return sorted(path for path in folder.rglob("debug-*.json") if _COMPANION.fullmatch(path.name))
