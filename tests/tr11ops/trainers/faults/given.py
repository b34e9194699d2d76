"""The ten faults: how each is given to a training that runs, and what a person does about it, if anything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.tr11ops.trainers.faults.run import FaultRun, TooLate
from tr11ops.rundir.action_log import OUTCOME
from tr11ops.rundir.journal import read_journal
from trainer.contract.record import Record

DISK_BYTES = 64 << 20
BALLAST = "core.python.4711"


class Given(Record):
    """What was done. `node`: the one that was really at fault, "" for none. `during`: what `tr11 status`
    said while the fault was there. `person`: what a person had to do.
    """

    node: str = ""
    during: str = ""
    person: str = ""


class Fault(Record):
    """One row of the table. `give` launches a run, gives it the fault and sees it to its end. Raises
    TooLate, OSError.

    `ends`: the end that is right; `verdict`: of `tr11 status` then; `meanwhile`: a word of what it has to say
    while the fault is there, "" where that is not looked at.
    """

    name: str
    what: str
    give: Callable[[FaultRun], Given]
    ends: str = "finished"
    verdict: str = "FINISHED"
    meanwhile: str = ""


def worker_killed(run: FaultRun) -> Given:
    _train(run)
    run.worker(1).kill()
    run.until_idle()
    return Given()


def node_dead(run: FaultRun) -> Given:
    _train(run)
    node = run.node_of(1)
    run.site.lose(run.folder, node)
    run.until_idle()
    return Given(node=node)


def hang(run: FaultRun) -> Given:
    """Rank 1 waits for ever, and the other one for it. The watchdog looks each few seconds, as cron would
    each few minutes; it has to have seen 20 steps of the run, to know what is long. A rank that is stopped
    by a signal is no such case: someone may be looking at it, so that people are told and nothing is ended.
    """
    if not run.trainer.hang:
        raise TooLate("this trainer cannot be given a hang")
    run.trainer = run.trainer.longer(2 * run.trainer.steps)
    step = run.trainer.steps // 2 + 3
    run.write_card(**{run.trainer.hang: str(step)})
    run.begin("--array", "1-3")
    run.until_step(step - 1)
    said = [run.status()]

    def is_ended() -> bool:
        run.tr11("pulse", "--act", "--no-email")
        said.append(run.status())
        return _has_cancelled(run)

    try:
        run.until(is_ended, "an end of the hang by the watchdog", 900)
    except TooLate as error:
        raise TooLate(f"{error}: {said_of(said[-1])}") from None
    run.until_idle()
    hung = [text for text in said if _first(text) not in {"HEALTHY", "SLOW"}]
    return Given(during=said_of((hung or said)[0]))


def broken_newest(run: FaultRun) -> Given:
    """Stopped in order; the newest checkpoint loses half of a file; launched again."""
    _train(run)
    _stop(run)
    newest = run.newest()
    if newest is None or newest.step == run.trainer.steps:
        raise TooLate("it was not stopped before its last step")
    place = run.checkpoints / newest.name / run.trainer.cut
    if not run.trainer.cut:
        place = run.checkpoints / newest.name
    os.truncate(place, place.stat().st_size // 2)
    run.forget(newest.name)
    return Given(person=_bring_back(run))


def disk_full(run: FaultRun) -> Given:
    """The disk that the whole run directory is on; a person makes room when tr11 has given up, or after
    a minute.
    """
    run.root.mkdir(parents=True)
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(run.root)], check=True)
    ballast = run.root / BALLAST
    try:
        _train(run)
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with suppress(TooLate):
            run.until_idle(60)
        during = run.status()
        ballast.unlink()
        person = f"made room; {_bring_back(run)}"
        return Given(during=said_of(during), person=person)
    finally:
        ballast.unlink(missing_ok=True)


def killed_in_save(run: FaultRun) -> Given:
    _train(run)
    run.kill_in_save()
    run.until_idle()
    return Given()


def time_limit(run: FaultRun) -> Given:
    """Two tasks, of which the first cannot reach the last step."""
    seconds = 80.0 / run.trainer.steps * run.patience
    length = int((60.0 + run.trainer.start_seconds) * run.patience)
    limit = f"00:{length // 60:02}:{length % 60:02}"
    run.write_card(seconds, limit, "signal_seconds_before_limit = 20")
    run.begin("--array", "1-4")
    run.until_idle(600)
    return Given()


def kill_switch(run: FaultRun) -> Given:
    _train(run)
    _stop(run)
    return Given()


def second_launch(run: FaultRun) -> Given:
    _train(run)
    done = run.launch()
    said = done.stdout + done.stderr
    if done.returncode == 0 or "nothing was submitted" not in said:
        raise TooLate(f"the second launch was not refused: {said}")
    run.until_idle()
    return Given()


def not_finite(run: FaultRun) -> Given:
    if run.trainer.nan is None:
        raise TooLate("this trainer cannot be given a NaN")
    name, value = run.trainer.nan
    run.write_card(**{name: value})
    run.begin("--array", "1-3")
    run.until_step(int(value))
    said = [run.status()]
    while _NAN not in said[-1] and run.step() < run.trainer.steps - 1:
        said.append(run.status())
    run.until_idle()
    return Given(during=said_of(said[-1] if _NAN in said[-1] else said[0]))


_NAN = "not a number"


FAULTS = {
    one.name: one
    for one in (
        Fault("worker-killed", "a worker is killed", worker_killed),
        Fault("node-dead", "a node dies", node_dead),
        Fault("hang", "a rank waits for ever", hang, meanwhile="hangs"),
        Fault("broken-newest", "the newest checkpoint is cut", broken_newest),
        Fault("disk-full", "the disk is full", disk_full, meanwhile="DOWN"),
        Fault("killed-in-save", "all ranks killed in a save", killed_in_save),
        Fault("time-limit", "the time limit", time_limit),
        Fault("kill-switch", "the kill switch", kill_switch, ends="kill-switch", verdict="STOPPED"),
        Fault("second-launch", "a second launch, which is refused", second_launch),
        Fault("nan", "a loss is NaN", not_finite, meanwhile=_NAN),
    )
}


def _train(run: FaultRun) -> None:
    """Launch it, and let it save once and train a step more."""
    run.write_card()
    run.begin("--array", "1-3")
    run.until_saved(run.trainer.interval)
    run.until_step(run.trainer.interval + 1)


def _stop(run: FaultRun) -> None:
    done = run.tr11("kill", "--yes", "--reason", "a fault is tried")
    if done.returncode != 0:
        raise TooLate(f"tr11 kill: {done.stdout}{done.stderr}")
    run.until_idle()


def _bring_back(run: FaultRun) -> str:
    """What a person types until it is finished; which commands those were."""
    typed = []
    if run.tr11("resume", "--yes", "--reason", "a fault is over").returncode == 0:
        typed.append("tr11 resume")
    with suppress(TooLate):
        run.until_idle()
    if not _is_finished(run):
        run.begin("--array", "1-3")
        typed.append("tr11 launch")
        run.until_idle()
    return ", ".join(typed)


def _is_finished(run: FaultRun) -> bool:
    return any(end.reason == "finished" for end in run.ends())


def _first(text: str) -> str:
    return (text.split() or [""])[0]


def _has_cancelled(run: FaultRun) -> bool:
    """Whether the watchdog has ended a job of the run, by its own record."""
    entries = read_journal(run.root / "journal").entries
    acts = [entry.data for entry in entries if entry.kind == OUTCOME]
    return any(act.get("action") == "cancel" and act.get("result") == "done" for act in acts)


def said_of(status: str) -> str:
    """The verdict of `tr11 status`, with its reason: the lines of its first paragraph."""
    lines = []
    for line in status.strip().splitlines():
        if not line.strip() and len(lines) > 1:
            break
        lines.append(" ".join(line.split()))
    return " | ".join(line for line in lines if line)


def unmount(folder: Path) -> None:
    """What a full disk left behind."""
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    """Whether a small disk can be made here, as the fault of a full one needs it."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and done.returncode == 0
