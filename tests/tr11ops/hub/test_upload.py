"""`tr11 upload`: a real small model goes to the hub and comes back with the same logits; killed,
refused, two at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from msgspec.structs import asdict

from tests.plugins.faulty_hub import FaultyHub
from tests.waiting import until
from tr11ops.cli.main import execute
from tr11ops.cli.upload import export_options
from tr11ops.hub.model_card import identity_in
from tr11ops.hub.upload import OURS, Work, stale
from tr11ops.runcard.card import find_card, load_card, resolved
from tr11ops.rundir.claims import CopyLock
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import append_line
from trainer.contract.manifest import FileEntry, file_digest
from trainer.contract.paths import RunPaths

MODEL = "science/model"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose checkpoint of step 0 is a BLOOM of transformers, and what it exports
    to, by dtype.

    Done in this process, which has torch loaded; the tests' own exports are children.
    """
    from transformers import BloomConfig, BloomForCausalLM

    from tests.trainer.child_requests import checkpoints as run_checkpoints

    folder = tmp_path_factory.mktemp("prepared")
    made = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=6))
    made.save_pretrained(folder / "bloom")
    words = _card("http://localhost")
    card = load_card(find_card("demo", {}, folder), words[3::2], {}, directory=folder)
    (folder / "card.json").write_text(json.dumps(resolved(card)))
    options = ["--json", "--card", str(folder / "card.json")]
    assert run_checkpoints("import", *options, "--", folder / "bloom") == 0
    place = folder / "run/checkpoints/main/global_step0"
    for dtype in ("fp32", "bf16"):
        work = Work(
            folder / f"exports/global_step0-{identity_of(place)[:8]}-{dtype}",
            export_options(card, None),
        )
        work.folder.mkdir(parents=True)
        assert (
            run_checkpoints("export", *options, "--dtype", dtype, "-o", work.model, "--", place)
            == 0
        )
        files = [
            FileEntry(path.name, path.stat().st_size, file_digest(path))
            for path in work.model.iterdir()
        ]
        work.record_export({"files": [asdict(entry) for entry in files]})
    return folder


def _card(url: str) -> list[str]:
    settings = (
        "run.directory=run", "model.hidden_size=48", "model.attention_heads=6", "tokenizer.padded_vocabulary_size=64",
        "precision.dtype='fp32'", f"hub.endpoint={url}", f"hub.model_repository={MODEL}", "hub.license=apache-2.0",
        "hub.languages=['en','fr']", "hub.credentials_file=hub.json",
    )  # fmt: skip
    return ["--run", "demo", *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture
def card(
    prepared: Path, tmp_path: Path, hub_server: FaultyHub, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The card's words on the command line; the run is in the current folder."""
    shutil.copytree(prepared / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub.json").write_text(
        json.dumps({"auth_token": hub_server.token, "username": "bot"})
    )
    (tmp_path / "hub.json").chmod(0o600)
    return _card(hub_server.url)


@pytest.fixture
def exported(card: list[str], prepared: Path) -> list[str]:
    """The same where an earlier try has got as far as the export, in both precisions."""
    shutil.copytree(prepared / "exports", "run/state/upload")
    return card


def _directory() -> RunDirectory:
    return RunDirectory(RunPaths(Path("run").resolve(), "demo", "main"), Path("run/kill-switch"))


def _models_seen(server: FaultyHub) -> list[set[str]]:
    """Which files of a model each commit of the repository shows."""
    return [
        {path for path in commit.files if path != ".gitattributes"}
        for commit in server.history(MODEL)
    ]


# ----------------------------------------------------------------------------- there and back
def test_the_model_comes_back_with_its_logits_and_its_card(
    prepared: Path,
    card: list[str],
    hub_server: FaultyHub,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from huggingface_hub import ModelCard, snapshot_download
    from transformers import AutoModelForCausalLM

    append_line(
        _directory().paths.metrics,
        '{"kind": "step", "iteration": 0, "lm_loss": 2.5, "time": 1, "job_id": "1"}',
    )
    append_line(
        _directory().paths.metrics,
        '{"kind": "validation", "name": "valid", "iteration": 0, "lm_loss": 2.75}',
    )
    assert execute(["upload", "latest", *card, "--dry-run"]) == 0
    plan = capfd.readouterr().out
    assert (
        "would be made, private" in plan
        and "# demo, step 0" in plan
        and hub_server.count("create") == 0
    )
    assert not Path("run/state/upload").exists()

    for folder in (prepared / "exports").glob("*-fp32"):  # of an earlier try, with one flipped bit
        damaged = (
            Path(shutil.copytree(folder, Path("run/state/upload") / folder.name))
            / "model/model.safetensors"
        )
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert execute(["upload", "latest", *card, "--json"]) == 0
    said = capfd.readouterr()
    assert "the export of an earlier try is damaged and is made again" in said.err
    assert hub_server.files(MODEL)["model.safetensors"] == content
    answer = json.loads(said.out)
    assert hub_server.history(MODEL)[-1].id == answer["commit"] and answer["branch"] == "main"
    assert _models_seen(hub_server) == [set(), {"README.md", "config.json", "model.safetensors", "generation_config.json"} & set(hub_server.files(MODEL)) | {"README.md", "config.json", "model.safetensors"}]  # fmt: skip
    assert (
        hub_server.repo(MODEL).private
        and hub_server.history(MODEL)[-1].title == "demo main: step 0"
    )
    assert list(Path("run/state/upload").iterdir()) == []
    assert [entry.data["commit"] for entry in read_journal(_directory().journal).entries if entry.kind == "upload"] == [answer["commit"]]  # fmt: skip

    text = hub_server.files(MODEL)["README.md"].decode()
    parsed = ModelCard(text)
    data = parsed.data.to_dict()
    assert (
        data["license"] == "apache-2.0"
        and data["language"] == ["en", "fr"]
        and data["library_name"] == "transformers"
    )
    assert data["pipeline_tag"] == "text-generation" and identity_in(text) is not None
    assert "| training | 2.5000 |" in text and "| validation, valid | 2.7500 at step 0 |" in text
    assert "| goodput | unknown |" in text and "| GPUs | unknown |" in text
    for hidden in (
        str(tmp_path),
        str(prepared),
        hub_server.token,
        os.environ.get("USER") or "no user",
    ):
        assert hidden not in text

    back = snapshot_download(
        MODEL, endpoint=hub_server.url, token=hub_server.token, cache_dir=tmp_path / "cache"
    )
    tokens = torch.arange(40).reshape(2, 20) % 64
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(back)(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(prepared / "bloom")(tokens).logits
    assert torch.equal(ours, theirs)
    everything = (
        said.out
        + said.err
        + "".join(p.read_text(errors="replace") for p in Path("run").rglob("*.json*"))
    )
    assert not any(secret in everything for secret in hub_server.secrets())


def test_a_second_upload_changes_nothing_another_precision_does(
    exported: list[str], prepared: Path, hub_server: FaultyHub, capfd: pytest.CaptureFixture[str]
) -> None:
    assert execute(["upload", "0", *exported]) == 0
    first = capfd.readouterr().out
    # what was exported is gone by now
    shutil.copytree(prepared / "exports", "run/state/upload", dirs_exist_ok=True)
    assert execute(["upload", "0", *exported]) == 0
    assert capfd.readouterr().out == first and len(hub_server.history(MODEL)) == 2
    hub_server.put(MODEL, "model-00001-of-00002.safetensors", b"of an earlier export")
    hub_server.put(MODEL, "notes.md", b"of a person")
    assert execute(["upload", "0", *exported, "--dtype", "bf16", "-m", "halved"]) == 0
    files = hub_server.files(MODEL)
    assert "model-00001-of-00002.safetensors" not in files and files["notes.md"] == b"of a person"
    assert (
        json.loads(files["config.json"])["dtype"] == "bfloat16"
        and hub_server.history(MODEL)[-1].title == "halved"
    )
    shutil.copytree(prepared / "exports", "run/state/upload", dirs_exist_ok=True)
    assert execute(["upload", "0", *exported, "--branch-per-step"]) == 0
    assert set(hub_server.repo(MODEL).branches) == {"main", "global_step0"}
    assert b'revision="global_step0"' in hub_server.files(MODEL, "global_step0")["README.md"]
    assert (
        capfd.readouterr()
        .out.splitlines()[-1]
        .startswith(f"{hub_server.url}/{MODEL}/tree/global_step0: step 0, commit ")
    )


def test_what_others_published_is_not_overwritten_unasked(
    exported: list[str], hub_server: FaultyHub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub_server.create(MODEL)
    hub_server.put(MODEL, "config.json", b"{}")
    assert execute(["upload", "0", *exported]) == 2
    assert "no one can be asked here" in capfd.readouterr().err
    hub_server.put(MODEL, "README.md", b"# a model of mine")
    assert execute(["upload", "0", *exported, "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["overwrites"] == "a README.md that tr11 did not write"
    hub_server.put(MODEL, "README.md", b"<!-- tr11-model 0123456789abcdef -->")
    assert execute(["upload", "0", *exported, "--dry-run"]) == 0
    assert "which holds a model of another run: that needs --yes" in capfd.readouterr().out
    assert execute(["upload", "0", *exported, "--yes"]) == 0
    assert b"# demo, step 0" in hub_server.files(MODEL)["README.md"]


def test_a_private_model_is_not_published_where_all_can_see_it(
    exported: list[str], hub_server: FaultyHub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub_server.create(MODEL, private=False)
    assert execute(["upload", "0", *exported, "--private"]) == 1
    assert (
        f"{MODEL} is public, and --private was asked for" in capfd.readouterr().err
        and hub_server.count("commit") == 0
    )
    # the card's wish is for a repository that is made
    assert execute(["upload", "0", *exported]) == 0


# ----------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["0", "--to", "model"], 2, "write OWNER/NAME"),
        (["0", "--revision", "a/../b"], 2, "is not a branch's name"),
        (["0", "--revision", "a", "--branch-per-step"], 2, "leave one out"),
        (["0", "--dtype", "int8"], 2, "must be one of bf16, fp16, fp32"),
        (["7"], 1, "does not exist; there are 0"),
        (
            ["0", "--set", "model.activation=gelu"],
            1,
            "model.activation is gelu_tanh in the checkpoint and gelu in the",
        ),
        (["0", "--set", "hub.credentials_file=none.json"], 1, "none.json: No such file"),
        (["0", "--to", "elsewhere/model"], 1, "403: the token of"),
    ],
)
def test_a_refusal_is_one_line(
    card: list[str],
    hub_server: FaultyHub,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    said: str,
) -> None:
    assert execute(["upload", *card, *words]) == code
    lines = capfd.readouterr().err.splitlines()
    assert said in lines[-1] and len(lines) <= 2 and hub_server.token not in "".join(lines)


def test_a_full_disk_is_known_before_the_export(
    card: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert execute(["upload", "0", *card]) == 1
    assert "1000 B are free and the export takes 2" in capfd.readouterr().err


def test_half_a_checkpoint_is_not_published(
    card: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("run/checkpoints/main/global_step0/manifest.json").unlink()
    assert execute(["upload", "0", *card]) == 1
    assert "is not complete (it has no manifest)" in capfd.readouterr().err


def test_two_at_once(
    card: list[str], hub_server: FaultyHub, capfd: pytest.CaptureFixture[str]
) -> None:
    import threading

    assert execute(["upload", "0", *card, "--dry-run", "--json"]) == 0
    name = Path(json.loads(capfd.readouterr().out)["work"]).name
    with CopyLock(_directory(), f"hub-{name}", threading.Event()):
        assert execute(["upload", "0", *card]) == 1
    assert (
        "is being uploaded already: process" in capfd.readouterr().err
        and hub_server.count("commit") == 0
    )


def test_another_commit_meanwhile_is_built_upon(exported: list[str], hub_server: FaultyHub) -> None:
    hub_server.create(MODEL)
    hub_server.on(
        "commit",
        lambda: hub_server.put(MODEL, "model-00001-of-00009.safetensors", b"late") and None,
    )
    assert execute(["upload", "0", *exported]) == 0
    assert "model-00001-of-00009.safetensors" not in hub_server.files(MODEL)


# ----------------------------------------------------------------------------- killed
CHILD = """
import os, sys
from tr11ops.cli.main import execute
from tr11ops.cli.upload import export_options
import tr11ops.cli.upload, tr11ops.hub.client, tr11ops.hub.committing, tr11ops.hub.transport, tr11ops.goodput.history
import tr11ops.goodput.account, tr11ops.cli.goodput, tr11ops.hub.upload, tr11ops.hub.upload, trainer.schedule.flops
for line in sys.stdin:
    number = os.fork()
    if number == 0:
        os.setpgid(0, 0)
        os._exit(execute(line.split(chr(31))[:-1]))
    print(number, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
"""


def test_killed_at_any_request_the_same_command_goes_on(
    card: list[str], hub_server: FaultyHub, prepared: Path, tmp_path: Path
) -> None:
    """kill -9 in the midst of each kind of request; whatever is seen meanwhile is no model or the
    whole one.
    """
    hub_server.configure(multipart_from=20_000, part_bytes=30_000)
    words = chr(31).join(["upload", "0", *card, "--json", ""])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as runner:
        assert runner.stdin is not None and runner.stdout is not None

        def start() -> int:
            runner.stdin.write(words + "\n")  # type: ignore[union-attr]
            runner.stdin.flush()  # type: ignore[union-attr]
            return int(runner.stdout.readline())  # type: ignore[union-attr]

        kinds = ["info", "create", "export", "preupload", "validate-yaml", "lfs-batch", "lfs-part", "lfs-part", "lfs-verify", "commit"]  # fmt: skip
        for kind in kinds:
            pid: list[int] = []

            def kill(pid: list[int] = pid) -> None:
                until(lambda: pid, "the upload")
                os.killpg(pid[0], signal.SIGKILL)

            if kind == "export":
                pid.append(start())
                until(
                    lambda: any(Path("run/state/upload").glob("*/.model.partial-*")),
                    "a part of a file",
                    pause=0.01,
                )
                # of the command alone: the export must not go on without it
                os.kill(pid[0], signal.SIGKILL)
                until(lambda: not any(_exporters(tmp_path)), "the end of the export")
                # another one got through
                shutil.copytree(prepared / "exports", "run/state/upload", dirs_exist_ok=True)
            else:
                hub_server.on(kind, kill)
                pid.append(start())
            assert int(runner.stdout.readline()) == -signal.SIGKILL, kind
            hub_server.heal()
            if ("model", MODEL) in hub_server.hub.repos:
                assert all(
                    not seen or {"README.md", "config.json", "model.safetensors"} <= seen
                    for seen in _models_seen(hub_server)
                )
        pid = [start()]
        assert json.loads(_until_json(runner)) and int(runner.stdout.readline()) == 0
        runner.stdin.close()
    # the commit was made though its sender was dead, and not made again
    assert len(hub_server.history(MODEL)) == 2
    size = hub_server.history(MODEL)[-1].files["model.safetensors"].size
    # cut at a part and after its last one; never again once it was there
    assert hub_server.bytes_sent() <= 3 * size
    # another upload's
    assert [folder.name[-5:] for folder in Path("run/state/upload").iterdir()] == ["-bf16"]
    from safetensors.torch import load

    ours, theirs = (
        load(hub_server.files(MODEL)["model.safetensors"]),
        load((prepared / "bloom/model.safetensors").read_bytes()),
    )
    shared = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    assert all(torch.equal(tensor, shared[name.removeprefix("transformer.")]) for name, tensor in ours.items() if name.removeprefix("transformer.") in shared)  # fmt: skip


def _exporters(folder: Path) -> Iterator[int]:
    """Living exports into this folder."""
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        if (
            "export" in words
            and str(folder) in words
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            yield process.pid


def _until_json(runner: subprocess.Popen[str]) -> str:
    lines = []
    while (line := runner.stdout.readline()) != "}\n":  # type: ignore[union-attr]
        assert line
        lines.append(line)
    return "".join([*lines, "}"])


def test_a_hub_that_is_away_is_no_failure_of_the_export(
    exported: list[str],
    hub_server: FaultyHub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tr11ops.cli.upload.PATIENCE_SECONDS", 0.0)
    hub_server.fail("lfs-put", 503)
    assert execute(["upload", "0", *exported]) == 3
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .endswith("127.0.0.1 answers 503; the same command goes on")
    )
    (folder,) = Path("run/state/upload").glob("*-fp32")
    stamp = (folder / "model").stat().st_mtime_ns
    hub_server.fail("commit", 503)
    assert execute(["upload", "0", *exported]) == 3
    assert (folder / "model").stat().st_mtime_ns == stamp
    assert execute(["upload", "0", *exported]) == 0 and hub_server.count("lfs-put") == 2


# ----------------------------------------------------------------------------- pure
def test_what_is_stale() -> None:
    tree = dict.fromkeys(["model.safetensors", "model-00001-of-00002.safetensors", "a/model.safetensors", "adapter.safetensors", "tokenizer.json", "notes.md"])  # fmt: skip
    assert stale(tree, ["model.safetensors"]) == (
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
    )  # type: ignore[arg-type]
    assert stale({}, []) == () and OURS


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"files": []}', '{"files": [{"path": "../x", "bytes": 1, "digest": ""}]}'],
)
def test_a_garbled_record_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "export.json").write_text(content)
    assert Work(tmp_path).recorded() is None


def test_an_export_with_another_tokenizer_is_not_reused(tmp_path: Path) -> None:
    files = {"files": [{"path": "config.json", "bytes": 1, "digest": "d"}]}
    made = Work(tmp_path, "with")
    assert (
        made.record_export(files) == made.recorded()
        and Work(tmp_path, "without").recorded() is None
    )
    card = load_card(find_card("demo", {}, tmp_path), (), {}, directory=tmp_path)
    (tmp_path / "there").mkdir()
    names = [
        export_options(card, None),
        export_options(card, tmp_path / "there"),
        export_options(card, tmp_path / "not there"),
    ]
    assert names[0] == names[2] != names[1]  # of one that is not there nothing is written
