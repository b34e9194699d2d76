"""What tr11 and the trainer make in a run directory is the whole group's, whatever the umask of who
made it.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

import tr11ops
import trainer
from tests.shared_tree import not_the_groups
from tr11ops.agent.batch import share_output
from tr11ops.queue.stop import Request, place_request
from tr11ops.rundir.hold_store import forget_holds, record_holds
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import PhaseWriter
from trainer.contract.files import append_line, make_shared, open_shared, write_unflushed
from trainer.contract.paths import RunPaths
from trainer.control.launcher import _reify_shared
from trainer.data.corpus import _write_lines

# Who makes a folder in another way, and why the group need not come in.
OTHER_FOLDERS = {
    "tr11ops/backup/folder.py": "flushes each to disk; opens them with share_folder",
    "trainer/checkpoint/files.py": "must not be there before; opens it with share_folder",
    "trainer/contract/files.py": "this is the way",
    "tr11ops/backup/remote.py": "on a remote store",
    "tr11ops/trainers/keeper.py": "a foreign trainer's own, for the file that asks it to stop",
}


@pytest.fixture(params=[0o077, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_run_directory_is_the_groups(tmp_path: Path, umask: int) -> None:
    """Each of the ways in which files come there, by the writers that once kept the group out."""
    root = tmp_path / "run"
    run = RunDirectory(RunPaths(root, "demo", "main"), root / "kill-switch")
    _write_lines(root / "data" / "corpus.jsonl", [])
    record_holds(run, ["12"], "me", "why")
    forget_holds(run, ["12"])
    place_request(run, run.paths.pause, Request("pause", who="me"))
    Journal(run.journal).write("kill", "why", {}, "me")
    append_line(run.paths.metrics, "{}")
    PhaseWriter(run.paths.phases("12"), 1, lambda text: None).enter("training", 0, 1.0)
    write_unflushed(run.paths.heartbeat(0), {"iteration": 1}, os.getpid())
    os.close(open_shared(run.paths.main_log, os.O_WRONLY))
    home = root / "state" / "attempts" / "12" / "torchrun" / "0"
    make_shared(home)
    torchrun = DefaultLogsSpecs(log_dir=str(home), tee=Std(3))
    _reify_shared(torchrun, {0: {"RANK": "0"}})
    assert not_the_groups(root) == []


def test_a_jobs_output_is_the_groups(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.touch(0o600)
    with path.open("ab") as stream:
        share_output(stream.fileno())
    assert path.stat().st_mode & 0o060 == 0o060
    share_output(os.open(os.devnull, os.O_WRONLY))  # no file: left alone


def test_folders_are_made_in_one_way() -> None:
    """No `mkdir` but make_shared's, and what is private on purpose; the twin's machine is no run
    directory.
    """
    found = set()
    for room in (tr11ops, trainer):
        home = Path(room.__path__[0])
        for path in home.rglob("*.py"):
            name = path.relative_to(home.parent).as_posix()
            if name.startswith("tr11ops/twin/"):
                continue
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                private = any(
                    word.arg == "mode"
                    and isinstance(word.value, ast.Constant)
                    and word.value.value == 0o700
                    for word in call.keywords
                )
                if call.func.attr in {"mkdir", "makedirs"} and not private:
                    found.add(name)
    assert found == set(OTHER_FOLDERS)
