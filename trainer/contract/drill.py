"""What a drill tells a trainer: the phases, and the variable that names them."""

from __future__ import annotations

PHASES = ("starting", "training", "evaluating", "saving", "data-wait")  # as the heartbeat names them


VARIABLE = "TR11_DRILL"  # the phases to drill, one for each task of an array: "starting,training"
