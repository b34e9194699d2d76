"""Plays the events of a scenario under a rehearsal, and judges what must hold after each: who is guilty
is avoided, who is innocent is not touched.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.twin.fault_scenario import (
    CHECK_FAILS,
    LIMIT_LOWERED,
    SAVE_ERROR,
    SLOW_STEPS,
    FaultEvent,
)
from tests.twin.operation import Operation, tasks_waiting
from tests.twin.rehearsal_inputs import steps_of
from tr11ops.base.errors import SchedulerError, TwinError
from tr11ops.cluster.base import Job
from tr11ops.dialects.reading import step_record
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, VERSIONS_KEPT, Version, read_version
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from tr11ops.twin.fault_effects import last_step
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.stand_in import checkpoint
from tr11ops.twin.twin import Twin
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import read_latest

SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+)")
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration +(\d+)")
REPAIR_SECONDS = 30.0
STUCK_SECONDS = 15.0  # the scheduler looks for what may start every second
MORE_STEPS = 3  # beyond the last one before the fault: then the training goes on
PERSON = "tests"
# What cannot be done: mount without the right to; change a job that has lost a node, which Slurm
# 22.05 refuses; kill the spare of a job that has lost them all.
NOT_NOW = (
    "right to mount", "DB index is being set", "Unexpected message received", "no spare node left",
)  # fmt: skip


@dataclass
class FaultJudge:
    """Gives a run that trains one fault after another, has each one recovered from, and keeps what was
    done wrongly in `wrong`.
    """

    twin: Twin
    run: Operation
    check_fails: Path  # where this file is, the site's health script fails, whatever the node
    wrong: list[str] = field(default_factory=list)
    done: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = 0
    replaced: int = 0
    stuck_since: float | None = None
    zombies: int = 0
    repaired_at: float = 0.0

    def __post_init__(self) -> None:
        self.directory = RunDirectory(self.run.paths, self.run.card.kill_switch)
        self.innocence = InnocenceJudge(self.directory.exclusions)

    def iteration(self) -> int:
        """The last step that was logged; 0 where the log cannot be seen. Half a line, of a full
        disk, is none.
        """
        step = last_step(self.run.paths.root)
        return (step.iteration or 0) if step is not None else 0

    # ------------------------------------------------------------------ one fault
    def play(self, event: FaultEvent) -> None:
        """One event, to its end: the training goes on, and everything is healed."""
        self._wait_for_moment(event)
        launches, before, began = len(self.run.launches()), self.iteration(), time.time()
        tasks, last = tasks_waiting(self.jobs()), self.run.attempts()[-1]
        try:
            where = self._place(event)
            target = self._inject(event, where)
        except TwinError as error:
            if not any(words in str(error) for words in NOT_NOW):
                raise
            return
        if event.lasts is not None:
            time.sleep(event.lasts)
            self._heal()
        elif event.expect.ends_launch:
            self.repaired_at = time.monotonic()
            self.until(
                lambda: self._ended(launches) or self._is_held(),
                f"{event.fault} on {target}: the launch's end",
            )
        if event.target == "spare":
            self.until(
                lambda: target in self.run.excluded(), f"the dead spare {target} is excluded"
            )
        if event.fault == SLOW_STEPS:
            self._exclude_as_its_page_says(target)
        held = self.trains_beyond(max(before, self.iteration()) + MORE_STEPS, event)
        node = target if "node" in where else ""
        avoided = len(self.innocence.avoided)
        self._judge(event, node, launches)
        self._judge_cause(event, node, launches)
        self._judge_tasks(event, node, tasks, last)
        redone = self._judge_redone(event, began, before)
        self._heal()
        back = sorted(self.run.excluded())
        for name in back:
            self._include(name)
        seconds, newly_avoided = round(time.time() - began, 1), self.innocence.avoided[avoided:]
        done = {"kind": event.fault, "node": node, "began": began, "seconds": seconds, "held": held}
        is_out = event.expect.is_out
        self.done.append({**done, "redone": redone, "is_out": is_out, "avoided": newly_avoided})

    def _wait_for_moment(self, event: FaultEvent) -> None:
        """Until the iteration has come at which the event is due."""
        self.trains_beyond(self.iteration() + event.after)
        card = self.run.card
        if event.before_save is not None:
            self._wait_until_before(card.checkpoint.interval, event.before_save)
        if event.before_evaluation is not None:
            self._wait_until_before(card.evaluation.interval, event.before_evaluation)

    def _wait_until_before(self, interval: int, before: int) -> None:
        """Until the iteration that many before the next multiple of `interval`."""
        at = -(-(self.iteration() + before) // interval) * interval - before
        if at > self.iteration():
            self.trains_beyond(at - 1)

    def _inject(self, event: FaultEvent, where: dict[str, Any]) -> str:
        """Returns what was broken, such as a node's name."""
        if event.fault != CHECK_FAILS:
            return inject(self.twin, event.fault, **where).fault.target
        self.check_fails.touch()
        inject(self.twin, "worker-crash")
        return "every node"

    def _place(self, event: FaultEvent) -> dict[str, Any]:
        """The arguments of `inject`."""
        if event.target == "run":
            return {"path": str(self.run.paths.root)}
        if event.target in ("controller", "check", "partition"):
            return {}
        return {"node": self._node(event)}

    def _node(self, event: FaultEvent) -> str:
        used = self.run.launches()[-1]["nodes"]
        job = self._running()
        if event.target == "batch host":
            return job.nodes[0]
        if event.target == "spare":
            # the first runs the batch script, whether workers run on it or not
            spares = [name for name in job.nodes[1:] if name not in used]
            if not spares:
                raise TwinError("the job has no spare node left")
            return _picked(spares, event.pick)
        if event.target == "elsewhere":
            others = [name for name in self.twin.plan.gpu_node_names if name not in job.nodes]
            return _picked(others, event.pick)
        suspected: list[str] = next(
            (
                one["suspects"]
                for one in self.run.launches()[::-1]
                if one["cause"] == "node" and one["suspects"]
            ),
            [],
        )
        # the second time on the same node is its own fault, by the rules: once is what is tried
        # here
        fitting = [name for name in used if name not in suspected or event.expect.is_out]
        return _picked(fitting, event.pick)

    def _running(self) -> Job:
        """The run's job; from one task of the array to the next there may be none."""
        found: list[Job] = []

        def is_there() -> bool:
            found[:] = [job for job in self.jobs() if job.state.is_active]
            return bool(found)

        self.until(is_there, "a job that runs")
        return found[0]

    def _ended(self, launches: int) -> bool:
        # what is queued may wait for the end of a job that has lost its batch host
        self._end_a_zombie()
        self._replace_what_is_miscounted()
        return len(self.run.launches()) > launches

    def _exclude_as_its_page_says(self, node: str) -> None:
        """`tr11 status` names the node; then what runbooks/slow-node.md has typed."""
        named: set[str] = set()

        def is_named() -> bool:
            found = json.loads(self.run.tr11("status", "--json", expect=None).stdout)["findings"]
            named.update(one["subject"] for one in found if one["detector"] == "slow-node")
            return bool(named)

        self.until(is_named, f"the slow node {node} is named")
        if named != {node}:
            self.wrong.append(f"slow-steps on {node}: tr11 status names {sorted(named)}")
        self.run.tr11("nodes", "exclude", node, "--yes", "--reason", PERSON)
        self.run.tr11("kill", "--wait", "--yes", "--reason", PERSON)
        self.run.tr11("resume", "--yes", "--reason", PERSON)

    def _heal(self) -> None:
        self.check_fails.unlink(missing_ok=True)

        def is_healed() -> bool:
            return all(not healing.error for healing in heal(self.twin))

        self.until(is_healed, "everything is healed")

    def _include(self, node: str) -> None:
        """As a person does once the site has repaired it. The controller may still be busy with
        what was broken.
        """
        self.until(
            lambda: (
                self.run.tr11(
                    "nodes", "include", node, "--force", "--yes", "--reason", PERSON, expect=None
                ).returncode
                == 0
            ),
            f"{node} may be used again",
        )

    # ------------------------------------------------------------------ waiting
    def until(self, condition: Callable[[], object], what: str) -> None:
        self.run.until(condition, what)

    def trains_beyond(self, iteration: int, event: FaultEvent | None = None) -> bool:
        """Wait until that iteration is done. What is held meanwhile is let go by a person; True
        when it was.

        For a fault that is the nodes' own, or none, that is wrong: no one had to be asked.
        """
        was_held = False
        self.repaired_at = time.monotonic()

        def is_beyond() -> bool:
            nonlocal was_held
            if self.iteration() > iteration:
                return True
            if self._is_held():
                was_held = True
                if event is None or not event.expect.may_hold:
                    self.wrong.append(f"{event.fault if event else 'no fault'}: everything is held")
                self._heal()
                self._let_go()
            self._replace_what_is_miscounted()
            self._end_a_zombie()
            return False

        self.until(
            is_beyond, f"iteration {iteration + 1}" + (f" after {event.fault}" if event else "")
        )
        return was_held

    def _let_go(self) -> None:
        """`tr11 resume`, which must know every hold of tr11's own, also one made while the run
        directory was away.
        """
        self.resumed += 1
        said = self.run.tr11("resume", "--yes", "--reason", PERSON, expect=None)
        if self._queue_is_held():
            self.wrong.append(f"tr11 resume leaves what tr11 holds: {said.stdout}{said.stderr}")
            for job in self.jobs():
                self.run.slurm.release(job.array_id or job.raw_id)

    def _replace_what_is_miscounted(self) -> None:
        """What runbooks/queued-too-long.md has typed, where Slurm waits for a task of the array and
        none runs.
        """
        jobs = self.jobs()
        if not jobs or any(not job.reason.startswith("JobArrayTaskLimit") for job in jobs):
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = time.monotonic()
        elif time.monotonic() - self.stuck_since > STUCK_SECONDS:
            self.stuck_since = None
            self.replaced += 1
            self.run.tr11("launch", "--replace", "--yes")

    def _end_a_zombie(self) -> None:
        """What runbooks/zombie.md has typed, as the watchdog's rounds do: a job without its batch
        host ends no more.
        """
        if time.monotonic() - self.repaired_at < REPAIR_SECONDS:
            return
        self.repaired_at = time.monotonic()
        jobs = self.jobs()
        # what is held is let go once the fault is healed: a repair would let it go into the fault
        is_held = any(job.reason.startswith("JobHeld") for job in jobs)
        if any(job.state.is_active for job in jobs) and not is_held:
            said = self.run.tr11("launch", "--repair", "--yes", expect=None).stdout
            self.zombies += sum(line.startswith("cancel ") for line in said.splitlines())

    def jobs(self) -> list[Job]:
        """As of the run; a controller that is being started again is asked until it answers."""
        found: list[Job] = []

        def answers() -> bool:
            try:
                found[:] = self.run.jobs()
            except SchedulerError:
                return False
            return True

        self.until(answers, "the controller's answer")
        return found

    def _is_held(self) -> bool:
        """Whether nothing goes on before a person has let it."""
        return self._queue_is_held()

    def _queue_is_held(self) -> bool:
        jobs = self.jobs()
        return (
            bool(jobs)
            and not any(job.state.is_active for job in jobs)
            and all(job.reason.startswith("JobHeld") for job in jobs)
        )

    # ------------------------------------------------------------------ judging
    def _judge_tasks(self, event: FaultEvent, node: str, tasks: int, last: str) -> None:
        """No more of the array was burned than the card lets one fault burn; a shortened job has
        saved and left.

        `tasks` were left before, and `last` was the attempt. A task that goes back into the queue
        is not burned.
        """
        self.until(
            lambda: sum(job.state.is_active for job in self.jobs()) <= 1,
            f"{event.fault} on {node}: what was started beside the running task is back in the queue",
        )
        allowed = 0 if event.target == "spare" else self.run.card.resilience.most_tasks_per_fault
        burned = tasks - tasks_waiting(self.jobs())
        if burned > allowed:
            self.wrong.append(f"{event.fault} on {node}: {burned} tasks were burned")
        if (
            event.fault == LIMIT_LOWERED
            and EndMarker.read(self.run.paths.attempts / last / "end.json") is None
        ):
            self.wrong.append(f"{event.fault} on {node}: task {last} was killed at its limit")

    def _judge(self, event: FaultEvent, node: str, launches: int) -> None:
        now = self.run.launches()
        if event.expect.is_out and node in now[-1]["nodes"]:
            self.wrong.append(f"{event.fault} on {node}: it trains on it again")
        if (
            event.fault == SAVE_ERROR
            and f"{node} alone could not write the save" not in now[launches - 1]["summary"]
        ):
            self.wrong.append(
                f"{event.fault} on {node}: the launch ended by another word: {now[launches - 1]['summary']}"
            )
        # an exclusion may come after its node's repair
        guilty = {one["node"] for one in self.done[-1:] if one["is_out"]}
        guilty |= {node} if event.expect.is_out else set()
        self._judge_innocents(f"{event.fault} on {node}", guilty)
        if (
            not event.expect.ends_launch
            and not event.expect.is_out
            and not event.expect.may_hold
            and len(now) != launches
        ):
            self.wrong.append(
                f"{event.fault} on {node}: a launch ended: {now[launches - 1]['summary']}"
            )

    def _judge_cause(self, event: FaultEvent, node: str, launches: int) -> None:
        """The verdict on the launch that was ended is the one that the scenario names."""
        ended = self.run.launches()[launches - 1]
        if event.expect.cause is not None and ended["cause"] != event.expect.cause:
            self.wrong.append(f"{event.fault} on {node}: the verdict is {ended['cause']}")

    def _judge_redone(self, event: FaultEvent, began: float, before: int) -> int:
        """How many iterations were trained a second time since the event; `before` were done."""
        steps = [step["iteration"] for step in steps_of(self.run.paths) if step["time"] >= began]
        redone = len(steps) - len({number for number in steps if number > before})
        most = event.expect.most_redone
        if most is not None and redone > most:
            self.wrong.append(
                f"{event.fault}: {redone} iterations were trained again, {most} may be"
            )
        return redone

    def _judge_innocents(self, what: str, guilty: set[str]) -> None:
        if excluded := self.innocence.excluded(guilty):
            self.wrong.append(
                f"{what}: innocent nodes were excluded, if only for a while: {excluded}"
            )
        if named := self.innocence.blamed(self.run.launches(), guilty):
            self.wrong.append(f"{what}: innocent nodes were blamed for a launch: {named}")

    def check_the_rest(self) -> None:
        """Since the last fault nothing else was held against a node."""
        self._judge_innocents("after the last fault", set())

    def check_chain(self, samples: int) -> None:
        """No step was lost, repeated or changed: the chain of the last checkpoint is that of a run
        without faults.
        """
        last = read_latest(self.run.paths.checkpoints)
        assert last is not None
        chain = checkpoint.FIRST_LINK
        for number in range(1, last + 1):
            chain = checkpoint.next_link(chain, number, number * samples)
        assert checkpoint.load(self.run.paths.checkpoints, last, 0)[1] == chain

    def check_resumes(self) -> int:
        """Each launch goes on from the newest checkpoint that had been saved; returns the most
        steps done again.

        But for the one older checkpoint that is tried where launches end at one step again and
        again (a bad sample).
        """
        entries = read_journal(self.directory.journal).entries
        tried = {entry.data["step"] for entry in entries if entry.kind == "older-checkpoint"}
        saved = reached = most = 0
        for line in self.run.log().splitlines():
            if found := SAVED.search(line):
                saved = int(found[1])
            elif (step := step_record(line)) is not None:
                reached = step.iteration
            elif found := LOADED.search(line):
                most = max(most, reached - int(found[1]))
                if int(found[1]) < saved and int(found[1]) not in tried:
                    self.wrong.append(f"a launch went on from {found[1]}, and {saved} was saved")
        return most


def _picked(fitting: Sequence[str], pick: float) -> str:
    return fitting[int(pick * len(fitting))]


# ---------------------------------------------------------------------------
# Which innocent nodes tr11 held to be guilty, even if only for a while: in any version of the
# ledger, in any launch.


@dataclass
class InnocenceJudge:
    """Judges what was added to a run's ledger since the last time. `read_to`: the newest version
    that was judged.

    `avoided`: innocent nodes that were not used for a while, each time that it was begun; no error
    by itself.
    """

    ledger: Path
    read_to: int = 0
    avoided: list[str] = field(default_factory=list)
    # launches that had ended: attempt, number
    judged: set[tuple[str, int]] = field(default_factory=set)
    # of these, the ones in the newest version that was judged
    _left_out: frozenset[str] = frozenset()

    def excluded(self, guilty: Collection[str]) -> list[str]:
        """Nodes without a fault of their own that tr11 had excluded in a version since; what it
        avoided is kept.
        """
        found: set[str] = set()
        for version in self._new_versions():
            kept_off = {
                entry.node: entry.state
                for entry in version.exclusions
                if entry.owner == AUTOMATIC_OWNER and entry.node not in guilty
            }
            excluded = {node for node, state in kept_off.items() if state == NodeStanding.EXCLUDE}
            left_out = frozenset(kept_off) - excluded
            self.avoided += sorted(left_out - self._left_out)
            self._left_out = left_out
            found |= excluded
        return sorted(found)

    def blamed(self, launches: Iterable[Mapping[str, Any]], guilty: Collection[str]) -> list[str]:
        """Nodes without a fault of their own that launches which ended since blame: on the ledger
        or not, these are not used again. `launches`: all records.
        """
        found: set[str] = set()
        for launch in launches:
            name = (launch["job_id"], launch["launch"])
            if launch["end"] is not None and name not in self.judged:
                self.judged.add(name)
                found.update(launch["blamed"])
        return sorted(found - set(guilty))

    def _new_versions(self) -> list[Version]:
        versions = VersionedFile(self.ledger, VERSIONS_KEPT)
        numbers = [number for number in versions.numbers() if number > self.read_to]
        if not numbers:
            return []
        assert numbers[0] == self.read_to + 1, (
            f"versions {self.read_to + 1} to {numbers[0] - 1} were never judged"
        )
        self.read_to = numbers[-1]
        return [read_version(versions.file(number)) for number in numbers]
