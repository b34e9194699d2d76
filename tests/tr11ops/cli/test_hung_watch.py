"""A watchdog over a run whose file system stops answering: people are told in time, the other runs
are watched as before, and what was kept on this machine comes home when it answers again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import Mailbox, Server
from tests.tr11ops.cli.hung_mounts import ENTRY, hang, heal, own_mounts, printed_by
from tests.tr11ops.launch.run_inputs import write_card
from tests.waiting import until
from tr11ops.alerts.store import read_alert_state
from tr11ops.cli.common import directory_of
from tr11ops.runcard.card import load_card
from tr11ops.sweep.manifest import FILE, SCHEMA, ManifestCell, SweepManifest
from trainer.contract.documents import document
from trainer.contract.files import write_json

# the deadlines of a watchdog in small, here and in what it starts
TYPE = """\
import sys
import time
from tr11ops.base import deadline
deadline.SILENCE_SECONDS, deadline.LOOK_SECONDS, deadline.PROBE_SECONDS = 1.0, 2.0, 0.2
from tr11ops.cli import cron
from tr11ops.cron import jobs, runner
usual = jobs.Every
jobs.Every = lambda seconds: usual(seconds / 20)
cron.CELLS_SECONDS = 0.5
runner.ENTRY = sys.argv[1]
from tr11ops.cli.main import run; run(sys.argv[2:])
"""


def type_it(log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", TYPE, ENTRY, *words], stdout=output, stderr=output
        )


def in_namespace(name: str, *words: str) -> None:
    """Run one of the scenes below where what is mounted is this process's alone."""
    try:
        own_mounts()
        heal(words[0], hang(words[0]))
    except OSError as error:
        print(json.dumps({"skip": f"cannot be mounted: {error}"}))
        return
    print(json.dumps(globals()[name](*words)))


def played(scene: str, *words: str) -> dict[str, object]:
    typed = (
        "import sys; from tests.tr11ops.cli.test_hung_watch import in_namespace\n"
        "in_namespace(*sys.argv[1:])"
    )
    found: dict[str, object] = json.loads(printed_by(typed, scene, *words, seconds=500))
    if "skip" in found:
        pytest.skip(str(found["skip"]))
    return found


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, int]]:
    box = Mailbox()
    server = Server(box)
    server.start()
    yield box, server.port
    server.stop()


def mails_to(port: int) -> str:
    return (
        '[alerts]\nrecipients = ["ana@example.org"]\nsmtp_host = "127.0.0.1"\n'
        f'smtp_port = {port}\ndigest_time = ""\ninterval_minutes = 1\nresolve_after = 1\n'
        '[cron]\nskip = ["nodes-check"]\n'
    )


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine keeps what cannot be written."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv("TR11_FALLBACK", str(tmp_path / "machine"))
    return tmp_path / "machine"


def said_in(log: Path, word: str) -> bool:
    return word in log.read_text()


def ended(daemon: subprocess.Popen[bytes], log: Path, place: str, held: int) -> int:
    """The exit code of a daemon that is asked to end while a file system hangs. The kernel keeps a
    process of which a thread waits where no signal reaches, until that answers.
    """
    daemon.send_signal(signal.SIGTERM)
    until(lambda: said_in(log, "\nended\n") or daemon.poll() is not None, seconds=90)
    heal(place, held)
    return daemon.wait(60)


def sent(mail: EmailMessage) -> float:
    """When a mail was written, in whole seconds since the epoch."""
    return parsedate_to_datetime(str(mail["Date"])).timestamp()


# ----------------------------------------------------------------------------- the daemon of one run
def daemon_scene(root: str, card: str, log_name: str) -> dict[str, object]:
    log = Path(log_name)
    daemon = type_it(log, "cron", "run", "--run", card)
    until(lambda: said_in(log, "pulse: ran") or daemon.poll() is not None)
    before = log.stat().st_size
    held = hang(root)
    until(lambda: "recorded in" in log.read_text()[before:] or daemon.poll() is not None)
    first = log.read_text()[before:]
    until(lambda: log.read_text()[before:].count("recorded in") > 1 or daemon.poll() is not None)
    heal(root, held)
    healed = log.stat().st_size
    until(
        lambda: (
            "pulse: ran (exit code 1)\n" in log.read_text()[healed:] or daemon.poll() is not None
        )
    )
    well = time.time()
    again = hang(root)
    return {"first": first, "well": well, "code": ended(daemon, log, root, again)}


def test_a_run_that_hangs_later_is_told_of_and_comes_home(
    tmp_path: Path, mailbox: tuple[Mailbox, int]
) -> None:
    box, port = mailbox
    card = write_card(tmp_path)
    card.write_text(card.read_text() + mails_to(port))
    directory = directory_of(load_card(card, (), {}))
    directory.root.mkdir()
    found = played("daemon_scene", str(directory.root), str(card), str(tmp_path / "log"))
    assert "does not answer" in str(found["first"]) and found["code"] == 0, found
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text, text
    raised = [mail for _, mail in box.mails if "does not answer" in mail["Subject"]]
    # of the second one the daemon may tell before it has ended
    [first] = [mail for mail in raised if sent(mail) <= float(str(found["well"]))]
    assert "CRITICAL" in first["Subject"], box.subjects
    known = read_alert_state(directory).alert_state.incidents()
    assert "directory-unseen" in {incident.detector for incident in known}, "it came home"


@pytest.mark.parametrize("line", ["pulse", "cron run --once"])
def test_by_hand_or_by_crontab_it_is_told_of_too(
    tmp_path: Path, mailbox: tuple[Mailbox, int], line: str
) -> None:
    box, port = mailbox
    card = write_card(tmp_path)
    card.write_text(card.read_text() + mails_to(port))
    (tmp_path / "run").mkdir()
    found = played("typed_scene", str(tmp_path / "run"), str(card), str(tmp_path / "log"), line)
    text = (tmp_path / "log").read_text()
    assert found["code"] == (3 if line == "pulse" else 0) and "does not answer" in text, text
    [mail] = [str(mail["Subject"]) for _, mail in box.mails]
    assert "does not answer" in mail


def typed_scene(root: str, card: str, log_name: str, line: str) -> dict[str, object]:
    held = hang(root)
    typed = type_it(Path(log_name), *line.split(), "--run", card)
    until(lambda: typed.poll() is not None, seconds=120)
    heal(root, held)
    return {"code": typed.wait(60)}


# ----------------------------------------------------------------------------- cells
def cells_scene(cell: str, card: str, log_name: str) -> dict[str, object]:
    log = Path(log_name)
    daemon = type_it(log, "cron", "run", "--run", card)
    names = ("toy/one: pulse", "toy/two: pulse")
    until(lambda: all(said_in(log, name) for name in names) or daemon.poll() is not None)
    held = hang(cell)
    before = log.stat().st_size

    def after(name: str, times: int) -> bool:
        return log.read_text()[before:].count(name) >= times or daemon.poll() is not None

    until(lambda: after("toy/one: pulse", 1))
    until(lambda: after("toy/two: pulse", 4))
    return {"said": log.read_text()[before:], "code": ended(daemon, log, cell, held)}


def test_a_cell_that_hangs_is_told_of_and_holds_up_no_other(
    tmp_path: Path, mailbox: tuple[Mailbox, int]
) -> None:
    """Its card lies in the directory that hangs."""
    box, port = mailbox
    card = write_card(tmp_path)
    study = tmp_path / "study"
    cells = []
    for number, name in enumerate(("one", "two")):
        text = card.read_text().replace(str(tmp_path / "run"), str(study / name))
        cell_card = study / name / "tr11.toml"
        cell_card.parent.mkdir(parents=True)
        cell_card.write_text(text + mails_to(port))
        write_json(study / name / "state" / "submissions" / "mark.json", {})
        cells.append(ManifestCell(number, name, settings={}, derived={}, card_hash=""))
    manifest = SweepManifest(
        1, "toy", user="ana", created=0.0, card=str(card), rule="", equal_samples=False, at_once=1,
        cells=tuple(cells),
    )  # fmt: skip
    write_json(study / FILE, {"schema": SCHEMA, **document(manifest)})
    found = played("cells_scene", str(study / "one"), str(card), str(tmp_path / "log"))
    said = str(found["said"])
    assert found["code"] == 0 and "Traceback" not in said, said
    line = next(line for line in said.splitlines() if "toy/one: pulse" in line)
    assert "does not answer" in line and "recorded in" in line, said
    assert said.index("toy/two: pulse") < said.index("toy/one: pulse"), "it had waited for it"
    [mail] = [str(mail["Subject"]) for _, mail in box.mails if "does not answer" in mail["Subject"]]
    assert "CRITICAL" in mail
