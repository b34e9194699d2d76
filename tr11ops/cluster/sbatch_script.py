"""What every batch script is made with: where its code is, the template engine."""

from __future__ import annotations

import shlex
import site
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.shipped import read_shipped

if TYPE_CHECKING:
    import jinja2


def code_root() -> Path | None:
    """The folder that Python must be told of to import tr11; None where it is installed."""
    root = Path(__file__).resolve().parent.parent.parent
    installed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
        *site.getsitepackages(),
    }
    if str(root) in {str(Path(path).resolve()) for path in installed if path}:
        return None
    return root


def _shared_part(name: str) -> str:
    return read_shipped("slurm", name)


def script_engine() -> jinja2.Environment:
    """The template engine of scripts: what is undefined is an error, and `| sh` quotes a value for
    the shell.

    `{% include NAME %}` takes in a part that scripts share, from slurm/.
    """
    import jinja2  # here: most commands that may submit do not

    engine = jinja2.Environment(
        loader=jinja2.FunctionLoader(_shared_part),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    engine.filters["sh"] = shlex.quote
    return engine
