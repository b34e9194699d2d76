"""What a study is, in the one file of its folder (the grid, each cell, every array that was
submitted for it), and finding that folder.

sweep.json    sweep.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)
CELL/         a run directory, with its card as CELL/tr11.toml
arrays/       what the array's own script printed, where no cell's was begun
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SweepError
from tr11ops.base.units import first_few
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.versioned import VersionedFile
from tr11ops.sweep.plan import SweepPlan
from trainer.contract.documents import document, record_of
from trainer.contract.files import make_shared, now, write_atomically
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json

SCHEMA = 1
FILE = "sweep.json"
CARD = "tr11.toml"
VERSIONS_KEPT = 16


class ManifestCell(Record):
    """One cell: its task number, name, settings by key, and the digest of the card that it was made
    with.
    """

    number: int
    name: str
    settings: dict[str, str]
    derived: JsonObject
    card_hash: str


class SweepArray(Record):
    """One array: its number, where and when it was submitted, and the submission's tag of each
    cell, by number.
    """

    job_id: str
    scheduler: str
    time: float
    user: str
    tags: dict[str, str]


class SweepManifest(Record):
    """A study. `version` counts changes. `card` is the card that it was planned from."""

    version: int
    name: str
    user: str
    created: float
    card: str
    rule: str
    equal_samples: bool
    at_once: int
    cells: tuple[ManifestCell, ...]
    arrays: tuple[SweepArray, ...] = ()

    @property
    def scheduler(self) -> str:
        """Where its last array went; "" before the first."""
        if self.arrays:
            return self.arrays[-1].scheduler
        return ""


def manifest_of(plan: SweepPlan, card: Path, at_once: int) -> SweepManifest:
    """The first version, of a study that is about to be made."""
    cells = tuple(
        ManifestCell(
            cell.number,
            cell.name,
            settings=dict(cell.grid.settings),
            derived=dict(cell.derived),
            card_hash=cell.card.digest,
        )
        for cell in plan.cells
    )
    request = plan.request
    return SweepManifest(
        1,
        request.name,
        user=user_name(),
        created=now(),
        card=str(card),
        rule=request.rule,
        equal_samples=request.equal_samples,
        at_once=at_once,
        cells=cells,
    )


def require_free(plan: SweepPlan) -> None:
    """Refuse a folder in which something is already. Nothing is made. Raises SweepError, OSError."""
    folder = plan.request.folder
    try:
        found = read_manifest(folder)
    except SweepError as error:
        raise SweepError(f"{error}; choose another --directory", 1) from None
    if found is not None:
        if found.user != user_name():
            raise SweepError(
                f"{folder} is sweep {found.name} of {found.user}; choose another --directory", 1
            )
        if {cell.card_hash for cell in found.cells} == {cell.card.digest for cell in plan.cells}:
            raise SweepError(
                f"{folder} is this very sweep; `tr11 sweep resume {folder}` takes up what is not done",
                1,
            )
        raise SweepError(
            f"{folder} is another sweep, {found.name}, of other cells; choose another --directory",
            1,
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise SweepError(f"{folder} is not a folder; choose another --directory", 1)
    if folder.is_dir() and any(folder.iterdir()):
        raise SweepError(f"{folder} is not empty, and no sweep; choose another --directory", 1)


def create(plan: SweepPlan, manifest: SweepManifest, texts: Mapping[str, str]) -> None:
    """Make the folder, the manifest, and each cell's card (`texts`, by name). Raises SweepError
    where another was faster, OSError as the file system does.
    """
    folder = plan.request.folder
    make_shared(folder / "arrays")

    def made(known: SweepManifest | None) -> SweepManifest | None:
        if known is not None:
            return None
        return manifest

    if _file(folder).commit(partial(_newest, folder), made, _text) is None:
        raise SweepError(
            f"{folder} has just become a sweep, by someone else; look with `tr11 sweep status {folder}`",
            1,
        )
    for name, text in texts.items():
        write_atomically(folder / name / CARD, text)


def add_array(folder: Path, array: SweepArray) -> SweepManifest:
    """Put an array on record. Raises OSError, SweepError where the manifest cannot be read."""

    def changed(known: SweepManifest | None) -> SweepManifest:
        if known is None:
            known = require_manifest(folder)
        return replace(known, arrays=(*known.arrays, array))

    done = _file(folder).commit(partial(_newest, folder), changed, _text)
    assert done is not None and done[1] is not None  # `changed` always makes one
    return replace(done[1], version=done[0])


def _newest(folder: Path) -> tuple[int, SweepManifest | None]:
    known = read_manifest(folder)
    if known is None:
        return 0, None
    return known.version, known


def require_manifest(folder: Path) -> SweepManifest:
    """The manifest of a study that must be there. Raises SweepError, OSError."""
    found = read_manifest(folder)
    if found is None:
        raise SweepError(f"{folder} is no sweep: there is no {FILE}; name its folder")
    return found


def read_manifest(folder: Path) -> SweepManifest | None:
    """The newest version, None where there is none. Raises SweepError when it is damaged, OSError."""
    if folder.is_dir():
        numbers = _file(folder).numbers()
    else:
        numbers = []
    problem = ""
    for path in (*(_file(folder).file(number) for number in reversed(numbers)), folder / FILE):
        try:
            value = read_json(path)
            if value is not None:
                return _manifest(value)
        except NotADirectoryError:
            return None
        except (ValueError, KeyError) as error:
            problem = (
                problem or f"{path} is not the manifest of a sweep: {' '.join(str(error).split())}"
            )
    if problem:
        raise SweepError(problem, 1)
    return None


def _manifest(value: JsonObject) -> SweepManifest:
    if value["schema"] != SCHEMA:
        raise ValueError(f"its schema is {value['schema']!r}, this tr11 knows {SCHEMA}")
    return record_of(SweepManifest, value)


def _file(folder: Path) -> VersionedFile:
    return VersionedFile(folder / FILE, VERSIONS_KEPT)


def _text(number: int, manifest: SweepManifest | None) -> str:
    assert manifest is not None  # nothing is written where there is none
    value = document(replace(manifest, version=number))
    return json.dumps({"schema": SCHEMA, **value}, indent=1) + "\n"


# Which study a word on a command line means: a folder, or the name that a study has.

MOST_SHOWN = 5


def find_study(word: Path, places: Iterable[Path]) -> Path:
    """The folder of the study that is meant: `word` itself where it is a folder, else the one in
    `places` of that name.

    Raises SweepError where none or several have it, OSError.
    """
    if word.is_dir():
        return word.absolute()
    found = list(studies_in(places))
    named = [folder for folder, manifest in found if manifest.name == str(word)]
    if len(named) == 1:
        return named[0]
    if named:
        shown = first_few(named, MOST_SHOWN)
        raise SweepError(f"{word}: {len(named)} studies have this name: name a folder, {shown}")
    known = first_few((f"{one.name} ({folder})" for folder, one in found), MOST_SHOWN)
    if found:
        there = f"here are: {known}"
    else:
        there = f"name a folder that holds a {FILE}"
    raise SweepError(f"{word}: is neither a folder nor the name of a study; {there}")


def studies_in(places: Iterable[Path]) -> Iterator[tuple[Path, SweepManifest]]:
    """The studies right in some folders, each once. One whose manifest is damaged is found by its
    folder alone.
    """
    for place in dict.fromkeys(place.resolve() for place in places):
        for path in sorted(place.glob(f"*/{FILE}")):
            try:
                manifest = read_manifest(path.parent)
            except SweepError:
                continue
            if manifest is not None:
                yield path.parent, manifest
