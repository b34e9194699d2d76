"""The engine's state: resume on the same and on another topology, skipped steps, dropout, guards."""

from __future__ import annotations

import gc
import hashlib
import inspect
import math
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.trainer.cases import CPU, Logical, batches, copy_state, equal, tiny
from tests.trainer.resumes import END, HALF, resumed, straight, stretches
from tests.trainer.spawn import RanksFailed, run_ranks
from trainer.config.card import TrainerConfig
from trainer.control.lifecycle import without_collections
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh, worker_device
from trainer.pipeline.library import CURRENT_DEVICE, deepspeed, init_distributed

SIZE = 8


@pytest.mark.parametrize(
    ("topology", "dtype"), [((2, 1, 2), "fp32"), ((2, 2, 1), "bf16"), ((1, 1, 1), "bf16")], ids=str
)
def test_resume_on_the_same_topology_is_bitwise(topology: tuple[int, int, int], dtype: str) -> None:
    """With dropout on: its masks are a function of the step, so nothing else needs saving."""
    pipeline, tensor, data = topology
    card = tiny(pipeline, tensor, dtype, hidden_dropout=0.1, attention_dropout=0.1)
    whole = straight(card, data)
    rest = resumed(card, whole.half, data)
    assert rest.losses == whole.losses[HALF:]
    assert equal(rest.final, whole.final)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 1, 2), (1, 2, 2)), ((1, 2, 2), (2, 1, 1))], ids=str
)
def test_resume_on_another_topology(
    saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    (alone,) = stretches([tiny()], 1, 0, END, None)
    (first,) = stretches([tiny(*saved[:2])], saved[2], 0, HALF, None)
    second = resumed(tiny(*loaded[:2]), first.final, loaded[2])
    assert (
        max(
            abs(left - right)
            for left, right in zip(first.losses + second.losses, alone.losses, strict=True)
        )
        <= 2e-6
    )


def start(topology: tuple[int, int, int]) -> Logical:
    """The whole state before the first step."""
    pipeline, tensor, data = topology
    (found,) = stretches([tiny(pipeline, tensor)], data, 0, 0, None)
    return found.final


def test_start_does_not_depend_on_topology() -> None:
    alone = start((1, 1, 1))
    cut = start((2, 2, 2))
    assert equal(alone, cut)
    assert set(alone) >= {
        "embedding.word.weight",
        "embedding.norm.bias",
        "blocks.1.mlp.down.weight",
        "final_norm.weight",
    }
    assert alone["blocks.0.attention.dense.bias"]["weight"].eq(0).all()
    assert abs(alone["embedding.word.weight"]["weight"].std().item() - 0.05) < 0.003
    assert abs(alone["blocks.0.mlp.down.weight"]["weight"].std().item() - 0.05 / 2.0) < 0.002


def poisoned(config: TrainerConfig) -> list[Any]:
    """Three steps; in the second a weight of stage 0 makes the loss NaN for this step only."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    weight = next(
        item for item in engine.sharded_state().weights if item.name.startswith("blocks.")
    )
    results = []
    for step in range(3):
        kept = weight.tensor.clone()
        if step == 1 and mesh.is_first_stage:
            weight.tensor.fill_(float("nan"))
        result = engine.train_step(batches(config, mesh, step, SIZE), SIZE)
        if step == 1:
            weight.tensor.copy_(kept)
        results.append((result, engine.sharded_state().optimizer_step, engine.params_norm()))
    engine.close()
    return results


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_with_nan_is_skipped_everywhere(dtype: str) -> None:
    for rank in run_ranks(poisoned, 2, tiny(2, 1, dtype)):
        (good, steps, _), (bad, still, norm), (again, more, _) = rank
        assert not good.skipped and steps == 1 and math.isfinite(good.loss)
        assert bad.skipped and still == 1 and math.isnan(bad.loss) and bad.grad_norm == math.inf
        assert math.isfinite(norm)
        assert not again.skipped and more == 2 and math.isfinite(again.loss)


def broken_copies(config: TrainerConfig, name: str, rank: int) -> tuple[list[str], list[str]]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    before = engine.disagreeing_parameters()
    for weight in engine.sharded_state().weights:
        if weight.name == name and mesh.rank == rank:
            weight.tensor.view(-1)[3] += 2.0**-20
    after = engine.disagreeing_parameters()
    engine.close()
    return before, after


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ((1, 2, 1), "blocks.1.input_norm.weight"),
        ((2, 1, 1), "embedding.word.weight"),
        ((1, 1, 2), "blocks.0.mlp.up.weight"),
    ],
    ids=str,
)
def test_guard_names_the_copy_that_differs(topology: tuple[int, int, int], name: str) -> None:
    pipeline, tensor, data = topology
    answers = run_ranks(broken_copies, pipeline * tensor * data, tiny(pipeline, tensor), name, 1)
    assert answers == [([], [name])] * len(answers)


def dropout_losses(config: TrainerConfig) -> list[float]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses = [engine.train_step(batches(config, mesh, step, SIZE), SIZE).loss for step in range(3)]
    assert engine.disagreeing_parameters() == []
    engine.close()
    return losses


DROPOUT: dict[str, Any] = {
    "hidden_dropout": 0.2,
    "attention_dropout": 0.2,
    "position_embedding": "rotary",
    "layers": 4,
}
UNDROPPED: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
RECOMPUTE: list[dict[str, Any]] = [
    {"recompute_blocks": 1}, {"recompute_blocks": 3}, {},
    {"recompute_granularity": "selective"}, {"recompute_granularity": "selective", "recompute_blocks": 2},
]  # fmt: skip


def recompute_curves(pipeline: int, tensor: int) -> list[tuple[list[float], str]]:
    """Losses and a digest of this rank's weights and optimizer: without dropout, without
    recomputation, each choice.
    """
    choices = [
        UNDROPPED,
        {},
        *({"activation_checkpointing": True} | choice for choice in RECOMPUTE),
    ]
    return [trained(tiny(pipeline, tensor, **(DROPOUT | choice))) for choice in choices]


def trained(config: TrainerConfig) -> tuple[list[float], str]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses = [engine.train_step(batches(config, mesh, step, SIZE), SIZE).loss for step in range(2)]
    digest = hashlib.blake2b()
    for piece in copy_state(engine):
        for elements in piece.elements.values():
            digest.update(elements.numpy().tobytes())
    engine._pipeline.destroy()
    return losses, digest.hexdigest()


def test_recomputation_with_dropout_changes_no_bit() -> None:
    """Neither all blocks, some nor attention alone, over stages and tensor ranks: the masks are
    drawn over again.
    """
    for undropped, plain, *recomputed in run_ranks(recompute_curves, 4, 2, 2):
        assert recomputed == [plain] * len(RECOMPUTE)
        assert plain[0] != undropped[0]


def params_norm(config: TrainerConfig) -> float:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    norm = engine.params_norm()
    engine.close()
    return norm


def zeros_of(config: TrainerConfig, taken_after: tuple[int, ...]) -> list[int]:
    """Zeros among the gradients of four steps, asked for after some of them."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    found = []
    for step in range(4):
        engine.train_step(batches(config, mesh, step, SIZE), SIZE)
        if step + 1 in taken_after:
            found.append(engine.take_zeros())
    assert engine.take_zeros() == 0
    engine.close()
    return found


def test_zeros_are_counted_until_they_are_asked_for() -> None:
    value = tiny(1, 2, position_embedding="absolute", max_position_embeddings=20).model_dump(
        mode="json"
    )
    value["logging"]["zeros_in_gradient"] = True
    card = TrainerConfig.model_validate(value)
    each, twice = run_ranks(zeros_of, 2, card, (1, 2, 3, 4)), run_ranks(zeros_of, 2, card, (3, 4))
    assert each[0] == each[1] and twice[0] == twice[1] == [sum(each[0][:3]), each[0][3]]
    assert all(count >= 4 * 32 for count in each[0]), "positions behind the samples' end"


def test_params_norm_counts_each_weight_once() -> None:
    tensors = start((1, 1, 1))
    expected = math.sqrt(
        sum(kinds["weight"].double().square().sum().item() for kinds in tensors.values())
    )
    for rank in run_ranks(params_norm, 4, tiny(2, 2)):
        assert abs(rank - expected) < 1e-9 * expected


def world_size_mismatch() -> None:
    Mesh.create(tiny(2, 2).parallel, CPU)


def test_mesh_refuses_a_world_it_does_not_fit() -> None:
    with pytest.raises(
        RanksFailed, match=r"tensor 2 x pipeline 2 = 4 does not divide the number of workers \(2\)"
    ):
        run_ranks(world_size_mismatch, 2)


def coordinates() -> tuple[int, int, int, tuple[int, ...], bool, bool]:
    mesh = Mesh.create(tiny(2, 2).parallel, CPU)
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    theirs = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).get_coord(mesh.rank)
    assert (theirs.pipe, theirs.data, theirs.model) == (
        mesh.pipeline_rank,
        mesh.data_rank,
        mesh.tensor_rank,
    )
    return (
        mesh.pipeline_rank,
        mesh.data_rank,
        mesh.tensor_rank,
        mesh.pipeline_ranks,
        mesh.is_first_stage,
        mesh.is_last_stage,
    )


def test_mesh_numbers_ranks_as_the_pipeline_engine_does() -> None:
    answers = run_ranks(coordinates, 8)
    assert answers[5] == (1, 0, 1, (1, 5), False, True)
    assert answers[2] == (0, 1, 0, (2, 6), True, False)


def stuck() -> None:
    if torch.distributed.get_rank() == 1:
        raise KeyError("rank one gave up")
    torch.distributed.barrier()


def test_harness_reports_the_rank_that_failed() -> None:
    with pytest.raises(RanksFailed, match="rank one gave up"):
        run_ranks(stuck, 2)


def test_a_gpu_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is joined: NCCL would take whichever GPU is current, on every rank the first."""
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: pytest.fail("it joined"))
    with pytest.raises(ValueError, match="must be named by its number, not as cuda"):
        init_distributed(torch.device("cuda"))


def test_the_gpu_of_a_worker_is_set_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    calls: list[object] = []
    monkeypatch.setattr("torch.cuda.set_device", calls.append)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: calls.append(options))
    init_distributed(worker_device(), timedelta(seconds=60))
    device, joined = calls
    assert device == torch.device("cuda", 3)
    assert joined == {"dist_backend": "nccl", "verbose": False, "timeout": timedelta(seconds=60)}


# ----------------------------------------------------------------------------- start
# What a worker loads before it trains: each second is paid by every rank, at every start.


def test_no_compiler_is_loaded_unless_the_card_asks() -> None:
    """Neither by what the loop imports, nor by an optimizer, nor by what each of DeepSpeed's engines
    asks of it. Nor a tracker of experiments, which is there to be loaded.
    """
    code = (
        "import trainer.attempt, sys, torch\n"
        "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam\n"
        "from trainer.optim.build import AdamW\n"
        "one = AdamW([{'params': [torch.ones(1, requires_grad=True)]}], 1e-3, (0.9, 0.99), 1e-8)\n"
        "one.load_state_dict(one.state_dict())\n"
        "one.zero_grad()\n"
        "print([name for name in ('torch._dynamo', 'mlflow') if name in sys.modules])\n"
        "import mlflow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr


def test_collections_go_on_after_loading() -> None:
    frozen = gc.get_freeze_count()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_the_warning_that_is_left_out_is_torchs_own() -> None:
    """Its barrier tells a worker that is alone on its GPU, in each log, that it takes the device
    that was set.
    """
    assert re.search(CURRENT_DEVICE, inspect.getsource(distributed_c10d.barrier))
