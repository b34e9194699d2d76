"""What becomes of the folder that bears the name of a step which is saved again: a save deletes
nothing of worth.

    not this training's (of a newer tr11, of another model, weights alone, without a manifest, a link)
                                        becomes global_stepN.set-aside
    this training's, the same content   is deleted, once the new one has its name
    this training's, files lost or cut  is deleted, too: no training resumes from it
    this training's, another content    becomes global_stepN.superseded: its weights may be nowhere else

Another content is what a training leaves that went on from an older checkpoint: because a person
pointed `latest` there, or because a newer one could not be used for a while. What a roll-back gives
up never comes here: it was renamed to global_stepN.discarded before (see
`trainer.contract.recovery`). Standard library and the contract only.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from trainer.contract.checkpoint_formats import FOREIGN_FILE
from trainer.contract.checkpoint_names import (
    SET_ASIDE_SUFFIX,
    SUPERSEDED_SUFFIX,
    aside_name,
    checkpoint_name,
    hidden_name,
    set_apart,
)
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.resumable import (
    ResumeFault,
    ResumeNeed,
    lack_of,
    model_fault,
    read_whole,
    unnamed_files,
)

Report = Callable[[str], None]


def free_name(folder: Path, name: str) -> Path:
    """A path below `folder` where nothing lies yet: `name`, or `name-2`, `name-3`, ..."""
    number, path = 1, folder / name
    while os.path.lexists(path):
        number, path = number + 1, folder / f"{name}-{number + 1}"
    return path


def take_place(folder: Path, partial: Path, manifest: Manifest, report: Report) -> Path | None:
    """Give a fully written folder the name of its step; returns an older one of this training, for
    `retire`, if any.

    Anything else that bears the name is set aside under a visible name and stays. Raises OSError;
    the old folder then has its name.
    """
    home = folder / checkpoint_name(manifest.step)
    if not os.path.lexists(home):
        partial.rename(home)
        return None
    is_ours = is_replaceable(folder, manifest)
    if is_ours:
        # here it waits while the new one takes its place
        aside = folder / hidden_name(home.name, "replaced", uuid.uuid4().hex[:12])
    else:
        aside = free_name(folder, f"{home.name}{SET_ASIDE_SUFFIX}")
    home.rename(aside)
    try:
        partial.rename(home)
    except OSError:
        aside.rename(home)
        raise
    if is_ours:
        return aside
    report(
        f"tr11: WARNING: {home.name} was another checkpoint: it was not replaced, and is now {aside}"
    )
    return None


def is_replaceable(folder: Path, manifest: Manifest) -> bool:
    """Whether what lies below `folder` under the name of the manifest's step is a checkpoint of the
    same training.
    """
    if (folder / checkpoint_name(manifest.step)).is_symlink():
        return False
    old = read_whole(folder, manifest.step)
    if isinstance(old, ResumeFault) or old.is_rehearsed != manifest.is_rehearsed:
        return False
    if (old.foreign is None) != (manifest.foreign is None):
        return False
    same_parts = (lack_of(old, ResumeNeed()) is None) == (lack_of(manifest, ResumeNeed()) is None)
    return same_parts and model_fault(old.model, manifest.model) is None


def retire(folder: Path, aside: Path, report: Report) -> str:
    """End a replacement: delete the old folder, or keep it as superseded and `report` that; returns
    what was done.

    Where neither can be done, nothing is: the next save or search tries again.
    """
    name = aside_name(aside.name)
    assert name is not None
    home = folder / name.home
    if is_dispensable(aside, home):
        shutil.rmtree(aside, ignore_errors=True)
        return f"removed {aside.name}, which {home.name} has replaced"
    kept = free_name(folder, f"{home.name}{SUPERSEDED_SUFFIX}")
    try:
        aside.rename(kept)
    except OSError as error:
        text = f"{aside} is superseded by {home.name}, and stays under this name: {error.strerror or error}"
    else:
        text = f"{home.name} was saved before with another content: that one is kept as {kept} (tr11 checkpoints list)"
    report(f"tr11: WARNING: {text}")
    return text


def is_dispensable(old: Path, new: Path) -> bool:
    """Whether nothing is lost with the folder `old` once `new` has its place; by what is there, not
    by a record of it.

    Both are checkpoints' own folders. Nothing goes that a person put there, nor what cannot be read
    at the moment. The same content: every file has a digest, and the same one in both manifests, or
    is a link to the very file that the new one has. What has no manifest had one when it was moved
    aside: its deletion was begun, and is gone on with.
    """
    try:
        before, after = Manifest.read(old), Manifest.read(new)
        sizes = _sizes(old)
    except (OSError, ValueError):
        return False
    if before is None:
        return True
    if after is None or manifest_faults(new, after, read_digests=False):
        return False
    if unnamed_files(before, sizes):
        return False
    is_broken = any(sizes.get(entry.path) != entry.bytes for entry in before.files)
    is_known = all(entry.digest for entry in before.files)
    if is_broken or (is_known and _content(before) == _content(after)):
        return True
    return _are_links(old, new, before)


def _are_links(old: Path, new: Path, manifest: Manifest) -> bool:
    """Whether each file of `old` is a link to the one of its name in `new`: a foreign trainer saved into
    the files of the save before.
    """
    try:
        return all(
            (old / one.path).samefile(new / one.path)
            for one in manifest.files
            if one.path != FOREIGN_FILE
        )
    except OSError:
        return False


def _content(manifest: Manifest) -> frozenset[tuple[str, int, str]]:
    return frozenset((entry.path, entry.bytes, entry.digest) for entry in manifest.files)


def _sizes(place: Path) -> dict[str, int]:
    """The size of every file below a folder, and of every link to a folder: only a person makes
    one. Raises OSError where one cannot be seen.
    """

    def fail(error: OSError) -> None:
        raise error

    found = {}
    for folder, folders, names in os.walk(place, onerror=fail):
        links = [path for path in (Path(folder, name) for name in folders) if path.is_symlink()]
        for path in (*links, *(Path(folder, name) for name in names)):
            found[path.relative_to(place).as_posix()] = path.stat().st_size
    return found


def settle_replaced(folder: Path, report: Report = lambda line: None) -> list[str]:
    """Finish or undo a replacement that was killed half-way; returns one line for each. Only for
    the run's trainer.

    A save over an existing step moves the old folder aside, the new one in, then retires the old.
    Killed between the first two, the step has no folder: the old one is moved back. `report`: see
    `retire`.
    """
    lines = []
    for aside, name in set_apart(folder, "replaced"):
        home = folder / name.home
        if os.path.lexists(home):
            lines.append(retire(folder, aside, report))
        else:
            aside.rename(home)
            lines.append(f"put {home.name} back: the save that was to replace it did not end")
    return lines
