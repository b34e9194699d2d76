"""The run's data sets and its tokenizer as things to copy: what a training cannot be repeated or
gone on with without.

    ARCHIVE/data/VARIANT/NAME/...            the files of one data set (NAME.bin, NAME.idx), of the tokenizer, of a list
    ARCHIVE/data/VARIANT/NAME.copy.json      its receipt; files that were changed since are copied beside it

No manifest says what they shall be: names, sizes and times tell one state of them from another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from tr11ops.backup.base import Archive, is_unfinished
from tr11ops.backup.source import CopySource, SourceFile
from tr11ops.backup.survey import list_receipts
from tr11ops.base.errors import CopyError
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.rundir.copies import FOLDERS, CopyRecord, Receipt, digest_of_lines, identity_of_files
from tr11ops.rundir.datasets import prefixes_of
from trainer.contract.files import now
from trainer.contract.record import Record

SUFFIXES = (".bin", ".idx")


class DataUnit(Record):
    """One data set, the tokenizer, or a list of data sets: `files` below `folder`."""

    name: str
    folder: Path
    files: tuple[str, ...]

    def base(self, variant: str) -> str:
        """Where its copy lies."""
        return f"{FOLDERS['data']}/{variant}/{self.name}"


class DataState(Record):
    """How one of them stands at one archive. `why`: of a fault, what it is."""

    unit: DataUnit
    state: Literal["copied", "due", "damaged", "fault"]
    bytes: int = 0
    why: str = ""


def units_of(card: RunCard) -> tuple[DataUnit, ...]:
    """Everything that the card names and that is here or should be; a tokenizer on the hub is not."""
    if not card.backup.data or not isinstance(card, OwnCard):
        return ()
    units = [
        DataUnit(name, prefix.parent, tuple(f"{prefix.name}{suffix}" for suffix in SUFFIXES))
        for name, prefix in _named(prefixes_of(card.data))
    ]
    lists = (card.data.train_groups_file, card.data.valid_groups_file, card.data.test_groups_file)
    singles = [card.tokenizer.vocabulary_file, card.tokenizer.merges_file, *lists]
    units += [
        DataUnit(f"file-{name}", path.parent, (path.name,))
        for name, path in _named(filter(None, singles))
    ]
    folder = None
    if card.tokenizer.path:
        folder = Path(card.tokenizer.path).expanduser().absolute()
    if folder is not None and folder.is_dir():
        files = sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_file() and not entry.name.startswith(".")
        )
        units.append(DataUnit("tokenizer", folder, tuple(files)))
    elif folder is not None and folder.is_file():
        units.append(DataUnit("tokenizer", folder.parent, (folder.name,)))
    return tuple(units)


def _named(texts: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Each path once, with its name; where several have one name, with a digest of the path
    besides.
    """
    paths = [Path(text).expanduser().absolute() for text in dict.fromkeys(texts)]
    counts = Counter(path.name for path in paths)
    for path in paths:
        yield (
            path.name
            if counts[path.name] == 1
            else f"{path.name}-{digest_of_lines([str(path)])[:8]}",
            path,
        )


def read_unit(unit: DataUnit) -> CopySource:
    """What a copy of it holds. Raises CopyError when a file is not there or has an odd name."""
    files = []
    for name in unit.files:
        path = unit.folder / name
        if not name.isprintable() or is_unfinished(name) or "\\" in name:
            raise CopyError(
                f"{unit.folder} holds {name!a}, a name that no archive takes; give it another name"
            )
        try:
            if not path.is_file():
                raise CopyError(f"{path} is not a file")
            files.append(SourceFile(name, path.stat().st_size, None))
        except OSError as error:
            raise CopyError(f"{path}: {error.strerror or error}") from None
    if not files:
        raise CopyError(f"{unit.folder} holds no file of {unit.name}")
    return CopySource(
        unit.folder,
        0,
        identity=identity_of_files(unit.folder, unit.files),
        files=tuple(files),
        manifest=None,
        created=now(),
        members=unit.files,
    )


def state_of(unit: DataUnit, copies: Iterable[CopyRecord], archive: str, variant: str) -> DataState:
    """How it stands at an archive, by what is on record."""
    try:
        source = read_unit(unit)
    except CopyError as error:
        return DataState(unit, "fault", why=str(error))
    made = [copy for copy in copies if copy.archive == archive and is_copy_of(copy, unit, variant)]
    same = [copy for copy in made if copy.identity == source.identity]
    if any(copy.is_whole for copy in same):
        return DataState(unit, "copied", source.bytes)
    return DataState(unit, "damaged" if same else "due", source.bytes)


def is_copy_of(copy: CopyRecord, unit: DataUnit, variant: str) -> bool:
    """Whether a copy is of this one, as it is now or was."""
    base = unit.base(variant)
    return copy.kind == "data" and copy.location in (base, f"{base}.{copy.identity[:8]}")


def data_states(card: RunCard, copies: Iterable[CopyRecord], archive: str) -> tuple[DataState, ...]:
    """All of the card's at one archive; none where the card does not ask for them. Raises OSError."""
    listed = list(copies)
    return tuple(state_of(unit, listed, archive, card.run.variant) for unit in units_of(card))


def newest_copies(archive: Archive, variant: str) -> dict[str, Receipt]:
    """The newest copy of each data set that an archive has, by its name. Raises ArchiveError."""
    found: dict[str, Receipt] = {}
    for receipt in sorted(
        list_receipts(archive, variant, ("data",)), key=lambda receipt: receipt.copied
    ):
        found[receipt.location.rpartition("/")[2].removesuffix(f".{receipt.identity[:8]}")] = (
            receipt
        )
    return found
