"""What the optimizers were called in the large-batch trainer, and the card's keys that mean the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

OLD_NAMES: Mapping[str, Mapping[str, str]] = {
    "ptadamw": {"type": "adamw"},
    "mylamb": {"type": "lamb", "lamb_variant": "floored"},
    "mylamb2": {"type": "lamb", "lamb_variant": "layer-noise"},
    "mylamb3": {"type": "lamb", "lamb_variant": "embedding-lr"},
    "lambtp": {"type": "lamb", "lamb_variant": "paper", "lamb_norms": "local"},
}
_FREE = "lamb_norms"  # `lambtp` had four ways of taking norms, of which `local` was the default


def with_new_names(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of [optimizer] with an old name of its type replaced; all others as they are.

    Raises PydanticCustomError where a key beside it says otherwise.
    """
    old = section.get("type")
    keys = None
    if isinstance(old, str):
        keys = OLD_NAMES.get(old)
    if keys is None:
        return section
    for key, value in keys.items():
        if key not in {"type", _FREE} and section.get(key, value) != value:
            fix = {"fix": f'leave {key} out, or write type = "{keys["type"]}"'}
            raise PydanticCustomError(
                "old_name", f'type = "{old}" means {key} = "{value}", not "{section[key]}"', fix
            )
    return {**keys, **section, "type": keys["type"]}
