"""What is concluded of an attempt's launch: the agent's own conclusion, else the same attributors'
on what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tr11ops.diagnose.answers import RestartAnswer
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import (
    AgentsWord,
    Attribution,
    Conclusion,
    Evidence,
    Kind,
)
from tr11ops.diagnose.attribution.records import (
    all_failures,
    read_failures,
    read_fixed_port,
    read_objects,
    read_ranks,
    read_reports,
)
from tr11ops.diagnose.signature import Restart
from tr11ops.rundir.attempts import VERDICT_FILE, AttemptVerdict, LaunchRecord
from trainer.contract.attempt import BAD_REASONS, EndMarker
from trainer.contract.paths import END_MARKER_FILE
from trainer.contract.record import Record


def has_clean_end(attempt: Path) -> bool:
    """Whether an end marker of the attempt says that it ended as it should. Unknown is no."""
    try:
        marker = EndMarker.read(attempt / END_MARKER_FILE)
    except (OSError, ValueError):
        return False
    return marker is not None and marker.reason not in BAD_REASONS


def read_launch(attempt: Path, number: int | None) -> LaunchRecord | None:
    """The record of a launch, of the last one to start where `number` is None; None where none can
    be read.

    A job that was put back into the queue counts its launches anew: those of before may have higher
    numbers.
    """
    found = []
    for value in read_objects(attempt / "launches"):
        try:
            found.append(LaunchRecord.of({**value, "launch": int(value["launch"])}))
        except (KeyError, TypeError, ValueError):
            continue
    wanted = [record for record in found if number is None or record.launch == number]
    return max(wanted, key=lambda record: (record.start, record.launch), default=None)


def _no_code() -> int | None:
    """No scheduler is asked."""
    return None


PRINTED = 0.8  # of a conclusion that only the log has: it does not say how sure it is


class JobWord(Record):
    """What others than the attempt say of its job. `lost_host`: how it is known that the node of
    its batch script was lost; "" where it is not.
    """

    is_over: bool = False
    lost_host: str = ""


def _no_word() -> JobWord:
    """No scheduler is asked."""
    return JobWord()


def _over() -> JobWord:
    return JobWord(is_over=True)


def conclude(
    attempt: Path,
    number: int | None,
    log_evidence: Evidence | None,
    step_code: Callable[[], int | None] = _no_code,
    job_word: Callable[[], JobWord] = _no_word,
) -> Conclusion | None:
    """Who is to blame for the end of a launch (of the last one where `number` is None).

    The agent's conclusion stands. Where the agent left none, the attributors are asked about the
    records in the attempt's folder and what a log told beside them; None where neither tells of an
    end. `step_code` gives the derived exit code of the job, `job_word` what else is known of it;
    they are asked only where they count.
    """
    record = read_launch(attempt, number)
    if record is None:
        if number is None:
            return _of_attempt(attempt)
        return None
    agents = of_record(record)
    if agents is not None:
        return _by_agent(agents, LaunchRecord.path(attempt, record.launch))
    if log_evidence is not None and log_evidence.agents_word is not None:
        return _of_word(log_evidence.agents_word)
    left = evidence_left(attempt, record, log_evidence)
    if record.end is None and left.marker is None and not left.lost_host:
        word = job_word()
        silent = ""
        if word.is_over:
            silent = _silent_host(record, left)
        left = replace(left, lost_host=word.lost_host or silent)
    if left.needs_step_code:
        left = replace(left, derived_exit_code=step_code())
        if left.derived_exit_code is None:
            return None
    return Conclusion(attribute(left), by_agent=False)


def _by_agent(found: Attribution, record: Path) -> Conclusion:
    """The agent's conclusion, with the lines of its record."""
    try:
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return Conclusion(found, by_agent=True, file=str(record), lines=tuple(lines))


def _of_word(word: AgentsWord) -> Conclusion:
    """What the agent printed, where it could not write its record."""
    said = Attribution(word.kind, word.summary, PRINTED, evidence=(word.summary,))
    return Conclusion(said, by_agent=True, file=word.file, line=word.line)


def _of_attempt(attempt: Path) -> Conclusion | None:
    """What the agent said of an attempt that came to no launch."""
    try:
        verdict = AttemptVerdict.read(attempt)
    except (OSError, ValueError):
        return None
    if verdict is None or not verdict.message:
        return None
    if verdict.cause in set(Kind):
        kind = Kind(verdict.cause)
    else:
        kind = Kind.UNKNOWN
    said = Attribution(
        kind, verdict.message, 0.5, verdict.blamed, evidence=(verdict.message,), fault=verdict.fault
    )
    return _by_agent(said, attempt / VERDICT_FILE)


def why_it_ended(attempt: Path) -> str:
    """In one line, why the last launch of an attempt whose agent left no verdict ended; "" where no
    record tells.

    Where the agent came to no conclusion either, it is asked for only if a worker recorded its
    failure.
    """
    record = read_launch(attempt, None)
    if record is None or (of_record(record) is None and not read_failures(attempt, record.launch)):
        return ""
    found = conclude(attempt, record.launch, None, job_word=_over)
    if found is None:
        return ""
    return found.found.summary


def of_record(record: LaunchRecord) -> Attribution | None:
    """What the agent concluded of a launch; None where it came to nothing."""
    if not record.summary or record.cause not in set(Kind):
        return None
    return Attribution(
        Kind(record.cause),
        record.summary,
        confidence=record.confidence if record.confidence is not None else 0.5,
        blamed=record.blamed,
        suspects=record.suspects,
        evidence=record.evidence,
        fault=record.fault,
        restart=_restart_of(record),
        avoided=record.avoided,
    )


def _restart_of(record: LaunchRecord) -> RestartAnswer | None:
    """Whether a plain restart helps, as the agent said; None where it did not."""
    if record.restart not in set(Restart):
        return None
    return RestartAnswer(
        Restart(record.restart), record.restart_confidence or 0.5, record.restart_why, "agent"
    )


def evidence_left(attempt: Path, record: LaunchRecord, log_evidence: Evidence | None) -> Evidence:
    """What is left of a launch whose agent said nothing; a log speaks for the nodes that left no
    record.
    """
    failures = all_failures(attempt, record)
    heard = {one.host for one in failures}
    reports = read_reports(attempt, record.launch)
    # one clock for all times: a log's are of the same hours, or no times at all, so they come after
    # the records'
    last = failures[-1].time if failures else 0.0
    more = (
        ()
        if log_evidence is None
        else tuple(one for one in log_evidence.failures if one.host not in heard)
    )
    reached = record.reached
    if reached is None and log_evidence is not None:
        reached = log_evidence.reached
    return Evidence(
        record.nodes,
        record.exit_status if record.exit_status is not None else 1,
        marker=_marker(attempt, record.launch),
        srun=() if log_evidence is None else log_evidence.srun,
        failures=(
            *failures,
            *(replace(one, time=last + 1.0 + place) for place, one in enumerate(more)),
        ),
        reports=reports,
        ranks=read_ranks(attempt),
        fixed_port=read_fixed_port(attempt),
        reached=reached,
        lost_host="" if log_evidence is None else log_evidence.lost_host,
        unwritable="" if log_evidence is None else log_evidence.unwritable,
    )


def _silent_host(record: LaunchRecord, left: Evidence) -> str:
    """How the records of a launch that is over show that its batch script's node was lost; "" where
    they do not.

    The agents of all the other nodes have told of their end, that of the first has not, nor has the
    batch script.
    """
    host = ""
    if record.nodes:
        host = record.nodes[0]
    ended = {one.node for one in left.reports if one.exit_status is not None}
    if (
        len(record.nodes) < 2
        or host in {one.host for one in left.failures}
        or ended != set(record.nodes[1:])
    ):
        return ""
    return f"neither the agent of {host} nor the batch script there left a word, and those of all other nodes did"


def _marker(attempt: Path, launch: int) -> EndMarker | None:
    try:
        return EndMarker.of_launch(attempt, launch)
    except (OSError, ValueError):
        return None
