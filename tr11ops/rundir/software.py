"""Which software an attempt ran with, as its record (`attempt.json`) says it: versions, and the
code's own identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr11ops.base.units import counted
from trainer.contract.documents import record_of
from trainer.contract.record import Record

PATCH_FILE = "code.diff"  # in the attempt's folder
DECISIVE = ("tr11", "torch", "deepspeed", "cuda", "nccl", "driver")
SHORT = 10  # digits of a commit that are shown


class CodeIdentity(Record):
    """The checkout that the trainer's code lay in. `commit` is "" where it is not known, and `why`
    says why.

    `branch` is "" where none is checked out. `changed`: the first of `changed_count` files that
    were not as in the commit; `digest`: SHA-256 of all that differs, as far as it was read;
    `patch`: the file beside the record that holds it, "" where nothing differs, without secrets;
    `is_cut`: it holds not all of it.
    """

    folder: str = ""
    commit: str = ""
    branch: str = ""
    changed: tuple[str, ...] = ()
    changed_count: int = 0
    digest: str = ""
    patch: str = ""
    is_cut: bool = False
    why: str = ""

    def __str__(self) -> str:
        """In one line; two codes have the same one where nothing is known to differ."""
        if not self.commit:
            return f"not known: {self.why}"
        text = " ".join(filter(None, (self.branch, self.commit[:SHORT])))
        if not self.changed_count:
            return text
        return f"{text} with {counted(self.changed_count, 'changed file')} ({self.digest[:8]})"


def code_of(record: Mapping[str, Any]) -> CodeIdentity | None:
    """What an attempt's record says of its code; None where an older tr11 wrote it, or where that
    is not readable.
    """
    value = record.get("code")
    if not isinstance(value, Mapping):
        return None
    try:
        return record_of(CodeIdentity, value)
    except ValueError:
        return None


def version_words(versions: Mapping[str, str]) -> str:
    """The versions that decide what a training computes, in one line; what is not there is left
    out.
    """
    return ", ".join(
        f"{name} {versions[name]}" for name in DECISIVE if versions.get(name, "none") != "none"
    )


def versions_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The versions of what an attempt ran with, by name, Python's too; what was not recorded is
    left out.
    """
    found = record.get("versions")
    if isinstance(found, Mapping):
        versions = {str(name): str(version) for name, version in found.items()}
    else:
        versions = {}
    python = record.get("python")
    if python is not None:
        return {**versions, "python": str(python)}
    return versions
