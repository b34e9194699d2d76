"""The formats that tools outside this project read too, every literal checked byte for byte; and `Record`, of which they
are made: frozen, compared by its fields, read from what its annotations say.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import pickle
import re
import stat
from types import ModuleType
from typing import Generic, TypeVar

import pytest
from hypothesis import given, strategies as st
from msgspec import field, to_builtins
from msgspec.structs import astuple, replace

from tr11ops.base import errors as of_the_operation
from tr11ops.dialects.reading import step_record
from trainer.contract import errors as of_the_trainer
from trainer.contract.attempt import END_REASONS, EndMarker, Heartbeat, write_heartbeat
from trainer.contract.checkpoint_formats import (
    DEEPSPEED,
    HELD,
    OWN,
    SAVED_FORMATS,
    format_at,
    format_of,
    is_whole,
)
from trainer.contract.checkpoint_names import checkpoint_step, checkpoint_steps, read_latest
from trainer.contract.errors import NEEDS_PERSON, Tr11Error
from trainer.contract.files import append_line, sync_folder, write_atomically, write_json
from trainer.contract.manifest import FileEntry, Manifest, file_digest, manifest_faults
from trainer.contract.metrics_record import StepRecord, format_step, format_validation
from trainer.contract.record import Record

RECORD = StepRecord(
    iteration=31219, total_iterations=115311, consumed_samples=47768496, consumed_tokens=97829879808,
    seconds_per_iteration=105.218, learning_rate=5.279e-05, global_batch_size=2048, lm_loss=5.098124,
    grad_norm=960.351, samples_per_second=19.464, tflops=149.02,
)  # fmt: skip

# A line of the real training, whose fields and widths are facts of the format.
REAL_LINE = (
    " iteration    31219/  115311 | consumed samples:     47768496 | consumed tokens:  97829879808 |"
    " elapsed time per iteration (s): 105.22 | learning rate: 5.279E-05 | global batch size:  2048 |"
    " lm loss: 5.098124E+00 | grad norm: 960.351 | num zeros: 0.0 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 | samples per second: 19.464 | TFLOPs: 149.02 |"
)


def test_log_line_is_the_originals_byte_for_byte():
    assert format_step(RECORD) == REAL_LINE


def test_optional_fields_stand_where_the_original_put_them():
    line = format_step(replace(RECORD, loss_scale=4096.0, params_norm=12.5, curriculum_length=64))
    assert (
        "| loss scale: 4096.0 | grad norm: 960.351 | num zeros: 0.0 | params norm: 12.500 | curriculum seqlen:    64 | number"
        in line
    )


def test_nan_loss_is_printed_and_read_back():
    line = format_step(replace(RECORD, lm_loss=math.nan))
    assert "| lm loss: nan |" in line
    assert math.isnan(step_record(line).lm_loss)


@pytest.mark.parametrize(
    ("line", "iteration", "loss", "seconds"),
    [
        ("[default7]:" + REAL_LINE, 31219, 5.098124, 105.22),
        # tr8: NaN, so the original left the field out
        (
            " iteration     9027/  159576 | consumed samples:      1000000 | elapsed time per iteration (ms): 100500.2 |"
            " learning rate: 6.000E-05 | global batch size:  2048 | loss scale: 4096.0 | grad norm: 1.2 | num zeros: 0.0 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |",
            9027, math.nan, 100.5002,
        ),
        # tr1: milliseconds, no tokens, no throughput
        (
            " iteration    29050/  311541 | consumed samples:     25000000 | elapsed time per iteration (ms): 31000.0 |"
            " learning rate: 9.9E-05 | global batch size:  1024 | lm loss: 7.340000E+00 | loss scale: 8192.0 |"
            " grad norm: 33.2 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            29050, 7.34, 31.0,
        ),
    ],
)  # fmt: skip
def test_older_lines_are_read(line, iteration, loss, seconds):
    record = step_record(line)
    assert record.iteration == iteration
    assert record.lm_loss == pytest.approx(loss, nan_ok=True)
    assert record.seconds_per_iteration == pytest.approx(seconds)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "PULSE: tr11 is running for 3:00",
        " iteration  12/ 20 | nothing else |",
        " valid loss at iteration 45000 | lm loss value: 2.3 |",
    ],
)
def test_other_lines_are_not_steps(line):
    assert step_record(line) is None


finite = st.floats(min_value=0, max_value=1e9, allow_nan=False)


@given(
    st.builds(
        StepRecord,
        iteration=st.integers(0, 10**8), total_iterations=st.integers(1, 10**8), consumed_samples=st.integers(0, 10**12),
        consumed_tokens=st.integers(0, 10**15), seconds_per_iteration=finite, learning_rate=finite,
        global_batch_size=st.integers(0, 10**6), lm_loss=st.one_of(finite, st.just(math.nan), st.just(math.inf)),
        grad_norm=st.one_of(st.none(), finite), samples_per_second=finite, tflops=finite,
        loss_scale=st.one_of(st.none(), finite), params_norm=st.one_of(st.none(), finite),
        curriculum_length=st.one_of(st.none(), st.integers(0, 10**5)), skipped_iterations=st.integers(0, 1000),
        nan_iterations=st.integers(0, 1000), other_losses=st.sampled_from([(), (("sop", 0.5), ("other", 2.0))]),
    ),
    st.sampled_from(["", "[default7]:", "[x01] [default0]:"]),
)  # fmt: skip
def test_every_line_reads_back_to_what_it_prints(record, prefix):
    read = step_record(prefix + format_step(record))
    assert format_step(StepRecord(*astuple(read))) == format_step(record)
    assert read.other_losses == record.other_losses


def test_validation_lines():
    lines = format_validation("valid", 45000, 2.3270906).split("\n")
    assert (
        lines[1]
        == " valid loss at iteration 45000 | lm loss value: 2.327091E+00 | lm loss PPL: 1.024808E+01 | "
    )
    assert lines[0] == lines[2] == "-" * (len(lines[1]) + 1)


def test_atomic_write_replaces_whole_and_leaves_nothing(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IWGRP


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_heartbeat_and_end_marker_read_back(tmp_path):
    beat = Heartbeat(3, "node", 12, "training", 7, 1.5, "99")
    write_heartbeat(tmp_path / "beats" / "3.json", beat)
    assert Heartbeat.read(tmp_path / "beats" / "3.json") == beat
    assert Heartbeat.read(tmp_path / "none.json") is None
    marker = EndMarker("finished", 10, 10, False, "done", 2.0, "node", "99")
    write_json(tmp_path / "end.json", to_builtins(marker))
    assert EndMarker.read(tmp_path / "end.json") == marker
    assert marker.reason in END_REASONS
    (tmp_path / "end.json").write_text('{"reason": "finished"}')
    with pytest.raises(ValueError, match="is not an end marker"):
        EndMarker.read(tmp_path / "end.json")


def test_manifest_reads_back_and_names_every_fault(tmp_path):
    (tmp_path / "weights").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "weights" / name).write_bytes(name.encode() * 100)
    entries = tuple(
        FileEntry(f"weights/{name}", 100, file_digest(tmp_path / "weights" / name))
        for name in "abc"
    )
    manifest = Manifest(5, 40, 320, entries, {"tensor": 1}, {"layers": 2}, "hash", 1.0)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert manifest.total_bytes == 300
    assert manifest_faults(tmp_path, manifest, read_digests=True) == []
    (tmp_path / "weights" / "a").unlink()
    (tmp_path / "weights" / "b").write_bytes(b"short")
    (tmp_path / "weights" / "c").write_bytes(b"d" * 100)
    assert [
        fault.split(":")[0] for fault in manifest_faults(tmp_path, manifest, read_digests=True)
    ] == [f"weights/{n}" for n in "abc"]
    assert len(manifest_faults(tmp_path, manifest, read_digests=False)) == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": [1]}', '{"schema": 99, "files": []}', "\x00\xff"]
)
def test_a_damaged_manifest_is_a_value_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest|newer"):
        Manifest.read(tmp_path)


def test_steps_are_ordered_by_number_and_latest_is_checked(tmp_path):
    for name in ("global_step9900", "global_step10000", "global_step10000x", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step7").write_text("a file")
    assert checkpoint_steps(tmp_path) == [9900, 10000]
    assert checkpoint_steps(tmp_path / "absent") == []
    assert checkpoint_step("global_step-1") is None
    assert read_latest(tmp_path) is None
    (tmp_path / "latest").write_text("global_step9900\n")
    assert read_latest(tmp_path) == 9900
    (tmp_path / "latest").write_text("nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        read_latest(tmp_path)


def test_appended_lines_stay_whole(tmp_path):
    for number in range(3):
        append_line(tmp_path / "log" / "file", f"line {number}")
    assert (tmp_path / "log" / "file").read_text() == "line 0\nline 1\nline 2\n"


def test_a_line_that_was_cut_is_ended_first(tmp_path):
    path = tmp_path / "log"
    path.write_text("iteration 7 | cut he")
    append_line(path, "one")
    append_line(path, "two\nthree")
    assert path.read_text() == "iteration 7 | cut he\none\ntwo\nthree\n"
    assert path.stat().st_mode & 0o060 == 0o060


def test_a_line_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    """What a full disk leaves is half a line; the next one is whole again."""
    path, write = tmp_path / "log", os.write
    append_line(path, "before")
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with pytest.raises(OSError, match="no space left for the whole line"):
        append_line(path, "middle")
    monkeypatch.setattr(os, "write", write)
    append_line(path, "after")
    assert path.read_text() == "before\nmid\nafter\n"


LAYERS, RANKS = "layer_03-model_00-model_states.pt", "mp_rank_00_model_states.pt"
MOMENTS = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
UNIVERSAL = "zero/3.mlp.weight/fp32.pt"


@pytest.mark.parametrize(
    ("files", "form", "whole", "loadable"),
    [
        (["manifest.json", "weights/.metadata", "cursor.json"], OWN, True, True),
        (["weights/.metadata", "cursor.json"], OWN, False, True),
        ([LAYERS, RANKS, MOMENTS], DEEPSPEED, True, True),
        ([UNIVERSAL, RANKS], DEEPSPEED, True, True),
        ([LAYERS, MOMENTS], DEEPSPEED, False, True),
        ([RANKS, MOMENTS], DEEPSPEED, True, False),
        (["manifest.json", "foreign.json", "foreign/step-8/.metadata"], HELD, True, False),
        (["foreign.json", "foreign/step-8/.metadata"], HELD, False, False),
        (["manifest.json"], None, False, False),
        ([f"below/{RANKS}", f"below/{LAYERS}"], None, False, False),
        ([], None, False, False),
    ],
)
def test_a_format_is_told_by_the_names_of_its_files(files, form, whole, loadable, tmp_path):
    assert (format_of(files), is_whole(files)) == (form, whole)
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert format_at(tmp_path) == (form if loadable and form else OWN)
    assert any(one.has_loadable(tmp_path) for one in SAVED_FORMATS) is loadable


@pytest.mark.parametrize(
    ("form", "path", "alone"),
    [
        (OWN, "optimizer/__0_0.distcp", True),
        (OWN, "rng/rank_0.pt", True),
        (OWN, "weights/__0_0.distcp", False),
        (OWN, "cursor.json", False),
        (DEEPSPEED, MOMENTS, True),
        (DEEPSPEED, MOMENTS.removeprefix("bf16_"), True),
        (DEEPSPEED, LAYERS, False),
        (DEEPSPEED, RANKS, False),
        (DEEPSPEED, UNIVERSAL, False),
        (HELD, "foreign.json", True),
        (HELD, "foreign/step-8/.metadata", False),
    ],
)
def test_what_only_a_resume_needs(form, path, alone):
    assert form.is_for_resume_alone(path) is alone


def test_a_file_system_that_flushes_names_by_itself_is_no_failure(tmp_path, monkeypatch):
    """It refuses to flush a folder with EINVAL: a save, a copy and a prune go on all the same."""

    def refuse(descriptor):
        raise OSError(
            errno.EINVAL if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino else errno.EIO,
            "no",
        )

    monkeypatch.setattr(os, "fsync", refuse)
    sync_folder(tmp_path)
    (tmp_path / "broken").mkdir()
    with pytest.raises(OSError, match="no"):
        sync_folder(tmp_path / "broken")


T = TypeVar("T")


class Point(Record):
    x: int
    y: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is below zero")


class Box(Record, Generic[T]):
    item: T


class Tall(Point):
    height: int = 1


def test_a_record_is_a_frozen_value() -> None:
    point = Point(1, names=["a"])
    assert point == Point(1, names=["a"]) and point != Point(1) and point != Tall(1, names=["a"])
    assert hash(Box((1, 2))) == hash(Box((1, 2)))
    for name in ("x", "new"):
        with pytest.raises(AttributeError):
            setattr(point, name, 2)
    assert copy.copy(point) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
    assert Point(1).names is not Point(1).names, "a default is made for each"


def test_every_way_to_make_one_checks_it() -> None:
    with pytest.raises(ValueError, match="x is below zero"):
        Point(-1)
    with pytest.raises(ValueError, match="x is below zero"):
        replace(Point(1), x=-1)
    with pytest.raises(TypeError, match="'x'"):
        Point()  # type: ignore[call-arg]


def test_a_record_of_a_record_has_the_fields_of_both() -> None:
    assert to_builtins(Tall(1, height=3)) == {"x": 1, "y": 0, "names": [], "height": 3}


# ----------------------------------------------------------------------------- errors
# The errors of both packages: the tree in each docstring is the tree of the classes, with their
# exit codes.

ENTRY = re.compile(r"^    ( +)([A-Z]\w+)(?:  (\d))?(?: \(.*\))?$", re.MULTILINE)


def classes(module: ModuleType) -> dict[str, type[Tr11Error]]:
    """The errors that a module defines, by name, in its order."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    own = {name: value for name, value in found.items() if value.__module__ == module.__name__}
    return {
        name: value
        for name, value in own.items()
        if issubclass(value, Tr11Error) and value is not Tr11Error
    }


@pytest.mark.parametrize("module", [of_the_operation, of_the_trainer], ids=["operation", "trainer"])
def test_the_docstring_draws_the_tree(module: ModuleType) -> None:
    drawn = [
        (len(indent) // 2, name, int(code or NEEDS_PERSON))
        for indent, name, code in ENTRY.findall(module.__doc__)
    ]
    kinds = classes(module)
    assert [name for _, name, _ in drawn] == list(kinds)
    above: list[str] = []
    for depth, name, code in drawn:
        above[depth - 1 :] = [name]
        parents = [
            parent.__name__ for parent in kinds[name].__mro__[1:] if parent.__name__ in kinds
        ]
        assert (parents[:1] or [None])[0] == (above[depth - 2] if depth > 1 else None), name
        if name != "Refusal":  # whose code is each one's own
            assert kinds[name].exit_code == code, name
