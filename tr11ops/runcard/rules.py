"""Rules of the operation's sections that span several keys: refusals, and warnings that leave a
choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tr11ops.base.errors import WrongUsage
from tr11ops.runcard.kinds import ForeignCard, OwnCard, RunCard
from tr11ops.runcard.load import environment_secrets
from trainer.config.card import ParallelSection, Problem
from trainer.config.model import UNCUT_FAMILIES, WHAT_IT_COST, std_advice, uneven_lengths
from trainer.config.rules import Rule
from trainer.contract.record import JsonObject
from trainer.schedule.flops import busiest_stage, stage_layout

# A save of the 2.3 TB checkpoint took 40 s and an evaluation of 29 groups 12 minutes on 48 nodes.
LONG_ATTEMPT_SECONDS = 4 * 3600
MARGIN_WITH_EVALUATION_SECONDS = 15 * 60
MARGIN_SECONDS = 60
# by which a stage may exceed the mean before it is worth a word: the 176B training's does by 0.03
UNEVEN_SHARE = 0.1
# Slurm's early signal came up to a minute off its time; later by as much is allowed for
SIGNAL_SLACK_SECONDS = 60

INTERFACES = "GLOO_SOCKET_IFNAME"
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def operation_rules(card: RunCard) -> tuple[Rule, ...]:
    """What refuses the card beyond `trainer.schedule.rules.cross_rules`, one by one."""
    return (
        lambda: _worker_problems(card),
        lambda: _environment_problems(card),
        lambda: _alert_problems(card),
        lambda: _exit_problems(card),
        lambda: _job_problems(card),
        lambda: _option_problems(card),
        lambda: _trainer_problems(card),
        lambda: _save_problems(card),
    )


def knows_weights(section: JsonObject) -> bool:
    """Whether a [trainer] table tells which files of a checkpoint are its weights; True for one that
    is wrong, of which its own rule tells.
    """
    from tr11ops.dialects.settings import settings_of

    try:
        rules = settings_of(section, "the card").dialect.checkpoints
    except WrongUsage:
        return True
    return rules is not None and bool(rules.weights)


def _trainer_problems(card: RunCard) -> Iterator[Problem]:
    """A [trainer] section whose dialect is none, or that says of it what no dialect can."""
    if not isinstance(card, ForeignCard):
        return

    section = card.trainer
    try:
        _ = card.settings
    except WrongUsage as fault:
        text = str(fault).removeprefix("the card: [trainer]").lstrip(": ")
        yield Problem("trainer", None, text, "see docs/how-to/trainers.md")
    interval = card.backup.weights_interval
    if interval and not knows_weights(section.model_dump()):
        rule = "copies weights alone, and the dialect does not say which files they are"
        fix = "set it to 0, or say which with trainer.checkpoints.weights"
        yield Problem("backup.weights_interval", interval, rule, fix)
    if section.start == "watch" and card.watch.act:
        rule = "cannot be true for a job of someone else, which is watched alone"
        yield Problem("watch.act", True, rule, "leave it out")
    if section.hold and (section.start != "watch" or not section.folder):
        rule = 'is for a job that is only watched (start = "watch"), whose folder is known'
        yield Problem("trainer.hold", True, rule, "leave it out, or set trainer.folder")
    for name in sorted({*section.environment, *section.unset}):
        if not _VARIABLE_NAME.fullmatch(name):
            rule = "is not a name that a shell accepts"
            yield Problem(f"trainer.environment.{name}", None, rule, "use letters, digits and _")
    yield from environment_secrets({"trainer": {"environment": section.environment}})


def _exit_problems(card: RunCard) -> Iterator[Problem]:
    minutes, limit = card.run.exit_duration_minutes, card.time_limit_seconds
    if minutes is not None and minutes * 60 >= limit:
        rule = f"must be below slurm.time_limit ({card.slurm.time_limit} = {limit / 60:g} minutes), or nothing is saved"
        yield Problem(
            "run.exit_duration_minutes",
            minutes,
            rule,
            f"use {advised_exit_minutes(limit):g} or less",
        )


def _save_problems(card: RunCard) -> Iterator[Problem]:
    """Saves that no one can make more often, or that no one would remove."""
    key, backup = "resilience.adapt_save_interval", card.backup
    if not card.resilience.adapt_save_interval:
        return
    if not isinstance(card, OwnCard):
        rule = "is for tr11's own trainer: another one saves as its own options say"
        yield Problem(key, True, rule, "leave it out")
    elif card.checkpoint.interval is None:
        rule = "needs checkpoint.interval: its multiples are those that are kept and copied"
        yield Problem(key, True, rule, "say how many iterations a crash may cost at most")
    elif not backup.prune or not (backup.has_store or backup.has_url):
        rule = "needs rounds that remove old checkpoints, or the disk fills"
        yield Problem(key, True, rule, "set backup.prune = true with backup.store or backup.url")


def _job_problems(card: RunCard) -> Iterator[Problem]:
    """Numbers of [slurm] that do not go together."""
    least, most = card.slurm.least_spare_nodes, card.slurm.spare_nodes
    if least is not None and least > most:
        rule = f"must be at most slurm.spare_nodes ({most})"
        yield Problem("slurm.least_spare_nodes", least, rule, "lower it, or leave it out")
    early, limit = card.slurm.signal_seconds_before_limit, card.time_limit_seconds
    if early is not None and early >= limit:
        rule = f"must be below slurm.time_limit ({limit} seconds)"
        yield Problem("slurm.signal_seconds_before_limit", early, rule, "lower it")


def _option_problems(card: RunCard) -> Iterator[Problem]:
    """Options of sbatch that are not passed through: tr11 sets them itself, or could not follow the
    job.
    """
    if not card.slurm.options:
        return
    from tr11ops.cluster.sbatch_options import gpu_fault, option_fault, options_of, segment_fault

    options = options_of(card.slurm.options)
    for name, value in options:
        fault = option_fault(name, value)
        if fault is not None:
            yield Problem(f"slurm.options.{name}", value or True, *fault)
    segment = segment_fault(options, card.slurm.least_nodes, card.slurm.allocated_nodes)
    if segment is not None:
        yield Problem("slurm.options.segment", dict(options)["segment"], *segment)
    gpus = gpu_fault(options, card.slurm.gpus_per_node)
    if gpus is not None:
        name, rule, fix = gpus
        yield Problem(f"slurm.options.{name}", dict(options)[name], rule, fix)


def card_warnings(card: RunCard) -> list[Problem]:
    """What a sound card still risks; shown, never a refusal."""
    if not isinstance(card, OwnCard):
        return _exit_warnings(card)
    return [
        *_initial_warnings(card),
        *_stage_warnings(card),
        *_sequence_warnings(card),
        *_exit_warnings(card),
    ]


def _initial_warnings(card: OwnCard) -> Iterator[Problem]:
    """Initial weights far too large for the width."""
    advice = ""
    if card.model.init_method == "normal":
        advice = std_advice(card.model.init_std, card.model.hidden_size)
    if advice:
        rule = f"is large for {card.model.hidden_size} columns: {WHAT_IT_COST}"
        yield Problem("model.init_std", card.model.init_std, rule, f"use {advice}")


def _stage_warnings(card: OwnCard) -> Iterator[Problem]:
    """Pipeline stages with different numbers of blocks, where one with more of them holds the
    others up.
    """
    excess = _uneven_share(card)
    if excess > UNEVEN_SHARE:
        rule = f"gives some pipeline stages more blocks: a step takes {excess:.0%} longer than with even ones"
        yield Problem("model.layers", card.model.layers, rule, _even_layers(card))


def _uneven_share(card: OwnCard) -> float:
    """How much longer a step is where a stage has more blocks than another; 0 where that is not
    why, or not known.
    """
    stages = stage_layout(card)
    if not stages:
        return 0.0
    excess, for_blocks = busiest_stage(card, stages)
    if for_blocks:
        return excess
    return 0.0


def _even_layers(card: OwnCard) -> str:
    """The numbers of layers on both sides whose stages are even, for the card's partition, else by
    blocks alone.
    """
    layers, stages = card.model.layers, card.parallel.pipeline

    def is_even(count: int, parallel: ParallelSection) -> bool:
        model = card.model.model_copy(update={"layers": count, "recompute_blocks": None})
        other = card.model_copy(update={"model": model, "parallel": parallel})
        return stage_layout(other) is not None and _uneven_share(other) <= UNEVEN_SHARE

    for partition in (card.parallel.partition, "type:transformer"):
        parallel = card.parallel.model_copy(update={"partition": partition})
        fewer = next(
            (count for count in range(layers - 1, stages - 1, -1) if is_even(count, parallel)), None
        )
        more = next(
            (count for count in range(layers + 1, layers + 2 * stages) if is_even(count, parallel)),
            None,
        )
        found = [str(count) for count in (fewer, more) if count is not None]
        if found:
            also = ""
            if partition != card.parallel.partition:
                also = f' with parallel.partition = "{partition}"'
            return f"use {' or '.join(found)}{also}"
    return "use fewer stages or more layers"


def _sequence_warnings(card: OwnCard) -> Iterator[Problem]:
    """Lengths that keep sequence parallelism off."""
    tensor = card.parallel.tensor
    if tensor == 1 or card.parallel.sequence_parallel or card.model.partition_activations:
        return
    if card.model.family in UNCUT_FAMILIES:
        return
    if card.curriculum is None:
        curriculum = {}
    else:
        curriculum = card.curriculum.model_dump()
    for section, key, value in uneven_lengths(tensor, card.model.model_dump(), curriculum):
        rule = f"is not divisible by parallel.tensor ({tensor}): parallel.sequence_parallel is off"
        yield Problem(
            f"{section}.{key}",
            value,
            rule,
            "use multiples of it for less memory and fewer bytes sent",
        )


def _exit_warnings(card: RunCard) -> list[Problem]:
    """The margins at the end of an attempt."""
    limit = card.time_limit_seconds
    minutes = card.run.exit_duration_minutes
    early = card.slurm.signal_seconds_before_limit
    key = "run.exit_duration_minutes"
    fix = f"use {advised_exit_minutes(limit):g}"
    if minutes is None:
        if early is None and card.run.exit_interval is None:
            rule = "is not set: Slurm ends each attempt at its time limit without a last checkpoint"
            return [Problem(key, None, rule, fix)]
        return []
    margin = max(limit - minutes * 60, (early or 0) - SIGNAL_SLACK_SECONDS)
    evaluates = (
        isinstance(card, OwnCard)
        and card.evaluation.iterations > 0
        and limit >= LONG_ATTEMPT_SECONDS
    )
    wanted = MARGIN_WITH_EVALUATION_SECONDS if evaluates else MARGIN_SECONDS
    if margin >= wanted:
        return []
    rule = f"leaves {margin / 60:g} minutes before the time limit"
    rule += ", less than one evaluation may take" if evaluates else ", less than a save may take"
    return [Problem(key, minutes, rule, fix)]


def advised_exit_minutes(limit: int) -> float:
    """An exit minute with room for an evaluation and a save before `limit` (seconds)."""
    margin = (
        MARGIN_WITH_EVALUATION_SECONDS if limit >= LONG_ATTEMPT_SECONDS else min(limit / 4, 5 * 60)
    )
    return (limit - margin) / 60


def _worker_problems(card: RunCard) -> list[Problem]:
    slurm = card.slurm
    if slurm.workers == 0:
        rule = "is missing, and slurm.gpus_per_node is 0"
        return [Problem("slurm.workers_per_node", None, rule, "set one of the two")]
    if 0 < slurm.gpus_per_node < slurm.workers:
        rule = f"must not exceed slurm.gpus_per_node ({slurm.gpus_per_node}): a worker needs its own GPU"
        return [
            Problem("slurm.workers_per_node", slurm.workers, rule, f"use {slurm.gpus_per_node}")
        ]
    if slurm.gpu_kind is not None and not _is_known_gpu(slurm.gpu_kind):
        fix = "use a name like V100, A100 or H100"
        return [
            Problem("slurm.gpu_kind", slurm.gpu_kind, "is no kind of GPU whose rate is known", fix)
        ]
    return []


def _is_known_gpu(kind: str) -> bool:
    from trainer.schedule.devices import device_peak

    return device_peak(kind) is not None


def _environment_problems(card: RunCard) -> list[Problem]:
    problems = []
    for name in card.slurm.environment:
        if not _VARIABLE_NAME.fullmatch(name):
            rule = "is not a name that a shell accepts"
            fix = "use letters, digits and _"
            problems.append(Problem(f"slurm.environment.{name}", None, rule, fix))
    problems += environment_secrets({"slurm": {"environment": card.slurm.environment}})
    return [*problems, *_interface_problems(card)]


def _interface_problems(card: RunCard) -> Iterator[Problem]:
    """gloo takes names alone; NCCL's `=ib0`, `^lo` would end every attempt on its nodes, when the
    ranks connect.
    """
    key, value = INTERFACES, card.slurm.environment.get(INTERFACES)
    if value is not None and not re.fullmatch(
        r"[A-Za-z0-9_.:-]{1,15}(,[A-Za-z0-9_.:-]{1,15})*", value
    ):
        rule = "must name network interfaces with commas between them; gloo knows neither = nor ^"
        yield Problem(
            f"slurm.environment.{key}", value, rule, "use a name such as ib0, or leave it out"
        )


def _alert_problems(card: RunCard) -> list[Problem]:
    """Times of day and turns that no calendar knows: found out at the launch, not when an alert is
    due.
    """
    from datetime import date
    from zoneinfo import ZoneInfo

    problems, zone, start = [], card.alerts.time_zone, card.alerts.rota_start
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError):
        fix = 'use a name like "Europe/Paris" or "UTC"'
        problems.append(
            Problem("alerts.time_zone", zone, "is not a time zone that this machine knows", fix)
        )
    try:
        date.fromisoformat(start or "1970-01-01")
    except ValueError:
        problems.append(
            Problem("alerts.rota_start", start, "is not a day of the calendar", "use YYYY-MM-DD")
        )
    return problems
