"""Files of URLs with passwords or tokens in them, one on a line: delivery URLs (Slack, PagerDuty, mail
with a password, ...) through apprise, and the dead-man call. No URL is ever shown or recorded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.alerts.outbox import DeliveryReport, OutboxEntry
from tr11ops.alerts.state import Message
from tr11ops.base.deadline import within
from tr11ops.base.errors import Late, NetworkError, PrivateFileError
from tr11ops.base.private_file import private_text
from tr11ops.detect.detector import Severity
from trainer.contract.record import Record
from trainer.contract.units import shortened

if TYPE_CHECKING:
    import apprise


def secret_lines(path: Path) -> tuple[str, ...]:
    """The lines of a file with secrets, without blank ones and those that begin with #. Raises
    PrivateFileError.
    """
    lines = (line.strip() for line in private_text(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def shown(url: str) -> str:
    """A URL as it may be shown: its scheme and a hash of the rest."""
    scheme = url.partition(":")[0]
    if scheme.isalnum() and scheme.isascii() and len(scheme) <= 20 and "://" in url:
        known = scheme
    else:
        known = "url"
    return f"{known}-{hashlib.sha256(url.encode('utf-8')).hexdigest()[:8]}"


TIMEOUT_SECONDS = 10.0
DEADLINE_SECONDS = 30.0


class UrlRoute(Record):
    """Every URL of a file that its owner alone can read. Which of them have a message is kept by
    their hashes. Without a file, where the card names no URLs any more, messages for them are given
    up.
    """

    path: Path | None
    timeout: float = TIMEOUT_SECONDS
    deadline: float = DEADLINE_SECONDS
    name: str = "urls"

    def send(self, entry: OutboxEntry) -> DeliveryReport:
        """Send to each URL that does not have it yet. Never raises for what a file, URL or server
        does.
        """
        results = self.send_each(entry.message, frozenset(entry.done))
        done = tuple(name for name, trouble in results if not trouble)
        troubles = [f"{name}: {trouble}" for name, trouble in results if trouble]
        return DeliveryReport(
            done=done, trouble=shortened("; ".join(troubles), 400), is_over=not troubles
        )

    def send_each(
        self, message: Message, done: frozenset[str] = frozenset()
    ) -> tuple[tuple[str, str], ...]:
        """(URL as it may be shown, trouble or "") of every URL that is not in `done`."""
        if self.path is None:
            return ()
        try:
            urls = secret_lines(self.path)
        except PrivateFileError as error:
            return (("alerts.urls_file", str(error)),)
        left = [(shown(url), url) for url in dict.fromkeys(urls) if shown(url) not in done]
        return tuple((name, self._in_time(url, message)) for name, url in left)

    def _in_time(self, url: str, message: Message) -> str:
        try:
            return within(self.deadline, lambda: self._send(url, message))
        except Late as error:
            return str(error)

    def _send(self, url: str, message: Message) -> str:
        """What went wrong, in words that give nothing of the URL away."""
        import apprise

        with _silence():
            try:
                target = apprise.Apprise.instantiate(url, asset=apprise.AppriseAsset(app_id="tr11"))
                if target is None:
                    return "is not a delivery URL that apprise knows"
                target.socket_connect_timeout = self.timeout
                target.socket_read_timeout = self.timeout
                apprise_client = apprise.Apprise(asset=target.asset)
                apprise_client.add(target)
                taken = apprise_client.notify(
                    title=message.subject,
                    body=message.body,
                    notify_type=_type(apprise, message),
                    body_format=apprise.NotifyFormat.TEXT,
                )
            except Exception as error:  # of any of a hundred services; its text may hold the URL
                return f"failed ({type(error).__name__})"
        if taken:
            return ""
        return "the service did not take it"


def _type(library: Any, message: Message) -> apprise.NotifyType:
    if message.kind in {"cleared", "finished", "test"}:
        return library.NotifyType.SUCCESS
    kinds = {
        Severity.CRITICAL: library.NotifyType.FAILURE,
        Severity.WARNING: library.NotifyType.WARNING,
    }
    return kinds.get(message.severity, library.NotifyType.INFO)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what the library logs away from everyone: it may name hosts and tokens."""
    logger = logging.getLogger("apprise")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


# ----------------------------------------------------------------------------- the dead-man call

PING_SECONDS = 5.0


def ping(path: Path, timeout: float = PING_SECONDS) -> str:
    """Fetch the URL in `path`; "" when the service took it, else what went wrong, without the URL."""
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
