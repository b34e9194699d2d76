"""No secret ever comes out: planted wherever people keep or wrongly put them, looked for in all
that tr11 leaves behind.

Planted are the tokens in the environment and in files, a service account's key, delivery URLs, and
passwords typed into the card or on the command line. Looked through are stdout, stderr, every file
that appears, and every child's arguments.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings, strategies as st

from tests.plugins.faulty_hub import FaultyHub
from tests.plugins.object_store_fixture import ObjectStore
from tests.plugins.planted_secrets import PLANTED
from tests.tr11ops.backup.copy_cases import make_checkpoint
from tests.tr11ops.backup.fault_proxy import Fault
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.logs.log_cases import log_of
from tr11ops.base.redact import one_line
from tr11ops.base.retry import RetryPolicy
from tr11ops.cli import sync, upload
from tr11ops.cli.main import execute
from tr11ops.cron.table_programs import Invocation, round_script
from tr11ops.hub import base as hub_base, client as hub_client
from tr11ops.runcard.card import CardError, OwnCard, load_card
from tr11ops.rundir.paths import RunDirectory

LEGACY_TOKEN = "hf_LegacyDistinctive0123456789abcdef"
WRONG_TOKEN = "hf_WrongDistinctive0123456789abcdefg"
DELIVERY = "T0DISTINCT/B0DISTINCT/deliverydistinctive0123"
DEAD_MAN = "deadmandistinctive0123456789"
MAIL_PASSWORD = "smtpdistinctivepassword99"
NAME = "science/run-logs"


def service_account(token_uri: str) -> tuple[dict[str, str], str]:
    """The JSON of an account, and a piece of its key that is found nowhere else."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {
        "type": "service_account", "project_id": "science", "private_key_id": "k1", "private_key": text,
        "client_email": "bot@science.example", "client_id": "1", "token_uri": token_uri,
    }  # fmt: skip
    return account, text.splitlines()[10]


class Parrot(BaseHTTPRequestHandler):
    """Refuses everything, and repeats in its answer all that it was sent: the worst that a
    destination can do.
    """

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = {
            "error": "invalid_grant",
            "error_description": f"{dict(self.headers)} {body.decode('utf-8', 'replace')}",
        }
        content = json.dumps(said).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@dataclass
class Bench:
    """A run with everything that can hold a secret, and what was said so far."""

    folder: Path
    hub: FaultyHub
    store: ObjectStore
    parrot: str
    card: Path
    capture: pytest.CaptureFixture[str]
    secrets: dict[str, str]
    children: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)

    @property
    def secret_files(self) -> Path:
        return self.folder / "home"

    @property
    def directory(self) -> RunDirectory:
        card = load_card(self.card)
        return RunDirectory(card.paths, card.kill_switch)

    def tr11(self, *words: str, card: bool = True) -> str:
        """Type a command; what it said."""
        line = [*words, *(("--run", str(self.card)) if card else ())]
        self.codes[" ".join(words)] = execute(line)
        out, err = self.capture.readouterr()
        self.said.append(f"$ tr11 {' '.join(words)}\n{out}{err}")
        return out + err

    def leaks(self) -> list[str]:
        """Where a secret can be read, and which."""
        texts = [("output", text) for text in self.said] + [
            ("arguments", text) for text in self.children
        ]
        for path in self.folder.rglob("*"):
            if path.is_file() and self.secret_files not in path.parents:
                texts.append((str(path), path.read_bytes().decode("latin-1")))
            texts.append(("a file's name", str(path.relative_to(self.folder))))
        for name in self.store.objects():
            texts.append((name, name + self.store.content(name).decode("latin-1")))
        for path, content in (
            self.hub.files(NAME).items() if ("model", NAME) in self.hub.hub.repos else ()
        ):
            texts.append((f"hub: {path}", content.decode("latin-1")))
        return [
            f"{kind} in {place}: {text[:2000]!r}" if place == "output" else f"{kind} in {place}"
            for place, text in texts
            for kind, secret in self.secrets.items()
            if any(form in text for form in forms_of(secret))
        ]


def forms_of(secret: str) -> tuple[str, ...]:
    return secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode().rstrip("=")


def private_file(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def parrot() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bench(
    tmp_path: Path,
    hub_server: FaultyHub,
    object_store: ObjectStore,
    parrot: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    home = tmp_path / "home"
    account, key = service_account(f"{parrot}/token")
    files = {
        "hub": private_file(
            home / "hub.json", json.dumps({"username": "bot", "auth_token": hub_server.token})
        ),
        "google": private_file(home / "google.json", json.dumps(account)),
        "urls": private_file(
            home / "urls", f"json://bot:{MAIL_PASSWORD}@{parrot[7:]}/{DELIVERY}\n"
        ),
        "dead": private_file(home / "dead", f"{parrot}/{DEAD_MAN}\n"),
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_TOKEN", hub_server.read_token)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", LEGACY_TOKEN)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", files["google"])
    monkeypatch.setenv("SMTP_PASSWORD", MAIL_PASSWORD)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", "2")
    monkeypatch.delenv("TR11_RUN", raising=False)
    monkeypatch.setenv("TR11_DEBUG", "1")  # tracebacks are shown too
    # no one waits for a destination that is unreachable
    monkeypatch.setattr(RetryPolicy, "delay", lambda *_: 0.0)
    retries = partial(hub_base.hub_retries, 0.0, sleep=lambda _: None)
    for module in (hub_base, hub_client, sync, upload):
        monkeypatch.setattr(
            module, "hub_retries", lambda *seconds_and_sleep, say=None: retries(say=say)
        )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    card = write_card(tmp_path)
    options = ", ".join(
        f"{name} = {json.dumps(value)}" for name, value in object_store.options.items()
    )
    (tmp_path / "store").mkdir()
    card.write_text(
        card.read_text()
        + f"""
[hub]
repository = "{NAME}"
endpoint = "{hub_server.url}"
credentials_file = "{files["hub"]}"

[backup]
store = "{tmp_path}/store"
store_interval = 10
url = "{object_store.url}"
options = {{ {options} }}
full_interval = 10
weights_interval = 0
milestone_percent = 0

[alerts]
urls_file = "{files["urls"]}"
dead_man_url_file = "{files["dead"]}"
"""
    )
    secrets = {
        "the bot's token": hub_server.token, "$HF_TOKEN": hub_server.read_token, "the old token": LEGACY_TOKEN,
        "the signature": hub_server.signature, "the account's key": key, "the delivery address": DELIVERY,
        "the mail password": MAIL_PASSWORD, "the dead man's address": DEAD_MAN, "a wrong token": WRONG_TOKEN,
    }  # fmt: skip
    made = Bench(tmp_path, hub_server, object_store, parrot, card, capsys, secrets)
    begun: Callable[..., None] = subprocess.Popen.__init__

    def noted(process: Any, arguments: Any, *rest: Any, **options: Any) -> None:
        made.children.append(str(arguments))
        # an export takes seconds
        is_python = isinstance(arguments, list) and arguments[0] == sys.executable
        begun(process, ["false"] if is_python else arguments, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    paths = made.directory.paths
    for step in (10, 20):
        make_checkpoint(
            paths.checkpoints, step, {"weights/part.bin": 5000, "optimizer/part.bin": 9000}
        )
    paths.latest.write_text("global_step20\n")
    paths.main_log.parent.mkdir(parents=True)
    paths.main_log.write_bytes(log_of(range(1, 21)))
    paths.state.mkdir(exist_ok=True)
    return made


COMMANDS = (
    "backup plan", "backup plan --json", "backup run --dry-run", "backup run", "backup run --json", "backup verify --all",
    "backup verify --json", "backup status", "backup status --json", "backup status --rebuild",
    "backup restore 10 --into back", "backup restore 20 --from url --into back --json",
    "backup restore 20 --from store --into back --dry-run", "sync --dry-run", "sync", "sync --json", "sync --rebuild",
    "upload 20 --dry-run --to science/model", "upload 20 --to science/model --json",
    "checkpoints list", "checkpoints list --json", "checkpoints verify --all", "checkpoints verify 10 --json",
    "checkpoints pin 10 --reason spike", "checkpoints prune --dry-run", "checkpoints prune --yes --json",
    "status", "status --json", "handover", "alerts list", "alerts test", "pulse --json", "doctor", "goodput",
    "cron list", "cron status", "report -o page.html --no-charts", "estimate", "launch --dry-run", "fs-watchdog",
)  # fmt: skip
FROM_OUTSIDE = (
    "status --remote",
    "status --json --remote",
    "logs -n 3 --remote",
    "logs --summary --remote",
)


def type_all(bench: Bench) -> None:
    for line in COMMANDS:
        bench.tr11(*line.split())
    for line in FROM_OUTSIDE:
        bench.tr11(*line.split(), NAME, "--endpoint", bench.hub.url, card=False)


def codes_of(bench: Bench, *lines: str) -> list[int]:
    """What the commands that begin so returned."""
    return [
        code
        for line in lines
        for typed, code in bench.codes.items()
        if typed == line or typed.startswith(f"{line} ")
    ]


# ----------------------------------------------------------------------------- whole days
def test_where_all_is_well(bench: Bench) -> None:
    type_all(bench)
    assert not bench.leaks()
    assert set(
        codes_of(bench, "backup run", "backup restore", "backup verify", "sync", "logs")
    ) == {0}
    assert NAME in bench.said[-1] and bench.store.objects() and bench.hub.files(NAME)
    assert any(sys.executable in line for line in bench.children)


def test_where_no_one_lets_us_in(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destinations that refuse, and repeat in their refusal what they were sent."""
    private_file(bench.secret_files / "hub.json", json.dumps({"auth_token": WRONG_TOKEN}))
    monkeypatch.setenv("HF_TOKEN", WRONG_TOKEN)
    for kind in ("create", "commit", "info", "resolve"):
        bench.hub.fail(
            kind,
            403,
            times=99,
            text=f"Forbidden: {WRONG_TOKEN} http://h/?sig={bench.hub.signature}",
        )
    text = bench.card.read_text().replace('token = "anon"', 'project = "p"')
    bench.card.write_text(
        text.replace("[backup]", f'[backup]\ncredentials_file = "{bench.secret_files}/google.json"')
    )
    (bench.folder / "store").rmdir()
    type_all(bench)
    assert not bench.leaks()
    assert 0 not in codes_of(
        bench, "backup run --json", "backup restore 20 --from url", "sync", "logs", "status"
    )
    assert len(bench.codes) == len(COMMANDS) + len(FROM_OUTSIDE)


def test_where_no_one_answers(bench: Bench) -> None:
    bench.hub.is_down = True
    bench.store.faults.plant(
        Fault("answer", status=503, times=10_000, message=f"Bearer {bench.hub.token}")
    )
    type_all(bench)
    assert not bench.leaks()
    assert set(codes_of(bench, "sync --rebuild", "logs")) == {3}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"auth_token": 5}', '{"auth_token": "SECRET with a blank"}', "SECRET"]
)
def test_a_credentials_file_that_is_none(bench: Bench, content: str) -> None:
    bench.secrets["what is in it"] = "hunter2distinctive"
    for name in ("hub.json", "google.json"):
        private_file(bench.secret_files / name, content.replace("SECRET", "hunter2distinctive"))
    text = bench.card.read_text().replace('token = "anon"', 'project = "p"')
    bench.card.write_text(
        text.replace("[backup]", f'[backup]\ncredentials_file = "{bench.secret_files}/google.json"')
    )
    for line in (
        "sync",
        "sync --json",
        "upload 20 --to a/b",
        "backup run --to url",
        "backup run --json",
        "backup status",
    ):
        bench.tr11(*line.split())
    assert not bench.leaks() and set(codes_of(bench, "sync", "backup run")) == {1}


# ----------------------------------------------------------------------- typed into the wrong place
PASSWORD = "hunter2distinctive"
TOKEN = "hf_TypedDistinctive0123456789abcdef"
ADDRESSES = (
    f"s3://key:{PASSWORD}@bucket/path", f"https://{PASSWORD}@host.example/x", f"gs://bucket/x?sig={PASSWORD}",
    f"sftp://ana:{PASSWORD}@host.example", f"ana:{PASSWORD}@host.example:/x", f"https://host.example/?token={PASSWORD}",
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_on_the_command_line(bench: Bench, address: str) -> None:
    """They are in the shell's history already, but in no answer of ours, and in no file."""
    bench.secrets["the password"] = PASSWORD
    for line in (
        ["backup", "run", "--to", address], ["backup", "run", "10", "--to", address, "--json"],
        ["backup", "plan", "--to", address], ["backup", "plan", "10", "--to", address, "--json"],
        ["backup", "restore", "10", "--from", address, "--into", "back"], ["backup", "verify", "--from", address],
        ["backup", "status", "--set", f"backup.url={address}"], ["sync", "--set", f"hub.endpoint={address}"],
        ["sync", "--set", f"hub.repository={address}"], ["upload", "10", "--to", address],
        ["status", "--set", f"backup.store={address}"], ["backup", "run", "--set", f"backup.options.key={address}"],
    ):  # fmt: skip
        answer = bench.tr11(*line)
        assert PASSWORD not in answer, line
    for line in (
        ["status", "--remote", address],
        ["logs", "--remote", address],
        ["logs", "--remote", "a/b", "--endpoint", address],
    ):
        assert PASSWORD not in bench.tr11(*line, card=False), line
    assert 0 not in codes_of(
        bench, "backup run", "backup restore", "backup verify", "sync", "upload", "logs"
    )
    bench.said = [text.partition("\n")[2] for text in bench.said]  # without what was typed
    assert not bench.leaks()


def text_keys(schema: Any = OwnCard, above: tuple[str, ...] = ()) -> list[str]:
    """Every key of the card that a text may stand in."""
    found = []
    for name, entry in schema.model_fields.items():
        tables = [
            item
            for item in (entry.annotation, *getattr(entry.annotation, "__args__", ()))
            if hasattr(item, "model_fields")
        ]
        if tables and "list" not in str(entry.annotation):
            found += text_keys(tables[0], (*above, name))
        elif "str" in str(entry.annotation):
            found.append(".".join((*above, name)))
    return found


KEYS = text_keys()
SMALL = Path(__file__).parents[1] / "data" / "small-card.toml"
SHAPES = (
    f"https://ana:{PASSWORD}@host.example/x", f"gs://bucket/x?X-Goog-Signature={PASSWORD}", TOKEN,
    f"-----BEGIN RSA PRIVATE KEY----- {PASSWORD}",
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_has_the_form_of_a_secret_is_refused_in_every_key(shape: str) -> None:
    assert {"backup.url", "hub.endpoint", "slurm.setup", "alerts.urls_file", "run.name"} <= set(
        KEYS
    )
    for key in KEYS:
        with pytest.raises(CardError) as caught:
            load_card(SMALL, [f"{key}={shape}"], {})
        assert PASSWORD not in str(caught.value) and TOKEN not in str(caught.value), key


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from(
        [
            "hub.token", "hub.auth_token", "backup.password", "backup.options", "backup.secret_key", "hubb", "backup.url",
            "backup.options.secret", "backup.options.sas_token", "alerts.smtp_password", "slurm.environment.API_KEY",
            "slurm.environment.HF_TOKEN", "hub.endpoint", "backup.options.key",
        ]
    ),
    value=st.sampled_from([PASSWORD, *ADDRESSES[:2], TOKEN, f'{{secret = "{PASSWORD}"}}', f'["{TOKEN}"]']),
    broken=st.sampled_from(["", "\x07", "$UNDEFINED"]),
)  # fmt: skip
def test_a_key_that_sounds_like_a_secret_is_refused(key: str, value: str, broken: str) -> None:
    with pytest.raises(CardError) as caught:
        load_card(SMALL, [f"{key}={value}{broken}"], {})
    assert PASSWORD not in str(caught.value) and TOKEN not in str(caught.value)


def test_a_secret_that_a_variable_brings_into_the_card(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"backup\.url: holds a password") as caught:
        load_card(SMALL, ["backup.url=s3://key:$PW@bucket"], {"PW": PASSWORD})
    assert PASSWORD not in str(caught.value)
    with pytest.raises(CardError) as caught:
        load_card(
            SMALL,
            ["hub.endpoint=$HF_TOKEN", "slurm.partition=$PW x"],
            {"HF_TOKEN": TOKEN, "PW": PASSWORD},
        )
    assert TOKEN not in str(caught.value)


def test_the_secret_itself_where_its_file_belongs() -> None:
    for key in (
        "alerts.urls_file",
        "alerts.dead_man_url_file",
        "hub.credentials_file",
        "backup.credentials_file",
    ):
        with pytest.raises(CardError, match="is the path of a file") as caught:
            load_card(SMALL, [f"{key}=slack://{PASSWORD}/x"], {})
        assert PASSWORD not in str(caught.value)


def test_harmless_texts_are_taken_and_shown() -> None:
    setup = 'slurm.setup=["module load cuda/11.4; git clone ssh://git@host.example/x; curl http://x.example/y?z=1"]'
    load_card(
        SMALL,
        [setup, "backup.url=gs://bucket/path", "slurm.environment.TOKENIZERS_PARALLELISM=true"],
        {},
    )
    with pytest.raises(CardError, match=r"slurm\.partition = 'a b': must look like"):
        load_card(SMALL, ["slurm.partition=a b"], {})


def test_scripts_of_periodic_jobs_hold_no_secret_of_the_card(tmp_path: Path) -> None:
    """They hand on what the card names; a token is to be found by the job itself."""
    card = write_card(tmp_path)
    names = ("HF_TOKEN", "SCRATCH", "BUCKET_URL", "API_KEY", "GOOGLE_APPLICATION_CREDENTIALS")
    card.write_text(
        card.read_text().replace(
            "[slurm]", f"[slurm]\nsetup = {json.dumps([f'echo ${name}' for name in names])}"
        )
    )
    held = {
        "HF_TOKEN": TOKEN,
        "SCRATCH": "/scratch/ana",
        "BUCKET_URL": ADDRESSES[0],
        "API_KEY": PASSWORD,
    }
    environment = {**held, "GOOGLE_APPLICATION_CREDENTIALS": "/home/ana/key.json"}
    typed = Invocation(load_card(card), card, (), tmp_path, environment)
    assert {"SCRATCH", "GOOGLE_APPLICATION_CREDENTIALS"} <= set(typed.needed_environment())
    script = round_script(typed)
    assert "/scratch/ana" in script and TOKEN not in script and PASSWORD not in script


def test_the_scan_finds_what_is_there(bench: Bench) -> None:
    """Else the tests above prove nothing."""
    (bench.folder / "leak").write_text(base64.b64encode(LEGACY_TOKEN.encode()).decode())
    bench.children.append(f"curl {DELIVERY}")
    bench.said.append(quote(MAIL_PASSWORD))
    assert [leak.split(" in ")[0] for leak in bench.leaks()] == [
        "the mail password",
        "the delivery address",
        "the old token",
    ]


@pytest.mark.parametrize(("line", "secret"), PLANTED)
def test_what_others_say_is_shown_without_secrets(line: str, secret: str) -> None:
    assert secret not in one_line(line.format(secret), limit=10_000)
