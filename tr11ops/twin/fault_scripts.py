"""Faults of a script that the card's set-up sources: its text is another one until it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.plan import TwinFolders
from trainer.contract.files import write_atomically

KEPT = ".before-fault"
TEXTS: Mapping[str, str] = {
    "setup-fails": 'echo "module: cuda/11.4 is not known to this site any more" >&2\nreturn 1\n',
    "setup-hangs": 'echo "waiting for the licence server"\nsleep 86400\n',
    "setup-breaks-python": "export PATH=/nowhere PYTHONHOME=/nowhere\n",
}


def check_script(text: str, folders: TwinFolders) -> Path:
    """The script that a fault may change. Raises TwinError for what is no file of a person's own."""
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise TwinError(
            f"--path {text!r}: give a script's whole path: the one that slurm.setup sources"
        )
    if not path.is_file() or path.is_symlink():
        raise TwinError(f"--path {text}: is not a plain file")
    if folders.root.resolve() in path.resolve().parents:
        raise TwinError(f"--path {text}: is the twin's own")
    return path


def spoil_script(fault: InjectedFault) -> None:
    """Keep the script beside itself, and put another text in its place."""
    path = Path(fault.target)
    kept = path.with_name(path.name + KEPT)
    if kept.exists():
        raise TwinError(f"{kept} is there: an earlier fault of this script was not healed")
    write_atomically(kept, path.read_text(encoding="utf-8"))
    write_atomically(path, TEXTS[fault.kind])


def restore_script(fault: InjectedFault) -> bool:
    """Put the script back; False when it was there already."""
    path = Path(fault.target)
    kept = path.with_name(path.name + KEPT)
    if not kept.exists():
        return False
    kept.replace(path)
    return True
