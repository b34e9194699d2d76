"""A dashboard for Grafana, as the JSON that it imports: `tr11 metrics --dashboard`. Pure.

A panel names metrics of the table: their queries, legends, units and descriptions follow from it.
The GPUs are those of NVIDIA's DCGM exporter, on the nodes that the run holds, joined by the node's
short name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tr11ops.status.metrics import BY_NAME, Metric, Unit
from trainer.contract.record import JsonObject, Record

SCHEMA_VERSION = 39  # of Grafana 10.4 and newer, which reads older ones too
UID = "tr11-run"
WIDTH = 24  # of Grafana's grid
SOURCE: JsonObject = {"type": "prometheus", "uid": "${source}"}
ONE_RUN = 'run="$run",variant="$variant"'
# What Grafana calls a unit. Moments are shown as the time that is left until then.
UNITS: Mapping[Unit, str] = {
    "": "none",
    "s": "s",
    "moment": "s",
    "percent": "percent",
    "yes-no": "bool_yes_no",
    "tokens": "short",
    "samples": "short",
}
# by the name that DCGM's exporter has for them, without a domain
HELD_NODES = f'label_replace(tr11_node{{{ONE_RUN}}}, "node", "$1", "node", "([^.]+).*")'
Kind = Literal["timeseries", "stat", "state-timeline", "bargauge"]


class BoardPanel(Record):
    """A panel over metrics of the table; they have one unit. `expression` is PromQL in place of the
    metrics' own.
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 7
    expression: str = ""
    unit: str = ""
    is_logarithmic: bool = False


class GpuColumn(Record):
    """A number of DCGM's of each node: how its GPUs make one, its title, and Grafana's unit."""

    title: str
    metric: str
    how: Literal["avg", "max", "sum"]
    unit: str


class Row(Record):
    """A row of panels that folds."""

    title: str
    panels: tuple[BoardPanel, ...]


GPU_COLUMNS: tuple[GpuColumn, ...] = (
    GpuColumn("GPU busy", "DCGM_FI_DEV_GPU_UTIL", "avg", "percent"),
    GpuColumn("tensor cores", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "avg", "percentunit"),
    GpuColumn("hottest GPU", "DCGM_FI_DEV_GPU_TEMP", "max", "celsius"),
    GpuColumn("power", "DCGM_FI_DEV_POWER_USAGE", "sum", "watt"),
    GpuColumn("memory used", "DCGM_FI_DEV_FB_USED", "max", "decmbytes"),
    GpuColumn("last Xid", "DCGM_FI_DEV_XID_ERRORS", "max", "none"),
)

ROWS: tuple[Row, ...] = (
    Row(
        "Now",
        (
            BoardPanel("Verdict", ("tr11_verdict",), "state-timeline", width=12),
            BoardPanel("May I sleep?", ("tr11_may_sleep",), "stat", width=4),
            BoardPanel("Exit code of tr11 status", ("tr11_exit_code",), "stat", width=4),
            BoardPanel(
                "Since the last look",
                ("tr11_time_seconds",),
                "stat",
                width=4,
                expression=f"time() - tr11_time_seconds{{{ONE_RUN}}}",
            ),
            BoardPanel("Open alerts", ("tr11_alerts_open",)),
            BoardPanel("Findings", ("tr11_findings",)),
            BoardPanel("What could not be observed", ("tr11_unknown",), "state-timeline"),
        ),
    ),
    Row(
        "Training",
        (
            BoardPanel("Loss", ("tr11_loss",), width=12, height=9),
            BoardPanel(
                "Gradient norm", ("tr11_grad_norm",), width=12, height=9, is_logarithmic=True
            ),
            BoardPanel("Time of a step", ("tr11_seconds_per_iteration",)),
            BoardPanel("TFLOPs of a worker", ("tr11_tflops",)),
            BoardPanel("Throughput, of the best", ("tr11_throughput_best_percent",)),
            BoardPanel(
                "Tokens a second",
                ("tr11_consumed_tokens",),
                expression=f"deriv(tr11_consumed_tokens{{{ONE_RUN}}}[15m])",
            ),
            BoardPanel("Learning rate", ("tr11_learning_rate",)),
            BoardPanel("Global batch", ("tr11_global_batch_size",)),
            BoardPanel(
                "Iterations: done and planned", ("tr11_iteration", "tr11_iterations_planned")
            ),
            BoardPanel("Samples", ("tr11_consumed_samples",)),
            BoardPanel("Time to go", ("tr11_remaining_seconds", "tr11_finish_likely_seconds")),
        ),
    ),
    Row(
        "What is saved",
        (
            BoardPanel(
                "Checkpoint: age, and time to the next",
                ("tr11_checkpoint_age_seconds", "tr11_checkpoint_due_seconds"),
            ),
            BoardPanel(
                "Steps that are saved, here and away", ("tr11_checkpoint_step", "tr11_backup_step")
            ),
            BoardPanel(
                "Age of backup and of the copied logs",
                ("tr11_backup_age_seconds", "tr11_sync_age_seconds"),
            ),
            BoardPanel(
                "Copies missing and damaged", ("tr11_copies_missing", "tr11_copies_damaged")
            ),
            BoardPanel("Since a restore was tried", ("tr11_restore_drill_age_seconds",)),
            BoardPanel("It passed", ("tr11_restore_drill_passed",), "stat"),
        ),
    ),
    Row(
        "Jobs and nodes",
        (
            BoardPanel("Jobs", ("tr11_jobs",)),
            BoardPanel("Training time in the queue", ("tr11_queue_coverage_seconds",)),
            BoardPanel("Nodes", ("tr11_nodes_used", "tr11_nodes_spare", "tr11_nodes_excluded")),
            BoardPanel(
                "Nodes on the run's list", ("tr11_node_excluded",), "state-timeline", width=12
            ),
            BoardPanel("Nodes held", ("tr11_node",), "state-timeline", width=12),
        ),
    ),
    Row(
        "Operation",
        (
            BoardPanel("Since each periodic job", ("tr11_periodic_age_seconds",)),
            BoardPanel("Failed rounds in a row", ("tr11_periodic_failures",)),
            BoardPanel("Rounds left out", ("tr11_periodic_late",), "state-timeline"),
            BoardPanel("File systems", ("tr11_filesystem_used_percent",), "bargauge"),
            BoardPanel(
                "Time until they are full",
                ("tr11_filesystem_full_seconds",),
                expression=f"tr11_filesystem_full_seconds{{{ONE_RUN}}} - time()",
            ),
            BoardPanel("Kill switch", ("tr11_kill_switch",), "stat"),
        ),
    ),
)


def dashboard() -> JsonObject:
    """The dashboard as JSON values, for one data source, run and variant that are chosen on it."""
    return {
        "uid": UID,
        "title": "tr11: one run",
        "description": "Made by `tr11 metrics --dashboard`: make it again after an upgrade.",
        "tags": ["tr11"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-24h", "to": "now"},
        "annotations": {"list": [_firing_alerts()]},
        "templating": {"list": list(_variables())},
        "panels": _placed(),
    }


def query(metric: Metric) -> str:
    """What is drawn of a metric, for the chosen run."""
    return f"{metric.name}{{{ONE_RUN}}}"


def gpu_query(column: GpuColumn) -> str:
    """One value for each node that the run holds; nothing where the exporter has none."""
    by_node = f'label_replace({column.metric}, "node", "$1", "Hostname", "([^.]+).*")'
    return f"{column.how} by (node) ({by_node}) and on (node) {HELD_NODES}"


def _variables() -> Iterator[JsonObject]:
    yield {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }
    yield _labels("run", "label_values(tr11_time_seconds, run)")
    yield _labels("variant", 'label_values(tr11_time_seconds{run="$run"}, variant)')


def _labels(name: str, words: str) -> JsonObject:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": words, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "hide": 0,
    }


def _firing_alerts() -> JsonObject:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f'ALERTS{{alertstate="firing",{ONE_RUN}}}',
        "titleFormat": "{{alertname}}",
    }


# ----------------------------------------------------------------------------- the grid
def _placed() -> list[JsonObject]:
    """Every panel with its number and its place; a row's panels stand below its title."""
    made: list[JsonObject] = []
    top = 0
    for row in ROWS:
        made.append(_row_title(row.title, top))
        drawn = [(panel.width, panel.height, _panel(panel)) for panel in row.panels]
        top = _lay(made, drawn, top + 1)
    made.append(_row_title("GPUs of the nodes that the run holds (DCGM exporter)", top))
    gpus = [(8, 8, _gpu_panel(column)) for column in GPU_COLUMNS]
    _lay(made, [(WIDTH, 12, _gpu_table()), *gpus], top + 1)
    for number, panel in enumerate(made, start=1):
        panel["id"] = number
    return made


def _lay(made: list[JsonObject], panels: Sequence[tuple[int, int, JsonObject]], top: int) -> int:
    """Append panels of a width and height from left to right, line by line; returns the first free
    line below them.
    """
    left, lowest = 0, top
    for width, height, panel in panels:
        if left + width > WIDTH:
            left, top = 0, lowest
        made.append({**panel, "gridPos": {"h": height, "w": width, "x": left, "y": top}})
        left, lowest = left + width, max(lowest, top + height)
    return lowest


def _row_title(title: str, top: int) -> JsonObject:
    place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
    return {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: BoardPanel) -> JsonObject:
    metrics = [BY_NAME[name] for name in panel.metrics]
    targets = [
        _target(panel.expression or query(metric), _legend(metric), letter)
        for metric, letter in zip(metrics, "ABCDEFGH", strict=False)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": " ".join(metric.words for metric in metrics),
        "datasource": SOURCE,
        "targets": targets,
        "options": _options(panel.kind),
        "fieldConfig": {"defaults": _field(panel, metrics[0]), "overrides": []},
    }


def _target(expression: str, legend: str, letter: str) -> JsonObject:
    return {
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "refId": letter,
        "range": True,
    }


def _legend(metric: Metric) -> str:
    if metric.labels:
        return " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    return metric.name.removeprefix("tr11_").replace("_", " ")


def _options(kind: Kind) -> JsonObject:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True, "rowHeight": 0.9}
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if kind == "bargauge":
        return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic"}
    return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none"}


def _field(panel: BoardPanel, metric: Metric) -> JsonObject:
    defaults: JsonObject = {"unit": panel.unit or UNITS[metric.unit]}
    if panel.kind == "timeseries":
        drawn: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 0, "spanNulls": False}
        if panel.is_logarithmic:
            drawn["scaleDistribution"] = {"type": "log", "log": 10}
        defaults["custom"] = drawn
    elif panel.kind == "bargauge":
        defaults |= {"min": 0, "max": 100, "thresholds": _thresholds(80.0, 95.0)}
    return defaults


def _thresholds(warning: float, critical: float) -> JsonObject:
    return {
        "mode": "absolute",
        "steps": [
            {"color": "green", "value": None},
            {"color": "orange", "value": warning},
            {"color": "red", "value": critical},
        ],
    }


# ----------------------------------------------------------------------------- GPUs
def _gpu_panel(column: GpuColumn) -> JsonObject:
    return {
        "type": "timeseries",
        "title": f"{column.title} ({column.how} of a node)",
        "description": f"{column.metric}, of each node that the run holds.",
        "datasource": SOURCE,
        "targets": [_target(gpu_query(column), "{{node}}", "A")],
        "options": _options("timeseries"),
        "fieldConfig": {"defaults": {"unit": column.unit}, "overrides": []},
    }


def _gpu_table() -> JsonObject:
    """A line for each node: what tr11 says of it, and beside that what the exporter does."""
    letters = "BCDEFGH"
    asked = [
        (HELD_NODES, "A"),
        *(
            (gpu_query(column), letter)
            for column, letter in zip(GPU_COLUMNS, letters, strict=False)
        ),
    ]
    hidden = ["Time", "Value #A", "run", "variant", "instance", "job", "__name__"]
    names = {
        f"Value #{letter}": column.title
        for column, letter in zip(GPU_COLUMNS, letters, strict=False)
    }
    named = [
        {
            "matcher": {"id": "byName", "options": column.title},
            "properties": [{"id": "unit", "value": column.unit}],
        }
        for column in GPU_COLUMNS
    ]
    return {
        "type": "table",
        "title": "Nodes and their GPUs",
        "description": "A node without numbers has no DCGM exporter that this Prometheus scrapes.",
        "datasource": SOURCE,
        "targets": [
            {**_target(expression, "", letter), "format": "table", "instant": True, "range": False}
            for expression, letter in asked
        ],
        "transformations": [
            {"id": "joinByField", "options": {"byField": "node", "mode": "outer"}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {**_hidden(hidden, len(asked))},
                    "renameByName": names,
                },
            },
        ],
        "options": {"showHeader": True},
        "fieldConfig": {"defaults": {}, "overrides": named},
    }


def _hidden(names: Sequence[str], frames: int) -> dict[str, bool]:
    """A joined table numbers the columns that several frames have: `Time 1`, `Time 2`, ..."""
    numbered = [f"Time {number}" for number in range(1, frames + 1)]
    return dict.fromkeys([*names, *numbered], True)
