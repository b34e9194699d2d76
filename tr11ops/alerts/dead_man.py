"""The call that says "I am looking": a service outside raises the alarm when it stops coming."""

from __future__ import annotations

from pathlib import Path

from tr11ops.alerts.secret_file import secret_lines, shown
from tr11ops.base.deadline import within
from tr11ops.base.errors import Late, PrivateFileError

TIMEOUT_SECONDS = 5.0


def ping(path: Path, timeout: float = TIMEOUT_SECONDS) -> str:
    """Fetch the URL in `path`; "" when the service took it, else what went wrong, without the URL."""
    from tr11ops.base.errors import NetworkError
    from tr11ops.base.http import get

    try:
        urls = secret_lines(path)
    except PrivateFileError as error:
        return str(error)
    if len(urls) != 1 or not urls[0].startswith(("https://", "http://")):
        return f"{path}: must hold one line, an https:// URL"
    name = shown(urls[0])

    def fetch() -> int:
        with get(urls[0], timeout=timeout) as answer:
            answer.stream.read(1024)
            return answer.status

    try:
        status = within(2 * timeout, fetch)
    except (NetworkError, Late) as error:
        return f"{name}: {error}"
    except ValueError as error:
        return f"{name}: {type(error).__name__}"
    if status >= 300:
        return f"{name}: the service answered {status}"
    return ""
