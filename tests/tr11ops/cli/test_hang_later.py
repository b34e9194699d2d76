"""A file system that stops answering while a command reads: it is said in one line, Ctrl-C ends the
command at once, and what follows goes on when the file system answers again.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tr11ops.cli.hung_mounts import hang, heal, own_mounts, printed_by
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tests.waiting import until
from trainer.contract.files import append_line

SILENT = "has not answered for"
TYPE = """\
import sys, time
from pathlib import Path
from tr11ops.base import deadline
from tr11ops.cli.main import run
deadline.SILENCE_SECONDS, deadline.PASS_SECONDS = 1.0, float(sys.argv[1])
deadline.PROBE_SECONDS = 0.2


def held_back(work):
    # which begins when its file system is gone

    def wait(*given):
        print("begun", flush=True)
        while b"hung" not in Path("/proc/self/mounts").read_bytes():
            time.sleep(0.05)
        return work(*given)

    return wait


from tr11ops.cli import checkpoints

checkpoints.read_them = held_back(checkpoints.read_them)
run(sys.argv[2:])
"""


def in_namespace(root: str, said: str, patience: str, answers: str, *words: str) -> None:
    """Type one command, take the file system from under it when it has begun, and, with `answers`,
    bring it back; prints what came of it as JSON.
    """
    try:
        own_mounts()
        heal(root, hang(root))
    except OSError as error:
        print(json.dumps({"skip": f"cannot be mounted: {error}"}))
        return
    log = Path(said)
    with log.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-c", TYPE, patience, *words], stdout=output, stderr=output
        )

    def seen(word: str) -> bool:
        return word in log.read_text()

    until(lambda: seen("begun") or command.poll() is not None)
    held = hang(root)
    begun = time.monotonic()
    until(lambda: seen(SILENT) or command.poll() is not None)
    told = time.monotonic() - begun
    if answers == "again":
        heal(root, held)
        until(lambda: seen("answers again") or command.poll() is not None)
        append_line(next(Path(root).rglob("main_log.txt")), "came later")
        until(lambda: seen("came later") or command.poll() is not None)
    if answers != "never":
        command.send_signal(signal.SIGINT)
    asked = time.monotonic()
    code = command.wait(60)
    print(json.dumps({"told": told, "took": time.monotonic() - asked, "code": code}))


def outcome(
    tmp_path: Path, *words: str, patience: float = 600, answers: str = ""
) -> tuple[dict, str]:
    said = tmp_path / "said"
    typed = (
        "import sys; from tests.tr11ops.cli.test_hang_later import in_namespace\n"
        "in_namespace(*sys.argv[1:])"
    )
    begun = [str(tmp_path / "run"), str(said), str(patience), answers]
    found = json.loads(printed_by(typed, *begun, *words, seconds=300))
    if "skip" in found:
        pytest.skip(found["skip"])
    return found, said.read_text()


@pytest.fixture
def card(tmp_path: Path) -> Path:
    card = write_card(tmp_path)
    log = tmp_path / "run" / "small-logs" / "logs" / "main" / "main_log.txt"
    log.parent.mkdir(parents=True)
    append_line(log, "begun")
    return card


def test_a_log_that_is_followed_says_so_and_goes_on(card: Path, tmp_path: Path) -> None:
    found, said = outcome(tmp_path, "logs", "-f", "--run", str(card), patience=2, answers="again")
    assert said.count(SILENT) == said.count("answers again") == 1 and "came later" in said, said
    assert found["code"] == 0 and "Traceback" not in said, (found, said)


@pytest.mark.parametrize("line", ["logs -f", "checkpoints verify --all"])
def test_ctrl_c_ends_what_waits_for_ever(card: Path, tmp_path: Path, line: str) -> None:
    """Where the main thread waits in the kernel, and where it waits for threads that do."""
    write_checkpoint(tmp_path / "run" / "checkpoints" / "main", 10)
    found, said = outcome(tmp_path, *line.split(), "--run", str(card))
    assert found["code"] == 1 and said.count(SILENT) == 1 and "interrupted" in said, (found, said)
    assert "Traceback" not in said, said


def test_what_reads_ends_with_exit_code_3(card: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run" / "checkpoints" / "main", 10)
    words = ("checkpoints", "verify", "--all", "--run", str(card))
    found, said = outcome(tmp_path, *words, patience=3, answers="never")
    assert found["code"] == 3 and "nothing may be concluded" in said, (found, said)
    assert "Traceback" not in said, said


# ----------------------------------------------------------------------------- other file systems
def hung_from_the_start(place: str, said: str, patience: str, *words: str) -> None:
    """Type one command where `place` hangs; prints its exit code as JSON, "late" where it does not
    end.
    """
    try:
        own_mounts()
        held = hang(place)
    except OSError as error:
        print(json.dumps({"skip": f"cannot be mounted: {error}"}))
        return
    with Path(said).open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-c", TYPE, patience, *words], stdout=output, stderr=output
        )
        try:
            code: object = command.wait(40)
        except subprocess.TimeoutExpired:
            code = "late"
    heal(place, held)
    print(json.dumps({"code": code}))


@pytest.mark.parametrize(
    "line",
    [
        "compare CARD HUNG", "compare CARD HUNG/metrics.jsonl", "compare CARD OTHER", "numbers HUNG/main_log.txt",
        "logs --file HUNG/main_log.txt --run CARD", "diagnose HUNG/main_log.txt",
        "backup run --run CARD --set backup.store=HUNG",
        "backup restore 10 --output HUNG/again --run CARD --set backup.store=STORE",
    ],
)  # fmt: skip
def test_another_place_that_hangs_is_named(card: Path, tmp_path: Path, line: str) -> None:
    """What a command reads beside the run directory: a second run, a named log, a store of copies."""
    write_checkpoint(tmp_path / "run" / "checkpoints" / "main", 10)
    place, said = tmp_path / "hung", tmp_path / "said"
    place.mkdir()
    other = write_card(tmp_path, "other", place)
    words = {
        "CARD": str(card),
        "OTHER": str(other),
        "HUNG": str(place),
        "STORE": str(tmp_path / "s"),
    }
    typed = (
        "import sys; from tests.tr11ops.cli.test_hang_later import hung_from_the_start\n"
        "hung_from_the_start(*sys.argv[1:])"
    )
    for word, value in words.items():
        line = re.sub(rf"\b{word}\b", value, line)
    found = json.loads(printed_by(typed, str(place), str(said), "3", *line.split(), seconds=120))
    if "skip" in found:
        pytest.skip(found["skip"])
    text = said.read_text()
    assert found["code"] == 3 and str(place) in text and "answer" in text, (found, text)
    assert "Traceback" not in text, text
