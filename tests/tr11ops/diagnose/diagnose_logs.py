"""Logs of failures, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.scan import scan
from tr11ops.diagnose.sighting import LogLaunch

SHORT_STEPS = "step: 10 loss: 2.31\nstep: 11 loss: 2.30\n"
HEAD = 'Traceback (most recent call last):\n  File "/code/train.py", line 211, in <module>\n    main()\n'

STEP = (
    "[default1]: iteration %8d/      40 | consumed samples:          128 | elapsed time per iteration (s): 0.07 | "
    "learning rate: 6.000E-05 | global batch size:   128 | lm loss: 1.025863E+01 | grad norm: 1.200 |\n"
)
RAISED = """\
[default0]:[rank2]: Traceback (most recent call last):
[default1]:[rank3]: Traceback (most recent call last):
[default0]:[rank2]:   File "/code/train.py", line 211, in <module>
[default1]:[rank3]:   File "/code/train.py", line 211, in <module>
[default0]:[rank2]:     raise KeyError('input_ids')  # RuntimeError: no
[default1]:[rank3]:     work.wait()
[default0]:[rank2]: KeyError: 'input_ids'
[default1]:[rank3]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.1.1]:6
"""
REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-23_04:42:23
  host      : n2
  rank      : 3 (local_rank: 1)
  exitcode  : -15 (pid: 8785)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_04:42:20
  host      : n2
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 8787)
  error_file: <N/A>
============================================================
"""
FAILED = STEP % 1 + STEP % 2 + RAISED + REPORT


def diagnosed(paths: Sequence[Path]) -> list[Diagnosis]:
    """`diagnose_files`, once in a run of the tests for the same files: several tests judge the same
    labelled logs, which are a minute of work.
    """
    return list(_diagnosed(tuple(paths)))


@cache
def _diagnosed(paths: tuple[Path, ...]) -> tuple[Diagnosis, ...]:
    return tuple(diagnose_files(paths))


def of_text(folder: Path, text: str) -> Diagnosis:
    """The diagnosis of a log with this text."""
    log = folder / "main_log.txt"
    log.write_text(text, encoding="utf-8")
    [found] = diagnose_files([log])
    return found


def launches_of(text: str | bytes, size: int = 1 << 20) -> list[LogLaunch]:
    data = text.encode() if isinstance(text, str) else text
    lines, blocks = data.splitlines(keepends=True), [b""]
    for line in lines:
        if len(blocks[-1]) >= size:
            blocks.append(b"")
        blocks[-1] += line
    return scan("log", blocks, matcher())
