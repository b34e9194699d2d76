"""`tr11 backup`, typed: what it shows, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from msgspec.structs import replace

from tests.tr11ops.backup.copy_cases import OddArchive, contents, make_checkpoint
from tests.tr11ops.backup.round_cases import SMALL, flip
from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.saving import save
from tr11ops.backup import round_values
from tr11ops.backup.archives import open_archive
from tr11ops.backup.base import Archive
from tr11ops.backup.submit import jobs_of
from tr11ops.backup.transfer import RetriedArchive
from tr11ops.cli.main import execute
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.stand_in.checkpoint import VERSIONS
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import Manifest
from trainer.contract.paths import RunPaths


class Desk:
    """A bench with a card that copies to two folders, and with checkpoints."""

    def __init__(self, bench: LocalBench) -> None:
        self.bench = bench
        self.store, self.bucket = bench.folder / "archive", bench.folder / "bucket"
        for folder in (self.store, self.bucket):
            folder.mkdir()
        self.changes = [
            f"backup.store={self.store}", f"backup.url=file://{self.bucket}", "backup.store_interval=100",
            "backup.full_interval=300", "backup.weights_interval=100", "backup.milestone_percent=0",
        ]  # fmt: skip
        shown = bench.tr11("doctor", "--help")
        assert shown.code == 0
        from tr11ops.runcard.card import load_card

        card = load_card(bench.card, self.changes, os.environ)
        self.directory = RunDirectory(card.paths, card.kill_switch)
        self.paths: RunPaths = card.paths

    def save(self, *steps: int) -> None:
        for step in steps:
            make_checkpoint(self.paths.checkpoints, step, SMALL)
            (self.paths.checkpoints / "latest").write_text(f"global_step{step}")

    def backup(self, *words: str) -> Answer:
        given = [word for change in self.changes for word in ("--set", change)]
        return self.bench.tr11("backup", *words, "--run", str(self.bench.card), *given)


@pytest.fixture
def nodes_context(bench: LocalBench) -> Desk:
    return Desk(bench)


def test_plan_run_status_verify(nodes_context: Desk) -> None:
    nodes_context.save(100, 150, 300)
    plan = nodes_context.backup("plan")
    assert plan.code == 0 and "4 copies are due" in plan.out and "store_interval 100" in plan.out
    assert "not copied, no key of [backup] asks for it: 150" in plan.out
    assert max(map(len, plan.out.splitlines())) <= 80
    dry = nodes_context.backup("run", "--dry-run")
    assert dry.out == plan.out and not any(nodes_context.store.rglob("*.copy.json"))
    done = nodes_context.backup("run", "--json")
    assert done.code == 0 and done.json["schema"] == 1 and done.json["exit_code"] == 0
    assert [copy["step"] for copy in done.json["archives"][0]["copied"]] == [300, 100], (
        "the newest first"
    )
    status = nodes_context.backup("status")
    assert (
        status.code == 0
        and "2 full" in status.out
        and "step 300, whole and read back" in status.out
    )
    assert nodes_context.backup("verify", "--all").code == 0
    again = nodes_context.backup("run")
    assert again.out.splitlines()[0] == "store: nothing was due"
    assert nodes_context.backup("plan", "--json").json["due"] == []


def test_damage_is_shown_and_repaired(nodes_context: Desk) -> None:
    nodes_context.save(100)
    nodes_context.backup("run")
    flip(nodes_context.store / "checkpoints/main/global_step100/optimizer/b", 3)
    found = nodes_context.backup("verify", "100")
    assert found.code == 1 and "DAMAGED: step 100 (full): optimizer/b" in found.out
    assert "other bytes than were copied" in found.err
    status = nodes_context.backup("status")
    assert (
        status.code == 1 and "DAMAGED" in status.out and "whole in the run directory" in status.out
    )
    assert "the copy is damaged" in nodes_context.backup("plan").out
    assert nodes_context.backup("run").code == 0 and nodes_context.backup("status").code == 0


@pytest.mark.usefixtures("reader_here")
def test_latest_stays_under_a_live_trainer_and_on_what_resumes(nodes_context: Desk) -> None:
    nodes_context.save(100, 300)
    nodes_context.backup("run")
    for step in (100, 300):
        shutil.rmtree(nodes_context.paths.checkpoints / f"global_step{step}")
    into = str(nodes_context.paths.checkpoints)
    (nodes_context.paths.checkpoints / "latest").write_text("global_step7")
    weights = nodes_context.backup("restore", "100", "--into", into, "--kind", "weights")
    assert (
        weights.code == 1
        and "this copy holds the weights alone, from which this run does not resume" in weights.err
    )
    assert LeaseFolder(nodes_context.paths).claim(
        1, LeaseClaim("1007", 1, "n01", 1, "ana", 1.0, "token", epoch=1)
    )
    refused = nodes_context.backup("restore", "300", "--into", into, "--latest")
    assert refused.code == 1 and "is being trained by job 1007" in refused.err
    assert [path.name for path in nodes_context.paths.checkpoints.iterdir()] == [
        "latest"
    ] and read_latest(nodes_context.paths.checkpoints) == 7
    assert nodes_context.backup("restore", "300", "--into", into).code == 0, (
        "beside a living trainer, latest untouched"
    )
    assert read_latest(nodes_context.paths.checkpoints) == 7
    shutil.rmtree(nodes_context.paths.state / "lease")
    assert nodes_context.backup("restore", "300", "--into", into, "--latest").code == 0
    assert read_latest(nodes_context.paths.checkpoints) == 300
    without = {path: size for path, size in SMALL.items() if not path.startswith("optimizer/")}
    make_checkpoint(nodes_context.paths.checkpoints, 400, without)
    nodes_context.backup("run", "400", "--to", "store")
    shutil.rmtree(nodes_context.paths.checkpoints / "global_step400")
    made = nodes_context.backup("restore", "400", "--from", "store", "--into", into, "--latest")
    assert (
        made.code == 1
        and "no training resumes from global_step400: it holds weights alone" in made.err
    )
    assert read_latest(nodes_context.paths.checkpoints) == 300


@pytest.mark.usefixtures("reader_here")
def test_restore(nodes_context: Desk) -> None:
    nodes_context.save(300)
    nodes_context.backup("run")
    shutil.rmtree(nodes_context.paths.checkpoints / "global_step300")
    into = nodes_context.bench.folder / "again"
    assert (
        nodes_context.backup("restore", "300", "--into", str(into), "--dry-run").code == 0
        and not into.exists()
    )
    back = nodes_context.backup("restore", "300", "--into", str(into), "--latest")
    assert back.code == 0 and (into / "latest").read_text() == "global_step300"
    assert contents(into / "global_step300") == contents(
        nodes_context.store / "checkpoints/main/global_step300"
    )
    one = nodes_context.backup(
        "restore", "300", "--from", "url", "--file", "weights/a", "--into", str(into), "--json"
    )
    assert one.json["path"] == str(into / "a") and (into / "a").stat().st_size == SMALL["weights/a"]
    missing = nodes_context.backup("restore", "999", "--into", str(into))
    assert missing.code == 1 and "no sound copy of step 999" in missing.err
    nowhere = nodes_context.backup("restore", "999", "--from", "store", "--into", str(into))
    assert nowhere.code == 1 and "holds no copy of step 999" in nowhere.err


def test_a_drill_with_the_trainers_own_reader(nodes_context: Desk) -> None:
    assert "no whole, sound copy" in nodes_context.backup("drill").err
    save(nodes_context.paths.checkpoints, 300)
    nodes_context.backup("run", "--no-logs")
    drill = nodes_context.backup("drill")
    assert drill.code == 0 and "drill passed: step 300" in drill.out, drill
    assert not (nodes_context.directory.root / "backup-drill").exists()
    status = nodes_context.backup("status")
    assert status.code == 0 and "step 300 from the url: passed" in status.out
    assert nodes_context.backup("status", "--json").json["drill"]["passed"]


def test_a_drill_of_a_rehearsal_says_that_there_are_no_tensors(nodes_context: Desk) -> None:
    folder = make_checkpoint(nodes_context.paths.checkpoints, 300, SMALL)
    replace(Manifest.read(folder), versions=VERSIONS).write(folder)  # type: ignore[type-var]
    nodes_context.backup("run", "--no-logs")
    drill = nodes_context.backup("drill")
    assert drill.code == 0 and "every digest agrees; it is a rehearsal's checkpoint" in drill.out, (
        drill
    )


def test_plan_and_status_say_that_the_store_is_not_there(nodes_context: Desk) -> None:
    nodes_context.save(100)
    nodes_context.store.rmdir()
    for words in (("plan",), ("run", "--dry-run"), ("status",)):
        said = nodes_context.backup(*words)
        assert (
            said.code == 1 and f"CANNOT BE USED: {nodes_context.store} is not there" in said.out
        ), said
    assert "mkdir" in nodes_context.backup("plan", "--json").json["faults"]["store"]
    assert "mkdir" in nodes_context.backup("status", "--json").json["archives"][0]["fault"]
    assert nodes_context.backup("run").code == 1
    told = nodes_context.backup("status").out
    assert told.count("is not there") == 1 and "FAILED: " in told, "it is said once"
    nodes_context.store.mkdir()
    assert nodes_context.backup("run").code == 0
    (nodes_context.store / "tr11-archive.json").unlink()  # as under an empty mount point
    assert "is its file system mounted?" in nodes_context.backup("plan").out


def test_nothing_is_pruned_because_of_a_store_that_is_gone(nodes_context: Desk) -> None:
    nodes_context.save(100, 200, 300, 400)
    nodes_context.backup("run")
    words = (
        "checkpoints",
        "prune",
        "--keep",
        "2",
        "--run",
        str(nodes_context.bench.card),
        "--dry-run",
        "--all",
    )
    changes = [word for change in nodes_context.changes for word in ("--set", change)]
    assert "2 to remove" in nodes_context.bench.tr11(*words, *changes).out
    nodes_context.store.rename(nodes_context.store.with_name("unmounted"))
    kept = nodes_context.bench.tr11(*words, *changes).out
    assert (
        "0 to remove" in kept
        and "is not known:" in kept
        and "is not there: is its file" in " ".join(kept.split())
    )


def test_rebuild(nodes_context: Desk) -> None:
    nodes_context.save(100)
    nodes_context.backup("run")
    before = nodes_context.backup("status", "--json").json["archives"][0]["copies"]
    shutil.rmtree(nodes_context.paths.state / "backup")
    assert "none yet" in nodes_context.backup("status").out
    assert (
        nodes_context.backup("status", "--rebuild", "--json").json["archives"][0]["copies"]
        == before
    )


def test_a_round_ends_with_prune_where_the_card_wants_that(nodes_context: Desk) -> None:
    nodes_context.changes += ["backup.prune=true", "backup.keep_latest=2"]
    nodes_context.save(100, 110, 120, 200, 300)
    done = nodes_context.backup("run", "--json")
    assert done.code == 0 and done.json["pruned"] == [100, 110, 120]
    assert not (nodes_context.paths.checkpoints / "global_step110").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "--kind", "half"), 2, "must be one of full, weights, spike"),
        (("run", "--to", "gs://elsewhere/x"), 2, "name the STEPs"),
        (("run", "100", "--to", "https://me:pw@host/x"), 2, "credentials"),
        (("plan", "777"), 1, "there is no such checkpoint here"),
        (("verify", "100", "--all"), 2, "give one of them"),
        (("verify", "777"), 1, "there is no copy of it in store or url"),
        (("restore", "100", "--into", "x", "--file", "a", "--latest"), 2, "leave one out"),
        (("drill", "--from", "store", "--into", "/nonexistent"), 1, "no whole, sound copy"),
        (("run", "--limit", "0"), 2, "limit"),
    ],
)
def test_refusals_are_one_line(
    nodes_context: Desk, words: tuple[str, ...], code: int, said: str
) -> None:
    nodes_context.save(100)
    answer = nodes_context.backup(*words)
    assert answer.code == code and said in answer.err, answer
    assert "me:pw" not in answer.out + answer.err


def test_a_card_without_archives_and_a_run_that_is_not_there(nodes_context: Desk) -> None:
    nothing = nodes_context.backup("run")
    assert nothing.code == 1 and "does not exist" in nothing.err
    nodes_context.changes = []
    none = nodes_context.backup("run")
    assert none.code == 2 and "backup.store or backup.url" in none.err


def test_records_that_cannot_be_read_are_unknown(nodes_context: Desk) -> None:
    nodes_context.save(100)
    nodes_context.backup("run")
    next((nodes_context.paths.state / "backup" / "copies" / "store").iterdir()).write_text("{")
    for words in (("plan",), ("status",)):
        assert nodes_context.backup(*words).code == 3
    assert nodes_context.backup("status", "--rebuild").code == 0


def test_term_leaves_the_round_resumable_and_says_so(
    nodes_context: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_context.save(100, 200)
    before = signal.getsignal(signal.SIGTERM)

    def on(call: str, path: str, position: int) -> None:
        if call == "write" and "global_step200" in path:
            os.kill(os.getpid(), signal.SIGTERM)

    def opened(name: str, card: RunCard) -> Archive:
        made: Archive = OddArchive(open_archive(name, card), on)
        return made

    as_ever = round_values.BackupContext.opened

    def odd_archive(context: round_values.BackupContext, name: str) -> RetriedArchive:
        return as_ever(replace(context, open=opened), name)

    with monkeypatch.context() as patched:
        patched.setattr(round_values.BackupContext, "opened", odd_archive)
        stopped = nodes_context.backup("run", "--no-logs")
    assert stopped.code == 1 and "goes on from there" in stopped.out + stopped.err
    assert signal.getsignal(signal.SIGTERM) == before
    assert nodes_context.backup("run").code == 0
    assert len([*nodes_context.store.rglob("*.copy.json")]) == 2


def test_a_round_as_a_job(nodes_context: Desk) -> None:
    nodes_context.save(100)
    nodes_context.bench.block()
    queued = nodes_context.backup("run", "--submit", "--scheduler", "local", "--json")
    assert queued.code == 0 and queued.json["new"]
    second = nodes_context.backup("run", "--submit", "--scheduler", "local")
    assert second.code == 0 and f"job {queued.json['job_id']} is there already" in second.err
    (job,) = jobs_of(nodes_context.bench.scheduler.jobs(), nodes_context.directory.mark)
    assert job.name == "tr11-backup"
    for other in nodes_context.bench.living():
        if other.name == "block":
            nodes_context.bench.scheduler.cancel(other.raw_id)
    nodes_context.bench.wait(lambda jobs: not jobs_of(jobs, nodes_context.directory.mark))
    said = next((nodes_context.paths.state / "backup" / "slurm").glob("*.out")).read_text()
    assert "store: 1 copy made and read back" in said, said
    assert (nodes_context.store / "checkpoints/main/global_step100.copy.json").is_file()


@pytest.mark.parametrize("command", ["plan", "run", "verify", "restore", "drill", "status"])
def test_help_reads_well(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert execute(["backup", command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"tr11 backup {command}" in shown and "Examples" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_no_secret_of_the_environment_is_shown_or_written(
    nodes_context: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/ana/verysecret.json")
    nodes_context.save(100)
    shown = [
        nodes_context.backup(*words)
        for words in (("plan",), ("run",), ("status", "--json"), ("verify", "100"))
    ]
    text = json.dumps([answer.out + answer.err for answer in shown])
    written = b"".join(
        path.read_bytes()
        for path in [
            *nodes_context.paths.state.rglob("*"),
            *nodes_context.directory.journal.rglob("*"),
        ]
        if path.is_file()
    )
    assert "verysecret" not in text and b"verysecret" not in written
