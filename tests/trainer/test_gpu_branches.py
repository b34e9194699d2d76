"""Every place of the trainer that does something else on a GPU, and where that is exercised without
one: on meta tensors, which are no processor's, or with torch.cuda mocked. What nothing else looks
at is mocked here. The proof is `make gpu`.

A new place, or one that is gone, fails.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.trainer.cases import CPU, tiny
from tests.trainer.source_finder import SourceFinder
from trainer.checkpoint import randomness
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.paths import RunPaths
from trainer.contract.requests import Request, RequestAnswer
from trainer.debug import group_probe, node_bench
from trainer.debug.profile import StepProfiler
from trainer.metrics.throughput import ThroughputMeter
from trainer.model import loss
from trainer.model.layers import root_mean_square_norm
from trainer.parallel.mesh import Mesh
from trainer.pipeline.partial_losses import EarlyLoss
from trainer.schedule.devices import peak_tflops
from trainer.spikes import corruption_check
from trainer.spikes.corruption_check import CorruptionWatch

ROOT = Path(__file__).parents[2] / "trainer"
GPU = torch.device("cuda", 1)
META_STEP, RULE = "whole steps on meta tensors: test_meta_step", "a rule of values, with its tests"
STAGING, PREFETCH = "checkpoint/test_staging", "data/test_workers, test_gpu_script"
NODE = "the processor's way alone: tr11ops/nodes/test_node_bench, debug/test_pair_reduce"
HERE = "here"
EXERCISED: dict[tuple[str, str], str] = {
    ("checkpoint/deepspeed/content.py", "_fragment_address"): "it keeps a warning away on others",
    ("checkpoint/files.py", "copy_all"): STAGING,
    ("checkpoint/files.py", "copy_bytes"): HERE,
    ("checkpoint/randomness.py", "capture"): HERE,
    ("checkpoint/randomness.py", "restore"): HERE,
    ("checkpoint/staging.py", "Staging.__init__"): STAGING,
    ("checkpoint/staging.py", "Staging.copying"): STAGING,
    ("checkpoint/staging.py", "Staging.hold"): STAGING,
    ("checkpoint/staging.py", "_launch"): STAGING,
    ("checkpoint/staging.py", "ready_staging"): STAGING,
    ("checkpoint/writer.py", "AsyncSaver.reserve"): STAGING,
    ("checkpoint/writer.py", "_lies_on_gpu"): STAGING,
    ("config/kernel_choice.py", "choose_kernel"): RULE,
    ("config/kernel_choice.py", "compiler_obstacle"): RULE,
    ("config/kernel_choice.py", "float8_obstacle"): RULE,
    ("data/prefetch.py", "BatchesAhead.__init__"): PREFETCH,
    ("data/prefetch.py", "BatchesAhead.__next__"): PREFETCH,
    ("data/prefetch.py", "BatchesAhead._staged"): PREFETCH,
    (
        "debug/group_probe.py",
        "_device",
    ): "of the check of the nodes' groups, on the processor alone",
    ("debug/group_probe.py", "_talk"): "the processor's way alone: debug/test_pair_reduce",
    ("debug/node_bench.py", "_hardware"): HERE,
    ("debug/node_bench.py", "_name"): HERE,
    ("debug/node_bench.py", "_samples"): NODE,
    ("debug/node_bench.py", "_seconds"): NODE,
    ("debug/node_bench.py", "_waiting"): HERE,
    ("debug/node_bench.py", "main"): NODE,
    ("debug/profile.py", "StepProfiler._begin"): HERE,
    ("debug/profile.py", "StepProfiler._finish"): HERE,
    ("pipeline/library.py", "init_distributed"): "test_engine",
    ("metrics/compute_clock.py", "ComputeClock.__init__"): "debug/test_profile",
    ("metrics/compute_clock.py", "ComputeClock._now"): "debug/test_profile",
    ("metrics/throughput.py", "ThroughputMeter.__init__"): HERE,
    ("model/compiled.py", "compiles_small_parts"): "model/test_loss",
    ("model/float8.py", "_multiplied"): "test_float8, on meta tensors",
    ("model/kernels.py", "_attend_in_strips"): "config/test_kernel_choice",
    ("model/kernels.py", "_backends"): "config/test_kernel_choice",
    ("model/kernels.py", "build_causal_kernel"): "config/test_kernel_choice",
    ("model/kernels.py", "device_facts"): "config/test_kernel_choice",
    ("model/layers.py", "root_mean_square_norm"): HERE,
    ("model/loss.py", "_product"): HERE,
    ("model/loss.py", "_put"): META_STEP,
    ("model/loss.py", "_scaled"): META_STEP,
    ("model/loss.py", "softmax_for"): "model/test_loss",
    ("model/matmul.py", "compute_dtype"): META_STEP,
    ("model/random.py", "kept_in_rows"): "compiled, as there: model/test_random",
    ("optim/build.py", "AdamW._keep_tails"): META_STEP,
    ("optim/interface.py", "chunk_elements"): META_STEP,
    ("parallel/groups.py", "Groups.create"): "parallel/test_collectives",
    ("parallel/mesh.py", "worker_device"): "test_engine",
    ("parallel/widened.py", "add_widened"): META_STEP,
    ("pipeline/library.py", ""): "it names the processor to the library on others",
    ("pipeline/partial_losses.py", "EarlyLoss.__init__"): HERE,
    ("pipeline/partial_losses.py", "EarlyLoss.before.updated"): HERE,
    ("schedule/memory.py", "_fixed"): RULE,
    ("schedule/memory.py", "_handed_over"): RULE,
    ("schedule/memory.py", "_head"): RULE,
    ("schedule/memory.py", "_inside_attention"): RULE,
    ("spikes/corruption_check.py", "_beside_the_training"): HERE,
    ("spikes/corruption_check.py", "_name_of"): HERE,
    ("spikes/corruption_check.py", "CorruptionWatch.ask"): HERE,
}


class Finder(SourceFinder):
    """Functions, by their whole names, that ask for a GPU or use one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for part in node.body:  # a default of a signature is no use of a GPU
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in {"is_cuda", "is_cpu"} or ast.unparse(node) == "torch.cuda":
            self._note()
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in node.comparators:
            if isinstance(side, ast.Constant) and side.value in {"cuda", "cpu"}:
                self._note()
        self.generic_visit(node)

    def _note(self) -> None:
        self.found.add(self.place)


def places(root: Path) -> set[tuple[str, str]]:
    found = set()
    for path in sorted(root.rglob("*.py")):
        finder = Finder()
        finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        found |= {(str(path.relative_to(root)), name) for name in finder.found}
    return found


def test_every_place_is_known_and_exercised() -> None:
    found = places(ROOT)
    assert not sorted(found - set(EXERCISED)), "say where these are exercised without a GPU"
    assert not sorted(set(EXERCISED) - found), "these are gone: take them off the list"
    assert all(EXERCISED.values())


def test_the_finder_finds(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "class A:\n"
        "    def f(self, x):\n"
        "        return x.is_cuda\n"
        "    def g(self):\n"
        "        def inner(): torch.cuda.Stream()\n"
        "        return inner, x.type == 'x'\n"
        "def h(d): return d.type != 'cuda'\n"
    )
    assert places(tmp_path) == {
        ("module.py", "A.f"),
        ("module.py", "A.g.inner"),
        ("module.py", "h"),
    }


# -------------------------------------------------------------------------------- what is mocked
class Lying(Tensor):
    """Host memory that says it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False


def lying(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.as_subclass(Lying)
    return found


def test_a_source_is_kept_until_its_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that was made for the copy alone is freed before the GPU has read it."""
    from trainer.checkpoint.files import copy_bytes

    seen: list[object] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: seen.append(stream))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: "copies")
    target = torch.zeros(4, dtype=torch.uint8)
    copy_bytes(target, lying(torch.arange(4, dtype=torch.uint8)))
    assert target.tolist() == [0, 1, 2, 3] and seen == ["copies"]


def test_the_generator_of_the_gpu_is_saved_and_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: held[0])
    monkeypatch.setattr("torch.cuda.set_rng_state", held.append)
    before = random.getstate()
    states = randomness.capture()
    assert set(states) == {"torch", "python", "numpy", "cuda"}
    randomness.restore(states)
    assert held[1] is states["cuda"] and random.getstate() == before


def test_a_trace_on_a_gpu_has_its_memory_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    paths = RunPaths(tmp_path, "run", "main", "")
    attempt = AttemptIdentity("1", 1, paths.stop_request("1"))
    profiler = StepProfiler(paths, attempt, (0, 1), GPU)
    profiler.start(Request("profile", id=1, steps=1, rank=0), 1)
    assert profiler.is_tracing
    profiler.after_step(2)
    answer = RequestAnswer.read(paths.answer(1))
    assert answer is not None and answer.step == 2, answer
    kinds = sorted("".join(file.suffixes[-2:]) for file in paths.profiles("1").iterdir())
    assert kinds == [".json.gz", ".memory.pickle"]
    assert [list(given) for given in calls] == [["max_entries"], ["enabled"]]


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "a GPU of tomorrow"])
@pytest.mark.parametrize("in_float8", [False, True])
def test_the_peak_is_that_of_the_worker_s_own_gpu(
    name: str, in_float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: asked.append(device) or name)
    value = tiny(dtype="bf16").model_dump(mode="json")
    value["precision"]["float8"] = in_float8
    meter = ThroughputMeter(TrainerConfig.model_validate(value), Mesh(1, 1, 1, 0, GPU))
    assert asked == [GPU] and meter.device == name
    peak = peak_tflops(name, "bf16")
    assert (meter._peak is None) == (peak is None)
    assert peak is None or (meter._peak > peak) == in_float8


def test_a_gpu_normalises_by_torch_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    expected = root_mean_square_norm(hidden, weight, 1e-5)
    asked: list[object] = []
    kernel: Callable[..., Tensor] = functional.rms_norm

    def noted(values: Tensor, *given: Any) -> Tensor:
        asked.append(given[0])
        return kernel(values.as_subclass(Tensor), *given)

    monkeypatch.setattr(functional, "rms_norm", noted)
    torch.testing.assert_close(root_mean_square_norm(lying(hidden), weight, 1e-5), expected)
    assert asked == [weight.shape]


def test_sums_of_fp16_products_are_in_fp32_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.full((1, 64), 200.0).half(), torch.full((64, 1), 200.0).half()
    expected = loss._product(left, right)
    given: list[object] = []

    def product(one: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
        given.append(out_dtype)
        return one.as_subclass(Tensor).to(out_dtype) @ other.to(out_dtype)

    monkeypatch.setattr(torch, "mm", product)
    assert torch.equal(loss._product(lying(left), right), expected)
    assert given == [torch.float32] and bool(expected.isfinite().all())


def test_the_loss_is_read_behind_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not behind the update, which is given to the GPU before it is read."""
    events: list[str] = []

    class Event:
        def record(self) -> None:
            events.append("copied")

        def synchronize(self) -> None:
            events.append("waited for the copy")

    class Pipeline:
        agg_additional_losses = None

        def _aggregate_total_loss(self) -> Tensor:
            return lying(torch.tensor(2.5))

    monkeypatch.setattr("torch.cuda.Event", Event)
    early = EarlyLoss(Pipeline())
    early.before(lambda: events.append("update"))()
    assert early.values() == [2.5] and events == ["copied", "update", "waited for the copy"]


def test_a_check_of_the_arithmetic_leaves_the_gpu_s_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forked: list[object] = []
    plain = torch.random.fork_rng

    def fork(devices: list[object]) -> Any:
        forked.append(devices)
        return plain([])

    monkeypatch.setattr("torch.random.fork_rng", fork)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: type("P", (), {"uuid": "GPU-1"})
    )
    for device, named in ((GPU, "GPU 1, GPU-1"), (CPU, "its processors")):
        with corruption_check._beside_the_training(nn.Linear(1, 1), device):
            pass
        assert corruption_check._name_of(device) == named
    assert forked == [[GPU], []]


@pytest.mark.parametrize(("interval", "answers"), [(None, True), (50, False)])
def test_a_check_that_cannot_repeat_on_this_gpu_says_so(
    interval: int | None, answers: bool, tmp_path: Path
) -> None:
    value = tiny().model_dump(mode="json")
    value["run"] |= {"directory": str(tmp_path), "corruption_interval": interval}
    config = TrainerConfig.model_validate(value)
    attempt = AttemptIdentity("1", 1, config.paths.stop_request("1"))
    watch = CorruptionWatch(config, Mesh(1, 1, 1, 0, GPU), attempt, pytest.fail)
    watch.ask(7)
    answer = RequestAnswer.read(config.paths.answer(7))
    assert (answer is not None) == answers
    assert answer is None or "set run.corruption_interval in the card" in answer.message


def test_a_node_s_check_takes_the_worker_s_gpu_and_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", done.append)
    monkeypatch.setattr("torch.cuda.synchronize", done.append)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu: "NVIDIA H100")
    assert group_probe._device({"SLURM_LOCALID": "1"}) == GPU
    assert group_probe._device({"SLURM_LOCALID": "1", "LOCAL_RANK": "2"}).index == 2
    node_bench._waiting(GPU)()
    assert done == [1, 2, GPU] and node_bench._name(GPU, "copy") == "gpu-copy@1"
    assert node_bench._hardware([GPU, GPU]).startswith("2 x NVIDIA H100; ")
