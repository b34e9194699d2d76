"""Files of the Hugging Face hub by id, such as `bigscience/bloom`: from the cache on disk, else by
the hub's client.

The cache is read without the client, which takes a second to import: OWNER/NAME is
`models--OWNER--NAME` there, whose `refs/main` names the snapshot in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.contract.errors import HubFileError
from trainer.contract.units import shortened


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where the hub's client keeps files, by its own variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return Path(environment[name]).expanduser()
    general = (
        environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME') or Path.home()}/.cache"
    )
    return Path(environment.get("HF_HOME") or f"{general}/huggingface").expanduser() / "hub"


def cached_file(hub_id: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """A file of the snapshot in use, None when the cache has none. Raises OSError when it cannot be
    looked at.
    """
    folder = cache_folder(environment) / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    path = folder / "snapshots" / commit / name
    if commit and path.is_file():
        return path
    return None


def fetch_command(hub_id: str, names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """What a person types, where there is internet, to have files in that cache."""
    return f"HF_HUB_CACHE={cache_folder(environment)} hf download {hub_id} {' '.join(names)}"


def hub_file(hub_id: str, names: tuple[str, ...], environment: Mapping[str, str]) -> Path:
    """The first of `names`, which must be there; the others are fetched with it where the hub has
    them.

    The cache goes first, so nothing is asked for twice, and nothing at all where $HF_HUB_OFFLINE or
    $TRANSFORMERS_OFFLINE is set. Raises HubFileError.
    """
    found = cached_file(hub_id, names[0], environment)
    if found is not None:
        return found
    why = "this machine is told to be offline"
    if not any(
        environment.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(hub_id, names[0], cache_dir=cache_folder(environment)))
            for name in names[1:]:
                _fetch_if_there(hub_id, name, environment)
        except (
            Exception
        ) as error:  # the client's own, the network's, the file system's: one answer to all
            why = f"the hub gave none ({shortened(' '.join(str(error).split()), 160)})"
        else:
            return path
    raise HubFileError(
        f"{hub_id}: its {names[0]} is not in {cache_folder(environment)}, and {why}; where there is internet, type"
        f" `{fetch_command(hub_id, names, environment)}`"
    )


_TRUE = {"1", "true", "yes", "on"}


def _fetch_if_there(hub_id: str, name: str, environment: Mapping[str, str]) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(hub_id, name, cache_dir=cache_folder(environment))
    except EntryNotFoundError:
        return
