"""The last operations between the ranks, as torch's flight recorder kept them: who waits for whom,
in which group.

NCCL's watchdog writes them by itself when an operation times out (see
`tr11ops.agent.worker_environment`); gloo's failures are written here, and both on request, from a
thread: the training's own thread may hang in an operation.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths
from trainer.contract.requests import read_request


def record_path(paths: RunPaths, job_id: str, launch: int, rank: int, request: int = 0) -> Path:
    """Beside the files of NCCL's watchdog, which are named without a suffix."""
    what = ""
    if request:
        what = f"-request-{request}"
    return paths.flight_records(job_id) / f"launch-{launch}{what}-rank-{rank}.json"


def write_record(path: Path) -> bool:
    """Write what the recorder holds: at most some kilobytes for each kept operation. False when it
    holds nothing.

    Raises OSError as the file system does.
    """
    import torch._C._distributed_c10d as library

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(library, name, None)
        if dump is not None:
            kept = dump()
        else:
            kept = b""
        if isinstance(kept, bytes):
            text = kept
        else:
            text = str(kept).encode()
        if b'"record_id"' in text:
            make_shared(path.parent)
            path.write_bytes(text)
            return True
    return False


@dataclass
class OperationsOnRequest:
    """Called again and again: honours each request for the operations once, whatever the training's
    thread does.
    """

    paths: RunPaths
    job_id: str
    launch: int
    rank: int

    def __post_init__(self) -> None:
        self._honoured: set[int] = set()

    def __call__(self) -> None:
        request = read_request(self.paths.operations_request, "operations")
        if request is None or request.id in self._honoured:
            return
        self._honoured.add(request.id)
        with suppress(OSError):  # who asked sees which ranks have not written
            path = record_path(
                self.paths, self.job_id, self.launch, rank=self.rank, request=request.id
            )
            write_record(path)
