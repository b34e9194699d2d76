"""Faults of the site, the machines and the card's set-up as a person meets them who only reads mails: the
first command of the mail, typed as it stands there, is enough. The watchdog only looks (`watch.act` is
off, as in every new card).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.runbook_mails import MAILS, Reader
from tests.twin.small_run import SmallRun
from tr11ops.cli.main import execute
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    plan = TwinPlan(name="mail-cures", nodes=4, gpus=0, cpu_nodes=0, slurmd_timeout_seconds=10)
    with Twin.up(plan, twin_home) as made:
        yield made


@pytest.fixture
def reader(stage: SmallRun, capsys: pytest.CaptureFixture[str]) -> Reader:
    return Reader(stage, capsys)


def test_a_batch_host_that_dies_is_one_typing(stage: SmallRun, reader: Reader) -> None:
    """Its slurmd, its agent and its workers die at one moment; the other nodes' job has no script
    any more.
    """
    stage.launch(4, *MAILS)
    first = stage.train()
    inject(stage.twin, "batch-host-dead", node=stage.running().nodes[0])
    mail = reader.wait_for("[CRITICAL]", "node-lost")
    assert reader.first_command(mail, "node-lost") == "tr11 launch --repair"

    def is_ended() -> (
        bool
    ):  # at once, or when its trainers have been silent long enough, as the answer says
        return "look again in" not in reader.types("tr11 launch --repair")

    stage.wait(is_ended, "the end of the job without a host")
    # the run needs all four nodes: who repairs the machine is not the one who types
    heal(stage.twin)
    second = stage.train(attempt=1)
    assert second != first and stage.launches(second)[0]["checkpoint_before"] is not None


def test_a_partition_that_is_down_names_the_site_and_goes_on(
    stage: SmallRun, reader: Reader
) -> None:
    stage.launch(4, *MAILS)
    first = stage.train()
    inject(stage.twin, "partition-down")
    # its task has half an hour left, and nothing starts after it
    mail = reader.wait_for("[WARNING]", "waits-for-site")
    title = reader.about(mail, "waits-for-site").title
    assert title.startswith(f"nothing starts after job {stage.array}_1 (until ")
    assert "scontrol update" not in mail.body and "ask when" in " ".join(mail.body.split())
    assert "State=DOWN" in reader.types(reader.first_command(mail, "waits-for-site"))
    stage.slurm.cancel(first)
    stage.wait(lambda: not any(job.state.is_active for job in stage.jobs()), "the task's end")
    worse = reader.wait_for("[CRITICAL]", "waits-for-site")
    assert "nothing trains" in worse.subject and execute(["status"]) == 1
    heal(stage.twin)
    stage.train(attempt=1)
    over = reader.wait_for("[OK]", "waits-for-site")
    assert set(over.alerts) & set(mail.alerts)
    said = " ".join(over.body.split())
    assert "Training goes on since" in said and f"job {stage.array}_2, from step" in said, (
        "the cure changed the job"
    )


def test_a_dead_node_that_the_queue_waits_for_is_one_typing(
    stage: SmallRun, reader: Reader
) -> None:
    """Four nodes are asked for, one of them as a spare: the run goes on with three."""
    blocker = stage.take_nodes(4)
    stage.launch(4, *MAILS)
    dead = stage.twin.plan.node_names[3]
    inject(stage.twin, "node-dead", node=dead)
    stage.wait(
        lambda: any(node.name == dead and node.is_gone for node in stage.slurm.nodes()),
        "Slurm's notice",
    )
    stage.wait(
        lambda: (job := stage.slurm.job(blocker)) is None or job.state.is_final,
        "the other job's end",
    )
    mail = reader.wait_for("[CRITICAL]", "nodes-short")
    assert "no attempt can start" in mail.body.replace("\n", " ")
    reader.types(reader.first_command(mail, "nodes-short"))
    stage.train()
    assert len(stage.running().nodes) == 3 and dead not in stage.running().nodes


# ---------------------------------------------------------------------------
# A set-up of the card that is broken on the nodes, on real Slurm: what the mail says of it and
# in which order it is cured, and what is said when a cure has not helped.


NO_CODEC = "export PYTHONHOME=/nowhere"  # Python does not start any more
NO_MODULE = "echo \"ERROR: Unable to locate a modulefile for 'cuda/12.4'\" >&2\nreturn 1"


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
