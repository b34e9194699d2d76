"""Gradients in fp32: a step's first is written over what is there, and what had none in a step is
zero.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainer.optim.accumulate import add_to_accumulated, clear_forgotten, forget_accumulated


def made(count: int) -> tuple[Any, list[nn.Parameter]]:
    """What the functions know of DeepSpeed's optimizer: a flat buffer, in parts of three."""
    flat = torch.zeros(3 * count)
    held = SimpleNamespace(
        fp32_groups_gradients=[list(flat.split(3))], fp32_groups_has_gradients=[[False] * count]
    )
    return held, [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(count)]


def add(held: Any, parameters: list[nn.Parameter], values: list[float | None]) -> None:
    for index, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        parameter.grad = None if value is None else torch.full((3,), value, dtype=torch.bfloat16)
        add_to_accumulated(held, parameter, 0, index)


def sums(held: Any) -> list[float]:
    return [float(part[0]) for part in held.fp32_groups_gradients[0]]


def test_a_step_begins_anew_without_a_pass_that_clears() -> None:
    held, parameters = made(3)
    add(held, parameters, [1.0, 2.0, float("nan")])
    add(held, parameters, [2.0**-10, 2.0, 1.0])
    assert sums(held)[:2] == [1.0 + 2.0**-10, 4.0], "in fp32"
    forget_accumulated(held)
    add(held, parameters, [5.0, None, 7.0])
    add(held, parameters, [1.0, None, 1.0])
    clear_forgotten(held)
    assert sums(held) == [6.0, 0.0, 8.0]
    forget_accumulated(held)
    clear_forgotten(held)
    assert sums(held) == [0.0, 0.0, 0.0]
