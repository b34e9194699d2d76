"""What a trainer of a dialect prints and leaves behind, made of the examples that its file and the table of step
lines hold: so the contract suite takes up a new dialect by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.tr11ops.trainers.fake_trainer import NAME, NEXT, STEP
from tr11ops.dialects.dialect import CheckpointRules, Dialect, Example
from tr11ops.dialects.table import dialect_named as step_table, entries
from tr11ops.trainers.words import StepSeen, TrainerWords
from trainer.contract.record import Record

RANKS = 2
_LAUNCHER = re.compile(r"^\[default\d+\]:")


class StepLine(Record):
    """A line of a step with STEP in the place of its number. `has_total`: it names the last step too."""

    line: str
    has_total: bool


def step_line(dialect: Dialect, total: int) -> StepLine:
    """Made of the first example that is read again, one with a loss before others. An AssertionError where there is
    none.
    """
    made = [_numbered(dialect, line, total) for line in _examples_of_steps(dialect)]
    read = [(line, seen) for line in made if (seen := _read_again(dialect, line)) is not None]
    read.sort(key=lambda one: one[1].values.get("lm_loss") is None)
    for line, seen in read:
        if seen.total in (None, total):
            return StepLine(line, seen.total is not None)
    raise AssertionError(
        f"{dialect.name}: no example of a line of a step can be told again with another number: give one in its "
        "file (line, step), or in steps.toml"
    )


def _examples_of_steps(dialect: Dialect) -> list[str]:
    own = [one.line for one in dialect.examples if one.step is not None]
    if dialect.step_line or own:
        return own
    table = next(one for one in entries() if one["name"] == dialect.steps)
    return [one["line"] for one in table["lines"]]


def _numbered(dialect: Dialect, line: str, total: int) -> str:
    """A line with STEP and this total in the place of its own, without the prefix of a launcher."""
    line = _LAUNCHER.sub("", line)
    texts = {"iteration": STEP, "global": STEP, "step": STEP, "total": str(total)}
    spans = set()
    for pattern, groups in _number_patterns(dialect):
        match = pattern.search(line)
        for group in pattern.groupindex if match else ():
            if group in groups and match is not None and match[group] is not None:
                spans.add((*match.span(group), texts.get(group, STEP)))
    return _with_texts(line, spans)


def _number_patterns(dialect: Dialect) -> Iterator[tuple[re.Pattern[str], tuple[str, ...]]]:
    """The patterns of a step's numbers, with the groups that are such."""
    if dialect.step_line:
        yield dialect.step_pattern, ("step", "total")
        return
    table = step_table(dialect.steps)
    yield table.step_pattern, ("iteration", "global", "total")
    for name, patterns in table.field_patterns:
        if name == "iteration":
            yield from ((pattern, ("value",)) for pattern in patterns)


def _with_texts(line: str, spans: set[tuple[int, int, str]]) -> str:
    for begin, end, text in sorted(spans, reverse=True):
        line = f"{line[:begin]}{text}{line[end:]}"
    return line


def _read_again(dialect: Dialect, line: str) -> StepSeen | None:
    heard = list(TrainerWords(dialect).hear(line.replace(STEP, "12").encode()))
    steps = [one for one in heard if isinstance(one, StepSeen)]
    if len(steps) == 1 and steps[0].iteration == 12 + dialect.offset:
        return steps[0]
    return None


def lines_of(dialect: Dialect, total: int) -> dict[str, list[str]]:
    """What it prints, by the moment: step, resumed, scratch, saving, saved, stopped, finished; `left`: at its end
    without having reached the last step.
    """
    marks = {one.mark: _with_done(dialect, one) for one in dialect.examples if one.mark}
    ends = {one.end: one.line for one in dialect.examples if one.end}
    found = {
        name: [marks[name]] for name in ("resumed", "scratch", "saving", "saved") if name in marks
    }
    loop_ended = [ends["loop-ended"]] if "loop-ended" in ends else []
    return {
        **found,
        "step": [step_line(dialect, total).line],
        "stopped": [ends["stopped"], *loop_ended] if "stopped" in ends else loop_ended,
        "finished": [ends["finished"]] if "finished" in ends else loop_ended,
        "left": loop_ended,
    }


def _with_done(dialect: Dialect, example: Example) -> str:
    """A line of a mark with the number of steps that are done, or of the next one, in the place of its own."""
    assert example.mark is not None
    pattern = re.compile(dialect.marks[example.mark])
    match = pattern.search(example.line)
    assert match is not None
    texts = {"done": STEP, "next": NEXT}
    spans = {
        (*match.span(name), text) for name, text in texts.items() if name in pattern.groupindex
    }
    return _with_texts(example.line, spans)


def example_of(dialect: Dialect, state: str) -> Example:
    """Of a checkpoint in this state, with as many ranks as the suite has where that counts."""
    fitting = [
        one
        for one in dialect.examples
        if one.files and one.state == state and one.world_size in (None, RANKS)
    ]
    assert fitting, f"{dialect.name}: no example of a checkpoint that is {state}, of {RANKS} ranks"
    return fitting[0]


def checkpoint_plan(dialect: Dialect) -> dict[str, Any]:
    """How the fake trainer saves, and which checkpoint it takes: made of the dialect's example of a whole one."""
    rules = dialect.checkpoints
    assert rules is not None
    example = example_of(dialect, "whole")
    digits = _digits(rules, example.name)
    believes = rules.believes or ()
    beside = [text.split()[1] for text in believes if text.startswith("beside ")]
    return {
        "name": _stepped(example.name, digits),
        "digits": len(digits) if digits.startswith("0") else 0,
        "files": {
            _path(rules, example.name, path, digits): _text(rules, path, text)
            for path, text in example.files.items()
        },
        "newest": rules.tracker or rules.newest,
        "pattern": rules.names.pattern.pattern,
        "looks": bool(believes),
        "absent": beside,
        "step_key": rules.step_key or "step",
    }


def _digits(rules: CheckpointRules, name: str) -> str:
    """The step as a name has it; "" where it has none."""
    match = rules.names.pattern.fullmatch(name)
    assert match is not None, name
    return match["step"] if rules.names.has_step else ""


def _stepped(text: str, digits: str) -> str:
    return re.sub(rf"(?<!\d){digits}(?!\d)", STEP, text) if digits else text


def _path(rules: CheckpointRules, name: str, path: str, digits: str) -> str:
    if rules.layout == "folder":
        return re.sub(rf"^{re.escape(name)}(?=/|$|-)", NAME, path)
    return _stepped(path, digits)


def _text(rules: CheckpointRules, path: str, text: str) -> str:
    """A file that names the newest names the new one."""
    if path != rules.tracker:
        return text
    return STEP if rules.newest.endswith("{step}") else NAME


def broken_files(dialect: Dialect, step: int) -> dict[str, str]:
    """The files of a broken checkpoint of this step, as a kill in the save leaves it."""
    rules = dialect.checkpoints
    assert rules is not None
    example = example_of(dialect, "broken")
    digits = _digits(rules, example.name)
    number = str(step).zfill(len(digits) if digits.startswith("0") else 0)
    name = _stepped(example.name, digits).replace(STEP, number)
    files = {}
    for path, text in example.files.items():
        place = _path(rules, example.name, path, digits).replace(NAME, name).replace(STEP, number)
        if path != rules.tracker:
            files[place] = text
        elif text in (example.name, digits.lstrip("0")):  # it names the broken one already
            files[place] = rules.tracked(name, step)
    return files
