"""The top of the page: one sentence, the verdict, the progress, and the numbers that are asked for
first. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import tzinfo

from tr11ops.base.observed import known
from tr11ops.base.units import counted, duration, quantity
from tr11ops.observe import derived
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Tile
from tr11ops.report.sections.formats import clock, hours
from tr11ops.watchdog.verdict import TRAINING, VerdictWord

VERDICT_CLASSES = {
    VerdictWord.HEALTHY: "good",
    VerdictWord.FINISHED: "good",
    VerdictWord.STARTING: "calm",
    VerdictWord.SLOW: "warn",
    VerdictWord.AT_RISK: "bad",
    VerdictWord.QUEUED: "calm",
    VerdictWord.STOPPING: "warn",
    VerdictWord.STOPPED: "warn",
    VerdictWord.UNKNOWN: "warn",
    VerdictWord.STALLED: "bad",
    VerdictWord.DOWN: "bad",
}


def verdict_class(material: ReportMaterial) -> str:
    """Green only where a person may sleep."""
    found = VERDICT_CLASSES[material.verdict.word]
    if found == "good" and material.answer.may_sleep is not True:
        return "warn"
    return found


def share(material: ReportMaterial) -> float | None:
    """Progress in percent; None where the end is not known."""
    done = derived.iteration(material.snapshot)
    total = derived.total_iterations(material.snapshot)
    if done is None or not total:
        return None
    return min(100.0, round(100.0 * done / total, 2))


def sentence(material: ReportMaterial, zone: tzinfo) -> str:
    """The run in one sentence: how far, for how long, how well, how often it failed, when it ends."""
    goodput = material.goodput
    steps = known(material.snapshot.steps, ())
    done = derived.iteration(material.snapshot)
    total = derived.total_iterations(material.snapshot)
    if done is None:
        return "The training has not logged an iteration yet."
    of = ""
    if total:
        of = f" of {total:,}"
    tokens = ""
    for step in steps[-1:]:
        if step.record.consumed_tokens is not None:
            tokens = f" ({quantity(step.record.consumed_tokens)} tokens)"
    text = f"The training has done {done:,}{of} iterations{tokens} in {duration(goodput.end - goodput.begin)}"
    if goodput.useful_of_held is not None:
        text += f"; {100 * goodput.useful_of_held:.0f} % of the node-hours {goodput.useful_did}"
    text += f"; {counted(len(goodput.faults), 'fault')} stopped it"
    end = eta(material, zone)
    if end and material.verdict.word in TRAINING:
        return f"{text}; at this pace it ends on {end}."
    return f"{text}."


def eta(material: ReportMaterial, zone: tzinfo) -> str:
    """When the training ends: with the losses of the past where they are known, else at the recent
    pace; "" unknown.
    """
    end = material.end
    if end is None or end.earliest <= 0:
        return ""
    return clock(material.snapshot.time + (end.likely or end.earliest), zone)


def progress(material: ReportMaterial, zone: tzinfo) -> str:
    """How far the training is, and when that was seen."""
    done = derived.iteration(material.snapshot)
    total = derived.total_iterations(material.snapshot)
    if done is None:
        return "no iteration yet"
    text = f"iteration {done:,}" + (f" of {total:,}" if total else "")
    if material.end is not None and material.end.earliest > 0:
        text += f"; {duration(material.end.earliest)} of training left at the present speed"
    origin = known(material.snapshot.origin, None)
    if origin is None:
        began = ""
    else:
        began = f"; began with {origin.lineage}"
    return f"{text}{began}; seen {clock(material.snapshot.time, zone)}"


def tiles(material: ReportMaterial, zone: tzinfo) -> Iterator[Tile]:
    """One number each; what is not known has none, but for the ETA."""
    goodput = material.goodput
    steps = known(material.snapshot.steps, ())
    if steps:
        last = steps[-1].record
        told = derived.newest_loss(steps)
        if told is not None:
            yield Tile("loss", f"{told.record.lm_loss:.4g}")
        for name, loss in last.other_losses:
            yield Tile(f"{name} loss", f"{loss:.4g}")
        if last.consumed_tokens is not None:
            yield Tile("tokens", quantity(last.consumed_tokens))
    yield Tile("ETA", "reached" if share(material) == 100 else eta(material, zone) or "not known")
    if steps and math.isfinite(last.tflops):
        yield Tile("TFLOPs per GPU", f"{last.tflops:.4g}")
    pace = derived.pace_of(steps[-1:]) or derived.pace_of(steps)
    if pace is not None:
        yield Tile("seconds an iteration", f"{pace:.4g}")
    if goodput.effective_time_ratio is not None:
        yield Tile("effective training time", f"{100 * goodput.effective_time_ratio:.1f} %")
    if goodput.useful_of_held is not None:
        yield Tile("useful of the nodes held", f"{100 * goodput.useful_of_held:.1f} %")
    yield Tile("node-hours held", hours(goodput.total.held_hours))
    yield Tile("faults", str(len(goodput.faults)))
    if goodput.seconds_between_faults is not None:
        yield Tile("between faults", duration(goodput.seconds_between_faults))
    if goodput.seconds_to_recover is not None:
        yield Tile("to recover, on average", duration(goodput.seconds_to_recover))
