"""`tr11 estimate`: the acceptance vectors of the 176B training from the shipped cards; screen and
JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tr11ops.cli.main import execute
from tr11ops.runcard.card import load_card, shipped_cards, shipped_folder
from tr11ops.runcard.check import Level
from tr11ops.runcard.estimate import LevelTime, estimate
from tr11ops.runcard.exit_duration import exit_plan
from tr11ops.runcard.gpu_memory import attention_checks
from tr11ops.runcard.speed import fixed_share, step_weights
from trainer.config.card import CardError
from trainer.schedule.path import path_of

MAIN = shipped_folder() / "tr11-176B-ml.toml"
SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """What `tr11 estimate ARGUMENTS --json` prints."""
    assert execute(["estimate", *arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict) and value["schema"] == 1
    return value


def test_vectors_of_the_176b_card(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--run", "tr11-176B-ml", "--seconds-per-iteration", "105.22")
    assert (found["iterations"], found["ramp_iterations"]) == (115_311, 12_658)
    assert found["parameters"]["total"] == 176_247_271_424  # type: ignore[index]
    assert found["checkpoint_files"] == {"layer": 288, "model": 48, "optimizer": 384, "total": 720}
    assert found["checkpoint_bytes"] == 14 * 176_247_271_424
    assert found["save_copy_bytes"] == -(-14 * 176_247_271_424 // 48)
    memory = found["worker_memory"]
    assert memory["total"] == sum(part["bytes"] for part in memory["parts"])  # type: ignore[index]
    assert memory["total"] < found["gpu_memory_gb"] * 2**30  # type: ignore[index, operator]
    assert found["tokens"] == 219_999_152 * 2048
    assert found["first_step"]["gradient_accumulation_steps"] == 24  # type: ignore[index]
    assert found["full_step"]["gradient_accumulation_steps"] == 128  # type: ignore[index]
    duration = found["duration"]
    assert isinstance(duration, dict)
    assert round(duration["tflops_per_gpu"], 2) == 149.02
    # until the signal
    assert duration["asked_days"] == pytest.approx(10 * (360_000 - 1200) / 86_400)
    assert duration["array"] == f"1-{duration['attempts']}%1"
    # its ten minutes alone are less than an evaluation; the signal comes before
    assert found["warnings"] == []


def test_half_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--run", "tr11-176B-ml-24n", "--seconds-per-iteration", "215.82")
    assert found["checkpoint_files"]["total"] == 528  # type: ignore[index]
    assert round(found["duration"]["tflops_per_gpu"], 2) == 145.31  # type: ignore[index]


@pytest.mark.parametrize(
    ("overrides", "iterations"),
    [
        (["batch.ramp.start=16", "batch.micro_batch_size=1"], 128_728),
        (["batch.ramp.start=384"], 112_578),
        (
            [
                "batch.ramp.start=16",
                "batch.ramp.samples=6_000_000",
                "batch.train_samples=300_000_000",
            ],
            159_576,
        ),
        (
            [
                "batch.ramp.start=16",
                "batch.ramp.samples=5_000_000",
                "batch.train_samples=300_000_000",
                "batch.global_batch_size=1024",
            ],
            311_541,
        ),
    ],
)
def test_iterations_of_other_ramps(overrides: list[str], iterations: int) -> None:
    card = load_card(MAIN, overrides, {}, keep_undefined=True)
    assert estimate(card).iterations == iterations == card.total_iterations


def test_growing_micro_batches_fill_the_pipeline_in_the_ramp() -> None:
    """In the ramp a step of 192 is 24 passes of one sample with 11 idle, not 12 passes of two with
    11 idle.
    """
    whole = load_card(
        MAIN, ["batch.micro_batch_size=2", "batch.micro_batch_ramp=[]"], {}, keep_undefined=True
    )
    card = load_card(MAIN, [], {}, keep_undefined=True)
    before, found = estimate(whole), estimate(card)
    assert (
        found.first_step.gradient_accumulation_steps,
        found.full_step.gradient_accumulation_steps,
    ) == (24, 128)
    assert found.first_step.bubble_share == pytest.approx(
        11 / 35
    ) and before.first_step.bubble_share == pytest.approx(11 / 23)
    assert found.full_step == before.full_step and found.levels == before.levels
    first, raised = (next(segment for segment in path_of(card).segments if segment.batch_size == size)
                     for size in (192, 784))  # fmt: skip
    fixed, weights = fixed_share(card), step_weights(card, [first, raised])
    assert weights[0] == pytest.approx(fixed + (1 - fixed) * (24 + 11) / ((128 + 11) * 2))
    assert weights[1] == pytest.approx(fixed + (1 - fixed) * (49 + 11) / (128 + 11))
    assert found.duration is not None and before.duration is not None
    assert found.duration.days < before.duration.days
    assert [card.gradient_accumulation_steps(count) for count in (0, 3_115_072, 9_999_999)] == [
        24,
        49,
        128,
    ]


def test_points_are_in_order_and_the_levels_add_up() -> None:
    found = estimate(load_card(MAIN, [], {}, keep_undefined=True))
    iterations = [point.iteration for point in found.rates]
    assert iterations == sorted(set(iterations)) and iterations[-1] == found.iterations
    assert [point.moment for point in found.rates][:3] == [
        "first step",
        "end of the warm-up",
        "end of the batch ramp",
    ]
    assert (
        sum(level.iterations * level.batch_size for level in found.levels) == found.trained_samples
    )
    assert found.stages is not None and sum(stage.blocks for stage in found.stages) == 70


CURRICULUM = [
    "curriculum.kind=discrete",
    "curriculum.lengths=[16, 32]",
    "curriculum.until_steps=[100]",
    "batch.ramp=none",
]


def test_a_curriculum_counts_its_tokens_operations_and_times() -> None:
    plain = estimate(load_card(SMALL, ["batch.ramp=none", "model.sequence_length=32"], {}), 2.0)
    short = estimate(load_card(SMALL, [*CURRICULUM, "model.sequence_length=32"], {}), 2.0)
    assert short.iterations == plain.iterations == 400
    assert short.tokens == plain.tokens * 7 // 8  # a quarter of the steps at half the length
    assert short.levels == plain.levels
    assert (
        6 / 8 * plain.total_model_flops < short.total_model_flops < 7 / 8 * plain.total_model_flops
    )
    assert short.duration is not None and plain.duration is not None
    assert short.duration.days / plain.duration.days == pytest.approx(
        short.total_model_flops / plain.total_model_flops, rel=0.01
    )


def test_a_training_that_tokens_end() -> None:
    found = estimate(load_card(SMALL, ["batch.ramp=none", "batch.train_tokens=100_000"], {}))
    whole = estimate(load_card(SMALL, ["batch.ramp=none"], {}))
    each = whole.tokens // whole.iterations
    assert found.iterations == -(-100_000 // each) < whole.iterations
    assert found.tokens == found.iterations * each


def test_a_decay_counted_in_tokens_has_its_moment() -> None:
    card = load_card(SMALL, ["batch.ramp=none", "schedule.decay_tokens=400_000"], {})
    (point,) = [point for point in estimate(card).rates if point.moment == "end of the decay"]
    assert point.consumed_samples * card.model.sequence_length <= 400_000
    assert point.learning_rate >= card.schedule.min_learning_rate


def test_saving_by_the_clock_alone_has_no_count(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "checkpoint.interval=none", "--set", "checkpoint.interval_minutes=30"]
    assert execute(["estimate", "--run", str(SMALL), *overrides]) == 0
    assert "saved by the clock" in capsys.readouterr().out


def test_times_need_a_basis() -> None:
    small = load_card(SMALL, [], {})
    assert estimate(small).duration is None
    assumed = estimate(load_card(MAIN, [], {}, keep_undefined=True)).duration
    assert assumed is not None and "assumed" in assumed.basis
    given = estimate(small, assumed_tflops=0.01).duration
    assert given is not None and given.tflops_per_gpu == pytest.approx(0.01)


def test_time_without_a_ramp_is_steps_times_seconds() -> None:
    card = load_card(SMALL, ["batch.ramp=none"], {})
    duration = estimate(card, 2.0, asked_attempts=3).duration
    assert duration is not None
    assert duration.days * 86400 == pytest.approx(2.0 * 400)
    assert duration.node_hours == pytest.approx(4 * 800 / 3600)
    assert duration.attempts == 9  # 800 s in attempts of 1.5 minutes
    assert duration.asked_share == pytest.approx(270 / 800)


@pytest.mark.parametrize("name", shipped_cards())
def test_the_screen_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["estimate", "--run", name, "--seconds-per-iteration", "105"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.split()[:1] == ["parameters"] for line in lines)


LLAMA = [
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.tied_embeddings=false",
    "model.linear_biases=false",
]


@pytest.mark.parametrize("overrides", [[], LLAMA], ids=["bloom", "llama"])
def test_the_files_are_those_of_the_layout_that_is_written(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for text in overrides for word in ("--set", text)]
    assert execute(["estimate", "--run", "demo", *words]) == 0
    shown = capsys.readouterr().out
    assert execute(["estimate", "--run", "demo", *words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    most = value["checkpoint_files_at_most"]
    assert value["checkpoint_format"] == "tr11" and most == 3 * value["world_size"] + 4
    assert "DeepSpeed" not in shown and f"{most:,}" in next(
        line for line in shown.splitlines() if "files," in line
    )


def test_the_original_s_layout_is_counted_where_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        execute(["estimate", "--run", "tr11-176B-ml", "--set", "checkpoint.format=deepspeed"]) == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "files," in line)
    assert line.split() == "files, DeepSpeed layout 720 288 layer, 48 rank, 384 optim".split()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--run", "demos"], "did you mean 'demo'?"),
        (["--run", "demo", "--set", "slurm.nods=3"], "did you mean 'slurm.nodes'?"),
        (["--run", "demo", "--tflops", "nan"], "--tflops nan: must be a number above zero"),
        (
            ["--run", "demo", "--seconds-per-iteration", "0"],
            "--seconds-per-iteration 0: must be a number above zero",
        ),
        (["--run", "demo", "--seconds-per-iteration", "1", "--tflops", "1"], "give one of them"),
        (["--run", "demo", "--array", "1-3%3"], "must run one task at a time"),
    ],
)
def test_refusals_are_one_line_and_exit_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["estimate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and len(err.splitlines()) == 1


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from tr11ops.cli.main import execute; execute(['estimate', '--run', 'demo', '--json']);"
        "heavy = {'torch', 'numpy', 'deepspeed', 'transformers'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr.strip() == "[]"


# -------------------------------------------------------------------------- times of the batch ramp
def first_level(overrides: list[str], seconds: float | None = 105.22) -> LevelTime:
    """The first level of the 176B card with these changes."""
    duration = estimate(load_card(MAIN, overrides, {}, keep_undefined=True), seconds).duration
    assert duration is not None
    return duration.levels[0]


def test_stages_of_parts_idle_less_and_hold_more() -> None:
    plain, parted = (
        estimate(load_card(MAIN, [f"parallel.virtual_stages={parts}"], {}, keep_undefined=True))
        for parts in (1, 2)
    )
    assert parted.first_step.bubble_share == pytest.approx(11 / (2 * 24 + 11))
    assert [step.bubble_share for step in parted.level_steps] == [
        pytest.approx(11 / (2 * step.gradient_accumulation_steps + 11))
        for step in plain.level_steps
    ]
    assert plain.stages is not None and parted.stages is not None
    assert parted.stages[0].parts == ((0, 2), (35, 3)) and parted.stages[-1].parts == (
        (32, 3),
        (68, 2),
    )
    assert [stage.blocks for stage in parted.stages] == [stage.blocks for stage in plain.stages]
    assert plain.worker_memory is not None and parted.worker_memory is not None
    assert plain.worker_memory.total < parted.worker_memory.total < 1.1 * plain.worker_memory.total
    assert plain.duration is not None and parted.duration is not None
    assert parted.duration.days < plain.duration.days


def test_the_ramp_takes_what_the_original_measured() -> None:
    small = first_level(
        ["batch.ramp.start=16", "batch.micro_batch_size=2", "batch.micro_batch_ramp=[]"]
    )
    assert small.batch_size == 16 and small.seconds_per_iteration == pytest.approx(15.23, rel=0.05)
    assert small.tflops_per_gpu == pytest.approx(8.04, rel=0.05)
    assert first_level([]).tflops_per_gpu == pytest.approx(73, rel=0.03)


def test_every_level_has_its_hours(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--run", "tr11-176B-ml", "--seconds-per-iteration", "105.22")
    duration = found["duration"]
    assert isinstance(duration, dict) and len(duration["levels"]) == 117 == len(found["levels"])  # type: ignore[arg-type]
    assert sum(level["hours"] for level in duration["levels"]) == pytest.approx(
        24 * duration["days"]
    )
    assert duration["levels"][-1]["seconds_per_iteration"] == pytest.approx(105.22)
    assert not any(level["measured"] for level in duration["levels"])
    steps = found["level_steps"]
    assert isinstance(steps, list) and (steps[0], steps[-1]) == (
        found["first_step"],
        found["full_step"],
    )
    assert [step["global_batch_size"] for step in steps] == [
        level["batch_size"] for level in found["levels"]
    ]  # type: ignore[attr-defined]
    assert steps[1]["bubble_share"] == pytest.approx(11 / (26 + 11))
    assert execute(["estimate", "--run", "tr11-176B-ml", "--levels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines if line.split()[:1] == ["208"]] == ["29.7%"]
    assert max(map(len, lines)) <= 80 and sum(line.split()[:1] == ["1,104"] for line in lines) == 1
    assert len(lines) > 150


def test_the_published_days_and_ours() -> None:
    """docs/how-to/estimate.md: 120.8 days with 167 for 176 billion parameters."""
    assert pytest.approx(120.80, abs=0.005) == 450e9 * 8 * 167e9 / (384 * 150e12 * 86400)
    card = load_card(MAIN, [], {}, keep_undefined=True)
    at_150, assumed = estimate(card, assumed_tflops=150.0).duration, estimate(card).duration
    assert at_150 is not None and assumed is not None
    assert (
        round(at_150.rule_of_thumb_days, 1) == 127.7
        and round(assumed.rule_of_thumb_days, 1) == 128.5
    )
    assert (
        round(assumed.days, 1) == 131.9 and pytest.approx(176.2 / 167, rel=0.002) == 127.7 / 120.8
    )
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "estimate.md").read_text(
        encoding="utf-8"
    )
    assert all(f"| {days} |" in page for days in ("120.8", "127.7", "128.5", "131.9"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "149 TFLOPs per GPU, assumed (A100)"),
        (["slurm.constraint=v100-32g"], "59.7 TFLOPs per GPU, assumed (V100 SXM2)"),
        (
            ["slurm.constraint=none", "slurm.partition=gpu_h100"],
            "472.5 TFLOPs per GPU, assumed (H100 SXM)",
        ),
        (["slurm.gpu_kind=V100"], "59.7 TFLOPs per GPU, assumed (V100 SXM2)"),
        (
            ["slurm.gpu_kind=V100", "precision.dtype=fp32"],
            "7.5 TFLOPs per GPU, assumed (V100 SXM2)",
        ),
    ],
)
def test_the_rate_is_of_the_cards_kind_of_gpu(overrides: list[str], words: str) -> None:
    duration = estimate(load_card(MAIN, overrides, {}, keep_undefined=True)).duration
    assert duration is not None and duration.basis == words


@pytest.mark.parametrize(
    ("name", "basis", "why"),
    [
        ("tr11-176B-ml", "149 TFLOPs per GPU, assumed (A100)", ""),
        ("bert-1b", "118.6 TFLOPs per GPU, assumed (A100)", ""),  # 1,024 features
        ("bert-4l", None, "models of less than 1,024 features were not measured"),
        ("t5-small", None, "models of less than 1,024 features were not measured"),
        ("demo", None, "the speed of CPUs is not known before the first steps"),
    ],
)
def test_a_speed_is_assumed_only_for_models_like_those_that_were_measured(
    name: str, basis: str | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 4-layer BERT of 128 features was said to take 57 s; it took its authors 3 to 4 hours."""
    path = shipped_folder() / f"{name}.toml"
    card = load_card(path, [], {}, keep_undefined=True)
    found = estimate(card)
    assert (found.duration.basis if found.duration else None, found.time_unknown) == (basis, why)
    assert execute(["estimate", "--run", str(path)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert not why or f"unknown {why}; give --seconds-per-iteration or --tflops" in screen
    given, own = (
        estimate(card, seconds_per_iteration=2.0),
        [(number, 3.0) for number in range(1, 5)],
    )
    assert (
        given.duration is not None
        and given.duration.seconds_per_iteration == 2.0
        and given.time_unknown == ""
    )
    assert estimate(card, steps=own).duration is not None  # what the run has measured itself counts


def test_the_bert_of_a_billion_has_its_authors_nodes() -> None:
    """4 nodes of 8 A100 with 40 GB; it fits them."""
    card = load_card(shipped_folder() / "bert-1b.toml", [], {}, keep_undefined=True)
    assert (card.slurm.nodes, card.slurm.gpus_per_node, card.slurm.gpu_memory_gb) == (4, 8, 40)
    memory = estimate(card).worker_memory
    assert memory is not None and memory.total < 40 << 30


def test_unnamed_gpus_are_not_taken_for_a100(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is their memory guessed, and the margin at an attempt's end is the rule of thumb's."""
    nameless = ["slurm.constraint=none", "slurm.gpu_memory_gb=none"]
    card = load_card(MAIN, nameless, {}, keep_undefined=True)
    found = estimate(card)
    assert found.gpu_is_unknown and found.duration is None and found.least_recomputed_blocks is None
    bare = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]
    leaves = exit_plan(load_card(MAIN, [*nameless, *bare], {}, keep_undefined=True))
    assert leaves.minutes is not None and "a step" not in leaves.why
    assert (
        execute(
            [
                "estimate",
                "--run",
                str(MAIN),
                *(part for text in nameless for part in ("--set", text)),
            ]
        )
        == 0
    )
    screen = " ".join(capsys.readouterr().out.split())
    assert "attention kernel unknown set slurm.gpu_kind; on an A100: flex" in screen
    assert "the kind of GPU is unknown: set slurm.gpu_kind" in screen and "of unknown" in screen
    assert ("attention", Level.WARNING) in [
        (check.name, check.level) for check in attention_checks(card)
    ]


def test_no_number_of_recomputed_blocks_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["estimate", "--run", str(MAIN), "--set", "slurm.gpu_memory_gb=20"]) == 0
    shown = capsys.readouterr()
    assert "70 of 70  none would fit" in shown.out
    assert "recomputing every block would not do" in " ".join(shown.err.split())


UNEVEN = [
    "parallel.tensor=1",
    "parallel.pipeline=4",
    "model.layers=6",
    "tokenizer.padded_vocabulary_size=512",
]


def test_uneven_stages_are_warned_of_with_even_layer_counts() -> None:
    """Six blocks on four stages are 1, 2, 2, 1; what the logits alone make uneven is no matter of
    layers.
    """
    found = estimate(load_card(MAIN.with_name("demo.toml"), UNEVEN, {}, keep_undefined=True))
    assert found.stages is not None and [stage.blocks for stage in found.stages] == [1, 2, 2, 1]
    assert found.busiest_stage_excess is not None and 0.2 < found.busiest_stage_excess < 1 / 3
    (warning,) = found.warnings
    assert warning.startswith(
        "model.layers = 6: gives some pipeline stages more blocks: a step takes 2"
    )
    assert warning.endswith('use 4 or 8 with parallel.partition = "type:transformer"')
    for layers in (4, 8):
        even = [*UNEVEN, f"model.layers={layers}", "parallel.partition=type:transformer"]
        assert (
            estimate(load_card(MAIN.with_name("demo.toml"), even, {}, keep_undefined=True)).warnings
            == ()
        )
    logits = estimate(load_card(MAIN.with_name("rehearsal.toml"), [], {}, keep_undefined=True))
    assert logits.busiest_stage_excess is not None and logits.busiest_stage_excess > 1
    assert not [text for text in logits.warnings if "stages" in text]


def test_an_unknown_kind_of_gpu_is_refused() -> None:
    with pytest.raises(
        CardError, match=r"slurm\.gpu_kind = 'V1000': is no kind of GPU whose rate is known"
    ):
        load_card(MAIN, ["slurm.gpu_kind=V1000"], {}, keep_undefined=True)


def test_measured_steps_go_before_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A level with three steps has their median; a level without follows from the largest that has."""
    card = load_card(SMALL, [f"run.directory={tmp_path}"], {})
    levels = path_of(card).batch_levels
    first, second = levels[0], levels[1]
    seconds = [(first.first_iteration + n, 7.0 + n) for n in range(3)] + [
        (second.first_iteration, 99.0)
    ]
    records = [
        {"kind": "step", "iteration": n, "seconds_per_iteration": s, "time": 1.0 + n, "job_id": "7"}
        for n, s in seconds
    ]
    card.paths.logs.mkdir(parents=True)
    card.paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + "{cut")
    found = run_json(capsys, "--run", str(SMALL), "--set", f"run.directory={tmp_path}")
    duration = found["duration"]
    assert isinstance(duration, dict)
    assert duration["basis"] == f"3 steps of this run, up to a batch of {first.batch_size}"
    measured, following = duration["levels"][:2]
    assert (measured["measured"], measured["seconds_per_iteration"]) == (True, 8.0)
    weights = step_weights(card, path_of(card).segments)
    assert (following["measured"], following["seconds_per_iteration"]) == (
        False, pytest.approx(8.0 * weights[1] / weights[0]),
    )  # fmt: skip
    assert execute(["estimate", "--run", str(SMALL), "--set", f"run.directory={tmp_path}"]) == 0
    shown = [
        line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith(" measured")
    ]
    assert len(shown) == 1 and len(shown[0]) <= 80
    given = run_json(
        capsys,
        "--run",
        str(SMALL),
        "--set",
        f"run.directory={tmp_path}",
        "--seconds-per-iteration",
        "2",
    )
    assert given["duration"]["seconds_per_iteration"] == 2.0  # type: ignore[index]
