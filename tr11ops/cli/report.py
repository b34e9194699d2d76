"""`tr11 report`: the whole run as one page, for people who were not there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from tr11ops.cli.common import (
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    directory_of,
    open_eye,
    read_card,
    require_file,
    say,
)


def report(
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes; - is standard output.")
    ] = Path("report.html"),
    run: RunOption = None,
    overrides: SetOption = None,
    scheduler: SchedulerOption = "auto",
    charts: Annotated[bool, typer.Option("--charts/--no-charts", help="Without: text and tables, small.")] = True,
    zone: Annotated[
        str | None, typer.Option("--zone", metavar="NAME", help="Time zone, e.g. Europe/Paris. Else alerts.time_zone.")
    ] = None,
) -> None:
    """Write the whole run as one page of HTML that needs no network: to mail, to keep, to put beside the logs.

    Loss, learning rate, batch and throughput with the incidents marked, where the node-hours went, faults with the
    time to detect and to recover, alerts, attempts, nodes, checkpoints, and what was done by whom.

    [bold]Examples[/bold]

      tr11 report

      tr11 report -o tr11-176B.html --zone Europe/Paris

      tr11 report --no-charts -o - > report.html
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        require_file(output, "--output")
    card = read_card(run, overrides)
    directory = directory_of(card)
    if not directory.exists:
        raise Refusal(f"{directory.root} is not there: nothing was launched from here, or it is not mounted")
    times = _zone(zone or card.alerts.time_zone)
    from tr11ops.observe import facts_of
    from tr11ops.report.charts import script
    from tr11ops.report.material import gather
    from tr11ops.report.page import render
    from tr11ops.report.page_sections import page_of

    material = gather(directory, facts_of(card, run or ""), open_eye(directory, scheduler), time.time())
    page = page_of(material, times, charts)
    text = render(page, script() if charts else "")
    if to_stdout:
        typer.echo(text, nl=False)
        return
    _write(output, text)
    for line in material.doubts:
        say(f"unknown: {line}")
    say(f"{output}: {len(text) / 1e6:.1f} MB, {len(page.sections)} parts")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise Refusal(f"--zone {name!r}: is not a time zone; e.g. UTC, Europe/Paris", exit_code=2) from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all. Raises Refusal when the place refuses it."""
    from trainer.contract import write_atomically

    try:
        write_atomically(path, text)
    except OSError as error:
        raise Refusal(f"--output {path}: {error.strerror or error}") from None
