"""From `metrics.jsonl` to an open tracker, as far as the cursor says: one round of it.

Only files are read, and only those of the tracker and the cursor are written: the training never waits
for any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from tr11ops.trackers.cursor import Cursor
from tr11ops.trackers.destination import Again, Destination
from tr11ops.trackers.points import Course, Point, course_from

BATCH = 500  # points between two writings of the cursor


def send_new(
    path: Path,
    destination: Destination,
    again: Again,
    cursor: Cursor,
    save: Callable[[Cursor], None],
    now: Callable[[], float],
) -> Cursor:
    """Send what is new since the cursor, and save the cursor after each batch; returns the last one.

    Raises OSError, and what the tracker's library does.
    """
    course = course_from(path, cursor.offset)
    if not course.iterations:
        if course.end != cursor.offset:
            cursor = _saved(replace(cursor, offset=course.end, time=now()), save)
        return cursor
    if again == "replaced" and course.lowest is not None and course.lowest <= cursor.iteration:
        destination.rewind(course.lowest)
        cursor = replace(cursor, iteration=course.lowest - 1)
    points = _unsent(course, cursor.iteration)
    while batch := list(islice(points, BATCH)):
        destination.send(batch)
        newest = max(cursor.iteration, batch[-1].iteration)
        sent = cursor.points + len(batch)
        cursor = _saved(replace(cursor, iteration=newest, points=sent, time=now()), save)
    return _saved(replace(cursor, offset=course.end, time=now()), save)


def agreed(cursor: Cursor, destination: Destination, again: Again) -> Cursor:
    """The cursor as a session begins, put right by what the tracker itself says that it has.

    A store that has less than was sent (it was killed, or removed) is told from the beginning. What
    a killed session sent beyond the cursor is taken back, where the tracker does that.
    """
    if again == "replaced":
        destination.rewind(cursor.iteration + 1)
        return cursor
    last = destination.last()
    if last is None or last == cursor.iteration:
        return cursor
    if last < cursor.iteration:
        return replace(cursor, iteration=last, offset=0)
    return replace(cursor, iteration=last)


def _unsent(course: Course, newest: int) -> Iterator[Point]:
    """Points behind the newest that was sent; and what an evaluation said of that one since."""
    for point in course.points():
        if point.iteration > newest or (point.iteration == newest and not point.has_step):
            yield point


def _saved(cursor: Cursor, save: Callable[[Cursor], None]) -> Cursor:
    save(cursor)
    return cursor
