"""How many bytes a function takes from torch's allocator at once, temporaries of kernels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def most_bytes(function: Callable[[], Any]) -> int:
    """The peak of host memory above what was held before; all threads count. The function runs
    twice.
    """
    function()  # what is made once and kept is no temporary
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    assert record.profiler is not None
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
