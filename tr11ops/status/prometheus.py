"""The status as metrics for Prometheus: what `tr11 status --prometheus` writes and serves. The
names are documented in docs/status.md, and stay.

A value that is not known has no sample: a number that stands for "unknown" would be drawn and
alerted on. What could not be observed is `tr11_unknown{what="..."} 1` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from tr11ops.rundir.disk_usage import KINDS
from tr11ops.status.document import Status, tasks_of, unknown_names
from tr11ops.watchdog.verdict import VerdictWord

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

    from tr11ops.alerts.state import Alert

# name -> (help, what of the status); one plain number each, labelled with run and variant; of a
# `time` its age
NUMBERS: Mapping[str, tuple[str, str]] = {
    "tr11_iteration": ("Last finished iteration.", "iteration"),
    "tr11_iterations_planned": ("Iterations of the whole training.", "total_iterations"),
    "tr11_loss": (
        "Language-model loss of the last logged step; absent when it was not a number.",
        "loss",
    ),
    "tr11_seconds_per_iteration": ("Median time of the recent steps.", "seconds_per_iteration"),
    "tr11_tflops": ("TFLOPs of a worker in the last step.", "tflops"),
    "tr11_throughput_best_percent": (
        "Throughput of the recent steps, of the best.",
        "throughput.percent",
    ),
    "tr11_learning_rate": ("Learning rate of the last step.", "learning_rate"),
    "tr11_global_batch_size": ("Samples in the last step.", "global_batch_size"),
    "tr11_consumed_samples": ("Samples since the start of the training.", "consumed_samples"),
    "tr11_consumed_tokens": ("Tokens since the start of the training.", "consumed_tokens"),
    "tr11_remaining_seconds": (
        "Training time to go at the recent pace, nothing in between.",
        "remaining_seconds",
    ),
    "tr11_finish_likely_seconds": ("Time to go as the last weeks went.", "finish.likely_seconds"),
    "tr11_queue_coverage_seconds": (
        "Training time in the running and queued tasks.",
        "queue_coverage_seconds",
    ),
    "tr11_nodes_used": ("Nodes that the running launch trains on.", "node_use.used"),
    "tr11_nodes_spare": ("Nodes that the run holds beside these.", "node_use.spare"),
    "tr11_nodes_excluded": ("Nodes that the run must not use.", "node_use.excluded"),
    "tr11_checkpoint_step": ("Step of the newest whole checkpoint.", "last_checkpoint.step"),
    "tr11_checkpoint_age_seconds": (
        "Age of the newest whole checkpoint.",
        "last_checkpoint.age_seconds",
    ),
    "tr11_checkpoint_due_seconds": ("Time until the next save is due.", "next_checkpoint.seconds"),
    "tr11_backup_age_seconds": ("Age of the last verified backup.", "backup.time"),
    "tr11_backup_step": ("Step of the last verified backup.", "backup.step"),
    "tr11_sync_age_seconds": ("Age of the last copy of the logs.", "sync.time"),
    "tr11_copies_missing": (
        "Copies of checkpoints that the card wants and that are not there.",
        "copies_missing",
    ),
    "tr11_copies_damaged": ("Copies that were found damaged.", "copies_damaged"),
    "tr11_restore_drill_age_seconds": (
        "Age of the last restore that was tried.",
        "restore_drill.time",
    ),
    "tr11_exit_code": (
        "What `tr11 status` returns: 0 fine, 1 needs a person, 3 not observed.",
        "exit_code",
    ),
}
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
    }
)
OTHER = "other"
LOOK = "look"  # at all
UNKNOWN_HELP = "1 for what could not be observed."


def families(status: Status) -> Iterator[GaugeMetricFamily]:
    """Every metric of one status (`tr11ops.status.document`)."""
    run = (status.run.name, status.run.variant)
    for name, (words, path) in NUMBERS.items():
        value = _at(status, path)
        if value is not None and math.isfinite(value):  # else not even its name
            yield _family(name, words, labels=(), samples=[((), float(value))], run=run)
    yield _family(
        "tr11_time_seconds",
        "When the run was looked at.",
        labels=(),
        samples=_one(status.time),
        run=run,
    )
    verdicts = [((word.value,), float(status.verdict is word)) for word in VerdictWord]
    yield _family(
        "tr11_verdict",
        "1 for the verdict's word, 0 for all others.",
        labels=("word",),
        samples=verdicts,
        run=run,
    )
    if status.may_sleep is None:
        sleep = None
    else:
        sleep = float(status.may_sleep)
    yield _family(
        "tr11_may_sleep",
        "1: no one needs to get up; absent: it cannot be told.",
        labels=(),
        samples=_one(sleep),
        run=run,
    )
    yield from _state(status, run)
    yield from _operation(status, run)
    unknown = [((what,), 1.0) for what in unknown_whats(status.unknown)]
    yield _family("tr11_unknown", UNKNOWN_HELP, labels=("what",), samples=unknown, run=run)


def _state(status: Status, run: tuple[str, str]) -> Iterator[GaugeMetricFamily]:
    found = [finding.severity for finding in status.findings]
    counts = [((severity,), float(found.count(severity))) for severity in SEVERITIES]
    yield _family(
        "tr11_findings",
        "Faults that this look found.",
        labels=("severity",),
        samples=counts,
        run=run,
    )
    if status.alerts is not None:
        alerts = [
            ((severity, owned), float(sum(_is(alert, severity, owned) for alert in status.alerts)))
            for severity in SEVERITIES
            for owned in ("yes", "no")
        ]
        yield _family(
            "tr11_alerts_open",
            "Open alerts, by whether someone has them.",
            labels=("severity", "owned"),
            samples=alerts,
            run=run,
        )
    if status.kill_switch is not None:
        yield _family(
            "tr11_kill_switch",
            "1: the kill switch is set.",
            labels=(),
            samples=_one(float(status.kill_switch.is_set)),
            run=run,
        )
    if status.jobs is not None:
        states = sorted({job.state for job in status.jobs})
        jobs = [
            ((state,), float(sum(tasks_of(job) for job in status.jobs if job.state == state)))
            for state in states
        ]
        yield _family(
            "tr11_jobs",
            "Jobs and array tasks of the run, by Slurm's word.",
            labels=("state",),
            samples=jobs,
            run=run,
        )


def _is(alert: Alert, severity: str, owned: str) -> bool:
    if alert.owner or alert.acknowledged_by:
        has = "yes"
    else:
        has = "no"
    return alert.severity.name.lower() == severity and has == owned


def _operation(status: Status, run: tuple[str, str]) -> Iterator[GaugeMetricFamily]:
    now = status.time
    periodic = status.periodic_jobs or ()
    jobs = [shown.job for shown in periodic]
    started = [((job.name,), now - job.started) for job in jobs]
    yield _family(
        "tr11_periodic_age_seconds",
        "Since the last start of a periodic job.",
        labels=("job",),
        samples=started,
        run=run,
    )
    failures = [((job.name,), float(job.failures_in_a_row)) for job in jobs]
    yield _family(
        "tr11_periodic_failures",
        "Failed rounds of a periodic job in a row.",
        labels=("job",),
        samples=failures,
        run=run,
    )
    late = [((shown.job.name,), float(shown.late)) for shown in periodic]
    yield _family(
        "tr11_periodic_late",
        "1: a round of a periodic job was left out.",
        labels=("job",),
        samples=late,
        run=run,
    )
    disks = status.filesystems or ()
    used = [
        ((disk.usage.name, kind), percent)
        for disk in disks
        for kind in KINDS
        if (percent := disk.usage.percent(kind)) is not None
    ]
    yield _family(
        "tr11_filesystem_used_percent",
        "Of the limit, in bytes and in inodes.",
        labels=("name", "kind"),
        samples=used,
        run=run,
    )
    drill = status.restore_drill
    if drill is None:
        passed = None
    else:
        passed = float(drill.passed)
    yield _family(
        "tr11_restore_drill_passed",
        "1: the last restore that was tried passed.",
        labels=(),
        samples=_one(passed),
        run=run,
    )
    full = [((disk.usage.name,), until) for disk in disks if (until := disk.full_at) is not None]
    yield _family(
        "tr11_filesystem_full_seconds",
        "When it will be full, at its trend.",
        labels=("name",),
        samples=full,
        run=run,
    )


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


def _one(value: float | None) -> list[tuple[tuple[str, ...], float]]:
    if value is None:
        return []
    return [((), value)]


def _family(
    name: str,
    words: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], float]],
    run: tuple[str, str],
) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, words, labels=("run", "variant", *labels))
    for values, value in samples:
        if math.isfinite(value):
            family.add_metric([*run, *map(_printable, values)], value)
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
            return (
                _family(
                    "tr11_unknown",
                    UNKNOWN_HELP,
                    labels=("what",),
                    samples=[((LOOK,), 1.0)],
                    run=self._run,
                ),
            )

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: so that registering does not look at the run."""
        return ()


def exposition(status: Status) -> str:
    """The text that a textfile collector reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status, ("", "")))
    return generate_latest(registry).decode("utf-8")


def serve(
    status_now: Callable[[], Status], host: str, port: int, run: tuple[str, str]
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics in threads of their own; returns the port and what ends it. Raises OSError as
    the network does.

    `status_now` is called at each scrape; `run` (name, variant) is for a scrape at which that
    fails.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(StatusCollector(status_now, run))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, end
