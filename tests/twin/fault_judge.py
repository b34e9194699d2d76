"""Random faults of a rehearsal, and what must hold after each: who is guilty is avoided, who is
innocent is not touched.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.twin.operation import Operation, tasks_waiting
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
from trainer.contract.record import Record

SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+)")
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration +(\d+)")
REPAIR_SECONDS = 30.0
STUCK_SECONDS = 15.0  # the scheduler looks for what may start every second
MORE_STEPS = 3  # beyond the last one before the fault: then the training goes on
PERSON = "tests"
# the site's health script fails on every node, and a worker's crash has the nodes checked
CHECK_FAILS = "check-fails"
# What cannot be done: mount without the right to; change a job that has lost a node, which Slurm
# 22.05 refuses; kill the spare of a job that has lost them all.
NOT_NOW = (
    "right to mount", "DB index is being set", "Unexpected message received", "no spare node left",
)  # fmt: skip
LIMIT_LOWERED = "job-limit-lowered"
SAVE_ERROR = "save-error"


class DrawnFault(Record):
    """A kind of fault of this test. `weight`: how often it lies in the bag.

    `target`: "node" (one that trains), "batch host", "spare" (an idle one of the job), "elsewhere"
    (not of the job), "controller", "run" or "check" (the site's health script). `is_guilty`: the
    node must not be in the launch that trains afterwards. `ends_launch`: the launch it befalls
    ends. `lasts`: seconds until it is healed; None: until the training goes on. `may_hold`: a
    person is asked, who lets it go.
    """

    kind: str
    weight: int
    target: str = "node"
    is_guilty: bool = False
    ends_launch: bool = True
    lasts: float | None = None
    may_hold: bool = False


KINDS = (
    DrawnFault("black-hole", 3, is_guilty=True),
    DrawnFault("node-dead", 3, is_guilty=True),
    DrawnFault("node-dead", 2, target="spare", is_guilty=True, ends_launch=False),
    DrawnFault("half-dead", 2, is_guilty=True),
    DrawnFault("half-dead", 2, target="batch host", is_guilty=True),
    DrawnFault("step-hang", 2, is_guilty=True),
    DrawnFault("slow-steps", 1, is_guilty=True, ends_launch=False),
    DrawnFault(SAVE_ERROR, 2, is_guilty=True),
    DrawnFault("worker-crash", 3),
    DrawnFault("worker-stop", 2),
    DrawnFault("bad-sample", 2, target="run", may_hold=True),
    DrawnFault("data-wait", 2, ends_launch=False, lasts=2.0),
    DrawnFault("loss-spike", 2, target="run", ends_launch=False),
    DrawnFault("clock-ahead", 1, ends_launch=False),
    DrawnFault("drain", 2, ends_launch=False),
    DrawnFault("node-failing", 2, ends_launch=False),
    DrawnFault("job-limit-lowered", 2, target="batch host"),
    DrawnFault(CHECK_FAILS, 2, target="check", may_hold=True),
    DrawnFault("slurmd-killed", 1, target="elsewhere", ends_launch=False, lasts=12.0),
    DrawnFault("controller-frozen", 2, target="controller", ends_launch=False, lasts=12.0),
    DrawnFault("controller-restarted", 2, target="controller", ends_launch=False),
    DrawnFault("disk-full", 1, target="run", ends_launch=False, lasts=4.0, may_hold=True),
    DrawnFault("read-only", 1, target="run", ends_launch=False, lasts=4.0, may_hold=True),
    DrawnFault("unmounted", 1, target="run", ends_launch=False, lasts=4.0, may_hold=True),
)

GUILTY = frozenset(kind.kind for kind in KINDS if kind.is_guilty)


@dataclass
class FaultJudge:
    """Draws faults for a run that trains, has each one recovered from, and keeps what was done
    wrongly in `wrong`.
    """

    twin: Twin
    run: Operation
    draw: random.Random
    check_fails: Path  # where this file is, the site's health script fails, whatever the node
    wrong: list[str] = field(default_factory=list)
    done: list[dict[str, Any]] = field(default_factory=list)
    bag: list[DrawnFault] = field(default_factory=list)
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
    def next(self) -> None:
        """One fault at random, to its end: the training goes on, and everything is healed."""
        self.trains_beyond(self.iteration() + self.draw.randint(1, 6))
        if not self.bag:
            self.bag = [kind for kind in KINDS for _ in range(kind.weight)]
            self.draw.shuffle(self.bag)
        fault = self.bag.pop()
        launches, before, began = len(self.run.launches()), self.iteration(), time.time()
        tasks, last = tasks_waiting(self.jobs()), self.run.attempts()[-1]
        try:
            where = self._place(fault)
            target = self._inject(fault, where)
        except TwinError as error:
            if not any(words in str(error) for words in NOT_NOW):
                raise
            return
        if fault.lasts is not None:
            time.sleep(fault.lasts)
            self._heal()
        elif fault.ends_launch:
            self.repaired_at = time.monotonic()
            self.until(
                lambda: self._ended(launches) or self._is_held(),
                f"{fault.kind} on {target}: the launch's end",
            )
        if fault.target == "spare":
            self.until(
                lambda: target in self.run.excluded(), f"the dead spare {target} is excluded"
            )
        if fault.kind == "slow-steps":
            self._exclude_as_its_page_says(target)
        held = self.trains_beyond(max(before, self.iteration()) + MORE_STEPS, fault)
        node = target if "node" in where else ""
        avoided = len(self.innocence.avoided)
        self._judge(fault, node, launches)
        self._judge_tasks(fault, node, tasks, last)
        self._heal()
        back = sorted(self.run.excluded())
        for name in back:
            self._include(name)
        seconds, newly_avoided = round(time.time() - began, 1), self.innocence.avoided[avoided:]
        done = {"kind": fault.kind, "node": node, "began": began, "seconds": seconds, "held": held}
        self.done.append({**done, "avoided": newly_avoided})

    def _inject(self, fault: DrawnFault, where: dict[str, Any]) -> str:
        """Returns what was broken, such as a node's name."""
        if fault.kind != CHECK_FAILS:
            return inject(self.twin, fault.kind, **where).fault.target
        self.check_fails.touch()
        inject(self.twin, "worker-crash")
        return "every node"

    def _place(self, fault: DrawnFault) -> dict[str, Any]:
        """The arguments of `inject`."""
        if fault.target == "run":
            return {"path": str(self.run.paths.root)}
        if fault.target in ("controller", "check"):
            return {}
        return {"node": self._node(fault)}

    def _node(self, fault: DrawnFault) -> str:
        used = self.run.launches()[-1]["nodes"]
        job = next(job for job in self.jobs() if job.state.is_active)
        if fault.target == "batch host":
            return job.nodes[0]
        if fault.target == "spare":
            # the first runs the batch script, whether workers run on it or not
            spares = [name for name in job.nodes[1:] if name not in used]
            if not spares:
                raise TwinError("the job has no spare node left")
            return self.draw.choice(spares)
        if fault.target == "elsewhere":
            return self.draw.choice(
                [name for name in self.twin.plan.gpu_node_names if name not in job.nodes]
            )
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
        return self.draw.choice([name for name in used if name not in suspected or fault.is_guilty])

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

    def trains_beyond(self, iteration: int, fault: DrawnFault | None = None) -> bool:
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
                if fault is None or not fault.may_hold:
                    self.wrong.append(f"{fault.kind if fault else 'no fault'}: everything is held")
                self._heal()
                self._let_go()
            self._replace_what_is_miscounted()
            self._end_a_zombie()
            return False

        self.until(
            is_beyond, f"iteration {iteration + 1}" + (f" after {fault.kind}" if fault else "")
        )
        return was_held

    def _let_go(self) -> None:
        """`tr11 resume`, which must know every hold of tr11's own, also one made while the run
        directory was away.
        """
        self.resumed += 1
        said = self.run.tr11("resume", "--yes", "--reason", PERSON, expect=None)
        if self._is_held():
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
        jobs = self.jobs()
        return (
            bool(jobs)
            and not any(job.state.is_active for job in jobs)
            and all(job.reason.startswith("JobHeld") for job in jobs)
        )

    # ------------------------------------------------------------------ judging
    def _judge_tasks(self, fault: DrawnFault, node: str, tasks: int, last: str) -> None:
        """No more of the array was burned than the card lets one fault burn; a shortened job has
        saved and left.

        `tasks` were left before, and `last` was the attempt. A task that goes back into the queue
        is not burned.
        """
        self.until(
            lambda: sum(job.state.is_active for job in self.jobs()) <= 1,
            f"{fault.kind} on {node}: what was started beside the running task is back in the queue",
        )
        allowed = 0 if fault.target == "spare" else self.run.card.resilience.most_tasks_per_fault
        burned = tasks - tasks_waiting(self.jobs())
        if burned > allowed:
            self.wrong.append(f"{fault.kind} on {node}: {burned} tasks were burned")
        if (
            fault.kind == LIMIT_LOWERED
            and EndMarker.read(self.run.paths.attempts / last / "end.json") is None
        ):
            self.wrong.append(f"{fault.kind} on {node}: task {last} was killed at its limit")

    def _judge(self, fault: DrawnFault, node: str, launches: int) -> None:
        now = self.run.launches()
        if fault.is_guilty and node in now[-1]["nodes"]:
            self.wrong.append(f"{fault.kind} on {node}: it trains on it again")
        if (
            fault.kind == SAVE_ERROR
            and f"{node} alone could not write the save" not in now[launches - 1]["summary"]
        ):
            self.wrong.append(
                f"{fault.kind} on {node}: the launch ended by another word: {now[launches - 1]['summary']}"
            )
        # an exclusion may come after its node's repair
        guilty = {one["node"] for one in self.done[-1:] if one["kind"] in GUILTY}
        guilty |= {node} if fault.is_guilty else set()
        self._judge_innocents(f"{fault.kind} on {node}", guilty)
        if (
            not fault.ends_launch
            and not fault.is_guilty
            and not fault.may_hold
            and len(now) != launches
        ):
            self.wrong.append(
                f"{fault.kind} on {node}: a launch ended: {now[launches - 1]['summary']}"
            )

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
