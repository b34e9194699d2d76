"""Lines that healthy trainings print by the million lead to no rule: they are passed over at the speed of the search."""

from __future__ import annotations

import pytest

from tr11ops.diagnose.matcher import matcher


@pytest.mark.parametrize(
    "line",
    [
        "[default3]: DataLoader worker 3 (pid 4711): fetched batch 812 in 0.021 s",
        "2026-03-04 10:00:00,123 - dataloader - INFO - worker 3 loaded shard shards/part-00123.parquet (12 MB)",
        "2026-03-04 10:00:00 INFO torch.utils.data.dataloader: prefetch queue 12/16",
        "WARNING: data loader queue is empty, waiting for worker 3",
        "/usr/lib/python3.12/site-packages/x.py:12: UserWarning: something is deprecated",
        "E0304 20:00:00.123 12 dataloader.cc:12] reading record 12",
        "[NeMo I 2026-03-04 00:00:00 data:12] loaded 12 samples",
        "Loading checkpoint shards:  50%|#####     | 3/6 [00:03<00:03,  1.1s/it]",
    ],
)
def test_a_line_of_a_healthy_training_is_no_candidate(line: str) -> None:
    assert matcher().candidates(f"{line}\n".encode()) == []


def test_what_was_sought_by_such_words_is_found_all_the_same() -> None:
    pending = "                77      gpu  train    alice PD {spaces}0:00      8 (Priority)"
    lines = [pending.format(spaces=" " * count) for count in (0, 1, 6)]
    lines += ["FATAL: x", "Fatal error", "a fatal error", "the pod was preempted", "job pre-empted"]
    for line in lines:
        assert matcher().candidates(f"{line}\n".encode()), line
