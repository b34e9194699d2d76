"""The original layout written and read without processes: every topology, partition arithmetic,
other tools' rules.
"""

from __future__ import annotations

import argparse
import io
import pickle
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.trainer.checkpoint.memory_source import (
    Sizes,
    differences,
    extras_of,
    info_of,
    memory_source,
)
from trainer.checkpoint.deepspeed import partition
from trainer.checkpoint.deepspeed.content import OptimizerSettings
from trainer.checkpoint.deepspeed.file_names import cut_dimension, place_of
from trainer.checkpoint.deepspeed.layout import DeepSpeedSource, open_deepspeed_layout
from trainer.checkpoint.deepspeed.states import open_states
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.checkpoint.source import Part, TensorSource
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest, manifest_faults

SIZES = Sizes()


def shape(tensor: int = 1, pipeline: int = 1, data: int = 1) -> dict[str, int]:
    return {"tensor": tensor, "pipeline": pipeline, "data": data}


def write(
    folder: Path, source: TensorSource, topology: Mapping[str, int], **options: Any
) -> DeepSpeedSource:
    new = NewCheckpoint(folder, source.facts.step, extras_of(source), info_of(source, topology))
    place = write_deepspeed_layout(new, source, **options)
    return open_deepspeed_layout(place)


@pytest.mark.parametrize(
    ("topology", "sizes", "dtype"),
    [
        (shape(), SIZES, torch.bfloat16),
        (shape(2, 2, 2), SIZES, torch.bfloat16),
        (shape(4, 1, 3), Sizes(positions=10, embedding_norm=False), torch.float32),
        (shape(1, 3, 2), Sizes(layers=4, positions=10), torch.float32),
        (shape(1, 1, 12), SIZES, torch.bfloat16),
        (shape(2, 1, 12), SIZES, torch.float32),
    ],
    ids=str,
)
def test_every_topology_is_read_back_bitwise(
    tmp_path: Path, topology: dict[str, int], sizes: Sizes, dtype: torch.dtype
) -> None:
    source = memory_source(sizes, dtype=dtype)
    found = write(tmp_path, source, topology)
    assert differences(found, source) == []
    assert (found.facts.topology, found.facts.cursor) == (topology, source.facts.cursor)
    assert (found.facts.model, found.facts.step) == (source.facts.model, source.facts.step)
    assert found.facts.optimizer_step == source.facts.optimizer_step
    assert found.remarks == []
    manifest = Manifest.read(tmp_path / "global_step5")
    assert (
        manifest is not None
        and manifest_faults(tmp_path / "global_step5", manifest, read_digests=True) == []
    )
    assert read_latest(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step5", "latest"]


def test_from_the_tr11_layout_and_back(tmp_path: Path) -> None:
    source = memory_source(SIZES)
    first = write_checkpoint(
        NewCheckpoint(tmp_path / "a", 5, extras_of(source), info_of(source, shape(2, 2, 1))), source
    )
    theirs = write(tmp_path / "b", open_checkpoint(first), shape(2, 2, 2))
    again = write_checkpoint(
        NewCheckpoint(tmp_path / "c", 5, extras_of(theirs), info_of(theirs, theirs.facts.topology)),
        theirs,
    )
    opened = open_checkpoint(tmp_path / "b" / "global_step5")
    assert isinstance(opened, DeepSpeedSource)
    assert differences(open_checkpoint(again), source) == []
    assert open_checkpoint(again).facts.optimizer_step == source.facts.optimizer_step
    third = write(tmp_path / "d", opened, shape(4, 1, 5))
    assert differences(third, source) == []


def test_weights_without_an_optimizer(tmp_path: Path) -> None:
    source = memory_source(SIZES, optimizer=False)
    found = write(tmp_path, source, shape(2, 2, 3))
    assert found.tensors("optimizer") == {}
    assert differences(found, source) == []
    assert [path.name for path in tmp_path.rglob("*optim_states.pt")] == []


def test_the_weights_only_subset_of_a_checkpoint_is_enough(tmp_path: Path) -> None:
    source = memory_source(SIZES)
    write(tmp_path, source, shape(2, 2, 3))
    for path in [*tmp_path.rglob("*optim_states.pt"), *tmp_path.rglob("manifest.json")]:
        path.unlink()
    found = open_deepspeed_layout(tmp_path / "global_step5")
    assert found.tensors("optimizer") == {}
    assert found.facts.optimizer_step == source.facts.optimizer_step
    assert differences(found, memory_source(SIZES, optimizer=False)) == []


def test_a_source_travels_to_other_processes(tmp_path: Path) -> None:
    source = memory_source(SIZES)
    found = write(tmp_path, source, shape(2, 2, 2))
    found.read("weights", "final_norm.bias", (0,), (8,))
    sent = pickle.dumps(found)
    assert len(sent) < 200_000, "where things lie, not what they are"
    assert differences(pickle.loads(sent), source) == []


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> DeepSpeedSource:
    return write(tmp_path_factory.mktemp("opened"), memory_source(SIZES), shape(2, 2, 5))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rectangle_of_any_tensor(opened: DeepSpeedSource, data: st.DataObject) -> None:
    found, source = opened, memory_source(SIZES)
    part: Part = data.draw(st.sampled_from(["weights", "optimizer"]))
    key = data.draw(st.sampled_from(sorted(found.tensors(part))))
    offsets, sizes = [], []
    for extent in found.tensors(part)[key].shape:
        low = data.draw(st.integers(0, extent - 1))
        offsets.append(low)
        sizes.append(data.draw(st.integers(1, extent - low)))
    assert torch.equal(
        found.read(part, key, offsets, sizes), source.read(part, key, offsets, sizes)
    )


def test_copies_that_differ_are_averaged_and_named(tmp_path: Path) -> None:
    write(tmp_path, memory_source(SIZES, dtype=torch.float32), shape(2))
    (tmp_path / "global_step5" / "manifest.json").unlink()
    path = tmp_path / "global_step5" / "layer_04-model_01-model_states.pt"
    states = torch.load(path)
    mine = states["input_layernorm.weight"].clone()
    states["input_layernorm.weight"] = mine + 0.5
    torch.save(states, path)
    said: list[str] = []
    found = open_deepspeed_layout(tmp_path / "global_step5", said.append)
    for _ in range(2):
        value = found.read("weights", "blocks.1.input_norm.weight", (0,), (8,))
    assert torch.allclose(value, mine + 0.25)
    assert (
        said
        == found.remarks
        == [
            "the tensor ranks' copies of blocks.1.input_norm.weight differ by up to 0.5; their mean is taken"
        ]
    )
    assert torch.equal(
        found.read("weights", "blocks.0.input_norm.weight", (0,), (8,)),
        _masters("blocks.0.input_norm"),
    )


def _masters(name: str) -> Tensor:
    return memory_source(SIZES, dtype=torch.float32).parts["weights"][f"{name}.weight"]


def test_partitions_without_slice_mappings_are_cut_by_shapes(tmp_path: Path) -> None:
    source = memory_source(SIZES)
    write(tmp_path, source, shape(2, 2, 11))
    (tmp_path / "global_step5" / "manifest.json").unlink()
    for path in tmp_path.rglob("*optim_states.pt"):
        states = torch.load(path, weights_only=False)
        del states["optimizer_state_dict"]["param_slice_mappings"]
        torch.save(states, path)
    assert differences(open_deepspeed_layout(tmp_path / "global_step5"), source) == []


class Elsewhere:
    """A class that a reader must not need, nor run."""

    def __init__(self, value: int):
        self.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AssertionError("the class's own code was run")


def test_foreign_classes_are_read_without_running_them(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    torch.save({"thing": Elsewhere(7), "tensor": torch.arange(3), "kind": torch.bfloat16}, path)
    states = open_states(path)
    assert states["thing"].value == 7 and type(states["thing"]) is not Elsewhere
    assert states["tensor"].tolist() == [0, 1, 2] and states["kind"] is torch.bfloat16


# -------------------------------------------------- against DeepSpeed's and Transformers' own rules
@pytest.mark.parametrize("data", [1, 2, 3, 10, 12, 13])
def test_partitions_are_deepspeeds(data: int) -> None:
    """DeepSpeed's own linking of parameters to partitions, for as many data ranks as two digits
    need, and more.
    """
    from deepspeed.utils import get_hp_fragment_mapping
    from deepspeed.utils.mixed_precision_linkage import _init_lp_to_hp_mapping

    shapes = [(7, 5), (3,), (11, 2), (1,), (64,), (9, 9), (2,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sizes = [(str(index), item.numel()) for index, item in enumerate(parameters)]
    total = sum(numel for _, numel in sizes)
    size = partition.partition_elements(total, data)
    assert size * data >= total and size % 2 == 0 and (size - 2) * data < total
    held: dict[str, int] = {}
    for rank in range(data):
        ours = partition.fragments_of(sizes, data, rank)
        flat = torch.zeros(size)
        theirs = []
        for parameter, start in _init_lp_to_hp_mapping(parameters, rank * size, size, None):
            linked = get_hp_fragment_mapping(
                parameter, start, flat, {}, {}, False, 0, rank * size, size
            )
            name = next(
                name for (name, _), item in zip(sizes, parameters, strict=True) if item is parameter
            )
            address, where = linked.lp_fragment_address, linked.hp_fragment_address
            theirs.append(partition.FlatFragment(name, address.start, address.numel, where.start))
        assert ours == theirs
        padding = partition.padding_elements(total, data, rank)
        assert padding == size - sum(item.numel for item in ours)
        for item in ours:
            assert item.first == held.get(item.name, 0)
            held[item.name] = item.first + item.numel
    assert held == dict(sizes)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 7, 8, 12])
def test_stages_are_deepspeeds(layers: int) -> None:
    from deepspeed.runtime.utils import partition_balanced

    for stages in range(1, min(layers, 5) + 1):
        theirs = partition_balanced([0, 1, 0, *[1] * layers, 0, 0, 1, 0], stages)
        with_blocks = all(
            any(3 <= at < 3 + layers for at in range(*pair)) for pair in pairwise(theirs)
        )
        if with_blocks:
            assert partition.stage_bounds(layers, stages) == [int(bound) for bound in theirs]
        else:
            with pytest.raises(ValueError, match="so that each has one"):
                partition.stage_bounds(layers, stages)


def test_the_stages_of_the_176b_run() -> None:
    bounds = partition.stage_bounds(70, 12)
    assert bounds[0] == 0 and bounds[-1] == 77
    blocks = [sum(3 <= at < 73 for at in range(low, high)) for low, high in pairwise(bounds)]
    assert blocks == [5, *[6] * 10, 5]


def test_file_names_and_places_are_the_originals(tmp_path: Path) -> None:
    write(tmp_path, memory_source(SIZES), shape(2, 2, 11))
    names = {path.name for path in (tmp_path / "global_step5").glob("*.pt")}
    layers = {
        f"layer_{at:02d}-model_{part:02d}-model_states.pt"
        for at in (1, 3, 4, 5, 7)
        for part in range(2)
    }
    ranks = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}
    optimizers = {
        f"bf16_zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
        for d in range(11)
        for m in range(4)
    }
    assert names == layers | ranks | optimizers
    states = torch.load(tmp_path / "global_step5" / "layer_01-model_00-model_states.pt")
    assert list(states) == [
        "word_embeddings.weight",
        "word_embeddings.norm.weight",
        "word_embeddings.norm.bias",
    ]
    assert list(torch.load(tmp_path / "global_step5" / "layer_07-model_01-model_states.pt")) == [
        "weight",
        "bias",
    ]
    assert place_of("final_norm.bias", 70).position == 74


def test_cut_dimensions_are_those_that_the_layers_declare() -> None:
    from tests.trainer.cases import tiny
    from trainer.model.family import logical_parameters
    from trainer.model.gpt import GPTFamily
    from trainer.model.loss import LanguageModelHead
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.shard import sharding_of

    mesh = Mesh.single(torch.device("cpu"))
    for positions in ("alibi", "absolute"):
        config = tiny(position_embedding=positions)
        layers = GPTFamily().layers(config, mesh, LanguageModelHead(mesh), None)
        stage = [(layer.prefix, layer.kind(*layer.arguments)) for layer in layers]
        for name, parameter in logical_parameters(stage):
            assert cut_dimension(name) == sharding_of(parameter).dim, name


def test_transformers_bloom_converter_rule(tmp_path: Path) -> None:
    """Its reading of a folder: files of tensor rank 0 in name order, ranks joined, blocks numbered
    from layer 3.
    """
    from transformers import BloomConfig, BloomModel

    source = memory_source(SIZES, dtype=torch.float32)
    write(tmp_path, source, shape(2, 2, 1))
    folder, average = (
        tmp_path / "global_step5",
        ("layernorm", "norm.", "dense.bias", "dense_4h_to_h.bias"),
    )
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("layer_*model_00*")):
        parts = [
            torch.load(path.with_name(path.name.replace("model_00", f"model_{rank:02d}")))
            for rank in range(2)
        ]
        position = int(path.name.split("_")[1].split("-")[0])
        for key in parts[0]:
            values = [part[key] for part in parts]
            if any(word in key for word in average) or key in ("weight", "bias"):
                value = torch.stack(values).mean(0)
            else:
                columns = key.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
                value = torch.cat(values, dim=1 if columns else 0)
            if position == 1:
                name = key.replace("word_embeddings.norm", "word_embeddings_layernorm")
            else:
                name = f"ln_f.{key}" if key in ("weight", "bias") else f"h.{position - 3}.{key}"
            state[name] = value
    config = BloomConfig(vocab_size=24, hidden_size=8, n_layer=3, n_head=4)
    model = BloomModel(config)
    assert model.load_state_dict(state, strict=True).missing_keys == []
    weights = source.parts["weights"]
    assert torch.equal(model.h[2].mlp.dense_4h_to_h.weight, weights["blocks.2.mlp.down.weight"])
    assert torch.equal(
        model.h[0].self_attention.query_key_value.bias,
        weights["blocks.0.attention.query_key_value.bias"],
    )
    assert torch.equal(model.word_embeddings.weight, weights["embedding.word.weight"])
    assert torch.equal(model.ln_f.bias, weights["final_norm.bias"])


def test_settings_are_those_of_the_parameter_groups(tmp_path: Path) -> None:
    wanted = OptimizerSettings(6e-5, 0.9, 0.95, 1e-8, 0.1, 0.7)
    found = write(tmp_path, memory_source(SIZES), shape(1, 2, 2), settings=wanted)
    assert OptimizerSettings.of(found.group_options) == wanted
    assert OptimizerSettings.of(()) == OptimizerSettings()


@pytest.mark.parametrize("topology", [shape(2, 2, 3), shape(1, 1, 12)], ids=str)
def test_deepspeeds_converter_takes_ours_and_its_result_is_read(
    tmp_path: Path, topology: dict[str, int]
) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    source = memory_source(Sizes(positions=10))
    write(tmp_path / "in", source, topology)
    options = argparse.Namespace(
        input_folder=str(tmp_path / "in" / "global_step5"), output_folder=str(tmp_path / "out"), strict=True,
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, inject_missing_state=False,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):
        main(options)
    found = open_checkpoint(tmp_path / "out")
    assert isinstance(found, DeepSpeedSource)
    assert differences(found, source) == []
    assert (found.facts.cursor, found.facts.model) == (source.facts.cursor, source.facts.model)
    assert (found.facts.topology, found.facts.optimizer_step) == (
        topology,
        source.facts.optimizer_step,
    )

    (tmp_path / "out" / "zero" / "4.mlp.dense_h_to_4h.weight" / "exp_avg.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"4\.mlp\.dense_h_to_4h\.weight/exp_avg\.pt is missing"
    ):
        open_checkpoint(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "zero" / "4.mlp.dense_h_to_4h.weight")
    with pytest.raises(CheckpointError, match=r"holds no folder for mlp\.dense_h_to_4h\.weight"):
        open_checkpoint(tmp_path / "out")
