"""The libraries that are measured against and that the project itself does not need: an environment
of their own.

It lies inside the project's virtual environment, sees that one's packages, and is made at its first
use.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# with its compiled helpers; what it needs of others is here already
PEERS = ("megatron-core==0.16.1",)


def peers_python() -> str | None:
    """The interpreter that has the peers; None, after one line of complaint, when they cannot be
    installed.
    """
    folder = Path(sys.prefix) / "peers"
    python = folder / "bin" / "python"
    ready = folder / ".installed"
    if ready.exists() and ready.read_text() == "\n".join(PEERS):
        return str(python)
    print(f"installing {', '.join(PEERS)} into {folder}, for comparison alone", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        *PEERS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(
            f"they could not be installed, so nothing is compared with them: {reason}", flush=True
        )
        return None
    ready.write_text("\n".join(PEERS))
    return str(python)
