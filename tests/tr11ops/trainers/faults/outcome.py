"""What came of a fault: judged by the files that the run left behind, by what its checkpoints were, and by
`tr11 status`.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.trainers.faults.given import Fault, Given, said_of, unmount
from tests.tr11ops.trainers.faults.run import FaultRun, TooLate
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.metrics_record import MetricsRecord
from trainer.contract.record import Record


class Restart(Record):
    """A start that followed another one. `reached`: the last step before. `whole`: the newest whole
    checkpoint's step when it began, 0 for none. `first`: the first step that it trained.
    """

    reached: int
    whole: int
    first: int

    @property
    def lost(self) -> int:
        """Steps of a whole checkpoint that were trained again."""
        return max(0, self.whole - (self.first - 1))

    @property
    def again(self) -> int:
        return max(0, self.reached - (self.first - 1))


_LAUNCH = re.compile(r"\S+ launch \d+: ")


class Outcome(Record):
    """One cell of the table. `code`: the commit that was tried, with a "+" where the tree had changes; of the
    first cells the commit that brought them. `wrong`: what is not as it has to be, empty where all is.
    """

    scheduler: str
    trainer: str
    fault: str
    verdict: str = ""
    said: str = ""
    during: str = ""
    person: str = ""
    acts: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()
    reached: int = 0
    saved: int = 0
    excluded: tuple[str, ...] = ()
    innocent: tuple[str, ...] = ()
    end: str = ""
    seconds: float = 0.0
    wrong: tuple[str, ...] = ()
    code: str = ""

    @property
    def starts(self) -> int:
        """How often its workers were started, by the record of each launch."""
        return sum(_LAUNCH.match(act) is not None for act in self.acts)

    @property
    def lost(self) -> int:
        """Steps beyond the last complete checkpoint's that were lost, of all starts."""
        return sum(one.lost for one in self.restarts)

    @property
    def again(self) -> int:
        """Steps that were trained twice."""
        return sum(one.again for one in self.restarts)


def play(run: FaultRun, fault: Fault) -> Outcome:
    """Give one fault to one trainer, and judge what came of it. Raises nothing that the fault may bring."""
    began = time.monotonic()
    wrong: tuple[str, ...] = ()
    given = Given()
    try:
        try:
            given = fault.give(run)
        except TooLate as error:
            wrong = (str(error),)
        return judged(run, fault, given, wrong, time.monotonic() - began)
    finally:
        run.close()
        unmount(run.root)


def judged(
    run: FaultRun, fault: Fault, given: Given, wrong: tuple[str, ...], seconds: float
) -> Outcome:
    """What is there now. Raises OSError."""
    run.look()
    said = run.status()
    directory = RunDirectory(run.paths, kill_switch=run.root / "kill-switch")
    excluded = tuple(one.node for one in read_version(directory.exclusions).exclusions)
    ends = run.ends()
    newest = run.newest()
    seen = run.records()
    outcome = Outcome(
        scheduler=run.site.name,
        trainer=run.trainer.name,
        fault=fault.name,
        verdict=(said.split() or [""])[0],
        said=said_of(said),
        during=given.during,
        person=given.person,
        acts=tuple(_acts(run)),
        restarts=_restarts(run, seen),
        reached=seen[-1].iteration or 0 if seen else 0,
        saved=0 if newest is None else newest.step,
        excluded=excluded,
        innocent=tuple(node for node in excluded if node != given.node),
        end=_end_of(run, fault) if ends else "",
        seconds=round(seconds, 1),
        code=_code(),
    )
    return _with(outcome, (*wrong, *_wrongs(outcome, fault, run.trainer.steps)))


def _with(outcome: Outcome, wrong: tuple[str, ...]) -> Outcome:
    return replace(outcome, wrong=wrong)


def _code() -> str:
    """The commit of the tree that this file is in, "" where it is in none."""
    words = ("git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+")
    done = subprocess.run(
        words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _end_of(run: FaultRun, fault: Fault) -> str:
    """The reason of the last end; where later tasks of the array found it done, the one that was right."""
    reasons = [end.reason for end in run.ends()]
    if fault.ends in reasons:
        return fault.ends
    return reasons[-1]


def _wrongs(outcome: Outcome, fault: Fault, steps: int) -> list[str]:
    found = []
    if outcome.lost:
        found.append(f"{outcome.lost} steps lost that were in a whole checkpoint")
    if outcome.innocent:
        found.append(f"innocent and excluded: {', '.join(outcome.innocent)}")
    if outcome.end != fault.ends:
        found.append(f"ended with {outcome.end or 'no word'}, not {fault.ends}")
    if outcome.verdict != fault.verdict:
        found.append(f"status says {outcome.verdict}, not {fault.verdict}")
    if fault.meanwhile not in outcome.during:
        found.append(
            f"status said {outcome.during or 'nothing'} meanwhile, and not {fault.meanwhile}"
        )
    if fault.ends == "finished" and outcome.reached != steps:
        found.append(f"reached step {outcome.reached} of {steps}")
    if fault.name == "kill-switch" and outcome.restarts:
        found.append("it was started again")
    return found


def _acts(run: FaultRun) -> list[str]:
    """What tr11 did: each launch that ended, and what was decided; each attempt's end; what it moved."""
    found = []
    for attempt in sorted(run.paths.attempts.glob("*"), key=_age):
        for path in sorted((attempt / "launches").glob("*.json"), key=_number):
            record = LaunchRecord.of(json.loads(path.read_text(encoding="utf-8")))
            found.append(
                f"{attempt.name} launch {record.launch}: {record.cause or 'ended'}"
                f", {record.decision or 'no decision'}{_names('blamed', record.blamed)}"
                f"{_names('suspects', record.suspects)}"
            )
        verdict = AttemptVerdict.read(attempt)
        if verdict is not None:
            held = ", held" if verdict.held else ""
            found.append(f"{attempt.name}: {verdict.reason}{held}")
    for line in _log(run.paths.main_log):
        if line.startswith("tr11: ") and any(word in line for word in _MOVES):
            found.append(line.strip().removeprefix("tr11: ").replace(f"{run.root}/", ""))
    return found


_MOVES = ("was put back from", "it lies in", "is set aside")


def _names(word: str, names: tuple[str, ...]) -> str:
    return f", {word} {' '.join(names)}" if names else ""


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _age(path: Path) -> float:
    return path.stat().st_ctime


def _log(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _restarts(run: FaultRun, seen: list[MetricsRecord]) -> tuple[Restart, ...]:
    """By the steps that were told: where they go back, or another job or launch tells them."""
    found = []
    for before, after in pairwise(seen):
        if not _is_another(before, after):
            continue
        began = after.time or 0.0
        whole = [one.step for one in run.whole.values() if one.written <= began]
        reached, first = before.iteration or 0, after.iteration or 0
        found.append(Restart(reached, max(whole, default=0), first))
    return tuple(found)


def _is_another(before: MetricsRecord, after: MetricsRecord) -> bool:
    goes_back = (after.iteration or 0) <= (before.iteration or 0)
    return goes_back or after.job_id != before.job_id
