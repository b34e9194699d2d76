"""`tr11 sync` as it is typed: what it says, its exit codes, and that the token is nowhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tr11ops.cron.runner import ENTRY
from tr11ops.rundir.claims import Claim, ClaimFolder

REPOSITORY = "bot/logs"
LINE = b" iteration 1 | lm loss 1.0\n"


@pytest.fixture
def log(bench: LocalBench) -> Path:
    path = run_directory(bench).paths.main_log
    path.parent.mkdir(parents=True)
    path.write_bytes(LINE)
    return path


@pytest.fixture
def sync(bench: LocalBench, hub_server, monkeypatch) -> Callable[..., Answer]:
    """`tr11 sync` with the bot's credentials in a file."""
    credentials = bench.folder / "bot.json"
    credentials.write_text(
        json.dumps({"username": "bot", "email": "bot@example.org", "auth_token": hub_server.token})
    )
    credentials.chmod(0o640)
    monkeypatch.setattr("tr11ops.cli.sync.PATIENCE_SECONDS", 0.0)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    settings = [
        f"hub.repository={REPOSITORY}",
        f"hub.endpoint={hub_server.url}",
        f"hub.credentials_file={credentials}",
    ]

    def typed(*words: str, changes: tuple[str, ...] = ()) -> Answer:
        options = [word for setting in (*settings, *changes) for word in ("--set", setting)]
        return bench.tr11("sync", "--run", str(bench.card), *options, *words)

    return typed


def test_the_first_and_the_next_round_read_well(sync, log, hub_server):
    dry = sync("--dry-run")
    assert (
        dry.code == 0
        and "would send 1 file, 27 B" in dry.out
        and hub_server.counts() == {"info": 1}
    )
    first = sync()
    assert first.code == 0, first.err
    assert (
        first.out == f"sent 1 file, 27 B, in 2 commits; {REPOSITORY} has 1 file of this run, 27 B\n"
    )
    assert all(len(line) <= 80 for line in first.out.splitlines())
    files = hub_server.files(REPOSITORY)
    assert files["logs/main/main_log.txt"] == LINE
    assert json.loads(files["status.json"])["interval_seconds"] == 3600
    second = sync("--json")
    assert second.code == 0 and second.json["schema"] == 1 and second.json["sent"] == []
    assert second.json["files"] == 1 and second.json["commits"] == []
    log.write_bytes(LINE * 2)
    [sent] = sync("--once", "--json").json["sent"]
    assert sent == {
        "path": "logs/main/main_log.txt",
        "bytes": 54,
        "reason": "grown",
        "superseded": None,
    }


@pytest.mark.parametrize(
    "words, changes, said",
    [
        (["--every", "1h", "--once"], (), "leave one out"),
        (["--every", "1h", "--dry-run"], (), "leave one out"),
        (["--every", "soon"], (), "write it as 30m"),
        (["--every", "10s"], (), "at least 1 minute"),
    ],
)
def test_what_cannot_be_meant_is_refused(sync, log, words, changes, said):
    answer = sync(*words, changes=changes)
    assert answer.code == 2 and said in answer.err and answer.err.count("\n") == 1


def test_a_card_without_a_repository_is_wrong_usage(bench):
    answer = bench.tr11("sync", "--run", str(bench.card))
    assert answer.code == 2 and "hub.repository" in answer.err


def test_before_the_first_line_there_is_nothing_to_do(sync, hub_server):
    answer = sync("--json")
    assert answer.code == 0 and answer.json["sent"] == [] and not hub_server.requests


def test_another_one_at_it_is_no_failure(sync, log, bench, hub_server):
    folder = ClaimFolder(run_directory(bench), "hub-sync")
    folder.take(Claim.of_this_process(time.time(), 3600), None)
    answer = sync()
    assert answer.code == 0 and "runs already" in answer.err and not hub_server.requests


def test_an_unreadable_file_needs_a_person_and_the_others_go(sync, log, hub_server, monkeypatch):
    (log.parent / "other.txt").write_bytes(b"other\n")
    real = os.open

    def refusing(path, *arguments, **options):
        if str(path).endswith("other.txt"):
            raise OSError(5, "Input/output error", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("tr11ops.hub.sync_files.os.open", refusing)
    answer = sync()
    assert answer.code == 1 and "other.txt" in answer.err and "Input/output error" in answer.err
    assert "logs/main/main_log.txt" in hub_server.files(REPOSITORY)


# ---------------------------------------------------------- failures, and the token in none of them
def breakages(server) -> dict[str, Callable[[], None]]:
    def down() -> None:
        server.is_down = True

    def stolen() -> None:
        server.hub.accounts.clear()

    return {
        "down": down,
        "stolen": stolen,
        "forbidden": lambda: server.fail(
            "commit", 403, times=99, text=f"no {server.token} for you"
        ),
        "limited": lambda: server.fail("commit", 429, times=99, headers={"Retry-After": "3600"}),
        "garbled": lambda: server.garble("*", times=99),
        "storage": lambda: server.fail("lfs-put", 500, times=99),
        "cut": lambda: server.break_off("reset", "commit", times=99),
    }


@pytest.mark.parametrize(
    "how, code",
    [
        ("down", 3),
        ("stolen", 1),
        ("forbidden", 1),
        ("limited", 3),
        ("garbled", 3),
        ("storage", 3),
        ("cut", 3),
    ],
)
def test_failures_are_one_line_and_the_token_is_nowhere(sync, log, bench, hub_server, how, code):
    sync()
    log.write_bytes(LINE * 3)
    secrets = hub_server.secrets()
    breakages(hub_server)[how]()
    answers = [sync(), sync("--json")]
    for answer in answers:
        assert answer.code == code and "Traceback" not in answer.err
        assert [line for line in answer.err.splitlines() if line.startswith("tr11: ")] == [
            answer.err.splitlines()[-1]
        ]
    texts = [answer.out + answer.err for answer in answers]
    texts += [
        path.read_bytes().decode("utf-8", "replace")
        for path in run_directory(bench).root.rglob("*")
        if path.is_file()
    ]
    assert not [secret for secret in secrets for text in texts if secret in text]
    message = json.loads((run_directory(bench).paths.state / "sync" / "status.json").read_text())[
        "message"
    ]
    assert message and message in answers[-1].err


@pytest.mark.parametrize(
    "content, mode",
    [
        ("{", 0o600),
        ('{"auth_token": 3}', 0o600),
        ('{"auth_token": "hf_x y"}', 0o600),
        ("{}", 0o644),
    ],
)
def test_wrong_credentials_are_named_not_shown(sync, log, bench, content, mode):
    wrong = bench.folder / "wrong.json"
    wrong.write_text(content)
    wrong.chmod(mode)
    answer = sync(changes=(f"hub.credentials_file={wrong}",))
    assert answer.code == 1 and str(wrong) in answer.err and "hf_x" not in answer.err


def test_a_signal_ends_it_while_the_hub_is_away(log, bench, hub_server):
    hub_server.is_down = True
    settings = ["--set", f"hub.repository={REPOSITORY}", "--set", f"hub.endpoint={hub_server.url}"]
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, "sync", "--run", str(bench.card), "--every", "1h", *settings],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while "trying again" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and err.splitlines()[-1] == "ended"
    claim = ClaimFolder(run_directory(bench), "hub-sync").newest()
    assert claim is not None and not claim.held


def test_on_and_on_until_a_signal(log, bench, hub_server):
    """A process of its own: its arguments hold no token, and TERM ends it between two rounds."""
    environment = {**os.environ, "HF_TOKEN": hub_server.token}
    settings = [
        "--set",
        f"hub.repository={REPOSITORY}",
        "--set",
        f"hub.endpoint={hub_server.url}",
        "--set",
        "hub.publish_status=false",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, "sync", "--run", str(bench.card), "--every", "1h", *settings],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline().startswith("sent 1 file")
        assert hub_server.token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and err.splitlines()[-1] == "ended"
    assert not [secret for secret in hub_server.secrets() if secret in out + err]


# ------------------------------------------------------------------------ secrets, and who may read
def test_a_secret_is_told_once_and_ended_by_a_person(sync, log, hub_server):
    secret = hub_server.token
    log.write_bytes(LINE + f"login with {secret}\n".encode())
    first = sync()
    assert (
        first.code == 0 and "line 2: Hugging Face token: masked at the hub, not here" in first.err
    )
    assert secret not in first.out + first.err and secret.encode() in log.read_bytes()
    assert secret.encode() not in hub_server.files(REPOSITORY)["logs/main/main_log.txt"]
    assert "masked" not in sync().err
    masked = [{"path": "logs/main/main_log.txt", "kind": "Hugging Face token", "line": 2}]
    assert json.loads(sync("--json").out)["masked"] == masked
    assert sync("--revoked").out == "logs/main/main_log.txt line 2: Hugging Face token: revoked\n"
    assert sync("--revoked").out == "no secret is open\n"
    assert sync("--revoked", "--dry-run").code == 2


def test_a_public_repository_wants_a_word(sync, log, hub_server):
    hub_server.create(REPOSITORY, private=False)
    refused = sync()
    assert refused.code == 1 and "is public: everyone will read these logs" in refused.err
    assert sync("--dry-run").code == 0 and set(hub_server.files(REPOSITORY)) == {".gitattributes"}
    assert sync("--public", "--dry-run").code == 2
    assert sync("--public").code == 0 and sync().code == 0
    assert hub_server.files(REPOSITORY)["logs/main/main_log.txt"] == LINE


def test_the_card_may_want_the_logs_public(sync, log, hub_server):
    hub_server.create(REPOSITORY, private=False)
    assert sync(changes=("hub.private=false",)).code == 0
