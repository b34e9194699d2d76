"""Sections of the run card for what runs in containers: under Slurm, and on Kubernetes."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.card import Section

Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9/][A-Za-z0-9._:/@#+-]{0,400}$")]
Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/@+-]{0,400}$")]
Mount = Annotated[
    str, Field(pattern=r"^/[A-Za-z0-9._/@+-]*(:/[A-Za-z0-9._/@+-]*(:(ro|rw))?)?$", max_length=1000)
]


class ContainerSection(Section):
    """[slurm.container]: the image that node agents and workers run in; the batch script and its
    agent stay outside.
    """

    image: Image = Field(
        description="path of an image (.sif, .sqsh), or its address: docker://..., nvcr.io#nvidia/..."
    )
    runtime: Literal["pyxis", "apptainer"] = Field(
        description="what runs it: Slurm's plug-in Pyxis, or Apptainer"
    )
    mounts: list[Mount] = Field(
        default=[],
        description="folders of the node that are seen inside: HOST or HOST:INSIDE or HOST:INSIDE:ro",
    )
    python: str = Field(
        default="python3",
        pattern=r"^[A-Za-z0-9._/+-]{1,400}$",
        description="the image's Python that has tr11",
    )


class KubernetesSection(Section):
    """[kubernetes]: what `tr11 launch --scheduler kubernetes` needs beyond the rest of the card."""

    image: Image = Field(
        description="container image with tr11, as container/Containerfile makes it"
    )
    volume_claim: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="PersistentVolumeClaim that all pods may write to (ReadWriteMany)",
    )
    mount: Folder = Field(
        description="where the pods see it; run directory, data and tokenizer lie below"
    )
    namespace: str = Field(
        default="default",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="where the Job is made",
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9.-]{1,200}/[A-Za-z0-9._-]{1,60}$",
        description="name of a GPU there",
    )
