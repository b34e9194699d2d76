"""Every metric of a run for Prometheus: its name, its help, where it comes from, in which unit, and
which alerts rest on it. The exposition, the dashboard and the alert rules are all made from this
one table. The names stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trainer.contract.record import Record

Unit = Literal["", "s", "moment", "percent", "yes-no", "tokens", "samples"]


class Metric(Record):
    """One gauge. Each has the labels `run` and `variant`, and `labels` besides.

    `words` is the help. `path`: the field of the status it is, of a `time` its age; "" where
    `tr11ops.status.prometheus` makes the samples. `unit` "moment" is seconds since the epoch.
    """

    name: str
    words: str
    path: str = ""
    labels: tuple[str, ...] = ()
    unit: Unit = ""


class AlertRule(Record):
    """An alert over metrics of the table: `expression` is PromQL and has to hold for `wait`.

    `severity` is "critical" (a person now) or "warning" (in working hours); `runbook` a page of
    `runbooks/`.
    """

    name: str
    expression: str
    wait: str
    summary: str
    runbook: str
    severity: Literal["critical", "warning"] = "warning"


METRICS: tuple[Metric, ...] = (
    Metric("tr11_iteration", "Last finished iteration.", "iteration"),
    Metric("tr11_iterations_planned", "Iterations of the whole training.", "total_iterations"),
    Metric(
        "tr11_loss",
        "Language-model loss of the last logged step; absent when it was not a number.",
        "loss",
    ),
    Metric(
        "tr11_seconds_per_iteration",
        "Median time of the recent steps.",
        "seconds_per_iteration",
        unit="s",
    ),
    Metric("tr11_tflops", "TFLOPs of a worker in the last step.", "tflops"),
    Metric(
        "tr11_throughput_best_percent",
        "Throughput of the recent steps, of the best.",
        "throughput.percent",
        unit="percent",
    ),
    Metric("tr11_learning_rate", "Learning rate of the last step.", "learning_rate"),
    Metric("tr11_grad_norm", "Gradient norm of the last step.", "grad_norm"),
    Metric(
        "tr11_global_batch_size", "Samples in the last step.", "global_batch_size", unit="samples"
    ),
    Metric(
        "tr11_consumed_samples",
        "Samples since the start of the training.",
        "consumed_samples",
        unit="samples",
    ),
    Metric(
        "tr11_consumed_tokens",
        "Tokens since the start of the training.",
        "consumed_tokens",
        unit="tokens",
    ),
    Metric(
        "tr11_remaining_seconds",
        "Training time to go at the recent pace, nothing in between.",
        "remaining_seconds",
        unit="s",
    ),
    Metric(
        "tr11_finish_likely_seconds",
        "Time to go as the last weeks went.",
        "finish.likely_seconds",
        unit="s",
    ),
    Metric(
        "tr11_queue_coverage_seconds",
        "Training time in the running and queued tasks.",
        "queue_coverage_seconds",
        unit="s",
    ),
    Metric("tr11_nodes_used", "Nodes that the running launch trains on.", "node_use.used"),
    Metric("tr11_nodes_spare", "Nodes that the run holds beside these.", "node_use.spare"),
    Metric("tr11_nodes_excluded", "Nodes that the run must not use.", "node_use.excluded"),
    Metric("tr11_checkpoint_step", "Step of the newest whole checkpoint.", "last_checkpoint.step"),
    Metric(
        "tr11_checkpoint_age_seconds",
        "Age of the newest whole checkpoint.",
        "last_checkpoint.age_seconds",
        unit="s",
    ),
    Metric(
        "tr11_checkpoint_due_seconds",
        "Time until the next save is due.",
        "next_checkpoint.seconds",
        unit="s",
    ),
    Metric("tr11_backup_age_seconds", "Age of the last verified backup.", "backup.time", unit="s"),
    Metric("tr11_backup_step", "Step of the last verified backup.", "backup.step"),
    Metric("tr11_sync_age_seconds", "Age of the last copy of the logs.", "sync.time", unit="s"),
    Metric(
        "tr11_copies_missing",
        "Copies of checkpoints that the card wants and that are not there.",
        "copies_missing",
    ),
    Metric("tr11_copies_damaged", "Copies that were found damaged.", "copies_damaged"),
    Metric(
        "tr11_restore_drill_age_seconds",
        "Age of the last restore that was tried.",
        "restore_drill.time",
        unit="s",
    ),
    Metric(
        "tr11_exit_code",
        "What `tr11 status` returns: 0 fine, 1 needs a person, 3 not observed.",
        "exit_code",
    ),
    Metric("tr11_time_seconds", "When the run was looked at.", unit="moment"),
    Metric("tr11_verdict", "1 for the verdict's word, 0 for all others.", labels=("word",)),
    Metric(
        "tr11_may_sleep",
        "1: no one needs to get up; absent: it cannot be told.",
        unit="yes-no",
    ),
    Metric("tr11_findings", "Faults that this look found.", labels=("severity",)),
    Metric(
        "tr11_alerts_open",
        "Open alerts, by whether someone has them.",
        labels=("severity", "owned"),
    ),
    Metric("tr11_kill_switch", "1: the kill switch is set.", unit="yes-no"),
    Metric("tr11_jobs", "Jobs and array tasks of the run, by Slurm's word.", labels=("state",)),
    Metric("tr11_node", "1 for each node that the run holds now.", labels=("node",)),
    Metric(
        "tr11_node_excluded",
        "1 for each node on the run's list, by how it stands there.",
        labels=("node", "state"),
    ),
    Metric(
        "tr11_periodic_age_seconds",
        "Since the last start of a periodic job.",
        labels=("job",),
        unit="s",
    ),
    Metric("tr11_periodic_failures", "Failed rounds of a periodic job in a row.", labels=("job",)),
    Metric(
        "tr11_periodic_late",
        "1: a round of a periodic job was left out.",
        labels=("job",),
        unit="yes-no",
    ),
    Metric(
        "tr11_filesystem_used_percent",
        "Of the limit, in bytes and in inodes.",
        labels=("name", "kind"),
        unit="percent",
    ),
    Metric(
        "tr11_restore_drill_passed",
        "1: the last restore that was tried passed.",
        unit="yes-no",
    ),
    Metric(
        "tr11_filesystem_full_seconds",
        "When it will be full, at its trend.",
        labels=("name",),
        unit="moment",
    ),
    Metric("tr11_unknown", "1 for what could not be observed.", labels=("what",)),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

# no one has to look at it any more
_FINISHED = 'max_over_time(tr11_verdict{word="finished"}[1d]) == 1'
# What tr11 finds it tells by `tr11_exit_code` and `tr11_findings`, with bounds that the card sets;
# here stands what only a server beside it sees (no look at all), and what is worth a page of its own.
ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "Tr11NeedsPerson",
        expression="(tr11_exit_code == 1) * on (run, variant) group_left (word) (tr11_verdict == 1)",
        wait="5m",
        severity="critical",
        summary="{{ $labels.run }}/{{ $labels.variant }} is {{ $labels.word }} and needs a person",
        runbook="down",
    ),
    AlertRule(
        "Tr11NotObserved",
        expression="tr11_exit_code == 3",
        wait="30m",
        summary="{{ $labels.run }}/{{ $labels.variant }} could not be observed for half an hour",
        runbook="directory-unseen",
    ),
    AlertRule(
        "Tr11NoNewLook",
        expression=f"time() - tr11_time_seconds > 900 unless on (run, variant) ({_FINISHED})",
        wait="5m",
        severity="critical",
        summary="no one has looked at {{ $labels.run }}/{{ $labels.variant }} for {{ $value | humanizeDuration }}",
        runbook="cron-dead",
    ),
    AlertRule(
        "Tr11MetricsGone",
        expression="last_over_time(tr11_time_seconds[1d]) unless on (run, variant) tr11_time_seconds"
        f" unless on (run, variant) ({_FINISHED})",
        wait="10m",
        severity="critical",
        summary="the metrics of {{ $labels.run }}/{{ $labels.variant }} were there within a day and are gone",
        runbook="cron-dead",
    ),
    AlertRule(
        "Tr11SleepUnknown",
        expression="tr11_time_seconds unless tr11_may_sleep",
        wait="30m",
        summary="whether {{ $labels.run }}/{{ $labels.variant }} may be left alone cannot be told",
        runbook="directory-unseen",
    ),
    AlertRule(
        "Tr11MayNotSleep",
        expression="tr11_may_sleep == 0 and on (run, variant) tr11_exit_code == 0",
        wait="15m",
        summary="{{ $labels.run }}/{{ $labels.variant }} runs, but something a quiet night needs is missing",
        runbook="stopped",
    ),
    AlertRule(
        "Tr11AlertUnowned",
        expression='tr11_alerts_open{severity="critical",owned="no"} > 0',
        wait="15m",
        severity="critical",
        summary="{{ $value }} critical alerts of {{ $labels.run }}/{{ $labels.variant }} are no one's",
        runbook="down",
    ),
    AlertRule(
        "Tr11Warnings",
        expression='tr11_findings{severity="warning"} > 0',
        wait="1h",
        summary="{{ $value }} warnings of {{ $labels.run }}/{{ $labels.variant }} have stood for an hour",
        runbook="check-failing",
    ),
    AlertRule(
        "Tr11Slow",
        expression="tr11_throughput_best_percent < 80",
        wait="1h",
        summary='{{ $labels.run }}/{{ $labels.variant }} trains at {{ $value | printf "%.0f" }} % of its best',
        runbook="slow",
    ),
    AlertRule(
        "Tr11QueueRunsOut",
        expression="tr11_queue_coverage_seconds < 6 * 3600 and tr11_queue_coverage_seconds < tr11_remaining_seconds",
        wait="30m",
        summary="jobs of {{ $labels.run }}/{{ $labels.variant }} cover only {{ $value | humanizeDuration }} more",
        runbook="chain-end",
    ),
    AlertRule(
        "Tr11CopyDamaged",
        expression="tr11_copies_damaged > 0",
        wait="5m",
        severity="critical",
        summary="{{ $value }} copies of {{ $labels.run }}/{{ $labels.variant }} are damaged",
        runbook="copy-damaged",
    ),
    AlertRule(
        "Tr11RestoreDrillFailed",
        expression="tr11_restore_drill_passed == 0",
        wait="5m",
        summary="the last restore of {{ $labels.run }}/{{ $labels.variant }} that was tried failed",
        runbook="copy-damaged",
    ),
    AlertRule(
        "Tr11PeriodicJobFails",
        expression="tr11_periodic_failures >= 3 or tr11_periodic_late == 1",
        wait="15m",
        summary="the periodic job {{ $labels.job }} of {{ $labels.run }}/{{ $labels.variant }} fails or is late",
        runbook="periodic-job-failed",
    ),
    AlertRule(
        "Tr11FilesystemFull",
        expression="tr11_filesystem_full_seconds - time() < 86400",
        wait="30m",
        summary="{{ $labels.name }} is full in {{ $value | humanizeDuration }} at its trend",
        runbook="filesystem-full",
    ),
    AlertRule(
        "Tr11KillSwitchLeftOn",
        expression="tr11_kill_switch == 1",
        wait="12h",
        summary="the kill switch of {{ $labels.run }}/{{ $labels.variant }} has been set for half a day",
        runbook="kill-switch-left-on",
    ),
)
