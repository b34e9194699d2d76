"""Every state file of a run, damaged in every way: it is named, it hangs nothing, and it keeps no
run from starting.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.disk_scheduler import DiskScheduler
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tests.tr11ops.status_cases import snapshot
from tr11ops.cli.main import execute
from tr11ops.detect.watch import damaged_state
from tr11ops.runcard.card import load_card
from tr11ops.rundir import state_files
from tr11ops.rundir.attempts import AttemptVerdict, KeptStacks, LaunchRecord, TrainerLife
from tr11ops.rundir.checkpoint_digests import DigestRecord, NotFiniteRecord
from tr11ops.rundir.copies import CopyRecord, DrillRecord
from tr11ops.rundir.cron_records import PeriodicJobState
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, Submission, require_run_id
from tr11ops.rundir.state_files import (
    SET_ASIDE,
    STATE_FILES,
    StateFile,
    find_damage,
    set_damage_aside,
)
from trainer.contract.attempt import EndMarker, ExitTime, Heartbeat, write_heartbeat
from trainer.contract.errors import DamagedFile
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.origin import BranchOrigin
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

SECONDS = 30  # for a command that is over within one


def empty(path: Path) -> None:
    path.write_bytes(b"")


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3].rstrip()[: max(1, path.stat().st_size // 2)])


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 30)


def foreign(path: Path) -> None:
    path.write_text('{"schema": 1, "made_by": "something else"}\n')


DAMAGES: dict[str, Callable[[Path], None]] = {
    entry.__name__: entry for entry in (empty, torn, binary, folder, pipe, loop, huge, foreign)
}


class Template(Record):
    """A run that has trained: its folder, and a copy of what it looks like undamaged."""

    folder: Path
    copy: Path
    card: Path
    directory: RunDirectory

    def restore(self) -> None:
        shutil.rmtree(self.directory.root)
        shutil.copytree(self.copy / "run", self.directory.root, symlinks=True)
        shutil.rmtree(self.folder / "queue")
        shutil.copytree(self.copy / "queue", self.folder / "queue")


def populate(directory: RunDirectory, tag: str) -> None:
    """What an attempt, its trainer and the periodic jobs leave behind."""
    paths, now = directory.paths, time.time()
    record = {
        "job_id": "101",
        "submission": tag,
        "array_id": "101",
        "task_id": "1",
        "nodes": ["n1"],
        "start": now - 50,
    }
    attempt = paths.attempt("101")
    write_json(attempt / "attempt.json", record)
    write_json(
        paths.end_marker("101"),
        to_builtins(EndMarker("exit-duration", 10, 10, True, "", now, "n1", "101", 1)),
    )
    AttemptVerdict("exit-duration", 10, 10, 0, "", job_id="101", submission=tag, time=now).write(
        attempt
    )
    LaunchRecord(1, ("n1",), now - 50, now).write(attempt)
    write_json(attempt / "nodes" / "n1.json", {"node": "n1", "checks": []})
    paths.phases("101").write_text(
        json.dumps({"time": now, "phase": "training", "iteration": 9, "launch": 1}) + "\n"
    )
    for rank in range(2):
        write_heartbeat(paths.heartbeat(rank), Heartbeat(rank, "n1", 1, "ended", 10, now, "101"))
    assert LeaseFolder(paths).claim(
        1, LeaseClaim("101", 1, "n1", 1, "ana", now - 500, "token", 1, held=False)
    )
    write_checkpoint(paths.checkpoints, 10)
    exclude(directory, "n5", why="broken", owner="ana", days=1)
    require_run_id(directory, "small")
    paths.logs.mkdir(parents=True, exist_ok=True)
    paths.main_log.write_text("nothing yet\n")
    paths.metrics.write_text(json.dumps({"kind": "start", "time": now}) + "\n")
    write_json(paths.requests / "holds.json", {"schema": 1, "holds": []})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    base = tmp_path_factory.mktemp("damage")
    card_path = write_card(base)
    card = load_card(card_path, (), {})
    directory = RunDirectory(card.paths, card.kill_switch)
    scheduler = DiskScheduler(base / "queue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tr11ops.cluster.select.choose_scheduler", lambda *words, **more: scheduler)
        assert execute(["launch", "--run", str(card_path), "--scheduler", "local"]) == 0
        scheduler.cancel("101")
        populate(directory, directory.tags()[0])
        execute(["pulse", "--run", str(card_path), "--no-email"])
    (directory.paths.state / "reserve").unlink(missing_ok=True)
    copy = base / "copy"
    copy.mkdir()
    shutil.copytree(directory.root, copy / "run", symlinks=True)
    shutil.copytree(base / "queue", copy / "queue")
    return Template(base, copy, card_path, directory)


def test_a_file_of_a_newer_tr11_is_said_and_stays_where_it_is(template: Template) -> None:
    """Its content may be whole, or of a form that this one does not know: it is no damage."""
    path = template.directory.paths.end_marker("101")
    path.write_text('{"schema": 99, "made_by": "a newer tr11"}\n')
    try:
        (found,) = find_damage(template.directory)
        assert (found.path, found.is_set_aside) == (
            str(path),
            False,
        ) and "schema 99, this one knows 1" in found.what
        assert set_damage_aside(template.directory, "ana") == () and path.exists()
        findings = damaged_state.detect(replace(snapshot(), damaged_files=(found,)))
        assert [one.title for one in findings] == [f"a state file: {path} {found.what}"]
    finally:
        template.restore()


class Waited(BaseException):
    """A command hung: no handler of errors may take this for the file system's refusal."""


def too_late(number: int, frame: FrameType | None) -> None:
    raise Waited


class Desk:
    """Types commands for the template's run, on a queue that is a folder."""

    def __init__(self, template: Template, capture: pytest.CaptureFixture[str]) -> None:
        self.template, self.capture = template, capture

    def tr11(self, *words: str) -> tuple[int, str]:
        """The exit code, and all that was shown; no traceback, and within seconds."""
        self.capture.readouterr()
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
        try:
            code = execute([words[0], "--run", str(self.template.card), *words[1:]])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        shown = "".join(self.capture.readouterr())
        assert "Traceback" not in shown and "internal error" not in shown, shown
        return code, shown


@pytest.fixture
def desk(
    template: Template, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Desk]:
    template.restore()
    queue = DiskScheduler(template.folder / "queue")
    monkeypatch.setattr("tr11ops.cluster.select.choose_scheduler", lambda *words, **more: queue)
    monkeypatch.setenv("COLUMNS", "1000")
    before = signal.signal(signal.SIGALRM, too_late)
    try:
        yield Desk(template, capsys)
    finally:
        signal.signal(signal.SIGALRM, before)


def files_of(root: Path) -> list[Path]:
    """Every state file of the template, once: what is not a checkpoint's content or a script."""
    passed_over = ("part.bin", "cursor.json", "train.sbatch", "card.toml", "launch.lock")
    return [
        path
        for path in sorted(root.rglob("*"))
        if (path.is_file() or path.is_symlink())
        and path.name not in passed_over
        and "checkpoints" not in path.parts
    ]


def damage_file(path: Path, name: str) -> None:
    """Damage it as something that has been so for an hour: a claim that is young may be being
    written.
    """
    DAMAGES[name](path)
    if not path.is_symlink():
        os.utime(path, (time.time() - 3600,) * 2)


NEVER_DAMAGED = {  # what is read line by line: bad lines are passed over, and logs may be large
    "lines": {"empty", "torn", "binary", "foreign"},
    "logs": {"empty", "torn", "binary", "foreign", "huge"},
}


def is_damage(path: Path, name: str) -> bool:
    """Whether that damage is one whoever reads that file: another program's JSON may do."""
    if path.suffix in {".jsonl", ".txt"}:
        kept = path.parent.name == "journal"
        return name not in NEVER_DAMAGED["lines" if kept else "logs"]
    return name != "foreign"


def test_every_state_file_is_in_the_table(template: Template) -> None:
    template.restore()
    directory = template.directory
    assert find_damage(directory) == ()
    listed = {
        path for entry in STATE_FILES for path in state_files._places(directory, entry.pattern)
    }
    files = files_of(directory.root)
    assert len(files) > 20 and set(files) <= listed, set(files) - listed


# ----------------------------------------------------------------------------- one property of all
MOMENT = 1.7e9
COPY = CopyRecord(
    "store", "/a", step=1, kind="full", identity="a", location="checkpoints/main/global_step1", format="files",
    files=1, bytes=1, copied=MOMENT, verified=MOMENT,
)  # fmt: skip
EXCLUSIONS = {"schema": 1, "version": 1, "exclusions": [], "suspects": []}
PINS = {"schema": 1, "version": 1, "pins": []}
# What each file of one format holds, by the end of its pattern; any JSON object does for the others.
EXAMPLES: dict[str, object] = {
    "submission.json": Submission(
        "t", "1", "slurm", MOMENT, "ana", "n1", "small", "main", None, 1, "x"
    ),
    "/end.json": EndMarker("exit-duration", 10, 10, True, "", MOMENT, "n1", "101", 1),
    "[0-9]/verdict.json": AttemptVerdict("exit-duration", 10, 10, 0, ""),
    "launches/*.json": LaunchRecord(1, ("n1",), MOMENT),
    "stacks/verdict.json": KeptStacks("101", MOMENT, "no one stood out"),
    "life/*.json": TrainerLife("101", 1, 0, 1, MOMENT, MOMENT, MOMENT, "step"),
    "exit-time.json": ExitTime(MOMENT, "the limit"),
    "state/run.json": {"schema": 1, "id": "0" * 32, "run": "small"},
    "exclusions.json": EXCLUSIONS,
    "exclusions.d/*.json": EXCLUSIONS,
    "heartbeat/*.json": Heartbeat(0, "n1", 1, "ended", 10, MOMENT, "101"),
    "state/cron/*.json": PeriodicJobState(
        "one", "cron", "n1", MOMENT, None, None, "", 3600.0, 1, 0, MOMENT
    ),
    "drill.json": DrillRecord(MOMENT, "store", 1, True),
    "copies/*/*.json": COPY,
    "pins.json": PINS,
    "pins.d/*.json": PINS,
    "digests/*.json": DigestRecord(1, "a", MOMENT, files=1, bytes=1),
    "not-finite/*.json": NotFiniteRecord(1, "a", MOMENT, ("weights/a",)),
    "origin.json": BranchOrigin("/a", 1, "other/main", False, False, MOMENT, "101"),
    "recovery.json": {"schema": 1, "variants": {}},
}


def of_no_type(path: Path) -> None:
    """Every value is of a type that no record has there."""
    path.write_text(json.dumps({key: [[None]] for key in json.loads(path.read_text())}))


def no_object(path: Path) -> None:
    path.write_text(f"[{path.read_text()}]")


def with_more(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_later_tr11": {"a": 1}}))


def newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))


def example_of(entry: StateFile) -> object | None:
    """What the file holds by its format; None where any JSON object, or any line, will do."""
    pattern = entry.pattern.replace("attempts/*", "attempts/[0-9]")
    found = [value for end, value in EXAMPLES.items() if pattern.endswith(end)]
    return found[0] if found else None


@pytest.mark.parametrize("entry", STATE_FILES, ids=[entry.pattern for entry in STATE_FILES])
def test_whatever_becomes_of_a_state_file_is_told_and_loses_nothing(
    tmp_path: Path, entry: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage is named with its path, and moved out of the way where the table says so, never removed; what a later
    tr11 wrote beside, or a newer format, is none, and neither is what the file system does not show.
    """
    directory = RunDirectory(RunPaths(tmp_path / "run", "small", "main"), tmp_path / "kill-switch")
    logs = directory.paths.logs.relative_to(directory.root).as_posix()
    place = entry.pattern.format(variant="main", logs=logs).replace("*", "one")
    path, example = directory.root / place, example_of(entry)
    is_lines = entry.read is None
    assert (example is not None) == (entry.read not in {None, read_json}), "say above what it holds"

    def whole() -> bytes:
        shutil.rmtree(directory.root, ignore_errors=True)
        write_json(path, to_builtins({"a": 1} if example is None else example))
        return path.read_bytes()

    whole()
    assert find_damage(directory) == ()
    for name, damage in {**DAMAGES, "no_object": no_object, "of_no_type": of_no_type}.items():
        whole()
        damage(path)
        left = None if path.is_symlink() or not path.is_file() else path.stat().st_size
        found = find_damage(directory)
        if is_lines:
            is_bad = left is None or (name == "huge" and entry.largest is not None)
        else:
            is_bad = name not in {"foreign", "of_no_type"} or example is not None
        if not is_bad:
            assert found == (), name
            continue
        assert [(one.path, one.without) for one in found] == [(str(path), entry.without)], name
        assert found[0].what and str(path) not in found[0].what
        set_damage_aside(directory, "ana")
        kept = list(path.parent.glob(f"{path.name}.damaged-*"))
        is_moved = entry.rule == "aside"
        assert (len(kept), os.path.lexists(path)) == (int(is_moved), not is_moved), name
        assert left is None or (kept or [path])[0].stat().st_size == left, name
    if is_lines:
        return
    whole()
    with_more(path)
    assert find_damage(directory) == ()
    newer(path)
    [told] = find_damage(directory)
    assert told.is_newer and not told.is_set_aside and set_damage_aside(directory, "ana") == ()
    whole()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.contract.state_file.descriptor_of", refused)
        assert find_damage(directory) == () and path.exists()


def refused(path: Path) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_command_waits_for_or_stumbles_over_damaged_files(desk: Desk, damage: str) -> None:
    """All of them at once: what is known without them is enough to look, to stop, to let go on and
    to start again.
    """
    root = desk.template.directory.root
    damaged = [
        path
        for path in files_of(root)
        if path.name != "run.json" and path.parent.name != "exclusions.d"
    ]
    for path in damaged:
        damage_file(path, damage)
    for words in (
        ("status",),
        ("pulse", "--no-act", "--no-email"),
        ("kill", "--yes"),
        ("resume", "--yes"),
    ):
        code, shown = desk.tr11(*words)
        assert code in {0, 1, 3} and (words[0] not in {"kill", "resume"} or code == 0), shown
    code, shown = desk.tr11("launch")
    assert code == 0, shown
    code, shown = desk.tr11("pulse", "--act", "--no-email")
    assert code in {0, 1}, shown
    for path in damaged:
        left = list(path.parent.glob(f"{path.name}.damaged-*"))
        # old versions are tidied away
        assert os.path.lexists(path) or left or path.parent.name == "book.d", path


@pytest.mark.parametrize("damage", ["empty", "folder"])
def test_no_single_damaged_file_keeps_a_run_from_being_launched(desk: Desk, damage: str) -> None:
    for path in files_of(desk.template.directory.root):
        desk.template.restore()
        damage_file(path, damage)
        code, shown = desk.tr11("launch")
        assert code == 0, f"{path}\n{shown}"
        assert not is_damage(path, damage) or str(path) in shown, f"{path}\n{shown}"


def test_what_is_set_aside_is_kept_recorded_and_in_the_status(desk: Desk) -> None:
    directory = desk.template.directory
    path = directory.submission(directory.tags()[0]).record
    path.write_text('{"tag": ')
    code, shown = desk.tr11("status")
    assert code == 1 and "damaged-state" in shown and str(path) in shown
    code, shown = desk.tr11("launch", "--dry-run")
    assert (
        code == 0
        and f"{path} is not JSON" in shown
        and "the launch sets it aside" in shown
        and path.exists()
    )
    code, shown = desk.tr11("launch")
    [aside] = path.parent.glob("submission.json.damaged-*")
    assert code == 0 and aside.read_text() == '{"tag": '
    entries = [
        entry for entry in read_journal(directory.journal).entries if entry.kind == SET_ASIDE
    ]
    assert [(entry.data["path"], entry.data["now"]) for entry in entries] == [
        (str(path), str(aside))
    ]
    assert "damaged-state" not in desk.tr11("status")[1]


def test_a_checkpoint_that_cannot_be_judged_is_never_moved(desk: Desk) -> None:
    path = desk.template.directory.paths.checkpoint(10) / "manifest.json"
    for name in DAMAGES:
        desk.template.restore()
        damage_file(path, name)
        code, shown = desk.tr11("launch", "--dry-run")
        assert code == 1 and str(path.parent) in shown and "restore one from a backup" in shown
        assert os.path.lexists(path)


# ----------------------------------------------------------------------------- one reader
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("empty", "is empty"), ("torn", "is not JSON"), ("binary", "is not UTF-8 text"), ("folder", "is a folder"),
        ("pipe", "is a pipe"), ("loop", "is a link that leads back to itself"), ("huge", "has 1,073,741,824 bytes"),
    ],
)  # fmt: skip
def test_the_one_reader_names_path_and_damage(tmp_path: Path, damage: str, said: str) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"a": 1, "b": 2}')
    DAMAGES[damage](path)
    with pytest.raises(DamagedFile, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_file_system_refuses_is_not_damage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        read_json(tmp_path / "file" / "record.json")
    assert read_json(tmp_path / "absent.json") is None
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    assert read_json(tmp_path / "dangling.json") is None


def test_a_folder_in_a_files_place_is_set_aside_by_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.mkdir()
    (path / "inside").touch()
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    [aside] = tmp_path.glob("record.json.damaged-*")
    assert (aside / "inside").exists()
