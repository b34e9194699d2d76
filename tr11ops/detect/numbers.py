"""The training's numbers: losses, gradient norms and counters; and who computes wrongly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from tr11ops.base.observed import Unknown, known, seen
from tr11ops.base.units import counted, duration
from tr11ops.detect.course import (
    RECENT_LINES,
    High,
    not_undone,
    recent_highs,
    turns_back,
)
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.nodes_left import exclude_command, excluded_nodes, start_again
from tr11ops.detect.saved import after_passing, is_rollback, iterations, pass_over
from tr11ops.observe import derived
from tr11ops.observe.liveness import liveness_outside, may_live_outside
from tr11ops.observe.observations import Corruption, Validation
from tr11ops.observe.snapshot import SOUND_LOSSES, Snapshot, Step
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.units import shortened

QUOTED = 3


@detector(
    "silent-corruption",
    needs=("training.corruptions", "exclusions"),
    bound="one bit",
    severities="CRITICAL",
)
def silent_corruption(snapshot: Snapshot) -> Iterator[Finding]:
    """A worker computed something else than it did before, or than the other replicas did: its node may
    not train on.

    What to do: exclude the node, stop, and go back to a checkpoint from before the error.

    CRITICAL for each suspect node, until it is excluded. Of two that differ without a third,
    each is a suspect.
    """
    by_node: dict[str, list[Corruption]] = {}
    for found in seen(snapshot.training.corruptions):
        by_node.setdefault(found.node, []).append(found)
    excluded = excluded_nodes(snapshot)
    for node, entries in by_node.items():
        if node in excluded:
            continue
        is_certain = any(entry.certain for entry in entries)
        last = entries[-1]
        yield Finding(
            silent_corruption.name,
            Severity.CRITICAL,
            f"{node} computes wrongly"
            if is_certain
            else f"{node} or another node computes wrongly",
            subject=node,
            identity=(node,),
            evidence=(
                *(f"iteration {entry.iteration}: {entry.why}" for entry in entries[-QUOTED:]),
                f"last found {duration(max(0.0, snapshot.time - last.time))} ago",
            ),
            fix=exclude_command(snapshot, node, "it computes something else than the others"),
            then=start_again(snapshot, node),
        )


LOOK = "checkpoints list"  # where it began is not known: which checkpoint is from before?

GOES_BACK = (
    "it goes on from the newest checkpoint in its own folder: to go back further, move those saved"
    " since out of that folder; which data it leaves out, its script says"
)  # of another trainer than tr11's own


@detector(
    "loss-not-finite",
    needs=("steps",),
    uses=("training.events",),
    bound="one line",
    severities="CRITICAL, INFO once it went back and has still to pass it",
    runbook="spike.md",
)
def loss_not_finite(snapshot: Snapshot) -> Iterator[Finding]:
    """The last logged loss is not a number: every step from here on is wasted.

    What to do: end it at once, go back to a checkpoint from before, and skip the data since.

    Looks at the last step, and where that is a number, at the last ten of its launch: a training
    that recovered by itself has skipped the bad batch; fewer numbers in a row than were none are no
    recovery.

    A remark once the run has gone back, by a roll-back or another launch, until an iteration after
    the last bad one is a number: what it trains before that was never bad.
    """
    steps = tuple(step for step in seen(snapshot.steps) if step.record.lm_loss is not None)
    if not steps:
        return
    ended = _last_bad(steps)
    if ended is None or _has_recovered(steps) or derived.is_rolled_back(snapshot):
        yield from _to_be_passed(snapshot, steps)
        return
    newest, row = steps[-1].record, steps[: ended + 1]
    began = _first_of_row(row)
    first, last = steps[began].record, steps[ended].record
    at_least = ""
    if not _is_seen_to_begin(snapshot, row, began):
        at_least = " at least"
    evidence = [
        f"iteration {last.iteration}: lm loss {last.lm_loss}, {_norm_of(last)}",
        *_dropped(steps[began:]),
    ]
    if newest is not last:
        evidence.append(
            f"iteration {newest.iteration}: lm loss {newest.lm_loss:.4g}; too few numbers in a row to have recovered"
        )
    stop = ""
    if _may_train(snapshot):
        stop = derived.command(snapshot, "kill --now --wait")
    fix, then = derived.command(snapshot, LOOK), tuple[str, ...]()
    passing = pass_over(snapshot, first.iteration, last.iteration, lasts=True)
    if not passing:
        evidence.append(GOES_BACK)
    elif not at_least:  # else it is not known where it began
        fix = passing
        passed = iterations(first.iteration, last.iteration)
        is_open = bool(stop) and is_rollback(fix)
        more = ", and of those that follow until it stops" if is_open else ""
        evidence.append(f"`{fix}` skips the data of {passed}{more}")
        then = after_passing(snapshot, fix)
    if stop:
        fix, then = stop, _after_stop(snapshot, fix)
    comes_back = ""
    if not all(step.record.has_bad_loss for step in row[began:]):
        comes_back = "again and again "
    yield Finding(
        loss_not_finite.name,
        Severity.CRITICAL,
        f"the loss is {comes_back}not a number since{at_least} iteration {first.iteration}",
        evidence=tuple(evidence),
        fix=fix,
        then=then,
        since=steps[began].time,
    )


def _after_stop(snapshot: Snapshot, command: str) -> tuple[str, ...]:
    """What is typed behind a kill: the command that helps, and what lifts the stop."""
    if is_rollback(command):
        return command, *derived.go_on(snapshot)
    if command == derived.command(snapshot, LOOK):
        return (command,)
    # a launch, which a kill switch would refuse
    return derived.command(snapshot, "kill --release"), command


def _norm_of(record: MeasuredStep) -> str:
    """The gradient norm in words; the record of a step keeps no norm that is infinite or no number."""
    if record.grad_norm is None:
        return "grad norm not finite"
    return f"grad norm {record.grad_norm:.4g}"


def _dropped(row: tuple[Step, ...]) -> Iterator[str]:
    """How many updates the optimizer dropped since the row began: those did not change the weights."""
    dropped = sum(step.record.skipped_iterations for step in row)
    if dropped:
        updates = counted(dropped, "update was", "updates were")
        yield f"{updates} dropped since then (skipped iterations): those left the weights as they were"


def _to_be_passed(snapshot: Snapshot, steps: tuple[Step, ...]) -> Iterator[Finding]:
    """The newest row of losses that were no numbers from which the run has gone back, and which it
    has not passed.
    """
    ends = [*turns_back(steps), *([len(steps)] if derived.is_rolled_back(snapshot) else [])]
    for end in reversed(ends):
        last = _last_bad(steps[:end])
        if last is None:
            continue
        first_iteration, last_iteration = (
            steps[_first_of_row(steps[: last + 1])].record.iteration,
            steps[last].record.iteration,
        )
        reached = max((step.record.iteration for step in steps[end:]), default=0)
        if reached > last_iteration:
            continue
        yield Finding(
            loss_not_finite.name,
            Severity.INFO,
            f"the loss was not a number in {iterations(first_iteration, last_iteration)}",
            evidence=(
                f"the run has gone back since: this is over when an iteration after {last_iteration} is a number",
            ),
            is_to_be_passed=True,
        )
        return


def _has_recovered(steps: tuple[Step, ...]) -> bool:
    """Whether as many losses in a row are numbers now as are none among the last ones of its launch."""
    began = next(reversed(derived.restarts(steps)), 0)
    numbers = [not step.record.has_bad_loss for step in steps[began:][-SOUND_LOSSES:]]
    in_a_row = [*reversed(numbers), False].index(False)
    return in_a_row >= numbers.count(False)


def _last_bad(steps: tuple[Step, ...]) -> int | None:
    """The index of the last line that is no number, where the training had not recovered from it."""
    recent = range(len(steps) - 1, max(-1, len(steps) - 1 - SOUND_LOSSES), -1)
    return next((index for index in recent if steps[index].record.has_bad_loss), None)


def _first_of_row(steps: tuple[Step, ...]) -> int:
    """The index of the first line of the row of losses that are no numbers, at whose end the last
    line is.

    A few numbers among them do not end the row: the training has not recovered, and the row would
    begin elsewhere at each look. What came before a roll-back, or before a launch that began
    further back, is another row.
    """
    earliest = next(reversed(turns_back(steps)), 0)
    first, finite = len(steps) - 1, 0
    for index in range(len(steps) - 1, earliest - 1, -1):
        if steps[index].record.has_bad_loss:
            first, finite = index, 0
        else:
            finite += 1
        if finite >= SOUND_LOSSES:
            break
    return first


def _is_seen_to_begin(snapshot: Snapshot, row: tuple[Step, ...], first: int) -> bool:
    """Whether the row of losses that are no numbers at the end of these lines began with the line
    `first`.

    Not where the lines begin within it: then a number may well come first, and checkpoints from
    before `first` may be of the row.
    """
    origin, begins_after = known(snapshot.origin, None), 0
    if origin is not None and not origin.is_fresh:
        begins_after = origin.step
    is_whole = row[0].record.iteration <= begins_after + snapshot.run.log_interval
    return is_whole or first >= SOUND_LOSSES or bool(turns_back(row))


def _may_train(snapshot: Snapshot) -> bool:
    """Whether something trains that can be stopped, or may do so unseen."""
    if isinstance(snapshot.jobs, Unknown) or may_live_outside(snapshot):
        return True
    return bool(snapshot.active_jobs) or liveness_outside(snapshot) is not None


@detector(
    "loss-spike",
    needs=("jobs", "steps"),
    uses=("training.events",),
    bound="`recovery.loss_factor` (2) times, among the last 50 lines",
    severities="CRITICAL, WARNING once over, INFO once a person rolled it back",
    runbook="spike.md",
)
def loss_spike(snapshot: Snapshot) -> Iterator[Finding]:
    """The loss jumped: more than twice what is usual. Most spikes pass by themselves; some do not.

    What to do: nothing while it comes back within some tens of iterations; keep the checkpoint from
    before it. Else stop the run and go back to that checkpoint, past the data.

    Looks at the last 50 lines: CRITICAL while it lasts, a warning once the loss is back or was
    rolled back.

    A remark once a person has rolled it back, until the training has come past it.
    """
    steps, facts = seen(snapshot.steps), snapshot.run.recovery
    highest = recent_highs(steps, lambda record: record.lm_loss, facts.loss_factor, facts.window)
    highs = not_undone(snapshot, highest)
    if not snapshot.active_jobs:
        return
    if not highs:
        yield from _rolled_back(snapshot, highest)
        return
    first, last = highs[0], highs[-1]
    peak = max(highs, key=lambda high: high.value)
    is_last = all(step.record.lm_loss is None for step in steps[last.index + 1 :])
    lasts = is_last and not _answers(snapshot, first, "roll-back")
    record = steps[peak.index].record
    if record.grad_norm is None:
        norm = ""
    else:
        norm = f"; grad norm {record.grad_norm:.4g}"
    loss = f"lm loss {peak.value:.4g}, {peak.factor:.1f} times its median {peak.usual:.4g}"
    evidence = [f"iteration {record.iteration}: {loss}{norm}"]
    if not lasts:
        now = derived.newest_loss(steps) or steps[peak.index]
        evidence.append(f"{now.record.lm_loss:.4g} at iteration {now.record.iteration}")
    evidence += _answers(snapshot, first, "roll-back") + _answers(snapshot, first, "skipped")
    began, ended = steps[first.index].record.iteration, steps[last.index].record.iteration
    if began == ended:
        span = f"at iteration {began}"
    else:
        span = f"from iteration {began} to {ended}"
    yield Finding(
        loss_spike.name,
        Severity.CRITICAL if lasts else Severity.WARNING,
        f"the loss is {last.factor:.1f} times its median since iteration {began}"
        if lasts
        else f"the loss had a spike {span}",
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "logs"),
    )


def _rolled_back(snapshot: Snapshot, highs: tuple[High, ...]) -> Iterator[Finding]:
    """A spike that a person has rolled back, as long as what trains has not come past it."""
    if not highs:
        return
    steps, last = known(snapshot.steps, ()), highs[-1].index
    iteration = steps[last].record.iteration
    if any(step.record.iteration > iteration for step in steps[last + 1 :]):
        return
    yield Finding(
        loss_spike.name,
        Severity.INFO,
        f"the loss had a spike up to iteration {iteration}, and was rolled back",
        evidence=(f"this is over when the training has come past iteration {iteration}",),
        fix=derived.command(snapshot, "logs"),
        is_to_be_passed=True,
    )


def _answers(snapshot: Snapshot, first: High, kind: str) -> list[str]:
    """What the trainer itself noted of this kind since the spike began."""
    steps = known(snapshot.steps, ())
    began = steps[first.index].time
    found = [event for event in known(snapshot.training.events, ()) if event.kind == kind]
    later = [event for event in found if began is not None and event.time >= began]
    said = [", ".join(f"{name} {value}" for name, value in event.values.items()) for event in later]
    return [f"the trainer notes: {kind}: {shortened(words, 120)}" for words in said[:1]]


@detector(
    "gradient-norm",
    needs=("jobs", "steps"),
    uses=("training.events",),
    bound="`recovery.gradient_factor` (10) times, on 2 lines in a row",
    severities="WARNING, INFO once over",
    runbook="spike.md",
)
def gradient_norm(snapshot: Snapshot) -> Iterator[Finding]:
    """The gradient norm shot up: the forerunner of a loss spike, some iterations before it.

    What to do: watch the loss of the next iterations; see that a checkpoint from before is kept.

    More than 10 times its median on two consecutive lines: a single line is noise. Looks at the
    last 50.
    """
    steps, facts = seen(snapshot.steps), snapshot.run.recovery
    highs = not_undone(
        snapshot,
        recent_highs(steps, lambda record: record.grad_norm, facts.gradient_factor, facts.window),
    )
    pairs = [(one, two) for one, two in pairwise(highs) if two.index == one.index + 1]
    if not pairs or not snapshot.active_jobs:
        return
    first, second = pairs[0]
    lasts = highs[-1].index == len(steps) - 1 and not derived.is_rolled_back(snapshot)
    began = steps[first.index].record.iteration
    peak = max(highs, key=lambda high: high.value)
    evidence = [
        f"iteration {steps[high.index].record.iteration}: grad norm {high.value:.4g}"
        for high in (first, second)
    ]
    evidence[0] += f", its median is {first.usual:.3g}"
    if peak is not second and peak is not first:
        evidence.append(f"most at iteration {steps[peak.index].record.iteration}: {peak.value:.4g}")
    if not lasts:
        now = steps[-1].record
        if now.grad_norm is None:
            norm = "not logged"
        else:
            norm = f"{now.grad_norm:.4g}"
        evidence.append(f"{norm} at iteration {now.iteration}")
    yield Finding(
        gradient_norm.name,
        Severity.WARNING if lasts else Severity.INFO,
        f"the gradient norm is {highs[-1].factor:.0f} times its median since iteration {began}"
        if lasts
        else f"the gradient norm was {peak.factor:.0f} times its median at iteration {began}",
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "logs"),
    )


RISE = 1.02  # times the lowest: a difference of two evaluations that is no noise


@detector(
    "validation-loss-rises",
    needs=("jobs", "steps", "training.validations"),
    bound="2 evaluations in a row more than 2 % above the lowest, the last no lower than the one before",
    severities="WARNING",
)
def validation_loss_rises(snapshot: Snapshot) -> Iterator[Finding]:
    """The loss on texts that are not trained on rises: the model learns its data by heart, or unlearns.

    What to do: compare both losses (`tr11 report`); go back to a checkpoint from before, past the data,
    or end the training there.

    One finding for each set of texts. What the training has gone back behind does not count.
    """
    if not snapshot.active_jobs:
        return
    courses: dict[str, list[Validation]] = {}
    for one in seen(snapshot.training.validations):
        course = courses.setdefault(one.name, [])
        while course and course[-1].iteration >= one.iteration:
            course.pop()
        if not _is_undone(one, seen(snapshot.steps)):
            course.append(one)
    for name, course in courses.items():
        if len(course) < 3:  # the lowest, and two that have risen
            continue
        *before, risen, last = course
        lowest = min(before, key=attrgetter("loss"))
        if not RISE * lowest.loss < risen.loss <= last.loss:
            continue
        yield Finding(
            validation_loss_rises.name,
            Severity.WARNING,
            f"the loss on {name} has risen by {last.loss / lowest.loss - 1:.1%} since iteration {lowest.iteration}",
            subject=name,
            identity=(name,),
            evidence=tuple(
                f"iteration {one.iteration}: loss {one.loss:.4g}" for one in (lowest, risen, last)
            ),
            fix=derived.command(snapshot, "report"),
            since=lowest.time,
        )


def _is_undone(one: Validation, steps: tuple[Step, ...]) -> bool:
    """Whether the training has gone back behind this evaluation since."""
    return any(
        step.time is not None and step.time > one.time and step.record.iteration <= one.iteration
        for step in steps
    )


SAME_RATE = 0.01  # relative: what the log rounds, and dropped updates, may change
SCHEDULE_RATE = (
    # relative: what a schedule may change beyond its slope, where it turns from one course to the
    # next
    0.05
)
SLOPE_LINES = 20  # on each side, from which the schedule's slope is taken
SLOPE_FACTOR = 3.0


@detector(
    "counters-jump",
    needs=("jobs", "steps"),
    uses=("training.events", "checkpoints", "training.launch_ends"),
    bound="the same iteration before the restart; else 3 times the schedule's slope",
    severities="WARNING, CRITICAL when the training began again",
    runbook="loss-differs-after-restart.md",
)
def counters_jump(snapshot: Snapshot) -> Iterator[Finding]:
    """A counter jumped at a restart: samples, learning rate, batch size, or an iteration from before
    the last checkpoint.

    Training that is resumed wrongly looks healthy for days. What to do: stop the run, compare the two
    launches' cards (`state/attempts/JOB/`), resume from the checkpoint that is named.

    Compares the first line after each recent restart with the line of the same iteration, or the
    one before.
    """
    steps = seen(snapshot.steps)
    if not snapshot.active_jobs:
        return
    for index in derived.restarts(steps):
        if len(steps) - index > RECENT_LINES:
            continue
        jumps = [*_gone_back(snapshot, steps, index), *_jumps(steps, index)]
        if jumps:
            record = steps[index].record
            again = record.iteration <= snapshot.run.log_interval
            yield Finding(
                counters_jump.name,
                Severity.CRITICAL if again else Severity.WARNING,
                f"at the restart at iteration {record.iteration}: {jumps[0]}",
                subject=str(record.iteration),
                identity=(str(record.iteration),),
                evidence=(
                    *jumps[1:],
                    _line(snapshot, steps[index - 1]),
                    _line(snapshot, steps[index]),
                ),
                fix=derived.command(snapshot, "kill --wait"),
            )


def _gone_back(snapshot: Snapshot, steps: tuple[Step, ...], index: int) -> Iterator[str]:
    """The launch began before a checkpoint that was there, and nothing that tr11 did on purpose
    says why.

    That is a roll-back of the trainer's own, or an older checkpoint that the agent tries.
    """
    before, after = steps[index - 1], steps[index]
    if after.time is None or before.time is None:
        return
    backs = [
        event.time for event in known(snapshot.training.events, ()) if event.kind == "roll-back"
    ]
    if isinstance(snapshot.training.launch_ends, Unknown):
        return
    backs += [end.time for end in snapshot.training.launch_ends if end.older_checkpoint is not None]
    if any(before.time <= time <= after.time for time in backs):
        return
    began = after.time - _finite(after.record.seconds_per_iteration)
    sound = [entry for entry in snapshot.examined if entry.is_sound]
    there = [entry for entry in sound if entry.created is not None and entry.created < began]
    newest = max(
        (entry.step for entry in there if entry.step <= before.record.iteration), default=None
    )
    if newest is not None and after.record.iteration <= newest:
        name = derived.checkpoint_label(snapshot, newest)
        yield f"the training went back to iteration {after.record.iteration}, though {name} was there"


def _jumps(steps: tuple[Step, ...], index: int) -> Iterator[str]:
    after = steps[index].record
    base = next(
        (
            step.record
            for step in reversed(steps[:index])
            if step.record.iteration <= after.iteration
        ),
        None,
    )
    if base is None:
        return
    count = after.iteration - base.iteration
    yield from _samples(base, after, count)
    if count == 0 and base.global_batch_size != after.global_batch_size:
        yield f"global batch size {after.global_batch_size}; it was {base.global_batch_size}"
    yield from _rate(base, after, count=count, steps=steps, index=index)


def _samples(base: MeasuredStep, after: MeasuredStep, count: int) -> Iterator[str]:
    batches = [one.global_batch_size for one in (base, after) if one.global_batch_size is not None]
    if len(batches) < 2 or base.consumed_samples is None or after.consumed_samples is None:
        return
    low, high = sorted(batches)
    moved = after.consumed_samples - base.consumed_samples
    if low > 0 and not count * low <= moved <= count * (high + 1):
        yield (
            f"consumed samples {after.consumed_samples}, {moved:+d} after {count} iterations"
            f" of {low if low == high else f'{low} to {high}'}"
        )


def _rate(
    base: MeasuredStep, after: MeasuredStep, count: int, steps: tuple[Step, ...], index: int
) -> Iterator[str]:
    change = abs(after.learning_rate - base.learning_rate)
    largest = max(abs(after.learning_rate), abs(base.learning_rate))
    if count == 0:
        allowed = SAME_RATE * largest
    else:
        slopes = [
            *_slopes(steps[max(0, index - SLOPE_LINES) : index]),
            *_slopes(steps[index : index + SLOPE_LINES]),
        ]
        if not slopes:
            return  # cannot be told
        allowed = SLOPE_FACTOR * max(slopes) * count + SCHEDULE_RATE * largest
    if change > allowed:
        yield f"learning rate {after.learning_rate:.3g}; it was {base.learning_rate:.3g} at iteration {base.iteration}"


def _slopes(steps: tuple[Step, ...]) -> Iterator[float]:
    """Change of the learning rate per iteration, between neighbouring lines of one launch."""
    for one, two in pairwise(steps):
        count = two.record.iteration - one.record.iteration
        if count > 0 and one.job_id == two.job_id:
            yield abs(two.record.learning_rate - one.record.learning_rate) / count


def _finite(value: float) -> float:
    if math.isfinite(value):
        return value
    return 0.0


def _line(snapshot: Snapshot, step: Step) -> str:
    record, job = step.record, ""
    if step.job_id:
        job = f"job {derived.label_of(snapshot, step.job_id)}, "
    return (
        f"{job}iteration {record.iteration}: consumed samples {record.consumed_samples},"
        f" learning rate {record.learning_rate:.3E}, global batch size {record.global_batch_size}"
    )
