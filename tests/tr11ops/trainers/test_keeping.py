"""What a keeper decides, without a process: what it starts, what a line means, when and how it stops,
what it leaves behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tr11ops.base.errors import WrongUsage
from tr11ops.cluster.sbatch_options import code_root
from tr11ops.dialects.dialect import Dialect, dialect_named
from tr11ops.dialects.settings import settings_of
from tr11ops.trainers.course import TrainingCourse, older_start, wrong_start
from tr11ops.trainers.ending import last_word
from tr11ops.trainers.never_began import counts, kind_of
from tr11ops.trainers.outside import signal_of_code, signal_said
from tr11ops.trainers.start import (
    LaunchWords,
    TakenCheckpoint,
    commands_of,
    environment_of,
    refusal_of,
)
from tr11ops.trainers.stopping import (
    END,
    LEAD_SECONDS,
    StopCourse,
    StopSigns,
    asked_of,
    is_last_that_fits,
    way_of,
)
from tr11ops.trainers.trainer import NodePlaces
from tr11ops.trainers.words import EndSeen, MarkSeen, StepRecords, StepSeen, TrainerWords, piece_of
from tr11ops.trainers.workers import without_own_modules
from trainer.contract.paths import RunPaths
from trainer.contract.requests import Request

PLACES = NodePlaces(2, 1, 4, address="n1", port=29500)
TAKEN = TakenCheckpoint(5000, "/out/step-5000", "step-5000")
LAUNCH = LaunchWords(RunPaths(Path("/run"), "toy", "main"), Path("/run/state/attempts/7"), 2)


def settings(**table: Any) -> Any:
    return settings_of({"command": ["train.py"], "folder": "/out", **table}, "card")


# ----------------------------------------------------------------------------- start
def test_torchrun_gets_the_places_of_the_node() -> None:
    given = settings(
        command=["train.py", "--to", "{folder}"], python="/venv/python", first=["--new"]
    )
    (command,) = commands_of(given, PLACES, LAUNCH)
    assert command.words[:3] == ("/venv/python", "-m", "torch.distributed.run")
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--max-restarts=0"} <= {
        *command.words
    }
    assert command.words[-4:] == ("train.py", "--to", "/out", "--new")


def test_a_resume_gets_its_words_and_what_it_goes_on_from() -> None:
    given = settings(dialect="huggingface", start="srun", command=["train.py"])
    commands = commands_of(given, PLACES, LaunchWords(LAUNCH.paths, LAUNCH.attempt, 2, TAKEN))
    assert [one.rank for one in commands] == [4, 5, 6, 7]
    assert commands[1].words == ("python", "train.py", "--resume_from_checkpoint", "/out/step-5000")
    assert commands[1].environment["LOCAL_RANK"] == "1" and commands[1].prefix == "[default1]:"


def test_a_line_for_a_shell_is_one_word_of_it() -> None:
    given = settings(start="node", command="cd {root} && exec ./train {launch}", first=["--new"])
    (command,) = commands_of(given, PLACES, LAUNCH)
    assert command.words == ("bash", "-c", "cd /run && exec ./train 2 --new")
    assert commands_of(settings(start="command"), PLACES, LAUNCH) == ()


def test_what_is_not_known_is_no_word() -> None:
    with pytest.raises(WrongUsage, match=r"\{exit_minutes\} is not known"):
        commands_of(settings(command=["train.py", "{exit_minutes}"]), PLACES, LAUNCH)
    (command,) = commands_of(settings(command=["train.py", '{"lr": 1}']), PLACES, LAUNCH)
    assert command.words[-1] == '{"lr": 1}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "--max-restarts=3", "t.py"], "starts workers again"),
        (["torchrun", "--max-restarts", "1", "t.py"], "starts workers again"),
        (["torchrun", "--max-restarts=0", "t.py"], ""),
        (["torchrun", "--nnodes=2:4", "t.py"], "may not change"),
        (["torchrun", "--nnodes", "2:4", "t.py"], "may not change"),
        (["/opt/bin/ft_launcher", "t.py"], "ft_launcher starts a training again"),
    ],
)
def test_a_second_supervisor_is_refused(words: list[str], said: str) -> None:
    why = refusal_of(settings(dialect="megatron", start="node", command=words))
    assert said in why and bool(why) == bool(said)


def test_what_would_wake_a_supervisor_is_not_handed_on() -> None:
    given = settings(dialect="lightning", unset=["NOT_FOR_IT"])
    (command,) = commands_of(given, PLACES, LAUNCH)
    inherited = {"SLURM_NTASKS": "8", "NOT_FOR_IT": "1", "RANK": "3", "HOME": "/h"}
    assert environment_of(given, command, inherited) == {"HOME": "/h", "PYTHONUNBUFFERED": "1"}


def test_what_tr11_needs_of_the_interpreter_is_not_handed_on() -> None:
    given = settings(dialect="huggingface", start="srun", command=["train.py"])
    first, *_ = commands_of(given, PLACES, LAUNCH)
    assert environment_of(given, first, {})["OMP_NUM_THREADS"] == "1"  # 4 ranks share the cores
    assert environment_of(given, first, {"OMP_NUM_THREADS": "6"})["OMP_NUM_THREADS"] == "6"
    (alone,) = commands_of(settings(command=["t.py"]), PLACES, LAUNCH)
    assert "OMP_NUM_THREADS" not in environment_of(given, alone, {})
    assert without_own_modules({"PYTHONPATH": f"/mine:{code_root()}"}) == {"PYTHONPATH": "/mine"}


# ----------------------------------------------------------------------------- words
def heard(dialect: Dialect, *lines: str) -> list[Any]:
    words = TrainerWords(dialect)
    return [one for line in lines for one in words.hear(line.encode())]


def test_a_step_and_its_loss_in_another_line_are_one_record() -> None:
    lines = (
        " 42%|████▏     | 10/24 [00:13<00:20,  1.45s/it]",
        "{'loss': '4.451', 'grad_norm': 'nan', 'learning_rate': '3.125e-05', 'epoch': '0.01'}",
        " 46%|████▌     | 11/24 [00:14<00:19,  1.45s/it]",
    )
    steps = [
        one for one in heard(dialect_named("huggingface"), *lines) if isinstance(one, StepSeen)
    ]
    made = StepRecords()
    due = [made.add(step, 100.0 + place) for place, step in enumerate(steps)]
    assert due[:2] == [None, None]
    record = due[2]
    assert record is not None and record["iteration"] == 10 and record["total_iterations"] == 24
    assert record["lm_loss"] == 4.451 and record["grad_norm"] is None and record["time"] == 100.0
    assert made.due(106.5) is None and made.due(107.5) is not None
    assert made.last() is None


def test_a_bar_that_is_drawn_again_is_no_second_record() -> None:
    bar = " 42%|████▏     | 10/24 [00:{}<00:20,  1.{}5s/it]"
    steps = heard(dialect_named("huggingface"), *(bar.format(20 + n, n) for n in range(5)))
    made = StepRecords()
    assert [
        made.add(step, 100.0 + 2 * n) or made.due(101.5 + 2 * n) for n, step in enumerate(steps)
    ].count(None) == 4
    course = TrainingCourse(sign=0.0)
    for moment, step in enumerate(steps, start=100):
        course = course.after(step, float(moment))
    assert course.sign == 100.0  # and no sign of life


def test_a_step_is_one_record_though_its_loss_comes_before_its_number_or_late() -> None:
    """Bar and loss are of two streams: which of them is read first is chance."""
    bar = " 42%|████▏     | {}/24 [00:13<00:20,  1.45s/it]"
    loss = "{{'loss': '{}.5', 'learning_rate': '3e-05'}}"
    lines = [
        (100.0, bar.format(10)), (100.1, loss.format(10)),
        (102.0, loss.format(11)), (102.1, bar.format(11)),
        (104.0, bar.format(12)), (105.5, loss.format(12)),
        (106.0, bar.format(13)), (112.0, loss.format(14)), (112.1, bar.format(14)),
    ]  # fmt: skip
    words, made = TrainerWords(dialect_named("huggingface")), StepRecords()
    found = []
    for moment, line in lines:
        found.append(made.due(moment))
        found += [
            made.add(one, moment) for one in words.hear(line.encode()) if isinstance(one, StepSeen)
        ]
    found.append(made.last())
    told = [(one["iteration"], one.get("lm_loss")) for one in found if one is not None]
    assert told == [(10, 10.5), (11, 11.5), (12, 12.5), (13, None), (14, 14.5)]


def test_a_loss_of_0_beside_a_norm_that_is_no_number_is_no_number() -> None:
    """So Hugging Face's Trainer prints a NaN, which it filters out of its logs unless told otherwise."""
    bar = " 42%|████▏     | 10/24 [00:13<00:20,  1.45s/it]"
    for norm, loss in (("nan", None), ("0.5", 0.0)):
        line = f"{{'loss': '0', 'grad_norm': '{norm}', 'learning_rate': '3e-05'}}"
        (told,) = heard(dialect_named("huggingface"), bar, line)[1:]
        assert told.values["lm_loss"] == loss


def test_a_bar_that_passed_over_what_was_resumed_says_nothing_of_the_speed() -> None:
    lines = (
        " 35%|███▌      | 141/400 [00:00<00:00, 268.25it/s]",
        " 36%|███▋      | 145/400 [00:02<00:03, 66.31it/s]",
    )
    steps = heard(dialect_named("huggingface"), *lines)
    made = StepRecords()
    first = made.add(steps[0], 100.0) or made.add(steps[1], 102.0)
    last = made.last()
    assert first is not None and "seconds_per_iteration" not in first
    assert last is not None and last["seconds_per_iteration"] == 0.5


@pytest.mark.parametrize(
    ("resumed_at", "said", "is_step"), [(8, 9, 9), (130, 3, 131), (128, 1, 129)]
)
def test_a_bar_that_names_no_epoch_counts_from_the_checkpoint(
    resumed_at: int, said: int, is_step: int
) -> None:
    """Lightning's, where it was resumed in the middle of an epoch."""
    words = TrainerWords(dialect_named("lightning"), resumed_at)
    for later in (0, 1):
        bar = f"Training: |          | {said + later}/? [00:02<00:00,  4.23it/s, train_loss=1.03]"
        (told,) = words.hear(bar.encode())
        assert isinstance(told, StepSeen) and told.iteration == is_step + later


def test_of_a_bar_that_is_drawn_with_the_loss_of_the_step_before_the_last_one_counts() -> None:
    lines = (
        "Epoch 0:   2%|▏         | 11/500 [00:48<32:10, 0.25it/s, train_loss=3.10]",
        "Epoch 0:   2%|▏         | 12/500 [00:50<32:10, 0.25it/s, train_loss=3.10]",
        "Epoch 0:   2%|▏         | 12/500 [00:50<32:10, 0.25it/s, train_loss=2.90]",
    )
    made = StepRecords()
    for step in heard(dialect_named("lightning"), *lines):
        made.add(step, 100.0)
    last = made.last()
    assert last is not None and (last["iteration"], last["lm_loss"]) == (12, 2.9)


def test_what_a_launch_has_saved_it_has_trained_whatever_it_tells() -> None:
    course = TrainingCourse(sign=0.0, total=24, iteration=8)
    assert not course.having_saved(None, None).has_stepped
    half = course.having_saved(None, 16)
    assert (half.iteration, half.has_stepped, half.is_finished) == (16, True, False)
    assert half.having_saved(None, 24).is_finished
    told = course.after(StepSeen(20, None, {}), 1.0)
    assert told.having_saved(None, 16) == told


def test_marks_are_phases() -> None:
    course = TrainingCourse(sign=0.0)
    lines = (
        ("[titan] Loading the checkpoint from out/step-120.", "loading"),
        ("[titan] Training starts at step 121", "training"),
        ("[titan] step: 130  loss:  4.2  grad_norm:  1.8  memory: 1GiB(1%)  tps: 7,812  tflops: 1.1  mfu: 4.02%", "training"),
        ("[titan] Saving the checkpoint (or staging if async is enabled).", "saving"),
        ("[titan] Finished saving the checkpoint in 12.40 seconds.", "training"),
    )  # fmt: skip
    for line, phase in lines:
        for one in heard(dialect_named("torchtitan"), line):
            course = course.after(one, 1.0)
        assert course.phase == phase
    assert (course.resumed_at, course.first, course.iteration) == (120, 130, 130)


def test_the_prefix_of_a_worker_is_not_its_word() -> None:
    piece = piece_of(b"[default3]:at 5", 1.0)
    assert (piece.local_rank, piece.text) == (3, b"at 5")
    assert piece_of(b"W1128 torchrun", 1.0).local_rank is None


# ----------------------------------------------------------------------------- the guard
def stepped(first: int, **more: Any) -> TrainingCourse:
    return TrainingCourse(sign=0.0).after(StepSeen(first, None, {}, **more), 1.0)


def test_a_start_that_no_checkpoint_explains_is_wrong() -> None:
    scratch = TrainingCourse(sign=0.0).after(MarkSeen("scratch"), 1.0)
    assert "although step-5000 of step 5000 exists" in wrong_start(scratch, TAKEN, (5000,))
    assert "its first step was 10" in wrong_start(stepped(10), TAKEN, (4500, 5000))
    assert wrong_start(scratch, None, ()) == ""
    assert wrong_start(stepped(5010), TAKEN, (5000,)) == ""
    assert wrong_start(stepped(5000), TAKEN, (5000,)) == ""  # one that counts from 0
    # a bar may be of something else, until a loss stands beside it
    assert wrong_start(stepped(10, is_certain=False), TAKEN, (5000,)) == ""


def test_an_older_checkpoint_is_no_random_start() -> None:
    course = stepped(4510)
    assert wrong_start(course, TAKEN, (4500, 5000)) == ""
    assert (
        older_start(course, TAKEN)
        == "it goes on from step 4509, although step-5000 of step 5000 exists"
    )


# ----------------------------------------------------------------------------- stopping
def test_the_strongest_reason_to_stop_wins() -> None:
    kill, pause = Request("kill", 7), Request("pause", 8)
    both = StopSigns(now=100.0, kill=kill, stop_is_asked=True, pause=pause)
    asked = asked_of(both)
    assert asked is not None and (asked.reason, asked.restart, asked.request) == (
        "kill-switch",
        False,
        7,
    )
    asked = asked_of(StopSigns(now=100.0, stop_is_asked=True, exit_time=50.0))
    assert asked is not None and (asked.reason, asked.restart) == ("signal", True)
    asked = asked_of(StopSigns(now=100.0, exit_time=50.0))
    assert asked is not None and asked.reason == "exit-duration"
    # a pause is for what begins
    assert asked_of(StopSigns(now=100.0, pause=pause, has_stepped=True)) is None
    assert asked_of(StopSigns(now=100.0, exit_time=150.0)) is None


def test_a_trainer_is_asked_only_where_its_command_lets_it() -> None:
    assert way_of(settings(dialect="megatron"), 2) == "next checkpoint"
    asked = settings(dialect="megatron", command=["t.py", "--exit-signal-handler"])
    assert way_of(asked, 2) == "signal TERM"
    assert way_of(settings(), 2) == "next checkpoint"


def test_all_nodes_are_told_one_moment_that_is_still_to_come() -> None:
    asked = asked_of(StopSigns(now=100.0, stop_is_asked=True))
    course = StopCourse().after(asked, "signal TERM", 1, False, 100.0)
    assert course.order is not None and course.order.signal == "TERM"
    assert course.order.moment == 100.0 + LEAD_SECONDS
    assert course.after(asked, "signal TERM", 1, False, 101.0) is course  # and only once


def test_who_cannot_be_asked_ends_after_the_next_checkpoint() -> None:
    asked = asked_of(StopSigns(now=100.0, stop_is_asked=True))
    course = StopCourse().after(asked, "next checkpoint", 1, True, 100.0)
    assert course.waits  # what was whole before is no answer
    course = course.after(asked, "next checkpoint", 1, False, 101.0)
    assert course.waits
    course = course.after(None, "next checkpoint", 1, True, 102.0)
    assert course.order is not None and course.order.how == END


def test_an_end_at_once_passes_a_wish_to_save() -> None:
    asked = asked_of(StopSigns(now=100.0, stop_is_asked=True))
    course = StopCourse().after(asked, "signal TERM", 1, False, 100.0)
    now = asked_of(StopSigns(now=110.0, kill=Request("kill-now", 9)))
    course = course.after(now, "signal TERM", 1, False, 110.0)
    assert course.order is not None and (course.order.how, course.order.request) == (END, 9)


def test_the_last_checkpoint_that_fits() -> None:
    assert is_last_that_fits(1000.0, (300.0, 600.0, 800.0), 800.0)
    assert not is_last_that_fits(1200.0, (300.0, 600.0, 800.0), 800.0)
    assert not is_last_that_fits(1000.0, (800.0,), 800.0)  # how long one takes is not known
    assert not is_last_that_fits(None, (300.0, 600.0), 600.0)


# ----------------------------------------------------------------------------- the end
def test_what_was_asked_is_the_reason_but_for_a_training_that_is_done() -> None:
    dialect = dialect_named("huggingface")
    asked = asked_of(StopSigns(now=100.0, stop_is_asked=True))
    order = StopCourse().after(asked, "signal TERM", 1, False, 100.0).order
    course = TrainingCourse(sign=0.0).after(StepSeen(12, 24, {}), 1.0)
    word = last_word(dialect, course, 0, order)
    assert word is not None and (word.reason, word.restart) == ("signal", True)
    word = last_word(dialect, course.after(StepSeen(24, 24, {}), 2.0), 0, order)
    assert word is not None and (word.reason, word.restart) == ("finished", False)


def test_a_failure_is_judged_by_what_it_left_behind() -> None:
    course = TrainingCourse(sign=0.0).after(StepSeen(12, 24, {}), 1.0)
    assert last_word(dialect_named("huggingface"), course, 1) is None
    # but a code with a meaning of its own is one
    held = last_word(dialect_named("megatron"), course, 17)
    assert held is not None and (held.reason, held.restart) == ("refused", False)
    again = last_word(dialect_named("megatron"), course, 16)
    # what the others say because they were ended for it explains nothing
    said = course.after(EndSeen("stopped", "[rank: 0] Received SIGTERM: 15"), 2.0)
    assert last_word(dialect_named("lightning"), said, 137, failure=-9) is None
    asked = last_word(dialect_named("lightning"), said, 143, failure=143)
    # it left in order, and no one on record wanted that: no end at an interval
    assert asked is not None and (asked.reason, asked.restart) == ("signal", True)
    own = course.after(EndSeen("stopped", "[exiting program at iteration 12]"), 2.0)
    left = last_word(dialect_named("megatron"), own, 0)
    assert left is not None and left.reason == "exit-interval"
    assert again is not None and again.restart


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b"torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15", "SIGTERM"),
        (b"[default0]:torch...api.SignalException: Process 7 got signal: 2", "SIGINT"),
        (b"[2026-08-01 10:00:00] [INFO] [launch.py:311:sigkill_handler] Main process received SIGTERM, exiting", "SIGTERM"),
        (b"torch...api.SignalException: Process 9 got signal: 15", ""),  # a torchrun below the launcher
        (b"[rank: 0] Received SIGTERM: 15", ""),  # a rank says so of itself
    ],
)  # fmt: skip
def test_a_launcher_says_itself_which_signal_ended_it(line: bytes, name: str) -> None:
    assert signal_said(line, frozenset({7})) == name


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (-9, "SIGKILL"), (-15, "SIGTERM"),  # torchrun, srun, mpirun, a plain python
        (143, "SIGTERM"), (137, "SIGKILL"),  # below a shell
        (-11, ""), (134, ""), (1, ""), (0, ""),  # a crash is its own
    ],
)  # fmt: skip
def test_an_exit_code_tells_of_a_signal_from_outside(code: int, name: str) -> None:
    assert signal_of_code(code) == name


# ----------------------------------------------------------------------------- how it was called
ARGPARSE = "train.py: error: unrecognized arguments: --resume_from_checkpoint /out/checkpoint-160"


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        (ARGPARSE, True),
        ("train.py: error: the following arguments are required: --data", True),
        ("error: Unrecognized arguments: --trainer.x", True),
        ("Error: No such option: --stps", True),
        (
            "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--x']",
            True,
        ),
        (
            "accelerate <command> [<args>] launch: error: unrecognized arguments: --multi_gpus",
            True,
        ),
        ("usage: train.py [-h] [--output_dir OUTPUT_DIR]", False),
        ("srun: error: node7: task 3: Exited with exit code 2", False),
        ("RuntimeError: error: unrecognized arguments in the shader", False),
    ],
)
def test_a_program_that_does_not_accept_how_it_was_called_is_not_called_so_again(
    line: str, is_one: bool
) -> None:
    dialect = dialect_named("huggingface")
    words = TrainerWords(dialect)
    list(words.hear(line.encode()))
    list(words.hear(b"something else"))
    assert bool(words.not_taken) == is_one
    course = TrainingCourse(sign=0.0)
    word = last_word(dialect, course, 1, not_taken=words.not_taken)
    if not is_one:
        assert word is None
        return
    assert word is not None and (word.reason, word.restart) == ("refused", False)
    assert line in word.message and "\n" not in word.message
    assert word.message.startswith("the program does not accept how it was called: ")
    assert ("set trainer.resume = []" in word.message) == ("resume_from_checkpoint" in line)
    # a line of a training that steps is of something else that it started
    trained = course.after(StepSeen(12, 24, {}), 1.0)
    assert last_word(dialect, trained, 1, not_taken=words.not_taken) is None
    assert last_word(dialect, trained, 0, not_taken=words.not_taken) is not None


@pytest.mark.parametrize(
    ("line", "means", "may_be_node"),
    [
        ("/usr/bin/python3: can't open file '/home/a/trian.py': [Errno 2] No such file or directory",
         "what it is to start is not there", True),
        ("slurmstepd: error: execve(): ./train: No such file or directory",
         "what it is to start is not there", True),
        ("mpirun was unable to find the specified executable file, and therefore",
         "what it is to start is not there", True),
        ("/var/spool/slurmd/job7/slurm_script: line 4: torchrun: command not found",
         "the program that starts it is not installed there", True),
        ("/envs/a/bin/python: No module named accelerate",
         "the program that starts it is not installed there", True),
        ("RuntimeError: launcher 'pdsh' not installed.",
         "the program that starts it is not installed there", True),
        ("srun: error: Unable to create step for job 99825: More processors requested than permitted",
         "srun does not start it in this job", False),
        ("srun: unrecognized option '--gpu-per-node=4'", "srun does not start it in this job", False),
        ("There are not enough slots available in the system to satisfy the 16",
         "mpirun does not start it in this job", False),
        ("ValueError: hostname 'worker-9' not found in hostfile",
         "its launcher does not start it on what this job has", False),
        ("ValueError: Unsupported nproc_per_node value: gpus",
         "its launcher does not start it on what this job has", False),
        ("ValueError: The rendezvous backend 'c10' is not registered. Did you forget to call `register`?",
         "its launcher does not start it on what this job has", False),
    ],
)  # fmt: skip
def test_a_launcher_that_never_began_the_trainer_says_so_in_a_plain_sentence(
    line: str, means: str, may_be_node: bool
) -> None:
    words = TrainerWords(dialect_named("torchtitan"))
    list(words.hear(line.encode()))
    word = last_word(
        dialect_named("torchtitan"), TrainingCourse(sign=0.0), 1, not_taken=words.not_taken
    )
    assert word is not None and (word.reason, word.restart) == ("refused", False)
    assert word.message.startswith(f"the trainer never began: {means}: {line.strip()}; ")
    assert counts(line, has_trained=False) == line
    # of a run that has trained, a file that is not there is one node's, and no reason to hold the rest
    assert counts(line, has_trained=True) == ("" if may_be_node else line)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Unable to create step for job 7: Requested nodes are busy",
        "srun: error: Unable to create step for job: Job/step already completing or completed",
        "srun: error: node7: task 3: Exited with exit code 2",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed",
        "mpirun was unable to cleanly terminate the daemons on the nodes shown",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "step: 12 loss: 2.5",
    ],
)
def test_what_may_pass_or_is_the_trainers_own_is_no_launcher_that_never_began(line: str) -> None:
    words = TrainerWords(dialect_named("torchtitan"))
    list(words.hear(line.encode()))
    assert words.not_taken == "" and kind_of(line) is None
