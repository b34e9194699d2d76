"""The error files of torch elastic (a worker's `error.json`) as the lines of a log: the traceback, and its time. Pure.

The file is one line of JSON; the lines that are told of it are those of the traceback inside.
"""

from __future__ import annotations

import json
from datetime import datetime

MARK = b'{"message"'  # begins every such file
LARGEST_BYTES = 4 << 20


def error_file_lines(content: bytes) -> bytes | None:
    """What the worker said, a line each with the time of the failure before it; None where it is no such file."""
    try:
        told = json.loads(content)["message"]
        if isinstance(told, str):
            return told.encode() + b"\n"
        more = told.get("extraInfo") or {}
        text, last = str(more.get("py_callstack") or ""), str(told["message"])
        moment = datetime.fromtimestamp(float(more["timestamp"])) if "timestamp" in more else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return None
    lines = text.splitlines()
    if not lines or not lines[-1].endswith(last.splitlines()[-1] if last.strip() else ""):
        lines.append(last)
    before = "" if moment is None else f"[{moment:%Y-%m-%d %H:%M:%S}] "
    return "".join(f"{before}{line}\n" for line in lines).encode()
