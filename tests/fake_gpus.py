"""A machine with GPUs, where there are none: an `nvidia-smi` on PATH that answers as an H100's did
(driver 580.159.04).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

import pytest

# --query-gpu, as the card answered; index, uuid and pci.bus_id are of each
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "mig.mode.current": "Disabled",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "clocks_event_reasons.active": "0x0000000000000001",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "retired_pages.pending": "[N/A]",
    "temperature.gpu": "37",
}

_PROGRAM = """#!{python}
import json, sys, pathlib
rows = json.loads(pathlib.Path({state!r}).read_text())
words = sys.argv[1:]
if rows == "lost":
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(9)
if not rows:
    print("No devices were found")
    sys.exit(6)
for word in words:
    if word.startswith(("--query-gpu=", "--query-remapped-rows=")):
        for field in (fields := word.partition("=")[2].split(",")):
            if field not in rows[0]:
                print(f'Field "{{field}}" is not a valid field to query.')
                sys.exit(2)
        for row in rows:
            print(", ".join(row[field] for field in fields))
if words[:1] == ["-L"]:
    for row in rows:
        print(f"GPU {{row['index']}}: {{row['name']}} (UUID: {{row['uuid']}})")
        for number, uuid in enumerate(row["slices"]):
            print(f"  MIG 1g.10gb     Device  {{number}}: (UUID: {{uuid}})")
"""


def plant_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1, slices: int = 0
) -> tuple[str, ...]:
    """Put the program on PATH; returns the UUIDs of what a program can have: GPUs, or `slices` of
    each.

    They are this test's alone: GPUs are claimed on the whole machine.
    """
    tag, rows, found = secrets.token_hex(4), [], []
    for index in range(count):
        own = {"index": str(index), "uuid": f"GPU-{tag}-1111-2222-3333-{index:012d}"}
        parts = [f"MIG-{tag}-1111-2222-{number:04d}-{index:012d}" for number in range(slices)]
        row = {**H100, **own, "gpu_bus_id": f"00000000:{index + 6:02X}:00.0", "slices": parts}
        rows.append(
            {
                **row,
                "pci.bus_id": row["gpu_bus_id"],
                "mig.mode.current": "Enabled" if slices else "Disabled",
            }
        )
        found += parts or [own["uuid"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpus.json").write_text(json.dumps(rows))
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, state=str(folder / "gpus.json")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tuple(found)


def lose_driver(folder: Path) -> None:
    """From now on `nvidia-smi` fails, as when the driver is gone."""
    (folder / "gpus.json").write_text(json.dumps("lost"))
