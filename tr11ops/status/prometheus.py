"""The status as metrics for Prometheus: what `tr11 metrics` prints, and `tr11 status --prometheus`
writes and serves. Which there are is said in `tr11ops.status.metrics`.

A value that is not known has no sample: a number that stands for "unknown" would be drawn and
alerted on. What could not be observed is `tr11_unknown{what="..."} 1` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily

from tr11ops.alerts.state import Alert
from tr11ops.rundir.disk_usage import KINDS
from tr11ops.status.document import Status, tasks_of, unknown_names
from tr11ops.status.metrics import BY_NAME, METRICS, Metric
from tr11ops.watchdog.verdict import VerdictWord

# of one metric: the values of its own labels, and the number
Samples = list[tuple[tuple[str, ...], float]]
SEVERITIES = ("info", "warning", "critical")
# What may be unknown, by its name in the document's lines; a fixed set, as each makes a time
# series.
WHATS = frozenset(
    {
        "jobs",
        "nodes",
        "steps",
        "heartbeats",
        "attempts",
        "checkpoints",
        "kill_switch",
        "exclusions",
        "submissions",
        "phases",
        "events",
        "logs",
        "node_warnings",
        "ended_jobs",
        "holds",
        "backup",
        "sync",
        "periodic_jobs",
        "chains",
        "usage",
        "clocks",
        "least_used",
        "latest",
        "alerts",
        "launch",
        "best_throughput",
        "copying",
        "restore_drill",
        "corruptions",
        "compute_times",
        "compute_before",
    }
)
OTHER = "other"
LOOK = "look"  # at all


def families(status: Status) -> Iterator[GaugeMetricFamily]:
    """Every metric of one status (`tr11ops.status.document`), in the order of the table."""
    run = (status.run.name, status.run.variant)
    for metric in METRICS:
        if metric.path:
            samples = _one(_at(status, metric.path))
            if not any(math.isfinite(value) for _, value in samples):
                continue  # not even its name
        else:
            made = SAMPLES[metric.name](status)
            if made is None:
                continue
            samples = list(made)
        yield _family(metric, samples, run)


def _time(status: Status) -> Samples:
    return _one(status.time)


def _verdict(status: Status) -> Samples:
    return [((word.value,), float(status.verdict is word)) for word in VerdictWord]


def _may_sleep(status: Status) -> Samples:
    return _yes_or_no(status.may_sleep)


def _findings(status: Status) -> Samples:
    found = [finding.severity for finding in status.findings]
    return [((severity,), float(found.count(severity))) for severity in SEVERITIES]


def _alerts_open(status: Status) -> Samples | None:
    if status.alerts is None:
        return None
    return [
        ((severity, owned), float(sum(_is(alert, severity, owned) for alert in status.alerts)))
        for severity in SEVERITIES
        for owned in ("yes", "no")
    ]


def _is(alert: Alert, severity: str, owned: str) -> bool:
    has = "no"
    if alert.holder:
        has = "yes"
    return alert.severity.name.lower() == severity and has == owned


def _kill_switch(status: Status) -> Samples | None:
    if status.kill_switch is None:
        return None
    return _yes_or_no(status.kill_switch.is_set)


def _jobs(status: Status) -> Samples | None:
    if status.jobs is None:
        return None
    states = sorted({job.state for job in status.jobs})
    return [
        ((state,), float(sum(tasks_of(job) for job in status.jobs if job.state == state)))
        for state in states
    ]


def _nodes(status: Status) -> Samples | None:
    if status.nodes is None:
        return None
    return [((node,), 1.0) for node in status.nodes]


def _excluded(status: Status) -> Samples | None:
    if status.exclusions is None:
        return None
    standing = {entry.node: entry.state for entry in status.exclusions}
    return [((node, state), 1.0) for node, state in sorted(standing.items())]


def _periodic_age(status: Status) -> Samples:
    jobs = [shown.job for shown in status.periodic_jobs or ()]
    return [((job.name,), status.time - job.started) for job in jobs]


def _periodic_failures(status: Status) -> Samples:
    jobs = [shown.job for shown in status.periodic_jobs or ()]
    return [((job.name,), float(job.failures_in_a_row)) for job in jobs]


def _periodic_late(status: Status) -> Samples:
    return [((shown.job.name,), float(shown.late)) for shown in status.periodic_jobs or ()]


def _filesystem_used(status: Status) -> Samples:
    return [
        ((disk.usage.name, kind), percent)
        for disk in status.filesystems or ()
        for kind in KINDS
        if (percent := disk.usage.percent(kind)) is not None
    ]


def _filesystem_full(status: Status) -> Samples:
    return [
        ((disk.usage.name,), until)
        for disk in status.filesystems or ()
        if (until := disk.full_at) is not None
    ]


def _drill_passed(status: Status) -> Samples:
    if status.restore_drill is None:
        return []
    return _yes_or_no(status.restore_drill.passed)


def _unknown(status: Status) -> Samples:
    return [((what,), 1.0) for what in unknown_whats(status.unknown)]


# of the metrics that are no plain number of the status; None: not even the name is written
SAMPLES: Mapping[str, Callable[[Status], Samples | None]] = {
    "tr11_time_seconds": _time,
    "tr11_verdict": _verdict,
    "tr11_may_sleep": _may_sleep,
    "tr11_findings": _findings,
    "tr11_alerts_open": _alerts_open,
    "tr11_kill_switch": _kill_switch,
    "tr11_jobs": _jobs,
    "tr11_node": _nodes,
    "tr11_node_excluded": _excluded,
    "tr11_periodic_age_seconds": _periodic_age,
    "tr11_periodic_failures": _periodic_failures,
    "tr11_periodic_late": _periodic_late,
    "tr11_filesystem_used_percent": _filesystem_used,
    "tr11_filesystem_full_seconds": _filesystem_full,
    "tr11_restore_drill_passed": _drill_passed,
    "tr11_unknown": _unknown,
}


def unknown_whats(lines: Iterable[str]) -> list[str]:
    """What the status's lines of `unknown` are about; what has no name of its own is "other"."""
    names = (name.replace(" ", "_") for line in lines for name in unknown_names(line))
    return sorted({name if name in WHATS else OTHER for name in names})


# ----------------------------------------------------------------------------- how
def _at(status: Status, path: str) -> float | None:
    value: object = status
    for name in path.split("."):
        if value is None:
            value = None
        else:
            value = getattr(value, name)
    if not isinstance(value, int | float):
        return None
    if path.endswith(".time"):
        return status.age(value)
    return value


def _one(value: float | None) -> Samples:
    if value is None:
        return []
    return [((), value)]


def _yes_or_no(value: bool | None) -> Samples:
    if value is None:
        return []
    return [((), float(value))]


def _family(metric: Metric, samples: Samples, run: tuple[str, str]) -> GaugeMetricFamily:
    labels = ("run", "variant", *metric.labels)
    family = GaugeMetricFamily(metric.name, metric.words, labels=labels)
    for values, value in samples:
        if math.isfinite(value):
            family.add_metric([*map(_printable, (*run, *values))], value)
    return family


def _printable(text: str) -> str:
    """A label that can be encoded: file systems' and jobs' names may hold halves of characters."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


class StatusCollector:
    """Gives Prometheus' own client the metrics of the status that `status_now` gives when it asks.

    Where that fails there is one metric: `tr11_unknown{what="look"}` of this `run` (name, variant).
    """

    def __init__(self, status_now: Callable[[], Status], run: tuple[str, str]) -> None:
        self._status_now = status_now
        self._run = run

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Called by the client at each scrape."""
        try:
            return tuple(families(self._status_now()))
        except Exception:  # the client would answer with a traceback
            return (_family(BY_NAME["tr11_unknown"], [((LOOK,), 1.0)], self._run),)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: so that registering does not look at the run."""
        return ()


def exposition(status: Status, is_open_metrics: bool = False) -> str:
    """The text that a textfile collector reads; else OpenMetrics, which ends in `# EOF`."""
    from prometheus_client.openmetrics.exposition import generate_latest as open_metrics

    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status, ("", "")))
    if is_open_metrics:
        text: bytes = open_metrics(registry)  # type: ignore[no-untyped-call]
        return text.decode("utf-8")
    return generate_latest(registry).decode("utf-8")


def serve(
    status_now: Callable[[], Status], host: str, port: int, run: tuple[str, str]
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics in threads of their own; returns the port and what ends it. Raises OSError as
    the network does.

    `status_now` is called at each scrape; `run` (name, variant) is for a scrape at which that
    fails.
    """
    registry = CollectorRegistry()
    registry.register(StatusCollector(status_now, run))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, end
