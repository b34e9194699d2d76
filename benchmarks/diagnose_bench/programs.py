"""The programs that are compared: tr11, the restart agent of NVRx, and the last line that tells of
an error.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labels import Incident
from msgspec import field

from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files, if_it_goes_on
from trainer.contract.record import Record

NVRX = "nvidia-resiliency-ext==0.7.0"
_CORPUS = Path(__file__).parents[2] / "tests" / "data" / "diagnose"
OWN_SETS = (
    _CORPUS,
    _CORPUS / "blind",
    *sorted(labels.parent for labels in (_CORPUS / "blind").glob("*/labels.toml")),
)
WORKER = Path(__file__).with_name("nvrx_worker.py")
NOT_HERE = (
    "--python-version",
    "3.12",
    "--platform",
    "manylinux_2_39_x86_64",
    "--only-binary=:all:",
    "--no-deps",
)
LONGEST_SECONDS = 1800
_ERROR = re.compile(
    r"error|exception|fatal|fail|abort|killed|traceback|panic|segfault|denied|refused",
    re.IGNORECASE,
)


class Answer(Record):
    """What a program says. None: it says nothing of that.

    `place`: the node of the line. `nodes`: who is at fault, or may be; `excluded`: those of them
    that it says must not be used again. `restart`: one of the labels' words, or `go` or `stop` of a
    program that knows no more. `confidence`: of what, who and restart.
    """

    fault: str | None = None
    file: str | None = None
    line: int | None = None
    place: str | None = None
    nodes: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    restart: str | None = None
    confidence: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Unmeasured(Exception):
    """Why a program cannot be asked here."""


# ----------------------------------------------------------------------------- tr11
def tr11(incidents: Sequence[Incident]) -> dict[str, Answer]:
    """`tr11 diagnose FILE...` while the logs are written, by its --json document."""
    found = {}
    for incident in incidents:
        began = time.perf_counter()
        [one] = map(if_it_goes_on, diagnose_files(incident.files))
        found[incident.name] = of_diagnosis(one, time.perf_counter() - began)
    return found


def of_diagnosis(found: Diagnosis, seconds: float) -> Answer:
    """The answer of its document, which is all that others see."""
    said = found.document()
    root, who, restart = said["root_cause"] or {}, said["who"], said["restart"]
    named = frozenset(who["nodes"])
    return Answer(
        fault=said["verdict"],
        file=Path(root["file"]).name if root else None,
        line=root.get("line_number"),
        place=root.get("node"),
        nodes=named,
        excluded=named if said["action"] == "exclude_and_resubmit" else frozenset(),
        restart=restart["answer"],
        confidence={
            "what": said["confidence"],
            "who": who["confidence"],
            "restart": restart["confidence"],
        },
        seconds=seconds,
    )


# --------------------------------------------------------------- the last line with a word of error
def last_error_line(incidents: Sequence[Incident]) -> dict[str, Answer]:
    """What who scrolls to the end sees; it always starts again."""
    found = {}
    for incident in incidents:
        began = time.perf_counter()
        last = None
        for path in incident.files:
            for number, text in enumerate(_text(path).splitlines(), start=1):
                if _ERROR.search(text):
                    last = (path.name, number)
        file, line = last or (None, None)
        found[incident.name] = Answer(
            file=file, line=line, restart="go", seconds=time.perf_counter() - began
        )
    return found


def _text(path: Path) -> str:
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace")


# ----------------------------------------------------------------------------- NVRx
def nvrx(incidents: Sequence[Incident]) -> dict[str, Answer]:
    """NVRx's restart agent without its language model (its levels L0 to L4 but for L1), in an
    environment of its own.

    It takes one log: the files of an incident stand one after the other in it. Raises Unmeasured.
    """
    python = nvrx_python()
    with tempfile.TemporaryDirectory() as folder:
        logs = {}
        places: dict[str, list[tuple[str, int]]] = {}
        for number, incident in enumerate(incidents):
            path = Path(folder) / f"{number}.log"
            lines = list(_lines(incident))
            path.write_text("".join(f"{text}\n" for _, _, text in lines), encoding="utf-8")
            places[incident.name] = [(file, line) for file, line, _ in lines]
            logs[incident.name] = str(path)
        done = subprocess.run(
            [python, str(WORKER)], input=json.dumps(logs), capture_output=True, text=True, check=False,
            timeout=LONGEST_SECONDS,
        )  # fmt: skip
    if done.returncode:
        raise Unmeasured(f"{NVRX} failed: {(done.stderr.strip().splitlines() or ['no words'])[-1]}")
    answers = json.loads(done.stdout)
    return {name: _of_nvrx(answers[name], places[name]) for name in answers}


def _of_nvrx(said: Mapping[str, Any], places: Sequence[tuple[str, int]]) -> Answer:
    file, line = (None, None)
    if said["line"] is not None and 0 < said["line"] <= len(places):
        file, line = places[said["line"] - 1]
    return Answer(
        file=file,
        line=line,
        place=said["node"],
        nodes=frozenset({said["node"]} if said["node"] else ()),
        restart="go" if said["decision"] == "RESTART" else "stop",
        seconds=said["seconds"],
    )


def _lines(incident: Incident) -> Iterator[tuple[str, int, str]]:
    for path in incident.files:
        for number, text in enumerate(_text(path).split("\n"), start=1):
            yield path.name, number, text.rstrip("\r")


def nvrx_python() -> str:
    """The interpreter that has NVRx, installed at its first use. Raises Unmeasured.

    The wheel is built for a newer Python and C library than many clusters have; its restart agent
    is Python alone, and of its requirements imports httpx, so that this is all that is installed.
    """
    folder = Path(sys.prefix) / "nvrx"
    python = folder / "bin" / "python"
    ready = folder / ".installed"
    if ready.exists() and ready.read_text() == NVRX:
        return str(python)
    print(f"installing {NVRX} into {folder}, for comparison alone", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in (["httpx"], ["--target", str(packages), *NOT_HERE, NVRX]):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise Unmeasured(f"{NVRX} cannot be installed: {reason}")
    ready.write_text(NVRX)
    return str(python)


PROGRAMS = {"tr11": tr11, "nvrx": nvrx, "last-line": last_error_line}
TITLES = {
    "tr11": "tr11 diagnose",
    "nvrx": f"NVRx {NVRX.rpartition('=')[2]}",
    "last-line": "last error line",
}
