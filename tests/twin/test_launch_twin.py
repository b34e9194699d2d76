"""`tr11 launch`, `init` and `doctor` on a real Slurm: its `#SBATCH` lines, the card's own options, refusals,
arrays, and a frozen controller.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import enter, job_in
from tests.waiting import until
from tr11ops.base.errors import SubmissionUnknown
from tr11ops.cli.launch import prepare
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.launch.plan import render_script
from tr11ops.launch.session import carry_out, check_launch
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.twin import Twin

SLURM = "\n[slurm.environment]\nNOTE = \"a 'quoted' word\"\n"


@pytest.fixture
def place(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder with a card, in which commands reach the twin."""
    enter(twin, tmp_path, monkeypatch)
    write_card(tmp_path, extra=SLURM)
    yield tmp_path


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = execute(["launch", "--run", "small.toml", "--scheduler", "slurm", *words])
    out, err = capsys.readouterr()
    return code, out, err


def living(slurm: SlurmScheduler, name: str) -> list[Job]:
    return [job for job in slurm.jobs() if job.name == name and not job.state.is_final]


def test_an_array_is_submitted_once_and_queued_behind(
    place: Path, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tuple(
        name
        for partition in slurm.partitions()
        if partition.is_default
        for name in partition.node_names
    )
    blocker = slurm.submit(
        BatchRequest(
            "#!/bin/bash\nsleep 600\n",
            "block",
            len(nodes),
            900,
            str(place / "b.out"),
            place,
            gpus_per_node=8,
        )
    )
    job_in(slurm, blocker, [JobState.RUNNING], place)
    code, out, err = launch(capsys, "--array", "1-3", "--exclude", nodes[0], "--json", "--set", "slurm.gpus_per_node=8",
                            "--set", "slurm.workers_per_node=1")  # fmt: skip
    assert code == 0, out + err
    done = json.loads(out)
    [job] = living(slurm, "small")
    assert (
        job.raw_id == done["job_id"]
        and job.pending_tasks == (1, 2, 3)
        and job.excluded == (nodes[0],)
    )
    assert job.comment == done["plan"]["comment"] and job.time_limit_seconds == 600
    again = launch(capsys, "--array", "1-3")
    assert again[0] == 1 and f"queue behind it with `--after {job.raw_id}`" in again[1]
    behind = launch(capsys, "--array", "1-2", "--after", str(job.raw_id), "--json")
    assert behind[0] == 0, behind
    second = next(
        found for found in living(slurm, "small") if found.raw_id == json.loads(behind[1])["job_id"]
    )
    assert str(job.raw_id) in second.dependency
    assert launch(capsys, "--after", "999999")[0] == 2
    assert launch(capsys, "--after", str(job.raw_id))[0] == 1


def test_slurms_own_refusals(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = launch(capsys, "--set", "slurm.constraint=no-such-feature", "--allow-namesake")
    assert code == 2 and "slurm.constraint: 'no-such-feature' is refused by slurm" in out
    assert launch(capsys, "--exclude", "stranger[1-2]")[0] == 2
    assert launch(capsys, "--set", "slurm.partition=no-such")[0] == 2
    assert not (place / "run").exists()


@pytest.mark.parametrize("name", ["plain", "a b", "a'b", 'a"b', "a$HOME", "a#b", "ä;x"])
def test_slurm_reads_the_same_options_from_the_script(
    place: Path, slurm: SlurmScheduler, name: str
) -> None:
    """`sbatch SCRIPT` by hand does what `tr11 launch` did, whatever the run directory is called."""
    folder = place / name
    folder.mkdir()
    folder.chmod(0o777)
    request = BatchRequest(
        "",
        "by-hand",
        1,
        120,
        "%x-%j.out",
        folder,
        comment="tr11:20260101-000000-00000000@0123456789ab",
    )
    text = render_script(
        request, variant="main", tag="t", command=[sys.executable, "-c", "import os; print('IN', os.getcwd())"],
        setup=[], environment={},
    )  # fmt: skip
    script = place / "by-hand.sbatch"
    script.write_text(text)
    done = subprocess.run(
        ["sbatch", str(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env=dict(os.environ),
    )
    number = re.findall(r"\d+", done.stdout)[-1]
    job = job_in(slurm, number, [JobState.COMPLETED], folder)
    assert job.exit_code == 0 and job.comment == request.comment
    assert f"IN {folder}\n" in (folder / f"by-hand-{number}.out").read_text()


# ---------------------------------------------------------------------- a controller that is frozen
@contextmanager
def thawed_in_the_end(twin: Twin) -> Iterator[None]:
    """The controller goes on after this, and takes up what lies before its door."""
    try:
        yield
    finally:
        os.kill(twin.process("slurmctld").pid, signal.SIGCONT)


class SentToFrozen(SlurmScheduler):
    """Its client is killed while it waits for the answer of a controller that freezes at that very
    moment.
    """

    def __init__(self, twin: Twin) -> None:
        super().__init__(twin.environment)
        self._twin = twin

    def submit(self, request: BatchRequest) -> str:
        os.kill(self._twin.process("slurmctld").pid, signal.SIGSTOP)
        self._timeout_seconds = 3.0  # nothing will answer: a shorter test
        return super().submit(request)


def test_a_controller_frozen_while_sent_to_never_gives_two_jobs(
    place: Path,
    twin: Twin,
    slurm: SlurmScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured without the look-up: three tries, three jobs."""
    nodes = tuple(
        name
        for partition in slurm.partitions()
        if partition.is_default
        for name in partition.node_names
    )
    slurm.submit(BatchRequest("#!/bin/bash\nsleep 600\n", "block", len(nodes), 900, str(place / "b.out"), place,
                              gpus_per_node=8))  # fmt: skip
    words = ["slurm.gpus_per_node=8", "slurm.workers_per_node=1"]
    monkeypatch.setattr("tr11ops.launch.submit.LOOKUPS", 2)
    monkeypatch.setattr("tr11ops.launch.submit.LOOKUP_PAUSE_SECONDS", 0.5)
    job = replace(prepare("small.toml", words, "slurm", array="1-3"), scheduler=SentToFrozen(twin))
    with thawed_in_the_end(twin):
        with pytest.raises(SubmissionUnknown, match="the job may exist"):
            carry_out(job, check_launch(job), "")
        for _ in range(2):  # a person who tries again while nothing answers
            silent = check_launch(job)
            assert silent.exit_code == 3 and silent.plan is None
    found = until(lambda: living(slurm, "small"), "the job that was sent", context=slurm.jobs)
    for _ in range(2):  # and again, once it does
        code, out, _ = launch(
            capsys, "--array", "1-3", *(word for value in words for word in ("--set", value))
        )
        assert code == 1 and f"queue behind it with `--after {found[0].raw_id}`" in out
    # a second one would wait too
    assert [entry.raw_id for entry in living(slurm, "small")] == [found[0].raw_id]
    assert [entry.job_id for entry in job.directory.read_submissions()] == [None]
    behind = launch(
        capsys, "--after", found[0].raw_id, *(word for value in words for word in ("--set", value))
    )
    assert behind[0] == 0, behind
    # the next launch has settled what the first left in doubt
    first, _ = job.directory.read_submissions()
    assert (first.job_id, first.note) == (found[0].raw_id, "")


def test_a_card_of_init_passes_the_doctor(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = [f"data.prefixes=['{place}/data/corpus']", f"tokenizer.path={place}/data/tokenizer",
             "model.sequence_length=16"]  # fmt: skip
    assert (
        execute(
            [
                "init",
                "--yes",
                "--scheduler",
                "slurm",
                *(word for item in known for word in ("--set", item)),
            ]
        )
        == 0
    )
    text = (place / "tr11.toml").read_text()
    assert (
        'partition = "gpu_p5"' in text
        and "gpus_per_node = 8" in text
        and "6 of 6 nodes with 8 GPUs" in text
    )
    capsys.readouterr()
    assert execute(["doctor", "--scheduler", "slurm", "--array", "1-10", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert (
        checks["chain"]["text"].startswith("10 attempts: a job array")
        and checks["clocks"]["level"] == "ok"
    )
    assert (
        checks["slurm commands"]["level"] == "ok" and "would take it" in checks["scheduler"]["text"]
    )


# ---------------------------------------------------------------------------
# `[slurm.options]` on a real Slurm: what is passed through is what the job has, and a refusal
# names the card's key.


CARD = '[slurm.options]\nexclusive = true\nmem = "1000M"\nnice = 7\nswitches = "1@04:00"\ngres = "gpu:2"\n'


@pytest.fixture
def run(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunDirectory]:
    """A card with options in the current folder, whose job waits for a partition that is down."""
    enter(twin, tmp_path, monkeypatch)
    path = write_card(tmp_path)
    path.write_text(
        path.read_text().replace("nodes = 2\n", "nodes = 2\ngpus_per_node = 2\n") + "\n" + CARD
    )
    card = load_card(path, [], {}, directory=tmp_path)
    scontrol("update", "partitionname=gpu_p5", "state=DOWN")
    yield RunDirectory(card.paths, card.kill_switch)
    scontrol("update", "partitionname=gpu_p5", "state=UP")


def scontrol(*words: str) -> str:
    done = subprocess.run(
        ["scontrol", *words], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    return done.stdout


def test_what_the_card_passes_through_is_what_the_job_has(
    run: RunDirectory, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["launch", "--array", "1-2", "--run", "small.toml", "--scheduler", "slurm"]) == 0
    said = capsys.readouterr().out
    assert "options  exclusive, mem=1000M, nice=7, switches=1@04:00, gres=gpu:2" in said
    [job] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    shown = scontrol("show", "job", job.raw_id)
    for words in (
        "OverSubscribe=NO",
        "MinMemoryNode=1000M",
        "Nice=7",
        "Switches=1@00:04:00",
    ):
        assert words in shown, shown
    # before Slurm 24.11 it stands behind a colon
    assert "TresPerNode=gres:gpu:2" in shown or "TresPerNode=gres/gpu:2" in shown, shown
    [submission] = run.read_submissions()
    script = run.submission(submission.tag).script.read_text()
    assert "#SBATCH --exclusive\n" in script and "#SBATCH --gres=gpu:2\n" in script


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("licenses=none-such", "slurm.options.licenses: 'none-such' is refused by slurm"),
        ("licences=scratch", "slurm.options.licences: 'scratch' is refused by slurm"),
        ("mem=999G", "slurm.options.mem: 1022976 MB of memory a node are needed"),
    ],
)
def test_a_refusal_names_the_key(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    code = execute(
        [
            "launch",
            "--run",
            "small.toml",
            "--scheduler",
            "slurm",
            "--set",
            f"slurm.options.{change}",
        ]
    )
    assert (code, words in (said := capsys.readouterr().out)) == (2, True), said
