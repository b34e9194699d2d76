"""A set-up of the card that is broken on the nodes, on real Slurm: what the mail says of it and in
which order it is cured, and what is said when a cure has not helped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.mail_reader import Reader
from tests.twin.runbook_mails import MAILS
from tests.twin.small_run import SmallRun
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

NO_CODEC = "export PYTHONHOME=/nowhere"  # Python does not start any more
NO_MODULE = "echo \"ERROR: Unable to locate a modulefile for 'cuda/12.4'\" >&2\nreturn 1"


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(TwinPlan(name="setup", nodes=4, gpus=0, cpu_nodes=0), twin_home) as made:
        yield made


@pytest.fixture
def reader(stage: SmallRun, capsys: pytest.CaptureFixture[str]) -> Reader:
    return Reader(stage, capsys)


@pytest.mark.parametrize(
    ("broken", "said", "cause", "refused"),
    [
        (NO_CODEC, "init_fs_encoding", "No module named 'encodings'", "PYTHONHOME was changed by [1]"),
        (NO_MODULE, "Unable to locate", "modulefile for 'cuda/12.4'", "{script} line 3, ends with exit status 1"),
    ],
)  # fmt: skip
def test_a_broken_set_up_is_cured_from_its_mail(
    stage: SmallRun, reader: Reader, broken: str, said: str, cause: str, refused: str
) -> None:
    script = stage.folder / "setup.sh"
    script.write_text(":\n")
    stage.launch(6, *MAILS, f"slurm.setup=['source {script}']")
    stage.train()
    script.write_text(f"# of the site\n{broken}\n")
    stage.slurm.cancel(stage.running().raw_id)

    mail = reader.wait_for("[CRITICAL]", "start-failed")
    first = f"attempt {stage.array}_2 could not start"
    assert mail.subject.startswith(f"[CRITICAL] heal: {first}") and mail.subject.endswith(cause)
    top, _, evidence = mail.body.partition("\nEvidence:\n")
    flat = " ".join(top.split())
    assert flat.startswith(f"A{first[1:]}: slurm.setup") and f"{cause}. This began" in flat
    doctor = flat.index("Type: cd ")
    assert flat.index("tr11 doctor") > doctor
    assert flat.index("When what it refuses is repaired, type:") > flat.index("tr11 doctor")
    assert flat.index("tr11 resume") > flat.index("When what it refuses is repaired, type:")
    assert "repair what `tr11 doctor` refuses" in " ".join(evidence.split())
    assert said in evidence and cause in " ".join(evidence.split())

    assert reader.first_command(mail, "start-failed") == "tr11 doctor"
    shown = reader.types("tr11 doctor", expect=1)
    words = " ".join(shown.split())
    assert refused.format(script=script) in words and cause in words
    assert str(script) in words and "<no Python frame>" not in words
    too_long = [line for line in shown.splitlines() if len(line) > 80]
    assert all(len(word) > 40 for line in too_long for word in [max(line.split(), key=len)])

    # typed before it was repaired: it does not go unsaid that this has not helped
    reader.types("tr11 resume --yes")
    again = reader.wait_for("[CRITICAL] heal: not cured", "start-failed")
    assert f"Not cured: attempt {stage.array}_3 could not start" in " ".join(again.body.split())
    assert not [one for one in reader.mails() if one.subject.startswith("[OK]")]

    script.write_text(":\n")
    reader.types("tr11 resume --yes")
    stage.train(attempt=3)
    over = reader.wait_for("[OK]", "start-failed")
    assert "Training goes on since" in " ".join(over.body.split())
