"""`tr11 train`: the whole training in the foreground, as on a cluster; `tr11 eval`: a loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops import __version__
from tr11ops.agent.allocation import claim_gpus
from tr11ops.agent.join import Joining, join, tell_refusal
from tr11ops.agent.peers import Newcomer
from tr11ops.agent.rendezvous import LARGEST_COUNT, Rendezvous, read_rendezvous
from tr11ops.base.errors import Refusal, RendezvousError, WrongUsage
from tr11ops.base.installed import TRAINING, require
from tr11ops.cli import completion
from tr11ops.cli.checkpoints_keep import resolve_step
from tr11ops.cli.common import directory_of, read_card, say, span_option
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.cluster.sbatch_options import code_root
from tr11ops.launch.facts import LaunchRequest, observe_launch
from tr11ops.launch.plan import agent_command, resolved_card
from tr11ops.launch.preflight import preflight
from tr11ops.launch.submit import hold_launch_lock, keep_inputs
from tr11ops.observe.readers import open_scheduler
from tr11ops.runcard.card import (
    OwnCard,
    RunCard,
    load_card,
    paths_of_refused,
    resolved,
    tables_in,
    text_in,
)
from tr11ops.runcard.check import Level, verdict
from tr11ops.runcard.kinds import refuse_watched
from tr11ops.runcard.load import apply_overrides, values_here
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.paths import new_tag
from trainer.config.base import CardError
from trainer.contract.documents import document
from trainer.contract.files import host_name
from trainer.contract.state_file import read_json

# ----------------------------------------------------------------------------- eval
SCHEMA = 1


def evaluate(
    context: Annotated[RunContext, JSON],
    *,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="STEP",
            help="A step's number, `latest`, or the path of its folder.",
            autocompletion=completion.steps,
        ),
    ] = "latest",
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="valid, test, train, or a group of the card."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Windows to evaluate; default: the card's, or the file's.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--windows",
            "--tokens",
            metavar="FILE",
            help=".npy with integers [windows, sequence + 1].",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, metavar="N", help="Processes; default: tensor x pipeline."
        ),
    ] = None,
) -> Outcome:
    """Mean loss (nats per token) of a checkpoint, and with --json the loss of every window.

    Weights alone are loaded: no optimizer, any tensor x pipeline x data shape, whatever shape wrote
    the checkpoint.

    Examples:
      tr11 eval --split valid --samples 256
      tr11 eval --checkpoint 94000 --windows windows.npy --set parallel.tensor=2 --set parallel.pipeline=1 --json
    """
    if (split is None) == (tokens is None):
        raise WrongUsage("give one of --split NAME and --windows FILE")
    if tokens is not None and not tokens.is_file():
        raise WrongUsage(f"{tokens} is not a file")

    count = workers or _workers_of(context)
    here = [f"slurm.workers_per_node={count}", "slurm.nodes=1", "slurm.gpus_per_node=0"]
    require(TRAINING, "tr11 eval")
    card = read_card(context.run, [*(context.overrides), *here])
    place = resolve_step(card, checkpoint)
    with tempfile.TemporaryDirectory(prefix="tr11-eval-") as folder:
        resolved_card, output = Path(folder) / "card.json", Path(folder) / "result.json"
        resolved_card.write_text(json.dumps(resolved(card)), encoding="utf-8")
        command = [
            *(
                sys.executable,
                "-m",
                "trainer.control.launcher",
                "--standalone",
                f"--nproc-per-node={count}",
            ),
            *(
                "-m",
                "trainer.control.evaluate",
                str(resolved_card),
                "--checkpoint",
                str(place),
                "--output",
                str(output),
            ),
            *(["--split", split] if split is not None else []),
            *(["--tokens", str(tokens.absolute())] if tokens is not None else []),
            *(["--samples", str(samples)] if samples is not None else []),
        ]
        _run(command)
        found = read_json(output)
    if found is None:
        raise Refusal("the evaluation ended without a result; what the workers said is above")
    if "refused" in found:
        raise WrongUsage(f"refused: {found['refused']}")
    return Outcome({"schema": SCHEMA, **found}, (_sentence(found),), indent=None)


def _workers_of(context: RunContext) -> int:
    """Tensor x pipeline of the card, before it is known whether the card fits this machine."""
    tables, _ = apply_overrides(tables_in(context.card_path), context.overrides, OwnCard)
    parallel = tables.get("parallel", {})
    if isinstance(parallel, dict):
        degrees = [parallel.get(key, 1) for key in ("tensor", "pipeline")]
    else:
        degrees = [1, 1]
    if not all(type(degree) is int and degree > 0 for degree in degrees):
        return 1  # the card's own check says what is wrong
    return int(degrees[0] * degrees[1])


def _run(command: list[str]) -> None:
    """Run the workers with this process's terminal; their words go to stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    child = subprocess.Popen(command, stdout=sys.stderr.fileno(), env=environment)
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue  # the children got it too
        break
    if code:
        raise Refusal("the evaluation failed; what the workers said is above")


def _sentence(found: dict[str, Any]) -> str:
    shape = " x ".join(
        f"{name} {degree}" for name, degree in sorted(found["topology"].items(), reverse=True)
    )
    parts = "".join(
        f"{name} {value:.4f}, " if " " in name else f"{name} loss {value:.6f}, "
        for name, value in found["parts"].items()
    )
    return (
        f"step {found['step']} on {found['source']}: loss {found['loss']:.6f}, {parts}"
        f"perplexity {found['perplexity']:.4f} "
        f"({found['windows']} windows, {found['tokens']:,} tokens, {shape}, {found['seconds']:.1f} s)"
    )


def _require_trainer(card: RunCard) -> None:
    """Raise Refusal where the card's trainer is our own, and this machine has not what it needs."""
    if card.uses_own_trainer:
        require(TRAINING, "tr11's own trainer")


TELL_SECONDS = 60.0  # for node 0 to begin to listen to a node that cannot start


def train(
    context: RunContext,
    *,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="Nodes of the training (slurm.nodes)."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank", min=0, metavar="R", help="Which of N machines this is, from 0 on."
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", metavar="HOST:PORT", help="Where node 0 waits for the other machines."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers-per-node",
            min=1,
            metavar="N",
            help="Workers of each (slurm.workers_per_node).",
        ),
    ] = None,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="TIME", help="How long nodes wait for each other: 90s, 45m."
        ),
    ] = "15m",
    until_finished: Annotated[
        bool,
        typer.Option(
            "--until-finished", help="Exit code 1 after a stop from which the training is to go on."
        ),
    ] = False,
) -> Outcome:
    """Train here and now, without a scheduler.

    All workers of the card run on this machine, which plays its nodes. With --node-rank and
    --master they run on as many machines that share the run directory: type the same on each, with
    its own rank. Containers' launchers may set MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK in
    their place.

    Ctrl-C saves and stops, on any node; a second Ctrl-C ends the workers at once. When a node is
    lost, all end, and the same commands go on from the last checkpoint.

    Examples:
      tr11 train --run demo
      tr11 train --nodes 1 --workers-per-node 2 --set parallel.pipeline=1 --set parallel.tensor=2
      tr11 train --nodes 2 --node-rank 0 --master node1:29500
      tr11 train --nodes 2 --node-rank 1 --master node1:29500
    """
    path = context.card_path
    seconds = span_option(wait, "m")
    overrides = list(context.overrides)
    if nodes is not None:
        overrides.append(f"slurm.nodes={nodes}")
    if workers is not None:
        overrides.append(f"slurm.workers_per_node={workers}")
    try:
        card = load_card(path, overrides, os.environ)
    except CardError as error:
        why = f"its card is refused: {error.problems[0]}"
        _tell_node_0(context, (nodes, node_rank, master), seconds, why)
        raise
    refuse_watched(card)
    rendezvous, said = read_rendezvous(
        nodes, node_rank, master=master, environment=os.environ, of_card=card.slurm.nodes
    )
    for line in said:
        say(f"tr11: {line}")
    if rendezvous is not None and rendezvous.nodes != card.slurm.nodes:
        overrides.append(f"slurm.nodes={rendezvous.nodes}")
        card = load_card(path, overrides, os.environ)
    if rendezvous is not None and rendezvous.rank > 0:
        try:
            _require_trainer(card)
        except Refusal as error:
            _tell_node_0(context, (nodes, node_rank, master), seconds, error.sentence)
            raise
        return Outcome(exit_code=_join(card, rendezvous, seconds, until_finished))
    directory = directory_of(card)
    request = LaunchRequest(on_scheduler=False)
    facts = observe_launch(
        card, directory, request, scheduler=None, other_scheduler=open_scheduler, user=user_name()
    )
    checks = preflight(card, directory, request, facts)
    for check in checks:
        if check.level is not Level.OK:
            say(f"tr11: {check.level}: {check}")
    code = verdict(checks)
    if code:
        return Outcome(exit_code=code)
    if card.slurm.setup:
        say("tr11: slurm.setup is for a job's shell and is not run here")

    if card.slurm.container is not None:
        say("tr11: slurm.container is for a job and is not used here: start tr11 inside the image")

    os.umask(os.umask(0) & ~0o070)  # what the training makes is its group's too, as in a batch job
    tag = new_tag()
    lock = hold_launch_lock(directory.launch_lock)
    paths = directory.submission(tag)
    keep_inputs(paths, text_in(path), resolved_card(card))
    job_id = f"foreground-{tag}"
    command = [
        *agent_command("batch", paths.card, tag),
        "--foreground-nodes",
        str(card.slurm.nodes),
    ]
    if rendezvous is not None:
        command += ["--master", rendezvous.master, "--wait", str(seconds)]
    command += ["--until-finished"] * until_finished
    Journal(directory.journal).write(
        "train", "", {"tag": tag, "job_id": job_id, "nodes": card.slurm.nodes}, user_name()
    )
    # The agent takes this process's place: Ctrl-C reaches it directly, and the lock lives as long
    # as it does.
    os.set_inheritable(lock, True)
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(sys.executable, command, {**_environment(card), "TR11_JOB_ID": job_id})


def _tell_node_0(
    context: RunContext,
    options: tuple[int | None, int | None, str | None],
    seconds: float,
    why: str,
) -> None:
    """Where this is another node than 0 and cannot train: node 0 must not wait for it."""
    try:
        rendezvous, _ = read_rendezvous(*options, os.environ, LARGEST_COUNT)
    except RendezvousError:
        return
    paths = paths_of_refused(context.card_path, context.overrides, os.environ)
    if rendezvous is None or rendezvous.rank == 0 or paths is None:
        return
    say(f"tr11: nothing is started here: telling node 0 at {rendezvous.master}")
    hello = document(
        Newcomer(rendezvous.nodes, rendezvous.rank, host=host_name(), version=__version__, card={})
    )
    hello["unable"] = why
    if not tell_refusal(
        Joining(
            rendezvous,
            paths,
            hello=hello,
            environment=os.environ,
            wait_seconds=min(seconds, TELL_SECONDS),
        )
    ):
        say(f"tr11: node 0 at {rendezvous.master} was not met: end it by hand if it waits")


def _environment(card: RunCard) -> dict[str, str]:
    """Of the agent and the workers: this shell's, the card's, and where the code lies."""
    root = code_root()
    places = []
    if root:
        places = [str(root)]
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **values_here(card.slurm.environment, os.environ), "PYTHONPATH": path}


def _join(card: RunCard, rendezvous: Rendezvous, seconds: float, until_finished: bool) -> int:
    """Run the part of a node other than 0; what is checked of the run is checked on node 0, this
    node's health here.
    """
    os.umask(os.umask(0) & ~0o070)
    hello = document(
        Newcomer(
            rendezvous.nodes,
            rendezvous.rank,
            host=host_name(),
            version=__version__,
            card=resolved_card(card),
        )
    )
    try:
        environment, claims = claim_gpus(card.slurm.gpus_per_node, _environment(card))
    except RuntimeError as error:
        raise Refusal(str(error)) from None
    try:
        return join(
            Joining(
                rendezvous,
                card.paths,
                hello=hello,
                environment=environment,
                wait_seconds=seconds,
                until_finished=until_finished,
            ),
            say,
        )
    finally:
        for claim in claims:
            claim.close()
