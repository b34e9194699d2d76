"""Dense peak rates of known devices, from their names alone: the denominator of every utilization.
Free of torch.

Figures: the vendors' data sheets, without sparsity. 16-bit rates are of the matrix units with fp32
accumulation; fp32 is the plain rate, which PyTorch uses unless TF32 is allowed (AMD: of the matrix
units, which need no permission). A device is what `torch.cuda.get_device_name` names: half of an
MI250X card, which has two.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from trainer.contract.documents import record_of
from trainer.contract.record import Record

FILE = Path(__file__).with_name("devices.toml")


class DevicePeak(Record):
    """TFLOPs of one device; None for a dtype that its matrix units do not have.

    `pattern`: what stands in the name that its driver gives it, as a regular expression.
    `capability`: what `torch.cuda.get_device_capability` says of it, by which kernels are chosen. `float8`: where the
    trainer multiplies in it (`float8_choice.py`).
    """

    name: str
    pattern: str
    fp16: float
    fp32: float
    capability: tuple[int, int]
    bf16: float | None = None
    float8: float | None = None


@cache
def _peaks() -> tuple[DevicePeak, ...]:
    """What devices.toml holds, in its order."""
    told = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(record_of(DevicePeak, each) for each in told["device"])


def device_peak(device_name: str) -> DevicePeak | None:
    """The peaks of a device by the name its driver gives it; None when it is not known, as every
    CPU.

    A slice of a divided GPU (`... MIG 3g.40gb`) has no peak of its own here, nor a laptop's GPU of
    the same name.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name, re.IGNORECASE):
        return None
    for peak in _peaks():
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
