"""Which study a word on a command line means: a folder, or the name that a study has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tr11ops.base.errors import SweepError
from tr11ops.sweep.manifest import FILE, SweepManifest, read_manifest

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
        raise SweepError(
            f"{word}: {len(named)} studies have this name: name a folder, {_listed(named)}"
        )
    known = _listed(f"{manifest.name} ({folder})" for folder, manifest in found)
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


def _listed(names: Iterable[object]) -> str:
    words = [str(name) for name in names]
    more = ""
    if len(words) > MOST_SHOWN:
        more = f" and {len(words) - MOST_SHOWN} more"
    return ", ".join(words[:MOST_SHOWN]) + more
