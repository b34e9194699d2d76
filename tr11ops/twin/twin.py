"""Twin: a real Slurm of many nodes on this machine, started, watched and ended as one thing."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from tr11ops.base.errors import TwinError
from tr11ops.base.units import counted
from tr11ops.twin.fault_files import uncover
from tr11ops.twin.fault_store import FaultStore
from tr11ops.twin.machine import (
    ACCOUNTING_FIX,
    ACCOUNTING_PROGRAMS,
    DAEMONS,
    accepts,
    add_account,
    check_memory,
    claimed_ports,
    client_variables,
    default_directory,
    find_programs,
    is_free,
    listens,
    locked,
    make_bucket,
    make_folder,
    search_path,
    slurm_version,
    start_database,
    start_hub,
    start_slurmdbd,
    start_store,
    store_program,
    write_file,
)
from tr11ops.twin.plan import (
    TwinFolders,
    TwinPlan,
    TwinPorts,
    TwinSite,
    cgroup_conf,
    gres_conf,
    slurm_conf,
    slurmdbd_conf,
    twin_record,
)
from tr11ops.twin.processes import MARK, ProcessRecord, end, marked, read_ledger, spawn
from trainer.contract.record import Record

Progress = Callable[[str], None]
PORT_SECONDS = 10.0  # how long a controller's port may stay taken after its end

# Which twin a shell speaks to: its name, and the folder of the twins.
NAME_VARIABLE = "TR11_TWIN"
HOME_VARIABLE = "TR11_TWIN_DIR"


class NodeStatus(Record):
    """One node as the twin's controller sees it, and whether its daemon runs."""

    name: str
    # sinfo's long form: "idle", "mixed", "down*"; "unknown" when the controller does not answer
    state: str
    daemon_alive: bool


class TwinStatus(Record):
    """What `tr11 twin status` shows. `answers` is False when the controller did not answer: states
    are then unknown.
    """

    name: str
    directory: Path
    plan: TwinPlan
    controller_port: int
    answers: bool
    daemons: tuple[ProcessRecord, ...]
    dead: tuple[ProcessRecord, ...]
    nodes: tuple[NodeStatus, ...]
    memory_megabytes: int

    @property
    def is_healthy(self) -> bool:
        """Every daemon runs, the controller answers, and no node is down."""
        return (
            self.answers and not self.dead and not any("down" in node.state for node in self.nodes)
        )


class Twin(TwinSite):
    """One twin. `Twin.up(plan)` starts it, `Twin.find(...)` takes hold of a running one, `down()`
    ends it.

    As a context manager it is taken down at the end of the block.
    """

    # -- life
    # ------------------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        plan: TwinPlan,
        directory: Path | None = None,
        progress: Progress = lambda message: None,
        deadline_seconds: float = 180.0,
    ) -> Twin:
        """Start a twin and wait until every node is idle; a running one of the same plan is taken
        as it is.

        `directory` holds one folder for each twin. Raises TwinError; what had been started is then
        ended.
        """
        path = search_path(os.environ)
        programs = find_programs(path)
        if plan.accounting:
            programs |= find_programs(path, ACCOUNTING_PROGRAMS, ACCOUNTING_FIX)
        if plan.store:
            store_program()
        home = _home(directory)
        folders = TwinFolders(home / plan.name)
        folders.check(plan)
        make_folder(home)
        with locked(home, plan.name):
            running = cls._load(folders)
            if running is not None:
                if any(record.is_alive for record in running.processes()):
                    return _reuse(running, plan)
                progress(f"clearing what a twin that was not taken down left in {folders.root}")
                running._end(keep_logs=False)
            elif folders.root.exists() and any(folders.root.iterdir()):
                raise TwinError(
                    f"{folders.root} exists and is no twin's: remove it, or choose another --dir or --name"
                )
            check_memory(plan)
            with claimed_ports(plan.ports_needed) as first:
                twin = cls(plan, folders, TwinPorts(plan, first), secrets.token_hex(16))
                try:
                    twin._start(programs, progress, time.monotonic() + deadline_seconds)
                except TwinError as error:
                    kept = twin._end(keep_logs=True)
                    raise TwinError(str(error).replace(str(folders.logs), str(kept))) from error
                except BaseException:
                    twin._end(keep_logs=False)
                    raise
        return twin

    @classmethod
    def find(cls, name: str = "default", directory: Path | None = None) -> Twin:
        """The twin of that name, running or crashed. Raises TwinError when there is none."""
        twin = cls._load(TwinFolders(_home(directory) / name))
        if twin is None:
            raise TwinError(
                f"no twin {name!r} in {_home(directory)}: start one with tr11 twin up --name {name}"
            )
        return twin

    def down(self, keep_logs: bool = False) -> Path | None:
        """End every process of the twin and remove its folder; returns the folder of the logs when
        they are kept.

        Raises TwinError when a process would not end.
        """
        with locked(self.folders.root.parent, self.plan.name):
            return self._end(keep_logs)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def command(self, verb: str) -> str:
        """The command line that does `verb` ("down", "status", "env") to this twin, in this shell
        and in any other.
        """
        words = ["tr11", "twin", verb]
        if (self.plan.name, os.environ.get(NAME_VARIABLE, "default")) != ("default", "default"):
            words += ["--name", self.plan.name]
        home = self.folders.root.parent
        if home != _home(None) or os.environ.get(HOME_VARIABLE, str(home)) != str(home):
            words += ["--dir", str(home)]
        return shlex.join(words)

    # -- what clients need
    # -----------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """The variables which make Slurm's clients speak to this twin, `tr11 twin` mean it, and
        others its services.
        """
        beside = client_variables(self)
        meant = {NAME_VARIABLE: self.plan.name, HOME_VARIABLE: str(self.folders.root.parent)}
        return {"SLURM_CONF": str(self.folders.slurm_conf), **meant, **beside}

    def processes(self) -> tuple[ProcessRecord, ...]:
        """The daemons as they were started, alive or not; a slurmd's `name` is its node."""
        return read_ledger(self.folders.processes)

    def process(self, name: str) -> ProcessRecord:
        """The latest daemon of that name: a node, "slurmctld", "munged", "slurmdbd", "mariadbd",
        "hub" or "store".
        """
        for record in reversed(self.processes()):
            if record.name == name:
                return record
        raise TwinError(
            f"twin {self.plan.name!r} has no daemon {name!r}: nodes are {', '.join(self.plan.node_names)}"
        )

    def start_daemon(self, name: str, within: Sequence[str] = ()) -> ProcessRecord:
        """Start a node's slurmd, or "slurmctld", again after it was ended; `within`: by these words,
        which put another program in their own place.
        """
        if self.process(name).is_alive:
            raise TwinError(f"{name} of twin {self.plan.name!r} runs: end it first")
        if name == "slurmctld":  # a child of the one before may hold its port for a moment longer
            deadline = time.monotonic() + PORT_SECONDS
            while not is_free(self.ports.controller) and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._spawn(find_programs(search_path(os.environ)), name, within)

    def configure(self, without: Collection[str] = ()) -> None:
        """Write slurm.conf again, without these GPU nodes; the controller heeds it when it is
        started again.
        """
        programs = find_programs(search_path(os.environ))
        version = slurm_version(programs["slurmctld"])
        text = slurm_conf(self, _user(), version, without)
        write_file(self.folders.slurm_conf, text, 0o644)

    @property
    def faults(self) -> FaultStore:
        """The records of what is broken."""
        return FaultStore(self.folders)

    def start_helper(self, name: str, arguments: Sequence[str]) -> ProcessRecord:
        """Start a process that works on this twin and outlives its starter; it ends with the twin,
        if not before.
        """
        environment = {
            **self.client_environment,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        ledger = self.faults.helpers
        return spawn(self.folders, name, arguments, environment, role="helper", ledger=ledger)

    def node_states(self) -> dict[str, str] | None:
        """State of each node in sinfo's long form; None when the controller does not answer."""
        try:
            answer = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%N|%T"],
                env=self.client_environment,
                capture_output=True,
                text=True,
                timeout=30.0,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        if answer.returncode != 0:
            return None
        return dict(
            line.strip().split("|", 1) for line in answer.stdout.splitlines() if "|" in line
        )

    def status(self) -> TwinStatus:
        """What runs, and what the controller says."""
        latest = {record.name: record for record in self.processes()}
        alive = tuple(record for record in latest.values() if record.is_alive)
        states = None
        if alive:
            states = self.node_states()
        nodes = tuple(
            NodeStatus(
                name, (states or {}).get(name, "unknown"), name in latest and latest[name] in alive
            )
            for name in self.plan.node_names
        )
        dead = tuple(record for record in latest.values() if record not in alive)
        memory = _resident_megabytes(alive)
        return TwinStatus(
            self.plan.name,
            self.folders.root,
            plan=self.plan,
            controller_port=self.ports.controller,
            answers=states is not None,
            daemons=alive,
            dead=dead,
            nodes=nodes,
            memory_megabytes=memory,
        )

    # -- effects
    # ---------------------------------------------------------------------------------------------------

    @classmethod
    def _load(cls, folders: TwinFolders) -> Twin | None:
        try:
            value = json.loads(folders.record.read_text())
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError) as error:
            raise TwinError(
                f"{folders.record} cannot be read ({error}): remove {folders.root} by hand"
            ) from error
        plan = TwinPlan.from_json(value["plan"])
        return cls(plan, folders, TwinPorts(plan, value["first_port"]), value["mark"])

    def _start(self, programs: Mapping[str, str], progress: Progress, deadline: float) -> None:
        user = _user()
        self._write_files(user, slurm_version(programs["slurmctld"]))
        progress(
            f"twin {self.plan.name}: {counted(len(self.plan.node_names), 'node')}, ports from {self.ports.first}"
        )
        munged = self._spawn(programs, "munged")
        _await(self.folders.munge_socket.exists, munged, self.folders, deadline)
        environment = self.client_environment
        if self.plan.accounting:
            progress("starting the accounting database")
            database = start_database(self, programs, user, environment)
            _await(lambda: listens(self.folders.database_socket), database, self.folders, deadline)
            slurmdbd = start_slurmdbd(self, programs, environment)
            _await(lambda: accepts(self.ports.accounting), slurmdbd, self.folders, deadline)
        if self.plan.hub:
            hub = start_hub(self, environment)
            _await(lambda: accepts(self.ports.hub), hub, self.folders, deadline)
        if self.plan.store:
            store = start_store(self, store_program(), environment)
            _await(lambda: accepts(self.ports.store), store, self.folders, deadline)
            make_bucket(self, deadline)
        controller = self._spawn(programs, "slurmctld")
        for name in self.plan.node_names:
            self._spawn(programs, name)
        progress(
            f"started slurmctld and {len(self.plan.node_names)} slurmd, waiting for idle nodes"
        )
        waiting_before = len(self.plan.node_names)
        while True:
            states = self.node_states() or {}
            waiting = [name for name in self.plan.node_names if states.get(name) != "idle"]
            if not waiting:
                if self.plan.accounting:
                    add_account(environment, user)
                return
            if len(waiting) < waiting_before:
                progress(
                    f"{len(self.plan.node_names) - len(waiting)} of {counted(len(self.plan.node_names), 'node')} idle"
                )
                waiting_before = len(waiting)
            dead = [record for record in self.processes() if not record.is_alive]
            if dead:
                raise _died(dead[0], self.folders)
            if time.monotonic() > deadline:
                raise TwinError(
                    f"twin {self.plan.name!r}: {counted(len(waiting), 'node')} not idle in time, such as {waiting[0]} "
                    f"({states.get(waiting[0], 'unknown')}): read {self.folders.logs}, {controller.name} first"
                )
            time.sleep(0.1)

    def _write_files(self, user: str, version: tuple[int, int]) -> None:
        folders = self.folders
        make_folder(folders.root)
        for folder in (
            folders.logs,
            folders.state,
            folders.spool,
            folders.run,
            folders.munge,
            folders.gpus,
        ):
            make_folder(folder)
        for path, text in {
            folders.record: json.dumps(twin_record(self), indent=1) + "\n",
            folders.slurm_conf: slurm_conf(self, user, version),
            folders.root / "gres.conf": gres_conf(self),
            folders.root / "cgroup.conf": cgroup_conf(version),
        }.items():
            write_file(path, text, 0o644)
        for index in range(self.plan.gpus):
            (folders.gpus / f"gpu{index}").symlink_to(os.devnull)
        key = folders.munge / "key"
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(128))
        if self.plan.accounting:
            folders.database.mkdir(mode=0o700)
            write_file(folders.slurmdbd_conf, slurmdbd_conf(self, user), 0o600)

    @property
    def client_environment(self) -> dict[str, str]:
        """A small environment of the twin's own: nothing of the caller's job or site leaks into its
        daemons.
        """
        return {
            "PATH": search_path(os.environ),
            "LANG": "C.UTF-8",
            "HOME": os.environ.get("HOME", "/"),
            MARK: self.mark,
            **self.environment,
        }

    def _spawn(
        self, programs: Mapping[str, str], name: str, within: Sequence[str] = ()
    ) -> ProcessRecord:
        folders = self.folders
        if name == "munged":
            arguments = [
                programs["munged"],
                "--foreground",
                # a folder closed to other users is fine: the socket is for this user's daemons
                "--force",
                f"--socket={folders.munge_socket}",
                f"--key-file={folders.munge / 'key'}",
                f"--pid-file={folders.munge / 'pid'}",
                f"--log-file={folders.logs / 'munged.log'}",
                f"--seed-file={folders.munge / 'seed'}",
                "--num-threads=4",
            ]
        elif name == "slurmctld":
            arguments = [programs["slurmctld"], "-D"]
        else:
            arguments = [*within, programs["slurmd"], "-D", "-N", name]
        return spawn(
            folders,
            name,
            arguments,
            self.client_environment,
            role="" if name in DAEMONS else "slurmd",
        )

    def _end(self, keep_logs: bool) -> Path | None:
        daemons = self.processes()
        brokers = [record for record in daemons if record.role in ("munged", "mariadbd")]
        # the controller goes first, so that it starts nothing in the place of what ends
        survivors = list(end([record for record in daemons if record.role == "slurmctld"], 5.0))
        own = {record.pid for record in daemons if record.is_alive}
        strays = [record for record in marked(self.mark, self.folders) if record.pid not in own]
        survivors += end(strays, 0.0)
        survivors += end([record for record in daemons if record not in brokers], 5.0)
        survivors += end(brokers, 20.0)
        for _ in range(5):  # a job may have been starting while its node ended
            strays = list(marked(self.mark, self.folders))
            if not strays:
                break
            survivors += end(strays, 0.0)
        survivors = [record for record in survivors if record.is_alive]
        if survivors:
            named = ", ".join(f"{record.name} (pid {record.pid})" for record in survivors)
            raise TwinError(
                f"twin {self.plan.name!r}: {named} would not end; {self.folders.root} is kept: try again"
            )
        for fault in self.faults.active():
            # what was laid over a directory would outlive the twin
            if Path(fault.target).is_absolute():
                uncover(fault, self.folders)
        kept = None
        if keep_logs and self.folders.logs.exists():
            kept = _keep(self.folders)
        if self.folders.root.exists():
            shutil.rmtree(self.folders.root)
        return kept


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _home(directory: Path | None) -> Path:
    return (directory or default_directory(os.environ, os.geteuid())).absolute()


def _reuse(running: Twin, plan: TwinPlan) -> Twin:
    if running.plan != plan:
        ours = plan.to_json()
        theirs = running.plan.to_json()
        different = ", ".join(
            f"{key} {theirs[key]} (asked: {ours[key]})" for key in ours if ours[key] != theirs[key]
        )
        raise TwinError(
            f"twin {plan.name!r} is up in {running.folders.root} with {different}: "
            f"{running.command('down')}, or choose another --name"
        )
    if not running.status().is_healthy:
        raise TwinError(
            f"twin {plan.name!r} in {running.folders.root} is up but not healthy: "
            f"look with {running.command('status')}, then {running.command('down')}"
        )
    return running


def _await(
    condition: Callable[[], bool], process: ProcessRecord, folders: TwinFolders, deadline: float
) -> None:
    while not condition():
        if not process.is_alive:
            raise _died(process, folders)
        if time.monotonic() > deadline:
            raise TwinError(f"{process.name} was not ready in time: read {folders.logs}")
        time.sleep(0.02)


def _died(process: ProcessRecord, folders: TwinFolders) -> TwinError:
    """The error for a daemon that ended: its own last words are the best there is."""
    words = ""
    for suffix in (".out", ".log"):
        with contextlib.suppress(OSError):
            lines = (
                (folders.logs / f"{process.name}{suffix}")
                .read_text(errors="replace")
                .strip()
                .splitlines()
            )
            chosen = [
                line for line in lines if re.search(r"error|fatal", line, re.IGNORECASE)
            ] or lines
            words = words or (chosen[-1].strip() if chosen else "")
    return TwinError(
        f"{process.name} ended at once: {words or 'it left no message'}; logs are in {folders.logs}"
    )


def _keep(folders: TwinFolders) -> Path:
    """Move the logs beside the twin's folder, which is about to go."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    target = folders.root.parent / f"{folders.root.name}-logs-{stamp}-{secrets.token_hex(2)}"
    folders.logs.rename(target)
    return target


def _resident_megabytes(records: tuple[ProcessRecord, ...]) -> int:
    total = 0
    for record in records:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(record.pid).memory_info().rss
    return total // 2**20
