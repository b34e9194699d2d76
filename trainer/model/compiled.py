"""Blocks compiled with torch.compile (`model.compile_blocks`): one code for all blocks of a worker.

Compiled is what lies between two collectives, the inner part of attention with it: a whole block
where nothing is cut. Each part is one whole graph: torch may not leave some of it uncompiled.
Another number of tokens or samples makes a second graph, in which that number is free; so a
curriculum makes two graphs of a part, not one for each length. More variants than `MOST_VARIANTS`
end the training: one rank that fell back alone would round otherwise than its tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar

import torch

from trainer.config.card import CardError, Problem, TrainerConfig
from trainer.config.kernel_choice import INSTALL_IT, KernelChoice, compiler_obstacle

Function = TypeVar("Function", bound=Callable[..., Any])

BACKEND = "inductor"
# Of one part: training, evaluation and the check of the arithmetic, each with fixed and with free
# sizes.
MOST_VARIANTS = 16


class Compiler:
    """Compiles functions, each once, whichever block asks. `graphs`: made so far; `seconds`: that
    took.

    Only of the forward passes: a backward graph is made with each that is trained.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.seconds = 0.0
        self._told = 0
        self._made: dict[Callable[..., Any], Callable[..., Any]] = {}
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)

    def __call__(self, function: Function) -> Function:
        if function not in self._made:
            self._made[function] = torch.compile(function, backend=self._backend, fullgraph=True)
        return self._made[function]  # type: ignore[return-value]

    def news(self) -> str | None:
        """A line for the log when graphs were made since the last call: the step that made them
        took that longer.
        """
        if self.graphs == self._told:
            return None
        self._told = self.graphs
        return f"compiled blocks: {self.graphs} graphs so far, made in {self.seconds:.0f} s by torch.compile"

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        began = perf_counter()
        code: Callable[..., Any] = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        self.graphs += 1
        self.seconds += perf_counter() - began
        return code


def compiler_for(config: TrainerConfig, device: torch.device) -> Compiler | None:
    """The compiler of this worker's blocks; None unless the card asks for it. Raises CardError
    where it cannot work.

    Now, and not at the first length that no earlier attempt left in the compiler's cache.
    """
    if not config.model.compile_blocks:
        return None
    obstacle = compiler_obstacle(device.type)
    if obstacle is not None:
        raise CardError("run card", [Problem("model.compile_blocks", True, obstacle, INSTALL_IT)])
    return Compiler()


def compiles_small_parts(device: torch.device) -> bool:
    """Whether what torch has no kernel for is compiled on this device, also where the blocks are
    not.
    """
    return device.type == "cuda" and compiler_obstacle(device.type) is None


def makes_code(compiler: Compiler | None, kernel: KernelChoice, device: torch.device) -> bool:
    """Whether the first step of this worker makes code: its blocks', attention's, or on a GPU that
    of the loss.
    """
    return compiler is not None or kernel.is_compiled or compiles_small_parts(device)


def uncompiled(function: Function) -> Function:
    """In place of a Compiler: the function as it is."""
    return function


def compile_caches(environment: Mapping[str, str]) -> str:
    """Where the code that torch.compile makes is kept for the next launch, in words."""
    place = environment.get("TORCHINDUCTOR_CACHE_DIR")
    if place:
        return f"kept for the next launch in {place}"
    return "kept where torch keeps it by itself"
