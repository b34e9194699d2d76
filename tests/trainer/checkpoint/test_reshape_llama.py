"""`tr11 checkpoints reshape` of today's models: what it writes is loaded by other topologies, and
trained on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainer.cases import samples
from tests.trainer.checkpoint.huggingface.looks import STEP, load_and_look, train_and_save
from tests.trainer.llama_cases import KINDS, tiny_llama
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.__main__ import main
from trainer.config.card import TrainerConfig
from trainer.contract.manifest import Manifest, manifest_faults

SAME = 2e-6  # fp32 sums in another order, on losses of size 4


def card(kind: str, pipeline: int, tensor: int) -> TrainerConfig:
    """Micro batches of one sample, so that a loss is one's."""
    value = tiny_llama(pipeline, tensor, kind=kind).model_dump(mode="json")
    value["batch"] |= {"micro_batch_size": 1}
    return TrainerConfig.model_validate(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", [((2, 2), (1, 1)), ((1, 2), (2, 1))], ids=str)
def test_a_reshaped_model_is_the_same(
    kind: str,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`shapes`: pipeline and tensor degrees that save and that load: the layout has none. The
    optimizer goes on too: `load_and_look` does a step.
    """
    (pipeline, tensor), (new_pipeline, new_tensor) = shapes
    tokens = samples(card(kind, 1, 1), 100, 4)
    before = run_ranks(
        train_and_save, pipeline * tensor, card(kind, pipeline, tensor), tmp_path / "old", tokens
    )
    source = tmp_path / "old" / f"global_step{STEP}"
    assert main(["reshape", "--json", str(source), "-o", str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["new_layout"] == "tr11"
    place = tmp_path / "new" / f"global_step{STEP}"
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []

    config = card(kind, new_pipeline, new_tensor)
    for losses, _ in run_ranks(
        load_and_look, new_pipeline * new_tensor, config, tmp_path / "new", STEP, tokens
    ):
        torch.testing.assert_close(losses, before[0], atol=SAME, rtol=0)
