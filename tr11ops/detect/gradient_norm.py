"""The gradient norm shot up: the forerunner of a loss spike, some iterations before it.

What to do: watch the loss of the next iterations; see that a checkpoint from before is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tr11ops.base.observed import known
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "`recovery.gradient_factor` (10) times, on 2 lines in a row"
SEVERITIES = "WARNING, INFO once over"
NAME = "gradient-norm"
NEEDS = ("jobs", "steps", "training.events")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """More than 10 times its median on two consecutive lines: a single line is noise. Looks at the
    last 50.
    """
    steps, facts = known(snapshot.steps, ()), snapshot.run.recovery
    highs = series.not_undone(
        snapshot,
        series.recent_highs(
            steps, lambda record: record.grad_norm, facts.gradient_factor, facts.window
        ),
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
        NAME,
        Severity.WARNING if lasts else Severity.INFO,
        f"the gradient norm is {highs[-1].factor:.0f} times its median since iteration {began}"
        if lasts
        else f"the gradient norm was {peak.factor:.0f} times its median at iteration {began}",
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "logs"),
    )
