"""Whether the card's set-up lines run cleanly on this machine, and leave what the workers need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tr11ops.base.shipped import shipped_root
from tr11ops.base.units import duration
from tr11ops.cluster.sbatch_script import code_root
from tr11ops.launch.environment import NEEDED
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.rundir.tokenizer import look_at_tokenizer, workers_environment

LONGEST_SECONDS = 120.0
# What the batch script does before and after the lines; the probe stands where the agent would.
_SCRIPT = 'set -eo pipefail\numask 0002\n{lines}\nset -u\n"$TR11_PROBE_PYTHON" -c "$TR11_PROBE" "$TR11_PROBE_OUTPUT"\n'
_PROBE = """
import importlib.util, json, os, shutil, sys
missing = [name for name in {needed!r} if importlib.util.find_spec(name) is None]
value = {{"missing": missing, "srun": shutil.which("srun"), "environment": dict(os.environ)}}
open(sys.argv[1], "w").write(json.dumps(value))
"""


def setup_checks(
    card: RunCard, uses_slurm: bool, environment: Mapping[str, str]
) -> Iterator[PreflightCheck]:
    """Run `slurm.setup` in a shell of its own, as the batch script would, and look at what it
    leaves. Runs programs.
    """
    lines = card.slurm.setup
    if not lines:
        return
    if len(lines) == 1:
        shown = "its line"
    else:
        shown = f"its {len(lines)} lines"
    ends = f"{shown} {'ends' if len(lines) == 1 else 'end'}"
    began = time.monotonic()
    try:
        status, said, left = _run(lines, workers_environment(card, environment))
    except subprocess.TimeoutExpired:
        yield warning(
            "slurm.setup",
            f"{shown} did not end within {duration(LONGEST_SECONDS)} here",
            "run them by hand",
        )
        return
    except OSError as error:
        yield warning("slurm.setup", f"{shown} could not be tried here ({error.strerror or error})")
        return
    if left is None:
        last = said or "no word on stderr"
        rule = f"{ends} with status {status} on this machine, and so would each attempt: {last}"
        yield refused("slurm.setup", rule, "correct the line or the script that it sources")
        return
    if left["missing"]:
        rule = f"after it, {sys.executable} finds no {', '.join(left['missing'])}"
        yield refused(
            "slurm.setup",
            rule,
            "a set-up must not change where Python looks (PYTHONPATH, PYTHONHOME)",
        )
    elif uses_slurm and left["srun"] is None:
        yield refused(
            "slurm.setup",
            "after it, srun is not found",
            "add to PATH in the set-up, do not replace it",
        )
    else:
        took = duration(max(1.0, time.monotonic() - began))
        yield ok("slurm.setup", f"{shown} ended cleanly on this machine, in {took}")
    tokenizer = look_at_tokenizer(card, left["environment"])
    if (
        tokenizer.fault
        and not look_at_tokenizer(card, workers_environment(card, environment)).fault
    ):
        yield refused(
            "tokenizer.path", f"with the variables of slurm.setup, {tokenizer.fault}", tokenizer.fix
        )


def _run(
    lines: list[str], environment: Mapping[str, str]
) -> tuple[int, str, dict[str, Any] | None]:
    """Exit status, last line of stderr, and what the probe saw; None where the lines ended before
    it.
    """
    root = code_root()
    path = os.pathsep.join(
        filter(None, [str(root) if root else "", environment.get("PYTHONPATH", "")])
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "left.json"
        variables = {
            **environment,
            **({"PYTHONPATH": path} if path else {}),
            "TR11_SHIPPED": str(shipped_root()),
            "TR11_PROBE_PYTHON": sys.executable,
            "TR11_PROBE": _PROBE.format(needed=NEEDED),
            "TR11_PROBE_OUTPUT": str(output),
        }
        with subprocess.Popen(
            ["bash", "-c", _SCRIPT.format(lines="\n".join(lines))],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as shell:
            try:
                said = shell.communicate(timeout=LONGEST_SECONDS)[1]
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                raise
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        left = None
        if output.is_file():
            left = json.loads(output.read_text(encoding="utf-8"))
        return shell.returncode, last[:300], left
