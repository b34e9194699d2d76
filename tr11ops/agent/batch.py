"""What the batch script runs: reads the card and the allocation, and hands them to the controller.

Everything about the attempt is kept in `state/attempts/JOBID/`; the workers' lines go to
`main_log.txt`. Exit status: 0 fine, 1 it failed and the next task may go on, 2 refused and 3 held:
nothing may start before a person has looked.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops import __version__
from tr11ops.agent.allocation import Allocation, claim_gpus, read_allocation
from tr11ops.agent.attempt_context import STATES_SECONDS, AttemptContext, JobWatch
from tr11ops.agent.controller import Controller
from tr11ops.agent.peers import Newcomer, Peers
from tr11ops.agent.rendezvous import Rendezvous
from tr11ops.agent.restarts import own_start_before, restarts, set_launches_aside
from tr11ops.agent.step import LineTee, StopFlag
from tr11ops.base.observed import Unknown, known, observed
from tr11ops.base.processes import leave
from tr11ops.base.units import counted, first_few
from tr11ops.launch.margins import read_history
from tr11ops.launch.software import software_of
from tr11ops.launch.successor import BatchJob, begin_attempt
from tr11ops.observe.files import read_details
from tr11ops.runcard.card import RunCard, card_from_resolved, difference_lines
from tr11ops.runcard.exit_duration import card_as_written, derived_again
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.attempts import VERDICT_FILE, AttemptVerdict, CodeIdentity, code_of, versions_of
from tr11ops.rundir.kill_switch import look_at_switch, mark_switch, place_fault
from tr11ops.rundir.paths import RunDirectory, remove_meeting_key, write_meeting_key
from trainer.config.card import CardError, Problem
from trainer.contract.attempt import EXIT_ERROR, EXIT_FINE, EXIT_REFUSED
from trainer.contract.documents import document
from trainer.contract.files import host_name, share_file, write_json
from trainer.contract.paths import (
    END_MARKER_FILE,
    EXIT_TIME_FILE,
    STOP_REQUEST_FILE,
    RunPaths,
    attempt_label,
)
from trainer.contract.state_file import read_json

# What an attempt has otherwise than the one before it: card, versions, code, nodes.
#
# Told in its log, kept in its record.

MOST_LINES = 20


def changes_since_last(
    paths: RunPaths, job_id: str, record: Mapping[str, Any], card: Mapping[str, Any]
) -> list[str]:
    """Lines of the attempt `job_id`, whose record and resolved card these are; empty when it is the
    first.
    """
    before = _last(paths, job_id)
    if before is None:
        return []
    name, then = before
    old_card = read_details(paths.attempt(name) / "card.json")
    lines = [*_records(then, record)]
    if old_card:
        lines += (f"card {text}" for text in difference_lines(_compared(old_card), _compared(card)))
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more"]
    return [f"since attempt {attempt_label(then, name)}: {line}" for line in lines]


def _last(paths: RunPaths, job_id: str) -> tuple[str, dict[str, Any]] | None:
    """The attempt that began last before this one, and its record."""
    try:
        names = [entry.name for entry in paths.attempts.iterdir() if entry.name != job_id]
    except OSError:
        return None
    found = []
    for name in names:
        record = read_details(paths.attempt(name) / "attempt.json")
        if isinstance(record.get("start"), int | float):
            found.append((record["start"], name, record))
    if found:
        return max(found, key=lambda entry: entry[:2])[1:]
    return None


def _records(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = ({str(node) for node in record.get("nodes") or ()} for record in (then, now))
    if old != new:
        added = sorted(new - old)
        gone = sorted(old - new)
        parts = []
        if added:
            parts.append(f"with {first_few(added)}")
        if gone:
            parts.append(f"without {first_few(gone)}")
        yield f"nodes: {', '.join(parts)}"
    before = versions_of(then)
    after = versions_of(now)
    # what an older tr11 did not record is not known to be another
    both = before.keys() & after.keys()
    for text in difference_lines(
        {name: before[name] for name in both}, {name: after[name] for name in both}
    ):
        yield f"version of {text}"
    yield from _codes(code_of(then), code_of(now))


def _codes(then: CodeIdentity | None, now: CodeIdentity | None) -> Iterator[str]:
    """Another commit, or other changes to it; `code.diff` of both attempts holds them."""
    if then is None or now is None or str(then) == str(now):
        return
    patch = ""
    if now.patch:
        patch = f"; see {now.patch}"
    yield f"code: {then} -> {now}{patch}"


def _compared(card: Mapping[str, Any]) -> dict[str, Any]:
    """What people set: an exit time is derived again from what is left of each allocation."""
    kept = {key: value for key, value in card.items() if key != "derived"}
    run = kept.get("run")
    if isinstance(run, Mapping):
        kept["run"] = {key: value for key, value in run.items() if key != "exit_duration_minutes"}
    return kept


STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
SCHEDULER_SECONDS = 20.0  # for what may take its time; it is asked again


def run_attempt(
    card: Path,
    submission: str,
    foreground_nodes: int | None,
    environment: Mapping[str, str],
    peers: Peers | None = None,
) -> int:
    """Run one attempt to its end; returns the batch script's exit status.

    With `peers`, the foreground's nodes are machines of their own, which have joined this one.
    """
    stop = StopFlag() if peers is None else peers.stop
    stop.install(STOP_SIGNALS)
    value, config = read_resolved(card)
    history = known(observed(read_history, config.paths), RunHistory())
    written = card_as_written(value, str(card))
    value, leaves = derived_again(value, str(card), history)
    config = card_from_resolved(value, str(card))
    allocation = read_allocation(environment, foreground_nodes)
    if peers is not None:
        allocation = replace(allocation, nodes=peers.names)
    claims: list[socket.socket] = []  # on its GPUs, as long as this process lives
    if allocation.kind == "foreground":
        nodes_here = len(allocation.nodes) if peers is None else 1
        environment, claims = claim_gpus(nodes_here * config.slurm.gpus_per_node, environment)
    attempt = config.paths.attempt(allocation.job_id)
    tee = LineTee(config.paths.main_log)
    attempt_context = with_scheduler(
        AttemptContext(
            config,
            allocation,
            environment,
            submission,
            peers=peers,
            written=written,
            history=history,
        )
    )
    why = _begin(attempt_context, tee)
    if why:
        tee.say(f"job {allocation.label} leaves without training: {why}")
        return EXIT_FINE
    before = own_start_before(attempt, environment)
    if before is not None:
        times = counted(restarts(environment), "time")
        tee.say(f"job {allocation.label} was started again by Slurm ({times})")
        attempt_context = replace(attempt_context, start_before=before)
        set_launches_aside(attempt, restarts(environment))
    for stale in (END_MARKER_FILE, STOP_REQUEST_FILE, EXIT_TIME_FILE, VERDICT_FILE):
        (attempt / stale).unlink(missing_ok=True)  # a requeued job comes back under the same number
    record = attempt_record(allocation, card, submission, software_of(config, attempt))
    record["kill_switch"] = (
        look_after_switch(attempt_context.directory, config.run.name, tee.line) or "seen"
    )
    changes = changes_since_last(config.paths, allocation.job_id, record, value)
    write_json(attempt / "attempt.json", {**record, "changes": changes})
    write_json(attempt / "card.json", value)
    for line in changes:
        tee.say(f"{line}")
    if leaves.is_derived:
        tee.say(f"the trainer leaves after {leaves.minutes:g} min, {leaves.why}")
    try:
        return Controller(attempt_context, stop, tee).run()
    finally:
        for claim in claims:
            claim.close()


def run_with_peers(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Node 0 of a training on several machines: wait for the others, run the attempt, send them
    home with its status.

    Returns 2 where a node does not fit, 1 where not all came in time, 0 after a stop that came
    before the start.
    """
    value, config = read_resolved(options.card)
    host, port = options.master.rsplit(":", 1)
    rendezvous = Rendezvous(options.foreground_nodes, 0, host.strip("[]"), int(port))
    stop = StopFlag()
    stop.install(STOP_SIGNALS)
    ours = Newcomer(rendezvous.nodes, 0, host=host_name(), version=__version__, card=value)
    key = write_meeting_key(config.paths, rendezvous.master)
    peers = None
    status = EXIT_ERROR
    why = "it failed"
    try:
        peers = Peers(rendezvous, ours, key=key, stop=stop, say=say)
        say(f"tr11: node 0 of {rendezvous.nodes} waits at {rendezvous.master} for the others")
        directory = RunDirectory(config.paths, config.kill_switch)
        why = peers.gather(
            options.wait, lambda: bool(stop.received) or directory.kill_switch_is_set()
        )
        if peers.is_complete:
            status = run_attempt(
                options.card,
                options.submission,
                foreground_nodes=rendezvous.nodes,
                environment=environment,
                peers=peers,
            )
            status, why = final_word(config, environment, status, options.until_finished)
        elif why:
            status = EXIT_ERROR
            if peers.is_refused:
                status = EXIT_REFUSED
            say(f"tr11: nothing was started: {why}")
        else:
            if stop.received and options.until_finished:
                status = EXIT_ERROR
            else:
                status = EXIT_FINE
            if stop.received:
                cause = f"{signal.Signals(stop.received[0]).name} received"
            else:
                cause = "the kill switch is set"
            why = f"{cause} before the workers were started"
            say(f"tr11: {why}: leaving")
        return status
    finally:
        if peers is not None:
            peers.finish(status, why)
        remove_meeting_key(config.paths)


def say(line: str) -> None:
    print(line, flush=True)


def final_word(
    config: RunCard, environment: Mapping[str, str], status: int, until_finished: bool
) -> tuple[int, str]:
    """The exit status of an attempt in the foreground, and how it ended.

    With `until_finished` it is 1 in place of 0 where there is more to train: for what starts
    containers again.
    """
    folder = config.paths.attempt(environment.get("TR11_JOB_ID", ""))
    verdict = known(observed(AttemptVerdict.read, folder), None)
    if verdict is None:
        return status, "its verdict cannot be read"
    detail = ""
    if verdict.exit_status != EXIT_FINE:
        detail = f": {verdict.message}"
    if status == EXIT_FINE and verdict.restart and until_finished:
        say("tr11: the training is not finished: exit status 1, as --until-finished asks")
        status = EXIT_ERROR
    return status, f"{verdict.reason}{detail}"


def look_after_switch(directory: RunDirectory, name: str, say: Callable[[str], None]) -> str:
    """Mark the switch of a run that never was, and say in its log where the switch cannot be seen;
    returns why.
    """
    fault = place_fault(directory)
    if fault:
        say(
            f"tr11: ALERT: the kill switch cannot be seen from {host_name()}, so that it stops nothing here: {fault} "
            "(runbook: switch-unseen)"
        )
    elif observed(lambda: look_at_switch(directory).note):
        marked = observed(mark_switch, directory, name)
        if isinstance(marked, Unknown):
            say(f"tr11: the place of the kill switch could not be marked: {marked.why}")
    return fault


def _begin(context: AttemptContext, tee: LineTee) -> str:
    """Why this job must not train, "" when it may; the next one of its chain is queued."""
    if context.scheduler is None:
        return ""
    number = context.allocation.array_id or context.allocation.job_id
    return begin_attempt(
        BatchJob(
            context.config,
            context.directory,
            number=number,
            submission=context.submission,
            scheduler=context.scheduler,
            say=tee.line,
        )
    )


def with_scheduler(context: AttemptContext) -> AttemptContext:
    """The scheduler that gave the allocation: to change queued jobs, and for the quick question
    between launches.
    """
    if context.allocation.kind == "slurm":
        from tr11ops.cluster.slurm import SlurmScheduler

        slurm = SlurmScheduler(timeout_seconds=SCHEDULER_SECONDS)
        quick = SlurmScheduler(timeout_seconds=STATES_SECONDS)
        ordering = None
        if context.config.slurm.spare_nodes > 0:  # the allocation lives on
            ordering = slurm
        watch = JobWatch(quick, context.job_id)
        return replace(context, scheduler=slurm, states=quick, ordering=ordering, watch=watch)
    if context.allocation.kind == "local":
        from tr11ops.cluster.local import LocalScheduler

        return replace(context, scheduler=LocalScheduler())
    return context


def read_resolved(path: Path) -> tuple[dict[str, Any], RunCard]:
    """The card of this attempt, as `tr11 launch` resolved it, and as read. Raises CardError when it
    cannot be read.
    """
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise CardError(
            str(path), [Problem("file", None, f"cannot be read ({error})", "launch again")]
        ) from None
    if value is None:
        raise CardError(
            str(path), [Problem("file", None, "cannot be read (it is not there)", "launch again")]
        )
    return value, card_from_resolved(value, str(path))


def attempt_record(
    allocation: Allocation, card: Path, submission: str, software: Mapping[str, Any]
) -> dict[str, Any]:
    """What is kept of an attempt as `attempt.json`, beside what has changed since the last one."""
    return {
        **document(allocation),
        "submission": submission,
        "card": str(card),
        "batch_host": host_name(),
        "pid": os.getpid(),
        "start": time.time(),
        **software,
    }


def has_begun(environment: Mapping[str, str]) -> None:
    """Tell the batch script that its agent lives, and take away the mark of a start that came to
    nothing.
    """
    tell_script(environment, "begun")
    if environment.get("TR11_START"):
        with suppress(OSError):
            Path(environment["TR11_START"]).unlink(missing_ok=True)


def tell_script(environment: Mapping[str, str], word: str) -> None:
    """Leave the batch script a word, in the folder of this machine that it named, where that can be
    written.
    """
    folder = environment.get("TR11_EARLY")
    if folder:
        with suppress(OSError):
            Path(folder, word).touch()


def share_output(descriptor: int) -> None:
    """Let the run's group read a job's own output, which the scheduler made with its user's umask."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            share_file(descriptor)


def exit_status(act: Callable[[], int], fault: str) -> int:
    """The exit status that `act` returns, as a batch script needs it; of an error, which is printed
    after `fault`.
    """
    try:
        status = act()
        # it has seen to queued jobs, also where no verdict could be written
        tell_script(os.environ, "told")
        return status
    except CardError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except (OSError, RuntimeError) as error:
        print(f"tr11: {fault}: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tr11ops.agent.batch", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--card", type=Path, required=True, help="resolved card (JSON)")
    parser.add_argument(
        "--submission", default="", help="tag of the submission this attempt belongs to"
    )
    parser.add_argument(
        "--foreground-nodes",
        type=int,
        default=None,
        help="play this many nodes here, without a scheduler",
    )
    parser.add_argument(
        "--master", default="", help="HOST:PORT where those nodes, other machines, join this one"
    )
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for them")
    parser.add_argument(
        "--until-finished", action="store_true", help="exit status 1 while there is more to train"
    )
    options = parser.parse_args(arguments)
    has_begun(os.environ)
    if options.foreground_nodes is None:
        share_output(sys.stdout.fileno())
    return exit_status(partial(_run, options), "the attempt could not be run")


def _run(options: argparse.Namespace) -> int:
    if options.master:
        return run_with_peers(options, os.environ)
    status = run_attempt(options.card, options.submission, options.foreground_nodes, os.environ)
    if options.until_finished:
        status, _ = final_word(read_resolved(options.card)[1], os.environ, status, True)
    return status


if __name__ == "__main__":
    leave(main())
