"""Whether a machine has what `model.compile_blocks` needs. For the trainer and those who launch it; free of torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable

CPU_COMPILERS, STUB_COMPILERS = ("g++", "clang++"), ("cc", "gcc", "clang")
INSTALL_IT = "install it, or set model.compile_blocks = false"


def compiler_obstacle(device_type: str) -> str | None:
    """What this machine lacks to compile for `device_type`; None when nothing is missing."""
    if device_type == "cpu":
        found = _first_program(os.environ.get("CXX"), CPU_COMPILERS)
        return None if found else f"no C++ compiler is on this node: {_list(CPU_COMPILERS)}, or $CXX"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    found = _first_program(os.environ.get("CC"), STUB_COMPILERS)
    return None if found else f"triton needs a C compiler, and none is on this node: {_list(STUB_COMPILERS)}, or $CC"


def _first_program(chosen: str | None, usual: Iterable[str]) -> str | None:
    candidates = [chosen] if chosen else usual
    return next((found for name in candidates if (found := shutil.which(name.split()[0]))), None)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
