"""Saving on one topology and loading on another; what a checkpoint holds; what is refused; and what becomes of a step that
is saved again.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from trainer.checkpoint import randomness, store
from trainer.checkpoint.publishing import (
    CheckpointInfo,
    Extras,
    NewCheckpoint,
    make_manifest,
    publish,
)
from trainer.checkpoint.save_plan import Envelopes
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.checkpoints import find_resumable, partial_path
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry, Manifest, file_digest, manifest_faults
from trainer.contract.replacing import settle_replaced

MODEL = Model()


def info(shape: Shape, model: Model = MODEL) -> CheckpointInfo:
    facts = {"model.layers": model.layers, "model.hidden_size": model.hidden}
    return CheckpointInfo(
        shape.topology,
        facts,
        run_card_hash="abc",
        versions={"torch": torch.__version__},
        job_id="7",
    )


def extras(step: int, rank: int = 0) -> Extras:
    torch.manual_seed(100 * step + rank)
    return Extras(
        {"iteration": step, "consumed_samples": 8 * step, "consumed_tokens": 64 * step},
        randomness.capture(),
    )


def save_rank(rank: int, folder: Path, shape: Shape, step: int) -> int:
    return store.save(
        NewCheckpoint(folder, step, extras(step, rank), info(shape)),
        state(MODEL, shape, rank, step),
    ).bytes


def load_rank(
    rank: int, folder: Path, shape: Shape, step: int, group: dist.ProcessGroup | None = None
) -> tuple[list[str], int, bool, tuple[str, ...]]:
    empty = state(MODEL, shape, rank, None)
    loaded = store.load(folder, step, empty, info(shape), group=group)
    assert loaded.cursor["iteration"] == step
    if loaded.rng is not None:
        torch.manual_seed(0)
        randomness.restore(loaded.rng)
        drawn = torch.rand(4)
        torch.manual_seed(100 * step + rank)
        assert torch.equal(drawn, torch.rand(4))
    wanted = state(MODEL, shape, rank, step)
    return differences(empty, wanted), loaded.optimizer_step, loaded.rng is not None, loaded.remarks


SHAPES = [
    Shape(),
    Shape(tensor=2),
    Shape(data=2),
    Shape(pipeline=2),
    Shape(data=3),
    Shape(tensor=2, data=2),
    Shape(tensor=4),
    Shape(tensor=2, pipeline=2),
    Shape(pipeline=4),
    Shape(data=4),
]


def save_each_load_some(rank: int, folder: Path, apart: tuple[int, ...]) -> None:
    """Four ranks: the first ones save as one shape, then the ranks of the shapes that stand so far
    behind it in the list load it, in a group of their own.
    """
    groups = {size: dist.new_group(list(range(size))) for size in range(1, 5)}
    for step, saved in enumerate(SHAPES):
        if rank < saved.world:
            mine = state(MODEL, saved, rank, step)
            store.save(
                NewCheckpoint(folder, step, extras(step, rank), info(saved)),
                mine,
                group=groups[saved.world],
            )
        dist.barrier()
        for shape in [SHAPES[(step + further) % len(SHAPES)] for further in apart]:
            if rank < shape.world:
                different, count, restored, remarks = load_rank(
                    rank, folder, shape, step, groups[shape.world]
                )
                assert (different, count) == ([], 1000 + step), (saved, shape)
                assert restored == (shape == saved), (saved, shape)
                assert bool(remarks) == (shape != saved), (saved, shape)
        dist.barrier()


@pytest.mark.parametrize(
    "apart", [(0, 1, 4, 7), pytest.param(tuple(range(len(SHAPES))), marks=pytest.mark.soak)]
)
def test_every_topology_loads_what_others_saved(memory: Path, apart: tuple[int, ...]) -> None:
    """Each loads its own and those of three others: of fewer ranks, of as many and of more; all
    pairs as soak.
    """
    world.run(4, save_each_load_some, memory, apart)


def save_and_check(rank: int, folder: Path, shape: Shape) -> None:
    """Save on eight ranks, then on the same ranks load and save over it."""
    save_rank(rank, folder, shape, 1)
    save_rank(rank, folder, shape, 2)
    assert load_rank(rank, folder, shape, 1)[0] == []
    assert load_rank(rank, folder, shape, 2)[:3] == ([], 1002, True)


def test_eight_ranks_save_twice(memory: Path) -> None:
    shape = Shape(tensor=2, pipeline=2, data=2)
    world.run(shape.world, save_and_check, memory, shape)
    manifest = Manifest.read(memory / "global_step2")
    assert manifest is not None
    assert manifest_faults(memory / "global_step2", manifest, read_digests=True) == []
    assert read_latest(memory) == 2
    assert sorted(path.name for path in memory.iterdir()) == [
        "global_step1",
        "global_step2",
        "latest",
    ]
    for path in (memory / "global_step2").rglob("*"):
        assert path.stat().st_mode & 0o020, f"{path} is not group-writable"


def test_what_a_checkpoint_holds(memory: Path) -> None:
    result = store.save(
        NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3)
    )
    manifest = Manifest.read(result.folder)
    assert manifest is not None
    on_disk = {
        str(path.relative_to(result.folder)) for path in result.folder.rglob("*") if path.is_file()
    }
    assert {entry.path for entry in manifest.files} == on_disk - {"manifest.json"}
    assert {"cursor.json", "rng/rank_0.pt", "weights/.metadata", "optimizer/.metadata"} <= on_disk
    size = sum((result.folder / entry.path).stat().st_size for entry in manifest.files)
    assert result.bytes == manifest.total_bytes == size
    assert (manifest.step, manifest.consumed_samples, manifest.consumed_tokens) == (3, 24, 192)
    assert (manifest.topology, manifest.job_id, manifest.run_card_hash) == (
        Shape().topology,
        "7",
        "abc",
    )
    assert json.loads((result.folder / "cursor.json").read_text()) == {
        "step": 3,
        "iteration": 3,
        "consumed_samples": 24,
        "consumed_tokens": 192,
    }


def test_torchs_own_tool_reads_the_weights(memory: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    result = store.save(
        NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3)
    )
    dcp_to_torch_save(result.folder / "weights", memory / "weights.pt")
    plain = torch.load(memory / "weights.pt", weights_only=True)
    for item in state(MODEL, Shape(), 0, 3).weights:
        assert torch.equal(plain[item.name], item.tensor)


def test_weights_alone_are_enough_for_evaluation(memory: Path) -> None:
    result = store.save(
        NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3)
    )
    for path in sorted((result.folder / "optimizer").iterdir()):
        path.write_bytes(b"x" * path.stat().st_size)
    empty = state(MODEL, Shape(), 0, None, dtype=torch.float32)
    store.load(memory, 3, empty, info(Shape()), weights_only=True)
    wanted = state(MODEL, Shape(), 0, 3)
    pairs = zip(empty.weights, wanted.weights, strict=True)
    assert all(torch.equal(mine.tensor, theirs.tensor.float()) for mine, theirs in pairs)


def test_a_checkpoint_may_be_weights_alone(memory: Path) -> None:
    mine = state(MODEL, Shape(), 0, 3, dtype=torch.float16)
    result = store.save(
        NewCheckpoint(memory, 3, Extras(extras(3).cursor), info(Shape())),
        mine,
        save_optimizer=False,
    )
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "cursor.json",
        "manifest.json",
        "rng",
        "weights",
    ]
    empty = state(MODEL, Shape(), 0, None, dtype=torch.float32)
    loaded = store.load(memory, 3, empty, info(Shape()), weights_only=True)
    # nothing draws random numbers that a training would go on with
    assert loaded.rng is None and loaded.remarks == ()
    pairs = zip(empty.weights, mine.weights, strict=True)
    assert all(torch.equal(wide.tensor, narrow.tensor.float()) for wide, narrow in pairs)
    with pytest.raises(
        CheckpointError, match=r"holds weights alone.*checkpoint\.load_optimizer = false"
    ):
        store.load(memory, 3, state(MODEL, Shape(), 0, None, dtype=torch.float16), info(Shape()))


def test_a_training_is_told_of_random_state_that_was_not_saved(memory: Path) -> None:
    store.save(
        NewCheckpoint(memory, 3, Extras(extras(3).cursor), info(Shape())),
        state(MODEL, Shape(), 0, 3),
    )
    loaded = store.load(memory, 3, state(MODEL, Shape(), 0, None), info(Shape()))
    assert loaded.rng is None
    assert any("random-number" in remark for remark in loaded.remarks)


def test_a_save_over_the_same_step_deletes_nothing_else(memory: Path) -> None:
    store.save(NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3))
    (memory / ".global_step9.partial-dead").mkdir()
    store.save(NewCheckpoint(memory, 3, extras(4), info(Shape())), state(MODEL, Shape(), 0, 4))
    empty = state(MODEL, Shape(), 0, None)
    assert store.load(memory, 3, empty, info(Shape())).cursor["iteration"] == 4
    assert differences(empty, state(MODEL, Shape(), 0, 4)) == []
    store.save(
        NewCheckpoint(memory, 3, extras(4), info(Shape())), state(MODEL, Shape(), 0, 4)
    )  # nothing new
    assert sorted(path.name for path in memory.iterdir()) == [
        "global_step3",
        "global_step3.superseded",
        "latest",
    ]


@pytest.mark.parametrize(
    ("model", "facts", "said"),
    [
        (
            Model(layers=6),
            True,
            "model.layers is 4 in the checkpoint and 6 in the run card; set model.layers = 4",
        ),
        (Model(layers=6), False, "its weights lack layer.4.norm.weight"),
        (
            Model(layers=2),
            False,
            "its weights hold layer.2.norm.weight (and 7 more), which this run's model lacks",
        ),
        (
            Model(vocabulary=24),
            False,
            "embedding.weight has shape (20, 12) in the checkpoint and (24, 12) in this run",
        ),
        (
            Model(hidden=16),
            False,
            "embedding.weight has shape (20, 12) in the checkpoint and (20, 16) in this run",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_loaded(
    memory: Path, model: Model, facts: bool, said: str
) -> None:
    store.save(NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3))
    empty = state(model, Shape(), 0, None)
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        store.load(memory, 3, empty, info(Shape(), model if facts else MODEL))
    assert "\n" not in str(caught.value)
    assert all(item.tensor.isnan().all() for item in empty.weights)
    assert all(run.isnan().all() for item in empty.fragments for run in item.tensors.values())


def test_another_precision_is_refused(memory: Path) -> None:
    store.save(NewCheckpoint(memory, 3, extras(3), info(Shape())), state(MODEL, Shape(), 0, 3))
    empty = state(MODEL, Shape(), 0, None, dtype=torch.float32)
    said = r'is bf16 in the checkpoint and fp32 in this run; .*set precision\.dtype = "bf16"'
    with pytest.raises(CheckpointError, match=said):
        store.load(memory, 3, empty, info(Shape()))
    assert all(item.tensor.isnan().all() for item in empty.weights)


def refused_on_one_rank(rank: int, folder: Path, shape: Shape) -> str:
    """Rank 1 alone wants another vocabulary: all must hear of it, and none may load."""
    save_rank(rank, folder, shape, 1)
    empty = state(Model(vocabulary=24) if rank == 1 else MODEL, shape, rank, None)
    with pytest.raises(CheckpointError) as caught:
        store.load(folder, 1, empty, info(shape))
    assert all(item.tensor.isnan().all() for item in empty.weights)
    return str(caught.value)


def test_one_ranks_refusal_is_everyones(memory: Path) -> None:
    shape = Shape(tensor=2, data=2)
    messages = world.run(4, refused_on_one_rank, memory, shape)
    assert len(set(messages)) == 1
    assert re.search(r"rank 1 on \S+: it is of another model", messages[0])


def misfit_rank(rank: int, folder: Path) -> str:
    """Two ranks, each of which believes that it is the whole world of another size."""
    with pytest.raises(CheckpointError) as caught:
        store.save(
            NewCheckpoint(folder, 1, extras(1), info(Shape(tensor=4))),
            state(MODEL, Shape(tensor=4), rank, 1),
        )
    return str(caught.value)


def test_parts_that_do_not_make_a_whole_are_not_saved(memory: Path) -> None:
    messages = world.run(2, misfit_rank, memory)
    assert len(set(messages)) == 1
    assert "embedding.weight" in messages[0]
    assert list(memory.iterdir()) == []


def test_a_rank_may_hold_nothing_but_padding(memory: Path) -> None:
    shape, small = Shape(data=4), Model(layers=0, hidden=4, vocabulary=2)
    assert world.run(4, save_small, memory, small, shape) == [1, 1, 0, 0]
    empty = state(small, Shape(), 0, None)
    store.load(memory, 1, empty, info(Shape(), small))
    assert differences(empty, state(small, Shape(), 0, 1)) == []


def save_small(rank: int, folder: Path, model: Model, shape: Shape) -> int:
    mine = state(model, shape, rank, 1)
    store.save(NewCheckpoint(folder, 1, extras(1, rank), info(shape, model)), mine)
    return len(mine.fragments)


def search_together(rank: int, folder: Path) -> tuple[int | None, list[str], str]:
    """All four ranks search; then again after rank 0 has damaged what was left."""
    shape, said = Shape(data=4), []
    for step in (1, 2):
        save_rank(rank, folder, shape, step)
    if rank == 0:
        path = folder / "global_step2" / "weights" / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[::-1])
    dist.barrier()
    step = store.find_resumable(folder, "digests", True, said.append)
    dist.barrier()
    if rank == 0:
        (folder / "global_step1" / "manifest.json").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        store.find_resumable(folder, "digests", True, lambda line: None)
    return step, said, str(caught.value)


def test_the_search_is_one_decision_of_all_ranks(memory: Path) -> None:
    first, *others = world.run(4, search_together, memory)
    assert first[0] == 1
    assert (
        first[1][0]
        == "global_step2 is not usable: weights/__0_0.distcp: its digest differs from the manifest's"
    )
    assert "none is resumable" in first[2]
    assert others == [(1, [], first[2])] * 3, "only rank 0 reports; all get the same answer"


# ----------------------------------------------------------------------------- envelopes
# What is around a tensor's bytes depends on its type and shape alone.

DESCRIPTOR = b"PK\x07\x08"  # of a zip file; torch's writer looks for it in all that it writes


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("count", [32, 100_000])
def test_memory_that_held_an_archive_makes_no_other(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Envelopes().of(dtype, (count,))
    empty = torch.empty

    def left_over(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        held = bytearray(DESCRIPTOR * (made.nbytes // len(DESCRIPTOR)))
        return made.copy_(torch.frombuffer(held, dtype=dtype).view(made.shape))

    monkeypatch.setattr(torch, "empty", left_over)
    assert Envelopes().of(dtype, (count,)) == before


# ----------------------------------------------------------------------------- randomness
# Random-number state survives a round trip, and new seeds are a fixed function.


def draw() -> list[float]:
    mine = [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
    ]
    return [*mine, float(torch.rand(1))]


def test_every_stream_goes_on_where_it_was() -> None:
    for warm in range(
        3
    ):  # an odd number of normal deviates leaves one cached in Python and in NumPy
        draw()
        buffer = io.BytesIO()
        torch.save(randomness.capture(), buffer)
        wanted = draw()
        random.seed(warm)
        numpy.random.seed(warm)
        torch.manual_seed(warm)
        buffer.seek(0)
        randomness.restore(torch.load(buffer, weights_only=True))
        assert draw() == wanted


PARTS = ("weights/a", "optimizer/a", "cursor.json")


def written(folder: Path, content: str) -> tuple[Path, Manifest]:
    """A folder of step 5 that may be published, and its manifest."""
    partial = partial_path(folder, 5, content)
    for name in PARTS:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(content)
    entries = tuple(FileEntry(name, len(content), file_digest(partial / name)) for name in PARTS)
    return partial, make_manifest(
        5, Extras({"consumed_samples": 0, "consumed_tokens": 0}), CheckpointInfo({}, {}), entries
    )


def save(folder: Path, content: str) -> list[str]:
    """Save step 5; what was reported."""
    said: list[str] = []
    publish(folder, *written(folder, content), report=said.append)
    return said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path, name: str) -> str:
    return (folder / name / "weights" / "a").read_text()


def test_another_content_of_the_same_training_is_kept_and_said(tmp_path: Path) -> None:
    assert save(tmp_path, "first") == []
    (line,) = save(tmp_path, "other")
    save(tmp_path, "third")
    assert "global_step5.superseded" in line and "saved before with another content" in line
    assert names(tmp_path) == [
        "global_step5",
        "global_step5.superseded",
        "global_step5.superseded-2",
        "latest",
    ]
    found = [content(tmp_path, name) for name in names(tmp_path)[:3]]
    assert (
        found == ["third", "first", "other"]
        and find_resumable(tmp_path, "digests", True, print) == 5
    )


def test_the_same_content_is_there_once(tmp_path: Path) -> None:
    save(tmp_path, "same")
    assert save(tmp_path, "same") == [] and names(tmp_path) == ["global_step5", "latest"]


def cut(place: Path) -> None:
    (place / "weights" / "a").write_text("fi")


def lose(place: Path) -> None:
    (place / "optimizer" / "a").unlink()


@pytest.mark.parametrize("harm", [cut, lose])
def test_one_that_is_not_whole_makes_room(tmp_path: Path, harm: type[None]) -> None:
    save(tmp_path, "first")
    harm(tmp_path / "global_step5")
    assert save(tmp_path, "other") == [] and names(tmp_path) == ["global_step5", "latest"]


@pytest.mark.parametrize("text", ["first", "other"])
def test_what_a_person_put_into_it_stays(tmp_path: Path, text: str) -> None:
    save(tmp_path, "first")
    (tmp_path / "global_step5" / "notes.txt").write_text("before the spike")
    save(tmp_path, text)
    assert (tmp_path / "global_step5.superseded" / "notes.txt").exists()


def test_one_whose_folder_a_person_moved_to_another_disk_stays(tmp_path: Path) -> None:
    """It is whole: its files are found through the link."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    save(run, "first")
    (run / "global_step5" / "weights").rename(disk)
    (run / "global_step5" / "weights").symlink_to(disk)
    assert find_resumable(run, "digests", True, print) == 5
    save(run, "other")
    assert names(run) == ["global_step5", "global_step5.superseded", "latest"]
    assert content(run, "global_step5.superseded") == "first"


def test_one_that_cannot_be_read_at_the_moment_stays(tmp_path: Path) -> None:
    save(tmp_path, "first")
    weights = tmp_path / "global_step5" / "weights" / "a"
    weights.unlink()
    weights.symlink_to(weights.name)  # in a circle: an error, but not that it is missing
    save(tmp_path, "other")
    assert names(tmp_path) == ["global_step5", "global_step5.superseded", "latest"]


def test_a_deletion_that_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    save(tmp_path, "same")
    half = tmp_path / ".global_step5.replaced-x"
    (half / "weights").mkdir(parents=True)
    (half / "weights" / "a").write_text("same")
    settle_replaced(tmp_path)
    assert names(tmp_path) == ["global_step5", "latest"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 5))
def test_killed_before_any_rename_the_older_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The renames: the old one aside, the new one in, `latest`, then the old one's last name."""
    save(tmp_path, "first")
    rename, replace, left = Path.rename, os.replace, [at]

    def count(path: Path) -> None:
        left[0] -= path.parent == tmp_path
        if left[0] <= 0:
            raise Killed

    partial, manifest = written(tmp_path, "other")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: (count(path), rename(path, target))[1])
        patch.setattr(Path, "replace", lambda path, target: (count(path), replace(path, target))[1])
        with pytest.raises(Killed):
            publish(tmp_path, partial, manifest)
    settle_replaced(tmp_path)
    assert find_resumable(tmp_path, "digests", True, print) == 5
    found = {content(tmp_path, name) for name in names(tmp_path) if name.startswith("global_step5")}
    assert found == ({"first"} if at < 3 else {"first", "other"})
