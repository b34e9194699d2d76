"""`tr11 report`: the whole run as one page, for people who were not there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.units import size
from tr11ops.cli.common import in_time_for_all, open_reader, require_file
from tr11ops.cli.compare import FromOption, ToOption, range_of_options
from tr11ops.cli.runner import SCHEDULER, Outcome, RunContext
from tr11ops.observe.look import facts_of
from tr11ops.report.build import page_of
from tr11ops.report.material import gather
from tr11ops.report.page import render
from trainer.contract.files import write_atomically


def report(
    context: Annotated[RunContext, SCHEDULER],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where the page goes; - is standard output."
        ),
    ] = Path("report.html"),
    charts: Annotated[
        bool, typer.Option("--charts/--no-charts", help="Without: text and tables, small.")
    ] = True,
    first: FromOption = None,
    last: ToOption = None,
    zone: Annotated[
        str | None,
        typer.Option(
            "--zone", metavar="NAME", help="Time zone, e.g. Europe/Paris. Else alerts.time_zone."
        ),
    ] = None,
) -> Outcome | None:
    """Write the whole run as one page of HTML that needs no network: to mail, to keep, to put
    beside the logs.

    Loss, validation, learning rate, batch and throughput with the incidents marked, where the
    node-hours went, faults with the time to detect and to recover, alerts, attempts, nodes,
    checkpoints, and what was done by whom.

    Examples:
      tr11 report
      tr11 report -o tr11-176B.html --zone Europe/Paris
      tr11 report --from 31000 --to 31500 -o spike.html
      tr11 report --no-charts -o - > report.html
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        require_file(output, "--output")
    within = range_of_options(first, last)
    card, directory = context.seen()
    times = _zone(zone or card.alerts.time_zone)
    material = in_time_for_all(
        lambda: gather(
            directory,
            facts_of(card, context.run or ""),
            scheduler=open_reader(directory, context.scheduler),
            now=time.time(),
            within=within,
        )
    )
    page = page_of(material, times, charts)
    text = render(page)
    if to_stdout:
        typer.echo(text, nl=False)
        return None
    _write(output, text)
    unknown = (f"unknown: {line}" for line in material.read_errors)
    written = f"{output}: {size(len(text))}, {len(page.sections)} parts"
    return Outcome(notes=(*unknown, written))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise WrongUsage(f"--zone {name!r}: is not a time zone; e.g. UTC, Europe/Paris") from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all. Raises Refusal when the place refuses it."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise Refusal(f"--output {path}: {error.strerror or error}") from None
