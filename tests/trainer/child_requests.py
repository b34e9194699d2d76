"""What `tr11 data` and `tr11 checkpoints` have the trainer do for a command line, without a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from typer.exceptions import TyperException

from tr11ops.cli.main import load
from tr11ops.cli.trainer_child import child_request
from trainer.checkpoint.__main__ import main


def request_of(group: str, words: Sequence[object]) -> str:
    """What the child of `tr11 GROUP WORDS` is asked for. Of a run it has places and the resolved
    card alone: `--card FILE` among the words. Raises TyperException.
    """
    name, *rest = map(str, words)
    card = None
    if "--card" in rest:
        at = rest.index("--card")
        card = rest[at + 1]
        del rest[at : at + 2]
    commands: Any = load(group)
    context = commands.commands[name].make_context(name, rest)
    place = context.params.get("step")
    return child_request(context, card=card, place=place, replicas=None)


def checkpoints(*words: object) -> int:
    """The work of the child of `tr11 checkpoints WORDS`, in this process."""
    try:
        return main([request_of("checkpoints", words)])
    except TyperException as error:
        print(f"tr11: {error.format_message()}", file=sys.stderr)
        return 2
