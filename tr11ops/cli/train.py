"""`tr11 train`: the whole training on this machine, in the foreground, through the same agent as on a cluster."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tr11ops.cli.common import directory_of, open_scheduler, say
from tr11ops.cli.context import RunContext
from tr11ops.cluster.sbatch_script import code_root
from tr11ops.launch.facts import LaunchRequest, observe_launch
from tr11ops.launch.plan import resolved_card
from tr11ops.launch.preflight import preflight
from tr11ops.launch.render import agent_command
from tr11ops.launch.submit import hold_launch_lock, keep_inputs
from tr11ops.runcard.card import load_card
from tr11ops.runcard.check import Level, verdict
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.paths import new_tag


def train(
    context: RunContext,
    *,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, metavar="N", help="Nodes to play here (slurm.nodes).")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers-per-node", min=1, metavar="N", help="Workers of each (slurm.workers_per_node)."),
    ] = None,
) -> None:
    """Train here and now, without a scheduler: all workers of the card run on this machine.

    Ctrl-C saves and stops; a second Ctrl-C ends the workers at once.

    Examples:
      tr11 train --run demo
      tr11 train --nodes 1 --workers-per-node 2 --set parallel.pipeline=1 --set parallel.tensor=2
    """
    path = context.card_path
    sizes = [f"slurm.nodes={nodes}"] * (nodes is not None) + [f"slurm.workers_per_node={workers}"] * (
        workers is not None
    )
    card = load_card(path, [*(context.overrides), *sizes], os.environ)
    directory = directory_of(card)
    request = LaunchRequest(on_scheduler=False)
    facts = observe_launch(card, directory, request, scheduler=None, other_scheduler=open_scheduler, user=user_name())
    checks = preflight(card, directory, request, facts)
    for check in checks:
        if check.level is not Level.OK:
            say(f"tr11: {check.level}: {check}")
    code = verdict(checks)
    if code:
        raise typer.Exit(code)
    if card.slurm.setup:
        say("tr11: slurm.setup is for a job's shell and is not run here")

    os.umask(os.umask(0) & ~0o070)  # what the training makes is its group's too, as in a batch job
    tag = new_tag()
    lock = hold_launch_lock(directory.launch_lock)
    paths = directory.submission(tag)
    keep_inputs(paths, path.read_text(encoding="utf-8", errors="replace"), resolved_card(card))
    job_id = f"foreground-{tag}"
    command = [*agent_command("batch", paths.card, tag), "--foreground-nodes", str(card.slurm.nodes)]
    Journal(directory.journal).write(
        "train", "", {"tag": tag, "job_id": job_id, "nodes": card.slurm.nodes}, user_name()
    )
    root = code_root()
    places = [str(root)] if root else []
    environment = {
        **os.environ,
        **card.slurm.environment,
        "TR11_JOB_ID": job_id,
        "PYTHONPATH": os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # The agent takes this process's place: Ctrl-C reaches it directly, and the lock lives as long as it does.
    os.set_inheritable(lock, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)
