"""One micro batch, computed twice on every worker, beside the training: it changes no bit of it.

Each stage computes on its own, forward and backward: the first from the last micro batch of replica
0, the others from drawn hidden states, so that a wrong stage does not make those after it look
wrong. All replicas have the same weights, the same input and the same random numbers, so each
worker is compared with itself and with the same place of the other replicas. A layer is held at a
time: the check needs no more memory than a step does with full recomputation.

Tensor ranks agree before each of their operations that all can go on: where one cannot, the others
do not wait for it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.card import RunSection, TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.corruption import WorkerDigests, judge
from trainer.contract.documents import document
from trainer.contract.errors import LostRanksError
from trainer.contract.files import host_name, write_json
from trainer.contract.requests import RequestAnswer, leave_answer
from trainer.engine import Engine
from trainer.model.documents import hidden_of, joined
from trainer.parallel.agreement import one_line
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch, each_tensor, tensors_of
from trainer.parallel.replica_check import digest
from trainer.pipeline.stages import Stage

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# What the layers call between tensor ranks, and the place of the argument that holds this worker's
# own part.
PEER_FAULT = "a tensor rank that it computes with could not go on"
SHARED = {"all_reduce": 0, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_gather": 1}


def allow_repeatable_kernels() -> None:
    """Let cuBLAS keep to workspaces of its own, so that products can repeat bit for bit. Call it
    before the first.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")


def use_repeatable_kernels() -> None:
    """From now on the same input gives the same bits, also on a GPU where
    `allow_repeatable_kernels` came in time.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class _PeerFault(RuntimeError):
    """Another tensor rank could not go on."""


def check_workers(stage: Stage, mesh: Mesh, seed: int, iteration: int) -> list[WorkerDigests]:
    """Every worker's outcome, by rank, on every worker. Leaves weights, gradients and random
    streams alone. Collective.

    A worker that cannot compute says so in its outcome, and so do its tensor ranks (`PEER_FAULT`).
    Raises LostRanksError where one has died, or has not come within the timeout of the groups.
    """
    try:
        return _outcomes(stage, mesh, seed, iteration)
    except RuntimeError as error:
        raise LostRanksError(
            f"the check of the arithmetic after iteration {iteration} did not end: a rank has died or hangs"
            f" ({one_line(error)})"
        ) from error


def _outcomes(stage: Stage, mesh: Mesh, seed: int, iteration: int) -> list[WorkerDigests]:
    key = f"{seed}/corruption/{iteration}/{mesh.pipeline_rank}"
    if mesh.sequence_parallel:
        key += f"/{mesh.tensor_rank}"
    drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 2
    batch = _common_batch(stage, mesh)
    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    fault = ""
    all_go_on = _agreement(mesh)
    stage.places.begin(key, torch.arange(stage.shape[0]).unsqueeze(0))
    with _beside_the_training(stage.module, mesh.device):
        try:
            first, second = (
                _compute(stage, batch, mesh, seed=drawn, all_go_on=all_go_on) for _ in range(2)
            )
            all_go_on(True)
        except _PeerFault:
            fault = PEER_FAULT
        except (RuntimeError, ValueError) as error:
            fault = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            with suppress(_PeerFault):
                all_go_on(False)
    if fault:
        first = ()
        second = ()
    place = (mesh.rank, mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank)
    own = WorkerDigests(*place, host_name(), _name_of(mesh.device), first, second, fault)
    if mesh.world_size == 1:
        return [own]
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, own, group=mesh.cpu_group)
    return everyone


def _agreement(mesh: Mesh) -> Callable[[bool], None]:
    """Says to the tensor ranks whether this one can go on, and raises _PeerFault where one cannot.
    Collective.
    """
    add = dist.all_reduce  # as it is outside of the check, which watches it

    def all_go_on(can: bool) -> None:
        if mesh.tensor_group is None:
            return
        unable = torch.tensor(int(not can), dtype=torch.int32, device=mesh.device)
        add(unable, dist.ReduceOp.MAX, group=mesh.tensor_group)
        if int(unable):
            raise _PeerFault(PEER_FAULT)

    return all_go_on


def _common_batch(stage: Stage, mesh: Mesh) -> Batch | None:
    """The micro batch of replica 0, on all replicas of a stage that reads data. Collective over
    them.
    """
    if stage.batch is None:
        return None
    read, compared = (
        each_tensor(lambda tensor: tensor.to(mesh.device, copy=True).contiguous(), part)
        for part in stage.batch
    )
    if mesh.data_group is not None:
        first = mesh.rank_at(mesh.pipeline_rank, 0, mesh.tensor_rank)
        for tensor in (*tensors_of(read), *tensors_of(compared)):
            dist.broadcast(tensor, first, group=mesh.data_group)
    return read, compared


def _compute(
    stage: Stage, batch: Batch | None, mesh: Mesh, seed: int, all_go_on: Callable[[bool], None]
) -> tuple[int, ...]:
    """Forward, then backward, a layer at a time; digests of all results, and of what was given to
    tensor ranks.
    """
    seen: list[Tensor] = []
    streams = [_entrance(stage, batch, mesh, seed)]
    last = len(stage.layers) - 1
    with _witnessed(seen, all_go_on):
        with torch.no_grad():
            for index, layer in enumerate(stage.layers[:-1]):
                torch.manual_seed(seed + index)
                streams.append(layer(streams[-1]))
                seen.append(digest(hidden_of(streams[-1])[0]))
        gradient: Tensor | None = None
        for index in range(last, -1, -1):
            hidden, documents = hidden_of(streams.pop())
            source = hidden.detach()
            source.requires_grad_(source.is_floating_point())
            torch.manual_seed(seed + index)
            result, _ = hidden_of(stage.layers[index](joined(source, documents)))
            if index == last:
                result, gradient = _exit(stage, result, batch)
                seen.append(digest(result))
            wanted = [*([source] if source.requires_grad else ()), *stage.parameters[index]]
            if wanted:
                found = torch.autograd.grad(result, wanted, gradient, allow_unused=True)
            else:
                found = ()
            seen += [digest(part) for part in found if part is not None]
            gradient = None
            if source.requires_grad:
                gradient = found[0]
    return tuple(torch.stack(seen).tolist())


def _entrance(stage: Stage, batch: Batch | None, mesh: Mesh, seed: int) -> Any:
    """What the stage's first layer takes: tokens, or drawn hidden states of ordinary tokens, in the
    model's dtype.
    """
    if mesh.is_first_stage:
        assert batch is not None
        return batch[0]
    samples, length = stage.shape
    torch.manual_seed(seed - 1)
    if mesh.sequence_parallel:
        own = length // mesh.tensor
    else:
        own = length
    dtype = next(stage.module.parameters()).dtype
    hidden = torch.randn(samples, own, stage.hidden_size).to(mesh.device, dtype)
    if stage.plain_mark is None:
        return hidden
    return joined(
        hidden,
        torch.full((samples, length), stage.plain_mark, dtype=torch.int32, device=mesh.device),
    )


def _exit(stage: Stage, result: Tensor, batch: Batch | None) -> tuple[Tensor, Tensor | None]:
    """The last result of the stage, and the gradient that comes back to it (None: that of a
    scalar).
    """
    if stage.loss is not None:
        assert batch is not None
        return stage.loss(result, batch[1]), None
    return result, torch.randn(result.shape).to(result)


@contextmanager
def _witnessed(seen: list[Tensor], all_go_on: Callable[[bool], None]) -> Iterator[None]:
    """Within it, what this worker gives to a sum of tensor ranks is noted first: afterwards all
    have the same. And none of them begins it before all can.
    """

    def noting(operation: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(operation)
        def noted(*arguments: Any, **options: Any) -> Any:
            seen.append(digest(arguments[place]))
            all_go_on(True)
            return operation(*arguments, **options)

        return noted

    with ExitStack() as stack:
        for name, place in SHARED.items():
            stack.enter_context(mock.patch.object(dist, name, noting(getattr(dist, name), place)))
        yield


@contextmanager
def _beside_the_training(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Random streams, the mode of the layers and the choice of kernels are afterwards what they
    were.
    """
    was_training = module.training
    strict, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            module.train()
            use_repeatable_kernels()
            yield
        finally:
            module.train(was_training)
            torch.use_deterministic_algorithms(strict, warn_only=warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "its processors"
    return f"GPU {device.index}, {torch.cuda.get_device_properties(device).uuid}"


MOST_NAMED = 4  # suspects in one answer; the findings have all
NO_REPEATABLE_KERNELS = (
    "on GPUs the kernels that repeat are chosen at the start: set run.corruption_interval in the card; it counts from "
    "the next task on"
)


def _repeats(run: RunSection) -> bool:
    return run.deterministic or run.corruption_interval is not None


def choose_kernels(run: RunSection) -> None:
    """Prepare what the card asks for, before anything is computed."""
    if _repeats(run):
        allow_repeatable_kernels()
    if run.deterministic:
        use_repeatable_kernels()


@dataclass
class CorruptionWatch:
    """Compares the workers' arithmetic every `run.corruption_interval` iterations, and when asked.
    The training goes on in any case.
    """

    config: TrainerConfig
    mesh: Mesh
    attempt: AttemptIdentity
    say: Callable[[str], None]
    _asked: int = 0

    def ask(self, request: int) -> None:
        """Check after the next step, and answer the request of this number. All ranks are asked
        alike.
        """
        if self.mesh.device.type == "cuda" and not _repeats(self.config.run):
            self._answer(request, None, f"nothing was checked: {NO_REPEATABLE_KERNELS}")
        elif self._asked:
            self._answer(
                request, None, "nothing was checked: another check is under way; ask again"
            )
        else:
            self._asked = request

    def give_up(self) -> None:
        """No step comes any more: answer who still waits for a check."""
        if self._asked:
            self._answer(
                self._asked, None, "nothing was checked: the training ended before its next step"
            )
        self._asked = 0

    def after_step(self, iteration: int, engine: Engine) -> None:
        """Check when it is due or asked for; rank 0 writes down whom the results make suspect.
        Collective.
        """
        interval = self.config.run.corruption_interval
        if not self._asked and (interval is None or iteration % interval):
            return
        request, self._asked = self._asked, 0
        began = time.perf_counter()
        usual = timedelta(minutes=self.config.parallel.step_timeout_minutes)
        with self.mesh.groups.first_time(usual, "check"):
            outcomes = check_workers(engine.stage(), self.mesh, self.config.run.seed, iteration)
        if self.mesh.rank:
            return
        suspects = judge(outcomes)
        unable = [outcome for outcome in outcomes if outcome.fault]
        # those that stopped others come first
        unable.sort(key=lambda outcome: outcome.fault == PEER_FAULT)
        faults = [f"rank {outcome.rank} on {outcome.host}: {outcome.fault}" for outcome in unable]
        for line in faults[:1]:
            self.say(
                f"tr11: {len(faults)} of {len(outcomes)} ranks could not check their arithmetic; {line}"
            )
        if not suspects:
            compared = len(outcomes) - len(faults)
            if compared == 1:
                ranks = "1 rank"
            else:
                ranks = f"{compared} ranks"
            line = f"{ranks} computed as before ({time.perf_counter() - began:.1f} s)"
            self.say(f"tr11: {line}")
            left = ""
            if faults:
                left = f"; {len(faults)} could not be checked: {faults[0]}"
            self._answer(
                request, None if faults else iteration, f"iteration {iteration}: {line}{left}"
            )
            return
        for suspect in suspects:
            self.say(f"tr11: SILENT CORRUPTION: {suspect}")
        words = "; ".join(str(suspect) for suspect in suspects[:MOST_NAMED])
        more = ""
        if len(suspects) > MOST_NAMED:
            more = f"; and {len(suspects) - MOST_NAMED} more"
        self._answer(request, None, f"SILENT CORRUPTION at iteration {iteration}: {words}{more}")
        place = (
            self.config.paths.corruptions
            / f"{self.attempt.job_id}-{self.attempt.launch}-{iteration}.json"
        )
        value = {
            "time": time.time(),
            "job_id": self.attempt.job_id,
            "launch": self.attempt.launch,
            "iteration": iteration,
            "suspects": [document(suspect) for suspect in suspects],
        }
        try:
            write_json(place, value)
        except OSError as error:
            self.say(f"tr11: whom it concerns cannot be written down: {error}")

    def _answer(self, request: int, step: int | None, text: str) -> None:
        if request and self.mesh.rank == 0:
            leave_answer(
                self.config.paths,
                RequestAnswer(request, step, text, time=time.time(), job_id=self.attempt.job_id),
            )
