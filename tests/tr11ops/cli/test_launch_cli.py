"""`tr11 launch` on the embedded scheduler, and for Kubernetes: what it prints, keeps, refuses, and never
leaves behind.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.launch.kubernetes_schema import KINDS, invalid, section
from tests.tr11ops.launch.preflight_bench import MODEL
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tr11ops.alerts.store import read_alert_state
from tr11ops.base.errors import SchedulerUnreachable, SubmissionUnknown
from tr11ops.base.invocation import PLAN_MARK
from tr11ops.cli.launch import prepare
from tr11ops.cluster.base import BatchRequest, Node
from tr11ops.cluster.local import LocalScheduler
from tr11ops.launch.session import check_launch
from tr11ops.launch.submit import hold_launch_lock, submit
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import parse_comment
from trainer.contract.attempt import EndMarker
from trainer.contract.files import write_json
from trainer.contract.state_file import read_json

DRY_RUN = """\
      ok  card: small/main: 2 x 1 worker = tensor 1 x pipeline 1 x data 2
      ok  partition: local, 00:10:00 (no maximum)
      ok  nodes: 2 of 2 usable (0 to spare, 0 excluded)
      ok  chain: 3 attempts: a job array, one task at a time
      ok  directory: DIR/run: SPACE free, a checkpoint takes 404.2 KiB
      ok  kill switch: not set
      ok  data: 1 indexed dataset, 3 documents, 1,500 tokens
      ok  index maps: 1 of 1 data sets have none yet: built at the start, in about 1 s
      ok  tokenizer: 100 tokens in 128 rows
      ok  queue: nothing of this run is queued or running
      ok  checkpoints: none: the training starts from random weights
      ok  coverage: 3 x 1 min = 3 min; how long the run needs is not known before its first steps
 warning  alerts: no one would be told of trouble; set alerts.recipients, alerts.rota or alerts.urls_file in the card
 warning  watchdog: no watchdog looks at the run; \
`tr11 cron run --run DIR/small.toml`, in a terminal that stays open, starts one
      ok  scheduler: local would take it (can run on 2 of the simulated nodes)

           run  small/main
     directory  DIR/run
    paths from  DIR (the card's folder)
     scheduler  local
           job  array 1-3%1: 3 tasks, one after another
       workers  2 nodes x 1 worker
    time limit  00:10:00, the trainer leaves after 1 min
   kill switch  DIR/run/kill-switch
        output  DIR/run/state/submissions/TAG/%x-%A_%a.out

nothing was submitted (--dry-run)
"""


def golden(bench: LocalBench, text: str) -> str:
    text = text.replace(str(bench.folder), "DIR")
    text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{8}", "TAG", text)
    return re.sub(r"[\d.]+ [KMGT]?i?B free", "SPACE free", text)


def test_dry_run_shows_the_plan_and_makes_nothing(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # neither crontab nor Slurm
    monkeypatch.setattr("tr11ops.launch.facts.start_of_watchdog", lambda: "cron run")
    answer = bench.launch("--array", "1-3", "--dry-run")
    assert (answer.code, answer.err) == (0, "")
    assert golden(bench, answer.out) == DRY_RUN
    assert not (bench.folder / "run").exists() and bench.scheduler.jobs() == ()


def test_missing_folders_above_the_run_are_in_the_plan(bench: LocalBench) -> None:
    write_card(bench.folder, directory=bench.folder / "team" / "a" / "run")
    answer = bench.launch("--dry-run")
    assert answer.code == 0 and not (bench.folder / "team").exists()
    assert (
        f"         makes  2 missing folders above it, from {bench.folder / 'team'} on\n"
        in answer.out
    )


def test_what_dry_run_shows_is_what_is_submitted(bench: LocalBench) -> None:
    bench.block()
    shown = bench.launch("--array", "1-3", "--dry-run", "--json").json
    assert (shown["schema"], shown["submitted"], shown["job_id"], shown["dry_run"]) == (
        1,
        False,
        None,
        True,
    )
    done = bench.launch("--array", "1-3", "--json", "--reason", "first of all").json
    assert done["submitted"] and done["scheduler"] == "local"
    differing = {
        key
        for key in shown["plan"]
        if golden(bench, str(shown["plan"][key])) != golden(bench, str(done["plan"][key]))
    }
    assert differing == set()
    directory = run_directory(bench)
    [record] = directory.read_submissions()
    assert (record.job_id, record.array, record.nodes, record.note) == (
        done["job_id"],
        "1-3%1",
        2,
        "",
    )
    paths = directory.submission(record.tag)
    assert paths.script.read_text() == done["plan"]["script"]
    assert paths.card_toml.read_text() == bench.card.read_text()
    card = read_json(paths.card)
    assert (
        card is not None
        and card["slurm"]["workers_per_node"] == 1
        and card["derived"]["card_hash"] == record.card_hash
    )
    assert {"python", "torch", "deepspeed", "tr11"} <= set(read_json(paths.versions) or {})
    [job] = [job for job in bench.living() if job.name == "small"]
    assert job.pending_tasks == (1, 2, 3) and parse_comment(job.comment) == (
        record.tag,
        directory.mark,
    )
    ledger = read_journal(directory.journal)
    assert ledger.faults == () and [(entry.kind, entry.why) for entry in ledger.entries] == [
        ("launch", "first of all"), ("submitted", "first of all"),
    ]  # fmt: skip


def test_a_second_launch_is_refused_unless_it_queues_behind(bench: LocalBench) -> None:
    bench.block()
    first = bench.launch("--array", "1-2", "--json").json["job_id"]
    answer = bench.launch("--array", "1-2")
    assert answer.code == 1
    words = f"this run is already queued: job {first}_[1-2%1]; queue behind it with `--after {first}`, or stop it with"
    lines = [line for line in answer.out.splitlines() if line.split()[0] not in {"ok", "warning"}]
    assert (
        lines
        == [f" refused  queue: {words} `tr11 kill --run {bench.card}`", "nothing was submitted"]
        and answer.err == ""
    )
    second = bench.launch("--array", "1-2", "--after", first, "--json")
    assert second.code == 0 and second.json["plan"]["dependency"] == f"afterany:{first}"
    assert bench.launch("--after", first).code == 1
    assert bench.launch("--after", "999").code == 2
    assert len(run_directory(bench).tags()) == 2


def test_a_run_directory_is_launched_as_it_was_last(bench: LocalBench) -> None:
    """Pages name a run by its folder: what they say to type must work, also without the card."""
    bench.block()
    queued = bench.launch("--array", "1-2", "--set", "run.name=renamed", "--json").json["job_id"]
    bench.card.unlink()
    root = run_directory(bench).root
    words = ("--run", str(root), "--scheduler", "local")
    shown = bench.tr11("config", "show", *words)
    assert (shown.code, shown.err) == (0, "") and 'name = "renamed"' in shown.out
    first, *_ = run_directory(bench).tags()
    answer = bench.tr11("launch", "--array", "1-2", "--after", queued, *words)
    assert (answer.code, answer.err) == (0, "")
    again = run_directory(bench).submission(run_directory(bench).tags()[-1])
    assert read_json(again.card) == read_json(run_directory(bench).submission(first).card)
    assert "renamed" in again.card_toml.read_text()


@pytest.fixture
def elsewhere(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder, where the next commands are typed; the bench's card has relative paths, and
    its run is queued.
    """
    write_card(bench.folder, directory=Path("run"))
    bench.block()
    assert bench.launch("--array", "1-3").code == 0
    folder = bench.folder / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_finished_run_is_said_to_be_so_and_queues_nothing(bench: LocalBench) -> None:
    directory = run_directory(bench)
    write_checkpoint(directory.paths.checkpoints, 64, MODEL)  # all samples of the card
    write_json(
        directory.paths.end_marker("3"),
        to_builtins(EndMarker("finished", 8, 64, False, "", 5.0, "h", "3")),
    )
    refused = bench.launch("--array", "1-3")
    assert (
        refused.code == 1
        and "the training is finished, nothing is left to train: global_step64 has" in refused.out
    )
    assert "nothing was submitted" in refused.out and bench.living() == []
    answer = bench.launch("--array", "1-3", "--json")
    assert (
        answer.code,
        answer.json["exit_code"],
        answer.json["submitted"],
        answer.json["jobs"],
    ) == (1, 1, False, [])
    (check,) = (check for check in answer.json["checks"] if check["level"] == "refused")
    assert check["name"] == "batch.train_samples" and check["fix"] == "raise it to train on"
    more = bench.launch("--array", "1-3", "--set", "batch.train_samples=128", "--dry-run")
    assert more.code == 0 and "nothing is left" not in more.out


def test_a_launch_from_another_folder_is_not_a_second_training(
    bench: LocalBench, elsewhere: Path
) -> None:
    answer = bench.launch("--array", "1-1")
    assert answer.code == 1 and "queue: this run is already queued" in answer.out
    assert len(run_directory(bench).tags()) == 1 and not (elsewhere / "run").exists()
    assert bench.tr11("status", "--run", str(bench.card), "--scheduler", "local", "--json").json[
        "run"
    ]["directory"] == (str(bench.folder / "run"))


def test_a_copy_of_the_card_elsewhere_is_a_namesake(bench: LocalBench, elsewhere: Path) -> None:
    bench.card = write_card(elsewhere, directory=Path("run"))
    answer = bench.launch("--array", "1-1")
    assert answer.code == 1
    assert (
        f"has this run's name and is queued in {bench.folder / 'run'}; if that is the run you mean"
        in answer.out
    )
    assert not (elsewhere / "run").exists()
    assert bench.launch("--array", "1-1", "--allow-namesake").code == 0
    assert (elsewhere / "run").is_dir()


def test_a_run_that_was_launched_below_the_folder_goes_on_there(
    bench: LocalBench, elsewhere: Path
) -> None:  # as it was when relative paths began where a command was typed
    card = bench.card
    bench.card = write_card(elsewhere / "cards", directory=Path("run"))
    (elsewhere / "run").symlink_to(bench.folder / "run")
    answer = bench.launch("--array", "1-1", "--dry-run")
    assert f"warning  paths: this run was launched from {elsewhere}" in answer.out
    assert answer.code == 1 and "queue: this run is already queued" in answer.out
    assert card.read_text() == bench.card.read_text().replace(
        str(elsewhere / "cards"), str(bench.folder)
    )


def test_a_shipped_card_in_an_empty_folder_tells_the_next_steps(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bench.folder / "an empty one"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TR11_LOCAL_NODES", "4")
    words = ["launch", "--run", "demo", "--scheduler", "local"]
    answer = bench.tr11(*words)
    assert answer.code == 1 and answer.err == ""
    commands = [line.strip() for line in answer.out.splitlines() if line.startswith("  tr11 data ")]
    assert [command.split()[2] for command in commands] == ["corpus", "tokenizer", "preprocess"]
    assert "tr11 data corpus --output demo-run/data/corpus.jsonl" in commands
    for command in commands:
        typed = shlex.split(command)[1:]
        assert (
            bench.tr11(*typed, *(["--min-bytes", "300000"] if typed[1] == "corpus" else [])).code
            == 0
        )
    answer = bench.tr11(*words, "--dry-run")
    assert answer.code == 0, answer
    assert f"paths from  {folder} (where you type: the card ships with tr11)" in answer.out


def test_damaged_data_and_mixtures_are_not_made_again(bench: LocalBench) -> None:
    (bench.folder / "data" / "corpus.idx").unlink()
    answer = bench.launch()
    assert (
        answer.code == 1
        and "refused  data.prefixes" in answer.out
        and "tr11 data corpus" not in answer.out
    )
    many = "data.prefixes=[" + ", ".join(f"'x{number}_text_document'" for number in range(9)) + "]"
    answer = bench.launch("--set", many)
    assert answer.code == 1 and "tr11 data corpus" not in answer.out


def test_too_few_usable_nodes_are_told_to_the_sites_support(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    given = LocalScheduler.nodes

    def one_down(self: LocalScheduler) -> tuple[Node, ...]:
        first, *rest = given(self)
        return (replace(first, states=frozenset({"down"})), *rest)

    monkeypatch.setattr(LocalScheduler, "nodes", one_down)
    support = [
        "resilience.support_address=assist@example.org",
        "alerts.recipients=['ana@example.org']",
    ]
    words = [*(word for text in (*support, "alerts.smtp_port=1") for word in ("--set", text))]
    assert bench.launch("--dry-run", *words).code == 0 and not (bench.folder / "run").exists()
    answer = bench.launch(*words)
    assert answer.code == 0 and "2 are needed, 1 can be used now" in answer.out
    assert "too few nodes can be used: told ana@example.org, assist@example.org" in answer.err
    [alert] = read_alert_state(run_directory(bench)).alert_state.open_alerts
    assert (
        alert.detector == "nodes-short" and "1 of 2 nodes can be used, 2 are needed" in alert.title
    )
    assert any("(down)" in line for line in alert.evidence)


def test_two_launches_at_once_give_one_job(bench: LocalBench) -> None:
    bench.block()
    code = "from tr11ops.cli.main import run; run()"
    command = [
        sys.executable,
        "-c",
        code,
        "launch",
        "--run",
        str(bench.card),
        "--array",
        "1-2",
        "--scheduler",
        "local",
    ]
    root = str(Path(__file__).parents[3])
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert sorted(process.returncode for process in started) == [0, 1, 1], outputs
    assert sum("submitted: job" in out for out, _ in outputs) == 1
    assert all("already queued" in err or "under way" in err for _, err in outputs if err)
    assert len([job for job in bench.living() if job.name == "small"]) == 1
    assert len(run_directory(bench).tags()) == 1


def test_a_held_lock_refuses_and_a_dead_holder_does_not(bench: LocalBench) -> None:
    bench.block()
    directory = run_directory(bench)
    lock = hold_launch_lock(directory.launch_lock)
    answer = bench.launch()
    assert answer.code == 1 and "another launch or training of this run is under way" in answer.err
    assert directory.tags() == []
    os.close(lock)
    assert bench.launch().code == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--array", "1-"], 2, "--array = '1-'"),
        (["--array", "5-1"], 2, "the range 5-1 is empty; use 1-5"),
        (["--array", "1-4%2"], 2, "must run one task at a time"),
        (["--array", "1-99999999"], 2, "--array"),
        (["--exclude", "n["], 2, "--exclude = 'n[': is not a list of nodes"),
        (["--exclude", "stranger"], 2, "'stranger' is not a node of this cluster"),
        (["--exclude", "local-node[1-2]"], 1, "nodes: 2 are needed, there are 0"),
        (["--nodes", "0"], 2, "--nodes"),
        (["--nodes", "3"], 2, "batch.global_batch_size = 8: must be divisible by"),
        (["--after", "abc"], 2, "--after = 'abc': is not a job id"),
        (["--scheduler", "pbs"], 2, "--scheduler 'pbs': must be one of slurm, local, auto"),
        (
            ["--set", "model.hiden_size=3"],
            2,
            "model.hiden_size: is not a known key; did you mean 'model.hidden_size'?",
        ),
        (
            ["--set", "model.attention_heads=3"],
            2,
            "model.hidden_size = 32: must be divisible by model.attention_heads (3)",
        ),
        (["--set", "slurm.time_limit=1"], 2, "run.exit_duration_minutes = 1"),
        (["--frobnicate"], 2, "No such option: --frobnicate"),
        (["--run", "missing.toml"], 2, "missing.toml"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    bench: LocalBench, words: list[str], code: int, text: str
) -> None:
    answer = bench.launch("--array", "1-2", *words)
    assert answer.code == code and text in answer.out + answer.err
    assert bench.scheduler.jobs() == () and not (bench.folder / "run").exists()


def test_the_embedded_schedulers_refusal_is_shown(bench: LocalBench) -> None:
    answer = bench.launch("--set", "slurm.constraint=a100")
    assert (
        answer.code == 1 and "scheduler: local refuses it: invalid constraint 'a100'" in answer.out
    )


def test_an_unreachable_slurm_is_exit_3_and_submits_nothing(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.folder / "slurm.conf").write_text(
        "ClusterName=gone\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=9\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(bench.folder / "slurm.conf"))
    # without Slurm's commands, on every machine that runs this
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = bench.launch("--scheduler", "slurm")
    assert answer.code == 3 and "nothing was submitted" in answer.out
    assert not (bench.folder / "run").exists()


class LosesAnswers(LocalScheduler):
    """Takes the job and never says so, as a Slurm controller does that is frozen at the wrong
    moment.
    """

    silent = 0

    def submit(self, request: BatchRequest) -> str:
        super().submit(request)
        raise SchedulerUnreachable("timed out")

    def jobs(self, name: str | None = None) -> tuple[object, ...]:  # type: ignore[override]
        if self.silent:
            self.silent -= 1
            raise SchedulerUnreachable("timed out")
        return super().jobs(name)


def plan_of(bench: LocalBench) -> object:
    plan = check_launch(prepare(str(bench.card), [], "local", array="1-2")).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("silent", [0, 2])
def test_a_lost_answer_is_looked_up_by_the_comment(bench: LocalBench, silent: int) -> None:
    bench.block()
    plan, scheduler = plan_of(bench), LosesAnswers()
    scheduler.silent = silent
    record = submit(plan, scheduler, card_toml="", user="me", pause=lambda seconds: None)  # type: ignore[arg-type]
    [job] = [job for job in bench.living() if job.name == "small"]
    assert record.job_id == job.raw_id and run_directory(bench).read_submissions() == [record]


def test_a_lost_answer_is_recorded_and_stops_the_next_launch(bench: LocalBench) -> None:
    bench.block()
    plan, scheduler = plan_of(bench), LosesAnswers()
    scheduler.silent = 100
    with pytest.raises(SubmissionUnknown, match="the job may exist"):
        submit(plan, scheduler, card_toml="", user="me", pause=lambda seconds: None)  # type: ignore[arg-type]
    [record] = run_directory(bench).read_submissions()
    assert record.job_id is None and "lost" in record.note
    assert bench.launch().code == 1


def test_cards_default_to_tr11_toml_here(bench: LocalBench) -> None:
    bench.card.rename(bench.folder / "tr11.toml")
    assert bench.tr11("launch", "--dry-run", "--scheduler", "local").code == 0
    (bench.folder / "tr11.toml").unlink()
    answer = bench.tr11("launch", "--dry-run", "--scheduler", "local")
    assert answer.code == 2 and "there is no tr11.toml here" in answer.err


def test_errors_as_json(bench: LocalBench) -> None:
    refused = bench.launch("--exclude", "stranger", "--json")
    assert refused.json["exit_code"] == refused.code == 2 and refused.json["plan"] is None
    assert refused.json["checks"][2]["level"] == "refused" and "stranger" in refused.err
    usage = bench.launch("--array", "x", "--json")
    assert (
        usage.json["error"]["exit_code"] == usage.code == 2
        and "--array = 'x'" in usage.json["error"]["lines"][0]
    )


def test_launch_prints_the_objects_and_makes_nothing(bench: LocalBench) -> None:
    settings = [word for setting in section(bench.folder) for word in ("--set", setting)]
    launch = ("launch", "--scheduler", "kubernetes", "--run", str(bench.card), *settings)
    answer = bench.tr11(*launch, "--dry-run")
    assert answer.code == 0 and answer.err == ""
    assert [(one["kind"], invalid(one)) for one in yaml.safe_load_all(answer.out)] == [
        (kind, []) for kind in KINDS
    ]
    as_json = bench.tr11(*launch, "--dry-run", "--json").json
    assert as_json["objects"] == list(yaml.safe_load_all(answer.out)) and as_json["name"] == "small"
    assert not (bench.folder / "run").exists()
    refused = bench.tr11(*launch)
    assert (
        refused.code == 2 and "add --dry-run and pipe it into `kubectl apply -f -`" in refused.err
    )
    refused = bench.tr11(*launch, "--dry-run", "--array", "1-3")
    assert (
        refused.code == 2
        and "--array: a Kubernetes Job starts its pods again by itself" in refused.err
    )
    bare = bench.tr11("launch", "--scheduler", "kubernetes", "--run", str(bench.card), "--dry-run")
    assert bare.code == 2 and "kubernetes: is missing; add: image" in bare.err


# ----------------------------------------------------------------------------- on a screen
def test_what_a_person_reads_before_a_launch_ends_with_the_plan_on_one_screen(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has each check; a screen of 24 lines has what is unusual, then the whole plan."""

    def lines(*words: str) -> list[str]:
        return click.unstyle(bench.launch("--array", "1-3", *words).out).splitlines()

    each = lines("--dry-run")
    fine = [line for line in each if line.startswith("      ok  ")]
    warned = [line.split(":")[0] for line in each if line.startswith(" warning")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert len([line for line in lines("--dry-run") if line.startswith("      ok  ")]) == len(fine)
    shown = lines()
    assert len(fine) > 10 and len(shown) < 24
    plan = shown.index("")
    said = " ".join(" ".join(shown[:plan]).split())
    look = f"`tr11 launch --run {bench.card} --dry-run`"
    assert said.startswith(f"ok {len(fine)} checks are fine: {look} shows them warning ")
    assert warned == [line.split(":")[0] for line in shown if line.startswith(" warning")]
    assert shown[plan + 1].split() == ["run", "small/main"]
    assert shown[-1].startswith("submitted: job") or shown[-2].startswith("submitted: job")


def test_a_plan_that_a_person_agrees_to_elsewhere_is_the_short_one_both_times(
    bench: LocalBench,
) -> None:
    asked = bench.launch("--array", "1-3", "--dry-run", "--as-shown", "mark")
    mark = asked.err.split(PLAN_MARK)[1].split()[0]
    assert "checks are fine" in asked.out and asked.out.count("      ok  ") == 1
    assert bench.launch("--array", "1-3", "--as-shown", mark).code == 0
