"""What the runs of a site tell each other of nodes: a folder with one list for each run, by its id.

    FOLDER/RUN-ID.json    FOLDER/RUN-ID.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)

Each run writes its own list alone, a copy of state/exclusions.json, so that runs never wait for
each other; the machines of one run that write at once lose nothing, since each copies the newest
version of the run's own list. Another run's word is an attribution and no proof: it never excludes
by itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from tr11ops.base.observed import cause
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, SCHEMA, ledger_text, read_version
from tr11ops.rundir.identity import run_id
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

VERSIONS_KEPT = 16
_LIST = re.compile(r"[0-9a-f]{32}\.json")


class SharedWord(Record):
    """What other runs have on record of nodes. `faults`: lists that could not be read, so that they
    are unknown.
    """

    entries: tuple[Exclusion, ...] = ()
    faults: tuple[str, ...] = ()

    def of(self, node: str) -> tuple[Exclusion, ...]:
        """A word for each other run that has one of this node."""
        return tuple(entry for entry in self.entries if entry.node == node)


def read_shared(folder: str | None, directory: RunDirectory) -> SharedWord:
    """What tr11 found out in the other runs that share this folder; nothing where it is None. Never
    raises.

    What a person excluded is that person's reason and no attribution.
    """
    if folder is None:
        return SharedWord()
    try:
        own = run_id(directory)
        paths = sorted(path for path in Path(folder).iterdir() if _LIST.fullmatch(path.name))
    except (OSError, ValueError) as error:
        return SharedWord(
            faults=(f"what other runs know of nodes is unknown: {folder}: {cause(error)}",)
        )
    entries: list[Exclusion] = []
    faults: list[str] = []
    for path in paths:
        if path.stem == own:
            continue
        try:
            entries += _entries(path)
        except (OSError, ValueError) as error:
            faults.append(f"what another run knows of nodes is unknown: {path}: {cause(error)}")
    return SharedWord(tuple(entries), tuple(faults))


def publish(folder: str | None, directory: RunDirectory) -> str:
    """Let the other runs know what this one has on record of nodes; why they could not be told, ""
    where they were.
    """
    if folder is None:
        return ""
    try:
        own = run_id(directory)
        if not own:
            return ""  # not launched yet: nothing is on record
        shared = VersionedFile(Path(folder) / f"{own}.json", VERSIONS_KEPT)

        def following() -> tuple[int, str, str] | None:
            # before the run's list is read: who comes in between has read no newer one
            taken = shared.numbers()
            text = ledger_text(read_version(directory.exclusions))
            if taken and shared.file(taken[-1]).read_text(encoding="utf-8") == text:
                return None
            return max(taken, default=0) + 1, text, text

        def newest() -> tuple[int, str]:
            number = shared.numbers()[-1]
            return number, shared.file(number).read_text(encoding="utf-8")

        shared.commit(following, newest)
    except (OSError, ValueError) as error:
        return f"other runs cannot be told of nodes: {folder}: {cause(error)}"
    return ""


def _entries(path: Path) -> list[Exclusion]:
    """Raises OSError, ValueError for what is no list, or another schema's."""
    value = read_json(path)
    schema = None
    if value is not None:
        schema = value.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}, this tr11 reads {SCHEMA}")
    version = read_version(path)
    return [
        entry
        for entry in (*version.exclusions, *version.suspects)
        if entry.owner == AUTOMATIC_OWNER
    ]
