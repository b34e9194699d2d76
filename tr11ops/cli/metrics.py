"""`tr11 metrics`: the status as metrics, and the dashboard and the alert rules that go with them."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from tr11ops.base.errors import WrongUsage
from tr11ops.cli.common import in_time
from tr11ops.cli.runner import SCHEDULER, Outcome, RunContext


def metrics(
    context: Annotated[RunContext, SCHEDULER],
    *,
    open_metrics: Annotated[
        bool, typer.Option("--openmetrics", help="In OpenMetrics' text format.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="A Grafana dashboard as JSON; no run is looked at.")
    ] = False,
    rules: Annotated[
        bool,
        typer.Option("--rules", help="Alert rules for Prometheus as YAML; no run is looked at."),
    ] = False,
) -> Outcome:
    """What `tr11 status` sees, as metrics; or the dashboard and alert rules made for them.

    `tr11 status --prometheus` writes the same metrics to a file again and again, or serves them.

    Exit code: that of `tr11 status`; 0 with --dashboard and --rules.

    Examples:
      tr11 metrics
      tr11 metrics --openmetrics | curl --data-binary @- http://gateway:9091/metrics/job/tr11
      tr11 metrics --dashboard > tr11-dashboard.json
      tr11 metrics --rules > /etc/prometheus/tr11-rules.yml
    """
    if sum((open_metrics, dashboard, rules)) > 1:
        raise WrongUsage("--openmetrics, --dashboard and --rules are three answers: give one")
    if dashboard:
        from tr11ops.boards.dashboard import dashboard as made

        return Outcome(lines=(json.dumps(made(), indent=1),))
    if rules:
        from tr11ops.boards.rules import rules_text

        return Outcome(lines=(rules_text().rstrip("\n"),))
    from tr11ops.cli.status import view_of
    from tr11ops.status.prometheus import exposition

    look = in_time(partial(view_of, context)).look()
    text = exposition(look.seen.status, is_open_metrics=open_metrics)
    return Outcome(lines=(text.rstrip("\n"),), exit_code=look.exit_code)
