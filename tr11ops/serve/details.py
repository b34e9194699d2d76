"""The longer parts of a run's page, made when someone reads it: the sections of the report, and the
end of the log.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tr11ops.base import deadline
from tr11ops.base.errors import Late
from tr11ops.base.observed import Observed, Unknown, observed
from tr11ops.base.redact import redact
from tr11ops.logs.lines import as_typed
from tr11ops.serve.poller import News
from trainer.contract.state_file import open_for_reading
from trainer.contract.units import printable

if TYPE_CHECKING:
    from tr11ops.report.page import ReportSection

FRESH_SECONDS = 60.0
READ_SECONDS = 60.0
LOG_BYTES = 512 << 10
SEARCHED_BYTES = 8 << 20
MOST_LINES = 300
LONGEST_LINE = 2000
# the page shows these itself, from the last look
_SHOWN_ABOVE = frozenset({"findings", "incidents", "unknown"})


Details: TypeAlias = "Observed[tuple[ReportSection, ...]]"


class DetailsReader:
    """Reads a run's past at most once a minute, whoever asks, one run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, Details]] = {}

    def details(self, news: News) -> Details:
        """Of a run; within READ_SECONDS, or why not."""
        made, kept = self._kept.get(news.key, (0.0, ()))
        if made and time.monotonic() - made < FRESH_SECONDS:
            return kept
        if not self._lock.acquire(timeout=READ_SECONDS):
            return Unknown("other runs are being read; it comes in a minute")
        try:
            found = deadline.within(READ_SECONDS, partial(observed, _read, news))
        except Late:
            found = Unknown(deadline.late_words(news.folder, READ_SECONDS))
        finally:
            self._lock.release()
        self._kept[news.key] = (time.monotonic(), found)
        return found


def _read(news: News) -> tuple[ReportSection, ...]:
    from tr11ops.report.build import page_of
    from tr11ops.report.material import gather

    run = news.run
    if run is None:
        raise ValueError("a mirrored copy has no past of attempts and nodes; its numbers are above")
    material = gather(run.directory, run.facts, run.reader, time.time())  # type: ignore[arg-type]
    page = page_of(material, UTC, with_charts=True)
    return tuple(one for one in page.sections if one.key not in _SHOWN_ABOVE)


# ----------------------------------------------------------------------------- the log
def read_log(news: News, wanted: str) -> Observed[tuple[str, ...]]:
    """The last lines of a run's main log that hold a text, or all; without secrets."""
    place = _log_of(news)
    if place is None:
        return Unknown("no log was found")
    try:
        return deadline.within(deadline.PROBE_SECONDS, partial(_lines, place, wanted))
    except Late:
        return Unknown(f"the file system of {place.parent} does not answer")
    except OSError as error:
        return Unknown(f"{place.name}: {error.strerror or error}")


def _log_of(news: News) -> Path | None:
    if news.run is not None:
        return news.run.directory.paths.main_log
    logs = sorted(news.folder.glob("logs/*/main_log.txt")) + sorted(
        news.folder.glob("*/main_log.txt")
    )
    return next(iter(logs), None)


def _lines(place: Path, wanted: str) -> Observed[tuple[str, ...]]:
    size = SEARCHED_BYTES if wanted else LOG_BYTES
    with open_for_reading(place) as stream:
        if not os.path.samestat(os.fstat(stream.fileno()), place.lstat()):
            raise OSError(errno.ELOOP, "is a link, which is not followed: it may lead anywhere")
        end = stream.seek(0, 2)
        stream.seek(max(0, end - size))
        data = stream.read(size)
    found = data.decode("utf-8", "replace").splitlines()[1 if end > size else 0 :]
    if wanted:
        found = [line for line in found if wanted.lower() in line.lower()]
    shown = (redact(printable(as_typed(line)[:LONGEST_LINE], " ")) for line in found[-MOST_LINES:])
    return tuple(shown) or Unknown("nothing there")
