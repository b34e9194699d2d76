"""DeepSpeed, as this trainer imports it: quietly, without its own choice of device, and with the
changes below.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.optim.accumulate import add_to_accumulated, clear_gradients, forget_accumulated
from trainer.parallel.groups import START_TIMEOUT

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextlib.contextmanager
def _absent(module: str) -> Iterator[None]:
    """Have who tries to import it find that it is not installed, if no one has loaded it yet."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


# The library's tuner of settings, which is not used here, loads MLflow where that is installed: a
# third of a worker's start.
with (
    contextlib.redirect_stdout(io.StringIO()),
    warnings.catch_warnings(),
    _absent("mlflow"),
):
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime import bf16_optimizer, compiler
    from deepspeed.runtime.pipe import schedule as instructions
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    # Every engine asks whether its optimizer is Muon, which no card can name. Muon's module
    # compiles its kernels as it is loaded, for which torch's compiler would be loaded: a quarter of
    # a worker's start.
    _compile = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = _compile

__all__ = [
    "LayerSpec",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "TorchBackend",
    "deepspeed",
    "get_accelerator",
    "init_distributed",
    "instructions",
    "quiet",
]
CURRENT_DEVICE = r"barrier\(\): using the device under current context"


def _of_rank_0(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A computation of the clip norm, whose result on rank 0 counts everywhere; in host memory.
    Collective.

    Each replica adds the squares over a group of its own, and NCCL may add in another order for
    each group. Gradients that were clipped by norms one unit in the last place apart would pull the
    copies of a weight apart.

    It is read of the device once, for all that the host decides by it: whether it is finite,
    whether to clip.
    """

    @wraps(norm)
    def agreed(*arguments: Any, **options: Any) -> Tensor:
        found = norm(*arguments, **options)
        dist.broadcast(found, 0)
        return found.cpu()

    return agreed


# The two places where the library takes the norm that it clips with: for bf16, and for fp16 and
# fp32.
bf16_optimizer.get_global_norm_of_tensors = _of_rank_0(bf16_optimizer.get_global_norm_of_tensors)
DeepSpeedZeroOptimizer.scaled_global_norm = _of_rank_0(DeepSpeedZeroOptimizer.scaled_global_norm)
bf16_optimizer.BF16_Optimizer._update_hp_grad = add_to_accumulated
bf16_optimizer.BF16_Optimizer.zero_grad = clear_gradients
bf16_optimizer.BF16_Optimizer.clear_hp_grads = forget_accumulated


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Build without the library's start-up prints, and without autograd: it broadcasts tied weights
    as it builds.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def init_distributed(device: torch.device, timeout: timedelta = START_TIMEOUT) -> None:
    """Join the default process group (gloo on the CPU, nccl on CUDA), as RANK, WORLD_SIZE, MASTER_*
    and LOCAL_RANK say.

    DeepSpeed's shared-memory collective is switched off first: on CPUs it would compile C++ at
    start, and its buffers stay in /dev/shm after every run. Raises ValueError for a GPU without an
    index: NCCL would take whichever is current.
    """
    if device.type == "cuda" and device.index is None:
        raise ValueError(
            f"a worker's GPU must be named by its number, not as {device}: see worker_device()"
        )
    # else it asks every op for compilers, and builds one of them
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # DeepSpeed binds the group to the device where there are several ranks; with one alone
        # torch's barrier says that it takes the current device, which is the one set here.
        warnings.filterwarnings("ignore", message=CURRENT_DEVICE, category=UserWarning)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
