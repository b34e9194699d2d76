"""Cards against the memory of their GPUs: what fits, what is refused, and which keys would help."""

from __future__ import annotations

import re

import pytest

from tr11ops.runcard.card import RunCard, broken_rules, load_card, shipped_folder
from tr11ops.runcard.check import Level, PreflightCheck
from tr11ops.runcard.gpu_memory import changes, least_recomputed, memory_checks, memory_of

GIB = 2**30
HEAVY = ["model.activation_checkpointing=false"]


def card(*sets: str, name: str = "tr11-176B-ml") -> RunCard:
    return load_card(shipped_folder() / f"{name}.toml", list(sets), {}, keep_undefined=True)


def checked(*sets: str) -> PreflightCheck:
    (check,) = memory_checks(card(*sets))
    return check


@pytest.mark.parametrize("name", ["tr11-176B-ml", "tr11-176B-ml-24n", "setup-test-n2"])
def test_the_shipped_cards_fit_the_gpus_that_they_ran_on(name: str) -> None:
    """384 A100 of 80 GiB, later 192, trained it with micro batches of two and every block
    recomputed.
    """
    (check,) = memory_checks(card(name=name))
    assert check.level is Level.OK


def test_the_parts_of_the_176b_training() -> None:
    """Stage 0 of 12: 5 blocks and a quarter of the embedding, 12 micro batches of 2 on the way, 8
    replicas.
    """
    found = memory_of(card())
    assert found is not None and (found.stage, found.micro_batch) == (0, 2)
    parts = {part.name: part.bytes for part in found.parts}
    parameters = parts["weights"] / 2
    assert parameters == pytest.approx(5 * 2.466e9 / 4 + 250_880 / 4 * 14336, rel=1e-3)
    assert parts["gradients"] == 4 * parameters
    assert parts["fp32 master weights"] + parts["moments"] == pytest.approx(12 * parameters / 8)
    unit = 2 * 2048 * 14336 * 2  # the residual stream of a micro batch
    # blocks; norm, mask, the output's share
    assert parts["activations"] == pytest.approx(12 * (5 + 1.75) * unit)
    assert "attention bias" not in parts  # it is computed in the kernel, and dropout too
    assert 40 * GIB < found.total < 55 * GIB


def test_a_card_that_cannot_fit_is_refused_with_what_helps() -> None:
    check = checked(*HEAVY)
    assert (check.level, check.exit_code, check.name) == (Level.REFUSED, 2, "slurm.gpu_memory_gb")
    assert re.fullmatch(
        r"a worker of stage 1 needs [\d.]+ GiB of 80 GiB; the largest part: activations, [\d.]+ GiB; "
        r"recomputing (\d+) of 70 blocks would fit",
        check.text,
    )
    least = least_recomputed(card(*HEAVY))
    assert check.fix == (
        "set batch.micro_batch_size = 1 without a micro_batch_ramp or parallel.sequence_parallel = true or "
        f"model.activation_checkpointing = true with model.recompute_blocks = {least}"
    )
    few = checked("model.recompute_blocks=2")
    assert few.level is Level.REFUSED and few.fix.endswith(f"or model.recompute_blocks = {least}")
    (ready,) = memory_checks(card(*HEAVY, "batch.micro_batch_size=1", "batch.micro_batch_ramp=[]"))
    assert ready.level in (Level.OK, Level.WARNING)


def test_changes_that_help_only_together_are_named_together() -> None:
    check = checked("slurm.gpu_memory_gb=26")
    assert (
        check.level is Level.REFUSED
        and check.fix.startswith("set ")
        and check.fix.endswith(" together")
    )
    hopeless = checked("slurm.gpu_memory_gb=2")
    assert hopeless.fix == "use GPUs with more memory, or a smaller model"
    assert hopeless.text.endswith("recomputing every block would not do")


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_the_fewest_recomputed_blocks_fit_and_one_fewer_not(granularity: str) -> None:
    """Selective recomputation drops nothing that torch's fused kernels keep: it cannot make this
    card fit.
    """
    recomputing = [
        "model.activation_checkpointing=true",
        f"model.recompute_granularity={granularity}",
    ]
    whole = card(*recomputing, "slurm.gpu_memory_gb=80")
    least = least_recomputed(whole)
    if granularity == "selective":
        assert least is None
        return
    assert least is not None and 0 < least < whole.model.layers
    assert checked(*recomputing, f"model.recompute_blocks={least}").level is Level.OK
    assert checked(*recomputing, f"model.recompute_blocks={least - 1}").level is not Level.OK
    assert least_recomputed(card("slurm.gpu_memory_gb=200")) == 0
    assert least_recomputed(card("slurm.gpu_memory_gb=2")) is None


def test_every_change_is_a_sound_card_that_needs_less() -> None:
    """Twice the nodes are not among them here: levels of the batch ramp would not divide."""
    whole = card(*HEAVY)
    before = memory_of(whole)
    assert before is not None
    texts = []
    for text, changed in changes(whole):
        after = memory_of(changed)
        assert after is not None and after.total < before.total, text
        assert broken_rules(changed) == []
        texts.append(text)
    assert {"parallel.tensor = 8", "parallel.pipeline = 24", 'optimizer.type = "adam8bit"'} <= set(
        texts
    )
    assert "slurm.nodes = 96" not in texts


def test_tight_is_a_warning_and_unstated_memory_is_unknown() -> None:
    found = memory_of(card())
    assert found is not None
    assert checked(f"slurm.gpu_memory_gb={found.total / GIB / 0.97:.3f}").level is Level.WARNING
    assert checked(f"slurm.gpu_memory_gb={found.total / GIB / 0.90:.3f}").level is Level.OK
    assert list(memory_checks(card(name="demo"))) == []
    alone = card()
    silent = alone.model_copy(
        update={"slurm": alone.slurm.model_copy(update={"gpu_memory_gb": None})}
    )
    (check,) = memory_checks(silent)
    assert check.level is Level.WARNING and "the memory of the GPUs is unknown" in check.text
