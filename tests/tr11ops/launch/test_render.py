"""The batch script: valid whatever it is given, and it does what it says when a shell runs it."""

from __future__ import annotations

import ast
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.waiting import is_gone, until
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.sbatch_options import script_options
from tr11ops.launch.plan import render_script
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.hold_store import marked_holds

HOSTILE = [
    "a b",
    "a'b",
    'a"b',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a\\b",
    "ä €",
    "-n",
    "a#b",
    "!x",
    "*",
    "~",
]
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)


def request(folder: Path, **changes: object) -> BatchRequest:
    values: dict[str, object] = {
        "script": "", "name": "run", "nodes": 2, "time_limit_seconds": 3600, "output": "%x-%j.out",
        "working_directory": folder,
    }  # fmt: skip
    return BatchRequest(**{**values, **changes})  # type: ignore[arg-type]


def script(folder: Path, command: list[str], **changes: object) -> str:
    values: dict[str, object] = {
        "variant": "main",
        "tag": "t",
        "command": command,
        "setup": [],
        "environment": {},
    }
    return render_script(request(folder), **{**values, **changes})  # type: ignore[arg-type]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.sbatch"
    path.write_text(text)
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    return path


SHOW = "import os, sys; print('ARGUMENTS', sys.argv[1:]); print('VALUE', repr(os.environ.get('VALUE')))"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_values_reach_the_agent_unchanged(tmp_path: Path, text: str) -> None:
    folder = tmp_path / text.replace("/", "_")
    folder.mkdir()
    path = write(
        folder,
        script(
            folder, [sys.executable, "-c", SHOW, str(folder), text], environment={"VALUE": text}
        ),
    )
    done = subprocess.run(
        ["bash", str(path)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert f"ARGUMENTS {[str(folder), text]}" in done.stdout
    assert f"VALUE {text!r}" in done.stdout
    assert [entry.name for entry in folder.iterdir()] == ["train.sbatch"]
    assert done.stdout.startswith("START TIME: ") and done.stdout.splitlines()[-1].startswith(
        "END TIME: "
    )


@settings(max_examples=25, deadline=None)
@given(
    PLAIN_TEXT,
    st.lists(PLAIN_TEXT, max_size=3),
    st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), PLAIN_TEXT),
)
def test_any_text_gives_a_script_that_parses_to_the_same_words(
    name: str, words: list[str], variables: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name.replace("/", "_") or "x")
        text = script(folder, ["agent", *words], environment=variables)
        write(Path(place), text)
        line = next(line for line in text.split("\n") if line.startswith("  exec agent"))
        assert shlex.split(line) == ["exec", "agent", *words]


@pytest.mark.parametrize("status", [0, 1, 2, 137])
def test_the_agents_status_is_the_scripts(tmp_path: Path, status: int) -> None:
    path = write(tmp_path, script(tmp_path, [sys.executable, "-c", f"raise SystemExit({status})"]))
    assert (
        subprocess.run(["bash", str(path)], capture_output=True, check=False).returncode == status
    )


def test_setup_lines_are_the_shells_and_a_failing_one_ends_it(tmp_path: Path) -> None:
    setup = [
        'export FROM_SETUP="$NOT_SET-$((6 * 7))"',
        "function module() { :; }",
        "module load cuda",
    ]
    text = script(
        tmp_path, [sys.executable, "-c", "import os; print(os.environ['FROM_SETUP'])"], setup=setup
    )
    done = subprocess.run(
        ["bash", str(write(tmp_path, text))], capture_output=True, text=True, check=True
    )
    assert "\n-42\n" in done.stdout
    text = script(tmp_path, ["true"], setup=['cat "$TR11_SHIPPED/slurm/start-tr11-176B-ml"'])
    done = subprocess.run(
        ["bash", str(write(tmp_path, text))], capture_output=True, text=True, check=True
    )
    assert "conda activate" in done.stdout
    text = script(tmp_path, [sys.executable, "-c", "print('TRAINED')"], setup=["false | cat"])
    done = subprocess.run(
        ["bash", str(write(tmp_path, text))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "TRAINED" not in done.stdout


COUNT = """
import signal, sys, time
got = []
def note(number, frame):
    got.append(signal.Signals(number).name)
    print("GOT", got[-1], flush=True)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
print("READY", flush=True)
deadline = time.monotonic() + 300  # who started it may be gone
while len(got) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
sys.exit(5)
"""


def test_every_signal_is_passed_on_and_the_status_survives(tmp_path: Path) -> None:
    path = write(tmp_path, script(tmp_path, [sys.executable, "-u", "-c", COUNT]))
    batch = subprocess.Popen(
        ["bash", str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert batch.stdout is not None
        lines: list[str] = []
        for wanted, number in (
            ("READY", signal.SIGUSR1),
            ("GOT SIGUSR1", signal.SIGTERM),
            ("GOT SIGTERM", signal.SIGINT),
        ):
            while wanted not in lines:
                lines.append(batch.stdout.readline().rstrip("\n"))
            batch.send_signal(number)  # to the shell alone, as Slurm's --signal=B: does
        rest = batch.stdout.read()
        assert batch.wait(timeout=300) == 5
        # An interrupt is passed on as TERM: a child in the background ignores INT until it has its
        # own handler.
        assert "GOT SIGTERM" in rest and "END TIME: " in rest
    finally:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
            batch.wait()


def test_a_signal_during_the_setup_leaves_without_training(tmp_path: Path) -> None:
    setup = ["echo READY", "sleep 90"]  # nothing but the signal ends it
    text = script(tmp_path, [sys.executable, "-c", "print('TRAINED')"], setup=setup)
    batch = subprocess.Popen(
        ["bash", str(write(tmp_path, text))], stdout=subprocess.PIPE, text=True
    )
    assert batch.stdout is not None
    while batch.stdout.readline() != "READY\n":
        time.sleep(0.01)
    batch.send_signal(signal.SIGUSR1)
    rest, _ = batch.communicate(timeout=300)
    assert (
        batch.returncode == 0
        and "TRAINED" not in rest
        and "before the workers were started" in rest
    )


def test_options_say_everything_that_the_request_says(tmp_path: Path) -> None:
    full = request(
        tmp_path, array="1-10%1", gpus_per_node=8, cpus_per_task=64, partition="gpu_p5", account="six@a100",
        constraint="a100", reservation="hug", quality_of_service="qos_gpu-gc", dependency="afterany:12",
        exclude=("n1", "n2"), comment="tr11:x@y", signal_seconds_before_limit=600, time_limit_seconds=360_000, hint="nomultithread",
    )  # fmt: skip
    assert script_options(full) == [
        "--job-name=run", "--partition=gpu_p5", "--account=six@a100", "--constraint=a100", "--reservation=hug",
        "--qos=qos_gpu-gc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=64", "--hint=nomultithread",
        "--gres=gpu:8", "--time=100:00:00", "--signal=B:USR1@600", f"--chdir={tmp_path}", "--output=%x-%j.out",
        "--array=1-10%1", "--dependency=afterany:12", "--exclude=n1,n2", "--comment=tr11:x@y", "--no-requeue",
    ]  # fmt: skip


def test_a_job_that_may_start_with_fewer_spares_asks_for_a_range(tmp_path: Path) -> None:
    options = script_options(request(tmp_path, nodes=50, least_nodes=48))
    assert "--nodes=48-50" in options
    # told how many tasks there are, Slurm gives no more nodes than the least number has
    assert not any("ntasks" in option for option in options)
    assert "--nodes=50" in script_options(request(tmp_path, nodes=50, least_nodes=50))


def test_a_line_end_can_never_add_an_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot stand on one line"):
        script(tmp_path / "a\n#SBATCH --nodes=999", ["agent"])
    with pytest.raises(ValueError, match="NUL"):
        script(tmp_path, ["a\0b"])


def test_only_a_job_with_spares_outlives_a_node(tmp_path: Path) -> None:
    assert script_options(request(tmp_path, survives_nodes=True))[-2:] == [
        "--no-requeue",
        "--no-kill",
    ]
    assert "--no-kill" not in script_options(request(tmp_path))


@pytest.mark.parametrize(("status", "verdict"), [(137, False), (1, False), (1, True), (0, False)])
def test_an_agent_that_ends_without_a_word_twice_holds_it(
    tmp_path: Path, status: int, verdict: bool
) -> None:
    # The shell's own last resort: `scontrol` is looked up on PATH, so here stands one that notes
    # what it is told.
    tools, attempts = tmp_path / "tools", tmp_path / "it's attempts"
    tools.mkdir()
    (tools / "scontrol").write_text(
        f'#!/bin/bash\necho "$@" >> {shlex.quote(str(tmp_path / "told"))}\n'
    )
    (tools / "scontrol").chmod(0o755)
    (attempts / "7").mkdir(parents=True)
    if verdict:
        (attempts / "7" / "verdict.json").touch()
    how = f"raise SystemExit({status})" if status < 128 else "import os; os.kill(os.getpid(), 9)"
    text = script(
        tmp_path, [sys.executable, "-c", how], silence=tmp_path / "silent", attempts=attempts
    )
    path = write(tmp_path, text)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "6",
    }
    environment.pop("TR11_SCHEDULER", None)
    told = []
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(path)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        told.append((tmp_path / "told").read_text() if (tmp_path / "told").exists() else "")
    silent = status != 0 and not verdict
    assert told == ["", "hold 6\n" if silent else ""]
    assert ("ALERT" in done.stdout) == silent
    if silent:  # what `tr11 resume` reads
        kept = AttemptVerdict.read(attempts / "7")
        assert kept is not None and (kept.held, kept.restart, kept.exit_status) == (
            ("6",),
            False,
            status,
        )


# --------------------------------------------------------------------- an agent that does not begin
RECORD = "import sys; print('RECORDED', dict(zip(sys.argv[1::2], sys.argv[2::2])))"
AGENT = (
    "import os, pathlib; pathlib.Path(os.environ['TR11_EARLY'], 'begun').touch(); print('TRAINED')"
)


def early(
    folder: Path, setup: list[str], agent: str = AGENT, seconds: int = 600
) -> tuple[int, dict[str, str], str]:
    """The script's status, what it has recorded, and what it printed, as a file of its own as under
    Slurm.
    """
    text = script(
        folder, [sys.executable, "-c", agent], setup=setup, setup_seconds=seconds,
        early=[sys.executable, "-c", RECORD], attempts=folder / "attempts", silence=folder / "silent",
    )  # fmt: skip
    output = folder / "out.txt"
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n1",
        "TR11_SCHEDULER": "local",
    }
    with output.open("w") as stream:
        done = subprocess.run(
            ["bash", str(write(folder, text))], stdout=stream, stderr=subprocess.STDOUT, env=environment, timeout=60,
            cwd=folder,
        )  # fmt: skip
    said = output.read_text()
    [line] = [line for line in said.splitlines() if line.startswith("RECORDED ")] or ["RECORDED {}"]
    found: dict[str, str] = ast.literal_eval(line.removeprefix("RECORDED "))
    return done.returncode, found, said


@pytest.mark.parametrize(
    ("setup", "what", "status", "line"),
    [
        (["export A=1", "false | cat"], "setup", "1", "2"),
        (["module() { return 7; }", "", "module load cuda"], "setup", "7", "3"),
        (["source /no/such/script"], "setup", "1", "1"),
        (
            ["echo fine", "exit 0"],
            "setup",
            "1",
            "2",
        ),  # it would end the array's tasks one by one, as if all were well
        (["exec true"], "setup", "1", "1"),
        (["kill -9 $BASHPID"], "setup", "137", "1"),
        (["echo 'unbalanced"], "setup", "2", ""),
        ([")"], "setup", "2", ""),
        (["TR11_SETUP_END", "false"], "setup", "127", "1"),
    ],
)
def test_a_set_up_that_fails_is_recorded_with_its_line(
    tmp_path: Path, setup: list[str], what: str, status: str, line: str
) -> None:
    _, found, said = early(tmp_path, setup)
    assert (found["--what"], found["--status"], found["--line"], found["--host"]) == (
        what,
        status,
        line,
        "n1",
    )
    assert found["--output"] == str(tmp_path / "out.txt") and "TRAINED" not in said


def test_a_set_up_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    _, found, said = early(tmp_path, ["sleep 5000 & echo $! > pid", "wait"], seconds=1)
    assert (found["--what"], found["--line"]) == ("late", "2") and "TRAINED" not in said
    pid = int((tmp_path / "pid").read_text())
    until(lambda: is_gone(pid), "the end of what the set-up started")


def test_a_set_up_that_breaks_python_is_recorded_by_another_one(tmp_path: Path) -> None:
    _, found, said = early(tmp_path, ["export PYTHONHOME=/nowhere PATH=/nowhere"])
    assert (found["--what"], found["--status"]) == ("agent", "1") and "TRAINED" not in said


def test_an_agent_that_has_begun_is_recorded_by_no_one_else(tmp_path: Path) -> None:
    for agent in (AGENT, AGENT + "; raise SystemExit(1)"):
        # what reads its input finds none
        _, found, said = early(tmp_path, ["export A=1", "cat"], agent)
        assert not found and "TRAINED" in said


def test_a_set_up_may_clear_the_temporary_directory(tmp_path: Path) -> None:
    _, found, said = early(tmp_path, ['rm -rf "$early"'], seconds=5)
    assert not found and "TRAINED" in said


def test_a_start_that_works_ends_the_count_of_failures(tmp_path: Path) -> None:
    verdict = tmp_path / "attempts" / "7" / "verdict.json"
    verdict.parent.mkdir(parents=True)
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "5").touch()
    assert "TRAINED" in early(tmp_path, [], f"{AGENT}; pathlib.Path({str(verdict)!r}).touch()")[2]
    assert not (tmp_path / "silent").exists()
    verdict.unlink()
    for task in ("5", "6"):
        (tmp_path / "silent").mkdir(exist_ok=True)
        (tmp_path / "silent" / task).touch()
    status, _, said = early(tmp_path, [])
    # here nothing can be held: it is said, and the next task starts
    assert status == 3 and "ALERT" in said
    assert early(tmp_path, [])[0] == 0


def test_starts_that_were_killed_are_counted_by_the_next_one(tmp_path: Path) -> None:
    starts = tmp_path / "silent"
    starts.mkdir()
    (starts / "5").touch()
    assert "TRAINED" in early(tmp_path, [])[2]
    assert not (starts / "7").exists()
    (starts / "6").touch()
    status, _, said = early(tmp_path, [])
    assert status == 3 and "TRAINED" not in said


def test_what_a_later_start_left_outlives_the_end_of_this_one(tmp_path: Path) -> None:
    """Slurm may start the next task while this one leaves: the mark of that start is not this one's
    to forget.
    """
    verdict, later = tmp_path / "attempts" / "7" / "verdict.json", tmp_path / "silent" / "8"
    verdict.parent.mkdir(parents=True)
    later.parent.mkdir()
    (tmp_path / "silent" / "5").touch()
    leaves = (
        f"{AGENT}; pathlib.Path({str(verdict)!r}).touch(); pathlib.Path({str(later)!r}).touch()"
    )
    assert "TRAINED" in early(tmp_path, [], leaves)[2]
    assert [path.name for path in later.parent.iterdir()] == ["8"]


def test_an_unwritable_run_directory_is_not_a_second_time(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/told\n')
    (tools / "scontrol").chmod(0o755)
    (tmp_path / "file").touch()  # nothing can be made below it, no matter who asks
    told = "import os, pathlib; p = pathlib.Path(os.environ['TR11_EARLY']); (p / 'begun').touch(); TOLD; raise SystemExit(1)"
    for word, held in (("(p / 'told').touch()", False), ("pass", True)):
        text = script(
            tmp_path, [sys.executable, "-c", told.replace("TOLD", word)], silence=tmp_path / "file/silent",
            attempts=tmp_path / "file/attempts",
        )  # fmt: skip
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "6",
        }
        environment.pop("TR11_SCHEDULER", None)
        path = write(tmp_path, text)
        done = subprocess.run(
            ["bash", str(path)], env=environment, capture_output=True, text=True, check=False
        )
        assert (
            done.returncode == 1
            and "twice" not in done.stdout
            and "not the first" not in done.stdout
        )
        assert (tmp_path / "told").exists() == held, done.stdout + done.stderr


ONLY_ELSEWHERE = """
import os, pathlib, sys
if "VIA_SRUN" not in os.environ:
    sys.exit(127)
pathlib.Path("attempts/7").mkdir(parents=True)
pathlib.Path("attempts/7/verdict.json").touch()
print("RECORDED", sys.argv[-1], sys.argv[sys.argv.index("--host") + 1])
sys.exit(1)
"""


def test_what_works_on_another_node_alone_is_recorded_there(tmp_path: Path) -> None:
    """An interpreter that is missing on the first node: `srun` and `scontrol` stand for the
    scheduler's.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/bash\n[ "$1" = show ] && printf "n1\\nn2\\nn3\\n" || echo "$@" > told\n'
    )
    (tools / "srun").write_text(
        '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do echo "$1" >> nodes; shift; done\nVIA_SRUN=1 exec "$@"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    text = script(
        tmp_path, [str(tmp_path / "no/python")], early=[sys.executable, "-c", ONLY_ELSEWHERE],
        attempts=Path("attempts"), silence=Path("silent"),
    )  # fmt: skip
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    environment.pop("TR11_SCHEDULER", None)
    path = write(tmp_path, text)
    done = subprocess.run(
        ["bash", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1 and "RECORDED node n1" in done.stdout, done.stdout + done.stderr
    assert "--nodelist=n2" in (tmp_path / "nodes").read_text() and not (tmp_path / "told").exists()
    assert "left no verdict" not in done.stdout and list((tmp_path / "silent").iterdir()) == []


# ---------------------------------------------------------------- a run directory that is not there
MISSING_HERE = """#!/bin/bash
# the other nodes see the folder away/, as where the run directory's file system is mounted
node=""
while [ "${1#--}" != "$1" ]; do case "$1" in --nodelist=*) node="${1#*=}";; esac; shift; done
echo "$node $*" >> told
[ "$1" = /bin/sh ] || { mkdir -p away/attempts/7; : > away/attempts/7/verdict.json; exit 1; }
[ "$node" = n3 ] || exit 1
[ "$5" = "$PWD/run/submission" ] || [ -e "away${5#"$PWD/run"}" ]
"""


def waiting(comment: str) -> Job:
    return Job(job_id="6_[2-9]", raw_id="6", name="run", user="ana", state=JobState.PENDING, reason="JobHeldUser",
               comment=comment, array_id="6", task_id=None, pending_tasks=(2, 3))  # fmt: skip


def unmounted(folder: Path, srun: str) -> tuple[int, list[str], list[str]]:
    """The script's status, what it told `scontrol`, and what it ran on other nodes, where the
    directory is missing.
    """
    tools = folder / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/bash\n[ "$1" = show ] && printf "n1\\nn2\\nn3\\n" || echo "$*" >> held\n'
    )
    (tools / "srun").write_text(srun)
    (tools / "sleep").write_text("#!/bin/bash\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    run = folder / "run"
    text = render_script(
        request(folder, comment="tr11:tag@mark its own"), variant="main", tag="t", setup=[], environment={},
        command=[sys.executable, "-c", "print('TRAINED')"], early=["recorder"], attempts=run / "attempts",
        silence=run / "silent", folder=run / "submission", output=f"{run}/submission/%x-%A_%a.out",
    )  # fmt: skip
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    environment.pop("TR11_SCHEDULER", None)
    path = write(folder, text)
    done = subprocess.run(
        ["bash", str(path)], env=environment, stdout=subprocess.DEVNULL, cwd=folder, check=False
    )
    assert not run.exists(), "nothing is made in its place"
    found = [
        (folder / name).read_text().splitlines() if (folder / name).exists() else []
        for name in ("held", "told")
    ]
    return done.returncode, found[0], found[1]


def test_a_directory_that_no_node_sees_has_the_array_held(tmp_path: Path) -> None:
    status, held, told = unmounted(tmp_path, '#!/bin/bash\necho "$*" >> told\nexit 1\n')
    assert status == 3 and held[0] == "hold 6" and len(held) == 2 and len(told) == 2
    comment = held[1].removeprefix("update JobId=6 Comment=")
    [hold] = marked_holds([waiting(comment)], ())
    assert comment.startswith("tr11:tag@mark its own held-by-tr11@") and hold.is_for_fault
    assert hold.why == f"n1: {tmp_path} is not mounted, or is not what this job was queued from"


def test_a_directory_that_another_node_sees_is_this_nodes_fault(tmp_path: Path) -> None:
    status, held, told = unmounted(tmp_path, MISSING_HERE)
    assert status == 1 and held == [], told
    assert [line for line in told if "recorder" in line] == [
        "n3 recorder --host n1 --status 3 --what unmounted"
    ]


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("%x-%A_%a.out", "a b-6_3.out"), ("%5a-%j.txt", "00003-7.txt"), ("%N %u $HOME %q 100%%", "n1 ana $HOME %q 100%"),
        ("it's", "it's"), ("back\\%x", "back%x"), ("%", "%"),
    ],
)  # fmt: skip
def test_the_script_writes_where_sbatch_would(tmp_path: Path, pattern: str, path: str) -> None:
    (tmp_path / "folder").mkdir()
    text = render_script(
        request(tmp_path), variant="main", tag="t", command=["true"], setup=[], environment={},
        folder=tmp_path / "folder", output=f"{tmp_path}/folder/{pattern}",
    )  # fmt: skip
    environment = {
        **os.environ, "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_NAME": "a b", "SLURM_JOB_USER": "ana", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(write(tmp_path, text))], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [made] = (tmp_path / "folder").iterdir()
    assert made.name == path and made.read_text().startswith("START TIME: ")


def test_an_output_that_cannot_be_opened_costs_no_attempt(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    text = render_script(
        request(tmp_path), variant="main", tag="t", command=["echo", "TRAINED"], setup=[], environment={},
        folder=tmp_path / "folder", output=f"{tmp_path}/none/%x.out",
    )  # fmt: skip
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", str(write(tmp_path, text))], env=environment, check=True)
    assert "TRAINED" in (tmp_path / "folder" / "tr11-7.out").read_text()


def test_an_output_that_takes_no_line_costs_no_attempt(tmp_path: Path) -> None:
    """A file that opens on a full disk: the first line that could not be written ended three tasks
    of an array.
    """
    (tmp_path / "folder").mkdir()
    text = render_script(
        request(tmp_path), variant="main", tag="t", command=["bash", "-c", "echo TRAINED && touch trained"],
        setup=["echo set up"], environment={}, folder=tmp_path / "folder", output="/dev/full",
    )  # fmt: skip
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", str(write(tmp_path, text))], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "trained").exists()


def test_a_disk_that_fills_up_later_does_not_change_how_the_attempt_ends(tmp_path: Path) -> None:
    """The last line of the script cannot be written."""
    text = render_script(
        request(tmp_path),
        variant="main",
        tag="t",
        command=["bash", "-c", "exit 0"],
        setup=[],
        environment={},
    )
    path = write(tmp_path, text.replace('say "END TIME', 'exec >/dev/full; say "END TIME'))
    subprocess.run(["bash", str(path)], check=True, stdout=subprocess.DEVNULL)
