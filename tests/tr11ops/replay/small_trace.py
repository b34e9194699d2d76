"""A fault trace in the form of the GPU servers' one, of a few faults that a test names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DAY = 86_400.0
ECC = ("GPU", "GPU DBE(Double Bit ECC) > Threshold")
UNKNOWN = ("Unknown Error", "Unknown Error")
FAN = ("Fan", "Speed Critical (Sensor)")
CRASHED = ("System Crash", "Server down")


def write_trace(path: Path, *faults: tuple[str, float, float, tuple[str, str]]) -> Path:
    """Each is a node, the days when the fault begins and ends, and its class and description."""
    events: list[dict[str, Any]] = []
    for node, start, end, (family, description) in faults:
        about = {"Level": "Hardware Failure", "Class": family, "Desc": description}
        for when, kind in ((start, "fault_start"), (end, "fault_end")):
            events.append(
                {"node_id": node, "event_time": when, "event_type": kind, "fault_type": about}
            )
    path.write_text(json.dumps(sorted(events, key=lambda event: float(event["event_time"]))))
    return path
