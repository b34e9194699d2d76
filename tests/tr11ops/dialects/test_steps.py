"""The table of step dialects: every line in it says what the table says, whatever a launcher put
around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from msgspec.structs import astuple

from tests.tr11ops.dialects.trainer_lines import (
    LINES,
    WITH_TOTAL,
    WITHOUT_NUMBERS,
    Line,
    healthy,
    log,
)
from tr11ops.dialects.reading import (
    StepNumbers,
    StepReader,
    iteration_of,
    step_of,
    step_record,
    total_in,
    trainer_in,
)
from tr11ops.dialects.table import dialects, entries
from trainer.contract.metrics_record import MeasuredStep, StepRecord, format_step

EXAMPLES = [
    (entry["name"], one["line"], one["says"]) for entry in entries() for one in entry["lines"]
]
PREFIXES = (
    "", "[default3]:", "[rank12]:", " 7: ", "[node07] ", "2026-10-01T10:00:00.123456Z stdout F ", "\x1b[36m(Worker pid=7)\x1b[0m ",
)  # fmt: skip


def says(found: StepNumbers) -> dict[str, float | None]:
    return {**found.values, "iteration": found.iteration, "total": found.total}


def assert_says(found: StepNumbers | None, name: str, wanted: Mapping[str, float]) -> None:
    assert found is not None and found.dialect.name == name and found.is_whole
    told = says(found)
    for key, value in wanted.items():
        assert told[key] == pytest.approx(value, nan_ok=True), key
    assert ("total" in wanted) == (found.total is not None)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("name", "line", "wanted"), EXAMPLES)
def test_every_line_of_the_table_behind_every_prefix(
    prefix: str, name: str, line: str, wanted: Mapping[str, float]
) -> None:
    assert_says(step_of(prefix + line), name, wanted)
    assert_says(step_of(f"{prefix}\x1b[1m{line}\x1b[0m\n"), name, wanted)


def test_the_table_names_its_sources_and_each_dialect_has_lines() -> None:
    for entry in entries():
        assert entry["source"].startswith("https://") and entry["lines"] and entry["words"]
    assert len({dialect.name for dialect in dialects()}) == len(dialects()) >= 18


@pytest.mark.parametrize("name", LINES)
def test_a_log_of_each_trainer(name: str) -> None:
    """Its last line may have no end; a bar overprints itself."""
    losses = healthy(12)
    for text in (log(LINES[name], losses), log(LINES[name], losses).rstrip("\n")):
        reader = StepReader()
        steps = [
            step for line in text.split("\n") for step in reader.feed(line) if step.loss is not None
        ]
        assert [step.loss for step in steps] == [pytest.approx(float(loss)) for loss in losses]
        assert [step.grad_norm for step in steps] == [pytest.approx(1.2)] * 12
        numbers = [None] * 12 if name in WITHOUT_NUMBERS else list(range(100, 112))
        assert [step.iteration for step in steps] == numbers
        assert {step.total for step in steps} == ({900} if name in WITH_TOTAL else {None})


@pytest.mark.parametrize("name", LINES)
def test_numbers_that_are_none(name: str) -> None:
    [found] = [
        step
        for step in StepReader().feed(LINES[name](100, 900, "nan", "inf", 100.0))
        if step.grad_norm is not None
    ][:1]
    assert found.lacks_loss or (found.loss is not None and math.isnan(found.loss))
    assert found.grad_norm == math.inf


@pytest.mark.parametrize(
    "spelling",
    [
        "nan",
        "NaN",
        "NAN",
        "-nan",
        "inf",
        "-inf",
        "Infinity",
        "np.float64(nan)",
        "tensor(inf)",
        "'nan'",
    ],
)
def test_spellings_of_what_is_no_number(spelling: str) -> None:
    found = step_of(f"step: 12 | loss: {spelling} | lr: 3e-4")
    assert (
        found is not None
        and found.iteration == 12
        and found.loss is not None
        and not math.isfinite(found.loss)
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567", 1234567),
        ("1.02M", 1.02e6),
        ("480B", 4.8e11),
        ("12.3K", 12300),
        ("2T", 2e12),
        ("7.5", 7.5),
        (".5", 0.5),
        ("1e-3", 0.001),
    ],
)
def test_units_and_thousands(text: str, value: float) -> None:
    found = step_of(f"step: 1,200 of 5,000, loss: 2.5, tok/s: {text}, x")
    assert found is not None and (found.iteration, found.total) == (1200, 5000)
    assert found.values["tokens_per_second"] == pytest.approx(value)


@pytest.mark.parametrize(
    "name", [name for name in LINES if name not in {"huggingface", "lightning"}]
)
def test_a_line_that_was_cut_tells_no_shortened_number(name: str) -> None:
    """A crash or a full disk cuts a line anywhere: what is left names this step or none, and no
    loss but its own.
    """
    line: Line = LINES[name]
    whole = line(7100, 9000, "4.2113", "1.8101", 100.0).rstrip("\n")
    for cut in range(len(whole)):
        found = step_of(whole[:cut])
        if found is not None:
            assert found.iteration in {None, 7100} and found.total in {None, 9000}, whole[:cut]
            record = step_record(whole[:cut])
            assert (
                record is None
                or record.lm_loss is None
                or math.isnan(record.lm_loss)
                or abs(record.lm_loss - 4.2113) < 0.3
            ), whole[:cut]


@pytest.mark.parametrize("line", [
    "validate step: 10  loss:  3.1  memory: 47.11GiB(59.49%)  tps: 1,234",
    " validation loss at iteration 1000 | lm loss value: 2.204112E+00 | lm loss PPL: 9.06E+00 |",
    "{'eval_loss': 2.1, 'eval_runtime': 12.1, 'epoch': 0.5}",
    "{'train_runtime': 8123.1, 'train_samples_per_second': 11.2, 'train_loss': 2.1, 'epoch': 3.0}",
    "Loading checkpoint shards: 100%|██████████| 4/4 [00:10<00:00,  2.61s/it]",
    "Map: 100%|██████████| 1000/1000 [00:01<00:00, 812.11it/s]",
    "\r 10%|█         | 5/50 [00:01<00:09,  4.83it/s]\x1b[A",
    "Validation DataLoader 0: 100%|██████████| 40/40 [00:02<00:00, 19.81it/s]",
    "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 3.11it/s]",
    "Generating train split: 100%|██████████| 99/99 [00:00<00:00, 3.11it/s]",
    '{"step": 100, "val_loss": 2.3}',
    "step 1000: train loss 2.31, val loss 2.40",
    "CUDA error at iteration 7: the loss is gone",
    "[2026-10-31 08:58:34] [INFO] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536",
])  # fmt: skip
def test_what_is_no_step_of_the_training(line: str) -> None:
    assert step_of(line) is None and iteration_of(line) is None


@pytest.mark.parametrize(("text", "wanted"), [
    ("0: [batch=12/500]:\n0: \t Train time/batch: 11\n0: \t Train loss/train/total: 4.3447\n0: \t Train throughput/device/tokens_per_sec: 1,255.177\n", {"lm_loss": 4.3447, "tokens_per_second": 1255.177}),
    ("[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step=12/500]\n    train/CrossEntropyLoss=11.25\n    optim/total_grad_norm=0.71\n", {"lm_loss": 11.25, "grad_norm": 0.71}),
])  # fmt: skip
def test_a_step_that_goes_on_in_the_lines_below(text: str, wanted: Mapping[str, float]) -> None:
    """Composer and OLMo print a number first and what was measured below it."""
    reader = StepReader()
    found = [step for line in text.splitlines() for step in reader.feed(line)]
    assert {(step.iteration, step.total) for step in found} == {(12, 500)}
    assert {name: value for step in found for name, value in step.values.items()} == wanted


def test_bars_of_an_epoch_count_on_and_only_a_last_epoch_has_a_last_step() -> None:
    bar = "Epoch {}: 100%|█████| 200/200 [01:00<00:00, 3.30it/s, v_num=1, loss=0.37]"
    assert [iteration_of(bar.format(epoch)) for epoch in (0, 1, 7)] == [200, 400, 1600]
    assert [step_of(bar.format(epoch)).total for epoch in ("7", "7/-2")] == [None, None]  # type: ignore[union-attr]
    last = step_of(
        "Epoch 7/9 ━━━━━ 50/200 0:00:48 • 0:00:00 0.48it/s v_num: 2.000 train_loss: 0.430"
    )
    assert last is not None and (last.iteration, last.total) == (1450, 2000)


def test_a_record_of_any_trainer() -> None:
    record = step_record(LINES["torchtitan"](1200, 9000, "4.2113", "1.8101", 100.0))
    assert record is not None
    assert (record.iteration, record.total_iterations, record.lm_loss, record.grad_norm) == (
        1200,
        None,
        4.2113,
        1.8101,
    )
    assert record.tflops == pytest.approx(1402.11) and math.isnan(record.learning_rate)
    # it has no number
    assert step_record(LINES["huggingface-dicts"](12, 90, "4.2", "1.8", 1.0)) is None


def test_what_our_own_trainer_prints_is_read_back() -> None:
    record = StepRecord(
        iteration=31219, total_iterations=115311, consumed_samples=47887360, consumed_tokens=98073313280,
        seconds_per_iteration=104.92, learning_rate=5.704e-05, global_batch_size=2048, lm_loss=2.204112, grad_norm=0.171,
        samples_per_second=19.52, tflops=149.35, other_losses=(("sop", 0.5),),
    )  # fmt: skip
    assert step_record("[default7]:" + format_step(record)) == MeasuredStep(*astuple(record))


@pytest.mark.parametrize(("text", "trainer", "total"), [
    ("[titan] - root - INFO - Training starts at step 1, with local batch size 8, total steps 12,000 (warmup 200)", "torchtitan", 12000),
    ("***** Running training *****\n  Total optimization steps = 1,200\n", "bar", 1200),
    ("(TaskRunner pid=7) Total training steps: 435", "verl", 435),
    ("using world size: 384, data-parallel-size: 8", "megatron", None),
    ("GPU available: True (cuda), used: True", "lightning", None),
    ("python: can't open file 'train.py'", None, None),
])  # fmt: skip
def test_what_a_log_says_before_its_first_step(
    text: str, trainer: str | None, total: int | None
) -> None:
    assert (trainer_in(text.encode()), total_in(text.encode())) == (trainer, total)


@pytest.mark.parametrize("piece", [
    "Epoch 3: 1 ", "step 5 ", "| train | ", "iteration 5/ 10 | ", "{'loss': ", "loss step: ", "| 1/2 [0:0", "\x1b[31m", "step: 1,", '"step": 1, loss": ',
])  # fmt: skip
def test_no_line_takes_long(piece: str) -> None:
    """What is nearly a step, again and again: the work grows with the line, and what is too long is
    none.
    """
    line = (piece * 8000)[:16000] + " loss it/s tps: Epoch num_updates consumed samples"
    steps = list(StepReader().feed(line))
    assert len(steps) <= 1
    assert step_of(line * 2) is None
