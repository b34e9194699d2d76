"""The end of an attempt whose agent never began: whose fault that is, on record, and what follows
for the queued jobs.

The batch script runs this in its own environment, which the card's set-up has not touched; and
where that does not work, on another node of the job. So that this runs, and where, is evidence: see
`judge`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from tr11ops.agent.allocation import read_allocation
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.batch import attempt_record, exit_status, read_resolved, with_scheduler
from tr11ops.agent.controller import Controller
from tr11ops.agent.step import LineTee, StopFlag
from tr11ops.base.observed import known, observed
from tr11ops.base.processes import leave
from tr11ops.base.redact import one_line, signature
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.launch.environment import SetupPlace, decisive_line, exit_words, setup_entry
from tr11ops.launch.software import software_of
from trainer.contract.files import write_json
from trainer.contract.record import Record
from trainer.contract.state_file import tail_lines

What = Literal["setup", "late", "agent", "node", "unmounted"]
LINES_KEPT = 10
MOST_BYTES = 64 << 10
# the script's lines, and its shell's
_OWN = re.compile(r"^(tr11: |START TIME: )|: line \d+: +\d+ .*start_agent")


class EarlyEnd(Record):
    """How far an attempt came.

    `what`: its set-up failed (`setup`), had not ended in time (`late`); it had ended and the agent
    did not begin (`agent`); or what failed on `host` works on another node (`node`), which sees the
    run directory, as `host` does not (`unmounted`). `line`: of the set-up's text, from 1, None
    where it is not known. `said`: the last lines that the job printed.
    """

    what: What
    host: str
    status: int
    line: int | None = None
    said: tuple[str, ...] = ()


def judge(end: EarlyEnd, setup: Sequence[str], setup_minutes: float) -> Attribution:
    """Whose fault an early end is. A set-up is the card's; what works on another node, the node's;
    else unknown.
    """
    last = ""
    if end.said:
        last = f": {decisive_line(end.said)}"
    how = f"ended with {exit_words(end.status)} on {end.host}{last}"
    named = f"slurm.setup{_named(setup, end.line)}"
    if end.what == "node":
        why = f"{end.host}: the agent cannot start there, and can on another node of the job{last}"
        return Attribution(
            Kind.NODE, why, 0.95, (end.host,), evidence=end.said, fault=f"node {end.host}"
        )
    if end.what == "unmounted":
        why = (
            f"{end.host}: the run directory is not mounted there, and is on another node of the job"
        )
        return Attribution(Kind.NODE, why, 0.95, (end.host,), fault=f"node {end.host}")
    if end.what == "setup":
        return _of_card(f"{named} {how}", f"setup: {named}", end)
    if end.what == "late":
        return _of_card(
            f"{named} did not end within {setup_minutes:g} min on {end.host}{last}",
            f"late: {named}",
            end,
        )
    if setup:  # without it, here and now, the same Python finds all that the agent needs
        return _of_card(
            f"slurm.setup is broken: after it the agent {how}", "agent after the set-up", end
        )
    summary = f"the agent did not begin: it {how}"
    return Attribution(
        Kind.UNKNOWN, summary, 0.6, evidence=end.said, fault=f"agent: {signature(last)}"
    )


def _of_card(summary: str, fault: str, end: EarlyEnd) -> Attribution:
    return Attribution(Kind.CONFIGURATION, summary, 0.95, evidence=end.said, fault=signature(fault))


def _named(setup: Sequence[str], line: int | None) -> str:
    """Which entry of the set-up holds this line of its text: ` 2 (module load x)`; "" where it is
    not known.
    """
    number = setup_entry(setup, line)
    if number is None:
        return ""
    return str(SetupPlace(number, setup[number - 1]))


def last_lines(output: str, printed: int) -> tuple[str, ...]:
    """The last lines of the job's output since its start, without secrets; empty where it is no
    file to be read.
    """
    path = Path(output)
    if not output or not path.is_file():
        return ()
    # with the end of the line before
    size = known(observed(lambda: path.stat().st_size - printed), 0) + 1
    lines, _ = known(observed(tail_lines, path, min(max(size, 0), MOST_BYTES)), ([], True))
    return tuple(one_line(line) for line in lines if line.strip() and not _OWN.search(line))[
        -LINES_KEPT:
    ]


def record(end: EarlyEnd, card: Path, submission: str, environment: Mapping[str, str]) -> int:
    """Put the end on record and see to the queued jobs; returns the script's exit status. Raises
    CardError, OSError.
    """
    value, config = read_resolved(card)
    allocation = read_allocation(environment, None)
    attempt_context = with_scheduler(AttemptContext(config, allocation, environment, submission))
    folder = config.paths.attempt(allocation.job_id)
    tee = LineTee(config.paths.main_log)
    try:
        write_json(
            folder / "attempt.json",
            attempt_record(allocation, card, submission, software_of(config, folder)),
        )
        write_json(folder / "card.json", value)
    except OSError as error:  # the queued jobs matter more
        tee.say(f"the attempt cannot be recorded: {error}")
    found = judge(end, config.slurm.setup, config.slurm.setup_minutes)
    return Controller(attempt_context, StopFlag(), tee).end_without_launch(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tr11ops.agent.early", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--submission", required=True)
    parser.add_argument("--what", choices=get_args(What), required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--line", default="")
    parser.add_argument("--output", default="")
    parser.add_argument("--printed", type=int, default=0)
    options = parser.parse_args(arguments)
    line = None
    if options.line.isdecimal():
        line = int(options.line)
    end = EarlyEnd(
        options.what,
        options.host,
        status=options.status,
        line=line,
        said=last_lines(options.output, options.printed),
    )
    act = partial(record, end, options.card, options.submission, os.environ)
    return exit_status(act, "the end of the attempt could not be recorded")


if __name__ == "__main__":
    leave(main())
