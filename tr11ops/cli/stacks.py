"""`tr11 stacks`: what every worker of a running attempt does now, and which of them holds the
others up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.units import counted
from tr11ops.cli.common import (
    in_time,
    is_terminal,
    kind_to_watch,
    looking,
    open_scheduler,
    timeout_option,
)
from tr11ops.cli.progress import look_again
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from trainer.contract.record import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tr11ops.cluster.base import Scheduler
    from tr11ops.diagnose.stacks.collect import AskedAttempt
    from tr11ops.diagnose.stacks.look import StacksLook
    from tr11ops.rundir.paths import RunDirectory

WATCH_SECONDS = 10.0
# as tr11ops.diagnose.stacks.collect.NODE_SECONDS, without loading it for --help
NODE_SECONDS = 20.0


def stacks(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    seconds: Annotated[
        float | None,
        typer.Argument(
            metavar="SECONDS",
            show_default=False,
            min=1,
            max=86400,
            help="With --watch: between two looks [10].",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", "--attempt", metavar="ID", help="This attempt of the run, e.g. 1234_7."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Again and again until Ctrl-C; says what has not moved."
        ),
    ] = False,
    timeout: Annotated[
        float | None, timeout_option("Give up on a node that is silent for this long [20].")
    ] = None,
) -> Outcome:
    """Say what every worker of the running attempt does now: which rank holds the others up, and
    where it hangs.

    Every node is asked at once (on Slurm with srun --overlap). Nothing is stopped, signalled or
    written. Workers with the same stack share a row, the odd ones on top. It tells waits apart:
    collective, send-recv, data-loader, file, host-sync (the GPU), compute, starting, stopped
    (SIGSTOP), dead.

    Exit code 0 where no rank or node stands out, 1 where one does, 3 where no stack could be read.

    Examples:
      tr11 stacks
      tr11 stacks --job 1234_7 --json
      tr11 stacks --watch 30
    """
    if seconds is not None and not watch:
        raise WrongUsage(
            f"SECONDS ({seconds:g}) goes with --watch: tr11 stacks --watch {seconds:g}"
        )
    _, directory = context.seen()
    edge = looking(open_scheduler(kind_to_watch(directory, context.scheduler)))
    view = _View(
        directory, edge, job, NODE_SECONDS if timeout is None else timeout, shows=not watch
    )
    if watch:
        return look_again(view.look, seconds or WATCH_SECONDS, context.as_json)
    frame = view.look()
    return Outcome(frame.document(), frame.lines(), exit_code=frame.exit_code)


class _Frame(Record):
    """One look, as it is printed."""

    seen: StacksLook

    @property
    def exit_code(self) -> int:
        return self.seen.exit_code

    def document(self) -> dict[str, object]:
        return self.seen.document()

    def lines(self) -> list[str]:
        from tr11ops.diagnose.stacks.screen import lines

        return list(lines(self.seen))

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from rich.text import Text

        return Text("\n".join(self.lines()))


@dataclass
class _View:
    """Looks at the attempt that runs, again and again; a look knows the one before it."""

    directory: RunDirectory
    edge: Scheduler
    job: str | None
    seconds: float
    shows: bool
    last: StacksLook | None = field(default=None)

    def look(self) -> _Frame:
        """Raises Refusal where nothing runs, SchedulerError where the scheduler refuses or is
        silent.
        """
        from tr11ops.diagnose.stacks.collect import collect
        from tr11ops.diagnose.stacks.look import StacksLook
        from tr11ops.diagnose.stacks.records import look_at_records

        asked, name = in_time(lambda: attempt_to_ask(self.directory, self.edge, self.job))
        with _progress(name, max(1, len(asked.nodes)), self.shows) as advance:
            collected = collect(asked, os.environ, self.seconds, advance)
        paths = self.directory.paths
        records = in_time(
            lambda: look_at_records(
                paths.flight_records(asked.job_id), _launch(self.directory, asked.job_id)
            )
        )
        before = None
        if self.last is not None and self.last.job == name:
            before = self.last
        self.last = StacksLook.after(before, name, time.time(), collected, records)
        return _Frame(self.last)


def attempt_to_ask(
    directory: RunDirectory, edge: Scheduler, job: str | None
) -> tuple[AskedAttempt, str]:
    """The running attempt that is meant, and its number as people type it.

    Raises Refusal where none runs, or where it runs where it cannot be asked; SchedulerError.
    """
    from tr11ops.diagnose.stacks.collect import AskedAttempt
    from tr11ops.observe.ownership import read_own_jobs
    from tr11ops.queue.stop import lease_holder
    from trainer.contract.files import host_name

    found = read_own_jobs(directory, edge)
    running = [one for one in found.jobs if one.state.is_active]
    holder = lease_holder(directory)
    if job is not None:
        chosen = [one for one in running if job in {one.job_id, one.raw_id, one.array_id}]
    else:  # of several, the one that trains
        chosen = sorted(running, key=lambda one: holder is None or one.raw_id != holder.job_id)
    beats = directory.paths.heartbeats
    if chosen:
        one = chosen[0]
        count = len(one.nodes) or one.node_count or 1
        return AskedAttempt(
            one.raw_id, beats, nodes=one.nodes, is_local=edge.name != "slurm", node_count=count
        ), one.job_id
    # one in the foreground, of `tr11 train`
    if not running and holder is not None and job in {None, holder.job_id}:
        if holder.host != host_name():
            raise Refusal(
                f"this run trains in the foreground on {holder.host}: type `tr11 stacks` there"
            )
        return AskedAttempt(holder.job_id, beats, (), True), holder.job_id
    names = ", ".join(one.job_id for one in running)
    if job is not None:
        raise Refusal(
            f"--job {job}: is no running attempt of this run; {f'running: {names}' if names else 'none runs'}"
        )
    why_unclear = ""
    if found.why_unclear:
        why_unclear = f" ({found.why_unclear})"
    raise Refusal(
        f"no attempt of this run is running{why_unclear}; for one that has ended: `tr11 diagnose`"
    )


def _launch(directory: RunDirectory, job_id: str) -> int:
    """The newest launch of the attempt; 0 where it keeps no records of launches."""
    folder = directory.paths.attempt(job_id) / "launches"
    return max(
        (int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=0
    )


@contextmanager
def _progress(name: str, nodes: int, shows: bool) -> Iterator[Callable[[int], None]]:
    """How many nodes have answered, where a person waits for it."""
    if not (shows and is_terminal()):
        yield lambda count: None
        return
    from rich.console import Console

    words = f"asking {counted(nodes, 'node')} of job {name}"
    with Console(stderr=True).status(words) as status:
        yield lambda count: status.update(f"{words}: {count} answered")
