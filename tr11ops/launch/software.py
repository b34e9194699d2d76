"""Which software this machine would run: versions, and the commit and changes of the trainer's own
checkout.

Nothing is imported for it, and nothing is changed: what cannot be told is "unknown", what is not
there is "none".
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tr11ops import __version__
from tr11ops.base.observed import cause
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.hub.masking import Masks, MaskSearch
from tr11ops.runcard.card import ForeignCard, RunCard
from tr11ops.rundir.attempts import PATCH_FILE, CodeIdentity
from tr11ops.trainers.start import interpreter_of
from trainer.contract.documents import document
from trainer.contract.files import write_atomically

PACKAGES = ("torch", "deepspeed", "numpy", "transformers")
# with which another trainer may compute, beside those
FOREIGN_PACKAGES = ("accelerate", "lightning", "megatron-core", "torchtitan")
INTERPRETER_SECONDS = 20.0  # of another trainer's interpreter, to say where its packages lie
NOT_INSTALLED = "not installed"
NONE = "none"
UNKNOWN = "unknown"
DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
PATCH_BYTES = 256 << 10  # of the changes that are kept
READ_BYTES = 8 << 20  # of the changes that are read at all
NEW_FILE_BYTES = 64 << 10  # a new file that is longer is only named
NEW_FILES = 50  # that are looked into
CODE_SUFFIXES = {".py", ".pyi", ".toml", ".sh", ".c", ".cc", ".cpp", ".cu", ".h"}
NAMED = 20
GIT_SECONDS = 10.0  # for all questions to git together: the start of an attempt waits for them
# A checkout of a colleague is asked as well, for its code is run anyway; but nothing of its
# settings is.
_GIT = (
    "git",
    "-c",
    "safe.directory=*",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)


def software_of(card: RunCard, attempt: Path) -> dict[str, Any]:
    """What an attempt's record says of its software: versions, and the code that it trains with; of
    another trainer its own, not tr11's.
    """
    directory = card.settings.directory if isinstance(card, ForeignCard) else ""
    code = identify_code(attempt, directory)
    versions = versions_for(card)
    record: dict[str, Any] = {"versions": versions, "code": document(code)}
    if "python" in versions:  # where it stood before versions had it, for those who read it there
        record["python"] = versions["python"]
    return record


def versions_for(card: RunCard) -> dict[str, str]:
    """Versions of what a training runs with: another trainer's own, as far as they are known."""
    if isinstance(card, ForeignCard):
        return foreign_versions(card.settings)
    return {**software_versions(), "python": platform.python_version()}


# ----------------------------------------------------------------------------- versions
def software_versions() -> dict[str, str]:
    """Versions of tr11 and of what it trains with, and of what torch was built for; the driver is
    this machine's.
    """
    return {"tr11": __version__, **_installed_in(sys.path, PACKAGES), "driver": _driver()}


def foreign_versions(settings: TrainerSettings) -> dict[str, str]:
    """Versions of tr11 and of what another trainer's interpreter has installed, Python's too; only of
    tr11 and the driver where it is not known which interpreter that is, or it does not answer.
    """
    ours = {"tr11": __version__, "driver": _driver()}
    python = interpreter_of(settings)
    if not python:
        return ours
    try:
        asked = subprocess.run(
            [python, "-c", _ASKED],
            cwd=settings.directory,
            env={**os.environ, **settings.environment},
            capture_output=True,
            check=True,
            timeout=INTERPRETER_SECONDS,
        )
        version, path = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ours
    found = _installed_in(path, (*PACKAGES, *FOREIGN_PACKAGES))
    there = {name: said for name, said in found.items() if said != NOT_INSTALLED}
    return {**ours, **there, "python": version}


_ASKED = "import json, platform, sys; print(json.dumps([platform.python_version(), sys.path]))"


def _installed_in(path: list[str], packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages, and what torch was built for, in an interpreter that looks there."""
    cuda = _built_for("cuda", path)
    return {
        **{name: _version(name, NOT_INSTALLED, path) for name in packages},
        "cuda": cuda,
        "nccl": _nccl(cuda, path),
    }


def _version(name: str, otherwise: str, path: list[str]) -> str:
    for found in metadata.distributions(name=name, path=path):
        return found.version
    return otherwise


def _built_for(toolkit: str, path: list[str]) -> str:
    """The version of CUDA that the installed torch was built for, by the file in which torch says
    it.
    """
    try:
        found = PathFinder.find_spec("torch", path)
        if found is None or found.origin is None:
            return NONE
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
        match = re.search(rf"^{toolkit}\b[^=\n]*= *(.+)$", text, re.MULTILINE)
        if match:
            value = ast.literal_eval(match[1])
        else:
            value = UNKNOWN
    except (OSError, ValueError, SyntaxError):
        return UNKNOWN
    if value is None:
        return NONE
    return str(value)


def _nccl(cuda: str, path: list[str]) -> str:
    """The NCCL that was installed for torch; unknown where torch brings its own."""
    if cuda == NONE:
        return NONE
    return _version(f"nvidia-nccl-cu{cuda.partition('.')[0]}", UNKNOWN, path)


def _driver() -> str:
    """The version of the GPUs' driver that this machine's kernel has loaded."""
    for path in DRIVER_FILES:
        try:
            return path.read_text(encoding="utf-8").strip() or UNKNOWN
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return UNKNOWN
    return NONE


# ----------------------------------------------------------------------------- the code
def code_folder() -> Path:
    """Where the trainer's package lies. Raises FileNotFoundError where it is no folder of files."""
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise FileNotFoundError("the trainer's package is not in a folder")
    return Path(found.origin).resolve().parent


def identify_code(attempt: Path, directory: str = "") -> CodeIdentity:
    """The code that this attempt runs: that of another trainer's directory, else tr11's own; what
    differs from its commit is kept in the attempt's folder.
    """
    try:
        package = Path(directory) if directory else code_folder()
    except OSError as error:
        return CodeIdentity(why=_in_words(error))
    try:
        found, changes = look_at_code(package, "." if directory else "__init__.py")
        if changes:
            write_atomically(attempt / PATCH_FILE, changes.decode("utf-8", errors="replace"))
        else:  # of an attempt that was requeued under the same number
            (attempt / PATCH_FILE).unlink(missing_ok=True)
        return found
    except (OSError, subprocess.SubprocessError) as error:
        installed = _installed(package)  # as in an image without git
        if installed.commit and not directory:
            return installed
        return CodeIdentity(str(package), why=_in_words(error))


def look_at_code(package: Path, member: str = "__init__.py") -> tuple[CodeIdentity, bytes]:
    """The identity of the code in the folder of a package, and what of its changes is to be kept;
    `member`: what a checkout that it is of has to track there.

    Raises OSError and subprocess.SubprocessError where git is not there, or does not answer in
    time.
    """
    git = _Git(package)
    tracked = git.ask("ls-files", "--error-unmatch", "--", member)
    if tracked is None and member != "__init__.py":
        return CodeIdentity(str(package), why="no git repository tracks its folder"), b""
    if tracked is None:
        return _installed(package), b""
    top = git.text("rev-parse", "--show-toplevel")
    commit = git.text("rev-parse", "--verify", "HEAD")
    if not commit:
        return CodeIdentity(str(package), why=f"{top} has no commit yet"), b""
    branch = git.text("symbolic-ref", "--short", "-q", "HEAD")
    whole = _Git(Path(top), git.deadline)
    edited = whole.names("diff", "--name-only", "-z", "HEAD", "--")
    new = whole.names("ls-files", "--others", "--exclude-standard", "-z")
    if not edited and not new:
        return CodeIdentity(top, commit, branch), b""
    changes = whole.ask("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--") or b""
    changes += b"".join(_as_patch(Path(top), name) for name in new[:NEW_FILES])
    kept = _without_secrets(changes)
    is_cut = len(kept) > PATCH_BYTES or len(changes) >= READ_BYTES or len(new) > NEW_FILES
    kept = _whole_lines(kept)
    names = (*edited, *new)
    return CodeIdentity(
        folder=top,
        commit=commit,
        branch=branch,
        changed=names[:NAMED],
        changed_count=len(names),
        digest=hashlib.sha256(changes).hexdigest(),
        patch=PATCH_FILE if kept else "",
        is_cut=is_cut,
    ), kept


def _installed(package: Path) -> CodeIdentity:
    """The code of a package that no checkout tracks: its commit, where it was installed from one."""
    told: dict[str, object] = {}
    with suppress(metadata.PackageNotFoundError, ValueError):
        told = json.loads(metadata.distribution("tr11").read_text("direct_url.json") or "{}").get(
            "vcs_info", {}
        )
    commit = str(told.get("commit_id", ""))
    if commit:
        why = ""
    else:
        why = f"installed as a package, tr11 {__version__}, from no checkout"
    return CodeIdentity(str(package), commit, str(told.get("requested_revision", "")), why=why)


def _as_patch(top: Path, name: str) -> bytes:
    """A new file as a patch that makes it; what is no short text of a program is only named, with
    its size.
    """
    path = top / name
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n".encode(errors="replace")
    try:
        size = path.stat().st_size
        if path.suffix not in CODE_SUFFIXES or not path.is_file() or size > NEW_FILE_BYTES:
            return head + f"(not kept: {size} bytes)\n".encode()
        content = path.read_bytes()
    except OSError as error:
        return head + f"(not readable: {cause(error)})\n".encode()
    lines = content.splitlines(keepends=True)
    if not lines or lines[-1].endswith(b"\n"):
        ending = b""
    else:
        ending = b"\n\\ No newline at end of file\n"
    body = b"".join(b"+" + line for line in lines)
    return (
        head
        + f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n".encode(errors="replace")
        + body
        + ending
    )


def _without_secrets(changes: bytes) -> bytes:
    search = MaskSearch(is_events=False)
    search.take(changes)
    return Masks(search.masks).over(changes, 0)


def _whole_lines(kept: bytes) -> bytes:
    if len(kept) <= PATCH_BYTES:
        return kept
    return kept[: kept.rfind(b"\n", 0, PATCH_BYTES) + 1]


def _in_words(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not answer within {GIT_SECONDS:g} s"
    if isinstance(error, FileNotFoundError) and error.filename == "git":
        return "git is not installed on this machine"
    return cause(error)


class _Git:
    """Questions to git about one folder; they change nothing there, and take no longer than the
    deadline together.

    `deadline` is of the monotonic clock; default: GIT_SECONDS from now.
    """

    def __init__(self, folder: Path, deadline: float | None = None) -> None:
        self._folder = folder
        if deadline is None:
            self.deadline = time.monotonic() + GIT_SECONDS
        else:
            self.deadline = deadline

    def ask(self, *words: str) -> bytes | None:
        """The first READ_BYTES of an answer; None where git refuses. Raises OSError,
        SubprocessError.
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        process = subprocess.Popen(
            [*_GIT, "-C", str(self._folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**own, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
        assert process.stdout is not None
        try:
            answer = self._read(process.stdout.fileno(), process.args)
            if len(answer) >= READ_BYTES:
                return answer[:READ_BYTES]
            if process.wait(self._left()) == 0:
                return answer
            return None
        finally:
            # and is not waited for: on a dead file system it ends when that comes back
            process.kill()
            process.stdout.close()

    def _read(self, answers: int, words: object) -> bytes:
        answer = bytearray()
        while len(answer) < READ_BYTES:
            ready, _, _ = select.select([answers], [], [], self._left())
            if not ready:
                raise subprocess.TimeoutExpired(str(words), GIT_SECONDS)
            part = os.read(answers, 1 << 16)
            if not part:
                break
            answer += part
        return bytes(answer)

    def _left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def text(self, *words: str) -> str:
        """A short answer; "" where git refuses."""
        return (self.ask(*words) or b"").decode(errors="replace").strip()

    def names(self, *words: str) -> tuple[str, ...]:
        """Names of files that were told apart by zero bytes."""
        return tuple(
            name for name in (self.ask(*words) or b"").decode(errors="replace").split("\0") if name
        )
