"""A virtual environment with the base install alone: the wheel of this checkout and what it depends on, for one of
the Pythons that tr11 supports.

The newest that is here is tried by `make test`, all by TR11_BASE_PYTHONS=all (`make base-pythons`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.14", "3.13", "3.12", "3.11")
ALL = os.environ.get("TR11_BASE_PYTHONS") == "all"
# what the tests that run inside need, beside the base
TOOLS = (
    "pytest>=8.3",
    "hypothesis>=6.120",
    "time-machine>=3.6",
    "pytest-timeout>=2.3",
    "aiosmtpd>=1.4",
)
# what a test reads of a checkout, but for the code
BESIDE = ("tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
SECONDS = 300


def interpreter(version: str) -> Path | None:
    """A Python of this version on this machine; None where there is none."""
    name = f"python{version}"
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(name), *sorted(kept.glob(f"{version}.*/bin/{name}"))]
    for place in filter(None, places):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:  # pyenv's stand-in for one that is not chosen fails
            return Path(place)
    return None


def chosen_one() -> str:
    """The newest that is here, or the newest of all where none is."""
    return next(filter(interpreter, VERSIONS), VERSIONS[0])


def chosen() -> tuple[str, ...]:
    """The versions to try: all, or the newest that is here."""
    if ALL:
        return VERSIONS
    return (chosen_one(),)


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, as `pip install` would build it."""
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [wheel] = folder.glob("tr11-*.whl")
    return wheel


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


class BaseInstall:
    """The environment, in `folder`. `tree` is a checkout without its code: what is imported there is
    the wheel's.
    """

    def __init__(self, version: str, python: Path, wheel: Path, folder: Path) -> None:
        self.version = version
        self.folder = folder
        self.tree = folder / "tree"
        venv = folder / "venv"
        subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True, timeout=SECONDS)
        self.bin = venv / "bin"
        _pip("--python", str(self.bin / "python"), "install", "--no-compile", str(wheel), *TOOLS)
        self.tree.mkdir()
        for name in BESIDE:
            (self.tree / name).symlink_to(ROOT / name)

    def run(
        self, words: Sequence[str], place: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in a folder, with nothing of the environment around it but what is given."""
        kept = {
            name: os.environ[name]
            for name in ("PATH", "HOME", "LANG", "TMPDIR")
            if name in os.environ
        }
        kept["PATH"] = os.pathsep.join([str(self.bin), kept["PATH"]])
        own = {"TR11_LOCAL_NODES": "4", "TR11_LOCAL_SCHEDULER": str(self.folder / "scheduler")}
        return subprocess.run(
            [self.bin / words[0], *words[1:]], cwd=place, env={**kept, **own, **(more or {})},
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False,
        )  # fmt: skip


def _pip(*words: str) -> None:
    """Raises RuntimeError with what pip said at last; where one is not asked for all, nor in CI, the test is skipped:
    there may be no network.
    """
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * SECONDS)
    if done.returncode:
        why = f"pip {words[0]}: {done.stderr.strip()[-500:]}"
        if ALL or os.environ.get("CI") == "true":
            raise RuntimeError(why)
        pytest.skip(why)
