"""The trainer's reader in the process of the tests: each question to one of its own loads torch
again, which takes longer than the whole rest of a test.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tr11ops.backup import drill
from tr11ops.cli import checkpoints


@pytest.fixture
def reader_here() -> Iterator[None]:
    """What asks `python -m trainer.checkpoint` is answered by the same code, here.

    The process itself is of tests/tr11ops/cli/test_checkpoint_values.py and test_trainer_child.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "ask_checkpoint_module", _answer)
        patch.setattr(drill, "_read_by_trainer", _read)
        yield


def _read(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    reader = importlib.import_module("trainer.checkpoint.__main__")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = reader.main(words)
    return subprocess.CompletedProcess([*words], code, out.getvalue(), err.getvalue())


def _answer(words: Sequence[str]) -> dict[str, Any] | None:
    value = json.loads(_read(words).stdout)
    assert isinstance(value, dict)
    return value
