"""The loss jumped: more than twice what is usual. Most spikes pass by themselves; some do not.

What to do: nothing while it comes back within some tens of iterations; keep the checkpoint from
before it. Else stop the run and go back to that checkpoint, past the data.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "`recovery.loss_factor` (2) times, among the last 50 lines"
SEVERITIES = "CRITICAL, WARNING once over, INFO once a person rolled it back"
NAME = "loss-spike"
NEEDS = ("jobs", "steps", "training.events")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Looks at the last 50 lines: CRITICAL while it lasts, a warning once the loss is back or was
    rolled back.

    A remark once a person has rolled it back, until the training has come past it.
    """
    steps, facts = known(snapshot.steps, ()), snapshot.run.recovery
    seen = series.recent_highs(
        steps, lambda record: record.lm_loss, facts.loss_factor, facts.window
    )
    highs = series.not_undone(snapshot, seen)
    if not snapshot.active_jobs:
        return
    if not highs:
        yield from _rolled_back(snapshot, seen)
        return
    first, last = highs[0], highs[-1]
    peak = max(highs, key=lambda high: high.value)
    lasts = last.index == len(steps) - 1 and not _answers(snapshot, first, "roll-back")
    record = steps[peak.index].record
    if record.grad_norm is None:
        norm = ""
    else:
        norm = f"; grad norm {record.grad_norm:.4g}"
    loss = f"lm loss {peak.value:.4g}, {peak.factor:.1f} times its median {peak.usual:.4g}"
    evidence = [f"iteration {record.iteration}: {loss}{norm}"]
    if not lasts:
        now = steps[-1].record
        evidence.append(f"{now.lm_loss:.4g} at iteration {now.iteration}")
    evidence += _answers(snapshot, first, "roll-back") + _answers(snapshot, first, "skipped")
    began, ended = steps[first.index].record.iteration, steps[last.index].record.iteration
    if began == ended:
        span = f"at iteration {began}"
    else:
        span = f"from iteration {began} to {ended}"
    yield Finding(
        NAME,
        Severity.CRITICAL if lasts else Severity.WARNING,
        f"the loss is {last.factor:.1f} times its median since iteration {began}"
        if lasts
        else f"the loss had a spike {span}",
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "logs"),
    )


def _rolled_back(snapshot: Snapshot, highs: tuple[series.High, ...]) -> Iterator[Finding]:
    """A spike that a person has rolled back, as long as what trains has not come past it."""
    if not highs:
        return
    steps, last = known(snapshot.steps, ()), highs[-1].index
    iteration = steps[last].record.iteration
    if any(step.record.iteration > iteration for step in steps[last + 1 :]):
        return
    yield Finding(
        NAME,
        Severity.INFO,
        f"the loss had a spike up to iteration {iteration}, and was rolled back",
        evidence=(f"this is over when the training has come past iteration {iteration}",),
        fix=derived.command(snapshot, "logs"),
        is_to_be_passed=True,
    )


def _answers(snapshot: Snapshot, first: series.High, kind: str) -> list[str]:
    """What the trainer itself noted of this kind since the spike began."""
    steps = known(snapshot.steps, ())
    began = steps[first.index].time
    found = [event for event in known(snapshot.training.events, ()) if event.kind == kind]
    later = [event for event in found if began is not None and event.time >= began]
    said = [", ".join(f"{name} {value}" for name, value in event.values.items()) for event in later]
    return [f"the trainer notes: {kind}: {words[:120]}" for words in said[:1]]
