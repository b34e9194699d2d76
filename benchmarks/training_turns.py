"""Steps of trainings that take turns, so that a busy moment of the machine falls on all. No
measurement by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from models import Step


def take_turns(
    steps: Mapping[str, Step],
    draw: Callable[[], list[Any]],
    count: int,
    what: str,
    tokens: int,
    on_first: Callable[[str, float], None] = lambda name, seconds: None,
) -> None:
    """Time `count` steps of each, all with the same batches, and print how fast "tr11" is beside
    each one.

    A first step warms up and is not counted; `on_first` is told its seconds. `tokens`: of a step.
    Medians of wall time are compared, and, since other programs may share the cores, the smallest
    processor times.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(count + 1):
        batches = draw()
        for name, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step(batches)
            if turn:
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
            else:
                on_first(name, time.perf_counter() - began)
    print(f"{what}, {tokens} tokens a step, {count} steps each:")
    print(
        f"  {'':14} {'tokens/s':>10} {'tr11 is':>8}   {'tokens/processor second':>24} {'tr11 is':>8}"
    )
    for name in steps:
        rate, speed = (statistics.median(seconds[key]) for key in (name, "tr11"))
        cost, ours_cost = (min(processor[key]) for key in (name, "tr11"))
        print(
            f"  {name:14} {tokens / rate:10.0f} {rate / speed:7.2f}x   {tokens / cost:24.0f} {cost / ours_cost:7.2f}x"
        )
