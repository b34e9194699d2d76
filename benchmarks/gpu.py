"""`make gpu`: on the first GPU at hand, in 8 minutes: is it right there, and how fast?

    python benchmarks/gpu.py [--device cuda|cpu] [--results FILE] [--json FOLDER] [SECTION ...]

Sections, the most important first, each with its own time and in a process of its own, so that one
that crashes or hangs costs no other:

    kernels    each attention kernel forward and backward against plain arithmetic
    losses     fp32, with dropout and of a Llama too, bf16, float8 and fp16 against the processor's
    resume     a save and a resume, bit for bit; the check of the arithmetic
    speed      the goals: 1.5 B parameters plain, compiled and compiled in float8, beside torch.compile
    saves      how long a save in the background stops the training, and steps while it writes
    attention  kernels without a bias beside each other: cuDNN, flash, flex
    large      24 x 2048 (1.3 B), and one block of the 176B
    profile    a trace of two steps
    kinds      rotary, Llama, dropout, fp16, float8, BERT, T5

Peers are measured in the same run: torch.compile, transformers, or our own plain GPT; compiled and
in float8 the last loss must be that of the plain one. What the time does not reach is said to be
left out, and what a section found before it crashed or ran out of time is kept; only a check that
was left out fails. The table goes into
benchmarks/RESULTS.md, with --json each figure and its peer's into files. Without a GPU it says so,
exit status 2; `--device cpu` runs the same code on small shapes to check it, without these limits,
and writes nothing unless --results or --json names a place. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from gpu_courses import losses, resume, tell_losses
from gpu_kernels import attention, kernels
from gpu_rows import (
    BUDGET_SECONDS,
    CHECK_SECONDS,
    RESULTS,
    SPARE_SECONDS,
    Row,
    found_in,
    left_out,
    put_table,
    table,
    tell,
)
from gpu_saves import profiled, saves
from gpu_speed import CASE_SECONDS, CASES, COMPILED_SECONDS, compared
from gpu_training import environment_of
from msgspec import to_builtins

from tr11ops.base.processes import leave
from trainer.contract.record import Record
from trainer.parallel.mesh import worker_device


class Section(Record):
    """A part of the whole. It takes `seconds` at most and what those before it left of theirs, and
    is begun where `least` are left.

    `make`: its rows; None for one of `CASES`. `is_check`: left out, it counts as failed.
    """

    seconds: float
    least: float
    make: Callable[[torch.device], Iterator[Row]] | None = None
    is_check: bool = False


SECTIONS: dict[str, Section] = {
    "kernels": Section(80, 70, kernels, is_check=True),
    "losses": Section(110, 80, losses, is_check=True),
    "resume": Section(40, 40, resume, is_check=True),
    "speed": Section(190, COMPILED_SECONDS + SPARE_SECONDS, is_check=False),
    "saves": Section(60, 60, saves),
    "attention": Section(30, 30, attention),
    "large": Section(2 * COMPILED_SECONDS + SPARE_SECONDS, COMPILED_SECONDS + SPARE_SECONDS),
    "profile": Section(30, 30, profiled, is_check=True),
    "kinds": Section(BUDGET_SECONDS, CASE_SECONDS + SPARE_SECONDS),
}


def rows_of(
    name: str, device: torch.device, seconds: float, measured: dict[str, float]
) -> Iterator[Row]:
    """What a section finds, in this process."""
    make = SECTIONS[name].make
    return compared(CASES[name], device, seconds, measured) if make is None else make(device)


def run_section(
    name: str, kind: str, left: float, before: Sequence[Row] = (), spare: float = 0.0
) -> list[Row]:
    """One section in a process of its own, where `left` seconds are left of the whole. `before`:
    what was found. `spare`: what the sections before it left of their time.
    """
    section = SECTIONS[name]
    if left < section.least:
        return [left_out(name, section.least, left, False if section.is_check else None)]
    seconds = min(section.seconds + spare, left)
    measured = {
        row.what: row.figures["seconds"]
        for row in before
        if row.figures and "seconds" in row.figures
    }
    command = [
        sys.executable,
        __file__,
        "--section",
        name,
        "--device",
        kind,
        "--seconds",
        f"{seconds:.0f}",
    ]
    command += ["--measured", json.dumps(measured)]
    output, fault = with_its_children(command, seconds, environment_of(kind))
    rows = [Row(**row) for row in found_in(output)]
    return rows if fault is None else [*rows, Row(name, fault, False)]


def with_its_children(
    command: Sequence[str], seconds: float, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Output of a program, and what is wrong with it. Out of time it ends with all that it started:
    a case that went on alone would take a part of the GPU from those behind it.
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0], f"not done within {seconds:.0f} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode:
        return output, (errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return output, None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="each figure and its peer's: SECTION.json"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--measured", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--losses", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU here: nothing was checked or measured (--device cpu runs the same code, to check it)"
        )
        return 2
    device = worker_device() if options.device == "cuda" else torch.device("cpu")
    if options.losses:
        tell_losses(json.loads(options.losses), device)
        return 0
    if options.section:
        measured = json.loads(options.measured)
        for row in rows_of(options.section, device, options.seconds, measured):
            tell(to_builtins(row))
        return 0
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    began, planned = time.monotonic(), 0.0
    rows: list[Row] = []
    for name in options.sections or SECTIONS:
        passed = time.monotonic() - began
        left, spare = BUDGET_SECONDS - passed, max(0.0, planned - passed)
        if options.device == "cpu":  # a check of the code: the machine may be as slow as it is
            left = spare = CHECK_SECONDS
        found = run_section(name, options.device, left, rows, spare)
        planned += SECTIONS[name].seconds
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"{name}.json").write_text(
                json.dumps([to_builtins(row) for row in found], indent=1) + "\n"
            )
        for row in found:
            rows.append(row)
            print(
                f"{ {None: '    ', True: 'fine', False: 'FAIL'}[row.fine] } {row.what}: {row.found}",
                flush=True,
            )
    name = (
        torch.cuda.get_device_name(device)
        if options.device == "cuda"
        else "this machine's processor (a check)"
    )
    title = f"{name}, torch {torch.__version__}, {time.strftime('%d %B %Y')}, {time.monotonic() - began:.0f} s:"
    results = options.results or (RESULTS if options.device == "cuda" else None)
    if results is not None:
        put_table(results, table(title, rows))
        print(f"written to {results}")
    return 1 if any(row.fine is False for row in rows) else 0


if __name__ == "__main__":
    leave(main())
