"""`tr11 upload`: a checkpoint as a model on the hub, with a card that is written from the run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tr11ops import __version__
from tr11ops.base.errors import HubUnavailable, Refusal, Unobserved, WrongUsage
from tr11ops.base.installed import READING_CHECKPOINTS, require
from tr11ops.base.observed import cause
from tr11ops.base.units import size
from tr11ops.cli.checkpoints import Step, TokenizerOption
from tr11ops.cli.checkpoints_keep import resolve_step
from tr11ops.cli.common import directory_of, say
from tr11ops.cli.goodput import look_back
from tr11ops.cli.progress import ByteProgress, by_file
from tr11ops.cli.runner import DRY_RUN, JSON, SCHEDULER, YES, Change, Outcome, RunContext, carry_out
from tr11ops.cli.trainer_child import SHARD_SIZE, ask_checkpoint_module, card_file
from tr11ops.goodput.until_checkpoint import past_until
from tr11ops.hub.base import DEFAULT_BRANCH, Repository, endpoint_of, find_credentials, hub_retries
from tr11ops.hub.client import Hub
from tr11ops.hub.model_card import ModelFacts, TrainingHistory, model_card
from tr11ops.hub.upload import ROOM, Work, model_facts, overwritten, publish, read_losses
from tr11ops.runcard.card import OwnCard, RunCard, own_card
from tr11ops.runcard.watching import REPOSITORY
from tr11ops.rundir.claims import ClaimTaken, CopyLock
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.datasets import tokenizer_place, workers_environment
from tr11ops.rundir.journal import Journal
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.manifest import FileEntry, Manifest
from trainer.contract.record import JsonObject, Record
from trainer.schedule.flops import count_parameters

BYTES_OF = {"bf16": 2, "fp16": 2, "fp32": 4}
SCHEMA = 1
# an upload of hours is not given up for a hub that is unreachable for minutes
PATIENCE_SECONDS = 3600.0


# ----------------------------------------------------------------------------- job
class UploadJob(Record):
    """One upload, before anything is done."""

    card: OwnCard
    place: Path
    manifest: Manifest
    dtype: str
    repository: Repository
    private: bool
    # on the command line, so that a repository of the other kind is not what is meant
    is_visibility_asked: bool
    message: str
    work: Work
    tokenizer: Path | None
    bytes: int  # of the tensors

    @property
    def address(self) -> str:
        branch = self.repository.branch
        place = f"{endpoint_of(self.card.hub.endpoint, os.environ)}/{self.repository.name}"
        if branch == "main":
            return place
        return f"{place}/tree/{branch}"


def job_of(
    card: OwnCard,
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
    if branch_per_step:
        branch = checkpoint_name(manifest.step)
    else:
        branch = _branch(revision or DEFAULT_BRANCH)
    kind = dtype or card.precision.dtype
    if work is None:
        folder = directory_of(card).paths.state / "upload"
    else:
        folder = work.expanduser().absolute()
    name_of_work = f"{checkpoint_name(manifest.step)}-{identity_of(place)[:8]}-{kind}"
    parameters = count_parameters(card).total
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


def export_options(card: OwnCard, tokenizer: Path | None) -> str:
    """A name for what an export takes from the card and the command line: an earlier one of others
    is not reused.
    """
    named = tokenizer or tokenizer_place(card, workers_environment(card, os.environ))
    if named is None or not named.expanduser().exists():
        source = None
    else:
        source = str(named.expanduser().absolute())
    tokens = card.tokenizer.model_dump(exclude={"path"})
    taken = json.dumps([card.model.model_dump(), tokens, source], sort_keys=True, default=str)
    return hashlib.sha256(taken.encode()).hexdigest()[:16]


def _repository_name(name: str | None) -> str:
    if name is None:
        raise WrongUsage("nothing says where to: give --to OWNER/NAME, or set hub.model_repository")
    if re.fullmatch(REPOSITORY, name) is None:
        # an address may hold a token
        raise WrongUsage("--to: is not a repository's name; write OWNER/NAME")
    return name


def _branch(name: str) -> str:
    if (
        re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) is None
        or ".." in name
        or name.endswith((".", ".lock"))
    ):
        raise WrongUsage(
            f"--revision {name!r}: is not a branch's name; use letters, digits, dots and dashes",
        )
    return name


def _manifest(place: Path) -> Manifest:
    try:
        manifest = Manifest.read(place)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if manifest is None:
        raise Refusal(
            f"{place} is not complete (it has no manifest), and half a model is not published"
        )
    return manifest


def _check_model(card: RunCard, manifest: Manifest) -> None:
    """The card must be the checkpoint's, or what is published about the model is wrong. Raises
    Refusal.
    """
    for key, value in manifest.model.items():
        section, _, name = key.partition(".")
        said = getattr(getattr(card, section, None), name, value)
        if said is not None and said != value and key != "precision.dtype":
            raise Refusal(
                f"{key} is {value} in the checkpoint and {said} in the card: this is not the card it is of"
            )


# ----------------------------------------------------------------------------- export
def export(job: UploadJob, as_json: bool) -> tuple[FileEntry, ...]:
    """The exported files: of an earlier try where they are as they were, else made now."""
    work = job.work
    recorded = work.recorded()
    if recorded is not None:
        with ByteProgress(
            "checking", sum(entry.bytes for entry in recorded), is_quiet=as_json
        ) as bar:
            found = work.finished(bar.advance)
        if found is not None:
            return found
        say(f"{work.folder}: the export of an earlier try is damaged and is made again")
    work.record.unlink(missing_ok=True)
    work.make(int(job.bytes * ROOM))
    return work.record_export(_run_export(job))


def _run_export(job: UploadJob) -> JsonObject:
    """Run the export as a child with this terminal's stderr; its result. Raises Refusal where it
    fails.
    """
    tokenizer = job.tokenizer
    if tokenizer is not None:
        tokenizer = tokenizer.expanduser().absolute()
    with card_file(job.card) as card:
        value = ask_checkpoint_module(
            "export",
            place=job.place,
            output=job.work.model,
            dtype=job.dtype,
            max_shard_size=SHARD_SIZE,
            tokenizer=tokenizer,
            card=card,
            force=True,
            verify=True,
        )
    if value is None or "error" in value:
        raise Refusal("the export failed (see above); nothing was published")
    return value


# ----------------------------------------------------------------------------- the commands
def upload(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN],
    step: Step,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--repository",
            "--to",
            metavar="OWNER/NAME",
            help="Repository; else the card's hub.model_repository.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="bf16|fp32|fp16", help="Else as the training's precision."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="BRANCH", help="Branch to publish on; made if missing."),
    ] = None,
    branch_per_step: Annotated[
        bool,
        typer.Option(
            "--branch-per-step", help="Publish on a branch global_stepN, beside other steps."
        ),
    ] = False,
    public: Annotated[
        bool | None,
        typer.Option("--public/--private", help="Of a repository that is made; else the card's."),
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", metavar="TEXT", help="Of the commit.")
    ] = None,
    tokenizer: TokenizerOption = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work", metavar="DIR", help="Where the export goes meanwhile; else state/upload."
        ),
    ] = None,
) -> Outcome:
    """Publish a checkpoint as a model on the hub, with a card written from the run: all of it in
    one commit.

    The weights are exported first; that takes their size on the disk. Killed at any point, the same
    command goes on where it was. A repository that holds something else is only overwritten with
    --yes.

    Exit code 0: it is there; 1: refused; 2: wrong usage; 3: the hub does not answer, and the same
    command goes on.

    Examples:
      tr11 upload 95000 --dry-run
      tr11 upload latest --repository lab/tr11-176B-ml --branch-per-step --private
    """
    if revision is not None and branch_per_step:
        raise WrongUsage("--revision and --branch-per-step: leave one out")
    if dtype is not None and dtype not in BYTES_OF:
        raise WrongUsage(f"--dtype {dtype!r}: must be one of {', '.join(BYTES_OF)}")
    context.require_mounted()
    card = own_card(context.card, "an upload")
    with _one_line():
        job = job_of(
            card,
            step,
            to=to,
            dtype=dtype,
            revision=revision,
            branch_per_step=branch_per_step,
            public=public,
            message=message,
            tokenizer=tokenizer,
            work=work,
        )
        facts = _facts(job, _past(job, context))
        hub = _hub(card)
        return carry_out(context, _planned(job, facts, hub, context.as_json))


@contextmanager
def _one_line() -> Iterator[None]:
    """Turns what goes wrong into one line and an exit code."""
    try:
        yield
    except HubUnavailable as error:
        raise Unobserved(f"{error}; the same command goes on") from None
    except ClaimTaken as taken:
        raise Refusal(f"this step is being uploaded already: {taken.at_work}") from None
    except OSError as error:
        raise Refusal(cause(error)) from None


# ----------------------------------------------------------------------------- what is said of it
def _past(job: UploadJob, context: RunContext) -> TrainingHistory:
    """How the training went; unknown where it cannot be read, which is no reason not to publish."""
    try:
        look = look_back(context)
    except (Refusal, OSError, ValueError) as error:
        say(
            f"the run's past cannot be read, the model's card says unknown: {' '.join(str(error).split())}"
        )
        return past_until(None, None, job.manifest)
    return past_until(look.history, look.goodput, job.manifest)


def _facts(job: UploadJob, training_history: TrainingHistory) -> ModelFacts:
    losses = read_losses(job.card.paths.metrics, job.manifest.step)
    repository = job.repository
    return model_facts(
        job.card,
        job.manifest,
        losses=losses,
        training_history=training_history,
        repository=repository.name,
        revision=repository.branch,
        version=__version__,
    )


def _hub(card: RunCard) -> Hub:

    path = None
    if card.hub.credentials_file is not None:
        path = Path(card.hub.credentials_file)
    return Hub(
        card.hub.endpoint,
        find_credentials(path, os.environ),
        hub_retries(PATIENCE_SECONDS, say=say),
    )


# ----------------------------------------------------------------------------- doing it
def _planned(job: UploadJob, facts: ModelFacts, hub: Hub, as_json: bool) -> Change:
    """What would be sent. Raises Refusal where the repository is not as it was asked for."""
    text = model_card(facts)
    head, other = overwritten(hub, job.repository, facts.identity)
    if (
        job.is_visibility_asked
        and head is not None
        and hub.is_private(job.repository) != job.private
    ):
        if job.private:
            is_now, asked = ("public", "private")
        else:
            is_now, asked = ("private", "public")
        raise Refusal(
            f"{job.repository.name} is {is_now}, and --{asked} was asked for; change it at the hub, in Settings"
        )
    question = ""
    if other:
        question = f"{job.repository.name} ({job.repository.branch}) holds {other}. Overwrite it?"
    preview = _preview(job, text, head, other)
    return Change((), question, partial(_upload, job, hub, text, as_json), preview, unchanged="")


def _upload(job: UploadJob, hub: Hub, text: str, as_json: bool) -> Outcome:
    if job.work.recorded() is None:
        require(READING_CHECKPOINTS, "tr11 upload")
    directory = directory_of(job.card)
    with CopyLock(directory, f"hub-{job.work.folder.name}", threading.Event()) as turn:
        turn.copying(job.manifest.step)  # from now on the checkpoint is not pruned
        # before hours of work: whether it may be written to
        hub.ensure_repository(job.repository, job.private)
        files = export(job, as_json)
        with ByteProgress("sending", sum(entry.bytes for entry in files), is_quiet=as_json) as bar:
            commit = publish(
                hub,
                job.repository,
                work=job.work,
                files=files,
                card=text,
                message=job.message,
                progress=by_file(bar.advance),
            )
        Journal(directory.journal).write(
            "upload",
            job.message,
            {
                "step": job.manifest.step,
                "repository": job.repository.name,
                "branch": job.repository.branch,
                "commit": commit,
            },
        )
        job.work.remove()
    document = {
        "schema": SCHEMA,
        **_document(job),
        "commit": commit,
        "files": len(files),
        "bytes": sum(one.bytes for one in files),
    }
    return Outcome(document, (f"{job.address}: step {job.manifest.step}, commit {commit[:12]}",))


def _document(job: UploadJob) -> JsonObject:
    return {
        "repository": job.repository.name,
        "branch": job.repository.branch,
        "step": job.manifest.step,
        "dtype": job.dtype,
        "address": job.address,
    }


def _preview(job: UploadJob, text: str, head: str | None, other: str) -> Outcome:
    document = {
        "schema": SCHEMA,
        **_document(job),
        "bytes": job.bytes,
        "work": str(job.work.folder),
        "makes_repository": head is None,
        "overwrites": other,
        "model_card": text,
    }
    state = "is there"
    if head is None:
        state = f"would be made, {'private' if job.private else 'public'}"
    lines = [
        f"step {job.manifest.step} in {job.dtype}, {size(job.bytes)} of tensors",
        f"from {job.place}",
        f"by way of {job.work.folder}",
        f"to {job.address} ({state})",
    ]
    if other:
        lines.append(f"which holds {other}: that needs --yes")
    return Outcome(document, (*lines, "", "README.md:", "", text.removesuffix("\n")))
