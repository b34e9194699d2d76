"""Dense peak rates of known devices, from their names alone: the denominator of every utilization. Free of torch.

Figures: the vendors' data sheets, without sparsity. 16-bit rates are of the matrix units with fp32 accumulation; fp32
is the plain rate, which PyTorch uses unless TF32 is allowed (AMD: of the matrix units, which need no permission).
A device is what `torch.cuda.get_device_name` names: half of an MI250X card, which has two.
"""

from __future__ import annotations

import re
from typing import Literal

from trainer.contract.record import Record


class DevicePeak(Record):
    """TFLOPs of one device; None for a dtype that its matrix units do not have.

    `capability`: what `torch.cuda.get_device_capability` says of it, by which kernels are chosen. `float8`: where the
    trainer multiplies in it (`float8_choice.py`).
    """

    name: str
    bf16: float | None
    fp16: float
    fp32: float
    capability: tuple[int, int]
    float8: float | None = None


# The first pattern found in a name counts, so variants stand before the plain model.
_PEAKS: tuple[tuple[str, DevicePeak], ...] = (
    (r"GB200", DevicePeak("GB200", 2500.0, 2500.0, 80.0, (10, 0), 5000.0)),
    (r"B200", DevicePeak("B200", 2250.0, 2250.0, 75.0, (10, 0), 4500.0)),
    (r"GH200", DevicePeak("GH200", 989.4, 989.4, 66.9, (9, 0), 1978.9)),
    (r"H200 NVL", DevicePeak("H200 NVL", 835.5, 835.5, 60.0, (9, 0), 1671.0)),
    (r"H200", DevicePeak("H200", 989.4, 989.4, 66.9, (9, 0), 1978.9)),
    (r"H100 NVL", DevicePeak("H100 NVL", 835.5, 835.5, 60.0, (9, 0), 1671.0)),
    (r"H100 PCIe", DevicePeak("H100 PCIe", 756.0, 756.0, 51.2, (9, 0), 1513.0)),
    (r"H100", DevicePeak("H100 SXM", 989.4, 989.4, 66.9, (9, 0), 1978.9)),
    (r"H800", DevicePeak("H800 SXM", 989.4, 989.4, 66.9, (9, 0), 1978.9)),
    (r"H20", DevicePeak("H20", 148.0, 148.0, 44.0, (9, 0), 296.0)),
    (r"A[18]00", DevicePeak("A100", 312.0, 312.0, 19.5, (8, 0))),
    (r"A40", DevicePeak("A40", 149.7, 149.7, 37.4, (8, 6))),
    (r"A30", DevicePeak("A30", 165.0, 165.0, 10.3, (8, 0))),
    (r"A10", DevicePeak("A10", 125.0, 125.0, 31.2, (8, 6))),
    (r"L40S", DevicePeak("L40S", 362.0, 362.0, 91.6, (8, 9), 733.0)),
    (r"L40", DevicePeak("L40", 181.0, 181.0, 90.5, (8, 9), 362.0)),
    (r"L4", DevicePeak("L4", 121.0, 121.0, 30.3, (8, 9), 242.5)),
    (r"V100S", DevicePeak("V100S PCIe", None, 130.0, 16.4, (7, 0))),
    (r"V100-PCIE", DevicePeak("V100 PCIe", None, 112.0, 14.0, (7, 0))),
    (r"V100", DevicePeak("V100 SXM2", None, 125.0, 15.7, (7, 0))),
    (r"T4", DevicePeak("T4", None, 65.0, 8.1, (7, 5))),
    (r"RTX 5090", DevicePeak("RTX 5090", 209.5, 209.5, 104.8, (12, 0), 419.0)),
    (r"RTX 4090", DevicePeak("RTX 4090", 165.2, 165.2, 82.6, (8, 9), 330.3)),
    (r"RTX 3090", DevicePeak("RTX 3090", 71.0, 71.0, 35.6, (8, 6))),
    (r"MI325X", DevicePeak("MI325X", 1307.4, 1307.4, 163.4, (9, 4))),
    (r"MI300X", DevicePeak("MI300X", 1307.4, 1307.4, 163.4, (9, 4))),
    (r"MI300A", DevicePeak("MI300A", 980.6, 980.6, 122.6, (9, 4))),
    (r"MI250X", DevicePeak("MI250X, one of two", 191.5, 191.5, 47.9, (9, 0))),
    (r"MI250", DevicePeak("MI250, one of two", 181.0, 181.0, 45.3, (9, 0))),
    (r"MI210", DevicePeak("MI210", 181.0, 181.0, 45.3, (9, 0))),
)


def device_peak(device_name: str) -> DevicePeak | None:
    """The peaks of a device by the name its driver gives it; None when it is not known, as every CPU.

    A slice of a divided GPU (`... MIG 3g.40gb`) has no peak of its own here, nor a laptop's GPU of the same name.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name, re.IGNORECASE):
        return None
    for pattern, peak in _PEAKS:
        # Not inside a longer model name: A10 is neither A100 nor A10G.
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", device_name, re.IGNORECASE):
            return peak
    return None


def maker_of(peak: DevicePeak) -> Literal["nvidia", "amd"]:
    """Who made a known device."""
    return "amd" if peak.name.startswith("MI") else "nvidia"


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in `dtype` (bf16, fp16, fp32, float8), in TFLOPs; None when either is not known."""
    peak = device_peak(device_name)
    if peak is None:
        return None
    return {"bf16": peak.bf16, "fp16": peak.fp16, "fp32": peak.fp32, "float8": peak.float8}[dtype]
