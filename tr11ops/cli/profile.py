"""`tr11 profile`: a trace of the next steps of a running training, or what each rank did last with the others."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal
from tr11ops.base.units import counted, duration
from tr11ops.cli.asking import ask_training, await_answer, require_answer, seconds_to_wait, training_to_ask
from tr11ops.cli.common import DryRunOption, YesOption, agree, say, timeout_option
from tr11ops.cli.context import SCHEDULER, RunContext
from tr11ops.cli.stopping import ReasonOption, StopContext
from trainer.contract.requests import new_request

OPERATIONS_SECONDS = 15.0
MOST_STEPS = 10  # as trainer.contract.requests.MOST_PROFILED_STEPS, without loading it for --help


def profile(
    context: Annotated[RunContext, SCHEDULER],
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST_STEPS, help="How many steps.")] = 3,
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank that is traced.")] = 0,
    operations: Annotated[
        bool, typer.Option("--operations", help="In place of a trace: every rank's last operations with the others.")
    ] = False,
    timeout: Annotated[float | None, timeout_option("Give up waiting after this long.")] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    why: ReasonOption = "",
) -> None:
    """Trace the next steps of one rank: kernels, calls, and on GPUs a snapshot of the memory.

    The file lands in the attempt's folder; open it with ui.perfetto.dev. The traced steps are slower. With --operations
    nothing is slowed: it also answers while the training hangs, and shows which rank is missing where.

    Examples:
      tr11 profile --steps 3
      tr11 profile --operations
    """
    what = "every rank's last operations" if operations else f"{counted(steps, 'step')} of rank {rank}"
    run, view = training_to_ask(context, "profiled", what)
    if dry_run:
        say("nothing was changed (--dry-run)")
        return
    agree("Ask for a profile?", yes)
    if operations:
        _operations(run, why, OPERATIONS_SECONDS if timeout is None else timeout)
        return

    request = replace(new_request("profile", run.user, why, run.directory.root), steps=steps, rank=rank)
    facts = {"steps": steps, "rank": rank}
    ask_training(run, run.directory.paths.profile_request, request, "a profile", "profile", facts)
    seconds = seconds_to_wait(run, timeout)
    done = f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} done"
    say(f"asked for; waiting until {done}, {duration(seconds)} at most")
    answer = require_answer(run, await_answer(run, view, request, seconds), "profile")
    typer.echo(f"profile: {answer.message}")


def _operations(run: StopContext, why: str, seconds: float) -> None:
    """Ask every rank, wait until all that beat have written, then take the request back."""
    paths = run.directory.paths
    request = new_request("operations", run.user, why, run.directory.root)
    ask_training(run, paths.operations_request, request, "the operations", "profile", {"operations": True})
    wanted = len(list(paths.heartbeat(0).parent.glob("*.json")))
    until = time.monotonic() + seconds
    try:
        while True:
            found = sorted(paths.root.glob(f"state/attempts/*/flight-recorder/*-request-{request.id}-rank-*.json"))
            if len(found) >= wanted or time.monotonic() >= until:
                break
            time.sleep(0.5)
    finally:
        paths.operations_request.unlink(missing_ok=True)
    if not found:
        raise Refusal(
            f"no rank wrote its operations within {duration(seconds)}: their machines or the disk do not answer"
        )
    typer.echo(f"operations: {len(found)} of {counted(wanted, 'rank')}, in {found[0].parent}")
