"""What a drill tells a trainer: the phases, and the variable that names them."""

from __future__ import annotations

# as the heartbeat names them
PHASES = ("starting", "training", "evaluating", "saving", "data-wait")


VARIABLE = "TR11_DRILL"  # the phases to drill, one for each task of an array: "starting,training"
