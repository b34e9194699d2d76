"""The GPU checks over texts in nvidia-smi's and the kernel log's formats."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.health.recorded_system import SILENT, RecordedSystem, smi, text
from tr11ops.base.errors import Unanswered
from tr11ops.base.processes import ProbeOutput
from tr11ops.health import gpu
from tr11ops.health.base import NodeRequirements

WANTED = NodeRequirements("x01", gpus=8, workers=8)
BAD, FINE, WARNING = "bad", "fine", "warning"


@pytest.mark.parametrize(
    ("name", "status", "result", "words"),
    [
        ("gpus-8.csv", 0, FINE, "8 GPUs"),
        ("gpus-7.csv", 0, BAD, "7 of 8 GPUs answer"),
        ("gpu-lost.txt", 15, BAD, "GPU is lost"),
        ("no-driver.txt", 9, BAD, "couldn't communicate"),
        ("no-devices.txt", 6, BAD, "0 of 8"),
    ],
)
def test_every_gpu_must_answer(name: str, status: int, result: str, words: str) -> None:
    outcome, why = gpu.check_gpu_count(smi(name, status=status), WANTED)
    assert outcome == result and words in why


@pytest.mark.parametrize(
    ("gpus", "result", "words"), [(3, FINE, "3 GPUs"), (4, BAD, "3 of 4 GPUs answer")]
)
def test_each_slice_of_a_divided_gpu_counts_and_the_divided_one_does_not(
    gpus: int, result: str, words: str
) -> None:
    system = RecordedSystem(
        commands={
            "--query-gpu": ProbeOutput(0, text("gpus-mig.csv")),
            "nvidia-smi -L": ProbeOutput(0, text("gpus-mig.txt")),
        }
    )
    outcome, why = gpu.check_gpu_count(system, replace(WANTED, gpus=gpus))
    assert outcome == result and words in why


CASES = [
    (gpu.check_gpu_memory, "ecc-fine.csv", FINE, "no uncorrected"),
    (gpu.check_gpu_memory, "ecc-error.csv", BAD, "GPU 5 (00000000:8B:00.0): 2"),
    (gpu.check_gpu_memory, "ecc-reset.csv", BAD, "GPU 1: GPU requires reset"),
    (gpu.check_row_remap, "rows-fine.csv", FINE, "no repair"),
    (gpu.check_row_remap, "rows-numbers.csv", FINE, "no repair"),
    (gpu.check_row_remap, "rows-pending.csv", BAD, "waits for a GPU reset: 00000000:48:00.0"),
    (gpu.check_row_remap, "rows-failed.csv", BAD, "must be replaced: 00000000:4C:00.0"),
    (gpu.check_nvlink, "nvlink-fine.txt", FINE, "12 links up on each of 8 GPUs"),
    (gpu.check_nvlink, "nvlink-down.txt", BAD, "GPU 3: 10 of 12"),
    (gpu.check_nvlink, "nvlink-slow.txt", BAD, "GPU 2: 12.5 GB/s"),
    (gpu.check_nvlink, "nvlink-half-used.txt", FINE, "6 links up on each of 4 GPUs"),
    (gpu.check_nvlink, "nvlink-none.txt", FINE, "no NVLink"),
    (gpu.check_throttling, "clocks-idle.csv", FINE, "no GPU"),
    (gpu.check_throttling, "clocks-power-cap.csv", FINE, "no GPU"),
    (
        gpu.check_throttling,
        "clocks-hot.csv",
        BAD,
        "GPU 6: hardware slowdown, GPU 6: too hot (hardware)",
    ),
    (gpu.check_throttling, "clocks-driver-hot.csv", WARNING, "GPU 6: too hot (driver)"),
    (gpu.check_pcie, "pcie-fine.csv", FINE, "x16"),
    (gpu.check_pcie, "pcie-narrow.csv", BAD, "GPU 4: x8"),
    (gpu.check_pcie, "pcie-slots.csv", WARNING, "x8 of x16"),
]


@pytest.mark.parametrize(("check", "name", "result", "words"), CASES)
def test_what_nvidia_smi_prints(check, name: str, result: str, words: str) -> None:
    outcome, why = check(smi(name), WANTED)
    assert outcome == result and words in why


@pytest.mark.parametrize(
    ("check", "name"),
    [(gpu.check_gpu_memory, "ecc-off.csv"), (gpu.check_throttling, "clocks-silent.csv")],
)
def test_what_a_gpu_does_not_tell_is_unknown(check, name: str) -> None:
    with pytest.raises(Unanswered):
        check(smi(name), WANTED)


ALL = [
    gpu.check_gpu_count,
    gpu.check_gpu_memory,
    gpu.check_row_remap,
    gpu.check_nvlink,
    gpu.check_throttling,
    gpu.check_pcie,
]


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize(
    "answer",
    [
        SILENT,
        ProbeOutput(1, "", "Failed to initialize NVML: Insufficient Permissions"),
        FileNotFoundError(2, "x"),
    ],
    ids=["silent", "refused", "absent"],
)
def test_a_broken_nvidia_smi_says_nothing_of_the_node(check, answer) -> None:
    with pytest.raises(Unanswered):
        check(RecordedSystem(commands={"nvidia-smi": answer}), WANTED)


def test_older_gpus_retire_pages_instead_of_rows() -> None:
    for rows in (ProbeOutput(0, text("rows-none.csv")), ProbeOutput(2, "", "invalid option")):
        for pages, result in (("pages-pending.csv", BAD), ("pages-fine.csv", FINE)):
            system = RecordedSystem(
                commands={
                    "remapped-rows": rows,
                    "retired_pages.pending": ProbeOutput(0, text(pages)),
                }
            )
            assert gpu.check_row_remap(system, WANTED)[0] == result


def test_older_drivers_call_the_throttle_reasons_otherwise() -> None:
    system = RecordedSystem(
        commands={
            "clocks_event_reasons": ProbeOutput(2, text("unknown-field.txt")),
            "clocks_throttle_reasons": ProbeOutput(0, text("clocks-hot.csv")),
        }
    )
    assert gpu.check_throttling(system, WANTED)[0] == BAD


@pytest.mark.parametrize(
    ("name", "result", "words"),
    [
        ("dmesg-fine.txt", FINE, "no Xid"),
        ("dmesg-program.txt", FINE, "2 of programs"),
        ("dmesg-fallen.txt", BAD, "Xid 79 (GPU has fallen off the bus) on 0000:88:00"),
        ("dmesg-old.txt", WARNING, "more than a day ago: Xid 48"),
    ],
)
def test_the_kernel_log_after_two_days(name: str, result: str, words: str) -> None:
    system = RecordedSystem(
        commands={"dmesg": ProbeOutput(0, text(name))},
        files={"/proc/uptime": "172800.55 900000.1\n"},
    )
    outcome, why = gpu.check_xid(system, WANTED)
    assert outcome == result and words in why
    assert why.count("Xid 79") <= 1


def test_a_kernel_log_that_may_not_be_read_is_unknown() -> None:
    refused = ProbeOutput(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    with pytest.raises(Unanswered, match="not permitted"):
        gpu.check_xid(RecordedSystem(commands={"dmesg": refused}), WANTED)
