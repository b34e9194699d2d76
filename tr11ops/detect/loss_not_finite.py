"""The last logged loss is not a number: every step from here on is wasted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.pass_over import iterations, pass_over
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "one line"
SEVERITIES = "CRITICAL"
NAME = "loss-not-finite"
NEEDS = ("steps",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Looks at the last step only: a training that recovered by itself has skipped the bad batch."""
    steps = known(snapshot.steps, ())
    if not steps or math.isfinite(steps[-1].record.lm_loss):
        return
    bad = 0
    for step in reversed(steps):
        if math.isfinite(step.record.lm_loss):
            break
        bad += 1
    first, last = steps[-bad].record, steps[-1].record
    at_least = "" if bad < len(steps) else " at least"
    evidence = [f"iteration {last.iteration}: lm loss {last.lm_loss}, grad norm {last.grad_norm}"]
    if not at_least:  # else it is not known where it began
        command = pass_over(snapshot, first.iteration, last.iteration)
        passed = iterations(first.iteration, last.iteration)
        evidence.append(f"when it has ended, to pass over the data of {passed}: `{command}`")
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"the loss is not a number since{at_least} iteration {first.iteration}",
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "kill"),
    )
