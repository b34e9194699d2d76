"""What a log tells of a launch, as evidence about its nodes. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

from tr11ops.diagnose.attribution.evidence import AgentsWord, Evidence, Failure, Kind
from tr11ops.diagnose.attribution.srun import parse_lines
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import Role
from tr11ops.diagnose.topics import FAMILY as TOPICS

_SAYS_WHY = frozenset({Role.CAUSE, Role.DEATH, Role.SYMPTOM})
_LOST_HOST = "ours-lost-host"
_UNWRITABLE = ("ours-run-directory-gone", "ours-unwritable")
_FAILED = re.compile(r"^tr11: launch \d+ failed \((?P<kind>[\w-]+)\): (?P<summary>.+)")
_NOT_A_WORKERS = re.compile(
    r"^(?:srun|slurmstepd|slurmctld|slurmd)\b|^torch\.distributed\.elastic|^tr11: "
    r"|^.{0,80}\boom-kill:constraint="  # whose next line says whom it killed
)


def evidence_of(launch: LogLaunch, places: LaunchPlaces) -> Evidence:
    """The evidence in a log: srun's lines, the workers' own words with the nodes they are of,
    torchrun's reports.

    Times are those of the lines where all have one, else their order counts: seconds or lines, only
    to be compared.
    """
    left = [one for one in launch.sightings if not launch.has_overcome(one)]
    srun = parse_lines(
        body for one in left if (body := _body(one)).startswith(("srun: ", "slurmstepd: "))
    )
    reports = [one for one in launch.reports if one.exit_code not in {None, -15}]
    words, unplaced = _words(left, places)
    times = (*(one.origin.time for one, _ in words), *(report.time for report in reports))
    has_times = all(_seconds(time) is not None for time in times)

    def moment(time: str | None, line: int) -> float:
        seconds = None
        if has_times:
            seconds = _seconds(time)
        if seconds is None:
            return float(line)
        return seconds

    failures = [
        Failure(place.node, place.rank, moment(one.origin.time, one.line_number), _body(one))
        for one, place in words
    ]
    spoke = {(one.host, one.rank) for one in failures}
    for report in reports:
        host = places.host_of(report)
        number = None
        if report.exit_code is not None and report.exit_code < 0:
            number = -report.exit_code
        is_mute = (host, report.rank) not in spoke and not unplaced
        if host is not None and (number is not None or is_mute):
            failures.append(
                Failure(
                    host,
                    report.rank,
                    time=moment(report.time, report.line_number),
                    error=report.said or report.end_words,
                    signal=number,
                )
            )
    nodes = launch.nodes or tuple(
        dict.fromkeys([one.host for one in failures] + [n for s in srun for n in s.nodes])
    )
    reached = None if launch.progress is None else launch.progress.iteration
    own_words = {one.signature.id: _body(one) for one in reversed(left)}
    return Evidence(
        nodes,
        1,
        srun=srun,
        failures=tuple(sorted(failures, key=lambda one: one.time)),
        reached=reached,
        lost_host=own_words.get(_LOST_HOST, ""),
        unwritable=next((own_words[one] for one in _UNWRITABLE if one in own_words), ""),
        agents_word=_agents_word(left),
    )


def _agents_word(sightings: list[Sighting]) -> AgentsWord | None:
    """What the agent printed of the launch's end."""
    for one in sightings:
        match = _FAILED.match(one.text)
        if match is not None and match["kind"] in set(Kind):
            return AgentsWord(
                Kind(match["kind"]), match["summary"].strip(), one.file, one.line_number
            )
    return None


class _Speaker(NamedTuple):
    node: str
    rank: int | None


def _words(
    sightings: list[Sighting], places: LaunchPlaces
) -> tuple[list[tuple[Sighting, _Speaker]], bool]:
    """Workers' own words, each with its node; and whether there are others, of no one in
    particular.

    The words of a single writer that does not say where it is are those of the first worker to
    fail.
    """
    found, unplaced = [], []
    for one in sightings:
        if one.is_mild or (one.signature.family == TOPICS and one.raised is None):
            continue
        is_workers = not one.signature.family.startswith("slurm") and not _NOT_A_WORKERS.match(
            _body(one)
        )
        if one.signature.role not in _SAYS_WHY or not is_workers:
            continue
        quoted = places.quoted(one)
        if quoted.node is not None:
            found.append((one, _Speaker(quoted.node, quoted.rank)))
        elif one.signature.role is Role.CAUSE:
            unplaced.append(one)
    if len(unplaced) == 1:
        quoted = places.quoted(unplaced[0], is_root=True)
        if quoted.node is not None:
            return [*found, (unplaced[0], _Speaker(quoted.node, quoted.rank))], False
    return found, bool(unplaced)


def _body(one: Sighting) -> str:
    return split_prefixes(one.text)[1].strip()


def _seconds(time: str | None) -> float | None:
    """`MM-DD HH:MM:SS[.f]` as seconds within a year that has all days."""
    if time is None:
        return None
    try:
        form = "%Y-%m-%d %H:%M:%S.%f" if "." in time else "%Y-%m-%d %H:%M:%S"
        moment = datetime.strptime(f"2020-{time[:21]}", form)
    except ValueError:
        return None
    return (moment - datetime(2020, 1, 1)).total_seconds()
