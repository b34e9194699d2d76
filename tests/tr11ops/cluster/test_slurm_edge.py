"""What SlurmScheduler asks of Slurm's commands, and what it makes of refusals and silence."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.sbatch_options import sbatch_options, script_options
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cluster.slurm_command import CommandResult, client_environment, run_command

DATA = Path(__file__).parents[2] / "data" / "slurm"


class Recording:
    """Answers each command with recorded output, and remembers what was asked."""

    def __init__(self, *answers: CommandResult) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.inputs: list[str] = []

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        standard_input: str,
        environment: Mapping[str, str],
        timeout_seconds: float,
        directory: Path | None = None,
        until: str | None = None,
    ) -> CommandResult:
        self.asked.append(list(arguments))
        self.inputs.append(standard_input)
        self.environments.append(environment)
        return self.answers.pop(0)


def good(text: str) -> CommandResult:
    return CommandResult(0, text, "")


def bad(text: str, code: int = 1) -> CommandResult:
    return CommandResult(code, "", text)


@pytest.fixture
def request_(tmp_path: Path) -> BatchRequest:
    return BatchRequest(
        script="#!/bin/bash\ntrue\n",
        name="tr11",
        nodes=48,
        time_limit_seconds=100 * 3600,
        output="logs/%x-%A_%a.out",
        working_directory=tmp_path,
    )


def test_flags_of_a_full_request(request_: BatchRequest) -> None:
    full = replace(
        request_,
        array="1-10%1",
        gpus_per_node=8,
        cpus_per_task=64,
        partition="gpu_p5",
        account="abc@a100",
        constraint="a100",
        reservation="hug",
        quality_of_service="qos",
        dependency="afterany:12",
        exclude=("jean-zay-iam07", "jean-zay-iam27"),
        comment="tag=1 $(x)",
        signal_seconds_before_limit=600,
        hold=True,
    )
    flags = sbatch_options(full)
    assert set(flags) >= {
        "--array=1-10%1",
        "--gres=gpu:8",
        "--cpus-per-task=64",
        "--time=100:00:00",
        "--exclude=jean-zay-iam07,jean-zay-iam27",
        "--signal=B:USR1@600",
        "--dependency=afterany:12",
        "--comment=tag=1 $(x)",
        "--hold",
        "--qos=qos",
    }


def test_command_line_and_script_say_the_same(request_: BatchRequest) -> None:
    plain = script_options(request_)
    assert (
        plain == sbatch_options(request_)
        and "--no-requeue" in plain
        and "--ntasks-per-node=1" in plain
    )
    full = replace(
        request_, hint="nomultithread", memory_megabytes=2048, begin=1000.2, hold=True, requeue=True,
        survives_nodes=True, dependency="afterany:1",
    )  # fmt: skip
    more = {
        "--hint=nomultithread", "--mem=2048M", "--begin=uts1001", "--hold", "--requeue", "--no-kill",
        "--dependency=afterany:1",
    }  # fmt: skip
    assert (
        set(script_options(full))
        == set(sbatch_options(full))
        == set(plain) - {"--no-requeue"} | more
    )
    odd = replace(request_, comment='a "b" c', partition="", signal_seconds_before_limit=0)
    assert '--comment="a \\"b\\" c"' in script_options(
        odd
    ) and '--comment=a "b" c' in sbatch_options(odd)
    assert not [
        text for text in sbatch_options(odd) if text.startswith(("--partition", "--signal"))
    ]


def test_a_submission_is_one_call_with_the_script_on_stdin(request_: BatchRequest) -> None:
    runner = Recording(good("1234;jean-zay\n"))
    scheduler = SlurmScheduler(runner=runner)
    assert scheduler.submit(replace(request_, environment={"RUN": "a b"})) == "1234"
    assert runner.asked[0][:2] == ["sbatch", "--parsable"]
    assert runner.inputs == [request_.script]
    assert runner.environments[0]["RUN"] == "a b"
    assert "SLURM_TIME_FORMAT" not in runner.environments[0]  # the job would inherit it


def test_a_missing_working_directory_is_refused_before_slurm(request_: BatchRequest) -> None:
    runner = Recording()
    with pytest.raises(SchedulerError, match="does not exist"):
        SlurmScheduler(runner=runner).submit(
            replace(request_, working_directory=Path("/nowhere/at/all"))
        )
    assert runner.asked == []


RECORDS = (DATA / "22.05" / "show-job.txt").read_text()


def test_jobs_is_one_call() -> None:
    table = (DATA / "22.05" / "squeue-table.txt").read_text()
    runner = Recording(good(RECORDS), good(table))
    scheduler = SlurmScheduler(runner=runner)
    assert len(scheduler.jobs()) == 10
    assert {job.name for job in scheduler.jobs(name="rehearsal")} == {"rehearsal"}
    assert [asked[0] for asked in runner.asked] == ["scontrol", "squeue"], "by name: the table"
    assert runner.environments[0]["SLURM_BITSTR_LEN"] == "0"


@pytest.mark.parametrize(
    "answer",
    [
        bad("squeue: error: Invalid job format specification: exit_code\n"),
        CommandResult(
            0, "rehearsal|7\n", "squeue: error: Invalid job format specification: exit_code\n"
        ),
        good("rehearsal           RUNNING             \n"),
    ],
)
def test_without_the_table_records_are_read_from_then_on(answer: CommandResult) -> None:
    runner = Recording(answer, good(RECORDS), good(RECORDS))
    scheduler = SlurmScheduler(runner=runner)
    for _ in range(2):
        assert {job.name for job in scheduler.jobs(name="tr11-176B-ml")} == {"tr11-176B-ml"}
    assert [asked[0] for asked in runner.asked] == ["squeue", "scontrol", "scontrol"]


def test_queued_tasks_that_the_table_joins_are_asked_for_apart() -> None:
    """squeue joins what an array's tasks wait for: a held task would look like one that starts by
    itself.
    """
    table = (DATA / "22.05" / "squeue-table.txt").read_text()
    merged = table.replace("JobHeldUser", "JobArrayTaskLimit,JobHeldUser")
    runner = Recording(good(merged), good(RECORDS))
    assert [job.reason for job in SlurmScheduler(runner=runner).jobs(name="held")] == [
        "JobHeldUser"
    ]
    assert [asked[0] for asked in runner.asked] == ["squeue", "scontrol"]
    unlike = Recording(
        good(table.replace("JobHeldUser", "ReqNodeNotAvail, UnavailableNodes:n1,n2"))
    )
    SlurmScheduler(runner=unlike).jobs(name="waiting")
    assert len(unlike.asked) == 1, "one reason, with its own commas"


def test_a_silent_controller_is_no_reason_for_a_second_question() -> None:
    runner = Recording(
        bad("slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    )
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(runner=runner).jobs(name="x")
    assert len(runner.asked) == 1


def test_silence_is_never_an_empty_queue() -> None:
    assert SlurmScheduler(runner=Recording(good("No jobs in the system\n"))).jobs() == ()
    for answer in (
        good(""),
        bad("slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"),
        bad("slurm_load_jobs error: Socket timed out on send/recv operation\n"),
        bad("slurm_load_jobs error: Zero Bytes were transmitted or received\n"),
        bad("squeue: error: If munged is up, restart with --num-threads=10\n"),
    ):
        with pytest.raises(SchedulerUnreachable):
            SlurmScheduler(runner=Recording(answer)).jobs()


def test_a_job_that_slurm_no_longer_knows_is_none() -> None:
    for answer in (
        bad("slurm_load_jobs error: Invalid job id specified\n"),
        CommandResult(1, "Job 2_77 not found\n", ""),
    ):
        assert SlurmScheduler(runner=Recording(answer)).job("2_77") is None
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(
            runner=Recording(bad("slurm_load_jobs error: Unable to contact slurm controller"))
        ).job("2")


def test_one_task_of_a_waiting_array() -> None:
    text = (DATA / "22.05" / "show-job.txt").read_text()
    only = text[text.index("\nJobId=4 ") + 1 :].split("\n\n")[0] + "\n"
    job = SlurmScheduler(runner=Recording(good(only))).job("4_7")
    assert job is not None
    assert (job.job_id, job.task_id, job.pending_tasks, job.state) == (
        "4_7",
        7,
        (),
        JobState.PENDING,
    )
    assert job.output.endswith("-4_7.out")


def test_a_change_of_an_array_forgives_tasks_that_run_or_ended() -> None:
    mixed = (
        "7_1: Job has already finished\n7_2: Job is no longer pending execution\n7_3-10: No error\n"
    )
    SlurmScheduler(runner=Recording(bad(mixed))).exclude("7", ("x1",))
    for refusal, named in (
        ("7_1-2: Job has already finished\n7_3: Invalid node name specified\n", "7_3"),
        ("7_1: No error\n7_2: Invalid node name specified\n", "7_2"),
    ):
        with pytest.raises(SchedulerError, match=f"{named}: Invalid node name specified"):
            SlurmScheduler(runner=Recording(bad(refusal))).exclude("7", ("x1",))


def test_what_waits_is_looked_at_where_only_what_runs_is_named() -> None:
    """As 24.11 answers for an array of which one task runs and one waits."""
    only = "4_1: Job is no longer pending execution\n"
    text = (DATA / "22.05" / "show-job.txt").read_text()
    waiting = text[text.index("\nJobId=4 ") + 1 :].split("\n\n")[0] + "\n"
    nothing_waits = good(waiting.replace("JobState=PENDING", "JobState=RUNNING"))
    with pytest.raises(SchedulerError, match="4_1: Job is no longer pending"):
        SlurmScheduler(runner=Recording(bad(only), nothing_waits)).exclude("4", ("x1",))

    changed = Recording(bad(only), good(waiting.replace("ExcNodeList=(null)", "ExcNodeList=x1")))
    SlurmScheduler(runner=changed).exclude("4", ("x1",))
    assert len(changed.asked) == 2

    unchanged = Recording(bad(only), good(waiting), good(""))
    SlurmScheduler(runner=unchanged).exclude("4", ("x1",))
    assert unchanged.asked[-1][2:] == ["JobId=4_[2-10]", "ExcNodeList=x1"]


@pytest.mark.parametrize(
    "refusal",
    [
        "Job update not available right now, the DB index is being set, try again in a bit for job 4",
        "Unexpected message received for job 4",
    ],
)
@pytest.mark.parametrize("is_array", [True, False])
def test_what_waits_of_a_refused_array_is_changed_by_name(refusal: str, is_array: bool) -> None:
    """As 22.05 has it after a restart of slurmctld, while a task of the array lives on without a
    lost node.
    """
    text = (DATA / "22.05" / "show-job.txt").read_text()
    found = text[text.index("\nJobId=4 ") + 1 :].split("\n\n")[0] + "\n"
    if not is_array:
        found = "\n".join(
            line
            for line in found.replace("ArrayJobId=4 ", "").splitlines()
            if "ArrayTaskId" not in line
        )
    asked = Recording(bad(refusal), good(found), good(""))
    if is_array:
        SlurmScheduler(runner=asked).exclude("4", ("x1",))
        assert asked.asked[-1][2:] == ["JobId=4_[2-10]", "ExcNodeList=x1"]
    else:
        with pytest.raises(SchedulerUnreachable, match="for job 4"):
            SlurmScheduler(runner=asked).exclude("4", ("x1",))
    with pytest.raises(SchedulerUnreachable):  # named already: it is asked again later
        SlurmScheduler(runner=Recording(bad(refusal), good(found))).hold("4_[2-10]")


NOT_NOW = (
    "Job update not available right now, the DB index is being set, try again in a bit for job 1"
)


@pytest.mark.parametrize(
    ("shown", "is_released"),
    [
        ("JobState=RUNNING Reason=None", True),  # released, and it started at once
        ("JobState=PENDING Reason=Priority Priority=7", True),
        ("JobState=PENDING Reason=JobHeldUser Priority=0", False),
        ("JobState=CANCELLED Reason=None", True),
    ],
)
@pytest.mark.parametrize("name", ["1", "1_2"])
def test_what_slurm_refuses_at_this_moment_is_looked_at(
    shown: str, is_released: bool, name: str
) -> None:
    """22.05 refuses for the task that lost a node, and has released the others: scontrol's sentence
    says neither.
    """
    task = "ArrayJobId=1 ArrayTaskId=2 " if "_" in name else ""
    record = f"JobId=1 {task}JobName=x\n   {shown}\n\n"
    asked = Recording(bad(NOT_NOW), good(record), bad(NOT_NOW))
    if is_released:
        SlurmScheduler(runner=asked).release(name)
    else:
        with pytest.raises(SchedulerUnreachable, match="lost a node"):
            SlurmScheduler(runner=asked).release(name)
    hold = Recording(bad(NOT_NOW), good(record), bad(NOT_NOW))
    if "PENDING Reason=JobHeldUser" in shown:
        SlurmScheduler(runner=hold).hold(name)
    else:
        with pytest.raises(SchedulerUnreachable):
            SlurmScheduler(runner=hold).hold(name)


def test_the_steps_exit_code_is_told_of_a_job_that_runs() -> None:
    """As 22.05 shows it between two steps: one was ended by SIGABRT, and the job runs on."""
    shown = "JobId=24 JobName=x\n   JobState=RUNNING Reason=None\n   Restarts=0 ExitCode=0:0\n   DerivedExitCode=0:6\n\n"
    assert SlurmScheduler(runner=Recording(good(shown))).step_code("24") == 134
    assert SlurmScheduler(runner=Recording(good(shown))).step_code("25") is None


def test_refusals_are_one_line_with_slurms_reason(request_: BatchRequest) -> None:
    words = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid x\n"
    with pytest.raises(SchedulerError) as caught:
        SlurmScheduler(runner=Recording(bad(words))).submit(request_)
    assert (
        str(caught.value)
        == "sbatch: invalid partition specified: nope; Batch job submission failed: Invalid x"
    )
    assert not isinstance(caught.value, SchedulerUnreachable)
    result = SlurmScheduler(runner=Recording(bad("allocation failure: Requested node..."))).test(
        request_
    )
    assert not result.accepted
    assert [
        SlurmScheduler(runner=Recording(bad(f"allocation failure: {said}"))).test(request_).is_of_the_moment
        for said in (
            "Requested node configuration is not available", "Requested nodes are busy",
            "Required node not available (down, drained or reserved)",
            "Required partition not available (inactive or drain)", "Node count specification invalid",
            "Invalid feature specification", "More processors requested than permitted",
        )
    ] == [True, True, True, False, False, False, False]  # fmt: skip
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(
            runner=Recording(bad("sbatch: error: Unable to contact slurm controller"))
        ).test(request_)


@pytest.mark.parametrize("job_id", ["", "abc", "12;rm", "--help", "12_", "1 2"])
def test_what_is_no_job_id_reaches_no_command(job_id: str) -> None:
    runner = Recording()
    with pytest.raises(SchedulerError, match="no job id"):
        SlurmScheduler(runner=runner).cancel(job_id)
    assert runner.asked == []


def test_a_shown_id_is_taken_without_its_throttle() -> None:
    runner = Recording(good(""))
    SlurmScheduler(runner=runner).cancel("12_[4-10%1]")
    assert runner.asked == [["scancel", "12_[4-10]"]]


def test_habits_and_surrounding_jobs_do_not_bend_the_answers() -> None:
    base = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SQUEUE_STATES": "RUNNING",
        "SCANCEL_INTERACTIVE": "1",
        "SBATCH_ACCOUNT": "abc",
        "SBATCH_ARRAY_INX": "1-5",
    }
    assert client_environment(base) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "abc",
    }


def test_the_real_runner_ends_what_takes_too_long() -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    for until in (None, "words that never come"):
        with pytest.raises(SchedulerUnreachable, match="did not answer within"):
            run_command(slow, standard_input="", environment={}, timeout_seconds=0.5, until=until)


def test_the_real_runner_stops_at_the_words_it_waits_for() -> None:
    code = "import sys, time; print('a', file=sys.stderr); print('retrying', file=sys.stderr, flush=True); time.sleep(600)"
    result = run_command(
        [sys.executable, "-c", code],
        standard_input="",
        environment={},
        timeout_seconds=300,
        until="retrying",
    )
    assert result == CommandResult(None, "", "a\nretrying\n")


def test_a_missing_command_is_not_observed() -> None:
    with pytest.raises(SchedulerUnreachable, match="cannot be started"):
        run_command(["/nowhere/squeue"], standard_input="", environment={}, timeout_seconds=5)


def test_nodes_fall_back_to_what_every_version_prints() -> None:
    """Where sinfo does not know a field; a controller that is away is asked nothing more."""
    shown = "NodeName=n1 CPUTot=4 State=IDLE\n   Gres=gpu:2\n   Partitions=gpu\n"
    runner = Recording(
        bad("sinfo: error: Invalid job format specification: StateComplete"),
        good(shown),
        good(shown),
    )
    scheduler = SlurmScheduler(runner=runner)
    assert (
        [node.name for node in scheduler.nodes()]
        == [node.name for node in scheduler.nodes()]
        == ["n1"]
    )
    assert [asked[0] for asked in runner.asked] == ["sinfo", "scontrol", "scontrol"]
    silent = Recording(
        bad("slurm_load_partitions: Unable to contact slurm controller (connect failure)")
    )
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(runner=silent).nodes()
    assert len(silent.asked) == 1
