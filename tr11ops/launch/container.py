"""Whether the card's container can run where the card is launched: image, runtime, mounts. Facts,
then pure checks.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import counted
from tr11ops.dialects.image import sides
from tr11ops.runcard.card import ForeignCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

ASK_SECONDS = 30.0
_PYXIS = "--container-image"


class ContainerFacts(Record):
    """What is seen from here. `image_is_there` is None for an address, which only the runtime can
    try.
    """

    image_is_there: bool | None
    has_runtime: Observed[bool]
    missing_mounts: tuple[str, ...] = ()


def look_at_container(card: RunCard) -> ContainerFacts | None:
    """Look at the card's container from here; None where it has none. Runs `srun --help` for Pyxis."""
    section = card.slurm.container
    if section is None:
        return None
    image = None
    if is_path(section.image):
        image = Path(section.image)
    missing = tuple(host for host, _ in mounts_of(section.mounts) if not Path(host).exists())
    return ContainerFacts(
        None if image is None else image.exists(), _runtime(section.runtime), missing
    )


def is_path(image: str) -> bool:
    """A file, not an address of a registry."""
    return image.startswith("/")


def mounts_of(mounts: list[str]) -> Iterator[tuple[str, str]]:
    """(folder of the node, its place inside) of each mount."""
    yield from map(sides, mounts)


def _runtime(name: str) -> Observed[bool]:
    if name == "apptainer":
        return shutil.which("apptainer") is not None
    try:
        shown = subprocess.run(
            ["srun", "--help"], capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Unknown(f"srun --help does not answer: {error}")
    return _PYXIS in shown.stdout + shown.stderr


def container_checks(
    card: RunCard, directory: RunDirectory, facts: ContainerFacts | None, scheduler: str
) -> Iterator[PreflightCheck]:
    """All of them. A job's nodes may have what this machine lacks; what is in the shared folders
    they see as we do.
    """
    section = card.slurm.container
    if section is None or facts is None:
        return
    key = "slurm.container"
    is_apptainers = isinstance(card, ForeignCard) and section.runtime == "apptainer"
    if scheduler != "slurm" and not is_apptainers:
        rule = "runs the workers of Slurm's jobs, and this is none"
        yield refused(
            key,
            rule,
            "leave it out here (--set slurm.container=none), or start tr11 inside the image",
            2,
        )
        return
    faults = list(_faults(card, directory, facts))
    yield from faults
    if isinstance(facts.has_runtime, Unknown):
        yield warning(
            f"{key}.runtime", f"{section.runtime} could not be looked for ({facts.has_runtime.why})"
        )
    elif not facts.has_runtime:
        lacking = (
            "srun knows no --container-image"
            if section.runtime == "pyxis"
            else "apptainer is not found"
        )
        yield warning(
            f"{key}.runtime", f"here {lacking}; a node without it ends every launch", "ask the site"
        )
    elif not faults:
        seen = "is there" if facts.image_is_there else "is an address, which the nodes must reach"
        yield ok(
            "container",
            f"{section.image} {seen}; {section.runtime}, {counted(len(section.mounts), 'mount')}",
        )


def _faults(
    card: RunCard, directory: RunDirectory, facts: ContainerFacts
) -> Iterator[PreflightCheck]:
    section = card.slurm.container
    assert section is not None
    if not is_path(section.image) and section.image.endswith((".sif", ".sqsh")):
        yield refused(
            "slurm.container.image", f"{section.image} is a file", "name it in full, from / on", 2
        )
    if facts.image_is_there is False:
        yield refused(
            "slurm.container.image",
            f"{section.image} is not there",
            "build it, or correct the path",
        )
    for host in facts.missing_mounts:
        yield refused(
            "slurm.container.mounts", f"{host} is not there", "make it, or correct the mount"
        )
    if isinstance(card, ForeignCard):  # its workers see the run directory without being told to
        return
    root = PurePosixPath(directory.root)
    same = [PurePosixPath(host) for host, inside in mounts_of(section.mounts) if host == inside]
    if not any(root.is_relative_to(place) for place in same):
        rule = f"the run directory {root} is in none of them under its own name: the workers could save nothing"
        yield refused("slurm.container.mounts", rule, f'add "{root.parent}"', 2)
