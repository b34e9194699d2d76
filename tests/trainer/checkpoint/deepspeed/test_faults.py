"""Files of the original layout that are missing, truncated, in another's place or foreign: named,
nothing loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.checkpoint.memory_source import Sizes, extras_of, info_of, memory_source
from trainer.checkpoint.deepspeed.layout import open_deepspeed_layout
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import NewCheckpoint
from trainer.contract.errors import CheckpointError

TOPOLOGY = {"tensor": 2, "pipeline": 2, "data": 2}
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one model: step 5, step 6, and step 7 of a wider model; without
    manifests.
    """
    folder = tmp_path_factory.mktemp("pristine")
    for step, sizes in ((5, Sizes()), (6, Sizes()), (7, Sizes(hidden=16))):
        source = memory_source(sizes, step)
        place = write_deepspeed_layout(
            NewCheckpoint(folder, step, extras_of(source), info_of(source, TOPOLOGY)), source
        )
        (place / "manifest.json").unlink()
    return folder


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of step 5, to be damaged."""
    return Path(shutil.copytree(pristine / "global_step5", tmp_path / "global_step5"))


def layer(position: int, rank: int = 0) -> str:
    return f"layer_{position:02d}-model_{rank:02d}-model_states.pt"


def states(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def optimizer(data_rank: int, rank: int) -> str:
    return f"bf16_zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"


def swap(one: str, other: str) -> Damage:
    def damage(place: Path) -> None:
        (place / one).rename(place / "aside")
        (place / other).rename(place / one)
        (place / "aside").rename(place / other)

    return damage


def change(name: str, edit: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(place: Path) -> None:
        contents = torch.load(place / name, weights_only=False)
        edit(contents)
        torch.save(contents, place / name)

    return damage


def foreign_layer(place: Path) -> None:
    for rank in range(2):
        torch.save({"a": torch.ones(1)}, place / layer(9, rank))


def refusal(place: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_deepspeed_layout(place)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_copy_itself_is_good(place: Path) -> None:
    assert len(open_deepspeed_layout(place).tensors("optimizer")) == 3 * len(Sizes().shapes())


EVERY_CLASS = [
    layer(1),
    layer(3, 1),
    layer(5),
    layer(7, 1),
    states(0),
    states(3),
    optimizer(0, 0),
    optimizer(1, 3),
]


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_a_missing_file_is_named(place: Path, name: str) -> None:
    (place / name).unlink()
    assert f"{place / name} is missing" in refusal(place)


@pytest.mark.parametrize("position", [3, 4, 5])
def test_a_layer_missing_on_every_rank_is_named(place: Path, position: int) -> None:
    for rank in range(2):
        (place / layer(position, rank)).unlink()
    assert f"{place / layer(position)} is missing" in refusal(place)


@pytest.mark.parametrize("name", EVERY_CLASS)
@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_truncated_file_is_named(place: Path, name: str, left: int) -> None:
    data = (place / name).read_bytes()
    (place / name).write_bytes(data[: left if left >= 0 else len(data) - 200])
    assert f"{place / name} is damaged or not a checkpoint file" in refusal(place)


def test_the_embedding_or_the_last_norm_may_not_be_missing(place: Path) -> None:
    for position, what in ((1, "word embedding"), (7, "last LayerNorm")):
        for rank in range(2):
            (place / layer(position, rank)).rename(place / f"aside{rank}")
        assert f"{place} holds no file of the model's {what}" in refusal(place)
        for rank in range(2):
            (place / f"aside{rank}").rename(place / layer(position, rank))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (layer(3), layer(4), "does not belong to"),
        (layer(4, 0), layer(4, 1), "does not belong to"),
        (layer(5), layer(7), "holds the model's"),
        (layer(1), layer(3), "does not hold the word embedding"),
        (optimizer(0, 0), optimizer(1, 0), "holds the partitions of another rank"),
        (optimizer(0, 0), optimizer(0, 1), "does not belong to"),
        (optimizer(1, 0), optimizer(1, 2), "holds the partitions of another rank"),
    ],
)
def test_files_in_each_others_place(place: Path, one: str, other: str, said: str) -> None:
    swap(one, other)(place)
    message = refusal(place)
    assert re.search(said, message), message
    assert one in message or other in message


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        (states(2), "global_step6", "has iteration 6, and the other files make it 5"),
        (optimizer(1, 1), "global_step6", "is of update 4 and"),
        (layer(4), "global_step6", "does not belong to"),
        (layer(4), "global_step7", "one of them is of another checkpoint"),
        (optimizer(0, 2), "global_step7", "elements of|it is of another model|is of update"),
    ],
)
def test_a_file_of_another_checkpoint(
    place: Path, pristine: Path, name: str, source: str, said: str
) -> None:
    shutil.copy(pristine / source / name, place / name)
    message = refusal(place)
    assert re.search(said, message) and name in message, message


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            change(layer(4), lambda held: held.update({"extra.weight": torch.zeros(2)})),
            "holds extra.weight, which",
        ),
        (
            change(layer(4), lambda held: held.pop("mlp.dense_h_to_4h.bias")),
            "lacks mlp.dense_h_to_4h.bias",
        ),
        (
            change(layer(4, 1), lambda held: held.pop("mlp.dense_h_to_4h.bias")),
            "lacks mlp.dense_h_to_4h.bias",
        ),
        (
            change(states(0), lambda held: held.update(checkpoint_version=1.0)),
            "not in the order of heads",
        ),
        (change(states(1), lambda held: held.update(mp_world_size=8)), "has mp_world_size 8"),
        (
            change(
                states(0),
                lambda held: held["ds_config"]["zero_optimization"].update(
                    round_robin_gradients=True
                ),
            ),
            "round_robin_gradients",
        ),
        (
            change(
                optimizer(1, 1),
                lambda held: held["optimizer_state_dict"].update(partition_count=[4, 4]),
            ),
            r"is one of \[4, 4\] partitions",
        ),
        (change(optimizer(1, 1), lambda held: held.clear()), "holds no state of ZeRO stage 1 or 2"),
        (
            change(
                optimizer(0, 0),
                lambda held: held["optimizer_state_dict"]["base_optimizer_state"]["state"][
                    0
                ].update(exp_avg=torch.zeros(3)),
            ),
            "should be elements",
        ),
        (lambda place: torch.save([1, 2], place / layer(3)), "holds a list, not a dictionary"),
        (lambda place: torch.save({"a": torch.ones(1)}, place / layer(9)), "layer_09.* is missing"),
        (
            foreign_layer,
            "layer_09.* is not a layer of a GPT",
        ),
        (
            lambda place: shutil.copy(
                place / optimizer(0, 0), place / optimizer(0, 0).removeprefix("bf16_")
            ),
            "mixes two checkpoints",
        ),
    ],
)
def test_contents_that_do_not_fit(place: Path, damage: Damage, said: str) -> None:
    damage(place)
    message = refusal(place)
    assert re.search(said, message), message


def test_another_folder_is_refused(tmp_path: Path) -> None:
    assert "is not in the DeepSpeed layout" in refusal(tmp_path)
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "nowhere")


def test_a_manifest_is_believed_over_the_files(pristine: Path, tmp_path: Path) -> None:
    source = memory_source(Sizes())
    place = write_deepspeed_layout(
        NewCheckpoint(tmp_path, 5, extras_of(source), info_of(source, TOPOLOGY)), source
    )
    with (place / layer(4)).open("ab") as stream:
        stream.write(b"x")
    assert re.search(
        r"is damaged: layer_04-model_00-model_states.pt: \d+ bytes, the manifest says",
        refusal(place),
    )


class Hostile:
    """Would create a file if anything ran it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_file_is_not_run(place: Path, tmp_path: Path) -> None:
    change(layer(4), lambda held: held.update(payload=Hostile(tmp_path / "was-run")))(place)
    refusal(place)
    assert not (tmp_path / "was-run").exists()


# ------------------------------------------------------------------ writing
def test_a_step_that_exists_is_not_replaced(pristine: Path) -> None:
    source = memory_source(Sizes())
    before = sorted(path.name for path in pristine.iterdir())
    with pytest.raises(CheckpointError, match="global_step5 exists already and is not replaced"):
        write_deepspeed_layout(
            NewCheckpoint(pristine, 5, extras_of(source), info_of(source, TOPOLOGY)), source
        )
    assert sorted(path.name for path in pristine.iterdir()) == before


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ({"tensor": 5}, "cannot be cut into 5 equal parts"),
        ({"tensor": 8}, "4 attention heads cannot be cut into 8 equal parts"),
        ({"pipeline": 4}, "3 blocks cannot be dealt to 4 stages so that each has one"),
    ],
)
def test_degrees_that_do_not_fit_the_model(
    tmp_path: Path, topology: dict[str, int], said: str
) -> None:
    source = memory_source(Sizes())
    with pytest.raises(CheckpointError, match=said):
        write_deepspeed_layout(
            NewCheckpoint(tmp_path / "new", 5, extras_of(source), info_of(source, topology)), source
        )
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_of_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reads = memory_source(Sizes()), []
    whole_read = source.read

    def failing(*arguments: Any) -> torch.Tensor:
        reads.append(arguments)
        if len(reads) == 50:
            raise CheckpointError("the source is damaged")
        return whole_read(*arguments)

    monkeypatch.setattr(source, "read", failing)
    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_deepspeed_layout(
            NewCheckpoint(tmp_path, 5, extras_of(source), info_of(source, TOPOLOGY)), source
        )
    assert list(tmp_path.iterdir()) == []
