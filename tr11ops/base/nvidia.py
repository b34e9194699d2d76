"""Asking `nvidia-smi`: one row a GPU, one field a column; and the GPUs of this machine, slices of
divided ones too.

A GPU that is divided (MIG) is none that a program can have: its slices are, one to a process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tr11ops.base.errors import Unanswered
from tr11ops.base.processes import LocalCommands, ProbeOutput
from trainer.contract.record import Record
from trainer.contract.units import shortened

# of a driver that is older or newer than the field's name
INVALID_FIELD = "is not a valid field to query"
NO_PROGRAM = "there is no nvidia-smi on this node"
LOST = re.compile(
    r"GPU is lost|fallen off the bus|unable to determine the device handle|couldn't communicate with the NVIDIA driver"
    r"|requires reset|unknown error",
    re.IGNORECASE,
)
_FIELDS, _DIVIDED = ("index", "uuid", "name", "memory.total"), "mig.mode.current"
_GPU_LINE = re.compile(r"^GPU (\d+):")
_SLICE_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+):\s+\(UUID: (MIG-[^)\s]+)\)")


class Gpu(Record):
    """A GPU that a program can have, or a slice of one.

    `uuid`: as CUDA_VISIBLE_DEVICES takes it, whatever CUDA's own order is. `index`: nvidia-smi's
    number, of a slice "0:1". `memory_megabytes`: MiB, 0 where that is not told (of a slice).
    """

    uuid: str
    name: str
    index: str
    memory_megabytes: int = 0


def list_gpus(system: LocalCommands, seconds: float) -> tuple[Gpu, ...]:
    """The GPUs as the driver lists them now, in its order; none where it says that there are none.

    Raises Unanswered where there is no nvidia-smi, or where it does not answer as it should.
    """
    try:
        rows = query(system, [*_FIELDS, _DIVIDED], seconds)
    except Unanswered as error:
        if "no devices were found" in str(error).lower():
            return ()
        if INVALID_FIELD not in str(error):
            raise
        rows = query(system, _FIELDS, seconds)  # a driver from before there were slices
    if any(_is_divided(row) for row in rows):
        slices = _slices(system, seconds)
    else:
        slices = {}
    found: list[Gpu] = []
    for row in rows:
        if _is_divided(row):
            found += (
                Gpu(uuid, f"{row['name']} MIG {profile}", f"{row['index']}:{place}")
                for place, profile, uuid in slices.get(row["index"], ())
            )
        else:
            found.append(
                Gpu(row["uuid"], row["name"], row["index"], number(row["memory.total"]) or 0)
            )
    return tuple(found)


def _is_divided(row: dict[str, str]) -> bool:
    return row.get(_DIVIDED, "").lower() == "enabled"


def _slices(system: LocalCommands, seconds: float) -> dict[str, list[tuple[str, str, str]]]:
    """(number, profile, UUID) of each slice, by its GPU's number."""
    output = ask(system, ["-L"], seconds)
    if output.status != 0:
        raise Unanswered(words_of(output))
    found: dict[str, list[tuple[str, str, str]]] = {}
    gpu = ""
    for line in output.text.splitlines():
        head, part = _GPU_LINE.match(line), _SLICE_LINE.match(line)
        if head:
            gpu = head[1]
        elif part:
            found.setdefault(gpu, []).append((part[2], part[1], part[3]))
    return found


def visible(gpus: Iterable[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by the beginning of a UUID; None: all.

    As CUDA has it, the first that names none ends the list.
    """
    listed = tuple(gpus)
    if wanted is None:
        return listed
    found: list[Gpu] = []
    for word in wanted.split(","):
        name = word.strip()
        named = [gpu for gpu in listed if name and (gpu.index == name or _begins(gpu.uuid, name))]
        if len(named) != 1:
            break
        found += named
    return tuple(dict.fromkeys(found))


def _begins(uuid: str, text: str) -> bool:
    return text.startswith(("GPU-", "MIG-")) and uuid.startswith(text)


def uuids(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in gpus)


def query(
    system: LocalCommands, fields: Sequence[str], seconds: float, what: str = "gpu"
) -> list[dict[str, str]]:
    """`nvidia-smi --query-WHAT=fields`, by field name. Values such as `[N/A]` lose their brackets.

    Raises Unanswered when there is no nvidia-smi, when it fails, or when it does not know a field.
    """
    output = ask(
        system, [f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"], seconds
    )
    if output.status != 0:
        raise Unanswered(words_of(output))
    rows = [
        [cell.strip().strip("[]") for cell in line.split(",")]
        for line in output.text.splitlines()
        if line.strip()
    ]
    if any(len(row) != len(fields) for row in rows):
        raise Unanswered(
            f"nvidia-smi wrote something else than asked for: {output.text.strip()[:80]!r}"
        )
    return [dict(zip(fields, row, strict=True)) for row in rows]


def ask(system: LocalCommands, arguments: Sequence[str], seconds: float) -> ProbeOutput:
    """Run nvidia-smi. Raises Unanswered when there is none or it takes too long."""
    try:
        return system.command(["nvidia-smi", *arguments], seconds)
    except FileNotFoundError:
        raise Unanswered(NO_PROGRAM) from None


def words_of(output: ProbeOutput) -> str:
    """What a failed nvidia-smi said, in one line."""
    said = " ".join((output.text.strip() or output.error.strip()).split())
    if said:
        return f"nvidia-smi: {shortened(said, 200)}"
    return f"nvidia-smi ended with status {output.status} and no word"


def number(text: str) -> int | None:
    """A whole number, or None where nvidia-smi has none (`N/A`, `Not Supported`, ...)."""
    if text.isdigit():
        return int(text)
    return None
