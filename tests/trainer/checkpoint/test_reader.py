"""One process reads and rewrites what many ranks saved: every number, few bytes, and faults by
name.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.memory_source import (
    MemorySource,
    Sizes,
    extras_of,
    info_of,
    memory_source,
)
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, logical, state
from trainer.checkpoint import randomness, rewrite, store
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.checkpoint.reader import check_digests, open_checkpoint, part_bytes
from trainer.checkpoint.rewrite import row_blocks, source_bytes, write_checkpoint
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts, TensorSource
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest, manifest_faults

MODEL, SHAPE, STEP = Model(), Shape(tensor=2, data=2), 30
FACTS = {"model.layers": MODEL.layers}
EXTRAS = Extras({"iteration": STEP, "consumed_samples": 240, "consumed_tokens": 1920})


def save_rank(rank: int, folder: Path) -> None:
    extras = Extras(EXTRAS.cursor, randomness.capture())
    store.save(
        NewCheckpoint(folder, STEP, extras, CheckpointInfo(SHAPE.topology, FACTS)),
        state(MODEL, SHAPE, rank, STEP),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks saved; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    world.run(SHAPE.world, save_rank, folder)
    return folder / f"global_step{STEP}"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def wanted() -> dict[tuple[Part, str], Tensor]:
    """Every tensor of the checkpoint, as it was made."""
    tensors: dict[tuple[Part, str], Tensor] = {}
    for name, (shape, _) in MODEL.stages(1)[0].items():
        tensors["weights", name] = logical(name, "weight", shape, STEP).bfloat16()
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            tensors["optimizer", f"{name}/{kind}"] = logical(name, kind, shape, STEP)
    return tensors


def whole(source: TensorSource, part: Part, key: str) -> Tensor:
    shape = source.tensors(part)[key].shape
    return source.read(part, key, (0,) * len(shape), shape)


def check_equal(source: TensorSource) -> None:
    tensors = wanted()
    assert {("weights", key) for key in source.tensors("weights")} | {
        ("optimizer", key) for key in source.tensors("optimizer")
    } == set(tensors)
    for (part, key), value in tensors.items():
        assert source.tensors(part)[key] == TensorFacts(tuple(value.shape), value.dtype)
        assert torch.equal(whole(source, part, key), value), key


# ----------------------------------------------------------------------------- reading
def test_reads_what_four_ranks_saved(saved: Path) -> None:
    source = open_checkpoint(saved)
    check_equal(source)
    facts = source.facts
    assert (facts.step, facts.layout, dict(facts.topology)) == (STEP, "tr11", SHAPE.topology)
    assert facts.optimizer_step == 1000 + STEP
    assert facts.model == FACTS
    assert facts.cursor["consumed_tokens"] == 1920


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_rectangle(saved: Path, generator: random.Random) -> None:
    source = open_checkpoint(saved)
    part, key = generator.choice(sorted(wanted()))
    value = wanted()[part, key]
    offsets = [generator.randrange(size) for size in value.shape]
    sizes = [
        generator.randint(0, size - offset)
        for offset, size in zip(offsets, value.shape, strict=True)
    ]
    region = tuple(
        slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
    )
    assert torch.equal(source.read(part, key, offsets, sizes), value[region])


def test_a_rectangle_outside_is_refused(saved: Path) -> None:
    source = open_checkpoint(saved)
    with pytest.raises(ValueError, match="has no rectangle"):
        source.read("weights", "embedding.weight", (0, 0), (21, 12))
    with pytest.raises(CheckpointError, match=r"has no nothing among its weights"):
        source.read("weights", "nothing", (0,), (1,))


class Large:
    """A source of one tensor of 16 MiB, which no file holds."""

    facts = CheckpointFacts(1, "tr11", {}, {}, {"consumed_samples": 0, "consumed_tokens": 0}, 0)

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        return {"big.weight": TensorFacts((4096, 1024), torch.float32)} if part == "weights" else {}

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        rows = torch.arange(offsets[0], offsets[0] + sizes[0], dtype=torch.float32)
        return (rows[:, None] * 1024 + torch.arange(1024.0))[:, offsets[1] : offsets[1] + sizes[1]]


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_only_the_wanted_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_checkpoint(
        NewCheckpoint(tmp_path, 1, Extras(Large.facts.cursor), CheckpointInfo({}, {})), Large()
    )
    source = open_checkpoint(place)
    source.read("weights", "big.weight", (0, 0), (1, 1))
    before = bytes_read()
    rows = source.read("weights", "big.weight", (2000, 0), (8, 1024))
    assert torch.equal(rows, Large().read("weights", "big.weight", (2000, 0), (8, 1024)))
    assert bytes_read() - before < 8 * 4096 + (256 << 10)
    monkeypatch.setattr("trainer.checkpoint.reader._PIECE_BYTES", 5 * 4096)
    columns = source.read("weights", "big.weight", (17, 100), (2000, 3))
    assert torch.equal(columns, Large().read("weights", "big.weight", (17, 100), (2000, 3)))


def test_a_weights_only_copy(copy: Path) -> None:
    shutil.rmtree(copy / "optimizer")
    source = open_checkpoint(copy)
    assert source.tensors("optimizer") == {}
    assert source.facts.optimizer_step == 0
    assert torch.equal(
        whole(source, "weights", "layer.1.qkv.weight"), wanted()["weights", "layer.1.qkv.weight"]
    )


# ----------------------------------------------------------------------------- faults
def largest(folder: Path) -> Path:
    return max(
        (path for path in folder.iterdir() if path.suffix == ".distcp"),
        key=lambda path: path.stat().st_size,
    )


def truncate(place: Path) -> Path:
    path = largest(place / "weights")
    path.write_bytes(path.read_bytes()[:-100])
    return path


def remove(place: Path) -> Path:
    path = largest(place / "optimizer")
    path.unlink()
    return path


def garble_index(place: Path) -> Path:
    path = place / "weights" / ".metadata"
    path.write_bytes(b"\x00" * path.stat().st_size)
    return path


def garble_cursor(place: Path) -> Path:
    path = place / "cursor.json"
    path.write_text("{")
    return path


def garble_manifest(place: Path) -> Path:
    path = place / "manifest.json"
    path.write_text("{}")
    return path


def remove_weights(place: Path) -> Path:
    shutil.rmtree(place / "weights")
    return place / "weights"


@pytest.mark.parametrize(
    "damage",
    [truncate, remove, garble_index, garble_cursor, garble_manifest, remove_weights],
    ids=lambda f: f.__name__,
)
def test_faults_are_named_when_it_is_opened(copy: Path, damage: Callable[[Path], Path]) -> None:
    path = damage(copy)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(copy)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_foreign_file_of_the_same_size(copy: Path) -> None:
    path = largest(copy / "weights")
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    source = open_checkpoint(copy)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        for key in source.tensors("weights"):
            whole(source, "weights", key)
    assert str(path) in str(caught.value)


def test_swapped_files_are_not_taken_for_each_other(copy: Path) -> None:
    """Two ranks' files of the same size, exchanged: names, offsets and sizes fit, so only digests
    tell.
    """
    one, other = sorted((copy / "optimizer").glob("*.distcp"))[:2]
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    with pytest.raises(CheckpointError):
        open_checkpoint(copy)
        check_digests(copy, "optimizer")


def test_digests_find_one_changed_bit(copy: Path) -> None:
    told: list[int] = []
    check_digests(copy, "weights", told.append)
    assert sum(told) == part_bytes(copy, "weights") > 0
    path = largest(copy / "weights")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    check_digests(copy, "optimizer")
    with pytest.raises(CheckpointError, match="digest differs") as caught:
        check_digests(copy, "weights")
    assert str(path) in str(caught.value)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


# ----------------------------------------------------------------------------- rewriting
def load_rank(
    rank: int, folder: Path, shape: Shape
) -> tuple[list[str], int, bool, tuple[str, ...]]:
    empty = state(MODEL, shape, rank, None)
    loaded = store.load(folder, STEP, empty, CheckpointInfo(shape.topology, FACTS))
    return (
        differences(empty, state(MODEL, shape, rank, STEP)),
        loaded.optimizer_step,
        loaded.rng is None,
        loaded.remarks,
    )


def test_a_rewritten_checkpoint_is_the_same(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks and files: many of each. Ranks of another shape load it, torch's own tools read
    it, and so do we.
    """
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 200)
    monkeypatch.setattr(rewrite, "FILE_BYTES", 3000)
    source, told = open_checkpoint(saved), []
    info = CheckpointInfo({"tensor": 1, "pipeline": 1, "data": 1}, FACTS)
    place = write_checkpoint(
        NewCheckpoint(tmp_path / "new", STEP, EXTRAS, info), source, on_bytes=told.append
    )
    assert sum(told) == source_bytes(source) + 8  # and the optimizer's step
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == {
        "manifest.json",
        *(entry.path for entry in manifest.files),
    }
    assert len(list((place / "weights").glob("*.distcp"))) > 2
    assert read_latest(tmp_path / "new") == STEP
    check_equal(open_checkpoint(place))

    name, value = "layer.2.output.weight", wanted()["weights", "layer.2.output.weight"]
    theirs = {name: torch.empty_like(value)}
    dcp.load(theirs, checkpoint_id=place / "weights", no_dist=True)
    assert torch.equal(theirs[name], value)

    for shape in (Shape(), Shape(pipeline=2)):
        for different, steps, no_rng, remarks in world.run(
            shape.world, load_rank, tmp_path / "new", shape
        ):
            assert (different, steps, no_rng) == ([], 1000 + STEP, True)
            assert "derived again" in remarks[0]


def test_weights_alone_are_rewritten(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "optimizer")
    place = write_checkpoint(
        NewCheckpoint(tmp_path / "new", 5, EXTRAS, CheckpointInfo({}, FACTS), latest=False),
        open_checkpoint(copy),
    )
    assert not (place / "optimizer").exists()
    assert not (tmp_path / "new" / "latest").exists()
    again = open_checkpoint(place)
    assert (again.facts.step, again.tensors("optimizer")) == (5, {})
    assert set(again.tensors("weights")) == {key for part, key in wanted() if part == "weights"}


def test_an_existing_step_is_not_replaced(saved: Path) -> None:
    before = sorted(saved.parent.iterdir())
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(
            NewCheckpoint(saved.parent, STEP, EXTRAS, CheckpointInfo({}, FACTS)),
            open_checkpoint(saved),
        )
    assert sorted(saved.parent.iterdir()) == before


class Failing(Large):
    """Breaks in the middle."""

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if offsets[0]:
            raise CheckpointError("the source broke")
        return super().read(part, key, offsets, sizes)


def test_a_failing_source_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 1 << 20)
    with pytest.raises(CheckpointError, match="the source broke"):
        write_checkpoint(NewCheckpoint(tmp_path, 1, EXTRAS, CheckpointInfo({}, {})), Failing())
    assert list(tmp_path.iterdir()) == []


def limited_write(rank: int, folder: Path) -> str:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(NewCheckpoint(folder, 1, EXTRAS, CheckpointInfo({}, {})), Large())
    return str(caught.value)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    [message] = world.run(1, limited_write, tmp_path)
    assert "checkpoint of step 1 was not written in" in message and "File too large" in message
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 200))
def test_blocks_tile_the_tensor(shape: list[int], most_bytes: int) -> None:
    facts = TensorFacts(tuple(shape), torch.float32)
    seen = torch.zeros(shape)
    for offsets, sizes in row_blocks(facts, most_bytes):
        assert 4 * math.prod(sizes) <= most_bytes or not shape or sizes[0] <= 1
        seen[
            tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        ] += 1
    assert seen.eq(1).all()


# ----------------------------------------------------------------------------- finite
# No checkpoint is made of numbers that are not finite, whatever makes it.

TOPOLOGY = {"tensor": 1, "pipeline": 1, "data": 2}


@pytest.mark.parametrize("write", [write_checkpoint, write_deepspeed_layout])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("part", "key"),
    [("weights", "final_norm.bias"), ("optimizer", "blocks.1.mlp.up.weight/exp_avg_sq")],
)
def test_the_tensor_is_named_and_nothing_is_left(
    tmp_path: Path, write: Callable[..., Path], number: float, part: Part, key: str
) -> None:
    source: MemorySource = memory_source(Sizes())
    source.parts[part][key].view(-1)[-1] = number
    with pytest.raises(CheckpointError, match=rf"^{key} \({part}\) holds NaN or infinity"):
        new = NewCheckpoint(
            tmp_path / "checkpoints", 5, extras_of(source), info_of(source, TOPOLOGY)
        )
        write(new, source)
    assert list((tmp_path / "checkpoints").glob("*")) == []
