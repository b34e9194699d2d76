"""Optional accounting of a twin: a private MariaDB behind a socket, and slurmdbd before it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from tr11ops.base.errors import TwinError
from tr11ops.twin.plan import TwinFolders
from tr11ops.twin.processes import ProcessRecord, spawn

ACCOUNT = "tr11"  # of the user who starts the twin
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
INSTALL_FIX = "apt-get install slurmdbd mariadb-server, or leave --accounting out"


def start_database(
    programs: Mapping[str, str], folders: TwinFolders, user: str, environment: Mapping[str, str]
) -> ProcessRecord:
    """Make an empty database in the twin's folder and start its server, which listens on a socket
    only.
    """
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
    programs: Mapping[str, str], folders: TwinFolders, environment: Mapping[str, str]
) -> ProcessRecord:
    """Start slurmdbd on its private port."""
    # Slurm has no key for the database's socket; the client library takes it from the environment
    with_socket = {**environment, "MYSQL_UNIX_PORT": str(folders.database_socket)}
    return spawn(folders, "slurmdbd", [programs["slurmdbd"], "-D"], with_socket)


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
