"""Sites that differ from the usual, on a real Slurm configured so: each is met, or said in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.site import read_site
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cluster.slurm_command import CommandResult, ask_about_site, run_command
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

# the programs of a node without scontrol, as the card's set-up makes them
WITHOUT_SCONTROL = (
    'slurm.setup=["mkdir -p $TMPDIR/bin", "find /usr/bin -maxdepth 1 ! -name scontrol -exec ln -sft $TMPDIR/bin {} +",'
    ' "export PATH=$TMPDIR/bin", "hash -r", "if command -v scontrol; then exit 9; fi"]'
)


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    plan = TwinPlan(
        name="odd", nodes=4, gpus=0, cpu_nodes=0, slurmd_timeout_seconds=10,
        slurm_settings=("MaxArraySize=1", "PrivateData=jobs,nodes"),
    )  # fmt: skip
    with Twin.up(plan, twin_home) as made:
        yield made


def test_without_arrays_and_without_scontrol_on_the_nodes_attempts_follow_each_other(
    stage: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a site without accounting, too: the first attempt trains to its end, and the second follows."""
    monkeypatch.setenv("TMPDIR", str(stage.folder))
    stage.launch(2, "slurm.spare_nodes=0", "slurm.nodes=2", WITHOUT_SCONTROL)
    said = capsys.readouterr().out
    assert "jobs that each wait for the one before (afterany)" in said
    assert "the site shows each user their own jobs alone (PrivateData=jobs)" in said
    first = stage.train()
    assert "scontrol cannot be started" in stage.paths.main_log.read_text()
    stage.slurm.signal(first, "TERM")
    stage.wait_for_verdict(first)
    assert stage.verdict(first)["exit_status"] == 0
    second = stage.train(1, beyond=stage.iteration(first))
    assert stage.slurm.job(second).array_id is None  # type: ignore[union-attr]


def test_a_site_that_hides_its_nodes_is_said_by_its_own_words(small_twin: Twin) -> None:
    """To all but its administrators: so it is asked as another user."""

    def as_nobody(words: Sequence[str], **settings: object) -> CommandResult:
        setpriv = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        return run_command([*setpriv, *words], **settings)  # type: ignore[arg-type]

    slurm = SlurmScheduler(small_twin.environment, runner=as_nobody)
    assert slurm.jobs() == () and slurm.partitions()
    with pytest.raises(SchedulerError, match="the site shows its nodes to administrators alone"):
        slurm.nodes()
    rules = read_site("nobody", partial(ask_about_site, environment=small_twin.environment))
    assert rules.hidden == {"jobs", "nodes"} and not rules.has_arrays
