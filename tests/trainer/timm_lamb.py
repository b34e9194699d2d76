"""timm's LAMB, to compare with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def timm_lamb() -> Any:
    """timm's class. The package's own start needs torchvision, which has no build for this torch."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name, folder in (("timm", root), ("timm.optim", root / "optim")):
        bare = types.ModuleType(name)
        bare.__path__ = [str(folder)]
        sys.modules[name] = bare
    try:
        return importlib.import_module("timm.optim.lamb").Lamb
    finally:
        for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
            del sys.modules[name]
