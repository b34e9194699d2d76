"""What a log of another trainer says, and what its end means."""

from __future__ import annotations

import pytest

from tr11ops.dialects.dialect import dialect_named
from tr11ops.trainers.ends import EndMeaning, meaning_of_end
from tr11ops.trainers.log import LogReading, TrainerLogReader, lines_of

BAR = " {percent:3}%|####      | {step}/24 [00:13<00:20,  1.45s/it]"
TITAN = "step: {step:2}  loss:  4.2113  grad_norm:  1.8  memory: 47.11GiB(59.49%)  tps: 7,812  tflops: 402.11  mfu: 41.02%"


def read(name: str, *lines: str, end: str = "\n") -> LogReading:
    text = end.join(lines).encode()
    blocks = [text[at : at + 7] for at in range(0, len(text), 7)]
    return TrainerLogReader(dialect_named(name)).read(lines_of(blocks))


def bars(first: int, last: int) -> list[str]:
    return [BAR.format(percent=100 * step // 24, step=step) for step in range(first, last + 1)]


def test_a_bar_that_is_drawn_by_carriage_returns_is_as_many_steps() -> None:
    found = read("huggingface", *bars(1, 13), end="\r")
    assert (found.first, found.last, found.total) == (1, 13, 24)


def test_the_last_line_needs_no_end_and_a_block_may_end_anywhere() -> None:
    found = read("torchtitan", *(TITAN.format(step=step) for step in (1, 2, 3)))
    assert found.last == 3
    assert found.loss == pytest.approx(4.2113)


def test_an_evaluation_is_no_step() -> None:
    found = read("torchtitan", TITAN.format(step=5), "validate step: 10  loss:  4.0  tps: 5")
    assert found.last == 5
    assert found.marks == {"evaluating": 1}


@pytest.mark.parametrize(
    ("line", "resumed_at"),
    [
        ("[titan] root - INFO - Training starts at step 121", 120),
        ("[titan] root - INFO - Training starts at step 1", 0),
    ],
)
def test_where_it_began(line: str, resumed_at: int) -> None:
    assert read("torchtitan", line).resumed_at == resumed_at


def test_the_loss_of_a_dict_that_stands_before_its_bar() -> None:
    numbers = (
        "{'loss': '4.451', 'grad_norm': '1.759', 'learning_rate': '3.125e-05', 'epoch': '0.01'}"
    )
    found = read("huggingface", *bars(1, 4), numbers, *bars(5, 7), end="\r")
    assert (found.last, found.loss) == (7, 4.451)


def test_the_last_step_stands_far_above_the_end() -> None:
    found = read("torchtitan", TITAN.format(step=5), *["a line of a traceback"] * 300)
    assert found.last == 5


def test_the_last_step_as_the_start_says_it() -> None:
    start = "[titan] root - INFO - Trainer is initialized with local batch size 8, total steps 24 (warmup 2)"
    found = read("torchtitan", start, *(TITAN.format(step=step) for step in (23, 24)))
    assert found.total == 24
    assert meaning_of_end(dialect_named("torchtitan"), found, 0).reason == "finished"


def test_a_line_of_megabytes_and_bytes_that_are_no_text() -> None:
    reader = TrainerLogReader(dialect_named("torchtitan"))
    found = reader.read(lines_of([b"x" * (3 << 20), b"\xff\xfe\n", TITAN.format(step=7).encode()]))
    assert found.last == 7


RUNTIME = "{'train_runtime': '16.68', 'train_samples_per_second': '3.117', 'epoch': '0.013'}"


@pytest.mark.parametrize(
    ("name", "lines", "status", "asked", "reason", "sequel"),
    [
        # the same last line, and the same status: the step tells
        ("huggingface", [*bars(1, 24), RUNTIME], 0, "", "finished", "none"),
        ("huggingface", [*bars(1, 13), RUNTIME], 0, "", "unexplained", "relaunch once"),
        ("huggingface", [*bars(1, 13), RUNTIME], 0, "TERM by the time limit", "stopped", "relaunch"),
        ("huggingface", bars(1, 13), 1, "", "error", "relaunch"),
        ("huggingface", bars(1, 24), 1, "", "error", "relaunch"),  # the last save failed
        ("lightning", ["`Trainer.fit` stopped: `max_steps=24` reached."], 1, "", "error", "relaunch"),
        ("huggingface", bars(1, 13), None, "", "not known", "not known"),
        ("huggingface", [], 0, "", "unexplained", "hold"),
        ("torchtitan", [TITAN.format(step=9), "Training completed"], 0, "", "unexplained", "hold"),
        ("torchtitan", [TITAN.format(step=9), "Ran out of data; last step was canceled."], 0, "", "stopped", "relaunch"),
        ("megatron", ["[exiting program after 55.0 minutes] datetime: x"], 0, "", "stopped", "relaunch"),
        ("megatron", [], 16, "", "stopped", "relaunch"),
        ("megatron", [], 17, "", "error", "hold"),
        ("megatron", [], 2, "", "error", "relaunch"),  # argparse's; for our own trainer it is a refusal
        ("lightning", ["`Trainer.fit` stopped: `max_steps=24` reached."], 0, "", "finished", "none"),
        ("lightning", ["[rank: 0] Received SIGTERM: 15"], 143, "", "stopped", "relaunch"),
    ],
)  # fmt: skip
def test_what_an_end_means(
    name: str, lines: list[str], status: int | None, asked: str, reason: str, sequel: str
) -> None:
    meaning = meaning_of_end(dialect_named(name), read(name, *lines), status, asked)
    assert isinstance(meaning, EndMeaning)
    assert (meaning.reason, meaning.sequel) == (reason, sequel), meaning.why
