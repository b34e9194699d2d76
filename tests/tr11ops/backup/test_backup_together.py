"""Rounds that are killed, that meet each other, a prune, or one that is queued as a job: nothing is lost, nothing is
done twice.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.backup.copy_cases import contents
from tests.tr11ops.backup.round_cases import NOW, Rounds, receipts_below
from tests.tr11ops.backup.round_nursery import RoundNursery
from tr11ops.backup.submit import EARLY_SECONDS, Queued, SubmitContext, jobs_of, request_of, submit
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.checkpoints.prune import Pruner
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cron.table_programs import Invocation
from tr11ops.rundir.claims import COPY_SECONDS, Claim, ClaimTaken, CopyLock, copy_claims
from trainer.contract.checkpoint_names import checkpoint_steps

KILLS = 50


@pytest.fixture
def rounds(memory: Path) -> Rounds:
    return Rounds(memory, "backup.parallel=2")


@pytest.fixture(scope="module")
def killer() -> Iterator[RoundNursery]:
    with RoundNursery() as made:
        yield made


# ----------------------------------------------------------------------------- killed
def test_killed_at_any_call_the_next_round_finishes(rounds: Rounds, killer: RoundNursery) -> None:
    """Copies, logs, records, re-reading: whatever was being done, the next round ends where an
    unbroken one does.
    """
    rounds.save(100, 300)
    (log := rounds.directory.paths.main_log).parent.mkdir(parents=True)
    log.write_text("iteration 1\n" * 50)
    chance, kills, trial = random.Random(5), 0, 0
    state = rounds.directory.paths.state
    while kills < KILLS:
        trial += 1
        shutil.rmtree(rounds.store)
        rounds.store.mkdir()
        shutil.rmtree(state, ignore_errors=True)
        for _ in range(3):
            kills += killer.killed(rounds.folder, chance.randrange(1, 150))
            for path in receipts_below(rounds.store):
                folder = rounds.store / path.removesuffix(".copy.json")
                assert (folder / "manifest.json").is_file(), "a receipt without its copy"
        done = rounds.run("store", reading="all")
        assert done.exit_code == 0, done
        assert rounds.copied("store") == [(100, "full"), (300, "full")]
        for step in (100, 300):
            assert contents(rounds.far(step, ".")) == contents(
                rounds.checkpoints / f"global_step{step}"
            )
        assert (rounds.store / "small-logs/logs/main/main_log.txt").read_bytes() == log.read_bytes()
        assert len(receipts_below(rounds.store)) == 2, "nothing is there twice"
        assert (
            rounds.status()["copied"]["store"] == {"full": [100, 300]}
            and rounds.status()["damaged"] == []
        )
    assert trial >= KILLS / 3


# ----------------------------------------------------------------------------- two at once
def test_a_second_round_says_who_is_at_it_and_leaves(rounds: Rounds) -> None:
    rounds.save(100)
    with CopyLock(rounds.directory, "store", threading.Event()) as turn:
        turn.copying(100)
        done = rounds.run()
    assert done.exit_code == 0
    store, url = done.tallies
    assert (
        f"process {os.getpid()} of" in store.busy
        and "(step 100)" in store.busy
        and not store.copied
    )
    assert [copy.step for copy in url.copied] == [100], "the other archive is free"
    assert rounds.run("store").tallies[0].copied


def test_two_backups_and_a_prune_at_once(tmp_path: Path) -> None:
    """New checkpoints come all the time. In the end all that was wanted is copied, once, and
    nothing else is lost.
    """
    rounds = Rounds(
        tmp_path, "backup.keep_latest=2", "backup.store_interval=200", "backup.weights_interval=0"
    )
    rounds.save(100, 200)
    saved = {100, 200}
    over = threading.Event()
    errors: list[BaseException] = []

    def repeat(action: object) -> None:
        while not over.is_set():
            try:
                action()  # type: ignore[operator]
            except ClaimTaken:
                continue
            except BaseException as error:
                errors.append(error)
                raise

    pruner = Pruner.of(rounds.card, "ana", "a test")
    threads = [
        threading.Thread(target=repeat, args=(action,))
        for action in (rounds.run, rounds.run, pruner.run)
    ]
    for thread in threads:
        thread.start()
    try:
        for step in range(300, 1900, 100):
            rounds.save(step)
            saved.add(step)
            over.wait(0.05)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors
    rounds.run()
    wanted = sorted(step for step in saved if step % 200 == 0)
    assert [step for step, _ in rounds.copied("store")] == wanted
    assert (
        len(receipts_below(rounds.store))
        == len(wanted)
        == len([entry for entry in rounds.journal("backup-copied") if entry["archive"] == "store"])
    )
    here = set(checkpoint_steps(rounds.checkpoints))
    assert {1700, 1800} <= here < saved, "the newest two, and some were pruned"
    assert not [path for path in rounds.checkpoints.iterdir() if path.name.startswith(".")]


# ----------------------------------------------------------------------------- turns
def test_a_turn_is_renewed_and_names_the_step(rounds: Rounds) -> None:
    now = [NOW]
    with CopyLock(
        rounds.directory, "store", threading.Event(), lambda: now[0], renew_seconds=0.005
    ) as turn:
        turn.copying(300)
        now[0] += 1000
        renewed = threading.Event()
        for _ in range(400):
            owner = copy_claims(rounds.directory, "store").holder(now[0])
            if owner is not None and owner.expires == now[0] + COPY_SECONDS:
                break
            renewed.wait(0.005)
        assert (
            owner is not None
            and owner.expires == now[0] + COPY_SECONDS
            and owner.data == {"step": 300}
        )
        turn.copying(None)
        assert copy_claims(rounds.directory, "store").holder(now[0]).data == {}  # type: ignore[union-attr]
    assert copy_claims(rounds.directory, "store").holder(now[0]) is None


def test_a_turn_that_was_lost_stops_the_work(rounds: Rounds) -> None:
    stop = threading.Event()
    with CopyLock(rounds.directory, "store", stop) as turn:
        folder = copy_claims(rounds.directory, "store")
        theirs = folder.take(Claim.of_this_process(NOW, 10.0, "theirs"), folder.newest())
        assert theirs is not None
        with pytest.raises(ClaimTaken):
            turn.copying(100)
        assert stop.is_set() and turn.lost
    newest = folder.newest()
    assert newest is not None and (newest.token, newest.held) == ("theirs", True), (
        "theirs is left alone"
    )


def test_the_turn_of_the_dead_is_taken_over(rounds: Rounds, killer: RoundNursery) -> None:
    rounds.save(100)
    killer.dies_in_its_turn(rounds.folder)
    newest = copy_claims(rounds.directory, "store").newest()
    assert newest is not None and newest.held and newest.data == {"step": 100}
    assert copy_claims(rounds.directory, "store").holder(NOW) is None
    assert rounds.run("store").exit_code == 0 and rounds.copied("store") == [(100, "full")]


class Queue:
    """A scheduler of which only the queue matters."""

    name = "slurm"

    def __init__(self) -> None:
        self.requests: list[BatchRequest] = []
        self.held: list[Job] = []
        self.loses_answer = self.refuses = False

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        return tuple(self.held)

    def submit(self, request: BatchRequest) -> str:
        if self.refuses:
            raise SchedulerError("invalid partition")
        self.requests.append(request)
        number = str(100 + len(self.requests))
        self.held.append(
            Job(
                number,
                number,
                None,
                None,
                request.name,
                "ana",
                JobState.PENDING,
                comment=request.comment,
            )
        )
        if self.loses_answer:
            raise SchedulerUnreachable("timed out")
        return number


@pytest.fixture
def submit_context(tmp_path: Path) -> SubmitContext:
    options = ("slurm.options.licenses=scratch", "slurm.options.mem=900G")
    rounds = Rounds(
        tmp_path,
        "backup.partition=archive",
        "cron.account=six@cpu",
        "backup.time_limit=20:00:00",
        *options,
    )
    invocation = Invocation(
        rounds.card, tmp_path / "a card.toml", ("run.variant=main",), tmp_path, {"PATH": "/bin"}
    )
    queue: object = Queue()
    return SubmitContext(
        invocation, rounds.directory, queue, ("backup", "run"), pause=lambda seconds: None
    )  # type: ignore[arg-type]


def queue_of(submit_context: SubmitContext) -> Queue:
    assert isinstance(submit_context.scheduler, Queue)
    return submit_context.scheduler


def test_the_job_is_asked_for_on_the_partition_for_copies(submit_context: SubmitContext) -> None:
    request = request_of(submit_context)
    assert (request.partition, request.account, request.time_limit_seconds) == (
        "archive",
        "six@cpu",
        72_000,
    )
    assert request.signal_seconds_before_limit == EARLY_SECONDS and request.nodes == 1
    for piece in (
        "--partition=archive",
        "--requeue",
        "backup run",
        "'run.variant=main'",
        "/a card.toml'",
    ):
        assert piece in request.script or piece.replace("'", "") in request.script
    assert "--no-requeue" not in request.script
    assert "#SBATCH --licenses=scratch" in request.script and "--mem=" not in request.script


def test_a_second_one_finds_the_first(submit_context: SubmitContext) -> None:
    assert submit(submit_context) == Queued("101", is_new=True)
    assert submit(submit_context) == Queued("101", is_new=False, state="PENDING")
    queue = queue_of(submit_context)
    queue.held[0] = replace(queue.held[0], state=JobState.COMPLETED)
    assert submit(submit_context) == Queued("102", is_new=True)
    stranger = replace(queue.held[1], comment="tr11-backup@0123456789ab")
    assert jobs_of([stranger], submit_context.directory.mark) == ()


def test_many_at_once_queue_one(submit_context: SubmitContext) -> None:
    found: list[Queued] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                submit(replace(submit_context, pause=lambda seconds: time.sleep(0.01)))
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queue_of(submit_context).requests) == 1 and {queued.job_id for queued in found} == {
        "101"
    }


def test_an_answer_that_was_lost_is_looked_up(submit_context: SubmitContext) -> None:
    queue_of(submit_context).loses_answer = True
    assert submit(submit_context) == Queued("101", is_new=True, state="PENDING")
    assert len(queue_of(submit_context).requests) == 1


def test_a_refusal_leaves_the_way_free(submit_context: SubmitContext) -> None:
    queue_of(submit_context).refuses = True
    with pytest.raises(SchedulerError, match="invalid partition"):
        submit(submit_context)
    queue_of(submit_context).refuses = False
    assert submit(submit_context).is_new


def test_outputs_of_long_ago_are_removed(submit_context: SubmitContext) -> None:
    folder = submit_context.directory.paths.state / "backup" / "slurm"
    folder.mkdir(parents=True)
    for name, age in (("tr11-backup-1.out", 61), ("tr11-backup-2.out", 59), ("notes.txt", 99)):
        (folder / name).write_text("x")
        os.utime(folder / name, (time.time() - age * 86_400,) * 2)
    submit(submit_context)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "tr11-backup-2.out"]
