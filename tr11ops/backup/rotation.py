"""Which files of the archives are read again in this round, so that rot is found while another copy
still exists.

Every byte is read again within `days`, as long as no two rounds lie more than two intervals apart
(one may be missed). Each round takes a share by bytes, oldest first, so that no round has all the
work; what would be too old before the next one is taken whatever the share. Pure: moments are
arguments, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.record import Record

DAY_SECONDS = 86_400.0
# of the time within which all is read by shares alone; the rest is slack for a growing archive
PACE = 0.7
CLOCK_SECONDS = 600.0  # two machines' clocks may differ by so much


class StoredFile(Record):
    """One file of a copy. `read`: when it was last read back whole and found right; None: not
    known.
    """

    location: str
    path: str
    bytes: int
    read: float | None


def choose(
    files: Iterable[StoredFile],
    now: float,
    last_round: float | None,
    days: float,
    interval_seconds: float,
) -> tuple[StoredFile, ...]:
    """The files to read now, the most urgent first: those never read, then the oldest.

    `last_round` is when files were last read in turn (None: never), `interval_seconds` what lies
    between two rounds. A time in the future comes of a clock that was set back: nothing is
    concluded from it but that it is not known.
    """
    known = [_believed(file, now) for file in files]
    horizon, gap = days * DAY_SECONDS, interval_seconds
    if last_round is not None and 0 <= now - last_round < horizon:
        gap = now - last_round
    ahead = 2 * max(interval_seconds, min(gap, horizon / 4))
    # two rounds by hand in one hour do not read the same again
    spared = min(interval_seconds, horizon) / 2
    share = sum(file.bytes for file in known) * min(1.0, gap / (PACE * horizon))
    chosen = []
    for file in sorted(
        known, key=lambda file: (file.read is not None, file.read or 0.0, file.location, file.path)
    ):
        if file.read is None:
            age = None
        else:
            age = now - file.read
        if age is not None and age < spared:
            break
        if share <= 0 and (age is None or age + ahead < horizon):
            if age is None:
                continue  # those of which a time is known may be due for all that
            break
        chosen.append(file)
        share -= max(1, file.bytes)
    return tuple(chosen)


def oldest(files: Iterable[StoredFile], now: float) -> float | None:
    """How long ago the byte that waits longest was read, in seconds; 0.0 for an archive of nothing,
    None: not known.
    """
    ages = [
        None if file.read is None else now - file.read
        for file in (_believed(file, now) for file in files)
    ]
    if any(age is None for age in ages):
        return None
    return max((age for age in ages if age is not None), default=0.0)


def _believed(file: StoredFile, now: float) -> StoredFile:
    if file.read is None or file.read <= now + CLOCK_SECONDS:
        return file
    return StoredFile(file.location, file.path, file.bytes, None)
