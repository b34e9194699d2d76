"""Lines that are no cause, as launches printed them that trained on. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.base.redact import signature
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import NodeBlame


def without_habits(launches: Sequence[LogLaunch], earlier: Sequence[LogLaunch]) -> list[LogLaunch]:
    """What files say of the newest launch, in the light of earlier ones of the same run.

    What an earlier launch printed and trained on after, is a mere warning. So is no exception that
    ended a program, and no broken hardware: a GPU that works again after an error may still be
    broken. What is only odd where something had been trained before is left out where nothing had.
    """
    has_trained = any(launch.progress is not None for launch in earlier)
    habits = _habits(earlier)
    found = []
    for launch in launches:
        left = [one for one in launch.sightings if has_trained or not one.signature.restart]
        if habits:
            left = [replace(one, is_mild=True) if _words(one) in habits else one for one in left]
        found.append(dataclasses.replace(launch, sightings=left))  # noqa: TID251 (a dataclass)
    return found


def _habits(earlier: Sequence[LogLaunch]) -> frozenset[str]:
    """What launches printed that trained on after it, without numbers, paths and who it was."""
    printed = [one for launch in earlier for one in launch.sightings if launch.has_overcome(one)]
    return frozenset(words for one in printed if (words := _words(one)) is not None)


def _words(one: Sighting) -> str | None:
    """The words of a line that may be a habit; None where it cannot be one."""
    if one.raised is not None or one.signature.blame is NodeBlame.NODE:
        return None
    return signature(split_prefixes(one.text)[1])
