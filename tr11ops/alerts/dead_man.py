"""The call that says "I am looking": a service outside raises the alarm when it stops coming."""

from __future__ import annotations

from pathlib import Path

from tr11ops.alerts.secret_file import secret_lines, shown
from tr11ops.deadline import Late, within
from tr11ops.private_file import PrivateFileError

TIMEOUT_SECONDS = 5.0


def ping(path: Path, timeout: float = TIMEOUT_SECONDS) -> str:
    """Fetch the URL in `path`; "" when the service took it, else what went wrong, without the URL."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        urls = secret_lines(path)
    except PrivateFileError as error:
        return str(error)
    if len(urls) != 1 or not urls[0].startswith(("https://", "http://")):
        return f"{path}: must hold one line, an https:// URL"
    name = shown(urls[0])

    def fetch() -> None:
        request = urllib.request.Request(urls[0], headers={"User-Agent": "tr11"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read(1024)

    try:
        within(2 * timeout, fetch)
    except urllib.error.HTTPError as error:
        error.close()
        return f"{name}: the service answered {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return f"{name}: {reason.strerror if isinstance(reason, OSError) and reason.strerror else 'no answer'}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{name}: {error if isinstance(error, Late) else type(error).__name__}"
    return ""
