"""Whole training steps of the 176-billion-parameter model and of one of 1.7 billion, counted on
meta tensors.

One worker of each kind of pipeline stage, with all that the engine and DeepSpeed do in a step:
forward, recomputation, backward, accumulation in fp32, norm, clipping, update. A tensor on another
device than the rest raises.

The budgets are exact: a change that moves, makes or holds more fails here, and so does one that
needs less, whose figures then take the place of these.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.trainer.cases import tiny
from tests.trainer.counting import Counts
from tests.trainer.meta_world import meta_stage
from tr11ops.runcard.card import load_card, shipped_folder
from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.schedule import flops
from trainer.schedule.memory import MemoryShape, stage_memory

REPLICAS = 8
STAGES = {"first": 0, "middle": 5, "last": 11}  # the middle ten are alike
BLOOM_1B7 = {
    "layers": 24, "hidden_size": 2048, "attention_heads": 16, "sequence_length": 2048, "init_std": 0.0127,
    "attention_dropout": 0.1, "hidden_dropout": 0.1,
}  # fmt: skip
NORM, LOSS = "trainer.pipeline.library.agreed", "trainer.pipeline.partial_losses.updated"
READS, COPIES = {NORM: 1}, {LOSS: 1}


class Budget(Record):
    """Operations, and bytes that those moved which are no matrix products: of each further micro
    batch, and of the rest of a step. `peak`: most bytes held in a step of one micro batch beyond
    what is held between steps.
    """

    operations: int
    moved: int
    step_operations: int
    step_moved: int
    peak: int


BUDGETS = {
    "first": Budget(400, 86_921_106_080, 158, 18_924_462_114, 2_353_598_848),
    "middle": Budget(460, 89_265_810_912, 169, 17_583_463_098, 2_324_103_584),
    "last": Budget(452, 89_323_672_656, 161, 15_327_846_398, 3_450_546_556),
    "1.7B": Budget(1371, 110_606_040_948, 350, 65_451_550_046, 19_990_188_364),
}


class Seen(Record):
    """Steps of one and of two micro batches. `reads`: of the device by the host, in the second;
    `copies`: those that it does not wait for; `order`: of both. `checks`: the norm of all weights,
    and their comparison with the copies.
    """

    one: Counts
    two: Counts
    reads: dict[str, int]
    copies: dict[str, int]
    order: list[str]
    checks: Counts


def card(name: str) -> TrainerConfig:
    """The card, its batch in micro batches of the full size from the start."""
    if name == "1.7B":
        value = tiny(dtype="bf16", **BLOOM_1B7).model_dump(mode="json")
        value["batch"]["micro_batch_size"] = 4
        value["tokenizer"]["padded_vocabulary_size"] = 250_880
        return TrainerConfig.model_validate(value)
    whole = load_card(shipped_folder() / "tr11-176B-ml.toml", (), {}, keep_undefined=True)
    batch = whole.batch.model_copy(
        update={"micro_batch_size": 2, "micro_batch_ramp": [], "ramp": None}
    )
    return whole.model_copy(update={"batch": batch})


@cache
def seen(name: str) -> Seen:
    with meta_stage(card(name), STAGES.get(name, 0), REPLICAS if name in STAGES else 1) as worker:
        one, two = worker.counted(1), worker.counted(2)
        reads, copies, order = dict(worker.reads), dict(worker.copies), list(worker.order)
        with Counts() as checks:
            if name == "1.7B":
                worker.engine.params_norm()
                worker.engine.disagreeing_parameters()
        return Seen(one, two, reads, copies, order, checks)


def found(name: str) -> Budget:
    one, two = seen(name).one, seen(name).two
    operations, moved = (
        two.operations.total() - one.operations.total(),
        two.total_bytes - one.total_bytes,
    )
    return Budget(
        operations, moved, one.operations.total() - operations, one.total_bytes - moved, one.peak
    )


@pytest.mark.parametrize("name", BUDGETS)
def test_the_budget(name: str) -> None:
    assert found(name) == BUDGETS[name]


@pytest.mark.parametrize("name", BUDGETS)
def test_what_the_host_reads_in_a_step(name: str) -> None:
    """Whatever the number of micro batches it waits once, for the norm, by which the update is
    clipped or dropped. The loss has come by then, and nothing waits for the update.
    """
    assert (seen(name).reads, seen(name).copies, seen(name).order) == (READS, COPIES, [LOSS, NORM])
    assert not any(
        seen(name).two.operations[operation] for operation in ("nonzero", "equal", "masked_select")
    )


def test_fp32_and_counted_zeros_read_as_little() -> None:
    value = tiny().model_dump(mode="json")
    value["logging"]["zeros_in_gradient"] = True
    with meta_stage(TrainerConfig.model_validate(value)) as worker:
        worker.counted(2)
        assert (worker.reads, worker.order) == (READS, [LOSS, NORM])
        worker.engine.take_zeros()
        assert worker.reads == READS | {"trainer.optim.watch.take_zeros": 1}, (
            "at the logging interval"
        )


def test_products_of_the_176b_stages_are_those_of_the_formula() -> None:
    config = card("first")
    first, middle, last = (seen(name).one.product_flops for name in STAGES)
    parallel, samples = config.parallel, config.batch.micro_batch_size
    whole = parallel.tensor * (first + (parallel.pipeline - 2) * middle + last)
    assert whole == flops.hardware_flops(config, samples)


def test_products_of_the_1b7_model_are_those_of_the_formula() -> None:
    config = card("1.7B")
    needed = flops.model_flops(config, 4)
    assert (seen("1.7B").one.product_flops, seen("1.7B").two.product_flops) == (needed, 2 * needed)


@pytest.mark.parametrize("name", BUDGETS)
def test_estimate_states_no_less_than_the_peak(name: str) -> None:
    """It adds what a recomputed block keeps to the most that its backward pass makes, which frees
    the first meanwhile: half a gigabyte of 42.
    """
    config = card(name)
    replicas = REPLICAS if name in STAGES else 1
    shape, stages = MemoryShape(config, replicas, "flex", "cuda"), flops.stage_layout(config)
    assert stages is not None
    comes_and_goes = (
        "activations", "one block's backward pass", "logits and their gradients", "the embedding's gradient",
        "the head's share of the embedding's gradient",
    )  # fmt: skip
    for micro_batches, counts in ((1, seen(name).one), (2, seen(name).two)):
        size = config.batch.micro_batch_size * micro_batches * replicas
        parts = stage_memory(shape, stages[STAGES.get(name, 0)], size).parts
        stated = sum(part.bytes for part in parts if part.name in comes_and_goes)
        assert 1.0 <= stated / counts.peak < 1.25, micro_batches


def test_checks_before_a_save_read_the_device_once_each() -> None:
    """Not once for each tensor, of which a stage has hundreds: the training stands still."""
    with meta_stage(tiny(dtype="bf16")) as worker:
        state = worker.engine.sharded_state()
        worker.reads.clear()
        worker.engine.disagreeing_parameters()
        worker.engine.not_finite(state)
        asked = "trainer.parallel.replica_check."
        assert worker.reads == {f"{asked}disagreements": 1, f"{asked}not_finite": 1}


def test_checks_of_the_weights_hold_a_piece_at_a_time() -> None:
    assert 0 < seen("1.7B").checks.peak < 128 << 20
