"""`tr11 status`: one screen that answers "may I sleep?", or the same as JSON; once, or refreshed in place."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.common import JsonOption, Refusal, RunOption, SchedulerOption, SetOption, directory_of, read_card

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tr11ops.cluster.base import Scheduler
    from tr11ops.detect.finding import Finding
    from tr11ops.rundir import RunDirectory
    from tr11ops.snapshot import RunFacts, Snapshot, Unknown
    from tr11ops.verdict import Verdict

WATCH_SECONDS = 10.0
SHORTEST_WATCH_SECONDS = 1.0
NARROWEST, WIDEST = 40, 132
CLUSTERS = ("slurm", "local", "auto")


def status(  # options of a command line: typer calls it by name
    seconds: Annotated[
        float | None,
        typer.Argument(metavar="SECONDS", show_default=False, help="With --watch: seconds between two looks [10]."),
    ] = None,
    run: RunOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C: --watch, or --watch 30.")
    ] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
    scheduler: SchedulerOption = "auto",
    digests: Annotated[
        bool, typer.Option("--digests", help="Compare the newest checkpoint's digests too: reads all its bytes.")
    ] = False,
) -> None:
    """One screen: is the run healthy, and since when.

    Exit code 0: healthy, starting, queued, finished, or stopped by someone; 1: stalled or down; 2: wrong usage;
    3: it could not be observed.

    [bold]Examples[/bold]

      tr11 status

      tr11 status --run demo --watch 30

      tr11 status --json | jq .verdict
    """
    if seconds is not None and not watch:
        raise Refusal(f"SECONDS ({seconds:g}) goes with --watch: tr11 status --watch {seconds:g}", exit_code=2)
    if seconds is not None and not SHORTEST_WATCH_SECONDS <= seconds <= 86400:
        raise Refusal(f"--watch {seconds:g}: must be between 1 and 86400 seconds", exit_code=2)
    if scheduler not in CLUSTERS:
        raise Refusal(f"--scheduler {scheduler!r}: must be one of {', '.join(CLUSTERS)}", exit_code=2)
    view = _view(run, overrides, scheduler, digests)
    if watch:
        raise typer.Exit(_watch(view, seconds or WATCH_SECONDS, as_json))
    look = view.look()
    if as_json:
        print(json.dumps(look.document(), indent=1, allow_nan=False))
    else:
        _console().print(look.screen())
    raise typer.Exit(look.verdict.exit_code)


@dataclass(frozen=True)
class Look:
    """One observation with what was concluded from it."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    seconds: float  # how long it took to observe

    def document(self) -> dict[str, object]:
        from tr11ops.report.status_json import status_document

        return status_document(self.snapshot, self.findings, self.verdict)

    def screen(self) -> RenderableType:
        from tr11ops.report.glyphs import shows_unicode
        from tr11ops.report.status import Screen, render

        width = min(WIDEST, max(NARROWEST, _console().width))
        screen = Screen(width, shows_unicode(os.environ, _encoding()))
        return render(self.snapshot, self.findings, self.verdict, screen)


@dataclass(frozen=True)
class View:
    """What to look at, and through which scheduler; each `look` is a fresh observation."""

    directory: RunDirectory
    facts: RunFacts
    scheduler: Scheduler | Unknown
    digests: bool

    def look(self) -> Look:
        from tr11ops.detect.registry import detect_all
        from tr11ops.observe import observe
        from tr11ops.verdict import judge

        began = time.monotonic()
        snapshot = observe(self.directory, self.facts, self.scheduler, time.time(), self.digests)
        findings = detect_all(snapshot)
        return Look(snapshot, findings, judge(snapshot, findings), time.monotonic() - began)


def _view(run: str | None, overrides: list[str] | None, kind: str, digests: bool) -> View:
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.cluster.select import choose_scheduler
    from tr11ops.observe import facts_of, scheduler_kind
    from tr11ops.snapshot import Unknown

    card = read_card(run, overrides)
    directory = directory_of(card)
    if kind == "auto":
        recorded = scheduler_kind(directory)
        kind = recorded if recorded in CLUSTERS else kind
    chosen: Scheduler | Unknown
    try:
        chosen = choose_scheduler(kind)  # type: ignore[arg-type]  # checked against CLUSTERS above
    except (SchedulerError, OSError) as error:
        chosen = Unknown(f"no {kind} scheduler here: {error}")
    return View(directory, facts_of(card, run or ""), chosen, digests)


def _watch(view: View, seconds: float, as_json: bool) -> int:
    """Look again and again until Ctrl-C; returns the exit code of the last look."""
    console = _console()
    code = 0
    looks = _looks(view, seconds)
    try:
        if as_json or not console.is_terminal or console.is_dumb_terminal:
            for look in looks:
                code = look.verdict.exit_code
                if as_json:
                    print(json.dumps(look.document(), allow_nan=False), flush=True)
                else:
                    console.print(look.screen())
                    console.print()
        else:
            code = _live(console, looks, seconds)
    except KeyboardInterrupt:
        pass
    return code


def _live(console: Console, looks: Iterator[Look], seconds: float) -> int:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    last: Look | None = None
    hint = Text(f"every {seconds:g} s; Ctrl-C ends", style="dim")
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for last in looks:
                live.update(Group(last.screen(), Text(""), hint), refresh=True)
    except KeyboardInterrupt:
        if last is not None:
            console.print(last.screen())
    return 0 if last is None else last.verdict.exit_code


def _looks(view: View, seconds: float) -> Iterator[Look]:
    """Observations for ever. A slow scheduler is asked less often: the pause is at least twice what a look took."""
    while True:
        look = view.look()
        yield look
        time.sleep(max(seconds, 2 * look.seconds))


def _encoding() -> str:
    """The terminal's encoding; a live view puts a stand-in without one in place of `sys.stdout`."""
    return getattr(sys.__stdout__, "encoding", None) or "ascii"


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)
