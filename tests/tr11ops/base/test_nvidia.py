"""The GPUs of a machine, from texts in nvidia-smi's formats."""

from __future__ import annotations

import pytest

from tests.tr11ops.health.recorded_system import RecordedSystem, smi, text
from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import Gpu, list_gpus, uuids, visible
from tr11ops.base.processes import ProbeOutput

# as an H100 answered to --query-gpu=index,uuid,name,memory.total,mig.mode.current (driver
# 580.159.04)
H100 = "0, GPU-00000000-1111-2222-3333-444444444444, NVIDIA H100 80GB HBM3, 81559, Disabled\n"


def test_a_gpu_has_its_name_and_memory() -> None:
    found = list_gpus(RecordedSystem(commands={"nvidia-smi": ProbeOutput(0, H100)}), 5.0)
    assert found == (
        Gpu("GPU-00000000-1111-2222-3333-444444444444", "NVIDIA H100 80GB HBM3", "0", 81559),
    )


def test_slices_stand_for_the_gpu_that_they_divide() -> None:
    answers = {
        "--query-gpu": ProbeOutput(0, text("gpus-mig.csv")),
        "-L": ProbeOutput(0, text("gpus-mig.txt")),
    }
    found = list_gpus(RecordedSystem(commands=dict(answers)), 5.0)
    assert [(gpu.index, gpu.uuid[:8], gpu.memory_megabytes) for gpu in found] == [
        ("0:0", "MIG-c6d4", 0),
        ("0:1", "MIG-11aa", 0),
        ("1", "GPU-0a1b", 40960),
    ]
    assert found[0].name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


def test_a_driver_that_knows_no_slices_is_asked_without_them() -> None:
    refusal = ProbeOutput(2, 'Field "mig.mode.current" is not a valid field to query.\n')
    answers = {
        "mig.mode": refusal,
        "--query-gpu": ProbeOutput(0, "0, GPU-1, Tesla V100-SXM2-32GB, 32510\n"),
    }
    assert uuids(list_gpus(RecordedSystem(commands=dict(answers)), 5.0)) == ("GPU-1",)


def test_no_devices_are_none_and_what_does_not_answer_is_unknown() -> None:
    assert list_gpus(smi("no-devices.txt", status=6), 5.0) == ()
    for system in (smi("no-driver.txt", status=9), RecordedSystem()):
        with pytest.raises(Unanswered):
            list_gpus(system, 5.0)


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, "012"),
        ("2,0", "20"),
        ("GPU-b,MIG-c", "12"),
        ("1,1", "1"),
        ("0,7,1", "0"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("GPU-", ""),
    ],
)
def test_what_cuda_visible_devices_names(wanted: str | None, indices: str) -> None:
    gpus = (Gpu("GPU-a1", "x", "0"), Gpu("GPU-b1", "x", "1"), Gpu("MIG-c1", "x", "2"))
    assert "".join(gpu.index for gpu in visible(gpus, wanted)) == indices
