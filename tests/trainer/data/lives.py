"""One life of a command after another, each killed at a step of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.trainer.data.data_helpers import ROOT
from trainer.contract.record import Record

# Runs a command in one fork after another. Life n of a story is killed with -9 at its step
# `steps[n]`, counted over every call that changes what is on disk, and every piece; the last life
# runs to its end. Prints what each life was told. `setup` and `work` are Python: `work` makes
# `output` (a path in a folder of the story's own) and calls `point` and `tell`.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
root, stories, setup, work = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
exec(setup)

def life(output, step):
    count = 0
    def point(*_):
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
    def counted(call):
        def wrapped(*arguments, **options):
            point()
            return call(*arguments, **options)
        return wrapped
    for owner, name in ((os, "fsync"), (os, "pwrite"), (os, "truncate"), (os, "unlink"), (os, "replace")):
        setattr(owner, name, counted(getattr(owner, name)))
    told = []
    exec(work, {**globals(), "output": output, "point": point, "tell": told.append})
    print(json.dumps([step, count, told]), flush=True)

for number, steps in enumerate(stories):
    for step in [*steps, -1]:
        child = os.fork()
        if child == 0:
            life(root / f"story{number}" / "out", step)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGKILL if step >= 0 else 0) or code == 0, code
"""


class Lives(Record):
    """`longest`: steps of the longest life that a kill was planned for. `last`: of each story's
    last life, its number of steps and what it was told.
    """

    longest: int
    last: list[tuple[int, list[str]]]


def run_lives(root: Path, stories: list[list[int]], setup: str, work: str) -> Lives:
    """Run all stories; the output of number N is `root/storyN/out`."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(root), json.dumps(stories), setup, work],
        cwd=ROOT, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    return Lives(
        max(count for step, count, _ in lives if step >= 0),
        [(count, told) for step, count, told in lives if step < 0],
    )
