"""The container that a script's training runs in, and what its paths are on the node."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.dialects.image import TrainerImage
from tr11ops.importer.options import Builder, LeftReason, only_a_person_knows
from tr11ops.importer.sbatch import Directive
from tr11ops.importer.traced import Traced
from tr11ops.importer.training_command import (
    ContainerUse,
    LauncherOption,
    TrainingCommand,
    cut_at_commas,
)

KEY = "slurm.container.image"
# options of a runtime that a launch gives itself, or that would keep the ranks' variables out
_GIVEN = frozenset(
    {
        *("container_image", "container_mounts", "container_workdir", "container_name"),
        *("no_container_entrypoint", "container_entrypoint"),
        *("B", "bind", "nv", "pwd", "cwd", "W"),
    }
)
_CLEARED = frozenset(["e", "cleanenv", "c", "contain", "C", "containall"])
_KEPT = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9._/:,@+=-]*)?")


def container_of(
    builder: Builder, training: TrainingCommand, directives: Sequence[Directive]
) -> ContainerUse | None:
    """The command's own, or that of `#SBATCH` lines for Pyxis."""
    if training.image is not None:
        return training.image
    asked = {item.name: item for item in directives if item.read}
    if "container-image" not in asked:
        return None
    item = asked["container-image"]
    options = []
    for name in sorted(asked):
        if name.startswith(("container-", "no-container-")):
            builder.forget(f"#SBATCH --{name}")
            given = asked[name]
            word = Traced.of(f"--{name}={given.value}" if given.value else f"--{name}", given.line)
            value = Traced.of(given.value, given.line)
            options.append(LauncherOption(name.replace("-", "_"), (word,), value))
    mounts: tuple[Traced, ...] = ()
    if "container-mounts" in asked:
        given = asked["container-mounts"]
        mounts = cut_at_commas(Traced.of(given.value, given.line))
    return ContainerUse("pyxis", Traced.of(item.value, item.line), mounts, tuple(options))


def known_mounts(container: ContainerUse | None) -> list[str]:
    """Those whose folders are known here."""
    if container is None:
        return []
    return [one.text for one in container.mounts if one.is_known and one.text.startswith("/")]


def on_the_node(container: ContainerUse | None, path: str) -> str:
    """A path of the image as the node has it; the same where no mount says it."""
    turned = []
    for mount in known_mounts(container):
        host, inside, *_ = (*mount.split(":"), "")
        turned.append(f"{inside or host}:{host}")
    return TrainerImage("", "apptainer", mounts=tuple(turned)).inside(path)


def place_container(builder: Builder, container: ContainerUse | None) -> None:
    """Place `[slurm.container]`, and tell of what does not come along."""
    if container is None:
        return
    image = container.image
    line = container.image.line
    for unknown in only_a_person_knows([image, *container.mounts]), *image.unknowns:
        if unknown:
            why = f"{unknown[:60]} is not known here: give --set {KEY}=..."
            builder.ask("container", image.for_shell(), line=line, why=why, key=KEY)
            return
    runtime = container.runtime
    name = image.text
    if runtime == "docker":
        why = "it is no child of the job, which could not end it: Apptainer takes its place; does the image work so?"
        builder.ask("docker run", name, line=line, why=why, key="slurm.container.runtime")
        runtime = "apptainer"
        name = f"docker://{name}"
    elif runtime == "pyxis":
        name = name.removeprefix("docker://")
    builder.put(KEY, name, "the container", line)
    builder.put("slurm.container.runtime", runtime, "the container", line)
    known = known_mounts(container)
    if known:
        builder.put("slurm.container.mounts", known, "the container", line)
    for mount in container.mounts:
        if mount.text not in known:
            why = "is no folder of the nodes that is known here: add it to slurm.container.mounts"
            builder.ask("mount", mount.for_shell(), line=mount.line or line, why=why)
    _place_options(builder, container)


def _place_options(builder: Builder, container: ContainerUse) -> None:
    kept = []
    for option in container.options:
        text = " ".join(word.text for word in option.words)
        if option.value is not None and len(option.words) == 2:
            text = f"{option.spelled}={option.value.text}"
        is_pyxis = container.runtime == "pyxis"
        if option.name in _GIVEN or (is_pyxis and "container" not in option.name):
            continue
        if option.name in _CLEARED:
            why = "the ranks would not get their variables then"
            builder.leave(option.spelled, "", line=option.line, reason=LeftReason.DROPPED, why=why)
        elif container.runtime == "docker":
            why = "is docker's: whether Apptainer needs it is not known"
            builder.leave(text, "", line=option.line, reason=LeftReason.UNKNOWN, why=why)
        elif _KEPT.fullmatch(text) and all(word.is_known for word in option.words):
            kept.append(text)
        else:
            why = "add it to slurm.container.options"
            builder.ask(text, "", line=option.line, why=why)
    if kept:
        line = container.image.line
        builder.put("slurm.container.options", kept, "the container", line)
