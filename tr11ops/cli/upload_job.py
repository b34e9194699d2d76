"""What `tr11 upload` is asked to do: the checkpoint, the model's repository, the export. Nothing is done yet."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.errors import Refusal
from tr11ops.cli.checkpoints import resolve_step
from tr11ops.cli.common import directory_of
from tr11ops.hub.address import endpoint_of
from tr11ops.hub.base import DEFAULT_BRANCH, Repository
from tr11ops.hub.upload import Work
from tr11ops.runcard.copies import REPOSITORY
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.tokenizer import tokenizer_place, workers_environment
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.manifest import Manifest
from trainer.contract.record import Record
from trainer.schedule.flops import count_parameters

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

BYTES_OF = {"bf16": 2, "fp16": 2, "fp32": 4}


class UploadJob(Record):
    """One upload, before anything is done."""

    card: RunCard
    place: Path
    manifest: Manifest
    dtype: str
    repository: Repository
    private: bool
    is_visibility_asked: bool  # on the command line, so that a repository of the other kind is not what is meant
    message: str
    work: Work
    tokenizer: Path | None
    bytes: int  # of the tensors

    @property
    def address(self) -> str:
        branch = self.repository.branch
        place = f"{endpoint_of(self.card.hub.endpoint, os.environ)}/{self.repository.name}"
        return place if branch == "main" else f"{place}/tree/{branch}"


def job_of(
    card: RunCard,
    step: str,
    to: str | None,
    dtype: str | None,
    revision: str | None,
    branch_per_step: bool,
    public: bool | None,
    message: str | None,
    tokenizer: Path | None,
    work: Path | None,
) -> UploadJob:
    """The job that the command line means. Raises Refusal."""
    name = _repository_name(to or card.hub.model_repository)
    place = resolve_step(card, step)
    manifest = _manifest(place)
    _check_model(card, manifest)
    branch = checkpoint_name(manifest.step) if branch_per_step else _branch(revision or DEFAULT_BRANCH)
    kind = dtype or card.precision.dtype
    folder = directory_of(card).paths.state / "upload" if work is None else work.expanduser().absolute()
    name_of_work = f"{checkpoint_name(manifest.step)}-{identity_of(place)[:8]}-{kind}"
    parameters = count_parameters(card.model, card.tokenizer.padded_vocabulary_size).total
    return UploadJob(
        card=card,
        place=place,
        manifest=manifest,
        dtype=kind,
        repository=Repository(name, branch=branch),
        private=card.hub.private if public is None else not public,
        is_visibility_asked=public is not None,
        message=message or f"{card.run.name} {card.paths.variant}: step {manifest.step}",
        work=Work(folder / name_of_work, export_options(card, tokenizer)),
        tokenizer=tokenizer,
        bytes=parameters * BYTES_OF[kind],
    )


def export_options(card: RunCard, tokenizer: Path | None) -> str:
    """A name for what an export takes from the card and the command line: an earlier one of others is not reused."""
    named = tokenizer or tokenizer_place(card, workers_environment(card, os.environ))
    source = None if named is None or not named.expanduser().exists() else str(named.expanduser().absolute())
    tokens = card.tokenizer.model_dump(exclude={"path"})
    taken = json.dumps([card.model.model_dump(), tokens, source], sort_keys=True, default=str)
    return hashlib.sha256(taken.encode()).hexdigest()[:16]


def _repository_name(name: str | None) -> str:
    if name is None:
        raise Refusal("nothing says where to: give --to OWNER/NAME, or set hub.model_repository", exit_code=2)
    if re.fullmatch(REPOSITORY, name) is None:
        raise Refusal("--to: is not a repository's name; write OWNER/NAME", exit_code=2)  # an address may hold a token
    return name


def _branch(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) is None or ".." in name or name.endswith((".", ".lock")):
        raise Refusal(f"--revision {name!r}: is not a branch's name; use letters, digits, dots and dashes", exit_code=2)
    return name


def _manifest(place: Path) -> Manifest:
    try:
        manifest = Manifest.read(place)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if manifest is None:
        raise Refusal(f"{place} is not complete (it has no manifest), and half a model is not published")
    return manifest


def _check_model(card: RunCard, manifest: Manifest) -> None:
    """The card must be the checkpoint's, or what is published about the model is wrong. Raises Refusal."""
    for key, value in manifest.model.items():
        section, _, name = key.partition(".")
        said = getattr(getattr(card, section, None), name, value)
        if said is not None and said != value and key != "precision.dtype":
            raise Refusal(f"{key} is {value} in the checkpoint and {said} in the card: this is not the card it is of")
