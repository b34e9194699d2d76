"""`python -m trainer.checkpoint REQUEST`: look at checkpoints and turn them into others, for
`tr11 checkpoints`, which says in one JSON object what to do.

The result goes to stdout, as text or as one JSON object; progress and refusals go to
stderr.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from trainer.contract.attempt import hear_signals, read_command_request
from trainer.contract.errors import Tr11Error

EXIT_FINE = 0
EXIT_NEEDS_PERSON = 1
EXIT_UNOBSERVED = 3

SCHEMA = 1
# The command's name and its module: `import` is a word that no module's name can be.
COMMANDS = {
    "inspect": "trainer.checkpoint.commands.inspect",
    "diff": "trainer.debug.diff_command",
    "export": "trainer.checkpoint.commands.export",
    "import": "trainer.checkpoint.commands.import_",
    "reshape": "trainer.checkpoint.commands.reshape",
    "values": "trainer.checkpoint.commands.values",
}
# What a file system says when it cannot answer, as against a file that is not there or a disk that
# is full.
_SILENCE = {
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ENODEV,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe; a
    refusal is one line.

    `TR11_DEBUG=1` shows the traceback of a refusal as well.
    """
    as_json = False
    try:
        hear_signals()
        options = read_command_request(sys.argv[1:] if arguments is None else arguments)
        as_json = options.as_json
        # which loads torch; what it holds: see `trainer.checkpoint.commands`
        command = importlib.import_module(COMMANDS[options.command])
        result = command.run(options)
        if as_json:
            shown = json.dumps({"schema": SCHEMA, **result}, ensure_ascii=False)
        else:
            shown = command.describe(result)
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader is gone: say nothing more to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NEEDS_PERSON
    except (Exception, KeyboardInterrupt) as error:
        return _refuse(error, as_json)
    judge = getattr(command, "exit_code", None)
    if judge is not None:
        return int(judge(result))
    return EXIT_FINE


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the one line for an error."""
    if isinstance(error, Tr11Error):
        return error.exit_code, " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return EXIT_NEEDS_PERSON, "stopped; nothing was left half-written"
    if isinstance(error, OSError):
        place = ""
        if error.filename:
            place = f"{error.filename}: "
        code = EXIT_UNOBSERVED if error.errno in _SILENCE else EXIT_NEEDS_PERSON
        return code, f"{place}{error.strerror or error}"
    words = " ".join(str(error).split())
    text = f"an error of tr11 itself: {type(error).__name__}: {words} (TR11_DEBUG=1 shows where)"
    return EXIT_NEEDS_PERSON, text


def _refuse(error: BaseException, as_json: bool) -> int:
    code, text = explain(error)
    if os.environ.get("TR11_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"tr11: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "error": {"exit_code": code, "lines": [text]}}))
    return code


if __name__ == "__main__":
    sys.exit(main())
