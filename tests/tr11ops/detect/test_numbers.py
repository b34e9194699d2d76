"""What is said of losses that are no numbers, of spikes, and of what is not saved."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    found,
    severities,
)
from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    changed,
    checkpoints,
    idle,
    running,
    snapshot,
    steps,
    with_facts,
)
from tr11ops.base.observed import Unknown
from tr11ops.detect.detector import Severity
from tr11ops.detect.numbers import validation_loss_rises
from tr11ops.observe.observations import LaunchEnd, Phase, TrainingEvent, Validation
from tr11ops.observe.snapshot import Snapshot, Step
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.record import IterationRange


def test_a_checkpoint_is_doubted_by_mail_once_the_older_one_came_past_the_iteration() -> None:
    tried = LaunchEnd(
        "1007",
        2,
        NOW - 600,
        "SIGSEGV",
        "again",
        reached=31_215,
        began_at=31_200,
        older_checkpoint=31_100,
    )
    (proven,) = found(snapshot(launch_ends=(tried,)), "checkpoint-unsound")
    assert proven.severity is Severity.WARNING
    again = LaunchEnd("1007", 3, NOW - 300, "SIGSEGV", reached=31_215, began_at=31_100)
    assert found(snapshot(launch_ends=(tried, again)), "checkpoint-unsound") == [], (
        "it was not the checkpoint"
    )


def no_number(step: Step) -> Step:
    return replace(step, record=replace(step.record, lm_loss=float("nan")))


def noted(kind: str, age: float) -> TrainingEvent:
    return TrainingEvent(kind, NOW - age, "", {"to": 31_200})


BACK, UNDONE = noted("roll-back", 60), noted("roll-back-undone", 30)


BAD_STEPS = (*steps(age=HOUR)[:-3], *map(no_number, steps(age=HOUR)[-3:]))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ((), 1),
        ((noted("roll-back", 2 * HOUR),), 1),
        ((BACK,), 0),
        ((BACK, UNDONE), 1),
        ((UNDONE, BACK), 1),
    ],
)
def test_what_was_rolled_back_past_is_over(events: tuple[TrainingEvent, ...], told: int) -> None:
    for seen in (idle(steps=BAD_STEPS, events=events), snapshot(steps=BAD_STEPS, events=events)):
        findings = found(seen, "loss-not-finite")
        assert [finding.severity.name for finding in findings] == ["CRITICAL" if told else "INFO"]


def test_a_loss_that_was_no_number_is_over_when_an_iteration_after_it_is_one() -> None:
    """A launch that went back trains at first what was never bad."""
    back = noted("roll-back", HOUR / 2)
    bad = tuple(replace(step, time=NOW - HOUR) for step in BAD_STEPS)
    at = bad[-1].record.iteration
    again = tuple(replace(step, time=NOW - 60, job_id="1008") for step in steps(3, last=at - 3))
    (finding,) = found(snapshot(steps=(*bad, *again), events=(back,)), "loss-not-finite")
    assert (finding.severity, finding.is_to_be_passed) == (Severity.INFO, True)
    assert finding.title == f"the loss was not a number in iterations {at - 2} to {at}"
    beyond = replace(again[-1], record=replace(again[-1].record, iteration=at + 1))
    assert found(snapshot(steps=(*bad, *again, beyond), events=(back,)), "loss-not-finite") == []
    (finding,) = found(
        snapshot(steps=(*bad, *again, no_number(beyond)), events=(back,)), "loss-not-finite"
    )
    assert finding.severity is Severity.CRITICAL


def test_what_was_dropped_is_said_where_the_loss_is_no_number() -> None:
    dropped = tuple(
        replace(step, record=replace(step.record, grad_norm=None, skipped_iterations=1))
        for step in BAD_STEPS[-3:]
    )
    (finding,) = found(snapshot(steps=(*BAD_STEPS[:-3], *dropped)), "loss-not-finite")
    assert finding.evidence[0].endswith("lm loss nan, grad norm not finite")
    assert finding.evidence[1].startswith("3 updates were dropped since then (skipped iterations)")


def spike_that_was_rolled_back(last: int, **values: object) -> Snapshot:
    """A spike at the last iteration of an attempt, a roll-back to twenty before, and what is
    trained since.
    """
    lines = steps(60, age=HOUR)
    spike = replace(lines[-1], record=replace(lines[-1].record, lm_loss=40.0))
    at = spike.record.iteration
    again = tuple(replace(step, time=NOW - 60, job_id="1008") for step in steps(3, last=at + last))
    event = TrainingEvent(
        "roll-back", NOW - HOUR / 2, "", {"to": at - 20, "skip": f"{at - 5}-{at}", **values}
    )
    return snapshot(steps=(*lines[:-1], spike, *again), events=(event,))


def test_a_spike_that_a_person_rolled_back_is_no_warning() -> None:
    (finding,) = found(spike_that_was_rolled_back(-10, by="ann"), "loss-spike")
    assert (finding.severity, finding.is_to_be_passed) == (Severity.INFO, True)
    assert found(spike_that_was_rolled_back(2, by="ann"), "loss-spike") == []
    (finding,) = found(spike_that_was_rolled_back(2), "loss-spike")
    assert finding.severity is Severity.WARNING, "the trainer's own: no one may know of it"


def test_iterations_that_are_passed_over_are_not_unsaved() -> None:
    saved, event = (
        checkpoints(31_000),
        TrainingEvent("roll-back", NOW - 10 * HOUR, "", {"to": 31_000, "skip": "31011-31100"}),
    )
    assert found(snapshot(checkpoints=saved), "checkpoint-overdue") != []
    assert found(snapshot(checkpoints=saved, events=(event,)), "checkpoint-overdue") == []
    undone = TrainingEvent("roll-back-undone", NOW - 9 * HOUR, "", {"to": 31_000})
    assert found(snapshot(checkpoints=saved, events=(event, undone)), "checkpoint-overdue") != []
    skips = snapshot(checkpoints=saved)
    passed = with_facts(skips, skip_ranges=(IterationRange(31_011, 31_100),))
    assert found(passed, "checkpoint-overdue") == []


def test_a_save_that_fails_on_one_node_alone_is_told_by_the_node() -> None:
    """And what the attempt does about it, which needs no one."""
    told = "n03 alone could not write the save of step 31000, to which 47 other nodes wrote"
    values = {"step": 31_000, "why": "rank 5: [Errno 5]", "node": "n03", "said": told}
    event = TrainingEvent("save-failed", NOW, "1007", values)
    for saved in (31_000, 31_100):  # a save is overdue, or it is not
        given = snapshot(checkpoints=checkpoints(saved), events=(event,))
        (finding,) = found(given, "checkpoint-overdue")
        assert (finding.title, finding.severity) == (told, Severity.WARNING)
        assert finding.evidence[1:] == ("rank 5: [Errno 5]",)
        assert "the attempt leaves that node by itself" in finding.by_itself
    assert not found(snapshot(checkpoints=checkpoints(31_000)), "checkpoint-overdue")[0].by_itself


def test_where_nothing_trains_the_roll_back_is_what_helps_and_no_kill() -> None:
    (finding,) = found(snapshot(steps=BAD_STEPS), "loss-not-finite")
    back = "tr11 rollback 31200 --skip 31217-"
    assert (finding.fix, finding.then) == ("tr11 kill --now --wait", (back, "tr11 resume"))
    assert (
        f"`{back}` skips the data of iterations 31217 to 31219, and of those that follow until it stops"
        in (finding.evidence)
    )
    (finding,) = found(idle(steps=BAD_STEPS), "loss-not-finite")
    assert (finding.fix, finding.then) == (back, ("tr11 launch --array 1-10",))
    assert finding.evidence[-1] == f"`{back}` skips the data of iterations 31217 to 31219"
    (finding,) = found(idle(steps=BAD_STEPS[-2:]), "loss-not-finite")
    assert finding.fix == "tr11 checkpoints list", "where it began is not known"


def test_a_row_of_losses_that_are_no_numbers_begins_where_it_began() -> None:
    """Three numbers in twenty lines are no recovery; a launch that went back begins another row."""
    lines = steps(60)
    few = tuple(step if n < 10 or n % 20 > 16 else no_number(step) for n, step in enumerate(lines))
    for upto, again in ((11, ""), (30, "again and again "), (56, "again and again ")):
        (finding,) = found(snapshot(steps=few[:upto]), "loss-not-finite")
        assert (
            finding.title
            == f"the loss is {again}not a number since iteration {lines[10].record.iteration}"
        )
        assert finding.since == lines[10].time
    many = tuple(
        step if n < 10 or 20 <= n < 40 else no_number(step) for n, step in enumerate(lines)
    )
    (finding,) = found(snapshot(steps=many), "loss-not-finite")
    assert finding.title.endswith(f" {lines[40].record.iteration}"), "it had recovered"
    again = tuple(
        replace(step, job_id="1008") for step in (*lines[12:14], *map(no_number, lines[14:20]))
    )
    (finding,) = found(snapshot(steps=(*few[:56], *again)), "loss-not-finite")
    assert finding.title.endswith(f" {lines[14].record.iteration}")


def test_one_number_after_several_that_are_none_is_no_recovery() -> None:
    """The run is not called healthy for one iteration, and at risk again at the next."""
    lines = steps(30)
    for bad, good, is_told in ((4, 1, True), (4, 3, True), (4, 4, False), (1, 1, False)):
        first = len(lines) - bad - good
        last = len(lines) - good
        row = (*lines[:first], *map(no_number, lines[first:last]), *lines[last:])
        seen = snapshot(steps=row)
        findings = found(seen, "loss-not-finite")
        assert bool(findings) is is_told, (bad, good)
        at_risk = judge(seen, tuple(findings)).word is VerdictWord.AT_RISK
        assert at_risk is is_told
    (finding,) = found(snapshot(steps=(*BAD_STEPS, *steps(1, last=31_220))), "loss-not-finite")
    assert "too few numbers in a row to have recovered" in finding.evidence[1]


def test_what_is_not_saved_is_counted_of_the_present_attempt() -> None:
    """The attempt before it had trained 219 iterations past the checkpoint; this one has begun
    there again.
    """
    saved = checkpoints(31_000)
    (before,) = found(snapshot(checkpoints=saved), "checkpoint-overdue")
    assert before.title.startswith("no checkpoint for 219 iterations")
    after = running(job_id="1000_8", raw_id="1008", task_id=8)
    assert found(snapshot(jobs=(after,), checkpoints=saved), "checkpoint-overdue") == []
    own = steps(5, last=31_005, job_id="1008")
    seen = snapshot(jobs=(after,), checkpoints=saved, steps=(*steps(), *own))
    assert found(seen, "checkpoint-overdue") == []
    own = steps(5, last=31_160, job_id="1008")
    (late,) = found(snapshot(jobs=(after,), checkpoints=saved, steps=own), "checkpoint-overdue")
    assert late.title.startswith("no checkpoint for 160 iterations")
    assert (
        found(snapshot(checkpoints=saved, events=(noted("roll-back", 1),)), "checkpoint-overdue")
        == []
    )
    launched = (Phase("1007", 2, "starting", 31_000, NOW - 10),)
    assert found(snapshot(checkpoints=saved, phases=launched), "checkpoint-overdue") == [], (
        "its workers began again"
    )


def test_a_loss_that_is_no_number_names_the_command_that_passes_over_its_data() -> None:
    *good, bad = steps()[-11:]
    bad = replace(bad, record=replace(bad.record, lm_loss=float("nan")))
    at = bad.record.iteration
    (finding,) = found(snapshot(steps=(*good, bad)), "loss-not-finite")
    command = f"tr11 rollback 31200 --skip {at}-"
    assert finding.then[0] == command, "without an end: more iterations follow until it is typed"
    (finding,) = found(snapshot(steps=(bad,)), "loss-not-finite")
    assert not any("--skip" in line for line in finding.evidence), "where it began is not known"
    (finding,) = found(snapshot(steps=(*good, bad), checkpoints=checkpoints(at)), "loss-not-finite")
    assert finding.then[0] == f"tr11 rollback {at - 100} --skip {at}-"
    (finding,) = found(
        snapshot(steps=(*good, bad), checkpoints=checkpoints(at, steps=(at,))), "loss-not-finite"
    )
    assert finding.then[0] == f"tr11 rollback STEP --skip {at}-"
    unsaved = checkpoints(steps=(), latest=None, examined=())
    (finding,) = found(snapshot(steps=(*good, bad), checkpoints=unsaved), "loss-not-finite")
    anew = f"tr11 launch --replace --set 'data.skip_ranges=[\"{at}-{at}\"]'"
    assert finding.then == ("tr11 kill --release", anew), "a kill switch would refuse the launch"


def test_a_row_whose_beginning_is_not_seen_names_no_checkpoint() -> None:
    """The look's lines begin within the row, a number first: checkpoint 31200 is of bad weights."""
    cut = tuple(step if n % 4 == 0 else no_number(step) for n, step in enumerate(steps(16)))
    assert cut[0].record.iteration > 31_200, "a checkpoint lies before all that is seen"
    (finding,) = found(snapshot(steps=cut), "loss-not-finite")
    assert "since at least iteration" in finding.title
    assert finding.then == ("tr11 checkpoints list",)
    before = steps(10, last=cut[0].record.iteration - 1)
    (finding,) = found(snapshot(steps=(*before, *cut)), "loss-not-finite")
    assert finding.then[0].startswith(f"tr11 rollback 31200 --skip {cut[1].record.iteration}-")
    first = tuple(no_number(step) for step in steps(3, last=4))
    unsaved = checkpoints(steps=(), latest=None, examined=())
    (finding,) = found(
        snapshot(steps=(*steps(1, last=1), *first), checkpoints=unsaved), "loss-not-finite"
    )
    assert finding.title.endswith("since iteration 2"), "all of the training is seen"


def test_a_number_among_many_that_are_none_is_no_recovery() -> None:
    """What a look says does not depend on which line happens to be the last one."""
    lines = steps(40)
    mixed = tuple(step if n < 20 or n % 4 == 0 else no_number(step) for n, step in enumerate(lines))
    for upto in range(26, 41):
        (finding,) = found(snapshot(steps=mixed[:upto]), "loss-not-finite")
        assert finding.severity is Severity.CRITICAL, upto
        assert finding.title.endswith(f" since iteration {lines[21].record.iteration}"), upto
        assert finding.evidence[0].split(": ")[1].startswith("lm loss nan"), upto
    once = (*lines[:-2], no_number(lines[-2]), lines[-1])
    assert found(snapshot(steps=once), "loss-not-finite") == [], "that batch was skipped"
    back = (*lines[:20], *map(no_number, lines[20:30]), *lines[30:])
    for upto in (31, 34):
        assert severities(snapshot(steps=back[:upto]), "loss-not-finite") == ["CRITICAL"], upto
    assert severities(snapshot(steps=back[:35]), "loss-not-finite") == [], "five of ten"
    again = replace(lines[30], job_id="1008")
    assert severities(snapshot(steps=(*back[:30], again)), "loss-not-finite") == [], (
        "the next job's are numbers"
    )


# ---------------------------------------------------------------------------
# When the loss on texts that are not trained on is told to rise.


EVERY = 1000


def evaluated(*losses: float, name: str = "valid", first: int = EVERY) -> tuple[Validation, ...]:
    """Evaluations every thousand iterations, an hour apart, before the steps that are seen."""
    return tuple(
        Validation(name, first + EVERY * place, loss, NOW - 3600.0 * (100 - place))
        for place, loss in enumerate(losses)
    )


def seen(*validations: Validation) -> Snapshot:
    return changed(snapshot(), validations=validations)


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [
        ((), False),
        ((3.0,), False),
        ((2.0, 3.0), False),
        ((3.0, 2.5, 2.4, 2.3), False),
        ((2.4, 2.3, 2.36, 2.41), True),
        ((2.3, 2.5, 2.5), True),
        # noise, a rise once, one that comes back
        ((2.3, 2.33, 2.34), False),
        ((2.4, 2.3, 2.5), False),
        ((2.3, 2.6, 2.5), False),
        ((2.3, 2.6, 2.6, 2.2), False),
    ],
)
def test_two_evaluations_in_a_row_far_above_the_lowest_are_told(
    losses: tuple[float, ...], is_told: bool
) -> None:
    assert bool(validation_loss_rises.detect(seen(*evaluated(*losses)))) is is_told


def test_each_set_of_texts_is_told_for_itself() -> None:
    sets = {"code": (2.0, 2.2, 2.4), "prose": (3.0, 2.9, 2.8), "talk": (4.0, 5.0, 6.0)}
    mixed = [one for name, losses in sets.items() for one in evaluated(*losses, name=name)]
    code, talk = validation_loss_rises.detect(seen(*mixed))
    assert (code.identity, talk.identity) == (("code",), ("talk",))
    assert code.title == "the loss on code has risen by 20.0% since iteration 1000"
    assert code.evidence == (
        "iteration 1000: loss 2", "iteration 2000: loss 2.2", "iteration 3000: loss 2.4",
    )  # fmt: skip
    assert code.since == mixed[0].time and code.fix == "tr11 report"


def test_what_the_training_has_gone_back_behind_does_not_count() -> None:
    risen = evaluated(2.0, 2.2, 2.4)
    assert validation_loss_rises.detect(seen(*risen))
    again = (*risen, *evaluated(2.0, first=2 * EVERY))
    assert not validation_loss_rises.detect(seen(*again)), "evaluated again at the second one"
    back = changed(seen(*risen), steps=steps(last=2 * EVERY - 1))
    assert not validation_loss_rises.detect(back), "it has not come to the second one again"


def test_nothing_is_told_where_nothing_trains_or_what_tells_is_hidden() -> None:
    risen = evaluated(2.0, 2.2, 2.4)
    assert not validation_loss_rises.detect(changed(idle(), validations=risen))
    for hidden in ("jobs", "steps", "validations"):
        blind = changed(seen(*risen), **{hidden: Unknown("the disk is away")})
        assert not validation_loss_rises.detect(blind) and validation_loss_rises.is_blind(blind)
