"""When a watched file system is full, or will be: one wording for the watchdog, its mails and the
detectors. Pure.
"""

from __future__ import annotations

from datetime import UTC

from msgspec.structs import replace

from tr11ops.base.units import DAY, timestamp
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import DAY_SECONDS, Forecast, Usage

GIGA, TERA, KILO = 2**30, 2**40, 2**10


def with_limits(usage: Usage, rule: FilesystemSection) -> Usage:
    """The sample with the card's limits where it has some: they hold instead of what the source
    says.
    """
    return replace(
        usage,
        bytes_limit=rule.most_bytes or usage.bytes_limit,
        inodes_limit=rule.inodes_limit or usage.inodes_limit,
    )


def full(usage: Usage, rule: FilesystemSection) -> tuple[str, ...]:
    """One line for each limit that is passed, empty when all is well. A limit that is just reached
    is not passed.
    """
    lines = []
    of_bytes, of_inodes = usage.percent("bytes"), usage.percent("inodes")
    if of_bytes is not None and of_bytes > rule.bytes_percent:
        amounts = _amounts(usage.bytes_used, usage.bytes_limit, GIGA, "GB")
        lines.append(
            f"{rule.name} is at {_percent(of_bytes, rule.bytes_percent)}% bytes usage{amounts}"
        )
    if of_inodes is not None and of_inodes > rule.inodes_percent:
        amounts = _amounts(usage.inodes_used, usage.inodes_limit, KILO, "K")
        lines.append(
            f"{rule.name} is at {_percent(of_inodes, rule.inodes_percent)}% inodes usage{amounts}"
        )
    least = rule.least_free_bytes
    if least is not None and usage.bytes_free is not None and usage.bytes_free < least:
        lines.append(f"Shared {rule.name} has {_number(usage.bytes_free / TERA)}TB left")
    return tuple(lines)


def filling(found: Forecast, rule: FilesystemSection, now: float) -> str:
    """One line when it will be full within the card's days at the trend of the last ones; else
    empty.
    """
    if found.full_at is None or found.full_at - now >= rule.forecast_days * DAY_SECONDS:
        return ""
    return f"{rule.name} will be full ({found.kind}) {when(found, now)}"


def when(found: Forecast, now: float) -> str:
    """The forecast in words: the day it fills, before which day it cannot, or why there is none."""
    if found.not_before is None:
        earliest = ""
    else:
        earliest = f"not before {timestamp(found.not_before, UTC, DAY)}"
    if found.full_at is None:
        return f"{found.why or 'no day in sight'}{f' ({earliest})' if earliest else ''}"
    days = (found.full_at - now) / DAY_SECONDS
    if days <= 0:
        text = "now"
    else:
        text = f"in about {_number(days)} days ({timestamp(found.full_at, UTC, DAY)})"
    if earliest and found.not_before != found.full_at:
        return f"{text}, {earliest}"
    return text


def _percent(value: float, limit: float) -> str:
    """Two digits behind the point, more where the limit would seem not to be passed."""
    return next(
        (text for digits in range(2, 10) if float(text := f"{value:.{digits}f}") > limit),
        repr(value),
    )


def _amounts(used: float | None, limit: float | None, unit: int, name: str) -> str:
    if used is not None and limit:
        return f" ({_number(used / unit)}{name}/{_number(limit / unit)}{name})"
    return ""


def _number(value: float) -> str:
    """Whole from ten on, below that with one digit behind the point."""
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}"
