"""The image that a foreign trainer's workers run in. Node agent and keeper stay on the host, and need
nothing in the image; its Python is the trainer's own. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from trainer.contract.record import Record

MARK = "TR11_KEEPER"
"""A variable of all that a keeper starts: job, node and launch. Under Pyxis the processes are no
children of it.
"""
# Pyxis has a task of its own for them
_STEP = (
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--cpu-bind=none",
    "--export=ALL",
)


class TrainerImage(Record):
    """`[slurm.container]` of a card whose trainer is not tr11's own. `mounts`: HOST, HOST:INSIDE or
    HOST:INSIDE:ro; `options`: words of the runtime's own.
    """

    image: str
    runtime: Literal["pyxis", "apptainer"]
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    uses_gpus: bool = False

    def inside(self, path: str) -> str:
        """Where a path of the host is seen in the image; the same where no mount holds it."""
        found = self._place(path)
        if found is None:
            return path
        return found

    def holds(self, path: str) -> bool:
        """Whether a mount holds this path of the host."""
        return self._place(path) is not None

    def with_folders(self, folders: Iterable[str]) -> TrainerImage:
        """With these folders of the host under their own names, where no mount holds them yet."""
        mounts = list(self.mounts)
        for folder in dict.fromkeys(folders):
            if not _image_of(self, mounts).holds(folder):
                mounts.append(folder)
        return _image_of(self, mounts)

    def _place(self, path: str) -> str | None:
        best: tuple[int, str] | None = None
        for host, inside in map(sides, self.mounts):
            is_below = path == host or path.startswith(f"{host.rstrip('/')}/")
            if is_below and (best is None or len(host) > best[0]):
                rest = path[len(host.rstrip("/")) :]
                best = len(host), f"{inside.rstrip('/')}{rest}" or "/"
        if best is None:
            return None
        return best[1]


def image_of(slurm: Mapping[str, Any]) -> TrainerImage | None:
    """The image that `[slurm]` of a card tells of; None where it has none."""
    section = slurm.get("container")
    if not section:
        return None
    return TrainerImage(
        section["image"],
        section["runtime"],
        mounts=tuple(section.get("mounts") or ()),
        options=tuple(section.get("options") or ()),
        uses_gpus=bool(slurm.get("gpus_per_node")),
    )


def sides(mount: str) -> tuple[str, str]:
    """A mount's folder of the node, and its place inside."""
    host, _, rest = mount.partition(":")
    return host, rest.partition(":")[0] or host


def runtime_words(image: TrainerImage) -> tuple[str, ...]:
    """What the runtime is told of image and mounts: words of srun for Pyxis, or all that stands before
    a command that Apptainer runs.
    """
    if image.runtime == "pyxis":
        mounts: tuple[str, ...] = ()
        if image.mounts:
            both = [mount if ":" in mount else f"{mount}:{mount}" for mount in image.mounts]
            mounts = (f"--container-mounts={','.join(both)}",)
        # The image's own entry point would stand before the command, and hear the signals in its place.
        own = (f"--container-image={image.image}", *mounts, "--no-container-entrypoint")
        return (*own, *image.options)
    binds = [word for mount in image.mounts for word in ("--bind", mount)]
    gpus: tuple[str, ...] = ()
    if image.uses_gpus:
        gpus = ("--nv",)
    return ("apptainer", "exec", *gpus, *binds, *image.options, image.image)


def words_in(
    image: TrainerImage, words: Iterable[str], directory: str, node: str, unset: Iterable[str]
) -> tuple[str, ...]:
    """A command as it runs in the image on a node, in a directory of the image. `unset`: variables that
    Slurm would set anew for a step.
    """
    if image.runtime == "pyxis":
        slurms = [word for name in unset if name.startswith("SLURM_") for word in ("-u", name)]
        cleared = ("env", *slurms) if slurms else ()
        place = (f"--container-workdir={directory}",)
        return (
            "srun",
            *_STEP,
            f"--nodelist={node}",
            *runtime_words(image),
            *place,
            *cleared,
            *words,
        )
    *before, name = runtime_words(image)
    return (*before, "--pwd", directory, name, *words)


def _image_of(image: TrainerImage, mounts: Iterable[str]) -> TrainerImage:
    return TrainerImage(
        image.image,
        image.runtime,
        mounts=tuple(mounts),
        options=image.options,
        uses_gpus=image.uses_gpus,
    )
