"""Error files of torch elastic as logs: one left by torch 2.13, others rebuilt in its form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.reading import error_file_lines

REAL = (
    r'{"message": {"message": "KeyError: '
    r"'tokens'"
    r'", "extraInfo": {"py_callstack": "Traceback (most recent call last):\n  File \"/env/torch/distributed/elastic/'
    r"multiprocessing/errors/__init__.py\", line 367, in wrapper\n    return f(*args, **kwargs)\n           "
    r"^^^^^^^^^^^^^^^^^^\n  File \"/run/w.py\", line 5, in main\n    return batch[\"tokens\"]\n           ~~~~~^^^^^^^^^^\n"
    r"KeyError: 'tokens'\n"
    r'", "timestamp": "1795469165"}}}'
)


def error_file(path: Path, error: str, moment: int) -> Path:
    value = json.loads(REAL)
    value["message"]["message"] = error
    value["message"]["extraInfo"]["timestamp"] = str(moment)
    stack = value["message"]["extraInfo"]["py_callstack"]
    value["message"]["extraInfo"]["py_callstack"] = stack.replace("KeyError: 'tokens'", error)
    path.write_text(json.dumps(value))
    return path


def test_a_workers_error_file_is_read_as_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(REAL)
    [found] = diagnose_files([tmp_path / "error.json"])
    assert found.fault == "user_code" and found.root_cause is not None
    assert found.root_cause.text.endswith("KeyError: 'tokens'")


def test_of_several_workers_the_first_to_fail_is_the_cause(tmp_path: Path) -> None:
    later = error_file(
        tmp_path / "0.json",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        109,
    )
    first = error_file(
        tmp_path / "1.json",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        100,
    )
    [found] = diagnose_files([later, first])
    assert (
        found.fault == "cuda_oom"
        and found.root_cause is not None
        and found.root_cause.file == str(first)
    )


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b'{"message": "one line"}', b"one line\n"),
        (b'{"message": {"message": "Signal 9", "errorCode": 9}}', b"Signal 9\n"),
        (b'{"message": {"mess', None),
        (b'{"message": 3}', None),
        (b'{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}', None),
        (b'["message"]', None),
    ],
)  # fmt: skip
def test_other_forms_are_read_and_other_files_left_alone(
    content: bytes, lines: bytes | None
) -> None:
    assert error_file_lines(content) == lines
