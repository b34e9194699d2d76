"""The contract of a trainer with the run directory, on each trainer that tr11 has: our own, the twin's stand-in, and
one that speaks each dialect, under the keeper. A new dialect is taken up by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tr11ops.trainers.contract_lives import SHORT, Life, live
from tests.tr11ops.trainers.contract_runs import subjects
from trainer.contract.attempt import EXIT_REFUSED

STARTS = {"tr11": "trainer.control.launcher", "stand-in": "tr11ops.twin.stand_in"}
STARTS_KEPT = "tr11ops.trainers.keeper"


@pytest.fixture(scope="module")
def lives(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Life]]:
    """Of the trainers that this session's tests are about."""
    wanted = {
        item.callspec.params["trainer"]
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    }
    made = {
        name: Life(name, tmp_path_factory.mktemp(name)) for name in subjects() if name in wanted
    }
    try:
        live(made)
        yield made
    finally:
        for life in made.values():
            life.close()


@pytest.fixture(params=list(subjects()))
def trainer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def life(trainer: str, lives: dict[str, Life]) -> Life:
    found = lives[trainer]
    assert not found.stuck, f"{found.stuck}: {found.folder}"
    return found


def test_the_node_starts_it_by_its_card(life: Life) -> None:
    words = life.long.command
    assert words[2:4] == ["-m", STARTS.get(life.name, STARTS_KEPT)]
    assert words[-1] == str(life.long.card)
    assert {"--nnodes=1", "--node-rank=0", f"--nproc-per-node={life.long.workers}"} <= set(words)


def test_a_training_to_its_end(life: Life) -> None:
    run = life.short
    assert run.launches["1"].status == 0, run.said("1")
    end = run.end("1")
    assert end is not None
    assert (end.reason, end.restart) == ("finished", False), end
    assert (end.iteration, end.checkpoint_step) == (SHORT.total, SHORT.total)


def test_heartbeats_and_phases_are_written(life: Life) -> None:
    phases = life.short.phases("1")
    assert phases[0] == "starting" and phases[-1] == "ended" and "training" in phases, phases
    beat = life.beats["whole"]
    assert beat is not None and (beat.phase, beat.job_id) == ("ended", "1")
    assert beat.iteration == SHORT.total


def test_each_step_is_on_record_once(life: Life) -> None:
    assert life.short.steps("1") == list(range(1, SHORT.total + 1))


def test_a_stop_request_is_obeyed_or_waits_for_a_checkpoint(life: Life) -> None:
    run = life.long
    assert run.launches["stopped"].status == 0, run.said("stopped")
    end = run.end("stopped")
    assert end is not None
    assert (end.reason, end.restart) == ("signal", True), end
    assert end.checkpoint_step is not None
    if run.can_be_asked:
        assert end.checkpoint_step == end.iteration
    else:
        assert "it is ended once its next checkpoint is whole" in run.said("stopped")
        assert end.checkpoint_step <= end.iteration


def test_a_second_launch_is_kept_out(life: Life) -> None:
    run = life.long
    assert run.launches["second"].status == run.refused, run.said("second")
    end = run.end("second")
    assert end is not None and (end.reason, end.restart) == ("refused", False), end
    assert "is being trained by" in end.message
    assert run.steps("second") == []


def test_the_lease_is_held_and_let_go(life: Life) -> None:
    during, after = life.claims
    assert during is not None and (during.job_id, during.held) == ("stopped", True)
    assert after is not None and (after.epoch, after.held) == (during.epoch, False)


def test_a_resume_takes_the_newest_whole_checkpoint(life: Life) -> None:
    stopped = life.long.end("stopped")
    assert stopped is not None and stopped.checkpoint_step is not None
    steps = life.long.steps("resumed")
    assert steps[0] == stopped.checkpoint_step + 1, life.long.said("resumed")


def test_the_kill_switch_is_obeyed_and_acknowledged(life: Life) -> None:
    run = life.long
    assert run.launches["resumed"].status == 0, run.said("resumed")
    end, beat = run.end("resumed"), life.beats["killed"]
    assert end is not None and (end.reason, end.restart) == ("kill-switch", False), end
    assert life.kill is not None and beat is not None and beat.request == life.kill.id
    # and while it is there, nothing is trained
    assert run.launches["kept from training"].status == 0
    end = run.end("kept from training")
    assert end is not None and (end.reason, end.restart) == ("kill-switch", False), end
    assert run.steps("kept from training") == []


def test_an_end_that_no_one_asked_for_is_unexplained(life: Life) -> None:
    run = life.long
    if run.ends_itself:
        pytest.skip("it says itself how it ended")
    assert run.launches["left"].status == 0
    end = run.end("left")
    assert end is not None and (end.reason, end.restart) == ("unexplained", True), end


def test_a_lost_worker_leaves_no_end_marker(life: Life) -> None:
    run = life.long
    assert run.launches["lost"].status not in (0, EXIT_REFUSED), run.said("lost")
    assert run.end("lost") is None


def test_nothing_is_written_where_a_newer_tr11_wrote(life: Life) -> None:
    run = life.long
    before, after = life.newer
    assert before == after
    assert run.launches["older"].status == run.refused, run.said("older")
    end = run.end("older")
    assert end is not None and (end.reason, end.restart) == ("refused", False), end
    assert "newer tr11" in end.message
    assert run.steps("older") == []


def test_a_higher_epoch_ends_it(life: Life) -> None:
    run = life.long
    assert run.launches["superseded"].status == run.refused, run.said("superseded")
    end = run.end("superseded")
    assert end is not None and (end.reason, end.restart) == ("superseded", False), end
