"""`make gpu`: its logic, on the processor, and what it says where there is no GPU."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.plugins.worker_server import worker_python
from tests.trainer.placement import GPU, PretendedGpu, lies_on_gpu
from tests.trainer.recorder import recorded
from tests.trainer.spawn import run_ranks
from trainer.data.prefetch import BatchesAhead
from trainer.parallel.micro_batch import tensors_of
from trainer.schedule.flops import count_parameters

ROOT = Path(__file__).parents[1]
STATE_BYTES = 18  # of a parameter: weight, gradient and master, moments, in bf16 and fp32


@functools.cache
def python() -> str:
    """A Python that has torch and the trainer loaded already, for the script and the ten processes that
    it starts; it ends with this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-script-"))
    atexit.register(shutil.rmtree, folder)
    return str(worker_python(folder)[0])


def script(*arguments: str, interpreter: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [interpreter or python(), str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=900, check=False
    )


def test_without_a_gpu_it_says_so_and_writes_nothing() -> None:
    before = (ROOT / "benchmarks" / "RESULTS.md").read_bytes()
    done = script(interpreter=sys.executable)  # which loads all that the script needs itself
    assert (
        done.returncode == 2
        and done.stdout.count("\n") == 1
        and done.stdout.startswith("no GPU here: ")
    )
    assert (ROOT / "benchmarks" / "RESULTS.md").read_bytes() == before


def test_the_checks_hold_on_the_processor_and_become_a_table(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\nOther figures.\n")
    done = script(
        "--device",
        "cpu",
        "--results",
        str(results),
        "--json",
        str(tmp_path / "figures"),
        "kernels",
        "losses",
        "resume",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "figures" / "resume.json").read_text())
    assert [(row["what"], row["fine"]) for row in kept] == [
        ("4 steps after a save and a load", True),
        ("a micro batch computed twice", True),
    ]
    text = results.read_text()
    assert text.startswith("# Measured\n\nOther figures.\n\n## On a GPU\n")
    assert "| 4 steps after a save and a load | bit for bit | fine |" in text
    assert text.count("| attention kernel ") == 4 and "failed" not in text
    for course in ("fp32", "fp32, dropout", "fp32, llama", "bf16", "float8"):
        assert f"| losses in {course} against the processor's in fp32" in text


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_dropout_in_flex_attention_is_compared_with_its_own_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU; on a processor torch offers no gradients of it. Another mask than the words'
    fails.
    """
    import gpu_courses
    import gpu_kernels

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    device, slopes = torch.device("cpu"), torch.tensor([0.5, 0.25, 0.1, 0.05])
    kernel = gpu_kernels.FlexKernel(slopes, False, compiled=False)
    row = gpu_kernels.drops_the_same(device, kernel, slopes, 40, torch.float32)
    assert row.fine, row.found
    padded = gpu_kernels.PaddedKernel(flex=gpu_kernels.FlexKernel(None, False, compiled=False))
    marks = gpu_kernels.half_padded(device, 40)
    assert gpu_kernels.drops_the_same(device, padded, None, 40, torch.float32, marks).fine
    words = iter(torch.arange(8, dtype=torch.int32).view(2, 2, 2))
    monkeypatch.setattr(
        gpu_kernels,
        "drop_of_two",
        lambda device: gpu_kernels.Drop(gpu_courses.DROPOUT, next(words)),
    )
    assert gpu_kernels.drops_the_same(device, kernel, slopes, 40, torch.float32).fine is False


@pytest.mark.usefixtures("benchmarks")
def test_every_case_is_a_sound_card() -> None:
    import gpu_speed

    cases = {
        case.what: case.shape
        for make in gpu_speed.CASES.values()
        for case in make(True)
        if gpu_speed.card(case.shape)
    }
    wanted = {
        "gpt",
        "compiled blocks",
        "float8, compiled blocks",
        "24 x 2048 (1.3 B), compiled blocks",
    }
    wanted |= {
        "one block of the 176B, compiled",
        "rotary",
        "dropout 0.1",
        "llama, positions stretched",
        "bert",
        "t5",
    }
    assert wanted <= set(cases)
    largest = max(count_parameters(gpu_speed.card(shape)).total for shape in cases.values())
    assert largest * STATE_BYTES < 60 * 2**30, "with activations it must fit a card of 80 GB"


@pytest.mark.usefixtures("benchmarks")
def test_the_goals_come_first_and_all_that_is_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where each section takes all the time that it may, eight minutes are enough for the checks
    and the goals.
    """
    import gpu
    import gpu_rows

    began: list[tuple[str, float]] = []

    def slow(command: list[str], seconds: float, *_: object) -> tuple[str, None]:
        began.append((command[3], seconds))
        return "", None

    monkeypatch.setattr(gpu, "with_its_children", slow)
    rows = []
    for name in gpu.SECTIONS:
        rows += gpu.run_section(
            name, "cpu", gpu_rows.BUDGET_SECONDS - sum(seconds for _, seconds in began)
        )
    assert sum(seconds for _, seconds in began) <= gpu_rows.BUDGET_SECONDS
    assert [name for name, _ in began][:5] == ["kernels", "losses", "resume", "speed", "saves"]
    out = {row.what: row for row in rows}
    assert set(out) == set(gpu.SECTIONS) - {name for name, _ in began} and "kinds" in out
    assert all("left out: it may take " in row.found for row in rows)
    assert {name for name, row in out.items() if row.fine is False} <= {"profile"}, (
        "no figure left out is a fault"
    )


@pytest.mark.usefixtures("benchmarks")
def test_a_case_that_does_not_fit_is_left_out_and_its_peer_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_courses
    import gpu_speed

    now = [0.0]

    def measured(system: str, shape: object, options: object, seconds: float) -> dict[str, float]:
        now[0] += seconds
        return {"seconds": 0.25, "memory": 0.0}

    monkeypatch.setattr(gpu_speed, "in_child", measured)
    monkeypatch.setattr(gpu_speed.time, "monotonic", lambda: now[0])

    def cases(on_gpu: bool) -> Iterator[object]:
        yield gpu_speed.Case("a", gpu_courses.small(), "other a", 40.0)
        yield gpu_speed.Case("b", gpu_courses.small(), "other b", 40.0)
        yield gpu_speed.Case("c", gpu_courses.small(), "tr11 gpt", 100.0)
        yield gpu_speed.Case("d", gpu_courses.small(), "tr11 gpt", 30.0)

    rows = list(gpu_speed.compared(cases, torch.device("cpu"), 160.0, {"tr11 gpt": 0.5}))
    assert now[0] == 150.0
    found = {row.what: row.found for row in rows}
    assert list(found) == ["other a", "tr11 a", "other b", "tr11 b", "tr11 c", "tr11 d"]
    assert {what for what, text in found.items() if "left out: it may take " in text} == {
        "other b",
        "tr11 c",
    }
    assert "1.00x other a" in found["tr11 a"] and "2.00x tr11 gpt" in found["tr11 d"], (
        "measured in an earlier section"
    )


@pytest.mark.usefixtures("benchmarks")
def test_what_was_found_before_the_end_is_kept_and_nothing_goes_on_behind_it() -> None:
    """Of a section that hangs or crashes; what it had started would compute beside the next one."""
    import gpu
    import gpu_rows

    row = json.dumps({"what": "a", "found": "1"})
    child = "import subprocess, sys; other = subprocess.Popen(['sleep', '600']); "
    child += f"print('a word'); print('{gpu_rows.FOUND}' + {row!r}); print(other.pid, flush=True); "
    commands = {
        "other.wait()": "not done within 3 s",
        "other.kill(); sys.exit('gone')": "gone",
        "other.kill()": None,
    }
    for end, wrong in commands.items():
        output, fault = gpu.with_its_children(
            [sys.executable, "-c", child + end], 3.0, dict(os.environ)
        )
        assert fault == wrong and gpu_rows.found_in(output) == [{"what": "a", "found": "1"}]
        assert not Path(f"/proc/{output.split()[-1]}/cmdline").exists() or not (
            Path(f"/proc/{output.split()[-1]}/cmdline").read_bytes()
        )


@pytest.mark.usefixtures("benchmarks")
def test_a_section_takes_what_the_ones_before_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    given: list[float] = []
    monkeypatch.setattr(
        gpu, "with_its_children", lambda _, seconds, __: given.append(seconds) or ("", "crashed")
    )
    for spare, left in ((0.0, 400.0), (45.0, 400.0), (45.0, 200.0)):
        (row,) = gpu.run_section("speed", "cpu", left, (), spare)
        assert row.fine is False and row.found == "crashed"
    assert given == [190.0, 235.0, 200.0]


@pytest.mark.usefixtures("benchmarks")
def test_a_course_that_is_another_or_did_not_end_is_a_fault() -> None:
    import gpu_courses

    course = gpu_courses.Course(gpu_courses.small(), "fp32", 1e-3)
    assert gpu_courses.compared_losses("a", course, [5.0, 4.9], [5.0, 4.9005]).fine
    for mine, theirs in (
        ([5.0, 4.9], [5.0, 4.902]),
        ([5.0, 5.0], [5.0, 5.0]),
        ([5.0, float("nan")], [5.0, 4.9]),
        ("OutOfMemoryError: x", [5.0, 4.9]),
        (None, [5.0, 4.9]),
        ([5.0, 4.9], None),
    ):
        assert gpu_courses.compared_losses("a", course, mine, theirs).fine is False


@pytest.mark.usefixtures("benchmarks")
def test_a_compiled_case_whose_loss_is_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_courses
    import gpu_speed

    monkeypatch.setattr(
        gpu_speed,
        "in_child",
        lambda system, shape, *_: {
            "seconds": 0.25,
            "memory": 0.0,
            "loss": 5.0 if not shape.own else float(shape.layers),
        },
    )

    def cases(on_gpu: bool) -> Iterator[object]:
        yield gpu_speed.Case("gpt", gpu_courses.small(), "")
        for layers, what in ((5, "near"), (6, "far")):
            shape = gpu_courses.replace(
                gpu_courses.small(), layers=layers, own=gpu_courses.DROPPING
            )
            yield gpu_speed.Case(what, shape, gpu_speed.BESIDE_GPT, bound=0.5)

    rows = list(gpu_speed.compared(cases, torch.device("cpu"), 1000.0, {}))
    assert {row.what: row.fine for row in rows} == {
        "tr11 gpt": None,
        "tr11 near": True,
        "tr11 far": False,
    }
    assert "1.0e+00 of 0.5" in rows[-1].found


@pytest.mark.usefixtures("benchmarks")
def test_a_wait_for_the_copies_is_told_where_the_host_sees_it(tmp_path: Path) -> None:
    """A step ends for the host before its update begins: what holds that up is in the next one."""
    import gpu_saves

    saved = gpu_saves.Finished(1, tmp_path, 4 << 30, seconds=5.0, stall=0.1, waited=0.0)
    row = gpu_saves.of_save("first", saved, 0.1, [0.1, 0.3, 0.1, 0.1], 0.1)
    assert "the 2 steps behind it took +200.0 ms more" in row.found


def test_saves_and_attention_are_measured() -> None:
    done = script("--device", "cpu", "saves", "attention")
    assert done.returncode == 0, done.stdout + done.stderr
    for which in ("first", "second"):
        assert f"{which} save in the background: " in done.stdout
    assert (
        done.stdout.count("the training stood still for ") == 2
        and "attention by torch's choice: " in done.stdout
    )


# ------------------------------------------------------------- what a GPU would refuse, without one
@pytest.mark.usefixtures("benchmarks")
def test_each_micro_batch_is_pinned_and_comes_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_courses

    placed = PretendedGpu()
    placed.install(monkeypatch)
    with placed:
        ahead = BatchesAhead(GPU, needs_read=True, needs_compared=True)
        batches = list(ahead.of(gpu_courses.micro_batches(0), gpu_courses.small().accumulated))
        tensors = [tensor for batch in batches for part in batch for tensor in tensors_of(part)]
        assert len(tensors) == 2 * gpu_courses.small().accumulated and all(
            map(lies_on_gpu, tensors)
        )
    total = sum(tensor.nbytes for tensor in tensors)
    assert (placed.pinned, placed.copied, placed.pageable) == (total, total, 0)


def test_the_recorder_refuses_what_cuda_refuses() -> None:
    with PretendedGpu() as placed:
        there, here = torch.ones(3, device=GPU), torch.ones(3)
        assert lies_on_gpu(there + 1) and not lies_on_gpu(here + 1)
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            there.pin_memory()
        with pytest.raises(RuntimeError, match="on the same device"):
            there + here
        assert lies_on_gpu(there + here.to(GPU)) and placed.pageable == here.nbytes


@pytest.mark.usefixtures("benchmarks")
def test_no_process_for_the_processor_would_touch_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes any GPU that it sees, whatever device the script names."""
    import gpu
    import gpu_courses
    import gpu_training

    started: list[tuple[str, str | None]] = []

    def record(
        command: list[str], env: dict[str, str] | None = None, **_: object
    ) -> subprocess.CompletedProcess[str]:
        started.append(
            (" ".join(command), (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES"))
        )
        return subprocess.CompletedProcess(command, 1, "", "not started")

    def begun(command: list[str], _: float, environment: dict[str, str]) -> tuple[str, str | None]:
        return "", record(command, environment).stderr

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpu.subprocess, "run", record)
    monkeypatch.setattr(gpu, "with_its_children", begun)
    for kind, seen in (("cpu", ""), ("cuda", "0")):
        started.clear()
        gpu.run_section("losses", kind, 90.0)
        with pytest.raises(RuntimeError, match="not started"):
            gpu_courses.child_losses(["fp32"], kind)
        gpu_training.in_child(
            "tr11", gpu_courses.small(), gpu.argparse.Namespace(steps=1, device=kind)
        )
        assert len(started) == 3 and {devices for _, devices in started} == {seen}


def resumed() -> tuple[list[bool], int]:
    """The section `resume`, with a group of the processors beside the default one, as where NCCL is
    the default.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_courses
    import gpu_speed

    gpu_courses.join(torch.device("cpu"))
    beside, found = dist.new_group(), []
    plain = gpu_courses.Mesh.create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gpu_courses.Mesh,
            "create",
            lambda parallel, device: gpu_courses.replace(plain(parallel, device), cpu_group=beside),
        )
        patch.setattr(gpu_courses.Engine, "close", lambda engine: None)
        mesh = gpu_courses.Mesh.create(
            gpu_speed.card(gpu_courses.small()).parallel, torch.device("cpu")
        )
        with recorded(mesh) as entries:
            found = [row.fine is not False for row in gpu_courses.resume(torch.device("cpu"))]
    return found, len([entry for entry in entries if entry.group != "cpu" and entry.is_host])


def test_what_lies_in_host_memory_goes_over_the_processors_group() -> None:
    """NCCL has no way for it: a save's agreement over the default group ends on a GPU machine."""
    (answer,) = run_ranks(resumed, 1)
    assert answer == ([True, True], 0)


def test_a_table_replaces_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_rows

    path = tmp_path / "RESULTS.md"
    path.write_text("# Measured\n")
    gpu_rows.put_table(
        path,
        gpu_rows.table("An H100:", [gpu_rows.Row("a", "1 | 2", False), gpu_rows.Row("b", "3")]),
    )
    path.write_text(path.read_text() + "\n## After\n")
    gpu_rows.put_table(path, "new")
    text = path.read_text()
    assert (
        text.startswith("# Measured\n")
        and text.endswith("\n## After\n")
        and text.count(gpu_rows.BEGIN) == 1
    )
    assert "H100" not in text and "\nnew\n" in text
    assert "| a | 1 / 2 | **failed** |\n| b | 3 |  |" in gpu_rows.table(
        "x", [gpu_rows.Row("a", "1 | 2", False), gpu_rows.Row("b", "3")]
    )
    (row,) = gpu.run_section("kernels", "cpu", 0.0)
    assert (
        row.fine is False and "left out: it may take 70 s, 0 s of 8 minutes are left" in row.found
    )
