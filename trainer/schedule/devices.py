"""Dense peak rates of known devices, from their names alone: the denominator of every utilization.
Free of torch.

Figures: the vendors' data sheets, without sparsity. 16-bit rates are of the matrix units with fp32
accumulation; fp32 is the plain rate, which PyTorch uses unless TF32 is allowed (AMD: of the matrix
units, which need no permission). A device is what `torch.cuda.get_device_name` names: half of an
MI250X card, which has two.
"""

from __future__ import annotations

import re
from typing import Literal

from trainer.contract.record import Record


class DevicePeak(Record):
    """TFLOPs of one device; None for a dtype that its matrix units do not have.

    `pattern`: what stands in the name that its driver gives it, as a regular expression.
    `capability`: what `torch.cuda.get_device_capability` says of it, by which kernels are chosen. `float8`: where the
    trainer multiplies in it (`float8_choice.py`).
    """

    name: str
    pattern: str
    bf16: float | None
    fp16: float
    fp32: float
    capability: tuple[int, int]
    float8: float | None = None


# The first pattern found in a name counts, so variants stand before the plain model.
_PEAKS = (
    DevicePeak(
        "GB200", "GB200", bf16=2500.0, fp16=2500.0, fp32=80.0, capability=(10, 0), float8=5000.0
    ),
    DevicePeak(
        "B200", "B200", bf16=2250.0, fp16=2250.0, fp32=75.0, capability=(10, 0), float8=4500.0
    ),
    DevicePeak(
        "GH200", "GH200", bf16=989.4, fp16=989.4, fp32=66.9, capability=(9, 0), float8=1978.9
    ),
    DevicePeak(
        "H200 NVL", "H200 NVL", bf16=835.5, fp16=835.5, fp32=60.0, capability=(9, 0), float8=1671.0
    ),
    DevicePeak("H200", "H200", bf16=989.4, fp16=989.4, fp32=66.9, capability=(9, 0), float8=1978.9),
    DevicePeak(
        "H100 NVL", "H100 NVL", bf16=835.5, fp16=835.5, fp32=60.0, capability=(9, 0), float8=1671.0
    ),
    DevicePeak(
        "H100 PCIe",
        "H100 PCIe",
        bf16=756.0,
        fp16=756.0,
        fp32=51.2,
        capability=(9, 0),
        float8=1513.0,
    ),
    DevicePeak(
        "H100 SXM", "H100", bf16=989.4, fp16=989.4, fp32=66.9, capability=(9, 0), float8=1978.9
    ),
    DevicePeak(
        "H800 SXM", "H800", bf16=989.4, fp16=989.4, fp32=66.9, capability=(9, 0), float8=1978.9
    ),
    DevicePeak("H20", "H20", bf16=148.0, fp16=148.0, fp32=44.0, capability=(9, 0), float8=296.0),
    DevicePeak("A100", "A[18]00", bf16=312.0, fp16=312.0, fp32=19.5, capability=(8, 0)),
    DevicePeak("A40", "A40", bf16=149.7, fp16=149.7, fp32=37.4, capability=(8, 6)),
    DevicePeak("A30", "A30", bf16=165.0, fp16=165.0, fp32=10.3, capability=(8, 0)),
    DevicePeak("A10", "A10", bf16=125.0, fp16=125.0, fp32=31.2, capability=(8, 6)),
    DevicePeak("L40S", "L40S", bf16=362.0, fp16=362.0, fp32=91.6, capability=(8, 9), float8=733.0),
    DevicePeak("L40", "L40", bf16=181.0, fp16=181.0, fp32=90.5, capability=(8, 9), float8=362.0),
    DevicePeak("L4", "L4", bf16=121.0, fp16=121.0, fp32=30.3, capability=(8, 9), float8=242.5),
    DevicePeak("V100S PCIe", "V100S", bf16=None, fp16=130.0, fp32=16.4, capability=(7, 0)),
    DevicePeak("V100 PCIe", "V100-PCIE", bf16=None, fp16=112.0, fp32=14.0, capability=(7, 0)),
    DevicePeak("V100 SXM2", "V100", bf16=None, fp16=125.0, fp32=15.7, capability=(7, 0)),
    DevicePeak("T4", "T4", bf16=None, fp16=65.0, fp32=8.1, capability=(7, 5)),
    DevicePeak(
        "RTX 5090", "RTX 5090", bf16=209.5, fp16=209.5, fp32=104.8, capability=(12, 0), float8=419.0
    ),
    DevicePeak(
        "RTX 4090", "RTX 4090", bf16=165.2, fp16=165.2, fp32=82.6, capability=(8, 9), float8=330.3
    ),
    DevicePeak("RTX 3090", "RTX 3090", bf16=71.0, fp16=71.0, fp32=35.6, capability=(8, 6)),
    DevicePeak("MI325X", "MI325X", bf16=1307.4, fp16=1307.4, fp32=163.4, capability=(9, 4)),
    DevicePeak("MI300X", "MI300X", bf16=1307.4, fp16=1307.4, fp32=163.4, capability=(9, 4)),
    DevicePeak("MI300A", "MI300A", bf16=980.6, fp16=980.6, fp32=122.6, capability=(9, 4)),
    DevicePeak(
        "MI250X, one of two", "MI250X", bf16=191.5, fp16=191.5, fp32=47.9, capability=(9, 0)
    ),
    DevicePeak("MI250, one of two", "MI250", bf16=181.0, fp16=181.0, fp32=45.3, capability=(9, 0)),
    DevicePeak("MI210", "MI210", bf16=181.0, fp16=181.0, fp32=45.3, capability=(9, 0)),
)


def device_peak(device_name: str) -> DevicePeak | None:
    """The peaks of a device by the name its driver gives it; None when it is not known, as every
    CPU.

    A slice of a divided GPU (`... MIG 3g.40gb`) has no peak of its own here, nor a laptop's GPU of
    the same name.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name, re.IGNORECASE):
        return None
    for peak in _PEAKS:
        # Not inside a longer model name: A10 is neither A100 nor A10G.
        if re.search(rf"(?<![A-Za-z0-9]){peak.pattern}(?![A-Za-z0-9])", device_name, re.IGNORECASE):
            return peak
    return None


def maker_of(peak: DevicePeak) -> Literal["nvidia", "amd"]:
    """Who made a known device."""
    if peak.name.startswith("MI"):
        return "amd"
    return "nvidia"


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in `dtype` (bf16, fp16, fp32, float8), in TFLOPs; None when either
    is not known.
    """
    peak = device_peak(device_name)
    if peak is None:
        return None
    return {"bf16": peak.bf16, "fp16": peak.fp16, "fp32": peak.fp32, "float8": peak.float8}[dtype]
