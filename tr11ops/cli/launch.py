"""`tr11 launch`: check a run card and submit it; or rehearse it, or write its Kubernetes manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.base.errors import WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.observed import observed
from tr11ops.cli import completion
from tr11ops.cli.common import card_path, directory_of, in_time, in_time_for_all, say
from tr11ops.cli.launch_view import (
    first_data_lines,
    launch_value,
    queue_change,
    shortage_notes,
    view_lines,
)
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, YES, Change, Outcome, RunContext
from tr11ops.cluster.arrays import expand
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.foreign import open_questions
from tr11ops.launch.kubernetes import job_name, kubernetes_problems, manifest, not_carried
from tr11ops.launch.rehearse import as_options, card_text, rehearsal_overrides
from tr11ops.launch.session import LaunchJob, LaunchView, carry_out as submit, check_launch
from tr11ops.observe.readers import CLUSTERS, open_scheduler
from tr11ops.runcard.card import (
    CardError,
    OwnCard,
    RunCard,
    differences,
    load_card,
    load_with_base,
    own_card,
    parse_attempts,
    text_in,
)
from tr11ops.runcard.kinds import refuse_watched
from tr11ops.rundir.journal import user_name
from trainer.contract.files import write_atomically
from trainer.contract.record import JsonObject

CARD_FILE = "rehearsal.toml"
_WIDEST = 48
MANIFEST_SCHEMA = 1


# ----------------------------------------------------------------------------- rehearsal
def rehearsal_options(run: str | None, overrides: Sequence[str]) -> tuple[RunCard, list[str]]:
    """The main card, and the `--set` options that make its rehearsal: those of the person come
    first and count too.
    """
    main = own_card(load_card(card_path(run), overrides, os.environ), "a rehearsal")
    return main, [*overrides, *as_options(rehearsal_overrides(main))]


def differences_value(main: RunCard, other: RunCard) -> list[JsonObject]:
    """What the rehearsal differs in, for a machine."""
    sections = list(OwnCard.model_fields)
    found = differences(main.model_dump(mode="json"), other.model_dump(mode="json"))
    return [
        {"key": key, "main": first, "rehearsal": second}
        for key, first, second in sorted(
            found, key=lambda row: sections.index(row[0].partition(".")[0])
        )
    ]


def difference_lines(main: RunCard, other: RunCard) -> Iterator[str]:
    """What the rehearsal differs in, a line each; all else is the main card's."""
    yield f"The rehearsal is {main.run.name} but for:"
    for entry in differences_value(main, other):
        yield f"  {entry['key']}: {_shown(entry['main'])} -> {_shown(entry['rehearsal'])}"
    yield ""


def keep_card(job: LaunchJob, main: RunCard) -> None:
    """Write the rehearsal's own card beside its run, for `tr11 status` and all other commands."""
    path = job.directory.root / CARD_FILE
    head = f"The rehearsal of {main.run.name}, written by `tr11 launch --rehearse`; it is written again each time."
    write_atomically(path, card_text(job.card, head))
    say(f"its card, for status, logs and kill: --run {path}")


def _shown(value: Any) -> str:
    text = "none"
    if value is not None:
        text = str(value)
    if len(text) <= _WIDEST:
        return text
    return f"...{text[3 - _WIDEST :]}"


# ----------------------------------------------------------------------------- kubernetes
def manifest_of(context: RunContext, given: list[str], nodes: int | None) -> Outcome:
    """The objects of a card. `given`: options that a Job has no use for. Raises CardError,
    Refusal.
    """
    if given:
        text = f"{given[0]}: a Kubernetes Job starts its pods again by itself and has no array, queue or node list"
        raise WrongUsage(f"{text}; leave it out")
    if not context.dry_run:
        text = "tr11 writes the objects and does not talk to a cluster"
        raise WrongUsage(f"{text}: add --dry-run and pipe it into `kubectl apply -f -`")
    path = card_path(context.run)
    overrides = list(context.overrides)
    if nodes is not None:
        overrides.append(f"slurm.nodes={nodes}")
    card = load_card(path, overrides, os.environ)
    problems = list(kubernetes_problems(card))
    if problems or card.kubernetes is None:
        raise CardError(str(path), problems)
    objects = manifest(card, card.kubernetes)
    value = {"schema": MANIFEST_SCHEMA, "name": job_name(card), "objects": objects}
    notes = [f"tr11: {line}" for line in not_carried(card)]
    return Outcome(value, notes=notes, screen=partial(_print_yaml, objects))


def _print_yaml(objects: list[JsonObject]) -> None:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library has no types
        """Writes what occurs twice twice, as a person would, and texts of several lines as such."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def written(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        )

    Dumper.add_representer(str, written)
    typer.echo(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120), nl=False)


# ----------------------------------------------------------------------------- the commands
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare every byte of the checkpoint with its manifest, not only sizes."
    ),
]


def launch(
    context: Annotated[RunContext, JSON, YES, DRY_RUN, REASON],
    *,
    scheduler: Annotated[
        str,
        typer.Option(
            "--scheduler",
            metavar="slurm|local|auto|kubernetes",
            help="Which scheduler to talk to; auto: Slurm where there is one.",
            autocompletion=completion.words(*CLUSTERS, "kubernetes"),
        ),
    ] = "auto",
    array: Annotated[
        str | None,
        typer.Option("--array", metavar="1-10", help="Array of attempts, one after another."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar="LIST", help="Nodes not to use: names or ranges; may be repeated."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="Nodes of one attempt (slurm.nodes)."),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="JOB", help="Start when this job is over.")
    ] = None,
    verify: VerifyOption = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run the card's rehearsal: two nodes, 30 minutes, its own directories.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair the queue: what can never start, what tr11 held, what is a zombie.",
        ),
    ] = False,
    replace_queue: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Give what is queued this card: queued attempts are cancelled and come again.",
        ),
    ] = False,
    allow_namesake: Annotated[
        bool,
        typer.Option(
            "--allow-namesake", help="Launch although another run of yours has the same name."
        ),
    ] = False,
) -> Change | Outcome:
    """Check a run card, show the plan, and submit it.

    Nothing is submitted or created when a check refuses. What the training would start from (its own newest checkpoint,
    else `checkpoint.load`, else random weights) is compared with the card's model, schedule, optimizer and data, as the
    trainer will do it. Attempts of --array are queued as slurm.chain says: by
    default as a job array, where the site has none as dependent jobs, and where few jobs may wait, one by one.
    --repair and --replace ask before they change the queue. --repair also excludes the node that ran the
    batch script of a job that it ends, where the scheduler has lost it.
    With --scheduler kubernetes --dry-run it prints the objects of an indexed Job, for `kubectl apply -f -`.

    Exit code 0: submitted; 1: something is in the way, or the training is finished and
    nothing is left to train; 2: wrong card or option; 3: no answer from the scheduler, or the
    run directory is not mounted here.

    Examples:
      tr11 launch --array 1-10
      tr11 launch --array 1-3 --run demo --scheduler local --dry-run
      tr11 launch --array 1-10 --after 1728318 --exclude jean-zay-iam[37,52]
      tr11 launch --rehearse --run tr11-176B-ml
      tr11 launch --repair
      tr11 launch --replace --dry-run
      tr11 launch --scheduler kubernetes --dry-run | kubectl apply -f -
    """
    if scheduler == "kubernetes":
        useless = {
            "--array": array,
            "--exclude": exclude,
            "--after": after,
            "--rehearse": rehearse,
            "--repair": repair,
            "--replace": replace_queue,
            "--verify": verify,
        }
        return manifest_of(context, [name for name, value in useless.items() if value], nodes)
    given = {"--repair": repair, "--rehearse": rehearse, "--replace": replace_queue}
    named = [option for option, is_given in given.items() if is_given]
    if len(named) > 1:
        raise WrongUsage(f"{' and '.join(named)} are different things: give one of them")
    if replace_queue and after is not None:
        raise WrongUsage("--replace queues behind the attempt that lives: leave --after out")
    read = partial(
        prepare,
        context.run,
        scheduler=scheduler,
        array=array,
        exclude=exclude or [],
        nodes=nodes,
        after=after,
        verify=verify,
        allow_namesake=allow_namesake,
    )
    if rehearse:
        return _rehearsal(context, read)
    job = _prepared(partial(read, context.overrides))
    if repair or replace_queue:
        return queue_change(job, context, replace_queue)
    return _submission(context, job)


def _prepared(read: Callable[[], LaunchJob]) -> LaunchJob:
    """What is to be launched, within the deadline of a look. Raises CardError and Refusal."""

    def with_directory() -> LaunchJob:
        job = read()
        # where that does not end, nothing could be done
        observed(lambda: list(job.directory.root.iterdir()))
        return job

    return in_time(with_directory)


def _rehearsal(context: RunContext, read: Callable[..., LaunchJob]) -> Change:
    """The submission of the card's rehearsal; how it differs from the card is shown, and kept with
    it.
    """
    main, options = rehearsal_options(context.run, context.overrides)
    job = _prepared(partial(read, options))
    return _submission(context, job, main)


def _submission(context: RunContext, job: LaunchJob, main: RunCard | None = None) -> Change:
    """What is to be submitted, checked; of a rehearsal also how it differs from the `main` card."""
    if job.request.read_digests:
        view = check_launch(job)
    else:
        view = in_time_for_all(lambda: check_launch(job))
    lines: list[str] = []
    if not context.as_json:
        if main is not None:
            lines += difference_lines(main, job.card)
        lines += view_lines(view, context)
    value, nothing = launch_value(view, (), context.dry_run), None
    if view.exit_code:
        nothing = _refused(context, view, value)
        nothing = replace(nothing, lines=(*nothing.lines, *first_data_lines(job.card)))
        preview = nothing
    else:
        preview = Outcome(
            {**value, **_differences(main, job)}, ("", "nothing was submitted (--dry-run)")
        )
    apply = partial(_send, context, job, view, main)
    return Change(lines, "", apply, preview, nothing=nothing, unchanged="", is_answer=True)


def _differences(main: RunCard | None, job: LaunchJob) -> JsonObject:
    if main is None:
        return {}
    return {"differences": differences_value(main, job.card)}


def _refused(context: RunContext, view: LaunchView, value: JsonObject) -> Outcome:
    """The answer where a check refuses."""
    notes: list[str] = []
    if context.as_json:
        notes = [f"tr11: {check}" for check in view.faults]
    return Outcome(value, ("nothing was submitted",), notes, exit_code=view.exit_code)


def _send(context: RunContext, job: LaunchJob, view: LaunchView, main: RunCard | None) -> Outcome:
    """Submit it, where nothing has come in the way since it was checked."""
    again, records = submit(job, view, context.reason)
    if not records:
        again = replace(again, checks=again.faults)
        refused = _refused(context, again, launch_value(again, (), False))
        return replace(refused, lines=(*view_lines(again, context), *refused.lines))
    if main is not None:
        keep_card(job, main)
    numbers = ", ".join(str(record.job_id) for record in records)
    name = "jobs"
    if len(records) == 1:
        name = "job"
    look = command_for(context.run or "", "status")
    return Outcome(
        {**launch_value(again, records, False), **_differences(main, job)},
        (f"submitted: {name} {numbers} ({records[0].scheduler}); watch it with `{look} --watch`",),
        shortage_notes(job, again, context.run),
    )


def prepare(
    run: str | None,
    overrides: Sequence[str],
    scheduler: str,
    *,
    array: str | None = None,
    exclude: list[str] | None = None,
    nodes: int | None = None,
    after: str | None = None,
    verify: bool = False,
    allow_namesake: bool = False,
) -> LaunchJob:
    """Read the command line and the card. Raises CardError or Refusal with exit code 2."""
    path = card_path(run)
    if nodes is not None:
        overrides = [*overrides, f"slurm.nodes={nodes}"]
    card, base = load_with_base(path, overrides, os.environ)
    refuse_watched(card)
    spec = None
    if array is not None:
        spec = parse_attempts(array)
    if after is not None and not _is_job_id(after):
        raise WrongUsage(
            f"--after = {after!r}: is not a job id; use a number such as 1728318, or 1728318_2",
        )
    names = tuple(
        dict.fromkeys(
            (*_expand(exclude or [], "--exclude"), *_expand(card.slurm.exclude, "slurm.exclude"))
        )
    )
    text = text_in(path)
    if overrides:
        text += "\n# Overridden on the command line:\n" + "".join(
            f"# --set {item!r}\n" for item in overrides
        )
    return LaunchJob(
        card,
        text,
        directory=directory_of(card),
        array=spec,
        request=LaunchRequest(
            exclude=names,
            after=after,
            read_digests=verify,
            beside_namesakes=allow_namesake,
            open_questions=open_questions(path, overrides),
        ),
        scheduler=open_scheduler(scheduler),
        other_scheduler=open_scheduler,
        user=user_name(),
        base=base,
    )


def _is_job_id(text: str) -> bool:
    first, _, second = text.partition("_")
    return text.isascii() and first.isdecimal() and (second.isdecimal() or "_" not in text)


def _expand(lists: list[str], option: str) -> list[str]:
    names: list[str] = []
    for text in lists:
        try:
            names += expand(text)
        except ValueError as error:
            raise WrongUsage(
                f"{option} = {text!r}: is not a list of nodes ({error}); write it like node[1-3],node7",
            ) from None
    return names
