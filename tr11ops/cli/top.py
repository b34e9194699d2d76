"""`tr11 top`: runs, attempts, nodes and ranks on one keyed screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tr11ops.base.errors import WrongUsage
from tr11ops.base.installed import require
from tr11ops.cli.common import RootsOption, is_terminal
from tr11ops.cli.runner import NO_RUN, SCHEDULER, Outcome, RunContext

SHORTEST_SECONDS = 2.0


def top(
    context: Annotated[RunContext, NO_RUN, SCHEDULER],
    *,
    roots: RootsOption = None,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Between two looks.")
    ] = 10.0,
) -> Outcome:
    """The runs below some folders, what needs a person first; Enter goes into a run, an attempt, a node.

    Keys: `/` filter, `l` log, `d` diagnose, `a` acknowledge, `k` kill, `?` help, `q` leave. What
    changes a run shows its own plan first. It works from 80x24 up, in tmux and over a slow line.

    Examples:
      tr11 top
      tr11 top /scratch/six/checkpoints --every 30
    """
    require(("textual",), "tr11 top", 'pip install "tr11[top]"')
    places = roots or [Path()]
    for place in places:
        if not place.is_dir():
            raise WrongUsage(f"ROOT {place}: is not a folder")
    if every < SHORTEST_SECONDS:
        raise WrongUsage(f"--every {every:g}: must be {SHORTEST_SECONDS:g} seconds or more")
    if not is_terminal():
        raise WrongUsage("tr11 top needs a terminal; type: tr11 list")
    from tr11ops.top.app import TopApp
    from tr11ops.top.looks import RunLooks

    TopApp(RunLooks(places, context.scheduler), every).run()
    return Outcome()
