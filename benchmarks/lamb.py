"""What an update of LAMB costs: processor time an element on one thread, beside timm's Lamb and
torch's fused AdamW.

    python benchmarks/lamb.py [--layers 4] [--hidden 512] [--repeat 9]

The kinds take turns, so that all see the same machine; the smallest of the repeats counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.config.model import OptimizerSection
from trainer.optim.build import build_optimizer
from trainer.optim.interface import PartitionShare
from trainer.parallel.mesh import Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.trainer.timm_lamb import timm_lamb

KINDS: dict[str, dict[str, str]] = {
    "paper": {},
    "apex": {"lamb_variant": "apex"},
    "floored": {"lamb_variant": "floored"},
    "embedding-lr": {"lamb_variant": "embedding-lr"},
    "layer-noise": {"lamb_variant": "layer-noise"},
    "paper, stale norms": {"lamb_norms": "stale"},
    "layer-noise, stale norms": {"lamb_variant": "layer-noise", "lamb_norms": "stale"},
}


def shapes(layers: int, hidden: int) -> list[tuple[int, ...]]:
    """The matrices of so many transformer blocks."""
    return [
        (3 * hidden, hidden),
        (hidden, hidden),
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
    ] * layers


def ours(kind: str, tensors: list[Tensor]) -> Callable[[], object]:
    """A step of ours over one flat partition."""
    flat = nn.Parameter(torch.cat([tensor.flatten() for tensor in tensors]))
    section = OptimizerSection.model_validate({"type": "lamb", **KINDS[kind]})
    groups = [{"params": [flat], "weight_decay": 0.01}]
    optimizer = build_optimizer(groups, section, 1e-3, (), Mesh.single(torch.device("cpu")))
    shares, start = [], 0
    for number, tensor in enumerate(tensors):
        shares.append(PartitionShare(str(number), 0, start, tensor.numel(), 0, tuple(tensor.shape)))
        start += tensor.numel()
    optimizer.materialise(shares)
    flat.grad = torch.randn_like(flat)
    return optimizer.step


def theirs(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tensors: list[Tensor]
) -> Callable[[], object]:
    """A step of a library's optimizer over parameters."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return make(parameters).step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tensors = [torch.randn(shape) * 0.02 for shape in shapes(arguments.layers, arguments.hidden)]
    elements = sum(tensor.numel() for tensor in tensors)
    lamb = timm_lamb()
    steps = {f"lamb, {kind}": ours(kind, tensors) for kind in KINDS}
    steps["timm Lamb"] = theirs(
        lambda parameters: lamb(parameters, lr=1e-3, max_grad_norm=None), tensors
    )
    steps["torch AdamW, fused"] = theirs(
        lambda parameters: torch.optim.AdamW(parameters, fused=True), tensors
    )
    best = dict.fromkeys(steps, float("inf"))
    for repeat in range(arguments.repeat + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if repeat:  # the first makes the state
                best[name] = min(best[name], time.process_time() - began)
    for name, seconds in best.items():
        ratio = best["timm Lamb"] / seconds
        print(
            f"{name:30} {seconds / elements * 1e9:6.2f} ns an element  {ratio:5.2f}x timm Lamb's speed"
        )


if __name__ == "__main__":
    main()
