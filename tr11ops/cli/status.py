"""`tr11 status`: one screen that answers "may I sleep?", or JSON, or metrics; once, or refreshed in
place.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.api import Run, run_of
from tr11ops.base.errors import HubPermanentError, HubUnavailable, Refusal
from tr11ops.cli.common import (
    EndpointOption,
    VariantOption,
    drawing_console,
    in_time,
    lines_to_fill,
    say,
    status_screen,
)
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from trainer.contract.record import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tr11ops.cli.progress import WatchFrame
    from tr11ops.status.assessment import Assessment
    from tr11ops.status.document import Status
    from tr11ops.status.remote import Outside, RemoteView


# ----------------------------------------------------------------------------- --remote
REMOTE_WATCH_SECONDS = 300.0
LONGEST_WAIT_SECONDS = 60.0  # of one look: longer than that no one sits before a terminal
LONGEST_WATCH_WAIT_SECONDS = 900.0  # between two looks, whatever the hub asks for
SHORTEST_REMOTE_WATCH_SECONDS = 30.0  # the hub is everyone's, and the run's news are hourly


class RemoteLook(Record):
    """One look from outside."""

    view: RemoteView

    @property
    def exit_code(self) -> int:
        from tr11ops.status.remote import judge_outside

        return judge_outside(self.view).exit_code

    def document(self) -> dict[str, object]:
        from tr11ops.status.remote import outside_document

        return outside_document(self.view)

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from tr11ops.status.remote_screen import render_outside

        return render_outside(self.view, status_screen(width, height))


@dataclass
class RemoteReader:
    """Looks at one repository; `look` may be called again and again."""

    repository: str
    outside: Outside
    is_watching: bool = False

    def look(self) -> RemoteLook:
        """Raises Refusal: what is asked for is not there or not for us; HubUnavailable: nothing may
        be concluded.
        """
        from tr11ops.status.remote import NoSuchVariant

        where = f"--remote {self.repository}"
        try:
            return RemoteLook(self.outside.look(time.time()))
        except HubPermanentError as error:
            raise Refusal(f"{where}: {error}") from None
        except HubUnavailable as error:
            if self.is_watching:
                words = str(error)
            else:
                words = f"{where}: {error}: nothing may be concluded"
            raise HubUnavailable(words, min(error.wait, LONGEST_WATCH_WAIT_SECONDS)) from None
        except NoSuchVariant as error:
            shown = ", ".join(error.variants[:20]) or "none"
            raise Refusal(
                f"{where}: choose a variant with --variant; there are logs of: {shown}", 2
            ) from None


def status_remote(
    repository: str,
    endpoint: str | None,
    variant: str | None,
    seconds: float | None,
    watch: bool,
    as_json: bool,
) -> Outcome:
    """The run's status from outside, once or again and again. Raises Refusal."""
    every = REMOTE_WATCH_SECONDS if seconds is None else seconds
    if watch and every < SHORTEST_REMOTE_WATCH_SECONDS:
        raise Refusal(
            f"--watch {every:g}: a hub is asked every {SHORTEST_REMOTE_WATCH_SECONDS:g} seconds at most",
            2,
        )
    reader = remote_reader(repository, endpoint, variant, watch)
    look = reader.look()
    if watch:
        from tr11ops.cli.progress import look_again

        ready, reader.is_watching = [look], True  # the first is there already
        return look_again(lambda: ready.pop() if ready else reader.look(), every, as_json)
    return Outcome(look.document(), exit_code=look.exit_code, screen=partial(_draw, look))


def _draw(look: WatchFrame, fills: bool = False) -> None:
    """One look on standard output; `fills`: with as much as the terminal has room for."""
    console = drawing_console()
    height = lines_to_fill(console) if fills else None
    console.print(look.screen(console.width, height))


def remote_reader(
    repository: str, endpoint: str | None, variant: str | None, watch: bool
) -> RemoteReader:
    """What looks at the repository that a person typed. Raises Refusal."""
    from tr11ops.cli.logs import remote_repo
    from tr11ops.hub.remote_log import remote_retries
    from tr11ops.status.remote import Outside

    repo, token = remote_repo(repository, endpoint)
    if repo.path:
        raise Refusal(
            f"--remote {repository}: give OWNER/NAME; --variant names one of several trainings",
            exit_code=2,
        )
    # while watching the next look is the next try
    retries = remote_retries(
        time.sleep, say, 1 if watch else 3, longest=20.0, spread=0.2, most=LONGEST_WAIT_SECONDS
    )
    return RemoteReader(repo.name, Outside(repo, token, retries, variant))


WATCH_SECONDS = 10.0
SHORTEST_WATCH_SECONDS = 1.0
SCRAPE_SECONDS = 10.0  # scrapes that come sooner than this after a look get what it saw


def status(
    # options of a command line: typer calls it by name
    context: Annotated[RunContext, SCHEDULER, JSON],
    seconds: Annotated[
        float | None,
        typer.Argument(
            metavar="SECONDS",
            help="With --watch: seconds between two looks [10, with --remote 300].",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Refresh in place until Ctrl-C: --watch, or --watch 30."
        ),
    ] = False,
    digests: Annotated[
        bool,
        typer.Option(
            "--digests", help="Compare the newest checkpoint's digests too: reads all its bytes."
        ),
    ] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            metavar="FILE|PORT",
            help="Metrics: to a textfile collector's FILE, or served on [HOST:]PORT (default host 127.0.0.1).",
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote",
            metavar="OWNER/NAME",
            help="From anywhere: what the run's hub repository tells.",
        ),
    ] = None,
    endpoint: EndpointOption = None,
    variant: VariantOption = None,
) -> Outcome:
    """One screen: is the run healthy, and since when. In a folder that holds runs, without --run: what
    `tr11 list` shows of them.

    Exit code 0: healthy, starting, queued, finished, or stopped by someone; 1: stalled, down, or
    with a critical finding; 2: wrong usage; 3: it could not be observed.

    Examples:
      tr11 status
      tr11 status --run demo --watch 30
      tr11 status --json | jq .verdict
      tr11 status --prometheus /var/lib/node_exporter/tr11.prom --watch 60
      tr11 status --prometheus 9108
      tr11 status --remote bigscience/tr11-176B-ml-logs
    """
    if seconds is not None and not watch:
        raise Refusal(
            f"SECONDS ({seconds:g}) goes with --watch: tr11 status --watch {seconds:g}", exit_code=2
        )
    if seconds is not None and not SHORTEST_WATCH_SECONDS <= seconds <= 86400:
        raise Refusal(f"--watch {seconds:g}: must be between 1 and 86400 seconds", exit_code=2)
    if remote is not None:
        if (
            context.run is not None
            or context.overrides
            or context.scheduler != "auto"
            or digests
            or prometheus is not None
        ):
            raise Refusal(
                "--remote needs no card and no scheduler: it goes with --watch, --json, --variant alone",
                2,
            )

        return status_remote(
            remote,
            endpoint,
            variant=variant,
            seconds=seconds,
            watch=watch,
            as_json=context.as_json,
        )
    if endpoint is not None or variant is not None:
        raise Refusal("--endpoint and --variant go with --remote OWNER/NAME", exit_code=2)
    if prometheus is not None and context.as_json:
        raise Refusal("--json and --prometheus are two forms of the same: give one", exit_code=2)
    every = None
    if watch:
        every = seconds or WATCH_SECONDS
    if prometheus is not None:
        target = target_of(prometheus)
        if watch and isinstance(target, tuple):
            raise Refusal(
                "--watch goes with --prometheus FILE; what is served is looked at when it is asked for",
                2,
            )
        view = view_of(context, digests)
        if isinstance(target, tuple):
            return _serve(view, *target)
        return Outcome(exit_code=_write_metrics(view, target, every))
    if not (context.has_card or digests):
        from tr11ops.cli.list_runs import runs_here

        all_runs = runs_here(context, "status", every)
        if all_runs is not None:
            return all_runs
    view = in_time(lambda: view_of(context, digests))
    if watch:
        from tr11ops.cli.progress import look_again

        return look_again(view.look, seconds or WATCH_SECONDS, context.as_json)
    look = view.look()
    shown = partial(_draw, look, fills=True)
    return Outcome(look.document(), exit_code=look.exit_code, screen=shown)


class StatusResult(Record):
    """One assessment, as it is printed."""

    seen: Assessment

    @property
    def exit_code(self) -> int:
        return self.seen.exit_code

    def document(self) -> dict[str, object]:
        return self.seen.document()

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from tr11ops.status.screen import render

        return render(self.seen.status, status_screen(width, height))


class View(Record):
    """A run that is looked at again and again; with `digests` every byte of its newest checkpoint
    is read.
    """

    run: Run
    digests: bool = False

    def look(self) -> StatusResult:
        """One look within its deadline; one that is late saw nothing."""
        return StatusResult(self.run.look(self.digests))


def view_of(context: RunContext, digests: bool = False) -> View:
    """What looks at the run of a command line. Raises CardError."""
    run = run_of(context.card, context.run or "", context.scheduler, context.overrides)
    return View(run, digests)


# ----------------------------------------------------------------------------- metrics
def target_of(text: str) -> Path | tuple[str, int]:
    """A file, or a host and a port: what is all digits is a port, and so are digits behind a colon
    without a slash.
    """
    host, colon, port = text.rpartition(":")
    if port.isascii() and port.isdigit() and "/" not in host:
        if not 0 < int(port) < 65536:
            raise Refusal(
                f"--prometheus {text}: a port is between 1 and 65535 (a file of that name: ./{text})",
                2,
            )
        return (host.strip("[]") if colon and host else "127.0.0.1", int(port))
    path = Path(text)
    if not text or not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise Refusal(
            f"--prometheus {text}: not a file in a folder that exists, nor a port", exit_code=2
        )
    return path


def _write_metrics(view: View, path: Path, seconds: float | None) -> int:
    """Write the metrics once, or every `seconds` until Ctrl-C. A write that fails later is said,
    and tried again.
    """
    from tr11ops.status.prometheus import exposition
    from trainer.contract.files import write_atomically

    if path.suffix != ".prom":
        say(
            f"tr11: a textfile collector reads only files that end in .prom, which {path.name} does not"
        )
    code = 3
    try:
        while True:
            began = time.monotonic()
            try:
                look = view.look()
                code = look.exit_code
                write_atomically(path, exposition(look.seen.status))
            except OSError as error:
                words = f"{path} could not be written: {error.strerror or error}"
                if seconds is None:
                    raise Refusal(words) from None
                say(f"tr11: {words}")
            if seconds is None:
                return code
            time.sleep(max(seconds, 2 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        return code


def _serve(view: View, host: str, port: int) -> Outcome:
    """Serve the metrics until Ctrl-C or SIGTERM."""
    from tr11ops.base.stop_signals import StopEvent, obeying
    from tr11ops.status.prometheus import serve

    over = StopEvent()
    source = _Source(view)
    try:
        bound, end = serve(source.status, host, port, (view.run.facts.name, view.run.facts.variant))
    except OSError as error:
        raise Refusal(
            f"--prometheus {host}:{port} cannot be served: {error.strerror or error}"
        ) from None
    if ":" in host:
        place = f"[{host}]"
    else:
        place = host
    with obeying(over.obey):
        say(f"metrics on http://{place}:{bound}/metrics; Ctrl-C ends")
        over.wait()
        end()
    return Outcome()


class _Source:
    """The status for a scrape; one look at a time, and none sooner than SCRAPE_SECONDS after the
    last.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._seen = 0.0

    def status(self) -> Status:
        with self._lock:
            if self._status is None or time.monotonic() - self._seen >= SCRAPE_SECONDS:
                self._status = self._view.look().seen.status
                self._seen = time.monotonic()
            return self._status
