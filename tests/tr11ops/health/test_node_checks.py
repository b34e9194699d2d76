"""The checks that every node has: network, disks, shared memory, memory, leftovers, clock, own
scripts, the registry.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.health.recorded_system import RecordedSystem, text
from tests.waiting import is_gone, until
from tr11ops.base.errors import Unanswered
from tr11ops.health import host, registry
from tr11ops.health.base import (
    CheckOutcome,
    CheckResult,
    NodeRequirements,
    SharedMemoryFile,
    Space,
    System,
    TrainerProcess,
    summary,
    worst,
)
from tr11ops.health.registry import CHECKS, NAMES, HealthCheck, SiteScript, chosen, run_checks
from tr11ops.runcard.card import load_card, resolved, shipped_folder
from tr11ops.runcard.sections import CheckScript, ResilienceSection

WANTED = NodeRequirements(
    "x01", job_id="7", launch=2, workers=8, folder=Path("/run/state"), ends_leftovers=True
)
MIB = 1 << 20


# ------------------------------------------------------------------ network
def net(**states: str) -> dict[str, str]:
    return {f"/sys/class/net/{name}/operstate": f"{state}\n" for name, state in states.items()}


def port(device: str, state: str, link: str, rate: str = "100 Gb/sec (4X EDR)") -> dict[str, str]:
    folder = f"/sys/class/infiniband/{device}/ports/1"
    return {
        f"{folder}/state": f"{state}\n",
        f"{folder}/phys_state": f"{link}\n",
        f"{folder}/rate": f"{rate}\n",
    }


UP, DOWN = ("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled")


@pytest.mark.parametrize(
    ("files", "result"),
    [
        (net(lo="unknown", eth0="up", ifb0="down"), "fine"),
        (net(lo="unknown", eth0="down"), "bad"),
        (net(lo="unknown", tun0="unknown"), "fine"),
        ({**net(eth0="up"), **port("mlx5_0", *UP), **port("mlx5_1", *UP)}, "fine"),
        (
            {**net(eth0="up"), **port("mlx5_0", *UP), **port("mlx5_1", *DOWN)},
            "fine",
        ),  # a port without a cable
        (
            {**net(eth0="up"), **port("mlx5_0", *UP), **port("mlx5_1", "2: INIT", "5: LinkUp")},
            "bad",
        ),
        ({**net(eth0="up"), **port("mlx5_0", *DOWN), **port("mlx5_1", *DOWN)}, "bad"),
        ({**net(eth0="up"), **port("a", *UP), **port("b", *UP, "40 Gb/sec (4X QDR)")}, "warning"),
        ({**net(eth0="up"), "/sys/class/net/bonding_masters": "bond0\n"}, "fine"),
    ],
)
def test_network(files: dict[str, str], result: str) -> None:
    assert host.check_network(RecordedSystem(files=files), WANTED)[0] == result


def test_an_interface_that_the_ranks_shall_use_is_missed() -> None:
    """The card may be wrong, so the node is not condemned."""
    system = RecordedSystem(files=net(lo="unknown", eth0="up"))
    found, why = host.check_network(system, replace(WANTED, interfaces=("ib0",)))
    assert found == "warning" and why == "GLOO_SOCKET_IFNAME: no interface ib0 here, there are eth0"
    assert host.check_network(system, replace(WANTED, interfaces=("eth0", "lo")))[0] == "fine"


def test_a_network_that_cannot_be_seen_is_unknown() -> None:
    with pytest.raises(Unanswered):
        host.check_network(RecordedSystem(files=net(lo="unknown")), WANTED)


# ------------------------------------------------------------------ disks
@pytest.mark.parametrize(
    ("code", "result"),
    [(errno.EROFS, "bad"), (errno.ESTALE, "bad"), (errno.EIO, "bad"), (errno.ENOENT, "bad"),
     (errno.ENOSPC, "warning"), (errno.EDQUOT, "warning"), (errno.EACCES, "warning")],
)  # fmt: skip
def test_only_what_one_node_has_alone_makes_it_bad(code: int, result: str) -> None:
    system = RecordedSystem(probe=OSError(code, os.strerror(code), "/run/state"))
    assert host.check_run_directory(system, WANTED)[0] == result


def test_a_slow_run_directory_is_a_warning() -> None:
    assert host.check_run_directory(RecordedSystem(probe=0.004), WANTED)[0] == "fine"
    assert host.check_run_directory(RecordedSystem(probe=7.0), WANTED)[0] == "warning"


@pytest.mark.parametrize(
    ("free", "result"), [(10 << 30, "fine"), (500 * MIB, "warning"), (3 * MIB, "bad")]
)
def test_local_disk(free: int, result: str) -> None:
    system = RecordedSystem(spaces={"/tmp": Space(100 << 30, free)})
    assert host.check_local_disk(system, WANTED)[0] == result


def test_a_read_only_local_disk_is_bad() -> None:
    system = RecordedSystem(
        spaces={"/tmp": Space(1 << 40, 1 << 39)},
        probe=OSError(errno.EROFS, "Read-only file system"),
    )
    assert host.check_local_disk(system, WANTED)[0] == "bad"


def test_the_exported_folder_for_temporary_files_is_looked_at(tmp_path: Path) -> None:
    """Python's own answer is another folder where that one is broken, so that the fault would not
    be seen.
    """
    assert host.exported_folder({"TMPDIR": "/local/job7", "TMP": "/tmp"}) == Path("/local/job7")
    assert host.exported_folder({"TMPDIR": "", "TMP": "/scratch"}) == Path("/scratch")
    assert host.exported_folder({}) == Path(tempfile.gettempdir())
    gone = replace(WANTED, temporary=tmp_path / "gone")
    assert host.check_local_disk(System(), gone) == (
        "warning", f"{tmp_path}/gone (TMPDIR) is not there: programs put temporary files elsewhere",
    )  # fmt: skip
    full = RecordedSystem(
        spaces={"/local/job7": Space(1 << 40, 0), "/tmp": Space(1 << 40, 1 << 39)}
    )
    assert host.check_local_disk(full, replace(WANTED, temporary=Path("/local/job7")))[0] == "bad"


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize(
    ("space", "result"),
    [
        (Space(250 << 30, 249 << 30), "fine"),
        (Space(250 << 30, 20 * MIB), "bad"),
        (Space(64 * MIB, 63 * MIB), "warning"),  # a container's default: small, but no one fills it
    ],
)
def test_shared_memory(space: Space, result: str) -> None:
    assert host.check_shared_memory(RecordedSystem(spaces={"/dev/shm": space}), WANTED)[0] == result


def test_only_settled_files_of_known_makers_are_swept() -> None:
    old, young = 3600.0, 5.0
    system = RecordedSystem(
        spaces={"/dev/shm": Space(8 << 30, 8 << 30)},
        shared=(
            SharedMemoryFile("torch_123_4567_0", MIB, old), SharedMemoryFile("nccl-aB3x9Z", MIB, old), SharedMemoryFile("torch_9_9_9", MIB, young),
            SharedMemoryFile("shm_allreduce_buffer_0", MIB, old), SharedMemoryFile("my-results", MIB, old), SharedMemoryFile("sem.mp-abc_1", 32, old),
        ),
    )  # fmt: skip
    outcome, why = host.check_shared_memory(system, WANTED)
    assert outcome == "fine" and "4 stale files" in why
    assert sorted(system.removed) == [
        "nccl-aB3x9Z",
        "sem.mp-abc_1",
        "shm_allreduce_buffer_0",
        "torch_123_4567_0",
    ]


def test_memory() -> None:
    full = text("meminfo.txt")
    assert host.check_memory(RecordedSystem(files={"/proc/meminfo": full}), WANTED)[0] == "fine"
    for available, result in ((100_000_000, "warning"), (20_000_000, "bad")):
        changed = full.replace("489350144", str(available))
        assert (
            host.check_memory(RecordedSystem(files={"/proc/meminfo": changed}), WANTED)[0] == result
        )


# ------------------------------------------------------------------ leftovers
def process(pid: int, **changes: object) -> TrainerProcess:
    return replace(TrainerProcess(pid, "trainer", "6", "1", "x01", "S", is_kept=False), **changes)


def test_abandoned_processes_of_an_earlier_job_are_ended() -> None:
    system = RecordedSystem(
        processes=(
            process(10),
            process(11),
            process(12, node="x02"),
            process(13, job_id="7", launch="2"),
            process(14, job_id="7"),
        )
    )
    outcome, why = host.check_leftovers(system, WANTED)
    assert outcome == "warning" and "were ended" in why
    assert system.ended == [10, 11, 14]  # 14: of this job's first launch


def test_what_cannot_be_ended_makes_the_node_bad() -> None:
    system = RecordedSystem(
        processes=(process(10), process(11, state="D", label="5_2")), immortal=frozenset({11})
    )
    outcome, why = host.check_leftovers(system, WANTED)
    assert outcome == "bad" and "trainer 11 of job 5_2, launch 1" in why and "10" not in why


def test_a_training_that_someone_looks_after_is_left_alone() -> None:
    system = RecordedSystem(processes=(process(10, is_kept=True),))
    assert host.check_leftovers(system, WANTED)[0] == "warning"
    shared = RecordedSystem(processes=(process(10),))
    assert host.check_leftovers(shared, replace(WANTED, ends_leftovers=False))[0] == "warning"
    assert system.ended == shared.ended == []
    assert host.check_leftovers(RecordedSystem(), WANTED)[0] == "fine"


# ------------------------------------------------------------------ clock
@pytest.mark.parametrize(
    ("ahead", "result"),
    [(0.4, "fine"), (45.0, "fine"), (-1.0, "fine"), (-10.0, "warning"), (400.0, "warning"), (-90.0, "bad"), (7200.0, "bad")],
)  # fmt: skip
def test_clock(ahead: float, result: str) -> None:
    system = RecordedSystem(time=5000.0 + ahead)
    assert host.check_clock(system, replace(WANTED, controller_time=5000.0))[0] == result


# ----------------------------------------------------------------- own scripts, with real processes
def script(folder: Path, body: str) -> str:
    path = folder / "own.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "result", "words"),
    [
        ("exit 0", "fine", "exited with 0"),
        ("echo; echo 'fan 3 stands still'; echo more; exit 1", "bad", "fan 3 stands still"),
        ("echo 'cannot tell' >&2; exit 3", "unknown", "cannot tell"),
        ("printf 'a\\033[2Jb'; exit 1", "bad", "a?[2Jb"),
    ],
)
def test_a_scripts_exit_code_and_first_line(
    tmp_path: Path, body: str, result: str, words: str
) -> None:
    outcome, why = registry.run_script(System(), WANTED, SiteScript(script(tmp_path, body)))
    assert outcome == result and words in why


@pytest.mark.parametrize("body", ["exit 2", "kill -9 $$", "exit 127"])
def test_a_broken_script_says_nothing_of_the_node(tmp_path: Path, body: str) -> None:
    with pytest.raises(Unanswered):
        registry.run_script(System(), WANTED, SiteScript(script(tmp_path, body)))


# Exit codes of gcm (gcm.health_checks.types.ExitCode), of the Nagios plugin interface, and of LBNL
# NHC (its script `nhc`).
GCM = {"OK": 0, "WARN": 1, "CRITICAL": 2, "UNKNOWN": 3}
OF_GCM = {"OK": "fine", "WARN": "warning", "CRITICAL": "bad", "UNKNOWN": "unknown"}


@pytest.mark.parametrize("dialect", ["gcm", "nagios"])
@pytest.mark.parametrize("word", GCM)
def test_the_exit_codes_of_gcm_and_of_nagios_plugins(
    tmp_path: Path, dialect: str, word: str
) -> None:
    path = script(tmp_path, f'echo "{word} $1 $2"; exit {GCM[word]}')
    outcome, why = registry.run_script(
        System(), WANTED, SiteScript(path, ("check-zombie", "fair cluster"), dialect)
    )
    assert (outcome, why) == (OF_GCM[word], f"{word} check-zombie fair cluster")


@pytest.mark.parametrize("dialect", ["gcm", "nagios"])
def test_arguments_that_a_check_refuses_say_nothing_of_the_node(
    tmp_path: Path, dialect: str
) -> None:
    """click and argparse end with 2 then, which would be CRITICAL."""
    refused = "echo 'Usage: health_checks check-zombie [OPTIONS] CLUSTER' >&2; echo 'Error: No such option: -z' >&2; exit 2"
    with pytest.raises(Unanswered, match="does not take its arguments: Error: No such option: -z"):
        registry.run_script(System(), WANTED, SiteScript(script(tmp_path, refused), (), dialect))
    for status in (4, 127):
        with pytest.raises(
            Unanswered, match=f"exit status {status}, which is no verdict in {dialect}"
        ):
            registry.run_script(
                System(), WANTED, SiteScript(script(tmp_path, f"exit {status}"), (), dialect)
            )


@pytest.mark.parametrize(
    ("status", "result"),
    [(0, "fine"), (1, "bad"), (2, "bad"), (3, "bad"), (100, "bad")]
    + [(status, None) for status in (10, 126, 127, 129, 130, 142, 143, 145)],
)
def test_the_exit_codes_of_nhc(tmp_path: Path, status: int, result: str | None) -> None:
    words = "ERROR:  nhc:  Health check failed:  check_fs_mount:  /scratch not mounted"
    own = SiteScript(script(tmp_path, f'echo "{words}"; exit {status}'), (), "nhc")
    if result is None:
        with pytest.raises(Unanswered, match=f"exit status {status}"):
            registry.run_script(System(), WANTED, own)
    else:
        assert registry.run_script(System(), WANTED, own) == (result, words)


def test_the_card_knows_the_dialects_and_keeps_the_old_form(tmp_path: Path) -> None:
    for dialect in registry.DIALECTS:
        assert CheckScript(script="/x", dialect=dialect).dialect == dialect  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dialect"):
        CheckScript(script="/x", dialect="nagos")  # type: ignore[arg-type]
    table = 'resilience.check_scripts=["a.sh", {script="bin/nhc", arguments=["MARK_OFFLINE=0"], dialect="nhc", name="n"}]'
    card = load_card(shipped_folder() / "demo.toml", [table], {}, directory=tmp_path)
    plain, own = resolved(card)["resilience"]["check_scripts"]
    assert plain == str(tmp_path / "a.sh")  # the resolved card of such a run stays what it was
    assert SiteScript.of(own) == SiteScript(
        str(tmp_path / "bin/nhc"), ("MARK_OFFLINE=0",), "nhc", "n"
    )
    assert [check.name for check in chosen(WANTED, [plain, own], NAMES)] == [
        "script:a.sh",
        "script:n",
    ]


def test_a_script_that_is_not_there_or_hangs(tmp_path: Path) -> None:
    with pytest.raises(Unanswered, match="No such file"):
        registry.run_script(System(), WANTED, SiteScript(str(tmp_path / "none")))
    hanging = script(tmp_path, "sleep 600 & echo $! > " + str(tmp_path / "pid") + "; wait")
    with pytest.raises(Unanswered, match="no answer within"):
        registry.run_script(System(), replace(WANTED, seconds=1.0), SiteScript(hanging))
    pid = int((tmp_path / "pid").read_text())
    until(lambda: is_gone(pid), "the end of what the script started")


# ------------------------------------------------------------------ the registry
def test_gpu_checks_are_left_out_where_the_card_asks_for_none() -> None:
    assert {check.name for check in chosen(WANTED)} == {
        "network",
        "run-directory",
        "local-disk",
        "shared-memory",
        "memory",
        "leftovers",
    }
    assert (
        len(chosen(replace(WANTED, gpus=8, controller_time=1.0))) == len(CHECKS) == len(set(NAMES))
    )
    names = [
        check.name
        for check in chosen(WANTED, ["/opt/a.sh", "/opt/b.py"], ["network", "script:a.sh"])
    ]
    assert names[-1] == "script:b.py" and "network" not in names and "script:a.sh" not in names


def test_every_check_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "node-checks.md").read_text(
        encoding="utf-8"
    )
    rows = [
        line.split("`")[1]
        for line in page.splitlines()
        if line.startswith("| `") and line.count("|") == 4
    ]
    assert [name for name in rows if name in NAMES] == list(NAMES)


def test_the_sites_checks_in_the_documentation_are_a_card() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "node-checks.md").read_text(
        encoding="utf-8"
    )
    block = page.partition("### Checks of the site\n\n```toml\n")[2].partition("```")[0]
    section = ResilienceSection.model_validate(tomllib.loads(block)["resilience"])
    assert {script.dialect for script in section.check_scripts} == set(registry.DIALECTS)


def test_each_own_script_runs_itself(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    first, second = script(tmp_path / "one", "echo 1; exit 0"), script(tmp_path, "echo 2; exit 1")
    mine = chosen(WANTED, [first, second], NAMES)
    assert [check.name for check in mine] == ["script:own.sh", "script:own.sh-2"]
    assert [(entry.result, entry.why) for entry in run_checks(mine, System(), WANTED)] == [
        ("fine", "1"),
        ("bad", "2"),
    ]


def test_checks_run_at_once_and_late_ones_are_unknown() -> None:
    def late(system: object, wanted: object) -> tuple[CheckOutcome, str]:
        time.sleep(600)
        return CheckOutcome.BAD, "too late"

    def broken(system: object, wanted: object) -> tuple[CheckOutcome, str]:
        raise ZeroDivisionError("a slip")

    def fine(system: object, wanted: object) -> tuple[CheckOutcome, str]:
        return CheckOutcome.FINE, "yes"

    checks = [
        HealthCheck("late", late),
        HealthCheck("later", late),
        HealthCheck("broken", broken),
        HealthCheck("fine", fine),
    ]
    results = run_checks(checks, RecordedSystem(), replace(WANTED, seconds=0.5))
    assert [entry.result for entry in results] == ["unknown", "unknown", "unknown", "fine"]
    assert "no answer within 0.5 s" in results[0].why and "a slip" in results[2].why


@given(st.lists(st.sampled_from(list(CheckOutcome)), max_size=8))
def test_one_word_for_a_node(outcomes: list[CheckOutcome]) -> None:
    results = [CheckResult(f"c{place}", outcome, "why") for place, outcome in enumerate(outcomes)]
    word = worst(results)
    assert (word is CheckOutcome.BAD) == (CheckOutcome.BAD in outcomes)
    assert (word is CheckOutcome.UNKNOWN) == (set(outcomes) <= {CheckOutcome.UNKNOWN})
    assert "\n" not in summary(results) and summary(results)


# ------------------------------------------------------------------ this very machine
def test_this_machine_is_checked_without_harm(tmp_path: Path) -> None:
    wanted = NodeRequirements(
        "nowhere", folder=tmp_path, temporary=tmp_path, controller_time=time.time()
    )
    results = {entry.name: entry for entry in run_checks(chosen(wanted), System(), wanted)}
    for name in ("run-directory", "memory", "leftovers", "clock"):
        assert results[name].result in {"fine", "warning"}, results[name]
    assert list(tmp_path.iterdir()) == []


def test_a_workers_shared_memory_is_its_own_while_it_lives() -> None:
    code = (
        "import mmap, os, sys, time; name = f'torch_{os.getpid()}_1_0'; path = '/dev/shm/' + name;"
        "f = open(path, 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close();"
        "print(name, flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    name = child.stdout.readline().strip()
    try:
        node = System()
        assert name not in {segment.name for segment in node.segments(host.OURS)}
        child.kill()
        child.communicate()
        assert name in {segment.name for segment in node.segments(host.OURS)}
        node.remove_segment(name)
        assert not Path("/dev/shm", name).exists()
    finally:
        child.kill()
        child.communicate()
        Path("/dev/shm", name).unlink(missing_ok=True)


def test_an_abandoned_trainer_is_found_by_its_surroundings(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    orphan = (  # started by a parent that leaves at once
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'trainer'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL);"
        "p.stdout.readline(); print(p.pid, flush=True); os._exit(0)"
    )
    environment = {
        **os.environ,
        "TR11_LAUNCH": "1",
        "TR11_JOB_ID": "old",
        "TR11_NODE_NAME": "lost-node",
    }
    done = subprocess.run(
        [sys.executable, "-c", orphan],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
    )
    pid = int(done.stdout)
    try:
        node = System()
        found = [one for one in node.trainer_processes() if one.pid == pid]
        assert [(one.job_id, one.launch, one.node, one.name) for one in found] == [
            ("old", "1", "lost-node", "trainer")
        ]
        assert node.end([pid]) == ()
        assert not [one for one in node.trainer_processes() if one.pid == pid]
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, 9)
