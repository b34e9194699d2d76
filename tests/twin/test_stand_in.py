"""The stand-in worker: refused on every real cluster, ends as a training ends, and loses no step on
the way.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.twin.rehearsal_inputs import ends_of, rehearsal_card, steps_of, write_resolved
from tests.waiting import PATIENCE_SECONDS, until
from tr11ops.agent.allocation import free_port
from tr11ops.cluster.rehearsal import REHEARSAL_FIX, rehearsal_refusal
from tr11ops.dialects.reading import step_record
from tr11ops.runcard.card import RunCard, load_card, shipped_cards, shipped_folder
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinFolders, TwinPlan, TwinPorts, TwinSite, slurm_conf, twin_record
from tr11ops.twin.stand_in import checkpoint, launcher
from tr11ops.twin.stand_in.crew import RankLost, StandInGroup
from tr11ops.twin.stand_in.worker import COPIES_DIFFER
from tr11ops.twin.twin import Twin
from trainer.config.card import CardError
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry, Manifest, file_digest, manifest_faults
from trainer.schedule.path import Progress


# ----------------------------------------------------------------------------- where it may run
@pytest.fixture
def twin_files(tmp_path: Path) -> TwinFolders:
    """The two files by which a twin is known."""
    plan, folders = TwinPlan(name="known", nodes=2), TwinFolders(tmp_path)
    site = TwinSite(plan, folders, TwinPorts(plan, 20032), "m")
    folders.record.write_text(json.dumps(twin_record(site)))
    folders.slurm_conf.write_text(slurm_conf(site, "root", (22, 5)))
    return folders


def test_a_twin_is_taken(twin_files: TwinFolders) -> None:
    environment = {"SLURM_CONF": str(twin_files.slurm_conf)}
    assert rehearsal_refusal(environment) == ""
    node = {"SLURM_CLUSTER_NAME": "twin_known", "SLURMD_NODENAME": "jean-zay-iam02"}
    assert rehearsal_refusal({**environment, **node}) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_CONF": ""}, "/etc/slurm/slurm.conf is not a twin's"),
        ({"SLURM_CONF": "/etc/slurm/slurm.conf"}, "is not a twin's"),
        ({"TR11_SCHEDULER": "local"}, "the embedded scheduler (--scheduler local) is none"),
        ({"SLURM_CLUSTER_NAME": "jean-zay"}, "this job is of cluster jean-zay"),
        ({"SLURMD_NODENAME": "jean-zay-iam03"}, "node jean-zay-iam03 is not one of twin known"),
    ],
)
def test_every_other_scheduler_is_refused(
    twin_files: TwinFolders, change: dict[str, str], words: str
) -> None:
    refused = rehearsal_refusal({"SLURM_CONF": str(twin_files.slurm_conf), **change})
    assert words in refused and "trains nothing" in refused and "\n" not in refused


def test_the_scheduler_that_was_chosen_counts_and_the_fix_says_how_to_train_here(
    twin_files: TwinFolders,
) -> None:
    """Where the commands of a twin are at hand too."""
    refused = rehearsal_refusal({"SLURM_CONF": str(twin_files.slurm_conf)}, "local")
    assert refused.endswith("the embedded scheduler (--scheduler local) is none")
    assert "take the section out of the card to train here" in REHEARSAL_FIX
    assert rehearsal_refusal({"SLURM_CONF": str(twin_files.slurm_conf)}, "slurm") == ""
    assert "slurm.conf" not in rehearsal_refusal({}, "local")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plan": {}, "first_port": 1}', '{"plan": 3, "first_port": "x"}']
)
def test_a_record_that_is_no_twins_is_no_twin(twin_files: TwinFolders, text: str) -> None:
    twin_files.record.write_text(text)
    assert "is not a twin's" in rehearsal_refusal({"SLURM_CONF": str(twin_files.slurm_conf)})


def test_a_real_configuration_beside_a_twins_record_is_refused(twin_files: TwinFolders) -> None:
    twin_files.slurm_conf.write_text("ClusterName=jean-zay\nSlurmctldPort=20032\n")
    assert "is not what its twin wrote" in rehearsal_refusal(
        {"SLURM_CONF": str(twin_files.slurm_conf)}
    )


def test_only_the_rehearsal_card_asks_for_it() -> None:
    cards = {
        name: load_card(shipped_folder() / f"{name}.toml", keep_undefined=True)
        for name in shipped_cards()
    }
    assert [name for name, card in cards.items() if card.rehearsal is not None] == ["rehearsal"]
    full = cards["rehearsal"]
    assert (
        full.slurm.nodes,
        full.slurm.spare_nodes,
        full.world_size,
        full.data_parallel_degree,
    ) == (48, 4, 384, 8)


def test_started_by_hand_outside_a_twin_it_leaves_a_refusal(tmp_path: Path) -> None:
    card = rehearsal_card(tmp_path)
    path = write_resolved(card, tmp_path / "card.json")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "tr11ops.twin.stand_in", str(path)], env={**environment, "TR11_JOB_ID": "9"},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert (
        done.returncode == 2
        and len(done.stderr.splitlines()) == 1
        and "on a twin alone" in done.stderr
    )
    [end] = ends_of(card.paths)
    assert (end.reason, end.restart, end.job_id) == ("refused", False, "9")
    assert steps_of(card.paths) == []


def test_it_loads_no_torch() -> None:
    code = "import sys; import tr11ops.twin.stand_in.launcher; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_rehearsal_without_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"rehearsal\.time_scale"):
        rehearsal_card(tmp_path, ["rehearsal.time_scale=0"])


# ----------------------------------------------------------------------------- the crew
class Ranks:
    """Four ranks in threads of this process."""

    def __init__(self, timeout: float) -> None:
        port = free_port()
        self.crews = [StandInGroup(rank, 4, "127.0.0.1", port, timeout) for rank in range(4)]
        self.results: dict[int, Any] = {}

    def run(self, action: Callable[[StandInGroup], Any], ranks: range = range(4)) -> dict[int, Any]:
        def one(group: StandInGroup) -> None:
            try:
                self.results[group.rank] = action(group)
            except RankLost as error:
                self.results[group.rank] = error
                group.close()

        self.results = {}
        threads = [
            threading.Thread(target=one, args=(self.crews[rank],), daemon=True) for rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        return self.results


@pytest.fixture
def ranks() -> Iterator[Callable[[float], Ranks]]:
    made: list[Ranks] = []

    def make(timeout: float) -> Ranks:
        made.append(Ranks(timeout))
        assert made[-1].run(lambda group: group.join()) == dict.fromkeys(range(4))
        return made[-1]

    yield make
    for each in made:
        for group in each.crews:
            group.close()


def test_all_ranks_hear_the_same_in_every_meeting(ranks: Callable[[float], Ranks]) -> None:
    four = ranks(60.0)

    def meet_often(group: StandInGroup) -> list[Any]:
        return [group.meet("step", group.rank * 10 + number, list) for number in range(50)]

    expected = [[number, 10 + number, 20 + number, 30 + number] for number in range(50)]
    assert four.run(meet_often) == dict.fromkeys(range(4), expected)


@pytest.mark.parametrize("dead", range(4))
def test_a_dead_rank_ends_all_others_at_once(ranks: Callable[[float], Ranks], dead: int) -> None:
    four = ranks(600.0)

    def meet(group: StandInGroup) -> Any:
        if group.rank == dead:
            group.close()
            return "dead"
        return group.meet("step", 1, sum)

    results = four.run(meet)
    words = {rank: str(result) for rank, result in results.items() if rank != dead}
    assert len(words) == 3 and all("connection closed by rank" in text for text in words.values())
    assert f"rank {dead}" in words[1 if dead == 0 else 0]


def test_a_rank_that_hangs_is_named_after_the_time_out(ranks: Callable[[float], Ranks]) -> None:
    given_up = threading.Event()

    def meet(group: StandInGroup) -> Any:
        if group.rank == 2:
            return given_up.wait(PATIENCE_SECONDS)
        try:
            return group.meet("step", 1, sum)
        finally:
            if group.rank == 0:
                given_up.set()

    results = ranks(3.0).run(meet)
    assert "step timed out after 3 s: no word from rank 2 on " in str(results[0])
    assert all(isinstance(results[rank], RankLost) for rank in (1, 3))


def test_ranks_that_never_come_are_missed() -> None:
    alone = StandInGroup(0, 3, "127.0.0.1", free_port(), 0.5)
    with pytest.raises(RankLost, match="no word from rank 1 and 1 more"):
        alone.join()


# ----------------------------------------------------------------------------- checkpoints
def save(card: RunCard, step: int, world: int = 2, fence: Callable[[], None] = lambda: None) -> str:
    folder = card.paths.checkpoints
    chain = checkpoint.FIRST_LINK
    for number in range(1, step + 1):
        chain = checkpoint.next_link(chain, number, number * 8)
    partial = checkpoint.prepare(folder, step)
    parts = [FileEntry(**checkpoint.write_part(partial, rank, chain, 300)) for rank in range(world)]
    progress = Progress(iteration=step, consumed_samples=step * 8)
    checkpoint.publish(card, partial, progress, chain, parts, "hash", "1", world, fence)
    return chain


def test_a_checkpoint_is_whole_and_is_found_again(tmp_path: Path) -> None:
    card = rehearsal_card(tmp_path)
    folder = card.paths.checkpoints
    assert checkpoint.find(card, print) is None
    save(card, 5)
    chain = save(card, 10)
    place = card.paths.checkpoint(10)
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []
    assert read_latest(folder) == 10 == checkpoint.find(card, print)
    for rank in (0, 1, 7):
        progress, loaded = checkpoint.load(folder, 10, rank)
        assert (progress.iteration, progress.consumed_samples, loaded) == (10, 80, chain)
    (place / checkpoint.rank_file(1)).write_bytes(b"x" * 300)
    said: list[str] = []
    assert checkpoint.find(card, said.append) == 5
    assert "digest differs" in said[0]


def test_who_was_superseded_publishes_nothing(tmp_path: Path) -> None:
    card = rehearsal_card(tmp_path)
    save(card, 5)

    def fence() -> None:
        raise ValueError("superseded")

    with pytest.raises(ValueError, match="superseded"):
        save(card, 10, fence=fence)
    assert read_latest(card.paths.checkpoints) == 5 and not card.paths.checkpoint(10).exists()


def test_a_real_trainings_checkpoint_is_not_touched(tmp_path: Path) -> None:
    card = rehearsal_card(tmp_path)
    write_checkpoint(card.paths.checkpoints, 7)
    with pytest.raises(CheckpointError, match="written by a real training"):
        checkpoint.find(card, print)


# ----------------------------------------------------------------------------- how it ends
ONE_NODE = (
    "import sys; from pathlib import Path; from tr11ops.twin.stand_in.launcher import NodePlaces, launch; "
    "sys.exit(launch(Path(sys.argv[1]), NodePlaces(1, 0, 4, '127.0.0.1', int(sys.argv[2]))))"
)


def run_on_one_node(card: RunCard, folder: Path) -> subprocess.CompletedProcess[str]:
    """Four workers on this machine, to their end."""
    words = [sys.executable, "-c", ONE_NODE, str(write_resolved(card, folder / "card.json"))]
    return subprocess.run(
        [*words, str(free_port())], text=True, capture_output=True, timeout=PATIENCE_SECONDS,
        env={**os.environ, "TR11_JOB_ID": "5"},
    )  # fmt: skip


def short(folder: Path, steps: int) -> RunCard:
    words = ["rehearsal.start_seconds=1", f"batch.train_samples={steps * 8}"]
    return rehearsal_card(folder, [*words, f"schedule.decay_samples={steps * 8 - 1}"])


def test_an_end_that_cannot_be_recorded_is_one_line(tmp_path: Path) -> None:
    card = short(tmp_path, 6)
    place = card.paths.attempt("5")
    place.parent.mkdir(parents=True)
    place.touch()  # where the marker's folder belongs: rights keep root from nothing
    done = run_on_one_node(card, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said, said
    (line,) = [line for line in said.splitlines() if "tr11: stopped: " in line]
    assert "the end (finished) could not be recorded: " in line and str(place) in line
    assert read_latest(card.paths.checkpoints) == 6, "the work was saved"


def test_a_rank_that_refuses_ends_the_others_with_one_line_each(tmp_path: Path) -> None:
    card = short(tmp_path, 12)
    assert run_on_one_node(short(tmp_path, 6), tmp_path).returncode == 0
    # whole by its size, and another's: each rank reads its own alone
    part = card.paths.checkpoint(6) / checkpoint.rank_file(2)
    manifest = Manifest.read(card.paths.checkpoint(6))
    assert manifest is not None
    part.write_bytes(part.read_bytes().replace(b'"rank": 2', b'"rank": 3'))
    entries = [
        replace(entry, digest=file_digest(part)) if entry.path == checkpoint.rank_file(2) else entry
        for entry in manifest.files
    ]
    replace(manifest, files=tuple(entries)).write(card.paths.checkpoint(6))
    done = run_on_one_node(card, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said, said
    assert said.count("tr11: refused: ") == 1, said
    assert said.count("which refused: its own line says why") == 3, said


# ----------------------------------------------------------------------------- on the twin
STEPS = 90  # of a tenth of a second: seconds are left to act in on a machine with other work
STEP = (
    'exec "$0" -m tr11ops.twin.stand_in "$1" --nnodes 2 --node-rank "$SLURM_NODEID" --nproc-per-node 2 '
    '--master-port "$2"'
)


class Rehearsal:
    """A card, and steps of stand-in workers on two nodes of the shared twin."""

    def __init__(self, twin: Twin, folder: Path) -> None:
        self.twin = twin
        self.card = rehearsal_card(
            folder,
            [
                "rehearsal.collective_seconds=60",
                f"batch.train_samples={STEPS * 8}",
                f"schedule.decay_samples={STEPS * 8}",
            ],
        )
        self.path = write_resolved(self.card, folder / "card.json")

    def start(self, job: str) -> subprocess.Popen[str]:
        words = ["srun", "--nodes=2", "--time=10", "--kill-on-bad-exit=1", "bash", "-c", STEP]
        environment = {
            **os.environ,
            **self.twin.environment,
            "TR11_JOB_ID": job,
            "PYTHONPATH": str(Path.cwd()),
        }
        return subprocess.Popen(
            [*words, sys.executable, str(self.path), str(free_port())], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def until_step(self, iteration: int, process: subprocess.Popen[str]) -> None:
        def reached() -> bool:
            steps = steps_of(self.card.paths)
            return process.poll() is not None or (
                bool(steps) and steps[-1]["iteration"] >= iteration
            )

        until(reached, f"step {iteration}", pause=0.1)
        assert process.poll() is None, process.communicate()[0]

    def end(self, job: str) -> EndMarker | None:
        return EndMarker.read(self.card.paths.end_marker(job))


def test_a_failure_is_told_while_a_worker_beside_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun tells it: else the node agent could not end those that stay."""
    is_told = tmp_path / "told"
    said = b""

    def keep(line: bytes) -> None:
        nonlocal said
        said += line
        if b"failed (exitcode: 3) local_rank: 0" in line:
            is_told.touch()

    bodies = (
        "print('no port', flush=True); sys.exit(3)",
        "until(lambda: Path(sys.argv[1]).exists(), 'the word')",
    )
    start = "import sys; from pathlib import Path; from tests.waiting import until; "
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    with selectors.DefaultSelector() as selector, monkeypatch.context() as patch:
        patch.setattr(launcher, "_print", keep)
        workers = []
        for rank, body in enumerate(bodies):
            reading, writing = os.pipe()
            command = [sys.executable, "-c", f"{ignore}{start}{body}", str(is_told)]
            process = subprocess.Popen(command, stdout=writing)
            os.close(writing)
            os.set_blocking(reading, False)
            workers.append(launcher._Worker(rank, rank, process.pid, reading))
            selector.register(reading, selectors.EVENT_READ, workers[-1])
        assert launcher._watch(workers, selector, []) is workers[0]
    assert [worker.status for worker in workers] == [3, 0]
    assert said.index(b"[default0]:no port") < said.index(b"failed (exitcode: 3)")


def test_no_step_is_lost_through_a_crash_a_stop_and_two_resumes(twin: Twin, tmp_path: Path) -> None:
    require_slurm()
    place = Rehearsal(twin, tmp_path)
    first = place.start("a")
    place.until_step(12, first)
    crash = inject(twin, "worker-crash").fault
    out = first.communicate(timeout=PATIENCE_SECONDS)[0]
    assert first.returncode != 0 and place.end("a") is None
    assert (
        "failed (exitcode: -9) local_rank: 0" in out
        and f"srun: error: {crash.target}: task 1" in out
    )
    failures = {path.name for path in (place.card.paths.attempt("a") / "failures").iterdir()}
    assert failures == {"rank-0.json", "rank-1.json", "rank-3.json"}, (
        "rank 2 could not speak any more"
    )

    second = place.start("b")
    place.until_step(22, second)
    assert place.card.paths.heartbeat(3).exists()
    place.card.kill_switch.touch()
    out = second.communicate(timeout=PATIENCE_SECONDS)[0]
    assert second.returncode == 0, out
    end = place.end("b")
    assert end is not None and (end.reason, end.checkpoint_step) == ("kill-switch", end.iteration)
    place.card.kill_switch.unlink()

    saved = read_latest(place.card.paths.checkpoints)
    inject(twin, "weights-drift", node=crash.target)
    drifting = place.start("d")
    out = drifting.communicate(timeout=PATIENCE_SECONDS)[0]
    assert drifting.returncode != 0 and COPIES_DIFFER in out
    assert read_latest(place.card.paths.checkpoints) == saved, "nothing was saved"
    heal(twin, kind="weights-drift")

    third = place.start("c")
    out = third.communicate(timeout=PATIENCE_SECONDS)[0]
    end = place.end("c")
    assert (
        third.returncode == 0
        and end is not None
        and (end.reason, end.iteration) == ("finished", STEPS)
    ), out
    lines = [record for line in out.splitlines() if (record := step_record(line)) is not None]
    assert lines[0].iteration == place.end("b").iteration + 1  # type: ignore[union-attr]
    steps = steps_of(place.card.paths)
    assert {step["iteration"] for step in steps} == set(range(1, STEPS + 1))
    again = {(step["iteration"], step["consumed_samples"], step["lm_loss"]) for step in steps}
    assert len(again) == STEPS, "a step that was done twice was the same step"
    chain = checkpoint.FIRST_LINK
    for number in range(1, STEPS + 1):
        chain = checkpoint.next_link(chain, number, number * 8)
    assert checkpoint.load(place.card.paths.checkpoints, STEPS, 3)[1] == chain
